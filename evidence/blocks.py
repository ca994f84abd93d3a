"""Tests whether the law of acceptance extrapolates: fits it on blocks of up to 8 drafts and
predicts the tokens per step at 16.

Each (dataset, method, context, budget) has its own rate at position 1, drawn towards a power law in
the budget for its group. All groups of a model share concentration, drift and drift depth. In a
group without rows of gamma ≤ 8, one budget is left out instead and predicted from the others.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from magicdec.counts import Array, expected_tokens_per_step, survival
from magicdec.errors import ConfigError
from magicdec.fitting import Free, solve
from magicdec.perfmodel.acceptance.law import Law
from magicdec.schema.comparison import ErrorSummary
from magicdec.validate.rows import Size, places, read_lines, read_rows

DEEPEST_FITTED = 8
TOKENS_PER_ROW = 800.0
"""Tokens behind a row of the published logs (80 tokens of 10 prompts), which set its noise."""
DESIGN_EFFECT = 2.0
"""Variance of clustered tokens over that of independent ones: tokens of one prompt are alike."""
RELATIVE_FLOOR = 0.003
SHAPE = {
    "concentration": Free(prior=50.0, spread=1.2), "drift": Free(prior=0.2, spread=2.0),
    "drift_depth": Free(prior=2.0, spread=0.5),
}  # fmt: skip
SLOPE = Free(prior=0.5, spread=0.3, scale="linear")
LEVEL = Free(prior=math.log(0.1), spread=3.0, scale="linear")
DEVIATION = Free(prior=0.0, spread=0.3, scale="linear")
"""How far log(1 - alpha) of one budget strays from its group's power law."""
MAX_PUBLISHED_GAMMA = 64
Group = tuple[str, str, str]


class PublishedTokens(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"context": "context_len", "budget": "draft_budget_tokens"},
):
    """Mean tokens per step of one (context, budget, gamma) of a group."""

    model: str
    dataset: str = ""
    draft_method: str = ""
    context: Size
    budget: Size
    gamma: Annotated[int, msgspec.Meta(ge=1, le=MAX_PUBLISHED_GAMMA)]
    tokens_per_step: Annotated[float, msgspec.Meta(ge=1)] | None = None
    accepted_over_drafted: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None

    def __post_init__(self) -> None:
        if self.tokens_per_step is None and self.accepted_over_drafted is None:
            raise ConfigError(
                "columns 'tokens_per_step' and 'accepted_over_drafted' are empty"
            )
        if not self.tokens <= self.gamma + 1.0 + 1e-6:
            raise ConfigError(
                f"column 'tokens_per_step' must be at most gamma + 1, not {self.tokens:g}"
            )

    @property
    def tokens(self) -> float:
        if self.tokens_per_step is not None:
            return self.tokens_per_step
        return 1.0 + self.gamma * (self.accepted_over_drafted or 0.0)

    @property
    def group(self) -> Group:
        return self.model, self.dataset, self.draft_method

    @property
    def cell(self) -> tuple[Group, float, float]:
        return self.group, self.context, self.budget


def validate_blocks(paths: Sequence[str | Path]) -> dict[str, Any]:
    """One group per file × (model, dataset, method); fractions are plain numbers.

    Raises ConfigError naming the file, line or column that cannot be used.
    """
    groups: list[dict[str, Any]] = []
    refused: list[str] = []
    for path in paths:
        columns = read_lines(path)[0]
        if "gamma" not in columns and "acceptance_rate" in columns:
            refused.append(
                f"{path}: rates without a gamma say nothing about deeper blocks"
            )
            continue
        rows, lines = read_rows(
            [path],
            PublishedTokens,
            one_of=("tokens_per_step", "accepted_over_drafted"),
        )
        for members in places([row.model] for row in rows).values():
            for group in _groups_of_model([rows[index] for index in members]):
                name = f"{Path(path).stem}/{group['name']}"
                groups.append({**group, "name": name})
        refused += lines
    if not groups:
        raise ConfigError(refused[0])
    return {"groups": groups, "refused": refused}


