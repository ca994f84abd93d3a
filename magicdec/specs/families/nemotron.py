"""Nemotron: a dense one with squared ReLU, hybrids of Mamba-2, attention and experts block by block (Nemotron-H), and
Llamas whose layers a search has thinned out (Nemotron-NAS)."""

from __future__ import annotations

import msgspec

from magicdec.errors import ConfigError
from magicdec.specs.families.keys import Keys
from magicdec.specs.families.parts import Architecture, Details, GroupedQuery, biased, deepseek_experts, mlp, num_layers
from magicdec.specs.layers import MLP, Layer, Mamba2
from magicdec.specs.model import Norm

BLOCKS = {
    "M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp", "mamba": "linear_attention",
    "attention": "full_attention", "linear_attention": "linear_attention", "full_attention": "full_attention",
    "moe": "moe", "mlp": "mlp",
}  # fmt: skip
"""Names of blocks in Nemotron-H's patterns and lists."""
NAMELESS = ["linear_attention", "moe", "full_attention", "mlp"]
"""Blocks of a file that names none."""


def h_layers(keys: Keys) -> list[Layer]:
    """One block, and one norm, per layer: Mamba-2, attention without positions, an MLP, or experts."""
    return [h_block(keys, name) for name in blocks(keys, "hybrid_override_pattern", "layers_block_type", "layer_types")]


def blocks(keys: Keys, pattern: str, *listed: str) -> list[str]:
    given = keys.raw(*listed, default=None)
    names = keys.raw(pattern, default=None) if given is None else given
    names = NAMELESS if names is None else names
    keys.ignore(pattern, "num_hidden_layers")
    if not isinstance(names, str | list) or not names or not all(name in list(BLOCKS) for name in names):
        raise keys.error(pattern, f"a pattern of {', '.join(BLOCKS)}", names)
    return [BLOCKS[name] for name in names]


def h_block(keys: Keys, name: str) -> Layer:
    keys.ignore("expand", "partial_rotary_factor", "rope_theta", "sliding_window", "head_dim", "attention_bias")
    keys.ignore("num_attention_heads", "num_key_value_heads")
    keys.require("mlp_bias", False)
    if name == "linear_attention":
        return Layer(mixer=mamba2(keys))
    if name == "full_attention":
        return Layer(mixer=GroupedQuery(rotated="none")(keys))
    activation = keys.activation("mlp_hidden_act")
    if name == "mlp":
        return Layer(mlp=MLP(width=keys.size("intermediate_size"), activation=activation, gated=False))
    keys.require("n_shared_experts", 1)
    routed = deepseek_experts(
        keys,
        activation=activation,
        gated=False,
        shared_width=keys.size("moe_shared_expert_intermediate_size", least=0),
        latent_size=keys.optional_size("moe_latent_size"),
    )
    return Layer(mlp=routed)


def mamba2(keys: Keys) -> Mamba2:
    heads, groups = keys.size("mamba_num_heads"), keys.size("n_groups")
    if heads % groups:
        raise ConfigError(f"{keys.where}: mamba_num_heads {heads} is not a multiple of n_groups {groups}")
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
    names = ["full_attention", "moe"]
    if keys.raw("mtp_hybrid_override_pattern", "mtp_layers_block_type", default=None) is not None:
        names = blocks(keys, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    parts = [h_block(keys, name) for name in names] if heads else []
    mixer = next((part.mixer for part in parts if part.mixer is not None), None)
    feed_forward = next((part.mlp for part in parts if part.mlp is not None), None)
    return {"mtp_layers": (Layer(mixer=mixer, mlp=feed_forward),) * heads}


def nas_layers(keys: Keys) -> list[Layer]:
    """Each layer as `block_configs` says: KV heads of its own or no attention, an MLP of its own width or none."""
    heads, hidden = keys.size("num_attention_heads"), keys.size("hidden_size")
    keys.ignore("num_key_value_heads", "intermediate_size")
    given = keys.per_layer("block_configs", num_layers(keys), lambda each: isinstance(each, dict), "objects")
    if given is None:
        raise ConfigError(f"{keys.where}: key 'block_configs' is missing")
    layers = []
    for block in given:
        attention, ffn = (Keys(block.get(part) or {}, f"{keys.where}: {part} block") for part in ("attention", "ffn"))
        for part in (attention, ffn):
            part.require("replace_with_linear", False)
            part.require("sparsify", None)
        attention.require("window_length", None)
        attention.require("num_sink_tokens", None)
        attention.ignore("unshifted_sink", "use_prefill_window_in_sink_attention")
        mixer = feed_forward = None
        group, factor = attention.optional_size("n_heads_in_group"), ffn.optional_number("ffn_mult")
        if not attention.flag("no_op"):
            mixer = msgspec.structs.replace(biased()(keys), num_kv_heads=heads // (group or 1))
        if not ffn.flag("no_op"):
            width = -(-int(2 * (factor or 1.0) * hidden / 3) // 256) * 256
            feed_forward = MLP(width=width, activation=keys.activation(), bias=keys.flag("mlp_bias"))
        for part in (attention, ffn):
            if left := part.unread():
                raise ConfigError(f"{part.where}: key '{left[0]}' is not understood")
        layers.append(Layer(mixer=mixer, mlp=feed_forward))
    return layers


ROWS = {
    "nemotron": Architecture(
        mixer=biased(partial=True),
        mlp=mlp(gated=False, bias="mlp_bias"),
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
            intermediate_size moe_latent_size moe_intermediate_size moe_shared_expert_intermediate_size
            n_shared_experts n_routed_experts num_experts_per_tok norm_topk_prob n_group topk_group
            routed_scaling_factor time_step_limit""",
    ),
    "nemotron-nas": Architecture(whole=nas_layers),
}  # fmt: skip
