"""Does the law of acceptance extrapolate? Fits it on blocks of up to 8 drafts, and predicts the
tokens per step at 16.

Each (dataset, method, context, budget) has its own rate at position 1, drawn towards the power law
of its group's budgets; concentration, drift and its depth are shared by all groups of a model. A
group without a row of gamma ≤ 8 leaves one budget out instead and predicts it from the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from magicdec.comparison import ErrorSummary
from magicdec.counts import Array, expected_tokens_per_step, survival
from magicdec.errors import ConfigError
from magicdec.fitting import Free, solve
from magicdec.perfmodel.acceptance.law import Law
from magicdec.validate.rows import Size, places, published, read_lines, read_rows

DEEPEST_FITTED = 8
TOKENS_PER_ROW = 800.0
"""Tokens that a row of the published logs was measured over (80 tokens of 10 prompts); it sets the
noise expected.
"""
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
MAX_GAMMA = 64
Group = tuple[str, str, str]


class Observation(
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
    gamma: Annotated[int, msgspec.Meta(ge=1, le=MAX_GAMMA)]
    tokens_per_step: Annotated[float, msgspec.Meta(ge=1)] | None = None
    accepted_over_drafted: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None

    def __post_init__(self) -> None:
        if self.tokens_per_step is None and self.accepted_over_drafted is None:
            raise ConfigError("columns 'tokens_per_step' and 'accepted_over_drafted' are empty")
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


def validate_acceptance(paths: Sequence[str | Path] | None = None) -> dict[str, Any]:
    """One group per file × (model, dataset, method); fractions are plain numbers.

    Raises ConfigError naming the file, line or column that cannot be used.
    """
    groups: list[dict[str, Any]] = []
    refused: list[str] = []
    for path in paths or published("acceptance_snapkv.csv"):
        if "gamma" not in (columns := read_lines(path)[0]) and "acceptance_rate" in columns:
            refused.append(f"{path}: rates without a gamma say nothing about deeper blocks")
            continue
        rows, lines = read_rows(
            [path], Observation, one_of=("tokens_per_step", "accepted_over_drafted")
        )
        for members in places([row.model] for row in rows).values():
            found = _groups_of_model([rows[index] for index in members])
            groups += [{**group, "name": f"{Path(path).stem}/{group['name']}"} for group in found]
        refused += lines
    if not groups:
        raise ConfigError(refused[0])
    return {"groups": groups, "refused": refused}


def _by_group(rows: Sequence[Observation]) -> list[tuple[Group, list[int]]]:
    return sorted(places([row.group] for row in rows).items())


def _groups_of_model(rows: Sequence[Observation]) -> list[dict[str, Any]]:
    """The groups of one model: errors of the law, and of a constant rate per cell fitted to the
    same rows.
    """
    fitted, unfitted, left_out = split_rows(rows)
    error: dict[str, Array] = {}
    if unfitted and fitted:
        fits = {name: fit_cells(fitted, has_shape=name == "") for name in ("", "_iid")}
        shape = fits[""].law
        error = {}
        for name, fit in fits.items():
            error[name] = fit.tokens(unfitted)[0] / [row.tokens for row in unfitted] - 1.0
    groups = []
    for group, members in _by_group(rows):
        if fitted:
            own = [index for index, row in enumerate(unfitted) if row.group == group]
        else:
            own = []
        found: dict[str, Any] = {
            "name": "/".join(filter(None, group)),
            "rows": len(members),
            "rows_unfitted": len(own),
        }
        if not error:
            found |= {f"tokens_per_step_mape{name}": None for name in ("", "_iid")}
            groups.append(
                {**found, "held_out": "nothing: neither gamma above 8 nor a third budget"}
            )
            continue
        deepest = max((unfitted[index].gamma for index in own), default=None)
        judged = [index for index in own if unfitted[index].gamma == deepest]
        budget = left_out.get(group)
        found["gamma"] = deepest
        found |= {
            f"tokens_per_step_mape{name}": ErrorSummary.of(errors[judged]).mape if judged else None
            for name, errors in error.items()
        }
        found["held_out"] = (
            f"budget {budget:g}" if budget is not None else f"gamma > {DEEPEST_FITTED}"
        )
        groups.append(found | {name: getattr(shape, name) for name in SHAPE})
    return groups


def split_rows(
    observations: Sequence[Observation],
) -> tuple[list[Observation], list[Observation], dict[Group, float]]:
    """Rows to fit on, rows to predict, and the budget left out of each group that has no short
    blocks.
    """
    fitted = []
    unfitted = []
    left_out = {}
    for group, members in _by_group(observations):
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
    """The budget inside the range of most contexts (the smaller of equals); None where there is no
    third one.
    """
    measured = []
    for context in {row.context for row in rows}:
        measured.append({row.budget for row in rows if row.context == context})

    def inside(budget: float) -> int:
        return sum(budget in them and min(them) < budget < max(them) for them in measured)

    best = max({row.budget for row in rows}, key=lambda budget: (inside(budget), -budget))
    if inside(best):
        return best
    return None


@dataclass(frozen=True, kw_only=True)
class CellFit:
    """`values`: the shared shape (if any) by name, then a slope per group, a level per (group,
    context) and a deviation per cell."""

    values: Mapping[Any, float]
    contexts: Mapping[Group, Sequence[float]]
    centre: float

    @property
    def law(self) -> Law:
        """The shared shape, at no rate of its own."""
        shape: dict[str, Any] = {name: self.values[name] for name in SHAPE if name in self.values}
        return Law(rejection=0.5, **shape)

    def first_rates(self, rows: Sequence[Observation]) -> Array:
        return np.array([-math.expm1(min(self._log_rejection(row), -1e-9)) for row in rows])

    def _log_rejection(self, row: Observation) -> float:
        nearest = min(
            self.contexts[row.group], key=lambda context: abs(math.log(context / row.context))
        )
        by_budget = self.values[row.group] * math.log(row.budget / self.centre)
        return self.values[row.group, nearest] - by_budget + self.values.get(row.cell, 0.0)

    def tokens(self, rows: Sequence[Observation]) -> tuple[Array, Array]:
        """Mean tokens per step of the rows, and the variance of one step's."""
        gammas = np.array([row.gamma for row in rows])
        rates = self.law.rates_after(self.first_rates(rows), int(gammas.max()))
        positions = np.arange(1, rates.shape[-1] + 1)
        survivors = np.where(positions <= gammas[:, None], survival(rates), 0.0)
        variance: Array = (survivors * (2.0 * positions - 1.0)).sum(axis=-1) - survivors.sum(
            axis=-1
        ) ** 2
        return expected_tokens_per_step(rates, gammas), np.maximum(variance, 0.0)


