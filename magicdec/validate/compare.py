"""Predicted against measured, term by term, so that a wrong prediction shows which term is wrong.

error        predicted / measured − 1
normalised   the same, with every predicted time scaled to the machine's speed beside the measurement:
             t · (1 + share · (r − 1) + (1 − share) · (c − 1)), r and c = the times of the reference kernels, of memory
             and of arithmetic, then / at calibration, share = the part of t that follows the memory's speed (predicted
             with it); what is left is not the machine's drift
noise floor  the median error that a perfect prediction would show: half the difference between the medians of the
             even and of the odd repetitions
coverage     share of measured speedups inside the predicted interval
regret       1 − S(planned) / S(best), where the best is picked on one half of the repetitions and both are scored on
             the other half, so that noise does not make a lucky configuration look best; both ways round
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from magicdec.records import Record

TIMES = ("autoregressive_step_s", "draft_step_s", "verify_step_s", "step_s")
TERMS = (*TIMES, "expected_tokens_per_step", "speedup")
SAMPLES = {
    "autoregressive_step_s": "autoregressive_step_samples_s", "step_s": "step_samples_s", "speedup": "speedup_samples",
}  # fmt: skip
"""Where a measured record keeps each repetition of a term."""
PAIRING = (
    "model",
    "draft",
    "draft_method",
    "draft_budget",
    "draft_weight_dtype",
    "gamma",
    "tp_size",
    "batch_size",
    "context_len",
    "temperature",
)
CASE = ("model", "tp_size", "batch_size", "context_len", "temperature")
"""What a user is given; draft, budget and gamma are what the plan chooses."""
NUM_RESAMPLES = 2000


def pairing_key(record: Record) -> tuple[Any, ...]:
    """What a measured and a predicted row of one configuration have in common."""
    return tuple(getattr(record, name) for name in PAIRING)


@dataclass(frozen=True)
class Pair:
    """A configuration with both its rows."""

    predicted: Record
    measured: Record

    def error(self, term: str) -> float | None:
        """Relative error of a term; None where one side does not have it."""
        return _relative(getattr(self.predicted, term), getattr(self.measured, term))

    def normalised_error(self, term: str) -> float | None:
        """The error that is left at the machine's speed beside the measurement; None where that is not known, and for
        what is not a time."""
        return _relative(self.normalised(term), getattr(self.measured, term))

    def normalised(self, term: str) -> float | None:
        """What is predicted for the machine's speed beside the measurement; None where that is not known."""
        if term == "speedup":
            scales = self._scale("autoregressive_step_s"), self._scale("step_s")
            scale = scales[0] / scales[1] if scales[0] and scales[1] else None
        else:
            scale = self._scale(term)
        predicted = getattr(self.predicted, term)
        return None if scale is None or predicted is None else float(predicted) * scale

    def _scale(self, term: str) -> float | None:
        share = (self.predicted.memory_shares or {}).get(term)
        memory = _relative(self.measured.reference_s, self.predicted.reference_s)
        compute = _relative(self.measured.compute_reference_s, self.predicted.compute_reference_s)
        if share is None or memory is None:
            return None
        return 1.0 + share * memory + (1.0 - share) * (compute or 0.0)

    def repeat_noise(self, term: str) -> float | None:
        """The error that the repetitions alone leave in the measured term; None without two of them."""
        samples: list[float] | None = getattr(self.measured, SAMPLES[term]) if term in SAMPLES else None
        if samples is None or len(samples) < 2:
            return None
        return abs(statistics.median(samples[::2]) / statistics.median(samples[1::2]) - 1.0) / 2.0

    @property
    def prompt_noise(self) -> float | None:
        """Relative standard error of the measured tokens per step: a batch is a sample of prompts."""
        error, mean = self.measured.tokens_per_step_stderr, self.measured.expected_tokens_per_step
        return error / mean if error is not None and mean else None

    @property
    def measured_interval(self) -> tuple[float, float] | None:
        """90 % interval of the measured speedup's median, from its interleaved pairs."""
        samples = self.measured.speedup_samples or []
        return bootstrap_interval(samples) if len(samples) > 1 else None

    @property
    def is_covered(self) -> bool | None:
        low, high, measured = self.predicted.speedup_low, self.predicted.speedup_high, self.measured.speedup
        if low is None or high is None or measured is None:
            return None
        return low <= measured <= high


