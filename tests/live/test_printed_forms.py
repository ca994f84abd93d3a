"""Every command and configuration that is printed for others is one that the engine's version takes, and
that does what is said (tests/printed.py reads them)."""

from __future__ import annotations

import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from magicdec.errors import ConfigError, MagicdecError
from magicdec.live import options
from magicdec.live.check import Check, check_command
from magicdec.live.load import AskedLoad
from magicdec.naming import ENGINE_TITLES
from magicdec.perfmodel.planner import PlanRequest, make_plan
from magicdec.perfmodel.variations import Replanned, for_engine
from magicdec.reports.cost_check import write_cost_check
from magicdec.reports.exports import export
from magicdec.reports.sentences import next_line
from magicdec.specs.engine import load_engine
from magicdec.specs.serve_command import read_serve_command
from tests.printed import (
    faults_of_advice,
    faults_of_export,
    faults_of_shell,
    newest_with,
)

ROOT = Path(__file__).parents[2]
VERSION = {"vllm": "0.32.0", "sglang": "0.5.23", "trtllm": "1.2", "llama.cpp": "2026"}

PLANS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft": "eagle3"},
    "eagle3 of many": {"draft": "eagle3", "batch_sizes": (300,)},
    "eagle3, greedy": {"draft": "eagle3", "temperature": 0.0},
    "eagle": {"draft": "eagle"},
    "ngram": {"draft": "ngram", "acceptance_rate": 0.7},
    "draft model": {"draft": "llama-3.2-1b", "acceptance_rate": 0.8},
    "fp8 weights": {"draft": "eagle3", "weight_dtype": "fp8"},
    "int4 weights": {"draft": "none", "weight_dtype": "int4"},
    "dflash": {"model": "qwen3-8b", "draft": "dflash", "acceptance_rate": 0.7},
    "dspark": {"model": "qwen3-8b", "draft": "dspark", "acceptance_rate": 0.7},
    "p-eagle": {"model": "gpt-oss-20b", "draft": "p-eagle", "acceptance_rate": 0.7},
    "mtp": {"model": "deepseek-v3", "draft": "mtp", "tp_size": 8, "hardware": ("h200-sxm-141gb",)},
    "mtp of ranks": {
        "model": "deepseek-v3", "draft": "mtp", "acceptance_rate": 0.8, "hardware": ("h200-sxm-141gb",),
        "ep_size": 8, "dp_attention": True,
    },
    "a head of vLLM's own": {
        "model": "qwen3-30b-a3b", "draft": "dflash", "tp_size": 2, "hardware": ("h200-sxm-141gb",),
    },
    "a window": {"draft": "eagle", "draft_budgets": (512,), "context_lens": (16_384,)},
}  # fmt: skip
WIDE = {
    f"{model}, {draft}, {batch} users, {temperature:g}": {
        "model": model, "draft": draft, "batch_sizes": (batch,), "temperature": temperature,
        "acceptance_rate": 0.75, "tp_size": 2,
    }
    for model in ("qwen3-32b", "qwen3-30b-a3b", "llama-3.1-8b")
    for draft in ("eagle3", "eagle", "ngram", "dflash", "dspark", "qwen3-0.6b")
    for batch in (1, 33, 300)
    for temperature in (0.0, 1.0)
}  # fmt: skip
"""The product that the fast cases sample."""


@cache
def exported(asked: str, engine: str) -> Replanned:
    case: dict[str, Any] = {
        "model": "llama-3.1-8b", "hardware": ("h100-sxm-80gb",), "context_lens": (1024,), "batch_sizes": (4,)
    }  # fmt: skip
    case |= (PLANS | WIDE)[asked]
    try:
        document = make_plan(PlanRequest(engine=engine, **case))
    except ConfigError as error:
        pytest.skip(f"{engine}: {error}")
    fitting = [row for row in document.candidates if row.fits]
    if fitting:
        choice = document.choosing(fitting[0])
        document = msgspec.structs.replace(document, choice=choice)
    return for_engine(document, engine)


def assert_exported(asked: str, engine: str) -> None:
    again = exported(asked, engine)
    text = export(engine, again.plan, reason=again.reason, site=again.site)
    assert faults_of_export(engine, VERSION[engine], text) == [], text


def refusal(words: list[str]) -> str:
    """A `magicdec` command's error, without a process of its own."""
    register_commands(words[0])
    result = CliRunner().invoke(app, words)
    return f"{result.exception or ''} {result.output}"


