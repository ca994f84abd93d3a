"""Whether a draft can be started for a target in an engine: the one place that plans, checks,
exports, runs and the page ask.

What stands against a draft is compared by shapes, as an engine compares them when it loads weights:
a head of a model starts on every fine-tune of it. Names count only where no configuration and no
row of the table of heads tells more (specs/heads.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from magicdec.errors import ConfigError
from magicdec.naming import ENGINE_TITLES, HEADS_LISTED, method_name
from magicdec.perfmodel.acceptance.belief import plain_model
from magicdec.perfmodel.acceptance.believed import known_checkpoints
from magicdec.specs.catalog import load_model_spec, models_that_may_draft
from magicdec.specs.engine import (
    DEFAULT_CPU_ENGINE,
    EngineProfile,
    engine_names,
    engines_that_run,
    load_engine,
    version_number,
)
from magicdec.specs.heads import (
    HeadFacts,
    facts_of,
    facts_of_configuration,
    heads_of,
    is_named,
)
from magicdec.specs.model import ModelSpec
from magicdec.specs.rules import Finding, Rule, rule_for
from magicdec.specs.speculation import (
    HEAD_METHODS,
    OWN_METHOD,
    PUBLISHED_HEADS,
    SELF,
    DraftMethod,
    HeadSpec,
    draft_kind,
)

IN_STAGES = "draft in stages"
MORE_THAN_BLOCK = "more drafts than the block"
FEWER_THAN_BLOCK = "fewer drafts than the block"
NO_MULTIPLE = "drafts that are no multiple of the modules"
UNPUBLISHED_MODULES = ("minimax_m2",)
"""Architectures whose configurations name modules that no published checkpoint has
(https://github.com/MiniMax-AI/MiniMax-M2.5/issues/8)."""
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
    """Whether a draft can be started, why not, and what is to be known of it if it does."""

    answer: Literal["starts", "accepts nothing", "not published", "cannot start"]
    reason: str = ""
    """Why it does not start, why it accepts next to nothing, or that no such head is known."""
    cure: str = ""
    """The thing to do instead, in words."""
    method: DraftMethod | None = None
    """The method that the checkpoint is of, where another one was asked for."""
    most_drafts: int | None = None
    """Tokens that it proposes at most in a step; None: any number, or not known."""
    least_drafts: int = 1
    """Tokens that it proposes at least: the whole block, where an engine takes no fewer."""
    multiple: int = 1
    """Number of which more drafts than it must be a multiple."""
    no_engine_for: tuple[str, str] | None = None
    """The draft and method that this engine does not run. Those that do are the cure."""
    notes: tuple[Finding, ...] = ()
    """Notes and questions on a draft that starts."""

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


class DraftSituation(NamedTuple):
    """A situation that the table of rules speaks of (specs/rules.py)."""

    rule: str
    values: dict[str, object]
    """Values of the rule's sentence."""
    cure: str = ""
    method: DraftMethod | None = None
    """The method to ask for instead, or again."""


def standing(asked: AskedDraft, target: ModelSpec, engine: EngineProfile) -> Standing:
    """Whether a draft can be started for a target in a version of an engine.

    Raises ConfigError for a checkpoint's configuration that cannot be read.
    """
    unable = _unable_engine(asked, engine)
    if unable is not None:
        return unable
    facts = HeadFacts(checkpoint="")
    if asked.model is None and asked.method in HEAD_METHODS:
        facts = _facts(asked, target)
    is_own_module = asked.method == "mtp" and _is_targets_own(facts, target)
    if is_own_module and not has_module(target):
        return _without_module(target)
    most = facts.most_drafts
    notes = _of_next_version(asked, engine)
    reason = ""
    for situation in _situations(asked, facts, target, engine, is_own_module):
        rule = _rule(situation.rule, asked, target, engine)
        says = rule.says.format(
            engine_name=engine.name, target=target.name, **situation.values
        )
        if rule.is_wrong:
            other = situation.method or asked.method
            is_run = other == asked.method or engine.runs(other, other)
            return Standing(
                "cannot start",
                says,
                situation.cure if is_run else "",
                method=situation.method if is_run else None,
                most_drafts=most,
                no_engine_for=None if is_run else (other, other),
            )
        if situation.rule == MORE_THAN_BLOCK:
            reason = says
        elif says:
            notes.append(Finding(rule.kind, says))
    if reason:
        return Standing(
            "accepts nothing",
            reason,
            f"use {most}",
            method=asked.method,
            most_drafts=most,
            notes=tuple(notes),
        )
    least = 1
    if most is not None and _rule(FEWER_THAN_BLOCK, asked, target, engine).is_wrong:
        least = most
    multiple = 1
    if is_own_module and _rule(NO_MULTIPLE, asked, target, engine).is_wrong:
        multiple = max(len(target.mtp_layers), 1)
    is_known = asked.exists or asked.method not in HEAD_METHODS
    if (
        is_known
        or facts.checkpoint
        or facts.proof
        or is_published(target, asked.method)
    ):
        return Standing(
            "starts",
            most_drafts=most,
            least_drafts=least,
            multiple=multiple,
            notes=tuple(notes),
        )
    return Standing(
        "not published",
        f"no {_name(asked.method)} head of {target.name} is known to magicdec (list of {HEADS_LISTED})",
        most_drafts=most,
    )


def is_published(target: ModelSpec, method: str) -> bool:
    """Whether a published head of this kind is known for a target."""
    if method == "mtp" and has_module(target):
        return True
    return bool(known_checkpoints(target.name, method) or heads_of(target.name, method))


def has_module(target: ModelSpec) -> bool:
    """Whether a target's checkpoint holds a module that predicts further tokens."""
    if target.architecture in UNPUBLISHED_MODULES:
        return False
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


def is_known_in_stages(
    engine: EngineProfile,
    draft: str,
    method: DraftMethod,
    target: ModelSpec,
    pp_size: int,
) -> bool:
    """Whether an engine is known to run a draft with this many pipeline stages."""
    if pp_size == 1:
        return True
    asked = AskedDraft(draft=draft, method=method, pp_size=pp_size)
    rule = _rule(IN_STAGES, asked, target, engine)
    return bool(rule.engine) and not rule.is_wrong


def check_ranks(
    engine: EngineProfile, tp_sizes: tuple[int, ...], draft_tp_size: int | None
) -> None:
    """Raises ConfigError for a draft on a number of ranks that the engine does not run with any of
    these of its target's."""
    if draft_tp_size is None or draft_tp_size in tp_sizes:
        return
    ranks = _on_ranks(max(tp_sizes), draft_tp_size)
    rule = rule_for(ranks.rule, engine.name, engine.version)
    if rule.is_wrong:
        raise ConfigError(
            f"{rule.says.format(**ranks.values)}; leave --draft-tp out, or plan for --engine {DEFAULT_CPU_ENGINE}"
        )


def _on_ranks(tp_size: int, draft_tp_size: int) -> DraftSituation:
    """A draft that runs on fewer ranks than its target."""
    values: dict[str, object] = {"tp": tp_size, "draft_tp": draft_tp_size}
    rule = "draft on some of its target's ranks"
    if draft_tp_size == 1:
        rule = "draft on one of its target's ranks"
    return DraftSituation(rule, values, f"use {tp_size}")


def _unable_engine(asked: AskedDraft, engine: EngineProfile) -> Standing | None:
    """Why an engine's version does not run this kind of draft."""
    kind = draft_kind(asked.draft, asked.method)
    tp = asked.tp_size
    draft_tp = asked.draft_tp_size
    if tp is not None and draft_tp is not None and draft_tp > tp:
        return Standing(
            "cannot start",
            f"draft tp {draft_tp} is more than the target's tp {tp}",
            f"use {tp}",
        )
    if engine.runs(asked.draft, asked.method):
        return None
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


def _of_next_version(asked: AskedDraft, engine: EngineProfile) -> list[Finding]:
    """A remark on a draft that only versions run beyond the one that exports are written for, where
    no version is named."""
    title = ENGINE_TITLES.get(engine.name, "")
    since = engine.runs_since(asked.draft, asked.method)
    if engine.version or version_number(since) <= version_number(title):
        return []
    name = title.rpartition(" ")[0]
    return [Finding("note", f"{name} runs {_name(asked.method)} from {since} on")]


def _situations(
    asked: AskedDraft,
    facts: HeadFacts,
    target: ModelSpec,
    engine: EngineProfile,
    is_own_module: bool,
) -> Iterator[DraftSituation]:
    """The situations that a draft is in, those that keep it from starting first."""
    # its ranks and stages
    if asked.pp_size > 1:
        name = _name(asked.method) if asked.method in OWN_METHOD else asked.draft
        yield DraftSituation(
            IN_STAGES,
            {"draft": name, "pp": asked.pp_size},
            "leave the stages or the draft out",
        )
    tp = asked.tp_size
    draft_tp = asked.draft_tp_size
    if tp is not None and draft_tp not in (None, tp):
        yield _on_ranks(tp, draft_tp)._replace(method=asked.method)

    # a model that drafts
    further = 0
    if asked.model is not None:
        further = abs(asked.model.vocab_size - target.vocab_size)
    if asked.model is not None and further > engine.sampling.vocabulary_slack:
        usable = []
        for other in map(load_model_spec, models_that_may_draft(target)):
            if other.num_parameters < target.num_parameters / 2:
                usable.append(other.name)
        yield DraftSituation(
            "draft's vocabulary",
            {
                "draft": asked.model.name,
                "size": asked.model.vocab_size,
                "target_size": target.vocab_size,
            },
            f"in the catalog: {', '.join([*usable, SELF])}",
        )
    if asked.method not in HEAD_METHODS:
        return

    # a head that runs for some targets alone; the target's own prediction module
    gamma = asked.gamma or 0
    head = facts.checkpoint or "the head"
    yield DraftSituation(
        "head for this architecture",
        {"architecture_name": target.architecture},
        "leave the draft out, or choose another one",
    )
    if is_own_module:
        modules = max(len(target.mtp_layers), 1)
        if gamma > modules and gamma % modules:
            yield DraftSituation(
                NO_MULTIPLE,
                {"modules": modules, "gamma": gamma},
                f"use {gamma // modules * modules}",
                asked.method,
            )
        return
    if asked.method == "mtp":
        yield DraftSituation(
            "prediction module in a checkpoint of its own", {"head": head}
        )

    # a head's shape: as its configuration or the table has it, or as its name suggests
    known = ", by its name" if facts.is_by_name else ""
    made_for = "a target " if facts.target is None else f"{facts.target}, "
    if facts.method is not None and not _is_alike(facts.method, asked.method, engine):
        yield DraftSituation(
            f"head of another method{known}",
            {
                "head": head,
                "is_of": _name(facts.method),
                "asked_as": _name(asked.method),
            },
            f"draft with {_name(facts.method)}",
            facts.method,
        )
    elif facts.hidden_size not in (None, target.hidden_size):
        yield DraftSituation(
            f"head of another size{known}",
            {
                "head": head,
                "made_for": made_for,
                "size": facts.hidden_size,
                "target_size": target.hidden_size,
            },
            _head_for(target, asked.method),
        )
    elif facts.vocab_size not in (None, target.vocab_size) and not facts.is_by_name:
        yield DraftSituation(
            "head of another vocabulary",
            {
                "head": head,
                "made_for": made_for,
                "size": facts.vocab_size,
                "target_size": target.vocab_size,
            },
            _head_for(target, asked.method),
        )
    elif facts.proof and not facts.is_by_name:
        if facts.target is not None and not _is_same_model(facts.target, target):
            yield DraftSituation(
                "head of another model of this shape",
                {"head": head, "made_for": facts.target},
            )
    elif asked.checkpoint and is_named(asked.checkpoint):
        yield DraftSituation(
            "head of which nothing but its name is known",
            {"head": head, "by_name": _by_name(facts, target)},
        )

    # its block
    most = facts.most_drafts
    if most is None or not gamma or gamma == most:
        return
    if not facts.checkpoint:
        head = f"a usual {_name(asked.method)} head"
        if facts.target is not None:
            head = f"a {_name(asked.method)} head of {facts.target}"
    yield DraftSituation(
        MORE_THAN_BLOCK if gamma > most else FEWER_THAN_BLOCK,
        {"head": head, "most": most, "gamma": gamma},
        f"use {most}",
        asked.method,
    )


def _rule(
    name: str, asked: AskedDraft, target: ModelSpec, engine: EngineProfile
) -> Rule:
    """The row of a situation in this version of an engine."""
    return rule_for(
        name,
        engine.name,
        engine.version,
        settings=asked.settings,
        draft_kind=draft_kind(asked.draft, asked.method),
        architecture=target.architecture,
    )


def _facts(asked: AskedDraft, target: ModelSpec) -> HeadFacts:
    """The known facts of the draft's head: of the one that was given, else of its checkpoint; of neither
    the longest block of the target's heads, or the usual one."""
    if asked.head is not None:
        return facts_of_configuration(asked.checkpoint, asked.head)
    if asked.checkpoint and is_named(asked.checkpoint):
        return facts_of(asked.checkpoint, reads_files=asked.reads_files)
    usual = PUBLISHED_HEADS.get(asked.method)
    if usual is None or asked.is_measured:
        return HeadFacts(checkpoint="")
    heads = heads_of(target.name, asked.method)
    blocks = [head.most_drafts for head in heads if head.most_drafts is not None]
    if blocks:
        return HeadFacts(checkpoint="", most_drafts=max(blocks), target=target.name)
    return HeadFacts(checkpoint="", most_drafts=usual.most_drafts)


def _is_targets_own(facts: HeadFacts, target: ModelSpec) -> bool:
    """Whether no checkpoint but the target's own is named for its prediction module."""
    if not facts.proof:
        return not facts.checkpoint
    return facts.is_by_name and facts.method is None and facts.target == target.name


def _without_module(target: ModelSpec) -> Standing:
    """Multi-token prediction by a target that brings no module along."""
    for head in heads_of(target.name, "mtp"):
        return Standing(
            "cannot start",
            f"{target.name} has its prediction module in a checkpoint of its own",
            f"name {head.checkpoint}",
        )
    reason = "its config.json names none (num_nextn_predict_layers)"
    if target.architecture in UNPUBLISHED_MODULES:
        reason = "its config.json names some, and its published weights have none"
    return Standing(
        "cannot start",
        f"{target.name} has no prediction module to draft with: {reason}",
        "leave the draft out, or choose another one",
    )


def _by_name(facts: HeadFacts, target: ModelSpec) -> str:
    """A checkpoint's target as far as its name tells it."""
    if not facts.is_by_name or facts.target is None:
        return "its hidden size, vocabulary and block are not known"
    if _is_same_model(facts.target, target):
        return f"by its name it is a head for {facts.target}"
    return f"by its name it is a head for {facts.target}, whose shape {target.name} has"


def _is_alike(method: str, other: str, engine: EngineProfile) -> bool:
    """Whether an engine loads two kinds of heads by one name, as vLLM does EAGLE-3 and P-EAGLE."""
    return method == other or option_of(engine, method) == option_of(engine, other)


def _is_same_model(name: str, target: ModelSpec) -> bool:
    """Whether a head's target is this one, in any tuning or format that heads go by."""
    return plain_model(name) == plain_model(target.name)


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
