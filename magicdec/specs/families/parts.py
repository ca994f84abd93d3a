"""Parts that families share in their rows: kinds of layers by index, attention, dense feed-forwards
and experts, each read key by key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import msgspec

from magicdec.errors import ConfigError
from magicdec.specs.families.keys import Keys
from magicdec.specs.families.rope import read_rope, rope_parameters
from magicdec.specs.layers import MLP, Activation, FeedForward, Layer, MixtureOfExperts
from magicdec.specs.mixers import Attention, LatentAttention, Mixer, QKNorm, Rope
from magicdec.specs.model import Norm, TensorNames

Details = dict[str, Any]
"""Fields of ModelSpec beyond its tables, layers and norms."""
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
INDEXED = ("indexed_attention", "deepseek_sparse_attention")
SPAN_KEYS = {"window": "sliding_window", "chunk": "attention_chunk_size"}
"""Keys of the tokens that a query sees, by the mask that limits them."""


def num_layers(keys: Keys) -> int:
    return keys.size("num_hidden_layers")


# Kinds of layers: readers that return one of KINDS for each


def listed_kinds(keys: Keys, default: Callable[[int], str]) -> list[str]:
    """`layer_types`, or the architecture's own kinds if the file has none. A window's size may be
    stated although no layer has a window."""
    count = num_layers(keys)
    keys.ignore("sliding_window", "sliding_window_pattern", "max_window_layers")
    listed = keys.per_layer(
        "layer_types",
        count,
        lambda kind: isinstance(kind, str) and kind in KINDS,
        " or ".join(KINDS),
    )
    if listed is None:
        return [default(index) for index in range(count)]
    return listed


def every_nth(n: int, *, other: str = "sliding_attention") -> Callable[[int], str]:
    """Layers n, 2n, … attend fully, the others otherwise."""
    return lambda index: other if (index + 1) % n else "full_attention"


def sized_windows(keys: Keys, default: Callable[[int], str]) -> list[str]:
    """`listed_kinds` of architectures that need the size of a window even where no layer has
    one."""
    keys.size("sliding_window")
    return listed_kinds(keys, default)


def every(n: int) -> Callable[[Keys], list[str]]:
    """Windows but in layers n, 2n, …; or as `layer_types` says."""
    return lambda keys: sized_windows(keys, every_nth(n))


def pattern_kinds(keys: Keys) -> list[str]:
    """Every n-th layer attends fully, n given by `sliding_window_pattern`; or as `layer_types`
    says.
    """
    return sized_windows(keys, every_nth(keys.size("sliding_window_pattern")))


def windowed(is_local: Callable[[int], bool]) -> Callable[[int], str]:
    return lambda index: "sliding_attention" if is_local(index) else "full_attention"


def windows_from(keys: Keys, window: int | None) -> list[str]:
    """Kinds of layers: windows from layer `max_window_layers` on, if the model has a window, or
    `layer_types`."""
    if window is None:
        first = 0
    else:
        first = keys.size("max_window_layers", least=0)
    return listed_kinds(keys, windowed(lambda i: window is not None and i >= first))


def all_full(keys: Keys) -> list[str]:
    return ["full_attention"] * num_layers(keys)


def always_window(keys: Keys) -> list[str]:
    """Every layer sees `sliding_window` tokens, where that is not null."""
    if keys.optional_size("sliding_window") is None:
        kind = "full_attention"
    else:
        kind = "sliding_attention"
    return [kind] * num_layers(keys)


def zeros_and_ones(keys: Keys, key: str, default: Callable[[int], bool]) -> list[bool]:
    """A list with 0 or 1 per layer, or the architecture's default."""
    count = num_layers(keys)
    listed = keys.per_layer(key, count, lambda entry: entry in (0, 1), "zeros and ones")
    if listed is None:
        return [bool(default(index)) for index in range(count)]
    return [bool(entry) for entry in listed]


# Attention


class GroupedQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Reads grouped-query attention; its fields are what one architecture does in its own way."""

    bias: bool | str = False
    """Bias on q, k and v, or the key that says it."""
    output_bias: bool | str = False
    qk_norm: QKNorm = "none"
    partial: bool = False
    """Whether the architecture's code rotates a share of a head, if its configuration says so."""
    pairs: Literal["halves", "adjacent"] = "halves"
    sinks: bool = False
    gated: bool = False
    rotated: Literal["all", "window", "none"] = "all"
    """Layers that rotate queries and keys."""
    rope: Callable[..., Rope] = read_rope
    has_ropes: bool = False
    """Whether kinds of layers have a rope each."""

    def __call__(self, keys: Keys, kind: str = "full_attention") -> Attention:
        heads = keys.size("num_attention_heads")
        head_dim = head_size(keys)
        kv_heads = keys.optional_size("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ConfigError(
                f"{keys.where}: num_attention_heads {heads} is not a multiple of "
                f"num_key_value_heads {kv_heads}"
            )
        mask = KINDS[kind]
        if mask == "linear" or kind in INDEXED:
            raise ConfigError(
                f"{keys.where}: layer_types has {kind} layers, which this architecture lacks"
            )
        rope = self._rope(keys, head_dim, kind)
        span = None
        if mask in SPAN_KEYS:
            span = keys.size(SPAN_KEYS[mask])
        return Attention(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            mask=mask,  # type: ignore[arg-type]
            span=span,
            rope=rope,
            bias=read_flag(keys, self.bias),
            output_bias=read_flag(keys, self.output_bias),
            qk_norm=self.qk_norm,
            sinks=self.sinks,
            gated=self.gated,
        )

    def _rope(self, keys: Keys, head_dim: int, kind: str) -> Rope | None:
        """The rotary embedding of a layer of this kind. Its keys are read even where this kind is
        not rotated."""
        if self.rotated == "none":
            return None
        is_full = KINDS[kind] == "full"
        rope_kind = None
        if self.has_ropes:
            rope_kind = kind
            if is_full:
                rope_kind = "full_attention"
        rope = self.rope(
            keys, head_dim, kind=rope_kind, partial=self.partial, pairs=self.pairs
        )
        if is_full and self.rotated == "window":
            return None
        return rope


def read_flag(keys: Keys, flag: bool | str) -> bool:
    """A flag that the architecture fixes, or the value of the key that holds it."""
    if isinstance(flag, str):
        return keys.flag(flag)
    return flag


