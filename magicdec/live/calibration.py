"""An engine profile from outside: the times that a server's steps take beyond the kernels of the
hardware profile.

The planned loads are sent, medians over rounds taken, and fitted:

    step(load) = Σ_n P(n) · (T_verify + T_accept + T_upkeep)(γ · n / b)         n = 0:
    T_autoregressive

as perfmodel/step.py predicts it, the formula of plans, for looked-up drafts: n of the batch's b
sequences have one, by the share of steps with a draft (0 without speculation), which the server
counts. Of a draft that the server announces, as magicdec's plugin does, all b have one or none, and
T_draft · γ is added. Fitted in log scale, robustly: factors on the kernels' times (a priori 1), the
fixed cost of a step, and that of each of its sequences (both at least 0). Two files are written:

    PROFILE.toml         the engine profile (magicdec plan --engine), its constants with their
    intervals
    PROFILE.loads.json   every load: the requests that were sent, its times, its error, and whether
    it only judged
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.errors import ConfigError, MagicdecError, ServerError
from magicdec.files import decode_json, write_atomic
from magicdec.fitting import Free, solve
from magicdec.live.drive import (
    LoadPlan,
    Measured,
    SentLoad,
    WindowTooShort,
    check_enough,
)
from magicdec.live.http import Address, get
from magicdec.live.metrics import Scrape, choose_target, read_address
from magicdec.live.observation import ServedDraft, agreed, observe
from magicdec.perfmodel.drafting import draft_kv_tokens, draft_of
from magicdec.perfmodel.serving import pass_seconds, prompt_time
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import predict
from magicdec.perfmodel.step import looked_up_terms, step_terms
from magicdec.progress import Progress, StepMessage
from magicdec.specs.engine import EngineProfile, save_engine
from magicdec.specs.model import ModelSpec
from magicdec.units import MILLI

FACTOR = Free(prior=1.0, spread=1.0, limits=(math.exp(-3.0), math.exp(3.0)))
FIXED_TIME = Free(
    scale="linear", prior=MILLI, spread=math.inf, limits=(0.0, 10.0), unit=MILLI
)
FREE = {
    "kernels.gemm_factor": FACTOR,
    "kernels.attention_factor": FACTOR,
    "overheads.forward_overhead_s": FIXED_TIME,
    "overheads.sequence_overhead_s": Free(
        scale="linear", prior=1e-4, spread=math.inf, limits=(0.0, 1.0), unit=1e-4
    ),
}
"""Factors on another engine's kernels, and fixed costs, of which nothing is expected."""
PROMPT_FREE = {
    "scheduler.prefill_factor": FACTOR,
    "kernels.prefill_attention_factor": FACTOR,
    "scheduler.request_latency_s": FIXED_TIME,
    "scheduler.request_overhead_s": FIXED_TIME,
}
"""Numbers of what comes before a first token."""
ROBUSTLY: dict[str, Any] = {
    # a prior's standard deviation counts as an error of this size of one load
    "pull": 0.05,
    "loss": "soft_l1",
    # relative error from which a load counts by its size, no longer by its square: one that was
    # disturbed must not bend the fit
    "f_scale": 0.1,
    "x_scale": "jac",
}
MIN_ERROR, MAX_ERROR = 0.03, 0.5
"""Bounds of the error that a fitted profile states: repetitions of a load differ by 3 %, however well
the loads that were sent are fitted."""
NOISE_LIMIT = 0.3
"""Noise above which a fit would tell nothing."""
Sender = Callable[[SentLoad, int], Measured]
"""Sends a load whose prompts follow from a seed, and times it."""


@dataclass(frozen=True, kw_only=True)
class DescribedServer:
    """A server as its own answers describe it."""

    model: str
    max_len: int
    engine: str = ""
    gamma: int = 0
    """Drafted tokens per step at most; 0 without speculation."""
    draft: ServedDraft | None = None
    """The draft that it announces; looked-up tokens where it announces none."""


def describe_server(address: Address, spec: ModelSpec) -> DescribedServer:
    """Asks for its models and metrics. Raises ServerError where it does not speak OpenAI's
    protocol.
    """
    where = address.at("/v1/models")
    try:
        listed = decode_json(get(where))["data"]
        name = str(listed[0]["id"])
        longest = listed[0].get("max_model_len")
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, AttributeError):
        raise ServerError(
            f"{where} does not list a model: is this an OpenAI-compatible server?"
        ) from None
    known = spec.max_position_embeddings
    if isinstance(longest, int):
        known = min(known, longest)
    scrape = _scrape(address)
    if scrape is None:
        return DescribedServer(model=name, max_len=known)
    target = choose_target(scrape, None)
    observation = observe([scrape, scrape], target)
    draft = None
    if observation.gamma:
        draft = agreed(None, observation.announced)
    return DescribedServer(
        model=name,
        max_len=known,
        engine=target.series.engine,
        gamma=observation.gamma or 0,
        draft=draft,
    )


