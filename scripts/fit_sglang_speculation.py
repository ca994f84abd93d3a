"""Fits SGLang's overlapped speculation to ratios of steps whose device nobody named.

    python scripts/fit_sglang_speculation.py FILE.csv            errors as shipped, as fitted, and left out by model
    python scripts/fit_sglang_speculation.py FILE.csv --write    and writes the profile

Columns: model, concurrency, gamma, tokens_per_step, weight_dtype, baseline and speculative (tokens per second), as in
SpecForge's SpecBundle (docs/spec_bundle/public/raw_data/data.json). Rows of one model and concurrency have one device:
of H100, H200 and B200 with tp 1, 2, 4 and 8 the one whose step without a draft, at a context of 800 tokens, is nearest
to the measured one. What is compared is the ratio of a speculative step to that one,

    tokens per step * baseline / speculative

which errors of the device cancel from. With two free choices a model this is a weak test, so no constant is fitted to
one model, and each model left out stands beside the fit.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from magicdec.counts import Array
from magicdec.fitting import Free, solve
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.memory import capacity_bytes, memory_need
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.step import step_terms
from magicdec.specs.engine import (
    ENGINES_DIRECTORY,
    EngineProfile,
    load_engine,
    save_engine,
)
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec

CONTEXT = 800.0
DEVICES = ("h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-192gb")
TP_SIZES = (1, 2, 4, 8)
MAX_GAMMA = 7
PRIORS = {
    "draft_step_overhead_s": Free(prior=100e-6, spread=1.0),
    "step_overhead_s": Free(prior=1.0e-3, spread=0.7),
}
NONE = {"eagle3_draft_overhead_s": 0.0, "eagle3_step_overhead_s": 0.0}
"""Apart from the others only in versions before 0.5.11, from whose chains they are."""


class Load(NamedTuple):
    """Settings of one model at one concurrency."""

    model: str
    concurrency: float
    weight_dtype: str
    gamma: Array
    ratio: Array
    step_s: Array
    """Steps without a draft."""


def read(path: Path) -> list[Load]:
    groups: dict[tuple[str, float, str], list[tuple[float, ...]]] = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if "tree" in row["draft_detail"]:
                continue
            users, baseline = float(row["concurrency"]), float(row["baseline"])
            ratio = float(row["tokens_per_step"]) * baseline / float(row["speculative"])
            key = (row["model"], users, row["weight_dtype"])
            groups[key].append((float(row["gamma"]), ratio, users / baseline))
    return [Load(*key, *np.array(rows).T) for key, rows in groups.items()]


def setup_of(load: Load, device: str, engine: EngineProfile) -> Setup:
    spec = SpeculationSpec(draft="eagle3", draft_method="eagle3", gamma=MAX_GAMMA)
    return Setup.of(
        load.model,
        load_hardware(device),
        engine,
        spec,
        weight_dtype=load.weight_dtype,
        sampling=SamplingSpec(temperature=0.0),
    )


def nearest(load: Load, engine: EngineProfile) -> tuple[str, int]:
    """The device and tp whose step without a draft is nearest to the measured one."""
    measured_s = float(np.median(load.step_s))
    best = ("", 0)
    least = np.inf
    for device in DEVICES:
        setup = setup_of(load, device, engine)
        for tp_size in TP_SIZES:
            capacity = capacity_bytes(setup.hardware, engine)
            need = memory_need(
                setup,
                batch=load.concurrency,
                max_len=2 * CONTEXT,
                budget=None,
                gamma=MAX_GAMMA,
                tp_size=tp_size,
                capacity=capacity,
            )
            if not np.all(need.fits):
                continue
            apart = abs(np.log(float(plain_s(setup, load, tp_size)) / measured_s))
            if apart < least:
                best, least = (device, tp_size), apart
    return best


def plain_s(setup: Setup, load: Load, tp_size: int) -> Array:
    terms = step_terms(
        setup,
        batch=load.concurrency,
        kv_len=CONTEXT,
        draft_kv_len=CONTEXT,
        gamma=0,
        tp_size=tp_size,
    )
    return terms.autoregressive.total_s


def predicted(load: Load, place: tuple[str, int], engine: EngineProfile) -> Array:
    device, tp_size = place
    terms = step_terms(
        setup_of(load, device, engine),
        batch=load.concurrency,
        kv_len=CONTEXT,
        draft_kv_len=CONTEXT,
        gamma=load.gamma,
        tp_size=tp_size,
    )
    ratio: Array = terms.step_s / terms.autoregressive.total_s
    return ratio


def log_errors(
    loads: list[Load], places: list[tuple[str, int]], engine: EngineProfile
) -> list[Array]:
    return [
        np.log(predicted(load, place, engine) / load.ratio)
        for load, place in zip(loads, places, strict=True)
    ]


def fit(
    loads: list[Load], places: list[tuple[str, int]], engine: EngineProfile
) -> EngineProfile:
    """Each model has the same weight, however many texts it was asked."""

    def residuals(values: dict[str, float]) -> Array:
        errors = log_errors(loads, places, engine.with_constants(**values, **NONE))
        return np.concatenate([error / np.sqrt(error.size) / 0.05 for error in errors])

    found = solve(PRIORS, residuals)
    values = {name: float(f"{value:.3g}") for name, value in found.values.items()}
    return engine.with_constants(**values, **NONE)


def mape(error: Array) -> float:
    return float(np.mean(np.abs(np.expm1(error))))


def main(arguments: list[str]) -> None:
    shipped = load_engine("sglang")
    loads = read(Path(arguments[0]))
    places = [nearest(load, shipped) for load in loads]
    fitted = fit(loads, places, shipped)
    print({name: fitted.constant(name) for name in PRIORS})
    print("model, users, place: as shipped, as fitted, left out")
    for number, load in enumerate(loads):
        others = [each for each in range(len(loads)) if loads[each].model != load.model]
        without = fit(
            [loads[each] for each in others], [places[each] for each in others], shipped
        )
        cells = []
        for engine in (shipped, fitted, without):
            (error,) = log_errors([load], [places[number]], engine)
            by_gamma = {
                int(gamma): round(float(np.mean(error[load.gamma == gamma])), 2)
                for gamma in np.unique(load.gamma)
            }
            cells.append(f"{mape(error):.1%} {by_gamma}")
        print(load.model, load.concurrency, places[number], *cells, sep="  ")
    if "--write" in arguments:
        save_engine(fitted, ENGINES_DIRECTORY / "sglang.toml")


if __name__ == "__main__":
    main(sys.argv[1:])
