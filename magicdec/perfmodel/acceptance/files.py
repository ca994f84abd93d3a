"""Profiles and counts as files: those that are shipped, a user's, and what engines write.

A profile's file holds the fields of one profile, which tell its sort: one with a `replay` was
replayed, one that `is_assumed` is believed, and any other was measured, a saved rate included. The
shipped ones (specs/data/acceptance) are fitted on published figures and say which; a user's own
measurement replaces them. What was never measured has no profile: `default_profile` then returns None.

Counts by position come from

    traces      JSON lines, one per sequence: [2, 0, 3, ...] or {"accepted_lengths": [2, 0, 3, ...]}, drafts accepted in
                each step (0..gamma), the token that the verification adds not counted
    SGLang      JSON lines of /generate's answers: meta_info.spec_correct_drafts_histogram, before 0.5.2x
                spec_accept_histogram (srt/managers/tokenizer_manager.py): steps by the drafts
                accepted in them
    vLLM        JSON lines of answers of a server with --per-request-spec-decode-metrics, as they are or
                as a proxy logs them: acceptance_histogram, wherever it stands in a line

Each becomes trials and accepted by position: a step with N accepted drafts tried positions 1 to
min(N + 1, gamma).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from magicdec.counts import Counts
from magicdec.errors import ConfigError
from magicdec.files import (
    converted,
    json_documents,
    read_bytes,
    read_json,
    write_atomic,
)
from magicdec.perfmodel.acceptance.law import MAX_POSITIONS
from magicdec.perfmodel.acceptance.measured import MeasuredProfile
from magicdec.perfmodel.acceptance.profile import (
    AcceptanceProfile,
    BelievedProfile,
    constant_profile,
)
from magicdec.perfmodel.acceptance.replayed import ReplayedProfile
from magicdec.units import MIB, read_number

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


SGLANG_NAMES = ("spec_correct_drafts_histogram", "spec_accept_histogram")

LIMIT_BYTES = 256 * MIB
"""Size above which no file of acceptance is read."""

MOST_NODES = 20_000
"""Values of a line that are looked through for counts."""


class ImportedAcceptance(msgspec.Struct, frozen=True, kw_only=True):
    """A file's counts, and its kind."""

    kind: str
    counts: Counts
    """By sequence (or of all together, where a file does not tell them apart)."""


def read_acceptance(path: Path, *, gamma: int | None = None) -> ImportedAcceptance:
    """Reads a file of any of the formats above.

    `gamma`: drafted tokens per step; None: as many as were ever accepted, or as the file says.

    Raises ConfigError naming the file, and the line, where it is none of them.
    """
    text = read_bytes(path, limit_bytes=LIMIT_BYTES).decode("utf-8", errors="replace")
    try:
        documents = json_documents(text)
    except ValueError as error:
        raise ConfigError(f"{path}, {error}") from None
    if not documents:
        raise ConfigError(f"{path} is empty")
    _, first = documents[0]
    for kind, is_it, read in READERS:
        if is_it(first):
            sequences = _read_all(path, documents, read)
            return ImportedAcceptance(kind=kind, counts=_counts(path, sequences, gamma))
    raise ConfigError(
        f"{path} is no trace (JSON lines of accepted_lengths), and no answers of vLLM or SGLang "
        "with a count of accepted drafts"
    )


def is_acceptance(document: Any) -> bool:
    """Whether a file whose first document this is has one of these forms."""
    return any(is_it(document) for _, is_it, _ in READERS)


def _read_all(
    path: Path,
    documents: list[tuple[int, Any]],
    read: Callable[[Any], list[Any]],
) -> list[Any]:
    found: list[Any] = []
    for number, document in documents:
        try:
            found += read(document)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            what = str(error)
            if isinstance(error, KeyError):
                what = f"no {error}"
            raise ConfigError(f"{path}, line {number}: {what}") from None
    return found


