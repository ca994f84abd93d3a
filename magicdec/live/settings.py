"""The cost of a server's settings: graphs that are off or too few, scheduling between steps, an eager
drafter, prompts read anew or in small parts, steps with too few tokens; and those with which a
draft's output is not the target's own.

A setting's price is the time per token with it over the time without, by the engine's path.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import msgspec

from magicdec.counts import Z_90
from magicdec.perfmodel import Case, DraftOption, draft_of, search
from magicdec.schema import Candidate, Gain
from magicdec.specs import EngineProfile, PathOptions, ServeCommand, load_engine

HOST_ERROR = 0.35
"""Relative standard deviation of what a path adds: the host's time per layer differs by a factor of
two between the servers that were measured."""
SHARED_SHARES = (0.0, 0.5, 0.9)
"""Shares of a prompt that others have too, where prompts are read anew: least, middle, most."""
USUAL_OUTPUT = 256
"""Generated tokens of a request, where none are given."""
LIKELY = 0.75
"""Probability from which a change is advised: three to one."""
LONG_PROMPT = 1024
"""Tokens of a prompt from which reading it anew is named."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to change, and what it gains in tokens per second at the same load."""

    change: str
    """The setting to change, in a few words."""
    option: str
    """The option, as the engine calls it."""
    reason: str
    gain: float | None
    """Null: not priced."""
    gain_low: float | None = None
    gain_high: float | None = None
    """The 90 % interval."""
    chance: float | None = None
    """Probability that it gains; null: by the interval alone."""
    at_batch: int | None = None
    """Batch at which it gains, where that is not the load's."""
    kind: Literal["cost", "exactness", "gain"] = "gain"
    """A setting that costs time whatever is drafted, one that changes what is generated, or another
    way to serve."""
    needs_gpus: int | None = None
    """Devices that it takes, where the command uses fewer."""

    @property
    def is_sure(self) -> bool:
        """Whether it gains more than its uncertainty."""
        return self.gain_low is not None and self.gain_low > 1.0

    @property
    def is_likely(self) -> bool:
        """Whether it gains rather than loses: no toss of a coin."""
        if self.gain is None or self.gain_low is None or self.gain_high is None:
            return False
        gain = Gain(
            speedup=self.gain, low=self.gain_low, high=self.gain_high, pays=self.chance
        )
        return gain.probability >= LIKELY


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The command's own row, and the case that gives it at other settings."""

    case: Case
    option: DraftOption | None
    row: Candidate
    gen_len: int

    @property
    def borrows_host_times(self) -> bool:
        """Whether what a host takes to launch a layer is vLLM's, since it was not measured here."""
        return self.case.engine.graphs.eager_host_layer_s == 0.0

    def row_as(self, engine: EngineProfile) -> Candidate | None:
        """The row's configuration on an engine that is set otherwise; None: it does not run."""
        options: tuple[DraftOption, ...] = ()
        if self.option is not None:
            options = (self.option,)
        case = replace(self.case, engine=engine, options=options)
        for found in search(case, None):
            for row in found.rows:
                is_same = row.gamma == self.row.gamma
                if is_same and row.draft_budget == self.row.draft_budget:
                    return row
        return None


class AsSet(msgspec.Struct, frozen=True, kw_only=True):
    """Times between tokens with a command's graphs and scheduling."""

    between_tokens_s: float
    without_draft_s: float

    @property
    def speedup(self) -> float:
        """Over no draft, both being set alike."""
        return self.without_draft_s / self.between_tokens_s


