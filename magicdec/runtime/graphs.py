"""A decoding step in parts: each is timed, and as a CUDA graph captured once and replayed with one
launch.

A part reads and writes storage that keeps its place (caches, lengths, tokens, a buffer of random
numbers), and its results keep theirs: each replay overwrites them. Steps of one kind (a key: gamma,
active sequences, what else the draft depends on) form a chain of parts. A chain's first step runs
plainly, which compiles and loads the kernels; its second captures, and runs what it captured; all
later ones replay. All parts share a memory pool: those of a chain are always replayed in the order
of their capture, and no step reads what another chain's step left there.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from magicdec.runtime.distributed import now_s

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])
Replay = Callable[[], None]


@dataclass
class _Chain:
    """The parts of one kind of step, by name: how to replay each, and its results."""

    num_steps: int = 0
    parts: dict[str, tuple[Replay, Any]] = field(default_factory=dict)


class StepGraphs:
    """The captured steps of one decoding run; off, every part is a plain call."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._chains: dict[tuple[int, Hashable], _Chain] = {}
        self._chain: _Chain | None = None
        self._pool: Any = None

    def begin(self, num_active: int, key: Hashable | None) -> None:
        """Begins a step of a kind; with None its parts run plainly. Chains for another batch are
        dropped.
        """
        self._chain = None
        if not self.enabled or key is None:
            return
        if any(known != num_active for known, _ in self._chains):
            self._chains.clear()
            self._pool = None
        chain = self._chains.setdefault((num_active, key), _Chain())
        chain.num_steps += 1
        if chain.num_steps > 1:
            self._chain = chain

    def run(self, name: str, part: Callable[[], T]) -> T:
        """The part's results. A replay runs only what was captured and does not call `part` itself,
        so `part` must not depend on anything of the host that is not in the step's key."""
        chain = self._chain
        if chain is None:
            return part()
        if name not in chain.parts:
            replay, results, self._pool = capture(part, self._pool)
            chain.parts[name] = (replay, results)
        replay, results = chain.parts[name]
        replay()
        return results


class PhaseTimer:
    """Splits the wall-clock time of a loop into phases: entering one closes the phase before it.
    The device is waited for each time, so phases do not overlap. A run without fences measures
    nothing, and does not wait."""

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled, self._device = enabled, device
        self.phases: dict[str, list[float]] = defaultdict(list)
        self._phase: str | None = None
        self._last_s = 0.0

    def start(self) -> None:
        """Begins, and forgets what was measured before."""
        self.phases.clear()
        self._phase = None
        if self.enabled:
            self._last_s = now_s(self._device)

    def enter(self, phase: str | None) -> None:
        """Closes the phase before. None: the round ends. The first phase after that, or after
        `start`, begins there.
        """
        if self.enabled and self._phase is not None:
            end_s = now_s(self._device)
            self.phases[self._phase].append(end_s - self._last_s)
            self._last_s = end_s
        self._phase = phase


def part(name: str) -> Callable[[Method], Method]:
    """Makes a method of a step, which has `graphs` and a `timer`, a part by this name: timed as a
    phase, and replayed where steps are captured. What it does on the device may depend on its
    arguments' places and on the step's key, not on their values on the host."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def run(step: Any, *arguments: Any) -> Any:
            step.timer.enter(name)
            return step.graphs.run(name, lambda: method(step, *arguments))

        return cast("Method", run)

    return decorate


def capture(part: Callable[[], T], pool: Any) -> tuple[Replay, T, Any]:
    """Records the part's kernels without running them: how to run them, its results (without values
    as yet), its pool.
    Raises what CUDA says of an operation that cannot be captured; nothing is captured then."""
    graph = torch.cuda.CUDAGraph()
    stream = _capture_stream()
    torch.cuda.synchronize()
    # what plain calls have left cannot be taken back while a graph's memory is allocated
    torch.cuda.empty_cache()
    stream.wait_stream(torch.cuda.current_stream())
    is_collecting = gc.isenabled()
    gc.disable()  # a collection could free another graph, which is not allowed meanwhile
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                results = part()
            finally:
                graph.capture_end()
    except RuntimeError as error:
        error.add_note(
            "while a CUDA graph was captured; --no-cuda-graphs decodes without any"
        )
        raise
    finally:
        if is_collecting:
            gc.enable()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay, results, graph.pool()


_streams: dict[int, torch.cuda.Stream] = {}


def _capture_stream() -> torch.cuda.Stream:
    """One stream per device to capture on: libraries keep workspaces for each stream that they are
    used on.
    """
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
