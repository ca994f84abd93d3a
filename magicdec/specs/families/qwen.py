"""Qwen: windows from a layer on, mixtures in every n-th layer, and recurrences with a gated delta
rule.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

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
from magicdec.specs.families.rope import MULTIMODAL_TYPES, read_rope
from magicdec.specs.layers import FeedForward, MixtureOfExperts
from magicdec.specs.mixers import Attention, GatedDeltaNet
from magicdec.specs.model import Norm, TensorNames


def window_kinds(keys: Keys) -> list[str]:
    """Windows from layer `max_window_layers` on, where `use_sliding_window` is true; or as
    `layer_types` says.
    """
    used = keys.flag("use_sliding_window")
    window = None
    if used:
        window = keys.optional_size("sliding_window")
    return only_if(used, keys, parts.windows_from(keys, window))


def second_window_kinds(keys: Keys) -> list[str]:
    """Windows in every second layer before `max_window_layers`, where `use_sliding_window` is true;
    or as `layer_types` says."""
    used = keys.flag("use_sliding_window")
    last = keys.size("max_window_layers", least=0)
    return only_if(
        used,
        keys,
        parts.listed_kinds(
            keys, parts.windowed(lambda i: used and i % 2 == 0 and i < last)
        ),
    )


def only_if(used: bool, keys: Keys, kinds: list[str]) -> list[str]:
    """These kinds; refuses windows that `use_sliding_window` takes the size away from."""
    if not used and "sliding_attention" in kinds:
        raise ConfigError(
            f"{keys.where}: layer_types has windows, and use_sliding_window is false"
        )
    return kinds


def dual_chunk(keys: Keys) -> Details:
    """Qwen2.5-1M: beyond a chunk, keys are read at other distances than their own (arXiv
    2402.17463).
    """
    config = keys.raw("dual_chunk_attention_config", default=None)
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise keys.error("dual_chunk_attention_config", "an object or null", config)
    inside = Keys(config, f"{keys.where}: dual_chunk_attention_config")
    length = min(
        inside.size("chunk_size"), inside.size("original_max_position_embeddings")
    )
    positions = keys.size("max_position_embeddings")
    if length >= positions:
        return {}
    limit = (
        f"its attention to chunks, beyond {length} tokens, is not modelled; it reads {positions} "
        "in all with it"
    )
    return {"max_position_embeddings": length, "limit": limit}


def moe_kinds(keys: Keys) -> list[str]:
    """One window for all layers, where `use_sliding_window` is true."""
    used = keys.flag("use_sliding_window")
    keys.ignore("sliding_window", "max_window_layers", "layer_types")
    if used:
        return parts.always_window(keys)
    return parts.all_full(keys)


def linear_kinds(keys: Keys) -> list[str]:
    """Every n-th layer attends fully, n given by `full_attention_interval`; or as `layer_types`
    says, maybe all.
    """
    keys.ignore(
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
    )
    keys.ignore("linear_value_head_dim")
    return parts.listed_kinds(
        keys,
        parts.every_nth(keys.size("full_attention_interval"), other="linear_attention"),
    )


def hybrid_mixer(keys: Keys, kind: str) -> Attention | GatedDeltaNet:
    if KINDS[kind] == "linear":
        return gated_delta_net(keys)
    keys.require("attn_output_gate", True)
    return biased(qk_norm="head", gated=True, partial=True)(keys, kind)


def gated_delta_net(keys: Keys) -> GatedDeltaNet:
    net = GatedDeltaNet(
        num_key_heads=keys.size("linear_num_key_heads"),
        num_value_heads=keys.size("linear_num_value_heads"),
        key_head_dim=keys.size("linear_key_head_dim"),
        value_head_dim=keys.size("linear_value_head_dim"),
        conv_kernel=keys.size("linear_conv_kernel_dim"),
    )
    if net.num_value_heads % net.num_key_heads:
        raise ConfigError(
            f"{keys.where}: linear_num_value_heads {net.num_value_heads} is not a multiple of "
            "linear_num_key_heads "
            f"{net.num_key_heads}"
        )
    return net


def sparse_step(
    mixture: Callable[[Keys], MixtureOfExperts],
) -> Callable[[Keys, int], FeedForward]:
    """Experts in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name."""

    def read(keys: Keys, index: int) -> FeedForward:
        step = keys.size("decoder_sparse_step")
        only = keys.indices("mlp_only_layers", num_layers(keys)) or frozenset()
        is_sparse = index not in only and (index + 1) % step == 0
        plain = parts.dense(keys)
        routed = mixture(keys)
        if is_sparse:
            return routed
        return plain

    return read


def shared_experts(keys: Keys, *, normalized: bool | None = None) -> MixtureOfExperts:
    width = keys.size("shared_expert_intermediate_size", least=0)
    return parts.experts(
        keys, normalized=normalized, shared_width=width, shared_gate=width > 0
    )


QWEN2 = Architecture(
    mixer=GroupedQuery(bias=True),
    kinds=window_kinds,
    ignored="attention_bias",
    fixed={"mlp_bias": (False,)},
    details=dual_chunk,
)
QWEN3 = Architecture(
    mixer=biased(qk_norm="head"),
    kinds=window_kinds,
    fixed={"mlp_bias": (False,)},
    details=dual_chunk,
)
QWEN3_MOE = Architecture(
    mixer=biased(qk_norm="head"),
    mlp=sparse_step(parts.experts),
    kinds=moe_kinds,
    fixed={
        "mlp_bias": (False,),
        "shared_expert_intermediate_size": (0,),
        "use_qk_norm": (True,),
    },
    ignored="qkv_bias",
)
MULTIMODAL_ROPE = partial(read_rope, types=MULTIMODAL_TYPES)
QWEN2_VL = msgspec.structs.replace(
    QWEN2, mixer=GroupedQuery(bias=True, rope=MULTIMODAL_ROPE)
)
SHARED_NAMES = TensorNames(shared="shared_expert")
HYBRID: dict[str, Any] = {
    "mixer": hybrid_mixer,
    "kinds": linear_kinds,
    "norm": Norm(kind="rms_plus_one"),
    "mtp_key": "mtp_num_hidden_layers",
    "names": SHARED_NAMES,
}

ROWS = {
    "qwen2": QWEN2,
    "qwen2_5_vl": QWEN2_VL,
    "qwen2_moe": Architecture(
        mixer=GroupedQuery(bias="qkv_bias"),
        mlp=sparse_step(shared_experts),
        kinds=second_window_kinds,
        names=SHARED_NAMES,
    ),
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": Architecture(mlp=sparse_step(shared_experts), **HYBRID),
    "qwen3_5_text": Architecture(
        fixed={
            "mtp_use_dedicated_embeddings": (False,),
            "mamba_ssm_dtype": ("float32",),
            "output_gate_type": ("swish",),
        },
        ignored="mlp_only_layers",
        **HYBRID,
    ),
    "qwen3_5_moe_text": Architecture(
        mlp=parts.in_every_layer(partial(shared_experts, normalized=True)),
        fixed={
            "mtp_use_dedicated_embeddings": (False,),
            "mamba_ssm_dtype": ("float32",),
            "mlp_only_layers": ([],),
        },
        ignored="intermediate_size",
        **HYBRID,
    ),
}

MULTIMODAL = {
    "qwen2_5_vl_text": QWEN2_VL,
    "qwen3_vl_text": msgspec.structs.replace(
        QWEN3,
        mixer=biased(qk_norm="head", rope=MULTIMODAL_ROPE),
        kinds=parts.all_full,
    ),
    "qwen3_vl_moe_text": msgspec.structs.replace(
        QWEN3_MOE,
        mixer=biased(qk_norm="head", rope=MULTIMODAL_ROPE),
        mlp=sparse_step(partial(parts.experts, normalized=True)),
        kinds=parts.all_full,
    ),
}
"""Decoders of models of several modalities."""
