"""Predicted against measured, term by term, so that a wrong prediction shows which term is wrong.

error      predicted / measured − 1
coverage   share of measured speedups inside the predicted interval
regret     1 − S(planned) / S(best), where the best is picked on one half of the repetitions and both are scored on the
           other half, so that noise does not make a lucky configuration look best
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from magicdec.records import Record

TERMS = ("autoregressive_step_s", "draft_step_s", "verify_step_s", "step_s", "expected_tokens_per_step", "speedup")
PAIRING = (
    "model",
    "draft",
    "draft_method",
    "draft_budget",
    "gamma",
    "tp_size",
    "batch_size",
    "context_len",
    "temperature",
)


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
        predicted, measured = getattr(self.predicted, term), getattr(self.measured, term)
        if predicted is None or not measured:
            return None
        return float(predicted / measured - 1.0)

    @property
    def is_covered(self) -> bool | None:
        low, high, measured = self.predicted.speedup_low, self.predicted.speedup_high, self.measured.speedup
        if low is None or high is None or measured is None:
            return None
        return low <= measured <= high


def pair_up(predicted: Iterable[Record], measured: Iterable[Record]) -> list[Pair]:
    """Pairs of speculative configurations that have both rows, in the order of the measured ones."""
    by_key = {pairing_key(record): record for record in predicted}
    return [
        Pair(by_key[pairing_key(record)], record)
        for record in measured
        if record.gamma > 0 and pairing_key(record) in by_key
    ]


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """What a comparison must keep to pass; None is not checked."""

    median_speedup_error: float | None = None
    p90_speedup_error: float | None = None
    regret: float | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The pairs of a grid, summed up."""

    pairs: list[Pair]
    thresholds: Thresholds

    def absolute_errors(self, term: str) -> list[float]:
        return [abs(error) for pair in self.pairs if (error := pair.error(term)) is not None]

    @property
    def coverage(self) -> float | None:
        covered = [pair.is_covered for pair in self.pairs if pair.is_covered is not None]
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
    def regret(self) -> float | None:
        """Mean over (batch, context, temperature) of what following the plan loses against the measured best."""
        groups: dict[tuple[Any, ...], list[Pair]] = {}
        for pair in self.pairs:
            record = pair.measured
            groups.setdefault((record.model, record.batch_size, record.context_len, record.temperature), []).append(
                pair
            )
        losses = [loss for pairs in groups.values() if (loss := group_regret(pairs)) is not None]
        return statistics.fmean(losses) if losses else None

    @property
    def failures(self) -> list[str]:
        """Which thresholds do not hold."""
        errors, limits = self.absolute_errors("speedup"), self.thresholds
        checks: list[tuple[str, float | None, Callable[[], float | None]]] = [
            ("median speedup error", limits.median_speedup_error, lambda: statistics.median(errors)),
            ("90th percentile of speedup error", limits.p90_speedup_error, lambda: float(np.quantile(errors, 0.9))),
            ("regret", limits.regret, lambda: self.regret),
        ]
        failures = [] if errors else ["no configuration has both a prediction and a measurement"]
        for name, limit, value in checks:
            if limit is not None and errors and (actual := value()) is not None and actual > limit:
                failures.append(f"{name} {actual:.3f} exceeds {limit:.3f}")
        return failures

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_document(self) -> dict[str, Any]:
        """Rows and summary as plain data."""
        rows = [_row(pair) for pair in self.pairs]
        summary = {}
        for term in TERMS:
            errors = self.absolute_errors(term)
            if errors:
                summary[term] = {
                    "median_error": statistics.median(errors),
                    "p90_error": float(np.quantile(errors, 0.9)),
                    "bias": statistics.median(e for pair in self.pairs if (e := pair.error(term)) is not None),
                }
        return {
            "rows": rows,
            "summary": summary,
            "coverage": self.coverage,
            "noise": self.noise,
            "regret": self.regret,
            "passed": self.passed,
            "failures": self.failures,
        }


def group_regret(pairs: Sequence[Pair]) -> float | None:
    """What the planned configuration loses against the measured best, autoregressive decoding being a choice too.

    None where there are fewer than two repetitions to split.
    """
    samples = [pair.measured.speedup_samples or [] for pair in pairs]
    if min(map(len, samples)) < 2:
        return None
    choose = [1.0, *(statistics.median(s[::2]) for s in samples)]
    score = [1.0, *(statistics.median(s[1::2]) for s in samples)]
    planned = [1.0, *(pair.predicted.speedup or 0.0 for pair in pairs)]
    best, chosen = int(np.argmax(choose)), int(np.argmax(planned))
    return 1.0 - score[chosen] / score[best]


def _row(pair: Pair) -> dict[str, Any]:
    record = pair.measured
    row: dict[str, Any] = {name: getattr(record, name) for name in PAIRING}
    for term in TERMS:
        row[f"predicted_{term}"], row[f"measured_{term}"] = getattr(pair.predicted, term), getattr(record, term)
        row[f"error_{term}"] = pair.error(term)
    row["speedup_low"], row["speedup_high"] = pair.predicted.speedup_low, pair.predicted.speedup_high
    row["is_covered"] = pair.is_covered
    return row
