"""A serve command pasted into the page: what `magicdec check` says of it, and the controls that ask the same."""

from __future__ import annotations

import re
import urllib.error
import urllib.parse
import urllib.request
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from magicdec.explore.server import Server
from magicdec.explore.state import Catalog
from magicdec.live.check import AskedLoad, check_command
from magicdec.live.check_text import lines_of
from magicdec.specs.serve_command import read_serve_command

VLLM = (
    "vllm serve meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 2 --frobnicate 3 "
    '--speculative-config \'{"method": "eagle3", "num_speculative_tokens": 5}\''
)
SGLANG = (
    "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --speculative-algorithm NGRAM "
    "--speculative-num-draft-tokens 6"
)
TRTLLM = "trtllm-serve meta-llama/Llama-3.1-8B-Instruct --max_batch_size 16"
COMPOSE = """
services:
  server:
    image: vllm/vllm-openai
    command: --model Qwen/Qwen3-8B --max-num-seqs 16
    deploy:
      resources:
        reservations:
          devices: [{count: 1, capabilities: [gpu]}]
"""
KUBERNETES = """
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      nodeSelector: {nvidia.com/gpu.product: NVIDIA-L40S}
      containers:
      - name: server
        image: vllm/vllm-openai:latest
        args: ["--model", "Qwen/Qwen3-8B", "--max-num-seqs", "8"]
        resources: {limits: {nvidia.com/gpu: 1}}
"""


def post(server: Server, path: str, **fields: str) -> tuple[int, str]:
    request = urllib.request.Request(
        server.url + path, data=urllib.parse.urlencode(fields).encode(), method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def texts(page: str) -> list[str]:
    found = re.findall(r"<(?:p|code)\b[^>]*>(.*?)</(?:p|code)>", page, re.DOTALL)
    return [unescape(text) for text in found]


def filled(page: str) -> dict[str, str]:
    match = re.search(r'data-fill="([^"]*)"', page)
    assert match is not None
    return dict(urllib.parse.parse_qsl(unescape(match[1])))


@pytest.mark.parametrize("command", [VLLM, SGLANG, TRTLLM, COMPOSE])
def test_it_says_what_check_says(server: Server, command: str) -> None:
    status, page = post(server, "check", command=command, state="hardware=h100")
    assert status == 200
    result = check_command(
        read_serve_command(command.strip()), AskedLoad(hardware="h100-sxm-80gb")
    )
    assert texts(page) == [line.text for line in lines_of(result)]


def test_the_terminal_says_the_same(server: Server, tmp_path: Path) -> None:
    if not app.registered_commands:
        register_commands()
    file = tmp_path / "serve.sh"
    file.write_text(VLLM)
    done = CliRunner().invoke(
        app, ["check", str(file), "--hardware", "h100-sxm-80gb"], env={"COLUMNS": "999"}
    )
    assert done.exit_code == 0, done.output
    _, page = post(server, "check", command=VLLM, state="hardware=h100")
    said = re.sub(r"\s+", " ", done.output)
    assert all(re.sub(r"\s+", " ", text) in said for text in texts(page))


def test_the_controls_ask_for_the_command_as_it_is(server: Server) -> None:
    _, page = post(server, "check", command=VLLM, state="hardware=h100&batch=64")
    assert filled(page) == {
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "hardware": "h100-sxm-80gb",
        "engine": "vllm",
        "tp": "2",
        "batch": "32",
        "context": "4096",
        "draft": "eagle3",
        "gamma": "5",
    }
    _, page = post(
        server,
        "check",
        command=VLLM,
        state="hardware=h100&batch=12&context=8k&task=chat",
    )
    values = filled(page)
    assert (values["batch"], values["context"], values["task"]) == (
        "12",
        "8192",
        "chat",
    )
    state = Catalog.given().read(urllib.parse.urlencode(values))
    assert (state.draft_method, state.gamma) == ("eagle3", 5)


def test_a_manifest_names_its_devices(server: Server) -> None:
    _, page = post(server, "check", command=KUBERNETES, state="")
    assert filled(page)["hardware"] == "l40s-48gb"
    _, page = post(server, "check", command=KUBERNETES, state="hardware=h100")
    assert filled(page)["hardware"] == "h100-sxm-80gb"


def test_what_is_not_understood_is_one_line(server: Server) -> None:
    _, page = post(server, "check", command=VLLM, state="")
    assert [text for text in texts(page) if text.startswith("not understood")] == [
        "not understood (not in vLLM 0.32–0.33): --frobnicate"
    ]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("ls -la", "no server is started here"),
        ("", "no server is started here"),
        ("vllm serve 'unclosed", "cannot be read as a shell reads it"),
        ("vllm serve nobody/knows-this", "magicdec explore --model nobody/knows-this"),
        ("vllm serve /etc/passwd", "unknown model"),
        ("vllm serve Qwen/Qwen3-8B --tp x", "tp must be a whole number"),
        (
            'vllm serve Qwen/Qwen3-8B --speculative-config \'{"model": "/etc/passwd", '
            '"num_speculative_tokens": 3}\'',
            "unknown draft",
        ),
        ("a: [1]\nb: " + "[" * 200 + "]" * 200, "nests more than 100 deep"),
        ("vllm serve x --speculative-config.method", "method"),
        ("vllm serve " + "<script>alert(1)</script>", "unknown model"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    server: Server, command: str, message: str
) -> None:
    status, page = post(server, "check", command=command, state="")
    assert status == 400
    (line,) = re.findall(r'<p class="error" role="alert">(.*?)</p>', page, re.DOTALL)
    assert message in unescape(line)
    assert "<script>alert" not in page


def test_a_command_reads_no_file(server: Server, tmp_path: Path) -> None:
    secret = tmp_path / "secret.yaml"
    secret.write_text("speculative_config: {decoding_type: NGram, max_draft_len: 3}")
    command = f"{TRTLLM} --extra_llm_api_options {secret}"
    status, page = post(server, "check", command=command, state="")
    assert status == 200
    assert any("are not read here" in text for text in texts(page))
    assert "draft" not in filled(page)


def test_it_works_with_scripts_off(server: Server) -> None:
    """The form of the page sends the command alone and gets the whole page."""
    status, page = post(server, "", command=VLLM)
    assert status == 200
    assert 'class="advice"' in page
    assert re.search(r'<input id="control-gamma"[^>]*value="5"', page)
    assert "--frobnicate" in page


def test_too_long_a_command_is_refused(server: Server) -> None:
    status, page = post(server, "check", command="vllm serve " + "x" * 1_100_000)
    assert status == 400
    assert "too long" in page
