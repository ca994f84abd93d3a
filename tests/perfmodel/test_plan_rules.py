"""The rules of a plan against all that they choose from: configurations, ranges of contexts, the table of gammas, and
what is drawn."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.errors import ConfigError
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.plan import choice, explain, tables
from magicdec.perfmodel.plan.request import PlanRequest, layouts, lengths_of
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.workload import RequestShape, WorkloadSpec


def row_of(**fields: Any) -> Any:
    usual = {
        "within_limits": True,
        "fits": True,
        "rate": 1.0,
        "between_tokens_s": 1.0,
        "is_speculative": True,
        "batch_size": 1,
        "layout": 1,
        "draft_method": "eagle3",
        "gamma": 3,
    }
    return SimpleNamespace(**usual | fields)


few = st.integers(1, 5).map(float)
rows = st.lists(
    st.builds(
        row_of,
        within_limits=st.booleans(),
        fits=st.booleans(),
        rate=few,
        between_tokens_s=few,
        batch_size=st.integers(1, 3),
        layout=st.integers(1, 2),
    ),
    max_size=8,
)


# Which configuration


@given(rows=rows)
def test_the_frontier_is_of_rows_that_none_beats_in_both(rows: list[Any]) -> None:
    runs = [row for row in rows if row.fits and row.within_limits]
    expected = set()
    for row in runs:
        is_beaten = any(
            other.between_tokens_s <= row.between_tokens_s
            and other.rate >= row.rate
            and (other.between_tokens_s, other.rate) != (row.between_tokens_s, row.rate)
            for other in runs
        )
        if not is_beaten:
            expected.add((row.between_tokens_s, row.rate))
    found = [(row.between_tokens_s, row.rate) for row in choice.pareto(rows)]
    assert found == sorted(expected)


@given(alone=rows, drafted=rows, refused=st.sets(st.integers(1, 3)))
def test_the_choice_keeps_limits_then_fits_then_is_the_fastest(
    alone: list[Any], drafted: list[Any], refused: set[int]
) -> None:
    def admits(row: Any) -> bool:
        return row.batch_size not in refused

    def order(row: Any) -> tuple[bool, bool, float]:
        return row.within_limits, row.fits, row.rate

    admitted = [row for row in drafted if admits(row)]
    if not alone and not drafted:
        return
    others = [row for row in drafted if not admits(row)]
    ranking = choice.ranked(7, alone, admitted, others, {})
    assert ranking.place == 7
    highest = max(map(order, alone + admitted or drafted))
    assert order(ranking.best) == highest
    ranked = [(admits(row), *order(row)) for row in ranking.drafted]
    assert ranked == sorted(((admits(row), *order(row)) for row in drafted), reverse=True)  # fmt: skip


@given(rows=rows, refused=st.sets(st.integers(1, 3)), batch=st.integers(1, 3))
def test_the_draft_left_out_is_the_fastest_of_the_same_batch_and_layout_if_there_is_one(
    rows: list[Any], refused: set[int], batch: int
) -> None:
    for number, row in enumerate(rows):
        row.gain = SimpleNamespace(speedup=float(number % 4))

    def admits(row: Any) -> bool:
        return row.batch_size not in refused

    best = row_of(is_speculative=False, batch_size=batch)
    admitted = [row for row in rows if admits(row)]
    ranking = choice.Ranking(place=0, best=best, drafted=rows, admitted=admitted)
    found = choice.fastest_left_out(ranking)
    of_batch = [row for row in admitted if row.batch_size == batch] or admitted
    of_batch = [row for row in of_batch if row.layout == best.layout] or of_batch
    if not of_batch:
        assert found is None
    else:
        assert found in of_batch
        assert found.gain.speedup == max(row.gain.speedup for row in of_batch)
    drafts = choice.Ranking(place=0, best=row_of(), drafted=rows, admitted=admitted)
    assert choice.fastest_left_out(drafts) is None


def test_why_no_draft_is_chosen() -> None:
    alone = row_of(is_speculative=False)

    def outcome(
        left_out: Any = None, to_train: Any = None, *, lacks: bool = False
    ) -> str:
        return choice.outcome_of(alone, left_out, to_train, lacks_acceptance=lacks)

    def left(speedup: float, *, fits: bool = True, within: bool = True) -> Any:
        gain = SimpleNamespace(speedup=speedup)
        return row_of(gain=gain, fits=fits, within_limits=within)

    assert outcome() == "not asked"
    assert outcome(lacks=True) == "no acceptance"
    assert outcome(to_train=row_of(), lacks=True) == "not published"
    for fits, within in product((False, True), repeat=2):
        assert outcome(left(1.0, fits=fits, within=within)) == "no gain"
        expected = "no gain" if within else "over limits"
        assert outcome(left(1.001, fits=fits, within=within)) == (
            expected if fits else "no room"
        )
    assert choice.outcome_of(row_of(), None, None, lacks_acceptance=True) == "speculate"


def test_of_drafts_that_are_as_good_the_surest_and_plainest_is_taken() -> None:
    unchecked = row_of(draft_method="eagle3", gamma=1)
    package = row_of(draft_method="suffix", gamma=1)
    deep = row_of(draft_method="ngram", gamma=4)
    shallow = row_of(draft_method="ngram", gamma=2)
    found = [unchecked, package, deep, shallow]
    for expected in (shallow, deep, package, unchecked):
        taken = choice.preferred(
            found[0],
            found[1:],
            lambda row: SimpleNamespace(rows=0 if row is unchecked else 3),  # type: ignore[arg-type, return-value]
        )
        assert taken is expected
        found = [row for row in found if row is not expected]


# Ranges of contexts

speedups = st.lists(
    st.sampled_from([0.0, 0.5, 0.9, 1.0, 1.1, 2.0]), min_size=1, max_size=12
)


def runs(values: list[float]) -> list[tuple[int, int]]:
    """By trying every pair of ends."""
    found = []
    for start in range(len(values)):
        for end in range(start, len(values)):
            is_whole = all(value >= 1.0 for value in values[start : end + 1])
            is_first = start == 0 or values[start - 1] < 1.0
            is_last = end == len(values) - 1 or values[end + 1] < 1.0
            if is_whole and is_first and is_last:
                found.append((start, end))
    return found


def edge(contexts: list[float], values: list[float], inside: int, outside: int) -> int:
    """Where a straight line over the logarithm of the context passes 1."""
    if not 0 <= outside < len(values) or values[outside] == 0.0:
        return round(contexts[inside])
    share = (values[inside] - 1.0) / (values[inside] - values[outside])
    log = math.log(contexts[inside]) * (1 - share) + math.log(contexts[outside]) * share
    return round(math.exp(log))


@given(values=speedups)
def test_a_break_even_is_where_the_last_range_that_pays_begins(
    values: list[float],
) -> None:
    contexts = [1024.0 * 2.0**number for number in range(len(values))]
    spans = [
        (edge(contexts, values, start, start - 1), edge(contexts, values, end, end + 1))
        for start, end in runs(values)
    ]
    table = np.array(values)
    last = tables._break_even(np.array(contexts), table)
    if values[-1] >= 1.0:
        assert last == pytest.approx(spans[-1][0], abs=1)
    else:
        assert last is None


def test_a_range_names_its_ends_once() -> None:
    assert (explain._range([4.4]), explain._range([7.0, 3.0])) == ("4", "3 to 7")


# The request


@pytest.mark.parametrize(("cached", "share", "tokens"), [
    (0, None, 0.0), (4096, None, 4096.0), ("0%", 0.0, None), ("100%", 1.0, None), ("37.5%", 0.375, None),
])  # fmt: skip
def test_a_cached_beginning_is_tokens_or_a_share(
    cached: Any, share: float | None, tokens: float | None
) -> None:
    found = PlanRequest(cached_len=cached).cached
    if share is not None:
        assert found.share == pytest.approx(share)
    else:
        assert found.tokens == tokens


@pytest.mark.parametrize("cached", ["101%", "-1%", "many"])
def test_what_is_no_share_is_refused(cached: str) -> None:
    with pytest.raises(ConfigError, match="0% to 100%"):
        PlanRequest(cached_len=cached)


@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 900), st.integers(1, 90), st.floats(0.1, 5.0)),
        min_size=1,
        max_size=4,
    )
)
def test_the_lengths_of_a_mix_are_its_means(
    shapes: list[tuple[int, int, float]],
) -> None:
    """Prompts by request, and what is held by the tokens that are generated."""
    mix = WorkloadSpec(
        requests=tuple(
            RequestShape(prompt_len=prompt, gen_len=out, weight=weight)
            for prompt, out, weight in shapes
        )
    )
    (lengths,) = lengths_of(PlanRequest(workload=mix))
    total = sum(weight for _, _, weight in shapes)
    outputs = sum(weight * out for _, out, weight in shapes)
    prompt = sum(weight * prompt for prompt, _, weight in shapes) / total
    held = sum(w * out * (prompt + out / 2.0) for prompt, out, w in shapes) / outputs
    assert lengths.prompt_len == pytest.approx(prompt)
    assert lengths.prompt_len + lengths.growth / 2.0 == pytest.approx(held)
    assert lengths.output_len == pytest.approx(outputs / total)
    plain = lengths_of(PlanRequest(context_lens=(100, 7), gen_len=9))
    assert [(each.prompt_len, each.output_len) for each in plain] == [(100, 9), (7, 9)]
    assert plain[0].max_len(np.array([1.0, 8.0])).tolist() == [109.0, 109.0]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("num_gpus", [1, 2, 3, 4, 6, 8, 16, 24])
def test_a_layout_uses_no_more_devices_than_there_are(name: str, num_gpus: int) -> None:
    """And is none that was named before; over more than a node there is one in stages."""
    model = load_model_spec(name)
    hardware = load_hardware("h100-sxm-80gb")
    request = PlanRequest(model=name, hardware=(hardware.name,), num_gpus=num_gpus)
    found = layouts(request, model, hardware, load_engine("vllm"))
    ways = [
        (tp, way.spread.groups, way.spread.pp, way.spread.whole_experts)
        for way in found
        for tp in way.tp_sizes
    ]
    assert len(set(ways)) == len(ways)
    for tp, groups, _, _ in ways:
        assert tp * groups <= num_gpus
    assert 1 in found[0].tp_sizes
    assert any(pp > 1 for _, _, pp, _ in ways) == (num_gpus >= 16)
    with_experts = [way for way in ways if way[3]]
    assert bool(with_experts) == (model.is_moe and num_gpus in (2, 4, 8, 16, 24))
    asked = PlanRequest(
        model=name, hardware=(hardware.name,), num_gpus=num_gpus, tp_size=4
    )
    if num_gpus < 4:
        with pytest.raises(ConfigError, match=f"more than the {num_gpus} GPUs"):
            layouts(asked, model, hardware, load_engine("vllm"))
    else:
        (only,) = layouts(asked, model, hardware, load_engine("vllm"))
        assert only.tp_sizes == (4,)
