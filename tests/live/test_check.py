"""Advice on a server's command, held against plans of the same configurations."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

import magicdec
from magicdec.cli import app, register_commands
from magicdec.errors import ConfigError
from magicdec.live.change import Change
from magicdec.live.check import Check, check_command
from magicdec.live.check_text import lines_of
from magicdec.live.load import AskedLoad
from magicdec.schema.row import Candidate
from magicdec.specs.serve_command import read_serve_command
from magicdec.tasks import usual_lengths
from magicdec.units import format_count

register_commands()
EAGLE = (
    "vllm serve meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 2 --speculative-config "
    '\'{"method": "eagle3", "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "num_speculative_tokens": %d}\''
)
HEAD = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
LOAD = AskedLoad(hardware="h100", batch=16, context_len=4096)
ASKED = {
    "model": "llama-3.1-8b",
    "hardware": "h100-sxm-80gb",
    "engine": "vllm",
    "tp": 2,
    "batch": 16,
    "context": 4096,
}


@cache  # several tests look at one answer
def checked(text: str, **changes: object) -> Check:
    load = AskedLoad(
        **{name: getattr(LOAD, name) for name in AskedLoad.__struct_fields__} | changes
    )  # type: ignore[arg-type]
    return check_command(read_serve_command(text), load)


@cache
def planned(**options: object) -> Candidate:
    return magicdec.predict(**ASKED, **options)


def change(result: Check, words: str) -> Change:
    return next(change for change in result.changes if words in change.change)


def test_a_command_as_it_is_is_the_plan_of_its_options() -> None:
    result = checked(EAGLE % 5)
    assert result.as_it_is == planned(draft="eagle3", draft_model=HEAD, gamma=5)
    assert result.without_draft is not None
    assert result.without_draft.tpot_s == pytest.approx(planned(draft="none").tpot_s)


def test_each_change_gains_what_a_plan_says() -> None:
    result = checked(EAGLE % 9)
    now = planned(draft="eagle3", draft_model=HEAD, gamma=9)
    rates = {
        gamma: planned(draft="eagle3", draft_model=HEAD, gamma=gamma).tokens_per_s
        for gamma in range(1, 8)
    }
    best = max(rates, key=lambda gamma: rates[gamma])
    other = change(result, "not 9")
    assert other.change == f"Draft {format_count(best, 'token')} per step, not 9"
    assert other.gain == pytest.approx(rates[best] / now.tokens_per_s)
    assert other.gain_low is not None
    assert other.gain_high is not None
    assert other.gain_low < other.gain < other.gain_high
    assert f'"num_speculative_tokens": {best}' in other.option
    off = [each for each in result.changes if "Do not speculate" in each.change]
    alone = planned(draft="none").tokens_per_s / now.tokens_per_s
    assert [each.gain for each in off] == (
        [pytest.approx(alone)] if alone >= 1.01 else []
    )


def test_a_command_that_is_right_is_kept() -> None:
    best = checked(EAGLE % 9)
    gamma = int(change(best, "not 9").change.split()[1])
    result = checked(EAGLE % gamma)
    assert not any("tokens per step, not" in each.change for each in result.changes)


def test_few_sequences_at_once_while_users_wait_is_found() -> None:
    text = "vllm serve Qwen/Qwen3-32B -tp 2 --max-num-seqs 8"
    result = checked(text, hardware="h200", batch=32)
    found = change(result, "Serve 32 users at once, not 8")
    asked = {
        "model": "qwen3-32b",
        "hardware": "h200",
        "tp": 2,
        "context": 4096,
        "draft": "none",
    }
    rates = [magicdec.predict(**asked, batch=batch).tokens_per_s for batch in (32, 8)]
    assert found.gain == pytest.approx(rates[0] / rates[1])
    assert found.is_sure
    assert result.headline.startswith("Serve 32 users")


def test_more_sequences_than_memory_holds_cost_a_second_reading_at_most() -> None:
    """Where the users are there; a note where they are not, or wait in the engine."""
    text = "vllm serve Qwen/Qwen3-8B --max-num-seqs 500"
    crowded = checked(text, batch=400, context_len=16_384)
    found = change(crowded, "sequences at once, not 500")
    assert found.kind == "cost"
    assert found.gain_low == 1.0
    assert found.gain is not None
    assert found.gain_high is not None
    assert 1.0 < found.gain < found.gain_high < 2.0
    waits = "trtllm-serve Qwen/Qwen3-8B --max_batch_size 500"
    for result in (checked(text), checked(waits, batch=400)):
        assert any("fit at once, not 500" in note for note in result.notes)
        assert not any("not 500" in each.change for each in result.changes)


def test_what_does_not_fit_says_what_would() -> None:
    result = checked("vllm serve Qwen/Qwen2.5-72B-Instruct")
    assert result.as_it_is is None
    assert "tp 2" in result.headline
    few = checked(
        "vllm serve Qwen/Qwen2.5-72B-Instruct -tp 2", batch=64, context_len=8192
    )
    assert change(few, "Use tp 8").needs_gpus == 8
    assert (
        "tp 8" not in few.headline
    )  # four times the devices are no change of the command


def test_passes_without_a_captured_graph_are_found() -> None:
    graphs = EAGLE % 3 + " --max-cudagraph-capture-size 16"
    found = change(checked(graphs), "Capture graphs")
    option, size = found.option.split()
    assert option == "--max-cudagraph-capture-size"
    assert int(size) >= 64
    assert found.kind == "cost"
    assert found.gain is not None
    assert found.gain > 1.0
    eager = change(checked(EAGLE % 2 + " --enforce-eager"), "Capture graphs")
    assert eager.is_sure


def test_an_unknown_acceptance_is_said_and_one_given_is_used() -> None:
    config = {"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 4}
    text = f"vllm serve Qwen/Qwen3-32B --speculative-config '{json.dumps(config)}'"
    given = checked(text, hardware="h200", batch=1, acceptance_rate=0.8)
    assert given.as_it_is is not None
    assert (given.as_it_is.draft, given.as_it_is.gamma) == ("qwen3-0.6b", 4)


def test_what_is_assumed_is_named() -> None:
    result = check_command(read_serve_command("vllm serve Qwen/Qwen3-8B"), AskedLoad())
    assert len(result.assumed) == 3
    assert result.hardware == "h100-sxm-80gb"


LARGE = """python3 -m sglang.launch_server --model-path moonshotai/Kimi-K2.5 --tp 8 \\
  --speculative-algorithm EAGLE --speculative-draft-model-path lightseekorg/kimi-k2.5-eagle3 \\
  --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"""


@pytest.mark.parametrize("device", ["8xh100", "8xh200"])
def test_a_drafts_fault_is_said_first_whatever_fits(device: str) -> None:
    result = check_command(read_serve_command(LARGE), AskedLoad(hardware=device))
    assert "is a head of EAGLE-3: it does not load as EAGLE" in result.headline
    does_not_fit = any("does not fit" in problem for problem in result.problems)
    assert does_not_fit == (device == "8xh100")


def test_a_server_that_does_not_fit_gets_no_other_advice() -> None:
    text = (
        "vllm serve deepseek-ai/DeepSeek-V3 -tp 8 --no-async-scheduling "
        '--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\''
    )
    result = checked(text, hardware="8xh100", batch=1, context_len=1024)
    assert "does not fit on 8 x h100" in result.headline
    assert result.changes == []
    fits = checked(text, hardware="8xh200", batch=1, context_len=1024)
    for words in ("not piecewise ones", "Schedule the next step"):
        assert change(fits, words).kind == "cost"


@pytest.mark.parametrize("length", ["", " --max-model-len 1000000"])
def test_a_server_that_is_refused_gets_only_what_mends_it(length: str) -> None:
    """An eager server with few sequences at once, which asks for more than its model reads."""
    text = f"vllm serve Qwen/Qwen3-8B --enforce-eager --max-num-seqs 4{length}"
    result = checked(text)
    assert bool(result.problems) == bool(length)
    assert bool(result.changes) == (not length)
    lines = [line.text for line in lines_of(result)]
    assert any(line.startswith("once it starts: ") for line in lines) == bool(length)


@pytest.mark.parametrize(
    ("written", "is_wrong", "is_noted"),
    [
        ("", False, True),
        ("--dtype half", False, False),
        ("--dtype bfloat16", True, False),
    ],
)
def test_a_device_without_bf16_is_said(
    written: str, is_wrong: bool, is_noted: bool
) -> None:
    text = f"vllm serve Qwen/Qwen3-0.6B {written}"
    result = checked(text, hardware="t4", batch=1, context_len=1024)
    words = "t4-16gb cannot compute in bf16"
    assert any(words in problem for problem in result.problems) == is_wrong
    assert any(words in note for note in result.notes) == is_noted


@pytest.mark.parametrize(
    ("options", "is_too_long"),
    [
        ("-c 131072 --fit off", True),
        ("--ctx-size 131072 --parallel 4 -ngl 99", True),
        ("-c 131072", False),
        ("-c 16384", False),
        ("-c 131072 -ngl 20", False),
        ("-c 131072 -nkvo", False),
        ("-c 0", False),
    ],
)
def test_a_cache_that_is_allocated_at_the_start_has_to_fit(
    options: str, is_too_long: bool
) -> None:
    """Qwen3-8B: 36 layers of 8 heads of 128 keys and values in 16 bits, beside about 5 GiB. Without -ngl layers go to
    the host by themselves."""
    text = f"llama-server -m Qwen3-8B-Q4_K_M.gguf {options}"
    result = checked(text, hardware="rtx-3060", batch=None, context_len=1024)
    says = [problem for problem in result.problems if "of cache" in problem]
    assert bool(says) == is_too_long
    if says:
        token_gib = 36 * 8 * 128 * 2 * 2 / 2**30
        found = re.search(
            r"allocates ([\d.]+) GiB of cache, with ([\d.]+) GiB.* -c (\d+) fits",
            says[0],
        )
        assert found is not None
        cache, weights, most = map(float, found.groups())
        assert cache == pytest.approx(131072 * token_gib, rel=0.01)
        assert 4.0 < weights < 6.0
        # half a GiB is CUDA's and the logits'
        assert 11.0 < most * token_gib + weights < 11.85


def test_a_cache_of_windows_holds_the_windows_alone() -> None:
    """Gemma 3 27B: 10 of 62 layers keep all 32,768 tokens, 16 heads of 128 keys and values in 16 bits."""
    text = "llama-server -hf ggml-org/gemma-3-27b-it-GGUF -ngl 99 -c {}"
    fits = checked(text.format(32768), hardware="rtx-4090", batch=1, context_len=1024)
    assert not fits.problems
    assert any("names no format: Q4_K_M" in note for note in fits.notes)
    long = checked(text.format(131072), hardware="rtx-4090", batch=1, context_len=1024)
    assert long.headline.startswith("context: -c 131072 allocates")
    found = re.search(r"allocates ([\d.]+) GiB", long.headline)
    assert found is not None
    token_gib = 16 * 128 * 2 * 2 / 2**30
    whole = 10 * 131072 * token_gib
    assert whole < float(found[1]) < whole + 52 * 2048 * token_gib + 0.1


def test_what_stays_on_the_host_is_not_said_to_fail() -> None:
    text = "llama-server -hf unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M -c 65536 --cpu-moe"
    tight = checked(text, hardware="rtx-4060", batch=1, context_len=1024)
    assert not tight.problems
    assert tight.headline.startswith("Not priced: it is partly on the host")
    fits = checked(text, hardware="l40s", batch=1, context_len=1024)
    assert not fits.problems
    assert any(
        "--cpu-moe: all is taken for the device's" in note for note in fits.notes
    )


def test_llama_cpp_takes_all_devices_in_stages() -> None:
    """A model that one device does not hold, at the time of one that does hold it."""
    text = "llama-server -m Llama-3.3-70B-Instruct-Q4_K_M.gguf -c 8192 -ngl 99"
    load = {"batch": None, "context_len": 1024}
    assert "does not fit" in checked(text, hardware="rtx-3090", **load).headline
    split = checked(text, hardware="2xrtx-3090", **load)
    assert not split.problems
    assert split.num_gpus == 2
    assert any("over the 2 devices" in note for note in split.notes)
    small = "llama-server -m Qwen3-8B-Q4_K_M.gguf -c 8192"
    alone = checked(small, hardware="rtx-3090", **load).as_it_is
    in_turn = checked(small, hardware="2xrtx-3090", **load).as_it_is
    assert alone is not None
    assert in_turn is not None
    assert in_turn.tpot_s == pytest.approx(alone.tpot_s, rel=0.1)


def test_the_device_that_is_assumed_holds_the_model() -> None:
    """The first of the usual ones that does; the first of all where none does."""
    for tp, device in ((1, "h100"), (4, "b200")):
        text = f"vllm serve deepseek-ai/DeepSeek-V3 -tp {tp}"
        result = check_command(read_serve_command(text), AskedLoad(batch=1))
        assert result.hardware.startswith(device)
        is_named = [device in assumed for assumed in result.assumed]
        assert any(is_named)
        # 671 GB of weights in fp8, on devices of 80, 141 and 180 GB
        assert (result.as_it_is is None) == (tp < 4)


@pytest.mark.parametrize("way", ["file", "stdin", "compose"])
def test_the_command_reads_text_files_and_stdin(way: str, tmp_path: Path) -> None:
    text = "vllm serve Qwen/Qwen3-8B --max-num-seqs 4 --what-is-this"
    argument, stdin = "-", None
    if way == "file":
        (tmp_path / "serve.sh").write_text(text)
        argument = str(tmp_path / "serve.sh")
    elif way == "compose":
        (tmp_path / "compose.yml").write_text(
            f"services:\n  llm:\n    command: {text}\n"
        )
        argument = str(tmp_path / "compose.yml")
    else:
        stdin = text
    arguments = ["check", argument, "--hardware", "h100", "--format", "json"]
    done = CliRunner().invoke(app, arguments, input=stdin)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["not_understood"] == ["--what-is-this"]
    assert document["batch_size"] == 4


def test_strict_fails_where_a_change_surely_gains() -> None:
    asked = [
        "check",
        "vllm serve Qwen/Qwen3-32B -tp 2 --max-num-seqs 8",
        "--batch",
        "32",
    ]
    assert (
        CliRunner().invoke(app, [*asked, "--hardware", "h200", "--strict"]).exit_code
        == 1
    )
    assert CliRunner().invoke(app, [*asked, "--hardware", "h200"]).exit_code == 0


def test_a_task_brings_the_lengths_of_a_usual_request() -> None:
    result = checked(EAGLE % 3, context_len=None, task="code")
    usual = usual_lengths("code")
    assert result.context_len == usual.prompt_len
    assert f"{usual.output_len} generated tokens (--gen-len)" in result.assumed
    assert result.as_it_is is not None
    assert result.as_it_is.requests is not None


def test_a_settings_file_that_is_not_here_is_asked_for_and_the_rest_is_answered() -> (
    None
):
    text = "trtllm-serve meta-llama/Llama-3.1-8B-Instruct --extra_llm_api_options not-here.yaml"
    result = checked(text)
    assert result.problems == []
    assert any("not-here.yaml is not here" in asked for asked in result.asked)
    assert result.as_it_is is not None
    assert not result.as_it_is.is_speculative


@pytest.mark.parametrize(
    "text",
    [
        EAGLE % 9,
        "vllm serve Qwen/Qwen3-32B -tp 2 --speculative-config "
        '\'{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}\'',
    ],
)
def test_settings_of_changes_can_be_pasted(text: str) -> None:
    """Each change of vLLM's speculation is JSON that names a method and its gamma."""
    configs = []
    for found in checked(text).changes:
        if found.option.startswith("--speculative-config"):
            configs.append(json.loads(shlex.split(found.option)[1]))
    assert configs
    assert all(
        config["method"] and config["num_speculative_tokens"] > 0 for config in configs
    )


