"""Fits the profiles of the MagicDec paper's runtime to its published measurements, and writes them.

    python -m evidence.fits.engine_profile

Written are the engine profile `magicdec-2024` and the acceptance profiles that `plan` uses by default. In
this order, each step using the ones before:

1. depth law (concentration, drift, its depth), shared by all drafts of this runtime: tokens per step of Llama-3.1-8B
   with SnapKV, all gammas, PG-19 and LongBench v2;
2. engine constants and the rate of TinyLlama-1.1B for Llama-2-7B-32K: half of the latency table (a checkerboard over
   contexts × batches, `PublishedRow.is_fitted_on`), autoregressive and speculative times, the latter at the
   model's best gamma;
3. the rate of Llama-3.1-8B's self-draft: half of its speedups, by the same checkerboard; its growth with the context:
   the published rates against context.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from scipy.optimize import minimize_scalar

from evidence import DATA
from evidence import blocks as depth
from magicdec.counts import Array
from magicdec.perfmodel.acceptance import (
    PROFILES_DIRECTORY,
    AcceptanceProfile,
    MeasuredProfile,
    save_profile,
)
from magicdec.perfmodel.acceptance.law import Law, LawError
from magicdec.specs.engine import ENGINES_DIRECTORY, EngineProfile, save_engine
from magicdec.specs.engine_tables import EngineDraft
from magicdec.validate.published_speedups import (
    FITTED_DEVICE,
    PublishedRow,
    evaluate,
    read_published,
    summarize,
)
from magicdec.validate.rows import PUBLISHED_DIRECTORY, Size, read_rows

LATENCY = "latency_8xa100_llama2_tinyllama.csv"
SPEEDUP = "speedup_8xa100.csv"
RATES = "acceptance_llama31_8b_streamingllm512_pg19.csv"
SNAPKV = "acceptance_snapkv.csv"
PAGE = "MagicDec project page (https://infini-ai-lab.github.io/MagicDec-part2/)"
FAMILY = ["llama-3-8b", "llama-3.1-70b", "llama-3.1-405b", "llama-3-70b"]

PARAMETERS = {
    "kernels.attention_factor": (0.9, 0.3, "log"),
    "kernels.verify_attention_factor": (1.0, 0.2, "log"),
    "kernels.attention_wave_weight": (0.35, 0.3, "plain"),
    "sampling.sampling_passes": (40.0, 1.0, "log"),
    "sampling.accept_passes": (80.0, 1.0, "log"),
    "overheads.layer_overhead_s": (40e-6, 60e-6, "plain"),
    "overheads.forward_overhead_s": (0.5e-3, 1e-3, "plain"),
    "overheads.draft_step_overhead_s": (0.2e-3, 0.5e-3, "plain"),
    "overheads.step_overhead_s": (0.5e-3, 1e-3, "plain"),
}
"""Engine constants: prior middle, prior standard deviation, and whether that is of the logarithm."""
LOGIT_RATE_PRIOR = (1.6, 1.0)
ROW_ERROR = 0.02
VERIFY_STARTS = (0.05, 0.15, 0.25)
FILL_EXPONENT = 1.0
RATE_RANGE = (0.05, 0.995)
"""Rates at position 1 that speedups are fitted within."""
LARGEST_REJECTION = 0.5
"""Groups that reject more at position 1 are broken runs (a model beyond its context), not sparse drafts."""


def fit_depth_law() -> Law:
    """Concentration, drift and depth from all rows of Llama-3.1-8B with SnapKV."""
    rows = [
        row
        for row in read_rows([DATA / "acceptance" / SNAPKV], depth.PublishedTokens)[0]
        if row.model == "llama-3.1-8b"
    ]
    return depth.fit_cells(rows, has_shape=True).law


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """The acceptance rate at one context."""

    context_len: Size
    acceptance_rate: Annotated[float, msgspec.Meta(ge=0, le=1)]


def context_growth() -> tuple[float, float]:
    """Exponent of 1 - alpha against context, and its standard error."""
    rows, _ = read_rows([DATA / "acceptance" / RATES], Rate)
    x, y = np.log([(row.context_len, 1.0 - row.acceptance_rate) for row in rows]).T
    (slope, _), covariance = np.polyfit(x, y, 1, cov=True)
    return float(slope), float(np.sqrt(covariance[0, 0]))


def budget_exponent() -> tuple[float, float]:
    """Exponent of 1 - alpha against the budget: mean and standard deviation over the SnapKV logs' (model, dataset,
    context) groups. StreamingLLM was published with one budget only; this is what sparse self-drafts show elsewhere."""
    exponents = []
    by_model: dict[str, list[depth.PublishedTokens]] = defaultdict(list)
    for row in read_rows([DATA / "acceptance" / SNAPKV], depth.PublishedTokens)[0]:
        by_model[row.model].append(row)
    for rows in by_model.values():
        cells: dict[tuple[Any, float], dict[float, float]] = defaultdict(dict)
        for row, rate in zip(
            rows, depth.fit_cells(rows, has_shape=True).first_rates(rows), strict=True
        ):
            cells[row.group, row.context][row.budget] = 1.0 - float(rate)
        for (_, context), rejections in cells.items():
            budgets, values = (
                np.array(list(rejections)),
                np.array(list(rejections.values())),
            )
            if len(budgets) > 2 and values.max() < LARGEST_REJECTION:
                level = np.log(values) - FILL_EXPONENT * np.log1p(-budgets / context)
                exponents.append(-float(np.polyfit(np.log(budgets), level, 1)[0]))
    return float(np.mean(exponents)), float(np.std(exponents, ddof=1))


def engine_from(values: dict[str, float]) -> EngineProfile:
    return EngineProfile(
        name="magicdec-2024",
        description="The runtime of the MagicDec paper: tensor parallelism after gpt-fast, FlashInfer, captured graphs",
        drafts=dict.fromkeys(
            (
                "self/streamingllm",
                "self/snapkv",
                "model/full",
                "model/streamingllm",
                "model/snapkv",
            ),
            EngineDraft(),
        ),
    ).with_constants(
        {
            "kernels.attention_blocks_per_multiprocessor": 2.0,
            "paths.standalone_draft_tp_size": 1,
            "paths.catch_up": "always",
            "sampling.vocabulary": "gather",
            **values,
        }
    )


def fit_engine(
    rows: list[PublishedRow], law: Law
) -> tuple[EngineProfile, AcceptanceProfile]:
    """Constants and rate by least squares on the logs of both latencies, with weak priors."""
    from scipy.optimize import least_squares

    alone = np.array([row.autoregressive_s for row in rows], dtype=np.float64)
    token = np.array([row.speculative_s for row in rows], dtype=np.float64)
    middle = [0.0 if kind == "log" else 1.0 for _, _, kind in PARAMETERS.values()] + [
        LOGIT_RATE_PRIOR[0]
    ]
    width = [s if kind == "log" else s / m for m, s, kind in PARAMETERS.values()] + [
        LOGIT_RATE_PRIOR[1]
    ]

    def unpack(x: Array) -> tuple[EngineProfile, AcceptanceProfile]:
        values = {
            name: float(m * np.exp(x[i]) if kind == "log" else m * max(x[i], 0.0))
            for i, (name, (m, _, kind)) in enumerate(PARAMETERS.items())
        }
        return engine_from(values), pair_profile(
            rows[0], law, float(1.0 / (1.0 + np.exp(-x[-1])))
        )

    def residuals(x: Array) -> Array:
        engine, acceptance = unpack(x)
        result = evaluate(rows, acceptance, engine)
        best = result.speculative_s.min(axis=1)
        data = np.concatenate(
            [np.log(result.autoregressive_s / alone), np.log(best / token)]
        )
        return np.concatenate(
            [data / ROW_ERROR, (x - np.array(middle)) / np.array(width)]
        )

    fits = []
    for (
        verify
    ) in VERIFY_STARTS:  # the best gamma jumps, so that there are several minima
        start = np.array(middle)
        start[list(PARAMETERS).index("kernels.verify_attention_factor")] = verify
        fits.append(least_squares(residuals, start, diff_step=[1e-3], max_nfev=40))
    return unpack(np.asarray(min(fits, key=lambda fit: float(fit.cost)).x))


def pair_profile(row: PublishedRow, law: Law, rate: float) -> AcceptanceProfile:
    """A profile of the row's pair with `rate` at position 1, budget 512, context 8192.

    `law` holds the growth with budget and context of a self-draft; a draft model errs with its full cache too, so that
    its budget is taken to matter half as much.
    """
    scaled = msgspec.structs.replace(
        law,
        rejection=(1.0 - rate) * (1.0 - 512.0 / 8192.0) ** -FILL_EXPONENT
        if row.draft == "self"
        else 1.0 - rate,
        reference_budget=512.0,
        reference_context=8192.0,
        budget_exponent=law.budget_exponent * (1.0 if row.draft == "self" else 0.5),
        fill_exponent=FILL_EXPONENT if row.draft == "self" else 0.0,
    )
    return MeasuredProfile(
        model=row.target,
        draft=row.draft,
        draft_method=row.draft_method,
        law=scaled,
        fitted=True,
    )


def held_contexts(
    rows: list[PublishedRow],
) -> list[tuple[list[PublishedRow], list[PublishedRow]]]:
    """The rows split once per context: the others to fit on, and that context's to predict."""
    contexts = sorted({row.context_len for row in rows})
    return [
        (
            [row for row in rows if row.context_len != context],
            [row for row in rows if row.context_len == context],
        )
        for context in contexts
    ]


