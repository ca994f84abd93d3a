"""A declared grid of configurations: predicted from the calibration alone, then measured, then compared.

Predictions are written, with a hash over all of them, before the first measurement starts. A run that was interrupted
goes on where it stopped: what the records file holds already is not measured again.
"""

from __future__ import annotations

import hashlib
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import msgspec

from magicdec.errors import ConfigError
from magicdec.records import Record, append_record, read_records
from magicdec.specs.speculation import AUTOREGRESSIVE, DraftMethod, SamplingSpec, SpeculationSpec
from magicdec.units import format_seconds
from magicdec.validate.acceptance_profile import AcceptanceRequest
from magicdec.validate.calibrate import obtain_profile
from magicdec.validate.compare import Comparison, Thresholds, pair_up
from magicdec.validate.environment import ReferenceKernel
from magicdec.validate.local_profile import LocalProfile
from magicdec.validate.measurement import benchmark, configuration_key
from magicdec.validate.predict import predict_records
from magicdec.validate.request import BenchmarkRequest


class GridSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every combination of the lists; `cases`, where given, lists (batch, context) pairs instead of their product."""

    model: str = "embedded"
    dtype: str = "float32"
    device: str = "cpu"
    draft_methods: tuple[DraftMethod, ...] = ("streamingllm",)
    draft_budgets: tuple[int, ...] = (128, 256)
    gammas: tuple[int, ...] = (1, 3, 5)
    batch_sizes: tuple[int, ...] = ()
    context_lens: tuple[int, ...] = ()
    cases: tuple[tuple[int, int], ...] = ()
    temperatures: tuple[float, ...] = (1.0,)
    gen_len: int = 48
    repetitions: int = 3
    prompts: str = "stdlib"
    seed: int = 0
    thresholds: dict[str, float] = {}

    def requests(self) -> Iterator[BenchmarkRequest]:
        """One per (batch, context, temperature), the cheapest first, so that something is told early."""
        cases = self.cases or list(product(self.batch_sizes, self.context_lens))
        for (batch, context), temperature in product(
            sorted(cases, key=lambda case: case[0] * case[1]), self.temperatures
        ):
            speculations = tuple(
                SpeculationSpec(draft="self", draft_method=method, draft_budget=budget, gamma=gamma)
                for method, budget, gamma in product(self.draft_methods, self.draft_budgets, self.gammas)
                if budget < context
            )
            yield BenchmarkRequest(
                model=self.model,
                dtype=self.dtype,
                device=self.device,
                batch_size=batch,
                context_len=context,
                gen_len=self.gen_len,
                speculations=speculations,
                sampling=SamplingSpec(temperature=temperature, seed=self.seed),
                prompts=self.prompts,
                repetitions=self.repetitions,
            )


BUILT_IN_GRID = GridSpec(cases=((1, 512), (8, 2048), (32, 4096)))
QUICK_GRID = GridSpec(cases=((1, 512), (8, 1024)), draft_budgets=(128,), gammas=(1, 3), gen_len=32, repetitions=2)
ACCEPTANCE_CONTEXTS = (1536, 3072)


def load_grid(path: Path | None) -> GridSpec:
    """Reads a grid file; None is the built-in grid.

    Raises ConfigError naming the file and the key.
    """
    if path is None:
        return BUILT_IN_GRID
    try:
        grid = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), GridSpec)
        Thresholds(**grid.thresholds)
    except OSError as error:
        raise ConfigError(f"cannot read grid {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, TypeError) as error:
        raise ConfigError(f"grid {path}: {error}") from error
    if not (grid.cases or (grid.batch_sizes and grid.context_lens)):
        raise ConfigError(f"grid {path}: give cases = [[batch, context], ...], or batch_sizes and context_lens")
    return grid


@dataclass(frozen=True, kw_only=True)
class GridRun:
    """The outcome of a grid."""

    predicted: list[Record]
    measured: list[Record]
    comparison: Comparison


def run_grid(
    grid: GridSpec,
    *,
    profile: LocalProfile | None,
    records: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> GridRun:
    """Predicts and measures a grid. Without a profile, calibrates first."""
    requests = list(grid.requests())
    profile = profile or obtain_profile(
        grid.model, dtype=grid.dtype, device=grid.device, request=acceptance_request(grid), progress=progress
    )
    predicted = freeze_predictions(requests, profile, records)
    measured: list[Record] = []
    clock = _Clock(requests)
    for number, request in enumerate(requests, 1):

        def show(message: str, prefix: str = f"[{number}/{len(requests)}{clock.left}] ") -> None:
            progress(prefix + message)

        started = time.perf_counter()
        rows, num_new = measure_missing(
            request, records, bandwidth_bytes_per_s=profile.hardware.memory_bytes_per_s, progress=show
        )
        clock.finish(request, time.perf_counter() - started if num_new else 0.0)
        measured += rows
    comparison = Comparison(pairs=pair_up(predicted, measured), thresholds=Thresholds(**grid.thresholds))
    return GridRun(predicted=predicted, measured=measured, comparison=comparison)


def acceptance_request(grid: GridSpec) -> AcceptanceRequest:
    """The grid's methods, at contexts and a gamma of its own where the grid leaves any."""
    taken = {context for _, context in grid.cases} | set(grid.context_lens)
    return AcceptanceRequest(
        model=grid.model,
        dtype=grid.dtype,
        device=grid.device,
        draft_methods=grid.draft_methods,
        context_lens=tuple(c for c in ACCEPTANCE_CONTEXTS if c not in taken) or ACCEPTANCE_CONTEXTS,
        gamma=max(grid.gammas) + 1,
        temperature=grid.temperatures[0],
        prompts=grid.prompts,
    )


