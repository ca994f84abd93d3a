"""Published acceptance as rows, and what the belief about acceptance takes from them.

Rows are read from a table, brought to one definition, with names made one:

    tokens per step = tokens that one verification gives, the target's own included, over all steps

Sources count differently. Rows whose source leaves the target's own token out get it back. Rows of
look-ups that count only the steps that had a draft say so (`counts_drafted`), unless the source
prints the figure over all steps too. Where only an accepted share of the drafted tokens is printed,
tokens per step are 1 + gamma * share.

`posterior` makes the coefficients that ship; `rates_left_out` and `texts_left_out` predict rows from
the others.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from evidence import DATA
from magicdec.counts import Array
from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance.belief import (
    GROUP_OF,
    MOST_LOGIT,
    OTHER_CLASS,
    YOUR_TEXT,
    Coefficients,
    Fitted,
    Observations,
    Point,
    Run,
    Scales,
    Situation,
    constant_rate_logit,
    constant_rate_tokens,
    feature_matrix,
    fitted_belief,
    fitted_from,
    lost_logits,
    maker_of,
    mean_depth,
    places,
    plain,
    plain_model,
    run_of,
    shared_matrix,
    shares_of,
    widths_of,
)
from magicdec.perfmodel.acceptance.believed import USUAL_DEPTHS, trained_as
from magicdec.perfmodel.acceptance.trained_length import LOSING_KINDS, USUAL_LENGTH

KIND_OF = {"eagle1": "eagle", "draft-model": "full"}
"""Kinds by the names that the rest of the program uses."""

ASSUMED_TREE_DEPTH = {"eagle3": 7}

LEAST_SEEN = 0.02
"""Nearest to 0 and 1 that a published rate of a position is read."""

SAME_TASK = {
    "cnn": "cnndm", "summarization": "cnndm", "specbenchsummarization": "cnndm",
    "longbenchgovreport": "govreport", "codeeditblazedit": "blazedit",
}  # fmt: skip

CODE_EDITS = ("blazedit", "edit5kchar", "canitedit", "instructcoder")
"""Tasks that change a given file; tables class them as code."""

BASELINES = (
    ("spec_bundle", ("specforge", "spec for ge"), ()), ("model-optimizer", ("modelopt",), ()),
    ("deepspec", (), ("dspark",)), ("angelspec", (), ("dfly",)), ("specextend", ("-",), ()),
    ("owl,", ("owl", "howl"), ()),
)  # fmt: skip
"""Sources that compare drafts with their own: what their own one's name holds, or its kind."""

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
ALL_STEPS = re.compile(r"all[- ]steps?[^=;]*=[^=;]*=\s*(\d+\.?\d*)", re.IGNORECASE)

ROUGH = re.compile(
    r"one prompt|one query|single|8 prompts|smoke|log window|66 drafts|midpoint|mid\)|random",
    re.IGNORECASE,
)
"""Signs that few texts, or no real ones, were counted."""

NUMBER = re.compile(r"\s*~?(\d+\.?\d*)\s*(?:-\s*(\d+\.?\d*))?\s*([kK])?")


class Rate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens per step as a source gives them."""

    situation: Situation
    gamma: int
    tokens: float
    """Tokens per step, of all steps."""
    is_gamma_assumed: bool = False
    is_from_share: bool = False
    """Whether the source prints an accepted share, and no tokens per step."""
    is_rough: bool = False
    """Few texts, no real ones, or figures quoted or computed from others."""

    @property
    def is_chain(self) -> bool:
        """Whether it is a chain of a length that the source states, as are its tokens per step."""
        return not (
            self.situation.is_tree or self.is_gamma_assumed or self.is_from_share
        )


def plain_task(name: str) -> str:
    bare = plain(re.sub(r"\(.*?\)", "", name))
    return SAME_TASK.get(bare, bare)


def is_baseline(draft: str, kind: str, source: str) -> bool:
    """Whether a source measured the draft to compare it with one of its own."""
    lower = source.lower()
    for sign, names, kinds in BASELINES:
        if sign in lower:
            named = any(name in draft.lower() for name in names)
            return not named and kind not in kinds
    return "as compared" in draft.lower()


def read_rates(path: str | Path) -> list[Rate]:
    """Reads a table of published acceptance.

    Rows without tokens per step or a rate are left out. Raises ConfigError naming the file, and the
    column it lacks.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            lacking = {"model", "draft_kind", "mean_acceptance_length"} - set(
                reader.fieldnames or ()
            )
            if lacking:
                raise ConfigError(f"{path} has no column {', '.join(sorted(lacking))}")
            rates = []
            for line in reader:
                _check_window(line, f"{path}, line {reader.line_num}")
                rates.append(_rate(line))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return [rate for rate in rates if rate is not None]


