"""Settings of a server that cost time, or with which a draft's output is not the target's own, and what
the server gains without each.

A setting is a function of `SETTINGS`, which says when a command has it, what to change, and its price:
how the engine's path differs with it, or a gain that was measured elsewhere. The server as it is has
all of them, so the price of a difference is the time between tokens with all over that without this one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from magicdec.counts import Z_90
from magicdec.live.change import NOTEWORTHY, Change, Served
from magicdec.live.options import (
    captured_option,
    leave_out,
    options_of,
    states_option,
)
from magicdec.perfmodel.drafting import draft_of
from magicdec.perfmodel.footprint import weights_bytes
from magicdec.perfmodel.kernels.links import RINGS, AllReduceCurve
from magicdec.schema.row import Candidate, Gain
from magicdec.specs.engine import EngineProfile, load_engine
from magicdec.specs.engine_path import PathOptions
from magicdec.specs.engine_tables import GraphMode
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
SLOWER_TOKENS = 288.0 / 223.0
SLOWER_PROMPTS = 14087.0 / 11317.0
"""Two RTX 5090s whose NCCL went through the host's memory (club-3090 issue 873)."""
OF_SAMPLING = "--speculative-accept-threshold"
"""SGLang's options that greedy checks of drafts do not read (sglang/srt/speculative/eagle_utils.py of
0.5.23)."""
LONG_PROMPT = 1024
"""Tokens of a prompt from which reading it anew is named."""


PIECEWISE = PathOptions(cudagraph_mode="PIECEWISE")
EAGER = PathOptions(enforce_eager=True)
BETWEEN_STEPS = PathOptions(is_synchronous=True)
OF_GRAPHS = ("eager", "graphed", "graphs", "compilation", "level")
"""Meanings of options that leave graphs out."""
GRAPHS = {
    "piecewise": (
        PIECEWISE,
        "Replay whole graphs of decoding, not piecewise ones",
        "attention and what lies around it are launched layer by layer",
    ),
    "none": (
        EAGER,
        "Capture graphs: none is replayed",
        "every pass launches its kernels one by one",
    ),
    "eager": (
        EAGER,
        "Capture graphs: it runs eagerly",
        "every pass launches its kernels one by one, uncompiled",
    ),
}
"""The path of a command's graphs, the advice, and why."""


EnginePath = PathOptions | Callable[[EngineProfile], EngineProfile]
"""How an engine's path differs."""


class Setting(NamedTuple):
    """A setting that costs time or changes what is generated."""

    advice: Change | None
    """The advice to leave it out, with its price where no path has it; None: it cannot be left out."""
    path: EnginePath | None = None
    """How the engine's path differs with it; None: it does not."""
    needs_graphs: bool = False
    """Whether it changes nothing where no graph is replayed."""

    @property
    def graphs(self) -> GraphMode | None:
        """The graphs that it leaves; None: it is not one of graphs, or leaves all."""
        return self.path.graph_mode if isinstance(self.path, PathOptions) else None

    def on(self, engine: EngineProfile) -> EngineProfile:
        """The engine with it."""
        assert self.path is not None
        if isinstance(self.path, PathOptions):
            return engine.as_set(self.path)
        return self.path(engine)


def cost(change: str, option: str, reason: str) -> Change:
    """The advice to leave out a setting that costs time."""
    return Change(change=change, option=option, reason=reason, kind="cost")


# The settings


def graphs(command: ServeCommand, served: Served) -> Iterator[Setting]:
    """Graphs that are replayed in pieces, or not captured."""
    if command.graphs in GRAPHS:
        path, change, reason = GRAPHS[command.graphs]
        yield Setting(cost(change, leave_out(command, *OF_GRAPHS), reason), path)


def captured_sizes(command: ServeCommand, served: Served) -> Iterator[Setting]:
    """Steps that are larger than every captured graph, or between two of them."""
    row = served.row
    needed = row.batch_size
    unit = "sequences"
    if command.engine == "vllm":
        needed *= row.gamma + 1
        unit = "tokens"
    is_captured = row.step.is_captured
    if command.captured_tokens is not None:
        is_captured = command.captured_tokens >= needed
    option = captured_option(command, needed)
    if command.captured_batches:
        is_captured = is_captured and row.batch_size in command.captured_batches
        option = "cuda_graph_config: {enable_padding: true}"
    if not is_captured:
        reason = "a step of this batch runs without a graph"
        yield Setting(cost(f"Capture graphs of {needed} {unit}", option, reason), EAGER)


