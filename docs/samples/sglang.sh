#!/bin/sh
export CUDA_VISIBLE_DEVICES=0,1,2,3
python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3-0324 --tp 8 \
    --speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 4 \
    --speculative-num-draft-tokens 16 --cuda-graph-max-bs 8 --max-running-requests 64
