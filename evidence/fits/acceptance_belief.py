"""Fits the belief about acceptance to the published rates, and writes what plans read.

    python -m evidence.fits.acceptance_belief            fit, and write belief.json.gz
    python -m evidence.fits.acceptance_belief --is-fitted  condition on the rates anew, and write
    python -m evidence.fits.acceptance_belief --folds 5  fit without each fifth of the models, predict it

The standard deviations of the levels are fitted in two steps. The marginal likelihood of all rows
gives a start, and weights of Student's t for the noise and the levels in HEAVY (expectation and
maximisation, in turns). Then they maximise what is asked of a belief: the density of what is left
out, by model, source, task of a checkpoint, and row (`LEFT_OUT`), under a t distribution. A weak
prior keeps each near 0.2 logits (0.1 for slopes).

Libraries of mixed models fit few crossed levels, none with slopes, weights and features with priors
at once. A thousand rows make one covariance matrix; PyTorch differentiates the density of what is
left out, SciPy maximises it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

from evidence import published_rates
from evidence.beliefs import summary_line, validation
from evidence.published_rates import (
    Evidence,
    Rate,
    distinct,
    read_rates,
)
from magicdec.counts import Array
from magicdec.files import write_atomic
from magicdec.perfmodel.acceptance import belief
from magicdec.perfmodel.acceptance.belief import (
    HEAVY,
    LEVELS,
    Level,
    Point,
    Scales,
    Situation,
)

USUAL_SD = 0.2
USUAL_SLOPE_SD = 0.1
USUAL_NOISE = 0.15
PRIOR_WEIGHT = 0.5
SLOPE_PRIOR_WEIGHT = 2.0
DEGREES_OF_ROWS = 5.0
DEGREES_OF_LEVELS = 4.0
DEGREES_LEFT_OUT = 6.0
ROUNDS = 3
LIKELIHOOD_STEPS = 60
LEFT_OUT_STEPS = 30
START_SD = 0.2
MOST_SD = 1.2
MOST_SLOPE_SD = 0.5
"""Rates of positions change with ln i by about this much in the sources that count several gammas;
a wider prior would explain by the depth what differs between sources."""
LEFT_OUT: tuple[tuple[float, Callable[[Situation], str]], ...] = (
    (1.0, lambda at: at.model),
    (0.5, lambda at: at.source),
    (1.0, lambda at: f"{at.checkpoint}|{at.task}"),
)
"""Groups left out at a time, and how much it counts."""
NOT_FITTED = ("self",)
"""Groups whose rows tell no standard deviation: many small samples of few texts. Beliefs are
conditioned on them as on all others."""
LEAST_CHECKPOINTS = 3
"""Checkpoints that share a value of a level, for it to be fitted once for all."""
LEAST_CHECKPOINTS_OF_CLASS = 2
"""Checkpoints that share a class of text, for it to be fitted once: some are told of few look-ups."""
ROW_WEIGHT = 0.25
"""Weight of single rows that others of their run are kept of: they tell the noise."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Scales that fit some rates, and the weight of each row."""

    scales: Scales
    row_weights: Array


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Rates as matrices: their logits, and the prior covariance that features and levels give."""

    points: list[Point]
    logits: Array
    features: Array
    matches: list[Array]
    """Matches of each level, at a standard deviation of 1."""
    rough: Array
    usual: Array
    """Logarithms of the usual standard deviations: levels, noise, noise of rough rows."""
    held: Array
    """Weight of the prior of each."""


def level_matches(points: Sequence[Point], level: Level) -> Any:
    """Products of a level's covariate where points share its value, 0 elsewhere: [points, points]."""
    keys = belief.level_keys([point.situation for point in points], level)
    values = np.array([belief.COVARIATES[level.covariate](point) for point in points])
    return (np.array(keys)[:, None] == np.array(keys)) * np.outer(values, values)


