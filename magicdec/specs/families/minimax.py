"""MiniMax: lightning attention with full attention in every second layer, and mixtures in every layer."""

from __future__ import annotations

from functools import partial

from magicdec.errors import ConfigError
from magicdec.specs.families.keys import Keys
from magicdec.specs.families.parts import (
    KINDS,
    Architecture,
    GroupedQuery,
    head_size,
    listed_kinds,
    num_layers,
    wide_experts,
)
from magicdec.specs.families.rope import read_rope
from magicdec.specs.layers import Attention, LightningAttention
from magicdec.specs.model import TensorNames


def hybrid_kinds(keys: Keys) -> list[str]:
    """Lightning in every second layer, or as `layer_types` says. Residuals are of normed inputs, which only lightning
    layers tell: without any, the model would be taken for another."""
    kinds = listed_kinds(keys, lambda i: "linear_attention" if i % 2 else "full_attention")
    if all(KINDS[kind] != "linear" for kind in kinds):
        raise ConfigError(f"{keys.where}: layer_types of minimax without linear_attention is not understood")
    return kinds


def hybrid_mixer(keys: Keys, kind: str) -> Attention | LightningAttention:
    if KINDS[kind] != "linear":
        return GroupedQuery()(keys, kind)
    keys.ignore("block_size", "sliding_window")
    return LightningAttention(num_heads=keys.size("num_attention_heads"), head_dim=head_size(keys))


def m2_attention(keys: Keys, kind: str) -> Attention:
    keys.per_layer("attn_type_list", num_layers(keys), lambda each: each == 1, "ones (full attention)")
    dim, head_dim = keys.optional_size("rotary_dim"), head_size(keys)
    rope = partial(read_rope, share=1.0 if dim is None else dim / head_dim)
    return GroupedQuery(qk_norm="layer", partial=True, rope=rope)(keys, kind)


ROWS = {
    "minimax": Architecture(
        mixer=hybrid_mixer,
        mlp=wide_experts(),
        kinds=hybrid_kinds,
        ignored="""full_attn_alpha_factor full_attn_beta_factor linear_attn_alpha_factor linear_attn_beta_factor
            mlp_alpha_factor mlp_beta_factor""",
        names=TensorNames(mlp="block_sparse_moe", expert="w1"),
    ),
    "minimax_m2": Architecture(
        mixer=m2_attention,
        mlp=wide_experts(scoring="sigmoid", correction_bias=True),
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
        names=TensorNames(mlp="block_sparse_moe", expert="w1", correction_bias="e_score_correction_bias"),
    ),
}
