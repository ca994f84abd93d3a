"""The interface of a draft method to the decoding loop, and the one that runs no model.

Shape suffixes: B sequences, T drafted tokens, S positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from magicdec.runtime.distributed import TensorParallel
from magicdec.runtime.engine import AttentionObserver, Engine
from magicdec.runtime.heads.vocabulary import ReducedVocabulary
from magicdec.runtime.mixers import AttentionPass
from magicdec.runtime.prefill import PromptPart
from magicdec.runtime.sampling import (
    DRAFT,
    Proposal,
    VerifiedBlock,
    greedy,
    probabilities,
    sample,
    token_probabilities,
)
from magicdec.runtime.transformer import Taps, Transformer
from magicdec.specs.speculation import SamplingSpec


class Drafter(ABC):
    """Proposes tokens for all active sequences of an engine, and learns which of them were
    accepted. Where `graph_key` says that a step can be captured, `propose`, `observer` and `accept`
    must be work on the device only. A run that captures rehearses steps, and `start`s a drafter
    that learns from them once more after that."""

    observer: AttentionObserver | None = None
    """Sees the attention probabilities of each verification, if the method wants them."""

    reads: tuple[int, ...] = ()
    """The target's states that it reads, as a head does (transformer.Taps)."""
    taps: Taps | None = None
    """Takes these states from each verification."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sampling = SamplingSpec()

    @property
    def learns(self) -> bool:
        """Whether it keeps something of each verification besides what was accepted."""
        return self.observer is not None or self.taps is not None

    def start(self, sampling: SamplingSpec) -> None:
        """Builds the draft's state for the engine's present sequences, whose tokens are chosen so.
        Not part of the measured decoding."""
        self.sampling = sampling
        self.begin()

    def begin(self) -> None:
        """Builds the state of all active sequences: by default as that of new ones."""
        self.admit()

    def admit(self) -> None:  # noqa: B027  # as below
        """Builds the state of new sequences, the engine's only active ones during this call, from
        slot 0 on.
        """

    def follow(  # noqa: B027  # most keep nothing of a prompt before they `admit` it
        self, parts: Sequence[PromptPart], states_NF: Tensor | None
    ) -> None:
        """Sees what a pass takes of prompts, as prefill.PrefillFollower."""

    @abstractmethod
    def propose(self, gamma: int, uniforms: Tensor | None) -> Proposal:
        """Drafts `gamma` tokens for each active sequence."""

    def graph_key(self, gamma: int) -> Hashable | None:
        """A key of all that the next step's work depends on besides gamma and the batch; None if it
        is not captured.
        """
        return None

    def accept(self, outcome: VerifiedBlock, gamma: int) -> None:  # noqa: B027  (may keep nothing)
        """Keeps the draft's storage in step with what was accepted of the last proposal: by default
        there is none. Called before the engine advances: its lengths are still those that the block
        was drafted at. With gamma 0 nothing was proposed, and the target alone went one token on. A
        negative count keeps nothing of the block."""

    def count(self, num_accepted: np.ndarray, gamma: int) -> None:  # noqa: B027  # as above
        """Keeps what the draft has on the host, if anything, in step with what was accepted."""

    def end(self, sequence: int, output: np.ndarray) -> None:  # noqa: B027  # as above
        """Sees the whole output of a sequence that has ended."""

    def swap(self, first: int, second: int) -> None:  # noqa: B027  # as above
        """Follows the engine's exchange of two slots, which are not the same one."""


