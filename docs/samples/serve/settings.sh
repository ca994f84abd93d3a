cat > engine.yaml <<'EOF'
tensor-parallel-size: 2
max-num-seqs: 64
compilation-config: {cudagraph_mode: PIECEWISE}
speculative-config: {method: eagle3, model: yuhuili/EAGLE3-LLaMA3.1-Instruct-8B, num_speculative_tokens: 3}
EOF
vllm serve meta-llama/Llama-3.1-8B-Instruct --config engine.yaml
