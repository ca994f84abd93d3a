"""Assembles this shard's layers from tensors with Hugging Face's names and shapes.

They are divided among the shards, fused where one product does for several matrices, and have the dimensions that are
rotated together side by side.

Shape suffixes: N query and key heads of this shard, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.errors import CheckpointError
from magicdec.runtime.attention import Scoring
from magicdec.runtime.checkpoint import ALL, CheckpointDirectory, TensorSource
from magicdec.runtime.distributed import SINGLE, TensorParallel
from magicdec.runtime.experts import Experts, Router
from magicdec.runtime.kv_cache import Kept
from magicdec.runtime.layers import (
    MLP,
    XIELU,
    AllHeadsNorm,
    ColumnParallelLinear,
    HeadLayerNorm,
    HeadNorm,
    LayerNorm,
    Norm,
    PlainHeadNorm,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from magicdec.runtime.mixers import GroupedAttention, LatentAttention, Mixer
from magicdec.runtime.rotary import RotaryEmbedding
from magicdec.runtime.transformer import Layer, Transformer
from magicdec.specs.layers import MLP as DenseMLP
from magicdec.specs.layers import Attention, MixtureOfExperts, Rope
from magicdec.specs.layers import LatentAttention as LatentAttentionSpec
from magicdec.specs.layers import Layer as LayerSpec
from magicdec.specs.layers import Mixer as MixerSpec
from magicdec.specs.model import ModelSpec

ROOTS = ("model", "language_model.model", "model.language_model")
"""How the names of a decoder's tensors begin: alone, and in models of several modalities."""
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
BESIDE_THE_DECODER = (
    "visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "model.visual.", "model.vision_tower.",
    "model.vision_model.", "model.multi_modal_projector.", "mm_projector.",
)  # fmt: skip
"""Modules that turn images into embeddings: text does not pass them."""
EXPERT_MATRICES = {"gate_proj": ("gate_proj", "up_proj", "down_proj"), "w1": ("w1", "w3", "w2")}
"""Names of gate, up and down, by TensorNames.expert."""
LATENT_NORM_EPS = 1e-6
"""Epsilon of latents' norms, whatever the other norms have (DeepSeek-V3's published code)."""
NORM_PLACES = {
    "before": ("input_norm", "mlp_norm"),
    "after": ("mixed_norm", "output_norm"),
    "around": ("input_norm", "mixed_norm", "mlp_norm", "output_norm"),
    "parallel": ("input_norm",),
}
"""Norms in the order of TensorNames.norms, by their placement."""
MIXER_NORMS = ("input_norm", "mixed_norm")
"""Norms of the mixer; a block without one lacks them."""


@dataclass(frozen=True)
class _Heads:
    """Query and KV heads of a layer on this shard."""

    queries: slice
    kv: slice

    @property
    def counts(self) -> tuple[int, int]:
        return self.queries.stop - self.queries.start, self.kv.stop - self.kv.start


