"""Published end-to-end latencies and speedups, against their predictions.

One group per file × (device, target, draft): each row's autoregressive latency, speedup and best gamma is predicted
by the device's hardware profile, the paper's engine profile and the pair's acceptance profile. The engine profile was
fitted on a part of the shipped rows (`is_fitted_on`); the errors over the other rows are given apart, as
`…_unfitted`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from magicdec.counts import Array
from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import PROFILES_DIRECTORY, AcceptanceProfile, default_profile, load_profile
from magicdec.perfmodel.intervals import interval, tokens_error
from magicdec.perfmodel.kernels.profile import HardwareProfile
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import predict
from magicdec.specs.engine import EngineProfile, load_engine
from magicdec.specs.parallel import check_tp
from magicdec.specs.speculation import MAX_GAMMA, SELF, DraftMethod, SamplingSpec, SpeculationSpec
from magicdec.units import MILLI
from magicdec.validate.rows import Count, published, read_rows

DEFAULT_TABLES = ("latency_8xa100_llama2_tinyllama.csv", "speedup_8xa100.csv")
ENGINE = "magicdec-2024"
GAMMAS = np.arange(1, MAX_GAMMA + 1)
SAMPLING = SamplingSpec(temperature=1.0)
"""The engine profile's cost of sampling was fitted as one that holds the paper's filter of the vocabulary."""
FITTED_CONTEXTS = (1024, 2048, 4000, 8000, 16000, 24000, 32000, 64000, 100000)
FITTED_BATCHES = (32, 48, 64, 128, 256)
FITTED_DEVICE, FITTED_TP, FITTED_BUDGET = "a100-sxm-80gb", 8, 512
FALLBACK_PROFILE = "llama-3.1-8b-streamingllm-pg19"
"""Lends its shape to a pair without a profile when its rate is fitted."""
Milliseconds = Annotated[float, msgspec.Meta(ge=1e-6, le=1e9)]
RATE_RANGE = (0.05, 0.995)
MEASURES = (
    "speedup_mape", "latency_mape", "gamma_exact", "gamma_within_1", "gamma_regret", "acceptance_rate",
    "speedup_coverage",
)  # fmt: skip


class PublishedRow(msgspec.Struct, frozen=True, kw_only=True, rename={"draft_budget": "draft_budget_tokens"}):
    """One measured configuration; None is what its table does not give."""

    target: str
    draft: str
    draft_method: DraftMethod = "streamingllm"
    draft_budget: Count = FITTED_BUDGET
    device: str
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    context_len: Count
    batch_size: Count
    gamma: Annotated[int, msgspec.Meta(ge=1, le=MAX_GAMMA)] | None = None
    speedup: Annotated[float, msgspec.Meta(ge=1e-3, le=1e3)] | None = None
    autoregressive_ms_per_token: Milliseconds | None = None
    speculative_ms_per_token: Milliseconds | None = None

    @property
    def autoregressive_s(self) -> float | None:
        return None if self.autoregressive_ms_per_token is None else self.autoregressive_ms_per_token * MILLI

    @property
    def speculative_s(self) -> float | None:
        return None if self.speculative_ms_per_token is None else self.speculative_ms_per_token * MILLI

    @property
    def pair(self) -> tuple[str, str, str, str, int]:
        return self.device, self.target, self.draft, self.draft_method, self.tp_size


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Predictions of some rows of one pair; axis 1 is GAMMAS."""

    autoregressive_s: Array
    speculative_s: Array
    speedup: Array
    speedup_low: Array
    speedup_high: Array
    first_rate: Array

    @property
    def best(self) -> npt.NDArray[np.int64]:
        """The predicted best gamma of each row."""
        return np.asarray(GAMMAS[np.argmax(self.speedup, axis=1)], dtype=np.int64)


def is_fitted_on(row: PublishedRow) -> bool:
    """Whether the row's shape is in the half that constants were fitted on: a checkerboard over contexts × batches.

    Latencies of the pair Llama-2-7B-32K, TinyLlama-1.1B gave the engine's constants and that pair's rate; speedups of
    Llama-3.1-8B gave that pair's rate alone.
    """
    if (row.device, row.tp_size, row.draft_budget) != (FITTED_DEVICE, FITTED_TP, FITTED_BUDGET):
        return False
    gives_rate = row.target == "llama-3.1-8b" and row.draft == SELF
    if not gives_rate and not (row.target == "llama-2-7b-32k" and row.autoregressive_s is not None):
        return False
    if row.context_len not in FITTED_CONTEXTS or row.batch_size not in FITTED_BATCHES:
        return False
    return (FITTED_CONTEXTS.index(row.context_len) + FITTED_BATCHES.index(row.batch_size)) % 2 == 1


