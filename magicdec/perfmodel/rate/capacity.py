"""How many devices keep limits on latencies under arrivals, with and without speculation.

A first answer is analytic (layouts.py). Layouts near the fewest devices are then simulated, with
fewer and more replicas, and the simulation decides (trials.py): the fewest devices, then the highest
rate that they keep. A draft is run by the plan's table of gammas by batch, or by one gamma where
following a table costs its engine more than it gains (plan/tables.py).

The chosen layout, and that without a draft, are simulated again where all costs are at the 5th and
the 95th percentile of the time per token's distribution: the intervals of the rate that their
devices keep and of the devices that the load takes are between the two; those of latencies' 95th
percentiles add repeats with other seeds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from joblib import Parallel, delayed
from joblib.parallel import get_active_backend

from magicdec.counts import Z_90, Array
from magicdec.errors import CapacityError, ConfigError
from magicdec.perfmodel.intervals import interval, step_errors, tokens_error
from magicdec.perfmodel.plan.drafts import draft_options
from magicdec.perfmodel.plan.explain import LEAST_LOSS, hits_lost, keeping_last_unit
from magicdec.perfmodel.plan.request import Case, PlanRequest
from magicdec.perfmodel.rate.layouts import ServedLayout, served_layouts
from magicdec.perfmodel.rate.load import LATENCY_LIMITS, Load
from magicdec.perfmodel.rate.simulate import SimulatedTimes
from magicdec.perfmodel.rate.trials import RATIO, Trial
from magicdec.perfmodel.setup import Points
from magicdec.perfmodel.speedup import predict
from magicdec.progress import Progress, Stages, StepMessage
from magicdec.schema.plan import Percentiles, Reason, Traffic, TrafficLoad
from magicdec.specs.model import ModelSpec
from magicdec.units import MEGA, SECONDS_PER_HOUR, format_percent, format_seconds

MOST_DEVICES = 4096
CLOSE = 1.5
"""Largest number of devices of a simulated layout, as a multiple of the analytic answer's
fewest."""
SEEDS = 3
DISAGREEMENT = 0.1
LEAST_GAIN = 0.01
"""Speculation pays where requests are faster by more than this."""
SHARES = tuple(RATIO**step for step in (-70, -35, -18, -8, 0, 7, 17, 27))
"""Points of the curves, as shares of the requested rate: 0.25 to 1.7, steps of what searches try."""


@dataclass(frozen=True, kw_only=True)
class Settled:
    """The answer for a rate, and the layout that it is of."""

    traffic: Traffic
    layout: ServedLayout


@dataclass(frozen=True, kw_only=True, eq=False)
class SizedLayout:
    """A layout, and the fewest replicas of it that keep the limits."""

    trial: Trial
    replicas: int

    @property
    def layout(self) -> ServedLayout:
        return self.trial.layout

    @property
    def num_gpus(self) -> int:
        return self.layout.row.num_gpus * self.replicas

    @property
    def analytic(self) -> float:
        """Requests per second by Little's law."""
        return self.layout.rate * self.replicas


def _lacking(case: Case) -> list[str]:
    """Why a draft that was asked for is not served."""
    request = case.request
    if "none" in (request.draft, request.draft_method):
        return ["no draft was asked for"]
    if not request.names_a_draft:
        return []
    context = int(case.lengths.prompt_len)
    _, lacking = draft_options(case.model, request, engine=case.engine, context=context)
    return [draft.reason for draft in lacking]


@dataclass(frozen=True, kw_only=True)
class OpenInterval:
    """A 90 % interval. `high` None: it has no upper end."""

    low: float | None = None
    high: float | None = None


