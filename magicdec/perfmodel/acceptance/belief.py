"""A belief about acceptance: what published rates say of a draft that nobody has measured here.

    logit c_i = z + s · (ln i - H)          conditional rate of position i; H is that of gamma 4
    z = Σ_f β_f · x_f + Σ_l u_l[key]        features, and levels: kind, class, task, maker, model, ...
    s = ..., growth with temperature, context beyond what a head was trained on: likewise

A row with E tokens per step at gamma is read as the constant rate ρ with E = (1 - ρ^(γ+1))/(1 - ρ).
To first order logit ρ = z + s · h, where h is the mean of (ln i - H) over positions, weighted by what
each adds to E. So rows are linear in β and u, and with normal priors a belief is a normal variable.

Levels that many drafts share are fitted once (evidence/fits/acceptance_belief.py) and shipped as a
mean and a covariance. Levels of one model, checkpoint, source and run are conditioned on when a
draft is asked for, from the rows of that checkpoint: given the shared levels, checkpoints are
independent. Rows and checkpoints far from the rest count less (weights of Student's t).
"""

from __future__ import annotations

import gzip
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from magicdec.counts import Array
from magicdec.naming import METHODS
from magicdec.perfmodel.acceptance.trained_length import (
    DEAD_LOGIT,
    DEAD_TREE_LOGIT,
    LOSING_KINDS,
    USUAL_LENGTH,
    Trained,
)

GROUPS: dict[str, tuple[str, ...]] = {
    "eagle3": (),
    "head": ("eagle1", "eagle2", "hass", "medusa", "hydra", "lstm"),
    "mtp": (),
    "block": ("dflash2", "dfly", "pard"),
    "model": ("draft-model",),
    "lookup": ("prompt-lookup", "lookahead", "rest", "recycling"),
    "self": ("self-sparse", "self-quantised", "layer-skip", "longspec"),
    "mixed": ("hybrid", "other-sam+eagle2"),
}
"""Kinds of draft whose acceptance is alike, besides the methods that plans have (`naming.METHODS`)."""

GROUP_OF = {
    **{name: method.group for name, method in METHODS.items() if name != "none"},
    **{kind: group for group, kinds in GROUPS.items() for kind in kinds},
}

OTHER_CLASS = "other"

MAKERS = (
    ("specforge", "specforge"), ("spec for ge", "specforge"), ("angelslim", "angelslim"),
    ("angelspec", "angelspec"), ("redhatai", "redhat"), ("nm-testing", "redhat"),
    ("yuhuili", "eagle-authors"), ("deepseek-ai", "deepseek"), ("z-lab", "z-lab"),
    ("modelopt", "modelopt"), ("aq-medai", "aq-medai"), ("amd/", "amd"), ("lmsys/", "lmsys"),
    ("nebius", "nebius"), ("nvidia/", "nvidia"), ("swiss-ai", "swiss-ai"), ("built-in", "vendor"),
    ("native", "vendor"), ("gemma4 assistant", "vendor"),
)  # fmt: skip
"""Makers of drafts by a sign in the draft's name."""

VARIANTS = re.compile(
    r"[-_. ](instruct|chat|it|fp8|nvfp4|int4|int8|w4a16|gguf|q4_k_s|iq1_kt|autoround|mixed|2507|hf|4bit|base)\b"
)


class Situation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A draft on a text, as far as it is known: what an acceptance was measured in, or is asked of.

    An empty name is unknown.
    """

    kind: str
    model: str = ""
    draft: str = ""
    maker: str = ""
    is_baseline: bool = False
    """Whether its source compares it with a draft of its own."""
    task: str = ""
    task_class: str = ""
    temperature: float | None = None
    context: float | None = None
    window: float | None = None
    """Tokens of the draft's cache, where it is kept shorter than the context."""
    has_trained_window: bool = False
    trained_len: float | None = None
    rotary_base: float | None = None
    """That of a head's own attention."""
    budget: float | None = None
    """Cache slots that a sparse self-draft reads."""
    target_billions: float | None = None
    is_tree: bool = False
    is_thinking: bool = False
    counts_drafted: bool = False
    """Whether only steps with a draft are counted."""
    source: str = ""

    @property
    def group(self) -> str:
        return GROUP_OF.get(self.kind, "self")

    @property
    def checkpoint(self) -> str:
        return f"{self.model}|{self.kind}|{self.draft}"


