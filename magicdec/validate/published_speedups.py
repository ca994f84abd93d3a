"""Compares published end-to-end latencies and speedups with their predictions.

There is one group per file × (device, target, draft). The device's hardware profile, the paper's
engine profile and the pair's acceptance profile predict each row's autoregressive latency, speedup
and best gamma. The engine profile was fitted on some of the shipped rows (`is_fitted_on`); figures
named `…_unfitted` count the other rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import (
    PROFILES_DIRECTORY,
    AcceptanceProfile,
    default_profile,
    load_profile,
)
from magicdec.perfmodel.acceptance.believed import Question, profile_of
from magicdec.perfmodel.intervals import interval, tokens_error
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import predict
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import EngineProfile, load_engine
from magicdec.specs.parallel import check_tp
from magicdec.specs.speculation import (
    MAX_GAMMA,
    SELF,
    DraftMethod,
    SamplingSpec,
    SpeculationSpec,
)
from magicdec.units import MILLI
from magicdec.validate.rows import Count, columns, places, published, read_rows

DEFAULT_TABLES = ("latency_8xa100_llama2_tinyllama.csv", "speedup_8xa100.csv")
ENGINE = "magicdec-2024"
GAMMAS = np.arange(1, MAX_GAMMA + 1)
SAMPLING = SamplingSpec(temperature=1.0)
"""The fitted cost of sampling in the engine profile includes the paper's filter of the vocabulary.
"""
FITTED_CONTEXTS = (1024, 2048, 4000, 8000, 16000, 24000, 32000, 64000, 100000)
FITTED_BATCHES = (32, 48, 64, 128, 256)
FITTED_DEVICE, FITTED_TP, FITTED_BUDGET = "a100-sxm-80gb", 8, 512
FALLBACK_PROFILE = PROFILES_DIRECTORY / "llama-3.1-8b-streamingllm-pg19.json"
"""Stands in for the acceptance of a pair without a profile, whose latencies are compared all the same."""
Milliseconds = Annotated[float, msgspec.Meta(ge=1e-6, le=1e9)]
MEASURES = (
    "speedup_mape",
    "latency_mape",
    "gamma_exact",
    "gamma_within_1",
    "gamma_regret",
    "acceptance_rate",
    "speedup_coverage",
)


class PublishedRow(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"draft_budget": "draft_budget_tokens"},
):
    """One measured configuration. None: its table does not give the value."""

    where: str = ""
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
    def autoregressive_s(self) -> float:
        return (self.autoregressive_ms_per_token or np.nan) * MILLI

    @property
    def speculative_s(self) -> float:
        return (self.speculative_ms_per_token or np.nan) * MILLI

    @property
    def measured_speedup(self) -> float:
        """The stated speedup, else the ratio of the latencies. NaN: the table has neither."""
        return self.speedup or self.autoregressive_s / self.speculative_s

    @property
    def file(self) -> Path:
        return Path(self.where.rsplit(":", 1)[0])

    @property
    def drafting(self) -> tuple[str, str, str]:
        return self.target, self.draft, self.draft_method

    @property
    def pair(self) -> tuple[str, str, str, str, int]:
        return self.device, *self.drafting, self.tp_size

    @property
    def is_fitted_on(self) -> bool:
        """Whether its shape is in the half that constants were fitted on: a checkerboard over
        contexts × batches.

        Latencies of the pair Llama-2-7B-32K, TinyLlama-1.1B gave the engine's constants and that
        pair's rate; speedups of Llama-3.1-8B gave that pair's rate alone.
        """
        server = (self.device, self.tp_size, self.draft_budget)
        if server != (FITTED_DEVICE, FITTED_TP, FITTED_BUDGET):
            return False
        has_latency = self.autoregressive_ms_per_token is not None
        gives_constants = self.target == "llama-2-7b-32k" and has_latency
        gives_rate = self.target == "llama-3.1-8b" and self.draft == SELF
        if not gives_constants and not gives_rate:
            return False
        if (
            self.context_len not in FITTED_CONTEXTS
            or self.batch_size not in FITTED_BATCHES
        ):
            return False
        column = FITTED_CONTEXTS.index(self.context_len)
        row = FITTED_BATCHES.index(self.batch_size)
        return (column + row) % 2 == 1


class Evaluation(NamedTuple):
    """Predictions of some rows of one pair; axis 1 is GAMMAS."""

    autoregressive_s: Array
    speculative_s: Array
    speedup: Array
    speedup_low: Array
    speedup_high: Array
    first_rate: Array

    @property
    def best(self) -> Any:
        """The predicted best gamma of each row."""
        return GAMMAS[np.argmax(self.speedup, axis=1)]

    def at_reported(self, rows: Sequence[PublishedRow], values: Array) -> Array:
        """One value per row: at its reported gamma, or at the predicted best one."""
        places_of_gammas = []
        for row, best in zip(rows, self.best, strict=True):
            gamma = row.gamma or int(best)
            places_of_gammas.append(gamma - 1)
        return np.asarray(values[np.arange(len(rows)), places_of_gammas])


def validate_published(
    paths: Sequence[str | Path] | None = None,
    *,
    acceptance: Literal["profile", "believed"] = "profile",
) -> dict[str, Any]:
    """One group per file × (device, target, draft); fractions are plain numbers. Without paths: the
    shipped tables. `acceptance`: the pair's shipped profile, or what a plan believes that is told
    neither a profile nor a text.

    A group whose model or device is unknown, or whose model does not split over its ranks, has no
    numbers but a reason (`refused`).

    Raises ConfigError naming the file, line or column that cannot be used; or when no group can.
    """
    profile = load_engine(ENGINE)
    rows: list[PublishedRow] = []
    lines: list[str] = []
    for path in dict.fromkeys(paths or published(*DEFAULT_TABLES)):
        accepted, refused = read_published(path)
        rows += accepted
        lines += refused
    # what refuses one row of a pair refuses them all
    first_of_pair: dict[Any, PublishedRow] = {}
    for row in rows:
        first_of_pair.setdefault(row.pair, row)
    refusals = {pair: _refusal(row, profile) for pair, row in first_of_pair.items()}
    groups: list[dict[str, Any]] = []
    by_group = places([(row.file, row.pair)] for row in rows)
    for (file, pair), members in by_group.items():
        in_file = [other for other_file, other in by_group if other_file == file]
        group: dict[str, Any] = {"name": _group_name(file, pair, in_file)}
        reason = refusals[pair]
        if reason is None:
            _, target, draft, method, _ = pair
            law = default_profile(target, method, draft)
            if acceptance == "believed":
                law = _believed(target, draft, method)
            group |= summarize([rows[index] for index in members], law, profile)
            group["acceptance"] = "needs acceptance"
            if law is not None:
                group["acceptance"] = f"profile {law.name}"
            if law is not None and law.is_assumed:
                group["acceptance"] = law.source
        else:
            group["rows"] = len(members)
            group |= dict.fromkeys(MEASURES)
            group["refused"] = reason
        groups.append(group)
    if all("refused" in group for group in groups):
        reason = groups[0]["refused"]
        raise ConfigError(f"{rows[0].file}: {reason}")
    return {"groups": groups, "refused": lines}


def _believed(target: str, draft: str, method: DraftMethod) -> AcceptanceProfile:
    question = Question.about(load_model_spec(target), draft, method)
    return profile_of(question, draft=draft, method=method)


def _group_name(
    file: Path, pair: tuple[Any, ...], pairs: Sequence[tuple[Any, ...]]
) -> str:
    """File, device, target and draft of a group. Ranks and method follow if they alone tell it from
    another group of the file."""
    device, target, draft, method, tp = pair
    methods = set()
    sizes = set()
    for other in pairs:
        if other[:3] == pair[:3]:
            methods.add(other[3])
            if other[3] == method:
                sizes.add(other[4])
    name = f"{file.stem}/{device}/{target}/{draft}"
    if len(sizes) > 1:
        name += f"/tp{tp}"
    if len(methods) > 1:
        name += f"/{method}"
    return name


def _refusal(row: PublishedRow, engine: EngineProfile) -> str | None:
    """The reason why rows of this row's pair cannot be predicted. None: they can."""
    try:
        evaluate([row], load_profile(FALLBACK_PROFILE), engine)
    except ConfigError as error:
        return str(error)
    return None


