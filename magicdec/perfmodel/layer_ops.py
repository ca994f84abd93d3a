"""The operations of one kind of layer on one rank: what forward.py adds up.

Projections are ordinary matrix products whatever the kind; attention, recurrences and experts have functions of their
own in ops.py. A kind without one here cannot be predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from magicdec.perfmodel import ops
from magicdec.perfmodel.cost import Array
from magicdec.perfmodel.ops import Op
from magicdec.specs.engine import EngineProfile
from magicdec.specs.hardware import HardwareProfile
from magicdec.specs.layers import (
    Attention,
    GatedDeltaNet,
    LatentAttention,
    LightningAttention,
    Mamba2,
    Mixer,
    MixtureOfExperts,
    Part,
    Projection,
)
from magicdec.specs.model import ModelSpec
from magicdec.specs.parallel import TENSOR_PARALLEL, Parallelism
from magicdec.specs.precision import Precision

EXPERT_IMBALANCE = 1.2
"""Tokens of the fullest rank of whole experts, over the mean: an estimate. 1 is what routing that is balanced with
copies of busy experts comes near to; intervals.py has its error."""
FP8_SCALES = 1.0 + 4.0 / 128.0
"""Bytes of a dispatched number in fp8, with a scale in 32 bits per 128 of them."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What a forward pass is over; arrays broadcast.

    `query_len` new tokens for each of `batch` sequences that hold `kv_len` tokens, the new ones included. Layers of
    full attention see only `full_kv_len` of them in a sparse draft's pass. In prefill queries are the prompt, and see
    what precedes them.
    """

    hardware: HardwareProfile
    engine: EngineProfile
    precision: Precision
    batch: Array
    query_len: Array
    kv_len: Array
    full_kv_len: Array
    tp: Array
    num_passes: Array
    attention_factor: Array
    is_prefill: bool
    mixer_precision: Precision
    mlp_precision: Precision
    experts_precision: Precision
    """Of the parts' weights, which may be published in different formats."""
    spread: Parallelism = TENSOR_PARALLEL

    @property
    def tokens(self) -> Array:
        """Tokens in each of the passes that the whole is cut into."""
        tokens: Array = self.batch * self.query_len / self.num_passes
        return tokens

    def size(self, *parts: Part) -> Array:
        """One rank's share of these dimensions."""
        return ops.size(parts, self.tp)


def attended(mixer: Attention, p: Pass) -> Array:
    """Tokens that a query sees on average (in decoding, the last of the pass's queries).

    A chunk is seen up to the query's place in it. The contexts of a batch lie half a chunk around their mean, or down
    to nothing, so that place is the context at first, and half a chunk on average beyond.
    """
    if mixer.span is None:
        return (p.kv_len + 1.0) / 2.0 if p.is_prefill else p.full_kv_len
    span = float(mixer.span)
    if mixer.mask == "chunk":
        return (np.minimum(span, p.kv_len) + 1.0) / 2.0 if p.is_prefill else np.minimum(p.kv_len, (span + 1.0) / 2.0)
    if p.is_prefill:
        window = np.minimum(span, p.kv_len)
        return window * (1.0 - (window - 1.0) / (2.0 * np.maximum(p.kv_len, 1.0)))
    return np.minimum(p.kv_len, span + p.query_len - 1.0)


def projection_ops(model: ModelSpec, p: Pass) -> list[Op]:
    """The matrix products that every token passes; those of one shape are timed once."""
    counts: Counter[tuple[Projection, Precision]] = Counter()
    for parts, precision in ((model.mixers, p.mixer_precision), (model.feed_forwards, p.mlp_precision)):
        for part, count in parts:
            for projection in _joined(part.projections(model.hidden_size)):
                counts[projection, precision] += count
    return [_linear(*each, p, count=count * p.num_passes) for each, count in counts.items()]


def _joined(projections: Sequence[Projection]) -> list[Projection]:
    """The projections to the latents of queries and of the cache, which have one input, as one product."""
    latent = [each for each in projections if each.name in ("q_a", "kv_a")]
    if len(latent) < 2:
        return list(projections)
    outputs = tuple(part for each in latent for part in each.outputs)
    rest = [each for each in projections if each not in latent]
    return [Projection("qkv_a", outputs, latent[0].inputs), *rest]


def _linear(projection: Projection, precision: Precision, p: Pass, *, count: Any) -> Op:
    """Routers stay in 16 bits. Where experts are fused, shared ones are one more of them or run in a stream beside
    them: their work is paid, their launches are not."""
    n, k = p.size(*projection.outputs), p.size(projection.inputs)
    precision = precision.tables if projection.name == "router" else precision
    is_beside = p.engine.fused_experts and projection.name.startswith("shared_")
    return ops.linear(
        projection.name, p.hardware, p.engine, precision, m=p.tokens, n=n, k=k, count=count, is_beside=is_beside
    )


def mixer_ops(mixer: Mixer, p: Pass, *, count: int) -> list[Op]:
    """What mixes tokens in `count` layers, projections apart."""
    function: Callable[..., list[Op]] = MIXER_OPS[type(mixer)]
    return function(mixer, p, count=count)


