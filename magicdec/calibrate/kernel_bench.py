"""Micro-benchmarks of this machine: kernels one by one, and single phases of the engine at shapes
of their own.

Nothing here is an end-to-end run: kernels (linear layers by tokens, attention by batch × context ×
query tokens, streaming passes) are timed alone; of the engine, single steps are timed on a cache
filled with noise, phase by phase (engine.py), at batches, contexts and draft budgets that measured
grids do not use. Points are interleaved: each round times every point once, so a drift of the
machine falls on all points alike. A point's time is the median over the rounds, its spread their
interquartile range.

On a CUDA device every point is a captured graph of several calls, as the engine's own steps are,
timed by events. Its calls take turns over a pool of operands several times as large as the L2
cache, so nothing is found there, as in a forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from magicdec.calibrate.local_profile import Shape, TimedPoint
from magicdec.measure.environment import Clock, available_memory_bytes
from magicdec.measure.utilisation import is_cuda, seconds_per_call
from magicdec.runtime.attention import Scoring, Workspace, decode_attention
from magicdec.runtime.graphs import capture
from magicdec.runtime.kernels import Visible
from magicdec.specs.model import ModelSpec


@dataclass(frozen=True)
class TimedCall:
    """Something to time: `call` does it `repeats` times over."""

    table: str
    shape: Shape
    call: Callable[[], object]
    repeats: int = 1


def time_interleaved(
    works: Iterable[TimedCall],
    *,
    device: str,
    rounds: int,
    clock: Clock = "wall",
) -> list[TimedPoint]:
    """Times every work once per round, after one call each to warm up."""
    works = list(works)
    calls: list[Callable[[], object]] = []
    pool: Any = None
    with torch.inference_mode():
        for work in works:
            work.call()
            calls.append(work.call)
            if is_cuda(device):
                # results are dropped, so all graphs can share their memory
                calls[-1], _, pool = capture(work.call, pool)
        seconds: list[list[float]] = [[] for _ in works]
        for _ in range(rounds):
            for taken, call, work in zip(seconds, calls, works, strict=True):
                taken.append(
                    seconds_per_call(call, device=device, clock=clock) / work.repeats
                )
    points = []
    for work, timed in zip(works, seconds, strict=True):
        points.append(TimedPoint(work.table, work.shape, timed))
    return points


def launch_points(*, device: str, rounds: int) -> list[TimedPoint]:
    """Seconds of one small kernel, launched from Python, as a graph's only node, and as one of a
    graph's 200 nodes.
    """
    x = torch.zeros(1, device=device)

    def repeated(count: int) -> Callable[[], object]:
        return lambda: [x.add_(1.0) for _ in range(count)]

    x.add_(1.0)
    one, *_ = capture(repeated(1), None)
    many, *_ = capture(repeated(200), None)
    calls = ((0, repeated(200), 200), (1, one, 1), (200, many, 200))
    points = []
    for nodes, call, count in calls:
        seconds = []
        for _ in range(rounds):
            seconds.append(seconds_per_call(call, device=device) / count)
        points.append(TimedPoint("launch", {"graph_nodes": nodes}, seconds))
    return points


class MemoryPool:
    """Random numbers from which operands are cut in turn, so a CUDA device does not find them in its
    L2."""

    def __init__(self, *, num_elements: int, device: str, dtype: str) -> None:
        self._data = torch.randn(
            num_elements, device=device, dtype=getattr(torch, dtype)
        )
        self._l2_bytes = l2_bytes(device)

    def cut(
        self, shape: tuple[int, ...], *, least: int = 1, most: int = 64
    ) -> list[torch.Tensor]:
        """Tensors of the shape, side by side: as many as exceed the L2 fourfold, where the pool
        holds them.
        """
        size = math.prod(shape)
        wanted = math.ceil(4 * self._l2_bytes / (size * self._data.element_size()))
        count = max(1, min(max(wanted, least), most, len(self._data) // size))
        return [self._data[i * size : (i + 1) * size].view(shape) for i in range(count)]


def l2_bytes(device: str) -> int:
    """Bytes of a CUDA device's L2 cache; 0 for a CPU, whose loops keep their operands cached."""
    if is_cuda(device):
        return int(torch.cuda.get_device_properties(torch.device(device)).L2_cache_size)
    return 0


LINEAR_TOKENS = (1, 2, 3, 4, 6, 10, 14, 20, 28, 40, 56, 80, 112, 160, 224, 512)
CUDA_LINEAR_TOKENS = (*LINEAR_TOKENS, 320, 420, 640, 800, 1024, 1400, 2000)


def linear_works(
    models: Iterable[ModelSpec], *, device: str, dtype: str
) -> list[TimedCall]:
    """Linear layers of the models' shapes and two others, by number of tokens."""
    shapes = {(1024, 1024), (2048, 512)}
    for model in models:
        parts = (*model.mixers, *model.feed_forwards)
        for part, _ in parts:
            for projection in part.projections(model.hidden_size):
                shapes.add(projection.shape)
        shapes.add((model.vocab_size, model.hidden_size))
    pool = MemoryPool(
        num_elements=max(*(n * k for n, k in shapes), 2 * l2_bytes(device)),
        device=device,
        dtype=dtype,
    )
    tokens: tuple[int, ...] = LINEAR_TOKENS
    if is_cuda(device):
        tokens = CUDA_LINEAR_TOKENS
    works = []
    for n, k in sorted(shapes):
        weights = pool.cut((n, k))
        for m in tokens:
            x = torch.randn(m, k, device=device, dtype=getattr(torch, dtype))
            call = partial(_apply_to_each, partial(F.linear, x), weights)
            works.append(
                TimedCall(
                    "linear", {"m": m, "n": n, "k": k}, call, repeats=len(weights)
                )
            )
    return works


