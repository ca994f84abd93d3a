"""Makes what `benchmarks/gpu.py` measured on a GPU a name of the catalog: the device, and our engine on it.

    python benchmarks/gpu.py --part calibrate --output gpu-results
    python scripts/ship_gpu_profile.py gpu-results

Read are the profile that the calibration left, facts.json, and the measured decoding runs in records.jsonl where there
are some. Written are `hardware/DEVICE-measured.toml` and `engines/ours-DEVICE.toml`, DEVICE being the catalog's name:

    magicdec plan --hardware DEVICE-measured --engine ours-DEVICE

Ceilings, curves and errors are the calibration's. Where runs were predicted before they were measured, the engine's
errors are at least what those predictions missed by. Date and versions stand in the sources.

Refused, with exit status 2, are measurements of several devices, and those on a CPU or with tiny models (--allow-cpu
takes them, to try this script).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from magicdec.calibrate.local_profile import LocalProfile, load_local_profile
from magicdec.calibrate.machine import device_in_catalog
from magicdec.errors import ConfigError, MagicdecError
from magicdec.perfmodel.kernels.profile import (
    HardwareProfile,
    save_hardware,
)
from magicdec.schema.comparison import pair_records
from magicdec.schema.record import Environment, Record, read_records
from magicdec.specs.device import HARDWARE_DIRECTORY
from magicdec.specs.engine import (
    ENGINES_DIRECTORY,
    EngineProfile,
    load_engine,
    save_engine,
)
from magicdec.specs.engine_tables import EngineTable

CURVES = ("gemm", "attention", "elementwise")
FEWEST_PAIRS = 12
"""Fewer predicted and measured runs say too little of an error."""


class Measured:
    """What one output directory of benchmarks/gpu.py holds of a model.

    Raises ConfigError where something of it is missing, or does not belong together.
    """

    def __init__(self, directory: Path, name: str, *, allow_cpu: bool) -> None:
        path = directory / f"{name}.toml"
        if not path.exists():
            raise ConfigError(
                f"{path} is missing; python benchmarks/gpu.py --part calibrate --output {directory}"
            )
        self.profile: LocalProfile = load_local_profile(path)
        facts = _read_facts(directory / "facts.json", f"calibration {name}")
        self.environment = msgspec.convert(facts["environment"], Environment)
        self.phase_error: dict[str, float] = facts["fit_error"]
        self._check_device(is_tiny=facts["tiny"], allow_cpu=allow_cpu)
        records_path = directory / "records.jsonl"
        records = read_records(records_path) if records_path.exists() else []
        self._check_records(records, records_path)
        self.pairs = pair_records(records)

    @property
    def device(self) -> str:
        """What the driver calls the device, as a name."""
        return self.profile.hardware.name

    @property
    def versions(self) -> str:
        """The day and what it was measured with: 2026-11-21, torch 2.11.0, triton 3.6.0, magicdec 1.2.0, commit ..."""
        environment = self.environment
        names = ("torch", "triton", "magicdec")
        versions = [
            f"{name} {environment.versions[name]}"
            for name in names
            if name in environment.versions
        ]
        commit = [f"commit {environment.commit}"] if environment.commit else []
        return ", ".join([environment.created_utc[:10], *versions, *commit])

    def _check_device(self, *, is_tiny: bool, allow_cpu: bool) -> None:
        if allow_cpu:
            return
        if self.profile.hardware.kind != "gpu":
            raise ConfigError(
                f"{self.device} is no GPU; --allow-cpu takes it all the same"
            )
        if is_tiny:
            raise ConfigError(
                "measured with tiny models, whose times say nothing of a device; measure without --tiny"
            )

    def _check_records(self, records: Sequence[Record], path: Path) -> None:
        own_device = "cuda" if self.profile.hardware.kind == "gpu" else "cpu"
        for record in records:
            other = record.hardware if record.source == "calibrated" else ""
            if other and other != self.device:
                raise ConfigError(
                    f"{path} has predictions for {other}, but the profile is of {self.device}"
                )
            if (
                record.source == "measured"
                and record.device.partition(":")[0] != own_device
            ):
                raise ConfigError(
                    f"{path} has runs on {record.device}, but the profile is of {self.device}"
                )


def _read_facts(path: Path, key: str) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))[key]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (json.JSONDecodeError, KeyError) as error:
        raise ConfigError(f"{path} does not hold '{key}'") from error
    missing = [
        name for name in ("environment", "fit_error", "tiny") if name not in facts
    ]
    if missing:
        raise ConfigError(
            f"{path}: '{key}' does not say {', '.join(missing)}; calibrate again with this release"
        )
    return dict(facts)


def shipped_hardware(
    measured: Measured, known: HardwareProfile | None, name: str
) -> HardwareProfile:
    """The calibrated profile under the catalog's name of the device, with what it was measured with."""
    own = measured.profile.hardware
    how = f"measured by benchmarks/gpu.py, {measured.versions}"
    link = (
        known.sources.get("link", f"the catalog's {known.name}") if known else "assumed"
    )
    sources = {
        "memory_bytes": f"{how}: what the driver tells",
        "memory_bytes_per_s": f"{how}: bytes read and written per second of a copy",
        "flops_per_s": f"{how}: a product of large square matrices",
        "num_multiprocessors": f"{how}: what the driver tells",
        "l2_bytes": f"{how}: what the driver tells",
        "link": link,
        "checked": "not compared with a second source; "
        + (
            f"the datasheet's ceilings are those of {known.name}"
            if known
            else "the catalog has no such device"
        ),
    }
    curves = {}
    for field in CURVES:
        curve = _rounded(getattr(own, field))
        fit = msgspec.structs.replace(
            curve.fit,
            fitted_on=f"micro-benchmarks on {measured.device}, {measured.versions}",
        )
        curves[field] = msgspec.structs.replace(curve, fit=_rounded(fit))
    of_that_machine = {
        field: None for field in own.__struct_fields__ if field.endswith("reference_s")
    }
    return msgspec.structs.replace(
        _rounded(own), name=name, sources=sources, **curves, **of_that_machine
    )


