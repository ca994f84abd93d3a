vllm serve deepseek-ai/DeepSeek-V3 --tensor-parallel-size 8 \
  --speculative-config '{"method": "mtp", "num_speculative_tokens": 2, "rejection_sample_method": "fly"}'