def plain(name: str) -> str:
    """A name without case and punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def plain_model(name: str) -> str:
    """A target's name without its organisation, format and tuning: sources differ in those."""
    bare = re.sub(r"\(.*?\)", "", name.rsplit("/", maxsplit=1)[-1].lower())
    return plain(VARIANTS.sub("", bare)) or plain(name)


def maker_of(draft: str, kind: str) -> str:
    """Who made a draft, from its name; "" where that does not say."""
    lower = draft.lower()
    for sign, maker in MAKERS:
        if sign in lower:
            return maker
    if kind == "mtp":
        return "vendor"
    if kind.startswith("eagle") and re.fullmatch(r"eagle-?[23]?( .*)?", lower):
        return "eagle-authors"
    if GROUP_OF.get(kind) == "lookup":
        return kind
    if "/" in lower:
        return lower.split("/")[0]
    return ""


DIRECTORY = Path(__file__).resolve().parents[2] / "specs" / "data" / "belief"

COEFFICIENTS = DIRECTORY / "belief.json.gz"

REFERENCE_DEPTH = 0.6
"""H: mean of ln i over the positions of a block of four drafts, weighted by what they add."""

USUAL_TEMPERATURE = 0.3

USUAL_BILLIONS = 15.0

USUAL_CONTEXT = 1000.0

USUAL_BUDGET = 512.0

LEAST_LOGIT = -4.0

MOST_LOGIT = 4.2


class Level(NamedTuple):
    """Something that rows have in common, and what of the rate it moves."""

    name: str
    covariate: str
    """Factor of its value: "one" for the rate itself, "depth", "warmth" or "lost"."""
    key: Callable[[Situation], str]
    """Its value of a row; "" where the row does not say it: one of its own."""


def _pair(one: str, other: str) -> str:
    if one and other:
        return f"{one}|{other}"
    return ""


def _by_text(at: Situation, text: str) -> str:
    """A text's name, by what of the text the acceptance hangs on: how well a smaller model guesses
    it, how much of a cache it needs (a model that drafts for itself), or how often it repeats
    itself (look-ups)."""
    if at.group in ("self", "lookup"):
        return _pair(text, at.group)
    return text


def _class_of_text(at: Situation) -> str:
    """A text's class. None is told apart for a model that drafts for itself: nearly all that is
    published is of long documents, and maths are accepted alike."""
    if at.group == "self":
        return at.group
    return _by_text(at, at.task_class)


def _maker(at: Situation) -> str:
    """Who made a draft; one that nobody is known to have made is its own."""
    return f"{at.maker or at.source}|{at.kind}"


def run_of(at: Situation) -> str:
    """One measurement, at several gammas."""
    where = f"{at.temperature}|{at.source}|{at.context}|{at.window}|{at.is_tree}|{at.budget}"
    return f"{at.checkpoint}|{at.task}|{where}"


LEVELS = (
    Level("kind", "one", lambda at: at.kind),
    Level("class", "one", _class_of_text),
    Level("class of group", "one", lambda at: _pair(at.task_class, at.group)),
    Level("task", "one", lambda at: _by_text(at, at.task)),
    Level("task of group", "one", lambda at: _pair(at.task, at.group)),
    Level("task of maker", "one", lambda at: _pair(at.task, at.maker or at.source)),
    Level("maker", "one", _maker),
    Level("baseline", "one", lambda at: f"{at.is_baseline}|{at.kind}"),
    Level("model", "one", lambda at: at.model),
    Level("checkpoint", "one", lambda at: at.checkpoint),
    Level("task of checkpoint", "one", lambda at: _pair(at.checkpoint, at.task)),
    Level("source", "one", lambda at: _pair(at.source, at.kind)),
    Level("run", "one", run_of),
    Level("depth of checkpoint", "depth", lambda at: at.checkpoint),
    Level("depth of maker", "depth", _maker),
    Level("depth of kind", "depth", lambda at: at.kind),
    Level("depth of task", "depth", lambda at: _pair(at.task, at.group)),
    Level("warmth of maker", "warmth", _maker),
    Level("warmth of checkpoint", "warmth", lambda at: at.checkpoint),
    Level("warmth of task", "warmth", lambda at: _pair(at.task, at.group)),
    Level("lost of checkpoint", "lost", lambda at: at.checkpoint),
)

HEAVY = ("checkpoint", "maker", "task of maker")
"""Levels with heavier tails than normal: some drafts are far worse than others of their kind."""

LOCAL = (
    "model", "checkpoint", "task of checkpoint", "source", "run", "depth of checkpoint",
    "warmth of checkpoint", "lost of checkpoint",
)  # fmt: skip
"""Levels conditioned on when a draft is asked for; the others are shared by many."""

