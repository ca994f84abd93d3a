"""A line about a checked command hangs on the fields that it claims and on no other, and every number that it prints is
one of them."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache
from statistics import NormalDist
from typing import Any

import msgspec
import pytest

from magicdec.live.change import Change
from magicdec.live.check import Check, check_command
from magicdec.live.check_text import lines_of
from magicdec.live.load import AskedLoad
from magicdec.specs.serve_command import read_serve_command
from tests.claims import claimed, idle, moved_by, unclaimed, unfounded

CLAIMS = {
    "wrong": ("problems",),
    "advice": (
        "changes",
        "problems",
        "command.unread",
        "command.speculation",
    ),
    "option": ("changes",),
    "why": ("changes",),
    "as it is": (
        "problems",
        "num_gpus",
        "hardware",
        "command.engine",
        "command.dp_size",
        "command.speculation.tree",
        "as_it_is.batch_size",
        "as_it_is.context_len",
        "as_it_is.layout",
        "as_it_is.drafting.draft",
        "as_it_is.drafting.method",
        "as_it_is.drafting.budget",
        "as_it_is.drafting.gamma",
        "as_it_is.decoding",
        "as_it_is.requests",
    ),
    "acceptance": (
        "as_it_is.drafting.gamma",
        "as_it_is.drafting.acceptance_source",
        "as_it_is.drafting.acceptance_text",
    ),
    "without a draft": (
        "command.speculation",
        "without_draft.decoding",
        "without_draft.requests",
    ),
    "asked": ("asked",),
    "assumed": ("assumed",),
    "note": ("notes",),
    "not understood": ("not_understood", "command.engine"),
    "noted": ("command.noted",),
    "not looked at": ("command.not_looked_at",),
    "without effect": ("command.without_effect",),
}
"""The fields that each kind of line hangs on, and no other."""

COMMANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "a head on a small device": (
        "vllm serve openai/gpt-oss-20b --max-num-seqs 64 --speculative-config "
        '\'{"method": "eagle3", "model": "RedHatAI/gpt-oss-20b-speculator.eagle3", "num_speculative_tokens": 7}\'',
        {"hardware": "rtx-4090-24gb", "batch": 16, "context_len": 16384, "task": "code"},
    ),
    "no draft, graphs off": (
        "vllm serve meta-llama/Llama-3.1-8B-Instruct --enforce-eager --seed 1",
        {"hardware": "h100", "batch": 8, "context_len": 4096},
    ),
    "a look-up with graphs in pieces, and a file": (
        "vllm serve Qwen/Qwen3-32B --tensor-parallel-size 2 --data-parallel-size 2 -O1 --config more.yaml "
        '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}\'',
        {"hardware": "h200", "batch": 32, "context_len": 8192, "task": "summarisation", "gen_len": 300},
    ),
    "a tree in another engine": (
        "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path lmsys/sglang-EAGLE3-LLaMA3.1-Instruct-8B --speculative-num-steps 3 "
        "--speculative-eagle-topk 4 --speculative-num-draft-tokens 8",
        {"hardware": "a100", "batch": 4, "context_len": 2048},
    ),
    "users that wait, an option unknown": (
        "vllm serve meta-llama/Llama-3.1-70B-Instruct --tensor-parallel-size 4 --max-num-seqs 64 --foo 3 "
        "--attention-backend FLASHINFER --watermark 0.1",
        {"hardware": "2xh100", "batch": 64, "context_len": 8192},
    ),
    "a model that does not fit": ("vllm serve meta-llama/Llama-3.1-405B-Instruct", {"hardware": "h100"}),
    "a file that is not read": (
        "vllm serve meta-llama/Llama-3.1-8B-Instruct --config serve.yaml",
        {"hardware": "h100", "batch": 1, "context_len": 2048, "task": "chat"},
    ),
    "a module that is not there": (
        'vllm serve Qwen/Qwen3-4B --speculative-config \'{"method": "mtp", "num_speculative_tokens": 2}\'',
        {"hardware": "h100"},
    ),
}  # fmt: skip


@cache
def checked(name: str) -> Check:
    """As read back from its document, where no two places hold the same object."""
    command, load = COMMANDS[name]
    result = check_command(
        read_serve_command(command, reads_files=False),
        AskedLoad(**load),
    )
    return msgspec.convert(msgspec.to_builtins(result), Check)


def said(result: Check) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = defaultdict(list)
    for change in result.changes:
        ends = (change.gain, change.gain_low, change.gain_high)
        if None in ends and set(ends) != {None}:
            return {}  # a gain has both its ends
    for line in lines_of(result):
        texts[line.kind].append(line.text)
    return texts


def chance_of(change: Change) -> float:
    """The chance of a log-normal gain above 1, by its interval."""
    assert None not in (change.gain, change.gain_low, change.gain_high)
    sigma = math.log(change.gain_high / change.gain_low) / (2.0 * 1.6449)
    if sigma == 0.0:
        return float(change.gain > 1.0)
    return NormalDist().cdf(math.log(change.gain) / sigma)


@pytest.mark.slow
def test_the_fields_that_change_a_line_are_those_that_it_claims() -> None:
    moved = [moved_by(checked(name), said) for name in COMMANDS]
    assert [unclaimed(each, CLAIMS) for each in moved] == [set()] * len(COMMANDS)
    assert idle(moved, CLAIMS) == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_each_number_of_a_line_is_of_the_fields_that_it_claims(name: str) -> None:
    result = checked(name)
    chances = [chance_of(change) for change in result.changes if change.gain_low]
    for kind, texts in said(result).items():
        numbers, names = claimed(result, CLAIMS[kind])
        if kind == "advice":
            numbers += chances
        for text in texts:
            # a change's reason is a field, but begins with a capital in a list
            names |= {each[:1].upper() + each[1:].removesuffix(".") for each in names}
            names |= {"EAGLE-3", result.command.why_not_understood}
            assert unfounded(text, numbers, names) == [], (kind, text)
