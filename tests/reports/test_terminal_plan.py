"""A plan's tables on terminals of several widths."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

import magicdec
from magicdec.plan_document import Plan
from magicdec.reports.terminal_plan import print_plan


@pytest.fixture(scope="module")
def answer() -> Plan:
    return magicdec.plan(
        model="llama-3.1-70b", hardware="h100-sxm-80gb", engine="magicdec-2024", context=16384, batch=64,
        draft="llama-3.2-1b", acceptance_rate=0.75,
    )  # fmt: skip


def shown(answer: Plan, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_plan(answer, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines())
    return text


@pytest.mark.parametrize("width", [80, 120])
def test_names_are_whole_at_every_width(answer: Plan, width: int) -> None:
    words = shown(answer, width).split()
    assert {"llama-3.2-1b", "streamingllm", "full"} <= set(words)
    assert "…" not in "".join(words)


def test_a_wide_terminal_shows_more(answer: Plan) -> None:
    assert "GiB/GPU" in shown(answer, 120)
    assert "GiB/GPU" not in shown(answer, 80)


def test_a_context_of_break_even_at_the_tables_edge_is_a_bound(answer: Plan) -> None:
    table = answer.gamma_table
    everywhere = msgspec.structs.replace(table, break_even_context=[table.context_lens[0]] * len(table.batch_sizes))
    assert "<= 512" in shown(msgspec.structs.replace(answer, gamma_table=everywhere), 80)
    assert "<= 512" not in shown(answer, 80)


def test_no_speculation_is_compared_with_its_best_batch() -> None:
    alone = magicdec.plan(model="llama-3.1-8b", hardware="a100-sxm-80gb", context=32768, batch=64, draft="none")
    best = alone.best_autoregressive
    assert best is not None
    share = alone.best.tokens_per_s_per_gpu / best.tokens_per_s_per_gpu
    assert f"{share:.2f}x of what its best batch {best.batch_size}" in " ".join(shown(alone, 80).split())
    there = magicdec.plan(
        model="llama-3.1-8b", hardware="a100-sxm-80gb", context=32768, draft="none", batch=best.batch_size,
        tp=best.tp_size,
    )  # fmt: skip
    assert "of what its best batch" not in " ".join(shown(there, 80).split())
