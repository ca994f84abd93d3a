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
    lone = gguf_of(f"{tmp_path}/Qwen3-8B-Q4_K_M-00001-of-00003.gguf")
    assert lone.weight_dtype == "q4_k_m"
    assert gguf_of(f"{tmp_path}/model.gguf").weight_dtype == "gguf@0.025MB"


@pytest.mark.parametrize(
    ("command", "draft", "gamma"),
    [
        ("-m Qwen3-8B-Q4_K_M.gguf -md Qwen3-0.6B-Q8_0.gguf --draft-max 8", "Qwen3-0.6B", 8),
        ("-hf a/Qwen3-8B-GGUF:Q4_K_M -hfd a/Qwen3-0.6B-GGUF:Q8_0", "Qwen3-0.6B", 3),
        ("-m Qwen3-8B-Q4_K_M.gguf --spec-type ngram-simple --draft-max 12", "ngram", 12),
        ("-m Qwen3.6-27B-Q4_K_M.gguf --spec-type draft-mtp --spec-draft-n-max 3", "mtp", 3),
        ("-m Qwen3.6-27B-Q4_K_M.gguf --spec-type draft-mtp-adaptive", "mtp", 3),
        ("-m Qwen3-8B-Q8_0.gguf -md Qwen3-8B-DFlash-Q8_0.gguf --spec-type draft-dflash", "dflash", 3),
        ("-m Qwen3-8B-Q8_0.gguf -md Qwen3-8B-DSpark-Q8_0.gguf --spec-type draft-dspark", "dspark", 3),
        ("-m Qwen3-8B-Q8_0.gguf -md Qwen3-8B-DFlash-Q8_0.gguf", "dflash", 3),
        ("-m Qwen3-8B-Q8_0.gguf --spec-type ngram-simple --spec-ngram-simple-size-m 7", "ngram", 7),
        ("-m Qwen3-8B-Q8_0.gguf --spec-type ngram-simple", "ngram", 32),
        ("-m Qwen3-8B-Q8_0.gguf --spec-default", "ngram", 32),
    ],
)  # fmt: skip
def test_its_drafts_are_those_of_the_command(command, draft, gamma):
    read = read_serve_command(f"./build/bin/llama-server {command} -ngl 99 -c 8192")
    assert read.engine == "llama.cpp"
    assert (read.speculation.draft, read.speculation.gamma) == (draft, gamma)
    assert load_engine(read.engine_profile).name == "llama.cpp"


def test_a_mixture_of_a_publisher_s_own_asks_for_its_size():
    for label, asks in (("UD-Q4_K_XL", True), ("Q4_K_M", False), ("UD-Q2_K_XL", False)):
        read = read_serve_command(f"llama-server -m Qwen3-8B-{label}.gguf -ngl 99")
        assert any("--weight-dtype ud_q4_k_xl@" in note for note in read.notes) == asks


def test_a_draft_s_file_has_a_format_of_its_own():
    text = "llama-server -m Qwen3-8B-Q4_K_M.gguf -md {} -ngl 99"
    model = read_serve_command(text.format("Qwen3-0.6B-Q8_0.gguf"))
    assert model.speculation.weight_dtype == "q8_0"
    head = text.format("Qwen3-8B-EAGLE3-F16.gguf --spec-type draft-eagle3")
    assert read_serve_command(head).speculation.weight_dtype == "f16"


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


DRAFTED = "-m Qwen3-8B-Q4_K_M.gguf -md Qwen3-0.6B-Q8_0.gguf"


@pytest.mark.parametrize(
    ("build", "gamma"), [("b8887", 16), ("b9235", 3), ("b9775", None)]
)
def test_a_model_drafts_as_its_build_has_it(build, gamma):
    """Sixteen drafts before April 2026, three after; since June 2026 none without --spec-type."""
    image = f"docker run ghcr.io/ggml-org/llama.cpp:server-cuda-{build}"
    read = read_serve_command(f"{image} {DRAFTED}")
    assert read.version == build.removeprefix("b")
    drafted = None if read.speculation is None else read.speculation.gamma
    assert drafted == gamma
    said = any("--spec-type draft-simple" in note for note in read.notes)
    assert said == (gamma is None)
    typed = read_serve_command(f"{image} {DRAFTED} --spec-type draft-simple")
    assert typed.speculation is not None
    assert not any("alone drafts nothing" in note for note in typed.notes)


@pytest.mark.parametrize(
    ("build", "is_wrong", "is_noted"),
    [("b8887", False, False), ("b9235", True, False), (None, False, True)],
)
def test_an_option_that_was_removed_is_wrong_where_the_build_tells(
    build, is_wrong, is_noted
):
    start = "llama-server"
    if build is not None:
        start = f"docker run ghcr.io/ggml-org/llama.cpp:server-{build}"
    read = read_serve_command(f"{start} {DRAFTED} --draft-max 8")
    assert any("--draft-max" in problem for problem in read.problems) == is_wrong
    assert any("exit with it" in note for note in read.notes) == is_noted
    today = read_serve_command(f"{start} {DRAFTED} --spec-draft-n-max 8")
    assert not today.problems


def test_options_of_its_list_are_told_from_any_word():
    read = read_serve_command(
        "llama-server -m Qwen3-8B-Q4_K_M.gguf --no-such-option --metrics --pooling mean -ngld 0 --no-mmap -ncmoe 4"
    )
    assert read.not_understood == ["--no-such-option"]
    assert read.without_effect == ["--metrics", "--no-mmap"]
    assert read.not_looked_at == ["--pooling"]
    assert list(read.noted) == ["-ngld", "-ncmoe"]
    assert read.is_partly_on_host
    # a variable sets an option, and the command's own word wins
    read = read_serve_command(
        "LLAMA_ARG_CTX_SIZE=4096 LLAMA_ARG_N_PARALLEL=2 llama-server -m Qwen3-8B-Q4_K_M.gguf -c 8192"
    )
    assert (read.allocated_tokens, read.max_num_seqs) == (8192, 2)


@pytest.mark.parametrize(
    ("options", "kv_dtype"),
    [
        ("", None),
        ("-ctk q8_0 -ctv q8_0", "fp8"),
        ("-ctk q8_0", None),
        ("-ctk q4_0 -ctv q4_0", "int4"),
        ("-ctv q4_0 -ctk q8_0", "fp8"),
    ],
)
def test_keys_and_values_have_formats_of_their_own(options, kv_dtype):
    """8.5 and 4.5 bits; the format that is nearest to their mean is priced."""
    read = read_serve_command(f"llama-server -m Qwen3-8B-Q4_K_M.gguf {options}")
    assert read.kv_dtype == kv_dtype


@pytest.mark.parametrize(
    ("options", "is_refused"),
    [
        ("-fa off -ctv q8_0", True),
        ("-fa on -ctv q8_0", False),
        ("-fa off -ctk q8_0", False),
    ],
)
def test_narrow_values_need_flash_attention(options, is_refused):
    read = read_serve_command(f"llama-server -m Qwen3-8B-Q4_K_M.gguf {options}")
    assert bool(read.problems) == is_refused


@pytest.mark.parametrize(
    ("options", "tokens"), [("", 512), ("-ub 2048", 2048), ("-ub 2048 -b 1024", 1024)]
)
def test_a_pass_reads_the_fewer_tokens_of_both_batches(options, tokens):
    read = read_serve_command(f"llama-server -m Qwen3-8B-Q4_K_M.gguf {options}")
    assert read.started_engine.scheduler.prefill_tokens == tokens
