"""The cost of a server's settings: graphs that are off or too few, scheduling between steps, an eager
drafter, prompts read anew or in small parts, steps with too few tokens; and those with which a
draft's output is not the target's own.

Each setting is a difference of the engine's path. The server as it is set has all of them, and a
setting's price is the time per token so over the time without that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import msgspec

from magicdec.counts import Z_90
from magicdec.perfmodel.drafting import draft_of
from magicdec.perfmodel.plan.request import Case, DraftOption
from magicdec.perfmodel.plan.search import search
from magicdec.schema.row import Candidate, Gain
from magicdec.specs.engine import EngineProfile, load_engine
from magicdec.specs.engine_path import PathOptions
from magicdec.specs.serve_command import ServeCommand

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
    """A row of a plan, and the case that gives it at other settings."""

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
    """Times between tokens with every setting of a command that costs."""

    between_tokens_s: float
    without_draft_s: float

    @property
    def speedup(self) -> float:
        """Over no draft, both being set alike."""
        return self.without_draft_s / self.between_tokens_s


class Setting(NamedTuple):
    """A setting of a command that changes the engine's path, and the path with it."""

    change: Change | None
    """The advice to leave it out, not priced; None: it cannot be left out."""
    path: Callable[[EngineProfile], EngineProfile]
    is_of_graphs: bool = False
    """Whether two laws fit what was measured of it, so its price lies between them."""


class SettingCosts(NamedTuple):
    """A command's settings that cost or lose exactness, each priced against the command without it."""

    changes: list[Change]
    as_set: AsSet | None
    """None: nothing costs, or the server does not run so."""


def costs_of(
    command: ServeCommand, served: Served, alone: Served, *, waiting: float = 1.0
) -> SettingCosts:
    """Prices a command's settings: the time per token as it is set over the time without one of them.

    `alone` is the server without its draft, `waiting` the factor by which users who do not fit slow all.
    """
    limits = [*_limits(command, served)]
    is_usual = waiting == 1.0
    as_set_s = []
    for each, set_there in ((served, limits), (alone, [*_limits(command, alone)])):
        settings = path_settings(command, each)
        costs = [change.gain or 1.0 for change in set_there if change.kind == "cost"]
        is_usual = is_usual and not settings and not costs
        times = PathTimes.of(each, settings)
        if times is not None:
            as_set_s.append(times.between_tokens_s * math.prod(costs) * waiting)
    as_set = None
    if not is_usual and len(as_set_s) == 2:
        between_tokens_s, without_draft_s = as_set_s
        as_set = AsSet(
            between_tokens_s=between_tokens_s, without_draft_s=without_draft_s
        )
    of_path = _path_costs(served, path_settings(command, served))
    return SettingCosts([*of_path, *limits, *_inexact(command)], as_set)


def unpriced_costs(command: ServeCommand) -> list[Change]:
    """Settings that surely cost whatever is served, and those that lose exactness, where nothing fits
    that would price them."""
    changes = []
    for setting in path_settings(command, None):
        if setting.change is not None:
            changes.append(setting.change)
    return [*changes, *_inexact(command)]


class OptionTexts(NamedTuple):
    """An engine's options, as advice writes them."""

    speculation: str
    gamma: str
    table: str
    """Gamma by batch."""
    tp: str
    batch: str
    """Sequences at once."""
    chunk: str
    """Tokens of a prompt that one step reads."""
    captured: str
    """Largest step that has a graph."""
    asynchronous: str
    """Undoes what keeps a step from being scheduled while another runs."""
    prefix_cache: str


