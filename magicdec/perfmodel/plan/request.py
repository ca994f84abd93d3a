"""A plan's request with what its names stand for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.errors import CapacityError, ConfigError, unknown_choice
from magicdec.perfmodel import memory
from magicdec.perfmodel.acceptance import AcceptanceProfile, constant_profile
from magicdec.perfmodel.acceptance.believed import Question
from magicdec.perfmodel.drafting import draft_of
from magicdec.perfmodel.kernels.profile import HardwareProfile, counted, load_hardware
from magicdec.perfmodel.plan.standing import check_ranks, is_known_in_stages
from magicdec.perfmodel.setup import Cached, Setup, precision_of
from magicdec.perfmodel.trees import MAX_TREE
from magicdec.schema.request import Request, check_fields
from magicdec.schema.row import Candidate
from magicdec.specs.attention_kernels import (
    AttentionLayer,
    generation_of,
    known_backends,
    layers_of,
    refusal_of,
)
from magicdec.specs.engine import (
    DEFAULT_CPU_ENGINE,
    DEFAULT_ENGINE,
    EngineProfile,
    load_engine,
)
from magicdec.specs.engine_path import PathOptions
from magicdec.specs.formats import format_name
from magicdec.specs.model import ModelSpec
from magicdec.specs.parallel import (
    TENSOR_PARALLEL,
    Parallelism,
    check_tp,
    largest_tp_at_most,
    spread_for,
    valid_tp_sizes,
)
from magicdec.specs.precision import Precision
from magicdec.specs.rules import Finding, finding
from magicdec.specs.speculation import (
    MAX_GAMMA,
    DraftMethod,
    HeadSpec,
    SamplingSpec,
    SpeculationSpec,
    TreeSpec,
)
from magicdec.specs.workload import WorkloadSpec
from magicdec.units import GIGA


class PlanRequest(Request, frozen=True, kw_only=True):
    """A request that may hold specs and profiles in place of names. Raises ConfigError for what is
    out of range.
    """

    # the ignored ones widen the document's plain types
    model: str | ModelSpec = "llama-3.1-8b"  # type: ignore[assignment]
    hardware: tuple[str | HardwareProfile, ...] = ("a100-sxm-80gb",)  # type: ignore[assignment]
    engine: str | EngineProfile | None = None  # type: ignore[assignment]
    """The engine; None: "vllm" on GPUs, "ours" on a CPU."""
    acceptance: tuple[AcceptanceProfile, ...] = ()  # type: ignore[assignment]
    workload: WorkloadSpec | None = None
    """Lengths of requests; replaces `context_lens` and `gen_len`."""
    tree: TreeSpec | None = None
    """The shape of a head's drafts that branch; None: chains."""
    settings: frozenset[str] = frozenset()
    """Options, keys and variables that the engine is given besides."""

    def __post_init__(self) -> None:
        check_fields(self)
        most = MAX_GAMMA if self.tree is None else MAX_TREE
        if self.gamma is not None and self.gamma > most:
            raise ConfigError(f"gamma must be between 0 and {most}, not {self.gamma}")
        _ = self.cached  # what is no number or share is refused here
        _ = self.sampling  # a way of sampling out of range is refused here
        if self.acceptance_rate is not None:
            # a rate out of range is refused here
            constant_profile(self.acceptance_rate)

    @property
    def gives_acceptance(self) -> bool:
        """Whether the acceptance of its draft is given as a number."""
        return self.acceptance_rate is not None or self.accept_length is not None

    @property
    def cached(self) -> Cached:
        """The cached beginning of each prompt. Raises ConfigError for no number and no share."""
        given = self.cached_len
        if not isinstance(given, str):
            return Cached(tokens=float(given))
        try:
            share = float(given.removesuffix("%")) / 100.0
        except ValueError:
            share = -1.0
        if not 0.0 <= share <= 1.0:
            raise ConfigError(
                f"cached must be tokens like 4096 or 32k, or 0% to 100%, not '{given}'"
            )
        return Cached(share=share)

    @property
    def kv_link_bytes_per_s(self) -> float | None:
        """Rate per device at which prompts arrive computed; None: they are prefilled here."""
        if self.prefill == "here":
            return None
        return self.kv_link_gb_s * GIGA

    @property
    def sampling(self) -> SamplingSpec:
        return SamplingSpec(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p
        )

    @property
    def names_a_draft(self) -> bool:
        return self.draft is not None or self.draft_method is not None

    def record(self) -> Request:
        """The request in plain values, names for specs."""
        values = {name: getattr(self, name) for name in Request.__struct_fields__}
        values["model"] = _name_of(self.model)
        values["engine"] = _name_of(self.engine)
        values["hardware"] = [_name_of(hardware) for hardware in self.hardware]
        values["acceptance"] = [
            profile.name or profile.source for profile in self.acceptance
        ]
        values["workload"] = msgspec.to_builtins(self.workload)
        return msgspec.convert(values, Request)


