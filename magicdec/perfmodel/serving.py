"""A server under steady load: the prefills of other requests between a request's own decoding steps
(docs/model.md).

`concurrency` requests are in the system, each with a prompt of P tokens and G to generate; one that
ends is replaced. At most as many decode at once as the cache holds: b; the others wait for a slot.
Each of the b is replaced once in a request's time C in its slot, so b prompts are prefilled in it;
t is the time of a token without prefills:

    C    = b · dT + D · t + 1.5 T_step                          D = G − 1
    F    = dT · (1 + (b − 1) · (1 − w)) + 1.5 T_step              A = dT · min(P / tokens of a pass, 1)
    TPOT = t · (C − A) / (D · t + F − A),    TTFT = C − D · TPOT  + waiting for a slot

w is the share of the others' prefills that falls evenly over C, but for A, in which the request's
own prompt fills the passes; the rest delays first tokens, where an engine puts the prompts of
requests that end together first. 1.5 T_step: the rest of the step that runs when a request comes,
and its own first. dT is what one prompt adds to the time of those that decode: where chunks of
prompts share decoding passes, Σ over chunks of linear(b + chunk) − linear(b), and attention; else
the whole pass, which takes no less than the host's launches, shared by the prompts that ended in one
step. A speculative step emits several tokens: t is its time per token; a plan adds its draft's own prefill to dT.

Assumed: equal lengths, or the means of mixed ones; w does not depend on them. Ignored: prefix
caching, preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel import memory
from magicdec.perfmodel.forward import (
    Pass,
    forward_pass,
    num_launches,
    prefill,
    prompts_attention,
)
from magicdec.perfmodel.intervals import (
    LEAST_DEVIATION,
    Gains,
    engine_error,
)
from magicdec.perfmodel.kernels.op import ForwardTime, Where
from magicdec.perfmodel.setup import Cached, Setup
from magicdec.perfmodel.speedup import Prediction
from magicdec.perfmodel.step import send_op, step_terms


class Cycle(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A request's times on a server in steady state, by the equations above. Seconds; arrays
    broadcast.
    """

    token_s: Array
    step_s: Array
    prompt_s: Array
    active: Array
    gaps: Any
    """Tokens after the first, D in the equations above."""
    between_share: float
    """The share of others' prefills that falls evenly over the time, w in the equations above."""
    filled: Any = 0.0
    """Share of the passes over a prompt that it fills, so no other's prefill falls in them: A / dT
    above.
    """
    groups: Any = 1
    """Groups and stages that prefill beside each other, on average: a prompt takes one of them so
    many times `prompt_s`.
    """
    rounds: Any = 1.0
    """Requests in the system for each slot: all but one wait."""
    elsewhere_s: Any = 0.0
    """Prefill of a request elsewhere, before it comes."""
    received_s: Any = 0.0
    """Time in its slot in which the keys and values of its prompt arrive."""

    @property
    def _spread_s(self) -> Array:
        """The others' prefills that fall evenly over the time."""
        return (self.active - 1.0) * self.between_share * self.prompt_s

    @cached_property
    def _rest_s(self) -> Array:
        """The request's own part of its time: D · t + F in the equations above."""
        first = (
            self.prompt_s
            * (self.groups + (self.active - 1.0) * (1.0 - self.between_share))
            + 1.5 * self.step_s
            + self.received_s
        )
        return np.asarray(self.gaps * self.token_s + first)

    @cached_property
    def in_slot_s(self) -> Array:
        return self._rest_s + self._spread_s

    @cached_property
    def tpot_s(self) -> Array:
        share = np.where(
            np.asarray(self.gaps) > 0,
            self._spread_s / (self._rest_s - self.prompt_s * self.filled),
            0.0,
        )
        return self.token_s * (1.0 + share)

    @property
    def request_s(self) -> Array:
        """From being sent to the last token."""
        return np.asarray(self.in_slot_s * self.rounds + self.elsewhere_s)

    @property
    def ttft_s(self) -> Array:
        """From being sent to the first token."""
        return np.asarray(self.request_s - self.gaps * self.tpot_s)

    @property
    def requests_per_s(self) -> Array:
        return self.active / self.in_slot_s

    @property
    def prefill_share(self) -> Array:
        """The prompts' share of the time in the slot."""
        return self.active * self.prompt_s / self.in_slot_s


