"""Every surface of a plan shows its one choice: the same draft, gamma, limits and figures."""

from __future__ import annotations

import io
import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import magicdec
from magicdec.errors import CapacityError, ConfigError
from magicdec.measure.plan_runs import options_of_plan
from magicdec.naming import ENGINE_TITLES
from magicdec.perfmodel.rate import load as simulated
from magicdec.perfmodel.variations import for_engine
from magicdec.reports.arrivals import load_name, traffic_line
from magicdec.reports.data import ReportData
from magicdec.reports.exports import export
from magicdec.reports.headline import headline_of
from magicdec.reports.sentences import first_line
from magicdec.reports.tables import gamma_table
from magicdec.reports.terminal_plan import print_plan
from magicdec.reports.words import drafting_of, gain_of
from magicdec.schema.plan import Choice, Plan
from magicdec.specs.engine import load_engine
from tests.same import assert_read_back

MODELS = (
    "llama-3.1-8b",
    "llama-3.3-70b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "gpt-oss-120b",
    "deepseek-v3",
)
DEVICES = ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "l4-24gb")
SPECULATIVE_WORDS = ("--speculative", "speculative_config:")
NUM_QUESTIONS, NUM_FAST, NUM_SLOW = 60, 4, 12
RATES: tuple[dict[str, Any], ...] = (
    {
        "context": 4096,
        "gen_len": 300,
        "rate": 4,
        "p95_tpot_ms": 20,
        "gpus": 8,
        "price": 3,
    },
    {"context": 1024, "gen_len": 100, "rate": 10, "p95_ttft_ms": 500},
)


def question(number: int) -> dict[str, Any]:
    draw = random.Random(number)
    asked: dict[str, Any] = {
        "model": draw.choice(MODELS),
        "hardware": draw.choice(DEVICES),
        "engine": draw.choice(("vllm", "sglang", "trtllm")),
        "context": draw.choice((600, 2048, 8192, 20_000)),
    }
    optional = {
        "batch": draw.choice((1, 6, 16, 64, [4, 23])),
        "gen_len": draw.choice((50, 400)),
        "tpot_ms": draw.choice((8, 30, 100)),
        "ttft_ms": draw.choice((500, 5000)),
        "gpus": draw.choice((8, 16)),
        "plugin": True,
        "draft": draw.choice(("eagle3", "ngram", "none")),
        "gamma": draw.choice((1, 6)),
        "price": 2.5,
    }
    for name, value in optional.items():
        if draw.random() < 0.35:
            asked[name] = value
    return asked


def number_of(value: int) -> Any:
    marks = [] if value < NUM_FAST else [pytest.mark.slow]
    if value >= NUM_SLOW:
        marks = [pytest.mark.exhaustive]
    return pytest.param(value, marks=marks)


