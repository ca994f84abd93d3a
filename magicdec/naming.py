"""What a draft and a configuration are called in text, everywhere alike."""

from __future__ import annotations

from typing import Protocol

METHOD_NAMES = {
    "streamingllm": "StreamingLLM", "snapkv": "SnapKV", "topk": "top-k", "full": "full KV", "ngram": "n-gram",
    "suffix": "suffix", "eagle": "EAGLE", "eagle3": "EAGLE-3",
    "mtp": "multi-token prediction", "dspark": "DSpark", "dflash": "DFlash", "p-eagle": "P-EAGLE",
}  # fmt: skip


class Configuration(Protocol):
    """A record, a specification or a plan's candidate."""

    @property
    def draft(self) -> str: ...
    @property
    def draft_method(self) -> str: ...
    @property
    def draft_budget(self) -> int | None: ...
    @property
    def draft_weight_dtype(self) -> str | None: ...
    @property
    def gamma(self) -> int: ...


def method_name(method: str) -> str:
    return METHOD_NAMES.get(method, method)


def draft_name(draft: str, method: str) -> str:
    """ "StreamingLLM", "tinyllama-1.1b, full KV", or "none"."""
    if "none" in (method, draft):
        return "none"
    return method_name(method) if draft in ("self", method) else f"{draft}, {method_name(method)}"


def describe(configuration: Configuration, *, symbol: str = "gamma") -> str:
    """A configuration in a few words: "StreamingLLM 256, gamma 3"."""
    if configuration.gamma == 0 or configuration.draft_method == "none":
        return "autoregressive"
    draft, method, weights = configuration.draft, configuration.draft_method, configuration.draft_weight_dtype
    words = "" if draft in ("self", method) else f"{draft} "
    words += method_name(method)
    words += "" if configuration.draft_budget is None else f" {configuration.draft_budget}"
    words += "" if weights is None else f", {weights} draft"
    return f"{words}, {symbol} {'up to ' * getattr(configuration, 'adaptive', False)}{configuration.gamma}"