def hub_ids() -> dict[str, tuple[str, int]]:
    """Hub ids of published drafts by their plain names, with the rows of each in the tables."""
    rows: Counter[str] = Counter()
    for path in (BELIEF_RATES, FURTHER_RATES):
        rows.update(line["draft_name"] for line in read_lines(path))
    ids: dict[str, tuple[str, int]] = {}
    for name, num_rows in rows.items():
        if HUB_ID.fullmatch(name):
            first, known = ids.get(plain(name), (name, 0))
            ids[plain(name)] = (first, known + num_rows)
    return ids


def published_slopes(path: str | Path) -> dict[str, list[float]]:
    """How the logit of the conditional rate changes per ln(position), one value per checkpoint and source,
    by group of drafts: of the chains of a table whose rates are given by position."""
    slopes: dict[tuple[str, ...], list[float]] = {}
    for line in read_lines(path):
        rates = _conditional_rates(line)
        if len(rates) < 2 or (line.get("shape") or "").startswith("tree"):
            continue
        kind = KIND_OF.get(line["draft_kind"], line["draft_kind"])
        key = (
            GROUP_OF.get(kind, "self"),
            line["model"],
            line["draft_name"],
            line["source"],
        )
        logits = np.log(rates / (1.0 - rates))
        slope, _ = np.polyfit(np.log(np.arange(1, len(rates) + 1)), logits, 1)
        slopes.setdefault(key, []).append(float(slope))
    by_group: dict[str, list[float]] = {}
    for (group, *_), values in slopes.items():
        by_group.setdefault(group, []).append(float(np.mean(values)))
    return by_group


def _conditional_rates(line: Mapping[str, str]) -> Array:
    """The conditional rates of a line, inside (0, 1), from marginal or conditional ones: whichever give
    its tokens per step. Empty: the line does not give both."""
    texts = line["acceptance_by_position"].split(";")
    tokens = number(line["mean_acceptance_length"])
    stated = np.array([number(text) or 0.0 for text in texts])
    if tokens is None or not np.all(stated > 0.0):
        return np.zeros(0)
    as_conditional = 1.0 + np.cumprod(stated).sum()
    rates = stated
    if abs(1.0 + stated.sum() - tokens) <= abs(as_conditional - tokens):
        rates = stated / np.concatenate([[1.0], stated[:-1]])
    return np.asarray(np.clip(rates, LEAST_SEEN, 1.0 - LEAST_SEEN))


