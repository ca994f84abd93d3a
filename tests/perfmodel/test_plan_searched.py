"""What a plan searches, and the rows that it makes of it: sizes against the memory that each takes, rows against what
follows from their own numbers, and choices against all that there is."""

from __future__ import annotations

import dataclasses
import itertools
import math
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from magicdec.errors import CapacityError
from magicdec.perfmodel import memory
from magicdec.perfmodel.acceptance import AcceptanceProfile, BelievedProfile
from magicdec.perfmodel.acceptance.law import LawError
from magicdec.perfmodel.plan import request, rows, search
from magicdec.perfmodel.plan.request import DEFAULT_BATCH, Case, DraftOption
from magicdec.perfmodel.speedup import Prediction, predict
from magicdec.schema.row import Candidate
from magicdec.specs.workload import RequestShape, WorkloadSpec
from tests.perfmodel.cases import case_of, found_of, ways_of

MIX = WorkloadSpec(
    requests=(
        RequestShape(prompt_len=2000, gen_len=300, weight=3.0),
        RequestShape(prompt_len=9000, gen_len=100, weight=1.0),
    )
)
QUESTIONS: list[dict[str, Any]] = [
    {},
    {"gen_len": 300, "price_per_hour_usd": 3.0, "num_gpus": 5, "tp_size": 2},
    {"workload": MIX, "batch_sizes": (4, 60), "num_gpus": 2, "draft": "eagle3", "price_per_hour_usd": 1.0},
    {"pp_size": 2, "tp_size": 8, "draft": "eagle3", "gen_len": 50},
    {"draft": "self", "tpot_limit_s": 0.004, "ttft_limit_s": 0.2},
]  # fmt: skip