def largest_active(
    setup: Setup,
    *,
    prompt_len: Any,
    output_len: Any,
    tp_size: Any,
    budget: Any,
    gamma: Any,
) -> Array:
    """How many requests the cache holds at once, at the mean of their lengths or with all they may
    grow to.
    """
    if setup.engine.scheduler.admission == "whole":
        grown = 1.0
    else:
        grown = 0.5
    held = np.asarray(prompt_len, dtype=np.float64) + grown * np.asarray(
        output_len, dtype=np.float64
    )

    groups = setup.spread.dp

    def need(batch: float) -> Array:
        return memory.memory_need(
            setup,
            batch=batch * groups,
            max_len=held,
            budget=budget,
            gamma=gamma,
            tp_size=tp_size,
        ).total_bytes

    capacity = memory.capacity_bytes(setup.hardware, setup.engine, tp_size)
    return np.maximum(
        groups * memory.largest_batch(need(0.0), need(1.0), capacity), 1.0
    )


def pass_seconds(
    setup: Setup, *, tokens: Any, tp_size: Any, logit_rows: Any = 1.0
) -> Array:
    """One pass over `tokens` tokens, prompts among them, but for its attention.

    The engine's factors are those of its decoding kernels, and do not hold here; `prefill_factor`
    does, and makes no operation faster than the device's memory, processor and links.
    """
    own_s, shared_s = pass_parts(
        setup, tokens=tokens, tp_size=tp_size, logit_rows=logit_rows
    )
    return own_s + shared_s


def pass_parts(
    setup: Setup, *, tokens: Any, tp_size: Any, logit_rows: Any = 1.0
) -> tuple[Array, Array]:
    """`pass_seconds` in two: what a group computes for its own tokens, and the experts that all
    data-parallel groups share, which have those of all: `tokens` is a group's mean there.
    """
    at = _for_prompts(setup)
    one = Pass(
        at=at,
        batch=tokens,
        query_len=1.0,
        kv_len=1.0,
        tp=tp_size,
        logit_rows=logit_rows,
        spread=setup.spread,
    )
    time = forward_pass(setup.model, one).by(at.engine.scheduler.prefill_factor)
    seconds = time.group_seconds()
    total_s = time.total_s - seconds["attention"]
    shared_s = np.zeros(())
    if setup.spread.dp > 1 and setup.spread.whole_experts:
        shared_s = np.asarray(seconds["experts"])
    return total_s - shared_s, shared_s


def prompt_time(setup: Setup, *, prompt_len: Any, tp_size: Any) -> ForwardTime:
    """The passes over one prompt alone, by the factor of prompts."""
    at = _for_prompts(setup)
    alone = prefill(
        setup.model,
        at,
        batch=1.0,
        prompt_len=prompt_len,
        tp=tp_size,
        spread=setup.spread,
    )
    return alone.by(at.engine.scheduler.prefill_factor)


def _prompt_attention_s(setup: Setup, prompt_len: Any, tp_size: Any) -> Array:
    """Seconds of attention of one prompt alone, by the factor of prompts."""
    at = _for_prompts(setup)
    attention = prompts_attention(
        setup.model,
        at,
        batch=1.0,
        prompt_len=prompt_len,
        tp=tp_size,
        spread=setup.spread,
    )
    return attention.by(at.engine.scheduler.prefill_factor).group_seconds()["attention"]


def _for_prompts(setup: Setup) -> Where:
    engine, attention = setup.engine, setup.engine.kernels.prefill_attention_factor
    engine = engine.with_constants(
        {
            "kernels.gemm_factor": 1.0,
            "kernels.narrow_gemm_factor": 1.0,
            "kernels.elementwise_factor": 1.0,
            "kernels.attention_factor": engine.kernels.attention_factor
            if attention is None
            else attention,
        }
    )
    return setup.at._replace(engine=engine)


