"""The state of each option, key and variable: priced, noted, without effect, or not looked at."""

import shlex

import pytest

from magicdec.specs.serve_command import read_serve_command
from magicdec.specs.serve_command.options import (
    MEANINGS,
    OPTIONS,
    names_of,
    note_of,
)

SERVERS = {
    "vllm": "vllm serve Qwen/Qwen3-8B",
    "sglang": "python -m sglang.launch_server --model-path Qwen/Qwen3-8B",
    "trtllm": "trtllm-serve Qwen/Qwen3-8B",
}


def states(text: str) -> tuple[list[str], list[str], list[str]]:
    read = read_serve_command(text)
    return list(read.noted), read.without_effect, read.not_looked_at


@pytest.mark.parametrize(
    ("engine", "option", "state"),
    [
        ("vllm", "--moe-backend triton", 0),
        ("vllm", "--enable-lora", 0),
        ("vllm", "--no-enable-lora", 1),
        ("vllm", "--port 1", 1),
        ("vllm", "--disable-cascade-attn", 1),
        ("vllm", "--watermark 0.1", 2),
        ("sglang", "--enable-deterministic-inference", 0),
        ("sglang", "--num-continuous-decode-steps 4", 1),
        ("sglang", "--page-size 64", 2),
        ("trtllm", "--max_beam_width 2", 0),
        ("trtllm", "--log_level info", 1),
        ("trtllm", "--cluster_size 2", 2),
    ],
)
def test_an_option_is_in_one_state(engine: str, option: str, state: int):
    written = option.split(maxsplit=1)[0]
    found = states(f"{SERVERS[engine]} {option}")
    assert [names != [] for names in found] == [place == state for place in range(3)]
    assert found[state] == [written.replace("_", "-")]


@pytest.mark.parametrize(
    "text",
    [
        "NCCL_P2P_LEVEL=PHB VLLM_SOME_DAY=1 HF_TOKEN=a vllm serve m",
        "env NCCL_P2P_LEVEL=PHB VLLM_SOME_DAY=1 vllm serve m",
        "export NCCL_P2P_LEVEL=PHB\nexport VLLM_SOME_DAY=1\nNCCL_DEBUG=x\nvllm serve m",
        "docker run -e NCCL_P2P_LEVEL=PHB --env VLLM_SOME_DAY=1 vllm/vllm-openai --model m",
        "docker run -e NCCL_P2P_LEVEL=PHB -e VLLM_SOME_DAY=1 x/vllm bash -c 'vllm serve m'",
        "services:\n a:\n  image: vllm/vllm-openai\n  command: --model m\n"
        "  environment: {NCCL_P2P_LEVEL: PHB, VLLM_SOME_DAY: 1}\n",
        "import os\nfrom vllm import LLM\nos.environ['NCCL_P2P_LEVEL'] = 'PHB'\n"
        "os.environ['VLLM_SOME_DAY'] = '1'\nLLM(model='m')",
        "kind: Pod\nspec:\n containers:\n - name: a\n   command: [vllm, serve, m]\n   env:\n"
        "   - {name: NCCL_P2P_LEVEL, value: PHB}\n   - {name: VLLM_SOME_DAY, value: '1'}\n",
    ],
)
def test_variables_are_read_where_the_server_is_started_with_them(text: str):
    assert states(text) == (["NCCL_P2P_LEVEL"], [], ["VLLM_SOME_DAY"])


def test_variables_that_do_not_reach_the_server_are_not_read():
    outside = "NCCL_P2P_LEVEL=PHB\ndocker run vllm/vllm-openai --model m"
    assert states(outside) == ([], [], [])
    assert states("NCCL_P2P_LEVEL=PHB\nvllm serve m") == ([], [], [])
    python = "import os\nfrom vllm import LLM\nif x:\n os.environ['NCCL_P2P_LEVEL'] = 'PHB'\nLLM(model='m')"
    assert states(python) == ([], [], [])


def test_keys_of_objects_count_as_options():
    config = '{"method": "ngram", "prompt_lookup_min": 2, "revision": "", "max_model_len": 9}'
    noted, without_effect, not_looked_at = states(
        f"vllm serve m --speculative-config {shlex.quote(config)} -cc.pass_config.fuse_allreduce_rms true"
    )
    assert noted == [
        "speculative-config.prompt_lookup_min",
        "compilation-config.pass_config",
    ]
    assert without_effect == ["speculative-config.revision"]
    assert not_looked_at == ["speculative-config.max_model_len"]