def fit_cells(rows: Sequence[Observation], *, has_shape: bool) -> CellFit:
    """Fits the law, or without a shape a constant rate per cell."""
    contexts: dict[Group, set[float]] = defaultdict(set)
    for row in rows:
        contexts[row.group].add(row.context)
    levels = []
    for group, own in sorted(contexts.items()):
        for context in sorted(own):
            levels.append((group, context))
    cells = sorted({row.cell for row in rows})
    free: dict[Any, Free]
    if has_shape:
        free = dict(SHAPE)
    else:
        free = {}
    free |= (
        dict.fromkeys(sorted(contexts), SLOPE)
        | dict.fromkeys(levels, LEVEL)
        | dict.fromkeys(cells, DEVIATION)
    )
    fit = CellFit(
        values={key: each.prior or 0.0 for key, each in free.items()},
        contexts={group: sorted(own) for group, own in contexts.items()},
        centre=math.exp(float(np.mean([math.log(row.budget) for row in rows]))),
    )
    observed = np.array([row.tokens for row in rows])
    for _ in range(
        3
    ):  # the noise follows from the law, so it is held fixed while the law is fitted
        tokens, variance = fit.tokens(rows)
        noise = np.sqrt(
            DESIGN_EFFECT * variance * tokens / TOKENS_PER_ROW + (RELATIVE_FLOOR * tokens) ** 2
        )

        def residuals(values: dict[Any, float], fit: CellFit = fit, noise: Array = noise) -> Array:
            return np.asarray((replace(fit, values=values).tokens(rows)[0] - observed) / noise)

        fit = replace(fit, values=solve(free, residuals, starts=(fit.values,), max_nfev=60).values)
    return fit
