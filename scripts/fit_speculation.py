"""Fits what a speculative step costs in today's vLLM to servers measured with and without speculation, and says how
well the constants carry over.

    python scripts/fit_speculation.py [--write] [FILE.csv…]

FILEs have the columns of `magicdec validate pairs` (without any: the sample that ships). Rows of trained heads with
measured tokens per step are fitted, by the logarithm of their speedup; each source, draft and format weighs the same.
Printed are the errors as fitted and with each source, model, device and cache format left out of the fit. `--write`
puts the constants into the engine's profile. The profile's other constants, of autoregressive decoding, stay.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.optimize import least_squares

from magicdec.errors import MagicdecError
from magicdec.fitting import Free
from magicdec.perfmodel.kernels.base import Array
from magicdec.specs.engine import ENGINES_DIRECTORY, EngineProfile, load_engine, save_engine
from magicdec.specs.speculation import HEAD_METHODS
from magicdec.validate.csv_rows import published
from magicdec.validate.pairs import Pair, predict_pairs, read_pairs
from magicdec.validate.serving import error_figures

ENGINE = "vllm"
PRIORS = {
    "draft_step_overhead_s": Free(prior=50e-6, spread=1.0),
    "step_overhead_s": Free(prior=0.4e-3, spread=0.5),
    "speculation_sequence_s": Free(prior=15e-6, spread=1.0),
    "greedy_accept_passes": Free(prior=5.0, spread=0.7),
    "uncaptured_pass_s": Free(prior=1.2e-3, spread=0.5),
}
ROW_ERROR = 0.06
MAX_ROUNDS = 12
LEFT_OUT: dict[str, Callable[[Pair], str]] = {
    "source": lambda pair: pair.row.origin,
    "model": lambda pair: pair.row.model,
    "device": lambda pair: pair.setup.hardware.name,
    "cache": lambda pair: pair.row.kv_dtype,
}


def at(codes: Array) -> EngineProfile:
    """The profile with the constants of these codes, in units of their priors' spreads."""
    values = {name: float(prior.at(code)) for (name, prior), code in zip(PRIORS.items(), codes, strict=True)}
    return msgspec.structs.replace(load_engine(ENGINE), **values)


def log_errors(pairs: Sequence[Pair], profile: EngineProfile) -> Array:
    tokens = [pair.row.tokens_per_step for pair in pairs]
    measured = np.array([pair.row.speedup for pair in pairs])
    return np.asarray(np.log(predict_pairs(pairs, tokens, {ENGINE: profile}).speedup / measured))


def fit(pairs: Sequence[Pair]) -> EngineProfile:
    groups = [(pair.row.origin, pair.row.draft, pair.row.kv_dtype) for pair in pairs]
    counts = Counter(groups)
    weights = np.sqrt([len(pairs) / len(counts) / counts[group] for group in groups])

    def residuals(codes: Array) -> Array:
        return np.concatenate([weights * log_errors(pairs, at(codes)) / ROW_ERROR, codes])

    found: Any = least_squares(residuals, np.zeros(len(PRIORS)), loss="soft_l1", diff_step=1e-2, max_nfev=MAX_ROUNDS)
    return at(found.x)


def left_out(pairs: Sequence[Pair]) -> dict[str, frozenset[int]]:
    """The rows of each source, model, device and cache format, those of the same rows named together."""
    names: dict[frozenset[int], list[str]] = defaultdict(list)
    for key in LEFT_OUT.values():
        for value in dict.fromkeys(map(key, pairs)):
            names[frozenset(index for index, pair in enumerate(pairs) if key(pair) == value)].append(value)
    return {", ".join(dict.fromkeys(each)): rows for rows, each in names.items() if len(rows) < len(pairs)}


def report(what: str, pairs: Sequence[Pair], errors: Array) -> None:
    for is_rate in (True, False):
        chosen = np.array([pair.row.is_rate == is_rate for pair in pairs])
        if chosen.any():
            figures = error_figures(np.expm1(errors[chosen]))
            kind = "whole requests" if is_rate else "between tokens"
            print(
                f"{what:60} {kind:15} {chosen.sum():4} rows: mean {figures['mape']:.1%}, bias {figures['bias']:+.1%}, "
                f"90th percentile {figures['p90']:.1%}",
                flush=True,
            )


def main(arguments: Sequence[str]) -> None:
    paths = [Path(each) for each in arguments if each != "--write"] or published("speculation_pairs.csv")
    every, _ = read_pairs(paths)
    pairs = [
        pair
        for pair in every
        if pair.setup.engine.name == ENGINE
        and pair.setup.speculation.draft_method in HEAD_METHODS
        and pair.row.tokens_per_step is not None
    ]
    fitted = fit(pairs)
    print({name: float(f"{getattr(fitted, name):.3g}") for name in PRIORS})
    report("fitted", pairs, log_errors(pairs, fitted))
    for names, out in left_out(pairs).items():
        without = fit([pair for index, pair in enumerate(pairs) if index not in out])
        chosen = [pairs[index] for index in sorted(out)]
        report(f"left out: {names}", chosen, log_errors(chosen, without))
    if "--write" in arguments:
        constants = {name: float(f"{getattr(fitted, name):.3g}") for name in PRIORS}
        source = f"fitted to {len(pairs)} pairs of measured servers (scripts/fit_speculation.py)"
        profile = load_engine(ENGINE)
        sources = profile.sources | {"draft costs": f"{source}; before 0.14 to 5 chains: vLLM issue 20780"}
        save_engine(
            msgspec.structs.replace(profile, **constants, sources=sources), ENGINES_DIRECTORY / f"{ENGINE}.toml"
        )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except MagicdecError as error:
        sys.exit(f"error: {error}")
