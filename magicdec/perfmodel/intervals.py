"""How sure a prediction is: the errors of calibration, engine and acceptance, and the intervals
from them.

    σ² = Σ_g (σ_g · (share_AR,g − share_SD,g))² + σ_machine² + σ_engine² + σ_blocks²

The errors are taken as independent. Those of times are log-normal: 90 % of a time lies in time ·
exp(± Z_90 · σ). Tokens per step stay between 1 and gamma + 1: what is accepted of gamma drafts
moves on the logit (acceptance/law.py, `tokens_at`). Both together make one distribution of a
speedup (`Gains`), from which every statement about it follows: its median, which is the predicted
speedup that configurations are ranked by, the ends of its interval, and the probability that it is
above 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from statistics import NormalDist
from typing import Any

import msgspec
import numpy as np

from magicdec.counts import Z_90, Array
from magicdec.naming import METHODS
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.acceptance.law import tokens_at
from magicdec.perfmodel.acceptance.profile import BeliefByText
from magicdec.perfmodel.drafting import draft_of
from magicdec.perfmodel.forward import Pass, forward_pass
from magicdec.perfmodel.kernels.gemm import GemmCurve
from magicdec.perfmodel.kernels.op import GROUPS, ForwardTime
from magicdec.perfmodel.kernels.profile import HardwareProfile
from magicdec.perfmodel.lanes import evidence_of
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.speedup import Prediction
from magicdec.perfmodel.step import StepTerms
from magicdec.perfmodel.trees import tree_error
from magicdec.specs.engine import EngineProfile
from magicdec.specs.speculation import SPARSE_METHODS, draft_kind
from magicdec.units import INTERVAL_ENDS

OTHER_DEVICE_ERROR = 0.2
"""Least relative error of an engine's fixed costs on a device that it was not fitted on: hosts and
clocks differ.
"""
ACROSS_NODES_ERROR = 0.5
"""Relative error of collectives over several nodes and of sends between stages; none was measured.
"""
EXPERTS_ERROR = 0.15
"""Relative error of matrix products where whole experts are divided over ranks: how unevenly they
are chosen.
"""
DATASHEET_ERROR = 0.07
"""Error of a speedup on a device that is known by its ceilings alone, besides its engine's: 261 pairs
of nine devices, whose curves were taken away, are off by 3 to 20 % by source, and nine tenths of them
lie inside."""
MACHINE = "machine"
"""Error of a calibrated machine's speeds, which drift between repetitions."""
NUM_ACCEPTANCES = 48
ACCEPTANCES = np.array(
    [
        NormalDist().inv_cdf((place + 0.5) / NUM_ACCEPTANCES)
        for place in range(NUM_ACCEPTANCES)
    ]
)
"""Standard deviations of equally likely acceptances."""
LEAST_DEVIATION = 1e-6
FARTHEST = 4.0
"""Standard deviations from the outermost acceptances between which quantiles are looked for."""
NUM_HALVINGS = 9
"""Halvings before a quantile is interpolated."""
UNRUN_LAYER_S = 0.5e-3
"""Time that a layer of a sparse self-draft may take beyond its kernels in an engine whose releases
do not run it: the launches of a layer outside captured graphs (`draft_model_layer_s` of vLLM before
0.24)."""
OTHER_HEAD_ERROR = 0.12
"""Acceptance rates of two heads of one model, and of one on two tasks, differ by about this much:
1.25 and 2.0 tokens per step of gpt-oss-120b at 9k tokens and gamma 3, 2.3 and 1.4 of Qwen3-8B at
gamma 2, 2.5 to 4.1 of one head of Llama-3.1-8B at gamma 5."""


def is_engine_fitted_on(hw: HardwareProfile, engine: EngineProfile) -> bool:
    """Whether the engine's fixed costs were measured with this device (or are said to hold for
    any).
    """
    return engine.fitted_device in ("", hw.name)


