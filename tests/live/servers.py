"""Engines' metrics from simulated requests, under the names that their sources give.

Names, labels and the moment at which each counter is increased are those of the engines' sources, typed from there:
    vLLM 0.32      vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py
    SGLang 0.5.23  sglang/srt/observability/metrics_collector.py
    TensorRT-LLM   tensorrt_llm/metrics/collector.py
    llama.cpp      tools/server/server-task.cpp, server_task_result_metrics::to_metrics
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

STEP_S = 0.05
TTFT_S = 0.4


@dataclass(frozen=True)
class Request:
    """A prompt, and for each decode step how many tokens were drafted and accepted."""

    prompt_len: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def output_len(self) -> int:
        return 1 + sum(each + 1 for each in self.accepted)


def random_requests(
    seed: int,
    *,
    number: int = 40,
    steps: int = 30,
    gamma: int = 3,
    rates: tuple[float, ...] = (0.8, 0.7, 0.6),
    undrafted: float = 0.0,
) -> list[Request]:
    """Requests whose drafts are accepted at conditional `rates`; a share of steps has no draft."""
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(number):
        drafted = [0 if rng.random() < undrafted else gamma for _ in range(steps)]
        accepted = []
        for length in drafted:
            count = 0
            while count < length and rng.random() < rates[count]:
                count += 1
            accepted.append(count)
        requests.append(
            Request(int(rng.integers(100, 200)), tuple(drafted), tuple(accepted))
        )
    return requests


class Engine:
    """Metrics, each made when it is first asked for."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics: dict[str, Any] = {}

    def at(self, kind: Any, name: str, **labels: str) -> Any:
        if name not in self.metrics:
            self.metrics[name] = kind(name, name, list(labels), registry=self.registry)
        return self.metrics[name].labels(**labels) if labels else self.metrics[name]

    def scrape(self) -> str:
        return generate_latest(self.registry).decode()


class Vllm(Engine):
    def __init__(
        self,
        *,
        gamma: int | None = 3,
        model: str = "embedded",
        engines: tuple[str, ...] = ("0",),
    ) -> None:
        super().__init__()
        self.gamma, self.model = gamma, model
        for engine in engines:
            labels: ClassVar = {"model_name": model, "engine": engine}
            sizes = {"block_size": "128", "num_gpu_blocks": "100", "engine": engine}
            self.at(Gauge, "vllm:cache_config_info", **sizes).set(1)
            for name in (
                "num_requests_running",
                "num_requests_waiting",
                "kv_cache_usage_perc",
            ):
                self.at(Gauge, f"vllm:{name}", **labels).set(0)
            for position in range(gamma or 0):
                self.at(
                    Counter,
                    "vllm:spec_decode_num_accepted_tokens_per_pos",
                    **labels,
                    position=str(position),
                )

    def serve(self, requests: list[Request], *, engine: str = "0") -> None:
        """All requests side by side, as one batch; the gauges are left as they were while it ran."""
        labels: ClassVar = {"model_name": self.model, "engine": engine}

        def count(name: str, by: int = 1, **more: str) -> None:
            self.at(Counter, f"vllm:{name}", **labels, **more).inc(by)

        def observe(name: str, value: float) -> None:
            self.at(Histogram, f"vllm:{name}", **labels).observe(value)

        observe("iteration_tokens_total", sum(each.prompt_len for each in requests))
        for _ in requests:
            observe("time_to_first_token_seconds", TTFT_S)
            count("generation_tokens")
        for step in range(max(len(each.accepted) for each in requests)):
            batch = [each for each in requests if step < len(each.accepted)]
            observe("iteration_tokens_total", len(batch))
            for request in batch:
                drafted, accepted = request.drafted[step], request.accepted[step]
                observe("inter_token_latency_seconds", STEP_S)
                count("generation_tokens", accepted + 1)
                if drafted and self.gamma is not None:
                    count("spec_decode_num_drafts")
                    count("spec_decode_num_draft_tokens", drafted)
                    count("spec_decode_num_accepted_tokens", accepted)
                    for position in range(accepted):
                        count(
                            "spec_decode_num_accepted_tokens_per_pos",
                            position=str(position),
                        )
        for request in requests:
            observe("request_prompt_tokens", request.prompt_len)
            observe("request_generation_tokens", request.output_len)
        self.at(Gauge, "vllm:num_requests_running", **labels).set(len(requests))
        held = sum(each.prompt_len for each in requests) / (100 * 128)
        self.at(Gauge, "vllm:kv_cache_usage_perc", **labels).set(held)


