vllm serve meta-llama/Llama-3.1-8B-Instruct --enforce-eager --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'
