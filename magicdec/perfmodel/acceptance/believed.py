"""Acceptance that nobody has measured here: the belief about it, as a profile that plans price.

A profile takes the belief's mean by position, its growth with the context, and as its error the
belief's width for a text, a run and a harness not seen so far.

One draft may serve a mixture of texts, such as chat and code, by shares s_k of the generated
tokens. A sequence of a text that accepts less takes more steps for its tokens, so a share of s_k /
E_k of the sequences in a batch decodes text k, where E_k is its tokens per step. For such a batch

    P(draft 1..i accepted) = Σ w_k · Π_{j <= i} c_kj,    w_k = (s_k / E_k) / Σ_l s_l / E_l

and the tokens per step are 1 / Σ s_k / E_k: the time of a token is the texts' mean. Beliefs about
one draft on two texts are largely one belief, so their errors add up by their correlation.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from magicdec.counts import Array, expected_tokens_per_step
from magicdec.naming import METHODS
from magicdec.perfmodel.acceptance import belief
from magicdec.perfmodel.acceptance.belief import (
    OTHER_CLASS,
    REFERENCE_DEPTH,
    USUAL_BUDGET,
    YOUR_TEXT,
    Point,
    Situation,
    maker_of,
    plain,
    plain_model,
)
from magicdec.perfmodel.acceptance.files import PROFILES_DIRECTORY
from magicdec.perfmodel.acceptance.law import (
    LARGEST,
    MAX_POSITIONS,
    Beyond,
    Law,
    LawError,
    from_logit,
    log_deviation,
    logit,
)
from magicdec.perfmodel.acceptance.profile import (
    AcceptanceProfile,
    BelievedProfile,
    RateProfile,
    constant_profile,
)
from magicdec.perfmodel.acceptance.trained_length import LOSING_KINDS, Trained
from magicdec.specs.heads import KnownHead, published_heads
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import SPARSE_METHODS, draft_model_name
from magicdec.tasks import TASKS, shares_of
from magicdec.units import GIGA, format_count

MOST_TOKENS_FILE = PROFILES_DIRECTORY / "most_tokens.csv"
"""The most tokens per step of evidence/data/acceptance by kind of draft and gamma, of chains whose
source states both."""

ENOUGH_GAMMAS = 5
"""Gammas at which a kind of draft was measured from which its highest number is a ceiling."""

P = TypeVar("P", bound=AcceptanceProfile)

POSITIONS = 16
"""Positions that the belief gives rates of; later ones are as the last."""

DEPTH_STEP = 1.0
"""Difference in depth over which the trend by position is read."""

DEPTH_SHARE = 0.45
"""Share of the trend's error that a profile's error by depth takes: it counts from position 1, the
belief from the usual depth, in whose place the tokens per step of gamma 10 err as much."""

DEEPEST = {
    "eagle3": 7, "head": 5, "mtp": 5, "block": 15, "model": 8, "lookup": 10, "self": 8, "mixed": 8
}  # fmt: skip
"""Deepest gamma that several sources count, by group of drafts."""

USUAL_DEPTHS = {
    "eagle3": 3, "head": 5, "mtp": 3, "block": 7, "model": 8, "lookup": 10, "self": 4, "mixed": 8
}  # fmt: skip
"""Gamma of a chain whose source does not say it, by group of drafts."""


FAR = 8.0
"""Times the anchor at which the growth with the context is read; a head's is read at the context in
question, or at twice its anchor."""

OTHER_FORMAT_DEVIATION = 0.3
"""Standard deviation of the logit of a draft in narrower weights than were measured."""

HEAD_GROUPS = ("eagle3", "head", "block")

LEAST_RATE = 0.02

MOST_RATE = 0.985

MOST_CLASSES = 3
"""Classes of text that the source of a belief names."""

KIND_NAMES = {
    "self-quantised": "quantised copies",
    **{name: method.plural or method.text for name, method in METHODS.items()},
}
"""Drafts of a kind in text."""


class Question(NamedTuple):
    """A draft on a target and a text, whose acceptance a plan needs."""

    model: str
    kind: str
    billions: float
    draft: str = ""
    """Published checkpoint, or model that drafts; "" is any."""
    task: str = ""
    """Class of the text; "" is any."""
    temperature: float | None = None
    context: float = 1024.0
    budget: float | None = None
    trained: Trained = Trained()
    """How the head was trained, where its own configuration says it."""
    window: float | None = None
    is_other_format: bool = False
    published: belief.Fitted | None = None
    """The belief that answers; None: the shipped one."""

    @property
    def is_sparse_self(self) -> bool:
        """Whether the model drafts for itself over a part of its cache."""
        return self.kind in belief.SPARSE

    @property
    def fitted(self) -> belief.Fitted:
        return self.published or belief.fitted_belief()

    @classmethod
    def about(
        cls,
        target: ModelSpec,
        draft: str,
        method: str,
        *,
        checkpoint: str = "",
        **conditions: Any,
    ) -> Question:
        """The question about a draft by the names that plans call it and its method by."""
        budget: float | None = None
        if method in SPARSE_METHODS:
            budget = belief.USUAL_BUDGET
            if draft_model_name(draft) is not None:
                conditions["window"] = budget
        return cls(
            model=target.name,
            kind=kind_of(draft, method),
            billions=target.num_parameters / GIGA,
            draft=draft_model_name(draft) or checkpoint,
            budget=budget,
            **conditions,
        )


def kind_of(draft: str, method: str) -> str:
    """The kind of draft, in published rates, that plans call by these names."""
    if method == "full" and draft_model_name(draft) is None:
        return "self-quantised"
    if draft_model_name(draft) is not None:
        return "full"
    return method


class Assumed(NamedTuple):
    """A belief about a question, as a law by position and context."""

    law: Law
    error: LawError
    origin: str
    """Where it comes from, in few words."""
    checkpoint: str
    """Hub id of the published checkpoint with the most rows, of those that it is about; "" where
    none has an id."""


def known_checkpoints(
    model: str, kind: str, of: belief.Fitted | None = None
) -> list[str]:
    """Published drafts of a kind for a target, by their plain names: those that nobody measured as
    the baseline of a draft of his own, where there are some."""
    published = [at for at in _published_for(model, of) if at.kind == kind]
    own = [at for at in published if not at.is_baseline]
    return list(dict.fromkeys(at.draft for at in own or published))


def checkpoint_in(text: str, question: Question) -> str:
    """The published draft of a question's target that a text names, by its plain name; "" where it names
    none."""
    words = plain(text)
    every = known_checkpoints(question.model, question.kind, question.fitted)
    known = [name for name in every if name]
    named = [name for name in known if name in words or (words and words in name)]
    return max(named, key=len, default="")


@cache
def _assumed_from(kind: str) -> str:
    """The source of a belief about a draft that nobody measured on its target."""
    of_kind = [at for at in belief.fitted_belief().situations if at.kind == kind]
    name = KIND_NAMES.get(kind, kind)
    if Situation(kind=kind).group in HEAD_GROUPS:
        num_heads = len({at.checkpoint for at in of_kind})
        return f"assumed from {format_count(num_heads, f'published {name} head')}"
    num_models = len({at.model for at in of_kind})
    return f"assumed from {name} measured on {format_count(num_models, 'model')}"


def _most_measured(drafts: list[str]) -> str:
    """Hub id of the draft with the most published rows; "" where none has an id."""
    ids = belief.fitted_belief().coefficients.checkpoints
    known = [ids[draft] for draft in drafts if draft in ids]
    if not known:
        return ""
    name, _ = max(known, key=lambda item: item[1])
    return name


def measured_checkpoint(question: Question) -> str:
    """Hub id of the published draft that a belief is about, the one with the most rows of several;
    "" where none has an id."""
    return _most_measured(_named(question))


def kinds_of(model: str) -> list[str]:
    """Kinds of draft that are published for a target."""
    return list(dict.fromkeys(at.kind for at in _published_for(model)))


def _published_for(model: str, of: belief.Fitted | None = None) -> list[Situation]:
    """Situations that acceptance of a target's drafts was published in."""
    runs = (of or belief.fitted_belief()).runs_by_model.get(plain_model(model), ())
    return [run.situation for run in runs]