def plan_traffic(request: PlanRequest, model: ModelSpec, progress: Progress) -> Settled:
    """The fewest devices that keep the limits, found by simulation; of a number of devices that was
    given and is too small, what they keep.

    Raises:
        ConfigError: lengths or limits that are missing or contradict each other.
        CapacityError: no layout keeps the limits at any rate, no number of devices keeps the load,
        or the simulation takes too long.
    """
    if len(request.hardware) > 1:
        raise ConfigError(
            "a plan for a rate takes one kind of device; give one --hardware"
        )
    load = Load.of(request, model)
    layouts = served_layouts(load, model)
    stages = Stages(progress, (1.0, 4.0, 2.0, 5.0))
    plain = [layout for layout in layouts if layout.option is None]
    drafted = [layout for layout in layouts if layout.option is not None]
    alone = _fewest(load, plain, MOST_DEVICES, stages.stage(0))
    speculative = _fewest(load, drafted, MOST_DEVICES, stages.stage(1))
    kept = [answer for answer in (alone, speculative) if answer is not None]
    given = request.num_gpus or MOST_DEVICES
    best = _best_of([answer for answer in kept if answer.num_gpus <= given])
    shown = kept
    if best is None:
        best = _keeping_most(load, layouts, given)
        if request.num_gpus is None:
            raise _too_much(best)
        shown = [best]
    curves = _curves(shown, best, stages.stage(2))
    answers = list(dict.fromkeys([*kept, best]))
    points = {}
    for done, answer in enumerate(answers):
        message = f"searching the highest rate with {answer.layout.row.draft}"
        stages.stage(3)(StepMessage(message, done=done, total=len(answers)))
        points[answer] = _full_point(answer, explains=answer is best)
    outcome = best.trial.at(load.rate, best.replicas)
    traffic = Traffic(
        rate_per_s=load.rate,
        num_requests=len(outcome.requests),
        best=points[best],
        autoregressive=points[alone] if alone else None,
        speculative=points[speculative] if speculative else None,
        curves=curves,
        notes=[*_where_it_pays(curves), *_on_hits(best), *_notes(best, points[best])],
        has_limits=load.has_limits,
        lacking=_lacking(best.layout.case),
    )
    return Settled(traffic=traffic, layout=best.layout)


def simulated(
    request: PlanRequest,
    model: ModelSpec,
    *,
    replicas: int = 1,
    seed: int = 0,
) -> SimulatedTimes:
    """So many replicas at the tp size given (default: the node's), with the draft that is named, its
    gamma by batch, or without one.

    Raises ConfigError for a draft whose acceptance is unknown.
    """
    is_drafted = (
        request.names_a_draft and request.draft != "none" and request.gamma != 0
    )
    if not is_drafted:
        request = msgspec.structs.replace(request, draft="none", draft_method=None)
    request = msgspec.structs.replace(request, **dict.fromkeys(LATENCY_LIMITS))
    load = dataclasses.replace(Load.of(request, model), samples=False)
    layouts = served_layouts(load, model, widest=True)
    able = [layout for layout in layouts if (layout.option is not None) == is_drafted]
    if not able:
        raise ConfigError(
            f"no acceptance is known for this draft of {model.name}; give acceptance_rate"
        )
    layout = max(able, key=lambda layout: layout.rate)
    if is_drafted:
        layout = dataclasses.replace(layout, follows="by batch")
    return Trial(load=load, layout=layout).at(load.rate, replicas, seed=seed)


def _fewest(
    load: Load, layouts: list[ServedLayout], most: int, progress: Progress
) -> SizedLayout | None:
    """The best layout and number of replicas. The best by the analytic answer is simulated first,
    and the others on no more devices than it takes.
    """

    def analytic(layout: ServedLayout) -> int:
        return layout.row.num_gpus * math.ceil(load.rate / max(layout.rate, 1e-9))

    def expected(layout: ServedLayout) -> tuple[int, float]:
        devices = analytic(layout)
        return devices, -layout.rate * devices / layout.row.num_gpus

    if not layouts:
        progress(StepMessage("simulating layouts", done=0, total=1))
        return None
    limit = CLOSE * min(analytic(layout) for layout in layouts)
    close = [layout for layout in layouts if analytic(layout) <= limit]
    close.sort(key=expected)
    trials = [Trial(load=load, layout=layout) for layout in close]
    first = trials[0].fewest(most)
    if first is not None:
        most = first * trials[0].layout.row.num_gpus
    jobs = [(trial, most) for trial in trials[1:]]
    counts = _in_parallel(Trial.fewest, jobs, progress, "simulating layouts")
    answers = []
    for trial, count in zip(trials, [first, *counts], strict=True):
        if count is not None:
            answers.append(SizedLayout(trial=trial, replicas=count))
    return _best_of(answers)