def test_eagle_without_a_checkpoint_is_the_models_own_module_in_sglang() -> None:
    text = (
        "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 "
        "--speculative-algorithm EAGLE --speculative-num-steps 3"
    )
    result = checked(text, hardware="h200")
    assert result.as_it_is is not None
    assert result.as_it_is.draft_method == "mtp"
    asked = {
        "model": "deepseek-v3",
        "engine": "sglang",
        "hardware": "h200",
        "tp": 8,
        "batch": 16,
    }
    alone = magicdec.predict(**asked, context=4096, draft="mtp", gamma=3)
    assert result.as_it_is.tpot_s == pytest.approx(alone.tpot_s)


def test_a_head_reads_its_whole_cache_unless_the_command_has_a_window() -> None:
    text = (
        "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct "
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path a/eagle3 "
        "--speculative-num-steps 3"
    )
    whole = checked(text, context_len=32768).as_it_is
    windowed = checked(
        f"{text} --speculative-draft-window-size 2048", context_len=32768
    ).as_it_is
    assert whole is not None
    assert windowed is not None
    assert (whole.draft_budget, windowed.draft_budget) == (None, 2048)


def test_fewer_sequences_than_usual_are_weighed_in_a_note() -> None:
    result = checked("vllm serve Qwen/Qwen3-8B --max-num-seqs 4", batch=None)
    (note,) = (note for note in result.notes if "users wait" in note)
    asked = {"model": "qwen3-8b", "hardware": "h100-sxm-80gb", "tp": 1, "context": 4096}
    few, many = (
        magicdec.predict(**asked, batch=batch, draft="none") for batch in (4, 32)
    )
    assert f"serves {many.tokens_per_s / few.tokens_per_s:.2g} times" in note
    assert not any(
        "users wait" in note for note in checked("vllm serve Qwen/Qwen3-8B").notes
    )