def _by_group(rows: Sequence[PublishedTokens]) -> list[tuple[Group, list[int]]]:
    return sorted(places([row.group] for row in rows).items())


def _groups_of_model(rows: Sequence[PublishedTokens]) -> list[dict[str, Any]]:
    """The groups of one model: errors of the law, and of a constant rate per cell fitted to the
    same rows.
    """
    fitted, unfitted, left_out = split_rows(rows)
    errors: dict[str, Array] = {}
    shape: dict[str, float] = {}
    if unfitted and fitted:
        measured = [row.tokens for row in unfitted]
        law_fit = fit_cells(fitted, has_shape=True)
        constant_fit = fit_cells(fitted, has_shape=False)
        tokens_of_law, _ = law_fit.tokens(unfitted)
        tokens_of_constant, _ = constant_fit.tokens(unfitted)
        errors[""] = tokens_of_law / measured - 1.0
        errors["_iid"] = tokens_of_constant / measured - 1.0
        shape = {name: getattr(law_fit.law, name) for name in SHAPE}
    groups = []
    for key, members in _by_group(rows):
        own = []
        if fitted:
            own = [index for index, row in enumerate(unfitted) if row.group == key]
        group: dict[str, Any] = {
            "name": "/".join(filter(None, key)),
            "rows": len(members),
            "rows_unfitted": len(own),
        }
        if errors:
            group |= _errors_of_deepest(unfitted, own, errors)
            group["held_out"] = f"gamma > {DEEPEST_FITTED}"
            if key in left_out:
                group["held_out"] = f"budget {left_out[key]:g}"
        else:
            group |= {"tokens_per_step_mape": None, "tokens_per_step_mape_iid": None}
            group["held_out"] = "nothing: neither gamma above 8 nor a third budget"
        groups.append(group | shape)
    return groups


def _errors_of_deepest(
    unfitted: Sequence[PublishedTokens], own: Sequence[int], errors: Mapping[str, Array]
) -> dict[str, Any]:
    """A group's errors at the deepest gamma that was not fitted on."""
    gammas = [unfitted[index].gamma for index in own]
    deepest = max(gammas, default=None)
    judged = [
        index for index, gamma in zip(own, gammas, strict=True) if gamma == deepest
    ]
    figures: dict[str, Any] = {"gamma": deepest}
    for name, error in errors.items():
        mape = None
        if judged:
            mape = ErrorSummary.of(error[judged]).mape
        figures[f"tokens_per_step_mape{name}"] = mape
    return figures


def split_rows(
    observations: Sequence[PublishedTokens],
) -> tuple[list[PublishedTokens], list[PublishedTokens], dict[Group, float]]:
    """Rows to fit on, rows to predict, and the budget left out of each group that has no short
    blocks.
    """
    fitted = []
    unfitted = []
    left_out = {}
    for group, members in _by_group(observations):
        rows = [observations[index] for index in members]
        has_short_blocks = min(row.gamma for row in rows) <= DEEPEST_FITTED
        budget = None
        if not has_short_blocks:
            budget = _budget_to_leave_out(rows)
            if budget is not None:
                left_out[group] = budget
        for row in rows:
            is_fitted = row.budget != budget
            if has_short_blocks:
                is_fitted = row.gamma <= DEEPEST_FITTED
            if is_fitted:
                fitted.append(row)
            else:
                unfitted.append(row)
    return fitted, unfitted, left_out


def _budget_to_leave_out(rows: Sequence[PublishedTokens]) -> float | None:
    """The budget that lies inside the measured range of most contexts, the smaller of equals. None:
    no context has three budgets."""
    by_context: dict[float, set[float]] = defaultdict(set)
    for row in rows:
        by_context[row.context].add(row.budget)

    num_inside: Counter[float] = Counter()
    for budgets in by_context.values():
        lowest = min(budgets)
        highest = max(budgets)
        num_inside.update(budget for budget in budgets if lowest < budget < highest)
    if not num_inside:
        return None
    return max(num_inside, key=lambda budget: (num_inside[budget], -budget))


