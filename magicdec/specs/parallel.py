"""How a model is laid over devices: tensor parallelism, and replicas of the whole."""

from __future__ import annotations

import msgspec

from magicdec.errors import ConfigError
from magicdec.specs.model import ModelSpec

MAX_TP_SIZE = 1024


class ParallelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`num_replicas` copies, each on `tp_size` ranks; the draft of each runs on `draft_tp_size` of them (None: all)."""

    tp_size: int = 1
    num_replicas: int = 1
    draft_tp_size: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.tp_size <= MAX_TP_SIZE:
            raise ConfigError(f"tp must be between 1 and {MAX_TP_SIZE}, not {self.tp_size}")
        if not 1 <= self.num_replicas <= 10**6:
            raise ConfigError(f"the number of replicas must be at least 1, not {self.num_replicas}")
        if self.draft_tp_size is not None and not 1 <= self.draft_tp_size <= self.tp_size:
            raise ConfigError(f"draft tp {self.draft_tp_size} must be between 1 and the target's tp {self.tp_size}")

    @property
    def num_gpus(self) -> int:
        return self.tp_size * self.num_replicas


def divides(model: ModelSpec, tp_size: int) -> bool:
    """Whether heads, MLP and vocabulary rows split evenly; KV heads are replicated where tp exceeds them."""
    kv_heads = model.num_key_value_heads
    width = model.moe_intermediate_size if model.is_moe else model.intermediate_size
    even_kv = kv_heads % tp_size == 0 or tp_size % kv_heads == 0
    return model.num_attention_heads % tp_size == 0 and width % tp_size == 0 and even_kv


def valid_tp_sizes(model: ModelSpec, max_gpus: int) -> list[int]:
    """The tensor-parallel sizes up to `max_gpus` that split the model evenly, in increasing order."""
    return [size for size in range(1, min(max_gpus, model.num_attention_heads) + 1) if divides(model, size)]


def check_tp(model: ModelSpec, tp_size: int, *, what: str = "tp") -> None:
    """Raises ConfigError naming the nearest sizes that work when `tp_size` does not split the model evenly."""
    if tp_size < 1 or not divides(model, tp_size):
        sizes = valid_tp_sizes(model, model.num_attention_heads)
        nearest = sorted(sizes, key=lambda size: (abs(size - tp_size), size))[:3]
        raise ConfigError(
            f"{what} {tp_size} does not divide {model.name} ({model.num_attention_heads} heads, "
            f"{model.num_key_value_heads} KV heads); nearest that do: {', '.join(map(str, sorted(nearest)))}"
        )


def largest_tp_at_most(model: ModelSpec, tp_size: int) -> int:
    """The largest size not above `tp_size` that splits the model evenly: where a small draft runs beside its target."""
    return max(size for size in valid_tp_sizes(model, tp_size))
