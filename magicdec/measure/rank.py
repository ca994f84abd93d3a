"""One rank's part of `magicdec run`: measures the configurations that a request's records file
lacks, and writes the other outputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch

from magicdec.files import write_atomic
from magicdec.measure.configuration import (
    BenchmarkRequest,
    Outputs,
    check_devices,
    configuration_fields,
)
from magicdec.measure.engines import in_own_process, session_class
from magicdec.measure.environment import ReferenceKernels
from magicdec.measure.repetitions import Session, measure
from magicdec.measure.session import BenchmarkSession
from magicdec.measure.utilisation import all_ranks_bandwidth_bytes_per_s
from magicdec.progress import Stages, shown_progress
from magicdec.runtime.distributed import SINGLE, TensorParallel
from magicdec.schema.record import (
    UNFINISHED,
    Record,
    append_record,
    read_records,
    read_rows,
    unfinished,
)
from magicdec.specs.speculation import AUTOREGRESSIVE, SpeculationSpec

Begun = Mapping[SpeculationSpec, Sequence[Record]]
"""Rows of the repetitions that an earlier run finished."""
Keys = Mapping[str, SpeculationSpec]
"""A request's configurations by their keys in a records file."""
BeforeGroup = Callable[[Sequence[SpeculationSpec]], object]
GROUP_SIZE = 10
"""Configurations that are interleaved with each other, and recorded together: the more, the farther
apart in time are the repetitions of one; the fewer, the less is lost when a run is cut off."""


def measure_request(
    tp: TensorParallel, request: BenchmarkRequest, outputs: Outputs
) -> list[Record]:
    """Measures on this rank's shard. The first rank writes, shows progress, and returns the
    records.
    """
    with shown_progress(outputs.quiet or tp.rank > 0) as show:
        bandwidth_bytes_per_s = None
        references = None
        if request.engine == "ours":
            if request.device == "cpu" and tp.size == 1:
                # measures the bandwidth during the runs
                references = ReferenceKernels()
            else:
                bandwidth_bytes_per_s = all_ranks_bandwidth_bytes_per_s(
                    tp, request.device
                )
        return benchmark(
            request,
            records=outputs.records,
            resume=outputs.resume,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            references=references,
            tp=tp,
            save_output=outputs.save_output,
            progress=show,
        )


def benchmark(
    request: BenchmarkRequest,
    *,
    records: Path | None = None,
    resume: bool = False,
    bandwidth_bytes_per_s: float | None = None,
    references: ReferenceKernels | None = None,
    tp: TensorParallel = SINGLE,
    save_output: Path | None = None,
    before_group: BeforeGroup = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Record]:
    """Measures a request and appends each configuration's record as soon as it is complete.

    With `resume`, configurations that the records file holds already, from as many repetitions at
    least, are taken from it; when it holds all of them nothing is loaded, but for `save_output`:
    the text of the request's last configuration. Of several ranks, the first reads and
    writes the file for all. vLLM has a process of its own. `before_group`: called with the
    configurations that are measured next, interleaved, when all of them are warm (our runtime).
    """
    check_devices(request)
    if tp.rank > 0:
        records = None
    known: dict[str, Record] = {}
    rows: dict[str, list[Record]] = {}
    if resume and records is not None and records.exists():
        known = known_records(records, request.repetitions)
        rows = unfinished(read_rows(records))
    keys = {}
    for speculation in (AUTOREGRESSIVE, *request.speculations):
        keys[configuration_key(request, speculation)] = speculation
    lacking = _lacking(request, keys, known, tp)
    begun = _begun(request, keys, rows, tp)
    todo = tuple(filter(lacking.__contains__, request.speculations))
    if request.engine == "vllm" and lacking:
        progress(f"vLLM: batch {request.batch_size}, context {request.context_len}")
        remaining = replace(request, speculations=todo)
        measured = in_own_process(_measure_in_vllm, remaining, known, records, begun)
        known = measured | known
    elif lacking or save_output is not None:
        loaded = todo
        last = request.speculations[-1:]
        # its text is wanted, whether or not its record is there
        if save_output is not None and not set(last) <= set(todo):
            loaded = todo + last
        session = BenchmarkSession(
            replace(request, speculations=loaded), tp=tp, progress=progress
        )
        if lacking:
            _measure_groups(
                session,
                todo,
                known,
                records,
                begun=begun,
                bandwidth_bytes_per_s=bandwidth_bytes_per_s,
                references=references,
                before_group=before_group,
                progress=progress,
            )
        if save_output is not None:
            write_outputs(session, save_output)
    return [known[key] for key in keys if key in known]


