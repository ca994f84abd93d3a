"""What is asked of the planner, and what that means on one device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from magicdec.errors import ConfigError
from magicdec.perfmodel import memory
from magicdec.perfmodel.acceptance import AcceptanceProfile, constant_profile
from magicdec.perfmodel.cost import Array
from magicdec.perfmodel.plan.drafts import DraftOption, Wanted
from magicdec.perfmodel.plan.layouts import Asked, Layout, layouts
from magicdec.perfmodel.setup import AT_TEMPERATURE_ONE, Setup, precision_of
from magicdec.specs.engine import DEFAULT_CPU_ENGINE, DEFAULT_ENGINE, EngineProfile, load_engine
from magicdec.specs.hardware import HardwareProfile, load_hardware
from magicdec.specs.model import ModelSpec
from magicdec.specs.parallel import MAX_EP_SIZE, MAX_PP_SIZE, MAX_TP_SIZE, TENSOR_PARALLEL, Parallelism
from magicdec.specs.precision import PROFILE_DTYPES, Precision
from magicdec.specs.speculation import MAX_GAMMA, SamplingSpec
from magicdec.specs.workload import WorkloadSpec

DEFAULT_MAX_GAMMA = 12
DEFAULT_BATCH = 64
MAX_BATCH = 65_536
MAX_CONTEXT = 2**26


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is asked. Names are looked up in the catalogs; None lets the planner choose."""

    model: str | ModelSpec = "llama-3.1-8b"
    hardware: tuple[str | HardwareProfile, ...] = ("a100-sxm-80gb",)
    engine: str | EngineProfile | None = None
    """None: "vllm" on GPUs, "ours" on a CPU."""
    tp_size: int | None = None
    num_gpus: int | None = None
    pp_size: int | None = None
    ep_size: int | None = None
    """Ranks of a stage that whole experts are divided over."""
    dp_attention: bool = False
    """Whether groups of tp ranks hold sequences of their own (tp is 1 unless given)."""
    batch_sizes: tuple[int, ...] = ()
    context_lens: tuple[int, ...] = (32_768,)
    gen_len: int = 0
    gamma: int | None = None
    draft: str | None = None
    draft_method: str | None = None
    draft_budgets: tuple[int, ...] = ()
    draft_tp_size: int | None = None
    sampling: SamplingSpec = AT_TEMPERATURE_ONE
    acceptance_rate: float | tuple[float, ...] | None = None
    """One for every position, or one by position, the last for all further ones."""
    acceptance: tuple[AcceptanceProfile, ...] = ()
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    draft_weight_dtype: str | None = None
    draft_kv_dtype: str | None = None
    tpot_limit_s: float | None = None
    ttft_limit_s: float | None = None
    workload: WorkloadSpec | None = None
    """Lengths of requests; replaces `context_lens` and `gen_len`."""
    price_per_hour_usd: float | None = None
    """Of one device; None: the hardware profile's, where it has one."""

    def __post_init__(self) -> None:
        for what, values, limit in (
            ("batch", self.batch_sizes, MAX_BATCH),
            ("context", self.context_lens, MAX_CONTEXT),
            ("draft budget", self.draft_budgets, MAX_CONTEXT),
        ):
            for value in values:
                if not 1 <= value <= limit:
                    raise ConfigError(f"{what} must be between 1 and {limit}, not {value}")
        for what, seconds in (("tpot limit", self.tpot_limit_s), ("ttft limit", self.ttft_limit_s)):
            if seconds is not None and not 0 < seconds < float("inf"):
                raise ConfigError(f"the {what} must be above 0, not {seconds}")
        if not self.context_lens or not self.hardware:
            raise ConfigError("a plan needs at least one context length and one device")
        if not 0 <= self.gen_len <= MAX_CONTEXT:
            raise ConfigError(f"gen-len must be between 0 and {MAX_CONTEXT}, not {self.gen_len}")
        if self.gamma is not None and not 0 <= self.gamma <= MAX_GAMMA:
            raise ConfigError(f"gamma must be between 0 and {MAX_GAMMA}, not {self.gamma}")
        if self.num_gpus is not None and not 1 <= self.num_gpus <= 10**6:
            raise ConfigError(f"gpus must be at least 1, not {self.num_gpus}")
        for what, size, most in (("pp", self.pp_size, MAX_PP_SIZE), ("ep", self.ep_size, MAX_EP_SIZE)):
            if size is not None and not 1 <= size <= most:
                raise ConfigError(f"{what} must be between 1 and {most}, not {size}")
        if self.draft_tp_size is not None and not 1 <= self.draft_tp_size <= MAX_TP_SIZE:
            raise ConfigError(f"draft tp must be between 1 and {MAX_TP_SIZE}, not {self.draft_tp_size}")
        price = self.price_per_hour_usd
        if price is not None and not 0 < price <= 1e6:
            raise ConfigError(f"the price per hour must be above 0, not {price}")
        if self.acceptance_rate is not None:
            constant_profile(self.acceptance_rate)  # a rate out of range is refused here


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """What a slot of the batch holds: a prompt, on average over time half of `growth` more, and at most `max_len`."""

    prompt_len: float
    growth: float
    workload: WorkloadSpec | None = None

    @property
    def output_len(self) -> float:
        """Tokens that a request generates, on average; 0: not said."""
        return self.growth if self.workload is None else self.workload.mean_gen_len

    @property
    def prompts(self) -> list[tuple[float, float]]:
        """(length, share) of a mix of requests; none: all are as long as the context."""
        return [] if self.workload is None else self.workload.prompt_groups()

    def max_len(self, batch: Any) -> Array:
        """Tokens per slot that memory must hold for a batch: all generated, or the tail of a mix of requests."""
        batch = np.asarray(batch, dtype=np.float64)
        if self.workload is None:
            return np.full(batch.shape, self.prompt_len + self.growth)
        tail: Array = np.vectorize(self.workload.tail_len, otypes=[np.float64])(batch)
        return tail


