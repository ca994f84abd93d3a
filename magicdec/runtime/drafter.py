"""The registry of draft methods. Adding one is a class and a line here."""

from __future__ import annotations

from collections.abc import Callable

from magicdec.errors import ConfigError, unknown_choice
from magicdec.runtime.drafters.base import Drafter
from magicdec.runtime.drafters.compact import StreamingLLMDrafter
from magicdec.runtime.drafters.draft_model import DraftModelDrafter
from magicdec.runtime.drafters.fewer_ranks import FewerRanksDrafter
from magicdec.runtime.drafters.ngram import NgramDrafter
from magicdec.runtime.drafters.snapkv import SnapKVDrafter
from magicdec.runtime.drafters.sparse_model import SparseModelDrafter
from magicdec.runtime.drafters.top_k import TopKDrafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import with_weight_dtype
from magicdec.specs.speculation import SpeculationSpec

SELF_DRAFTERS: dict[str, Callable[[Engine, SpeculationSpec, Transformer], Drafter]] = {
    "streamingllm": StreamingLLMDrafter,
    "snapkv": SnapKVDrafter,
    "topk": TopKDrafter,
}
MODEL_DRAFTERS: dict[str, Callable[[Engine, SpeculationSpec, Transformer], Drafter]] = {
    "streamingllm": SparseModelDrafter,
    "full": lambda engine, spec, model: DraftModelDrafter(engine, model),
}


def build_drafter(spec: SpeculationSpec, engine: Engine, draft_model: Transformer | None = None) -> Drafter | None:
    """The drafter that a specification names; None for autoregressive decoding.

    `draft_model` is the other model that drafts, or of a self-draft the target's copy in `draft_weight_dtype`. What is
    not in that format yet is converted here, anew for each drafter.

    Raises ConfigError when the method is unknown or does not go with the draft.
    """
    if spec.is_autoregressive:
        return None
    if spec.draft_budget is not None and spec.draft_budget > engine.max_len:
        raise ConfigError(f"draft budget {spec.draft_budget} exceeds the longest sequence, {engine.max_len} tokens")
    if spec.gamma > engine.max_gamma:
        raise ConfigError(f"gamma {spec.gamma} exceeds the {engine.max_gamma} that the engine was built for")
    if spec.draft_method == "ngram":
        return NgramDrafter(engine)
    if spec.is_self:
        if spec.draft_method not in SELF_DRAFTERS:
            raise unknown_choice("draft method of a self-draft", spec.draft_method, SELF_DRAFTERS)
        model = with_weight_dtype(draft_model or engine.model, spec.draft_weight_dtype)
        return SELF_DRAFTERS[spec.draft_method](engine, spec, model)
    return _build_model_drafter(spec, engine, draft_model)


def _build_model_drafter(spec: SpeculationSpec, engine: Engine, draft_model: Transformer | None) -> Drafter:
    """With a `draft_tp_size` below the target's, ranks beyond it have no draft model and are told what was drafted."""
    if spec.draft_method not in MODEL_DRAFTERS:
        raise unknown_choice("draft method of a draft model", spec.draft_method, MODEL_DRAFTERS)
    tp = engine.model.tp
    draft_size = spec.draft_tp_size or tp.size
    if draft_size > tp.size:
        raise ConfigError(f"the draft cannot be on {draft_size} ranks when the target is on {tp.size}")
    if draft_model is None and tp.rank < draft_size:
        raise ConfigError(f"draft {spec.draft} needs its model's weights")
    own = None
    if draft_model is not None:
        draft_model = with_weight_dtype(draft_model, spec.draft_weight_dtype)
        own = MODEL_DRAFTERS[spec.draft_method](engine, spec, draft_model)
    if draft_size < tp.size:
        return FewerRanksDrafter(engine, own, draft_model.tp if draft_model is not None else None)
    assert own is not None
    return own
