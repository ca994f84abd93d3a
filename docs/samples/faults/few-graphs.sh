vllm serve Qwen/Qwen3-32B --tensor-parallel-size 2 --max-cudagraph-capture-size 16 \
  --speculative-config '{"method": "eagle3", "model": "AngelSlim/Qwen3-32B_eagle3", "num_speculative_tokens": 3}'