def prefill_seconds(
    setup: Setup,
    *,
    active: Any,
    prompt_len: Any,
    tp_size: Any,
    query_len: Any = 1.0,
    passes: Any = None,
) -> Array:
    """The time that one prompt adds to `active` requests that decode with `query_len` tokens each,
    in so many passes: of a replica of several groups and stages, to that of all (`unevenness`).
    """
    model = setup.model
    engine = setup.engine
    spread = setup.spread
    prompt = np.asarray(prompt_len, dtype=np.float64)
    active = np.asarray(active, dtype=np.float64) / spread.groups
    room = prompt_room(setup, active)
    chunks = np.maximum(np.ceil(prompt / room), 1.0)
    besides_s: Any = engine.scheduler.request_overhead_s
    if spread.pp > 1:
        sending = send_op(setup, tokens=prompt, tp_size=tp_size)
        besides_s = besides_s + sending.time_s
    per_pass = _prompts_per_pass(setup, active, chunks, passes)
    uneven = unevenness(per_pass, spread.dp) / spread.pp
    if not engine.scheduler.mixes_prefill:
        alone = prompt_time(setup, prompt_len=prompt, tp_size=tp_size)
        together = _prompts_together(per_pass, np.maximum(room / prompt, 1.0))
        launches_s = chunks * launching_s(setup) / together
        whole: Array = np.maximum(alone.total_s, launches_s) + besides_s
        return whole * uneven
    besides_s = besides_s + (
        chunks * model.num_hidden_layers * engine.graphs.prefill_layer_overhead_s
    )

    def parts(tokens: Any) -> tuple[Array, Array]:
        return pass_parts(setup, tokens=tokens, tp_size=tp_size, logit_rows=active)

    decoding = active * query_len
    own_before, shared_before = parts(decoding)
    own_after, _ = parts(decoding + prompt / chunks)
    added = chunks * (own_after - own_before)
    added = np.maximum(added, 0.0) + _prompt_attention_s(setup, prompt, tp_size)
    seconds: Array = (added + besides_s) * uneven
    if spread.dp == 1:
        return seconds
    together = np.minimum(np.maximum(per_pass, 1.0), spread.dp)
    _, shared_after = parts(decoding + prompt / chunks * together / spread.dp)
    shared_s = np.maximum(shared_after - shared_before, 0.0) * chunks / together
    return seconds + shared_s / spread.pp


def launching_s(setup: Setup) -> float:
    """The host's time for the launches of a pass of prompts alone."""
    return setup.engine.graphs.launch_s * num_launches(setup.model, setup.at)


def _prompts_together(per_step: Array, most: Array) -> Array:
    """Prompts that share a pass of their own where so many requests end in a step on average, at most
    `most`: E[N | N > 0] of a Poisson distribution."""
    mean = np.clip(per_step, 1e-6, 1e6)
    return np.minimum(mean / -np.expm1(-mean), most)


def _prompts_per_pass(setup: Setup, active: Array, chunks: Array, passes: Any) -> Array:
    """Chunks of prompts that share a pass of the data-parallel groups, on average, where each group
    decodes `active` requests: one comes whenever one has gone through its `passes`. Infinite: so
    many that each group always has some.
    """
    if passes is None:
        return np.asarray(np.inf)
    return np.asarray(
        active * setup.spread.dp * chunks / np.maximum(np.asarray(passes), 1e-9)
    )


def unevenness(per_pass: Any, groups: int) -> Array:
    """The fullest group's prompts in a pass over those of all groups, E[ceil(N / groups)] / E[N]
    with N from a Poisson distribution: all groups wait for the fullest, to which prompts are
    handed evenly. 1 / groups where each always has some, 1 where prompts come one at a time.
    """
    per_pass = np.asarray(per_pass, dtype=np.float64)
    if groups == 1:
        return np.ones(per_pass.shape)
    means, ratios = _uneven(groups)
    known = np.clip(per_pass, means[0], means[-1])
    ends = np.where(per_pass > means[-1], 1.0 / groups, 1.0)
    inside = (per_pass >= means[0]) & (per_pass <= means[-1])
    return np.where(inside, np.interp(np.log(known), np.log(means), ratios), ends)


@cache
def _uneven(groups: int) -> tuple[Array, Array]:
    """`unevenness` between one prompt in a thousand passes and a thousand of each group in one."""
    means = np.geomspace(1e-3, 1e3 * groups, 200)
    ratios = []
    for mean in means:
        counts = np.arange(1.0, np.ceil(mean + 10.0 * np.sqrt(mean) + 10.0))
        log_chance = counts * np.log(mean) - mean - np.cumsum(np.log(counts))
        ratios.append(
            float((np.exp(log_chance) * np.ceil(counts / groups)).sum() / mean)
        )
    return means, np.array(ratios)


def prompt_room(setup: Setup, active: Any) -> Array:
    """Prompt tokens that fit in a pass next to the decoding sequences of a group of ranks."""
    tokens = setup.engine.scheduler.prefill_tokens
    return np.maximum(tokens - np.asarray(active, dtype=np.float64), tokens / 4.0)


