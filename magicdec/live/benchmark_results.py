"""Loads to fit an engine to from the results of other load generators: GuideLLM's report and
AIPerf's records.

    GuideLLM  benchmarks.json (schema 2): benchmarks[].requests.successful[].info.timings,
    prompt_tokens, output_tokens
              (guidellm/schemas/base/request_stats.py, info.py)
    AIPerf    profile_export.jsonl: metadata.request_start_ns; metrics.time_to_first_token,
    request_latency,
              inter_chunk_latency, input_sequence_length, output_sequence_length, each with its unit
              (aiperf/common/models/record_models.py, metrics/types)

Neither starts all requests of a load at once, so some are prefilled while others decode. AIPerf
records every event: only gaps in which no other request waits for its first token are timed.
GuideLLM records the first and the last: a request counts only if others wait for at most
`MAX_PREFILL_SHARE` of its decoding. The batch is the mean number of requests that decode meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

import numpy as np

from magicdec.counts import Array
from magicdec.errors import ConfigError
from magicdec.files import RESULTS_LIMIT_BYTES, json_documents, read_text
from magicdec.live.drive import MIN_STEPS, Measured, SentLoad, check_enough
from magicdec.units import GIGA, LARGEST_NUMBER, MILLI, read_number

MAX_PREFILL_SHARE = 0.1
"""Share of a request's decoding that others may wait for their prompts, where only its first and last
token have a time."""
MAX_TOKENS_PER_EVENT = 1.5
"""Median of a run that only a draft explains; an engine whose reader lags puts up to two tokens in
an event.
"""
BINS_PER_DOUBLING = 2.0
"""Requests whose batch and prompt round to the same half of a doubling are one load."""
UNITS_S = {"ns": 1 / GIGA, "us": MILLI * MILLI, "ms": MILLI, "s": 1.0, "sec": 1.0}


MOST_EVENTS = 1e7
"""Events of a streamed request, more than any output has tokens."""


@dataclass(frozen=True, kw_only=True)
class TimedRequest:
    """One request by the clock of its run."""

    start_s: float
    events_s: Array
    """Times of its events. Unless `is_timed`, only the first and the last are measured."""
    prompt_len: int
    output_len: int
    is_timed: bool
    is_drafted: bool = False
    """Whether the server reports a draft."""

    @property
    def tokens_per_event(self) -> float:
        """Above 1 with a draft, and where an event has no text or two came together: neither tool
        keeps those.
        """
        return max((self.output_len - 1) / max(len(self.events_s) - 1, 1), 1.0)

    @property
    def first_s(self) -> float:
        return float(self.events_s[0])

    @property
    def last_s(self) -> float:
        return float(self.events_s[-1])


@dataclass(frozen=True, kw_only=True)
class _RequestStep:
    """A step as one request saw it."""

    batch: float
    prompt_len: int
    output_len: int
    step_s: float
    ttft_s: float
    num_steps: int


def read_runs(path: Path) -> list[list[TimedRequest]]:
    """The requests of each run in a result file.

    Raises ConfigError where it is neither of the two, or holds no request that was streamed.
    """
    text = read_text(path, limit_bytes=RESULTS_LIMIT_BYTES)
    try:
        documents = json_documents(text)
        is_report = len(documents) == 1 and "benchmarks" in documents[0][1]
        if is_report:
            runs = runs_of_guidellm(documents[0][1])
        else:
            runs = [requests_of_aiperf([record for _, record in documents])]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        what = str(error)
        if isinstance(error, KeyError):
            what = f"no {error}"
        raise ConfigError(
            f"{path} is neither GuideLLM's benchmarks.json nor AIPerf's profile_export.jsonl: "
            f"{what}"
        ) from None
    if not any(len(request.events_s) > MIN_STEPS for run in runs for request in run):
        raise ConfigError(
            f"{path} holds no streamed request of more than {MIN_STEPS} events"
        )
    return runs


def runs_of_guidellm(report: Any) -> list[list[TimedRequest]]:
    runs = []
    for benchmark in report["benchmarks"]:
        requests = []
        for entry in (benchmark.get("requests") or {}).get("successful") or ():
            timings = entry["info"]["timings"]
            first = timings["first_token_iteration"]
            last = timings["last_token_iteration"]
            events = timings["token_iterations"]
            if first is None or last is None:
                continue
            requests.append(
                TimedRequest(
                    start_s=read_number(timings["request_start"]),
                    events_s=np.linspace(
                        read_number(first),
                        read_number(last),
                        max(int(read_number(events, most=MOST_EVENTS)), 1),
                    ),
                    prompt_len=int(read_number(entry["prompt_tokens"])),
                    output_len=int(read_number(entry["output_tokens"])),
                    is_timed=False,
                    is_drafted=bool(
                        (entry.get("response_metrics") or {}).get(
                            "speculative_decoding"
                        )
                    ),
                )
            )
        runs.append(requests)
    return runs


def requests_of_aiperf(records: Sequence[Any]) -> list[TimedRequest]:
    requests = []
    for record in records:
        metadata = record["metadata"]
        metrics = record["metrics"]
        if (
            record.get("error")
            or metadata.get("was_cancelled")
            or metadata["benchmark_phase"] != "profiling"
        ):
            continue
        if "time_to_first_token" not in metrics:
            continue
        gaps = metrics.get("inter_chunk_latency", {"value": [], "unit": "ms"})
        start = (
            read_number(metadata["request_start_ns"], most=LARGEST_NUMBER * GIGA) / GIGA
        )
        waited = metrics["time_to_first_token"]
        first = start + read_number(waited["value"]) * UNITS_S[waited["unit"]]
        between = (
            np.array(list(map(read_number, gaps["value"]))) * UNITS_S[gaps["unit"]]
        )
        requests.append(
            TimedRequest(
                start_s=start,
                events_s=first + np.concatenate([[0.0], np.cumsum(between)]),
                prompt_len=int(read_number(metrics["input_sequence_length"]["value"])),
                output_len=int(read_number(metrics["output_sequence_length"]["value"])),
                is_timed=True,
                is_drafted=bool(record.get("spec_decode_acceptance")),
            )
        )
    return requests


def points_of(runs: Sequence[Sequence[TimedRequest]]) -> list[Measured]:
    """One point for each load: the median over its requests. As in a planned calibration a
    chequerboard of them judges.

    Raises ConfigError: several tokens per event (a draft), prefill in every decoding, too few
    loads.
    """
    cells: dict[tuple[int, int], list[_RequestStep]] = {}
    for run in runs:
        per_event = tokens_per_event([run])
        is_drafted = any(request.is_drafted for request in run)
        if is_drafted or per_event > MAX_TOKENS_PER_EVENT:
            raise ConfigError(
                f"these requests drafted ({per_event:.2f} tokens per event): an engine's costs are "
                "fitted to runs without a draft"
            )
        for request in run:
            decoding = _decoding(request, run)
            if decoding is not None:
                cell = (_bin(decoding.batch), _bin(decoding.prompt_len))
                cells.setdefault(cell, []).append(decoding)
    if not cells:
        raise ConfigError(
            "while each of these requests decoded, others waited for their first token: no step "
            "without prefill was seen. Send longer outputs, or fewer requests at once, or use "
            "AIPerf, which records the time of each event"
        )
    batches = sorted({batch for batch, _ in cells})
    prompts = sorted({prompt for _, prompt in cells})
    points = []
    for (batch, prompt), decodings in sorted(cells.items()):
        is_judge = (batches.index(batch) + prompts.index(prompt)) % 2 == 1
        points.append(_point(decodings, is_judge=is_judge))
    check_enough([point.load for point in points])
    return points


def _bin(size: float) -> int:
    """The half of a doubling that a size rounds to."""
    return round(BINS_PER_DOUBLING * log2(max(size, 1.0)))


def tokens_per_event(runs: Sequence[Sequence[TimedRequest]]) -> float:
    """The median over requests. Above 1 with a draft, or where the reader lagged."""
    tokens = []
    for run in runs:
        for request in run:
            if len(request.events_s) > MIN_STEPS:
                tokens.append(request.tokens_per_event)
    if tokens:
        return float(np.median(tokens))
    return 1.0


def _decoding(
    request: TimedRequest, run: Sequence[TimedRequest]
) -> _RequestStep | None:
    """None where too little of the request's decoding is free of others' prefill."""
    steps = len(request.events_s) - 1
    if steps < MIN_STEPS:
        return None
    neighbours = []
    for other in run:
        overlaps = other.start_s < request.last_s and other.last_s > request.first_s
        if other is not request and overlaps:
            neighbours.append(other)
    before = request.events_s[:-1]
    after = request.events_s[1:]

    def shared(start: float, end: float) -> Array:
        """Seconds of each gap that lie between `start` and `end`."""
        return np.asarray(
            np.clip(np.minimum(after, end) - np.maximum(before, start), 0.0, None)
        )

    waits = np.zeros(steps)
    decodes = np.zeros(steps)
    for other in neighbours:
        waits += shared(other.start_s, other.first_s)
        decodes += shared(other.first_s, other.last_s)
    free = waits == 0.0
    if not request.is_timed:
        free = np.full(steps, waits.sum() <= MAX_PREFILL_SHARE * (after - before).sum())
    if free.sum() < MIN_STEPS:
        return None
    taken = (after - before)[free].sum()
    return _RequestStep(
        batch=1.0 + float(decodes[free].sum() / taken),
        prompt_len=request.prompt_len,
        output_len=request.output_len,
        step_s=float(taken / free.sum()) / request.tokens_per_event,
        ttft_s=request.first_s - request.start_s,
        num_steps=int(free.sum()),
    )


def _point(decodings: Sequence[_RequestStep], *, is_judge: bool) -> Measured:
    def median(name: str) -> float:
        return float(np.median([getattr(decoding, name) for decoding in decodings]))

    low, high = np.quantile([decoding.step_s for decoding in decodings], [0.25, 0.75])
    prompt = median("prompt_len")
    output = median("output_len")
    load = SentLoad(
        concurrency=round(median("batch")),
        prompt_len=round(prompt),
        output_len=round(output),
        is_judge=is_judge,
    )
    step = median("step_s")
    return Measured(
        load=load,
        step_s=step,
        tpot_s=step,
        tokens_per_step=1.0,
        context_len=prompt + output / 2.0,
        ttft_s=median("ttft_s"),
        num_steps=sum(decoding.num_steps for decoding in decodings),
        spread=float(high - low) / 2.0 / step,
    )
