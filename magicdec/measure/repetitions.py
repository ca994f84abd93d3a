"""Repeats and interleaves the configurations of a benchmark session, and turns what they gave into records.

A speedup is the ratio of throughputs of two runs side by side; a record holds the median over the repetitions, with
every repetition's speedup, and the lowest and highest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from magicdec.counts import Counts
from magicdec.measure.configuration import BenchmarkRequest, check_devices, configuration_fields
from magicdec.measure.environment import ReferenceKernels, ReferenceTimes, median_times
from magicdec.measure.session import BenchmarkSession
from magicdec.measure.utilisation import phase_bytes, planned_memory_bytes
from magicdec.naming import describe
from magicdec.progress import Step
from magicdec.records import BASELINE_MBU_FLOOR, Record, append_record, current_environment, read_records
from magicdec.runtime.distributed import SINGLE, TensorParallel
from magicdec.runtime.generate import DecodeResult
from magicdec.specs.speculation import AUTOREGRESSIVE, SpeculationSpec

WARM_UP_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A run with its own autoregressive run (itself where it is one), and the reference kernels' times."""

    run: DecodeResult
    baseline: DecodeResult
    references: list[ReferenceTimes]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Runs of one configuration so far, each with its autoregressive run."""

    speculation: SpeculationSpec
    runs: list[DecodeResult] = field(default_factory=list)
    fenced: list[DecodeResult] = field(default_factory=list)
    """Runs whose phases were timed apart: on a CPU, where that costs nothing, all of them."""
    baseline_runs: list[DecodeResult] = field(default_factory=list)
    references: list[ReferenceTimes] = field(default_factory=list)
    """The reference kernels' times before, between and after the runs; empty where they were not timed."""

    def add(self, pair: _Pair, *, is_autoregressive: bool, is_fenced: bool) -> None:
        """Adds a repetition; for an autoregressive configuration, the baseline's run."""
        self.runs.append(pair.baseline if is_autoregressive else pair.run)
        self.baseline_runs.append(pair.baseline)
        self.references.extend(pair.references)
        if is_fenced:
            self.fenced.append(self.runs[-1])

    @property
    def num_divergences(self) -> int:
        """Sequences whose tokens differ from those of their autoregressive run, as far as both go. Greedy decoding in
        exact arithmetic has none; rounding decides between logits that are nearly equal."""
        differing = set()
        for run, baseline in zip(self.runs, self.baseline_runs, strict=True):
            pairs = enumerate(zip(run.tokens, baseline.tokens, strict=True))
            differing |= {i for i, (own, other) in pairs if any(a != b for a, b in zip(own, other, strict=False))}
        return len(differing)

    @property
    def tokens_per_s(self) -> list[float]:
        return [run.steady_tokens_per_s for run in self.runs]

    @property
    def speedups(self) -> list[float]:
        """Steady-state speedup of each repetition over its own autoregressive run."""
        pairs = zip(self.runs, self.baseline_runs, strict=True)
        return [run.steady_tokens_per_s / base.steady_tokens_per_s for run, base in pairs]

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of a step: the mean over the steady state's steps but the first, median over runs."""
        means: dict[str, list[float]] = {}
        for run in self.fenced:
            for name, times in run.phases.items():
                steady = times[: run.steady_steps][1:] or times
                if steady:
                    means.setdefault(name, []).append(statistics.fmean(steady))
        return {name: statistics.median(values) for name, values in means.items()}

    @property
    def counts(self) -> Counts:
        """Drafts tried and accepted by each sequence, all repetitions together."""
        return sum((run.counts for run in self.runs[1:]), self.runs[0].counts)

    @property
    def refilled_speedup(self) -> float:
        """Speedup with the batch kept full from a queue, prefilling the queued prompts included."""
        pairs = zip(self.runs, self.baseline_runs, strict=True)
        return statistics.median(run.refilled_tokens_per_s / base.refilled_tokens_per_s for run, base in pairs)

    @property
    def static_batch_speedup(self) -> float:
        """Speedup when every sequence of a full batch must reach its end (of runs that went to the end)."""
        pairs = zip(self.runs, self.baseline_runs, strict=True)
        return statistics.median(base.elapsed_s / run.elapsed_s for run, base in pairs)


