"""Rotary embeddings as a configuration describes them: `rope_parameters`, or `rope_scaling` with
`rope_theta`.

Follows transformers' `RotaryEmbeddingConfigMixin`: a `rope_scaling` that is there takes the place
of `rope_parameters`; what stands inside wins over `rope_theta` and `partial_rotary_factor` outside;
in Gemma 3 and OLMo 3 kinds of layers have one each. Constants inside a rope (`beta_fast` and so on)
are those of `modeling_rope_utils.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from magicdec.errors import ConfigError, unknown_choice
from magicdec.specs.families.keys import Keys, is_number
from magicdec.specs.mixers import Rope, RopeScaling, RopeType

ROPE_TYPES: Mapping[str, RopeType | None] = {
    "default": None,
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "longrope": "longrope",
    "llama3": "llama3",
}
MULTIMODAL_TYPES: Mapping[str, RopeType | None] = {**ROPE_TYPES, "mrope": None}
"""Those of models of several modalities: of text, the three position indices of mrope are one."""
LAYER_KINDS = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
)


def read_rope(
    keys: Keys,
    head_dim: int,
    *,
    kind: str | None = None,
    partial: bool = False,
    share: float = 1.0,
    pairs: Literal["halves", "adjacent"] = "halves",
    types: Mapping[str, RopeType | None] = ROPE_TYPES,
    beside: tuple[str, ...] = (),
    any_share: bool = False,
) -> Rope:
    """The rotary embedding of every layer; or of a layer of this kind, where kinds have one each
    (`rope_by_kind`). Without `partial` the architecture's code rotates whole heads, whatever its
    configuration says; another share is refused. `share` is that of a file without any. `beside`:
    keys among the rope's that the architecture reads itself. `any_share`: the code rotates whole
    heads, and files may name another share all the same."""
    if kind is None:
        rope = rope_parameters(keys)
    else:
        rope = rope_by_kind(keys).get(kind, {})
    inside = Keys(rope, f"{keys.where}: rope")
    if "rope_theta" not in rope:
        rope = {**rope, "rope_theta": keys.raw("rope_theta")}
    keys.ignore("rope_theta")
    base = Keys(rope, inside.where).number("rope_theta", least=1.0)
    outside = keys.raw("partial_rotary_factor", default=share)
    if outside is None:
        outside = 1.0
    value = rope.get("partial_rotary_factor", outside)
    share = Keys({"partial_rotary_factor": value}, keys.where).number(
        "partial_rotary_factor", most=1.0
    )
    if any_share:
        share = 1.0
    if not partial and share != 1.0:
        raise keys.error("partial_rotary_factor", "1.0 in this architecture", share)
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise ConfigError(
            f"{keys.where}: rotary embeddings need an even number of dimensions, not {dim} of "
            f"{head_dim}"
        )
    inside.ignore(
        "rope_theta",
        "partial_rotary_factor",
        "type",
        "mrope_section",
        "mrope_interleaved",
        *beside,
    )
    name = inside.raw("rope_type", default=rope.get("type", "default"))
    if not isinstance(name, str) or name not in types:
        raise unknown_choice(f"rope type in {keys.where}", name, types)
    if types[name] is None:
        scaling = None
    else:
        scaling = _scaling(keys, inside, types[name], dim, nested=kind is not None)
    if left := inside.unread():
        raise ConfigError(
            f"{keys.where}: key '{left[0]}' of the {name} rope is not understood"
        )
    return Rope(dim=dim, theta=base, scaling=scaling, pairs=pairs)


def rope_parameters(keys: Keys) -> dict[str, Any]:
    """The rope of all layers. A file without one has its class's."""
    scaling = _object(keys, "rope_scaling")
    own = _object(keys, "rope_parameters")
    if own is None:
        own = keys.default("rope_parameters")
    rope: dict[str, Any] = scaling or own or {}
    for key in rope:
        if key in LAYER_KINDS:
            raise ConfigError(
                f"{keys.where}: rope_parameters has an entry for {key} layers, but this "
                "architecture has one rope for all layers"
            )
    return rope


def rope_by_kind(keys: Keys) -> dict[str, dict[str, Any]]:
    """The ropes of full layers and of windows. `rope_scaling`, and `rope_theta`, are those of full
    layers; windows have `rope_local_base_freq`, or their class's own base."""
    scaling = _object(keys, "rope_scaling")
    own = _object(keys, "rope_parameters")
    by_kind = {
        kind: {"rope_type": "default"}
        for kind in ("full_attention", "sliding_attention")
    }
    for kind, rope in (own or {}).items():
        if kind not in by_kind:
            raise ConfigError(
                f"{keys.where}: rope_parameters has '{kind}' beside those of kinds of layers"
            )
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise keys.error(
                "rope_parameters", "an object for each kind of layer", rope
            )
        by_kind[kind] = rope
    if scaling is not None and own is not None and own.get("full_attention") is None:
        raise ConfigError(
            f"{keys.where}: rope_scaling scales full_attention layers, which rope_parameters lacks"
        )
    full, local = by_kind.values()
    base = keys.default("rope_theta")
    if keys.knows("rope_local_base_freq"):
        base = keys.raw("rope_local_base_freq")
    return {
        "full_attention": {**full, **(scaling or {})},
        "sliding_attention": {"rope_theta": base, **local},
    }


