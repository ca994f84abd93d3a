"""A plan's tables on terminals of several widths."""

from __future__ import annotations

import io
import re
from random import Random
from typing import Any

import msgspec
import pytest
from rich.console import Console

import magicdec
from magicdec.errors import CapacityError, ConfigError
from magicdec.reports.sentences import self_drafted
from magicdec.reports.terminal_plan import print_plan
from magicdec.reports.words import drafting_of, probability_of
from magicdec.schema.plan import Plan


@pytest.fixture(scope="module")
def answer() -> Plan:
    return magicdec.plan(
        model="llama-3.1-70b", hardware="h100-sxm-80gb", engine="magicdec-2024", context=16384, batch=64,
        draft="llama-3.2-1b", acceptance_rate=0.75,
    )  # fmt: skip


def shown(answer: Plan, width: int, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_plan(answer, console, **options)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines())
    return text


@pytest.mark.parametrize("width", [80, 120])
def test_names_are_whole_at_every_width(answer: Plan, width: int) -> None:
    words = shown(answer, width).split()
    assert {"llama-3.2-1b", "streamingllm", "full"} <= set(words)
    assert "…" not in "".join(words)


def test_a_saved_plan_goes_on_from_its_file(answer: Plan) -> None:
    *_, unsaved = shown(answer, 80).splitlines()
    *_, saved = shown(answer, 80, saved_as="mine.json").splitlines()
    assert unsaved.startswith("next: add -o plan.json; magicdec run --plan plan.json")
    assert saved.startswith("next: magicdec run --plan mine.json")


def test_only_a_context_that_nobody_asked_for_is_called_the_default() -> None:
    asked = {"model": "llama-3.2-1b", "hardware": "h100", "batch": 1, "draft": "none"}
    default = magicdec.plan(**asked)
    assert f"context {default.context_len} (default)" in shown(default, 120)
    for context in (default.context_len, 4096):
        answer = magicdec.plan(**asked, context=context)
        assert f"context {context}." in shown(answer, 120)


def test_a_wide_terminal_shows_more(answer: Plan) -> None:
    assert "verify ms" in shown(answer, 160)
    assert "verify ms" not in shown(answer, 80)


def test_a_context_of_break_even_at_the_tables_edge_is_a_bound(answer: Plan) -> None:
    table = answer.gamma_table
    everywhere = msgspec.structs.replace(
        table, break_even_context=[table.context_lens[0]] * len(table.batch_sizes)
    )
    assert "<= 512" in shown(
        msgspec.structs.replace(answer, gamma_table=everywhere), 80, every=True
    )
    assert "<= 512" not in shown(answer, 80, every=True)


def test_no_speculation_is_compared_with_its_best_batch() -> None:
    alone = magicdec.plan(
        model="llama-3.1-8b",
        hardware="a100-sxm-80gb",
        context=32768,
        batch=64,
        draft="none",
    )
    best = alone.best_autoregressive
    assert f"best batch {best.batch_size}: " in " ".join(shown(alone, 80).split())
    there = magicdec.plan(
        model="llama-3.1-8b", hardware="a100-sxm-80gb", context=32768, draft="none", batch=best.batch_size,
        tp=best.tp_size,
    )  # fmt: skip
    assert "best batch" not in " ".join(shown(there, 80).split())


PLANS: dict[str, dict[str, Any]] = {
    "a draft that needs the plugin": {"batch": 64},
    "searched": {
        "model": "llama-3.1-70b",
        "hardware": "h100-sxm-80gb",
        "gpus": 8,
        "context": 16384,
        "tpot_ms": 30,
    },
    "no draft pays": {"hardware": "rtx-4090", "context": 8192},
    "whole requests": {"gen_len": 256, "price": 2, "batch": [8, 64]},
    "several cases": {
        "hardware": ["a100-sxm-80gb", "h200-sxm-141gb"],
        "context": [16384, 65536],
        "batch": 32,
        "draft": "eagle3",
    },
    "a model's own head": {"model": "deepseek-v3", "hardware": "h200-sxm-141gb"},
    "no acceptance known": {"draft": "suffix", "model": "qwen3-0.6b"},
}


@pytest.mark.parametrize("name", PLANS)
def test_the_answer_stands_first_whole_and_short(name: str) -> None:
    """What to do with its gain and interval, at most five rows of drafts, no word cut, one line on what comes next."""
    plan = magicdec.plan(**PLANS[name])
    lines = shown(plan, 80).splitlines()
    best, several = plan.best, len(plan.cases) > 1
    if best.is_speculative and not several:
        told = best.gain.speedup
        assert f"{told:.2f}x faster" in " ".join(" ".join(lines[:2]).split())
        assert f"{probability_of(best)} likely to pay" in " ".join(
            " ".join(lines[:3]).split()
        )
        verb = "Try " if best.gain.probability < 0.9 else "Serve "
        assert lines[0].startswith(verb)
    assert sum(line.startswith("next: ") for line in lines) == 1
    assert lines[-1].startswith("next: ")
    heads = next((line.split() for line in lines if "speedup (90%)" in line), [])
    assert set(heads) <= {
        "device", "context", "layout", "batch", "draft", "gamma", "tokens", "1st", "tok", "ms/tok", "request",
        "tok/s/GPU", "$/Mtok", "speedup", "(90%)", "GiB/GPU", "x", "best", "pays", "mark", "bound", "by",
    }  # fmt: skip
    rows = [line for line in lines if re.search(r" \d\.\d\d \d\.\d\d-\d", line)]
    assert len(rows) <= 5
    assert "e+" not in " ".join(lines)
    everything = shown(plan, 80, every=True)
    assert all(note.split()[0] in everything for note in plan.notes)
    assert set(plan.key_notes) <= set(plan.notes)


