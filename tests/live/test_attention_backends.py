"""Attention backends in a server's command: read under every name, priced, refused, and advised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import magicdec
from magicdec.errors import ConfigError
from magicdec.live.check import Check, check_command
from magicdec.live.findings import findings_of
from magicdec.live.load import AskedLoad
from magicdec.reports.exports import export
from magicdec.reports.story import story_of
from magicdec.schema.plan import Plan
from magicdec.specs.serve_command import read_serve_command

VLLM = "vllm serve meta-llama/Llama-3.1-8B-Instruct"
DRAFT = {"method": "eagle3", "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}
SGLANG = (
    "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path AngelSlim/Qwen3-8B_eagle3 --speculative-num-steps 3 "
    "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
)
SERVED = VLLM.removeprefix("vllm serve ")


@pytest.mark.parametrize(
    ("text", "target", "draft"),
    [
        (f"{VLLM} --attention-backend FLASHINFER", "FLASHINFER", ""),
        (f"{VLLM} --attention-backend=flashinfer", "FLASHINFER", ""),
        (f"{VLLM} -ac.backend TRITON_ATTN", "TRITON_ATTN", ""),
        (f"{VLLM} --attention-config '{{\"backend\": \"FLASH_ATTN\"}}'", "FLASH_ATTN", ""),
        (f"VLLM_ATTENTION_BACKEND=FLASHINFER {VLLM}", "", ""),
        (f"docker run -e VLLM_ATTENTION_BACKEND=FLASHINFER vllm/vllm-openai:v0.14.0 {SERVED}", "FLASHINFER", ""),
        (f"docker run -e VLLM_ATTENTION_BACKEND=FLASHINFER_VLLM_V1 vllm/vllm-openai:v0.9.2 {SERVED}", "FLASHINFER", ""),
        (f"docker run -e VLLM_ATTENTION_BACKEND=FLASHINFER vllm/vllm-openai:v0.15.0 {SERVED}", "", ""),
        (f"{SGLANG} --attention-backend triton", "triton", ""),
        (f"{SGLANG} --attention-backend triton --prefill-attention-backend fa3", "fa3", ""),
        (f"{SGLANG} --decode-attention-backend triton", "", ""),
        (f"{SGLANG} --decode-attention-backend triton --speculative-attention-mode decode", "triton", ""),
        (f"{SGLANG} --speculative-draft-attention-backend triton", "", "triton"),
    ],
)  # fmt: skip
def test_a_backend_is_read_under_every_name(text: str, target: str, draft: str) -> None:
    command = read_serve_command(text, reads_files=False)
    assert (command.attention_backend, command.draft_attention_backend) == (
        target,
        draft,
    )
    assert not command.noted
    assert command.started_engine.paths.attention_backend == target


def test_the_draft_s_backend_and_tensorrt_llm_s(tmp_path: Path) -> None:
    config = {**DRAFT, "num_speculative_tokens": 3, "attention_backend": "FLASH_ATTN"}
    text = f"{VLLM} --speculative-config '{json.dumps(config)}'"
    command = read_serve_command(text, reads_files=False)
    assert command.draft_attention_backend == "FLASH_ATTN"
    file = tmp_path / "settings.yaml"
    file.write_text("attn_backend: FLASHINFER\n")
    text = f"trtllm-serve Qwen/Qwen3-8B --extra_llm_api_options {file}"
    assert read_serve_command(text).attention_backend == "FLASHINFER"


def checked(option: str = "", *, version: str = "", hardware: str = "a100") -> Check:
    config = json.dumps({**DRAFT, "num_speculative_tokens": 3})
    text = f"{VLLM} --speculative-config '{config}' {option}"
    if version:
        text = text.replace(
            "vllm serve", f"docker run vllm/vllm-openai:v{version} --model"
        )
    load = AskedLoad(hardware=hardware, batch=32, context_len=8192, accept_length=2.6)
    return check_command(read_serve_command(text, reads_files=False), load)


def advised(result: Check) -> list[str]:
    return [
        change.option for change in result.changes if "Verify with" in change.change
    ]


def test_check_advises_a_kernel_that_splits_the_context_where_the_usual_one_does_not() -> (
    None
):
    usual = checked()
    assert advised(usual) == ["--attention-backend FLASHINFER"]
    (change,) = (each for each in usual.changes if "Verify" in each.change)
    with_it = checked("--attention-backend FLASHINFER")
    assert advised(with_it) == []
    assert usual.as_it_is is not None
    assert with_it.as_it_is is not None
    gained = usual.as_it_is.between_tokens_s / with_it.as_it_is.between_tokens_s
    assert gained == pytest.approx(change.gain, rel=0.01)
    assert gained > 1.5


def test_check_gives_the_option_of_its_version_and_none_where_nothing_is_gained() -> (
    None
):
    assert advised(checked(version="0.12.0")) == ["VLLM_ATTENTION_BACKEND=FLASHINFER"]
    assert advised(checked(hardware="h100")) == []
    assert advised(checked("--kv-cache-dtype fp8")) == []


def test_a_backend_that_refuses_the_cache_stops_the_server() -> None:
    text = f"{VLLM} --kv-cache-dtype fp8 --attention-backend FLASH_ATTN"
    command = read_serve_command(text, reads_files=False)
    wrong = {
        device: findings_of(command, AskedLoad(hardware=device)).said["wrong"]
        for device in ("a100", "h100")
    }
    assert "FLASH_ATTN does not start" in wrong["a100"][0]
    assert wrong["h100"] == []


GLM = """vllm serve zai-org/GLM-4.7-Flash --speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'"""


