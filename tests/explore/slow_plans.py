"""Planners' processes for tests: one notes that it began, and answers when told to; one simulates few requests."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

from magicdec.explore import computation
from magicdec.explore.jobs import Planned
from magicdec.schema.plan import Plan
from tests.few import few_requests


def answer_when_told(
    folder: str, document: Plan, job: Planned, sender: Connection
) -> None:
    request = job.request
    sender.send(("simulating", 0.5))
    Path(folder, f"begun-{request.rate:g}-{os.getpid()}").touch()
    while not Path(folder, f"end-{request.rate:g}").exists():
        time.sleep(0.02)
    sender.send(document)


def answer_with_few_requests(job: Planned, sender: Connection) -> None:
    """The planner's own answer."""
    with few_requests():
        computation._answer(job, sender)
