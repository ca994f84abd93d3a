"""The progress line, watched through a terminal."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from magicdec.progress import (
    STAGE_STEPS,
    Interrupted,
    Stages,
    StepMessage,
    kept,
    shown_progress,
)
from tests.processes import watched

SCRIPT = """
import time
from magicdec.progress import Done, StepMessage, shown_progress
with shown_progress(False) as show:
    show("loading [bold]model[/bold]")
    for done in range(10):
        show(StepMessage(f"repetition {done}", done=done, total=10))
        time.sleep(0.05)
    show(Done("a stage [1] that has ended"))
"""


def test_a_terminal_shows_the_message_and_the_time_left_and_a_pipe_what_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with watched(sys.executable, "-c", SCRIPT) as run:
        assert run.wait() == 0
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", run.shown)
    assert "loading [bold]model[/bold]" in shown
    assert "repetition 9" in shown
    assert "a stage [1] that has ended" in shown
    last = shown[shown.rindex("repetition 9") :]
    assert len(re.findall(r"\d:\d\d:\d\d", last.partition("\r")[0])) == 2, last
    piped = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, check=True
    )
    assert piped.stderr == b"a stage [1] that has ended\n"


def test_long_work_off_a_terminal_says_now_and_then_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line at most every LINE_EVERY_S, with the time so far and the time left at that pace."""
    now = 100.0
    monkeypatch.setattr("magicdec.progress.time.monotonic", lambda: now)
    with shown_progress(False) as show:
        show("loading")
        for done in range(1, 50):
            now = 100.0 + done
            show(StepMessage(f"step {done}", done=done, total=60))
    assert capsys.readouterr().err.splitlines() == [
        "15 s: step 15 (about 45 s left)",
        "30 s: step 30 (about 30 s left)",
        "45 s: step 45 (about 15 s left)",
    ]


def test_an_interrupt_says_what_is_kept() -> None:
    with (
        pytest.raises(Interrupted, match="the first 7 records are kept"),
        kept(lambda: "all records are kept"),
        kept(lambda: "the first 7 records are kept"),
    ):
        raise KeyboardInterrupt


def test_stages_are_one_whole_that_never_goes_back() -> None:
    """Shares 1 and 3: the first stage's half is an eighth of the whole; a stage of stages likewise."""
    shown: list[StepMessage] = []

    def show(message: str) -> None:
        assert isinstance(message, StepMessage)
        assert message.total == STAGE_STEPS
        shown.append(message)

    whole = Stages(show, [1.0, 3.0])
    first, second = whole.stage(0), whole.stage(1)
    first("loading")
    first(StepMessage("half", done=5, total=10))
    first(StepMessage("back at the start", done=0, total=3))
    second("warming up")
    inner = Stages(second, [1.0, 1.0]).stage(1)
    inner(StepMessage("three quarters", done=1, total=2))
    second("a word")
    assert [step.done / STAGE_STEPS for step in shown] == [
        0.0,
        0.125,
        0.125,
        0.25,
        0.8125,
        0.8125,
    ]
    assert [str(step) for step in shown][-1] == "a word"