OPTIONS = {
    "vllm": OptionTexts(
        speculation="--speculative-config",
        gamma="--speculative-config '{config}'",
        table="--speculative-config '{config}'",
        tp="--tensor-parallel-size {}",
        batch="--max-num-seqs",
        chunk="--max-num-batched-tokens",
        captured="--max-cudagraph-capture-size {}",
        asynchronous="leave out --no-async-scheduling",
        prefix_cache="leave out --no-enable-prefix-caching",
    ),
    "sglang": OptionTexts(
        speculation="--speculative-algorithm",
        gamma="--speculative-num-draft-tokens {verified}",
        table="--speculative-adaptive",
        tp="--tp {}",
        batch="--max-running-requests",
        chunk="--chunked-prefill-size",
        captured="--cuda-graph-max-bs {}",
        asynchronous="leave out --disable-overlap-schedule",
        prefix_cache="leave out --disable-radix-cache",
    ),
    "trtllm": OptionTexts(
        speculation="speculative_config",
        gamma="speculative_config: max_draft_len: {gamma}",
        table="draft_len_schedule in speculative_config",
        tp="--tp_size {}",
        batch="--max_batch_size",
        chunk="--max_num_tokens",
        captured="cuda_graph_config: max_batch_size: {}",
        asynchronous="disable_overlap_scheduler: false",
        prefix_cache="kv_cache_config: enable_block_reuse: true",
    ),
    "llama.cpp": OptionTexts(
        speculation="--spec-type",
        gamma="--spec-draft-n-max {gamma}",
        table="",
        tp="--split-mode row",  # over all the devices that it sees
        batch="--parallel",
        chunk="--batch-size",
        captured="--cuda-graph-max-bs {}",
        asynchronous="",
        prefix_cache="--cache-prompt",
    ),
}
UNLIKE_WHOLE = {
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
"""Advice and reason by the graphs that a command leaves decoding with."""


def path_settings(command: ServeCommand, served: Served | None) -> list[Setting]:
    """The settings that change the path of a step, in the order in which they are applied; `served`
    None: those that do at any load."""
    settings = []
    has_graphs = command.graphs not in ("none", "eager")
    is_captured = True
    runs_ahead = True
    has_drafter = False
    # the size of the graph that a step replays: in tokens in vLLM, in sequences elsewhere
    needed = 0
    if served is not None:
        row = served.row
        needed = row.batch_size
        if command.engine == "vllm":
            needed *= row.gamma + 1
        is_captured = row.step.is_captured
        if command.captured_tokens is not None:
            is_captured = command.captured_tokens >= needed
        path = served.case.engine.path(row.draft, row.draft_method)
        runs_ahead = path.is_asynchronous
        if served.option is not None:
            has_drafter = draft_of(served.case.setup(served.option)).has_prefill
    if command.graphs in UNLIKE_WHOLE:
        change, reason = UNLIKE_WHOLE[command.graphs]
        mode = PathOptions(enforce_eager=not has_graphs, cudagraph_mode=command.graphs)
        settings.append(
            Setting(
                _unpriced(change, _graph_option(command), reason),
                lambda engine: engine.as_set(mode),
                is_of_graphs=True,
            )
        )
    elif not is_captured:
        has_graphs = False
        unit = "tokens" if command.engine == "vllm" else "sequences"
        settings.append(
            Setting(
                _unpriced(
                    f"Capture graphs of {needed} {unit}",
                    OPTIONS[command.engine].captured.format(needed),
                    "a step of this batch runs without a graph",
                ),
                lambda engine: engine.as_set(PathOptions(enforce_eager=True)),
                is_of_graphs=True,
            )
        )
    if command.is_asynchronous is False and runs_ahead:
        settings.append(
            Setting(
                _unpriced(
                    "Schedule the next step while one runs",
                    OPTIONS[command.engine].asynchronous,
                    "the device waits for the host between steps",
                ),
                lambda engine: engine.as_set(PathOptions(is_synchronous=True)),
            )
        )
    if served is None:
        return settings
    speculation = command.speculation
    is_eager = speculation is not None and speculation.is_eager
    # without graphs the drafter is launched kernel by kernel whatever its own setting
    if is_eager and has_graphs and has_drafter:
        settings.append(
            Setting(
                _unpriced(
                    "Capture the drafter's graphs too",
                    'leave "enforce_eager" out of --speculative-config',
                    "each of its layers is launched kernel by kernel, for every drafted token",
                ),
                lambda engine: engine.with_constants(
                    {
                        "overheads.head_layer_s": engine.graphs.eager_head_layer_s,
                        "overheads.draft_model_layer_s": engine.graphs.eager_host_layer_s,
                    }
                ),
            )
        )
    if command.pp_size > 1:
        stages = PathOptions(pp_size=command.pp_size)
        if served.case.engine.as_set(stages) != served.case.engine:
            settings.append(Setting(None, lambda engine: engine.as_set(stages)))
    return settings


def _unpriced(change: str, option: str, reason: str) -> Change:
    return Change(change=change, option=option, reason=reason, gain=None, kind="cost")


class PathTimes(NamedTuple):
    """Times on a path, in the middle of the laws that fit what was measured."""

    tpot_s: float
    between_tokens_s: float
    ends: tuple[float, float] = (1.0, 1.0)
    """The time per token by each of the two laws of graphs, over the time with whole graphs."""

    @classmethod
    def of(cls, served: Served, settings: Sequence[Setting]) -> PathTimes | None:
        """The times with these settings; None: the server does not run so.

        By one law the host launches each layer on the engine's path, by the other a step takes so much
        longer as its layers take piecewise. Of an engine whose host was not measured the price of graphs
        lies between nothing and the middle of vLLM's.
        """
        if not settings:
            return cls(served.row.tpot_s, served.row.between_tokens_s)
        usual = with_host_times(served.case.engine)
        engine = usual
        for setting in settings:
            engine = setting.path(engine)
        row = served.row_as(engine)
        if row is None:
            return None
        others = [setting for setting in settings if not setting.is_of_graphs]
        if len(others) == len(settings):
            return cls(row.tpot_s, row.between_tokens_s)
        whole: Candidate | None = served.row
        if others:
            engine = usual
            for setting in others:
                engine = setting.path(engine)
            whole = served.row_as(engine)
        if whole is None:
            return None
        layers = served.case.model.num_hidden_layers
        first = row.tpot_s / whole.tpot_s
        second = 1.0 + usual.graphs.piecewise_s(layers) / whole.step_s
        between_s = (row.between_tokens_s + second * whole.between_tokens_s) / 2.0
        if served.borrows_host_times:
            first = (first + second) / 2.0
            second = 1.0
            between_s = (between_s + whole.between_tokens_s) / 2.0
        return cls(whole.tpot_s * (first + second) / 2.0, between_s, (first, second))


def _path_costs(served: Served, settings: Sequence[Setting]) -> list[Change]:
    """Each setting with the time per token as all are set over the time without it."""
    times = PathTimes.of(served, settings)
    changes = []
    for setting in settings:
        change = setting.change
        if change is None:
            continue
        without = PathTimes.of(
            served, [other for other in settings if other is not setting]
        )
        if times is None or without is None:
            changes.append(change)
            continue
        first = second = times.tpot_s / without.tpot_s
        if setting.is_of_graphs:
            first, second = times.ends
            if served.borrows_host_times:
                unmeasured = f"not measured in {served.case.engine.name}: from nothing to vLLM's times of the host"
                change = msgspec.structs.replace(
                    change, reason=f"{change.reason}; {unmeasured}"
                )
        changes.append(_between(first, second, change))
    return changes


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


def _limits(command: ServeCommand, served: Served) -> Iterator[Change]:
    """Steps with too few tokens for what its sequences verify, and prompts that are read anew, or in
    parts smaller than the device needs."""
    row = served.row
    most = command.chunk_tokens
    needed = row.batch_size * (row.gamma + 1)
    if command.engine == "vllm" and most is not None and most < needed:
        at_once = max(most // (row.gamma + 1), 1)
        # how often all sequences draft at once is not known: from a tenth of the loss to all of it
        gain = row.batch_size / at_once
        yield Change(
            change=f"Let a step take {needed} tokens, not {most}",
            option=f"{OPTIONS['vllm'].chunk} {max(needed, 2048)}",
            reason=f"only {at_once} of {row.batch_size} sequences have room for their drafts in a step",
            gain=math.sqrt(gain),
            gain_low=1.0 + 0.1 * (gain - 1.0),
            gain_high=gain,
            kind="cost",
        )
    output_s = (served.gen_len or USUAL_OUTPUT) * row.tpot_s
    prompt_s = row.decoding.ttft_s
    if command.has_prefix_cache is False and row.context_len >= LONG_PROMPT:
        low, middle, high = (
            (prompt_s + output_s) / ((1.0 - share) * prompt_s + output_s)
            for share in SHARED_SHARES
        )
        yield Change(
            change="Keep prompts in the prefix cache",
            option=OPTIONS[command.engine].prefix_cache,
            reason=f"each prompt of {row.context_len} tokens is read anew in {prompt_s:.2g} s; "
            f"where half of it is shared by others, requests end so much sooner",
            gain=middle,
            gain_low=low,
            gain_high=high,
        )
    engine = served.case.engine
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
        option=f"{OPTIONS[command.engine].chunk} {usual:.0f}",
        reason=f"a prompt of {row.context_len} tokens takes {small.decoding.ttft_s:.2g} s to read, "
        f"not {prompt_s:.2g}",
        gain=None,
        kind="cost",
    )
    yield _between(gain, gain, setting)


def _inexact(command: ServeCommand) -> Iterator[Change]:
    """Settings with which a draft's output is not the target's own."""
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
