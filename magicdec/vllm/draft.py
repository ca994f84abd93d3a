"""The draft: the target's own forward pass over a few pages of the target's own cache, one token at a time.

After each step of the engine every sequence that has a new token drafts from it. The pending token has no keys and
values yet: the first draft pass computes them, at their true position and slot, and so do the others for the drafts
before them. The verification that follows writes all of these slots anew, from the same tokens but over the full cache,
before it reads them: nothing of a draft is left, whether it was accepted or not.

Shape suffixes: B sequences that draft, T drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import vllm
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.sample.metadata import SamplingMetadata

from magicdec.errors import ConfigError
from magicdec.vllm.draft_pass import DraftPasses
from magicdec.vllm.page_scores import PageSelector
from magicdec.vllm.pages import slots_of, streaming_window
from magicdec.vllm.patches import repair_cpu_sampling
from magicdec.vllm.sampling import DraftSampler
from magicdec.vllm.settings import check_pages, num_sink_pages, read_settings
from magicdec.vllm.support import check_supported, check_version


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafted tokens of each sequence of the batch, maybe none; and the distributions [B, T, V] they were drawn from,
    with the requests whose these are, where tokens were not certain."""

    token_ids: list[list[int]]
    probabilities: Tensor | None = None
    request_ids: list[str] | None = None


class SparseDraft:
    """The proposer that `speculative_config` names. Built with the model runner, before weights load."""

    def __init__(self, config: VllmConfig) -> None:
        """Raises ConfigError for what is not supported."""
        check_version(vllm.__version__)
        check_supported(config)
        self.settings = read_settings(config.additional_config)
        speculative = config.speculative_config
        assert speculative is not None
        self.gamma = speculative.num_speculative_tokens
        check_pages(self.settings, page_size=config.cache_config.block_size, max_gamma=self.gamma)
        self._is_probabilistic = speculative.draft_sample_method == "probabilistic"
        if config.device_config.device_type == "cpu":
            repair_cpu_sampling()
        elif self.settings.draft_method != "streamingllm":
            raise ConfigError(
                f"draft method {self.settings.draft_method} in vLLM runs on CPUs only yet; use streamingllm"
            )
        self._model: Any = None
        self._passes: DraftPasses | None = None
        self._selector: PageSelector | None = None

    def load_model(self, target: Any) -> None:
        """Called by the runner with the target, once it is loaded: there is no other model."""
        self._model = target

    def propose(self, runner: Any, sampled_token_ids: Sequence[Sequence[int]], sampling: SamplingMetadata) -> Proposal:
        """Drafts for each sequence that has just been given tokens; those still prefilling have none."""
        rows = [row for row, tokens in enumerate(sampled_token_ids) if tokens]
        none: list[list[int]] = [[] for _ in sampled_token_ids]
        if not rows:
            return Proposal(token_ids=none)
        cached_B = runner.input_batch.num_tokens_no_spec[rows].astype(np.int64) - 1
        gamma = self._choose_gamma(len(rows), float(cached_B.mean()))
        if gamma == 0:
            return Proposal(token_ids=none)
        pending_B = [sampled_token_ids[row][-1] for row in rows]
        sampler = DraftSampler.of(sampling, rows, is_probabilistic=self._is_probabilistic)
        tokens_BT, probabilities_BTV = self._draft(runner, rows, cached_B, pending_B, gamma, sampler)
        for row, tokens in zip(rows, tokens_BT.tolist(), strict=True):
            none[row] = tokens
        if probabilities_BTV is None:
            return Proposal(token_ids=none)
        request_ids = [runner.input_batch.req_ids[row] for row in rows]
        return Proposal(token_ids=none, probabilities=probabilities_BTV, request_ids=request_ids)

    def _choose_gamma(self, batch_size: int, context_len: float) -> int:
        """The plan's for the sequences that decode now, or the same always."""
        table = self.settings.gamma_table
        return self.gamma if table is None else table.choose(batch_size=batch_size, context_len=max(context_len, 1.0))

    def _draft(
        self,
        runner: Any,
        rows: Sequence[int],
        cached_B: np.ndarray,
        pending_B: Sequence[int],
        gamma: int,
        sampler: DraftSampler,
    ) -> tuple[Tensor, Tensor | None]:
        if self._passes is None:
            self._passes = DraftPasses(runner)
        passes = self._passes
        pages = runner.input_batch.block_table[0].block_table.np[rows]
        positions_BT = cached_B[:, None] + np.arange(gamma)
        size, sink_pages = passes.page_size, num_sink_pages(self.settings.num_sink_tokens, page_size=passes.page_size)
        window = streaming_window(
            pages, cached_B, budget=self.settings.draft_budget, sink_pages=sink_pages, page_size=size, gamma=gamma
        )
        choices = None
        if self.settings.draft_method == "topk":
            request_ids = runner.input_batch.req_ids
            self._selector = self._selector or PageSelector(passes.layers, page_size=size)
            self._selector.observe([request_ids[row] for row in rows], pages, cached_B, present=request_ids)
            choices = self._selector.choices(
                pages, cached_B, window.num_left_out, sink_pages=sink_pages, num_pages=window.table.shape[1]
            )
        block = passes.block(
            positions_BT=positions_BT,
            slots_BT=slots_of(pages, positions_BT, page_size=size),
            table=window.table,
            lengths_BT=positions_BT + 1 - window.num_left_out[:, None] * size,
            choices=choices,
        )
        token_B = torch.tensor(pending_B, dtype=torch.int32).to(runner.device, non_blocking=True)
        tokens, distributions = [], []
        for step in range(gamma):
            hidden_BH = block.forward(self._model, step, token_B)
            token_B, draft_BV = sampler.choose(self._model.compute_logits(hidden_BH))
            tokens.append(token_B)
            if draft_BV is not None:
                distributions.append(draft_BV)
        return torch.stack(tokens, dim=1), torch.stack(distributions, dim=1) if distributions else None
