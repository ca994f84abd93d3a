"""A declared grid of configurations: predicted from the calibration alone, then measured, then compared.

Predictions are written, each with its hash, before the first measurement starts. All configurations of a (batch,
context) share one prefill and are measured in groups, each recorded when it is done. A run that was interrupted goes on
where it stopped: what the records file holds already is not measured again.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import msgspec

from magicdec.calibrate.acceptance_bench import AcceptanceRequest
from magicdec.calibrate.local_profile import LocalProfile, load_local_profile
from magicdec.calibrate.machine import obtain_profile
from magicdec.comparison import Comparison, by_cpu_time, pair_records
from magicdec.errors import ConfigError
from magicdec.measure.configuration import BenchmarkRequest
from magicdec.measure.environment import ReferenceKernels
from magicdec.measure.rank import benchmark, configuration_key, known_records
from magicdec.progress import Stages
from magicdec.records import Record, append_record, read_records
from magicdec.specs.speculation import SpeculationSpec
from magicdec.validate.grid_spec import GridSpec
from magicdec.validate.predicted_records import predict_records

ACCEPTANCE_CONTEXTS = (1280, 3584)
ACCEPTANCE_BUDGETS = (48, 96, 192, 384, 768, 1280)


@dataclass(frozen=True, kw_only=True)
class GridRun:
    """The outcome of a grid."""

    predicted: list[Record]
    measured: list[Record]
    comparison: Comparison
    failures: list[str]
    """Thresholds of the grid that do not hold."""


def run_grid(
    grid: GridSpec,
    *,
    profile: LocalProfile | None,
    records: Path,
    quick: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> GridRun:
    """Predicts and measures a grid. Without a profile, calibrates first (`quick`: with fewer shapes, rounds and
    prompts), and saves the profile next to the records so that the run can be resumed."""
    requests = list(grid.requests())
    profile = profile or _own_profile(grid, records.with_suffix(".profile.toml"), quick=quick, progress=progress)
    _warn_of_other_temperatures(grid, profile)
    predicted = freeze_predictions(requests, profile, records)
    stages = Stages(progress, [_work(request, len(_missing(request, records))) for request in requests])
    measured: list[Record] = []
    references = ReferenceKernels(grid.device) if grid.engine == "ours" else None
    for number, request in enumerate(requests):
        measured += benchmark(
            request,
            records=records,
            resume=True,
            bandwidth_bytes_per_s=profile.hardware.memory_bytes_per_s,
            references=references,
            progress=stages.stage(number),
        )
    judged = [by_cpu_time(record) for record in measured] if grid.clock == "cpu" else measured
    comparison = Comparison(pairs=pair_records([*predicted, *judged]))
    failures = grid.thresholds.failures(comparison)
    return GridRun(predicted=predicted, measured=measured, comparison=comparison, failures=failures)


def _warn_of_other_temperatures(grid: GridSpec, profile: LocalProfile) -> None:
    for law in profile.acceptance:
        others = [t for t in grid.temperatures if law.temperature is not None and t != law.temperature]
        if others and law.draft_method in grid.draft_methods:
            warnings.warn(
                f"acceptance of {law.draft_method} was measured at temperature {law.temperature:g}; predictions at "
                f"{', '.join(f'{t:g}' for t in others)} use it too",
                stacklevel=2,
            )


def _own_profile(grid: GridSpec, path: Path, *, quick: bool, progress: Callable[[str], None]) -> LocalProfile:
    if path.exists():
        return load_local_profile(path)
    profile = obtain_profile(
        grid.model,
        dtype=grid.dtype,
        device=grid.device,
        engine=grid.engine,
        clock=grid.clock,
        request=acceptance_request(grid, quick=quick),
        quick=quick,
        progress=progress,
    )
    profile.save(path)
    return profile


def acceptance_request(grid: GridSpec, *, quick: bool = False) -> AcceptanceRequest:
    """The grid's methods, at budgets, contexts and a gamma that the grid does not have."""
    cases = grid.cases or list(product(grid.batch_sizes, grid.context_lens))
    longest = max(context for _, context in cases)
    contexts = [c for c in ACCEPTANCE_CONTEXTS if c not in {context for _, context in cases}]
    contexts = [c for c in contexts if c < longest] or [longest - longest // 4]
    return AcceptanceRequest(
        model=grid.model,
        dtype=grid.dtype,
        device=grid.device,
        draft_methods=grid.draft_methods,
        draft_budgets=tuple(b for b in ACCEPTANCE_BUDGETS if b not in grid.draft_budgets and b < contexts[-1]),
        context_lens=tuple(contexts),
        num_prompts=16 if quick else 48,
        gamma=max(grid.gammas) + 1,
        temperature=grid.temperatures[0],
        prompts=grid.prompts,
    )


def _work(request: BenchmarkRequest, num_configurations: int) -> float:
    """About how long configurations take, in any unit: it grows as KV slots and a constant."""
    return (request.batch_size * request.context_len + 8000.0) * num_configurations


def _missing(request: BenchmarkRequest, records: Path) -> list[SpeculationSpec]:
    """The request's speculations that the file does not hold yet."""
    known = known_records(records, request.repetitions) if records.exists() else {}
    return [each for each in request.speculations if configuration_key(request, each) not in known]


def freeze_predictions(requests: list[BenchmarkRequest], profile: LocalProfile, records: Path) -> list[Record]:
    """Predicts every point and writes the predictions; those of an interrupted run, in the file already, stay.

    Raises ConfigError for a prediction in the file that was changed after it was written.
    """
    known = {r.key: r for r in read_records(records) if r.source == "calibrated"} if records.exists() else {}
    frozen = []
    differs = False
    for record in (record for request in requests for record in predict_records(request, profile)):
        if record.key not in known:
            known[record.key] = msgspec.structs.replace(record, notes=[prediction_note(record)])
            append_record(records, known[record.key])
        found = known[record.key]
        if found.notes != [prediction_note(found)]:
            raise ConfigError(f"{records}: prediction {found.key} is not what was written before the measurements")
        differs |= (found.step_s, found.speedup) != (record.step_s, record.speedup)
        frozen.append(found)
    if differs:
        warnings.warn(
            f"{records} holds predictions of another profile, and they stay; give another --records to use this one",
            stacklevel=2,
        )
    return frozen


def prediction_note(record: Record) -> str:
    """The commitment to a prediction: a hash of its contents."""
    text = msgspec.json.encode(msgspec.structs.replace(record, notes=[]))
    return f"prediction sha256 {hashlib.sha256(text).hexdigest()}"
