"""A server, and its draft, as a command describes them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from magicdec.specs.device import DTYPE_BYTES
from magicdec.specs.engine import EngineProfile, load_engine, version_number
from magicdec.specs.engine_path import PathOptions
from magicdec.specs.formats import format_name
from magicdec.specs.serve_command.options import LLAMA_CPP, OPTIONS, names_of, title_of
from magicdec.specs.speculation import TreeSpec

DRAFTING_OVERLAPS_SINCE = "0.5.11"
"""SGLang schedules speculation while the device runs from here on; before, SGLANG_ENABLE_SPEC_V2=1 does, but
for n-grams (sglang/srt/environ.py and server_args.py of 0.5.10)."""
DRAFTING_ALWAYS_OVERLAPS_SINCE = "0.5.16"
"""SGLang has no such variable from here on (sglang/srt/arg_groups/speculative_hook.py of 0.5.16)."""
STATES_BUFFERED_SINCE = (0, 5, 14)
OFF = ("0", "false", "False")
UNFITTED = Path(__file__).resolve().parents[1] / "data" / "unfitted"
"""Profiles of engines that nobody fitted."""


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """A server's draft."""

    draft: str
    """"ngram", "eagle3" and so on, or the draft model's name."""
    gamma: int | None = None
    """Drafted tokens per step; None: the engine's default."""
    checkpoint: str | None = None
    """The head's or the draft's repository."""
    by_batch: bool = False
    """Whether gamma follows a table by batch."""
    bands: tuple[tuple[int, int, int], ...] = ()
    """That table, where the command has it: first and last batch, gamma."""
    is_tree: bool = False
    """Whether drafts branch."""
    tree: TreeSpec | None = None
    """Their shape, where it is known."""
    window: int | None = None
    """Tokens that a head's attention is cut to; None: its whole cache."""
    tp_size: int | None = None
    """Ranks of the draft, where the command says."""
    is_eager: bool = False
    """Whether the drafter's passes are launched kernel by kernel."""
    switches: list[str] = []
    """Keys of its configuration that are turned on."""
    weight_dtype: str | None = None
    """Format of the draft's weights, where the command says."""
    imposed_length: float | None = None
    """Tokens per step that a benchmark's setting imposes, whatever the draft."""
    lossy: list[str] = []
    """Settings with which the output is no longer the target's own."""

    def gamma_at(self, batch: int) -> int | None:
        """Gamma of steps with so many sequences; None: the engine's default."""
        for first, last, gamma in self.bands:
            if first <= batch <= last:
                return gamma
        return self.gamma


class ServeCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A server as its command describes it; None: the engine's default."""

    engine: str
    model: str
    version: str | None = None
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ep_size: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    allocated_tokens: int | None = None
    """Tokens of all sequences whose cache is allocated at the start; None: it grows, or the number is
    the engine's."""
    is_partly_on_host: bool = False
    """Whether layers, experts or the cache stay in the host's memory."""
    is_fitted: bool = False
    """Whether what does not fit goes to the host by itself (llama.cpp's --fit)."""
    split: str = ""
    """llama.cpp's way to spread a model over devices: by layers, rows or tensors."""
    is_unsplit_attention: bool = False
    """Whether attention writes its scores to memory (llama.cpp's -fa off)."""
    prefill_tokens: int | None = None
    """Tokens of a pass that reads prompts, where the engine's profile has others by default."""
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    speculation: Speculation | None = None
    captured_tokens: int | None = None
    """The most tokens of a pass, or sequences, whose graph is captured, where the command says."""
    graphs: str | None = None
    """"whole", "piecewise", "none" (compiled, launched kernel by kernel) or "eager" (neither)."""
    is_asynchronous: bool | None = None
    """Whether the next step is scheduled while one runs."""
    has_prefix_cache: bool | None = None
    chunk_tokens: int | None = None
    """The most tokens of a pass that reads prompts."""
    prompt_part_tokens: int | None = None
    """The most tokens of one prompt that a pass reads."""
    runner: str = ""
    """"V1" or "V2": vLLM's model runner, where a variable says."""
    has_microbatches: bool = False
    """Whether vLLM overlaps two halves of a batch."""
    attention_backend: str = ""
    """The target's attention backend, where the command says."""
    draft_attention_backend: str = ""
    """The draft's."""
    captures_prompts: bool | None = None
    """Whether SGLang's passes over prompts replay captured pieces, where the command says."""
    has_custom_all_reduce: bool = True
    """Whether the engine sums over ranks by its own kernels."""
    reaches_peers: bool = True
    """Whether NCCL reads the memory of other devices without the host's."""
    frees_windows: bool = True
    """Whether tokens that left a layer's window give their memory back."""
    overlaps_drafting: bool | None = None
    """Whether SGLang schedules speculation while the device runs, where a variable says."""
    attention_dp_size: int = 1
    """Groups of the ranks that each attend to sequences of their own."""
    context_ranks: int = 1
    """Ranks that share the tokens of a cache."""
    prompt_ranks: int = 1
    """Groups of devices that divide each prompt's tokens."""
    host_weight_bytes: float = 0.0
    """Bytes of each device's weights that stay in the host's memory."""
    cache_tokens: int | None = None
    """Tokens that the cache holds, where the command says."""
    cache_bytes: float | None = None
    """Bytes of the cache on each device, where the command says."""
    state_dtype: str | None = None
    """Format of recurrent states, where the command says."""
    temperature: float | None = None
    """Temperature of clients that name none, where the command says."""
    captured_batches: tuple[int, ...] = ()
    """Batches that alone have graphs, where none is padded to the next; empty: all up to a number."""
    states_strategy: str = ""
    """SGLang's way to keep recurrent states for its prefix cache, where the command says."""
    memory_fraction: float | None = None
    hardware: str | None = None
    """Device, where the file names it."""
    num_gpus: int | None = None
    """Devices that the file grants."""
    read: dict[str, str] = {}
    """Options that bear on speed, as written."""
    noted: dict[str, str] = {}
    """Options, keys and variables without a price, with what they can cost and where that was seen."""
    without_effect: list[str] = []
    """Options, keys and variables that change no time, memory or acceptance."""
    not_looked_at: list[str] = []
    """Options, keys and variables that the engine has, and of which nothing is known here."""
    not_understood: list[str] = []
    problems: list[str] = []
    """Settings with which the engine stops."""
    asked: list[str] = []
    """Questions on which the price depends."""
    notes: list[str] = []
    unread: str | None = None
    """File of further options, which is not here."""

    def option_of(self, meaning: str) -> str:
        """The option that it states a meaning by, else the one that the engine is asked by."""
        names = [
            name for name, means in OPTIONS[self.engine].items() if means == meaning
        ]
        given = {name.lstrip("-"): name for name in self.read}
        return next((given[name] for name in names if name in given), f"--{names[0]}")

    @property
    def settings(self) -> frozenset[str]:
        """Names of the options, keys and variables that are given, and not turned off."""
        on = {name for name, value in self.read.items() if value not in OFF}
        if self.speculation is not None:
            on.update(self.speculation.switches)
        others = (self.noted, self.without_effect, self.not_looked_at)
        return frozenset(on.union(*others))

    @property
    def num_devices(self) -> int:
        """Devices that it uses."""
        return self.tp_size * self.pp_size * self.dp_size * self.prompt_ranks

    @property
    def engine_profile(self) -> str:
        """The engine's profile, of the version that the command names: "vllm@0.12.0"."""
        if self.engine == LLAMA_CPP:
            return str(UNFITTED / f"{LLAMA_CPP}.toml")
        if self.version is None or not version_number(self.version):
            return self.engine
        return f"{self.engine}@{self.version}"

    @property
    def started_engine(self) -> EngineProfile:
        """The engine's profile with the settings that are not weighed one by one (live/settings.py)."""
        engine = load_engine(self.engine_profile)
        number = version_number(self.version or "")
        is_newer = self.overlaps_drafting
        drafts = self.speculation is not None and self.speculation.draft != "ngram"
        if number and is_newer is not None and drafts:
            bound = DRAFTING_OVERLAPS_SINCE
            until = DRAFTING_ALWAYS_OVERLAPS_SINCE
            is_older = number < version_number(bound)
            if is_older == is_newer and number < version_number(until):
                engine = engine.with_costs_of(bound, is_newer=is_newer)
        if self.prefill_tokens is not None:
            tokens = {"scheduler.prefill_tokens": self.prefill_tokens}
            engine = engine.with_constants(tokens)
        if self.captures_prompts is not None:
            captured = {"graphs.captured_prompts": self.captures_prompts}
            engine = engine.with_constants(captured)
        if self.memory_fraction is not None:
            engine = engine.with_constants(
                {
                    "memory.memory_fraction": self.memory_fraction,
                    "memory.set_aside": (),
                }
            )
        if self.host_weight_bytes:
            engine = engine.with_constants(
                {"memory.host_weight_bytes": self.host_weight_bytes}
            )
        return engine.as_set(
            PathOptions(
                runner=self.runner,
                has_microbatches=self.has_microbatches,
                attention_backend=self.attention_backend,
                draft_attention_backend=self.draft_attention_backend,
                context_ranks=self.context_ranks,
                state_element_bytes=DTYPE_BYTES.get(
                    format_name(self.state_dtype or "")
                ),
                frees_windows=self.frees_windows,
            )
        )

    @property
    def most_sequences(self) -> int | None:
        """Sequences that it admits at once, on all its data-parallel ranks."""
        if self.max_num_seqs is None:
            return None
        if load_engine(self.engine_profile).options.is_batch_of_rank:
            return self.max_num_seqs * self.dp_size
        return self.max_num_seqs

    @property
    def keeps_states_between_steps(self) -> bool:
        """Whether SGLang's prefix cache of recurrent states takes the overlap away: by "no_buffer", the
        default before 0.5.14 (sglang/srt/server_args.py of 0.5.10 and 0.5.13)."""
        if self.engine != "sglang" or self.has_prefix_cache is False:
            return False
        strategy = self.states_strategy or "auto"
        number = version_number(self.version or "")
        if strategy == "auto" and number:
            return number < STATES_BUFFERED_SINCE
        return strategy == "no_buffer"

    @property
    def why_not_understood(self) -> str:
        """Which versions' options were compared."""
        return f"not in {title_of(self.engine)} {names_of(self.engine).range}"
