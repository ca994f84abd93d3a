"""Starts one process per rank on this machine, and ends them all when one fails or when their
parent ends.

This module loads no torch: a rank first runs `_enter`, which ties it to its parent and takes its
cores before it loads torch, which takes seconds and reads the environment.

torchrun's own agent (torch.distributed.launcher) would not do: it loads torch before a rank's cores
can be set or its parent be watched, leaves ranks that wait in a collective behind when it is
killed, passes errors on as text, and orders them by whole seconds, in which one rank's failure and
its echo in the others look the same.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from magicdec.errors import MagicdecError

GRACE_S = 5.0
KILLED_S = 1.0
"""Time in which killed ranks are waited for: on a loaded machine they may take longer to give their
memory back.
"""
ECHO_S = 1.0
"""Time after one rank's failure in which another's, which may be its cause, is waited for."""
HEARTBEAT_S = 1.0
SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
ENDING = (signal.SIGINT, signal.SIGTERM)
LOOPBACK = "127.0.0.1"
T = TypeVar("T")


class RankError(RuntimeError):
    """A rank failed; the message is that rank's traceback."""


class RankDiedError(MagicdecError):
    """A rank's process ended without a word: killed, most often for want of memory, or crashed."""


def launch_ranks(
    function: Callable[..., T],
    tp_size: int,
    *arguments: Any,
    device_type: str = "cpu",
) -> T:
    """Runs `function(tp, *arguments)` on `tp_size` ranks and returns what rank 0 returned.

    The function and its arguments must be picklable. With one rank it is simply called.

    Raises:
        MagicdecError: one that a rank raised, as it was.
        RankDiedError: a rank was killed, or crashed.
        RankError: any other failure of a rank. In each case all other ranks are ended.
    """
    if tp_size == 1:
        from magicdec.runtime.distributed import TensorParallel

        return function(TensorParallel(), *arguments)
    ranks: dict[Connection, SpawnProcess] = {}
    try:
        with _deferred_signals():
            _start(tp_size, pickle.dumps((function, arguments, device_type)), ranks)
        return _collect(ranks)
    finally:
        grace_s = GRACE_S
        if sys.exc_info()[0] is not None:
            grace_s = 0.0
        _join_within(grace_s, ranks.values())
        for process in ranks.values():
            process.kill()
        _join_within(KILLED_S, ranks.values())


def _join_within(seconds: float, processes: Iterable[SpawnProcess]) -> None:
    """Waits for the processes to end, all together no longer than this."""
    deadline_s = time.monotonic() + seconds
    for process in processes:
        left_s = deadline_s - time.monotonic()
        process.join(max(0.0, left_s))


def _start(tp_size: int, work: bytes, ranks: dict[Connection, SpawnProcess]) -> None:
    """Starts the ranks in order, each with the end of a pipe for its answer; one that has started
    is in `ranks`.
    """
    # with the first process otherwise, and it unblocks the signals deferred here
    resource_tracker.ensure_running()
    context = multiprocessing.get_context("spawn")
    # rank 0 takes over the open socket: a port that were only found free could be another
    # process's by the time it has loaded torch
    with socket.create_server((LOOPBACK, 0), backlog=tp_size) as meeting:
        world = {
            "WORLD_SIZE": tp_size,
            "LOCAL_WORLD_SIZE": tp_size,
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": meeting.getsockname()[1],
        }
        for rank in range(tp_size):
            receiver, sender = context.Pipe(duplex=False)
            variables = world | {"RANK": rank, "LOCAL_RANK": rank}
            place = {name: str(value) for name, value in variables.items()}
            listener = meeting if rank == 0 else None
            process = context.Process(
                target=_enter,
                args=(os.getpid(), place, listener, sender, work),
                daemon=True,
                name=str(rank),
            )
            process.start()
            # the child holds its own end: when it dies, the receiver sees the end of the file
            sender.close()
            ranks[receiver] = process