def _best_of(answers: Sequence[SizedLayout]) -> SizedLayout | None:
    """The one with the fewest devices, and of as many the one that keeps the highest rate there; of
    equal ones the one with the higher analytic rate. One simulation each, at the rate to beat."""
    fewest = min((answer.num_gpus for answer in answers), default=0)
    best: SizedLayout | None = None
    for answer in sorted(answers, key=lambda answer: -answer.analytic):
        if answer.num_gpus > fewest:
            continue
        if best is None:
            best = answer
            continue
        highest = best.trial.highest_rate(best.replicas)
        if highest is None:
            break  # no rate is too much
        if answer.trial.excess(highest * RATIO, answer.replicas) <= 1.0:
            best = answer
    return best


def _in_parallel(
    call: Callable[..., Any],
    jobs: Sequence[tuple[Any, ...]],
    progress: Progress,
    what: str,
) -> list[Any]:
    """The results of all jobs, by joblib's backend."""
    if get_active_backend()[0].supports_return_generator:
        way = "generator"
    else:
        way = "list"
    results: list[Any] = []
    progress(StepMessage(what, done=0, total=max(len(jobs), 1)))
    for result in Parallel(return_as=way)(delayed(call)(*job) for job in jobs):
        results.append(result)
        progress(StepMessage(what, done=len(results), total=len(jobs)))
    return results


def _keeping_most(load: Load, layouts: list[ServedLayout], given: int) -> SizedLayout:
    """The layout that keeps the highest rate on a number of devices that is too small for the load.

    Raises CapacityError where none keeps any.
    """
    best: SizedLayout | None = None
    highest = 0.0
    for layout in layouts:
        trial = Trial(load=load, layout=layout)
        replicas = trial.most_replicas(given)
        if not replicas or not layout.rate:
            continue
        rate = trial.highest_rate(replicas) or 0.0
        if rate > highest:
            highest = rate
            best = SizedLayout(trial=trial, replicas=replicas)
    if best is not None:
        return best
    kept = "keeps up"
    if load.has_limits:
        kept = "keeps the limits"
    raise CapacityError(
        f"nothing {kept} at {load.rate:g} requests/s, nor at any lower rate"
    )


def _too_much(best: SizedLayout) -> CapacityError:
    """The error for a load that no number of devices keeps, with what the most of them do."""
    load = best.trial.load
    highest = best.trial.highest_rate(best.replicas) or 0.0
    return CapacityError(
        f"{best.num_gpus} devices do not keep {load.rate:g} requests/s; {best.replicas} x "
        f"{best.layout.row.layout.label} keep up to {highest:.2g}"
    )


def _full_point(answer: SizedLayout, *, explains: bool) -> TrafficLoad:
    """The requested rate, the highest rate that the same devices keep, and intervals. `explains`:
    with what lies between that and the steady answer."""
    trial = answer.trial
    rate = trial.load.rate
    point = _point(trial, answer.replicas, rate)
    outcome = trial.at(rate, answer.replicas)
    least, most = cost_factors(answer.layout, point.mean_batch)
    ttft = OpenInterval()
    tpot = OpenInterval()
    if not outcome.is_overloaded:
        repeats = _Repeats.of(trial, answer.replicas, rate, least, most)
        ttft = repeats.band(lambda outcome: outcome.ttft_s)
        tpot = repeats.band(lambda outcome: outcome.tpot_s)
    highest = trial.highest_rate(answer.replicas)
    cheap = _at_costs(answer, least, highest)
    dear = _at_costs(answer, most, highest)
    return msgspec.structs.replace(
        point,
        highest_rate_per_s=highest,
        highest_rate_low_per_s=dear.rate,
        highest_rate_high_per_s=cheap.rate,
        num_gpus_low=cheap.num_gpus,
        num_gpus_high=dear.num_gpus,
        reasons=_reasons(answer, highest) if explains else [],
        ttft_p95_low_s=ttft.low,
        ttft_p95_high_s=ttft.high,
        tpot_p95_low_s=tpot.low,
        tpot_p95_high_s=tpot.high,
    )


@dataclass(frozen=True, kw_only=True)
class _AtCosts:
    """The load that a layout keeps at other costs than the predicted ones; not known where the load
    alone took half of the simulations that a question may take."""

    rate: float | None = None
    """The highest rate of the answer's replicas; None: no rate is too much."""
    num_gpus: int | None = None
    """The fewest devices for the load; None: no number of them keeps it."""


