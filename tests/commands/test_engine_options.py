"""Engines' own names of options, counts like 32k, and what the help says."""

from __future__ import annotations

import json
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from magicdec.cli import COMMANDS, app, describe, register_commands
from magicdec.commands.engine_options import (
    ANSWERS,
    OURS,
    as_ours,
    quoted_server_command,
)
from magicdec.errors import ConfigError
from magicdec.naming import draft_by_name
from magicdec.schema.request import fields_of, request_options
from magicdec.specs.device import DTYPE_BYTES, WEIGHT_ONLY

register_commands()
NAMES = [f"--{name.replace('_', '-')}" for name in request_options()]
QUICK = ("plan", "--draft", "none", "--format", "json")


def answer(*args: str) -> dict:
    done = CliRunner().invoke(app, [*QUICK, *args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_plan_asked_with_vllms_options_is_the_one_asked_with_ours() -> None:
    theirs = answer(
        *(
            "--model",
            "Qwen/Qwen2.5-7B-Instruct",
            "--gpu",
            "h100",
            "--tensor_parallel_size=2",
        ),
        *("--max-num-seqs", "16", "--input-len", "4k", "--output-len", "256"),
        *("--quantization", "awq", "--kv-cache-dtype", "fp8_e4m3"),
    )
    ours = answer(
        *(
            "--model",
            "qwen2.5-7b",
            "--hardware",
            "h100-sxm-80gb",
            "--tp",
            "2",
            "--batch",
            "16",
        ),
        *(
            "--context",
            "4096",
            "--gen-len",
            "256",
            "--weight-dtype",
            "int4",
            "--kv-dtype",
            "fp8",
        ),
    )
    assert theirs["choice"] == ours["choice"]
    assert theirs["precision"] == ours["precision"]


def test_every_engines_option_leads_to_one_of_ours() -> None:
    known = {f"--{name}" for names in OURS.values() for name in names}
    assert known <= {*NAMES, "--prompt-len", "--output-len"}
    for theirs in OURS:
        if f"--{theirs}" not in NAMES:
            assert as_ours([f"--{theirs}", "x"], names=NAMES, counts=[])[0] in NAMES


@pytest.mark.parametrize("theirs", ANSWERS)
def test_an_option_without_a_counterpart_is_answered_with_ours(theirs: str) -> None:
    with pytest.raises(ConfigError, match=f"--{theirs} is an engine's option"):
        as_ours([f"--{theirs}", "1"], names=NAMES, counts=[])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--max-model-len 32768", "--context 32768"),
        ("--max-model-len 32768 --task chat", "--task chat"),
        ("--context 4k --max-model-len=8192", "--context 4k"),
        (
            """--sc '{"method":"mtp","num_speculative_tokens":1}'""",
            "--draft mtp --gamma 1",
        ),
        (
            """--speculative-config '{"model":"o/X-EAGLE3","num_speculative_tokens":4}'""",
            "--draft eagle3 --gamma 4 --draft-model o/X-EAGLE3",
        ),
        (
            """--speculative-config '{"method":"ngram","num_speculative_tokens":0}'""",
            "--draft none",
        ),
        (
            "--speculative-algo NEXTN --speculative-num-steps 3",
            "--draft NEXTN --gamma 3",
        ),
        ("--tpot 20ms --ttft-ms 0.5s", "--tpot-ms 20 --ttft-ms 500"),
        ("--tpot-ms=.02s --qps 3/s", "--tpot-ms=20 --rate 3"),
        ("--trust-remote-code --port 80 --gpus 4", "--gpus 4"),
        ("--enable-prefix-caching --draft none", "--draft none"),
    ],
)
def test_what_engines_and_people_write_is_read(theirs: str, ours: str) -> None:
    assert as_ours(shlex.split(theirs), names=NAMES, counts=[]) == ours.split()


@pytest.mark.parametrize(
    ("line", "read"),
    [
        (
            "vllm serve a/b --tensor-parallel-size 2 --hardware l40s --strict",
            [
                "vllm serve a/b --tensor-parallel-size 2",
                "--hardware",
                "l40s",
                "--strict",
            ],
        ),
        (
            """vllm serve a/b -tp 2 --batch=4 --speculative-config '{"method": "mtp"}'""",
            [
                """vllm serve a/b -tp 2 --speculative-config '{"method": "mtp"}'""",
                "--batch=4",
            ],
        ),
        ("'vllm serve a/b' --batch 4 -tp 2", ["vllm serve a/b -tp 2", "--batch", "4"]),
        ("'vllm serve a/b -tp 2' --batch 4", ["vllm serve a/b -tp 2", "--batch", "4"]),
        ("serve.sh --strict", ["serve.sh", "--strict"]),
        ("llama-server -m a --parallel 4", ["llama-server -m a --parallel 4"]),
        ("'vllm serve a/b' --btach 4", ["vllm serve a/b", "--btach", "4"]),  # a slip
    ],
)
def test_a_server_s_command_needs_no_quotes(line: str, read: list[str]) -> None:
    options = {
        "names": ("--hardware", "--batch", "--strict"),
        "flags": ("--strict",),
    }
    assert quoted_server_command(shlex.split(line), **options) == read


