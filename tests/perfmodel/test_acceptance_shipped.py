"""The shipped belief against the table that it is of: its runs, its levels, its widths and its slopes."""

from __future__ import annotations

import math
from functools import cache

import msgspec
import numpy as np
import pytest

from magicdec.counts import Array
from magicdec.perfmodel.acceptance import belief as beliefs
from magicdec.perfmodel.acceptance import believed, published
from magicdec.perfmodel.acceptance.belief import Point
from magicdec.perfmodel.acceptance.published import (
    Evidence,
    Rate,
    distinct,
    published_slopes,
    read_rates,
)


@cache
def rows() -> list[Rate]:
    return distinct(read_rates(published.BELIEF_RATES))


@cache
def evidence() -> Evidence:
    fitted = beliefs.fitted_belief()
    return Evidence.of(rows(), fitted.scales, np.array(fitted.coefficients.row_weights))


@cache
def precision() -> Array:
    """Inverse of the covariance of all rows' logits."""
    scales = beliefs.fitted_belief().scales
    return np.linalg.inv(published.noisy_covariance(evidence(), scales))


def test_shipped_runs_are_the_tables() -> None:
    """Nothing of the table is read in another way than when the belief was fitted."""
    fitted = beliefs.fitted_belief()
    further = distinct(read_rates(published.FURTHER_RATES))
    expected = [
        *published._runs(evidence()),
        *published._runs(Evidence.of(further, fitted.scales)),
    ]
    assert fitted.coefficients.runs == expected


@pytest.mark.parametrize("group", sorted(set(believed.DEEPEST) - {"self"}))
def test_a_kind_of_draft_is_assumed_no_deeper_than_two_sources_count(
    group: str,
) -> None:
    """Self-drafts are, which sources count at up to 6: their rates fall least."""
    sources: dict[int, set[str]] = {}
    for rate in rows():
        if rate.situation.group == group:
            sources.setdefault(rate.gamma, set()).add(rate.situation.source)
    assert len(sources.get(believed.DEEPEST[group], ())) >= 2


def new_drafts() -> list[Point]:
    """Drafts and texts that no row is of, one in the place of each published one; and where features
    of their own count, far contexts and depths that nobody states."""
    shared = beliefs.fitted_belief().coefficients.shared
    points = {}
    for number, rate in enumerate(rows()):
        at = rate.situation
        maker = at.maker if f"{at.maker}|{at.kind}" in shared["maker"] else ""
        new = msgspec.structs.replace(
            at,
            model="new",
            draft=f"new {number}",
            maker=maker,
            task=f"{beliefs.YOUR_TEXT}{at.task_class}",
            source="new",
        )
        points.setdefault(at.checkpoint, Point(new, 0.3 * (number % 3)))
    found = list(points.values())
    for group in beliefs.CONTEXT_START | {"eagle3": 0.0}:
        near = next(point for point in found if point.situation.group == group)
        far = msgspec.structs.replace(near.situation, context=70_000.0)
        tree = msgspec.structs.replace(near.situation, is_tree=True)
        found.append(Point(far, 0.0))
        found.append(Point(tree, 0.0, is_gamma_assumed=True))
        found.append(Point(near.situation, 0.0, is_gamma_assumed=True))
    return found


def test_what_is_shipped_predicts_new_drafts_as_all_rows_together_do() -> None:
    """In each feature: shared levels and the priors that they are in units of, against exact
    conditioning on a thousand rows (the shipped numbers are rounded)."""
    points = new_drafts()
    used = beliefs.feature_matrix(points).any(axis=0)
    assert list(np.array(list(beliefs.FEATURES))[~used]) == []
    scales = beliefs.fitted_belief().scales
    cross = published.prior_covariance(evidence().points, points, scales)
    gain = precision() @ cross
    own = np.diag(published.prior_covariance(points, points, scales))
    deviation = np.sqrt(own - np.einsum("ij,ij->j", cross, gain))
    quick = beliefs.believed(points)
    assert quick.mean == pytest.approx(gain.T @ evidence().logits, abs=0.05)
    assert quick.deviation == pytest.approx(
        deviation * beliefs.widths_of(points), rel=0.005
    )


def test_widths_hold_what_they_say_of_models_left_out() -> None:
    """Each group's rows given those of all other models: 90 % intervals hold at least that, and no
    group's are twice as wide as they need to be."""
    models = np.array([rate.situation.model for rate in rows()])
    groups = np.array([rate.situation.group for rate in rows()])
    weighted = precision() @ evidence().logits
    sigmas = np.zeros(len(models))
    for model in np.unique(models):
        left_out = np.flatnonzero(models == model)
        covariance = np.linalg.inv(precision()[np.ix_(left_out, left_out)])
        deviation = np.sqrt(np.diag(covariance))
        sigmas[left_out] = covariance @ weighted[left_out] / deviation
    sigmas /= beliefs.widths_of(evidence().points)
    for group in set(groups) - {"mixed"}:
        own = sigmas[groups == group]
        assert np.mean(np.abs(own) < 1.645) >= 0.9, group
        assert 0.6 < np.sqrt(np.mean(own**2)) < 1.1, group


