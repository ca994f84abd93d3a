"""Whether a draft can be started for a target in an engine: the one place that plans, checks,
exports, runs and the page ask.

What stands against a draft is compared by shapes, as an engine compares them when it loads weights:
a head of a model starts on every fine-tune of it. Names count only where no configuration and no
row of the table of heads tells more (specs/heads.py).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from magicdec.naming import method_name
from magicdec.perfmodel.acceptance.belief import plain_model
from magicdec.perfmodel.acceptance.believed import known_checkpoints
from magicdec.specs.catalog import load_model_spec, models_that_may_draft
from magicdec.specs.engine import (
    EngineProfile,
    engine_names,
    engines_that_run,
    load_engine,
)
from magicdec.specs.heads import HeadFacts, facts_of, facts_of_configuration, heads_of
from magicdec.specs.hub import is_hub_name
from magicdec.specs.model import ModelSpec
from magicdec.specs.rules import Finding, finding
from magicdec.specs.speculation import (
    HEAD_METHODS,
    OWN_METHOD,
    PUBLISHED_HEADS,
    SELF,
    DraftMethod,
    HeadSpec,
    draft_kind,
)

UNSAID_MODULES = ("qwen3_next",)
"""Architectures whose checkpoints hold a prediction module that their configurations do not name
(vLLM reads one of them as `qwen3_next_mtp`)."""


@dataclass(frozen=True, kw_only=True)
class AskedDraft:
    """A draft as it is asked to be started."""

    draft: str
    method: DraftMethod
    checkpoint: str = ""
    """The repository or the path of its weights; "": not said."""
    head: HeadSpec | None = None
    """Its configuration, where that was given."""
    model: ModelSpec | None = None
    """The model that drafts, where it is another one than the target."""
    gamma: int | None = None
    tp_size: int | None = None
    """The target's ranks; None: not said."""
    draft_tp_size: int | None = None
    pp_size: int = 1
    settings: Collection[str] = ()
    """Names of the options, keys and variables that the engine is given."""
    exists: bool = False
    """Whether the user has it: its acceptance is measured or given."""
    is_measured: bool = False
    """Whether its acceptance was measured, with a block as long as it has."""
    reads_files: bool = True
    """Whether files may be read, and the hub asked, about its checkpoint."""


class Standing(NamedTuple):
    """Whether a draft can be started, and why not."""

    answer: Literal["starts", "unknown", "not published", "cannot start"]
    reason: str = ""
    """Why it does not start, what would have to be trained, or what is not known."""
    cure: str = ""
    """The thing to do instead, in words."""
    method: DraftMethod | None = None
    """The method that the checkpoint is of, where another one was asked for."""
    most_drafts: int | None = None
    """Tokens that it proposes at most in a step; None: any number, or not known."""
    multiple: int = 1
    """Number of which more drafts than it must be a multiple."""
    no_engine_for: tuple[str, str] | None = None
    """The draft and method that this engine does not run. Those that do are the cure."""

    @property
    def starts(self) -> bool:
        """Whether nothing is known to keep it from starting."""
        return self.answer != "cannot start"

    @property
    def sentence(self) -> str:
        """The reason and the cure."""
        cure = self.cure
        if self.no_engine_for is not None:
            others = engines_that_run(*self.no_engine_for)
            if not others:
                cure = "no engine does"
            elif len(others) == 1:
                cure = f"--engine {others[0]} does"
            else:
                cure = f"--engine {', '.join(others)} do"
        if not cure:
            return self.reason
        return f"{self.reason}; {cure}"


