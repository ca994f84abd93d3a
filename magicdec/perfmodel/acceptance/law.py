"""How many drafted tokens are accepted: by position in the block, by draft budget, by context
(docs/model.md).

    1 − α(b, S) = floor + (1 − floor) · grown[ A · (b/b₀)^−c · (1 − b/S)^d, (S/S₀)^e ]     position 1
    rate_i      = [ (α·k + i − 1) / (k + i − 1) ] ^ D_i ,  D_i = 1 + G·(1 − exp(−(i − 1)/τ))   position i
    grown[r, g] = r·g · [ (1 + r⁸) / (1 + (r·g)⁸) ]^⅛      the product up to near 1, which it nears but does not reach

b = draft budget (KV slots read per draft step), S = context, k = `concentration` (α is a Beta
variable of αk and (1 − α)k over sequences; ∞: all alike), G = `drift`, τ = `drift_depth` (the draft
drifts over its own tokens). With b ≥ S only the floor is left. Contexts below `flat_below` count as
that long. Rates given by position are the law where there are some: the last one for all further
positions, and for another α each to the power log α / log(given_1); where given_1 is 0, 1 − (1 − α)·(1 − given_i).

Tokens per step at another gamma than the one that rates were counted at: runs of L tokens that the
draft gets right and one that it misses, gone through in steps of γ + 1 tokens.

    R_j = P(L ≥ j) = Π_{i ≤ j} (a·k + i − 1) / (k + i − 1)      beta-geometric: runs differ in how easy they are
    E(γ) = Σ_j R_j / Σ_m R_{m(γ+1)}                             tokens of a run over its steps
    S_i(γ) = Σ_m R_{m(γ+1)+i} / Σ_m R_{m(γ+1)}                  share of steps that accept at least i drafts

At another budget or context logit(a) moves by as much as the law's logit of the first position's
rate; k stays.

What a static batch loses while its last sequences finish: n_j steps take sequence j through gen_len
tokens; its rate is drawn from a Beta distribution of mean α and standard deviation `spread`, and
the tokens of t steps are taken as normal.

    efficiency = (gen_len / E[max_j n_j]) / expected_tokens_per_step      P(n_j ≤ t) = Φ((t·μ − gen_len + ½)/√(t·v))

Tokens per step that are not known lie between 1 and γ + 1, so the share of γ drafts that is accepted
is taken as normal on the logit; its middle and its error at the middle are a profile's.

Ignored: the content of the block, that rates after a rejection differ from those after a full
block, drafts that get worse over their own tokens in runs, correlation between the steps of a
sequence beyond its rate.
"""

import math
from functools import cached_property, lru_cache
from typing import Any

import msgspec
import numpy as np

from magicdec.counts import Array, survival
from magicdec.errors import ConfigError
from magicdec.specs.speculation import MAX_GAMMA

MAX_POSITIONS = 64

LARGEST = 1e15
MOST_CONTEXT_EXPONENT = 5.0

SATURATION = 8

LONGEST = 1024
"""Tokens of a run at most; with 64 the tokens per step differ by 1 %."""

PRIOR = (math.log(10.0), 2.0)
"""Prior mean and standard deviation of log k. Rates at one or two positions hardly tell it."""

SHAPE_ERROR = 0.3
"""Standard deviation of log(E(gamma) / E(counted gamma)), as a share of it: runs are not quite
beta-geometric.
"""

STEP = 1e-4

NUM_NODES = 240

MAX_STEPS_EVALUATED = 2048


