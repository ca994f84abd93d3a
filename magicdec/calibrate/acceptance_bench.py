"""Measures a draft's acceptance by position, from real speculative blocks, for many budgets and methods.

The draft is the target itself with a sparse cache, another checkpoint with a sparse or a full one, or n-gram lookup.
All budgets and methods of a context share one prefill, and each continues every prompt by the same number of tokens.
Many prompts with few tokens each say more than the reverse (blocks of one prompt are alike), and make the shared
prefill the greater part of the cost. The prompts are other ones than measured runs use (the calibration half of the
text).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from magicdec.errors import ConfigError, unknown_choice
from magicdec.measure.configuration import BenchmarkRequest
from magicdec.measure.session import BenchmarkSession
from magicdec.perfmodel.acceptance import AcceptanceProfile, fit_profile
from magicdec.perfmodel.acceptance.fit import Measurement, measurements_of
from magicdec.progress import Stages, Step
from magicdec.specs.speculation import MODEL_METHODS, SELF, SPARSE_METHODS, DraftMethod, SamplingSpec, SpeculationSpec

DRAFTS_METHODS: dict[str, tuple[str, ...]] = {SELF: SPARSE_METHODS, "ngram": ("ngram",)}
"""Methods of the drafts that are no model; a model's are `MODEL_METHODS`."""


@dataclass(frozen=True, kw_only=True)
class AcceptanceRequest:
    """A request to measure acceptance: every method × budget below each context.

    Methods without a budget are measured once.
    """

    model: str = "embedded"
    draft: str = SELF
    """The target itself, "ngram", or a draft model's checkpoint."""
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
            raise ConfigError("at least 2 prompts are needed to tell the spread between sequences")
        allowed = DRAFTS_METHODS.get(self.draft, MODEL_METHODS)
        for method in self.draft_methods:
            if method not in allowed:
                raise unknown_choice(f"method of draft {self.draft}", method, allowed)
        if not 1 <= self.gamma <= self.gen_len:
            raise ConfigError(f"gamma must be between 1 and the {self.gen_len} generated tokens, not {self.gamma}")


@dataclass(frozen=True, kw_only=True)
class AcceptanceCounts:
    """`rows`: counts by (method, budget, context, sequence, position): blocks that reached the position, and accepted
    there. `prefill_s` by context, `decode_s` by (method, budget, context)."""

    rows: list[Measurement] = field(default_factory=list)
    prefill_s: dict[int, float] = field(default_factory=dict)
    decode_s: dict[tuple[str, int, int], float] = field(default_factory=dict)

    def cost_ratio(self, method: str) -> float:
        """Time of all budgets of a method together, over that of the budget that would take longest on its own."""
        prefill_s = sum(self.prefill_s.values())
        seconds: dict[int, float] = defaultdict(float)
        for (each, budget, _), decode_s in self.decode_s.items():
            seconds[budget] += decode_s if each == method else 0.0
        return (prefill_s + sum(seconds.values())) / (prefill_s + max(seconds.values()))


def measure_acceptance(
    request: AcceptanceRequest, *, progress: Callable[[str], None] = lambda _: None
) -> AcceptanceCounts:
    """Decodes real speculative blocks of every method × budget below each context, and counts what was accepted."""
    counts = AcceptanceCounts()
    stages = Stages(progress, [float(context) for context in request.context_lens])  # prefill takes most of it
    for place, context in enumerate(request.context_lens):
        show = stages.stage(place)
        speculations = [
            SpeculationSpec(draft=request.draft, draft_method=method, draft_budget=budget, gamma=request.gamma)
            for method in request.draft_methods
            for budget in (request.draft_budgets if method in SPARSE_METHODS else (None,))
            if budget is None or budget < context
        ]
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
        counts.prefill_s[context] = session.prefill_s
        for number, speculation in enumerate(speculations):
            method, budget = speculation.draft_method, speculation.draft_budget
            message = f"acceptance: {method} {budget or ''} at context {context}"
            show(Step(message, done=number, total=len(speculations)))
            started = time.perf_counter()
            result = session.run(speculation, run_to_end=True)
            counts.decode_s[method, budget or context, context] = time.perf_counter() - started
            cell = {"budget": budget or context, "context": context, "temperature": request.temperature}
            counts.rows.extend(measurements_of(result.counts, draft_method=method, **cell))
    return counts


def fit_profiles(request: AcceptanceRequest, counts: AcceptanceCounts) -> list[AcceptanceProfile]:
    """One profile per draft method."""
    profiles = []
    for method in dict.fromkeys(row.draft_method for row in counts.rows):
        rows = [row for row in counts.rows if row.draft_method == method]
        num_blocks = round(sum(row.trials for row in rows if row.position == 1))
        source = f"measured on {num_blocks} speculative blocks of {request.num_prompts} prompts per context"
        profiles.append(
            fit_profile(rows, model=request.model, draft=request.draft, dataset=request.prompts, source=source)
        )
    return profiles
