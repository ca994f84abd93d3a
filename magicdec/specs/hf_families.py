"""What one architecture does in its own way: functions that the rows of architectures.py name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from magicdec.errors import ConfigError
from magicdec.specs.hf_keys import Keys
from magicdec.specs.hf_layers import (
    KINDS,
    GroupedQuery,
    deepseek_experts,
    dense,
    every_nth,
    experts,
    gated_delta_net,
    indexer,
    latent,
    leading_dense,
    lightning,
    listed_kinds,
    mamba2,
    num_layers,
)
from magicdec.specs.hf_rope import read_rope
from magicdec.specs.layers import MLP, Attention, FeedForward, Layer, MixtureOfExperts, Rope

Details = dict[str, Any]
"""Fields of ModelSpec beyond its tables, layers and norms."""


def stacked(
    mixer: Callable[[Keys, str], Any],
    mlp: Callable[[Keys, int], FeedForward],
    kinds: Callable[[Keys], list[str]] | None = None,
) -> Callable[[Keys], list[Layer]]:
    """Layers of a mixer by kind and a feed-forward by index."""

    def read(keys: Keys) -> list[Layer]:
        chosen = ["full_attention"] * num_layers(keys) if kinds is None else kinds(keys)
        mixers = {kind: mixer(keys, kind) for kind in dict.fromkeys(chosen)}
        return [Layer(mixer=mixers[kind], mlp=mlp(keys, index)) for index, kind in enumerate(chosen)]

    return read


def plain(mlp: Callable[[Keys], FeedForward]) -> Callable[[Keys, int], FeedForward]:
    return lambda keys, index: mlp(keys)


def plain_mlp(**options: Any) -> Callable[[Keys, int], FeedForward]:
    return plain(partial(dense, **options))


def always_window(keys: Keys) -> list[str]:
    """Every layer sees `sliding_window` tokens, where that is not null."""
    kind = "full_attention" if keys.optional_size("sliding_window") is None else "sliding_attention"
    return [kind] * num_layers(keys)


def qwen_kinds(keys: Keys) -> list[str]:
    """Windows from layer `max_window_layers` on, where `use_sliding_window` is true; or as `layer_types` says."""
    window = keys.optional_size("sliding_window") if keys.flag("use_sliding_window") else None
    keys.ignore("sliding_window")
    first = keys.size("max_window_layers", default=28, least=0)
    return listed_kinds(keys, lambda i: "sliding_attention" if window is not None and i >= first else "full_attention")


def qwen3_moe_kinds(keys: Keys) -> list[str]:
    """One window for all layers, where `use_sliding_window` is true."""
    used = keys.flag("use_sliding_window")
    kinds = always_window(keys) if used else ["full_attention"] * num_layers(keys)
    keys.ignore("sliding_window", "max_window_layers", "layer_types")
    return kinds


def pattern_kinds(default: int) -> Callable[[Keys], list[str]]:
    """Every n-th layer attends fully, n given by `sliding_window_pattern`; or as `layer_types` says."""

    def read(keys: Keys) -> list[str]:
        interval = keys.size("sliding_window_pattern", "_sliding_window_pattern", default=default)
        return listed_kinds(keys, every_nth(interval))

    return read


def alternating(keys: Keys) -> list[str]:
    return listed_kinds(keys, every_nth(2))


def linear_kinds(keys: Keys) -> list[str]:
    """Every n-th layer attends fully, n given by `full_attention_interval`; or as `layer_types` says, maybe all."""
    keys.ignore(
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
    )
    return listed_kinds(keys, every_nth(keys.size("full_attention_interval", default=4), other="linear_attention"))


def grouped(**options: Any) -> Callable[[Keys, str], Attention]:
    return GroupedQuery(**options).read


def gemma_attention(qk_norm: bool, head_dim: int, local_theta: bool) -> Callable[[Keys, str], Attention]:
    """Gemma's: scores scaled by query_pre_attn_scalar, soft caps; windows with a rotary base of their own."""

    def read(keys: Keys, kind: str) -> Attention:
        keys.require("use_bidirectional_attention", False)
        head = GroupedQuery(
            bias="attention_bias",
            output_bias="attention_bias",
            qk_norm="head" if qk_norm else "none",
            head_dim=head_dim,
        )
        mixer = head.read(keys, kind)
        if local_theta:
            mixer = msgspec.structs.replace(mixer, rope=gemma3_rope(keys, mixer, kind))
        return msgspec.structs.replace(
            mixer,
            softcap=keys.optional_number("attn_logit_softcapping"),
            scale=keys.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        )

    return read


