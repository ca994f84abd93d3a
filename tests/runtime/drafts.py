"""The draft configurations that the runtime's tests go through, small enough for tiny models."""

from __future__ import annotations

import itertools
from functools import lru_cache

from magicdec.runtime.heads.chain import Head
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import load_model
from magicdec.specs.speculation import HEAD_METHODS, SpeculationSpec
from tests.runtime.conftest import tiny_spec
from tests.runtime.heads import random_head

DRAFTS = {
    "streamingllm": SpeculationSpec(
        draft="self",
        draft_method="streamingllm",
        draft_budget=12,
        gamma=1,
        num_sink_tokens=2,
    ),
    "snapkv": SpeculationSpec(
        draft="self",
        draft_method="snapkv",
        draft_budget=16,
        gamma=1,
        observation_window=5,
        pooling_kernel=3,
    ),
    "topk": SpeculationSpec(draft="self", draft_method="topk", draft_budget=8, gamma=1),
    "ngram": SpeculationSpec(draft="ngram", draft_method="ngram", gamma=1),
    "sparse-model": SpeculationSpec(
        draft="small",
        draft_method="streamingllm",
        draft_budget=12,
        gamma=1,
        num_sink_tokens=2,
    ),
    "suffix": SpeculationSpec(draft="suffix", draft_method="suffix", gamma=1),
    "model": SpeculationSpec(draft="small", draft_method="full", gamma=1),
    "eagle3": SpeculationSpec(draft="eagle3", draft_method="eagle3", gamma=1),
    "dspark": SpeculationSpec(draft="dspark", draft_method="dspark", gamma=1),
    "windowed-head": SpeculationSpec(
        draft="p-eagle",
        draft_method="p-eagle",
        draft_budget=9,
        gamma=1,
        num_sink_tokens=2,
    ),
}
HEADS = {
    method: SpeculationSpec(draft=method, draft_method=method, gamma=1)
    for method in HEAD_METHODS
}
"""A head of every sort; two of them are among DRAFTS."""


def draft_model_for(
    draft: SpeculationSpec, target: Transformer
) -> Transformer | Head | None:
    """What drafts for a target, if it is not the target itself."""
    if draft.draft in ("none", "self", "ngram", "suffix"):
        return None
    if draft.draft_method in HEAD_METHODS:
        return random_head(draft.draft_method, target)
    return small_draft(target.spec.vocab_size)


@lru_cache
def small_draft(vocab_size: int) -> Transformer:
    spec = tiny_spec(
        name="small",
        vocab_size=vocab_size,
        hidden_size=16,
        num_hidden_layers=1,
        intermediate_size=32,
    )
    return load_model(spec, weights="random", seed=9)


class TakesTurns:
    """Each gamma in turn, each several times over."""

    def __init__(self) -> None:
        self._gammas = itertools.cycle([3, 1, 1, 0, 2, 3])

    def choose(self, *, batch_size: int, context_len: float) -> int:
        return next(self._gammas)
