"""An engine profile from outside: sends the planned loads, takes medians over rounds, fits, and writes what it found.

PROFILE.toml         the engine profile (magicdec plan --engine), its constants with their intervals
PROFILE.loads.json   every load: what was sent, its times, its error, and whether it only judged
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from magicdec.errors import ServerError
from magicdec.files import write_atomic
from magicdec.live.drive import Measured
from magicdec.live.http import Address, get
from magicdec.live.loads import Load, LoadPlan
from magicdec.live.metrics import Scrape, choose_target, read_address
from magicdec.live.observation import Counts, observe
from magicdec.live.server_fit import ServerFit, ServerPoint
from magicdec.perfmodel.prediction import predict
from magicdec.perfmodel.setup import Points, Setup
from magicdec.progress import Step
from magicdec.specs.engine import save_engine
from magicdec.specs.model import ModelSpec

Sender = Callable[[Load, int], Measured]
"""Sends a load whose prompts follow from a seed, and times it."""
Round = tuple[Measured, float]
"""A load's window, and the share of steps that verified a draft."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """What a server says of itself."""

    model: str
    max_len: int
    engine: str = ""
    gamma: int = 0
    """Drafted tokens per step at most; 0 without speculation."""


def describe_server(address: Address, spec: ModelSpec) -> Server:
    """Asks for its models and metrics.

    Raises ServerError where it serves no model, or does not speak OpenAI's protocol.
    """
    where = address.at("/v1/models")
    try:
        listed = msgspec.json.decode(get(where))["data"]
        name, longest = str(listed[0]["id"]), listed[0].get("max_model_len")
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, AttributeError):
        raise ServerError(f"{where} does not list a model: is this an OpenAI-compatible server?") from None
    known = min(spec.max_position_embeddings, longest) if isinstance(longest, int) else spec.max_position_embeddings
    scrape = _scrape(address)
    if scrape is None:
        return Server(model=name, max_len=known)
    target = choose_target(scrape, None)
    seen = observe([scrape, scrape], target)
    return Server(model=name, max_len=known, engine=target.series.engine, gamma=seen.gamma or 0)


def estimated_seconds(plan: LoadPlan, setup: Setup, *, tp_size: int) -> float:
    """How long the loads take by the profiles as they are: prefills one after another, then the decoding."""
    total = 0.0
    for load in plan.loads:
        at = Points(batch=float(load.concurrency), context=float(load.prompt_len), tp=float(tp_size), gamma=0)
        prediction = predict(setup, None, at)
        total += load.concurrency * float(prediction.ttft_s)
        total += load.output_len * float(prediction.autoregressive_step_s)
    return plan.rounds * total


def send_plan(
    address: Address,
    plan: LoadPlan,
    send: Sender,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> list[ServerPoint]:
    """Has every load of every round sent, in its order, and stops at the first error.

    Raises ServerError.
    """
    rounds: dict[Load, list[Round]] = {load: [] for load in plan.loads}
    order = plan.order
    for number, load in enumerate(order, 1):
        progress(Step(f"load {number} of {len(order)}: {load}", done=number - 1, total=len(order)))
        before = _scrape(address)
        measured = send(load, plan.seed + number)
        rounds[load].append((measured, _drafted_share(before, _scrape(address))))
    return [median_of(rounds[load]) for load in plan.loads]


def _scrape(address: Address) -> Scrape | None:
    """The server's metrics; None where it has none that are known."""
    try:
        return read_address(address.at(""))
    except ServerError:
        return None


def _drafted_share(before: Scrape | None, after: Scrape | None) -> float:
    if before is None or after is None:
        return 0.0
    counts: Counts = observe([before, after], choose_target(after, None)).counts
    return (counts.drafts or 0.0) / counts.steps if counts.steps else 0.0


def median_of(rounds: Sequence[Round]) -> ServerPoint:
    """The round with the median step time, and the range of all."""
    ordered = sorted(rounds, key=lambda each: each[0].step_s)
    measured, share = ordered[len(ordered) // 2]
    width = ordered[-1][0].step_s - ordered[0][0].step_s
    return ServerPoint(measured=measured, spread=width / 2.0 / measured.step_s, drafted_share=share)


def sent(plan: LoadPlan) -> dict[str, Any]:
    """How a calibration's file describes the loads that were sent."""
    told = {"requests": plan.num_requests, "tokens": plan.num_tokens, "rounds": plan.rounds, "seed": plan.seed}
    return {"sent": told}


def save_fit(fit: ServerFit, points: Sequence[ServerPoint], origin: dict[str, Any], path: Path) -> list[Path]:
    """Writes the profile, and the loads next to it with their origin; returns the files."""
    rows = [_row(point, error) for point, error in zip(points, fit.errors, strict=True)]
    document: dict[str, Any] = {
        **origin,
        "median_error": {"fitted": fit.fitted_error, "held_out": fit.held_out_error},
        "constants": {
            name: dict(zip(("value", "low", "high"), each, strict=True)) for name, each in fit.constants.items()
        },
        "loads": rows,
    }
    save_engine(fit.profile, path)
    beside = path.with_suffix(".loads.json")
    write_atomic(beside, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    return [path, beside]


def _row(point: ServerPoint, error: float) -> dict[str, Any]:
    measured = point.measured
    return {
        "concurrency": measured.load.concurrency,
        "prompt_len": measured.load.prompt_len,
        "output_len": measured.load.output_len,
        "judges": measured.load.is_judge,
        "step_s": measured.step_s,
        "tpot_s": measured.tpot_s,
        "tokens_per_step": measured.tokens_per_step,
        "context_len": measured.context_len,
        "ttft_s": measured.ttft_s,
        "drafted_share": point.drafted_share,
        "spread": point.spread,
        "error": error,
    }


def noise(points: Sequence[ServerPoint]) -> float:
    return float(np.median([point.spread for point in points]))
