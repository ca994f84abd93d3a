"""Times the phases of single engine steps, ours and vLLM's: what a runtime adds to its kernels.

Each shape gives one point per phase: an autoregressive step, one draft step, the verification pass, acceptance, and the
upkeep of the draft's cache. No shape shares its (batch, context) or its (budget, gamma) with a grid that may be
measured (tests/calibrate/test_calibration_shapes.py). Our engine decodes on a cache of noise with prescribed
acceptance, so every step does the same work; vLLM, started once in a process of its own, decodes the beginnings of the
same prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch

from magicdec.calibrate.local_profile import EngineShape, Point
from magicdec.measure.configuration import BenchmarkRequest
from magicdec.measure.environment import Clock, available_memory_bytes
from magicdec.measure.vllm_session import VllmSession, in_own_process
from magicdec.progress import Stages, Step
from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.generate import DecodeOptions, DecodeResult, decode
from magicdec.runtime.transformer import Transformer
from magicdec.specs.speculation import AUTOREGRESSIVE, SamplingSpec, SpeculationSpec

SIMULATED_RATE = 0.7
STEPS_PER_ROUND = 5


SAMPLED_SHAPES = (
    EngineShape(1, 300, 72, 3), EngineShape(1, 3300, 200, 2), EngineShape(3, 1500, 320, 5),
    EngineShape(5, 700, 96, 1), EngineShape(5, 2600, 640, 3), EngineShape(10, 300, 160, 7),
    EngineShape(10, 1800, 48, 2), EngineShape(12, 3600, 384, 4), EngineShape(20, 900, 200, 6),
    EngineShape(20, 2600, 96, 3), EngineShape(28, 1500, 320, 2), EngineShape(28, 3300, 160, 5),
    EngineShape(40, 700, 72, 4), EngineShape(40, 2300, 384, 1), EngineShape(40, 3100, 640, 3),
)  # fmt: skip
GREEDY_SHAPES = (EngineShape(3, 1500, 96, 2), EngineShape(20, 900, 96, 5), EngineShape(40, 700, 96, 3))


VLLM_STEPS_PER_RUN = 6
"""Budgets of vLLM's shapes allow the pages that measured grids have."""
VLLM_SAMPLED_SHAPES = (
    EngineShape(1, 700, 320, 2), EngineShape(1, 3500, 640, 5), EngineShape(3, 1500, 200, 3),
    EngineShape(3, 3300, 384, 1), EngineShape(6, 700, 200, 5), EngineShape(6, 2600, 640, 2),
    EngineShape(10, 1500, 384, 4), EngineShape(10, 3500, 320, 3), EngineShape(14, 700, 320, 1),
    EngineShape(14, 2600, 200, 4), EngineShape(20, 1500, 640, 3), EngineShape(20, 3300, 384, 2),
)  # fmt: skip
VLLM_GREEDY_SHAPES = (EngineShape(3, 1500, 384, 2), EngineShape(10, 2600, 320, 4), EngineShape(20, 700, 200, 3))
CUDA_CONTEXTS = (
    (1100, (72, 200)), (2900, (200, 300)), (11_000, (300, 700)), (29_000, (700, 1400)), (61_000, (700, 1400)),
)  # fmt: skip
"""Contexts, and the draft budgets used there."""
CUDA_GAMMAS = (3, 1, 5, 2, 4, 6)
CUDA_BATCH_SHARES = (1.0, 0.4, 0.12)
MAX_CUDA_BATCH = 180
CUDA_MEMORY_SHARE = 0.7
"""Share of the memory left free by the weights; the rest is for draft caches and activations."""


def engine_points(
    model: Transformer, *, rounds: int, quick: bool = False, progress: Callable[[str], None] = lambda _: None
) -> list[Point]:
    """Times every shape once per round, after a round to warm up."""
    points: list[Point] = []
    groups = shape_groups(model, quick=quick)
    stages = Stages(progress, [float(len(group)) for group in groups])
    for number, group in enumerate(groups):
        longest = max(shape.context_len + room_for(shape.gamma) for shape, _ in group)
        engine = Engine(model, batch_size=max(shape.batch_size for shape, _ in group), max_len=longest)
        points += _time_rounds(group, partial(_time_phases, engine), rounds=rounds, progress=stages.stage(number))
        del engine  # before the next group's is made
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
    return points


Shapes = list[tuple[EngineShape, SamplingSpec]]


def shape_groups(model: Transformer, *, quick: bool) -> list[Shapes]:
    """Groups of shapes timed side by side, in one engine each: on a GPU one group per context, with as many sequences
    as fit."""
    limit = model.spec.max_position_embeddings - room_for(max(s.gamma for s in SAMPLED_SHAPES))
    is_cuda = model.device.type == "cuda"
    if is_cuda:
        torch.cuda.empty_cache()
        free_bytes = CUDA_MEMORY_SHARE * available_memory_bytes(str(model.device))
        slot_bytes = model.spec.kv_elements_per_token() * model.dtype.itemsize
        sampled_groups = cuda_shapes(free_bytes / slot_bytes, max_context=limit)
    else:
        sampled_groups = [[s for s in SAMPLED_SHAPES if s.context_len <= limit]]
    groups: list[Shapes] = []
    for shapes in sampled_groups:
        sampled = [(s, SamplingSpec(temperature=1.0)) for s in shapes[:: 2 if quick else 1]]
        greedy = shapes[::2] if is_cuda else [s for s in GREEDY_SHAPES if s.context_len <= limit]
        groups.append(sampled + [(s, SamplingSpec()) for s in greedy])
    return groups


