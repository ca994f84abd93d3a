"""A server on this machine whose answers are functions."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from magicdec.live.http import Address, parse_address


class Handler(BaseHTTPRequestHandler):
    """Calls the function of the path; the server keeps what it was asked, and the bodies."""

    def do_GET(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.bodies.append(self.body)
        self.server.seen.append((self.path, self.headers.get("Authorization")))
        with suppress(OSError):
            self.server.answers[self.path](self)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def serve() -> Iterator[
    Callable[
        [dict[str, Callable[[Handler], None]]], tuple[ThreadingHTTPServer, Address]
    ]
]:
    running = []

    def start(
        answers: dict[str, Callable[[Handler], None]],
    ) -> tuple[ThreadingHTTPServer, Address]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.answers, server.seen, server.bodies, server.daemon_threads = (
            answers,
            [],
            [],
            True,
        )
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        running.append(server)
        return server, parse_address(f"127.0.0.1:{server.server_address[1]}")

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


class Steps:
    """The driver's clock, and an engine's steps by it: the next one begins once all requests' events of the last one
    were read, and each takes `STEP_S`. Slow machines take longer over it, and see the same."""

    STEP_S = 0.1

    def __init__(self, num_requests: int) -> None:
        self.num_requests, self.num_reads = num_requests, 0
        self.changed = threading.Condition()

    def __call__(self) -> float:
        """The time; read once as each request is sent, and once at each of its events."""
        with self.changed:
            now = self.STEP_S * (self.num_reads // self.num_requests)
            self.num_reads += 1
            self.changed.notify_all()
        return now

    def wait(self, number: int) -> None:
        """Until step `number`, from 0, begins."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.num_reads >= (number + 1) * self.num_requests, timeout=600
            )


@pytest.fixture
def engine(serve):
    """A server of one model that streams a token in each of its `steps`, to three requests at once; `status` answers
    them with an error instead, `short` ends them early."""

    def complete(handler: Handler) -> None:
        if server.status != 200:
            handler.send_error(server.status)
            return
        asked = json.loads(handler.body)
        handler.send_response(200)
        handler.end_headers()
        number = server.short or asked["max_tokens"]
        for step in range(number):
            server.steps.wait(step)
            handler.wfile.write(
                b'data: {"object": "text_completion", "choices": [{"text": "a"}]}\n\n'
            )
            handler.wfile.flush()
        usage = b'"usage": {"prompt_tokens": %d, "completion_tokens": %d}' % (
            len(asked["prompt"]),
            number,
        )
        handler.wfile.write(
            b'data: {"object": "text_completion", "choices": [], %s}\n\ndata: [DONE]\n\n'
            % usage
        )

    models = b'{"data": [{"id": "m", "max_model_len": 4096}]}'
    none = lambda handler: handler.send_error(404)  # noqa: E731
    server, address = serve(
        {"/v1/completions": complete, "/v1/models": lambda handler: handler.reply(models), "/metrics": none,
         "/prometheus/metrics": none}
    )  # fmt: skip
    server.status, server.short, server.steps = 200, 0, Steps(3)
    return server, address
