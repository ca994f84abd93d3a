"""Kernels by keyword: seconds of some work on a device, and fits to rows of columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from magicdec.perfmodel.kernels import (
    attention,
    experts,
    gemm,
    latents,
    links,
    recurrence,
)


def columns(rows: Any, names: tuple[str, ...], **defaults: float) -> list[Any]:
    """Float arrays of the named columns."""
    length = len(rows["time_s"])
    return [
        np.asarray(
            rows[n] if n in rows else np.full(length, defaults[n]), dtype=np.float64
        )
        for n in names
    ]


def gemm_time(hw: Any, *, working_set_bytes: Any = None, **work: Any) -> Any:
    product = gemm.Product(**work)
    return gemm.GemmCurve.of(hw, product.compute_dtype).seconds(
        hw, product, working_set_bytes
    )


def attention_time(
    hw: Any, *, curve: Any = None, working_set_bytes: Any = None, **work: Any
) -> Any:
    attended = attention.Attended(**work)
    curve = curve or attention.AttentionCurve.of(hw, attended.kv_dtype)
    return curve.seconds(hw, attended, working_set_bytes)


def latent_attention_time(hw: Any, *, curve: Any, **work: Any) -> Any:
    return latents.latent_seconds(curve, hw, latents.Latents(**work))


def prefill_attention_time(hw: Any, **work: Any) -> Any:
    return attention.PrefillCurve.of(hw).seconds(hw, attention.Prompts(**work))


def moe_time(hw: Any, curve: Any, **work: Any) -> Any:
    return curve.seconds(hw, experts.RankExperts(**work))


def elementwise_time(hw: Any, **work: Any) -> Any:
    return gemm.ElementwiseCurve.of(hw).seconds(hw, gemm.Stream(**work))


def linear_time(hw: Any, curve: Any, **work: Any) -> Any:
    return curve.seconds(hw, recurrence.Recurrence(**work))


def linear_prefill_time(hw: Any, curve: Any, *, channels: Any, **work: Any) -> Any:
    return curve.seconds(
        hw, recurrence.Recurrence(**work, conv_elements=channels, conv_kernel=1.0)
    )


def indexer_time(hw: Any, curve: Any, **work: Any) -> Any:
    return curve.seconds(hw, latents.Scores(**work))


def top_k_time(hw: Any, curve: Any, **work: Any) -> Any:
    return curve.seconds(hw, latents.ScoreSelection(**work))


def sparse_time(hw: Any, curve: Any, **work: Any) -> Any:
    return curve.seconds(hw, latents.Chosen(**work))


def all_reduce_time(
    hw: Any, *, message_bytes: Any, tp_size: Any, kernels: str = ""
) -> Any:
    return links.all_reduce_time(hw, links.Message(message_bytes, tp_size), kernels)


def all_gather_time(hw: Any, *, message_bytes: Any, tp_size: Any) -> Any:
    return links.one_way_time(hw, links.Message(message_bytes, tp_size))


def broadcast_time(hw: Any, *, message_bytes: Any, tp_size: Any) -> Any:
    return links.one_way_time(
        hw, links.Message(message_bytes, tp_size), is_broadcast=True
    )


def exchange_time(hw: Any, *, token_bytes: float, **work: Any) -> Any:
    return links.exchange_time(hw, links.Exchange(**work), token_bytes)


def fit_gemm(
    rows: Any,
    hw: Any,
    *,
    weight_dtype: str = "bf16",
    compute_dtype: str = "bf16",
    **options: Any,
) -> Any:
    product = gemm.Product(*columns(rows, ("m", "n", "k")), weight_dtype, compute_dtype)
    return gemm.GemmCurve().refitted(hw, product, rows, **options)


def fit_attention(rows: Any, hw: Any, *, splits: Any = "always", **work: Any) -> Any:
    options = {
        name: work.pop(name) for name in ("rotated", "fitted_on") if name in work
    }
    names = (
        "batch_size",
        "query_len",
        "kv_len",
        "num_heads",
        "num_kv_heads",
        "head_dim",
    )
    attended = attention.Attended(*columns(rows, names, query_len=1.0), **work)
    known = attention.AttentionCurve(library="measured", splits=splits)
    return known.refitted(hw, attended, rows, **options)


def fit_allreduce(rows: Any, hw: Any, **options: Any) -> Any:
    return links.AllReduceCurve(library="measured").refitted(
        hw, links.Message(*columns(rows, ("message_bytes", "tp_size"))), rows, **options
    )


def fit_elementwise(rows: Any, hw: Any, **options: Any) -> Any:
    stream = gemm.Stream(*columns(rows, ("num_bytes", "num_kernels"), num_kernels=1.0))
    return gemm.ElementwiseCurve().refitted(hw, stream, rows, **options)
