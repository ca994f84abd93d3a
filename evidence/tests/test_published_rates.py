"""The shipped belief against the table that it is of: its runs, its levels, its widths and its slopes."""

from __future__ import annotations

import csv
import itertools
import math
from collections import Counter
from functools import cache

import msgspec
import numpy as np
import pytest

from evidence import DATA, published_rates
from evidence.beliefs import TASK_GROUPS, validate_beliefs
from evidence.published_rates import (
    Evidence,
    Rate,
    distinct,
    published_slopes,
    read_rates,
)
from magicdec.counts import Array
from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import belief as beliefs
from magicdec.perfmodel.acceptance import believed
from magicdec.perfmodel.acceptance.belief import Point, Situation, plain
from magicdec.perfmodel.acceptance.believed import Question, known_checkpoints


@cache
def rows() -> list[Rate]:
    return distinct(read_rates(published_rates.BELIEF_RATES))


@cache
def evidence() -> Evidence:
    fitted = beliefs.fitted_belief()
    return Evidence.of(rows(), fitted.scales, np.array(fitted.coefficients.row_weights))


@cache
def precision() -> Array:
    """Inverse of the covariance of all rows' logits."""
    scales = beliefs.fitted_belief().scales
    return np.linalg.inv(published_rates.noisy_covariance(evidence(), scales))


