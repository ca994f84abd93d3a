"""Replicas behind a balancer, and what their users see.

    TTFT = first token − sending                TPOT = (last − first token) / (output − 1)

A system is overloaded where, over the second half of the arrivals, at least OVERLOAD of them join
those that wait and the queue has grown. No percentile is stated then, since it would only reflect
how long was simulated. Where the rate changes, each span between `edges_s` is judged so too: a peak
in the middle is over by the second half. Percentiles of drawn traffic leave out the first WARM_UP
of the requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from magicdec.counts import Array
from magicdec.errors import CapacityError
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.memory import prompt_bytes
from magicdec.perfmodel.prefix_cache import found_tokens, hits_of
from magicdec.perfmodel.rate.costs import Costs, nodes, num_blocks, tabulate
from magicdec.perfmodel.rate.drafts import Drafts
from magicdec.perfmodel.rate.replica import Limits, PassLimit, Replica
from magicdec.perfmodel.rate.requests import Requests
from magicdec.perfmodel.setup import Cached, Points, Setup
from magicdec.perfmodel.speedup import predict
from magicdec.schema.gamma_table import TableGamma
from magicdec.specs.speculation import AUTOREGRESSIVE

OVERLOAD = 0.05
WARM_UP = 0.1
LARGE_MEMORY_BYTES = 70e9
"""Devices from which on vLLM takes 1024 sequences at once by default, else 256 (its EngineArgs)."""
BLOCK_SIZE = 16
Balance = Literal["round-robin", "least-loaded"]


@dataclass(frozen=True, kw_only=True)
class Server:
    """One configuration of a replica, with its tables."""

    setup: Setup
    tp_size: int
    costs: Costs
    limits: Limits
    policy: TableGamma | None = None
    drafts: Drafts | None = None

    @classmethod
    def of(
        cls,
        setup: Setup,
        requests: Requests,
        *,
        tp_size: int = 1,
        acceptance: AcceptanceProfile | None = None,
        policy: TableGamma | None = None,
        budget: int | None = None,
        max_sequences: int | None = None,
        max_tokens: int | None = None,
    ) -> Server:
        """A server for requests of such lengths. `policy` chooses gamma where the setup has a
        draft.

        Raises CapacityError, naming the request, for one that does not fit in the cache alone.
        """
        if policy:
            policy = policy.at_context(requests.mean_len)
            gammas = sorted({gamma for row in policy.gammas for gamma in row})
        else:
            gammas = [0]
        spread = setup.spread
        blocks = num_blocks(
            setup,
            tp_size=tp_size,
            mean_len=requests.mean_len,
            budget=budget,
            gamma=max(gammas),
            block_size=BLOCK_SIZE,
        )
        longest = int(np.argmax(requests.prompt_len + requests.output_len))
        needed = (
            int(requests.prompt_len[longest] + requests.output_len[longest])
            + max(gammas)
            + 1
        )
        if needed > blocks * BLOCK_SIZE:
            raise CapacityError(
                f"request {longest + 1} ({requests.prompt_len[longest]} + "
                f"{requests.output_len[longest]} tokens) does "
                f"not fit: the cache of {tp_size * spread.pp} x {setup.hardware.name} holds "
                f"{blocks * BLOCK_SIZE} tokens"
            )
        if setup.hardware.memory_bytes >= LARGE_MEMORY_BYTES:
            usual = 1024
        else:
            usual = 256
        fewest = -(-int(requests.prompt_len.min()) // BLOCK_SIZE)
        limits = Limits(
            max_sequences=spread.dp
            * min(max_sequences or usual, max(blocks // fewest, 1)),
            max_tokens=max_tokens or round(setup.engine.scheduler.prefill_tokens),
            num_blocks=spread.dp * blocks,
            block_size=BLOCK_SIZE,
            reserves_output=setup.engine.scheduler.admission == "whole",
            schedules_ahead=setup.engine.scheduler.steps_ahead > 0,
            latency_s=setup.engine.scheduler.request_latency_s,
            token_latency_s=setup.engine.scheduler.prompt_token_latency_s,
            elsewhere_s=_elsewhere(
                setup, requests, tp_size=tp_size, budget=budget, gamma=max(gammas)
            ),
        )
        low, high = requests.lengths
        span = (low, high + max(gammas) + 1)
        costs = tabulate(
            setup,
            acceptance,
            tp_size=tp_size,
            max_gamma=max(gammas),
            budget=budget,
            lengths=span,
            max_tokens=limits.max_tokens + 1,
            step_factor=_table_factor(setup, gammas),
        )
        drafts = None
        if acceptance is not None and max(gammas):
            drafts = Drafts.of(
                setup, acceptance, budget=budget, gammas=gammas, lengths=span
            )
        return cls(
            setup=setup,
            tp_size=tp_size,
            costs=costs,
            limits=limits,
            policy=policy,
            drafts=drafts,
        )

    @property
    def deepest_gamma(self) -> int:
        """The gamma that the engine is set up for."""
        if self.policy is None:
            return 0
        return max(max(row) for row in self.policy.gammas)

    @property
    def hit_unit(self) -> int:
        """Tokens of which a prefix hit is a whole number."""
        hits = hits_of(
            self.setup,
            Cached(share=1.0),
            tp_size=self.tp_size,
            gamma=self.deepest_gamma,
        )
        return int(hits.unit_tokens)

    def finding(self, requests: Requests) -> Requests:
        """Requests with what this configuration finds of their cached tokens: whole units, less
        those that the draft loses."""
        found = found_tokens(
            self.setup,
            requests.cached_len,
            requests.prompt_len,
            tp_size=self.tp_size,
            gamma=self.deepest_gamma,
        )
        return replace(requests, cached_len=found.astype(np.int64))


def _elsewhere(
    setup: Setup,
    requests: Requests,
    *,
    tp_size: int,
    budget: int | None,
    gamma: int,
) -> Callable[[Any, Any], Array] | None:
    """The time of prompts, of which so many tokens are cached, before they come: their prefill alone
    on as many devices, and the way of their keys and values. None: they are prefilled here.
    """
    if setup.kv_link_bytes_per_s is None:
        return None
    lengths = nodes(1.0, float(requests.prompt_len.max()))
    points = Points(batch=1.0, context=lengths, tp=tp_size, budget=budget, gamma=gamma)
    alone = dataclasses.replace(setup, speculation=AUTOREGRESSIVE, draft_model=None)
    prefill_s = np.broadcast_to(predict(alone, None, points).prefill_s, lengths.shape)
    sent = prompt_bytes(
        setup, prompt_len=lengths, budget=budget, gamma=gamma, tp_size=tp_size
    )
    sent_s = np.broadcast_to(sent / setup.kv_link_bytes_per_s, lengths.shape)

    def before_s(prompt_len: Any, cached_len: Any) -> Array:
        whole_s = np.interp(prompt_len, lengths, prefill_s)
        found_s = np.interp(cached_len, lengths, prefill_s)
        computed_s = whole_s - np.where(np.asarray(cached_len) > 0, found_s, 0.0)
        return np.asarray(computed_s + np.interp(prompt_len, lengths, sent_s))

    return before_s


def _table_factor(setup: Setup, gammas: list[int]) -> float:
    """The factor of steps in an engine whose gamma follows a table of several."""
    if len(gammas) < 2:
        return 1.0
    cost, _, _ = setup.engine.table_costs(setup.speculation.draft)
    return 1.0 + cost


@dataclass(frozen=True, kw_only=True)
class SimulatedTimes:
    """Times of every request, in seconds, in the order of their arrival."""

    requests: Requests
    first_s: Array
    last_s: Array
    replicas: list[Replica] = field(repr=False)
    skipped: int = 0
    """Requests at the beginning that no percentile is of."""
    share: float = 1.0
    """Share of all replicas, and of the load, that was simulated."""
    edges_s: Array = field(default_factory=lambda: np.empty(0), repr=False)
    """Times between which a load whose rate changes is judged; none for a steady one."""

    @cached_property
    def ttft_s(self) -> Array:
        return (self.first_s - self.requests.arrival_s)[self.skipped :]

    @cached_property
    def e2e_s(self) -> Array:
        return (self.last_s - self.requests.arrival_s)[self.skipped :]

    @cached_property
    def tpot_s(self) -> Array:
        """Seconds per token after the first, for requests of several."""
        gaps = self.requests.output_len[self.skipped :] - 1
        return ((self.last_s - self.first_s)[self.skipped :][gaps > 0]) / gaps[gaps > 0]

    @property
    def preemptions(self) -> int:
        """Preemptions on all replicas."""
        return round(sum(replica.preemptions for replica in self.replicas) / self.share)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of all replicas, from the first arrival to the last token."""
        span = max(float(self.last_s.max() - self.requests.arrival_s.min()), 1e-12)
        return float(self.requests.output_len.sum()) / span / self.share

    def goodput(self, ttft_limit_s: float | None, tpot_limit_s: float | None) -> float:
        """Requests per second of all replicas that keep the limits."""
        kept = np.ones(len(self.ttft_s), dtype=np.bool_)
        if ttft_limit_s is not None:
            kept &= self.ttft_s <= ttft_limit_s
        gaps = self.requests.output_len[self.skipped :] - 1
        if tpot_limit_s is not None:
            kept[gaps > 0] &= self.tpot_s <= tpot_limit_s
        arrival = self.requests.arrival_s[self.skipped :]
        if self.is_overloaded:
            span = float(self.last_s[self.skipped :].max() - arrival.min())
        else:
            span = float(np.ptp(arrival))
        return float(kept.sum()) / max(span, 1e-12) / self.share

    @cached_property
    def is_overloaded(self) -> bool:
        """Whether the queue grows without bound, or over a span of a load that changes."""
        arrival = self.requests.arrival_s
        half = float(arrival[len(arrival) // 2])
        end = float(arrival[-1])
        if end > half and self._grows(half, end):
            return True
        return any(self._grows(start, until) for start, until in pairwise(self.edges_s))

    def _grows(self, start_s: float, end_s: float) -> bool:
        """Whether OVERLOAD of the requests that arrive in a span of time add to the queue."""
        arrival = self.requests.arrival_s
        present = _present(arrival, self.last_s, end_s) - _present(
            arrival, self.last_s, start_s
        )
        waiting = _present(arrival, self.first_s, end_s) - _present(
            arrival, self.first_s, start_s
        )
        arrived = int(((arrival >= start_s) & (arrival <= end_s)).sum())
        return min(present, waiting) > max(OVERLOAD * arrived, 3.0)


def _present(arrival_s: Array, until_s: Array, at_s: float) -> int:
    """Requests that have arrived by this time, and not come to what `until_s` says."""
    return int((until_s > at_s).sum() - (arrival_s > at_s).sum())


def simulate(
    server: Server,
    requests: Requests,
    *,
    replicas: int = 1,
    balance: Balance = "round-robin",
    seed: int = 0,
    warm_up: float = 0.0,
    of_replicas: int | None = None,
    edges_s: Array | None = None,
    work: PassLimit | None = None,
) -> SimulatedTimes:
    """The requests on so many replicas, which may stand for `of_replicas`. What is cached of each
    prompt counts as far as the server finds it. `edges_s`: the spans of a load that changes.

    Raises CapacityError for more passes than `work` allows.
    """
    requests = server.finding(requests)
    simulated = []
    for _ in range(replicas):
        simulated.append(
            Replica(
                requests,
                server.costs,
                server.limits,
                policy=server.policy,
                drafts=server.drafts,
                seed=seed,
                work=work,
            )
        )
    for number, arrival in enumerate(requests.arrival_s.tolist()):
        chosen = simulated[number % replicas]
        if balance == "least-loaded" and replicas > 1:
            for replica in simulated:
                replica.run(arrival)
            chosen = min(simulated, key=lambda replica: replica.in_system)
        chosen.submit(number, arrival)
    for replica in simulated:
        replica.run()
    share = replicas / (of_replicas or replicas)
    outcome = _outcome(
        requests, simulated, skipped=int(warm_up * len(requests)), share=share
    )
    if edges_s is None:
        return outcome
    return replace(outcome, edges_s=edges_s)


def simulate_closed(
    server: Server,
    requests: Requests,
    *,
    users: int,
    seed: int = 0,
    work: PassLimit | None = None,
) -> SimulatedTimes:
    """A closed loop: `users` requests at first, and the next whenever one ends.

    Raises CapacityError for more passes than `work` allows.
    """
    requests = replace(server.finding(requests), arrival_s=requests.arrival_s.copy())
    replica = Replica(
        requests,
        server.costs,
        server.limits,
        policy=server.policy,
        drafts=server.drafts,
        seed=seed,
        users=users,
        work=work,
    )
    for number in range(min(users, len(requests))):
        replica.submit(number, 0.0)
    replica.run()
    return _outcome(requests, [replica], skipped=0, share=1.0)


def _outcome(
    requests: Requests, replicas: list[Replica], *, skipped: int, share: float
) -> SimulatedTimes:
    """Each request is of one replica; the others know nothing of it."""
    return SimulatedTimes(
        requests=requests,
        first_s=np.fmax.reduce([replica.first_s for replica in replicas]),
        last_s=np.fmax.reduce([replica.last_s for replica in replicas]),
        replicas=replicas,
        skipped=skipped,
        share=share,
    )
