"""The interface of a draft method to the decoding loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

from magicdec.runtime.engine import Engine
from magicdec.runtime.mixers import AttentionPass
from magicdec.runtime.passes import AttentionObserver
from magicdec.runtime.sampling import DRAFT, greedy, probabilities, sample, token_probabilities
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.verification import Outcome, Proposal
from magicdec.specs.speculation import SamplingSpec


class Drafter(ABC):
    """Proposes tokens for all active sequences of an engine, and learns which of them were accepted.

    Where `graph_key` says that a step can be captured, `propose`, `observer` and `accept` must be work on the device
    only. A run that captures rehearses steps, and `start`s a drafter with an observer once more after that.
    """

    observer: AttentionObserver | None = None
    """Sees the attention probabilities of each verification, if the method wants them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sampling = SamplingSpec()

    def start(self, sampling: SamplingSpec) -> None:
        """Builds the draft's state for the engine's present sequences, whose tokens are chosen so. Not part of the
        measured decoding."""
        self.sampling = sampling
        self.begin()

    def begin(self) -> None:
        """Builds the state of all active sequences: by default as that of new ones."""
        self.admit()

    def admit(self) -> None:  # noqa: B027  # as below
        """Builds the state of new sequences, the engine's only active ones during this call, from slot 0 on."""

    @abstractmethod
    def propose(self, gamma: int, uniforms: Tensor | None) -> Proposal:
        """Drafts `gamma` tokens for each active sequence."""

    def graph_key(self, gamma: int) -> Hashable | None:
        """A key of all that the next step's work depends on besides gamma and the batch; None if it is not captured."""
        return None

    def accept(self, outcome: Outcome, gamma: int) -> None:  # noqa: B027  # a method may keep nothing
        """Keeps the draft's storage in step with what was accepted of the last proposal: by default there is none.

        Called before the engine advances: its lengths are still those that the block was drafted at. With gamma 0
        nothing was proposed, and the target alone went one token on. A negative count keeps nothing of the block.
        """

    def count(self, num_accepted: np.ndarray, gamma: int) -> None:  # noqa: B027  # as above
        """Keeps what the draft has on the host, if anything, in step with what was accepted."""

    def swap(self, first: int, second: int) -> None:  # noqa: B027  # as above
        """Follows the engine's exchange of two slots, which are not the same one."""


class ProposalBuilder:
    """Runs draft steps one after another, each on the token that the one before it chose, as the target's is chosen."""

    def __init__(self, model: Transformer, sampling: SamplingSpec, uniforms: Tensor | None) -> None:
        self._model, self._sampling, self._uniforms = model, sampling, uniforms
        self._tokens: list[Tensor] = []
        self._drafts: list[Tensor] = []

    def step(self, tokens_BT: Tensor, attention: AttentionPass) -> Tensor:
        """Drafts the token after `tokens_BT`, [B, 1]."""
        logits_BV, tp = self._model.logits_of(self._model.hidden(tokens_BT, attention)[:, -1]), self._model.tp
        if self._sampling.is_greedy:
            token_B = greedy(logits_BV, tp)
        else:
            assert self._uniforms is not None
            draft_BV = probabilities(logits_BV, self._sampling, tp)
            token_B = sample(draft_BV, self._uniforms[:, len(self._tokens), DRAFT], tp)
            self._drafts.append(draft_BV)
        self._tokens.append(token_B)
        return token_B[:, None]

    def build(self) -> Proposal:
        tokens_BT = torch.stack(self._tokens, dim=1)
        if not self._drafts:
            return Proposal(tokens_BT=tokens_BT)
        drafts_BTV = torch.stack(self._drafts, dim=1)
        rows_B = torch.arange(len(tokens_BT), device=tokens_BT.device)
        return Proposal(
            tokens_BT=tokens_BT,
            token_probabilities_BT=token_probabilities(drafts_BTV, tokens_BT, self._model.tp),
            distribution=lambda position_B: drafts_BTV[rows_B, position_B],
        )
