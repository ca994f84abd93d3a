"""Which drafts a plan considers, each with its acceptance, or with the reason why it has none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from magicdec.errors import ConfigError, unknown_choice
from magicdec.naming import method_name
from magicdec.perfmodel import acceptance as laws
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.acceptance.believed import (
    Question,
    completed,
    held,
    kinds_of,
    measured_checkpoint,
    of_length,
    profile_on,
    yours,
)
from magicdec.perfmodel.acceptance.trained_length import Trained
from magicdec.perfmodel.plan.request import DraftOption, PlanRequest
from magicdec.perfmodel.plan.standing import (
    AskedDraft,
    Standing,
    has_module,
    is_published,
    packages_of,
    published_head,
    standing,
)
from magicdec.schema.plan import NeedsAcceptance
from magicdec.specs.catalog import (
    is_model,
    load_model_spec,
    model_names,
    models_that_may_draft,
)
from magicdec.specs.engine import EngineProfile
from magicdec.specs.formats import format_name
from magicdec.specs.heads import listed_head
from magicdec.specs.model import ModelSpec
from magicdec.specs.names import catalog_name
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import (
    DRAFT_METHODS,
    HEAD_METHODS,
    LOOKUP_METHODS,
    NAMED_DRAFTS,
    OWN_METHOD,
    SELF,
    SPARSE_METHODS,
    DraftMethod,
    HeadSpec,
    budget_at,
    draft_model_name,
    load_head,
)
from magicdec.tasks import shares_of

DEFAULT_BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096)
NUM_DRAFT_MODELS = 2
"""Number of catalog draft models that a plan considers by default."""
LARGEST_DRAFT_SHARE = 0.25
"""Largest size of such a draft model, as a share of the target's parameters."""
HEAD_WINDOWS = (2048, 4096)
"""Windows of heads to try: 2048 is the one that was measured most, and no shorter one was."""
LONG_CONTEXT = 65_536
"""Context from which windows are tried of heads that were trained at their target's lengths: they
gain what they do not read alone, which at 8k is nothing and at 1M a third of a step.
"""
RATE_BUDGET = 512
"""The budget that a single acceptance rate is taken to belong to when none is given."""


