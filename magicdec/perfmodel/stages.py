"""A pipeline: layers in stages, and the batch in as many microbatches, which follow each other through them.

    step = max(m · slowest stage, one microbatch through all stages)          m = min(pp, batch) microbatches

A stage's time is its share of the layers' time and of sending hidden states on; the last has the head, the choice of
tokens, and a draft other than the target itself, too. m · slowest is the time until every microbatch has passed, as a
stage begins the next when it is done with one; a microbatch's next token needs its last one, so that it goes round no
faster than once through all stages. All microbatches are taken to be as long as the fullest.

Ignored: a stage that receives while it computes (its sends are in its time), layers of unequal times.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from magicdec.perfmodel.forward import ForwardTime
from magicdec.perfmodel.kernels.base import Array, Op, fixed
from magicdec.perfmodel.kernels.links import Message, send
from magicdec.perfmodel.setup import Setup

TENSORS_SENT = 2.0
"""Hidden states and the residual beside them (as vLLM sends them)."""


def microbatch(setup: Setup, batch: Any) -> Array:
    """Sequences of the fullest group of ranks in one microbatch."""
    each: Array = np.asarray(batch, dtype=np.float64)
    return np.ceil(each / setup.spread.groups) if setup.spread.groups > 1 else each


def head_s(time: ForwardTime) -> Array:
    """Seconds of a pass that only the last stage works."""
    seconds: Array = sum((op.time_s for op in time.ops if op.name == "lm_head"), np.asarray(0.0))
    return seconds


def send_op(setup: Setup, *, tokens: Any, tp_size: Any) -> Op:
    """The sends of `tokens` per group, over all stages."""
    ranks, spread, link = np.asarray(tp_size, dtype=np.float64), setup.spread, setup.hardware.link
    element = setup.precision.activation_bytes
    is_far = ranks * spread.groups > link.reach
    message = tokens * setup.model.hidden_size * element * TENSORS_SENT
    one = send(setup.at, Message(message, ranks), is_far=is_far)
    return fixed("send", "link", spread.pp * one.time_s, one.cost.times(spread.pp))


def waiting_op(setup: Setup, *, batch: Any, layers_s: Any, last_s: Any, sends_s: Any) -> Op:
    """The time that a step of all microbatches takes beyond one of them passing all stages: `layers_s` and `sends_s`,
    spread over the stages, and `last_s` on the last."""
    spread = setup.spread
    counts = np.asarray(spread.stage_layers(setup.model.num_hidden_layers), dtype=np.float64)
    shares = counts / counts.sum()
    slowest = np.maximum(shares[:-1].max() * layers_s, shares[-1] * layers_s + last_s) + sends_s / spread.pp
    per_group = np.ceil(np.asarray(batch, dtype=np.float64) / spread.dp)
    num_microbatches = np.minimum(per_group, float(spread.pp))
    through = layers_s + last_s + sends_s
    return fixed("waiting", "overhead", np.maximum(num_microbatches * slowest - through, 0.0))