def test_a_command_that_serves_fewer_is_compared_at_as_many_users() -> None:
    """Two L40S hold 16 sequences of this model with n-gram alone, fewer with other drafts."""
    command = read_serve_command(
        "vllm serve Qwen/Qwen3-32B --tensor-parallel-size 2 --speculative-config "
        """'{"method": "ngram", "num_speculative_tokens": 5}'"""
    )
    check = check_command(command, AskedLoad(hardware="l40s"))
    assert check.as_it_is is not None
    assert check.without_draft is not None
    assert check.batch_size < 32
    assert check.as_it_is.batch_size == check.without_draft.batch_size
    assert check.as_it_is.batch_size == check.batch_size
    ratio = check.without_draft.between_tokens_s / check.as_it_is.between_tokens_s
    assert ratio == pytest.approx(check.as_it_is.speedup, rel=1e-6)


def test_a_file_of_options_that_is_not_here_is_said_first() -> None:
    command = read_serve_command(
        "trtllm-serve deepseek-ai/DeepSeek-V3 --tp_size 8 --extra_llm_api_options none.yml"
    )
    check = check_command(command, AskedLoad(hardware="b200"))
    assert "none.yml is not here" in check.asked[0]
    assert check.headline.startswith("If none.yml sets no draft: Speculate with ")


