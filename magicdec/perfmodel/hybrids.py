"""Time of speculation beyond its kernels in models with recurrent states next to attention (Gated
DeltaNet, Mamba).

    T_verify += s · (γ − 1) · (T_attention(γ + 1) − T_attention(1))
    T_step'   = T_step^(1 − w) · max(T_step, layers · t_layer)^w

The first is attention whose kernel cannot split the context for several query tokens: public
servers disagree whether each further drafted token reads the context again. The second is a step
that no whole captured graph replays, whose layers the host launches one after the other; before
0.14 the step of a mixture of experts with a trained head takes that much longer on several ranks.
Neither is known well, so both carry an error that spans the reports.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.kernels.op import Basis, ForwardTime, Op, fixed
from magicdec.perfmodel.setup import Setup
from magicdec.specs.mixers import Attention, LatentAttention
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import HEAD_METHODS

REPEATED = "repeated attention"
"""Name of the attention time that drafted tokens beyond the first may add."""


def is_hybrid(model: ModelSpec) -> bool:
    """Whether some layers keep a state instead of a cache."""
    return any(
        not isinstance(mixer, Attention | LatentAttention) for mixer, _ in model.mixers
    )


def _attention_s(time: ForwardTime) -> Array:
    """Seconds of attention over caches in a pass."""
    seconds: Array = np.asarray(0.0)
    for op in time.ops:
        if op.name == "attention":
            seconds = seconds + op.time_s
    return seconds


def read_again(
    setup: Setup, block: ForwardTime, alone: ForwardTime, gamma: Any
) -> list[Op]:
    """Attention time that drafted tokens beyond the first add to a verification `block`; `alone`:
    the pass over one token of each sequence."""
    hybrids = setup.engine.hybrids
    if not hybrids.hybrid_reread_share or not is_hybrid(setup.model):
        return []
    unsplit_s = np.maximum(_attention_s(block) - _attention_s(alone), 0.0)
    further = np.maximum(gamma - 1.0, 0.0)
    basis = Basis(
        kernel="attention of several drafted tokens in a hybrid",
        source="report",
        relative_error=hybrids.hybrid_reread_error,
    )
    seconds = hybrids.hybrid_reread_share * further * unsplit_s
    return [fixed(REPEATED, "attention", seconds, bases=(basis,))]


def repeated_error_s(verify: ForwardTime) -> Array:
    """One standard deviation of the repeated attention of a verification, seconds."""
    seconds: Array = np.asarray(0.0)
    for op in verify.ops:
        if op.name == REPEATED:
            for basis in op.bases:
                seconds = seconds + basis.relative_error * op.time_s
    return seconds


def _is_launched(setup: Setup, tp: Any) -> Any:
    """Whether the host may launch a step's layers: a hybrid's, and in some versions a split mixture's
    with a trained head."""
    is_split = np.asarray(tp) > 1
    if is_hybrid(setup.model):
        return np.full(is_split.shape, True)
    is_mixture = any(mlp.num_experts for mlp, _ in setup.model.feed_forwards)
    has_head = setup.speculation.draft_method in HEAD_METHODS
    counts = setup.engine.hybrids.hybrid_mixtures and is_mixture and has_head
    return is_split & counts


def launched(setup: Setup, step_s: Array, tp: Any) -> list[Op]:
    """Time that a speculative step of `step_s` waits where the host launches its layers."""
    hybrids = setup.engine.hybrids
    is_launched = _is_launched(setup, tp)
    if not hybrids.hybrid_layer_s or not np.any(is_launched):
        return []
    floor_s = is_launched * hybrids.hybrid_layer_s * setup.model.num_hidden_layers
    ratio = np.maximum(floor_s / np.maximum(step_s, 1e-12), 1.0)
    basis = Basis(
        kernel="launches of a hybrid's layers",
        source="report",
        relative_error=hybrids.hybrid_layer_error,
    )
    waiting_s = step_s * (ratio**hybrids.hybrid_layer_weight - 1.0)
    if not is_hybrid(setup.model):
        waiting_s = floor_s  # ranks wait for each other, so nothing hides it
    return [fixed("hybrid launches", "overhead", waiting_s, bases=(basis,))]
