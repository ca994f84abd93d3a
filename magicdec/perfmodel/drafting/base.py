"""The interface of a draft to a step, answered for one that drafts nothing."""

import math
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.kernels.op import ForwardTime, Op, fixed
from magicdec.perfmodel.setup import ModelSetup, Setup
from magicdec.specs.engine import EngineProfile
from magicdec.specs.engine_path import StepPath
from magicdec.specs.engine_tables import EngineDraft
from magicdec.specs.model import ModelSpec
from magicdec.specs.parallel import Parallelism
from magicdec.specs.precision import Precision


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a microbatch: its sequences, their cached tokens, and what is drafted."""

    setup: Setup
    batch: Array
    kv_len: Array
    """Cached tokens of each sequence."""
    draft_kv_len: Array
    """Tokens that one draft step reads."""
    gamma: Array
    tp: Array
    uniform: Any = 1.0
    """The chance that all sequences have drafts of gamma tokens, or none has one."""

    @property
    def verified(self) -> Array:
        """Tokens that are verified."""
        return self.batch * (self.gamma + 1.0)


class KeptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that memory must hold: sequences of `length` tokens, the block in flight included."""

    batch: Array
    length: Array
    budget: Any
    gamma: Array
    tp: Array


class PrefillPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts that are prefilled together on one group of tp ranks."""

    setup: Setup
    batch: Array
    prompt_len: Array
    tp: Array
    budget: Any

    @property
    def tokens(self) -> Array:
        return self.batch * self.prompt_len


StagedPass = tuple[ForwardTime, Array, Array]
"""A pass through all stages, how often it runs in a step, and its tokens per sequence."""


class Draft(msgspec.Struct, frozen=True):
    """A draft of one setup. This one drafts nothing."""

    setup: ModelSetup
    drafts: ClassVar[bool] = False
    """Whether anything is drafted."""
    knows_every_token: ClassVar[bool] = False
    """Whether it has a cache of all tokens, so it also runs in steps that draft nothing."""
    has_prefill: ClassVar[bool] = False
    """Whether it adds work to a prompt's prefill."""

    # The network
    @property
    def network(self) -> ModelSpec:
        """The network that drafts: the target, one of its layers with its own input, or another
        model."""
        return self.setup.model

    @property
    def precision(self) -> Precision:
        """The draft's formats."""
        own = self.setup.precision
        if self.network is not self.setup.model:
            own = own.of_its_type
        return self.setup.draft_precision or own

    @property
    def spread(self) -> Parallelism:
        """Where the draft runs: the target itself in all stages, any other on the last."""
        return self.setup.spread

    @property
    def tp_size(self) -> int | None:
        """Largest number of ranks that the draft runs on. None: all."""
        return self.setup.speculation.draft_tp_size

    def ranks(self, tp_size: Any) -> Array:
        """Ranks that the draft runs on."""
        tp = np.asarray(tp_size, dtype=np.float64)
        if self.tp_size is None:
            return tp
        return np.minimum(tp, float(self.tp_size))

    @property
    def own(self) -> EngineDraft:
        """The engine's profile of this kind of draft."""
        speculation = self.setup.speculation
        return self.setup.engine.draft(speculation.draft, speculation.draft_method)

    @property
    def path(self) -> StepPath:
        """The path that the engine's steps take with this draft."""
        speculation = self.setup.speculation
        return self.setup.engine.path(speculation.draft, speculation.draft_method)

    @property
    def is_by_sequence(self) -> bool:
        """Whether a step verifies drafts of some sequences and not of others."""
        return False

    @property
    def constants(self) -> EngineProfile:
        """The engine's constants in steps with this draft, as it schedules them."""
        speculation = self.setup.speculation
        return self.setup.engine.scheduling(speculation.draft, speculation.draft_method)

    # Its cache
    @property
    def has_budget(self) -> bool:
        """Whether it reads at most a budget of the cache."""
        return False

    def tokens_read(self, kv_len: Any, budget: Any) -> Array:
        """Cached tokens that one draft step reads per sequence."""
        return np.asarray(kv_len, dtype=np.float64)

    def context_seen(self, kv_len: Any, budget: Any) -> Array:
        """Context at which its acceptance is that of a draft with its whole cache."""
        return np.asarray(kv_len, dtype=np.float64)

    # Memory
    def weights_bytes(self, tp: Array) -> Any:
        """One rank's weights of its own."""
        return 0.0

    def cache_bytes(self, kept: KeptTokens) -> Any:
        """One rank's cache of its own."""
        return 0.0

    def workspace_bytes(self, kept: KeptTokens) -> Any:
        """One rank's buffers in a step, besides those of any verification."""
        return 0.0

    def states_of(self, gamma: Array) -> Any:
        """Recurrent states that the target keeps per sequence.

        The state after each token of a block is kept, to go back to the one that a rejection needs.
        """
        if not self.drafts:
            return 1.0
        return gamma + 1.0 + self.setup.engine.paths.states_beside

    # Time
    def step(self, block: Block, query_len: Any = 1.0) -> ForwardTime:
        """One draft step of `query_len` tokens, on average over a block, whose own drafts it also
        reads."""
        return ForwardTime(())

    def upkeep(self, block: Block) -> list[Op]:
        """Operations once per speculative step."""
        return []

    def without_draft(self, block: Block) -> list[Op]:
        """Operations that it adds to an autoregressive step for which it drafted nothing."""
        return []

    def prefill(self, prompt: PrefillPrompts) -> list[ForwardTime | Op]:
        """Operations that it adds to the prefill of prompts."""
        return []

    def staged_passes(self, block: Block) -> list[StagedPass]:
        """Its passes that go through all stages."""
        return []

    @property
    def catches_up(self) -> bool:
        """Whether it processes its last drafted token too where all drafts were accepted."""
        return False


