"""The notes on a plan: each appears where what it says holds and nowhere else, with the numbers of its case."""

from __future__ import annotations

import dataclasses
import math
import re
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from magicdec.perfmodel.acceptance.law import LARGEST
from magicdec.perfmodel.plan import explain as notes
from magicdec.perfmodel.plan.request import Case, DraftOption
from magicdec.schema.row import Candidate
from magicdec.specs.engine import load_engine
from magicdec.specs.speculation import HeadSpec
from tests.perfmodel.cases import case_of, found_of


def rows_of(**question: Any) -> list[Candidate]:
    """All rows of the last draft."""
    return found_of(**question).drafts[-1].rows


def best_of(**question: Any) -> Candidate:
    return max(rows_of(**question), key=lambda row: row.rate)


def with_drafting(row: Candidate, **fields: Any) -> Candidate:
    drafting = msgspec.structs.replace(row.drafting, **fields)
    return msgspec.structs.replace(row, drafting=drafting)


def with_engine(case: Case, kind: str, **fields: Any) -> Case:
    """The case on an engine that runs one kind of draft otherwise."""
    drafts = dict(case.engine.drafts)
    drafts[kind] = msgspec.structs.replace(drafts[kind], **fields)
    engine = msgspec.structs.replace(case.engine, drafts=drafts)
    return dataclasses.replace(case, engine=engine)


def answer(best: Candidate, left_out: Candidate | None = None, **fields: Any) -> Any:
    choice = SimpleNamespace(left_out=left_out)
    return SimpleNamespace(best=best, choice=choice, **fields)


def trained_to(option: DraftOption, length: int | None, **fields: Any) -> DraftOption:
    """The option of a head that accepts less beyond a length."""
    falls: dict[str, float] = {"context_exponent": 0.0}
    if length is not None:
        falls = {"context_exponent": 0.2, "flat_below": length, "flat_beyond": LARGEST}
    law = msgspec.structs.replace(option.acceptance.law, **falls)
    acceptance = msgspec.structs.replace(option.acceptance, law=law, **fields)
    assert acceptance.trained_len == length
    return dataclasses.replace(option, acceptance=acceptance)


# The draft


def test_remarks_are_those_of_the_shown_draft() -> None:
    case = case_of()
    options = tuple(
        dataclasses.replace(option, remarks=(f"{option.draft} {option.method}",))
        for option in case.options
    )
    told = dataclasses.replace(case, options=options)
    found = found_of()
    alone = found.drafts[0].rows[0]
    for of_draft in found.drafts[1:]:
        row = of_draft.rows[0]
        remark = f"{row.draft} {row.draft_method}"
        assert list(notes._start_notes(told, answer(row))) == [remark]
        assert list(notes._start_notes(told, answer(alone, row))) == [remark]
    assert list(notes._start_notes(told, answer(alone))) == []


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, None])
def test_acceptance_at_another_temperature_or_length_is_noted(
    temperature: float | None,
) -> None:
    case = case_of(draft="eagle3", temperature=0.7)
    (option,) = case.options
    for trained_len, context in ((2048, 2048), (2048, 2049), (None, 100_000)):
        own = trained_to(option, trained_len, temperature=temperature)
        for is_windowed in (False, True):
            told = list(
                notes._conditions_notes(case, own, context, is_windowed=is_windowed)
            )
            is_warm = temperature not in (None, 0.7)
            of_warmth = [note for note in told if "temperature" in note]
            assert len(of_warmth) == is_warm
            if is_warm:
                assert f"at temperature {temperature:g}, not 0.7" in of_warmth[0]
            is_long = context > (trained_len or math.inf) and not is_windowed
            assert len(told) == is_warm + is_long


