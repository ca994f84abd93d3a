"""What an operation costs one rank, whatever the device: FLOPs and bytes. Costs add."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Cost(NamedTuple):
    """Per rank; fields broadcast against each other. A multiply-add is two FLOPs."""

    flops: Any = 0.0
    weight_bytes: Any = 0.0
    kv_bytes: Any = 0.0
    activation_bytes: Any = 0.0
    collective_bytes: Any = 0.0
    """Payload of collectives (not bytes on the wire, which depend on the algorithm)."""

    @property
    def memory_bytes(self) -> Any:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    def plus(self, other: Cost) -> Cost:
        return Cost(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def times(self, count: Any) -> Cost:
        return Cost(*(value * count for value in self))


def total(costs: list[Cost]) -> Cost:
    result = Cost()
    for cost in costs:
        result = result.plus(cost)
    return result