def standing(asked: AskedDraft, target: ModelSpec, engine: EngineProfile) -> Standing:
    """Whether a draft can be started for a target in a version of an engine.

    Raises ConfigError for a checkpoint's configuration that cannot be read.
    """
    unable = _unable_engine(asked, target, engine)
    if unable is not None:
        return unable
    if asked.model is not None:
        return _model_standing(asked.model, target)
    if asked.method not in HEAD_METHODS:
        return Standing("starts")
    facts = _facts(asked)
    if asked.method == "mtp" and _is_targets_own(facts, target):
        return _module_standing(asked, target, engine)
    unfit = _unfit(asked, facts, target, engine)
    if unfit is not None:
        return unfit
    most = facts.most_drafts
    if facts.proof and not facts.is_by_name:
        return _checkpoint_standing(asked, facts, target)
    if asked.checkpoint and is_named(asked.checkpoint):
        return _unknown_standing(asked, facts, target)
    if asked.exists or is_published(target, asked.method):
        return Standing("starts", most_drafts=most)
    return Standing(
        "not published",
        f"no {_name(asked.method)} head is published for {target.name}: one would have to be "
        "trained first",
        most_drafts=most,
    )


def is_named(checkpoint: str) -> bool:
    """Whether a text names one checkpoint, as a repository or a path, not a part of a name."""
    return is_hub_name(checkpoint) or "/" in checkpoint


def is_published(target: ModelSpec, method: str) -> bool:
    """Whether a head of this kind is published for a target."""
    if method == "mtp":
        return has_module(target)
    return bool(known_checkpoints(target.name, method) or heads_of(target.name, method))


def has_module(target: ModelSpec) -> bool:
    """Whether a target's checkpoint holds a module that predicts further tokens."""
    return bool(target.mtp_layers) or target.architecture in UNSAID_MODULES


def published_head(target: ModelSpec, method: str) -> str:
    """The repository of a published head for a target whose acceptance nobody measured; "": the
    table has none."""
    for head in heads_of(target.name, method):
        return head.checkpoint
    return ""


def packages_of(engine: EngineProfile, draft: str, method: str) -> str:
    """The package that an engine needs for a draft, in words; ""."""
    package = engine.draft(draft, method).package
    if not package:
        return ""
    return (
        f"{_name(method)} in {engine.name} needs the package {package} "
        f"(pip install {package})"
    )


def in_stages(
    engine: EngineProfile,
    draft: str,
    method: str,
    target: ModelSpec,
    pp_size: int,
    settings: Collection[str] = (),
) -> Finding | None:
    """What is known of a draft in a pipeline of several stages. None: there is one stage."""
    if pp_size == 1:
        return None
    kind = draft_kind(draft, method)
    return finding(
        "draft in stages",
        engine.name,
        engine.version,
        settings=settings,
        draft_kind=kind,
        architecture=target.architecture,
        engine_name=engine.name,
        draft=_name(method) if method in OWN_METHOD else draft,
        target=target.name,
        pp=pp_size,
    )


def is_known_in_stages(
    engine: EngineProfile, draft: str, method: str, target: ModelSpec, pp_size: int
) -> bool:
    """Whether an engine is known to run a draft with this many stages."""
    found = in_stages(engine, draft, method, target, pp_size)
    return found is None or (found.kind != "wrong" and found.is_looked_up)


def _unable_engine(
    asked: AskedDraft, target: ModelSpec, engine: EngineProfile
) -> Standing | None:
    """The obstacle that keeps an engine from running this kind of draft, spread like this."""
    kind = draft_kind(asked.draft, asked.method)
    if not engine.runs(asked.draft, asked.method):
        versions = ""
        if engine.name in engine_names():
            newest = load_engine(engine.name)
            versions = newest.versions_that_run(asked.draft, asked.method)
        if versions:
            return Standing(
                "cannot start",
                f"this version of {engine.name} does not run {kind}",
                versions,
            )
        return Standing(
            "cannot start",
            f"engine {engine.name} does not run {kind}",
            no_engine_for=(asked.draft, asked.method),
        )
    staged = in_stages(
        engine, asked.draft, asked.method, target, asked.pp_size, asked.settings
    )
    if staged is not None and staged.kind == "wrong":
        return Standing(
            "cannot start", staged.says, "leave the stages or the draft out"
        )
    tp = asked.tp_size
    draft_tp = asked.draft_tp_size
    if tp is None or draft_tp is None:
        return None
    if draft_tp > tp:
        return Standing(
            "cannot start",
            f"draft tp {draft_tp} is more than the target's tp {tp}",
            f"use {tp}",
        )
    if engine.paths.draft_on_all_ranks and draft_tp not in (1, tp):
        return Standing(
            "cannot start",
            f"engine {engine.name} runs a draft on 1 rank or on all {tp}, not on {draft_tp}",
            f"use {tp}",
            method=asked.method,
        )
    return None


