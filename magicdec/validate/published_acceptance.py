"""Does the law of acceptance extrapolate? Fits it on blocks of up to 8 drafts, and predicts the tokens per step at 16.

Each (dataset, method, context, budget) has its own rate at position 1, drawn towards the power law of its group's
budgets; concentration, drift and its depth are shared by all groups of a model. A group without a row of gamma ≤ 8
leaves one budget out instead and predicts it from the others. A table of rates against context (no gamma) leaves out
one context at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from magicdec.comparison import ErrorSummary
from magicdec.counts import Array, expected_tokens_per_step, survival
from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance.law import Law
from magicdec.validate.rows import Size, places, published, read_lines, read_rows

DEFAULT_TABLES = ("acceptance_snapkv.csv", "acceptance_llama31_8b_streamingllm512_pg19.csv")
DEEPEST_FITTED = 8
TOKENS_PER_ROW = 800.0
"""Tokens that a row of the published logs was measured over (80 tokens of 10 prompts); it sets the noise expected."""
DESIGN_EFFECT = 2.0
"""Variance of clustered tokens over that of independent ones: tokens of one prompt are alike."""
RELATIVE_FLOOR = 0.003
CELL_DEVIATION = 0.3
"""How far log(1 - alpha) of one budget strays from its group's power law (prior standard deviation)."""
SHAPE_PRIORS = {
    "concentration": (math.log(50.0), 1.2), "drift": (math.log(0.2), 2.0), "drift_depth": (math.log(2.0), 0.5)
}  # fmt: skip
"""Mean and standard deviation of the logarithms."""
MAX_GAMMA = 64
LEAST_ROWS = 3
NO_ERRORS = dict.fromkeys(("tokens_per_step_mape", "tokens_per_step_mape_iid"))
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Group = tuple[str, str, str]


class _Row(
    msgspec.Struct, frozen=True, kw_only=True, rename={"context": "context_len", "budget": "draft_budget_tokens"}
):
    model: str
    dataset: str = ""
    draft_method: str = ""
    context: Size
    budget: Size

    @property
    def group(self) -> Group:
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
    def cell(self) -> tuple[Group, float, float]:
        return self.group, self.context, self.budget


class Rate(_Row, frozen=True, kw_only=True):
    """The acceptance rate of one (context, budget) of a group."""

    acceptance_rate: Share


def validate_acceptance(paths: Sequence[str | Path] | None = None) -> dict[str, Any]:
    """One group per file × (model, dataset, method); fractions are plain numbers.

    Raises ConfigError naming the file, line or column that cannot be used.
    """
    groups: list[dict[str, Any]] = []
    refused: list[str] = []
    for path in paths or published(*DEFAULT_TABLES):
        observations: list[Observation] = []
        rates: list[Rate] = []
        if "gamma" in read_lines(path)[0]:
            observations, lines = read_rows([path], Observation, one_of=("tokens_per_step", "accepted_over_drafted"))
        else:
            rates, lines = read_rows([path], Rate)
        found = [
            group
            for places_of_model in places([row.model] for row in observations).values()
            for group in _depth_groups([observations[index] for index in places_of_model])
        ]
        found += [_context_group(group, [rates[i] for i in some]) for group, some in _by_group(rates).items()]
        groups += [{**group, "name": f"{Path(path).stem}/{group['name']}"} for group in found]
        refused += lines
    return {"groups": groups, "refused": refused}


def _by_group(rows: Sequence[_Row]) -> dict[Group, list[int]]:
    return places([row.group] for row in rows)


def _described(group: Group, rows: int, unfitted: int) -> dict[str, Any]:
    return {"name": "/".join(part for part in group if part), "rows": rows, "rows_unfitted": unfitted}