class Law(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """The constants of the equations above."""

    rejection: float
    """A: 1 - alpha at the reference budget and context, before the fill factor (1 - b/S)^d and the
    floor.
    """
    budget_exponent: float = 0.0
    context_exponent: float = 0.0
    fill_exponent: float = 0.0
    reference_budget: float = 512.0
    reference_context: float = 8192.0
    flat_below: float = 0.0
    flat_beyond: float = LARGEST
    """Contexts beyond count as that long: a head that attends over a window sees no more of them.
    """
    floor: float = 0.0
    """1 - alpha of a draft with a full cache; 0 for self-speculation with the target's own weights.
    """
    concentration: float | None = None
    """k; None is infinity: no heterogeneity."""
    drift: float = 0.0
    drift_depth: float = 2.0
    by_position: list[float] = []
    """Given rates, in place of the law by position."""

    def __post_init__(self) -> None:
        _check("rejection", self.rejection, 0.0, 1e3)
        for name in ("budget_exponent", "fill_exponent", "drift"):
            _check(name, getattr(self, name), 0.0, 50.0)
        _check(
            "context_exponent",
            self.context_exponent,
            -MOST_CONTEXT_EXPONENT,
            MOST_CONTEXT_EXPONENT,
        )
        for name in ("reference_budget", "reference_context", "drift_depth"):
            _check(name, getattr(self, name), 1e-3, LARGEST)
        _check("flat_below", self.flat_below, 0.0, LARGEST)
        _check("flat_beyond", self.flat_beyond, max(self.flat_below, 1.0), LARGEST)
        _check("floor", self.floor, 0.0, 1.0)
        if self.concentration is not None:
            _check("concentration", self.concentration, 1e-3, 1e12)
        if len(self.by_position) > MAX_POSITIONS:
            raise ValueError(
                f"'by_position' holds {len(self.by_position)} rates; at most {MAX_POSITIONS} are "
                "read"
            )
        for rate in self.by_position:
            _check("by_position", rate, 0.0, 1.0)

    def first_rate(self, *, budget: Any, context: Any) -> Array:
        """α: P(first drafted token accepted), of shape broadcast(budget, context)."""
        rejected, growth = self.rejected(budget=budget, context=context)
        grown = _grown(np.minimum(rejected, 1.0), growth)
        return (1.0 - self.floor) * (1.0 - grown)

    def rejected(self, *, budget: Any, context: Any) -> tuple[Array, Array]:
        """r and g of the equations above."""
        context = sanitize(context, 1.0)
        budget = np.minimum(sanitize(budget, 1.0), context)
        by_budget = (budget / self.reference_budget) ** -self.budget_exponent
        by_fill = (1.0 - budget / context) ** self.fill_exponent
        counted = np.clip(context, self.flat_below, self.flat_beyond)
        growth = (counted / self.reference_context) ** self.context_exponent
        return self.rejection * by_budget * by_fill, growth

    def conditional_rates(self, *, budget: Any, context: Any, gamma_max: int) -> Array:
        """P(position i accepted | all before accepted), i = 1..gamma_max, on a last axis."""
        first = self.first_rate(budget=budget, context=context)
        return self.rates_after(first, gamma_max)

    def rates_after(self, first_rate: Any, gamma_max: int) -> Array:
        """The law by position for a given rate at position 1; shape (..., gamma_max)."""
        first = np.asarray(first_rate, dtype=np.float64)
        alpha = np.clip(first, 0.0, 1.0)[..., None]
        if self.by_position:
            return self._given_rates(alpha, gamma_max)
        before: Array = np.arange(gamma_max).astype(np.float64)
        k = self.concentration
        if k is not None:
            alpha = (alpha * k + before) / (k + before)
        drifted = -np.expm1(-before / self.drift_depth)
        exponent = 1.0 + self.drift * drifted
        return alpha**exponent

    def _given_rates(self, alpha: Array, gamma_max: int) -> Array:
        by_position = np.array(self.by_position)
        places = np.minimum(np.arange(gamma_max), len(by_position) - 1)
        given = by_position[places]
        if given[0] == 0.0:
            # no power makes something of nothing: rejections shrink by one factor instead
            return np.asarray(1.0 - (1.0 - alpha) * (1.0 - given))
        first = np.clip(given[:1], 1e-12, 1.0 - 1e-12)
        wanted = np.clip(alpha, 1e-12, 1.0 - 1e-12)
        power = np.log(wanted) / np.log(first)
        return np.asarray(given**power)


class LawError(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """One standard deviation of log(1 − α) at the reference point, and how it grows away from it.

    `depth` is the standard deviation of the log of −log(rate) per unit of log(position):
    extrapolation in depth.
    """

    log_rejection: float = 0.0
    budget_exponent: float = 0.0
    context_exponent: float = 0.0
    depth: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            _check(name, getattr(self, name), 0.0, 50.0)

    def deviation(
        self, law: Law, *, budget: Any, context: Any, gamma_max: int
    ) -> Array:
        """Standard deviation of log(−log rate_i), of shape broadcast(budget, context) +
        (gamma_max,).
        """
        context = sanitize(context, 1.0)
        budget = np.minimum(sanitize(budget, 1.0), context)
        counted = np.maximum(context, law.flat_below)
        positions = np.arange(1, gamma_max + 1, dtype=np.float64)
        by_budget = self.budget_exponent * np.log(budget / law.reference_budget)
        by_context = self.context_exponent * np.log(counted / law.reference_context)
        by_depth = self.depth * np.log(positions)
        variance = self.log_rejection**2 + by_budget**2 + by_context**2
        return np.sqrt(np.asarray(variance)[..., None] + by_depth**2)


def _grown(rejected: Array, growth: Array) -> Array:
    product = np.minimum(rejected * growth, 1e6)
    held = (1.0 + rejected**SATURATION) / (1.0 + product**SATURATION)
    saturated = product * held ** (1.0 / SATURATION)
    grown = np.where(growth == 1.0, product, saturated)
    return np.minimum(grown, 1.0)


def rejected_before(share: float, growth: float) -> float:
    """r from grown[r, g]."""
    y = share**SATURATION
    g = growth**SATURATION
    root = math.sqrt((1.0 - y) ** 2 + 4.0 * y / g)
    # not (root - (1 - y)) / 2, of which nothing is left where y is small
    solution = 2.0 * y / g / (root + (1.0 - y))
    return float(solution ** (1.0 / SATURATION))


def _check(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(
            f"'{name}' must be between {low:g} and {high:g}, not {value!r}"
        )


def sanitize(value: Any, low: float) -> Array:
    """A float array without NaN, infinity, or values below `low`. None is "all": as large as can
    be.
    """
    if value is None:
        value = LARGEST
    # fmax and fmin take the number where the other is NaN
    return np.fmin(np.fmax(np.asarray(value, dtype=np.float64), low), LARGEST)


class Runs(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Runs fitted to rates by position that were counted at gamma = `counted`."""

    x: Array
    """(logit a, log k)."""
    covariance: Array
    counted: int

    def tokens_per_step(self, gamma: Any, *, shift: Any = 0.0) -> tuple[Array, Array]:
        """E(gamma), and the probability that all gamma drafts are accepted, with logit(a) moved by
        `shift`; arrays broadcast."""
        gamma = np.asarray(gamma, dtype=np.int64)
        shift = np.asarray(shift, dtype=np.float64)
        shifts, row = np.unique(shift, return_inverse=True)
        gammas, column = np.unique(gamma, return_inverse=True)
        longer = _longer(self.x[0] + shifts[:, None], self.x[1])
        by_gamma = (len(shifts), len(gammas))
        steps = np.empty(by_gamma)
        whole = np.empty(by_gamma)
        for place, drafted in enumerate(gammas):
            steps[:, place] = longer[:, :: drafted + 1].sum(axis=-1)
            whole[:, place] = longer[:, drafted :: drafted + 1].sum(axis=-1)
        tokens = longer.sum(axis=-1)[:, None]
        where = row.reshape(shift.shape), column.reshape(gamma.shape)
        return (tokens / steps)[where], (whole / steps)[where]

    def log_ratio_error(self, gamma: Any, over: Any) -> Array:
        """One standard deviation of log(E(gamma) / E(over)); arrays broadcast."""
        gamma, over = np.broadcast_arrays(gamma, over)
        ratio = self._log_tokens[:, gamma] - self._log_tokens[:, over]
        gradient = (ratio[1:3] - ratio[3:5]) / (2 * STEP)
        of_counts = np.einsum("i...,ij,j...", gradient, self.covariance, gradient)
        of_shape = (SHAPE_ERROR * ratio[0]) ** 2
        return np.asarray(np.sqrt(np.maximum(of_counts, 0.0) + of_shape))

    @cached_property
    def _log_tokens(self) -> Array:
        """log E of gamma = 0..MAX_GAMMA on the last axis, at x and a STEP up and down in either of
        its parts.
        """
        gammas = np.arange(MAX_GAMMA + 1)
        steps = np.eye(2) * STEP
        tokens = []
        for step in (np.zeros(2), *steps, *-steps):
            moved = msgspec.structs.replace(self, x=self.x + step)
            expected, _ = moved.tokens_per_step(gammas)
            tokens.append(expected)
        return np.log(tokens)


@lru_cache(maxsize=64)
def fit_runs(rates: tuple[float, ...], stderr: tuple[float, ...]) -> Runs | None:
    """Runs with these conditional rates by position, counted at gamma = their number; None where
    they do not rise.
    """
    from scipy.optimize import least_squares

    gamma = len(rates)
    if gamma < 2 or rates[-1] <= rates[0] or not 0.0 < rates[0] < 1.0:
        return None
    counted = np.array(rates)
    error = np.maximum(stderr, 1e-4)

    def residuals(x: Array) -> Array:
        survivors = _survivors(x, gamma)
        predicted = survivors[1:] / survivors[:-1]
        of_counts = (predicted - counted) / error
        of_prior = (x[1] - PRIOR[0]) / PRIOR[1]
        return np.append(of_counts, of_prior)

    first_logit = math.log(rates[0] / (1.0 - rates[0]))
    solved = least_squares(
        residuals,
        [first_logit, 1.0],
        bounds=([-12, -4], [12, 12]),
    )
    jacobian = np.asarray(solved.jac, dtype=np.float64)
    covariance = np.linalg.pinv(jacobian.T @ jacobian)
    return Runs(
        x=np.asarray(solved.x, dtype=np.float64),
        covariance=np.asarray(covariance, dtype=np.float64),
        counted=gamma,
    )


def _longer(logit: Any, log_k: float) -> Array:
    """R_j of j = 0..LONGEST − 1 on the last axis."""
    a = 1.0 / (1.0 + np.exp(-np.asarray(logit)))
    k = math.exp(log_k)
    i = np.arange(1, LONGEST)
    goes_on = (a * k + i - 1.0) / (k + i - 1.0)
    later = np.cumprod(goes_on, axis=-1)
    begins = np.ones((*later.shape[:-1], 1))
    return np.concatenate([begins, later], axis=-1)


def _survivors(x: Array, gamma: int) -> Array:
    """S_i of i = 0..gamma."""
    longer = _longer(x[0], x[1])
    missing = -len(longer) % (gamma + 1)
    padded = np.append(longer, np.zeros(missing))
    steps = padded.reshape(-1, gamma + 1)
    survivors = steps.sum(axis=0) / steps[:, 0].sum()
    return np.asarray(survivors)


def sequence_rates(mean: float, spread: float) -> tuple[Array, Array]:
    """Rates of sequences and their weights: a Beta distribution by midpoints. One node where the
    spread is 0.
    """
    variance = min(spread**2, 0.95 * mean * (1.0 - mean))
    if variance <= 1e-12:
        return np.array([mean]), np.array([1.0])
    total = mean * (1.0 - mean) / variance - 1.0
    reach = 8.0 * math.sqrt(variance)
    low = max(0.0, mean - reach)
    high = min(1.0, mean + reach)
    nodes = low + (high - low) * (np.arange(NUM_NODES) + 0.5) / NUM_NODES
    of_accepting = (mean * total - 1.0) * np.log(nodes)
    of_rejecting = ((1.0 - mean) * total - 1.0) * np.log1p(-nodes)
    log_density = of_accepting + of_rejecting
    weights = np.exp(log_density - log_density.max())
    return nodes, weights / weights.sum()


HALF_ERFC = np.frompyfunc(
    lambda sigmas: 0.5 * math.erfc(-sigmas / math.sqrt(2.0)), 1, 1
)

CERTAIN_SIGMAS = 9.0
"""Beyond these, a normal distribution's tail holds less than 1e-18."""


def exact_normal_cdf(sigmas: Array) -> Array:
    """The probability of a normal variable below this many standard deviations, exactly: importing
    SciPy's takes longer than the rest of a plan that needs it."""
    below = np.where(sigmas > 0.0, 1.0, 0.0)
    near = np.abs(sigmas) < CERTAIN_SIGMAS
    below[near] = HALF_ERFC(sigmas[near])
    return below


def static_batch_efficiency(
    profile: Any,
    *,
    budget: Any,
    context: float,
    gamma: int,
    batch_size: int,
    gen_len: int,
) -> float:
    """Share of the steady-state throughput that a static batch of equal lengths keeps (1 where
    nothing is drafted).

    `profile` is an AcceptanceProfile: its law and its spread are used.

    Raises ConfigError for a batch or a length below 1.
    """
    if batch_size < 1 or gen_len < 1 or gamma < 0:
        raise ConfigError(
            "a static batch needs batch size and generated length of at least 1, and gamma of at "
            "least 0"
        )
    if gamma == 0:
        return 1.0
    law = profile.law
    first_rate = float(law.first_rate(budget=budget, context=context))
    of_mean_rate = survival(law.rates_after(first_rate, gamma))
    expected = 1.0 + float(of_mean_rate.sum())

    nodes, weights = sequence_rates(first_rate, profile.spread)
    survivors = survival(law.rates_after(nodes, gamma))
    accepted = survivors.sum(axis=-1)
    odd = 2.0 * np.arange(1, gamma + 1) - 1.0
    variance = (survivors * odd).sum(axis=-1) - accepted**2
    emitted = 1.0 + accepted
    mean = np.clip(emitted * expected / float(weights @ emitted), 1.0, gamma + 1.0)

    fewest = float(math.ceil(gen_len / (gamma + 1)))
    slowest = fewest
    stride = max(1, math.ceil((gen_len - fewest) / MAX_STEPS_EVALUATED))
    steps = np.arange(fewest, gen_len, stride, dtype=np.float64)[:, None]
    if steps.size:
        deviation = np.sqrt(np.maximum(steps * variance, 1e-9))
        beyond = steps * mean - gen_len + 0.5
        finished = exact_normal_cdf(beyond / deviation) @ weights
        all_finished = np.clip(finished, 0.0, 1.0) ** batch_size
        slowest += stride * float(np.sum(1.0 - all_finished))
    return min(1.0, gen_len / (expected * slowest))


INSIDE = 1e-9


class Beyond(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rates go on beyond the positions that are known."""

    position: int
    """The last known position."""
    slope: float = 0.0
    """Change of the rate's logit per unit of ln(position)."""
    error: float = 0.0
    """Standard deviation of the slope."""

    def octaves(self, gamma_max: int) -> Array:
        """ln(i / position) of positions i = 1..gamma_max, 0 up to the last known one."""
        positions = np.arange(1, gamma_max + 1, dtype=np.float64)
        return np.log(np.maximum(positions / self.position, 1.0))

    def continued(self, rates: Array, variance: Array) -> tuple[Array, Array]:
        """Rates by position on a last axis and the deviation of log(−log rate), from rates that are
        taken as those of the last known position, and the variance without the slope's."""
        octaves = self.octaves(rates.shape[-1])
        if self.slope:
            rates = from_logit(logit(rates) + self.slope * octaves)
        of_slope = self.error * octaves * log_deviation(rates)
        return rates, np.sqrt(variance + of_slope**2)


def clipped_rate(rates: Any) -> Array:
    """Rates, kept so far from 0 and 1 that their logits are finite."""
    return np.asarray(np.clip(rates, INSIDE, 1.0 - INSIDE))


def logit(rate: Any) -> Array:
    """ln(rate / (1 − rate))."""
    inside = clipped_rate(rate)
    return np.asarray(np.log(inside / (1.0 - inside)))


def from_logit(value: Any) -> Array:
    """The rate with this logit."""
    return np.asarray(1.0 / (1.0 + np.exp(-np.asarray(value))))


def log_deviation(rate: Any) -> Array:
    """Standard deviation of log(−log rate) per standard deviation of the rate's logit."""
    inside = np.clip(rate, 1e-12, 1.0 - 1e-12)
    return np.asarray((1.0 - inside) / -np.log(inside))


LEAST_SHARE = 1e-4
"""Nearest to 0 and 1 that the accepted share of drafts is taken to lie, where it has an error."""

MOST_LOGIT_ERROR = 3.0
"""Most of one standard deviation of the accepted share's logit: the share may be anything then."""


def tokens_at(sigmas: Any, middle: Any, gamma: Any, relative_error: Any) -> Array:
    """Tokens per step this many standard deviations above their middle, where `relative_error` is
    one of their relative deviation at it; the three last and `sigmas` broadcast."""
    middle = np.asarray(middle, dtype=np.float64)
    error = np.asarray(relative_error, dtype=np.float64)
    most = np.maximum(np.asarray(gamma, dtype=np.float64), 1.0)
    share = np.clip((middle - 1.0) / most, LEAST_SHARE, 1.0 - LEAST_SHARE)
    growth = share * (1.0 - share) * most / middle
    deviation = np.minimum(error / growth, MOST_LOGIT_ERROR)
    odds = share / (1.0 - share) * np.exp(sigmas * deviation)
    is_sure = (error <= 0.0) | (np.asarray(gamma) <= 0)
    return np.asarray(np.where(is_sure, middle, 1.0 + most * odds / (1.0 + odds)))
