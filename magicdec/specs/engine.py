"""The profile of a runtime: its fixed costs, sampling and acceptance, and the upkeep of the draft's
cache.

An engine profile is one TOML file (catalog: `vllm`, `sglang`, `trtllm`, `ours`, `magicdec-2024`) of
tables (specs/engine_tables.py), kept apart from the hardware profile, so one device serves several
runtimes. A constant's address is its key with its tables: "kernels.gemm_factor". Where each enters
the time is written once, in perfmodel/forward.py, perfmodel/step.py and perfmodel/serving.py.
`*_s_per_element` fields, where given, replace the bytes-over-bandwidth estimate of that work.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from datetime import date, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from magicdec.errors import ConfigError, unknown_choice
from magicdec.files import converted, read_toml, write_atomic
from magicdec.naming import ENGINE_TITLES
from magicdec.specs.engine_path import PathOptions, StepPath, fewer_graphs
from magicdec.specs.engine_tables import (
    DraftPath,
    EngineDraft,
    EngineErrors,
    EngineGraphs,
    EngineHybrids,
    EngineKernels,
    EngineMemory,
    EngineOptions,
    EngineOverheads,
    EnginePaths,
    EnginePrefixCache,
    EngineSampling,
    EngineScheduler,
    EngineTable,
)
from magicdec.specs.speculation import DRAFT_KINDS, draft_kind

ENGINES_DIRECTORY = Path(__file__).resolve().parent / "data" / "engines"
SERVING_ENGINES = tuple(ENGINE_TITLES)
DEFAULT_ENGINE = "vllm"
"""Engine of plans on GPUs."""
DEFAULT_CPU_ENGINE = "ours"


class EngineProfile(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """One runtime. Times in seconds; factors multiply the hardware profile's time of that kind of
    operation.
    """

    name: str
    version: str = ""
    """The version that it was asked for. Empty: the newest."""
    description: str = ""
    fitted_on: str = ""
    fitted_device: str = ""
    """The hardware profile that the constants were fitted with; elsewhere fixed costs are less
    sure. Empty: any.
    """
    fitted_devices: tuple[str, ...] = ()
    """Hardware profiles that the constants were fitted with, where there were several."""
    fitted_models: tuple[str, ...] = ()

    kernels: EngineKernels = EngineKernels()
    overheads: EngineOverheads = EngineOverheads()
    graphs: EngineGraphs = EngineGraphs()
    paths: EnginePaths = EnginePaths()
    hybrids: EngineHybrids = EngineHybrids()
    sampling: EngineSampling = EngineSampling()
    scheduler: EngineScheduler = EngineScheduler()
    memory: EngineMemory = EngineMemory()
    prefix_cache: EnginePrefixCache = EnginePrefixCache()
    errors: EngineErrors = EngineErrors()
    options: EngineOptions = EngineOptions()
    drafts: dict[str, EngineDraft] = msgspec.field(
        default_factory=lambda: dict.fromkeys(DRAFT_KINDS, EngineDraft())
    )
    """Kinds of drafts, among `DRAFT_KINDS` (specs/speculation.py)."""
    before: dict[str, dict[str, Any]] = {}
    """Differences of versions before these ("0.14"), in tables; of several bounds the nearest
    above counts.
    """

    releases: dict[str, date] = {}
    """The day on which each of its versions came out, oldest first."""

    sources: dict[str, str] = {}
    """Where values are from, by key with its table ("kernels.gemm_factor")."""

    @property
    def tables(self) -> tuple[EngineTable, ...]:
        """All its tables of constants."""
        values = (getattr(self, name) for name in self.__struct_fields__)
        tables = [value for value in values if isinstance(value, EngineTable)]
        return (*tables, *self.drafts.values())

    def constant(self, address: str) -> Any:
        """The value at an address: "kernels.gemm_factor", "drafts.eagle3.search_s"."""
        table, *names = address.split(".")
        value = getattr(self, table)
        if table == "drafts":
            value = value.get(names.pop(0), NEVER_RUN)
        for name in names:
            value = getattr(value, name)
        return value

    def with_constants(self, values: Mapping[str, Any]) -> EngineProfile:
        """The profile with other values at these addresses."""
        changes: dict[str, Any] = {}
        for address, value in values.items():
            *tables, key = address.split(".")
            inside = changes
            for table in tables:
                inside = inside.setdefault(table, {})
            inside[key] = value
        changed: EngineProfile = _changed(self, changes)
        return changed

    def error_for(self, device: str, model: str) -> float:
        """Relative error (one standard deviation) of a server's times, by what the constants were
        fitted on. What an unseen device and an unseen model add to the variance are independent."""
        errors = self.errors
        own = errors.relative_error**2
        variance = own
        if self.fitted_devices and device not in self.fitted_devices:
            of_devices = (errors.other_device_error or 0.0) ** 2
            variance += max(of_devices - own, 0.0)
        if self.fitted_models and model not in self.fitted_models:
            of_models = (errors.other_model_error or 0.0) ** 2
            variance += max(of_models - own, 0.0)
        return math.sqrt(variance)

    def step_overheads(self, device: str) -> tuple[float, float]:
        """Per autoregressive and per speculative step on a device."""
        overheads = self.overheads
        if device not in overheads.overhead_on:
            return overheads.autoregressive_overhead_s, overheads.step_overhead_s
        own_s = overheads.overhead_on[device]
        less = overheads.autoregressive_overhead_s - own_s
        return own_s, overheads.step_overhead_s - less

    def table_costs(self, draft: str) -> tuple[float, float, float]:
        """`gamma_table_cost` with the ends of its interval. Self-drafts follow a table of their own
        (plugins/vllm), whose graphs are captured for every gamma.
        """
        if draft == "self":
            return 0.0, 0.0, 0.0
        graphs = self.graphs
        return (
            graphs.gamma_table_cost,
            graphs.gamma_table_cost_low,
            graphs.gamma_table_cost_high,
        )

    def path(self, draft: str, method: str) -> StepPath:
        """The path of steps with this draft ("none": without one)."""
        own = self.draft(draft, method)
        runner = own.runner or self._runner_of(draft)
        steps = own.on.get(runner or "any", USUAL)
        mode = self.paths.graph_mode
        if steps.graph_mode is not None:
            mode = fewer_graphs(mode, steps.graph_mode)
        other_runner = ""
        is_by_model = not own.runner and draft != "self"
        if is_by_model and self.paths.other_runner != runner:
            other_runner = self.paths.other_runner
        return StepPath(
            runner=runner,
            other_runner=other_runner,
            graph_mode=mode,
            rows=steps.rows,
            is_asynchronous=self.paths.is_asynchronous and not own.is_synchronous,
            search=steps.search,
            note=self.paths.note,
        )

    def _runner_of(self, draft: str) -> str:
        """The model runner of dense models with a draft that asks for none."""
        if draft == "self":
            return self.paths.runner
        return self.paths.dense_runner or self.paths.runner

    def as_set(self, options: PathOptions) -> EngineProfile:
        """The profile of a server that was started with these options."""
        paths = self.paths
        mode = options.graph_mode or paths.graph_mode
        changes: dict[str, Any] = {"paths.graph_mode": mode}
        if options.attention_backend:
            changes["paths.attention_backend"] = options.attention_backend
        if options.draft_attention_backend:
            changes["paths.draft_attention_backend"] = options.draft_attention_backend
        chosen = options.runner
        if options.has_microbatches and paths.runner:
            chosen = "V1"
        if chosen:
            changes |= {
                "paths.runner": chosen,
                "paths.dense_runner": "",
                "paths.other_runner": "",
            }
        runner = chosen or self._runner_of("none")
        is_staged_v1 = runner == "V1" and options.pp_size > 1
        if paths.is_asynchronous and (options.is_synchronous or is_staged_v1):
            more_s = self.overheads.synchronous_step_overhead_s
            changes |= {
                "paths.is_asynchronous": False,
                "overheads.sequence_overhead_s": self._synchronous_sequence_s,
                "overheads.autoregressive_overhead_s": (
                    self.overheads.autoregressive_overhead_s + more_s
                ),
                "overheads.step_overhead_s": self.overheads.step_overhead_s + more_s,
                "scheduler.steps_ahead": 0.0,
            }
        if mode == "none":
            # the drafter's passes are launched one by one too
            overheads = self.overheads
            of_head_s = self.graphs.eager_head_layer_s
            of_model_s = self.graphs.eager_host_layer_s
            changes |= {
                "overheads.head_layer_s": max(overheads.head_layer_s, of_head_s),
                "overheads.draft_model_layer_s": max(
                    overheads.draft_model_layer_s, of_model_s
                ),
            }
        if options.captured_tokens is not None:
            changes["graphs.captured_tokens"] = options.captured_tokens
        if not options.has_custom_all_reduce:
            changes["kernels.allreduce_kernels"] = "nccl"
        if options.context_ranks > 1:
            changes["memory.context_ranks"] = options.context_ranks
        if options.state_element_bytes is not None:
            changes["memory.state_element_bytes"] = options.state_element_bytes
        if not options.frees_windows:
            changes["memory.window_cache"] = "all"
        return self.with_constants(changes)

    @property
    def self_drafting(self) -> EngineProfile:
        """The constants of speculative steps with a self-draft."""
        own = self.paths.self_draft.get(self.paths.runner, {})
        drafting: EngineProfile = _changed(self, own)
        return drafting

    @property
    def of_draft(self) -> EngineProfile:
        """The engine as a draft's passes see it: with the draft's attention backend."""
        paths = self.paths
        own = paths.draft_attention_backend
        if not own and paths.draft_inherits_backend:
            own = paths.attention_backend
        if own == paths.attention_backend:
            return self
        return self.with_constants({"paths.attention_backend": own})

    def scheduling(self, draft: str, method: str) -> EngineProfile:
        """The constants of steps with this draft, as the engine schedules them with it set up."""
        if draft == "self":
            return self.self_drafting
        path = self.path(draft, method)
        if path.is_asynchronous or not self.paths.is_asynchronous:
            return self
        overheads = self.overheads
        step_s = overheads.step_overhead_s + overheads.synchronous_step_overhead_s
        return self.with_constants(
            {
                "overheads.sequence_overhead_s": self._synchronous_sequence_s,
                "overheads.step_overhead_s": step_s,
            }
        )

    @property
    def _synchronous_sequence_s(self) -> float:
        """Per sequence of a step that is scheduled between others."""
        older_s = self.overheads.older_sequence_overhead_s
        if older_s is None:
            return self.overheads.sequence_overhead_s
        return older_s

    def of_version(self, version: str) -> EngineProfile:
        """The profile of a version ("0.12.0"). A version that cannot be read ("patched") is taken
        as the newest, one that is not named as the oldest."""
        number = version_number(version)
        if version and not number:
            return self
        named = msgspec.structs.replace(self, version=version)
        above = [bound for bound in self.before if number < version_number(bound)]
        profile = named
        if above:
            profile = named.just_before(min(above, key=version_number))
        for kind, draft in profile.drafts.items():
            newest = version_number(draft.newest_version)
            if newest and number[: len(newest)] > newest:
                profile = _changed(profile, {"drafts": {kind: {"runs": False}}})
        older_s = self.overheads.older_sequence_overhead_s
        since = version_number(self.scheduler.asynchronous_since)
        if older_s is None or number >= since:
            return profile
        return profile.with_constants({"overheads.sequence_overhead_s": older_s})

    def versions_meant(self, text: str) -> list[str]:
        """The versions that a table's words may mean, the likeliest first: its number ("0.12.0");
        by a date ("Dec 2025") the newest release of that time, a development build the next one, then
        others that were newest in the month or the one before; without both every release."""
        number = VERSION_NUMBER.search(text)
        if number:
            return [number[1]]
        versions = list(self.releases)
        days = [self.releases[version] for version in versions]
        stated = _stated_days(text)
        if stated is None or not versions:
            return versions[::-1]

        def newest_on(day: date) -> int:
            return max(sum(out <= day for out in days) - 1, 0)

        oldest, middle, newest = map(newest_on, stated)
        if DEVELOPMENT_BUILD.search(text):
            middle = min(middle + 1, len(versions) - 1)
            newest = max(middle, newest)
        others = versions[oldest : newest + 1]
        return list(dict.fromkeys([versions[middle], *reversed(others)]))

    def is_like(self, other: EngineProfile) -> bool:
        """Whether a version has the costs of another."""
        return self == msgspec.structs.replace(other, version=self.version)

    @property
    def bounds(self) -> list[str]:
        """The versions from which something differs, newest first."""
        return sorted(self.before, key=version_number, reverse=True)

    def just_before(self, bound: str) -> EngineProfile:
        """The profile of the last version before a bound."""
        profile = self
        for newer in self.bounds:
            if version_number(newer) >= version_number(bound):
                profile = _changed(profile, self.before[newer])
        return profile

    def with_costs_of(self, bound: str, *, is_newer: bool) -> EngineProfile:
        """The profile with the costs of one side of a bound, where a setting has what the other side
        does; which drafts run does not change."""
        newest = load_engine(self.name)
        side = newest.just_before(bound)
        if is_newer:
            side = newest.of_version(bound)
        return self.with_constants(
            {
                address: side.constant(address)
                for address in _addresses(newest.before[bound])
                if not address.endswith(".runs")
            }
        )

    def draft(self, draft: str, method: str) -> EngineDraft:
        """How it runs a draft; a kind that it does not name has no settings of its own."""
        return self.drafts.get(draft_kind(draft, method), NEVER_RUN)

    def runs(self, draft: str, method: str) -> bool:
        return self.draft(draft, method).runs

    def runs_since(self, draft: str, method: str) -> str:
        """The version from which it runs a draft; "": all of them, or none."""
        older = self
        for bound in self.bounds:
            older = _changed(older, self.before[bound])
            if not older.runs(draft, method):
                return bound if self.runs(draft, method) else ""
        return ""

    def versions_that_run(self, draft: str, method: str) -> str:
        """The versions that run a draft, in words; "": all of them, or none."""
        since = self.runs_since(draft, method)
        newest = self.draft(draft, method).newest_version
        if newest and newest == since:
            return f"{newest} alone does"
        if newest:
            return f"{newest} is the last that does"
        if since:
            return f"{since} is the first that does"
        return ""

    def draft_call(self, method: str) -> dict[str, str | bool]:
        """The settings that ask for a method there."""
        own = self.drafts.get(method, NEVER_RUN).call
        return own or self.drafts.get("model/full", NEVER_RUN).call

    def window_settings(
        self, draft: str, method: str, budget: int | None
    ) -> dict[str, int]:
        """The settings that cut a head's attention to its budget: a window, and where there is one
        of sinks, the sinks that the budget holds too. Empty: there are none, or the head reads all.
        """
        own = self.draft(draft, method)
        if budget is None or not own.window_setting:
            return {}
        if not own.sink_setting:
            return {own.window_setting: budget}
        sinks = self.paths.draft_sink_tokens
        return {own.window_setting: budget - sinks, own.sink_setting: sinks}

    def __post_init__(self) -> None:
        for kind in self.drafts:
            if kind not in DRAFT_KINDS:
                known = ", ".join(DRAFT_KINDS)
                raise ValueError(f"'drafts' must be of {known}, not '{kind}'")


NEVER_RUN = EngineDraft(runs=False)
USUAL = DraftPath()
NEW_TABLES: dict[str, Any] = {"drafts": NEVER_RUN, "on": USUAL}
"""Keys that hold tables by name, and what a new one begins as."""


def _changed(struct: Any, changes: Mapping[str, Any]) -> Any:
    """A profile, or a table of one, with other values at these keys."""
    values = {}
    for name, value in changes.items():
        old = getattr(struct, name)
        if name in NEW_TABLES:
            tables = {
                key: _changed(old.get(key, NEW_TABLES[name]), each)
                for key, each in value.items()
            }
            values[name] = old | tables
        elif isinstance(old, EngineTable):
            values[name] = _changed(old, value)
        else:
            values[name] = value
    return msgspec.structs.replace(struct, **values)


def _addresses(tables: Mapping[str, Any]) -> Iterator[str]:
    """The addresses of constants in tables within tables."""
    for name, value in tables.items():
        if isinstance(value, Mapping):
            for address in _addresses(value):
                yield f"{name}.{address}"
        else:
            yield name


VERSION_NUMBER = re.compile(r"(?<![\w.])v?(\d{1,2}(?:\.\d+)+)")
"""A version in a table's words."""
DEVELOPMENT_BUILD = re.compile(r"\b(nightly|main|master|dev)\b", re.IGNORECASE)
STATED_DATE = re.compile(
    r"\b(?P<year>20\d\d)-(?P<month>\d\d)(?:-(?P<day>\d\d))?\b"
    r"|\b(?P<name>jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]* (?P<of>20\d\d)\b"
    r"|\b(?P<alone>20\d\d)\b",
    re.IGNORECASE,
)