def prepared(rates: Sequence[Rate]) -> Prepared:
    read = [published_rates.point_of(rate) for rate in rates]
    points = [point for point, _ in read]
    matrix = belief.feature_matrix(points)
    is_slope = np.array([level.covariate != "one" for level in LEVELS])
    usual_sd = np.where(is_slope, USUAL_SLOPE_SD, USUAL_SD)
    weights = np.where(is_slope, SLOPE_PRIOR_WEIGHT, PRIOR_WEIGHT)
    return Prepared(
        points=points,
        logits=np.array([logit for _, logit in read]) - belief.lost_logits(points),
        features=matrix @ matrix.T,
        matches=[level_matches(points, level) for level in LEVELS],
        rough=np.array([rate.is_rough for rate in rates], dtype=np.float64),
        usual=np.log([*usual_sd, USUAL_NOISE, USUAL_NOISE]),
        held=np.array([*weights, PRIOR_WEIGHT, PRIOR_WEIGHT]),
    )


def fit(rates: Sequence[Rate]) -> Fit:
    data = prepared(rates)
    x, row_weights, weights = _most_likely(data)
    x = _best_left_out(data, rates, x, row_weights)
    return Fit(
        scales=Scales(
            levels={
                level.name: float(np.exp(log_sd))
                for level, log_sd in zip(LEVELS, x, strict=False)
            },
            noise=float(np.exp(x[-2])),
            rough=float(np.exp(x[-1])),
            weights={
                name: {
                    key: round(value, 3)
                    for key, value in values.items()
                    if not key.startswith("\0")
                }
                for name, values in weights.items()
            },
        ),
        row_weights=row_weights,
    )


def _most_likely(data: Prepared) -> tuple[Array, Array, dict[str, dict[str, float]]]:
    """Logarithms of the standard deviations that make the rows likeliest, and the weights of rows
    and of the values of heavy levels."""
    row_weights = np.ones(len(data.logits))
    weights: dict[str, dict[str, float]] = {}

    def covariance(at: Array) -> Array:
        total = data.features.copy()
        for log_sd, match in zip(at, data.matches, strict=False):
            total += np.exp(2.0 * log_sd) * match
        noise = np.exp(2.0 * at[-2]) + data.rough * np.exp(2.0 * at[-1])
        total[np.diag_indices_from(total)] += noise / row_weights
        return total

    def loss(at: Array) -> tuple[float, Array]:
        factor = cho_factor(covariance(at), lower=True, check_finite=False)
        scaled = cho_solve(factor, data.logits)
        excess = cho_solve(factor, np.eye(len(scaled))) - np.outer(scaled, scaled)
        diagonal = np.diag(excess) / row_weights
        gradient = [np.sum(excess * match) for match in data.matches]
        gradient += [diagonal.sum(), (diagonal * data.rough).sum()]
        likelihood = 0.5 * data.logits @ scaled + np.log(np.diag(factor[0])).sum()
        away = at - data.usual
        prior = 0.5 * (data.held * away**2).sum()
        return likelihood + prior, np.exp(2.0 * at) * np.array(
            gradient
        ) + data.held * away

    situations = [point.situation for point in data.points]
    x = np.full(len(data.usual), np.log(START_SD))
    for number in range(ROUNDS):
        steps = LIKELIHOOD_STEPS if number == 0 else LIKELIHOOD_STEPS // 4
        x = _minimum(loss, x, steps)
        inverse: Array = np.asarray(np.linalg.inv(covariance(x)), np.float64)
        scaled = inverse @ data.logits
        for index, level in enumerate(LEVELS):
            if level.name in HEAVY:
                keys = belief.level_keys(situations, level)
                values = _level_weights(
                    keys, weights.get(level.name, {}), x[index], inverse, scaled
                )
                weights[level.name] = values
                own = np.array([values[key] for key in keys])
                equal = level_matches(data.points, level)
                data.matches[index] = equal / own[:, None]
        usual_noise = np.exp(2.0 * x[-2]) + data.rough * np.exp(2.0 * x[-1])
        noise = usual_noise / row_weights
        left = (noise * scaled) ** 2 + noise - noise**2 * np.diag(inverse)
        row_weights = (DEGREES_OF_ROWS + 1.0) / (DEGREES_OF_ROWS + left / usual_noise)
    return x, row_weights, weights


