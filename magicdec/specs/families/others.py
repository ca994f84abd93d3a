"""Publishers of one or two architectures: Cohere, OLMo, EXAONE, Phi, ERNIE, Hunyuan, gpt-oss."""

from __future__ import annotations

from typing import Any

import msgspec

from magicdec.errors import ConfigError
from magicdec.specs.families.keys import Keys
from magicdec.specs.families.parts import (
    NO_BIAS,
    SLIDING_4096,
    Architecture,
    Details,
    GroupedQuery,
    all_full,
    always_window,
    biased,
    dense,
    every_nth,
    every_second,
    experts,
    in_every_layer,
    listed_kinds,
    mlp,
    num_layers,
    pattern_kinds,
    wide_experts,
    windowed,
)
from magicdec.specs.families.rope import read_rope
from magicdec.specs.layers import Attention, FeedForward, Layer, MixtureOfExperts, Rope
from magicdec.specs.model import Norm, TensorNames


def cohere_attention(keys: Keys, kind: str) -> Attention:
    norm = "layernorm" if keys.flag("use_qk_norm") else "none"
    return biased(theta=500_000.0, pairs="adjacent", qk_norm=norm)(keys, kind)


def cohere_details(keys: Keys) -> Details:
    return {"logit_scale": keys.number("logit_scale", default=0.0625)}


def exaone4_kinds(keys: Keys) -> list[str]:
    """Windows but for every n-th layer, or by a pattern of L and G that repeats, its last layer attending to all."""
    count = num_layers(keys)
    pattern = keys.raw("sliding_window_pattern", default=4)
    if keys.optional_size("sliding_window") is None:
        keys.ignore("layer_types")
        return all_full(keys)
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
        return listed_kinds(keys, windowed(lambda i: pattern[i % len(pattern)] == "L" and i < count - 1))
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        raise keys.error("sliding_window_pattern", "a whole number, or a pattern of L and G", pattern)
    return listed_kinds(keys, every_nth(pattern))


def exaone4_attention(keys: Keys, kind: str) -> Attention:
    """Where some layers have windows, only they have positions."""
    is_mixed = keys.optional_size("sliding_window") is not None
    return GroupedQuery(qk_norm="head", rotated="window" if is_mixed else "all")(keys, kind)


def phimoe_rope(keys: Keys, head_dim: int, **options: Any) -> Rope:
    """Phi-3's, with the factors of cosine and sine given."""
    rope = read_rope(keys, head_dim, beside=("short_mscale", "long_mscale"), **options)
    given = keys.raw("rope_scaling", "rope_parameters", default=None) or {}
    if rope.scaling is None or not given.get("long_mscale"):
        return rope
    factor = Keys(given, f"{keys.where}: rope").number("long_mscale")
    return msgspec.structs.replace(rope, scaling=msgspec.structs.replace(rope.scaling, attention_factor=factor))


def phimoe_experts(keys: Keys) -> MixtureOfExperts:
    """A router trained with noise chooses among the experts that noise might have chosen."""
    nearness = keys.number("router_jitter_noise", default=0.01, least=-1e-9, most=1.0)
    return experts(keys, width="intermediate_size", normalized=False, scoring="sparse_mixer", nearness=nearness)


def phimoe_details(keys: Keys) -> Details:
    return {"head_bias": keys.flag("lm_head_bias")}


def ernie_experts(keys: Keys, index: int) -> FeedForward:
    """Experts in every n-th of the layers from `moe_layer_start_index` to `moe_layer_end_index`."""
    count, width = num_layers(keys), keys.size("moe_intermediate_size")
    first = keys.size("moe_layer_start_index", default=1, least=0)
    last = keys.size("moe_layer_end_index", default=-1, least=-1)
    step = keys.size("moe_layer_interval", default=1)
    routed = experts(
        keys,
        normalized=True,
        correction_bias=True,
        shared_width=width * keys.size("moe_num_shared_experts", default=2, least=0),
    )
    plain = dense(keys)
    is_sparse = first <= index <= (count - 1 if last == -1 else last) and (index + 1) % step == 0
    return routed if is_sparse else plain


def ernie_details(keys: Keys) -> Details:
    """Prediction heads of a dense layer, whatever the model's are (vLLM's ernie_mtp.py)."""
    heads = keys.size("num_nextn_predict_layers", default=0, least=0)
    return {"mtp_layers": (Layer(mixer=ERNIE_ATTENTION(keys), mlp=dense(keys)),) * heads}