SHARED_LEVELS = tuple(level for level in LEVELS if level.name not in LOCAL)


class Point(NamedTuple):
    """Where a belief is evaluated: a situation, and the mean depth of what is counted."""

    situation: Situation
    depth: float
    """Mean of ln i - H over the positions counted; 0 where the depth is not known."""
    is_gamma_assumed: bool = False


@lru_cache(maxsize=4096)
def constant_rate_logit(tokens: float, gamma: int) -> float:
    """The logit of the constant rate with these tokens per step, inside [-4, 4.2]."""
    low = LEAST_LOGIT
    high = MOST_LOGIT
    for _ in range(40):
        middle = (low + high) / 2.0
        if constant_rate_tokens(middle, gamma) < tokens:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


def constant_rate_tokens(logit: float, gamma: int) -> float:
    """Tokens per step of a constant rate."""
    rate = 1.0 / (1.0 + math.exp(-logit))
    return sum(rate**accepted for accepted in range(gamma + 1))


def mean_depth(logit: float, gamma: int) -> float:
    """Mean of ln i - H over positions 1..gamma, each weighted by how its rate's logit moves the
    tokens per step of a constant rate."""
    rate = 1.0 / (1.0 + math.exp(-logit))
    reached = rate ** np.arange(1, gamma + 1)
    weights = reached[::-1].cumsum()[::-1]
    depths = np.log(np.arange(1, gamma + 1)) - REFERENCE_DEPTH
    return float(weights @ depths / weights.sum())


def _warmth(at: Situation) -> float:
    if at.temperature is None:
        return USUAL_TEMPERATURE
    return min(max(at.temperature, 0.0), 1.0)


def _seen_len(at: Situation) -> float:
    """Tokens that the draft attends to."""
    if at.context is None:
        context = USUAL_CONTEXT
    else:
        context = at.context
    if at.window is None:
        return context
    return min(context, at.window)


def _octaves_beyond(length: float, start: float) -> float:
    return math.log2(max(length, start) / start)


def _lost(at: Situation) -> float:
    """Share of what a head knows of a text that it loses beyond its trained length. One that was trained with
    a window never sees more."""
    if at.kind not in LOSING_KINDS or at.has_trained_window:
        return 0.0
    return Trained(at.trained_len, at.rotary_base).lost(_seen_len(at))


def _kept(point: Point) -> float:
    return 1.0 - _lost(point.situation)


def lost_logits(points: Sequence[Point]) -> Array:
    """The parts of rates' logits that no text and no head moves."""
    logits = []
    for point in points:
        at = point.situation
        dead = DEAD_TREE_LOGIT if at.is_tree else DEAD_LOGIT
        logits.append(_lost(at) * dead)
    return np.array(logits)


COVARIATES: dict[str, Callable[[Point], float]] = {
    "one": _kept,
    "depth": lambda point: point.depth * _kept(point),
    "warmth": lambda point: _warmth(point.situation) * _kept(point),
    "lost": lambda point: _lost(point.situation),
}

OF_ALL = {
    "all": 2.0, "warmth": 1.0, "temperature unknown": 0.3, "size": 0.15, "depth": 0.3, "tree": 1.0,
    "tree of unknown depth": 1.0, "chain of unknown depth": 0.5,
    "trained window": 1.0, "drafted steps": 1.5, "baseline": 0.5, "thinking": 0.4,
}  # fmt: skip
"""Features of all drafts, with the standard deviations of their priors in logits."""

OF_GROUP = {"": 1.0, "depth of ": 0.3, "warmth of ": 0.25, "size of ": 0.1}
"""Features of each group of drafts."""

OF_ONE = {
    "context of mtp": 0.2, "context of model": 0.5, "context of lookup": 0.3,
    "context of block": 0.2, "self": 2.0, "window": 0.5, "selection": 0.5,
    "budget of self": 0.3, "context of window": 0.2, "context of selection": 0.2,
}  # fmt: skip

CONTEXT_START = {
    "mtp": 4096.0, "model": 4096.0, "lookup": 500.0, "self": 4096.0, "block": USUAL_LENGTH
}  # fmt: skip
"""Tokens from which on the context moves the acceptance of a group."""

SPARSE = {
    "streamingllm": "window",
    "snapkv": "selection",
    "topk": "selection",
    "self-sparse": "selection",
}
"""Cache that a model reads where it drafts for itself over a part of it: its last tokens, which a
longer context hardly changes, or the best of all, whose share of the context counts. Copies in
narrower weights, and those that skip layers, read the whole."""