def assumed(question: Question) -> Assumed:
    """The belief about a question."""
    in_any_format = question._replace(is_other_format=False)
    named, mean, covariance = _published_logits(in_any_format)
    # the law is given where its rates are asked for: a head's beyond its trained length
    level, deep, other = (0, 1, 2)
    if _is_beyond(question):
        level, deep, other = (2, 3, 0)
    trend = (mean[deep] - mean[level]) / DEPTH_STEP
    depths = np.log(np.arange(1, POSITIONS + 1)) - REFERENCE_DEPTH
    rates = np.clip(_logistic(mean[level] + trend * depths), LEAST_RATE, MOST_RATE)
    law = _law(question, rates, trend, mean[other])
    of_budget = 0.0
    if question.is_sparse_self:
        law = _with_budgets(law, trend, mean[LARGE_BUDGET])
        of_budget = _variance_between(covariance, level, LARGE_BUDGET)
    variance = covariance[level, level] + (
        OTHER_FORMAT_DEVIATION**2 if question.is_other_format else 0.0
    )
    of_growth = _variance_between(covariance, level, other)
    of_trend = _variance_between(covariance, level, deep)
    factor = float(log_deviation(_logistic(mean[level])))
    return Assumed(
        law=law,
        error=LawError(
            log_rejection=factor * math.sqrt(variance),
            context_exponent=factor * math.sqrt(of_growth) / _log_far(question)
            if law.context_exponent > 0.0
            else 0.0,
            budget_exponent=factor * math.sqrt(of_budget) / math.log(FAR),
            depth=DEPTH_SHARE * factor * math.sqrt(of_trend) / DEPTH_STEP,
        ),
        origin=_origin(question, named),
        checkpoint=_most_measured(named),
    )


