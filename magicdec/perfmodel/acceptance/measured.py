"""Acceptance that was measured: counted by position, or published as a law fitted to figures.

    posterior_i = (n · c_i + κ · m_i) / (n + κ)              rate of position i where it was counted
    logit rate_i(b, S) = logit m_i(b, S) + Σ_cells w · (logit posterior_i − logit m_i)

c_i is the counted rate of n trials (fewer where sequences differ), m_i the law's, b and S the draft's
budget and context. The counts are beta-binomial: rates of cells scatter around the law's like a Beta
variable of κ trials. κ follows from how much they scatter beyond their counting errors; where there
are too few cells to tell, the law weighs one trial. So a law that holds smooths noisy cells, and one
that does not is overruled. Weights w fall with the distance from a cell in logarithms of budget and
context, squared, so that a cell's own rates are met there.

Beyond the last counted position the logit goes on with `Beyond.slope` per ln(position).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from magicdec.counts import Array, is_nothing, nothing_accepted
from magicdec.errors import ConfigError
from magicdec.naming import draft_name
from magicdec.perfmodel.acceptance.fit import (
    NUM_FREE,
    MeasuredRates,
    fit_law,
    held_out,
    measured_rates,
    measurements_from_rows,
)
from magicdec.perfmodel.acceptance.law import (
    Beyond,
    Law,
    Runs,
    clipped_rate,
    fit_runs,
    from_logit,
    logit,
    sanitize,
)
from magicdec.perfmodel.acceptance.profile import (
    AcceptanceProfile,
    KnownRates,
    by_position,
    error_of_rates,
    shifted,
    with_shifts,
)
from magicdec.specs.speculation import LOOKUP_METHODS

LEAST_TRIALS = 1.0
"""Trials that the law counts for at least."""

MOST_TRIALS = 1e9
"""Trials that the law counts for where the counts do not contradict it."""

NEAR = 1e-9
"""Squared distance in log budget and log context below which a cell is met."""


class Cell(NamedTuple):
    """Counts of one budget and context beside the law."""

    budget: float
    context: float
    shift: Array
    """Logit of the posterior minus that of the law, by position."""
    deviation: Array
    """Standard deviation of log(−log rate), by position."""


def cells_of(measured: Sequence[MeasuredRates], law: Law) -> list[Cell]:
    """Each cell's posterior beside the law."""
    weight = _trials_of_law(measured, law)
    cells = []
    for counted in measured:
        rates = np.array(counted.rates)
        trials = _effective_trials(counted)
        of_law = _of_law(counted, law)
        posterior = clipped_rate((trials * rates + weight * of_law) / (trials + weight))
        variance = posterior * (1.0 - posterior) / (trials + weight + 1.0)
        cells.append(
            Cell(
                budget=counted.budget,
                context=counted.context,
                shift=logit(posterior) - logit(of_law),
                deviation=np.sqrt(variance) / (posterior * -np.log(posterior)),
            )
        )
    return cells


def rates_near(
    cells: Sequence[Cell], of_law: Array, *, budget: Any, context: Any
) -> tuple[Array, Array]:
    """Rates by position at a budget and context, and the deviation of log(−log rate) that the counts
    leave, from the law's rates there; positions are on the last axis."""
    gamma_max = of_law.shape[-1]
    weights = _weights(cells, budget=budget, context=context)
    shifts = np.stack([_continued(cell.shift, gamma_max) for cell in cells])
    deviations = np.stack([_continued(cell.deviation, gamma_max) for cell in cells])
    rates = from_logit(logit(of_law) + weights @ shifts)
    return rates, weights @ deviations


def _continued(values: Array, length: int) -> Array:
    """Values by position; those beyond the last are as the last."""
    return np.asarray(values[np.minimum(np.arange(length), len(values) - 1)])


def _weights(cells: Sequence[Cell], *, budget: Any, context: Any) -> Array:
    """Weights of the cells on a last axis, behind broadcast(budget, context)."""
    context = sanitize(context, 1.0)
    budget = np.minimum(sanitize(budget, 1.0), context)
    of_budget = np.log(budget[..., None] / [cell.budget for cell in cells])
    of_context = np.log(context[..., None] / [cell.context for cell in cells])
    near = 1.0 / np.maximum(of_budget**2 + of_context**2, NEAR)
    return np.asarray(near / near.sum(axis=-1, keepdims=True))


def _effective_trials(counted: MeasuredRates) -> Array:
    """Independent trials that would have each rate's standard error."""
    rates = np.array(counted.rates)
    trials = np.array(counted.trials)
    smooth = (rates * trials + 0.5) / (trials + 1.0)
    stderr = np.maximum(counted.stderr, 1e-9)
    return np.asarray(np.minimum(smooth * (1.0 - smooth) / stderr**2, trials))


def _of_law(counted: MeasuredRates, law: Law) -> Array:
    rates = law.conditional_rates(
        budget=counted.budget, context=counted.context, gamma_max=len(counted.rates)
    )
    return clipped_rate(rates)


