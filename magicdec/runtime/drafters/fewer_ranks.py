"""A draft model on fewer ranks than the target: the first ones draft, all of them learn the result.

Per step one broadcast carries the drafted tokens (and, when sampling, their probabilities); after acceptance, when
sampling, the draft's distribution at the rejected position only is scattered, divided like the target's head.

Shape suffixes: B sequences, T drafted tokens, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from magicdec.runtime.distributed import TensorParallel
from magicdec.runtime.drafters.base import Drafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.verification import Outcome, Proposal


class FewerRanksDrafter(Drafter):
    """Wraps the drafter of the drafting ranks; `inner` and `draft_tp` are None on the others."""

    def __init__(self, engine: Engine, inner: Drafter | None, draft_tp: TensorParallel | None) -> None:
        super().__init__(engine)
        self._inner, self._draft_tp, self._tp = inner, draft_tp, engine.model.tp

    def begin(self) -> None:
        if self._inner is not None:
            self._inner.start(self.sampling)

    def admit(self) -> None:
        if self._inner is not None:
            self._inner.admit()

    def propose(self, gamma: int, uniforms: Tensor | None) -> Proposal:
        own = self._inner.propose(gamma, uniforms) if self._inner is not None else None
        shape = (self.engine.num_active, gamma)
        # Token ids are exact in float64, so one message can carry both.
        packed = torch.empty(
            (1 if self.sampling.is_greedy else 2, *shape), dtype=torch.float64, device=self.engine.model.device
        )
        if own is not None:
            packed[0] = own.tokens_BT
            if own.token_probabilities_BT is not None:
                packed[1] = own.token_probabilities_BT
        self._tp.broadcast(packed)
        tokens_BT = packed[0].long()
        if self.sampling.is_greedy:
            return Proposal(tokens_BT=tokens_BT)
        return Proposal(
            tokens_BT=tokens_BT,
            token_probabilities_BT=packed[1].float(),
            distribution=lambda position_B: self._scatter(own, position_B),
        )

    def _scatter(self, own: Proposal | None, position_B: Tensor) -> Tensor:
        """This rank's part of each sequence's draft distribution at a position, [B, V / target ranks]."""
        whole_BV = None
        if own is not None and self._draft_tp is not None:
            assert own.distribution is not None
            whole_BV = self._draft_tp.all_gather(own.distribution(position_B)).movedim(0, -2).flatten(-2)
        size = self.engine.model.spec.vocab_size // self._tp.size
        like = torch.empty(len(position_B), size, device=position_B.device)
        return self._tp.scatter(whole_BV if self._tp.rank == 0 else None, like)

    def accept(self, outcome: Outcome, gamma: int) -> None:
        if self._inner is not None:
            self._inner.accept(outcome, gamma)

    def count(self, num_accepted: np.ndarray, gamma: int) -> None:
        if self._inner is not None:
            self._inner.count(num_accepted, gamma)

    def swap(self, first: int, second: int) -> None:
        if self._inner is not None:
            self._inner.swap(first, second)