def gemma3_rope(keys: Keys, mixer: Attention, kind: str) -> Any:
    """Windows: base `rope_local_base_freq`, never scaled; full layers: `rope_theta`, scaled as rope_scaling says."""
    nested = keys.raw("rope_parameters", default=None)
    is_local = KINDS[kind] == "window"
    local = keys.number("rope_local_base_freq", default=10_000.0)
    if isinstance(nested, dict) and kind in nested and not keys.raw("rope_scaling", default=None):
        return read_rope(keys, mixer.head_dim, kind=kind, theta=local if is_local else 1_000_000.0)
    if is_local:
        return Rope(dim=mixer.head_dim, theta=local)
    return read_rope(keys, mixer.head_dim, kind=kind, theta=1_000_000.0)


def gemma_mlp(keys: Keys) -> MLP:
    """`hidden_activation`, or the older `hidden_act`, whose "gelu" meant the tanh approximation."""
    older = keys.raw("hidden_act", default=None)
    name = keys.raw("hidden_activation", default=None) or older or "gelu_pytorch_tanh"
    tanh = {"hidden_activation": "gelu_pytorch_tanh" if name == "gelu" and older == "gelu" else name}
    return MLP(width=keys.size("intermediate_size"), activation=Keys(tanh, keys.where).activation("hidden_activation"))


def gemma_details(keys: Keys) -> Details:
    cap = keys.optional_number("final_logit_softcapping")
    return {"embedding_scale": keys.size("hidden_size") ** 0.5, "logit_softcap": cap}


def cohere_details(keys: Keys) -> Details:
    return {"logit_scale": keys.number("logit_scale", default=0.0625)}


def granite_attention(keys: Keys, kind: str) -> Attention:
    mixer = GroupedQuery(bias="attention_bias", output_bias="attention_bias").read(keys, kind)
    return msgspec.structs.replace(mixer, scale=keys.number("attention_multiplier", default=1.0))


def granite_details(keys: Keys) -> Details:
    return {
        "embedding_scale": keys.number("embedding_multiplier", default=1.0),
        "residual_scale": keys.number("residual_multiplier", default=1.0),
        "logit_scale": 1.0 / keys.number("logits_scaling", default=1.0),
    }


def gpt_oss_experts(keys: Keys) -> MixtureOfExperts:
    keys.require("hidden_act", "silu")
    keys.require("swiglu_alpha", 1.702)
    keys.require("swiglu_limit", 7.0)
    return experts(
        keys, width="intermediate_size", normalized=False, activation="swigluoai", bias=True, router_bias=True,
        scoring="softmax_of_chosen",
    )  # fmt: skip


def llama4_layers(keys: Keys) -> list[Layer]:
    """Rotated layers see their chunk of the context, the others all of it; experts in every n-th layer."""
    count = num_layers(keys)
    interval = keys.size("no_rope_layer_interval", default=4)
    default = [int((i + 1) % interval != 0) for i in range(count)]
    if keys.raw("no_rope_layers", default=None) != []:  # an empty list says nothing
        default = keys.per_layer("no_rope_layers", count, lambda each: each in (0, 1), "zeros and ones") or default
    rotated = default
    kinds = listed_kinds(keys, lambda i: "chunked_attention" if rotated[i] else "full_attention")
    step = keys.size("interleave_moe_layer_step", default=1)
    sparse = keys.indices("moe_layers", count)
    sparse = frozenset(range(step - 1, count, step)) if sparse is None else sparse
    tuning = (keys.number("attn_scale", default=0.1), keys.number("floor_scale", default=8192.0))
    keys.require("attn_temperature_tuning", True, False, 4)  # 4 in the first published files
    is_tuned = bool(keys.raw("attn_temperature_tuning", default=True))
    norm = "l2" if keys.flag("use_qk_norm", default=True) else "none"
    grouped = GroupedQuery(
        bias="attention_bias", output_bias="attention_bias", head_dim=128, theta=500_000.0, pairs="adjacent"
    )
    width = keys.size("intermediate_size")
    routed = experts(keys, width="intermediate_size", normalized=False, scoring="sigmoid_of_input", shared_width=width)
    plain = dense(keys, width="intermediate_size_mlp")
    layers = []
    for index, kind in enumerate(kinds):
        mixer = grouped.read(keys, kind)
        if rotated[index]:
            mixer = msgspec.structs.replace(mixer, qk_norm=norm)
        else:
            mixer = msgspec.structs.replace(mixer, rope=None, temperature=tuning if is_tuned else None)
        layers.append(Layer(mixer=mixer, mlp=routed if index in sparse else plain))
    return layers


