"""Times the phases of single engine steps, ours and vLLM's (what a runtime adds to its kernels),
and fits its profile.

Each shape gives one point per phase: an autoregressive step, one draft step, the verification pass,
acceptance, and the upkeep of the draft's cache. No shape shares its (batch, context) or its
(budget, gamma) with a grid that may be measured (tests/calibrate/test_calibration_shapes.py). Our
engine decodes on a cache of noise with prescribed acceptance, so every step does the same work;
vLLM, started once in a process of its own, decodes the beginnings of the same prompts.

From timed phases to a profile: factors on the kernels' times, and fixed costs. The terms of the
steps are predicted by perfmodel/step.py, the formula that plans use; the constants are fitted in
log scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls

from magicdec.calibrate.local_profile import EngineShape, TimedPoint
from magicdec.calibrate.unfinished import Unfinished
from magicdec.counts import Array
from magicdec.fitting import Free, solve
from magicdec.measure.configuration import BenchmarkRequest
from magicdec.measure.engines import in_own_process, session_class
from magicdec.measure.environment import Clock, ReferenceTimes, available_memory_bytes
from magicdec.perfmodel.intervals import group_shares, relative_errors
from magicdec.perfmodel.kernels.op import ForwardTime
from magicdec.perfmodel.kernels.profile import HardwareProfile
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.step import StepTerms, step_terms
from magicdec.progress import Progress, Stages, StepMessage
from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.generate import DecodeOptions, DecodeResult, decode
from magicdec.runtime.heads.chain import Head
from magicdec.runtime.transformer import Transformer
from magicdec.specs.engine import EngineProfile
from magicdec.specs.known_heads import NamedHead
from magicdec.specs.model import ModelSpec
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import AUTOREGRESSIVE, SamplingSpec, SpeculationSpec
from magicdec.units import MICRO, MILLI

SIMULATED_RATE = 0.7
"""Acceptance imposed on timed steps, so their time does not depend on the prompt's text."""
STEPS_PER_ROUND = 5
SAMPLED_SHAPES = (
    EngineShape(1, 300, 72, 3), EngineShape(1, 3300, 200, 2), EngineShape(3, 1500, 320, 5),
    EngineShape(5, 700, 96, 1), EngineShape(5, 2600, 640, 3), EngineShape(10, 300, 160, 7),
    EngineShape(10, 1800, 48, 2), EngineShape(12, 3600, 384, 4), EngineShape(20, 900, 200, 6),
    EngineShape(20, 2600, 96, 3), EngineShape(28, 1500, 320, 2), EngineShape(28, 3300, 160, 5),
    EngineShape(40, 700, 72, 4), EngineShape(40, 2300, 384, 1), EngineShape(40, 3100, 640, 3),
)  # fmt: skip
HEAD_SHAPES = (
    EngineShape(1, 500, None, 2), EngineShape(2, 2900, None, 4), EngineShape(5, 1300, None, 1),
    EngineShape(7, 2200, None, 3), EngineShape(11, 1600, None, 5), EngineShape(14, 800, None, 2),
    EngineShape(14, 2700, None, 4), EngineShape(22, 500, None, 3), EngineShape(22, 1700, None, 1),
)  # fmt: skip
"""Shapes of a trained head, which has no budget."""
GREEDY_SHAPES = (
    EngineShape(3, 1500, 96, 2),
    EngineShape(20, 900, 96, 5),
    EngineShape(40, 700, 96, 3),
)


VLLM_STEPS_PER_RUN = 6
VLLM_SAMPLED_SHAPES = (
    EngineShape(1, 700, 320, 2), EngineShape(1, 3500, 640, 5), EngineShape(3, 1500, 200, 3),
    EngineShape(3, 3300, 384, 1), EngineShape(6, 700, 200, 5), EngineShape(6, 2600, 640, 2),
    EngineShape(10, 1500, 384, 4), EngineShape(10, 3500, 320, 3), EngineShape(14, 700, 320, 1),
    EngineShape(14, 2600, 200, 4), EngineShape(20, 1500, 640, 3), EngineShape(20, 3300, 384, 2),
)  # fmt: skip
"""Their budgets allow the pages that measured grids have."""
VLLM_GREEDY_SHAPES = (
    EngineShape(3, 1500, 384, 2),
    EngineShape(10, 2600, 320, 4),
    EngineShape(20, 700, 200, 3),
)
CUDA_CONTEXTS = (
    (1100, (72, 200)),
    (2900, (200, 300)),
    (11_000, (300, 700)),
    (29_000, (700, 1400)),
    (61_000, (700, 1400)),
)
"""Contexts, and the draft budgets used there."""
CUDA_GAMMAS = (3, 1, 5, 2, 4, 6)
CUDA_BATCH_SHARES = (1.0, 0.4, 0.12)
MAX_CUDA_BATCH = 180
CUDA_MEMORY_SHARE = 0.7
"""Share of the memory left free by the weights; the rest is for draft caches and activations."""