def one_token_pass(setup: Setup) -> ForwardTime:
    """A pass over one token of one sequence, which runs the kernels of every pass of a setup."""
    one = Pass(at=setup.at, batch=1.0, query_len=1.0, kv_len=1.0, spread=setup.spread)
    return forward_pass(setup.model, one)


def relative_errors(
    run: ForwardTime,
    hw: HardwareProfile,
    engine: EngineProfile,
) -> dict[str, float]:
    """One standard deviation of each kind of term of a pass, relative: that of its least sure
    kernel, and the engine's for fixed costs.
    """
    errors: dict[str, float] = dict.fromkeys(GROUPS, 0.0)
    for op in run.ops:
        for basis in op.bases:
            errors[op.group] = max(errors[op.group], basis.relative_error)
    errors["experts"] = errors["experts"] or errors["gemm"]
    errors["overhead"] = engine.errors.relative_error
    if not is_engine_fitted_on(hw, engine):
        errors["overhead"] = max(engine.errors.relative_error, OTHER_DEVICE_ERROR)
    return errors


def untimed(run: ForwardTime) -> list[str]:
    """The kernels of a pass's layers that nobody timed on its device; curves of other formats or
    devices stand in for them.
    """
    names: dict[str, None] = {}
    for op in run.ops:
        if op.group in ("gemm", "experts", "attention"):
            names |= {
                basis.kernel: None for basis in op.bases if basis.source != "table"
            }
    return list(names)


def step_errors(setup: Setup, terms: StepTerms, tp_size: Any) -> tuple[Array, Array]:
    """One relative standard deviation of a speedup and of a step's time, tokens per step apart: for
    the intervals of plans, and for those that measured servers are compared with.

    An engine fitted to servers states the error of whole measured times, with the kernels' errors
    inside: the larger of both holds for a time. Any other engine's is what the kernels' errors
    leave unexplained, and adds to them.
    """
    engine = setup.engine
    hw = setup.hardware
    alone, step = group_shares(terms)
    run = terms.autoregressive
    variance = ratio_variance(setup, run, alone, step, tp_size)
    variance = variance + reported_error(terms) ** 2
    blocks = terms.spread_s / terms.step_s
    variance = variance + _unrun_share(setup, terms) ** 2 + blocks**2
    if GemmCurve.known(hw) is None:
        variance = variance + DATASHEET_ERROR**2
    of_speedup = np.sqrt(variance + engine_error(setup) ** 2)
    if engine.errors.cost_place and engine.errors.cost_place == cost_place(setup):
        of_speedup = _near_measured(engine, terms, of_speedup)

    attention = step["attention"]
    machine = hw.memory_spread * attention + hw.compute_spread * (1.0 - attention)
    own: Array = machine**2 + blocks**2
    for group, error in group_errors(setup, run, tp_size).items():
        own = own + (error * step[group]) ** 2
    measured = engine.error_for(hw.name, setup.model.name)
    if engine.fitted_devices:
        return of_speedup, np.maximum(np.sqrt(own), measured)
    return of_speedup, np.sqrt(own + measured**2)


def cost_place(setup: Setup) -> str:
    """The place that a user's measurement of a cost holds for: device, model, formats and draft."""
    speculation = setup.speculation
    return "/".join(
        (
            setup.hardware.name,
            setup.model.name,
            setup.precision.weight_dtype,
            setup.precision.kv_dtype,
            draft_kind(speculation.draft, speculation.draft_method),
        )
    )


def _near_measured(engine: EngineProfile, terms: StepTerms, usual: Array) -> Array:
    """The error of a speedup by how far its load is from the measured one: all of the usual error
    where a step without a draft takes twice or half as long."""
    step_s = np.maximum(terms.autoregressive.total_s, 1e-9)
    away = np.abs(np.log2(step_s / max(engine.errors.cost_step_s, 1e-9)))
    return np.hypot(engine.errors.cost_error, np.minimum(away, 1.0) * usual)


