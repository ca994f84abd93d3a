"""Which input moves the best speedup most, and what to measure next to narrow its interval.

elasticity   d ln S / d ln x, by a central difference of ± 10 %: 0.5 means 10 % more of x gives 5 % more speedup
swing        half the change of ln S when x moves by ± its own stated standard deviation: what x's uncertainty costs

The configuration (draft, budget, gamma, batch, context) is the plan's best drafted one and stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
import numpy as np

from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.intervals import relative_errors
from magicdec.perfmodel.plan.device import engine_of, resolve
from magicdec.perfmodel.plan.drafts import draft_options
from magicdec.perfmodel.plan.planner import PlanRequest, plan
from magicdec.perfmodel.prediction import predict
from magicdec.perfmodel.setup import Points, Setup
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


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input's effect. `sigma` (relative) and `swing` are None where no uncertainty is stated."""

    name: str
    elasticity: float
    sigma: float | None
    swing: float | None
    measure: str


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The best drafted configuration, and the inputs: those whose uncertainty costs most first."""

    configuration: Candidate
    speedup: float
    inputs: tuple[Input, ...]

    @property
    def measure_next(self) -> str:
        stated = [each for each in self.inputs if each.swing]
        return f"{stated[0].name}: {stated[0].measure}" if stated else ""

    def to_document(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "sensitivity",
            "configuration": msgspec.structs.asdict(self.configuration),
            "speedup": self.speedup,
            "inputs": [asdict(each) for each in self.inputs],
            "measure_next": self.measure_next,
        }


def sensitivity(request: PlanRequest) -> Sensitivity:
    """Raises ConfigError where no draft can be predicted, and what `plan` raises."""
    document = plan(request)
    if not document.candidates:
        raise ConfigError("no draft of this request has an acceptance: give --acceptance-rate or --acceptance")
    best = document.candidates[0]
    state, points = _state(request, best)

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


def _state(request: PlanRequest, best: Candidate) -> tuple[State, Points]:
    """What the best row was predicted from, and its point."""
    if request.workload is not None:
        raise ConfigError("sensitivity takes a context, not a workload")
    model = request.model if isinstance(request.model, ModelSpec) else load_model_spec(request.model)
    context, budget = int(best.context_len), best.draft_budget
    hardware = next(h for h in request.hardware if best.hardware in (h, getattr(h, "name", None)))
    asked = msgspec.structs.replace(
        request, draft=best.draft, draft_method=best.draft_method, draft_budgets=(budget,) if budget else ()
    )
    options, _ = draft_options(model, asked, engine=engine_of(request, hardware), context=context)
    device = next(
        each
        for each in resolve(request, model, hardware, options)
        if best.tp_size in each.tp_sizes and (each.spread.pp, each.spread.dp) == (best.pp_size, best.dp_size)
    )
    acceptance = options[0].acceptance
    assert acceptance is not None  # the row was predicted with it
    points = Points(
        batch=np.asarray([float(best.batch_size)]),
        context=np.asarray([float(context)]),
        tp=np.asarray([float(best.tp_size)]),
        budget=np.asarray([float(budget or 0)]),
        gamma=np.asarray([best.gamma], dtype=np.int64),
        gen_len=float(request.gen_len),
    )
    return (device.setup(options[0]), acceptance), points


def _inputs(state: State) -> list[tuple[str, Callable[[State, float], State], float | None, str]]:
    """Name, how it is scaled, its relative standard deviation, and how to measure it; inputs at 0 are left out."""
    setup, acceptance = state
    errors = relative_errors(setup.hardware, setup.engine, setup.model, setup.precision)
    inputs: list[tuple[str, Callable[[State, float], State], float | None, str]] = [
        ("memory bandwidth", _scale_bandwidth, None, CALIBRATE),
        ("compute rate", _scale_compute, None, CALIBRATE),
    ]
    for field, (name, group) in ENGINE_INPUTS.items():
        if getattr(setup.engine, field):
            inputs.append((name, _engine_scaler(field), errors[group], CALIBRATE))
    for field, name in LAW_INPUTS.items():
        value = getattr(acceptance.law, field)
        if value:
            inputs.append((name, _law_scaler(field), _law_sigma(acceptance, field, value), PROFILE))
    return inputs


def _law_sigma(acceptance: AcceptanceProfile, field: str, value: float) -> float | None:
    error = acceptance.error
    if field == "rejection":
        return error.log_rejection or None
    deviation = getattr(error, field, 0.0)
    return float(deviation / abs(value)) if deviation else None


def _scale_bandwidth(state: State, factor: float) -> State:
    hw = state[0].hardware
    changed = msgspec.structs.replace(hw, memory_bytes_per_s=hw.memory_bytes_per_s * factor)
    return replace(state[0], hardware=changed), state[1]


def _scale_compute(state: State, factor: float) -> State:
    hw = state[0].hardware
    rates = {name: rate * factor for name, rate in hw.flops_per_s.items()}
    return replace(state[0], hardware=msgspec.structs.replace(hw, flops_per_s=rates)), state[1]


def _engine_scaler(field: str) -> Callable[[State, float], State]:
    def scale(state: State, factor: float) -> State:
        engine = state[0].engine
        changed = msgspec.structs.replace(engine, **{field: getattr(engine, field) * factor})
        return replace(state[0], engine=changed), state[1]

    return scale


def _law_scaler(field: str) -> Callable[[State, float], State]:
    def scale(state: State, factor: float) -> State:
        law = state[1].law
        changed = msgspec.structs.replace(law, **{field: getattr(law, field) * factor})
        return state[0], msgspec.structs.replace(state[1], law=changed)

    return scale
