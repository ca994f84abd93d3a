"""Answers that take seconds: each made once in a process of its own, first come first served, for
as long as somebody waits for it.

Whoever asks is an asker: a page by the name that it sends, or one request by itself. A page asks
again and again, and is forgotten PATIENCE_S after its last question. A computation ends when no
asker is left, whether it runs or waits for its turn.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Hashable
from multiprocessing.connection import Connection
from typing import Any

from magicdec.errors import MagicdecError
from magicdec.explore.jobs import Job
from magicdec.progress import StepMessage

PATIENCE_S = 10.0
"""Time after which an asker that does not ask again is forgotten."""
POLL_S = 0.1
MOST_RUNNING = 4
MOST_WAITING = 64
"""Questions that are computed at once, each in a process of its own, and questions that may wait."""
REMEMBERED = 32
"""Answers that are kept for further questions."""
_processes: Any = multiprocessing.get_context("spawn")
if "forkserver" in multiprocessing.get_all_start_methods():
    _processes = multiprocessing.get_context("forkserver")
    # A fork of a process that has imported the planner and runs no thread answers a second sooner.
    _processes.set_forkserver_preload(["magicdec.explore.pasted"])


class WithdrawnError(MagicdecError):
    """The asker has withdrawn this question."""


class BusyError(MagicdecError):
    """Too many questions wait already."""


class FailedError(MagicdecError):
    """The process that planned ended without an answer."""


class Computation:
    """The answer of a job: waiting, running, or over."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.ahead = 0
        """Computations that run or wait before this one can run."""
        self.is_over = threading.Event()
        self._askers: dict[str, float] = {}
        self._doing = "reading the request"
        self._share = 0.0
        self._began: float | None = None
        self._answer: Any = None
        self._process: multiprocessing.process.BaseProcess | None = None

    @property
    def is_running(self) -> bool:
        return self._began is not None and not self.is_over.is_set()

    @property
    def has_failed(self) -> bool:
        return isinstance(self._answer, FailedError)

    @property
    def has_answer(self) -> bool:
        """Whether it has an answer, or the user's error, which stay true."""
        return self._answer is not None and not self.has_failed

    @property
    def doing(self) -> str:
        if self._began is None and self.ahead:
            others = (
                "1 other question"
                if self.ahead == 1
                else f"{self.ahead} other questions"
            )
            return f"waiting for {others}"
        return self._doing

    @property
    def share(self) -> float:
        return self._share

    @property
    def left_s(self) -> float | None:
        """Seconds that are left at the pace so far; None: not known yet."""
        if self._began is None or self._share <= 0.0:
            return None
        passed = time.monotonic() - self._began
        return passed / self._share - passed

    def join(self, asker: str, *, lasting_s: float) -> None:
        """Somebody waits for the answer, for so long at least."""
        self._askers[asker] = time.monotonic() + lasting_s

    def renew(self, asker: str, *, lasting_s: float) -> bool:
        """Whether the asker has not left; it waits so long again."""
        if asker not in self._askers:
            return False
        self.join(asker, lasting_s=lasting_s)
        return True

    def leave(self, asker: str) -> bool:
        """Whether the asker waited until now."""
        return self._askers.pop(asker, None) is not None

    @property
    def is_wanted(self) -> bool:
        now = time.monotonic()
        return any(until > now for until in list(self._askers.values()))

    def answer(self) -> Any:
        """The answer; None where it is not made yet. Raises MagicdecError as the planner does, and
        WithdrawnError where it ended without an answer since nobody waited.
        """
        if not self.is_over.is_set():
            return None
        if self._answer is None:
            raise WithdrawnError("this question was withdrawn; ask again to begin anew")
        if isinstance(self._answer, MagicdecError):
            raise self._answer
        return self._answer

    def run(self) -> None:
        """Runs until the answer is there, or nobody waits for it any more."""
        messages, sender = _processes.Pipe(duplex=False)
        self._began = time.monotonic()
        self._process = _processes.Process(
            target=_answer, args=(self.job, sender), daemon=True
        )
        self._process.start()
        sender.close()
        while self.is_wanted and not self.is_over.is_set():
            if not messages.poll(POLL_S):
                continue
            try:
                message = messages.recv()
            except (EOFError, OSError):
                if self.is_over.is_set() or not self.is_wanted:
                    break  # it was ended here, since nobody waits any more
                message = self._failure()
            if not isinstance(message, tuple):
                self._answer = message
                break
            self._doing, self._share = message
        self.stop()
        messages.close()

    def _failure(self) -> FailedError:
        """Why the process ended without an answer."""
        assert self._process is not None
        self._process.join(POLL_S)
        code = self._process.exitcode
        if code is not None and code < 0:
            reason = f"was ended by signal {-code}, perhaps for want of memory"
        else:
            reason = "failed; its traceback stands in this server's output"
        return FailedError(f"the process that plans {reason}; ask again to begin anew")

    def stop(self) -> None:
        """Ends the process, and all waiting for it."""
        if self._process is not None:
            self._process.terminate()
        self.is_over.set()