def _variance_between(covariance: Array, one: int, other: int) -> float:
    """Variance of the difference of two of the logits."""
    both = (
        covariance[one, one] + covariance[other, other] - 2.0 * covariance[one, other]
    )
    return max(float(both), 0.0)


class AskedText(NamedTuple):
    """A text that acceptance was counted on, or that it is asked about."""

    name: str
    task_class: str
    source: str


class Logits(NamedTuple):
    """The belief about a question's logits, those of `_points`."""

    named: list[str]
    mean: Array
    covariance: Array


def _published_logits(question: Question) -> Logits:
    if question.task in TEXTS:
        return _of_texts(question._replace(task=""))[question.task]
    return _logits([question])[0]


TEXTS = ("", *TASKS)


@lru_cache(maxsize=512)
def _of_texts(question: Question) -> dict[str, Logits]:
    """The beliefs about a question on each class of text, and on any."""
    asked = [question._replace(task=task) for task in TEXTS]
    return dict(zip(TEXTS, _logits(asked), strict=True))


def _logits(questions: Sequence[Question]) -> list[Logits]:
    """The beliefs about one draft on several texts. All together cost little more than one; each is
    what it would be alone. A draft over a part of the cache is expected to do as was published of it,
    and is as little known as on another text of that class."""
    heads = _possible_heads(questions[0])
    yours = []
    shown = []
    sizes = []
    for question in questions:
        num_asked = 0
        for head in heads:
            for text in _published_texts(question, head.draft) or [
                _your_text(question)
            ]:
                own = _your_text(question._replace(task=text.task_class))
                yours += _points(question, head, own)
                shown += _points(question, head, text)
                num_asked += 1
        sizes.append(num_asked)
    normal = belief.believed(yours, questions[0].fitted)
    mean = normal.mean
    if shown != yours:
        mean = belief.believed(shown, questions[0].fitted).mean
    logits = []
    num_points = len(yours) // sum(sizes)
    end = 0
    for size in sizes:
        own_points = slice(end, end + size * num_points)
        end = own_points.stop
        mixed = _mixed(
            mean[own_points], normal.covariance[own_points, own_points], size
        )
        logits.append(Logits(_named(questions[0]), *mixed))
    return logits


def _your_text(question: Question) -> AskedText:
    return AskedText(f"{YOUR_TEXT}{question.task}", question.task, YOUR_TEXT.strip())


def _published_texts(question: Question, draft: str) -> list[AskedText]:
    """The texts of the question's class, or of any where it names none, on which exactly this draft over
    a part of the cache was counted on this model. Other drafts are counted on many texts: theirs are
    told by the levels of the belief."""
    if question.budget is None:
        return []
    texts = []
    for at in _published_of(question, [draft]):
        if question.task in ("", at.task_class):
            texts.append(AskedText(at.task, at.task_class, at.source))
    return list(dict.fromkeys(texts))