def shipped_engine(
    measured: Measured, *, hardware_name: str, name: str
) -> EngineProfile:
    """Our engine's constants on the device; its errors no less than what predicted runs missed by."""
    own = measured.profile.engine
    errors = ", ".join(
        f"{phase} {error:.1%}"
        for phase, error in measured.phase_error.items()
        if phase not in CURVES
    )
    sources = {
        "constants": f"scripts/ship_gpu_profile.py from benchmarks/gpu.py, {measured.versions}",
        "fit": f"median error of the timed phases: {errors}",
    }
    widened = {}
    for field, term in (
        ("errors.relative_error", "step_s"),
        ("errors.speedup_relative_error", "speedup"),
    ):
        missed = [
            error for pair in measured.pairs if (error := pair.error(term)) is not None
        ]
        if len(missed) >= FEWEST_PAIRS:
            rms = float(np.sqrt(np.mean(np.square(missed))))
            widened[field] = round(max(own.constant(field), rms), 4)
            sources[field] = (
                f"root mean square error {rms:.1%} of {len(missed)} runs that were predicted first"
            )
    return _rounded(own).with_constants(
        {
            "name": name,
            "description": f"The runtime of this package on {measured.device}",
            "fitted_on": f"single engine steps on {measured.device}, {measured.versions}",
            "fitted_device": hardware_name,
            "memory.workspace_bytes": load_engine(
                "ours"
            ).memory.workspace_bytes,  # which calibration does not measure
            "sources": sources,
            **widened,
        }
    )


def _rounded(struct: Any) -> Any:
    """Five significant digits: more would say more than the timings do. Sizes stay."""

    def rounded(value: Any) -> Any:
        if isinstance(value, EngineTable):
            return _rounded(value)
        if isinstance(value, dict):
            return {key: rounded(each) for key, each in value.items()}
        return float(f"{value:.5g}") if type(value) is float else value

    fields = {
        name: getattr(struct, name)
        for name in struct.__struct_fields__
        if not name.endswith("_bytes")
    }
    changes = {
        name: rounded(value)
        for name, value in fields.items()
        if rounded(value) != value
    }
    return msgspec.structs.replace(struct, **changes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "directory", type=Path, help="the --output of benchmarks/gpu.py"
    )
    parser.add_argument(
        "--profile",
        default="llama-3.1-8b",
        help="whose calibration: the name of a TOML file there",
    )
    parser.add_argument("--hardware-directory", type=Path, default=HARDWARE_DIRECTORY)
    parser.add_argument("--engines-directory", type=Path, default=ENGINES_DIRECTORY)
    parser.add_argument(
        "--allow-cpu", action="store_true", help="take what a CPU or tiny models gave"
    )
    options = parser.parse_args()
    try:
        measured = Measured(
            options.directory, options.profile, allow_cpu=options.allow_cpu
        )
        known = device_in_catalog(measured.device)
        device = known.name if known else measured.device
        hardware = shipped_hardware(measured, known, f"{device}-measured")
        engine = shipped_engine(
            measured, hardware_name=hardware.name, name=f"ours-{device}"
        )
        files = (
            options.hardware_directory / f"{hardware.name}.toml",
            options.engines_directory / f"{engine.name}.toml",
        )
        save_hardware(hardware, files[0])
        save_engine(engine, files[1])
    except MagicdecError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    curves = ", ".join(
        f"{name} {getattr(hardware, name).fit.relative_error:.1%}" for name in CURVES
    )
    print(f"{hardware.name}: root mean square error of the kernels' curves: {curves}")
    print(
        f"{engine.name}: error of a step {engine.errors.relative_error:.1%}, "
        f"of a speedup {engine.errors.speedup_relative_error:.1%}"
    )
    print("wrote " + ", ".join(map(str, files)))


if __name__ == "__main__":
    main()
