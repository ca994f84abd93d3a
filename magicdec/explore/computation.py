"""A plan that takes seconds, made in a process of its own for as long as somebody asks for it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection

from magicdec.errors import MagicdecError
from magicdec.perfmodel.plan.planner import Plan, PlanRequest, plan
from magicdec.progress import Step

PATIENCE_S = 10.0
"""Time after which a computation that nobody asks for ends."""
POLL_S = 0.1
_spawn = multiprocessing.get_context("spawn")


class Computation:
    """The planner's answer to a request, on its way."""

    def __init__(self, request: PlanRequest) -> None:
        self.doing, self.share, self.is_stopped = "reading the request", 0.0, False
        self._began = self._wanted_until = time.monotonic()
        self._total_s: float | None = None
        self._found: Plan | Exception | None = None
        self._is_over = threading.Event()
        self._messages, sender = _spawn.Pipe(duplex=False)
        self._process = _spawn.Process(target=_answer, args=(request, sender), daemon=True)
        self._process.start()
        sender.close()
        threading.Thread(target=self._follow, daemon=True).start()

    def answer(self, *, wait_s: float = 0.0) -> Plan | None:
        """The plan; None where it is not made within `wait_s`. Raises MagicdecError as the planner does."""
        self._wanted_until = max(self._wanted_until, time.monotonic() + wait_s)
        self._is_over.wait(wait_s)
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    @property
    def left_s(self) -> float | None:
        """Seconds that are left at the pace so far; None: not known yet."""
        return None if self._total_s is None else max(self._began + self._total_s - time.monotonic(), 0.0)

    @property
    def is_running(self) -> bool:
        return not (self.is_stopped or self._is_over.is_set())

    def stop(self) -> None:
        self.is_stopped = True

    def _follow(self) -> None:
        while not self.is_stopped:
            if self._messages.poll(POLL_S):
                try:
                    message = self._messages.recv()
                except EOFError:
                    message = RuntimeError("the planner failed; its traceback stands above")
                if not isinstance(message, tuple):
                    self._found = message
                    break
                self.doing, self.share = message
                if self.share > 0:
                    self._total_s = (time.monotonic() - self._began) / self.share
            self.is_stopped = self.is_stopped or time.monotonic() > self._wanted_until + PATIENCE_S
        self._process.terminate()
        self._is_over.set()


def _answer(request: PlanRequest, sender: Connection) -> None:
    """Sends (what is being done, share done) over and over, then the plan or the user's error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()

    def tell(message: str) -> None:
        if isinstance(message, Step):
            sender.send((str(message), message.done / message.total))

    try:
        sender.send(plan(request, tell))
    except MagicdecError as error:
        sender.send(error)


def _end_with_the_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
