"""A declared grid of configurations: predicted from the calibration alone, then measured, then compared.

Predictions are written, with a hash over all of them, before the first measurement starts. A run that was interrupted
goes on where it stopped: what the records file holds already is not measured again.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import msgspec

from magicdec.errors import ConfigError
from magicdec.records import Record, append_record, read_records
from magicdec.specs.speculation import DraftMethod, SamplingSpec, SpeculationSpec
from magicdec.validate.calibrate import obtain_profile
from magicdec.validate.compare import Comparison, Thresholds, pair_up
from magicdec.validate.local_profile import LocalProfile
from magicdec.validate.measurement import benchmark
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
    profile = profile or obtain_profile(grid.model, dtype=grid.dtype, device=grid.device, progress=progress)
    predicted = freeze_predictions(requests, profile, records)
    measured: list[Record] = []
    for number, request in enumerate(requests, 1):

        def show(message: str, prefix: str = f"[{number}/{len(requests)}] ") -> None:
            progress(prefix + message)

        _, rows = benchmark(
            request,
            records=records,
            resume=True,
            bandwidth_bytes_per_s=profile.hardware.memory_bytes_per_s,
            progress=show,
        )
        measured += rows
    comparison = Comparison(pairs=pair_up(predicted, measured), thresholds=Thresholds(**grid.thresholds))
    return GridRun(predicted=predicted, measured=measured, comparison=comparison)


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
