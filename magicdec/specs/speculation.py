"""Speculation: the draft, its cache, the number of drafted tokens, and how tokens are sampled."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from magicdec.errors import ConfigError, unknown_choice
from magicdec.files import converted, read_json
from magicdec.naming import METHODS
from magicdec.units import parse_share

DRAFT_METHODS: tuple[str, ...] = tuple(METHODS)
if TYPE_CHECKING:
    DraftMethod = str
else:
    DraftMethod = Literal[DRAFT_METHODS]  # the names that a decoded field may have


def _of_sort(*sorts: str) -> tuple[DraftMethod, ...]:
    return tuple(name for name in DRAFT_METHODS if METHODS[name].sort in sorts)


LOOKUP_METHODS = _of_sort("lookup")
"""Drafts looked up in the text so far, on the host, without a network."""
PARALLEL_METHODS = _of_sort("parallel")
"""Heads that propose all tokens of a block in one pass over masked positions."""
HEAD_METHODS = _of_sort("head", "parallel")
"""Heads trained on the target's hidden states."""
SPARSE_METHODS = _of_sort("sparse")
"""Methods whose draft reads `draft_budget` slots of the cache."""
MODEL_METHODS: tuple[DraftMethod, ...] = ("streamingllm", "full")
"""Methods by which our runtime runs a draft model."""
NOT_RUN: tuple[DraftMethod, ...] = tuple(
    name for name in DRAFT_METHODS if not METHODS[name].is_run
)
"""Methods that are planned for and not run."""
OWN_METHOD = _of_sort("lookup", "head", "parallel")
"""Drafts whose name is their method."""
SELF = "self"
NAMED_DRAFTS = (SELF, "none", *OWN_METHOD)
"""Drafts that are no model."""
ANY_MODEL = "model"
"""A draft model, in a `draft_kind`."""
DRAFT_KINDS = (
    *(
        f"{drafter}/{method}"
        for drafter in (SELF, ANY_MODEL)
        for method in (*SPARSE_METHODS, "full")
    ),
    *OWN_METHOD,
)
MAX_GAMMA = 32
LEAST_BUDGET = 5
"""Slots of the smallest budget: four sinks and one token."""


def draft_kind(draft: str, method: str) -> str:
    """The kind of a draft, as engines list it: "self/streamingllm", "model/full" (any draft model),
    "ngram", ...
    """
    if method in OWN_METHOD:
        return method
    return f"{SELF if draft == SELF else ANY_MODEL}/{method}"


def budget_at(asked: int | str, context: int) -> int:
    """The slots of a draft budget at a context, of which a share like "7%" is a part: at least the
    sinks and one more. Raises ConfigError for text that is no share.
    """
    if isinstance(asked, int):
        return asked
    share = parse_share(asked)
    if share is None:
        raise ConfigError(f"draft budget must be a share like 7%, not '{asked}'")
    return max(round(share * context), LEAST_BUDGET)


def draft_model_name(draft: str) -> str | None:
    """The model that drafts, where it is another one than the target."""
    if draft in NAMED_DRAFTS:
        return None
    return draft


class HeadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A trained head as its config.json has it."""

    method: DraftMethod = "eagle3"
    num_layers: int = 1
    window: int | None = None
    """Tokens over which all its layers attend; None: some attend to all."""
    vocab_size: int | None = None
    """Tokens that it can propose; None: its target's."""
    max_positions: int | None = None
    """Bound on the tokens of the texts that it was trained on; None: not said."""
    rotary_base: float | None = None
    """Base of its rotary positions; None: not said."""
    hidden_size: int | None = None
    """The target's, where it is said."""
    target_vocab_size: int | None = None
    """The target's vocabulary, where it is said."""
    most_drafts: int | None = None
    """Tokens that it proposes at most in a step, by the block that it was trained on; None: any
    number, or not said."""
    width: int | None = None
    """Intermediate numbers of its feed-forward; None: its target's."""
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    """Heads of its attention; None: its target's."""


PUBLISHED_HEADS = {
    name: HeadSpec(
        num_layers=method.head_layers,
        window=method.head_window,
        vocab_size=method.head_vocab_size,
        most_drafts=method.head_most_drafts,
    )
    for name, method in METHODS.items()
    if (method.head_layers, method.head_vocab_size) != (1, None)
}
"""Usual published heads of these methods. Heads of other methods have one layer and the target's
vocabulary."""


DEFAULT_ROTARY_BASE = 10_000.0