SGLANG = (
    "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct "
    "--speculative-algorithm EAGLE3 --speculative-eagle-topk 1 --speculative-num-steps 3 "
    "--speculative-draft-model-path yuhuili/EAGLE3-LLaMA3.1-Instruct-8B "
    "--speculative-num-draft-tokens 4"
)


def test_a_rate_is_of_the_commands_own_draft_on_every_engine() -> None:
    result = checked(SGLANG, acceptance_rate=0.5)
    assert result.as_it_is is not None
    assert result.as_it_is.drafting.tokens_per_step == pytest.approx(1.875)


def test_a_tree_of_more_tokens_than_any_chain_is_priced_and_its_chain_named() -> None:
    """64 tokens of 5 passes, as examples have it; a chain has 32 at most."""
    tree = SGLANG.replace("topk 1", "topk 8").replace("steps 3", "steps 5")
    result = checked(tree.replace("tokens 4", "tokens 64"))
    assert result.as_it_is is not None
    lines = [line.text for line in lines_of(result)]
    (as_it_is,) = [line for line in lines if line.startswith("as it is:")]
    assert as_it_is.startswith("as it is: EAGLE-3, a tree of 63 on 1 x ")
    (chain,) = [each for each in result.changes if "not a tree of 63" in each.change]
    assert chain.gain is not None
    assert chain.gain > 1.0
    assert "--speculative-eagle-topk 1" in str(chain.option)


