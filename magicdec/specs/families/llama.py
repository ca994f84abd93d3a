"""Llama, Mistral, and architectures that differ from them by an option or in which layers rotate
positions.
"""

from __future__ import annotations

from functools import partial

import msgspec

from magicdec.specs.families import parts
from magicdec.specs.families.keys import Keys
from magicdec.specs.families.parts import Architecture, GroupedQuery, biased, num_layers
from magicdec.specs.families.rope import read_rope, rope_parameters
from magicdec.specs.layers import Layer
from magicdec.specs.mixers import Attention, QKNorm
from magicdec.specs.model import TensorNames


def ministral3_attention(keys: Keys, kind: str) -> Attention:
    """Queries grow with their position, as `llama_4_scaling_beta` among the rope's parameters
    says."""
    mixer = GroupedQuery(rope=partial(read_rope, beside=("llama_4_scaling_beta",)))(
        keys, kind
    )
    rope = rope_parameters(keys)
    inside = Keys(rope, f"{keys.where}: rope")
    beta = inside.number("llama_4_scaling_beta", least=-1e-9)
    length = inside.size("original_max_position_embeddings")
    keys.require("original_max_position_embeddings", length)
    return msgspec.structs.replace(
        mixer, temperature=(beta, float(length)), temperature_offset=0
    )


def smollm3_layers(keys: Keys) -> list[Layer]:
    """Every n-th layer has no positions; it may have a window instead, or the layers that
    `layer_types` says do, even where `use_sliding_window` is false."""
    interval = keys.size("no_rope_layer_interval")
    rotated = parts.zeros_and_ones(
        keys, "no_rope_layers", lambda i: (i + 1) % interval != 0
    )
    has_window = (
        keys.flag("use_sliding_window")
        and keys.optional_size("sliding_window") is not None
    )
    keys.ignore("sliding_window", "max_window_layers")
    kinds = parts.listed_kinds(
        keys, parts.windowed(lambda i: has_window and not rotated[i])
    )
    head = biased()
    feed_forward = parts.dense(keys, bias="mlp_bias")
    mixers = [head(keys, kind) for kind in kinds]
    layers = []
    for attention, is_rotated in zip(mixers, rotated, strict=True):
        mixer = attention
        if not is_rotated:
            mixer = msgspec.structs.replace(attention, rope=None)
        layers.append(Layer(mixer=mixer, mlp=feed_forward))
    return layers


def llama4_layers(keys: Keys) -> list[Layer]:
    """Rotated layers see their chunk of the context, the others all of it; experts in every n-th
    layer.
    """
    count = num_layers(keys)
    interval = keys.size("no_rope_layer_interval")
    rotated = [(i + 1) % interval != 0 for i in range(count)]
    if keys.raw("no_rope_layers", default=None) != []:  # an empty list says nothing
        rotated = parts.zeros_and_ones(keys, "no_rope_layers", rotated.__getitem__)
    kinds = parts.listed_kinds(
        keys, lambda i: "chunked_attention" if rotated[i] else "full_attention"
    )
    keys.ignore("attention_chunk_size")
    step = keys.size("interleave_moe_layer_step")
    sparse = keys.indices("moe_layers", count)
    if sparse is None:
        sparse = frozenset(range(step - 1, count, step))
    tuning = (keys.number("attn_scale"), keys.number("floor_scale"))
    is_tuned = keys.flag("attn_temperature_tuning")
    norm: QKNorm = "none"
    if keys.flag("use_qk_norm"):
        norm = "l2"
    attention = biased(pairs="adjacent")
    width = keys.size("intermediate_size")
    routed = parts.experts(
        keys,
        width="intermediate_size",
        normalized=False,
        scoring="sigmoid_of_input",
        shared_width=width,
    )
    plain = parts.dense(keys, width="intermediate_size_mlp")
    layers = []
    for index, kind in enumerate(kinds):
        mixer = attention(keys, kind)
        if rotated[index]:
            mixer = msgspec.structs.replace(mixer, qk_norm=norm)
        else:
            temperature = None
            if is_tuned:
                temperature = tuning
            mixer = msgspec.structs.replace(mixer, rope=None, temperature=temperature)
        layers.append(Layer(mixer=mixer, mlp=routed if index in sparse else plain))
    return layers


ROWS = {
    "llama": Architecture(
        mlp=parts.mlp(bias="mlp_bias"),
        ignored="sliding_window use_sliding_window layer_types max_window_layers",
    ),
    "mistral": Architecture(
        mixer=GroupedQuery(),
        kinds=parts.always_window,
        fixed=parts.NO_BIAS,
        ignored="use_sliding_window max_window_layers",
    ),
    "ministral": Architecture(
        mixer=GroupedQuery(),
        kinds=lambda keys: parts.sized_windows(keys, lambda index: "sliding_attention"),
        fixed=parts.NO_BIAS,
        ignored="use_sliding_window max_window_layers",
    ),
    "mixtral": Architecture(
        mixer=GroupedQuery(),
        mlp=parts.wide_experts(),
        kinds=parts.always_window,
        fixed=parts.NO_BIAS,
        names=TensorNames(mlp="block_sparse_moe", expert="w1"),
    ),
    "ministral3": Architecture(mixer=ministral3_attention, kinds=parts.always_window),
    "llama4_text": Architecture(
        whole=llama4_layers,
        names=TensorNames(
            mlp="feed_forward",
            router="router",
            shared="shared_expert",
            experts="stacked",
        ),
    ),
    "arcee": Architecture(mlp=parts.mlp(gated=False, bias="mlp_bias")),
    "smollm3": Architecture(whole=smollm3_layers),
    "seed_oss": Architecture(
        mixer=GroupedQuery(bias="attention_bias", output_bias="attention_out_bias"),
        mlp=parts.mlp(bias="mlp_bias"),
    ),
    "apertus": Architecture(
        mixer=biased(qk_norm="head"),
        mlp=parts.mlp(gated=False),
        fixed={"mlp_bias": (False,), "post_norm": (False,), "qk_norm": (True,)},
        names=TensorNames(norms=("attention_layernorm", "feedforward_layernorm")),
    ),
}