class EngineErrors(NamedTuple):
    """Root mean square errors, relative, at contexts left out of the fit, and the jackknife's of log(1 - rate)."""

    latency: float
    speedup: float
    log_rejection: float


def engine_errors(rows: list[PublishedRow], law: Law) -> EngineErrors:
    """The engine and the rate fitted without each context in turn, against what they then predict for it."""
    latency, speedup, levels = [], [], []
    for kept, out in held_contexts(rows):
        engine, acceptance = fit_engine(kept, law)
        result = evaluate(out, acceptance, engine)
        latency.extend(
            np.log(
                result.autoregressive_s
                / np.array([row.autoregressive_s for row in out])
            )
        )
        speedup.extend(
            np.log(result.speedup.max(axis=1) / [row.measured_speedup for row in out])
        )
        levels.append(np.log(acceptance.law.rejection))
    return EngineErrors(
        latency=float(np.sqrt(np.mean(np.square(latency)))),
        speedup=float(np.sqrt(np.mean(np.square(speedup)))),
        log_rejection=float(np.sqrt(len(levels) - 1) * np.std(levels)),
    )


def fit_rate(
    rows: Sequence[PublishedRow], shape: AcceptanceProfile, engine: EngineProfile
) -> AcceptanceProfile:
    """The profile scaled to the rate at position 1 that brings predictions nearest to the rows' speedups (least
    absolute log error). The rate belongs to the rows' middle context and first budget."""
    log_contexts = np.log([row.context_len for row in rows])
    context = float(np.exp(log_contexts.mean()))
    budget = min(rows[0].draft_budget, context)
    measured = np.array([row.measured_speedup for row in rows])

    def loss(rate: float) -> float:
        law = shape.at_rate(rate, budget=budget, context=context)
        evaluation = evaluate(rows, law, engine)
        speedup = evaluation.at_reported(rows, evaluation.speedup)
        return float(np.abs(np.log(speedup / measured)).sum())

    lowest, highest = RATE_RANGE
    coarse = np.linspace(lowest, highest, 25)
    best = min(coarse, key=loss)
    width = coarse[1] - coarse[0]
    bounds = (max(best - width, lowest), min(best + width, highest))
    optimum = minimize_scalar(
        loss, bounds=bounds, method="bounded", options={"xatol": 1e-4}
    )
    return shape.at_rate(float(optimum.x), budget=budget, context=context)


