"""Scrapes of a metrics address, or saved ones, as samples by name; which engine and model they are
of; and under which names engines count what an observation needs.

A name is that of the sample as it is exposed ("_total", "_sum" and "_count" included), checked
against the sources:

    vLLM          vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py (0.32)
    SGLang        sglang/srt/observability/metrics_collector.py (0.5.23)
    TensorRT-LLM  tensorrt_llm/metrics/collector.py (1.3)
    llama.cpp     tools/server/README.md, "Available metrics";
    server_task_result_metrics::to_metrics
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from magicdec.errors import ConfigError, ServerError, unknown_choice
from magicdec.live.http import Address, get
from magicdec.redaction import quoted
from magicdec.units import LARGEST_NUMBER

Labels = Mapping[str, str]
ServingEngine = Literal["vllm", "sglang", "trtllm", "llama.cpp"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One engine's names, by the fields of `Counts` and `Load` (live/observation.py); what it lacks
    is left out.
    """

    engine: ServingEngine
    prefix: str
    replica_label: str | None = None
    """The label that tells apart engines of one model at one address."""
    position_label: str = "position"
    counters: Mapping[str, str]
    gauges: Mapping[str, str]


def _series(
    engine: ServingEngine,
    prefix: str,
    counters: Labels,
    gauges: Labels,
    **labels: str,
) -> Series:
    return Series(
        engine=engine,
        prefix=prefix,
        counters={key: prefix + name for key, name in counters.items()},
        gauges={key: prefix + name for key, name in gauges.items()},
        **labels,
    )


def _histograms(**names: str) -> dict[str, str]:
    series = {}
    for key, name in names.items():
        series[f"{key}_sum"] = f"{name}_sum"
        series[f"{key}_count"] = f"{name}_count"
    return series


POSITIONS = {
    "drafts": "spec_decode_num_drafts_total",
    "draft_tokens": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
    "accepted_by_position": "spec_decode_num_accepted_tokens_per_pos_total",
}
VLLM = _series(
    "vllm",
    "vllm:",
    POSITIONS
    | _histograms(
        ttft="time_to_first_token_seconds", prompt_tokens="request_prompt_tokens"
    )
    | {
        "output_tokens": "generation_tokens_total",
        "requests": "time_to_first_token_seconds_count",
        "iterations": "iteration_tokens_total_count",
        "counted_steps": "inter_token_latency_seconds_count",
        "step_seconds": "inter_token_latency_seconds_sum",
        "request_output_sum": "request_generation_tokens_sum",
    },
    {
        "running": "num_requests_running",
        "waiting": "num_requests_waiting",
        "kv_usage": "kv_cache_usage_perc",
    },
    replica_label="engine",
)
SGLANG = _series(
    "sglang",
    "sglang:",
    _histograms(
        mean_tpot="request_time_per_output_token_seconds",
        ttft="time_to_first_token_seconds",
        prompt_tokens="prompt_tokens_histogram",
        request_output="generation_tokens_histogram",
    )
    | {
        "drafts": "spec_verify_calls_total",
        "output_tokens": "generation_tokens_total",
        "requests": "num_requests_total",
    },
    {
        "running": "num_running_reqs",
        "waiting": "num_queue_reqs",
        "kv_usage": "token_usage",
        "sequence_tokens": "decode_sum_seq_lens",
        "gamma": "spec_num_steps",
    },
)
TRTLLM = _series(
    "trtllm",
    "trtllm_",
    _histograms(
        mean_tpot="time_per_output_token_seconds", ttft="time_to_first_token_seconds"
    )
    | {
        "draft_tokens": "spec_decode_num_draft_tokens_total",
        "accepted": "spec_decode_num_accepted_tokens_total",
        "accepted_by_position": "spec_decode_accepted_tokens_total",
        "drafted_by_position": "spec_decode_drafted_tokens_total",
        "output_tokens": "generation_tokens_total",
        "requests": "request_success_total",
        "decode_seconds": "request_decode_time_seconds_sum",
        "decode_requests": "request_decode_time_seconds_count",
        "prompt_tokens_sum": "prompt_tokens_total",
        "prompt_tokens_count": "request_success_total",
        "request_output_sum": "generation_tokens_total",
    },
    {
        "running": "num_generation_requests",
        "waiting": "num_requests_waiting",
        "kv_usage": "kv_cache_utilization",
        "kv_blocks": "kv_cache_used_blocks",
        "kv_block_tokens": "kv_cache_tokens_per_block",
    },
    position_label="token_position",
)
LLAMA_CPP = _series(
    "llama.cpp",
    "llamacpp:",
    POSITIONS
    | {
        "output_tokens": "tokens_predicted_total",
        "decode_seconds": "tokens_predicted_seconds_total",
    },
    {"running": "requests_processing", "waiting": "requests_deferred"},
)
ENGINES = (VLLM, SGLANG, TRTLLM, LLAMA_CPP)
NOT_TOLD = Series(engine="vllm", prefix="", counters={}, gauges={})
"""A file that does not say which engine it is of is predicted as the one that most serve with."""
CACHE_INFO = "vllm:cache_config_info"
"""A gauge of 1 whose labels hold vLLM's `num_gpu_blocks` and `block_size`."""
DRAFT_INFO = "magicdec:draft_info"
"""A gauge of 1 whose labels hold the method and the budget of magicdec's draft in vLLM
(vllm/draft_info.py).
"""
PROCESS_START = "process_start_time_seconds"