def read_published(path: str | Path) -> tuple[list[PublishedRow], list[str]]:
    """Rows of a table of speedups (`speedup`, `gamma`) or latencies (`autoregressive_ms_per_token`,
    …).
    """
    return read_rows(
        [path], PublishedRow, one_of=("speedup", "autoregressive_ms_per_token")
    )


def evaluate(
    rows: Sequence[PublishedRow], acceptance: AcceptanceProfile, engine: EngineProfile
) -> Evaluation:
    """Every gamma for rows of one (device, target, draft, method, tp)."""
    first = rows[0]
    spec = SpeculationSpec(
        draft=first.draft,
        draft_method=first.draft_method,
        draft_budget=FITTED_BUDGET,
        gamma=1,
    )
    setup = Setup.of(first.target, first.device, engine, spec, sampling=SAMPLING)
    check_tp(setup.model, first.tp_size, engine.sampling.vocabulary_multiple)
    batch, context, budget = columns(rows, "batch_size", "context_len", "draft_budget")
    context = context[:, None]
    budget = np.minimum(budget[:, None], context)
    points = Points(
        batch=batch[:, None],
        context=context,
        tp=first.tp_size,
        budget=budget,
        gamma=GAMMAS[None, :],
    )
    middle = predict(setup, acceptance, points)
    bounds = interval(middle, tokens_error(middle, acceptance))
    rates = acceptance.conditional_rates(budget=budget, context=context, gamma_max=1)

    def by_gamma(values: Array) -> Array:
        return np.broadcast_to(values, (len(rows), GAMMAS.size))

    autoregressive_s = by_gamma(middle.autoregressive_step_s)
    return Evaluation(
        autoregressive_s=autoregressive_s[:, 0],
        speculative_s=by_gamma(middle.tpot_s),
        speedup=by_gamma(middle.speedup),
        speedup_low=by_gamma(bounds.speedup_low),
        speedup_high=by_gamma(bounds.speedup_high),
        first_rate=rates[:, 0, 0],
    )


