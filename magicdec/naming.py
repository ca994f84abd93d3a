"""Ways to draft: the sort of each, whether our runtime runs it, and its name in text."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

ENGINE_TITLES = {
    "vllm": "vLLM 0.33",
    "sglang": "SGLang 0.5.23",
    "trtllm": "TensorRT-LLM 1.2",
}
"""Serving engines, with the versions that are priced, and that exports are written for, where none is named."""


HEADS_LISTED = "2026-11"
"""Month of the table of heads: one that it does not have may be published since, or be unknown to it."""


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """A way to draft. How an engine is asked for it stands in the engine's file."""

    text: str
    """Name in text."""
    sort: Literal["none", "whole", "sparse", "lookup", "head", "parallel"]
    """How it drafts: with its whole cache; with a part of it, of `draft_budget` slots; by looking
    text up, without a network; with a head on the target's hidden states, token by token, or a
    block in one pass over masked positions."""
    is_run: bool = True
    """Whether our runtime runs it; else it is planned for alone."""
    has_checkpoint: bool = True
    """Whether it is a network that the target does not bring along."""
    selects: Literal["never", "after_prompt", "each_block"] = "never"
    """When a sparse cache's tokens are selected by their attention."""

    called: tuple[str, ...] = ()
    """Names by which engines call it, in small letters with underscores; "p_eagle" for "p-eagle" goes
    without saying."""
    in_names: str = ""
    """Pattern of it in the names of heads' repositories; "": these do not tell it."""
    plural: str = ""
    """Such drafts in text, where that is not `text`."""
    short: str = ""
    """Name in a figure's cell, where `text` is too long."""
    group: str = "self"
    """Group of drafts whose acceptance is alike, in the belief."""
    parallel_of: str = ""
    """The head that it is, drafting a block in one pass: engines are asked for it by that head's name and
    a switch."""
    head_layers: int = 1
    head_window: int | None = None
    head_vocab_size: int | None = None
    head_most_drafts: int | None = None
    """The usual published head: its layers, the window of all of them, the tokens that it can propose
    where that is not its target's vocabulary, and the longest block that it was trained for."""

    @property
    def is_head(self) -> bool:
        return self.sort in ("head", "parallel")

    @property
    def is_trained_apart(self) -> bool:
        """Whether it is a head that anybody can train anew, not published with its target."""
        return self.is_head and self.has_checkpoint


METHODS: Mapping[str, Method] = {
    "none": Method(text="none", sort="none"),
    "full": Method(
        text="full KV", sort="whole", plural="draft models", short="copy", group="model"
    ),
    "streamingllm": Method(
        text="StreamingLLM",
        sort="sparse",
        plural="StreamingLLM drafts",
        short="StrLLM",
    ),
    "snapkv": Method(
        text="SnapKV", sort="sparse", selects="after_prompt", plural="SnapKV drafts"
    ),
    "topk": Method(
        text="top-k", sort="sparse", selects="each_block", plural="top-k drafts"
    ),
    "ngram": Method(
        text="n-gram",
        sort="lookup",
        has_checkpoint=False,
        plural="n-gram look-ups",
        group="lookup",
        called=("ngram_gpu", "prompt_lookup"),
    ),
    "suffix": Method(
        text="suffix decoding",
        sort="lookup",
        has_checkpoint=False,
        short="suffix",
        group="lookup",
        called=("suffix_decoding",),
    ),
    "eagle": Method(text="EAGLE", sort="head", group="head", in_names="eagle"),
    "eagle3": Method(
        text="EAGLE-3",
        sort="head",
        group="eagle3",
        in_names=r"eagle-?3(?![\d.]*b\b)",
        head_vocab_size=32_000,
    ),
    "mtp": Method(
        text="multi-token prediction",
        sort="head",
        has_checkpoint=False,
        in_names=r"gemma-4.*-assistant",
        plural="MTP",
        short="MTP",
        group="mtp",
        called=(
            "nextn",
            "deepseek_mtp",
            "qwen3_next_mtp",
            "glm4_moe_mtp",
            "ernie_mtp",
            "mimo_mtp",
        ),
    ),
    "dspark": Method(
        text="DSpark",
        sort="parallel",
        group="block",
        in_names="dspark",
        head_layers=5,
        head_window=2048,
        head_most_drafts=7,
    ),
    "dflash": Method(
        text="DFlash",
        sort="parallel",
        group="block",
        in_names="dflash",
        head_layers=5,
        head_most_drafts=15,
    ),
    "p-eagle": Method(
        text="P-EAGLE",
        sort="parallel",
        group="eagle3",
        called=("peagle",),
        in_names=r"\bp-?eagle",
        parallel_of="eagle3",
        head_layers=4,
    ),
}
"""n-gram: what followed the last tokens before; suffix: what most often followed the longest
suffix, earlier answers included. EAGLE's head reads the last layer, EAGLE-3's three layers, with a
vocabulary of its own; heads of multi-token prediction are published with the model. DSpark chains
the positions of its block and has a window; DFlash is a block diffusion; P-EAGLE a parallel
EAGLE-3."""


