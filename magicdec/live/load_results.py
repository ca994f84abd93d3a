"""Load generators' results:

    vllm bench serve        vllm/benchmarks/serve.py (benchmark_serving.py before), printed and as JSON
    sglang.bench_serving    python/sglang/bench_serving.py, printed and as JSON
    AIPerf, GenAI-Perf      profile_export_aiperf.json, profile_export_genai_perf.json; AIPerf's records,
                            profile_export.jsonl
    GuideLLM                benchmarks.json

All say the same under other names, which `NAMES` lists. The batch is the mean number of sequences that
decode at once: the time that all requests took between their first token and their last, over the
run's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from magicdec.errors import ConfigError
from magicdec.live.benchmark_results import (
    TimedRequest,
    requests_of_aiperf,
    runs_of_guidellm,
)
from magicdec.live.engine_logs import UNDRAFTED, number_in
from magicdec.live.metrics import NOT_TOLD, SGLANG, TRTLLM, VLLM, Series
from magicdec.live.observation import UNNAMED, CounterIncreases, check_time
from magicdec.live.reading import Reading, Readings
from magicdec.perfmodel.acceptance.files import histogram_survivors
from magicdec.perfmodel.acceptance.law import MAX_POSITIONS
from magicdec.redaction import quoted
from magicdec.units import MILLI, read_number

NAMES = {
    "requests": ("successful requests", "completed", "request count"),
    "duration": ("benchmark duration", "duration"),
    "input_tokens": ("total input tokens",),
    "output_tokens": ("total generated tokens", "total output tokens"),
    "input_len": ("input sequence length",),
    "output_len": ("output sequence length", "output token count"),
    "ttft": ("mean ttft", "time to first token"),
    "tpot": ("mean tpot", "inter token latency"),
    "latency": ("mean e2e latency", "mean e2el", "request latency"),
    "speed": ("output token throughput", "output throughput"),
    "concurrency": ("concurrency",),
    "most_at_once": (
        "maximum request concurrency",
        "max request concurrency",
        "max concurrency",
    ),
    "accept_length": (
        "accept length",
        "acceptance length",
        "spec decode acceptance length",
    ),
    "drafts": ("drafts", "spec decode num drafts"),
    "draft_tokens": ("draft tokens", "spec decode draft tokens"),
    "accepted": ("accepted tokens", "spec decode accepted tokens"),
}
"""Names of a run's numbers in the generators' texts."""
KEYS = {name: key for key, names in NAMES.items() for name in names}
GUIDELLM_MEANS = {
    "input_len": "prompt_token_count",
    "output_len": "output_token_count",
    "ttft": "time_to_first_token_ms",
    "tpot": "inter_token_latency_ms",
    "concurrency": "request_concurrency",
    "speed": "output_tokens_per_second",
}
"""Names of GuideLLM's means over the requests that were served."""
TIMES = frozenset(("ttft", "tpot", "latency", "duration"))
UNITS = {"ms": MILLI, "s": 1.0, "sec": 1.0, "us": MILLI**2, "ns": MILLI**3}
UNIT = re.compile(r"[(\[](ms|us|ns|sec|s)[)\]]|[ _](ms|s)$")
POSITION = re.compile(r"position (\d{1,3})$")
REPORT = "Serving Benchmark Result"
OF_TIMES = (
    "output_tokens",
    "requests",
    "mean_tpot_sum",
    "mean_tpot_count",
    "ttft_sum",
    "ttft_count",
    "prompt_tokens_sum",
    "prompt_tokens_count",
    "request_output_sum",
)
"""Counts that a run has, and its requests' drafts do not."""
ENGINES: dict[str, Series] = {
    "vllm": VLLM,
    "openai": VLLM,
    "openai-chat": VLLM,
    "sglang": SGLANG,
    "trt": TRTLLM,
    "tensorrt": TRTLLM,
    "tensorrtllm": TRTLLM,
}
"""Series by the backend that a generator names."""