def test_a_length_beyond_the_trained_one_is_told_with_what_is_accepted_there() -> None:
    case = case_of(draft="eagle3")
    (option,) = case.options
    own = dataclasses.replace(trained_to(option, 2048), head=None)
    acceptance = own.acceptance
    plain = notes._length_notes(own, acceptance, 30_000, "")
    assert "heads are usually trained on 2,048 to 8,192 tokens" in plain
    shares = [int(each) for each in re.findall(r"(\d+) %", plain)]
    for share, context in zip(shares, (30_000, 2048), strict=True):
        rate = float(acceptance.law.first_rate(budget=None, context=context))
        assert share == round(100 * rate)
    assert notes._length_notes(own, acceptance, 30_000, "why") == f"{plain}; why"
    named: Any = dataclasses.replace(own, head=HeadSpec(max_positions=2048))
    assert "this " in notes._length_notes(named, acceptance, 30_000, "")


def test_a_full_cache_beyond_the_draft_s_own_length_is_noted() -> None:
    case = case_of(draft="llama-3.2-1b")
    (option,) = case.options
    assert option.model is not None
    most = option.model.max_position_embeddings
    assert not list(notes._full_cache_notes(case, option, most))
    (told,) = notes._full_cache_notes(case, option, most + 1)
    assert f"up to {most:,} tokens" in told
    head = case_of(draft="eagle3").options[0]
    assert not list(notes._full_cache_notes(case, head, most + 1))
    short = msgspec.structs.replace(option.model, max_position_embeddings=9)
    own = dataclasses.replace(option, model=short)
    assert list(notes._full_cache_notes(case, own, 10))
    assert not list(notes._full_cache_notes(case, own, 9))


@pytest.mark.parametrize("budgets", [(), (512,)])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("draft", ["eagle3", "ngram"])
def test_a_budget_that_a_head_cannot_have_is_noted(
    budgets: tuple[int, ...], engine: str, draft: str
) -> None:
    case = case_of(draft=draft, engine=engine, draft_budgets=budgets)
    told = list(notes._budget_notes(case, case.options[0]))
    has_window = bool(load_engine(engine).draft(draft, draft).window_setting)
    assert bool(told) == (bool(budgets) and draft == "eagle3" and not has_window)
    why = load_engine(engine).draft(draft, draft).window_note
    if told:
        assert told[0].endswith(why or f"{engine} has no window for it")


def test_the_origin_of_a_borrowed_acceptance_is_noted() -> None:
    case = case_of(draft="eagle3")
    (option,) = case.options
    for measured_on in ("", "llama-3.1-70b"):
        acceptance: Any = SimpleNamespace(
            measured_on=measured_on, checkpoint="a/b", is_counted=False
        )
        own = dataclasses.replace(option, acceptance=acceptance)
        told = list(notes._origin_notes(case, own, is_best=False))
        assert len(told) == bool(measured_on)
        if told:
            assert "measured on llama-3.1-70b" in told[0]
            assert "assumed for llama-3.1-8b too" in told[0]
    own_head = notes.is_one_head_of_many(option.acceptance)
    told = [
        note
        for note in notes._origin_notes(case, option, is_best=True)
        if "other heads of the model" in note
    ]
    assert len(told) == own_head


# The choice's range


@pytest.mark.parametrize(("budgets", "contexts", "gamma", "text"), [
    ([64.0, 512.0], [], None, "budget 64 to 512"), ([], [8192.0], None, "context 8192"),
    ([], [], 5, "gamma up to 5"), ([64.0], [1e3, 2e3], 4, "budget 64, context 1000 to 2000, gamma up to 4"),
])  # fmt: skip
def test_what_lies_outside_the_measured_is_told_with_the_best_inside(
    budgets: list[float], contexts: list[float], gamma: int | None, text: str
) -> None:
    rows = rows_of(draft="eagle3")
    best = with_drafting(rows[0], is_extrapolated=True)
    outside = [with_drafting(row, is_extrapolated=True) for row in rows]
    measured: Any = SimpleNamespace(
        measured_budgets=budgets, measured_contexts=contexts, measured_gamma=gamma
    )
    note = notes._extrapolation(measured, best, outside)
    assert f"measured at {text}: the best row lies outside" in note
    assert "inside" not in note
    inside = notes._extrapolation(measured, best, [*outside[:2], *rows[2:]])
    fastest = max(rows[2:], key=lambda row: row.rate_per_gpu)
    gain = fastest.gain
    told = f"; inside, gamma {fastest.gamma} gives {gain.speedup:.2f}x ({gain.low:.2f}-{gain.high:.2f})"
    assert inside == note + told
    elsewhere = msgspec.structs.replace(best, batch_size=best.batch_size + 1)
    assert notes._extrapolation(measured, elsewhere, rows) == note
    late = [msgspec.structs.replace(row, within_limits=row is rows[-1]) for row in rows]
    assert f"gamma {rows[-1].gamma} gives" in notes._extrapolation(measured, best, late)
    cut = [with_drafting(rows[-1], budget=70)]
    assert "inside, budget 70, gamma" in notes._extrapolation(measured, best, cut)