@pytest.mark.parametrize("engine", ENGINE_TITLES)
@pytest.mark.parametrize("asked", PLANS)
def test_an_export_is_taken_by_its_engine(asked: str, engine: str) -> None:
    assert_exported(asked, engine)


SAID = {
    ("fp8 weights", "vllm"): ("--quantization fp8", "YOUR-"),
    ("fp8 weights", "sglang"): ("--quantization fp8", "YOUR-"),
    ("fp8 weights", "trtllm"): ("trtllm-serve YOUR-FP8-CHECKPOINT-OF-llama-3.1-8b", "quantization"),
    ("int4 weights", "vllm"): ("vllm serve YOUR-INT4-CHECKPOINT-OF-llama-3.1-8b", "--quantization"),
    ("dflash", "vllm"): ("Qwen3-8B-DFlash", "placeholder"),
    ("dflash", "sglang"): ("Qwen3-8B-DFlash", "rejection-sampling"),
    ("dspark", "sglang"): ("--speculative-num-draft-tokens 8", "rejection-sampling"),
    ("eagle3", "sglang"): ("rejection sampling", "--speculative-use-rejection-sampling"),
    ("eagle", "sglang"): ("--speculative-use-rejection-sampling", "Not supported for this draft: rej"),
    ("eagle3", "trtllm"): ("  allow_advanced_sampling: true", "draft_len_schedule:"),
    ("eagle3, greedy", "trtllm"): ("max_draft_len", "allow_advanced_sampling"),
    ("eagle3 of many", "sglang"): ("--cuda-graph-max-bs-decode 300", "--cuda-graph-max-bs 300"),
    ("mtp of ranks", "sglang"): ("--enable-dp-attention", "gamma.json"),
    ("a head of vLLM's own", "vllm"): ("speculator.dflash", "placeholder"),
    ("a head of vLLM's own", "sglang"): ("is a placeholder", "--speculative-draft-model-path RedHatAI"),
    ("a window", "sglang"): ("--speculative-draft-attention-backend triton", "placeholder"),
}  # fmt: skip
"""A text that an export has, and one that it has not."""


@pytest.mark.parametrize(("asked", "engine"), SAID)
def test_an_export_does_what_is_said(asked: str, engine: str) -> None:
    again = exported(asked, engine)
    text = export(engine, again.plan, site=again.site)
    there, elsewhere = SAID[asked, engine]
    assert there in text
    assert elsewhere not in text


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINE_TITLES)
@pytest.mark.parametrize("asked", WIDE)
def test_every_export_is_taken_by_its_engine(asked: str, engine: str) -> None:
    assert_exported(asked, engine)


@pytest.mark.parametrize("engine", ENGINE_TITLES)
@pytest.mark.parametrize("asked", ["eagle3", "ngram", "mtp", "dspark"])
def test_a_check_of_costs_is_taken_by_its_engine(asked: str, engine: str) -> None:
    """Each of its servers, and its own last command as far as it goes without results."""
    again = exported(asked, engine)
    if not again.plan.best.is_speculative:
        pytest.skip("no draft there")
    tokens = {1: 1.7, again.plan.best.gamma: 2.4}
    text = write_cost_check(
        engine, again.plan, tokens, plan_file="it's.json", site=again.site
    )
    *servers, last = re.split(r"^# (?=\d+\. |Read the)", text, flags=re.MULTILINE)
    arms = (
        {again.plan.best.gamma} if (asked, engine) == ("dspark", "sglang") else tokens
    )
    assert len(servers) == 2 + len(arms)
    assert list(faults_of_shell(text)) == []
    for server in servers[1:]:
        settings = server.partition("\n")[2].partition("# Then,")[0]
        assert faults_of_export(engine, VERSION[engine], settings) == [], settings
    words = shlex.split(last.splitlines()[-1])
    assert words[:2] == ["magicdec", "calibrate"]
    assert "cost-plain.json" in refusal(words[1:]), (
        "the command is read; there are no results"
    )


# What is advised
# --------------------------------------------------------------------------------------------------

