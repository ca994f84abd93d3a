"""The tables of an engine profile (specs/engine.py): one struct each, named as in the file."""

import math
from typing import Any, Literal, NamedTuple

import msgspec

MAX_VALUE = 1e6
LIMITS = {
    "workspace_bytes": 1e15,
    "set_aside_per_rank_bytes": 1e15,
    "host_weight_bytes": 1e15,
    "memory_fraction": 1.0,
}
"""Largest values of constants other than MAX_VALUE."""
MAX_ERROR = 10.0
"""A relative error that says nothing any more; beyond it expected times leave the range of numbers."""


def check_constant(name: str, value: float) -> None:
    """Raises ValueError for a constant outside its limits."""
    is_factor = name.endswith(("_factor", "_per_multiprocessor", "_tp_size"))
    is_positive = is_factor or name in ("memory_fraction", "prefill_tokens")
    limit = LIMITS.get(name, MAX_ERROR if name.endswith("_error") else MAX_VALUE)
    is_inside = math.isfinite(value) and 0 <= value <= limit
    if not is_inside or (is_positive and value == 0):
        least = "above" if is_positive else "at least"
        raise ValueError(
            f"'{name}' must be {least} 0 and at most {limit:g}, not {value!r}"
        )


GraphMode = Literal["whole", "uniform", "piecewise", "none"]
"""Captured graphs that a pass replays: a whole one at any mix of query lengths; a whole one where
every sequence has the same number of tokens and pieces elsewhere; pieces between attention; none.
"""
GRAPH_MODES: tuple[GraphMode, ...] = ("whole", "uniform", "piecewise", "none")
"""From the fewest launches to the most."""


