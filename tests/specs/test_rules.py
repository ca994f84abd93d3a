"""The table of rules: every claim has its evidence, and speaks for the versions it was looked up for."""

from itertools import combinations
from typing import Any

import pytest

from magicdec.specs.engine import engine_names
from magicdec.specs.rules import Rule, finding, rule_for, rules, rules_of

NAMES = sorted({rule.name for rule in rules()})


def named(rule: Rule) -> str:
    return f"{rule.name} {rule.engine} {rule.since}"


@pytest.mark.parametrize("rule", rules(), ids=named)
def test_nothing_is_called_wrong_without_an_address(rule: Rule) -> None:
    """A refusal has an engine, a sentence and an address."""
    assert rule.engine in ("", "llama.cpp", *engine_names())
    if rule.kind == "wrong":
        assert rule.engine
        assert rule.says
        assert rule.address
    if rule.unless_since:
        assert rule.unless


@pytest.mark.parametrize("name", NAMES)
def test_where_nobody_looked_nothing_is_wrong(name: str) -> None:
    """Each situation has a row for the engines and versions that no other row speaks for."""
    *_, last = rules_of(name)
    assert last == Rule(name=name, kind=last.kind, says=last.says)
    rule = rule_for(name, "an engine of tomorrow", "9")
    assert rule == last
    assert not rule.is_wrong


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_an_engine_do_not_hide_each_other(name: str) -> None:
    """Two rows of one engine differ in their versions, their drafts and targets, or the setting that lifts them."""
    for one, other in combinations(rules_of(name), 2):
        keys = [
            (
                *(rule.engine, rule.since, rule.before, rule.unless),
                *(rule.drafts, rule.of, rule.not_of),
            )
            for rule in (one, other)
        ]
        assert keys[0] != keys[1]


def test_a_row_holds_for_its_versions_unless_a_setting_lifts_it() -> None:
    """vLLM compares vocabularies unless told not to, by a key that it knows from 0.25 on."""
    values: Any = {"draft": "a", "size": 1, "target": "b", "target_size": 2}
    key = ["use_heterogeneous_vocab"]
    kinds = {
        (engine, version, bool(settings)): finding(
            "draft's vocabulary", engine, version, settings=settings, **values
        )
        for engine, version in (
            ("vllm", ""),
            ("vllm", "0.24.0"),
            ("sglang", "0.5.23"),
            ("sglang", "0.5.13"),
            ("trtllm", ""),
        )
        for settings in ([], key)
    }
    wrong = [case for case, found in kinds.items() if found and found.kind == "wrong"]
    assert wrong == [
        ("vllm", "", False),
        ("vllm", "0.24.0", False),
        ("vllm", "0.24.0", True),
        ("sglang", "0.5.23", False),
        ("sglang", "0.5.23", True),
    ]
