"""The draft configurations that the runtime's tests go through, small enough for tiny models."""

from __future__ import annotations

import itertools
from functools import lru_cache

from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import load_model
from magicdec.specs.speculation import SpeculationSpec
from tests.runtime.conftest import tiny_spec

DRAFTS = {
    "streamingllm": SpeculationSpec(
        draft="self", draft_method="streamingllm", draft_budget=12, gamma=1, num_sink_tokens=2
    ),
    "snapkv": SpeculationSpec(
        draft="self", draft_method="snapkv", draft_budget=16, gamma=1, observation_window=5, pooling_kernel=3
    ),
    "topk": SpeculationSpec(draft="self", draft_method="topk", draft_budget=8, gamma=1),
    "ngram": SpeculationSpec(draft="ngram", draft_method="ngram", gamma=1),
    "sparse-model": SpeculationSpec(
        draft="small", draft_method="streamingllm", draft_budget=12, gamma=1, num_sink_tokens=2
    ),
    "model": SpeculationSpec(draft="small", draft_method="full", gamma=1),
}


def draft_model_for(draft: SpeculationSpec, vocab_size: int) -> Transformer | None:
    return None if draft.draft in ("none", "self", "ngram") else small_draft(vocab_size)


@lru_cache
def small_draft(vocab_size: int) -> Transformer:
    spec = tiny_spec(name="small", vocab_size=vocab_size, hidden_size=16, num_hidden_layers=1, intermediate_size=32)
    return load_model(spec, weights="random", seed=9)


class TakesTurns:
    """Each gamma in turn, each several times over."""

    def __init__(self) -> None:
        self._gammas = itertools.cycle([3, 1, 1, 0, 2, 3])

    def choose(self, *, batch_size: int, context_len: float) -> int:
        return next(self._gammas)
