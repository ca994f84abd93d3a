"""Compares beliefs about acceptance with published rates, leaving out whole groups at a time.

    python -m evidence acceptance rates.csv --leave-out model

Each group of rows (a model, a source, a checkpoint, one task of a checkpoint, or a checkpoint's
long contexts) is predicted from all other rows of the file and of the shipped table. Error, width
and coverage refer to tokens per step. For long contexts the checkpoint's own rates up to 2k are
given. "text" asks about each row as a plan asks about a user's own text of that class, given the
rows of other texts and other sources; "nothing" gives each row its own too. Heads whose cache is a
window have lines of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from evidence.published_rates import (
    BELIEF_RATES,
    Evidence,
    Rate,
    distinct,
    given_all,
    rates_left_out,
    read_rates,
    same_rate,
    texts_left_out,
)
from magicdec.counts import Z_90, Array
from magicdec.errors import ConfigError, unknown_choice
from magicdec.perfmodel.acceptance.belief import (
    MOST_LOGIT,
    Situation,
    constant_rate_logit,
    fitted_belief,
)
from magicdec.progress import Progress
from magicdec.validate.rows import read_lines

if TYPE_CHECKING:
    import pandas as pd

SHORT_CONTEXT = 2048.0
"""Tokens up to which a checkpoint's own rates are given where its long contexts are left out."""
KEPT = "\0kept"
"""Group of the rows that are never left out."""


def _long_context(at: Situation) -> str:
    if (at.context or 0.0) > SHORT_CONTEXT:
        return at.checkpoint
    return KEPT


TASK_GROUPS: dict[str, Callable[[Situation], str]] = {
    "model": lambda at: at.model,
    "source": lambda at: at.source,
    "checkpoint": lambda at: at.checkpoint,
    "checkpoint-task": lambda at: f"{at.checkpoint}|{at.task}",
    "long-context": _long_context,
}
OWN_TEXT = "text"
NOTHING = "nothing"
THRESHOLDS = np.arange(1.3, 3.01, 0.1)
"""Thresholds of the claims "more than this many tokens per step"."""
NUM_DECILES = 10
CONTEXTS = (("up to 2k", 2048.0), ("2k to 8k", 8192.0), ("beyond 8k", float("inf")))
LEAST_ROWS = 12
"""Fewest rows of a group with a line of its own."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of one group of rows."""

    by: str
    group: str
    rows: int
    median_error: float
    mean_error: float
    coverage: float
    """Share of rows inside their 90 % interval."""
    width: float
    """Median of the interval's upper over its lower end."""


class Decile(msgspec.Struct, frozen=True, kw_only=True):
    """Claims of "more than c tokens per step" whose probabilities lie in one tenth."""

    claims: int
    said: float
    came_true: float


class AcceptanceValidation(msgspec.Struct, frozen=True, kw_only=True):
    """Beliefs against published rates."""

    leave_out: str
    """Groups left out one at a time. "": the shipped table alone predicts the file's rows."""
    rows: int
    overall: Summary
    """Chains with stated gamma and stated tokens per step. `groups` has the other rows too."""
    groups: list[Summary]
    brier: float
    deciles: list[Decile]


def validate_beliefs(
    paths: Sequence[str | Path] = (),
    *,
    leave_out: str = "",
    progress: Progress = lambda _: None,
) -> AcceptanceValidation:
    """Compares beliefs with the rates of some tables, or of the shipped table if none is given.

    Raises ConfigError for an unknown group, and for tables without a usable row.
    """
    known = (*TASK_GROUPS, OWN_TEXT, NOTHING)
    if leave_out and leave_out not in known:
        raise unknown_choice("group to leave out", leave_out, known)
    asked = distinct(
        [rate for path in paths or [BELIEF_RATES] for rate in read_rates(path)]
    )
    if not asked:
        raise ConfigError(f"no usable rate in {', '.join(map(str, paths))}")
    if not paths and not leave_out:
        leave_out = "model"
    rates, weights = _with_shipped_rows(asked)
    scales = fitted_belief().coefficients.scales
    evidence = Evidence.of(rates, scales, np.array(weights))
    num_further = len(rates) - len(asked)
    progress(f"{len(asked)} rows, {num_further} further rows of the shipped table")
    if leave_out == OWN_TEXT:
        mean, deviation = texts_left_out(evidence, scales, len(asked))
    elif leave_out == NOTHING:
        mean, deviation = given_all(evidence, scales)
    else:
        if leave_out:
            groups = _groups_of(rates, asked, TASK_GROUPS[leave_out])
        else:
            groups = ["\0asked"] * len(asked) + [KEPT] * num_further
        mean, deviation = rates_left_out(evidence, groups, scales, kept=KEPT)
    is_counted = np.arange(len(rates)) < len(asked)
    if leave_out == "checkpoint-task":
        is_counted &= _has_other_tasks(rates)
    if leave_out == "long-context":
        is_counted &= _is_long_of_known(rates)
        if not is_counted.any():
            raise ConfigError(
                f"no rate beyond {SHORT_CONTEXT:.0f} tokens of a checkpoint that has one up to "
                "there"
            )
    chosen = np.flatnonzero(is_counted)
    return validation(
        [rates[row] for row in chosen],
        mean[chosen],
        deviation[chosen],
        leave_out=leave_out,
    )


