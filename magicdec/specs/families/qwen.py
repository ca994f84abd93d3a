"""Qwen: windows from a layer on, mixtures in every n-th layer, and recurrences with a gated delta rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from magicdec.errors import ConfigError
from magicdec.specs.families.keys import Keys
from magicdec.specs.families.parts import (
    KINDS,
    SLIDING_4096,
    Architecture,
    GroupedQuery,
    all_full,
    always_window,
    biased,
    dense,
    every_nth,
    experts,
    in_every_layer,
    listed_kinds,
    mlp,
    num_layers,
    windows_from,
)
from magicdec.specs.layers import Attention, FeedForward, GatedDeltaNet, MixtureOfExperts
from magicdec.specs.model import Norm, TensorNames


def window_kinds(keys: Keys) -> list[str]:
    """Windows from layer `max_window_layers` on, where `use_sliding_window` is true; or as `layer_types` says."""
    window = keys.optional_size("sliding_window") if keys.flag("use_sliding_window") else None
    keys.ignore("sliding_window")
    return windows_from(keys, window, default=28)


def moe_kinds(keys: Keys) -> list[str]:
    """One window for all layers, where `use_sliding_window` is true."""
    used = keys.flag("use_sliding_window")
    kinds = always_window(keys) if used else all_full(keys)
    keys.ignore("sliding_window", "max_window_layers", "layer_types")
    return kinds


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


def hybrid_mixer(keys: Keys, kind: str) -> Attention | GatedDeltaNet:
    if KINDS[kind] == "linear":
        return gated_delta_net(keys)
    keys.require("attn_output_gate", True)
    return biased(qk_norm="head", head_dim=256, gated=True, partial=0.25)(keys, kind)


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
            f"{keys.where}: linear_num_value_heads {net.num_value_heads} is not a multiple of linear_num_key_heads "
            f"{net.num_key_heads}"
        )
    return net


def sparse_step(mixture: Callable[[Keys], MixtureOfExperts]) -> Callable[[Keys, int], FeedForward]:
    """Experts in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name."""

    def read(keys: Keys, index: int) -> FeedForward:
        step = keys.size("decoder_sparse_step", default=1)
        only = keys.indices("mlp_only_layers", num_layers(keys)) or frozenset()
        is_sparse = index not in only and (index + 1) % step == 0
        plain, routed = dense(keys), mixture(keys)
        return routed if is_sparse else plain

    return read


def shared_experts(keys: Keys, *, normalized: bool | None = None) -> MixtureOfExperts:
    width = keys.size("shared_expert_intermediate_size", default=0, least=0)
    return experts(keys, normalized=normalized, shared_width=width, shared_gate=width > 0)


QWEN2 = Architecture(
    mixer=GroupedQuery(bias=True),
    kinds=window_kinds,
    defaults=SLIDING_4096,
    ignored="attention_bias",
    fixed={"mlp_bias": (False,)},
)
HYBRID_NORM = Norm(kind="rms_plus_one")
SHARED_NAMES = TensorNames(shared="shared_expert")

ROWS = {
    "qwen2": QWEN2,
    "qwen2_5_vl": QWEN2,
    "qwen2_moe": Architecture(
        mixer=GroupedQuery(bias=True),
        mlp=sparse_step(shared_experts),
        kinds=moe_kinds,
        defaults=SLIDING_4096,
        fixed={"qkv_bias": (True,)},
        names=SHARED_NAMES,
    ),
    "qwen3": Architecture(
        mixer=biased(qk_norm="head", head_dim=128),
        kinds=window_kinds,
        defaults=SLIDING_4096,
        fixed={"mlp_bias": (False,)},
    ),
    "qwen3_moe": Architecture(
        mixer=biased(qk_norm="head"),
        mlp=sparse_step(experts),
        kinds=moe_kinds,
        defaults=SLIDING_4096,
        fixed={"mlp_bias": (False,), "shared_expert_intermediate_size": (0,), "use_qk_norm": (True,)},
        ignored="qkv_bias",
    ),
    "qwen3_next": Architecture(
        mixer=hybrid_mixer,
        mlp=sparse_step(shared_experts),
        kinds=linear_kinds,
        norm=HYBRID_NORM,
        defaults={"norm_topk_prob": True},
        mtp_key="mtp_num_hidden_layers",
        names=SHARED_NAMES,
    ),
    "qwen3_5_text": Architecture(
        mixer=hybrid_mixer,
        mlp=mlp(),
        kinds=linear_kinds,
        norm=HYBRID_NORM,
        fixed={
            "mtp_use_dedicated_embeddings": (False,),
            "mamba_ssm_dtype": ("float32",),
            "output_gate_type": ("swish",),
        },
        ignored="mlp_only_layers",
        mtp_key="mtp_num_hidden_layers",
        names=SHARED_NAMES,
    ),
    "qwen3_5_moe_text": Architecture(
        mixer=hybrid_mixer,
        mlp=in_every_layer(partial(shared_experts, normalized=True)),
        kinds=linear_kinds,
        norm=HYBRID_NORM,
        fixed={"mtp_use_dedicated_embeddings": (False,), "mamba_ssm_dtype": ("float32",), "mlp_only_layers": ([],)},
        ignored="intermediate_size",
        mtp_key="mtp_num_hidden_layers",
        names=SHARED_NAMES,
    ),
}