def estimated_seconds(plan: LoadPlan, setup: Setup, *, tp_size: int) -> float:
    """How long the loads take by the profiles as they are: prefills one after another, then the
    decoding.
    """
    batch = np.array([float(load.concurrency) for load in plan.loads])
    context = np.array([float(load.prompt_len) for load in plan.loads])
    outputs = np.array([float(load.output_len) for load in plan.loads])
    points = Points(
        batch=batch,
        context=context,
        tp=float(tp_size),
        budget=setup.speculation.draft_budget,
        gamma=0,
    )
    prediction = predict(setup, None, points)
    prefill_s = batch * prediction.full(prediction.ttft_s)
    decoding_s = outputs * prediction.full(prediction.autoregressive_step_s)
    return plan.rounds * float(np.sum(prefill_s + decoding_s))


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The result of a plan, whether it was sent to its end or not."""

    points: list[Measured]
    drift: float | None
    """How far the load that came first and last differs, relatively; None where it did not come
    last.
    """
    skipped: list[str]
    """Each load that could not be timed, and why."""
    stopped: str = ""
    """The error that ended it early."""

    @property
    def noise(self) -> float | None:
        """The larger of the spread between rounds and half the drift. No fit can be better. None:
        no load was sent twice."""
        between_rounds = noise(self.points)
        if between_rounds is None:
            return self.drift and self.drift / 2.0
        return max(between_rounds, (self.drift or 0.0) / 2.0)

    @property
    def noise_line(self) -> str:
        rounds = noise(self.points)
        between = "not known, no load was sent twice"
        if rounds is not None:
            between = f"± {rounds:.1%} between rounds"
        if self.drift is None:
            return f"noise: {between}"
        drift = f"{self.drift:.1%} between the first load and the same one at the end"
        return f"noise: {between}, {drift}"


def send_plan(
    address: Address,
    plan: LoadPlan,
    send: Sender,
    *,
    max_len: int,
    progress: Progress = lambda _: None,
) -> Sent:
    """Has every load of every round sent, in its order. Keeps the measurements when an error or
    the user stops it.

    A load whose window is too short is sent again with twice the output where that fits, and is
    left out otherwise.
    """
    rounds: dict[SentLoad, list[Measured]] = {load: [] for load in plan.loads}
    skipped: dict[SentLoad, str] = {}
    order = plan.order
    stopped = ""
    try:
        for number, load in enumerate(order, 1):
            if load in skipped:
                continue
            progress(
                StepMessage(
                    f"load {number} of {len(order)}: {load}",
                    done=number - 1,
                    total=len(order),
                )
            )
            try:
                rounds[load].append(
                    _timed(address, load, plan.seed + number, send, max_len=max_len)
                )
            except WindowTooShort as error:
                skipped[load] = str(error)
    except (MagicdecError, KeyboardInterrupt) as error:
        stopped = str(error) or "interrupted"
    drift = None
    if not stopped and order[0] not in skipped:
        probe = rounds[order[0]]
        drift = abs(math.log(_step_s(probe[-1]) / _step_s(probe[0])))
    points = []
    reasons = []
    for load in plan.loads:
        if rounds[load]:
            points.append(median_of(rounds[load]))
        elif load in skipped:
            reasons.append(skipped[load])
    return Sent(points=points, drift=drift, skipped=reasons, stopped=stopped)


def _timed(
    address: Address, load: SentLoad, seed: int, send: Sender, *, max_len: int
) -> Measured:
    """One round of a load. A step of a server that drafts is as many tokens as it counts: its
    stream may send several steps in one event."""
    before = _scrape(address)
    try:
        measured = send(load, seed)
    except WindowTooShort:
        longer = dataclasses.replace(load, output_len=2 * load.output_len)
        if longer.prompt_len + longer.output_len > max_len:
            raise
        before = _scrape(address)
        measured = dataclasses.replace(send(longer, seed), load=load)
    after = _scrape(address)
    if before is None or after is None:
        return measured
    observation = observe([before, after], choose_target(after, None))
    share = observation.drafted_share
    tokens = observation.counts.tokens_per_step
    if not share or tokens is None:
        return measured
    return dataclasses.replace(
        measured,
        step_s=measured.tpot_s * tokens,
        tokens_per_step=tokens,
        drafted_share=share,
    )


def _scrape(address: Address) -> Scrape | None:
    """The server's metrics; None where it has none that are known."""
    try:
        return read_address(address.at(""))
    except ServerError:
        return None


