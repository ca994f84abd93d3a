"""Faults on the way of what writes: one line, exit code 2, the earlier file whole, and nothing beside it."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.processes import Program

RECORDS = Path(__file__).resolve().parents[2] / "results" / "demo-2-cores.jsonl"
QUICK = ("--batch", "8", "--context", "2048", "--gamma", "3", "--draft-budget", "256")
ROOM = 100
"""Bytes of a file for which there is room."""
CAPABILITY_VERSION, CAP_DAC_OVERRIDE = 0x20080522, 1
"""Of linux/capability.h."""
WRITERS: dict[str, tuple[str, ...]] = {
    "a record": ("plan", *QUICK, "--record", "{file}"),
    "a figure": ("plot", "scatter", str(RECORDS), "-o", "{file}"),
    "an export": ("export", "vllm", "{plan}", "-o", "{file}"),
}
SUFFIX = {"a record": "jsonl", "a figure": "svg", "an export": "sh"}


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    from magicdec.perfmodel.planner import PlanRequest, make_plan

    path.write_text(
        make_plan(
            PlanRequest(batch_sizes=(8,), context_lens=(2048,), draft="eagle")
        ).to_json()
    )
    return path


def outcome(what: str, file: Path, plan: Path, program: Program) -> tuple[int, str]:
    """Exit code and error output of the command that writes this."""
    done = program(*(each.format(file=file, plan=plan) for each in WRITERS[what]))
    return done.returncode, done.stderr


@contextmanager
def full_disk(room: int = ROOM) -> Iterator[None]:
    """No file can grow beyond so many bytes: what is longer is cut short first, and then fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def held_to_permissions() -> Iterator[None]:
    """Root too cannot write where a mode forbids it, but still enters and reads every directory (Linux)."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    # (effective, permitted, inheritable) of the first 32 capabilities and of the others
    given = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, given) == 0
    fewer = (ctypes.c_uint32 * 6)(*given)
    fewer[0] &= ~(1 << CAP_DAC_OVERRIDE)
    assert libc.capset(header, fewer) == 0
    try:
        yield
    finally:
        assert libc.capset(header, given) == 0


@pytest.mark.parametrize("what", WRITERS)
def test_a_full_disk(
    what: str, plan_file: Path, tmp_path: Path, program: Program
) -> None:
    file = tmp_path / f"out.{SUFFIX[what]}"
    assert outcome(what, file, plan_file, program)[0] == 0
    before = file.read_bytes()
    assert len(before) > ROOM
    with full_disk(
        len(before) + 40 if what == "a record" else ROOM
    ):  # records are appended: part of one has room
        code, line = outcome(what, file, plan_file, program)
    assert (code, line.count("\n")) == (2, 1), line
    assert line.startswith("magicdec: cannot ")
    assert str(file) in line
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="a device that is always full is needed"
)
def test_a_full_disk_behind_the_standard_output() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "magicdec", "models"]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (
        2,
        "magicdec: cannot write the output: No space left on device\n",
    )


def test_a_reader_that_is_gone() -> None:
    """No message, and a failing exit code, as of other programs."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "magicdec", "models"]
    done = subprocess.run(
        command, stdout=writes, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("what", WRITERS)
def test_a_read_only_directory(
    what: str, plan_file: Path, tmp_path: Path, program: Program
) -> None:
    """Once with a file in it and once without."""
    directory = Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR", "/tmp")))
    plan = Path(shutil.copy(plan_file, directory / "plan.json"))
    name = f"out.{SUFFIX[what]}"
    assert outcome(what, tmp_path / name, plan, program)[0] == 0
    try:
        for there in (False, True):
            if there:
                directory.chmod(0o700)
                shutil.copy(tmp_path / name, directory / name)
                (directory / name).chmod(0o444)
            directory.chmod(0o555)
            with held_to_permissions():
                code, line = outcome(what, directory / name, plan, program)
            assert (code, line.count("\n")) == (2, 1), line
            assert line.startswith("magicdec: cannot ")
            assert sorted(p.name for p in directory.iterdir()) == sorted(
                ["plan.json"] + [name] * there
            )
    finally:
        with suppress(OSError):
            directory.chmod(0o700)
        shutil.rmtree(directory)
