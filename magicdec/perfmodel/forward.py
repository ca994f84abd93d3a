"""One forward pass of a model on a tensor-parallel group, as named operations.

    layers × (norms, qkv, attention, o, all-reduce, gate_up, down, all-reduce) + final norm + lm_head + fixed costs

`query_len` new tokens for each of `batch` sequences, which hold `kv_len` tokens in the cache (the new ones included):
1 for decoding and drafting, gamma + 1 for verification, the prompt for prefill. Everything broadcasts, `tp_size` too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from magicdec.perfmodel import ops
from magicdec.perfmodel.cost import Array, Cost, total
from magicdec.perfmodel.ops import BOUNDS, GROUPS, BoundBy, Group, Op
from magicdec.specs.engine import EngineProfile
from magicdec.specs.hardware import HardwareProfile
from magicdec.specs.model import ModelSpec
from magicdec.specs.precision import Precision


@dataclass(frozen=True)
class ForwardTime:
    """The operations of a pass (or of several: they concatenate), with totals."""

    ops: tuple[Op, ...]

    @cached_property
    def total_s(self) -> Array:
        seconds: Array = np.asarray(0.0)
        for op in sorted(self.ops, key=lambda op: op.time_s.size):
            seconds = seconds + op.time_s
        return seconds

    @property
    def cost(self) -> Cost:
        return total([op.cost for op in self.ops])

    def group_seconds(self) -> dict[Group, Array]:
        """Seconds by kind of term: what the calibration's errors are stated for."""
        seconds: dict[Group, Array] = {group: np.asarray(0.0) for group in GROUPS}
        for op in self.ops:
            seconds[op.group] = seconds[op.group] + op.time_s
        return seconds

    def bound_seconds(self) -> dict[BoundBy, Array]:
        """Seconds by what binds: an operation's fixed part is overhead, the rest belongs to its higher ceiling."""
        seconds: dict[BoundBy, Array] = {bound: np.asarray(0.0) for bound in BOUNDS}
        for op in self.ops:
            if op.group in ("elementwise", "overhead"):
                seconds["overhead"] = seconds["overhead"] + op.time_s
            elif op.group == "link":
                seconds["link"] = seconds["link"] + op.time_s
            else:
                memory: BoundBy = "kv" if op.group == "attention" else "weights"
                work = np.maximum(op.time_s - op.overhead_s, 0.0)
                by_compute = op.compute_s > op.memory_s
                seconds["overhead"] = seconds["overhead"] + (op.time_s - work)
                seconds["compute"] = seconds["compute"] + np.where(by_compute, work, 0.0)
                seconds[memory] = seconds[memory] + np.where(by_compute, 0.0, work)
        return seconds

    def plus(self, *others: ForwardTime | Op) -> ForwardTime:
        extra: list[Op] = []
        for other in others:
            extra.extend(other.ops if isinstance(other, ForwardTime) else [other])
        return ForwardTime((*self.ops, *extra))


def forward_pass(
    model: ModelSpec,
    hw: HardwareProfile,
    engine: EngineProfile,
    *,
    batch: Any,
    query_len: Any,
    kv_len: Any,
    tp_size: Any = 1,
    weight_dtype: str = "bf16",
    kv_dtype: str = "bf16",
    attention_factor: Any = 1.0,
    logit_rows: Any = None,
    num_passes: Any = 1.0,
    is_prefill: bool = False,
) -> ForwardTime:
    """Time of one pass.

    `logit_rows` is for how many tokens logits are computed (None: all). `num_passes` counts the fixed costs and the
    reads of the weights of a pass that is cut into several (chunked prefill); `query_len` stays that of the whole.
    `is_prefill`: causal attention of whole prompts, by the prefill kernel's curve where the device has one (then
    `kv_len` is not used).
    """
    precision = Precision(weight_dtype=weight_dtype, kv_dtype=kv_dtype)
    batch, query_len = np.asarray(batch, dtype=np.float64), np.asarray(query_len, dtype=np.float64)
    tokens = batch * query_len / num_passes
    tp = np.asarray(tp_size, dtype=np.float64)
    layers = model.num_hidden_layers * num_passes
    heads, kv_heads = model.num_attention_heads / tp, ops.kv_heads_per_rank(model, tp)
    q_size, kv_size = heads * model.head_dim, kv_heads * model.head_dim
    activation = 4.0 if precision.compute_dtype == "fp32" else 2.0
    attended = np.asarray(kv_len, dtype=np.float64)
    if model.sliding_window is not None:
        attended = np.minimum(attended, model.sliding_window + query_len - 1.0)

    def linear(name: str, n: Any, k: Any) -> Op:
        return ops.linear(name, hw, engine, precision, m=tokens, n=n, k=k, count=layers)

    shape: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": model.head_dim}
    if is_prefill and hw.prefill is not None:
        attention = ops.prefill_attention(
            hw, precision, batch=batch, prompt_len=query_len, num_chunks=num_passes, window=model.sliding_window,
            count=model.num_hidden_layers, **shape,
        )  # fmt: skip
    else:
        several = np.where(query_len > 1, engine.verify_attention_factor, 1.0)
        attention = ops.attention(
            hw, engine, precision, batch=batch, query_len=query_len, kv_len=attended, count=model.num_hidden_layers,
            factor=several * attention_factor, **shape,
        )  # fmt: skip
    operations = [
        linear("qkv", q_size + 2 * kv_size, model.hidden_size),
        attention,
        linear("o", model.hidden_size, q_size),
        *_mlp(model, hw, engine, precision, tokens=tokens, tp=tp, layers=layers),
        ops.streaming(
            "norms",
            hw,
            engine,
            num_bytes=tokens * activation * (6 * model.hidden_size + 2 * (q_size + kv_size) + 3 * _width(model) / tp),
            num_kernels=engine.elementwise_kernels_per_layer,
            count=layers,
        ),
        ops.all_reduce(hw, engine, message_bytes=tokens * model.hidden_size * activation, tp_size=tp, count=2 * layers),
        _lm_head(model, hw, engine, precision, rows=batch * query_len if logit_rows is None else logit_rows, tp=tp),
        ops.fixed("overhead", "overhead", layers * engine.layer_overhead_s + num_passes * engine.forward_overhead_s),
    ]
    return ForwardTime(tuple(operations))