def unfused_attention(command: ServeCommand, served: Served) -> Iterator[Setting]:
    """llama.cpp's attention without its fused kernel."""
    if command.is_unsplit_attention:
        reason = "attention writes its scores to memory and reads them again"
        yield Setting(
            cost("Turn flash attention on", leave_out(command, "attention"), reason),
            lambda engine: engine.with_constants(
                {"kernels.attention_factor": engine.kernels.attention_factor * UNFUSED}
            ),
        )


def scheduling(command: ServeCommand, served: Served) -> Iterator[Setting]:
    """Steps that are scheduled when the one before has ended."""
    option = ""
    if command.is_asynchronous is False:
        option = options_of(command).asynchronous
        if command.read.get("--distributed-executor-backend") == "ray":
            option = "--distributed-executor-backend mp"
    elif served.case.model.states:
        option = states_option(command)
    row = served.row
    usual = served.case.engine.path(row.draft, row.draft_method)
    if option and usual.is_asynchronous:
        reason = "the device waits for the host between steps"
        yield Setting(
            cost("Schedule the next step while one runs", option, reason),
            BETWEEN_STEPS,
        )


def weights_on_host(command: ServeCommand, served: Served) -> Iterator[Setting]:
    """Weights that stay in the host's memory."""
    if not command.host_weight_bytes:
        return
    more_s = host_reads_s(served)
    advice = None
    if fits_without_host(served):
        advice = cost(
            "Keep all weights on the device",
            leave_out(command, "host_weights"),
            "every pass reads those in the host's memory over its link",
        )
    yield Setting(advice, lambda engine: with_longer_steps(engine, more_s))


def nccl_sums(command: ServeCommand, served: Served) -> Iterator[Setting]:
    """Sums over ranks by NCCL, where the engine's own kernels could do them."""
    if not sums_by_nccl(command, served):
        return
    advice = cost(
        "Sum over the devices by the engine's own kernels, not NCCL's",
        leave_out(command, "custom_all_reduce"),
        "each layer's sums take longer",
    )
    if "nccl" in AllReduceCurve.variants(served.case.hardware):
        yield Setting(advice, PathOptions(has_custom_all_reduce=False))
        return
    reason = (
        "NCCL was not timed on this device; a server on A30s without NVLink took 6 % longer, one on "
        "four A100s 12 % (vLLM issue 2192)"
    )
    gain = Gain(speedup=1.06, low=1.0, high=1.12)
    yield Setting(msgspec.structs.replace(advice, reason=reason).gaining(gain))


def drafters_graphs(command: ServeCommand, served: Served) -> Iterator[Setting]:
    """A drafter that runs eagerly. vLLM's V2 runner does not look at it (vllm/v1/worker/gpu of 0.33;
    gpu_model_runner.py, the V1 runner's, does)."""
    speculation = command.speculation
    if speculation is None or not speculation.is_eager or served.option is None:
        return
    has_drafter = draft_of(served.case.setup(served.option)).has_prefill
    if has_drafter and runner_of(served.case.engine, served) != "V2":
        advice = cost(
            "Capture the drafter's graphs too",
            'leave "enforce_eager" out of --speculative-config',
            "each of its layers is launched kernel by kernel, for every drafted token",
        )
        yield Setting(
            advice,
            with_eager_drafter,
            needs_graphs=True,
        )


def pipeline(command: ServeCommand, served: Served) -> Iterator[Setting]:
    """Stages of a pipeline, with which an engine may take another path."""
    stages = PathOptions(pp_size=command.pp_size)
    engine = served.case.engine
    if command.pp_size > 1 and engine.as_set(stages) != engine:
        yield Setting(None, stages)


