"""Predictions compared with measurements: one pair, one pairing key, one set of error statistics.

error        predicted / measured − 1 of one term at one configuration (a point); all statistics but
             the bias are of its absolute value
mape         mean error
median, p90  over the points, with linear interpolation between order statistics (numpy's default);
             the autoregressive step counts once per point, since each point has such runs of its own
bias         median of the signed errors
normalised   error left after scaling each predicted time to the machine's speed during the
             measurement: t · (1 + share · (r − 1) + (1 − share) · (c − 1)), with r and c the time of
             the memory and of the arithmetic reference kernel over its time at calibration, and share
             the part of t that follows memory speed
noise floor  median error that a perfect prediction would show: half the difference between the
             medians of the even and of the odd repetitions
coverage     share of measurements inside their predicted 90 % interval
regret       1 − S(planned) / S(best) per case (batch, context, temperature); the best is picked on
             one half of the repetitions and both are scored on the other, both ways round, so that
             noise does not make a lucky configuration look best; smaller than Z_90 standard errors
             over the cases, it is noise
drift        how far the reference kernels' times during a run lie from those that its prediction was
             made at; a run in which half of the points drifted further than its limit is invalid
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self

import msgspec
import numpy as np

from magicdec.counts import Z_90
from magicdec.errors import ConfigError
from magicdec.naming import describe
from magicdec.schema.record import CONFIGURATION_FIELDS, SPREAD_FIELDS, Record
from magicdec.units import INTERVAL_ENDS

TERMS = {
    "autoregressive_step_s": "autoregressive step",
    "draft_step_s": "draft step",
    "verify_step_s": "verification",
    "step_s": "speculative step",
    "expected_tokens_per_step": "tokens per step",
    "speedup": "speedup",
}
"""Compared terms and their names, each apart, so a wrong prediction shows which term is wrong."""
SAMPLES = {
    "autoregressive_step_s": "autoregressive_step_samples_s",
    "step_s": "step_samples_s",
    "speedup": "speedup_samples",
}
"""Where a measured record keeps each repetition of a term."""
MAY_DIFFER = {
    "kind",
    "hardware",
    "engine",
    "device",
    "dtype",
    "gen_len",
    "top_k",
    "top_p",
    "seed",
    "prompts",
    "weights",
    "gamma_table",
    "num_prompts",
}
"""Where, on which prompts and for how long it ran: a prediction and its measurement may differ in
these.
"""
PAIRING_FIELDS = tuple(name for name in CONFIGURATION_FIELDS if name not in MAY_DIFFER)
CONDITION_FIELDS = (
    "simulated_acceptance",
    "context_spread",
    "stop_at_eos",
    "run_to_end",
    "cuda_graphs",
    "inputs_digest",
)
"""Conditions of a run that a prediction may leave out (None), as a plan's candidates do; it then
holds for any.
"""
DRAFT_FIELDS = {
    "draft",
    "draft_method",
    "draft_budget",
    "gamma",
    "draft_weight_dtype",
    "adaptive",
}
CASE_FIELDS = (
    "model",
    "tp_size",
    *SPREAD_FIELDS,
    "batch_size",
    "context_len",
    "temperature",
)
"""Fields that a user is given; draft, budget and gamma are what the plan chooses."""
NUM_RESAMPLES = 2000
LOWEST_ERROR = -0.999
"""Error at and below which a prediction counts as next to nothing."""
AUTOREGRESSIVE_CHOICE = "autoregressive"


def setting_key(record: Record) -> tuple[Any, ...]:
    """The setting that a measured and a predicted record of one configuration share, apart from the
    run's conditions.

    Autoregressive records have no draft, whatever their draft fields say; a draft on all ranks is
    the same with and without its number of ranks.
    """
    key = {}
    for name in PAIRING_FIELDS:
        if name not in CONDITION_FIELDS:
            key[name] = getattr(record, name)
    key["draft_tp_size"] = record.draft_tp_size or record.tp_size
    if not record.is_speculative:
        key |= dict.fromkeys([*DRAFT_FIELDS, "draft_tp_size"])
    return tuple(key.values())


def run_conditions(record: Record) -> tuple[Any, ...]:
    """The values of CONDITION_FIELDS, None where the record leaves one out or decodes without a
    draft.
    """
    simulated = None
    if record.is_speculative:
        simulated = tuple(record.simulated_acceptance or ()) or None
    return simulated, *(getattr(record, name) for name in CONDITION_FIELDS[1:])


def pairing_key(record: Record) -> tuple[Any, ...]:
    """Setting and conditions: equal for two records of one configuration that state the same."""
    return *setting_key(record), *run_conditions(record)


def is_paired(one: Record, other: Record) -> bool:
    """Whether two records share a configuration; a condition that either leaves out matches any."""
    if setting_key(one) != setting_key(other):
        return False
    for stated, also in zip(run_conditions(one), run_conditions(other), strict=True):
        if stated is not None and also is not None and stated != also:
            return False
    return True


def speed_scale(
    predicted: Record,
    term: str,
    *,
    reference_s: float | None,
    compute_reference_s: float | None,
) -> float | None:
    """How much longer a predicted time is on a machine whose reference kernels take so long
    ("normalised", top of the file); None where a share or the memory's time is not known."""
    share = (predicted.memory_shares or {}).get(term)
    memory = _relative(reference_s, predicted.reference_s)
    compute = _relative(compute_reference_s, predicted.compute_reference_s)
    if share is None or memory is None:
        return None
    return 1.0 + share * memory + (1.0 - share) * (compute or 0.0)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A configuration's prediction and measurement."""

    predicted: Record
    measured: Record

    def error(self, term: str) -> float | None:
        """Relative error of a term; None where one side does not have it."""
        return _relative(getattr(self.predicted, term), getattr(self.measured, term))

    def normalised_error(self, term: str) -> float | None:
        """The error at the machine's speed during the measurement; None where that is not known, or
        for what is not a time."""
        return _relative(self.normalised(term), getattr(self.measured, term))

    def normalised(self, term: str) -> float | None:
        """The prediction for the machine's speed during the measurement; None where that is not
        known.
        """
        scale = self._scale(term)
        if term == "speedup":
            scale = None
            alone = self._scale("autoregressive_step_s")
            drafted = self._scale("step_s")
            if alone and drafted:
                scale = alone / drafted
        predicted = getattr(self.predicted, term)
        if scale is None or predicted is None:
            return None
        return float(predicted) * scale

    def _scale(self, term: str) -> float | None:
        return speed_scale(
            self.predicted,
            term,
            reference_s=self.measured.reference_s,
            compute_reference_s=self.measured.compute_reference_s,
        )

    def repeat_noise(self, term: str) -> float | None:
        """The error that the repetitions alone leave in the measured term; None with fewer than two
        of them.
        """
        samples: list[float] | None = None
        if term in SAMPLES:
            samples = getattr(self.measured, SAMPLES[term])
        if samples is None or len(samples) < 2:
            return None
        even = statistics.median(samples[::2])
        odd = statistics.median(samples[1::2])
        return abs(even / odd - 1.0) / 2.0

    @property
    def spread(self) -> float | None:
        """(highest − lowest) / median of the measured speedup's repetitions; None with fewer than
        two of them.
        """
        samples = self.measured.speedup_samples or []
        if len(samples) > 1:
            return (max(samples) - min(samples)) / statistics.median(samples)
        return None

    @property
    def drift(self) -> float | None:
        """How far the reference kernels moved between the prediction and the runs, as the larger of
        both changes, either way; None where they are not known."""
        moved = []
        for name in ("reference_s", "compute_reference_s"):
            change = _relative(
                getattr(self.measured, name), getattr(self.predicted, name)
            )
            if change is not None:
                moved.append(abs(math.log1p(change)))
        return math.expm1(max(moved)) if moved else None

    @property
    def prompt_noise(self) -> float | None:
        """Relative standard error of the measured tokens per step over the sampled prompts."""
        error = self.measured.tokens_per_step_stderr
        mean = self.measured.expected_tokens_per_step
        if error is None or not mean:
            return None
        return error / mean

    @property
    def measured_interval(self) -> tuple[float, float] | None:
        """90 % interval of the measured speedup's median, from its interleaved pairs of runs."""
        samples = self.measured.speedup_samples or []
        if len(samples) > 1:
            return bootstrap_interval(samples)
        return None

    @property
    def is_covered(self) -> bool | None:
        low = self.predicted.speedup_low
        high = self.predicted.speedup_high
        measured = self.measured.speedup
        if low is None or high is None or measured is None:
            return None
        return low <= measured <= high

    def to_row(self) -> dict[str, Any]:
        """All terms of the pair as plain data."""
        record = self.measured
        row: dict[str, Any] = {name: getattr(record, name) for name in PAIRING_FIELDS}
        for term in TERMS:
            row[f"predicted_{term}"] = getattr(self.predicted, term)
            row[f"measured_{term}"] = getattr(record, term)
            row[f"error_{term}"] = self.error(term)
            if term != "expected_tokens_per_step":
                row[f"normalised_error_{term}"] = self.normalised_error(term)
        low, high = self.measured_interval or (None, None)
        row["speedup_low"] = self.predicted.speedup_low
        row["speedup_high"] = self.predicted.speedup_high
        row["measured_speedup_low"] = low
        row["measured_speedup_high"] = high
        row["noise"] = self.repeat_noise("speedup")
        row["prompt_noise"] = self.prompt_noise
        row["is_covered"] = self.is_covered
        return row


