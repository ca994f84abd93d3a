"""Which input moves the best speedup most, and what to measure next to narrow its interval.

elasticity   d ln S / d ln x, by a central difference of ± 10 %: 0.5 means 10 % more of x gives 5 % more speedup
swing        half the change of ln S when x moves by ± its own stated standard deviation: what x's uncertainty costs

The configuration (draft, budget, gamma, batch, context) is the plan's best drafted one and stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import msgspec
import numpy as np

from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.intervals import relative_errors
from magicdec.perfmodel.plan.planner import answered
from magicdec.perfmodel.plan.request import PlanRequest
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.speedup import predict
from magicdec.plan_document import Candidate
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.model import ModelSpec

SCHEMA_VERSION = 1
STEP = 0.1
State = tuple[Setup, AcceptanceProfile]
ENGINE_INPUTS = {
    "gemm_factor": ("time of linear layers", "gemm"),
    "attention_factor": ("time of attention", "attention"),
    "draft_attention_factor": ("time of the draft's attention", "attention"),
    "verify_attention_factor": ("time of the verification's attention", "attention"),
    "elementwise_factor": ("time of elementwise kernels", "elementwise"),
    "collective_factor": ("time of collectives", "link"),
    "forward_overhead_s": ("overhead per forward pass", "overhead"),
    "layer_overhead_s": ("overhead per layer", "overhead"),
    "draft_step_overhead_s": ("overhead per draft step", "overhead"),
    "verify_overhead_s": ("overhead per verification", "overhead"),
    "step_overhead_s": ("overhead per speculative step", "overhead"),
}
"""Fields of the engine profile: what each is, and whose relative error it carries."""
LAW_INPUTS = {
    "rejection": "rejection rate at position 1",
    "drift": "drift of acceptance by position",
    "concentration": "concentration of acceptance",
    "budget_exponent": "exponent of the budget",
    "context_exponent": "exponent of the context",
}
CALIBRATE = "time its kernels on the device (magicdec calibrate)"
PROFILE = "count acceptance on your prompts (magicdec profile-acceptance)"


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """One input's effect. `sigma` (relative) and `swing` are None where no uncertainty is stated."""

    name: str
    elasticity: float
    sigma: float | None
    swing: float | None
    measure: str


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """The best drafted configuration, and the inputs: those whose uncertainty costs most first."""

    schema_version: int = SCHEMA_VERSION
    kind: str = "sensitivity"
    configuration: Candidate
    speedup: float
    inputs: tuple[Input, ...]

    @property
    def measure_next(self) -> str:
        stated = [each for each in self.inputs if each.swing]
        return f"{stated[0].name}: {stated[0].measure}" if stated else ""

    def to_document(self) -> dict[str, Any]:
        """Plain data."""
        return {**msgspec.to_builtins(self), "measure_next": self.measure_next}


def sensitivity(request: PlanRequest) -> Sensitivity:
    """Vary each input of the best drafted configuration.

    Raises ConfigError where no draft can be predicted, and what `plan` raises.
    """
    if request.workload is not None:
        raise ConfigError("sensitivity takes a context, not a workload")
    model = request.model if isinstance(request.model, ModelSpec) else load_model_spec(request.model)
    first = answered(request, model, [])[0][0]
    if not first.drafted:
        raise ConfigError("no draft of this request has an acceptance: give --acceptance-rate or --acceptance")
    best = first.drafted[0]
    origin = next(each for each in first.found if best in each.rows)
    row = origin.prediction.take([origin.rows.index(best)])
    assert origin.option is not None
    assert origin.option.acceptance is not None  # the row was predicted with it
    state, points = (row.setup, origin.option.acceptance), row.points

    def log_speedup(change: Callable[[State, float], State], factor: float) -> float:
        setup, acceptance = change(state, factor)
        return math.log(float(np.ravel(predict(setup, acceptance, points).speedup)[0]))

    found = []
    for name, change, sigma, measure in _inputs(state):
        slope = log_speedup(change, 1.0 + STEP) - log_speedup(change, 1.0 - STEP)
        swing = None
        if sigma is not None:
            swing = abs(log_speedup(change, math.exp(sigma)) - log_speedup(change, math.exp(-sigma))) / 2.0
        elasticity = slope / (math.log(1.0 + STEP) - math.log(1.0 - STEP))
        found.append(Input(name=name, elasticity=elasticity, sigma=sigma, swing=swing, measure=measure))
    found.sort(key=lambda each: (each.swing or 0.0, abs(each.elasticity)), reverse=True)
    speedup = math.exp(log_speedup(lambda unchanged, _: unchanged, 1.0))
    return Sensitivity(configuration=best, speedup=speedup, inputs=tuple(found))


def _inputs(state: State) -> list[tuple[str, Callable[[State, float], State], float | None, str]]:
    """Name, how it is scaled, its relative standard deviation, and how to measure it; inputs at 0 are left out."""
    setup, acceptance = state
    errors = relative_errors(setup.hardware, setup.engine, setup.model, setup.precision)
    inputs: list[tuple[str, Callable[[State, float], State], float | None, str]] = [
        ("memory bandwidth", _scaler("hardware", "memory_bytes_per_s"), None, CALIBRATE),
        ("compute rate", _scaler("hardware", "flops_per_s"), None, CALIBRATE),
    ]
    for field, (name, group) in ENGINE_INPUTS.items():
        if getattr(setup.engine, field):
            inputs.append((name, _scaler("engine", field), errors[group], CALIBRATE))
    for field, name in LAW_INPUTS.items():
        value = getattr(acceptance.law, field)
        if value:
            inputs.append((name, _scaler("law", field), _law_sigma(acceptance, field, value), PROFILE))
    return inputs


def _law_sigma(acceptance: AcceptanceProfile, field: str, value: float) -> float | None:
    error = acceptance.error
    if field == "rejection":
        return error.log_rejection or None
    deviation = getattr(error, field, 0.0)
    return float(deviation / abs(value)) if deviation else None


def _scaler(part: Literal["hardware", "engine", "law"], field: str) -> Callable[[State, float], State]:
    """Multiplies one field by a factor, or each entry of a table of them."""

    def scale(state: State, factor: float) -> State:
        setup, acceptance = state
        struct: Any = acceptance.law if part == "law" else getattr(setup, part)
        value = getattr(struct, field)
        scaled = {key: each * factor for key, each in value.items()} if isinstance(value, dict) else value * factor
        changed = msgspec.structs.replace(struct, **{field: scaled})
        if part == "law":
            return setup, msgspec.structs.replace(acceptance, law=changed)
        return replace(setup, **{part: changed}), acceptance

    return scale
