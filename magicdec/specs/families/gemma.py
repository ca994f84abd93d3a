"""Gemma: norms with 1 + weight around each sublayer, soft caps, and windows with a rotary base of their own."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from magicdec.specs.families.keys import Keys
from magicdec.specs.families.parts import (
    Architecture,
    Details,
    GroupedQuery,
    biased,
    every,
    in_every_layer,
    pattern_kinds,
)
from magicdec.specs.layers import MLP, Attention
from magicdec.specs.model import Norm, TensorNames


def capped(head: GroupedQuery, *, has_cap: bool) -> Callable[[Keys, str], Attention]:
    """Scores scaled by query_pre_attn_scalar, with a soft cap where the architecture's code applies it."""

    def read(keys: Keys, kind: str) -> Attention:
        keys.require("use_bidirectional_attention", False)
        cap = keys.optional_number("attn_logit_softcapping")
        return msgspec.structs.replace(
            head(keys, kind), softcap=cap if has_cap else None, scale=keys.number("query_pre_attn_scalar") ** -0.5
        )

    return read


def gemma_mlp(keys: Keys) -> MLP:
    """The first Gemma's `hidden_act`, whose "gelu" meant the tanh approximation; `hidden_activation` since."""
    activation = keys.activation("hidden_activation", "hidden_act")
    is_older = not keys.knows("hidden_activation")
    return MLP(
        width=keys.size("intermediate_size"),
        activation="gelu_tanh" if is_older and activation == "gelu" else activation,
    )


def gemma_details(keys: Keys) -> Details:
    cap = keys.optional_number("final_logit_softcapping")
    return {"embedding_scale": keys.size("hidden_size") ** 0.5, "logit_softcap": cap}


MLP_OF_GEMMA = in_every_layer(gemma_mlp)
AROUND = Norm(kind="rms_plus_one", placement="around")
AROUND_NAMES = TensorNames(
    norms=("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
)

ROWS = {
    "gemma": Architecture(
        mixer=biased(),
        mlp=MLP_OF_GEMMA,
        norm=Norm(kind="rms_plus_one"),
        fixed={"use_bidirectional_attention": (False,)},
        ignored="hidden_activation",
        details=lambda keys: {"embedding_scale": keys.size("hidden_size") ** 0.5},
    ),
    "gemma2": Architecture(
        mixer=capped(biased(), has_cap=True),
        mlp=MLP_OF_GEMMA,
        kinds=every(2),
        norm=AROUND,
        ignored="hidden_act",
        details=gemma_details,
        names=AROUND_NAMES,
    ),
    "gemma3_text": Architecture(
        mixer=capped(biased(qk_norm="head", has_ropes=True), has_cap=False),
        mlp=MLP_OF_GEMMA,
        kinds=pattern_kinds,
        norm=AROUND,
        ignored="hidden_act _sliding_window_pattern",
        details=gemma_details,
        names=AROUND_NAMES,
    ),
}