def _relative(predicted: float | None, measured: float | None) -> float | None:
    if predicted is None or not measured:
        return None
    return float(predicted / measured - 1.0)


def bootstrap_interval(samples: Sequence[float]) -> tuple[float, float]:
    """90 % percentile interval of the median. Few samples give at most their own range."""
    random = np.random.default_rng(0)
    size = (NUM_RESAMPLES, len(samples))
    chosen = random.integers(0, len(samples), size=size)
    medians = np.median(np.asarray(samples)[chosen], axis=1)
    low, high = np.quantile(medians, INTERVAL_ENDS)
    return float(low), float(high)


def latest_measured(records: Iterable[Record]) -> list[Record]:
    """A configuration that was measured again replaces its earlier record."""
    measured_by_key = {}
    for record in records:
        if record.source == "measured":
            measured_by_key[record.key] = record
    return list(measured_by_key.values())


def latest_predicted(records: Iterable[Record]) -> dict[tuple[Any, ...], Record]:
    """By device and pairing key: of several predictions the calibrated one, else the last."""
    predicted = [record for record in records if record.source != "measured"]
    ordered = sorted(predicted, key=lambda record: record.source == "calibrated")
    return {(record.hardware, *pairing_key(record)): record for record in ordered}


def pair_records(records: Iterable[Record]) -> list[Pair]:
    """Every speculative configuration that was both predicted and measured, in the order of the
    measurements.

    A prediction pairs if each condition that it states is the measurement's. Of several, the one
    that states the most is taken, then a calibrated one, then one of the measurement's device.
    """
    records = list(records)
    by_setting: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for predicted in latest_predicted(records).values():
        by_setting[setting_key(predicted)].append(predicted)
    pairs = []
    for measured in latest_measured(records):
        if not measured.is_speculative:
            continue
        able = []
        for predicted in by_setting.get(setting_key(measured), ()):
            if _states_nothing_else(predicted, measured):
                able.append(predicted)
        if able:
            best = max(able, key=partial(_preference, measured))
            pairs.append(Pair(predicted=best, measured=measured))
    return pairs