def head_size(keys: Keys) -> int:
    """`head_dim`, or an equal share of the hidden size."""
    hidden = keys.size("hidden_size")
    heads = keys.size("num_attention_heads")
    return keys.optional_size("head_dim") or max(hidden // heads, 1)


biased: Callable[..., GroupedQuery] = partial(
    GroupedQuery,
    bias="attention_bias",
    output_bias="attention_bias",
)
"""Grouped-query attention whose four projections have a bias where `attention_bias` is true."""


def latent(
    keys: Keys, kind: str = "full_attention", *, any_share: bool = False
) -> LatentAttention:
    """DeepSeek's multi-head latent attention. YaRN's mscale_all_dim enlarges the scores, as the
    published code does. `any_share` is `read_rope`'s.
    """
    nope = keys.size("qk_nope_head_dim")
    rotated = keys.size("qk_rope_head_dim")
    keys.require("qk_head_dim", nope + rotated)
    heads = keys.size("num_attention_heads")
    if (keys.optional_size("num_key_value_heads") or heads) != heads:
        raise keys.error(
            "num_key_value_heads",
            f"num_attention_heads, {heads}",
            keys.raw("num_key_value_heads"),
        )
    if keys.knows("head_dim"):  # which the class sets itself
        keys.ignore("head_dim")
    elif (
        head_dim := keys.raw("head_dim", default=False)
    ) is not False and head_dim != rotated:
        raise keys.error("head_dim", f"qk_rope_head_dim, {rotated}", head_dim)
    if not keys.knows("rope_interleave"):
        keys.require("rope_interleave", True)
    is_interleaved = not keys.knows("rope_interleave") or keys.flag("rope_interleave")
    pairs: Literal["halves", "adjacent"] = "halves"
    if is_interleaved:
        pairs = "adjacent"
    rope = read_rope(keys, rotated, pairs=pairs, any_share=any_share)
    return LatentAttention(
        num_heads=heads,
        q_lora_rank=keys.optional_size("q_lora_rank"),
        kv_lora_rank=keys.size("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotated,
        v_head_dim=keys.optional_size("v_head_dim")
        or keys.size("hidden_size") // heads,
        rope=rope,
        bias=keys.flag("attention_bias"),
        scale=(nope + rotated) ** -0.5 * _score_scale(keys) ** 2,
    )


def _score_scale(keys: Keys) -> float:
    rope = rope_parameters(keys)
    weight = rope.get("mscale_all_dim") or 0
    factor = rope.get("factor") or 1.0
    is_scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    if is_scaled and weight and factor > 1:
        return 0.1 * weight * math.log(factor) + 1.0
    return 1.0


# Feed-forwards: readers that take the layer's index as well


def in_every_layer(
    mlp: Callable[[Keys], FeedForward],
) -> Callable[[Keys, int], FeedForward]:
    return lambda keys, index: mlp(keys)


def dense(
    keys: Keys,
    *,
    width: str = "intermediate_size",
    gated: bool = True,
    bias: bool | str = False,
) -> MLP:
    """An MLP; `bias` may be the key that says it."""
    return MLP(
        width=keys.size(width),
        activation=keys.activation(),
        gated=gated,
        bias=read_flag(keys, bias),
    )


def mlp(**options: Any) -> Callable[[Keys, int], FeedForward]:
    """A dense feed-forward in every layer."""
    return in_every_layer(partial(dense, **options))


def experts(
    keys: Keys,
    *,
    width: str = "moe_intermediate_size",
    normalized: bool | None = None,
    activation: Activation | None = None,
    **changes: Any,
) -> MixtureOfExperts:
    """A mixture; `normalized` None reads norm_topk_prob."""
    count = keys.size(
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
    )
    num_chosen = keys.size("num_experts_per_tok", "moe_k", "top_k_experts")
    if num_chosen > count:
        raise ConfigError(
            f"{keys.where}: num_experts_per_tok {num_chosen} exceeds the {count} experts"
        )
    if normalized is None:
        normalized = keys.flag("norm_topk_prob")
    return MixtureOfExperts(
        num_experts=count,
        num_experts_per_tok=num_chosen,
        width=keys.size(width),
        activation=activation or keys.activation(),
        normalized=normalized,
        **changes,
    )


def wide_experts(**options: Any) -> Callable[[Keys, int], FeedForward]:
    """Experts of `intermediate_size` in every layer, their weights normalised."""
    return in_every_layer(
        partial(
            experts, **{"width": "intermediate_size", "normalized": True, **options}
        )
    )


def deepseek_experts(
    keys: Keys,
    *,
    scoring: Literal["softmax", "sigmoid"] = "sigmoid",
    scoring_names: tuple[str, ...] = (),
    **changes: Any,
) -> MixtureOfExperts:
    """Shared and routed experts with the routing of DeepSeek-V3: sigmoid scores, a correction bias,
    groups.
    """
    width = keys.size("moe_intermediate_size")
    keys.require("scoring_func", *(scoring_names or (scoring,)))
    keys.require("ep_size", 1)
    keys.require("moe_layer_freq", 1)
    settings: dict[str, Any] = {
        "scoring": scoring,
        "correction_bias": scoring == "sigmoid",
        "scaling_factor": keys.number("routed_scaling_factor"),
        "shared_width": keys.size("n_shared_experts", least=0) * width,
    }
    if "num_groups" not in changes:
        settings |= {
            "num_groups": keys.size("n_group"),
            "num_chosen_groups": keys.size("topk_group"),
        }
    mixture = experts(keys, **{**settings, **changes})
    groups, num_chosen = mixture.num_groups, mixture.num_chosen_groups
    reachable = mixture.num_experts // groups * num_chosen
    if (
        mixture.num_experts % groups
        or num_chosen > groups
        or mixture.num_experts_per_tok > reachable
    ):
        raise ConfigError(
            f"{keys.where}: {mixture.num_experts} experts in {groups} groups, {num_chosen} chosen, "
            "do not fit "
            f"num_experts_per_tok {mixture.num_experts_per_tok}"
        )
    return mixture


def leading_dense(
    keys: Keys,
    index: int,
    mixture: Callable[[Keys], MixtureOfExperts] = deepseek_experts,
) -> FeedForward:
    """A dense MLP in the first `first_k_dense_replace` layers, or where `mlp_layer_types` names
    one; then experts.
    """
    types = keys.per_layer(
        "mlp_layer_types",
        num_layers(keys),
        lambda kind: kind in ("dense", "sparse"),
        "dense, sparse",
    )
    first = keys.size("first_k_dense_replace", least=0)
    if types is None:
        is_dense = index < first
    else:
        is_dense = types[index] == "dense"
    plain = dense(keys)
    routed = mixture(keys)
    if is_dense:
        return plain
    return routed


# A row

BIASED = biased()
MLP_IN_ALL = mlp()
RMS = Norm()
LLAMA_NAMES = TensorNames()
NO_BIAS: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
}


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """How the configurations of one architecture are read: its layers, and what differs from Llama
    around them.
    """

    mixer: Callable[[Keys, str], Mixer] = BIASED
    """Reads a layer's mixer, by kind."""
    mlp: Callable[[Keys, int], FeedForward] = MLP_IN_ALL
    """Reads a layer's feed-forward, by index."""
    kinds: Callable[[Keys], list[str]] = all_full
    whole: Callable[[Keys], list[Layer]] | None = None
    """Reads all layers together, where kind and index do not tell them; instead of the three above.
    """
    norm: Norm = RMS
    eps_key: str = "rms_norm_eps"
    details: Callable[[Keys], Details] = lambda keys: {}
    fixed: Mapping[str, tuple[Any, ...]] = msgspec.field(default_factory=dict)
    """Structural keys, each with the only values that are understood."""
    ignored: str = ""
    """Structural keys by their names that this architecture carries and that change nothing in it.
    """
    names: TensorNames = LLAMA_NAMES
    mtp_key: str | None = None
    """The key that counts prediction heads, each a copy of the last layer."""

    def layers(self, keys: Keys) -> list[Layer]:
        if self.whole is not None:
            return self.whole(keys)
        kinds = self.kinds(keys)
        mixers = {kind: self.mixer(keys, kind) for kind in dict.fromkeys(kinds)}
        return [
            Layer(mixer=mixers[kind], mlp=self.mlp(keys, index))
            for index, kind in enumerate(kinds)
        ]
