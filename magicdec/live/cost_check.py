"""The results of a cost check (reports/cost_check.py), and the engine's constants that they correct.

    1. one factor on all kernels, so that the time between tokens without a draft is the measured one
    2. step_overhead_s and draft_step_overhead_s, so that those with one and with gamma drafts are:
       r(γ) = (measured − predicted TPOT) · E    δ_draft = (r(γ) − r(1)) / (γ − 1)    δ_step = r(1) − δ_draft

The engine imposes E, so nothing of it rests on a text. A cost below 0 cannot be set; what is left over
is in the error that the profile states.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from magicdec.counts import constant_rate
from magicdec.errors import ConfigError
from magicdec.files import RESULTS_LIMIT_BYTES, read_text
from magicdec.perfmodel.acceptance import constant_profile
from magicdec.perfmodel.intervals import cost_place
from magicdec.perfmodel.serving import whole_requests
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import predict
from magicdec.specs.engine import EngineProfile
from magicdec.units import MILLI, read_number

NAME = re.compile(r"cost-(?:plain|k(\d+)-(\d+(?:\.\d+)?))")
FACTORS = (
    "kernels.gemm_factor",
    "kernels.narrow_gemm_factor",
    "kernels.experts_factor",
    "kernels.attention_factor",
    "kernels.elementwise_factor",
    "kernels.collective_factor",
)
MOST = 20.0
"""A kernel factor beyond this, or below its inverse, is another server than the plan's."""
REPETITION_ERROR = 0.03
"""Repetitions of a served load differ by about this much."""
ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class CostRun:
    """One server's load."""

    gamma: int
    tokens: float
    """Tokens per step that were imposed; 1 without a draft."""
    tpot_s: float
    concurrency: float
    prompt_len: float
    output_len: float


def is_cost_run(path: Path) -> bool:
    """Whether a file's name is that of a cost check's result."""
    return NAME.match(path.name) is not None


def read_cost_run(path: Path) -> CostRun:
    """The result file of vLLM's, SGLang's or TensorRT-LLM's load generator. Raises ConfigError."""
    named = NAME.match(path.name)
    if named is None:
        raise ConfigError(
            f"{path.name} is no result of a cost check: cost-plain.json or cost-k3-2.64.json"
        )
    lines = read_text(path, limit_bytes=RESULTS_LIMIT_BYTES).strip()
    try:
        result = json.loads(lines.splitlines()[-1] if "\n{" in lines else lines)
        completed = read_number(result["completed"])
        run = CostRun(
            gamma=int(named[1] or 0),
            tokens=read_number(named[2] or 1.0),
            tpot_s=read_number(result["mean_tpot_ms"]) * MILLI,
            concurrency=read_number(result["max_concurrency"]),
            prompt_len=read_number(result["total_input_tokens"]) / completed,
            output_len=read_number(result["total_output_tokens"]) / completed,
        )
    except (ValueError, TypeError, KeyError, ZeroDivisionError, IndexError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} is no result of a load generator: {what}") from None
    numbers = (run.tpot_s, run.concurrency, run.prompt_len, run.output_len)
    if not all(math.isfinite(number) and number > 0.0 for number in numbers):
        raise ConfigError(f"{path} holds a time or a length that is not above 0")
    if run.gamma and not 1.0 <= run.tokens <= run.gamma + 1.0:
        raise ConfigError(
            f"{path.name}: {run.tokens:g} tokens per step are not from 1 to {run.gamma + 1}"
        )
    return run


@dataclass(frozen=True, kw_only=True)
class CostFit:
    """`errors`: predicted over measured time between tokens, less 1, of each run, before and after."""

    profile: EngineProfile
    before: tuple[float, ...]
    after: tuple[float, ...]


def predicted_tpot_s(setup: Setup, run: CostRun, tp_size: float, budget: Any) -> float:
    """Mean time between tokens of the run's requests."""
    at = Points(
        batch=run.concurrency,
        context=run.prompt_len,
        tp=tp_size,
        gamma=max(run.gamma, 1),
        budget=budget,
        gen_len=run.output_len,
    )
    tokens = run.tokens if run.gamma else 1.0
    rate = constant_rate(np.array([tokens]), np.array([max(run.gamma, 1)])).item()
    spec = setup.speculation
    profile = constant_profile(
        min(max(rate, 0.0), 1.0), draft=spec.draft, draft_method=spec.draft_method
    )
    requests = whole_requests(predict(setup, profile, at), output_len=run.output_len)
    cycle = requests.drafted if run.gamma else requests.alone
    return float(np.asarray(cycle.tpot_s).item())