def tokens_of_a_step(command: ServeCommand, served: Served) -> Iterator[Setting]:
    """Steps with too few tokens for what their sequences verify."""
    row = served.row
    most = command.chunk_tokens
    needed = row.batch_size * (row.gamma + 1)
    if command.engine != "vllm" or most is None or most >= needed:
        return
    at_once = max(most // (row.gamma + 1), 1)
    # how often all sequences draft at once is not known: from a tenth of the loss to all of it
    loss = row.batch_size / at_once
    advice = cost(
        f"Let a step take {needed} tokens, not {most}",
        f"{options_of(command).chunk} {max(needed, 2048)}",
        f"only {at_once} of {row.batch_size} sequences have room for their drafts in a step",
    )
    gain = Gain(speedup=math.sqrt(loss), low=1.0 + 0.1 * (loss - 1.0), high=loss)
    yield Setting(advice.gaining(gain))


def peers(command: ServeCommand, served: Served) -> Iterator[Setting]:
    """NCCL's sums through the host's memory: those of prompts, whose messages are too long for the
    engine's own kernels, and of decoding where it has none."""
    if command.reaches_peers or served.row.tp_size == 1:
        return
    advice = cost(
        "Let NCCL reach the memory of other devices",
        leave_out(command, "peers"),
        "what NCCL sums leaves the devices' own links for the host's",
    )
    if served.case.hardware.link.topology not in RINGS:
        yield Setting(advice)
        return
    prompt_s, output_s = times_of_request(served)
    slower_s = SLOWER_PROMPTS * prompt_s + output_s
    is_decoding = sums_by_nccl(command, served) or not sums_itself(served)
    if is_decoding:
        slower_s += (SLOWER_TOKENS - 1.0) * output_s
    most = slower_s / (prompt_s + output_s)
    measured = msgspec.structs.replace(
        advice,
        reason="two RTX 5090s without it, and without the engine's own sums, gave 223 tokens/s for 288, and read "
        "11,317 for 14,087 (club-3090 issue 873); devices that cannot reach each other lose nothing",
        kind="cost" if is_decoding else "gain",
    )
    yield Setting(measured.gaining(Gain(speedup=math.sqrt(most), low=1.0, high=most)))


def older_runner(command: ServeCommand, served: Served) -> Iterator[Setting]:
    """vLLM's V1 model runner, where the version would take V2."""
    usual = runner_of(load_engine(command.engine_profile), served)
    if usual != "V2" or runner_of(served.case.engine, served) != "V1":
        return
    advice = cost(
        "Run vLLM's V2 model runner",
        leave_out(command, "microbatches" if command.has_microbatches else "v2_runner"),
        "Gemma 4 with its module took 3.32 ms a token by V1 for 3.08 by V2 at one user, 3.57 for "
        "3.49 at 32 (vLLM pull request 43241)",
    )
    yield Setting(advice.gaining(Gain(speedup=1.05, low=1.02, high=1.08)))


def prefix_cache(command: ServeCommand, served: Served) -> Iterator[Setting]:
    """Prompts that are read anew."""
    length = served.row.context_len
    if command.has_prefix_cache is not False or length < LONG_PROMPT:
        return
    prompt_s, output_s = times_of_request(served)
    low, middle, high = (
        (prompt_s + output_s) / ((1.0 - share) * prompt_s + output_s)
        for share in SHARED_SHARES
    )
    advice = Change(
        change="Keep prompts in the prefix cache",
        option=options_of(command).prefix_cache,
        reason=f"each prompt of {length} tokens is read anew in {prompt_s:.2g} s; "
        f"where half of it is shared by others, requests end so much sooner",
    )
    yield Setting(advice.gaining(Gain(speedup=middle, low=low, high=high)))


def prompt_parts(command: ServeCommand, served: Served) -> Iterator[Setting]:
    """Prompts that are read in parts smaller than the device needs."""
    engine = served.case.engine
    length = served.row.context_len
    usual = engine.scheduler.prefill_tokens
    options = {
        options_of(command).chunk: command.chunk_tokens,
        "--long-prefill-token-threshold": command.prompt_part_tokens,
    }
    parts = {name: part for name, part in options.items() if part is not None}
    if not parts:
        return
    option = min(parts, key=lambda name: parts[name])
    most = parts[option]
    if most >= min(usual, length):
        return
    small = served.row_as(
        engine.with_constants({"scheduler.prefill_tokens": float(most)})
    )
    if small is None:
        return
    prompt_s, output_s = times_of_request(served)
    slower_s = small.decoding.ttft_s
    gain = (slower_s + output_s) / (prompt_s + output_s)
    # where it is nothing to a whole request, the first token may still come sooner
    is_of_first = gain < NOTEWORTHY
    if is_of_first:
        gain = slower_s / prompt_s
    groups = 1
    if command.engine == "sglang":  # which divides it among them
        groups = command.attention_dp_size
    advice = Change(
        change=f"Read prompts in parts of {usual:.0f} tokens, not {most}",
        option=f"{option} {usual * groups:.0f}",
        reason=f"a prompt of {length} tokens then takes {format_seconds(prompt_s)} to read, "
        f"not {format_seconds(slower_s)}",
        is_of_first_token=is_of_first,
        kind="gain" if is_of_first else "cost",
    )
    yield Setting(advice.gaining(_between(gain, gain)))


def lossy_drafts(command: ServeCommand, served: Served) -> Iterator[Setting]:
    """Settings with which a draft's output is not the target's own. SGLang's check of drafts is greedy
    on AMD's devices at any temperature (_verify_uses_greedy in eagle_utils.py of 0.5.23)."""
    case = served.case
    is_of_amd = case.hardware.generation.startswith("cdna")
    is_greedy = case.request.temperature == 0.0 or is_of_amd
    lossy = [] if command.speculation is None else command.speculation.lossy
    for setting in lossy:
        if not (is_greedy and setting.startswith(OF_SAMPLING)):
            yield Setting(
                Change(
                    change="Accept drafts exactly",
                    option=f"leave out {setting}",
                    reason="with it drafts are accepted that the model would not have generated",
                    kind="exactness",
                )
            )


SETTINGS: tuple[Callable[[ServeCommand, Served], Iterator[Setting]], ...] = (
    # what changes the path of a step, in the order in which it is applied
    graphs,
    captured_sizes,
    unfused_attention,
    scheduling,
    weights_on_host,
    nccl_sums,
    drafters_graphs,
    pipeline,
    # other costs
    tokens_of_a_step,
    peers,
    older_runner,
    prefix_cache,
    prompt_parts,
    lossy_drafts,
)


def settings_of(command: ServeCommand, served: Served) -> list[Setting]:
    """A command's settings that cost or lose something with what is served."""
    return [setting for of in SETTINGS for setting in of(command, served)]


# Facts that they ask for


def times_of_request(served: Served) -> tuple[float, float]:
    """Seconds to the first token of a request, and for its output."""
    row = served.row
    output_s = (served.case.request.gen_len or USUAL_OUTPUT) * row.tpot_s
    return row.decoding.ttft_s, output_s


def sums_itself(served: Served) -> bool:
    """Whether the engine's own kernels can sum over a row's ranks: they need every device to reach every
    other (custom_all_reduce.py of vLLM and SGLang)."""
    topology = served.case.hardware.link.topology
    ranks = served.row.tp_size
    return ranks == 2 or (ranks > 2 and topology in ("nvlink", "xgmi"))


def sums_by_nccl(command: ServeCommand, served: Served) -> bool:
    """Whether a setting has NCCL sum over ranks where the engine's own kernels would."""
    return sums_itself(served) and not command.has_custom_all_reduce


def runner_of(engine: EngineProfile, served: Served) -> str:
    """The model runner that an engine takes for a row; "": it has one."""
    path = engine.path(served.row.draft, served.row.draft_method)
    model = served.case.model
    if path.other_runner and (model.is_moe or model.states):
        return path.other_runner
    return path.runner


def fits_without_host(served: Served) -> bool:
    """Whether a row fits with all weights on its devices."""
    engine = served.case.engine.with_constants({"memory.host_weight_bytes": 0.0})
    case = replace(served.case, engine=engine)
    row = served.row
    largest = case.largest_batches(
        option=served.option, budget=row.draft_budget, gamma=row.gamma
    )
    return bool(largest[case.tp_sizes.index(row.tp_size)] >= row.batch_size)


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


def with_eager_drafter(engine: EngineProfile) -> EngineProfile:
    """The engine whose drafter alone is launched kernel by kernel."""
    return engine.with_constants(
        {
            "overheads.head_layer_s": engine.graphs.eager_head_layer_s,
            "overheads.draft_model_layer_s": engine.graphs.eager_host_layer_s,
        }
    )


def with_longer_steps(engine: EngineProfile, more_s: float) -> EngineProfile:
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


# Their prices


def costs_of(served: Served, settings: Sequence[Setting]) -> list[Change]:
    """The advice to leave out each of a command's settings, priced against the command without it."""
    staying = [setting for setting in settings if setting.advice is None]
    as_set_s = times_as_set(served, settings)
    changes = []
    for setting in settings:
        change = setting.advice
        if change is None:
            continue
        if setting.path is not None:
            others = [other for other in settings if other is not setting]
            change = _priced(served, setting, as_set_s, times_as_set(served, others))
            if not change.is_advice:
                # what it costs may be hidden by another one that is to be left out
                alone_s = times_as_set(served, [*staying, setting])
                change = _priced(
                    served, setting, alone_s, times_as_set(served, staying)
                )
        changes.append(change)
    return changes


def times_as_long(served: Served, settings: Sequence[Setting]) -> float:
    """Time between tokens with these settings over that of the engine as it is by default."""
    times = 1.0
    as_set_s = times_as_set(served, settings)
    if as_set_s is not None:
        times = statistics.fmean(as_set_s) / served.row.between_tokens_s
    for setting in settings:
        if setting.path is None and setting.advice and setting.advice.kind == "cost":
            times *= setting.advice.gain or 1.0
    return times


def _priced(
    served: Served,
    setting: Setting,
    as_set_s: tuple[float, float] | None,
    without_s: tuple[float, float] | None,
) -> Change:
    """The advice to leave a setting out, by the times with it and without."""
    advice = setting.advice
    assert advice is not None
    if as_set_s is None or without_s is None:
        return advice
    if setting.graphs is None:
        times = statistics.fmean(as_set_s) / statistics.fmean(without_s)
        return advice.gaining(_between(times, times))
    if _borrows_host_times(served):
        unmeasured = f"not measured in {served.case.engine.name}: from nothing to vLLM's times of the host"
        reason = f"{advice.reason}; {unmeasured}"
        advice = msgspec.structs.replace(advice, reason=reason)
    first, second = (
        one / other for one, other in zip(as_set_s, without_s, strict=True)
    )
    return advice.gaining(_between(first, second))


def _between(first: float, second: float) -> Gain:
    """A price between two estimates, of whose parts beyond 1 each is known to `HOST_ERROR`: a setting
    of this kind never gains."""
    width = math.exp(Z_90 * HOST_ERROR)
    least = max(min(first, second) - 1.0, 0.0)
    most = max(first, second, 1.0) - 1.0
    return Gain(
        speedup=1.0 + (least + most) / 2.0,
        low=1.0 + least / width,
        high=1.0 + most * width,
    )


def _borrows_host_times(served: Served) -> bool:
    """Whether what a host takes to launch a layer is vLLM's, since it was not measured here."""
    return served.case.engine.graphs.eager_host_layer_s == 0.0


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
    has_graphs = all(setting.graphs != "none" for setting in settings)
    for setting in settings:
        if setting.graphs is not None:
            of_graphs = setting
        elif setting.path is not None and (has_graphs or not setting.needs_graphs):
            engine = setting.on(engine)
            whole = served.row_as(engine)
    if whole is None:
        return None
    whole_s = whole.between_tokens_s
    if of_graphs is None:
        return whole_s, whole_s
    launched = served.row_as(of_graphs.on(engine))
    if launched is None:
        return None
    piecewise_s = engine.graphs.piecewise_s(served.case.model.num_hidden_layers)
    second_s = whole_s * (1.0 + piecewise_s / whole.step_s)
    first_s = launched.between_tokens_s
    if of_graphs.graphs == "piecewise":  # whose row has the mean of both laws
        first_s = max(2.0 * first_s - second_s, whole_s)
    if _borrows_host_times(served):
        return (first_s + second_s) / 2.0, whole_s
    return first_s, second_s


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
