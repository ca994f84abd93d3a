"""Assembles this shard's layers from tensors with Hugging Face's names and shapes.

They are divided among the shards, fused where one product does for several matrices, and have the
dimensions that are rotated together side by side.

Shape suffixes: N query and key heads of this shard, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.errors import CheckpointError
from magicdec.runtime import layers
from magicdec.runtime.attention import Scoring
from magicdec.runtime.checkpoint import ALL, TensorSource
from magicdec.runtime.distributed import SINGLE, TensorParallel
from magicdec.runtime.kv_cache import Kept
from magicdec.runtime.layers import ColumnParallelLinear, Experts, Router, RowParallelLinear
from magicdec.runtime.mixers import GroupedAttention, LatentAttention, Mixer, RotaryEmbedding
from magicdec.runtime.transformer import Layer, Transformer
from magicdec.specs import layers as specs
from magicdec.specs import mixers as mixer_specs
from magicdec.specs.model import ModelSpec

ROOTS = ("model", "language_model.model", "model.language_model")
"""How the names of a decoder's tensors begin: alone, and in models of several modalities."""
HEADS = ("lm_head", "language_model.lm_head")
BESIDE_THE_DECODER = (
    "visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "model.visual.", "model.vision_tower.",
    "model.vision_model.", "model.multi_modal_projector.", "mm_projector.", "mtp.",
)  # fmt: skip
"""Modules that text does not pass: what turns images into embeddings, and Qwen's prediction
modules, which draft.
"""
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
"""Norms in the order of TensorNames.norms, by their placement; those of the mixer are input_norm
and mixed_norm.
"""
Heads = tuple[slice, slice]
"""Query and KV heads of a layer on this shard."""