def joint_levels(questions: Sequence[Question]) -> tuple[Array, Array]:
    """Means and covariance of the logits of several questions' rates at the usual depth, together:
    drafts that are asked about on one text and model have much in common."""
    points: list[Point] = []
    shares = []
    for number, question in enumerate(questions):
        known = _possible_heads(question)
        own = _your_text(question)
        points += [_points(question, head, own)[0] for head in known]
        shares += [(number, 1.0 / len(known))] * len(known)
    normal = belief.believed(points, questions[0].fitted)
    mixing = np.zeros((len(questions), len(points)))
    for place, (number, share) in enumerate(shares):
        mixing[number, place] = share
    mean = mixing @ normal.mean
    covariance = mixing @ normal.covariance @ mixing.T
    owner = np.array([number for number, _ in shares])
    between = mixing @ (normal.covariance.diagonal() + (normal.mean - mean[owner]) ** 2)
    covariance[np.diag_indices_from(covariance)] = between
    return mean, covariance


def _named(question: Question) -> list[str]:
    """Plain names of the drafts that a question may be about; [""] where none is published."""
    known = known_checkpoints(question.model, question.kind, question.fitted)
    if question.draft:
        wanted = plain(question.draft)
        return [
            name for name in known if wanted in name or (name and name in wanted)
        ] or [wanted]
    return known or [""]


class PossibleHead(NamedTuple):
    """A draft that a question may be about, by its plain name, and how it may have been trained."""

    draft: str
    trained: Trained


def _possible_heads(question: Question) -> list[PossibleHead]:
    """The drafts that a question may be about, as likely each."""
    heads = []
    is_head = question.kind in LOSING_KINDS
    for draft in _named(question):
        trained = _trained_of(question, draft)
        if is_head and question.context > trained.shortest:
            heads += [PossibleHead(draft, each) for each in trained.possible]
        else:
            heads.append(PossibleHead(draft, trained))
    return heads


def _trained_of(question: Question, draft: str) -> Trained:
    """How a draft was trained: within the bound of its own configuration, or by its recipe."""
    known = trained_as(
        Situation(
            kind=question.kind,
            model=plain_model(question.model),
            draft=draft,
            maker=_maker_of(question, draft),
        )
    )
    stated = _stated_lengths(question.fitted).get((question.kind, draft))
    own = question.trained
    return Trained(
        own.length or known.length or stated, own.rotary_base or known.rotary_base
    )


@lru_cache(maxsize=4)
def _stated_lengths(of: belief.Fitted) -> dict[tuple[str, str], float]:
    """Trained lengths that sources of rates state, by kind and plain name of a head."""
    return {
        (at.kind, at.draft): at.trained_len
        for at in of.situations
        if at.trained_len is not None
    }


AUTHORS = {"eagle-authors": "yuhuili/"}
"""Organisation of makers whose heads sources call by the method's name alone."""


@cache
def _heads_by_name() -> dict[str, KnownHead]:
    """The table's heads by their plain names, and those of a method's authors by model and kind."""
    by_name = {}
    for head in published_heads():
        by_name[plain(head.checkpoint)] = head
        for maker, organisation in AUTHORS.items():
            if head.checkpoint.startswith(organisation):
                by_name[f"{plain_model(head.target)}|{head.method}|{maker}"] = head
    return by_name


def trained_as(at: Situation) -> Trained:
    """How a draft's head was trained, as the table of heads has it."""
    heads = _heads_by_name()
    head = heads.get(at.draft) or heads.get(f"{at.model}|{at.kind}|{at.maker}")
    if head is None:
        return Trained()
    return Trained(head.trained_len, head.rotary_base)


LARGE_BUDGET = 4
"""Place of the large budget among the points of a draft over a part of the cache."""


def _points(question: Question, head: PossibleHead, text: AskedText) -> list[Point]:
    """The usual depth and a larger one at the law's anchor, and at a far context; of a draft over a part
    of the cache also FAR times the budget at the anchor."""
    draft = head.draft
    at = Situation(
        kind=question.kind,
        model=plain_model(question.model),
        draft=draft,
        maker=_maker_of(question, draft),
        task=text.name,
        source=text.source,
        task_class=text.task_class,
        temperature=question.temperature,
        context=_anchor(question),
        window=question.window,
        trained_len=head.trained.length,
        rotary_base=head.trained.rotary_base,
        target_billions=question.billions,
    )
    far = msgspec.structs.replace(at, context=_far(question))
    if question.is_sparse_self:
        large = _with_slots(at, USUAL_BUDGET * FAR)
        at = _with_slots(at, USUAL_BUDGET)
        far = _with_slots(far, USUAL_BUDGET)
        return [*_at_depths(at), *_at_depths(far), Point(large, 0.0)]
    return [*_at_depths(at), *_at_depths(far)]