def measure(
    session: BenchmarkSession,
    *,
    speculations: Sequence[SpeculationSpec] | None = None,
    references: ReferenceKernels | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Measurement]:
    """Measures the request's configurations (or the given ones), and yields each as soon as it is complete: during the
    last repetition, and last of all autoregressive decoding, whose runs are interleaved with all others.

    Each speculative run has an autoregressive run of its own just before it: the speed of memory on a shared machine
    changes within seconds, and hits autoregressive decoding harder. The reference kernels, where given, are timed
    before, between and after the two.
    """
    request = session.request
    chosen = tuple(request.speculations if speculations is None else speculations)
    is_fenced = request.device == "cpu" and request.num_prompts is None  # refilling is no phase of a step
    found = {each: Measurement(speculation=each) for each in (AUTOREGRESSIVE, *chosen)}
    for speculation, measurement in found.items():
        progress(f"warming up {describe(speculation)}")
        session.run(speculation, gen_len=min(WARM_UP_TOKENS, request.gen_len), use_queue=False)
        if not is_fenced:
            seed = request.sampling.seed
            run = session.run(speculation, seed=seed, fences=True, run_to_end=False, use_queue=False)
            measurement.fenced.append(run)
    alone = found[AUTOREGRESSIVE]
    for repetition in range(request.repetitions):
        for number, speculation in enumerate(measured := chosen or (AUTOREGRESSIVE,)):
            message = f"repetition {repetition + 1}/{request.repetitions}: {describe(speculation)}"
            done, total = repetition * len(measured) + number, request.repetitions * len(measured)
            progress(Step(message, done=done, total=total))
            pair = _run_pair(session, speculation, repetition, references, fences=is_fenced)
            for measurement in (found[speculation], alone) if chosen else (alone,):
                measurement.add(pair, is_autoregressive=measurement is alone, is_fenced=is_fenced)
            if chosen and repetition == request.repetitions - 1:
                yield found[speculation]
    yield alone


def _run_pair(
    session: BenchmarkSession,
    speculation: SpeculationSpec,
    repetition: int,
    references: ReferenceKernels | None,
    *,
    fences: bool,
) -> _Pair:
    seed, times = session.request.sampling.seed + repetition, []
    runs = []
    for each in dict.fromkeys((AUTOREGRESSIVE, speculation)):
        if references is not None:
            times.append(references.times())
        runs.append(session.run(each, seed=seed, fences=fences))
    if references is not None:
        times.append(references.times())
    return _Pair(run=runs[-1], baseline=runs[0], references=times)


def to_record(
    session: BenchmarkSession,
    measurement: Measurement,
    *,
    bandwidth_bytes_per_s: float | None = None,
) -> Record:
    """The measured row of one configuration: medians over the repetitions, with every repetition's speedup."""
    request, speculation = session.request, measurement.speculation
    times = _step_times(session, measurement)
    speed = median_times(measurement.references) if measurement.references else None
    if speed is not None and request.device == "cpu":
        bandwidth_bytes_per_s = speed.memory_bytes_per_s  # during these runs: it changes within seconds
    return Record(
        source="measured",
        **configuration_fields(request, speculation),
        **times,
        **_accepted(request, measurement),
        **_throughput(request, measurement),
        repetitions=len(measurement.runs),
        reference_s=speed.memory_s if speed else None,
        compute_reference_s=speed.compute_s if speed else None,
        **_memory_use(
            session, measurement, times["autoregressive_step_s"], times["step_s"], bandwidth_bytes_per_s
        ),
        memory_bytes_per_gpu=planned_memory_bytes(request),
        peak_memory_bytes=session.memory.peak_bytes(),
        environment=current_environment(),
    )  # fmt: skip


def _step_times(session: BenchmarkSession, measurement: Measurement) -> dict[str, Any]:
    """Seconds of a steady step, whole and by phase. A draft step has a time of its own only while gamma is fixed."""
    speculation, phases = measurement.speculation, measurement.phases
    speculative = not speculation.is_autoregressive
    is_fixed = speculative and not session.request.adaptive
    baseline_steps_s, steps_s = (
        [run.steady_decode_s / run.steady_steps for run in runs]
        for runs in (measurement.baseline_runs, measurement.runs)
    )
    baseline_step_s = statistics.median(baseline_steps_s)
    return {
        "autoregressive_step_s": baseline_step_s,
        "draft_step_s": phases["draft"] / speculation.gamma if "draft" in phases and is_fixed else None,
        "verify_step_s": phases.get("verify") if speculative else None,
        "accept_step_s": phases.get("accept"),
        "step_s": statistics.median(steps_s),
        "autoregressive_step_samples_s": baseline_steps_s,
        "step_samples_s": steps_s if speculative else None,
        "prefill_s": session.prefill_s,
        "ttft_s": session.prefill_s + baseline_step_s,
        "breakdown_s": phases,
    }


def _accepted(request: BenchmarkRequest, measurement: Measurement) -> dict[str, Any]:
    """Accepted lengths, rates by position, and, where both outputs must be equal, how many differ."""
    speculative, counts = not measurement.speculation.is_autoregressive, measurement.counts
    is_comparable = speculative and request.sampling.is_greedy and request.simulate_acceptance is None
    return {
        "expected_tokens_per_step": counts.tokens_per_step,
        **(counts.record_fields() if speculative else {}),
        "num_divergences": measurement.num_divergences if is_comparable else None,
    }


