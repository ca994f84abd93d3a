"""A decoder-only transformer: its layers by kind, its tables and its norms. No torch, no time.

Read from a Hugging Face `config.json` by hf_config.py, or from a file of our own schema by catalog.py. What a plan,
the memory and the runtime need follows from the layers; nothing asks for an architecture's name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import Literal, TypeVar

import msgspec

from magicdec.specs.layers import MLP, FeedForward, Layer
from magicdec.specs.mixers import Attention, Cache, Mixer, RopeScaling, State
from magicdec.specs.precision import Precision
from magicdec.specs.quantization import PartFormat, Quantization

T = TypeVar("T")


class Norm(msgspec.Struct, frozen=True, kw_only=True):
    """The norms of a model, and where they stand. `rms_plus_one` multiplies with 1 + weight; `layernorm` subtracts the
    mean first, with a bias where `has_bias`. `placement`: on what a sublayer reads; on what it writes; on both; or one
    norm read by mixer and feed-forward alike, whose outputs are added together."""

    kind: Literal["rms", "rms_plus_one", "layernorm", "layernorm_plus_one"] = "rms"
    placement: Literal["before", "after", "around", "parallel"] = "before"
    eps: float = 1e-6
    has_bias: bool = False

    def num_parameters(self, hidden_size: int) -> int:
        return hidden_size * (2 if self.has_bias else 1)

    def num_in(self, layer: Layer) -> int:
        """How many norms of hidden_size a layer has."""
        per_sublayer = {"before": 1, "after": 1, "around": 2}
        return 1 if self.placement == "parallel" else per_sublayer[self.placement] * layer.num_sublayers


class TensorNames(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint names and fuses the tensors of a layer, where it differs from Llama's way."""

    fused_qkv: bool = False
    fused_gate_up: bool = False
    mlp: str = "mlp"
    """The module of the feed-forward."""
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of a dense feed-forward's matrices."""
    gate_up: str = "gate_up_proj"
    """Name of the first two matrices where they are fused."""
    expert: Literal["gate_proj", "w1"] = "gate_proj"
    """The first matrix of an expert: gate_proj, up_proj, down_proj; or w1, w3, w2."""
    experts: Literal["each", "stacked", "stacked_in_turn"] = "each"
    """A tensor for each expert's matrix, or one for all experts', inputs first, with all gates before all ups, or with
    columns of gate and up in turn."""
    router: str = "gate"
    shared: str = "shared_experts"
    correction_bias: str = "gate.e_score_correction_bias"
    correction_is_row: bool = False
    """Whether it is stored as a matrix of one row."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """In the order in which a layer's norms are applied."""
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A decoder: tables of vocab_size × hidden_size, layers between them, and what is done on the way."""

    name: str
    architecture: str
    """Its configuration's `model_type`, for people."""
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    """The longest context that its position embeddings reach, with the scaling that its configuration asks for."""
    limit: str | None = None
    """The reason why its publisher reads more and it is not modelled, for people."""
    layers: tuple[Layer, ...]
    norm: Norm = Norm()
    tie_word_embeddings: bool = False
    head_bias: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of a sublayer's output before it is added."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    mtp_layers: tuple[Layer, ...] = ()
    """Layers of the multi-token-prediction heads, which draft and take no part in an ordinary pass."""
    draft_vocab_size: int | None = None
    """Tokens that a draft head can propose, where they are fewer than the target's."""
    quantization: Quantization | None = None
    extension: RopeScaling | None = None
    """How its publisher says that it reads longer contexts than its configuration asks for."""
    names: TensorNames = TensorNames()
    eos_token_ids: tuple[int, ...] = ()

    def part_format(self, part: Literal["mixer", "mlp", "experts", "head"], precision: Precision) -> PartFormat:
        """The format of a part's weights: the published one where that is the format of `precision`, else that of
        `precision`; the head is in 16 bits unless it is published in fewer."""
        published = self.quantization
        if published is not None and published.weight_dtype == precision.weight_dtype:
            found: PartFormat = getattr(published, part)
            return found
        own = precision.tables if part == "head" else precision
        return PartFormat(dtype=own.weight_dtype, num_bytes=own.weight_bytes)

    def part_precision(self, part: Literal["mixer", "mlp", "experts", "head"], precision: Precision) -> Precision:
        return msgspec.structs.replace(precision, weight_dtype=self.part_format(part, precision).dtype)

    @property
    def longest_context(self) -> int:
        """Tokens that it reads, with the extension that its publisher describes."""
        if self.extension is None:
            return self.max_position_embeddings
        reach = round(self.extension.factor * self.extension.original_max_position_embeddings)
        return max(self.max_position_embeddings, reach)

    @property
    def is_unscaled(self) -> bool:
        """Whether positions are rotated, and nobody says that they are stretched."""
        ropes = [rope for layer in self.layers if layer.mixer and (rope := layer.mixer.rotary) is not None]
        return bool(ropes) and self.extension is None and all(rope.scaling is None for rope in ropes)

    def summary(self) -> str:
        """Its layers by kind, for people: how many of each."""
        return ", ".join(f"{count} {part.label}" for part, count in (*self.mixers, *self.feed_forwards))

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def mixers(self) -> tuple[tuple[Mixer, int], ...]:
        """The mixers, each with the number of layers that have it; those that cost alike are one."""
        return tuple(Counter(layer.mixer.costing() for layer in self.layers if layer.mixer is not None).items())

    @cached_property
    def feed_forwards(self) -> tuple[tuple[FeedForward, int], ...]:
        return tuple(Counter(layer.mlp for layer in self.layers if layer.mlp is not None).items())

    @cached_property
    def caches(self) -> tuple[tuple[Cache, int], ...]:
        """Caches by token of context, each with the number of layers that keep it."""
        return _merged((cache, count) for mixer, count in self.mixers for cache in mixer.caches())

    @cached_property
    def states(self) -> tuple[tuple[State, int], ...]:
        """States per sequence, each with the number of layers that keep it."""
        return _merged((state, count) for mixer, count in self.mixers for state in mixer.states())

    @property
    def attention(self) -> Attention:
        """The first attention of queries, keys and values by head; that of every layer, in many models."""
        return next(layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention))

    @cached_property
    def _last_whole_layer(self) -> Layer:
        """The last layer of full attention and a feed-forward, put together where they stand in blocks of their own;
        of what mixes tokens otherwise, where nothing attends to all of them."""

        def attends(layer: Layer) -> bool:
            return layer.mixer is not None and any(each.max_tokens is None for each in layer.mixer.caches())

        whole = [layer for layer in self.layers if attends(layer) and layer.mlp is not None]
        if whole:
            return whole[-1]
        mixing = [layer for layer in self.layers if attends(layer)] or [each for each in self.layers if each.mixer]
        feeding = [layer for layer in self.layers if layer.mlp is not None]
        return Layer(mixer=mixing[-1].mixer if mixing else None, mlp=feeding[-1].mlp if feeding else None)

    @cached_property
    def prediction_head(self) -> ModelSpec:
        """One multi-token-prediction head; of a model without any, one with a layer like its own."""
        return msgspec.structs.replace(self, layers=(*self.mtp_layers, self._last_whole_layer)[:1], mtp_layers=())

    @cached_property
    def eagle_head(self) -> ModelSpec:
        """A draft head of one dense layer, whatever the model's are (EAGLE, arXiv 2401.15077)."""
        last = self._last_whole_layer
        widths = [mlp.width for mlp, _ in self.feed_forwards if not mlp.num_experts]
        dense = MLP(width=max(widths, default=self.widest_feed_forward))
        layer = Layer(mixer=last.mixer, mlp=dense)
        return msgspec.structs.replace(self, layers=(layer,), mtp_layers=())

    @cached_property
    def num_full_attention_layers(self) -> int:
        """Layers whose cache a sparse draft may thin out."""
        return sum(count for mixer, count in self.mixers if any(cache.is_sparsifiable for cache in mixer.caches()))

    @property
    def num_attention_heads(self) -> int:
        """The most query heads (heads of a recurrence, where nothing attends) of any layer."""
        attending = max((mixer.query_heads for mixer, _ in self.mixers), default=0)
        return attending or max((state.num_heads for state, _ in self.states), default=1)

    @property
    def num_key_value_heads(self) -> int:
        """The most heads whose keys and values are kept apart; 1 for a latent that all heads share."""
        return max((cache.num_heads for cache, _ in self.caches), default=1)

    @cached_property
    def widest_feed_forward(self) -> int:
        """The most intermediate numbers of a token in any layer."""
        return max((mlp.active_width for mlp, _ in self.feed_forwards), default=0)

    @property
    def is_moe(self) -> bool:
        return self.most_experts > 0

    @property
    def most_experts(self) -> int:
        """Routed experts of the layer that has the most; 0 without any."""
        return max((mlp.num_experts for mlp, _ in self.feed_forwards), default=0)

    @property
    def has_window(self) -> bool:
        """Whether every layer that attends sees a window or a chunk only."""
        return bool(self.caches) and all(cache.max_tokens is not None for cache, _ in self.caches)

    @cached_property
    def embedding_parameters(self) -> int:
        """The embedding table; the head's, of the same size, is counted apart unless tied."""
        return self.vocab_size * self.hidden_size

    def layer_parameters(self, layer: Layer) -> int:
        """Weights of one layer, norms included."""
        parts = [part.num_parameters(self.hidden_size) for part in (layer.mixer, layer.mlp) if part is not None]
        return sum(parts) + self.norm.num_in(layer) * self.norm.num_parameters(self.hidden_size)

    @cached_property
    def num_parameters(self) -> int:
        """All weights of an ordinary pass, a tied head counted once; prediction heads are counted apart."""
        tables = self.embedding_parameters * (1 if self.tie_word_embeddings else 2)
        tables += self.vocab_size if self.head_bias else 0
        inside = sum(count * self.layer_parameters(layer) for layer, count in Counter(self.layers).items())
        return tables + inside + self.norm.num_parameters(self.hidden_size)

    @cached_property
    def expert_parameters(self) -> int:
        """Weights of all routed experts."""
        return sum(count * mlp.expert_parameters(self.hidden_size) for mlp, count in self.feed_forwards)

    @cached_property
    def active_parameters(self) -> int:
        """Weights that one token passes, tables included."""
        hidden = self.hidden_size
        idle = (n * (mlp.num_parameters(hidden) - mlp.active_parameters(hidden)) for mlp, n in self.feed_forwards)
        return self.num_parameters - sum(idle)

    def kv_elements(self, length: int, *, tp_size: int = 1) -> int:
        """Numbers that one rank keeps of the `length` tokens of one sequence, over all layers; states excluded."""
        return sum(
            count * max(1, -(-cache.num_heads // tp_size)) * cache.elements_per_token
            * (length if cache.max_tokens is None else min(length, cache.max_tokens))
            for cache, count in self.caches
        )  # fmt: skip

    def kv_elements_per_token(self) -> int:
        """Numbers stored over all layers for a token that every one of them keeps."""
        return self.kv_elements(1)

    def state_elements(self, *, tp_size: int = 1) -> tuple[int, int]:
        """Numbers that one rank keeps per sequence whatever its length: (recurrent, in 32 bits; convolutions')."""
        shares = [(state, count * max(1, -(-state.num_heads // tp_size))) for state, count in self.states]
        recurrent = sum(heads * state.recurrent_elements for state, heads in shares)
        return recurrent, sum(heads * state.conv_elements for state, heads in shares)


def why_not_run(spec: ModelSpec) -> str | None:
    """The part of a model that our runtime does not compute, for people; None where it runs. No torch, no time: the
    catalog says it too."""
    for layer in spec.layers:
        if spec.norm.placement == "parallel" and layer.num_sublayers < 2:
            return "blocks of one sublayer behind a norm for two"
        for part in (layer.mixer, layer.mlp):
            if part is not None and part.why_not_run is not None:
                return part.why_not_run
    return None if spec.quantization is None else spec.quantization.reason


def _merged(counted: Iterable[tuple[T, int]]) -> tuple[tuple[T, int], ...]:
    total: Counter[T] = Counter()
    for item, count in counted:
        total[item] += count
    return tuple(total.items())