LONGEST_LOOKUP = 1024.0
"""Tokens beyond which few look-ups were counted: none is taken to find more in longer texts."""

FEATURES = {
    **OF_ALL,
    **{f"{part}{group}": sd for group in GROUPS for part, sd in OF_GROUP.items()},
    **OF_ONE,
}

PLACE = {name: number for number, name in enumerate(FEATURES)}

FULL_SHARE = 0.98
"""Share of the cache above which a budget counts as no more."""


def boundless(budget: float, context: float | None) -> float:
    """A budget b of a context S as b / (1 - b / S): a draft that reads the whole cache is its target."""
    if context is None:
        return budget
    return budget / (1.0 - min(budget / context, FULL_SHARE))


def features_of(point: Point) -> dict[str, float]:
    """The features of a point that are not 0."""
    at = point.situation
    group = at.group
    warmth = _warmth(at)
    size = math.log((at.target_billions or USUAL_BILLIONS) / USUAL_BILLIONS)
    found = {
        "all": 1.0,
        "warmth": warmth,
        "temperature unknown": float(at.temperature is None),
        "size": size,
        "depth": point.depth,
        "tree": float(at.is_tree),
        "trained window": float(at.has_trained_window),
        "drafted steps": float(at.counts_drafted),
        "baseline": float(at.is_baseline),
        "thinking": float(at.is_thinking),
        group: 1.0,
        f"depth of {group}": point.depth,
        f"warmth of {group}": warmth,
        f"size of {group}": size,
    }
    if point.is_gamma_assumed:
        if at.is_tree:
            shape = "tree"
        else:
            shape = "chain"
        found[f"{shape} of unknown depth"] = 1.0
    if group in CONTEXT_START and group != "self":
        length = _seen_len(at)
        if group == "lookup":
            length = min(length, LONGEST_LOOKUP)
        start = at.trained_len or CONTEXT_START[group]
        found[f"context of {group}"] = _octaves_beyond(length, start)
    cache = SPARSE.get(at.kind)
    if cache is not None:
        found[cache] = 1.0
        if at.budget is not None:
            slots = boundless(at.budget, at.context)
            found["budget of self"] = math.log2(slots / USUAL_BUDGET)
        if at.context is not None:
            octaves = math.log2(at.context / CONTEXT_START[group])
            found[f"context of {cache}"] = octaves
    kept = _kept(point)
    return {name: kept * value for name, value in found.items()}


WIDTH_OF_GROUP = {
    "eagle3": 1.25,
    "head": 1.25,
    "mtp": 1.25,
    "model": 1.25,
    "block": 0.85,
    "self": 1.2,
}
"""Factors on a belief's width, by which its intervals hold as much as they say of models that the
deviations were not fitted on (evidence/fits/acceptance_belief.py --folds 5: without them 81 % of
EAGLE-3's and 98 % of block drafts' rows; with 1.1 still 83 % of EAGLE-3's and 80 % of prediction
modules')."""

WIDTH_OF_UNNAMED = 0.8
"""Factor on the width where the text has no name: with a text's rows and its source's left out, 97 % of all
were inside otherwise."""

YOUR_TEXT = "yours "
"""Prefix of the name of a user's own text: no published rate is of it, and all drafts that are
asked about share it."""


def width_of(point: Point) -> float:
    """Factor on the standard deviation of a belief."""
    width = WIDTH_OF_GROUP.get(point.situation.group, 1.0)
    task = point.situation.task
    is_named = bool(task) and not task.startswith(YOUR_TEXT)
    return width if is_named else width * WIDTH_OF_UNNAMED


def widths_of(points: Sequence[Point]) -> Array:
    return np.array([width_of(point) for point in points])


class Scales(msgspec.Struct, frozen=True, kw_only=True):
    """Standard deviations, in logits, and the weights of what lies far from the rest."""

    levels: dict[str, float]
    noise: float
    rough: float
    """Further noise of rows counted on few texts."""
    weights: dict[str, dict[str, float]] = {}
    """Weight of each value of a heavy level; 1 where it is not named."""


class Observations(msgspec.Struct, frozen=True, kw_only=True):
    """Points with the logits that were seen there, less what nothing moves (`lost_logits`), and the variance
    of each one's noise."""

    points: list[Point]
    logits: Array
    variance: Array


