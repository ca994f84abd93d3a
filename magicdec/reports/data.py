"""What a report is made from: measured and predicted records, paired, with a plan document and a hardware profile.

Nothing is computed here that a record or a plan does not hold; rows are only selected, paired and ordered.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from magicdec.comparison import Comparison, is_paired, latest_measured, latest_predicted, pair_records
from magicdec.errors import ConfigError, StorageError
from magicdec.records import BASELINE_MBU_FLOOR, Record

CANDIDATE_FIELDS = (
    "draft", "draft_method", "draft_budget", "gamma", "tp_size", "batch_size", "context_len", "autoregressive_step_s",
    "draft_step_s", "verify_step_s", "accept_step_s", "step_s", "expected_tokens_per_step", "tpot_s", "tokens_per_s",
    "speedup", "speedup_low", "speedup_high", "bound_by", "memory_bytes_per_gpu", "acceptance_by_position",
)  # fmt: skip
PLAN_SCHEMA_VERSION = 1
WEAK_BASELINE = "†"
WEAK_BASELINE_NOTE = (
    f"{WEAK_BASELINE} Over a baseline below {BASELINE_MBU_FLOOR:.0%} MBU: part of the speedup is that baseline's slack."
)


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """The material of one report. Every part may be empty; a figure or table without its data is left out."""

    title: str
    created_utc: str
    command: str
    measured: tuple[Record, ...]
    predicted: tuple[Record, ...]
    comparison: Comparison
    plan: Mapping[str, Any] | None = None
    profile: Mapping[str, Any] | None = None
    sources: tuple[str, ...] = ()

    @classmethod
    def from_records(
        cls,
        records: Iterable[Record],
        plan: Mapping[str, Any] | None = None,
        *,
        profile: Mapping[str, Any] | None = None,
        title: str = "Speculative decoding report",
        command: str = "",
        sources: Iterable[str] = (),
    ) -> ReportData:
        """Splits the records by source and pairs them.

        The same configuration measured again replaces the earlier row; of several predictions of one configuration the
        calibrated one is taken, else the last. Candidates of the plan stand in where no record predicts.

        Raises ConfigError when there is nothing to report.
        """
        if plan is not None:
            check_plan(plan)
        rows = [*(plan_records(plan) if plan is not None else []), *records]
        if not rows:
            raise ConfigError("nothing to report: give at least one record (from magicdec run) or a plan document")
        return cls(
            title=title,
            created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command,
            measured=tuple(latest_measured(rows)),
            predicted=tuple(latest_predicted(rows).values()),
            comparison=Comparison(pairs=pair_records(rows)),
            plan=plan,
            profile=profile,
            sources=tuple(sources),
        )

    @property
    def reference(self) -> Record | None:
        """The configuration the report answers with.

        The plan's best; without a plan, what was predicted to be fastest among the measured (not the measured fastest,
        which is flattered by noise); else the fastest row there is.
        """
        if self.plan is not None and self.plan.get("best"):
            return candidate_record(self.plan, self.plan["best"])
        if self.comparison.pairs:
            return max((p.predicted for p in self.comparison.pairs), key=_speedup)
        rows = [r for r in (*self.measured, *self.predicted) if r.is_speculative]
        return max(rows, key=_speedup) if rows else None

    def find_measured(self, row: Record) -> Record | None:
        return next((r for r in self.measured if is_paired(r, row)), None)

    def find_predicted(self, row: Record) -> Record | None:
        return next((r for r in self.predicted if is_paired(r, row)), None)


def has_weak_baseline(record: Record) -> bool:
    """Whether the speedup is over an autoregressive run that was measured far below the memory's bandwidth."""
    mbu = record.autoregressive_mbu
    return record.is_speculative and mbu is not None and mbu < BASELINE_MBU_FLOOR


def siblings(records: Iterable[Record], row: Record, vary: str) -> list[Record]:
    """Speculative rows that differ from `row` in the field `vary` at most, ordered by it."""
    own = {vary: getattr(row, vary)}
    found = [r for r in records if r.is_speculative and is_paired(msgspec.structs.replace(r, **own), row)]
    return sorted(found, key=lambda r: getattr(r, vary) or 0)


def describe(record: Record, *, symbol: str = "gamma") -> str:
    """A configuration in a few words: "StreamingLLM 256, gamma 3"."""
    if not record.is_speculative:
        return "autoregressive"
    budget = f" {record.draft_budget}" if record.draft_budget is not None else ""
    draft = "" if record.draft in ("self", record.draft_method) else f"{record.draft} "
    weights = f", {record.draft_weight_dtype} draft" if record.draft_weight_dtype is not None else ""
    most = "up to " if record.adaptive else ""
    return f"{draft}{method_name(record.draft_method)}{budget}{weights}, {symbol} {most}{record.gamma}"


def method_name(method: str) -> str:
    names = {
        "streamingllm": "StreamingLLM", "snapkv": "SnapKV", "topk": "top-k", "full": "full KV", "ngram": "n-gram",
        "eagle": "EAGLE",
    }  # fmt: skip
    return names.get(method, method)


def _speedup(record: Record) -> float:
    return record.speedup or 0.0


# Plan documents ------------------------------------------------------------------------------------------------------


