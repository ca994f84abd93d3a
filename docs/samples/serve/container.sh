docker run --rm --gpus all --ipc host nvcr.io/nvidia/tensorrt-llm/release:1.2.0rc6 bash -c '
  cat > /etc/engine.yml <<EOF
cuda_graph_config: {max_batch_size: 1}
speculative_config:
  decoding_type: Eagle
  max_draft_len: 5
  speculative_model_dir: /opt/gpt-oss-120b-Eagle3/
EOF
  trtllm-serve openai/gpt-oss-120b --tp_size 1 --max_batch_size 1 --extra_llm_api_options /etc/engine.yml'
