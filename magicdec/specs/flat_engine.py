"""Engine profiles with flat keys, as they were written before profiles had tables.

A flat key is a constant's name without its table ("gemm_factor"), or one that gathers a property of
several drafts ("synchronous_drafts"). Both forms may be mixed; one key in both is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from magicdec.errors import ConfigError
from magicdec.specs.engine_tables import (
    EngineErrors,
    EngineGraphs,
    EngineHybrids,
    EngineKernels,
    EngineMemory,
    EngineOverheads,
    EnginePaths,
    EnginePrefixCache,
    EngineSampling,
    EngineScheduler,
)
from magicdec.specs.speculation import DRAFT_KINDS, LOOKUP_METHODS

TABLES = {
    "kernels": EngineKernels,
    "overheads": EngineOverheads,
    "graphs": EngineGraphs,
    "paths": EnginePaths,
    "hybrids": EngineHybrids,
    "sampling": EngineSampling,
    "scheduler": EngineScheduler,
    "memory": EngineMemory,
    "prefix_cache": EnginePrefixCache,
    "errors": EngineErrors,
}
TABLE_OF = {
    name: table for table, struct in TABLES.items() for name in struct.__struct_fields__
}
"""The table of each constant; no name stands in two."""
FLAG_OF_LIST: dict[str, str] = {
    "drafts": "runs",
    "staged_drafts": "is_staged",
    "synchronous_drafts": "is_synchronous",
}
"""Lists of kinds of drafts, by the flag that each of them has."""
FIELD_OF_METHOD = {
    "draft_calls": "call",
    "draft_notes": "note",
    "draft_windows": "window_setting",
    "draft_window_notes": "window_note",
    "draft_sinks": "sink_setting",
    "adaptive_settings": "adaptive_setting",
    "adaptive_measured": "adaptive_measured",
    "adaptive_gains": "adaptive_gains",
}
"""Values by method or kind of draft, by the field of each."""
FIELD_OF_DRAFTS: dict[str, tuple[tuple[str, ...], str]] = {
    "eagle3_draft_overhead_s": (("eagle3",), "draft_overhead_s"),
    "eagle3_step_overhead_s": (("eagle3",), "step_overhead_s"),
    "ngram_lookup_s": (LOOKUP_METHODS, "search_s"),
    "ngram_lookup_s_per_sequence": (LOOKUP_METHODS, "search_s_per_sequence"),
    "lookup_scan_s": (LOOKUP_METHODS, "scan_s"),
}
"""Constants of some kinds of drafts: the kinds, and the field of each."""
RETIRED = ("other_speedup_error", "speculation_fitted", "speculation_fitted_drafts")
"""Flat keys of errors by place, which the widths of lanes (perfmodel/lanes.py) have replaced. Files
with them are read without."""
KIND_OF_METHOD: dict[str, str] = {"model": "model/full"}
"""Kinds of drafts that flat tables by method name otherwise."""
Place = tuple[str, ...]
"""A key by its tables, outermost first."""


def places(key: str, value: Any) -> list[tuple[Place, Any]]:
    """The places of a flat key's value, by tables; empty for a key that is not flat."""
    if key in TABLE_OF:
        return [((TABLE_OF[key], key), value)]
    if key in FIELD_OF_DRAFTS:
        kinds, field = FIELD_OF_DRAFTS[key]
        return [(("drafts", kind, field), value) for kind in kinds]
    if key in FLAG_OF_LIST and _are_names(value):
        return [(("drafts", kind, FLAG_OF_LIST[key]), True) for kind in value]
    if key in FIELD_OF_METHOD and isinstance(value, Mapping):
        of_each = FIELD_OF_METHOD[key]
        found: list[tuple[Place, Any]] = []
        for method, one in value.items():
            kind: str = KIND_OF_METHOD.get(method) or method
            found.append((("drafts", kind, of_each), one))
        return found
    return []


def leaves(tables: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    """The values of tables within tables, each with its place."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            for place, leaf in leaves(value):
                yield (key, *place), leaf
        else:
            yield (key,), value


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(each, str) for each in value
    )


def in_tables(document: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """A document with each flat key in its table. Raises ConfigError for a key in both forms."""
    result = _placed(document, where)
    drafts = result.setdefault("drafts", {})
    named: Any = document.get("drafts")
    if _are_names(named):
        others = {
            kind: {"runs": False} | draft
            for kind, draft in drafts.items()
            if kind not in named
        }
        result["drafts"] = {kind: drafts[kind] for kind in named} | others
    elif named is None:
        # a file that names no drafts has an engine that runs all of them
        result["drafts"] = {kind: {} for kind in DRAFT_KINDS} | drafts
    if "before" in result:
        result["before"] = _each_placed(result["before"], f"{where}: before")
    paths = result.get("paths")
    if isinstance(paths, dict) and "self_draft" in paths:
        paths["self_draft"] = _each_placed(paths["self_draft"], f"{where}: self_draft")
    if isinstance(result.get("sources"), dict):
        result["sources"] = {
            dotted(key): text for key, text in result["sources"].items()
        }
    return result


def _placed(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A document whose flat keys are in their tables, and the rest as it is."""
    flat = {
        key: found for key, value in document.items() if (found := places(key, value))
    }
    kept = {
        key: value
        for key, value in document.items()
        if key not in flat and key not in RETIRED
    }
    if kept.get("drafts") == []:
        del kept["drafts"]
    result: dict[str, Any] = _copied(kept)
    for key, found in flat.items():
        for place, value in found:
            table = result
            for name in place[:-1]:
                table = table.setdefault(name, {})
                if not isinstance(table, dict):
                    raise ConfigError(f"{where}: '{name}' must be a table")
            if place[-1] in table:
                raise ConfigError(
                    f"{where}: '{key}' and '{'.'.join(place)}' are the same; keep one"
                )
            table[place[-1]] = value
    return result


def _each_placed(tables: Any, where: str) -> Any:
    """A table of documents, each with its flat keys in tables."""
    if not isinstance(tables, dict):
        return tables  # refused when it is read
    return {
        name: _placed(each, f"{where}.{name}") if isinstance(each, dict) else each
        for name, each in tables.items()
    }


def _copied(value: Any) -> Any:
    """A document whose tables can be added to."""
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    return value


def dotted(key: str) -> str:
    """The name of a source by its key's table."""
    if key in TABLE_OF:
        return f"{TABLE_OF[key]}.{key}"
    if key in FIELD_OF_DRAFTS:
        return f"drafts.{FIELD_OF_DRAFTS[key][1]}"
    field = FLAG_OF_LIST.get(key) or FIELD_OF_METHOD.get(key)
    if field:
        return f"drafts.{field}"
    return key
