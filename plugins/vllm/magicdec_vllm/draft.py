"""The draft: the target's own forward pass over a few pages of the target's own cache, one token at
a time.

After each step of the engine every sequence that has a new token drafts from it. The pending token
has no keys and values yet: the first draft pass computes them, at their true position and slot, and
so do the others for the drafts before them. The verification that follows writes all of these slots
anew, from the same tokens but over the full cache, before it reads them: nothing of a draft is
left, whether it was accepted or not.

Shape suffixes: B sequences that draft, T drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from magicdec_vllm.draft_pass import DraftPasses, check_cache
from magicdec_vllm.page_scores import PageMeans, PageSelector, watch_layers
from magicdec_vllm.patches import repair_cpu_sampling
from magicdec_vllm.support import checked_settings


def _passes_of(runner: Any) -> DraftPasses:
    check_cache(runner.kv_cache_config)
    starts = torch.arange(runner.max_num_reqs + 1, dtype=torch.int32)

    def graph_of(count: int) -> tuple[Any, int]:
        if runner.device.type != "cuda":
            return CUDAGraphMode.NONE, count
        mode, descriptor = runner.cudagraph_dispatcher.dispatch(
            count, invalid_modes={CUDAGraphMode.FULL}
        )
        return mode, descriptor.num_tokens

    return DraftPasses(
        config=runner.vllm_config,
        groups=runner.attn_groups[0],
        page_size=runner.input_batch.block_table[0].block_size,
        input_ids=runner.input_ids.gpu,
        positions=runner.positions,
        graph_of=graph_of,
        starts=starts.to(runner.device),
        starts_cpu=starts,
    )


Rows = slice | list[int]
"""Sequences of the batch that draft. All of them are a slice: nothing of theirs is copied, and no
device is asked.
"""
GREEDY_BELOW = 1e-5
"""As in the engine's sampler: a lower temperature is greedy."""


@dataclass(frozen=True, kw_only=True)
class DraftSampler:
    """Chooses drafts as the engine will choose the target's tokens, where that is cheap, for the
    rows that draft.

    Temperature, top-k and top-p are the request's own. Penalties, bad words and the like change the
    target's distribution only: the engine's rejection sampling makes up for any difference, so they
    cost acceptance and nothing else. Drafted tokens of a seeded request draw from its generator.
    `temperature_B1` is None where every token is the likeliest.
    """

    temperature_B1: Tensor | None
    is_greedy_B: Tensor | None
    top_k_B: Tensor | None
    top_p_B: Tensor | None
    generators: dict[int, torch.Generator]

    @staticmethod
    def of(
        metadata: SamplingMetadata,
        rows: Sequence[int],
        where: Rows,
        *,
        is_probabilistic: bool,
    ) -> DraftSampler:
        if metadata.all_greedy or not is_probabilistic:
            return DraftSampler(
                temperature_B1=None,
                is_greedy_B=None,
                top_k_B=None,
                top_p_B=None,
                generators={},
            )

        def of_rows(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            return values[where]

        assert metadata.temperature is not None
        temperature_B = metadata.temperature[where]
        is_greedy_B = temperature_B < GREEDY_BELOW
        generators = {}
        for i, row in enumerate(rows):
            if row in metadata.generators:
                generators[i] = metadata.generators[row]
        greedy_B = is_greedy_B
        if metadata.all_random:
            greedy_B = None
        return DraftSampler(
            temperature_B1=torch.where(is_greedy_B, 1.0, temperature_B)[:, None],
            is_greedy_B=greedy_B,
            top_k_B=of_rows(metadata.top_k),
            top_p_B=of_rows(metadata.top_p),
            generators=generators,
        )

    def choose(self, logits_BV: Tensor) -> tuple[Tensor, Tensor | None]:
        """The tokens [B], and the distributions that they were drawn from (None where each is the
        likeliest).
        """
        best_B = logits_BV.argmax(dim=-1)
        if self.temperature_B1 is None:
            return best_B, None
        scaled_BV = apply_top_k_top_p(
            logits_BV.float() / self.temperature_B1,
            self.top_k_B,
            self.top_p_B,
        )
        draft_BV = scaled_BV.softmax(dim=-1)
        noise_BV = torch.empty_like(draft_BV).exponential_()
        for row, generator in self.generators.items():
            noise_BV[row].exponential_(generator=generator)
        token_B = (draft_BV / noise_BV).argmax(dim=-1)
        if self.is_greedy_B is not None:
            token_B = torch.where(self.is_greedy_B, best_B, token_B)
        return token_B, draft_BV


@dataclass(frozen=True, kw_only=True)
class BatchProposal:
    """Drafted tokens of each sequence of the batch, maybe none; and the distributions [B, T, V]
    they were drawn from, with the requests whose these are, where tokens were not certain."""

    token_ids: list[list[int]]
    probabilities: Tensor | None = None
    request_ids: list[str] | None = None


class SparseDraft:
    """The proposer that `speculative_config` names, in the V1 runner. Built with it, before weights
    load.
    """

    def __init__(self, config: VllmConfig) -> None:
        """Raises ConfigError for settings and models that are not supported."""
        self.settings = checked_settings(config)
        speculative = config.speculative_config
        assert speculative is not None
        self.gamma = speculative.num_speculative_tokens
        self._is_probabilistic = speculative.draft_sample_method == "probabilistic"
        if config.device_config.device_type == "cpu":
            repair_cpu_sampling()
        self._model: Any = None
        self._passes: DraftPasses | None = None
        self._config = config
        self._means: dict[str, PageMeans] = {}
        self._selector: PageSelector | None = None

    def load_model(self, target: Any) -> None:
        """Called by the runner with the target, once it is loaded: there is no other model."""
        self._model = target
        if self.settings.draft_method == "topk":
            self._means = watch_layers(self._config)

    def propose(
        self,
        runner: Any,
        sampled_token_ids: Sequence[Sequence[int]],
        sampling: SamplingMetadata,
    ) -> BatchProposal:
        """Drafts for each sequence that has just been given tokens; those still prefilling have
        none.
        """
        rows = []
        for row, tokens in enumerate(sampled_token_ids):
            if tokens:
                rows.append(row)
        none: list[list[int]] = [[] for _ in sampled_token_ids]
        if not rows:
            return BatchProposal(token_ids=none)
        where: Rows
        if len(rows) < len(none):
            where = rows
        else:
            where = slice(len(rows))
        cached_B = runner.input_batch.num_tokens_no_spec[where].astype(np.int64) - 1
        table = self.settings.gamma_table
        if table:
            gamma = table.choose(
                batch_size=len(rows), context_len=max(cached_B.mean(), 1.0)
            )
        else:
            gamma = self.gamma
        if gamma == 0:
            return BatchProposal(token_ids=none)
        pending_B = [sampled_token_ids[row][-1] for row in rows]
        sampler = DraftSampler.of(
            sampling, rows, where, is_probabilistic=self._is_probabilistic
        )
        tokens_BT, probabilities_BTV = self._draft(
            runner,
            where,
            cached_B,
            pending_B,
            gamma,
            sampler,
        )
        for row, tokens in zip(rows, tokens_BT.tolist(), strict=True):
            none[row] = tokens
        if probabilities_BTV is None:
            return BatchProposal(token_ids=none)
        request_ids = [runner.input_batch.req_ids[row] for row in rows]
        return BatchProposal(
            token_ids=none, probabilities=probabilities_BTV, request_ids=request_ids
        )

    def _draft(
        self,
        runner: Any,
        where: Rows,
        cached_B: np.ndarray,
        pending_B: Sequence[int],
        gamma: int,
        sampler: DraftSampler,
    ) -> tuple[Tensor, Tensor | None]:
        if self._passes is None:
            self._passes = _passes_of(runner)
        passes = self._passes
        pages = torch.from_numpy(
            runner.input_batch.block_table[0].block_table.np[where]
        )
        block = passes.block(pages, torch.from_numpy(cached_B), self.settings, gamma)
        if self.settings.draft_method == "topk":
            if isinstance(where, slice):
                row_B = torch.arange(len(cached_B))
            else:
                row_B = torch.tensor(where)
            block = self._selector_of(runner, passes).choosing(
                block,
                pages,
                torch.from_numpy(cached_B),
                row_B,
            )
        token_B = torch.tensor(pending_B, dtype=torch.int32).to(
            runner.device, non_blocking=True
        )
        tokens = []
        distributions = []
        for step in range(gamma):
            hidden_BH = block.forward(self._model, step, token_B)
            token_B, draft_BV = sampler.choose(self._model.compute_logits(hidden_BH))
            tokens.append(token_B)
            if draft_BV is not None:
                distributions.append(draft_BV)
        drafts_BT = torch.stack(tokens, dim=1)
        if not distributions:
            return drafts_BT, None
        return drafts_BT, torch.stack(distributions, dim=1)

    def _selector_of(self, runner: Any, passes: DraftPasses) -> PageSelector:
        assert self._means, "an engine chooses pages only if it was started with topk"
        if self._selector is None or self._selector.settings is not self.settings:
            self._selector = PageSelector(
                self._means,
                self.settings,
                passes,
                num_rows=runner.max_num_reqs,
                max_gamma=self.gamma,
            )
        return self._selector