def _at_costs(answer: SizedLayout, factor: float, highest: float | None) -> _AtCosts:
    """`highest`: the highest rate at the predicted costs."""
    trial = answer.trial
    load = trial.load
    if load.work.left < load.work.most / 2:
        return _AtCosts()
    near = None if highest is None else highest / factor
    rate = trial.highest_rate(answer.replicas, costs=factor, near=near)
    if rate is None:
        return _AtCosts(num_gpus=answer.num_gpus)
    share = max(load.rate / max(rate, 1e-9), 1.0 / answer.replicas)
    near = answer.replicas * share
    replicas = trial.fewest(MOST_DEVICES, costs=factor, near=near)
    num_gpus = None if replicas is None else replicas * answer.layout.row.num_gpus
    return _AtCosts(rate=rate, num_gpus=num_gpus)


def _reasons(answer: SizedLayout, highest: float | None) -> list[Reason]:
    """Simulations between the steady answer and the load: limits on means and regular arrivals
    first, then the arrivals asked for. None where little lies between.
    """
    steady = answer.analytic
    if not highest or abs(steady / highest - 1.0) < DISAGREEMENT:
        return []
    load = answer.trial.load
    request = load.request
    reasons = [Reason(of="waves and prompts", rate_per_s=steady)]
    of_means = msgspec.structs.replace(
        request,
        ttft_p95_s=None,
        tpot_p95_s=None,
        ttft_limit_s=load.ttft_limit_s,
        tpot_limit_s=load.tpot_limit_s,
    )
    is_drawn = load.trace is None
    if is_drawn and request.burstiness:
        regular = msgspec.structs.replace(of_means, burstiness=0.0)
        rate = _highest(answer, regular)
        reasons.append(Reason(of="arrivals that bunch", rate_per_s=rate))
    if request.ttft_p95_s is not None or request.tpot_p95_s is not None:
        rate = _highest(answer, of_means)
        reasons.append(Reason(of="percentiles", rate_per_s=rate))
    return reasons


def _highest(answer: SizedLayout, request: PlanRequest) -> float:
    """The highest rate that the same replicas keep by another request's limits and arrivals."""
    own = answer.trial
    load = dataclasses.replace(own.load, request=request)
    arrives_alike = request.burstiness == own.load.request.burstiness
    outcomes = own.outcomes if arrives_alike else {}
    trial = dataclasses.replace(own, load=load, outcomes=outcomes)
    return trial.highest_rate(answer.replicas) or 0.0


def _point(trial: Trial, replicas: int, rate: float) -> TrafficLoad:
    """A simulated load."""
    layout = trial.layout
    row = layout.row
    load = trial.load
    outcome = trial.at(rate, replicas)
    timelines = [replica.timeline for replica in outcome.replicas]
    ttft = tpot = whole = None
    if not outcome.is_overloaded:
        ttft = _percentiles(outcome.ttft_s)
        tpot = _percentiles(outcome.tpot_s)
        whole = _percentiles(outcome.e2e_s)
    return TrafficLoad(
        draft=row.draft,
        draft_method=row.draft_method,
        draft_budget=row.draft_budget,
        gamma=row.gamma,
        policy=layout.policy_name,
        tp_size=row.tp_size,
        pp_size=row.layout.pp_size,
        dp_size=row.layout.dp_size,
        ep_size=row.layout.ep_size,
        num_replicas=replicas,
        rate_per_s=rate,
        overloaded=outcome.is_overloaded,
        within_limits=load.excess(outcome) <= 1.0,
        ttft=ttft,
        tpot=tpot,
        request=whole,
        goodput_per_s=outcome.goodput(load.ttft_limit_s, load.tpot_limit_s),
        output_tokens_per_s=outcome.tokens_per_s,
        preemptions=outcome.preemptions,
        mean_batch=_mean(timelines, 1),
        mean_waiting=_mean(timelines, 2),
        kv_share=_mean(timelines, 3) / trial.server.limits.num_blocks,
        analytic_rate_per_s=layout.rate * replicas,
        cost_per_million_tokens_usd=_cost(layout, replicas, outcome.tokens_per_s),
    )


