"""Servers' command lines, scripts and manifests as they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from magicdec.errors import ConfigError
from magicdec.specs.serve_command import OPTIONS, Speculation, read_serve_command
from magicdec.specs.speculation import TreeSpec

EAGLE = '{"method": "eagle3", "model": "yuhuili/EAGLE3", "num_speculative_tokens": 5}'
COMPOSE = """\
services:
  llm:
    image: vllm/vllm-openai:v0.12.0
    command: --model Qwen/Qwen2.5-72B-Instruct --tensor-parallel-size 4 --max-num-seqs 64
    deploy: {resources: {reservations: {devices: [{driver: nvidia, count: 4, capabilities: [gpu]}]}}}
"""
KUBERNETES = """\
apiVersion: v1
kind: Service
metadata: {name: llm}
---
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      nodeSelector:
        nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3
      containers:
        - name: server
          image: lmsysorg/sglang:latest
          command: ["python3", "-m", "sglang.launch_server"]
          args: ["--model-path", "Qwen/Qwen3-8B", "--tp", "2", "--max-running-requests", "32"]
          resources: {limits: {nvidia.com/gpu: "2"}}
"""
SCRIPT = f"""\
#!/bin/bash
# the server
export CUDA_VISIBLE_DEVICES=0,1
vllm serve meta-llama/Llama-3.1-8B-Instruct \\
    --tensor-parallel-size 2 \\
    --speculative-config '{EAGLE}' --port 8000 && echo started
