"""`magicdec run` on several nodes: the same tokens."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")

from magicdec.records import read_records
from tests.processes import Program

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


def test_two_nodes_generate_what_one_process_does(tmp_path: Path, program: Program) -> None:
    """Two torchrun processes that meet at a rendezvous on loopback, one rank each; only the first node writes."""
    rendezvous = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test")
    rendezvous += ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1")
    one, outputs = tmp_path / "one.jsonl", [tmp_path / f"node{i}.jsonl" for i in range(2)]
    records = tmp_path / "records.jsonl"
    assert program("run", *SMALL, "--save-output", str(one)).returncode == 0
    commands = [
        (*TORCHRUN, *rendezvous, *RUN, *SMALL, "--save-output", str(output), "--records", str(records))
        for output in outputs
    ]
    with started(*commands[0]) as first, started(*commands[1]) as second:
        errors = [node.communicate()[1] for node in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0), errors
    written = [path for path in outputs if path.exists()]
    assert len(written) == 1
    assert generated(written[0]) == generated(one)
    assert [record.tp_size for record in read_records(records)] == [2, 2]
