"""Measures decoding in vLLM: autoregressive and speculative runs of one (model, batch, context) in
one engine. magicdec finds it by the entry point `magicdec.sessions` (magicdec/measure/engines.py).

The engine is in this process, so that its steps, and their process CPU time, can be timed. One
engine serves all configurations: between runs only the draft's settings change, and autoregressive
decoding is gamma 0; a request without configurations is decoded by the engine as it is, without the
plugin. A run begins with the step after which every sequence decodes, and ends with the step in
which the first one ends, as in magicdec/measure/session.py.

A step is split by the engine's own calls: `draft` (all of what the plugin does), `verify` (or the
pass of an autoregressive step, logits included), `sample` (logits to tokens, or rejection); `rest`
is the scheduler's, inputs and outputs.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from magicdec.counts import Counts
from magicdec.errors import ConfigError
from magicdec.measure.configuration import BenchmarkRequest, check_request
from magicdec.measure.repetitions import PairedRun, prompts_of
from magicdec.schema.gamma_table import TableGamma
from magicdec.specs.catalog import checkpoint_directory, load_model_spec
from magicdec.specs.device import bytes_per_element
from magicdec.specs.precision import PROFILE_DTYPES
from magicdec.specs.speculation import AUTOREGRESSIVE, SamplingSpec, SpeculationSpec
from magicdec.specs.vllm_plugin import CONFIG_KEY, DRAFT_CLASS, DraftSettings
from magicdec.units import GIB

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
"""The engine's environment, where the user's own sets nothing else."""
PAGE_SIZES = (64, 32)
"""Page sizes of the engine's cache, the first that the budgets allow: larger pages are read faster,
smaller ones fill a budget better."""
PHASES = {
    "propose_draft_token_ids": "draft",
    "_model_forward": "verify",
    "_sample": "sample",
}
"""The runner's calls, and the phases that they belong to; the logits of the target's pass belong to
`verify` too.
"""
REST = "rest"
VLLM_WARM_UP_TOKENS = 12
DRAFTS_METRIC = "vllm:spec_decode_num_drafts"


@dataclass(frozen=True)
class VllmRun:
    """One run's steady state, by wall clock and by process CPU time."""

    num_steps: int
    num_tokens: int
    counts: Counts
    """Counts per sequence: acceptance from the sequences' tokens, the share of steps with a draft from
    the engine's counters."""
    elapsed_s: float
    elapsed_cpu_s: float
    phases_s: dict[str, float]
    """Mean seconds of each phase of a step."""
    phases_cpu_s: dict[str, float]

    @property
    def steady_step_s(self) -> float:
        return self.elapsed_s / self.num_steps

    @property
    def step_cpu_s(self) -> float:
        return self.elapsed_cpu_s / self.num_steps

    @property
    def steady_tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s

    @property
    def cpu_s_per_token(self) -> float:
        return self.elapsed_cpu_s / self.num_tokens