def draft_options(
    target: ModelSpec,
    request: PlanRequest,
    *,
    engine: EngineProfile,
    context: int,
) -> tuple[list[DraftOption], list[NeedsAcceptance]]:
    """The drafts to rank among those that the engine runs, and the drafts that lack a measured
    acceptance.

    Raises ConfigError for a draft or method that is unknown or that the engine does not run, and
    for a budget that is not below the context.
    """
    if request.draft_method is not None and request.draft_method not in DRAFT_METHODS:
        raise unknown_choice("draft method", request.draft_method, DRAFT_METHODS)
    if "none" in (request.draft, request.draft_method):
        return [], []
    request, head = _with_its_draft(request)
    usable = _budgets(request.draft_budgets, context)
    if request.gives_acceptance and not request.draft_budgets:
        usable = (min(RATE_BUDGET, max(8, context // 2)),)
    considered = _considered(target, request, context)
    options = []
    lacking = []
    refused = []
    for name, kind in considered:
        question = _question(target, name, kind, request, context, head)
        model = None
        if draft_model_name(name):
            model = _draft_model(name)
        found = _standing(target, name, kind, request, engine, question, head, model)
        if not found.starts or found.answer == "accepts nothing":
            refused.append((found, name))
            continue
        is_hypothetical = found.answer == "not published"
        if is_hypothetical:
            reason = f"{found.reason} (--draft {kind} plans with the acceptance of other models' heads)"
            lacking.append(
                NeedsAcceptance(draft=name, draft_method=kind, reason=reason)
            )
            if not request.names_a_draft:
                continue
        acceptance = _acceptance(target, name, kind, request, question, engine)
        if found.most_drafts is not None:
            acceptance = msgspec.structs.replace(
                acceptance, most_drafts=found.most_drafts
            )
        asked = question._replace(
            is_other_format=_has_other_weights(request, target, kind, name)
        )
        if "=" in question.task:
            # of a mixture, the task that most tokens are of
            shares = shares_of(question.task)
            asked = asked._replace(task=max(shares, key=lambda task: shares[task]))
        remarks = [
            packages_of(engine, name, kind),
            *(note.says for note in found.notes),
        ]
        option = DraftOption(
            draft=name,
            method=kind,
            model=model,
            budgets=_budgets_of(kind, engine, request, usable, context),
            acceptance=acceptance,
            draft_tp_size=request.draft_tp_size,
            head=head or listed_head(_checkpoint_of(request, question), kind),
            least_drafts=found.least_drafts,
            multiple=found.multiple,
            tree=request.tree,
            is_hypothetical=is_hypothetical,
            remarks=tuple(filter(None, remarks)),
            question=asked if acceptance.is_assumed else None,
        )
        options.append(option)
    names_its_ranks = request.draft_tp_size is not None
    if (request.names_a_draft or names_its_ranks) and not options and refused:
        # of a draft model the method that engines run
        raise ConfigError(_refusal(*refused[-1]))
    return options, lacking


def _standing(
    target: ModelSpec,
    draft: str,
    method: DraftMethod,
    request: PlanRequest,
    engine: EngineProfile,
    question: Question,
    head: HeadSpec | None = None,
    model: ModelSpec | None = None,
) -> Standing:
    """Whether a draft of a plan can be started, with the checkpoint that was named, or the published
    one whose acceptance is believed."""
    checkpoint = request.draft_model or request.draft_name or ""
    is_measured = _measured(draft, method, request) is not None
    if not checkpoint and method in HEAD_METHODS and not is_measured:
        checkpoint = measured_checkpoint(question)
    if not checkpoint and method == "mtp" and not has_module(target):
        checkpoint = published_head(target, method)
    asked = AskedDraft(
        draft=draft,
        method=method,
        checkpoint=checkpoint,
        head=head,
        model=model,
        gamma=request.gamma,
        tp_size=request.tp_size,
        draft_tp_size=request.draft_tp_size,
        pp_size=request.pp_size or 1,
        settings=request.settings,
        exists=is_measured or request.gives_acceptance,
        is_measured=is_measured,
    )
    return standing(asked, target, engine)


def _checkpoint_of(request: PlanRequest, question: Question) -> str:
    """The head that was named, or the published one that the belief knows most of."""
    return request.draft_name or measured_checkpoint(question)


def _refusal(found: Standing, draft: str) -> str:
    """Why a named draft cannot be started, and what to ask for instead."""
    if found.method not in (None, draft):
        return f"{found.sentence} (--draft {found.method})"
    return found.sentence


def _with_its_draft(
    request: PlanRequest,
) -> tuple[PlanRequest, HeadSpec | None]:
    """The request with the catalog's name of its draft, or the draft that a head or an acceptance
    rate stands for; and the head. Raises ConfigError for a head of another draft."""
    draft = request.draft
    if draft is not None:
        draft = catalog_name(draft)
    head = None
    if request.draft_model is not None:
        head = load_head(Path(request.draft_model))
        if draft not in (None, head.method):
            raise ConfigError(
                f"draft model {request.draft_model} is a head of {head.method}, not of {draft}; "
                "leave --draft out"
            )
        draft = head.method
    if draft != request.draft:
        request = msgspec.structs.replace(request, draft=draft)
    if request.gives_acceptance and not request.draft:
        # a single acceptance belongs to one draft
        draft = SELF
        if request.draft_method in OWN_METHOD:
            draft = request.draft_method
        request = msgspec.structs.replace(request, draft=draft)
    return request, head


def _budgets_of(
    method: DraftMethod,
    engine: EngineProfile,
    request: PlanRequest,
    usable: tuple[int, ...],
    context: int,
) -> tuple[int | None, ...]:
    """Budgets to try. For a sparse draft these are the usable ones; for a head, the windows that
    the engine can cut its attention to, and last its whole cache (None)."""
    if method in SPARSE_METHODS:
        return usable
    if not engine.draft("", method).window_setting:
        return (None,)
    if request.draft_budgets:
        return usable
    if method == "mtp" and context < LONG_CONTEXT:
        return (None,)
    windows = (window for window in HEAD_WINDOWS if window in usable)
    return (*windows, None)


def _has_other_weights(
    request: PlanRequest,
    target: ModelSpec,
    kind: DraftMethod,
    draft: str,
) -> bool:
    """Whether the draft's weights differ from those that its acceptance was published with. These
    are the target's own for a self-draft, and the published format or a wider one for a head or a
    draft model."""
    if request.draft_weight_dtype is None or kind in LOOKUP_METHODS:
        return False
    of_target = "bf16"
    if target.quantization is not None:
        of_target = target.quantization.weight_dtype
    if draft in (SELF, target.name):
        return request.draft_weight_dtype != (request.weight_dtype or of_target)
    published = "bf16"
    if kind == "mtp":
        published = of_target
    asked = Precision(weight_dtype=format_name(request.draft_weight_dtype))
    return asked.weight_bytes < Precision(weight_dtype=published).weight_bytes


def _considered(
    target: ModelSpec,
    request: PlanRequest,
    context: int,
) -> list[tuple[str, DraftMethod]]:
    """The (draft, method) pairs that a plan compares: the requested ones, else

    - self-drafts, look-ups and heads that any model may have,
    - the model's own prediction heads, and a copy of it in requested narrower weights,
    - drafts whose acceptance on this target is known,
    - the smallest draft models of its vocabulary.
    """
    if request.names_a_draft:
        return _pairs(request.draft, request.draft_method)
    pairs: list[Any] = list(_pairs(None, None))
    if is_published(target, "mtp"):
        pairs.append(("mtp", "mtp"))
    is_narrower = _has_other_weights(request, target, "full", SELF)
    if is_narrower and target.name in model_names():
        pairs += [(SELF, "full"), (target.name, "full")]  # a copy in these weights
    for profile in request.acceptance:
        pairs.append((profile.draft, profile.draft_method))
    pairs += laws.published_drafts(target.name)
    for kind in kinds_of(target.name):
        if kind in HEAD_METHODS:
            pairs.append((kind, kind))
    for name in islice(_small_drafts(target, context), NUM_DRAFT_MODELS):
        pairs.append((name, "full"))
    return list(dict.fromkeys(pairs))


def _small_drafts(target: ModelSpec, context: int) -> Iterator[str]:
    """Catalog models of the target's vocabulary that are small enough and read the context."""
    most = LARGEST_DRAFT_SHARE * target.num_parameters
    for name in models_that_may_draft(target, most_parameters=most):
        model = load_model_spec(name)
        if model.num_parameters <= most and model.longest_context >= context:
            yield name


def _draft_model(name: str) -> ModelSpec:
    """The draft's model. Raises ConfigError for one that is not known."""
    if not is_model(name):
        names = [*NAMED_DRAFTS, *model_names()]
        known = (
            f"known: {', '.join(NAMED_DRAFTS)}, or a model of the target's vocabulary"
        )
        raise unknown_choice("draft", name, names, or_else=known)
    return load_model_spec(name)


def _pairs(draft: str | None, method: str | None) -> list[tuple[str, DraftMethod]]:
    """The (draft, method) pairs that the two options mean; `self` alone means StreamingLLM."""
    chosen: Any = method
    if draft is None:
        if method in OWN_METHOD:
            return [(str(method), chosen)]
        if method is not None:
            return [(SELF, chosen)]
        named: tuple[DraftMethod, ...] = (*LOOKUP_METHODS, "eagle", "eagle3")
        sparse: list[Any] = [(SELF, kind) for kind in SPARSE_METHODS]
        return [*sparse, *((str(kind), kind) for kind in named)]
    if draft == SELF:
        return [(SELF, chosen or "streamingllm")]
    if draft in OWN_METHOD:
        if method not in (None, draft):
            raise ConfigError(
                f"draft {draft} has its own method; leave --draft-method out, not {method}"
            )
        return [(draft, draft)]
    if method:
        return [(draft, chosen)]
    return [(draft, "streamingllm"), (draft, "full")]


def check_profiles(
    profiles: Iterable[AcceptanceProfile],
    *,
    draft: str | None,
    method: str | None,
) -> None:
    """Raises ConfigError for the profile of a draft that the plan does not consider, since it would
    be ignored.
    """
    pairs = []
    if "none" not in (draft, method):
        pairs = _pairs(draft, method)
    planned = " or ".join(f"{name} ({kind})" for name, kind in pairs) or "none"
    for profile in profiles:
        if (profile.draft, profile.draft_method) not in pairs:
            raise ConfigError(
                f"an acceptance profile is of draft {profile.draft} ({profile.draft_method}), the "
                f"plan is for {planned}; plan with --draft {profile.draft} --draft-method "
                f"{profile.draft_method}, or leave the profile out"
            )


def load_profiles(
    paths: Iterable[Path],
    *,
    draft: str | None,
    method: str | None,
) -> tuple[AcceptanceProfile, ...]:
    """A user's profiles for a plan of these drafts. Raises ConfigError as `check_profiles` and
    `load_profile` do.
    """
    profiles = tuple(laws.load_profile(path) for path in paths)
    check_profiles(profiles, draft=draft, method=method)
    return profiles


def _measured(
    draft: str, method: DraftMethod, request: PlanRequest
) -> AcceptanceProfile | None:
    """The user's profile of a draft."""
    for profile in request.acceptance:
        if (profile.draft, profile.draft_method) == (draft, method):
            return profile
    return None


def _acceptance(
    target: ModelSpec,
    draft: str,
    method: DraftMethod,
    request: PlanRequest,
    question: Question,
    engine: EngineProfile,
) -> AcceptanceProfile:
    """The given rate, or a given profile of this draft; else what is exact of a copy of the target
    or was published of a narrower one; else the belief."""
    if request.gives_acceptance:
        return _given_acceptance(request, method, question, engine)
    measured = _measured(draft, method, request)
    other_format = _has_other_weights(request, target, method, draft)
    if measured is None and method == "full" and draft in (SELF, target.name):
        copy = _copy_acceptance(target, request, is_narrower=other_format)
        if copy is not None:
            return copy
    if measured is not None:
        return yours(measured, question)
    return profile_on(
        question._replace(is_other_format=other_format), draft=draft, method=method
    )


def _given_acceptance(
    request: PlanRequest, method: DraftMethod, question: Question, engine: EngineProfile
) -> AcceptanceProfile:
    """The acceptance of a given rate, or of the tokens per step at the gamma in use. Raises
    ConfigError where those may be of the steps that had a draft alone."""
    rates = request.acceptance_rate
    if rates is not None and request.accept_length is not None:
        raise ConfigError(
            "an acceptance rate and an accept length are two ways to say one thing; give one"
        )
    if rates is not None:
        in_use = request.gamma or 0
        given = rates if isinstance(rates, tuple) else (rates,)
        found = completed(
            laws.constant_profile(rates),
            question,
            num_given=max(len(given), in_use),
        )
        if len(given) > 1:
            return found
        return held(found, given[0], question.kind, in_use)
    length = request.accept_length
    gamma = request.gamma
    assert length is not None
    if not gamma:
        raise ConfigError(
            "an accept length is of one number of drafted tokens: give it with --gamma"
        )
    if length > gamma + 1:
        raise ConfigError(
            f"steps that draft {gamma} make at most {gamma + 1} tokens, not {length:g}"
        )
    share = request.drafted_share
    if share is None and method in LOOKUP_METHODS and engine.name == "vllm":
        raise ConfigError(
            f"of {method_name(method)} vLLM prints the mean of the steps that had a draft: give their "
            "share of all steps with --drafted-share, or --drafted-share 1 if this length is of all "
            "steps"
        )
    share = share or 1.0
    found = of_length(1.0 + (length - 1.0) * share, gamma, question)
    if share < 1.0:
        return msgspec.structs.replace(found, drafted_share=share)
    return found


def _copy_acceptance(
    target: ModelSpec,
    request: PlanRequest,
    *,
    is_narrower: bool,
) -> AcceptanceProfile | None:
    """The acceptance of a copy of the target: exact for its own weights, and for narrower ones the
    published acceptance of an int4 copy, which wider copies exceed. None: nobody measured it."""
    dtype = ""
    if is_narrower:
        dtype = "int4"
    return laws.default_profile(
        target.name,
        "full",
        temperature=request.temperature,
        weight_dtype=dtype,
    )


def _question(
    target: ModelSpec,
    draft: str,
    method: DraftMethod,
    request: PlanRequest,
    context: int,
    head: HeadSpec | None,
) -> Question:
    """The draft, target and text as the belief is asked about them."""
    trained = Trained()
    window = None
    if head is not None:
        window = head.window
        bound = head.max_positions
        if bound is not None and bound >= target.max_position_embeddings:
            bound = None  # its target's, which says nothing of its texts
        trained = Trained(bound, head.rotary_base)
    return Question.about(
        target,
        draft,
        method,
        checkpoint=request.draft_name or "",
        task=request.task or "",
        temperature=request.temperature,
        context=float(context),
        trained=trained,
        window=window,
    )


def _budgets(asked: tuple[int | str, ...], context: int) -> tuple[int, ...]:
    budgets = [budget_at(each, context) for each in asked]
    for budget in budgets:
        if budget >= context:
            raise ConfigError(
                f"draft budget {budget} must be below the context {context}; for instance "
                f"{max(8, context // 8)}"
            )
    if budgets:
        return tuple(sorted(set(budgets)))
    return tuple(budget for budget in DEFAULT_BUDGETS if budget <= context // 2) or (
        max(8, context // 2),
    )
