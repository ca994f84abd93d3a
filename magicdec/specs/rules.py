"""The rules of engines: whether a command starts, and what follows from it, each with its evidence.

`data/rules.toml` holds a row for each engine and range of versions that somebody looked up. What
is called wrong stops the engine, by its own code or a thread at the row's address. Where nobody
looked a rule up, the row without an engine speaks, which calls nothing wrong.
"""

from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from magicdec.files import converted, read_toml
from magicdec.specs.engine import is_within

RULES_FILE = Path(__file__).resolve().parent / "data" / "rules.toml"

FindingKind = Literal["wrong", "note", "asked"]
"""The engine stops; it starts, and something follows; the price needs what was not given."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row: what is said of one situation in an engine's versions."""

    name: str
    """The situation, which several rows share."""
    kind: FindingKind
    says: str
    """The sentence, with the caller's {values}. Empty: nothing is to be said."""
    engine: str = ""
    """Empty: every engine that no other row speaks for."""
    since: str = ""
    """The first version that it holds for. Empty: any."""
    before: str = ""
    """The first version that it no longer holds for. Empty: the newest is included."""
    drafts: tuple[str, ...] = ()
    """Kinds of drafts that it is of. Empty: all."""
    of: tuple[str, ...] = ()
    """Architectures of targets, or generations of devices, that it is of. Empty: all."""
    not_of: tuple[str, ...] = ()
    """Architectures of targets that it is not of."""
    unless: str = ""
    """The option, key or variable that lifts it; of several, joined by " or ", each does."""
    unless_since: str = ""
    """The first version that knows `unless`."""
    address: str = ""
    """The file of a release, or the thread, that shows it."""

    @property
    def is_wrong(self) -> bool:
        return self.kind == "wrong"

    def holds(
        self,
        engine: str,
        version: str,
        *,
        settings: Collection[str],
        draft_kind: str,
        architecture: str,
    ) -> bool:
        """Whether it speaks for a version of an engine with these settings given. A version that is
        not told ("") is the newest."""
        if self.engine not in ("", engine):
            return False
        if not is_within(version, self.since, self.before):
            return False
        if self.drafts and draft_kind not in self.drafts:
            return False
        if self.of and architecture not in self.of:
            return False
        if architecture in self.not_of:
            return False
        if any(setting in settings for setting in self.unless.split(" or ")):
            return not is_within(version, self.unless_since, "")
        return True


class Finding(NamedTuple):
    """The sentence of a rule on one command."""

    kind: FindingKind
    says: str


def finding(
    name: str,
    engine: str,
    version: str = "",
    *,
    settings: Collection[str] = (),
    draft_kind: str = "",
    architecture: str = "",
    **values: object,
) -> Finding | None:
    """The sentence on a situation in a version of an engine. None: nothing is to be said.

    `settings` names the options, keys and variables that are given; `values` fill the sentence.
    """
    rule = rule_for(
        name,
        engine,
        version,
        settings=settings,
        draft_kind=draft_kind,
        architecture=architecture,
    )
    if not rule.says:
        return None
    return Finding(rule.kind, rule.says.format(**values))


def rule_for(
    name: str,
    engine: str,
    version: str = "",
    *,
    settings: Collection[str] = (),
    draft_kind: str = "",
    architecture: str = "",
) -> Rule:
    """The row that speaks of a situation in a version of an engine."""
    for rule in rules_of(name):
        if rule.holds(
            engine,
            version,
            settings=settings,
            draft_kind=draft_kind,
            architecture=architecture,
        ):
            return rule
    raise AssertionError(f"rules.toml has no row of '{name}' for every engine")


def unlisted_model(
    engine: str, version: str, model: str, architecture: str
) -> Finding | None:
    """The sentence on a model that the engine's own list lacks, by its architecture or its name."""
    for subject in (architecture, model):
        found = finding(
            "a model that is not listed",
            engine,
            version,
            architecture=subject,
            model=model,
        )
        if found is not None:
            return found
    return None


@cache
def rules() -> tuple[Rule, ...]:
    """Every row of the table."""
    document = read_toml(RULES_FILE, "rules of engines")
    return converted(document["rules"], tuple[Rule, ...], where=str(RULES_FILE))


def rules_of(name: str) -> list[Rule]:
    """A situation's rows: those of engines first, then the one of all others."""
    rows = [rule for rule in rules() if rule.name == name]
    assert rows, f"rules.toml has no rule '{name}'"
    return sorted(rows, key=lambda rule: not rule.engine)
