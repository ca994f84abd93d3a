"""Draft methods, and the registry of them. Adding one is a class and a line here."""

from __future__ import annotations

from collections.abc import Callable

from magicdec.errors import ConfigError, unknown_choice
from magicdec.runtime.drafters.base import Drafter, NgramDrafter
from magicdec.runtime.drafters.draft_model import (
    DraftModelDrafter,
    FewerRanksDrafter,
    SparseModelDrafter,
)
from magicdec.runtime.drafters.heads import (
    BlockDrafter,
    ChainDrafter,
    HeadDrafter,
    ParallelEagleDrafter,
)
from magicdec.runtime.drafters.self_draft import SnapKVDrafter, StreamingLLMDrafter, TopKDrafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.heads.chain import Head
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import with_weight_dtype
from magicdec.specs.speculation import HEAD_METHODS, SpeculationSpec

Make = Callable[[Engine, SpeculationSpec, Transformer], Drafter]
SELF_DRAFTERS: dict[str, Make] = {
    "streamingllm": StreamingLLMDrafter,
    "snapkv": SnapKVDrafter,
    "topk": TopKDrafter,
}
MODEL_DRAFTERS: dict[str, Make] = {"streamingllm": SparseModelDrafter, "full": DraftModelDrafter}

HEAD_DRAFTERS: dict[str, type[HeadDrafter]] = {
    "eagle": ChainDrafter,
    "eagle3": ChainDrafter,
    "mtp": ChainDrafter,
    "p-eagle": ParallelEagleDrafter,
    "dflash": BlockDrafter,
    "dspark": BlockDrafter,
}


def build_drafter(
    spec: SpeculationSpec, engine: Engine, draft_model: Transformer | Head | None = None
) -> Drafter | None:
    """The drafter that a specification names; None for autoregressive decoding.

    `draft_model` is the other model or the head that drafts, or of a self-draft the target's copy in
    `draft_weight_dtype`. What is not in that format yet is converted here, anew for each drafter.
    With a `draft_tp_size` below the target's, ranks beyond it have no draft model and are told what
    was drafted.

    Raises ConfigError when the method is unknown or does not go with the draft.
    """
    if spec.is_autoregressive:
        return None
    if spec.draft_budget is not None and spec.draft_budget > engine.max_len:
        raise ConfigError(
            f"draft budget {spec.draft_budget} exceeds the longest sequence, {engine.max_len} tokens"
        )
    if spec.gamma > engine.max_gamma:
        raise ConfigError(
            f"gamma {spec.gamma} exceeds the {engine.max_gamma} that the engine was built for"
        )
    if spec.draft_method == "ngram":
        return NgramDrafter(engine)
    if spec.draft_method == "suffix":
        from magicdec.runtime.drafters.suffix import SuffixDrafter

        return SuffixDrafter(engine)
    if spec.draft_method in HEAD_METHODS and not spec.is_self:
        return _head_drafter(spec, engine, draft_model)
    assert not isinstance(draft_model, Head)
    whose, known = (
        ("self-draft", SELF_DRAFTERS) if spec.is_self else ("draft model", MODEL_DRAFTERS)
    )
    if spec.draft_method not in known:
        raise unknown_choice(f"draft method of a {whose}", spec.draft_method, known)
    tp = engine.model.tp
    if spec.is_self:
        draft_size = tp.size
    else:
        draft_size = spec.draft_tp_size or tp.size
    if draft_size > tp.size:
        raise ConfigError(
            f"the draft cannot be on {draft_size} ranks when the target is on {tp.size}"
        )
    model = draft_model or (engine.model if spec.is_self else None)
    if model is None and tp.rank < draft_size:
        raise ConfigError(f"draft {spec.draft} needs its model's weights")
    own = None
    if model is not None:
        own = known[spec.draft_method](
            engine, spec, with_weight_dtype(model, spec.draft_weight_dtype)
        )
    if draft_size == tp.size:
        return own
    return FewerRanksDrafter(engine, own, model.tp if model else None)


def _head_drafter(
    spec: SpeculationSpec, engine: Engine, head: Transformer | Head | None
) -> HeadDrafter:
    if not isinstance(head, Head):
        raise ConfigError(
            f"draft {spec.draft} needs a head's weights; give its checkpoint's directory"
        )
    if spec.draft_weight_dtype is not None:
        raise ConfigError("--draft-weight-dtype is not run for heads; leave it out")
    return HEAD_DRAFTERS[head.layout.method](engine, spec, head)
