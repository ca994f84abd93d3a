"""Engines' metrics from simulated requests, under the names that their sources give.

Names, labels and the moment at which each counter is increased are those of the engines' sources, typed from there:
    vLLM 0.32      vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py
    SGLang 0.5.23  sglang/srt/observability/metrics_collector.py
    TensorRT-LLM   tensorrt_llm/metrics/collector.py
    llama.cpp      tools/server/server-task.cpp, server_task_result_metrics::to_metrics
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

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
        requests.append(Request(int(rng.integers(100, 200)), tuple(drafted), tuple(accepted)))
    return requests


class Vllm:
    def __init__(self, *, gamma: int | None = 3, model: str = "embedded", engines: tuple[str, ...] = ("0",)) -> None:
        self.registry = CollectorRegistry()
        names = ["model_name", "engine"]

        def counter(name: str, labels: list[str] = names) -> Counter:
            return Counter(name, name, labels, registry=self.registry)

        def gauge(name: str) -> Gauge:
            return Gauge(name, name, names, registry=self.registry)

        def histogram(name: str) -> Histogram:
            return Histogram(name, name, names, registry=self.registry)

        self.gamma, self.model = gamma, model
        self.running, self.waiting = gauge("vllm:num_requests_running"), gauge("vllm:num_requests_waiting")
        self.usage = gauge("vllm:kv_cache_usage_perc")
        self.tokens = counter("vllm:generation_tokens")
        self.iterations = histogram("vllm:iteration_tokens_total")
        self.ttft = histogram("vllm:time_to_first_token_seconds")
        self.itl = histogram("vllm:inter_token_latency_seconds")
        self.prompts = histogram("vllm:request_prompt_tokens")
        self.outputs = histogram("vllm:request_generation_tokens")
        if gamma is not None:
            self.drafts = counter("vllm:spec_decode_num_drafts")
            self.draft_tokens = counter("vllm:spec_decode_num_draft_tokens")
            self.accepted = counter("vllm:spec_decode_num_accepted_tokens")
            self.positions = counter("vllm:spec_decode_num_accepted_tokens_per_pos", [*names, "position"])
        info = Gauge("vllm:cache_config_info", "", ["block_size", "num_gpu_blocks", "engine"], registry=self.registry)
        for engine in engines:
            info.labels("128", "100", engine).set(1)
            for each in (self.running, self.waiting, self.usage):
                each.labels(model, engine).set(0)
            for position in range(gamma or 0):
                self.positions.labels(model, engine, str(position))

    def serve(self, requests: list[Request], *, engine: str = "0") -> None:
        """All requests side by side, as one batch; the gauges are left as they were while it ran."""
        labels = (self.model, engine)
        self.iterations.labels(*labels).observe(sum(each.prompt_len for each in requests))
        for _ in requests:
            self.ttft.labels(*labels).observe(TTFT_S)
            self.tokens.labels(*labels).inc()
        for step in range(max(len(each.accepted) for each in requests)):
            batch = [each for each in requests if step < len(each.accepted)]
            self.iterations.labels(*labels).observe(len(batch))
            for request in batch:
                drafted, accepted = request.drafted[step], request.accepted[step]
                self.itl.labels(*labels).observe(STEP_S)
                self.tokens.labels(*labels).inc(accepted + 1)
                if drafted and self.gamma is not None:
                    self.drafts.labels(*labels).inc()
                    self.draft_tokens.labels(*labels).inc(drafted)
                    self.accepted.labels(*labels).inc(accepted)
                    for position in range(accepted):
                        self.positions.labels(*labels, str(position)).inc()
        for request in requests:
            self.prompts.labels(*labels).observe(request.prompt_len)
            self.outputs.labels(*labels).observe(request.output_len)
        self.running.labels(*labels).set(len(requests))
        self.usage.labels(*labels).set(sum(each.prompt_len for each in requests) / (100 * 128))

    def scrape(self) -> str:
        return generate_latest(self.registry).decode()


class SGLang:
    """Counts when a request ends; knows no positions."""

    def __init__(self, *, gamma: int = 3) -> None:
        self.registry = CollectorRegistry()
        names = ["model_name", "engine_type"]
        self.labels = ("embedded", "unified")

        def gauge(name: str) -> Gauge:
            return Gauge(name, name, [*names, "tp_rank"], registry=self.registry)

        def counter(name: str, *more: str) -> Counter:
            return Counter(name, name, [*names, *more], registry=self.registry)

        def histogram(name: str, *more: str) -> Histogram:
            return Histogram(name, name, [*names, *more], registry=self.registry)

        self.running, self.queue = gauge("sglang:num_running_reqs"), gauge("sglang:num_queue_reqs")
        self.lengths, self.usage = gauge("sglang:decode_sum_seq_lens"), gauge("sglang:token_usage")
        self.num_steps = gauge("sglang:spec_num_steps")
        self.num_steps.labels(*self.labels, "0").set(gamma)
        self.tokens = counter("sglang:generation_tokens_total", "is_streaming")
        self.requests = counter("sglang:num_requests_total", "is_streaming")
        self.verified = counter("sglang:spec_verify_calls_total")
        self.ttft = histogram("sglang:time_to_first_token_seconds", "is_streaming")
        self.tpot = histogram("sglang:request_time_per_output_token_seconds", "is_streaming")
        self.prompts = histogram("sglang:prompt_tokens_histogram")
        self.outputs = histogram("sglang:generation_tokens_histogram")

    def serve(self, requests: list[Request]) -> None:
        for number, request in enumerate(requests):
            streaming = (*self.labels, "true" if number % 2 else "false")
            self.tokens.labels(*streaming).inc(request.output_len)
            self.requests.labels(*streaming).inc()
            self.verified.labels(*self.labels).inc(len(request.accepted))
            self.ttft.labels(*streaming).observe(TTFT_S)
            self.tpot.labels(*streaming).observe(STEP_S * len(request.accepted) / (request.output_len - 1))
            self.prompts.labels(*self.labels).observe(request.prompt_len)
            self.outputs.labels(*self.labels).observe(request.output_len)
        self.running.labels(*self.labels, "0").set(len(requests))
        self.lengths.labels(*self.labels, "0").set(sum(each.prompt_len for each in requests))

    def scrape(self) -> str:
        return generate_latest(self.registry).decode()


class TensorRT:
    """Per position when a request ends; a position's series begins with its first count."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        names = ["model_name", "engine_type"]
        self.labels = ("embedded", "trtllm")

        def counter(name: str, *more: str) -> Counter:
            return Counter(f"trtllm_{name}", name, [*names, *more], registry=self.registry)

        def gauge(name: str) -> Gauge:
            return Gauge(f"trtllm_{name}", name, names, registry=self.registry)

        self.success = counter("request_success_total", "finished_reason")
        self.prompt, self.generation = counter("prompt_tokens_total"), counter("generation_tokens_total")
        self.drafted = counter("spec_decode_drafted_tokens_total", "token_position")
        self.accepted = counter("spec_decode_accepted_tokens_total", "token_position")
        self.decode = Histogram("trtllm_request_decode_time_seconds", "", names, registry=self.registry)
        self.running, self.blocks = gauge("num_generation_requests"), gauge("kv_cache_used_blocks")
        self.per_block = gauge("kv_cache_tokens_per_block")
        self.per_block.labels(*self.labels).set(32)

    def serve(self, requests: list[Request]) -> None:
        for request in requests:
            self.success.labels(*self.labels, "stop").inc()
            self.prompt.labels(*self.labels).inc(request.prompt_len)
            self.generation.labels(*self.labels).inc(request.output_len)
            self.decode.labels(*self.labels).observe(STEP_S * len(request.accepted))
            for drafted, accepted in zip(request.drafted, request.accepted, strict=True):
                for position in range(drafted):
                    self.drafted.labels(*self.labels, str(position)).inc()
                for position in range(accepted):
                    self.accepted.labels(*self.labels, str(position)).inc()
        self.running.labels(*self.labels).set(len(requests))
        self.blocks.labels(*self.labels).set(sum(each.prompt_len for each in requests) / 32)

    def scrape(self) -> str:
        return generate_latest(self.registry).decode()


