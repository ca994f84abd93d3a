"""Every name of the engine that is patched. The plugin's README.md says why each is, and what
would make it unnecessary.

vLLM's interface for drafts from outside (`method: custom_class`, pull request 39487) lacks two
things that are needed by a draft which runs the target itself over the target's cache. Each patch
leaves alone every engine that does not ask for this draft.
"""

from __future__ import annotations

import sys
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from magicdec.errors import ConfigError
from magicdec.schema.gamma_table import TableGamma
from magicdec.specs.vllm_plugin import DRAFT_CLASS, read_settings
from magicdec_vllm.pages import memory_of_cache

SPECULATOR_CLASS = "magicdec_vllm.speculator.SparseSpeculator"
"""The class that drafts in the V2 model runner, where DRAFT_CLASS stands for it."""


def apply_patches() -> None:
    """Patches the engine of this process; a second call changes nothing."""
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.worker.gpu import spec_decode
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    lookahead = VllmConfig.num_lookahead_tokens
    if hasattr(lookahead.fget, "__wrapped__"):
        return
    VllmConfig.num_lookahead_tokens = property(_with_draft_slots(lookahead.fget))
    features = VllmConfig._get_v2_model_runner_unsupported_features
    VllmConfig._get_v2_model_runner_unsupported_features = _with_custom_class(features)
    VllmConfig.__post_init__ = _with_async_scheduling(VllmConfig.__post_init__)
    Scheduler.__init__ = _with_gamma_table(Scheduler.__init__)
    Executor.determine_available_memory = _without_means(
        Executor.determine_available_memory
    )
    GPUModelRunner.propose_draft_token_ids = _with_runner(
        GPUModelRunner.propose_draft_token_ids
    )
    GPUModelRunner._calc_spec_decode_metadata = _without_nothing_to_verify(
        GPUModelRunner._calc_spec_decode_metadata
    )
    GPUModelRunner._sample = _with_plain_steps(GPUModelRunner._sample)
    spec_decode.init_speculator = _with_speculator(spec_decode.init_speculator)
    runner = sys.modules.get("vllm.v1.worker.gpu.model_runner")
    if runner is not None:  # it has imported the name already
        runner.init_speculator = spec_decode.init_speculator  # type: ignore[attr-defined]


class NothingToVerify(SimpleNamespace):
    """Replaces V1's metadata of a step's drafts if there are none: the logits' rows alone."""


class GammaOfSteps:
    """Stands for the scheduler's table by batch: looks up the sequences that decode, and their mean
    length.
    """

    def __init__(self, scheduler: Any, table: TableGamma) -> None:
        self._scheduler, self._table = scheduler, table

    def __getitem__(self, _: int) -> int:
        running = self._scheduler.running
        decoding = [
            r for r in running if r.num_output_tokens or r.num_output_placeholders
        ] or running
        lengths = [r.num_computed_tokens for r in decoding] or [1]
        context = sum(lengths) / len(lengths)
        return self._table.choose(
            batch_size=len(lengths), context_len=max(context, 1.0)
        )


def repair_cpu_sampling() -> None:
    """Patches what the engine's verification needs on a CPU; a second call changes nothing."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if rejection_sampler.expand_batch_to_tokens is expand_batch_to_tokens:
        return
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    for name in ("_sample", "_bookkeeping_sync"):
        setattr(
            GPUModelRunner,
            name,
            _without_discarded_seeds(getattr(GPUModelRunner, name)),
        )


def _without_discarded_seeds(original: Any) -> Any:
    @wraps(original)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        generators = self.input_batch.generators
        if not generators:
            return original(self, *arguments, **named)
        discarded = (
            self.discard_request_mask.np[: self.input_batch.num_reqs]
            .nonzero()[0]
            .tolist()
        )
        hidden = {row: generators.pop(row) for row in discarded if row in generators}
        try:
            return original(self, *arguments, **named)
        finally:
            generators.update(hidden)

    return call


def expand_batch_to_tokens(
    values: Tensor,
    ends: Tensor,
    num_tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> Tensor:
    """Each sequence's value once for each of its drafted tokens, which end before `ends` of the
    flat batch.
    """
    counts = ends.diff(prepend=ends.new_zeros(1))
    kept = torch.where(values == replace_from, replace_to, values)
    return kept.repeat_interleave(counts, output_size=num_tokens).to(values.dtype)


def is_asked_for(config: Any) -> bool:
    """Whether an engine's configuration names this draft."""
    speculative = config.speculative_config
    return (
        speculative is not None
        and speculative.method == "custom_class"
        and speculative.model == DRAFT_CLASS
    )


