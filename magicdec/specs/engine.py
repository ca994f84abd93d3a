"""The profile of a runtime: its fixed costs, sampling and acceptance, and the upkeep of the draft's
cache.

An engine profile is one TOML file (catalog: `vllm`, `sglang`, `trtllm`, `ours`, `magicdec-2024`),
kept apart from the hardware profile, so one device serves several runtimes. Where each field enters
the time is written once, in perfmodel/forward.py, perfmodel/step.py and perfmodel/serving.py.
`*_s_per_element` fields, where given, replace the bytes-over-bandwidth estimate of that work.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from magicdec.errors import unknown_choice
from magicdec.files import converted, read_toml, write_atomic
from magicdec.naming import ENGINE_TITLES
from magicdec.specs.speculation import DRAFT_KINDS, draft_kind

ENGINES_DIRECTORY = Path(__file__).resolve().parent / "data" / "engines"
MAX_VALUE = 1e6
LIMITS = {"workspace_bytes": 1e15, "memory_fraction": 1.0}
"""Largest values of constants other than MAX_VALUE."""
SERVING_ENGINES = tuple(ENGINE_TITLES)
DEFAULT_ENGINE = "vllm"
"""Engine of plans on GPUs."""
DEFAULT_CPU_ENGINE = "ours"


def _check_constant(name: str, value: float) -> None:
    """Raises ValueError for a constant outside its limits."""
    is_factor = name.endswith(("_factor", "_per_multiprocessor", "_tp_size"))
    is_positive = is_factor or name in ("memory_fraction", "prefill_tokens")
    limit = LIMITS.get(name, MAX_VALUE)
    is_inside = math.isfinite(value) and 0 <= value <= limit
    if not is_inside or (is_positive and value == 0):
        least = "above" if is_positive else "at least"
        raise ValueError(
            f"'{name}' must be {least} 0 and at most {limit:g}, not {value!r}"
        )


class EngineProfile(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """One runtime. Times in seconds; factors multiply the hardware profile's time of that kind of
    operation.
    """

    name: str
    description: str = ""
    fitted_on: str = ""
    fitted_device: str = ""
    """The hardware profile that the constants were fitted with; elsewhere fixed costs are less
    sure. Empty: any.
    """
    fitted_devices: tuple[str, ...] = ()
    """Hardware profiles that the constants were fitted with, where there were several."""
    fitted_models: tuple[str, ...] = ()
    sources: dict[str, str] = {}

    # Kernels
    attention_kernel: Literal["measured", "split"] = "split"
    """"measured": the hardware profile's kernel as it was measured; "split": one that splits the
    context.
    """
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
    verify_attention_factor: float = 1.0
    """On top of `attention_factor`, where a pass has several query tokens per sequence."""
    query_tile_reread: float = 0.0
    """Share of reading the cache that each 16 query rows of a KV head beyond the first 16 repeat,
    in verification.
    """
    draft_attention_factor: float = 1.0
    """On top of `attention_factor`, in the draft's steps over a sparse cache."""
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
    quantized_head: bool = False
    """Whether the head is as narrow as the other weights; else it is in 16 bits."""
    allreduce_kernels: str = ""
    """Library whose all-reduce kernels are used if the device has a curve for them; else vLLM's
    table."""

    # Fixed costs
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
    asynchronous_since: str = ""
    """Version from which scheduling overlaps with the device by default; empty: all that were
    fitted on.
    """
    block_experts_layer_s: float = 0.0
    """Per layer of experts in fp8_block whose columns on a rank fill whole blocks of 128: another
    kernel takes them.
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
    eagle3_draft_overhead_s: float = 0.0
    """Per draft step of an EAGLE-3 head on top of that (its logits are scattered to the target's
    vocabulary).
    """
    eagle3_step_overhead_s: float = 0.0
    """Per speculative step with an EAGLE-3 head (three layers' hidden states are kept and joined).
    """
    states_beside: int = 0
    """States of a layer without a cache, per sequence, that are kept besides one for each verified
    token; the accepted token's is copied there (SGLang). 0: the next step reads it where it is
    (vLLM)."""
    speculation_sequence_s: float = 0.0
    """Per sequence of a speculative step, on top of `sequence_overhead_s`: several tokens are
    checked and handed on.
    """
    scored_token_s: float = 0.0
    """Host time per token of a verification pass whose tokens the engine scores as sequences of
    their own."""
    uncaptured_pass_s: float = 0.0
    """Per pass that runs outside captured graphs because its attention kernel cannot be captured
    with several query tokens (FlashInfer on devices before Hopper, whose FlashAttention reads no
    cache in 8 bits)."""
    verify_overhead_s: float = 0.0
    """Per verification pass."""
    step_overhead_s: float = 0.0
    """Per speculative step (bookkeeping, synchronisation with the host)."""

    # Captured graphs: a pass beyond these runs without, at the cost of launching its kernels
    captured_tokens: int | None = None
    """Tokens of a pass (batch x (gamma + 1)) up to which one is captured by default; None: any."""
    captured_batch: int | None = None
    """Sequences, likewise."""
    captured_batch_wide: int | None = None
    """Sequences from 4 ranks on; None: as `captured_batch`."""

    # Sampling one token per row of logits, and accepting
    vocabulary: Literal["gather", "sharded"] = "gather"
    """"gather": each rank gathers the logits and samples over the whole vocabulary; "sharded":
    distributed softmax.
    """
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

    # The draft
    drafts: tuple[str, ...] = DRAFT_KINDS
    """Kinds of drafts that it runs, among `DRAFT_KINDS` (specs/speculation.py)."""
    draft_calls: dict[str, dict[str, str | bool]] = {}
    """The engine's settings for each method. "model": for draft models and for methods without an
    entry."""
    draft_windows: dict[str, str] = {}
    """By method of head: the setting that cuts its attention to a window there."""
    draft_window_notes: dict[str, str] = {}
    """By method of head: why its attention cannot be cut there, in the engine's newest release."""
    draft_sinks: dict[str, str] = {}
    """Setting, by method of head, of the first tokens that the head sees besides its window.
    Without one the draft's budget is the window alone."""
    draft_sink_tokens: int = 4
    """First tokens that a head's budget holds besides the window."""
    draft_window_cache: Literal["all", "ring"] = "all"
    """Part of a windowed head's cache that the engine keeps: every token, or the window's slots."""
    draft_notes: dict[str, str] = {}
    """By kind of draft: what to know before it is run there."""
    adaptive_settings: dict[str, str] = {}
    """By method: the setting with which the engine adapts how many drafts a step verifies."""
    adaptive_gains: dict[str, dict[str, float]] = {}
    """By method and number of sequences: times as many tokens per second as with a fixed gamma."""
    adaptive_measured: dict[str, str] = {}
    """By method: the server that was measured, and its fixed gamma."""
    gamma_table_cost: float = 0.0
    """Share by which every step takes longer while gamma follows a table by batch size there."""
    gamma_table_cost_low: float = 0.0
    """Lower end of its 90 % interval."""
    gamma_table_cost_high: float = 0.0
    """Upper end."""
    runner: str = ""
    """Model runner of self-drafts, a key of `self_draft`; users may choose another. Empty: the
    engine has one runner."""
    self_draft: dict[str, dict[str, float]] = {}
    """By the engine's model runner: constants that differ in speculative steps where the target
    drafts for itself.
    """
    draft_on_all_ranks: bool = False
    """Whether a draft model must be split over the target's ranks."""
    spreads: bool = True
    """Whether it runs the stages of a pipeline, and whole experts with data-parallel attention."""
    staged_drafts: tuple[str, ...] = ()
    """Kinds of drafts that it runs in a pipeline of several stages."""
    standalone_draft_tp_size: int | None = None
    """Ranks that a standalone draft runs on unless the speculation says otherwise; None: all."""
    catch_up: Literal["none", "standalone", "always"] = "standalone"
    """Which drafts process the last drafted token after full acceptance (a self-draft may take the
    verified KV).
    """
    streaming_in_place: bool = False
    """A StreamingLLM self-draft reads sinks and tail of the target's cache: no memory and no
    upkeep.
    """
    upkeep_base_s: float = 0.0
    """Per speculative step with a separate draft cache."""
    upkeep_s_per_token: float | None = None
    """Seconds per verified token of the batch copied to the draft's cache; None: its KV bytes over
    the bandwidth.
    """
    ngram_lookup_s: float = 20e-6
    """n-gram lookup, per step of the whole batch."""
    ngram_lookup_s_per_sequence: float = 0.0
    """n-gram lookup on the host, per sequence and step, where `lookup_scan_s` gives none."""
    lookup_scan_s: dict[str, float] = {}
    """Host time of a look-up per sequence and step, by tokens of the sequence's text; linear
    between these lengths. The host searches one sequence after the other.
    """
    synchronous_drafts: tuple[str, ...] = ()
    """Kinds of drafts with which it schedules between steps: `older_sequence_overhead_s` holds
    then.
    """
    synchronous_step_overhead_s: float = 0.0
    """Per step with one of `synchronous_drafts`, whether anything was drafted or not."""

    # Memory and prefill
    window_cache: Literal["all", "window"] = "all"
    """Memory allocated for layers of a sliding window or of chunks: slots for all tokens, or for
    the window alone.
    """
    window_slots: int = 0
    """Slots beyond a window or chunk that is kept alone, as for tokens that may yet be rejected."""
    spare_slots: int = 0
    """Slots that each cache has beyond the longest sequence and the block in flight."""
    memory_fraction: float = 0.9
    """Share of the device's memory that weights, caches and workspace may take."""
    workspace_bytes: float = 1e9
    """Context, library buffers and captured graphs, per device."""
    prefix_block_tokens: int = 0
    """Tokens per block of the prefix cache; hits are whole blocks. Models with recurrent states
    have larger blocks (perfmodel/prefix_cache.py). 0: hits are counted by token."""
    drops_last_unit: tuple[str, ...] = ()
    """Methods with which the last unit of each prefix hit is computed anew."""
    keep_last_unit: str = ""
    """The setting with which it is not, in words."""
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
    prefill_layer_overhead_s: float = 0.0
    """Per layer of a pass with prompts in it: it runs outside captured graphs."""
    prefill_factor: float = 1.0
    """Further factor of the time that a prompt adds to other requests."""
    prefill_attention_factor: float | None = None
    """Attention over prompts against the hardware's curve; None: `attention_factor`."""
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

    # How right it is: one standard deviation of what the terms' own errors do not explain
    relative_error: float = 0.10
    """Relative error of a step's time."""
    speedup_relative_error: float = 0.04
    """Relative error of a speedup, in which part of the errors cancel."""
    other_speedup_error: float | None = None
    """`speedup_relative_error` on devices and formats on which no server with speculation was
    measured. None: `speedup_relative_error`."""
    speculation_fitted: tuple[str, ...] = ()
    """Places where servers with speculation were measured: "device/weights/cache"."""
    speculation_fitted_drafts: tuple[str, ...] = ()
    """Kinds of drafts with which servers were measured; empty: any."""
    other_device_error: float | None = None
    """Relative TPOT error on devices outside the fit. None: `relative_error`."""
    other_model_error: float | None = None
    """Relative TPOT error for models outside the fit. None: `relative_error`."""

    before: dict[str, dict[str, float]] = {}
    """Constants of versions before these ("0.14"), where they differ; of several bounds the nearest
    above counts.
    """

    def error_for(self, device: str, model: str) -> float:
        """Relative error (one standard deviation) of a server's times, by what the constants were
        fitted on. What an unseen device and an unseen model add to the variance are independent."""
        own = self.relative_error**2
        variance = own
        if self.fitted_devices and device not in self.fitted_devices:
            of_devices = (self.other_device_error or 0.0) ** 2
            variance += max(of_devices - own, 0.0)
        if self.fitted_models and model not in self.fitted_models:
            of_models = (self.other_model_error or 0.0) ** 2
            variance += max(of_models - own, 0.0)
        return math.sqrt(variance)

    def step_overheads(self, device: str) -> tuple[float, float]:
        """Per autoregressive and per speculative step on a device."""
        if device not in self.overhead_on:
            return self.autoregressive_overhead_s, self.step_overhead_s
        less = self.autoregressive_overhead_s - self.overhead_on[device]
        return self.overhead_on[device], self.step_overhead_s - less

    def table_costs(self, draft: str) -> tuple[float, float, float]:
        """`gamma_table_cost` with the ends of its interval. Self-drafts follow a table of their own
        (magicdec/vllm), whose graphs are captured for every gamma.
        """
        if draft == "self":
            return 0.0, 0.0, 0.0
        return (
            self.gamma_table_cost,
            self.gamma_table_cost_low,
            self.gamma_table_cost_high,
        )

    @property
    def self_drafting(self) -> EngineProfile:
        """The constants of speculative steps with a self-draft."""
        return msgspec.structs.replace(self, **self.self_draft.get(self.runner, {}))

    def scheduling(self, draft: str, method: str) -> EngineProfile:
        """The constants of steps with this draft, as the engine schedules them with it set up."""
        if draft == "self":
            return self.self_drafting
        if draft_kind(draft, method) not in self.synchronous_drafts:
            return self
        sequence_s = self.older_sequence_overhead_s
        if sequence_s is None:
            sequence_s = self.sequence_overhead_s
        return msgspec.structs.replace(
            self,
            sequence_overhead_s=sequence_s,
            step_overhead_s=self.step_overhead_s + self.synchronous_step_overhead_s,
        )

    def is_speculation_fitted(
        self, device: str, weight_dtype: str, kv_dtype: str
    ) -> bool:
        """Whether servers with speculation were measured on this device with these formats (or
        nothing says where).
        """
        if not self.speculation_fitted:
            return True
        return f"{device}/{weight_dtype}/{kv_dtype}" in self.speculation_fitted

    def speedup_error_for(
        self,
        device: str,
        weight_dtype: str,
        kv_dtype: str,
        draft: str = "",
    ) -> float:
        """Relative error (one standard deviation) of a speedup, by where servers with speculation
        were measured, and with which kind of draft ("": one of them).
        """
        if self.other_speedup_error is None:
            return self.speedup_relative_error
        is_known = self.is_speculation_fitted(device, weight_dtype, kv_dtype)
        if self.speculation_fitted_drafts and draft:
            is_known = is_known and draft in self.speculation_fitted_drafts
        if is_known:
            return self.speedup_relative_error
        return max(self.other_speedup_error, self.speedup_relative_error)

    def of_version(self, version: str) -> EngineProfile:
        """The profile of a version ("0.12.0"). A version that cannot be read ("patched") is taken
        as the newest, one that is not named as the oldest."""
        number = version_number(version)
        if version and not number:
            return self
        profile = self
        for bound in sorted(self.before, key=version_number, reverse=True):
            if number < version_number(bound):
                profile = msgspec.structs.replace(profile, **self.before[bound])
        older_s = self.older_sequence_overhead_s
        if older_s is None or number >= version_number(self.asynchronous_since):
            return profile
        return msgspec.structs.replace(profile, sequence_overhead_s=older_s)

    def is_captured(self, *, batch: int, gamma: int, tp_size: int) -> bool:
        """Whether a step's passes run as captured graphs, as the engine is set by default."""
        most = self.captured_batch
        if tp_size >= 4 and self.captured_batch_wide:
            most = self.captured_batch_wide
        if most is not None and batch > most:
            return False
        tokens = self.captured_tokens
        return tokens is None or batch * (gamma + 1) <= tokens

    def runs(self, draft: str, method: str) -> bool:
        return draft_kind(draft, method) in self.drafts

    def draft_call(self, method: str) -> dict[str, str | bool]:
        """The settings that ask for a method there."""
        return self.draft_calls.get(method) or self.draft_calls.get("model", {})

    def runs_staged(self, draft: str, method: str, pp_size: int) -> bool:
        """Whether the engine runs a draft with this many pipeline stages."""
        return pp_size == 1 or draft_kind(draft, method) in self.staged_drafts

    def __post_init__(self) -> None:
        for kind in (*self.drafts, *self.staged_drafts, *self.synchronous_drafts):
            if kind not in DRAFT_KINDS:
                known = ", ".join(DRAFT_KINDS)
                raise ValueError(f"'drafts' must be of {known}, not '{kind}'")
        lengths = [float(tokens) for tokens in self.lookup_scan_s]
        shortest_s = min(self.lookup_scan_s.values(), default=0.0)
        if lengths != sorted(set(lengths)) or shortest_s < 0.0:
            raise ValueError(
                "'lookup_scan_s' needs times of at least 0 by ascending lengths"
            )
        if self.runner and self.runner not in self.self_draft:
            known = ", ".join(self.self_draft)
            raise ValueError(f"'runner' must be one of {known}, not '{self.runner}'")
        if not (
            self.gamma_table_cost_low
            <= self.gamma_table_cost
            <= self.gamma_table_cost_high
        ):
            raise ValueError("'gamma_table_cost' must lie in its interval")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float | int) and not isinstance(value, bool):
                _check_constant(name, value)