def _collect(ranks: dict[Connection, SpawnProcess]) -> Any:
    """Waits for every rank's answer. A user's error or a death is raised at once. Any other failure
    may be the echo of another rank's, whose end broke off a collective: of those that come within a
    moment, the earliest is raised."""
    waiting = list(ranks)
    result: Any = None
    failures: list[tuple[float, Exception]] = []
    while waiting and (answered := wait(waiting, timeout=ECHO_S if failures else None)):
        for receiver in answered:
            assert isinstance(receiver, Connection)
            waiting.remove(receiver)
            try:
                # from our own child process
                failed_at_s, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                raise _how_it_ended(ranks[receiver]) from None
            if isinstance(value, MagicdecError):
                raise value
            if failed_at_s is not None:
                failures.append((failed_at_s, value))
            elif ranks[receiver].name == "0":
                result = value
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]
    return result


def _how_it_ended(process: SpawnProcess) -> BaseException:
    """Describes the end of a rank that left without an answer. An interrupt of a rank is one of the
    run.
    """
    process.join(GRACE_S)
    code = process.exitcode
    died = f"rank {process.name} died: its process"
    if code == -signal.SIGINT:
        return KeyboardInterrupt()
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        if name == "SIGKILL":
            memory = "; the system does so when memory runs out"
        else:
            memory = ""
        return RankDiedError(f"{died} was ended by {name}{memory}")
    return RankDiedError(f"{died} ended with exit code {code} and no message")


@contextmanager
def _deferred_signals() -> Iterator[None]:
    """Handles interrupts and terminations that come within the block at its end, when all processes
    that it starts are known to those that must end them. A process started within hears of an
    interrupt in `end_with_parent` first."""
    # where no signal is handled
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    handlers = {
        number: signal.signal(number, lambda got, _: pending.append(got))
        for number in ENDING
    }
    # a new process inherits it
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for caught in pending:
            signal.raise_signal(caught)


def _enter(
    parent: int,
    place: dict[str, str],
    listener: socket.socket | None,
    sender: Connection,
    work: bytes,
) -> None:
    """Runs a rank: takes its place (torchrun's variables), calls the function that `work` holds
    with its arguments, and answers with the result or the failure. Rank 0 has the socket on which
    ranks meet."""
    end_with_parent(parent)
    os.environ.update(place)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    take_own_cores()
    try:
        # from our own parent process
        function, arguments, device_type = pickle.loads(work)
        import torch

        from magicdec.runtime.distributed import join_world, leave_world

        # the main module may have loaded torch before
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        tp = join_world(device_type, listener)
        value = function(tp, *arguments)
        answer = None
        if tp.rank == 0:
            answer = value
        sender.send_bytes(pickle.dumps((None, answer)))
        leave_world()
        return
    except MagicdecError as error:
        failure: Exception = error
    except BaseException:
        failure = RankError(f"rank {place['RANK']}: {traceback.format_exc()}")
    sender.send_bytes(pickle.dumps((time.monotonic(), failure)))
    sys.stdout.flush()
    sys.stderr.flush()
    # an orderly exit would wait for collectives that no other rank will join
    os._exit(1)


def take_own_cores() -> None:
    """Keeps a rank to its share of this machine's cores, with its threads bound to them. Before
    torch is imported.

    With fewer cores than ranks, threads are not bound: those of all ranks would run on the first
    core.
    """
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores: list[int] = []
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    size = len(cores) // num_ranks
    if num_ranks > 1:
        num_cores = os.cpu_count() or 1
        num_threads = size or max(1, num_cores // num_ranks)
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
    if size:
        first = rank * size
        os.sched_setaffinity(0, cores[first : first + size])
        os.environ.setdefault("OMP_PROC_BIND", "true")
    else:
        os.environ["OMP_PROC_BIND"] = "false"


def end_with_parent(parent: int, *, ask_kernel: bool = True) -> None:
    """Makes this process end within seconds of `parent`, the process that started it; at once if
    that is gone. An interrupt or a termination ends it at once too, and without a word: its parent
    hears of it.

    On Linux the kernel kills it, whatever it is doing, at the end of the *thread* that started it,
    which must outlast it. Everywhere, a thread looks again and again: a child whose parent has died
    is given another one.
    """

    def check() -> None:
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch() -> None:
        while True:
            time.sleep(HEARTBEAT_S)
            check()

    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    if ask_kernel and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    check()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def end_with_torchrun() -> None:
    """Makes a rank that torchrun started end with it. Should torchrun have died before this call,
    then the store where ranks meet, which it serves, is gone too."""
    end_with_parent(os.getppid())
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        try:
            socket.create_connection(
                (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            ).close()
        except ConnectionRefusedError:
            os.kill(os.getpid(), signal.SIGKILL)
