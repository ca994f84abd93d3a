"""Granite, MiniMax, Ling and Nemotron: hybrids of recurrences (Mamba-2, lightning attention, Kimi's
delta rule) with attention, experts and dense feed-forwards, and their publishers' other architectures."""

from __future__ import annotations

from functools import partial

import msgspec

from magicdec.errors import ConfigError
from magicdec.specs.families import parts
from magicdec.specs.families.keys import Keys
from magicdec.specs.families.parts import (
    KINDS,
    Architecture,
    Details,
    GroupedQuery,
    biased,
    num_layers,
)
from magicdec.specs.families.rope import read_rope
from magicdec.specs.layers import MLP, FeedForward, Layer, MixtureOfExperts
from magicdec.specs.mixers import (
    Attention,
    KimiDeltaAttention,
    LatentAttention,
    LightningAttention,
    Mamba2,
)
from magicdec.specs.model import Norm, TensorNames

MAMBA_KEYS = (
    "mamba_n_heads",
    "mamba_n_groups",
    "mamba_expand",
    "mamba_d_head",
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_conv_bias",
    "mamba_proj_bias",
)
"""Keys that a file without any recurrence has all the same."""


def granite_attention(keys: Keys, kind: str) -> Attention:
    return msgspec.structs.replace(
        biased()(keys, kind), scale=keys.number("attention_multiplier")
    )


def granite_details(keys: Keys) -> Details:
    return {
        "embedding_scale": keys.number("embedding_multiplier"),
        "residual_scale": keys.number("residual_multiplier"),
        "logit_scale": 1.0 / keys.number("logits_scaling"),
    }


def granite_mamba(keys: Keys) -> Mamba2:
    heads = keys.size("mamba_n_heads")
    groups = keys.size("mamba_n_groups")
    inner = keys.size("mamba_expand") * keys.size("hidden_size")
    if keys.raw("mamba_d_head") == "auto":
        head_dim = inner // heads
    else:
        head_dim = keys.size("mamba_d_head")
    if heads * head_dim != inner or heads % groups:
        raise ConfigError(
            f"{keys.where}: mamba_n_heads {heads} in {groups} groups, of {head_dim} numbers each, "
            "do not fit "
            f"mamba_expand · hidden_size, {inner}"
        )
    return Mamba2(
        num_heads=heads,
        head_dim=head_dim,
        state_size=keys.size("mamba_d_state"),
        num_groups=groups,
        conv_kernel=keys.size("mamba_d_conv"),
        conv_bias=keys.flag("mamba_conv_bias"),
        bias=keys.flag("mamba_proj_bias"),
    )


def granite_layers(keys: Keys) -> list[Layer]:
    """Mamba-2 and, here and there, attention that may have no positions; behind each, experts with
    a shared one, or the shared one alone."""
    # what other names, and null, have is none
    position = keys.raw("position_embedding_type") == "rope"
    width = keys.size("shared_intermediate_size")
    feed_forward: FeedForward
    if keys.size("num_local_experts", least=0) > 0:
        feed_forward = parts.experts(
            keys,
            width="intermediate_size",
            normalized=True,
            scoring="softmax_of_chosen",
            shared_width=width,
        )
    else:
        keys.ignore("num_experts_per_tok", "intermediate_size")
        keys.require("output_router_logits", False)
        feed_forward = MLP(width=width, activation=keys.activation())
    layers = []
    for kind in parts.listed_kinds(keys, lambda i: "linear_attention"):
        if KINDS[kind] == "linear":
            layers.append(Layer(mixer=granite_mamba(keys), mlp=feed_forward))
        else:
            mixer = granite_attention(keys, kind)
            if not position:
                mixer = msgspec.structs.replace(mixer, rope=None)
            layers.append(Layer(mixer=mixer, mlp=feed_forward))
    keys.ignore(
        "normalization_function",
        "init_method",
        "rope_theta",
        "rope_parameters",
        "rope_scaling",
    )
    keys.ignore(
        *MAMBA_KEYS, "attention_multiplier", "num_key_value_heads", "attention_bias"
    )
    return layers


