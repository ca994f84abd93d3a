"""Errors of predicted pairs of servers, and what the gamma that a plan would choose loses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from magicdec.counts import Array, expected_tokens_per_step
from magicdec.schema.comparison import ErrorSummary
from magicdec.validate.pair_prediction import Predicted, StatedTokens, predict_pairs
from magicdec.validate.pairs import PairRow
from magicdec.validate.rows import places, read_rows

if TYPE_CHECKING:
    import pandas as pd

SIGN_MARGIN = 0.05
"""Distance of a measured speedup from 1 from which its side counts: nearer ones are noise."""
CONSTANTS = (1, 3, 5, 7)
"""Constant gammas that a plan's choice is compared with."""


def validate_pairs(paths: Sequence[Path]) -> dict[str, Any]:
    """{"groups": […], "choice": {…}, "assumed": [one line per row], "refused": [likewise]}.

    Each pair is predicted at its measured tokens per step, trees as any draft. `assumed` lists the rows
    that lack a value which the prediction needs, `refused` the rows that are not judged.

    Raises ConfigError for a file that cannot be read or lacks a column, and when no row can be
    judged.
    """
    pairs, refused = read_rows(paths, PairRow)
    predicted = predict_pairs(pairs, tokens_of_cells(pairs))
    is_stated = [pair.tokens_per_step is not None for pair in pairs]
    lacking = "no measured tokens per step"
    return compared(pairs, predicted, is_stated, lacking=lacking, refused=refused)


def compared(
    pairs: Sequence[PairRow],
    predicted: Predicted,
    is_judged: Sequence[bool],
    *,
    lacking: str,
    refused: Sequence[str],
    source: str = "",
) -> dict[str, Any]:
    """The document of `validate_pairs`, of one source's rows if it is named. `lacking`: what rows that are not
    judged, or not predicted, do not have.
    """
    lines = list(refused)
    names: list[list[str]] = []
    for pair, judged, speedup in zip(pairs, is_judged, predicted.speedup, strict=True):
        labels = pair.labels
        if source and pair.origin != source:
            names.append([])
        elif judged and np.isfinite(speedup):
            names.append(["/".join(labels.values()), f"all/{labels['compared']}"])
        else:
            lines.append(f"{pair.where}: {lacking} of {pair.draft} for {pair.model}")
            names.append([])
    groups = []
    for name, chosen in sorted(places(names).items()):
        groups.append(_group(name, pairs, np.array(chosen), predicted))
    assumed = []
    for pair in pairs:
        if pair.assumptions:
            assumed.append(f"{pair.where}: {', '.join(pair.assumptions)}")
    return {
        "groups": groups,
        "choice": _choice(pairs, predicted.speedup),
        "assumed": assumed,
        "refused": lines,
    }


def tokens_of_cells(pairs: Sequence[PairRow]) -> list[float | None]:
    """The stated tokens per step of each pair. A pair without gets those that follow from the rate
    at the same load's nearest gamma."""
    by_load: dict[Any, dict[int, float]] = defaultdict(dict)
    for pair in pairs:
        if pair.tokens_per_step is not None:
            by_load[pair.load][pair.gamma] = pair.tokens_per_step
    tokens: list[float | None] = []
    for pair in pairs:
        by_gamma = by_load[pair.load]
        if pair.tokens_per_step is not None or not by_gamma:
            tokens.append(pair.tokens_per_step)
        else:
            tokens.append(_tokens_at(pair.gamma, by_gamma))
    return tokens


def _tokens_at(gamma: int, stated: Mapping[int, float]) -> float:
    """Tokens per step at this gamma by the rate at the nearest stated one, the deeper of two."""
    near = min(stated, key=lambda other: (abs(other - gamma), -other))
    tokens = np.array([stated[near]])
    rates = StatedTokens(tokens, np.array([near])).rates
    by_position = np.repeat(rates[:, None], gamma, axis=1)
    return float(expected_tokens_per_step(by_position, gamma)[0])


