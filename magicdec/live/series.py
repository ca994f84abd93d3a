"""Under which names serving engines count what an observation needs, checked against their sources.

A name is that of the sample as it is exposed ("_total", "_sum" and "_count" included).

    vLLM          vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py (0.32)
    SGLang        sglang/srt/observability/metrics_collector.py (0.5.23)
    TensorRT-LLM  tensorrt_llm/metrics/collector.py (1.3)
    llama.cpp     tools/server/README.md, "Available metrics"; server_task_result_metrics::to_metrics
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ServingEngine = Literal["vllm", "sglang", "trtllm", "llama.cpp"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One engine's names. What is counted and measured bears the names of `Counts` and `Load` (live/observation.py);
    what an engine does not have is left out."""

    engine: ServingEngine
    prefix: str
    replica_label: str | None = None
    """The label that tells apart engines of one model at one address."""
    position_label: str = "position"
    counters: Mapping[str, str]
    gauges: Mapping[str, str]


VLLM = Series(
    engine="vllm",
    prefix="vllm:",
    replica_label="engine",
    counters={
        "drafts": "vllm:spec_decode_num_drafts_total",
        "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
        "accepted": "vllm:spec_decode_num_accepted_tokens_total",
        "accepted_by_position": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "output_tokens": "vllm:generation_tokens_total",
        "requests": "vllm:time_to_first_token_seconds_count",
        "iterations": "vllm:iteration_tokens_total_count",
        "counted_steps": "vllm:inter_token_latency_seconds_count",
        "step_seconds": "vllm:inter_token_latency_seconds_sum",
        "ttft_sum": "vllm:time_to_first_token_seconds_sum",
        "ttft_count": "vllm:time_to_first_token_seconds_count",
        "prompt_tokens_sum": "vllm:request_prompt_tokens_sum",
        "prompt_tokens_count": "vllm:request_prompt_tokens_count",
        "request_output_sum": "vllm:request_generation_tokens_sum",
    },
    gauges={
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "kv_usage": "vllm:kv_cache_usage_perc",
    },
)
SGLANG = Series(
    engine="sglang",
    prefix="sglang:",
    counters={
        "drafts": "sglang:spec_verify_calls_total",
        "output_tokens": "sglang:generation_tokens_total",
        "requests": "sglang:num_requests_total",
        "mean_tpot_sum": "sglang:request_time_per_output_token_seconds_sum",
        "mean_tpot_count": "sglang:request_time_per_output_token_seconds_count",
        "ttft_sum": "sglang:time_to_first_token_seconds_sum",
        "ttft_count": "sglang:time_to_first_token_seconds_count",
        "prompt_tokens_sum": "sglang:prompt_tokens_histogram_sum",
        "prompt_tokens_count": "sglang:prompt_tokens_histogram_count",
        "request_output_sum": "sglang:generation_tokens_histogram_sum",
    },
    gauges={
        "running": "sglang:num_running_reqs",
        "waiting": "sglang:num_queue_reqs",
        "kv_usage": "sglang:token_usage",
        "sequence_tokens": "sglang:decode_sum_seq_lens",
        "gamma": "sglang:spec_num_steps",
    },
)
TRTLLM = Series(
    engine="trtllm",
    prefix="trtllm_",
    position_label="token_position",
    counters={
        "draft_tokens": "trtllm_spec_decode_num_draft_tokens_total",
        "accepted": "trtllm_spec_decode_num_accepted_tokens_total",
        "accepted_by_position": "trtllm_spec_decode_accepted_tokens_total",
        "drafted_by_position": "trtllm_spec_decode_drafted_tokens_total",
        "output_tokens": "trtllm_generation_tokens_total",
        "requests": "trtllm_request_success_total",
        "decode_seconds": "trtllm_request_decode_time_seconds_sum",
        "decode_requests": "trtllm_request_decode_time_seconds_count",
        "mean_tpot_sum": "trtllm_time_per_output_token_seconds_sum",
        "mean_tpot_count": "trtllm_time_per_output_token_seconds_count",
        "ttft_sum": "trtllm_time_to_first_token_seconds_sum",
        "ttft_count": "trtllm_time_to_first_token_seconds_count",
        "prompt_tokens_sum": "trtllm_prompt_tokens_total",
        "prompt_tokens_count": "trtllm_request_success_total",
        "request_output_sum": "trtllm_generation_tokens_total",
    },
    gauges={
        "running": "trtllm_num_generation_requests",
        "waiting": "trtllm_num_requests_waiting",
        "kv_usage": "trtllm_kv_cache_utilization",
        "kv_blocks": "trtllm_kv_cache_used_blocks",
        "kv_block_tokens": "trtllm_kv_cache_tokens_per_block",
    },
)
LLAMA_CPP = Series(
    engine="llama.cpp",
    prefix="llamacpp:",
    counters={
        "drafts": "llamacpp:spec_decode_num_drafts_total",
        "draft_tokens": "llamacpp:spec_decode_num_draft_tokens_total",
        "accepted": "llamacpp:spec_decode_num_accepted_tokens_total",
        "accepted_by_position": "llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
        "output_tokens": "llamacpp:tokens_predicted_total",
        "decode_seconds": "llamacpp:tokens_predicted_seconds_total",
    },
    gauges={
        "running": "llamacpp:requests_processing",
        "waiting": "llamacpp:requests_deferred",
    },
)
ENGINES = (VLLM, SGLANG, TRTLLM, LLAMA_CPP)
CACHE_INFO = "vllm:cache_config_info"
"""A gauge of 1 whose labels hold vLLM's `num_gpu_blocks` and `block_size`."""
DRAFT_INFO = "magicdec:draft_info"
"""A gauge of 1 whose labels hold the method and the budget of magicdec's draft in vLLM (vllm/draft_info.py)."""
PROCESS_START = "process_start_time_seconds"
