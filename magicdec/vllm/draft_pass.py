"""One forward pass of the target for one token of each sequence, over the pages that the draft may read.

Metadata of attention is built by the engine's own builders, from true positions and slots, and from the draft's table
and lengths. On CUDA devices the pass replays the target's piecewise graphs where it has some (attention stays outside
of these); whole-step graphs are not used. That path is written and was never run: nothing was measured on a GPU yet.

Shape suffixes: B sequences that draft, T drafted tokens, H hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from magicdec.errors import ConfigError
from magicdec.vllm.support import SUPPORTED

PADDING_SLOT = -1
"""Keys and values of a token with this slot are not stored."""


class DraftPasses:
    """The engine's layers, page size and builders, which stay from block to block."""

    def __init__(self, runner: Any) -> None:
        """Raises ConfigError where the cache is not one group of pages with the keys and values of every layer."""
        groups = runner.kv_cache_config.kv_cache_groups
        if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
            raise ConfigError(f"magicdec's draft in vLLM does not support hybrid KV caches; supported: {SUPPORTED}")
        self.runner = runner
        self.groups = runner.attn_groups[0]
        self.layer_names = [name for group in self.groups for name in group.layer_names]
        context = runner.compilation_config.static_forward_context
        self.layers = {name: context[name] for name in self.layer_names}
        self.page_size: int = runner.input_batch.block_table[0].block_size
        starts = torch.arange(runner.max_num_reqs + 1, dtype=torch.int32)
        self.starts_cpu, self.starts = starts, starts.to(runner.device)

    def block(
        self,
        *,
        positions_BT: np.ndarray,
        slots_BT: np.ndarray,
        table: np.ndarray,
        lengths_BT: np.ndarray,
        choices: dict[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> DraftBlock:
        """The passes of one block. lengths_BT counts what each step reads, its own token included; `choices` gives each
        layer's table [B, pages] for its query in the first pass, instead of `table` for all."""
        device = self.runner.device
        return DraftBlock(
            passes=self,
            positions_TB=_to_device(positions_BT.T, np.int64, device),
            slots_TB=_to_device(slots_BT.T, np.int64, device),
            table=_to_device(table, np.int32, device),
            lengths_TB=_to_device(lengths_BT.T, np.int32, device),
            host_lengths_TB=torch.from_numpy(np.ascontiguousarray(lengths_BT.T, dtype=np.int32)),
            choices=choices or {},
        )


def _to_device(values: np.ndarray, dtype: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=dtype)).to(device, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class DraftBlock:
    """The passes of one block of drafts, one after another."""

    passes: DraftPasses
    positions_TB: Tensor
    slots_TB: Tensor
    table: Tensor
    lengths_TB: Tensor
    host_lengths_TB: Tensor
    choices: dict[str, Callable[[Tensor], Tensor]]
    _chosen: dict[str, Tensor] = field(default_factory=dict)

    def forward(self, model: Any, step: int, token_B: Tensor) -> Tensor:
        """Hidden states [B, H] after `token_B`, whose keys and values are stored on the way."""
        runner, count = self.passes.runner, len(token_B)
        mode, num_padded = self._graph(count)
        slots = self.slots_TB[step]
        if num_padded > count:
            slots = torch.nn.functional.pad(slots, (0, num_padded - count), value=PADDING_SLOT)
        input_ids, positions = token_B, self.positions_TB[step]
        if mode is not CUDAGraphMode.NONE:  # a graph reads the buffers that it was captured with
            input_ids, positions = runner.input_ids.gpu[:num_padded], runner.positions[:num_padded]
            input_ids[:count], positions[:count] = token_B, self.positions_TB[step]
        with set_forward_context(
            self._metadata(step, count),
            runner.vllm_config,
            num_tokens=num_padded,
            cudagraph_runtime_mode=mode,
            slot_mapping=dict.fromkeys(self.passes.layer_names, slots),
        ):
            hidden_BH: Tensor = model(input_ids=input_ids, positions=positions)
        return hidden_BH[:count]

    def _graph(self, count: int) -> tuple[Any, int]:
        """The captured graph to replay, if any, and the number of tokens that it is for."""
        runner = self.passes.runner
        if runner.device.type != "cuda":
            return CUDAGraphMode.NONE, count
        mode, descriptor = runner.cudagraph_dispatcher.dispatch(count, invalid_modes={CUDAGraphMode.FULL})
        return mode, descriptor.num_tokens

    def _metadata(self, step: int, count: int) -> dict[str, Any]:
        """Attention metadata by layer."""
        host_lengths = self.host_lengths_TB[step]
        common = CommonAttentionMetadata(
            query_start_loc=self.passes.starts[: count + 1],
            query_start_loc_cpu=self.passes.starts_cpu[: count + 1],
            seq_lens=self.lengths_TB[step],
            seq_lens_cpu_upper_bound=host_lengths,
            num_reqs=count,
            num_actual_tokens=count,
            max_query_len=1,
            max_seq_len=int(host_lengths.max()),
            block_table_tensor=self.table,
            slot_mapping=self.slots_TB[step],
            causal=True,
        )
        metadata: dict[str, Any] = {}
        for group in self.passes.groups:
            built = group.get_metadata_builder().build_for_drafting(common, draft_index=step)
            metadata |= dict.fromkeys(group.layer_names, built)
        return {name: self._with_choice(name, each) for name, each in metadata.items()} if self.choices else metadata

    def _with_choice(self, layer_name: str, metadata: Any) -> Any:
        """A layer's own metadata: with the table that it chose, or with the choice still to make."""
        own = copy.copy(metadata)
        if layer_name in self._chosen:
            own.block_table = self._chosen[layer_name]
        else:
            own.choose_pages = lambda query: self._choose(layer_name, query)
        return own

    def _choose(self, layer_name: str, query: Tensor) -> Tensor:
        self._chosen[layer_name] = self.choices[layer_name](query)
        return self._chosen[layer_name]
