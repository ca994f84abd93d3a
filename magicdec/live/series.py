"""Under which names serving engines count what an observation needs, checked against their sources.

A name is that of the sample as it is exposed ("_total", "_sum" and "_count" included). None: not counted there.

    vLLM          vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py (0.32)
    SGLang        sglang/srt/observability/metrics_collector.py (0.5.23)
    TensorRT-LLM  tensorrt_llm/metrics/collector.py (1.3)
    llama.cpp     tools/server/README.md, "Available metrics"; server_task_result_metrics::to_metrics
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ServingEngine = Literal["vllm", "sglang", "trtllm", "llama.cpp"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One engine's names."""

    engine: ServingEngine
    prefix: str
    replica_label: str | None = None
    """The label that tells apart engines of one model at one address."""

    # Counters of speculation
    drafts: str | None = None
    """Verifications of a draft, one per sequence and step."""
    draft_tokens: str | None = None
    accepted_tokens: str | None = None
    accepted_by_position: str | None = None
    """Drafts accepted at each position: unconditional, so that their differences are those that failed there."""
    drafted_by_position: str | None = None
    position_label: str = "position"
    # Counters of work
    output_tokens: str | None = None
    requests: str | None = None
    """Requests whose first token is out (vLLM) or that are done, as `output_tokens` counts them."""
    iterations: str | None = None
    """Steps of the engine, whatever their batch."""
    steps: str | None = None
    """Steps of sequences after their first token, where they are counted themselves."""
    step_seconds: str | None = None
    """Sum over sequences of the time between their outputs; with speculation an output is a step's."""
    decode_seconds: str | None = None
    """Sum over requests of the time from the first token to the last."""
    decode_requests: str | None = None
    mean_tpot_sum: str | None = None
    """Sum over requests of their own time per output token, and their number."""
    mean_tpot_count: str | None = None
    ttft_sum: str | None = None
    ttft_count: str | None = None
    prompt_tokens_sum: str | None = None
    prompt_tokens_count: str | None = None
    request_output_sum: str | None = None
    # Gauges
    running: str | None = None
    waiting: str | None = None
    kv_usage: str | None = None
    sequence_tokens: str | None = None
    """Tokens that all running sequences hold."""
    kv_blocks: str | None = None
    kv_block_tokens: str | None = None
    gamma: str | None = None
    tokens_per_step: str | None = None


VLLM = Series(
    engine="vllm",
    prefix="vllm:",
    replica_label="engine",
    drafts="vllm:spec_decode_num_drafts_total",
    draft_tokens="vllm:spec_decode_num_draft_tokens_total",
    accepted_tokens="vllm:spec_decode_num_accepted_tokens_total",
    accepted_by_position="vllm:spec_decode_num_accepted_tokens_per_pos_total",
    output_tokens="vllm:generation_tokens_total",
    requests="vllm:time_to_first_token_seconds_count",
    iterations="vllm:iteration_tokens_total_count",
    steps="vllm:inter_token_latency_seconds_count",
    step_seconds="vllm:inter_token_latency_seconds_sum",
    ttft_sum="vllm:time_to_first_token_seconds_sum",
    ttft_count="vllm:time_to_first_token_seconds_count",
    prompt_tokens_sum="vllm:request_prompt_tokens_sum",
    prompt_tokens_count="vllm:request_prompt_tokens_count",
    request_output_sum="vllm:request_generation_tokens_sum",
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    kv_usage="vllm:kv_cache_usage_perc",
)
SGLANG = Series(
    engine="sglang",
    prefix="sglang:",
    drafts="sglang:spec_verify_calls_total",
    output_tokens="sglang:generation_tokens_total",
    requests="sglang:num_requests_total",
    mean_tpot_sum="sglang:request_time_per_output_token_seconds_sum",
    mean_tpot_count="sglang:request_time_per_output_token_seconds_count",
    ttft_sum="sglang:time_to_first_token_seconds_sum",
    ttft_count="sglang:time_to_first_token_seconds_count",
    prompt_tokens_sum="sglang:prompt_tokens_histogram_sum",
    prompt_tokens_count="sglang:prompt_tokens_histogram_count",
    request_output_sum="sglang:generation_tokens_histogram_sum",
    running="sglang:num_running_reqs",
    waiting="sglang:num_queue_reqs",
    kv_usage="sglang:token_usage",
    sequence_tokens="sglang:decode_sum_seq_lens",
    gamma="sglang:spec_num_steps",
    tokens_per_step="sglang:spec_accept_length",
)
TRTLLM = Series(
    engine="trtllm",
    prefix="trtllm_",
    draft_tokens="trtllm_spec_decode_num_draft_tokens_total",
    accepted_tokens="trtllm_spec_decode_num_accepted_tokens_total",
    accepted_by_position="trtllm_spec_decode_accepted_tokens_total",
    drafted_by_position="trtllm_spec_decode_drafted_tokens_total",
    position_label="token_position",
    output_tokens="trtllm_generation_tokens_total",
    requests="trtllm_request_success_total",
    decode_seconds="trtllm_request_decode_time_seconds_sum",
    decode_requests="trtllm_request_decode_time_seconds_count",
    mean_tpot_sum="trtllm_time_per_output_token_seconds_sum",
    mean_tpot_count="trtllm_time_per_output_token_seconds_count",
    ttft_sum="trtllm_time_to_first_token_seconds_sum",
    ttft_count="trtllm_time_to_first_token_seconds_count",
    prompt_tokens_sum="trtllm_prompt_tokens_total",
    prompt_tokens_count="trtllm_request_success_total",
    request_output_sum="trtllm_generation_tokens_total",
    running="trtllm_num_generation_requests",
    waiting="trtllm_num_requests_waiting",
    kv_usage="trtllm_kv_cache_utilization",
    kv_blocks="trtllm_kv_cache_used_blocks",
    kv_block_tokens="trtllm_kv_cache_tokens_per_block",
    tokens_per_step="trtllm_spec_decode_acceptance_length",
)
LLAMA_CPP = Series(
    engine="llama.cpp",
    prefix="llamacpp:",
    drafts="llamacpp:spec_decode_num_drafts_total",
    draft_tokens="llamacpp:spec_decode_num_draft_tokens_total",
    accepted_tokens="llamacpp:spec_decode_num_accepted_tokens_total",
    accepted_by_position="llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
    output_tokens="llamacpp:tokens_predicted_total",
    decode_seconds="llamacpp:tokens_predicted_seconds_total",
    running="llamacpp:requests_processing",
    waiting="llamacpp:requests_deferred",
)
ENGINES = (VLLM, SGLANG, TRTLLM, LLAMA_CPP)
CACHE_INFO = "vllm:cache_config_info"
"""A gauge of 1 whose labels hold vLLM's `num_gpu_blocks` and `block_size`."""
DRAFT_INFO = "magicdec:draft_info"
"""A gauge of 1 whose labels hold the method and the budget of magicdec's draft in vLLM (vllm/draft_info.py)."""
PROCESS_START = "process_start_time_seconds"