def test_a_window_is_compared_with_the_whole_cache() -> None:
    question: dict[str, Any] = {"draft": "eagle3", "engine": "sglang", "context_lens": (16_384,)}  # fmt: skip
    case = case_of(**question)
    rows = rows_of(**question)
    cut = [row for row in rows if row.draft_budget is not None]
    whole = [row for row in rows if row.draft_budget is None]
    assert cut
    assert whole
    fastest = max(whole, key=lambda row: row.speedup)
    (note,) = notes._window_notes(case, cut[0], rows)
    start, ends = note.split("; with its whole cache ")
    flag = load_engine("sglang").draft("eagle3", "eagle3").window_setting
    assert f"sees {cut[0].draft_budget:,} of 16,384 tokens ({flag})" in start
    for row, text in ((cut[0], start), (fastest, ends)):
        step_ms = row.step_s * 1e3
        pace = f"{row.drafting.tokens_per_step:.2f} tokens per {step_ms:.1f} ms step"
        assert f"{pace} at gamma {row.gamma}, {row.speedup:.2f}x" in text
    assert not list(notes._window_notes(case, whole[0], rows))
    assert not list(notes._window_notes(case, cut[0], cut))
    on_vllm = dataclasses.replace(case, engine=load_engine("vllm"))
    assert not list(notes._window_notes(on_vllm, cut[0], rows))


@pytest.mark.parametrize(("trained", "window", "is_told"), [
    (2048, 2048, True), (2048, 2047, True), (2048, 2049, False), (None, 512, False), (2048, None, False),
])  # fmt: skip
def test_a_window_within_the_trained_length_says_so(
    trained: int | None, window: int | None, is_told: bool
) -> None:
    case = case_of(draft="eagle3")
    (option,) = case.options
    own = dataclasses.replace(case, options=(trained_to(option, trained),))
    best = with_drafting(best_of(draft="eagle3"), budget=window)
    assert bool(notes._why(own, best)) == is_told


def test_what_is_said_of_the_chosen_draft_comes_first() -> None:
    """Of the same draft that is not chosen it comes among the rest."""
    case = case_of(draft="eagle3", draft_budgets=(512,), temperature=0.7)
    (option,) = case.options
    own = dataclasses.replace(
        case, options=(trained_to(option, None, temperature=0.1),)
    )
    best = best_of(draft="eagle3")
    alone = found_of(draft="eagle3").drafts[0].rows[0]
    key, others = notes._drafts_notes(own, best, [best])
    assert [("0.1" in note, "whatever" in note) for note in key] == [
        (True, False), (False, True),
    ]  # fmt: skip
    assert not [note for note in others if "0.1" in note]
    key, others = notes._drafts_notes(own, alone, [best])
    assert key == []
    assert [note for note in others if "temperature 0.1" in note]
    assert not [note for note in others if "whatever" in note]
    far = with_drafting(best, is_extrapolated=True)
    measured = notes._drafts_notes(own, far, [far])[0]
    assert [note for note in measured if "lies outside" in note]


# The engine


