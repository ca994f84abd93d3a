"""A server under steady load: the prefills of other requests between a request's own decoding steps.

`concurrency` requests are in the system, each with a prompt of P tokens and G to generate; one that ends is replaced.
At most as many decode at once as the cache holds. While a request decodes, each of the others is replaced once in its
cycle of TTFT + G · TPOT, so that

    n    = (b − 1) · w · D / (D + TTFT/TPOT)      prefills of others while it decodes, D = G − 1
    TPOT = T_dec(b, P + G/2) + n · dT / D
    TTFT = dT · (1 + b − 1 − n) + 1.5 T_step + waiting for a slot

so that no work is lost: in each cycle b prompts are prefilled.

w is the share of the others' prefills that falls between a request's tokens. Requests that end together are
replaced together, and an engine that puts prompts first then prefills them all before it decodes: they are paid as
TTFT. dT is what one prompt adds to the time of those that decode. An engine that mixes chunks of prompts into
decoding passes shares the pass, and the weights it reads: dT = Σ over chunks of linear(b + chunk) − linear(b), and
attention. One that does not stops decoding for the whole pass. Requests beyond b wait. A speculative step emits several
tokens: T_dec is its time per token.

Assumed: equal lengths; w does not depend on them. Ignored: prefix caching, preemption.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from magicdec.perfmodel import memory
from magicdec.perfmodel.cost import Array
from magicdec.perfmodel.forward import ForwardTime, forward_pass, prefill
from magicdec.perfmodel.setup import Setup, draft_kv_tokens
from magicdec.perfmodel.steps import step_terms

ROUNDS = 12
"""Of the fixed point in TTFT/TPOT, which moves TPOT by little."""


@dataclass(frozen=True, kw_only=True)
class ServingTime:
    """What a request of a server in steady state sees. Seconds; arrays broadcast."""

    decode_step_s: Array
    """One step of those that decode, without prefills."""
    prefill_s: Array
    """What one prompt adds to the time of those that decode."""
    ttft_s: Array
    """From being sent to the first token, waiting for a slot included."""
    tpot_s: Array
    """Between tokens, prefills of others included."""
    request_s: Array
    active: Array
    """Requests that decode at the same time, or are prefilled."""
    requests_per_s: Array

    @property
    def prefill_share(self) -> Array:
        """Of the time between tokens."""
        share: Array = 1.0 - self.decode_step_s / self.tpot_s
        return share


def largest_active(setup: Setup, *, prompt_len: Any, output_len: Any, tp_size: Any, budget: Any, gamma: Any) -> Array:
    """How many requests the cache holds at once, at the mean of their lengths or with all they may grow to."""
    grown = 1.0 if setup.engine.admission == "whole" else 0.5
    held = np.asarray(prompt_len, dtype=np.float64) + grown * np.asarray(output_len, dtype=np.float64)

    def need(batch: float) -> Array:
        return memory.memory_need(
            setup, batch=batch, max_len=held, budget=budget, gamma=gamma, tp_size=tp_size
        ).total_bytes

    capacity = memory.capacity_bytes(setup.hardware, setup.engine)
    batch: Array = np.maximum(memory.largest_batch(need(0.0), need(1.0), capacity), 1.0)
    return batch


def _without_attention(time: ForwardTime) -> Array:
    rest: Array = time.total_s - time.group_seconds()["attention"]
    return rest


def prefill_seconds(setup: Setup, *, active: Any, prompt_len: Any, tp_size: Any) -> Array:
    """What one prompt adds to the time of `active` requests that decode.

    The engine's factors are those of its decoding kernels, and do not hold here; `prefill_factor` does.
    """
    model, precision = setup.model, setup.precision
    engine = msgspec.structs.replace(setup.engine, gemm_factor=1.0, narrow_gemm_factor=1.0, elementwise_factor=1.0)
    formats: dict[str, Any] = {"weight_dtype": precision.weight_dtype, "kv_dtype": precision.kv_dtype}
    prompt, active = np.asarray(prompt_len, dtype=np.float64), np.asarray(active, dtype=np.float64)
    alone = prefill(model, setup.hardware, engine, batch=1.0, prompt_len=prompt, tp_size=tp_size, **formats)
    room = np.maximum(engine.prefill_tokens - active, engine.prefill_tokens / 4.0)
    chunks = np.maximum(np.ceil(prompt / room), 1.0)
    uncaptured_s = chunks * model.num_hidden_layers * engine.prefill_layer_overhead_s
    if not engine.mixes_prefill:
        whole: Array = engine.prefill_factor * alone.total_s + uncaptured_s
        return whole

    def linear(tokens: Any) -> Array:
        return _without_attention(
            forward_pass(
                model, setup.hardware, engine, batch=tokens, query_len=1.0, kv_len=1.0, tp_size=tp_size,
                logit_rows=active, **formats,
            )
        )  # fmt: skip

    added = chunks * (linear(active + prompt / chunks) - linear(active))
    added = np.maximum(added, 0.0) + alone.group_seconds()["attention"]
    seconds: Array = engine.prefill_factor * added + uncaptured_s
    return seconds


def serving_time(
    setup: Setup,
    *,
    concurrency: Any,
    prompt_len: Any,
    output_len: Any,
    tp_size: Any = 1,
    budget: Any = None,
    gamma: Any = 0,
    tokens_per_step: Any = 1.0,
    full_acceptance: Any = 1.0,
) -> ServingTime:
    """The times of a request among `concurrency` that a server works on.

    `gamma` > 0 speculates, with `tokens_per_step` emitted on average.
    """
    concurrency, prompt = np.asarray(concurrency, dtype=np.float64), np.asarray(prompt_len, dtype=np.float64)
    output = np.maximum(np.asarray(output_len, dtype=np.float64), 1.0)
    most = largest_active(setup, prompt_len=prompt, output_len=output, tp_size=tp_size, budget=budget, gamma=gamma)
    active = np.minimum(concurrency, most)
    kv_len = prompt + output / 2.0
    terms = step_terms(
        setup, batch=active, kv_len=kv_len, draft_kv_len=draft_kv_tokens(setup, kv_len, budget), gamma=gamma,
        tp_size=tp_size, full_acceptance=full_acceptance,
    )  # fmt: skip
    step_s, token_s = terms.step_s, terms.step_s / np.asarray(tokens_per_step, dtype=np.float64)
    one_prompt_s = prefill_seconds(setup, active=active, prompt_len=prompt, tp_size=tp_size)
    others, gaps = active - 1.0, output - 1.0
    first_s, tpot_s = one_prompt_s + 1.5 * step_s, token_s  # the rest of the step that runs, and its own
    for _ in range(ROUNDS):
        between = others * setup.engine.prefill_share * gaps / (gaps + first_s / tpot_s)
        tpot_s = token_s + between * one_prompt_s / np.maximum(gaps, 1.0)
        first_s = one_prompt_s * (1.0 + others - between) + 1.5 * step_s
    in_slot_s = first_s + gaps * tpot_s
    waiting_s = np.maximum(concurrency / active - 1.0, 0.0) * in_slot_s
    return ServingTime(
        decode_step_s=np.broadcast_to(token_s, tpot_s.shape),
        prefill_s=one_prompt_s,
        ttft_s=first_s + waiting_s,
        tpot_s=tpot_s,
        request_s=in_slot_s + waiting_s,
        active=active,
        requests_per_s=active / in_slot_s,
    )