@pytest.mark.parametrize("number", [*map(number_of, range(NUM_QUESTIONS))])
def test_all_surfaces_show_one_choice(number: int, tmp_path: Path) -> None:
    try:
        plan = magicdec.plan(**question(number))
    except (CapacityError, ConfigError):
        pytest.skip("cannot be planned, which is one answer too")
    check_choice(plan)
    check_document(plan)
    check_terminal_and_report(plan)
    check_exports(plan)
    check_run(plan, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("asked", RATES)
def test_a_rate_has_one_choice_too(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "MIN_REQUESTS", 200)
    monkeypatch.setattr(simulated, "MAX_REQUESTS", 200)
    plan = magicdec.plan(model="llama-3.1-8b", hardware="h100-sxm-80gb", **asked)
    load, row = plan.traffic.best, plan.best
    assert (row.draft, row.draft_method, row.draft_budget) == (
        load.draft, load.draft_method, load.draft_budget,
    )  # fmt: skip
    assert row.is_speculative == load.is_speculative
    assert row.num_gpus * row.num_replicas == load.num_gpus
    assert row.cost.per_million_tokens_usd == load.cost_per_million_tokens_usd
    assert {limit.is_kept for limit in plan.choice.limits} <= {True}
    text = shown(plan)
    assert traffic_line(plan.traffic) in text
    assert load_name(load) in headline_of(ReportData.from_records([], plan)).answer
    check_document(plan)
    check_exports(plan)
    check_run(plan, tmp_path)


def check_choice(plan: Plan) -> None:
    """The choice keeps what can be kept, and no admitted draft of its source beats it."""
    for case in plan.cases:
        choice = case.choice
        row = choice.row
        assert row.within_limits == all(limit.is_kept for limit in choice.limits)
        assert (choice.outcome == "speculate") == row.is_speculative
        admitted = plan.request.plugin or plan.request.draft is not None
        assert admitted or not row.drafting.needs_plugin
        if row.is_speculative:
            assert (
                row.gain.speedup > 1.0
                or row.batch_size != choice.without_draft.batch_size
            )
            table = case.gamma_table
            assert (table.draft, table.draft_method, table.draft_budget) == (
                row.draft, row.draft_method, row.draft_budget,
            )  # fmt: skip
            (here,) = [
                band
                for band in choice.gammas
                if band.first <= row.batch_size <= band.last
            ]
            looked_up = table.policy.choose(
                batch_size=row.batch_size, context_len=row.context_len
            )
            assert here.gamma == looked_up == row.gamma
            continue
        left_out = choice.left_out
        if left_out is not None and choice.outcome == "no gain":
            is_slower = left_out.gain.speedup <= 1.0
            is_elsewhere = left_out.batch_size != row.batch_size
            assert is_slower or is_elsewhere or is_slower_on_a_text(choice)
        if left_out is not None and choice.outcome == "no room":
            assert not left_out.fits
            assert choice.left_out_fits is None or choice.left_out_fits.fits


def is_slower_on_a_text(choice: Choice) -> bool:
    """Whether no draft is faster on one of the texts that are weighed, where none was named."""
    tasks = choice.outlook.tasks if choice.outlook else []
    return any(task.weight > 0.0 and task.draft == "none" for task in tasks)


def check_document(plan: Plan) -> None:
    assert_read_back(plan)
    assert len(plan.to_csv().splitlines()) == len(plan.rows) + 1
    best = plan.best
    wanted = (
        f"gamma {best.gamma}: {best.gain.speedup:.2f}x"
        if best.is_speculative
        else "no draft"
    )
    assert wanted in repr(plan)


def shown(plan: Plan) -> str:
    """The terminal's text, with its lines joined."""
    out = io.StringIO()
    print_plan(plan, Console(file=out, width=10_000, highlight=False))
    return out.getvalue()


def check_terminal_and_report(plan: Plan) -> None:
    text = shown(plan)
    assert text.splitlines()[0] == first_line(plan)
    assert plan.best.is_speculative == (" with " in first_line(plan).partition(":")[0])
    if plan.best.is_speculative:
        assert gain_of(plan.best) in text
    answer = headline_of(ReportData.from_records([], plan)).answer
    assert answer == first_line(plan).removesuffix(".")
    table = gamma_table(ReportData.from_records([], plan))
    assert table is not None
    if plan.best.is_speculative:
        (row,) = [
            row for row in table.records if row["batch_size"] == plan.best.batch_size
        ]
        assert row[f"context_{plan.best.context_len}"] == plan.best.gamma


def check_exports(plan: Plan) -> None:
    """The plan's own engine gets the choice, others a draft that they run, or none."""
    for engine in ENGINE_TITLES:
        again = for_engine(plan, engine)
        if engine == plan.engine:
            assert again.plan.choice == plan.choice
        text = export(engine, again.plan, reason=again.reason, site=again.site)
        best = again.plan.best
        if not plan.best.is_speculative:
            assert not best.is_speculative
        if not best.is_speculative:
            assert not any(word in text for word in SPECULATIVE_WORDS)
            continue
        assert load_engine(engine).runs(best.draft, best.draft_method)
        head = " ".join(
            line.removeprefix("# ") for line in text.splitlines() if line[:1] == "#"
        )
        name = drafting_of(best).removeprefix("draft model ")
        assert name.split(",")[0].split(" ")[0] in head
        gain = best.gain
        assert f"speedup of {best.gain_is_of} {gain.speedup:.2f} (90 % interval" in head
        said = gain.verdict
        if said == "unclear":
            likely = f"{100 * gain.probability:.0f} %"
            if gain.probability > 0.99:
                likely = "over 99 %"
            if gain.probability < 0.01:
                likely = "under 1 %"
            said = f"{likely} likely to pay"
        assert f"{gain.low:.2f} to {gain.high:.2f}): {said}." in head
        if engine == "vllm":
            check_vllm(text, again.plan)


def check_vllm(text: str, plan: Plan) -> None:
    lines = [
        line.removesuffix("\\")
        for line in text.splitlines()
        if not line.startswith("#")
    ]
    words = shlex.split(" ".join(lines))
    config = json.loads(words[words.index("--speculative-config") + 1])
    bands = config.get("num_speculative_tokens_per_batch_size")
    if bands is not None:
        assert bands == [list(band) for band in plan.choice.gammas]
    most = max([plan.best.gamma, *(band.gamma for band in plan.choice.gammas)])
    assert config["num_speculative_tokens"] in (most, plan.best.gamma)


def check_run(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    try:
        runs, gamma_table = options_of_plan(path, frozenset())
    except ConfigError:
        return  # a draft, a format or a spread that is planned for and not run
    assert runs[0]["draft"] == plan.best.draft
    if plan.best.is_speculative:
        assert runs[0]["gamma"] == str(plan.best.gamma)
    assert gamma_table == plan.gamma_table.policy
