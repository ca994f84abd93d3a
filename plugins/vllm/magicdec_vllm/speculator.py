"""The draft in the engine's V2 model runner: the same passes as in V1 (draft.py), without waiting
for the device.

The V2 runner samples, verifies and schedules without knowing on the host how many drafts were
accepted. So everything about a block is computed on the device, from the runner's own state:
lengths, the window's pages, slots. Shapes depend on the batch and the budget alone, so one captured
graph holds the whole block: its window, gamma passes and samplings. Gamma is the scheduler's, which
looks a plan's table up one step ahead (patches.py).

A row that still prefills drafts like the others, at position 0, and stores nothing. Distributions
are kept as the engine's own speculators keep them: logits before temperature, without the request's
top-k and top-p.

Shape suffixes: B sequences of the batch, H hidden size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu.attn_utils import init_attn_backend
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
)
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
    SpeculatorBatchDescriptor,
    SpeculatorCudaGraphManager,
)
from vllm.v1.worker.gpu.states import RequestState

from magicdec_vllm.draft_pass import DraftPasses, check_cache
from magicdec_vllm.page_scores import PageMeans, PageSelector, watch_layers
from magicdec_vllm.support import checked_settings

NOBODY = -1
"""A row that drafts for no request, in a graph larger than the batch or while a prompt is
prefilled.
"""


class SparseSpeculator(DraftModelSpeculator):  # type: ignore[misc]  # untyped without vLLM
    """Built with the runner, before weights load; the runner hands it model, caches and buffers as
    it makes them.
    """

    def __init__(
        self, config: VllmConfig, device: torch.device, states: RequestState
    ) -> None:
        """Raises ConfigError for settings and models that are not supported."""
        self.settings = checked_settings(config)
        super().__init__(config, device)
        self._states = states
        self._steps = torch.arange(self.num_speculative_steps, device=device)
        self._graph_sizes: list[int] = []
        self._has_graphs = False
        self._means: dict[str, PageMeans] = {}
        self._selector: PageSelector | None = None

    def load_draft_model(self, target_model: Any, *_: Any) -> Any:
        """There is no other model."""
        return target_model

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        self.supports_mm_inputs = False  # drafted tokens are text
        if self.settings.draft_method == "topk":
            self._means = watch_layers(self.vllm_config)

    def set_attn(
        self,
        _: Any,
        kv_cache_config: Any,
        block_tables: BlockTables,
        target_input_buffers: InputBuffers,
        *__: Any,
    ) -> None:
        """Builds metadata with builders of its own: the target's builders hold inputs of its
        captured graphs."""
        check_cache(kv_cache_config)
        self.attn_groups, *_ = init_attn_backend(
            kv_cache_config, self.vllm_config, self.device
        )
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
        if self._means:
            rows, gamma = self.max_num_reqs, self.num_speculative_steps
            self._selector = PageSelector(
                self._means,
                self.settings,
                self._passes,
                num_rows=rows,
                max_gamma=gamma,
            )

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Whole blocks are captured for each gamma and size of batch, where attention can find its
        metadata anew within a graph. Other batches replay the target's piecewise graphs, pass by
        pass."""
        if cudagraph_mode.has_piecewise_cudagraphs():
            self._graph_sizes = sorted(
                self.vllm_config.compilation_config.cudagraph_capture_sizes or ()
            )
        is_whole = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        is_whole = is_whole and all(
            group.supports_draft_decode_metadata_update for group in self.attn_groups[0]
        )
        if is_whole:
            mode = CUDAGraphMode.FULL_DECODE_ONLY
        else:
            mode = CUDAGraphMode.NONE
        self._blocks = SpeculatorCudaGraphManager(
            self.vllm_config,
            self.device,
            mode,
            decode_query_len=1,
        )
        table = self.settings.gamma_table
        if table is None:
            gammas = [self.num_speculative_steps]
        else:
            gammas = [gamma for gamma in table.distinct_gammas if gamma]
        self._blocks._capture_descs = {
            mode: [
                SpeculatorBatchDescriptor(**vars(size), num_speculative_tokens=gamma)
                for size in sizes
                for gamma in gammas
            ]
            for mode, sizes in self._blocks._capture_descs.items()
        }

    def capture(self) -> None:
        """Called once the target's graphs are captured. Nothing is stored meanwhile: no row is
        anybody's.
        """
        self.idx_mapping.fill_(NOBODY)

        def block_of(
            size: BatchExecutionDescriptor, warmup: bool
        ) -> Callable[[CUDAGraphMode], None]:
            del warmup
            assert isinstance(size, SpeculatorBatchDescriptor)
            assert size.num_reqs is not None
            return lambda _: self._draft(
                size.num_reqs or 0, size.num_speculative_tokens
            )

        if self._blocks.needs_capture():
            CudaGraphManager.capture(
                self._blocks, block_of, "Capturing blocks of drafts"
            )
        self._has_graphs = True

    def _graph_of(self, count: int) -> tuple[Any, int]:
        at = bisect_left(self._graph_sizes, count)
        if not self._has_graphs or at == len(self._graph_sizes):
            return CUDAGraphMode.NONE, count
        return CUDAGraphMode.PIECEWISE, self._graph_sizes[at]

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
        """Drafts [B, gamma_max]; the first `num_speculative_tokens` count."""
        del (
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_rejected,
            last_sampled,
        )
        del next_prefill_tokens, others
        if num_speculative_tokens is None:
            gamma = self.num_speculative_steps
        else:
            gamma = num_speculative_tokens
        count = input_batch.num_reqs
        drafts_BT: Tensor = self.draft_tokens[:count]
        if dummy_run or gamma == 0:  # the runner overwrites what is not meant
            return drafts_BT
        self._copy_request_inputs(count, input_batch.idx_mapping, temperature, seeds)
        self.idx_mapping[:count].masked_fill_(num_sampled <= 0, NOBODY)
        size = self._blocks.dispatch(
            count, count, uniform_token_count=1, num_active_loras=0
        )
        size = self._blocks.specialize_spec_tokens(size, gamma)
        if size.cg_mode is CUDAGraphMode.FULL:
            self._blocks.run_fullgraph(size)
        else:
            self._draft(count, gamma)
        return drafts_BT

    def _draft(self, count: int, gamma: int) -> None:
        """Drafts for the first `count` rows, from and into tensors that stay where they are."""
        row_B = self.idx_mapping[:count]
        is_drafting_B = row_B >= 0
        index_B = row_B.clamp(min=0)
        cached_B = self._states.num_computed_tokens.gpu[index_B].long() * is_drafting_B
        pages = self._tables.block_tables[0].gpu[index_B]
        block = self._passes.block(
            pages, cached_B, self.settings, gamma, drafts_B=is_drafting_B
        )
        if self._selector is not None:
            block = self._selector.choosing(block, pages, cached_B, row_B)
        token_B = self._states.last_sampled_tokens.view(-1)[index_B]
        for step in range(gamma):
            hidden_BH = block.forward(self.model, step, token_B)
            token_B = self.sample_draft(
                hidden_BH,
                block.positions_TB[step],
                row_B,
                self.temperature,
                self.seeds,
                self._steps[step],
                self.draft_logits,
            )
            self.draft_tokens[:count, step] = token_B