class EngineTable(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """A table of an engine profile, whose numbers are checked against their limits."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float | int) and not isinstance(value, bool):
                check_constant(name, value)


class EngineKernels(EngineTable, frozen=True, kw_only=True):
    """The engine's kernels, and how their times compare with the hardware profile's."""

    attention_kernels: str = ""
    """Engine whose attention kernels run (data/attention_kernels.toml). Empty: one that packs heads
    and splits the context."""
    has_mixed_lengths: bool = False
    """Whether sequences of a batch differ in length, as on a server: blocks of attention then do
    not end in whole waves.
    """
    kv_reads: Literal["per_sequence", "per_query"] = "per_sequence"
    """Whether verification reads the KV cache once per sequence, or once for each of its query
    tokens.
    """
    gemm_factor: float = 1.0
    narrow_gemm_factor: float = 1.0
    """Factor of products in a narrow format, instead of `gemm_factor`."""
    experts_factor: float = 1.0
    """Factor of fused experts."""
    attention_factor: float = 1.0
    split_attention_factor: float | None = None
    """`attention_factor` of kernels that split the context of any head over blocks (FlashAttention
    3). None: `attention_factor`."""
    grouped_attention_factor: float = 1.0
    """On top of `attention_factor`, of kernels that split it with grouped heads alone (FlashAttention
    2)."""
    verify_attention_factor: float = 1.0
    """On top of `attention_factor`, where a pass has several query tokens per sequence."""
    query_tile_reread: float = 0.0
    """Share of reading the cache that each 16 query rows of a KV head beyond the first 16 repeat,
    in verification.
    """
    draft_attention_factor: float = 1.0
    """On top of `attention_factor`, in the draft's steps over a sparse cache."""
    prefill_attention_factor: float | None = None
    """Attention over prompts against the hardware's curve; None: `attention_factor`."""
    attention_blocks_per_multiprocessor: float | None = None
    """Blocks (one per sequence and KV head) that run at once; a kernel that splits the context does
    so only below this many, and above it the last wave of blocks leaves multiprocessors idle. None:
    no such waves."""
    attention_wave_weight: float = 0.0
    """Share of the last wave's idle time that is lost: 0 none, 1 all of it."""
    elementwise_factor: float = 1.0
    collective_factor: float = 1.0
    elementwise_kernels_per_layer: float = 4.0
    """Norms, rotary embedding with the cache's append, activation: kernels that stream activations.
    """
    native_formats: tuple[str, ...] = ()
    """Weight formats whose products run in that format, on devices that have a rate for it; others
    are weight-only.
    """
    fused_experts: bool = False
    """Whether a mixture's experts run in the fused kernels that hardware profiles have curves of.
    """
    fused_shared_experts: bool = False
    """Whether the shared expert is one more of theirs, so costs its bytes or FLOPs alone; else it runs
    in a stream beside them."""
    routing_kernels: float = 0.0
    """Small kernels in each layer of a mixture, where no fused ones hold them: routing, sorting by
    expert, weighing."""
    quantized_head: bool = False
    """Whether the head is as narrow as the other weights; else it is in 16 bits."""
    allreduce_kernels: str = ""
    """Library whose all-reduce kernels are used if the device has a curve for them; else vLLM's
    table."""
    block_experts_layer_s: float = 0.0
    """Per layer of experts in fp8_block whose columns on a rank fill whole blocks of 128: another
    kernel takes them.
    """


class EngineOverheads(EngineTable, frozen=True, kw_only=True):
    """Host time of passes and steps, in seconds."""

    forward_overhead_s: float = 0.0
    """Per forward pass of any model (launch, host)."""
    layer_overhead_s: float = 0.0
    """Per layer of any forward pass. Kernel curves hold each kernel's fixed time: this is what
    comes on top.
    """
    sequence_overhead_s: float = 0.0
    """Per sequence of a step: scheduling, sampling's inputs, detokenising, where nothing hides it.
    """
    older_sequence_overhead_s: float | None = None
    """`sequence_overhead_s` in versions before `asynchronous_since`, which schedule between steps.
    """
    collective_overhead_s: float = 0.0
    """Per collective, on top of the link's time."""
    autoregressive_overhead_s: float = 0.0
    """Per autoregressive step, on top of its forward pass and sampling."""
    overhead_on: dict[str, float] = {}
    """Instead of `autoregressive_overhead_s`, on these devices; a speculative step's differs by as
    much.
    """
    draft_step_overhead_s: float = 0.0
    """Per draft step, on top of its forward pass and sampling."""
    draft_block_overhead_s: float = 0.0
    """Per block of a self-draft: its first pass finds the weights, which the later ones have in a
    processor's cache, pushed out of it by the verification before.
    """
    draft_model_layer_s: float = 0.0
    """Per layer of a draft model's or self-draft's pass, where it is launched outside captured
    graphs.
    """
    draft_model_layer_error: float = 0.0
    """Relative error (one standard deviation) of `draft_model_layer_s`: which passes are captured
    changes between versions.
    """
    head_layer_s: float = 0.0
    """Per layer of a trained head's pass, where it is launched outside captured graphs."""
    head_block_overhead_s: float = 0.0
    """Per block of a trained head, before its first pass."""
    tree_step_s: float = 0.0
    """Per speculative step whose drafts branch: the tree is chosen, and its mask made."""
    speculation_sequence_s: float = 0.0
    """Per sequence of a speculative step, on top of `sequence_overhead_s`: several tokens are
    checked and handed on.
    """
    scored_token_s: float = 0.0
    """Host time per token of a verification pass whose tokens the engine scores as sequences of
    their own."""
    verify_overhead_s: float = 0.0
    """Per verification pass."""
    step_overhead_s: float = 0.0
    """Per speculative step (bookkeeping, synchronisation with the host)."""
    synchronous_step_overhead_s: float = 0.0
    """Per step with a draft that `is_synchronous`, whether anything was drafted or not."""
    upkeep_base_s: float = 0.0
    """Per speculative step with a separate draft cache."""
    upkeep_s_per_token: float | None = None
    """Seconds per verified token of the batch copied to the draft's cache; None: its KV bytes over
    the bandwidth.
    """


class EngineGraphs(EngineTable, frozen=True, kw_only=True):
    """Captured graphs: up to which pass one is captured by default, and what a pass without one costs."""

    captured_tokens: int | None = None
    """Tokens of a pass (batch x (gamma + 1)) up to which one is captured by default; None: any."""
    captured_batch: int | None = None
    """Sequences, likewise."""
    captured_batch_wide: int | None = None
    """Sequences from 4 ranks on; None: as `captured_batch`."""
    uncaptured_pass_s: float = 0.0
    """Per pass that runs outside captured graphs because the target's attention kernel, or the
    draft's, is captured for one query token alone."""
    uncaptured_error: float = 0.0
    """Relative error (one standard deviation) of what such a pass adds."""
    prefill_layer_overhead_s: float = 0.0
    """Per layer of a pass with prompts in it: it runs outside captured graphs."""
    launch_s: float = 0.0
    """Time in which the host launches a kernel of a pass of prompts alone, which is no faster than its
    launches."""
    captured_prompts: bool = False
    """Whether such a pass replays captured pieces, so few of its kernels are launched one by one."""
    piecewise_host_layer_s: float = 0.0
    """Time in which the host launches a layer of a piecewise pass, which is no faster than that."""
    eager_host_layer_s: float = 0.0
    """Time in which the host launches a layer without any graph, likewise."""
    eager_head_layer_s: float = 0.0
    """Time in which the host launches a layer of a trained head without any graph."""
    piecewise_layer_s: float = 0.0
    """Another law of piecewise passes: per layer, however long the device takes. Both fit what was
    measured, so their mean is taken."""
    piecewise_pass_s: float = 0.0
    """Per pass, by the second law."""
    gamma_table_cost: float = 0.0
    """Share by which every step takes longer while gamma follows a table by batch size there."""
    gamma_table_cost_low: float = 0.0
    """Lower end of its 90 % interval."""
    gamma_table_cost_high: float = 0.0
    """Upper end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.gamma_table_cost_low, self.gamma_table_cost_high
        if not low <= self.gamma_table_cost <= high:
            raise ValueError("'gamma_table_cost' must lie in its interval")

    def piecewise_s(self, layers: int) -> float:
        """Seconds that a piecewise pass adds by the second law."""
        return self.piecewise_pass_s + layers * self.piecewise_layer_s

    def is_captured(self, *, batch: int, gamma: int, tp_size: int) -> bool:
        """Whether a step's passes run as captured graphs, as the engine is set by default."""
        most = self.captured_batch
        if tp_size >= 4 and self.captured_batch_wide:
            most = self.captured_batch_wide
        if most is not None and batch > most:
            return False
        tokens = self.captured_tokens
        return tokens is None or batch * (gamma + 1) <= tokens


class EnginePaths(EngineTable, frozen=True, kw_only=True):
    """The paths that steps take: the model runner, ranks and stages of drafts, and the tokens that they catch up on."""

    runner: str = ""
    """Model runner of self-drafts, a key of `self_draft`, and of whatever has no other below; users may
    choose another. Empty: the engine has one runner."""
    dense_runner: str = ""
    """Model runner of dense models without a self-draft. Empty: `runner`."""
    other_runner: str = ""
    """Model runner of mixtures of experts and of models with recurrent states. Empty: that of dense
    models."""
    note: str = ""
    """A remark on the paths that changes no price."""
    graph_mode: GraphMode = "whole"
    """Graphs that decoding passes replay where the draft says nothing else."""
    attention_backend: str = ""
    """The attention backend that the target is asked to run. Empty: the first that takes its layers."""
    draft_attention_backend: str = ""
    """The draft's."""
    draft_inherits_backend: bool = False
    """Whether a draft that is asked for none runs the target's."""
    is_asynchronous: bool = True
    """Whether scheduling overlaps with the device where the draft lets it."""
    self_draft: dict[str, dict[str, Any]] = {}
    """By the engine's model runner: constants that differ in speculative steps where the target
    drafts for itself.
    """
    draft_on_all_ranks: bool = False
    """Whether a draft model must be split over the target's ranks."""
    standalone_draft_tp_size: int | None = None
    """Ranks that a standalone draft runs on unless the speculation says otherwise; None: all."""
    spreads: bool = True
    """Whether it runs the stages of a pipeline, and whole experts with data-parallel attention."""
    stages_by_itself: bool = False
    """Whether it spreads a model's layers over all devices that it sees (llama.cpp)."""
    catch_up: Literal["none", "standalone", "always"] = "standalone"
    """Which drafts process the last drafted token after full acceptance (a self-draft may take the
    verified KV).
    """
    streaming_in_place: bool = False
    """A StreamingLLM self-draft reads sinks and tail of the target's cache: no memory and no
    upkeep.
    """
    states_beside: int = 0
    """States of a layer without a cache, per sequence, that are kept besides one for each verified
    token; the accepted token's is copied there (SGLang). 0: the next step reads it where it is
    (vLLM)."""
    draft_sink_tokens: int = 4
    """First tokens that a head's budget holds besides the window."""
    draft_window_cache: Literal["all", "ring"] = "all"
    """Part of a windowed head's cache that the engine keeps: every token, or the window's slots."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.runner and self.runner not in self.self_draft:
            known = ", ".join(self.self_draft)
            raise ValueError(f"'runner' must be one of {known}, not '{self.runner}'")


class EngineHybrids(EngineTable, frozen=True, kw_only=True):
    """Speculation in models with recurrent states next to attention (perfmodel/hybrids.py)."""

    launches_s: float = 0.0
    """Host time of a speculative step for which the host waits before it launches the next."""
    metadata_s: float = 0.0
    """Host time of a step with a head whose layer has a cache of its own, beside that of groups."""
    group_s: float = 0.0
    """Host time of preparing one group of recurrent layers."""
    may_reuse: bool = False
    """Whether groups may share metadata, so that the step waits for none."""
    host_error: float = 0.0
    """One standard deviation of the time that they add, as a share of it."""
    mixture_s: float = 0.0
    """Time added to a step of a mixture of experts with a trained head on several ranks."""


class EngineSampling(EngineTable, frozen=True, kw_only=True):
    """Sampling one token per row of logits, and accepting."""

    vocabulary: Literal["gather", "sharded"] = "gather"
    """"gather": each rank gathers the logits and samples over the whole vocabulary; "sharded":
    distributed softmax.
    """
    vocabulary_slack: int = 0
    """Entries by which a draft's vocabulary may differ from its target's."""
    vocabulary_multiple: int = 64
    """Multiple to which the vocabulary's rows are padded before ranks share them evenly (vLLM and
    SGLang: 64); 0: to a multiple of the ranks."""
    sampling_base_s: float = 0.0
    sampling_passes: float = 4.0
    """fp32 passes over rows x vocabulary when sampling: scale, softmax (read, write), draw."""
    greedy_passes: float = 1.0
    top_p_passes: float = 16.0
    """Further passes for the sort of top-p (or top-k)."""
    sampling_s_per_element: float | None = None
    """Seconds per row x vocabulary entry when sampling without top-p; replaces `sampling_passes`.
    """
    greedy_s_per_element: float | None = None
    accept_base_s: float = 0.0
    greedy_accept_passes: float | None = None
    """Greedily: the logits' widening and their maxima; None: as `greedy_passes`."""
    accept_passes: float = 6.0
    """fp32 passes over verified tokens x vocabulary: target softmax, read of the draft's, residual,
    draw.
    """
    accept_s_per_element: float | None = None
    """Seconds per (verified token x vocabulary entry) when sampling; replaces `accept_passes`."""
    greedy_accept_s_per_element: float | None = None


