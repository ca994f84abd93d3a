"""`magicdec plan` from the command to the chosen gamma, by a trace of its calls: the files that docs/structure.md
lists, and calls in one direction."""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import magicdec
from magicdec import cli

ROOT = Path(magicdec.__file__).parent
STRUCTURE = ROOT.parent / "docs" / "structure.md"
ROOMS = (
    "commands/plan.py",
    "schema/request.py",
    "perfmodel/planner.py",
    "perfmodel/plan/",
    "perfmodel/speedup.py",
)
ASIDES = {"perfmodel/plan/standing.py", "perfmodel/plan/draws.py"}
"""Files that answer one question of the way: can this draft be started; how likely is it faster than another."""
Call = tuple[str, str]


@cache
def file_of(code: CodeType) -> str | None:
    """The file of the package that a function is of; None: of none, or code that runs as it is imported."""
    path = Path(code.co_filename)
    if not code.co_flags & inspect.CO_OPTIMIZED or not path.is_relative_to(ROOT):
        return None
    return path.relative_to(ROOT).as_posix()


def calls_of_plan() -> tuple[set[Call], set[str]]:
    """The calls between files of `magicdec plan`, and the files that were entered before its configuration was
    chosen."""
    calls: set[Call] = set()
    entered: set[str] = set()
    before_choice: set[str] = set()

    def trace(frame: FrameType, event: str, _: Any) -> None:
        callee = file_of(frame.f_code)
        if callee is None:
            return
        if event == "return" and frame.f_code.co_name == "choose":
            before_choice.update(entered)
        if event != "call":
            return
        entered.add(callee)
        above = frame.f_back
        while above is not None and file_of(above.f_code) is None:
            above = above.f_back
        caller = None if above is None else file_of(above.f_code)
        if caller not in (None, callee):
            calls.add((str(caller), callee))

    sys.setprofile(trace)
    try:
        cli.main()
    except SystemExit:
        pass
    finally:
        sys.setprofile(None)
    return calls, before_choice


@pytest.fixture(scope="module")
def traced() -> tuple[set[Call], set[str]]:
    words = "plan --model qwen3-8b --hardware h100 --batch 8 --context 4k --gen-len 200"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["magicdec", *words.split()])
        return calls_of_plan()


def listed_files() -> list[str]:
    """The files of the way, in the order of reading, as docs/structure.md lists them."""
    text = STRUCTURE.read_text()
    walk = text.partition("## From a question to its answer")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([\w/.]+)`", walk, flags=re.MULTILINE)


def test_the_files_from_the_command_to_the_gamma_are_those_listed(
    traced: tuple[set[Call], set[str]],
) -> None:
    _, entered = traced
    way = {file for file in entered if file.startswith(ROOMS)} - ASIDES
    assert way == set(listed_files())
    assert len(way) <= 9


def test_calls_of_a_plan_go_one_way(traced: tuple[set[Call], set[str]]) -> None:
    calls, _ = traced
    callers: dict[str, set[str]] = {}
    for caller, callee in calls:
        if caller.startswith("perfmodel/") and callee.startswith("perfmodel/"):
            room = re.compile(r"perfmodel/(acceptance|drafting|kernels)/")
            if not (room.match(caller) and room.match(callee)):
                callers.setdefault(callee, set()).add(caller)
    assert list(TopologicalSorter(callers).static_order())


def test_a_plan_enters_the_planner_from_its_command_alone(
    traced: tuple[set[Call], set[str]],
) -> None:
    calls, _ = traced
    entries = {caller for caller, callee in calls if callee == "perfmodel/planner.py"}
    assert entries == {"commands/plan.py"}