def launches(
    setup: ModelSetup, path: StepPath, pass_s: Array, uniform: Any
) -> list[Op]:
    """The host's launches of a target's pass of `pass_s` outside whole graphs; `uniform`: the chance
    that all sequences verify as many tokens.

    The host is ahead of the device unless it takes longer over a layer:

        max(layers · host_layer - pass, 0)

    Another law of piecewise passes, per pass and per layer whatever the device takes, fits measured
    servers as well: the mean of both is taken, and half their difference is the spread.
    """
    graphs = setup.engine.graphs
    outside = np.asarray(1.0)
    if path.graph_mode == "whole":
        return []
    if path.graph_mode == "uniform":
        outside = 1.0 - np.asarray(uniform, dtype=np.float64)
    layers = setup.model.num_hidden_layers
    host_layer_s = graphs.piecewise_host_layer_s
    if path.graph_mode == "none":
        host_layer_s = graphs.eager_host_layer_s
    waiting_s = np.maximum(layers * host_layer_s - pass_s, 0.0)
    otherwise_s = graphs.piecewise_s(layers)
    middle_s = (waiting_s + otherwise_s) / 2.0
    if path.graph_mode == "none":
        middle_s = waiting_s
    op = fixed("launches", "overhead", outside * middle_s)
    spread_s = outside * np.abs(otherwise_s - middle_s)
    return [replace(op, spread_s=spread_s)]


def uncaptured(setup: Setup, layers: int) -> list[Op]:
    """The time that a pass adds where its attention may keep it out of captured graphs."""
    chance = setup.outside_graphs
    if not chance:
        return []
    engine = setup.engine
    seconds = (
        engine.graphs.uncaptured_pass_s
        + layers * engine.graphs.prefill_layer_overhead_s
    )
    op = fixed("uncaptured", "overhead", chance * seconds)
    error = math.hypot(
        math.sqrt(chance * (1.0 - chance)), chance * engine.graphs.uncaptured_error
    )
    spread_s = np.asarray(error * seconds)
    return [replace(op, spread_s=spread_s)]
