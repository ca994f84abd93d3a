"""Fits the curves of whole layers' kernels: prefill attention, mixtures of experts, recurrences, indexers and what
they choose for. As in curve_fit.py."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from magicdec.perfmodel.arrays import Array
from magicdec.perfmodel.curve_fit import Curve, Free, Parameters, Rows, columns, minimise, row_weights, with_fit
from magicdec.perfmodel.roofline import moe_time, prefill_attention_time
from magicdec.specs.hardware import (
    HardwareProfile,
    IndexerCurve,
    LinearCurve,
    LinearPrefillCurve,
    MoeCurve,
    PrefillCurve,
    SparseCurve,
    TopKCurve,
)

PREFILL_PARAMETERS: Parameters = {
    "overhead_s": Free(spread=1.0),
    "flops_efficiency": Free(spread=0.3),
    "narrow_head_efficiency": Free(spread=0.3),
    "wide_head_efficiency": Free(spread=0.3),
    "block_weight": Free(spread=0.7),
    "bandwidth_efficiency": Free(spread=0.7),
    "ridge_power": Free(scale="above_one"),
}


MOE_PARAMETERS: Parameters = {
    "overhead_s": Free(spread=1.0),
    "hidden_overhead_s": Free(spread=1.0),
    "expert_overhead_s": Free(spread=1.5),
    "bandwidth_efficiency": Free(spread=0.2),
    "flops_efficiency": Free(spread=0.4),
    "activation_efficiency": Free(spread=0.7),
    "ridge_power": Free(scale="above_one"),
    "tile_rows": Free(spread=0.8),
    "independence": Free(spread=0.7, scale="unit"),
    "imbalance": Free(spread=0.7),
}


LAYER_PARAMETERS: dict[type, Parameters] = {
    LinearCurve: {
        "overhead_s": Free(spread=1.0),
        "bandwidth_efficiency": Free(spread=0.15),
        "l2_fraction": Free(spread=0.3),
        "l2_bandwidth_ratio": Free(scale="above_one"),
        "token_s": Free(spread=1.0),
        "ridge_power": Free(scale="above_one"),
    },
    LinearPrefillCurve: {
        "overhead_s": Free(spread=1.0),
        "chunk_s": Free(spread=1.0),
        "block_s": Free(spread=1.0),
        "wave_weight": Free(spread=1.0, scale="unit"),
        "passes": Free(spread=1.0),
        "bandwidth_efficiency": Free(spread=0.3),
        "l2_fraction": Free(spread=0.5),
        "l2_bandwidth_ratio": Free(scale="above_one"),
        "ridge_power": Free(scale="above_one"),
    },
    IndexerCurve: {
        "overhead_s": Free(spread=0.5),
        "bandwidth_efficiency": Free(spread=0.1),
        "flops_efficiency": Free(spread=0.5),
        "l2_bandwidth_ratio": Free(scale="above_one"),
        "row_s": Free(spread=1.0),
        "ridge_power": Free(scale="above_one"),
    },
    TopKCurve: {
        "overhead_s": Free(spread=0.5),
        "row_s": Free(spread=1.0),
        "score_s": Free(spread=1.0),
        "wave_weight": Free(spread=1.0, scale="unit"),
        "bandwidth_efficiency": Free(spread=0.7),
        "ridge_power": Free(scale="above_one"),
    },
    SparseCurve: {
        "overhead_s": Free(spread=0.7),
        "flops_efficiency": Free(spread=0.2),
        "wave_weight": Free(spread=1.0, scale="unit"),
        "bandwidth_efficiency": Free(spread=0.1),
        "ridge_power": Free(scale="above_one"),
    },
}


def fit_layer(start: Curve, rows: Rows, predict: Callable[[Curve], Array], *, fitted_on: str = "") -> Curve:
    """Fits a curve of layer_times.py to `time_s`; `predict` gives its times of the rows."""
    (seconds,) = columns(rows, ("time_s",))
    parameters = LAYER_PARAMETERS[type(start)]
    curve, _ = minimise(start, parameters, predict, seconds, row_weights(rows, seconds))
    return with_fit(curve, len(parameters), seconds, predict(curve), fitted_on)


def fit_moe(rows: Rows, hw: HardwareProfile, *, weight_dtype: str, compute_dtype: str, fitted_on: str = "") -> MoeCurve:
    """Fits mixtures of experts: columns num_tokens, hidden_size, moe_intermediate_size, num_experts_per_tok,
    num_experts, tp_size, is_balanced, time_s; weight."""
    names = (
        "num_tokens", "hidden_size", "moe_intermediate_size", "num_experts_per_tok", "num_experts", "tp_size",
        "is_balanced", "time_s",
    )  # fmt: skip
    tokens, hidden, width, chosen, experts, tp, balanced, seconds = columns(rows, names)

    def predict(curve: MoeCurve) -> Array:
        return moe_time(
            hw, curve, tokens=tokens, hidden_size=hidden, width=width / tp, num_experts=experts,
            num_experts_per_tok=chosen, weight_dtype=weight_dtype, compute_dtype=compute_dtype,
            is_balanced=balanced > 0,
        ).time_s  # fmt: skip

    curve, _ = minimise(MoeCurve(), MOE_PARAMETERS, predict, seconds, row_weights(rows, seconds))
    return with_fit(curve, len(MOE_PARAMETERS), seconds, predict(curve), fitted_on)


def fit_prefill(rows: Rows, hw: HardwareProfile, *, fitted_on: str = "") -> PrefillCurve:
    """Fits causal attention: columns batch_size, num_heads, num_kv_heads, head_dim, prompt_len, time_s; weight."""
    names = ("batch_size", "num_heads", "num_kv_heads", "head_dim", "prompt_len", "time_s")
    batch, heads, kv_heads, head_dim, prompt, seconds = columns(rows, names)

    def predict(curve: PrefillCurve) -> Array:
        return prefill_attention_time(
            msgspec.structs.replace(hw, prefill=curve), batch=batch, query_len=prompt, kv_len=prompt, num_heads=heads,
            num_kv_heads=kv_heads, head_dim=head_dim,
        ).time_s  # fmt: skip

    parameters = dict(PREFILL_PARAMETERS)
    if not np.any(head_dim > 128):
        del parameters["wide_head_efficiency"]
    if not np.any(head_dim <= 64):
        del parameters["narrow_head_efficiency"]
    curve, _ = minimise(PrefillCurve(), parameters, predict, seconds, row_weights(rows, seconds))
    return with_fit(curve, len(parameters), seconds, predict(curve), fitted_on)
