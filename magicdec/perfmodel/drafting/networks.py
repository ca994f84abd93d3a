"""Drafts by a network: the target itself, or another model of its vocabulary."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from magicdec.counts import Array
from magicdec.naming import METHODS
from magicdec.perfmodel.drafting.base import (
    Block,
    Draft,
    KeptTokens,
    PrefillPrompts,
    StagedPass,
    uncaptured,
)
from magicdec.perfmodel.footprint import (
    kv_bytes,
    sparse_kv_bytes_per_token,
    state_bytes,
    weights_bytes,
)
from magicdec.perfmodel.forward import Pass, forward_pass, prefill, share
from magicdec.perfmodel.kernels.gemm import streaming
from magicdec.perfmodel.kernels.links import Message, broadcast
from magicdec.perfmodel.kernels.op import (
    FP32_BYTES,
    Basis,
    ForwardTime,
    Op,
    Where,
    fixed,
)
from magicdec.perfmodel.setup import Setup, slots_of
from magicdec.perfmodel.vocabulary import sampling_ops
from magicdec.specs.model import ModelSpec
from magicdec.specs.parallel import Parallelism, valid_tp_sizes

TOKEN_BYTES = 8.0


class Network(Draft, frozen=True):
    """A draft that a network proposes token by token."""

    drafts: ClassVar[bool] = True
    has_prefill: ClassVar[bool] = True

    # Its cache
    @property
    def is_sparse(self) -> bool:
        """Whether it reads a part of the cache by its method."""
        return METHODS[self.setup.speculation.draft_method].sort == "sparse"

    @property
    def has_budget(self) -> bool:
        return self.is_sparse

    def tokens_read(self, kv_len: Any, budget: Any) -> Array:
        """The budget, or all where the cache is shorter."""
        tokens: Array = np.asarray(kv_len, dtype=np.float64)
        if not self.has_budget:
            return tokens
        return np.minimum(slots_of(budget), tokens)

    def tokens_kept(self, kept: KeptTokens) -> Array:
        """Slots of a sequence in its cache."""
        tokens = self.tokens_read(kept.length, kept.budget)
        if self.is_sparse:
            return tokens + kept.gamma + 1.0
        return tokens

    @property
    def selects(self) -> str:
        """When it selects tokens by their attention: "never", "after_prompt", "each_block"."""
        return METHODS[self.setup.speculation.draft_method].selects

    def workspace_bytes(self, kept: KeptTokens) -> Any:
        """The fp32 attention of each verified token, by layer and KV head, which it selects by."""
        if self.selects != "each_block":
            return 0.0
        heads: Array = np.asarray(0.0)
        for cache, count in self.setup.model.caches:
            if cache.is_sparsifiable:
                heads = heads + count * share(cache.num_heads, kept.tp)
        return heads * (kept.batch * (kept.gamma + 1.0)) * kept.length * FP32_BYTES

    # Time
    def at(self, setup: Setup) -> Where:
        """Device, engine and formats of its operations."""
        return Where(setup.hardware, setup.engine.of_draft, self.precision)

    def step(self, block: Block, query_len: Any = 1.0) -> ForwardTime:
        network = self.network_pass(block, query_len, logit_rows=block.batch)
        return network.plus(*self.beside_network(block, drawn=block.batch))

    def network_pass(
        self, block: Block, query_len: Any, *, logit_rows: Array
    ) -> ForwardTime:
        """The network's pass of a draft step, over half of the block's own drafts on average."""
        own = np.maximum(block.gamma - 1.0, 0.0) / 2.0
        return self.pass_after(own, block, query_len, logit_rows=logit_rows)

    def pass_after(
        self, own: Any, block: Block, query_len: Any, *, logit_rows: Array
    ) -> ForwardTime:
        """The network's pass when `own` tokens of the block are in its cache."""
        factor = 1.0
        if self.is_sparse:
            factor = self.setup.engine.kernels.draft_attention_factor
        return forward_pass(
            self.network,
            Pass(
                at=self.at(block.setup),
                batch=block.batch,
                query_len=query_len,
                kv_len=block.kv_len + own,
                full_kv_len=block.draft_kv_len + own,
                tp=self.ranks(block.tp),
                logit_rows=logit_rows,
                attention_factor=factor,
                spread=self.spread,
            ),
        )

    def beside_network(self, block: Block, *, drawn: Array) -> list[Op]:
        """A draft step's work outside the network's pass, which draws `drawn` tokens."""
        setup = block.setup
        ranks = self.ranks(block.tp)
        vocabulary = self.network.vocab_size
        operations = [
            *sampling_ops(setup, rows=drawn, ranks=ranks, vocab_size=vocabulary),
            fixed(
                "draft overhead",
                "overhead",
                self.constants.overheads.draft_step_overhead_s,
            ),
            *self.launches(block),
            *uncaptured(setup, self.network.num_hidden_layers),
        ]
        if (
            not setup.sampling.is_greedy
            and setup.engine.sampling.sampling_s_per_element is None
        ):
            shards = np.asarray(1.0)
            if setup.engine.sampling.vocabulary == "sharded":
                shards = ranks
            stored = block.batch * vocabulary * FP32_BYTES / shards
            operations.append(
                streaming("store distribution", setup.at, num_bytes=stored)
            )
        return operations

    def launches(self, block: Block) -> list[Op]:
        """The launches of its layers, where its passes are not captured."""
        return []

    def upkeep(self, block: Block) -> list[Op]:
        """The drafts sent to the ranks that do not draft."""
        setup = block.setup
        fewer = self.ranks(block.tp) < block.tp
        if not np.any(fewer):
            return []
        probabilities = 0.0
        if not setup.sampling.is_greedy:
            probabilities = setup.model.vocab_size * FP32_BYTES
        message = block.batch * block.gamma * (TOKEN_BYTES + probabilities)
        return [broadcast(setup.at, Message(message, np.where(fewer, block.tp, 1.0)))]

    @property
    def catches_up(self) -> bool:
        return self.setup.engine.paths.catch_up == "always"

    def own_launches(self) -> list[Op]:
        """Its layers' launches, of an engine that captures no pass of a whole model."""
        return self.launched(self.constants.overheads.draft_model_layer_s)

    def launched(self, layer_s: float) -> list[Op]:
        """Launches of each of its layers, where they take any time."""
        if not layer_s:
            return []
        basis = Basis(
            kernel="launches of a draft's layers",
            source="report",
            relative_error=self.constants.overheads.draft_model_layer_error,
        )
        launches_s = self.network.num_hidden_layers * layer_s
        return [fixed("draft launches", "overhead", launches_s, bases=(basis,))]


