"""What further architectures do in their own way, where it differs from the common layers of hf_families.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from magicdec.errors import ConfigError
from magicdec.specs.hf_families import Details, granite_attention
from magicdec.specs.hf_keys import Keys
from magicdec.specs.hf_layers import (
    KINDS,
    GroupedQuery,
    deepseek_experts,
    dense,
    every_nth,
    experts,
    leading_dense,
    listed_kinds,
    num_layers,
)
from magicdec.specs.hf_rope import read_rope
from magicdec.specs.layers import MLP, Attention, FeedForward, Layer, Mamba2, MixtureOfExperts, Rope


def smollm3_layers(keys: Keys) -> list[Layer]:
    """Every n-th layer has no positions; it may have a window instead."""
    count = num_layers(keys)
    interval = keys.size("no_rope_layer_interval", default=4)
    rotated = keys.per_layer("no_rope_layers", count, lambda each: each in (0, 1), "zeros and ones")
    rotated = rotated or [int((i + 1) % interval != 0) for i in range(count)]
    has_window = keys.flag("use_sliding_window") and keys.optional_size("sliding_window") is not None
    keys.ignore("sliding_window", "max_window_layers")
    kinds = listed_kinds(keys, lambda i: "sliding_attention" if has_window and not rotated[i] else "full_attention")
    head = GroupedQuery(bias="attention_bias", output_bias="attention_bias", theta=2_000_000.0)
    mlp = dense(keys, bias="mlp_bias")
    mixers = [head.read(keys, kind if has_window else "full_attention") for kind in kinds]
    return [
        Layer(mixer=mixer if turned else msgspec.structs.replace(mixer, rope=None), mlp=mlp)
        for mixer, turned in zip(mixers, rotated, strict=True)
    ]


def ernie_experts(keys: Keys, index: int) -> FeedForward:
    """Experts in every n-th of the layers from `moe_layer_start_index` to `moe_layer_end_index`."""
    count, width = num_layers(keys), keys.size("moe_intermediate_size")
    first = keys.size("moe_layer_start_index", default=1, least=0)
    last = keys.size("moe_layer_end_index", default=-1, least=-1)
    step = keys.size("moe_layer_interval", default=1)
    routed = experts(
        keys,
        normalized=True,
        correction_bias=True,
        shared_width=width * keys.size("moe_num_shared_experts", default=2, least=0),
    )
    plain = dense(keys)
    is_sparse = first <= index <= (count - 1 if last == -1 else last) and (index + 1) % step == 0
    return routed if is_sparse else plain


def ernie_details(keys: Keys) -> Details:
    """Prediction heads of a dense layer, whatever the model's are (vLLM's ernie_mtp.py)."""
    heads = keys.size("num_nextn_predict_layers", default=0, least=0)
    mixer = GroupedQuery(theta=500_000.0, pairs="adjacent").read(keys, "full_attention")
    return {"mtp_layers": (Layer(mixer=mixer, mlp=dense(keys)),) * heads}


def exaone4_kinds(keys: Keys) -> list[str]:
    """Windows but for every n-th layer, or by a pattern of L and G that repeats, its last layer attending to all."""
    count = num_layers(keys)
    pattern = keys.raw("sliding_window_pattern", default=4)
    if keys.optional_size("sliding_window") is None:
        keys.ignore("layer_types")
        return ["full_attention"] * count
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
        local = [pattern[i % len(pattern)] == "L" and i < count - 1 for i in range(count)]
        return listed_kinds(keys, lambda i: "sliding_attention" if local[i] else "full_attention")
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        raise keys.error("sliding_window_pattern", "a whole number, or a pattern of L and G", pattern)
    return listed_kinds(keys, every_nth(pattern))


def exaone4_attention(keys: Keys, kind: str) -> Attention:
    """Where some layers have windows, only they have positions."""
    is_mixed = keys.optional_size("sliding_window") is not None
    return GroupedQuery(qk_norm="head", rotated="window" if is_mixed else "all").read(keys, kind)


def dots1_mlp(keys: Keys, index: int) -> FeedForward:
    """DeepSeek-V3's experts, by scores that its files call noaux_tc and that are sigmoids."""
    return leading_dense(keys, index, partial(deepseek_experts, scoring_names=("sigmoid", "noaux_tc")))


def dots1_kinds(keys: Keys) -> list[str]:
    """Windows from layer `max_window_layers` on, where there is one."""
    window = keys.optional_size("sliding_window")
    first = keys.size("max_window_layers", default=62, least=0)
    return listed_kinds(keys, lambda i: "sliding_attention" if window is not None and i >= first else "full_attention")


def ministral3_attention(keys: Keys, kind: str) -> Attention:
    """Queries grow with their position, as `llama_4_scaling_beta` among the rope's parameters says."""
    scaled = partial(read_rope, beside=("llama_4_scaling_beta",))
    mixer = GroupedQuery(head_dim=128, theta=1_000_000.0, rope=scaled).read(keys, kind)
    given = keys.raw("rope_parameters", "rope_scaling", default=None) or {}
    inside = Keys(given, f"{keys.where}: rope")
    if not given.get("llama_4_scaling_beta"):
        return mixer
    beta, length = inside.number("llama_4_scaling_beta"), inside.size("original_max_position_embeddings")
    return msgspec.structs.replace(mixer, temperature=(beta, float(length)), temperature_offset=0)


