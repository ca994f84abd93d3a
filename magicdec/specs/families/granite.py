"""Granite: multipliers on embeddings, scores, residuals and logits; a hybrid of Mamba-2 and attention."""

from __future__ import annotations

import msgspec

from magicdec.errors import ConfigError
from magicdec.specs.families.keys import Keys
from magicdec.specs.families.parts import KINDS, Architecture, Details, biased, experts, listed_kinds, mlp
from magicdec.specs.layers import MLP, Attention, FeedForward, Layer, Mamba2
from magicdec.specs.model import TensorNames

MAMBA_KEYS = (
    "mamba_n_heads", "mamba_n_groups", "mamba_expand", "mamba_d_head", "mamba_d_state", "mamba_d_conv",
    "mamba_conv_bias", "mamba_proj_bias",
)  # fmt: skip
"""Keys that a file without any recurrence has all the same."""


def attention(keys: Keys, kind: str) -> Attention:
    return msgspec.structs.replace(biased()(keys, kind), scale=keys.number("attention_multiplier"))


def details(keys: Keys) -> Details:
    return {
        "embedding_scale": keys.number("embedding_multiplier"),
        "residual_scale": keys.number("residual_multiplier"),
        "logit_scale": 1.0 / keys.number("logits_scaling"),
    }


def mamba(keys: Keys) -> Mamba2:
    heads, groups = keys.size("mamba_n_heads"), keys.size("mamba_n_groups")
    inner = keys.size("mamba_expand") * keys.size("hidden_size")
    given = keys.raw("mamba_d_head")
    head_dim = inner // heads if given == "auto" else keys.size("mamba_d_head")
    if heads * head_dim != inner or heads % groups:
        raise ConfigError(
            f"{keys.where}: mamba_n_heads {heads} in {groups} groups, of {head_dim} numbers each, do not fit "
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


def hybrid_layers(keys: Keys) -> list[Layer]:
    """Mamba-2 and, here and there, attention that may have no positions; behind each, experts with a shared one, or
    the shared one alone."""
    position = keys.raw("position_embedding_type") == "rope"  # what other names, and null, have is none
    width = keys.size("shared_intermediate_size")
    feed_forward: FeedForward
    if keys.size("num_local_experts", least=0) > 0:
        feed_forward = experts(
            keys, width="intermediate_size", normalized=True, scoring="softmax_of_chosen", shared_width=width
        )
    else:
        keys.ignore("num_experts_per_tok", "intermediate_size")
        keys.require("output_router_logits", False)
        feed_forward = MLP(width=width, activation=keys.activation())
    layers = []
    for kind in listed_kinds(keys, lambda i: "linear_attention"):
        if KINDS[kind] == "linear":
            layers.append(Layer(mixer=mamba(keys), mlp=feed_forward))
        else:
            mixer = attention(keys, kind)
            mixer = mixer if position else msgspec.structs.replace(mixer, rope=None)
            layers.append(Layer(mixer=mixer, mlp=feed_forward))
    keys.ignore("normalization_function", "init_method", "rope_theta", "rope_parameters", "rope_scaling")
    keys.ignore(*MAMBA_KEYS, "attention_multiplier", "num_key_value_heads", "attention_bias")
    return layers


ROWS = {
    "granite": Architecture(mixer=attention, mlp=mlp(bias="mlp_bias"), details=details),
    "granitemoehybrid": Architecture(
        whole=hybrid_layers,
        details=details,
        ignored="mamba_chunk_size time_step_limit",
        names=TensorNames(
            fused_gate_up=True,
            mlp="shared_mlp",
            matrices=("input_linear", "input_linear", "output_linear"),
            gate_up="input_linear",
        ),
    ),
}
