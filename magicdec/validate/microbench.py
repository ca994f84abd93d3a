"""Micro-benchmarks of this machine: kernels one by one, and single phases of the engine at shapes of their own.

Nothing here is an end-to-end run: kernels (linear layers by tokens, attention by batch × context × query tokens,
streaming passes) are timed alone; of the engine, single steps are timed on a cache filled with noise, phase by phase
(engine_bench.py), at batches, contexts and draft budgets that measured grids do not use. Points are interleaved: each
round times every point once, and a point's time is the median over the rounds, its spread their interquartile range; so
a drift of the machine falls on all points alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from magicdec.runtime.attention import Workspace, decode_attention
from magicdec.specs.model import ModelSpec
from magicdec.units import MIB

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Shape = dict[str, int]


@dataclass(frozen=True)
class Point:
    """One timed operation: its shape, and seconds per call of each round."""

    table: str
    shape: Shape
    seconds: list[float]

    @property
    def time_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        if len(self.seconds) < 3:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / self.time_s


@dataclass(frozen=True)
class Work:
    """Something to time: `call` does it `repeats` times over."""

    table: str
    shape: Shape
    call: Callable[[], object]
    repeats: int = 1


def seconds_per_call(call: Callable[[], object], *, device: str, min_s: float = 2e-3, max_calls: int = 200) -> float:
    """Mean seconds of a call, repeated until `min_s` have passed."""
    calls = 1
    while True:
        synchronise(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronise(device)
        elapsed = time.perf_counter() - start
        if elapsed >= min_s or calls >= max_calls:
            return elapsed / calls
        calls = min(max_calls, max(calls * 2, int(calls * 1.2 * min_s / max(elapsed, 1e-7))))


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def time_interleaved(works: Iterable[Work], *, device: str, rounds: int) -> list[Point]:
    """Times every work once per round, after one call each to warm up."""
    works = list(works)
    for work in works:
        work.call()
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for taken, work in zip(seconds, works, strict=True):
            taken.append(seconds_per_call(work.call, device=device) / work.repeats)
    return [Point(work.table, work.shape, taken) for work, taken in zip(works, seconds, strict=True)]


def bandwidth_bytes_per_s(*, device: str, num_bytes: int = 256 * MIB, rounds: int = 7) -> float:
    """Bytes per second of reading memory: the best of a few passes over an array that no cache holds."""
    data = torch.ones(num_bytes // 4, device=device)
    data.sum()
    best = min(seconds_per_call(data.sum, device=device) for _ in range(rounds))
    return num_bytes / best


def copy_bytes_per_s(*, device: str, num_bytes: int = 256 * MIB, rounds: int = 7) -> float:
    """Bytes read plus bytes written per second of a copy."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    best = min(seconds_per_call(lambda: target.copy_(source), device=device) for _ in range(rounds))
    return 2 * num_bytes / best


def peak_flops_per_s(*, device: str, dtype: str, size: int = 1024, rounds: int = 5) -> float:
    """FLOP/s of a square matrix product: the best of a few."""
    a = torch.randn(size, size, device=device, dtype=TORCH_DTYPES[dtype])
    b = torch.randn(size, size, device=device, dtype=TORCH_DTYPES[dtype])
    best = min(seconds_per_call(lambda: a @ b, device=device) for _ in range(rounds))
    return 2 * size**3 / best


LINEAR_TOKENS = (1, 2, 3, 4, 6, 10, 14, 20, 28, 40, 56, 80, 112, 160, 224, 512)


def linear_works(models: Iterable[ModelSpec], *, device: str, dtype: str) -> list[Work]:
    """Linear layers of the models' shapes and two larger ones, by number of tokens."""
    shapes = {(1024, 1024), (2048, 512)}
    for model in models:
        q_size, kv_size = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
        shapes |= {
            (q_size + 2 * kv_size, model.hidden_size),
            (model.hidden_size, q_size),
            (2 * model.intermediate_size, model.hidden_size),
            (model.hidden_size, model.intermediate_size),
            (model.vocab_size, model.hidden_size),
        }
    works = []
    for n, k in sorted(shapes):
        weight = torch.randn(n, k, device=device, dtype=TORCH_DTYPES[dtype])
        for m in LINEAR_TOKENS:
            x = torch.randn(m, k, device=device, dtype=TORCH_DTYPES[dtype])
            works.append(Work("linear", {"m": m, "n": n, "k": k}, partial(F.linear, x, weight)))
    return works


ATTENTION_SHAPES = (
    # batch, KV length: long ones, and a draft's short ones
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
QUERY_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)


def attention_works(model: ModelSpec, *, device: str, dtype: str, rotate_over: int = 3) -> list[Work]:
    """Attention of a few query tokens over a KV cache; `rotate_over` caches in turn, as a model's layers take turns, so
    that the processor's caches hold no more than they would of a model."""
    heads, kv_heads, head_dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    works = []
    workspace = Workspace()
    for batch, kv_len in ATTENTION_SHAPES:
        cache = torch.randn(rotate_over, 2, batch, kv_heads, kv_len, head_dim, device=device, dtype=TORCH_DTYPES[dtype])
        for query_len in QUERY_LENGTHS:
            query = torch.randn(batch, query_len, heads, head_dim, device=device, dtype=TORCH_DTYPES[dtype])
            shape = {
                "batch_size": batch,
                "query_len": query_len,
                "num_heads": heads,
                "num_kv_heads": kv_heads,
                "head_dim": head_dim,
                "kv_len": kv_len,
            }

            def call(query: torch.Tensor = query, cache: torch.Tensor = cache) -> None:
                for keys, values in cache:
                    decode_attention(query, keys, values, workspace=workspace)

            works.append(Work("attention", shape, call, repeats=rotate_over))
    return works


def streaming_works(*, device: str) -> list[Work]:
    """Passes that stream their operands once, from what a cache holds to what none does."""
    works = []
    for kib in (2, 16, 64, 256, 1024, 4096, 16384):
        x = torch.randn(kib * 256, device=device)
        works.append(
            Work("elementwise", {"num_bytes": 2 * x.numel() * 4, "num_kernels": 1}, partial(torch.mul, x, 2.0))
        )
    return works