def as_set(command: ServeCommand, served: Served, alone: Served) -> AsSet | None:
    """The command's row and the one without a draft, as the command sets graphs and scheduling. None:
    it leaves both as they are by default."""
    usual = with_host_times(served.case.engine)
    otherwise_s = usual.graphs.piecewise_s(served.case.model.num_hidden_layers)
    times = []
    is_usual = True
    for each in (served, alone):
        options = command.path_options
        if not _is_captured(command, each):
            options = msgspec.structs.replace(options, enforce_eager=True)
        engine = usual.as_set(options)
        is_usual = is_usual and engine == usual
        is_other_graph = engine.paths.graph_mode != usual.paths.graph_mode
        row = each.row_as(engine)
        least = each.row_as(served.case.engine.as_set(options))
        if row is None or least is None:
            return None
        seconds = row.between_tokens_s
        if is_other_graph:  # the middle of the two laws, as costs have it
            other = 1.0 + otherwise_s / each.row.step_s
            seconds = (seconds + other * each.row.between_tokens_s) / 2.0
        if served.borrows_host_times:  # and of none of them
            seconds = (seconds + least.between_tokens_s) / 2.0
        times.append(seconds)
    if is_usual:
        return None
    return AsSet(between_tokens_s=times[0], without_draft_s=times[1])


def unpriced_costs(command: ServeCommand) -> Iterator[Change]:
    """Settings that surely cost whatever is served, and those that lose exactness, where nothing fits
    that would price them."""
    for change in (_without_whole_graphs(command), _scheduled_between_steps(command)):
        if change is not None:
            yield change
    yield from _of_exactness(command)


def settings_costs(command: ServeCommand, served: Served) -> Iterator[Change]:
    """Settings that surely cost, and those that lose exactness."""
    yield from _of_graphs(command, served)
    yield from _of_scheduling(command, served)
    yield from _of_drafter(command, served)
    yield from _of_step(command, served)
    yield from _of_prompts(command, served)
    yield from _of_exactness(command)


def _without_whole_graphs(command: ServeCommand) -> Change | None:
    """The setting that turns whole graphs of decoding off, not priced; None: there is none."""
    by_mode = {
        "piecewise": (
            "Replay whole graphs of decoding, not piecewise ones",
            "attention and what lies around it are launched layer by layer",
        ),
        "none": (
            "Capture graphs: none is replayed",
            "every pass launches its kernels one by one",
        ),
        "eager": (
            "Capture graphs: it runs eagerly",
            "every pass launches its kernels one by one, uncompiled",
        ),
    }
    if command.graphs not in by_mode:
        return None
    change, reason = by_mode[command.graphs]
    option = _graph_option(command)
    return Change(change=change, option=option, reason=reason, gain=None, kind="cost")


def _of_graphs(command: ServeCommand, served: Served) -> Iterator[Change]:
    """Decoding outside whole graphs: by a setting, or beyond the largest captured size."""
    engine = with_host_times(served.case.engine)
    otherwise_s = engine.graphs.piecewise_s(served.case.model.num_hidden_layers)
    setting = _without_whole_graphs(command)
    if setting is not None:
        mode = command.graphs or ""
        options = PathOptions(enforce_eager=mode != "piecewise", cudagraph_mode=mode)
        yield _cost(served, engine.as_set(options), setting, otherwise_s=otherwise_s)
        return
    needed = _graph_size(command, served)
    unit = "sequences"
    option = f"--cuda-graph-max-bs {needed}"
    if command.engine == "vllm":
        unit = "tokens"
        option = f"--max-cudagraph-capture-size {needed}"
    elif command.engine == "trtllm":
        option = f"cuda_graph_config: max_batch_size: {needed}"
    if not _is_captured(command, served):
        uncaptured = Change(
            change=f"Capture graphs of {needed} {unit}",
            option=option,
            reason="a step of this batch runs without a graph",
            gain=None,
            kind="cost",
        )
        eager = engine.as_set(PathOptions(enforce_eager=True))
        yield _cost(served, eager, uncaptured, otherwise_s=otherwise_s)


def _graph_size(command: ServeCommand, served: Served) -> int:
    """The size of the graph that a step replays: in tokens in vLLM, in sequences elsewhere."""
    row = served.row
    if command.engine == "vllm":
        return row.batch_size * (row.gamma + 1)
    return row.batch_size


def _is_captured(command: ServeCommand, served: Served) -> bool:
    """Whether the command, or else the engine's default, captures the graph of a step."""
    if command.captured_tokens is None:
        return served.row.step.is_captured
    return command.captured_tokens >= _graph_size(command, served)


