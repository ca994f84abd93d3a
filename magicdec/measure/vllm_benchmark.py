"""Repeats and interleaves the configurations of a request in vLLM, and turns what they gave into records.

Beside every speculative run is an autoregressive one. Records hold wall-clock times as those of our own runtime do, and
process CPU time beside them: on a machine that others use too, that is what repeats.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from magicdec.measure.configuration import BenchmarkRequest, configuration_fields
from magicdec.measure.own_process import in_own_process
from magicdec.measure.vllm_session import VllmRun, VllmSession, installed_engine
from magicdec.records import Record, append_record, current_environment, read_records
from magicdec.specs.speculation import AUTOREGRESSIVE, SpeculationSpec

WARM_UP_TOKENS = 12


@dataclass(frozen=True, kw_only=True)
class VllmMeasurement:
    """The runs of one configuration, and the autoregressive run beside each."""

    speculation: SpeculationSpec
    runs: list[VllmRun]
    baselines: list[VllmRun]

    @property
    def speedups(self) -> list[float]:
        """By wall clock, of each repetition."""
        return [r.tokens_per_s / b.tokens_per_s for r, b in zip(self.runs, self.baselines, strict=True)]

    @property
    def cpu_speedups(self) -> list[float]:
        """By process CPU time per token, of each repetition."""
        return [b.cpu_s_per_token / r.cpu_s_per_token for r, b in zip(self.runs, self.baselines, strict=True)]


def measure_in_vllm(session: VllmSession) -> list[VllmMeasurement]:
    """The request's configurations. The first result is autoregressive decoding: all baselines."""
    request = session.request
    speculations = request.speculations
    for speculation in (AUTOREGRESSIVE, *speculations):
        session.run(speculation, gen_len=min(WARM_UP_TOKENS, request.gen_len))
    runs: list[list[VllmRun]] = [[] for _ in speculations]
    baselines: list[list[VllmRun]] = [[] for _ in speculations]
    alone: list[VllmRun] = []
    for repetition in range(request.repetitions):
        seed = request.sampling.seed + repetition
        for i, speculation in enumerate(speculations):
            baselines[i].append(session.run(seed=seed))
            runs[i].append(session.run(speculation, seed=seed))
        if not speculations:
            alone.append(session.run(seed=seed))
    every_baseline = alone or [run for group in baselines for run in group]
    measured = [VllmMeasurement(speculation=AUTOREGRESSIVE, runs=every_baseline, baselines=every_baseline)]
    return measured + [
        VllmMeasurement(speculation=speculation, runs=runs[i], baselines=baselines[i])
        for i, speculation in enumerate(speculations)
    ]


def to_vllm_record(session: VllmSession, measurement: VllmMeasurement) -> Record:
    """Medians over the repetitions, every repetition's speedup beside them."""
    request, speculation = session.request, measurement.speculation
    is_speculative = not speculation.is_autoregressive
    runs, baselines = measurement.runs, measurement.baselines

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    def phases(which: str) -> dict[str, float]:
        found = [getattr(run.times, which) for run in runs]
        return {name: median([each[name] for each in found]) for name in found[0]}

    wall = phases("phases_wall_s")
    counts = sum((run.counts for run in runs[1:]), runs[0].counts)
    speedups, cpu_speedups = measurement.speedups, measurement.cpu_speedups
    tokens_per_s = median([run.tokens_per_s for run in runs])
    is_fixed = is_speculative and not request.adaptive
    return Record(
        source="measured",
        **{**configuration_fields(request, speculation), "engine": session.engine_name},
        autoregressive_step_s=median([run.step_wall_s for run in baselines]),
        draft_step_s=wall["draft"] / speculation.gamma if is_fixed else None,
        verify_step_s=wall["verify"] if is_speculative else None,
        accept_step_s=wall["sample"] if is_speculative else None,
        step_s=median([run.step_wall_s for run in runs]),
        autoregressive_step_samples_s=[run.step_wall_s for run in baselines],
        step_samples_s=[run.step_wall_s for run in runs] if is_speculative else None,
        prefill_s=session.prefill_s,
        breakdown_s=wall,
        expected_tokens_per_step=median([run.num_tokens / (run.num_steps * request.batch_size) for run in runs]),
        **(counts.record_fields() if is_speculative else {}),
        tpot_s=request.batch_size / tokens_per_s,
        tokens_per_s=tokens_per_s,
        autoregressive_tokens_per_s=median([run.tokens_per_s for run in baselines]),
        speedup=median(speedups),
        speedup_low=min(speedups),
        speedup_high=max(speedups),
        speedup_samples=speedups if is_speculative else None,
        repetitions=len(runs),
        autoregressive_step_cpu_s=median([run.step_cpu_s for run in baselines]),
        step_cpu_s=median([run.step_cpu_s for run in runs]),
        breakdown_cpu_s=phases("phases_cpu_s"),
        speedup_cpu=median(cpu_speedups),
        speedup_cpu_samples=cpu_speedups if is_speculative else None,
        environment=current_environment(),
    )


def _measured_records(request: BenchmarkRequest) -> list[Record]:
    session = VllmSession(request)
    return [to_vllm_record(session, each) for each in measure_in_vllm(session)]


def benchmark_in_vllm(
    request: BenchmarkRequest,
    *,
    records: Path | None = None,
    resume: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Record]:
    """Measures a request in vLLM and appends a record per configuration; with `resume`, only what the file lacks."""
    engine = installed_engine()
    configurations = (AUTOREGRESSIVE, *request.speculations)

    def key(speculation: SpeculationSpec) -> str:
        fields = {**configuration_fields(request, speculation), "engine": engine}
        return Record(source="measured", **fields).key

    keys = [key(each) for each in configurations]
    known: dict[str, Record] = {}
    if resume and records is not None and records.exists():
        known = {record.key: record for record in read_records(records) if record.source == "measured"}
    todo = tuple(s for s, k in zip(configurations, keys, strict=True) if k not in known and not s.is_autoregressive)
    if todo or keys[0] not in known:
        progress(f"vLLM: batch {request.batch_size}, context {request.context_len}")
        for record in in_own_process(_measured_records, replace(request, speculations=todo)):
            if records is not None and record.key not in known:
                append_record(records, record)
            known.setdefault(record.key, record)
    return [known[each] for each in keys]
