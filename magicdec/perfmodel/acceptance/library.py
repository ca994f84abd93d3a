"""Profiles as files: those that are shipped, and a user's.

A file holds the fields of one profile, which tell its sort: one with a `replay` was replayed, one
that `is_assumed` is believed, and any other was measured, a saved rate included. The shipped ones
(specs/data/acceptance) are fitted on published figures and say which; a user's own measurement
replaces them. What was never measured has no profile: `default_profile` then returns None.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from magicdec.files import converted, read_json, write_atomic
from magicdec.perfmodel.acceptance.believed import BelievedProfile
from magicdec.perfmodel.acceptance.measured import MeasuredProfile
from magicdec.perfmodel.acceptance.profile import AcceptanceProfile, constant_profile
from magicdec.perfmodel.acceptance.replayed import ReplayedProfile

PROFILES_DIRECTORY = (
    Path(__file__).resolve().parents[2] / "specs" / "data" / "acceptance"
)
BELIEF = "is_assumed"
"""Key of a file whose profile is a belief."""


def default_profile_names() -> list[str]:
    return sorted(path.stem for path in PROFILES_DIRECTORY.glob("*.json"))


@lru_cache(maxsize=1)
def _defaults() -> tuple[MeasuredProfile, ...]:
    return tuple(
        converted(_document(path), MeasuredProfile, where=str(path))
        for path in sorted(PROFILES_DIRECTORY.glob("*.json"))
    )


def published_drafts(model_name: str) -> list[tuple[str, str]]:
    """The (draft, method) pairs with a shipped profile of this target, or of one that stands in for
    it.
    """
    known = (
        each for each in _defaults() if model_name in (each.model, *each.applies_to)
    )
    pairs = (
        (each.draft, each.draft_method) for each in known if not each.draft_weight_dtype
    )
    return list(dict.fromkeys(pairs))


def default_profile(
    model_name: str,
    draft_method: str,
    draft: str = "self",
    temperature: float | None = None,
    weight_dtype: str = "",
) -> AcceptanceProfile | None:
    """The shipped profile of a target, draft and method; None where none was ever measured ("needs
    acceptance").

    Of several, the one measured nearest to `temperature`. A profile of another member of the
    model's family stands in with a wider error, and says so in its source. A self-draft with the
    full cache and the target's own weights accepts everything, by construction; one with a copy of
    them in `weight_dtype` has a profile of its own.
    """
    if draft == "self" and draft_method == "full" and not weight_dtype:
        return constant_profile(
            1.0,
            model=model_name,
            draft_method=draft_method,
            source="exact: the draft is the target",
        )
    wanted = (draft, draft_method, weight_dtype)
    found = [
        each
        for each in _defaults()
        if (each.draft, each.draft_method, each.draft_weight_dtype) == wanted
    ]
    if temperature is not None:
        found.sort(
            key=lambda each: (
                0.0 if each.temperature is None else abs(each.temperature - temperature)
            )
        )
    for profile in found:
        if profile.model == model_name:
            return profile
    for profile in found:
        if model_name in profile.applies_to:
            error = profile.error
            wider = (error.log_rejection**2 + profile.carried_error**2) ** 0.5
            carried = f"measured on {profile.model}, carried over to {model_name}"
            return msgspec.structs.replace(
                profile,
                model=model_name,
                carried_from=profile.model,
                checkpoint="",
                source=f"{carried}: {profile.source}",
                error=msgspec.structs.replace(error, log_rejection=wider),
            )
    return None


def load_profile(path: str | Path) -> AcceptanceProfile:
    """Reads a profile.

    Raises ConfigError naming the file and the key.
    """
    document = _document(Path(path))
    sort: type[AcceptanceProfile] = MeasuredProfile
    if isinstance(document, dict):
        is_belief = False
        if isinstance(document.get(BELIEF), bool):
            is_belief = document.pop(BELIEF)
        if "replay" in document:
            sort = ReplayedProfile
        elif is_belief:
            sort = BelievedProfile
    return converted(document, sort, where=str(path))


def _document(path: Path) -> Any:
    return read_json(path, "acceptance profile")


def save_profile(profile: AcceptanceProfile, path: str | Path) -> None:
    """Writes a profile, whole or not at all.

    Raises StorageError when the file cannot be written.
    """
    document = msgspec.to_builtins(profile)
    if profile.is_assumed:
        document[BELIEF] = True
    text = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    write_atomic(Path(path), text)
