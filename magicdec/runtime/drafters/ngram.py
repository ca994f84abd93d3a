"""N-gram lookup: propose what followed the last place where the sequence's latest tokens occurred before.

Costs no pass of any model; pays where text repeats itself. arXiv 2304.04487, and "prompt lookup decoding".

Shape suffixes: B sequences, T drafted tokens, S positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicdec.runtime.drafters.base import Drafter
from magicdec.runtime.verification import Proposal

LONGEST_MATCH = 3


class NgramDrafter(Drafter):
    """Drafts the continuation of the longest (at most 3 tokens), then latest, earlier match of the sequence's end.

    Where nothing matches, the last token is proposed again. The engine's tokens are all the state there is.
    """

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
