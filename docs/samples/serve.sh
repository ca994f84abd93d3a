#!/bin/sh
export CUDA_VISIBLE_DEVICES=0,1
vllm serve Qwen/Qwen3-8B --tensor-parallel-size 1 --max-num-seqs 16 \
    --speculative-config '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'
