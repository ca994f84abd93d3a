"""The subject of a prediction: a model, its draft, the device, the engine, their number formats and the sampling."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.errors import ConfigError
from magicdec.perfmodel.kernels.attention import AttentionCurve
from magicdec.perfmodel.kernels.op import Where
from magicdec.perfmodel.kernels.profile import HardwareProfile, load_hardware
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import EngineProfile, load_engine
from magicdec.specs.mixers import Attention
from magicdec.specs.model import ModelSpec
from magicdec.specs.parallel import TENSOR_PARALLEL, Parallelism, valid_tp_sizes
from magicdec.specs.precision import BF16, PROFILE_DTYPES, Precision
from magicdec.specs.speculation import (
    AUTOREGRESSIVE,
    HEAD_METHODS,
    LOOKUP_METHODS,
    PUBLISHED_HEADS,
    SPARSE_METHODS,
    HeadSpec,
    SamplingSpec,
    SpeculationSpec,
    draft_model_name,
)

AT_TEMPERATURE_ONE = SamplingSpec(temperature=1.0)
DraftKind = Literal["none", "self", "standalone", "ngram", "eagle"]


@dataclass(frozen=True, kw_only=True)
class ModelSetup:
    """A model with its draft on an engine: what it holds and reads does not depend on the device."""

    model: ModelSpec
    engine: EngineProfile
    speculation: SpeculationSpec = AUTOREGRESSIVE
    draft_model: ModelSpec | None = None
    sampling: SamplingSpec = AT_TEMPERATURE_ONE
    precision: Precision = BF16
    draft_precision: Precision | None = None
    spread: Parallelism = TENSOR_PARALLEL

    def __post_init__(self) -> None:
        if self.kind == "standalone":
            if self.draft_model is None:
                raise ConfigError(f"draft {self.speculation.draft} needs the draft's model")
            if self.draft_model.vocab_size != self.model.vocab_size:
                raise ConfigError(
                    f"draft {self.draft_model.name} has a vocabulary of {self.draft_model.vocab_size}, "
                    f"{self.model.name} one of {self.model.vocab_size}: a draft needs its target's vocabulary"
                )

    @property
    def kind(self) -> DraftKind:
        method, draft = self.speculation.draft_method, self.speculation.draft
        if method == "none" or draft == "none":
            return "none"
        if method in HEAD_METHODS:
            return "eagle"
        if method in LOOKUP_METHODS:
            return "ngram"
        return "self" if self.speculation.is_self else "standalone"

    @property
    def drafter(self) -> ModelSpec:
        """The network that drafts: the target itself, one of its layers with its own head input, or another model."""
        if self.speculation.draft_method == "mtp":
            return self.model.prediction_head
        if self.kind == "eagle":
            return _as_trained(self.model.eagle_head, self.head, shares_vocabulary=self.speculation.shares_vocabulary)
        return self.draft_model if self.kind == "standalone" and self.draft_model is not None else self.model

    @property
    def head(self) -> HeadSpec:
        """The trained head, or one as they are usually published."""
        return self.speculation.head or PUBLISHED_HEADS.get(self.speculation.draft_method, HeadSpec())

    @property
    def draft_tp_size(self) -> int | None:
        """Ranks that the draft is confined to: as the speculation says, or as the runtime does it; None: all."""
        if self.speculation.draft_tp_size is not None or self.kind != "standalone":
            return self.speculation.draft_tp_size
        return self.engine.standalone_draft_tp_size

    @property
    def draft_spread(self) -> Parallelism:
        """Where the draft runs: the target itself in all stages, any other on the last."""
        return self.spread if self.kind in ("self", "none") else dataclasses.replace(self.spread, pp=1)

    @property
    def drafting_precision(self) -> Precision:
        """The draft's formats; heads that are trained for a narrow target are in 16 bits, but for those that were
        published with it."""
        if self.draft_precision is None and self.kind == "eagle" and self.speculation.draft_method != "mtp":
            return self.precision.tables
        return self.draft_precision or self.precision

    @property
    def keeps_draft_cache(self) -> bool:
        """Whether a self-draft has KV of its own, besides the target's."""
        in_place = self.speculation.draft_method == "streamingllm" and self.engine.streaming_in_place
        return self.kind == "self" and self.speculation.draft_method in SPARSE_METHODS and not in_place


def _as_trained(head: ModelSpec, told: HeadSpec, *, shares_vocabulary: bool) -> ModelSpec:
    """A model's head with the layers, window and vocabulary that its publisher gave it."""
    layer, rows = head.layers[0], head.vocab_size
    if told.window is not None and isinstance(layer.mixer, Attention) and layer.mixer.mask == "full":
        mixer = msgspec.structs.replace(layer.mixer, mask="window", span=told.window)
        layer = msgspec.structs.replace(layer, mixer=mixer)
    if told.vocab_size is not None and not shares_vocabulary:
        rows = min(rows, told.vocab_size)
    return msgspec.structs.replace(head, layers=(layer,) * told.num_layers, vocab_size=rows)


def precision_of(
    model: ModelSpec, hardware: HardwareProfile, *, weight_dtype: str | None = None, kv_dtype: str | None = None
) -> Precision:
    """The number formats that are meant where some are not given: those that the checkpoint is published in, else bf16;
    on a CPU fp32, to which weights are widened. torch's names (float32) are understood too."""
    on_cpu = hardware.kind == "cpu"
    default, published = "fp32" if on_cpu else "bf16", None if on_cpu else model.quantization
    weights = weight_dtype or (published.weight_dtype if published else default)
    kv = kv_dtype or (published and published.kv_dtype) or default
    return Precision(weight_dtype=PROFILE_DTYPES.get(weights, weights), kv_dtype=PROFILE_DTYPES.get(kv, kv))