class ProposalBuilder:
    """Chooses drafted tokens one after another, as the target's are chosen. `vocabulary`: the
    draft's own, if it has one.
    """

    def __init__(
        self,
        tp: TensorParallel,
        sampling: SamplingSpec,
        uniforms: Tensor | None,
        vocabulary: ReducedVocabulary | None = None,
    ) -> None:
        self._tp = tp
        self._sampling = sampling
        self._uniforms = uniforms
        self._vocabulary = vocabulary
        self._chosen: list[Tensor] = []
        self._drafts: list[Tensor] = []

    def choose(self, logits_BV: Tensor) -> Tensor:
        """The next drafted token, by this shard's part of the draft's logits: [B]."""
        if self._sampling.is_greedy:
            chosen_B = greedy(logits_BV, self._tp)
        else:
            assert self._uniforms is not None
            draft_BV = probabilities(logits_BV, self._sampling, self._tp)
            step = len(self._chosen)
            chosen_B = sample(draft_BV, self._uniforms[:, step, DRAFT], self._tp)
            self._drafts.append(draft_BV)
        self._chosen.append(chosen_B)
        return self._to_target(chosen_B)

    def _to_target(self, chosen: Tensor) -> Tensor:
        if self._vocabulary is None:
            return chosen
        return self._vocabulary.to_target(chosen)

    def build(self) -> Proposal:
        chosen_BT = torch.stack(self._chosen, dim=1)
        tokens_BT = self._to_target(chosen_BT)
        if not self._drafts:
            return Proposal(tokens_BT=tokens_BT)
        drafts_BTV = torch.stack(self._drafts, dim=1)
        rows_B = torch.arange(len(tokens_BT), device=tokens_BT.device)
        # `self` would keep each step's distribution until the verdict
        vocabulary = self._vocabulary

        def distribution(position_B: Tensor) -> Tensor:
            draft_BV = drafts_BTV[rows_B, position_B]
            if vocabulary is None:
                return draft_BV
            return vocabulary.spread(draft_BV)

        return Proposal(
            tokens_BT=tokens_BT,
            token_probabilities_BT=token_probabilities(drafts_BTV, chosen_BT, self._tp),
            distribution=distribution,
        )


class ModelProposalBuilder(ProposalBuilder):
    """Runs draft steps of a model, each on the token that the one before it chose."""

    def __init__(
        self, model: Transformer, sampling: SamplingSpec, uniforms: Tensor | None
    ) -> None:
        super().__init__(model.tp, sampling, uniforms)
        self._model = model

    def step(self, tokens_BT: Tensor, attention: AttentionPass) -> Tensor:
        """Drafts the token after `tokens_BT`, [B, 1]."""
        hidden_BTH = self._model.hidden(tokens_BT, attention)
        logits_BV = self._model.logits_of(hidden_BTH[:, -1])
        return self.choose(logits_BV)[:, None]


LONGEST_MATCH = 3


class NgramDrafter(Drafter):
    """N-gram lookup (arXiv 2304.04487): drafts what followed the longest (at most 3 tokens), then
    latest, earlier match of the sequence's end. Where nothing matches, the last token is proposed
    again. The engine's tokens are all the state there is."""

    def propose(self, gamma: int, uniforms: Tensor | None) -> Proposal:
        last_B1 = self.engine.lengths_B[:, None]  # position of the pending token
        tokens_BS = self.engine.tokens_BS[:, : int(self.engine.host_lengths.max()) + 1]
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        matches_BS = positions_S < last_B1
        match_length_BS = torch.zeros_like(tokens_BS)
        for back in range(min(LONGEST_MATCH, tokens_BS.shape[1])):
            wanted_B1 = tokens_BS.gather(1, (last_B1 - back).clamp_min(0))
            shifted_BS = tokens_BS.roll(back, dims=1)
            matches_BS = matches_BS & (shifted_BS == wanted_B1) & (positions_S >= back)
            match_length_BS += matches_BS
        rank_BS = match_length_BS * tokens_BS.shape[1] + positions_S
        rank_BS = rank_BS.masked_fill(match_length_BS == 0, -1)
        best_B1 = rank_BS.argmax(dim=1, keepdim=True)
        is_found_B1 = rank_BS.gather(1, best_B1) >= 0
        end_B1 = torch.where(is_found_B1, best_B1, last_B1 - 1)
        # Past the sequence's end, the stretch since the match repeats.
        steps_T = torch.arange(gamma, device=tokens_BS.device) % (last_B1 - end_B1)
        drafted_BT = torch.where(is_found_B1, end_B1 + 1 + steps_T, last_B1)
        return Proposal(tokens_BT=tokens_BS.gather(1, drafted_BT))
