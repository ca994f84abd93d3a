"""The layers of a configuration, read key by key: what the rows of architectures.py are put together from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from magicdec.errors import ConfigError
from magicdec.specs.hf_keys import Keys
from magicdec.specs.hf_rope import read_rope
from magicdec.specs.layers import (
    MLP,
    Activation,
    Attention,
    FeedForward,
    GatedDeltaNet,
    Indexer,
    LatentAttention,
    LightningAttention,
    Mamba2,
    MixtureOfExperts,
    QKNorm,
    Rope,
)

KINDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "linear",
    "mamba": "linear",
    "indexed_attention": "full",
    "deepseek_sparse_attention": "full",
}
"""transformers' names of kinds of layers, older ones included."""


def num_layers(keys: Keys) -> int:
    return keys.size("num_hidden_layers", "num_layers", "n_layer")


def listed_kinds(keys: Keys, default: Callable[[int], str]) -> list[str]:
    """`layer_types`, or what the architecture takes where there is none."""
    count = num_layers(keys)
    listed = keys.per_layer("layer_types", count, lambda each: each in KINDS, " or ".join(KINDS))
    return listed or [default(index) for index in range(count)]


def every_nth(n: int, *, other: str = "sliding_attention") -> Callable[[int], str]:
    """Layers n, 2n, … attend fully, the others otherwise."""
    return lambda index: other if (index + 1) % n else "full_attention"


