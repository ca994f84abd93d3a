"""The mixers of a decoder's layers: attention of several kinds, and recurrences. No torch, no time.

Each says what weights it holds, and what it keeps of the context: keys and values by token, at most
a window of them, or a state of fixed size. Shapes are Hugging Face's: H hidden_size, A query heads,
K KV heads, D head_dim.
"""

import math
from typing import Literal, Self

import msgspec

QKNorm = Literal["none", "head", "layer", "l2", "layernorm", "head_after"]
RopeType = Literal["linear", "dynamic", "yarn", "longrope", "llama3"]


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary embeddings are stretched beyond the length that the model was trained with.
    `original_max_position_embeddings` is that length; `attention_factor` multiplies cosine and
    sine."""

    rope_type: RopeType
    factor: float = 1.0
    original_max_position_embeddings: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding of the first `dim` dimensions of a head."""

    dim: int
    theta: float = 10_000.0
    scaling: RopeScaling | None = None
    pairs: Literal["halves", "adjacent"] = "halves"
    """Which dimensions are rotated together: i and i + dim/2, or 2i and 2i + 1."""


class Cache(msgspec.Struct, frozen=True):
    """Numbers that a mixer keeps for each token of context, of each of `num_heads` heads. Ranks
    divide the heads; beyond one rank per head they hold copies. At most `max_tokens` tokens are
    kept, where that is set. Only what full attention keeps may be left out by a sparse draft."""

    num_heads: int
    elements_per_token: int
    max_tokens: int | None = None
    is_sparsifiable: bool = True


class State(msgspec.Struct, frozen=True):
    """Numbers that a recurrence keeps per sequence, of each of `num_heads` heads, whatever the
    context. `recurrent_elements` are in 32 bits; `conv_elements`, the last inputs of a short
    convolution, in the activations' format."""

    num_heads: int
    recurrent_elements: int
    conv_elements: int = 0


class Kind(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="none",
):
    """A part of a layer; files tell its kinds apart by `kind`."""

    @property
    def label(self) -> str:
        """Its name for people, by its tag."""
        return str(self.__struct_config__.tag).replace("_", " ")


class BaseMixer(Kind, frozen=True):
    """A part that mixes tokens; these are the answers of a recurrence without a cache by token."""

    @property
    def query_heads(self) -> int:
        """Heads whose queries attend; 0 where nothing does."""
        return 0

    @property
    def rotary(self) -> Rope | None:
        """Its rotary embedding, where positions are rotated."""
        return None

    def caches(self) -> tuple[Cache, ...]:
        """Kept by token of context."""
        return ()

    def states(self) -> tuple[State, ...]:
        """Kept per sequence."""
        return ()

    def costing(self) -> Self:
        """The mixer without what changes its values but neither its weights nor its work."""
        return self

    @property
    def why_not_run(self) -> str | None:
        """The reason why our runtime does not compute it; None where it does. A new kind is refused
        until it is run.
        """
        return f"layers of another kind than attention ({self.label})"


class Part(msgspec.Struct, frozen=True):
    """One side of a matrix, or a piece of it: `num_heads` × `size`. Ranks divide the heads; beyond
    one rank per head they hold copies. One head: the same on every rank."""

    num_heads: int
    size: int

    @property
    def total(self) -> int:
        return self.num_heads * self.size


class Projection(msgspec.Struct, frozen=True):
    """A matrix product that each token passes: weights of `outputs` × `inputs`."""

    name: str
    outputs: tuple[Part, ...]
    inputs: Part

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.total for part in self.outputs), self.inputs.total

    @property
    def num_parameters(self) -> int:
        return math.prod(self.shape)


def whole(size: int) -> Part:
    return Part(1, size)


def matrices(projections: tuple[Projection, ...]) -> int:
    return sum(each.num_parameters for each in projections)


class Attending(BaseMixer, frozen=True, kw_only=True):
    """A mixer whose queries attend to cached tokens."""

    num_heads: int
    rope: Rope | None = None
    scale: float | None = None
    """Factor of the scores; None: one over the root of a head's size."""

    @property
    def query_heads(self) -> int:
        return self.num_heads

    @property
    def rotary(self) -> Rope | None:
        return self.rope

    def costing(self) -> Self:
        return msgspec.structs.replace(self, rope=None, scale=None)


