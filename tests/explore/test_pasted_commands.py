"""A serve command pasted into the page: what `magicdec check` says of it, and the controls that ask the same."""

from __future__ import annotations

import multiprocessing
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from magicdec.errors import MagicdecError
from magicdec.explore.pasted import MOST_CPU_S, pasted
from magicdec.explore.server import ExplorerServer
from magicdec.explore.state import Catalog
from magicdec.live.check import AskedLoad, check_command
from magicdec.live.check_text import lines_of
from magicdec.specs.serve_command import read_serve_command
from tests.processes import still_alive_after

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


def post(server: ExplorerServer, path: str, **fields: str) -> tuple[int, str]:
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
def test_it_says_what_check_says(server: ExplorerServer, command: str) -> None:
    status, page = post(server, "check", command=command, state="hardware=h100")
    assert status == 200
    result = check_command(
        read_serve_command(command.strip()), AskedLoad(hardware="h100-sxm-80gb")
    )
    assert texts(page) == [line.text for line in lines_of(result)]


def test_the_terminal_says_the_same(server: ExplorerServer, tmp_path: Path) -> None:
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


def test_the_controls_ask_for_the_command_as_it_is(server: ExplorerServer) -> None:
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


def test_a_manifest_names_its_devices(server: ExplorerServer) -> None:
    _, page = post(server, "check", command=KUBERNETES, state="")
    assert filled(page)["hardware"] == "l40s-48gb"
    _, page = post(server, "check", command=KUBERNETES, state="hardware=h100")
    assert filled(page)["hardware"] == "h100-sxm-80gb"


def test_what_is_not_understood_is_one_line(server: ExplorerServer) -> None:
    _, page = post(server, "check", command=VLLM, state="")
    assert [text for text in texts(page) if text.startswith("not understood")] == [
        "not understood (not in vLLM 0.32–0.33): --frobnicate"
    ]


UNREADABLE = [
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
    ("vllm serve '<script>alert(1)</script>'", "unknown model"),
    ("vllm serve <script>alert(1)</script>", "the command names no model"),
]


@pytest.mark.parametrize(("command", "message"), UNREADABLE)
def test_what_cannot_be_read_is_one_line(command: str, message: str) -> None:
    catalog = Catalog.given()
    with pytest.raises(MagicdecError) as refusal:
        pasted(catalog, catalog.start, command)
    (line,) = str(refusal.value).splitlines()
    assert message in line


@pytest.mark.parametrize(("command", "message"), [UNREADABLE[1], *UNREADABLE[-2:]])
def test_a_refusal_is_one_line_of_the_page(
    server: ExplorerServer, command: str, message: str
) -> None:
    status, page = post(server, "check", command=command, state="")
    assert status == 400
    (line,) = re.findall(r'<p class="error" role="alert">(.*?)</p>', page, re.DOTALL)
    assert message in unescape(line)
    assert "<script>alert" not in page


def test_a_command_reads_no_file(server: ExplorerServer, tmp_path: Path) -> None:
    secret = tmp_path / "secret.yaml"
    secret.write_text("speculative_config: {decoding_type: NGram, max_draft_len: 3}")
    command = f"{TRTLLM} --extra_llm_api_options {secret}"
    status, page = post(server, "check", command=command, state="")
    assert status == 200
    assert any("are not read here" in text for text in texts(page))
    assert "draft" not in filled(page)


def test_it_works_with_scripts_off(server: ExplorerServer) -> None:
    """The form of the page sends the command alone and gets the whole page."""
    status, page = post(server, "", command=VLLM)
    assert status == 200
    assert 'class="advice"' in page
    assert re.search(r'<input id="control-gamma"[^>]*value="5"', page)
    assert "--frobnicate" in page


def test_too_long_a_command_is_refused(server: ExplorerServer) -> None:
    status, page = post(server, "check", command="vllm serve " + "x" * 1_100_000)
    assert status == 400
    assert "too long" in page


MERGED = "a0: &a0 {x: 1}\n" + "\n".join(
    f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 27)
)


@pytest.mark.parametrize(
    "text",
    [
        MERGED,
        "CUDA_VISIBLE_DEVICES=0" + " " * 200_000 + "vllm serve llama-3.1-8b",
        "vllm/vllm-openai " * 5000,
    ],
    ids=["merge keys", "blanks", "images"],
)
def test_what_is_written_to_take_forever_ends(
    server: ExplorerServer, text: str
) -> None:
    begun = time.monotonic()
    status, page = post(server, "check", command=text, state="")
    assert status in (200, 400)
    assert time.monotonic() - begun < 60 + MOST_CPU_S
    assert "traceback" not in page


def bounded(code: str, *, most_cpu_s: int, most_bytes: int) -> str:
    """The last line of a process under bounds that runs this code."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from magicdec.explore.pasted import bound_this_process\n"
            f"bound_this_process(most_cpu_s={most_cpu_s}, most_bytes={most_bytes})\n{code}",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.stderr.splitlines()[-1]


def test_a_process_is_bound_in_time_and_memory() -> None:
    endless = bounded("while True: pass", most_cpu_s=1, most_bytes=1 << 30)
    assert "more than 1 s of processor time" in endless
    large = bounded("bytes(1 << 30)", most_cpu_s=20, most_bytes=1 << 29)
    assert large == "MemoryError"


def test_what_a_client_asked_ends_with_it(server: ExplorerServer) -> None:
    """A question whose client hangs up leaves no process."""
    body = urllib.parse.urlencode({"command": VLLM + " " * 9}).encode()
    before = set(multiprocessing.active_children())
    with socket.create_connection(server.server_address[:2]) as client:
        head = f"POST /check HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        started: set[multiprocessing.process.BaseProcess] = set()
        while not started:
            started = set(multiprocessing.active_children()) - before
    pids = [process.pid for process in started if process.pid is not None]
    assert not still_alive_after(20, pids)


@pytest.mark.parametrize("name", ["vllm.log", "sglang.log", "llama_cpp.log"])
def test_a_pasted_log_is_read_as_observe_reads_it(name: str) -> None:
    sample = Path("docs/samples/logs") / name
    register_commands()
    catalog = Catalog.given(model="qwen3-8b", hardware="h100")
    read = pasted(catalog, catalog.start, sample.read_text())
    model = dict(urllib.parse.parse_qsl(read.query))["model"]
    wanted = CliRunner().invoke(
        app, ["observe", str(sample), "--model", model, "--hardware", "h100"]
    )
    assert wanted.exit_code == 0, wanted.output
    printed = wanted.output.splitlines()
    shown = "\n".join(line.text for line in read.lines).splitlines()
    assert sorted(filter(None, shown)) == sorted(filter(None, printed))
    assert shown[0] == printed[0]


def test_a_pasted_log_brings_its_model() -> None:
    text = Path("docs/samples/logs/vllm.log").read_text()
    catalog = Catalog.given()
    assert "model=Qwen%2FQwen3-8B" in pasted(catalog, catalog.start, text).query
