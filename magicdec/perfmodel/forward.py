"""One forward pass of a model on a tensor-parallel group, as named operations.

    layers × (norms, projections, what mixes tokens, feed-forward, all-reduces) + final norm +
    lm_head + fixed costs

A `Pass` says for how many sequences and tokens, on what, and how split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.kernels.attention import (
    Attended,
    PrefillCurve,
    Prompts,
    attention,
    prefill_attention,
)
from magicdec.perfmodel.kernels.experts import RankExperts, experts
from magicdec.perfmodel.kernels.gemm import linear, matrix_dtype, streaming
from magicdec.perfmodel.kernels.latents import (
    Latents,
    Scores,
    indexer,
    latent_attention,
    sparse_attention,
)
from magicdec.perfmodel.kernels.links import Exchange, Message, all_reduce, exchange
from magicdec.perfmodel.kernels.op import (
    FP32_BYTES,
    ForwardTime,
    Op,
    Where,
    fixed,
    merged,
)
from magicdec.perfmodel.kernels.recurrence import Recurrence, recurrence
from magicdec.specs.attention_kernels import attention_path, latent_layer
from magicdec.specs.engine import EngineProfile
from magicdec.specs.layers import MixtureOfExperts
from magicdec.specs.mixers import (
    Attention,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    LightningAttention,
    Mamba2,
    Mixer,
    Part,
    Projection,
)
from magicdec.specs.model import ModelSpec
from magicdec.specs.parallel import TENSOR_PARALLEL, Parallelism
from magicdec.specs.precision import Precision

EXPERT_IMBALANCE = 1.2
"""Tokens of the fullest rank of whole experts, over the mean: an estimate. 1 is what routing that
is balanced with copies of busy experts comes near to; intervals.py has its error."""

FP8_SCALES = 1.0 + 4.0 / 128.0
"""Bytes of a dispatched number in fp8, with a scale in 32 bits per 128 of them."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A forward pass's sequences and tokens, where it runs, and how it is split; numbers
    broadcast."""

    at: Where
    batch: Any
    query_len: Any
    """New tokens of each sequence: 1 in decoding and drafting, gamma + 1 in verification, the
    prompt in prefill.
    """
    kv_len: Any
    """Tokens of a sequence in the cache, the new ones included."""
    full_kv_len: Any = None
    """Tokens that layers of full attention see, in a sparse draft's pass; None: all."""
    tp: Any = 1
    num_passes: Any = 1.0
    """Passes that the whole is cut into (chunked prefill): fixed costs and weights are paid by
    each.
    """
    logit_rows: Any = None
    """Tokens whose logits are computed; None: all."""
    attention_factor: Any = 1.0
    mixed_heads: bool = False
    """Whether the model's layers of attention differ in head size."""
    is_prefill: bool = False
    """Whether attention is causal over whole prompts, by the prefill kernel where the device has
    its curve.
    """
    spread: Parallelism = TENSOR_PARALLEL

    def in_arrays(self) -> Pass:
        """The pass with every number as an array."""
        full_kv_len = self.full_kv_len
        if full_kv_len is None:
            full_kv_len = self.kv_len
        return replace(
            self,
            batch=np.asarray(self.batch, dtype=np.float64),
            query_len=np.asarray(self.query_len, dtype=np.float64),
            kv_len=np.asarray(self.kv_len, dtype=np.float64),
            full_kv_len=np.asarray(full_kv_len, dtype=np.float64),
            tp=np.asarray(self.tp, dtype=np.float64),
            num_passes=np.asarray(self.num_passes, dtype=np.float64),
            attention_factor=np.asarray(self.attention_factor, dtype=np.float64),
        )

    @property
    def tokens(self) -> Array:
        """Tokens in each of the passes that the whole is cut into."""
        return np.asarray(self.batch * self.query_len / self.num_passes)

    def size(self, *parts: Part) -> Array:
        """One rank's share of these dimensions."""
        return size(parts, self.tp)


def share(num_heads: int, tp_size: Any) -> Array:
    """A rank's share of some heads; at least one, so replicated where there are more ranks than
    heads.
    """
    return np.maximum(np.ceil(num_heads / np.asarray(tp_size, dtype=np.float64)), 1.0)


def size(parts: Iterable[Part], tp_size: Any) -> Array:
    """One rank's share of one side of a matrix."""
    total: Array = np.asarray(0.0)
    for part in parts:
        total = total + share(part.num_heads, tp_size) * part.size
    return total