@dataclass(frozen=True, kw_only=True)
class GroupedQuery:
    """Grouped-query attention; what one architecture does in its own way."""

    bias: bool | str = False
    """Or the key that says it."""
    output_bias: bool | str = False
    qk_norm: QKNorm = "none"
    head_dim: int | None = None
    theta: float = 10_000.0
    partial: float | None = None
    """The share of a head that is rotated, unless the configuration says otherwise; None: always all of it."""
    pairs: Literal["halves", "adjacent"] = "halves"
    sinks: bool = False
    gated: bool = False
    rotated: Literal["all", "window", "none"] = "all"
    """Which layers rotate queries and keys."""
    rope: Callable[..., Rope] = read_rope

    def read(self, keys: Keys, kind: str) -> Attention:
        hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads", "n_head")
        kv_heads = keys.size("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise ConfigError(
                f"{keys.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        head_dim = keys.size("head_dim", "attention_head_dim", default=self.head_dim or max(hidden // heads, 1))
        mask = KINDS[kind]
        rope = self.rope(keys, head_dim, kind=kind, theta=self.theta, partial=self.partial, pairs=self.pairs)
        is_rotated = self.rotated == "all" or (self.rotated == "window" and mask != "full")
        span = {"window": "sliding_window", "chunk": "attention_chunk_size"}.get(mask)
        return Attention(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            mask=mask,  # type: ignore[arg-type]
            span=None if span is None else keys.size(span),
            rope=rope if is_rotated else None,
            bias=keys.flag(self.bias, "qkv_bias") if isinstance(self.bias, str) else self.bias,
            output_bias=keys.flag(self.output_bias) if isinstance(self.output_bias, str) else self.output_bias,
            qk_norm=self.qk_norm,
            sinks=self.sinks,
            gated=self.gated,
        )


def latent(keys: Keys, *, pairs: Literal["halves", "adjacent"] = "adjacent") -> LatentAttention:
    """DeepSeek's multi-head latent attention. YaRN's mscale_all_dim enlarges the scores, as the published code does."""
    nope, rotated = keys.size("qk_nope_head_dim"), keys.size("qk_rope_head_dim")
    keys.require("qk_head_dim", nope + rotated)
    keys.ignore("num_key_value_heads", "head_dim")
    pairs = pairs if keys.flag("rope_interleave", default=True) else "halves"
    rope = read_rope(keys, rotated, partial=None, pairs=pairs)
    return LatentAttention(
        num_heads=keys.size("num_attention_heads"),
        q_lora_rank=keys.optional_size("q_lora_rank"),
        kv_lora_rank=keys.size("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotated,
        v_head_dim=keys.size("v_head_dim"),
        rope=rope,
        bias=keys.flag("attention_bias"),
        scale=(nope + rotated) ** -0.5 * _score_scale(keys) ** 2,
    )


def _score_scale(keys: Keys) -> float:
    import math

    given = keys.raw("rope_scaling", default=None) or keys.raw("rope_parameters", default=None) or {}
    weight, factor = given.get("mscale_all_dim", 0), given.get("factor", 1.0)
    is_yarn = given.get("rope_type", given.get("type", "default")) != "default"
    return 0.1 * weight * math.log(factor) + 1.0 if is_yarn and weight and factor > 1 else 1.0


def indexer(keys: Keys, *, is_shared: bool = False) -> Indexer:
    return Indexer(
        num_heads=keys.size("index_n_heads"),
        head_dim=keys.size("index_head_dim"),
        top_k=keys.size("index_topk"),
        is_shared=is_shared,
    )


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


def lightning(keys: Keys) -> LightningAttention:
    heads = keys.size("num_attention_heads")
    head_dim = keys.size("head_dim", default=max(keys.size("hidden_size") // heads, 1))
    return LightningAttention(num_heads=heads, head_dim=head_dim)


def mamba2(keys: Keys) -> Mamba2:
    heads, groups = keys.size("mamba_num_heads"), keys.size("n_groups", "mamba_n_groups")
    if heads % groups:
        raise ConfigError(f"{keys.where}: mamba_num_heads {heads} is not a multiple of n_groups {groups}")
    return Mamba2(
        num_heads=heads,
        head_dim=keys.size("mamba_head_dim"),
        state_size=keys.size("ssm_state_size"),
        num_groups=groups,
        conv_kernel=keys.size("conv_kernel", "mamba_d_conv"),
        conv_bias=keys.flag("use_conv_bias", "mamba_conv_bias", default=True),
        bias=keys.flag("mamba_proj_bias"),
    )


def dense(
    keys: Keys,
    *,
    width: str = "intermediate_size",
    activation: str | tuple[str, ...] = "hidden_act",
    default_activation: str = "silu",
    gated: bool = True,
    bias: bool | str = False,
) -> MLP:
    names = (activation,) if isinstance(activation, str) else activation
    return MLP(
        width=keys.size(width),
        activation=keys.activation(*names, default=default_activation),
        gated=gated,
        bias=keys.flag(bias) if isinstance(bias, str) else bias,
    )


def experts(
    keys: Keys,
    *,
    width: str | tuple[str, ...] = "moe_intermediate_size",
    normalized: bool | None = None,
    shared_width: int = 0,
    activation: Activation | None = None,
    **changes: Any,
) -> MixtureOfExperts:
    """A mixture; `normalized` None reads norm_topk_prob, False where it is absent."""
    count = keys.size("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    chosen = keys.size("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k")
    if chosen > count:
        raise ConfigError(f"{keys.where}: num_experts_per_tok {chosen} exceeds the {count} experts")
    return MixtureOfExperts(
        num_experts=count,
        num_experts_per_tok=chosen,
        width=keys.size(*((width,) if isinstance(width, str) else width)),
        activation=activation or keys.activation(),
        shared_width=shared_width,
        normalized=keys.flag("norm_topk_prob") if normalized is None else normalized,
        **changes,
    )


def deepseek_experts(
    keys: Keys,
    *,
    scoring: Literal["softmax", "sigmoid"] = "sigmoid",
    scoring_names: tuple[str, ...] = (),
    **changes: Any,
) -> MixtureOfExperts:
    """Shared and routed experts with the routing of DeepSeek-V3: sigmoid scores, a correction bias, groups."""
    width = keys.size("moe_intermediate_size")
    groups = keys.size("n_group", default=1)
    chosen = keys.size("topk_group", default=groups)
    keys.require("scoring_func", *(scoring_names or (scoring,)))
    keys.require("ep_size", 1)
    keys.require("moe_layer_freq", 1)
    settings: dict[str, Any] = {
        "scoring": scoring,
        "correction_bias": scoring == "sigmoid",
        "num_groups": groups,
        "num_chosen_groups": chosen,
        "scaling_factor": keys.number("routed_scaling_factor", default=1.0),
        "shared_width": keys.size("n_shared_experts", default=0, least=0) * width,
    }
    mixture = experts(keys, **{**settings, **changes})
    if mixture.num_experts % groups or chosen > groups:
        raise ConfigError(
            f"{keys.where}: {mixture.num_experts} experts in {groups} groups, {chosen} chosen, do not fit"
        )
    return mixture


def leading_dense(keys: Keys, index: int, mixture: Callable[[Keys], MixtureOfExperts]) -> FeedForward:
    """A dense MLP in the first `first_k_dense_replace` layers, or where `mlp_layer_types` says so; then experts."""
    types = keys.per_layer(
        "mlp_layer_types", num_layers(keys), lambda each: each in ("dense", "sparse"), "dense, sparse"
    )
    first = keys.size("first_k_dense_replace", default=0, least=0)
    is_dense = index < first if types is None else types[index] == "dense"
    routed = mixture(keys)
    return dense(keys) if is_dense else routed


def sparse_step(keys: Keys, index: int, mixture: Callable[[Keys], MixtureOfExperts]) -> FeedForward:
    """Experts in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name, as Qwen's mixtures."""
    step = keys.size("decoder_sparse_step", default=1)
    only = keys.indices("mlp_only_layers", num_layers(keys)) or frozenset()
    is_sparse = index not in only and (index + 1) % step == 0
    plain, routed = dense(keys), mixture(keys)
    return routed if is_sparse else plain
