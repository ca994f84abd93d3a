"""Rotary embeddings as a configuration describes them: `rope_parameters`, or `rope_scaling` with `rope_theta`.

Follows transformers' `RotaryEmbeddingConfigMixin`: a `rope_scaling` that is there takes the place of `rope_parameters`;
what stands inside wins over `rope_theta` and `partial_rotary_factor` outside; kinds of layers may have one each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from magicdec.errors import ConfigError, unknown_choice
from magicdec.specs.families.keys import Keys
from magicdec.specs.layers import Rope, RopeScaling, RopeType

ROPE_TYPES: Mapping[str, RopeType | None] = {
    "default": None,
    "mrope": None,  # of text, whose three position indices are one
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
    "llama3": "llama3",
}
LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")


def read_rope(
    keys: Keys,
    head_dim: int,
    *,
    kind: str | None = None,
    theta: float = 10_000.0,
    partial: float | None = 1.0,
    pairs: Literal["halves", "adjacent"] = "halves",
    scaling_key: str = "rope_scaling",
    beside: tuple[str, ...] = (),
) -> Rope:
    """The rotary embedding of a layer of this kind, with an architecture's own default base and share of the head.

    `partial` None: the architecture's code rotates whole heads, whatever its configuration says; another share is
    refused. `beside`: keys among the rope's that the architecture reads itself.
    """
    nested = _parameters(keys, scaling_key, kind)
    inside = Keys(nested, f"{keys.where}: rope")
    base = inside.number("rope_theta", default=keys.number("rope_theta", "rotary_emb_base", default=theta), least=1.0)
    share = keys.number("partial_rotary_factor", "rotary_pct", default=partial or 1.0, most=1.0)
    share = inside.number("partial_rotary_factor", default=share, most=1.0)
    if partial is None and share != 1.0:
        raise keys.error("partial_rotary_factor", "1.0 in this architecture", share)
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise ConfigError(f"{keys.where}: rotary embeddings need an even number of dimensions, not {dim} of {head_dim}")
    inside.ignore("type", "mrope_section", "mrope_interleaved", *beside)
    name = inside.raw("rope_type", default=nested.get("type", "default"))
    if not isinstance(name, str) or name not in ROPE_TYPES:
        raise unknown_choice(f"rope type in {keys.where}", name, ROPE_TYPES)
    rope_type = ROPE_TYPES[name]
    scaling = None if rope_type is None else _scaling(keys, inside, rope_type, dim)
    if left := inside.unread():
        raise ConfigError(f"{keys.where}: key '{left[0]}' of the {name} rope is not understood")
    return Rope(dim=dim, theta=base, scaling=scaling, pairs=pairs)


def _parameters(keys: Keys, scaling_key: str, kind: str | None) -> dict[str, Any]:
    given = {key: keys.raw(key, default=None) for key in (scaling_key, "rope_parameters")}
    for key, value in given.items():
        if value is not None and not isinstance(value, dict):
            raise keys.error(key, "an object", value)
    chosen: dict[str, Any] = given[scaling_key] or given["rope_parameters"] or {}
    by_kind = {key: value for key, value in chosen.items() if key in LAYER_KINDS}
    if not by_kind:
        return chosen
    if others := sorted(set(chosen) - set(by_kind)):
        kinds = next(iter(by_kind))
        raise ConfigError(
            f"{keys.where}: rope_parameters has '{others[0]}' for all layers beside those of {kinds} layers"
        )
    if kind not in by_kind:
        raise ConfigError(f"{keys.where}: rope_parameters has none for {kind} layers")
    value = by_kind[kind]
    if not isinstance(value, dict):
        raise keys.error("rope_parameters", "an object for each kind of layer", value)
    return value


def _scaling(keys: Keys, inside: Keys, rope_type: RopeType, dim: int) -> RopeScaling | None:
    positions = keys.size("max_position_embeddings")
    beside = keys.optional_size("original_max_position_embeddings")
    original = beside or inside.size("original_max_position_embeddings", default=positions)
    inside.ignore("original_max_position_embeddings", "finetuned")
    factor = inside.number(
        "factor", default=None if rope_type in ("linear", "dynamic", "llama3") else positions / original
    )
    if factor < 1.0:
        raise inside.error("factor", "at least 1", factor)
    if rope_type in ("linear", "dynamic"):
        return RopeScaling(rope_type=rope_type, factor=factor, original_max_position_embeddings=positions)
    if rope_type == "llama3":
        low, high = inside.number("low_freq_factor"), inside.number("high_freq_factor")
        return RopeScaling(
            rope_type="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high,
            original_max_position_embeddings=original,
        )  # fmt: skip
    if rope_type == "yarn":
        return _yarn(inside, factor, original)
    return _longrope(inside, factor, original, dim)


def _yarn(inside: Keys, factor: float, original: int) -> RopeScaling:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    scales = inside.optional_number("mscale"), inside.optional_number("mscale_all_dim")
    default = mscale(scales[0]) / mscale(scales[1]) if scales[0] and scales[1] else mscale(1.0)
    inside.ignore("max_position_embeddings")
    return RopeScaling(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=inside.number("beta_fast", default=32.0),
        beta_slow=inside.number("beta_slow", default=1.0),
        truncate=inside.flag("truncate", default=True),
        attention_factor=inside.number("attention_factor", default=default),
    )


def _longrope(inside: Keys, factor: float, original: int, dim: int) -> RopeScaling:
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        rope_type="longrope",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=inside.number("attention_factor", default=default),
        short_factor=_factors(inside, "short_factor", dim),
        long_factor=_factors(inside, "long_factor", dim),
    )


def _factors(inside: Keys, key: str, dim: int) -> tuple[float, ...]:
    values = inside.raw(key)
    valid = isinstance(values, list) and len(values) == dim // 2
    if not valid or not all(isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < 1e6 for v in values):
        raise inside.error(key, f"a list of {dim // 2} positive numbers", values)
    return tuple(float(value) for value in values)


def reach(rope: Rope | None, positions: int) -> int:
    """The longest context of a model whose configuration says `positions`, with what its rope is stretched to.

    With a linear rope, llama3 or longrope, `positions` is what it is stretched to (Llama-2-7B-32K, Gemma 3).
    """
    scaling = None if rope is None else rope.scaling
    if scaling is None or scaling.rope_type not in ("yarn", "dynamic"):
        return positions
    return max(positions, round(scaling.factor * scaling.original_max_position_embeddings))
