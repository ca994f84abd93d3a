"""Starts one process per rank on this machine, and ends them all when one fails."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NoReturn, TypeVar

import torch

from magicdec.errors import MagicdecError
from magicdec.runtime.affinity import cores_of_rank
from magicdec.runtime.distributed import TensorParallel, join_world, leave_world
from magicdec.runtime.lifeline import deferred_signals
from magicdec.runtime.rank_entry import enter

GRACE_S = 5.0
ECHO_S = 1.0
"""How long after one rank's failure another's, which may be its cause, is waited for."""
T = TypeVar("T")


class RankError(RuntimeError):
    """A rank failed; the message is that rank's traceback."""


class RankDiedError(MagicdecError):
    """A rank's process ended without a word: killed, most often for want of memory, or crashed."""


def launch(function: Callable[..., T], tp_size: int, *arguments: Any, device_type: str = "cpu") -> T:
    """Runs `function(tp, *arguments)` on `tp_size` ranks and returns what rank 0 returned.

    The function and its arguments must be picklable. With one rank it is simply called.

    Raises:
        MagicdecError: one that a rank raised, as it was.
        RankDiedError: a rank was killed, or crashed.
        RankError: any other failure of a rank. In each case all other ranks are ended.
    """
    if tp_size == 1:
        return function(TensorParallel(), *arguments)
    receivers: list[Connection] = []
    processes: list[SpawnProcess] = []
    try:
        with deferred_signals():
            _start(tp_size, pickle.dumps((_run_rank, function, arguments, device_type)), receivers, processes)
        return _collect(receivers, processes)
    finally:
        _end(processes, grace_s=0.0 if sys.exc_info()[0] else GRACE_S)


def _end(processes: list[SpawnProcess], *, grace_s: float) -> None:
    """Waits this long in total for all ranks to end, then kills those that have not."""
    deadline_s = time.monotonic() + grace_s
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _start(tp_size: int, work: bytes, receivers: list[Connection], processes: list[SpawnProcess]) -> None:
    """Starts the ranks, each with the end of a pipe for its answer; what is started is in the lists at once."""
    resource_tracker.ensure_running()  # with the first process otherwise, and it unblocks the signals deferred here
    context = multiprocessing.get_context("spawn")
    port = _free_port()
    for rank in range(tp_size):
        receiver, sender = context.Pipe(duplex=False)
        place: dict[str, int | str] = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": tp_size,
            "LOCAL_WORLD_SIZE": tp_size,
        }
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        process = context.Process(target=enter, args=(os.getpid(), place, sender, work), daemon=True)
        _start_on_own_cores(process, rank, tp_size)
        sender.close()  # the child holds its own end: when it dies, the receiver sees the end of the file
        receivers.append(receiver)
        processes.append(process)


def _start_on_own_cores(process: SpawnProcess, rank: int, tp_size: int) -> None:
    """A child inherits the cores of the thread that starts it. With cores of its own it may bind its threads to them;
    without, bound threads of all ranks would share one core."""
    cores = cores_of_rank(rank, tp_size)
    variables = {"OMP_PROC_BIND": "true" if cores else "false"}
    if cores:
        variables["OMP_NUM_THREADS"] = str(len(cores))
    before = {name: os.environ.get(name) for name in variables}
    allowed = os.sched_getaffinity(0) if cores else set()
    os.environ.update(variables)
    try:
        if cores:
            os.sched_setaffinity(0, cores)
        process.start()
    finally:
        if cores:
            os.sched_setaffinity(0, allowed)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _collect(receivers: list[Connection], processes: list[SpawnProcess]) -> Any:
    """Waits for every rank's answer. A user's error or a death is raised at once. Any other failure may be the echo of
    another rank's, whose end broke off a collective: of those that come within a moment, the earliest is raised."""
    ranks = {receiver: rank for rank, receiver in enumerate(receivers)}
    result: Any = None
    failures: list[tuple[float, Exception]] = []
    while ranks:
        answered = wait(list(ranks), timeout=ECHO_S if failures else None)
        if not answered:
            break
        for ready in answered:
            assert isinstance(ready, Connection)
            rank = ranks.pop(ready)
            try:
                failed_at_s, value = pickle.loads(ready.recv_bytes())  # from our own child process
            except EOFError:
                raise _how_it_ended(rank, processes[rank]) from None
            if isinstance(value, MagicdecError):
                raise value
            if failed_at_s is not None:
                failures.append((failed_at_s, value))
            elif rank == 0:
                result = value
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]
    return result


def _how_it_ended(rank: int, process: SpawnProcess) -> BaseException:
    """Of a rank that left without an answer. An interrupt of a rank is one of the run."""
    process.join(GRACE_S)
    code = process.exitcode
    if code == -signal.SIGINT:
        return KeyboardInterrupt()
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        memory = "; the system does so when memory runs out" if name == "SIGKILL" else ""
        return RankDiedError(f"rank {rank} died: its process was ended by {name}{memory}")
    return RankDiedError(f"rank {rank} died: its process ended with exit code {code} and no message")


def _run_rank(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], device_type: str) -> None:
    """What a rank does, its place in the environment: it answers with its result, or its failure."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    try:
        tp = join_world(device_type)
        value = function(tp, *arguments)
        sender.send_bytes(pickle.dumps((None, value if tp.rank == 0 else None)))
        leave_world()
    except MagicdecError as error:
        _fail(sender, error)
    except BaseException:
        _fail(sender, RankError(f"rank {os.environ['RANK']}: {traceback.format_exc()}"))


def _fail(sender: Connection, error: Exception) -> NoReturn:
    """Reports an error and leaves at once: an orderly exit would wait for collectives that no other rank will join."""
    sender.send_bytes(pickle.dumps((time.monotonic(), error)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
