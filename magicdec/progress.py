"""What is being done right now, on stderr: one line that renews itself on a terminal, nothing when quiet or piped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CLEAR_LINE = "\r\x1b[2K"
WIDTH = 78


@contextmanager
def shown_progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Gives a function that shows a message; the line is cleared at the end, also after an error."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return

    def show(message: str) -> None:
        sys.stderr.write(CLEAR_LINE + message[:WIDTH])
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write(CLEAR_LINE)