def load_plan(path: Path) -> dict[str, Any]:
    """Reads and checks a plan document.

    Raises:
        StorageError: the file cannot be read.
        ConfigError: it is not JSON, or not a plan this version understands.
    """
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise StorageError(f"cannot read plan {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    try:
        check_plan(document)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return dict(document)


def load_profile(path: Path) -> dict[str, Any]:
    """Reads a hardware profile as a plain mapping. Raises StorageError or ConfigError naming the file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"cannot read profile {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def check_plan(plan: object) -> None:
    """Raises ConfigError unless `plan` is a plan document whose candidates are well-formed and finite."""
    if not isinstance(plan, Mapping) or plan.get("kind") != "plan":
        raise ConfigError("not a plan document (magicdec plan --format json writes one)")
    if plan.get("schema_version") != PLAN_SCHEMA_VERSION:
        raise ConfigError(
            f"plan schema version {plan.get('schema_version')} (this program reads {PLAN_SCHEMA_VERSION})"
        )
    for name in ("model", "best"):
        if name not in plan:
            raise ConfigError(f"the plan has no '{name}'")
    if not isinstance(plan["model"], str):
        raise ConfigError(f"plan: the model's name must be a text, not {plan['model']!r}")
    _check_parts(plan)
    rows = [(name, plan[name]) for name in ("best", "autoregressive") if plan.get(name) is not None]
    for name in ("candidates", "autoregressive_rows"):
        if not isinstance(listed := plan.get(name) or [], list):
            raise ConfigError(f"plan: {name} must be a list")
        rows += [(name, row) for row in listed]
    for where, row in rows:
        if not isinstance(row, Mapping):
            raise ConfigError(f"plan {where}: an object was expected, not {row!r}")
        record = candidate_record(plan, row)
        for name in CANDIDATE_FIELDS:
            value = getattr(record, name)
            positive = name in ("speedup", "step_s", "autoregressive_step_s", "expected_tokens_per_step")
            if isinstance(value, float) and not (math.isfinite(value) and (value > 0 or (value == 0 and not positive))):
                raise ConfigError(f"plan {where}: {name} is {value}, a positive number was expected")
        if not 0 <= record.gamma <= 1024 or record.batch_size < 1 or record.context_len < 1:
            raise ConfigError(f"plan {where}: gamma, batch_size and context_len must be positive whole numbers")


def _check_parts(plan: Mapping[str, Any]) -> None:
    """Raises ConfigError unless the table, the breakdown, the memory and the lists have the shapes that are drawn."""
    try:
        parts = msgspec.convert({name: plan[name] for name in PlanParts.__struct_fields__ if plan.get(name)}, PlanParts)
    except msgspec.ValidationError as error:
        raise ConfigError(f"plan: {error}".replace("`", "'")) from error
    table = parts.gamma_table
    if table is not None:
        shape = len(table.batch_sizes), len(table.context_lens)
        grids = [rows for rows in (table.gamma, table.speedup) if rows]
        square = all(len(rows) == shape[0] and {len(row) for row in rows} == {shape[1]} for rows in grids)
        rising = all(
            list(axis) == sorted({v for v in axis if v >= 1}) for axis in (table.batch_sizes, table.context_lens)
        )
        if not (all(shape) and table.gamma and square and rising):
            raise ConfigError(
                "the plan's gamma_table must have a row per batch size and a column per context, in rising order"
            )
        if min(map(min, table.gamma)) < 0 or len(table.break_even_context) not in (0, shape[0]):
            raise ConfigError("the plan's gamma_table must have gamma >= 0 and one break_even_context per batch size")
    numbers = [
        v for ops in parts.breakdown.values() for op in ops for v in (op.time_s, op.ceiling_s, op.flops, op.bytes)
    ]
    numbers += list(parts.memory.values())
    if table is not None:
        numbers += [*table.break_even_context, *(v for row in table.speedup for v in row)]
    if any(v is not None and not (math.isfinite(v) and v >= 0) for v in numbers):
        raise ConfigError("the plan's breakdown, memory and gamma_table must hold finite numbers >= 0")


class GammaTable(msgspec.Struct):
    """The best gamma by batch (rows) and context (columns)."""

    batch_sizes: list[int]
    context_lens: list[int]
    gamma: list[list[int]]
    speedup: list[list[float]] = []
    break_even_context: list[float | None] = []


class PlannedOp(msgspec.Struct):
    """One operation of a pass."""

    op: str
    time_s: float
    ceiling_s: float | None = None
    bound_by: str | None = None
    flops: float | None = None
    bytes: float | None = None


class NeedsAcceptance(msgspec.Struct):
    """A draft that was not ranked."""

    draft: str
    draft_method: str = ""
    reason: str = ""


class PlanParts(msgspec.Struct):
    """What a report reads of a plan besides its candidates. Other keys are left alone."""

    gamma_table: GammaTable | None = None
    breakdown: dict[str, list[PlannedOp]] = {}
    memory: dict[str, float | None] = {}
    notes: list[str] = []
    needs_acceptance: list[NeedsAcceptance] = []
    request: dict[str, Any] = {}


def candidate_record(plan: Mapping[str, Any], row: Mapping[str, Any]) -> Record:
    """A plan's candidate as a predicted record. Raises ConfigError when a value has the wrong type or is missing."""
    request = plan.get("request") or {}
    fields = {name: row[name] for name in CANDIDATE_FIELDS if row.get(name) is not None}
    source = plan.get("source") if plan.get("source") in ("calibrated", "analytical") else "analytical"
    hardware = row.get("hardware") or plan.get("hardware") or ""
    fields |= {"source": source, "model": plan["model"], "hardware": str(hardware)}
    if isinstance(temperature := request.get("temperature"), int | float):
        fields["temperature"] = float(temperature)
    try:
        return msgspec.convert(fields, Record)
    except msgspec.ValidationError as error:
        raise ConfigError(f"plan candidate: {error}".replace("`", "'")) from error


def plan_records(plan: Mapping[str, Any]) -> list[Record]:
    """All candidates of a plan as predicted records, the autoregressive one and the best included."""
    rows = [*(plan.get("autoregressive_rows") or []), plan.get("autoregressive"), *(plan.get("candidates") or [])]
    return [candidate_record(plan, row) for row in [*rows, plan.get("best")] if row]
