"""The page of a request, the planner's answer with the reports' figures of it, and the standard library's server of it.

    /                 the page                    /answer            its answer alone
    /figure/NAME      a figure as HTML            /figure/NAME.svg   the same as a picture
    /plan.json        the plan document           /explore.js, /explore.css

Every address takes the state as its query string. An error of the user's is status 400 and its one line. A plan for a
rate of requests takes seconds: until it is made, /answer says how far it is, with status 202, and DELETE ends it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import threading
from collections.abc import Callable, Iterable
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from magicdec.errors import ConfigError, MagicdecError
from magicdec.explore.computation import Computation
from magicdec.explore.state import CONTROLS, EXAMPLE, MAIN_CONTROLS, RATE_CONTROLS, Catalog, link, shown
from magicdec.perfmodel.plan.planner import Plan, plan
from magicdec.plan_document import Candidate
from magicdec.plan_request import Request
from magicdec.reports.data import ReportData
from magicdec.reports.figures import draw
from magicdec.reports.figures.chart import PAPER, raw_svg
from magicdec.reports.headline import headline
from magicdec.reports.report import TEMPLATES as REPORT_TEMPLATES
from magicdec.reports.report import chart_view, notes_of, table_view, template_environment
from magicdec.reports.tables import Table, candidate_table

TEMPLATES = Path(__file__).parent / "templates"
OF_ARRIVALS = ("traffic", "goodput", "timeline")
FIGURES = (*OF_ARRIVALS, "heatmap", "gamma", "budget", "limits", "memory")
"""The figures of the page, in its order; those that a state holds nothing for are left out."""
DRAFT_FIELDS = ("draft", "draft_method", "draft_budget")
REMEMBERED, MOST_RUNNING = 32, 4
_drawing = threading.Lock()  # matplotlib keeps state between calls


class Explorer:
    """Answers states. The last few are remembered, since each of a state's figures asks again."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._templates = template_environment(TEMPLATES)
        self._at_once = lru_cache(maxsize=REMEMBERED)(lambda state: plan(catalog.request(state)))
        self._computations: dict[Request, Computation] = {}
        """Plans for a rate of requests; the one asked for last stands last."""
        self._lock = threading.Lock()

    def _render(self, name: str, **values: Any) -> str:
        return self._templates.get_template(name).render(**values)

    def plan(self, query: str) -> Plan:
        """The planner's answer to a link, however long it takes. Raises MagicdecError, as `magicdec plan` does."""
        state = self.catalog.read(query)
        while isinstance(found := self._planned(state, wait_s=1.0), Computation):
            pass
        return found

    def _planned(self, state: Request, *, wait_s: float = 0.0) -> Plan | Computation:
        """The planner's answer, or its computation where that takes longer than `wait_s`."""
        if not state.has_arrivals:
            return self._at_once(state)
        with self._lock:
            found = self._computations.pop(state, None)
            if found is None or found.is_stopped:
                running = [each for each in self._computations.values() if each.is_running]
                for each in running[: max(len(running) - MOST_RUNNING + 1, 0)]:
                    each.stop()
                found = Computation(self.catalog.request(state))
            self._computations[state] = found
            while len(self._computations) > REMEMBERED:
                self._computations.pop(next(iter(self._computations))).stop()
        return found.answer(wait_s=wait_s) or found

    def stop(self, query: str) -> None:
        """Ends a computation that nobody waits for any more."""
        with self._lock:
            if (found := self._computations.get(self.catalog.read(query))) is not None and found.is_running:
                found.stop()

    def answer(self, query: str) -> Reply:
        """The answer as a piece of the page, or how far it is. Raises MagicdecError."""
        answered = self._answered(query)
        status = HTTPStatus.ACCEPTED if "progress" in answered else HTTPStatus.OK
        return status, HTML, self._render("answer.html", **answered)

    def error(self, error: MagicdecError) -> str:
        """The one line of an error as a piece of the page."""
        return self._render("answer.html", **_failed(error))

    def page(self, query: str) -> Reply:
        """The whole page with its answer, readable with scripts off."""
        given = dict(parse_qsl(query, keep_blank_values=True))
        try:
            state = self.catalog.read(query)
            answered = self._answered(query)
        except MagicdecError as error:
            state, answered = self.catalog.start, _failed(error)
        values = {name: given.get(name, text) for name, text in shown(state).items()}
        choices = {name: self.catalog.choices(name) for name, each in CONTROLS.items() if each.kind == "choice"}
        page = self._render(
            "explore.html", controls=CONTROLS, main=MAIN_CONTROLS, of_rate=RATE_CONTROLS, example=EXAMPLE,
            start={name: text for name, text in shown(self.catalog.start).items() if "_" not in name},
            values=values, choices=choices, figures=FIGURES, not_shown=() if state.has_arrivals else OF_ARRIVALS,
            **answered,
        )  # fmt: skip
        return HTTPStatus.BAD_REQUEST if "error" in answered else HTTPStatus.OK, HTML, page

    def _answered(self, query: str) -> dict[str, Any]:
        state = self.catalog.read(query)
        if isinstance(document := self._planned(state), Computation):
            return {"progress": document}
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

    def figure(self, name: str, query: str, *, is_picture: bool = False) -> str:
        """One figure as a piece of the page, or as an SVG file; "" where the state holds nothing for it. Raises
        MagicdecError."""
        document = self.plan(query)
        with _drawing:
            chart = draw(name, _report_data(document))
            if chart is None:
                return ""
            if is_picture:
                return raw_svg(chart.standalone(), background=PAPER)
            return self._render("figure.html", chart=chart_view(chart))