def test_shipped_runs_are_the_tables() -> None:
    """Nothing of the table is read in another way than when the belief was fitted."""
    fitted = beliefs.fitted_belief()
    further = distinct(read_rates(published_rates.FURTHER_RATES))
    expected = [
        *published_rates._runs(evidence()),
        *published_rates._runs(Evidence.of(further, fitted.scales)),
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
    cross = published_rates.prior_covariance(evidence().points, points, scales)
    gain = precision() @ cross
    own = np.diag(published_rates.prior_covariance(points, points, scales))
    deviation = np.sqrt(own - np.einsum("ij,ij->j", cross, gain))
    quick = beliefs.believed(points)
    expected = gain.T @ evidence().logits + beliefs.lost_logits(points)
    assert quick.mean == pytest.approx(expected, abs=0.05)
    assert quick.deviation == pytest.approx(
        deviation * beliefs.widths_of(points), rel=0.01
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
    situations = [point.situation for point in known.points]
    shared = {
        level.name: sorted(set(beliefs.level_keys(situations, level)))
        for level in beliefs.SHARED_LEVELS
    }
    fitted = beliefs.fitted_from(
        published_rates.posterior(chosen, weights, shared, scales)
    )
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
    whole = published_rates.noisy_covariance(known, scales)
    cross = published_rates.prior_covariance(known.points, points, scales)
    gain = np.linalg.solve(whole, cross)
    own = published_rates.prior_covariance(points, points, scales) - cross.T @ gain
    found = beliefs.believed(points, of=fitted)
    expected = gain.T @ known.logits + beliefs.lost_logits(points)
    assert found.mean == pytest.approx(expected, abs=0.01)
    widths = beliefs.widths_of(points)
    assert found.covariance == pytest.approx(own * np.outer(widths, widths), abs=0.02)


def test_rows_of_a_group_are_predicted_from_the_others_alone() -> None:
    """By the precision of all rows, whose block is the inverse of what the others leave open."""
    chosen = few_rows(40)
    scales = msgspec.structs.replace(beliefs.fitted_belief().scales, weights={})
    known = Evidence.of(chosen, scales)
    groups = [rate.situation.group for rate in chosen]
    mean, deviation = published_rates.rates_left_out(
        known, groups, scales, kept="lookup"
    )
    inverse = np.linalg.inv(published_rates.noisy_covariance(known, scales))
    weighted = inverse @ known.logits
    for group in set(groups):
        own = np.flatnonzero(np.array(groups) == group)
        if group == "lookup":
            assert not mean[own].any()
            assert not deviation[own].any()
            continue
        left_open = np.linalg.inv(inverse[np.ix_(own, own)])
        expected = known.logits[own] - left_open @ weighted[own]
        expected += beliefs.lost_logits([known.points[row] for row in own])
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
        is_open = (
            rate.situation.group == "self"
            and rate.tokens > beliefs.constant_rate_tokens(4.19, rate.gamma)
        )
        is_plain = not rate.is_rough and not is_open
        is_plain = is_plain and not published_rates.has_untold_length(rate.situation)
        assert (variance == pytest.approx(least)) == is_plain
        assert variance >= least
    for run, members in zip(
        published_rates._runs(known), members_of_runs(known), strict=True
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
    assert published_rates.number(text) == value


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


def test_a_source_left_out_takes_what_it_alone_tells() -> None:
    """The head of the Swiss servers is known from their own counts; a source of no counts takes nothing."""
    source = "swiss-ai/apertus-speculative-decoding@12ab results/8b"
    assert known_checkpoints("apertus-8b", "eagle3")
    assert not known_checkpoints(
        "apertus-8b", "eagle3", published_rates.fitted_without(source)
    )
    known = Question("apertus-8b", "eagle3", 8.0, task="chat")
    alone = known._replace(published=published_rates.fitted_without(source))
    assert believed.assumed(alone).origin.startswith("assumed from")
    assert (
        believed.assumed(alone).error.log_rejection
        > believed.assumed(known).error.log_rejection
    )
    assert published_rates.fitted_without("no/such source") is beliefs.fitted_belief()


@pytest.mark.slow
@pytest.mark.parametrize("source", ["none/such", "NVIDIA/Model-Optimizer"])
def test_what_is_shipped_predicts_as_conditioning_on_every_row_does(
    source: str,
) -> None:
    """A head that no row is of: the shipped levels, against one covariance of all thousand rows; and with
    a source's rows left out, of all others."""
    rates = distinct(read_rates(published_rates.BELIEF_RATES))
    is_kept = [not published_rates.is_from(rate.situation, source) for rate in rates]
    assert all(is_kept) == (source == "none/such")
    rates = list(itertools.compress(rates, is_kept))
    fitted = published_rates.fitted_without(source)
    weights = np.array(beliefs.fitted_belief().coefficients.row_weights)[is_kept]
    evidence = Evidence.of(rates, fitted.scales, weights)
    at = Situation(
        kind="eagle3", model="new", draft="new", task_class="code", temperature=0.0
    )
    point = Point(at, 0.0)
    quick = beliefs.believed([point], of=fitted)
    whole = published_rates.noisy_covariance(evidence, fitted.scales)
    cross = published_rates.prior_covariance(evidence.points, [point], fitted.scales)[
        :, 0
    ]
    gain = np.linalg.solve(whole, cross)
    own = published_rates.prior_covariance([point], [point], fitted.scales)[0, 0]
    assert quick.mean[0] == pytest.approx(gain @ evidence.logits, abs=0.02)
    width = beliefs.width_of(point)
    assert quick.covariance[0, 0] == pytest.approx(
        width**2 * (own - gain @ cross), rel=0.03
    )


@pytest.mark.slow
def test_groups_left_out_of_the_shipped_table_are_predicted_as_well_as_is_said() -> (
    None
):
    """The sorts of docs/acceptance.md: models left out."""
    found = validate_beliefs(leave_out="model")
    sorts = {group.group: group for group in found.groups if group.by == "sort"}
    for name, median, mean in (
        ("eagle3", 0.13, 0.165),
        ("mtp", 0.14, 0.17),
        ("block", 0.1, 0.15),
        ("lookup", 0.13, 0.25),
    ):
        assert sorts[name].median_error < median
        assert sorts[name].mean_error < mean
        assert sorts[name].coverage >= 0.83
        assert sorts[name].width < 2.4
    assert found.brier < 0.1


def test_an_own_text_is_told_by_other_texts_of_other_sources_alone() -> None:
    """Against one more point, of the user's text, given the kept rows."""
    rates = distinct(read_rates(published_rates.BELIEF_RATES))[::12]
    scales = beliefs.fitted_belief().scales
    evidence = Evidence.of(rates, scales)
    mean, deviation = published_rates.texts_left_out(evidence, scales, 5)
    assert not mean[5:].any()
    for row in range(5):
        at = rates[row].situation
        others = []
        for rate in rates:
            if rate.situation.task != at.task and rate.situation.source != at.source:
                others.append(rate)
        text = f"{beliefs.YOUR_TEXT}{at.task_class}"
        own = msgspec.structs.replace(at, task=text, source="yours")
        asked = msgspec.structs.replace(rates[row], situation=own)
        together = Evidence.of([*others, asked], scales)
        groups = ["kept"] * len(others) + ["out"]
        one_mean, one_deviation = published_rates.given(together, groups, "out", scales)
        assert mean[row] == pytest.approx(one_mean[0], abs=1e-9)
        assert deviation[row] == pytest.approx(one_deviation[0], abs=1e-9)


def test_rows_of_a_file_are_predicted_without_themselves(tmp_path) -> None:
    with published_rates.BELIEF_RATES.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    chosen = [line for line in lines if line["model"].startswith("gpt-oss")]
    path = tmp_path / "rates.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(chosen)
    found = validate_beliefs([path])
    assert found.rows == len(distinct(read_rates(path)))
    assert found.overall.median_error > 0.001
    with pytest.raises(ConfigError, match="group to leave out"):
        validate_beliefs([path], leave_out="models")
    assert set(TASK_GROUPS) == {
        "model",
        "source",
        "checkpoint",
        "checkpoint-task",
        "long-context",
    }


def test_definitions_are_made_one(tmp_path) -> None:
    path = tmp_path / "rates.csv"
    path.write_text(
        "model,draft_kind,gamma,mean_acceptance_length,definition,acceptance_rate\n"
        'm,eagle3,5,2.0,"accepted only, bonus excluded",\n'
        'm,ngram,5,3.3,"per DRAFTED step incl. bonus; all-steps tokens/step = a/(a-b) = 2.18",\n'
        "m,mtp,3,,accepted/drafted,0.5 (1/2)\n"
        "m,mtp,,,nothing,\n"
    )
    rates = read_rates(path)
    assert [rate.tokens for rate in rates] == [3.0, 2.18, 2.5]
    assert not any(rate.situation.counts_drafted for rate in rates)
    assert [rate.is_chain for rate in rates] == [True, True, False]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("2048,4,0", "line 2: trained_length must be at least 1, not 0"),
        ("3,4,2048", "line 2: window 3 must exceed the 4 sinks beside it"),
    ],
)
def test_lengths_that_no_head_can_have(fields: str, message: str, tmp_path) -> None:
    path = tmp_path / "rates.csv"
    path.write_text(
        "model,draft_kind,gamma,mean_acceptance_length,window,sink,trained_length\n"
        f"m,eagle3,5,2.0,{fields}\n"
    )
    with pytest.raises(ConfigError, match=message):
        read_rates(path)


def test_hub_ids_are_those_of_the_tables_with_their_rows() -> None:
    counted: Counter[str] = Counter()
    for path in (published_rates.BELIEF_RATES, published_rates.FURTHER_RATES):
        with path.open(encoding="utf-8", newline="") as file:
            names = [row["draft_name"] for row in csv.DictReader(file)]
        ids = [name for name in names if name.count("/") == 1 and " " not in name]
        counted.update(map(plain, ids))
    found = beliefs.fitted_belief().coefficients.checkpoints
    assert {name: rows for name, (_, rows) in found.items()} == dict(counted)
    assert all(plain(name) == key for key, (name, _) in found.items())
    drafts = known_checkpoints("llama-3.1-8b", "eagle3")
    most = max(counted.get(draft, 0) for draft in drafts)
    named = believed.measured_checkpoint(
        Question("llama-3.1-8b", "eagle3", 8.0, task="chat", temperature=0.0)
    )
    assert found[plain(named)] == (named, most)
    assert believed.measured_checkpoint(Question("no such model", "eagle3", 8.0)) == ""


def test_the_most_tokens_per_step_are_the_tables_own() -> None:
    """The highest row of chains by kind of draft and gamma, of those whose source is named."""
    most: dict[tuple[str, int], float] = {}
    for path in (published_rates.BELIEF_RATES, published_rates.FURTHER_RATES):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                is_usable = (
                    row["shape"] == "chain"
                    and row["gamma"].isdecimal()
                    and row["mean_acceptance_length"]
                    and not row["secondary"]
                    and not row["source"].startswith("excerpt")
                )
                if is_usable:
                    kind = row["draft_kind"]
                    kind = published_rates.KIND_OF.get(kind, kind)
                    at = (kind, int(row["gamma"]))
                    tokens = float(row["mean_acceptance_length"])
                    most[at] = max(most.get(at, 0.0), tokens)
    with believed.MOST_TOKENS_FILE.open(encoding="utf-8", newline="") as file:
        shipped = {
            (row["kind"], int(row["gamma"])): float(row["tokens_per_step"])
            for row in csv.DictReader(file)
        }
    assert shipped == most


def test_a_published_draft_over_a_part_of_the_cache_is_expected_to_do_as_published() -> (
    None
):
    """Of three drafted tokens the project's page prints the accepted share by context; nobody names a text."""
    question = Question("llama-3.1-8b", "streamingllm", 8.0, budget=512.0)
    found = believed.profile_of(question, draft="self", method="streamingllm")
    assert found.source == "published for this model and StreamingLLM at 512 on PG-19"
    table = DATA / "acceptance" / "acceptance_llama31_8b_streamingllm512_pg19.csv"
    with table.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            context = float(row["context_len"])
            tokens, _ = found.tokens_per_step(budget=512.0, context=context, gamma=3)
            stated = 1.0 + 3.0 * float(row["acceptance_rate"])
            assert float(tokens) == pytest.approx(stated, rel=0.03), context


@pytest.mark.parametrize(
    ("left_out", "error", "inside"), [("source", 0.15, 0.83), ("nothing", 0.05, 0.83)]
)
def test_self_drafts_are_believed_with_and_without_their_source(
    left_out: str, error: float, inside: float
) -> None:
    groups = {
        group.group: group for group in validate_beliefs(leave_out=left_out).groups
    }
    assert groups["self"].median_error <= error
    for name in ("self", "snapkv", "streamingllm", "topk"):
        assert groups[name].coverage >= inside, name
