"""Does the law of acceptance extrapolate? Fits it on blocks of up to 8 drafts, and predicts the tokens per step at 16.

Each (dataset, method, context, budget) has its own rate at position 1, drawn towards the power law of its group's
budgets; concentration, drift and its depth are shared by all groups of a model. A group without a row of gamma ≤ 8
leaves one budget out instead and predicts it from the others. A table of rates against context (no gamma) leaves out
one context at a time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from magicdec.comparison import ErrorSummary
from magicdec.counts import Array, expected_tokens_per_step, survival
from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance.law import Law
from magicdec.validate.rows import Size, published, read_lines, read_rows

DEFAULT_TABLES = ("acceptance_snapkv.csv", "acceptance_llama31_8b_streamingllm512_pg19.csv")
DEEPEST_FITTED = 8
TOKENS_PER_ROW = 800.0
"""Tokens that a row of the published logs was measured over (80 tokens of 10 prompts); it sets the noise expected."""
DESIGN_EFFECT = 2.0
"""Variance of clustered tokens over that of independent ones: tokens of one prompt are alike."""
RELATIVE_FLOOR = 0.003
CELL_DEVIATION = 0.3
"""How far log(1 - alpha) of one budget strays from its group's power law (prior standard deviation)."""
SHAPE_PRIORS = ((math.log(50.0), 1.2), (math.log(0.2), 2.0), (math.log(2.0), 0.5))
"""Mean and standard deviation of the logs of concentration, drift and drift depth."""
MAX_GAMMA = 64
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class _Row(
    msgspec.Struct, frozen=True, kw_only=True, rename={"context": "context_len", "budget": "draft_budget_tokens"}
):
    model: str
    dataset: str = ""
    draft_method: str = ""
    context: Size
    budget: Size

    @property
    def group(self) -> tuple[str, str, str]:
        return self.model, self.dataset, self.draft_method


class Observation(_Row, frozen=True, kw_only=True):
    """Mean tokens per step of one (context, budget, gamma) of a group."""

    gamma: Annotated[int, msgspec.Meta(ge=1, le=MAX_GAMMA)]
    tokens_per_step: Annotated[float, msgspec.Meta(ge=1)] | None = None
    accepted_over_drafted: Share | None = None

    def __post_init__(self) -> None:
        if self.tokens_per_step is None and self.accepted_over_drafted is None:
            raise ConfigError("columns 'tokens_per_step' and 'accepted_over_drafted' are empty")
        if not self.tokens <= self.gamma + 1.0 + 1e-6:
            raise ConfigError(f"column 'tokens_per_step' must be at most gamma + 1, not {self.tokens:g}")

    @property
    def tokens(self) -> float:
        if self.tokens_per_step is not None:
            return self.tokens_per_step
        return 1.0 + self.gamma * (self.accepted_over_drafted or 0.0)

    @property
    def cell(self) -> tuple[tuple[str, str, str], float, float]:
        return self.group, self.context, self.budget