def cuda_shapes(num_tokens: float, *, max_context: int) -> list[list[EngineShape]]:
    """Shapes by context for a GPU that holds `num_tokens` in its KV cache: a full batch, and shares of it."""
    gammas = cycle(CUDA_GAMMAS)
    groups = []
    for context, budgets in CUDA_CONTEXTS:
        # A draft's cache takes its budget on top; room_for(gamma) and the engine's own slack are covered by it.
        most = min(MAX_CUDA_BATCH, int(num_tokens / (context + max(budgets))))
        if context > max_context or most < 1:
            continue
        batches = sorted({max(1, round(share * most)) for share in CUDA_BATCH_SHARES}, reverse=True)
        pairs = zip(batches, cycle(budgets), gammas, strict=False)
        groups.append([EngineShape(batch, context, budget, gamma) for batch, budget, gamma in pairs])
    return groups


def room_for(gamma: int) -> int:
    """Tokens that the timed steps generate at most."""
    return STEPS_PER_ROUND * (gamma + 1) + 8


def _time_rounds(
    shapes: Shapes,
    time_phases: Callable[[EngineShape, SamplingSpec], dict[str, float]],
    *,
    rounds: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Point]:
    """Every shape once per round, after a round to warm up."""
    seconds: dict[tuple[str, EngineShape, bool], list[float]] = {}
    for number in range(rounds + 1):
        for index, (shape, sampling) in enumerate(shapes):
            message = f"engine steps, round {number}/{rounds}: batch {shape.batch_size}, context {shape.context_len}"
            progress(Step(message, done=number * len(shapes) + index, total=(rounds + 1) * len(shapes)))
            for phase, taken in time_phases(shape, sampling).items():
                if number:
                    seconds.setdefault((phase, shape, sampling.is_greedy), []).append(taken)
    return [
        Point(phase, shape.columns(is_greedy=is_greedy), taken) for (phase, shape, is_greedy), taken in seconds.items()
    ]


def _time_phases(engine: Engine, shape: EngineShape, sampling: SamplingSpec) -> dict[str, float]:
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


def _decode(engine: Engine, shape: EngineShape, speculation: SpeculationSpec, sampling: SamplingSpec) -> DecodeResult:
    engine.fill_with_noise([shape.context_len] * shape.batch_size)
    drafter = None if speculation.is_autoregressive else build_drafter(speculation, engine)
    options = DecodeOptions(
        gamma=speculation.gamma,
        max_new_tokens=STEPS_PER_ROUND * (speculation.gamma + 1) + 1,  # one that ended would be exchanged: upkeep
        fences=True,
        simulate_acceptance=[SIMULATED_RATE] if speculation.gamma else None,
        max_steps=STEPS_PER_ROUND,
    )
    return decode(engine, drafter, sampling, options)


def _speculation(shape: EngineShape) -> SpeculationSpec:
    return SpeculationSpec(
        draft="self", draft_method="streamingllm", draft_budget=shape.draft_budget, gamma=shape.gamma
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
    progress: Callable[[str], None] = lambda _: None,
) -> list[Point]:
    """Times every shape once per round, after a round to warm up, in an engine with a process of its own. `shapes`
    replaces those of calibrations."""
    if shapes is None:
        sampled = [(shape, SamplingSpec(temperature=1.0)) for shape in VLLM_SAMPLED_SHAPES[:: 2 if quick else 1]]
        shapes = sampled + [(shape, SamplingSpec()) for shape in VLLM_GREEDY_SHAPES]
    progress(f"steps of vLLM: {len(shapes)} shapes, {rounds} rounds")
    return in_own_process(_time_in_vllm, model, shapes, device=device, dtype=dtype, clock=clock, rounds=rounds)


def _time_in_vllm(model: str, shapes: Shapes, *, device: str, dtype: str, clock: Clock, rounds: int) -> list[Point]:
    session = VllmSession(
        BenchmarkRequest(
            model=model,
            engine="vllm",
            dtype=dtype,
            device=device,
            batch_size=max(shape.batch_size for shape, _ in shapes),
            context_len=max(shape.context_len for shape, _ in shapes),
            gen_len=max(VLLM_STEPS_PER_RUN * (shape.gamma + 1) for shape, _ in shapes),
            speculations=tuple(dict.fromkeys(_speculation(shape) for shape, _ in shapes)),
            calibration_prompts=True,
        )
    )
    return _time_rounds(shapes, partial(_time_vllm_phases, session, clock), rounds=rounds)


def _time_vllm_phases(
    session: VllmSession, clock: Clock, shape: EngineShape, sampling: SamplingSpec
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
        return (run.phases_cpu_s, run.step_cpu_s) if clock == "cpu" else (run.phases_s, run.steady_step_s)

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