def _width(model: ModelSpec) -> int:
    """The MLP's width that one token sees."""
    return model.moe_intermediate_size * model.num_experts_per_tok if model.is_moe else model.intermediate_size


def _mlp(
    model: ModelSpec,
    hw: HardwareProfile,
    engine: EngineProfile,
    precision: Precision,
    *,
    tokens: Array,
    tp: Array,
    layers: Any,
) -> list[Op]:
    """Gate and up, then down; in a mixture the touched experts' weights side by side, each for its share of tokens."""
    hidden = model.hidden_size
    m: Any = tokens
    width = model.intermediate_size / tp
    router: list[Op] = []
    if model.is_moe:
        touched = ops.expected_experts_touched(model.num_experts, model.num_experts_per_tok, tokens)
        m = tokens * model.num_experts_per_tok / touched
        width = touched * model.moe_intermediate_size / tp
        router = [ops.linear("router", hw, engine, precision, m=tokens, n=model.num_experts, k=hidden, count=layers)]
    return [
        *router,
        ops.linear("gate_up", hw, engine, precision, m=m, n=2 * width, k=hidden, count=layers),
        ops.linear("down", hw, engine, precision, m=m, n=hidden, k=width, count=layers),
    ]


def _lm_head(
    model: ModelSpec, hw: HardwareProfile, engine: EngineProfile, precision: Precision, *, rows: Any, tp: Array
) -> Op:
    precision = precision if engine.quantized_head else precision.tables
    return ops.linear("lm_head", hw, engine, precision, m=rows, n=model.vocab_size / tp, k=model.hidden_size)


def prefill(
    model: ModelSpec,
    hw: HardwareProfile,
    engine: EngineProfile,
    *,
    batch: Any,
    prompt_len: Any,
    tp_size: Any = 1,
    weight_dtype: str = "bf16",
    kv_dtype: str = "bf16",
) -> ForwardTime:
    """Prefill of `batch` prompts in passes of at most `engine.prefill_tokens` tokens.

    Causal attention sees half of the prompt on average; logits are computed for the last token of each prompt.
    """
    prompt = np.asarray(prompt_len, dtype=np.float64)
    seen = (prompt + 1.0) / 2.0
    if model.sliding_window is not None:
        window = np.minimum(model.sliding_window, prompt)
        seen = window * (1.0 - (window - 1.0) / (2.0 * np.maximum(prompt, 1.0)))
    passes = np.ceil(np.asarray(batch, dtype=np.float64) * prompt / engine.prefill_tokens)
    return forward_pass(
        model,
        hw,
        _with_prefill_kernel(engine),
        batch=batch,
        query_len=prompt,
        kv_len=seen,
        tp_size=tp_size,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        logit_rows=batch,
        num_passes=np.maximum(passes, 1.0),
        is_prefill=True,
    )


def _with_prefill_kernel(engine: EngineProfile) -> EngineProfile:
    """The engine with a prefill kernel, which reads KV once per tile of queries whatever its decode kernel does."""
    return msgspec.structs.replace(engine, kv_reads="per_sequence", verify_attention_factor=1.0)
