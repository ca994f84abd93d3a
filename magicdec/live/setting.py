"""Advice as the setting to paste: the text of `magicdec export`."""

from __future__ import annotations

from magicdec.live.advice import Advice, bands
from magicdec.plan_document import verdict_of
from magicdec.records import Record
from magicdec.reports.deployment import VERSIONS, Deployment
from magicdec.reports.exports import write_settings


def setting(advice: Advice, engine: str) -> str:
    """What to start `engine` with for the advised gamma, by batch where the best differs."""
    if engine not in VERSIONS:
        return f"# {engine}: draft {advice.best.gamma} tokens per step (0: start it without a draft)\n"
    situation, best, speedup = advice.situation, advice.best, advice.speedup
    setup, drafts = situation.setup, best.gamma > 0
    record = Record(
        source="calibrated",
        model=setup.model.name,
        hardware=setup.hardware.name,
        engine=setup.engine.name,
        draft=setup.speculation.draft if drafts else "none",
        draft_method=setup.speculation.draft_method if drafts else "none",
        draft_budget=setup.speculation.draft_budget if drafts else None,
        gamma=best.gamma,
        tp_size=situation.tp_size,
        batch_size=max(round(situation.batch_size), 1),
        context_len=max(round(situation.context_len), 1),
        temperature=setup.sampling.temperature,
        speedup=speedup.gain,
        speedup_low=speedup.gain_low,
        speedup_high=speedup.gain_high,
    )
    verdict = verdict_of(speedup_low=speedup.gain_low, speedup_high=speedup.gain_high)
    ranges = bands(advice)
    return write_settings(
        engine, Deployment(model=setup.model.name, best=record, verdict=verdict, bands=ranges if drafts else ())
    )
