"""The page of a request, and the pieces that it asks for as its controls move: the planner's answer
with the reports' figures of it.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from magicdec.errors import ConfigError, MagicdecError
from magicdec.explore import computation as computing
from magicdec.explore.changes import changed_answers, changed_controls
from magicdec.explore.computation import (
    REMEMBERED,
    Computation,
    Computations,
    WithdrawnError,
)
from magicdec.explore.controls import CHOICES, CONTROLS, FOLDED, MAIN
from magicdec.explore.jobs import Job, OnEachGpu, Planned, planned_batches, planned_wide
from magicdec.explore.pasted import Checked, Pasted
from magicdec.explore.state import EXAMPLE, Catalog, link, shown
from magicdec.perfmodel import Plan, counted, make_plan
from magicdec.reports import (
    NAME_THE_TEXT,
    PAPER,
    Headline,
    ReportData,
    Table,
    candidate_table,
    chart_view,
    draw,
    draw_by_device,
    headline_of,
    notes_of,
    raw_svg,
    table_view,
    template_environment,
)
from magicdec.schema import Candidate, Request

TEMPLATES = Path(__file__).parent / "templates"
HTML = "text/html"
Reply = tuple[HTTPStatus, str, str]
"""Status, kind and content."""
OF_ARRIVALS = ("traffic", "goodput", "timeline")
FIGURES = (
    *OF_ARRIVALS,
    "best",
    "pareto",
    "heatmap",
    "gamma",
    "limits",
    "budget",
    "memory",
)
"""The figures of the page, in its order; those that a state holds nothing for are left out."""
COMPARED_GPUS = (
    "h100-sxm-80gb",
    "h200-sxm-141gb",
    "b200-sxm-192gb",
    "mi300x-192gb",
    "a100-sxm-80gb",
    "l40s-48gb",
    "rtx-pro-6000-96gb",
    "rtx-4090-24gb",
)
"""GPUs that a question is asked on too, on request."""
DRAFT_CONTROLS = ("draft", "draft_method", "draft_budget")
CHOOSE_THE_TEXT = f"choose your text under {MAIN['task'].label}"
WAIT_S = 0.5
"""Time between looks whether the asker has gone, or has withdrawn the question."""
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
        self._at_once = lru_cache(maxsize=REMEMBERED)(self._planned_at_once)
        self._wide = lru_cache(maxsize=REMEMBERED)(
            lambda state, tp_size: planned_wide(catalog.request(state), tp_size)
        )
        self._over_batches = lru_cache(maxsize=REMEMBERED)(
            lambda state: planned_batches(catalog.request(state))
        )
        self._computations = Computations()
        self._first = threading.Lock()
        self._has_planned = False
        msgspec.json.Decoder(Plan)  # threads that build its types at once crash msgspec

    def _planned_at_once(self, state: Request) -> Plan:
        """The first question is planned alone: it builds the types of the files that it reads."""
        request = self.catalog.request(state)
        if self._has_planned:
            return make_plan(request)
        with self._first:
            document = make_plan(request)
        self._has_planned = True
        return document

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
            document: Plan = _waited(computation, asker, client)
        except ConnectionAbortedError:
            self._computations.leave(state, asker)
            raise
        finally:
            if not client.page:
                self._computations.leave(state, asker)
        return document

    def _computation(self, state: Request, asker: str) -> Computation:
        return self._begun(state, lambda: self._job(state), asker)

    def _begun(self, key: Any, job: Callable[[], Job], asker: str) -> Computation:
        return self._computations.of(
            key, job, asker=asker, lasting_s=computing.PATIENCE_S
        )

    def _job(self, state: Request) -> Planned:
        request = self.catalog.request(state)
        if state.requests is None:
            return Planned(request)
        uploads = self.catalog.uploads
        name = uploads.name_of(state.requests)
        request = msgspec.structs.replace(request, requests=name)
        return Planned(request, uploads.folder_of(state.requests))

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

    def page(
        self, query: str, client: Client | None = None, command: str = ""
    ) -> Reply:
        """The whole page with its answer, readable with scripts off; `command`: a server's, which
        was pasted into it."""
        client = client or Client()
        checked: dict[str, Any] = {"pasted": None, "command_text": command}
        try:
            if command:
                checked["pasted"] = self._pasted(query, command, client)
                query = checked["pasted"].query
            state = self.catalog.read(query)
            answered = self._answered(query, client)
        except MagicdecError as error:
            state = self.catalog.start
            answered = _failed(error)
        return (
            HTTPStatus.BAD_REQUEST if "error" in answered else HTTPStatus.OK,
            HTML,
            self._render(
                "explore.html",
                **self._form(query, state),
                figures=FIGURES,
                not_shown=() if state.has_arrivals else OF_ARRIVALS,
                **checked,
                **answered,
            ),
        )

    def _form(self, query: str, state: Request) -> dict[str, Any]:
        """The controls with what is in them."""
        given = dict(parse_qsl(query, keep_blank_values=True))
        texts = shown(state)
        return {
            "controls": CONTROLS,
            "main": MAIN,
            "folded": FOLDED,
            "example": EXAMPLE,
            "start": shown(self.catalog.start),
            "values": {name: given.get(name, text) for name, text in texts.items()},
            "of": "arrivals" if state.has_arrivals else "steady",
            "choices": CHOICES | {"draft": self._drafts(state)},
            "suggestions": {
                name: self.catalog.suggestions(name)
                for name in ("model", "hardware", "task")
            },
        }

    def _drafts(self, state: Request) -> list[str]:
        """The drafts to choose from, the chosen one among them whether it can exist or not."""
        try:
            drafts = self.catalog.drafts(state)
        except MagicdecError:
            drafts = []
        chosen = shown(state)["draft"]
        if chosen and chosen not in drafts:
            drafts.append(chosen)
        return drafts

    def drafts(self, query: str) -> list[str]:
        """The drafts to choose from for a link. Raises MagicdecError."""
        return self._drafts(self.catalog.read(query))

    def check(self, query: str, command: str, client: Client | None = None) -> Reply:
        """Changes to a server's command, as a piece of the page. Raises MagicdecError."""
        found = self._pasted(query, command, client or Client())
        return HTTPStatus.OK, HTML, self._render("check.html", pasted=found)

    def _pasted(self, query: str, command: str, client: Client) -> Pasted:
        """A pasted command as it is read in a process of its own, which ends with its client."""
        state = self.catalog.read(query)
        key = ("pasted", state, command)
        job = Checked(catalog=self.catalog, state=state, text=command)
        computation = self._begun(key, lambda: job, client.ticket)
        try:
            found: Pasted = _waited(computation, client.ticket, client)
        finally:
            self._computations.leave(key, client.ticket)
        return found

    def changed(self, before: str, now: str) -> str:
        """Changes between two links, in words. Raises MagicdecError."""
        was = self.catalog.read(before)
        became = self.catalog.read(now)
        sentences = [changed_controls(was, became) or "The same question."]
        documents = []
        for state in (was, became):
            if not state.has_arrivals:
                documents.append(self._at_once(state))
        if len(documents) == 2:
            sentences.append(changed_answers(*documents))
        return " ".join(filter(None, sentences))

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
            "headline": _headline(data),
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
        if name == "pareto" and document.traffic is None:
            document = self._over_batches(self.catalog.read(query))
        with _drawing:
            chart = draw(name, _report_data(document))
            if chart is None:
                return ""
            if is_picture:
                return raw_svg(chart.standalone(), background=PAPER)
            return self._render("figure.html", chart=chart_view(chart))

    def each_gpu(self, query: str, client: Client | None = None) -> Reply:
        """The best drafts on several GPUs, a small figure each, or how far they are. Raises
        MagicdecError."""
        client = client or Client()
        state = self.catalog.read(query)
        if state.has_arrivals:
            raise ConfigError("GPUs are compared for a full batch; take the rate away")
        computation = self._begun(
            ("each gpu", state), lambda: self._on_each_gpu(state), client.page
        )
        found = computation.answer()
        if found is None:
            piece = self._render("answer.html", progress=computation)
            return HTTPStatus.ACCEPTED, HTML, piece
        plans = [each for each in found if not isinstance(each, str)]
        missing = [each for each in found if isinstance(each, str)]
        with _drawing:
            charts = [chart_view(chart) for chart in draw_by_device(plans)]
        return (
            HTTPStatus.OK,
            HTML,
            self._render("gpus.html", charts=charts, missing=missing),
        )

    def _on_each_gpu(self, state: Request) -> OnEachGpu:
        """The question on its own GPU and on COMPARED_GPUS, as many of each as it names."""
        own = state.hardware[0]
        devices = counted(own)
        num = "" if devices.num_gpus is None else f"{devices.num_gpus}x"
        others = [f"{num}{name}" for name in COMPARED_GPUS if name not in own]
        requests = []
        for hardware in (own, *others):
            asked = msgspec.structs.replace(state, hardware=(hardware,))
            requests.append(self.catalog.request(asked))
        return OnEachGpu(tuple(requests))