class EngineScheduler(EngineTable, frozen=True, kw_only=True):
    """Batching of prompts and sequences, and the way of a request to the scheduler and back."""

    asynchronous_since: str = ""
    """Version from which scheduling overlaps with the device by default; empty: all that were
    fitted on.
    """
    prefill_tokens: int = 8192
    """Tokens of one prefill pass."""
    mixes_prefill: bool = True
    """Whether prompts (or chunks of them) share their passes with sequences that decode; else
    decoding waits.
    """
    prefill_share: float = 1.0
    """Share of other requests' prefills that falls between a request's tokens; the others delay its
    first token.
    """
    prefill_factor: float = 1.0
    """Further factor of the time that a prompt adds to other requests."""
    request_latency_s: float = 0.0
    """From a client to the scheduler and from the first token back: HTTP, processes in between."""
    prompt_token_latency_s: float = 0.0
    """Per token of a prompt on that way: it is sent, tokenised and hashed."""
    request_overhead_s: float = 0.0
    """Time that a request takes from all others when it enters, as where the server's processes
    share a core.
    """
    steps_ahead: float = 0.0
    """Steps scheduled before the running one has ended; an arriving request waits for them too."""
    admission: Literal["as_used", "whole"] = "as_used"
    """Whether a request is admitted while the cache has room for it now, or only with room for all
    its tokens.
    """


