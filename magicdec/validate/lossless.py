"""Is greedy speculative output the greedy autoregressive output, token for token?

A first divergence is excused only where it is a near tie: where, recomputed in float64, the target's two best logits
are less than NEAR_TIE apart, so that rounding alone decides between them. Both counts are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from magicdec.measure.configuration import BenchmarkRequest
from magicdec.measure.session import BenchmarkSession
from magicdec.naming import describe
from magicdec.runtime.engine import Engine
from magicdec.runtime.weights import load_model
from magicdec.specs.speculation import AUTOREGRESSIVE, SpeculationSpec

NEAR_TIE = 1e-5


@dataclass(frozen=True, kw_only=True)
class GreedyCheck:
    """How one configuration's greedy output compares with autoregressive decoding's."""

    speculation: SpeculationSpec
    num_sequences: int
    num_tokens: int
    num_divergences: int
    """Sequences that differ, near ties left out."""
    num_near_ties: int

    def __str__(self) -> str:
        return (
            f"{describe(self.speculation)}: {self.num_sequences} sequences, {self.num_tokens} tokens, "
            f"{self.num_divergences} divergences, {self.num_near_ties} near ties"
        )


def check_greedy(request: BenchmarkRequest, *, progress: Callable[[str], None] = lambda _: None) -> list[GreedyCheck]:
    """Decodes every configuration of a greedy request to its end, and compares with autoregressive decoding."""
    assert request.sampling.is_greedy
    session = BenchmarkSession(request, progress=progress)
    progress("greedy: autoregressive")
    expected = session.run(AUTOREGRESSIVE, run_to_end=True).tokens
    checks = []
    for speculation in request.speculations:
        progress(f"greedy: {describe(speculation)}")
        tokens = session.run(speculation, run_to_end=True).tokens
        gaps = [
            top_two_gap(request, session.prompts[i], expected[i][:position])
            for i in range(len(tokens))
            if (position := first_divergence(expected[i], tokens[i])) is not None
        ]
        checks.append(
            GreedyCheck(
                speculation=speculation,
                num_sequences=len(tokens),
                num_tokens=sum(map(len, tokens)),
                num_divergences=sum(gap >= NEAR_TIE for gap in gaps),
                num_near_ties=sum(gap < NEAR_TIE for gap in gaps),
            )
        )
    return checks


def first_divergence(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    """The first position at which two outputs differ (one being shorter counts); None where they are equal."""
    for position, (a, b) in enumerate(zip(expected, actual, strict=False)):
        if a != b:
            return position
    return None if len(expected) == len(actual) else min(len(expected), len(actual))


def top_two_gap(request: BenchmarkRequest, prompt: Sequence[int], generated: Sequence[int]) -> float:
    """Difference between the target's two best next-token logits after the tokens, in float64."""
    model = load_model(request.model, weights=request.weights, device=request.device, dtype="float64")
    tokens = [*prompt, *generated]
    engine = Engine(model, batch_size=1, max_len=len(tokens) + 1)
    engine.prefill([tokens])
    with torch.inference_mode():
        logits = engine.forward(engine.pending_B[:, None])[0, -1]
    best = logits.topk(2).values
    return float(best[0] - best[1])