def minimax_kinds(keys: Keys) -> list[str]:
    """Lightning in every second layer, or as `layer_types` says. Residuals are of normed inputs,
    which only lightning layers tell: without any, the model would be taken for another."""
    kinds = parts.listed_kinds(
        keys, lambda i: "linear_attention" if i % 2 else "full_attention"
    )
    if all(KINDS[kind] != "linear" for kind in kinds):
        raise ConfigError(
            f"{keys.where}: layer_types of minimax without linear_attention is not understood"
        )
    return kinds


def minimax_mixer(keys: Keys, kind: str) -> Attention | LightningAttention:
    if KINDS[kind] != "linear":
        return GroupedQuery()(keys, kind)
    keys.ignore("block_size", "sliding_window")
    return LightningAttention(
        num_heads=keys.size("num_attention_heads"),
        head_dim=parts.head_size(keys),
    )


def m2_attention(keys: Keys, kind: str) -> Attention:
    keys.per_layer(
        "attn_type_list",
        num_layers(keys),
        lambda each: each == 1,
        "ones (full attention)",
    )
    dim = keys.optional_size("rotary_dim")
    head_dim = parts.head_size(keys)
    if dim is None:
        share = 1.0
    else:
        share = dim / head_dim
    rope = partial(read_rope, share=share)
    return GroupedQuery(qk_norm="layer", partial=True, rope=rope)(keys, kind)


BLOCKS = {
    "M": "linear_attention",
    "E": "moe",
    "*": "full_attention",
    "-": "mlp",
    "mamba": "linear_attention",
    "attention": "full_attention",
    "linear_attention": "linear_attention",
    "full_attention": "full_attention",
    "moe": "moe",
    "mlp": "mlp",
}
"""Names of blocks in Nemotron-H's patterns and lists."""
NAMELESS = ["linear_attention", "moe", "full_attention", "mlp"]
"""Blocks of a file that names none."""


def h_layers(keys: Keys) -> list[Layer]:
    """One block, and one norm, per layer: Mamba-2, attention without positions, an MLP, or
    experts."""
    return [
        h_block(keys, name)
        for name in blocks(
            keys, "hybrid_override_pattern", "layers_block_type", "layer_types"
        )
    ]


def blocks(keys: Keys, pattern: str, *listed: str) -> list[str]:
    by_name = keys.raw(*listed, default=None)
    names = keys.raw(pattern, default=None)
    if names is None:
        names = by_name
    if names is None:
        names = NAMELESS
    keys.ignore(pattern, "num_hidden_layers")
    if (
        not isinstance(names, str | list)
        or not names
        or not all(name in list(BLOCKS) for name in names)
    ):
        raise keys.error(pattern, f"a pattern of {', '.join(BLOCKS)}", names)
    return [BLOCKS[name] for name in names]


def h_block(keys: Keys, name: str) -> Layer:
    keys.ignore(
        "expand",
        "partial_rotary_factor",
        "rope_theta",
        "sliding_window",
        "head_dim",
        "attention_bias",
    )
    keys.ignore("num_attention_heads", "num_key_value_heads")
    keys.require("mlp_bias", False)
    if name == "linear_attention":
        return Layer(mixer=mamba2(keys))
    if name == "full_attention":
        return Layer(mixer=GroupedQuery(rotated="none")(keys))
    activation = keys.activation("mlp_hidden_act")
    if name == "mlp":
        return Layer(
            mlp=MLP(
                width=keys.size("intermediate_size"), activation=activation, gated=False
            )
        )
    keys.require("n_shared_experts", 1)
    routed = parts.deepseek_experts(
        keys,
        activation=activation,
        gated=False,
        shared_width=keys.size("moe_shared_expert_intermediate_size", least=0),
        latent_size=keys.optional_size("moe_latent_size"),
    )
    return Layer(mlp=routed)