CASES = [
    case
    for case in tomllib.loads((ROOT / "tests/data/serve_commands.toml").read_text())[
        "command"
    ]
    if "is" in case
]
EAGLE3 = '"model": "AngelSlim/Qwen3-8B_eagle3", "num_speculative_tokens"'
ADVISED = {
    "few graphs": "vllm serve Qwen/Qwen3-8B --max-cudagraph-capture-size 16 --max-num-seqs 100",
    "few graphs, 0.11": "docker run vllm/vllm-openai:v0.11.0 --model Qwen/Qwen3-8B --cuda-graph-sizes 16",
    "a list of graphs": "vllm serve Qwen/Qwen3-8B --cudagraph-capture-sizes 1 2 4",
    "no table, 0.20": "docker run vllm/vllm-openai:v0.20.0 --model Qwen/Qwen3-8B --speculative-config "
                      f"'{{\"method\": \"eagle3\", {EAGLE3}: 3}}'",
    "a table": f"vllm serve Qwen/Qwen3-8B --speculative-config '{{\"method\": \"eagle3\", {EAGLE3}: 8}}'",
    "ranks": "vllm serve Qwen/Qwen3-8B -dp 2 --max-num-seqs 32 --speculative-config "
             f"'{{\"method\": \"eagle3\", {EAGLE3}: 8}}'",
    "an apostrophe": """vllm serve Qwen/Qwen3-8B --speculative-config '{"method": "eagle3", """
                     """"model": "/data/bob'"'"'s/eagle3", "num_speculative_tokens": 9}'""",
    "imposed": "vllm serve Qwen/Qwen3-8B --speculative-config '{\"method\": \"eagle3\", "
               f"{EAGLE3}: 3, \"rejection_sample_method\": \"synthetic\", \"synthetic_acceptance_length\": 2.1}}'",
    "sglang": "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --speculative-algorithm EAGLE3 "
              "--speculative-draft-model-path AngelSlim/Qwen3-8B_eagle3 --speculative-num-steps 7 "
              "--speculative-eagle-topk 1 --speculative-num-draft-tokens 8",
    "sglang, few graphs": "docker run lmsysorg/sglang:v0.5.23 python3 -m sglang.launch_server "
                          "--model-path Qwen/Qwen3-8B --cuda-graph-max-bs-decode 4",
    "sglang 0.5.18": "docker run lmsysorg/sglang:v0.5.18 python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B "
                     "--cuda-graph-max-bs 4 --disable-radix-cache --disable-overlap-schedule",
    "sglang 0.5.10": "docker run lmsysorg/sglang:v0.5.10 python3 -m sglang.launch_server --model-path "
                     "meta-llama/Llama-3.1-8B-Instruct --cuda-graph-max-bs 4",
    "dspark": "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --speculative-algorithm DSPARK "
              "--speculative-draft-model-path deepseek-ai/dspark_qwen3_8b_block7 --speculative-num-draft-tokens 8",
    "dflash": "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --speculative-algorithm DFLASH "
              "--speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16 --speculative-num-draft-tokens 16",
    "sglang ngram": "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --speculative-algorithm NGRAM "
                    "--speculative-num-draft-tokens 8",
    "no head known, 0.5.10": "docker run lmsysorg/sglang:v0.5.10 python3 -m sglang.launch_server --model-path "
                             "Qwen/Qwen3-1.7B",
    "maverick": "python -m sglang.launch_server --model-path meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8 --tp 8",
    "trtllm": "trtllm-serve Qwen/Qwen3-8B --max_batch_size 4",
    "trtllm mtp": "trtllm-serve deepseek-ai/DeepSeek-V3 --tp_size 8 --config c.yaml <<EOF\nEOF",
    "llama.cpp": "llama-server -m Qwen3-8B-Q8_0.gguf -md Qwen3-0.6B-Q8_0.gguf -ngl 99 --draft-max 16",
    "llama.cpp alone": "llama-server -m Qwen3-8B-Q8_0.gguf -ngl 99 --parallel 4",
    "llama.cpp, an old build": "docker run ghcr.io/ggml-org/llama.cpp:server-cuda-b6123 -m Qwen3-8B-Q8_0.gguf "
                               "-md Qwen3-0.6B-Q8_0.gguf --draft 16 -ngl 99",
    "llama.cpp ngram": "llama-server -m Qwen3-8B-Q8_0.gguf -ngl 99 --spec-type ngram-simple",
}  # fmt: skip


def checked(text: str, **load: Any) -> Check:
    command = read_serve_command(text)
    usual = {"batch": 16, "context_len": 2048} | load
    return check_command(command, AskedLoad(**usual))


def assert_advised(text: str, **load: Any) -> None:
    answer = checked(text, **load)
    command = answer.command
    version = command.version or ""
    if not version and command.engine in ENGINE_TITLES:
        version = newest_with(command.engine, command.read) or VERSION[command.engine]
    for change in answer.changes:
        assert faults_of_advice(command.engine, version, change.option, text) == [], (
            change
        )


