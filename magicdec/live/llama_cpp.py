"""llama.cpp's statistics: its log, its answers, and the end of llama-speculative.

A request's prompt, tokens, milliseconds and drafts stand under one name in each text, which `PRINTED`
and `TIMINGS` list (tools/server, common/speculative.cpp; llama_print_timings of older releases).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from magicdec.live.engine_logs import Totals, draft_named
from magicdec.live.metrics import LLAMA_CPP
from magicdec.live.observation import UNNAMED, CounterIncreases, ServedDraft
from magicdec.live.reading import Reading, Readings
from magicdec.units import MILLI, read_number

PRINTED = {
    "prompt": re.compile(r"prompt eval time\s*=\s*([\d.]+) ms /\s*(\d+) tokens"),
    "output": re.compile(
        r"(?<!prompt )\beval time\s*=\s*([\d.]+) ms /\s*(\d+) (?:tokens|runs)"
    ),
    "accepted": re.compile(
        r"draft acceptance(?: rate)?\s*=\s*[\d.]+%?\s*\(\s*(\d+) accepted /\s*(\d+) generated"
    ),
    "method": re.compile(r"statistics\s+([\w-]{1,40}):"),
    "drafts": re.compile(r"#gen drafts\s*=\s*(\d+)"),
}
"""The statistics of a request in the log of the server."""
TIMINGS = {
    "prompt_len": ("prompt_n", 1.0),
    "prompt_s": ("prompt_ms", MILLI),
    "eval_s": ("predicted_ms", MILLI),
    "tokens": ("predicted_n", 1.0),
    "drafted": ("draft_n", 1.0),
}
"""The statistics of a request in the `timings` of an answer, with their units."""
TOTALS = re.compile(r"\b(n_draft|n_predict|n_drafted|n_accept)\s*=\s*(\d+)")
DECODED = re.compile(r"\bdecoded\s+(\d+) tokens in\s+([\d.]+) seconds,")
"""The statistics that llama-speculative prints at its end."""


@dataclass(kw_only=True)
class LlamaRequest:
    """One request's statistics."""

    prompt_len: float = 0.0
    prompt_s: float = 0.0
    eval_s: float | None = None
    tokens: float = 0.0
    accepted: float | None = None
    drafted: float = 0.0
    drafts: float | None = None


def is_llama_log(text: str) -> bool:
    return "eval time" in text and (
        "ms per token" in text or "tokens per second" in text
    )


def read_llama_log(text: str) -> Readings:
    requests: list[LlamaRequest] = []
    totals = Totals()
    draft: ServedDraft | None = None
    for line in text.splitlines():
        if "eval time" in line:
            _read_times(line, requests)
        elif "draft acceptance" in line and requests:
            accepted = PRINTED["accepted"].search(line)
            if accepted is not None:
                requests[-1].accepted = read_number(accepted[1])
                requests[-1].drafted = read_number(accepted[2])
        elif "#gen drafts" in line and requests:
            method = PRINTED["method"].search(line)
            count = PRINTED["drafts"].search(line)
            if method is not None and count is not None:
                # llama.cpp's names: "draft-mtp", "ngram_mod"
                if method[1].startswith("ngram"):
                    draft = ServedDraft(name="ngram", method="ngram")
                else:
                    draft = draft_named(method[1].removeprefix("draft-")) or draft
                (requests[-1].drafts,) = totals.increase(read_number(count[1]))
    return readings_of(requests, draft)


def _read_times(line: str, requests: list[LlamaRequest]) -> None:
    """Adds a time to its request, whose block begins with its prompt's time."""
    prompt = PRINTED["prompt"].search(line)
    if prompt is not None:
        requests.append(
            LlamaRequest(
                prompt_len=read_number(prompt[2]),
                prompt_s=read_number(prompt[1]) * MILLI,
            )
        )
        return
    output = PRINTED["output"].search(line)
    if output is None:
        return
    if not requests or requests[-1].eval_s is not None:
        requests.append(LlamaRequest())
    requests[-1].eval_s = read_number(output[1]) * MILLI
    requests[-1].tokens = read_number(output[2])


def is_llama_report(text: str) -> bool:
    return "n_drafted" in text and "n_accept" in text


def read_llama_report(text: str) -> Readings:
    """The end of llama-speculative: "n_drafted = 1207", "decoded 256 tokens in 3.9 seconds"."""
    told = {name: read_number(value) for name, value in TOTALS.findall(text)}
    decoded = DECODED.findall(text)
    request = LlamaRequest(
        tokens=told.get("n_predict", 0.0),
        accepted=told["n_accept"],
        drafted=told["n_drafted"],
    )
    if decoded:
        request.tokens = read_number(decoded[-1][0])
        request.eval_s = read_number(decoded[-1][1])
    readings = readings_of([request], None)
    if told.get("n_draft"):
        readings = replace(readings, gamma=max(int(told["n_draft"]), 1))
    return readings


def is_llama_answer(document: Any) -> bool:
    timings = document.get("timings")
    return isinstance(timings, dict) and "predicted_ms" in timings


def read_llama_answers(documents: Sequence[Any]) -> Readings:
    """llama.cpp's answers, one a line."""
    requests: list[LlamaRequest] = []
    for document in documents:
        timings = document.get("timings") or {}
        accepted = timings.get("draft_n_accepted")
        numbers = {}
        for quantity, (name, unit) in TIMINGS.items():
            numbers[quantity] = read_number(timings.get(name) or 0.0) * unit
        requests.append(
            LlamaRequest(
                accepted=None if accepted is None else read_number(accepted), **numbers
            )
        )
    return readings_of(requests, None)


def readings_of(
    requests: Sequence[LlamaRequest], draft: ServedDraft | None
) -> Readings:
    """A reading for each request that made tokens."""
    depths = []
    for request in requests:
        if request.drafts:
            depths.append(request.drafted / request.drafts)
        elif request.accepted is not None:
            # tokens drafted per step: a step emits one more than it accepts
            depths.append(request.drafted / max(request.tokens - request.accepted, 1.0))
    gamma = None
    if depths:
        gamma = max(math.ceil(max(depths)), 1)
    return Readings(
        series=LLAMA_CPP,
        unit="requests",
        readings=[_reading(request) for request in requests if request.tokens],
        draft=draft or UNNAMED,
        gamma=gamma,
        notes=("the times are of requests that ran alone: batch 1",),
    )


def _reading(request: LlamaRequest) -> Reading:
    accepted = min(request.accepted or 0.0, max(request.tokens - 1.0, 0.0))
    steps = max(request.tokens - accepted, 1.0)
    drafts = 0.0
    if request.accepted is not None:
        drafts = steps
        if request.drafts:
            drafts = min(request.drafts, steps)
    seconds = request.eval_s or 0.0
    return Reading(
        counts=CounterIncreases(
            drafts=drafts,
            draft_tokens=request.drafted,
            accepted=accepted,
            output_tokens=request.tokens,
            requests=0.0,
            counted_steps=steps,
            ttft_sum=request.prompt_s,
            ttft_count=1.0,
            prompt_tokens_sum=request.prompt_len,
            prompt_tokens_count=1.0,
            request_output_sum=request.tokens,
        ),
        running=1.0,
        step_s=seconds / steps if seconds else None,
        seconds=seconds or None,
    )