class SelfDraft(Network, frozen=True):
    """The target drafting for itself, with a part of its cache or other weights."""

    def beside_network(self, block: Block, *, drawn: Array) -> list[Op]:
        """A draft step's share of what its block costs once, too."""
        operations = super().beside_network(block, drawn=drawn)
        once_s = self.constants.overheads.draft_block_overhead_s
        if once_s:
            share_s = once_s / np.maximum(block.gamma, 1.0)
            operations.append(fixed("first draft", "overhead", share_s))
        return operations

    @property
    def keeps_cache(self) -> bool:
        """Whether it has KV of its own, besides the target's."""
        in_place = (
            self.setup.speculation.draft_method == "streamingllm"
            and self.setup.engine.paths.streaming_in_place
        )
        return self.is_sparse and not in_place

    def weights_bytes(self, tp: Array) -> Any:
        """A copy of the target's in other formats."""
        if self.precision.weight_dtype == self.setup.precision.weight_dtype:
            return 0.0
        return weights_bytes(
            self.network,
            self.precision,
            self.ranks(tp),
            self.spread,
        )

    def cache_bytes(self, kept: KeptTokens) -> Any:
        if not self.keeps_cache:
            return 0.0
        slots = self.tokens_kept(kept) + self.setup.engine.memory.spare_slots
        per_token = sparse_kv_bytes_per_token(
            self.network, self.precision, self.ranks(kept.tp)
        )
        of_stage = self.setup.spread.stage_share(self.setup.model.num_hidden_layers)
        return kept.batch * slots * per_token * of_stage

    def launches(self, block: Block) -> list[Op]:
        return self.own_launches()

    def upkeep(self, block: Block) -> list[Op]:
        """Verified tokens copied to its cache, and what a selection costs in each block: the scores
        of the block's last query written by each head, pooled, the best chosen, their KV gathered.
        """
        if not self.keeps_cache:
            return super().upkeep(block)
        setup = block.setup
        engine = setup.engine
        layers = setup.model.num_full_attention_layers
        per_token = sparse_kv_bytes_per_token(setup.model, self.precision, block.tp)
        operations = [fixed("upkeep", "overhead", engine.overheads.upkeep_base_s)]
        if engine.overheads.upkeep_s_per_token is not None:
            seconds = block.verified * engine.overheads.upkeep_s_per_token
            operations.append(fixed("upkeep", "elementwise", seconds))
        else:
            moved = 2.0 * block.verified * per_token
            operations.append(
                streaming("upkeep", setup.at, num_bytes=moved, num_kernels=layers)
            )
        if self.selects == "each_block":
            heads = setup.model.num_attention_heads / block.tp
            scores = block.batch * block.kv_len * heads * FP32_BYTES
            gathered = 2.0 * block.batch * block.draft_kv_len * per_token
            operations += [
                streaming(
                    "score extraction",
                    setup.at,
                    num_bytes=4.0 * scores,
                    num_kernels=3.0,
                    count=layers,
                ),
                streaming("gather", setup.at, num_bytes=gathered, num_kernels=layers),
            ]
        return [*operations, *super().upkeep(block)]

    def prefill(self, prompt: PrefillPrompts) -> list[ForwardTime | Op]:
        """Its cache copied, and selected by the observation window's scores over the prompt."""
        if not self.keeps_cache:
            return []
        setup = prompt.setup
        layers = setup.model.num_full_attention_layers
        per_token = sparse_kv_bytes_per_token(setup.model, self.precision, prompt.tp)
        kept = self.tokens_read(prompt.prompt_len, prompt.budget)
        copied = 2.0 * prompt.batch * kept * per_token
        operations: list[ForwardTime | Op] = [
            streaming("draft cache", setup.at, num_bytes=copied, num_kernels=layers)
        ]
        if self.selects != "never":
            window = setup.speculation.observation_window
            heads = setup.model.num_attention_heads / prompt.tp
            scores = prompt.tokens * window * heads * FP32_BYTES
            operations.append(
                streaming(
                    "selection",
                    setup.at,
                    num_bytes=4.0 * scores,
                    num_kernels=4.0,
                    count=layers,
                )
            )
        return operations

    def staged_passes(self, block: Block) -> list[StagedPass]:
        network = self.network_pass(block, 1.0, logit_rows=block.batch)
        return [(network, block.gamma, np.ones(()))]