class Attention(Attending, frozen=True, kw_only=True, tag="attention"):
    """Grouped-query attention: q [A·D, H], k and v [K·D, H], o [H, A·D]. `mask` says which of the
    tokens up to its own a query sees: all; the last `span` (a window); or those of its own chunk of
    `span` tokens."""

    num_kv_heads: int
    head_dim: int
    mask: Literal["full", "window", "chunk"] = "full"
    span: int | None = None
    bias: bool = False
    """Bias on q, k and v."""
    output_bias: bool = False
    qk_norm: QKNorm = "none"
    """Norm of queries and keys before they are rotated: RMSNorm of each head with one weight of D
    (`head`), of all heads together with weights of A·D and K·D (`layer`), LayerNorm of each head
    with a weight of its own (`layernorm`); `l2`: RMSNorm of each head without weights, after
    rotation, on layers with rope; `head_after`: as `head`, after rotation."""
    sinks: bool = False
    """A learned logit per head that takes part in the softmax and attends to nothing."""
    softcap: float | None = None
    """Scores become softcap · tanh(score / softcap)."""
    keys_as_values: bool = False
    """Values are what the keys are projected to, before norm and rotation: v has no matrix."""
    value_norm: bool = False
    """RMSNorm of each head of values, without weights."""
    borrows_cache: bool = False
    """Keys and values are another layer's: it has neither matrices for them nor a cache."""
    gated: bool = False
    """The output is multiplied with sigmoid of a projection as wide as q."""
    temperature: tuple[float, float] | None = None
    """(c, n): queries at position p are multiplied with 1 + c·ln(1 + ⌊(p + o)/n⌋), with o
    `temperature_offset`.
    """
    temperature_offset: int = 1

    @property
    def num_projected(self) -> int:
        """Number of matrices for keys and values: one where values are the keys."""
        if self.borrows_cache:
            return 0
        if self.keys_as_values:
            return 1
        return 2

    def projections(self, hidden_size: int) -> tuple[Projection, ...]:
        query = Part(self.num_heads, self.head_dim)
        if self.gated:
            query = Part(self.num_heads, 2 * self.head_dim)
        kv = Part(self.num_kv_heads, self.num_projected * self.head_dim)
        return (
            Projection("qkv", (query, kv), whole(hidden_size)),
            Projection("o", (whole(hidden_size),), Part(self.num_heads, self.head_dim)),
        )

    @property
    def label(self) -> str:
        if self.span is None:
            return "full"
        return f"{self.mask} {self.span}"

    def num_parameters(self, hidden_size: int) -> int:
        q_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        queries = q_size * (2 if self.gated else 1)
        count = matrices(self.projections(hidden_size))
        if self.bias:
            count += queries + self.num_projected * kv_size
        if self.output_bias:
            count += hidden_size
        if self.qk_norm not in ("none", "l2"):
            if self.qk_norm.startswith("head"):
                count += 2 * self.head_dim
            else:
                count += q_size + kv_size
        if self.sinks:
            count += self.num_heads
        return count

    def caches(self) -> tuple[Cache, ...]:
        if self.borrows_cache:
            return ()
        is_full = self.mask == "full"
        if is_full:
            max_tokens = None
        else:
            max_tokens = self.span
        return (Cache(self.num_kv_heads, 2 * self.head_dim, max_tokens, is_full),)

    def costing(self) -> Self:
        return msgspec.structs.replace(
            self,
            rope=None,
            scale=None,
            temperature=None,
            temperature_offset=1,
            value_norm=False,
        )

    @property
    def why_not_run(self) -> str | None:
        if self.keys_as_values or self.value_norm:
            return "attention whose values have a norm, or are the keys"
        return None


class Indexer(msgspec.Struct, frozen=True, kw_only=True):
    """Chooses the `top_k` tokens that a sparse attention reads, by scores of small heads over one
    key per token. q [I·d, q_lora_rank], k [d, H] with a LayerNorm, head weights [I, H]. A shared
    one takes an earlier layer's choice."""

    num_heads: int
    head_dim: int
    top_k: int
    is_shared: bool = False

    def projections(self, hidden_size: int, query_rank: int) -> tuple[Projection, ...]:
        """Every rank computes all of them: each needs the whole choice."""
        if self.is_shared:
            return ()
        hidden = whole(hidden_size)
        return (
            Projection(
                "index_q", (whole(self.num_heads * self.head_dim),), whole(query_rank)
            ),
            Projection("index_k", (whole(self.head_dim + self.num_heads),), hidden),
        )