def _states_nothing_else(predicted: Record, measured: Record) -> bool:
    """Whether each condition that a prediction states is the measurement's."""
    for own, other in zip(
        run_conditions(predicted), run_conditions(measured), strict=True
    ):
        if own is not None and own != other:
            return False
    return True


def _preference(measured: Record, predicted: Record) -> tuple[int, bool, bool]:
    """Order of predictions of a measurement: by conditions stated, calibration, and device."""
    stated = [
        condition for condition in run_conditions(predicted) if condition is not None
    ]
    is_here = predicted.hardware in (measured.hardware, measured.device)
    return len(stated), predicted.source == "calibrated", is_here


def by_cpu_time(record: Record) -> Record:
    """A measurement with its process CPU times where comparisons look for the wall clock's.

    Raises ConfigError for one without.
    """
    seconds = record.breakdown_cpu_s
    if record.source != "measured":
        return record
    if seconds is None or not record.step_cpu_s:
        raise ConfigError(
            f"record {record.key} has no process CPU times; leave --clock cpu out"
        )
    is_fixed = record.is_speculative and not record.adaptive
    samples = record.speedup_cpu_samples or []
    accept_step_s = None
    verify_step_s = None
    if record.is_speculative:
        accept_step_s = seconds["sample"]
        verify_step_s = seconds["verify"]
    draft_step_s = None
    if is_fixed:
        draft_step_s = seconds["draft"] / record.gamma
    return msgspec.structs.replace(
        record,
        autoregressive_step_s=record.autoregressive_step_cpu_s,
        step_s=record.step_cpu_s,
        draft_step_s=draft_step_s,
        verify_step_s=verify_step_s,
        accept_step_s=accept_step_s,
        autoregressive_step_samples_s=None,
        step_samples_s=None,
        speedup=record.speedup_cpu,
        speedup_low=min(samples, default=None),
        speedup_high=max(samples, default=None),
        speedup_samples=record.speedup_cpu_samples,
    )


