"""The belief about acceptance: against exact conditioning, what is left out, and a user's counts."""

from __future__ import annotations

import csv
import itertools

import msgspec
import numpy as np
import pytest

from evidence.beliefs import TASK_GROUPS, validate_beliefs
from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import (
    AcceptanceProfile,
    constant_profile,
    fit_profile,
    published,
)
from magicdec.perfmodel.acceptance import belief as beliefs
from magicdec.perfmodel.acceptance.belief import Point, Situation
from magicdec.perfmodel.acceptance.believed import (
    Question,
    assumed,
    completed,
    known_checkpoints,
    of_length,
    yours,
)
from magicdec.perfmodel.acceptance.published import Evidence, distinct, read_rates
from magicdec.perfmodel.planner import PlanRequest, make_plan

HEAD = Question("llama-3.1-8b", "eagle3", 8.0, task="chat", temperature=0.0)


def test_a_constant_rate_is_recovered_and_its_depth_is_the_derivative_of_the_tokens() -> (
    None
):
    step = 1e-5
    for gamma, logit in itertools.product((1, 3, 7), (-1.0, 0.5, 2.0)):
        tokens = beliefs.constant_rate_tokens(logit, gamma)
        assert beliefs.constant_rate_logit(tokens, gamma) == pytest.approx(
            logit, abs=1e-6
        )
        places = np.log(np.arange(1, gamma + 1)) - beliefs.REFERENCE_DEPTH
        tilted = [
            np.cumprod(1.0 / (1.0 + np.exp(-(logit + slope * places)))).sum()
            for slope in (step, -step)
        ]
        level = [
            beliefs.constant_rate_tokens(logit + move, gamma) for move in (step, -step)
        ]
        by_slope = (tilted[0] - tilted[1]) / (level[0] - level[1])
        assert beliefs.mean_depth(logit, gamma) == pytest.approx(by_slope, abs=1e-4)


@pytest.mark.parametrize(
    "kind", ["eagle3", "mtp", "ngram", "suffix", "full", "self", "dflash"]
)
def test_a_belief_is_a_little_narrower_where_the_text_has_no_name(kind: str) -> None:
    """A user's own text has none of the published ones'; no width is none or turned around."""
    named, unnamed, own = (
        beliefs.width_of(Point(Situation(kind=kind, task=task), 0.0))
        for task in ("gsm8k", "", f"{beliefs.YOUR_TEXT}logs")
    )
    assert own == unnamed
    assert 0.5 * named < unnamed < named


def test_a_source_left_out_takes_what_it_alone_tells() -> None:
    """The head of the Swiss servers is known from their own counts; a source of no counts takes nothing."""
    source = "swiss-ai/apertus-speculative-decoding@12ab results/8b"
    assert known_checkpoints("apertus-8b", "eagle3")
    assert not known_checkpoints(
        "apertus-8b", "eagle3", published.fitted_without(source)
    )
    known = Question("apertus-8b", "eagle3", 8.0, task="chat")
    alone = known._replace(without=source)
    assert assumed(alone).origin.startswith("assumed from")
    assert assumed(alone).error.log_rejection > assumed(known).error.log_rejection
    assert published.fitted_without("no/such source") is beliefs.fitted_belief()


@pytest.mark.slow
@pytest.mark.parametrize("source", ["none/such", "NVIDIA/Model-Optimizer"])
def test_what_is_shipped_predicts_as_conditioning_on_every_row_does(
    source: str,
) -> None:
    """A head that no row is of: the shipped levels, against one covariance of all thousand rows; and with
    a source's rows left out, of all others."""
    rates = distinct(read_rates(published.BELIEF_RATES))
    is_kept = [not rate.situation.is_from(source) for rate in rates]
    assert all(is_kept) == (source == "none/such")
    rates = list(itertools.compress(rates, is_kept))
    fitted = published.fitted_without(source)
    weights = np.array(beliefs.fitted_belief().coefficients.row_weights)[is_kept]
    evidence = Evidence.of(rates, fitted.scales, weights)
    at = Situation(
        kind="eagle3", model="new", draft="new", task_class="code", temperature=0.0
    )
    point = Point(at, 0.0)
    quick = beliefs.believed([point], of=fitted)
    whole = published.noisy_covariance(evidence, fitted.scales)
    cross = published.prior_covariance(evidence.points, [point], fitted.scales)[:, 0]
    gain = np.linalg.solve(whole, cross)
    own = published.prior_covariance([point], [point], fitted.scales)[0, 0]
    assert quick.mean[0] == pytest.approx(gain @ evidence.logits, abs=0.02)
    width = beliefs.width_of(point)
    assert quick.covariance[0, 0] == pytest.approx(
        width**2 * (own - gain @ cross), rel=0.03
    )


