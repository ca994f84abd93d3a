"""Fits the profiles of serving engines (vllm, sglang, trtllm) to measured servers, and writes them.

    python scripts/fit_serving_engines.py FILE.csv… tests/data/serving/speculative_moe.csv

FILEs have the columns of `magicdec validate serving`. What an engine can do and how it is built (the start of each
profile below) comes from its documentation; the constants of magicdec/validate/serving_fit.py are fitted. Intervals are
set by fits without each device, and without each model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np

from magicdec.errors import MagicdecError
from magicdec.specs.engine import ENGINES_DIRECTORY, EngineProfile, save_engine
from magicdec.validate.serving_fit import (
    DRAFT_PRIORS,
    PRIORS,
    deviation,
    fit_engine,
    is_fitted_on,
    left_out_predictions,
)
from magicdec.validate.serving_rows import ServingRow, predict_rows, read_serving

FORMATS = ("fp8", "fp8_block", "nvfp4")
STARTS = (
    EngineProfile(
        name="vllm",
        drafts=("self/streamingllm", "self/topk", "model/full", "ngram", "suffix", "eagle", "eagle3", "mtp"),
        draft_on_all_ranks=True,
        description="vLLM: V1 engine, chunked prefill mixed into decoding passes, captured graphs",
        attention_kernel="split",
        native_formats=FORMATS,
        fused_experts=True,
        allreduce_kernels="vllm",
        catch_up="none",
        ngram_lookup_s_per_sequence=25e-6,
    ),
    EngineProfile(
        name="sglang",
        drafts=("model/full", "ngram", "eagle", "eagle3", "mtp"),
        draft_on_all_ranks=True,
        description="SGLang: prompts in passes of their own, overlapped scheduling, captured graphs",
        attention_kernel="split",
        native_formats=FORMATS,
        fused_experts=True,
        allreduce_kernels="sglang",
        mixes_prefill=False,
        memory_fraction=0.85,
        catch_up="none",
        ngram_lookup_s_per_sequence=25e-6,
    ),
    EngineProfile(
        name="trtllm",
        drafts=("model/full", "ngram", "eagle3", "mtp"),
        draft_on_all_ranks=True,
        description="TensorRT-LLM: in-flight batching, no eviction, captured graphs for decoding passes",
        attention_kernel="split",
        native_formats=FORMATS,
        fused_experts=True,
        allreduce_kernels="trtllm",
        admission="whole",
        catch_up="none",
        ngram_lookup_s_per_sequence=25e-6,
    ),
)
SOURCES = {
    "ngram_lookup_s_per_sequence": "assumed: a search of a few thousand tokens on the host",
    "constants": "scripts/fit_serving_engines.py on measured servers of aiconfigurator-core 0.12.0 (Apache-2.0): "
    "InferenceMAX and NVIDIA's runs",
    "relative_error": "spread of the fitted rows; other_device_error and other_model_error with each left out in turn",
}


def versions(rows: list[ServingRow]) -> str:
    """The versions, devices and models that a profile is fitted on."""
    named = sorted({row.engine_version for row in rows})
    return f"{len(rows)} rows of measured servers: {', '.join(named)}"


def rounded(profile: EngineProfile) -> EngineProfile:
    values = {name: float(f"{getattr(profile, name):.3g}") for name in PRIORS}
    return msgspec.structs.replace(profile, **values)


def report(name: str, what: str, rows: list[ServingRow], predicted: np.ndarray) -> None:
    error = np.abs(predicted / np.array([row.measured for row in rows]) - 1.0)
    for isolated in (True, False):
        chosen = error[np.array([row.is_isolated == isolated for row in rows])]
        chosen = chosen[np.isfinite(chosen)]
        if chosen.size:
            kind = "decoding alone" if isolated else "prefill inside"
            print(f"{name:7} {what:14} {kind:15} {chosen.size:4} rows: {chosen.mean():.1%}", flush=True)


def fit(start: EngineProfile, rows: list[ServingRow]) -> EngineProfile:
    """The start's profile, fitted, with its errors."""
    save_engine(start, ENGINES_DIRECTORY / f"{start.name}.toml")
    fitted = rounded(fit_engine(rows, start))
    seen = predict_rows(rows, {start.name: fitted})
    report(start.name, "fitted", rows, seen)
    errors = {"relative_error": deviation(seen, rows)}
    for kind, field in (("tp", None), ("device", "other_device_error"), ("model", "other_model_error")):
        predicted = left_out_predictions(rows, start.name, kind)
        report(start.name, f"{kind} left out", rows, predicted)
        if field is not None and np.isfinite(predicted).any():
            errors[field] = deviation(predicted, rows)
        elif field is None:
            errors["relative_error"] = max(errors["relative_error"], deviation(predicted, rows))
    return msgspec.structs.replace(
        fitted,
        fitted_on=versions(rows),
        fitted_devices=tuple(sorted({row.hardware for row in rows})),
        fitted_models=tuple(sorted({row.model for row in rows})),
        sources=SOURCES,
        **{name: round(error, 3) for name, error in errors.items()},
    )


def fit_drafts(profiles: list[EngineProfile], rows: list[ServingRow]) -> list[EngineProfile]:
    """The profiles with the costs of drafts, from speculative rows of the engine; without any, vLLM's on top of the
    engine's own step."""
    result: list[EngineProfile] = []
    for profile in profiles:  # vLLM's first
        mine = [row for row in rows if row.engine == profile.name]
        if mine:
            fitted = fit_engine(mine, profile, DRAFT_PRIORS)
            costs = {name: float(f"{getattr(fitted, name):.3g}") for name in DRAFT_PRIORS}
            source = f"fitted to {len(mine)} chains: {', '.join(sorted({row.source for row in mine}))}"
        else:
            vllm = result[0]
            costs = {name: getattr(vllm, name) for name in DRAFT_PRIORS}
            beyond = vllm.step_overhead_s - vllm.autoregressive_overhead_s
            costs["step_overhead_s"] = float(f"{profile.autoregressive_overhead_s + max(beyond, 0.0):.3g}")
            source = "vLLM's, on top of this engine's own step: nothing was measured"
        result.append(msgspec.structs.replace(profile, **costs, sources=SOURCES | {"draft costs": source}))
        if mine:
            error = predict_rows(mine, {profile.name: result[-1]}) / np.array([row.measured for row in mine]) - 1.0
            print(f"{profile.name:7} speedup of {len(mine)} chains: {np.abs(error).mean():.1%}")
    return result


def main(paths: list[Path]) -> None:
    rows, refused = read_serving(paths)
    if refused:
        print(f"{len(refused)} rows cannot be predicted; the first: {refused[0]}")
    profiles = []
    for start in STARTS:
        mine = [row for row in rows if row.engine == start.name and is_fitted_on(row)]
        profiles.append(fit(start, mine))
    for profile in fit_drafts(profiles, [row for row in rows if row.metric == "speedup"]):
        save_engine(profile, ENGINES_DIRECTORY / f"{profile.name}.toml")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        main([Path(argument) for argument in sys.argv[1:]])
    except MagicdecError as error:
        sys.exit(f"error: {error}")
