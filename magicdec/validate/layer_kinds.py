"""Tables of timed kernels of other layers than plain attention and products: columns, prediction, fit.

`kernel_tables` reads, holds out and refits them as the others. A gated delta net's table gives its heads, whose size
and convolution are those of every published one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from magicdec.perfmodel import layer_times
from magicdec.perfmodel.arrays import Array
from magicdec.perfmodel.layer_fit import fit_layer
from magicdec.perfmodel.roofline import attention_time
from magicdec.specs.hardware import (
    AttentionCurve,
    HardwareProfile,
    IndexerCurve,
    LinearCurve,
    LinearPrefillCurve,
    SparseCurve,
    TopKCurve,
)

LayerKind = Literal["linear", "linear_prefill", "indexer", "top_k", "sparse", "window"]
Columns = Mapping[str, Array]
HEAD_DIM, CONV_KERNEL = 128, 4
INDEX_HEAD_DIM = 128
WINDOW_TILES = (0.0, 32.0, 64.0, 128.0, 192.0)
"""Searched: what windows add to the curve of ordinary attention."""
LATENT_ROW, LATENT_FLOPS_PER_PAIR = 512 + 64, 2.0 * (512 + 64 + 512)
"""Of DeepSeek-V3's layers, and all since, whose kernels the tables hold."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How the rows of one kind of table are predicted by a curve of `default`'s type, and which rows count."""

    columns: tuple[str, ...]
    shape: tuple[str, ...]
    variant: str
    default: Any
    counted: Callable[[Columns], Any]
    is_near: Callable[[Columns], Any]
    predict: Callable[[HardwareProfile, Any, Columns, str], Array]


def _channels(rows: Columns) -> Array:
    channels: Array = HEAD_DIM * (2.0 * rows["num_key_heads"] + rows["num_value_heads"])
    return channels


def _linear(hw: HardwareProfile, curve: LinearCurve, rows: Columns, variant: str) -> Array:
    return layer_times.linear_time(
        hw, curve, batch=rows["batch_size"], query_len=rows["query_len"], working_set_bytes="own",
        state_elements=rows["num_value_heads"] * HEAD_DIM**2, conv_elements=_channels(rows) * CONV_KERNEL,
        states_written=rows["query_len"],
    ).time_s  # fmt: skip


def _linear_prefill(hw: HardwareProfile, curve: LinearPrefillCurve, rows: Columns, variant: str) -> Array:
    return layer_times.linear_prefill_time(
        hw, curve, batch=rows["batch_size"], query_len=rows["prompt_len"], channels=_channels(rows),
        state_elements=rows["num_value_heads"] * HEAD_DIM**2, working_set_bytes="own",
    ).time_s  # fmt: skip


def _indexer(hw: HardwareProfile, curve: IndexerCurve, rows: Columns, variant: str) -> Array:
    return layer_times.indexer_time(
        hw, curve, batch=rows["batch_size"], query_len=rows["query_len"], kv_len=rows["kv_len"],
        num_heads=rows["num_index_heads"], head_dim=INDEX_HEAD_DIM, working_set_bytes="own",
    ).time_s  # fmt: skip


def _top_k(hw: HardwareProfile, curve: TopKCurve, rows: Columns, variant: str) -> Array:
    return layer_times.top_k_time(
        hw, curve, rows=rows["batch_size"] * rows["query_len"], kv_len=rows["kv_len"]
    ).time_s  # fmt: skip


def _sparse(hw: HardwareProfile, curve: SparseCurve, rows: Columns, variant: str) -> Array:
    return layer_times.sparse_time(
        hw, curve, tokens=rows["batch_size"] * rows["query_len"], num_chosen=rows["num_chosen"],
        num_heads=rows["num_heads"], flops_per_pair=LATENT_FLOPS_PER_PAIR, row_bytes=LATENT_ROW * 2.0,
    ).time_s  # fmt: skip


def _window(hw: HardwareProfile, curve: AttentionCurve, rows: Columns, variant: str) -> Array:
    read = np.minimum(rows["kv_len"], rows["window_size"] + curve.window_tile_tokens)
    return attention_time(
        hw, batch=rows["batch_size"], query_len=1, kv_len=read,
        num_heads=rows["num_heads"], num_kv_heads=rows["num_kv_heads"], head_dim=rows["head_dim"],
        kv_dtype=variant or "bf16", curve=curve, working_set_bytes="own",
    ).time_s  # fmt: skip


KINDS: dict[LayerKind, Kind] = {
    "window": Kind(
        columns=("batch_size", "num_heads", "num_kv_heads", "head_dim", "kv_len", "window_size"),
        shape=("num_heads", "num_kv_heads", "head_dim", "window_size"),
        variant="kv_dtype",
        default=AttentionCurve(),
        counted=lambda rows: (rows["kv_len"] >= 1024) & (rows["batch_size"] >= 8),
        is_near=lambda rows: rows["window_size"] <= 1024,
        predict=_window,
    ),
    "linear": Kind(
        columns=("batch_size", "query_len", "num_key_heads", "num_value_heads"),
        shape=("num_key_heads", "num_value_heads", "query_len"),
        variant="",
        default=LinearCurve(),
        counted=lambda rows: rows["batch_size"] * rows["num_value_heads"] >= 64,
        is_near=lambda rows: rows["query_len"] <= 2,
        predict=_linear,
    ),
    "linear_prefill": Kind(
        columns=("batch_size", "prompt_len", "num_key_heads", "num_value_heads"),
        shape=("num_key_heads", "num_value_heads"),
        variant="",
        default=LinearPrefillCurve(),
        counted=lambda rows: rows["prompt_len"] >= 128,
        is_near=lambda rows: rows["prompt_len"] <= 4096,
        predict=_linear_prefill,
    ),
    "indexer": Kind(
        columns=("batch_size", "query_len", "kv_len", "num_index_heads"),
        shape=("batch_size", "query_len"),
        variant="",
        default=IndexerCurve(),
        counted=lambda rows: (rows["kv_len"] >= 1024) & (rows["batch_size"] * rows["query_len"] >= 4),
        is_near=lambda rows: rows["query_len"] <= 2,
        predict=_indexer,
    ),
    "top_k": Kind(
        columns=("batch_size", "query_len", "kv_len", "top_k"),
        shape=("batch_size", "query_len"),
        variant="scores",
        default=TopKCurve(),
        counted=lambda rows: rows["kv_len"] >= 2 * rows["top_k"],
        is_near=lambda rows: rows["kv_len"] <= 32768,
        predict=_top_k,
    ),
    "sparse": Kind(
        columns=("batch_size", "query_len", "num_heads", "num_chosen"),
        shape=("batch_size", "query_len"),
        variant="kv_dtype",
        default=SparseCurve(),
        counted=lambda rows: rows["num_chosen"] >= 1024,
        is_near=lambda rows: rows["batch_size"] * rows["query_len"] <= 512,
        predict=_sparse,
    ),
}


def curve_of(kind: LayerKind, hw: HardwareProfile, variant: str) -> Any:
    """The profile's curve of the kind; the generic one where it has none."""
    if kind == "window":
        return hw.attention_curve(variant or "bf16")
    held = getattr(hw, kind)
    return (held.get(variant or "bf16") if isinstance(held, dict) else held) or KINDS[kind].default