def summarize(
    rows: Sequence[PublishedRow],
    acceptance: AcceptanceProfile | None,
    engine: EngineProfile,
) -> dict[str, Any]:
    """The errors over rows of one pair. None: the table or the acceptance does not give the
    figure."""
    predicted = evaluate(rows, acceptance or load_profile(FALLBACK_PROFILE), engine)
    unfitted = np.array([not row.is_fitted_on for row in rows])
    autoregressive_s = np.array([row.autoregressive_s for row in rows])
    latency = np.abs(predicted.autoregressive_s / autoregressive_s - 1.0)
    summary: dict[str, Any] = {
        "rows": len(rows),
        "rows_unfitted": int(unfitted.sum()),
        "latency_mape": _mean(latency),
        "latency_mape_unfitted": _mean(latency[unfitted]),
    }
    if acceptance is None:
        return dict.fromkeys(MEASURES) | summary
    measured = np.array([row.measured_speedup for row in rows])
    speedup = predicted.at_reported(rows, predicted.speedup)
    error = np.abs(speedup / measured - 1.0)
    speculative_s = np.array([row.speculative_s for row in rows])
    predicted_s = predicted.at_reported(rows, predicted.speculative_s)
    low = predicted.at_reported(rows, predicted.speedup_low)
    high = predicted.at_reported(rows, predicted.speedup_high)
    is_inside = (measured >= low) & (measured <= high)
    inside = np.where(np.isnan(measured), np.nan, is_inside)
    gammas = np.array([row.gamma or 0 for row in rows])
    is_given = gammas > 0
    away = np.abs(predicted.best - gammas)[is_given]
    highest = predicted.speedup.max(axis=1)
    regret = (1.0 - speedup / highest)[is_given]
    return summary | {
        "speculative_latency_mape": _mean(np.abs(predicted_s / speculative_s - 1.0)),
        "speedup_mape": _mean(error),
        "speedup_mape_unfitted": _mean(error[unfitted]),
        "gamma_exact": _mean(away == 0),
        "gamma_within_1": _mean(away <= 1),
        "gamma_regret": _mean(regret),
        "acceptance_rate": float(np.mean(predicted.first_rate)),
        "speedup_coverage": _mean(inside),
    }


def _mean(values: Any) -> float | None:
    known = values[~np.isnan(values)]
    if known.size:
        return float(known.mean())
    return None