def test_an_option_beside_a_file_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text("vllm serve a/b")
    with pytest.raises(ConfigError, match="--tp is no option of check"):
        quoted_server_command([str(script), "--tp", "2"], names=(), flags=())


def test_what_is_left_out_or_read_as_something_else_is_said() -> None:
    said: list[str] = []
    args = shlex.split("--max-model-len 4096 --enable-chunked-prefill --batch 4")
    as_ours(args, names=NAMES, counts=[], say=said.append)
    assert said == [
        "--max-model-len is read as --context 4096, the prompt of each request",
        "--enable-chunked-prefill changes no plan, and is left out",
    ]


@pytest.mark.parametrize(
    ("written", "draft"),
    [
        ("EAGLE-3", "eagle3"),
        ("EAGLE3", "eagle3"),
        ("NEXTN", "mtp"),
        ("deepseek_mtp", "mtp"),
        ("[ngram]", "ngram"),
        ("Suffix decoding", "suffix"),
        ("P-EAGLE", "p-eagle"),
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("z-lab/Qwen3-8B-DFlash-b16", "dflash"),
        ("Qwen/Qwen3-0.6B", None),
        ("self", None),
        ("qwen3-0.6b", None),
    ],
)
def test_a_draft_is_known_by_engines_names_and_by_its_repositorys(
    written: str, draft: str | None
) -> None:
    assert draft_by_name(written) == draft
    fields = fields_of({"draft": written})
    assert fields["draft"] == (draft or written)
    assert ("draft_name" in fields) == (draft is not None and "/" in written)


def test_a_published_head_is_named_as_draft_model_or_draft() -> None:
    head = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
    load = ("--hardware", "h100", "--batch", "8", "--task", "chat", "--format", "json")
    plans = []
    for draft in (("--draft-model", head), ("--draft", head)):
        done = CliRunner().invoke(app, ["plan", *draft, *load])
        assert done.exit_code == 0, done.output
        plans.append(json.loads(done.stdout)["choice"])
    assert plans[0] == plans[1]
    assert plans[0]["row"]["drafting"]["draft"] == "eagle3"


@pytest.mark.parametrize(
    ("word", "meant"), [("llama-3.1-8b", "--model"), ("4xh100", "--hardware")]
)
def test_a_name_without_its_option_is_answered_with_it(word: str, meant: str) -> None:
    done = CliRunner().invoke(app, ["plan", word], standalone_mode=False)
    assert f"did you mean {meant} {word}?" in describe(done.exception)


def test_all_commands_read_32k() -> None:
    done = CliRunner().invoke(
        app,
        [
            "sensitivity",
            "--context",
            "2k",
            "--acceptance-rate",
            "0.8",
            "--hardware",
            "h100",
        ],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    assert as_ours(
        ["--n", "2k", "--m", "2k"], names=["--n", "--m"], counts=["--n"]
    ) == [
        "--n",
        "2048",
        "--m",
        "2k",
    ]


def test_the_help_of_weight_dtype_lists_every_format() -> None:
    options = request_options()
    assert all(dtype in options["weight_dtype"].help for dtype in DTYPE_BYTES)
    cache = options["kv_dtype"].help
    assert all(dtype in cache for dtype in ("bf16", "fp16", "fp8", "int4", "fp32"))
    assert set(WEIGHT_ONLY) <= set(DTYPE_BYTES)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_the_help_fit_80_columns(name: str) -> None:
    text = import_module(f"magicdec.commands.{name.replace('-', '_')}").EPILOG
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize("words", [("--tok-s-user", "40"), ("--tok-s-user=40",)])
def test_tokens_per_second_and_user_are_a_limit_on_the_time_per_token(
    words: tuple[str, ...],
) -> None:
    context = ("--context", "2k", "--batch", "4")
    theirs = answer(*context, *words)
    ours = answer(*context, "--tpot-ms", "25")
    assert theirs["request"]["tpot_limit_s"] == pytest.approx(0.025)
    assert theirs["choice"] == ours["choice"]


@pytest.mark.parametrize("rate", ["0", "-3", "fast", "inf"])
def test_a_rate_of_a_user_that_is_none_is_refused(rate: str) -> None:
    with pytest.raises(ConfigError, match="tokens per second above 0"):
        as_ours(["--tok-s-user", rate], names=NAMES, counts=[])