def with_curve(kind: LayerKind, hw: HardwareProfile, variant: str, curve: Any) -> HardwareProfile:
    """The profile with that curve in its place."""
    if kind == "window" and not variant:
        return msgspec.structs.replace(hw, attention=curve)
    kind_field = "attention_formats" if kind == "window" else kind
    held = getattr(hw, kind_field)
    return msgspec.structs.replace(
        hw, **{kind_field: {**held, variant or "bf16": curve} if isinstance(held, dict) else curve}
    )


def _error(predicted: Array, rows: Mapping[str, Any]) -> float:
    return float(np.mean(rows["weight"] * np.abs(np.log(predicted / rows["time_s"]))))


def refitted(kind: LayerKind, hw: HardwareProfile, rows: Mapping[str, Any], variant: str, fitted_on: str) -> Any:
    """The kind's curve fitted to the rows; `time_s`, and optionally `weight`."""
    known = curve_of(kind, hw, variant)
    if kind == "window":
        candidates = [msgspec.structs.replace(known, window_tile_tokens=tokens) for tokens in WINDOW_TILES]
        return min(candidates, key=lambda curve: _error(KINDS[kind].predict(hw, curve, rows, variant), rows))
    start = msgspec.structs.replace(KINDS[kind].default, library=known.library)
    return fit_layer(start, rows, lambda curve: KINDS[kind].predict(hw, curve, rows, variant), fitted_on=fitted_on)
