"""Gemma: norms around each sublayer, soft caps, and windows with a rotary base of their own; in Gemma 4
full layers with heads of their own size, and experts beside the dense feed-forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from magicdec.specs.families import parts
from magicdec.specs.families.keys import Keys, is_whole
from magicdec.specs.families.parts import (
    KINDS,
    Architecture,
    Details,
    GroupedQuery,
    biased,
)
from magicdec.specs.families.rope import ROPE_TYPES, read_rope, rope_by_kind
from magicdec.specs.layers import MLP, FeedForward, Layer
from magicdec.specs.mixers import Attention, Rope, RopeType
from magicdec.specs.model import Assistant, Norm, TensorNames


def capped(head: GroupedQuery, *, has_cap: bool) -> Callable[[Keys, str], Attention]:
    """Scores scaled by query_pre_attn_scalar, with a soft cap where the architecture's code applies
    it.
    """

    def read(keys: Keys, kind: str) -> Attention:
        keys.require("use_bidirectional_attention", False)
        cap = keys.optional_number("attn_logit_softcapping")
        softcap = None
        if has_cap:
            softcap = cap
        return msgspec.structs.replace(
            head(keys, kind),
            softcap=softcap,
            scale=keys.number("query_pre_attn_scalar") ** -0.5,
        )

    return read


def gemma_mlp(keys: Keys) -> MLP:
    """The first Gemma's `hidden_act`, whose "gelu" meant the tanh approximation;
    `hidden_activation` since.
    """
    activation = keys.activation("hidden_activation", "hidden_act")
    is_older = not keys.knows("hidden_activation")
    if is_older and activation == "gelu":
        activation = "gelu_tanh"
    return MLP(width=keys.size("intermediate_size"), activation=activation)


def gemma_details(keys: Keys) -> Details:
    cap = keys.optional_number("final_logit_softcapping")
    return {"embedding_scale": keys.size("hidden_size") ** 0.5, "logit_softcap": cap}


MLP_OF_GEMMA = parts.in_every_layer(gemma_mlp)
AROUND: dict[str, Any] = {
    "mlp": MLP_OF_GEMMA,
    "norm": Norm(kind="rms_plus_one", placement="around"),
    "details": gemma_details,
    "names": TensorNames(
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
    ),
}

PER_LAYER = frozenset(("head_dim", "num_key_value_heads"))
GEMMA4_ROPES: Mapping[str, RopeType | None] = {**ROPE_TYPES, "proportional": None}
"""Those of Gemma 4: `proportional` turns a share of a head at the frequencies of the whole head."""


def gemma4_layers(keys: Keys) -> list[Layer]:
    """Windows but in layers 6, 12, … and the last, which have heads of their own size; each with a
    dense feed-forward, and experts beside it in some models."""
    kinds = parts.sized_windows(keys, parts.every_nth(6))
    kinds = [*kinds[:-1], "full_attention"]
    sizes = gemma4_sizes(keys, kinds)
    mlp = gemma4_mlp(keys)
    return [
        Layer(mixer=gemma4_attention(keys, kind, own), mlp=mlp)
        for kind, own in zip(kinds, sizes, strict=True)
    ]


def gemma4_sizes(keys: Keys, kinds: list[str]) -> list[dict[str, int]]:
    """Sizes of each layer that are not the model's: those of full layers, or `per_layer_config`,
    as transformers writes them."""
    full = {"head_dim": keys.size("global_head_dim")}
    kv_heads = keys.optional_size("num_global_key_value_heads")
    if kv_heads is not None and keys.flag("attention_k_eq_v"):
        full["num_key_value_heads"] = kv_heads
    listed = keys.raw("per_layer_config", default=None)
    if listed is None:
        return [full if KINDS[kind] == "full" else {} for kind in kinds]
    sizes: list[dict[str, int]] = [{} for _ in kinds]
    if not isinstance(listed, dict) or not all(
        index.isdigit() and int(index) < len(kinds) and _are_sizes(own)
        for index, own in listed.items()
    ):
        raise keys.error(
            "per_layer_config", f"{' and '.join(sorted(PER_LAYER))} by layer", listed
        )
    for index, own in listed.items():
        sizes[int(index)] = own
    return sizes


def _are_sizes(own: Any) -> bool:
    return isinstance(own, dict) and all(
        name in PER_LAYER and is_whole(size) and size > 0 for name, size in own.items()
    )


def gemma4_attention(keys: Keys, kind: str, own: Mapping[str, int]) -> Attention:
    """Scores are not scaled, values have a norm, and in full layers may be the keys."""
    head_dim = own.get("head_dim", parts.head_size(keys))

    def rope(keys: Keys, _: int, **options: Any) -> Rope:
        return gemma4_rope(keys, head_dim, **options)

    mixer = biased(qk_norm="head", partial=True, has_ropes=True, rope=rope)(keys, kind)
    kv_heads = own.get("num_key_value_heads", mixer.num_kv_heads)
    if mixer.num_heads % kv_heads:
        raise keys.error(
            "num_global_key_value_heads", f"a divisor of {mixer.num_heads}", kv_heads
        )
    return msgspec.structs.replace(
        mixer,
        head_dim=head_dim,
        num_kv_heads=kv_heads,
        scale=1.0,
        value_norm=True,
        keys_as_values=keys.flag("attention_k_eq_v") and KINDS[kind] == "full",
    )


def gemma4_rope(keys: Keys, head_dim: int, *, kind: str, **options: Any) -> Rope:
    rope = read_rope(keys, head_dim, kind=kind, types=GEMMA4_ROPES, **options)
    if rope_by_kind(keys)[kind].get("rope_type") != "proportional":
        return rope
    # frequencies of the whole head, of which the first are turned: the same as of a lower base
    return msgspec.structs.replace(rope, theta=rope.theta ** (rope.dim / head_dim))


def gemma4_mlp(keys: Keys) -> FeedForward:
    """The dense feed-forward, which every token passes, is the shared expert of those that have
    experts."""
    dense = gemma_mlp(keys)
    if not keys.raw("enable_moe_block", default=False):
        keys.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
        return dense
    return parts.experts(
        keys,
        normalized=True,
        activation=dense.activation,
        shared_width=dense.width,
        own_norms=True,
    )


ASSISTANT_HIDDEN = 1024
ASSISTANT_WIDTH = 8192
"""Sizes of the assistants of 12B to 31B, four layers each: 0.94 GB in 16 bits beside 31B
(huggingface.co/NeoRoth/gemma-4-31b-it-assistant-mlx)."""


def gemma4_details(keys: Keys) -> Details:
    """The assistant's layers attend with the model's heads over the last window's and the last full
    layer's cache (vLLM 0.24, vllm/model_executor/models/gemma4_mtp.py)."""
    layers = gemma4_layers(keys)
    mixers = [each.mixer for each in layers if isinstance(each.mixer, Attention)]
    windows = [mixer for mixer in mixers if mixer.mask == "window"] or mixers
    mlp = MLP(width=ASSISTANT_WIDTH, activation=gemma_mlp(keys).activation)
    own = []
    for mixer in (windows[-1], windows[-1], windows[-1], mixers[-1]):
        borrowing = msgspec.structs.replace(mixer, borrows_cache=True)
        own.append(Layer(mixer=borrowing, mlp=mlp))
    assistant = Assistant(hidden_size=ASSISTANT_HIDDEN, layers=tuple(own))
    return {**gemma_details(keys), "assistant": assistant}


GEMMA4 = Architecture(
    whole=gemma4_layers,
    norm=Norm(placement="around"),
    details=gemma4_details,
    fixed={
        "num_kv_shared_layers": (0,),
        "hidden_size_per_layer_input": (0,),
        "use_bidirectional_attention": (False, "vision"),
    },
    ignored="hidden_act use_double_wide_mlp vocab_size_per_layer_input",
    names=msgspec.structs.replace(AROUND["names"], experts_beside=True),
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
        kinds=parts.every(2),
        ignored="hidden_act",
        **AROUND,
    ),
    "gemma3_text": Architecture(
        mixer=capped(biased(qk_norm="head", has_ropes=True), has_cap=False),
        kinds=parts.pattern_kinds,
        ignored="hidden_act _sliding_window_pattern",
        **AROUND,
    ),
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
}
