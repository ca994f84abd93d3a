"""An address is only read: within bounds, from its own host, and without its token being shown."""

from __future__ import annotations

import time

import pytest
from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from magicdec.errors import ConfigError, ServerError
from magicdec.live.http import TOKEN_VARIABLE, get, parse_address
from magicdec.live.metrics import read_address, scrapes
from tests.live.servers import Vllm, random_requests


def test_a_redirect_to_another_host_is_not_followed(serve, monkeypatch):
    """Neither the request nor the token reaches the other one, which here is another port."""
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
    other, there = serve({"/metrics": lambda handler: handler.reply(b"vllm:x 1\n")})
    _, here = serve(
        {
            "/metrics": lambda handler: handler.reply(
                b"", 302, Location=f"{there}/metrics"
            )
        }
    )
    with pytest.raises(ServerError, match="redirects to another address"):
        get(here.at("/metrics"))
    assert other.seen == []


def test_a_redirect_within_the_host_is_followed(serve):
    answers = {
        "/metrics": lambda handler: handler.reply(b"", 307, Location="/metrics/"),
        "/metrics/": lambda handler: handler.reply(b"x 1\n"),
        "/loop": lambda handler: handler.reply(b"", 302, Location="/loop"),
    }
    _, address = serve(answers)
    assert get(address.at("/metrics")) == b"x 1\n"
    with pytest.raises(ServerError, match="more than 3 times"):
        get(address.at("/loop"))


def test_a_response_is_bounded_in_size(serve):
    _, address = serve({"/metrics": lambda handler: handler.reply(b"x" * 5000)})
    with pytest.raises(ServerError, match=r"more than 4\.88 KiB"):
        get(address.at("/metrics"), limit_bytes=4999)
    assert len(get(address.at("/metrics"), limit_bytes=5000)) == 5000


def test_an_answer_that_is_cut_short_is_refused(serve):
    """Half a scrape would look like counters that are gone."""

    def half(handler):
        handler.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\nvllm:x 1\n")

    _, address = serve({"/metrics": half})
    with pytest.raises(ServerError, match="received 9 bytes, expected 100"):
        get(address.at("/metrics"))


@pytest.mark.parametrize("part", ["headers", "body"])
def test_a_response_is_bounded_in_time_though_bytes_keep_coming(serve, part):
    """A byte now and then renews a socket's own time-out; the whole answer's does not."""

    def drip(handler):
        text = (
            b"HTTP/1.1 200 OK\r\nX: "
            if part == "headers"
            else b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n"
        )
        handler.wfile.write(text)
        for _ in range(1200):
            handler.wfile.write(b"x")
            handler.wfile.flush()
            time.sleep(0.05)

    _, address = serve({"/metrics": drip})
    started = time.monotonic()
    with pytest.raises(ServerError, match=r"did not answer within 0\.5 s"):
        get(address.at("/metrics"), timeout_s=0.5)
    assert (
        time.monotonic() - started < 30
    )  # of the minute that the whole answer would take


def test_a_token_comes_from_the_environment_and_is_not_shown(serve, monkeypatch):
    server, address = serve({"/metrics": lambda handler: handler.reply(b"", 401)})
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
    with pytest.raises(ServerError, match=TOKEN_VARIABLE) as caught:
        get(address.at("/metrics"))
    assert "s3cret" not in str(caught.value)
    monkeypatch.delenv(TOKEN_VARIABLE)
    with pytest.raises(ServerError):
        get(address.at("/metrics"))
    assert [each for _, each in server.seen] == ["Bearer s3cret", None]


def test_a_token_is_in_nothing_that_is_printed_or_written(
    serve, monkeypatch, tmp_path, capfd
):
    """The profile, the record and the output of `observe`, of a server that shows what it was sent."""
    engine, tokens = Vllm(), []

    def answer(handler):
        tokens.append(handler.headers["Authorization"])
        engine.serve(random_requests(len(tokens)))
        handler.reply(engine.scrape().encode())

    server, address = serve({"/metrics": answer})
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
    profile, records = tmp_path / "acceptance.json", tmp_path / "records.jsonl"
    register_commands()
    words = [
        "observe",
        str(address),
        "--model",
        "embedded",
        "--seconds",
        "0.4",
        "--interval",
        "0.2",
    ]
    done = CliRunner().invoke(
        app, [*words, "-o", str(profile), "--records", str(records)]
    )
    assert done.exit_code == 0, done.output
    printed = done.output + "".join(capfd.readouterr())
    assert set(tokens) == {"Bearer s3cret"}
    for text in (printed, profile.read_text(), records.read_text()):
        assert text
        assert "s3cret" not in text
    assert {path for path, _ in server.seen} == {"/metrics"}


@pytest.mark.parametrize(
    "text", ["http://user:word@host", "http://host/?token=a", "http://host/#a"]
)
def test_secrets_in_an_address_are_refused_without_being_repeated(text):
    with pytest.raises(ConfigError, match=TOKEN_VARIABLE) as caught:
        parse_address(text)
    assert "word" not in str(caught.value).replace("password", "")
    assert "token=a" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "ftp://host",
        "http://",
        "http://host:port",
        "file:///etc/passwd",
        "http://host:99999",
    ],
)
def test_only_http_addresses_are_read(text):
    with pytest.raises(ConfigError, match="address"):
        parse_address(text)


def test_metrics_are_looked_for_where_each_engine_has_them(serve):
    """TensorRT-LLM answers /metrics with JSON, and has Prometheus's format elsewhere."""
    server, address = serve(
        {
            "/metrics": lambda handler: handler.reply(b'[{"iter": 1}]'),
            "/prometheus/metrics": lambda handler: handler.reply(
                b"trtllm_num_requests_running 2.0\n"
            ),
        }
    )
    assert read_address(address).total("trtllm_num_requests_running", {}) == 2.0
    assert [path for path, _ in server.seen] == ["/metrics", "/prometheus/metrics"]


def test_an_unreachable_server_is_one_line():
    with pytest.raises(ServerError, match=r"cannot read http://127\.0\.0\.1:9/metrics"):
        get(parse_address("127.0.0.1:9/metrics"))


def test_a_scrape_that_takes_as_long_as_the_window_is_followed_by_another(serve):
    """Counters need two; on a busy machine the first may take all the time."""
    _, address = serve({"/metrics": lambda handler: handler.reply(b"x 1\n")})
    clock = iter(range(0, 1000, 10))
    taken = scrapes(
        address,
        seconds=5.0,
        interval_s=1.0,
        sleep=lambda _: None,
        clock=lambda: float(next(clock)),
    )
    assert len(list(taken)) == 2