def _best_left_out(
    data: Prepared, rates: Sequence[Rate], start: Array, row_weights: Array
) -> Array:
    """Logarithms of the standard deviations under which what is left out is likeliest."""
    situations = [rate.situation for rate in rates]
    is_counted = np.array([rate.is_chain for rate in rates])
    groups = [
        (
            weight,
            [
                torch.from_numpy(rows)
                for rows in _groups([key(at) for at in situations])
            ],
        )
        for weight, key in LEFT_OUT
    ]
    runs = _groups([belief.run_of(at) for at in situations])
    siblings = torch.from_numpy(
        np.concatenate([rows for rows in runs if len(rows) > 1])
    )
    counted = torch.from_numpy(is_counted)
    logits = torch.from_numpy(data.logits)
    features = torch.from_numpy(data.features)
    matches = [torch.from_numpy(match) for match in data.matches]
    rough, trust = torch.from_numpy(data.rough), torch.from_numpy(row_weights)
    usual, held = torch.from_numpy(data.usual), torch.from_numpy(data.held)

    def surprise(missed: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        """Minus the logarithm of the t density, up to a constant."""
        scale = variance * (DEGREES_LEFT_OUT - 2.0) / DEGREES_LEFT_OUT
        far = torch.log1p(missed**2 / scale / DEGREES_LEFT_OUT)
        return (0.5 * torch.log(scale) + 0.5 * (DEGREES_LEFT_OUT + 1.0) * far).sum()

    def loss(at: Array) -> tuple[float, Array]:
        x = torch.tensor(at, requires_grad=True)
        total = features
        for sd, match in zip(x[: len(matches)], matches, strict=True):
            total = total + torch.exp(2.0 * sd) * match
        noise = (torch.exp(2.0 * x[-2]) + rough * torch.exp(2.0 * x[-1])) / trust
        inverse = torch.linalg.inv(total + torch.diag(noise))
        scaled = inverse @ logits
        sum_of = 0.5 * (held * (x - usual) ** 2).sum()
        for weight, members in groups:
            for rows in members:
                within = torch.linalg.inv(inverse[rows][:, rows])
                seen = counted[rows]
                missed = (within @ scaled[rows])[seen]
                sum_of = sum_of + weight * surprise(
                    missed, torch.diagonal(within)[seen]
                )
        alone = 1.0 / torch.diagonal(inverse)[siblings]
        sum_of = sum_of + ROW_WEIGHT * surprise(alone * scaled[siblings], alone)
        sum_of.backward()
        assert x.grad is not None
        return float(sum_of.detach()), x.grad.numpy()

    return _minimum(loss, start, LEFT_OUT_STEPS)


def _minimum(
    loss: Callable[[Array], tuple[float, Array]], start: Array, steps: int
) -> Array:
    most = [MOST_SD if level.covariate == "one" else MOST_SLOPE_SD for level in LEVELS]
    bounds = [(-6.0, float(np.log(sd))) for sd in (*most, MOST_SD, MOST_SD)]
    start = np.minimum(start, [high for _, high in bounds])
    options = {"maxiter": steps}
    found: Any = minimize(  # type: ignore[call-overload]
        loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options
    )
    return np.asarray(found.x)


def _groups(keys: Sequence[str]) -> list[npt.NDArray[np.intp]]:
    """Rows of each key."""
    names = np.array(keys)
    return [np.flatnonzero(names == name) for name in np.unique(names)]


def _level_weights(
    keys: list[str],
    weights: dict[str, float],
    log_sd: float,
    inverse: Array,
    scaled: Array,
) -> dict[str, float]:
    """Weights of a level's values under Student's t, from how far each lies from 0."""
    names = sorted(set(keys))
    place = {name: number for number, name in enumerate(names)}
    members = np.zeros((len(keys), len(names)))
    members[np.arange(len(keys)), [place[key] for key in keys]] = 1.0
    usual = np.exp(2.0 * log_sd)
    prior = usual / np.array([weights.get(name, 1.0) for name in names])
    mean = prior * (members.T @ scaled)
    variance = prior - prior**2 * np.einsum("ij,ij->j", members, inverse @ members)
    new = (DEGREES_OF_LEVELS + 1.0) / (DEGREES_OF_LEVELS + (mean**2 + variance) / usual)
    return dict(zip(names, new.tolist(), strict=True))


def shared_levels(rates: Sequence[Rate]) -> dict[str, list[str]]:
    """Values of the levels that several checkpoints share."""
    shared: dict[str, list[str]] = {}
    for level in belief.SHARED_LEVELS:
        checkpoints: dict[str, set[str]] = {}
        for rate in rates:
            key = level.key(rate.situation)
            checkpoints.setdefault(key, set()).add(rate.situation.checkpoint)
        if level.name == "class":
            least = LEAST_CHECKPOINTS_OF_CLASS
        else:
            least = LEAST_CHECKPOINTS
        shared[level.name] = sorted(
            key for key, known in checkpoints.items() if key and len(known) >= least
        )
    return shared


def fit_of(rates: Sequence[Rate]) -> Fit:
    """The fit to those rates that tell standard deviations, with a weight of each rate."""
    is_fitted = np.array([rate.situation.group not in NOT_FITTED for rate in rates])
    found = fit([rate for rate, own in zip(rates, is_fitted, strict=True) if own])
    row_weights = np.ones(len(rates))
    row_weights[is_fitted] = found.row_weights
    return Fit(scales=found.scales, row_weights=row_weights)


def write(rates: Sequence[Rate], *, is_fitted: bool = False) -> None:
    """Fits (or takes the shipped deviations: `is_fitted`), and writes what plans read."""
    if is_fitted:
        shipped = belief.fitted_belief().coefficients
        found = Fit(scales=shipped.scales, row_weights=np.array(shipped.row_weights))
    else:
        found = fit_of(rates)
    row_weights = found.row_weights
    further = distinct(read_rates(published_rates.FURTHER_RATES))
    coefficients = published_rates.posterior(
        rates, row_weights, shared_levels(rates), found.scales, further
    )
    text = published_rates.packed(coefficients)
    write_atomic(belief.COEFFICIENTS, text)
    print(f"{belief.COEFFICIENTS.name}: {len(rates)} rows, {len(text)} bytes")
    for name, sd in found.scales.levels.items():
        print(f"  {name:24} {sd:.3f}")
    print(f"  noise {found.scales.noise:.3f}, of rough rows {found.scales.rough:.3f}")


def check(rates: Sequence[Rate], folds: int) -> None:
    """Fits without each of some shares of the models, and predicts that share's rows: by the
    deviations fitted without them, and by the shipped ones, fitted with them."""
    names = sorted({rate.situation.model for rate in rates})
    order = np.random.default_rng(0).permutation(len(names))
    fold_of = {names[model]: number % folds for number, model in enumerate(order)}
    mean = np.zeros(len(rates))
    deviation = np.zeros(len(rates))
    known = np.zeros(len(rates))
    sure = np.zeros(len(rates))
    shipped = belief.fitted_belief().coefficients
    for fold in range(folds):
        is_out = np.array([fold_of[rate.situation.model] == fold for rate in rates])
        kept = [rate for rate, out in zip(rates, is_out, strict=True) if not out]
        fitted = fit_of(kept)
        weights = np.ones(len(rates))
        weights[~is_out] = fitted.row_weights
        evidence = Evidence.of(rates, fitted.scales, weights)
        groups = ["out" if out else f"kept {row}" for row, out in enumerate(is_out)]
        mean[is_out], deviation[is_out] = published_rates.given(
            evidence, groups, "out", fitted.scales
        )
        of_all = Evidence.of(rates, shipped.scales, np.array(shipped.row_weights))
        known[is_out], sure[is_out] = published_rates.given(
            of_all, groups, "out", shipped.scales
        )
    chosen = np.flatnonzero([rate.situation.group not in NOT_FITTED for rate in rates])
    some = [rates[int(row)] for row in chosen]
    found = validation(some, mean[chosen], deviation[chosen], leave_out="model")
    print(summary_line(f"models left out of the fit, {folds} folds", found))
    for group in found.groups:
        print(f"  {group}")
    found = validation(some, known[chosen], sure[chosen], leave_out="model")
    print(summary_line("the same left out, by the shipped deviations", found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folds", type=int, default=0)
    parser.add_argument(
        "--is-fitted", action="store_true", help="keep the shipped deviations"
    )
    parser.add_argument(
        "tables", nargs="*", type=Path, default=[published_rates.BELIEF_RATES]
    )
    given = parser.parse_args()
    rates = distinct([rate for path in given.tables for rate in read_rates(path)])
    if given.folds:
        check(rates, given.folds)
    else:
        write(rates, is_fitted=given.is_fitted)


if __name__ == "__main__":
    main()
