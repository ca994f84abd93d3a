"""Fits what a speculative step costs in vLLM to servers measured with and without speculation, and says how well the
constants carry over.

    python -m evidence.fits.speculation [--write] [FILE.csv…]

FILEs have the columns of `magicdec validate pairs` (without any: the sample that ships). Rows of trained heads with
measured tokens per step, and those of versions that score by batch expansion, are fitted by the logarithm of their
speedup; each source, draft and format weighs the same. Printed are the mean errors of every source, model, device and
format (weights/cache): as fitted, and with its rows left out of the fit. Rows that no constant is fitted to, such as
self-drafts, are always left out. `--write` puts the constants into the engine's profile. The profile's other constants,
of autoregressive decoding, stay.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.optimize import least_squares

from evidence.pairs import predict_pairs
from magicdec.counts import Array
from magicdec.errors import MagicdecError
from magicdec.fitting import Free
from magicdec.perfmodel.speedup import BoolArray
from magicdec.specs.engine import (
    ENGINES_DIRECTORY,
    EngineProfile,
    load_engine,
    save_engine,
    version_number,
)
from magicdec.specs.speculation import HEAD_METHODS
from magicdec.validate.pair_errors import tokens_of_cells
from magicdec.validate.pairs import PairRow
from magicdec.validate.rows import published, read_rows

ENGINE = "vllm"
PRIORS = {
    "overheads.draft_step_overhead_s": Free(prior=50e-6, spread=1.0),
    "overheads.step_overhead_s": Free(prior=0.4e-3, spread=0.5),
    "overheads.speculation_sequence_s": Free(prior=15e-6, spread=1.0),
    "sampling.greedy_accept_passes": Free(prior=5.0, spread=0.7),
    "graphs.uncaptured_pass_s": Free(prior=1.2e-3, spread=0.5),
    "kernels.query_tile_reread": Free(prior=0.5, spread=0.5),
}
EXPANDS_BEFORE = "0.8"
"""The version before which a batch is expanded by its drafted tokens."""
EXPANDING_PRIORS = {
    "step_overhead_s": Free(prior=2e-3, spread=0.5),
    "scored_token_s": Free(prior=0.2e-3, spread=1.0),
}
ROW_ERROR = 0.06
MAX_ROUNDS = 12
LEFT_OUT: dict[str, Callable[[PairRow], str]] = {
    "source": lambda pair: pair.origin,
    "model": lambda pair: pair.model,
    "device": lambda pair: pair.setup.hardware.name,
    "format": lambda pair: (
        f"{pair.setup.precision.weight_dtype}/{pair.setup.precision.kv_dtype}"
    ),
}


@dataclass(frozen=True)
class Rows:
    """Pairs with their tokens per step; those of which `is_fitted` constrain the constants."""

    pairs: list[PairRow]
    tokens: list[float | None]
    is_fitted: BoolArray

    def log_errors(self, profile: EngineProfile) -> Array:
        measured = np.array([pair.speedup for pair in self.pairs])
        return np.asarray(
            np.log(
                predict_pairs(self.pairs, self.tokens, {ENGINE: profile}).speedup
                / measured
            )
        )

    def where(self, chosen: BoolArray) -> Rows:
        kept = np.flatnonzero(chosen).tolist()
        return Rows(
            [self.pairs[i] for i in kept],
            [self.tokens[i] for i in kept],
            self.is_fitted[chosen],
        )


def expands(pair: PairRow) -> bool:
    return version_number(pair.version) < version_number(EXPANDS_BEFORE)


def read(paths: Sequence[Path]) -> Rows:
    """The engine's rows that have tokens per step, or of which another gamma of the same load has."""
    pairs, _ = read_rows(paths, PairRow)
    known = [
        (pair, tokens)
        for pair, tokens in zip(pairs, tokens_of_cells(pairs), strict=True)
        if pair.setup.engine.name == ENGINE
        and tokens is not None
        and (pair.tokens_per_step or expands(pair))
    ]
    is_head = [
        pair.setup.speculation.draft_method in HEAD_METHODS or expands(pair)
        for pair, _ in known
    ]
    return Rows(
        [pair for pair, _ in known], [tokens for _, tokens in known], np.array(is_head)
    )


