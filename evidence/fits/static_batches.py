"""Fits a device without timed kernels to published static batches, and rewrites its TOML file.

    python -m evidence.fits.static_batches [FILE.csv]

FILE has the columns of `python -m evidence serving` with the metric output_tokens_per_s_with_prefill, of one device
(by default the MI300X's rows in evidence/data/servers). Products and sums over ranks get four constants; what else
the device does keeps the usual ones. Printed are the errors before, as fitted, and with each model and each prompt
length left out. The profile states the larger error of the models left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from evidence import DATA
from evidence.serving import ServingRow, predict_rows
from magicdec.counts import Array
from magicdec.errors import MagicdecError
from magicdec.fitting import Free, solve
from magicdec.perfmodel.kernels.base import Fit
from magicdec.perfmodel.kernels.gemm import GemmCurve
from magicdec.perfmodel.kernels.links import AllReduceCurve
from magicdec.perfmodel.kernels.profile import (
    HardwareProfile,
    load_hardware,
    save_hardware,
)
from magicdec.specs.device import HARDWARE_DIRECTORY
from magicdec.validate.rows import read_rows

PARAMETERS = {
    "products": Free(prior=0.82, spread=0.3),
    "rate": Free(prior=0.8, spread=0.3),
    "sum_s": Free(prior=6e-6, spread=1.0),
    "links": Free(prior=0.6, spread=0.7),
}
"""Shares of the memory's bandwidth and of the arithmetic's rate that products reach, the fixed time of a sum over
ranks, and the share of the links' bandwidth that it reaches."""
ROW_ERROR = 0.05
ERROR_TO_DEVIATION = 1.25


def with_constants(
    device: HardwareProfile,
    values: dict[str, float],
    *,
    source: str = "",
    rows: int = 0,
    error: float = 0.0,
) -> HardwareProfile:
    """The device with these constants; `error`, mean and relative, is what its curves then state."""
    deviation = ERROR_TO_DEVIATION * error
    fit = Fit(
        fitted_on=source, num_rows=rows, num_parameters=len(PARAMETERS), error=round(error, 4),
        relative_error=round(deviation, 4),
    )  # fmt: skip
    gemm = GemmCurve(
        bandwidth_efficiency=min(values["products"], 1.0), flops_efficiency=min(values["rate"], 1.0), fit=fit,
    )  # fmt: skip
    links = min(values["links"], 1.0)
    sums = AllReduceCurve(
        library="sums over ranks of a server", overhead_s=values["sum_s"], one_shot_efficiency=links,
        two_shot_efficiency=links, fit=fit,
    )  # fmt: skip
    return msgspec.structs.replace(
        device, gemm=gemm, gemm_formats={"fp8": gemm}, allreduce=sums,
    )  # fmt: skip


def log_errors(device: HardwareProfile, rows: Sequence[ServingRow]) -> Array:
    """Logarithms of predicted over measured times."""
    measured = np.array([row.measured for row in rows])
    predicted = predict_rows(rows, devices={device.name: device})
    return np.asarray(np.log(predicted / measured))


def fitted(device: HardwareProfile, rows: Sequence[ServingRow]) -> dict[str, float]:
    def residuals(values: dict[str, float]) -> Array:
        return log_errors(with_constants(device, values), rows) / ROW_ERROR

    return solve(PARAMETERS, residuals).values


def mean_error(log_error: Array) -> float:
    return float(np.mean(np.abs(np.expm1(log_error))))


def main(path: Path) -> None:
    rows, refused = read_rows([path], ServingRow)
    if refused:
        sys.exit("\n".join(refused))
    device = load_hardware(rows[0].hardware)
    bare = msgspec.structs.replace(device, gemm=None, gemm_formats={}, allreduce=None)
    print(f"{device.name}: before {mean_error(log_errors(bare, rows)):.1%}")
    values = fitted(bare, rows)
    of_all = mean_error(log_errors(with_constants(bare, values), rows))
    print(f"fitted {of_all:.1%}: {values}")
    of_models = []
    parts: dict[str, Callable[[ServingRow], Any]] = {
        "model": lambda row: row.model,
        "prompt": lambda row: row.prompt_len,
    }
    for what, key in parts.items():
        for left in sorted({key(row) for row in rows}):
            others = [row for row in rows if key(row) != left]
            own = [row for row in rows if key(row) == left]
            known = with_constants(bare, fitted(bare, others))
            error = mean_error(log_errors(known, own))
            print(f"{what} {left} left out: {error:.1%}")
            if what == "model":
                of_models.append(error)
    rounded = {name: float(f"{value:.3g}") for name, value in values.items()}
    source = f"{len(rows)} static batches: {rows[0].source}"
    shipped = with_constants(
        bare, rounded, source=source, rows=len(rows), error=max(of_models)
    )
    save_hardware(shipped, HARDWARE_DIRECTORY / f"{device.name}.toml")


if __name__ == "__main__":
    try:
        main(
            Path(sys.argv[1])
            if len(sys.argv) > 1
            else DATA / "servers" / "static_mi300x.csv"
        )
    except MagicdecError as error:
        sys.exit(f"error: {error}")
