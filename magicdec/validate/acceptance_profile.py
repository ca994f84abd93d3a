"""Measures a checkpoint's acceptance by position, from real speculative blocks, for many budgets and methods.

All budgets and methods of a context share one prefill, and each continues every prompt by the same number of tokens.
The prompts are other ones than measured runs use (the calibration half of the text).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import AcceptanceProfile, fit_profile
from magicdec.runtime.generate import INACTIVE, DecodeResult
from magicdec.specs.speculation import DraftMethod, SamplingSpec, SpeculationSpec
from magicdec.validate.benchmark import BenchmarkSession
from magicdec.validate.request import BenchmarkRequest


@dataclass(frozen=True, kw_only=True)
class AcceptanceRequest:
    """What to measure: every method × budget below each context."""

    model: str = "embedded"
    draft_methods: tuple[DraftMethod, ...] = ("streamingllm",)
    draft_budgets: tuple[int, ...] = (64, 128, 256, 512, 1024)
    context_lens: tuple[int, ...] = (4096,)
    num_prompts: int = 16
    gen_len: int = 128
    gamma: int = 6
    temperature: float = 1.0
    seed: int = 1
    prompts: str = "stdlib"
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.num_prompts < 2:
            raise ConfigError("at least 2 prompts are needed to tell the spread between sequences")
        if not 1 <= self.gamma <= self.gen_len:
            raise ConfigError(f"gamma must be between 1 and the {self.gen_len} generated tokens, not {self.gamma}")


def measure_acceptance(
    request: AcceptanceRequest, *, progress: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Counts by (method, budget, context, sequence, position): blocks that reached the position, and accepted there."""
    rows: list[dict[str, Any]] = []
    for context in request.context_lens:
        speculations = [
            SpeculationSpec(draft="self", draft_method=method, draft_budget=budget, gamma=request.gamma)
            for method in request.draft_methods
            for budget in request.draft_budgets
            if budget < context
        ]
        session = BenchmarkSession(_benchmark_request(request, context, speculations), progress=progress)
        for speculation in speculations:
            progress(f"acceptance: {speculation.draft_method} {speculation.draft_budget} at context {context}")
            result = session.run(speculation, run_to_end=True)
            rows += _counts(result, speculation, context=context, temperature=request.temperature)
    return rows


def _benchmark_request(
    request: AcceptanceRequest, context: int, speculations: Sequence[SpeculationSpec]
) -> BenchmarkRequest:
    return BenchmarkRequest(
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


def _counts(
    result: DecodeResult, speculation: SpeculationSpec, *, context: int, temperature: float
) -> list[dict[str, Any]]:
    rows = []
    for sequence, accepted in enumerate(result.num_accepted.T):
        blocks = accepted[accepted != INACTIVE]
        for position in range(1, speculation.gamma + 1):
            trials = int((blocks >= position - 1).sum())
            if trials:
                rows.append(
                    {
                        "draft_method": speculation.draft_method,
                        "budget": speculation.draft_budget,
                        "context": context,
                        "position": position,
                        "trials": trials,
                        "accepted": int((blocks >= position).sum()),
                        "temperature": temperature,
                        "sequence": sequence,
                    }
                )
    return rows


def fit_profiles(request: AcceptanceRequest, rows: Sequence[dict[str, Any]]) -> list[AcceptanceProfile]:
    """One profile per draft method."""
    return [
        fit_profile(
            [row for row in rows if row["draft_method"] == method],
            model=request.model,
            dataset=request.prompts,
            source=f"measured on {int(np.sum([r['trials'] for r in rows if r['position'] == 1]))} speculative blocks",
        )
        for method in dict.fromkeys(row["draft_method"] for row in rows)
    ]