def rejection_error(
    rows: list[PublishedRow], start: AcceptanceProfile, engine: EngineProfile
) -> float:
    """Standard deviation of log(1 - alpha) that explains the speedups' errors at contexts left out of the rate's fit,
    beyond the engine's own error."""
    errors, slopes = [], []
    for kept, out in held_contexts(rows):
        fitted = fit_rate(kept, start, engine)
        gammas = np.array([row.gamma for row in out]) - 1
        each = np.arange(len(out))
        errors.extend(
            np.log(
                evaluate(out, fitted, engine).speedup[each, gammas]
                / [row.measured_speedup for row in out]
            )
        )
        more = msgspec.structs.replace(fitted.law, rejection=1.1 * fitted.law.rejection)
        shifted = evaluate(
            out, msgspec.structs.replace(fitted, law=more), engine
        ).speedup[each, gammas]
        slopes.extend(
            np.log(shifted / evaluate(out, fitted, engine).speedup[each, gammas])
            / np.log(1.1)
        )
    beyond = max(
        float(np.mean(np.square(errors))) - engine.errors.speedup_relative_error**2, 0.0
    )
    return float(np.sqrt(beyond / np.mean(np.square(slopes))))


def describe(profile: AcceptanceProfile, **fields: Any) -> AcceptanceProfile:
    return msgspec.structs.replace(profile, **fields)


