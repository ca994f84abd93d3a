"""Which clock times are told by: the wall's, or that of the processor time which this process takes.

On a machine that others use too, one thread's processor time is what its wall-clock time would be without them: it
repeats where the other does not. It is told for CPUs only, and for one thread, so that it is a duration.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Literal

from magicdec.errors import ConfigError

Clock = Literal["wall", "cpu"]


def seconds(clock: Clock) -> float:
    """The clock's reading; only differences mean something."""
    return time.process_time() if clock == "cpu" else time.perf_counter()


def prepare(clock: Clock, device: str) -> None:
    """Runs with one thread where processor time is told. Called before torch is imported, since libraries read the
    number of threads once.

    Raises ConfigError for a device that is no CPU.
    """
    if clock == "wall":
        return
    if device != "cpu":
        raise ConfigError(f"--clock cpu is for --device cpu: on {device} the processor's time says nothing")
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