@pytest.mark.parametrize("is_marginal", [False, True])
@pytest.mark.parametrize("slope", [-0.5, 0.0, 0.7])
def test_a_slope_is_that_of_the_logit_by_the_logarithm_of_the_position(
    slope: float, is_marginal: bool, tmp_path
) -> None:
    """Of rates after one another or of all before them; of chains, as the mean of a checkpoint's in
    a source."""
    rates = [1.0 / (1.0 + math.exp(-(0.4 + slope * math.log(i)))) for i in range(1, 6)]
    survivors = np.cumprod(rates)
    stated = survivors if is_marginal else rates
    by_position = ";".join(f"{each:.9f}" for each in stated)
    tokens = 1.0 + survivors.sum()
    path = tmp_path / "rates.csv"
    path.write_text(
        "model,draft_name,draft_kind,source,shape,mean_acceptance_length,acceptance_by_position\n"
        f"m,d,eagle3,s,chain,{tokens},{by_position}\n"
        f"m,d,eagle3,s,,{1.0 + 0.6 + 0.36},0.6;0.6\n"
        f"m,d,eagle1,s,tree of 60,{tokens},{by_position}\n"
        f"m,d,draft-model,s,chain,,{by_position}\n"
        "m,d,mtp,s,chain,1.5,0.5\n"
        f"m,other,eagle3,s,chain,{tokens},{by_position}\n"
    )
    found = published_slopes(path)
    assert list(found) == ["eagle3"]
    assert found["eagle3"] == pytest.approx([slope / 2.0, slope], abs=1e-6)


# Conditioning, of few rows


def few_rows(number: int) -> list[Rate]:
    """Rows of the table, of all groups."""
    return rows()[:: len(rows()) // number][:number]


def test_a_belief_is_fitted_and_asked_as_one_conditioning() -> None:
    """What checkpoints have alone is integrated out and put in again: nothing is lost by it."""
    chosen = few_rows(60)
    scales = beliefs.fitted_belief().scales
    weights = np.linspace(0.4, 1.0, len(chosen))
    known = Evidence.of(chosen, scales, weights)
    shared = {
        level.name: sorted(set(beliefs.level_keys(known.points, level)))
        for level in beliefs.SHARED_LEVELS
    }
    fitted = beliefs.fitted_from(published.posterior(chosen, weights, shared, scales))
    points = [
        Point(
            msgspec.structs.replace(
                rate.situation,
                model=f"new {number}",
                draft="new",
                source="new",
                task="",
            ),
            0.2,
        )
        for number, rate in enumerate(chosen[::6])
    ]
    whole = published.noisy_covariance(known, scales)
    cross = published.prior_covariance(known.points, points, scales)
    gain = np.linalg.solve(whole, cross)
    own = published.prior_covariance(points, points, scales) - cross.T @ gain
    found = beliefs.believed(points, of=fitted)
    assert found.mean == pytest.approx(gain.T @ known.logits, abs=0.01)
    widths = beliefs.widths_of(points)
    assert found.covariance == pytest.approx(own * np.outer(widths, widths), abs=0.02)


def test_rows_of_a_group_are_predicted_from_the_others_alone() -> None:
    """By the precision of all rows, whose block is the inverse of what the others leave open."""
    chosen = few_rows(40)
    scales = msgspec.structs.replace(beliefs.fitted_belief().scales, weights={})
    known = Evidence.of(chosen, scales)
    groups = [rate.situation.group for rate in chosen]
    mean, deviation = published.rates_left_out(known, groups, scales, kept="lookup")
    inverse = np.linalg.inv(published.noisy_covariance(known, scales))
    weighted = inverse @ known.logits
    for group in set(groups):
        own = np.flatnonzero(np.array(groups) == group)
        if group == "lookup":
            assert not mean[own].any()
            assert not deviation[own].any()
            continue
        left_open = np.linalg.inv(inverse[np.ix_(own, own)])
        expected = known.logits[own] - left_open @ weighted[own]
        assert mean[own] == pytest.approx(expected, abs=1e-8)
        widths = beliefs.widths_of([known.points[row] for row in own])
        assert deviation[own] == pytest.approx(widths * np.sqrt(np.diag(left_open)))


def test_noise_is_that_of_a_row_and_more_of_few_texts_and_of_self_drafts() -> None:
    """A run of several rows has the precision of all."""
    scales = beliefs.fitted_belief().scales
    known = Evidence.of(rows(), scales)
    assert known.variance == pytest.approx(known.usual_variance)
    least = scales.noise**2
    for rate, variance in zip(rows(), known.variance, strict=True):
        is_plain = not rate.is_rough and rate.situation.group != "self"
        assert (variance == pytest.approx(least)) == is_plain
        assert variance >= least
    for run, members in zip(
        published._runs(known), members_of_runs(known), strict=True
    ):
        precisions = [1.0 / known.variance[row] for row in members]
        assert run.variance == pytest.approx(1.0 / sum(precisions), abs=6e-6)
        of_logits = np.average(known.logits[members], weights=precisions)
        assert run.logit == pytest.approx(of_logits, abs=6e-5)


def members_of_runs(known: Evidence) -> list[list[int]]:
    members: dict[str, list[int]] = {}
    for row, point in enumerate(known.points):
        members.setdefault(beliefs.run_of(point.situation), []).append(row)
    return list(members.values())


# Rows of a table


@pytest.mark.parametrize(
    ("gamma", "tokens", "is_read"),
    [
        ("3", "1.004", False), ("3", "1.006", True), ("3", "4.0", True), ("3", "4.03", True), ("3", "4.05", False),
        ("1", "2.0", True), ("1", "2.03", False), ("", "9.4", True), ("3", "", False), ("3", "none", False),
    ],
)  # fmt: skip
def test_a_length_is_more_than_one_token_and_at_most_all_drafted(
    gamma: str, tokens: str, is_read: bool, tmp_path
) -> None:
    """To a hundredth, by which sources round; a gamma that nobody states is deep enough for it."""
    path = tmp_path / "rates.csv"
    path.write_text(
        f"model,draft_kind,gamma,mean_acceptance_length\nm,eagle3,{gamma},{tokens}\n"
    )
    found = read_rates(path)
    assert len(found) == is_read
    for rate in found:
        assert rate.tokens == float(tokens)
        assert rate.gamma + 1 >= rate.tokens / 1.01
        assert rate.is_gamma_assumed == (gamma == "")
        assert rate.is_chain == (gamma != "")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12.0), ("~1.5", 1.5), ("2-4", 3.0), ("2 - 4", 3.0), ("2K", 2048.0), ("1-3k", 2048.0),
        ("8k tokens", 8192.0), ("", None), ("none", None), ("x9", None), ("0", 0.0), (" 7", 7.0),
    ],
)  # fmt: skip
def test_a_field_is_the_number_that_it_begins_with(
    text: str, value: float | None
) -> None:
    assert published.number(text) == value


