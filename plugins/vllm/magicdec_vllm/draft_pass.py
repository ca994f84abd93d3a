"""One forward pass of the target for one token of each sequence, over the pages that the draft may
read.

Metadata of attention is built by the engine's own builders, from true positions and slots, and from
the draft's table and lengths. On CUDA devices the pass replays the target's piecewise graphs where
it has some (attention stays outside of these), unless it is part of a captured block
(speculator.py). No GPU has run it yet. Both of the engine's model runners use this module
(draft.py: V1, speculator.py: V2).

Shape suffixes: B sequences that draft, T drafted tokens, H hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from magicdec.errors import ConfigError
from magicdec.specs.vllm_plugin import DraftSettings, num_sink_pages
from magicdec_vllm.pages import slots_of, streaming_window
from magicdec_vllm.support import SUPPORTED

PADDING_SLOT = -1
"""Keys and values of a token with this slot are not stored."""


def check_cache(config: KVCacheConfig) -> None:
    """Raises ConfigError where the cache is not one group of pages with the keys and values of
    every layer.
    """
    groups = config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        raise ConfigError(
            f"magicdec's draft in vLLM does not support hybrid KV caches; supported: {SUPPORTED}"
        )


@dataclass(frozen=True, kw_only=True)
class DraftPasses:
    """The parts of the engine that stay from block to block: layers, pages, builders of metadata, a
    graph's inputs.
    """

    config: VllmConfig
    groups: Sequence[Any]
    page_size: int
    input_ids: Tensor
    positions: Tensor
    """The buffers that a captured graph reads."""
    graph_of: Callable[[int], tuple[Any, int]]
    """For a number of tokens: the captured graph to replay, if any, and the number of tokens that
    it is for.
    """
    starts: Tensor
    starts_cpu: Tensor

    @cached_property
    def layers(self) -> dict[str, Any]:
        context = self.config.compilation_config.static_forward_context
        return {
            name: context[name] for group in self.groups for name in group.layer_names
        }

    @property
    def longest(self) -> int:
        return int(self.config.model_config.max_model_len)

    def block(
        self,
        table: Tensor,
        cached_B: Tensor,
        settings: DraftSettings,
        gamma: int,
        *,
        drafts_B: Tensor | None = None,
    ) -> DraftBlock:
        """The passes of one block for sequences of `cached_B` tokens, whose own pages are `table`
        [B, pages].

        All of it is computed where the tensors are, without waiting for a device. Positions past
        the engine's longest sequence are those of its end, and store nothing, as do rows that are
        not of `drafts_B`.
        """
        size = self.page_size
        sinks = num_sink_pages(settings.num_sink_tokens, page_size=size)
        window = streaming_window(
            table,
            cached_B,
            budget=settings.draft_budget,
            sink_pages=sinks,
            page_size=size,
            gamma=gamma,
        )
        wanted_TB = torch.arange(gamma, device=cached_B.device)[:, None] + cached_B
        positions_TB = wanted_TB.clamp(max=self.longest - 1)
        is_nowhere_TB = wanted_TB != positions_TB
        if drafts_B is not None:
            is_nowhere_TB |= ~drafts_B
        slots_TB = slots_of(table, positions_TB.T, page_size=size).T.contiguous()
        slots_TB.masked_fill_(is_nowhere_TB, PADDING_SLOT)
        graph, num_padded = self.graph_of(len(table))
        if num_padded > len(table):
            slots_TB = torch.nn.functional.pad(
                slots_TB,
                (0, num_padded - len(table)),
                value=PADDING_SLOT,
            )
        lengths_TB = torch.sub(positions_TB + 1, window.num_left_out, alpha=size).int()
        device = self.input_ids.device
        return DraftBlock(
            passes=self,
            graph=graph,
            positions_TB=positions_TB.to(device, non_blocking=True),
            slots_TB=slots_TB.to(device, non_blocking=True),
            table=window.table.int().to(device, non_blocking=True),
            lengths_TB=lengths_TB.to(device, non_blocking=True),
            num_left_out=window.num_left_out,
        )


@dataclass(frozen=True, kw_only=True)
class DraftBlock:
    """The passes of one block of drafts, one after another."""

    passes: DraftPasses
    graph: Any
    """Which kind of captured graph each pass replays."""
    positions_TB: Tensor
    slots_TB: Tensor
    """Where each pass stores keys and values, padded to the graph's number of tokens."""
    table: Tensor
    lengths_TB: Tensor
    """Slots that each step reads, its own token included."""
    num_left_out: Tensor
    choices: dict[str, Any] = field(default_factory=dict)
    """Each layer's own choice of pages (page_scores.py), made in the first pass, instead of `table`
    for all.
    """

    def forward(self, model: Any, step: int, token_B: Tensor) -> Tensor:
        """Hidden states [B, H] after `token_B`, whose keys and values are stored on the way."""
        passes = self.passes
        count = len(token_B)
        slots = self.slots_TB[step]
        positions = self.positions_TB[step]
        input_ids = token_B.int()
        num_padded = len(slots)
        # a graph reads the buffers that it was captured with
        if self.graph is not CUDAGraphMode.NONE:
            input_ids = passes.input_ids[:num_padded]
            positions = passes.positions[:num_padded]
            input_ids[:count], positions[:count] = token_B, self.positions_TB[step]
        with set_forward_context(
            self._metadata(step, count),
            passes.config,
            num_tokens=num_padded,
            cudagraph_runtime_mode=self.graph,
            batch_descriptor=BatchDescriptor(num_tokens=num_padded),
            slot_mapping=dict.fromkeys(passes.layers, slots),
        ):
            hidden_BH: Tensor = model(input_ids=input_ids, positions=positions)
        return hidden_BH[:count]

    @cached_property
    def _common(self) -> dict[str, Any]:
        """Metadata that all passes share. Its bounds of lengths are the table's, so no device is
        asked."""
        passes = self.passes
        count = len(self.table)
        most = self.table.shape[1] * passes.page_size
        return {
            "query_start_loc": passes.starts[: count + 1],
            "query_start_loc_cpu": passes.starts_cpu[: count + 1],
            "seq_lens_cpu_upper_bound": torch.full((count,), most, dtype=torch.int32),
            "num_reqs": count,
            "num_actual_tokens": count,
            "max_query_len": 1,
            "max_seq_len": most,
            "block_table_tensor": self.table,
            "is_prefilling": torch.zeros(count, dtype=torch.bool),
            "causal": True,
        }

    def _metadata(self, step: int, count: int) -> dict[str, Any]:
        """Attention metadata by layer."""
        slots = self.slots_TB[step, :count]
        common = CommonAttentionMetadata(
            **self._common,
            seq_lens=self.lengths_TB[step],
            slot_mapping=slots,
        )
        metadata: dict[str, Any] = {}
        for group in self.passes.groups:
            built = group.build_metadata_for_drafting(common, draft_index=step)
            metadata |= dict.fromkeys(group.layer_names, built)
        return {
            name: self._with_choice(name, each, step) for name, each in metadata.items()
        }

    def _with_choice(self, layer_name: str, metadata: Any, step: int) -> Any:
        """A layer's own metadata, with the table that it chose, or in the first pass will choose by
        its query.
        """
        choice = self.choices.get(layer_name)
        if choice is None:
            return metadata
        own = copy.copy(metadata)
        own.block_table = choice.table
        if step != 0:
            own.choice_of_pages = None
        else:
            own.choice_of_pages = choice
        return own
