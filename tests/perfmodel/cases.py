"""Cases of a plan, without the plan: a request of one device with its drafts, and what its search finds."""

from __future__ import annotations

from functools import cache
from typing import Any

from magicdec.perfmodel.plan.drafts import draft_options
from magicdec.perfmodel.plan.request import (
    Case,
    PlanRequest,
    engine_of,
    lengths_of,
    resolve,
)
from magicdec.perfmodel.plan.search import SearchResult, best_autoregressive, search
from magicdec.schema.plan import NeedsAcceptance
from magicdec.specs.catalog import load_model_spec


def asked(**fields: Any) -> PlanRequest:
    usual = {
        "model": "llama-3.1-8b",
        "hardware": ("h100-sxm-80gb",),
        "tp_size": 1,
        "batch_sizes": (8,),
        "context_lens": (4096,),
    }
    return PlanRequest(**usual | fields)


def ways_of(**fields: Any) -> list[Case]:
    """Every way to spread a request's replica over its first device, at its first length."""
    request = asked(**fields)
    options, _ = drafts_of(request)
    model = load_model_spec(str(request.model))
    (lengths, *_) = lengths_of(request)
    return resolve(request, model, request.hardware[0], options, lengths)


def drafts_of(request: PlanRequest) -> tuple[Any, list[NeedsAcceptance]]:
    """The options of a request, and the drafts that lack an acceptance."""
    (lengths, *_) = lengths_of(request)
    return draft_options(
        load_model_spec(str(request.model)),
        request,
        engine=engine_of(request, request.hardware[0]),
        context=int(lengths.prompt_len),
    )


@cache
def case_of(**fields: Any) -> Case:
    return ways_of(**fields)[0]


@cache
def found_of(**fields: Any) -> SearchResult:
    case = case_of(**fields)
    return search(case, best_autoregressive(case))
