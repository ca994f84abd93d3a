"""Each row of the table of rules is tried on an input that is refused and on a near one that passes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from magicdec.live.findings import findings_of
from magicdec.live.load import AskedLoad
from magicdec.perfmodel.plan.standing import AskedDraft, standing
from magicdec.specs.catalog import is_model, load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.rules import Rule, rules
from magicdec.specs.serve_command import read_serve_command
from magicdec.specs.serve_command.server import UNFITTED

EXAMPLES = tomllib.loads(
    (Path(__file__).parents[1] / "data" / "rule_examples.toml").read_text()
)["examples"]


def refusals(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[bool, list[Rule]]:
    """Whether an input is refused, and the rows that spoke of it."""
    spoke = []
    holds = Rule.holds

    def recorded(rule: Rule, *args: Any, **more: Any) -> bool:
        answer = holds(rule, *args, **more)
        if answer:
            spoke.append(rule)
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(Rule, "holds", recorded)
        if "command" in given:
            command = read_serve_command(given["command"], reads_files=False)
            load = AskedLoad(hardware=given.get("hardware", "h100"))
            return bool(findings_of(command, load).said["wrong"]), spoke
        return not _standing(**given).starts, spoke


def _standing(
    engine: str,
    target: str,
    draft: str,
    method: str = "",
    architecture: str = "",
    modules: int = 1,
    **asked: Any,
) -> Any:
    """Whether a draft starts, on a target that may be given another architecture or more modules."""
    profile = UNFITTED / f"{engine}.toml" if engine == "llama.cpp" else engine
    model = load_model_spec(target)
    model = msgspec.structs.replace(
        model,
        architecture=architecture or model.architecture,
        mtp_layers=model.mtp_layers * modules,
    )
    drafting = None
    if is_model(draft):
        drafting = load_model_spec(draft)
        method = "full"
    question = AskedDraft(
        draft=draft,
        method=method or draft,
        model=drafting,
        exists=True,
        reads_files=False,
        **asked,
    )
    return standing(question, model, load_engine(profile))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda row: str(row["refused"])[:60])
def test_a_refused_input_has_a_near_one_that_passes(
    example: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is wrong by a row of the table."""
    is_refused, spoke = refusals(example["refused"], monkeypatch)
    assert is_refused
    assert any(rule.is_wrong for rule in spoke)
    is_refused, _ = refusals(example["passes"], monkeypatch)
    assert not is_refused


def test_every_row_of_drafts_is_exercised(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row stands in the table that no input reaches."""
    reached: set[Rule] = set()
    of_drafts: set[str] = set()
    for example in EXAMPLES:
        for given in example.values():
            _, spoke = refusals(given, monkeypatch)
            reached.update(spoke)
            if "command" not in given:
                of_drafts.update(rule.name for rule in spoke)
    for rule in rules():
        assert rule in reached or rule.name not in of_drafts