def _group(
    name: str,
    pairs: Sequence[PairRow],
    chosen: np.ndarray,
    predicted: Predicted,
) -> dict[str, Any]:
    """Errors of the speedup and of both rates, and how often the sign is right outside a margin."""
    own = [pairs[index] for index in chosen]
    measured = np.array([pair.speedup for pair in own])
    seconds = np.array([pair.measured for pair in own])
    speedup = predicted.speedup[chosen]
    is_far = np.abs(measured - 1.0) > SIGN_MARGIN
    signs = np.sign(speedup - 1.0) == np.sign(measured - 1.0)
    group: dict[str, Any] = {"name": name}
    if not name.startswith("all/"):
        group |= own[0].labels
    group |= ErrorSummary.of(speedup / measured - 1.0).figures()
    group["coverage"] = float(np.mean(predicted.is_inside(pairs)[chosen]))
    group["sign"] = None
    if is_far.any():
        group["sign"] = float(np.mean(signs[is_far]))
    group["rows_with_sign"] = int(is_far.sum())
    of_times = {
        "baseline": (predicted.baseline_s, seconds[:, 0]),
        "speculative": (predicted.speculative_s, seconds[:, 1]),
    }
    for what, (predicted_s, measured_s) in of_times.items():
        errors = ErrorSummary.of(predicted_s[chosen] / measured_s - 1.0)
        group[f"{what}_mape"] = errors.mape
        group[f"{what}_bias"] = errors.bias
    return group


def _choice(pairs: Sequence[PairRow], speedup: Array) -> dict[str, Any]:
    """Mean loss against the best measured gamma, over the loads measured at several gammas: of the
    plan's choice, of never speculating, and of constant gammas. Also the constant that is best in
    hindsight."""
    predicted, measured = _swept_loads(pairs, speedup)
    losses = 1.0 - measured.div(measured.max(axis=1), axis=0)
    losses.columns = [_policy(int(gamma)) for gamma in measured.columns]
    means = losses.mean().dropna()
    everywhere = means[losses.notna().all()]
    of_plan = []
    for load, gamma in predicted.idxmax(axis=1).items():
        of_load = losses.loc[[load], _policy(gamma)].to_numpy()
        of_plan.append(of_load.item())
    choice: dict[str, Any] = {"cells": len(losses), "plan": None}
    if of_plan:
        choice["plan"] = float(np.mean(of_plan))
    for policy in map(_policy, (0, *CONSTANTS)):
        choice[policy] = means.get(policy)
    choice["best_constant"] = None
    if len(everywhere):
        choice["best_constant"] = everywhere.idxmin()
    return choice


def _policy(gamma: int) -> str:
    if gamma == 0:
        return "never"
    return f"k{gamma}"


def _swept_loads(
    pairs: Sequence[PairRow], speedup: Array
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Predicted and measured speedups of the loads measured at several gammas, by load and gamma;
    gamma 0 among them.
    """
    import pandas as pd

    rows = []
    for pair, predicted in zip(pairs, speedup, strict=True):
        if pair.is_rate and np.isfinite(predicted):
            load = repr((*pair.load, pair.users))
            rows.append((load, pair.gamma, float(predicted), pair.speedup))
    if not rows:
        return pd.DataFrame(), pd.DataFrame()
    table = pd.DataFrame(rows, columns=["load", "gamma", "predicted", "measured"])
    table = table.drop_duplicates(["load", "gamma"], keep="last")
    cells = table.pivot(index="load", columns="gamma")
    swept = cells[np.count_nonzero(cells["measured"].notna(), axis=1) > 1]
    by_gamma = []
    for name in ("predicted", "measured"):
        speedups = swept[name].copy()
        speedups[0] = 1.0
        by_gamma.append(speedups)
    return by_gamma[0], by_gamma[1]