class VllmSession:
    """A started engine with the prompts of a request, that decodes any of its configurations again
    and again.
    """

    def __init__(
        self,
        request: BenchmarkRequest,
        *,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.request = request
        self.spec = load_model_spec(request.model)
        check_request(request, self.spec)
        self.checkpoint = checkpoint_directory(request.model) or request.model
        _, self.prompts = prompts_of(request)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        progress("starting vLLM")
        from vllm import LLM

        self._llm = LLM(**self._engine_arguments())
        self._core = self._llm.llm_engine
        runner = self._core.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self._draft = runner.drafter if request.speculations else None
        self._phases: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._is_timing = False
        for name, phase in PHASES.items():
            setattr(runner, name, self._timed(getattr(runner, name), phase))
        runner.model.compute_logits = self._timed(runner.model.compute_logits, "verify")
        progress(
            f"prefilling {request.batch_size} prompts of {request.context_len} tokens"
        )
        self.prefill_s = self._prefill()

    def _engine_arguments(self) -> dict[str, Any]:
        request = self.request
        budgets = []
        for speculation in request.speculations:
            if speculation.draft_budget is not None:
                budgets.append(speculation.draft_budget)
        smallest = min(budgets, default=DraftSettings().draft_budget)
        page_size = PAGE_SIZES[-1]
        for size in PAGE_SIZES:
            if smallest >= 3 * size:
                page_size = size
                break
        arguments: dict[str, Any] = {
            "model": str(self.checkpoint),
            "dtype": request.dtype,
            "max_model_len": min(
                request.max_len + request.max_gamma, self.spec.max_position_embeddings
            ),
            "max_num_seqs": request.batch_size,
            "block_size": page_size,
            "enforce_eager": request.device == "cpu" or not request.cuda_graphs,
            "distributed_executor_backend": "uni",
            "disable_log_stats": False,
            "enable_prefix_caching": True,
            "seed": request.sampling.seed,
        }
        if request.speculations:
            arguments["speculative_config"] = {
                "method": "custom_class",
                "model": DRAFT_CLASS,
                "num_speculative_tokens": request.max_gamma,
                "draft_sample_method": "probabilistic",
            }
            method = "streamingllm"
            for speculation in request.speculations:
                # an engine that was not started with top-k keeps no scores of pages
                if speculation.draft_method == "topk":
                    method = "topk"
            arguments["additional_config"] = {
                CONFIG_KEY: {"draft_budget": smallest, "draft_method": method}
            }
        if request.device == "cpu":
            slot_bytes = self.spec.kv_elements_per_token() * bytes_per_element(
                PROFILE_DTYPES[request.dtype]
            )
            needed = slot_bytes * (request.max_len + 2 * page_size) * request.batch_size
            arguments["kv_cache_memory_bytes"] = GIB + int(1.1 * needed)
        return arguments

    def _timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._is_timing:  # within another phase, as the logits of drafts are
                return function(*arguments, **named)
            self._is_timing = True
            wall = time.perf_counter()
            cpu = time.process_time()
            result = function(*arguments, **named)
            self._phases[phase][0] += time.perf_counter() - wall
            self._phases[phase][1] += time.process_time() - cpu
            self._is_timing = False
            return result

        return timed

    def _configure(self, speculation: SpeculationSpec) -> None:
        if self._draft is None:
            return
        table = TableGamma(
            batch_sizes=(1,), context_lens=(1,), gammas=((speculation.gamma,),)
        )
        if speculation.is_autoregressive:
            self._draft.settings = msgspec.structs.replace(
                self._draft.settings, gamma_table=table
            )
            return
        table = self.request.gamma_table or table
        assert speculation.draft_budget is not None
        self._draft.settings = DraftSettings(
            draft_method=speculation.draft_method,
            draft_budget=speculation.draft_budget,
            num_sink_tokens=speculation.num_sink_tokens,
            gamma_table=table,
        )

    def run(
        self,
        speculation: SpeculationSpec = AUTOREGRESSIVE,
        *,
        seed: int | None = None,
        gen_len: int | None = None,
        batch_size: int | None = None,
        context_len: int | None = None,
        sampling: SamplingSpec | None = None,
    ) -> VllmRun:
        """Decodes the prompts once, or the beginnings of the first few. What else is given replaces
        the request's. The tokens of a sequence in flight when the first one ends are thrown
        away."""
        self._configure(speculation)
        prompts = [prompt[:context_len] for prompt in self.prompts[:batch_size]]
        self._send(
            prompts,
            sampling or self.request.sampling,
            seed=seed or 0,
            gen_len=gen_len or self.request.gen_len,
        )
        steps = _Steps(num_sequences=len(prompts), max_gamma=self.request.max_gamma)
        while not steps.all_decode:
            steps.note(self._core.step())
        steps.begin()
        self._phases.clear()
        before = self._num_drafts()
        wall = time.perf_counter()
        cpu = time.process_time()
        while not steps.has_ended:
            steps.note(self._core.step())
        elapsed = time.perf_counter() - wall, time.process_time() - cpu
        after = self._num_drafts()
        self._core.abort_request([str(index) for index in range(len(prompts))])
        while self._core.has_unfinished_requests():
            self._core.step()
        counts = Counts.of_histograms(steps.accepted[:, : speculation.gamma + 1])
        if speculation.gamma:
            counts.tried[:, 0] *= (after - before) / counts.steps.sum()
        phases: list[dict[str, float]] = []
        for index, whole_s in enumerate(elapsed):
            known = {
                name: seconds[index] / steps.num_steps
                for name, seconds in self._phases.items()
            }
            phases.append(
                {**known, REST: whole_s / steps.num_steps - sum(known.values())}
            )
        return VllmRun(steps.num_steps, steps.num_tokens, counts, *elapsed, *phases)

    def warm_up(self, speculation: SpeculationSpec) -> None:
        """Decodes a few tokens; the phases of every measured run are timed apart."""
        self.run(speculation, gen_len=min(VLLM_WARM_UP_TOKENS, self.request.gen_len))

    def record_fields(
        self, measurement: PairedRun, *, bandwidth_bytes_per_s: float | None = None
    ) -> dict[str, Any]:
        """A row's fields on process CPU time: on a machine that others use too, that is what
        repeats.
        """
        run = measurement.run
        baseline = measurement.baseline
        speedup = baseline.cpu_s_per_token / run.cpu_s_per_token
        fields: dict[str, Any] = {
            "accept_step_s": None,
            "autoregressive_step_cpu_s": baseline.step_cpu_s,
            "step_cpu_s": run.step_cpu_s,
            "breakdown_cpu_s": run.phases_cpu_s,
            "speedup_cpu": speedup,
            "speedup_cpu_samples": None,
        }
        if not measurement.speculation.is_autoregressive:
            fields["accept_step_s"] = measurement.phases["sample"]
            fields["speedup_cpu_samples"] = [speedup]
        return fields

    def _send(
        self,
        prompts: list[list[int]],
        sampling: SamplingSpec,
        *,
        seed: int,
        gen_len: int,
    ) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for index, prompt in enumerate(prompts):
            own_seed = None
            if not sampling.is_greedy:
                own_seed = seed * len(prompts) + index
            wanted = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p or 1.0,
                top_k=sampling.top_k or 0,
                seed=own_seed,
                max_tokens=gen_len,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            )
            self._core.add_request(str(index), {"prompt_token_ids": prompt}, wanted)

    def _prefill(self) -> float:
        """Fills the engine's prefix cache with the prompts, so that all sequences of a run begin
        together."""
        from vllm import SamplingParams

        start = time.perf_counter()
        for index, prompt in enumerate(self.prompts):
            self._core.add_request(
                f"prefill {index}",
                {"prompt_token_ids": prompt},
                SamplingParams(max_tokens=1),
            )
        while self._core.has_unfinished_requests():
            self._core.step()
        return time.perf_counter() - start

    def _num_drafts(self) -> float:
        """Drafts that the engine counted so far."""
        if self._draft is None:
            return 0.0
        counts = {
            metric.name: metric.value
            for metric in self._llm.get_metrics()
            if metric.name == DRAFTS_METRIC
        }
        return float(counts[DRAFTS_METRIC])


@dataclass(kw_only=True)
class _Steps:
    """Counts of what the engine's steps emit for each sequence."""

    num_sequences: int
    max_gamma: int
    num_steps: int = 0
    num_tokens: int = 0
    has_ended: bool = False
    _begun: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.accepted = np.zeros((self.num_sequences, self.max_gamma + 1), dtype=int)

    @property
    def all_decode(self) -> bool:
        return len(self._begun) == self.num_sequences

    def begin(self) -> None:
        """Forgets what came before: prefills, and sequences that went ahead of others."""
        self.num_steps = self.num_tokens = 0
        self.accepted[:] = 0
        if self.has_ended:
            raise ConfigError(
                "a sequence ended before the last one was prefilled; generate more tokens "
                "(--gen-len)"
            )

    def note(self, outputs: list[Any]) -> None:
        self.num_steps += 1
        for output in outputs:
            count = len(output.outputs[0].token_ids)
            if count:
                self._begun.add(output.request_id)
                self.num_tokens += count
                self.accepted[
                    int(output.request_id), min(count, self.max_gamma + 1) - 1
                ] += 1
            self.has_ended |= output.finished
