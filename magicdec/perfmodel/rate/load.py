"""The load of a plan for a rate: which requests arrive when, and which limits they have to keep.

A simulation is as large as the question needs. Under round-robin all replicas see arrivals of the
same law and never wait for each other, so that a few of many stand for all: as many as receive
ENOUGH_REQUESTS in all. With least-loaded balancing at least LEAST_BALANCED are simulated.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import cast

import numpy as np

from magicdec.counts import Array
from magicdec.errors import ConfigError
from magicdec.perfmodel.plan.request import PlanRequest
from magicdec.perfmodel.rate.replica import PassLimit
from magicdec.perfmodel.rate.requests import (
    ALL_TURNS,
    MAX_RATE,
    MIN_RATE,
    Requests,
    Turns,
    drawn,
    read_requests,
)
from magicdec.perfmodel.rate.simulate import SimulatedTimes
from magicdec.specs.model import ModelSpec
from magicdec.specs.workload import RequestShape, WorkloadSpec

LATENCY_LIMITS = ("ttft_limit_s", "tpot_limit_s", "ttft_p95_s", "tpot_p95_s")
MIN_REQUESTS = 500
MAX_REQUESTS = 3000
SPAN_S = 400.0
"""Drawn requests are those of this time, within MIN_REQUESTS and MAX_REQUESTS."""
ENOUGH_REQUESTS = 3000
"""Replicas that receive this many requests in SPAN_S stand for all."""
MAX_SHAPES = 512
"""Requests of a trace that stand for its lengths in the analytic answer."""
LEAST_BALANCED = 8
WINDOWS = 5
"""Equal parts of a trace, in each of which the queue may not grow."""
MAX_WORK = 4_000_000
"""Passes of schedulers that one question may simulate: some minutes of one core."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Arrivals, and limits on latencies: means, and 95th percentiles."""

    request: PlanRequest
    workload: WorkloadSpec
    trace: Requests | None
    work: PassLimit = dataclasses.field(
        default_factory=lambda: PassLimit(MAX_WORK),
        compare=False,
        repr=False,
    )
    samples: bool = True
    """Whether few replicas may stand for many."""

    @classmethod
    def of(cls, request: PlanRequest, model: ModelSpec) -> Load:
        """Raises ConfigError for what is lacking, or a request that the model cannot read."""
        if request.rate is not None and request.rate < MIN_RATE:
            raise ConfigError(
                f"rate must be at least {MIN_RATE:g} requests/s, not {request.rate:g}"
            )
        if request.requests is None:
            return cls(request=request, workload=_workload(request), trace=None)
        trace = read_requests(request.requests)
        if request.workload is not None or request.cached_len:
            raise ConfigError(
                "--requests says lengths and what is cached; leave --workload and --cached out"
            )
        if request.rate is None and not trace.rate:
            raise ConfigError(
                f"{request.requests} holds arrivals at one time only (more than {MAX_RATE:g} in "
                "a second); give --rate too"
            )
        _check_lengths(trace, request.requests, model)
        return cls(request=request, workload=_shapes(trace), trace=trace)

    @property
    def rate(self) -> float:
        """Requests per second."""
        if self.request.rate is not None:
            return self.request.rate
        return cast(Requests, self.trace).rate

    def edges_s(self, requests: Requests) -> Array | None:
        """Times between which a load that changes is judged: the WINDOWS of a trace. None for a
        constant rate.
        """
        if self.trace is None:
            return None
        first, last = requests.arrival_s[[0, -1]]
        return np.unique(np.linspace(first, last, WINDOWS + 1))

    def replicas(self, rate: float, replicas: int) -> int:
        """Replicas to simulate of so many that share this rate."""
        if not self.samples:
            return replicas
        if self.trace is not None:
            arriving = float(len(self.trace))
        else:
            arriving = rate * SPAN_S
        enough = math.ceil(ENOUGH_REQUESTS * replicas / max(arriving, 1.0))
        if self.request.balance == "least-loaded":
            enough = max(enough, LEAST_BALANCED)
        return min(max(enough, 1), replicas)

    def requests(self, rate: float, replicas: int = 1, *, seed: int = 0) -> Requests:
        """The requests of the replicas that are simulated: the trace's at this rate, or as many as
        its mean takes to show.
        """
        turns = Turns(mine=self.replicas(rate, replicas), every=replicas)
        is_in_turns = self.request.balance != "least-loaded"
        if self.trace is not None:
            traced = self._traced(self.trace, rate, seed)
            return traced.part(
                turns.of(len(traced)) if is_in_turns else turns.evenly(len(traced))
            )
        count = min(max(rate * turns.share * SPAN_S, MIN_REQUESTS), MAX_REQUESTS)
        if not is_in_turns:
            rate = rate * turns.share
            turns = ALL_TURNS
        return self._drawn(int(count), rate, turns, seed)

    def _drawn(self, count: int, rate: float, turns: Turns, seed: int) -> Requests:
        requests = drawn(
            count,
            rate=rate,
            workload=self.workload,
            burstiness=self.request.burstiness,
            seed=seed,
            turns=turns,
        )
        cached = self.request.cached.of(requests.prompt_len).astype(np.int64)
        return dataclasses.replace(requests, cached_len=cached)

    def _traced(self, trace: Requests, rate: float, seed: int) -> Requests:
        """The trace at another rate; a trace whose requests all arrive at once takes drawn
        arrivals."""
        if trace.rate:
            return trace.at_rate(rate)
        arrivals = drawn(
            len(trace),
            rate=rate,
            workload=self.workload,
            burstiness=self.request.burstiness,
            seed=seed,
        )
        return dataclasses.replace(trace, arrival_s=arrivals.arrival_s)

    def excess(self, outcome: SimulatedTimes) -> float:
        """The largest of the limited times, over its limit; infinite where the queue grows."""
        if outcome.is_overloaded:
            return math.inf
        asked = self.request
        return max(
            _over(outcome.ttft_s, mean=asked.ttft_limit_s, p95=asked.ttft_p95_s),
            _over(outcome.tpot_s, mean=asked.tpot_limit_s, p95=asked.tpot_p95_s),
        )

    @property
    def has_limits(self) -> bool:
        """Whether a latency is limited; else a load is kept where its queue does not grow."""
        return self.ttft_limit_s is not None or self.tpot_limit_s is not None

    @property
    def ttft_limit_s(self) -> float | None:
        """The limit that a single request is held to."""
        return _tighter(self.request.ttft_p95_s, self.request.ttft_limit_s)

    @property
    def tpot_limit_s(self) -> float | None:
        """The limit that a single request is held to."""
        return _tighter(self.request.tpot_p95_s, self.request.tpot_limit_s)