def write_self_profile(
    engine: EngineProfile,
    law: Law,
    rows: list[PublishedRow],
    growth_error: float,
    budget_error: float,
) -> AcceptanceProfile:
    start = pair_profile(rows[0], law, 0.85)
    chosen = [row for row in rows if row.is_fitted_on]
    fitted = fit_rate(chosen, start, engine)
    error = rejection_error(chosen, start, engine)
    profile = describe(
        fitted,
        name="llama-3.1-8b-streamingllm-pg19",
        applies_to=FAMILY,
        dataset="pg-19",
        definition="conditional rate at position 1, the one number fitted to half of the published speedups; the "
        "page's own acceptance rates (0.84 at 4k to 0.79 at 100k, definition not given) set its growth with the "
        "context only: taken as rates at position 1 they would predict the speedups 10 to 14 % too low; depth law "
        "and exponent of the budget from the SnapKV logs (mean and deviation over their groups); the error of the "
        "level from contexts left out of its fit",
        source=f"{PAGE}, figure 6a and acceptance rates against context; budget 512",
        error=LawError(
            log_rejection=round(error, 3),
            budget_exponent=round(budget_error, 3),
            context_exponent=growth_error,
            depth=0.1,
        ),
        measured_budgets=[512.0],
        measured_contexts=sorted({float(row.context_len) for row in rows}),
        measured_gamma=5,
    )
    save_profile(profile, PROFILES_DIRECTORY / f"{profile.name}.json")
    return profile


def write_pair_profile(
    profile: AcceptanceProfile,
    rows: list[PublishedRow],
    level_error: float,
    budget_error: float,
) -> None:
    described = describe(
        profile,
        name="llama-2-7b-32k-tinyllama-1.1b-streamingllm",
        applies_to=["llama-2-7b"],
        dataset="pg-19",
        definition="conditional rate at position 1, the one number fitted to half of the published latencies; growth "
        "with the context as measured for Llama-3.1-8B; depth law from the SnapKV logs; exponent of the budget "
        "half of theirs",
        source=f"{PAGE}, throughput-latency charts; budget 512",
        error=LawError(
            log_rejection=round(level_error, 3),
            budget_exponent=round(budget_error, 3),
            context_exponent=0.03,
            depth=0.05,
        ),
        measured_budgets=[512.0],
        measured_contexts=sorted({float(row.context_len) for row in rows}),
    )
    save_profile(described, PROFILES_DIRECTORY / f"{described.name}.json")


def write_snapkv_profile() -> None:
    """SnapKV on LongBench v2, the lower of the two datasets; the other lies within its error."""
    rows = [
        row
        for row in read_rows([DATA / "acceptance" / SNAPKV], depth.PublishedTokens)[0]
        if row.model == "llama-3.1-8b"
    ]
    fit = depth.fit_cells(rows, has_shape=True)
    chosen = [row for row in rows if row.group[1] == "longbench-v2"]
    log_rejection = np.log(1.0 - fit.first_rates(chosen))
    budget, context = (
        np.log([getattr(row, name) for row in chosen]) for name in ("budget", "context")
    )
    matrix = np.stack(
        [np.ones(len(chosen)), -(budget - np.log(1024.0)), context - np.log(8192.0)],
        axis=1,
    )
    fill = np.log(1.0 - np.exp(budget - context))
    level, by_budget, by_context = np.linalg.lstsq(
        matrix, log_rejection - FILL_EXPONENT * fill, rcond=None
    )[0]
    law = msgspec.structs.replace(
        fit.law,
        rejection=float(np.exp(level)),
        budget_exponent=float(max(by_budget, 0.0)),
        context_exponent=float(by_context),
        fill_exponent=FILL_EXPONENT,
        reference_budget=1024.0,
        reference_context=8192.0,
    )
    profile = MeasuredProfile(
        name="llama-3.1-8b-snapkv-longbench-v2",
        model="llama-3.1-8b",
        draft_method="snapkv",
        applies_to=FAMILY,
        dataset="longbench-v2",
        definition="tokens per step at gamma 16; depth law shared with the PG-19 rows (gamma 2 to 16), whose "
        "rejection is up to five times lower: that difference is in the error. Small samples at batch 1, another "
        "harness than the StreamingLLM rates",
        source="result logs of praisechan/MagicDec (https://github.com/praisechan/MagicDec), 80 tokens of 10 prompts",
        law=law,
        error=LawError(
            log_rejection=0.8, budget_exponent=0.1, context_exponent=0.2, depth=0.1
        ),
        measured_budgets=sorted({row.budget for row in chosen}),
        measured_contexts=sorted({row.context for row in chosen}),
        measured_gamma=16,
    )
    save_profile(profile, PROFILES_DIRECTORY / f"{profile.name}.json")