def _at_depths(at: Situation) -> list[Point]:
    return [Point(at, 0.0), Point(at, DEPTH_STEP)]


def _with_slots(at: Situation, slots: float) -> Situation:
    """The situation with the budget that counts as these slots of an endless context
    (`belief.boundless`)."""
    assert at.context is not None
    return msgspec.structs.replace(at, budget=slots / (1.0 + slots / at.context))


def _maker_of(question: Question, draft: str) -> str:
    """Who made a draft: as published, else as its name and kind tell."""
    known = _makers().get((draft, question.kind)) if draft else None
    return maker_of(draft, question.kind) if known is None else known


@cache
def _makers() -> dict[tuple[str, str], str]:
    """Who made each published draft, by its name and kind."""
    makers: dict[tuple[str, str], str] = {}
    for at in belief.fitted_belief().situations:
        makers.setdefault((at.draft, at.kind), at.maker)
    return makers


def _anchor(question: Question) -> float:
    """The context whose rates a law is anchored at, so that a plan at any context has one law: the
    longest that acceptance does not hang on. Look-ups have none."""
    group = Situation(kind=question.kind).group
    named = _named(question)
    if question.kind in LOSING_KINDS:
        return min(_trained_of(question, draft).shortest for draft in named)
    if group == "lookup":
        return question.context
    start = belief.CONTEXT_START.get(group, 4096.0)
    if group == "block":
        return min(_trained_of(question, draft).length or start for draft in named)
    return start


def _far(question: Question) -> float:
    """The context at which the growth beyond the anchor is read."""
    anchor = _anchor(question)
    if question.kind in LOSING_KINDS:
        return max(question.context, 2.0 * anchor)
    return FAR * anchor


def _log_far(question: Question) -> float:
    return math.log(_far(question) / _anchor(question))


def _mixed(mean: Array, covariance: Array, num_drafts: int) -> tuple[Array, Array]:
    """Mean and covariance of the logits of one of several drafts that are as likely."""
    each = mean.reshape(num_drafts, -1)
    size = each.shape[1]
    blocks = covariance.reshape(num_drafts, size, num_drafts, size)
    own = np.stack([blocks[n, :, n] for n in range(num_drafts)])
    middle = each.mean(axis=0)
    between = (each - middle).T @ (each - middle) / num_drafts
    return middle, own.mean(axis=0) + between


def _is_beyond(question: Question) -> bool:
    """Whether a question is about a head beyond the length that it was trained on."""
    is_head = question.kind in LOSING_KINDS
    return is_head and question.context > _anchor(question)


def _law(question: Question, rates: Array, trend: float, other: float) -> Law:
    """The law with these rates by position at its anchor, or at the question's context where a head is
    beyond it, and the logit `other` of the usual depth at the other of the two."""
    other_rate = float(
        np.clip(_logistic(other - trend * REFERENCE_DEPTH), LEAST_RATE, MOST_RATE)
    )
    group = Situation(kind=question.kind).group
    start = _anchor(question)
    if group == "lookup" or question.is_sparse_self:
        start = 0.0
    growth = math.log((1.0 - other_rate) / (1.0 - float(rates[0])))
    reference = _anchor(question)
    if _is_beyond(question):
        growth = -growth
        reference = _far(question)
    return Law(
        rejection=1.0 - float(rates[0]),
        by_position=[round(float(rate), 5) for rate in rates],
        context_exponent=min(max(growth / _log_far(question), 0.0), 2.0)
        if group != "lookup"
        else 0.0,
        reference_context=reference,
        flat_below=start,
        flat_beyond=LARGEST if question.window is None else max(question.window, start),
    )


