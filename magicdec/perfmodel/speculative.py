"""Speculative decoding against autoregressive decoding: acceptance joined to the time of a step.

    speedup = T_autoregressive · expected_tokens_per_step / T_step

The step's terms are composed in perfmodel/steps.py. Steady state: every sequence of the batch is busy, and emits
`expected_tokens_per_step` on average. Ignored: overlap of the draft with the verification, and the scheduler of a
server with continuous batching.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance_law import expected_tokens_per_step
from magicdec.perfmodel.cost import Array
from magicdec.perfmodel.memory import Memory
from magicdec.perfmodel.steps import Setup, StepTerms, draft_kv_tokens, memory_need, step_terms
from magicdec.specs.engine import EngineProfile
from magicdec.specs.hardware import HardwareProfile
from magicdec.specs.model import ModelSpec
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import MAX_GAMMA, SamplingSpec, SpeculationSpec


class AcceptanceLaw(Protocol):
    """P(position i accepted | all before accepted), by budget and context; perfmodel/acceptance.py has the laws."""

    def conditional_rates(self, *, budget: Any, context: Any, gamma_max: int) -> Array:
        """Rates of shape broadcast(budget, context) + (gamma_max,)."""
        ...


def tokens_per_step(rates: Array, gamma: Any) -> tuple[Array, Array]:
    """Expected tokens per step, 1 + Σ_i Π_{j ≤ i} rate_j, and the probability that all `gamma` drafts are accepted.

    `rates` has shape (..., gamma_max); `gamma`, integers up to gamma_max, broadcasts against its leading axes.
    """
    expected = expected_tokens_per_step(rates, gamma)
    gamma = np.asarray(gamma, dtype=np.int64)
    without_last = expected_tokens_per_step(rates, np.maximum(gamma - 1, 0))
    return expected, np.where(gamma > 0, expected - without_last, 1.0)


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """What a configuration does per step. Arrays broadcast to one shape; seconds, tokens, bytes per device."""

    setup: Setup = field(repr=False)
    terms: StepTerms = field(repr=False)
    memory: Memory = field(repr=False)
    batch_size: Array
    expected_tokens_per_step: Array

    @property
    def autoregressive_step_s(self) -> Array:
        return self.terms.autoregressive.total_s

    @property
    def draft_step_s(self) -> Array:
        """One draft step."""
        return self.terms.draft.total_s

    @property
    def verify_step_s(self) -> Array:
        return self.terms.verify.total_s

    @property
    def accept_step_s(self) -> Array:
        return self.terms.accept.total_s

    @property
    def upkeep_step_s(self) -> Array:
        return self.terms.upkeep.total_s

    @property
    def step_s(self) -> Array:
        """The whole speculative step."""
        return self.terms.step_s

    @property
    def tpot_s(self) -> Array:
        """Seconds per emitted token of one sequence."""
        tpot: Array = self.step_s / self.expected_tokens_per_step
        return tpot

    @property
    def tokens_per_s(self) -> Array:
        """Of the whole batch, in steady state."""
        rate: Array = self.batch_size / self.tpot_s
        return rate

    @property
    def speedup(self) -> Array:
        """Over autoregressive decoding at the same batch, in steady state."""
        ratio: Array = self.autoregressive_step_s / self.tpot_s
        return ratio


LIMITS = {
    "batch": (1.0, 1e7),
    "context": (0.0, 1e12),
    "tp": (1.0, 1e5),
    "gen-len": (-1e12, 1e12),
    "gamma": (0.0, float(MAX_GAMMA)),
    "draft budget": (0.0, 1e12),
}


def _check(name: str, value: Any) -> None:
    """Raises ConfigError unless every entry is a number within its limits (NaN is not)."""
    low, high = LIMITS[name]
    array = np.asarray(value, dtype=np.float64)
    inside = (array >= low) & (array <= high)
    if not np.all(inside):
        raise ConfigError(f"{name} must be between {low:g} and {high:g}, not {array[~inside].flat[0]:g}")


def _tokens(
    setup: Setup, acceptance: AcceptanceLaw | None, *, kv_len: Array, budget: Any, gamma: Any
) -> tuple[Array, Array]:
    """Expected tokens per step and the probability of full acceptance; 1 where nothing is drafted."""
    if not np.any(gamma > 0):
        return np.ones(()), np.ones(())
    if acceptance is None:
        spec = setup.speculation
        raise ConfigError(f"draft {spec.draft} ({spec.draft_method}) needs an acceptance rate or profile")
    read = draft_kv_tokens(setup, kv_len, budget)
    rates = acceptance.conditional_rates(budget=read, context=kv_len, gamma_max=int(gamma.max()))
    return tokens_per_step(rates, gamma)


def predict(
    model: ModelSpec,
    draft_model: ModelSpec | None,
    hw: HardwareProfile,
    engine: EngineProfile,
    speculation: SpeculationSpec,
    *,
    batch: Any,
    context: Any,
    tp_size: Any = 1,
    acceptance: AcceptanceLaw | None = None,
    sampling: SamplingSpec | None = None,
    precision: Precision | None = None,
    draft_precision: Precision | None = None,
    gen_len: Any = 0,
    gamma: Any = None,
    draft_budget: Any = None,
    max_len: Any = None,
) -> StepPrediction:
    """One configuration, or arrays of them that broadcast together.

    `context` is the prompt's length; with `gen_len` the step is the mean one, at context + gen_len / 2, and memory
    holds context + gen_len tokens per sequence, unless `max_len` says otherwise. `gamma` and `draft_budget` default
    to the speculation's.

    Raises:
        ConfigError: a draft of another vocabulary, no acceptance where something is drafted, or a number out of range.
    """
    gamma = speculation.gamma if gamma is None else gamma
    budget = speculation.draft_budget if draft_budget is None else draft_budget
    given = {"batch": batch, "context": context, "tp": tp_size, "gen-len": gen_len, "gamma": gamma}
    for name, value in (given | ({} if budget is None else {"draft budget": budget})).items():
        _check(name, value)
    setup = Setup(
        model=model, hardware=hw, engine=engine, speculation=speculation, draft_model=draft_model,
        sampling=sampling or SamplingSpec(temperature=1.0), precision=precision or Precision(),
        draft_precision=draft_precision,
    )  # fmt: skip
    gamma = np.asarray(gamma, dtype=np.int64)
    if setup.kind == "none":
        gamma = np.zeros_like(gamma)
    context = np.asarray(context, dtype=np.float64)
    kv_len = context + np.asarray(gen_len, dtype=np.float64) / 2.0
    expected, everything = _tokens(setup, acceptance, kv_len=kv_len, budget=budget, gamma=gamma)
    terms = step_terms(
        setup, batch=batch, kv_len=kv_len, draft_kv_len=draft_kv_tokens(setup, kv_len, budget), gamma=gamma,
        tp_size=tp_size, full_acceptance=everything,
    )  # fmt: skip
    need = memory_need(
        setup,
        batch=batch,
        max_len=context + np.asarray(gen_len, dtype=np.float64) if max_len is None else max_len,
        budget=budget,
        gamma=gamma,
        tp_size=tp_size,
    )
    return StepPrediction(
        setup=setup,
        terms=terms,
        memory=need,
        batch_size=np.asarray(batch, dtype=np.float64),
        expected_tokens_per_step=expected,
    )


Z_90 = 1.6448536269514722
"""A normal variable lies within ± this many standard deviations with probability 0.9."""


OTHER_DEVICE_ERROR = 0.2
"""Least relative error of an engine's fixed costs on a device that it was not fitted on: hosts and clocks differ."""


