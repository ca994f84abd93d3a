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

from magicdec.counts import Z_90
from magicdec.perfmodel.acceptance.law import LARGEST
from magicdec.perfmodel.kernels.gemm import GemmCurve
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.plan import explain as notes
from magicdec.perfmodel.plan.request import Case, DraftOption, lengths_of
from magicdec.perfmodel.plan.search import formats_that_fit
from magicdec.schema import Candidate
from magicdec.specs import Parallelism, load_engine
from tests.perfmodel.cases import case_of, found_of, ways_of


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
        assert list(notes._on_start(told, answer(row))) == [remark]
        assert list(notes._on_start(told, answer(alone, row))) == [remark]
    assert list(notes._on_start(told, answer(alone))) == []


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
                notes._on_conditions(case, own, context, is_windowed=is_windowed)
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
    own = trained_to(option, 2048)
    acceptance = own.acceptance
    plain = notes._on_length(own, acceptance, 30_000, "")
    assert "heads are usually trained on up to 2,048 tokens" in plain
    shares = [int(each) for each in re.findall(r"(\d+) %", plain)]
    for share, context in zip(shares, (30_000, 2048), strict=True):
        rate = float(acceptance.law.first_rate(budget=None, context=context))
        assert share == round(100 * rate)
    assert notes._on_length(own, acceptance, 30_000, "why") == f"{plain}; why"
    named: Any = dataclasses.replace(own, head=object())
    assert "this " in notes._on_length(named, acceptance, 30_000, "")


def test_a_full_cache_beyond_the_draft_s_own_length_is_noted() -> None:
    case = case_of(draft="llama-3.2-1b")
    (option,) = case.options
    assert option.model is not None
    most = option.model.max_position_embeddings
    assert not list(notes._on_full_cache(case, option, most))
    (told,) = notes._on_full_cache(case, option, most + 1)
    assert f"up to {most:,} tokens" in told
    head = case_of(draft="eagle3").options[0]
    assert not list(notes._on_full_cache(case, head, most + 1))
    short = msgspec.structs.replace(option.model, max_position_embeddings=9)
    own = dataclasses.replace(option, model=short)
    assert list(notes._on_full_cache(case, own, 10))
    assert not list(notes._on_full_cache(case, own, 9))