class LatentAttention(Attending, frozen=True, kw_only=True, tag="latent_attention"):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds one latent of
    `kv_lora_rank` and one rotated key of `qk_rope_head_dim` per token, shared by all heads.
    Decoding absorbs the expansion into queries and
    output: each head attends to the latent itself."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool = False
    head_gate: bool = False
    """Each head's output is multiplied with sigmoid of a projection to one number per head."""
    indexer: Indexer | None = None

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def expanded_size(self) -> int:
        """Mean width of a head's keys and values, expanded."""
        return (self.qk_head_dim + self.v_head_dim) // 2

    @property
    def latent_size(self) -> int:
        """Numbers kept per token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def projections(self, hidden_size: int) -> tuple[Projection, ...]:
        """The expansion of the latent stands as two: absorbed into the queries, and into the
        output.
        """
        heads = self.num_heads
        rank = self.q_lora_rank
        hidden = whole(hidden_size)
        queries = (Part(heads, self.qk_head_dim),)
        own: tuple[Projection, ...] = ()
        if rank is not None:
            own = (Projection("q_a", (whole(rank),), hidden),)
        gates: tuple[Projection, ...] = ()
        if self.head_gate:
            gates = (Projection("head_gate", (Part(heads, 1),), hidden),)
        indexing: tuple[Projection, ...] = ()
        if self.indexer is not None:
            indexing = self.indexer.projections(hidden_size, rank or hidden_size)
        if rank is None:
            query_input = hidden
        else:
            query_input = whole(rank)
        return (
            *own,
            Projection("q_b", queries, query_input),
            Projection("kv_a", (whole(self.latent_size),), hidden),
            Projection(
                "absorb_k",
                (Part(heads, self.qk_nope_head_dim),),
                whole(self.kv_lora_rank),
            ),
            Projection(
                "absorb_v", (Part(heads, self.v_head_dim),), whole(self.kv_lora_rank)
            ),
            Projection("o", (hidden,), Part(heads, self.v_head_dim)),
            *gates,
            *indexing,
        )

    @property
    def label(self) -> str:
        if self.indexer is None:
            return "latent"
        return f"latent, {self.indexer.top_k} chosen"

    def num_parameters(self, hidden_size: int) -> int:
        rank = self.q_lora_rank or 0
        # norms
        count = matrices(self.projections(hidden_size)) + rank + self.kv_lora_rank
        if self.bias:
            count += rank + self.latent_size + hidden_size
        if self.indexer is not None and not self.indexer.is_shared:
            count += 2 * self.indexer.head_dim
        return count

    def caches(self) -> tuple[Cache, ...]:
        latent = Cache(1, self.latent_size, None, self.indexer is None)
        if self.indexer is None or self.indexer.is_shared:
            return (latent,)
        return latent, Cache(1, self.indexer.head_dim, None, False)

    @property
    def why_not_run(self) -> str | None:
        if self.indexer is not None:
            return "attention to tokens that an indexer chooses"
        if self.head_gate:
            return "latent attention with a gate for each head"
        return None


class GatedDeltaNet(BaseMixer, frozen=True, kw_only=True, tag="gated_delta_net"):
    """Linear attention with a gated delta rule (arXiv 2412.06464; Qwen3-Next): a state of key ×
    value per value head, after a short causal convolution of queries, keys and values."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int

    @property
    def conv_size(self) -> int:
        return (
            2 * self.num_key_heads * self.key_head_dim
            + self.num_value_heads * self.value_head_dim
        )

    def projections(self, hidden_size: int) -> tuple[Projection, ...]:
        """Queries, keys, values, gate, and two numbers per value head in; values out."""
        inside = (
            Part(self.num_key_heads, 2 * self.key_head_dim),
            Part(self.num_value_heads, 2 * self.value_head_dim + 2),
        )
        return (
            Projection("linear_in", inside, whole(hidden_size)),
            Projection(
                "o",
                (whole(hidden_size),),
                Part(self.num_value_heads, self.value_head_dim),
            ),
        )

    def num_parameters(self, hidden_size: int) -> int:
        return (
            matrices(self.projections(hidden_size))
            + self.conv_size * self.conv_kernel
            + 2 * self.num_value_heads  # the decay and its bias
            + self.value_head_dim  # norm
        )

    def states(self) -> tuple[State, ...]:
        per_key_head = self.num_value_heads // self.num_key_heads * self.value_head_dim
        return (
            State(
                self.num_key_heads,
                self.key_head_dim * per_key_head,
                (2 * self.key_head_dim + per_key_head) * self.conv_kernel,
            ),
        )


