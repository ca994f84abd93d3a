"""How a draft's tokens are chosen: as the engine will choose the target's, as far as the choice is cheap.

Temperature, top-k and top-p are the request's own. Penalties, bad words and the like change the target's distribution
only: the engine's rejection sampling makes up for any difference, so that they cost acceptance and nothing else.
Drafted tokens of a seeded request draw from that request's generator.

Shape suffixes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

GREEDY_BELOW = 1e-5
"""As in the engine's sampler: a lower temperature is greedy."""


@dataclass(frozen=True, kw_only=True)
class DraftSampler:
    """Chooses for the rows of a batch that draft. `temperature_B1` is None where every token is the likeliest."""

    temperature_B1: Tensor | None
    is_greedy_B: Tensor | None
    top_k_B: Tensor | None
    top_p_B: Tensor | None
    generators: dict[int, torch.Generator]

    @staticmethod
    def of(metadata: SamplingMetadata, rows: Sequence[int], *, is_probabilistic: bool) -> DraftSampler:
        if metadata.all_greedy or not is_probabilistic:
            return DraftSampler(temperature_B1=None, is_greedy_B=None, top_k_B=None, top_p_B=None, generators={})

        def of_rows(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[list(rows)]

        assert metadata.temperature is not None
        temperature_B = metadata.temperature[list(rows)]
        is_greedy_B = temperature_B < GREEDY_BELOW
        return DraftSampler(
            temperature_B1=torch.where(is_greedy_B, 1.0, temperature_B)[:, None],
            is_greedy_B=None if metadata.all_random else is_greedy_B,
            top_k_B=of_rows(metadata.top_k),
            top_p_B=of_rows(metadata.top_p),
            generators={i: metadata.generators[row] for i, row in enumerate(rows) if row in metadata.generators},
        )

    def choose(self, logits_BV: Tensor) -> tuple[Tensor, Tensor | None]:
        """The tokens [B], and the distributions that they were drawn from (None where each is the likeliest)."""
        best_B = logits_BV.argmax(dim=-1)
        if self.temperature_B1 is None:
            return best_B, None
        scaled_BV = apply_top_k_top_p(logits_BV.float() / self.temperature_B1, self.top_k_B, self.top_p_B)
        draft_BV = scaled_BV.softmax(dim=-1)
        noise_BV = torch.empty_like(draft_BV).exponential_()
        for row, generator in self.generators.items():
            noise_BV[row].exponential_(generator=generator)
        token_B = (draft_BV / noise_BV).argmax(dim=-1)
        if self.is_greedy_B is not None:
            token_B = torch.where(self.is_greedy_B, best_B, token_B)
        return token_B, draft_BV
