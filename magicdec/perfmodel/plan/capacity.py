"""How many devices keep limits on percentiles under arrivals, with and without speculation.

A first answer is analytic: by Little's law a replica that holds b requests for so long serves b / time of them, and of
each draft's rows of the search the one with the highest rate within the limits says how many replicas a rate takes, and
with which draft and gamma. Layouts near the fewest devices are then simulated, with fewer and more replicas, and the
simulation decides. A draft is run by the plan's table of gammas by batch, which engines can follow as they are; its
other policies are simulated where it is best: one gamma, and the table by batch and context.

The interval of a percentile is of repeats with other seeds, and of all costs being larger or smaller by the engine's
error: costs that are f times as large are arrivals f times as fast, in time that runs f times as slowly.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import msgspec
import numpy as np
from joblib import Parallel, delayed
from joblib.parallel import get_active_backend

from magicdec.counts import Z_90
from magicdec.errors import CapacityError, ConfigError, unknown_choice
from magicdec.perfmodel.plan.drafts import draft_options
from magicdec.perfmodel.plan.gamma import gamma_table
from magicdec.perfmodel.plan.request import Device, DraftOption, Lengths, PlanRequest, engine_of, lengths_of, resolve
from magicdec.perfmodel.plan.search import search
from magicdec.perfmodel.traffic.requests import Requests, Schedule, drawn, read_requests
from magicdec.perfmodel.traffic.simulate import WARM_UP, Balance, Outcome, Server, simulate
from magicdec.plan_document import Candidate, Moment, Percentiles, Traffic, TrafficLoad
from magicdec.progress import Progress, Stages, Step
from magicdec.specs.gamma_table import TableGamma
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import draft_kind
from magicdec.specs.workload import RequestShape, WorkloadSpec
from magicdec.units import format_seconds

MIN_REQUESTS, MAX_REQUESTS, SPAN_S = 500, 3000, 400.0
"""Requests that are drawn for a rate: those of so long a time, within limits."""
MAX_SHAPES = 512
"""Requests of a trace that stand for its lengths in the analytic answer."""
MOST_DEVICES = 4096
MOST_DRAFTS = 3
"""Drafts that are simulated at each tp size, by the analytic answer's order."""
CLOSE = 1.5
"""Layouts are simulated that take up to so many times the fewest devices, by the analytic answer."""
SEEDS = 3
WINDOWS = 5
"""Equal parts of a schedule, in each of which limits are to hold."""
MOST_SCHEDULED = 20_000
DISAGREEMENT = 0.1
LEAST_GAIN = 0.01
"""Speculation pays where requests are faster by more than this."""
SHARES = (0.25, 0.5, 0.7, 0.85, 1.0, 1.15, 1.4, 1.7)
"""Points of the curves, as shares of the rate that was asked for."""
MAX_MOMENTS = 200
POLICIES = ("fixed", "by batch", "by batch and context")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One draft (or none) at one tp size, with the analytic answer."""

    device: Device
    option: DraftOption | None
    row: Candidate
    """The row with the highest rate within the limits."""
    policy: TableGamma | None = None
    policy_name: str = "off"

    @property
    def rate(self) -> float:
        """Requests per second of one replica, by Little's law."""
        return (self.row.requests_per_s or 0.0) / self.row.num_replicas

    def server(self, requests: Requests) -> Server:
        setup = self.device.setup(self.option)
        acceptance = self.option.acceptance if self.option is not None else None
        return Server.of(
            setup, requests, tp_size=self.row.tp_size, acceptance=acceptance, policy=self.policy,
            budget=self.row.draft_budget,
        )  # fmt: skip

    def with_policy(self, name: str) -> Layout:
        """The layout with its gamma fixed, or from the plan's table by batch, or by batch and context."""
        if name == "fixed":
            policy = TableGamma(batch_sizes=(1,), context_lens=(1,), gammas=((self.row.gamma,),))
            return dataclasses.replace(self, policy=policy, policy_name=f"gamma {self.row.gamma}")
        assert self.option is not None
        device = dataclasses.replace(self.device, options=(self.option,))
        table, _ = gamma_table(device, self.row, self.row)
        rows = table.gamma_of_steps
        contexts = table.context_lens
        if name == "by batch":
            near = int(np.argmin(np.abs(np.log(np.array(contexts) / self.row.context_len))))
            contexts, rows = [contexts[near]], [[row[near]] for row in rows]
        policy = TableGamma(
            batch_sizes=tuple(table.batch_sizes), context_lens=tuple(contexts), gammas=tuple(map(tuple, rows))
        )
        return dataclasses.replace(self, policy=policy, policy_name=name)