def read_lines(path: str | Path) -> list[dict[str, str]]:
    """The lines of a table of published acceptance."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _check_window(line: Mapping[str, str | None], where: str) -> None:
    """Refuses lengths that no head can have."""
    trained = number(line.get("trained_length") or "")
    if trained is not None and trained < 1.0:
        raise ConfigError(
            f"{where}: trained_length must be at least 1, not {trained:g}"
        )
    window = number(line.get("window") or "")
    sinks = number(line.get("sink") or "") or 0.0
    if window is not None and window <= sinks:
        raise ConfigError(
            f"{where}: window {window:g} must exceed the {sinks:g} sinks beside it"
        )


def _rate(line: Mapping[str, str | None]) -> Rate | None:
    """The rate of a line. None: the line states no usable one."""
    text = {name: value or "" for name, value in line.items() if isinstance(name, str)}
    raw_kind = text["draft_kind"].strip()
    kind = KIND_OF.get(raw_kind, raw_kind)
    group = GROUP_OF.get(kind, "self")
    is_tree = text.get("shape", "").startswith("tree")
    gamma = _gamma(text.get("gamma", ""))
    tokens = _stated_tokens(text)
    is_derived = False
    if tokens is None and gamma is not None:
        share = _share(text.get("acceptance_rate", ""))
        if share is not None:
            tokens = 1.0 + gamma * share
            is_derived = True
    if tokens is None or tokens <= 1.005:
        return None
    is_assumed = gamma is None
    if gamma is None:
        gamma = max(_assumed_gamma(group, is_tree=is_tree), int(tokens) + 1)
    if tokens > (gamma + 1) * 1.01:
        return None
    definition = text.get("definition", "")
    draft = text.get("draft_name", "")
    remarks = f"{definition} {text.get('task', '')} {draft}"
    is_rough = text.get("secondary") == "True" or bool(ROUGH.search(remarks))
    counts_drafted = group == "lookup" and _counts_drafted_steps(definition)
    return Rate(
        situation=_situation(
            text, kind, draft, is_tree=is_tree, counts_drafted=counts_drafted
        ),
        gamma=gamma,
        tokens=tokens,
        is_gamma_assumed=is_assumed,
        is_from_share=is_derived,
        is_rough=is_derived or is_rough,
    )


def _stated_tokens(text: Mapping[str, str]) -> float | None:
    """Tokens per step with the bonus token, over all steps if the definition gives these."""
    definition = text.get("definition", "")
    of_all = ALL_STEPS.search(definition)
    if of_all is not None:
        return float(of_all.group(1))
    tokens = number(text["mean_acceptance_length"])
    if tokens is not None and re.search(
        r"accepted only|bonus excluded", definition, re.I
    ):
        tokens += 1.0
    return tokens


def _counts_drafted_steps(definition: str) -> bool:
    """Whether the mean is over steps with a draft alone."""
    if ALL_STEPS.search(definition) is not None:
        return False
    return re.search("per drafted step", definition, re.I) is not None


def _assumed_gamma(group: str, *, is_tree: bool) -> int:
    usual = USUAL_DEPTHS[group]
    if is_tree:
        return ASSUMED_TREE_DEPTH.get(group, usual)
    return usual


def _situation(
    text: Mapping[str, str],
    kind: str,
    draft: str,
    *,
    is_tree: bool,
    counts_drafted: bool,
) -> Situation:
    source = text.get("source", "")
    task = plain_task(text.get("task", ""))
    task_class = text.get("task_class", "") or OTHER_CLASS
    if task in CODE_EDITS and task_class == "code":
        task_class = "code-edit"
    made = maker_of(draft, kind)
    at = Situation(
        kind=kind,
        model=plain_model(text["model"]),
        draft=plain(draft),
        maker=made,
        is_baseline=is_baseline(draft, kind, source),
        task=task,
        task_class=task_class,
        temperature=number(text.get("temperature", "")),
        context=number(text.get("context_len", "")),
        window=number(text.get("window", "")),
        has_trained_window="trained with a slid" in draft.lower(),
        trained_len=number(text.get("trained_length", "")),
        budget=number(text.get("budget", "")),
        target_billions=number(text.get("target_params_b", "")),
        is_tree=is_tree,
        is_thinking="thinking_on" in text.get("task", ""),
        counts_drafted=counts_drafted,
        source=plain(
            re.sub(r"results?/.*|results\.json|find_string id|excerpt", "", source)
        )[:60],
    )
    trained = trained_as(at)
    return msgspec.structs.replace(
        at,
        trained_len=at.trained_len or trained.length,
        rotary_base=trained.rotary_base,
    )


def number(text: str) -> float | None:
    """The number that a field begins with, the middle of a range, "2K" as 2048; None: none."""
    match = NUMBER.match(text)
    if match is None:
        return None
    low, high, thousands = match.groups()
    value = float(low)
    if high is not None:
        value = (value + float(high)) / 2.0
    if thousands:
        return value * 1024.0
    return value


def _gamma(text: str) -> int | None:
    if re.fullmatch(r"\d+(\.0*)?", text.strip()):
        return round(float(text))
    return None


def _share(text: str) -> float | None:
    value = number(text)
    if value is not None and 0.0 < value <= 1.0:
        return value
    return None


def same_rate(rate: Rate) -> tuple[object, ...]:
    """Identity of a row among others: a table that holds it twice counts it once."""
    at = rate.situation
    text = (at.task, at.temperature, at.context, at.window)
    return (at.checkpoint, *text, at.is_tree, rate.gamma, round(rate.tokens, 3))


def distinct(rates: Sequence[Rate]) -> list[Rate]:
    """The rows without repetitions."""
    return list({same_rate(rate): rate for rate in reversed(rates)}.values())[::-1]


BELIEF_RATES = DATA / "acceptance" / "rates.csv"

FURTHER_RATES = DATA / "acceptance" / "further.csv"
"""Rates that only their own checkpoints are believed from: with them in what all share, models left
out are predicted worse (results/LOG.md)."""


def point_of(rate: Rate) -> tuple[Point, float]:
    """A published rate as a point and the logit that it shows."""
    logit = constant_rate_logit(rate.tokens, rate.gamma)
    if rate.is_gamma_assumed:
        depth = 0.0
    else:
        depth = mean_depth(logit, rate.gamma)
    return Point(rate.situation, depth, rate.is_gamma_assumed), logit


SELF_ERROR = 0.08
"""Relative error of the tokens per step of rough rows of self-drafts: one prompt at one setting makes
5.2 to 6.5 of 7."""

SELF_LOGIT = 2.5
"""Logit of a usual rate of self-drafts, at which that error is carried to the logit."""

OPEN_NOISE = 0.8
"""Further noise of self-drafts that accept nearly all: the rate may lie beyond what is read."""


@cache
def self_noise(gamma: int) -> float:
    """Deviation of the logit of a rate whose tokens per step are known to SELF_ERROR. Short drafts
    hardly tell it."""
    step = 0.1
    tokens = constant_rate_tokens(SELF_LOGIT, gamma)
    more = constant_rate_tokens(SELF_LOGIT + step, gamma)
    return SELF_ERROR * tokens / ((more - tokens) / step)


UNTOLD_NOISE = 3.0
"""Noise, in logits, of heads beyond 4k whose trained length nobody says: they keep all or lose all."""


def has_untold_length(at: Situation) -> bool:
    """Whether what a head loses at this context hangs on a trained length that is not known."""
    is_whole = at.window is None and not at.has_trained_window
    is_long = (at.context or 0.0) > USUAL_LENGTH
    return at.kind in LOSING_KINDS and at.trained_len is None and is_long and is_whole


class Evidence(Observations, frozen=True, kw_only=True):
    """Published rates as observations."""

    usual_variance: Array
    """Variance of the noise before the rows' weights."""

    @classmethod
    def of(
        cls, rates: Sequence[Rate], scales: Scales, weights: Array | None = None
    ) -> Evidence:
        read = [point_of(rate) for rate in rates]
        rough = np.array([rate.is_rough for rate in rates], dtype=np.float64)
        is_untold = np.array(
            [has_untold_length(rate.situation) for rate in rates], dtype=np.float64
        )
        usual = scales.noise**2 + scales.rough**2 * rough + UNTOLD_NOISE**2 * is_untold
        for row, (rate, (_, logit)) in enumerate(zip(rates, read, strict=True)):
            if rate.situation.group == "self":
                usual[row] += self_noise(rate.gamma) ** 2 * rough[row]
                usual[row] += OPEN_NOISE**2 * (logit > MOST_LOGIT - 0.01)
        points = [point for point, _ in read]
        logits = np.array([logit for _, logit in read], dtype=np.float64)
        return cls(
            points=points,
            logits=logits - lost_logits(points),
            variance=usual if weights is None else usual / weights,
            usual_variance=usual,
        )