def _name_of(
    given: str | ModelSpec | EngineProfile | HardwareProfile | None,
) -> str | None:
    if given is None or isinstance(given, str):
        return given
    return given.name


@dataclass(frozen=True, kw_only=True)
class DraftOption:
    """One draft and method with its budgets (None: its whole cache) and its acceptance."""

    draft: str
    method: DraftMethod
    model: ModelSpec | None
    budgets: tuple[int | None, ...]
    acceptance: AcceptanceProfile
    draft_tp_size: int | None = None
    head: HeadSpec | None = None
    """Trained head given by --draft-model. None: the usual published head."""
    least_drafts: int = 1
    """The smallest gamma: an engine may take no fewer than a head's whole block."""
    multiple: int = 1
    """Number of which larger gammas must be a multiple."""
    tree: TreeSpec | None = None
    """The shape of drafts that branch; None: chains."""
    is_hypothetical: bool = False
    """Whether no such draft is published for the target, nor did the user give one: it is ranked
    apart, and not run."""
    remarks: tuple[str, ...] = ()
    """Sentences on what is not known of its checkpoint, and on what an engine needs for it."""
    question: Question | None = None
    """Question to which the belief answered with this acceptance. None: it was measured or
    given."""

    def speculation(self) -> SpeculationSpec:
        return SpeculationSpec(
            draft=self.draft,
            draft_method=self.method,
            draft_budget=self.budgets[0],
            draft_tp_size=self.draft_tp_size,
            head=self.head,
            tree=self.tree,
        )


