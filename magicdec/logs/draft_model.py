"""Replays of a draft model: one prefill of the draft over each logged text gives the acceptance at
every gamma.

A draft that is decoded greedily is one token at each position. If all drafts before it were
accepted, its text is the logged text, so with m_t = [the draft's argmax after token t is the logged
token t + 1] a step that begins at t accepts the run of m from t on, cut at gamma. The target is
never loaded.

This holds for engines that draft greedily at every temperature (vLLM's V1 runner). An engine that
samples its drafts accepts min(1, q/p) of them, which needs the target's probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from magicdec.errors import ConfigError
from magicdec.logs.formats import UnreadableError
from magicdec.logs.lookups import Lookup
from magicdec.logs.ngram import Ints, Steps
from magicdec.runtime.engine import Engine
from magicdec.runtime.prefill import PromptPart
from magicdec.runtime.transformer import NORMED, Transformer
from magicdec.runtime.weights import load_model

FIRST_ROOM = 1024
"""Tokens that the first cache holds; longer texts take a larger one."""


class Agreement:
    """Follows a prefill, and notes where the model's argmax is the token that follows."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self.matches: list[Tensor] = []

    @property
    def reads(self) -> Sequence[int]:
        return (NORMED,)

    def follow(self, parts: Sequence[PromptPart], states_NF: Tensor | None) -> None:
        assert states_NF is not None
        logits_NV = self._model.logits_of(states_NF)
        vocab_size = self._model.spec.vocab_size
        next_N = torch.cat([part.next_T for part in parts])
        self.matches.append(logits_NV[:, :vocab_size].argmax(dim=-1) == next_N)


class ModelReplay:
    """Replays requests under several gammas of one draft model."""

    def __init__(
        self,
        draft: str,
        lookups: Sequence[Lookup],
        *,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> None:
        """Load the draft's checkpoint.

        Raises:
            ConfigError, CheckpointError: it is no model with weights.
        """
        self.lookups = tuple(lookups)
        self._gammas = np.array([row.gamma for row in lookups], dtype=np.int32)
        self.model = load_model(draft, dtype=dtype, device=device)
        self._agreement = Agreement(self.model)
        self._engine: Engine | None = None

    def matches(self, text: Ints) -> npt.NDArray[np.bool_]:
        """Return, for each token but the last, whether the draft's argmax after it is the next one.

        Raises:
            UnreadableError: the text is longer than the draft's positions.
            ConfigError: a token is none of the draft's vocabulary.
        """
        limit = self.model.spec.max_position_embeddings
        if len(text) > limit:
            raise UnreadableError(
                f"longer than the {limit} tokens that the draft model reads"
            )
        if text.max() >= self.model.spec.vocab_size:
            raise ConfigError(
                f"the logs hold token {text.max()}, and the draft's vocabulary ends at "
                f"{self.model.spec.vocab_size}: a draft needs its target's vocabulary"
            )
        self._agreement.matches.clear()
        self._roomy(len(text)).prefill([text.tolist()])
        return torch.cat(self._agreement.matches).cpu().numpy()

    def _roomy(self, num_tokens: int) -> Engine:
        """An engine whose cache holds so many tokens."""
        if self._engine is None or num_tokens > self._engine.max_len:
            limit = self.model.spec.max_position_embeddings
            room = min(1 << (max(num_tokens, FIRST_ROOM) - 1).bit_length(), limit)
            self._engine = Engine(self.model, batch_size=1, max_len=room)
            self._engine.follow_with(self._agreement)
        return self._engine

    def replay(
        self,
        text: Ints,
        prompt_len: int,
        *,
        max_len: int = 0,
    ) -> tuple[Steps, npt.NDArray[np.int64]]:
        """Return the steps of one request, [gammas, steps, 3], and how many each gamma has."""
        steps = np.zeros((len(self.lookups), len(text) - prompt_len, 3), dtype=np.int32)
        counts = step_runs(self.matches(text), prompt_len, self._gammas, max_len, steps)
        return steps, counts


@numba.njit(cache=True)
def step_runs(
    matches: npt.NDArray[np.bool_],
    prompt_len: int,
    gammas: Ints,
    max_len: int,
    steps: Steps,
) -> npt.NDArray[np.int64]:
    """Fill `steps` from the runs of matches, and return how many each gamma has."""
    end = len(matches)
    runs = np.zeros(end + 1, np.int64)
    for place in range(end - 1, -1, -1):
        if matches[place]:
            runs[place] = runs[place + 1] + 1
    counts = np.zeros(len(gammas), np.int64)
    for number in range(len(gammas)):
        place = prompt_len
        while place < end:
            drafted = gammas[number]
            if max_len > 0:
                drafted = max(min(drafted, max_len - place - 2), 0)
            accepted = min(drafted, runs[place])
            step = counts[number]
            steps[number, step, 0] = place
            steps[number, step, 1] = drafted
            steps[number, step, 2] = accepted
            counts[number] = step + 1
            place += accepted + 1
    return counts
