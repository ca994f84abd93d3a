"""Repeats and interleaves the configurations of a session, ours or vLLM's, and turns what they gave into records.

A speedup is the ratio of throughputs of two runs side by side; a record holds the median over the repetitions, with
every repetition's speedup, and the lowest and highest.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from tokenizers import Tokenizer

from magicdec.counts import Counts
from magicdec.measure.configuration import NOISE, BenchmarkRequest, configuration_fields
from magicdec.measure.environment import ReferenceKernels, ReferenceTimes, median_times
from magicdec.naming import describe
from magicdec.progress import Step
from magicdec.records import Record, current_environment
from magicdec.runtime.prompts import PromptRequest, load_prompts, load_tokenizer
from magicdec.specs.catalog import checkpoint_directory, load_model_spec
from magicdec.specs.speculation import AUTOREGRESSIVE, SpeculationSpec


class Run(Protocol):
    """A decoding run's steady state: all sequences decode."""

    @property
    def steady_tokens_per_s(self) -> float: ...

    @property
    def steady_step_s(self) -> float: ...

    @property
    def counts(self) -> Counts:
        """Drafts tried and accepted by each sequence."""

    @property
    def phases_s(self) -> dict[str, float]:
        """Mean seconds of each phase of a step; empty where they were not timed apart."""


R = TypeVar("R", bound=Run)


class Session(Protocol[R]):
    """A started runtime with a request's prompts prefilled, which decodes its configurations again and again."""

    request: BenchmarkRequest
    prefill_s: float

    def warm_up(self, speculation: SpeculationSpec) -> R | None:
        """Decodes a few tokens; returns a run whose phases are timed apart where measured runs' are not."""

    def run(self, speculation: SpeculationSpec, *, seed: int | None = None) -> R:
        """Decodes from the prefilled prompts."""

    def record_fields(self, measurement: Measurement[R], *, bandwidth_bytes_per_s: float | None) -> dict[str, Any]:
        """A record's fields that this runtime alone can fill."""


def prompts_of(request: BenchmarkRequest) -> tuple[Tokenizer | None, list[list[int]]]:
    """The model's tokenizer, where prompts are text, and the prompts: a batch of them, or all of a queue."""
    checkpoint, vocab_size = checkpoint_directory(request.model), load_model_spec(request.model).vocab_size
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
    return tokenizer, [prompts[i] for i in order]  # lengths come sorted; a queue's are mixed


