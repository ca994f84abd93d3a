"""Answers from the requests that a server has logged: what look-ups accept, and what traffic is
like.

A look-up proposes one token at each position, so lossless verification accepts it exactly where it
equals the token that was emitted next, whatever the temperature. Logged prompts and outputs
therefore determine every accepted count (`replay`), without a model and without torch.

    lookups     rules of the engines' look-ups and their settings
    ngram       numba kernels of the n-gram rules
    suffix      numba kernels of suffix decoding
    replay      steps of every setting on one request, and their counts (`tally`)
    formats     readers of the log formats; `tokens` turns text into token ids
    profiles    acceptance profiles from counts
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magicdec.door import door

if TYPE_CHECKING:
    from magicdec.logs.draft_model import ModelReplay
    from magicdec.logs.load import LogLoad, read_load
    from magicdec.logs.lookups import DRAFT_MODEL, RULES, Lookup
    from magicdec.logs.parts import Parts
    from magicdec.logs.profiles import MODEL_GAMMAS, profiles_of, sweep
    from magicdec.logs.replay import LogReplay, replay_draft_model, replay_logs
    from magicdec.logs.requests import Account
    from magicdec.logs.sources import cpu_count, files_of
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
