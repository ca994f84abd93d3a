"""The Python interface gives what the commands print, from plain values."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import magicdec
from magicdec.api import plan, predict, sensitivity, simulate
from magicdec.errors import ConfigError
from magicdec.schema.request import request_options
from magicdec.schema.row import COLUMNS
from magicdec.specs.catalog import MODELS_DIRECTORY
from tests.processes import Program
from tests.same import assert_same

RECORDS = Path(__file__).resolve().parents[1] / "results" / "demo-2-cores.jsonl"


def test_plan_answers_as_the_command_does(program: Program) -> None:
    asked = ("--batch", "8,64", "--context", "4k,32k", "--tpot-ms", "80")
    asked += ("--draft", "eagle3")
    printed = program("plan", *asked, "--format", "json")
    plan = magicdec.plan(
        batch=[8, 64], context=["4k", 32768], tpot_ms=80, draft="eagle3"
    )
    assert_same(json.loads(plan.to_json()), json.loads(printed.stdout))


def test_one_value_stands_for_a_list_of_one() -> None:
    one = magicdec.plan(
        batch=64, context=32768, hardware="a100-sxm-80gb", draft_budget=512
    )
    several = magicdec.plan(
        batch=[64], context=(32768,), hardware=["a100-sxm-80gb"], draft_budget=[512]
    )
    assert one == several


def test_predict_is_the_plans_row_of_that_configuration() -> None:
    plan = magicdec.plan(batch=64, context=32768, draft_method="streamingllm")
    (row,) = [
        row for row in plan.candidates if (row.draft_budget, row.gamma) == (512, 3)
    ]
    found = magicdec.predict(
        batch=64, context=32768, draft_method="streamingllm", draft_budget=512, gamma=3
    )
    assert found.speedup == pytest.approx(row.speedup, rel=1e-12)
    assert found.speedup_low == pytest.approx(row.speedup_low, rel=1e-12)
    assert magicdec.predict(batch=64, context=32768, gamma=0).tpot_s == pytest.approx(
        row.step.autoregressive_s
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bach": 3}, "unknown option 'bach': did you mean batch?"),
        (
            {"hardware": "a100-sxn-80gb"},
            "unknown hardware 'a100-sxn-80gb': did you mean a100-sxm-80gb?",
        ),
        ({"batch": "many"}, "batch must be a number like 4096 or 32k, not 'many'"),
        ({"batch": True}, "batch must be a whole number, not True"),
        (
            {"batch": 64, "draft_method": "streamingllm", "gamma": 3},
            "give one draft_budget",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        magicdec.predict(**options)


def test_tables_hold_every_row_and_field() -> None:
    plan = magicdec.plan(batch=64, context=32768)
    frame = plan.to_frame()
    assert len(frame) == len(plan.rows)
    assert set(frame) == {*COLUMNS, "verdict"}
    assert frame["speedup"].max() == max(row.speedup for row in plan.rows)
    records = magicdec.load_records(RECORDS)
    assert (
        len(records.to_frame()) == len(records) == len(RECORDS.read_text().splitlines())
    )


def test_the_interface_is_listed_explained_and_short(tmp_path: Path) -> None:
    """dir() names it, help() every option, and a plan's repr is its answer."""
    assert {
        "plan",
        "predict",
        "load_plan",
        "load_records",
        "models",
        "hardware",
        "engines",
        "report",
    } <= set(dir(magicdec))
    assert all(
        f"{name}: {asked.help}" in (magicdec.plan.__doc__ or "")
        for name, asked in request_options().items()
    )
    plan = magicdec.plan(batch=64, context=[16384, 32768], draft_method="streamingllm")
    assert repr(plan).count("\n") == 2
    assert f"{plan.other_cases[0].best.speedup:.2f}x" in repr(plan)
    (tmp_path / "plan.json").write_text(plan.to_json())
    again = magicdec.load_plan(tmp_path / "plan.json")
    assert repr(again) == repr(plan)
    assert again.to_json() == plan.to_json()  # rows hold five significant digits
    assert len(again.rows) == len(plan.rows)
    assert (
        "Does speculative decoding pay"
        in magicdec.report(tmp_path / "report.html", plan=plan).read_text()
    )
    assert "llama-3.1-8b" in magicdec.models()
    assert "h100-sxm-80gb" in magicdec.hardware()
    assert "vllm" in magicdec.engines()
    assert magicdec.sensitivity(batch=64, context=32768, draft="eagle3").measure_next


@pytest.mark.parametrize("question", [plan, predict, sensitivity, simulate])
def test_the_keywords_of_a_plan_are_the_options_of_the_request(question: Any) -> None:
    """What editors and `inspect` see is what is understood."""
    parameters = list(inspect.signature(question).parameters)
    assert parameters[-len(request_options()) :] == list(request_options())
    assert "context: " in question.__doc__


def test_a_model_may_be_the_dictionary_of_its_configuration() -> None:
    config = json.loads((MODELS_DIRECTORY / "qwen3-8b.json").read_text())
    assert magicdec.plan(
        model=config, batch=8, draft="none"
    ).best.tpot_s == pytest.approx(
        magicdec.plan(model="qwen3-8b", batch=8, draft="none").best.tpot_s
    )


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import magicdec, sys; sys.exit(bool({'numpy', 'scipy', 'pandas', 'torch', 'typer'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
