"""The subject of a prediction: a model, its draft, the device, the engine, their number formats and
the sampling.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from magicdec.counts import Array
from magicdec.errors import ConfigError
from magicdec.perfmodel.kernels.op import Where
from magicdec.perfmodel.kernels.profile import HardwareProfile, load_hardware
from magicdec.specs.attention_kernels import AttentionPath, attention_path, layers_of
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import EngineProfile, load_engine
from magicdec.specs.formats import format_name
from magicdec.specs.model import ModelSpec
from magicdec.specs.parallel import TENSOR_PARALLEL, Parallelism
from magicdec.specs.precision import BF16, Precision
from magicdec.specs.speculation import (
    AUTOREGRESSIVE,
    SamplingSpec,
    SpeculationSpec,
    draft_model_name,
)

AT_TEMPERATURE_ONE = SamplingSpec(temperature=1.0)


@dataclass(frozen=True, kw_only=True)
class ModelSetup:
    """A model with its draft on an engine: what it holds and reads does not depend on the
    device."""

    model: ModelSpec
    engine: EngineProfile
    speculation: SpeculationSpec = AUTOREGRESSIVE
    draft_model: ModelSpec | None = None
    sampling: SamplingSpec = AT_TEMPERATURE_ONE
    precision: Precision = BF16
    draft_precision: Precision | None = None
    spread: Parallelism = TENSOR_PARALLEL

    def __post_init__(self) -> None:
        name = draft_model_name(self.speculation.draft)
        if name is None or self.speculation.draft_method == "none":
            return
        if self.draft_model is None:
            raise ConfigError(f"draft {name} needs the draft's model")


def precision_of(
    model: ModelSpec,
    hardware: HardwareProfile,
    *,
    weight_dtype: str | None = None,
    kv_dtype: str | None = None,
) -> Precision:
    """The requested number formats, completed by defaults: on a GPU the formats that the checkpoint
    is published in, else bf16, or fp16 on a device without bf16; on a CPU fp32, to which weights are
    widened. torch's and engines' names (float32, awq) are accepted too."""
    weights = "bf16"
    kv = "bf16"
    if hardware.kind == "cpu":
        weights = "fp32"
        kv = "fp32"
    elif model.quantization is not None:
        weights = model.quantization.weight_dtype
        kv = model.quantization.kv_dtype or kv
    instead = {}
    if not hardware.has_bf16:
        instead = {"bf16": "fp16"}
    weights = format_name(weight_dtype or weights)
    kv = format_name(kv_dtype or kv)
    return Precision(
        weight_dtype=instead.get(weights, weights), kv_dtype=instead.get(kv, kv)
    )


@dataclass(frozen=True, kw_only=True)
class Setup(ModelSetup):
    """Everything about a configuration but its numbers of sequences, tokens and ranks."""

    hardware: HardwareProfile
    kv_link_bytes_per_s: float | None = None
    """Rate per device at which keys and values of prompts arrive that were prefilled elsewhere.
    None: prompts are prefilled here.
    """

    @classmethod
    def of(
        cls,
        model: str | ModelSpec,
        hardware: str | HardwareProfile,
        engine: str | EngineProfile,
        speculation: SpeculationSpec = AUTOREGRESSIVE,
        *,
        weight_dtype: str | None = None,
        kv_dtype: str | None = None,
        **more: Any,
    ) -> Setup:
        """A setup from names or specs: formats by `precision_of`, the draft's model by its name,
        `more` fields as they are. Raises ConfigError for a name that is not known."""
        if not isinstance(model, ModelSpec):
            model = load_model_spec(model)
        if not isinstance(hardware, HardwareProfile):
            hardware = load_hardware(hardware)
        if not isinstance(engine, EngineProfile):
            engine = load_engine(engine)
        draft_model = None
        draft = draft_model_name(speculation.draft)
        if draft is not None:
            draft_model = load_model_spec(draft)
        return cls(
            model=model,
            hardware=hardware,
            engine=engine,
            speculation=speculation,
            draft_model=draft_model,
            precision=precision_of(
                model, hardware, weight_dtype=weight_dtype, kv_dtype=kv_dtype
            ),
            **more,
        )

    @property
    def at(self) -> Where:
        """Device, engine and formats of the target's operations."""
        return Where(self.hardware, self.engine, self.precision)

    def attention_paths(self, *, is_draft: bool = False) -> list[AttentionPath]:
        """The kernels of the layers of attention over caches, the target's or the draft's network's;
        heads alone run in the kernels that are chosen here."""
        engine = self.engine
        model = self.model
        precision = self.precision
        if is_draft:
            engine = engine.of_draft
            model = self.draft_model or model
            precision = self.draft_precision or precision
        layers = layers_of(model, precision.kv_dtype)
        return [attention_path(engine, self.hardware, layer) for layer in layers]

    @property
    def outside_graphs(self) -> float:
        """The chance that an attention kernel, the target's or a draft's network's, keeps verification
        and drafting out of captured graphs."""
        paths = self.attention_paths()
        if draft_model_name(self.speculation.draft) is not None:
            paths += self.attention_paths(is_draft=True)
        return max((path.loses_graphs for path in paths), default=0.0)