def lengths_of(request: PlanRequest) -> list[Lengths]:
    """The lengths of each case on a device: one for each context, or one of a workload."""
    workload = request.workload
    if workload is None:
        return [Lengths(prompt_len=float(c), growth=float(request.gen_len)) for c in request.context_lens]
    prompt = workload.mean_prompt_len
    return [Lengths(prompt_len=prompt, growth=2.0 * (workload.mean_kv_len - prompt), workload=workload)]


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device's share of a request, resolved."""

    request: PlanRequest
    model: ModelSpec
    hardware: HardwareProfile
    engine: EngineProfile
    tp_sizes: tuple[int, ...]
    precision: Precision
    searches_batch: bool
    options: tuple[DraftOption, ...] = ()
    spread: Parallelism = TENSOR_PARALLEL

    @property
    def spread_name(self) -> str:
        """For messages: nothing for tensor parallelism alone."""
        parts = [f"{name} {size}" for name, size in (("pp", self.spread.pp), ("dp", self.spread.dp)) if size > 1]
        return f" ({', '.join(parts)})" if parts else ""

    def setup(self, option: DraftOption | None) -> Setup:
        common: dict[str, Any] = {
            "model": self.model,
            "hardware": self.hardware,
            "engine": self.engine,
            "sampling": self.request.sampling,
            "precision": self.precision,
            "spread": self.spread,
        }
        if option is None:
            return Setup(**common)
        setup = Setup(**common, speculation=option.speculation(), draft_model=option.model)
        return replace(setup, draft_precision=self.drafting_precision(setup))

    def drafting_precision(self, setup: Setup) -> Precision:
        """The draft's formats: those that were asked for, else the usual ones of such a draft."""
        given = {"weight_dtype": self.request.draft_weight_dtype, "kv_dtype": self.request.draft_kv_dtype}
        named = {key: PROFILE_DTYPES.get(dtype, dtype) for key, dtype in given.items() if dtype is not None}
        return msgspec.structs.replace(setup.drafting_precision, **named)

    @property
    def tp(self) -> Array:
        return np.asarray(self.tp_sizes, dtype=np.float64)

    def largest_batches(
        self, lengths: Lengths, *, option: DraftOption | None = None, budget: Any = None, gamma: int = 0
    ) -> Array:
        """The largest batch that fits, per tp size; autoregressive unless a draft is given. Groups of ranks hold as
        many sequences each."""
        setup, held, groups = self.setup(option), lengths.max_len(1.0), self.spread.dp
        capacity = memory.capacity_bytes(self.hardware, self.engine)
        batch = np.ones(len(self.tp_sizes))
        for _ in range(3 if lengths.workload is not None else 1):  # the tail of a batch shrinks as it grows

            def need(count: float, held: Array = held) -> Array:
                return memory.memory_need(
                    setup, batch=count * groups, max_len=held, budget=budget, gamma=gamma, tp_size=self.tp
                ).total_bytes

            batch = groups * memory.largest_batch(need(0.0), need(1.0), capacity)
            held = lengths.max_len(np.maximum(batch, 1.0))
        per_tp: Array = np.broadcast_to(batch, (len(self.tp_sizes),))
        return per_tp

    def gammas_of(self, option: DraftOption | None) -> tuple[int, ...]:
        """The gammas to search: as asked, else as deep as the draft's acceptance is good for; (0,) drafts nothing."""
        if option is None:
            return (0,)
        if self.request.gamma is not None:
            return (self.request.gamma,)
        deepest = option.acceptance.max_gamma if option.acceptance is not None else None
        return tuple(range(1, min(DEFAULT_MAX_GAMMA, deepest or DEFAULT_MAX_GAMMA) + 1))