def _apply_to_each(
    function: Callable[[torch.Tensor], object], operands: list[torch.Tensor]
) -> None:
    for operand in operands:
        function(operand)


ATTENTION_SHAPES = (
    (1, 700),
    (1, 3500),
    (3, 2300),
    (6, 1200),
    (6, 3500),
    (12, 700),
    (12, 2300),
    (24, 1200),
    (24, 3000),
    (40, 1800),
    (12, 100),
    (24, 180),
    (40, 350),
)
"""Batch and KV length: long ones, and a draft's short ones."""
CUDA_ATTENTION_SHAPES = (
    (1, 2900),
    (1, 30_000),
    (1, 120_000),
    (3, 11_000),
    (3, 60_000),
    (6, 5500),
    (6, 23_000),
    (12, 2900),
    (12, 11_000),
    (12, 45_000),
    (24, 5500),
    (24, 23_000),
    (40, 2900),
    (40, 13_000),
    (90, 2900),
    (90, 6000),
    (180, 2900),
    (6, 300),
    (12, 700),
    (24, 1400),
    (40, 300),
    (40, 700),
    (90, 700),
    (90, 1400),
    (180, 300),
    (180, 700),
)
CUDA_ATTENTION_SHARE = 0.25
"""Largest share of the free memory that the KV caches of one micro-benchmark take."""
QUERY_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
CUDA_QUERY_LENGTHS = (1, 2, 3, 5, 6, 8)


def attention_works(
    model: ModelSpec,
    *,
    device: str,
    dtype: str,
    shapes: tuple[tuple[int, int], ...] | None = None,
    query_lengths: tuple[int, ...] | None = None,
) -> list[TimedCall]:
    """Attention of a few query tokens over a KV cache. Several caches take turns, as a model's layers
    do, so the processor's caches hold no more than they would of a model. `shapes`: (batch, KV
    length); None: the device's grid, on a GPU without caches above CUDA_ATTENTION_SHARE of its free
    memory."""
    attention = model.attention
    heads = attention.num_heads
    kv_heads = attention.num_kv_heads
    head_dim = attention.head_dim
    num_caches = 3
    if is_cuda(device):
        num_caches = 1
    if shapes is None and is_cuda(device):
        torch.cuda.empty_cache()
        slot_bytes = 2 * kv_heads * head_dim * getattr(torch, dtype).itemsize
        most = CUDA_ATTENTION_SHARE * available_memory_bytes(device) / slot_bytes
        shapes = tuple(
            (batch, kv_len)
            for batch, kv_len in CUDA_ATTENTION_SHAPES
            if batch * kv_len <= most
        )
    shapes = shapes or ATTENTION_SHAPES
    if not query_lengths:
        query_lengths = QUERY_LENGTHS
        if is_cuda(device):
            query_lengths = CUDA_QUERY_LENGTHS
    largest = max(batch * kv_len for batch, kv_len in shapes) * 2 * kv_heads * head_dim
    pool = MemoryPool(
        num_elements=max(num_caches * largest, 2 * l2_bytes(device)),
        device=device,
        dtype=dtype,
    )
    works = []
    workspace = Workspace()
    for batch, kv_len in shapes:
        caches = pool.cut(
            (2, batch, kv_heads, kv_len, head_dim),
            least=num_caches,
            most=max(num_caches, 16),
        )
        for query_len in query_lengths:
            query = torch.randn(
                batch,
                query_len,
                heads,
                head_dim,
                device=device,
                dtype=getattr(torch, dtype),
            )
            shape = {
                "batch_size": batch,
                "query_len": query_len,
                "num_heads": heads,
                "num_kv_heads": kv_heads,
                "head_dim": head_dim,
                "kv_len": kv_len,
            }
            first = kv_len - query_len
            last_T = first + torch.arange(query_len, device=device)
            visible = Visible(
                last_BT=last_T.expand(batch, -1), stop=kv_len, num_open=first + 1
            )
            call = partial(
                _apply_to_each, partial(_attend, query, visible, workspace), caches
            )
            works.append(TimedCall("attention", shape, call, repeats=len(caches)))
    return works


def _attend(
    query_BTAD: torch.Tensor,
    visible: Visible,
    workspace: Workspace,
    cache: torch.Tensor,
) -> None:
    keys, values = cache
    scoring = Scoring(scale=query_BTAD.shape[-1] ** -0.5)
    decode_attention(
        query_BTAD, keys, values, visible, scoring=scoring, workspace=workspace
    )


def streaming_works(*, device: str) -> list[TimedCall]:
    """Passes that stream their operands once. Results are written where earlier ones were: fresh
    memory of megabytes costs ten times what the pass does. On a CPU the operands are those of
    decoding, which a cache holds."""
    works = []
    repeats = 1
    sizes_kib: tuple[int, ...] = (2, 8, 32, 128, 512)
    if is_cuda(device):
        repeats = 20
        sizes_kib = (2, 16, 64, 256, 1024, 4096, 16384)
    for kib in sizes_kib:
        x = torch.randn(kib * 256, device=device)
        shape = {"num_bytes": 2 * x.numel() * 4, "num_kernels": 1}
        call = partial(
            _apply_to_each,
            partial(torch.mul, other=2.0, out=torch.empty_like(x)),
            [x] * repeats,
        )
        works.append(TimedCall("elementwise", shape, call, repeats=repeats))
    return works
