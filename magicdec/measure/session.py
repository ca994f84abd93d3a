"""Measures decoding for real: autoregressive and speculative runs of one (model, batch, context),
from one prefill.

All configurations start from the same snapshot of the target's KV cache and are interleaved,
repetition by repetition, so that a drift of the machine meets them alike; a speedup is the ratio
within one repetition. Steady state: the clock stops at the end of the step in which the first
sequence ends, autoregressive and speculative over the same contexts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from magicdec.measure.configuration import NOISE, BenchmarkRequest, check_request
from magicdec.measure.repetitions import Measurement, prompts_of
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
from magicdec.runtime.weights import load_model, with_weight_dtype
from magicdec.specs.catalog import checkpoint_directory, load_model_spec
from magicdec.specs.speculation import (
    HEAD_METHODS,
    SELF,
    DraftMethod,
    SamplingSpec,
    SpeculationSpec,
    draft_model_name,
)

WARM_UP_TOKENS = 4
DraftKey = tuple[str, int, str | None]
"""A drafting model's name, ranks, and weight format (None: as it is)."""
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
        tp.all_reduce(
            torch.zeros(1, device=request.device)
        )  # no rank allocates before all have checked what is free
        self.memory = MemoryMeter(request.device)
        progress(f"loading {request.model}")
        self.model = model or self._load(request.model, tp)
        self._draft_models = self._load_drafts(tp)
        self._heads = self._load_heads()
        self._kept_drafters: dict[SpeculationSpec, Drafter] = {}
        checkpoint = checkpoint_directory(request.model)
        if checkpoint is None:
            found = None
        else:
            found = generation_eos_token_ids(checkpoint, vocab_size=self.spec.vocab_size)
        self._eos_token_ids = self.spec.eos_token_ids if found is None else found
        self.tokenizer, self.prompts = prompts_of(request)
        observed = max((s.observation_window for s in request.speculations), default=0)
        self.engine = Engine(
            self.model,
            batch_size=request.batch_size,
            max_len=request.max_len,
            max_back=max(observed, MAX_BACK),
        )
        for speculation in request.speculations:
            if _head_key(speculation) is not None:
                self._drafter(speculation)  # which sees the prefill
        progress(f"prefilling {request.batch_size} prompts of {request.context_len} tokens")
        self.prefill_s = self._prefill()
        self.snapshot = self.engine.snapshot()

    def _load(self, name: str, tp: TensorParallel) -> Transformer:
        request = self.request
        return load_model(
            name if request.weights == "checkpoint" else load_model_spec(name),
            weights=request.weights,
            tp=tp,
            device=request.device,
            dtype=request.dtype,
        )

    def _load_drafts(self, tp: TensorParallel) -> dict[DraftKey, Transformer | None]:
        """Draft models, and the target's narrower copies; None where this rank does not draft.
        Every rank goes through the same ones."""
        wanted = dict.fromkeys(
            key for s in self.request.speculations if (key := self._draft_key(s)) is not None
        )
        groups = {size: tp.first(size) for size in dict.fromkeys(size for _, size, _ in wanted)}
        models: dict[DraftKey, Transformer | None] = dict.fromkeys(wanted)
        for name, size, weight_dtype in wanted:
            if (group := groups[size]) is not None:
                if name == SELF:
                    model = self.model
                else:
                    model = self._load(name, group)
                models[name, size, weight_dtype] = with_weight_dtype(model, weight_dtype)
        return models

    def _load_heads(self) -> dict[HeadKey, Head]:
        """Trained heads, each for all that draft with it."""
        directory = checkpoint_directory(self.request.model)
        heads: dict[HeadKey, Head] = {}
        for speculation in self.request.speculations:
            key = _head_key(speculation)
            if key is not None and key not in heads:
                method, checkpoint = key
                heads[key] = load_head(
                    None if checkpoint is None else Path(checkpoint),
                    self.model,
                    method=method,
                    weights=self.request.weights,
                    target_directory=directory,
                )
        return heads

    def _draft_key(self, speculation: SpeculationSpec) -> DraftKey | None:
        """Which model drafts; None where it is the target as it is, or none."""
        name = draft_model_name(speculation.draft)
        weight_dtype = speculation.draft_weight_dtype
        if name is None and (weight_dtype is None or not speculation.is_self):
            return None
        return name or SELF, speculation.draft_tp_size or self.request.tp_size, weight_dtype

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
        is_kept = head_key is not None or draft_model_name(speculation.draft) is not None
        if speculation.is_autoregressive or not is_kept:
            return build_drafter(speculation, self.engine, draft_model)
        kind = msgspec.structs.replace(speculation, gamma=0)
        same = (
            s.gamma
            for s in self.request.speculations
            if msgspec.structs.replace(s, gamma=0) == kind
        )
        key = msgspec.structs.replace(speculation, gamma=max(same, default=speculation.gamma))
        if key not in self._kept_drafters:
            drafter = build_drafter(key, self.engine, draft_model)
            assert drafter is not None
            self._kept_drafters[key] = drafter
        return self._kept_drafters[key]

    def _prefill(self) -> float:
        start = _clock(self.request.device)
        if self.request.prompts == NOISE:
            self.engine.fill_with_noise(
                [len(prompt) - 1 for prompt in self.prompts], seed=self.request.sampling.seed
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
        self.run(speculation, gen_len=min(WARM_UP_TOKENS, self.request.gen_len), fences=False)
        if self._is_fenced:
            return None
        return self.run(speculation, seed=self.request.sampling.seed, fences=True, run_to_end=False)

    def run(
        self,
        speculation: SpeculationSpec,
        *,
        seed: int | None = None,
        gen_len: int | None = None,
        sampling: SamplingSpec | None = None,
        fences: bool | None = None,
        run_to_end: bool | None = None,
        on_step: Callable[[np.ndarray, list[list[int]]], None] | None = None,
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
        simulated = request.simulate_acceptance if drafter is not None else None
        options = DecodeOptions(
            gamma=0 if drafter is None else speculation.gamma,
            max_new_tokens=gen_len or request.gen_len,
            eos_token_ids=self._eos_token_ids if request.stop_at_eos else (),
            fences=self._is_fenced if fences is None else fences,
            simulate_acceptance=list(simulated) if simulated else None,
            stop_when_first_ends=not (request.run_to_end if run_to_end is None else run_to_end),
            queue=self.prompts[request.batch_size :] if fences is None else (),
            policy=request.gamma_table,
            on_step=on_step,
            cuda_graphs=request.cuda_graphs,
        )
        return decode(self.engine, drafter, sampling, options)

    def record_fields(
        self, measurement: Measurement, *, bandwidth_bytes_per_s: float | None
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
        if speculative and request.sampling.is_greedy and request.simulate_acceptance is None:
            # rounding alone decides between logits that are nearly equal
            pairs = zip(run.tokens, base.tokens, strict=True)
            differ = (any(a != b for a, b in zip(own, other, strict=False)) for own, other in pairs)
            fields["num_divergences"] = sum(differ)
        if request.run_to_end:
            fields["static_batch_tokens_per_s"] = run.num_tokens / run.elapsed_s
            fields["speedup_static_batch"] = base.elapsed_s / run.elapsed_s if speculative else None
        if request.num_prompts is not None:
            fields["refilled_tokens_per_s"] = run.refilled_tokens_per_s
            fields["speedup_refilled"] = run.refilled_tokens_per_s / base.refilled_tokens_per_s
        return fields

    def _memory_use(self, measurement: Measurement, bandwidth: float | None) -> dict[str, Any]:
        """A row's fields on memory bandwidth."""
        speculation = measurement.speculation
        is_adaptive = self.request.gamma_table is not None
        needed = phase_bytes(self.request, [len(prompt) for prompt in self.prompts], speculation)
        achieved = {
            "autoregressive": needed.pop("autoregressive") / measurement.baseline.steady_step_s
        }
        if not speculation.is_autoregressive and not is_adaptive:
            times_s = measurement.phases
            achieved |= {
                phase: needed[phase] / times_s[phase] for phase in needed if times_s.get(phase)
            }
            achieved["step"] = sum(needed.values()) / measurement.run.steady_step_s
        fields: dict[str, Any] = {"achieved_bytes_per_s": achieved, "memory_bytes_per_s": bandwidth}
        if bandwidth is None:
            return fields
        mbu = achieved.get("step", None if is_adaptive else achieved["autoregressive"])
        fields["mbu"] = mbu / bandwidth if mbu is not None else None
        return {**fields, "autoregressive_mbu": achieved["autoregressive"] / bandwidth}


def _head_key(speculation: SpeculationSpec) -> HeadKey | None:
    """Which head drafts; None where none does."""
    if speculation.is_autoregressive or speculation.draft_method not in HEAD_METHODS:
        return None
    return speculation.draft_method, speculation.checkpoint


def _clock(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()