def _with_budgets(law: Law, trend: float, large: float) -> Law:
    """The law of a draft over a part of the cache: the logit `large` of the usual depth is that at FAR
    times the budget."""
    rate = float(
        np.clip(_logistic(large - trend * REFERENCE_DEPTH), LEAST_RATE, MOST_RATE)
    )
    exponent = max(math.log(law.rejection / (1.0 - rate)) / math.log(FAR), 0.0)
    return msgspec.structs.replace(
        law,
        budget_exponent=exponent,
        fill_exponent=exponent,
        reference_budget=USUAL_BUDGET,
    )


def _logistic(logit: Array | float) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-np.asarray(logit))))


def _origin(question: Question, named: Sequence[str]) -> str:
    """The source of a belief, in few words."""
    own = _published_of(question, named)
    if not own:
        return _assumed_from(question.kind)
    if question.budget is not None:
        return _origin_over_part(question, own)
    drafts = {at.draft for at in own}
    if Situation(kind=question.kind).group in ("lookup", "self", "model"):
        which = "this model"
    elif len(drafts) == 1:
        which = "this head"
    else:
        which = f"{len(drafts)} heads of this model"
    on_task = question.task and any(at.task_class == question.task for at in own)
    if on_task:
        return f"published for {which} and such text"
    classes = list(dict.fromkeys(_text_of(at) for at in own))
    return f"published for {which} on {', '.join(classes[:MOST_CLASSES])}"


TEXT_NAMES = {"pg19": "PG-19", "longbenchv2": "LongBench v2", "aime25": "AIME'25"}
"""Texts by their plain names, of drafts over a part of the cache."""


def _origin_over_part(question: Question, own: Sequence[Situation]) -> str:
    """The source of what is known of a draft over a part of the cache, with the budgets and the texts
    that were counted."""
    draft = question.draft
    if question.is_sparse_self:
        draft = METHODS[question.kind].text
    budgets = sorted({round(at.budget) for at in own if at.budget is not None})
    if budgets:
        draft += f" at {budgets[0]}"
        if len(budgets) > 1:
            draft += f" to {budgets[-1]}"
    texts = dict.fromkeys(TEXT_NAMES.get(at.task, at.task) for at in own)
    return f"published for this model and {draft} on {', '.join(texts)}"


def _text_of(at: Situation) -> str:
    """A class of text in words."""
    if at.task_class == OTHER_CLASS:
        return "text of other kinds"
    return at.task_class


def _published_of(question: Question, named: Sequence[str]) -> list[Situation]:
    """The published situations of the question's model and draft."""
    own = []
    for at in _published_for(question.model, question.fitted):
        if at.kind == question.kind and at.draft in named:
            own.append(at)
    return own


USUAL_GAMMA = 4

YOURS = "measured (yours)"

MOST_LEVEL = 30.0
"""Largest logit of a first rate that is looked for."""

ENOUGH_SLOPES = 10
"""Checkpoints whose slopes are taken as those of a group."""

MEDIAN_TO_DEVIATION = 1.4826
"""Standard deviation of a normal variable over its median absolute deviation."""

OFF_THE_LINE = 0.1
"""Standard deviation of a position's logit from a line over ln(position)."""


@lru_cache(maxsize=1024)
def profile_of(question: Question, *, draft: str, method: str) -> BelievedProfile:
    """The belief about a question as a profile of the draft that plans call `draft`."""
    found = assumed(question)
    return BelievedProfile(
        model=question.model,
        draft=draft,
        draft_method=method,
        checkpoint=found.checkpoint,
        dataset=question.task,
        definition="belief from published rates",
        source=found.origin,
        law=found.law,
        error=found.error,
        measured_gamma=DEEPEST[Situation(kind=question.kind).group],
    )


def completed(profile: P, question: Question, *, num_given: int = 0) -> P:
    """A user's profile with what the belief says of the positions that it does not know, given those
    that it does. `num_given` positions of given rates are known, and the last rate is taken to hold
    for all further ones.

    A measurement is of the user's own text, so that the task that a plan asks about changes nothing.
    """
    known = profile.known_rates(context=question.context, num_given=num_given)
    if known is None:
        return profile
    position = len(known.rates)
    slope, error = _slope(
        _depths(position), logit(known.rates), known.variance, question
    )
    if known.is_last_kept:
        # what the belief says of deeper positions is then only how far that may be wrong
        beyond = Beyond(position=position, error=math.hypot(slope, error))
    else:
        beyond = Beyond(position=position, slope=slope, error=error)
    return msgspec.structs.replace(profile, beyond=beyond)