def all_rows(question: dict[str, Any]) -> list[tuple[Candidate, Prediction]]:
    """Every row, with its own prediction."""
    found = found_of(**question)
    return [
        (row, of_draft.prediction.take([place]))
        for of_draft in found
        for place, row in enumerate(of_draft.rows)
    ]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_row_s_numbers_follow_from_each_other(question: dict[str, Any]) -> None:
    case = case_of(**question)
    link = case.hardware.link
    given = question.get("num_gpus")
    price = question.get("price_per_hour_usd")
    output_len = case.lengths.output_len
    capacity = memory.capacity_bytes(case.hardware, case.engine)
    for row, prediction in all_rows(question):
        of_replica = row.tp_size * row.layout.dp_size * row.layout.pp_size
        assert row.num_gpus == of_replica
        assert row.num_replicas == max(1, (given or of_replica) // of_replica)
        assert row.layout.num_nodes == math.ceil(of_replica / link.num_gpus_per_node)
        step = row.step
        parts = row.gamma * step.draft_s + step.verify_s + step.accept_s + step.upkeep_s
        spread = float(np.ravel(prediction.terms.spread_s)[0])
        if row.is_speculative:
            assert parts == pytest.approx(step.step_s, abs=spread + 1e-12)
        else:
            assert (step.draft_s, step.accept_s, step.upkeep_s) == (0.0, 0.0, 0.0)
            assert step.verify_s == step.step_s == step.autoregressive_s
        decoding = row.decoding
        tokens = row.drafting.tokens_per_step
        assert 1.0 <= tokens <= row.gamma + 1
        assert decoding.tpot_s == pytest.approx(step.step_s / tokens)
        assert decoding.tpot_low_s <= decoding.tpot_s <= decoding.tpot_high_s
        assert decoding.tokens_per_s == pytest.approx(row.batch_size / decoding.tpot_s)
        assert decoding.tokens_per_s_per_gpu * of_replica == pytest.approx(decoding.tokens_per_s)  # fmt: skip
        assert row.speedup == pytest.approx(step.autoregressive_s / decoding.tpot_s)
        assert row.fits == (row.memory.bytes_per_gpu <= capacity)
        within = row.between_tokens_s <= question.get("tpot_limit_s", math.inf)
        within &= row.first_token_s <= question.get("ttft_limit_s", math.inf)
        assert row.within_limits == within
        assert (row.requests is not None) == bool(output_len)
        if row.requests is not None:
            assert row.requests.requests_per_s == pytest.approx(row.rate / output_len)
            hours = output_len / row.rate_per_gpu / 3600 * 1e6
            assert row.cost.gpu_hours_per_million_requests == pytest.approx(hours)
            if price:
                assert row.cost.per_million_requests_usd == pytest.approx(hours * price)
        if price:
            usd = price / 3600 / row.rate_per_gpu * 1e6
            assert row.cost.per_million_tokens_usd == pytest.approx(usd)
        else:
            assert row.cost.per_million_tokens_usd is None


@pytest.mark.parametrize(("value", "is_outside"), [
    (1000.0, False), (1000.0 / 1.05, False), (1000.0 / 1.06, True), (4000.0 * 1.05, False), (4000.0 * 1.06, True),
    (None, False), (0.0, False), (2500.0, False),
])  # fmt: skip
def test_a_value_is_measured_up_to_five_percent_beyond(
    value: float | None, is_outside: bool
) -> None:
    """Rounded contexts such as 32,768 for 32k are the same; a whole cache and no context are no extrapolation."""
    assert rows._is_outside(value, [4000.0, 1000.0]) == is_outside
    assert not rows._is_outside(value, [])


@pytest.mark.parametrize(("gamma", "budget", "context", "is_outside"), [
    (5, None, 2000.0, False), (6, None, 2000.0, True), (5, 64, 2000.0, False), (5, 63, 2000.0, False),
    (5, 60, 2000.0, True), (5, 64, 4300.0, True),
])  # fmt: skip
def test_a_row_is_extrapolated_beyond_what_was_measured_of_it(
    gamma: int, budget: int | None, context: float, is_outside: bool
) -> None:
    """Its last position, its budgets and its contexts are inside."""
    law: Any = SimpleNamespace(
        measured_gamma=5, measured_budgets=[64.0], measured_contexts=[1000.0, 4000.0]
    )
    assert rows._is_extrapolated(law, budget, context, gamma) == is_outside
    law.measured_gamma = None
    assert not rows._is_extrapolated(law, None, 2000.0, 32)


# Batches


@pytest.mark.parametrize("question", [
    {}, {"model": "qwen3-32b", "context_lens": (20_000,)}, {"tp_size": None, "num_gpus": 4, "model": "qwen3-30b-a3b"},
    {"workload": MIX}, {"gen_len": 3000},
])  # fmt: skip
def test_the_largest_batch_fits_and_one_more_does_not(question: dict[str, Any]) -> None:
    for case in ways_of(**question):
        for option in (None, *case.options[:2]):
            budget = None if option is None else option.budgets[0]
            gamma = 0 if option is None else 3
            most = case.largest_batches(option=option, budget=budget, gamma=gamma)
            assert len(most) == len(case.tp_sizes)
            for tp_size, batch in zip(case.tp_sizes, most, strict=True):
                fits = [
                    memory.memory_need(
                        case.setup(option), batch=count, max_len=case.lengths.max_len(batch), budget=budget,
                        gamma=gamma, tp_size=tp_size,
                    ).total_bytes <= memory.capacity_bytes(case.hardware, case.engine)
                    for count in (batch, batch + case.spread.dp)
                ]  # fmt: skip
                if batch >= 1:
                    assert fits[0]
                if case.lengths.workload is None:
                    assert not fits[1]


def test_a_batch_that_was_asked_for_is_searched_alone_if_it_fits() -> None:
    case = case_of(batch_sizes=(3, 8))
    assert search._searched_batches(case).tolist() == [3, 8]
    usual = search._searched_batches(case_of(batch_sizes=())).tolist()
    assert usual == [DEFAULT_BATCH]


@pytest.mark.parametrize("context", [4096, 30_000, 60_000, 131_072])
def test_without_a_batch_the_usual_one_or_a_power_of_two_that_fits(
    context: int,
) -> None:
    case = case_of(batch_sizes=(), context_lens=(context,), draft="ngram")
    (batch,) = search._searched_batches(case).tolist()
    most = float(case.largest_batches().max())
    powers = [2.0**power for power in range(7) if 2.0**power <= most]
    assert batch == max(powers)
    assert batch <= DEFAULT_BATCH
    too_many = dataclasses.replace(
        case, request=msgspec.structs.replace(case.request, batch_sizes=(5000,))
    )
    assert search._searched_batches(too_many).max() == most


@pytest.mark.parametrize(("context", "is_long"), [(512, True), (40_000, False)])
def test_a_searched_batch_is_every_one_up_to_the_largest(
    context: int, is_long: bool
) -> None:
    """Each of the first 512, and beyond them steps of no more than a percent, up to the last that fits."""
    case = case_of(
        batch_sizes=(), context_lens=(context,), num_gpus=1, tpot_limit_s=1.0
    )
    batches = search._searched_batches(case)
    most = int(case.largest_batches().max())
    assert batches[-1] == most
    every = min(most, 512)
    assert batches[:every].tolist() == list(range(1, every + 1))
    assert (most > 512) == is_long
    assert np.all(np.diff(batches) > 0)
    beyond = batches[every - 1 :]
    assert np.all(beyond[1:] <= np.maximum(beyond[:-1] * 1.01, beyond[:-1] + 1))


def test_a_draft_that_leaves_room_for_three_quarters_sets_the_batch() -> None:
    case = case_of(context_lens=(30_000,))
    alone = float(case.largest_batches().max())
    by_draft = {}
    for option in case.options:
        only = dataclasses.replace(case, options=(option,))
        budgets = [budget for budget in option.budgets if budget is not None]
        own = float(
            case.largest_batches(
                option=option, budget=max(budgets, default=None), gamma=1
            ).max()
        )
        by_draft[option.draft, option.method] = own
        expected = own if own >= 0.75 * alone else alone
        assert search.most_that_fit(only) == min(expected, alone)
    near = [own for own in by_draft.values() if own >= 0.75 * alone]
    assert search.most_that_fit(case) == min([alone, *near])


# What is kept of a search


def brute_force(case: Case, option: DraftOption | None) -> dict[Any, float]:
    """The rate of each configuration that may run, one prediction at a time."""
    found = {}
    law = None if option is None else option.acceptance
    budgets = (None,) if option is None else option.budgets
    for batch, gamma, budget in itertools.product(
        search._searched_batches(case), case.gammas_of(option), budgets
    ):
        points = search._points(case, option, np.array([batch]), (gamma,))
        points = dataclasses.replace(points, budget=np.reshape(search_slots(budget), (1, 1, 1, 1, 1)))  # fmt: skip
        one = predict(case.setup(option), law, points)
        users = rows.Users.of(case, one)
        if np.ravel(one.full(one.valid & one.memory.fits & users.is_within_limits))[0]:
            rate = users.rate_per_gpu * one.num_gpus
            found[int(batch), gamma, budget] = float(np.ravel(one.full(rate))[0])
    return found


def search_slots(budget: int | None) -> float:
    return math.inf if budget is None else float(budget)


def test_decoding_alone_at_its_best_is_the_fastest_of_all_batches() -> None:
    for question in ({"gen_len": 100}, {"tpot_limit_s": 0.009, "batch_sizes": ()}):
        case = case_of(context_lens=(20_000,), draft="ngram", **question)
        best = search.best_autoregressive(case)
        assert best is not None
        searching = dataclasses.replace(case, searches_batch=True)
        rates = brute_force(searching, None)
        assert best.rate == pytest.approx(max(rates.values()))
        assert best.batch_size == max(rates, key=lambda key: rates[key])[0]
        assert best.speedup_vs_best_autoregressive == 1.0
        assert not best.is_speculative
    assert search.best_autoregressive(case_of(tpot_limit_s=1e-6)) is None


@pytest.mark.parametrize("question", [
    {"tpot_limit_s": 0.0055, "batch_sizes": (200,)}, {"context_lens": (30_000,), "batch_sizes": (30,)},
])  # fmt: skip
def test_a_draft_that_does_not_run_here_runs_at_the_largest_batch_that_keeps_all(
    question: dict[str, Any],
) -> None:
    case = case_of(draft="eagle3", **question)
    (option,) = case.options
    found = search._found(case, option, np.asarray(case.request.batch_sizes, float), None)  # fmt: skip
    assert found is not None
    row = found.rows[0]
    here = search.largest_that_runs(case, option, row)
    assert here is not None
    assert here.fits
    assert here.within_limits
    at = dataclasses.replace(
        case,
        request=msgspec.structs.replace(
            case.request, batch_sizes=(here.batch_size, here.batch_size + 5)
        ),
    )
    rates = brute_force(at, option)
    same = {key: rate for key, rate in rates.items() if key[0] == here.batch_size}
    assert here.rate == pytest.approx(max(same.values()))
    largest = case.largest_batches(option=option, gamma=here.gamma)[0]
    tried = here.batch_size * max(1.1, 1 + 1 / here.batch_size)
    if tried < largest:
        beyond = math.ceil(tried)
        at = dataclasses.replace(
            case, request=msgspec.structs.replace(case.request, batch_sizes=(beyond,))
        )
        assert not brute_force(at, option)
    # where a limit leaves one user alone, one is tried
    alone = dataclasses.replace(
        case, request=msgspec.structs.replace(case.request, batch_sizes=(1, 2))
    )
    (one, two) = (
        min(each.between_tokens_s for each in search._found(alone, option, np.array([size]), None).rows)  # type: ignore[union-attr]
        for size in (1.0, 2.0)
    )  # fmt: skip
    assert one < two
    request = msgspec.structs.replace(case.request, tpot_limit_s=(one + two) / 2.0)
    lone = search.largest_that_runs(
        dataclasses.replace(case, request=request), option, row
    )
    assert lone is not None
    assert lone.batch_size == 1
    never = case_of(draft="eagle3", tpot_limit_s=1e-6)
    assert search.largest_that_runs(never, never.options[0], row) is None


def test_every_gamma_of_a_row() -> None:
    case = case_of(draft="eagle3", gamma=1)
    (option,) = case.options
    free = case_of(draft="eagle3")
    (row,) = found_of(draft="eagle3", gamma=1).drafts[1].rows
    every = search.every_gamma(case, option, row)
    assert {each.gamma for each in every.rows} == set(free.gammas_of(option))
    deepest = request.deepest_gamma(option.acceptance)
    more = search.every_gamma(case, option, row, deepest=deepest + 3)
    assert [each.gamma for each in more.rows] == list(range(1, deepest + 4))
    for each in every.rows:
        assert (each.batch_size, each.tp_size, each.draft_budget) == (
            row.batch_size,
            row.tp_size,
            row.draft_budget,
        )


def test_of_too_many_points_the_fastest_and_the_best_of_each_batch_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = case_of(draft="self", batch_sizes=(2, 64, 300), context_lens=(8192,))
    (option,) = case.options
    batches = search._searched_batches(case)
    whole = predict(
        case.setup(option), option.acceptance, search._points(case, option, batches)
    )
    every = search._fastest_first(case, whole)
    speedup = np.ravel(whole.full(whole.speedup))[every]
    assert np.all(np.diff(speedup) <= 0.0)
    is_valid = np.ravel(whole.full(whole.valid))
    assert sorted(every) == np.flatnonzero(is_valid).tolist()
    for most in (len(every) - 1, len(every), len(every) + 1):
        monkeypatch.setattr(search, "MAX_CANDIDATES", most)
        kept = search._fastest_first(case, whole)
        assert kept[:most].tolist() == every[:most].tolist()
    monkeypatch.setattr(search, "MAX_CANDIDATES", 3)
    kept = search._fastest_first(case, whole)
    assert kept[:3].tolist() == every[:3].tolist()
    assert len(set(kept.tolist())) == len(kept) <= 6
    points = np.ravel(whole.full(whole.points.batch))
    rate = np.ravel(whole.full(rows.Users.of(case, whole).rate_per_gpu))
    fits = np.ravel(whole.full(whole.memory.fits))
    for batch in (2.0, 64.0, 300.0):
        here = [place for place in every if points[place] == batch]
        best = max(here, key=lambda place: (fits[place], rate[place]))
        assert best in kept


@pytest.mark.parametrize("question", [
    {"num_gpus": 4, "tp_size": None}, {"num_gpus": 2, "tp_size": None, "tpot_limit_s": 0.006, "gen_len": 100},
])  # fmt: skip
def test_a_search_over_batches_keeps_what_nothing_beats(
    question: dict[str, Any],
) -> None:
    """In latency and in the rate of all devices."""
    case = case_of(batch_sizes=(), draft="ngram", context_lens=(20_000,), **question)
    (option,) = case.options
    batches = search._searched_batches(case)[::9]
    whole = predict(
        case.setup(option), option.acceptance, search._points(case, option, batches)
    )
    users = rows.Users.of(case, whole)
    replicas = np.maximum(1.0, question["num_gpus"] // whole.num_gpus)
    rate = np.ravel(whole.full(users.rate_per_gpu * whole.num_gpus * replicas))
    latency = np.ravel(whole.full(users.between_s))
    able = whole.memory.fits & whole.valid & users.is_within_limits
    places = np.flatnonzero(np.ravel(whole.full(able)))
    undominated = {
        place
        for place in places
        if not np.any(
            (rate[places] >= rate[place])
            & (latency[places] <= latency[place])
            & ((rate[places] > rate[place]) | (latency[places] < latency[place]))
        )
    }
    kept = search._worth_a_look(case, whole)
    assert set(kept.tolist()) == undominated
    assert np.all(np.diff(latency[kept]) > 0.0)


class InSettings(BelievedProfile, frozen=True, kw_only=True):
    """A look-up that was replayed in several settings."""

    laws: tuple[AcceptanceProfile, ...] = ()

    @property
    def settings(self) -> tuple[AcceptanceProfile, ...]:
        return self.laws


def test_of_replayed_settings_the_fastest_is_planned_with() -> None:
    case = case_of(draft="ngram")
    (option,) = case.options
    fields = msgspec.structs.asdict(option.acceptance)
    laws = []
    for rejection in (0.5, 0.1, 0.8):
        law = msgspec.structs.replace(option.acceptance.law, rejection=rejection)
        laws.append(BelievedProfile(**fields | {"law": law, "error": LawError()}))
    replayed = InSettings(**fields, laws=tuple(laws))
    tried = dataclasses.replace(
        case, options=(dataclasses.replace(option, acceptance=replayed),)
    )
    (best,) = search.with_best_settings(tried).options
    assert best.acceptance == laws[1]
    assert search.with_best_settings(case).options == case.options
    none = dataclasses.replace(tried, request=msgspec.structs.replace(tried.request, gamma=0))  # fmt: skip
    assert search.with_best_settings(none).options == tried.options


# What does not fit


@pytest.mark.parametrize(("fields", "ways"), [
    ({"model": "llama-3.1-70b", "context_lens": (8192,)}, ["tp 2", "--weight-dtype int4"]),
    ({"model": "llama-3.1-70b", "hardware": ("l4-24gb",), "tp_size": 2, "context_lens": (2048,)}, ["tp 8"]),
    ({"model": "qwen3-32b", "hardware": ("rtx-4090",), "context_lens": (1000,)}, ["tp 4", "--weight-dtype int4"]),
])  # fmt: skip
def test_what_does_not_fit_is_told_the_nearest_that_does(
    fields: dict[str, Any], ways: list[str]
) -> None:
    """Each is tried: what is named fits, what is narrower or smaller does not."""
    case = case_of(batch_sizes=(1,), draft="none", **fields)
    with pytest.raises(CapacityError, match="does not fit on") as refusal:
        search._check_capacity(case)
    told = str(refusal.value).split("; ")[-1].removesuffix(" would")
    assert told.split(" or ") == ways
    for way in ways:
        name, value = way.split(" ")
        if name == "tp":
            other = dataclasses.replace(case, tp_sizes=(int(value),))
            half = dataclasses.replace(case, tp_sizes=(int(value) // 2,))
            assert half.largest_batches()[0] < 1
        else:
            precision = msgspec.structs.replace(case.precision, weight_dtype=value)
            other = dataclasses.replace(case, precision=precision)
        assert other.largest_batches()[0] >= 1
        search._check_capacity(other)


def test_one_sequence_that_just_fits_is_a_fit() -> None:
    """At the longest context at which one fits, one does; a token more and none does."""
    low, high = 4096, 10**6
    while high - low > 1:
        middle = (low + high) // 2
        lengths = dataclasses.replace(case_of().lengths, prompt_len=float(middle))
        at = dataclasses.replace(case_of(), lengths=lengths)
        low, high = (middle, high) if at.largest_batches()[0] >= 1 else (low, middle)
    lengths = dataclasses.replace(case_of().lengths, prompt_len=float(low))
    at = dataclasses.replace(case_of(), lengths=lengths)
    assert at.largest_batches().tolist() == [1.0]
    search._check_capacity(at)
    lengths = dataclasses.replace(lengths, prompt_len=float(high))
    with pytest.raises(CapacityError):
        search._check_capacity(dataclasses.replace(at, lengths=lengths))


def test_formats_are_narrower_ones_that_hold_the_batch() -> None:
    case = case_of(model="qwen3-32b", context_lens=(8192,), draft="none")
    for batch in (1, 8, 20, 40, 200):
        formats = search.formats_that_fit(case, batch=batch)
        for dtype in ("fp8", "int4"):
            precision = msgspec.structs.replace(case.precision, weight_dtype=dtype)
            most = dataclasses.replace(case, precision=precision).largest_batches()[0]
            assert (dtype in formats) == (most >= batch)
        assert formats == [dtype for dtype in ("fp8", "int4") if dtype in formats]
    narrow = case_of(model="qwen3-32b", weight_dtype="fp8", draft="none")
    assert search.formats_that_fit(narrow) == ["int4"]
    halved = search.formats_that_fit(case, batch=70, kv_dtype="fp8")
    assert len(halved) >= len(search.formats_that_fit(case, batch=70))