def write_engine(engine: EngineProfile, errors: EngineErrors) -> EngineProfile:
    rounded = {name: float(f"{engine.constant(name):.4g}") for name in PARAMETERS}
    engine = engine.with_constants(
        {
            **rounded,
            "errors.relative_error": round(errors.latency, 3),
            "errors.speedup_relative_error": round(errors.speedup, 3),
            "fitted_device": FITTED_DEVICE,
            "fitted_on": "half of the published latencies of Llama-2-7B-32K with TinyLlama-1.1B on 8xA100 (9 of 20 "
            "shapes, a checkerboard over contexts x batches)",
            "sources": {
                "constants": f"evidence/fits/engine_profile.py on {PAGE}, throughput-latency charts",
                "errors.relative_error": "root mean square error of the latencies at contexts left out of the fit, "
                "each in turn; speedup_relative_error likewise",
                "sampling.sampling_passes": "fitted; of this size because the runtime sorts the vocabulary for top-p "
                "at each draw",
                "kernels.attention_blocks_per_multiprocessor": "two: where the published latencies dip "
                "(64 sequences x 4 heads)",
                "paths.standalone_draft_tp_size": "one rank fits the speculative latencies to 1 %, eight to 4 %",
            },
        }
    )
    save_engine(engine, ENGINES_DIRECTORY / "magicdec-2024.toml")
    return engine


def report(
    name: str,
    rows: list[PublishedRow],
    profile: AcceptanceProfile,
    engine: EngineProfile,
) -> None:
    held_out = [row for row in rows if not row.is_fitted_on]
    for part, members in (("all", rows), ("held out", held_out)):
        numbers = {
            key: value
            for key, value in summarize(members, profile, engine).items()
            if "unfitted" not in key
        }
        print(
            name,
            part,
            {
                key: round(value, 4)
                for key, value in numbers.items()
                if value is not None
            },
        )


def main() -> None:
    growth, growth_error = context_growth()
    by_budget, budget_error = budget_exponent()
    law = msgspec.structs.replace(
        fit_depth_law(), context_exponent=growth, budget_exponent=by_budget
    )
    print(
        f"depth law: k {law.concentration:.3g}, G {law.drift:.3g}, tau {law.drift_depth:.3g}; growth {growth:.3g}"
    )
    print(f"exponent of the budget: {by_budget:.3g} ± {budget_error:.3g}")
    latencies, speedups = (
        read_published(PUBLISHED_DIRECTORY / LATENCY)[0],
        read_published(PUBLISHED_DIRECTORY / SPEEDUP)[0],
    )
    chosen = [row for row in latencies if row.is_fitted_on]
    errors = engine_errors(chosen, law)
    engine, pair = fit_engine(chosen, law)
    engine = write_engine(engine, errors)
    print(
        {
            name: engine.constant(name)
            for name in (
                *PARAMETERS,
                "errors.relative_error",
                "errors.speedup_relative_error",
            )
        }
    )
    write_pair_profile(pair, latencies, errors.log_rejection, budget_error)
    own = [row for row in speedups if row.draft == "self"]
    self_profile = write_self_profile(engine, law, own, growth_error, budget_error)
    write_snapkv_profile()
    report("latency", latencies, pair, engine)
    report("speedup", [row for row in speedups if row.draft != "self"], pair, engine)
    report("self", own, self_profile, engine)


if __name__ == "__main__":
    main()
