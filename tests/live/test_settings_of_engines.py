"""Options and variables that set an engine's path, against another way to say it, another version, or a
thread's figures."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import msgspec
import pytest

from magicdec.live.check import AskedLoad, _request
from magicdec.live.settings import Change, Served, costs_of
from magicdec.perfmodel.planner import answered
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.serve_command import read_serve_command

EAGLE = (
    "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path AngelSlim/Qwen3-8B_eagle3 --speculative-num-steps 3 "
    "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
)
HYBRID = "python -m sglang.launch_server --model-path Qwen/Qwen3.5-4B"
WIDE = "vllm serve meta-llama/Llama-3.1-70B-Instruct -tp 4"
DRAFTER = (
    "--model Qwen/Qwen3-8B --speculative-config "
    '\'{"method": "eagle3", "model": "AngelSlim/Qwen3-8B_eagle3", "num_speculative_tokens": 3, "enforce_eager": true}\''
)


class Priced(NamedTuple):
    tpot_s: float
    """Time between tokens of the server as it is set."""
    changes: list[Change]

    def advised(self, words: str) -> list[str]:
        return [change.option for change in self.changes if words in change.change]


@cache
def priced(text: str, *, hardware: str = "h100", draft: str = "none") -> Priced:
    """One user of a command, with a draft of which 0.7 are accepted, or none."""
    command = read_serve_command(text)
    model = load_model_spec(command.model)
    load = AskedLoad(hardware=hardware, batch=1, context_len=2048)
    request, _ = _request(command, load, model)
    request = msgspec.structs.replace(request, draft=draft)
    if draft != "none":
        request = msgspec.structs.replace(request, gamma=3, acceptance_rate=0.7)
    answer = answered(request, model, [])[0][0]
    row = answer.document.best
    option = None if draft == "none" else answer.case.option_of(row)
    served = Served(case=answer.case, option=option, row=row)
    costs = costs_of(command, served)
    return Priced(row.between_tokens_s * costs.times_as_long, costs.changes)


def of_sglang(version: str, words: str, variable: str = "") -> str:
    return f"docker run {variable} lmsysorg/sglang:v{version} {words}"


def test_a_variable_has_older_sglang_draft_as_newer_versions_do():
    on = priced(of_sglang("0.5.8", EAGLE, "-e SGLANG_ENABLE_SPEC_V2=1"), draft="eagle3")
    newer = priced(of_sglang("0.5.11", EAGLE), draft="eagle3")
    older = priced(of_sglang("0.5.8", EAGLE), draft="eagle3")
    assert on.tpot_s == pytest.approx(newer.tpot_s)
    assert older.tpot_s > 1.2 * newer.tpot_s
    off = priced(
        of_sglang("0.5.13", EAGLE, "-e SGLANG_ENABLE_SPEC_V2=0"), draft="eagle3"
    )
    assert off.tpot_s == pytest.approx(older.tpot_s)
    gone = priced(
        of_sglang("0.5.20", EAGLE, "-e SGLANG_ENABLE_SPEC_V2=0"), draft="eagle3"
    )
    assert gone.tpot_s == pytest.approx(newer.tpot_s)


@pytest.mark.parametrize(
    ("version", "words", "is_between"),
    [
        ("0.5.10", "", True),  # no_buffer by default
        ("0.5.10", "--mamba-scheduler-strategy extra_buffer", False),
        ("0.5.10", "--disable-radix-cache", False),
        ("0.5.23", "", False),
        ("0.5.23", "--mamba-radix-cache-strategy no_buffer", True),
    ],
)
def test_a_cache_of_states_without_buffers_schedules_between_steps(
    version: str, words: str, is_between: bool
):
    result = priced(of_sglang(version, f"{HYBRID} {words}"))
    assert bool(result.advised("Schedule the next step")) == is_between
    plain = priced(of_sglang(version, f"{HYBRID} {words} --disable-overlap-schedule"))
    if is_between:
        assert result.tpot_s == pytest.approx(plain.tpot_s)
    else:
        assert result.tpot_s < plain.tpot_s


def test_a_dense_model_has_no_states_to_keep():
    result = priced(of_sglang("0.5.10", EAGLE.partition(" --spec")[0]))
    assert result.advised("Schedule the next step") == []


def test_nccls_sums_are_slower_over_nvlink_and_the_only_ones_on_four_pcie_cards():
    """12 % were reported of a 70B model on four A100 (vLLM issue 2192)."""
    option = "--disable-custom-all-reduce"
    own = priced(WIDE, hardware="a100")
    by_nccl = priced(f"{WIDE} {option}", hardware="a100")
    assert 1.02 < by_nccl.tpot_s / own.tpot_s < 1.2
    assert by_nccl.advised("own kernels") == [f"leave out {option}"]
    alone = priced(f"vllm serve Qwen/Qwen3-8B {option}")
    assert alone.advised("own kernels") == []
    small = "vllm serve Qwen/Qwen3-8B -tp 4"
    cards = priced(small, hardware="rtx-4090-24gb")
    assert priced(f"{small} {option}", hardware="rtx-4090-24gb") == cards


@pytest.mark.parametrize(
    ("variable", "words", "option"),
    [
        ("VLLM_USE_V2_MODEL_RUNNER=0", "", "leave out VLLM_USE_V2_MODEL_RUNNER=0"),
        ("VLLM_USE_V2_MODEL_RUNNER=1", "", ""),
        ("", "--enable-dbo", "leave out --enable-dbo"),
    ],
)
def test_the_older_runner_costs_what_was_measured(
    variable: str, words: str, option: str
):
    """3.32 for 3.08 ms a token at one user, 3.57 for 3.49 at 32 (vLLM pull request 43241)."""
    result = priced(f"{variable} vllm serve Qwen/Qwen3-8B {words}")
    assert result.advised("V2 model runner") == ([option] if option else [])
    plain = priced("vllm serve Qwen/Qwen3-8B")
    times = result.tpot_s / plain.tpot_s
    assert (3.57 / 3.49 < times < 3.32 / 3.08) == bool(option)


@pytest.mark.parametrize(
    ("version", "variable", "is_read"),
    [
        ("0.24.0", "", True),
        ("0.33.0", "", False),
        ("0.33.0", "-e VLLM_USE_V2_MODEL_RUNNER=0", True),
    ],
)
def test_an_eager_drafter_is_of_the_older_runner(
    version: str, variable: str, is_read: bool
):
    result = priced(
        f"docker run {variable} vllm/vllm-openai:v{version} {DRAFTER}", draft="eagle3"
    )
    assert bool(result.advised("drafter's graphs")) == is_read


@pytest.mark.parametrize(
    ("version", "is_between"), [("0.17.1", True), ("0.33.0", False)]
)
def test_ray_schedules_between_steps_in_older_versions(version: str, is_between: bool):
    words = "--model Qwen/Qwen3-8B --distributed-executor-backend ray"
    result = priced(f"docker run vllm/vllm-openai:v{version} {words}")
    assert bool(result.advised("Schedule the next step")) == is_between
    said = priced(
        f"docker run vllm/vllm-openai:v{version} --model Qwen/Qwen3-8B --no-async-scheduling"
    )
    assert (result.tpot_s == pytest.approx(said.tpot_s)) == is_between


def test_a_threshold_of_long_prompts_reads_as_a_smaller_chunk_does():
    long = priced("vllm serve Qwen/Qwen3-8B --long-prefill-token-threshold 256")
    small = priced("vllm serve Qwen/Qwen3-8B --max-num-batched-tokens 256")
    assert long.advised("Read prompts") == ["--long-prefill-token-threshold 8192"]
    assert [
        change.gain for change in long.changes if "Read prompts" in change.change
    ] == [change.gain for change in small.changes if "Read prompts" in change.change]


def test_a_block_size_is_the_number_of_drafted_tokens_and_one():
    words = (
        "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --speculative-algorithm DFLASH "
        "--speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16"
    )
    block = read_serve_command(f"{words} --speculative-dflash-block-size 4").speculation
    number = read_serve_command(f"{words} --speculative-num-draft-tokens 4").speculation
    assert block is not None
    assert block == number
    assert block.gamma == 3
