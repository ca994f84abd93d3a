"""The standard library's server of the page.

    /                 the page                    /answer            its answer alone
    /figure/NAME      a figure as HTML            /figure/NAME.svg   the same as a picture
    /plan.json        the plan document           /gpus              best drafts on several GPUs
    /drafts           drafts to choose from       /changed?was=      what changed since, in words
    /explore.js, /explore.css

Every address takes the state as its query string. An error of the user's is status 400 and its one
line. A plan for a rate of requests takes seconds: until it is made, /answer says how far it is,
with status 202, and the others wait; /gpus does the same. DELETE of /answer withdraws its asker,
which a page names in the header X-Asker; what still waits for that asker gets status 409. POST of
/check reads a server's command (/ does too, and sends the whole page), POST of /upload?name= keeps
a file of requests. Pages of other origins start nothing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import select
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from magicdec.errors import ConfigError, MagicdecError
from magicdec.explore.computation import BusyError, FailedError, WithdrawnError
from magicdec.explore.explorer import (
    FIGURES,
    HTML,
    TEMPLATES,
    Client,
    Explorer,
    Reply,
)
from magicdec.explore.uploads import MOST_UPLOAD_BYTES, too_large
from magicdec.reports import TEMPLATES as REPORT_TEMPLATES
from magicdec.specs import MOST_TEXT

STATUS_OF_ERRORS: dict[type[MagicdecError], HTTPStatus] = {
    WithdrawnError: HTTPStatus.CONFLICT,
    BusyError: HTTPStatus.SERVICE_UNAVAILABLE,
    FailedError: HTTPStatus.INTERNAL_SERVER_ERROR,
}
"""Others are the user's: 400."""
CHUNK_BYTES = 65_536


def script() -> str:
    return _text("report.js", "explore.js")


def style() -> str:
    return _text("report.css", "explore.css")


def _text(report: str, own: str) -> str:
    return (REPORT_TEMPLATES / report).read_text(encoding="utf-8") + (
        TEMPLATES / own
    ).read_text(encoding="utf-8")


POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' "
    "data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
JSON, SVG, PLAIN = "application/json", "image/svg+xml", "text/plain"
LONGEST_PAGE_NAME = 100
"""Characters of a page's own name that are read."""


