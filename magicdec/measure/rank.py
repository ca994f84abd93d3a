"""What one rank does for `magicdec run`: measures a request, and writes what was asked for beside the records."""

from __future__ import annotations

import sys

from magicdec.measure.configuration import BenchmarkRequest, Outputs
from magicdec.measure.environment import ReferenceKernels
from magicdec.measure.repetitions import benchmark, write_outputs
from magicdec.measure.session import BenchmarkSession
from magicdec.measure.text_stream import TextStream
from magicdec.measure.utilisation import all_ranks_bandwidth_bytes_per_s
from magicdec.records import Record
from magicdec.runtime.distributed import TensorParallel


def measure_request(tp: TensorParallel, request: BenchmarkRequest, outputs: Outputs) -> list[Record]:
    """Measures on this rank's shard. The first rank writes, shows progress, and returns the records."""
    is_one_cpu = request.device == "cpu" and tp.size == 1  # whose bandwidth is measured beside the runs
    is_shown = tp.rank == 0 and not outputs.quiet and sys.stderr.isatty()
    try:
        session, results = benchmark(
            request,
            records=outputs.records,
            resume=outputs.resume,
            bandwidth_bytes_per_s=None if is_one_cpu else all_ranks_bandwidth_bytes_per_s(tp, request.device),
            references=ReferenceKernels() if is_one_cpu else None,
            tp=tp,
            progress=_show if is_shown else _ignore,
        )
        if session is not None and (outputs.save_output is not None or outputs.stream):
            write_outputs(session, outputs.save_output, stream=_stream(session) if outputs.stream else None)
    finally:
        if is_shown:
            sys.stderr.write("\r\x1b[2K")
    return results


def _stream(session: BenchmarkSession) -> TextStream | None:
    """The first sequence's text on stderr, where results do not go."""
    if session.model.tp.rank > 0 or session.tokenizer is None:
        return None

    def write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    return TextStream(session.tokenizer, write)


def _show(message: str) -> None:
    """One line on the terminal that renews itself."""
    sys.stderr.write(f"\r\x1b[2K{message[:78]}")
    sys.stderr.flush()


def _ignore(message: str) -> None:
    """For when nothing is to be shown."""
