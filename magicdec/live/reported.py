"""Load generators' results, printed, as CSV or as JSON:

    vllm bench serve        vllm/benchmarks/serve.py (benchmark_serving.py before)
    sglang.bench_serving    python/sglang/bench_serving.py
    trtllm-bench            tensorrt_llm/bench/dataclasses/reporting.py
    GenAI-Perf, AIPerf      console tables, profile_export_genai_perf.{json,csv}, profile_export_aiperf.{json,csv};
                            AIPerf's records, profile_export.jsonl
    GuideLLM                benchmarks.json
    llama.cpp               its server's answers (timings), what llama-speculative prints
    TensorRT-LLM            the statistics of iterations that its /metrics answers

All say the same under other names, which `NAMES` lists. The batch is the mean number of sequences that
decode at once: the time that all requests took between their first token and their last, over the
run's.
"""

from __future__ import annotations

import csv
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from magicdec.files import json_documents
from magicdec.live.benchmark_results import (
    TimedRequest,
    requests_of_aiperf,
    runs_of_guidellm,
)
from magicdec.live.engine_logs import (
    UNDRAFTED,
    Timed,
    number_in,
    of_llama_requests,
)
from magicdec.live.logged import LoggedSeries, Stretch
from magicdec.live.metrics import NOT_TOLD, SGLANG, TRTLLM, VLLM, Series
from magicdec.live.observation import UNNAMED, CounterIncreases
from magicdec.perfmodel import MAX_POSITIONS, histogram_survivors
from magicdec.units import MILLI, printable

NAMES = {
    "requests": ("successful requests", "completed", "request count"),
    "duration": ("benchmark duration", "duration", "total latency"),
    "input_tokens": ("total input tokens",),
    "output_tokens": ("total generated tokens", "total output tokens"),
    "input_len": ("input sequence length", "input length", "average input length"),
    "output_len": (
        "output sequence length",
        "output token count",
        "average output length",
    ),
    "ttft": ("mean ttft", "time to first token", "average time-to-first-token"),
    "tpot": ("mean tpot", "inter token latency", "average time-per-output-token"),
    "itl": ("mean itl",),
    "latency": (
        "mean e2e latency",
        "mean e2el",
        "request latency",
        "average request latency",
    ),
    "speed": (
        "output token throughput",
        "output throughput",
        "total output throughput",
    ),
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
        "average acceptance length",
    ),
    "drafts": ("drafts", "spec decode num drafts"),
    "draft_tokens": ("draft tokens", "spec decode draft tokens", "draft token count"),
    "accepted": (
        "accepted tokens",
        "spec decode accepted tokens",
        "accepted draft token count",
    ),
}
KEYS = {name: key for key, names in NAMES.items() for name in names}
TIMES = frozenset(("ttft", "tpot", "itl", "latency", "duration"))
UNITS = {"ms": MILLI, "s": 1.0, "sec": 1.0, "us": MILLI**2, "ns": MILLI**3}
UNIT = re.compile(r"[(\[](ms|us|ns|sec|s)[)\]]|[ _](ms|s)$")
POSITION = re.compile(r"position (\d{1,3})$")
CELLS = re.compile("[│┃|]")
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
TABLED = ("inter token latency", "time to first token")
REPORTS = ("Serving Benchmark Result", "PERFORMANCE OVERVIEW")
ENGINES: dict[str, Series] = {
    "vllm": VLLM,
    "openai": VLLM,
    "openai-chat": VLLM,
    "sglang": SGLANG,
    "trt": TRTLLM,
    "tensorrt": TRTLLM,
    "tensorrtllm": TRTLLM,
}


@dataclass(kw_only=True)
class Result:
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
        if value is None or not math.isfinite(value) or value < 0.0:
            return
        if position is not None and int(position[1]) < MAX_POSITIONS:
            self.by_position.setdefault(int(position[1]), value / 100.0)
        key = KEYS.get(plain)
        if key is None or key in self.numbers:
            return
        if key in TIMES:
            usual = 1.0 if key == "duration" else MILLI
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