def _workload(request: PlanRequest) -> WorkloadSpec:
    """The lengths of drawn requests."""
    if request.workload is not None:
        return request.workload
    if not request.gen_len:
        raise ConfigError(
            "a rate needs lengths: --gen-len with --context, --workload, or --requests"
        )
    (context, *others) = request.context_lens
    if others:
        raise ConfigError(
            "a plan for a rate takes one --context; a --workload holds several"
        )
    return WorkloadSpec(
        requests=(RequestShape(prompt_len=context, gen_len=request.gen_len),)
    )


def _check_lengths(trace: Requests, path: str, model: ModelSpec) -> None:
    tokens = trace.prompt_len + trace.output_len
    longest = int(np.argmax(tokens))
    if tokens[longest] > model.longest_context:
        raise ConfigError(
            f"request {longest + 1} of {path} has {tokens[longest]} tokens, prompt and output "
            f"together; {model.name} reads at most {model.longest_context}"
        )


def _shapes(trace: Requests) -> WorkloadSpec:
    """The lengths of evenly chosen requests, weighted."""
    count = min(len(trace), MAX_SHAPES)
    chosen = np.unique(np.linspace(0, len(trace) - 1, count).astype(int))
    prompts = trace.prompt_len[chosen].tolist()
    outputs = trace.output_len[chosen].tolist()
    counted = Counter(zip(prompts, outputs, strict=True))
    shapes = []
    for (prompt, output), weight in counted.items():
        shapes.append(RequestShape(prompt_len=prompt, gen_len=output, weight=weight))
    return WorkloadSpec(requests=tuple(shapes))


def _over(seconds: Array, *, mean: float | None, p95: float | None) -> float:
    """The larger of the mean and the 95th percentile, each over its limit."""
    shares = [0.0]
    if len(seconds) and mean is not None:
        shares.append(float(seconds.mean()) / mean)
    if len(seconds) and p95 is not None:
        shares.append(float(np.quantile(seconds, 0.95)) / p95)
    return max(shares)


def _tighter(first: float | None, second: float | None) -> float | None:
    given = [limit for limit in (first, second) if limit is not None]
    return min(given, default=None)