class _HeadConfig(msgspec.Struct):
    """The keys of a head's config.json, or of its layers' part (vLLM's speculators)."""

    architectures: list[str] = []
    model_type: str = ""
    speculators_model_type: str = ""
    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    max_position_embeddings: Annotated[int, msgspec.Meta(ge=1)] | None = None
    sliding_window: Annotated[int, msgspec.Meta(ge=1)] | None = None
    use_sliding_window: bool = True
    layer_types: list[str] | None = None
    vocab_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    draft_vocab_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    hidden_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    target_hidden_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    block_size: Annotated[int, msgspec.Meta(ge=2)] | None = None
    sample_from_anchor: bool | None = None
    intermediate_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    num_attention_heads: Annotated[int, msgspec.Meta(ge=1)] | None = None
    num_key_value_heads: Annotated[int, msgspec.Meta(ge=1)] | None = None
    head_dim: Annotated[int, msgspec.Meta(ge=1)] | None = None
    rope_theta: float | None = None
    rope_parameters: dict[str, Any] | None = None


HEAD_SIGNS: dict[str, DraftMethod] = {
    name.replace("-", ""): name for name in sorted(HEAD_METHODS, key=len, reverse=True)
}
"""Parts of the names by which a configuration says that it is a head's, the more special first."""


def head_method(names: Iterable[str]) -> DraftMethod | None:
    """The kind of head by a configuration's names. None: they name no head."""
    named = " ".join(names).lower().replace("-", "")
    for sign, method in HEAD_SIGNS.items():
        if sign in named:
            return method
    return None


def is_head_directory(path: str) -> bool:
    """Whether a draft argument is the directory of a trained head."""
    file = Path(path) / "config.json"
    if not file.is_file():
        return False
    document = read_json(file, decode=json.loads)
    if not isinstance(document, dict):
        return False
    names = [document.get("model_type"), document.get("speculators_model_type")]
    names += document.get("architectures") or []
    return head_method(map(str, names)) is not None


def load_head(path: Path, *, method: DraftMethod | None = None) -> HeadSpec:
    """The head of a config.json or its directory. `method` names its kind if the file does not.
    Raises ConfigError for an unknown kind."""
    file = path
    if path.is_dir():
        file = path / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"no configuration of a head at {path}: give its config.json or its directory"
        )
    read = _read_head(file)
    stated = head_method(
        (*read.architectures, read.model_type, read.speculators_model_type)
    )
    kind = stated or method
    if kind is None:
        raise ConfigError(
            f"{file} is of no trained head that is known ({', '.join(HEAD_SIGNS.values())})"
        )
    if method is not None and kind != method:
        raise ConfigError(
            f"{file} is of a head of {kind}, not of {method}; use --draft {kind}"
        )
    num_layers = read.num_hidden_layers
    if kind == "mtp":
        num_layers = 1
    return HeadSpec(
        method=kind,
        num_layers=num_layers,
        window=_window(read),
        vocab_size=read.draft_vocab_size or read.vocab_size,
        max_positions=read.max_position_embeddings,
        rotary_base=_rotary_base(read),
        hidden_size=read.target_hidden_size or read.hidden_size,
        target_vocab_size=read.vocab_size,
        most_drafts=_most_drafts(read, kind),
        width=read.intermediate_size,
        num_heads=read.num_attention_heads,
        num_kv_heads=read.num_key_value_heads or read.num_attention_heads,
        head_dim=_head_dim(read),
    )


def _read_head(file: Path) -> _HeadConfig:
    """A head's configuration, with the keys of an inner one that the outer one does not have."""
    document = read_json(file)
    if isinstance(document, dict):
        inner = document.get("transformer_layer_config")
        if isinstance(inner, dict):
            document = inner | document
    return converted(document, _HeadConfig, where=str(file))


def _most_drafts(read: _HeadConfig, method: DraftMethod) -> int | None:
    """Tokens of a parallel head's block, whose first position is the pending token's: it proposes a
    token too in DSpark, unless the configuration says otherwise."""
    if method not in PARALLEL_METHODS or read.block_size is None:
        return None
    samples_anchor = read.sample_from_anchor
    if samples_anchor is None:
        samples_anchor = method == "dspark"
    if samples_anchor:
        return read.block_size
    return read.block_size - 1


def _window(read: _HeadConfig) -> int | None:
    """The window of a head all of whose layers have one."""
    has_other_layers = not set(read.layer_types or ()) <= {"sliding_attention"}
    if has_other_layers or not read.use_sliding_window:
        return None
    return read.sliding_window


