"""Every surface under seeded damage (tests/fuzz/surfaces.py), and faults planted for the fuzzers to find: tracebacks,
escape sequences, work that grows faster than its input, records that are lost. Wrong tokens: tests/runtime/flips.py.

MAGICDEC_FUZZ multiplies the cases; their counts are printed at the end (conftest.py).
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from magicdec import files
from magicdec.errors import StorageError
from magicdec.schema.record import Record, append_record, decode_record, read_rows
from tests.fuzz.damage import NASTY
from tests.fuzz.surfaces import (
    RECORDS,
    SURFACES,
    Case,
    Memory,
    Server,
    calibration,
    damaged_files,
    faults,
    judge,
    options,
    scrape,
)

MANY = int(os.environ.get("MAGICDEC_FUZZ", "1"))
COUNT = 4
"""Of the damage to each thing that a surface reads; make test-exhaustive has four times as much."""


@pytest.mark.slow
@pytest.mark.parametrize("surface", SURFACES)
def test_damage_is_answered_or_refused_in_one_line(
    surface: str, tmp_path: Path
) -> None:
    if surface in ("plans", "shards of weights"):
        pytest.importorskip("torch")
    assert faults(SURFACES[surface](tmp_path, COUNT * MANY), surface) == []


def test_nasty_values_are_of_every_kind() -> None:
    """So that the seeds do not quietly test one kind only."""
    assert {type(value) for value in NASTY} == {
        type(None),
        bool,
        int,
        float,
        str,
        list,
        dict,
    }


@pytest.mark.filterwarnings("ignore:.*set aside unreadable")
def test_planted_tracebacks_and_escape_sequences_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that does not catch, and text that is printed as it is."""
    assert faults(damaged_files(tmp_path, 1)) == []
    with monkeypatch.context() as planted:
        planted.setattr(
            files,
            "_document",
            lambda path, what, form, decode, error: decode(path.read_text()),
        )
        assert any(
            fault.startswith("a traceback")
            for fault in faults(damaged_files(tmp_path, 1))
        )
    with monkeypatch.context() as planted:
        for module in ("cli", "errors", "reports.text"):
            planted.setattr(f"magicdec.{module}.quoted", str)
        assert any(
            fault.startswith("an escape sequence")
            for fault in faults(options(tmp_path, 8))
        )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a peak")
def test_memory_that_a_case_takes_is_found_and_what_came_before_is_not() -> None:
    """Freed blocks of so many MiB go back to the system at once."""
    earlier = bytearray(300 << 20)
    earlier[:: 1 << 12] = b"1" * (300 << 8)
    del earlier
    memory = Memory()
    assert memory.added_mib() < 100
    taken = bytearray(200 << 20)
    taken[:: 1 << 12] = b"1" * (200 << 8)
    del taken
    assert 199 < memory.added_mib() < 300


BETWEEN = 8.0
"""Four times the input is four times the work where it grows in proportion, and sixteen times where by the square."""


@cache  # asked at every call
def is_ours(file: str) -> bool:
    return bool({"magicdec", "fuzz"} & set(Path(file).parts[-5:]))


def lines_of(case: Case) -> int:
    """How many lines of ours a command runs: its work, whatever else the machine does."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not is_ours(frame.f_code.co_filename):
            return None
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        assert judge(case) == (0, "")
    finally:
        sys.settrace(None)
    return count


def growing(folder: Path, number: int) -> Iterator[Case]:
    """Documents with `number` entries each, of which a caller may take the first alone."""
    rows, before, after = (
        folder / name for name in ("records.jsonl", "before.txt", "after.txt")
    )
    rows.write_bytes(
        b"".join(RECORDS.read_bytes().splitlines(keepends=True)[:1] * number)
    )
    yield Case("records", ("records", "ls", str(rows), "--format", "json"))
    for factor, file in ((1, before), (2, after)):
        models = [scrape(accepted=[80.0 * factor], drafts=100.0 * factor, tokens=600.0 * factor, model=f"m{each}")
                  for each in range(number)]  # fmt: skip
        file.write_text("".join(models))
    yield Case(
        "metrics",
        ("observe", str(before), str(after), "--draft", "ngram", "--target", "m0"),
    )


def growth(folder: Path, few: int, documents: int = 2) -> dict[str, float]:
    """How much more work four times as many entries are, beyond the work for hardly any. The first commands of a
    process load modules besides."""
    for case in islice(growing(folder, 1), documents):
        judge(case)
    least, less, more = (
        {
            case.what: lines_of(case)
            for case in islice(growing(folder, number), documents)
        }
        for number in (1, few, 4 * few)
    )
    return {
        what: (more[what] - least[what]) / max(less[what] - least[what], 1000)
        for what in less
    }


def test_work_grows_with_its_input_and_planted_squares_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max(growth(tmp_path, 8).values()) < BETWEEN
    seen: list[bytes] = []

    def slow(line: bytes) -> Record:
        """Goes through all lines before this one."""
        seen.append(line)
        for _ in seen * 100:
            pass
        return decode_record(line)

    monkeypatch.setattr("magicdec.schema.record.decode_record", slow)
    assert growth(tmp_path, 8, documents=1)["records"] > BETWEEN


def lost_records(
    folder: Path, append: Callable[[Path, Record], None], count: int
) -> list[int]:
    """Cuts of a records file, as a kill leaves it, after which a whole line, or the next run's, cannot be read."""
    data, file = RECORDS.read_bytes(), folder / "records.jsonl"
    lines = data.splitlines(keepends=True)[:4]
    data, lost, rng = b"".join(lines), [], random.Random(17)
    new = Record(source="measured", model="new", batch_size=1, context_len=128)
    for cut in [
        0,
        len(lines[0]) - 1,
        len(lines[0]),
        *(rng.randrange(len(data)) for _ in range(count)),
    ]:
        file.write_bytes(data[:cut])
        append(file, new)
        whole = [
            decode_record(line)
            for line in data[:cut].splitlines(keepends=True)
            if line.endswith(b"\n")
        ]
        try:
            kept = read_rows(file)
        except StorageError:
            kept = []
        if not kept or kept[: len(whole)] != whole or kept[-1] != new:
            lost.append(cut)
    return lost


@pytest.mark.filterwarnings("ignore:.*set aside unreadable")
def test_a_file_that_was_cut_loses_the_last_line_at_most_and_planted_losses_are_found(
    tmp_path: Path,
) -> None:
    """Cut at every place where a kill may leave it."""

    def careless(path: Path, record: Record) -> None:
        good = path.with_suffix(".new")
        good.unlink(missing_ok=True)
        append_record(good, record)
        path.write_bytes(path.read_bytes() + good.read_bytes())

    assert lost_records(tmp_path, append_record, 60) == []
    assert len(lost_records(tmp_path, careless, 60)) > 30


def test_a_termination_of_a_calibration_keeps_what_was_measured(tmp_path: Path) -> None:
    """Of a server, in the middle of its loads: the loads are in a file, and the line says what ended it."""
    server = Server()
    try:
        command, answers = calibration(server.address, tmp_path)
        requests: list[int] = []

        def stream(body: bytes) -> bytes:
            requests.append(len(body))
            if len(requests) == 12:
                os.kill(os.getpid(), signal.SIGTERM)
            return answers["/v1/completions"](body)

        server.answers = answers | {"/v1/completions": stream}
        assert judge(Case("terminated", command)) == (2, "")
    finally:
        server.close()
    kept = json.loads((tmp_path / "server.loads.json").read_text())
    assert 0 < len(kept["loads"]) < 9