class SetAside(NamedTuple):
    """Memory that an engine keeps from weights and caches."""

    below_bytes: float
    """Devices of less memory than this."""
    num_bytes: float


class EngineMemory(EngineTable, frozen=True, kw_only=True):
    """Memory that caches, weights and workspace may take."""

    window_cache: Literal["all", "window"] = "all"
    """Memory allocated for layers of a sliding window or of chunks: slots for all tokens, or for
    the window alone.
    """
    window_slots: int = 0
    """Slots beyond a window or chunk that is kept alone, as for tokens that may yet be rejected."""
    context_ranks: int = 1
    """Ranks of a group that share the tokens of caches which each would hold whole (decode context
    parallelism)."""
    state_element_bytes: float = 4.0
    """Bytes of one number of a recurrent state."""
    host_weight_bytes: float = 0.0
    """Bytes of each device's weights that stay in the host's memory, and are read over its link in every
    pass."""
    spare_slots: int = 0
    """Slots that each cache has beyond the longest sequence and the block in flight."""
    memory_fraction: float = 0.9
    """Share of the device's usable memory that weights, caches and workspace may take; or caches
    alone, of what the others leave."""
    share_of: Literal["device", "rest"] = "device"
    set_aside: tuple[SetAside, ...] = ()
    """Memory that is kept from weights and caches, by the device's memory. Empty: the rest of
    `memory_fraction`."""
    set_aside_per_rank_bytes: float = 0.0
    """Memory that is kept from them for each rank of a group, on top."""
    workspace_in_share: bool = True
    """Whether the workspace lies within the share, or in what is set aside."""
    embedding: Literal["device", "host"] = "device"
    """Where the table of embeddings lies that is only looked up in."""
    workspace_bytes: float = 1e9
    """Context, library buffers and captured graphs, per device."""

    def set_aside_bytes(self, usable_bytes: float) -> float | None:
        """Memory that is kept from weights and caches on a device of so much. None: the rest of
        `memory_fraction`."""
        for below_bytes, num_bytes in self.set_aside:
            if usable_bytes < below_bytes:
                return num_bytes
        return None