class Builder:
    """One model on one shard."""

    def __init__(
        self, spec: ModelSpec, tp: TensorParallel, source: TensorSource, device: torch.device
    ) -> None:
        self._spec = spec
        self._tp = tp
        self._source = source
        self._device = device
        self._read = source.read
        self._root = next(
            (root for root in ROOTS if f"{root}.embed_tokens.weight" in source), ROOTS[0]
        )
        self._ropes: list[mixer_specs.Rope] = []
        self._mixer_inputs = spec.hidden_size

    def build(self) -> Transformer:
        spec = self._spec
        tp = self._tp
        root = self._root
        vocab = tp.slice_of(spec.vocab_size)
        embedding = self._read(
            f"{root}.embed_tokens.weight", (spec.vocab_size, spec.hidden_size), vocab
        )
        head = self._head(embedding, vocab)
        built = tuple(
            self._layer(f"{root}.layers.{i}", layer) for i, layer in enumerate(spec.layers)
        )
        model = Transformer(
            spec=spec,
            tp=tp,
            kept={
                index: layer.mixer.kept
                for index, layer in enumerate(built)
                if layer.mixer is not None
            },
            embedding=layers.VocabParallelEmbedding(weight_VH=embedding, tp=tp),
            layers=built,
            norm=self._norm(f"{root}.norm"),
            head=head,
            rotaries=tuple(
                RotaryEmbedding(rope, self._device, embedding.dtype) for rope in self._ropes
            ),
        )
        heads = range(len(built), len(built) + len(spec.mtp_layers))
        self._source.check_all_read(
            BESIDE_THE_DECODER + tuple(f"{root}.layers.{i}." for i in heads)
        )
        return model

    def _head(self, embedding: Tensor, vocab: slice) -> ColumnParallelLinear:
        """The head's own table, or the embedding where they are tied; one that is stored beside
        must be the same.
        """
        spec = self._spec
        name = next((name for name in HEADS if f"{name}.weight" in self._source), HEADS[0])
        weight, is_tied = embedding, spec.tie_word_embeddings
        if not is_tied or f"{name}.weight" in self._source:
            weight = self._read(f"{name}.weight", (spec.vocab_size, spec.hidden_size), vocab)
        if is_tied and weight is not embedding and not torch.equal(weight, embedding):
            raise CheckpointError(
                f"{spec.name}: tensor {name}.weight differs from the embedding, but its config.json ties them "
                "(tie_word_embeddings)"
            )
        bias = None
        if spec.head_bias:
            bias = self._read(f"{name}.bias", (spec.vocab_size,), vocab)
        return ColumnParallelLinear(weight=embedding if is_tied else weight, bias=bias)

    def _layer(self, prefix: str, layer: specs.Layer) -> Layer:
        norm, mixer = self._spec.norm, None
        mlp: layers.MLP | Experts | None = None
        places = zip(NORM_PLACES[norm.placement], self._spec.names.norms, strict=True)
        norms = {}
        for place, name in places:
            if (layer.mixer if place in ("input_norm", "mixed_norm") else layer.mlp) is not None:
                norms[place] = self._norm(f"{prefix}.{name}")
        if layer.mixer is not None:
            mixer = self._mixer(f"{prefix}.self_attn", layer.mixer)
        mlp_prefix = f"{prefix}.{self._spec.names.mlp}"
        if isinstance(layer.mlp, specs.MLP):
            mlp = self._mlp(mlp_prefix, layer.mlp, self._tp, self._spec.names.matrices)
        elif layer.mlp is not None:
            mlp = self._mixture(mlp_prefix, layer.mlp)
        return Layer(mixer=mixer, mlp=mlp, is_parallel=norm.placement == "parallel", **norms)

    def _norm(self, name: str) -> layers.Norm:
        norm = self._spec.norm
        size = (self._spec.hidden_size,)
        return layers.Norm(
            weight=self._norm_weight(f"{name}.weight", size),
            eps=norm.eps,
            is_centered=norm.kind.startswith("layernorm"),
            bias=self._read(f"{name}.bias", size) if norm.has_bias else None,
        )

    def _norm_weight(self, name: str, shape: tuple[int, ...], rows: slice = ALL) -> Tensor:
        """The factor of a norm: the tensor, or one more than it, in 32 bits lest that be rounded
        away.
        """
        weight = self._read(name, shape, rows)
        if self._spec.norm.kind.endswith("plus_one"):
            return weight.float() + 1.0
        return weight

    def _output(
        self, name: str, inputs: int, part: slice, *, bias: bool, reduced_over: TensorParallel
    ) -> RowParallelLinear:
        """A product whose inputs are divided. Its bias is added once, by the first shard."""
        hidden = self._spec.hidden_size
        stored = None
        if bias:
            stored = self._read(f"{name}.bias", (hidden,))
        weight = self._read(f"{name}.weight", (hidden, inputs), ALL, part)
        return RowParallelLinear(
            weight=weight, bias=stored if self._tp.rank == 0 else None, tp=reduced_over
        )

    def _mixer(self, prefix: str, kind: mixer_specs.Mixer) -> Mixer:
        if isinstance(kind, mixer_specs.LatentAttention):
            return self._latent(prefix, kind)
        assert isinstance(kind, mixer_specs.Attention)
        tp, head_dim = self._tp, kind.head_dim
        num_kv_heads = max(1, kind.num_kv_heads // tp.size)
        # Where there are more shards than KV heads, neighbouring shards hold copies of the same
        # head.
        first_kv = tp.rank * kind.num_kv_heads // tp.size
        queries = tp.slice_of(kind.num_heads)
        heads = queries, slice(first_kv, first_kv + num_kv_heads)
        norm = self._head_norm(prefix, kind, heads)
        is_normed_after = kind.qk_norm in ("l2", "head_after")
        return GroupedAttention(
            kept=Kept(
                num_heads=num_kv_heads,
                head_dim=head_dim,
                span=kind.span if kind.mask != "full" else None,
            ),
            num_heads=kind.num_heads // tp.size,
            qkv=ColumnParallelLinear(
                weight=self._qkv_rows(prefix, kind, heads, "weight"),
                bias=self._qkv_rows(prefix, kind, heads, "bias") if kind.bias else None,
            ),
            output=self._output(
                f"{prefix}.o_proj",
                kind.num_heads * head_dim,
                tp.slice_of(kind.num_heads * head_dim),
                bias=kind.output_bias,
                reduced_over=tp,
            ),
            scoring=Scoring(
                scale=kind.scale or head_dim**-0.5,
                window=kind.span if kind.mask == "window" else None,
                chunk=kind.span if kind.mask == "chunk" else None,
                softcap=kind.softcap,
                sinks_A=self._read(f"{prefix}.sinks", (kind.num_heads,), queries)
                if kind.sinks
                else None,
            ),
            rotary=self._rotary(kind.rope),
            num_rotated=0 if kind.rope is None else kind.rope.dim,
            norm=None if is_normed_after else norm,
            rotated_norm=norm if is_normed_after else None,
            temperature=kind.temperature,
            temperature_offset=kind.temperature_offset,
            gated=kind.gated,
        )

    def _latent(self, prefix: str, kind: mixer_specs.LatentAttention) -> LatentAttention:
        hidden = self._spec.hidden_size
        rank = kind.kv_lora_rank
        query_rank = kind.q_lora_rank
        rows = self._tp.slice_of
        order = _rotated_order(kind.rope, kind.qk_rope_head_dim)
        if order is None:
            query_order = None
        else:
            query_order = _behind(kind.qk_nope_head_dim, order)
        if order is None:
            kept_order = None
        else:
            kept_order = _behind(rank, order)
        query_latent = query_norm = None
        name = f"{prefix}.q_proj"
        inputs = hidden
        if query_rank is not None:
            query_latent = self._whole(f"{prefix}.q_a_proj", query_rank, bias=kind.bias)
            query_norm = self._latent_norm(f"{prefix}.q_a_layernorm", query_rank)
            name = f"{prefix}.q_b_proj"
            inputs = query_rank
        queries = kind.num_heads * kind.qk_head_dim
        query = self._read(f"{name}.weight", (queries, inputs), rows(queries))
        expanded_size = kind.num_heads * (kind.qk_nope_head_dim + kind.v_head_dim)
        expanded = self._read(
            f"{prefix}.kv_b_proj.weight", (expanded_size, rank), rows(expanded_size)
        )
        by_head = expanded.unflatten(0, (kind.num_heads // self._tp.size, -1))
        keys_ADR, values_AVR = by_head.split((kind.qk_nope_head_dim, kind.v_head_dim), dim=1)
        mixed = kind.num_heads * kind.v_head_dim
        return LatentAttention(
            kept=Kept(num_heads=1, head_dim=kind.latent_size, latent_value_dim=rank),
            num_heads=kind.num_heads // self._tp.size,
            query=ColumnParallelLinear(weight=_ordered(query, query_order)),
            latent=self._whole(
                f"{prefix}.kv_a_proj_with_mqa", kind.latent_size, bias=kind.bias, order=kept_order
            ),
            latent_norm=self._latent_norm(f"{prefix}.kv_a_layernorm", rank),
            keys_ADR=keys_ADR.contiguous(),
            values_AVR=values_AVR.contiguous(),
            output=self._output(
                f"{prefix}.o_proj", mixed, rows(mixed), bias=kind.bias, reduced_over=self._tp
            ),
            scoring=Scoring(scale=kind.scale or kind.qk_head_dim**-0.5),
            rotary=self._rotary(kind.rope),
            query_latent=query_latent,
            query_norm=query_norm,
        )

    def _whole(
        self, name: str, size: int, *, bias: bool, order: Tensor | None = None
    ) -> ColumnParallelLinear:
        """A projection of the hidden states that every shard has whole."""
        weight = self._read(f"{name}.weight", (size, self._spec.hidden_size))
        stored = None
        if bias:
            stored = _ordered(self._read(f"{name}.bias", (size,)), order)
        return ColumnParallelLinear(weight=_ordered(weight, order), bias=stored)

    def _latent_norm(self, name: str, rank: int) -> layers.Norm:
        return layers.Norm(weight=self._read(f"{name}.weight", (rank,)), eps=LATENT_NORM_EPS)

    def _rotary(self, rope: mixer_specs.Rope | None) -> int | None:
        """The number of a rotary embedding; layers that rotate alike share one."""
        if rope is None:
            return None
        if rope not in self._ropes:
            self._ropes.append(rope)
        return self._ropes.index(rope)

    def _qkv_rows(
        self, prefix: str, kind: mixer_specs.Attention, heads: Heads, ending: str
    ) -> Tensor:
        """Rows of queries, keys and values, then of gates where there are any, of the matrix or of
        its bias.
        """
        counts = {"q": kind.num_heads, "k": kind.num_kv_heads, "v": kind.num_kv_heads}
        sizes = {part: kind.head_dim * (2 if kind.gated and part == "q" else 1) for part in counts}
        columns: tuple[int, ...] = ()
        if ending == "weight":
            columns = (self._mixer_inputs,)
        found: list[Tensor] = []
        gates: list[Tensor] = []
        offset = 0
        for part, count in counts.items():
            chosen = heads[part != "q"]
            size = sizes[part]
            name = f"{prefix}.{part}_proj"
            total = count * size
            first = 0
            if self._spec.names.fused_qkv:
                name = f"{prefix}.qkv_proj"
                total = sum(counts[p] * sizes[p] for p in counts)
                first = offset
                offset += count * size
            rows = slice(first + chosen.start * size, first + chosen.stop * size)
            read = self._read(f"{name}.{ending}", (total, *columns), rows)
            if size > kind.head_dim:  # a head's gates stand behind its queries
                read, gate = (
                    each.flatten(0, 1)
                    for each in read.unflatten(0, (-1, 2, kind.head_dim)).unbind(1)
                )
                gates.append(gate)
            found.append(
                _ordered(read, _rotated_order(kind.rope, kind.head_dim) if part != "v" else None)
            )
        return torch.cat((*found, *gates))

    def _head_norm(
        self, prefix: str, kind: mixer_specs.Attention, heads: Heads
    ) -> Callable[[Tensor], Tensor] | None:
        """The norm of query and key heads, its weights in the order of the heads' dimensions here."""
        if kind.qk_norm == "none" or (kind.qk_norm == "l2" and kind.rope is None):
            return None
        head_dim, eps = kind.head_dim, self._spec.norm.eps
        if kind.qk_norm == "l2":
            return partial(F.rms_norm, normalized_shape=(head_dim,), eps=eps)
        weights = []
        order = _rotated_order(kind.rope, head_dim)
        counts = (kind.num_heads, kind.num_kv_heads)
        for norm, total, chosen in zip(self._spec.names.qk_norms, counts, heads, strict=True):
            name = f"{prefix}.{norm}.weight"
            if kind.qk_norm.startswith("head"):
                weight_ND = self._norm_weight(name, (head_dim,)).expand(
                    chosen.stop - chosen.start, -1
                )
            elif kind.qk_norm == "layer":
                rows = slice(chosen.start * head_dim, chosen.stop * head_dim)
                weight_ND = self._norm_weight(name, (total * head_dim,), rows).unflatten(
                    0, (-1, head_dim)
                )
            else:
                weight_ND = self._norm_weight(name, (total, head_dim), chosen)
            weights.append(weight_ND if order is None else weight_ND[:, order])
        weight_ND = torch.cat(weights)
        if kind.qk_norm == "layer":
            num_heads = heads[0].stop - heads[0].start
            return layers.AllHeadsNorm(
                weight_ND=weight_ND, eps=eps, num_heads=num_heads, tp=self._tp
            )
        if kind.qk_norm.startswith("head"):
            return layers.HeadNorm(weight_ND=weight_ND, eps=eps)
        return lambda heads_BTND: F.layer_norm(heads_BTND, (head_dim,), None, None, eps) * weight_ND

    def _mixture(self, prefix: str, kind: specs.MixtureOfExperts) -> Experts:
        names = self._spec.names
        count = kind.num_experts
        hidden = self._spec.hidden_size
        shared = kind.shared
        router = f"{prefix}.{names.router}"
        gate = f"{prefix}.{names.shared}_gate.weight"
        correction = None
        if kind.correction_bias:
            shape: tuple[int, ...] = (count,)
            if names.correction_is_row:
                shape = (1, count)
            correction = self._read(f"{prefix}.{names.correction_bias}", shape).float().flatten()
        # As the architecture has them, unless the checkpoint has them apart: tools that quantise
        # write them so.
        experts = f"{prefix}.experts"
        matrices = EXPERT_MATRICES[names.expert]
        endings = ("weight", "weight_packed", "qweight")
        are_apart = any(f"{experts}.0.{matrices[0]}.{ending}" in self._source for ending in endings)
        are_stacked = names.experts != "each" and not are_apart
        return Experts(
            router=Router(
                kind=kind,
                weight_EH=self._read(f"{router}.weight", (count, hidden)),
                bias_E=self._read(f"{router}.bias", (count,)) if kind.router_bias else None,
                correction_E=correction,
            ),
            # A part of each on this shard: outputs are summed over the shards for all experts
            # together.
            experts=[
                self._stacked_expert(experts, i, kind)
                if are_stacked
                else self._mlp(f"{experts}.{i}", kind.expert, SINGLE, matrices)
                for i in range(count)
            ],
            tp=self._tp,
            shared=None
            if shared is None
            else self._mlp(f"{prefix}.{names.shared}", shared, SINGLE),
            shared_gate_1H=self._read(gate, (1, hidden)) if kind.shared_gate else None,
        )

    def _stacked_expert(self, prefix: str, index: int, kind: specs.MixtureOfExperts) -> layers.MLP:
        """An expert from tensors that hold all of them, inputs first."""
        hidden = self._spec.hidden_size
        width = kind.width
        count = kind.num_experts
        part = self._tp.slice_of(width)
        one = slice(index, index + 1)
        down = self._read(f"{prefix}.down_proj", (count, width, hidden), one, part)[0].T
        down_bias = None
        if kind.bias:
            down_bias = self._read(f"{prefix}.down_proj_bias", (count, hidden), one)[0]
        gate_up = self._stacked_inner(f"{prefix}.gate_up_proj", (count, hidden, 2 * width), one)
        gate_up_bias = None
        if kind.bias:
            gate_up_bias = self._stacked_inner(
                f"{prefix}.gate_up_proj_bias", (count, 2 * width), one
            )
        return layers.MLP(
            gate_up=ColumnParallelLinear(weight=gate_up, bias=gate_up_bias),
            down=RowParallelLinear(
                weight=down.contiguous(), bias=down_bias if self._tp.rank == 0 else None, tp=SINGLE
            ),
            activation=kind.activation,
            gated=kind.gated,
        )

    def _stacked_inner(self, name: str, shape: tuple[int, ...], one: slice) -> Tensor:
        """An expert's gates and then its ups, of columns of both in turn (gpt-oss) or side by side
        (Llama 4).
        """
        width = shape[-1] // 2
        part = self._tp.slice_of(width)
        rows = (one, *(ALL,) * (len(shape) - 2))
        if self._spec.names.experts == "stacked_in_turn":
            both = self._read(name, shape, *rows, slice(2 * part.start, 2 * part.stop))[0]
            sides = [both[..., ::2], both[..., 1::2]]
        else:
            starts = (part.start, width + part.start)
            sides = []
            for i in starts:
                sides.append(
                    self._read(name, shape, *rows, slice(i, i + part.stop - part.start))[0]
                )
        return torch.cat(sides, dim=-1).movedim(-1, 0).contiguous()

    def _mlp(
        self,
        prefix: str,
        kind: specs.MLP,
        reduced_over: TensorParallel,
        matrices: tuple[str, str, str] = EXPERT_MATRICES["gate_proj"],
    ) -> layers.MLP:
        width = kind.width
        part = self._tp.slice_of(kind.width)
        weights = []
        biases = []
        for index, name in enumerate(matrices[:2] if kind.gated else matrices[1:2]):
            matrix = f"{prefix}.{name}"
            total = width
            rows = part
            if self._spec.names.fused_gate_up and kind.gated:
                matrix = f"{prefix}.{self._spec.names.gate_up}"
                total = 2 * width
                rows = slice(index * width + part.start, index * width + part.stop)
            weights.append(self._read(f"{matrix}.weight", (total, self._spec.hidden_size), rows))
            if kind.bias:
                biases.append(self._read(f"{matrix}.bias", (total,), rows))
        return layers.MLP(
            gate_up=ColumnParallelLinear(
                weight=torch.cat(weights), bias=torch.cat(biases) if biases else None
            ),
            down=self._output(
                f"{prefix}.{matrices[2]}", width, part, bias=kind.bias, reduced_over=reduced_over
            ),
            activation=kind.activation,
            gated=kind.gated,
            learned=self._xielu(f"{prefix}.act_fn") if kind.activation == "xielu" else None,
        )

    def _xielu(self, prefix: str) -> layers.XIELU:
        """A learned activation: the stored numbers after softplus. Its fixed numbers may be stored
        too.
        """
        stored = [name for name in ("beta", "eps") if f"{prefix}.{name}" in self._source]
        fixed = {name: float(self._read(f"{prefix}.{name}", ())) for name in stored}
        positive, negative = (
            F.softplus(self._read(f"{prefix}.alpha_{side}", (1,)).float()) for side in "pn"
        )
        return layers.XIELU(
            positive_1=positive, negative_1=fixed.get("beta", layers.XIELU.beta) + negative, **fixed
        )


def _rotated_order(rope: mixer_specs.Rope | None, head_dim: int) -> Tensor | None:
    """How a head's dimensions are stored: from Hugging Face's order (all first halves of the
    rotated pairs, then all second halves) to pairs side by side. Done to q and k alike, it changes
    no score. None where they stand so."""
    if rope is None or rope.pairs == "adjacent":
        return None
    pairs = torch.arange(rope.dim).view(2, rope.dim // 2).T.flatten()
    return torch.cat((pairs, torch.arange(rope.dim, head_dim)))


def _behind(size: int, order: Tensor) -> Tensor:
    """The order of a head of `size` dimensions that stay, and others behind them."""
    return torch.cat((torch.arange(size), size + order))


def _ordered(rows: Tensor, order: Tensor | None) -> Tensor:
    """Rows of several heads, each head's in this order."""
    if order is None:
        return rows
    return rows.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)