@dataclass(kw_only=True)
class LoadRun:
    """One run of a load generator: its numbers by `NAMES`, times in seconds."""

    numbers: dict[str, float] = field(default_factory=dict)
    by_position: dict[int, float] = field(default_factory=dict)
    """Share of the drafts that were accepted at each position."""
    engine: str = ""
    model: str = ""

    def add(self, name: str, value: float | None, unit: str = "") -> None:
        """Adds a number under any of its names; the first one counts."""
        plain, told = _plain(name)
        position = POSITION.match(plain)
        if value is None or not math.isfinite(value):
            return
        if position is not None and int(position[1]) < MAX_POSITIONS:
            self.by_position.setdefault(int(position[1]), value / 100.0)
        key = KEYS.get(plain)
        if key is None or key in self.numbers:
            return
        if value < 0.0 or (key == "accept_length" and 0.0 < value < 1.0):
            raise ConfigError(f"{plain}: {value:g} is none that a run has")
        if key in TIMES:
            usual = 1.0 if key == "duration" else MILLI
            check_time(plain, value)  # before a unit that makes it 0
            value *= UNITS.get(unit or told, usual)
        self.numbers[key] = value


def _plain(name: str) -> tuple[str, str]:
    """A name in small letters without its unit, and the unit."""
    name = name.strip().lower().replace("_", " ")
    unit = UNIT.search(name)
    told = next(filter(None, unit.groups()), "") if unit else ""
    plain = re.split(r"[(\[]", name, maxsplit=1)[0]
    if unit and unit[2]:
        plain = name[: unit.start()]
    return " ".join(plain.split()), told


def _seconds_per_token(told: Mapping[str, float], length: float) -> float | None:
    """Time per output token: the stated one, else from the latency of outputs of this length."""
    if "tpot" in told or "latency" not in told or "ttft" not in told or length <= 1.0:
        return told.get("tpot")
    return max(told["latency"] - told["ttft"], 0.0) / (length - 1.0)


def reading_of(run: LoadRun) -> Reading | None:
    """A run as a reading of decoding; None: it has no time and no count of one."""
    told = run.numbers
    requests = told.get("requests", 1.0) or 1.0
    output = told.get("output_tokens", told.get("output_len", 0.0) * requests)
    prompts = told.get("input_tokens", told.get("input_len", 0.0) * requests)
    tpot_s = _seconds_per_token(told, output / requests)
    seconds = told.get("duration")
    if told.get("speed") and not output:
        output = told["speed"]
        requests = 0.0
    if seconds is None and told.get("speed") and output:
        seconds = output / told["speed"]
    weight = requests or 1.0
    after_first = max(output - requests, 0.0)
    running = told.get("concurrency", told.get("most_at_once"))
    if tpot_s and seconds and after_first:
        running = tpot_s * after_first / seconds
    counts = _draft_counts(run, after_first)
    if tpot_s is None and not counts.get("drafts"):
        return None
    return Reading(
        counts=CounterIncreases(
            output_tokens=output or None,
            requests=requests,
            mean_tpot_sum=tpot_s and tpot_s * weight,
            mean_tpot_count=weight,
            ttft_sum=told["ttft"] * weight if "ttft" in told else None,
            ttft_count=weight,
            prompt_tokens_sum=prompts or None,
            prompt_tokens_count=requests,
            request_output_sum=output or None,
            **counts,
        ),
        running=running,
        seconds=seconds,
    )