def attended(mixer: Attention, p: Pass) -> Any:
    """Tokens that a query sees on average (in decoding, the last of the pass's queries).

    A chunk is seen up to the query's place in it. The contexts of a batch lie half a chunk around
    their mean, or down to nothing, so that place is the context at first, and half a chunk on
    average beyond.
    """
    if mixer.span is None:
        if p.is_prefill:
            return (p.kv_len + 1.0) / 2.0
        return p.full_kv_len
    span = float(mixer.span)
    if mixer.mask == "chunk":
        if p.is_prefill:
            return (np.minimum(span, p.kv_len) + 1.0) / 2.0
        return np.minimum(p.kv_len, (span + 1.0) / 2.0)
    if p.is_prefill:
        window = np.minimum(span, p.kv_len)
        return window * (1.0 - (window - 1.0) / (2.0 * np.maximum(p.kv_len, 1.0)))
    return np.minimum(p.kv_len, span + p.query_len - 1.0)


def projection_ops(model: ModelSpec, p: Pass) -> list[Op]:
    """The matrix products that every token passes; those of one shape are timed once."""
    counts: Counter[tuple[Projection, Precision]] = Counter()
    mixers = model.part_precision("mixer", p.at.precision)
    mlps = model.part_precision("mlp", p.at.precision)
    for parts, precision in ((model.mixers, mixers), (model.feed_forwards, mlps)):
        for part, count in parts:
            for projection in _joined(part.projections(model.hidden_size)):
                counts[projection, precision] += count
    operations = []
    for (projection, precision), count in counts.items():
        operations.append(_linear(projection, precision, p, count=count * p.num_passes))
    return operations


def _joined(projections: Sequence[Projection]) -> list[Projection]:
    """The projections to the latents of queries and of the cache, which have one input, as one
    product.
    """
    latent = []
    others = []
    for projection in projections:
        if projection.name in ("q_a", "kv_a"):
            latent.append(projection)
        else:
            others.append(projection)
    if len(latent) < 2:
        return list(projections)
    outputs: list[Part] = []
    for projection in latent:
        outputs.extend(projection.outputs)
    return [Projection("qkv_a", tuple(outputs), latent[0].inputs), *others]


def _linear(projection: Projection, precision: Precision, p: Pass, *, count: Any) -> Op:
    """Routers stay in 16 bits. Where experts are fused, shared ones are one more of them or run in
    a stream beside
    them: their work is paid, their launches are not."""
    n = p.size(*projection.outputs)
    k = p.size(projection.inputs)
    if projection.name == "router":
        precision = precision.tables
    at = p.at._replace(precision=precision)
    is_beside = p.at.engine.kernels.fused_experts and projection.name.startswith(
        "shared_"
    )
    return linear(
        projection.name, at, m=p.tokens, n=n, k=k, count=count, is_beside=is_beside
    )


def _attention(mixer: Attention, p: Pass, *, count: int) -> list[Op]:
    operations = []
    if mixer.qk_norm == "layer":
        # a norm over all heads adds up squares of queries and keys: two numbers per token
        squares = Message(p.tokens * 2.0 * FP32_BYTES, p.tp)
        operations.append(all_reduce(p.at, squares, count=count * p.num_passes))
    curve = PrefillCurve.known(p.at.hw)
    if p.is_prefill and curve is not None:
        return [*operations, _prefill(mixer, p, curve, count=count)]
    factor = np.where(p.query_len > 1, p.at.engine.kernels.verify_attention_factor, 1.0)
    if mixer.mask == "full":
        factor = factor * p.attention_factor
    kv_len = attended(mixer, p)
    window = None
    if mixer.mask == "window":
        window = kv_len
        kv_len = p.kv_len
    work = Attended(
        p.batch,
        p.query_len,
        kv_len,
        mixer.num_heads / p.tp,
        share(mixer.num_kv_heads, p.tp),
        mixer.head_dim,
        window=window,
        has_sinks=mixer.sinks,
        mixed_heads=p.mixed_heads,
    )
    attending = attention(
        p.at, work, count=count, factor=factor, is_prefill=p.is_prefill
    )
    return [*operations, attending]


