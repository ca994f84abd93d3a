"""Assembles this shard's layers from tensors with Hugging Face's names and shapes.

They are divided among the shards, fused where one product does for several matrices, and have the
dimensions that are rotated together side by side.

Shape suffixes: N query and key heads of this shard, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.errors import CheckpointError, ConfigError
from magicdec.runtime import layers
from magicdec.runtime.attention import Scoring
from magicdec.runtime.checkpoint import ALL, TensorSource
from magicdec.runtime.distributed import SINGLE, TensorParallel
from magicdec.runtime.kv_cache import TokenStorage
from magicdec.runtime.layers import (
    ColumnParallelLinear,
    GroupedLinear,
    Router,
    RowParallelLinear,
    ShardedExperts,
)
from magicdec.runtime.mixers import (
    AbsorbedAttention,
    GroupedAttention,
    Mixer,
    RotaryEmbedding,
)
from magicdec.runtime.transformer import Transformer, TransformerLayer
from magicdec.specs.layers import MLP as MLPSpec
from magicdec.specs.layers import Layer as LayerSpec
from magicdec.specs.layers import MixtureOfExperts as MixtureSpec
from magicdec.specs.mixers import Attention as AttentionSpec
from magicdec.specs.mixers import LatentAttention as LatentAttentionSpec
from magicdec.specs.mixers import Mixer as MixerSpec
from magicdec.specs.mixers import Rope as RopeSpec
from magicdec.specs.model import ModelSpec

ROOTS = ("model", "language_model.model", "model.language_model")
"""How the names of a decoder's tensors begin: alone, and in models of several modalities."""
HEADS = ("lm_head", "language_model.lm_head")
BESIDE_THE_DECODER = (
    "visual.",
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "model.visual.",
    "model.vision_tower.",
    "model.vision_model.",
    "model.multi_modal_projector.",
    "mm_projector.",
    "mtp.",
)
"""Modules that text does not pass: what turns images into embeddings, and Qwen's prediction
modules, which draft.
"""
EXPERT_MATRICES = {
    "gate_proj": ("gate_proj", "up_proj", "down_proj"),
    "w1": ("w1", "w3", "w2"),
}
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
NORMS_OF_MIXER = ("input_norm", "mixed_norm")
Heads = tuple[slice, slice]
"""Query and KV heads of a layer on this shard."""