def _draft_counts(run: LoadRun, after_first: float) -> dict[str, Any]:
    """Counts of drafts: the stated ones, else from tokens per step and the tokens."""
    told = run.numbers
    accepted = told.get("accepted")
    drafts = told.get("drafts")
    length = told.get("accept_length")
    by_position: tuple[float, ...] = ()
    if drafts is None and length is not None and length >= 1.0:
        drafts = max(after_first, 1.0) / length
        if accepted is not None and length > 1.0:
            drafts = accepted / (length - 1.0)
    if not drafts:
        return {"drafts": 0.0, "accepted": 0.0, "counted_steps": after_first or None}
    if accepted is None:
        accepted = drafts * max((length or 1.0) - 1.0, 0.0)
    if run.by_position:
        least = 1.0
        survived = []
        for position in sorted(run.by_position):
            least = min(run.by_position[position], least)
            survived.append(drafts * least)
        by_position = tuple(survived)
    alone = after_first - accepted
    return {
        "drafts": drafts,
        "draft_tokens": told.get("draft_tokens"),
        "accepted": accepted,
        "accepted_by_position": by_position,
        "counted_steps": alone if alone > UNDRAFTED * drafts else drafts,
    }


def _readings(runs: Sequence[LoadRun]) -> Readings:
    readings = []
    for run in runs:
        reading = reading_of(run)
        if reading is not None:
            readings.append(reading)
    first = runs[0] if runs else LoadRun()
    notes = []
    if len(readings) > 1:
        notes.append(f"{len(readings)} runs are taken together, whatever their loads")
    return Readings(
        series=ENGINES.get(first.engine, NOT_TOLD),
        unit="runs",
        readings=readings,
        model=first.model,
        draft=UNNAMED,
        gamma=_depth(readings),
        notes=tuple(notes),
    )


def _depth(readings: Sequence[Reading]) -> int | None:
    """Drafted tokens of a step; None: only accepted ones are stated."""
    for reading in readings:
        counts = reading.counts
        if counts.draft_tokens and counts.drafts:
            return max(round(counts.draft_tokens / counts.drafts), 1)
    return None


def is_report(text: str) -> bool:
    return REPORT in text


def read_report(text: str) -> Readings:
    """Reads the printed summaries of `vllm bench serve` and sglang.bench_serving, one or several."""
    runs: list[LoadRun] = []
    for line in text.splitlines():
        if REPORT in line:
            runs.append(LoadRun())
            continue
        name, colon, value = line.partition(":")
        if not colon or not runs:
            continue
        if name.strip().lower() == "backend":
            runs[-1].engine = value.strip().lower()
        if "retokenized" in name:
            runs[-1].engine = "sglang"
        # thousands are apart by commas or not
        runs[-1].add(name, number_in(value.replace(",", "")))
    return _readings(runs)


def is_result(document: Any) -> bool:
    return (
        "mean_ttft_ms" in document
        or "spec_decode_num_drafts" in document
        or ("accept_length" in document and "output_throughput" in document)
    )


def read_result(documents: Sequence[Any]) -> Readings:
    """--save-result of vLLM, --output-file of SGLang: a document for each run."""
    runs = []
    for document in documents:
        run = LoadRun()
        for name, value in document.items():
            if isinstance(value, int | float):
                run.add(name, read_number(value))
        rates = document.get("spec_decode_per_position_acceptance_rates")
        for position, rate in enumerate(rates or ()):
            run.add(f"position {position}", read_number(rate) * 100.0)
        run.engine = str(document.get("backend") or "").lower()
        run.model = quoted(document.get("model_id") or "")[:200]
        runs.append(run)
    return _readings(runs)


def is_summary(document: Any) -> bool:
    return any(
        isinstance(document.get(name), dict) and "avg" in document[name]
        for name in (
            "inter_token_latency",
            "request_latency",
            "output_token_throughput",
        )
    )


def read_summary(documents: Sequence[Any]) -> Readings:
    """profile_export_genai_perf.json and profile_export_aiperf.json."""
    runs = []
    for document in documents:
        run = LoadRun()
        for name, told in document.items():
            if isinstance(told, dict) and isinstance(told.get("avg"), int | float):
                run.add(name, read_number(told["avg"]), str(told.get("unit") or ""))
        runs.append(run)
    return _readings(runs)