def _trials_of_law(measured: Sequence[MeasuredRates], law: Law) -> float:
    """κ: the trials that the law counts for, by the moments of the counts' scatter around it."""
    scatter = 0.0
    num_rates = 0
    total_trials = 0.0
    for counted in measured:
        of_law = _of_law(counted, law)
        trials = _effective_trials(counted)
        missed = np.array(counted.rates) - of_law
        scatter += float(np.sum(trials * missed**2 / (of_law * (1.0 - of_law))))
        num_rates += len(of_law)
        total_trials += float(trials.sum())
    freedom = num_rates - NUM_FREE
    if freedom <= 0:
        return LEAST_TRIALS
    # each rate's expected scatter is 1 + trials / (κ + 1)
    excess = scatter * num_rates / freedom - num_rates
    if excess <= 0.0:
        return MOST_TRIALS
    return min(max(total_trials / excess - 1.0, LEAST_TRIALS), MOST_TRIALS)


class CountedProfile(AcceptanceProfile, frozen=True, kw_only=True):
    """Facts that counts give, whichever way they answer a prediction's questions."""

    num_trials: int | None = None
    measured: list[MeasuredRates] = msgspec.field(default_factory=list)
    """The counted rates. Empty where the source gives none."""

    @property
    def is_counted(self) -> bool:
        return bool(self.measured)

    @property
    def accepts_nothing(self) -> bool:
        """Whether a network was counted long enough to know that it accepts nothing: that is a fault,
        not a text. A look-up may find nothing in a text."""
        if self.draft_method in LOOKUP_METHODS or not self.measured:
            return False
        return is_nothing(self._accepted_first, self._tried_first)

    @property
    def fault(self) -> str:
        if not self.accepts_nothing:
            return ""
        return nothing_accepted(
            draft_name(self.draft, self.draft_method),
            accepted=self._accepted_first,
            tried=self._tried_first,
        )

    @property
    def _tried_first(self) -> float:
        return sum(counted.trials[0] for counted in self.measured)

    @property
    def _accepted_first(self) -> float:
        """Drafts whose first token was accepted."""
        return sum(each.rates[0] * each.trials[0] for each in self.measured)


