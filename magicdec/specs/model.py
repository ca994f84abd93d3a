"""A decoder-only transformer: its layers by kind, its tables and its norms. No torch, no time.

Read from a Hugging Face `config.json` by hf_config.py, or from a file of our own schema by
catalog.py. What a plan, the memory and the runtime need follows from the layers; nothing asks for
an architecture's name.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Literal

import msgspec

from magicdec.errors import ConfigError
from magicdec.specs.formats import WeightFormat, weight_format
from magicdec.specs.layers import MLP, FeedForward, Layer, MixtureOfExperts
from magicdec.specs.mixers import (
    Attention,
    Cache,
    Mixer,
    Projection,
    RopeScaling,
    State,
)
from magicdec.specs.precision import Precision
from magicdec.specs.quantization import PartFormat, Quantization

ModelPart = Literal["mixer", "mlp", "experts", "head", "embeddings"]
LAYER_PARTS: tuple[ModelPart, ...] = ("mixer", "mlp", "experts")
MOST_FILE_FACTOR = 2.0
"""How far a file's size may be from its type's usual one."""


class Norm(msgspec.Struct, frozen=True, kw_only=True):
    """The norms of a model, and where they stand. `rms_plus_one` multiplies with 1 + weight;
    `layernorm` subtracts the mean first, with a bias where `has_bias`. `placement`: on what a
    sublayer reads; on what it writes; on both; or one norm read by mixer and feed-forward alike,
    whose outputs are added together."""

    kind: Literal["rms", "rms_plus_one", "layernorm", "layernorm_plus_one"] = "rms"
    placement: Literal["before", "after", "around", "parallel"] = "before"
    eps: float = 1e-6
    has_bias: bool = False

    def num_parameters(self, hidden_size: int) -> int:
        if self.has_bias:
            return 2 * hidden_size
        return hidden_size

    def num_in(self, layer: Layer) -> int:
        """Number of norms of hidden_size in a layer."""
        per_sublayer = {"before": 1, "after": 1, "around": 2}
        if self.placement == "parallel":
            return 1
        return per_sublayer[self.placement] * layer.num_sublayers


class TensorNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names and fusions of a layer's tensors in a checkpoint. The defaults are Llama's."""

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
    experts_beside: bool = False
    """Whether experts stand beside the feed-forward's module, which is then the shared one's."""
    experts: Literal["each", "stacked", "stacked_in_turn"] = "each"
    """A tensor for each expert's matrix, or one for all experts', inputs first, with all gates
    before all ups, or with columns of gate and up in turn."""
    router: str = "gate"
    shared: str = "shared_experts"
    correction_bias: str = "gate.e_score_correction_bias"
    correction_is_row: bool = False
    """Whether it is stored as a matrix of one row."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """In the order in which a layer's norms are applied."""
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")