def _waited(computation: Computation, asker: str, client: Client) -> Any:
    """The answer, once it is there. Raises as `Explorer.plan` does."""
    while True:
        answer = computation.answer()
        if answer is not None:
            return answer
        if client.is_gone():
            raise ConnectionAbortedError
        if not computation.renew(asker, lasting_s=computing.PATIENCE_S):
            raise WithdrawnError("this question was withdrawn; ask again to begin anew")
        computation.is_over.wait(WAIT_S)


def _report_data(document: Plan) -> ReportData:
    return ReportData.from_records([], document)


def _headline(data: ReportData) -> Headline:
    """The headline in the words of a page, which has a control for the text."""
    headline = headline_of(data)
    further = (
        line.replace(NAME_THE_TEXT, CHOOSE_THE_TEXT) for line in headline.further
    )
    return replace(headline, further=tuple(further))


def _leading_drafts(document: Plan) -> Table | None:
    """The candidates' best gamma for each draft and budget (the planner puts the best first)."""
    best: dict[tuple[Any, ...], Candidate] = {}
    for row in document.candidates:
        best.setdefault(tuple(getattr(row, name) for name in DRAFT_CONTROLS), row)
    table = candidate_table(
        _report_data(msgspec.structs.replace(document, candidates=list(best.values())))
    )
    if table is None:
        return None
    return table.without("batch_size", "context_len", "tp_size")


def _failed(error: MagicdecError) -> dict[str, Any]:
    return {"error": " ".join(str(error).split())}