def prior_covariance(
    left: Sequence[Point], right: Sequence[Point], scales: Scales
) -> Array:
    """Prior covariance of the logits at two sets of points, of all features and levels."""
    shares = shares_of([*left, *right], scales)
    of_left = shares.at(slice(len(left)))
    levels = of_left.covariance(shares.at(slice(len(left), None)))
    return feature_matrix(left) @ feature_matrix(right).T + levels


def given(
    evidence: Evidence,
    groups: Sequence[str],
    name: str,
    scales: Scales,
    whole: Array | None = None,
) -> tuple[Array, Array]:
    """Mean and standard deviation of the logit of each row of a group, its noise with it, given the
    rows of all other groups: exact, all levels at once. What is left out lends no weight to its own
    levels."""
    if whole is None:
        whole = noisy_covariance(evidence, scales)
    is_out = np.array(groups) == name
    out = np.flatnonzero(is_out)
    kept = np.flatnonzero(~is_out)
    points = [evidence.points[row] for row in out]
    gain, variance = _conditioned(whole, kept, whole[np.ix_(kept, out)], points, scales)
    variance = variance + evidence.usual_variance[out]
    deviation = widths_of(points) * np.sqrt(np.maximum(variance, 1e-6))
    return gain.T @ evidence.logits[kept] + lost_logits(points), deviation