@dataclass(frozen=True, kw_only=True)
class CellFit:
    """`values`: the shared shape (if any) by name, then a slope per group, a level per (group,
    context) and a deviation per cell."""

    values: Mapping[Any, float]
    contexts: Mapping[Group, Sequence[float]]
    centre: float

    @property
    def law(self) -> Law:
        """The shared shape, without a rate."""
        shape: dict[str, Any] = {}
        for name in SHAPE:
            if name in self.values:
                shape[name] = self.values[name]
        return Law(rejection=0.5, **shape)

    def first_rates(self, rows: Sequence[PublishedTokens]) -> Array:
        """The rate at position 1 of each row, below 1."""
        log_rejections = np.array([self._log_rejection(row) for row in rows])
        return np.asarray(-np.expm1(np.minimum(log_rejections, -1e-9)))

    def _log_rejection(self, row: PublishedTokens) -> float:
        def distance(context: float) -> float:
            return abs(math.log(context / row.context))

        nearest = min(self.contexts[row.group], key=distance)
        level = self.values[row.group, nearest]
        slope = self.values[row.group]
        deviation = self.values.get(row.cell, 0.0)
        return level - slope * math.log(row.budget / self.centre) + deviation

    def tokens(self, rows: Sequence[PublishedTokens]) -> tuple[Array, Array]:
        """Mean tokens per step of the rows, and the variance of one step's."""
        gammas = np.array([row.gamma for row in rows])
        rates = self.law.rates_after(self.first_rates(rows), int(gammas.max()))
        positions = np.arange(1, rates.shape[-1] + 1)
        survivors = np.where(positions <= gammas[:, None], survival(rates), 0.0)
        first_moment = survivors.sum(axis=-1)
        second_moment = (survivors * (2.0 * positions - 1.0)).sum(axis=-1)
        variance: Array = second_moment - first_moment**2
        return expected_tokens_per_step(rates, gammas), np.maximum(variance, 0.0)


def fit_cells(rows: Sequence[PublishedTokens], *, has_shape: bool) -> CellFit:
    """Fits the law, or without a shape a constant rate per cell."""
    contexts: dict[Group, list[float]] = defaultdict(list)
    for group, context in sorted({(row.group, row.context) for row in rows}):
        contexts[group].append(context)
    free: dict[Any, Free] = {}
    if has_shape:
        free |= SHAPE
    free |= dict.fromkeys(contexts, SLOPE)
    for group, of_group in contexts.items():
        for context in of_group:
            free[group, context] = LEVEL
    for cell in sorted({row.cell for row in rows}):
        free[cell] = DEVIATION
    log_budgets = [math.log(row.budget) for row in rows]
    fit = CellFit(
        values={key: parameter.prior or 0.0 for key, parameter in free.items()},
        contexts=contexts,
        centre=math.exp(float(np.mean(log_budgets))),
    )
    observed = np.array([row.tokens for row in rows])
    for _ in range(3):
        # The noise follows from the law, so it is held fixed while the law is fitted.
        tokens, variance = fit.tokens(rows)
        of_sampling = DESIGN_EFFECT * variance * tokens / TOKENS_PER_ROW
        noise = np.sqrt(of_sampling + (RELATIVE_FLOOR * tokens) ** 2)

        def residuals(
            values: dict[Any, float], fit: CellFit = fit, noise: Array = noise
        ) -> Array:
            tokens, _ = replace(fit, values=values).tokens(rows)
            return np.asarray((tokens - observed) / noise)

        solution = solve(free, residuals, starts=(fit.values,), max_nfev=60)
        fit = replace(fit, values=solution.values)
    return fit