def _relative(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or not measured else float(predicted / measured - 1.0)


def bootstrap_interval(samples: Sequence[float]) -> tuple[float, float]:
    """90 % percentile interval of the median. Few samples give at most their own range."""
    chosen = np.random.default_rng(0).integers(0, len(samples), size=(NUM_RESAMPLES, len(samples)))
    low, high = np.quantile(np.median(np.asarray(samples)[chosen], axis=1), [0.05, 0.95])
    return float(low), float(high)


def pair_up(predicted: Iterable[Record], measured: Iterable[Record]) -> list[Pair]:
    """Pairs of speculative configurations that have both rows, in the order of the measured ones."""
    by_key = {pairing_key(record): record for record in predicted}
    return [
        Pair(by_key[pairing_key(record)], record)
        for record in measured
        if record.gamma > 0 and pairing_key(record) in by_key
    ]


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a comparison must keep to pass; None is not checked. Errors are fractions, of absolute value.

    Step times (`*_step_error`) are normalised by the reference kernels where they were timed, and raw elsewhere.
    """

    median_speedup_error: float | None = None
    p90_speedup_error: float | None = None
    median_autoregressive_step_error: float | None = None
    median_draft_step_error: float | None = None
    median_verify_step_error: float | None = None
    median_step_error: float | None = None
    median_tokens_per_step_error: float | None = None
    regret: float | None = None
    """Mean over the cases of what following the plan loses."""
    coverage: tuple[float, float] | None = None
    """Least and greatest share of the points that the intervals hold."""


@dataclass(frozen=True, kw_only=True)
class TermSummary:
    """The absolute errors of one term over the points."""

    median_error: float
    p90_error: float
    bias: float
    """Median of the signed errors."""
    normalised_median_error: float | None
    normalised_p90_error: float | None
    noise_floor: float | None

    @property
    def best_known_median(self) -> float:
        return self.median_error if self.normalised_median_error is None else self.normalised_median_error


@dataclass(frozen=True, kw_only=True)
class CaseRegret:
    """Of one (batch, context, temperature): what was planned, what was measured best, and what the plan loses."""

    batch_size: int
    context_len: int
    temperature: float
    planned: str
    best: str
    regret: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The pairs of a grid, summed up."""

    pairs: list[Pair]
    thresholds: Thresholds

    def absolute_errors(self, term: str) -> list[float]:
        return [abs(error) for error in _known(pair.error(term) for pair in self.pairs)]

    def summary(self, term: str) -> TermSummary | None:
        """None where no pair has the term on both sides."""
        signed = _known(pair.error(term) for pair in self.pairs)
        if not signed:
            return None
        errors = self.absolute_errors(term)
        normalised = np.abs(_known(pair.normalised_error(term) for pair in self.pairs))
        noise = _known(pair.repeat_noise(term) for pair in self.pairs)
        return TermSummary(
            median_error=float(np.median(errors)),
            p90_error=float(np.quantile(errors, 0.9)),
            bias=statistics.median(signed),
            normalised_median_error=float(np.median(normalised)) if normalised.size else None,
            normalised_p90_error=float(np.quantile(normalised, 0.9)) if normalised.size else None,
            noise_floor=statistics.median(noise) if noise else None,
        )

    @property
    def coverage(self) -> float | None:
        covered = _known(pair.is_covered for pair in self.pairs)
        return sum(covered) / len(covered) if covered else None

    @property
    def noise(self) -> float | None:
        """Median over the points of (highest − lowest) / median measured speedup: what repeats alone differ by."""
        spreads = [
            (max(samples) - min(samples)) / statistics.median(samples)
            for pair in self.pairs
            if (samples := pair.measured.speedup_samples) and len(samples) > 1
        ]
        return statistics.median(spreads) if spreads else None

    @property
    def prompt_noise(self) -> float | None:
        """Median over the points of the relative standard error of the measured tokens per step."""
        noise = _known(pair.prompt_noise for pair in self.pairs)
        return statistics.median(noise) if noise else None

    @property
    def case_regrets(self) -> list[CaseRegret]:
        groups: dict[tuple[Any, ...], list[Pair]] = {}
        for pair in self.pairs:
            groups.setdefault(tuple(getattr(pair.measured, name) for name in CASE), []).append(pair)
        return [found for pairs in groups.values() if (found := case_regret(pairs)) is not None]

    @property
    def regret(self) -> float | None:
        """Mean over the cases of what following the plan loses against the measured best."""
        regrets = self.case_regrets
        return statistics.fmean(each.regret for each in regrets) if regrets else None

    @property
    def failures(self) -> list[str]:
        """Which thresholds do not hold; one that cannot be checked does not hold."""
        if not self.pairs:
            return ["no configuration has both a prediction and a measurement"]
        failures = []
        for name, value in self._checked().items():
            limit = getattr(self.thresholds, name)
            if limit is None:
                continue
            low, high = limit if isinstance(limit, tuple) else (None, limit)
            if value is None:
                failures.append(f"{name.replace('_', ' ')} could not be computed")
            elif value > high:
                failures.append(f"{name.replace('_', ' ')} {value:.3f} exceeds {high:.3f}")
            elif low is not None and value < low:
                failures.append(f"{name.replace('_', ' ')} {value:.3f} is below {low:.3f}")
        return failures

    def _checked(self) -> dict[str, float | None]:
        """What each threshold is held against."""

        def of(term: str, figure: Callable[[TermSummary], float]) -> float | None:
            summary = self.summary(term)
            return None if summary is None else figure(summary)

        return {
            "median_speedup_error": of("speedup", lambda s: s.median_error),
            "p90_speedup_error": of("speedup", lambda s: s.p90_error),
            "median_autoregressive_step_error": of("autoregressive_step_s", lambda s: s.best_known_median),
            "median_draft_step_error": of("draft_step_s", lambda s: s.best_known_median),
            "median_verify_step_error": of("verify_step_s", lambda s: s.best_known_median),
            "median_step_error": of("step_s", lambda s: s.best_known_median),
            "median_tokens_per_step_error": of("expected_tokens_per_step", lambda s: s.median_error),
            "regret": self.regret,
            "coverage": self.coverage,
        }

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_document(self) -> dict[str, Any]:
        """Rows and summary as plain data."""
        summaries = {term: summary for term in TERMS if (summary := self.summary(term)) is not None}
        return {
            "rows": [_row(pair) for pair in self.pairs],
            "summary": {term: dict(vars(summary)) for term, summary in summaries.items()},
            "coverage": self.coverage,
            "noise": self.noise,
            "prompt_noise": self.prompt_noise,
            "regret": self.regret,
            "regrets": [dict(vars(each)) for each in self.case_regrets],
            "thresholds": msgspec.to_builtins(self.thresholds),
            "passed": self.passed,
            "failures": self.failures,
        }


def _known(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None]


AUTOREGRESSIVE_CHOICE = "autoregressive"


def case_regret(pairs: Sequence[Pair]) -> CaseRegret | None:
    """What the planned configuration loses against the measured best, autoregressive decoding being a choice too.

    The best is picked on the even repetitions and scored on the odd ones, and the other way round; the mean of both.
    None where there are fewer than two repetitions to split.
    """
    samples = [pair.measured.speedup_samples or [] for pair in pairs]
    if not samples or min(map(len, samples)) < 2:
        return None
    halves = [[1.0, *(statistics.median(s[start::2]) for s in samples)] for start in (0, 1)]
    chosen = int(np.argmax([1.0, *(pair.predicted.speedup or 0.0 for pair in pairs)]))
    losses = [1.0 - score[chosen] / score[int(np.argmax(pick))] for pick, score in (halves, halves[::-1])]
    names = [AUTOREGRESSIVE_CHOICE, *(_name(pair.measured) for pair in pairs)]
    best = int(np.argmax([1.0, *(statistics.median(s) for s in samples)]))
    case = pairs[0].measured
    return CaseRegret(
        batch_size=case.batch_size,
        context_len=case.context_len,
        temperature=case.temperature,
        planned=names[chosen],
        best=names[best],
        regret=statistics.fmean(losses),
    )


def _name(record: Record) -> str:
    budget = "" if record.draft_budget is None else f" {record.draft_budget}"
    return f"{record.draft_method}{budget}, gamma {record.gamma}"


def _row(pair: Pair) -> dict[str, Any]:
    record = pair.measured
    row: dict[str, Any] = {name: getattr(record, name) for name in PAIRING}
    for term in TERMS:
        row[f"predicted_{term}"], row[f"measured_{term}"] = getattr(pair.predicted, term), getattr(record, term)
        row[f"error_{term}"] = pair.error(term)
        if term != "expected_tokens_per_step":
            row[f"normalised_error_{term}"] = pair.normalised_error(term)
    row["speedup_low"], row["speedup_high"] = pair.predicted.speedup_low, pair.predicted.speedup_high
    row["measured_speedup_low"], row["measured_speedup_high"] = pair.measured_interval or (None, None)
    row["noise"] = pair.repeat_noise("speedup")
    row["prompt_noise"] = pair.prompt_noise
    row["is_covered"] = pair.is_covered
    return row
