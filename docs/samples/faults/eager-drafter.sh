vllm serve Qwen/Qwen3-32B --tensor-parallel-size 2 \
  --speculative-config '{"method": "eagle3", "model": "AngelSlim/Qwen3-32B_eagle3", "num_speculative_tokens": 3, "enforce_eager": true}'