def _attention(mixer: Attention, p: Pass, *, count: int) -> list[Op]:
    found = [_norm_exchange(p, count=count)] if mixer.qk_norm == "layer" else []
    if p.is_prefill and p.hardware.prefill is not None:
        return [*found, _prefill_attention(mixer, p, count=count)]
    several = np.where(p.query_len > 1, p.engine.verify_attention_factor, 1.0)
    factor = several * (p.attention_factor if mixer.mask == "full" else 1.0)
    read = attended(mixer, p)
    if mixer.mask == "window":  # in whole tiles, of which it begins within one
        tile = p.hardware.attention_curve(p.precision.kv_dtype).window_tile_tokens
        read = np.minimum(p.kv_len, read + tile)
    return [
        *found,
        ops.attention(
            p.hardware,
            p.engine,
            p.precision,
            batch=p.batch,
            query_len=p.query_len,
            kv_len=read,
            num_heads=mixer.num_heads / p.tp,
            num_kv_heads=ops.share(mixer.num_kv_heads, p.tp),
            head_dim=mixer.head_dim,
            count=count,
            factor=factor,
        ),
    ]


def _norm_exchange(p: Pass, *, count: int) -> Op:
    """A norm over all heads adds up the squares of queries and keys over the ranks: two numbers per token."""
    message_bytes = p.tokens * 2.0 * ops.FP32_BYTES
    return ops.all_reduce(
        p.hardware, p.engine, message_bytes=message_bytes, tp_size=p.tp, count=count * p.num_passes
    )  # fmt: skip


def _prefill_attention(mixer: Attention, p: Pass, *, count: int) -> Op:
    """By the prefill kernel's own curve. Chunks of the context are prompts of their own."""
    batch, prompt = p.batch, p.query_len
    if mixer.mask == "chunk" and mixer.span is not None:
        prompt = np.minimum(p.query_len, float(mixer.span))
        batch = p.batch * p.query_len / np.maximum(prompt, 1e-9)
    return ops.prefill_attention(
        p.hardware, p.precision, batch=batch, prompt_len=prompt, num_chunks=p.num_passes,
        num_heads=mixer.num_heads / p.tp, num_kv_heads=ops.share(mixer.num_kv_heads, p.tp), head_dim=mixer.head_dim,
        window=mixer.span if mixer.mask == "window" else None, count=count,
    )  # fmt: skip


def _latent(mixer: LatentAttention, p: Pass, *, count: int) -> list[Op]:
    """Decoding attends to the latents themselves; prefill expands them and attends head by head. With an indexer each
    query reads the tokens that are chosen for it."""
    heads, kv_len = mixer.num_heads / p.tp, attended(Attention(num_heads=1, num_kv_heads=1, head_dim=1), p)
    found: list[Op] = []
    if mixer.indexer is not None:
        index = mixer.indexer
        if not index.is_shared:
            found += ops.indexer(
                p.hardware, p.engine, p.precision, batch=p.batch, query_len=p.query_len, kv_len=kv_len,
                num_heads=index.num_heads, head_dim=index.head_dim, top_k=index.top_k, count=count,
            )  # fmt: skip
        kv_len = np.minimum(kv_len, float(index.top_k))
    arguments: dict[str, Any] = {
        "batch": p.batch, "query_len": p.query_len, "kv_len": kv_len, "num_heads": heads, "count": count,
        "factor": np.where(p.query_len > 1, p.engine.verify_attention_factor, 1.0) * p.attention_factor,
    }  # fmt: skip
    if p.is_prefill and mixer.indexer is None and p.hardware.prefill is not None:
        size = (mixer.qk_head_dim + mixer.v_head_dim) // 2
        expanded = Attention(num_heads=mixer.num_heads, num_kv_heads=mixer.num_heads, head_dim=size)
        found.append(_prefill_attention(expanded, p, count=count))
    elif p.is_prefill and mixer.indexer is None:
        found.append(
            ops.latent_prefill_attention(
                p.hardware, p.engine, p.precision, key_dim=mixer.qk_head_dim, value_dim=mixer.v_head_dim, **arguments
            )
        )
    else:
        found.append(
            ops.latent_attention(
                p.hardware, p.engine, p.precision, latent_dim=mixer.latent_size, value_dim=mixer.kv_lora_rank,
                is_sparse=mixer.indexer is not None, **arguments,
            )
        )  # fmt: skip
    return found


