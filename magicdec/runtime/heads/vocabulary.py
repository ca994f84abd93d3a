"""The tokens that a head chooses from, where they are fewer than the target's.

`d2t` gives for each of the head's tokens how far behind its own number the target's stands.

Shape suffixes: B sequences, D the head's tokens, V the target's on this shard.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.errors import CheckpointError
from magicdec.runtime.distributed import TensorParallel


@dataclass(frozen=True, kw_only=True)
class ReducedVocabulary:
    """A choice of the target's tokens. Heads divide their own numbers among the shards."""

    target_D: Tensor
    """The target's number of each of the head's tokens."""
    vocab_size: int
    """The target's tokens."""
    tp: TensorParallel

    def to_target(self, tokens_B: Tensor) -> Tensor:
        return self.target_D[tokens_B]

    def spread(self, draft_BV: Tensor) -> Tensor:
        """Probabilities at the target's tokens; 0 at those that the head cannot choose."""
        whole_BD = draft_BV
        if self.tp.size > 1:
            whole_BD = self.tp.all_gather_last(draft_BV)
        part = self.vocab_size // self.tp.size
        rows_D, is_here_D = self.tp.own_rows(self.target_D, part)
        spread_BV = torch.zeros(
            *draft_BV.shape[:-1],
            part,
            dtype=draft_BV.dtype,
            device=draft_BV.device,
        )
        return spread_BV.index_add_(-1, rows_D, whole_BD * is_here_D)


def reduced_vocabulary(
    offsets_D: Tensor,
    is_drafted_V: Tensor | None,
    *,
    where: str,
    tp: TensorParallel,
    vocab_size: int,
) -> ReducedVocabulary:
    """From the tensors `d2t` and, where there is one, `t2d`, which says of each of the target's
    tokens whether the head has it. Raises CheckpointError where they point outside, or disagree.
    """
    target_D = torch.arange(len(offsets_D)) + offsets_D.long().cpu()
    outside = (target_D < 0) | (target_D >= vocab_size)
    if outside.any():
        first = int(outside.nonzero()[0])
        raise CheckpointError(
            f"{where}: d2t maps the head's token {first} to {int(target_D[first])}, outside of the "
            f"target's vocabulary of {vocab_size}: it is another target's, or damaged"
        )
    if len(target_D.unique()) < len(target_D):
        raise CheckpointError(
            f"{where}: d2t maps two of the head's tokens to one of the target's"
        )
    if is_drafted_V is not None:
        expected_V = torch.zeros(vocab_size, dtype=torch.bool)
        expected_V[target_D] = True
        if not torch.equal(expected_V, is_drafted_V.bool().cpu()):
            raise CheckpointError(
                f"{where}: t2d and d2t disagree on the tokens that the head has"
            )
    return ReducedVocabulary(
        target_D=target_D.to(offsets_D.device), vocab_size=vocab_size, tp=tp
    )
