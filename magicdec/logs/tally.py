"""Counts of replayed steps: whole numbers, so the counts of shards add up exactly to those of one
pass.

Requests are kept as sums and sums of products: the error of a ratio r = Σ a / Σ n over requests,
se² = C / (C − 1) · Σ (a − r·n)² / (Σ n)², needs no more than Σ a², Σ a·n and Σ n².
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from magicdec.counts import rate_and_error
from magicdec.logs import tally_kernel as columns
from magicdec.logs.lookups import Lookup
from magicdec.logs.ngram import Steps

Whole = npt.NDArray[np.int64]
CONTEXT_BOUNDS = np.array([2**power for power in range(7, 21)], dtype=np.int64)
"""Upper bounds, inclusive, of the ranges of context that are counted apart: 128, 256, … 1 M
tokens."""
OUTPUT_BOUNDS = np.array([16, 64, 256, 1024, 4096], dtype=np.int64)
"""Upper bounds, inclusive, of the ranges of place in the output that are counted apart."""
Z_95 = 1.959963984540054


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio of sums over requests."""

    value: float
    stderr: float | None
    """Standard error, clustered by request; None of one request."""
    trials: int = 0


@dataclass(frozen=True, kw_only=True)
class SettingCounts:
    """The counts of one setting."""

    lookup: Lookup
    totals: Whole
    positions: Whole
    """Sums by position, [gamma, 5]."""
    by_context: Whole
    """Sums by range of context, [ranges, 4]."""
    context_positions: Whole
    """Tried and accepted by range of context and position, [ranges, gamma, 2]."""
    by_output: Whole
    """Sums by range of place in the output, [ranges, 4]."""

    @property
    def num_requests(self) -> int:
        return int(self.totals[columns.REQUESTS])

    @property
    def num_steps(self) -> int:
        return int(self.totals[columns.STEPS])

    @property
    def drafts(self) -> int:
        """Steps with a draft: the engine's `num_drafts`."""
        return int(self.totals[columns.DRAFTED_STEPS])

    @property
    def drafted_tokens(self) -> int:
        return int(self.totals[columns.DRAFTED])

    @property
    def drafted_share(self) -> float:
        return self.drafts / max(self.num_steps, 1)

    @property
    def drafted_per_step(self) -> float:
        """Mean drafted tokens of all steps."""
        return self.drafted_tokens / max(self.num_steps, 1)

    @property
    def tokens_per_step(self) -> Ratio:
        """Emitted tokens per step of decoding, drafted or not."""
        totals = self.totals
        return _ratio(
            emitted=int(totals[columns.EMITTED]),
            steps=int(totals[columns.STEPS]),
            squares=(
                int(totals[columns.EMITTED_SQUARED]),
                int(totals[columns.STEPS_EMITTED]),
                int(totals[columns.STEPS_SQUARED]),
            ),
            clusters=self.num_requests,
        )

    @property
    def rates(self) -> list[Ratio]:
        """P(draft i accepted | all before accepted) of all steps, up to the last position that was
        tried."""
        rates = []
        for sums in self.positions.tolist():
            if sums[columns.TRIED] == 0:
                break
            ratio = _ratio(
                emitted=sums[columns.ACCEPTED],
                steps=sums[columns.TRIED],
                squares=(
                    sums[columns.ACCEPTED_SQUARED],
                    sums[columns.TRIED_ACCEPTED],
                    sums[columns.TRIED_SQUARED],
                ),
                clusters=self.num_requests,
            )
            rates.append(_no_surer_than_independent(ratio))
        return rates

    def requests_for(self, relative: float) -> int | None:
        """Requests after which tokens per step are known to ± `relative` (95 %), as these spread;
        None of one request or of none that decodes."""
        ratio = self.tokens_per_step
        if ratio.stderr is None or ratio.value == 0.0:
            return None
        now = Z_95 * ratio.stderr / ratio.value
        return math.ceil(self.num_requests * (now / relative) ** 2)


def _ratio(
    *, emitted: int, steps: int, squares: tuple[int, int, int], clusters: int
) -> Ratio:
    """The ratio of two sums over requests, from `squares`: Σ a², Σ a·n, Σ n²."""
    if steps == 0:
        return Ratio(value=0.0, stderr=None)
    value = emitted / steps
    if clusters < 2:
        return Ratio(value=value, stderr=None, trials=steps)
    of_a, of_both, of_n = squares
    # whole numbers, so that what cancels cancels exactly
    spread = (
        of_a * steps * steps - 2 * of_both * emitted * steps + of_n * emitted * emitted
    )
    variance = clusters / (clusters - 1) * (spread / steps**4)
    return Ratio(value=value, stderr=math.sqrt(max(variance, 0.0)), trials=steps)


def _no_surer_than_independent(rate: Ratio) -> Ratio:
    """A rate with an error that is no less than of independent trials."""
    accepted = np.array([rate.value * rate.trials])
    _, independent = rate_and_error(accepted, np.array([float(rate.trials)]))
    if rate.stderr is None:
        return rate
    return replace(rate, stderr=max(rate.stderr, independent))


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Counts of many settings."""

    lookups: tuple[Lookup, ...]
    totals: Whole
    positions: Whole
    by_context: Whole
    context_positions: Whole
    by_output: Whole

    @classmethod
    def empty(cls, lookups: Sequence[Lookup]) -> Tally:
        """Return counts of nothing yet."""
        num = len(lookups)
        most = max((row.gamma for row in lookups), default=1)
        contexts = len(CONTEXT_BOUNDS) + 1
        outputs = len(OUTPUT_BOUNDS) + 1
        return cls(
            lookups=tuple(lookups),
            totals=np.zeros((num, columns.NUM_TOTALS), dtype=np.int64),
            positions=np.zeros((num, most, columns.NUM_POSITION_SUMS), dtype=np.int64),
            by_context=np.zeros((num, contexts, columns.NUM_SUMS), dtype=np.int64),
            context_positions=np.zeros((num, contexts, most, 2), dtype=np.int64),
            by_output=np.zeros((num, outputs, columns.NUM_SUMS), dtype=np.int64),
        )

    def add(
        self, steps: Steps, counts: Whole, *, text_len: int, prompt_len: int
    ) -> None:
        """Add a request's steps, [settings, steps, 3]."""
        columns.add_request(
            steps,
            counts,
            text_len,
            prompt_len,
            CONTEXT_BOUNDS,
            OUTPUT_BOUNDS,
            self.totals,
            self.positions,
            self.by_context,
            self.context_positions,
            self.by_output,
        )

    def __add__(self, other: Tally) -> Tally:
        """Counts of the requests of both."""
        return Tally(
            lookups=self.lookups,
            totals=self.totals + other.totals,
            positions=self.positions + other.positions,
            by_context=self.by_context + other.by_context,
            context_positions=self.context_positions + other.context_positions,
            by_output=self.by_output + other.by_output,
        )

    def of(self, number: int) -> SettingCounts:
        """Return the counts of one setting, by its place among `lookups`."""
        gamma = self.lookups[number].gamma
        return SettingCounts(
            lookup=self.lookups[number],
            totals=self.totals[number],
            positions=self.positions[number, :gamma],
            by_context=self.by_context[number],
            context_positions=self.context_positions[number, :, :gamma],
            by_output=self.by_output[number],
        )

    @property
    def settings(self) -> list[SettingCounts]:
        return [self.of(number) for number in range(len(self.lookups))]
