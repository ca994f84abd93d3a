"""How sure a prediction is: the errors of calibration, engine and acceptance, and the intervals
from them.

    σ² = Σ_g (σ_g · (share_AR,g − share_SD,g))² + σ_machine² + σ_engine²

The errors are taken as independent. Those of times are log-normal: 90 % of a time lies in time ·
exp(± Z_90 · σ). Tokens per step stay between 1 and gamma + 1: what is accepted of gamma drafts
moves on the logit (acceptance/uncertain.py). The end of a speedup's interval is as far as both together move it:
log(end / speedup)² = (Z_90 · σ)² + log(tokens at ± Z_90 / tokens)².
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import numpy as np

from magicdec.counts import Z_90, Array
from magicdec.naming import METHODS
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.acceptance.uncertain import tokens_at
from magicdec.perfmodel.drafting import draft_of
from magicdec.perfmodel.forward import mixer_curves
from magicdec.perfmodel.kernels.attention import AttentionCurve
from magicdec.perfmodel.kernels.base import Curve
from magicdec.perfmodel.kernels.experts import MoeCurve, experts_curve
from magicdec.perfmodel.kernels.gemm import ElementwiseCurve, GemmCurve, matrix_dtype
from magicdec.perfmodel.kernels.latents import IndexerCurve
from magicdec.perfmodel.kernels.links import AllReduceCurve
from magicdec.perfmodel.kernels.op import Where
from magicdec.perfmodel.kernels.profile import HardwareProfile
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.speedup import Prediction
from magicdec.perfmodel.step import StepTerms
from magicdec.specs.engine import EngineProfile
from magicdec.specs.model import ModelSpec
from magicdec.specs.precision import BF16, Precision

OTHER_DEVICE_ERROR = 0.2
"""Least relative error of an engine's fixed costs on a device that it was not fitted on: hosts and
clocks differ.
"""
UNMEASURED_ERROR = 0.3
"""Relative error of kernels that no table holds: lightning attention's, Mamba-2's recurrence,
sparse attention over a narrow cache."""
INDEXER_ERROR = 0.25
"""Relative error of layers with an indexer: the distance of their growth with the context, timed in
two engines, from the curves of their kernels (results/LOG.md)."""
ACROSS_NODES_ERROR = 0.5
"""Relative error of collectives over several nodes, and of sends between stages, of which nothing
was measured.
"""
EXCHANGE_ERROR = 0.15
"""Least relative error of sending tokens to their experts: of the fits, with each number of ranks
left out in turn.
"""
EXPERTS_ERROR = 0.15
"""Relative error of matrix products where whole experts are divided over ranks: how unevenly they
are chosen.
"""
MACHINE = "machine"
"""Error of a calibrated machine's speeds, which drift between repetitions."""
NUM_QUANTILES = 48
QUANTILES = [NormalDist().inv_cdf((place + 0.5) / NUM_QUANTILES) for place in range(NUM_QUANTILES)]
"""Standard deviations of equally likely acceptances."""
LEAST_DEVIATION = 1e-6
PARTS: tuple[Literal["mixer", "mlp", "experts"], ...] = ("mixer", "mlp", "experts")
OTHER_HEAD_ERROR = 0.12
"""Acceptance rates of two heads of one model, and of one on two tasks, differ by about this much:
1.25 and 2.0 tokens per step of gpt-oss-120b at 9k tokens and gamma 3, 2.3 and 1.4 of Qwen3-8B at
gamma 2, 2.5 to 4.1 of one head of Llama-3.1-8B at gamma 5."""


def is_engine_fitted_on(hw: HardwareProfile, engine: EngineProfile) -> bool:
    """Whether the engine's fixed costs were measured with this device (or are said to hold for
    any).
    """
    return engine.fitted_device in ("", hw.name)