def engine_points(
    model: Transformer,
    *,
    rounds: int,
    head: TimedHead | None = None,
    quick: bool = False,
    speed: Callable[[], ReferenceTimes] | None = None,
    unfinished: Unfinished | None = None,
    progress: Progress = lambda _: None,
) -> list[TimedPoint]:
    """Times every shape once per round, after a round to warm up: steps without a draft, with the
    target drafting for itself, and with its trained head, if it has one. `speed` times the reference
    kernels, before each shape; `unfinished` holds the rounds of an interrupted calibration."""
    unfinished = unfinished or Unfinished(None, of="")
    points: list[TimedPoint] = []
    timed: list[tuple[Shapes, TimePhases]] = []
    for group in shape_groups(model, quick=quick):
        timed.append((group, _time_phases))
    if head is not None:
        for group in head_shape_groups(model, quick=quick):
            timed.append((group, partial(_time_head_phases, head)))
    stages = Stages(progress, [float(len(group)) for group, _ in timed])
    for number, (group, time_phases) in enumerate(timed):
        longest = max(shape.context_len + room_for(shape.gamma) for shape, _ in group)
        engine = Engine(
            model,
            batch_size=max(shape.batch_size for shape, _ in group),
            max_len=longest,
        )
        points += _time_rounds(
            group,
            partial(time_phases, engine),
            rounds=rounds,
            speed=speed,
            unfinished=unfinished,
            name=f"engine steps {number}",
            progress=stages.stage(number),
        )
        del engine  # before the next group's is made
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
    return points


class TimedHead(NamedTuple):
    """A trained head of the calibrated model, and its weights."""

    named: NamedHead
    weights: Head

    @property
    def speculation(self) -> SpeculationSpec:
        return self.named.speculation(gamma=1)


Shapes = list[tuple[EngineShape, SamplingSpec]]
TimePhases = Callable[[Engine, EngineShape, SamplingSpec], dict[str, float]]


def head_shape_groups(model: Transformer, *, quick: bool) -> list[Shapes]:
    """Groups of shapes to time with a trained head, as `shape_groups`."""
    if model.device.type == "cuda":
        groups = []
        for shapes in shape_groups(model, quick=quick):
            groups.append([each for each in shapes if not each[1].is_greedy])
        return groups
    limit = model.spec.max_position_embeddings - room_for(
        max(s.gamma for s in HEAD_SHAPES)
    )
    return [_sampled_and_greedy(_up_to(limit, HEAD_SHAPES), [], quick=quick)]


def shape_groups(model: Transformer, *, quick: bool) -> list[Shapes]:
    """Groups of shapes timed side by side, in one engine each: on a GPU one group per context, with
    as many sequences as fit."""
    limit = model.spec.max_position_embeddings - room_for(
        max(s.gamma for s in SAMPLED_SHAPES)
    )
    is_cuda = model.device.type == "cuda"
    if is_cuda:
        torch.cuda.empty_cache()
        free_bytes = CUDA_MEMORY_SHARE * available_memory_bytes(str(model.device))
        slot_bytes = model.spec.kv_elements_per_token() * model.dtype.itemsize
        sampled_groups = cuda_shapes(free_bytes / slot_bytes, max_context=limit)
        if quick:  # every group captures its steps anew, which takes most of the time
            sampled_groups = sampled_groups[::2]
    else:
        sampled_groups = [_up_to(limit, SAMPLED_SHAPES)]
    groups: list[Shapes] = []
    for shapes in sampled_groups:
        greedy = _up_to(limit, GREEDY_SHAPES)
        if is_cuda:
            greedy = shapes[::2]
        groups.append(_sampled_and_greedy(shapes, greedy, quick=quick))
    return groups