def _model_standing(model: ModelSpec, target: ModelSpec) -> Standing:
    """A draft model, whose tokens must be its target's."""
    if model.vocab_size == target.vocab_size:
        return Standing("starts")
    usable = []
    for other in map(load_model_spec, models_that_may_draft(target)):
        if other.num_parameters < target.num_parameters / 2:
            usable.append(other.name)
    return Standing(
        "cannot start",
        f"draft {model.name} has a vocabulary of {model.vocab_size}, {target.name} one of "
        f"{target.vocab_size}: a draft needs its target's vocabulary",
        f"in the catalog: {', '.join([*usable, SELF])}",
    )


def _facts(asked: AskedDraft) -> HeadFacts:
    """The known facts of the draft's head: of the one that was given, else of its checkpoint."""
    if asked.head is not None:
        return facts_of_configuration(asked.checkpoint, asked.head)
    if asked.checkpoint and is_named(asked.checkpoint):
        return facts_of(asked.checkpoint, reads_files=asked.reads_files)
    usual = PUBLISHED_HEADS.get(asked.method)
    if usual is None or asked.is_measured:
        return HeadFacts(checkpoint="")
    return HeadFacts(checkpoint="", most_drafts=usual.most_drafts)


def _is_targets_own(facts: HeadFacts, target: ModelSpec) -> bool:
    """Whether no checkpoint but the target's own is named for its prediction module."""
    if not facts.proof:
        return not facts.checkpoint
    return facts.is_by_name and facts.method is None and facts.target == target.name


def _module_standing(
    asked: AskedDraft, target: ModelSpec, engine: EngineProfile
) -> Standing:
    """Multi-token prediction without a checkpoint of its own."""
    draft = engine.draft(asked.draft, asked.method)
    if target.architecture in draft.not_of:
        return Standing(
            "cannot start",
            f"engine {engine.name} does not run the prediction modules of {target.architecture}",
            "leave the draft out, or choose another one",
        )
    multiple = 1
    if draft.takes_multiples:
        multiple = max(len(target.mtp_layers), 1)
    gamma = asked.gamma or 0
    if gamma > multiple and gamma % multiple:
        return Standing(
            "cannot start",
            f"{engine.name} takes more drafts than {target.name} has prediction modules "
            f"({multiple}) in multiples of them, not {gamma}",
            f"use {gamma // multiple * multiple}",
            method=asked.method,
        )
    if has_module(target):
        return Standing("starts", multiple=multiple)
    return Standing(
        "cannot start",
        f"{target.name} has no prediction module to draft with: its config.json names none "
        "(num_nextn_predict_layers)",
        "leave the draft out, or choose another one",
    )


