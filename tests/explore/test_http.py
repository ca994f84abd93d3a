"""The page over HTTP: its answers are the planner's, its errors one line, and it answers loopback only."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from html import unescape
from pathlib import Path

import pytest

import magicdec
from magicdec.errors import ConfigError
from magicdec.explore.explorer import FIGURES, OF_ARRIVALS, Explorer
from magicdec.explore.server import ExplorerServer
from magicdec.perfmodel.planner import PlanRequest, make_plan
from magicdec.schema.plan import Choice, plan_of
from tests.processes import Program

FIXED = "draft=streamingllm&budget=512&gamma=3&batch=48&context=65536"


def get(server: ExplorerServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(
            server.url + path.removeprefix("/"), timeout=60
        ) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def direct() -> Choice:
    request = PlanRequest(
        draft_method="streamingllm",
        draft_budgets=(512,),
        gamma=3,
        batch_sizes=(48,),
        context_lens=(65_536,),
    )
    return make_plan(request).choice


def test_the_answer_is_the_planners(server: ExplorerServer) -> None:
    status, text = get(server, f"/answer?{FIXED}")
    assert status == 200
    assert f"{direct().left_out.speedup:.2f}x" in text
    document = json.loads(get(server, f"/plan.json?{FIXED}")[1])
    assert plan_of(document).choice == direct()


def test_the_page_holds_the_answer_without_scripts(server: ExplorerServer) -> None:
    status, text = get(server, f"/?{FIXED}")
    assert status == 200
    assert f"{direct().left_out.speedup:.2f}x" in text
    assert re.search(r'<input id="control-batch"[^>]*value="48"', text)
    assert "<option selected>streamingllm</option>" in text


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (
            "model=llama-3.1-8x",
            "unknown model 'llama-3.1-8x': did you mean llama-3.1-8b?",
        ),
        ("batch=0", "batch must be between 1 and 65536, not 0"),
        ("tp=3", "nearest that do"),
        ("context=900000", "reads at most 131072 tokens"),
        ("budget=32768", "must be below the context"),
        ("acceptance=2", "must be between 0 and 1"),
        (
            "draft=tinyllama-1.1b&acceptance=0.7",
            "a draft needs its target's vocabulary",
        ),
        ("gamma=<script>alert(1)</script>", "must be a whole number"),
    ],
)
def test_bad_input_is_one_line_and_status_400(
    server: ExplorerServer, query: str, message: str
) -> None:
    quoted = query.replace("<", "%3C").replace(">", "%3E")
    for path in ("/answer", "/"):
        status, text = get(server, f"{path}?{quoted}")
        assert status == 400
        lines = re.findall(
            r'<p class="error" role="alert">(.*?)</p>', text, flags=re.DOTALL
        )
        assert len(lines) == 1
        assert message in unescape(lines[0])
        assert "<script>alert" not in text


def test_figures_are_the_reports(server: ExplorerServer) -> None:
    for name in FIGURES:
        status, text = get(server, f"/figure/{name}?draft=streamingllm")
        assert status == 200
        assert (f'<figure id="figure-{name}">' in text) == (name not in OF_ARRIVALS)
    assert get(server, "/figure/memory.svg")[1].startswith("<?xml")
    assert get(server, f"/figure/gamma?{FIXED}") == (
        200,
        "",
    )  # one gamma makes no curve


def test_other_addresses_are_not_there(server: ExplorerServer) -> None:
    for path in (
        "/favicon.ico",
        "/figure/residuals",
        "/figure/../state.py",
        "/static/explore.js",
    ):
        assert get(server, path)[0] == 404


def test_a_page_of_elsewhere_cannot_ask(server: ExplorerServer) -> None:
    """A name that somebody points at 127.0.0.1 is refused, as is a request without one."""
    for host, expected in (
        ("evil.example", 403),
        ("", 403),
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("[::1]", 200),
        ("[", 403),
    ):
        connection = http.client.HTTPConnection(
            "127.0.0.1", server.server_address[1], timeout=60
        )
        connection.request("GET", "/explore.css", headers={"Host": host})
        assert connection.getresponse().status == expected, host
        connection.close()


def test_beyond_loopback_it_answers_to_allowed_names_only(explorer: Explorer) -> None:
    with pytest.raises(ConfigError, match="--allow-host"):
        ExplorerServer(explorer, "0.0.0.0")
    with pytest.raises(ConfigError, match="without a port"):
        ExplorerServer(explorer, "0.0.0.0", allowed_hosts=["planner.example.org:80"])
    with ExplorerServer(
        explorer, "0.0.0.0", allowed_hosts=["Planner.example.org"]
    ) as server:
        for host, expected in (
            ("planner.example.org:80", True),
            ("localhost", True),
            ("evil.example", False),
            ("[", False),
        ):
            assert server.answers(host) is expected


def test_formats_limits_and_the_engine_are_the_plans(server: ExplorerServer) -> None:
    query = (
        "hardware=h100-sxm-80gb&weight_dtype=fp8&kv_dtype=fp8&tpot_ms=30&engine=vllm"
    )
    status, text = get(server, f"/plan.json?{query}")
    assert status == 200
    answer = magicdec.plan(
        model="llama-3.1-8b", hardware="h100-sxm-80gb", context=32768, batch=64, weight_dtype="fp8", kv_dtype="fp8",
        tpot_ms=30, engine="vllm",
    )  # fmt: skip
    assert plan_of(json.loads(text)).best == answer.best
    page = get(server, f"/answer?{query}")[1]
    assert "--weight-dtype fp8 --kv-dtype fp8 --tpot-ms 30" in page
    baseline = f"{answer.autoregressive.tokens_per_s:,.0f}".replace(",", "\u202f")
    assert baseline in page
    assert get(server, "/answer?tpot_ms=soon")[0] == 400


def test_a_port_that_is_taken_is_the_users_error(
    server: ExplorerServer, explorer: Explorer
) -> None:
    with pytest.raises(ConfigError, match="--port 0 takes a free one"):
        ExplorerServer(explorer, port=server.server_address[1])


def test_the_command_serves_on_loopback_until_it_is_stopped(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "magicdec",
        "explore",
        "--port",
        "0",
        "--no-browser",
        "--hardware",
        "l4-24gb",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=tmp_path, **pipes) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = line.split()[0]
            assert url.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(
                url + "?model=qwen3-0.6b&context=4096", timeout=60
            ) as response:
                assert "l4-24gb" in response.read().decode()
            port = int(url.rstrip("/").rsplit(":", 1)[1])
            with socket.socket() as other:
                other.settimeout(5)
                assert (
                    other.connect_ex(("127.0.0.2", port)) != 0
                )  # an address that a wider server would answer
        finally:
            process.send_signal(signal.SIGINT)
            try:
                _, errors = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    assert process.returncode == 0
    assert errors == ""


def test_what_cannot_be_listened_on_is_one_line(program: Program) -> None:
    done = program(
        "explore", "--host", "203.0.113.7", "--allow-host", "a", "--no-browser"
    )
    assert done.refusal.startswith("cannot listen on 203.0.113.7")


FIRST_DOCUMENTS = """
import threading
from concurrent.futures import ThreadPoolExecutor
from magicdec.explore.explorer import Explorer
from magicdec.explore.state import Catalog

explorer = Explorer(Catalog.given())
document = explorer.plan("context=1024&batch=4&gen_len=100&draft=streamingllm&budget=64&gamma=2")
together = threading.Barrier(16)

def write(_):
    together.wait()
    return document.to_json()

with ThreadPoolExecutor(16) as pool:
    print(len(set(pool.map(write, range(16)))))
"""


@pytest.mark.slow
def test_many_ask_for_the_first_document_at_once() -> None:
    """Types that several threads build at once crash the process, about one time in three."""
    for _ in range(4):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_DOCUMENTS],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr
