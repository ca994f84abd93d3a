"""The material of a report: measured and predicted records, paired, with a plan document.

Nothing is computed here that a record or a plan does not hold; rows are only selected, paired and
ordered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from magicdec.errors import ConfigError
from magicdec.schema.comparison import (
    Comparison,
    is_paired,
    latest_measured,
    latest_predicted,
    pair_records,
    setting_key,
)
from magicdec.schema.plan import Plan, load_plan
from magicdec.schema.record import BASELINE_MBU_FLOOR, Record, read_many
from magicdec.schema.row import COLUMNS, Candidate, column

WEAK_BASELINE = "†"
WEAK_BASELINE_NOTE = (
    f"{WEAK_BASELINE} Over a baseline below {BASELINE_MBU_FLOOR:.0%} MBU: "
    "part of the speedup is that baseline's slack."
)


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """The material of one report. Every part may be empty; a figure or table without its data is
    left out.
    """

    title: str
    created_utc: str
    command: str
    measured: tuple[Record, ...]
    predicted: tuple[Record, ...]
    comparison: Comparison
    plan: Plan | None = None

    @classmethod
    def from_files(
        cls,
        paths: Iterable[Path],
        plan_path: Path | None = None,
        *,
        title: str = "Speculative decoding report",
        command: str = "",
    ) -> ReportData:
        """Reads records files, and one plan: at `plan_path`, or a .json among `paths`.

        Raises StorageError or ConfigError naming the file.
        """
        record_paths = []
        plan_paths = []
        if plan_path is not None:
            plan_paths.append(plan_path)
        for path in paths:
            if path.suffix == ".json":
                plan_paths.append(path)
            else:
                record_paths.append(path)
        if len(plan_paths) > 1:
            raise ConfigError(f"one plan is shown at a time, not also {plan_paths[-1]}")
        plan = None
        if plan_paths:
            plan = load_plan(plan_paths[0])
        return cls.from_records(
            read_many(record_paths), plan, title=title, command=command
        )

    @classmethod
    def from_records(
        cls,
        records: Iterable[Record],
        plan: Plan | None = None,
        *,
        title: str = "Speculative decoding report",
        command: str = "",
    ) -> ReportData:
        """Splits the records by source and pairs them.

        The same configuration measured again replaces the earlier row; of several predictions of
        one configuration the calibrated one is taken, else the last. Candidates of the plan stand
        in where no record predicts.

        Raises ConfigError when there is nothing to report.
        """
        rows = list(records)
        if plan is not None:
            candidates = plan_records(plan)
            # a record predicts better than the plan's own row of the same setting
            predicted = set()
            for row in rows:
                if row.source != "measured":
                    predicted.add((row.hardware, setting_key(row)))
            missing = []
            for candidate in candidates:
                if (candidate.hardware, setting_key(candidate)) not in predicted:
                    missing.append(candidate)
            rows = missing + rows
        if not rows:
            raise ConfigError(
                "nothing to report: give at least one record (from magicdec run) or a plan document"
            )
        return cls(
            title=title,
            created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command,
            measured=tuple(latest_measured(rows)),
            predicted=tuple(latest_predicted(rows).values()),
            comparison=Comparison(pairs=pair_records(rows)),
            plan=plan,
        )

    @property
    def reference(self) -> Record | None:
        """The configuration the report answers with.

        The plan's best; without a plan, what was predicted to be fastest among the measured (not
        the measured fastest, which is flattered by noise); else the fastest row there is.
        """
        if self.plan is not None:
            return candidate_record(self.plan, self.plan.best)
        if self.comparison.pairs:
            return fastest(pair.predicted for pair in self.comparison.pairs)
        return fastest(row for row in self.rows if row.is_speculative)

    @property
    def rows(self) -> tuple[Record, ...]:
        return (*self.measured, *self.predicted)

    def find_measured(self, row: Record) -> Record | None:
        return _first_paired(self.measured, row)

    def find_predicted(self, row: Record) -> Record | None:
        return _first_paired(self.predicted, row)


def _first_paired(rows: Iterable[Record], row: Record) -> Record | None:
    for candidate in rows:
        if is_paired(candidate, row):
            return candidate
    return None


def has_weak_baseline(record: Record) -> bool:
    """Whether the speedup is over an autoregressive run that was measured far below the memory's
    bandwidth.
    """
    mbu = record.autoregressive_mbu
    return record.is_speculative and mbu is not None and mbu < BASELINE_MBU_FLOOR


def median_pair(record: Record) -> tuple[float | None, float | None]:
    """Tokens per second, speculative and autoregressive, of the repetition that the speedup is the
    median of.

    Their ratio is the speedup. Where the median lies between two repetitions, or the samples were
    not recorded, it is the medians of each, whose ratio may differ from the median of the ratios.
    """
    samples = record.speedup_samples or []
    steps = record.autoregressive_step_samples_s or []
    is_paired_by_sample = len(samples) == len(steps)
    if record.is_speculative and is_paired_by_sample and record.speedup in samples:
        repetition = samples.index(record.speedup)
        baseline = record.batch_size / steps[repetition]
        return record.speedup * baseline, baseline
    return record.tokens_per_s, record.autoregressive_tokens_per_s


def siblings(records: Iterable[Record], row: Record, vary: str) -> list[Record]:
    """Speculative rows that differ from `row` in the field `vary` at most, ordered by it."""
    own = {vary: getattr(row, vary)}
    rows = []
    for record in records:
        if not record.is_speculative:
            continue
        alike = msgspec.structs.replace(record, **own)
        if is_paired(alike, row):
            rows.append(record)
    return sorted(rows, key=lambda record: getattr(record, vary) or 0)


def fastest(records: Iterable[Record]) -> Record | None:
    """The record of the greatest speedup, the first of equals."""
    return max(records, key=lambda row: row.speedup or 0.0, default=None)


# Plan documents
# --------------------------------------------------------------------------------------------------

SHARED_FIELDS = sorted({*COLUMNS} & {*Record.__struct_fields__})


def candidate_record(plan: Plan, row: Candidate) -> Record:
    """A plan's candidate as a predicted record."""
    shared = {name: column(row, name) for name in SHARED_FIELDS}
    request = plan.request
    formats = plan.precision
    draft_weight_dtype = None
    if row.gamma > 0 and formats.draft_weight_dtype != formats.weight_dtype:
        draft_weight_dtype = formats.draft_weight_dtype
    return Record(
        source=plan.source,
        model=plan.model,
        engine=plan.engine,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        gen_len=request.gen_len or None,
        draft_weight_dtype=draft_weight_dtype,
        autoregressive_tokens_per_s=row.tokens_per_s / row.speedup,
        **shared,
    )


def plan_records(plan: Plan) -> list[Record]:
    """All candidates of a plan as predicted records, each case's autoregressive one and best
    included.
    """
    rows = list(plan.autoregressive_rows)
    rows += [case.autoregressive for case in plan.cases]
    rows += plan.candidates
    rows += [case.best for case in plan.cases]
    return [candidate_record(plan, row) for row in rows]