def test_a_known_head_on_a_known_text_is_surer_than_any_head_on_any_text() -> None:
    widths = [
        assumed(question).error.log_rejection
        for question in (
            Question("no such model", "eagle3", 8.0),
            Question("no such model", "eagle3", 8.0, task="chat"),
            HEAD._replace(draft="yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
        )
    ]
    assert widths[0] > widths[1] > widths[2] > 0.2
    assert known_checkpoints("Llama-3.1-8B-Instruct", "eagle3")
    assert not known_checkpoints("no such model", "eagle3")


def test_origins_say_in_few_words_where_acceptance_comes_from() -> None:
    assert assumed(HEAD).origin.startswith("published for 7 heads of this model")
    assert assumed(HEAD).origin.endswith(" and such text")
    assert assumed(Question("no such model", "mtp", 8.0)).origin.startswith(
        "assumed from "
    )


def _measured(rates: tuple[float, ...], trials: int) -> AcceptanceProfile:
    rows = []
    for position, rate in enumerate(rates, 1):
        accepted = round(rate * trials)
        rows.append({
            "draft_method": "eagle3", "budget": 1024, "context": 1024, "position": position,
            "trials": trials, "accepted": accepted, "temperature": 0.0,
        })  # fmt: skip
        trials = accepted
    return fit_profile(rows, model="llama-3.1-8b", draft="eagle3")


def _tokens(profile: AcceptanceProfile, gamma: int) -> tuple[float, float]:
    """Tokens per step and their relative error."""
    at = {"budget": None, "context": 1024, "gamma": gamma}
    return float(profile.tokens_per_step(**at)[0]), float(profile.tokens_error(**at))


@pytest.mark.parametrize("rate", [0.0, 0.02, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("trials", [20, 2_000, 100_000])
def test_measured_positions_are_their_counts_whatever_is_believed(rate, trials) -> None:
    """Within half of one trial, the weight that the law has."""
    tokens, _ = _tokens(completed(_measured((rate,), trials), HEAD), 1)
    assert tokens == pytest.approx(
        1.0 + round(rate * trials) / trials, abs=1.0 / trials
    )


def test_a_measurement_is_of_the_users_own_text_and_so_the_same_on_every_task() -> None:
    counted = _measured((0.4, 0.3), 500)
    answers = {
        _tokens(yours(counted, HEAD._replace(task=task)), 6)
        for task in ("", "chat", "code", "rag")
    }
    assert len(answers) == 1


def test_beyond_the_counted_positions_a_rate_is_as_wide_as_the_belief_has_it() -> None:
    """Prediction modules fall off by position; one counted position leaves the later ones open."""
    question = Question("no such model", "mtp", 8.0)
    one = completed(_measured((0.85,), 100_000), question)
    three = completed(_measured((0.85, 0.8, 0.77), 100_000), question)
    assert _tokens(one, 1)[1] < 0.005
    assert _tokens(one, 8)[1] > 0.08
    assert _tokens(one, 8)[1] > 1.5 * _tokens(three, 8)[1]
    rates = one.conditional_rates(budget=None, context=1024, gamma_max=8)
    assert rates[0] == pytest.approx(0.85, abs=1e-3)
    assert rates[7] < rates[0]
    given = completed(constant_profile(0.85), question, num_given=1)
    assert _tokens(given, 1) == (pytest.approx(1.85), 0.0)
    assert _tokens(given, 8)[1] > 0.08


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "ngram"])
@pytest.mark.parametrize(("tokens", "gamma"), [(1.0, 3), (1.5, 1), (2.4, 3), (4.0, 3)])
def test_a_length_at_a_gamma_is_met_there_whatever_its_rates(
    kind, tokens, gamma
) -> None:
    profile = of_length(tokens, gamma, Question("no such model", kind, 8.0))
    assert _tokens(profile, gamma) == (pytest.approx(tokens), 0.0)


def test_what_accepts_nothing_for_long_does_not_work_unless_it_looks_up() -> None:
    assert "none of 396" in _measured((0.0,), 396).fault
    assert not _measured((0.0,), 150).fault
    assert not _measured((0.02,), 2_000).fault
    found = msgspec.structs.replace(_measured((0.0,), 396), draft_method="ngram")
    assert not found.fault


def test_given_rates_are_sure_up_to_the_gamma_in_use() -> None:
    known = completed(constant_profile(0.8), HEAD, num_given=5)
    assert _tokens(known, 5)[1] == 0.0
    assert _tokens(known, 7)[1] > 0.0


@pytest.mark.slow
def test_groups_left_out_of_the_shipped_table_are_predicted_as_well_as_is_said() -> (
    None
):
    """The sorts of docs/acceptance.md: models left out."""
    found = validate_beliefs(leave_out="model")
    sorts = {group.group: group for group in found.groups if group.by == "sort"}
    for name, median, mean in (
        ("eagle3", 0.13, 0.16),
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
    rates = distinct(read_rates(published.BELIEF_RATES))[::12]
    scales = beliefs.fitted_belief().scales
    evidence = Evidence.of(rates, scales)
    mean, deviation = published.texts_left_out(evidence, scales, 5)
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
        one_mean, one_deviation = published.given(together, groups, "out", scales)
        assert mean[row] == pytest.approx(one_mean[0], abs=1e-9)
        assert deviation[row] == pytest.approx(one_deviation[0], abs=1e-9)


def test_rows_of_a_file_are_predicted_without_themselves(tmp_path) -> None:
    with published.BELIEF_RATES.open(encoding="utf-8", newline="") as file:
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


def test_a_task_moves_the_answer_and_an_unknown_one_is_refused() -> None:
    case = {"batch_sizes": (1,), "draft": "eagle3", "gamma": 3, "context_lens": (1024,)}
    code, chat = (
        make_plan(PlanRequest(**case, task=task)).candidates[0]
        for task in ("code", "chat")
    )
    assert code.drafting.tokens_per_step > chat.drafting.tokens_per_step
    with pytest.raises(ConfigError, match="unknown task"):
        PlanRequest(task="poetry")
