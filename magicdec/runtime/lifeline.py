"""Ends a rank with the process that started it, however that one ended. Needs no torch: a rank holds on before it loads
anything.

On Linux the kernel kills the rank at its parent's death, whatever the rank is doing. Everywhere, a thread looks again
and again whether the parent is still there: a child whose parent has died is given another one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

HEARTBEAT_S = 1.0
_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
_DEFERRED = (signal.SIGINT, signal.SIGTERM)


def end_with_parent(parent: int, *, ask_kernel: bool = True) -> None:
    """From now on this process ends within seconds of `parent`, the process that started it; at once if that is gone.
    An interrupt or a termination ends it at once too, and without a word: its parent hears of it.

    The kernel acts at the end of the *thread* that started this process, so that one must outlast its children.
    """
    for number in _DEFERRED:
        signal.signal(number, signal.SIG_DFL)
    if ask_kernel and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    _check(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _DEFERRED)
    threading.Thread(target=_watch, args=(parent,), name="lifeline", daemon=True).start()


def end_with_torchrun() -> None:
    """The same for a rank that torchrun started. Should it have died before this call, then the store where ranks meet,
    which it serves, is gone too."""
    end_with_parent(os.getppid())
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
        except ConnectionRefusedError:
            _end()


def _watch(parent: int) -> None:
    while True:
        time.sleep(HEARTBEAT_S)
        _check(parent)


def _check(parent: int) -> None:
    if os.getppid() != parent:
        _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Interrupts and terminations that come within the block are handled at its end, when all processes that it starts
    are known to those that must end them. A process started within hears of an interrupt in `end_with_parent` first."""
    if threading.current_thread() is not threading.main_thread():  # where no signal is handled
        yield
        return
    pending: list[int] = []
    handlers = {number: signal.signal(number, lambda got, _: pending.append(got)) for number in _DEFERRED}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a new process inherits it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for caught in pending:
            signal.raise_signal(caught)