@dataclass(frozen=True, kw_only=True)
class Load:
    """The question: arrivals, and limits on the 95th percentiles."""

    request: PlanRequest
    workload: WorkloadSpec
    trace: Requests | None
    schedule: Schedule | None = None
    """A rate that changes over time."""

    @classmethod
    def of(cls, request: PlanRequest, model: ModelSpec) -> Load:
        """Raises ConfigError for what is lacking, or a request that the model cannot read."""
        trace = read_requests(request.requests) if request.requests is not None else None
        schedule = Schedule.of(request.rate) if isinstance(request.rate, str) else None
        if trace is not None:
            if request.workload is not None or request.cached_len:
                raise ConfigError("--requests says lengths and what is cached; leave --workload and --cached out")
            if schedule is not None:
                raise ConfigError("--requests says when requests arrive; give one --rate with it, or none")
            if request.rate is None and not trace.rate:
                raise ConfigError(f"{request.requests} holds arrivals at one time only; give --rate too")
            longest = int(np.argmax(trace.prompt_len + trace.output_len))
            if trace.lengths[1] > model.longest_context:
                raise ConfigError(
                    f"request {longest + 1} of {request.requests} has {trace.lengths[1]} tokens, prompt and output "
                    f"together; {model.name} reads at most {model.longest_context}"
                )
            chosen = np.unique(np.linspace(0, len(trace) - 1, min(len(trace), MAX_SHAPES)).astype(int))
            counted = Counter(zip(trace.prompt_len[chosen].tolist(), trace.output_len[chosen].tolist(), strict=True))
            shapes = (RequestShape(prompt_len=p, gen_len=g, weight=n) for (p, g), n in counted.items())
            workload = WorkloadSpec(requests=tuple(shapes))
        elif request.workload is not None:
            workload = request.workload
        elif request.gen_len:
            (context, *others) = request.context_lens
            if others:
                raise ConfigError("a plan for a rate takes one --context; a --workload holds several")
            workload = WorkloadSpec(requests=(RequestShape(prompt_len=context, gen_len=request.gen_len),))
        else:
            raise ConfigError("a rate needs lengths: --gen-len with --context, --workload, or --requests")
        return cls(request=request, workload=workload, trace=trace, schedule=schedule)

    @property
    def rate(self) -> float:
        """Requests per second, the mean of a schedule."""
        if self.schedule is not None:
            return self.schedule.mean
        asked = self.request.rate
        return cast(float, asked) if asked is not None else cast(Requests, self.trace).rate

    @property
    def peak(self) -> float:
        """The highest rate."""
        return self.rate if self.schedule is None else float(self.schedule.rates.max())

    def requests(self, rate: float, seed: int = 0) -> Requests:
        """A trace at this rate, or as many requests as its mean takes to show."""
        if self.trace is not None:
            return self.trace.at_rate(rate) if self.trace.rate else dataclasses.replace(self.trace)
        request = self.request
        shape: dict[str, Any] = {
            "workload": self.workload, "burstiness": request.burstiness, "cached_len": request.cached_len, "seed": seed,
        }  # fmt: skip
        if self.schedule is None:
            return drawn(int(min(max(rate * SPAN_S, MIN_REQUESTS), MAX_REQUESTS)), rate=rate, **shape)
        schedule = self.schedule.at_rate(rate)
        enough = schedule.count + 10.0 * math.sqrt(schedule.count * max(request.burstiness, 1.0)) + 10.0
        return schedule.paced(drawn(int(enough), rate=1.0, **shape))

    def kept_by(self, outcome: Outcome) -> bool:
        """Whether an outcome keeps the limits; those of a schedule in each of its WINDOWS."""
        if outcome.is_overloaded:
            return False
        limits = ((self.request.ttft_p95_s, "ttft_s"), (self.request.tpot_p95_s, "tpot_s"))
        parts = [outcome] if self.schedule is None else outcome.windows(WINDOWS)
        seconds = ((limit, getattr(part, name)) for part in parts for limit, name in limits if limit is not None)
        return all(not len(each) or np.quantile(each, 0.95) <= limit for limit, each in seconds)


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A layout with its tables, simulated at any rate on any number of replicas."""

    load: Load
    layout: Layout
    outcomes: dict[tuple[float, int, int], Outcome] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def server(self) -> Server:
        return self.layout.server(self.load.requests(self.load.rate))

    def at(self, rate: float, replicas: int, *, seed: int = 0) -> Outcome:
        key = (rate, replicas, seed)
        if key not in self.outcomes:
            balance = cast(Balance, self.load.request.balance)
            warm_up = WARM_UP if self.load.trace is None and self.load.schedule is None else 0.0
            requests = self.load.requests(rate, seed)
            self.outcomes[key] = simulate(
                self.server, requests, replicas=replicas, balance=balance, seed=seed, warm_up=warm_up
            )
        return self.outcomes[key]

    def keeps(self, rate: float, replicas: int) -> bool:
        return self.load.kept_by(self.at(rate, replicas))

    def fewest(self, most_devices: int) -> int | None:
        """The fewest replicas that keep the limits, by simulation from the analytic number on."""
        rate, most = self.load.rate, most_devices // self.layout.row.num_gpus
        high = min(max(int(np.ceil(self.load.peak / max(self.layout.rate, 1e-9))), 1), max(most, 1))
        low = 0
        while high <= most and not self.keeps(rate, high):
            low, high = high, max(high + 1, int(high * 1.5))
            high = most if low < most < high else high
        if high > most:
            return None
        step = 1
        while high > low + 1:
            middle = max(high - step, low + 1)
            low, high, step = (low, middle, 2 * step) if self.keeps(rate, middle) else (middle, high, 1)
        return high

    def highest_rate(self, replicas: int) -> float:
        """The highest rate that so many replicas keep the limits at, within 2 %: no less than the one asked for where
        they keep them at that."""
        low = self.load.rate if self.keeps(self.load.rate, replicas) else 0.0
        high = max(self.layout.rate * replicas, 1.02 * low, 1e-3)
        while self.keeps(high, replicas):
            low, high = high, 1.5 * high
        while high - low > 0.02 * high:
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self.keeps(middle, replicas) else (low, middle)
            if high < 1e-4:
                return 0.0
        return low


def plan_traffic(request: PlanRequest, model: ModelSpec, progress: Progress) -> Traffic:
    """The fewest devices, simulated.

    Raises:
        ConfigError: lengths or limits that are lacking or contradict each other.
        CapacityError: a load that nothing keeps; the message says what the best keeps.
    """
    if len(request.hardware) > 1:
        raise ConfigError("a plan for a rate is of one kind of device; give one --hardware")
    load = Load.of(request, model)
    if load.schedule is not None and load.schedule.count > MOST_SCHEDULED:
        raise ConfigError(
            f"{load.schedule.count:.0f} requests are too many to plan with; a schedule may have {MOST_SCHEDULED}"
        )
    layouts = _layouts(load, model)
    most = request.num_gpus or MOST_DEVICES
    stages = Stages(progress, (1.0, 3.0, 4.0))
    alone, drafted = (
        _fewest(load, [each for each in layouts if (each.option is not None) == is_drafted], most, stages.stage(number))
        for number, is_drafted in enumerate((False, True))
    )
    found = [each for each in (alone, drafted) if each is not None]
    if not found:
        raise _nothing_keeps(load, layouts, most)
    best, replicas = min(found, key=_worth)
    points = [_point(tried, count, load.rate, is_full=True) for tried, count in found]
    every = [tried for tried, _ in found]
    if best.layout.option is not None:
        every += [Tried(load=load, layout=best.layout.with_policy(name)) for name in (POLICIES[0], POLICIES[2])]
    curves = _curves(every, load, replicas * best.layout.row.num_gpus, stages.stage(2))
    outcome = best.at(load.rate, replicas)
    chosen = points[found.index((best, replicas))]
    return Traffic(
        rate_per_s=load.rate, num_requests=len(outcome.requests), best=chosen,
        autoregressive=next((each for each in points if not each.is_speculative), None),
        speculative=next((each for each in points if each.is_speculative), None),
        curves=curves, timeline=_timeline(outcome),
        notes=[*_where_it_pays(curves), *_notes(load, best, replicas, chosen)],
    )  # fmt: skip


def simulated(
    request: PlanRequest, model: ModelSpec, *, replicas: int = 1, policy: str = "by batch", seed: int = 0
) -> Outcome:
    """So many replicas at the tp size given (default: the node's), with the draft that is named, or without one.

    Raises ConfigError for a draft whose acceptance is unknown, or a policy that is none of POLICIES.
    """
    if policy not in POLICIES:
        raise unknown_choice("policy", policy, POLICIES)
    load, is_drafted = Load.of(request, model), request.names_a_draft and request.draft != "none" and request.gamma != 0
    asked = request if is_drafted else msgspec.structs.replace(request, draft="none", draft_method=None)
    free = dataclasses.replace(load, request=msgspec.structs.replace(asked, ttft_p95_s=None, tpot_p95_s=None))
    layouts = _layouts(free, model, widest=True)
    able = [each for each in layouts if (each.option is not None) == is_drafted]
    if not able:
        raise ConfigError(f"no acceptance is known for this draft of {model.name}; give acceptance_rate")
    layout = able[-1].with_policy(policy) if is_drafted else able[-1]
    return Tried(load=load, layout=layout).at(load.rate, replicas, seed=seed)


def _worth(found: tuple[Tried, int]) -> tuple[int, float]:
    """Fewer devices first, then a higher rate by the analytic answer."""
    tried, replicas = found
    return tried.layout.row.num_gpus * replicas, -tried.layout.rate * replicas


def _layouts(load: Load, model: ModelSpec, *, widest: bool = False) -> list[Layout]:
    """Each way to spread a replica (`widest`: the usual one at its largest tp size alone) without a draft, and with the
    drafts that serve most there by the analytic answer, of those that a release of the engine runs unless one was asked
    for."""
    lengths = lengths_of(msgspec.structs.replace(load.request, workload=load.workload))[0]
    request = msgspec.structs.replace(
        load.request, workload=load.workload, num_gpus=load.request.num_gpus or _node(load.request, model, lengths),
        tpot_limit_s=load.request.tpot_p95_s, ttft_limit_s=load.request.ttft_p95_s,
    )  # fmt: skip
    hardware = request.hardware[0]
    engine, context = engine_of(request, hardware), int(lengths.prompt_len)
    options, _ = draft_options(model, request, engine=engine, context=context)
    ways = resolve(request, model, hardware, options, lengths)
    sizes = [(way, tp) for way in ways for tp in way.tp_sizes]
    found: list[Layout] = []
    refused: list[CapacityError] = []
    for way, tp in [(ways[0], max(ways[0].tp_sizes))] if widest else sizes:
        one = dataclasses.replace(way, tp_sizes=(tp,), searches_batch=True)
        released = tuple(
            each
            for each in one.options
            if request.names_a_draft or draft_kind(each.draft, each.method) not in engine.draft_notes
        )
        try:
            here = _best_rows(dataclasses.replace(one, options=released))
            if not any(each.option for each in here) and len(released) < len(one.options):
                here = _best_rows(one)
        except CapacityError as error:
            refused.append(error)
            continue
        found += [each for each in here if each.option is None]
        drafted = sorted((each for each in here if each.row.is_speculative), key=lambda each: each.rate)
        found += [each.with_policy("by batch") for each in drafted[-MOST_DRAFTS:]]
    if not found:
        raise (
            refused[0]
            if refused
            else CapacityError(
                "nothing keeps the limits on latency, not even for one request at a time on an idle device"
            )
        )
    return found


def _best_rows(device: Device) -> list[Layout]:
    """The row of each draft, and of none, that serves most within the limits."""
    found = ((each.option, max(each.rows, key=lambda row: row.requests_per_s or 0.0)) for each in search(device, None))
    return [Layout(device=device, option=option, row=row) for option, row in found]


def _node(request: PlanRequest, model: ModelSpec, lengths: Lengths) -> int | None:
    """Devices of a node, over which layouts are searched where none was given."""
    if request.tp_size or request.dp_attention or max(request.pp_size or 1, request.ep_size or 1) > 1:
        return None
    device = resolve(msgspec.structs.replace(request, num_gpus=None), model, request.hardware[0], [], lengths)[0]
    return max(device.tp_sizes)


def _each(call: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], progress: Progress, what: str) -> list[Any]:
    """The results of all jobs, by joblib's backend."""
    way = "generator" if get_active_backend()[0].supports_return_generator else "list"
    results: list[Any] = []
    progress(Step(what, done=0, total=max(len(jobs), 1)))
    for result in Parallel(return_as=way)(delayed(call)(*job) for job in jobs):
        results.append(result)
        progress(Step(what, done=len(results), total=len(jobs)))
    return results


def _fewest(load: Load, layouts: list[Layout], most: int, progress: Progress) -> tuple[Tried, int] | None:
    """The layout and number of replicas with the fewest devices."""

    def analytic(layout: Layout) -> float:
        return layout.row.num_gpus * float(np.ceil(load.peak / max(layout.rate, 1e-9)))

    ranked = sorted(layouts, key=analytic)
    close = [each for each in ranked if analytic(each) <= CLOSE * analytic(ranked[0])]
    tried = [Tried(load=load, layout=each) for each in close]
    counts = _each(Tried.fewest, [(each, most) for each in tried], progress, "simulating layouts")
    kept = [(each, count) for each, count in zip(tried, counts, strict=True) if count is not None]
    return min(kept, key=_worth, default=None)


def _nothing_keeps(load: Load, layouts: list[Layout], most: int) -> CapacityError:
    """The error for a load that so many devices do not keep, with the highest rate that they do."""
    rates = []
    for layout in layouts:
        if (replicas := most // layout.row.num_gpus) and layout.rate:
            rates.append((Tried(load=load, layout=layout).highest_rate(replicas), layout, replicas))
    if not rates or not max(rates, key=lambda each: each[0])[0]:
        return CapacityError(f"nothing keeps the limits at {load.rate:g} requests/s, nor at any lower rate")
    best, layout, replicas = max(rates, key=lambda each: each[0])
    return CapacityError(
        f"{most} devices do not keep the limits at {load.rate:g} requests/s; {replicas} x {layout.row.layout} keep "
        f"them up to {best:.2g}"
    )


def _point(tried: Tried, replicas: int, rate: float, *, is_full: bool = False) -> TrafficLoad:
    """A simulated load; `is_full` adds intervals and the highest rate that the same devices keep."""
    row, request, outcome = tried.layout.row, tried.load.request, tried.at(rate, replicas)
    held = [each.timeline for each in outcome.replicas]
    price, gpus = tried.layout.device.hardware.price_per_hour_usd, row.num_gpus * replicas
    per_second = outcome.tokens_per_s
    more: dict[str, Any] = {}
    if is_full:
        more = {"highest_rate_per_s": tried.highest_rate(replicas), **_intervals(tried, replicas, rate, outcome)}
    overloaded = outcome.is_overloaded
    return TrafficLoad(
        draft=row.draft, draft_method=row.draft_method, draft_budget=row.draft_budget, gamma=row.gamma,
        policy=tried.layout.policy_name, tp_size=row.tp_size, pp_size=row.pp_size, dp_size=row.dp_size,
        ep_size=row.ep_size, num_replicas=replicas, rate_per_s=rate,
        overloaded=overloaded, within_limits=tried.load.kept_by(outcome),
        ttft=None if overloaded else Percentiles.of(outcome.ttft_s),
        tpot=None if overloaded else Percentiles.of(outcome.tpot_s),
        request=None if overloaded else Percentiles.of(outcome.e2e_s),
        goodput_per_s=outcome.goodput(request.ttft_p95_s, request.tpot_p95_s),
        output_tokens_per_s=per_second, preemptions=outcome.preemptions,
        mean_batch=_mean(held, 1), mean_waiting=_mean(held, 2),
        kv_share=_mean(held, 3) / tried.server.limits.num_blocks,
        analytic_rate_per_s=tried.layout.rate * replicas,
        cost_per_million_tokens_usd=None if not price else price / 3600.0 * gpus / per_second * 1e6, **more,
    )  # fmt: skip


def _mean(timelines: list[list[tuple[float, int, int, int]]], column: int) -> float:
    """Mean over time, and over replicas, of a column of their timelines."""
    means = []
    for timeline in timelines:
        if len(timeline) > 1:
            table = np.array(timeline)
            means.append(float(np.average(table[:-1, column], weights=np.maximum(np.diff(table[:, 0]), 1e-12))))
    return float(np.mean(means)) if means else 0.0


def _intervals(tried: Tried, replicas: int, rate: float, outcome: Outcome) -> dict[str, Any]:
    """90 % intervals of the 95th percentiles; no upper end where costs that are so much larger are too much."""
    setup = tried.layout.device.setup(tried.layout.option)
    factor = float(np.exp(Z_90 * setup.engine.error_for(setup.hardware.name, setup.model.name)))
    slow, fast = tried.at(rate * factor, replicas), tried.at(rate / factor, replicas)
    others = [tried.at(rate, replicas, seed=seed) for seed in range(1, SEEDS)]

    def of(read: Callable[[Outcome], Any]) -> tuple[float, float | None]:
        values = [float(np.quantile(read(each), 0.95)) for each in (outcome, *others)]
        noise = Z_90 * float(np.std(values, ddof=1)) / values[0]
        low, high = (float(np.quantile(read(each), 0.95)) / values[0] for each in (fast, slow))
        down, up = math.hypot(1.0 - low / factor, noise), math.hypot(high * factor - 1.0, noise)
        return max(values[0] * (1.0 - down), 0.0), None if slow.is_overloaded else values[0] * (1.0 + up)

    ttft, tpot = of(lambda each: each.ttft_s), of(lambda each: each.tpot_s)
    return {
        "ttft_p95_low_s": ttft[0], "ttft_p95_high_s": ttft[1], "tpot_p95_low_s": tpot[0], "tpot_p95_high_s": tpot[1],
    }  # fmt: skip


def _curves(tried: list[Tried], load: Load, devices: int, progress: Progress) -> list[TrafficLoad]:
    """Each layout over rates, on the same number of devices."""
    counts = [max(devices // each.layout.row.num_gpus, 1) for each in tried]
    jobs = [(each, n, share * load.rate) for each, n in zip(tried, counts, strict=True) for share in SHARES]
    return _each(_point, jobs, progress, "simulating rates")


def _timeline(outcome: Outcome) -> list[Moment]:
    """The first replica's batch, queue and cache, at most so many moments."""
    replica = outcome.replicas[0]
    every = replica.timeline
    kept = every[:: max(1, -(-len(every) // MAX_MOMENTS))]
    blocks = replica.limits.num_blocks
    return [
        Moment(time_s=at, batch=batch, waiting=waiting, kv_share=used / blocks) for at, batch, waiting, used in kept
    ]


def _where_it_pays(curves: list[TrafficLoad]) -> list[str]:
    """Up to which rate each policy makes the median request faster than without a draft on the same devices."""
    alone = {each.rate_per_s: each.request for each in curves if not each.is_speculative}
    said: dict[str, list[str]] = {}
    for policy in dict.fromkeys(each.policy for each in curves if each.is_speculative):
        gains = []
        for each in (each for each in curves if each.policy == policy):
            if (without := alone.get(each.rate_per_s)) is not None:
                gains.append((each.rate_per_s, without.p50 / each.request.p50 if each.request is not None else 0.0))
        if not gains:
            continue
        paid = next((place for place, (_, gain) in enumerate(gains) if gain < 1.0 + LEAST_GAIN), len(gains))
        if paid == 0:
            found = f"speculation does not pay at {gains[0][0]:.3g} requests/s, nor above"
        else:
            rate, gain = gains[paid - 1]
            found = f"the median request is {gains[0][1]:.2f} times as fast at {gains[0][0]:.3g} requests/s"
            found += f", {gain:.2f} times at {rate:.3g}"
            found += "" if paid == len(gains) else f", and it stops paying below {gains[paid][0]:.3g}"
        said.setdefault(found, []).append(policy if policy.startswith("gamma") else f"gamma {policy}")
    return [f"with {', '.join(names)}: {found}" for found, names in said.items()]


def _notes(load: Load, best: Tried, replicas: int, chosen: TrafficLoad) -> list[str]:
    notes, highest = [], chosen.highest_rate_per_s or 0.0
    if load.schedule is not None:
        notes.append(
            f"rates are the means of a schedule, whose peak is {load.peak / load.rate:.3g} times as high "
            f"({load.peak:.3g} requests/s here); limits are kept in each of {WINDOWS} equal parts of it"
        )
    analytic = best.layout.rate * replicas
    if highest and abs(analytic / highest - 1.0) > DISAGREEMENT:
        notes.append(
            f"without arrivals and percentiles these devices would keep {analytic:.3g} requests/s (Little's law over "
            f"mean times); simulated, {highest:.3g}"
        )
    if chosen.ttft_p95_high_s is None:
        notes.append("the costs' own error is large enough for these devices to be too few; plan for some room")
    limit = load.request.ttft_p95_s
    if limit is not None and chosen.ttft_p95_high_s is not None and chosen.ttft_p95_high_s > limit:
        notes.append(f"p95 of TTFT may reach {format_seconds(chosen.ttft_p95_high_s)} by the costs' own error")
    return notes