"""


def test_a_script_is_read_as_a_shell_reads_it() -> None:
    command = read_serve_command(SCRIPT)
    assert (command.engine, command.tp_size) == ("vllm", 2)
    assert command.model == "meta-llama/Llama-3.1-8B-Instruct"
    assert command.speculation == Speculation(
        draft="eagle3", gamma=5, checkpoint="yuhuili/EAGLE3"
    )
    assert command.not_understood == []


@pytest.mark.parametrize(
    ("text", "engine", "speculation"),
    [
        (
            'vllm serve m --speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\'',
            "vllm",
            Speculation(draft="ngram", gamma=4),
        ),
        (
            "vllm serve m --speculative_config.method=ngram --speculative_config.num_speculative_tokens 4",
            "vllm",
            Speculation(draft="ngram", gamma=4),
        ),
        (
            "python -m vllm.entrypoints.openai.api_server --model m -tp 2",
            "vllm",
            None,
        ),
        (
            "python3 -m sglang.launch_server --model-path m --speculative-algorithm NEXTN "
            "--speculative-num-steps 3 --speculative-eagle-topk 4",
            "sglang",
            Speculation(
                draft="mtp", gamma=3, is_tree=True, tree=TreeSpec(top_k=4, num_steps=3)
            ),
        ),
        ("mpirun -n 2 trtllm-serve serve m --tp_size 2", "trtllm", None),
        (
            "docker run --gpus all -p 80:80 vllm/vllm-openai:v0.12 --model m",
            "vllm",
            None,
        ),
        (
            'vllm serve m --speculative-config \'{"model": "Qwen/Qwen3-0.6B", '
            '"num_speculative_tokens": 3}\'',
            "vllm",
            Speculation(draft="Qwen/Qwen3-0.6B", gamma=3, checkpoint="Qwen/Qwen3-0.6B"),
        ),
    ],
)
def test_what_engines_draft_with(
    text: str, engine: str, speculation: Speculation | None
) -> None:
    command = read_serve_command(text)
    assert (command.engine, command.model, command.speculation) == (
        engine,
        "m",
        speculation,
    )


def test_manifests_say_devices_and_their_number() -> None:
    compose = read_serve_command(COMPOSE)
    assert (compose.engine, compose.tp_size, compose.num_gpus) == ("vllm", 4, 4)
    assert compose.max_num_seqs == 64
    pod = read_serve_command(KUBERNETES)
    assert (pod.engine, pod.model, pod.tp_size, pod.num_gpus) == (
        "sglang",
        "Qwen/Qwen3-8B",
        2,
        2,
    )
    assert pod.hardware == "h100-80gb-hbm3"
    assert pod.max_num_seqs == 32


def test_a_shell_in_a_container_is_read(tmp_path: Path) -> None:
    text = 'command:\n  - /bin/sh\n  - -c\n  - "vllm serve m --max-num-seqs 8"\n'
    assert read_serve_command(text).max_num_seqs == 8


def test_tensorrts_options_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(
        "speculative_config:\n  decoding_type: MTP\n  num_nextn_predict_layers: 2\n"
        "cuda_graph_config: {max_batch_size: 16}\nkv_cache_config: {dtype: fp8}\n"
    )
    command = read_serve_command(f"trtllm-serve m --extra_llm_api_options {path}")
    assert command.speculation == Speculation(draft="mtp", gamma=2)
    assert (command.captured_tokens, command.kv_dtype) == (16, "fp8")


def test_what_is_not_understood_is_listed_and_the_rest_read() -> None:
    command = read_serve_command(
        "vllm serve m --frobnicate 3 --max-num-seqs=16 --host 0.0.0.0 --new-flag --enforce-eager"
    )
    assert command.not_understood == ["--frobnicate", "--new-flag"]
    assert (command.max_num_seqs, command.graphs) == (16, "eager")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ls -la", "no server is started here"),
        ("vllm serve --port 80", "names no model"),
        ("vllm serve 'm", "cannot be read as a shell reads it"),
        ("vllm serve m --speculative-config '{oops'", "must be a JSON object"),
        ("vllm serve m --max-num-seqs many", "must be a whole number"),
        (
            'vllm serve m --speculative-config \'{"method": "telepathy", "num_speculative_tokens": 1}\'',
            "'telepathy' is not planned for",
        ),
        ("services: {a: {image: nginx}}\nversion: '3'\n", "no server is started here"),
    ],
)
def test_bad_input_is_refused_with_what_would_do(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_serve_command(text)


def test_all_engines_say_their_devices_and_batch() -> None:
    for engine, options in OPTIONS.items():
        ranks = set() if engine == "llama.cpp" else {"tp", "pp"}
        assert {"model", "batch", "length"} | ranks <= set(options.values())


@pytest.mark.parametrize(
    "text",
    [
        "export CUDA_VISIBLE_DEVICES=0,1,2\nvllm serve Qwen/Qwen3-8B",
        'CUDA_VISIBLE_DEVICES="4,5,6" vllm serve Qwen/Qwen3-8B',
        "a:\n  env:\n  - name: CUDA_VISIBLE_DEVICES\n    value: '0,1,2'\n"
        "  command: vllm serve Qwen/Qwen3-8B\n",
    ],
)
def test_devices_that_are_visible_are_counted(text: str) -> None:
    assert read_serve_command(text).num_gpus == 3


@pytest.mark.parametrize(
    "text",
    [
        '[Service]\nEnvironment="MODEL=Qwen/Qwen3-14B" SIZE=2\n'
        "ExecStart=/opt/bin/vllm serve ${MODEL} \\\n  --tensor-parallel-size $SIZE\n"
        "Restart=always\n",
        'export "MODEL=Qwen/Qwen3-14B"\nvllm serve $MODEL -tp 2',
        "podman run docker.io/vllm/vllm-openai:v0.31.0 --model Qwen/Qwen3-14B \\\n"
        "  `# two of them` \\\n  --tensor-parallel-size 2\n",
        "vllm serve Qwen/Qwen3-14B \\  # the dense one\n  --tensor-parallel-size 2\n",
    ],
)
def test_units_and_remarks_within_commands_are_read(text: str) -> None:
    command = read_serve_command(text)
    assert (command.model, command.tp_size) == ("Qwen/Qwen3-14B", 2)


@pytest.mark.parametrize(
    "before", ["docker pull", "podman image pull", "ExecStartPre=-/bin/docker pull"]
)
def test_an_image_that_is_fetched_starts_nothing(before: str) -> None:
    image = "vllm/vllm-openai:v0.31.0"
    command = read_serve_command(
        f"{before} {image}\ndocker run --gpus all {image} --model Qwen/Qwen3-8B\n"
    )
    assert (command.model, command.notes) == ("Qwen/Qwen3-8B", [])


def test_a_remark_that_ends_a_command_is_named() -> None:
    command = read_serve_command("vllm serve Qwen/Qwen3-8B \\ # here\n  -tp 2\n")
    assert any("line 1 has a comment" in note for note in command.notes)


@pytest.mark.parametrize(
    "grant",
    [
        "#SBATCH --gres=gpu:h200:4",
        "#SBATCH --gpus-per-node=h200:4",
        "#SBATCH --gpus h200:4",
    ],
)
def test_a_slurm_job_says_its_devices(grant: str) -> None:
    command = read_serve_command(
        f"#!/bin/bash\n{grant}\nsrun vllm serve Qwen/Qwen3-8B -tp 4\n"
    )
    assert (command.hardware, command.num_gpus) == ("h200", 4)


def test_an_object_whose_quotes_a_shell_took_is_read() -> None:
    config = "{method:eagle3,model:a/b-1.5,num_speculative_tokens:3}"
    command = read_serve_command(f"vllm serve Qwen/Qwen3-8B -sc {config}")
    assert command.speculation == Speculation(
        draft="eagle3", gamma=3, checkpoint="a/b-1.5"
    )
    assert command.read["--speculative-config"].startswith('{"method": "eagle3"')
    with pytest.raises(ConfigError, match="magicdec check -"):
        read_serve_command("vllm serve Qwen/Qwen3-8B -sc method:eagle3")


@pytest.mark.parametrize(
    ("checkpoint", "draft", "said"),
    [
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3", ""),
        ("yuhuili/EAGLE-LLaMA3.1-Instruct-8B", "eagle", ""),
        ("deepseek-ai/dspark_qwen3_8b_block7", "dspark", ""),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", ""),
        ("/models/eagle3/qwen3-8b", "eagle3", "for EAGLE-3, as its path says"),
        ("someone/qwen3-8b-EAGLE-3-v2", "eagle", "by its name it is EAGLE-3"),
        ("someone/qwen3-8b-p-eagle", "p-eagle", "goes by the architecture"),
    ],
)
def test_vllm_finds_the_method_of_a_head_in_its_path(
    checkpoint: str, draft: str, said: str
) -> None:
    """By the first of "eagle-", "eagle3", "dflash", "dspark" (vllm/config/speculative.py of 0.33); what a name
    tells beside it is a note."""
    config = {"model": checkpoint, "num_speculative_tokens": 3}
    command = read_serve_command(
        f"vllm serve Qwen/Qwen3-8B --speculative-config '{json.dumps(config)}'"
    )
    assert command.speculation is not None
    assert (command.speculation.draft, command.problems) == (draft, [])
    assert [said in note for note in command.notes] == [True] * bool(said)


def test_a_window_of_a_head_is_read() -> None:
    text = (
        "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --speculative-algorithm EAGLE3 "
        "--speculative-num-steps 3 --speculative-draft-window-size 2048"
    )
    assert read_serve_command(text).speculation == Speculation(
        draft="eagle3", gamma=3, window=2048
    )


@pytest.mark.parametrize(
    ("algorithm", "steps", "topk", "tokens", "gamma", "kind", "said"),
    [
        ("EAGLE3", 3, 1, 4, 3, "", ""),
        ("EAGLE3", 3, 1, 8, 3, "note", "8 is not taken"),
        ("EAGLE3", 3, 2, 11, 10, "", ""),
        ("EAGLE3", 3, 2, 12, 11, "wrong", "give: 11"),
        ("EAGLE3", 1, 4, 5, 4, "", ""),
        ("EAGLE3", 1, 4, 6, 5, "wrong", "give: 5"),
        ("EAGLE3", None, 1, 4, 3, "wrong", "without --speculative-num-steps"),
        ("DFLASH", 1, 1, 16, 15, "", ""),
        ("DFLASH", None, 1, 16, 15, "", ""),
        ("DSPARK", 1, 1, 8, 7, "", ""),
        ("DSPARK", None, 1, None, None, "", ""),
        ("NGRAM", None, 1, 12, 11, "", ""),
    ],
)
def test_the_numbers_of_a_draft_in_sglang(
    algorithm: str,
    steps: int | None,
    topk: int,
    tokens: int | None,
    gamma: int | None,
    kind: str,
    said: str,
) -> None:
    """EAGLE: one step of top-k k has k candidates, each further one k squared; all and the root may be
    verified; a chain's number follows its steps. DFLASH and DSPARK draft a block in one step
    (arg_groups/speculative_hook.py of 0.5.23)."""
    text = f"python -m sglang.launch_server --model-path Qwen/Qwen3-8B --speculative-algorithm {algorithm} "
    for name, value in (("steps", steps), ("draft-tokens", tokens)):
        if value is not None:
            text += f"--speculative-num-{name} {value} "
    command = read_serve_command(f"{text} --speculative-eagle-topk {topk}")
    assert command.speculation is not None
    assert command.speculation.gamma == gamma
    found = {"wrong": command.problems, "note": command.notes}
    for name, sentences in found.items():
        assert [said in sentence for sentence in sentences] == [True] * (name == kind)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3}, []),
        ({"method": "eagle3", "model": "a/b"}, ["has no num_speculative_tokens"]),
        ({"method": "eagle3", "num_speculative_tokens": 3}, ["no model for EAGLE-3"]),
        ({"method": "eagle3", "num_speculative_tokens": 0}, ["asks for 1 or more"]),
        ({"method": "mtp", "num_speculative_tokens": 1}, []),
        ({"method": "mtp"}, ["has no num_speculative_tokens"]),
        ({"method": "mtp", "model": "a/b"}, []),
        ({"method": "dspark", "model": "a/b_block7"}, []),
        ({"method": "dspark"}, ["has no num_speculative_tokens"]),
        ({"method": "dflash", "model": "a/b"}, ["has no num_speculative_tokens"]),
        ({"method": "ngram"}, ["has no num_speculative_tokens"]),
        ({"method": "suffix"}, []),
        ({"method": "medusa", "model": "a/b", "num_speculative_tokens": 3}, ["medusa"]),
        ({"method": "custom_class", "model": "a.B", "num_speculative_tokens": 3}, []),
    ],
)
def test_what_vllm_asks_of_a_speculative_config(
    config: dict[str, Any], said: list[str]
) -> None:
    """A number but where a checkpoint tells it, a model but where the target brings one (0.15 to 0.33)."""
    text = f"vllm serve Qwen/Qwen3-8B --speculative-config '{json.dumps(config)}'"
    problems = read_serve_command(text).problems
    assert len(problems) == len(said)
    for problem, words in zip(problems, said, strict=True):
        assert words in problem


def test_a_dropped_method_is_no_fault_of_older_versions() -> None:
    config = '{"method": "medusa", "model": "a/b", "num_speculative_tokens": 3}'
    text = (
        f"docker run vllm/vllm-openai:v0.24.0 --model m --speculative-config '{config}'"
    )
    command = read_serve_command(text)
    assert (command.speculation is None, command.problems) == (False, [])


@pytest.mark.parametrize(
    ("image", "kind"),
    [
        ("vllm/vllm-openai:v0.33.0", "wrong"),
        ("docker.io/vllm/vllm-openai:v0.33.0", "wrong"),
        ("quay.io/ascend/vllm-ascend:v0.33.0", "note"),
        ("registry.local/team/vllm:0.33.0", "note"),
        ("vllm/vllm-openai:v0.99.0", ""),
    ],
)
def test_an_image_of_others_may_have_more_options(image: str, kind: str) -> None:
    command = read_serve_command(f"docker run {image} vllm serve m --swap-space 4")
    found = {"wrong": command.problems, "note": command.notes}
    for name, sentences in found.items():
        assert ["has no --swap-space" in says for says in sentences] == [True] * (
            name == kind
        )


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("vllm serve m --max-num-seqs abc", "--max-num-seqs"),
        ("vllm serve m -tp x", "-tp"),
        ("vllm serve m --tensor_parallel_size=x", "--tensor_parallel_size"),
        ("trtllm-serve m --max_batch_size abc", "--max_batch_size"),
        ("llama-server -m m.gguf -np abc", "-np"),
    ],
)
def test_an_error_names_the_option_as_it_is_typed(text: str, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{option} must be a whole number"):
        read_serve_command(text)


def test_the_beginning_of_one_option_is_no_fault() -> None:
    text = "docker run lmsysorg/sglang:v0.5.23 python -m sglang.launch_server "
    command = read_serve_command(text + "--model-path Qwen/Qwen3-8B --tp 2")
    assert (command.tp_size, command.problems) == (2, [])
