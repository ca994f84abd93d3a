"""Records survive crashes, concurrent writers and torn lines, and identify their configuration."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from magicdec.errors import StorageError
from magicdec.files import check_apart, check_writable, write_atomic
from magicdec.reports.terminal import print_run
from magicdec.schema.record import (
    Record,
    append_record,
    check_records_file,
    current_environment,
    read_records,
    summary,
)

ROOT = Path(__file__).parents[1]


def make(batch_size: int, **changes: object) -> Record:
    base = Record(
        source="measured", model="embedded", batch_size=batch_size, context_len=128
    )
    return msgspec.structs.replace(base, **changes)


def test_records_round_trip_with_their_environment(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "r.jsonl"
    record = make(
        4,
        speedup=1.5,
        acceptance_by_position=[0.9, 0.8],
        environment=current_environment(),
    )
    append_record(file, record)
    append_record(file, make(8))
    assert read_records(file) == [record, make(8)]
    assert record.environment.versions["numpy"]


def test_an_environment_names_the_commit_of_its_checkout() -> None:
    found = ""
    if (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        found = found.stdout[:12].strip()
    assert current_environment().commit == found


def test_key_depends_on_the_configuration_alone() -> None:
    assert make(4, speedup=1.0).key == make(4, speedup=2.0, notes=["x"]).key
    assert (
        len(
            {
                make(4).key,
                make(5).key,
                make(4, gamma=1).key,
                make(4, temperature=1.0).key,
            }
        )
        == 4
    )


def test_a_spread_over_devices_is_part_of_the_key_and_earlier_keys_stay() -> None:
    record = Record(
        source="analytical",
        model="llama-3.1-8b",
        batch_size=4,
        context_len=1000,
        tp_size=2,
    )
    assert (
        record.key == "44716d9f22b4b58b"
    )  # as before records knew of stages and groups
    spreads = [
        {},
        {"pp_size": 2},
        {"dp_size": 2},
        {"dp_size": 2, "ep_size": 4},
        {"ep_size": 2},
    ]
    assert len(
        {msgspec.structs.replace(record, **spread).key for spread in spreads}
    ) == len(spreads)
    assert msgspec.structs.replace(record, pp_size=3, dp_size=4).num_devices == 24


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
    workers = [
        context.Process(target=_append_many, args=(file, start)) for start in (1, 1001)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(r.batch_size for r in read_records(file)) == [
        *range(1, 51),
        *range(1001, 1051),
    ]


@pytest.mark.parametrize(
    "content",
    [b"# notes\n", b"{}\n", b"\x00\xff\xfe\n\x80", b'{"a": 1}\n[]\n', b"x" * 200_000],
    ids=range(5),
)
def test_a_file_of_others_is_refused_and_stays(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_bytes(content)
    for refuse in (
        lambda: append_record(file, make(1)),
        lambda: check_records_file(file),
    ):
        with pytest.raises(StorageError, match="left as it is"):
            refuse()
    assert file.read_bytes() == content


def test_files_of_ours_are_known_whatever_else_is_in_them(tmp_path: Path) -> None:
    """A torn first line, binary garbage between, a record of a later release."""
    file = tmp_path / "r.jsonl"
    later = b'{"schema_version": 99, "source": "measured", "model": "m", "batch_size": "many"}\n'
    for before in (
        later,
        b'{"source":"mea\n\xff\x00\n' + msgspec.json.encode(make(1)) + b"\n",
        b"",
    ):
        file.write_bytes(before)
        check_records_file(file)
        append_record(file, make(2))
        assert file.read_bytes().startswith(before)
        with (
            pytest.warns(UserWarning, match="line")
            if before
            else contextlib.nullcontext()
        ):
            assert read_records(file)[-1] == make(2)


def test_two_outputs_are_not_one_file(tmp_path: Path) -> None:
    """By the same path, a link of either kind, or a name that some systems do not tell apart."""
    one = tmp_path / "one.jsonl"
    one.write_text("")
    (tmp_path / "link").symlink_to(one)
    (tmp_path / "hard").hardlink_to(one)
    for other in (
        one,
        tmp_path / "." / "one.jsonl",
        tmp_path / "link",
        tmp_path / "hard",
        tmp_path / "ONE.jsonl",
    ):
        with pytest.raises(StorageError, match="--b and --a are one file"):
            check_apart({"--a": one, "--b": other})
    check_apart({"--a": one, "--b": tmp_path / "two", "--c": None})


def test_a_link_stays_one_and_what_it_points_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there.txt")
    write_atomic(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there.txt").read_text() == "text"
    (tmp_path / "round").symlink_to(tmp_path / "round")
    with pytest.raises(StorageError, match="cannot write"):
        write_atomic(tmp_path / "round", "text")
    write_atomic(Path("/dev/null"), "text")


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not hold for root")
def test_a_read_only_directory_is_said_before_the_work(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    for check in (check_writable, check_records_file):
        with pytest.raises(StorageError, match="not a writable directory"):
            check(tmp_path / "r.jsonl")
    tmp_path.chmod(0o700)


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


@pytest.mark.parametrize(
    ("swing", "is_busy"), [(None, False), (0.4, False), (1.3, True)]
)
def test_a_record_of_a_busy_machine_says_so_first(
    swing: float | None, is_busy: bool
) -> None:
    """The worst repetition counts: one that was disturbed spoils the ratio of two runs."""
    rows = [
        make(1, repetition=0, speedup=1.4, reference_swing=0.1),
        make(1, repetition=1, speedup=0.7, reference_swing=swing),
    ]
    record = summary(rows)
    console = Console(width=200, record=True, file=io.StringIO())
    print_run([record], console)
    lines = console.export_text().splitlines()
    assert ("busy machine" in lines[0]) == is_busy
    assert [note for note in record.notes if "busy machine" in note] == record.notes[:1]
    assert bool(record.notes) == is_busy