def is_guidellm(document: Any) -> bool:
    return isinstance(document.get("benchmarks"), list)


def read_guidellm(documents: Sequence[Any]) -> Readings:
    runs = []
    drafted: list[Reading] = []
    for benchmark in [each for report in documents for each in report["benchmarks"]]:
        requests: Any = (benchmark.get("requests") or {}).get("successful") or ({},)
        if "timings" in (requests[0].get("info") or {}):
            (timed,) = runs_of_guidellm({"benchmarks": [benchmark]})
            runs.append(_of_requests(timed, benchmark.get("duration")))
        else:
            runs.append(_of_means(benchmark.get("metrics") or {}))
        drafted += _drafted(
            (request.get("response_metrics") or {}).get("speculative_decoding")
            for request in requests
        )
    return _with_drafts(_readings(runs), drafted)


def _of_means(metrics: Mapping[str, Any]) -> LoadRun:
    """A report without its requests: the means of those that were served."""
    numbers = {}
    for quantity, name in GUIDELLM_MEANS.items():
        mean = ((metrics.get(name) or {}).get("successful") or {}).get("mean")
        if isinstance(mean, int | float):
            numbers[quantity] = read_number(mean) * (
                MILLI if quantity in TIMES else 1.0
            )
    return LoadRun(numbers=numbers)


def is_aiperf(document: Any) -> bool:
    return isinstance(document.get("metadata"), dict) and isinstance(
        document.get("metrics"), dict
    )


def read_aiperf(documents: Sequence[Any]) -> Readings:
    drafted = _drafted(record.get("spec_decode_acceptance") for record in documents)
    timed = [record for record in documents if record["metrics"]]
    run = _of_requests(requests_of_aiperf(timed), None)
    return _with_drafts(_readings([run]), drafted)


def _of_requests(requests: Sequence[TimedRequest], duration: Any) -> LoadRun:
    """A run from the times of its requests."""
    if not requests:
        return LoadRun()
    count = len(requests)
    outputs = math.fsum(request.output_len for request in requests)
    decoded_s = math.fsum(request.last_s - request.first_s for request in requests)
    waited_s = math.fsum(request.first_s - request.start_s for request in requests)
    began_s = min(request.start_s for request in requests)
    took_s = max(request.last_s for request in requests) - began_s
    if isinstance(duration, int | float) and duration > 0.0:
        took_s = read_number(duration)
    numbers = {
        "requests": read_number(count),
        "input_tokens": math.fsum(request.prompt_len for request in requests),
        "output_tokens": outputs,
        "ttft": waited_s / count,
        "tpot": decoded_s / max(outputs - count, 1.0),
        "duration": took_s,
    }
    return LoadRun(numbers=numbers)


def _drafted(found: Iterable[Any]) -> list[Reading]:
    """Requests' drafts alone, by position, from their histograms of accepted drafts."""
    readings = []
    for each in found:
        for survivors in histogram_survivors(each):
            drafts, *accepted = survivors[: MAX_POSITIONS + 1]
            readings.append(
                Reading(
                    counts=CounterIncreases(
                        drafts=drafts,
                        draft_tokens=drafts * len(accepted),
                        accepted=math.fsum(accepted),
                        accepted_by_position=tuple(accepted),
                        counted_steps=drafts,
                        **dict.fromkeys(OF_TIMES, 0.0),
                    ),
                    seconds=0.0,
                )
            )
    return readings


def _with_drafts(logged: Readings, drafted: Sequence[Reading]) -> Readings:
    """Runs, whose steps are those that their requests' histograms count."""
    if not drafted:
        return logged
    timed = []
    for reading in logged.readings:
        counts = replace(reading.counts, counted_steps=0.0, draft_tokens=0.0)
        timed.append(replace(reading, counts=counts))
    readings = [*timed, *drafted]
    return replace(
        logged,
        unit="requests",
        number=len(drafted),
        readings=readings,
        gamma=_depth(drafted),
    )
