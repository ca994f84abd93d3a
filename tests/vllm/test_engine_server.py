"""The engine's own OpenAI server with the draft: it answers, and its metrics show acceptance by position."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

START_S = 400.0


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from cases import MODEL
    from serving import ENVIRONMENT

    from magicdec.vllm.settings import DRAFT_CLASS

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    speculation = {"method": "custom_class", "model": DRAFT_CLASS, "num_speculative_tokens": 3}
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--dtype", "float32",
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", "--enforce-eager",
        "--block-size", "32", "--speculative-config", json.dumps(speculation),
        "--additional-config", json.dumps({"magicdec": {"draft_budget": 256}}),
    ]  # fmt: skip
    environment = {k: v for k, v in (os.environ | ENVIRONMENT).items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(address + "/health", process, log)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            urllib.request.urlopen(url, timeout=5)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1.0)
        else:
            return
    raise AssertionError(log.read_text()[-2000:])


def test_the_server_answers_and_counts(address: str) -> None:
    """Long prompts, greedy: drafted tokens are accepted, the first position's more often than the third's."""
    from cases import MODEL, prompts

    body = {"model": str(MODEL), "prompt": prompts(3, 900), "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        address + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    answer = json.load(urllib.request.urlopen(request, timeout=300))
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 3
    assert answer["usage"]["completion_tokens"] == 120
    metrics = urllib.request.urlopen(address + "/metrics", timeout=60).read().decode()
    by_position = dict(
        re.findall(r'^vllm:spec_decode_num_accepted_tokens_per_pos_total\{.*position="(\d)".*\} (\S+)$', metrics, re.M)
    )
    (drafts,) = re.findall(r"^vllm:spec_decode_num_drafts_total\{.*\} (\S+)$", metrics, re.M)
    accepted = [float(by_position[str(position)]) for position in range(3)]
    assert float(drafts) > accepted[0] >= accepted[1] >= accepted[2] > 0.3 * float(drafts)