@dataclass(frozen=True, kw_only=True)
class ErrorSummary:
    """The errors of one figure over some points. Definitions: top of the file."""

    points: int
    mape: float
    median_error: float
    p90_error: float
    max_error: float
    bias: float
    coverage: float | None = None

    @classmethod
    def of(cls, signed: Any, deviation: Any = None) -> Self:
        """From relative errors, at least one, and the standard deviations that were predicted of
        their logarithms.
        """
        errors = np.abs(signed)
        inside = None
        if deviation is not None:
            log_errors = np.log1p(np.maximum(signed, LOWEST_ERROR))
            is_inside = np.abs(log_errors) <= Z_90 * deviation
            inside = float(np.mean(is_inside))
        return cls(
            points=len(errors),
            mape=float(np.mean(errors)),
            median_error=float(np.median(errors)),
            p90_error=float(np.quantile(errors, 0.9)),
            max_error=float(errors.max()),
            bias=float(np.median(signed)),
            coverage=inside,
        )

    def figures(self) -> dict[str, Any]:
        """A group's row in the documents of `validate`."""
        figures = {
            "rows": self.points,
            "mape": self.mape,
            "bias": self.bias,
            "p90": self.p90_error,
        }
        if self.coverage is None:
            return figures
        return {**figures, "coverage": self.coverage}


@dataclass(frozen=True, kw_only=True)
class TermSummary(ErrorSummary):
    """The errors of one term over the points that have it; None is not known."""

    normalised_median_error: float | None = None
    normalised_p90_error: float | None = None
    noise_floor: float | None = None


def summarise(term: str, pairs: Iterable[Pair]) -> TermSummary | None:
    """None where no pair has the term on both sides."""
    pairs = list(pairs)
    signed = _known(pair.error(term) for pair in pairs)
    if not signed:
        return None
    normalised = np.abs(_known(pair.normalised_error(term) for pair in pairs))
    normalised_median_error = None
    normalised_p90_error = None
    if normalised.size:
        normalised_median_error = float(np.median(normalised))
        normalised_p90_error = float(np.quantile(normalised, 0.9))
    return replace(
        TermSummary.of(signed),
        normalised_median_error=normalised_median_error,
        normalised_p90_error=normalised_p90_error,
        noise_floor=_median(pair.repeat_noise(term) for pair in pairs),
    )