def _with_shipped_rows(asked: Sequence[Rate]) -> tuple[list[Rate], list[float]]:
    """The requested rates and after them the shipped table's other rows, with all their weights."""
    shipped = distinct(read_rates(BELIEF_RATES))
    shipped_weights = fitted_belief().coefficients.row_weights
    keys = [same_rate(rate) for rate in shipped]
    known = dict(zip(keys, shipped_weights, strict=True))
    requested = [same_rate(rate) for rate in asked]
    rates = list(asked)
    weights = [known.get(key, 1.0) for key in requested]
    wanted = set(requested)
    for rate, key in zip(shipped, keys, strict=True):
        if key not in wanted:
            rates.append(rate)
            weights.append(known[key])
    return rates, weights


def _groups_of(
    rates: Sequence[Rate], asked: Sequence[Rate], key: Callable[[Situation], str]
) -> list[str]:
    """The group that each rate is left out with. Rates of groups without a requested one stay
    in."""
    names = {key(rate.situation) for rate in asked}
    groups = []
    for rate in rates:
        group = key(rate.situation)
        if group not in names:
            group = KEPT
        groups.append(group)
    return groups


def holds_rates(path: str | Path) -> bool:
    """Whether a file is a table of published rates. Raises ConfigError for one that cannot be
    read."""
    return "mean_acceptance_length" in read_lines(Path(path))[0]


def _has_other_tasks(rates: Sequence[Rate]) -> npt.NDArray[np.bool_]:
    """Whether a row's checkpoint was measured on another task too."""
    import pandas as pd

    situations = [rate.situation for rate in rates]
    checkpoints = pd.Series([at.checkpoint for at in situations])
    tasks = pd.Series([at.task for at in situations])
    num_tasks = tasks.groupby(checkpoints).transform("nunique")
    return np.asarray(num_tasks > 1, dtype=np.bool_)


def _is_long_of_known(rates: Sequence[Rate]) -> npt.NDArray[np.bool_]:
    """Whether a row is of a long context, and its checkpoint was measured at a short one too."""
    known = set()
    for rate in rates:
        context = rate.situation.context
        if context is not None and context <= SHORT_CONTEXT:
            known.add(rate.situation.checkpoint)
    is_long = [_long_context(rate.situation) in known for rate in rates]
    return np.array(is_long, dtype=np.bool_)


def validation(
    rates: Sequence[Rate],
    mean: Array,
    deviation: Array,
    *,
    leave_out: str,
) -> AcceptanceValidation:
    """How well normal beliefs about the logits of some rates came true."""
    table = outcomes(rates, mean, deviation)
    chains = table[table["is_chain"]]
    if chains.empty:
        counted = table
    else:
        counted = chains
    claims = claimed(counted)
    return AcceptanceValidation(
        leave_out=leave_out,
        rows=len(table),
        overall=_summary(counted, "all", "chains of a stated gamma"),
        groups=[*_by_group(table), *_of_windows(table)],
        brier=float(((claims["said"] - claims["came_true"]) ** 2).mean()),
        deciles=_deciles(claims),
    )


def outcomes(rates: Sequence[Rate], mean: Array, deviation: Array) -> pd.DataFrame:
    """A row per rate: its value, its prediction, and the conditions of its measurement."""
    import pandas as pd  # only validation needs tables

    rows = []
    for rate in rates:
        at = rate.situation
        rows.append(
            {
                "gamma": rate.gamma,
                "tokens": rate.tokens,
                "is_chain": rate.is_chain,
                "kind": at.kind,
                "group": at.group,
                "task": at.task_class,
                "temperature": (
                    "unknown" if at.temperature is None else f"{at.temperature:g}"
                ),
                "context": _context(at),
                "is_windowed": _is_windowed(at),
                "checkpoint": at.checkpoint,
            }
        )
    table = pd.DataFrame(rows)
    gammas = table["gamma"].to_numpy()
    tokens = table["tokens"].to_numpy()
    said = tokens_per_step(mean, gammas)
    low = tokens_per_step(mean - Z_90 * deviation, gammas)
    high = tokens_per_step(mean + Z_90 * deviation, gammas)
    # logits are read up to a largest one, which stands for all rates beyond it
    is_open = mean + Z_90 * deviation >= MOST_LOGIT
    high = np.where(is_open, gammas + 1.0, high)
    table["mean"] = mean
    table["deviation"] = deviation
    table["error"] = np.abs(said / tokens - 1.0)
    table["is_inside"] = (tokens >= low) & (tokens <= high)
    table["width"] = high / low
    return table


