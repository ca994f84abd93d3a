"""Measures a draft's acceptance by position, from real speculative blocks, for many budgets and
methods.

The draft is the target itself with a sparse cache, another checkpoint with a sparse or a full one,
a trained head, or n-gram lookup. All budgets and methods of a context share one prefill, and each
continues every prompt by the same number of tokens. Blocks of one prompt are alike, so many prompts
with few tokens each say more than the reverse, and the shared prefill is most of the cost. The
prompts come from the calibration half of the text, which measured runs do not use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from magicdec.errors import ConfigError, unknown_choice
from magicdec.measure.configuration import BenchmarkRequest
from magicdec.measure.session import BenchmarkSession
from magicdec.naming import draft_id
from magicdec.perfmodel.acceptance import MeasuredProfile, fit_profile
from magicdec.perfmodel.acceptance.fit import Measurement, measurements_of
from magicdec.progress import Progress, Stages, StepMessage
from magicdec.specs.known_heads import NamedHead
from magicdec.specs.speculation import (
    MODEL_METHODS,
    SELF,
    SPARSE_METHODS,
    DraftMethod,
    SamplingSpec,
    SpeculationSpec,
)

DRAFTS_METHODS: dict[str, tuple[str, ...]] = {
    SELF: SPARSE_METHODS,
    "ngram": ("ngram",),
    "suffix": ("suffix",),
}
"""Methods of the drafts that are no model; a model's are `MODEL_METHODS`."""


@dataclass(frozen=True, kw_only=True)
class AcceptanceRequest:
    """A request to measure acceptance: every method × budget below each context.

    Methods without a budget are measured once.
    """

    model: str = "embedded"
    draft: str = SELF
    """The target itself, "ngram", a head's method, or a draft model's checkpoint."""
    head: NamedHead | None = None
    """The trained head that drafts, if one does."""
    beside: tuple[SpeculationSpec, ...] = ()
    """Further drafts, measured from the same prefill."""
    draft_methods: tuple[DraftMethod, ...] = ("streamingllm",)
    draft_budgets: tuple[int, ...] = (64, 128, 256, 512, 1024)
    context_lens: tuple[int, ...] = (4096,)
    num_prompts: int = 32
    gen_len: int = 64
    gamma: int = 6
    temperature: float = 1.0
    seed: int = 1
    prompts: str = "stdlib"
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.num_prompts < 2:
            raise ConfigError(
                "at least 2 prompts are needed to tell the spread between sequences"
            )
        allowed = DRAFTS_METHODS.get(self.draft, MODEL_METHODS)
        if self.head is not None:
            allowed = (self.head.method,)
        for method in self.draft_methods:
            if method not in allowed:
                raise unknown_choice(f"method of draft {self.draft}", method, allowed)
        if not 1 <= self.gamma <= self.gen_len:
            raise ConfigError(
                f"gamma must be between 1 and the {self.gen_len} generated tokens, not {self.gamma}"
            )


def measure_acceptance(
    request: AcceptanceRequest, *, progress: Progress = lambda _: None
) -> list[Measurement]:
    """Decodes real speculative blocks of every method × budget below each context: blocks of each
    sequence that reached a position, and were accepted there."""
    rows: list[Measurement] = []
    # prefill takes most of it
    stages = Stages(progress, [float(context) for context in request.context_lens])
    for place, context in enumerate(request.context_lens):
        show = stages.stage(place)
        speculations = _speculations(request, context)
        wanted = BenchmarkRequest(
            model=request.model,
            dtype=request.dtype,
            device=request.device,
            batch_size=request.num_prompts,
            context_len=context,
            gen_len=request.gen_len,
            speculations=tuple(speculations),
            sampling=SamplingSpec(temperature=request.temperature, seed=request.seed),
            prompts=request.prompts,
            calibration_prompts=True,
        )
        session = BenchmarkSession(wanted, progress=show)
        for number, speculation in enumerate(speculations):
            method, budget = speculation.draft_method, speculation.draft_budget
            name = draft_id(speculation.draft, method, budget)
            message = f"acceptance: {name} at context {context}"
            show(StepMessage(message, done=number, total=len(speculations)))
            result = session.run(speculation, run_to_end=True)
            cell = {
                "budget": context if budget is None else budget,
                "context": context,
                "temperature": request.temperature,
            }
            rows += measurements_of(result.counts, draft_method=method, **cell)
    return rows


def _speculations(request: AcceptanceRequest, context: int) -> list[SpeculationSpec]:
    """Every method × budget below a context, at the deepest gamma, which tells all positions."""
    draft = request.draft
    spec = None
    checkpoint = None
    if request.head is not None:
        draft = request.head.method
        spec = request.head.spec
        checkpoint = request.head.checkpoint
    found = []
    for method in request.draft_methods:
        budgets: Sequence[int | None] = (None,)
        if method in SPARSE_METHODS:
            budgets = [budget for budget in request.draft_budgets if budget < context]
        for budget in budgets:
            found.append(
                SpeculationSpec(
                    draft=draft,
                    draft_method=method,
                    draft_budget=budget,
                    gamma=request.gamma,
                    head=spec,
                    checkpoint=checkpoint,
                )
            )
    beside = [
        msgspec.structs.replace(draft, gamma=request.gamma) for draft in request.beside
    ]
    return found + beside


def fit_profiles(
    request: AcceptanceRequest, counted: Sequence[Measurement]
) -> list[MeasuredProfile]:
    """One profile per draft method."""
    profiles = []
    names = {draft.draft_method: draft.draft for draft in request.beside}
    for method in dict.fromkeys(row.draft_method for row in counted):
        rows = [row for row in counted if row.draft_method == method]
        num_blocks = round(sum(row.trials for row in rows if row.position == 1))
        source = (
            f"measured on {num_blocks} speculative blocks of {request.num_prompts} prompts "
            "per context"
        )
        profiles.append(
            fit_profile(
                rows,
                model=request.model,
                draft=names.get(method, request.draft),
                dataset=request.prompts,
                source=source,
            )
        )
    return profiles