def _percentiles(seconds: Array) -> Percentiles | None:
    """None if no request has this time, as outputs of one token have no time between tokens."""
    if not len(seconds):
        return None
    return Percentiles.of(seconds)


def _cost(layout: ServedLayout, replicas: int, tokens_per_s: float) -> float | None:
    """Dollars per million output tokens."""
    price = layout.case.hardware.price_per_hour_usd
    if not price:
        return None
    usd_per_s = price * layout.row.num_gpus * replicas / SECONDS_PER_HOUR
    return usd_per_s / tokens_per_s * MEGA


def _mean(timelines: list[list[tuple[float, int, int, int]]], column: int) -> float:
    """Mean over time, and over replicas, of a column of their timelines."""
    means = []
    for timeline in timelines:
        if len(timeline) > 1:
            table = np.array(timeline)
            lasting = np.maximum(np.diff(table[:, 0]), 1e-12)
            means.append(float(np.average(table[:-1, column], weights=lasting)))
    if means:
        return float(np.mean(means))
    return 0.0


def cost_factors(layout: ServedLayout, batch: float) -> tuple[float, float]:
    """All costs over the predicted ones at the 5th and 95th percentile of the time per token, at a
    mean batch of a replica, to the nearest step of searched rates.

    The error of acceptance is of decoding's part of the time, that of costs of all of it.
    """
    setup = layout.case.setup(layout.option)
    acceptance = None
    gamma = 0
    if layout.option is not None:
        acceptance = layout.option.acceptance
        gamma = layout.row.gamma
    points = Points(
        batch=max(batch, 1.0),
        context=float(layout.row.context_len),
        tp=layout.row.tp_size,
        budget=layout.row.draft_budget,
        gamma=gamma,
    )
    prediction = predict(setup, acceptance, points)
    ends = interval(prediction, tokens_error(prediction, acceptance))
    _, of_steps = step_errors(setup, prediction.terms, layout.row.tp_size)
    width = math.exp(Z_90 * float(np.ravel(of_steps)[0]))
    prompts = 0.0
    if layout.row.requests is not None:
        prompts = layout.row.requests.prefill_share

    def factor(of_token_s: Array, of_prompt: float) -> float:
        of_token = float(np.ravel(of_token_s / prediction.tpot_s)[0])
        whole = prompts * of_prompt + (1.0 - prompts) * of_token
        return float(RATIO ** round(math.log(whole) / math.log(RATIO)))

    return factor(ends.tpot_low_s, 1.0 / width), factor(ends.tpot_high_s, width)


@dataclass(frozen=True, kw_only=True)
class _Repeats:
    """One load simulated with other seeds, and with larger and smaller costs."""

    seeds: list[SimulatedTimes]
    cheap: SimulatedTimes
    dear: SimulatedTimes
    least: float
    """Costs in `cheap` over the predicted ones."""
    most: float

    @classmethod
    def of(
        cls, trial: Trial, replicas: int, rate: float, least: float, most: float
    ) -> _Repeats:
        return cls(
            seeds=[trial.at(rate, replicas, seed=seed) for seed in range(SEEDS)],
            cheap=trial.at(rate * least, replicas),
            dear=trial.at(rate * most, replicas),
            least=least,
            most=most,
        )

    def band(self, read: Callable[[SimulatedTimes], Array]) -> OpenInterval:
        """The interval of a 95th percentile; no upper end where costs that are so much larger are
        too much.
        """
        if not len(read(self.seeds[0])):
            return OpenInterval()
        values = [_p95(read(outcome)) for outcome in self.seeds]
        p95 = values[0]
        noise = Z_90 * float(np.std(values, ddof=1)) / p95
        faster = _p95(read(self.cheap)) * self.least
        low = p95 - p95 * math.hypot(1.0 - faster / p95, noise)
        if low <= 0.0:
            # chance is as large as the wait itself
            low = min(faster, *values)
        if self.dear.is_overloaded:
            return OpenInterval(low=low)
        slower = _p95(read(self.dear)) * self.most
        return OpenInterval(
            low=low, high=p95 + p95 * math.hypot(slower / p95 - 1.0, noise)
        )


def _p95(seconds: Array) -> float:
    return float(np.quantile(seconds, 0.95))


