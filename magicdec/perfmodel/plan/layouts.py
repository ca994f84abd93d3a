"""The ways to spread a replica over devices that a plan compares.

What was asked for; else tensor parallelism within a node. With a number of devices given, also

    tp over the links between nodes, and tp in a node with stages across nodes      with more devices than a node has
    data-parallel attention with whole experts over a node's devices, or over all,  for mixtures of experts
    in groups of each tp size that divides them

The one with the most tokens per second over all devices given is the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.errors import ConfigError
from magicdec.specs.engine import EngineProfile
from magicdec.specs.hardware import HardwareProfile
from magicdec.specs.model import ModelSpec
from magicdec.specs.parallel import (
    TENSOR_PARALLEL,
    Parallelism,
    check_tp,
    largest_tp_at_most,
    spread_for,
    valid_tp_sizes,
)

USUAL_TP = 8
"""Up to this many ranks share a layer where a link reaches beyond a node, before anything else is considered."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """tp sizes to search, and how groups of so many ranks make a replica."""

    tp_sizes: tuple[int, ...]
    spread: Parallelism = TENSOR_PARALLEL


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request says about it; None leaves it to the planner."""

    tp_size: int | None
    pp_size: int | None
    ep_size: int | None
    dp_attention: bool
    num_gpus: int | None


def layouts(asked: Asked, model: ModelSpec, hw: HardwareProfile, engine: EngineProfile) -> list[Layout]:
    """The usual one first. Raises ConfigError for what the model, engine or number of devices does not allow."""
    multiple = engine.vocabulary_multiple
    node = 1 if hw.kind == "cpu" else hw.link.num_gpus_per_node
    if asked.pp_size not in (None, 1) or asked.ep_size not in (None, 1) or asked.dp_attention:
        return [_asked_for(asked, model, engine, node)]
    if asked.tp_size is not None:
        check_tp(model, asked.tp_size, multiple)
        if asked.num_gpus is not None and asked.tp_size > asked.num_gpus:
            raise ConfigError(f"tp {asked.tp_size} needs more than the {asked.num_gpus} GPUs given")
        return [Layout(tp_sizes=(asked.tp_size,))]
    if asked.num_gpus is None:
        return [Layout(tp_sizes=(largest_tp_at_most(model, node, multiple),))]
    node = max(node, min(USUAL_TP, hw.link.reach)) if hw.kind == "gpu" else node
    usual = Layout(tp_sizes=tuple(valid_tp_sizes(model, min(asked.num_gpus, node), multiple)))
    is_known = hw.link.between_nodes_bytes_per_s is not None or asked.num_gpus <= hw.link.reach
    spreads = hw.kind == "gpu" and engine.spreads and is_known
    return [usual, *(_others(asked.num_gpus, model, node, multiple) if spreads else [])]


def _asked_for(asked: Asked, model: ModelSpec, engine: EngineProfile, node: int) -> Layout:
    if not engine.spreads:
        raise ConfigError(f"engine {engine.name} has neither stages nor data-parallel attention; try --engine vllm")
    multiple = engine.vocabulary_multiple
    pp = asked.pp_size or 1
    tp = asked.tp_size
    if tp is None:
        tp = 1 if asked.dp_attention else asked.ep_size or largest_tp_at_most(model, node, multiple)
    check_tp(model, tp, multiple)
    ep = asked.ep_size
    if asked.dp_attention and ep is None:
        ep = max(tp, (asked.num_gpus or node) // pp)
    spread = spread_for(tp_size=tp, pp_size=pp, ep_size=ep, dp_attention=asked.dp_attention)
    spread.check(model, tp)
    needed = tp * spread.groups
    if asked.num_gpus is not None and needed > asked.num_gpus:
        raise ConfigError(f"{needed} devices are needed, more than the {asked.num_gpus} GPUs given")
    return Layout(tp_sizes=(tp,), spread=spread)


def _others(num_gpus: int, model: ModelSpec, node: int, multiple: int) -> list[Layout]:
    found: list[Layout] = []
    if num_gpus > node:
        across = tuple(size for size in valid_tp_sizes(model, num_gpus, multiple) if size > node)
        found += [Layout(tp_sizes=across)] if across else []
        tp = largest_tp_at_most(model, node, multiple)
        stages = min(num_gpus // tp, model.num_hidden_layers)
        found += [Layout(tp_sizes=(tp,), spread=Parallelism(pp=stages))] if stages > 1 else []
    for ranks in dict.fromkeys((min(num_gpus, node), num_gpus)):
        if model.is_moe and 1 < ranks <= model.most_experts and model.most_experts % ranks == 0:
            found += [
                Layout(tp_sizes=(tp,), spread=Parallelism(dp=ranks // tp, whole_experts=True))
                for tp in valid_tp_sizes(model, ranks // 2, multiple)
                if ranks % tp == 0
            ]
    return found
