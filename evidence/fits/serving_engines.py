"""Fits the profiles of serving engines (vllm, sglang, trtllm) to measured servers, and writes them.

    python -m evidence.fits.serving_engines [FILE.csv…]

FILEs (without any: those of evidence/data/servers) have the columns of `python -m evidence serving`. What an engine
can do and how it is built stays as it stands in its profile; the constants of evidence/serving.py are fitted,
from the same start whatever the profiles hold. Intervals are set by fits without each tp, device and model in turn.
Nothing is written before the end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from evidence import DATA
from evidence.serving import (
    LEFT_OUT,
    PRIORS,
    UNSEEN_SHARE,
    Engines,
    ServingRow,
    deviation,
    fit_engines,
    left_out_predictions,
    predict_rows,
    without_copies,
)
from magicdec.counts import Array
from magicdec.errors import MagicdecError
from magicdec.fitting import Free
from magicdec.specs.engine import (
    ENGINES_DIRECTORY,
    SERVING_ENGINES,
    EngineProfile,
    load_engine,
    save_engine,
)
from magicdec.validate.rows import read_rows

FILES = (
    "server_tpot.csv.gz",
    "server_tpot_moe.csv.gz",
    "speculative_chains.csv",
    "speculative_moe.csv",
)
SOURCES = {
    "drafts.search_s_per_sequence": "assumed: a search of a few thousand tokens on the host",
    "constants": "evidence/fits/serving_engines.py on measured servers of aiconfigurator-core 0.12.0 (Apache-2.0): "
    "InferenceMAX and NVIDIA's runs",
    "errors.relative_error": "spread of the fitted rows, with each tp left out if that is wider; other_device_error "
    "and other_model_error with each left out in turn",
}
OTHER_SCRIPTS = ("evidence/fits/speculation.py", "evidence/fits/sglang_speculation.py")
"""Scripts whose constants of drafts stay as they are."""
SPLIT = "split_attention_factor"
DRAFT_PRIORS = {
    "overheads.draft_step_overhead_s": Free(prior=0.2e-3, spread=1.0),
    "overheads.step_overhead_s": Free(prior=1e-3, spread=1.0),
    "drafts.eagle3.draft_overhead_s": Free(prior=0.2e-3, spread=1.0),
    "drafts.eagle3.step_overhead_s": Free(prior=0.3e-3, spread=1.0),
}
"""Priors of the constants that speculative rows tell."""
NO_DRAFTS_MEASURED = "vLLM's, on top of this engine's own step: nothing was measured"


def rounded(profile: EngineProfile, priors: Iterable[str]) -> EngineProfile:
    """Three significant digits; a constant of older versions only where there are such."""
    values: dict[str, float | None] = {
        name: float(f"{profile.constant(name):.3g}") for name in priors
    }
    if not profile.scheduler.asynchronous_since:
        values["overheads.older_sequence_overhead_s"] = None
    if profile.scheduler.mixes_prefill:
        values["graphs.launch_s"] = 0.0
    else:
        values["graphs.prefill_layer_overhead_s"] = 0.0
    return profile.with_constants(values)


def with_one_attention_factor(profile: EngineProfile) -> EngineProfile:
    """The profile whose kernels that split the context have the factor of others in every version, as the fitted rows'
    versions have."""
    before = {
        bound: {table: dict(values) for table, values in tables.items()}
        for bound, tables in profile.before.items()
    }
    for tables in before.values():
        tables.get("kernels", {}).pop(SPLIT, None)
    alone = profile.with_constants({f"kernels.{SPLIT}": None})
    return msgspec.structs.replace(alone, before=before)


def with_own_split_factors(
    fitted: EngineProfile, shipped: EngineProfile
) -> EngineProfile:
    """The fitted profile with the newest versions' own factor, the older ones having the fitted one."""
    before = fitted.before
    for bound, tables in shipped.before.items():
        if SPLIT in tables.get("kernels", {}):
            own = {SPLIT: fitted.kernels.attention_factor}
            kernels = before[bound].get("kernels", {}) | own
            before = before | {bound: before[bound] | {"kernels": kernels}}
    newest = fitted.with_constants(
        {f"kernels.{SPLIT}": shipped.kernels.split_attention_factor}
    )
    return msgspec.structs.replace(newest, before=before)


def report(name: str, what: str, rows: list[ServingRow], predicted: Array) -> None:
    error = np.abs(predicted / np.array([row.measured for row in rows]) - 1.0)
    for isolated in (True, False):
        chosen = error[np.array([row.is_isolated == isolated for row in rows])]
        chosen = chosen[np.isfinite(chosen)]
        if chosen.size:
            kind = "decoding alone" if isolated else "prefill inside"
            print(
                f"{name:7} {what:14} {kind:15} {chosen.size:4} rows: {chosen.mean():.1%}",
                flush=True,
            )


