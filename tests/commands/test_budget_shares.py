"""Draft budgets as shares of the context: what they come to, what names them, what is refused."""

from __future__ import annotations

import pytest

import magicdec
from magicdec.errors import ConfigError
from magicdec.specs.speculation import budget_at
from tests.processes import Program

ASKED = {
    "model": "llama-3.1-8b",
    "hardware": "h100-sxm-80gb",
    "draft": "self",
    "batch": 8,
}


def test_a_share_is_its_part_of_each_context() -> None:
    """Tokens and shares in one list; the answer names both for each row."""
    plan = magicdec.plan(**ASKED, context=(8192, 16_384), draft_budget=("7%", 512))
    budgets = {
        context: {
            row.draft_budget for row in plan.candidates if row.context_len == context
        }
        for context in (8192, 16_384)
    }
    assert budgets == {8192: {573, 512}, 16_384: {1147, 512}}
    for row in plan.candidates:
        assert row.draft_budget is not None
        assert row.drafting.budget_share == pytest.approx(
            row.draft_budget / row.context_len
        )
    assert plan.request.draft_budgets == ("7%", 512)


def test_a_share_plans_as_its_tokens_do() -> None:
    by_share = magicdec.plan(**ASKED, context=16_384, draft_budget="7%")
    by_tokens = magicdec.plan(**ASKED, context=16_384, draft_budget=1147)
    assert by_share.candidates == by_tokens.candidates


def test_the_terminal_names_tokens_and_share(program: Program) -> None:
    done = program(
        "plan", "--model", "llama-3.1-8b", "--hardware", "h100", "--draft", "self", "--plugin",
        "--draft-budget", "7%", "--context", "16k", "--batch", "8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "draft budget 1147 (7 %)" in " ".join(done.stdout.split())


@pytest.mark.parametrize("asked", ["0%", "170%", "x%", "-3%", "%"])
def test_what_is_no_share_is_refused_in_a_line(asked: str, program: Program) -> None:
    done = program("plan", "--draft", "self", f"--draft-budget={asked}")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert asked in done.stderr
    with pytest.raises(ConfigError, match="draft_budget must be"):
        magicdec.plan(draft="self", draft_budget=asked)


def test_the_smallest_budget_holds_the_sinks_and_a_token() -> None:
    assert budget_at("1%", 100) == 5
    assert budget_at("25%", 100) == 25
    assert budget_at(64, 100) == 64
