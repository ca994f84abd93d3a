"""Loads to fit an engine to from the results of other load generators: GuideLLM's report and AIPerf's records.

    GuideLLM  benchmarks.json (schema 2): benchmarks[].requests.successful[].info.timings, prompt_tokens, output_tokens
              (guidellm/schemas/base/request_stats.py, info.py)
    AIPerf    profile_export.jsonl: metadata.request_start_ns; metrics.time_to_first_token, request_latency,
              inter_chunk_latency, input_sequence_length, output_sequence_length, each with its unit
              (aiperf/common/models/record_models.py, metrics/types)

Neither starts all requests of a load at once, so some are prefilled while others decode. AIPerf records every event:
only gaps in which no other request waits for its first token are timed. GuideLLM records the first and the last: a
request counts only if others wait for at most `MAX_PREFILL_SHARE` of its decoding. The batch is the mean number of
requests that decode meanwhile.
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
from magicdec.live.drive import MIN_STEPS, Load, Measured, check_enough
from magicdec.units import GIGA, MILLI

MAX_PREFILL_SHARE = 0.1
MAX_TOKENS_PER_EVENT = 1.5
"""Median of a run that only a draft explains; an engine whose reader lags puts up to two tokens in an event."""
BINS_PER_DOUBLING = 2.0
"""Requests whose batch and prompt round to the same half of a doubling are one load."""
UNITS_S = {"ns": 1 / GIGA, "us": MILLI * MILLI, "ms": MILLI, "s": 1.0, "sec": 1.0}


@dataclass(frozen=True, kw_only=True)
class Request:
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
        """Above 1 with a draft, and where an event has no text or two came together: neither tool keeps those."""
        return max((self.output_len - 1) / max(len(self.events_s) - 1, 1), 1.0)

    @property
    def first_s(self) -> float:
        return float(self.events_s[0])

    @property
    def last_s(self) -> float:
        return float(self.events_s[-1])


@dataclass(frozen=True, kw_only=True)
class _Decoding:
    """A step as one request saw it."""

    batch: float
    prompt_len: int
    output_len: int
    step_s: float
    ttft_s: float
    num_steps: int


def read_runs(path: Path) -> list[list[Request]]:
    """The requests of each run in a result file.

    Raises ConfigError where it is neither of the two, or holds no request that was streamed.
    """
    text = read_text(path, limit_bytes=RESULTS_LIMIT_BYTES)
    try:
        documents = json_documents(text)
        is_report = len(documents) == 1 and "benchmarks" in documents[0][1]
        runs = _guidellm(documents[0][1]) if is_report else [_aiperf([record for _, record in documents])]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise ConfigError(
            f"{path} is neither GuideLLM's benchmarks.json nor AIPerf's profile_export.jsonl: {what}"
        ) from None
    if not any(len(request.events_s) > MIN_STEPS for run in runs for request in run):
        raise ConfigError(f"{path} holds no streamed request of more than {MIN_STEPS} events")
    return runs


def _guidellm(report: Any) -> list[list[Request]]:
    runs = []
    for benchmark in report["benchmarks"]:
        found = []
        for each in benchmark["requests"]["successful"]:
            timings = each["info"]["timings"]
            first, last = timings["first_token_iteration"], timings["last_token_iteration"]
            events = timings["token_iterations"]
            if first is None or last is None:
                continue
            found.append(
                Request(
                    start_s=float(timings["request_start"]),
                    events_s=np.linspace(float(first), float(last), max(int(events), 1)),
                    prompt_len=int(each["prompt_tokens"]),
                    output_len=int(each["output_tokens"]),
                    is_timed=False,
                    is_drafted=bool((each.get("response_metrics") or {}).get("speculative_decoding")),
                )
            )
        runs.append(found)
    return runs


def _aiperf(records: Sequence[Any]) -> list[Request]:
    found = []
    for record in records:
        metadata, metrics = record["metadata"], record["metrics"]
        if record.get("error") or metadata.get("was_cancelled") or metadata["benchmark_phase"] != "profiling":
            continue
        if "time_to_first_token" not in metrics:
            continue
        gaps = metrics.get("inter_chunk_latency", {"value": [], "unit": "ms"})
        start, waited = float(metadata["request_start_ns"]) / GIGA, metrics["time_to_first_token"]
        first = start + float(waited["value"]) * UNITS_S[waited["unit"]]
        between = np.asarray(gaps["value"], dtype=np.float64) * UNITS_S[gaps["unit"]]
        found.append(
            Request(
                start_s=start,
                events_s=first + np.concatenate([[0.0], np.cumsum(between)]),
                prompt_len=int(metrics["input_sequence_length"]["value"]),
                output_len=int(metrics["output_sequence_length"]["value"]),
                is_timed=True,
                is_drafted=bool(record.get("spec_decode_acceptance")),
            )
        )
    return found


def points_of(runs: Sequence[Sequence[Request]]) -> list[Measured]:
    """One point for each load: the median over its requests. As in a planned calibration a chequerboard of them judges.

    Raises ConfigError: several tokens per event (a draft), prefill in every decoding, too few loads.
    """
    for run in runs:
        per_event = tokens_per_event([run])
        if any(request.is_drafted for request in run) or per_event > MAX_TOKENS_PER_EVENT:
            raise ConfigError(
                f"{per_event:.2f} tokens came with each event of these requests, which had a draft: an engine's costs "
                "are fitted to runs without"
            )
    seen = [found for run in runs for found in map(_decoding, run, [run] * len(run)) if found is not None]
    if not seen:
        raise ConfigError(
            "while each of these requests decoded, others waited for their first token: no step without prefill was "
            "seen. Send longer outputs, or fewer requests at once, or use AIPerf, which records the time of each event"
        )
    cells: dict[tuple[int, int], list[_Decoding]] = {}
    for each in seen:
        row, column = (round(BINS_PER_DOUBLING * log2(max(size, 1.0))) for size in (each.batch, each.prompt_len))
        cells.setdefault((row, column), []).append(each)
    rows, columns = (sorted({cell[axis] for cell in cells}) for axis in (0, 1))
    points = [
        _point(found, is_judge=(rows.index(row) + columns.index(column)) % 2 == 1)
        for (row, column), found in sorted(cells.items())
    ]
    check_enough([point.load for point in points])
    return points


def tokens_per_event(runs: Sequence[Sequence[Request]]) -> float:
    """The median over requests. Above 1 with a draft, or where the reader lagged."""
    found = [request.tokens_per_event for run in runs for request in run if len(request.events_s) > MIN_STEPS]
    return float(np.median(found)) if found else 1.0


def _decoding(request: Request, run: Sequence[Request]) -> _Decoding | None:
    """None where too little of the request's decoding is free of others' prefill."""
    steps = len(request.events_s) - 1
    if steps < MIN_STEPS:
        return None
    others = [each for each in run if each is not request and each.start_s < request.last_s]
    others = [each for each in others if each.last_s > request.first_s]
    before, after = request.events_s[:-1], request.events_s[1:]

    def shared(start: float, end: float) -> Array:
        """Seconds of each gap that lie between `start` and `end`."""
        return np.asarray(np.clip(np.minimum(after, end) - np.maximum(before, start), 0.0, None))

    waits, decodes = np.zeros(steps), np.zeros(steps)
    for other in others:
        waits += shared(other.start_s, other.first_s)
        decodes += shared(other.first_s, other.last_s)
    free = waits == 0.0
    if not request.is_timed:
        free = np.full(steps, waits.sum() <= MAX_PREFILL_SHARE * (after - before).sum())
    if free.sum() < MIN_STEPS:
        return None
    taken = (after - before)[free].sum()
    return _Decoding(
        batch=1.0 + float(decodes[free].sum() / taken),
        prompt_len=request.prompt_len,
        output_len=request.output_len,
        step_s=float(taken / free.sum()) / request.tokens_per_event,
        ttft_s=request.first_s - request.start_s,
        num_steps=int(free.sum()),
    )


def _point(found: Sequence[_Decoding], *, is_judge: bool) -> Measured:
    def median(name: str) -> float:
        return float(np.median([getattr(each, name) for each in found]))

    low, high = np.quantile([each.step_s for each in found], [0.25, 0.75])
    prompt, output = median("prompt_len"), median("output_len")
    load = Load(
        concurrency=round(median("batch")), prompt_len=round(prompt), output_len=round(output), is_judge=is_judge
    )
    step = median("step_s")
    return Measured(
        load=load, step_s=step, tpot_s=step, tokens_per_step=1.0, context_len=prompt + output / 2.0,
        ttft_s=median("ttft_s"), num_steps=sum(each.num_steps for each in found),
        spread=float(high - low) / 2.0 / step,
    )  # fmt: skip
