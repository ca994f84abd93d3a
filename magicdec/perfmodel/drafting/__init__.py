"""Drafts: one class for each sort, with its network, bytes, operations, upkeep, prefill and memory.

A method of `naming.METHODS` is drafted by the class of its sort, or by one of its own.
"""

from __future__ import annotations

from typing import Any

from magicdec.counts import Array
from magicdec.naming import METHODS
from magicdec.perfmodel.drafting.base import Block, Draft, KeptTokens, PrefillPrompts
from magicdec.perfmodel.drafting.heads import (
    Eagle3Draft,
    HeadDraft,
    ParallelEagleHead,
    ParallelHead,
    PredictionHeadDraft,
)
from magicdec.perfmodel.drafting.lookup import LookUp
from magicdec.perfmodel.drafting.networks import DraftModel, SelfDraft
from magicdec.perfmodel.setup import ModelSetup

__all__ = [
    "Block",
    "Draft",
    "KeptTokens",
    "PrefillPrompts",
    "draft_kv_tokens",
    "draft_of",
    "draft_tp",
]

OWN_CLASSES: dict[str, type[Draft]] = {
    "eagle3": Eagle3Draft,
    "mtp": PredictionHeadDraft,
}
"""Classes of methods that differ from others of their sort."""
SORTS: dict[str, type[Draft]] = {
    "none": Draft,
    "lookup": LookUp,
    "head": HeadDraft,
    "parallel": ParallelHead,
}
"""Classes by sort, of drafts whose method says all; others are models, or the target itself."""


def draft_of(setup: ModelSetup) -> Draft:
    """The draft of a setup."""
    speculation = setup.speculation
    method = speculation.draft_method
    if "none" in (method, speculation.draft):
        return Draft(setup)
    sort = METHODS[method].sort
    if METHODS[method].parallel_of == "eagle3":
        return ParallelEagleHead(setup)
    if method in OWN_CLASSES:
        return OWN_CLASSES[method](setup)
    if sort in SORTS:
        return SORTS[sort](setup)
    if speculation.is_self:
        return SelfDraft(setup)
    return DraftModel(setup)


def draft_tp(setup: ModelSetup, tp_size: Any) -> Array:
    """Ranks that a setup's draft runs on."""
    return draft_of(setup).ranks(tp_size)


def draft_kv_tokens(setup: ModelSetup, kv_len: Any, budget: Any) -> Array:
    """Cached tokens that one step of a setup's draft reads per sequence."""
    return draft_of(setup).tokens_read(kv_len, budget)
