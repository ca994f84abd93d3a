"""A smaller model drafts, with a full KV cache of its own.

Its cache holds what it processed: the pending token and all drafted ones but the last. When a whole block was accepted,
the last drafted token is still to be processed, and the next block's first step takes it along with the pending one
(for every sequence: those that need it not compute the same values again). So it is with tokens that the target went
on by alone.

Shape suffixes: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from torch import Tensor

from magicdec.errors import ConfigError
from magicdec.runtime.drafters.base import Drafter, ProposalBuilder
from magicdec.runtime.engine import Engine, Snapshot
from magicdec.runtime.passes import DecodePass
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.verification import Proposal


class DraftModelDrafter(Drafter):
    """Drafts with another model of the same vocabulary. Its prefill is kept, for runs from the same prompts."""

    def __init__(self, engine: Engine, model: Transformer) -> None:
        super().__init__(engine)
        check_vocabulary(engine.model, model)
        self._own = Engine(
            model,
            batch_size=engine.batch_size,
            max_len=engine.max_len,
            max_gamma=engine.max_gamma,
            max_back=engine.max_back,
            static_shapes=engine.static_shapes,
        )
        self._prefilled: Snapshot | None = None
        self._prefill_count = -1
        self._num_behind = 0

    def begin(self) -> None:
        self._num_behind = 0
        lengths = np.zeros(self.engine.batch_size, dtype=np.int64)
        lengths[self.engine.sequence_of_slot[: self.engine.num_active]] = self.engine.host_lengths
        is_kept = self._prefilled is not None and np.array_equal(self._prefilled.lengths, lengths)
        if self._prefilled is None or not is_kept or self._prefill_count != self.engine.prefill_count:
            self._prefill()
        else:
            self._own.restore(self._prefilled)
        self._follow_order()

    def _prefill(self) -> None:
        """Processes each sequence's tokens; a slot that is no longer active gets a token to keep its place."""
        tokens, engine = self.engine.tokens_BS.cpu().numpy(), self.engine
        by_sequence: list[list[int]] = [[0]] * engine.batch_size
        for slot, length in enumerate(engine.host_lengths.tolist()):
            by_sequence[int(engine.sequence_of_slot[slot])] = tokens[slot, : length + 1].tolist()
        self._own.prefill(by_sequence)
        self._prefilled, self._prefill_count = self._own.snapshot(), engine.prefill_count

    def _follow_order(self) -> None:
        """Brings the draft's slots into the engine's order."""
        for slot, sequence in enumerate(self.engine.sequence_of_slot.tolist()):
            self._own.exchange(slot, int(np.flatnonzero(self._own.sequence_of_slot == sequence)[0]))

    def admit(self) -> None:
        length = int(self.engine.host_lengths[0])
        tokens = self.engine.tokens_BS[0, : length + 1].tolist()
        self._own.replace_first(int(self.engine.sequence_of_slot[0]), tokens)
        self._prefilled = None

    def graph_key(self, gamma: int) -> Hashable:
        return self._num_back

    @property
    def _num_back(self) -> int:
        """Tokens before the pending one that the first draft step processes too."""
        return min(self._num_behind, int(self.engine.host_lengths.min()))

    def propose(self, gamma: int, uniforms: Tensor | None) -> Proposal:
        engine, num_back = self.engine, self._num_back
        builder = ProposalBuilder(self._own.model, self.sampling, uniforms)
        most = engine.max_gamma + 1  # tokens of a pass, where a window is kept alone
        while num_back >= most:
            attention = self._pass(-num_back, num_tokens=most)
            self._own.model.hidden(engine.tokens_BS.gather(1, attention.positions_BT), attention)
            num_back -= most
        attention = self._pass(-num_back, num_tokens=num_back + 1)
        tokens_BT = engine.tokens_BS.gather(1, attention.positions_BT)
        for step in range(gamma):
            if step:
                attention = self._pass(step, num_tokens=1)
            tokens_BT = builder.step(tokens_BT, attention)
        return builder.build()

    def _pass(self, offset: int, *, num_tokens: int) -> DecodePass:
        return self._own.decode_pass(num_tokens, ahead=offset, of=self.engine)

    def count(self, num_accepted: np.ndarray, gamma: int) -> None:
        self._num_behind = int((num_accepted == gamma).any()) if gamma else self._num_behind + 1

    def swap(self, first: int, second: int) -> None:
        self._own.exchange(first, second)


def check_vocabulary(target: Transformer, draft: Transformer) -> None:
    """Raises ConfigError when drafted tokens would not mean the same to the target."""
    if target.spec.vocab_size != draft.spec.vocab_size:
        raise ConfigError(
            f"draft {draft.spec.name} has a vocabulary of {draft.spec.vocab_size}, "
            f"target {target.spec.name} of {target.spec.vocab_size}: they must be the same"
        )