def test_a_draft_that_is_priced_with_a_window_is_named_with_its_settings() -> None:
    """EAGLE-3's head reads 2,048 of 4,096 tokens."""
    result = checked(
        SGLANG.replace("tokens 4", "tokens 64").replace("topk 1", "topk 8")
    )
    (change,) = [
        each for each in result.changes if each.change.startswith("Draft with")
    ]
    assert change.change.startswith("Draft with EAGLE-3, window 2048, ")
    assert "--speculative-draft-window-size 2048" in str(change.option)


def test_an_accept_length_is_the_tokens_per_step_at_the_commands_gamma() -> None:
    result = checked(SGLANG, accept_length=2.4)
    assert result.as_it_is is not None
    assert result.as_it_is.drafting.tokens_per_step == pytest.approx(2.4)


def test_of_look_ups_vllm_counts_drafted_steps_so_it_is_asked_which() -> None:
    """3.31 in 53 % of the steps is 1 + 2.31 · 0.53 over all."""
    command = (
        "vllm serve Qwen/Qwen3-8B --speculative-config "
        """'{"method": "ngram", "num_speculative_tokens": 5}'"""
    )
    with pytest.raises(ConfigError, match="--drafted-share"):
        checked(command, accept_length=3.31)
    result = checked(command, accept_length=3.31, drafted_share=0.53)
    assert result.as_it_is is not None
    assert result.as_it_is.drafting.tokens_per_step == pytest.approx(2.2243)