def with_host_times(engine: EngineProfile) -> EngineProfile:
    """The engine with vLLM's times of the host where its own were not measured: Python schedules the
    sequences of either, and PyTorch launches their kernels."""
    usual = load_engine("vllm")
    older_s = usual.overheads.older_sequence_overhead_s or 0.0
    if engine.overheads.older_sequence_overhead_s is None:
        more_s = older_s - usual.overheads.sequence_overhead_s
        engine = engine.with_constants(
            {
                "overheads.older_sequence_overhead_s": engine.overheads.sequence_overhead_s
                + more_s
            }
        )
    if engine.graphs.eager_host_layer_s > 0.0:
        return engine
    graphs = usual.graphs
    return engine.with_constants(
        {
            "graphs.piecewise_host_layer_s": graphs.piecewise_host_layer_s,
            "graphs.eager_host_layer_s": graphs.eager_host_layer_s,
            "graphs.eager_head_layer_s": graphs.eager_head_layer_s,
            "graphs.piecewise_layer_s": graphs.piecewise_layer_s,
            "graphs.piecewise_pass_s": graphs.piecewise_pass_s,
        }
    )


def _graph_option(command: ServeCommand) -> str:
    """The option to leave out, as it is written."""
    for option, value in command.read.items():
        names = ("--O", "--optimization-level", "--compilation-config")
        if "graph" in option or "eager" in option or option in names:
            if option == "--O":
                return f"leave out -O{value}"
            if value == "true":
                return f"leave out {option}"
            return f"leave out {option} '{value}'"
    return "leave out the option that turns graphs off"


def _scheduled_between_steps(command: ServeCommand) -> Change | None:
    """The setting that turns asynchronous scheduling off, not priced; None: there is none."""
    if command.is_asynchronous is not False:
        return None
    option = {
        "vllm": "leave out --no-async-scheduling",
        "sglang": "leave out --disable-overlap-schedule",
        "trtllm": "disable_overlap_scheduler: false",
        "llama.cpp": "",
    }[command.engine]
    return Change(
        change="Schedule the next step while one runs",
        option=option,
        reason="the device waits for the host between steps",
        gain=None,
        kind="cost",
    )


def _of_scheduling(command: ServeCommand, served: Served) -> Iterator[Change]:
    engine = with_host_times(served.case.engine)
    path = engine.path(served.row.draft, served.row.draft_method)
    setting = _scheduled_between_steps(command)
    if setting is not None and path.is_asynchronous:
        yield _cost(served, engine.as_set(PathOptions(is_synchronous=True)), setting)


def _of_drafter(command: ServeCommand, served: Served) -> Iterator[Change]:
    """A draft model or a head that is launched kernel by kernel."""
    speculation = command.speculation
    is_eager = speculation is not None and speculation.is_eager
    if not is_eager or command.graphs == "eager" or served.option is None:
        return
    if not draft_of(served.case.setup(served.option)).has_prefill:
        return
    engine = with_host_times(served.case.engine)
    eager = engine.with_constants(
        {
            "overheads.head_layer_s": engine.graphs.eager_head_layer_s,
            "overheads.draft_model_layer_s": engine.graphs.eager_host_layer_s,
        }
    )
    setting = Change(
        change="Capture the drafter's graphs too",
        option='leave "enforce_eager" out of --speculative-config',
        reason="each of its layers is launched kernel by kernel, for every drafted token",
        gain=None,
        kind="cost",
    )
    yield _cost(served, eager, setting)


