"""What a belief's profile says, by the belief's own numbers: errors, mixtures, names, slopes beyond what is known."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.perfmodel.acceptance import belief as beliefs
from magicdec.perfmodel.acceptance import believed
from magicdec.perfmodel.acceptance.belief import Point, Situation, maker_of, plain
from magicdec.perfmodel.acceptance.believed import Question, profile_on
from magicdec.perfmodel.acceptance.fit import MeasuredRates
from magicdec.perfmodel.acceptance.measured import MeasuredProfile
from magicdec.perfmodel.acceptance.profile import constant_profile, law_of_rates
from magicdec.specs.catalog import load_model_spec

KNOWN = Question("llama-3.1-8b", "eagle3", 8.0, task="chat", temperature=0.0)
QUESTIONS = [
    KNOWN,
    Question("llama-3.1-8b", "eagle3", 8.0, draft="yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
    Question("llama-3.1-8b", "eagle3", 8.0, task="rag", context=8192.0),
    Question("llama-3.1-8b", "ngram", 8.0),
    Question("no such model", "eagle3", 70.0, task="code", temperature=1.0),
    Question("no such model", "mtp", 200.0, context=9e4),
    Question("no such model", "dflash", 8.0, window=4096.0),
    Question("no such model", "full", 8.0, task="math"),
    Question("no such model", "ngram", 8.0, task="rag", context=700.0),
    Question("no such model", "streamingllm", 8.0, budget=512.0, context=3e4),
]  # fmt: skip
questions = pytest.mark.parametrize(
    "question", QUESTIONS, ids=lambda q: f"{q.model}-{q.kind}-{q.task}"
)


def logit(rate: float) -> float:
    return math.log(rate / (1.0 - rate))


HEADS = ("eagle3",)


def times(question: Question) -> float:
    """How many anchors the far context is: eight, or a head's own context, at least two."""
    if question.kind not in HEADS:
        return 8.0
    return max(question.context / believed._anchor(question), 2.0)


def asked(question: Question, head: believed.PossibleHead) -> list[Point]:
    """The draft at the usual depth and one logarithm deeper, near and far."""
    draft = head.draft
    at = Situation(
        kind=question.kind,
        model=plain(question.model),
        draft=draft,
        maker=next(
            (
                run.situation.maker
                for run in beliefs.fitted_belief().coefficients.runs
                if draft and (run.situation.draft, run.situation.kind) == (draft, question.kind)
            ),
            maker_of(draft, question.kind),
        ),
        task=f"yours {question.task}",
        task_class=question.task,
        source="yours",
        temperature=question.temperature,
        context=believed._anchor(question),
        window=question.window,
        trained_len=head.trained.length,
        rotary_base=head.trained.rotary_base,
        target_billions=question.billions,
    )  # fmt: skip
    assert at.context is not None
    far = msgspec.structs.replace(at, context=times(question) * at.context)
    if question.budget is not None:
        at, far = (
            msgspec.structs.replace(
                each, budget=512.0 / (1.0 + 512.0 / (each.context or 1.0))
            )
            for each in (at, far)
        )  # as many as 512 of an endless context
    return [Point(at, 0.0), Point(at, 1.0), Point(far, 0.0), Point(far, 1.0)]