class EnginePrefixCache(EngineTable, frozen=True, kw_only=True):
    """Cached prefixes of prompts."""

    prefix_block_tokens: int = 0
    """Tokens per block of the prefix cache; hits are whole blocks. Models with recurrent states
    have larger blocks (perfmodel/prefix_cache.py). 0: hits are counted by token."""
    drops_last_unit: tuple[str, ...] = ()
    """Methods with which the last unit of each prefix hit is computed anew."""
    keep_last_unit: str = ""
    """The setting with which it is not, in words."""


class EngineOptions(EngineTable, frozen=True, kw_only=True):
    """The engine's options as advice and exports write them, with {} for a value; "": it has none."""

    speculation: str = ""
    gamma: str = ""
    """Drafted tokens, where that is an option of its own whatever is drafted with."""
    table: str = ""
    """Gamma by batch."""
    table_of: tuple[str, ...] = ()
    """Methods of drafts whose gamma follows the batch. Empty: all."""
    table_not_with: tuple[str, ...] = ()
    """Options with which it does not, in addition to data parallelism."""
    tp: str = ""
    batch: str = ""
    """Sequences at once."""
    is_batch_of_rank: bool = False
    """Whether `batch` counts the sequences of each data-parallel rank."""
    chunk: str = ""
    """Tokens of a prompt that one step reads."""
    captured: str = ""
    """Largest step that has a graph."""
    attention_backend: str = ""
    """The target's attention backend."""
    asynchronous: str = ""
    """Undoes the setting that keeps a step from being scheduled while another runs."""
    prefix_cache: str = ""
    quantization: str = ""
    """Quantizes 16-bit weights to fp8 as they are loaded."""

    def follows_batch(self, method: str) -> bool:
        """Whether it has gamma follow the batch with a method."""
        return bool(self.table) and (not self.table_of or method in self.table_of)


