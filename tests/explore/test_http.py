"""The page over HTTP: its answers are the planner's, its errors one line, and it answers loopback only."""

from __future__ import annotations

import http.client
import json
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from magicdec.errors import ConfigError
from magicdec.explore import server as serving
from magicdec.explore.server import ExplorerServer
from magicdec.perfmodel.acceptance import constant_profile, save_profile
from magicdec.reports import report
from magicdec.reports.sentences import acceptance_line, first_line
from magicdec.schema.plan import plan_of
from tests.processes import Program

FIXED = "draft_method=streamingllm&draft_budget=512&gamma=3&batch=48&context=65536"


@pytest.fixture(name="without_figures")
def pages_without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take most of the time; one test looks at them."""
    monkeypatch.setattr(report, "draw_all", lambda _: [])


def get(server: ExplorerServer, path: str, **headers: str) -> tuple[int, str]:
    asked = urllib.request.Request(server.url + path.removeprefix("/"), headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=120) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def command_of(page: str) -> list[str]:
    match = re.search(r"<code>(magicdec plan[^<]*)</code>", page)
    assert match is not None
    return shlex.split(unescape(match[1]))


def test_a_page_hides_a_key(server: ExplorerServer) -> None:
    """Of what was asked, in its error."""
    key = "hf" + "_" + secrets.token_hex(17)
    status, text = get(server, f"/plan.json?model={key}&hardware=h100")
    assert status == 400
    assert "unknown model '…'" in text
    assert key not in text


def test_a_connection_that_is_to_close_is_closed(server: ExplorerServer) -> None:
    """And the answer says so; another stays open."""
    for asked, is_closed in (("close", True), ("keep-alive", False)):
        link = http.client.HTTPConnection(*server.server_address[:2], timeout=60)
        link.request("GET", "/nowhere", headers={"Connection": asked})
        answer = link.getresponse()
        answer.read()
        assert (answer.headers.get("Connection") == "close") == is_closed
        assert answer.will_close == is_closed
        link.close()


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize(
    "query",
    [
        FIXED,
        "model=llama-3.1-8b&hardware=l4-24gb&context=6k&gen_len=300&draft=ngram&batch=4&price=0.8&tpot_ms=60",
        "hardware=h100&context=4096,16k&batch=16&acceptance_rate=0.8&draft=eagle3",
    ],
)
def test_page_document_and_command_line_agree(
    server: ExplorerServer, query: str
) -> None:
    status, page = get(server, f"/?{query}")
    assert status == 200, page
    shown = json.loads(get(server, f"/plan.json?{query}")[1])
    register_commands()
    done = CliRunner().invoke(app, [*command_of(page)[1:], "--format", "json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == shown
    plan = plan_of(shown)
    text = unescape(re.sub(r"<[^>]+>", " ", page))
    assert first_line(plan).rstrip(".") in text
    assert acceptance_line(plan.choice)[1:] in text


@pytest.mark.usefixtures("without_figures")
def test_the_form_holds_the_question(server: ExplorerServer) -> None:
    page = get(server, f"/?{FIXED}&plugin=yes&engine=")[1]
    assert re.search(r'<input id="field-batch"[^>]*value="48"', page)
    assert "<option selected>yes</option>" in page
    assert f'href="/plan.json?{FIXED}&plugin=yes"' in unescape(page)


def test_figures_are_the_reports(server: ExplorerServer) -> None:
    page = get(server, "/?context=4k&hardware=h100&batch=1,8")[1]
    assert {"heatmap", "pareto"} <= set(re.findall(r'<figure id="figure-(\w+)"', page))


@pytest.mark.usefixtures("without_figures", "few_requests")
def test_a_rate_is_simulated_unless_another_page_links_to_it(
    server: ExplorerServer,
) -> None:
    query = "/?hardware=h100&rate=1&context=1k&gen_len=50&draft=eagle3&tp=1"
    headers = {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "document",
    }
    status, page = get(server, query, **headers)
    assert status == 200
    assert "requests simulated" not in page
    assert 'value="50"' in page
    assert "How many" in get(server, query)[1]


def test_a_simulation_whose_asker_has_gone_ends(
    server: ExplorerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def simulate(_: object, progress: object) -> None:
        assert callable(progress)
        try:
            while True:
                progress("still at it")
        finally:
            ended.set()

    monkeypatch.setattr(serving, "make_plan", simulate)
    with socket.create_connection(("127.0.0.1", server.server_address[1])) as asker:
        asker.sendall(b"GET /?context=5k HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert ended.wait(60)


def test_more_questions_than_may_wait_are_refused(
    server: ExplorerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "waiting", threading.BoundedSemaphore(2))
    with server.answering, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(get, server, "/plan.json?context=4k") for _ in range(2)]
        while server.waiting._value:
            pass
        assert get(server, "/?context=4k")[0] == 503
        server.answering.release()
        assert [each.result()[0] for each in waiting] == [200, 200]
        server.answering.acquire()


def test_a_bug_is_answered_and_its_traceback_shown(
    server: ExplorerServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def planted(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(serving, "make_plan", planted)
    assert get(server, "/?context=6k")[0] == 500
    assert "ZeroDivisionError: planted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (
            "model=llama-3.1-8x",
            "unknown model 'llama-3.1-8x': did you mean llama-3.1-8b?",
        ),
        ("batch=0", "batch must be between 1 and 65536, not 0"),
        ("context=900000", "reads at most 131072 tokens"),
        ("gamma=<script>alert(1)</script>", "gamma must be a number"),
        ("rate=4&context=1024&gen_len=0", "a rate needs lengths"),
    ],
)
def test_bad_input_is_one_line_and_status_400(
    server: ExplorerServer, query: str, message: str
) -> None:
    quoted = query.replace("<", "%3C").replace(">", "%3E")
    status, text = get(server, f"/?{quoted}")
    assert status == 400
    (line,) = re.findall(r'<p class="error" role="alert">(.*?)</p>', text, re.DOTALL)
    assert message in unescape(line)
    assert "<script>alert" not in text
    status, text = get(server, f"/plan.json?{quoted}")
    assert (status, text.count("\n")) == (400, 1)
    assert message in text


@pytest.mark.usefixtures("without_figures")
def test_what_the_page_is_started_with_is_asked_of_its_own_model(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.json"
    profile = constant_profile(0.9, model="llama-3.1-8b", draft_method="snapkv")
    save_profile(profile, path)
    start = {"model": "llama-3.1-8b", "hardware": "l4-24gb", "engine": "magicdec-2024"}
    with ExplorerServer(start, [str(path)]) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        own = command_of(get(running, "/?context=4k&batch=1")[1])
        other = command_of(get(running, "/?model=qwen3-8b&context=4k&engine=")[1])
        running.shutdown()
        thread.join()
    assert own[own.index("--acceptance") + 1] == str(path)
    assert own[own.index("--engine") + 1] == "magicdec-2024"
    assert "--acceptance" not in other
    assert "--engine" not in other
    with pytest.raises(ConfigError, match="did you mean"):
        ExplorerServer({"model": "llama-3.1-8x"})


def test_other_addresses_and_methods_are_not_there(server: ExplorerServer) -> None:
    for path in ("/favicon.ico", "/figure/heatmap", "/../server.py", "/answer"):
        assert get(server, path)[0] == 404
    connection = http.client.HTTPConnection(
        "127.0.0.1", server.server_address[1], timeout=60
    )
    connection.request("POST", "/", "command=x")
    assert connection.getresponse().status == 501
    connection.close()


def test_a_page_of_elsewhere_cannot_ask(server: ExplorerServer) -> None:
    """A name that somebody points at 127.0.0.1 is refused, as are a request without one and one that
    another page sends."""
    for headers, expected in (
        ({"Host": "evil.example"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "localhost:1"}, 400),
        ({"Host": "[::1]"}, 400),
        ({"Host": "["}, 403),
        ({"Host": "localhost", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Host": "localhost", "Origin": "http://evil.example"}, 403),
    ):
        connection = http.client.HTTPConnection(
            "127.0.0.1", server.server_address[1], timeout=60
        )
        connection.request("GET", "/plan.json?model=none-such", headers=headers)
        assert connection.getresponse().status == expected, headers
        connection.close()
    for host, expected in (("evil.example", 403), ("localhost", 400)):
        connection = http.client.HTTPConnection(
            "127.0.0.1", server.server_address[1], timeout=60
        )
        connection.request("GET", f"http://{host}/plan.json?model=none-such")
        assert connection.getresponse().status == expected, host
        connection.close()


def test_beyond_loopback_it_answers_to_allowed_names_only() -> None:
    with pytest.raises(ConfigError, match="--allow-host"):
        ExplorerServer({}, host="0.0.0.0")
    with pytest.raises(ConfigError, match="without a port"):
        ExplorerServer({}, host="0.0.0.0", allowed_hosts=["planner.example.org:80"])
    allowed = ["Planner.example.org"]
    with ExplorerServer({}, host="0.0.0.0", allowed_hosts=allowed) as server:
        for host, expected in (
            ("planner.example.org:80", True),
            ("localhost", True),
            ("evil.example", False),
            ("[", False),
        ):
            assert server.answers(host) is expected


def test_a_port_that_is_taken_is_the_users_error(server: ExplorerServer) -> None:
    with pytest.raises(ConfigError, match="--port 0 takes a free one"):
        ExplorerServer({}, port=server.server_address[1])


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
                url + "?model=qwen3-0.6b&context=4096&draft=ngram", timeout=60
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