@dataclass(frozen=True, kw_only=True)
class Measurement(Generic[R]):
    """Runs of one configuration so far, each with its autoregressive run (itself where it is one)."""

    speculation: SpeculationSpec
    warm_up: R | None = None
    """A run only for its phases, where the others do not time them."""
    runs: list[R] = field(default_factory=list)
    baseline_runs: list[R] = field(default_factory=list)
    references: list[ReferenceTimes] = field(default_factory=list)
    """The reference kernels' times before, between and after the runs; empty where they were not timed."""

    @property
    def speedups(self) -> list[float]:
        """Steady-state speedup of each repetition over its own autoregressive run."""
        pairs = zip(self.runs, self.baseline_runs, strict=True)
        return [run.steady_tokens_per_s / base.steady_tokens_per_s for run, base in pairs]

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of a step, median over the runs that timed them."""
        found: dict[str, list[float]] = defaultdict(list)
        for run in (self.warm_up, *self.runs):
            for name, seconds in run.phases_s.items() if run is not None else ():
                found[name].append(seconds)
        return {name: statistics.median(values) for name, values in found.items()}

    @property
    def counts(self) -> Counts:
        """Drafts tried and accepted by each sequence, all repetitions together."""
        return sum((run.counts for run in self.runs[1:]), self.runs[0].counts)


def measure(
    session: Session[R],
    *,
    speculations: Sequence[SpeculationSpec] | None = None,
    references: ReferenceKernels | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Measurement[R]]:
    """Measures the request's configurations (or the given ones), and yields each as soon as it is complete: during the
    last repetition, and last of all autoregressive decoding, whose runs are interleaved with all others.

    Each speculative run has an autoregressive run of its own just before it: the speed of memory on a shared machine
    changes within seconds, and hits autoregressive decoding harder. The reference kernels, where given, are timed
    before, between and after the two.
    """
    request = session.request
    chosen = tuple(request.speculations if speculations is None else speculations)
    found: dict[SpeculationSpec, Measurement[R]] = {}
    for speculation in (AUTOREGRESSIVE, *chosen):
        progress(f"warming up {describe(speculation)}")
        found[speculation] = Measurement(speculation=speculation, warm_up=session.warm_up(speculation))
    alone = found[AUTOREGRESSIVE]
    measured = chosen or (AUTOREGRESSIVE,)
    for repetition in range(request.repetitions):
        for number, speculation in enumerate(measured):
            message = f"repetition {repetition + 1}/{request.repetitions}: {describe(speculation)}"
            done, total = repetition * len(measured) + number, request.repetitions * len(measured)
            progress(Step(message, done=done, total=total))
            times, runs = [], []
            for each in dict.fromkeys((AUTOREGRESSIVE, speculation)):
                times += [references.times()] if references is not None else []
                runs.append(session.run(each, seed=request.sampling.seed + repetition))
            times += [references.times()] if references is not None else []
            for measurement in dict.fromkeys((speculation, AUTOREGRESSIVE)):
                found[measurement].runs.append(runs[0] if measurement.is_autoregressive else runs[-1])
                found[measurement].baseline_runs.append(runs[0])
                found[measurement].references.extend(times)
            if chosen and repetition == request.repetitions - 1:
                yield found[speculation]
    yield alone


def to_record(
    session: Session[R], measurement: Measurement[R], *, bandwidth_bytes_per_s: float | None = None
) -> Record:
    """The measured row of one configuration: medians over the repetitions, with every repetition's speedup."""
    request, speculation, phases = session.request, measurement.speculation, measurement.phases
    speculative = not speculation.is_autoregressive
    is_fixed = speculative and not request.adaptive  # a draft step has a time of its own only while gamma is fixed
    speed = median_times(measurement.references) if measurement.references else None
    if speed is not None and request.device == "cpu":
        bandwidth_bytes_per_s = speed.memory_bytes_per_s  # during these runs: it changes within seconds
    steps_s, baseline_steps_s = (
        [run.steady_step_s for run in runs] for runs in (measurement.runs, measurement.baseline_runs)
    )
    tokens_per_s, baseline_tokens_per_s = (
        statistics.median(run.steady_tokens_per_s for run in runs)
        for runs in (measurement.runs, measurement.baseline_runs)
    )
    speedups = measurement.speedups
    fields: dict[str, Any] = {
        **configuration_fields(request, speculation),
        "autoregressive_step_s": statistics.median(baseline_steps_s),
        "draft_step_s": phases["draft"] / speculation.gamma if "draft" in phases and is_fixed else None,
        "verify_step_s": phases.get("verify") if speculative else None,
        "accept_step_s": phases.get("accept"),
        "step_s": statistics.median(steps_s),
        "autoregressive_step_samples_s": baseline_steps_s,
        "step_samples_s": steps_s if speculative else None,
        "prefill_s": session.prefill_s,
        "breakdown_s": phases,
        "expected_tokens_per_step": measurement.counts.tokens_per_step,
        **(measurement.counts.record_fields() if speculative else {}),
        "tpot_s": request.batch_size / tokens_per_s,
        "tokens_per_s": tokens_per_s,
        "autoregressive_tokens_per_s": baseline_tokens_per_s,
        "speedup": statistics.median(speedups),
        "speedup_low": min(speedups),
        "speedup_high": max(speedups),
        "speedup_samples": speedups if speculative else None,
        "repetitions": len(measurement.runs),
        "reference_s": speed.memory_s if speed else None,
        "compute_reference_s": speed.compute_s if speed else None,
    }
    fields |= session.record_fields(measurement, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    return Record(source="measured", **fields, environment=current_environment())