METRICS_PATHS = ("/metrics", "/prometheus/metrics")
"""Where engines answer in Prometheus's format: all but TensorRT-LLM, whose /metrics is JSON, and
TensorRT-LLM.
"""
NO_METRICS = ("not in Prometheus", "no metrics", "status 404")
"""Errors of an address that answers, but not with metrics."""
PREFIXES = tuple(series.prefix for series in ENGINES)
MIN_INTERVAL_S = 0.2
MAX_WINDOW_S = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Scrape:
    """All samples of one answer. NaN and infinite values are left out."""

    samples: Mapping[str, tuple[tuple[Labels, float], ...]] = field(repr=False)
    time_s: float | None = None
    """When it was read, by a clock that only runs forward; None for a file."""
    where: str = ""

    def rows(self, name: str | None, labels: Labels) -> list[tuple[Labels, float]]:
        """A name's samples whose labels include `labels`."""
        rows = []
        for own, value in self.samples.get(name or "", ()):
            if all(own.get(key) == labels[key] for key in labels):
                rows.append((own, value))
        return rows

    def total(self, name: str | None, labels: Labels) -> float | None:
        """The sum of `rows`; None where there is none."""
        values = [value for _, value in self.rows(name, labels)]
        if values:
            return math.fsum(values)
        return None

    def by_label(
        self, name: str | None, label: str, labels: Labels
    ) -> dict[str, float]:
        """The sums by the value of one label."""
        sums: dict[str, float] = {}
        for own, value in self.rows(name, labels):
            if label in own:
                sums[own[label]] = sums.get(own[label], 0.0) + value
        return sums

    def values(self, label: str, prefix: str) -> list[str]:
        """The values of a label, over the samples whose name starts with `prefix`."""
        values = set()
        for name, samples in self.samples.items():
            if not name.startswith(prefix):
                continue
            for labels, _ in samples:
                if label in labels:
                    values.add(labels[label])
        return sorted(values)


@dataclass(frozen=True, kw_only=True)
class Target:
    """One engine of one model behind an address."""

    series: Series
    model: str = ""
    replica: str = ""

    @property
    def labels(self) -> dict[str, str]:
        labels = {}
        if self.model:
            labels = {"model_name": self.model}
        if self.replica and self.series.replica_label:
            labels[self.series.replica_label] = self.replica
        return labels

    @property
    def name(self) -> str:
        return (
            "/".join(part for part in (self.model, self.replica) if part)
            or self.series.engine
        )


