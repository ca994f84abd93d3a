"""Time of speculation beyond its kernels in models with recurrent states next to attention (Gated
DeltaNet, Mamba), where the host is slower than the device:

    T_step' = max(T_step, t_host, t_metadata + recurrences · t_group)

Before vLLM 0.23 the host waits for the numbers of accepted tokens before it prepares and launches the
next step, which takes it as long whatever the device does. Before 0.14 a mixture of experts with a
trained head waits on several ranks too.

The second bound is the host's work on caches: vLLM puts layers of one cache into groups of as many
layers as the smallest sort of cache has, and prepares the metadata of each group in each step. A
head that brings a layer with a cache of its own (EAGLE, DFlash) makes all of them groups of one
layer; a prediction module has the target's, and the target's own groups are few. From 0.32 on the
metadata of recurrent groups are reused by its code, which nobody has measured: the time is the mean of
both, each one standard deviation away.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.kernels.op import Basis, Op, fixed
from magicdec.perfmodel.setup import Setup
from magicdec.specs.speculation import HEAD_METHODS


def launched(setup: Setup, step_s: Array, tp: Any) -> list[Op]:
    """Time that a speculative step of `step_s` waits for the host."""
    hybrids = setup.engine.hybrids
    recurrent = sum(count for mixer, count in setup.model.mixers if mixer.states())
    method = setup.speculation.draft_method
    has_head = method in HEAD_METHODS
    unknown_s: Any = 0.0
    if recurrent:
        floor_s = hybrids.launches_s
        # a prediction module's layer has the target's own cache
        if has_head and method != "mtp":
            preparing_s = hybrids.metadata_s + hybrids.group_s * recurrent
            floor_s = max(floor_s, preparing_s)
        waiting_s = np.maximum(floor_s - step_s, 0.0)
        if hybrids.may_reuse:
            apart = np.log1p(waiting_s / step_s) / 2.0
            waiting_s = step_s * np.expm1(apart)
            unknown_s = (step_s + waiting_s) * apart
    elif has_head and setup.model.is_moe:
        # ranks wait for each other, so nothing hides it
        waiting_s = np.where(np.asarray(tp) > 1, hybrids.mixture_s, 0.0)
    else:
        return []
    if not np.any(waiting_s):
        return []
    basis = Basis(
        kernel="launches of a hybrid's layers", source="report", relative_error=0.0
    )
    op = fixed("hybrid launches", "overhead", waiting_s, bases=(basis,))
    return [replace(op, spread_s=np.hypot(hybrids.host_error * waiting_s, unknown_s))]