def feature_matrix(points: Sequence[Point]) -> Array:
    """Features in units of their priors' standard deviations: [points, features]."""
    matrix = np.zeros((len(points), len(FEATURES)))
    for row, point in enumerate(points):
        for name, value in features_of(point).items():
            matrix[row, PLACE[name]] = FEATURES[name] * value
    return matrix


def level_keys(situations: Iterable[Situation], level: Level) -> list[str]:
    """A level's value in each situation; what is not said is the run's own."""
    return [level.key(at) or f"\0{run_of(at)}" for at in situations]


class Shares(NamedTuple):
    """Parts of some points in each level: those of one value have it in common, each times its own
    factor."""

    names: list[list[str]]
    """Each level's values."""
    values: npt.NDArray[np.int64]
    """Their numbers at the points: [levels, points]."""
    factors: Array
    """[levels, points]."""

    def at(self, chosen: slice) -> Shares:
        return Shares(self.names, self.values[:, chosen], self.factors[:, chosen])

    def outside(self, shared: Mapping[str, frozenset[str]]) -> Shares:
        """The shares in other values than these of each level."""
        factors = self.factors.copy()
        for place, level in enumerate(LEVELS):
            taken = shared.get(level.name, frozenset())
            is_taken = np.array([name in taken for name in self.names[place]])
            factors[place, is_taken[self.values[place]]] = 0.0
        return Shares(self.names, self.values, factors)

    def covariance(self, others: Shares) -> Array:
        """Prior covariance of the logits at these points with those at others."""
        total = np.zeros((self.values.shape[1], others.values.shape[1]))
        for own, factor, other, by in zip(*self[1:], *others[1:], strict=True):
            if not factor.any():
                continue  # all values of the level are shared ones
            total += (own[:, None] == other) * np.outer(factor, by)
        return total


def shares_of(points: Sequence[Point], scales: Scales) -> Shares:
    """The shares of points in the values of all levels."""
    names = []
    values: npt.NDArray[np.int64] = np.zeros((len(LEVELS), len(points)), dtype=np.int64)
    factors = np.zeros((len(LEVELS), len(points)))
    covariates = {
        name: np.array([value(point) for point in points])
        for name, value in COVARIATES.items()
    }
    # several points are of one situation, and a level's value is the situation's
    situations = {id(point.situation): point.situation for point in points}
    number_of = {key: number for number, key in enumerate(situations)}
    situation_at = np.array([number_of[id(point.situation)] for point in points])
    for place, level in enumerate(LEVELS):
        keys = level_keys(situations.values(), level)
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        names.append(list(numbers))
        values[place] = np.array([numbers[key] for key in keys])[situation_at]
        weights = scales.weights.get(level.name, {})
        sd = np.array([weights.get(key, 1.0) ** -0.5 for key in numbers])
        sd *= scales.levels[level.name]
        factors[place] = sd[values[place]] * covariates[level.covariate]
    return Shares(names, values, factors)


class Normal(NamedTuple):
    """Means and covariance of some logits."""

    mean: Array
    covariance: Array

    @property
    def deviation(self) -> Array:
        return np.sqrt(np.maximum(np.diag(self.covariance), 0.0))