def _conditioned(
    whole: Array,
    kept: npt.NDArray[np.int64],
    cross: Array,
    points: Sequence[Point],
    scales: Scales,
) -> tuple[Array, Array]:
    """Gains and variances of logits at some points given the kept rows, of which `whole` is the noisy
    covariance and `cross` that with the points, [kept, points]."""
    gain = np.asarray(np.linalg.solve(whole[np.ix_(kept, kept)], cross), np.float64)
    unweighted = msgspec.structs.replace(scales, weights={})
    own = np.diag(prior_covariance(points, points, unweighted))
    return gain, own - np.einsum("ij,ij->j", cross, gain)


def given_all(evidence: Evidence, scales: Scales) -> tuple[Array, Array]:
    """Each row given all rows, its own with them: mean and standard deviation of their logits, noise with
    it."""
    points = evidence.points
    covariance = prior_covariance(points, points, scales)
    gain = np.linalg.solve(noisy_covariance(evidence, scales), covariance)
    known = np.einsum("ij,ij->j", covariance, gain)
    variance = covariance.diagonal() - known + evidence.usual_variance
    mean = gain.T @ evidence.logits + lost_logits(points)
    return mean, widths_of(points) * np.sqrt(np.maximum(variance, 1e-6))


def texts_left_out(
    evidence: Evidence, scales: Scales, num_asked: int
) -> tuple[Array, Array]:
    """The first rows, each asked about as a user's own text is, given those of other texts and other
    sources: mean and standard deviation of their logits, 0 of the other rows."""
    whole = noisy_covariance(evidence, scales)
    situations = [point.situation for point in evidence.points]
    texts = np.array([at.task for at in situations])
    sources = np.array([at.source for at in situations])
    mean = np.zeros(len(texts))
    deviation = np.zeros(len(texts))
    asked = range(num_asked)
    for text, source in dict.fromkeys((texts[row], sources[row]) for row in asked):
        rows = [row for row in asked if (texts[row], sources[row]) == (text, source)]
        kept = np.flatnonzero((texts != text) & (sources != source))
        points = [_of_own_text(evidence.points[row]) for row in rows]
        cross = prior_covariance([evidence.points[row] for row in kept], points, scales)
        gain, variance = _conditioned(whole, kept, cross, points, scales)
        variance = variance + evidence.usual_variance[rows]
        mean[rows] = gain.T @ evidence.logits[kept] + lost_logits(points)
        deviation[rows] = widths_of(points) * np.sqrt(np.maximum(variance, 1e-6))
    return mean, deviation


def _of_own_text(point: Point) -> Point:
    """The point as a user asks it, whose text of that class nobody has published."""
    at = point.situation
    own = msgspec.structs.replace(
        at, task=f"{YOUR_TEXT}{at.task_class}", source=YOUR_TEXT.strip()
    )
    return point._replace(situation=own)


def noisy_covariance(evidence: Evidence, scales: Scales) -> Array:
    """Covariance of the rows' logits, noise with it."""
    whole = prior_covariance(evidence.points, evidence.points, scales)
    whole[np.diag_indices_from(whole)] += evidence.variance
    return whole