DEFAULT_MAX_GAMMA = 12
"""Deepest gamma that is searched."""
DEFAULT_BATCH = 64
USUAL_TP = 8
"""Up to this many ranks share a layer where a link reaches beyond a node, before anything else is
considered.
"""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens in one slot of the batch: the prompt and, averaged over time, half of `growth`; at
    most `max_len`."""

    prompt_len: float
    growth: float
    workload: WorkloadSpec | None = None

    @property
    def output_len(self) -> float:
        """Tokens that a request generates, on average; 0: not said."""
        if self.workload is None:
            return self.growth
        return self.workload.mean_gen_len

    @property
    def prompts(self) -> list[tuple[float, float]]:
        """(length, share) for a mix of requests. Empty: all prompts are as long as the context."""
        if self.workload is None:
            return []
        return self.workload.prompt_groups()

    def max_len(self, batch: Any) -> Array:
        """Tokens per slot that memory must hold for a batch: all generated, or the tail of a mix of
        requests.
        """
        batch = np.asarray(batch, dtype=np.float64)
        if self.workload is None:
            return np.full(batch.shape, self.prompt_len + self.growth)
        return np.asarray(
            np.vectorize(self.workload.tail_len, otypes=[np.float64])(batch)
        )


def lengths_of(request: PlanRequest) -> list[Lengths]:
    """The lengths of each case on a device: one for each context, or one of a workload."""
    workload = request.workload
    if workload is not None:
        prompt = workload.mean_prompt_len
        growth = 2.0 * (workload.mean_kv_len - prompt)
        return [Lengths(prompt_len=prompt, growth=growth, workload=workload)]
    lengths = []
    for context in request.context_lens:
        lengths.append(
            Lengths(prompt_len=float(context), growth=float(request.gen_len))
        )
    return lengths


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question of a request: on one device, at one length, spread over devices in one way."""

    request: PlanRequest
    model: ModelSpec
    hardware: HardwareProfile
    engine: EngineProfile
    tp_sizes: tuple[int, ...]
    precision: Precision
    searches_batch: bool
    options: tuple[DraftOption, ...] = ()
    spread: Parallelism = TENSOR_PARALLEL
    lengths: Lengths
    may_not_fit: str = ""
    """The memory that one sequence takes and that there is, in words, where the two are too near to
    tell. Empty: they are not."""

    def setup(self, option: DraftOption | None) -> Setup:
        setup = Setup(
            model=self.model,
            hardware=self.hardware,
            engine=self.engine,
            sampling=self.request.sampling,
            precision=self.precision,
            spread=self.spread,
            kv_link_bytes_per_s=self.request.kv_link_bytes_per_s,
        )
        if option is None:
            return setup
        setup = replace(
            setup, speculation=option.speculation(), draft_model=option.model
        )
        return replace(setup, draft_precision=self.drafting_precision(setup))

    def drafting_precision(self, setup: Setup) -> Precision:
        """Draft formats: as requested, else the draft's defaults."""
        precision = draft_of(setup).precision
        weights = self.request.draft_weight_dtype or precision.weight_dtype
        kv = self.request.draft_kv_dtype or precision.kv_dtype
        return msgspec.structs.replace(
            precision,
            weight_dtype=format_name(weights),
            kv_dtype=format_name(kv),
        )

    def largest_batches(
        self,
        *,
        option: DraftOption | None = None,
        budget: Any = None,
        gamma: int = 0,
    ) -> Array:
        """The largest batch that fits, per tp size; autoregressive unless a draft is given. Groups
        of ranks hold as many sequences each."""
        setup = self.setup(option)
        lengths = self.lengths
        groups = self.spread.dp
        held = lengths.max_len(1.0)
        batch = np.ones(len(self.tp_sizes))
        tp = np.asarray(self.tp_sizes, dtype=np.float64)
        capacity = memory.capacity_bytes(self.hardware, self.engine, tp)
        rounds = 1
        if lengths.workload is not None:
            rounds = 3  # the tail of a batch shrinks as it grows
        for _ in range(rounds):

            def need(count: float, held: Array = held) -> Array:
                return memory.memory_need(
                    setup,
                    batch=count * groups,
                    max_len=held,
                    budget=budget,
                    gamma=gamma,
                    tp_size=tp,
                ).total_bytes

            batch = groups * memory.largest_batch(need(0.0), need(1.0), capacity)
            held = lengths.max_len(np.maximum(batch, 1.0))
        return np.broadcast_to(batch, (len(self.tp_sizes),))

    def option_of(self, row: Candidate) -> DraftOption:
        """The draft of a speculative row."""
        for option in self.options:
            if (option.draft, option.method) == (row.draft, row.draft_method):
                return option
        raise LookupError(row.draft)

    def admits(self, row: Candidate) -> bool:
        """Whether a row may be chosen: its draft exists, and it runs in a release of the engine, or
        the user asked for the plugin, named the draft or gave its acceptance.
        """
        if row.drafting.is_hypothetical:
            return False
        if not row.drafting.needs_plugin:
            return True
        request = self.request
        if request.plugin or request.names_a_draft or request.gives_acceptance:
            return True
        given = [
            (profile.draft, profile.draft_method) for profile in request.acceptance
        ]
        return (row.draft, row.draft_method) in given

    def is_hypothetical(self, draft: str, method: str) -> bool:
        """Whether a draft is one that is not known to be published."""
        return any(
            option.is_hypothetical
            for option in self.options
            if (option.draft, option.method) == (draft, method)
        )

    def gammas_of(self, option: DraftOption | None) -> tuple[int, ...]:
        """Gammas to search: the requested one, else the block of a draft that the engine runs whole,
        else all up to the deepest whose acceptance is known. (0,) drafts nothing."""
        if option is None:
            return (0,)
        if self.request.gamma is not None:
            return (self.request.gamma,)
        block = option.acceptance.most_drafts
        if block and self.engine.draft(option.draft, option.method).is_whole_block:
            return (block,)
        multiple = option.multiple
        deepest = deepest_gamma(option.acceptance)
        return tuple(
            gamma
            for gamma in range(option.least_drafts, deepest + 1)
            if (gamma <= multiple or gamma % multiple == 0)
            and option.acceptance.tells_of(gamma)
        )


