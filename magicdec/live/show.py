"""A judged observation in a terminal, and as a document: its load, times and acceptance, the advice,
notes in plain words, and the trend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from magicdec.counts import CAUSES, Z_90
from magicdec.live.advice import Advice, setting
from magicdec.live.faults import fault_of
from magicdec.live.judgement import UNTOLD_CONTEXT, Judgement
from magicdec.live.observation import Observation, ServedDraft
from magicdec.live.profile import rates, tokens_stderr
from magicdec.reports.text import table_lines
from magicdec.units import format_seconds

MISFIT = 1.5
"""A prediction of the time per token that is off by more is worth a word."""
SHORT_DRAFT = 0.98
"""Drafts shorter than this share of gamma on average are worth a word."""
BARS = "▁▂▃▄▅▆▇█"
TREND_WIDTH = 60


def lines_of(judged: Judgement, *, with_setting: bool = True) -> list[str]:
    """Raises ConfigError where advice is asked for and cannot be given, or the server drafts with
    another draft.
    """
    observation = judged.observation
    lines = observation_lines(observation, judged.draft)
    for part in observation.parts:
        lines.append(part_line(part))
    if judged.fault:
        return [judged.fault, f"  {CAUSES}", *lines]
    advice = judged.advice
    if observation.form:
        lines = [*headlines(judged), *lines]
    if advice is None:
        return lines
    lines += advice_lines(advice, observation.counts.tpot_s)
    if with_setting and advice.answer != "keep":
        lines.append(setting(advice, observation.target.series.engine))
    return lines


def headlines(judged: Judgement) -> list[str]:
    """A file in short: tokens per step, speed, the step's time against the expected one, and what is
    wrong."""
    observation = judged.observation
    counts = observation.counts
    head: list[str] = []
    if observation.is_speculative and counts.tokens_per_step is not None:
        assumed = ", assumed" if observation.is_gamma_assumed else ""
        of = f" ({observation.gamma} drafted{assumed})" if observation.gamma else ""
        head.append(f"{counts.tokens_per_step:.2f} tokens per step{of}")
    speed = observation.tokens_per_s
    if speed:
        batch = _value(observation.batch_size, " at batch {:.3g}")
        head.append(f"{speed:.4g} tokens/s{batch}")
    step_s = counts.step_s
    expected = judged.expected
    if step_s:
        timed = f"a step takes {format_seconds(step_s)}"
        if expected is not None:
            timed += (
                f", {format_seconds(expected.step_s)} expected "
                f"({format_seconds(expected.low_s)} to {format_seconds(expected.high_s)})"
            )
        head.append(timed)
    if step_s and expected is not None and judged.is_length_assumed:
        head.append(f"sequences of {UNTOLD_CONTEXT:.0f} tokens assumed (--context)")
    lines = ["; ".join(head)] if head else []
    return lines + [f"  wrong: {line}" for line in judged.wrongs()]


def document_of(judged: Judgement) -> dict[str, Any]:
    """All that the lines show, as plain values; times in seconds."""
    observation = judged.observation
    counts = observation.counts
    advice = judged.advice
    draft_fields = None
    measured = None
    if observation.is_speculative:
        draft_fields = dataclasses.asdict(judged.draft)
        measured = rates(observation, judged.draft)
    advised = None
    if advice is not None:
        advised = {
            "answer": advice.answer,
            "gamma": advice.best.gamma,
            "choices": [dataclasses.asdict(choice) for choice in advice.choices],
        }
    return {
        "engine": observation.target.series.engine,
        "model": observation.target.model,
        "window_s": observation.window_s,
        "num_scrapes": observation.num_scrapes,
        "num_restarts": observation.num_restarts,
        "batch_size": observation.batch_size,
        "context_len": observation.context_len,
        "running": observation.load.running,
        "waiting": observation.load.waiting,
        "tpot_s": counts.tpot_s,
        "ttft_s": counts.ttft_s,
        "tokens_per_s": observation.tokens_per_s,
        "draft": draft_fields,
        "gamma": observation.gamma,
        "drafted_share": observation.drafted_share,
        "tokens_per_step": counts.tokens_per_step,
        "acceptance_rates": list(measured.rates) if measured else [],
        "fault": judged.fault,
        "form": observation.form,
        "wrong": list(observation.faults),
        "advice": advised,
        "notes": notes(observation, judged.draft),
    }


def observation_lines(observation: Observation, draft: ServedDraft) -> list[str]:
    """The load, the times, and acceptance by position with 90 % intervals."""
    target = observation.target
    counts = observation.counts
    load = observation.load
    window = ""
    if observation.window_s is not None:
        window = f"{observation.window_s:.0f} s, "
    name = target.name
    if observation.parts:
        name += f", {len(observation.parts)} engines"
    what = [target.series.engine, name]
    if observation.form:
        if not target.series.prefix:
            what = what[1:] if target.model else []
        what = [observation.form, *dict.fromkeys(what)]
    unit = observation.unit
    if observation.num_scrapes == 1:
        unit = unit.removesuffix("es" if unit.endswith("ches") else "s")
    lines = [
        f"{', '.join(what)}: {window}{observation.num_scrapes} {unit}",
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
            _seconds(counts.tpot_s, "per output token"),
            _seconds(counts.ttft_s, "to the first"),
            _value(observation.tokens_per_s, "{:.1f} tokens/s"),
        ),
    ]
    if observation.is_speculative:
        lines += _acceptance_lines(observation, draft)
    lines = [line for line in lines if line]
    return lines + [f"  note: {text}" for text in notes(observation, draft)]


def part_line(part: Observation) -> str:
    """One of several data-parallel engines."""
    return _row(
        f"engine {part.target.replica}",
        _value(part.batch_size, "batch {:.1f}"),
        _value(part.counts.tokens_per_step, "{:.2f} tokens per step"),
        _value(part.tokens_per_s, "{:.1f} tokens/s"),
    )


def _acceptance_lines(observation: Observation, draft: ServedDraft) -> list[str]:
    """Drafts, tokens per step, and acceptance by position with 90 % intervals."""
    counts = observation.counts
    mean = None
    if counts.draft_tokens and counts.drafts:
        mean = counts.draft_tokens / counts.drafts
    source = ""
    if observation.announced and not observation.form:
        source = " (as the server says)"
    drafts = _row(
        "drafts",
        f"{counts.drafts:.0f} by {draft}{source}",
        _value(observation.gamma, "gamma {:.0f}"),
        _value(mean, "{:.2f} tokens each"),
        _value(observation.drafted_share, "in {:.1%} of the steps"),
    )
    lines = [drafts]
    tokens = counts.tokens_per_step
    stderr = tokens_stderr(observation)
    if tokens is not None and stderr is not None:
        lines.append(_row("tokens/step", f"{tokens:.3f} ± {Z_90 * stderr:.3f}"))
    measured = rates(observation, draft)
    if measured is not None:
        cells = []
        for rate, error in zip(measured.rates, measured.stderr, strict=True):
            cells.append(f"{rate:.3f}±{Z_90 * error:.3f}")
        of = f"{'  '.join(cells)} by position"
        if not counts.accepted_by_position:
            of = f"{cells[0]} at each of {len(cells)} positions"
        lines.append(_row("accepted", of))
    return lines


def _seconds(value: float | None, what: str) -> str:
    if not value:
        return ""
    return f"{format_seconds(value)} {what}"


def _row(name: str, *values: str) -> str:
    present = []
    for value in values:
        if value:
            present.append(value)
    if present:
        return f"  {name:<12} {', '.join(present)}"
    return ""


def _value(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return form.format(value)


def advice_lines(advice: Advice, measured_tpot_s: float | None) -> list[str]:
    """Every gamma at the observed load, what to do, and the best gamma by batch and context."""
    situation = advice.situation
    heads = (
        "gamma",
        "tokens/step",
        "predicted per token",
        "over the gamma in use (90 % interval)",
    )
    rows = []
    for choice in advice.choices:
        name = f"{choice.gamma}"
        if choice.gamma == situation.gamma:
            name += " in use"
        rows.append(
            (
                name,
                f"{choice.tokens_per_step:.2f}",
                format_seconds(choice.tpot_s),
                f"{choice.gain:.2f} ({choice.gain_low:.2f} to {choice.gain_high:.2f})",
            )
        )
    lines = table_lines(heads, rows)
    lines.append(_advice_line(advice))
    in_use = advice.in_use.tpot_s
    if measured_tpot_s and not 1 / MISFIT < in_use / measured_tpot_s < MISFIT:
        lines.append(
            f"  note: predicted {format_seconds(in_use)} per token now, measured "
            f"{format_seconds(measured_tpot_s)}: "
            "fit the engine's profile to this server (magicdec calibrate --server)"
        )
    fault = fault_of(advice, measured_tpot_s)
    if fault is not None:
        lines.append(f"  note: {fault.line}")
    lines.append(
        "best gamma by batch (down) and context (across); ? where it may not beat 0"
    )
    table = []
    for batch, row in zip(advice.batch_sizes, advice.table, strict=True):
        cells = [str(batch)]
        for gamma, is_sure in row:
            cells.append(f"{gamma}" if is_sure else f"{gamma}?")
        table.append(tuple(cells))
    return lines + table_lines(("", *map(str, advice.context_lens)), table)


def _advice_line(advice: Advice) -> str:
    """The gamma to run, and what it gains."""
    now = advice.situation.gamma
    best = advice.best
    rival = advice.rival
    shown = rival
    if best.gamma != now:
        shown = best
    gain = (
        f"{shown.gain - 1.0:+.0%} goodput, 90 % interval {shown.gain_low - 1.0:+.0%} to "
        f"{shown.gain_high - 1.0:+.0%}"
    )
    if advice.answer == "keep":
        change = "lose" if shown.gain_high < 1.0 else "change little"
        return f"advice: keep gamma {now}; gamma {shown.gamma} would {change} ({gain})"
    if advice.answer == "change":
        return f"advice: gamma {best.gamma} instead of {now} ({gain})"
    return (
        f"advice: unclear; gamma {shown.gamma} against {now} ({gain}); gamma {rival.gamma} may "
        f"reach {rival.gain_high - 1.0:+.0%}"
    )


def notes(observation: Observation, draft: ServedDraft) -> list[str]:
    """Warnings about the numbers: gaps in them, and likely misreadings."""
    counts = observation.counts
    texts = list(observation.notes)
    if observation.num_restarts:
        texts.append(
            f"the server restarted {observation.num_restarts} times; those intervals are left out"
        )
    if _is_idle(observation):
        texts.append("nothing was generated in this window: the server was idle")
    elif observation.unit == "runs" and not observation.is_speculative:
        texts.append(
            "it counts no drafts: where the server drafts, a step makes several tokens and takes as "
            "many times longer"
        )
    elif not observation.is_speculative:
        texts.append(
            "no draft was verified: the server runs without speculation, or none was ever found"
        )
    elif not counts.accepted_by_position:
        texts.append(
            "it does not count by position: the rate is one for all, with the same tokens per step"
        )
    is_live = not observation.form or observation.unit == "scrapes"
    if is_live and observation.is_speculative and counts.requests is None:
        texts.append(
            "this engine does not count requests: tokens per step cover the steps with a draft only"
        )
    if draft.is_assumed and observation.gamma:
        texts.append(
            f"it does not say what drafts: {draft.name} is taken for it, say --draft"
        )
    if is_live and observation.num_scrapes > 1 and observation.window_s is None:
        texts.append(
            "saved scrapes hold no times: tokens per second are not known, and gauges are of "
            "these two instants"
        )
    most = SHORT_DRAFT * ((observation.gamma or 0) * (counts.drafts or 0.0))
    is_short = 0 < (counts.draft_tokens or 0.0) < most
    if is_short and draft.may_be_absent:
        texts.append(
            "positions that were not drafted count as not accepted: the rates give the real "
            "tokens per step"
        )
    elif is_short:
        texts.append(
            "drafts were often shorter than gamma (a gamma that adapts?): "
            "deep rates are underestimated"
        )
    missing = _missing(observation)
    if is_live and missing:
        texts.append(missing)
    return texts


def _is_idle(observation: Observation) -> bool:
    counts = observation.counts
    return not (counts.output_tokens or counts.drafts or counts.counted_steps)


def _missing(observation: Observation) -> str:
    """The values that a busy server does not report, as text. Empty where it reports all."""
    counts = observation.counts
    values = {
        "running batch": observation.batch_size,
        "sequences' length": observation.context_len,
        "time per output token": counts.tpot_s,
        "time to first token": counts.ttft_s,
    }
    names = ", ".join(name for name, value in values.items() if value is None)
    if not names or _is_idle(observation):
        return ""
    remedy = ""
    if observation.target.series.engine == "trtllm":
        remedy = " (return_perf_metrics and enable_iter_perf_stats add series)"
    return f"not shown by this server: {names}{remedy}"


def trend_lines(history: Sequence[Observation]) -> list[str]:
    """The latest interval of each observation, as bars between the least and the greatest."""
    history = history[-TREND_WIDTH:]
    latest = [observation.segments[-1] for observation in history]
    series = (
        ("batch", [observation.load.running for observation in history], "{:.1f}"),
        (
            "tokens/step",
            [observation.tokens_per_step for observation in latest],
            "{:.2f}",
        ),
        (
            "ms per token",
            [observation.tpot_s and observation.tpot_s * 1e3 for observation in latest],
            "{:.1f}",
        ),
    )
    lines = []
    for name, values, form in series:
        known = [value for value in values if value is not None]
        if len(known) > 1:
            low = min(known)
            high = max(known)
            lines.append(
                f"  {name:<12} {bars(values)} {form.format(low)} to {form.format(high)}"
            )
    return lines


def bars(values: Sequence[float | None]) -> str:
    """One character for each value; a space where it is not known."""
    known = [value for value in values if value is not None]
    low = min(known)
    width = (max(known) - low) or 1.0
    text = ""
    for value in values:
        if value is None:
            text += " "
            continue
        height = int((value - low) / width * len(BARS))
        text += BARS[min(height, len(BARS) - 1)]
    return text
