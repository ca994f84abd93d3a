"""The first code that a rank runs: it ties itself to its parent before it loads torch, which takes seconds."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection

from magicdec.runtime.lifeline import end_with_parent


def enter(parent: int, place: Mapping[str, int | str], sender: Connection, work: bytes) -> None:
    """Takes the rank's place (torchrun's variables), and calls what `work` holds: a function and its arguments after
    the sender of its answer."""
    end_with_parent(parent)
    os.environ.update({name: str(value) for name, value in place.items()})
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    run, *arguments = pickle.loads(work)  # from our own parent process
    run(sender, *arguments)
