"""Which drafts a plan considers, each with its acceptance, or with the reason why it has none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicdec.errors import ConfigError, unknown_choice
from magicdec.perfmodel import acceptance as laws
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.plan_document import NeedsAcceptance
from magicdec.specs.catalog import load_model_spec, model_names
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import DRAFT_METHODS, HEAD_METHODS, SELF, SPARSE_METHODS, DraftMethod, SpeculationSpec

DEFAULT_BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096)
RATE_BUDGET = 512
"""The budget that a single acceptance rate is taken to belong to when none is given."""
OWN_METHOD = ("ngram", *HEAD_METHODS)
"""Drafts whose name is their method."""
NAMED_DRAFTS = (SELF, "none", "ngram", *HEAD_METHODS)


@dataclass(frozen=True, kw_only=True)
class DraftOption:
    """One draft and method with its budgets (0: the full cache) and its acceptance (None: it needs one)."""

    draft: str
    method: DraftMethod
    model: ModelSpec | None
    budgets: tuple[int, ...]
    acceptance: AcceptanceProfile | None
    draft_tp_size: int | None = None

    def speculation(self, *, budget: int | None = None) -> SpeculationSpec:
        chosen = budget if budget is not None else self.budgets[0]
        return SpeculationSpec(
            draft=self.draft,
            draft_method=self.method,
            draft_budget=chosen if self.method in SPARSE_METHODS else None,
            draft_tp_size=self.draft_tp_size,
        )


def draft_options(
    *,
    target: ModelSpec,
    draft: str | None,
    method: str | None,
    budgets: tuple[int, ...],
    context: int,
    longest_context: int,
    profiles: tuple[AcceptanceProfile, ...],
    rate: float | tuple[float, ...] | None,
    draft_tp_size: int | None,
    is_quantised: bool = False,
) -> tuple[list[DraftOption], list[NeedsAcceptance]]:
    """The drafts to rank, and those that would need a measured acceptance first.

    Raises ConfigError for an unknown draft or method, and for a budget that is not below the context.
    """
    if method is not None and method not in DRAFT_METHODS:
        raise unknown_choice("draft method", method, DRAFT_METHODS)
    if draft == "none" or method == "none":
        return [], []
    usable = _budgets(budgets, context, longest_context)
    if rate is not None:
        draft = draft or (method if method in OWN_METHOD else SELF)
        usable = usable if budgets else (min(RATE_BUDGET, max(8, context // 2)),)
    options: list[DraftOption] = []
    lacking: list[NeedsAcceptance] = []
    for name, kind in _pairs(draft, method):
        model = None if name in NAMED_DRAFTS else _draft_model(name, target)
        if rate is not None:
            law: AcceptanceProfile | None = laws.constant_profile(rate)
        else:
            law = _law(target, name, kind, profiles, is_quantised)
        if law is None:
            weights = " with other weights than its target's" if is_quantised else ""
            reason = f"no published acceptance of {name}/{kind}{weights} for {target.name}; measure it, or give a rate"
            lacking.append(NeedsAcceptance(draft=name, draft_method=kind, reason=reason))
            continue
        options.append(
            DraftOption(
                draft=name,
                method=kind,
                model=model,
                budgets=usable if kind in SPARSE_METHODS else (0,),
                acceptance=law,
                draft_tp_size=draft_tp_size,
            )
        )
    return options, lacking


def _draft_model(name: str, target: ModelSpec) -> ModelSpec:
    """The draft's model. Raises ConfigError for one of another vocabulary, naming the catalog's that would do."""
    model = load_model_spec(name)
    if model.vocab_size != target.vocab_size:
        catalog = (load_model_spec(each) for each in model_names())
        usable = sorted(
            (each for each in catalog if each.vocab_size == target.vocab_size),
            key=lambda each: each.num_parameters,
        )
        smaller = [each.name for each in usable if each.num_parameters < target.num_parameters / 2]
        raise ConfigError(
            f"draft {model.name} has a vocabulary of {model.vocab_size}, {target.name} one of {target.vocab_size}: "
            f"a draft needs its target's vocabulary; in the catalog: {', '.join([*smaller, SELF])}"
        )
    return model


def _pairs(draft: str | None, method: str | None) -> list[tuple[str, DraftMethod]]:
    """The (draft, method) pairs that the two options mean; `self` alone means StreamingLLM."""
    chosen: Any = method
    if draft is None:
        if method in OWN_METHOD:
            return [(str(method), chosen)]
        if method is not None:
            return [(SELF, chosen)]
        return [*((SELF, each) for each in SPARSE_METHODS), ("ngram", "ngram"), ("eagle", "eagle")]
    if draft == SELF:
        return [(SELF, chosen or "streamingllm")]
    if draft in OWN_METHOD:
        if method not in (None, draft):
            raise ConfigError(f"draft {draft} has its own method; leave --draft-method out, not {method}")
        return [(draft, draft)]
    return [(draft, chosen)] if method else [(draft, "streamingllm"), (draft, "full")]


def check_profiles(profiles: Iterable[AcceptanceProfile], *, draft: str | None, method: str | None) -> None:
    """Raises ConfigError for a profile of a draft that such a plan does not consider: it would not be used."""
    pairs = [] if "none" in (draft, method) else _pairs(draft, method)
    planned = " or ".join(f"{name} ({kind})" for name, kind in pairs) or "none"
    for profile in profiles:
        if not any(_describes(profile, name, kind) for name, kind in pairs):
            own = f"--draft {profile.draft} --draft-method {profile.draft_method}"
            raise ConfigError(
                f"an acceptance profile is of draft {profile.draft} ({profile.draft_method}), the plan is for "
                f"{planned}; plan with {own}, or leave the profile out"
            )


def load_profiles(paths: Iterable[Path], *, draft: str | None, method: str | None) -> tuple[AcceptanceProfile, ...]:
    """A user's profiles for a plan of these drafts. Raises ConfigError as `check_profiles` and `load_profile` do."""
    profiles = tuple(laws.load_profile(path) for path in paths)
    check_profiles(profiles, draft=draft, method=method)
    return profiles


def _describes(profile: AcceptanceProfile, draft: str, method: DraftMethod) -> bool:
    return profile.draft_method == method and profile.draft == draft


def _law(
    target: ModelSpec, draft: str, method: DraftMethod, profiles: tuple[AcceptanceProfile, ...], is_quantised: bool
) -> AcceptanceProfile | None:
    """A given profile of this draft, else the published default of this target and draft (never for other weights)."""
    for profile in profiles:
        if _describes(profile, draft, method):
            return profile
    return None if is_quantised else laws.default_profile(target.name, method, draft=draft)


def _budgets(budgets: tuple[int, ...], context: int, longest_context: int) -> tuple[int, ...]:
    for budget in budgets:
        if budget >= context:
            raise ConfigError(
                f"draft budget {budget} must be below the context {context}; for instance {max(8, context // 8)}"
            )
    if budgets:
        return tuple(sorted(set(budgets)))
    return tuple(budget for budget in DEFAULT_BUDGETS if budget <= longest_context // 2) or (max(8, context // 2),)