def _rotary_base(read: _HeadConfig) -> float:
    """The base of a head's rotary positions; Llama's default where its configuration names none."""
    stated = (read.rope_parameters or {}).get("rope_theta")
    if isinstance(stated, (int, float)):
        return float(stated)
    return read.rope_theta or DEFAULT_ROTARY_BASE


def _head_dim(read: _HeadConfig) -> int | None:
    if read.head_dim is not None:
        return read.head_dim
    if not read.hidden_size or not read.num_attention_heads:
        return None
    return read.hidden_size // read.num_attention_heads


class TreeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of drafts that branch: each of `num_steps` draft passes proposes the `top_k` likeliest
    next tokens, and the likeliest of all, as many as gamma, are verified."""

    top_k: Annotated[int, msgspec.Meta(ge=2)]
    num_steps: Annotated[int, msgspec.Meta(ge=1)]


class SpeculationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A draft and how far it looks ahead. `gamma` = 0 is autoregressive decoding. `draft` is
    "none", "self" (the target drafts for itself), "ngram", or a model's name. `draft_budget` counts
    the KV slots per sequence and KV head that one draft step reads: sinks + selected + recent,
    generated tokens included, the drafts of the current block excluded; None means the full cache."""

    draft: str = "none"
    draft_method: DraftMethod = "none"
    draft_budget: int | None = None
    gamma: int = 0
    num_sink_tokens: int = 4
    observation_window: int = 32
    pooling_kernel: int = 5
    draft_tp_size: int | None = None
    head: HeadSpec | None = None
    """The trained head. None: the usual published head."""
    checkpoint: str | None = None
    """The directory of the head's weights; None: they are part of the target's checkpoint."""
    shares_vocabulary: bool = False
    """Whether an EAGLE-3 head proposes tokens of the whole vocabulary, by the target's own output
    layer.
    """
    tree: TreeSpec | None = None
    """None: drafts are chains."""

    def __post_init__(self) -> None:
        if self.draft_method not in DRAFT_METHODS:
            raise unknown_choice("draft method", self.draft_method, DRAFT_METHODS)
        if not 0 <= self.gamma <= MAX_GAMMA:
            raise ConfigError(
                f"gamma must be between 0 and {MAX_GAMMA}, not {self.gamma}"
            )
        if self.draft_budget is not None and self.draft_budget <= self.num_sink_tokens:
            raise ConfigError(
                f"draft budget {self.draft_budget} must exceed the {self.num_sink_tokens} sink "
                "tokens it includes"
            )
        if self.draft_method in SPARSE_METHODS and self.draft_budget is None:
            raise ConfigError(f"draft method {self.draft_method} needs a draft budget")

    @property
    def num_recent_slots(self) -> int | None:
        """Slots of the budget for the latest tokens, a verified block's among them. None: the
        method reserves no such slots."""
        if self.draft_budget is None:
            return None
        if self.draft_method == "streamingllm":
            return self.draft_budget - self.num_sink_tokens
        if self.draft_method == "snapkv":
            return self.draft_budget - self.num_selected
        return None

    @property
    def num_selected(self) -> int:
        """SnapKV's slots for tokens selected from the prompt: half of the budget."""
        assert self.draft_budget is not None
        return self.draft_budget // 2

    def check_block_fits(self) -> None:
        """Raises ConfigError when a block of gamma + 1 tokens exceeds the slots where its accepted
        ones are kept.
        """
        if self.draft_budget is not None and self.num_recent_slots is not None:
            check_gamma(
                self.gamma, budget=self.draft_budget, num_recent=self.num_recent_slots
            )

    @property
    def is_autoregressive(self) -> bool:
        return self.gamma == 0 or self.draft_method == "none"

    @property
    def is_self(self) -> bool:
        return self.draft == SELF


AUTOREGRESSIVE = SpeculationSpec()


def check_gamma(gamma: int, *, budget: int, num_recent: int) -> None:
    """Raises ConfigError when a block would not fit into the slots where its accepted tokens are to
    be kept.
    """
    if gamma + 1 > num_recent:
        raise ConfigError(
            f"draft budget {budget} leaves {num_recent} slots for recent tokens, too few for gamma "
            f"{gamma}; use a larger budget, or gamma at most {num_recent - 1}"
        )


class SamplingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. `temperature` 0 is greedy."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise ConfigError(
                f"temperature must be between 0 and 100, not {self.temperature}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top-k must be at least 1, not {self.top_k}")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top-p must be above 0 and at most 1, not {self.top_p}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0