def _up_to(limit: int, shapes: Sequence[EngineShape]) -> list[EngineShape]:
    """The shapes whose context is no longer than the limit."""
    return [shape for shape in shapes if shape.context_len <= limit]


def _sampled_and_greedy(
    sampled: Sequence[EngineShape], greedy: Sequence[EngineShape], *, quick: bool
) -> Shapes:
    """Shapes to time with either kind of sampling; every second sampled one of a quick run."""
    if quick:
        sampled = sampled[::2]
    shapes = [(shape, SamplingSpec(temperature=1.0)) for shape in sampled]
    for shape in greedy:
        shapes.append((shape, SamplingSpec()))
    return shapes


def cuda_shapes(num_tokens: float, *, max_context: int) -> list[list[EngineShape]]:
    """Shapes by context for a GPU that holds `num_tokens` in its KV cache: a full batch, and shares
    of it.
    """
    gammas = cycle(CUDA_GAMMAS)
    groups = []
    for context, budgets in CUDA_CONTEXTS:
        # A draft's cache takes its budget on top; room_for(gamma) and the engine's own slack are
        # covered by it.
        most = min(MAX_CUDA_BATCH, int(num_tokens / (context + max(budgets))))
        if context > max_context or most < 1:
            continue
        batches = {max(1, round(share * most)) for share in CUDA_BATCH_SHARES}
        shapes = []
        largest_first = sorted(batches, reverse=True)
        for batch, budget, gamma in zip(
            largest_first, cycle(budgets), gammas, strict=False
        ):
            shapes.append(EngineShape(batch, context, budget, gamma))
        groups.append(shapes)
    return groups


def room_for(gamma: int) -> int:
    """Tokens that the timed steps generate at most."""
    return STEPS_PER_ROUND * (gamma + 1) + 8


def _time_rounds(
    shapes: Shapes,
    time_phases: Callable[[EngineShape, SamplingSpec], dict[str, float]],
    *,
    rounds: int,
    speed: Callable[[], ReferenceTimes] | None = None,
    unfinished: Unfinished,
    name: str,
    progress: Progress = lambda _: None,
) -> list[TimedPoint]:
    """Every shape once per round, after a round to warm up; a finished round is kept under `name`."""

    def timed(number: int) -> list[TimedPoint]:
        points = []
        for place, (shape, sampling) in enumerate(shapes):
            message = (
                f"engine steps, round {number}/{rounds}: batch {shape.batch_size}, context "
                f"{shape.context_len}"
            )
            done = number * len(shapes) + place
            total = (rounds + 1) * len(shapes)
            progress(StepMessage(message, done=done, total=total))
            speeds = []
            if speed is not None:
                now = speed()
                speeds.append((now.memory_s, now.compute_s))
            columns = shape.columns(is_greedy=sampling.is_greedy)
            for phase, phase_s in time_phases(shape, sampling).items():
                points.append(TimedPoint(phase, columns, [phase_s], speeds))
        return points

    parts = {number: f"{name}, round {number}" for number in range(1, rounds + 1)}
    if not all(map(unfinished.holds, parts.values())):
        timed(0)
    every = []
    for number, part in parts.items():
        every.append(unfinished.part(part, partial(timed, number)))
    points = []
    for of_rounds in zip(*every, strict=True):
        first = of_rounds[0]
        seconds = [point.seconds[0] for point in of_rounds]
        speeds = [pair for point in of_rounds for pair in point.speeds]
        points.append(TimedPoint(first.table, first.shape, seconds, speeds))
    return points


def _time_phases(
    engine: Engine, shape: EngineShape, sampling: SamplingSpec
) -> dict[str, float]:
    """Mean seconds of each phase over a few steps, the first left out."""
    sampled = _decode(engine, shape, AUTOREGRESSIVE, sampling).phases_s
    phases = _decode(engine, shape, _speculation(shape), sampling).phases_s
    return {
        "autoregressive": sampled["verify"] + sampled["accept"] + sampled["upkeep"],
        "sample": sampled["accept"],
        "bookkeeping": sampled["upkeep"],
        "draft": phases["draft"] / shape.gamma,
        "verify": phases["verify"],
        "accept": phases["accept"],
        "upkeep": phases["upkeep"],
    }