def deepest_gamma(acceptance: AcceptanceProfile) -> int:
    """The deepest gamma to choose: none is chosen deeper than its acceptance is known."""
    if acceptance.max_gamma is None:
        return DEFAULT_MAX_GAMMA
    return min(acceptance.max_gamma, DEFAULT_MAX_GAMMA)


def engine_of(request: PlanRequest, hardware: str | HardwareProfile) -> EngineProfile:
    """The requested engine, or the default one of a kind of device, with the attention backend that is
    asked for. Raises ConfigError for a backend that is not known there."""
    if isinstance(hardware, str):
        hardware = load_hardware(hardware)
    engine = request.engine
    if not engine:
        engine = DEFAULT_CPU_ENGINE if hardware.kind == "cpu" else DEFAULT_ENGINE
    if not isinstance(engine, EngineProfile):
        engine = load_engine(engine)
    backend = request.attention_backend
    if backend is None:
        return engine
    known = known_backends(engine, hardware)
    for name in known:
        if name.lower() == backend.lower():
            return engine.as_set(PathOptions(attention_backend=name))
    raise unknown_choice(f"attention backend of {engine.name}", backend, known)


def check_backend(
    engine: EngineProfile, hw: HardwareProfile, layers: list[AttentionLayer]
) -> None:
    """Raises ConfigError for layers with which an engine does not start on the backend that it is asked
    for."""
    backend = engine.paths.attention_backend
    name = engine.kernels.attention_kernels
    for layer in layers:
        refusal = refusal_of(name, engine.version, generation_of(hw), layer, backend)
        if refusal is None:
            continue
        found = finding(
            "a layer that a backend refuses",
            name,
            engine.version,
            architecture=backend,
            backend=backend,
            why=refusal.says,
        )
        if found is not None and found.kind == "wrong":
            raise ConfigError(found.says)


def on_generation(case: Case) -> Finding | None:
    """Finding of the rules on a device's generation in the engine's version."""
    engine = case.engine
    return finding(
        "a device of an old generation",
        engine.name.partition("@")[0],
        engine.version,
        architecture=case.hardware.generation,
        device=case.hardware.name,
    )


def check_starts(case: Case) -> None:
    """Raises CapacityError for a device that the engine does not start on."""
    found = on_generation(case)
    if found is not None and found.kind == "wrong":
        raise CapacityError(found.says)