def is_engine_fitted_on(hw: HardwareProfile, engine: EngineProfile) -> bool:
    """Whether the engine's fixed costs were measured with this device (or are said to hold for any)."""
    return engine.fitted_device in ("", hw.name)


def relative_errors(hw: HardwareProfile, engine: EngineProfile) -> dict[str, float]:
    """One standard deviation of each kind of term, relative: the curves' own, and the engine's for fixed costs."""
    return {
        "gemm": hw.gemm_curve().fit.relative_error,
        "attention": hw.attention_curve().fit.relative_error,
        "elementwise": hw.elementwise_curve().fit.relative_error,
        "link": hw.allreduce_curve().fit.relative_error,
        "overhead": engine.relative_error
        if is_engine_fitted_on(hw, engine)
        else max(engine.relative_error, OTHER_DEVICE_ERROR),
    }


@dataclass(frozen=True, kw_only=True)
class Interval:
    """90 % intervals."""

    speedup_low: Array
    speedup_high: Array
    tpot_low_s: Array
    tpot_high_s: Array


def interval(prediction: StepPrediction, tokens_relative_error: Any = 0.0) -> Interval:
    """Intervals from the errors of the calibration and of acceptance, taken as independent and log-normal.

    An error of a kind of term moves the autoregressive step and the speculative one together, so that the speedup feels
    only the difference of that term's shares:
    σ² = Σ_g (σ_g · (share_AR,g − share_SD,g))² + σ_machine² + σ_engine² + σ_tokens².

    σ_machine: the speeds of a calibrated machine's memory and processor move by themselves, the one moves all attention
    and the other all else. They are taken to move against each other, where the speedup feels both most (and with each
    other for the time of a token): σ_machine = (σ_memory + σ_processor) · |share_AR,attention − share_SD,attention|.
    """
    setup, terms = prediction.setup, prediction.terms
    errors = relative_errors(setup.hardware, setup.engine)
    alone = terms.autoregressive.group_seconds()
    step = terms.step_seconds("group")
    difference: Array = np.asarray(0.0)
    own: Array = np.asarray(0.0)
    for group, error in errors.items():
        share = step[group] / prediction.step_s
        alone_share = alone[group] / prediction.autoregressive_step_s  # type: ignore[index]  # the keys are the groups
        difference = difference + (error * (alone_share - share)) ** 2
        own = own + (error * share) ** 2
    of_memory, of_processor = setup.hardware.memory_spread, setup.hardware.compute_spread
    attention, attention_alone = (
        step["attention"] / prediction.step_s,
        alone["attention"] / prediction.autoregressive_step_s,
    )
    difference = difference + ((of_memory + of_processor) * (attention_alone - attention)) ** 2
    own = own + (of_memory * attention + of_processor * (1.0 - attention)) ** 2
    tokens = np.asarray(tokens_relative_error, dtype=np.float64) ** 2
    drafts = terms.gamma > 0
    of_speedup = np.where(drafts, np.sqrt(difference + tokens + setup.engine.speedup_relative_error**2), 0.0)
    of_tpot = np.sqrt(own + np.where(drafts, tokens, 0.0) + setup.engine.relative_error**2)
    return Interval(
        speedup_low=prediction.speedup * np.exp(-Z_90 * of_speedup),
        speedup_high=prediction.speedup * np.exp(Z_90 * of_speedup),
        tpot_low_s=prediction.tpot_s * np.exp(-Z_90 * of_tpot),
        tpot_high_s=prediction.tpot_s * np.exp(Z_90 * of_tpot),
    )
