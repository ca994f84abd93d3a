"""A running server: its metrics in, its acceptance, its load and advice out. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magicdec.door import door

if TYPE_CHECKING:
    from magicdec.live.advice import Serving, advise, situation_of
    from magicdec.live.benchmark_results import points_of, read_runs, tokens_per_event
    from magicdec.live.calibration import (
        NOISE_LIMIT,
        ServerFit,
        describe_server,
        estimated_seconds,
        fit_server,
        noise,
        save_fit,
        save_loads,
        send_plan,
    )
    from magicdec.live.check import AskedLoad, Check, check_command
    from magicdec.live.check_text import lines_of
    from magicdec.live.cost_check import fit_cost, read_cost_run
    from magicdec.live.drive import LoadPlan, Measured, SentLoad, drive_load, plan_loads
    from magicdec.live.forms import read_files
    from magicdec.live.http import Address, parse_address
    from magicdec.live.metrics import choose_target, scrapes
    from magicdec.live.observation import (
        Observation,
        ServedDraft,
        agreed,
        observe,
        parse_draft,
    )
    from magicdec.live.profile import acceptance_profile, record
    from magicdec.live.show import View, advice_lines, trend_lines, windows
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