def hunyuan_rope(keys: Keys, head_dim: int, **options: Any) -> Rope:
    """`alpha` stretches the base once and for all, although the files call it dynamic."""
    given = keys.raw("rope_scaling", "rope_parameters", default=None)
    if not isinstance(given, dict) or not given.get("alpha"):
        return read_rope(keys, head_dim, **options)
    inside = Keys(given, f"{keys.where}: rope")
    base = inside.number("rope_theta", default=keys.number("rope_theta", default=10_000.0), least=1.0)
    inside.require("factor", 1.0, 1)
    inside.ignore("type", "rope_type", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    alpha = inside.number("alpha")
    if left := inside.unread():
        raise ConfigError(f"{inside.where}: key '{left[0]}' is not understood")
    return Rope(dim=head_dim, theta=base * alpha ** (head_dim / (head_dim - 2)))


def phimoe_rope(keys: Keys, head_dim: int, **options: Any) -> Rope:
    """Phi-3's, with the factors of cosine and sine given."""
    rope = read_rope(keys, head_dim, beside=("short_mscale", "long_mscale"), **options)
    given = keys.raw("rope_scaling", "rope_parameters", default=None) or {}
    if rope.scaling is None or not given.get("long_mscale"):
        return rope
    factor = Keys(given, f"{keys.where}: rope").number("long_mscale")
    return msgspec.structs.replace(rope, scaling=msgspec.structs.replace(rope.scaling, attention_factor=factor))


def phimoe_experts(keys: Keys) -> MixtureOfExperts:
    """What trains with noise chooses among the experts that noise might have chosen."""
    nearness = keys.number("router_jitter_noise", default=0.01, least=-1e-9, most=1.0)
    return experts(keys, width="intermediate_size", normalized=False, scoring="sparse_mixer", nearness=nearness)


def phimoe_details(keys: Keys) -> Details:
    return {"head_bias": keys.flag("lm_head_bias")}


def granite_mamba(keys: Keys) -> Mamba2:
    heads, groups = keys.size("mamba_n_heads", default=128), keys.size("mamba_n_groups", default=1)
    inner = keys.size("mamba_expand", default=2) * keys.size("hidden_size")
    given = keys.raw("mamba_d_head", default="auto")
    head_dim = inner // heads if given == "auto" else keys.size("mamba_d_head")
    if heads * head_dim != inner or heads % groups:
        raise ConfigError(
            f"{keys.where}: mamba_n_heads {heads} in {groups} groups, of {head_dim} numbers each, do not fit "
            f"mamba_expand · hidden_size, {inner}"
        )
    return Mamba2(
        num_heads=heads,
        head_dim=head_dim,
        state_size=keys.size("mamba_d_state", default=256),
        num_groups=groups,
        conv_kernel=keys.size("mamba_d_conv", default=4),
        conv_bias=keys.flag("mamba_conv_bias", default=True),
        bias=keys.flag("mamba_proj_bias"),
    )


def granite_hybrid_layers(keys: Keys) -> list[Layer]:
    """Mamba-2 and, here and there, attention that may have no positions; behind each, experts beside a shared one, or
    the shared one alone."""
    position = keys.choice("position_embedding_type", choices={"nope": False, "rope": True}, default="nope")
    width = keys.size("shared_intermediate_size", default=1024)
    is_sparse = keys.size("num_local_experts", default=8, least=0) > 0
    if is_sparse:
        mlp: FeedForward = experts(
            keys, width="intermediate_size", normalized=True, scoring="softmax_of_chosen", shared_width=width
        )
    else:
        keys.ignore("num_experts_per_tok", "intermediate_size")
        mlp = MLP(width=width, activation=keys.activation())
    layers = []
    for kind in listed_kinds(keys, lambda i: "linear_attention"):
        if KINDS[kind] == "linear":
            layers.append(Layer(mixer=granite_mamba(keys), mlp=mlp))
        else:
            mixer = granite_attention(keys, kind)
            layers.append(Layer(mixer=mixer if position else msgspec.structs.replace(mixer, rope=None), mlp=mlp))
    keys.ignore("mamba_chunk_size", "time_step_limit", "normalization_function", "init_method", "rope_theta")
    keys.ignore(*(key for key in GRANITE_MAMBA), "attention_multiplier", "num_key_value_heads", "attention_bias")
    return layers


GRANITE_MAMBA = (
    "mamba_n_heads", "mamba_n_groups", "mamba_expand", "mamba_d_head", "mamba_d_state", "mamba_d_conv",
    "mamba_conv_bias", "mamba_proj_bias",
)  # fmt: skip
"""Of no matter where no layer is a recurrence: the file says them all the same."""