def _prefill(mixer: Attention, p: Pass, curve: PrefillCurve, *, count: int) -> Op:
    """Attention by the prefill kernel's own curve. Chunks of the context are prompts of their
    own."""
    batch, prompt = p.batch, p.query_len
    if mixer.mask == "chunk" and mixer.span is not None:
        prompt = np.minimum(p.query_len, float(mixer.span))
        batch = p.batch * p.query_len / np.maximum(prompt, 1e-9)
    work = Prompts(
        batch,
        prompt,
        prompt,
        mixer.num_heads / p.tp,
        share(mixer.num_kv_heads, p.tp),
        mixer.head_dim,
    )
    window = None
    if mixer.mask == "window":
        window = mixer.span
    return prefill_attention(
        p.at, work, curve, num_chunks=p.num_passes, window=window, count=count
    )


def _latent(mixer: LatentAttention, p: Pass, *, count: int) -> list[Op]:
    """Decoding attends to the latents themselves; prefill expands them and attends head by head.
    With an indexer each query reads the tokens that are chosen for it."""
    heads = mixer.num_heads / p.tp
    kv_len = attended(Attention(num_heads=1, num_kv_heads=1, head_dim=1), p)
    several = np.where(
        p.query_len > 1, p.at.engine.kernels.verify_attention_factor, 1.0
    )
    factor = several * p.attention_factor
    row = mixer.latent_size
    pairs = 2.0 * (mixer.latent_size + mixer.kv_lora_rank)
    if mixer.indexer is not None:
        index = mixer.indexer
        choosing = []
        if not index.is_shared:
            scores = Scores(
                p.batch, p.query_len, kv_len, index.num_heads, index.head_dim
            )
            choosing = indexer(p.at, scores, top_k=index.top_k, count=count)
        chosen = Latents(
            p.batch,
            p.query_len,
            np.minimum(kv_len, float(index.top_k)),
            heads,
            row,
            pairs,
        )
        return [*choosing, sparse_attention(p.at, chosen, count=count, factor=factor)]
    if not p.is_prefill:
        layer = latent_layer(mixer, p.at.precision.kv_dtype)
        path = attention_path(p.at.engine, p.at.hw, layer)
        work = Latents(p.batch, p.query_len, kv_len, heads, row, pairs)
        if not any(law.expands for law in path.laws):
            return [latent_attention(p.at, work, count=count, factor=factor)]
        one = np.where(p.query_len > 1, 0.0, count)
        absorbed = latent_attention(p.at, work, count=one, factor=factor)
        return [
            absorbed,
            *_expanded(mixer, p, kv_len, count=count - one, factor=factor),
        ]
    curve = PrefillCurve.known(p.at.hw)
    if curve is not None:
        expanded = Attention(
            num_heads=mixer.num_heads,
            num_kv_heads=mixer.num_heads,
            head_dim=mixer.expanded_size,
        )
        return [_prefill(expanded, p, curve, count=count)]
    by_head = Attended(
        p.batch, p.query_len, kv_len, heads, heads, float(mixer.expanded_size)
    )
    return [attention(p.at, by_head, count=count, factor=factor, is_prefill=True)]


def _expanded(
    mixer: LatentAttention, p: Pass, kv_len: Any, *, count: Any, factor: Any
) -> list[Op]:
    """Keys and values of each head for the whole context, made anew, and attention to them."""
    at = p.at._replace(
        precision=msgspec.structs.replace(p.at.precision, kv_dtype="bf16")
    )
    heads = mixer.num_heads / p.tp
    outputs = heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)
    rows = p.batch * kv_len
    expanding = linear(
        "expand", at, m=rows, n=outputs, k=mixer.kv_lora_rank, count=count
    )
    by_head = Attended(
        p.batch, p.query_len, kv_len, heads, heads, float(mixer.expanded_size)
    )
    return [expanding, attention(at, by_head, count=count, factor=factor)]


def _recurrence(mixer: Mixer, p: Pass, *, count: int) -> list[Op]:
    """The state is read and written once per pass in prefill; verification keeps the state after
    every token, so a rejection can go back to the one it needs, and in some engines copies that
    one."""
    is_in_table = isinstance(mixer, GatedDeltaNet)
    recurrent: Array = np.asarray(0.0)
    conv: Array = np.asarray(0.0)
    for state in mixer.states():
        heads = share(state.num_heads, p.tp)
        recurrent = recurrent + heads * state.recurrent_elements
        conv = conv + heads * state.conv_elements
    work = Recurrence(
        p.batch,
        p.query_len,
        recurrent,
        conv,
        getattr(mixer, "conv_kernel", 1),
        state_element=p.at.engine.memory.state_element_bytes,
    )
    if p.is_prefill:
        work = work._replace(query_len=p.query_len / p.num_passes)
        count = count * p.num_passes
        return [
            recurrence(
                p.at, work, is_in_table=is_in_table, is_prefill=True, count=count
            )
        ]
    # read and written
    copied = np.where(p.query_len > 1, 2.0 * p.at.engine.paths.states_beside, 0.0)
    work = work._replace(states_written=p.query_len + copied)
    return [recurrence(p.at, work, is_in_table=is_in_table, count=count)]