def rates_left_out(
    evidence: Evidence, groups: Sequence[str], scales: Scales, *, kept: str = ""
) -> tuple[Array, Array]:
    """Each group's rows given the others': mean and standard deviation of their logits. Rows of the
    group `kept` are given to all others, and have 0 of both.
    """
    whole = noisy_covariance(evidence, scales)
    names = np.array(groups)
    mean = np.zeros(len(names))
    deviation = np.zeros(len(names))
    for name in np.unique(names[names != kept]):
        rows = names == name
        mean[rows], deviation[rows] = given(evidence, groups, str(name), scales, whole)
    return mean, deviation


def posterior(
    rates: Sequence[Rate],
    row_weights: Array,
    shared: dict[str, list[str]],
    scales: Scales,
    further: Sequence[Rate] = (),
) -> Coefficients:
    """Coefficients given rates: what checkpoints have alone is integrated out. `further` rates are
    only kept as runs of their checkpoints."""
    evidence = Evidence.of(rates, scales, row_weights)
    shares = shares_of(evidence.points, scales)
    matrix = shared_matrix(evidence.points, shares, places(shared))
    outside = {name: frozenset(keys) for name, keys in shared.items()}
    # what is left are the checkpoints' own levels, and values of the others that are not shared
    own = shares.outside(outside)
    alone = own.covariance(own)
    alone[np.diag_indices_from(alone)] += evidence.variance
    weighted = np.linalg.solve(alone, np.column_stack([matrix, evidence.logits]))
    precision = np.eye(matrix.shape[1]) + matrix.T @ weighted[:, :-1]
    covariance = np.linalg.inv(precision)
    mean = covariance @ (matrix.T @ weighted[:, -1])
    lower = covariance[np.tril_indices_from(covariance)].astype(np.float16)
    return Coefficients(
        scales=scales,
        shared=shared,
        mean=[round(value, 5) for value in mean.tolist()],
        covariance=lower.tobytes(),
        runs=[*_runs(evidence), *_runs(Evidence.of(further, scales))],
        row_weights=[round(value, 3) for value in row_weights.tolist()],
        checkpoints=hub_ids(),
        slopes=published_slopes(BELIEF_RATES),
    )


def _runs(evidence: Evidence) -> list[Run]:
    """Rows of one run as their mean, weighted by their noise."""
    members: dict[str, list[int]] = {}
    for row, point in enumerate(evidence.points):
        members.setdefault(run_of(point.situation), []).append(row)
    runs = []
    for rows in members.values():
        precision = 1.0 / evidence.variance[rows]
        total = float(precision.sum())
        depths = np.array([evidence.points[row].depth for row in rows])
        runs.append(
            Run(
                situation=evidence.points[rows[0]].situation,
                logit=round(float(precision @ evidence.logits[rows]) / total, 4),
                depth=round(float(precision @ depths) / total, 4),
                variance=round(1.0 / total, 5),
                is_gamma_assumed=evidence.points[rows[0]].is_gamma_assumed,
            )
        )
    return runs


def is_from(at: Situation, source: str) -> bool:
    """Whether a source published what a situation is of: one that names a repository by that, without the place and the
    commit in it."""
    repository = source.split(maxsplit=1)[0].split("@", maxsplit=1)[0]
    if "/" not in repository:
        return plain(source) == at.source
    return plain(repository) in at.source


@lru_cache(maxsize=2)
def fitted_without(source: str) -> Fitted:
    """The belief that would ship if a source had published nothing, by the shipped deviations: for
    judging its own servers."""
    shipped = fitted_belief()
    coefficients = shipped.coefficients
    runs = [run for run in coefficients.runs if not is_from(run.situation, source)]
    if len(runs) == len(coefficients.runs):
        return shipped
    rates = distinct(read_rates(BELIEF_RATES))
    is_kept = np.array([not is_from(rate.situation, source) for rate in rates])
    if not is_kept.all():
        coefficients = posterior(
            [rate for rate, kept in zip(rates, is_kept, strict=True) if kept],
            np.array(coefficients.row_weights)[is_kept],
            coefficients.shared,
            coefficients.scales,
        )
    return fitted_from(msgspec.structs.replace(coefficients, runs=runs))


def packed(coefficients: Coefficients) -> bytes:
    """Coefficients as they are shipped."""
    return gzip.compress(msgspec.json.encode(coefficients), mtime=0)