class _Clock:
    """The time that is left, from what was measured so far: work grows about as batch × (context + a constant)."""

    def __init__(self, requests: list[BenchmarkRequest]) -> None:
        self._left = sum(map(self._work, requests))
        self._done = 0.0
        self._elapsed_s = 0.0

    @staticmethod
    def _work(request: BenchmarkRequest) -> float:
        return request.batch_size * (request.context_len + 1000.0) * (1 + len(request.speculations))

    def finish(self, request: BenchmarkRequest, elapsed_s: float) -> None:
        """Counts a request as done; one that was in the file already (no time) says nothing of the rest."""
        self._left -= self._work(request)
        if elapsed_s > 0:
            self._done += self._work(request)
            self._elapsed_s += elapsed_s

    @property
    def left(self) -> str:
        return f", {format_seconds(self._elapsed_s / self._done * self._left)} left" if self._done else ""


def measure_missing(
    request: BenchmarkRequest,
    records: Path,
    *,
    bandwidth_bytes_per_s: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[Record], int]:
    """The request's measured records, and how many of them were not in the file already.

    The reference kernel is timed before and after, and its mean stored with each.
    """
    known = {r.key: r for r in read_records(records) if r.source == "measured"} if records.exists() else {}
    keys = {configuration_key(request, each): each for each in (AUTOREGRESSIVE, *request.speculations)}
    missing = {key: each for key, each in keys.items() if key not in known}
    if missing:
        todo = tuple(each for each in missing.values() if not each.is_autoregressive)
        reference = ReferenceKernel()
        before = reference.time_s()
        _, rows = benchmark(
            replace(request, speculations=todo), bandwidth_bytes_per_s=bandwidth_bytes_per_s, progress=progress
        )
        reference_s = (before + reference.time_s()) / 2
        for row in rows:
            if row.key in missing:
                known[row.key] = msgspec.structs.replace(row, reference_s=reference_s)
                append_record(records, known[row.key])
    return [known[key] for key in keys], len(missing)


def freeze_predictions(requests: list[BenchmarkRequest], profile: LocalProfile, records: Path) -> list[Record]:
    """Predicts every point and writes the predictions; those of an interrupted run, in the file already, stay."""
    known = {r.key: r for r in read_records(records) if r.source == "calibrated"} if records.exists() else {}
    predicted = [record for request in requests for record in predict_records(request, profile)]
    digest = hashlib.sha256(b"".join(msgspec.json.encode(record) for record in predicted)).hexdigest()
    frozen = []
    for record in predicted:
        if record.key not in known:
            known[record.key] = msgspec.structs.replace(record, notes=[f"predictions sha256 {digest}"])
            append_record(records, known[record.key])
        frozen.append(known[record.key])
    return frozen
