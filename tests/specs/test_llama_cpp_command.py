"""llama-server's commands, as its documentation writes them."""

from __future__ import annotations

import pytest

from magicdec.errors import ConfigError
from magicdec.specs.engine import load_engine
from magicdec.specs.serve_command import read_serve_command
from magicdec.specs.serve_command.llama_cpp import gguf_of


@pytest.mark.parametrize(
    ("name", "model", "label", "weights"),
    [
        ("/models/Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B", "Q4_K_M", "q4_k_m"),
        ("unsloth/Qwen3-8B-GGUF:Q8_0", "Qwen3-8B", "Q8_0", "q8_0"),
        ("gemma-3-27b-it-UD-Q3_K_XL-00001-of-00002.gguf", "gemma-3-27b-it", "UD-Q3_K_XL", "ud_q3_k_xl"),
        ("Llama-3.1-8B-Instruct-IQ4_XS.gguf", "Llama-3.1-8B-Instruct", "IQ4_XS", "iq4_xs"),
        ("gpt-oss-20b-mxfp4.gguf", "gpt-oss-20b", "MXFP4", "mxfp4_moe"),
        ("Qwen3-0.6B-BF16.gguf", "Qwen3-0.6B", "BF16", "bf16"),
        ("gpt-oss-20b-F16.gguf", "gpt-oss-20b", "F16", "f16"),
        ("a/Qwen3-8B-i1-GGUF/Qwen3-8B.i1-Q4_K_S.gguf", "Qwen3-8B", "Q4_K_S", "q4_k_s"),
        ("ggml-org/Qwen3-0.6B-GGUF", "Qwen3-0.6B", "", None),
    ],
)  # fmt: skip
def test_a_gguf_file_tells_its_model_and_its_format(name, model, label, weights):
    assert gguf_of(name) == (model, label, weights)


def test_a_file_that_is_here_weighs_what_it_weighs(tmp_path):
    for name in (
        "Qwen3-8B-Q4_K_M",
        "Qwen3-8B-Q4_K_M-00001-of-00002",
        "Qwen3-8B-Q4_K_M-00002-of-00002",
        "model",
    ):
        (tmp_path / f"{name}.gguf").write_bytes(bytes(25_000))
    assert gguf_of(f"{tmp_path}/Qwen3-8B-Q4_K_M.gguf").weight_dtype == "q4_k_m@0.025MB"
    shard = gguf_of(f"{tmp_path}/Qwen3-8B-Q4_K_M-00001-of-00002.gguf")
    assert shard.weight_dtype == "q4_k_m@0.05MB"
    assert gguf_of(f"{tmp_path}/model.gguf").weight_dtype == "gguf@0.025MB"


@pytest.mark.parametrize(
    ("command", "draft", "gamma"),
    [
        ("-m Qwen3-8B-Q4_K_M.gguf -md Qwen3-0.6B-Q8_0.gguf --draft-max 8", "Qwen3-0.6B", 8),
        ("-hf a/Qwen3-8B-GGUF:Q4_K_M -hfd a/Qwen3-0.6B-GGUF:Q8_0", "Qwen3-0.6B", 16),
        ("-m Qwen3-8B-Q4_K_M.gguf --spec-type ngram-simple --draft-max 12", "ngram", 12),
        ("-m Qwen3.6-27B-Q4_K_M.gguf --spec-type draft-mtp --spec-draft-n-max 3", "mtp", 3),
    ],
)  # fmt: skip
def test_its_drafts_are_those_of_the_command(command, draft, gamma):
    read = read_serve_command(f"./build/bin/llama-server {command} -ngl 99 -c 8192")
    assert read.engine == "llama.cpp"
    assert (read.speculation.draft, read.speculation.gamma) == (draft, gamma)
    assert load_engine(read.engine_profile).name == "llama.cpp"


def test_a_container_s_command_shares_its_context_among_its_sequences():
    read = read_serve_command(
        "docker run --gpus all ghcr.io/ggml-org/llama.cpp:server-cuda -hf a/Qwen3-8B-GGUF:Q8_0 -np 4 -c 32768 "
        "--jinja -ngl 20"
    )
    assert (read.max_num_seqs, read.max_model_len) == (4, 8192)
    assert read.speculation is None
    assert "--jinja" in read.without_effect
    assert any("fitted by nobody" in note for note in read.notes)
    assert any("-ngl 20" in note for note in read.notes)


def test_a_command_without_a_model_and_a_draft_of_another_sort_are_refused():
    with pytest.raises(ConfigError, match="names no model"):
        read_serve_command("llama-server --port 8080")
    with pytest.raises(ConfigError, match="not planned for"):
        read_serve_command("llama-server -m a.gguf --spec-type strange")