@questions
def test_a_laws_rates_and_errors_are_the_beliefs(question: Question) -> None:
    """Of drafts that are as likely, their mixture: 40,000 draws of each have the stated deviations (four
    standard errors of a deviation are 1.5 %)."""
    drafts = believed._possible_heads(question)
    normal = beliefs.believed([p for draft in drafts for p in asked(question, draft)])
    rng = np.random.default_rng(5)
    draws = []
    for number in range(len(drafts)):
        own = slice(4 * number, 4 * number + 4)
        covariance = normal.covariance[own, own]
        root = np.linalg.cholesky(covariance + 1e-9 * np.eye(4))
        draws.append(normal.mean[own] + rng.normal(size=(40_000, 4)) @ root.T)
    drawn = np.concatenate(draws)
    means = np.mean([normal.mean[4 * n : 4 * n + 4] for n in range(len(drafts))], axis=0)  # fmt: skip
    here, there = (0, 2)
    is_beyond = question.kind in HEADS and question.context > believed._anchor(question)
    if is_beyond:
        here, there = (2, 0)
    level, deep, far = means[[here, here + 1, there]]
    found = believed.assumed(question)
    for place, rate in enumerate(found.law.by_position):
        depth = math.log(place + 1) - 0.6
        expected = 1.0 / (1.0 + math.exp(-(level + (deep - level) * depth)))
        assert rate == pytest.approx(min(max(expected, 0.02), 0.985), abs=1e-5)
    alpha = 1.0 / (1.0 + math.exp(-level))
    # d log(-log rate) / d logit
    factor = (1.0 - alpha) / -math.log(alpha)
    own = factor * np.std(drawn[:, here])
    assert found.error.log_rejection == pytest.approx(own, rel=0.02)
    trend = factor * np.std(drawn[:, here + 1] - drawn[:, here])
    assert found.error.depth == pytest.approx(0.45 * trend, rel=0.02)
    far_rate = 1.0 / (1.0 + math.exp(-(far - (deep - level) * 0.6)))
    grown = math.log((1.0 - min(max(far_rate, 0.02), 0.985)) / (1.0 - found.law.by_position[0]))  # fmt: skip
    if is_beyond:
        grown = -grown
    if question.kind == "ngram" or grown <= 5e-5:
        assert found.law.context_exponent == found.error.context_exponent == 0.0
    else:
        growth = factor * np.std(drawn[:, 2] - drawn[:, 0]) / math.log(times(question))
        assert found.law.context_exponent == pytest.approx(grown / math.log(times(question)), abs=1e-4)  # fmt: skip
        assert found.error.context_exponent == pytest.approx(growth, rel=0.02)


@questions
def test_a_draft_in_narrower_weights_is_less_known_by_a_part_of_its_own(
    question: Question,
) -> None:
    plain_one, other = (
        believed.assumed(question._replace(is_other_format=is_other))
        for is_other in (False, True)
    )
    assert other.law == plain_one.law
    level = believed._logits([question])[0].mean[2 if question.context == 8192.0 else 0]
    alpha = 1.0 / (1.0 + math.exp(-level))
    factor = (1.0 - alpha) / -math.log(alpha)
    added = other.error.log_rejection**2 - plain_one.error.log_rejection**2
    assert math.sqrt(added) / factor == pytest.approx(0.3, rel=1e-6)


@questions
def test_texts_asked_together_have_the_beliefs_of_each_alone(
    question: Question,
) -> None:
    for task in ("", "code"):
        asked_alone = question._replace(task=task)
        (alone,) = believed._logits([asked_alone])
        together = believed._published_logits(asked_alone)
        assert together.named == alone.named
        assert together.mean == pytest.approx(alone.mean, abs=1e-9)
        assert together.covariance == pytest.approx(alone.covariance, abs=1e-9)


def test_levels_of_several_questions_are_those_of_each_and_what_they_share() -> None:
    """Two drafts of one question: as many draws of both at once, each of its drafts as likely."""
    two = [KNOWN, KNOWN._replace(task="code")]
    mean, covariance = believed.joint_levels(two)
    for number, question in enumerate(two):
        (alone,) = believed._logits([question])
        assert mean[number] == pytest.approx(alone.mean[0], abs=1e-9)
        assert covariance[number, number] == pytest.approx(alone.covariance[0, 0], abs=1e-9)  # fmt: skip
    drafts = believed._possible_heads(KNOWN)
    points = [asked(question, draft)[0] for question in two for draft in drafts]
    normal = beliefs.believed(points)
    number = len(drafts)
    assert covariance[0, 1] == pytest.approx(normal.covariance[:number, number:].mean())
    assert covariance[1, 0] == pytest.approx(covariance[0, 1])