def _time_head_phases(
    head: TimedHead, engine: Engine, shape: EngineShape, sampling: SamplingSpec
) -> dict[str, float]:
    """Mean seconds of the phases that a trained head has of its own."""
    speculation = head.named.speculation(gamma=shape.gamma)
    phases = _decode(engine, shape, speculation, sampling, head=head.weights).phases_s
    return {
        "head draft": phases["draft"] / shape.gamma,
        "head upkeep": phases["upkeep"],
    }


def _decode(
    engine: Engine,
    shape: EngineShape,
    speculation: SpeculationSpec,
    sampling: SamplingSpec,
    *,
    head: Head | None = None,
) -> DecodeResult:
    engine.fill_with_noise([shape.context_len] * shape.batch_size)
    drafter = None
    if not speculation.is_autoregressive:
        drafter = build_drafter(speculation, engine, head)
    simulate_acceptance = None
    if speculation.gamma:
        simulate_acceptance = [SIMULATED_RATE]
    emitted = STEPS_PER_ROUND * (speculation.gamma + 1)
    options = DecodeOptions(
        gamma=speculation.gamma,
        max_new_tokens=emitted + 1,  # a sequence that ended would be exchanged: upkeep
        fences=True,
        simulate_acceptance=simulate_acceptance,
        max_steps=STEPS_PER_ROUND,
    )
    return decode(engine, drafter, sampling, options)


def _speculation(shape: EngineShape) -> SpeculationSpec:
    return SpeculationSpec(
        draft="self",
        draft_method="streamingllm",
        draft_budget=shape.draft_budget,
        gamma=shape.gamma,
    )


def vllm_points(
    model: str,
    *,
    device: str,
    dtype: str,
    clock: Clock,
    rounds: int,
    quick: bool = False,
    shapes: Shapes | None = None,
    progress: Progress = lambda _: None,
) -> list[TimedPoint]:
    """Times every shape once per round, after a round to warm up, in an engine with a process of
    its own. `shapes` replaces those of calibrations."""
    if shapes is None:
        shapes = _sampled_and_greedy(
            VLLM_SAMPLED_SHAPES, VLLM_GREEDY_SHAPES, quick=quick
        )
    progress(f"steps of vLLM: {len(shapes)} shapes, {rounds} rounds")
    return in_own_process(
        _time_in_vllm,
        model,
        shapes,
        device=device,
        dtype=dtype,
        clock=clock,
        rounds=rounds,
    )


def _time_in_vllm(
    model: str,
    shapes: Shapes,
    *,
    device: str,
    dtype: str,
    clock: Clock,
    rounds: int,
) -> list[TimedPoint]:
    session = session_class("vllm")(
        BenchmarkRequest(
            model=model,
            engine="vllm",
            dtype=dtype,
            device=device,
            batch_size=max(shape.batch_size for shape, _ in shapes),
            context_len=max(shape.context_len for shape, _ in shapes),
            gen_len=max(VLLM_STEPS_PER_RUN * (shape.gamma + 1) for shape, _ in shapes),
            speculations=tuple(
                dict.fromkeys(_speculation(shape) for shape, _ in shapes)
            ),
            calibration_prompts=True,
        )
    )
    return _time_rounds(
        shapes,
        partial(_time_vllm_phases, session, clock),
        rounds=rounds,
        unfinished=Unfinished(None, of="vllm"),
        name="vllm",
    )


def _time_vllm_phases(
    session: Any,
    clock: Clock,
    shape: EngineShape,
    sampling: SamplingSpec,
) -> dict[str, float]:
    """Mean seconds of each phase over the steps of one run of either kind."""

    def phases(speculation: SpeculationSpec) -> tuple[dict[str, float], float]:
        run = session.run(
            speculation,
            gen_len=VLLM_STEPS_PER_RUN * (shape.gamma + 1),
            batch_size=shape.batch_size,
            context_len=shape.context_len,
            sampling=sampling,
        )
        if clock == "cpu":
            return (run.phases_cpu_s, run.step_cpu_s)
        return (run.phases_s, run.steady_step_s)

    alone, step_s = phases(AUTOREGRESSIVE)
    drafted, _ = phases(_speculation(shape))
    return {
        "autoregressive": step_s,
        "sample": alone["sample"],
        "bookkeeping": alone["rest"] + alone["draft"],
        "draft": drafted["draft"] / shape.gamma,
        "verify": drafted["verify"],
        "accept": drafted["sample"],
        "upkeep": drafted["rest"],
    }


