"""Real processes for tests: started, watched through a terminal, and ended with the test whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple


class Done(NamedTuple):
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def refusal(self) -> str:
        """The one line that says why nothing was done."""
        assert self.returncode == 2, self
        assert not self.stdout
        assert self.stderr.startswith("magicdec: "), self.stderr
        assert self.stderr.endswith("\n")
        assert self.stderr.count("\n") == 1, self.stderr
        return self.stderr.removeprefix("magicdec: ").rstrip("\n")


Program = Callable[..., Done]


def magicdec(*arguments: str, launcher: tuple[str, ...] = ("-m",)) -> Done:
    """Starts the program in a process of its own, and waits for its end."""
    command = [sys.executable, *launcher, "magicdec", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def _end_with_tests() -> None:
    """Linux: the kernel kills the command if the tests are killed, before they can end it themselves."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Watched:
    """A running command whose error output is a terminal, so that it shows its progress."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._terminal, its_end = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=its_end,
            start_new_session=True,
            preexec_fn=_end_with_tests,  # noqa: PLW1509 - one system call, and no lock
        )
        os.close(its_end)
        self.shown = ""
        self._descendants: set[int] = set()

    def wait_for_text(self, text: str) -> None:
        """Waits until the command has shown it. Fails where the command ends first."""
        while text not in self.shown:
            has_ended = self.process.poll() is not None
            if not self._read(0.2):
                assert not has_ended, f"ended without showing {text!r}: {self.shown}"

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._terminal], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._terminal, 4096)
        except OSError:  # Linux: the last process that had the other end is gone
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)

    def wait_for_descendants(self, marker: str, count: int) -> list[int]:
        """Waits until so many processes below the command have the marker in their command line: theirs numbers."""
        while len(found := self.descendants(marker)) < count:
            assert self.process.poll() is None, self.shown
            self._read(0.02)
        return found

    def descendants(self, marker: str = "") -> list[int]:
        """In the order of their start."""
        rows = _processes()
        below = {self.process.pid}
        for pid, (parent, _) in sorted(rows.items()):
            if parent in below:
                below.add(pid)
        self._descendants |= below
        return [
            pid for pid in sorted(below - {self.process.pid}) if marker in rows[pid][1]
        ]

    def wait(self) -> int:
        """The exit code; what is shown until then is kept."""
        while self.process.poll() is None:
            self._read(0.1)
        while self._read(0.0):
            pass
        return self.process.returncode

    def end(self) -> None:
        if self.process.poll() is None:
            self.descendants()
        for pid in self._descendants | {self.process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._terminal)


@contextlib.contextmanager
def watched(*command: str) -> Iterator[Watched]:
    """A running command, which is ended with the block at the latest, and all that it started with it."""
    found = Watched(command)
    try:
        yield found
    finally:
        found.end()


def _processes() -> dict[int, tuple[int, str]]:
    """(parent, command line) of every process."""
    rows = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int(_stat(int(entry.name))[1])
                command = (
                    (entry / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                )
            except (OSError, IndexError):
                continue
            rows[int(entry.name)] = (parent, command)
    return rows


def command_line(pid: int) -> str:
    """Empty for a process that is gone."""
    return _processes().get(pid, (0, ""))[1]


def _stat(pid: int) -> list[str]:
    """The fields behind the command's name: state, parent, …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody asked for does not."""
    try:
        return _stat(pid)[0] != "Z"
    except (OSError, IndexError):
        return False


def still_alive_after(seconds: float, pids: list[int]) -> list[int]:
    """Those that run on for so long."""
    deadline_s = time.monotonic() + seconds
    while (
        left := [pid for pid in pids if is_alive(pid)]
    ) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left