class KimiDeltaAttention(
    BaseMixer, frozen=True, kw_only=True, tag="kimi_delta_attention"
):
    """Linear attention with a delta rule that decays each channel of the keys (arXiv 2510.26692): a
    state of D × D per head, after a short causal convolution of queries, keys and values. The decay
    and the output's gate are projections as wide as the values."""

    num_heads: int
    head_dim: int
    conv_kernel: int

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    def projections(self, hidden_size: int) -> tuple[Projection, ...]:
        """Queries, keys, values, decay, gate, and a number per head in; values out."""
        return (
            Projection(
                "linear_in",
                (Part(self.num_heads, 5 * self.head_dim + 1),),
                whole(hidden_size),
            ),
            Projection("o", (whole(hidden_size),), Part(self.num_heads, self.head_dim)),
        )

    @property
    def label(self) -> str:
        return "kimi delta"

    def num_parameters(self, hidden_size: int) -> int:
        return (
            matrices(self.projections(hidden_size))
            + 3 * self.inner_size * self.conv_kernel
            + self.num_heads  # the decay
            + self.inner_size  # its bias
            + self.head_dim  # norm
        )

    def states(self) -> tuple[State, ...]:
        return (
            State(
                self.num_heads, self.head_dim**2, 3 * self.head_dim * self.conv_kernel
            ),
        )


class LightningAttention(
    BaseMixer, frozen=True, kw_only=True, tag="lightning_attention"
):
    """Linear attention with a fixed decay per head (arXiv 2401.04658; MiniMax-01): a state of D × D
    per head; fused q, k, v, an output gate, and a norm of the heads' outputs."""

    num_heads: int
    head_dim: int

    def projections(self, hidden_size: int) -> tuple[Projection, ...]:
        return (
            Projection(
                "linear_in",
                (Part(self.num_heads, 4 * self.head_dim),),
                whole(hidden_size),
            ),
            Projection("o", (whole(hidden_size),), Part(self.num_heads, self.head_dim)),
        )

    @property
    def label(self) -> str:
        return "lightning"

    def num_parameters(self, hidden_size: int) -> int:
        return matrices(self.projections(hidden_size)) + self.num_heads * self.head_dim

    def states(self) -> tuple[State, ...]:
        return (State(self.num_heads, self.head_dim**2),)


class Mamba2(BaseMixer, frozen=True, kw_only=True, tag="mamba2"):
    """A state-space layer (arXiv 2405.21060): a state of head_dim × state_size per head, after a
    short convolution of the inputs and of the state's input and output maps, which `num_groups`
    groups of heads share."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    conv_bias: bool = True
    bias: bool = False

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def in_size(self) -> int:
        """Width of the input projection: gate, convolved inputs, and a step per head."""
        return self.inner_size + self.conv_size + self.num_heads

    def projections(self, hidden_size: int) -> tuple[Projection, ...]:
        """Gate, inputs and a step per head, and each group's maps, in; the heads' outputs out."""
        inside = (
            Part(self.num_heads, 2 * self.head_dim + 1),
            Part(self.num_groups, 2 * self.state_size),
        )
        return (
            Projection("linear_in", inside, whole(hidden_size)),
            Projection("o", (whole(hidden_size),), Part(self.num_heads, self.head_dim)),
        )

    @property
    def label(self) -> str:
        return "mamba-2"

    def num_parameters(self, hidden_size: int) -> int:
        count = (
            matrices(self.projections(hidden_size)) + self.conv_size * self.conv_kernel
        )
        if self.conv_bias:
            count += self.conv_size
        if self.bias:
            count += self.in_size + hidden_size
        # decay, skip and step's bias; norm
        return count + 3 * self.num_heads + self.inner_size

    def states(self) -> tuple[State, ...]:
        conv = (
            self.inner_size // self.num_groups + 2 * self.state_size
        ) * self.conv_kernel
        recurrent = self.num_heads // self.num_groups * self.head_dim * self.state_size
        return (State(self.num_groups, recurrent, conv),)


Mixer = (
    Attention
    | LatentAttention
    | GatedDeltaNet
    | KimiDeltaAttention
    | LightningAttention
    | Mamba2
)
