"""Gemma: norms with 1 + weight around each sublayer, soft caps, and windows with a rotary base of their own."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from magicdec.specs.families.keys import Keys
from magicdec.specs.families.parts import (
    KINDS,
    SLIDING_4096,
    Architecture,
    Details,
    GroupedQuery,
    biased,
    every_second,
    in_every_layer,
    pattern_kinds,
)
from magicdec.specs.families.rope import read_rope
from magicdec.specs.layers import MLP, Attention, Rope
from magicdec.specs.model import Norm, TensorNames


def capped(head: GroupedQuery, *, local_theta: bool = False) -> Callable[[Keys, str], Attention]:
    """Scores scaled by query_pre_attn_scalar, with soft caps; windows may rotate by a base of their own."""

    def read(keys: Keys, kind: str) -> Attention:
        keys.require("use_bidirectional_attention", False)
        mixer = head(keys, kind)
        if local_theta:
            mixer = msgspec.structs.replace(mixer, rope=gemma3_rope(keys, mixer, kind))
        return msgspec.structs.replace(
            mixer,
            softcap=keys.optional_number("attn_logit_softcapping"),
            scale=keys.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        )

    return read


def gemma3_rope(keys: Keys, mixer: Attention, kind: str) -> Rope:
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


MLP_OF_GEMMA = in_every_layer(gemma_mlp)
AROUND = Norm(kind="rms_plus_one", placement="around")
AROUND_NAMES = TensorNames(
    norms=("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
)
GEMMA3_DEFAULTS = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072,
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
}  # fmt: skip

ROWS = {
    "gemma": Architecture(
        mixer=biased(head_dim=256),
        mlp=MLP_OF_GEMMA,
        norm=Norm(kind="rms_plus_one"),
        tied=True,
        fixed={"use_bidirectional_attention": (False,)},
        details=gemma_details,
    ),
    "gemma2": Architecture(
        mixer=capped(biased(head_dim=256)),
        mlp=MLP_OF_GEMMA,
        kinds=every_second,
        norm=AROUND,
        tied=True,
        defaults={**SLIDING_4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        details=gemma_details,
        names=AROUND_NAMES,
    ),
    "gemma3_text": Architecture(
        mixer=capped(biased(head_dim=256, qk_norm="head"), local_theta=True),
        mlp=MLP_OF_GEMMA,
        kinds=pattern_kinds(6),
        norm=AROUND,
        tied=True,
        defaults={**SLIDING_4096, **GEMMA3_DEFAULTS},
        details=gemma_details,
        names=AROUND_NAMES,
    ),
}
