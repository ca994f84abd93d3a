"""What must be set before any test imports torch or Triton, and holds for the commands that tests start."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from magicdec.measure import environment
from tests.processes import Done, Program

# Looking for cycles at every seven hundred objects takes a sixth of the time of tests that plan.
gc.set_threshold(10_000)
# Reading a command's options from its annotations takes as long as a small plan, at every call of every command.
typer.main.get_command_from_info = functools.cache(typer.main.get_command_from_info)
# A run times the machine's memory before, between and after: with arrays that no cache holds it takes a second.
environment.REFERENCE_BYTES = 8 * 2**20
# Threads that spin while they wait take the time of those that they wait for, where others use the machine too.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Workers share the cores: operations on tiny tensors wait longer for a second thread than they run.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell that runs the tests in the background has them ignore interrupts, and with them the commands that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # without a GPU kernels run in Triton's interpreter

# The same examples in every run: a commit that passes once passes again. HYPOTHESIS_PROFILE=others draws new ones.
try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the environment of `make test-vllm`
    pass
else:
    # how quickly inputs are made measures the machine, not the code
    settings.register_profile(
        "steady",
        max_examples=15,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.register_profile(
        "others", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


def pytest_collection_finish() -> None:
    """What tests import stays: no collection need look at it again."""
    gc.freeze()


@pytest.fixture(name="few_requests")
def loads_of_few_requests() -> Iterator[None]:
    from tests.few import few_requests

    with few_requests():
        yield


@pytest.fixture
def program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Program:
    """`magicdec` as a user starts it, but in this process: a start of its own takes seconds where torch is needed."""
    from magicdec.cli import main, register_commands

    register_commands()  # `main` adds the called one alone, which the next test in this process would find

    def call(*arguments: str) -> Done:
        capsys.readouterr()
        handler = signal.getsignal(signal.SIGTERM)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["magicdec", *arguments])
            patch.setattr(warnings, "formatwarning", warnings.formatwarning)
            try:
                main()
            except SystemExit as ended:
                code = ended.code
            finally:
                signal.signal(signal.SIGTERM, handler)
        assert isinstance(code, int)
        return Done(code, *capsys.readouterr())

    return call
