"""Fits SGLang's speculation before 0.5.11 to ratios of steps whose device nobody named.

    python -m evidence.fits.sglang_speculation [FILE.csv]            errors as shipped, as fitted, and left out by model
    python -m evidence.fits.sglang_speculation [FILE.csv] --write    and writes the profile

FILE has the columns of `python -m evidence pairs` (without it: SpecForge's SpecBundle); its chains are fitted. A server
whose device is not stated is on the one whose step without a draft is nearest (`evidence.pairs.name_devices`).
What is compared is the ratio of a speculative step to that one,

    tokens per step * baseline / speculative

which errors of the device cancel from. With two free choices a model this is a weak test, so no constant is fitted to
one model, and each model left out stands beside the fit.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from evidence import DATA
from evidence.pairs import read_pairs
from magicdec.counts import Array
from magicdec.fitting import Free, solve
from magicdec.perfmodel.step import step_terms
from magicdec.specs.engine import (
    ENGINES_DIRECTORY,
    EngineProfile,
    load_engine,
    save_engine,
)
from magicdec.validate.pairs import PairRow
from magicdec.validate.rows import places

SPECBUNDLE = DATA / "trees" / "specbundle.csv.gz"
PRIORS = {
    "overheads.draft_step_overhead_s": Free(prior=100e-6, spread=1.0),
    "overheads.step_overhead_s": Free(prior=1.0e-3, spread=0.7),
}
BOUND = "0.5.11"
"""From here on steps are scheduled while the device runs."""
OVERLAPPED_S = 1e-3
"""Time by which that shortens a step: the mean of 1.1 and 0.9 ms (pull requests 11398, 18906)."""


class Load(NamedTuple):
    """Chains of one model on one server."""

    pair: PairRow
    """Any of them."""
    gamma: Array
    ratio: Array

    @property
    def place(self) -> str:
        return f"{self.pair.tp} x {self.pair.hardware}"


def read(path: Path) -> list[Load]:
    pairs, _ = read_pairs([path])
    chains = [pair for pair in pairs if pair.tree is None and pair.tokens_per_step]
    tokens = [pair.tokens_per_step or 0.0 for pair in chains]
    servers = places(
        [(pair.model, pair.hardware, pair.tp, pair.users)] for pair in chains
    )
    loads = []
    for own in servers.values():
        gamma = np.array([chains[place].gamma for place in own])
        ratio = [tokens[place] / chains[place].speedup for place in own]
        loads.append(Load(chains[own[0]], gamma, np.array(ratio)))
    return loads


def log_errors(loads: Sequence[Load], engine: EngineProfile) -> list[Array]:
    errors = []
    for load in loads:
        context = load.pair.prompt_len + load.pair.output_len / 2.0
        terms = step_terms(
            dataclasses.replace(load.pair.setup, engine=engine),
            batch=load.pair.users,
            kv_len=context,
            draft_kv_len=context,
            gamma=load.gamma,
            tp_size=load.pair.tp,
        )
        ratio = terms.step_s / terms.autoregressive.total_s
        errors.append(np.log(ratio / load.ratio))
    return errors


def fit(loads: Sequence[Load], engine: EngineProfile) -> EngineProfile:
    """Each model has the same weight, however many texts it was asked."""

    def residuals(values: dict[str, float]) -> Array:
        errors = log_errors(loads, engine.with_constants(values))
        return np.concatenate([error / np.sqrt(error.size) / 0.05 for error in errors])

    found = solve(PRIORS, residuals)
    return engine.with_constants(
        {name: float(f"{value:.3g}") for name, value in found.values.items()}
    )


def written(shipped: EngineProfile, fitted: EngineProfile) -> EngineProfile:
    """The newest profile with the fitted costs in the versions before; its own steps are shorter, but
    no shorter than those without a draft, which are scheduled so too."""
    values = {name: fitted.constant(name) for name in PRIORS}
    older = shipped.before[BOUND]
    for name, value in values.items():
        table, key = name.split(".")
        older |= {table: older[table] | {key: value}}
    step_s = values["overheads.step_overhead_s"]
    least_s = shipped.overheads.autoregressive_overhead_s
    values["overheads.step_overhead_s"] = max(step_s - OVERLAPPED_S, least_s)
    before = shipped.before | {BOUND: older}
    return msgspec.structs.replace(shipped.with_constants(values), before=before)


def mape(error: Array) -> float:
    return float(np.mean(np.abs(np.expm1(error))))


def main(arguments: list[str]) -> None:
    files = [Path(text) for text in arguments if not text.startswith("--")]
    newest = load_engine("sglang")
    loads = read((files or [SPECBUNDLE])[0])
    shipped = loads[0].pair.setup.engine
    fitted = fit(loads, shipped)
    print({name: fitted.constant(name) for name in PRIORS})
    print("model, users, place: as shipped, as fitted, left out")
    for load in loads:
        model = load.pair.model
        without = fit([each for each in loads if each.pair.model != model], shipped)
        cells = []
        for engine in (shipped, fitted, without):
            (error,) = log_errors([load], engine)
            by_gamma = {
                int(gamma): round(float(np.mean(error[load.gamma == gamma])), 2)
                for gamma in np.unique(load.gamma)
            }
            cells.append(f"{mape(error):.1%} {by_gamma}")
        print(model, load.pair.users, load.place, *cells, sep="  ")
    if "--write" in arguments:
        save_engine(written(newest, fitted), ENGINES_DIRECTORY / "sglang.toml")


if __name__ == "__main__":
    main(sys.argv[1:])