def tokens_per_step(logit: Array, gamma: Array) -> Array:
    """Tokens per step at constant rates, given as logits."""
    rate = 1.0 / (1.0 + np.exp(-logit))
    return np.asarray((1.0 - rate ** (gamma + 1)) / (1.0 - rate))


def _is_windowed(at: Situation) -> bool:
    """Whether the draft saw a window of a longer text, by an option or as it was trained."""
    if at.has_trained_window:
        return True
    if at.window is None or at.context is None:
        return False
    return at.context > at.window


def _context(at: Situation) -> str:
    if at.context is None:
        return "unknown"
    for name, most in CONTEXTS:
        if at.context <= most:
            return name
    raise AssertionError("the last of CONTEXTS has no end")


def _summary(table: pd.DataFrame, by: str, group: str) -> Summary:
    return Summary(
        by=by,
        group=group,
        rows=len(table),
        median_error=float(table["error"].median()),
        mean_error=float(table["error"].mean()),
        coverage=float(table["is_inside"].mean()),
        width=float(table["width"].median()),
    )


def _by_group(table: pd.DataFrame) -> list[Summary]:
    summaries = []
    chains = table[table["is_chain"]]
    titles = {
        "group": "sort",
        "kind": "kind",
        "task": "task",
        "temperature": "temperature",
        "context": "context",
    }
    for column, title in titles.items():
        for name, rows in chains.groupby(column):
            if len(rows) >= LEAST_ROWS:
                summaries.append(_summary(rows, title, str(name)))
    rest = table[~table["is_chain"]]
    if len(rest) >= LEAST_ROWS:
        summaries.append(
            _summary(rest, "all", "trees, unknown gammas, accepted shares")
        )
    return summaries


def _of_windows(table: pd.DataFrame) -> list[Summary]:
    """Lines of heads that saw a window: all of them, chains and trees, and each checkpoint."""
    windowed = table[table["is_windowed"]]
    if windowed.empty:
        return []
    summaries = [_summary(windowed, "window", "all checkpoints")]
    for name, rows in windowed.groupby("checkpoint"):
        summaries.append(_summary(rows, "window", str(name)))
    return summaries


def claimed(table: pd.DataFrame) -> pd.DataFrame:
    """Each row's claims of more than some tokens per step: predicted probability and outcome."""
    import pandas as pd
    from scipy.special import ndtr

    logits = np.array([_logits_of_thresholds(int(gamma)) for gamma in table["gamma"]])
    means = table[["mean"]].to_numpy(dtype=np.float64)
    deviations = table[["deviation"]].to_numpy(dtype=np.float64)
    said = ndtr((means - logits) / deviations)
    came_true = table[["tokens"]].to_numpy() > THRESHOLDS
    return pd.DataFrame(
        {"said": said.ravel(), "came_true": came_true.ravel().astype(float)}
    )


@lru_cache(maxsize=64)
def _logits_of_thresholds(gamma: int) -> Array:
    """The logits of the constant rates with these tokens per step; infinite beyond gamma + 1, which no
    rate exceeds."""
    logits = []
    for least in THRESHOLDS:
        is_reached = least < gamma + 1
        logits.append(constant_rate_logit(least, gamma) if is_reached else float("inf"))
    return np.array(logits)


def _deciles(claims: pd.DataFrame) -> list[Decile]:
    tenths = (claims["said"] * NUM_DECILES).astype(int)
    deciles = []
    for _, rows in claims.groupby(tenths.clip(upper=NUM_DECILES - 1)):
        said = float(rows["said"].mean())
        came_true = float(rows["came_true"].mean())
        deciles.append(Decile(claims=len(rows), said=said, came_true=came_true))
    return deciles


def summary_line(name: str, of: AcceptanceValidation) -> str:
    all_rows = of.overall
    return (
        f"{name}: {all_rows.rows} rows, error median {all_rows.median_error:.1%}, mean "
        f"{all_rows.mean_error:.1%}, coverage {all_rows.coverage:.1%}, high/low "
        f"{all_rows.width:.2f}"
        f", Brier {of.brier:.4f}"
    )
