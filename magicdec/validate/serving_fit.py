"""Fits the constants of serving engines to measured servers, and says how well they carry over.

Few constants per engine, each with a prior: factors near 1 (kernel curves come from tables of single kernels), fixed
costs of the size that one launch or one step of a scheduler takes. Engines are fitted together, since they run like
kernels on the same hosts: each constant is a value that all share plus the engine's own deviation from it, so that an
engine borrows what its own rows do not tell (a format, a device) from the others' rows,

    Σ_rows ρ(ln(predicted/measured) / 6 %) + Σ shared² + Σ_engines (deviation / 0.7)²     codes in units of the priors

Left out of every fit: rows whose note says that requests queued or that they lie below the bytes to be read, those of
`is_prefix_cached` and `is_capped`, and copies of a row (some servers stand in several dumps).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec
import numpy as np

from magicdec.counts import Z_90, Array
from magicdec.fitting import Free
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import EngineProfile
from magicdec.validate.serving_rows import ServingRow, predict_rows

ROW_ERROR = 0.06
"""Standard deviation of a row about the model, beside which the priors weigh."""
OWN_SPREAD = 0.7
"""Standard deviation of an engine's own deviation, in units of a prior's spread."""
CODE_STEP = 1e-3
MAX_ROUNDS = 60
LEAST_ERROR = 0.03
UNSEEN_SHARE = 0.93
"""Share of rows left out that the interval of rows of yet another device, tp or model is to hold: rows of one are
alike, so intervals which hold 90 % of those seen hold fewer of the next."""
LeftOut = Literal["device", "tp", "model"]
LEFT_OUT: tuple[LeftOut, ...] = ("device", "tp", "model")
MIN_ROWS = 12
MANY_REQUESTS = 512
Engines = Mapping[str, EngineProfile]


Priors = Mapping[str, Free]
PRIORS: dict[str, Free] = {
    "gemm_factor": Free(prior=1.0, spread=0.07),
    "narrow_gemm_factor": Free(prior=1.0, spread=0.1),
    "experts_factor": Free(prior=1.0, spread=0.25),
    "attention_factor": Free(prior=1.0, spread=0.2),
    "collective_factor": Free(prior=1.0, spread=0.2),
    "elementwise_factor": Free(prior=1.0, spread=0.3),
    "autoregressive_overhead_s": Free(prior=0.4e-3, spread=0.8),
    "sequence_overhead_s": Free(prior=10e-6, spread=0.8),
    "older_sequence_overhead_s": Free(prior=30e-6, spread=0.5),
    "prefill_factor": Free(prior=1.0, spread=0.15),
    "prefill_layer_overhead_s": Free(prior=50e-6, spread=0.8),
    "prefill_share": Free(prior=0.9, spread=1.0, scale="unit"),
}
DRAFT_PRIORS: dict[str, Free] = {
    "draft_step_overhead_s": Free(prior=0.2e-3, spread=1.0),
    "step_overhead_s": Free(prior=1e-3, spread=1.0),
    "eagle3_draft_overhead_s": Free(prior=0.2e-3, spread=1.0),
    "eagle3_step_overhead_s": Free(prior=0.3e-3, spread=1.0),
}
"""Priors of the constants that speculative rows tell."""


def is_prefix_cached(row: ServingRow) -> bool:
    """vLLM 0.12.0 and TensorRT-LLM 1.2.0rc6 with fp8 weights among NVIDIA's runs: prompts come faster than the device
    could compute them (to 1,900 of 1,979 TFLOP/s on an H200, and 420 on an H100 where decoding alone fills the time
    between tokens), so most of each prompt was in the prefix cache."""
    engine = row.engine_version.startswith(("vllm", "trtllm 1.2.0rc6"))
    return engine and row.source.startswith("NVIDIA") and row.weight_dtype == "fp8"


def is_capped(row: ServingRow) -> bool:
    """gpt-oss-120b with 512 requests in vLLM: quicker per token than with 64, down to 3.6 ms, so most waited."""
    return row.model == "gpt-oss-120b" and row.engine == "vllm" and row.batch_size >= MANY_REQUESTS


def is_fitted_on(row: ServingRow) -> bool:
    left_out = row.is_left_out or is_prefix_cached(row) or is_capped(row)
    return row.metric == "tpot_ms" and row.gamma == 0 and not left_out


def without_copies(rows: Sequence[ServingRow]) -> list[ServingRow]:
    """One of each set of rows that say the same of one server."""
    kept = {(row.hardware, row.engine, row.tp_size, row.batch_size, row.prompt_len, row.output_len, row.value): row
            for row in reversed(rows)}  # fmt: skip
    return list(kept.values())[::-1]


@lru_cache(maxsize=64)
def shape_of(model: str) -> str:
    """A key that models of one shape share: DeepSeek's V3 and R1 are one when a model is left out."""
    spec = load_model_spec(model)
    return repr((spec.hidden_size, spec.vocab_size, spec.mixers, spec.feed_forwards))


