"""The registry of draft methods. Adding one is a class and a line here."""

from __future__ import annotations

from collections.abc import Callable

from magicdec.errors import ConfigError, unknown_choice
from magicdec.runtime.drafters.base import Drafter
from magicdec.runtime.drafters.streaming_llm import StreamingLLMDrafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.transformer import Transformer
from magicdec.specs.speculation import SpeculationSpec

SelfFactory = Callable[[Engine, SpeculationSpec], Drafter]

SELF_DRAFTERS: dict[str, SelfFactory] = {
    "streamingllm": StreamingLLMDrafter,
}


def build_drafter(spec: SpeculationSpec, engine: Engine, draft_model: Transformer | None = None) -> Drafter | None:
    """The drafter that a specification names; None for autoregressive decoding.

    Raises ConfigError when the method is unknown or does not go with the draft.
    """
    if spec.is_autoregressive:
        return None
    if spec.draft_budget is not None and spec.draft_budget > engine.max_len:
        raise ConfigError(f"draft budget {spec.draft_budget} exceeds the longest sequence, {engine.max_len} tokens")
    if spec.gamma > engine.max_gamma:
        raise ConfigError(f"gamma {spec.gamma} exceeds the {engine.max_gamma} that the engine was built for")
    if spec.is_self:
        if spec.draft_method not in SELF_DRAFTERS:
            raise unknown_choice("draft method of a self-draft", spec.draft_method, SELF_DRAFTERS)
        return SELF_DRAFTERS[spec.draft_method](engine, spec)
    raise ConfigError(f"draft '{spec.draft}' cannot be run yet; use self")