class Cached(NamedTuple):
    """The cached beginning of each prompt, as a number of tokens or a share."""

    tokens: float = 0.0
    share: float = 0.0
    unit_tokens: Any = 1.0
    """Granularity of hits, in tokens."""
    dropped_units: Any = 0.0
    """Units at the end of each hit that are recomputed."""

    def of(self, prompt_len: Any) -> Array:
        """Cached tokens of prompts with these lengths. The last token is always computed."""
        prompt = np.asarray(prompt_len, dtype=np.float64)
        wanted = np.maximum(self.tokens, np.floor(self.share * prompt))
        matched = np.minimum(wanted, np.maximum(prompt - 1.0, 0.0))
        units = np.floor(matched / self.unit_tokens) - self.dropped_units
        return np.asarray(np.maximum(units, 0.0) * self.unit_tokens)

    @property
    def is_any(self) -> bool:
        return bool(self.tokens or self.share)

    def seconds_of_rest(
        self, prompt_len: Any, *, whole_s: Array, cached_s: Array, rest_s: Array
    ) -> Array:
        """Time of prompts without what is cached of them, from that of whole prompts, of prompts as
        long as the cached part and of prompts as long as the rest: the rest attends to the cached
        tokens, and is at least a prompt of its own length.
        """
        left_out = np.where(self.of(prompt_len) > 0.0, cached_s, 0.0)
        return np.maximum(whole_s - left_out, rest_s)


NOT_CACHED = Cached()


def slots_of(budget: Any) -> Array:
    """A draft budget, or several, as an array over points. The whole cache (None) is infinity there,
    so that a step reads the least of its budget and the cache's length.
    """
    if budget is None:
        budget = math.inf
    elif isinstance(budget, (list, tuple)):
        budget = [math.inf if slots is None else slots for slots in budget]
    return np.asarray(budget, dtype=np.float64)


def budgets_of(slots: Iterable[float]) -> list[int | None]:
    """The draft budgets of an array over points; None: the whole cache."""
    return [None if math.isinf(each) else int(each) for each in slots]


@dataclass(frozen=True, kw_only=True)
class Points:
    """Configurations of one setup: numbers, or arrays that broadcast together (rows of one length,
    or axes).
    """

    batch: Any
    context: Any
    """The prompt's length. A step is the mean one, at context + gen_len / 2."""
    tp: Any = 1
    budget: Any = None
    """KV slots of its cache that a draft step reads; None: the whole cache (see `slots_of`)."""
    gamma: Any = None
    """None: the speculation's."""
    gen_len: Any = 0.0
    max_len: Any = None
    """Tokens per sequence that memory must hold; None: context + gen_len."""
    cached: Cached = NOT_CACHED
    is_grid: bool = False
    """Whether these are axes: a budget that is not below its context is then marked as invalid, not
    cut to it, so that no term depends on axes that it need not."""

    @classmethod
    def grid(
        cls,
        *,
        batch: Any,
        context: Any,
        tp: Any = (1,),
        budget: Sequence[int | None] = (None,),
        gamma: Any = (0,),
        gen_len: float = 0.0,
        max_len: Any = None,
        cached: Cached = NOT_CACHED,
    ) -> Points:
        """All combinations of five axes, in this order; `max_len` goes with the batch."""

        def axis(values: Any, position: int) -> Any:
            shape = [1] * 5
            shape[position] = -1
            return np.asarray(values).reshape(shape)

        if max_len is not None:
            max_len = axis(max_len, 0)
        return cls(
            batch=axis(batch, 0),
            context=axis(context, 1),
            tp=axis(tp, 2),
            budget=axis(slots_of(budget), 3),
            gamma=axis(gamma, 4),
            gen_len=gen_len,
            max_len=max_len,
            cached=cached,
            is_grid=True,
        )

    @cached_property
    def shape(self) -> tuple[int, ...]:
        given = (
            self.batch,
            self.context,
            self.tp,
            self.budget,
            self.gamma,
            self.gen_len,
        )
        return np.broadcast_shapes(
            *(np.shape(each) for each in given if each is not None)
        )


def microbatch(setup: Setup, batch: Any) -> Array:
    """Sequences of the fullest group of ranks in one microbatch."""
    each = np.asarray(batch, dtype=np.float64)
    if setup.spread.groups > 1:
        return np.ceil(each / setup.spread.groups)
    return each