@pytest.mark.parametrize("budgets", [(), (512,)])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("draft", ["eagle3", "ngram"])
def test_a_budget_that_a_head_cannot_have_is_noted(
    budgets: tuple[int, ...], engine: str, draft: str
) -> None:
    case = case_of(draft=draft, engine=engine, draft_budgets=budgets)
    told = list(notes._on_budget(case, case.options[0]))
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
        told = list(notes._on_origin(case, own, is_best=False))
        assert len(told) == bool(measured_on)
        if told:
            assert "measured on llama-3.1-70b" in told[0]
            assert "assumed for llama-3.1-8b too" in told[0]
    own_head = notes.is_one_head_of_many(option.acceptance)
    told = [
        note
        for note in notes._on_origin(case, option, is_best=True)
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


def test_rows_of_one_draft_differ_in_budget_and_gamma_alone() -> None:
    rows = rows_of(draft="eagle3")
    best = rows[0]
    for row in rows:
        assert notes._has_the_draft_of(row, best)
    assert notes._has_the_draft_of(with_drafting(best, budget=99), best)
    layout = msgspec.structs.replace(best.layout, tp_size=2)
    others = [
        with_drafting(best, draft="other"), with_drafting(best, method="other"),
        msgspec.structs.replace(best, hardware="other"), msgspec.structs.replace(best, layout=layout),
        msgspec.structs.replace(best, batch_size=99), msgspec.structs.replace(best, context_len=99),
    ]  # fmt: skip
    for row in others:
        assert not notes._has_the_draft_of(row, best)


def test_a_window_is_compared_with_the_whole_cache() -> None:
    question: dict[str, Any] = {"draft": "eagle3", "engine": "sglang", "context_lens": (16_384,)}  # fmt: skip
    case = case_of(**question)
    rows = rows_of(**question)
    cut = [row for row in rows if row.draft_budget is not None]
    whole = [row for row in rows if row.draft_budget is None]
    assert cut
    assert whole
    fastest = max(whole, key=lambda row: row.speedup)
    (note,) = notes._on_window(case, cut[0], rows)
    start, ends = note.split("; with its whole cache ")
    flag = load_engine("sglang").draft("eagle3", "eagle3").window_setting
    assert f"sees {cut[0].draft_budget:,} of 16,384 tokens ({flag})" in start
    for row, text in ((cut[0], start), (fastest, ends)):
        step_ms = row.step_s * 1e3
        pace = f"{row.drafting.tokens_per_step:.2f} tokens per {step_ms:.1f} ms step"
        assert f"{pace} at gamma {row.gamma}, {row.speedup:.2f}x" in text
    assert not list(notes._on_window(case, whole[0], rows))
    assert not list(notes._on_window(case, cut[0], cut))
    on_vllm = dataclasses.replace(case, engine=load_engine("vllm"))
    assert not list(notes._on_window(on_vllm, cut[0], rows))


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


def test_speculation_that_gains_nowhere_is_said_not_to_pay() -> None:
    case = case_of(draft="eagle3")
    rows = rows_of(draft="eagle3")
    alone = found_of(draft="eagle3").drafts[0].rows[0]

    def at(row: Candidate, speedup: float) -> Candidate:
        gain = msgspec.structs.replace(row.decoding.gain, speedup=speedup)
        decoding = msgspec.structs.replace(row.decoding, gain=gain)
        return msgspec.structs.replace(row, decoding=decoding)

    text = "speculation does not pay here: decode autoregressively"
    for speedup, is_told in ((1.0, True), (1.01, False)):
        drafted = [at(rows[0], speedup), at(rows[1], 0.5)]
        assert (text in notes._on_drafts(case, alone, drafted)[1]) == is_told
        assert text not in notes._on_drafts(case, rows[0], drafted)[1]
    assert text not in notes._on_drafts(case, alone, [])[1]


def test_what_is_said_of_the_chosen_draft_comes_first() -> None:
    """Of the same draft that is not chosen it comes among the rest."""
    case = case_of(draft="eagle3", draft_budgets=(512,), temperature=0.7)
    (option,) = case.options
    own = dataclasses.replace(
        case, options=(trained_to(option, None, temperature=0.1),)
    )
    best = best_of(draft="eagle3")
    alone = found_of(draft="eagle3").drafts[0].rows[0]
    key, others = notes._on_drafts(own, best, [best])
    assert [("0.1" in note, "whatever" in note) for note in key] == [
        (True, False), (False, True),
    ]  # fmt: skip
    assert not [note for note in others if "0.1" in note]
    key, others = notes._on_drafts(own, alone, [best])
    assert key == []
    assert [note for note in others if "temperature 0.1" in note]
    assert not [note for note in others if "whatever" in note]
    far = with_drafting(best, is_extrapolated=True)
    measured = notes._on_drafts(own, far, [far])[0]
    assert [note for note in measured if "lies outside" in note]


# The engine


def test_a_batch_beyond_the_captured_graphs_is_noted_with_its_tokens() -> None:
    question: dict[str, Any] = {"draft": "eagle3", "batch_sizes": (64, 400), "context_lens": (512,)}  # fmt: skip
    case = case_of(**question)
    for row in rows_of(**question):
        told = [note for note in notes._on_engine(case, row) if "captures no graph" in note]  # fmt: skip
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
    assert "eagle3/eagle3 is odd" in list(notes._on_engine(case, best))
    assert not [note for note in notes._on_engine(case, alone) if "is odd" in note]
    plain = with_engine(case, "eagle3", note="")
    assert not list(notes._on_engine(plain, best))


def test_trees_are_noted_for_heads_of_engines_that_have_them() -> None:
    best = best_of(draft="eagle3")
    lookup = best_of(draft="ngram")
    for engine in ("vllm", "sglang", "ours"):
        case = dataclasses.replace(case_of(draft="eagle3"), engine=load_engine(engine))
        has_trees = bool(case.engine.overheads.tree_step_s)
        assert (notes.TREES_LOSE in list(notes._on_engine(case, best))) == has_trees
        assert notes.TREES_LOSE not in list(notes._on_engine(case, lookup))


def test_adapted_depths_are_interpolated_over_the_logarithm_of_the_batch() -> None:
    case = case_of(draft="eagle3")
    best = best_of(draft="eagle3")
    gains = {4: 0.9, 16: 1.1, 64: 1.5}
    told = with_engine(
        case, "eagle3", adaptive_gains=gains, adaptive_setting="--adapt", adaptive_measured="there"
    )  # fmt: skip
    for batch, percent in ((1, "-10"), (4, "-10"), (8, "+0"), (16, "+10"), (32, "+30"), (999, "+50")):  # fmt: skip
        row = msgspec.structs.replace(best, batch_size=batch)
        (note,) = notes._on_adaptive(told, row)
        assert f"{percent} % tokens/s measured at about {batch} sequences" in note
    one = with_engine(told, "eagle3", adaptive_gains={7: 1.2})
    (note,) = notes._on_adaptive(one, msgspec.structs.replace(best, batch_size=99))
    assert "+20 % tokens/s measured at about 7 sequences" in note
    alone = found_of(draft="eagle3").drafts[0].rows[0]
    assert not list(notes._on_adaptive(told, alone))
    assert not list(notes._on_adaptive(case, best))


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_what_an_idle_draft_costs_is_the_most_up_to_the_choice_s_batch(
    batch: int,
) -> None:
    table = SimpleNamespace(
        context_lens=[100, 200],
        batch_sizes=[1, 4, 16],
        gamma_set_up=[[1, 0], [1, 3], [1, 0]],
        idle_speedup=[[0.1, 0.93], [0.1, 0.5], [0.1, 0.86]],
    )
    best: Any = SimpleNamespace(context_len=200, batch_size=batch)
    told = list(notes._on_table(answer(best, gamma_table=table)))
    assert len(told) == 1
    assert f"up to {14 if batch == 16 else 7} %" in told[0]
    table.gamma_set_up = [[0, 1]] * 3
    assert not list(notes._on_table(answer(best, gamma_table=table)))
    for missing in ("gamma_set_up", "idle_speedup"):
        without = SimpleNamespace(**{**vars(table), missing: None})
        assert not list(notes._on_table(answer(best, gamma_table=without)))


def test_the_path_of_the_shown_draft_is_told_where_it_is_not_the_usual() -> None:
    case = case_of()
    found = found_of()
    alone = found.drafts[0].rows[0]
    for engine in ("vllm", "vllm@0.12"):
        at = dataclasses.replace(case, engine=load_engine(engine))
        for of_draft in found.drafts[1:]:
            row = of_draft.rows[0]
            path = at.engine.path(row.draft, row.draft_method)
            told = list(notes._on_path(at, answer(row)))
            assert bool(told) == any(path.sentences())
            assert told == list(notes._on_path(at, answer(alone, row)))
        assert not list(notes._on_path(at, answer(alone)))


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
        told = list(notes._on_hits(case, best))
        assert bool(told) == (loss > 0.03)
        seen.add(bool(told))
        if told:
            what = "of the tokens per second" if gen_len else "of the time to the first"
            assert f"which costs {100 * loss:.0f} % {what}" in told[0]
            assert "disable_eagle_block_drop" in told[0]
        assert not list(notes._on_hits(keeping, best))
    assert seen == {True, False}


# Devices


def test_idle_devices_are_counted() -> None:
    best = best_of(draft="eagle3")
    for given in (None, 1, 2, 3, 5, 8):
        request = msgspec.structs.replace(case_of(draft="eagle3").request, num_gpus=given)  # fmt: skip
        case = dataclasses.replace(case_of(draft="eagle3"), request=request)
        for tp_size, replicas in ((1, 1), (2, 1), (2, 2)):
            layout = msgspec.structs.replace(
                best.layout, tp_size=tp_size, num_replicas=replicas
            )
            row = msgspec.structs.replace(best, layout=layout)
            told = [note for note in notes._on_spread(case, answer(row)) if "idle" in note]  # fmt: skip
            idle = (given or 0) - tp_size * replicas
            assert bool(told) == (idle > 0)
            if told:
                verb = "stays" if idle == 1 else "stay"
                assert told[0].startswith(f"{idle} of the {given} GPUs given {verb} idle: ")  # fmt: skip
                assert told[0].endswith(f"multiples of {tp_size}")


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("tp_size", [4, 8, 16])
@pytest.mark.parametrize("rate", [None, 50e9])
def test_a_replica_beyond_a_node_is_noted_with_its_network(
    pp: int, dp: int, tp_size: int, rate: float | None
) -> None:
    case = case_of(draft="eagle3")
    link = msgspec.structs.replace(case.hardware.link, between_nodes_bytes_per_s=rate)
    hardware = msgspec.structs.replace(case.hardware, link=link)
    spread = Parallelism(pp=pp, dp=dp, whole_experts=dp > 1)
    at = dataclasses.replace(case, hardware=hardware, spread=spread)
    best = best_of(draft="eagle3")
    layout = msgspec.structs.replace(
        best.layout, tp_size=tp_size, pp_size=pp, dp_size=dp
    )
    row = msgspec.structs.replace(best, layout=layout)
    told = list(notes._on_spread(at, answer(row)))
    spans = [note for note in told if "spans nodes" in note]
    assert bool(spans) == (pp * dp > 1 and pp * dp * tp_size > link.reach)
    if spans:
        assert ("50 GB/s" in spans[0]) == (rate is not None)
        assert ("sends between stages" in spans[0]) == (pp > 1)
    staged = [note for note in told if "pipeline stages" in note]
    assert len(staged) == (pp > 1)
    if staged:
        assert "eagle3" in staged[0]
    assert bool([note for note in told if "busiest rank" in note]) == (dp > 1)
    cannot = msgspec.structs.replace(at.engine, drafts={})
    told = list(notes._on_spread(dataclasses.replace(at, engine=cannot), answer(row)))
    assert bool([note for note in told if "cannot draft" in note]) == (pp > 1)


@pytest.mark.parametrize("device", ["h100-sxm-80gb", "v100-sxm-32gb", "rtx-2080-ti-11gb", "gaudi3-128gb"])  # fmt: skip
def test_a_device_that_nobody_timed_is_noted_with_its_factor(device: str) -> None:
    hardware = load_hardware(device)
    case = dataclasses.replace(case_of(draft="none"), hardware=hardware)
    told = list(notes._on_kernels([case]))
    estimates = [note for note in told if "no kernels were timed" in note]
    assert bool(estimates) == (not hardware.is_measured)
    if estimates:
        error = GemmCurve.of(hardware).fit.relative_error
        assert estimates[0].endswith(f"within a factor of {math.exp(Z_90 * error):.1f}")
        assert device in estimates[0]
        assert bool(hardware.curves_from) == ("stand in" in estimates[0])
    both = list(notes._on_kernels([case, case_of(draft="none")]))
    assert [note for note in both if "no kernels" in note] == estimates


@pytest.mark.parametrize("tp_size", [1, 8, 16])
@pytest.mark.parametrize("rate", [None, 25e9])
def test_ranks_over_a_network_are_noted(tp_size: int, rate: float | None) -> None:
    case = case_of(draft="none")
    link = msgspec.structs.replace(case.hardware.link, between_nodes_bytes_per_s=rate)
    hardware = msgspec.structs.replace(case.hardware, link=link)
    at = dataclasses.replace(case, hardware=hardware, tp_sizes=(1, tp_size))
    told = [note for note in notes._on_kernels([at]) if "spans nodes" in note]
    assert bool(told) == (tp_size > link.reach)
    if told:
        assert told[0].startswith(f"tp {tp_size} spans nodes of {link.reach} x ")
        assert ("25 GB/s" in told[0]) == (rate is not None)
        assert ("not known" in told[0]) == (rate is None)
    cpu = msgspec.structs.replace(hardware, kind="cpu")
    assert not list(notes._on_kernels([dataclasses.replace(at, hardware=cpu)]))


def test_kernels_that_were_not_timed_are_named_on_devices_that_were() -> None:
    plain = list(notes._on_measured(case_of(draft="none")))
    assert plain == []
    narrow = case_of(draft="none", weight_dtype="int4", hardware=("a100-sxm-80gb",))
    names = notes.untimed(notes.one_token_pass(narrow.setup(None)))
    told = list(notes._on_measured(narrow))
    assert len(told) == bool(names)
    if names:
        assert f"nobody timed {', '.join(names)} on a100" in told[0]
    unknown = dataclasses.replace(narrow, hardware=load_hardware("v100-sxm-32gb"))
    assert list(notes._on_measured(unknown)) == []


def test_an_engine_s_fit_is_noted_where_it_is_of_another_device_or_none() -> None:
    case = case_of(draft="none")
    for fitted_on, device in (("", ""), ("x", ""), ("x", "a100-sxm-80gb"), ("x", "h100-sxm-80gb")):  # fmt: skip
        engine = msgspec.structs.replace(
            case.engine, fitted_on=fitted_on, fitted_device=device
        )
        at = dataclasses.replace(case, engine=engine)
        other = dataclasses.replace(at, hardware=load_hardware("l4-24gb"))
        told = list(notes._on_engine_fit([at, other]))
        assert bool([n for n in told if "not fitted to measurements" in n]) == (not fitted_on)  # fmt: skip
        elsewhere = [note for note in told if "less certain" in note]
        assert bool(elsewhere) == bool(device)
        if elsewhere:
            costs = elsewhere[0].partition("its fixed costs on ")[2]
            assert ("h100" in costs) == (device != "h100-sxm-80gb")
            assert "l4-24gb" in costs


@pytest.mark.parametrize("fields", [
    {"model": "llama-3.1-70b"}, {"model": "llama-3.1-70b", "tp_size": 4}, {"model": "llama-3.1-70b", "num_gpus": 4},
    {"model": "llama-3.1-8b"}, {"model": "qwen3-32b", "hardware": ("rtx-4090",)},
    {"model": "llama-3.1-70b", "batch_sizes": (4, 60)}, {"model": "llama-3.1-70b", "context_lens": (1000, 60_000)},
])  # fmt: skip
def test_a_format_that_fits_on_one_device_is_named_where_several_are_needed(
    fields: dict[str, Any],
) -> None:
    question: dict[str, Any] = {"tp_size": None, "draft": "none", **fields}
    case = ways_of(**question)[0]
    best: Any = SimpleNamespace(batch_size=8)
    told = list(notes._on_devices([case], best))
    is_free = question["tp_size"] is None and "num_gpus" not in fields
    longest = max(lengths_of(case.request), key=lambda each: each.prompt_len)
    one = dataclasses.replace(case, tp_sizes=(1,), lengths=longest)
    formats = formats_that_fit(one, batch=max(case.request.batch_sizes))
    count = case.tp_sizes[-1]
    assert bool(told) == (is_free and count > 1 and bool(formats))
    if told:
        assert f"needs at least {count} x {case.hardware.name}" in told[0]
        assert f"--weight-dtype {' or '.join(formats)} it fits on one" in told[0]
    twice = list(notes._on_devices([case, case], best))
    assert len(twice) == len(told)
    if told:
        assert twice[0].endswith("it fits on one of each")


def test_a_pool_that_only_decodes_says_when_prompts_come() -> None:
    question: dict[str, Any] = {"draft": "eagle3", "prefill": "elsewhere", "kv_link_gb_s": 20.0}  # fmt: skip
    case = case_of(**question)
    for row in (rows_of(**question)[0], found_of(**question).drafts[0].rows[0]):
        (note,) = notes._on_pool(case, row)
        assert "20 GB/s per device" in note
        one = found_of(**question).prediction(row)
        for seconds in (one.prefill_s, one.transfer_s):
            text = notes.format_seconds(float(np.ravel(seconds)[0]))
            assert f"({text})" in note
    assert not list(notes._on_pool(case_of(draft="eagle3"), best_of(draft="eagle3")))