def _curves(
    kept: list[SizedLayout], best: SizedLayout, progress: Progress
) -> list[TrafficLoad]:
    """Each layout over rates, on the same number of devices."""
    load = best.trial.load
    jobs = []
    for answer in kept:
        replicas = max(best.num_gpus // answer.layout.row.num_gpus, 1)
        jobs += [(answer.trial, replicas, share * load.rate) for share in SHARES]
    return _in_parallel(_point, jobs, progress, "simulating rates")


def _where_it_pays(curves: list[TrafficLoad]) -> list[str]:
    """The rates up to which the draft makes the median request faster than decoding without one on
    the same devices."""
    alone = {load.rate_per_s: load for load in curves if not load.is_speculative}
    drafted = [load for load in curves if load.is_speculative]
    gains = _gains(drafted, alone)
    if not gains:
        return []
    name = drafted[0].policy
    if not name.startswith("gamma"):
        name = f"gamma {name}"
    return [f"with {name}: {_paying(gains)}"]


def _gains(
    curve: list[TrafficLoad], alone: dict[float, TrafficLoad]
) -> list[tuple[float, float]]:
    """(rate, how many times as fast the median request is), at rates known without a draft too. A
    gain of 0 stands for an overloaded server."""
    gains = []
    for load in curve:
        without = alone.get(load.rate_per_s)
        if without is None or without.request is None:
            continue
        gain = 0.0
        if load.request is not None:
            gain = without.request.p50 / load.request.p50
        gains.append((load.rate_per_s, gain))
    return gains


def _paying(gains: list[tuple[float, float]]) -> str:
    """From (rate, gain) by rising rate: where speculation pays first, and up to where from there."""
    pays = [gain >= 1.0 + LEAST_GAIN for _, gain in gains]
    if not any(pays):
        return f"speculation does not pay at {gains[0][0]:.3g} requests/s, nor above"
    # few sequences may be too few: a mixture of experts then reads more of them to verify
    start = pays.index(True)
    end = start
    while end + 1 < len(gains) and pays[end + 1]:
        end += 1
    rate, gain = gains[start]
    text = f"the median request is {gain:.2f} times as fast at {rate:.3g} requests/s"
    if start > 0:
        idle_rate, _ = gains[start - 1]
        text = f"speculation does not pay at {idle_rate:.3g} requests/s; {text}"
    if end > start:
        rate, gain = gains[end]
        text += f", {gain:.2f} times at {rate:.3g}"
    if end + 1 < len(gains):
        text += f", and it stops paying below {gains[end + 1][0]:.3g}"
    return text


def _on_hits(best: SizedLayout) -> list[str]:
    """The prefix hits that the draft loses, where that makes the median request slower by more than
    LEAST_LOSS: the same load is simulated with a draft that loses none.
    """
    layout = best.layout
    row = layout.row
    drops = layout.case.engine.prefix_cache.drops_last_unit
    losing = best.trial.at(best.trial.load.rate, best.replicas)
    if layout.option is None or row.draft_method not in drops or losing.is_overloaded:
        return []
    keeping_layout = dataclasses.replace(layout, case=keeping_last_unit(layout.case))
    trial = Trial(load=best.trial.load, layout=keeping_layout)
    keeping = trial.at(best.trial.load.rate, best.replicas)
    if np.array_equal(losing.requests.cached_len, keeping.requests.cached_len):
        return []
    loss = 1.0 - float(np.median(keeping.e2e_s) / np.median(losing.e2e_s))
    if loss <= LEAST_LOSS:
        return []
    cost = f"{format_percent(loss)} of the median request's time"
    return [hits_lost(layout.case, row, cost, best.trial.server.hit_unit)]


def _notes(best: SizedLayout, chosen: TrafficLoad) -> list[str]:
    load = best.trial.load
    highest = chosen.highest_rate_per_s
    notes = []
    if highest is None:
        notes.append(
            "no highest rate is known: these requests are too few to exceed the limits at any rate"
        )
    if chosen.ttft_p95_high_s is None:
        notes.append(
            "the costs' own error is large enough for these devices to be too few; plan for some "
            "room"
        )
        return notes
    limit = load.request.ttft_p95_s
    if limit is not None and chosen.ttft_p95_high_s > limit:
        notes.append(
            f"p95 of TTFT may reach {format_seconds(chosen.ttft_p95_high_s)} by the costs' own "
            "error"
        )
    return notes
