"""Heads on the target's hidden states: EAGLE, EAGLE-3, prediction modules, parallel heads."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.drafting.base import Block, KeptTokens, PrefillPrompts
from magicdec.perfmodel.drafting.networks import SeparateNetwork
from magicdec.perfmodel.footprint import expert_share, kv_bytes
from magicdec.perfmodel.forward import size
from magicdec.perfmodel.kernels.gemm import linear
from magicdec.perfmodel.kernels.op import ForwardTime, Op, fixed, merged
from magicdec.perfmodel.setup import Setup, slots_of
from magicdec.specs.layers import MLP, Layer
from magicdec.specs.mixers import Attention
from magicdec.specs.model import ModelSpec
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import PUBLISHED_HEADS, HeadSpec


class HeadDraft(SeparateNetwork, frozen=True):
    """A trained head that drafts token by token. EAGLE's input joins the target's last hidden state
    and the last token's embedding."""

    @property
    def described(self) -> HeadSpec:
        """The given trained head, or the usual published one."""
        speculation = self.setup.speculation
        if speculation.head is not None:
            return speculation.head
        return PUBLISHED_HEADS.get(speculation.draft_method, HeadSpec())

    @property
    def network(self) -> ModelSpec:
        return as_trained(
            self.setup.model.eagle_head,
            self.described,
            shares_vocabulary=self.setup.speculation.shares_vocabulary,
        )

    @property
    def precision(self) -> Precision:
        """16 bits also for a narrow target, unless said otherwise."""
        return self.setup.draft_precision or self.setup.precision.tables

    @property
    def has_budget(self) -> bool:
        """Whether its attention is cut to sinks and a window."""
        return self.setup.speculation.draft_budget is not None

    def tokens_read(self, kv_len: Any, budget: Any) -> Array:
        """The window, or all where it is longer."""
        tokens: Array = np.asarray(kv_len, dtype=np.float64)
        if not self.has_budget:
            return tokens
        return np.minimum(slots_of(budget), tokens)

    def context_seen(self, kv_len: Any, budget: Any) -> Array:
        """The window, beyond which the head sees nothing; a longer context does it no harm then."""
        return self.tokens_read(kv_len, budget)

    def tokens_kept(self, kept: KeptTokens) -> Array:
        """All; a window's slots and room for two blocks where the engine frees what left it."""
        length: Array = np.asarray(kept.length, dtype=np.float64)
        if not self.has_budget or self.setup.engine.paths.draft_window_cache == "all":
            return length
        slots = slots_of(kept.budget) + 2.0 * (kept.gamma + 1.0)
        return np.minimum(slots, length)

    def weights_bytes(self, tp: Array) -> Any:
        """Its layers, the projection of its input, and a vocabulary of its own; other tables are
        the target's."""
        network = self.network
        target = self.setup.model
        own = (
            sum(network.layer_parameters(layer) for layer in network.layers)
            + self.input_size * network.hidden_size
        )
        tables = (network.vocab_size, network.hidden_size)
        if tables != (target.vocab_size, target.hidden_size):
            own += network.vocab_size * network.hidden_size
        experts = network.expert_parameters
        ranks = self.ranks(tp)
        held = (own - experts) / ranks + experts * expert_share(
            network, ranks, self.spread
        )
        return held * self.precision.weight_bytes

    def cache_of_sequence(self, tokens: Array, ranks: Array) -> Array:
        """A slot for each of the target's tokens, whatever the head's window."""
        return kv_bytes(
            self.network,
            self.setup.engine,
            self.precision,
            tokens,
            ranks,
            is_head=True,
        )

    def launches(self, block: Block) -> list[Op]:
        """Its layers' launches, in versions that do not capture its passes."""
        return self.launched(self.constants.overheads.head_layer_s)

    def step(self, block: Block, query_len: Any = 1.0) -> ForwardTime:
        """Its share of the block's passes: the first takes in every verified token of the step
        before, accepted or not, and drafts one token; each of the others takes in the one drafted
        before."""
        gamma = np.maximum(block.gamma, 1.0)
        num_passes = gamma
        width = 1.0
        tree = self.setup.speculation.tree
        if tree is not None:
            num_passes = np.full_like(gamma, tree.num_steps)
            width = float(tree.top_k)
        first = self.pass_over(block, own=0.0, query_len=block.gamma + 1.0)
        later = self.pass_over(block, own=num_passes / 2.0, query_len=width)
        beside = self.beside_network(block, drawn=block.batch * width)
        passes = [
            *first.ops,
            *later.times(num_passes - 1.0).ops,
            self.set_up(),
            *(op.times(num_passes) for op in beside),
        ]
        return ForwardTime(merged(passes)).times(1.0 / gamma)

    def set_up(self) -> Op:
        """The time before the first pass of a block."""
        return fixed(
            "set-up", "overhead", self.constants.overheads.head_block_overhead_s
        )

    def pass_over(self, block: Block, *, own: Any, query_len: Any) -> ForwardTime:
        """One pass over this many tokens of each sequence, with its input."""
        network = self.pass_after(own, block, query_len, logit_rows=block.batch)
        return network.plus(*self.inputs(block, query_len))

    @property
    def input_size(self) -> int:
        """Numbers of a token's hidden state and embedding; and of the hidden state that goes back to
        a target with longer ones."""
        own, of_target = self.network.hidden_size, self.setup.model.hidden_size
        return (2 if own == of_target else 3) * of_target

    def inputs(self, block: Block, query_len: Any) -> list[Op]:
        """Hidden state and embedding of each token made one."""
        tokens = block.batch * query_len
        at = self.at(block.setup)
        hidden = self.network.hidden_size
        return [linear("fuse", at, m=tokens, n=hidden, k=self.input_size)]