MIXERS: dict[type, Callable[..., list[Op]]] = {
    Attention: _attention,
    LatentAttention: _latent,
    GatedDeltaNet: _recurrence,
    KimiDeltaAttention: _recurrence,
    LightningAttention: _recurrence,
    Mamba2: _recurrence,
}
"""The operations of what mixes tokens."""


def mixer_ops(mixer: Mixer, p: Pass, *, count: int) -> list[Op]:
    """The operations of layers that mix tokens, with the mixer's name in their kernels' names."""
    operations = []
    cache = p.at.precision.narrow_cache
    over = f" over a {cache} cache" if cache else ""
    for op in MIXERS[type(mixer)](mixer, p, count=count):
        if op.group == "attention":
            operations.append(op.named(f" ({mixer.label}){over}"))
        else:
            operations.append(op)
    return operations


def expert_ops(model: ModelSpec, p: Pass) -> list[Op]:
    """The routed experts of every layer that has them."""
    found: list[Op] = []
    at = p.at._replace(precision=model.part_precision("experts", p.at.precision))
    for mlp, count in model.feed_forwards:
        if not isinstance(mlp, MixtureOfExperts):
            continue
        work = RankExperts(
            p.tokens,
            mlp.inner_size(model.hidden_size),
            mlp.width / p.tp,
            mlp.num_experts,
            mlp.num_experts_per_tok,
            num_matrices=mlp.expert.num_inner + 1.0,
        )
        repeats = count * p.num_passes
        if p.spread.whole_experts:
            found += _whole_experts(
                work._replace(width=mlp.width), at, p, count=repeats
            )
        else:
            found += experts(at, work, count=repeats)
    return found


def _whole_experts(work: RankExperts, at: Where, p: Pass, *, count: Any) -> list[Op]:
    """Operations of experts that are divided whole over the ranks of a stage.

    One rank holds ceil(E / ranks) experts and computes k / ranks copies of every group's tokens,
    EXPERT_IMBALANCE times as many on the fullest rank. The ranks of a single group have the tokens
    already; with several groups, tokens are sent to their experts and back, and each rank of a group
    sends its part of the group's tokens.
    """
    ranks = np.asarray(p.spread.ep_size(p.tp), dtype=np.float64)
    uneven = np.where(ranks > 1, EXPERT_IMBALANCE, 1.0)
    held = np.ceil(work.num_experts / ranks)
    chosen = work.num_experts_per_tok
    of_rank = work._replace(
        tokens=p.tokens * p.spread.dp,
        num_experts=held,
        num_experts_per_tok=np.minimum(uneven * chosen / ranks, held),
        own_tokens=p.tokens,
    )
    found = experts(at, of_rank, count=count)
    if p.spread.dp > 1:
        sent = Exchange(p.tokens / p.tp, chosen, ranks, once_per_node=p.is_prefill)
        element = 2.0
        if matrix_dtype(at.hw, at.engine, at.precision) != at.precision.compute_dtype:
            element = FP8_SCALES
        found += exchange(
            at,
            sent,
            hidden_size=work.hidden_size,
            dispatch_element=element,
            count=count,
        )
    return found


def num_reduced(model: ModelSpec, spread: Parallelism) -> int:
    """Sublayers whose outputs a group of tp ranks adds up. Where tokens are sent to whole experts,
    scattering before and gathering after them take the place of two such sums: one is left per
    layer."""
    reduced = sum(layer.num_sublayers for layer in model.layers)
    if spread.dp == 1:
        return reduced
    for mlp, count in model.feed_forwards:
        if mlp.num_experts:
            reduced -= count
    return reduced


MIXER_LAUNCHES = {Attention: 5.0, LatentAttention: 7.0}
"""Kernels of a layer's mixer beside its products and norm: norms of queries and keys, rotation, the
cache, attention; latents besides, the copies that put heads together."""
RECURRENT_LAUNCHES = 10.0
EXPERT_LAUNCHES = 9.0
"""The choice of experts, two kernels that sort tokens by them, two that narrow inputs, two products, the
activation, the sum."""
REPLAY_LAUNCHES = 6.0
"""Kernels of a layer that are launched between captured pieces, and a piece."""