class Rate(_Row, frozen=True, kw_only=True):
    """The acceptance rate of one (context, budget) of a group."""

    acceptance_rate: Share


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Tokens per step of rows that were not fitted, by the law and by a constant rate."""

    shape: Law
    tokens: Array
    independent: Array


def validate_acceptance(paths: Sequence[str | Path] | None = None) -> dict[str, Any]:
    """One group per file × (model, dataset, method); fractions are plain numbers.

    Raises ConfigError naming the file, line or column that cannot be used.
    """
    groups: list[dict[str, Any]] = []
    refused: list[str] = []
    for path in paths or published(*DEFAULT_TABLES):
        if "gamma" in read_lines(path)[0]:
            observations, lines = read_rows([path], Observation, one_of=("tokens_per_step", "accepted_over_drafted"))
            groups += _depth_groups(Path(path), observations)
        else:
            rates, lines = read_rows([path], Rate)
            groups += _context_groups(Path(path), rates)
        refused += lines
    return {"groups": groups, "refused": refused}


def _depth_groups(path: Path, observations: Sequence[Observation]) -> list[dict[str, Any]]:
    by_model: dict[str, list[Observation]] = defaultdict(list)
    for each in observations:
        by_model[each.group[0]].append(each)
    groups = []
    for of_model in by_model.values():
        fitted, unfitted, left_out = split_rows(of_model)
        if not unfitted or not fitted:
            groups += [_nothing_to_predict(path, group, of_model) for group in sorted({o.group for o in of_model})]
            continue
        prediction = fit_and_predict(fitted, unfitted)
        for group in sorted({each.group for each in of_model}):
            groups.append(_summary(path, group, of_model, unfitted, prediction, left_out.get(group)))
    return groups


def split_rows(
    observations: Sequence[Observation],
) -> tuple[list[Observation], list[Observation], dict[tuple[str, str, str], float]]:
    """Rows to fit on, rows to predict, and the budget left out of each group that has no short blocks."""
    fitted, unfitted, left_out = [], [], {}
    for group in sorted({each.group for each in observations}):
        rows = [each for each in observations if each.group == group]
        short = [each for each in rows if each.gamma <= DEEPEST_FITTED]
        if short:
            fitted += short
            unfitted += [each for each in rows if each.gamma > DEEPEST_FITTED]
            continue
        budget = _budget_to_leave_out(rows)
        if budget is None:
            fitted += rows
            continue
        left_out[group] = budget
        fitted += [each for each in rows if each.budget != budget]
        unfitted += [each for each in rows if each.budget == budget]
    return fitted, unfitted, left_out


def _budget_to_leave_out(rows: Sequence[Observation]) -> float | None:
    """The budget inside the range of most contexts (the smaller of equals); None where there is no third one."""
    budgets = sorted({each.budget for each in rows})
    contexts = sorted({each.context for each in rows})

    def inside(budget: float) -> int:
        measured = [[each.budget for each in rows if each.context == context] for context in contexts]
        return sum(budget in them and min(them) < budget < max(them) for them in measured)

    best = max(budgets, key=lambda budget: (inside(budget), -budget))
    return best if inside(best) else None


@dataclass(frozen=True, kw_only=True)
class _Design:
    """Where the parameters are: shared shape, then slope per group, level per (group, context), deviation per cell."""

    groups: list[tuple[str, str, str]]
    levels: list[tuple[tuple[str, str, str], float]]
    cells: list[tuple[tuple[str, str, str], float, float]]
    centre: float
    has_shape: bool

    @property
    def num_shape(self) -> int:
        return len(SHAPE_PRIORS) if self.has_shape else 0

    def shape(self, x: Array) -> Law:
        if not self.has_shape:
            return Law(rejection=0.5)
        concentration, drift, depth = np.exp(x[: self.num_shape]).tolist()
        return Law(rejection=0.5, concentration=concentration, drift=drift, drift_depth=depth)

    def split(self, x: Array) -> tuple[Array, Array, Array]:
        first, second = self.num_shape, self.num_shape + len(self.groups)
        return x[first:second], x[second : second + len(self.levels)], x[second + len(self.levels) :]

    def first_rates(self, x: Array, rows: Sequence[Observation]) -> Array:
        slopes, levels, deviations = self.split(x)
        group = [self.groups.index(each.group) for each in rows]
        level = [self._nearest_level(each) for each in rows]
        deviation = np.array(
            [deviations[self.cells.index(c)] if (c := each.cell) in self.cells else 0.0 for each in rows]
        )
        by_budget = np.log(np.array([each.budget for each in rows]) / self.centre)
        rates: Array = -np.expm1(np.minimum(levels[level] - slopes[group] * by_budget + deviation, -1e-9))
        return rates

    def _nearest_level(self, row: Observation) -> int:
        own = [index for index, (group, _) in enumerate(self.levels) if group == row.group]
        return min(own, key=lambda index: abs(math.log(self.levels[index][1] / row.context)))


def fit_and_predict(fitted: Sequence[Observation], unfitted: Sequence[Observation]) -> Prediction:
    """Fits the law, and a constant rate per cell, on the same rows; predicts the others by both."""
    with_shape, without = (fit_cells(fitted, has_shape=flag) for flag in (True, False))
    return Prediction(
        shape=with_shape[0].shape(with_shape[1]),
        tokens=_tokens(*with_shape, unfitted)[0],
        independent=_tokens(*without, unfitted)[0],
    )


def _tokens(design: _Design, x: Array, rows: Sequence[Observation]) -> tuple[Array, Array]:
    """Mean tokens per step of the rows, and the variance of one step's."""
    gammas = np.array([each.gamma for each in rows])
    rates = design.shape(x).rates_after(design.first_rates(x, rows), int(gammas.max()))
    positions = np.arange(1, rates.shape[-1] + 1)
    survivors = np.where(positions <= gammas[:, None], survival(rates), 0.0)
    mean = survivors.sum(axis=-1)
    variance: Array = (survivors * (2.0 * positions - 1.0)).sum(axis=-1) - mean**2
    return expected_tokens_per_step(rates, gammas), np.maximum(variance, 0.0)


def fit_cells(rows: Sequence[Observation], *, has_shape: bool) -> tuple[_Design, Array]:
    from scipy.optimize import least_squares

    design = _Design(
        groups=sorted({each.group for each in rows}),
        levels=sorted({(each.group, each.context) for each in rows}),
        cells=sorted({each.cell for each in rows}),
        centre=math.exp(float(np.mean([math.log(each.budget) for each in rows]))),
        has_shape=has_shape,
    )
    priors = [*(SHAPE_PRIORS if has_shape else ()), *[(0.5, 0.3)] * len(design.groups)]
    priors += [(math.log(0.1), 3.0)] * len(design.levels) + [(0.0, CELL_DEVIATION)] * len(design.cells)
    mean, deviation = np.array(priors).T

    def noise(x: Array) -> Array:
        tokens, variance = _tokens(design, x, rows)
        sampling = DESIGN_EFFECT * variance * tokens / TOKENS_PER_ROW
        deviation_of_row: Array = np.sqrt(sampling + (RELATIVE_FLOOR * tokens) ** 2)
        return deviation_of_row

    x = mean.copy()
    for _ in range(3):  # the noise follows from the law, so it is held fixed while the law is fitted
        solved = least_squares(_residuals(design, rows, noise(x), mean, deviation), x, max_nfev=60)
        x = np.asarray(solved.x, dtype=np.float64)
    return design, x