class PredictionHeadDraft(HeadDraft, frozen=True):
    """Multi-token prediction: a layer that is published with the target, in its formats; who
    narrows the target later leaves it in 16 bits. Trained at the target's lengths, it gains no
    acceptance by a window, and loses next to none (SGLang's pull request 32673).
    """

    def context_seen(self, kv_len: Any, budget: Any) -> Array:
        return np.asarray(kv_len, dtype=np.float64)

    @property
    def network(self) -> ModelSpec:
        return self.setup.model.prediction_head

    @property
    def precision(self) -> Precision:
        own = self.setup.precision.of_its_type
        if self.setup.model.assistant is not None:
            return self.setup.draft_precision or own.tables
        published = self.setup.model.quantization
        is_published = (
            published is not None and published.weight_dtype == own.weight_dtype
        )
        is_converted = is_published or own.format.has_narrow_tables
        if own.weight_bytes < 1.0 and not is_converted:
            own = own.tables
        return self.setup.draft_precision or own


class Eagle3Draft(HeadDraft, frozen=True):
    """EAGLE-3: its layer projects hidden state and embedding to queries, keys and values; hidden
    states of three of the target's layers are made one for each verified token."""

    def inputs(self, block: Block, query_len: Any) -> list[Op]:
        hidden = self.network.hidden_size
        tokens = block.batch * query_len
        ((mixer, _),) = self.network.mixers
        heads = size(mixer.projections(hidden)[0].outputs, self.ranks(block.tp))
        return [
            linear("fuse", self.at(block.setup), m=tokens, n=heads, k=hidden),
            fixed("draft overhead", "overhead", self.own.draft_overhead_s),
        ]

    def upkeep(self, block: Block) -> list[Op]:
        hidden = self.setup.model.hidden_size
        at = self.at(block.setup)
        return [
            linear("fuse", at, m=block.verified, n=hidden, k=3.0 * hidden),
            fixed("step overhead", "overhead", self.own.step_overhead_s),
            *super().upkeep(block),
        ]


class ParallelEagleHead(Eagle3Draft, frozen=True):
    """P-EAGLE (arXiv 2602.01469): EAGLE-3 whose one pass takes in the verified tokens and gamma - 1
    masked ones behind them."""

    def step(self, block: Block, query_len: Any = 1.0) -> ForwardTime:
        """Each step's share of the block's one pass."""
        gamma = np.maximum(block.gamma, 1.0)
        drawn = block.batch * gamma
        tokens = block.gamma + gamma
        network = self.pass_after(gamma - 1.0, block, tokens, logit_rows=drawn)
        whole = network.plus(
            self.set_up(),
            *self.inputs(block, tokens),
            *self.beside_network(block, drawn=drawn),
        )
        return whole.times(1.0 / gamma)


class ParallelHead(HeadDraft, frozen=True):
    """A head that proposes a block in one pass of gamma masked positions and the last token."""

    def step(self, block: Block, query_len: Any = 1.0) -> ForwardTime:
        """Each step's share of the block's one pass."""
        drawn = block.batch * block.gamma
        network = self.network_pass(block, block.gamma + 1.0, logit_rows=drawn)
        whole = network.plus(self.set_up(), *self.beside_network(block, drawn=drawn))
        return whole.times(1.0 / np.maximum(block.gamma, 1.0))

    def upkeep(self, block: Block) -> list[Op]:
        taken_in = self.features(block.setup, tokens=block.verified, tp=block.tp)
        return [*taken_in, *super().upkeep(block)]

    def prefill(self, prompt: PrefillPrompts) -> list[ForwardTime | Op]:
        """Keys and values of the prompt, without a pass over it."""
        return [*self.features(prompt.setup, tokens=prompt.tokens, tp=prompt.tp)]

    def features(self, setup: Setup, *, tokens: Array, tp: Array) -> list[Op]:
        """How it takes in tokens of the text. Hidden states from one target layer per layer of its
        own are fused, and each of its layers computes keys and values from the result."""
        at = self.at(setup)
        network = self.network
        hidden = float(network.hidden_size)
        layers = float(network.num_hidden_layers)
        cached = 0
        for cache, count in network.caches:
            cached += count * cache.num_heads * cache.elements_per_token
        return [
            linear("fuse", at, m=tokens, n=hidden, k=layers * hidden),
            linear(
                "features", at, m=tokens, n=cached / layers / tp, k=hidden, count=layers
            ),
        ]


def as_trained(
    head: ModelSpec, described: HeadSpec, *, shares_vocabulary: bool
) -> ModelSpec:
    """A model's head with the layers, window and vocabulary that its publisher gave it."""
    layer = _as_shaped(head.layers[0], described)
    rows = head.vocab_size
    mixer = layer.mixer
    if (
        described.window is not None
        and isinstance(mixer, Attention)
        and mixer.mask == "full"
    ):
        windowed = msgspec.structs.replace(mixer, mask="window", span=described.window)
        layer = msgspec.structs.replace(layer, mixer=windowed)
    if described.vocab_size is not None and not shares_vocabulary:
        rows = min(rows, described.vocab_size)
    layers = (layer,) * described.num_layers
    return msgspec.structs.replace(head, layers=layers, vocab_size=rows)


def _as_shaped(layer: Layer, described: HeadSpec) -> Layer:
    """A layer with the heads and the width that a head's own configuration gives."""
    num_heads, num_kv_heads = described.num_heads, described.num_kv_heads
    if (
        num_heads is not None
        and num_kv_heads is not None
        and described.head_dim is not None
    ):
        attention = Attention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=described.head_dim,
        )
        layer = msgspec.structs.replace(layer, mixer=attention)
    if described.width is not None:
        layer = msgspec.structs.replace(layer, mlp=MLP(width=described.width))
    return layer