FEW = (
    *("few graphs, 0.11", "a list of graphs", "no table, 0.20", "imposed", "an apostrophe", "dspark"),
    *("sglang 0.5.18", "no head known, 0.5.10", "trtllm mtp", "llama.cpp", "llama.cpp, an old build"),
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FEW else pytest.mark.slow)
        for name in ADVISED
    ],
)
def test_advice_is_taken_by_the_engines_version(name: str) -> None:
    assert_advised(ADVISED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ADVISED)
def test_advice_for_many_users_is_taken_by_the_engines_version(name: str) -> None:
    assert_advised(ADVISED[name], batch=100)


BY_VERSION = {
    "vllm": ("vllm/vllm-openai", ["0.11.0", "0.15.0", "0.20.0", "0.24.0", "0.32.0", "0.33.0"]),
    "sglang": ("lmsysorg/sglang", ["0.5.10", "0.5.13", "0.5.16", "0.5.18", "0.5.20", "0.5.23"]),
}  # fmt: skip
WITHOUT_DRAFT = {
    "vllm": "--model meta-llama/Llama-3.1-8B-Instruct",
    "sglang": "python3 -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct",
}


@pytest.mark.slow
@pytest.mark.parametrize("batch", [4, 300])
@pytest.mark.parametrize(
    ("engine", "version"),
    [
        (engine, version)
        for engine, (_, known) in BY_VERSION.items()
        for version in known
    ],
)
def test_drafts_advised_at_long_contexts_are_those_of_the_version(
    engine: str, version: str, batch: int
) -> None:
    """Where windows would gain, and where more is captured than by default."""
    image, _ = BY_VERSION[engine]
    text = f"docker run {image}:v{version} {WITHOUT_DRAFT[engine]}"
    assert_advised(text, batch=batch, context_len=65_536 // batch)
    assert_advised(text, batch=batch, context_len=65_536 // batch, hardware="b200")


SGLANG = (
    "python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B --speculative-algorithm"
)
VLLM = '--model Qwen/Qwen3-8B --speculative-config \'{"method": "eagle3", "num_speculative_tokens": 3}\''
FOLLOWS_BATCH = {
    f"vllm serve {VLLM.removeprefix('--model ')}": True,
    f"docker run vllm/vllm-openai:v0.24.0 {VLLM}": True,
    f"docker run vllm/vllm-openai:v0.20.0 {VLLM}": False,
    f"vllm serve {VLLM.removeprefix('--model ')} -dp 2": False,
    f"{SGLANG} EAGLE3 --speculative-num-steps 3": True,
    f"{SGLANG} EAGLE --speculative-num-steps 3": True,
    f"docker run lmsysorg/sglang:v0.5.16 {SGLANG} EAGLE --speculative-num-steps 3": True,
    f"docker run lmsysorg/sglang:v0.5.13 {SGLANG} EAGLE --speculative-num-steps 3": False,
    f"{SGLANG} EAGLE3 --speculative-num-steps 3 --enable-dp-attention --dp-size 2": False,
    f"{SGLANG} NGRAM --speculative-num-draft-tokens 8": False,
    f"{SGLANG} DFLASH --speculative-num-draft-tokens 16": False,
    f"{SGLANG} STANDALONE --speculative-draft-model-path Qwen/Qwen3-0.6B": False,
    "llama-server -m Qwen3-8B-Q8_0.gguf -md Qwen3-0.6B-Q8_0.gguf -ngl 99": False,
    "trtllm-serve Qwen/Qwen3-8B --config engine.yaml": True,
    "trtllm-serve Qwen/Qwen3-8B --config engine.yaml # MTP": False,
}
"""Whether the engine's version has gamma follow the batch with the draft and these options."""


@pytest.mark.parametrize("text", FOLLOWS_BATCH)
def test_every_setting_is_taken_by_the_engines_version(
    text: str, tmp_path: Path
) -> None:
    """Another gamma, gamma by batch where the engine follows it, graphs, users at once."""
    sort = "MTP" if "MTP" in text else "NGram"
    file = f"speculative_config: {{decoding_type: {sort}, max_draft_len: 3}}\n"
    (tmp_path / "engine.yaml").write_text(file)
    command = read_serve_command(text, folder=tmp_path)
    assert command.speculation is not None
    table = options.table_option(command, {1: 5, 16: 3}, 4096)
    assert bool(table) == FOLLOWS_BATCH[text]
    settings = [
        options.gamma_option(command, 4),
        options.batch_option(command, 64),
        table,
    ]
    if command.engine != "llama.cpp":
        settings.append(options.captured_option(command, 1089))
    version = command.version or VERSION[command.engine]
    for setting in filter(None, settings):
        assert faults_of_advice(command.engine, version, setting, text) == [], setting
    if command.engine == "vllm":
        assert "--max-cudagraph-capture-size 1104" in settings, "sizes step by 16"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_advice_on_public_commands_is_taken_by_the_engines_version(
    case: dict[str, Any],
) -> None:
    try:
        assert_advised(case["text"])
    except MagicdecError:
        pytest.skip("not planned for")


@pytest.mark.parametrize(
    ("engine", "model", "is_listed"),
    [
        ("trtllm", "qwen3.5-9b", False),
        ("trtllm", "qwen3-8b", True),
        ("vllm", "qwen3.5-9b", True),
    ],
)
def test_a_model_that_an_engine_does_not_list_is_noted(
    engine: str, model: str, is_listed: bool
) -> None:
    plan = make_plan(
        PlanRequest(
            engine=engine, model=model, draft="none", hardware=("h100-sxm-80gb",)
        )
    )
    again = for_engine(plan, engine)
    text = export(engine, again.plan, site=again.site)
    assert ("list of models" not in " ".join(text.split())) == is_listed


# What is to be done next
# --------------------------------------------------------------------------------------------------

NEXT: dict[str, dict[str, Any]] = {
    "ngram": {"draft": "ngram"},
    "a draft model": {"draft": "llama-3.2-1b"},
    "a head": {"draft": "eagle3"},
    "itself": {"draft": "self", "draft_method": "streamingllm"},
    "itself, here": {"draft": "self", "draft_method": "snapkv", "engine": "ours"},
}
STOPS = {
    "ngram": "read 40 requests",
    "a draft model": "there are no weights for llama-3.2-1b here",
}
"""How far a command comes without a server or a checkpoint; the others as far as a connection."""
HERE = {
    "requests.jsonl": str(ROOT / "docs/samples/requests.jsonl"),
    "path/to/tokenizer.json": str(ROOT / "magicdec/data/embedded/tokenizer.json"),
    "http://localhost:8000": "http://localhost:9",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in STOPS else ())
        for name in NEXT
    ],
)
def test_the_command_that_measures_a_draft_runs_to_its_server(
    name: str, tmp_path: Path
) -> None:
    request = {
        "model": "llama-3.1-8b",
        "hardware": ("h100-sxm-80gb",),
        "context_lens": (8192,),
    }
    plan = make_plan(PlanRequest(**(request | NEXT[name])))
    assert plan.choice.outlook is not None
    words = plan.choice.outlook.measure.split()
    words = [HERE.get(word, word) for word in words]
    if "-o" in words:
        words[words.index("-o") + 1] = str(tmp_path / "acceptance.json")
    assert STOPS.get(name, "cannot read http://localhost:9/metrics") in refusal(
        words[1:]
    )