def _with_draft_slots(original: Any) -> Any:
    @wraps(original)
    def num_lookahead_tokens(self: Any) -> int:
        slots: int
        if is_asked_for(self):
            slots = self.num_speculative_tokens
        else:
            slots = original(self)
        return slots

    return num_lookahead_tokens


def _with_custom_class(original: Any) -> Any:
    @wraps(original)
    def unsupported_features(self: Any) -> list[str]:
        found: list[str] = original(self)
        return [
            each
            for each in found
            if not (is_asked_for(self) and "custom_class" in each)
        ]

    return unsupported_features


def _with_async_scheduling(original: Any) -> Any:
    @wraps(original)
    def __post_init__(self: Any) -> None:
        if not is_asked_for(self):
            original(self)
            return
        scheduling = self.scheduler_config
        asked = scheduling.async_scheduling
        if asked:
            scheduling.async_scheduling = None
        has_own_sizes = self.compilation_config.cudagraph_capture_sizes is not None
        if self.use_v2_model_runner:
            capture_every_gamma(self)
        original(self)
        if self.use_v2_model_runner and not has_own_sizes:
            capture_the_largest_batch(self)
        if (
            asked is None
            and self.use_v2_model_runner
            and self.device_config.device_type != "cpu"
        ):
            from vllm.v1.executor.abstract import Executor

            asked = Executor.get_class(self).supports_async_scheduling()
        # with V1 the draft refuses it (support.py)
        scheduling.async_scheduling = bool(asked)

    return __post_init__


def capture_every_gamma(config: Any) -> None:
    """Names the gammas of a plan's table in the engine's own table by batch, by which V2 captures
    whole-step graphs of verification for each of them. The scheduler never looks it up:
    GammaOfSteps stands in its place."""
    most = config.scheduler_config.max_num_seqs
    ranges = []
    for batch, gamma in enumerate(gammas_of_table(config)[:most], 1):
        ranges.append((batch, batch, gamma))
    if ranges:
        ranges[-1] = (len(ranges), most, ranges[-1][-1])
        config.speculative_config.num_speculative_tokens_per_batch_size = ranges


def gammas_of_table(config: Any) -> list[int]:
    """Every gamma of a plan's table, the largest first; none without a table, or where the draft
    will refuse it.
    """
    try:
        table = read_settings(config.additional_config).gamma_table
    except ConfigError:
        return []
    if table is None:
        return []
    return table.distinct_gammas


def capture_the_largest_batch(config: Any) -> None:
    """Adds the sizes of as many sequences as may run: one token of each (drafts), and a step of
    each gamma. Those of the engine are multiples of 8 and 16 tokens, and no graph is captured for
    more sequences than may run."""
    compilation, most = config.compilation_config, config.scheduler_config.max_num_seqs
    sizes = {most * (gamma + 1) for gamma in (0, *gammas_of_table(config))}
    largest = compilation.max_cudagraph_capture_size or 0
    fit = {size for size in sizes if size <= largest}
    compilation.cudagraph_capture_sizes = sorted(
        fit.union(compilation.cudagraph_capture_sizes or ())
    )


