"""A run on several ranks ends as one: whichever of its processes dies, and however, none is left behind.

pytest -s -m "slow or not slow" tests/commands/test_run_ends.py     # prints what was sent, and what was left
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from magicdec.schema.record import UNFINISHED, read_records
from tests.processes import Program, Watched, command_line, still_alive_after, watched

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="finds the ranks in /proc"
)
RUN = ("-m", "magicdec", "run")
ENDLESS = (
    "--batch",
    "2",
    "--context",
    "120",
    "--draft-budget",
    "32",
    "--repetitions",
    "100000",
    "--gen-len",
    "20",
)
OURS = ((sys.executable, *RUN, "--tp", "2"), "spawn_main")
TORCHRUN = (
    (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *RUN),
    "magicdec run",
)
ENDS_WITHIN_S = 15.0
KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
EXIT_CODES = {KILL: -KILL, TERM: 128 + TERM, INT: 128 + INT}


def expect_none_left(
    what: str, run: Watched, pids: list[int], *, within_s: float = ENDS_WITHIN_S
) -> None:
    """Of these processes, as `ps` would list them; prints the row of a table."""
    start_s = time.monotonic()
    left = still_alive_after(within_s, pids)
    code, waited_s = run.process.poll(), time.monotonic() - start_s
    rows = "; ".join(f"{pid} {command_line(pid)[:60]}" for pid in left) or "none"
    print(
        f"\n{what:62} exit code {code!s:>4}, {len(pids)} processes gone {waited_s:.1f} s later, left: {rows}"
    )
    assert not left


@pytest.fixture
def recorded(tmp_path: Path, program: Program) -> Path:
    """A records file with a record in it."""
    small = (
        "--batch=1",
        "--context=60",
        "--draft=none",
        "--repetitions=1",
        "--gen-len=4",
        "--quiet",
    )
    path = tmp_path / "records.jsonl"
    assert program("run", *small, "--records", str(path)).returncode == 0
    return path


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (INT, "starting"),
        pytest.param(KILL, "decoding", marks=pytest.mark.slow),
        pytest.param(KILL, "starting", marks=pytest.mark.slow),
        pytest.param(TERM, "decoding", marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_end_with_their_parent(number: signal.Signals, moment: str) -> None:
    """By whatever signal, while they load and while they decode; an interrupt or a termination says nothing more."""
    launcher, marker = OURS
    with watched(*launcher, *ENDLESS) as run:
        ranks = run.wait_for_descendants(marker, 1 if moment == "starting" else 2)
        if moment == "decoding":
            run.wait_for_text("repetition 2/")
        run.process.send_signal(number)
        assert run.wait() == EXIT_CODES[number]
        everything = sorted({*ranks, *run.descendants()})
        expect_none_left(
            f"{number.name} to magicdec run --tp 2, {moment}", run, everything
        )
        assert "Traceback" not in run.shown


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        pytest.param(KILL, "decoding", marks=pytest.mark.slow),
        pytest.param(TERM, "starting", marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_end_with_torchrun(
    number: signal.Signals, moment: str, recorded: Path
) -> None:
    """Killed, it cannot end them itself; and what has just been started has to load its first modules for that. What
    was recorded before stays."""
    before = recorded.read_bytes()
    launcher, marker = TORCHRUN
    with watched(*launcher, *ENDLESS, "--records", str(recorded)) as run:
        ranks = run.wait_for_descendants(marker, 2)
        if moment == "decoding":
            run.wait_for_text("repetition 2/")
        run.process.send_signal(number)
        if number != KILL:
            assert run.wait() not in (0, None)
        within_s = ENDS_WITHIN_S if moment == "decoding" else 30
        expect_none_left(
            f"{number.name} to torchrun, {moment}", run, ranks, within_s=within_s
        )
    assert recorded.read_bytes().startswith(before)


@pytest.mark.slow
def test_a_killed_rank_ends_the_run(recorded: Path) -> None:
    """Within seconds, with a failing exit code and the reason; what was recorded before stays, and of
    the run itself only its repetitions are recorded."""
    before = recorded.read_bytes()
    launcher, marker = OURS
    with watched(*launcher, *ENDLESS, "--records", str(recorded)) as run:
        ranks = run.wait_for_descendants(marker, 2)
        run.wait_for_text("repetition 2/")
        os.kill(ranks[1], KILL)
        assert run.wait() == 2
        expect_none_left(
            "SIGKILL to a rank of magicdec run --tp 2, decoding", run, ranks
        )
        said = "magicdec: rank 1 died: its process was ended by SIGKILL"
        assert said in " ".join(run.shown.split())
        assert "Traceback" not in run.shown
    assert recorded.read_bytes().startswith(before)
    assert (
        len(
            [
                record
                for record in read_records(recorded)
                if UNFINISHED not in record.notes
            ]
        )
        == 1
    )
