"""Settings of a command by the table of rules: each on an input that passes and on one that is refused; and a length
near its ceiling, which recommends nothing deeper."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import magicdec
from magicdec.errors import ConfigError
from magicdec.live.check import Check, check_command
from magicdec.live.forms import read_files
from magicdec.live.load import AskedLoad
from magicdec.live.observation import parse_draft
from magicdec.live.profile import acceptance_profile, at_depth
from magicdec.perfmodel.acceptance.believed import most_tokens
from magicdec.specs.serve_command import read_serve_command

VLLM = "vllm serve Qwen/Qwen3-8B "
SGLANG = "python -m sglang.launch_server --model-path Qwen/Qwen3-8B "
LLAMA_2 = "meta-llama/Llama-2-7b-chat-hf"
LONG = f"vllm serve {LLAMA_2} --max-model-len 8192"


def checked(text: str, **load: Any) -> Check:
    usual = {"hardware": "h100", "batch": 1, "context_len": 1024}
    return check_command(read_serve_command(text), AskedLoad(**usual | load))


@pytest.mark.parametrize(
    ("text", "device", "kind", "says"),
    [
        # devices
        ("vllm serve Qwen/Qwen3-32B -tp 4", "4xh100", "", "devices"),
        ("vllm serve Qwen/Qwen3-32B -tp 4", "8xh100", "note", "4 of the 8 devices"),
        ("vllm serve Qwen/Qwen3-32B -tp 4", "2xh100", "wrong", "but 2 are given"),
        ("trtllm-serve Qwen/Qwen3-32B --tp_size 4", "2xh100", "note", "2 are given"),
        # the longest sequence
        (f"vllm serve {LLAMA_2} --max-model-len 4096", "h100", "", "more than the"),
        (LONG, "h100", "wrong", "--max-model-len 8192 is more than the 4096"),
        (f"VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 {LONG}", "h100", "note", "not to be relied"),
        (f"VLLM_ALLOW_LONG_MAX_MODEL_LEN=0 {LONG}", "h100", "wrong", "more than the"),
        (f"{LONG} --hf-overrides '{{\"a\": 1}}'", "h100", "note", "overrides"),
        (
            f"python -m sglang.launch_server --model-path {LLAMA_2} --context-length 8192",
            "h100",
            "wrong",
            "--context-length 8192",
        ),
        (
            "llama-server -m llama-2-7b-chat.Q4_K_M.gguf -ngl 99 -c 8192",
            "h100",
            "note",
            "-c 8192 is more than the 4096",
        ),
        # formats and generations
        (f"{VLLM} --dtype half", "v100", "", "bf16"),
        (f"{VLLM} --dtype bfloat16", "v100", "wrong", "cannot compute in bf16"),
        (VLLM, "v100", "note", "priced in fp16"),
        (f"{SGLANG} --dtype bfloat16 --tp 2", "t4", "note", "takes float16 instead"),
        (f"{SGLANG} --dtype half", "v100", "wrong", "below the 7.5"),
        (VLLM, "v100", "note", "7.5 or more from 0.21 on"),
        (f"docker run vllm/vllm-openai:v0.15.0 {VLLM}", "v100", "", "7.5 or more"),
        (VLLM, "p40", "wrong", "official builds do not start"),
        ("llama-server -m Qwen3-8B-Q8_0.gguf -ngl 99", "p40", "", "not start"),
        ("trtllm-serve Qwen/Qwen3-0.6B", "t4", "note", "Ampere and newer"),
    ],
)
def test_what_is_said_of_devices_lengths_and_formats(
    text: str, device: str, kind: str, says: str
) -> None:
    """vLLM 0.15 to 0.33, SGLang 0.5.2 to 0.5.23: the addresses stand in data/rules.toml."""
    found = checked(text, hardware=device)
    sentences = {"wrong": found.problems, "note": found.notes, "asked": found.asked}
    said = [name for name, each in sentences.items() if any(says in s for s in each)]
    assert said == [kind] * bool(kind)


def test_a_device_of_the_file_that_the_catalog_lacks_is_asked_for() -> None:
    text = (
        "services:\n  a:\n    image: vllm/vllm-openai:v0.33.0\n    command: --model Qwen/Qwen3-8B\n"
        "    deploy:\n      resources:\n        reservations:\n          devices:\n"
        "          - {driver: nvidia, count: 1, capabilities: [gpu]}\n"
    )
    command = read_serve_command(text)
    command = msgspec.structs.replace(command, hardware="h100-mig-1g.10gb")
    unknown = check_command(command, AskedLoad(batch=1, context_len=1024))
    assert unknown.problems == []
    assert any("h100-mig-1g.10gb" in question for question in unknown.asked)


@pytest.mark.parametrize(
    "text",
    [
        f"{VLLM} --speculative-config "
        '\'{"method": "dspark", "model": "deepseek-ai/dspark_qwen3_8b_block7"}\'',
        f"{SGLANG} --speculative-algorithm DSPARK --speculative-draft-model-path "
        "deepseek-ai/dspark_qwen3_8b_block7",
    ],
)
def test_a_checkpoint_tells_the_number_of_its_block(text: str) -> None:
    result = checked(text)
    assert result.problems == []
    assert result.as_it_is is not None
    assert result.as_it_is.gamma == 7


@pytest.mark.parametrize(
    "config",
    [
        '{"method": "medusa", "model": "a/b", "num_speculative_tokens": 3}',
        '{"method": "custom_class", "model": "a.B", "num_speculative_tokens": 3}',
        '{"method": "draft_model", "model": "amd/PARD-0.6B", "num_speculative_tokens": 8, "parallel_drafting": true}',
    ],
)
def test_a_draft_of_which_nothing_is_known_is_not_priced(config: str) -> None:
    image = "docker run vllm/vllm-openai:v0.24.0 --model Qwen/Qwen3-8B"
    result = checked(f"{image} --speculative-config '{config}'")
    assert result.problems == []
    assert result.as_it_is is None
    assert result.advice == "Keep it as it is: its own draft is not priced."
    assert any(
        note.startswith("nothing is known of the draft") for note in result.notes
    )


@pytest.mark.parametrize(
    ("option", "kv_dtype"),
    [
        ("int8_per_token_head", "int8"),
        ("fp8_per_token_head", "fp8"),
        ("turboquant_3bit_nc", "int4"),
        ("fp8_e4m3", "fp8"),
    ],
)
def test_caches_of_narrow_formats_are_priced(option: str, kv_dtype: str) -> None:
    """vllm/config/cache.py of 0.33."""
    narrow = checked(f"{VLLM} --kv-cache-dtype {option}", context_len=32768)
    plain = magicdec.predict(
        model="qwen3-8b", hardware="h100", engine="vllm", batch=1, context=32768,
        draft="none", kv_dtype=kv_dtype,
    )  # fmt: skip
    assert narrow.as_it_is is not None
    assert narrow.as_it_is.decoding.tpot_s == pytest.approx(plain.decoding.tpot_s)


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/models/gemma-4-31b-autoround-int4", ""),  # called as a checkpoint is
        ("/models/gemma-4-31b-qat-w4a16", "gemma-4-31b-w4a16"),
        ("/models/qwen3.6-27b-awq-bf16-int4", "qwen3.6-27b-awq"),
        ("/mnt/llm/Qwen3-32B/AWQ", "qwen3-32b-awq"),
        ("/hub/Qwen3-8B-AWQ/snapshots/0a1b2c", "qwen3-8b-awq"),
    ],
)
def test_the_name_of_a_folder_is_a_note(path: str, model: str) -> None:
    result = checked(f"vllm serve {path} --quantization auto_round", hardware="h200")
    assert result.problems == []
    assert result.as_it_is is not None
    said = [note for note in result.notes if "is taken for" in note]
    assert [f"{path} is taken for {model} by its name" in note for note in said] == (
        [True] * bool(model)
    )


def test_a_folder_whose_name_tells_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="no configuration at /models/Carnice"):
        checked("vllm serve /models/Carnice-V2")


# A length near its ceiling

HEAD = (
    f"{VLLM} --speculative-config '"
    '{"method": "eagle3", "model": "AngelSlim/Qwen3-8B_eagle3", "num_speculative_tokens": 3}\''
)


@pytest.mark.parametrize("length", [2.2, 2.8, 3.2, 3.6, 3.95, 4.0])
def test_no_deeper_gamma_is_advised_than_one_length_tells_of(length: float) -> None:
    result = checked(HEAD, accept_length=length)
    deeper = [change for change in result.changes if "per step, not 3" in change.change]
    if length > 3.5:  # near the ceiling of 4
        assert deeper == []
        assert any("one number of tokens per step" in note for note in result.notes)
    for change in deeper:
        gamma = int(change.change.split()[1])
        tokens = float(change.reason.split()[0])
        assert gamma < 3 or tokens <= most_tokens("eagle3")[gamma]


def test_one_rate_plans_no_more_tokens_than_anybody_measured() -> None:
    """0.95 at every position would be 9.7 tokens of 12; a list by position is as it was counted."""
    asked = {"model": "qwen3-8b", "hardware": "h100", "batch": 1, "context": 2048, "draft": "eagle3"}  # fmt: skip
    most = max(most_tokens("eagle3").values())
    held = magicdec.plan(**asked, acceptance_rate=0.95).best
    assert held.drafting.tokens_per_step <= most
    counted = magicdec.plan(**asked, acceptance_rate=(0.95,) * 12).best
    assert counted.drafting.tokens_per_step > most
    given = magicdec.plan(**asked, acceptance_rate=0.95, gamma=10).best
    assert given.gamma == 10


REPORT = """============ Serving Benchmark Result ============
Backend: sglang
Successful requests: 100
Benchmark duration (s): 50.0
Total input tokens: 100000
Total generated tokens: 20000
Mean TPOT (ms): 2.2
Mean TTFT (ms): 60
Accept length: {length}
"""


@pytest.mark.parametrize("length", [1.8, 2.5, 3.95])
def test_nothing_deeper_is_planned_where_the_depth_was_assumed(
    length: float, tmp_path: Path
) -> None:
    path = tmp_path / "report.txt"
    path.write_text(REPORT.format(length=length))
    seen = read_files([path])
    for name, usual in (("dflash", 15), ("dspark", 7), ("eagle3", 3)):
        draft = parse_draft(name)
        observation = at_depth(seen, draft)
        assert observation.is_gamma_assumed
        assert observation.gamma == max(usual, math.ceil(length) - 1)
        profile = acceptance_profile(
            observation, draft, model="qwen3-8b", context=1024.0
        )
        assert profile.max_gamma == observation.gamma
        tokens, _ = profile.tokens_per_step(
            budget=1024.0, context=1024.0, gamma=np.arange(1, observation.gamma + 1)
        )
        assert tokens.max() <= length * 1.01
    given = at_depth(seen, parse_draft("dflash"), 7)
    assert (given.gamma, given.is_gamma_assumed) == (7, False)
    if length > 2.0:
        with pytest.raises(ConfigError, match=r"--gamma 1: .* at least"):
            at_depth(seen, parse_draft("dflash"), 1)
    with pytest.raises(ConfigError, match="tells of 7 drafted tokens"):
        at_depth(given, parse_draft("dflash"), 8)