class Computations:
    """Computations by what they answer: at most MOST_RUNNING run, and the next in turn follows."""

    def __init__(self) -> None:
        self._by_state: dict[Hashable, Computation] = {}
        """In the order of their first question."""
        self._lock = threading.Lock()

    def of(
        self,
        state: Hashable,
        job: Callable[[], Job],
        *,
        asker: str,
        lasting_s: float,
    ) -> Computation:
        """The computation of a state, which the asker joins; begun or queued if there is none.

        Raises BusyError where too many wait already.
        """
        with self._lock:
            computation = self._by_state.get(state)
            if computation is not None and computation.is_over.is_set():
                if computation.has_failed and computation.leave(asker):
                    return computation  # whoever waited hears of it; the next question begins anew
                del self._by_state[state]
                if computation.has_answer:
                    self._by_state[state] = computation  # remembered as the newest
                else:
                    computation = None
            if computation is None:
                computation = self._queued(state, job())
            computation.join(asker, lasting_s=lasting_s)
            self._start_next()
            return computation

    def leave(self, state: Hashable, asker: str) -> None:
        """The asker waits no more; a computation that nobody waits for ends."""
        with self._lock:
            computation = self._by_state.get(state)
            if computation is None:
                return
            computation.leave(asker)
            if not computation.is_wanted and not computation.is_over.is_set():
                computation.stop()
            self._start_next()

    def _queued(self, state: Hashable, job: Job) -> Computation:
        unfinished = [
            each for each in self._by_state.values() if not each.is_over.is_set()
        ]
        if len(unfinished) >= MOST_RUNNING + MOST_WAITING:
            raise BusyError(
                f"{len(unfinished)} questions wait already; ask again later"
            )
        computation = Computation(job)
        self._by_state[state] = computation
        return computation

    def _start_next(self) -> None:
        """Starts the next computations, and forgets the oldest answers. Called under the lock."""
        unfinished = self._unfinished()
        waiting = [
            computation for computation in unfinished if not computation.is_running
        ]
        free = MOST_RUNNING - (len(unfinished) - len(waiting))
        for computation in waiting:
            if not computation.is_wanted:
                computation.stop()
            elif free > 0:
                free -= 1
                self._begin(computation)
        for ahead, computation in enumerate(self._unfinished()):
            computation.ahead = ahead
        over = []
        for state, computation in self._by_state.items():
            if computation.is_over.is_set():
                over.append(state)
        for state in over[: max(len(over) - REMEMBERED, 0)]:
            del self._by_state[state]

    def _unfinished(self) -> list[Computation]:
        """The computations without an answer, in the order of their first question."""
        unfinished = []
        for computation in self._by_state.values():
            if not computation.is_over.is_set():
                unfinished.append(computation)
        return unfinished

    def _begin(self, computation: Computation) -> None:
        computation._began = time.monotonic()
        threading.Thread(target=self._run, args=(computation,), daemon=True).start()

    def _run(self, computation: Computation) -> None:
        try:
            computation.run()
        finally:
            computation.is_over.set()
            with self._lock:
                self._start_next()


def _answer(job: Job, sender: Connection) -> None:
    """Sends (what is being done, share done) over and over, then the answer or the user's error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()

    def tell(message: str) -> None:
        if isinstance(message, StepMessage):
            sender.send((str(message), message.done / message.total))

    try:
        sender.send(job(tell))
    except MagicdecError as error:
        sender.send(error)


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