def _residuals(
    design: _Design, rows: Sequence[Observation], scale: Array, mean: Array, deviation: Array
) -> Callable[[Array], Array]:
    observed = np.array([each.tokens for each in rows])

    def residuals(x: Array) -> Array:
        return np.concatenate([(_tokens(design, x, rows)[0] - observed) / scale, (x - mean) / deviation])

    return residuals


def _summary(
    path: Path,
    group: tuple[str, str, str],
    rows: Sequence[Observation],
    unfitted: Sequence[Observation],
    prediction: Prediction,
    left_out: float | None,
) -> dict[str, Any]:
    measured = np.array([each.tokens for each in unfitted])
    chosen = np.array([each.group == group for each in unfitted])
    deepest = max((each.gamma for each in unfitted if each.group == group), default=None)

    def error(predicted: Array) -> float | None:
        at_deepest = chosen & np.array([each.gamma == deepest for each in unfitted])
        if not at_deepest.any():
            return None
        return ErrorSummary.of(predicted[at_deepest] / measured[at_deepest] - 1.0).mape

    return {
        "name": f"{path.stem}/{'/'.join(part for part in group if part)}",
        "rows": sum(each.group == group for each in rows),
        "rows_unfitted": int(chosen.sum()),
        "gamma": deepest,
        "tokens_per_step_mape": error(prediction.tokens),
        "tokens_per_step_mape_iid": error(prediction.independent),
        "held_out": f"budget {left_out:g}" if left_out is not None else f"gamma > {DEEPEST_FITTED}",
        "concentration": prediction.shape.concentration,
        "drift": prediction.shape.drift,
        "drift_depth": prediction.shape.drift_depth,
    }


def _nothing_to_predict(path: Path, group: tuple[str, str, str], rows: Iterable[Observation]) -> dict[str, Any]:
    return {
        "name": f"{path.stem}/{'/'.join(part for part in group if part)}",
        "rows": sum(each.group == group for each in rows),
        "rows_unfitted": 0,
        "tokens_per_step_mape": None,
        "tokens_per_step_mape_iid": None,
        "held_out": "nothing: neither gamma above 8 nor a third budget",
    }


def _context_groups(path: Path, rows: Sequence[Rate]) -> list[dict[str, Any]]:
    """Tables of one rate per context: each is predicted from the others, and compared with their plain mean."""
    by_group: dict[tuple[str, ...], list[Rate]] = defaultdict(list)
    for row in rows:
        by_group[row.group].append(row)
    groups = []
    for group, members in by_group.items():
        contexts, budgets, rates = np.array([(row.context, row.budget, row.acceptance_rate) for row in members]).T
        keep = ~np.eye(len(members), dtype=bool)
        predicted = np.full(len(members), np.nan)
        if len(members) >= 3:
            predicted = np.array([_rate_from_others(contexts, budgets, rates, kept) for kept in keep])
        enough = len(members) >= 3
        constant = np.array([rates[kept].mean() for kept in keep]) if enough else predicted
        groups.append(
            {
                "name": f"{path.stem}/{'/'.join(part for part in group if part)}",
                "rows": len(members),
                "rows_unfitted": len(members) if enough else 0,
                "tokens_per_step_mape": None,
                "tokens_per_step_mape_iid": None,
                "acceptance_rate_mape": ErrorSummary.of(predicted / rates - 1.0).mape if enough else None,
                "acceptance_rate_mape_constant": ErrorSummary.of(constant / rates - 1.0).mape if enough else None,
                "held_out": "one row at a time" if enough else "nothing: fewer than three rows",
            }
        )
    return groups


def _rate_from_others(contexts: Array, budgets: Array, rates: Array, kept: Any) -> float:
    """1 - alpha as A·S^e, with weak pulls to small exponents, at the row not kept."""
    x = np.log(contexts / 8192.0) if np.ptp(budgets) == 0 else np.log(contexts / budgets / 16.0)
    y = np.log(np.maximum(1.0 - rates, 1e-6))
    matrix = np.stack([np.ones_like(x), x], axis=1)
    ridge = np.diag([0.0, 0.1])
    left, right = matrix[kept].T @ matrix[kept] + ridge, matrix[kept].T @ y[kept]
    at = int(np.flatnonzero(~kept)[0])
    return float(1.0 - np.exp(matrix[at] @ np.linalg.solve(left, right)))
