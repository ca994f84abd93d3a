"""Which tensor-parallel sizes split a model."""

from __future__ import annotations

from magicdec.errors import ConfigError
from magicdec.specs.layers import Attention, LatentAttention
from magicdec.specs.model import ModelSpec

MAX_TP_SIZE = 1024


def divides(model: ModelSpec, tp_size: int) -> bool:
    """Whether heads and widths split evenly over the ranks; KV heads, and a state's, are replicated beyond them."""
    kept = {cache.num_heads for cache, _ in model.caches} | {state.num_heads for state, _ in model.states}
    widths = {mlp.width for mlp, _ in model.feed_forwards}
    even_kept = all(heads % tp_size == 0 or tp_size % heads == 0 for heads in kept)
    queries = {mixer.num_heads for mixer, _ in model.mixers if isinstance(mixer, Attention | LatentAttention)}
    return even_kept and all(size % tp_size == 0 for size in widths | queries)


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
    """The largest size not above `tp_size` that splits the model evenly, for a small draft of a larger target."""
    return max(size for size in valid_tp_sizes(model, tp_size))