def resolve(
    request: PlanRequest,
    model: ModelSpec,
    hardware: str | HardwareProfile,
    options: list[DraftOption],
    lengths: Lengths,
) -> list[Case]:
    """Resolve a request on one device, for each way to spread a replica that it compares.

    Raises ConfigError for what cannot be split, or a draft that does not go with the target or the
    engine.
    """
    if isinstance(hardware, str):
        request = with_devices(request, hardware)
    hw = _at_its_price(request, hardware)
    engine = engine_of(request, hw)
    ways = layouts(request, model, hw, engine)
    is_given = request.tp_size is not None or request.num_gpus is not None
    is_fixed = is_given or len(ways) > 1 or ways[0].spread != TENSOR_PARALLEL
    if hw.kind != "cpu" and not is_fixed:
        # the layouts of a replica on a node, the fewest devices first
        sizes = valid_tp_sizes(
            model, max(ways[0].tp_sizes), engine.sampling.vocabulary_multiple
        )
        ways = [DeviceGroups(tp_sizes=(size,)) for size in sizes]
    precision = precision_of(
        model, hw, weight_dtype=request.weight_dtype, kv_dtype=request.kv_dtype
    )
    if request.attention_backend is not None:
        check_backend(engine, hw, layers_of(model, precision.kv_dtype))
    limits = {request.tpot_limit_s, request.ttft_limit_s, request.num_gpus}
    has_limits = limits != {None} or request.workload is not None
    cases = []
    for layout in ways:
        if options:
            check_ranks(engine, layout.tp_sizes, request.draft_tp_size)
        staged = []
        for option in options:
            pp_size = layout.spread.pp
            if pp_size == request.pp_size or is_known_in_stages(
                engine, option.draft, option.method, model, pp_size
            ):
                staged.append(option)
        case = Case(
            request=request,
            model=model,
            hardware=hw,
            engine=engine,
            tp_sizes=layout.tp_sizes,
            spread=layout.spread,
            precision=precision,
            searches_batch=not request.batch_sizes and has_limits,
            options=tuple(staged),
            lengths=lengths,
        )
        cases.append(case)
    if hw.kind == "cpu" or is_fixed:
        return cases
    return [_fewest(request, cases)]


def _at_its_price(
    request: PlanRequest, hardware: str | HardwareProfile
) -> HardwareProfile:
    """A device's profile with the price in its name ("b200=5"), else the request's."""
    is_priced = False
    if isinstance(hardware, str):
        is_priced = counted(hardware).price_per_hour_usd is not None
        hardware = load_hardware(hardware)
    if request.price_per_hour_usd is None or is_priced:
        return hardware
    return msgspec.structs.replace(
        hardware, price_per_hour_usd=request.price_per_hour_usd
    )


def with_devices(request: PlanRequest, hardware: str) -> PlanRequest:
    """The request with the number of devices that a name like "4xh100" gives.

    Raises ConfigError for another number than --gpus.
    """
    count = counted(hardware).num_gpus
    if count is None or count == request.num_gpus:
        return request
    if request.num_gpus is not None:
        raise ConfigError(
            f"{hardware} is {count} devices, and --gpus {request.num_gpus}"
        )
    return msgspec.structs.replace(request, num_gpus=count)


def _fewest(request: PlanRequest, tried: list[Case]) -> Case:
    """The fewest devices that hold the model and its batch for every length, or else the node."""
    usual = DEFAULT_BATCH
    if tried[0].hardware.link.is_single:
        usual = 1
    batch = max(request.batch_sizes, default=usual)
    for case in tried:
        largest = [
            replace(case, lengths=lengths).largest_batches()[0]
            for lengths in lengths_of(request)
        ]
        if min(largest) >= batch:
            return case
    return tried[-1]


class DeviceGroups(msgspec.Struct, frozen=True, kw_only=True):
    """tp sizes to search, and how groups of tp ranks form a replica."""

    tp_sizes: tuple[int, ...]
    spread: Parallelism = TENSOR_PARALLEL