def minimax_m2_attention(keys: Keys, kind: str) -> Attention:
    keys.per_layer("attn_type_list", num_layers(keys), lambda each: each == 1, "ones (full attention)")
    dim, head_dim = keys.size("rotary_dim", default=64), keys.size("head_dim", default=128)
    return GroupedQuery(qk_norm="layer", head_dim=128, theta=5_000_000.0, partial=dim / head_dim).read(keys, kind)


def glm_moe(keys: Keys, index: int) -> FeedForward:
    return leading_dense(keys, index, deepseek_experts)


def glm4_moe_attention(keys: Keys, kind: str) -> Attention:
    norm: Any = "head" if keys.flag("use_qk_norm") else "none"
    return GroupedQuery(bias="attention_bias", qk_norm=norm, partial=0.5).read(keys, kind)


def deepseek_v2_experts(keys: Keys) -> MixtureOfExperts:
    greedy = keys.choice("topk_method", choices={"greedy": True, "group_limited_greedy": False}, default="greedy")
    changes: Details = {"num_groups": 1, "num_chosen_groups": 1} if greedy else {"group_score": "max"}
    keys.ignore("norm_topk_prob")
    return deepseek_experts(keys, scoring="softmax", normalized=False, **changes)


def sparse_latent(keys: Keys, index: int) -> Any:
    """Latent attention over the tokens that an indexer chooses; some layers may take an earlier layer's choice."""
    count = num_layers(keys)
    listed_kinds(keys, lambda i: "indexed_attention")
    types = keys.per_layer("indexer_types", count, lambda each: each in ("full", "shared"), "full, shared")
    frequency = keys.size("index_topk_freq", default=1)
    offset = keys.size("index_skip_topk_offset", default=2, least=0)
    pattern = keys.raw("index_topk_pattern", default=None)
    keys.ignore("indexer_rope_interleave")
    if types is None and pattern is not None:
        types = [{"F": "full", "S": "shared"}.get(each, each) for each in pattern]
    if types is None:
        types = ["shared" if max(i - offset + 1, 0) % frequency else "full" for i in range(count)]
    chosen = indexer(keys, is_shared=types[index] == "shared")
    return msgspec.structs.replace(latent(keys), indexer=chosen)


def sparse_latent_layers(keys: Keys) -> list[Layer]:
    return [Layer(mixer=sparse_latent(keys, i), mlp=glm_moe(keys, i)) for i in range(num_layers(keys))]


def qwen3_next_mixer(keys: Keys, kind: str) -> Any:
    if KINDS[kind] == "linear":
        return gated_delta_net(keys)
    keys.require("attn_output_gate", True)
    return GroupedQuery(
        bias="attention_bias", output_bias="attention_bias", qk_norm="head", head_dim=256, gated=True, partial=0.25
    ).read(keys, kind)


def qwen_shared_experts(normalized: bool | None) -> Callable[[Keys], MixtureOfExperts]:
    def read(keys: Keys) -> MixtureOfExperts:
        width = keys.size("shared_expert_intermediate_size", default=0, least=0)
        return experts(keys, normalized=normalized, shared_width=width, shared_gate=width > 0)

    return read


def minimax_mixer(keys: Keys, kind: str) -> Any:
    if KINDS[kind] == "linear":
        keys.ignore("block_size", "sliding_window")
        return lightning(keys)
    return GroupedQuery(theta=1_000_000.0).read(keys, kind)


BLOCKS = {
    "M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp", "mamba": "linear_attention",
    "attention": "full_attention", "linear_attention": "linear_attention", "full_attention": "full_attention",
    "moe": "moe", "mlp": "mlp",
}  # fmt: skip
"""What Nemotron-H's patterns and lists call their blocks."""


