"""Assembles a head from its checkpoint's tensors, or from its target's where it is part of it.

Embeddings that a head does not store are its target's, and so is an output layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from magicdec.errors import CheckpointError, ConfigError
from magicdec.naming import METHODS
from magicdec.runtime.builder import ROOTS, Builder, first_stored
from magicdec.runtime.checkpoint import CheckpointDirectory, RandomTensors, TensorSource
from magicdec.runtime.heads.chain import (
    Eagle3Head,
    EagleHead,
    Fusion,
    Head,
    PredictionHead,
)
from magicdec.runtime.heads.layout import HeadLayout, native_layout, read_layout
from magicdec.runtime.heads.parallel import BlockHead, Markov
from magicdec.runtime.heads.vocabulary import ReducedVocabulary, reduced_vocabulary
from magicdec.runtime.layers import (
    ColumnParallelLinear,
    HiddenNorm,
    VocabParallelEmbedding,
)
from magicdec.runtime.mixers import GroupedAttention, RotaryEmbedding
from magicdec.runtime.transformer import Transformer, TransformerLayer
from magicdec.specs.layers import MLP as MLPSpec
from magicdec.specs.layers import Layer as LayerSpec
from magicdec.specs.parallel import check_tp
from magicdec.specs.speculation import DraftMethod

OF_THE_VERIFIER = ("verifier_lm_head.", "verifier_norm.", "confidence_head.")
"""Tensors that a head's checkpoint may hold and drafting does not read: the target's own, of
training, and an estimate of acceptance."""


def load_head(
    directory: Path | None,
    target: Transformer,
    *,
    method: DraftMethod | None = None,
    weights: Literal["checkpoint", "random"] = "checkpoint",
    target_directory: Path | None = None,
) -> Head:
    """This rank's shard of a head for a target. `directory`: the head's; None: the head is a part
    of the target's checkpoint, in `target_directory`.

    Raises:
        ConfigError: a configuration that is not understood, or a head of another target.
        CheckpointError: weights that are missing, damaged, or do not fit the configuration.
    """
    spec = target.spec
    if directory is None:
        layout = native_layout(spec)
    else:
        layout = read_layout(directory, spec, method=method)
    check_tp(layout.spec, target.tp.size)
    if layout.draft_vocab_size % target.tp.size:
        raise ConfigError(
            f"head {layout.name} has {layout.draft_vocab_size} tokens, which {target.tp.size} "
            "ranks "
            "cannot divide; use another --tp"
        )
    source: TensorSource
    if weights == "random":
        is_offset = layout.spec.norm.kind.endswith("plus_one")
        source = RandomTensors(
            seed=0,
            device=target.device,
            dtype=target.dtype,
            norm_weight=0.0 if is_offset else 1.0,
        )
    else:
        place = directory or target_directory
        if place is None:
            raise CheckpointError(
                f"there are no weights of {spec.name}'s prediction module here"
            )
        source = CheckpointDirectory(
            place if place.is_dir() else place.parent,
            device=target.device,
            dtype=target.dtype,
            quantization=layout.spec.quantization,
        )
    with torch.inference_mode():
        return HeadBuilder(layout, target, source).build_head()


@dataclass(frozen=True, kw_only=True)
class PredictionNames:
    """Names of a prediction module's tensors."""

    layer: str
    projection: str
    token_norm: str
    state_norm: str
    norm: str
    head: str | None = None
    """Its copy of the target's output layer."""
    embedding: str | None = None
    """Its copy of the target's embeddings."""
    feeds_normed: bool = True
    hides_first: bool = False


SPECULATORS_MODULE = PredictionNames(
    layer="mtp_layers.0",
    projection="mtp_layers.0.input_proj",
    token_norm="mtp_layers.0.token_layernorm",
    state_norm="mtp_layers.0.hidden_layernorm",
    norm="mtp_layers.0.final_layernorm",
)
QWEN_MODULE = PredictionNames(
    layer="mtp.layers.0",
    projection="mtp.fc",
    token_norm="mtp.pre_fc_norm_embedding",
    state_norm="mtp.pre_fc_norm_hidden",
    norm="mtp.norm",
)


def deepseek_module(prefix: str) -> PredictionNames:
    """DeepSeek-V3's and GLM-4.5's, behind the target's layers."""
    return PredictionNames(
        layer=prefix,
        projection=f"{prefix}.eh_proj",
        token_norm=f"{prefix}.enorm",
        state_norm=f"{prefix}.hnorm",
        norm=f"{prefix}.shared_head.norm",
        head=f"{prefix}.shared_head.head",
        embedding=f"{prefix}.embed_tokens",
        feeds_normed=False,
        hides_first=True,
    )