def test_a_draft_that_no_release_runs_is_marked_beside_the_best_that_one_does() -> None:
    plan = magicdec.plan(batch=64)
    text = shown(plan, 80)
    for row in plan.candidates:
        assert ("--plugin" in row.drafting.marks) == (row.draft == "self")
        assert ("trained to 2k" in row.drafting.marks) == (
            row.draft in ("eagle", "eagle3")
        )
    best = max(
        (row for row in plan.candidates if row.draft != "self"),
        key=lambda row: row.rate,
    )
    assert plan.choice.left_out == best
    assert not plan.best.is_speculative
    fastest = max(plan.candidates, key=lambda row: row.rate)
    assert self_drafted(plan, plan) == fastest
    assert f"{drafting_of(best)}, would be {best.speedup:.2f}x" in " ".join(
        text.split()
    )
    told = "With --plugin (our vLLM plugin, not yet measured on a GPU)"
    assert told in " ".join(shown(plan, 80, every=True).split())
    admitted = magicdec.plan(batch=64, plugin=True)
    assert admitted.best.draft == "self"
    assert admitted.best.rate > 0.99 * fastest.rate
    assert told not in " ".join(shown(admitted, 80, every=True).split())


CHOICES: dict[str, list[Any]] = {
    "model": ["llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "gpt-oss-120b", "olmo-2-7b"],
    "hardware": ["h100", "a100", "l4", "h200", "2xh100", "rtx-4090"],
    "context": ["1k", "4k", "8k", "16k", "64k"],
    "batch": [1, 8, 64, 512],
    "gen_len": [None, 300],
    "task": [None, None, "chat", "code-edit"],
    "engine": [None, None, "sglang", "trtllm"],
    "tpot_ms": [None, None, None, 30],
    "draft": [None, None, None, "eagle3", "self"],
    "plugin": [None, None, True],
}  # fmt: skip


def drawn(number: int) -> dict[str, Any]:
    random = Random(number)
    asked = {name: random.choice(values) for name, values in CHOICES.items()}
    return {name: value for name, value in asked.items() if value is not None}


@pytest.mark.parametrize("number", range(36))
def test_a_first_answer_is_short_and_of_one_piece(number: int) -> None:
    """At most 12 lines of 80 columns; the first number is that of the table's first row; a row below with more says
    why it is not taken; the range of texts covers each; a self-draft that is expected to pay is a row."""
    try:
        plan = magicdec.plan(**drawn(number))
    except (CapacityError, ConfigError):
        pytest.skip("cannot be planned, which is one answer too")
    lines = shown(plan, 80).splitlines()
    text = " ".join(lines)
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("next: ")
    assert len(re.findall("Decoding alone: |Whole requests: ", text)) == 1
    rows = [line for line in lines if re.search(r" \d\.\d\d \d\.\d\d-\d", line)]
    gains = [float(re.search(r" (\d\.\d\d) \d\.\d\d-\d", row)[1]) for row in rows]  # type: ignore[index]
    answer = re.search(r"(\d+\.\d\d)x (faster|as fast)", " ".join(lines[:3]))
    if answer is not None and plan.choice.outcome != "not published":
        assert float(answer[1]) == gains[0]
    for row, gain in zip(rows, gains, strict=True):
        is_other = " tok/s/GPU" in text or row.startswith(("tp ", "dp "))
        reasons = (
            "--plugin",
            "as good",
            "rare texts",
            "no room",
            "too slow",
            "to train",
        )
        assert gain <= gains[0] or is_other or any(reason in row for reason in reasons)
    outlook = plan.choice.outlook
    told = re.search(r"By text: (\d+\.\d\d)x .*? to (\d+\.\d\d)x on", text)
    if told is not None:
        low, high = map(float, told.groups())
        for task in outlook.tasks:
            assert low - 0.006 <= task.own.speedup <= high + 0.006
    for row in plan.candidates:
        is_sparse = row.draft == "self" and row.draft_method in (
            "streamingllm",
            "snapkv",
        )
        if is_sparse and row.gain.probability >= 0.5 and row.fits and row.within_limits:
            assert any("streamingllm" in line or "snapkv" in line for line in rows)


@pytest.mark.parametrize("device", ["rtx-4090", "l4"])
def test_cards_that_are_bought_alone_are_planned_alone(device: str) -> None:
    asked = {"hardware": device, "context": 4096, "draft": "none"}
    assert magicdec.plan(**asked).best.num_gpus == 1
    assert magicdec.plan(**asked, tp=2).best.num_gpus == 2
    assert magicdec.plan(**asked, model="llama-3.1-70b").best.num_gpus == 8