class EngineErrors(EngineTable, frozen=True, kw_only=True):
    """How right the profile is: one standard deviation of what the terms' own errors do not explain."""

    relative_error: float = 0.10
    """Relative error of a step's time."""
    speedup_relative_error: float = 0.04
    """Relative error of a speedup, in which part of the errors cancel. That of the catalog's serving
    engines comes from measured servers instead (perfmodel/lanes.py)."""
    other_device_error: float | None = None
    """Relative TPOT error on devices outside the fit. None: `relative_error`."""
    other_model_error: float | None = None
    """Relative TPOT error for models outside the fit. None: `relative_error`."""
    cost_place: str = ""
    """Where its user measured the cost of speculation: "device/model/weights/cache/draft". Empty:
    nowhere."""
    cost_step_s: float = 0.0
    """Time between tokens without a draft at the load that was measured."""
    cost_error: float = 0.0
    """Relative error of a speedup at that load, tokens per step apart."""


class DraftPath(EngineTable, frozen=True, kw_only=True):
    """Steps of one kind of draft on one model runner."""

    graph_mode: GraphMode | None = None
    """Graphs that they replay. None: the engine's usual ones."""
    rows: Literal["padded", "ragged"] = "ragged"
    """Whether a sequence without a draft is verified as one with gamma drafts, or as one token."""
    search: Literal["none", "host", "device"] = "none"
    """Where drafts are looked up."""


class EngineDraft(EngineTable, frozen=True, kw_only=True):
    """One kind of draft as the engine runs it."""

    runs: bool = True
    """Whether the engine runs it; False where only its settings are known."""
    newest_version: str = ""
    """The newest version that runs it ("0.32"). Empty: no later one is known not to."""
    call: dict[str, str | bool] = {}
    """The engine's settings that ask for it. Empty: those of draft models."""
    runner: str = ""
    """The model runner that takes it. Empty: the engine's usual one."""
    on: dict[str, DraftPath] = {}
    """Its steps by model runner; "any" in an engine with one."""
    is_synchronous: bool = False
    """Whether the engine schedules between steps with it: `older_sequence_overhead_s` and
    `synchronous_step_overhead_s` hold then."""
    note: str = ""
    """A remark to read before it is run there."""
    untried: str = ""
    """Another way to run it there, which may be faster and which nobody measured."""
    package: str = ""
    """The package that it needs and that the engine does not bring along."""
    window_setting: str = ""
    """The setting that cuts a head's attention to a window."""
    window_backend: str = ""
    """The setting of the kernels without which the window is not read."""
    sampling_setting: str = ""
    """The setting that samples from the draft above temperature 0, where the engine asks for one."""
    is_whole_block: bool = False
    """Whether it drafts its checkpoint's block, no more and no fewer."""
    window_note: str = ""
    """Why a head's attention cannot be cut, in the engine's newest release."""
    sink_setting: str = ""
    """The setting of the first tokens that a head sees besides its window. Without one the draft's
    budget is the window alone."""
    adaptive_setting: str = ""
    """The setting with which the engine adapts how many drafts a step verifies."""
    adaptive_measured: str = ""
    """The server on which adapting was measured, and its fixed gamma."""
    adaptive_gains: dict[str, float] = {}
    """By number of sequences: times as many tokens per second as with a fixed gamma."""
    draft_overhead_s: float = 0.0
    """Per draft step, on top of what every draft's takes (an EAGLE-3 head's logits are scattered to
    the target's vocabulary)."""
    step_overhead_s: float = 0.0
    """Per speculative step, likewise (EAGLE-3: three layers' hidden states are kept and joined)."""
    search_s: float = 20e-6
    """Look-up, per step of the whole batch."""
    search_s_per_sequence: float = 0.0
    """Look-up on the host, per sequence and step, where `scan_s` gives none."""
    search_error: float = 0.0
    """Relative error (one standard deviation) of the look-up's time per sequence."""
    scan_s: dict[str, float] = {}
    """Host time of a look-up per sequence and step, by tokens of the sequence's text; linear
    between these lengths. The host searches one sequence after the other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = [float(tokens) for tokens in self.scan_s]
        shortest_s = min(self.scan_s.values(), default=0.0)
        if lengths != sorted(set(lengths)) or shortest_s < 0.0:
            raise ValueError("'scan_s' needs times of at least 0 by ascending lengths")
