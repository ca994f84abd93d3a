"""A text pasted into the page: a serve command, read and weighed as `magicdec check` does and turned into
the page's controls, or an engine's log or metrics, read as `magicdec observe` does.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from magicdec.errors import ConfigError
from magicdec.explore.state import DRAFT_CHOICES, NONE_CHOSEN, Catalog, link
from magicdec.live import (
    AskedLoad,
    Observation,
    Serving,
    TextLine,
    View,
    as_asked,
    check_command,
    lines_of,
    parse_draft,
    seen_in,
)
from magicdec.progress import Progress
from magicdec.schema import Request
from magicdec.specs import ServeCommand, read_serve_command
from magicdec.units import GIB, format_bytes


@dataclass(frozen=True, kw_only=True)
class Pasted:
    """The page's words on a command."""

    lines: list[TextLine]
    """The first is the advice."""
    query: str
    """The command's question as a link."""


SENTENCES = ("wrong:", "advice:")
"""Beginnings of the lines of an observation that are read before its tables."""
MOST_CPU_S = 30
MOST_ADDRESS_SPACE_BYTES = 2 * GIB
"""Processor time and address space that one command may take to be read and weighed."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A command to read and weigh, in a process of its own: a text may be written to take forever, or
    all memory."""

    catalog: Catalog
    state: Request
    text: str

    def __call__(self, progress: Progress) -> Pasted:
        """Raises MagicdecError for what cannot be read or planned within the bounds."""
        bound_this_process(most_cpu_s=MOST_CPU_S, most_bytes=MOST_ADDRESS_SPACE_BYTES)
        try:
            return pasted(self.catalog, self.state, self.text)
        except MemoryError:
            raise ConfigError(
                f"reading this command takes more than {format_bytes(MOST_ADDRESS_SPACE_BYTES)}"
            ) from None


def bound_this_process(*, most_cpu_s: int, most_bytes: int) -> None:
    """Bound the process's further processor time and address space, where the system can.

    ConfigError is raised wherever it is when its time is over, MemoryError when its memory is.
    """
    try:
        import resource
    except ImportError:  # Windows
        return

    def refuse(*_: object) -> NoReturn:
        raise ConfigError(
            f"reading this command takes more than {most_cpu_s} s of processor time"
        )

    signal.signal(signal.SIGXCPU, refuse)
    # What no Python code interrupts is killed a little later.
    spent_s = math.ceil(time.process_time())
    until_s = spent_s + most_cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (until_s, until_s + 5))
    with contextlib.suppress(OSError):  # no /proc: the time bounds it alone
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + most_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def pasted(catalog: Catalog, state: Request, text: str) -> Pasted:
    """A command under the load that the page's controls were moved to, or what a log tells of a server
    on the page's device.

    Raises MagicdecError for what cannot be read or planned. No file is read that it names, and
    nothing is fetched.
    """
    seen = seen_in([("the pasted text", text)])
    if seen is not None:
        return _observed(catalog, state, seen)
    command = _within(catalog, read_serve_command(text.strip(), reads_files=False))
    load = _load(catalog, state, command)
    result = check_command(command, load, reads_files=False)
    asked = as_asked(command, load).record()
    if asked.draft in DRAFT_CHOICES:
        asked = msgspec.structs.replace(asked, draft=None, draft_method=asked.draft)
    if state.price_per_hour_usd is not None:
        asked = msgspec.structs.replace(
            asked, price_per_hour_usd=state.price_per_hour_usd
        )
    return Pasted(lines=list(lines_of(result)), query=link(asked))


def _observed(catalog: Catalog, state: Request, seen: Observation) -> Pasted:
    """Raises MagicdecError where the server's model is not known, or drafts with another draft."""
    request = catalog.request(state)
    model = state.model
    served = seen.target.model
    if state.model == catalog.start.model and served:
        model = catalog.model(served)
    draft = None
    named = state.draft_method or state.draft
    if seen.announced is None and named not in (None, NONE_CHOSEN):
        draft = parse_draft(named)
    serving = Serving(
        model=model,
        hardware=state.hardware[0],
        engine=state.engine,
        tp_size=request.tp_size or 1,
        temperature=state.temperature,
    )
    context = None
    if state.context_lens != catalog.start.context_lens:
        context = float(state.context_lens[0])
    view = View(draft=draft, serving=serving, context=context)
    first, *rest = view.lines(seen)
    sentences = [text for text in rest if text.lstrip().startswith(SENTENCES)]
    table = [text for text in rest if text not in sentences]
    return Pasted(
        lines=[
            TextLine(first),
            *map(TextLine, sentences),
            TextLine("\n".join(table), "option"),
        ],
        query=link(msgspec.structs.replace(state, model=model)),
    )


def _within(catalog: Catalog, command: ServeCommand) -> ServeCommand:
    """The command, which may name what a link may."""
    hardware = command.hardware
    if hardware is not None:
        hardware = catalog.device(hardware)
    speculation = command.speculation
    if speculation is not None and speculation.draft not in DRAFT_CHOICES:
        draft = catalog.model(speculation.draft, "draft")
        speculation = msgspec.structs.replace(speculation, draft=draft)
    return msgspec.structs.replace(
        command,
        model=catalog.model(command.model),
        hardware=hardware,
        speculation=speculation,
    )


def _load(catalog: Catalog, state: Request, command: ServeCommand) -> AskedLoad:
    """The load as the controls have it, where they were moved."""
    start = catalog.start
    hardware: str | None = state.hardware[0]
    if state.hardware == start.hardware and command.hardware is not None:
        hardware = None  # the manifest names its own
    batch = None
    if state.batch_sizes and state.batch_sizes != start.batch_sizes:
        batch = state.batch_sizes[0]
    context = None
    if state.context_lens != start.context_lens:
        context = state.context_lens[0]
    return AskedLoad(
        hardware=hardware,
        batch=batch,
        context_len=context,
        gen_len=state.gen_len,
        task=state.task,
        temperature=state.temperature,
        acceptance_rate=state.acceptance_rate,
        accept_length=state.accept_length,
        drafted_share=state.drafted_share,
    )