def _depth_groups(rows: Sequence[Observation]) -> list[dict[str, Any]]:
    """The groups of one model: errors of the law, and of a constant rate per cell fitted to the same rows."""
    fitted, unfitted, left_out = split_rows(rows)
    groups = []
    if unfitted and fitted:
        fits = {name: fit_cells(fitted, has_shape=name == "") for name in ("", "_iid")}
        shape = fits[""].law
        error = {name: fit.tokens(unfitted)[0] / [row.tokens for row in unfitted] - 1.0 for name, fit in fits.items()}
    for group, members in sorted(_by_group(rows).items()):
        own = [index for index, row in enumerate(unfitted) if row.group == group] if fitted else []
        found = _described(group, len(members), len(own))
        if not unfitted or not fitted:
            groups.append({**found, **NO_ERRORS, "held_out": "nothing: neither gamma above 8 nor a third budget"})
            continue
        deepest = max((unfitted[index].gamma for index in own), default=None)
        judged = [index for index in own if unfitted[index].gamma == deepest]
        budget = left_out.get(group)
        found["gamma"] = deepest
        found |= {
            f"tokens_per_step_mape{name}": ErrorSummary.of(errors[judged]).mape if judged else None
            for name, errors in error.items()
        }
        found["held_out"] = f"budget {budget:g}" if budget is not None else f"gamma > {DEEPEST_FITTED}"
        groups.append(found | {name: getattr(shape, name) for name in SHAPE_PRIORS})
    return groups


def split_rows(
    observations: Sequence[Observation],
) -> tuple[list[Observation], list[Observation], dict[Group, float]]:
    """Rows to fit on, rows to predict, and the budget left out of each group that has no short blocks."""
    fitted, unfitted, left_out = [], [], {}
    for group, members in sorted(_by_group(observations).items()):
        rows = [observations[index] for index in members]
        is_fitted = [row.gamma <= DEEPEST_FITTED for row in rows]
        if not any(is_fitted):
            budget = _budget_to_leave_out(rows)
            if budget is not None:
                left_out[group] = budget
            is_fitted = [row.budget != budget for row in rows]
        fitted += [row for row, kept in zip(rows, is_fitted, strict=True) if kept]
        unfitted += [row for row, kept in zip(rows, is_fitted, strict=True) if not kept]
    return fitted, unfitted, left_out


def _budget_to_leave_out(rows: Sequence[Observation]) -> float | None:
    """The budget inside the range of most contexts (the smaller of equals); None where there is no third one."""
    measured = [{row.budget for row in rows if row.context == context} for context in {row.context for row in rows}]

    def inside(budget: float) -> int:
        return sum(budget in them and min(them) < budget < max(them) for them in measured)

    best = max({row.budget for row in rows}, key=lambda budget: (inside(budget), -budget))
    return best if inside(best) else None


@dataclass(frozen=True, kw_only=True)
class CellFit:
    """Parameters `x`: shared shape (if any), then slope per group, level per (group, context), deviation per cell."""

    groups: list[Group]
    levels: list[tuple[Group, float]]
    cells: list[tuple[Group, float, float]]
    centre: float
    num_shape: int
    x: Array

    @property
    def law(self) -> Law:
        """The shared shape, at no rate of its own."""
        shape = np.exp(self.x[: self.num_shape]).tolist()
        return Law(rejection=0.5, **dict(zip(SHAPE_PRIORS, shape, strict=False)))

    def first_rates(self, rows: Sequence[Observation]) -> Array:
        ends = np.cumsum([self.num_shape, len(self.groups), len(self.levels)])
        _, slopes, levels, deviations = np.split(self.x, ends)
        group = [self.groups.index(row.group) for row in rows]
        level = [self._nearest_level(row) for row in rows]
        by_cell = dict(zip(self.cells, deviations, strict=True))
        deviation = np.array([by_cell.get(row.cell, 0.0) for row in rows])
        by_budget = np.log(np.array([row.budget for row in rows]) / self.centre)
        rates: Array = -np.expm1(np.minimum(levels[level] - slopes[group] * by_budget + deviation, -1e-9))
        return rates

    def _nearest_level(self, row: Observation) -> int:
        own = [index for index, (group, _) in enumerate(self.levels) if group == row.group]
        return min(own, key=lambda index: abs(math.log(self.levels[index][1] / row.context)))

    def tokens(self, rows: Sequence[Observation]) -> tuple[Array, Array]:
        """Mean tokens per step of the rows, and the variance of one step's."""
        gammas = np.array([row.gamma for row in rows])
        rates = self.law.rates_after(self.first_rates(rows), int(gammas.max()))
        positions = np.arange(1, rates.shape[-1] + 1)
        survivors = np.where(positions <= gammas[:, None], survival(rates), 0.0)
        variance: Array = (survivors * (2.0 * positions - 1.0)).sum(axis=-1) - survivors.sum(axis=-1) ** 2
        return expected_tokens_per_step(rates, gammas), np.maximum(variance, 0.0)