def parse(text: str, *, where: str, time_s: float | None = None) -> Scrape:
    """Raises ServerError for text that is not Prometheus's exposition format."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, list[tuple[Labels, float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not math.isfinite(sample.value):
                    continue
                if abs(sample.value) > LARGEST_NUMBER and sample.name.startswith(
                    PREFIXES
                ):
                    raise ServerError(
                        f"{where} counts {sample.value:g} of {sample.name}, which no engine has"
                    )
                labels = {name: quoted(value) for name, value in sample.labels.items()}
                samples.setdefault(sample.name, []).append(
                    (labels, float(sample.value))
                )
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise ServerError(
            f"{where} is not in Prometheus's text format: {error}"
        ) from None
    if not samples:
        raise ServerError(f"{where} holds no metrics in Prometheus's text format")
    return Scrape(
        samples={name: tuple(rows) for name, rows in samples.items()},
        time_s=time_s,
        where=where,
    )


def read_address(address: Address) -> Scrape:
    """Scrapes an address; without a path, where engines have their metrics. Raises ServerError."""
    paths: tuple[str, ...] = METRICS_PATHS
    if address.path:
        paths = (address.path,)
    for number, path in enumerate(paths, 1):
        at = address.at(path)
        try:
            body = get(at)
            return parse(
                body.decode("utf-8", errors="replace"),
                where=str(at),
                time_s=time.monotonic(),
            )
        except ServerError as error:
            if number == len(paths) or not any(
                text in str(error) for text in NO_METRICS
            ):
                raise
    raise AssertionError("no path was tried")


def scrapes(
    address: Address,
    *,
    seconds: float,
    interval_s: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Scrape]:
    """Yields each scrape when it is read: those of the window's start, end and every interval
    between; at least two, should one take as long as the window.

    Raises ConfigError for a window or interval out of range, ServerError for what cannot be read.
    """
    if not MIN_INTERVAL_S <= interval_s <= seconds <= MAX_WINDOW_S:
        raise ConfigError(
            f"the interval must be at least {MIN_INTERVAL_S} s and at most the window, and the "
            "window at most "
            f"{MAX_WINDOW_S:.0f} s; not {interval_s:g} s of {seconds:g} s"
        )
    started = clock()
    number = 0
    while True:
        yield read_address(address)
        number += 1
        due = min(number * interval_s, seconds)
        if number > 1 and clock() - started >= seconds:
            return
        sleep(max(due - (clock() - started), 0.0))


def windows(
    address: Address,
    *,
    seconds: float,
    interval_s: float,
    sleep: Callable[[float], None] = time.sleep,
    missed: Callable[[ServerError], None] = lambda error: None,
) -> Iterator[list[Scrape]]:
    """After each scrape from the second on, those of the last `seconds`; for a day at most. A
    server that answered once and does not any more is asked again, for it may be restarting:
    `missed` is called each time.

    Raises ServerError where it never answered.
    """
    taken: list[Scrape] = []
    deadline = time.monotonic() + MAX_WINDOW_S
    while time.monotonic() < deadline:
        try:
            for scrape in scrapes(
                address,
                seconds=MAX_WINDOW_S,
                interval_s=interval_s,
                sleep=sleep,
            ):
                oldest = (scrape.time_s or 0.0) - seconds
                taken.append(scrape)
                while (taken[0].time_s or 0.0) < oldest:
                    del taken[0]
                if len(taken) > 1:
                    yield list(taken)
        except ServerError as error:
            if not taken:
                raise
            missed(error)
            sleep(interval_s)


def targets(scrape: Scrape) -> list[Target]:
    """Every engine of every model in a scrape. Raises ServerError where it has no known engine."""
    listed: list[Target] = []
    for series in ENGINES:
        if not any(name.startswith(series.prefix) for name in scrape.samples):
            continue
        replicas: dict[str, set[str]] = {}
        for labels, _ in scrape.samples.get(series.gauges["running"], ()):
            replica = labels.get(series.replica_label or "")
            if replica is not None:
                replicas.setdefault(labels.get("model_name", ""), set()).add(replica)
        # a server of one model, or of one replica, may not label its series
        for model in scrape.values("model_name", series.prefix) or [""]:
            for replica in sorted(replicas.get(model, ())) or [""]:
                listed.append(Target(series=series, model=model, replica=replica))
    if not listed:
        known = ", ".join(f"{series.engine} ({series.prefix}...)" for series in ENGINES)
        raise ServerError(
            f"{scrape.where} has no metrics of a known engine; known: {known}"
        )
    return listed


def choose_target(scrape: Scrape, wanted: str | None) -> Target:
    """The one engine that is there, or the one named MODEL or MODEL/ENGINE. Raises ConfigError
    listing those there.
    """
    there = targets(scrape)
    if wanted is None:
        if len(there) > 1:
            names = ", ".join(target.name for target in there)
            raise ConfigError(
                f"{scrape.where} has {len(there)} engines with batches of their own: {names}; "
                "choose one with --target"
            )
        return there[0]
    matching = []
    for target in there:
        if wanted in (target.name, target.model):
            matching.append(target)
    if len(matching) != 1:
        raise unknown_choice("target", wanted, [target.name for target in there])
    return matching[0]


def cache_tokens(scrape: Scrape, target: Target) -> float | None:
    """Tokens that the engine's KV cache has room for; None except for vLLM, which reports it."""
    for labels, _ in scrape.samples.get(CACHE_INFO, ()):
        if target.replica and labels.get("engine", target.replica) != target.replica:
            continue
        try:
            tokens = float(labels["num_gpu_blocks"]) * float(labels["block_size"])
        except (KeyError, ValueError):
            return None
        if 0.0 < tokens < LARGEST_NUMBER:
            return tokens
        return None
    return None


def restarted(before: Scrape, after: Scrape, target: Target) -> bool:
    """Whether a counter fell, is gone, or the process is another one: what was counted between is
    then unknown.
    """
    started = before.total(PROCESS_START, {}), after.total(PROCESS_START, {})
    if None not in started and started[0] != started[1]:
        return True
    for name in target.series.counters.values():
        now = {
            frozenset(own.items()): value
            for own, value in after.rows(name, target.labels)
        }
        was = before.rows(name, target.labels)
        if any(
            now.get(frozenset(own.items()), -math.inf) < count for own, count in was
        ):
            return True
    return False