def beside(setup: Setup, *, active: Any, prompt_len: Any, passes: Any) -> Array:
    """Groups and stages that prefill beside each other, on average."""
    if setup.spread.groups == 1:
        return np.ones(())
    of_group = np.asarray(active, dtype=np.float64) / setup.spread.groups
    prompt = np.asarray(prompt_len, dtype=np.float64)
    chunks = np.maximum(np.ceil(prompt / prompt_room(setup, of_group)), 1.0)
    per_pass = _prompts_per_pass(setup, of_group, chunks, passes)
    return setup.spread.pp / unevenness(per_pass, setup.spread.dp)


def filled(setup: Setup, *, active: Any, prompt_len: Any) -> Array:
    """The share of the passes that a prompt takes of its own."""
    room = prompt_room(
        setup, np.asarray(active, dtype=np.float64) / setup.spread.groups
    )
    return np.minimum(np.asarray(prompt_len, dtype=np.float64) / room, 1.0)


def serving_time(
    setup: Setup,
    *,
    concurrency: Any,
    prompt_len: Any,
    output_len: Any,
    tp_size: Any = 1,
) -> Cycle:
    """The times of a request among `concurrency` that a server decodes autoregressively."""
    concurrency = np.asarray(concurrency, dtype=np.float64)
    prompt = np.asarray(prompt_len, dtype=np.float64)
    output = np.maximum(np.asarray(output_len, dtype=np.float64), 1.0)
    most = largest_active(
        setup,
        prompt_len=prompt,
        output_len=output,
        tp_size=tp_size,
        budget=None,
        gamma=0,
    )
    active = np.minimum(concurrency, most)
    kv_len = prompt + output / 2.0
    terms = step_terms(
        setup,
        batch=active,
        kv_len=kv_len,
        draft_kv_len=kv_len,
        gamma=0,
        tp_size=tp_size,
    )
    step_s = terms.autoregressive.total_s
    return Cycle(
        token_s=step_s,
        step_s=step_s,
        active=active,
        gaps=output - 1.0,
        between_share=setup.engine.scheduler.prefill_share,
        prompt_s=prefill_seconds(
            setup, active=active, prompt_len=prompt, tp_size=tp_size, passes=output
        ),
        filled=filled(setup, active=active, prompt_len=prompt),
        groups=beside(setup, active=active, prompt_len=prompt, passes=output),
        rounds=np.maximum(concurrency / active, 1.0),
    )