class Assistant(msgspec.Struct, frozen=True, kw_only=True):
    """A small network, published beside a model, that drafts from its hidden states and over its
    cache."""

    hidden_size: int
    layers: tuple[Layer, ...]


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A decoder: tables of vocab_size × hidden_size, the layers between them, norms and scales."""

    name: str
    architecture: str
    """The configuration's `model_type`."""
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    """Longest context that the position embeddings reach, with the configuration's scaling."""
    limit: str | None = None
    """Why the published longer context is not modelled, as text."""
    assumed: str | None = None
    """The sentence that says as what an architecture that is not known was read."""
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
    """Layers of the multi-token-prediction heads, which draft and take no part in an ordinary pass.
    """
    assistant: Assistant | None = None
    """The network that predicts several tokens in place of such layers."""
    draft_vocab_size: int | None = None
    """Tokens that a draft head can propose, where they are fewer than the target's."""
    quantization: Quantization | None = None
    extension: RopeScaling | None = None
    """The publisher's scaling for contexts beyond the configured one."""
    names: TensorNames = TensorNames()
    eos_token_ids: tuple[int, ...] = ()

    def part_format(self, part: ModelPart, precision: Precision) -> PartFormat:
        """The format of a part's weights: the published one if the checkpoint is in the format of
        `precision`, else that of `precision`. Tables are in 16 bits unless they are published in
        fewer, or the format converts them too."""
        published = self.quantization
        is_published = (
            published is not None and published.weight_dtype == precision.weight_dtype
        )
        own = precision
        if part == "embeddings":
            is_published = False
        if published is not None and is_published:
            format_of_part: PartFormat = getattr(published, part)
            return format_of_part
        if precision.format.has_narrow_tables:
            return self._file_formats(precision.weight_dtype)[part]
        if part in ("head", "embeddings"):
            own = precision.tables
        return PartFormat(dtype=own.weight_dtype, num_bytes=own.weight_bytes)

    def part_precision(self, part: ModelPart, precision: Precision) -> Precision:
        own = self.part_format(part, precision)
        return msgspec.structs.replace(
            precision, weight_dtype=own.dtype, part_bytes=own.num_bytes
        )

    def _file_formats(self, name: str) -> dict[ModelPart, PartFormat]:
        """Formats of the parts of a file that is converted as a whole, as GGUF files are. A file's
        own size decides where it is known. Raises ConfigError for a size that no such file has."""
        known = self._known_file_formats
        if name not in known:
            known[name] = self._in_one_file(weight_format(name), name)
        return known[name]

    @cached_property
    def _known_file_formats(self) -> dict[str, dict[ModelPart, PartFormat]]:
        return {}

    def _in_one_file(
        self, form: WeightFormat, name: str
    ) -> dict[ModelPart, PartFormat]:
        weights: dict[ModelPart, float] = {}
        bits: dict[ModelPart, float] = {}
        for part in LAYER_PARTS:
            weights[part] = 0.0
            bits[part] = 0.0
            for projection, count in self._matrices(part):
                size = count * projection.num_parameters
                weights[part] += size
                bits[part] += size * form.matrix_bits(
                    projection, is_expert=part == "experts"
                )
        kernels = dict.fromkeys(LAYER_PARTS, form.kernels)
        if form.experts:
            kernels["experts"] = form.experts
        published = self.quantization
        if published is not None and published.experts.dtype == "mxfp4":
            # experts that are published in MXFP4 stay so in every file (gpt-oss)
            kernels["experts"] = published.experts.dtype
            bits["experts"] = weights["experts"] * 8.0 * published.experts.num_bytes
        tables: dict[ModelPart, float] = {
            "head": form.table_bits("output"),
            "embeddings": form.table_bits("embeddings"),
        }
        if self.tie_word_embeddings:
            tables["embeddings"] = tables["head"]
        factor = 1.0
        if form.num_bytes is not None:
            factor = self._layer_factor(form, name, sum(bits.values()), tables)
        formats = {}
        for part in LAYER_PARTS:
            own = form.usual_bits
            if weights[part]:
                own = bits[part] / weights[part]
            formats[part] = PartFormat(
                dtype=kernels[part], num_bytes=factor * own / 8.0
            )
        for part, own in tables.items():
            formats[part] = PartFormat(dtype=form.kernels, num_bytes=own / 8.0)
        return formats

    def _layer_factor(
        self,
        form: WeightFormat,
        name: str,
        layer_bits: float,
        tables: dict[ModelPart, float],
    ) -> float:
        """By how much a file's layers are larger than its type's usually are."""
        of_tables = self.embedding_parameters * tables["head"]
        if not self.tie_word_embeddings:
            of_tables += self.embedding_parameters * tables["embeddings"]
        assert form.num_bytes is not None
        factor = (8.0 * form.num_bytes - of_tables) / layer_bits
        if not 1.0 / MOST_FILE_FACTOR <= factor <= MOST_FILE_FACTOR:
            usual = (layer_bits + of_tables) / 8e9
            raise ConfigError(
                f"{name}: such a file of {self.name} has about {usual:.3g} GB; is it "
                "another model's, or a part of several?"
            )
        return factor

    def _matrices(self, part: ModelPart) -> list[tuple[Projection, int]]:
        """A part's matrices that every format converts, each with its number."""
        matrices = []
        if part == "mixer":
            for mixer, count in self.mixers:
                for projection in mixer.projections(self.hidden_size):
                    matrices.append((projection, count))
        for mlp, count in self.feed_forwards:
            if part == "mlp":
                for projection in mlp.projections(self.hidden_size):
                    if projection.name != "router":
                        matrices.append((projection, count))
            elif part == "experts" and isinstance(mlp, MixtureOfExperts):
                inner = mlp.inner_size(self.hidden_size)
                for projection in mlp.expert.projections(inner):
                    matrices.append((projection, count * mlp.num_experts))
        return matrices

    @property
    def longest_context(self) -> int:
        """Longest context in tokens, with the publisher's extension."""
        if self.extension is None:
            return self.max_position_embeddings
        reach = round(
            self.extension.factor * self.extension.original_max_position_embeddings
        )
        return max(self.max_position_embeddings, reach)

    @property
    def is_unscaled(self) -> bool:
        """Whether the model rotates positions, and neither configuration nor publisher stretches
        them.
        """
        if self.extension is not None:
            return False
        num_ropes = 0
        for layer in self.layers:
            if layer.mixer is None or layer.mixer.rotary is None:
                continue
            if layer.mixer.rotary.scaling is not None:
                return False
            num_ropes += 1
        return num_ropes > 0

    def summary(self) -> str:
        """Number of layers of each kind, as text."""
        return ", ".join(
            f"{count} {part.label}"
            for part, count in (*self.mixers, *self.feed_forwards)
        )

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def mixers(self) -> tuple[tuple[Mixer, int], ...]:
        """Mixers with their number of layers. Mixers of equal cost count as one."""
        counts: Counter[Mixer] = Counter()
        for layer in self.layers:
            if layer.mixer is not None:
                counts[layer.mixer.costing()] += 1
        return tuple(counts.items())

    @cached_property
    def feed_forwards(self) -> tuple[tuple[FeedForward, int], ...]:
        """Feed-forwards with their number of layers."""
        counts: Counter[FeedForward] = Counter()
        for layer in self.layers:
            if layer.mlp is not None:
                counts[layer.mlp] += 1
        return tuple(counts.items())

    @cached_property
    def caches(self) -> tuple[tuple[Cache, int], ...]:
        """Caches by token of context, each with the number of layers that keep it."""
        counts: Counter[Cache] = Counter()
        for mixer, count in self.mixers:
            for cache in mixer.caches():
                counts[cache] += count
        return tuple(counts.items())

    @cached_property
    def states(self) -> tuple[tuple[State, int], ...]:
        """States per sequence, each with the number of layers that keep it."""
        counts: Counter[State] = Counter()
        for mixer, count in self.mixers:
            for state in mixer.states():
                counts[state] += count
        return tuple(counts.items())

    @cached_property
    def mixes_head_sizes(self) -> bool:
        """Whether layers of attention differ in the size of their heads."""
        sizes = {
            mixer.head_dim for mixer, _ in self.mixers if isinstance(mixer, Attention)
        }
        return len(sizes) > 1

    @property
    def attention(self) -> Attention:
        """The first attention with queries, keys and values by head; in many models every layer has
        it."""
        return next(
            layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)
        )

    @cached_property
    def _last_whole_layer(self) -> Layer:
        """The last layer with full attention and a feed-forward. Where no layer has both, it
        combines the last full attention and the last feed-forward; without full attention, it takes
        the last mixer of another kind."""
        attention: Mixer | None = None
        mixer: Mixer | None = None
        mlp: FeedForward | None = None
        for layer in reversed(self.layers):
            has_attention = layer.mixer is not None and any(
                cache.max_tokens is None for cache in layer.mixer.caches()
            )
            if has_attention and layer.mlp is not None:
                return layer
            if has_attention:
                attention = attention or layer.mixer
            mixer = mixer or layer.mixer
            mlp = mlp or layer.mlp
        return Layer(mixer=attention or mixer, mlp=mlp)

    @cached_property
    def prediction_head(self) -> ModelSpec:
        """One multi-token-prediction head, or the assistant. A model without heads is given one with
        a layer like its own."""
        if self.assistant is not None:
            return msgspec.structs.replace(
                self,
                hidden_size=self.assistant.hidden_size,
                layers=self.assistant.layers,
                assistant=None,
            )
        return msgspec.structs.replace(
            self,
            layers=(*self.mtp_layers, self._last_whole_layer)[:1],
            mtp_layers=(),
        )

    @cached_property
    def eagle_head(self) -> ModelSpec:
        """A draft head of one dense layer, whatever the model's are (EAGLE, arXiv 2401.15077)."""
        last = self._last_whole_layer
        widths = []
        for mlp, _ in self.feed_forwards:
            if not mlp.num_experts:
                widths.append(mlp.width)
        dense = MLP(width=max(widths, default=self.widest_feed_forward))
        layer = Layer(mixer=last.mixer, mlp=dense)
        return msgspec.structs.replace(self, layers=(layer,), mtp_layers=())

    @cached_property
    def num_full_attention_layers(self) -> int:
        """Layers whose cache a sparse draft may thin out."""
        layers = 0
        for mixer, count in self.mixers:
            if any(cache.is_sparsifiable for cache in mixer.caches()):
                layers += count
        return layers

    @property
    def num_attention_heads(self) -> int:
        """The most query heads (heads of a recurrence, where nothing attends) of any layer."""
        attending = max((mixer.query_heads for mixer, _ in self.mixers), default=0)
        return attending or max(
            (state.num_heads for state, _ in self.states), default=1
        )

    @property
    def num_key_value_heads(self) -> int:
        """The most heads whose keys and values are kept apart; 1 for a latent that all heads
        share."""
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

    @cached_property
    def embedding_parameters(self) -> int:
        """The embedding table; the head's, of the same size, is counted apart unless tied."""
        return self.vocab_size * self.hidden_size

    def layer_parameters(self, layer: Layer) -> int:
        """Weights of one layer, norms included."""
        parameters = 0
        for part in (layer.mixer, layer.mlp):
            if part is not None:
                parameters += part.num_parameters(self.hidden_size)
        return parameters + self.norm.num_in(layer) * self.norm.num_parameters(
            self.hidden_size
        )

    @cached_property
    def num_parameters(self) -> int:
        """All weights of an ordinary pass, a tied head counted once; prediction heads are counted
        apart.
        """
        num_tables = 2
        if self.tie_word_embeddings:
            num_tables = 1
        tables = self.embedding_parameters * num_tables
        if self.head_bias:
            tables += self.vocab_size
        inside = 0
        for layer, count in Counter(self.layers).items():
            inside += count * self.layer_parameters(layer)
        return tables + inside + self.norm.num_parameters(self.hidden_size)

    @cached_property
    def expert_parameters(self) -> int:
        """Weights of all routed experts."""
        return sum(
            count * mlp.expert_parameters(self.hidden_size)
            for mlp, count in self.feed_forwards
        )

    @cached_property
    def active_parameters(self) -> int:
        """Weights that one token passes, tables included."""
        active = self.num_parameters
        for mlp, count in self.feed_forwards:
            idle = mlp.num_parameters(self.hidden_size) - mlp.active_parameters(
                self.hidden_size
            )
            active -= count * idle
        return active

    def kv_elements(self, length: int, *, tp_size: int = 1) -> int:
        """Numbers that one rank keeps of the `length` tokens of one sequence, over all layers;
        states excluded.
        """
        elements = 0
        for cache, count in self.caches:
            tokens = length
            if cache.max_tokens is not None:
                tokens = min(length, cache.max_tokens)
            heads_per_rank = max(1, -(-cache.num_heads // tp_size))
            elements += count * heads_per_rank * cache.elements_per_token * tokens
        return elements

    def kv_elements_per_token(self) -> int:
        """Numbers stored over all layers for a token that every one of them keeps."""
        return self.kv_elements(1)

    def state_elements(self, *, tp_size: int = 1) -> tuple[int, int]:
        """Numbers that one rank keeps per sequence, whatever its length: (recurrent states, in 32
        bits; convolution states)."""
        recurrent = 0
        convolved = 0
        for state, count in self.states:
            heads_per_rank = max(1, -(-state.num_heads // tp_size))
            recurrent += count * heads_per_rank * state.recurrent_elements
            convolved += count * heads_per_rank * state.conv_elements
        return recurrent, convolved


def why_not_run(spec: ModelSpec) -> str | None:
    """The part of a model that the runtime does not compute, as text. None: the model runs."""
    for layer in spec.layers:
        if spec.norm.placement == "parallel" and layer.num_sublayers < 2:
            return "blocks of one sublayer behind a norm for two"
        for part in (layer.mixer, layer.mlp):
            if part is not None and part.why_not_run is not None:
                return part.why_not_run
    if spec.quantization is None:
        return None
    return spec.quantization.reason
