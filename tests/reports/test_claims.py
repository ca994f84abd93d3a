"""A statement of a plan hangs on the fields that it claims and on no other, and every number that it prints is one of
them, or follows from them by the arithmetic written here."""

from __future__ import annotations

import math
import re
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

import magicdec
from magicdec.naming import METHODS, device_name
from magicdec.reports.story import CLAIMS, WEIGHTS, story_of
from magicdec.schema.plan import Plan
from magicdec.tasks import TASKS

QUESTIONS: dict[str, dict[str, Any]] = {
    "decoding alone": {"model": "llama-3.1-8b", "hardware": "h100", "batch": 8, "context": "4k"},
    "whole requests at a price": {"model": "llama-3.1-8b", "hardware": "h100", "batch": 8, "context": "32k",
                                  "task": "chat", "price": 2, "gen_len": 300, "tpot_ms": 60},
    "a mixture, several loads": {"model": "qwen3-30b-a3b", "hardware": "a100", "batch": [1, 32],
                                 "context": ["2k", "32k"], "task": "chat"},
    "a limit, batch searched": {"model": "llama-3.1-70b", "hardware": "h100", "tp": 4, "context": "4k",
                                "gen_len": 300, "tpot_ms": 40},
    "prediction modules": {"model": "deepseek-v3", "hardware": "h200", "tp": 8, "context": "4k", "draft": "mtp",
                           "batch": 64},
    "users that wait": {"model": "qwen3-8b", "hardware": "h100", "batch": 256, "context": "32k"},
    "another gamma is better": {"model": "llama-3.1-8b", "hardware": "h100", "draft": "eagle3", "gamma": 1,
                                "batch": 1, "context": "2k", "task": "math"},
    "a head to train": {"model": "qwen2.5-7b", "hardware": "h100", "batch": 4, "context": "2k", "draft": "eagle3"},
    "no room for the draft": {"model": "llama-3.1-8b", "hardware": "h100", "tp": 1, "batch": 109, "context": "4k",
                              "draft": "eagle3", "gamma": 3},
    "a limit, decoding alone": {"model": "llama-3.1-70b", "hardware": "h100", "tp": 4, "context": "4k", "tpot_ms": 20},
    "two drafts as good": {"model": "qwen3-8b", "hardware": "h100", "batch": 64, "context": "4k", "gen_len": 1000},
    "a sparse draft of its own": {"model": "llama-3.1-8b", "hardware": "h100", "batch": 32, "context": "32k",
                                  "engine": "ours", "draft": "self", "acceptance_rate": 0.8, "price": 2},
    "a head that nobody published": {"model": "olmo-2-7b", "hardware": "h100", "batch": 4, "context": "2k",
                                     "draft": "eagle3"},
    "a draft that accepts nothing": {"model": "qwen3-30b-a3b", "hardware": "a100", "batch": 32, "context": "4k",
                                     "draft": "eagle3", "gamma": 7, "acceptance_rate": 0.0},
}  # fmt: skip


QUICK = ("decoding alone", "whole requests at a price", "no room for the draft")


@cache
def plan_of(question: str) -> Plan:
    """As read back from its file, where no two places hold the same object."""
    plan = magicdec.plan(**QUESTIONS[question])
    return msgspec.convert(msgspec.to_builtins(plan), Plan)


class Place(NamedTuple):
    """Where a value stands in a document."""

    owner: Any
    key: Any
    value: Any
    hints: tuple[Any, ...] = ()
    """The types that its field may hold."""

    def put(self, value: Any) -> None:
        if isinstance(self.owner, msgspec.Struct):
            msgspec.structs.force_setattr(self.owner, self.key, value)
        else:
            self.owner[self.key] = value


