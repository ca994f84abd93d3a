docker run --gpus all vllm/vllm-openai:v0.24.0 --model Qwen/Qwen3-32B --tensor-parallel-size 2 \
  --speculative-config '{"method": "eagle3", "model": "AngelSlim/Qwen3-32B_eagle3", "num_speculative_tokens": 5, "enforce_eager": true}'