class Kernel(NamedTuple):
    """A kernel that a pass runs, as the curves know it."""

    name: str
    curve: type[Curve] | None
    variant: str = ""

    def error(self, hw: HardwareProfile) -> float:
        """One relative standard deviation of its time."""
        if self.curve is None:
            known = None
        else:
            known = self.curve.error_on(hw, self.variant)
        if known is None:
            error = UNMEASURED_ERROR
        else:
            error = known
        if self.curve is IndexerCurve:
            return max(error, INDEXER_ERROR)
        return error

    def is_timed_on(self, hw: HardwareProfile) -> bool:
        return self.curve is not None and self.curve.is_timed_on(hw, self.variant)


def _products(at: Where) -> Kernel:
    """Matrix products in a format; of narrow weights that are widened on the way, no kernel was
    timed.
    """
    own = at.precision.weight_dtype
    if at.precision.weight_bytes >= 2.0:
        return Kernel("products in 16 bits", GemmCurve)
    return Kernel(
        f"{own} products", GemmCurve, own if matrix_dtype(*at) == own else f"{own}, widened"
    )


def _experts(at: Where) -> Kernel:
    """Routed experts; kernels of another format's curve are alike."""
    name = f"{at.precision.weight_dtype} experts"
    curve = experts_curve(at)
    if curve is None:
        return _products(at)._replace(name=name)
    return Kernel(
        name, MoeCurve, next(key for key, each in MoeCurve.variants(at.hw).items() if each is curve)
    )


def kernels_of(at: Where, model: ModelSpec) -> dict[str, list[Kernel]]:
    """The kernels of a model's layers, by kind of term."""
    mixer, mlp, experts = (
        at._replace(precision=model.part_precision(part, at.precision)) for part in PARTS
    )
    if at.precision.kv_bytes < 2.0:
        cache = at.precision.kv_dtype
    else:
        cache = ""
    if cache:
        over = f" over a {cache} cache"
    else:
        over = ""
    mixed = [(each.label, curve) for each, _ in model.mixers for curve in mixer_curves(each)]
    return {
        "gemm": [_products(mixer), _products(mlp)],
        "experts": [_experts(experts)] if model.most_experts else [],
        "attention": [Kernel(f"attention ({label}){over}", curve, cache) for label, curve in mixed],
    }


def relative_errors(
    hw: HardwareProfile,
    engine: EngineProfile,
    model: ModelSpec | None = None,
    precision: Precision = BF16,
) -> dict[str, float]:
    """One standard deviation of each kind of term, relative: the curves' own, and the engine's for
    fixed costs; where layers differ, that of the least sure. Without a `model`, of one in 16 bits
    whose layers are all attention."""
    plain = {
        "gemm": [Kernel("", GemmCurve)],
        "experts": [],
        "attention": [Kernel("", AttentionCurve)],
    }
    if model is None:
        kernels = plain
    else:
        kernels = kernels_of(Where(hw, engine, precision), model)
    errors = {}
    for group, found in kernels.items():
        errors[group] = max((each.error(hw) for each in found), default=0.0)
    fixed = engine.relative_error
    return {
        "gemm": errors["gemm"],
        "experts": errors["experts"] or errors["gemm"],
        "attention": errors["attention"] or AttentionCurve.of(hw).fit.relative_error,
        "elementwise": ElementwiseCurve.of(hw).fit.relative_error,
        "link": AllReduceCurve.of(hw).fit.relative_error,
        "overhead": fixed if is_engine_fitted_on(hw, engine) else max(fixed, OTHER_DEVICE_ERROR),
    }


def untimed(setup: Setup) -> list[str]:
    """The kernels of a setup that nobody timed on its device, which another format's or device's
    curve stands for.
    """
    found = (each for kernels in kernels_of(setup.at, setup.model).values() for each in kernels)
    return list(dict.fromkeys(each.name for each in found if not each.is_timed_on(setup.hardware)))


@dataclass(frozen=True, kw_only=True)
class Interval:
    """90 % intervals."""

    speedup_low: Array
    speedup_high: Array
    tpot_low_s: Array
    tpot_high_s: Array