def fit_cells(rows: Sequence[Observation], *, has_shape: bool) -> CellFit:
    """Fits the law, or without a shape a constant rate per cell."""
    from scipy.optimize import least_squares

    groups = sorted({row.group for row in rows})
    levels = sorted({(row.group, row.context) for row in rows})
    cells = sorted({row.cell for row in rows})
    shape = list(SHAPE_PRIORS.values()) if has_shape else []
    priors = [*shape, *[(0.5, 0.3)] * len(groups), *[(math.log(0.1), 3.0)] * len(levels)]
    mean, deviation = np.array([*priors, *[(0.0, CELL_DEVIATION)] * len(cells)]).T
    centre = math.exp(float(np.mean([math.log(row.budget) for row in rows])))
    fit = CellFit(groups=groups, levels=levels, cells=cells, centre=centre, num_shape=len(shape), x=mean.copy())
    observed = np.array([row.tokens for row in rows])
    for _ in range(3):  # the noise follows from the law, so it is held fixed while the law is fitted
        tokens, variance = fit.tokens(rows)
        noise = np.sqrt(DESIGN_EFFECT * variance * tokens / TOKENS_PER_ROW + (RELATIVE_FLOOR * tokens) ** 2)

        def residuals(x: Array, fit: CellFit = fit, noise: Array = noise) -> Array:
            return np.concatenate([(replace(fit, x=x).tokens(rows)[0] - observed) / noise, (x - mean) / deviation])

        fit = replace(fit, x=np.asarray(least_squares(residuals, fit.x, max_nfev=60).x, dtype=np.float64))
    return fit


def _context_group(group: Group, rows: Sequence[Rate]) -> dict[str, Any]:
    """A table of one rate per context: each is predicted from the others, and compared with their plain mean."""
    enough = len(rows) >= LEAST_ROWS
    found = _described(group, len(rows), len(rows) if enough else 0)
    errors: dict[str, float | None] = dict.fromkeys(("acceptance_rate_mape", "acceptance_rate_mape_constant"))
    if enough:
        contexts, budgets, rates = np.array([(row.context, row.budget, row.acceptance_rate) for row in rows]).T
        keep = ~np.eye(len(rows), dtype=bool)
        predicted = np.array([_rate_from_others(contexts, budgets, rates, kept) for kept in keep])
        constant = np.array([rates[kept].mean() for kept in keep])
        errors = {
            name: ErrorSummary.of(values / rates - 1.0).mape
            for name, values in zip(errors, (predicted, constant), strict=True)
        }
    return {
        **found,
        **NO_ERRORS,
        **errors,
        "held_out": "one row at a time" if enough else "nothing: fewer than three rows",
    }


def _rate_from_others(contexts: Array, budgets: Array, rates: Array, kept: Any) -> float:
    """1 - alpha as A·S^e, with weak pulls to small exponents, at the row not kept."""
    x = np.log(contexts / 8192.0) if np.ptp(budgets) == 0 else np.log(contexts / budgets / 16.0)
    y = np.log(np.maximum(1.0 - rates, 1e-6))
    matrix = np.stack([np.ones_like(x), x], axis=1)
    left, right = matrix[kept].T @ matrix[kept] + np.diag([0.0, 0.1]), matrix[kept].T @ y[kept]
    at = int(np.flatnonzero(~kept)[0])
    return float(1.0 - np.exp(matrix[at] @ np.linalg.solve(left, right)))