def _of_step(command: ServeCommand, served: Served) -> Iterator[Change]:
    """A limit on a step's tokens below what its sequences verify."""
    row = served.row
    needed = row.batch_size * (row.gamma + 1)
    most = command.chunk_tokens
    if most is None or command.engine != "vllm" or most >= needed:
        return
    at_once = max(most // (row.gamma + 1), 1)
    # how often all sequences draft at once is not known: from a tenth of the loss to all of it
    gain = row.batch_size / at_once
    yield Change(
        change=f"Let a step take {needed} tokens, not {most}",
        option=f"--max-num-batched-tokens {max(needed, 2048)}",
        reason=f"only {at_once} of {row.batch_size} sequences have room for their drafts in a step",
        gain=math.sqrt(gain),
        gain_low=1.0 + 0.1 * (gain - 1.0),
        gain_high=gain,
        kind="cost",
    )


def _of_prompts(command: ServeCommand, served: Served) -> Iterator[Change]:
    """Prompts that are read anew, or in parts smaller than the device needs."""
    row = served.row
    output_s = (served.gen_len or USUAL_OUTPUT) * row.tpot_s
    prompt_s = row.decoding.ttft_s
    if command.has_prefix_cache is False and row.context_len >= LONG_PROMPT:
        low, middle, high = (
            (prompt_s + output_s) / ((1.0 - share) * prompt_s + output_s)
            for share in SHARED_SHARES
        )
        option = {
            "vllm": "leave out --no-enable-prefix-caching",
            "sglang": "leave out --disable-radix-cache",
            "trtllm": "kv_cache_config: enable_block_reuse: true",
            "llama.cpp": "--cache-prompt",
        }[command.engine]
        yield Change(
            change="Keep prompts in the prefix cache",
            option=option,
            reason=f"each prompt of {row.context_len} tokens is read anew in {prompt_s:.2g} s; "
            f"where half of it is shared by others, requests end so much sooner",
            gain=middle,
            gain_low=low,
            gain_high=high,
        )
    engine = served.case.engine
    most = command.chunk_tokens
    usual = engine.scheduler.prefill_tokens
    if most is None or most >= min(usual, row.context_len):
        return
    small = served.row_as(
        engine.with_constants({"scheduler.prefill_tokens": float(most)})
    )
    if small is None:
        return
    gain = (small.decoding.ttft_s + output_s) / (prompt_s + output_s)
    setting = Change(
        change=f"Read prompts in parts of {usual:.0f} tokens, not {most}",
        option=f"{CHUNK_OPTIONS[command.engine]} {usual:.0f}",
        reason=f"a prompt of {row.context_len} tokens takes {small.decoding.ttft_s:.2g} s to read, "
        f"not {prompt_s:.2g}",
        gain=None,
        kind="cost",
    )
    yield _between(gain, gain, setting)


CHUNK_OPTIONS = {
    "vllm": "--max-num-batched-tokens",
    "sglang": "--chunked-prefill-size",
    "trtllm": "--max_num_tokens",
    "llama.cpp": "--batch-size",
}
"""Each engine's option for the tokens of a prompt that one step reads."""


def _of_exactness(command: ServeCommand) -> Iterator[Change]:
    speculation = command.speculation
    if speculation is None:
        return
    for setting in speculation.lossy:
        yield Change(
            change="Accept drafts exactly",
            option=f"leave out {setting}",
            reason="with it drafts are accepted that the model would not have generated",
            gain=None,
            kind="exactness",
        )


def _cost(
    served: Served,
    engine: EngineProfile,
    setting: Change,
    *,
    otherwise_s: float | None = None,
) -> Change:
    """A setting, priced by its time per token over that of the engine as it is by default.

    `otherwise_s`: what a step takes more by another law that fits the same measurements; the two
    are then the ends, widened by the host's error. With vLLM's times of the host the ends are their
    middle and no cost.
    """
    row = served.row_as(engine)
    if row is None:
        return setting
    gain = row.tpot_s / served.row.tpot_s
    other = gain
    if otherwise_s is not None:
        other = 1.0 + otherwise_s / served.row.step_s
        if served.borrows_host_times:
            gain = (gain + other) / 2.0
            other = 1.0
            unmeasured = f"not measured in {served.case.engine.name}: from nothing to vLLM's times of the host"
            setting = msgspec.structs.replace(
                setting, reason=f"{setting.reason}; {unmeasured}"
            )
    return _between(gain, other, setting)


def _between(first: float, second: float, setting: Change) -> Change:
    """A cost between two estimates, of whose parts beyond 1 each is known to `HOST_ERROR`; a
    setting of this kind never gains."""
    width = math.exp(Z_90 * HOST_ERROR)
    least = max(min(first, second) - 1.0, 0.0)
    most = max(first, second, 1.0) - 1.0
    return msgspec.structs.replace(
        setting,
        gain=1.0 + (least + most) / 2.0,
        gain_low=1.0 + least / width,
        gain_high=1.0 + most * width,
    )
