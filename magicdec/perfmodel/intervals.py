"""How sure a prediction is: the errors of calibration, engine and acceptance, and the intervals from them.

    σ² = Σ_g (σ_g · (share_AR,g − share_SD,g))² + σ_machine² + σ_engine² + σ_tokens²

The errors are taken as independent and log-normal; the 90 % interval of a value is value · exp(± Z_90 · σ).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.cost import Array
from magicdec.perfmodel.prediction import Prediction
from magicdec.perfmodel.setup import draft_kv_tokens
from magicdec.specs.engine import EngineProfile
from magicdec.specs.hardware import HardwareProfile
from magicdec.specs.layers import Attention, GatedDeltaNet, LatentAttention, Mixer
from magicdec.specs.model import ModelSpec

Z_90 = NormalDist().inv_cdf(0.95)
"""A normal variable lies within ± this many standard deviations with probability 0.9."""
OTHER_DEVICE_ERROR = 0.2
"""Least relative error of an engine's fixed costs on a device that it was not fitted on: hosts and clocks differ."""
UNMEASURED_ERROR = 0.3
"""Of kernels that no table holds: lightning attention's, Mamba-2's recurrence, sparse attention over a narrow cache."""
INDEXER_ERROR = 0.25
"""Of layers with an indexer: how far the growth of whole ones with the context, timed in two engines, is from what the
curves of their kernels say (results/LOG.md)."""
ACROSS_NODES_ERROR = 0.5
"""Relative error of collectives over several nodes, and of sends between stages, of which nothing was measured."""
EXCHANGE_ERROR = 0.15
"""Least relative error of sending tokens to their experts: of the fits, with each number of ranks left out in turn."""
EXPERTS_ERROR = 0.15
"""Relative error of matrix products where whole experts are divided over ranks: how unevenly they are chosen."""
SOURCE_ERROR = 0.05
"""Acceptance rates of two harnesses on one task differ by about this much."""


def clustered_stderr(accepted: Array, blocks: Array) -> float | None:
    """Standard error of the mean tokens per step, from each sequence's accepted drafts and blocks (a sequence's blocks
    are alike); None for one sequence."""
    count = len(blocks)
    if count < 2:
        return None
    excess = accepted - blocks * accepted.sum() / blocks.sum()
    return float(np.sqrt(count / (count - 1) * np.sum(excess**2)) / blocks.sum())


def is_engine_fitted_on(hw: HardwareProfile, engine: EngineProfile) -> bool:
    """Whether the engine's fixed costs were measured with this device (or are said to hold for any)."""
    return engine.fitted_device in ("", hw.name)


def attention_error(hw: HardwareProfile, model: ModelSpec | None, kv_dtype: str = "bf16") -> float:
    """One standard deviation, relative, of what mixes tokens: of the least sure of the model's kinds of layers. A kind
    whose kernels no table holds, or only some of them, has `UNMEASURED_ERROR`."""
    if model is None:
        return hw.attention_curve().fit.relative_error
    own = [_mixer_error(hw, mixer, kv_dtype) for mixer, _ in model.mixers]
    return max(own, default=hw.attention_curve().fit.relative_error)


def _mixer_error(hw: HardwareProfile, mixer: Mixer, kv_dtype: str) -> float:
    if isinstance(mixer, Attention):
        return hw.attention_curve().fit.relative_error
    if isinstance(mixer, LatentAttention):
        own = hw.latent_curve(kv_dtype).fit.relative_error
        if mixer.indexer is None:
            return own
        is_measured = hw.indexer is not None and kv_dtype in hw.sparse
        return max(own, INDEXER_ERROR if is_measured else UNMEASURED_ERROR)
    if hw.linear is None or not isinstance(mixer, GatedDeltaNet):
        return UNMEASURED_ERROR
    return hw.linear.fit.relative_error


def relative_errors(
    hw: HardwareProfile, engine: EngineProfile, model: ModelSpec | None = None, kv_dtype: str = "bf16"
) -> dict[str, float]:
    """One standard deviation of each kind of term, relative: the curves' own, and the engine's for fixed costs. Without
    a `model`, of one whose layers are all attention."""
    return {
        "gemm": hw.gemm_curve().fit.relative_error,
        "attention": attention_error(hw, model, kv_dtype),
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


def interval(prediction: Prediction, tokens_relative_error: Any = 0.0) -> Interval:
    """The 90 % intervals of a prediction, its tokens per step being uncertain by `tokens_relative_error`.

    An error in one kind of term moves the autoregressive and the speculative step together, so that only the
    difference of that term's shares affects the speedup.

    σ_machine: the speeds of a calibrated machine's memory and processor drift independently. The memory's moves all
    attention, the processor's everything else. They are assumed to drift in opposite directions, which affects the
    speedup most (and in the same direction for the time of a token):
    σ_machine = (σ_memory + σ_processor) · |share_AR,attention − share_SD,attention|.
    """
    setup, terms = prediction.setup, prediction.terms
    errors: dict[str, Any] = relative_errors(setup.hardware, setup.engine, setup.model, setup.precision.kv_dtype)
    alone = terms.autoregressive.group_seconds()
    step = terms.step_seconds("group")
    difference: Array = np.asarray(0.0)
    own: Array = np.asarray(0.0)
    errors["link"] = _link_error(prediction, errors["link"])
    if setup.spread.whole_experts:
        errors["gemm"] = np.hypot(errors["gemm"], EXPERTS_ERROR)
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


def _link_error(prediction: Prediction, near: float) -> Any:
    """Of what is sent between devices, by how far it goes."""
    setup = prediction.setup
    if setup.hardware.kind != "gpu":
        return near
    if setup.spread.dp > 1:
        near = max(near, EXCHANGE_ERROR)
    tp = prediction.points.tp
    estimated = (tp > setup.hardware.link.reach) | (setup.spread.pp > 1)
    return np.where(estimated, max(near, ACROSS_NODES_ERROR), near) if np.any(estimated) else near


def tokens_error(prediction: Prediction, acceptance: AcceptanceProfile | None, source_error: float = 0.0) -> Array:
    """One relative standard deviation of the tokens per step: the profile's own, and from which sequences
    a batch happens to hold, whose own rates differ by the profile's `spread`. `source_error` is added to it for a
    source unlike the others'."""
    points = prediction.points
    if acceptance is None or not np.any(points.gamma > 0):
        return np.zeros(())
    kv_len = points.context + points.gen_len / 2.0
    read = draft_kv_tokens(prediction.setup, kv_len, points.budget)
    own_rates = acceptance.spread / np.sqrt(points.batch)
    return acceptance.tokens_error(budget=read, context=kv_len, gamma=points.gamma, shifts=(source_error, own_rates))
