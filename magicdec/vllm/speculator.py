"""The draft in the engine's V2 model runner: the same passes as in V1 (draft.py), without waiting for the device.

The V2 runner samples, verifies and schedules without knowing on the host how many drafts were accepted. So everything
about a block is computed on the device, from the runner's own state: lengths, the window's pages, slots. Shapes depend
on the batch and the budget alone. Gamma is the scheduler's, which looks a plan's table up one step ahead (patches.py).

A row that still prefills drafts like the others, at position 0, and stores nothing. Distributions are kept as the
engine's own speculators keep them: logits before temperature, without the request's top-k and top-p.

Shape suffixes: B sequences of the batch, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu.attn_utils import init_attn_backend
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.states import RequestState

from magicdec.vllm.draft_pass import PADDING_SLOT, DraftPasses, check_cache
from magicdec.vllm.page_scores import PageSelector
from magicdec.vllm.support import checked_settings


class SparseSpeculator(DraftModelSpeculator):  # type: ignore[misc]  # untyped where vLLM is not installed
    """Built with the runner, before weights load; the runner hands it model, caches and buffers as it makes them."""

    def __init__(self, config: VllmConfig, device: torch.device, states: RequestState) -> None:
        """Raises ConfigError for what is not supported."""
        self.settings = checked_settings(config)
        super().__init__(config, device)
        self._states = states
        self._steps = torch.arange(self.num_speculative_steps, device=device)
        self._graph_sizes: list[int] = []
        self._has_graphs = False
        self._selector: PageSelector | None = None

    def load_draft_model(self, target_model: Any, *_: Any) -> Any:
        """There is no other model."""
        return target_model

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        self.supports_mm_inputs = False  # drafted tokens are text

    def set_attn(
        self, _: Any, kv_cache_config: Any, block_tables: BlockTables, target_input_buffers: InputBuffers, *__: Any
    ) -> None:
        """Builders of metadata are its own: those of the target keep what its graphs read."""
        check_cache(kv_cache_config)
        self.attn_groups, *_ = init_attn_backend(kv_cache_config, self.vllm_config, self.device)
        starts = torch.arange(self.max_num_reqs + 1, dtype=torch.int32)
        self._tables = block_tables
        self._passes = DraftPasses(
            config=self.vllm_config,
            groups=self.attn_groups[0],
            page_size=block_tables.block_sizes[0],
            input_ids=target_input_buffers.input_ids,
            positions=target_input_buffers.positions,
            graph_of=self._graph_of,
            starts=starts.to(self.device),
            starts_cpu=starts,
        )

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """The target's piecewise graphs serve the draft as well."""
        if cudagraph_mode.has_piecewise_cudagraphs():
            self._graph_sizes = sorted(self.vllm_config.compilation_config.cudagraph_capture_sizes or ())

    def capture(self) -> None:
        """Called once the target's graphs are captured."""
        self._has_graphs = True

    def _graph_of(self, count: int) -> tuple[Any, int]:
        sizes = [size for size in self._graph_sizes if size >= count] if self._has_graphs else []
        return (CUDAGraphMode.PIECEWISE, sizes[0]) if sizes else (CUDAGraphMode.NONE, count)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Any,
        last_sampled: Tensor,
        next_prefill_tokens: Any,
        temperature: Tensor,
        seeds: Tensor,
        *,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **others: Any,
    ) -> Tensor:
        """Drafts [B, gamma_max], of which the first `num_speculative_tokens` are meant."""
        del (
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_rejected,
            next_prefill_tokens,
            others,
        )
        gamma = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        drafts_BT: Tensor = self.draft_tokens[: input_batch.num_reqs]
        if dummy_run or gamma == 0:
            return drafts_BT.fill_(PADDING_SLOT)
        self._copy_request_inputs(input_batch.num_reqs, input_batch.idx_mapping, temperature, seeds)
        index_B, is_drafting_B = input_batch.idx_mapping, num_sampled > 0
        cached_B = torch.where(is_drafting_B, self._states.num_computed_tokens.gpu[index_B].long(), 0)
        pages = self._tables.block_tables[0].gpu[index_B]
        block = self._passes.block(pages, cached_B, self.settings, gamma)
        block.slots_TB.masked_fill_(~is_drafting_B, PADDING_SLOT)
        if self.settings.draft_method == "topk":  # on a CPU, whose tensors are the host's
            self._selector = self._selector or PageSelector(self._passes.layers, page_size=self._passes.page_size)
            names = input_batch.req_ids
            block = self._selector.choosing(block, pages, cached_B.numpy(), self.settings, names, present=names)
        token_B = last_sampled.view(-1)[index_B]
        rows_B = torch.where(is_drafting_B, index_B, -1)  # a row of nobody keeps no distribution
        for step in range(gamma):
            hidden_BH = block.forward(self.model, step, token_B.int())
            token_B = self.sample_draft(
                hidden_BH,
                block.positions_TB[step],
                rows_B,
                self.temperature,
                self.seeds,
                self._steps[step],
                self.draft_logits,
            )
            drafts_BT[:, step] = token_B
        return drafts_BT
