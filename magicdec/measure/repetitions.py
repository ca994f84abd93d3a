"""Repeats and interleaves the configurations of a session, ours or vLLM's, and turns the results
into records.

A speedup is the ratio of throughputs of two runs side by side; a record holds the median over the
repetitions, with every repetition's speedup, and the lowest and highest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from magicdec.measure.configuration import NOISE, BenchmarkRequest, configuration_fields
from magicdec.measure.environment import ReferenceKernels, ReferenceTimes, median_times
from magicdec.naming import describe
from magicdec.progress import StepMessage
from magicdec.runtime.prompts import PromptRequest, load_prompts, load_tokenizer
from magicdec.schema.record import Record, current_environment, summary
from magicdec.specs.catalog import checkpoint_directory, load_model_spec
from magicdec.specs.speculation import AUTOREGRESSIVE, SpeculationSpec


class Session(Protocol):
    """A started runtime with a request's prompts prefilled, which decodes its configurations again
    and again. A run has `steady_step_s`, `steady_tokens_per_s`, `counts` by sequence, and
    `phases_s`, mean seconds of each phase of a step, empty where they were not timed apart."""

    request: BenchmarkRequest
    prefill_s: float

    def warm_up(self, speculation: SpeculationSpec) -> Any | None:
        """Decodes a few tokens; returns a run whose phases are timed apart where measured runs' are
        not.
        """

    def run(self, speculation: SpeculationSpec, *, seed: int | None = None) -> Any:
        """Decodes from the prefilled prompts."""

    def record_fields(
        self, measurement: PairedRun, *, bandwidth_bytes_per_s: float | None
    ) -> dict[str, Any]:
        """A record's fields that this runtime alone can fill."""


def prompts_of(request: BenchmarkRequest) -> tuple[Tokenizer | None, list[list[int]]]:
    """The model's tokenizer, where prompts are text, and the prompts: a batch of them, or all of a
    queue.
    """
    checkpoint = checkpoint_directory(request.model)
    vocab_size = load_model_spec(request.model).vocab_size
    if request.prompts == NOISE:
        return None, [[0] * request.context_len] * request.batch_size
    tokenizer = None
    if checkpoint is not None and request.prompts != "random":
        tokenizer = load_tokenizer(checkpoint, vocab_size=vocab_size)
    wanted = PromptRequest(
        source=request.prompts,
        count=request.num_prompts or request.batch_size,
        context_len=request.context_len,
        context_spread=request.context_spread,
        seed=request.sampling.seed,
        calibration=request.calibration_prompts,
    )
    prompts = load_prompts(wanted, tokenizer=tokenizer, vocab_size=vocab_size)
    if request.num_prompts is None:
        return tokenizer, prompts
    order = np.random.default_rng(request.sampling.seed).permutation(len(prompts))
    return tokenizer, [
        prompts[i] for i in order
    ]  # lengths come sorted; a queue's are mixed


