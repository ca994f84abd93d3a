"""Fits the constants of serving engines to measured servers, and says how well they carry over.

Few constants per engine, each with a prior: factors near 1 (kernel curves come from tables of single kernels), fixed
costs of the size that one launch or one step of a scheduler takes. Left out of every fit: rows whose note says that
requests queued or that they lie below the bytes to be read, and those of `is_prefix_cached` and `is_capped`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from magicdec.perfmodel.arrays import Array
from magicdec.specs.engine import EngineProfile, load_engine
from magicdec.validate.serving_rows import ServingRow, predict_rows

ROW_ERROR = 0.06
"""Standard deviation of a row about the model, beside which the priors weigh."""
Z_90 = 1.6448536269514722
LEAST_ERROR = 0.03
LeftOut = Literal["device", "tp", "model"]
LEFT_OUT: tuple[LeftOut, ...] = ("device", "tp", "model")
MIN_ROWS = 12
MANY_REQUESTS = 512


@dataclass(frozen=True, kw_only=True)
class Prior:
    """Middle and standard deviation: of the logarithm for `log`; `share` is cut to (0, 1], `cost` at 0."""

    middle: float
    spread: float
    scale: Literal["log", "share", "cost"]

    def decode(self, code: float) -> float:
        if self.scale == "log":
            return self.middle * float(np.exp(self.spread * code))
        value = self.middle + self.spread * code
        return min(max(value, 0.05), 1.0) if self.scale == "share" else max(value, 0.0)


PRIORS: dict[str, Prior] = {
    "gemm_factor": Prior(middle=1.0, spread=0.07, scale="log"),
    "narrow_gemm_factor": Prior(middle=1.0, spread=0.1, scale="log"),
    "experts_factor": Prior(middle=1.0, spread=0.25, scale="log"),
    "attention_factor": Prior(middle=1.0, spread=0.2, scale="log"),
    "collective_factor": Prior(middle=1.0, spread=0.2, scale="log"),
    "elementwise_factor": Prior(middle=1.0, spread=0.3, scale="log"),
    "autoregressive_overhead_s": Prior(middle=0.4e-3, spread=0.3e-3, scale="cost"),
    "sequence_overhead_s": Prior(middle=15e-6, spread=10e-6, scale="cost"),
    "prefill_factor": Prior(middle=1.0, spread=0.15, scale="log"),
    "prefill_layer_overhead_s": Prior(middle=50e-6, spread=50e-6, scale="cost"),
    "prefill_share": Prior(middle=0.9, spread=0.2, scale="share"),
}


DRAFT_PRIORS: dict[str, Prior] = {
    "draft_step_overhead_s": Prior(middle=0.2e-3, spread=0.3e-3, scale="cost"),
    "step_overhead_s": Prior(middle=1e-3, spread=1e-3, scale="cost"),
    "eagle3_draft_overhead_s": Prior(middle=0.2e-3, spread=0.3e-3, scale="cost"),
    "eagle3_step_overhead_s": Prior(middle=0.3e-3, spread=0.5e-3, scale="cost"),
}
"""Of speculative rows."""


def is_prefix_cached(row: ServingRow) -> bool:
    """vLLM 0.12.0 with fp8 weights among NVIDIA's runs: prompts come faster than the device's peak could compute them
    (to 1,900 of 1,979 TFLOP/s on an H200, beside decoding), so most of each prompt was in the prefix cache."""
    return row.engine == "vllm" and row.source.startswith("NVIDIA") and row.weight_dtype == "fp8"


def is_capped(row: ServingRow) -> bool:
    """gpt-oss-120b with 512 requests in vLLM: quicker per token than with 64, down to 3.6 ms, so most waited."""
    return row.model == "gpt-oss-120b" and row.engine == "vllm" and row.batch_size >= MANY_REQUESTS


def is_fitted_on(row: ServingRow) -> bool:
    left_out = row.is_left_out or is_prefix_cached(row) or is_capped(row)
    return row.metric == "tpot_ms" and row.gamma == 0 and not left_out


def fit_engine(rows: Sequence[ServingRow], base: EngineProfile, priors: Mapping[str, Prior] = PRIORS) -> EngineProfile:
    """`base` with the constants of `priors` that best explain the rows."""
    from scipy.optimize import least_squares

    measured = np.log([row.measured for row in rows])

    def profile(codes: Array) -> EngineProfile:
        values = {name: prior.decode(float(code)) for (name, prior), code in zip(priors.items(), codes, strict=True)}
        return msgspec.structs.replace(base, **values)

    def residuals(codes: Array) -> Array:
        error = np.log(predict_rows(rows, {base.name: profile(codes)})) - measured
        return np.concatenate([error / ROW_ERROR, codes])

    fitted = least_squares(
        residuals,
        np.zeros(len(priors)),
        loss="soft_l1",
        diff_step=np.full(len(priors), 1e-3),
        ftol=1e-4,
        xtol=1e-4,
        max_nfev=60,
    )
    return profile(fitted.x)


def _key(kind: LeftOut) -> Callable[[ServingRow], Any]:
    return {"device": lambda row: row.hardware, "tp": lambda row: row.tp_size, "model": lambda row: row.model}[kind]


def left_out_predictions(rows: Sequence[ServingRow], engine: str, kind: LeftOut) -> Array:
    """What the profile predicts for each row when fitted without its device (tp, model); NaN with too few others."""
    key, base = _key(kind), load_engine(engine)
    predicted = np.full(len(rows), np.nan)
    for value in {key(row) for row in rows}:
        others = [row for row in rows if key(row) != value and is_fitted_on(row)]
        test = [index for index, row in enumerate(rows) if key(row) == value]
        if len(others) >= MIN_ROWS:
            fitted = fit_engine(others, base)
            predicted[test] = predict_rows([rows[index] for index in test], {engine: fitted})
    return predicted


def deviation(predicted: Array, rows: Sequence[ServingRow]) -> float:
    """The standard deviation whose 90 % interval holds 90 % of the rows (NaN left out)."""
    error = np.abs(np.log(predicted / np.array([row.measured for row in rows])))
    error = error[np.isfinite(error)]
    return max(LEAST_ERROR, float(np.quantile(error, 0.9)) / Z_90) if error.size else float("nan")