def _stated_days(text: str) -> tuple[date, date, date] | None:
    """The first, the likeliest and the last day of a date in a table's words, servers being a month
    old at most; of a year alone all of it."""
    stated = STATED_DATE.search(text)
    if stated is None:
        return None
    if stated["alone"]:
        year = int(stated["alone"])
        return date(year, 1, 1), date(year, 7, 1), date(year, 12, 31)
    if stated["name"]:
        first = datetime.strptime(f"{stated['name']} {stated['of']}", "%b %Y")
        middle = first.date().replace(day=15)
    else:
        month = min(max(int(stated["month"]), 1), 12)
        middle = date(int(stated["year"]), month, min(int(stated["day"] or 15), 28))
    return middle - timedelta(days=45), middle, middle + timedelta(days=15)


def version_number(version: str) -> tuple[int, ...]:
    """(0, 12, 0) of "0.12.0rc1": what orders versions."""
    numbers = re.match(r"\D*(\d{1,9}(?:\.\d{1,9})*)", version)
    if numbers is None:
        return ()
    return tuple(int(part) for part in numbers[1].split("."))


def is_within(version: str, since: str, before: str) -> bool:
    """Whether a version ("": the newest) is one from `since` on and before `before` ("": no bound)."""
    number = version_number(version)
    if not number:
        return not before
    if since and number < version_number(since):
        return False
    return not before or number < version_number(before)