def hunyuan_rope(keys: Keys, head_dim: int, **options: Any) -> Rope:
    """`alpha` stretches the base once and for all, although the files call it dynamic."""
    given = keys.raw("rope_scaling", "rope_parameters", default=None)
    if not isinstance(given, dict) or not given.get("alpha"):
        return read_rope(keys, head_dim, **options)
    inside = Keys(given, f"{keys.where}: rope")
    base = inside.number("rope_theta", default=keys.number("rope_theta", default=10_000.0), least=1.0)
    inside.require("factor", 1.0, 1)
    inside.ignore("type", "rope_type", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    alpha = inside.number("alpha")
    if head_dim < 4 or head_dim % 2:
        raise keys.error("head_dim", "even and at least 4 where 'alpha' stretches the rotary base", head_dim)
    if left := inside.unread():
        raise ConfigError(f"{inside.where}: key '{left[0]}' is not understood")
    return Rope(dim=head_dim, theta=base * alpha ** (head_dim / (head_dim - 2)))


def gpt_oss_experts(keys: Keys) -> MixtureOfExperts:
    keys.require("hidden_act", "silu")
    keys.require("swiglu_alpha", 1.702)
    keys.require("swiglu_limit", 7.0)
    return experts(
        keys, width="intermediate_size", normalized=False, activation="swigluoai", bias=True, router_bias=True,
        scoring="softmax_of_chosen",
    )  # fmt: skip


ERNIE_ATTENTION = GroupedQuery(theta=500_000.0, pairs="adjacent")
COHERE_NORM, COHERE_NAMES = Norm(kind="layernorm", placement="parallel"), TensorNames(norms=("input_layernorm",))
AFTER = Norm(placement="after")
AFTER_NAMES = TensorNames(norms=("post_attention_layernorm", "post_feedforward_layernorm"))

ROWS = {
    "cohere": Architecture(
        mixer=cohere_attention,
        norm=COHERE_NORM,
        eps_key="layer_norm_eps",
        tied=True,
        details=cohere_details,
        names=COHERE_NAMES,
    ),
    "cohere2": Architecture(
        mixer=biased(pairs="adjacent", rotated="window"),
        kinds=pattern_kinds(4),
        norm=COHERE_NORM,
        eps_key="layer_norm_eps",
        tied=True,
        defaults=SLIDING_4096,
        details=cohere_details,
        fixed={
            "use_qk_norm": (False,),
            "use_parallel_block": (True,),
            "use_parallel_embedding": (False,),
            "use_gated_activation": (True,),
            "position_embedding_type": ("rope_gptj",),
            "order_of_interleaved_layers": ("local_attn_first",),
            "layer_switch": (4,),
            "use_embedding_sharing": (True,),
            "rotary_pct": (1.0,),
        },
        names=COHERE_NAMES,
    ),
    "olmo2": Architecture(mixer=biased(qk_norm="layer"), norm=AFTER, names=AFTER_NAMES),
    "olmo3": Architecture(
        mixer=biased(qk_norm="layer", theta=500_000.0),
        kinds=pattern_kinds(4),
        norm=AFTER,
        defaults=SLIDING_4096,
        names=AFTER_NAMES,
    ),
    "olmoe": Architecture(
        mixer=biased(qk_norm="layer"), mlp=wide_experts(normalized=None), fixed={"clip_qkv": (None,)}
    ),
    "exaone4": Architecture(
        mixer=exaone4_attention, kinds=exaone4_kinds, norm=AFTER, defaults=SLIDING_4096, names=AFTER_NAMES
    ),
    "phi3": Architecture(
        mixer=GroupedQuery(partial=1.0),
        kinds=always_window,
        fixed=NO_BIAS,
        ignored="original_max_position_embeddings",
        names=TensorNames(fused_qkv=True, fused_gate_up=True),
    ),
    "phimoe": Architecture(
        mixer=biased(theta=1_000_000.0, rope=phimoe_rope),
        mlp=in_every_layer(phimoe_experts),
        kinds=always_window,
        norm=Norm(kind="layernorm", has_bias=True),
        details=phimoe_details,
        fixed={"num_experts_per_tok": (2,)},
        ignored="original_max_position_embeddings",
        names=TensorNames(mlp="block_sparse_moe", expert="w1"),
    ),
    "ernie4_5": Architecture(
        mixer=GroupedQuery(bias="use_bias", output_bias="use_bias", head_dim=128, theta=500_000.0, pairs="adjacent"),
        mlp=mlp(bias="use_bias"),
        tied=True,
    ),
    "ernie4_5_moe": Architecture(
        mixer=ERNIE_ATTENTION,
        mlp=ernie_experts,
        tied=True,
        fixed={
            "use_bias": (False,),
            "moe_use_aux_free": (True,),
            "moe_gate": ("topk",),
            "use_rmsnorm": (True,),
            "moe_norm_min": (1e-12,),  # less than the chosen experts' probabilities add up to
        },
        ignored="moe_capacity",
        details=ernie_details,
        names=TensorNames(correction_bias="moe_statics.e_score_correction_bias", correction_is_row=True),
    ),
    "hunyuan_v1_dense": Architecture(
        mixer=biased(qk_norm="head_after", rope=hunyuan_rope),
        fixed={
            "use_qk_norm": (True,),
            "use_cla": (False,),
            "mlp_bias": (False,),
            "use_rotary_pos_emb": (True,),
            "norm_type": ("rms", "hf_rms", "fused"),
        },
        ignored="""add_classification_head cla_share_factor class_num dense_list eod_token_id im_end_id im_newline_id
            im_start_id mask_init_id org_vocab_size pad_id pool_type text_end_id text_start_id""",
        names=TensorNames(qk_norms=("query_layernorm", "key_layernorm")),
    ),
    "gpt_oss": Architecture(
        mixer=biased(sinks=True, head_dim=64, theta=150_000.0),
        mlp=in_every_layer(gpt_oss_experts),
        kinds=every_second,
        defaults={"sliding_window": 128, "attention_bias": True},
        ignored="initial_context_length",
        names=TensorNames(router="router", experts="stacked_in_turn"),
    ),
}