def usual_depth(draft: str, method: str) -> int:
    """The gamma of a draft whose source does not say it: the block that such heads are trained for, else
    the usual one of its group."""
    kind = METHODS.get(kind_of(draft, method), METHODS["full"])
    return kind.head_most_drafts or USUAL_DEPTHS[kind.group]


@cache
def most_tokens(kind: str) -> dict[int, float]:
    """The most tokens per step that anybody published of a kind of draft, by gamma."""
    with MOST_TOKENS_FILE.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == kind]
    return {int(row["gamma"]): float(row["tokens_per_step"]) for row in rows}


def held(profile: P, rate: float, kind: str, gamma: int) -> P:
    """The profile of one given rate without gammas, beyond the one in use, at which it would make more
    tokens per step than anybody measured of such a draft; of a kind that was measured at few gammas as
    it is."""
    measured = most_tokens(kind)
    if len(measured) < ENOUGH_GAMMAS:
        return profile
    depths = np.arange(1, MAX_POSITIONS + 1)
    tokens = expected_tokens_per_step(np.full(MAX_POSITIONS, rate), depths)
    deepest = max(int((tokens <= max(measured.values())).sum()), gamma, 1)
    if deepest >= MAX_POSITIONS:
        return profile
    return msgspec.structs.replace(profile, told_gammas=(deepest,))


def told_gammas(kind: str, gamma: int, rates: Array) -> tuple[int, ...]:
    """The gammas of which one number, tokens per step at `gamma`, tells something: itself, and deeper
    ones at which `rates` by position, which go on beyond it, make no more tokens per step than
    somebody measured of such a draft at that gamma.

    A number near its ceiling leaves the rates beyond nearly free, so of none of those.
    """
    told = [gamma]
    for deeper, most in most_tokens(kind).items():
        if deeper > gamma and expected_tokens_per_step(rates, deeper) <= most:
            told.append(deeper)
    return tuple(sorted(told))


def of_length(tokens: float, gamma: int, question: Question) -> RateProfile:
    """The profile of a draft that makes this many tokens per step at one gamma: rates that fall or
    rise by position as is believed of the draft, and give that length."""
    ends = {1.0: 0.0, gamma + 1.0: 1.0}
    if tokens in ends:
        flat = constant_profile(ends[tokens])
        whole = completed(flat, question, num_given=gamma)
        return msgspec.structs.replace(whole, told_gammas=(gamma,))
    constant = belief.constant_rate_logit(tokens, gamma)
    depth = belief.mean_depth(constant, gamma)
    slope, error = _slope(
        np.array([depth]), np.array([constant]), np.zeros(1), question
    )
    log_positions = np.log(np.arange(1, gamma + 1))

    def rates_at(level: float) -> Array:
        return from_logit(level + slope * log_positions)

    low = -MOST_LEVEL
    high = MOST_LEVEL
    for _ in range(60):
        middle = (low + high) / 2.0
        if float(expected_tokens_per_step(rates_at(middle), gamma)) < tokens:
            low = middle
        else:
            high = middle
    level = (low + high) / 2.0
    deep = from_logit(level + slope * np.log(np.arange(1, MAX_POSITIONS + 1)))
    return msgspec.structs.replace(
        constant_profile(rates_at(level).tolist()),
        beyond=Beyond(position=gamma, slope=slope, error=error),
        told_gammas=told_gammas(question.kind, gamma, deep),
    )


def _slope(
    depths: Array, logits: Array, variance: Array, question: Question
) -> tuple[float, float]:
    """The change of the rate's logit per ln(position), and its deviation, of a draft whose rates at
    some depths have these logits, with this variance: as published of such drafts, and as the rates
    themselves tell where there are several."""
    slope, error = _believed_slope(question)
    weights = 1.0 / (variance + OFF_THE_LINE**2)
    seen = np.clip(logits, belief.LEAST_LOGIT, belief.MOST_LOGIT)
    away = depths - np.average(depths, weights=weights)
    told = float(weights @ away**2)
    precision = 1.0 / error**2 + told
    mean = (slope / error**2 + float(weights @ (away * seen))) / precision
    return mean, 1.0 / math.sqrt(precision)