class SGLang(Engine):
    """Counts when a request ends; knows no positions."""

    labels: ClassVar = {"model_name": "embedded", "engine_type": "unified"}

    def __init__(self, *, gamma: int = 3) -> None:
        super().__init__()
        self.at(Gauge, "sglang:spec_num_steps", **self.labels, tp_rank="0").set(gamma)

    def serve(self, requests: list[Request]) -> None:
        for number, request in enumerate(requests):
            labels = self.labels | {"is_streaming": "true" if number % 2 else "false"}
            tpot_s = STEP_S * len(request.accepted) / (request.output_len - 1)
            self.at(Counter, "sglang:generation_tokens_total", **labels).inc(
                request.output_len
            )
            self.at(Counter, "sglang:num_requests_total", **labels).inc()
            self.at(Counter, "sglang:spec_verify_calls_total", **self.labels).inc(
                len(request.accepted)
            )
            self.at(Histogram, "sglang:time_to_first_token_seconds", **labels).observe(
                TTFT_S
            )
            self.at(
                Histogram, "sglang:request_time_per_output_token_seconds", **labels
            ).observe(tpot_s)
            self.at(Histogram, "sglang:prompt_tokens_histogram", **self.labels).observe(
                request.prompt_len
            )
            self.at(
                Histogram, "sglang:generation_tokens_histogram", **self.labels
            ).observe(request.output_len)
        held = sum(each.prompt_len for each in requests)
        for name, value in (
            ("num_running_reqs", len(requests)),
            ("decode_sum_seq_lens", held),
        ):
            self.at(Gauge, f"sglang:{name}", **self.labels, tp_rank="0").set(value)


class TensorRT(Engine):
    """Per position when a request ends; a position's series begins with its first count."""

    labels: ClassVar = {"model_name": "embedded", "engine_type": "trtllm"}

    def __init__(self) -> None:
        super().__init__()
        self.at(Gauge, "trtllm_kv_cache_tokens_per_block", **self.labels).set(32)

    def serve(self, requests: list[Request]) -> None:
        def count(name: str, by: int = 1, **more: str) -> None:
            self.at(Counter, f"trtllm_{name}", **self.labels, **more).inc(by)

        for request in requests:
            count("request_success_total", finished_reason="stop")
            count("prompt_tokens_total", request.prompt_len)
            count("generation_tokens_total", request.output_len)
            decode_s = STEP_S * len(request.accepted)
            self.at(
                Histogram, "trtllm_request_decode_time_seconds", **self.labels
            ).observe(decode_s)
            for numbers, name in (
                (request.drafted, "drafted"),
                (request.accepted, "accepted"),
            ):
                for position in (
                    position for number in numbers for position in range(number)
                ):
                    count(
                        f"spec_decode_{name}_tokens_total", token_position=str(position)
                    )
        held = sum(each.prompt_len for each in requests) / 32
        for name, value in (
            ("num_generation_requests", len(requests)),
            ("kv_cache_used_blocks", held),
        ):
            self.at(Gauge, f"trtllm_{name}", **self.labels).set(value)


class LlamaCpp(Engine):
    """Without labels but for the position."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("processing", "deferred"):
            self.at(Gauge, f"llamacpp:requests_{name}").set(0)

    def serve(self, requests: list[Request]) -> None:
        def count(name: str, by: float = 1, **more: str) -> None:
            self.at(Counter, f"llamacpp:{name}", **more).inc(by)

        for request in requests:
            count("prompt_tokens_total", request.prompt_len)
            count("tokens_predicted_total", request.output_len)
            count("tokens_predicted_seconds_total", STEP_S * len(request.accepted))
            for drafted, accepted in zip(
                request.drafted, request.accepted, strict=True
            ):
                if not drafted:
                    continue
                count("spec_decode_num_drafts_total")
                count("spec_decode_num_draft_tokens_total", drafted)
                count("spec_decode_num_accepted_tokens_total", accepted)
                for position in range(drafted):
                    count(
                        "spec_decode_num_accepted_tokens_per_pos_total",
                        position < accepted,
                        position=str(position),
                    )
        self.at(Gauge, "llamacpp:requests_processing").set(len(requests))