def layouts(
    request: PlanRequest,
    model: ModelSpec,
    hw: HardwareProfile,
    engine: EngineProfile,
) -> list[DeviceGroups]:
    """The layouts to try, the usual one first. Raises ConfigError for a request that the model, the
    engine or the number of devices does not allow."""
    multiple = engine.sampling.vocabulary_multiple
    node = 1
    if hw.kind != "cpu":
        node = hw.link.num_gpus_per_node
    has_stages = request.pp_size not in (None, 1)
    has_whole_experts = request.ep_size not in (None, 1)
    if has_stages or has_whole_experts or request.dp_attention:
        return [_asked_for(request, model, engine, node)]
    num_gpus = request.num_gpus
    if request.tp_size is not None:
        check_tp(model, request.tp_size, multiple)
        if num_gpus is not None and request.tp_size > num_gpus:
            raise ConfigError(
                f"tp {request.tp_size} needs more than the {num_gpus} GPUs given"
            )
        return [DeviceGroups(tp_sizes=(request.tp_size,))]
    if num_gpus is None:
        return [DeviceGroups(tp_sizes=(largest_tp_at_most(model, node, multiple),))]
    if hw.kind == "gpu":
        node = max(node, min(USUAL_TP, hw.link.reach))
    within_node = valid_tp_sizes(model, min(num_gpus, node), multiple)
    layouts = [DeviceGroups(tp_sizes=tuple(within_node))]
    is_known = (
        hw.link.between_nodes_bytes_per_s is not None or num_gpus <= hw.link.reach
    )
    if hw.kind == "gpu" and engine.paths.spreads and is_known:
        layouts.extend(_others(num_gpus, model, node, multiple))
    return layouts


def _asked_for(
    request: PlanRequest, model: ModelSpec, engine: EngineProfile, node: int
) -> DeviceGroups:
    if not engine.paths.spreads:
        raise ConfigError(
            f"engine {engine.name} has neither stages nor data-parallel attention; try --engine "
            "vllm"
        )
    multiple = engine.sampling.vocabulary_multiple
    pp = request.pp_size or 1
    tp = request.tp_size
    if tp is None:
        room = node
        if request.num_gpus is not None:
            room = min(node, max(request.num_gpus // pp, 1))
        tp = request.ep_size or largest_tp_at_most(model, room, multiple)
        if request.dp_attention:
            tp = 1
    check_tp(model, tp, multiple)
    ep = request.ep_size
    if request.dp_attention and ep is None:
        ep = max(tp, (request.num_gpus or node) // pp)
    spread = spread_for(
        tp_size=tp, pp_size=pp, ep_size=ep, dp_attention=request.dp_attention
    )
    spread.check(model, tp)
    needed = tp * spread.groups
    if request.num_gpus is not None and needed > request.num_gpus:
        raise ConfigError(
            f"{needed} devices are needed, more than the {request.num_gpus} GPUs given"
        )
    return DeviceGroups(tp_sizes=(tp,), spread=spread)


def _others(
    num_gpus: int, model: ModelSpec, node: int, multiple: int
) -> list[DeviceGroups]:
    """Layouts over more than a node, by tensor parallelism or in stages; then with whole
    experts."""
    others: list[DeviceGroups] = []
    if num_gpus > node:
        across = [
            size for size in valid_tp_sizes(model, num_gpus, multiple) if size > node
        ]
        if across:
            others.append(DeviceGroups(tp_sizes=tuple(across)))
        tp = largest_tp_at_most(model, node, multiple)
        stages = min(num_gpus // tp, model.num_hidden_layers)
        if stages > 1:
            others.append(DeviceGroups(tp_sizes=(tp,), spread=Parallelism(pp=stages)))
    if not model.is_moe:
        return others
    for ranks in dict.fromkeys((min(num_gpus, node), num_gpus)):
        if ranks == 1 or model.most_experts % ranks != 0:
            continue
        for tp in valid_tp_sizes(model, ranks // 2, multiple):
            if ranks % tp == 0:
                spread = Parallelism(dp=ranks // tp, whole_experts=True)
                others.append(DeviceGroups(tp_sizes=(tp,), spread=spread))
    return others