class Run(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measurement: the mean over the gammas that it counted."""

    situation: Situation
    logit: float
    depth: float
    variance: float
    """Variance of the mean's noise."""
    is_gamma_assumed: bool = False

    @property
    def point(self) -> Point:
        return Point(self.situation, self.depth, self.is_gamma_assumed)


class Coefficients(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted belief: levels that many drafts share, and the runs of each checkpoint."""

    scales: Scales
    shared: dict[str, list[str]]
    """Values of the levels that several checkpoints share."""
    mean: list[float]
    """Means of features and shared values, in units of their priors' standard deviations."""
    covariance: bytes
    """Its lower triangle, rows after one another, as 16-bit floats."""
    runs: list[Run]
    row_weights: list[float]
    """Weight of each row of the table that it was fitted to."""
    checkpoints: dict[str, tuple[str, int]]
    """Hub ids of published drafts by their plain names, with the rows of each in the tables."""
    slopes: dict[str, list[float]]
    """Change of the conditional rate's logit per ln(position), one for each checkpoint and source whose
    rates are given by position, by group of drafts."""


class Fitted(msgspec.Struct, frozen=True, kw_only=True, dict=True, eq=False):
    """Coefficients as arrays. One object is one belief, so that questions with it can be cached."""

    coefficients: Coefficients
    mean: Array
    covariance: Array
    place: Mapping[tuple[str, str], int]
    """Number of a level's value among what is shared."""
    outside: Mapping[str, frozenset[str]]
    """Values of each level that are shared, which no checkpoint has alone."""

    @property
    def scales(self) -> Scales:
        return self.coefficients.scales

    @cached_property
    def situations(self) -> list[Situation]:
        """Situations that acceptance was published in."""
        return [run.situation for run in self.coefficients.runs]

    @cached_property
    def runs_by_model(self) -> dict[str, list[Run]]:
        """Published runs by the target's plain name."""
        by_model: dict[str, list[Run]] = {}
        for run in self.coefficients.runs:
            by_model.setdefault(run.situation.model, []).append(run)
        return by_model

    def runs_at(self, points: Sequence[Point]) -> Observations:
        """The published runs of the checkpoints that some points are about."""
        models = dict.fromkeys(point.situation.model for point in points)
        wanted = {point.situation.checkpoint for point in points}
        runs = [
            run
            for model in models
            for run in self.runs_by_model.get(model, ())
            if run.situation.checkpoint in wanted
        ]
        return Observations(
            points=[run.point for run in runs],
            logits=np.array([run.logit for run in runs]),
            variance=np.array([run.variance for run in runs]),
        )


def places(shared: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], int]:
    values = [(name, key) for name, keys in shared.items() for key in keys]
    return {value: len(FEATURES) + number for number, value in enumerate(values)}


def shared_matrix(
    points: Sequence[Point], shares: Shares, place: Mapping[tuple[str, str], int]
) -> Array:
    """Shares of each point in the features and the shared values: [points, shared]."""
    matrix = np.zeros((len(points), len(FEATURES) + len(place)))
    matrix[:, : len(FEATURES)] = feature_matrix(points)
    for number, level in enumerate(LEVELS):
        columns = [place.get((level.name, name), -1) for name in shares.names[number]]
        column_at = np.array(columns)[shares.values[number]]
        rows = np.flatnonzero(column_at >= 0)
        matrix[rows, column_at[rows]] = shares.factors[number, rows]
    return matrix


def fitted_from(coefficients: Coefficients) -> Fitted:
    size = len(coefficients.mean)
    covariance = np.zeros((size, size))
    is_lower = np.tri(size, dtype=bool)
    covariance[is_lower] = np.frombuffer(coefficients.covariance, dtype=np.float16)
    covariance.T[is_lower] = covariance[is_lower]
    return Fitted(
        coefficients=coefficients,
        mean=np.array(coefficients.mean),
        covariance=covariance,
        place=places(coefficients.shared),
        outside={name: frozenset(keys) for name, keys in coefficients.shared.items()},
    )


@lru_cache(maxsize=1)
def fitted_belief() -> Fitted:
    """The shipped coefficients."""
    text = gzip.decompress(COEFFICIENTS.read_bytes())
    return fitted_from(msgspec.json.decode(text, type=Coefficients))


def believed(points: Sequence[Point], of: Fitted | None = None) -> Normal:
    """The belief at some points, all together: given the shared levels and the published runs of the
    points' checkpoints."""
    if of is None:
        of = fitted_belief()
    known = of.runs_at(points)
    together = [*known.points, *points]
    shares = shares_of(together, of.scales)
    matrix = shared_matrix(together, shares, of.place)
    mean = matrix @ of.mean
    own = shares.outside(of.outside)
    alone = own.covariance(own)
    if known.points:
        matrix, mean, alone = _given_known(known, matrix, mean, alone)
    mean = mean + lost_logits(points)
    widths = widths_of(points)
    used = np.flatnonzero(matrix.any(axis=0))
    in_use = matrix[:, used]
    shared = in_use @ of.covariance[np.ix_(used, used)] @ in_use.T
    return Normal(mean, (shared + alone) * np.outer(widths, widths))


def _given_known(
    known: Observations, matrix: Array, mean: Array, alone: Array
) -> tuple[Array, Array, Array]:
    """Shares of points in the shared levels, their means, and what is left of their own covariance,
    once the rows of their checkpoints are known: those are the first of all arrays."""
    rows = slice(len(known.points))
    others = slice(len(known.points), None)
    within = alone[rows, rows] + np.diag(known.variance)
    across = alone[rows, others]
    gain = np.linalg.solve(within, across).T
    return (
        matrix[others] - gain @ matrix[rows],
        mean[others] + gain @ (known.logits - mean[rows]),
        alone[others, others] - gain @ across,
    )
