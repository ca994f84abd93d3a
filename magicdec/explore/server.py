"""The what-if page on the standard library's server.

    /            the form, and the answer to what is filled in as `magicdec report` shows it
    /plan.json   the plan document

Both take a plan's options as their query string. An error of the user's is status 400 and its one line.
One question is answered at a time; one whose asker has gone ends. Pages of other origins ask nothing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import select
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from magicdec.errors import ConfigError, MagicdecError
from magicdec.explore.form import (
    FIELDS,
    FIRST,
    Start,
    suggestions,
    texts_of,
    values_of,
)
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.planner import Plan, make_plan, request_of
from magicdec.reports.data import ReportData
from magicdec.reports.report import html_context, html_style, template_environment
from magicdec.schema.request import plan_command
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine

TEMPLATES = Path(__file__).parent / "templates"
HTML, JSON, PLAIN = "text/html", "application/json", "text/plain"
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
MOST_WAITING = 8
"""Questions that may wait while one is answered."""


class ExplorerServer(ThreadingHTTPServer):
    """Serves the page. It answers only requests that name it loopback or a host that was allowed,
    which keeps out web pages that point a name of theirs at this machine."""

    daemon_threads = True

    def __init__(
        self,
        start: Start,
        acceptance: Iterable[str] = (),
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        allowed_hosts: Iterable[str] = (),
    ) -> None:
        """`start` and `acceptance`: what the page is started with; profiles go with its model.
        `allowed_hosts`: names that a request may give this machine, besides loopback's.

        Raises ConfigError when a name is unknown, or the address cannot be taken or reaches beyond
        loopback with no name allowed.
        """
        self.start = start
        self.acceptance = tuple(acceptance)
        readers = {
            "model": load_model_spec,
            "hardware": load_hardware,
            "engine": load_engine,
        }
        for name, text in start.items():
            readers[name](text)  # a misspelt name is said now
        request_of(acceptance=self.acceptance)
        self.allowed_hosts = frozenset(name.strip().lower() for name in allowed_hosts)
        for name in self.allowed_hosts:
            if not name or _host_name(name if ":" not in name else f"[{name}]") != name:
                raise ConfigError(
                    f"--allow-host takes a name or an address without a port, not '{name}'"
                )
        if not self.allowed_hosts and not _is_loopback(host):
            raise ConfigError(
                f"--host {host} lets other machines in: name the host that they are to ask for, as "
                "in --allow-host planner.example.org"
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
        self.environment = template_environment(TEMPLATES)
        self.answering = threading.Lock()  # the planner's tables and matplotlib
        self.waiting = threading.BoundedSemaphore(1 + MOST_WAITING)
        self.last: tuple[Mapping[str, Any], Plan] | None = None

    def answers(self, host: str) -> bool:
        """Whether it is meant by a Host header."""
        name = _host_name(host)
        return _is_loopback(name) or name in self.allowed_hosts

    @property
    def url(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{name}:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    server: ExplorerServer
    protocol_version = "HTTP/1.1"
    server_version = "magicdec"
    sys_version = ""
    timeout = 60

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, PLAIN, "not an address\n")
            return
        host = self.headers.get("Host", "")
        # a request line may name a host too, as those to a proxy do
        if not all(map(self.server.answers, (host, url.netloc or host))):
            line = "this page answers on loopback only, or to --allow-host\n"
            self._send(HTTPStatus.FORBIDDEN, PLAIN, line)
            return
        if url.path not in ("/", "/plan.json"):
            self._send(HTTPStatus.NOT_FOUND, PLAIN, "not here\n")
            return
        if not self._is_own and not (url.path == "/" and self._is_link):
            line = "a page of another origin cannot ask\n"
            self._send(HTTPStatus.FORBIDDEN, PLAIN, line)
            return
        waiting = self.server.waiting
        if not waiting.acquire(blocking=False):
            line = "too many questions wait already; ask again later\n"
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, PLAIN, line)
            return
        try:
            if url.path == "/":
                self._send_page(url.query)
            else:
                texts = texts_of(url.query, self.server.start)
                values = values_of(texts, self.server.start)
                with self.server.answering:
                    document = self._plan(values).to_json()
                self._send(HTTPStatus.OK, JSON, document)
        except MagicdecError as error:
            self._send(HTTPStatus.BAD_REQUEST, PLAIN, _one_line(error) + "\n")
        except ConnectionAbortedError:
            self.close_connection = True  # nobody reads an answer
        except Exception:
            # a bug: its traceback is shown here, and the client gets an answer
            traceback.print_exc(file=sys.stderr)
            line = "this question failed; its traceback is in the server's output\n"
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, PLAIN, line)
        finally:
            waiting.release()

    def _send_page(self, query: str) -> None:
        """The form with the answer, or the one line of an error. A form is sent with its empty fields,
        which a link leaves out."""
        start = self.server.start
        given = parse_qsl(query, keep_blank_values=True)
        filled = [(name, text) for name, text in given if text or name in start]
        if filled != given:
            self._send(HTTPStatus.SEE_OTHER, HTML, "", to=f"/?{urlencode(filled)}")
            return
        parts: dict[str, Any] = {"texts": {**start, **dict(given)}}
        status = HTTPStatus.OK
        try:
            parts["texts"] = texts = texts_of(query, start)
            values = values_of(texts, start)
            has_arrivals = "rate" in values
            if (
                self._is_own or not has_arrivals
            ):  # a link elsewhere starts no simulation
                with self.server.answering:
                    data = ReportData.from_records([], self._plan(values))
                    parts |= html_context(data)
                parts["command"] = plan_command(self._asked(values))
        except MagicdecError as error:
            status = HTTPStatus.BAD_REQUEST
            parts["error"] = _one_line(error)
        page = self.server.environment.get_template("explore.html").render(
            fields=FIELDS,
            first=FIRST,
            folded=[name for name in FIELDS if name not in FIRST],
            switches=[name for name, option in FIELDS.items() if option.kind is bool],
            suggestions=suggestions(),
            query=query,
            **html_style(),
            **parts,
        )
        self._send(status, HTML, page)

    def _asked(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The options with the profiles that the page was started with, where they are of its model."""
        asked = dict(values)
        if asked.get("model") == self.server.start.get("model"):
            asked["acceptance"] = self.server.acceptance
        return asked

    def _plan(self, values: Mapping[str, Any]) -> Plan:
        """The planner's answer; the last one is remembered, which a page and its document share."""
        asked = self._asked(values)
        if self.server.last is None or self.server.last[0] != asked:
            self.server.last = (asked, make_plan(request_of(**asked), self._go_on))
        return self.server.last[1]

    def _go_on(self, message: str) -> None:
        """Ends a simulation whose asker has closed the connection."""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0.0)
            is_gone = bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            is_gone = True
        if is_gone:
            raise ConnectionAbortedError

    @property
    def _is_own(self) -> bool:
        """Whether the request is of this server's own page, of an address typed in, or of no browser."""
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
        return (mode, destination) == ("navigate", "document")

    def _send(self, status: HTTPStatus, kind: str, content: str, to: str = "") -> None:
        body = content.encode()
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        if to:
            headers["Location"] = to
        if self.close_connection:
            headers["Connection"] = "close"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        with contextlib.suppress(ConnectionError):  # the asker did not wait
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def _one_line(error: MagicdecError) -> str:
    return " ".join(str(error).split())


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
