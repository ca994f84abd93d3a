"""A distribution of requests: prompt and output lengths with weights, read from a JSON, TOML or CSV
file.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from magicdec.files import converted, read_csv, read_json, read_toml

MAX_TOKENS = 2**26
Z_99 = 2.3263478740408408
"""A normal variable stays below this many standard deviations above its mean with probability 0.99.
"""


class RequestShape(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """One kind of request, and how often it comes relative to the others."""

    prompt_len: int
    gen_len: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("prompt_len", self.prompt_len), ("gen_len", self.gen_len)):
            if not 1 <= value <= MAX_TOKENS:
                raise ValueError(
                    f"'{name}' must be between 1 and {MAX_TOKENS}, not {value}"
                )
        if not (math.isfinite(self.weight) and 0 < self.weight <= 1e12):
            raise ValueError(f"'weight' must be above 0, not {self.weight!r}")


class WorkloadSpec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A mix of requests. A slot of the batch is busy with a request for as many steps as it
    generates tokens, so the mean over *time* of what a slot holds weighs each request by its
    output; memory must hold the tail of what a batch holds together."""

    requests: tuple[RequestShape, ...]

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError("'requests' must hold at least one request")

    def _mean(self, values: list[float], *, by_time: bool) -> float:
        weights = [request.weight for request in self.requests]
        if by_time:
            weights = [request.weight * request.gen_len for request in self.requests]
        total = 0.0
        for weight, value in zip(weights, values, strict=True):
            total += weight * value
        return total / sum(weights)

    @property
    def mean_prompt_len(self) -> float:
        return self._mean(
            [float(request.prompt_len) for request in self.requests], by_time=False
        )

    def prompt_groups(self, most: int = 8) -> list[tuple[float, float]]:
        """(mean length, weight) of at most `most` groups of neighbouring prompt lengths. Where
        there are more lengths, the groups have about equal weight."""
        weights: dict[int, float] = defaultdict(float)
        for request in self.requests:
            weights[request.prompt_len] += request.weight
        in_order = sorted(weights.items())
        if len(in_order) <= most:
            return [(float(length), weight) for length, weight in in_order]
        share = sum(weights.values()) / most
        weight_before = 0.0
        totals: dict[int, float] = defaultdict(float)
        group_weights: dict[int, float] = defaultdict(float)
        for length, weight in in_order:
            middle = weight_before + weight / 2.0
            group = min(int(middle / share), most - 1)
            totals[group] += weight * length
            group_weights[group] += weight
            weight_before += weight
        means = []
        for group, group_weight in group_weights.items():
            means.append((totals[group] / group_weight, group_weight))
        return means

    @property
    def mean_gen_len(self) -> float:
        return self._mean(
            [float(request.gen_len) for request in self.requests], by_time=False
        )

    @property
    def mean_kv_len(self) -> float:
        """Tokens that a busy slot holds, on average over time: the prompt and half of the
        output."""
        held = [request.prompt_len + request.gen_len / 2.0 for request in self.requests]
        return self._mean(held, by_time=True)

    @property
    def max_len(self) -> int:
        return max(request.prompt_len + request.gen_len for request in self.requests)

    def tail_len(self, batch: float) -> float:
        """Tokens per slot that a batch stays below with probability 0.99, if its slots are
        independent.
        """
        final = [
            float(request.prompt_len + request.gen_len) for request in self.requests
        ]
        mean = self._mean(final, by_time=True)
        squares = [(length - mean) ** 2 for length in final]
        variance = self._mean(squares, by_time=True)
        deviation = math.sqrt(variance / max(batch, 1.0))
        return min(float(self.max_len), mean + Z_99 * deviation)


def load_workload(path: Path) -> WorkloadSpec:
    """Reads {"requests": [{"prompt_len", "gen_len", "weight"}]} from JSON or TOML, or those columns
    from CSV. Raises ConfigError naming the file and the key."""
    document: Any
    is_csv = path.suffix == ".csv"
    if is_csv:
        document = {"requests": read_csv(path, "workload")}
    elif path.suffix == ".toml":
        document = read_toml(path, "workload")
    else:
        document = read_json(path, "workload")
    return converted(document, WorkloadSpec, where=str(path), strict=not is_csv)