@pytest.mark.parametrize("engine", ENGINE_TITLES)
def test_the_export_that_is_named_next_is_written(engine: str, tmp_path: Path) -> None:
    plan = exported("eagle3", engine).plan
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    line = next_line(plan, every=True, saved_as=str(file))
    words = shlex.split(line)
    assert words[:2] == ["magicdec", "export"]
    written = refusal(words[1:])
    assert "Written by magicdec" in written, written


@pytest.mark.parametrize(
    ("engine", "kind", "has_setting"),
    [
        ("vllm@0.33", "dspark", True),
        ("vllm@0.25", "dspark", False),
        ("sglang@0.5.13", "mtp", True),
        ("sglang@0.5.10", "mtp", False),
    ],
)
def test_a_setting_is_named_from_the_version_that_has_it(
    engine: str, kind: str, has_setting: bool
) -> None:
    assert bool(load_engine(engine).drafts[kind].adaptive_setting) == has_setting


def test_sglang_drafts_dspark_by_its_block_alone() -> None:
    request = PlanRequest(
        engine="sglang", model="qwen3-8b", draft="dspark", acceptance_rate=0.5, hardware=("h100-sxm-80gb",)
    )  # fmt: skip
    rows = make_plan(request).candidates
    assert {row.gamma for row in rows} == {7}