def fit_cost(
    setup: Setup, runs: Sequence[CostRun], *, tp_size: float, budget: Any, name: str
) -> CostFit:
    """The setup's engine with the constants of the server that was measured.

    Raises ConfigError without a run without a draft and one with, or for times that no such server
    has."""
    by_gamma = {run.gamma: run for run in runs}
    if 0 not in by_gamma or len(by_gamma) < 2:
        raise ConfigError(
            "a cost check needs cost-plain.json and at least one run with a draft"
        )

    def misses(engine: EngineProfile) -> dict[int, float]:
        at = replace(setup, engine=engine)
        predicted = {}
        for gamma, run in by_gamma.items():
            tpot_s = predicted_tpot_s(at, run, tp_size, budget)
            predicted[gamma] = math.log(tpot_s / run.tpot_s)
        return predicted

    before = misses(setup.engine)
    engine = _with_kernels(setup, by_gamma[0], tp_size, budget)
    deepest = max(by_gamma)
    for _ in range(ROUNDS):
        engine = _with_overheads(
            replace(setup, engine=engine), by_gamma, deepest, tp_size, budget
        )
    after = misses(engine)
    left = math.sqrt(sum(miss**2 for miss in after.values()) / len(after))
    error = max(left, REPETITION_ERROR)
    profile = engine.with_constants(
        {
            "errors.cost_place": cost_place(replace(setup, engine=engine)),
            "errors.cost_step_s": by_gamma[0].tpot_s,
            "errors.cost_error": error,
            "errors.relative_error": error,
            "name": name,
            "description": f"{setup.engine.name}, with the cost of speculation measured on its user's server",
            "fitted_device": setup.hardware.name,
            "fitted_devices": (setup.hardware.name,),
            "fitted_models": (setup.model.name,),
        }
    )
    return CostFit(
        profile=profile,
        before=tuple(math.expm1(before[run.gamma]) for run in runs),
        after=tuple(math.expm1(after[run.gamma]) for run in runs),
    )


def _with_kernels(
    setup: Setup, plain: CostRun, tp_size: float, budget: Any
) -> EngineProfile:
    """The engine with one factor on all its kernels, by bisection."""
    from scipy.optimize import brentq

    engine = setup.engine
    split = engine.kernels.split_attention_factor

    def scaled(log_factor: float) -> EngineProfile:
        factor = math.exp(log_factor)
        values = {each: engine.constant(each) * factor for each in FACTORS}
        if split is not None:
            values["kernels.split_attention_factor"] = split * factor
        return engine.with_constants(values)

    def miss(log_factor: float) -> float:
        at = replace(setup, engine=scaled(log_factor))
        return math.log(predicted_tpot_s(at, plain, tp_size, budget) / plain.tpot_s)

    low, high = -math.log(MOST), math.log(MOST)
    if miss(high) < 0.0:
        raise ConfigError(
            f"{plain.tpot_s / MILLI:.3g} ms between tokens without a draft is more than {MOST:g} times "
            "what these kernels take: is it the plan's model, device and load?"
        )
    if miss(low) > 0.0:
        # fixed costs alone take longer; what is left over is an error
        return scaled(low)
    return scaled(brentq(miss, low, high, xtol=1e-5))


def _with_overheads(
    setup: Setup,
    by_gamma: dict[int, CostRun],
    deepest: int,
    tp_size: float,
    budget: Any,
) -> EngineProfile:
    """The engine with the fixed costs of a speculative step and of a draft step."""
    overheads = setup.engine.overheads
    missing = {}
    for gamma, run in by_gamma.items():
        tpot_s = predicted_tpot_s(setup, run, tp_size, budget)
        missing[gamma] = (run.tpot_s - tpot_s) * run.tokens
    of_draft_s = 0.0
    shallowest = min(gamma for gamma in by_gamma if gamma)
    if deepest > shallowest:
        of_draft_s = (missing[deepest] - missing[shallowest]) / (deepest - shallowest)
    of_draft_s = max(of_draft_s, -overheads.draft_step_overhead_s)
    of_step_s = missing[deepest] - deepest * of_draft_s
    return setup.engine.with_constants(
        {
            "overheads.draft_step_overhead_s": overheads.draft_step_overhead_s
            + of_draft_s,
            "overheads.step_overhead_s": max(
                overheads.step_overhead_s + of_step_s, 0.0
            ),
        }
    )