def wanted_drafts(request: PlanRequest) -> Wanted:
    return Wanted(
        draft=request.draft,
        method=request.draft_method,
        budgets=request.draft_budgets,
        draft_tp_size=request.draft_tp_size,
        profiles=request.acceptance,
        rate=request.acceptance_rate,
        temperature=request.sampling.temperature,
        weight_dtype=request.weight_dtype,
        draft_weight_dtype=request.draft_weight_dtype,
    )


def engine_of(request: PlanRequest, hardware: str | HardwareProfile) -> EngineProfile:
    """The engine that a request means on one device."""
    hw = hardware if isinstance(hardware, HardwareProfile) else load_hardware(hardware)
    engine = request.engine or (DEFAULT_CPU_ENGINE if hw.kind == "cpu" else DEFAULT_ENGINE)
    return engine if isinstance(engine, EngineProfile) else load_engine(engine)


def asked_for(request: PlanRequest) -> Asked:
    """What a request says about how a replica is spread."""
    return Asked(
        tp_size=request.tp_size, pp_size=request.pp_size, ep_size=request.ep_size, dp_attention=request.dp_attention,
        num_gpus=request.num_gpus,
    )  # fmt: skip


def resolve(
    request: PlanRequest,
    model: ModelSpec,
    hardware: str | HardwareProfile,
    options: list[DraftOption],
) -> list[Device]:
    """What a request means on one device, for each way to spread a replica that it compares, the usual one first.

    Raises ConfigError for what cannot be split, or a draft that does not go with the target or the engine.
    """
    hw = hardware if isinstance(hardware, HardwareProfile) else load_hardware(hardware)
    engine = engine_of(request, hw)
    ways = layouts(asked_for(request), model, hw, engine)
    return [_resolved(request, model, hw, engine, options, layout) for layout in ways]


def _resolved(
    request: PlanRequest,
    model: ModelSpec,
    hw: HardwareProfile,
    engine: EngineProfile,
    options: list[DraftOption],
    layout: Layout,
) -> Device:
    """One of them: formats, and whether the batch is to be found."""
    if request.price_per_hour_usd is not None:
        hw = msgspec.structs.replace(hw, price_per_hour_usd=request.price_per_hour_usd)
    if request.tp_size is not None and request.draft_tp_size is not None and request.draft_tp_size > request.tp_size:
        raise ConfigError(f"draft tp {request.draft_tp_size} is more than the target's tp {request.tp_size}")
    if options and engine.draft_on_all_ranks and request.draft_tp_size not in (None, *layout.tp_sizes):
        raise ConfigError(
            f"engine {engine.name} runs a draft on all ranks of its target; leave --draft-tp out, or plan for --engine "
            f"{DEFAULT_CPU_ENGINE}"
        )
    staged = [each for each in options if engine.runs_staged(each.draft, each.method, layout.spread.pp)]
    if request.draft not in (None, "none") and options and not staged and request.pp_size is not None:
        able = ", ".join(engine.staged_drafts) or "no draft"
        raise ConfigError(f"engine {engine.name} runs {able} with pp {request.pp_size}, not {request.draft}")
    limits = (request.tpot_limit_s, request.ttft_limit_s, request.num_gpus, request.workload)
    limited = any(limit is not None for limit in limits)
    device = Device(
        request=request,
        model=model,
        hardware=hw,
        engine=engine,
        tp_sizes=layout.tp_sizes,
        spread=layout.spread,
        precision=precision_of(model, hw, weight_dtype=request.weight_dtype, kv_dtype=request.kv_dtype),
        searches_batch=not request.batch_sizes and limited,
        options=tuple(staged),
    )
    for option in options:
        device.setup(option)  # a draft of another vocabulary is refused here
    return device
