"""Builds a Transformer from a checkpoint or from random weights; each rank reads only its shard."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import torch
from torch import Tensor

from magicdec.errors import CheckpointError, ConfigError, unknown_choice
from magicdec.runtime.checkpoint import ALL, CheckpointDirectory, RandomTensors, TensorSource
from magicdec.runtime.distributed import SINGLE, TensorParallel
from magicdec.runtime.hub import resolve_hub_name
from magicdec.runtime.layers import (
    MLP,
    ColumnParallelLinear,
    HeadNorm,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from magicdec.runtime.quantized import quantize
from magicdec.runtime.transformer import Layer, Transformer
from magicdec.specs.catalog import checkpoint_directory, load_model_spec
from magicdec.specs.layers import MLP as DenseMLP
from magicdec.specs.layers import Attention, MixtureOfExperts, Rope
from magicdec.specs.model import ModelSpec, Norm
from magicdec.specs.precision import PROFILE_DTYPES

L = TypeVar("L", ColumnParallelLinear, RowParallelLinear)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float64", *PROFILE_DTYPES)}


def load_model(
    model: str | Path | ModelSpec,
    *,
    weights: Literal["checkpoint", "random"] = "checkpoint",
    seed: int = 0,
    tp: TensorParallel | None = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
) -> Transformer:
    """This rank's shard of a model: a directory, a catalog name, a hub name, or a spec (with random weights).

    Raises:
        ConfigError: an unknown name, or a model that cannot be divided into `tp.size` shards.
        CheckpointError: there are no weights, or they do not fit the configuration.
    """
    tp = tp or SINGLE
    torch_device = torch.device(device)
    if torch_device.type == "cuda" and torch_device.index is not None:
        torch.cuda.set_device(torch_device)  # Triton launches, and events are timed, on the current device
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise unknown_choice("dtype", dtype, DTYPES)
        dtype = DTYPES[dtype]
    if not isinstance(model, ModelSpec):
        model = resolve_hub_name(str(model), with_weights=weights == "checkpoint")
    spec = model if isinstance(model, ModelSpec) else load_model_spec(model)
    source: TensorSource
    if weights == "random":
        source = RandomTensors(seed=seed, device=torch_device, dtype=dtype)
    else:
        directory = None if isinstance(model, ModelSpec) else checkpoint_directory(model)
        if directory is None:
            raise CheckpointError(
                f"there are no weights for {spec.name} here: give a checkpoint directory, or random weights"
            )
        source = CheckpointDirectory(directory, device=torch_device, dtype=dtype)
    with torch.inference_mode():
        return _Builder(spec, tp, source, torch_device).build()


@torch.inference_mode()
def with_weight_dtype(model: Transformer, weight_dtype: str | None) -> Transformer:
    """The model with its linear layers and head in a narrower format (see quantized.py), everything else shared.

    The model itself where that is its format, or none is named. Raises ConfigError for an unknown format, and for a
    model that is in another one already.
    """
    own = model.weight_dtype, PROFILE_DTYPES.get(str(model.dtype).removeprefix("torch."))
    if weight_dtype is None or weight_dtype in own:
        return model
    if model.weight_dtype is not None:
        raise ConfigError(f"{model.spec.name} is in {model.weight_dtype} already; load it again for {weight_dtype}")
    narrow = partial(_narrow, weight_dtype=weight_dtype)
    layers = (
        replace(
            layer,
            qkv=narrow(layer.qkv),
            output=narrow(layer.output),
            mlp=replace(layer.mlp, gate_up=narrow(layer.mlp.gate_up), down=narrow(layer.mlp.down)),
        )
        for layer in model.layers
    )
    return replace(model, layers=tuple(layers), head=narrow(model.head), weight_dtype=weight_dtype)


def _narrow(layer: L, *, weight_dtype: str) -> L:
    assert isinstance(layer.weight, Tensor)
    return replace(layer, weight=quantize(layer.weight, weight_dtype))


class _Builder:
    """Assembles the fused, sharded layers from tensors with Hugging Face's names and shapes."""

    def __init__(self, spec: ModelSpec, tp: TensorParallel, source: TensorSource, device: torch.device) -> None:
        self._rope, self._dense = check_divisible(spec, tp.size)
        self._spec, self._tp, self._source, self._device = spec, tp, source, device
        self._attention = spec.attention
        self._num_heads = self._attention.num_heads // tp.size
        self._num_kv_heads = max(1, self._attention.num_kv_heads // tp.size)
        # Where there are more shards than KV heads, neighbouring shards hold copies of the same head.
        self._first_kv_head = tp.rank * self._attention.num_kv_heads // tp.size
        half = self._attention.head_dim // 2
        self._interleaved = torch.arange(self._attention.head_dim).view(2, half).T.flatten()

    def build(self) -> Transformer:
        spec, tp = self._spec, self._tp
        vocab = tp.slice_of(spec.vocab_size)
        table_shape = (spec.vocab_size, spec.hidden_size)
        embedding = self._source.read("model.embed_tokens.weight", table_shape, vocab)
        head = self._head(embedding, table_shape, vocab)
        model = Transformer(
            spec=spec,
            tp=tp,
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            embedding=VocabParallelEmbedding(weight_VH=embedding, tp=tp),
            layers=tuple(self._layer(f"model.layers.{i}") for i in range(spec.num_hidden_layers)),
            norm=self._norm("model.norm"),
            head=ColumnParallelLinear(weight=head),
            rotary=RotaryEmbedding(self._rope, self._device, embedding.dtype),
        )
        self._source.check_all_read()
        return model

    def _head(self, embedding: Tensor, shape: tuple[int, int], vocab: slice) -> Tensor:
        """The head's own table, or the embedding where they are tied; one that is stored beside must be the same."""
        is_stored = isinstance(self._source, CheckpointDirectory) and "lm_head.weight" in self._source
        if self._spec.tie_word_embeddings and not is_stored:
            return embedding
        head = self._source.read("lm_head.weight", shape, vocab)
        if not self._spec.tie_word_embeddings:
            return head
        if not torch.equal(head, embedding):
            raise CheckpointError(
                f"{self._spec.name}: tensor lm_head.weight differs from the embedding, but its config.json ties them "
                "(tie_word_embeddings)"
            )
        return embedding

    def _layer(self, prefix: str) -> Layer:
        spec, kind, attention = self._spec, self._attention, f"{prefix}.self_attn"
        heads = slice(self._tp.rank * self._num_heads, (self._tp.rank + 1) * self._num_heads)
        columns = slice(heads.start * kind.head_dim, heads.stop * kind.head_dim)
        o_shape = (spec.hidden_size, kind.num_heads * kind.head_dim)
        return Layer(
            input_norm=self._norm(f"{prefix}.input_layernorm"),
            qkv=self._qkv(attention, heads),
            head_norm=self._head_norm(attention) if kind.qk_norm == "head" else None,
            output=RowParallelLinear(
                weight=self._source.read(f"{attention}.o_proj.weight", o_shape, ALL, columns),
                bias=self._bias(f"{attention}.o_proj.bias", spec.hidden_size, kind.output_bias),
                tp=self._tp,
            ),
            post_attention_norm=self._norm(f"{prefix}.post_attention_layernorm"),
            mlp=self._mlp(f"{prefix}.mlp"),
        )

    def _qkv(self, prefix: str, heads: slice) -> ColumnParallelLinear:
        kind = self._attention
        kv_heads = slice(self._first_kv_head, self._first_kv_head + self._num_kv_heads)
        parts = (
            ("q_proj", kind.num_heads, heads, True),
            ("k_proj", kind.num_kv_heads, kv_heads, True),
            ("v_proj", kind.num_kv_heads, kv_heads, False),
        )
        weights, biases = [], []
        for name, total, chosen, is_rotated in parts:
            rows = slice(chosen.start * kind.head_dim, chosen.stop * kind.head_dim)
            size = total * kind.head_dim
            weight = self._source.read(f"{prefix}.{name}.weight", (size, self._spec.hidden_size), rows)
            weights.append(self._interleave(weight) if is_rotated else weight)
            if kind.bias:
                bias = self._source.read(f"{prefix}.{name}.bias", (size,), rows)
                biases.append(self._interleave(bias) if is_rotated else bias)
        return ColumnParallelLinear(weight=torch.cat(weights), bias=torch.cat(biases) if biases else None)

    def _interleave(self, rows: Tensor) -> Tensor:
        """From Hugging Face's order within a head (all first halves of the rotated pairs, then all second halves) to
        pairs side by side. Done to q and k alike, it changes no score."""
        return rows.unflatten(0, (-1, self._attention.head_dim))[:, self._interleaved].flatten(0, 1)

    def _head_norm(self, prefix: str) -> HeadNorm:
        shape = (self._attention.head_dim,)
        counts = (("q_norm", self._num_heads), ("k_norm", self._num_kv_heads))
        weights = [
            self._interleave(self._source.read(f"{prefix}.{name}.weight", shape)).expand(count, -1)
            for name, count in counts
        ]
        return HeadNorm(weight_ND=torch.cat(weights), eps=self._spec.norm.eps)

    def _mlp(self, prefix: str) -> MLP:
        spec, width, has_bias = self._spec, self._dense.width, self._dense.bias
        part = self._tp.slice_of(width)
        wide, narrow = (width, spec.hidden_size), (spec.hidden_size, width)
        names = ("gate_proj", "up_proj")
        bias = None
        if has_bias:
            biases = [self._source.read(f"{prefix}.{name}.bias", (width,), part) for name in names]
            bias = torch.cat(biases)
        gate_up = torch.cat([self._source.read(f"{prefix}.{name}.weight", wide, part) for name in names])
        return MLP(
            gate_up=ColumnParallelLinear(weight=gate_up, bias=bias),
            down=RowParallelLinear(
                weight=self._source.read(f"{prefix}.down_proj.weight", narrow, ALL, part),
                bias=self._bias(f"{prefix}.down_proj.bias", spec.hidden_size, has_bias),
                tp=self._tp,
            ),
        )

    def _bias(self, name: str, size: int, wanted: bool) -> Tensor | None:
        """The bias of a row-parallel layer: added once, by the first shard."""
        return self._source.read(name, (size,)) if wanted and self._tp.rank == 0 else None

    def _norm(self, name: str) -> RMSNorm:
        weight = self._source.read(f"{name}.weight", (self._spec.hidden_size,))
        return RMSNorm(weight=weight, eps=self._spec.norm.eps)


def check_divisible(spec: ModelSpec, tp_size: int) -> tuple[Rope, DenseMLP]:
    """The rotary embedding and the MLP of every layer.

    Raises ConfigError when the model has layers that are not run, or cannot be divided into this many shards.
    """
    kind, mlp = _only_kind(spec)
    sizes = {
        "num_attention_heads": kind.num_heads,
        "intermediate_size": mlp.width,
        "vocab_size": spec.vocab_size,
    }
    valid = [n for n in range(1, 65) if not any(size % n for size in sizes.values()) and _kv_heads_fit(kind, n)]
    if tp_size not in valid:
        raise ConfigError(
            f"{spec.name} cannot be divided into {tp_size} shards ({', '.join(f'{k} {v}' for k, v in sizes.items())}, "
            f"num_key_value_heads {kind.num_kv_heads}): valid are {', '.join(map(str, valid))}"
        )
    assert kind.rope is not None
    return kind.rope, mlp


def _only_kind(spec: ModelSpec) -> tuple[Attention, DenseMLP]:
    """The layer that every layer is. Raises ConfigError naming what is planned for but not run."""
    refused = ConfigError(f"{spec.name} is {{}}, which is planned for but not run; choose a dense model")
    layer = spec.layers[0]
    kind, mlp = layer.mixer, layer.mlp
    if any(isinstance(each, MixtureOfExperts) for each, _ in spec.feed_forwards):
        raise ConfigError(str(refused).format("a mixture of experts"))
    if any(each != layer for each in spec.layers) or not isinstance(kind, Attention) or not isinstance(mlp, DenseMLP):
        raise ConfigError(str(refused).format(f"a {spec.architecture} of several kinds of layers"))
    plain = Attention(
        num_heads=kind.num_heads, num_kv_heads=kind.num_kv_heads, head_dim=kind.head_dim, mask=kind.mask,
        span=kind.span, rope=kind.rope, bias=kind.bias, output_bias=kind.output_bias, qk_norm=kind.qk_norm,
    )  # fmt: skip
    rope, norm = kind.rope, msgspec.structs.replace(spec.norm, eps=Norm().eps)
    is_plain = kind == plain and kind.mask != "chunk" and kind.qk_norm in ("none", "head") and norm == Norm()
    scaling = None if rope is None else rope.scaling
    is_plain &= rope is not None and rope.dim == kind.head_dim and rope.pairs == "halves"
    is_plain &= scaling is None or scaling.rope_type in ("linear", "llama3")
    is_plain &= mlp.activation == "silu" and mlp.gated
    scales = (spec.embedding_scale, spec.residual_scale, spec.logit_scale, spec.logit_softcap, spec.head_bias)
    is_plain &= scales == (1.0, 1.0, 1.0, None, False) and not (spec.names.fused_qkv or spec.names.fused_gate_up)
    if not is_plain:
        raise ConfigError(str(refused).format(f"a {spec.architecture} with parts of its own"))
    if spec.quantization is not None:
        raise ConfigError(
            f"{spec.name} is quantised ({spec.quantization.method}), which is planned for but not run; choose a "
            "checkpoint in bf16, fp16 or fp32"
        )
    return kind, mlp


def _kv_heads_fit(kind: Attention, tp_size: int) -> bool:
    return kind.num_kv_heads % tp_size == 0 or tp_size % kind.num_kv_heads == 0
