"""Questions of the page that take seconds: each a value that a process of its own can run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from magicdec.errors import CapacityError
from magicdec.perfmodel import Plan, PlanRequest, make_plan
from magicdec.progress import Progress, StepMessage

WIDE_BATCHES = (1, 4, 16, 64, 256)
WIDE_CONTEXTS = (1024, 4096, 16_384, 65_536)
"""Batches and contexts of the figures of best drafts, in addition to the question's own."""
Job = Callable[[Progress], Any]


@dataclass(frozen=True)
class Planned:
    """A plan. One of a file of requests is made in the file's folder, so the answer has its own name."""

    request: PlanRequest
    folder: Path | None = None

    def __call__(self, progress: Progress) -> Plan:
        if self.folder is not None:
            os.chdir(self.folder)  # the process runs this job alone
        return make_plan(self.request, progress)


@dataclass(frozen=True)
class OnEachGpu:
    """One question on several GPUs, each at usual batches and contexts too."""

    requests: tuple[PlanRequest, ...]

    def __call__(self, progress: Progress) -> list[Plan | str]:
        """A plan for each, or why there is none."""
        found: list[Plan | str] = []
        for done, request in enumerate(self.requests):
            name = getattr(request.hardware[0], "name", request.hardware[0])
            progress(
                StepMessage(f"planning on {name}", done=done, total=len(self.requests))
            )
            try:
                found.append(planned_wide(request, make_plan(request).best.tp_size))
            except CapacityError as error:
                found.append(str(error))
        return found


def planned_wide(request: PlanRequest, tp_size: int) -> Plan:
    """A question's answer at usual batches and contexts too, on as many ranks; contexts that the
    model does not read are left out."""
    contexts = {*request.context_lens, *WIDE_CONTEXTS}
    batches = {*request.batch_sizes, *WIDE_BATCHES}
    return make_plan(
        msgspec.structs.replace(
            request,
            tp_size=tp_size,
            batch_sizes=tuple(sorted(batches)),
            context_lens=tuple(sorted(contexts)),
        )
    )


def planned_batches(request: PlanRequest) -> Plan:
    """A question's answer at usual batches that fit, too, on its own device and context."""
    batches = {*request.batch_sizes, *WIDE_BATCHES}
    return make_plan(
        msgspec.structs.replace(request, batch_sizes=tuple(sorted(batches)))
    )
