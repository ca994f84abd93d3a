"""Answers of an atlas: one plan for each question, and what a page shows of it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import msgspec

from magicdec.atlas.questions import Atlas, AtlasQuestion
from magicdec.errors import MagicdecError
from magicdec.naming import draft_name
from magicdec.schema import Candidate, Gain, Plan


class CellAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The plan's choice in one cell, next to decoding without a draft on the same devices."""

    draft: str
    """Name for people ("EAGLE-3"); "none" where the plan chooses no draft."""
    gamma: int
    gain: Gain | None
    """None where no draft is chosen."""
    acceptance: str
    """Where the draft's acceptance comes from."""
    num_gpus: int
    layout: str
    weight_dtype: str
    batch_size: int
    ms_per_token: float
    ms_per_token_without: float
    usd_per_million_tokens: float | None
    usd_per_million_tokens_without: float | None


class AtlasCell(msgspec.Struct, frozen=True, kw_only=True):
    """A question with its answer, or with the reason why there is none."""

    model: str
    device: str
    load: str
    anchor: str
    command: str
    answer: CellAnswer | None = None
    refusal: str = ""


def cell_of(question: AtlasQuestion) -> AtlasCell:
    """Plan one question. A question that cannot be answered becomes a cell with its refusal."""
    from magicdec.perfmodel import make_plan, request_of

    cell = AtlasCell(
        model=question.model,
        device=question.device.name,
        load=question.load.name,
        anchor=question.anchor,
        command=command_of(question),
    )
    try:
        request = request_of(**question.options)
        answered = make_plan(request)
    except MagicdecError as error:
        return msgspec.structs.replace(cell, refusal=str(error))
    return msgspec.structs.replace(cell, answer=answer_of(answered))


def command_of(question: AtlasQuestion) -> str:
    """The command that answers the question."""
    words = ["magicdec", "plan"]
    for name, value in question.options.items():
        words += [f"--{name.replace('_', '-')}", _text(value)]
    return shlex.join(words)


def answer_of(plan: Plan) -> CellAnswer:
    """The plan's choice as one row of the atlas."""
    chosen = plan.best
    without = plan.autoregressive
    gain = None
    draft = "none"
    if chosen.is_speculative:
        gain = chosen.gain
        draft = draft_name(chosen.draft, chosen.draft_method, chosen.draft_budget)
    return CellAnswer(
        draft=draft,
        gamma=chosen.gamma,
        gain=gain,
        acceptance=chosen.drafting.acceptance_source,
        num_gpus=chosen.num_gpus * chosen.num_replicas,
        layout=chosen.layout.label,
        weight_dtype=plan.precision.weight_dtype,
        batch_size=chosen.batch_size,
        ms_per_token=_milliseconds(chosen),
        ms_per_token_without=_milliseconds(without),
        usd_per_million_tokens=chosen.cost.per_million_tokens_usd,
        usd_per_million_tokens_without=without.cost.per_million_tokens_usd,
    )


def cells_of(
    atlas: Atlas, *, jobs: int = 1, backend: str | None = None
) -> Iterator[AtlasCell]:
    """The cells in the order of the questions, by joblib (`jobs` processes, or another backend's
    workers).
    """
    from joblib import Parallel, delayed

    work = (delayed(cell_of)(question) for question in atlas.questions())
    yield from Parallel(n_jobs=jobs, backend=backend, return_as="generator")(work)


def _milliseconds(row: Candidate) -> float:
    return 1000.0 * row.between_tokens_s


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(str(part) for part in value)
    return str(value)