def mamba2(keys: Keys) -> Mamba2:
    heads = keys.size("mamba_num_heads")
    groups = keys.size("n_groups")
    if heads % groups:
        raise ConfigError(
            f"{keys.where}: mamba_num_heads {heads} is not a multiple of n_groups {groups}"
        )
    return Mamba2(
        num_heads=heads,
        head_dim=keys.size("mamba_head_dim"),
        state_size=keys.size("ssm_state_size"),
        num_groups=groups,
        conv_kernel=keys.size("conv_kernel"),
        conv_bias=keys.flag("use_conv_bias"),
        bias=keys.flag("use_bias"),
    )


def h_details(keys: Keys) -> Details:
    heads = keys.size("num_nextn_predict_layers", least=0)
    pattern, listed = "mtp_hybrid_override_pattern", "mtp_layers_block_type"
    names = ["full_attention", "moe"]
    if any(keys.raw(name, default=None) is not None for name in (pattern, listed)):
        names = blocks(keys, pattern, listed)
    if heads == 0:
        return {"mtp_layers": ()}
    mixer = None
    feed_forward = None
    for name in names:
        block = h_block(keys, name)
        mixer = mixer or block.mixer
        feed_forward = feed_forward or block.mlp
    return {"mtp_layers": (Layer(mixer=mixer, mlp=feed_forward),) * heads}


def ling_kinds(keys: Keys) -> list[str]:
    """Every n-th layer attends, n given by `layer_group_size`; or as `layer_types` says."""
    return parts.listed_kinds(
        keys, parts.every_nth(keys.size("layer_group_size"), other="linear_attention")
    )


def ling_mixer(keys: Keys, kind: str) -> LatentAttention | KimiDeltaAttention:
    """Latent attention with a gate per head, or Kimi's linear attention, whose heads are as wide as
    `head_dim` of the publisher's files (transformers writes another, and `linear_head_dim`)."""
    if KINDS[kind] != "linear":
        return msgspec.structs.replace(
            parts.latent(keys, any_share=True), head_gate=True
        )
    heads = keys.optional_size("linear_num_heads") or keys.size("num_attention_heads")
    width = keys.optional_size("linear_head_dim") or keys.size("head_dim")
    kernel = keys.optional_size("linear_conv_kernel_dim")
    return KimiDeltaAttention(
        num_heads=heads,
        head_dim=width,
        conv_kernel=kernel or keys.size("short_conv_kernel_size"),
    )


def ling_experts(keys: Keys) -> MixtureOfExperts:
    """DeepSeek-V3's; a width of the shared one, where a file has it, must be that of the others."""
    width = keys.size("moe_intermediate_size")
    keys.require("moe_shared_expert_intermediate_size", width)
    return parts.deepseek_experts(keys)


