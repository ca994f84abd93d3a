"""How a model is split over devices: tensor-parallel sizes, stages, and data-parallel attention
with whole experts.
"""

from dataclasses import dataclass
from typing import Any

from magicdec.errors import ConfigError
from magicdec.specs.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Spread of one replica beyond the tensor parallelism (tp) within each group of its ranks. A
    stage holds a share of the layers and has `dp` groups of tp ranks, which hold
    sequences of their own: data-parallel attention. Routed experts are cut by tp, or with
    `whole_experts` divided over all ranks of a stage."""

    pp: int = 1
    """Stages of the pipeline."""
    dp: int = 1
    """Groups that hold sequences of their own; above 1 with whole experts only."""
    whole_experts: bool = False

    @property
    def groups(self) -> int:
        """Groups of tp ranks in all stages."""
        return self.pp * self.dp

    @property
    def is_spread(self) -> bool:
        return self.groups > 1 or self.whole_experts

    def ep_size(self, tp_size: Any) -> Any:
        """Ranks that the whole experts are divided over; 1: each is cut."""
        if self.whole_experts:
            return tp_size * self.dp
        return 1

    def stage_layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each stage, as even as possible. Where they are uneven, the last stage, which
        has the head too, and then the first have fewer (vLLM's division)."""
        even, rest = divmod(num_layers, self.pp)
        counts = [even] * self.pp
        for place in range(rest):
            counts[-(place + 2)] += 1
        return tuple(counts)

    def stage_share(self, num_layers: int) -> float:
        """The largest stage's share of the layers."""
        if self.pp > 1:
            return max(self.stage_layers(num_layers)) / num_layers
        return 1.0

    def check(self, model: ModelSpec, tp_size: int) -> None:
        """Raises ConfigError for a split that the model does not allow, with what does."""
        if self.pp > model.num_hidden_layers:
            raise ConfigError(
                f"pp {self.pp} is more than the {model.num_hidden_layers} layers of {model.name}"
            )
        if self.whole_experts and not model.is_moe:
            raise ConfigError(
                f"{model.name} has no experts to divide; leave --ep and --dp-attention out, or use "
                "--pp"
            )
        most = model.most_experts
        if self.whole_experts and self.ep_size(tp_size) > most:
            raise ConfigError(
                f"ep {self.ep_size(tp_size)} is more than the {most} experts of {model.name}"
            )


TENSOR_PARALLEL = Parallelism()
"""Tensor parallelism alone."""


def spread_for(
    *,
    tp_size: int,
    pp_size: int,
    ep_size: int | None,
    dp_attention: bool,
) -> Parallelism:
    """The spread that a plan's options request. Without data-parallel attention, the tp ranks
    divide the experts.
    """
    if ep_size is None and not dp_attention:
        return Parallelism(pp=pp_size)
    if ep_size is not None:
        ranks = ep_size
    else:
        ranks = tp_size
    if not dp_attention and ranks != tp_size:
        raise ConfigError(
            f"ep {ranks} without data-parallel attention needs tp {ranks}, not {tp_size}; or add "
            "--dp-attention"
        )
    if ranks % tp_size:
        raise ConfigError(
            f"ep {ranks} is not a multiple of tp {tp_size}: each of its groups has tp ranks"
        )
    return Parallelism(pp=pp_size, dp=ranks // tp_size, whole_experts=True)


def divided(model: ModelSpec, vocabulary_multiple: int = 1) -> dict[str, set[int]]:
    """The sizes that ranks cut evenly, under Hugging Face's names: query heads, widths, and rows of
    the vocabulary padded to `vocabulary_multiple` (0: to a multiple of the ranks, which always
    fits)."""
    queries = {mixer.query_heads for mixer, _ in model.mixers}
    widths: set[int] = set()
    for mlp, _ in model.feed_forwards:
        widths.update(mlp.widths)
    rows = set()
    if vocabulary_multiple:
        rows = {-(-model.vocab_size // vocabulary_multiple) * vocabulary_multiple}
    return {
        "num_attention_heads": queries,
        "intermediate_size": widths,
        "vocab_size": rows,
    }


def divides(model: ModelSpec, tp_size: int, vocabulary_multiple: int = 1) -> bool:
    """Whether `tp_size` ranks cut the model evenly. KV heads and a state's heads are replicated
    beyond one rank each.
    """
    replicated = {cache.num_heads for cache, _ in model.caches}
    replicated |= {state.num_heads for state, _ in model.states}
    for heads in replicated:
        if heads % tp_size and tp_size % heads:
            return False
    cut: set[int] = set()
    cut = cut.union(*divided(model, vocabulary_multiple).values())
    return not any(size % tp_size for size in cut)


def valid_tp_sizes(
    model: ModelSpec, max_gpus: int, vocabulary_multiple: int = 1
) -> list[int]:
    """The tensor-parallel sizes up to `max_gpus` that split the model evenly, in increasing
    order."""
    most = min(max_gpus, model.num_attention_heads)
    sizes = []
    for size in range(1, most + 1):
        if divides(model, size, vocabulary_multiple):
            sizes.append(size)
    return sizes


def check_tp(model: ModelSpec, tp_size: int, vocabulary_multiple: int = 1) -> None:
    """Raises ConfigError naming the nearest sizes that work when `tp_size` does not split the model
    evenly.
    """
    if tp_size < 1 or not divides(model, tp_size, vocabulary_multiple):
        sizes = valid_tp_sizes(model, model.num_attention_heads, vocabulary_multiple)
        nearest = sorted(sizes, key=lambda size: (abs(size - tp_size), size))[:3]
        cut = {
            **divided(model, vocabulary_multiple),
            "num_key_value_heads": {model.num_key_value_heads},
        }
        parts = []
        for name, numbers in cut.items():
            if numbers:
                parts.append(f"{name} {' and '.join(map(str, sorted(numbers)))}")
        raise ConfigError(
            f"tp {tp_size} does not divide {model.name} ({', '.join(parts)}); nearest that do: "
            f"{', '.join(map(str, sorted(nearest)))}"
        )


def largest_tp_at_most(
    model: ModelSpec, tp_size: int, vocabulary_multiple: int = 1
) -> int:
    """The largest size not above `tp_size` that splits the model evenly, for a small draft of a
    larger target.
    """
    return max(size for size in valid_tp_sizes(model, tp_size, vocabulary_multiple))