def at(codes: Array) -> EngineProfile:
    """The profile with the constants of these codes, in units of their priors' spreads."""
    profile, split = load_engine(ENGINE), len(PRIORS)

    def decoded(priors: dict[str, Free], codes: Array) -> dict[str, float]:
        return {
            name: float(prior.at(code))
            for (name, prior), code in zip(priors.items(), codes, strict=True)
        }

    expanding = {"overheads": decoded(EXPANDING_PRIORS, codes[split:])}
    older = profile.before | {EXPANDS_BEFORE: expanding}
    return profile.with_constants({**decoded(PRIORS, codes[:split]), "before": older})


def fit(rows: Rows) -> EngineProfile:
    rows = rows.where(rows.is_fitted)
    groups = [(pair.origin, pair.draft, pair.kv_dtype) for pair in rows.pairs]
    counts = Counter(groups)
    weights = np.sqrt([len(groups) / len(counts) / counts[group] for group in groups])

    def residuals(codes: Array) -> Array:
        return np.concatenate([weights * rows.log_errors(at(codes)) / ROW_ERROR, codes])

    start = np.zeros(len(PRIORS) + len(EXPANDING_PRIORS))
    found: Any = least_squares(
        residuals, start, loss="soft_l1", diff_step=[1e-2], max_nfev=MAX_ROUNDS
    )
    return at(found.x)


def rounded(profile: EngineProfile) -> EngineProfile:
    """Three significant digits."""

    def short(values: dict[str, float]) -> dict[str, float]:
        return {name: float(f"{value:.3g}") for name, value in values.items()}

    expanding = {"overheads": short(profile.before[EXPANDS_BEFORE]["overheads"])}
    older = profile.before | {EXPANDS_BEFORE: expanding}
    return profile.with_constants(
        {
            **short({name: profile.constant(name) for name in PRIORS}),
            "before": older,
        }
    )


def groups(rows: Rows) -> dict[tuple[int, ...], list[str]]:
    """The rows of each source, model, device and format, those of the same rows named together."""
    names: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for key in LEFT_OUT.values():
        for value in dict.fromkeys(map(key, rows.pairs)):
            names[
                tuple(
                    index for index, pair in enumerate(rows.pairs) if key(pair) == value
                )
            ].append(value)
    return names


def report(rows: Rows, fitted: EngineProfile) -> None:
    """One line for each source, model, device and format: mean errors as fitted, and with its rows left out."""
    in_sample = np.abs(np.expm1(rows.log_errors(fitted)))
    is_rate = np.array([pair.is_rate for pair in rows.pairs])
    print(
        f"{'left out':92} rows  whole requests   between tokens     (fitted, left out)"
    )
    for indices, names in {
        tuple(range(len(rows.pairs))): ["nothing"],
        **groups(rows),
    }.items():
        out = np.isin(np.arange(len(rows.pairs)), indices)
        without = (
            fit(rows.where(~out))
            if np.any(out & rows.is_fitted) and not out.all()
            else fitted
        )
        left_out = np.full(out.size, np.nan)
        left_out[out] = np.abs(np.expm1(rows.where(out).log_errors(without)))
        cells = [
            f"{in_sample[chosen].mean():6.1%} {left_out[chosen].mean():6.1%}"
            if chosen.any()
            else 13 * " "
            for chosen in (out & is_rate, out & ~is_rate)
        ]
        print(f"{', '.join(names):92} {out.sum():4}  {'   '.join(cells)}", flush=True)


def main(arguments: Sequence[str]) -> None:
    rows = read(
        [Path(each) for each in arguments if each != "--write"]
        or published("speculation_pairs.csv")
    )
    fitted = rounded(fit(rows))
    print(
        {name: fitted.constant(name) for name in PRIORS}, fitted.before[EXPANDS_BEFORE]
    )
    if "--write" in arguments:
        source = f"fitted to {int(rows.is_fitted.sum())} pairs of measured servers (evidence/fits/speculation.py)"
        sources = fitted.sources | {
            "draft costs": f"{source}; from 0.8 to 0.13 to 5 chains: vLLM issue 20780"
        }
        save_engine(
            msgspec.structs.replace(fitted, sources=sources),
            ENGINES_DIRECTORY / f"{ENGINE}.toml",
        )
    report(rows, fitted)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except MagicdecError as error:
        sys.exit(f"error: {error}")
