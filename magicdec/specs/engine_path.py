"""The path that an engine's steps take: its model runner, captured graphs, padding and scheduling.

`EngineProfile.path` is the one answer to how a draft's steps run; whatever prices or names them asks
it. `EngineProfile.as_set` gives the profile of a server with options that change it.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from magicdec.specs.engine_tables import GRAPH_MODES, GraphMode


class StepPath(NamedTuple):
    """How the steps of one kind of draft run."""

    runner: str
    """Model runner; "" where the engine has one."""
    other_runner: str
    """That of mixtures of experts and of models with recurrent states, where it is another; else ""."""
    graph_mode: GraphMode
    rows: Literal["padded", "ragged"]
    is_asynchronous: bool
    """Whether the next step is scheduled while one runs."""
    search: Literal["none", "host", "device"]
    note: str = ""
    """A remark on it that changes no price."""

    @property
    def is_padded(self) -> bool:
        """Whether a sequence without a draft is verified as one with gamma drafts."""
        return self.rows == "padded"

    @property
    def words(self) -> str:
        """The path in words, without its model runner."""
        words = "; ".join(self.sentences()) or "overlapped, whole graphs"
        if self.note:
            return f"{words}; {self.note}"
        return words

    @property
    def runners(self) -> str:
        """The model runner in words: "V2 (V1 for mixtures and hybrids)"."""
        if self.other_runner:
            return f"{self.runner} ({self.other_runner} for mixtures and hybrids)"
        return self.runner

    @property
    def with_runner(self) -> str:
        """The path in words, its model runner first."""
        if self.runner:
            return f"{self.runners} runner: {self.words}"
        return self.words

    def sentences(self) -> Iterator[str]:
        """Sentences on what sets the path apart from overlapped scheduling with whole graphs."""
        if self.search != "none":
            padding = "a sequence without a match is verified as one token"
            if self.is_padded:
                padding = (
                    "every sequence is verified with gamma drafts, found or filled in"
                )
            yield f"searched on the {self.search}; {padding}"
        if not self.is_asynchronous:
            yield "without asynchronous scheduling"
        if self.graph_mode == "uniform":
            yield "piecewise graphs unless every sequence has a draft"
        elif self.graph_mode == "piecewise":
            yield "piecewise graphs: whole graphs of decoding are off"
        elif self.graph_mode == "none":
            yield "no captured graphs"


class PathOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a server that change its paths, as its command says them."""

    enforce_eager: bool = False
    cudagraph_mode: str = ""
    """vLLM's: NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE; "" the default."""
    optimization_level: int | None = None
    """vLLM's -O."""
    is_synchronous: bool = False
    """--no-async-scheduling; SGLang's --disable-overlap-schedule."""
    runner: str = ""
    """"V1" or "V2", by VLLM_USE_V2_MODEL_RUNNER."""
    pp_size: int = 1
    has_microbatches: bool = False
    """Dual-batch overlap, which vLLM's V2 runner does not have."""
    captured_tokens: int | None = None
    """The largest captured size, in tokens."""
    attention_backend: str = ""
    """The target's attention backend, as the engine calls it; "" the default."""
    draft_attention_backend: str = ""
    """The draft's."""
    has_custom_all_reduce: bool = True
    """Whether the engine sums over ranks by its own kernels, not NCCL's."""
    context_ranks: int = 1
    """Ranks that share the tokens of caches which each would hold whole."""
    state_element_bytes: float | None = None
    """Bytes of one number of a recurrent state; None: the engine's."""
    frees_windows: bool = True
    """Whether tokens that left a layer's window give their memory back."""

    @property
    def graph_mode(self) -> GraphMode | None:
        """The graphs that are asked for. None: the engine's own."""
        mode = self.cudagraph_mode.upper()
        if self.enforce_eager or self.optimization_level == 0 or mode == "NONE":
            return "none"
        if mode == "PIECEWISE":
            return "piecewise"
        if mode == "FULL":
            return "whole"
        return None


def fewer_graphs(one: GraphMode, other: GraphMode) -> GraphMode:
    """The one of two modes that launches more."""
    return max(one, other, key=GRAPH_MODES.index)