FACTOR = Free(prior=1.0, spread=0.25, limits=(math.exp(-1.5), math.exp(1.5)))
"""A factor on kernels' times, expected to differ from 1 by its spread."""
FIXED_COST = Free(
    scale="linear",
    prior=40 * MICRO,
    spread=math.inf,
    limits=(0.0, 40 * MILLI),
    unit=200 * MICRO,
)
FREE = {
    "kernels.gemm_factor": FACTOR,
    "kernels.attention_factor": FACTOR,
    "kernels.verify_attention_factor": FACTOR,
    "kernels.draft_attention_factor": FACTOR,
    "overheads.layer_overhead_s": FIXED_COST,
    "overheads.draft_step_overhead_s": FIXED_COST,
    "overheads.draft_block_overhead_s": FIXED_COST,
    "overheads.verify_overhead_s": FIXED_COST,
}
"""The fitted constants."""
FREE_WITH_HEAD = FREE | {
    "overheads.forward_overhead_s": FIXED_COST,
    "overheads.head_block_overhead_s": FIXED_COST,
}
"""The fitted constants where a head was timed too: its pass has fewer layers than the target's,
which tells what a pass costs from what its layers cost."""
PHASE_PRIOR_WEIGHT = 0.05
FITTED_PHASES = ("autoregressive", "draft", "verify")
SMALLEST_ERROR, LARGEST_ERROR = 0.03, 0.5
"""Bounds of the error that a fitted profile states: a step timed again differs by about 3 %."""


class EngineFit(NamedTuple):
    """The fitted profile, and the relative error of each phase over the points it was fitted on
    (median).
    """

    profile: EngineProfile
    phase_error: dict[str, float]


def fit_engine(
    points: Sequence[TimedPoint],
    *,
    model: ModelSpec,
    hardware: HardwareProfile,
    precision: Precision,
    base: EngineProfile,
    head: SpeculationSpec | None = None,
) -> EngineFit:
    """Fits `base`'s constants to the engine's timed phases, among them those of a trained head."""
    usual_s = hardware.compute_reference_s
    engine = _fit_vocabulary(
        points, vocabulary=model.vocab_size, usual_s=usual_s, base=base
    )
    engine = _fit_upkeep(points, usual_s=usual_s, base=engine)
    tables = {
        name: _columns(points, name) for name in (*FITTED_PHASES, "accept", "upkeep")
    }
    free = FREE
    if head is not None:
        free = FREE_WITH_HEAD
        tables["head draft"] = _columns(points, "head draft")
    predict = partial(
        predicted_steps, model=model, hardware=hardware, precision=precision
    )

    at_its_speed = partial(seconds_at_speed, hardware=hardware)

    def errors(candidate: EngineProfile) -> dict[str, Array]:
        missed = {}
        for name in FITTED_PHASES:
            step = predict(tables[name], engine=candidate)
            time = getattr(step, name)
            missed[name] = np.log(
                at_its_speed(time, tables[name]) / tables[name]["time_s"]
            )
        if head is not None:
            table = tables["head draft"]
            step = predict(table, engine=candidate, speculation=head)
            missed["head draft"] = np.log(
                at_its_speed(step.draft, table) / table["time_s"]
            )
        return missed

    def residuals(values: dict[str, float]) -> Array:
        missed = errors(engine.with_constants(values))
        return np.concatenate([*missed.values()])

    solution = solve(
        free,
        residuals,
        pull=PHASE_PRIOR_WEIGHT,
        loss="soft_l1",
        f_scale=0.1,  # a phase that was disturbed by more counts by its size, not its square
    )
    fitted = engine.with_constants(solution.values)
    num_timings = sum(tables[name]["time_s"].size for name in FITTED_PHASES)
    # errors of the shapes that were fitted are smaller than those of others
    in_sample = np.sqrt(num_timings / max(num_timings - len(free), 1.0))
    terms = predict(tables["autoregressive"], engine=fitted)
    kernel_errors = relative_errors(terms.autoregressive, hardware, fitted)
    unexplained = in_sample * np.array(
        _unexplained_errors(tables, terms, kernel_errors, hardware)
    )
    of_step, of_speedup = np.clip(unexplained, SMALLEST_ERROR, LARGEST_ERROR).tolist()
    phase_error = {}
    for name, missed in errors(fitted).items():
        phase_error[name] = float(np.median(np.abs(np.expm1(missed))))
    if head is not None and head.draft_method == "eagle3":
        kept = _columns(points, "head upkeep")
        known = predict(kept, engine=fitted, speculation=head)
        left_s = float(np.median(_usual_s(kept, usual_s) - known.upkeep.total_s))
        fitted = fitted.with_constants(
            {"drafts.eagle3.step_overhead_s": max(left_s, 0.0)}
        )
    profile = fitted.with_constants(
        {
            "errors.relative_error": of_step,
            "errors.speedup_relative_error": of_speedup,
        }
    )
    return EngineFit(profile=profile, phase_error=phase_error)