@cache
def hints_of(kind: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    return {
        name: get_args(hint)
        if get_origin(hint) in (Union, types.UnionType)
        else (hint,)
        for name, hint in get_type_hints(kind).items()
    }


def places(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Place]]:
    """Every place of a document with its path, where `*` is any entry of a list or a mapping."""
    if isinstance(node, msgspec.Struct):
        hints = hints_of(type(node))
        inner = [
            (name, name, getattr(node, name), hints[name])
            for name in node.__struct_fields__
        ]
    elif isinstance(node, list):
        inner = [("*", key, value, ()) for key, value in enumerate(node)]
    elif isinstance(node, dict):
        inner = [("*", key, value, ()) for key, value in node.items()]
    else:
        return
    for name, key, value, hints in inner:
        yield ".".join((*path, name)), Place(node, key, value, hints)
        yield from places(value, (*path, name))


NEW: dict[Any, Any] = {float: 1.0, int: 3, str: "chat", Any: "x"}


def others(place: Place) -> list[Any]:
    """Other values that a place may have."""
    value = place.value
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 3, max(value - 3, 0), 1]
    if isinstance(value, float):
        return [value * 1.37 + 0.01, value * 0.6, value * 0.98]
    if isinstance(value, tuple):
        return [tuple(each * 2 for each in value)]
    if isinstance(value, str):
        for names in (METHODS, TASKS):
            if value in names:
                return [next(name for name in names if name != value)]
        return [f"{value}x"]
    if isinstance(value, list) and not value:
        return [["x"]] if list[str] in place.hints else []
    if isinstance(value, list) and not isinstance(value[0], int | float):
        return [value[:-1], []]
    if value is None:
        return [new for kind, new in NEW.items() if kind in place.hints][:1]
    return [None] if type(None) in place.hints else []


def said(plan: Plan) -> dict[str, list[str]]:
    texts = defaultdict(list)
    for every in (False, True):
        for statement in story_of(plan, plan, every=every):
            texts[statement.kind].append(statement.text)
    return texts


def covers(claim: str, path: str) -> bool:
    """Whether a claim is of a field, of one above it (which holds it), or of one below."""
    return f"{path}.".startswith(f"{claim}.") or claim.startswith(f"{path}.")


@cache
def moved_by(question: str) -> dict[str, frozenset[str]]:
    """The kinds of statement that other values at a path change, by path."""
    plan = plan_of(question)
    before = said(plan)
    by_path = defaultdict(list)
    for path, place in places(plan):
        by_path[path].append(place)
    moved = {}
    for path, of_path in by_path.items():
        kinds: set[str] = set()
        for number in range(max(len(others(place)) for place in of_path)):
            for place in of_path:
                if number < len(values := others(place)):
                    place.put(values[number])
            try:
                after = said(plan)
            finally:
                for place in of_path:
                    place.put(place.value)
            kinds |= {kind for kind in WEIGHTS if after.get(kind) != before.get(kind)}
        moved[path] = frozenset(kinds)
    assert said(plan) == before
    return moved


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_no_other_field_changes_a_statement(question: str) -> None:
    for path, kinds in moved_by(question).items():
        for kind in kinds:
            assert any(covers(claim, path) for claim in CLAIMS[kind]), (kind, path)


@pytest.mark.slow
def test_each_claim_is_of_a_field_that_changes_the_statement() -> None:
    """A claim that nothing hangs on would let a false number pass below."""
    moved = [
        (path, kinds)
        for question in QUESTIONS
        for path, kinds in moved_by(question).items()
    ]
    idle = {
        (kind, claim)
        for kind, claims in CLAIMS.items()
        for claim in claims
        if not any(kind in kinds and covers(claim, path) for path, kinds in moved)
    }
    assert idle == set()


# Numbers
# --------------------------------------------------------------------------------------------------

NAMED = (
    "90 %",
    "95 %",
    "10th, 50th, 90th",
    "$/Mtok",
    "over 99 %",
    "under 1 %",
    "60 % and more",
)
"""Figures of speech: the levels of intervals, and ends of what is said of a probability."""
NUMBER = re.compile(r"(?<![\w./-])(\d+(?:\.\d+)?)(?:[eE]\+?(\d+))?(k|M)?(?!\w*[-.]\w)")
UNITS = {"": (1.0,), "k": (1e3, 1024.0), "M": (1e6, 1024.0**2)}