def engine_names() -> list[str]:
    return sorted(path.stem for path in ENGINES_DIRECTORY.glob("*.toml"))


def engines_that_run(draft: str, method: str) -> list[str]:
    """Engines of the catalog, serving engines first."""
    able = [name for name in engine_names() if load_engine(name).runs(draft, method)]
    return sorted(
        able, key=lambda name: (name not in SERVING_ENGINES, name != "vllm", name)
    )


def load_engine(name_or_path: str | Path) -> EngineProfile:
    """A profile of the catalog ("vllm", or of a version "vllm@0.32"), or of a TOML file. Raises
    ConfigError naming the file and the key, or the nearest known name."""
    text = str(name_or_path)
    if "/" in text or text.endswith(".toml"):
        return engine_from_document(read_toml(Path(text), "engine profile"), where=text)
    return _of_catalog(text)


@lru_cache(maxsize=64)
def _of_catalog(text: str) -> EngineProfile:
    name, _, version = text.lower().partition("@")
    path = ENGINES_DIRECTORY / f"{name}.toml"
    if not path.is_file():
        raise unknown_choice("engine", name, engine_names())
    document = read_toml(path, "engine profile")
    profile = converted(document, EngineProfile, where=str(path))
    if not version:
        return profile
    if not version_number(version):
        raise ConfigError(f"a version of {name} is a number like 0.32, not '{version}'")
    return profile.of_version(version)


def engine_from_document(document: dict[str, Any], *, where: str) -> EngineProfile:
    """The profile that a parsed TOML document describes; ConfigError names `where` and the key."""
    profile = converted(document, EngineProfile, where=where)
    for version in profile.before:
        changed = _merged(document, document["before"][version])
        converted(changed, EngineProfile, where=f"{where}: before.{version}")
    return profile


def _merged(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A document with other values at the keys of `changes`, tables within tables."""
    merged = dict(document)
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _merged(merged[key], value)
        else:
            merged[key] = value
    return merged


def save_engine(profile: EngineProfile, path: Path) -> None:
    """Writes a profile as TOML, whole or not at all. Raises StorageError when the file cannot be
    written.
    """
    document = msgspec.to_builtins(profile, builtin_types=(date,))
    tables = {key: value for key, value in document.items() if value != {}}
    write_atomic(path, msgspec.toml.encode(tables))