def _unexplained_errors(
    tables: dict[str, dict[str, Array]],
    terms: StepTerms,
    kernel_errors: dict[str, float],
    hardware: HardwareProfile,
) -> tuple[float, float]:
    """Root mean square errors over the timed shapes that the kernels' own errors do not explain: of
    whole steps' times, and of the autoregressive over the speculative one, in which common terms'
    errors cancel.

    The kernels' part is the one in the intervals of perfmodel/intervals.py, and so is the machine's
    drift, which is left out here: each shape's times are predicted at the speed that the references
    found just before.
    """
    kernels = {}
    for group, error in kernel_errors.items():
        if group != "overhead":
            kernels[group] = error
    step_s = tables["autoregressive"]["gamma"] * tables["draft"]["time_s"]
    for name in ("verify", "accept", "upkeep"):
        step_s = step_s + tables[name]["time_s"]
    alone = tables["autoregressive"]
    alone_s = seconds_at_speed(terms.autoregressive, alone, hardware=hardware)
    missed_alone = np.log(alone_s / alone["time_s"])
    # one speed, that of the shape, holds for all phases
    drafted_s = seconds_at_speed(terms.draft, alone, hardware=hardware)
    predicted_s = alone["gamma"] * drafted_s
    for part in (terms.verify, terms.accept, terms.upkeep):
        predicted_s = predicted_s + seconds_at_speed(part, alone, hardware=hardware)
    missed_step = np.log(predicted_s / step_s)
    shares_alone, shares_of_step = group_shares(terms)
    explained_alone = np.stack(
        [shares_alone[group] * error for group, error in kernels.items()]
    )
    explained_step = np.stack(
        [shares_of_step[group] * error for group, error in kernels.items()]
    )

    def left(missed: Array, explained: Array) -> float:
        variance = np.mean(missed**2) - np.mean(np.sum(explained**2, axis=0))
        return float(np.sqrt(max(variance, 0.0)))

    of_step = left(
        np.concatenate([missed_alone, missed_step]),
        np.concatenate([explained_alone, explained_step], axis=1),
    )
    return of_step, left(missed_alone - missed_step, explained_alone - explained_step)


def seconds_at_speed(
    time: ForwardTime, columns: dict[str, Array], *, hardware: HardwareProfile
) -> Array:
    """A predicted time on the machine as its references found it at each shape: attention follows
    memory, the rest arithmetic, as in the intervals (perfmodel/intervals.py)."""
    if "memory_s" not in columns or not hardware.reference_s:
        return time.total_s
    assert hardware.compute_reference_s is not None
    attention_s = time.group_seconds()["attention"]
    memory = columns["memory_s"] / hardware.reference_s
    compute = columns["compute_s"] / hardware.compute_reference_s
    return memory * attention_s + compute * (time.total_s - attention_s)


SELF_DRAFT = SpeculationSpec(
    draft="self", draft_method="streamingllm", draft_budget=64, gamma=1
)


def predicted_steps(
    columns: dict[str, Array],
    *,
    model: ModelSpec,
    hardware: HardwareProfile,
    precision: Precision,
    engine: EngineProfile,
    speculation: SpeculationSpec = SELF_DRAFT,
) -> StepTerms:
    """Predictions of the steps at the columns' shapes."""
    reads = columns["context_len"]
    if speculation.draft_budget is not None:
        reads = np.minimum(columns["draft_budget"], reads)
    setup = Setup(
        model=model,
        hardware=hardware,
        engine=engine,
        speculation=speculation,
        sampling=SamplingSpec(temperature=1.0),
        precision=precision,
    )
    return step_terms(
        setup,
        batch=columns["batch_size"],
        kv_len=columns["context_len"],
        draft_kv_len=reads,
        gamma=columns["gamma"],
        tp_size=1,
        full_acceptance=0.0,
    )


