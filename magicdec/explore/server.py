"""The page over HTTP, with the standard library's server.

    /                 the page                    /answer            its answer alone
    /figure/NAME      a figure as HTML            /figure/NAME.svg   the same as a picture
    /plan.json        the plan document           /explore.js, /explore.css

Every address takes the state as its query string. An error of the user's is status 400 and its one line.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Callable, Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from magicdec.errors import ConfigError, MagicdecError
from magicdec.explore.page import FIGURES, Explorer, script, style

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HTML, JSON, SVG, PLAIN = "text/html", "application/json", "image/svg+xml", "text/plain"
Reply = tuple[HTTPStatus, str, str]


class Server(ThreadingHTTPServer):
    """Serves one explorer. It answers only requests that name it loopback or a host that was allowed, which keeps out
    web pages that point a name of theirs at this machine."""

    daemon_threads = True

    def __init__(
        self, explorer: Explorer, host: str = "127.0.0.1", port: int = 0, *, allowed_hosts: Iterable[str] = ()
    ) -> None:
        """`allowed_hosts` are the names that a request may give this machine, besides loopback's.

        Raises ConfigError when the address cannot be taken, or reaches beyond loopback with no name allowed.
        """
        self.explorer = explorer
        self.allowed_hosts = frozenset(each.strip().lower() for each in allowed_hosts)
        for name in self.allowed_hosts:
            if not name or _host_name(name if ":" not in name else f"[{name}]") != name:
                raise ConfigError(f"--allow-host takes a name or an address without a port, not '{name}'")
        if not self.allowed_hosts and not _is_loopback(host):
            raise ConfigError(
                f"--host {host} lets other machines in: name the host that they are to ask for, as in "
                "--allow-host planner.example.org"
            )
        if ":" in host:
            import socket

            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot listen on {host}, port {port}: {reason}; --port 0 takes a free one") from error
        self.host = host

    def answers(self, host: str) -> bool:
        """Whether it is meant by a Host header."""
        name = _host_name(host)
        return _is_loopback(name) or name in self.allowed_hosts

    @property
    def url(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{name}:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "magicdec"
    sys_version = ""
    timeout = 60

    def do_GET(self) -> None:
        if not self.server.answers(self.headers.get("Host", "")):
            self._send(HTTPStatus.FORBIDDEN, PLAIN, "this page answers on loopback only, or to --allow-host\n")
            return
        try:
            url = urlsplit(self.path)
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, PLAIN, "not an address\n")
            return
        try:
            self._send(*self._reply(url.path, url.query))
        except MagicdecError as error:
            self._send(HTTPStatus.BAD_REQUEST, HTML, self.server.explorer.error(error))

    def _reply(self, path: str, query: str) -> Reply:
        explorer = self.server.explorer
        fixed: dict[str, Callable[[], Reply]] = {
            "/": lambda: _page(*explorer.page(query)),
            "/answer": lambda: (HTTPStatus.OK, HTML, explorer.answer(query)),
            "/plan.json": lambda: (HTTPStatus.OK, JSON, explorer.plan(query).to_json()),
            "/explore.js": lambda: (HTTPStatus.OK, "text/javascript", script()),
            "/explore.css": lambda: (HTTPStatus.OK, "text/css", style()),
        }
        if path in fixed:
            return fixed[path]()
        name = path.removeprefix("/figure/")
        if path.startswith("/figure/") and name.removesuffix(".svg") in FIGURES:
            is_picture = name.endswith(".svg")
            name = name.removesuffix(".svg")
            content = explorer.picture(name, query) if is_picture else explorer.figure(name, query)
            return HTTPStatus.OK, SVG if is_picture else HTML, content or ""
        return HTTPStatus.NOT_FOUND, PLAIN, "not here\n"

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
        with contextlib.suppress(ConnectionError):  # the page asked something newer and did not wait
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def _page(content: str, answered: bool) -> Reply:
    return HTTPStatus.OK if answered else HTTPStatus.BAD_REQUEST, HTML, content


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