def script() -> str:
    return _text("report.js", "explore.js")


def style() -> str:
    return _text("report.css", "explore.css")


def _text(report: str, own: str) -> str:
    return (REPORT_TEMPLATES / report).read_text(encoding="utf-8") + (TEMPLATES / own).read_text(encoding="utf-8")


def _report_data(document: Plan) -> ReportData:
    return ReportData.from_records([], document)


def _leading_drafts(document: Plan) -> Table | None:
    """The candidates' best gamma for each draft and budget (the planner puts the best first)."""
    best: dict[tuple[Any, ...], Candidate] = {}
    for row in document.candidates:
        best.setdefault(tuple(getattr(row, name) for name in DRAFT_FIELDS), row)
    table = candidate_table(_report_data(msgspec.structs.replace(document, candidates=list(best.values()))))
    return None if table is None else table.without("batch_size", "context_len", "tp_size")


def _failed(error: MagicdecError) -> dict[str, Any]:
    return {"error": " ".join(str(error).split())}


# Over HTTP -----------------------------------------------------------------------------------------------------------

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
        self._answer(self._reply)

    def do_DELETE(self) -> None:
        self._answer(self._stopped)

    def _answer(self, reply: Callable[[str, str], Reply]) -> None:
        if not self.server.answers(self.headers.get("Host", "")):
            self._send(HTTPStatus.FORBIDDEN, PLAIN, "this page answers on loopback only, or to --allow-host\n")
            return
        try:
            url = urlsplit(self.path)
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, PLAIN, "not an address\n")
            return
        try:
            self._send(*reply(url.path, url.query))
        except MagicdecError as error:
            self._send(HTTPStatus.BAD_REQUEST, HTML, self.server.explorer.error(error))

    def _reply(self, path: str, query: str) -> Reply:
        explorer = self.server.explorer
        fixed: dict[str, Callable[[], Reply]] = {
            "/": lambda: explorer.page(query),
            "/answer": lambda: explorer.answer(query),
            "/plan.json": lambda: (HTTPStatus.OK, JSON, explorer.plan(query).to_json()),
            "/explore.js": lambda: (HTTPStatus.OK, "text/javascript", script()),
            "/explore.css": lambda: (HTTPStatus.OK, "text/css", style()),
        }
        if path in fixed:
            return fixed[path]()
        name = path.removeprefix("/figure/")
        if path.startswith("/figure/") and name.removesuffix(".svg") in FIGURES:
            is_picture = name.endswith(".svg")
            content = explorer.figure(name.removesuffix(".svg"), query, is_picture=is_picture)
            return HTTPStatus.OK, SVG if is_picture else HTML, content
        return HTTPStatus.NOT_FOUND, PLAIN, "not here\n"

    def _stopped(self, _: str, query: str) -> Reply:
        self.server.explorer.stop(query)
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
        with contextlib.suppress(ConnectionError):  # the page asked something newer and did not wait
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