def errors_of(rows: list[ServingRow], fitted: Engines) -> dict[str, dict[str, float]]:
    """The standard deviations of each engine's predictions, fitted and with something left out."""
    predicted = {"fitted": predict_rows(rows, fitted)}
    predicted |= {kind: left_out_predictions(rows, fitted, kind) for kind in LEFT_OUT}
    errors: dict[str, dict[str, float]] = {}
    for name in fitted:
        chosen = np.array([row.engine == name for row in rows])
        mine = [row for row in rows if row.engine == name]
        for what, values in predicted.items():
            report(
                name,
                what if what == "fitted" else f"{what} left out",
                mine,
                values[chosen],
            )
        measured = np.array([row.measured for row in mine])
        spread = {
            what: deviation(
                np.log(values[chosen] / measured),
                UNSEEN_SHARE if what in ("device", "model") else 0.9,
            )
            for what, values in predicted.items()
        }
        errors[name] = {
            "errors.relative_error": max(spread["fitted"], spread["tp"]),
            "errors.other_device_error": spread["device"],
            "errors.other_model_error": spread["model"],
        }
    return errors


def described(
    profile: EngineProfile, rows: list[ServingRow], errors: dict[str, float]
) -> EngineProfile:
    versions = ", ".join(sorted({row.engine_version for row in rows}))
    return profile.with_constants(
        {
            "fitted_on": f"{len(rows)} rows of measured servers: {versions}",
            "fitted_devices": tuple(sorted({row.hardware for row in rows})),
            "fitted_models": tuple(sorted({row.model for row in rows})),
            "sources": profile.sources | SOURCES,
            **{name: round(error, 3) for name, error in errors.items()},
        }
    )


def fit_drafts(
    profiles: list[EngineProfile], rows: list[ServingRow]
) -> list[EngineProfile]:
    """The profiles with the costs of drafts, from speculative rows of the engine; without any, vLLM's on top of the
    engine's own step."""
    result: list[EngineProfile] = []
    for profile in profiles:  # vLLM's first
        mine = [row for row in rows if row.engine == profile.name]
        source = profile.sources.get("draft costs", "")
        if any(script in source for script in OTHER_SCRIPTS):
            result.append(profile)
            continue
        if mine:
            fitted = fit_engines(mine, {profile.name: profile}, DRAFT_PRIORS)[
                profile.name
            ]
            costs = {
                name: float(f"{fitted.constant(name):.3g}") for name in DRAFT_PRIORS
            }
            source = f"fitted to {len(mine)} chains: {', '.join(sorted({row.source for row in mine}))}"
        else:
            vllm = result[0]
            costs = {name: vllm.constant(name) for name in DRAFT_PRIORS}
            beyond = (
                vllm.overheads.step_overhead_s
                - vllm.overheads.autoregressive_overhead_s
            )
            costs["overheads.step_overhead_s"] = float(
                f"{profile.overheads.autoregressive_overhead_s + max(beyond, 0.0):.3g}"
            )
            source = NO_DRAFTS_MEASURED
        result.append(
            profile.with_constants(
                {**costs, "sources": profile.sources | {"draft costs": source}}
            )
        )
        if mine:
            error = (
                predict_rows(mine, {profile.name: result[-1]})
                / np.array([row.measured for row in mine])
                - 1.0
            )
            print(
                f"{profile.name:7} speedup of {len(mine)} chains: {np.abs(error).mean():.1%}"
            )
    return result


def fitted_profiles(paths: list[Path]) -> list[EngineProfile]:
    """The catalog's profiles, fitted to the rows of these files."""
    rows, refused = read_rows(paths, ServingRow)
    if refused:
        print(f"{len(refused)} rows cannot be predicted; the first: {refused[0]}")
    used = without_copies(
        [row for row in rows if row.is_fitted_on and row.engine in SERVING_ENGINES]
    )
    shipped = {name: load_engine(name) for name in SERVING_ENGINES}
    bases = {
        name: with_one_attention_factor(profile) for name, profile in shipped.items()
    }
    fitted = {
        name: rounded(profile, PRIORS)
        for name, profile in fit_engines(used, bases).items()
    }
    errors = errors_of(used, fitted)
    of_engine = {name: [row for row in used if row.engine == name] for name in fitted}
    profiles = [
        with_own_split_factors(
            described(fitted[name], of_engine[name], errors[name]), shipped[name]
        )
        for name in fitted
    ]
    return fit_drafts(profiles, [row for row in rows if row.metric == "speedup"])


def main(paths: list[Path]) -> None:
    for profile in fitted_profiles(
        paths or [DATA / "servers" / name for name in FILES]
    ):
        save_engine(profile, ENGINES_DIRECTORY / f"{profile.name}.toml")


if __name__ == "__main__":
    try:
        main([Path(argument) for argument in sys.argv[1:]])
    except MagicdecError as error:
        sys.exit(f"error: {error}")