def version_number(version: str) -> tuple[int, ...]:
    """(0, 12, 0) of "0.12.0rc1": what orders versions."""
    numbers = re.match(r"\D*(\d+(?:\.\d+)*)", version)
    if numbers is None:
        return ()
    return tuple(int(part) for part in numbers[1].split("."))


def engine_names() -> list[str]:
    return sorted(path.stem for path in ENGINES_DIRECTORY.glob("*.toml"))


def engines_that_run(draft: str, method: str) -> list[str]:
    """Engines of the catalog, serving engines first."""
    able = [name for name in engine_names() if load_engine(name).runs(draft, method)]
    return sorted(
        able, key=lambda name: (name not in SERVING_ENGINES, name != "vllm", name)
    )


def load_engine(name_or_path: str | Path) -> EngineProfile:
    """A profile of the catalog, or of a TOML file. Raises ConfigError naming the file and the key,
    or the nearest known name."""
    text = str(name_or_path)
    if "/" in text or text.endswith(".toml"):
        return engine_from_document(read_toml(Path(text), "engine profile"), where=text)
    return _of_catalog(text)


@lru_cache(maxsize=64)
def _of_catalog(text: str) -> EngineProfile:
    path = ENGINES_DIRECTORY / f"{text.lower()}.toml"
    if not path.is_file():
        raise unknown_choice("engine", text, engine_names())
    return engine_from_document(read_toml(path, "engine profile"), where=str(path))


def engine_from_document(document: dict[str, Any], *, where: str) -> EngineProfile:
    """The profile that a parsed TOML document describes; ConfigError names `where` and the key."""
    return converted(document, EngineProfile, where=where)


def save_engine(profile: EngineProfile, path: Path) -> None:
    """Writes a profile as TOML, whole or not at all. Raises StorageError when the file cannot be
    written.
    """
    write_atomic(path, msgspec.toml.encode(profile))
