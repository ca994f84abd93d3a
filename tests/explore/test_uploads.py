"""Files of requests sent by the page: a few of limited size, in a process of their own, under their own names."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from html import unescape
from pathlib import Path

import pytest
from test_http import get
from test_rate import awaited
from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from magicdec.errors import ConfigError
from magicdec.explore import uploads
from magicdec.explore.server import ExplorerServer
from magicdec.explore.uploads import Uploads
from tests.same import assert_same

TRACE = "arrival,prompt,output\n" + "".join(
    f"{place / 2},{200 + place % 50},{40 + place % 9}\n" for place in range(120)
)
ASKED = "model=llama-3.1-8b&hardware=l4-24gb&draft=ngram&gpus=4&p95_tpot_ms=80"


def send(server: ExplorerServer, name: str, content: bytes) -> tuple[int, str]:
    address = f"{server.url}upload?{urllib.parse.urlencode({'name': name})}"
    request = urllib.request.Request(address, data=content, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def line_of(page: str) -> str:
    (line,) = re.findall(r'<p class="error" role="alert">(.*?)</p>', page, re.DOTALL)
    return unescape(line)


def test_a_trace_is_planned_as_on_the_command_line(
    server: ExplorerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, token = send(server, "My requests (1).csv", TRACE.encode())
    assert status == 200
    query = f"{ASKED}&requests={token}"
    status, page, shares = awaited(server, query)
    assert status == 200, page
    assert shares == sorted(shares)
    shown = json.loads(get(server, f"/plan.json?{query}")[1])
    assert shown["request"]["requests"] == "My-requests-1.csv"
    command = re.search(r"<code>(magicdec plan [^<]*)</code>", page)
    assert command is not None
    (tmp_path / "My-requests-1.csv").write_text(TRACE)
    monkeypatch.chdir(tmp_path)
    register_commands()
    words = unescape(command[1]).split()
    done = CliRunner().invoke(app, [*words[1:], "--format", "json"])
    assert done.exit_code == 0, done.output
    assert_same(json.loads(done.stdout), shown)


def test_a_schedule_is_a_rate_of_a_link(server: ExplorerServer) -> None:
    query = "model=llama-3.1-8b&hardware=l4-24gb&context=512&gen_len=32&draft=ngram&rate=1@0,3@15"
    status, page, _ = awaited(server, query)
    assert status == 200, page
    shown = json.loads(get(server, f"/plan.json?{query}")[1])
    assert shown["request"]["rate"] == "1@0,3@15"
    for bad in ("2@0", "2@5,3@1", "2@0,x@9", "@", "2@0," * 200):
        status, page, _ = awaited(server, query.replace("1@0,3@15", bad))
        assert status == 400
        assert "2@0,8@600" in line_of(page)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"\x00\xff" * 5000, "not UTF-8"),
        ("a.csv", b"name,age\nx,3\n", "has the columns name, age"),
        ("a.csv", b"arrival,prompt,output\n0,9e99,1\n1,2,3\n", "a.csv"),
        ("a.csv", b"arrival,prompt,output\n0,-5,1\n1,2,3\n", "prompt must be between"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl"),
        ("a.json", b'{"a":' * 50_000, "a.json"),
        ("a.csv", b'"' + b"x" * 300_000, "a.csv"),
        ("a.jsonl", b'{"arrival": NaN, "prompt": 3, "output": 1}\n' * 3, "a.jsonl"),
        ("a.csv", b"arrival,prompt,output\n0,10,9000000\n1,2,3\n", "reads at most"),
    ],
)
def test_hostile_files_get_one_line(
    server: ExplorerServer, name: str, content: bytes, message: str
) -> None:
    status, token = send(server, name, content)
    assert status == 200
    status, page, _ = awaited(server, f"{ASKED}&requests={token}")
    assert status == 400
    assert message in line_of(page)
    assert "/tmp" not in line_of(page)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../../etc/passwd", "requests are read from"),
        ("x.exe", "not 'x.exe'"),
        ("", "requests are read from"),
        ("x" * 500, "requests are read from"),
    ],
)
def test_other_files_are_refused(
    server: ExplorerServer, name: str, message: str
) -> None:
    status, page = send(server, name, b"arrival,prompt,output\n")
    assert status == 400
    assert message in line_of(page)


def test_names_stay_in_their_folder() -> None:
    kept = Uploads()
    token = kept.add("..\\..\\é ü/.. /we ird<b>.CSV", [b"a,b\n"])
    assert re.fullmatch(r"[0-9a-f]{16}-we-ird-b\.csv", token)
    folder = kept.folder_of(token)
    assert [path.name for path in folder.iterdir()] == ["we-ird-b.csv"]
    assert kept.checked(token) == token


def test_the_oldest_are_forgotten_and_equal_files_are_one() -> None:
    kept = Uploads()
    tokens = [kept.add("a.csv", [b"%d" % place]) for place in range(10)]
    assert kept.add("a.csv", [b"9"]) == tokens[-1]
    with pytest.raises(ConfigError, match=r"a\.csv is not kept any more"):
        kept.checked(tokens[0])
    assert not kept.folder_of(tokens[0]).exists()
    for token in tokens[-uploads.MOST_FILES :]:
        assert kept.checked(token) == token


def test_too_many_bytes_are_refused(
    server: ExplorerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="is larger than 32 MB"):
        Uploads().add("a.csv", iter(lambda: b"x" * 1_000_000, b""))
    with pytest.raises(ConfigError, match="is empty"):
        Uploads().add("a.csv", [b" \n"])
    connection = http.client.HTTPConnection(
        "127.0.0.1", server.server_address[1], timeout=60
    )
    connection.putrequest("POST", "/upload?name=a.csv")
    connection.putheader("Content-Length", str(10**12))
    connection.endheaders()
    response = connection.getresponse()
    assert (response.status, response.getheader("Connection")) == (400, "close")
    assert "is larger than 32 MB" in line_of(response.read().decode())


@pytest.mark.parametrize("length", ["x", "-1", None])
def test_a_body_without_a_length_is_refused(
    server: ExplorerServer, length: str | None
) -> None:
    connection = http.client.HTTPConnection(
        "127.0.0.1", server.server_address[1], timeout=60
    )
    connection.putrequest("POST", "/upload?name=a.csv")
    if length is not None:
        connection.putheader("Content-Length", length)
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 400
    assert "a body needs its length" in line_of(response.read().decode())


@pytest.mark.parametrize("path", ["/upload?name=a.csv", "/check", "/"])
def test_other_origins_send_nothing(server: ExplorerServer, path: str) -> None:
    request = urllib.request.Request(
        server.url.rstrip("/") + path,
        data=b"command=vllm+serve+Qwen/Qwen3-8B",
        method="POST",
        headers={
            "Sec-Fetch-Site": "cross-site",
            "Sec-Fetch-Mode": "navigate",
            "Sec-Fetch-Dest": "document",
            "Origin": "https://elsewhere.example",
        },
    )
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=60)
    assert raised.value.code == 403