def validate_published(
    paths: Sequence[str | Path] | None = None, fit_acceptance: bool = False, *, engine: str = ENGINE
) -> dict[str, Any]:
    """One group per file × (device, target, draft); fractions are plain numbers. Without paths: the shipped tables.

    `fit_acceptance` fits the rate at position 1, one number per (target, draft), on the rows of the call.

    A group whose model or device is unknown, or does not split over its ranks, has no numbers and says why (`refused`).

    Raises ConfigError naming the file, line or column that cannot be used; or when no group can.
    """
    profile = load_engine(engine)
    read = {Path(path): read_published(path) for path in paths or published(*DEFAULT_TABLES)}
    tables = {path: rows for path, (rows, _) in read.items()}
    acceptance: dict[tuple[str, str, str], AcceptanceProfile | None] = {}
    by_pair: dict[tuple[str, str, str], list[PublishedRow]] = defaultdict(list)
    for rows in tables.values():
        for row in rows:
            by_pair[row.target, row.draft, row.draft_method].append(row)
    refusals = {row.pair: _refusal(row, profile) for rows in by_pair.values() for row in rows}
    for (target, draft, method), rows in by_pair.items():
        known = default_profile(target, method, draft)
        usable = [row for row in rows if refusals[row.pair] is None]
        acceptance[target, draft, method] = fit_rate(usable, known, profile) if fit_acceptance else known
    groups: list[dict[str, Any]] = []
    refused: list[str] = []
    for path, rows in tables.items():
        of_file: dict[tuple[str, str, str, str, int], list[PublishedRow]] = defaultdict(list)
        for row in rows:
            of_file[row.pair].append(row)
        for (device, target, draft, method, tp), members in of_file.items():
            law = acceptance[target, draft, method]
            name = f"{path.stem}/{device}/{target}/{draft}"
            if len({key[4] for key in of_file if key[:4] == (device, target, draft, method)}) > 1:
                name += f"/tp{tp}"
            if len({key[3] for key in of_file if key[:3] == (device, target, draft)}) > 1:
                name += f"/{method}"
            why = refusals[members[0].pair]
            if why is not None:
                refused.append(f"{path}: {why}")
                groups.append({"name": name, "rows": len(members)} | dict.fromkeys(MEASURES) | {"refused": why})
                continue
            summary = summarize(members, law, profile)
            groups.append({"name": name, **summary, "acceptance": _origin(law, fit_acceptance)})
    if len(refused) == len(groups):
        raise ConfigError(refused[0])
    return {"groups": groups, "refused": [line for _, lines in read.values() for line in lines]}


def _refusal(row: PublishedRow, engine: EngineProfile) -> str | None:
    """Why rows of this one's pair cannot be predicted; None where they can."""
    try:
        evaluate([row], load_profile(PROFILES_DIRECTORY / f"{FALLBACK_PROFILE}.json"), engine)
    except ConfigError as error:
        return str(error)
    return None


def _origin(law: AcceptanceProfile | None, fitted: bool) -> str:
    if law is None:
        return "needs acceptance"
    return "fitted" if fitted else f"profile {law.name}"


def read_published(path: str | Path) -> tuple[list[PublishedRow], list[str]]:
    """Rows of a table of speedups (`speedup`, `gamma`) or latencies (`autoregressive_ms_per_token`, …)."""
    return read_rows([path], PublishedRow, one_of=("speedup", "autoregressive_ms_per_token"))


def evaluate(
    rows: Sequence[PublishedRow],
    acceptance: AcceptanceProfile,
    engine: EngineProfile,
    *,
    hardware: HardwareProfile | None = None,
) -> Evaluation:
    """Every gamma for rows of one (device, target, draft, method, tp)."""
    first = rows[0]
    spec = SpeculationSpec(draft=first.draft, draft_method=first.draft_method, draft_budget=FITTED_BUDGET, gamma=1)
    setup = Setup.of(first.target, hardware or first.device, engine, spec, sampling=SAMPLING)
    check_tp(setup.model, first.tp_size, engine.vocabulary_multiple)
    batch, context, budget = (
        np.array([[float(getattr(row, name))] for row in rows])
        for name in ("batch_size", "context_len", "draft_budget")
    )
    budget = np.minimum(budget, context)

    points = Points(batch=batch, context=context, tp=first.tp_size, budget=budget, gamma=GAMMAS[None, :])
    middle = predict(setup, acceptance, points)
    bounds = interval(middle, tokens_error(middle, acceptance))
    shape = (len(rows), GAMMAS.size)
    return Evaluation(
        autoregressive_s=np.broadcast_to(middle.autoregressive_step_s, shape)[:, 0],
        speculative_s=np.broadcast_to(middle.tpot_s, shape),
        speedup=np.broadcast_to(middle.speedup, shape),
        speedup_low=np.broadcast_to(bounds.speedup_low, shape),
        speedup_high=np.broadcast_to(bounds.speedup_high, shape),
        first_rate=acceptance.conditional_rates(budget=budget, context=context, gamma_max=1)[:, 0, 0],
    )


