"""`magicdec run` on several ranks and nodes: the same tokens, and one end for all."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")

from magicdec.records import read_records

SMALL = (
    "--batch",
    "2",
    "--context",
    "120",
    "--draft-budget",
    "32",
    "--repetitions",
    "1",
    "--quiet",
    "--format",
    "json",
)
ENDLESS = ("--batch", "2", "--context", "120", "--draft-budget", "32", "--repetitions", "100000", "--gen-len", "100")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
RUN = ("-m", "magicdec", "run")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A running command, which is ended with the block at the latest."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=60)


def generated(path: Path) -> list[list[int]]:
    return [json.loads(line)["generated_ids"] for line in path.read_text().splitlines()]


def test_two_nodes_generate_what_one_process_does(tmp_path: Path) -> None:
    """Two torchrun processes that meet at a rendezvous on loopback, one rank each; only the first node writes."""
    rendezvous = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test")
    rendezvous += ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1")
    one, outputs = tmp_path / "one.jsonl", [tmp_path / f"node{i}.jsonl" for i in range(2)]
    records = tmp_path / "records.jsonl"
    subprocess.run([sys.executable, *RUN, *SMALL, "--save-output", str(one)], check=True, capture_output=True)
    commands = [
        (*TORCHRUN, *rendezvous, *RUN, *SMALL, "--save-output", str(output), "--records", str(records))
        for output in outputs
    ]
    with started(*commands[0]) as first, started(*commands[1]) as second:
        errors = [node.communicate(timeout=120)[1] for node in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0), errors
    written = [path for path in outputs if path.exists()]
    assert len(written) == 1
    assert generated(written[0]) == generated(one)
    assert [record.tp_size for record in read_records(records)] == [2, 2]


def ranks_of(parent: int, marker: str) -> list[int]:
    """Processes below `parent` whose command line holds the marker, in the order of their start."""
    children = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            above = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, IndexError):
            continue
        if above == parent and marker in command:
            children[int(entry.name)] = command
    return sorted(children)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the ranks in /proc")
@pytest.mark.parametrize(
    ("launcher", "marker", "message"),
    [
        ((sys.executable, *RUN, "--tp", "2"), "spawn_main", "magicdec: rank 1 died: its process was ended by SIGKILL"),
        ((*TORCHRUN, "--nproc-per-node", "2", *RUN), "magicdec run", "SIGKILL"),
    ],
    ids=["magicdec run --tp 2", "torchrun"],
)
def test_a_killed_rank_ends_the_run(tmp_path: Path, launcher: tuple[str, ...], marker: str, message: str) -> None:
    """Within seconds, with a failing exit code and the reason; what was recorded before is all that is recorded."""
    records = tmp_path / "records.jsonl"
    done = subprocess.run([sys.executable, *RUN, *SMALL, "--records", str(records)], check=True, capture_output=True)
    before = records.read_bytes()
    assert done.returncode == 0
    assert len(before.splitlines()) == 2
    with started(*launcher, *ENDLESS, "--records", str(records)) as process:
        deadline_s = time.monotonic() + 60
        while len(ranks := ranks_of(process.pid, marker)) < 2 or not all(map(is_decoding, ranks)):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline_s, ranks
            time.sleep(0.1)
        killed_s = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        _, error = process.communicate(timeout=60)
        assert time.monotonic() - killed_s < 30
        assert process.returncode != 0
    assert message in error
    assert not any(map(is_alive, ranks))
    assert records.read_bytes() == before


def is_decoding(pid: int) -> bool:
    """Whether a rank has used some seconds of processor time: more than loading takes."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") > 8.0