def _lacking(
    request: BenchmarkRequest,
    keys: Keys,
    known: Mapping[str, Record],
    tp: TensorParallel,
) -> set[SpeculationSpec]:
    """The configurations without a record, by what the first rank has read."""
    is_known = torch.tensor(
        [key in known for key in keys], dtype=torch.long, device=request.device
    )
    lacking = set()
    for speculation, is_there in zip(
        keys.values(), tp.broadcast(is_known).tolist(), strict=True
    ):
        if not is_there:
            lacking.add(speculation)
    return lacking


def _begun(
    request: BenchmarkRequest,
    keys: Keys,
    rows: Mapping[str, list[Record]],
    tp: TensorParallel,
) -> Begun:
    """Rows of finished repetitions, by what the first rank has read. The other ranks get as many
    empty rows, which none of them reads."""
    lengths = [len(rows.get(key, ())) for key in keys]
    counts = torch.tensor(lengths, dtype=torch.long, device=request.device)
    empty = Record(source="measured", model="", batch_size=0, context_len=0)
    begun = {}
    for (key, speculation), count in zip(
        keys.items(), tp.broadcast(counts).tolist(), strict=True
    ):
        if count:
            begun[speculation] = rows.get(key, [empty] * count)
    return begun


def _measure_in_vllm(
    request: BenchmarkRequest,
    known: dict[str, Record],
    records: Path | None,
    begun: Begun,
) -> dict[str, Record]:
    session = session_class(request.engine)(request)
    _measure_groups(session, request.speculations, known, records, begun=begun)
    return known


def _measure_groups(
    session: Session,
    todo: Sequence[SpeculationSpec],
    known: dict[str, Record],
    records: Path | None,
    *,
    begun: Begun,
    bandwidth_bytes_per_s: float | None = None,
    references: ReferenceKernels | None = None,
    before_group: BeforeGroup = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Adds the records of what is to do, and autoregressive decoding's, to those known, and to the
    file: a row of each run, and the record of each configuration that is complete."""

    def write(record: Record) -> None:
        if records is not None and record.key not in known:
            append_record(records, record)

    num_groups = max(1, ceil(len(todo) / GROUP_SIZE))
    stages = Stages(progress, [1.0] * num_groups)
    for number in range(num_groups):
        group = todo[number::num_groups]
        show = stages.stage(number)
        measured = measure(
            session,
            speculations=group,
            references=references,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            begun=begun,
            write=write,
            ready=partial(before_group, group),
            progress=show,
        )
        for record in measured:
            write(record)
            known.setdefault(record.key, record)


def known_records(path: Path, repetitions: int = 1) -> dict[str, Record]:
    """The complete measured records of a file by their configuration's key, of at least
    `repetitions` repetitions.
    """
    known = {}
    for record in read_records(path):
        is_complete = record.source == "measured" and UNFINISHED not in record.notes
        if is_complete and (record.repetitions or 0) >= repetitions:
            known[record.key] = record
    return known


def configuration_key(request: BenchmarkRequest, speculation: SpeculationSpec) -> str:
    return Record(source="measured", **configuration_fields(request, speculation)).key


def write_outputs(session: BenchmarkSession, path: Path) -> None:
    """Decodes once more to the end, and writes each sequence's prompt and generated tokens and text
    as JSON lines. Of several ranks, all decode and the first writes.

    Raises StorageError when the file cannot be written.
    """
    request = session.request
    speculation = AUTOREGRESSIVE
    if request.speculations:
        speculation = request.speculations[-1]
    result = session.run(speculation, seed=request.sampling.seed, run_to_end=True)
    if session.model.tp.rank > 0:
        return
    lines = []
    for prompt, tokens in zip(session.prompts, result.tokens, strict=True):
        row: dict[str, Any] = {"prompt_ids": prompt, "generated_ids": tokens}
        if session.tokenizer is not None:
            row["prompt"] = session.tokenizer.decode(prompt)
            row["generated"] = session.tokenizer.decode(tokens)
        lines.append(json.dumps(row) + "\n")
    write_atomic(path, "".join(lines))