@dataclass(frozen=True, kw_only=True)
class CaseErrors:
    """One (batch, context, temperature): the errors of its speedups, and what following the plan
    loses there. None is not known."""

    batch_size: int
    context_len: int
    temperature: float
    points: int
    median_error: float | None
    p90_error: float | None
    planned: str | None = None
    best: str | None = None
    regret: float | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All pairs of a set of records, and their statistics."""

    pairs: Sequence[Pair]

    @property
    def summaries(self) -> dict[str, TermSummary]:
        """By term."""
        summaries = {}
        for term in TERMS:
            summary = summarise(term, self.pairs)
            if summary is not None:
                summaries[term] = summary
        return summaries

    @property
    def covered(self) -> tuple[int, int]:
        """How many measured speedups lie in their predicted interval, and how many predictions have
        one.
        """
        covered = _known(pair.is_covered for pair in self.pairs)
        return sum(covered), len(covered)

    @property
    def coverage(self) -> float | None:
        inside, total = self.covered
        if total:
            return inside / total
        return None

    @property
    def noise(self) -> float | None:
        """Median over the points of what the repetitions of one speedup differ by."""
        return _median(pair.spread for pair in self.pairs)

    @property
    def prompt_noise(self) -> float | None:
        """Median over the points of the relative standard error of the measured tokens per step."""
        return _median(pair.prompt_noise for pair in self.pairs)

    @property
    def memory_bytes_per_s(self) -> tuple[float, float] | None:
        """Lowest and highest memory bandwidth found during the measurements."""
        found = _known(pair.measured.memory_bytes_per_s for pair in self.pairs)
        if found:
            return (min(found), max(found))
        return None

    @property
    def cases(self) -> list[CaseErrors]:
        by_case: dict[tuple[Any, ...], list[Pair]] = defaultdict(list)
        for pair in self.pairs:
            by_case[tuple(getattr(pair.measured, name) for name in CASE_FIELDS)].append(
                pair
            )
        return list(map(summarise_case, by_case.values()))

    @property
    def regret(self) -> float | None:
        """Mean over the cases of what following the plan loses compared with the measured best."""
        regrets = _known(case.regret for case in self.cases)
        if regrets:
            return statistics.fmean(regrets)
        return None

    @property
    def regret_error(self) -> float | None:
        """Standard error of the regret, over the cases; None with fewer than two of them."""
        regrets: list[float] = _known(case.regret for case in self.cases)
        if len(regrets) < 2:
            return None
        return float(statistics.stdev(regrets) / math.sqrt(len(regrets)))

    @property
    def drift(self) -> float | None:
        """Median over the points of how far the references moved after the prediction."""
        return _median(pair.drift for pair in self.pairs)

    def to_document(self) -> dict[str, Any]:
        """Rows and statistics as plain data."""
        return {
            "rows": [pair.to_row() for pair in self.pairs],
            "summary": {
                term: asdict(summary) for term, summary in self.summaries.items()
            },
            "coverage": self.coverage,
            "noise": self.noise,
            "prompt_noise": self.prompt_noise,
            "memory_bytes_per_s": self.memory_bytes_per_s,
            "regret": self.regret,
            "regret_error": self.regret_error,
            "drift": self.drift,
            "cases": [asdict(case) for case in self.cases],
        }


def _known(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def _median(values: Iterable[float | None]) -> float | None:
    known: list[float] = _known(values)
    if known:
        return statistics.median(known)
    return None


def summarise_case(pairs: Sequence[Pair]) -> CaseErrors:
    """The statistics of one case. Autoregressive decoding, with a speedup of 1, is among the
    choices; the regret is None where some configuration has fewer than two repetitions to split."""
    summary = summarise("speedup", pairs)
    first = pairs[0].measured
    case = CaseErrors(
        batch_size=first.batch_size,
        context_len=first.context_len,
        temperature=first.temperature,
        points=len(pairs),
        median_error=None,
        p90_error=None,
    )
    if summary is not None:
        case = replace(
            case, median_error=summary.median_error, p90_error=summary.p90_error
        )
    samples = [pair.measured.speedup_samples or [] for pair in pairs]
    if min(map(len, samples)) < 2:
        return case
    names = [AUTOREGRESSIVE_CHOICE, *(describe(pair.measured) for pair in pairs)]
    predicted = [1.0, *(pair.predicted.speedup or 0.0 for pair in pairs)]
    planned = int(np.argmax(predicted))
    best = int(np.argmax(_median_speedups(samples)))
    even = _median_speedups([sample[0::2] for sample in samples])
    odd = _median_speedups([sample[1::2] for sample in samples])
    losses = (_loss(planned, even, odd), _loss(planned, odd, even))
    return replace(
        case,
        planned=names[planned],
        best=names[best],
        regret=statistics.fmean(losses),
    )


def _median_speedups(samples: Sequence[Sequence[float]]) -> list[float]:
    """Median speedup of each choice; the first is autoregressive decoding."""
    return [1.0, *map(statistics.median, samples)]


def _loss(planned: int, pick: Sequence[float], score: Sequence[float]) -> float:
    """Share of the speedup that the planned choice loses to the best one. One half of the samples
    picks the best, the other half scores both."""
    best = int(np.argmax(pick))
    return 1.0 - score[planned] / score[best]
