import sglang as sgl

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
engine = sgl.Engine(
    model_path=MODEL,
    speculative_algorithm="EAGLE3",
    speculative_draft_model_path="jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B",
    speculative_num_steps=3,
    speculative_eagle_topk=1,
    speculative_num_draft_tokens=4,
    cuda_graph_max_bs=8,
)