@pytest.mark.parametrize("kind", ["eagle3", "streamingllm"])
def test_a_mixture_is_no_less_known_than_what_it_is_of(kind: str) -> None:
    """Of one text with itself it is that text; between two, its errors and rates lie between."""
    budget = 512.0 if kind == "streamingllm" else None
    question = Question("llama-3.1-8b", kind, 8.0, context=9e3, budget=budget)
    alone = [
        profile_on(question._replace(task=task), draft="d", method=kind)
        for task in ("chat", "code")
    ]
    for share in (1, 50, 99):
        task = f"chat={share},code={100 - share}"
        mixed = profile_on(question._replace(task=task), draft="d", method=kind)
        assert mixed.dataset == task
        lead = alone[share < 50]
        assert mixed.source == f"{lead.source} (mixture by shares of tokens)"
        at: dict[str, Any] = {"budget": question.budget, "context": 9e3, "gamma": 4}
        low, high = sorted(float(each.tokens_per_step(**at)[0]) for each in alone)
        found = float(mixed.tokens_per_step(**at)[0])
        assert low - 1e-4 <= found <= high + 1e-4  # rates are rounded
        near = alone[share < 50]
        if share != 50:
            assert found == pytest.approx(
                float(near.tokens_per_step(**at)[0]), rel=0.02
            )
            for name in ("log_rejection", "depth", "context_exponent"):
                own = getattr(near.error, name)
                assert getattr(mixed.error, name) == pytest.approx(own, rel=0.03), name
        assert mixed.error.log_rejection <= max(e.error.log_rejection for e in alone)


# Names


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "dflash", "ngram"])
def test_known_checkpoints_are_those_that_their_makers_published(kind: str) -> None:
    """Others' baselines only where there is nothing else."""
    runs = [run.situation for run in beliefs.fitted_belief().coefficients.runs]
    for model in {at.model for at in runs if at.kind == kind}:
        of_model = [at for at in runs if (at.model, at.kind) == (model, kind)]
        own = {at.draft for at in of_model if not at.is_baseline}
        known = believed.known_checkpoints(model, kind)
        question = Question(model, kind, 8.0)
        assert len(known) == len(set(known))
        assert set(known) == (own or {at.draft for at in of_model})
        assert kind in believed.kinds_of(model)
        for draft in filter(None, known):
            longer = f"some-{draft}-v2"
            named = believed.checkpoint_in(longer, question)
            assert named in known
            assert len(named) >= len(draft)
        assert believed.checkpoint_in("", question) == ""
        assert believed.checkpoint_in("qqq", question) == ""


def test_a_question_is_about_what_a_plan_calls_the_draft() -> None:
    target = load_model_spec("llama-3.1-8b")
    for draft, method, kind, checkpoint, budget in (
        ("eagle3", "eagle3", "eagle3", "", None),
        ("self", "full", "self-quantised", "", None),
        ("self", "snapkv", "snapkv", "", 512.0),
        ("llama-3.2-1b", "full", "full", "llama-3.2-1b", None),
        ("ngram", "ngram", "ngram", "", None),
    ):
        found = Question.about(target, draft, method, context=77.0)
        assert (found.kind, found.draft, found.budget) == (kind, checkpoint, budget)
        assert (found.model, found.context) == ("llama-3.1-8b", 77.0)
        assert found.billions == pytest.approx(target.num_parameters / 1e9)


@pytest.mark.parametrize("task", ["", "chat", "code"])
def test_an_origin_names_what_was_published(task: str) -> None:
    """Of each model and kind of draft that any rate is of, and of a model that none is of."""
    runs = [run.situation for run in beliefs.fitted_belief().coefficients.runs]
    pairs = {(at.model, at.kind) for at in runs}
    for model, kind in sorted(pairs | {("no such model", kind) for _, kind in pairs}):
        question = Question(model, kind, 8.0, task=task)
        named = set(believed._named(question))
        origin = believed._origin(question, sorted(named))
        of_kind = [at for at in runs if at.kind == kind]
        own = [at for at in of_kind if at.model == model and at.draft in named]
        is_head = of_kind[0].group in ("eagle3", "head", "block")
        if not own:
            assert origin.startswith("assumed from")
            known = {at.checkpoint if is_head else at.model for at in of_kind}
            assert str(len(known)) in origin.split()
            assert "  " not in origin
            continue
        drafts = {at.draft for at in own}
        which = f"{len(drafts)} heads of this model"
        if of_kind[0].group in ("lookup", "self", "model"):
            which = "this model"
        elif len(drafts) == 1:
            which = "this head"
        texts = list(dict.fromkeys(at.task_class for at in own))
        if task in texts:
            assert origin == f"published for {which} and such text"
            continue
        words = [text.replace("other", "text of other kinds") for text in texts[:3]]
        assert origin == f"published for {which} on {', '.join(words)}"


