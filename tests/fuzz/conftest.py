"""A table of what came of the cases, at the end of the tests."""

from __future__ import annotations

import pytest

from tests.fuzz.surfaces import TALLIES

COLUMNS = ("answered", "refused", "tracebacks", "hangs", "others")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Planted faults, which the tests are to find, stand in a row of their own."""
    if not TALLIES:
        return
    terminalreporter.section("cases by surface")
    heads = ("surface", "cases", *COLUMNS, "s", "slowest s", "peak MiB")
    terminalreporter.line(" | ".join(heads))
    for name, tally in TALLIES.items():
        counts = [getattr(tally, column) for column in COLUMNS]
        times = f"{tally.seconds:.0f} | {tally.slowest_s:.1f} | {tally.peak_mib:.0f}"
        cells = " | ".join(str(count) for count in (sum(counts), *counts))
        terminalreporter.line(f"{name} | {cells} | {times}")