def _throughput(request: BenchmarkRequest, measurement: Measurement) -> dict[str, Any]:
    """Tokens per second and speedups: in steady state, to the end of a static batch, and with refilled slots."""
    speculative = not measurement.speculation.is_autoregressive
    is_refilled = request.num_prompts is not None
    tokens_per_s, speedups = statistics.median(measurement.tokens_per_s), measurement.speedups
    return {
        "tpot_s": request.batch_size / tokens_per_s,
        "tokens_per_s": tokens_per_s,
        "autoregressive_tokens_per_s": statistics.median(run.steady_tokens_per_s for run in measurement.baseline_runs),
        "speedup": statistics.median(speedups) if speculative else 1.0,
        "speedup_low": min(speedups) if speculative else 1.0,
        "speedup_high": max(speedups) if speculative else 1.0,
        "speedup_samples": speedups if speculative else None,
        "static_batch_tokens_per_s": (
            statistics.median(run.num_tokens / run.elapsed_s for run in measurement.runs)
            if request.run_to_end
            else None
        ),
        "speedup_static_batch": measurement.static_batch_speedup if speculative and request.run_to_end else None,
        "refilled_tokens_per_s": (
            statistics.median(run.refilled_tokens_per_s for run in measurement.runs) if is_refilled else None
        ),
        "speedup_refilled": measurement.refilled_speedup if is_refilled else None,
    }


def _memory_use(
    session: BenchmarkSession, measurement: Measurement, baseline_step_s: float, step_s: float, bandwidth: float | None
) -> dict[str, Any]:
    """A record's fields on memory bandwidth, and the note that marks a speedup over a slow baseline."""
    speculation, lengths = measurement.speculation, [len(prompt) for prompt in session.prompts]
    needed = phase_bytes(session.request, lengths, speculation)
    achieved = {"autoregressive": needed.pop("autoregressive") / baseline_step_s}
    if not speculation.is_autoregressive and not session.request.adaptive:
        times_s = measurement.phases
        achieved |= {phase: needed[phase] / times_s[phase] for phase in needed if times_s.get(phase)}
        achieved["step"] = sum(needed.values()) / step_s
    fields: dict[str, Any] = {"achieved_bytes_per_s": achieved, "memory_bytes_per_s": bandwidth}
    if bandwidth is None:
        return fields
    baseline_mbu = achieved["autoregressive"] / bandwidth
    if baseline_mbu < BASELINE_MBU_FLOOR and not speculation.is_autoregressive:
        fields["notes"] = [f"the speedup is over a baseline at {baseline_mbu:.0%} MBU, below {BASELINE_MBU_FLOOR:.0%}"]
    mbu = achieved.get("step", None if session.request.adaptive else achieved["autoregressive"])
    return {**fields, "mbu": mbu / bandwidth if mbu is not None else None, "autoregressive_mbu": baseline_mbu}


def benchmark(
    request: BenchmarkRequest,
    *,
    records: Path | None = None,
    resume: bool = False,
    bandwidth_bytes_per_s: float | None = None,
    references: ReferenceKernels | None = None,
    tp: TensorParallel = SINGLE,
    needs_session: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[BenchmarkSession | None, list[Record]]:
    """Measures a request and appends each configuration's record as soon as it is complete.

    With `resume`, configurations that the records file holds already, from as many repetitions at least, are taken from
    it; when it holds all of them nothing is loaded and the session is None, unless `needs_session` for what is decoded
    besides: the request's last configuration. Of several ranks, the first reads and writes the file for all.
    """
    check_devices(request)
    known: dict[str, Record] = {}
    if tp.rank > 0:
        records = None
    if resume and records is not None and records.exists():
        known = known_records(records, request.repetitions)
    configurations = (AUTOREGRESSIVE, *request.speculations)
    keys = [configuration_key(request, speculation) for speculation in configurations]
    flags = tp.broadcast(torch.tensor([key in known for key in keys], dtype=torch.long, device=request.device))
    is_known = dict(zip(configurations, flags.tolist(), strict=True))
    is_done = all(is_known.values())
    if is_done and not needs_session:
        return None, [known[key] for key in keys if key in known]
    todo = tuple(each for each in request.speculations if not is_known[each])
    kept = todo + tuple(each for each in request.speculations[-1:] if needs_session and each not in todo)
    session = BenchmarkSession(replace(request, speculations=kept), tp=tp, progress=progress)
    measurements = () if is_done else measure(session, speculations=todo, references=references, progress=progress)
    for measurement in measurements:
        record = to_record(session, measurement, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
        if record.key not in known:
            known[record.key] = record
            if records is not None:
                append_record(records, record)
    return session, [known[key] for key in keys if key in known]


def known_records(path: Path, repetitions: int = 1) -> dict[str, Record]:
    """The measured records of a file by their configuration's key, of so many repetitions at least."""
    found = (record for record in read_records(path) if record.source == "measured")
    return {record.key: record for record in found if (record.repetitions or 0) >= repetitions}


def configuration_key(request: BenchmarkRequest, speculation: SpeculationSpec) -> str:
    return Record(source="measured", **configuration_fields(request, speculation)).key