@dataclass(frozen=True, kw_only=True)
class PairedRun:
    """One run of a configuration with its autoregressive run (itself where it is one)."""

    speculation: SpeculationSpec
    run: Any
    baseline: Any
    warm_up: Any = None
    """A run only for its phases, where the others do not time them."""
    references: list[ReferenceTimes] = field(default_factory=list)
    """The reference kernels' times before, between and after the runs; empty where they were not
    timed.
    """

    @property
    def speedup(self) -> float:
        return float(self.run.steady_tokens_per_s / self.baseline.steady_tokens_per_s)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of a step."""
        timed = []
        for run in (self.warm_up, self.run):
            if run is not None and run.phases_s:
                timed.append(run.phases_s)
        if not timed:
            return {}
        phases = {}
        for name in timed[0]:
            phases[name] = statistics.median(
                times[name] for times in timed if name in times
            )
        return phases


def measure(
    session: Session,
    *,
    speculations: Sequence[SpeculationSpec] | None = None,
    references: ReferenceKernels | None = None,
    bandwidth_bytes_per_s: float | None = None,
    begun: Mapping[SpeculationSpec, Sequence[Record]] = MappingProxyType({}),
    write: Callable[[Record], object] = lambda _: None,
    ready: Callable[[], object] = lambda: None,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Record]:
    """Measures the request's configurations (or the given ones), and yields the record of each as
    soon as it is
    complete: during the last repetition, and last of all autoregressive decoding, whose runs are
        interleaved with all others. `write` is given a row of each run when it ends; repetitions
        whose rows have `begun` are not run again. `ready` is called when all are warm, just before
        the first run that is measured.

    Each speculative run has an autoregressive run of its own just before it: the speed of memory on
    a shared machine changes within seconds, and hits autoregressive decoding harder. The reference
    kernels, where given, are timed before, between and after the two.
    """
    request = session.request
    if speculations is None:
        speculations = request.speculations
    chosen = tuple(speculations)
    warm: dict[SpeculationSpec, Any] = {}
    rows: dict[SpeculationSpec, list[Record]] = {}
    for speculation in (AUTOREGRESSIVE, *chosen):
        progress(f"warming up {describe(speculation)}")
        warm[speculation] = session.warm_up(speculation)
        rows[speculation] = list(begun.get(speculation, ()))
    measured = chosen or (AUTOREGRESSIVE,)
    ready()
    for repetition in range(request.repetitions):
        for number, speculation in enumerate(measured):
            if len(rows[speculation]) <= repetition:
                place = f"{repetition + 1}/{request.repetitions}"
                message = f"repetition {place}: {describe(speculation)}"
                done = repetition * len(measured) + number
                total = request.repetitions * len(measured)
                progress(StepMessage(message, done=done, total=total))
                seed = request.sampling.seed + repetition
                for run in _runs(session, speculation, warm, references, seed=seed):
                    own = rows[run.speculation]
                    own.append(_row(session, run, len(own), bandwidth_bytes_per_s))
                    write(own[-1])
            if chosen and repetition == request.repetitions - 1:
                yield summary(rows[speculation])
    yield summary(rows[AUTOREGRESSIVE])


def _runs(
    session: Session,
    speculation: SpeculationSpec,
    warm: Mapping[SpeculationSpec, Any],
    references: ReferenceKernels | None,
    *,
    seed: int,
) -> list[PairedRun]:
    """A run of a configuration, and the autoregressive one just before it."""
    times: list[ReferenceTimes] = []
    runs: dict[SpeculationSpec, Any] = {}
    for one in dict.fromkeys((AUTOREGRESSIVE, speculation)):
        if references is not None:
            times.append(references.times())
        runs[one] = session.run(one, seed=seed)
    if references is not None:
        times.append(references.times())
    measurements = []
    for one, run in reversed(runs.items()):
        measurement = PairedRun(
            speculation=one,
            run=run,
            baseline=runs[AUTOREGRESSIVE],
            warm_up=warm[one],
            references=times,
        )
        measurements.append(measurement)
    return measurements


def _row(
    session: Session,
    measurement: PairedRun,
    number: int,
    bandwidth_bytes_per_s: float | None,
) -> Record:
    """The measured row of one run of a configuration."""
    request = session.request
    run = measurement.run
    baseline = measurement.baseline
    phases = measurement.phases
    fields: dict[str, Any] = {
        **configuration_fields(request, measurement.speculation),
        "autoregressive_step_s": baseline.steady_step_s,
        "draft_step_s": None,
        "verify_step_s": None,
        "accept_step_s": phases.get("accept"),
        "step_s": run.steady_step_s,
        "autoregressive_step_samples_s": [baseline.steady_step_s],
        "prefill_s": session.prefill_s,
        "breakdown_s": phases,
        "expected_tokens_per_step": run.counts.tokens_per_step,
        "tpot_s": request.batch_size / run.steady_tokens_per_s,
        "tokens_per_s": run.steady_tokens_per_s,
        "autoregressive_tokens_per_s": baseline.steady_tokens_per_s,
        "speedup": measurement.speedup,
        "repetitions": 1,
        "repetition": number,
    }
    if not measurement.speculation.is_autoregressive:
        fields |= {
            "verify_step_s": phases.get("verify"),
            "step_samples_s": [run.steady_step_s],
            "speedup_samples": [measurement.speedup],
            "sequence_counts": run.counts.to_lists(),
        }
        # a draft step has a time of its own where every step drafts as many tokens
        if "draft" in phases and request.gamma_table is None:
            fields["draft_step_s"] = phases["draft"] / measurement.speculation.gamma
    if measurement.references:
        speed = median_times(measurement.references)
        fields["reference_s"] = speed.memory_s
        fields["compute_reference_s"] = speed.compute_s
        fields["reference_swing"] = max(
            max(times) / min(times) - 1.0
            for times in zip(*measurement.references, strict=True)
        )
        if request.device == "cpu":
            # during these runs: it changes within seconds
            bandwidth_bytes_per_s = speed.memory_bytes_per_s
    fields |= session.record_fields(
        measurement, bandwidth_bytes_per_s=bandwidth_bytes_per_s
    )
    return Record(source="measured", **fields, environment=current_environment())