def stretch_of(result: Result) -> Stretch | None:
    """A run as a stretch of decoding; None: it has no time and no count of one."""
    told = result.numbers
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
    counts = _draft_counts(result, after_first)
    if tpot_s is None and not counts.get("drafts"):
        return None
    return Stretch(
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


def _draft_counts(result: Result, after_first: float) -> dict[str, Any]:
    """Counts of drafts: the stated ones, else from tokens per step and the tokens."""
    told = result.numbers
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
    if result.by_position:
        least = 1.0
        survived = []
        for position in sorted(result.by_position):
            least = min(result.by_position[position], least)
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


def _logged(results: Iterable[Result]) -> LoggedSeries:
    results = list(results)
    stretches = []
    longest = 0.0
    for result in results:
        stretch = stretch_of(result)
        if stretch is not None:
            stretches.append(stretch)
        longest = max(longest, result.numbers.get("accept_length", 0.0))
    first = results[0] if results else Result()
    notes = []
    if len(stretches) > 1:
        notes.append(f"{len(stretches)} runs are taken together, whatever their loads")
    gamma = _depth(stretches, longest)
    if longest > 1.0 and not any(stretch.counts.draft_tokens for stretch in stretches):
        notes.append(f"drafted tokens per step are not told: at least {gamma}")
    return LoggedSeries(
        series=ENGINES.get(first.engine, NOT_TOLD),
        unit="runs",
        stretches=stretches,
        model=first.model,
        draft=UNNAMED,
        gamma=gamma,
        notes=tuple(notes),
    )


def _depth(stretches: Sequence[Stretch], longest: float) -> int | None:
    """Drafted tokens of a step; where only accepted ones are stated, the fewest that these need."""
    for stretch in stretches:
        counts = stretch.counts
        if counts.draft_tokens and counts.drafts:
            return max(round(counts.draft_tokens / counts.drafts), 1)
    if longest > 0.0:
        return min(max(math.ceil(longest) - 1, 1), MAX_POSITIONS)
    return None


# ---------------------------------------------------------------- printed


def is_report(text: str) -> bool:
    return any(title in text for title in REPORTS)


def read_report(text: str) -> LoggedSeries:
    """Reports of vLLM's, SGLang's and TensorRT-LLM's own generators, one or several."""
    results = [Result()]
    for line in text.splitlines():
        if any(title in line for title in REPORTS):
            results.append(Result(engine="trt" if REPORTS[1] in line else ""))
            continue
        name, colon, value = line.partition(":")
        if not colon:
            continue
        if name.strip().lower() == "backend":
            results[-1].engine = value.strip().lower()
        if "retokenized" in name:
            results[-1].engine = "sglang"
        results[-1].add(name, _amount(value))
    return _logged(results[1:])


def is_console(text: str) -> bool:
    return "Out Tok/sec" in text and "ITL (ms)" in text


def read_console(text: str) -> LoggedSeries:
    """GuideLLM's table in a console: sections over the columns' names."""
    results = []
    sections: list[str] = []
    names: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if "Out Tok/sec" in line and "ITL (ms)" in line:
            sections = _carried(cells)
        elif sections and "Concurrency" in cells:
            names = cells
        elif names and len(cells) == len(names) and "---" not in line:
            result = Result()
            for section, name, cell in zip(sections, names, cells, strict=False):
                if name == "mean":
                    result.add(CONSOLE.get(section, ""), _amount(cell))
                elif name == "Concurrency":
                    result.add("concurrency", _amount(cell))
            results.append(result)
    return _logged(results)


CONSOLE = {
    "Out Tok/sec": "output throughput",
    "TTFT (ms)": "mean ttft (ms)",
    "ITL (ms)": "mean tpot (ms)",
}


def _carried(cells: Sequence[str]) -> list[str]:
    """Sections' names over each of their columns."""
    carried: list[str] = []
    for cell in cells:
        carried.append(cell or (carried[-1] if carried else ""))
    return carried


def is_table(text: str) -> bool:
    small = text.lower()
    return any(name in small for name in TABLED) and bool(read_table(text).stretches)


def read_table(text: str) -> LoggedSeries:
    """GenAI-Perf's and AIPerf's tables: in a console, or as CSV."""
    result = Result()
    for line in text.splitlines():
        if CELLS.search(line):
            cells = [cell.strip() for cell in CELLS.split(line)]
        elif ":" in line:
            cells = list(line.rpartition(":")[::2])
        else:
            cells = next(csv.reader([line[:2000]]), [])
        cells = [cell for cell in cells if cell]
        if len(cells) > 1:
            result.add(cells[0], _amount(cells[1]))
    return _logged([result])


def _amount(text: str) -> float | None:
    """A number, thousands apart by commas or not."""
    return number_in(text.replace(",", ""))


# ---------------------------------------------------------------- JSON


@functools.lru_cache(maxsize=1)
def documents_of(text: str) -> tuple[Any, ...]:
    """The documents of a JSON text, or of JSON lines; empty: it is none."""
    if text.lstrip()[:1] not in ("{", "["):
        return ()
    try:
        return tuple(document for _, document in json_documents(text))
    except ValueError:
        return ()


def _first(text: str) -> Mapping[str, Any]:
    """The first document, where that is an object; else an empty one."""
    for document in documents_of(text):
        if isinstance(document, dict):
            return document
        break
    return {}


def is_result(text: str) -> bool:
    names = _first(text).keys()
    return (
        "mean_ttft_ms" in names
        or "spec_decode_num_drafts" in names
        or ("accept_length" in names and "output_throughput" in names)
    )


def read_result(text: str) -> LoggedSeries:
    """--save-result of vLLM, --output-file of SGLang: a document for each run."""
    results = []
    for document in documents_of(text):
        result = Result()
        for name, value in document.items():
            if isinstance(value, int | float):
                result.add(name, float(value))
        rates = document.get("spec_decode_per_position_acceptance_rates")
        for position, rate in enumerate(rates or ()):
            result.add(f"position {position}", float(rate) * 100.0)
        result.engine = str(document.get("backend") or "").lower()
        result.model = printable(str(document.get("model_id") or ""))[:200]
        results.append(result)
    return _logged(results)


def is_summary(text: str) -> bool:
    document = _first(text)
    return any(
        isinstance(document.get(name), dict) and "avg" in document[name]
        for name in (
            "inter_token_latency",
            "request_latency",
            "output_token_throughput",
        )
    )


def read_summary(text: str) -> LoggedSeries:
    """profile_export_genai_perf.json and profile_export_aiperf.json."""
    result = Result()
    for name, told in _first(text).items():
        if isinstance(told, dict) and isinstance(told.get("avg"), int | float):
            result.add(name, float(told["avg"]), str(told.get("unit") or ""))
    return _logged([result])


def is_guidellm(text: str) -> bool:
    benchmarks = _first(text).get("benchmarks")
    return isinstance(benchmarks, list)


def read_guidellm(text: str) -> LoggedSeries:
    report = _first(text)
    results = []
    drafted: list[Stretch] = []
    for benchmark in report["benchmarks"]:
        result = _of_metrics(benchmark)
        requests: Any = (benchmark.get("requests") or {}).get("successful") or ({},)
        if "timings" in (requests[0].get("info") or {}):
            (run,) = runs_of_guidellm({"benchmarks": [benchmark]})
            result = _of_requests(run, benchmark.get("duration"))
        drafted += _drafted(_metrics_of_guidellm(benchmark))
        results.append(result)
    return _with_drafts(_logged(results), drafted)


def _metrics_of_guidellm(benchmark: Mapping[str, Any]) -> Iterator[Any]:
    for request in (benchmark.get("requests") or {}).get("successful") or ():
        yield (request.get("response_metrics") or {}).get("speculative_decoding")


def _of_metrics(benchmark: Mapping[str, Any]) -> Result:
    """A report without its requests: the means of those that were served."""
    names = {
        "prompt_token_count": "input sequence length",
        "output_token_count": "output sequence length",
        "time_to_first_token_ms": "mean ttft (ms)",
        "inter_token_latency_ms": "mean tpot (ms)",
        "request_concurrency": "concurrency",
        "output_tokens_per_second": "output throughput",
    }
    result = Result()
    metrics = benchmark.get("metrics") or {}
    for name, ours in names.items():
        told = (metrics.get(name) or {}).get("successful") or {}
        if isinstance(told.get("mean"), int | float):
            result.add(ours, float(told["mean"]))
    return result


def is_aiperf(text: str) -> bool:
    first = _first(text)
    return isinstance(first.get("metadata"), dict) and isinstance(
        first.get("metrics"), dict
    )


def read_aiperf(text: str) -> LoggedSeries:
    records = documents_of(text)
    drafted = _drafted(record.get("spec_decode_acceptance") for record in records)
    timed = [record for record in records if record["metrics"]]
    result = _of_requests(requests_of_aiperf(timed), None)
    return _with_drafts(_logged([result]), drafted)


def _of_requests(run: Sequence[TimedRequest], duration: Any) -> Result:
    """A run from the times of its requests."""
    result = Result()
    if not run:
        return result
    decoded_s = math.fsum(request.last_s - request.first_s for request in run)
    outputs = math.fsum(request.output_len for request in run)
    after_first = max(outputs - len(run), 1.0)
    result.add("completed", float(len(run)))
    result.add("total input tokens", math.fsum(request.prompt_len for request in run))
    result.add("total output tokens", outputs)
    result.add(
        "mean ttft", math.fsum(r.first_s - r.start_s for r in run) / len(run), "s"
    )
    result.add("mean tpot", decoded_s / after_first, "s")
    began = min(request.start_s for request in run)
    took = max(request.last_s for request in run) - began
    if isinstance(duration, int | float) and duration > 0.0:
        took = float(duration)
    result.add("duration", took, "s")
    return result


def _drafted(found: Iterable[Any]) -> list[Stretch]:
    """Requests' drafts alone, by position, from their histograms of accepted drafts."""
    stretches = []
    for each in found:
        for survivors in histogram_survivors(each):
            drafts, *accepted = survivors[: MAX_POSITIONS + 1]
            stretches.append(
                Stretch(
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
    return stretches


def _with_drafts(logged: LoggedSeries, drafted: Sequence[Stretch]) -> LoggedSeries:
    """Runs, whose steps are those that their requests' histograms count."""
    if not drafted:
        return logged
    timed = []
    for stretch in logged.stretches:
        counts = replace(stretch.counts, counted_steps=0.0, draft_tokens=0.0)
        timed.append(replace(stretch, counts=counts))
    stretches = [*timed, *drafted]
    return replace(
        logged,
        unit="requests",
        number=len(drafted),
        stretches=stretches,
        gamma=_depth(drafted, 0.0),
    )


def is_iterations(text: str) -> bool:
    return "iterLatencyMS" in _one_of(text)


def _one_of(text: str) -> Mapping[str, Any]:
    """The first object, alone or in a list."""
    for document in documents_of(text)[:1]:
        first = document[0] if isinstance(document, list) and document else document
        if isinstance(first, dict):
            return first
    return {}


def read_iterations(text: str) -> LoggedSeries:
    """TensorRT-LLM's iterations that decoded alone."""
    stretches = []
    depths = []
    for document in documents_of(text):
        for told in document if isinstance(document, list) else [document]:
            batching = told.get("inflightBatchingStats") or {}
            running = float(batching.get("numGenRequests") or 0.0)
            if not running or batching.get("numCtxTokens"):
                continue
            drafting = told.get("specDecodingStats") or {}
            drafts = float(drafting.get("numRequestsWithDraftTokens") or 0.0)
            drafted = float(drafting.get("numDraftTokens") or 0.0)
            accepted = float(drafting.get("numAcceptedTokens") or 0.0)
            if drafts:
                depths.append(drafted / drafts)
            cache = told.get("kvCacheStats") or {}
            used = cache.get("usedNumBlocks")
            step_s = float(told["iterLatencyMS"]) * MILLI
            stretches.append(
                Stretch(
                    counts=CounterIncreases(
                        drafts=drafts,
                        draft_tokens=drafted,
                        accepted=accepted,
                        output_tokens=running + accepted,
                        requests=0.0,
                        iterations=1.0,
                        counted_steps=running,
                    ),
                    running=running,
                    waiting=told.get("numQueuedRequests"),
                    context_len=used
                    and used * cache.get("tokensPerBlock", 0) / running,
                    step_s=step_s,
                    seconds=step_s,
                )
            )
    gamma = None
    if depths:
        gamma = min(max(math.ceil(max(depths)), 1), MAX_POSITIONS)
    return LoggedSeries(
        series=TRTLLM,
        unit="iterations",
        stretches=stretches,
        draft=UNNAMED,
        gamma=gamma,
    )


def is_llama_report(text: str) -> bool:
    return "n_drafted" in text and "n_accept" in text


def read_llama_report(text: str) -> LoggedSeries:
    """The end of llama-speculative: "n_drafted = 1207", "decoded 256 tokens in 3.9 seconds"."""
    told: dict[str, float] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        words = line.split()
        if equals:
            number = number_in(value)
            if number is not None:
                told[name.split(":")[-1].strip()] = number
        elif "decoded" in words and "seconds," in words and "in" in words:
            at = words.index("decoded")
            told["tokens"] = number_in(words[at + 1]) or 0.0
            told["seconds"] = number_in(words[words.index("in") + 1]) or 0.0
    tokens = told.get("tokens") or told.get("n_predict") or 0.0
    request = Timed(
        eval_s=told.get("seconds"),
        tokens=tokens,
        accepted=told["n_accept"],
        drafted=told["n_drafted"],
    )
    logged = of_llama_requests([request], None)
    if told.get("n_draft"):
        logged = replace(logged, gamma=max(int(told["n_draft"]), 1))
    return logged


def is_llama_answers(text: str) -> bool:
    timings = _first(text).get("timings")
    return isinstance(timings, dict) and "predicted_ms" in timings


def read_llama_answers(text: str) -> LoggedSeries:
    """llama.cpp's answers, one a line."""
    requests: list[Timed] = []
    for document in documents_of(text):
        told = document.get("timings") or {}
        accepted = told.get("draft_n_accepted")
        requests.append(
            Timed(
                prompt_len=float(told.get("prompt_n") or 0.0),
                prompt_s=float(told.get("prompt_ms") or 0.0) * MILLI,
                eval_s=float(told.get("predicted_ms") or 0.0) * MILLI,
                tokens=float(told.get("predicted_n") or 0.0),
                accepted=None if accepted is None else float(accepted),
                drafted=float(told.get("draft_n") or 0.0),
            )
        )
    return of_llama_requests(requests, None)