def printed(text: str, names: Iterable[str]) -> Iterator[tuple[str, float, float]]:
    """Numbers of a sentence but for those in names: as printed, and the ends of what they round."""
    for name in sorted((*names, *NAMED), key=len, reverse=True):
        text = text.replace(name, "")
    for match in NUMBER.finditer(text):
        digits, power, unit = match.group(1), int(match.group(2) or 0), match.group(3)
        half = 0.5 * 10.0 ** -len(digits.partition(".")[2])
        for factor in UNITS[unit or ""]:
            scale = factor * 10.0**power
            yield (
                match.group(),
                (float(digits) - half) * scale,
                (float(digits) + half) * scale,
            )


def claimed(plan: Plan, kind: str) -> tuple[list[float], set[str]]:
    """The numbers and names of the fields that a kind claims."""
    numbers: list[float] = []
    names: set[str] = set()
    for path, place in places(plan):
        if any(f"{path}.".startswith(f"{claim}.") for claim in CLAIMS[kind]):
            value = place.value
            if isinstance(value, str):
                names.add(value)
            elif isinstance(value, tuple | list):
                numbers += [each for each in value if isinstance(each, int | float)]
            elif isinstance(value, int | float):
                numbers.append(value)
    return numbers, names


def follows(plan: Plan, kind: str) -> Iterator[float]:
    """What a statement works out from its fields."""
    choice = plan.choice
    asked = choice.left_out or choice.row
    if kind in ("answer", "prefill", "to train", "where it fits", "plugin", "tie"):
        for row in (
            choice.row,
            choice.left_out,
            choice.left_out_fits,
            choice.to_train,
            choice.with_plugin,
        ):
            if row is not None:
                layout = row.layout
                devices = layout.tp_size * layout.pp_size * layout.dp_size
                yield from (
                    row.batch_size * layout.num_replicas,
                    devices * layout.num_replicas,
                )
    if kind == "limit":
        yield 1.0 / (plan.request.tpot_limit_s or math.inf)
    if kind == "evidence" and choice.evidence is not None:
        yield math.expm1(1.6449 * choice.evidence.width)
    if kind == "prefill" and choice.without_draft.requests is not None:
        yield 1.0 / choice.without_draft.requests.prefill_share
    if kind in ("verification", "spread"):
        yield asked.gamma + 1
    if kind == "verification":
        yield asked.step.verify_s / asked.step.autoregressive_s
        for operations in plan.breakdown.values():
            for name in {each.op for each in operations}:
                yield sum(each.time_s for each in operations if each.op == name)
    if kind in ("decoding", "plain"):
        for row in (choice.row, choice.without_draft, choice.best_without_draft):
            if row is not None:
                yield (
                    row.rate_per_gpu
                    * row.layout.tp_size
                    * row.layout.pp_size
                    * row.layout.dp_size
                )
    if kind == "throughput" and choice.best_without_draft is not None:
        yield choice.best_without_draft.rate_per_gpu / choice.row.rate_per_gpu
    if kind == "gamma by batch" and choice.one_gamma is not None:
        yield abs(choice.one_gamma.by_batch - 1.0)


@pytest.mark.parametrize(
    "question",
    [
        pytest.param(question, marks=() if question in QUICK else pytest.mark.slow)
        for question in QUESTIONS
    ],
)
def test_each_number_of_a_statement_is_of_the_fields_that_it_claims(
    question: str,
) -> None:
    """As it stands there, in percent or in thousandths (ms), to the last digit that is printed."""
    plan = plan_of(question)
    for kind, texts in said(plan).items():
        numbers, names = claimed(plan, kind)
        values = [*numbers, *follows(plan, kind)]
        known = [value * scale for value in values for scale in (1.0, 100.0, 1000.0)]
        titles = {
            device_name(plan.hardware).replace("\u00a0", " "),
            "EAGLE-3",
            "llama-3.2-3b",
            "llama-3.2-1b",
        }
        for text in texts:
            by_print: dict[str, bool] = defaultdict(bool)
            for number, low, high in printed(text, names | titles):
                by_print[number] |= any(
                    low <= value <= high * (1 + 1e-12) for value in known
                )
            assert all(by_print.values()), (kind, text, dict(by_print))