def step_errors(setup: Setup, terms: StepTerms, tp_size: Any) -> tuple[Array, Array]:
    """One relative standard deviation of a speedup and of a step's time, tokens per step apart: for
    the intervals of plans, and for those that measured servers are compared with.

    An engine fitted to servers states the error of whole measured times, with the kernels' errors
    inside: the larger of both holds for a time. Any other engine's is what the kernels' errors
    leave unexplained, and adds to them.
    """
    engine, hw = setup.engine, setup.hardware
    alone, step = group_shares(terms)
    launches = engine.draft_model_layer_error * uncaptured_share(terms)
    variance = ratio_variance(setup, alone, step, tp_size) + launches**2
    of_speedup = np.sqrt(variance + engine_error(setup) ** 2)
    own: Array = (
        hw.memory_spread * step["attention"] + hw.compute_spread * (1.0 - step["attention"])
    ) ** 2
    for group, error in _group_errors(setup, tp_size).items():
        own = own + (error * step[group]) ** 2
    measured = engine.error_for(hw.name, setup.model.name)
    if engine.fitted_devices:
        of_time = np.maximum(np.sqrt(own), measured)
    else:
        of_time = np.sqrt(own + measured**2)
    return of_speedup, of_time


def group_shares(terms: StepTerms) -> tuple[dict[str, Array], dict[str, Array]]:
    """The share of each kind of term in an autoregressive and in a speculative step."""
    alone_s = terms.autoregressive.total_s
    alone = terms.autoregressive.group_seconds()
    drafted = terms.step_seconds("group")
    return (
        {str(group): value / alone_s for group, value in alone.items()},
        {group: value / terms.step_s for group, value in drafted.items()},
    )


def uncaptured_share(terms: StepTerms) -> Array:
    """Share of a speculative step that launches of the draft's layers outside graphs take."""
    launches: Array = np.asarray(0.0)
    for op in terms.draft.ops:
        if op.name == "draft launches":
            launches = launches + op.time_s
    return terms.gamma * launches / terms.step_s


def log_shifts(setup: Setup, shares: Mapping[str, Any], tp_size: Any) -> dict[str, Array]:
    """The logarithm of a step's time that one standard deviation of each error adds, from the share
    of each kind of term in the step.

    The speeds of a calibrated machine's memory (all attention) and processor (everything else) are
    assumed to drift in opposite directions, which affects a speedup most.
    """
    hw = setup.hardware
    attention = np.asarray(shares["attention"])
    shifts = {
        group: np.asarray(error * shares[group])
        for group, error in _group_errors(setup, tp_size).items()
    }
    shifts[MACHINE] = hw.memory_spread * attention - hw.compute_spread * (1.0 - attention)
    return shifts


def ratio_variance(
    setup: Setup, shares: Mapping[str, Any], over: Mapping[str, Any], tp_size: Any
) -> Array:
    """Variance of the logarithm of one step's time over another's, from the share of each kind of
    term in both: an error moves both steps together, so only the difference counts."""
    one = log_shifts(setup, shares, tp_size)
    other = log_shifts(setup, over, tp_size)
    variance: Array = np.zeros(())
    for source, shift in one.items():
        variance = variance + (shift - other[source]) ** 2
    return variance


def _group_errors(setup: Setup, tp_size: Any) -> dict[str, Any]:
    """Relative error of each kind of term as this setup runs it: sends by how far they go, whole
    experts by how unevenly they are chosen."""
    errors: dict[str, Any] = relative_errors(
        setup.hardware, setup.engine, setup.model, setup.precision
    )
    errors["link"] = _link_error(setup, tp_size, errors["link"])
    if setup.spread.whole_experts:
        of_experts = setup.model.part_precision("experts", setup.precision)
        is_fused = experts_curve(Where(setup.hardware, setup.engine, of_experts)) is not None
        if is_fused:
            group = "experts"
        else:
            group = "gemm"
        errors[group] = np.hypot(errors[group], EXPERTS_ERROR)
    return errors


