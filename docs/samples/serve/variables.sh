#!/usr/bin/env bash
set -euo pipefail
MODEL="${MODEL:-Qwen/Qwen3-8B}"
ARGS=(--max-model-len "${MAX_LEN:-32768}")
ARGS+=(--enforce-eager)
exec vllm serve "$MODEL" --tensor-parallel-size "${TP:-1}" "${ARGS[@]}" "$@"