def wrong_with(text: str, device: str) -> list[str]:
    command = read_serve_command(text, reads_files=False)
    return findings_of(command, AskedLoad(hardware=device)).said["wrong"]


def test_latents_on_a_backend_of_heads_and_in_releases_that_fail_to_capture() -> None:
    assert (
        "over latents" in wrong_with(f"{GLM} --attention-backend FLASHINFER", "h100")[0]
    )
    assert wrong_with(f"{GLM} --attention-backend FLASHMLA", "h100") == []
    sglang = "python -m sglang.launch_server --model-path zai-org/GLM-4.7-Flash"
    (refused,) = wrong_with(f"{sglang} --attention-backend trtllm_mha", "b200")
    assert "trtllm_mla" in refused
    assert wrong_with(f"{sglang} --attention-backend flashinfer", "b200") == []
    older = "docker run vllm/vllm-openai:v0.24.0 --model " + GLM.removeprefix(
        "vllm serve "
    )
    assert "TRITON_MLA fails to capture" in wrong_with(older, "a100")[0]
    assert wrong_with(f"{older} --enforce-eager", "a100") == []
    assert wrong_with(older, "h100") == []
    assert wrong_with(older.replace("0.24.0", "0.30.0"), "a100") == []
    with pytest.raises(ConfigError, match=r"FLASHINFER does not start.*latents"):
        magicdec.plan(
            model="glm-4.7-flash",
            hardware="h100",
            batch=8,
            attention_backend="flashinfer",
        )


def planned(**options: str) -> Plan:
    return magicdec.plan(
        model="llama-3.1-8b",
        hardware="a100",
        batch=32,
        context=8192,
        draft="eagle3",
        gamma=3,
        accept_length=2.6,
        **options,
    )


def test_a_plan_takes_a_backend_in_any_case_as_engines_do() -> None:
    upper = planned(attention_backend="FLASHINFER").best.speedup
    assert planned(attention_backend="flashinfer").best.speedup == upper
    assert upper > 1.5 * planned().best.speedup


def test_plan_and_export_say_it_too() -> None:
    plan = planned()
    (line,) = (each.text for each in story_of(plan, plan) if each.kind == "kernel")
    assert line.startswith("--attention-backend FLASHINFER: ")
    assert len(line) < 160
    written = export("vllm", plan)
    assert written.rstrip().endswith("--attention-backend FLASHINFER")
    assert "attention-backend" not in export("sglang", plan)
