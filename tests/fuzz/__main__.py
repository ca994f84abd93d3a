"""Logs, commands, loads and the page under seeded damage, with a table of what came of them.

    python -m tests.fuzz                     all of these (make fuzz)
    python -m tests.fuzz logs page           some of them
    python -m tests.fuzz files --times 1     whatever else is read (minutes), with fewer cases

The table gives cases, answers, refusals, tracebacks, hangs, other faults, seconds, the slowest case and the peak of
memory, by surface. The exit code is the number of faults (255: as many or more); planted ones, which the tests are to
find, do not count.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
GROUPS = {
    "logs": ("test_commands_and_logs.py::test_logs_replayed", "test_commands_and_logs.py::test_logs_planned"),
    "commands": ("test_commands_and_logs.py::test_serve_commands", "test_commands_and_logs.py::test_manifests",
                 "test_commands_and_logs.py::test_every_manifest_ends",
                 "test_commands_and_logs.py::test_a_megabyte_of_any_shape_is_read_in_seconds"),
    "loads": ("test_loads.py::test_traces", "test_loads.py::test_rates",
              "test_loads.py::test_tables_of_servers"),
    "page": ("test_loads.py::test_questions_to_the_page",),
    "files": ("test_fuzz.py::test_damage_is_answered_or_refused_in_one_line",),
}  # fmt: skip
QUICK = ("logs", "commands", "loads", "page")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--times", type=int, default=5, help="multiplies the cases (5)")
    given = parser.parse_args()
    if unknown := set(given.groups) - set(GROUPS):
        parser.error(f"no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    os.environ["MAGICDEC_FUZZ"] = str(given.times)  # read as the tests are imported
    tests = [
        str(HERE / name) for group in given.groups or QUICK for name in GROUPS[group]
    ]
    code = pytest.main(
        ["-q", "-p", "no:cacheprovider", "-m", "slow or not slow", *tests]
    )
    from tests.fuzz.surfaces import NOT_COUNTED, TALLIES

    faults = sum(
        tally.faults for name, tally in TALLIES.items() if name not in NOT_COUNTED
    )
    return min(max(faults, int(code != pytest.ExitCode.OK)), 255)


if __name__ == "__main__":
    sys.exit(main())