def _object(keys: Keys, key: str) -> dict[str, Any] | None:
    value = keys.raw(key, default=None)
    if value is not None and not isinstance(value, dict):
        raise keys.error(key, "an object", value)
    return value


def _scaling(
    keys: Keys,
    inside: Keys,
    rope_type: RopeType | None,
    dim: int,
    *,
    nested: bool,
) -> RopeScaling | None:
    positions = keys.size("max_position_embeddings")
    if rope_type in ("linear", "dynamic"):
        inside.ignore("original_max_position_embeddings")
        return RopeScaling(
            rope_type=rope_type,
            factor=_factor(inside),
            original_max_position_embeddings=positions,
        )
    own = inside.optional_size("original_max_position_embeddings") or positions
    if nested:
        original = own
    else:
        original = keys.optional_size("original_max_position_embeddings") or own
    if rope_type == "llama3":
        low = inside.number("low_freq_factor")
        high = inside.number("high_freq_factor")
        return RopeScaling(
            rope_type="llama3",
            factor=_factor(inside),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=original,
        )
    if rope_type == "yarn":
        if nested:  # transformers looks for it among the kinds of layers
            inside.ignore("truncate")
        return _yarn(
            inside,
            positions,
            original,
            truncate=nested or inside.raw("truncate", default=True),
        )
    return _longrope(inside, positions, original, dim)


def _factor(inside: Keys, default: float | None = None) -> float:
    """Factor by which positions are stretched. Null means `default`, if there is one."""
    if default is None:
        value = inside.raw("factor")
    else:
        value = inside.raw("factor", default=None)
    if value is None and default is not None:
        factor = default
    else:
        factor = inside.number("factor")
    if factor < 1.0:
        raise inside.error("factor", "at least 1", factor)
    return factor


def _yarn(
    inside: Keys, positions: int, original: int, *, truncate: bool
) -> RopeScaling:
    inside.raw("factor")  # may be null, and not absent
    inside.ignore("finetuned", "max_position_embeddings")
    factor = _factor(inside, positions / original)

    def mscale(weight: float) -> float:
        if factor > 1:
            return 0.1 * weight * math.log(factor) + 1.0
        return 1.0

    part = inside.raw("mscale", default=None)
    whole = inside.raw("mscale_all_dim", default=None)
    for scale in (part, whole):
        if scale is not None and not is_number(scale):
            raise inside.error("mscale", "a number", scale)
    attention_factor = inside.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = mscale(1.0)
        if part and whole:
            attention_factor = mscale(part) / mscale(whole)
    if not isinstance(truncate, bool):
        raise inside.error("truncate", "true or false", truncate)
    beta_slow = 1.0
    if inside.raw("beta_slow", default=None):
        beta_slow = inside.number("beta_slow")
    beta_fast = 32.0
    if inside.raw("beta_fast", default=None):
        beta_fast = inside.number("beta_fast")
    return RopeScaling(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=truncate,
        attention_factor=attention_factor,
    )


def _longrope(inside: Keys, positions: int, original: int, dim: int) -> RopeScaling:
    factor = _factor(inside, positions / original)
    if factor > 1:
        default = math.sqrt(1 + math.log(factor) / math.log(original))
    else:
        default = 1.0
    attention_factor = inside.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = default
    lists: dict[str, Any] = {}
    for key in ("short_factor", "long_factor"):
        values = inside.raw(key)
        is_list = isinstance(values, list) and len(values) == dim // 2
        if not is_list or not all(
            is_number(value) and 0 < value < 1e6 for value in values
        ):
            raise inside.error(key, f"a list of {dim // 2} positive numbers", values)
        lists[key] = tuple(map(float, values))
    return RopeScaling(
        rope_type="longrope",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        **lists,
    )


def reach(rope: Rope | None, positions: int) -> int:
    """The longest context of a model whose configuration says `positions`, with what its rope is
    stretched to. With a linear rope, llama3 or longrope, `positions` is what it is stretched to
    (Llama-2-7B-32K, Gemma 3)."""
    if rope is None or rope.scaling is None:
        return positions
    scaling = rope.scaling
    if scaling.rope_type not in ("yarn", "dynamic"):
        return positions
    return max(
        positions, round(scaling.factor * scaling.original_max_position_embeddings)
    )