def _counts(path: Path, found: list[Any], gamma: int | None) -> Counts:
    """From each sequence's accepted lengths (a list), or its survivors (a tuple)."""
    if not found:
        raise ConfigError(
            f"{path} counts no accepted draft: was it measured with a draft, and did the server "
            "count them?"
        )
    deepest = max(map(_deepest, found))
    if gamma is not None and deepest > gamma:
        raise ConfigError(
            f"{path} has steps with {deepest} accepted drafts, more than gamma {gamma}"
        )
    depth = gamma or max(
        deepest, 1
    )  # where nothing was accepted, a first draft was tried
    if not 1 <= depth <= MAX_POSITIONS:
        raise ConfigError(
            f"{path} has steps with up to {depth} accepted drafts; 1 to {MAX_POSITIONS} are read"
        )
    survivors = []
    for sequence in found:
        if isinstance(sequence, tuple):
            survivors.append(sequence)
        else:
            steps = np.bincount(sequence, minlength=depth + 1)
            at_least = steps[::-1].cumsum()[::-1]
            survivors.append(tuple(at_least.tolist()))
    return Counts.of_survivors(survivors)


def _deepest(sequence: list[int] | tuple[float, ...]) -> int:
    """The most drafts that a step accepted."""
    if isinstance(sequence, tuple):
        return len(sequence) - 1
    return max(sequence, default=0)


def _lengths(values: Any) -> list[int]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError("accepted lengths must be whole numbers from 0 on")
    return list(values)


def _trace(document: Any) -> list[Any]:
    if isinstance(document, dict):
        document = document["accepted_lengths"]
    return [_lengths(document)]


def _found(document: Any, *names: str) -> Any:
    """The first value under one of these names, wherever it stands in a document that a proxy may have
    put the answer into; None: there is none."""
    pending = [document]
    for _ in range(MOST_NODES):
        if not pending:
            return None
        node = pending.pop()
        if isinstance(node, dict):
            for name in names:
                if node.get(name):
                    return node
            pending += node.values()
        elif isinstance(node, list):
            pending += node[:100]
    return None


def _histogram_of(document: Any) -> Any:
    holder = _found(document, *SGLANG_NAMES)
    if holder is None:
        return None
    return next(filter(None, (holder.get(name) for name in SGLANG_NAMES)))


MOST_STEPS = 1e7
"""Steps of a request, more than any output has tokens."""


def histogram_survivors(acceptance: Any) -> list[Any]:
    """Survivors from a request's acceptance_histogram, a list by accepted drafts or a mapping. []:
    it has none.
    """
    if not acceptance:
        return []
    histogram = acceptance.get("acceptance_histogram")
    if not histogram:
        return []
    pairs: Iterable[tuple[Any, Any]] = enumerate(histogram)
    if isinstance(histogram, dict):
        pairs = histogram.items()
    counts = {int(accepted): int(steps) for accepted, steps in pairs}
    depth = int(
        read_number(acceptance.get("num_spec_tokens") or max(counts), most=MOST_STEPS)
    )
    if max(counts) > depth or min(counts.values()) < 0:
        raise ValueError(
            f"no histogram of at most {depth} accepted drafts: {histogram}"
        )
    survivors = [0.0] * (depth + 1)
    for accepted, steps in counts.items():
        for position in range(accepted + 1):
            survivors[position] += steps
    return [tuple(survivors)]


def _sglang(document: Any) -> list[Any]:
    histogram = _histogram_of(document)
    if not histogram:
        raise ValueError("no histogram of accepted drafts")
    lengths = []
    for accepted, steps in enumerate(histogram):
        lengths += [accepted] * int(read_number(steps, most=MOST_STEPS))
    return [lengths]


def _is_trace(document: Any) -> bool:
    if isinstance(document, dict):
        return "accepted_lengths" in document
    is_list = isinstance(document, list)
    return is_list and not any(isinstance(value, dict) for value in document)


def _is_sglang(document: Any) -> bool:
    return bool(_histogram_of(document))


def _is_vllm(document: Any) -> bool:
    return _found(document, "acceptance_histogram") is not None


def _vllm(document: Any) -> list[Any]:
    return histogram_survivors(_found(document, "acceptance_histogram"))


READERS: tuple[tuple[str, Callable[[Any], bool], Callable[[Any], list[Any]]], ...] = (
    ("trace", _is_trace, _trace),
    ("SGLang answers", _is_sglang, _sglang),
    ("vLLM answers", _is_vllm, _vllm),
)