def _linear_attention(mixer: GatedDeltaNet | LightningAttention | Mamba2, p: Pass, *, count: int) -> list[Op]:
    """The state is read and written once per pass in prefill; verification keeps the state after every token, so that a
    rejection goes back to the one it needs, and in some engines copies that one."""
    states = mixer.states()
    recurrent = sum((ops.share(each.num_heads, p.tp) * each.recurrent_elements for each in states), np.asarray(0.0))
    conv = sum((ops.share(each.num_heads, p.tp) * each.conv_elements for each in states), np.asarray(0.0))
    shared: dict[str, Any] = {"batch": p.batch, "state_elements": recurrent, "conv_elements": conv}
    if p.is_prefill:
        kernel = 1 if isinstance(mixer, LightningAttention) else mixer.conv_kernel
        prefill = ops.linear_prefill(
            p.hardware, p.engine, p.precision, query_len=p.query_len / p.num_passes, conv_kernel=kernel,
            count=count * p.num_passes, **shared,
        )  # fmt: skip
        return [prefill]
    copied = np.where(p.query_len > 1, 2.0 * p.engine.states_beside, 0.0)  # read and written
    return [
        ops.linear_attention(
            p.hardware, p.engine, p.precision, query_len=p.query_len, states_written=p.query_len + copied, count=count,
            **shared,
        )
    ]  # fmt: skip


MIXER_OPS: dict[type, Callable[..., list[Op]]] = {
    Attention: _attention,
    LatentAttention: _latent,
    GatedDeltaNet: _linear_attention,
    LightningAttention: _linear_attention,
    Mamba2: _linear_attention,
}


def expert_ops(model: ModelSpec, p: Pass) -> list[Op]:
    """The routed experts of every layer that has them."""
    found: list[Op] = []
    for mlp, count in model.feed_forwards:
        if isinstance(mlp, MixtureOfExperts) and p.spread.whole_experts:
            found += _whole_experts(mlp, p, hidden_size=mlp.inner_size(model.hidden_size), count=count * p.num_passes)
        elif isinstance(mlp, MixtureOfExperts):
            found += ops.experts(
                p.hardware, p.engine, p.experts_precision, tokens=p.tokens,
                hidden_size=mlp.inner_size(model.hidden_size), width=mlp.width / p.tp, num_experts=mlp.num_experts,
                num_experts_per_tok=mlp.num_experts_per_tok, num_inner=mlp.expert.num_inner, count=count * p.num_passes,
            )  # fmt: skip
    return found


def _whole_experts(mlp: MixtureOfExperts, p: Pass, *, hidden_size: int, count: Any) -> list[Op]:
    """Experts divided over the ranks of a stage: one rank has ceil(E / ranks) of them, and of all groups' tokens k /
    ranks copies each, EXPERT_IMBALANCE times as many on the fullest. With one group its ranks have the tokens already;
    with more, tokens are sent to their experts and back, each rank of a group sending its part of the group's."""
    ranks = np.asarray(p.spread.ep_size(p.tp), dtype=np.float64)
    uneven = np.where(ranks > 1, EXPERT_IMBALANCE, 1.0)
    held = np.ceil(mlp.num_experts / ranks)
    found = ops.experts(
        p.hardware, p.engine, p.experts_precision, tokens=p.tokens * p.spread.dp, hidden_size=hidden_size,
        width=mlp.width, num_experts=held,
        num_experts_per_tok=np.minimum(uneven * mlp.num_experts_per_tok / ranks, held),
        num_inner=mlp.expert.num_inner, own_tokens=p.tokens, count=count,
    )  # fmt: skip
    if p.spread.dp > 1:
        is_narrow = ops.matrix_dtype(p.hardware, p.engine, p.experts_precision) != p.experts_precision.compute_dtype
        found += ops.exchange(
            p.hardware, tokens=p.tokens / p.tp, hidden_size=hidden_size, num_experts_per_tok=mlp.num_experts_per_tok,
            num_ranks=ranks, dispatch_element=FP8_SCALES if is_narrow else 2.0, once_per_node=p.is_prefill, count=count,
        )  # fmt: skip
    return found


def num_reduced(model: ModelSpec, spread: Parallelism) -> int:
    """Sublayers whose outputs a group of tp ranks adds up. Where tokens are sent to whole experts, scattering before
    and gathering after them take the place of two such sums: one is left per layer."""
    sublayers = sum(layer.num_sublayers for layer in model.layers)
    exchanged = sum(count for mlp, count in model.feed_forwards if isinstance(mlp, MixtureOfExperts))
    return sublayers - (exchanged if spread.dp > 1 else 0)


def elementwise_size(model: ModelSpec, p: Pass) -> Array:
    """Numbers that norms, rotations and activations move per token, on average over the layers: 6 times the hidden
    state, twice what is rotated, three times the feed-forward's width."""
    moved: Array = np.asarray(6.0 * model.hidden_size * model.num_hidden_layers)
    for mixer, count in model.mixers:
        moved = moved + count * 2.0 * _mixed_size(mixer, p)
    for mlp, count in model.feed_forwards:
        moved = moved + count * 3.0 * mlp.active_width / p.tp
    return moved / model.num_hidden_layers


def _mixed_size(mixer: Mixer, p: Pass) -> Array:
    if isinstance(mixer, Attention):
        return p.size(Part(mixer.num_heads, mixer.head_dim), Part(mixer.num_kv_heads, mixer.head_dim))
    inner = [projection for projection in mixer.projections(1) if projection.name != "o"]
    return sum((p.size(*projection.outputs) for projection in inner), np.asarray(0.0))
