"""Grids of configurations, declared in a file or shipped, and the limits that their comparison must hold. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import msgspec

from magicdec.comparison import Comparison
from magicdec.errors import ConfigError
from magicdec.files import converted, read_toml
from magicdec.measure.configuration import BenchmarkRequest, Runtime
from magicdec.measure.environment import Clock
from magicdec.specs.speculation import DraftMethod, SamplingSpec, SpeculationSpec


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Upper limits, as fractions; None is not checked. Errors are absolute values.

    Step times (`*_step_error`) are normalised where the reference kernels were timed, and raw elsewhere.
    """

    median_speedup_error: float | None = None
    p90_speedup_error: float | None = None
    median_autoregressive_step_error: float | None = None
    median_draft_step_error: float | None = None
    median_verify_step_error: float | None = None
    median_step_error: float | None = None
    median_tokens_per_step_error: float | None = None
    regret: float | None = None
    """Mean over the cases of what following the plan loses."""
    coverage: tuple[float, float] | None = None
    """Least and greatest share of the points that the intervals hold."""

    def failures(self, comparison: Comparison) -> list[str]:
        """Which thresholds do not hold; one that cannot be checked does not hold."""
        if not comparison.pairs:
            return ["no configuration has both a prediction and a measurement"]
        failures = []
        for name, value in _figures(comparison).items():
            limit = getattr(self, name)
            if limit is None:
                continue
            low, high = limit if isinstance(limit, tuple) else (None, limit)
            if value is None:
                failures.append(f"{name.replace('_', ' ')} could not be computed")
            elif value > high:
                failures.append(f"{name.replace('_', ' ')} {value:.3f} exceeds {high:.3f}")
            elif low is not None and value < low:
                failures.append(f"{name.replace('_', ' ')} {value:.3f} is below {low:.3f}")
        return failures


def _figures(comparison: Comparison) -> dict[str, float | None]:
    """The statistic that each threshold limits."""
    summaries = comparison.summaries
    figures: dict[str, float | None] = {"regret": comparison.regret, "coverage": comparison.coverage}
    for term, summary in summaries.items():
        name = f"median_{term.removeprefix('expected_').removesuffix('_s')}_error"
        is_time = term.endswith("_s")
        normalised = summary.normalised_median_error if is_time else None
        figures[name] = summary.median_error if normalised is None else normalised
    if "speedup" in summaries:
        figures["p90_speedup_error"] = summaries["speedup"].p90_error
    return {name: figures.get(name) for name in Thresholds.__struct_fields__}


class GridSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every combination of the lists; `cases`, where given, lists (batch, context) pairs instead of their product."""

    model: str = "embedded"
    dtype: str = "float32"
    device: str = "cpu"
    draft_methods: tuple[DraftMethod, ...] = ("streamingllm",)
    draft_budgets: tuple[int, ...] = (128, 256)
    gammas: tuple[int, ...] = (1, 3, 5)
    batch_sizes: tuple[int, ...] = ()
    context_lens: tuple[int, ...] = ()
    cases: tuple[tuple[int, int], ...] = ()
    temperatures: tuple[float, ...] = (1.0,)
    gen_len: int = 48
    repetitions: int = 3
    prompts: str = "stdlib"
    seed: int = 0
    engine: Runtime = "ours"
    clock: Clock = "wall"
    """Whose times are judged, and calibrated: the wall's, or one thread's processor time."""
    thresholds: Thresholds = Thresholds()

    def requests(self) -> Iterator[BenchmarkRequest]:
        """One per (batch, context, temperature), the cheapest first, so that results appear early."""
        cases = self.cases or list(product(self.batch_sizes, self.context_lens))
        for (batch, context), temperature in product(
            sorted(cases, key=lambda case: case[0] * case[1]), self.temperatures
        ):
            speculations = tuple(
                SpeculationSpec(draft="self", draft_method=method, draft_budget=budget, gamma=gamma)
                for method, budget, gamma in product(self.draft_methods, self.draft_budgets, self.gammas)
                if budget < context
            )
            yield BenchmarkRequest(
                model=self.model,
                engine=self.engine,
                dtype=self.dtype,
                device=self.device,
                batch_size=batch,
                context_len=context,
                gen_len=self.gen_len,
                speculations=speculations,
                sampling=SamplingSpec(temperature=temperature, seed=self.seed),
                prompts=self.prompts,
                repetitions=self.repetitions,
            )


BUILT_IN_GRID = GridSpec(cases=((1, 512), (8, 2048), (32, 4096)))
QUICK_GRID = GridSpec(
    cases=((2, 512), (8, 1024)),
    draft_budgets=(64, 256),
    gammas=(1, 3),
    gen_len=48,
    repetitions=4,
    thresholds=Thresholds(
        median_speedup_error=0.15,
        p90_speedup_error=0.35,
        median_step_error=0.25,
        median_autoregressive_step_error=0.25,
        regret=0.10,
    ),
)
"""Steps of 2 to 8 ms on a machine that others use: repetitions of one point differ by a tenth and more, so the limits
are those that only a broken model exceeds."""
VLLM_GRID = GridSpec(
    engine="vllm",
    clock="cpu",
    batch_sizes=(4, 8, 16),
    context_lens=(1000, 4000),
    draft_budgets=(256, 512),
    gammas=(1, 2, 3, 4),
    temperatures=(0.0,),
    gen_len=96,
    thresholds=Thresholds(median_speedup_error=0.10, regret=0.03),
)
"""Contexts and batches at which a draft pays in vLLM on a CPU, and some at which it hardly does."""


def choose_grid(path: Path | None, *, quick: bool, engine: Runtime | None, clock: Clock | None) -> GridSpec:
    """A grid file's, or the shipped one of the engine; what is given replaces the file's."""
    grid = QUICK_GRID if quick else VLLM_GRID if path is None and engine == "vllm" else load_grid(path)
    grid = msgspec.structs.replace(grid, engine=engine or grid.engine, clock=clock or grid.clock)
    if grid.clock == "cpu" and grid.engine != "vllm":
        raise ConfigError("--clock cpu goes with --engine vllm: our runtime's steps are timed by the wall clock")
    return grid


def load_grid(path: Path | None) -> GridSpec:
    """Reads a grid file; None is the built-in grid.

    Raises ConfigError naming the file and the key.
    """
    if path is None:
        return BUILT_IN_GRID
    grid = converted(read_toml(path, "grid"), GridSpec, where=f"grid {path}")
    if not (grid.cases or (grid.batch_sizes and grid.context_lens)):
        raise ConfigError(f"grid {path}: give cases = [[batch, context], ...], or batch_sizes and context_lens")
    return grid