# Beyond what is known


@settings(max_examples=15)
@given(
    tokens=st.floats(1.2, 3.8),
    gamma=st.integers(3, 6),
    kind=st.sampled_from(["eagle3", "mtp", "ngram"]),
)
def test_a_length_is_one_line_of_logits(tokens: float, gamma: int, kind: str) -> None:
    """Through the length, with the slope that is believed of such drafts, which goes on beyond it."""
    question = Question("no such model", kind, 8.0)
    found = believed.of_length(tokens, gamma, question)
    rates = found.conditional_rates(budget=None, context=999.0, gamma_max=gamma + 6)
    of_rates = np.log(rates / (1.0 - rates))
    slope, error = believed._believed_slope(question)
    beyond = found.beyond
    assert beyond is not None
    assert beyond.position == gamma
    expected = of_rates[0] + beyond.slope * np.log(np.arange(1, gamma + 7))
    assert of_rates == pytest.approx(expected, abs=1e-6)
    assert 1.0 + np.cumprod(rates[:gamma]).sum() == pytest.approx(tokens, abs=1e-6)
    assert (beyond.slope, beyond.error) == pytest.approx((slope, error))


def test_known_positions_tell_the_slope_beyond_them_and_a_kept_rate_only_its_error() -> (
    None
):
    question = Question("no such model", "mtp", 8.0)
    counted = [0.8, 0.7, 0.65]
    profile = MeasuredProfile(
        model="m", draft_method="mtp", law=law_of_rates(counted),
        measured=[
            MeasuredRates(budget=64.0, context=999.0, rates=counted, stderr=[0.01] * 3, trials=[900.0] * 3)
        ],
    )  # fmt: skip
    beyond = believed.completed(profile, question).beyond
    assert beyond is not None
    depths = np.log(np.arange(1, 4)) - beliefs.REFERENCE_DEPTH
    variance = np.array([(0.01 / (rate * (1.0 - rate))) ** 2 for rate in counted])
    told = believed._slope(
        depths, np.array([logit(r) for r in counted]), variance, question
    )
    assert (beyond.position, beyond.slope, beyond.error) == (
        3,
        *map(pytest.approx, told),
    )
    given_one = believed.completed(constant_profile(0.8), question, num_given=2).beyond
    assert given_one is not None
    slope, error = believed._slope(
        depths[:2], np.full(2, logit(0.8)), np.zeros(2), question
    )
    assert (given_one.position, given_one.slope) == (2, 0.0)
    assert given_one.error == pytest.approx(math.hypot(slope, error))
    assert believed.completed(constant_profile(0.8), question).beyond is None


@pytest.mark.parametrize("method", ["streamingllm", "snapkv", "topk"])
def test_a_sparse_drafts_profile_has_the_beliefs_tokens_at_the_usual_budget(
    method: str,
) -> None:
    """More with a larger budget, all with the whole cache, and the belief's change at eight times the
    budget."""
    question = Question("no such model", method, 8.0, budget=512.0, context=3e4)
    found = believed.profile_of(question, draft="self", method=method)
    anchor = believed._anchor(question)

    def tokens(own: float, context: float = anchor) -> float:
        return float(found.tokens_per_step(budget=own, context=context, gamma=4)[0])

    usual = 512.0 / (1.0 + 512.0 / anchor)
    expected = 1.0 + np.cumprod(found.law.by_position[:4]).sum()
    assert tokens(usual) == pytest.approx(expected, rel=2e-3)
    assert tokens(256.0) < tokens(512.0) < tokens(1024.0) < tokens(anchor)
    assert tokens(anchor) == pytest.approx(5.0)
    assert tokens(512.0, 2.0 * anchor) < tokens(512.0)
    level, deep, _, _, large = believed._logits([question])[0].mean
    first = large + (level - deep) * 0.6
    eight = 8.0 * 512.0 / (1.0 + 8.0 * 512.0 / anchor)
    rate = found.conditional_rates(budget=eight, context=anchor, gamma_max=1)[0]
    assert logit(float(rate)) == pytest.approx(first, abs=0.01)
    usual = believed.profile_of(
        question._replace(budget=None), draft="self", method=method
    )
    assert (usual.draft, usual.draft_method, usual.dataset) == ("self", method, "")