def median_of(rounds: Sequence[Measured]) -> Measured:
    """The round with the median time per step, and the range of all; the median time to a first
    token.
    """
    ordered = sorted(rounds, key=_step_s)
    middle = ordered[len(ordered) // 2]
    spread = None
    if len(rounds) > 1:
        spread = (_step_s(ordered[-1]) - _step_s(ordered[0])) / 2.0 / _step_s(middle)
    ttft_s = float(np.median([measured.ttft_s for measured in rounds]))
    return dataclasses.replace(middle, spread=spread, ttft_s=ttft_s)


def _step_s(measured: Measured) -> float:
    """Seconds per step. Without drafts a step yields one token, so an event with two tokens counts
    as two steps.
    """
    if measured.drafted_share:
        return measured.step_s
    return measured.tpot_s


def noise(points: Sequence[Measured]) -> float | None:
    """The median spread of what was sent more than once; None: nothing was."""
    spreads = []
    for point in points:
        if point.spread is not None:
            spreads.append(point.spread)
    if spreads:
        return float(np.median(spreads))
    return None


@dataclass(frozen=True, kw_only=True)
class ServerFit:
    """`errors`: predicted over measured TPOT, less 1, of each point in order."""

    profile: EngineProfile
    constants: dict[str, tuple[float, float, float]]
    """Each fitted constant with its 90 % interval."""
    errors: tuple[float, ...]
    fitted_error: float
    """Median over the points that were fitted; the other over those that only judge."""
    held_out_error: float


def fit_server(
    points: Sequence[Measured],
    *,
    setup: Setup,
    tp_size: int,
    gamma: int,
    name: str,
    noise: float = 0.0,
) -> ServerFit:
    """Fits the constants of `setup.engine` to the points that do not judge. No error or interval of
    it is smaller than the measurements' own `noise` makes them.

    Raises ConfigError for too few points, and for noise in which a fit would tell nothing.
    """
    check_enough([point.load for point in points])
    if noise > NOISE_LIMIT:
        raise ConfigError(
            f"the loads' times vary by {noise:.0%} by themselves, too much to fit anything (limit "
            f"{NOISE_LIMIT:.0%}): "
            "the server or its machine does other work; calibrate again when it is quieter"
        )
    chosen = []
    for point in points:
        if not point.load.is_judge:
            chosen.append(point)
    measured = np.log(_measured_steps(chosen, gamma))

    def residuals(values: dict[str, float]) -> Array:
        steps = predicted_steps(
            chosen, setup, _engine(values, setup), tp_size=tp_size, gamma=gamma
        )
        return np.asarray(np.log(steps) - measured)

    solved = solve(FREE, residuals, **ROBUSTLY)
    engine = _with_prompts(_engine(solved.values, setup), chosen, setup, tp_size)
    predicted = predicted_steps(points, setup, engine, tp_size=tp_size, gamma=gamma)
    missed = np.log(predicted) - np.log(_measured_steps(points, gamma))
    judges = np.array([point.load.is_judge for point in points])
    freedom = max(len(chosen) - len(FREE), 1)
    unexplained = float(np.sqrt(np.sum(missed[~judges] ** 2) / freedom))
    intervals = solved.intervals(max(unexplained, noise, 1e-6))
    constants = {}
    sources = {}
    for constant, (value, below, above) in intervals.items():
        least, most = FREE[constant].limits or (0.0, math.inf)
        low = max(below, least)
        high = min(above, most)
        constants[constant] = value, low, high
        sources[constant] = f"{value:.4g} (90 % interval {low:.4g} to {high:.4g})"
    error = float(np.clip(max(unexplained, noise), MIN_ERROR, MAX_ERROR))
    engine = engine.with_constants(
        {
            "name": name,
            "description": f"{setup.engine.name}, fitted to a running server from outside",
            "fitted_device": setup.hardware.name,
            "fitted_devices": (setup.hardware.name,),
            "fitted_models": (setup.model.name,),
            "errors.relative_error": error,
            "errors.speedup_relative_error": max(
                error, setup.engine.errors.speedup_relative_error
            ),
            "sources": sources,
        }
    )
    errors = np.expm1(missed)
    return ServerFit(
        profile=engine,
        constants=constants,
        errors=tuple(float(error) for error in errors),
        fitted_error=float(np.median(np.abs(errors[~judges]))),
        held_out_error=float(np.median(np.abs(errors[judges]))),
    )


def first_token_s(
    points: Sequence[Measured],
    setup: Setup,
    engine: EngineProfile,
    *,
    tp_size: int,
) -> Array:
    """Mean seconds to the first token of requests that are sent at once to an idle server: the
    first has a pass of its own, and the others fill the next ones."""
    setup = dataclasses.replace(setup, engine=engine)
    others = np.array([point.load.concurrency - 1 for point in points])
    prompt = np.array([float(point.load.prompt_len) for point in points])
    alone = prompt_time(setup, prompt_len=prompt, tp_size=tp_size)
    tokens = others * prompt
    passes = np.maximum(np.ceil(tokens / engine.scheduler.prefill_tokens), 1.0)
    per_pass = np.maximum(tokens, prompt) / passes
    rest = passes * pass_seconds(setup, tokens=per_pass, tp_size=tp_size)
    rest = rest + others * (
        alone.group_seconds()["attention"] + engine.scheduler.request_overhead_s
    )
    waited = np.zeros(len(points))
    for place, share in enumerate(prompt / engine.scheduler.prefill_tokens):
        filled = np.arange(1, others[place] + 1) * share
        waited[place] = np.ceil(filled).sum()
    first: Array = (
        engine.scheduler.request_latency_s
        + engine.scheduler.request_overhead_s
        + alone.total_s
    )
    return np.asarray(first + waited / passes / (others + 1.0) * rest)


def _with_prompts(
    engine: EngineProfile,
    points: Sequence[Measured],
    setup: Setup,
    tp_size: int,
) -> EngineProfile:
    """The engine with what fits the first tokens of loads."""
    measured = np.log([point.ttft_s for point in points])

    def residuals(values: dict[str, float]) -> Array:
        at = engine.with_constants({"scheduler.prompt_token_latency_s": 0.0, **values})
        return np.asarray(
            np.log(first_token_s(points, setup, at, tp_size=tp_size)) - measured
        )

    solved = solve(PROMPT_FREE, residuals, **ROBUSTLY)
    return engine.with_constants(
        {"scheduler.prompt_token_latency_s": 0.0, **solved.values}
    )


def _measured_steps(points: Sequence[Measured], gamma: int) -> list[float]:
    """Seconds per step. Without drafts a step makes one token, so an event of two is two steps."""
    return [point.step_s if gamma else point.tpot_s for point in points]


def predicted_steps(
    points: Sequence[Measured],
    setup: Setup,
    engine: EngineProfile,
    *,
    tp_size: int,
    gamma: int,
) -> Array:
    """Seconds of each point's step, in which the share that was counted has a draft."""
    setup = dataclasses.replace(setup, engine=engine)
    batch = np.array([float(point.load.concurrency) for point in points])
    kv_len = np.array([point.context_len for point in points])
    share = np.array([point.drafted_share for point in points])
    gammas = np.full(len(points), gamma)
    steps: Array
    if draft_of(setup).is_by_sequence or not gamma:
        # each sequence of a step has a draft or none; below, all of a step have one
        terms, probability = looked_up_terms(
            setup,
            batch=batch,
            kv_len=kv_len,
            gamma=gammas,
            share=share,
            tp_size=float(tp_size),
        )
        steps = np.sum(probability * terms.step_s, axis=-1)
        return steps
    read = draft_kv_tokens(setup, kv_len, setup.speculation.draft_budget)
    terms = step_terms(
        setup,
        batch=batch,
        kv_len=kv_len,
        draft_kv_len=read,
        gamma=gammas,
        tp_size=float(tp_size),
    )
    steps = share * terms.step_s + (1.0 - share) * terms.autoregressive.total_s
    return steps


def _engine(values: dict[str, float], setup: Setup) -> EngineProfile:
    """The profile of the fitted numbers, which hold what a step takes beyond its kernels."""
    return setup.engine.with_constants(
        {
            **values,
            "overheads.layer_overhead_s": 0.0,
            "overheads.autoregressive_overhead_s": 0.0,
            "overheads.step_overhead_s": 0.0,
            "overheads.overhead_on": {},
        }
    )


def save_fit(
    fit: ServerFit,
    points: Sequence[Measured],
    origin: dict[str, Any],
    path: Path,
) -> list[Path]:
    """Writes the profile, and the loads next to it with their origin; returns the files."""
    about = {
        "median_error": {"fitted": fit.fitted_error, "held_out": fit.held_out_error},
        "constants": {
            name: dict(zip(("value", "low", "high"), each, strict=True))
            for name, each in fit.constants.items()
        },
    }
    save_engine(fit.profile, path)
    return [path, save_loads(points, {**origin, **about}, path, fit.errors)]


def save_loads(
    points: Sequence[Measured],
    about: dict[str, Any],
    path: Path,
    errors: Sequence[float] = (),
) -> Path:
    """Writes the loads next to where the profile is, or would be; without errors where nothing was
    fitted.
    """
    rows = []
    for point, error in itertools.zip_longest(points, errors):
        row = dataclasses.asdict(point)
        load = row.pop("load")
        judges = load.pop("is_judge")
        row = {**load, "judges": judges, **row}
        if error is not None:
            row["error"] = error
        rows.append(row)
    beside = path.with_suffix(".loads.json")
    write_atomic(
        beside,
        msgspec.json.format(msgspec.json.encode({**about, "loads": rows}), indent=2)
        + b"\n",
    )
    return beside