class Builder:
    """One model on one shard."""

    def __init__(self, spec: ModelSpec, tp: TensorParallel, source: TensorSource, device: torch.device) -> None:
        self._spec, self._tp, self._source, self._device = spec, tp, source, device
        self._root = _present(ROOTS, source, ".embed_tokens.weight")
        self._ropes: list[Rope] = []

    def build(self) -> Transformer:
        spec, tp = self._spec, self._tp
        vocab = tp.slice_of(spec.vocab_size)
        table_shape = (spec.vocab_size, spec.hidden_size)
        embedding = self._source.read(f"{self._root}.embed_tokens.weight", table_shape, vocab)
        head = self._head(embedding, table_shape, vocab)
        layers = tuple(self._layer(f"{self._root}.layers.{i}", layer) for i, layer in enumerate(spec.layers))
        model = Transformer(
            spec=spec,
            tp=tp,
            kept={index: layer.mixer.kept for index, layer in enumerate(layers) if layer.mixer is not None},
            embedding=VocabParallelEmbedding(weight_VH=embedding, tp=tp),
            layers=layers,
            norm=self._norm(f"{self._root}.norm"),
            head=ColumnParallelLinear(weight=head, bias=self._head_bias(vocab)),
            rotaries=tuple(RotaryEmbedding(rope, self._device, embedding.dtype) for rope in self._ropes),
        )
        heads = range(len(layers), len(layers) + len(spec.mtp_layers))
        self._source.check_all_read(BESIDE_THE_DECODER + tuple(f"{self._root}.layers.{i}." for i in heads))
        return model

    def _head(self, embedding: Tensor, shape: tuple[int, int], vocab: slice) -> Tensor:
        """The head's own table, or the embedding where they are tied; one that is stored beside must be the same."""
        name = _present(HEADS, self._source)
        is_stored = isinstance(self._source, CheckpointDirectory) and name in self._source
        if self._spec.tie_word_embeddings and not is_stored:
            return embedding
        head = self._source.read(name, shape, vocab)
        if not self._spec.tie_word_embeddings:
            return head
        if not torch.equal(head, embedding):
            raise CheckpointError(
                f"{self._spec.name}: tensor {name} differs from the embedding, but its config.json ties them "
                "(tie_word_embeddings)"
            )
        return embedding

    def _head_bias(self, vocab: slice) -> Tensor | None:
        name = _present(HEADS, self._source).replace("weight", "bias")
        return self._source.read(name, (self._spec.vocab_size,), vocab) if self._spec.head_bias else None

    def _layer(self, prefix: str, layer: LayerSpec) -> Layer:
        norm = self._spec.norm
        places = zip(NORM_PLACES[norm.placement], self._spec.names.norms, strict=True)
        norms = {
            place: self._norm(f"{prefix}.{name}")
            for place, name in places
            if (layer.mixer if place in MIXER_NORMS else layer.mlp) is not None
        }
        return Layer(
            mixer=None if layer.mixer is None else self._mixer(f"{prefix}.self_attn", layer.mixer),
            mlp=None if layer.mlp is None else self._feed_forward(f"{prefix}.{self._spec.names.mlp}", layer.mlp),
            is_parallel=norm.placement == "parallel",
            **norms,
        )

    def _mixer(self, prefix: str, kind: MixerSpec) -> Mixer:
        if isinstance(kind, LatentAttentionSpec):
            return self._latent(prefix, kind)
        assert isinstance(kind, Attention)
        return self._grouped(prefix, kind)

    def _norm(self, name: str) -> Norm:
        norm = self._spec.norm
        weight = self._norm_weight(f"{name}.weight", (self._spec.hidden_size,))
        if norm.kind.startswith("rms"):
            return RMSNorm(weight=weight, eps=norm.eps)
        bias = self._source.read(f"{name}.bias", (self._spec.hidden_size,)) if norm.has_bias else None
        return LayerNorm(weight=weight, eps=norm.eps, bias=bias)

    def _norm_weight(self, name: str, shape: tuple[int, ...], rows: slice = ALL) -> Tensor:
        """The factor of a norm: the tensor, or one more than it, in 32 bits lest that be rounded away."""
        weight = self._source.read(name, shape, rows)
        return weight.float() + 1.0 if self._spec.norm.kind.endswith("plus_one") else weight

    def _grouped(self, prefix: str, kind: Attention) -> GroupedAttention:
        tp, head_dim = self._tp, kind.head_dim
        num_heads, num_kv_heads = kind.num_heads // tp.size, max(1, kind.num_kv_heads // tp.size)
        # Where there are more shards than KV heads, neighbouring shards hold copies of the same head.
        first_kv = tp.rank * kind.num_kv_heads // tp.size
        first = tp.rank * num_heads
        heads = _Heads(slice(first, first + num_heads), slice(first_kv, first_kv + num_kv_heads))
        columns = slice(heads.queries.start * head_dim, heads.queries.stop * head_dim)
        o_shape = (self._spec.hidden_size, kind.num_heads * head_dim)
        norm, is_normed_after = self._head_norm(prefix, kind, heads), kind.qk_norm in ("l2", "head_after")
        output = RowParallelLinear(
            weight=self._source.read(f"{prefix}.o_proj.weight", o_shape, ALL, columns),
            bias=self._shared_bias(f"{prefix}.o_proj.bias", kind.output_bias),
            tp=tp,
        )
        return GroupedAttention(
            kept=Kept(num_heads=num_kv_heads, head_dim=head_dim, span=kind.span if kind.mask != "full" else None),
            num_heads=num_heads,
            qkv=self._qkv(prefix, kind, heads),
            output=output,
            scoring=self._scoring(prefix, kind, heads.queries),
            rotary=self._rotary(kind.rope),
            num_rotated=0 if kind.rope is None else kind.rope.dim,
            norm=None if is_normed_after else norm,
            rotated_norm=norm if is_normed_after else None,
            temperature=kind.temperature,
            temperature_offset=kind.temperature_offset,
            gated=kind.gated,
        )

    def _latent(self, prefix: str, kind: LatentAttentionSpec) -> LatentAttention:
        hidden, rank, read = self._spec.hidden_size, kind.kv_lora_rank, self._source.read
        count = kind.num_heads // self._tp.size
        heads = slice(self._tp.rank * count, (self._tp.rank + 1) * count)
        order = _rotated_order(kind.rope, kind.qk_rope_head_dim)

        def rows(size: int) -> slice:
            return slice(heads.start * size, heads.stop * size)

        query_order = None if order is None else _behind(kind.qk_nope_head_dim, order)
        name, inputs = (
            (f"{prefix}.q_proj", hidden) if kind.q_lora_rank is None else (f"{prefix}.q_b_proj", kind.q_lora_rank)
        )
        query = read(f"{name}.weight", (kind.num_heads * kind.qk_head_dim, inputs), rows(kind.qk_head_dim))
        kept_order = None if order is None else _behind(rank, order)
        kv_a = f"{prefix}.kv_a_proj_with_mqa"
        latent_bias = _ordered(read(f"{kv_a}.bias", (kind.latent_size,)), kept_order) if kind.bias else None
        latent = _ordered(read(f"{kv_a}.weight", (kind.latent_size, hidden)), kept_order)
        expanded_size = kind.qk_nope_head_dim + kind.v_head_dim
        expanded = read(f"{prefix}.kv_b_proj.weight", (kind.num_heads * expanded_size, rank), rows(expanded_size))
        keys_ADR, values_AVR = expanded.unflatten(0, (count, -1)).split((kind.qk_nope_head_dim, kind.v_head_dim), dim=1)
        o_shape = (hidden, kind.num_heads * kind.v_head_dim)
        query_latent, query_norm = self._query_latent(prefix, kind)
        return LatentAttention(
            kept=Kept(num_heads=1, head_dim=kind.latent_size, latent_value_dim=rank),
            num_heads=count,
            query=ColumnParallelLinear(weight=_ordered(query, query_order)),
            latent=ColumnParallelLinear(weight=latent, bias=latent_bias),
            latent_norm=self._latent_norm(f"{prefix}.kv_a_layernorm", rank),
            keys_ADR=keys_ADR.contiguous(),
            values_AVR=values_AVR.contiguous(),
            output=RowParallelLinear(
                weight=read(f"{prefix}.o_proj.weight", o_shape, ALL, rows(kind.v_head_dim)),
                bias=self._shared_bias(f"{prefix}.o_proj.bias", kind.bias),
                tp=self._tp,
            ),
            scoring=Scoring(scale=kind.scale or kind.qk_head_dim**-0.5),
            rotary=self._rotary(kind.rope),
            query_latent=query_latent,
            query_norm=query_norm,
        )

    def _query_latent(
        self, prefix: str, kind: LatentAttentionSpec
    ) -> tuple[ColumnParallelLinear | None, RMSNorm | None]:
        rank = kind.q_lora_rank
        if rank is None:
            return None, None
        weight = self._source.read(f"{prefix}.q_a_proj.weight", (rank, self._spec.hidden_size))
        bias = self._source.read(f"{prefix}.q_a_proj.bias", (rank,)) if kind.bias else None
        return ColumnParallelLinear(weight=weight, bias=bias), self._latent_norm(f"{prefix}.q_a_layernorm", rank)

    def _latent_norm(self, name: str, rank: int) -> RMSNorm:
        return RMSNorm(weight=self._source.read(f"{name}.weight", (rank,)), eps=LATENT_NORM_EPS)

    def _scoring(self, prefix: str, kind: Attention, queries: slice) -> Scoring:
        return Scoring(
            scale=kind.scale or kind.head_dim**-0.5,
            window=kind.span if kind.mask == "window" else None,
            chunk=kind.span if kind.mask == "chunk" else None,
            softcap=kind.softcap,
            sinks_A=self._source.read(f"{prefix}.sinks", (kind.num_heads,), queries) if kind.sinks else None,
        )

    def _rotary(self, rope: Rope | None) -> int | None:
        """The number of a rotary embedding; layers that rotate alike share one."""
        if rope is None:
            return None
        if rope not in self._ropes:
            self._ropes.append(rope)
        return self._ropes.index(rope)

    def _qkv(self, prefix: str, kind: Attention, heads: _Heads) -> ColumnParallelLinear:
        bias = self._qkv_rows(prefix, kind, heads, "bias") if kind.bias else None
        return ColumnParallelLinear(weight=self._qkv_rows(prefix, kind, heads, "weight"), bias=bias)

    def _qkv_rows(self, prefix: str, kind: Attention, heads: _Heads, ending: str) -> Tensor:
        """Rows of queries, keys and values, then of gates where there are any, of the matrix or of its bias."""
        counts = {"q": kind.num_heads, "k": kind.num_kv_heads, "v": kind.num_kv_heads}
        sizes = {part: kind.head_dim * (2 if kind.gated and part == "q" else 1) for part in counts}
        columns = (self._spec.hidden_size,) if ending == "weight" else ()
        found: list[Tensor] = []
        gates: list[Tensor] = []
        offset = 0
        for part, count in counts.items():
            chosen, size = heads.queries if part == "q" else heads.kv, sizes[part]
            name, total, first = f"{prefix}.{part}_proj", count * size, 0
            if self._spec.names.fused_qkv:
                name, total, first = f"{prefix}.qkv_proj", sum(counts[p] * sizes[p] for p in counts), offset
                offset += count * size
            rows = slice(first + chosen.start * size, first + chosen.stop * size)
            read = self._source.read(f"{name}.{ending}", (total, *columns), rows)
            if size > kind.head_dim:  # a head's gates stand behind its queries
                read, gate = (each.flatten(0, 1) for each in read.unflatten(0, (-1, 2, kind.head_dim)).unbind(1))
                gates.append(gate)
            found.append(_ordered(read, _rotated_order(kind.rope, kind.head_dim) if part != "v" else None))
        return torch.cat((*found, *gates))

    def _head_norm(self, prefix: str, kind: Attention, heads: _Heads) -> Callable[[Tensor], Tensor] | None:
        """The norm of query and key heads, its weights in the order of the heads' dimensions here."""
        if kind.qk_norm == "none" or (kind.qk_norm == "l2" and kind.rope is None):
            return None
        if kind.qk_norm == "l2":
            return PlainHeadNorm(eps=self._spec.norm.eps)
        weights, order = [], _rotated_order(kind.rope, kind.head_dim)
        counts = (kind.num_heads, kind.num_kv_heads)
        for name, total, chosen in zip(self._spec.names.qk_norms, counts, (heads.queries, heads.kv), strict=True):
            if kind.qk_norm.startswith("head"):
                weight = self._norm_weight(f"{prefix}.{name}.weight", (kind.head_dim,))
                weight_ND = weight.expand(chosen.stop - chosen.start, -1)
            elif kind.qk_norm == "layer":
                rows = slice(chosen.start * kind.head_dim, chosen.stop * kind.head_dim)
                weight = self._norm_weight(f"{prefix}.{name}.weight", (total * kind.head_dim,), rows)
                weight_ND = weight.unflatten(0, (-1, kind.head_dim))
            else:
                weight_ND = self._norm_weight(f"{prefix}.{name}.weight", (total, kind.head_dim), chosen)
            weights.append(weight_ND if order is None else weight_ND[:, order])
        weight_ND, eps = torch.cat(weights), self._spec.norm.eps
        if kind.qk_norm == "layer":
            return AllHeadsNorm(weight_ND=weight_ND, eps=eps, num_heads=heads.counts[0], tp=self._tp)
        return (HeadNorm if kind.qk_norm.startswith("head") else HeadLayerNorm)(weight_ND=weight_ND, eps=eps)

    def _feed_forward(self, prefix: str, kind: DenseMLP | MixtureOfExperts) -> MLP | Experts:
        if isinstance(kind, MixtureOfExperts):
            return self._mixture(prefix, kind)
        return self._mlp(prefix, kind, reduced_over=self._tp, matrices=self._spec.names.matrices)

    def _mixture(self, prefix: str, kind: MixtureOfExperts) -> Experts:
        spec, names, count = self._spec, self._spec.names, kind.num_experts
        router = f"{prefix}.{names.router}"
        corrected = f"{prefix}.{names.correction_bias}"
        shape = (1, count) if names.correction_is_row else (count,)
        gate = f"{prefix}.{names.shared}_gate.weight"
        shared = kind.shared
        return Experts(
            router=Router(
                kind=kind,
                weight_EH=self._source.read(f"{router}.weight", (count, spec.hidden_size)),
                bias_E=self._source.read(f"{router}.bias", (count,)) if kind.router_bias else None,
                correction_E=self._source.read(corrected, shape).float().flatten() if kind.correction_bias else None,
            ),
            experts=[self._expert(f"{prefix}.experts", i, kind) for i in range(count)],
            tp=self._tp,
            shared=None if shared is None else self._mlp(f"{prefix}.{names.shared}", shared, reduced_over=SINGLE),
            shared_gate_1H=self._source.read(gate, (1, spec.hidden_size)) if kind.shared_gate else None,
        )

    def _expert(self, prefix: str, index: int, kind: MixtureOfExperts) -> MLP:
        """This shard's part of an expert, whose output is summed over the shards with the other experts'."""
        if not self._are_stacked(prefix):
            return self._mlp(
                f"{prefix}.{index}", kind.expert, reduced_over=SINGLE, matrices=EXPERT_MATRICES[self._spec.names.expert]
            )
        return self._stacked_expert(prefix, index, kind)

    def _are_stacked(self, prefix: str) -> bool:
        """As the architecture has them, unless the checkpoint has them apart: tools that quantise write them so."""
        first = f"{prefix}.0.{EXPERT_MATRICES[self._spec.names.expert][0]}"
        apart = isinstance(self._source, CheckpointDirectory) and any(
            f"{first}.{ending}" in self._source for ending in ("weight", "weight_packed", "qweight")
        )
        return self._spec.names.experts != "each" and not apart

    def _stacked_expert(self, prefix: str, index: int, kind: MixtureOfExperts) -> MLP:
        """An expert from tensors that hold all of them, inputs first."""
        hidden, width, read = self._spec.hidden_size, kind.width, self._source.read
        part, one = self._tp.slice_of(width), slice(index, index + 1)
        down = read(f"{prefix}.down_proj", (kind.num_experts, width, hidden), one, part)[0].T
        down_bias = read(f"{prefix}.down_proj_bias", (kind.num_experts, hidden), one)[0] if kind.bias else None
        gate_up = self._stacked_inner(f"{prefix}.gate_up_proj", (kind.num_experts, hidden, 2 * width), one)
        gate_up_bias = None
        if kind.bias:
            gate_up_bias = self._stacked_inner(f"{prefix}.gate_up_proj_bias", (kind.num_experts, 2 * width), one)
        return MLP(
            gate_up=ColumnParallelLinear(weight=gate_up, bias=gate_up_bias),
            down=RowParallelLinear(weight=down.contiguous(), bias=down_bias if self._tp.rank == 0 else None, tp=SINGLE),
            activation=kind.activation,
            gated=kind.gated,
        )

    def _stacked_inner(self, name: str, shape: tuple[int, ...], one: slice) -> Tensor:
        """An expert's gates and then its ups, of columns of both in turn (gpt-oss) or side by side (Llama 4)."""
        width = shape[-1] // 2
        part, rows = self._tp.slice_of(width), (one, *(ALL,) * (len(shape) - 2))
        if self._spec.names.experts == "stacked_in_turn":
            both = self._source.read(name, shape, *rows, slice(2 * part.start, 2 * part.stop))[0]
            return torch.cat((both[..., ::2], both[..., 1::2]), dim=-1).movedim(-1, 0).contiguous()
        starts = (part.start, width + part.start)
        sides = [self._source.read(name, shape, *rows, slice(i, i + part.stop - part.start))[0] for i in starts]
        return torch.cat(sides, dim=-1).movedim(-1, 0).contiguous()

    def _mlp(
        self,
        prefix: str,
        kind: DenseMLP,
        *,
        reduced_over: TensorParallel,
        matrices: tuple[str, str, str] = EXPERT_MATRICES["gate_proj"],
    ) -> MLP:
        hidden, width = self._spec.hidden_size, kind.width
        part = self._tp.slice_of(width)
        weights, biases = [], []
        for index, name in enumerate(matrices[:2] if kind.gated else matrices[1:2]):
            matrix, total, rows = f"{prefix}.{name}", width, part
            if self._spec.names.fused_gate_up and kind.gated:
                matrix, total = f"{prefix}.{self._spec.names.gate_up}", 2 * width
                rows = slice(index * width + part.start, index * width + part.stop)
            weights.append(self._source.read(f"{matrix}.weight", (total, hidden), rows))
            if kind.bias:
                biases.append(self._source.read(f"{matrix}.bias", (total,), rows))
        return MLP(
            gate_up=ColumnParallelLinear(weight=torch.cat(weights), bias=torch.cat(biases) if biases else None),
            down=RowParallelLinear(
                weight=self._source.read(f"{prefix}.{matrices[2]}.weight", (hidden, width), ALL, part),
                bias=self._shared_bias(f"{prefix}.{matrices[2]}.bias", kind.bias),
                tp=reduced_over,
            ),
            activation=kind.activation,
            gated=kind.gated,
            learned=self._xielu(f"{prefix}.act_fn") if kind.activation == "xielu" else None,
        )

    def _xielu(self, prefix: str) -> XIELU:
        """A learned activation: the stored numbers after softplus. Its fixed numbers may be stored too."""
        names = ("beta", "eps") if isinstance(self._source, CheckpointDirectory) else ()
        stored = {name: f"{prefix}.{name}" for name in names if f"{prefix}.{name}" in self._source}
        fixed = {name: float(self._source.read(tensor, ())) for name, tensor in stored.items()}
        positive, negative = (
            F.softplus(self._source.read(f"{prefix}.{name}", (1,)).float()) for name in ("alpha_p", "alpha_n")
        )
        return XIELU(positive_1=positive, negative_1=fixed.get("beta", XIELU.beta) + negative, **fixed)

    def _shared_bias(self, name: str, wanted: bool) -> Tensor | None:
        """The bias of a row-parallel layer: added once, by the first shard."""
        bias = self._source.read(name, (self._spec.hidden_size,)) if wanted else None
        return bias if self._tp.rank == 0 else None


def _present(names: tuple[str, ...], source: TensorSource, ending: str = "") -> str:
    """The first of these names that the checkpoint has; the first of all where it has none."""
    return next((name for name in names if name + ending in source), names[0])


def _rotated_order(rope: Rope | None, head_dim: int) -> Tensor | None:
    """How a head's dimensions are stored: from Hugging Face's order (all first halves of the rotated pairs, then all
    second halves) to pairs side by side. Done to q and k alike, it changes no score. None where they stand so."""
    if rope is None or rope.pairs == "adjacent":
        return None
    pairs = torch.arange(rope.dim).view(2, rope.dim // 2).T.flatten()
    return torch.cat((pairs, torch.arange(rope.dim, head_dim)))


def _behind(size: int, order: Tensor) -> Tensor:
    """The order of a head of `size` dimensions that stay, and others behind them."""
    return torch.cat((torch.arange(size), size + order))


def _ordered(rows: Tensor, order: Tensor | None) -> Tensor:
    """Rows of several heads, each head's in this order."""
    return rows if order is None else rows.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)
