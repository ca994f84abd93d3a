"""One forward pass of a model on a tensor-parallel group, as named operations.

    layers × (norms, projections, what mixes tokens, feed-forward, all-reduces) + final norm + lm_head + fixed costs

A `Pass` (perfmodel/layer_ops.py) says for how many sequences and tokens, on what, and how split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from magicdec.perfmodel.kernels.base import (
    BOUNDS,
    GROUPS,
    SECONDS,
    Array,
    BoundBy,
    Cost,
    Group,
    Op,
    Where,
    fixed,
    merged,
    total,
)
from magicdec.perfmodel.kernels.elementwise import streaming
from magicdec.perfmodel.kernels.gemm import linear
from magicdec.perfmodel.kernels.links import Message, all_reduce
from magicdec.perfmodel.layer_ops import Pass, elementwise_size, expert_ops, mixer_ops, num_reduced, projection_ops
from magicdec.specs.engine import EngineProfile
from magicdec.specs.model import ModelSpec
from magicdec.specs.parallel import TENSOR_PARALLEL, Parallelism

BLOCK_COLUMNS = 128


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

    def times(self, count: Any) -> ForwardTime:
        """A share of the pass, or several of them."""
        return ForwardTime(tuple(op.times(count) for op in self.ops))

    def by(self, factor: Any) -> ForwardTime:
        """The pass run so many times slower, each operation within its limits."""
        return ForwardTime(tuple(op.by(factor) for op in self.ops))

    def summed(self, weight: Array) -> ForwardTime:
        """The operations summed over the last axis with these weights."""

        def over(value: Any) -> Any:
            return np.sum(weight * value, axis=-1)

        return ForwardTime(
            tuple(
                replace(op, cost=Cost(*map(over, op.cost)), **{name: over(getattr(op, name)) for name in SECONDS})
                for op in self.ops
            )
        )

    def plus(self, *others: ForwardTime | Op) -> ForwardTime:
        extra: list[Op] = []
        for other in others:
            extra.extend(other.ops if isinstance(other, ForwardTime) else [other])
        return ForwardTime((*self.ops, *extra))


def forward_pass(model: ModelSpec, p: Pass) -> ForwardTime:
    """Time of one pass of one group of tp ranks, through all stages of the layers in turn, while every group has as
    much to do."""
    p = p.in_arrays()
    at, layers = p.at, model.num_hidden_layers * p.num_passes
    activation = at.precision.activation_bytes
    operations = [
        *projection_ops(model, p),
        *(op for mixer, count in model.mixers for op in mixer_ops(mixer, p, count=count)),
        *expert_ops(model, p),
        streaming(
            "norms", at, num_bytes=p.tokens * activation * elementwise_size(model, p),
            num_kernels=at.engine.elementwise_kernels_per_layer, count=layers,
        ),
        all_reduce(
            at, Message(p.tokens * model.hidden_size * activation, p.tp),
            count=num_reduced(model, p.spread) * p.num_passes,
        ),
        _lm_head(model, p),
        fixed(
            "overhead", "overhead",
            layers * at.engine.layer_overhead_s + p.spread.pp * p.num_passes * at.engine.forward_overhead_s
            + _block_experts_s(model, p),
        ),
    ]  # fmt: skip
    return ForwardTime(merged(operations))


def _block_experts_s(model: ModelSpec, p: Pass) -> Array:
    """The time that fused experts in fp8_block add where a rank's columns fill whole blocks."""
    seconds: Array = np.zeros(())
    dtype, layer_s = model.part_precision("experts", p.at.precision).weight_dtype, p.at.engine.block_experts_layer_s
    if dtype != "fp8_block" or not layer_s:
        return seconds
    for mlp, count in model.feed_forwards:
        if mlp.num_experts:
            columns = mlp.width / (1.0 if p.spread.whole_experts else p.tp)
            fills = np.where(columns % BLOCK_COLUMNS == 0, 1.0, 0.0)
            seconds = seconds + fills * count * p.num_passes * layer_s
    return seconds


def _lm_head(model: ModelSpec, p: Pass) -> Op:
    at = p.at if p.at.engine.quantized_head else p.at._replace(precision=p.at.precision.tables)
    rows = p.batch * p.query_len if p.logit_rows is None else p.logit_rows
    return linear("lm_head", at, m=rows, n=model.vocab_size / p.tp, k=model.hidden_size)


def prefill(
    model: ModelSpec, at: Where, *, batch: Any, prompt_len: Any, tp: Any = 1, spread: Parallelism = TENSOR_PARALLEL
) -> ForwardTime:
    """Prefill of `batch` prompts in passes of at most `engine.prefill_tokens` tokens.

    Causal attention sees half of the prompt on average; logits are computed for the last token of each prompt.
    """
    prompt = np.asarray(prompt_len, dtype=np.float64)
    passes = np.ceil(np.asarray(batch, dtype=np.float64) * prompt / at.engine.prefill_tokens)
    at = at._replace(engine=_with_prefill_kernel(at.engine))
    return forward_pass(
        model,
        Pass(
            at=at, batch=batch, query_len=prompt, kv_len=prompt, tp=tp, logit_rows=batch,
            num_passes=np.maximum(passes, 1.0), is_prefill=True, spread=spread,
        ),
    )  # fmt: skip


def _with_prefill_kernel(engine: EngineProfile) -> EngineProfile:
    """The engine with a prefill kernel, which reads KV once per tile of queries whatever its decode kernel does."""
    return msgspec.structs.replace(engine, kv_reads="per_sequence", verify_attention_factor=1.0, query_tile_reread=0.0)