def nas_layers(keys: Keys) -> list[Layer]:
    """Layers by `block_configs`: KV heads of their own or no attention, an MLP of their own width
    or none."""
    heads = keys.size("num_attention_heads")
    hidden = keys.size("hidden_size")
    keys.ignore("num_key_value_heads", "intermediate_size")
    configs = keys.per_layer(
        "block_configs",
        num_layers(keys),
        lambda entry: isinstance(entry, dict),
        "objects",
    )
    if configs is None:
        raise ConfigError(f"{keys.where}: key 'block_configs' is missing")
    layers = []
    for block in configs:
        attention, ffn = (
            Keys(block.get(part) or {}, f"{keys.where}: {part} block")
            for part in ("attention", "ffn")
        )
        for part in (attention, ffn):
            part.require("replace_with_linear", False)
            part.require("sparsify", None)
        attention.require("window_length", None)
        attention.require("num_sink_tokens", None)
        attention.ignore("unshifted_sink", "use_prefill_window_in_sink_attention")
        mixer = feed_forward = None
        group = attention.optional_size("n_heads_in_group")
        factor = ffn.optional_number("ffn_mult")
        if not attention.flag("no_op"):
            mixer = msgspec.structs.replace(
                biased()(keys), num_kv_heads=heads // (group or 1)
            )
        if not ffn.flag("no_op"):
            width = -(-int(2 * (factor or 1.0) * hidden / 3) // 256) * 256
            feed_forward = MLP(
                width=width,
                activation=keys.activation(),
                bias=keys.flag("mlp_bias"),
            )
        for part in (attention, ffn):
            if left := part.unread():
                raise ConfigError(f"{part.where}: key '{left[0]}' is not understood")
        layers.append(Layer(mixer=mixer, mlp=feed_forward))
    return layers


ROWS = {
    "granite": Architecture(
        mixer=granite_attention,
        mlp=parts.mlp(bias="mlp_bias"),
        details=granite_details,
    ),
    "granitemoehybrid": Architecture(
        whole=granite_layers,
        details=granite_details,
        ignored="mamba_chunk_size time_step_limit",
        names=TensorNames(
            fused_gate_up=True,
            mlp="shared_mlp",
            matrices=("input_linear", "input_linear", "output_linear"),
            gate_up="input_linear",
        ),
    ),
    "minimax": Architecture(
        mixer=minimax_mixer,
        mlp=parts.wide_experts(),
        kinds=minimax_kinds,
        ignored="""full_attn_alpha_factor full_attn_beta_factor
            linear_attn_alpha_factor linear_attn_beta_factor mlp_alpha_factor mlp_beta_factor""",
        names=TensorNames(mlp="block_sparse_moe", expert="w1"),
    ),
    "minimax_m2": Architecture(
        mixer=m2_attention,
        mlp=parts.wide_experts(scoring="sigmoid", correction_bias=True),
        fixed={
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "use_routing_bias": (True,),
            "shared_intermediate_size": (0,),
            "scoring_func": ("sigmoid",),
            "mtp_transformer_layers": (1,),
            "use_mtp": (True, False),
        },
        ignored="layernorm_full_attention_alpha layernorm_full_attention_beta",
        mtp_key="num_mtp_modules",
        names=TensorNames(
            mlp="block_sparse_moe",
            expert="w1",
            correction_bias="e_score_correction_bias",
        ),
    ),
    "bailing_hybrid": Architecture(
        mixer=ling_mixer,
        mlp=partial(parts.leading_dense, mixture=ling_experts),
        kinds=ling_kinds,
        fixed={
            "tie_word_embeddings": (False,),
            "no_kda_lora": (True,),
            "use_mla_nope": (False,),
            "gated_attention_proj_granularity_type": ("head_wise",),
            "score_function": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_router_enable_expert_bias": (True,),
            "use_bias": (False,),
            "use_qkv_bias": (False,),
            "mtp_use_kda": (False,),
        },
        # the decay's form, and what both kinds of layers have of one another
        ignored="""kda_safe_gate kda_lower_bound linear_num_heads linear_head_dim
            linear_conv_kernel_dim short_conv_kernel_size layer_group_size
            mtp_loss_scaling_factor rotary_dim router_dtype use_qk_norm""",
        mtp_key="num_mtp_layers",
    ),
    "nemotron": Architecture(
        mixer=biased(partial=True),
        mlp=parts.mlp(gated=False, bias="mlp_bias"),
        norm=Norm(kind="layernorm_plus_one", has_bias=True),
        eps_key="norm_eps",
    ),
    "nemotron_h": Architecture(
        whole=h_layers,
        eps_key="layer_norm_epsilon",
        details=h_details,
        fixed={"tie_word_embeddings": (False,)},
        # Spellings that another key has decided, and sizes of blocks that a pattern may lack.
        ignored="""use_bias mamba_proj_bias
            chunk_size mamba_chunk_size mamba_hidden_act norm_eps rms_norm_eps num_query_groups
            intermediate_size moe_latent_size
            moe_intermediate_size moe_shared_expert_intermediate_size
            n_shared_experts n_routed_experts num_experts_per_tok norm_topk_prob n_group topk_group
            routed_scaling_factor time_step_limit""",
    ),
    "nemotron-nas": Architecture(whole=nas_layers),
}
