"""The cost of a server's settings: graphs that are off or too few, scheduling between steps, an eager
drafter, prompts read anew or in small parts, steps with too few tokens; and those with which a
draft's output is not the target's own.

Each setting is a difference of the engine's path. The server as it is has all of them, and a
setting's price is its time between tokens over the time without that one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from magicdec.counts import Z_90
from magicdec.live.options import (
    captured_option,
    graph_option,
    options_of,
    states_option,
)
from magicdec.perfmodel.drafting import draft_of
from magicdec.perfmodel.footprint import weights_bytes
from magicdec.perfmodel.kernels.links import RINGS, AllReduceCurve
from magicdec.perfmodel.plan.request import Case, DraftOption
from magicdec.perfmodel.plan.search import same_on
from magicdec.schema.row import Candidate, Gain
from magicdec.specs.engine import EngineProfile, load_engine
from magicdec.specs.engine_path import PathOptions
from magicdec.specs.serve_command import ServeCommand
from magicdec.units import format_seconds

HOST_ERROR = 0.35
"""Relative standard deviation of what a path adds: the host's time per layer differs by a factor of
two between the servers that were measured."""
SHARED_SHARES = (0.0, 0.5, 0.9)
"""Shares of a prompt that others have too, where prompts are read anew: least, middle, most."""
USUAL_OUTPUT = 256
"""Generated tokens of a request, where none are given."""
HOST_BYTES_PER_S = {
    "pascal": 12e9,
    "volta": 12e9,
    "turing": 12e9,
    "ampere": 25e9,
    "ada": 25e9,
    "hopper": 50e9,
    "blackwell": 50e9,
}
"""Bytes per second that a device reads of its host's memory, by its generation: four fifths of sixteen
lanes of PCIe 3, 4 and 5 (15.8, 31.5 and 63 GB/s, pcisig.com)."""
USUAL_HOST_BYTES_PER_S = 25e9
UNFUSED = 3.0
"""Times as long as attention takes in llama.cpp with -fa off: 2.7 to 2.9 for four models on Strix Halo at
2,000 tokens, 6 for Llama-2-7B, whose cache is the largest (kyuz0/amd-strix-halo-toolboxes and lhl's runs);
Mixtral fell from 44.7 to 22.9 tokens/s (llama.cpp pull request 5021)."""
NOTEWORTHY = 1.02
"""Gain below which a change is not worth a restart, and not named."""
LIKELY = 2.0 / 3.0
"""Probability to gain from which a change is named: no toss of a coin."""
SLOWER_TOKENS = 288.0 / 223.0
SLOWER_PROMPTS = 14087.0 / 11317.0
"""Two RTX 5090s whose NCCL went through the host's memory (club-3090 issue 873)."""
OWN_SUMS = "Sum over the devices by the engine's own kernels, not NCCL's"
WITHOUT_OWN_SUMS = "leave out --disable-custom-all-reduce"
OF_SAMPLING = "--speculative-accept-threshold"
"""SGLang's options that greedy checks of drafts do not read (sglang/srt/speculative/eagle_utils.py of
0.5.23)."""
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
    is_of_first_token: bool = False
    """Whether it gains time to the first token, not time per token."""
    is_alternative: bool = False
    """Whether it is another way to draft than the change before it, in whose place it can be made."""
    at_batch: int | None = None
    """Batch at which it gains, where that is not the load's."""
    kind: Literal["cost", "exactness", "gain"] = "gain"
    """A setting that costs time whatever is drafted, one that changes what is generated, or another
    way to serve."""
    needs_gpus: int | None = None
    """Devices that it takes, where the command uses fewer."""

    @property
    def is_here(self) -> bool:
        """Whether it is of this load, on these devices."""
        return self.at_batch is None and self.needs_gpus is None

    @property
    def gain_text(self) -> str:
        """Its gain in words; not of one without a price."""
        of = " sooner to the first token" if self.is_of_first_token else ""
        if self.at_batch is not None:
            of += f" at batch {self.at_batch}"
        if self.needs_gpus is not None:
            of += f" on {self.needs_gpus} devices"
        return (
            f"{self.gain:.2f}x (90 %: {self.gain_low:.2f} to {self.gain_high:.2f}){of}"
        )

    @property
    def is_sure(self) -> bool:
        """Whether it gains a noteworthy part, whatever its uncertainty."""
        return self.gain_low is not None and self.gain_low > NOTEWORTHY

    @property
    def probability(self) -> float:
        """Probability that it gains."""
        if self.gain is None or self.gain_low is None or self.gain_high is None:
            return 0.0
        gain = Gain(
            speedup=self.gain, low=self.gain_low, high=self.gain_high, pays=self.chance
        )
        return gain.probability

    @property
    def is_advice(self) -> bool:
        """Whether it is worth a line: it loses exactness, surely costs an unknown time, or gains a
        noteworthy part rather than loses."""
        if self.gain is None:
            return self.kind != "gain"
        return self.gain >= NOTEWORTHY and self.probability >= LIKELY


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a plan, and the case that gives it at other settings."""

    case: Case
    option: DraftOption | None
    row: Candidate

    @property
    def borrows_host_times(self) -> bool:
        """Whether what a host takes to launch a layer is vLLM's, since it was not measured here."""
        return self.case.engine.graphs.eager_host_layer_s == 0.0

    def row_as(self, engine: EngineProfile) -> Candidate | None:
        """The row's configuration on an engine that is set otherwise; None: it does not run."""
        return same_on(engine, self.case, self.option, self.row)


# The paths


class Setting(NamedTuple):
    """A setting that changes the engine's path."""

    path: Callable[[EngineProfile], EngineProfile]
    """The engine with it."""
    is_of_graphs: bool = False
    """Whether two laws fit what was measured of it, so its price lies between them."""
    advice: Change | None = None
    """The advice to leave it out, not priced; None: it cannot be left out."""
    needs_graphs: bool = False
    """Whether it changes nothing where no graph is replayed."""


def piecewise(engine: EngineProfile) -> EngineProfile:
    """The engine whose decoding replays graphs in pieces."""
    return engine.as_set(PathOptions(cudagraph_mode="PIECEWISE"))


def without_graphs(engine: EngineProfile) -> EngineProfile:
    """The engine that launches kernel by kernel."""
    return engine.as_set(PathOptions(enforce_eager=True))


def between_steps(engine: EngineProfile) -> EngineProfile:
    """The engine that schedules a step when the one before has ended."""
    return engine.as_set(PathOptions(is_synchronous=True))


def slower_passes(engine: EngineProfile, *, more_s: float) -> EngineProfile:
    """The engine whose steps take longer by a time."""
    overheads = engine.overheads
    return engine.with_constants(
        {
            "overheads.autoregressive_overhead_s": overheads.autoregressive_overhead_s
            + more_s,
            "overheads.step_overhead_s": overheads.step_overhead_s + more_s,
            "overheads.overhead_on": {
                device: own_s + more_s
                for device, own_s in overheads.overhead_on.items()
            },
        }
    )


GRAPH_SETTINGS = {
    "piecewise": (
        piecewise,
        "Replay whole graphs of decoding, not piecewise ones",
        "attention and what lies around it are launched layer by layer",
    ),
    "none": (
        without_graphs,
        "Capture graphs: none is replayed",
        "every pass launches its kernels one by one",
    ),
    "eager": (
        without_graphs,
        "Capture graphs: it runs eagerly",
        "every pass launches its kernels one by one, uncompiled",
    ),
}
"""Settings of graphs by the command's: the path, the advice, and why."""


def fits_without_host(served: Served) -> bool:
    """Whether a row fits with all weights on its devices."""
    engine = served.case.engine.with_constants({"memory.host_weight_bytes": 0.0})
    case = replace(served.case, engine=engine)
    row = served.row
    largest = case.largest_batches(
        option=served.option, budget=row.draft_budget, gamma=row.gamma
    )
    return bool(largest[case.tp_sizes.index(row.tp_size)] >= row.batch_size)


def with_nccl(engine: EngineProfile) -> EngineProfile:
    """The engine that sums over ranks by NCCL."""
    return engine.as_set(PathOptions(has_custom_all_reduce=False))


def sums_itself(served: Served) -> bool:
    """Whether the engine's own kernels can sum over a row's ranks: they need every device to reach every
    other (custom_all_reduce.py of vLLM and SGLang)."""
    topology = served.case.hardware.link.topology
    ranks = served.row.tp_size
    return ranks == 2 or (ranks > 2 and topology in ("nvlink", "xgmi"))


def sums_by_nccl(command: ServeCommand, served: Served) -> bool:
    """Whether a setting has NCCL sum over ranks where the engine's own kernels would."""
    return sums_itself(served) and not command.has_custom_all_reduce


def has_nccl(served: Served) -> bool:
    """Whether NCCL's sums were timed on the row's device."""
    return "nccl" in AllReduceCurve.variants(served.case.hardware)


def runner_of(engine: EngineProfile, served: Served) -> str:
    """The model runner that an engine takes for a row; "": it has one."""
    path = engine.path(served.row.draft, served.row.draft_method)
    model = served.case.model
    if path.other_runner and (model.is_moe or model.states):
        return path.other_runner
    return path.runner


def eager_drafter(engine: EngineProfile) -> EngineProfile:
    """The engine whose drafter alone is launched kernel by kernel."""
    return engine.with_constants(
        {
            "overheads.head_layer_s": engine.graphs.eager_head_layer_s,
            "overheads.draft_model_layer_s": engine.graphs.eager_host_layer_s,
        }
    )


def with_scores_in_memory(engine: EngineProfile) -> EngineProfile:
    """The engine whose attention is not fused: it writes the scores of all tokens and reads them."""
    factor = engine.kernels.attention_factor * UNFUSED
    return engine.with_constants({"kernels.attention_factor": factor})


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


def host_reads_s(served: Served) -> float:
    """Seconds of a pass that reads the weights in the host's memory over the device's link: all of them,
    but of experts those that its tokens touch."""
    case = served.case
    row = served.row
    held = weights_bytes(case.model, case.precision, row.tp_size, case.spread)
    read = min(case.engine.memory.host_weight_bytes, float(held))
    model = case.model
    if model.is_moe:
        idle = (model.num_parameters - model.active_parameters) / (
            model.expert_parameters
        )
        touched = 1.0 - idle ** (row.batch_size * (row.gamma + 1))
        of_experts = model.expert_parameters / model.num_parameters
        read *= 1.0 - of_experts * (1.0 - touched)
    rate = HOST_BYTES_PER_S.get(case.hardware.generation, USUAL_HOST_BYTES_PER_S)
    return read / rate


def path_settings(command: ServeCommand, served: Served) -> list[Setting]:
    """A command's settings that change the path of a step, in the order in which they are applied."""
    row = served.row
    settings = []

    def add(
        path: Callable[[EngineProfile], EngineProfile],
        advice: tuple[str, str, str] | None,
        **fields: bool,
    ) -> None:
        change = None
        if advice is not None:
            words, option, reason = advice
            change = Change(
                change=words, option=option, reason=reason, gain=None, kind="cost"
            )
        settings.append(Setting(path, advice=change, **fields))

    if command.graphs in GRAPH_SETTINGS:
        path, words, reason = GRAPH_SETTINGS[command.graphs]
        add(path, (words, graph_option(command), reason), is_of_graphs=True)
    needed = row.batch_size
    unit = "sequences"
    if command.engine == "vllm":
        needed *= row.gamma + 1
        unit = "tokens"
    has_graphs = row.step.is_captured
    if command.captured_tokens is not None:
        has_graphs = command.captured_tokens >= needed
    option = captured_option(command, needed)
    if command.captured_batches:
        has_graphs = has_graphs and row.batch_size in command.captured_batches
        option = "cuda_graph_config: {enable_padding: true}"
    if not has_graphs:
        reason = "a step of this batch runs without a graph"
        advice = (f"Capture graphs of {needed} {unit}", option, reason)
        add(without_graphs, advice, is_of_graphs=True)
    if command.is_unsplit_attention:
        reason = "attention writes its scores to memory and reads them again"
        add(
            with_scores_in_memory,
            ("Turn flash attention on", "leave out -fa off", reason),
        )
    asynchronous = ""
    if command.is_asynchronous is False:
        asynchronous = options_of(command).asynchronous
        if command.read.get("--distributed-executor-backend") == "ray":
            asynchronous = "--distributed-executor-backend mp"
    elif served.case.model.states:
        asynchronous = states_option(command)
    path_of_step = served.case.engine.path(row.draft, row.draft_method)
    if asynchronous and path_of_step.is_asynchronous:
        reason = "the device waits for the host between steps"
        add(
            between_steps,
            ("Schedule the next step while one runs", asynchronous, reason),
        )
    if command.host_weight_bytes:
        of_host: tuple[str, str, str] | None = None
        if fits_without_host(served):
            reason = "every pass reads those in the host's memory over its link"
            words = "Keep all weights on the device"
            of_host = (words, "leave out --cpu-offload-gb", reason)
        add(partial(slower_passes, more_s=host_reads_s(served)), of_host)
    if sums_by_nccl(command, served) and has_nccl(served):
        add(with_nccl, (OWN_SUMS, WITHOUT_OWN_SUMS, "each layer's sums take longer"))
    has_drafter = False
    if served.option is not None:
        has_drafter = draft_of(served.case.setup(served.option)).has_prefill
    speculation = command.speculation
    is_eager = speculation is not None and speculation.is_eager
    # vLLM's V2 runner does not look at it (vllm/v1/worker/gpu of 0.33; gpu_model_runner.py, the V1
    # runner's, does)
    if is_eager and has_drafter and runner_of(served.case.engine, served) != "V2":
        option = 'leave "enforce_eager" out of --speculative-config'
        reason = (
            "each of its layers is launched kernel by kernel, for every drafted token"
        )
        advice = ("Capture the drafter's graphs too", option, reason)
        add(eager_drafter, advice, needs_graphs=True)
    if command.pp_size > 1:
        stages = PathOptions(pp_size=command.pp_size)
        if served.case.engine.as_set(stages) != served.case.engine:
            add(lambda engine: engine.as_set(stages), None)
    return settings


# Their prices


class SettingCosts(NamedTuple):
    """A command's settings that cost or lose exactness, each priced against the command without it."""

    changes: list[Change]
    times_as_long: float
    """Time between tokens with all of them over that of the engine as it is by default."""


def costs_of(command: ServeCommand, served: Served) -> SettingCosts:
    settings = path_settings(command, served)
    stay = [setting for setting in settings if setting.advice is None]
    times_as_long = path_times(served, settings)
    changes = []
    for setting in settings:
        if setting.advice is None:
            continue
        others = [other for other in settings if other is not setting]
        priced = _priced(served, settings, others, setting)
        if not priced.is_advice:
            # what it costs may be hidden by another one that is to be left out
            priced = _priced(served, [*stay, setting], stay, setting)
        changes.append(priced)
    for change in _limits(command, served):
        changes.append(change)
        if change.kind == "cost":
            times_as_long *= change.gain or 1.0
    # SGLang's check of drafts is greedy on AMD's devices at any temperature (_verify_uses_greedy in
    # eagle_utils.py of 0.5.23)
    is_greedy = (
        served.case.request.temperature == 0.0
        or served.case.hardware.generation.startswith("cdna")
    )
    inexact = _inexact(command, is_greedy=is_greedy)
    return SettingCosts([*changes, *inexact], times_as_long)


def path_times(served: Served, settings: Sequence[Setting]) -> float:
    """The time between tokens with these settings over that of the engine as it is by default."""
    as_set_s = times_as_set(served, settings)
    if as_set_s is None:
        return 1.0
    return statistics.fmean(as_set_s) / served.row.between_tokens_s


def staying_times(command: ServeCommand, served: Served) -> float:
    """`path_times` of the settings that cannot be left out."""
    settings = path_settings(command, served)
    return path_times(served, [each for each in settings if each.advice is None])


def _priced(
    served: Served,
    settings: Sequence[Setting],
    others: Sequence[Setting],
    setting: Setting,
) -> Change:
    """The advice to leave a setting out of `settings`, which leaves the others."""
    advice = setting.advice
    assert advice is not None
    as_set_s = times_as_set(served, settings)
    without_s = times_as_set(served, others)
    if as_set_s is None or without_s is None:
        return advice
    first = second = statistics.fmean(as_set_s) / statistics.fmean(without_s)
    if setting.is_of_graphs:
        first = as_set_s[0] / without_s[0]
        second = as_set_s[1] / without_s[1]
        if served.borrows_host_times:
            unmeasured = f"not measured in {served.case.engine.name}: from nothing to vLLM's times of the host"
            reason = f"{advice.reason}; {unmeasured}"
            advice = msgspec.structs.replace(advice, reason=reason)
    return _between(first, second, advice)


def times_as_set(
    served: Served, settings: Sequence[Setting]
) -> tuple[float, float] | None:
    """The time between tokens with these settings, by each of the two laws that fit what was measured
    of launches outside whole graphs; None: the server does not run so.

    By one law the host launches each layer on the engine's path, by the other a step takes so much
    longer as its layers take piecewise. Of an engine whose host was not measured the price of graphs
    lies between nothing and the middle of vLLM's.
    """
    engine = with_host_times(served.case.engine)
    of_graphs = None
    whole: Candidate | None = served.row
    has_graphs = not any(setting.path is without_graphs for setting in settings)
    for setting in settings:
        if setting.is_of_graphs:
            of_graphs = setting
            continue
        if setting.needs_graphs and not has_graphs:
            continue
        engine = setting.path(engine)
        whole = served.row_as(engine)
    if whole is None:
        return None
    whole_s = whole.between_tokens_s
    if of_graphs is None:
        return whole_s, whole_s
    launched = served.row_as(of_graphs.path(engine))
    if launched is None:
        return None
    piecewise_s = engine.graphs.piecewise_s(served.case.model.num_hidden_layers)
    second_s = whole_s * (1.0 + piecewise_s / whole.step_s)
    first_s = launched.between_tokens_s
    if of_graphs.path is piecewise:  # whose row has the mean of both laws
        first_s = max(2.0 * first_s - second_s, whole_s)
    if served.borrows_host_times:
        return (first_s + second_s) / 2.0, whole_s
    return first_s, second_s


def slowed(row: Candidate, times: float, alone_times: float) -> Candidate:
    """The row with times between tokens `times` as long, and `alone_times` as long without a draft.

    A speculative step's additional time is counted to its verification: most is the target's.
    """
    relative = alone_times / times
    if times == relative == 1.0:
        return row

    def of_gain(gain: Gain) -> Gain:
        return Gain(
            speedup=relative * gain.speedup,
            low=relative * gain.low,
            high=relative * gain.high,
        )

    step = msgspec.structs.replace(
        row.step,
        autoregressive_s=row.step.autoregressive_s * alone_times,
        step_s=row.step_s * times,
    )
    if row.is_speculative:
        more_s = step.step_s - row.step_s
        step = msgspec.structs.replace(step, verify_s=step.verify_s + more_s)
    decoding = row.decoding
    requests = row.requests
    if requests is not None:
        after_first_s = requests.request_s - requests.ttft_s
        requests = msgspec.structs.replace(
            requests,
            tpot_s=requests.tpot_s * times,
            request_s=requests.ttft_s + after_first_s * times,
            gain=of_gain(requests.gain),
            output_tokens_per_s_per_gpu=requests.output_tokens_per_s_per_gpu / times,
            requests_per_s=requests.requests_per_s / times,
        )
    return msgspec.structs.replace(
        row,
        step=step,
        decoding=msgspec.structs.replace(
            decoding,
            tpot_s=decoding.tpot_s * times,
            tpot_low_s=decoding.tpot_low_s * times,
            tpot_high_s=decoding.tpot_high_s * times,
            tokens_per_s=decoding.tokens_per_s / times,
            tokens_per_s_per_gpu=decoding.tokens_per_s_per_gpu / times,
            gain=of_gain(decoding.gain),
        ),
        requests=requests,
    )


def _limits(command: ServeCommand, served: Served) -> Iterator[Change]:
    """Steps with too few tokens for what its sequences verify, and prompts that are read anew, or in
    parts smaller than the device needs."""
    row = served.row
    output_s = (served.case.request.gen_len or USUAL_OUTPUT) * row.tpot_s
    prompt_s = row.decoding.ttft_s
    most = command.chunk_tokens
    needed = row.batch_size * (row.gamma + 1)
    if command.engine == "vllm" and most is not None and most < needed:
        at_once = max(most // (row.gamma + 1), 1)
        # how often all sequences draft at once is not known: from a tenth of the loss to all of it
        gain = row.batch_size / at_once
        yield Change(
            change=f"Let a step take {needed} tokens, not {most}",
            option=f"{options_of(command).chunk} {max(needed, 2048)}",
            reason=f"only {at_once} of {row.batch_size} sequences have room for their drafts in a step",
            gain=math.sqrt(gain),
            gain_low=1.0 + 0.1 * (gain - 1.0),
            gain_high=gain,
            kind="cost",
        )
    if not command.reaches_peers and row.tp_size > 1:
        yield _through_host(command, served, prompt_s, output_s)
    if sums_by_nccl(command, served) and not has_nccl(served):
        yield Change(
            change=OWN_SUMS,
            option=WITHOUT_OWN_SUMS,
            reason="NCCL was not timed on this device; a server on A30s without NVLink took 6 % longer, one on "
            "four A100s 12 % (vLLM issue 2192)",
            gain=1.06,
            gain_low=1.0,
            gain_high=1.12,
            kind="cost",
        )
    usual_runner = runner_of(load_engine(command.engine_profile), served)
    if usual_runner == "V2" and runner_of(served.case.engine, served) == "V1":
        option = "leave out VLLM_USE_V2_MODEL_RUNNER=0"
        if command.has_microbatches:
            option = "leave out --enable-dbo"
        yield Change(
            change="Run vLLM's V2 model runner",
            option=option,
            reason="Gemma 4 with its module took 3.32 ms a token by V1 for 3.08 by V2 at one user, 3.57 for "
            "3.49 at 32 (vLLM pull request 43241)",
            gain=1.05,
            gain_low=1.02,
            gain_high=1.08,
            kind="cost",
        )
    if command.has_prefix_cache is False and row.context_len >= LONG_PROMPT:
        low, middle, high = (
            (prompt_s + output_s) / ((1.0 - share) * prompt_s + output_s)
            for share in SHARED_SHARES
        )
        yield Change(
            change="Keep prompts in the prefix cache",
            option=options_of(command).prefix_cache,
            reason=f"each prompt of {row.context_len} tokens is read anew in {prompt_s:.2g} s; "
            f"where half of it is shared by others, requests end so much sooner",
            gain=middle,
            gain_low=low,
            gain_high=high,
        )
    engine = served.case.engine
    usual = engine.scheduler.prefill_tokens
    options = {
        options_of(command).chunk: most,
        "--long-prefill-token-threshold": command.prompt_part_tokens,
    }
    parts = {name: part for name, part in options.items() if part is not None}
    if not parts:
        return
    option = min(parts, key=lambda name: parts[name])
    most = parts[option]
    if most >= min(usual, row.context_len):
        return
    groups = 1
    if command.engine == "sglang":  # which divides it among them
        groups = command.attention_dp_size
    small = served.row_as(
        engine.with_constants({"scheduler.prefill_tokens": float(most)})
    )
    if small is None:
        return
    gain = (small.decoding.ttft_s + output_s) / (prompt_s + output_s)
    # where it is nothing to a whole request, the first token may still come sooner
    is_of_first = gain < NOTEWORTHY
    if is_of_first:
        gain = small.decoding.ttft_s / prompt_s
    setting = Change(
        change=f"Read prompts in parts of {usual:.0f} tokens, not {most}",
        option=f"{option} {usual * groups:.0f}",
        reason=f"a prompt of {row.context_len} tokens then takes {format_seconds(prompt_s)} to read, "
        f"not {format_seconds(small.decoding.ttft_s)}",
        gain=None,
        is_of_first_token=is_of_first,
        kind="gain" if is_of_first else "cost",
    )
    yield _between(gain, gain, setting)


def _through_host(
    command: ServeCommand, served: Served, prompt_s: float, output_s: float
) -> Change:
    """NCCL's sums through the host's memory: those of prompts, whose messages are too long for the
    engine's own kernels, and of decoding where it has none."""
    change = "Let NCCL reach the memory of other devices"
    option = "leave out NCCL_P2P_DISABLE=1"
    is_decoding = sums_by_nccl(command, served) or not sums_itself(served)
    kind: Literal["cost", "gain"] = "cost" if is_decoding else "gain"
    if served.case.hardware.link.topology not in RINGS:
        reason = "what NCCL sums leaves the devices' own links for the host's"
        return Change(
            change=change, option=option, reason=reason, gain=None, kind="cost"
        )
    slower_s = SLOWER_PROMPTS * prompt_s + output_s
    if is_decoding:
        slower_s += (SLOWER_TOKENS - 1.0) * output_s
    most = slower_s / (prompt_s + output_s)
    return Change(
        change=change,
        option=option,
        reason="two RTX 5090s without it, and without the engine's own sums, gave 223 tokens/s for 288, and read "
        "11,317 for 14,087 (club-3090 issue 873); devices that cannot reach each other lose nothing",
        gain=math.sqrt(most),
        gain_low=1.0,
        gain_high=most,
        kind=kind,
    )


def _inexact(command: ServeCommand, *, is_greedy: bool = False) -> Iterator[Change]:
    """Settings with which a draft's output is not the target's own."""
    speculation = command.speculation
    if speculation is None:
        return
    for setting in speculation.lossy:
        if is_greedy and setting.startswith(OF_SAMPLING):
            continue
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