def nemotron_h_layers(keys: Keys) -> list[Layer]:
    """One block, and one norm, per layer: Mamba-2, attention without positions, an MLP, or experts."""
    return [nemotron_h_block(keys, name) for name in blocks(keys, "hybrid_override_pattern", "layers_block_type")]


def blocks(keys: Keys, pattern: str, listed: str) -> list[str]:
    given = (
        keys.raw(listed, "layer_types", default=None)
        if listed == "layers_block_type"
        else keys.raw(listed, default=None)
    )
    names = keys.raw(pattern, default=None) if given is None else given
    keys.ignore(pattern, "num_hidden_layers")
    if not isinstance(names, str | list) or not names or not all(name in BLOCKS for name in names):
        raise keys.error(pattern, f"a pattern of {', '.join(BLOCKS)}", names)
    return [BLOCKS[name] for name in names]


def nemotron_h_block(keys: Keys, name: str) -> Layer:
    keys.ignore("expand", "partial_rotary_factor", "rope_theta", "sliding_window", "head_dim", "attention_bias")
    keys.require("use_bias", False)
    keys.require("mlp_bias", False)
    if name == "linear_attention":
        return Layer(mixer=mamba2(keys))
    if name == "full_attention":
        return Layer(mixer=GroupedQuery(head_dim=128, rotated="none", partial=1.0).read(keys, "full_attention"))
    activation = keys.activation("mlp_hidden_act", default="relu2")
    if name == "mlp":
        return Layer(mlp=MLP(width=keys.size("intermediate_size"), activation=activation, gated=False))
    shared = keys.size("moe_shared_expert_intermediate_size", default=0, least=0)
    shared *= keys.size("n_shared_experts", default=1, least=0)
    routed = deepseek_experts(
        keys, activation=activation, gated=False, shared_width=shared, latent_size=keys.optional_size("moe_latent_size")
    )
    return Layer(mlp=routed)


def nemotron_h_details(keys: Keys) -> Details:
    heads = keys.size("num_nextn_predict_layers", default=0, least=0)
    names = ["full_attention", "moe"]
    if keys.raw("mtp_hybrid_override_pattern", "mtp_layers_block_type", default=None) is not None:
        names = blocks(keys, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    parts = [nemotron_h_block(keys, name) for name in names] if heads else []
    mixer = next((part.mixer for part in parts if part.mixer is not None), None)
    mlp = next((part.mlp for part in parts if part.mlp is not None), None)
    return {"mtp_layers": (Layer(mixer=mixer, mlp=mlp),) * heads}


def nemotron_nas_layers(keys: Keys) -> list[Layer]:
    """Each layer as `block_configs` says: KV heads of its own or no attention, an MLP of its own width or none."""
    heads, hidden = keys.size("num_attention_heads"), keys.size("hidden_size")
    keys.ignore("num_key_value_heads", "intermediate_size")
    blocks = keys.per_layer("block_configs", num_layers(keys), lambda each: isinstance(each, dict), "objects")
    if blocks is None:
        raise ConfigError(f"{keys.where}: key 'block_configs' is missing")
    layers = []
    for block in blocks:
        attention, mlp = (Keys(block.get(part) or {}, f"{keys.where}: {part} block") for part in ("attention", "ffn"))
        for part in (attention, mlp):
            part.require("replace_with_linear", False)
            part.require("sparsify", None)
        attention.require("window_length", None)
        attention.require("num_sink_tokens", None)
        attention.ignore("unshifted_sink", "use_prefill_window_in_sink_attention")
        mixer = feed_forward = None
        group, factor = attention.optional_size("n_heads_in_group"), mlp.optional_number("ffn_mult")
        if not attention.flag("no_op"):
            mixer = msgspec.structs.replace(
                GroupedQuery(bias="attention_bias", output_bias="attention_bias").read(keys, "full_attention"),
                num_kv_heads=heads // (group or 1),
            )
        if not mlp.flag("no_op"):
            width = -(-int(2 * (factor or 1.0) * hidden / 3) // 256) * 256
            feed_forward = MLP(width=width, activation=keys.activation(), bias=keys.flag("mlp_bias"))
        for part in (attention, mlp):
            if left := part.unread():
                raise ConfigError(f"{part.where}: key '{left[0]}' is not understood")
        layers.append(Layer(mixer=mixer, mlp=feed_forward))
    return layers