def num_launches(model: ModelSpec, at: Where) -> float:
    """Kernels that the host launches one by one for a pass of prompts, counted in SGLang 0.5.10's
    qwen3.py, qwen3_moe.py and deepseek_v2.py: a product, and one that narrows its input; a norm and an
    all-reduce of each sublayer; those of mixers and experts. Recurrent layers are in no captured piece.
    """
    if at.engine.graphs.captured_prompts and not model.states:
        return REPLAY_LAUNCHES * model.num_hidden_layers
    is_narrow = matrix_dtype(*at) != at.precision.compute_dtype
    launches = 2.0 * sum(layer.num_sublayers for layer in model.layers)
    parts: list[tuple[Sequence[Projection], int]] = []
    for mixer, count in model.mixers:
        launches += count * MIXER_LAUNCHES.get(type(mixer), RECURRENT_LAUNCHES)
        parts.append((mixer.projections(model.hidden_size), count))
    for mlp, count in model.feed_forwards:
        launches += count * (EXPERT_LAUNCHES if mlp.num_experts else 1.0)
        parts.append((mlp.projections(model.hidden_size), count))
    for projections, count in parts:
        for projection in _joined(projections):
            if projection.name == "router":
                launches += count
            elif not projection.name.startswith("shared_"):
                launches += count * (1.0 + is_narrow)
    return launches


def elementwise_size(model: ModelSpec, p: Pass) -> Array:
    """Numbers that norms, rotations and activations move per token, on average over the layers: 6
    times the hidden state, twice what is rotated, three times the feed-forward's width."""
    moved: Array = np.asarray(6.0 * model.hidden_size * model.num_hidden_layers)
    for mixer, count in model.mixers:
        moved = moved + count * 2.0 * _mixed_size(mixer, p)
    for mlp, count in model.feed_forwards:
        moved = moved + count * 3.0 * mlp.active_width / p.tp
    return moved / model.num_hidden_layers


def _mixed_size(mixer: Mixer, p: Pass) -> Array:
    if isinstance(mixer, Attention):
        queries = Part(mixer.num_heads, mixer.head_dim)
        keys = Part(mixer.num_kv_heads, mixer.head_dim)
        return p.size(queries, keys)
    mixed: Array = np.asarray(0.0)
    for projection in mixer.projections(1):
        if projection.name != "o":
            mixed = mixed + p.size(*projection.outputs)
    return mixed


BLOCK_COLUMNS = 128


def forward_pass(model: ModelSpec, p: Pass) -> ForwardTime:
    """Time of one pass of one group of tp ranks, through all stages of the layers in turn, while
    every group has as much to do."""
    p = p.in_arrays()
    asked = _AskedPass(model, p)
    if asked.num_numbers > MOST_KEPT_NUMBERS or has_columns(p.at.engine):
        return _timed(asked)
    return _kept(asked)


def has_columns(engine: EngineProfile) -> bool:
    """Whether constants are columns of several values, as in the fits of engines, by which profiles
    cannot be compared."""
    return any(
        np.ndarray in map(type, msgspec.structs.astuple(table))
        for table in engine.tables
    )


class _AskedPass:
    """A pass of a model as a key: drafts of one plan are compared with the same passes of the
    target. Equal are passes of one model and device with equal numbers."""

    def __init__(self, model: ModelSpec, p: Pass) -> None:
        self.model = model
        self.p = p
        numbers = (
            p.batch,
            p.query_len,
            p.kv_len,
            p.full_kv_len,
            p.tp,
            p.num_passes,
            p.attention_factor,
            np.asarray(p.logit_rows, dtype=np.float64),
        )
        self.num_numbers = sum(array.size for array in numbers)
        self._numbers = tuple((array.shape, array.tobytes()) for array in numbers)

    def __hash__(self) -> int:
        return hash((id(self.model), self._numbers))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _AskedPass):
            return NotImplemented
        return (
            self.model is other.model
            and self._numbers == other._numbers
            and self.p.at.hw is other.p.at.hw
            and self.p.at.engine == other.p.at.engine
            and self.p.at.precision == other.p.at.precision
            and self.p.spread == other.p.spread
            and self.p.is_prefill == other.p.is_prefill
        )


MOST_KEPT_NUMBERS = 1024
"""A pass with more numbers is not kept: its arrays are large, and nobody asks for it again."""


@lru_cache(maxsize=128)
def _kept(asked: _AskedPass) -> ForwardTime:
    return _timed(asked)