def group_shares(terms: StepTerms) -> tuple[dict[str, Array], dict[str, Array]]:
    """The share of each kind of term in an autoregressive and in a speculative step."""
    alone_s = terms.autoregressive.total_s
    alone: dict[str, Array] = {}
    for group, seconds in terms.autoregressive.group_seconds().items():
        alone[group] = seconds / alone_s
    drafted: dict[str, Array] = {}
    for name, seconds in terms.step_seconds("group").items():
        drafted[name] = seconds / terms.step_s
    return alone, drafted


def reported_error(terms: StepTerms) -> Array:
    """Error of a step, relative, from operations whose time rests on a few reports."""
    once = terms.verify.plus(terms.accept, terms.upkeep)
    seconds = terms.gamma * _reported_s(terms.draft) + _reported_s(once)
    return np.where(terms.gamma > 0, seconds / terms.step_s, 0.0)


def _reported_s(time: ForwardTime) -> Array:
    """One standard deviation of the reported operations' time."""
    seconds: Array = np.asarray(0.0)
    for op in time.ops:
        for basis in op.bases:
            if basis.source == "report":
                seconds = seconds + basis.relative_error * op.time_s
    return seconds


def log_shifts(
    setup: Setup,
    run: ForwardTime,
    shares: Mapping[str, Any],
    tp_size: Any,
) -> dict[str, Array]:
    """The logarithm of a step's time that one standard deviation of each error adds, from the share
    of each kind of term in the step. `run`: a pass of the setup, which has its kernels' errors.

    The speeds of a calibrated machine's memory (all attention) and processor (everything else) are
    assumed to drift in opposite directions, which affects a speedup most.
    """
    hw = setup.hardware
    attention = np.asarray(shares["attention"])
    shifts: dict[str, Array] = {}
    for group, error in group_errors(setup, run, tp_size).items():
        shifts[group] = np.asarray(error * shares[group])
    shifts[MACHINE] = hw.memory_spread * attention - hw.compute_spread * (
        1.0 - attention
    )
    return shifts


def _unrun_share(setup: Setup, terms: StepTerms) -> Array:
    """The launches of a sparse self-draft outside captured graphs, as a share of a speculative
    step; 0 for drafts that a release of the engine runs."""
    speculation = setup.speculation
    runs = setup.engine.runs(speculation.draft, speculation.draft_method)
    if speculation.draft_method not in SPARSE_METHODS or runs:
        return np.zeros(())
    layers = setup.model.num_hidden_layers
    return np.asarray(terms.gamma * layers * UNRUN_LAYER_S / terms.step_s)


def ratio_variance(
    setup: Setup,
    run: ForwardTime,
    shares: Mapping[str, Any],
    over: Mapping[str, Any],
    tp_size: Any,
) -> Array:
    """Variance of the logarithm of one step's time over another's, from the share of each kind of
    term in both: an error moves both steps together, so only the difference counts."""
    one = log_shifts(setup, run, shares, tp_size)
    other = log_shifts(setup, run, over, tp_size)
    variance: Array = np.zeros(())
    for source, shift in one.items():
        variance = variance + (shift - other[source]) ** 2
    return variance


def group_errors(setup: Setup, run: ForwardTime, tp_size: Any) -> dict[str, Any]:
    """Relative error of each kind of term as a setup runs its passes, of which `run` is one: sends
    by how far they go, whole experts by how unevenly they are chosen."""
    errors: dict[str, Any] = relative_errors(run, setup.hardware, setup.engine)
    errors["link"] = _link_error(setup, tp_size, errors["link"])
    if setup.spread.whole_experts:
        groups = {op.group for op in run.ops}
        of_experts = "experts" if "experts" in groups else "gemm"
        errors[of_experts] = np.hypot(errors[of_experts], EXPERTS_ERROR)
    return errors