class LlamaCpp:
    """Text as the server writes it, which is without labels but for the position."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(
            (
                "prompt_tokens_total", "prompt_seconds_total", "tokens_predicted_total",
                "tokens_predicted_seconds_total", "n_decode_total", "n_tokens_max",
                "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
                "spec_decode_num_drafts_total",
            ),
            0.0,
        )  # fmt: skip
        self.positions: list[int] = []
        self.processing = 0

    def serve(self, requests: list[Request]) -> None:
        for request in requests:
            self.counts["prompt_tokens_total"] += request.prompt_len
            self.counts["tokens_predicted_total"] += request.output_len
            self.counts["tokens_predicted_seconds_total"] += STEP_S * len(request.accepted)
            for drafted, accepted in zip(request.drafted, request.accepted, strict=True):
                if not drafted:
                    continue
                self.counts["spec_decode_num_drafts_total"] += 1
                self.counts["spec_decode_num_draft_tokens_total"] += drafted
                self.counts["spec_decode_num_accepted_tokens_total"] += accepted
                self.positions += [0] * (drafted - len(self.positions))
                for position in range(accepted):
                    self.positions[position] += 1
        self.processing = len(requests)

    def scrape(self) -> str:
        lines = []
        for name, value in self.counts.items():
            lines += [f"# HELP llamacpp:{name} {name}", f"# TYPE llamacpp:{name} counter", f"llamacpp:{name} {value}"]
        for name, value in (("requests_processing", self.processing), ("requests_deferred", 0)):
            lines += [f"# HELP llamacpp:{name} {name}", f"# TYPE llamacpp:{name} gauge", f"llamacpp:{name} {value}"]
        if self.positions:
            name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f"# HELP {name} Accepted tokens per draft position", f"# TYPE {name} counter"]
            lines += [f'{name}{{position="{at}"}} {count}' for at, count in enumerate(self.positions)]
        return "\n".join(lines) + "\n"
