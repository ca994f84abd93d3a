"""What is said of an observation: its load, times and acceptance, and where the device is known the advice."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from magicdec.live.advice import advise
from magicdec.live.observation import Observation
from magicdec.live.observation import Draft, agreed
from magicdec.live.setting import setting
from magicdec.live.show import advice_lines, observation_lines
from magicdec.live.situation import Serving, situation_of
from magicdec.perfmodel.acceptance import AcceptanceProfile


@dataclass(frozen=True, kw_only=True)
class View:
    """`serving` without a model takes the server's own name for it; None: no advice. `draft` None: what it says."""

    draft: Draft | None = None
    serving: Serving | None = None
    acceptance: AcceptanceProfile | None = None
    context: float | None = None

    def lines(self, seen: Observation, *, with_setting: bool = True) -> list[str]:
        """Raises ConfigError where advice is asked for and cannot be given, or the server drafts with another draft."""
        draft = agreed(self.draft, seen.announced)
        lines = observation_lines(seen, draft)
        if self.serving is None:
            return lines
        serving = dataclasses.replace(self.serving, model=self.serving.model or seen.target.model)
        situation = situation_of(seen, draft, serving, acceptance=self.acceptance, context=self.context)
        advice = advise(situation)
        lines += advice_lines(advice, seen.counts.tpot_s)
        if not with_setting or advice.answer == "keep":
            return lines
        return [*lines, setting(advice, seen.target.series.engine)]
