"""An observation in a terminal: its load, times and acceptance, the advice, notes in plain words, and the trend."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from magicdec.counts import Z_90
from magicdec.errors import ServerError
from magicdec.live.advice import Advice, Serving, advise, setting, situation_of
from magicdec.live.http import Address
from magicdec.live.metrics import MAX_WINDOW_S, Scrape, scrapes
from magicdec.live.observation import Draft, Observation, agreed
from magicdec.live.profile import rates, tokens_stderr
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.acceptance.fit import MeasuredRates
from magicdec.reports.text import table_lines
from magicdec.units import format_seconds

MISFIT = 1.5
"""A prediction of the time per token that is off by more is worth a word."""
SHORT_DRAFT = 0.98
"""Drafts shorter than this share of gamma on average are worth a word."""
BARS = "▁▂▃▄▅▆▇█"
TREND_WIDTH = 60


@dataclass(frozen=True, kw_only=True)
class View:
    """Chooses the lines to show. `serving` without a model takes the server's own name for it, None gives no advice;
    `draft` None is the one that the server names."""

    draft: Draft | None = None
    serving: Serving | None = None
    acceptance: AcceptanceProfile | None = None
    context: float | None = None

    def lines(self, seen: Observation, *, with_setting: bool = True) -> list[str]:
        """Raises ConfigError where advice is asked for and cannot be given, or the server drafts with another draft."""
        lines = observation_lines(seen, agreed(self.draft, seen.announced))
        advice = self.advice(seen)
        if advice is None:
            return lines
        lines += advice_lines(advice, seen.counts.tpot_s)
        if not with_setting or advice.answer == "keep":
            return lines
        return [*lines, setting(advice, seen.target.series.engine)]

    def advice(self, seen: Observation) -> Advice | None:
        """None where no device was given. Raises ConfigError where it cannot be given."""
        if self.serving is None:
            return None
        serving = dataclasses.replace(self.serving, model=self.serving.model or seen.target.model)
        draft = agreed(self.draft, seen.announced)
        return advise(situation_of(seen, draft, serving, acceptance=self.acceptance, context=self.context))

    def document(self, seen: Observation) -> dict[str, Any]:
        """All that the lines show, as plain values; times in seconds."""
        draft, counts, advice = agreed(self.draft, seen.announced), seen.counts, self.advice(seen)
        found = rates(seen, draft) if seen.is_speculative else None
        return {
            "engine": seen.target.series.engine,
            "model": seen.target.model,
            "window_s": seen.window_s,
            "num_scrapes": seen.num_scrapes,
            "num_restarts": seen.num_restarts,
            "batch_size": seen.batch_size,
            "context_len": seen.context_len,
            "running": seen.load.running,
            "waiting": seen.load.waiting,
            "tpot_s": counts.tpot_s,
            "ttft_s": counts.ttft_s,
            "tokens_per_s": seen.tokens_per_s,
            "draft": dataclasses.asdict(draft) if seen.is_speculative else None,
            "gamma": seen.gamma,
            "drafted_share": seen.drafted_share,
            "tokens_per_step": counts.tokens_per_step,
            "acceptance_rates": list(found.rates) if found else [],
            "advice": advice
            and {
                "answer": advice.answer,
                "gamma": advice.best.gamma,
                "choices": [dataclasses.asdict(choice) for choice in advice.choices],
            },
            "notes": [line.removeprefix("  note: ") for line in notes(seen, draft)],
        }


def observation_lines(observation: Observation, draft: Draft) -> list[str]:
    """The load, the times, and acceptance by position with 90 % intervals."""
    target, counts, load = observation.target, observation.counts, observation.load
    window = f"{observation.window_s:.0f} s, " if observation.window_s is not None else ""
    lines = [
        f"{target.series.engine}, {target.name}: {window}{observation.num_scrapes} scrapes",
        _row(
            "load",
            _value(observation.batch_size, "batch {:.1f}"),
            _value(load.running, "running {:.1f}"),
            _value(load.waiting, "waiting {:.1f}"),
            _value(observation.context_len, "{:.0f} tokens per sequence"),
            _value(load.kv_usage and load.kv_usage * 100, "KV cache {:.0f} % full"),
        ),
        _row(
            "times",
            f"{format_seconds(counts.tpot_s)} per output token" if counts.tpot_s else "",
            f"{format_seconds(counts.ttft_s)} to the first" if counts.ttft_s else "",
            _value(observation.tokens_per_s, "{:.1f} tokens/s"),
        ),
    ]
    if observation.is_speculative:
        mean = counts.draft_tokens / counts.drafts if counts.draft_tokens and counts.drafts else None
        lines.append(
            _row(
                "drafts",
                f"{counts.drafts:.0f} by {draft}" + (" (as the server says)" if observation.announced else ""),
                _value(observation.gamma, "gamma {:.0f}"),
                _value(mean, "{:.2f} tokens each"),
                _value(observation.drafted_share, "in {:.1%} of the steps"),
            )
        )
        tokens, stderr = counts.tokens_per_step, tokens_stderr(observation)
        if tokens is not None and stderr is not None:
            lines.append(_row("tokens/step", f"{tokens:.3f} ± {Z_90 * stderr:.3f}"))
        if (found := rates(observation, draft)) is not None:
            lines.append(_row("accepted", rates_text(found)))
    return [line for line in lines if line] + notes(observation, draft)


def _row(name: str, *values: str) -> str:
    present = [value for value in values if value]
    return f"  {name:<12} {', '.join(present)}" if present else ""


def _value(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def advice_lines(advice: Advice, measured_tpot_s: float | None) -> list[str]:
    """Every gamma at the observed load, what to do, and the best gamma by batch and context."""
    situation, best = advice.situation, advice.best
    heads = ("gamma", "tokens/step", "predicted per token", "over the gamma in use (90 % interval)")
    rows = [
        (
            f"{choice.gamma}" + (" in use" if choice.gamma == situation.gamma else ""),
            f"{choice.tokens_per_step:.2f}",
            format_seconds(choice.tpot_s),
            f"{choice.gain:.2f} ({choice.gain_low:.2f} to {choice.gain_high:.2f})",
        )
        for choice in advice.choices
    ]
    lines = table_lines(heads, rows)
    shown = best if best.gamma != situation.gamma else advice.rival
    gain = f"{shown.gain - 1.0:+.0%} goodput, 90 % interval {shown.gain_low - 1.0:+.0%} to {shown.gain_high - 1.0:+.0%}"
    doubt = f"gamma {advice.rival.gamma} may reach {advice.rival.gain_high - 1.0:+.0%}: `magicdec tune` tries"
    lines.append(
        {
            "keep": f"advice: keep gamma {situation.gamma}; gamma {shown.gamma} would change little ({gain})",
            "change": f"advice: gamma {best.gamma} instead of {situation.gamma} ({gain})",
            "unclear": f"advice: unclear; gamma {shown.gamma} against {situation.gamma} ({gain}); {doubt}",
        }[advice.answer]
    )
    in_use = advice.in_use.tpot_s
    if measured_tpot_s and not 1 / MISFIT < in_use / measured_tpot_s < MISFIT:
        lines.append(
            f"  note: predicted {format_seconds(in_use)} per token now, measured {format_seconds(measured_tpot_s)}: "
            "fit the engine's profile to this server (magicdec calibrate --server)"
        )
    lines.append("best gamma by batch (down) and context (across); ? where it may not beat 0")
    table = [
        (str(batch), *(f"{gamma}" if sure else f"{gamma}?" for gamma, sure in row))
        for batch, row in zip(advice.batch_sizes, advice.table, strict=True)
    ]
    return lines + table_lines(("", *map(str, advice.context_lens)), table)


def rates_text(found: MeasuredRates) -> str:
    cells = zip(found.rates, found.stderr, strict=True)
    return "  ".join(f"{rate:.3f}±{Z_90 * error:.3f}" for rate, error in cells) + " by position"


def notes(observation: Observation, draft: Draft) -> list[str]:
    """Warnings about the numbers: gaps in them, and likely misreadings."""
    counts, gamma, said = observation.counts, observation.gamma, []
    if observation.num_restarts:
        said.append(f"the server restarted {observation.num_restarts} times; those intervals are left out")
    if not counts.output_tokens and not counts.drafts:
        said.append("nothing was generated in this window: the server was idle")
    elif not observation.is_speculative:
        said.append("no draft was verified: the server runs without speculation, or none was ever found")
    elif not counts.accepted_by_position:
        said.append("this engine does not count by position: one rate that gives the same tokens per step is shown")
    if observation.is_speculative and counts.requests is None:
        said.append("this engine does not count requests: tokens per step are over steps that had a draft")
    if observation.window_s is None:
        said.append("saved scrapes hold no times: no tokens per second, and gauges are of these two instants")
    if counts.drafts and gamma and 0 < (counts.draft_tokens or 0.0) < SHORT_DRAFT * gamma * counts.drafts:
        said.append(
            "positions that were not drafted count as not accepted: the rates give the real tokens per step"
            if draft.may_be_absent
            else "drafts were often shorter than gamma (a gamma that adapts?): deep rates are underestimated"
        )
    shown = {
        "running batch": observation.batch_size, "sequences' length": observation.context_len,
        "time per output token": counts.tpot_s, "time to first token": counts.ttft_s,
    }  # fmt: skip
    missing = ", ".join(name for name, value in shown.items() if value is None)
    if missing and (counts.output_tokens or counts.drafts):
        is_trtllm = observation.target.series.engine == "trtllm"
        remedy = " (return_perf_metrics and enable_iter_perf_stats add series)" if is_trtllm else ""
        said.append(f"not shown by this server: {missing}{remedy}")
    return [f"  note: {each}" for each in said]


def windows(
    address: Address,
    *,
    seconds: float,
    interval_s: float,
    sleep: Callable[[float], None] = time.sleep,
    missed: Callable[[ServerError], None] = lambda error: None,
) -> Iterator[list[Scrape]]:
    """After each scrape from the second on, those of the last `seconds`; for a day at most. A server that answered once
    and does not any more is asked again, for it may be restarting: `missed` is called each time.

    Raises ServerError where it never answered.
    """
    taken: list[Scrape] = []
    deadline = time.monotonic() + MAX_WINDOW_S
    while time.monotonic() < deadline:
        try:
            for scrape in scrapes(address, seconds=MAX_WINDOW_S, interval_s=interval_s, sleep=sleep):
                oldest = (scrape.time_s or 0.0) - seconds
                taken = [each for each in [*taken, scrape] if (each.time_s or 0.0) >= oldest]
                if len(taken) > 1:
                    yield taken
        except ServerError as error:
            if not taken:
                raise
            missed(error)
            sleep(interval_s)


def trend_lines(history: Sequence[Observation]) -> list[str]:
    """The latest interval of each observation, as bars between the least and the greatest."""
    history = history[-TREND_WIDTH:]
    latest = [each.segments[-1] for each in history]
    series = (
        ("batch", [each.load.running for each in history], "{:.1f}"),
        ("tokens/step", [each.tokens_per_step for each in latest], "{:.2f}"),
        ("ms per token", [each.tpot_s and each.tpot_s * 1e3 for each in latest], "{:.1f}"),
    )
    lines = []
    for name, values, form in series:
        known = [value for value in values if value is not None]
        if len(known) > 1:
            low, high = min(known), max(known)
            lines.append(f"  {name:<12} {bars(values)} {form.format(low)} to {form.format(high)}")
    return lines


def bars(values: Sequence[float | None]) -> str:
    """One character for each value; a space where it is not known."""
    known = [value for value in values if value is not None]
    low, width = min(known), (max(known) - min(known)) or 1.0
    return "".join(
        " " if value is None else BARS[min(int((value - low) / width * len(BARS)), len(BARS) - 1)] for value in values
    )