def _columns(
    points: Sequence[TimedPoint], table: str, *, greedy: bool = False
) -> dict[str, Array]:
    chosen = []
    for point in points:
        if point.table == table and bool(point.shape["is_greedy"]) == greedy:
            chosen.append(point)
    columns = {}
    for key in chosen[0].shape:
        columns[key] = np.array(
            [point.shape[key] for point in chosen], dtype=np.float64
        )
    columns["verified"] = columns["batch_size"] * (columns["gamma"] + 1)
    columns["time_s"] = np.array([point.time_s for point in chosen])
    if all(point.speeds for point in chosen):
        speeds = np.array([np.median(point.speeds, axis=0) for point in chosen])
        columns["memory_s"], columns["compute_s"] = speeds.T
    return columns


def _usual_s(columns: dict[str, Array], usual_s: float | None) -> Array:
    """Measured times without attention, as they are when the compute reference takes `usual_s`."""
    if "compute_s" not in columns or not usual_s:
        return columns["time_s"]
    return columns["time_s"] * usual_s / columns["compute_s"]


def _fit_vocabulary(
    points: Sequence[TimedPoint],
    *,
    vocabulary: int,
    usual_s: float | None,
    base: EngineProfile,
) -> EngineProfile:
    """Fits the costs that are linear in the tokens: sampling and acceptance over the vocabulary."""

    def line(table: str, size: str, *, greedy: bool) -> tuple[float, float]:
        columns = _columns(points, table, greedy=greedy)
        return _line(columns[size] * vocabulary, _usual_s(columns, usual_s))

    sample_base, sample = line("sample", "batch_size", greedy=False)
    _, greedy_sample = line("sample", "batch_size", greedy=True)
    accept_base, accept = line("accept", "verified", greedy=False)
    _, greedy_accept = line("accept", "verified", greedy=True)
    return base.with_constants(
        {
            "sampling.sampling_base_s": sample_base,
            "sampling.sampling_s_per_element": sample,
            "sampling.greedy_s_per_element": greedy_sample,
            "sampling.accept_base_s": accept_base,
            "sampling.accept_s_per_element": accept,
            "sampling.greedy_accept_s_per_element": greedy_accept,
        }
    )


def _fit_upkeep(
    points: Sequence[TimedPoint], *, usual_s: float | None, base: EngineProfile
) -> EngineProfile:
    """Fits the costs that are paid once per step. The upkeep of a draft with its own cache grows
    with the verified tokens. Without one, the part of a step outside its phases grows with the
    sequences, drafted or not."""
    upkeep = _columns(points, "upkeep")
    # what an autoregressive step does after sampling; its forward pass shares the constants of
    # verification
    bookkeeping = _columns(points, "bookkeeping")
    after_sampling = _usual_s(bookkeeping, usual_s)
    upkeep_s = _usual_s(upkeep, usual_s)
    if base.paths.streaming_in_place:
        per_step, per_sequence = _line(upkeep["batch_size"], upkeep_s)
        after_sampling = after_sampling - per_sequence * bookkeeping["batch_size"]
        base = base.with_constants(
            {
                "overheads.step_overhead_s": per_step,
                "overheads.sequence_overhead_s": per_sequence,
            }
        )
    else:
        per_step, per_token = _line(upkeep["verified"], upkeep_s)
        base = base.with_constants(
            {
                "overheads.step_overhead_s": 0.0,
                "overheads.upkeep_base_s": per_step,
                "overheads.upkeep_s_per_token": per_token,
            }
        )
    alone_s = max(float(np.median(after_sampling)), 0.0)
    return base.with_constants({"overheads.autoregressive_overhead_s": alone_s})


def _line(x: Array, y: Array) -> tuple[float, float]:
    """Non-negative (intercept, slope) of y over x, relative errors weighted alike."""
    design = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    scale = design.max(axis=0)
    solution, _ = nnls(design / scale, np.ones_like(y))
    return float(solution[0] / scale[0]), float(solution[1] / scale[1])
