"""Times the phases of vLLM's steps: what engine_bench.py does for our runtime, in the engine itself.

One engine, started once, decodes the beginnings of the same prompts at every shape, autoregressive and speculative in
turns. No shape shares its (batch, context) or its (budget, gamma) with a grid that may be measured
(tests/calibrate/test_calibration_shapes.py). Budgets allow the pages that such grids have.
"""

from __future__ import annotations

from collections.abc import Callable

from magicdec.calibrate.points import EngineShape, Point
from magicdec.measure.clock import Clock
from magicdec.measure.configuration import BenchmarkRequest
from magicdec.measure.own_process import in_own_process
from magicdec.measure.vllm_session import VllmRun, VllmSession
from magicdec.specs.speculation import AUTOREGRESSIVE, SamplingSpec, SpeculationSpec

STEPS_PER_RUN = 6
SAMPLED_SHAPES = (
    EngineShape(1, 700, 320, 2),
    EngineShape(1, 3500, 640, 5),
    EngineShape(3, 1500, 200, 3),
    EngineShape(3, 3300, 384, 1),
    EngineShape(6, 700, 200, 5),
    EngineShape(6, 2600, 640, 2),
    EngineShape(10, 1500, 384, 4),
    EngineShape(10, 3500, 320, 3),
    EngineShape(14, 700, 320, 1),
    EngineShape(14, 2600, 200, 4),
    EngineShape(20, 1500, 640, 3),
    EngineShape(20, 3300, 384, 2),
)
GREEDY_SHAPES = (EngineShape(3, 1500, 384, 2), EngineShape(10, 2600, 320, 4), EngineShape(20, 700, 200, 3))
Shapes = list[tuple[EngineShape, SamplingSpec]]


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
        sampled = [(shape, SamplingSpec(temperature=1.0)) for shape in SAMPLED_SHAPES[:: 2 if quick else 1]]
        shapes = sampled + [(shape, SamplingSpec()) for shape in GREEDY_SHAPES]
    progress(f"steps of vLLM: {len(shapes)} shapes, {rounds} rounds")
    return in_own_process(_time_shapes, model, shapes, device=device, dtype=dtype, clock=clock, rounds=rounds)


def _time_shapes(model: str, shapes: Shapes, *, device: str, dtype: str, clock: Clock, rounds: int) -> list[Point]:
    session = VllmSession(
        BenchmarkRequest(
            model=model,
            dtype=dtype,
            device=device,
            batch_size=max(shape.batch_size for shape, _ in shapes),
            context_len=max(shape.context_len for shape, _ in shapes),
            gen_len=max(_gen_len(shape) for shape, _ in shapes),
            speculations=tuple(dict.fromkeys(_speculation(shape) for shape, _ in shapes)),
            calibration_prompts=True,
        )
    )
    seconds: dict[tuple[str, EngineShape, bool], list[float]] = {}
    for number in range(rounds + 1):
        for shape, sampling in shapes:
            for phase, taken in _time_phases(session, shape, sampling, clock).items():
                if number:
                    seconds.setdefault((phase, shape, sampling.is_greedy), []).append(taken)
    return [
        Point(phase, shape.columns(is_greedy=is_greedy), taken) for (phase, shape, is_greedy), taken in seconds.items()
    ]


def _gen_len(shape: EngineShape) -> int:
    return STEPS_PER_RUN * (shape.gamma + 1)


def _speculation(shape: EngineShape) -> SpeculationSpec:
    return SpeculationSpec(
        draft="self", draft_method="streamingllm", draft_budget=shape.draft_budget, gamma=shape.gamma
    )


def _time_phases(session: VllmSession, shape: EngineShape, sampling: SamplingSpec, clock: Clock) -> dict[str, float]:
    """Mean seconds of each phase over the steps of one run of either kind."""

    def phases(speculation: SpeculationSpec) -> tuple[dict[str, float], float]:
        run: VllmRun = session.run(
            speculation,
            gen_len=_gen_len(shape),
            batch_size=shape.batch_size,
            context_len=shape.context_len,
            sampling=sampling,
        )
        by_cpu = clock == "cpu"
        found = run.times.phases_cpu_s if by_cpu else run.times.phases_wall_s
        return found, run.step_cpu_s if by_cpu else run.step_wall_s

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