class Builder:
    """One model on one shard."""

    def __init__(
        self,
        spec: ModelSpec,
        tp: TensorParallel,
        source: TensorSource,
        device: torch.device,
    ) -> None:
        self._spec = spec
        self._tp = tp
        self._source = source
        self._device = device
        self._read = source.read
        self._root = first_stored(ROOTS, "embed_tokens.weight", source)
        self._ropes: list[RopeSpec] = []
        self._mixer_inputs = spec.hidden_size

    def build(self) -> Transformer:
        """Raises ConfigError for a model that is known by its fields alone."""
        spec = self._spec
        if spec.assumed is not None:
            raise ConfigError(f"{spec.name} is planned for, not run: {spec.assumed}")
        tp = self._tp
        root = self._root
        vocab = tp.slice_of(spec.vocab_size)
        embedding = self._read(
            f"{root}.embed_tokens.weight",
            (spec.vocab_size, spec.hidden_size),
            vocab,
        )
        head = self._head(embedding, vocab)
        built: list[TransformerLayer] = []
        kept: dict[int, TokenStorage] = {}
        for i, layer_spec in enumerate(spec.layers):
            layer = self._layer(f"{root}.layers.{i}", layer_spec)
            built.append(layer)
            if layer.mixer is not None:
                kept[i] = layer.mixer.kept
        rotaries = []
        for rope in self._ropes:
            rotaries.append(RotaryEmbedding(rope, self._device, embedding.dtype))
        model = Transformer(
            spec=spec,
            tp=tp,
            kept=kept,
            embedding=layers.VocabParallelEmbedding(weight_VH=embedding, tp=tp),
            layers=tuple(built),
            norm=self._norm(f"{root}.norm"),
            head=head,
            rotaries=tuple(rotaries),
        )
        beside = list(BESIDE_THE_DECODER)
        for i in range(len(spec.mtp_layers)):
            beside.append(f"{root}.layers.{len(built) + i}.")
        self._source.check_all_read(tuple(beside))
        return model

    def _head(self, embedding: Tensor, vocab: slice) -> ColumnParallelLinear:
        """The head's own table, or the embedding if they are tied; a tied head that is stored too
        must equal it.
        """
        spec = self._spec
        name = first_stored(HEADS, "weight", self._source)
        weight = embedding
        if not spec.tie_word_embeddings or f"{name}.weight" in self._source:
            weight = self._read(
                f"{name}.weight", (spec.vocab_size, spec.hidden_size), vocab
            )
        if spec.tie_word_embeddings and weight is not embedding:
            if not torch.equal(weight, embedding):
                raise CheckpointError(
                    f"{spec.name}: tensor {name}.weight differs from the embedding, but its "
                    "config.json ties them (tie_word_embeddings)"
                )
            weight = embedding
        bias = None
        if spec.head_bias:
            bias = self._read(f"{name}.bias", (spec.vocab_size,), vocab)
        return ColumnParallelLinear(weight=weight, bias=bias)

    def _layer(self, prefix: str, layer: LayerSpec) -> TransformerLayer:
        norm = self._spec.norm
        places = zip(NORM_PLACES[norm.placement], self._spec.names.norms, strict=True)
        norms = {}
        for place, name in places:
            sublayer: object = layer.mlp
            if place in NORMS_OF_MIXER:
                sublayer = layer.mixer
            if sublayer is not None:
                norms[place] = self._norm(f"{prefix}.{name}")
        mixer = None
        if layer.mixer is not None:
            mixer = self._mixer(f"{prefix}.self_attn", layer.mixer)
        mlp: layers.ShardedMLP | ShardedExperts | None = None
        mlp_prefix = f"{prefix}.{self._spec.names.mlp}"
        if isinstance(layer.mlp, MLPSpec):
            mlp = self._mlp(mlp_prefix, layer.mlp, self._tp, self._spec.names.matrices)
        elif layer.mlp is not None:
            mlp = self._mixture(mlp_prefix, layer.mlp)
        return TransformerLayer(
            mixer=mixer, mlp=mlp, is_parallel=norm.placement == "parallel", **norms
        )

    def _norm(self, name: str) -> layers.HiddenNorm:
        norm = self._spec.norm
        size = (self._spec.hidden_size,)
        bias = None
        if norm.has_bias:
            bias = self._read(f"{name}.bias", size)
        return layers.HiddenNorm(
            weight=self._norm_weight(f"{name}.weight", size),
            eps=norm.eps,
            is_centered=norm.kind.startswith("layernorm"),
            bias=bias,
        )

    def _norm_weight(
        self, name: str, shape: tuple[int, ...], rows: slice = ALL
    ) -> Tensor:
        """The factor of a norm: the stored tensor, or the tensor plus one, in 32 bits so that the
        sum is not rounded."""
        weight = self._read(name, shape, rows)
        if self._spec.norm.kind.endswith("plus_one"):
            return weight.float() + 1.0
        return weight

    def _output(
        self,
        name: str,
        inputs: int,
        part: slice,
        *,
        bias: bool,
        reduced_over: TensorParallel,
    ) -> RowParallelLinear:
        """A product whose inputs are divided. Its bias is added once, by the first shard."""
        hidden = self._spec.hidden_size
        stored = None
        if bias:
            stored = self._read(f"{name}.bias", (hidden,))
            if self._tp.rank > 0:
                stored = None
        weight = self._read(f"{name}.weight", (hidden, inputs), ALL, part)
        return RowParallelLinear(weight=weight, bias=stored, tp=reduced_over)

    def _mixer(self, prefix: str, kind: MixerSpec) -> Mixer:
        if isinstance(kind, LatentAttentionSpec):
            return self._latent(prefix, kind)
        assert isinstance(kind, AttentionSpec)
        tp = self._tp
        head_dim = kind.head_dim
        num_kv_heads = max(1, kind.num_kv_heads // tp.size)
        # Where there are more shards than KV heads, neighbouring shards hold copies of the same
        # head.
        first_kv = tp.rank * kind.num_kv_heads // tp.size
        queries = tp.slice_of(kind.num_heads)
        heads = queries, slice(first_kv, first_kv + num_kv_heads)
        span = None
        if kind.mask != "full":
            span = kind.span
        qkv_bias = None
        if kind.bias:
            qkv_bias = self._qkv_rows(prefix, kind, heads, "bias")
        num_rotated = 0
        if kind.rope is not None:
            num_rotated = kind.rope.dim
        norm = self._head_norm(prefix, kind, heads)
        rotated_norm = None
        if kind.qk_norm in ("l2", "head_after"):
            rotated_norm = norm
            norm = None
        mixed = kind.num_heads * head_dim
        return GroupedAttention(
            kept=TokenStorage(num_heads=num_kv_heads, head_dim=head_dim, span=span),
            num_heads=kind.num_heads // tp.size,
            qkv=ColumnParallelLinear(
                weight=self._qkv_rows(prefix, kind, heads, "weight"),
                bias=qkv_bias,
            ),
            output=self._output(
                f"{prefix}.o_proj",
                mixed,
                tp.slice_of(mixed),
                bias=kind.output_bias,
                reduced_over=tp,
            ),
            scoring=self._scoring(prefix, kind, queries),
            rotary=self._rotary(kind.rope),
            num_rotated=num_rotated,
            norm=norm,
            rotated_norm=rotated_norm,
            temperature=kind.temperature,
            temperature_offset=kind.temperature_offset,
            gated=kind.gated,
        )

    def _scoring(self, prefix: str, kind: AttentionSpec, queries: slice) -> Scoring:
        window = None
        if kind.mask == "window":
            window = kind.span
        chunk = None
        if kind.mask == "chunk":
            chunk = kind.span
        sinks_A = None
        if kind.sinks:
            sinks_A = self._read(f"{prefix}.sinks", (kind.num_heads,), queries)
        return Scoring(
            scale=kind.scale or kind.head_dim**-0.5,
            window=window,
            chunk=chunk,
            softcap=kind.softcap,
            sinks_A=sinks_A,
        )

    def _latent(self, prefix: str, kind: LatentAttentionSpec) -> AbsorbedAttention:
        hidden = self._spec.hidden_size
        rank = kind.kv_lora_rank
        query_rank = kind.q_lora_rank
        rows = self._tp.slice_of
        order = _rotated_order(kind.rope, kind.qk_rope_head_dim)
        query_order = None
        kept_order = None
        if order is not None:
            query_order = _behind(kind.qk_nope_head_dim, order)
            kept_order = _behind(rank, order)
        query_latent = None
        query_norm = None
        name = f"{prefix}.q_proj"
        inputs = hidden
        if query_rank is not None:
            name = f"{prefix}.q_a_proj"
            query_latent = self._whole(name, query_rank, hidden, bias=kind.bias)
            query_norm = self._latent_norm(f"{prefix}.q_a_layernorm", query_rank)
            name = f"{prefix}.q_b_proj"
            inputs = query_rank
        queries = kind.num_heads * kind.qk_head_dim
        query = self._read(f"{name}.weight", (queries, inputs), rows(queries))
        expanded_size = kind.num_heads * (kind.qk_nope_head_dim + kind.v_head_dim)
        expanded = self._read(
            f"{prefix}.kv_b_proj.weight",
            (expanded_size, rank),
            rows(expanded_size),
        )
        by_head = expanded.unflatten(0, (kind.num_heads // self._tp.size, -1))
        keys_ADR, values_AVR = by_head.split(
            (kind.qk_nope_head_dim, kind.v_head_dim), dim=1
        )
        mixed = kind.num_heads * kind.v_head_dim
        return AbsorbedAttention(
            kept=TokenStorage(
                num_heads=1, head_dim=kind.latent_size, latent_value_dim=rank
            ),
            num_heads=kind.num_heads // self._tp.size,
            query=ColumnParallelLinear(weight=_ordered(query, query_order)),
            latent=self._whole(
                f"{prefix}.kv_a_proj_with_mqa",
                kind.latent_size,
                hidden,
                bias=kind.bias,
                order=kept_order,
            ),
            latent_norm=self._latent_norm(f"{prefix}.kv_a_layernorm", rank),
            keys_ADR=keys_ADR.contiguous(),
            values_AVR=values_AVR.contiguous(),
            output=self._output(
                f"{prefix}.o_proj",
                mixed,
                rows(mixed),
                bias=kind.bias,
                reduced_over=self._tp,
            ),
            scoring=Scoring(scale=kind.scale or kind.qk_head_dim**-0.5),
            rotary=self._rotary(kind.rope),
            query_latent=query_latent,
            query_norm=query_norm,
        )

    def _whole(
        self,
        name: str,
        outputs: int,
        inputs: int,
        *,
        bias: bool = False,
        order: Tensor | None = None,
    ) -> ColumnParallelLinear:
        """A projection that every shard has whole."""
        weight = self._read(f"{name}.weight", (outputs, inputs))
        stored = None
        if bias:
            stored = _ordered(self._read(f"{name}.bias", (outputs,)), order)
        return ColumnParallelLinear(weight=_ordered(weight, order), bias=stored)

    def _latent_norm(self, name: str, rank: int) -> layers.HiddenNorm:
        return layers.HiddenNorm(
            weight=self._read(f"{name}.weight", (rank,)), eps=LATENT_NORM_EPS
        )

    def _rotary(self, rope: RopeSpec | None) -> int | None:
        """Index of a rotary embedding. Layers with equal settings share one."""
        if rope is None:
            return None
        if rope not in self._ropes:
            self._ropes.append(rope)
        return self._ropes.index(rope)

    def _qkv_rows(
        self,
        prefix: str,
        kind: AttentionSpec,
        heads: Heads,
        ending: str,
    ) -> Tensor:
        """Rows of queries, keys and values, then of gates if the model has them; of the matrix or
        of its bias."""
        query_heads, kv_heads = heads
        head_dim = kind.head_dim
        query_size = head_dim
        if kind.gated:
            query_size = 2 * head_dim
        parts = (
            _HeadRows("q", kind.num_heads, query_size, query_heads),
            _HeadRows("k", kind.num_kv_heads, head_dim, kv_heads),
            _HeadRows("v", kind.num_kv_heads, head_dim, kv_heads),
        )
        columns: tuple[int, ...] = ()
        if ending == "weight":
            columns = (self._mixer_inputs,)
        order = _rotated_order(kind.rope, head_dim)
        all_rows: list[Tensor] = []
        gates: list[Tensor] = []
        offset = 0
        for part in parts:
            name = f"{prefix}.{part.name}_proj"
            total = part.total
            first = 0
            if self._spec.names.fused_qkv:
                name = f"{prefix}.qkv_proj"
                total = sum(part.total for part in parts)
                first = offset
                offset += part.total
            start = first + part.heads.start * part.size
            stop = first + part.heads.stop * part.size
            rows = self._read(f"{name}.{ending}", (total, *columns), slice(start, stop))
            if part.size > head_dim:  # a head's gates stand behind its queries
                queries, gate = rows.unflatten(0, (-1, 2, head_dim)).unbind(1)
                rows = queries.flatten(0, 1)
                gates.append(gate.flatten(0, 1))
            if part.name != "v":
                rows = _ordered(rows, order)
            all_rows.append(rows)
        return torch.cat((*all_rows, *gates))

    def _head_norm(
        self,
        prefix: str,
        kind: AttentionSpec,
        heads: Heads,
    ) -> Callable[[Tensor], Tensor] | None:
        """The norm of query and key heads, its weights in the order of the heads' dimensions
        here."""
        if kind.qk_norm == "none" or (kind.qk_norm == "l2" and kind.rope is None):
            return None
        head_dim = kind.head_dim
        eps = self._spec.norm.eps
        if kind.qk_norm == "l2":
            return partial(F.rms_norm, normalized_shape=(head_dim,), eps=eps)
        weights = []
        order = _rotated_order(kind.rope, head_dim)
        counts = (kind.num_heads, kind.num_kv_heads)
        for norm, total, chosen in zip(
            self._spec.names.qk_norms, counts, heads, strict=True
        ):
            name = f"{prefix}.{norm}.weight"
            if kind.qk_norm.startswith("head"):
                num_heads = chosen.stop - chosen.start
                weight_ND = self._norm_weight(name, (head_dim,)).expand(num_heads, -1)
            elif kind.qk_norm == "layer":
                rows = slice(chosen.start * head_dim, chosen.stop * head_dim)
                flat = self._norm_weight(name, (total * head_dim,), rows)
                weight_ND = flat.unflatten(0, (-1, head_dim))
            else:
                weight_ND = self._norm_weight(name, (total, head_dim), chosen)
            if order is not None:
                weight_ND = weight_ND[:, order]
            weights.append(weight_ND)
        weight_ND = torch.cat(weights)
        if kind.qk_norm == "layer":
            num_heads = heads[0].stop - heads[0].start
            return layers.AllHeadsNorm(
                weight_ND=weight_ND,
                eps=eps,
                num_heads=num_heads,
                tp=self._tp,
            )
        if kind.qk_norm.startswith("head"):
            return layers.HeadNorm(weight_ND=weight_ND, eps=eps)
        return lambda heads_BTND: (
            F.layer_norm(heads_BTND, (head_dim,), None, None, eps) * weight_ND
        )

    def _mixture(self, prefix: str, kind: MixtureSpec) -> ShardedExperts:
        names = self._spec.names
        count = kind.num_experts
        hidden = self._spec.hidden_size
        # A part of each expert on this shard: outputs are summed over the shards for all experts
        # together.
        experts = f"{prefix}.experts"
        matrices = EXPERT_MATRICES[names.expert]
        are_stacked = names.experts != "each" and not self._has_apart(experts, matrices)
        products: list[GroupedLinear] = []
        for i in range(count):
            if are_stacked:
                linears = self._stacked_expert(experts, i, kind)
            else:
                mlp = self._mlp(f"{experts}.{i}", kind.expert, SINGLE, matrices)
                linears = (mlp.gate_up, mlp.down)
            if not products:
                products = [_room_for(count, linear) for linear in linears]
            for grouped, linear in zip(products, linears, strict=True):
                grouped.weight_EFK[i] = linear.weight
                if grouped.bias_EF is not None and linear.bias is not None:
                    grouped.bias_EF[i] = linear.bias
        gate_up, down = products
        shared = None
        if kind.shared is not None:
            shared = self._mlp(f"{prefix}.{names.shared}", kind.shared, SINGLE)
        shared_gate = None
        if kind.shared_gate:
            shared_gate = self._read(
                f"{prefix}.{names.shared}_gate.weight", (1, hidden)
            )
        return ShardedExperts(
            router=self._router(prefix, kind),
            gate_up=gate_up,
            down=down,
            bounds=torch.arange(count + 1, device=self._device),
            tp=self._tp,
            shared=shared,
            shared_gate_1H=shared_gate,
        )

    def _has_apart(self, experts: str, matrices: tuple[str, str, str]) -> bool:
        """Whether a checkpoint stores each expert apart, whatever its architecture does: tools that
        quantise write them so."""
        first = f"{experts}.0.{matrices[0]}"
        endings = ("weight", "weight_packed", "qweight")
        return any(f"{first}.{ending}" in self._source for ending in endings)

    def _router(self, prefix: str, kind: MixtureSpec) -> Router:
        names = self._spec.names
        count = kind.num_experts
        name = f"{prefix}.{names.router}"
        bias = None
        if kind.router_bias:
            bias = self._read(f"{name}.bias", (count,)).float()
        correction = None
        if kind.correction_bias:
            shape: tuple[int, ...] = (count,)
            if names.correction_is_row:
                shape = (1, count)
            stored = self._read(f"{prefix}.{names.correction_bias}", shape)
            correction = stored.float().flatten()
        weight = self._read(f"{name}.weight", (count, self._spec.hidden_size))
        return Router(
            kind=kind,
            weight_EH=weight.float(),
            bias_E=bias,
            correction_E=correction,
        )

    def _stacked_expert(
        self, prefix: str, index: int, kind: MixtureSpec
    ) -> tuple[ColumnParallelLinear, ColumnParallelLinear]:
        """An expert's products, gate with up and down, from tensors that hold all experts, inputs
        first."""
        hidden = self._spec.hidden_size
        width = kind.width
        count = kind.num_experts
        part = self._tp.slice_of(width)
        one = slice(index, index + 1)
        down = self._read(f"{prefix}.down_proj", (count, width, hidden), one, part)[0].T
        gate_up = self._stacked_inner(
            f"{prefix}.gate_up_proj", (count, hidden, 2 * width), one
        )
        down_bias = None
        gate_up_bias = None
        if kind.bias:
            down_bias = self._read(f"{prefix}.down_proj_bias", (count, hidden), one)[0]
            gate_up_bias = self._stacked_inner(
                f"{prefix}.gate_up_proj_bias",
                (count, 2 * width),
                one,
            )
        if self._tp.rank > 0:  # the first shard adds it
            down_bias = None
        return (
            ColumnParallelLinear(weight=gate_up, bias=gate_up_bias),
            ColumnParallelLinear(weight=down, bias=down_bias),
        )

    def _stacked_inner(self, name: str, shape: tuple[int, ...], one: slice) -> Tensor:
        """An expert's gates and then its ups, of columns of both in turn (gpt-oss) or side by side
        (Llama 4).
        """
        width = shape[-1] // 2
        part = self._tp.slice_of(width)
        rows = (one, *(ALL,) * (len(shape) - 2))
        if self._spec.names.experts == "stacked_in_turn":
            columns = slice(2 * part.start, 2 * part.stop)
            both = self._read(name, shape, *rows, columns)[0]
            sides = [both[..., ::2], both[..., 1::2]]
        else:
            sides = []
            for first in (0, width):
                columns = slice(first + part.start, first + part.stop)
                sides.append(self._read(name, shape, *rows, columns)[0])
        return torch.cat(sides, dim=-1).movedim(-1, 0).contiguous()

    def _mlp(
        self,
        prefix: str,
        kind: MLPSpec,
        reduced_over: TensorParallel,
        matrices: tuple[str, str, str] = EXPERT_MATRICES["gate_proj"],
    ) -> layers.ShardedMLP:
        width = kind.width
        part = self._tp.slice_of(kind.width)
        gate, up, down = matrices
        inner = [up]
        if kind.gated:
            inner = [gate, up]
        weights = []
        biases = []
        for index, name in enumerate(inner):
            matrix = f"{prefix}.{name}"
            total = width
            rows = part
            if self._spec.names.fused_gate_up and kind.gated:
                matrix = f"{prefix}.{self._spec.names.gate_up}"
                total = 2 * width
                rows = slice(index * width + part.start, index * width + part.stop)
            weights.append(
                self._read(f"{matrix}.weight", (total, self._spec.hidden_size), rows)
            )
            if kind.bias:
                biases.append(self._read(f"{matrix}.bias", (total,), rows))
        bias = None
        if biases:
            bias = torch.cat(biases)
        learned = None
        if kind.activation == "xielu":
            learned = self._xielu(f"{prefix}.act_fn")
        return layers.ShardedMLP(
            gate_up=ColumnParallelLinear(weight=torch.cat(weights), bias=bias),
            down=self._output(
                f"{prefix}.{down}",
                width,
                part,
                bias=kind.bias,
                reduced_over=reduced_over,
            ),
            activation=kind.activation,
            gated=kind.gated,
            learned=learned,
        )

    def _xielu(self, prefix: str) -> layers.XIELU:
        """A learned activation: the stored numbers after softplus. Its fixed numbers may be stored
        too.
        """
        fixed = {}
        for name in ("beta", "eps"):
            if f"{prefix}.{name}" in self._source:
                fixed[name] = float(self._read(f"{prefix}.{name}", ()))
        beta = fixed.get("beta", layers.XIELU.beta)
        positive = self._read(f"{prefix}.alpha_p", (1,)).float()
        negative = self._read(f"{prefix}.alpha_n", (1,)).float()
        return layers.XIELU(
            positive_1=F.softplus(positive),
            negative_1=beta + F.softplus(negative),
            **fixed,
        )


class _HeadRows(NamedTuple):
    """Rows of a projection's queries, keys or values."""

    name: Literal["q", "k", "v"]
    num_heads: int
    size: int
    """Rows of each head."""
    heads: slice
    """The heads of this shard."""

    @property
    def total(self) -> int:
        """Rows of all heads."""
        return self.num_heads * self.size


def _room_for(count: int, linear: ColumnParallelLinear) -> GroupedLinear:
    """Products of so many experts, all like this one's, to be filled in."""
    bias = None
    if linear.bias is not None:
        bias = linear.bias.new_empty(count, *linear.bias.shape)
    weight = linear.weight.new_empty(count, *linear.weight.shape)
    return GroupedLinear(weight_EFK=weight, bias_EF=bias)


def first_stored(prefixes: Sequence[str], ending: str, source: TensorSource) -> str:
    """The first prefix under which a tensor of this ending is stored, else the first."""
    for prefix in prefixes:
        if f"{prefix}.{ending}" in source:
            return prefix
    return prefixes[0]


def _rotated_order(rope: RopeSpec | None, head_dim: int) -> Tensor | None:
    """The order that moves a head's dimensions from Hugging Face's (all first halves of the rotated
    pairs, then all second halves) to pairs side by side. Applied to q and k alike, it changes no
    score. None: they stand side by side already."""
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
    by_head = rows.unflatten(0, (-1, len(order)))
    return by_head[:, order].flatten(0, 1)