def _unfit(
    asked: AskedDraft, facts: HeadFacts, target: ModelSpec, engine: EngineProfile
) -> Standing | None:
    """The part of a checkpoint that does not go with the target, the method or gamma."""
    by = _how_known(facts)
    head = facts.checkpoint or "the head"
    if facts.method is not None and not _is_alike(facts.method, asked.method, engine):
        return Standing(
            "cannot start",
            f"{by}{head} is a head of {_name(facts.method)}: as {_name(asked.method)} it accepts "
            "nothing",
            f"draft with {_name(facts.method)}",
            method=facts.method,
            most_drafts=facts.most_drafts,
        )
    if facts.hidden_size not in (None, target.hidden_size):
        return Standing(
            "cannot start",
            f"{by}{head} is made for {_made_for(facts)}of hidden size {facts.hidden_size}, but "
            f"{target.name} has {target.hidden_size}",
            _head_for(target, asked.method),
        )
    if facts.vocab_size not in (None, target.vocab_size):
        return Standing(
            "cannot start",
            f"{by}{head} is made for {_made_for(facts)}of a vocabulary of {facts.vocab_size}, but "
            f"{target.name} has {target.vocab_size}",
            _head_for(target, asked.method),
        )
    most = facts.most_drafts
    if most is not None and asked.gamma is not None and asked.gamma > most:
        whose = head
        if not facts.checkpoint:
            whose = f"a usual {_name(asked.method)} head"
        return Standing(
            "cannot start",
            f"{by}{whose} proposes at most {most} tokens in a step, by the block that it was "
            f"trained on, not {asked.gamma}",
            f"use {most} or fewer",
            method=asked.method,
            most_drafts=most,
        )
    return None


def _checkpoint_standing(
    asked: AskedDraft, facts: HeadFacts, target: ModelSpec
) -> Standing:
    """A checkpoint of the right shape, which may still be made for another model of that shape."""
    if facts.target is None or _is_same_model(facts.target, target):
        return Standing("starts", most_drafts=facts.most_drafts)
    return Standing(
        "unknown",
        f"{facts.checkpoint} is made for {facts.target}, whose shape {target.name} has: it starts, "
        "but how much it accepts here is not known",
        most_drafts=facts.most_drafts,
    )


def _unknown_standing(
    asked: AskedDraft, facts: HeadFacts, target: ModelSpec
) -> Standing:
    """A checkpoint of which nothing but its name is known."""
    name = asked.checkpoint
    if facts.is_by_name and facts.target is not None:
        known = f"by its name it is a head for {facts.target}"
        if not _is_same_model(facts.target, target):
            known += f", whose shape {target.name} has"
    else:
        known = "its hidden size, vocabulary and block are not known"
    return Standing(
        "unknown",
        f"nothing is known of {name} but its name: {known}",
        "its config.json would tell (--draft-model)",
        most_drafts=facts.most_drafts,
    )


def _is_alike(method: str, other: str, engine: EngineProfile) -> bool:
    """Whether an engine loads two kinds of heads by one name, as vLLM does EAGLE-3 and P-EAGLE."""
    return method == other or option_of(engine, method) == option_of(engine, other)


def _is_same_model(name: str, target: ModelSpec) -> bool:
    """Whether a head's target is this one, in any tuning or format that heads go by."""
    return plain_model(name) == plain_model(target.name)


def _how_known(facts: HeadFacts) -> str:
    """How surely something is known, as the beginning of a sentence."""
    if facts.is_by_name:
        return "by its name "
    return ""


def _made_for(facts: HeadFacts) -> str:
    if facts.target is None:
        return "a target "
    return f"{facts.target}, "


def _head_for(target: ModelSpec, method: DraftMethod) -> str:
    """Where a head that fits is to be had."""
    checkpoint = published_head(target, method)
    if checkpoint:
        return f"use {checkpoint}"
    return f"use a head of {target.name}, or leave the draft out"


def _name(method: str) -> str:
    if method == "mtp":
        return "MTP"
    return method_name(method)


def option_of(engine: EngineProfile, method: str) -> str:
    """The option with which an engine is asked for a method."""
    call = engine.draft(method, method).call
    if "algorithm" in call:
        return f"--speculative-algorithm {call['algorithm']}"
    if "method" in call:
        return f'"method": "{call["method"]}"'
    if "decoding_type" in call:
        return f"decoding_type: {call['decoding_type']}"
    return f"--draft {method}"
