"""Records survive crashes, concurrent writers and torn lines, and identify their configuration."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import msgspec
import pytest

from magicdec.errors import StorageError
from magicdec.records import Record, append_record, current_environment, read_records


def make(batch_size: int, **changes: object) -> Record:
    base = Record(source="measured", model="embedded", batch_size=batch_size, context_len=128)
    return msgspec.structs.replace(base, **changes)


def test_records_round_trip_with_their_environment(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "r.jsonl"
    record = make(4, speedup=1.5, acceptance_by_position=[0.9, 0.8], environment=current_environment())
    append_record(file, record)
    append_record(file, make(8))
    assert read_records(file) == [record, make(8)]
    assert record.environment.versions["numpy"]


def test_key_depends_on_the_configuration_alone() -> None:
    assert make(4, speedup=1.0).key == make(4, speedup=2.0, notes=["x"]).key
    assert len({make(4).key, make(5).key, make(4, gamma=1).key, make(4, temperature=1.0).key}) == 4


def test_torn_last_line_is_set_aside_and_the_rest_is_read(tmp_path: Path) -> None:
    """A power cut leaves half a line: earlier records are read, later ones are appended apart from it."""
    file = tmp_path / "r.jsonl"
    append_record(file, make(1))
    with file.open("ab") as handle:
        handle.write(b'{"source":"measured","model":"emb')
    append_record(file, make(2))
    with pytest.warns(UserWarning, match="line"):
        assert [r.batch_size for r in read_records(file)] == [1, 2]


def _append_many(path: Path, start: int) -> None:
    for i in range(50):
        append_record(path, make(start + i, notes=["x" * 5000]))


def test_two_processes_appending_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_append_many, args=(file, start)) for start in (1, 1001)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(r.batch_size for r in read_records(file)) == [*range(1, 51), *range(1001, 1051)]


def test_unwritable_and_unreadable_files_are_one_line_errors(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot append"):
        append_record(Path("/dev/full/x.jsonl"), make(1))
    with pytest.raises(StorageError, match="cannot append"):
        append_record(Path("/dev/full"), make(1))
    with pytest.raises(StorageError, match="cannot read"):
        read_records(tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl").write_text("not json\n")
    with pytest.raises(StorageError, match="no readable record"):
        read_records(tmp_path / "bad.jsonl")
