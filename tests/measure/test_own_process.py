"""Calls in a process of their own, and the clock that they may be timed by."""

from __future__ import annotations

import os
import time

import pytest

from magicdec.errors import ConfigError
from magicdec.measure.environment import prepare, seconds
from magicdec.measure.vllm_session import in_own_process


def fail(message: str) -> None:
    raise ConfigError(message)


def test_a_call_runs_in_another_process_and_its_exception_comes_back() -> None:
    assert in_own_process(os.getpid) != os.getpid()
    with pytest.raises(ConfigError, match="what was wrong"):
        in_own_process(fail, "what was wrong")


def test_processor_time_does_not_pass_while_a_process_sleeps() -> None:
    wall, cpu = seconds("wall"), seconds("cpu")
    time.sleep(0.2)
    assert seconds("wall") - wall >= 0.2
    assert seconds("cpu") - cpu < 0.1


def test_processor_time_is_told_on_cpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    with pytest.raises(ConfigError, match="--clock cpu is for --device cpu"):
        prepare("cpu", "cuda")
    assert os.environ["OMP_NUM_THREADS"] == "8"
