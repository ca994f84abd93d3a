python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B --disable-overlap-schedule --disable-cuda-graph