@pytest.mark.parametrize(
    ("stated", "expected"),
    [("0.02", 0.02), ("1", 1.0), ("1.0", 1.0), ("0", None), ("1.01", None), ("", None)],
)
def test_an_accepted_share_makes_tokens_where_it_is_one(
    stated: str, expected: float | None, tmp_path
) -> None:
    path = tmp_path / "rates.csv"
    path.write_text(
        "model,draft_kind,gamma,mean_acceptance_length,acceptance_rate\n"
        f"m,mtp,3,,{stated}\nm,mtp,3,2.5,{stated}\n"
    )
    found = read_rates(path)
    assert found[-1].tokens == 2.5
    assert not found[-1].is_from_share
    if expected is None:
        assert len(found) == 1
        return
    assert found[0].tokens == pytest.approx(1.0 + 3.0 * expected)
    assert found[0].is_from_share
    assert found[0].is_rough
    assert not found[0].is_chain


def test_a_row_that_stands_twice_counts_once() -> None:
    """The first of them; rows of another gamma, text or context are others."""
    one = rows()[0]
    at = one.situation
    others = [
        msgspec.structs.replace(one, gamma=one.gamma + 1),
        msgspec.structs.replace(one, tokens=one.tokens + 0.002),
    ]
    for change in (
        {"task": "another"},
        {"context": 77.0},
        {"window": 5.0},
        {"temperature": 0.123},
        {"is_tree": not at.is_tree},
        {"draft": "another"},
        {"model": "another"},
        {"kind": "mtp" if at.kind != "mtp" else "eagle3"},
    ):
        moved = msgspec.structs.replace(at, **change)
        others.append(msgspec.structs.replace(one, situation=moved))
    same = [
        msgspec.structs.replace(one, tokens=one.tokens + 0.0001, is_rough=True),
        msgspec.structs.replace(
            one, situation=msgspec.structs.replace(at, source="elsewhere")
        ),
    ]
    for table in ([one, *others, *same], [*others, one, *same]):
        found = distinct(table)
        assert len(found) == 1 + len(others)
        assert all(each in found for each in (one, *others))
    assert distinct([*others, one]) == [*others, one]
