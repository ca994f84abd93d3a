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
from magicdec.runtime.drafters.self_draft import (
    SnapKVDrafter,
    StreamingLLMDrafter,
    TopKDrafter,
)
from magicdec.runtime.engine import Engine
from magicdec.runtime.heads.chain import Head
from magicdec.runtime.transformer import Transformer
from magicdec.specs.speculation import HEAD_METHODS, SpeculationSpec

Make = Callable[[Engine, SpeculationSpec, Transformer], Drafter]
SELF_DRAFTERS: dict[str, Make] = {
    "streamingllm": StreamingLLMDrafter,
    "snapkv": SnapKVDrafter,
    "topk": TopKDrafter,
}
MODEL_DRAFTERS: dict[str, Make] = {
    "streamingllm": SparseModelDrafter,
    "full": DraftModelDrafter,
}

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
    """The drafter of a specification. None: autoregressive decoding.

    `draft_model` is the model or the head that drafts; None where the target drafts for itself.
    With a `draft_tp_size` below the target's, ranks beyond it have no draft model and receive the
    drafts.

    Raises ConfigError when the method is unknown or does not go with the draft.
    """
    if spec.is_autoregressive:
        return None
    _check_limits(spec, engine)
    if spec.draft_method == "ngram":
        return NgramDrafter(engine)
    if spec.draft_method == "suffix":
        from magicdec.runtime.drafters.suffix import SuffixDrafter

        return SuffixDrafter(engine)
    if spec.draft_method in HEAD_METHODS and not spec.is_self:
        if not isinstance(draft_model, Head):
            raise ConfigError(
                f"draft {spec.draft} needs a head's weights; give its checkpoint's directory"
            )
        return HEAD_DRAFTERS[draft_model.layout.method](engine, spec, draft_model)
    assert not isinstance(draft_model, Head)
    if spec.is_self:
        _check_method(spec, SELF_DRAFTERS, "self-draft")
        return SELF_DRAFTERS[spec.draft_method](engine, spec, engine.model)
    return _model_drafter(spec, engine, draft_model)


def _check_limits(spec: SpeculationSpec, engine: Engine) -> None:
    if spec.draft_budget is not None and spec.draft_budget > engine.max_len:
        raise ConfigError(
            f"draft budget {spec.draft_budget} exceeds the longest sequence, {engine.max_len} "
            "tokens"
        )
    if spec.gamma > engine.max_gamma:
        raise ConfigError(
            f"gamma {spec.gamma} exceeds the {engine.max_gamma} that the engine was built for"
        )


def _check_method(spec: SpeculationSpec, known: dict[str, Make], whose: str) -> None:
    if spec.draft_method not in known:
        raise unknown_choice(f"draft method of a {whose}", spec.draft_method, known)


def _model_drafter(
    spec: SpeculationSpec, engine: Engine, model: Transformer | None
) -> Drafter | None:
    """The drafter of another model, which may be on fewer ranks than the target."""
    _check_method(spec, MODEL_DRAFTERS, "draft model")
    tp = engine.model.tp
    draft_size = spec.draft_tp_size or tp.size
    if draft_size > tp.size:
        raise ConfigError(
            f"the draft cannot be on {draft_size} ranks when the target is on {tp.size}"
        )
    if model is None and tp.rank < draft_size:
        raise ConfigError(f"draft {spec.draft} needs its model's weights")
    own = None
    if model is not None:
        own = MODEL_DRAFTERS[spec.draft_method](engine, spec, model)
    if draft_size == tp.size:
        return own
    return FewerRanksDrafter(engine, own, model.tp if model else None)