def test_a_batch_beyond_the_captured_graphs_is_noted_with_its_tokens() -> None:
    question: dict[str, Any] = {"draft": "eagle3", "batch_sizes": (64, 400), "context_lens": (512,)}  # fmt: skip
    case = case_of(**question)
    for row in rows_of(**question):
        told = [note for note in notes._engine_notes(case, row) if "captures no graph" in note]  # fmt: skip
        assert bool(told) == (not row.step.is_captured)
        if told:
            tokens = ""
            if case.engine.graphs.captured_tokens:
                tokens = f" x {row.gamma + 1} tokens"
            assert f"for batch {row.batch_size}{tokens} by default" in told[0]


def test_an_engine_s_remark_on_a_draft_is_told_where_that_is_chosen() -> None:
    case = with_engine(case_of(draft="eagle3"), "eagle3", note="is odd")
    best = best_of(draft="eagle3")
    alone = found_of(draft="eagle3").drafts[0].rows[0]
    assert "eagle3/eagle3 is odd" in list(notes._engine_notes(case, best))
    assert not [note for note in notes._engine_notes(case, alone) if "is odd" in note]
    plain = with_engine(case, "eagle3", note="")
    assert not list(notes._engine_notes(plain, best))


def test_trees_are_noted_for_heads_of_engines_that_have_them() -> None:
    best = best_of(draft="eagle3")
    lookup = best_of(draft="ngram")
    for engine in ("vllm", "sglang", "ours"):
        case = dataclasses.replace(case_of(draft="eagle3"), engine=load_engine(engine))
        has_trees = bool(case.engine.overheads.tree_step_s)
        assert (notes.TREES_LOSE in list(notes._engine_notes(case, best))) == has_trees
        assert notes.TREES_LOSE not in list(notes._engine_notes(case, lookup))


def test_lost_prefix_hits_are_noted_where_they_cost_more_than_three_percent() -> None:
    """Against the plan on an engine that keeps them: of whole requests, or of the time to the first token."""
    seen = set()
    for gen_len, cached in ((0, 0), (0, "50%"), (30, "95%"), (2000, "95%")):
        question: dict[str, Any] = {
            "model": "qwen3-next-80b-a3b", "tp_size": 4, "draft": "mtp", "gamma": 2, "gen_len": gen_len,
            "cached_len": cached, "engine": "vllm@0.32",
        }  # fmt: skip
        case = case_of(**question)
        best = best_of(**question)
        assert best.draft_method in case.engine.prefix_cache.drops_last_unit
        keeping = dataclasses.replace(
            case,
            engine=case.engine.with_constants({"prefix_cache.drops_last_unit": ()}),
        )
        at = found_of(**question).prediction(best).points
        times = []
        for each in (case, keeping):
            (option,) = each.options
            one = notes.predict(each.setup(option), option.acceptance, at)
            users = notes.Users.of(each, one)
            value = users.first_s if users.whole is None else 1.0 / users.rate_per_gpu
            times.append(float(np.ravel(value)[0]))
        loss = 1.0 - times[1] / times[0]
        told = list(notes._hits_notes(case, best))
        assert bool(told) == (loss > 0.03)
        seen.add(bool(told))
        if told:
            what = "of the tokens per second" if gen_len else "of the time to the first"
            assert f"which costs {100 * loss:.0f} % {what}" in told[0]
            assert "disable_eagle_block_drop" in told[0]
        assert not list(notes._hits_notes(keeping, best))
    assert seen == {True, False}


# Devices


def test_a_pool_that_only_decodes_says_when_prompts_come() -> None:
    question: dict[str, Any] = {"draft": "eagle3", "prefill": "elsewhere", "kv_link_gb_s": 20.0}  # fmt: skip
    case = case_of(**question)
    for row in (rows_of(**question)[0], found_of(**question).drafts[0].rows[0]):
        (note,) = notes._pool_notes(case, row)
        assert "20 GB/s per device" in note
        one = found_of(**question).prediction(row)
        for seconds in (one.prefill_s, one.transfer_s):
            text = notes.format_seconds(float(np.ravel(seconds)[0]))
            assert f"({text})" in note
    assert not list(notes._pool_notes(case_of(draft="eagle3"), best_of(draft="eagle3")))