def _timed(asked: _AskedPass) -> ForwardTime:
    model = asked.model
    p = replace(asked.p, mixed_heads=model.mixes_head_sizes)
    at = p.at
    layers = model.num_hidden_layers * p.num_passes
    activation = at.precision.activation_bytes
    head = at
    if not at.engine.kernels.quantized_head:
        head = at._replace(precision=model.part_precision("head", at.precision))
    rows = p.logit_rows
    if rows is None:
        rows = p.batch * p.query_len
    layers_s = layers * at.engine.overheads.layer_overhead_s
    passes_s = p.spread.pp * p.num_passes * at.engine.overheads.forward_overhead_s
    operations = projection_ops(model, p)
    for mixer, count in model.mixers:
        operations += mixer_ops(mixer, p, count=count)
    operations += [
        *expert_ops(model, p),
        streaming(
            "norms",
            at,
            num_bytes=p.tokens * activation * elementwise_size(model, p),
            num_kernels=at.engine.kernels.elementwise_kernels_per_layer,
            count=layers,
        ),
        all_reduce(
            at,
            Message(p.tokens * model.hidden_size * activation, p.tp),
            count=num_reduced(model, p.spread) * p.num_passes,
        ),
        linear("lm_head", head, m=rows, n=model.vocab_size / p.tp, k=model.hidden_size),
        fixed("overhead", "overhead", layers_s + passes_s + _block_experts_s(model, p)),
    ]
    return ForwardTime(merged(operations))


def _block_experts_s(model: ModelSpec, p: Pass) -> Array:
    """The time that fused experts in fp8_block add where a rank's columns fill whole blocks."""
    seconds: Array = np.zeros(())
    layer_s = p.at.engine.kernels.block_experts_layer_s
    precision = model.part_precision("experts", p.at.precision)
    if not layer_s or precision.weight_dtype != "fp8_block":
        return seconds
    ranks = p.tp
    if p.spread.whole_experts:
        ranks = 1.0
    for mlp, count in model.feed_forwards:
        if mlp.num_experts:
            fills = mlp.width / ranks % BLOCK_COLUMNS == 0
            seconds = (
                seconds + np.where(fills, 1.0, 0.0) * count * p.num_passes * layer_s
            )
    return seconds


def prefill(
    model: ModelSpec,
    at: Where,
    *,
    batch: Any,
    prompt_len: Any,
    tp: Any = 1,
    spread: Parallelism = TENSOR_PARALLEL,
) -> ForwardTime:
    """Prefill of `batch` prompts in passes of at most `engine.prefill_tokens` tokens.

    Causal attention sees half of the prompt on average; logits are computed for the last token of
    each prompt.
    """
    one = _of_prompts(at, batch=batch, prompt_len=prompt_len, tp=tp, spread=spread)
    return forward_pass(model, one)


def prompts_attention(
    model: ModelSpec,
    at: Where,
    *,
    batch: Any,
    prompt_len: Any,
    tp: Any = 1,
    spread: Parallelism = TENSOR_PARALLEL,
) -> ForwardTime:
    """The attention of a prefill, without its other operations."""
    one = _of_prompts(
        at, batch=batch, prompt_len=prompt_len, tp=tp, spread=spread
    ).in_arrays()
    operations = []
    for mixer, count in model.mixers:
        operations += mixer_ops(mixer, one, count=count)
    attention = [op for op in operations if op.group == "attention"]
    return ForwardTime(merged(attention))


def _of_prompts(
    at: Where, *, batch: Any, prompt_len: Any, tp: Any, spread: Parallelism
) -> Pass:
    """The passes over whole prompts."""
    prompt = np.asarray(prompt_len, dtype=np.float64)
    engine = at.engine
    passes = np.ceil(
        np.asarray(batch, dtype=np.float64) * prompt / engine.scheduler.prefill_tokens
    )
    # a prefill kernel reads KV once per tile of queries whatever the engine's decode kernel does
    engine = engine.with_constants(
        {
            "kernels.kv_reads": "per_sequence",
            "kernels.verify_attention_factor": 1.0,
            "kernels.query_tile_reread": 0.0,
        }
    )
    return Pass(
        at=at._replace(engine=engine),
        batch=batch,
        query_len=prompt,
        kv_len=prompt,
        tp=tp,
        logit_rows=batch,
        num_passes=np.maximum(passes, 1.0),
        is_prefill=True,
        spread=spread,
    )