DRAFT_NAMES = {
    called: name
    for name, method in METHODS.items()
    if method.sort in ("lookup", "head", "parallel")
    for called in (name.replace("-", "_"), *method.called)
}
"""Engines' names of drafts by ours."""


class Configuration(Protocol):
    """A record, a specification or a plan's candidate."""

    @property
    def draft(self) -> str: ...
    @property
    def draft_method(self) -> str: ...
    @property
    def draft_budget(self) -> int | None: ...
    @property
    def gamma(self) -> int: ...


def parallel_form(method: str) -> str:
    """The method that drafts a block in one pass with this head; itself where there is none."""
    for name, each in METHODS.items():
        if each.parallel_of == method:
            return name
    return method


def draft_by_name(text: str) -> str | None:
    """Our name of a draft that an engine, or the name of a head's repository, calls otherwise; None
    where the name is no such one."""
    key = text.strip().lower().replace("-", "_").replace(" ", "_")
    for spelling in (key, key.replace("_", ""), key.strip("[]")):
        if spelling in DRAFT_NAMES:
            return DRAFT_NAMES[spelling]
    if text.count("/") == 1 and not os.path.exists(text):
        return head_named_in(text)
    return None


HEADS_IN_NAMES = tuple(
    (name, METHODS[name].in_names)
    for name in sorted(METHODS, key=len, reverse=True)
    if METHODS[name].in_names
)
"""Kinds of heads by what their repositories' names have, the more special first; "EAGLE-3B" is an
EAGLE of a model of 3B."""


def head_named_in(checkpoint: str) -> str | None:
    """The sort of head that a repository's name tells, whatever its owner is called."""
    name = re.sub(r"[_ .]", "-", checkpoint.rstrip("/").rpartition("/")[2].lower())
    for method, pattern in HEADS_IN_NAMES:
        if re.search(pattern, name):
            return method
    return None


def method_name(method: str) -> str:
    if method in METHODS:
        return METHODS[method].text
    return method


def draft_name(draft: str, method: str, budget: int | None = None) -> str:
    """A draft in text: "StreamingLLM 512", "draft model tinyllama-1.1b", "EAGLE-3, window 2048", or
    "none"."""
    if "none" in (method, draft):
        return "none"
    if draft in ("self", method):
        name = method_name(method)
    elif method == "full":
        name = f"draft model {draft}"
    else:
        name = f"{draft}, {method_name(method)}"
    return name + _budget_of(method, budget)


def _budget_of(method: str, budget: int | None) -> str:
    """The end of a draft's name: a head's budget is the window of its attention."""
    if budget is None:
        return ""
    if method in METHODS and METHODS[method].is_head:
        return f", window {budget}"
    return f" {budget}"


def draft_id(draft: str, method: str, budget: int | None = None) -> str:
    """A draft in the words of the options, for tables: "streamingllm 512", "tinyllama-1.1b full",
    or "none".
    """
    if draft in ("self", "none", method):
        name = method
    else:
        name = f"{draft} {method}"
    if budget is not None:
        return f"{name} {budget}"
    return name


PROPER_NAMES = (
    "ada", "apple", "arc", "ascend", "gaudi2", "gaudi3", "halo", "laptop", "max", "radeon", "strix", "super", "ti",
    "ultra",
)  # fmt: skip
"""Words of devices' names that are no abbreviations."""


def device_name(hardware: str) -> str:
    """A device in text: "A100 SXM 80 GB", "GB200 (NVL72)", "AMD EPYC x2"."""
    words = [word for word in hardware.split("-") if word != "cpu"] or [hardware]
    return " ".join(map(_word_of_device, words))


def _word_of_device(word: str) -> str:
    size = re.fullmatch(r"(\d+)gb", word)
    if size is not None:
        return f"{size[1]}\u00a0GB"
    if re.fullmatch(r"nvl\d+", word):  # one device of a domain of so many
        return f"({word.upper()})"
    if re.fullmatch(r"x\d+", word):
        return word
    if word in PROPER_NAMES:
        return word.capitalize()
    return word.upper()


def describe(configuration: Configuration, *, symbol: str = "gamma") -> str:
    """A configuration in a few words: "StreamingLLM 256, gamma 3"."""
    if configuration.gamma == 0 or configuration.draft_method == "none":
        return "autoregressive"
    draft = configuration.draft
    method = configuration.draft_method
    # a record says more than a specification
    weights = getattr(configuration, "draft_weight_dtype", None)
    is_adaptive = getattr(configuration, "adaptive", False)
    words = ("" if draft in ("self", method) else f"{draft} ") + method_name(method)
    words += _budget_of(method, configuration.draft_budget)
    words += "" if weights is None else f", {weights} draft"
    up_to = "up to " if is_adaptive else ""
    return f"{words}, {symbol} {up_to}{configuration.gamma}"
