"""Measures decoding for real: autoregressive and speculative runs of one (model, batch, context),
from one prefill.

All configurations start from the same snapshot of the target's KV cache and are interleaved,
repetition by repetition, so a drift of the machine affects them alike; a speedup is the ratio
within one repetition. Steady state: the clock stops at the end of the step in which the first
sequence ends, autoregressive and speculative over the same contexts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from magicdec.measure.configuration import NOISE, BenchmarkRequest, check_request
from magicdec.measure.repetitions import PairedRun, prompts_of
from magicdec.measure.utilisation import MemoryMeter, phase_bytes, planned_memory_bytes
from magicdec.runtime.distributed import SINGLE, TensorParallel
from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.drafters.base import Drafter
from magicdec.runtime.engine import MAX_BACK, Engine
from magicdec.runtime.generate import DecodeOptions, DecodeResult, decode
from magicdec.runtime.heads.builder import load_head
from magicdec.runtime.heads.chain import Head
from magicdec.runtime.prompts import generation_eos_token_ids
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import load_model
from magicdec.specs.catalog import checkpoint_directory, load_model_spec
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import (
    HEAD_METHODS,
    DraftMethod,
    SamplingSpec,
    SpeculationSpec,
    draft_model_name,
)

WARM_UP_TOKENS = 4
DraftKey = tuple[str, int]
"""A draft model's name and its ranks."""
HeadKey = tuple[DraftMethod, str | None]
"""A head's method and directory (None: it is part of the target's checkpoint)."""


