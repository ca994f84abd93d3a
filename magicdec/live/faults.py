"""Signs of an engine at fault: drafts are accepted, and steps are slower than they should be.

Acceptance says how much faster a draft should make a server at the observed load, the time per
token how much faster it is. Where the second is below the first one's 90 % interval, every step
takes so much longer than predicted, and the settings that engines are known to run with by mistake
are named with the time that each alone would add (live/settings.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from magicdec.live.advice import Advice, DraftedLoad, choices_at
from magicdec.live.settings import (
    BETWEEN_STEPS,
    PIECEWISE,
    EnginePath,
    Setting,
    with_eager_drafter,
    with_host_times,
)
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.intervals import interval
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import predict
from magicdec.specs.engine import EngineProfile
from magicdec.units import MILLI

KNOWN: dict[str, EnginePath] = {
    "verification outside whole graphs (a downgrade to PIECEWISE in its log)": PIECEWISE,
    "scheduling between steps (asynchronous scheduling off)": BETWEEN_STEPS,
    "an eager drafter (enforce_eager)": with_eager_drafter,
}
"""Settings that slow servers were found with."""
SLOW = 1.5
"""A step that takes so many times the expected one, and more than its interval, is a fault."""
LEAST_PART = 0.15
"""Part of the excess below which no known cause is worth naming."""
LEAST_ACCEPTED = 0.3
"""Share of drafts from which few of them are no reason for a small gain."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A server that gains less from its draft than what it accepts of it should give."""

    accepted_share: float
    gain: float
    """Over the predicted time per token without a draft."""
    expected: float
    expected_low: float
    excess_s: float
    """Time of each step beyond the predicted one."""
    causes: dict[str, float]
    """Seconds that a step would take longer by each known cause, the likeliest first."""

    @property
    def line(self) -> str:
        return (
            f"{self.accepted_share:.0%} of the drafts are accepted, which should make it "
            f"{self.expected:.2f}x as fast as without (at least {self.expected_low:.2f}x), and it "
            f"is {self.gain:.2f}x: each step takes {self.excess_s / MILLI:.1f} ms longer than "
            f"predicted; look for {_sized(self.causes)}"
        )


def _sized(causes: dict[str, float]) -> str:
    return ", ".join(
        f"{name} (about {seconds / MILLI:.1f} ms)" for name, seconds in causes.items()
    )


@dataclass(frozen=True, kw_only=True)
class ExpectedStep:
    """How long a step should take, with its 90 % interval."""

    step_s: float
    low_s: float
    high_s: float


def expected_step(
    setup: Setup,
    acceptance: AcceptanceProfile | None,
    *,
    batch: float,
    context: float,
    gamma: int,
    tp_size: int,
) -> ExpectedStep:
    """A step of `gamma` drafted tokens, of a batch whose sequences are `context` tokens long."""
    at = Points(
        batch=max(batch, 1.0),
        context=context,
        tp=float(tp_size),
        budget=setup.speculation.draft_budget,
        gamma=np.array([gamma]),
    )
    prediction = predict(setup, acceptance, at)
    bounds = interval(prediction)
    tokens = prediction.full(prediction.expected_tokens_per_step)

    def step_s(tpot_s: np.ndarray) -> float:
        return float((prediction.full(tpot_s) * tokens)[0])

    return ExpectedStep(
        step_s=step_s(prediction.tpot_s),
        low_s=step_s(bounds.tpot_low_s),
        high_s=step_s(bounds.tpot_high_s),
    )


def slow_line(
    expected: ExpectedStep, measured_s: float, situation: DraftedLoad | None
) -> str:
    """The likely causes of a slow step; "": it is not slow."""
    if measured_s <= max(SLOW * expected.step_s, expected.high_s):
        return ""
    excess_s = measured_s - expected.step_s
    line = (
        f"each step takes {measured_s / expected.step_s:.1f} times what it should, "
        f"{excess_s / MILLI:.1f} ms more"
    )
    causes: dict[str, float] = {}
    if situation is not None:
        causes = _causes(situation, excess_s)
    if max(causes.values(), default=0.0) < LEAST_PART * excess_s:
        return (
            f"{line}: look for idle time and prompts within what was timed, other work on the device, "
            "graphs that are off, and whether model, format and devices are those given"
        )
    return f"{line}: look for {_sized(causes)}"


def fault_of(advice: Advice, tpot_s: float | None) -> Fault | None:
    """None where the server is as fast as its acceptance says, or little is accepted."""
    situation = advice.situation
    gamma = situation.gamma
    if not tpot_s or not gamma:
        return None
    batch = max(situation.batch_size, 1.0)
    choices = choices_at(situation, batch, situation.context_len, over=0)
    now = choices[gamma]
    accepted_share = (now.tokens_per_step - 1.0) / gamma
    gain = choices[0].tpot_s / tpot_s
    if accepted_share < LEAST_ACCEPTED or gain >= now.gain_low:
        return None
    excess_s = (tpot_s - now.tpot_s) * now.tokens_per_step
    return Fault(
        accepted_share=accepted_share,
        gain=gain,
        expected=now.gain,
        expected_low=now.gain_low,
        excess_s=excess_s,
        causes=_causes(situation, excess_s),
    )


def _causes(situation: DraftedLoad, excess_s: float) -> dict[str, float]:
    """The time that each known setting would add to a step, the one nearest to the excess first."""
    setup = situation.setup
    engine = with_host_times(setup.engine)

    def step_s(engine: EngineProfile) -> float:
        return expected_step(
            replace(setup, engine=engine),
            situation.acceptance,
            batch=situation.batch_size,
            context=situation.context_len,
            gamma=situation.gamma,
            tp_size=situation.tp_size,
        ).step_s

    usual_s = step_s(engine)
    causes = {}
    for name, path in KNOWN.items():
        more_s = step_s(Setting(None, path).on(engine)) - usual_s
        if more_s > 0.0:
            causes[name] = more_s
    return dict(sorted(causes.items(), key=lambda cause: abs(cause[1] - excess_s)))
