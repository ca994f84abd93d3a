"""What one rank does for `magicdec run`: measures a request, and writes what was asked for beside the records."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from magicdec.records import Record
from magicdec.runtime.distributed import TensorParallel
from magicdec.validate.measurement import benchmark, write_outputs
from magicdec.validate.request import BenchmarkRequest


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where results go beside the terminal."""

    records: Path | None = None
    resume: bool = False
    save_output: Path | None = None
    quiet: bool = False


def measure_request(tp: TensorParallel, request: BenchmarkRequest, outputs: Outputs) -> list[Record]:
    """Measures on this rank's shard. The first rank writes, shows progress, and returns the records."""
    is_shown = tp.rank == 0 and not outputs.quiet and sys.stderr.isatty()
    try:
        session, results = benchmark(
            request, records=outputs.records, resume=outputs.resume, tp=tp, progress=_show if is_shown else _ignore
        )
        if outputs.save_output is not None and session is not None:
            write_outputs(session, outputs.save_output)
    finally:
        if is_shown:
            sys.stderr.write("\r\x1b[2K")
    return results


def _show(message: str) -> None:
    """One line on the terminal that renews itself."""
    sys.stderr.write(f"\r\x1b[2K{message[:78]}")
    sys.stderr.flush()


def _ignore(message: str) -> None:
    """For when nothing is to be shown."""
