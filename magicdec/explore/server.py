"""The page of a request, the planner's answer with the reports' figures of it, and the standard
library's server of it.

    /                 the page                    /answer            its answer alone
    /figure/NAME      a figure as HTML            /figure/NAME.svg   the same as a picture
    /plan.json        the plan document           /explore.js, /explore.css

Every address takes the state as its query string. An error of the user's is status 400 and its one
line. A plan for a rate of requests takes seconds: until it is made, /answer says how far it is,
with status 202, and the others wait. DELETE of /answer withdraws its asker, which a page names in
the header X-Asker; what still waits for that asker gets status 409. Pages of other origins start
nothing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import select
import socket
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from magicdec.errors import ConfigError, MagicdecError
from magicdec.explore import computation as computing
from magicdec.explore.computation import (
    REMEMBERED,
    BusyError,
    Computation,
    Computations,
    FailedError,
    WithdrawnError,
)
from magicdec.explore.state import (
    CONTROLS,
    EXAMPLE,
    MAIN_CONTROLS,
    RATE_CONTROLS,
    Catalog,
    link,
    shown,
)
from magicdec.perfmodel.plan.planner import Plan, plan
from magicdec.plan_request import Request
from magicdec.plan_rows import Candidate
from magicdec.reports.data import ReportData
from magicdec.reports.figures import draw
from magicdec.reports.figures.chart import PAPER, raw_svg
from magicdec.reports.headline import headline
from magicdec.reports.report import TEMPLATES as REPORT_TEMPLATES
from magicdec.reports.report import (
    chart_view,
    notes_of,
    table_view,
    template_environment,
)
from magicdec.reports.tables import Table, candidate_table

TEMPLATES = Path(__file__).parent / "templates"
OF_ARRIVALS = ("traffic", "goodput", "timeline")
FIGURES = (*OF_ARRIVALS, "heatmap", "best", "gamma", "budget", "limits", "memory")
"""The figures of the page, in its order; those that a state holds nothing for are left out."""
WIDE_BATCHES = (1, 4, 16, 64, 256)
WIDE_CONTEXTS = (1024, 4096, 16_384, 65_536)
"""Batches and contexts of the figure of best drafts, beside the state's own."""
DRAFT_FIELDS = ("draft", "draft_method", "draft_budget")
WAIT_S = 0.5
STATUS_OF_ERRORS: dict[type[MagicdecError], HTTPStatus] = {
    WithdrawnError: HTTPStatus.CONFLICT,
    BusyError: HTTPStatus.SERVICE_UNAVAILABLE,
    FailedError: HTTPStatus.INTERNAL_SERVER_ERROR,
}
"""Others are the user's: 400."""
_drawing = threading.Lock()  # matplotlib keeps state between calls


@dataclass(frozen=True)
class Client:
    """Who asks: a page by its own name, or one request."""

    page: str = ""
    is_gone: Callable[[], bool] = lambda: False
    may_start: bool = True
    """Whether its questions may start a computation."""
    ticket: str = field(default_factory=lambda: f"request {uuid.uuid4()}")


@dataclass(frozen=True)
class NotStarted:
    """How far a computation is that only the page itself may start."""

    doing: str = "not begun yet"
    share: float = 0.0
    left_s: float | None = None