class SeparateNetwork(Network, frozen=True):
    """A network beside the target, with weights and a cache of its own, on the last stage."""

    knows_every_token: ClassVar[bool] = True

    @property
    def spread(self) -> Parallelism:
        return dataclasses.replace(self.setup.spread, pp=1)

    def cache_bytes(self, kept: KeptTokens) -> Any:
        ranks = self.ranks(kept.tp)
        states = state_bytes(self.network, self.setup.engine, self.precision, ranks)
        return kept.batch * (
            self.cache_of_sequence(self.tokens_kept(kept), ranks) + states
        )

    def cache_of_sequence(self, tokens: Array, ranks: Array) -> Array:
        """One rank's slots for the keys and values of a sequence."""
        return kv_bytes(self.network, self.setup.engine, self.precision, tokens, ranks)

    def prefill(self, prompt: PrefillPrompts) -> list[ForwardTime | Op]:
        """The prompt read by this network too."""
        time = prefill(
            self.network,
            self.at(prompt.setup),
            batch=prompt.batch,
            prompt_len=prompt.prompt_len,
            tp=self.ranks(prompt.tp),
            spread=self.spread,
        )
        return [time]


class DraftModel(SeparateNetwork, frozen=True):
    """A smaller model of the target's vocabulary, with its whole cache or a part of it."""

    @property
    def network(self) -> ModelSpec:
        return self.setup.draft_model or self.setup.model

    @property
    def tp_size(self) -> int | None:
        own = self.setup.speculation.draft_tp_size
        if own is not None:
            return own
        return self.setup.engine.paths.standalone_draft_tp_size

    def ranks(self, tp_size: Any) -> Array:
        """All ranks, or the requested number. A model that these do not split evenly runs on the
        largest number that does."""
        ranks = super().ranks(tp_size)
        if not ranks.size or ranks.max() <= 1:
            return ranks
        multiple = self.setup.engine.sampling.vocabulary_multiple
        valid = valid_tp_sizes(self.network, int(ranks.max()), multiple)
        sizes = np.asarray(valid, dtype=np.float64)
        chosen: Array = sizes[np.searchsorted(sizes, ranks, side="right") - 1]
        return chosen

    def weights_bytes(self, tp: Array) -> Any:
        return weights_bytes(
            self.network,
            self.precision,
            self.ranks(tp),
            self.spread,
        )

    def launches(self, block: Block) -> list[Op]:
        return self.own_launches()

    @property
    def catches_up(self) -> bool:
        return self.setup.engine.paths.catch_up in ("always", "standalone")
