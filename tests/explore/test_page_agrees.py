"""The page, its JSON, and `plan -o` of the command that the page shows: one answer to the last digit."""

from __future__ import annotations

import json
import re
import shlex
from html import unescape
from pathlib import Path

import pytest
from test_http import get
from test_rate import awaited
from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from magicdec.explore.explorer import CHOOSE_THE_TEXT
from magicdec.explore.server import ExplorerServer
from magicdec.explore.state import EXAMPLE
from magicdec.reports.sentences import (
    NAME_THE_TEXT,
    acceptance_line,
    first_line,
    traffic_line,
)
from magicdec.schema.plan import Plan, plan_of
from magicdec.units import format_seconds
from tests.same import assert_same

QUESTIONS = (
    "model=Qwen/Qwen2.5-72B-Instruct&hardware=4xh100&context=8k&batch=57&task=chat",
    "model=llama-3.3-70b&hardware=8xh200&context=64k&batch=8&task=summarisation&gen_len=300",
    "model=gpt-oss-120b&hardware=h100&task=agentic&cached=90%25&batch=8",
    "model=mistral-small-24b&hardware=rtx-5090&batch=1&context=4096&tpot_ms=30&ttft_ms=3000",
    "model=llama-3.1-8b&hardware=l4-24gb&context=6k&gen_len=300&draft=ngram&batch=4&price=0.8",
    "model=qwen3-32b&hardware=h100&draft=qwen3-0.6b&batch=1&context=2048&gamma=4",
    "model=deepseek-v3&hardware=8xb200&draft=mtp&batch=16&context=4096&tpot_ms=20",
    "model=llama-3.1-8b&hardware=h100&batch=16&context=4096&gen_len=200&prefill=elsewhere",
    "model=qwen3-8b&hardware=a100&acceptance=0.7&batch=16&engine=sglang&draft=eagle3",
)


def command_of(page: str) -> list[str]:
    match = re.search(r"<code>(magicdec plan [^<]*)</code>", page)
    assert match is not None
    return shlex.split(unescape(match[1]))


def on_the_command_line(words: list[str], file: Path) -> tuple[dict[str, object], str]:
    """Its JSON, written to a file, and what it says on a terminal."""
    register_commands()
    done = CliRunner().invoke(
        app, [*words[1:], "-o", str(file)], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 0, done.output
    return json.loads(file.read_text()), done.output


def check_page(page: str, plan: Plan) -> None:
    """The page's words and facts are the document's."""
    text = re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", page)))
    assert NAME_THE_TEXT not in text
    best = plan.best
    for limit in plan.choice.limits:
        assert limit.of in text or plan.traffic is not None
    if plan.traffic is not None:
        assert re.sub(r"\s+", " ", traffic_line(plan.traffic)) in text
    facts = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)", page.replace("\n", " ")))
    if plan.traffic is None:
        assert re.sub(r"\s+", " ", first_line(plan)).rstrip(".") in text
    if best.is_speculative and plan.traffic is None:
        low, high = best.decoding.gain.low, best.decoding.gain.high
        of = "" if best.requests is None else " of decoding"
        speedup = facts[f"Predicted speedup{of}"]
        assert unescape(speedup) == f"{best.decoding.gain.speedup:.2f}×"
        assert f"{low:.2f}–{high:.2f}" in text
        words = acceptance_line(plan.choice)[1:].replace(NAME_THE_TEXT, CHOOSE_THE_TEXT)
        assert words in text
    if best.requests is None and plan.traffic is None:
        assert facts["First token"] == format_seconds(best.ttft_s)
        tokens = facts["Tokens per second"].replace("\u202f", "")
        assert int(tokens) == round(best.tokens_per_s)


@pytest.mark.parametrize("query", QUESTIONS)
def test_page_and_command_line_agree(
    server: ExplorerServer, query: str, tmp_path: Path
) -> None:
    status, page = get(server, f"/answer?{query}")
    assert status == 200, page
    shown = json.loads(get(server, f"/plan.json?{query}")[1])
    answered, said = on_the_command_line(command_of(page), tmp_path / "plan.json")
    assert answered == shown
    plan = plan_of(shown)
    check_page(page, plan)
    first = re.sub(r"\s+", " ", first_line(plan))
    assert first in re.sub(r"\s+", " ", said)


@pytest.mark.slow
def test_a_rate_agrees_too(server: ExplorerServer, tmp_path: Path) -> None:
    status, page, _ = awaited(server, EXAMPLE)
    assert status == 200
    shown = json.loads(get(server, f"/plan.json?{EXAMPLE}")[1])
    answered, _ = on_the_command_line(command_of(page), tmp_path / "plan.json")
    assert_same(answered, shown)
    check_page(page, plan_of(shown))