def _at_reported(rows: Sequence[PublishedRow], evaluation: Evaluation, values: Array) -> Array:
    """One value per row: at its reported gamma, or at the predicted best where it has none."""
    gammas = [row.gamma or int(best) for row, best in zip(rows, evaluation.best, strict=True)]
    chosen: Array = values[np.arange(len(rows)), np.array(gammas) - 1]
    return chosen


def measured_speedups(rows: Sequence[PublishedRow]) -> Array:
    """As given, or from the latencies; NaN where the table has neither."""
    values = []
    for row in rows:
        if row.speedup is not None:
            values.append(row.speedup)
        elif row.autoregressive_s is not None and row.speculative_s is not None:
            values.append(row.autoregressive_s / row.speculative_s)
        else:
            values.append(np.nan)
    return np.array(values)


def summarize(
    rows: Sequence[PublishedRow], acceptance: AcceptanceProfile | None, engine: EngineProfile
) -> dict[str, Any]:
    """The errors over rows of one pair; None where the table or the acceptance does not allow a number."""
    evaluation = evaluate(rows, acceptance or load_profile(PROFILES_DIRECTORY / f"{FALLBACK_PROFILE}.json"), engine)
    unfitted = np.array([not is_fitted_on(row) for row in rows])
    alone = np.array([row.autoregressive_s or np.nan for row in rows])
    latency = np.abs(evaluation.autoregressive_s / alone - 1.0)
    summary: dict[str, Any] = {
        "rows": len(rows),
        "rows_unfitted": int(unfitted.sum()),
        "latency_mape": _mean(latency),
        "latency_mape_unfitted": _mean(latency[unfitted]),
    }
    if acceptance is None:
        return dict.fromkeys(MEASURES) | summary
    measured = measured_speedups(rows)
    error = np.abs(_at_reported(rows, evaluation, evaluation.speedup) / measured - 1.0)
    token = np.array([row.speculative_s or np.nan for row in rows])
    low, high = (_at_reported(rows, evaluation, each) for each in (evaluation.speedup_low, evaluation.speedup_high))
    inside = np.where(np.isnan(measured), np.nan, (measured >= low) & (measured <= high))
    return (
        summary
        | {
            "speculative_latency_mape": _mean(
                np.abs(_at_reported(rows, evaluation, evaluation.speculative_s) / token - 1.0)
            ),
            "speedup_mape": _mean(error),
            "speedup_mape_unfitted": _mean(error[unfitted]),
        }
        | _gamma_summary(rows, evaluation)
        | {"acceptance_rate": float(np.mean(evaluation.first_rate)), "speedup_coverage": _mean(inside)}
    )


def _gamma_summary(rows: Sequence[PublishedRow], evaluation: Evaluation) -> dict[str, float | None]:
    given = np.array([row.gamma is not None for row in rows])
    if not given.any():
        return {"gamma_exact": None, "gamma_within_1": None, "gamma_regret": None}
    reported = np.array([row.gamma or 0 for row in rows])[given]
    away = np.abs(evaluation.best[given] - reported)
    regret = 1.0 - _at_reported(rows, evaluation, evaluation.speedup)[given] / evaluation.speedup.max(axis=1)[given]
    return {
        "gamma_exact": float(np.mean(away == 0)),
        "gamma_within_1": float(np.mean(away <= 1)),
        "gamma_regret": float(np.mean(regret)),
    }


def _mean(values: Array) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def fit_rate(
    rows: Sequence[PublishedRow], known: AcceptanceProfile | None, engine: EngineProfile
) -> AcceptanceProfile | None:
    """The profile scaled to the rate at position 1 that brings the rows' speedups nearest (least absolute log error).

    The rate belongs to the rows' middle context and first budget. Without a profile of its own, a pair borrows the
    shape of the default one. None when no row has a speedup.
    """
    from scipy.optimize import minimize_scalar

    rows = [row for row in rows if not np.isnan(measured_speedups([row])[0])]
    if not rows:
        return known
    shape = known or load_profile(PROFILES_DIRECTORY / f"{FALLBACK_PROFILE}.json")
    context = float(np.exp(np.mean([np.log(row.context_len) for row in rows])))
    by_pair: dict[tuple[str, str, str, str, int], list[PublishedRow]] = defaultdict(list)
    for row in rows:
        by_pair[row.pair].append(row)

    def loss(rate: float) -> float:
        law = shape.at_rate(rate, budget=min(rows[0].draft_budget, context), context=context)
        total = 0.0
        for members in by_pair.values():
            evaluation = evaluate(members, law, engine)
            speedup = _at_reported(members, evaluation, evaluation.speedup)
            total += float(np.sum(np.abs(np.log(speedup / measured_speedups(members)))))
        return total

    coarse = np.linspace(*RATE_RANGE, 25)
    best = coarse[int(np.argmin([loss(rate) for rate in coarse]))]
    width = coarse[1] - coarse[0]
    bounds = (max(best - width, RATE_RANGE[0]), min(best + width, RATE_RANGE[1]))
    rate = float(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-4}).x)
    return shape.at_rate(rate, budget=min(rows[0].draft_budget, context), context=context)