class MeasuredProfile(CountedProfile, frozen=True, kw_only=True):
    """A law that was fitted to counts or to published figures, with the counts where they are known."""

    applies_to: list[str] = msgspec.field(default_factory=list)
    """Other targets of the family that this profile may stand in for, with the wider error of
    `carried_error`.
    """
    carried_from: str = ""
    """The target that it was measured on, where it stands in for another."""
    draft_weight_dtype: str = ""
    """Format of the draft's weights, where it is a narrower copy of its target."""
    carried_error: float = 0.35
    """Standard deviation of log(1 - alpha) added when the profile stands in for another target."""
    fitted: bool = False
    """Whether the rate was fitted to speedups rather than counted."""
    fit_rms: float | None = None
    """Root mean square of measured minus fitted rates, weighted by trials."""
    held_out_error: float | None = None
    """Mean absolute error of the law on budgets that it was not fitted on, leaving out one at a
    time.
    """
    held_out_noise: float | None = None
    """Value of that error if the law were right, from the counts' own standard errors."""
    beyond: Beyond | None = None
    """How rates go on beyond the positions that were counted. None: as the law has it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.carried_error <= 10.0:
            raise ValueError(
                f"'carried_error' must be between 0 and 10, not {self.carried_error!r}"
            )

    def _known(
        self, *, budget: Any, context: Any, gamma_max: int
    ) -> tuple[Array, Array]:
        """Rates by position and the deviation of log(−log rate): of the counts where there are some,
        of the law where there are none."""
        at: dict[str, Any] = {"budget": budget, "context": context}
        rates = self.law.conditional_rates(**at, gamma_max=gamma_max)
        error = self.error
        own: Array = np.zeros(())
        if self.measured:
            rates, own = rates_near(cells_of(self.measured, self.law), rates, **at)
            # the counts' own error takes the place of the law's at their settings
            error = msgspec.structs.replace(error, log_rejection=0.0, depth=0.0)
        away = error.deviation(self.law, **at, gamma_max=gamma_max)
        beyond = self._beyond
        if beyond is None:
            return rates, np.hypot(own, away)
        return beyond.continued(rates, own**2 + away**2)

    @property
    def _beyond(self) -> Beyond | None:
        """The belief beyond the known positions; of counts without a belief, the law's error
        by depth."""
        if self.beyond is not None or not self.measured:
            return self.beyond
        return Beyond(position=self.num_counted, error=self.error.depth)

    @property
    def measured_on(self) -> str:
        return self.carried_from

    def known_rates(self, *, context: float, num_given: int) -> KnownRates | None:
        """The counts that go deepest."""
        if not self.measured:
            return None
        most = max(self.measured, key=lambda counted: len(counted.rates))
        rates = np.array(most.rates)
        slope = np.maximum(rates * (1.0 - rates), 1e-3)  # of a rate by its logit
        variance = (np.array(most.stderr) / slope) ** 2
        return KnownRates(rates, variance=variance, is_last_kept=False)

    @property
    def num_counted(self) -> int:
        """Positions whose rates were counted; 0: none."""
        return max((len(counted.rates) for counted in self.measured), default=0)

    @property
    def runs(self) -> Runs | None:
        """Runs fitted to the counts, where those are of one budget and context, and rise with the
        position.
        """
        if len(self.measured) != 1:
            return None
        return fit_runs(tuple(self.measured[0].rates), tuple(self.measured[0].stderr))

    def tokens_per_step(
        self,
        *,
        budget: Any,
        context: Any,
        gamma: Any,
        shift: Any = 0.0,
    ) -> tuple[Array, Array]:
        """By the runs of the counts where they have some, else by the rates."""
        runs = self.runs
        at: dict[str, Any] = {"budget": budget, "context": context}
        if runs is None:
            return super().tokens_per_step(**at, gamma=gamma, shift=shift)
        gamma = np.asarray(gamma, dtype=np.int64)
        rates = self.conditional_rates(**at, gamma_max=runs.counted)
        first = rates[..., 0]
        moved = logit(first + shift) - logit(self.measured[0].rates[0])
        expected, everything = runs.tokens_per_step(gamma, shift=moved)
        at_counted, _ = runs.tokens_per_step(runs.counted, shift=moved)
        counted, _ = by_position(shifted(rates, shift), runs.counted)
        # the runs tell how E changes with gamma; at the counted gamma the counts tell E itself
        gain = (counted - 1.0) / (at_counted - 1.0)
        return 1.0 + (expected - 1.0) * gain, everything

    def tokens_error(
        self,
        *,
        budget: Any,
        context: Any,
        gamma: Any,
        shifts: Sequence[Any] = (),
    ) -> Array:
        """From the rates' errors and, by runs, that of E(gamma) over the counted gamma's."""
        runs = self.runs
        at: dict[str, Any] = {"budget": budget, "context": context}
        if runs is None:
            return super().tokens_error(**at, gamma=gamma, shifts=shifts)
        gamma = np.asarray(gamma, dtype=np.int64)
        rates, deviation = self._known(**at, gamma_max=runs.counted)
        of_counts = error_of_rates(rates, deviation, runs.counted)
        return with_shifts(
            np.hypot(of_counts, runs.log_ratio_error(gamma, runs.counted)),
            shifts,
            lambda shift: self.tokens_per_step(**at, gamma=gamma, shift=shift)[0],
        )

    def ratio_error(
        self,
        gamma: int,
        over: int,
        *,
        budget: Any,
        context: Any,
        shift: float = 0.0,
    ) -> float:
        if (runs := self.runs) is not None:
            return float(runs.log_ratio_error(gamma, over))
        return super().ratio_error(
            gamma, over, budget=budget, context=context, shift=shift
        )

    def at_rate(
        self, rate: float, *, budget: float, context: float
    ) -> AcceptanceProfile:
        scaled = super().at_rate(rate, budget=budget, context=context)
        if not isinstance(scaled, MeasuredProfile):
            return scaled
        # what was counted was another rate
        return msgspec.structs.replace(scaled, fitted=True, measured=[])


def fit_profile(
    measurements: Any,
    *,
    model: str = "",
    draft: str = "self",
    dataset: str = "",
    source: str = "measured",
    spread: float | None = None,
    cluster_factor: float | None = None,
) -> MeasuredProfile:
    """The profile of one draft method at one temperature, from counts.

    `measurements` are rows (mappings, structs or a dict of columns) with draft_method, budget,
    context, position (1 is the first draft), trials (blocks whose drafts before `position` were all
    accepted), accepted, temperature, and optionally `sequence`: with it the spread between
    sequences is estimated and the errors are clustered by sequence.

    Raises:
        ConfigError: no usable row, or rows of several methods or temperatures.
    """
    rows = measurements_from_rows(measurements)
    methods = {row.draft_method for row in rows}
    temperatures = {row.temperature for row in rows}
    for what, values in (("draft method", methods), ("temperature", temperatures)):
        if len(values) > 1:
            raise ConfigError(
                f"one profile describes one {what}; the measurements hold "
                f"{sorted(map(str, values))}"
            )
    is_self = draft == "self"
    law, error, between, rms = fit_law(
        rows,
        is_self=is_self,
        spread=spread,
        cluster_factor=cluster_factor,
    )
    missed, noise = held_out(rows, is_self=is_self) or (None, None)
    return MeasuredProfile(
        model=model,
        draft=draft,
        draft_method=methods.pop(),
        dataset=dataset,
        temperature=temperatures.pop(),
        definition="conditional rate by position, from real speculative blocks",
        source=source,
        law=law,
        error=error,
        spread=between,
        measured_budgets=sorted({row.budget for row in rows}),
        measured_contexts=sorted({row.context for row in rows}),
        measured_gamma=max(row.position for row in rows),
        num_trials=round(sum(row.trials for row in rows)),
        fit_rms=rms,
        held_out_error=missed,
        held_out_noise=noise,
        measured=measured_rates(rows),
    )
