from ray.serve.llm import LLMConfig

config = LLMConfig(
    model_loading_config=dict(model_id="qwen", model_source="Qwen/Qwen2.5-7B-Instruct"),
    accelerator_type="A100-SXM-80GB",
    engine_kwargs=dict(tensor_parallel_size=2, enforce_eager=True, max_num_seqs=64),
)