VLLM = "vllm serve {model} -tp {tp} --speculative-config '{config}'"


@pytest.mark.parametrize(
    ("model", "tp", "config", "words"),
    [
        ("openai/gpt-oss-20b", 1, {"method": "deepseek_mtp"}, "module"),
        # another method's checkpoint
        (
            "meta-llama/Llama-3.1-8B-Instruct",
            1,
            {"method": "eagle", "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"},
            '"method": "eagle3"',
        ),
        (
            "meta-llama/Llama-3.1-8B-Instruct",
            1,
            {"method": "eagle3", "model": "yuhuili/EAGLE-LLaMA3.1-Instruct-8B"},
            '"method": "eagle"',
        ),
        (
            "Qwen/Qwen3-8B",
            1,
            {"method": "dflash", "model": "deepseek-ai/dspark_qwen3_8b_block7"},
            '"method": "dspark"',
        ),
        # another target's shape
        (
            "meta-llama/Llama-3.3-70B-Instruct",
            4,
            {"method": "eagle3", "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"},
            "hidden size",
        ),
        (
            "Qwen/Qwen3-32B",
            4,
            {
                "method": "eagle3",
                "model": "AngelSlim/Qwen3-32B_eagle3",
                "draft_tensor_parallel_size": 2,
            },
            "1 rank or on all 4",
        ),
        (
            "Qwen/Qwen2.5-7B-Instruct",
            1,
            {"model": "Qwen/Qwen2.5-0.5B-Instruct"},
            "vocabulary",
        ),
    ],
)
def test_what_cannot_start_is_said_first_and_not_priced(
    model: str, tp: int, config: dict[str, object], words: str
) -> None:
    config = {"num_speculative_tokens": 3} | config
    text = VLLM.format(model=model, tp=tp, config=json.dumps(config))
    result = checked(text, hardware="h200", batch=2, context_len=1024)
    assert "cannot run" in result.headline
    assert words in result.headline
    assert result.as_it_is is None
    assert not any("mtp" in change.option for change in result.changes)


def test_a_block_is_not_exceeded() -> None:
    config = {
        "method": "dspark",
        "model": "deepseek-ai/dspark_qwen3_8b_block7",
        "num_speculative_tokens": 12,
    }
    text = VLLM.format(model="Qwen/Qwen3-8B", tp=1, config=json.dumps(config))
    result = checked(text, batch=1, context_len=2048)
    assert any("7 tokens per step" in change.change for change in result.changes)
    assert result.as_it_is is None
    assert any("accepts next to nothing" in note for note in result.notes)
    options = [change.option for change in result.changes if "dspark" in change.option]
    assert options
    for option in options:
        given = json.loads(shlex.split(option)[1])
        assert given["num_speculative_tokens"] <= 7
        assert given["model"] == config["model"]


def test_a_head_of_another_shape_is_not_advised() -> None:
    own = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
    config = {"method": "eagle3", "model": own, "num_speculative_tokens": 3}
    text = VLLM.format(
        model="meta-llama/Llama-3.3-70B-Instruct", tp=4, config=json.dumps(config)
    )
    result = checked(text, batch=8, context_len=1024)
    assert result.changes
    assert not any(own in change.option for change in result.changes)


def test_a_package_that_a_draft_needs_is_named() -> None:
    text = VLLM.format(
        model="meta-llama/Llama-3.1-8B-Instruct",
        tp=1,
        config=json.dumps({"method": "suffix", "num_speculative_tokens": 8}),
    )
    result = checked(text, batch=1, context_len=1024)
    assert any("arctic-inference" in note for note in result.notes)


def test_an_engine_without_the_draft_is_an_answer() -> None:
    text = (
        "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct "
        "--speculative-algorithm SUFFIX --speculative-num-draft-tokens 8"
    )
    result = checked(text, batch=1, context_len=1024)
    assert "does not run suffix" in result.headline
    assert result.as_it_is is None