class Joint:
    """Residuals of all engines' rows and of the priors, and their derivatives, in the codes: the shared ones, then
    each engine's deviations.

    The loss is ρ(z) = 2 (√(1 + z²) − 1). A prior's residual is c·√(1 + c²/4), of which it makes c².
    """

    def __init__(self, rows: Sequence[ServingRow], bases: Engines, priors: Priors) -> None:
        self.priors = priors
        self.bases = bases
        self.rows = {name: [row for row in rows if row.engine == name] for name in bases}
        self.measured = {name: np.log([row.measured for row in mine]) for name, mine in self.rows.items()}
        self.size = len(priors)

    def _offset(self, index: int) -> int:
        return (index + 1) * self.size

    def engine_codes(self, codes: Array, index: int) -> Array:
        at = self._offset(index)
        return np.asarray(codes[: self.size] + OWN_SPREAD * codes[at : at + self.size])

    def profile(self, name: str, codes: Array) -> EngineProfile:
        """At (constants,) codes; with (constants, n), constants are columns of n values, which predictions keep."""
        values = {key: prior.at(code) for (key, prior), code in zip(self.priors.items(), codes, strict=True)}
        values = {key: float(value) if np.ndim(value) == 0 else value[:, None] for key, value in values.items()}
        return msgspec.structs.replace(self.bases[name], **values)

    def _errors(self, name: str, codes: Array) -> Array:
        predicted = predict_rows(self.rows[name], {name: self.profile(name, codes)})
        return np.asarray((np.log(predicted) - self.measured[name]) / ROW_ERROR)

    def residuals(self, codes: Array) -> Array:
        errors = [
            self._errors(name, self.engine_codes(codes, i)) for i, name in enumerate(self.bases) if self.rows[name]
        ]
        return np.concatenate([*errors, codes * np.sqrt(1.0 + codes**2 / 4.0)])

    def jacobian(self, codes: Array) -> Array:
        blocks = []
        for index, name in enumerate(self.bases):
            if not self.rows[name]:
                continue
            at, here = self._offset(index), self.engine_codes(codes, index)
            moved = here[:, None] + CODE_STEP * np.concatenate([np.eye(self.size), np.zeros((self.size, 1))], axis=1)
            errors = np.atleast_2d(self._errors(name, moved))
            slopes = (errors[:-1] - errors[-1]).T / CODE_STEP
            block = np.zeros((len(self.rows[name]), codes.size))
            block[:, : self.size] = slopes
            block[:, at : at + self.size] = OWN_SPREAD * slopes
            blocks.append(block)
        return np.concatenate([*blocks, np.diag((1.0 + codes**2 / 2.0) / np.sqrt(1.0 + codes**2 / 4.0))])

    def minimised(self, start: Array) -> Any:
        from scipy.optimize import least_squares

        return least_squares(
            self.residuals, start, jac=self.jacobian, loss="soft_l1", ftol=1e-5, xtol=1e-5, max_nfev=MAX_ROUNDS
        )


def fit_engines(rows: Sequence[ServingRow], bases: Engines, priors: Priors = PRIORS) -> dict[str, EngineProfile]:
    """`bases` with the constants of `priors` that best explain the rows together, whatever their values in `bases`."""
    joint = Joint(rows, bases, priors)
    codes = joint.minimised(np.zeros((len(bases) + 1) * joint.size)).x
    return {name: joint.profile(name, joint.engine_codes(codes, index)) for index, name in enumerate(bases)}


def _key(kind: LeftOut) -> Callable[[ServingRow], Any]:
    keys: dict[LeftOut, Callable[[ServingRow], Any]] = {
        "device": lambda row: row.hardware,
        "tp": lambda row: row.tp_size,
        "model": lambda row: shape_of(row.model),
    }
    return keys[kind]


def left_out_predictions(rows: Sequence[ServingRow], bases: Engines, kind: LeftOut) -> Array:
    """The prediction of the profiles for each row when all are fitted without its device (tp, model); NaN with too few
    others."""
    key = _key(kind)
    predicted = np.full(len(rows), np.nan)
    for value in dict.fromkeys(map(key, rows)):
        others = without_copies(
            [row for row in rows if key(row) != value and is_fitted_on(row) and row.engine in bases]
        )
        test = [index for index, row in enumerate(rows) if key(row) == value and row.engine in bases]
        if len(others) >= MIN_ROWS and test:
            predicted[test] = predict_rows([rows[index] for index in test], fit_engines(others, bases))
    return predicted


def deviation(log_error: Array, share: float = 0.9) -> float:
    """The standard deviation whose 90 % interval holds this share of the rows with these errors of the logarithm (NaN
    left out)."""
    error = np.abs(log_error[np.isfinite(log_error)])
    return max(LEAST_ERROR, float(np.quantile(error, share)) / Z_90) if error.size else float("nan")


def nested_deviations(rows: Sequence[ServingRow], log_error: Array, kind: LeftOut) -> Array:
    """For each row the deviation of left-out errors on the engine's rows of other devices (tps, models), or of all
    engines' where it has no other: what could be said of the row before it was seen."""
    key = _key(kind)
    values, engines = np.array([str(key(row)) for row in rows]), np.array([row.engine for row in rows])
    judged = np.array([is_fitted_on(row) for row in rows]) & np.isfinite(log_error)
    widths = np.full(len(rows), np.nan)
    for value, engine in set(zip(values, engines, strict=True)):
        other = judged & (values != value)
        own = other & (engines == engine)
        seen = log_error[own if own.sum() >= MIN_ROWS else other]
        widths[(values == value) & (engines == engine)] = deviation(seen, UNSEEN_SHARE)
    return widths