class HeadBuilder(Builder):
    """One head on one shard."""

    def __init__(
        self, layout: HeadLayout, target: Transformer, source: TensorSource
    ) -> None:
        super().__init__(layout.spec, target.tp, source, target.device)
        self._layout = layout
        self._target = target
        if "model.fc.weight" in source:
            self._prefix = "model."
        else:
            self._prefix = ""

    def build_head(self) -> Head:
        """The head, once all tensors of its checkpoint have found a place."""
        builders: Mapping[str, Callable[[], Head]] = {
            "eagle": self._eagle,
            "eagle3": self._eagle3,
            "mtp": self._prediction,
            "dflash": self._block,
            "dspark": self._block,
        }
        method = self._layout.method
        head = builders[METHODS[method].parallel_of or method]()
        if self._layout.is_native:
            within = self._within
        else:
            within = ("",)
        self._source.check_all_read(OF_THE_VERIFIER, within=within)
        return head

    def _rotaries(self) -> tuple[RotaryEmbedding, ...]:
        dtype = self._target.dtype
        return tuple(RotaryEmbedding(rope, self._device, dtype) for rope in self._ropes)

    def _embedding(self, name: str) -> VocabParallelEmbedding:
        """The head's own, or the target's."""
        spec, tp = self._spec, self._tp
        if f"{name}.weight" not in self._source:
            if spec.hidden_size != self._target.spec.hidden_size:
                raise CheckpointError(
                    f"head {self._layout.name} has no tensor {name}.weight, and its target's "
                    f"embeddings are of {self._target.spec.hidden_size} numbers, not of "
                    f"{spec.hidden_size}"
                )
            return self._target.embedding
        shape = (spec.vocab_size, spec.hidden_size)
        rows = self._read(f"{name}.weight", shape, tp.slice_of(spec.vocab_size))
        return VocabParallelEmbedding(weight_VH=rows, tp=tp)

    def _output_layer(self, name: str) -> Callable[[Tensor], Tensor]:
        """The head's own, or the target's where it has the same tokens."""
        layout = self._layout
        spec = self._spec
        is_reduced = layout.draft_vocab_size < self._target.spec.vocab_size
        if f"{name}.weight" not in self._source and not is_reduced:
            if spec.hidden_size != self._target.spec.hidden_size:
                raise CheckpointError(
                    f"head {layout.name} has no tensor {name}.weight, and its target's output "
                    f"layer is of {self._target.spec.hidden_size} numbers, not of "
                    f"{spec.hidden_size}"
                )
            return self._target.logits_of
        shape = (layout.draft_vocab_size, spec.hidden_size)
        rows = self._tp.slice_of(layout.draft_vocab_size)
        weight = self._read(f"{name}.weight", shape, rows)
        return ColumnParallelLinear(weight=weight)

    def _vocabulary(self) -> ReducedVocabulary | None:
        """The choice of tokens that the head has; None where it has its target's."""
        size = self._layout.draft_vocab_size
        whole = self._target.spec.vocab_size
        if size == whole and "d2t" not in self._source:
            return None
        offsets_D = self._source.read_numbers("d2t", (size,))
        is_drafted_V = None
        if "t2d" in self._source:
            is_drafted_V = self._source.read_numbers("t2d", (whole,))
        vocabulary = reduced_vocabulary(
            offsets_D,
            is_drafted_V,
            where=self._layout.name,
            tp=self._tp,
            vocab_size=whole,
        )
        if size == whole and not offsets_D.any():
            return None
        return vocabulary

    def _norm_of(self, name: str, size: int) -> HiddenNorm:
        weight = self._norm_weight(f"{name}.weight", (size,))
        return HiddenNorm(weight=weight, eps=self._spec.norm.eps)

    def _first_layer(
        self, prefix: str, kind: LayerSpec, *, inputs: int
    ) -> TransformerLayer:
        """A layer whose attention reads `inputs` numbers, which are normed elsewhere or not."""
        assert kind.mixer is not None
        self._mixer_inputs = inputs
        mixer = self._mixer(f"{prefix}.self_attn", kind.mixer)
        self._mixer_inputs = self._spec.hidden_size
        if not isinstance(kind.mlp, MLPSpec):
            raise ConfigError(
                f"head {self._layout.name}: a mixture of experts is not run in heads"
            )
        return TransformerLayer(
            mixer=mixer,
            mlp=self._mlp(
                f"{prefix}.mlp", kind.mlp, self._tp, self._spec.names.matrices
            ),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm"),
        )

    def _other_layers(self, start: int) -> list[TransformerLayer]:
        prefix = f"{self._prefix}layers"
        layers = []
        for i, kind in enumerate(self._spec.layers[start:], start):
            layers.append(self._layer(f"{prefix}.{i}", kind))
        return layers

    def _eagle(self) -> EagleHead:
        spec = self._spec
        prefix = self._prefix
        hidden = spec.hidden_size
        if hidden != self._layout.target_hidden_size:
            raise ConfigError(
                f"head {self._layout.name} has {hidden} hidden numbers; EAGLE's predicts its "
                f"target's, which are {self._layout.target_hidden_size}"
            )
        has_bias = f"{prefix}fc.bias" in self._source
        first = self._first_layer(f"{prefix}layers.0", spec.layers[0], inputs=hidden)
        return EagleHead(
            layout=self._layout,
            embedding=self._embedding(f"{prefix}embed_tokens"),
            layers=(first, *self._other_layers(1)),
            rotaries=self._rotaries(),
            output=self._target.logits_of,
            fusion=self._whole(f"{prefix}fc", hidden, 2 * hidden, bias=has_bias),
        )

    def _eagle3(self) -> Eagle3Head:
        layout = self._layout
        spec = self._spec
        prefix = self._prefix
        hidden = spec.hidden_size
        states = layout.num_states * layout.target_hidden_size
        first_name = f"{prefix}layers.0"
        if f"{prefix}midlayer.hidden_norm.weight" in self._source:
            first_name = f"{prefix}midlayer"
        first = self._first_layer(first_name, spec.layers[0], inputs=2 * hidden)
        layers = (first, *self._other_layers(1))
        mask_states_F = None
        if METHODS[layout.method].parallel_of:
            mask_states_F = self._read(f"{prefix}mask_hidden", (1, 1, states)).flatten()
        return Eagle3Head(
            layout=layout,
            embedding=self._embedding(f"{prefix}embed_tokens"),
            layers=layers,
            rotaries=self._rotaries(),
            output=self._output_layer("lm_head"),
            vocabulary=self._vocabulary(),
            fusion=Fusion(
                norms=self._fusion_norms(),
                linear=self._whole(f"{prefix}fc", hidden, states),
            ),
            token_norm=self._norm(f"{first_name}.input_layernorm"),
            state_norm=self._norm(f"{first_name}.hidden_norm"),
            norm=self._norm(f"{prefix}norm"),
            mask_states_F=mask_states_F,
        )

    def _fusion_norms(self) -> list[HiddenNorm]:
        layout = self._layout
        prefix = self._prefix
        size = layout.target_hidden_size
        if layout.fusion_norm == "whole":
            return [self._norm_of(f"{prefix}input_norm", layout.num_states * size)]
        norms: list[HiddenNorm] = []
        if layout.fusion_norm == "each":
            for i in range(layout.num_states):
                norms.append(self._norm_of(f"{prefix}fc_norm.{i}", size))
        return norms

    @property
    def _module(self) -> PredictionNames:
        """The names of a prediction module, by where it stands."""
        if not self._layout.is_native:
            return SPECULATORS_MODULE
        if self._target.spec.architecture.startswith("qwen"):
            return QWEN_MODULE
        root = first_stored(ROOTS, "embed_tokens.weight", self._source)
        layer = self._target.spec.num_hidden_layers
        return deepseek_module(f"{root}.layers.{layer}")

    @property
    def _within(self) -> tuple[str, ...]:
        """How the names of a target's own prediction module begin."""
        names = self._module
        if names is QWEN_MODULE:
            return ("mtp.",)
        return (f"{names.layer}.",)

    def _prediction(self) -> PredictionHead:
        spec, names = self._spec, self._module
        hidden = spec.hidden_size
        embedding = self._target.embedding
        output: Callable[[Tensor], Tensor] = self._target.logits_of
        if names.embedding is not None:
            embedding = self._embedding(names.embedding)
        if names.head is not None:
            output = self._output_layer(names.head)
        return PredictionHead(
            layout=self._layout,
            embedding=embedding,
            layers=(self._layer(names.layer, spec.layers[0]),),
            rotaries=self._rotaries(),
            output=output,
            token_norm=self._norm(names.token_norm),
            state_norm=self._norm(names.state_norm),
            projection=self._whole(names.projection, hidden, 2 * hidden),
            norm=self._norm(names.norm),
            feeds_normed=names.feeds_normed,
            hides_first=names.hides_first,
        )

    def _block(self) -> BlockHead:
        layout = self._layout
        hidden = self._spec.hidden_size
        states = layout.num_states * layout.target_hidden_size
        layers = tuple(self._other_layers(0))
        for layer in layers:
            if not isinstance(layer.mixer, GroupedAttention):
                raise ConfigError(
                    f"head {layout.name}: its attention is not run in parallel heads"
                )
        markov = None
        if layout.markov_rank:
            markov = self._markov()
        return BlockHead(
            layout=layout,
            embedding=self._embedding("embed_tokens"),
            layers=layers,
            rotaries=self._rotaries(),
            output=self._output_layer("lm_head"),
            vocabulary=self._vocabulary(),
            fusion=self._whole("fc", hidden, states),
            state_norm=self._norm("hidden_norm"),
            norm=self._norm("norm"),
            markov=markov,
        )

    def _markov(self) -> Markov:
        layout = self._layout
        prefix = "markov_head"
        rank = layout.markov_rank
        rows = self._tp.slice_of(layout.draft_vocab_size)
        shape = (layout.draft_vocab_size, rank)
        return Markov(
            tokens_VR=self._read(
                f"{prefix}.markov_w1.weight", (self._spec.vocab_size, rank)
            ),
            shift=ColumnParallelLinear(
                weight=self._read(f"{prefix}.markov_w2.weight", shape, rows)
            ),
        )