def test_keys_of_tensorrt_llm_s_file_count_as_options():
    text = """cat > a.yml <<EOF
moe_config: {backend: TRTLLM}
print_iter_log: true
cuda_graph_config: {max_batch_size: 8, enable_padding: true}
kv_cache_config: {dtype: fp8, use_uvm: true}
EOF
trtllm-serve m --extra_llm_api_options a.yml"""
    noted, without_effect, not_looked_at = states(text)
    assert noted == ["moe_config"]
    assert without_effect == ["print_iter_log"]
    assert not_looked_at == ["kv_cache_config.use_uvm"]


def test_a_note_has_an_address_and_names_what_an_engine_has():
    for row in MEANINGS["noted"]:
        assert row["address"], row
        engines = row["engines"].split()
        known = set()
        for engine in engines:
            names = names_of(engine)
            known |= {*names.kinds, *names.removed}
            for option, keys in names.keys.items():
                known |= {f"{option}.{key}" for key in keys}
                known |= {key.replace("_", "-") for key in keys}
        for name in row["names"].split():
            assert name in known or "*" in name or name.isupper(), name
            assert all(name not in OPTIONS[engine] for engine in engines), name


ROWS = [
    (
        "sglang",
        "SGLANG_ENABLE_SPEC_V2 SGLANG_SIMULATE_ACC_LEN SGLANG_SIMULATE_ACC_METHOD",
    ),
    ("sglang", "speculative-dflash-block-size speculative-dspark-block-size"),
    ("sglang", "mamba-scheduler-strategy mamba-radix-cache-strategy mamba-ssm-dtype"),
    ("sglang", "cpu-offload-gb offload-mode kt-method max-total-tokens"),
    ("sglang", "dcp-size attn-cp-size attn-dp-size enable-dp-attention"),
    (
        "sglang",
        "attention-backend prefill-attention-backend dsa-decode-backend nsa-prefill-backend",
    ),
    (
        "sglang",
        "disable-custom-all-reduce enable-flashinfer-allreduce-fusion enable-symm-mem",
    ),
    (
        "sglang",
        "sampling-defaults speculative-use-rejection-sampling speculative-use-block-verification",
    ),
    (
        "sglang",
        "speculative-draft-model-quantization speculative-token-map speculative-ngram-capacity",
    ),
    (
        "sglang",
        "moe-runner-backend moe-a2a-backend nnodes enable-eplb enable-deterministic-inference",
    ),
    (
        "sglang",
        "stream-interval scheduler-recv-interval tokenizer-worker-num enable-torch-compile enable-lora",
    ),
    (
        "sglang",
        "speculative-accept-threshold-acc speculative-ngram-max-bfs-breadth speculative-eagle-topk",
    ),
    (
        "trtllm",
        "context-parallel-size enable-attention-dp kv-cache-config.max_gpu_total_bytes stream-interval",
    ),
    (
        "trtllm",
        "moe-config attn-backend allreduce-strategy max-beam-width sparse-attention-config",
    ),
    (
        "vllm",
        "cpu-offload-gb offload-group-size kv-cache-memory-bytes num-gpu-blocks-override",
    ),
    (
        "vllm",
        "decode-context-parallel-size dcp prefill-context-parallel-size mamba-ssm-cache-dtype",
    ),
    (
        "vllm",
        "attention-backend attention-config VLLM_ROCM_USE_AITER moe-backend linear-backend",
    ),
    (
        "vllm",
        "disable-custom-all-reduce NCCL_P2P_DISABLE VLLM_ALLREDUCE_USE_SYMM_MEM compilation-config.pass_config",
    ),
    (
        "vllm",
        "VLLM_USE_V2_MODEL_RUNNER enable-dbo override-generation-config generation-config",
    ),
    (
        "vllm",
        "speculative-config.draft_sample_method speculative-config.prompt_lookup_max",
    ),
    (
        "vllm",
        "speculative-config.suffix_decoding_max_tree_depth stream-interval enable-lora max-loras",
    ),
    (
        "vllm",
        "max-lora-rank VLLM_MARLIN_INPUT_DTYPE long-prefill-token-threshold disable-hybrid-kv-cache-manager",
    ),
    (
        "vllm",
        "distributed-executor-backend performance-mode nnodes hf-overrides all2all-backend enable-eplb",
    ),
    ("vllm", "kv-transfer-config VLLM_USE_FLASHINFER_SAMPLER"),
]
"""What threads and engines' own code show to change time, memory or acceptance, by engine."""


@pytest.mark.parametrize(("engine", "names"), ROWS)
def test_what_changes_time_is_priced_or_noted(engine: str, names: str):
    for name in names.split():
        assert name in OPTIONS[engine] or note_of(engine, name, None), name
