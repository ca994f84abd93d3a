"""What every draft method offers to the decoding loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from magicdec.runtime.distributed import TensorParallel
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

    @abstractmethod
    def start(self, sampling: SamplingSpec) -> None:
        """Builds the draft's state for the engine's present sequences. Not part of the measured decoding."""

    @abstractmethod
    def admit(self) -> None:
        """Builds the state of a new sequence in slot 0, the engine's only active one during this call."""

    @abstractmethod
    def propose(self, gamma: int, uniforms: Tensor | None) -> Proposal:
        """Drafts `gamma` tokens for each active sequence."""

    def graph_key(self, gamma: int) -> Hashable | None:
        """What the next step's work depends on besides gamma and the batch; None where it cannot be captured."""
        return None

    def accept(self, outcome: Outcome, gamma: int) -> None:  # noqa: B027  # keeping nothing is a method's choice
        """Keeps the draft's storage in step with what was accepted of the last proposal: by default there is none.

        Called before the engine advances: its lengths are still those that the block was drafted at. With gamma 0
        nothing was proposed, and the target alone went one token on. A negative count keeps nothing of the block.
        """

    def count(self, num_accepted: np.ndarray, gamma: int) -> None:  # noqa: B027  # the same
        """The same for what the draft keeps on the host, if anything."""

    @abstractmethod
    def swap(self, first: int, second: int) -> None:
        """Follows the engine's exchange of two slots."""


@dataclass(frozen=True, kw_only=True)
class TokenChooser:
    """Chooses drafted tokens the way the target's will be chosen."""

    sampling: SamplingSpec
    tp: TensorParallel

    def choose(self, logits_BV: Tensor, uniforms: Tensor | None, position: int) -> tuple[Tensor, Tensor | None]:
        """The tokens [B], and the distribution they were drawn from (None when greedy)."""
        if self.sampling.is_greedy:
            return greedy(logits_BV, self.tp), None
        assert uniforms is not None
        draft_BV = probabilities(logits_BV, self.sampling, self.tp)
        return sample(draft_BV, uniforms[:, position, DRAFT], self.tp), draft_BV


class ProposalBuilder:
    """Runs draft steps one after another, each on the token that the one before it chose."""

    def __init__(self, model: Transformer, chooser: TokenChooser, uniforms: Tensor | None) -> None:
        self._model, self._chooser, self._uniforms = model, chooser, uniforms
        self._tokens: list[Tensor] = []
        self._drafts: list[Tensor] = []

    def step(self, tokens_BT: Tensor, attention: AttentionPass) -> Tensor:
        """Drafts the token after `tokens_BT`, [B, 1]."""
        hidden_BTH = self._model.hidden(tokens_BT, attention)
        logits_BV = self._model.logits_of(hidden_BTH[:, -1])
        token_B, draft_BV = self._chooser.choose(logits_BV, self._uniforms, len(self._tokens))
        self._tokens.append(token_B)
        if draft_BV is not None:
            self._drafts.append(draft_BV)
        return token_B[:, None]

    def build(self) -> Proposal:
        tokens_BT = torch.stack(self._tokens, dim=1)
        if not self._drafts:
            return Proposal(tokens_BT=tokens_BT)
        drafts_BTV = torch.stack(self._drafts, dim=1)
        rows_B = torch.arange(len(tokens_BT), device=tokens_BT.device)
        return Proposal(
            tokens_BT=tokens_BT,
            token_probabilities_BT=token_probabilities(drafts_BTV, tokens_BT, self._chooser.tp),
            distribution=lambda position_B: drafts_BTV[rows_B, position_B],
        )