class Gains(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The distribution of a speedup at each point: some equally likely acceptances, and at each of
    them a log-normal error of the costs:

        P(speedup <= s) = mean_n Φ(ln(s / speedup_n) / deviation_n)
    """

    speedups: Array
    """At each acceptance and the predicted costs: [acceptances, *points]."""
    deviations: Array
    """One standard deviation of the logarithm at each acceptance; broadcasts to `speedups`."""
    most: Any = np.inf
    """The most tokens of a step, which takes no less time than one without a draft: however unsure its
    cost, no speedup is above it."""

    def around(self, predicted: Array) -> Gains:
        """The distribution with the predicted speedup as its median. That at the median acceptance and
        costs lies a percent or two below it, since more acceptance is possible than less."""
        (median,) = self.quantiles((0.5,))
        return msgspec.structs.replace(
            self, speedups=self.speedups * (predicted / median)
        )

    def below(self, speedup: Any) -> Array:
        """The probability of a speedup of at most this; broadcasts to the points."""
        below = self._below(np.log(np.maximum(speedup, 1e-300)))
        return np.where(np.asarray(speedup) >= self.most, 1.0, below)

    def _below(self, log_speedup: Array) -> Array:
        """As `below`; broadcasts to [..., acceptances, *points], of which the mean is taken."""
        sigmas = (log_speedup - self._logs) / self.deviations
        return np.asarray(normal_cdf(sigmas).mean(axis=-self.speedups.ndim))

    @cached_property
    def _logs(self) -> Array:
        return np.log(self.speedups)

    def above(self, speedup: Any = 1.0) -> Array:
        """The probability that the draft is more than this many times as fast."""
        return np.asarray(1.0 - self.below(speedup))

    def quantiles(self, levels: Sequence[float] = INTERVAL_ENDS) -> Array:
        """The speedups that are not exceeded with these probabilities: [levels, *points]."""
        deviations = np.broadcast_to(self.deviations, self.speedups.shape)
        far = FARTHEST * deviations
        wanted = np.reshape(levels, (-1, *[1] * (self.speedups.ndim - 1)))
        shape = (len(levels), *self.speedups.shape[1:])
        low = np.broadcast_to((self._logs - far).min(axis=0), shape)
        high = np.broadcast_to((self._logs + far).max(axis=0), shape)
        below_low = np.zeros(shape)
        below_high = np.ones(shape)
        for _ in range(NUM_HALVINGS):
            middle = (low + high) / 2.0
            below = self._below(middle[:, None])
            is_below = below < wanted
            low = np.where(is_below, middle, low)
            below_low = np.where(is_below, below, below_low)
            high = np.where(is_below, high, middle)
            below_high = np.where(is_below, below_high, below)
        share = (wanted - below_low) / (below_high - below_low)
        found = np.exp(low + share * (high - low))
        lowest = self.speedups.min(axis=0)
        is_sure = deviations.max(axis=0) <= LEAST_DEVIATION
        is_sure = is_sure & (lowest == self.speedups.max(axis=0))
        return np.asarray(np.where(is_sure, lowest, np.minimum(found, self.most)))


def drawn_tokens(
    prediction: Prediction, sigmas: Array, tokens_relative_error: Any
) -> Array:
    """Tokens per step where acceptance lies this many standard deviations above its median,
    [sigmas, *points]."""
    axes = [1] * len(prediction.points.shape)
    return tokens_at(
        sigmas.reshape(-1, *axes),
        prediction.expected_tokens_per_step,
        prediction.points.gamma,
        tokens_relative_error,
    )


class Interval(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The 90 % intervals of a prediction, its tokens per step being uncertain by
    `tokens_relative_error`."""

    prediction: Prediction
    tokens_relative_error: Any

    @cached_property
    def _step_errors(self) -> tuple[Array, Array]:
        prediction = self.prediction
        return step_errors(prediction.setup, prediction.terms, prediction.points.tp)

    @cached_property
    def gains(self) -> Gains:
        """The distribution of decoding's speedup."""
        prediction = self.prediction
        deviation, _ = self._step_errors
        is_drafted = prediction.points.gamma > 0
        tokens = drawn_tokens(prediction, ACCEPTANCES, self.tokens_relative_error)
        speedups = prediction.speedup * tokens / prediction.expected_tokens_per_step
        most = np.maximum(prediction.points.gamma + 1.0, speedups.max(axis=0))
        deviations = np.where(is_drafted, deviation, 0.0)
        gains = Gains(
            speedups=speedups,
            deviations=np.maximum(deviations, LEAST_DEVIATION),
            most=np.where(is_drafted, most, np.inf),
        )
        return gains.around(prediction.speedup)

    @cached_property
    def _speedup_ends(self) -> Array:
        return self.gains.quantiles(INTERVAL_ENDS)

    @property
    def speedup_low(self) -> Array:
        return np.asarray(self._speedup_ends[0])

    @property
    def speedup_high(self) -> Array:
        return np.asarray(self._speedup_ends[1])

    @cached_property
    def _tpot_ends_s(self) -> tuple[Array, Array]:
        prediction = self.prediction
        tokens = drawn_tokens(
            prediction, np.array([-Z_90, Z_90]), self.tokens_relative_error
        )
        fewer, more = np.log(tokens / prediction.expected_tokens_per_step)
        _, error = self._step_errors
        tpot_s = prediction.tpot_s
        low_s = tpot_s * np.exp(-np.hypot(Z_90 * error, more))
        high_s = tpot_s * np.exp(np.hypot(Z_90 * error, fewer))
        return low_s, high_s

    @property
    def tpot_low_s(self) -> Array:
        return self._tpot_ends_s[0]

    @property
    def tpot_high_s(self) -> Array:
        return self._tpot_ends_s[1]


def interval(prediction: Prediction, tokens_relative_error: Any = 0.0) -> Interval:
    return Interval(prediction=prediction, tokens_relative_error=tokens_relative_error)


def normal_cdf(sigmas: Array) -> Array:
    """The probability of a normal variable below this many standard deviations, within 0.0003:
    SciPy's takes longer to import than most plans take.
    """
    # numpy's powers take as long as the rest of it
    cube = sigmas * sigmas * sigmas
    root = np.sqrt(2.0 / np.pi) * (sigmas + 0.044715 * cube)
    return np.asarray(0.5 * (1.0 + np.tanh(root)))


def engine_error(setup: Setup) -> float:
    """One standard deviation of a speedup that its kernels' errors do not explain: what measured
    servers of its kind left."""
    return evidence_of(setup).width


def _link_error(setup: Setup, tp_size: Any, near: float) -> Any:
    """Relative error of what is sent between devices, by how far it goes."""
    if setup.hardware.kind != "gpu":
        return near
    is_far = np.asarray(tp_size) > setup.hardware.link.reach
    is_estimated = is_far | (setup.spread.pp > 1)
    if np.any(is_estimated):
        return np.where(is_estimated, max(near, ACROSS_NODES_ERROR), near)
    return near


def tokens_error(
    prediction: Prediction, acceptance: AcceptanceProfile | BeliefByText | None
) -> Array:
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
    of_head = 0.0
    if is_one_head_of_many(acceptance):
        of_head = OTHER_HEAD_ERROR
    of_rates = acceptance.tokens_error(
        budget=read,
        context=seen,
        gamma=points.gamma,
        shifts=(own_rates, of_head),
    )
    tree = prediction.setup.speculation.tree
    if tree is None:
        return of_rates
    return np.hypot(of_rates, tree_error(tree, points.gamma))


def is_one_head_of_many(acceptance: AcceptanceProfile | BeliefByText) -> bool:
    """Whether a profile was published for a head that others may train differently, so the served
    head may be another. Prediction heads come with the model."""
    method = METHODS.get(acceptance.draft_method)
    is_published = not acceptance.is_counted and not acceptance.is_assumed
    return method is not None and method.is_trained_apart and is_published