def draft_tp(setup: ModelSetup, tp_size: Any) -> Array:
    """The ranks that the draft runs on: all, or as many as was said; a draft model that these do not split evenly, on
    the most that do."""
    tp = np.asarray(tp_size, dtype=np.float64)
    chosen = setup.draft_tp_size
    ranks: Array = tp if chosen is None else np.minimum(tp, float(chosen))
    if setup.kind == "standalone" and ranks.size and ranks.max() > 1:
        valid = valid_tp_sizes(setup.drafter, int(ranks.max()), setup.engine.vocabulary_multiple)
        sizes = np.asarray(valid, dtype=np.float64)
        ranks = sizes[np.searchsorted(sizes, ranks, side="right") - 1]
    return ranks


def draft_kv_tokens(setup: ModelSetup, kv_len: Any, budget: Any) -> Array:
    """Cached tokens that one draft step reads per sequence: the budget, or all where the cache is full or shorter."""
    tokens: Array = np.asarray(kv_len, dtype=np.float64)
    if setup.speculation.draft_method in SPARSE_METHODS and budget is not None:
        tokens = np.minimum(np.asarray(budget, dtype=np.float64), tokens)
    return tokens


@dataclass(frozen=True, kw_only=True)
class Setup(ModelSetup):
    """Everything about a configuration but its numbers of sequences, tokens and ranks."""

    hardware: HardwareProfile

    @classmethod
    def of(
        cls, model: str | ModelSpec, hardware: str | HardwareProfile, engine: str | EngineProfile,
        speculation: SpeculationSpec = AUTOREGRESSIVE, *, weight_dtype: str | None = None, kv_dtype: str | None = None,
        **more: Any,
    ) -> Setup:  # fmt: skip
        """A setup from names or specs: formats by `precision_of`, the draft's model by its name, `more` fields as
        they are. Raises ConfigError for a name that is not known, or a draft of another vocabulary."""
        model = model if isinstance(model, ModelSpec) else load_model_spec(model)
        hardware = hardware if isinstance(hardware, HardwareProfile) else load_hardware(hardware)
        draft = draft_model_name(speculation.draft)
        return cls(
            model=model, hardware=hardware, engine=engine if isinstance(engine, EngineProfile) else load_engine(engine),
            speculation=speculation, draft_model=None if draft is None else load_model_spec(draft),
            precision=precision_of(model, hardware, weight_dtype=weight_dtype, kv_dtype=kv_dtype), **more,
        )  # fmt: skip

    @property
    def at(self) -> Where:
        """Device, engine and formats of the target's operations."""
        return Where(self.hardware, self.engine, self.precision)

    @property
    def drafting_at(self) -> Where:
        """Device, engine and formats of the draft's operations."""
        return Where(self.hardware, self.engine, self.drafting_precision)

    @property
    def leaves_graphs(self) -> bool:
        """Whether the attention kernel keeps verification and drafting out of captured graphs: FlashAttention 2 reads
        no cache in 8 bits, and what takes its place there is captured for one query token only."""
        is_older = AttentionCurve.of(self.hardware).splits == "grouped"
        return self.engine.attention_kernel == "measured" and is_older and self.precision.kv_bytes < 2.0


@dataclass(frozen=True, kw_only=True)
class Points:
    """Configurations of one setup: numbers, or arrays that broadcast together (rows of one length, or axes)."""

    batch: Any
    context: Any
    """The prompt's length. A step is the mean one, at context + gen_len / 2."""
    tp: Any = 1
    budget: Any = None
    """KV slots of a sparse draft; None: the speculation's."""
    gamma: Any = None
    """None: the speculation's."""
    gen_len: Any = 0.0
    max_len: Any = None
    """Tokens per sequence that memory must hold; None: context + gen_len."""
    is_grid: bool = False
    """Whether these are axes: a budget that is not below its context is then marked as invalid, not cut to it, so that
    no term depends on axes that it need not."""

    @classmethod
    def grid(
        cls, *, batch: Any, context: Any, tp: Any = (1,), budget: Any = (0,), gamma: Any = (0,), gen_len: float = 0.0,
        max_len: Any = None,
    ) -> Points:  # fmt: skip
        """All combinations of five axes, in this order; `max_len` goes with the batch."""

        def axis(values: Any, position: int) -> Any:
            return np.asarray(values).reshape([-1 if each == position else 1 for each in range(5)])

        return cls(
            batch=axis(batch, 0), context=axis(context, 1), tp=axis(tp, 2), budget=axis(budget, 3),
            gamma=axis(gamma, 4), gen_len=gen_len, max_len=None if max_len is None else axis(max_len, 0), is_grid=True,
        )  # fmt: skip

    @property
    def shape(self) -> tuple[int, ...]:
        given = (self.batch, self.context, self.tp, self.budget, self.gamma, self.gen_len)
        return np.broadcast_shapes(*(np.shape(each) for each in given if each is not None))


def microbatch(setup: Setup, batch: Any) -> Array:
    """Sequences of the fullest group of ranks in one microbatch."""
    each = np.asarray(batch, dtype=np.float64)
    return np.ceil(each / setup.spread.groups) if setup.spread.groups > 1 else each