class ExplorerServer(ThreadingHTTPServer):
    """Serves one explorer. It answers only requests that name it loopback or a host that was
    allowed, which keeps out web pages that point a name of theirs at this machine."""

    daemon_threads = True

    def __init__(
        self,
        explorer: Explorer,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        allowed_hosts: Iterable[str] = (),
    ) -> None:
        """`allowed_hosts` are the names that a request may give this machine, besides loopback's.

        Raises ConfigError when the address cannot be taken, or reaches beyond loopback with no name
        allowed.
        """
        self.explorer = explorer
        self.allowed_hosts = frozenset(each.strip().lower() for each in allowed_hosts)
        for name in self.allowed_hosts:
            if not name or _host_name(name if ":" not in name else f"[{name}]") != name:
                raise ConfigError(
                    f"--allow-host takes a name or an address without a port, not '{name}'"
                )
        if not self.allowed_hosts and not _is_loopback(host):
            raise ConfigError(
                f"--host {host} lets other machines in: name the host that they are to ask for, as "
                "in "
                "--allow-host planner.example.org"
            )
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"cannot listen on {host}, port {port}: {reason}; --port 0 takes a free one"
            ) from error
        self.host = host

    def answers(self, host: str) -> bool:
        """Whether it is meant by a Host header."""
        name = _host_name(host)
        return _is_loopback(name) or name in self.allowed_hosts

    @property
    def url(self) -> str:
        if ":" in self.host:
            name = f"[{self.host}]"
        else:
            name = self.host
        return f"http://{name}:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    server: ExplorerServer
    protocol_version = "HTTP/1.1"
    server_version = "magicdec"
    sys_version = ""
    timeout = 60

    def do_GET(self) -> None:
        self._answer(self._reply)

    def do_DELETE(self) -> None:
        self._answer(self._withdrawn)

    def do_POST(self) -> None:
        self._answer(self._posted)

    def _answer(self, reply: Callable[[str, str], Reply]) -> None:
        if not self.server.answers(self.headers.get("Host", "")):
            line = "this page answers on loopback only, or to --allow-host\n"
            self._send(HTTPStatus.FORBIDDEN, PLAIN, line)
            return
        try:
            url = urlsplit(self.path)
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, PLAIN, "not an address\n")
            return
        if not (self._is_own or (url.path == "/" and self._is_link)):
            line = "a page of another origin cannot ask\n"
            self._send(HTTPStatus.FORBIDDEN, PLAIN, line)
            return
        try:
            self._send(*reply(url.path, url.query))
        except MagicdecError as error:
            status = STATUS_OF_ERRORS.get(type(error), HTTPStatus.BAD_REQUEST)
            self._send(status, HTML, self.server.explorer.error(error))
        except ConnectionAbortedError:
            self.close_connection = True  # nobody reads an answer
        except Exception:
            # a bug: its traceback is shown here, and the client gets an answer
            traceback.print_exc(file=sys.stderr)
            failure = FailedError(
                "this question failed; its traceback is in the server's output"
            )
            failed = self.server.explorer.error(failure)
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, HTML, failed)

    @property
    def _is_own(self) -> bool:
        """Whether the request is of this server's own page, of an address typed in, or of no
        browser.
        """
        if self.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            return False
        origin = self.headers.get("Origin")
        if origin is None:
            return True
        try:
            return urlsplit(origin).netloc == self.headers.get("Host")
        except ValueError:
            return False

    @property
    def _is_link(self) -> bool:
        """Whether somebody followed a link of another page to this one."""
        mode = self.headers.get("Sec-Fetch-Mode")
        destination = self.headers.get("Sec-Fetch-Dest")
        return (self.command, mode, destination) == ("GET", "navigate", "document")

    @property
    def _client(self) -> Client:
        page = self.headers.get("X-Asker", "")[:LONGEST_PAGE_NAME]
        return Client(page=page, is_gone=self._is_gone, may_start=self._is_own)

    def _is_gone(self) -> bool:
        """Whether the client has closed its connection."""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0.0)
            return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):
            return True

    def _reply(self, path: str, query: str) -> Reply:
        explorer = self.server.explorer
        client = self._client
        if path == "/":
            return explorer.page(query, client)
        if path == "/answer":
            return explorer.answer(query, client)
        if path == "/plan.json":
            return HTTPStatus.OK, JSON, explorer.plan(query, client).to_json()
        if path == "/gpus":
            return explorer.each_gpu(query, client)
        if path == "/drafts":
            return HTTPStatus.OK, JSON, json.dumps(explorer.drafts(query))
        if path == "/changed":
            return HTTPStatus.OK, PLAIN, self._changed(query)
        if path == "/explore.js":
            return HTTPStatus.OK, "text/javascript", script()
        if path == "/explore.css":
            return HTTPStatus.OK, "text/css", style()
        name = path.removeprefix("/figure/").removesuffix(".svg")
        if not path.startswith("/figure/") or name not in FIGURES:
            return HTTPStatus.NOT_FOUND, PLAIN, "not here\n"
        if path.endswith(".svg"):
            picture = explorer.figure(name, query, client, is_picture=True)
            return HTTPStatus.OK, SVG, picture
        return HTTPStatus.OK, HTML, explorer.figure(name, query, client)

    def _changed(self, query: str) -> str:
        """Changes from the link in `was` to the rest of the query."""
        now = []
        was = ""
        for name, value in parse_qsl(query, keep_blank_values=True):
            if name == "was":
                was = value
            else:
                now.append((name, value))
        return self.server.explorer.changed(was, urlencode(now))

    def _posted(self, path: str, query: str) -> Reply:
        explorer = self.server.explorer
        self.close_connection = True  # until its body is read
        if path == "/upload":
            name = dict(parse_qsl(query)).get("name", "")
            content = self._body(MOST_UPLOAD_BYTES, too_large(name[:40]))
            token = explorer.catalog.uploads.add(name, content)
            return HTTPStatus.OK, PLAIN, token
        if path not in ("/", "/check"):
            return HTTPStatus.NOT_FOUND, PLAIN, "not here\n"
        refusal = f"a command of more than {MOST_TEXT} characters is too long"
        body = b"".join(self._body(4 * MOST_TEXT, refusal))
        fields = dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))
        command = fields.get("command", "")
        state = fields.get("state", query)
        if path == "/check":
            return explorer.check(state, command, self._client)
        return explorer.page(state, self._client, command)

    def _body(self, most: int, refusal: str) -> Iterator[bytes]:
        """The body that the client sends, in pieces. Raises ConfigError for more than `most` bytes."""
        try:
            left = int(self.headers.get("Content-Length", ""))
        except ValueError:
            left = -1
        if left > most:
            raise ConfigError(refusal)
        if left < 0:
            raise ConfigError("a body needs its length")
        while left > 0:  # the connection is closed unless all is read
            chunk = self.rfile.read(min(left, CHUNK_BYTES))
            if not chunk:
                raise ConnectionAbortedError
            left -= len(chunk)
            yield chunk
        self.close_connection = False

    def _withdrawn(self, _: str, query: str) -> Reply:
        self.server.explorer.withdraw(query, self._client.page)
        return HTTPStatus.OK, PLAIN, ""

    def _send(self, status: HTTPStatus, kind: str, content: str) -> None:
        body = content.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        # the page asked something newer and did not wait
        with contextlib.suppress(ConnectionError):
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def _host_name(host: str) -> str:
    """The name in a Host header, whatever the port; "" where there is none to be read."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