def _with_every_gamma(original: Any) -> Any:
    """The engine offers the graphs of the next larger size alone, and sizes of different gammas
    alternate: before 16 tokens of gamma 0, four sequences with gamma 2 found none. So the smallest
    graph of each other gamma is offered too. Adapters there are none (support.py)."""

    @wraps(original)
    def _init_candidates(self: Any) -> None:
        original(self)
        if not is_asked_for(self.vllm_config):
            return
        captured = []
        for graphs in self._capture_descs.values():
            captured += [graph for graph in graphs if graph.uniform_token_count]
        captured.sort(key=lambda graph: graph.num_tokens)
        for (num_tokens, _), offered in self._candidates.items():
            known = {graph.uniform_token_count for graph in offered}
            for graph in captured:
                length = graph.uniform_token_count
                if graph.num_tokens < num_tokens or length in known:
                    continue
                if num_tokens % length == 0:
                    offered.insert(0, graph)
                    known.add(length)

    return _init_candidates


def _with_gamma_table(original: Any) -> Any:
    @wraps(original)
    def __init__(self: Any, vllm_config: Any, *rest: Any, **named: Any) -> None:
        original(self, vllm_config, *rest, **named)
        if is_asked_for(vllm_config) and vllm_config.use_v2_model_runner:
            table = read_settings(vllm_config.additional_config).gamma_table
            if table is None:
                self.dynamic_sd_lookup = None
            else:
                self.dynamic_sd_lookup = GammaOfSteps(self, table)

    return __init__


def _without_means(original: Any) -> Any:
    @wraps(original)
    def determine_available_memory(self: Any) -> list[int]:
        available: list[int] = original(self)
        config = self.vllm_config
        if not (
            is_asked_for(config)
            and read_settings(config.additional_config).draft_method == "topk"
        ):
            return available
        model, size = config.model_config, config.cache_config.block_size
        scores = model.get_num_attention_heads(config.parallel_config) * -(
            -model.max_model_len // size
        )
        scores *= config.scheduler_config.max_num_seqs
        return [
            memory_of_cache(memory_bytes, page_size=size, num_scores=scores)
            for memory_bytes in available
        ]

    return determine_available_memory


def _with_speculator(original: Any) -> Any:
    @wraps(original)
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if not is_asked_for(vllm_config):
            return original(vllm_config, device, req_states)
        from vllm.utils.import_utils import resolve_obj_by_qualname
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

        if not hasattr(CudaGraphManager._init_candidates, "__wrapped__"):
            CudaGraphManager._init_candidates = _with_every_gamma(
                CudaGraphManager._init_candidates
            )
        return resolve_obj_by_qualname(SPECULATOR_CLASS)(
            vllm_config, device, req_states
        )

    return init_speculator


def _without_nothing_to_verify(original: Any) -> Any:
    @wraps(original)
    def _calc_spec_decode_metadata(self: Any, num_draft_tokens: Any, ends: Any) -> Any:
        if num_draft_tokens.any() or not is_asked_for(self.vllm_config):
            return original(self, num_draft_tokens, ends)
        from vllm.utils.torch_utils import async_tensor_h2d

        return NothingToVerify(
            logits_indices=async_tensor_h2d(ends - 1, device=self.device)
        )

    return _calc_spec_decode_metadata


def _with_plain_steps(original: Any) -> Any:
    @wraps(original)
    def _sample(self: Any, logits: Any, drafts: Any) -> Any:
        if isinstance(drafts, NothingToVerify):
            return original(self, logits, None)
        return original(self, logits, drafts)

    return _sample


def _with_runner(original: Any) -> Any:
    @wraps(original)
    def propose_draft_token_ids(
        self: Any,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        if not is_asked_for(self.vllm_config):
            return original(
                self,
                scheduler_output,
                sampled_token_ids,
                sampling_metadata,
                *rest,
                **named,
            )
        proposal = self.drafter.propose(self, sampled_token_ids, sampling_metadata)
        self._draft_probs, self._draft_prob_req_ids = (
            proposal.probabilities,
            proposal.request_ids,
        )
        return proposal.token_ids

    return propose_draft_token_ids