def interval(prediction: Prediction, tokens_relative_error: Any = 0.0) -> Interval:
    """The 90 % intervals of a prediction, its tokens per step being uncertain by
    `tokens_relative_error`.
    """
    gamma = prediction.terms.gamma
    drafts = gamma > 0
    expected = prediction.expected_tokens_per_step
    middle = prediction.middle_tokens_per_step
    fewer, more = (
        np.log(tokens_at(sigmas, middle, gamma, tokens_relative_error) / expected)
        for sigmas in (-Z_90, Z_90)
    )
    of_speedup, of_time = step_errors(prediction.setup, prediction.terms, prediction.points.tp)
    of_speedup = np.where(drafts, Z_90 * of_speedup, 0.0)
    of_tpot = Z_90 * of_time
    return Interval(
        speedup_low=prediction.speedup * np.exp(-np.hypot(of_speedup, fewer)),
        speedup_high=prediction.speedup * np.exp(np.hypot(of_speedup, more)),
        tpot_low_s=prediction.tpot_s * np.exp(-np.hypot(of_tpot, more)),
        tpot_high_s=prediction.tpot_s * np.exp(np.hypot(of_tpot, fewer)),
    )


def chance_above(prediction: Prediction, tokens_relative_error: Any, least: Any = 1.0) -> Array:
    """The probability that the speedup of decoding is above `least`, over all errors together."""
    gamma = prediction.terms.gamma
    middle = prediction.middle_tokens_per_step
    deviation, _ = step_errors(prediction.setup, prediction.terms, prediction.points.tp)
    per_token = prediction.speedup / prediction.expected_tokens_per_step / least
    total: Array = np.zeros(())
    for sigmas in QUANTILES:
        tokens = tokens_at(sigmas, middle, gamma, tokens_relative_error)
        above = np.log(np.maximum(per_token * tokens, 1e-300)) / np.maximum(
            deviation, LEAST_DEVIATION
        )
        total = total + normal_cdf(above)
    return total / NUM_QUANTILES


def normal_cdf(sigmas: Array) -> Array:
    """The probability of a normal variable below this many standard deviations, within 0.0003:
    SciPy's takes longer to import than most plans take.
    """
    root = np.sqrt(2.0 / np.pi) * (sigmas + 0.044715 * sigmas**3)
    return np.asarray(0.5 * (1.0 + np.tanh(root)))


def engine_error(setup: Setup) -> float:
    """One standard deviation of a speedup that the engine's constants leave, by what they were
    fitted on.
    """
    precision = setup.precision
    return setup.engine.speedup_error_for(
        setup.hardware.name, precision.weight_dtype, precision.kv_dtype
    )


def _link_error(setup: Setup, tp_size: Any, near: float) -> Any:
    """Relative error of what is sent between devices, by how far it goes."""
    if setup.hardware.kind != "gpu":
        return near
    if setup.spread.dp > 1:
        near = max(near, EXCHANGE_ERROR)
    estimated = (np.asarray(tp_size) > setup.hardware.link.reach) | (setup.spread.pp > 1)
    if np.any(estimated):
        return np.where(estimated, max(near, ACROSS_NODES_ERROR), near)
    return near


def tokens_error(prediction: Prediction, acceptance: AcceptanceProfile | None) -> Array:
    """One relative standard deviation of the tokens per step: the profile's own, and from which
    sequences a batch happens to hold, whose own rates differ by the profile's `spread`."""
    points = prediction.points
    if acceptance is None or not np.any(points.gamma > 0):
        return np.zeros(())
    kv_len = points.context + points.gen_len / 2.0
    draft = draft_of(prediction.setup)
    read = draft.tokens_read(kv_len, points.budget)
    seen = draft.context_seen(kv_len, points.budget)
    own_rates = acceptance.spread / np.sqrt(points.batch)
    if is_one_head_of_many(acceptance):
        of_head = OTHER_HEAD_ERROR
    else:
        of_head = 0.0
    return acceptance.tokens_error(
        budget=read, context=seen, gamma=points.gamma, shifts=(own_rates, of_head)
    )


def is_one_head_of_many(acceptance: AcceptanceProfile) -> bool:
    """Whether a profile is a published one of a head that anybody can train anew: the one that will
    be served may be another. Prediction heads come with the model."""
    method = METHODS.get(acceptance.draft_method)
    is_published = not acceptance.measured and not acceptance.is_assumed
    return method is not None and method.is_trained_apart and is_published