class Explorer:
    """Answers states. The last few are remembered, since each of a state's figures asks again."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._templates = template_environment(TEMPLATES)
        self._at_once = lru_cache(maxsize=REMEMBERED)(
            lambda state: plan(catalog.request(state))
        )
        self._wide = lru_cache(maxsize=REMEMBERED)(self._planned_wide)
        self._computations = Computations()

    def _render(self, name: str, **values: Any) -> str:
        return self._templates.get_template(name).render(**values)

    def plan(self, query: str, client: Client | None = None) -> Plan:
        """The planner's answer to a link, however long it takes.

        Raises:
            MagicdecError: as `magicdec plan` does; the client withdrew; its process was ended.
            ConnectionAbortedError: the client has gone.
        """
        client = client or Client()
        state = self.catalog.read(query)
        if not state.has_arrivals:
            return self._at_once(state)
        asker = client.page or client.ticket
        computation = self._computation(state, asker)
        try:
            return _waited(computation, asker, client)
        except ConnectionAbortedError:
            self._computations.leave(state, asker)
            raise
        finally:
            if not client.page:
                self._computations.leave(state, asker)

    def _computation(self, state: Request, asker: str) -> Computation:
        return self._computations.of(
            state,
            lambda: self.catalog.request(state),
            asker=asker,
            lasting_s=computing.PATIENCE_S,
        )

    def _planned_wide(self, state: Request, tp_size: int) -> Plan:
        """The state's question at usual batches and contexts too, on as many ranks."""
        request = self.catalog.request(state)
        (context,) = state.context_lens
        (batch,) = state.batch_sizes
        contexts = {
            context,
            *WIDE_CONTEXTS,
        }  # those that the model does not read are left out
        return plan(
            msgspec.structs.replace(
                request,
                tp_size=tp_size,
                batch_sizes=tuple(sorted({batch, *WIDE_BATCHES})),
                context_lens=tuple(sorted(contexts)),
                finds_reaches=False,
            )
        )

    def withdraw(self, query: str, page: str = "") -> None:
        """The page waits no more for this answer."""
        self._computations.leave(self.catalog.read(query), page)

    def answer(self, query: str, client: Client | None = None) -> Reply:
        """The answer as a piece of the page, or how far it is. Raises MagicdecError."""
        answered = self._answered(query, client or Client())
        status = HTTPStatus.OK
        if "progress" in answered:
            status = HTTPStatus.ACCEPTED
        return status, HTML, self._render("answer.html", **answered)

    def error(self, error: MagicdecError) -> str:
        """The one line of an error as a piece of the page."""
        return self._render("answer.html", **_failed(error))

    def page(self, query: str, client: Client | None = None) -> Reply:
        """The whole page with its answer, readable with scripts off."""
        given = dict(parse_qsl(query, keep_blank_values=True))
        try:
            state = self.catalog.read(query)
            answered = self._answered(query, client or Client())
        except MagicdecError as error:
            state = self.catalog.start
            answered = _failed(error)
        values = {name: given.get(name, text) for name, text in shown(state).items()}
        choices = {
            name: self.catalog.choices(name)
            for name, each in CONTROLS.items()
            if each.kind == "choice"
        }
        page = self._render(
            "explore.html",
            controls=CONTROLS,
            main=MAIN_CONTROLS,
            of_rate=RATE_CONTROLS,
            example=EXAMPLE,
            start={
                name: text
                for name, text in shown(self.catalog.start).items()
                if "_" not in name
            },
            values=values,
            choices=choices,
            figures=FIGURES,
            not_shown=() if state.has_arrivals else OF_ARRIVALS,
            **answered,
        )
        return (
            HTTPStatus.BAD_REQUEST if "error" in answered else HTTPStatus.OK,
            HTML,
            page,
        )

    def _answered(self, query: str, client: Client) -> dict[str, Any]:
        state = self.catalog.read(query)
        if not state.has_arrivals:
            return self._shown(state, self._at_once(state))
        if not client.may_start:
            return {"progress": NotStarted()}
        computation = self._computation(state, client.page)
        document = computation.answer()
        if document is None:
            return {"progress": computation}
        return self._shown(state, document)

    def _shown(self, state: Request, document: Plan) -> dict[str, Any]:
        data = _report_data(document)
        leading = _leading_drafts(document)
        return {
            "headline": headline(data),
            "table": table_view(leading) if leading is not None else None,
            "notes": notes_of(document),
            "needs_acceptance": document.needs_acceptance,
            "command": self.catalog.command(state),
            "query": link(state),
        }

    def figure(
        self,
        name: str,
        query: str,
        client: Client | None = None,
        *,
        is_picture: bool = False,
    ) -> str:
        """One figure as a piece of the page, or as an SVG file; "" where the state holds nothing
        for it. Raises MagicdecError."""
        document = self.plan(query, client)
        if name == "best":
            state = self.catalog.read(query)
            if state.has_arrivals:
                return ""
            document = self._wide(state, document.best.tp_size)
        with _drawing:
            chart = draw(name, _report_data(document))
            if chart is None:
                return ""
            if is_picture:
                return raw_svg(chart.standalone(), background=PAPER)
            return self._render("figure.html", chart=chart_view(chart))


def _waited(computation: Computation, asker: str, client: Client) -> Plan:
    """The answer, once it is there. Raises as `Explorer.plan` does."""
    while True:
        document = computation.answer()
        if document is not None:
            return document
        if client.is_gone():
            raise ConnectionAbortedError
        if not computation.renew(asker, lasting_s=computing.PATIENCE_S):
            raise WithdrawnError("this question was withdrawn; ask again to begin anew")
        computation.is_over.wait(WAIT_S)


def script() -> str:
    return _text("report.js", "explore.js")


def style() -> str:
    return _text("report.css", "explore.css")


def _text(report: str, own: str) -> str:
    return (REPORT_TEMPLATES / report).read_text(encoding="utf-8") + (
        TEMPLATES / own
    ).read_text(encoding="utf-8")


def _report_data(document: Plan) -> ReportData:
    return ReportData.from_records([], document)


def _leading_drafts(document: Plan) -> Table | None:
    """The candidates' best gamma for each draft and budget (the planner puts the best first)."""
    best: dict[tuple[Any, ...], Candidate] = {}
    for row in document.candidates:
        best.setdefault(tuple(getattr(row, name) for name in DRAFT_FIELDS), row)
    table = candidate_table(
        _report_data(msgspec.structs.replace(document, candidates=list(best.values())))
    )
    if table is None:
        return None
    return table.without("batch_size", "context_len", "tp_size")


def _failed(error: MagicdecError) -> dict[str, Any]:
    return {"error": " ".join(str(error).split())}


# Over HTTP
# --------------------------------------------------------------------------------------------------

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' "
    "data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HTML, JSON, SVG, PLAIN = "text/html", "application/json", "image/svg+xml", "text/plain"
Reply = tuple[HTTPStatus, str, str]
LONGEST_NAME = 100
"""Characters of a page's own name that are read."""


class Server(ThreadingHTTPServer):
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
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "magicdec"
    sys_version = ""
    timeout = 60

    def do_GET(self) -> None:
        self._answer(self._reply)

    def do_DELETE(self) -> None:
        self._answer(self._withdrawn)

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
        except (
            Exception
        ):  # a bug: its traceback is shown here, and the client gets an answer
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
        page = self.headers.get("X-Asker", "")[:LONGEST_NAME]
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
        with contextlib.suppress(
            ConnectionError
        ):  # the page asked something newer and did not wait
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