class BenchmarkSession:
    """A loaded model with a prefilled batch, from which any configuration can be decoded again and
    again.
    """

    def __init__(
        self,
        request: BenchmarkRequest,
        *,
        model: Transformer | None = None,
        tp: TensorParallel | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.request = request
        self.spec = load_model_spec(request.model)
        tp = tp or SINGLE
        assert tp.size == request.tp_size, (tp.size, request.tp_size)
        check_request(request, self.spec, is_loaded=model is not None)
        # no rank allocates before all have checked what is free
        tp.all_reduce(torch.zeros(1, device=request.device))
        self.memory = MemoryMeter(request.device)
        progress(f"loading {request.model}")
        self.model = model or self._load(request.model, tp)
        self._draft_models = self._load_drafts(tp)
        self._heads = self._load_heads()
        self._kept_drafters: dict[SpeculationSpec, Drafter] = {}
        self._eos_token_ids = _eos_token_ids(
            self.spec, checkpoint_directory(request.model)
        )
        self.tokenizer, self.prompts = prompts_of(request)
        windows = [
            speculation.observation_window for speculation in request.speculations
        ]
        self.engine = Engine(
            self.model,
            batch_size=request.batch_size,
            max_len=request.max_len,
            max_back=max(*windows, MAX_BACK, 0),
        )
        for speculation in request.speculations:
            if _head_key(speculation) is not None:
                self._drafter(speculation)  # which sees the prefill
        progress(
            f"prefilling {request.batch_size} prompts of {request.context_len} tokens"
        )
        self.prefill_s = self._prefill()
        self.snapshot = self.engine.snapshot()

    def _load(self, name: str, tp: TensorParallel) -> Transformer:
        request = self.request
        model: str | ModelSpec = name
        if request.weights != "checkpoint":
            model = load_model_spec(name)
        return load_model(
            model,
            weights=request.weights,
            tp=tp,
            device=request.device,
            dtype=request.dtype,
        )

    def _load_drafts(self, tp: TensorParallel) -> dict[DraftKey, Transformer | None]:
        """Draft models; None where this rank does not draft. Every rank goes through the same
        ones."""
        models: dict[DraftKey, Transformer | None] = {}
        for speculation in self.request.speculations:
            key = self._draft_key(speculation)
            if key is not None:
                models[key] = None
        groups: dict[int, TensorParallel | None] = {}
        for _, size in models:
            if size not in groups:
                groups[size] = tp.first(size)
        for name, size in models:
            group = groups[size]
            if group is not None:
                models[name, size] = self._load(name, group)
        return models

    def _load_heads(self) -> dict[HeadKey, Head]:
        """Trained heads, each for all that draft with it."""
        directory = checkpoint_directory(self.request.model)
        heads: dict[HeadKey, Head] = {}
        for speculation in self.request.speculations:
            key = _head_key(speculation)
            if key is None or key in heads:
                continue
            method, checkpoint = key
            path = None
            if checkpoint is not None:
                path = Path(checkpoint)
            heads[key] = load_head(
                path,
                self.model,
                method=method,
                weights=self.request.weights,
                target_directory=directory,
            )
        return heads

    def _draft_key(self, speculation: SpeculationSpec) -> DraftKey | None:
        """The draft model. None: the target itself drafts, or no model."""
        name = draft_model_name(speculation.draft)
        if name is None:
            return None
        return name, speculation.draft_tp_size or self.request.tp_size

    def _drafter(self, speculation: SpeculationSpec) -> Drafter | None:
        """A new drafter, but the kept one of a draft model or a head: its prefill serves every
        run.
        """
        draft_key = self._draft_key(speculation)
        head_key = _head_key(speculation)
        draft_model: Transformer | Head | None = None
        if head_key is not None:
            draft_model = self._heads[head_key]
        elif draft_key is not None:
            draft_model = self._draft_models[draft_key]
        has_network = (
            head_key is not None or draft_model_name(speculation.draft) is not None
        )
        if speculation.is_autoregressive or not has_network:
            return build_drafter(speculation, self.engine, draft_model)
        # one drafter serves every gamma of a draft: it is built for the greatest
        draft = msgspec.structs.replace(speculation, gamma=0)
        gammas = []
        for other in self.request.speculations:
            if msgspec.structs.replace(other, gamma=0) == draft:
                gammas.append(other.gamma)
        key = msgspec.structs.replace(
            speculation, gamma=max(gammas, default=speculation.gamma)
        )
        if key not in self._kept_drafters:
            drafter = build_drafter(key, self.engine, draft_model)
            assert drafter is not None
            self._kept_drafters[key] = drafter
        return self._kept_drafters[key]

    def _prefill(self) -> float:
        start = _clock(self.request.device)
        if self.request.prompts == NOISE:
            self.engine.fill_with_noise(
                [len(prompt) - 1 for prompt in self.prompts],
                seed=self.request.sampling.seed,
            )
        else:
            self.engine.prefill(self.prompts[: self.request.batch_size])
        return _clock(self.request.device) - start

    @property
    def _is_fenced(self) -> bool:
        return self.request.device == "cpu" and self.request.num_prompts is None

    def warm_up(self, speculation: SpeculationSpec) -> DecodeResult | None:
        """Decodes a few tokens; returns a run whose phases are timed apart where measured runs' are
        not.
        """
        self.run(
            speculation, gen_len=min(WARM_UP_TOKENS, self.request.gen_len), fences=False
        )
        if self._is_fenced:
            return None
        return self.run(
            speculation, seed=self.request.sampling.seed, fences=True, run_to_end=False
        )

    def run(
        self,
        speculation: SpeculationSpec,
        *,
        seed: int | None = None,
        gen_len: int | None = None,
        sampling: SamplingSpec | None = None,
        fences: bool | None = None,
        run_to_end: bool | None = None,
    ) -> DecodeResult:
        """Decodes from the prefill's snapshot. A queue's prompts overwrite it: after such a run it
        is made again.

        `run_to_end` is the request's, where not given. `fences` time phases apart, by default where
        that costs nothing: on a CPU, unless slots are refilled, which is no phase of a step. A run
        told of them leaves the queue alone.
        """
        request = self.request
        sampling = sampling or request.sampling
        if seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=seed)
        if self.snapshot.prefill_count != self.engine.prefill_count:
            self._prefill()
            self.snapshot = self.engine.snapshot()
        self.engine.restore(self.snapshot)
        drafter = self._drafter(speculation)
        gamma = 0
        simulated = None
        if drafter is not None:
            gamma = speculation.gamma
            simulated = list(request.simulate_acceptance or ()) or None
        eos_token_ids: Sequence[int] = ()
        if request.stop_at_eos:
            eos_token_ids = self._eos_token_ids
        queue: Sequence[list[int]] = ()
        if fences is None:
            queue = self.prompts[request.batch_size :]
            fences = self._is_fenced
        if run_to_end is None:
            run_to_end = request.run_to_end
        options = DecodeOptions(
            gamma=gamma,
            max_new_tokens=gen_len or request.gen_len,
            eos_token_ids=tuple(eos_token_ids),
            fences=fences,
            simulate_acceptance=simulated,
            stop_when_first_ends=not run_to_end,
            queue=queue,
            policy=request.gamma_table,
            cuda_graphs=request.cuda_graphs,
        )
        return decode(self.engine, drafter, sampling, options)

    def record_fields(
        self, measurement: PairedRun, *, bandwidth_bytes_per_s: float | None
    ) -> dict[str, Any]:
        """A row's fields that only our runtime fills: whole batches, divergences and the use of
        memory.
        """
        request = self.request
        run = measurement.run
        base = measurement.baseline
        speculative = not measurement.speculation.is_autoregressive
        fields: dict[str, Any] = {
            "ttft_s": self.prefill_s + base.steady_step_s,
            "memory_bytes_per_gpu": planned_memory_bytes(request),
            "peak_memory_bytes": self.memory.peak_bytes(),
            **self._memory_use(measurement, bandwidth_bytes_per_s),
        }
        if (
            speculative
            and request.sampling.is_greedy
            and request.simulate_acceptance is None
        ):
            fields["num_divergences"] = _num_divergences(run.tokens, base.tokens)
        if request.run_to_end:
            fields["static_batch_tokens_per_s"] = run.num_tokens / run.elapsed_s
            if speculative:
                fields["speedup_static_batch"] = base.elapsed_s / run.elapsed_s
        if request.num_prompts is not None:
            fields["refilled_tokens_per_s"] = run.refilled_tokens_per_s
            fields["speedup_refilled"] = (
                run.refilled_tokens_per_s / base.refilled_tokens_per_s
            )
        return fields

    def _memory_use(
        self, measurement: PairedRun, bandwidth: float | None
    ) -> dict[str, Any]:
        """A row's fields on memory bandwidth."""
        speculation = measurement.speculation
        is_adaptive = self.request.gamma_table is not None
        needed = phase_bytes(
            self.request, [len(prompt) for prompt in self.prompts], speculation
        )
        achieved = {
            "autoregressive": needed.pop("autoregressive")
            / measurement.baseline.steady_step_s
        }
        if not speculation.is_autoregressive and not is_adaptive:
            times_s = measurement.phases
            for phase, num_bytes in needed.items():
                if times_s.get(phase):
                    achieved[phase] = num_bytes / times_s[phase]
            achieved["step"] = sum(needed.values()) / measurement.run.steady_step_s
        fields: dict[str, Any] = {
            "achieved_bytes_per_s": achieved,
            "memory_bytes_per_s": bandwidth,
        }
        if bandwidth is None:
            return fields
        autoregressive_mbu = achieved["autoregressive"] / bandwidth
        if "step" in achieved:
            fields["mbu"] = achieved["step"] / bandwidth
        elif not is_adaptive:
            fields["mbu"] = autoregressive_mbu
        fields["autoregressive_mbu"] = autoregressive_mbu
        return fields


def _eos_token_ids(spec: ModelSpec, checkpoint: Path | None) -> tuple[int, ...]:
    """The tokens that end a sequence: the checkpoint's for generation, else the model's."""
    if checkpoint is not None:
        token_ids = generation_eos_token_ids(checkpoint, vocab_size=spec.vocab_size)
        if token_ids is not None:
            return token_ids
    return spec.eos_token_ids


def _num_divergences(tokens: Sequence[list[int]], baseline: Sequence[list[int]]) -> int:
    """Sequences that differ from autoregressive decoding up to the shorter's end: rounding alone
    decides between logits that are nearly equal.
    """
    divergences = 0
    for own, other in zip(tokens, baseline, strict=True):
        length = min(len(own), len(other))
        divergences += own[:length] != other[:length]
    return divergences


def _head_key(speculation: SpeculationSpec) -> HeadKey | None:
    """Which head drafts; None where none does."""
    if speculation.is_autoregressive or speculation.draft_method not in HEAD_METHODS:
        return None
    return speculation.draft_method, speculation.checkpoint


def _clock(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()