def followed(text: str, option: str) -> str:
    """The command with an advised option."""
    start, _, _ = text.partition(" --speculative-config")
    if option.startswith("leave out"):
        return start
    return f"{start} {option}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moves", "model", "config", "load"),
    [
        (
            True,
            "openai/gpt-oss-20b",
            {"model": "RedHatAI/gpt-oss-20b-speculator.eagle3", "method": "eagle3"},
            {"hardware": "4090", "batch": 16, "context_len": 16_000, "task": "code"},
        ),
        (
            True,
            "Qwen/Qwen3-8B",
            {"model": "AngelSlim/Qwen3-8B_eagle3", "method": "eagle3"},
            {"batch": 64, "context_len": 8_000, "task": "rag"},
        ),
        (True, "meta-llama/Llama-3.1-8B-Instruct", {"method": "ngram"}, {"batch": 1}),
        (
            False,
            "meta-llama/Llama-3.1-8B-Instruct",
            {"method": "ngram", "num_speculative_tokens": 10},
            {"batch": 1},
        ),
        (
            True,
            "meta-llama/Llama-3.1-8B-Instruct",
            {
                "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
                "method": "eagle3",
                "num_speculative_tokens": 7,
            },
            {"batch": 32, "context_len": 4_000},
        ),
        (
            True,
            "meta-llama/Llama-3.3-70B-Instruct --tensor-parallel-size 4",
            {"method": "ngram", "num_speculative_tokens": 8},
            {"batch": 8, "context_len": 32_000, "task": "summarization"},
        ),
        (
            True,
            "Qwen/Qwen3-30B-A3B-Instruct-2507",
            {"method": "ngram", "num_speculative_tokens": 3},
            {"batch": 128, "context_len": 2_000},
        ),
    ],
)
def test_a_command_that_follows_the_advice_is_advised_nothing_more(
    moves: bool, model: str, config: dict[str, object], load: dict[str, object]
) -> None:
    config = {"num_speculative_tokens": 5} | config
    text = f"vllm serve {model} --speculative-config '{json.dumps(config)}'"
    result = checked(text, **load)
    assert (result.first is not None) == moves
    if result.first is None:
        return
    again = checked(followed(text, result.first.option), **load)
    assert again.first is None or again.first.kind != "gain", again.headline


EAGER = 'vllm serve Qwen/Qwen3-8B --speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\''


def test_an_eager_command_is_priced_with_and_without_its_draft() -> None:
    """Launches bound a plain step of 36 layers, so a draft gains more there than with graphs; both times
    are at least the host's over its layers."""
    whole = checked(EAGER)
    eager = checked(f"{EAGER} --enforce-eager")
    assert whole.as_it_is is not None
    assert eager.as_it_is is not None
    assert eager.as_it_is.between_tokens_s > whole.as_it_is.between_tokens_s
    assert eager.as_it_is.speedup > whole.as_it_is.speedup
    assert eager.without_draft is not None
    gain = eager.without_draft.between_tokens_s / eager.as_it_is.between_tokens_s
    assert eager.as_it_is.speedup == pytest.approx(gain)


def test_a_command_of_an_older_version_is_priced_with_its_constants() -> None:
    """Before 0.14 vLLM scheduled between steps, and a speculative step took longer."""
    text = (
        "docker run vllm/vllm-openai:{} --model Qwen/Qwen3-8B --speculative-config {}"
    )
    config = '\'{"method": "eagle3", "model": "RedHatAI/Qwen3-8B-speculator.eagle3", "num_speculative_tokens": 3}\''
    times = []
    for version in ("v0.12.0", "v0.32.0"):
        row = checked(text.format(version, config)).as_it_is
        assert row is not None
        times.append(row.step_s)
    assert times[0] > 1.05 * times[1]


@pytest.mark.parametrize(("batch", "gamma"), [(2, 5), (16, 3), (64, 0)])
def test_tensorrt_llms_auto_drafts_by_its_number_of_requests(
    batch: int, gamma: int, tmp_path: Path
) -> None:
    """5 tokens to 4 requests, 3 to 32, none above (its tech blog 7)."""
    settings = tmp_path / "settings.yaml"
    settings.write_text("speculative_config:\n  decoding_type: AUTO\n")
    command = read_serve_command(
        f"trtllm-serve Qwen/Qwen3-8B --extra_llm_api_options {settings}"
    )
    load = msgspec.structs.replace(LOAD, batch=batch)
    result = check_command(command, load)
    assert result.as_it_is is not None
    draft = "ngram" if gamma else "none"
    assert (result.as_it_is.draft, result.as_it_is.gamma) == (draft, gamma)
    assert any("drafts nothing" in note for note in result.notes) == (batch > 32)