class WholeRequests(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Requests at the points of a prediction, prefills included, with every slot of its batch
    busy."""

    prediction: Prediction
    alone: Cycle
    """With autoregressive decoding."""
    drafted: Cycle
    output_len: Any

    def speedup_at(self, decoding: Array) -> Array:
        """The speedup of whole requests over autoregressive decoding at the same batch, if decoding
        alone had this speedup: an error of the prefill moves both times alike."""
        prefills_s = self.drafted.active * self.drafted.prompt_s
        decoding_s = (
            (self.drafted.in_slot_s - prefills_s) * self.prediction.speedup / decoding
        )
        return self.alone.in_slot_s / (prefills_s + decoding_s)

    @property
    def decoding_to_break_even(self) -> Array:
        """The speedup of decoding with which whole requests take as long as without a draft;
        infinite where the draft's prefills alone take longer."""
        prefills_s = self.drafted.active * self.drafted.prompt_s
        decoding_s = (self.drafted.in_slot_s - prefills_s) * self.prediction.speedup
        room_s = self.alone.in_slot_s - prefills_s
        return np.where(
            room_s > 0.0, decoding_s / np.where(room_s > 0.0, room_s, 1.0), np.inf
        )

    def gains(self, decoding: Gains) -> Gains:
        """The distribution of their speedup, from that of decoding.

        Prefills, which both have, dilute the errors of decoding's costs. The error that the engine's
        constants leave is not diluted: prompts share passes with verified tokens.
        """
        prefills_s = self.drafted.active * self.drafted.prompt_s
        decoding_s = self.drafted.in_slot_s - prefills_s
        drawn_s = decoding_s * self.prediction.speedup / decoding.speedups
        share = drawn_s / (prefills_s + drawn_s)
        of_engine = np.where(
            self.prediction.points.gamma > 0, engine_error(self.prediction.setup), 0.0
        )
        of_kernels = np.maximum(decoding.deviations**2 - of_engine**2, 0.0)
        gains = Gains(
            speedups=self.speedup_at(decoding.speedups),
            deviations=np.maximum(
                np.sqrt(share**2 * of_kernels + of_engine**2), LEAST_DEVIATION
            ),
            most=decoding.most,
        )
        return gains.around(self.speedup_at(self.prediction.speedup))

    @cached_property
    def output_tokens_per_s(self) -> Array:
        """Output tokens per second of one replica."""
        return np.asarray(
            self.drafted.active * self.output_len / self.drafted.in_slot_s
        )


def whole_requests(
    prediction: Prediction,
    *,
    output_len: Any,
    prompts: Sequence[tuple[float, float]] = (),
) -> WholeRequests:
    """Requests with prompts of these (length, share), else of the points' context, and `output_len`
    tokens to generate on average."""
    points, setup = prediction.points, prediction.setup

    alone_s = prediction.autoregressive_step_s
    step_s = prediction.step_s
    passes_alone = np.maximum(output_len, 1.0)
    passes = passes_alone * prediction.tpot_s / step_s

    prompt_lengths, shares = np.asarray(prompts, dtype=np.float64).reshape(-1, 2).T

    def prompt_s(query_len: Any, hits: Cached, passes: Any) -> Array:
        at: dict[str, Any] = {
            "active": points.batch,
            "tp_size": points.tp,
            "query_len": query_len,
            "passes": passes,
        }

        def whole_s(prompt_len: Any) -> Array:
            return prefill_seconds(setup, prompt_len=prompt_len, **at)

        lengths = points.context
        if prompts:
            lengths = prompt_lengths.reshape(-1, *[1] * len(points.shape))
        seconds = whole_s(lengths)
        if hits.is_any:
            cached = hits.of(lengths)
            seconds = hits.seconds_of_rest(
                lengths,
                whole_s=seconds,
                cached_s=whole_s(np.maximum(cached, 1.0)),
                rest_s=whole_s(lengths - cached),
            )
        if not prompts:
            return seconds
        return np.tensordot(shares / shares.sum(), seconds, axes=1)

    common: dict[str, Any] = {
        "active": points.batch,
        "gaps": np.maximum(output_len - 1.0, 0.0),
        "between_share": setup.engine.scheduler.prefill_share,
    }

    def computed(hits: Cached) -> Any:
        return points.context - hits.of(points.context)

    def passes_filled(hits: Cached) -> Any:
        return filled(setup, active=points.batch, prompt_len=computed(hits))

    def groups(hits: Cached, passes: Any) -> Array:
        return beside(
            setup, active=points.batch, prompt_len=computed(hits), passes=passes
        )

    if setup.kv_link_bytes_per_s is not None:
        return _decoding_alone(prediction, output_len, common)
    drafts = points.gamma > 0
    beside_drafts = groups(prediction.hits, passes)
    drafts_s = np.where(drafts, prediction.draft_prefill_s / beside_drafts, 0.0)
    drafted_s = prompt_s(points.gamma + 1.0, prediction.hits, passes) + drafts_s
    alone = Cycle(
        token_s=alone_s,
        step_s=alone_s,
        prompt_s=prompt_s(1.0, prediction.hits_alone, passes_alone),
        filled=passes_filled(prediction.hits_alone),
        groups=groups(prediction.hits_alone, passes_alone),
        **common,
    )
    drafted = Cycle(
        token_s=prediction.tpot_s,
        step_s=step_s,
        prompt_s=drafted_s,
        filled=passes_filled(prediction.hits),
        groups=beside_drafts,
        **common,
    )
    return WholeRequests(
        prediction=prediction, output_len=output_len, alone=alone, drafted=drafted
    )


def _decoding_alone(
    prediction: Prediction, output_len: Any, common: dict[str, Any]
) -> WholeRequests:
    """Requests of a pool that only decodes: prompts take a slot while they arrive, and nothing else.
    They are prefilled one by one on as many devices of the same kind.
    """
    common = common | {
        "prompt_s": np.zeros(()),
        "elsewhere_s": prediction.prefill_s,
        "received_s": prediction.transfer_s,
    }
    alone_s = prediction.autoregressive_step_s
    return WholeRequests(
        prediction=prediction,
        output_len=output_len,
        alone=Cycle(token_s=alone_s, step_s=alone_s, **common),
        drafted=Cycle(token_s=prediction.tpot_s, step_s=prediction.step_s, **common),
    )
