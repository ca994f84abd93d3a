"""Best rates of this machine: bytes per second of its memory, FLOP/s of its matrix products."""

from __future__ import annotations

from collections.abc import Callable

import torch

from magicdec.measure.environment import Clock, seconds
from magicdec.units import MIB


def is_cuda(device: str) -> bool:
    return device.startswith("cuda")


def seconds_per_call(
    call: Callable[[], object], *, device: str, clock: Clock = "wall", min_s: float = 2e-3, max_calls: int = 200
) -> float:
    """Mean seconds of a call, repeated until `min_s` have passed."""
    calls = 1
    while True:
        elapsed = elapsed_s(call, calls, device, clock)
        if elapsed >= min_s or calls >= max_calls:
            return elapsed / calls
        calls = min(max_calls, max(calls * 2, int(calls * 1.2 * min_s / max(elapsed, 1e-7))))


def elapsed_s(call: Callable[[], object], calls: int, device: str, clock: Clock = "wall") -> float:
    """Seconds of so many calls by the clock, on a CUDA device by its events."""
    if is_cuda(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    begin_s = seconds(clock)
    for _ in range(calls):
        call()
    return seconds(clock) - begin_s


def bandwidth_bytes_per_s(*, device: str, num_bytes: int = 256 * MIB, rounds: int = 7, clock: Clock = "wall") -> float:
    """Bytes per second of reading memory: the best of a few passes over an array that no cache holds."""
    data = torch.ones(num_bytes // 4, device=device)
    data.sum()
    best = min(seconds_per_call(data.sum, device=device, clock=clock) for _ in range(rounds))
    return num_bytes / best


def copy_bytes_per_s(*, device: str, num_bytes: int = 2048 * MIB, rounds: int = 7) -> float:
    """Bytes read plus bytes written per second of a copy, the best of a few."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    best = min(seconds_per_call(lambda: target.copy_(source), device=device) for _ in range(rounds))
    return 2 * num_bytes / best


def peak_flops_per_s(*, device: str, dtype: str, size: int = 1024, rounds: int = 5, clock: Clock = "wall") -> float:
    """FLOP/s of a square matrix product: the best of a few."""
    a = torch.randn(size, size, device=device, dtype=getattr(torch, dtype))
    b = torch.randn(size, size, device=device, dtype=getattr(torch, dtype))
    best = min(seconds_per_call(lambda: a @ b, device=device, clock=clock) for _ in range(rounds))
    return 2 * size**3 / best