def _believed_slope(question: Question) -> tuple[float, float]:
    """The slope of a network's rates as its median and spread over published checkpoints whose rates
    were counted by position, of all networks where too few of its kind were; of look-ups and self-drafts
    as the belief has it."""
    group = Situation(kind=question.kind).group
    if group in ("lookup", "self"):
        _, mean, covariance = _published_logits(question._replace(task=""))
        change = (mean[1] - mean[0]) / DEPTH_STEP
        return float(change), math.sqrt(
            _variance_between(covariance, 0, 1)
        ) / DEPTH_STEP
    by_group = belief.fitted_belief().coefficients.slopes
    slopes = by_group.get(group, [])
    if len(slopes) < ENOUGH_SLOPES:
        slopes = []
        for name, values in by_group.items():
            if name not in ("lookup", "self"):
                slopes += values
    middle = float(np.median(slopes))
    return middle, MEDIAN_TO_DEVIATION * float(
        np.median(np.abs(np.array(slopes) - middle))
    )


def _depths(num_positions: int) -> Array:
    return np.asarray(np.log(np.arange(1, num_positions + 1)) - REFERENCE_DEPTH)


def yours(profile: AcceptanceProfile, question: Question) -> AcceptanceProfile:
    """A profile that a user gives, completed and named so."""
    return msgspec.structs.replace(
        completed(profile, question),
        source=f"{YOURS}, {profile.source}",
        dataset=profile.dataset or "your text",
    )


def profile_on(question: Question, *, draft: str, method: str) -> BelievedProfile:
    """The belief about a question whose text may be a mixture ("chat=70,code=30")."""
    shares = shares_of(question.task) if question.task else {}
    if len(shares) < 2:
        return profile_of(question, draft=draft, method=method)
    questions = [question._replace(task=task) for task in shares]
    profiles = [profile_of(each, draft=draft, method=method) for each in questions]
    rates = []
    for profile in profiles:
        rates.append(
            profile.law.conditional_rates(
                budget=question.budget,
                context=question.context,
                gamma_max=POSITIONS,
            )
        )
    weights, tokens = _weights_of_texts(np.array(list(shares.values())), rates)
    mixed = _rates_of_mixture(weights, rates)
    gains = weights * (tokens - 1.0)
    correlation = _correlation_of_texts(questions)
    error = _error_of_mixture(
        [each.error for each in profiles], gains / gains.sum(), correlation
    )
    lead = profiles[int(np.argmax(list(shares.values())))]
    # at the question's context, from where the law goes on as the lead's does
    budget = question.budget or USUAL_BUDGET
    law = lead.at_rate(float(mixed[0]), budget=budget, context=question.context).law
    if law.by_position:
        by_position = [round(float(rate), 5) for rate in mixed]
        law = msgspec.structs.replace(law, by_position=by_position)
    return msgspec.structs.replace(
        lead,
        law=law,
        error=error,
        dataset=question.task,
        source=f"{lead.source} (mixture by shares of tokens)",
    )


def _weights_of_texts(shares: Array, rates: list[Array]) -> tuple[Array, Array]:
    """Shares of the sequences in a batch by text, and the tokens per step of each."""
    tokens = np.array(
        [float(expected_tokens_per_step(each, USUAL_GAMMA)) for each in rates]
    )
    slots = shares / tokens
    return slots / slots.sum(), tokens


def _rates_of_mixture(weights: Array, rates: list[Array]) -> Array:
    """Conditional rates of a batch with these shares of sequences."""
    survivors = weights @ np.cumprod(np.stack(rates), axis=-1)
    before = np.concatenate([[1.0], survivors[:-1]])
    mixed: Array = survivors / np.maximum(before, 1e-12)
    return mixed


def _correlation_of_texts(questions: list[Question]) -> Array:
    """Correlation of what is believed of the texts."""
    _, covariance = joint_levels(questions)
    deviation = np.sqrt(covariance.diagonal())
    correlation: Array = covariance / np.outer(deviation, deviation)
    return correlation


def _error_of_mixture(
    errors: list[LawError], parts: Array, correlation: Array
) -> LawError:
    """The mixture's error, of texts with these parts of the accepted drafts."""
    combined = {}
    for name in LawError.__struct_fields__:
        each = parts * np.array([getattr(error, name) for error in errors])
        combined[name] = float(np.sqrt(max(each @ correlation @ each, 0.0)))
    return LawError(**combined)
