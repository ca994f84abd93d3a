"""One rank's part of `magicdec run`: measures a request, and writes its other outputs besides the records."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from magicdec.files import write_atomic
from magicdec.measure.configuration import BenchmarkRequest, Outputs
from magicdec.measure.environment import ReferenceKernels
from magicdec.measure.repetitions import benchmark
from magicdec.measure.session import BenchmarkSession
from magicdec.measure.text_stream import TextStream
from magicdec.measure.utilisation import all_ranks_bandwidth_bytes_per_s
from magicdec.progress import shown_progress
from magicdec.records import Record
from magicdec.runtime.distributed import TensorParallel
from magicdec.specs.speculation import AUTOREGRESSIVE


def measure_request(tp: TensorParallel, request: BenchmarkRequest, outputs: Outputs) -> list[Record]:
    """Measures on this rank's shard. The first rank writes, shows progress, and returns the records."""
    is_one_cpu = request.device == "cpu" and tp.size == 1  # whose bandwidth is measured during the runs
    wants_output = outputs.save_output is not None or outputs.stream
    with shown_progress(outputs.quiet or tp.rank > 0) as show:
        session, results = benchmark(
            request,
            records=outputs.records,
            resume=outputs.resume,
            bandwidth_bytes_per_s=None if is_one_cpu else all_ranks_bandwidth_bytes_per_s(tp, request.device),
            references=ReferenceKernels() if is_one_cpu else None,
            tp=tp,
            needs_session=wants_output,
            progress=show,
        )
        if session is not None and wants_output:
            write_outputs(session, outputs.save_output, stream=_stream(session) if outputs.stream else None)
    return results


def write_outputs(session: BenchmarkSession, path: Path | None, *, stream: TextStream | None = None) -> None:
    """Decodes once more to the end, and writes each sequence's prompt and generated tokens and text as JSON lines.

    `stream` shows the text of one sequence as it comes. Of several ranks, all decode and the first writes.
    Raises StorageError when the file cannot be written.
    """
    request = session.request
    speculation = request.speculations[-1] if request.speculations else AUTOREGRESSIVE
    result = session.run(speculation, seed=request.sampling.seed, run_to_end=True, on_step=stream)
    if stream is not None:
        stream.end()
    if path is None or session.model.tp.rank > 0:
        return
    lines = []
    for prompt, tokens in zip(session.prompts, result.tokens, strict=True):
        row: dict[str, Any] = {"prompt_ids": prompt, "generated_ids": tokens}
        if session.tokenizer is not None:
            row["prompt"] = session.tokenizer.decode(prompt)
            row["generated"] = session.tokenizer.decode(tokens)
        lines.append(json.dumps(row) + "\n")
    write_atomic(path, "".join(lines))


def _stream(session: BenchmarkSession) -> TextStream | None:
    """The first sequence's text on stderr, where results do not go."""
    if session.model.tp.rank > 0 or session.tokenizer is None:
        return None

    def write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    return TextStream(session.tokenizer, write)
