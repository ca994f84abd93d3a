"""Publishers of one or two architectures (Cohere, OLMo, EXAONE, Phi, ERNIE, Hunyuan, MiniCPM, gpt-oss)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from magicdec.specs.families import parts
from magicdec.specs.families.keys import Keys
from magicdec.specs.families.parts import (
    Architecture,
    Details,
    GroupedQuery,
    biased,
    num_layers,
)
from magicdec.specs.families.rope import read_rope, rope_parameters
from magicdec.specs.layers import FeedForward, Layer, MixtureOfExperts
from magicdec.specs.mixers import Attention, LatentAttention, Rope
from magicdec.specs.model import Norm, TensorNames


def cohere_attention(keys: Keys, kind: str) -> Attention:
    norm = "none"
    if keys.flag("use_qk_norm"):
        norm = "layernorm"
    return biased(pairs="adjacent", qk_norm=norm)(keys, kind)


def exaone4_kinds(keys: Keys) -> list[str]:
    """As `layer_types` says; or windows but for every n-th layer, n given by
    `sliding_window_pattern`.
    """
    if keys.raw("layer_types") is None:
        keys.size("sliding_window")
        return parts.listed_kinds(
            keys, parts.every_nth(keys.size("sliding_window_pattern"))
        )
    return parts.listed_kinds(keys, lambda index: "")


def exaone4_attention(keys: Keys, kind: str) -> Attention:
    """Where some layers have windows, only they have positions."""
    is_mixed = keys.optional_size("sliding_window") is not None
    rotated: Literal["all", "window"] = "all"
    if is_mixed:
        rotated = "window"
    return GroupedQuery(qk_norm="head", rotated=rotated)(keys, kind)


def phimoe_rope(keys: Keys, head_dim: int, **options: Any) -> Rope:
    """Phi-3's, with the factors of cosine and sine given; of the short one only, as transformers
    turns beyond the original length by neither Microsoft's factors nor its own."""
    rope = read_rope(keys, head_dim, beside=("short_mscale", "long_mscale"), **options)
    if rope.scaling is None:
        return rope
    inside = Keys(rope_parameters(keys), f"{keys.where}: rope")
    inside.number("long_mscale")
    scaling = msgspec.structs.replace(
        rope.scaling,
        attention_factor=inside.number("short_mscale"),
        long_factor=(),
    )
    return msgspec.structs.replace(rope, scaling=scaling)


def phimoe_experts(keys: Keys) -> MixtureOfExperts:
    """A router trained with noise chooses among the experts that noise might have chosen."""
    nearness = keys.number("router_jitter_noise", least=-1e-9, most=1.0)
    return parts.experts(
        keys,
        width="intermediate_size",
        normalized=False,
        scoring="sparse_mixer",
        nearness=nearness,
    )


def ernie_experts(keys: Keys, index: int) -> FeedForward:
    """Experts in every n-th of the layers from `moe_layer_start_index` to `moe_layer_end_index`."""
    count = num_layers(keys)
    width = keys.size("moe_intermediate_size")
    first = keys.size("moe_layer_start_index", least=0)
    last = keys.size("moe_layer_end_index", least=-1)
    step = keys.size("moe_layer_interval")
    routed = parts.experts(
        keys,
        normalized=True,
        correction_bias=True,
        shared_width=width * keys.size("moe_num_shared_experts", least=0),
    )
    plain = parts.dense(keys)
    if last == -1:
        last_dense = count - 1
    else:
        last_dense = last
    is_sparse = first <= index <= last_dense and (index + 1) % step == 0
    if is_sparse:
        return routed
    return plain


def ernie_details(keys: Keys) -> Details:
    """Prediction heads of a dense layer, whatever the model's are (vLLM's ernie_mtp.py)."""
    heads = keys.optional_size("num_nextn_predict_layers", least=0) or 0
    return {
        "mtp_layers": (Layer(mixer=ERNIE_ATTENTION(keys), mlp=parts.dense(keys)),)
        * heads
    }


def hunyuan_rope(keys: Keys, head_dim: int, **options: Any) -> Rope:
    """`alpha` stretches the base once and for all, although the files call it dynamic."""
    parameters = rope_parameters(keys)
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type != "dynamic" or not parameters.get("alpha"):
        return read_rope(keys, head_dim, **options)
    beside = ("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    rope = read_rope(keys, head_dim, beside=beside, **options)
    if head_dim < 4:
        raise keys.error(
            "head_dim", "at least 4 where 'alpha' stretches the rotary base", head_dim
        )
    alpha = Keys(parameters, f"{keys.where}: rope").number("alpha")
    return Rope(dim=head_dim, theta=rope.theta * alpha ** (head_dim / (head_dim - 2)))


def gpt_oss_experts(keys: Keys) -> MixtureOfExperts:
    keys.require("experts_per_token", keys.size("num_experts_per_tok"))
    keys.require("hidden_act", "silu")
    keys.require("swiglu_alpha", 1.702)
    keys.require("swiglu_limit", 7.0)
    return parts.experts(
        keys,
        width="intermediate_size",
        normalized=False,
        activation="swigluoai",
        bias=True,
        router_bias=True,
        scoring="softmax_of_chosen",
    )


ERNIE_ATTENTION = GroupedQuery(pairs="adjacent")
COHERE: dict[str, Any] = {
    "norm": Norm(kind="layernorm", placement="parallel"),
    "eps_key": "layer_norm_eps",
    "details": lambda keys: {"logit_scale": keys.number("logit_scale")},
    "names": TensorNames(norms=("input_layernorm",)),
}
AFTER: dict[str, Any] = {
    "norm": Norm(placement="after"),
    "names": TensorNames(
        norms=("post_attention_layernorm", "post_feedforward_layernorm")
    ),
}


def minicpm3_attention(keys: Keys, kind: str) -> LatentAttention:
    """Latent attention whose dimensions are paired as Llama's."""
    mixer = parts.latent(keys)
    assert mixer.rope is not None
    return msgspec.structs.replace(
        mixer, rope=msgspec.structs.replace(mixer.rope, pairs="halves")
    )


def minicpm3_details(keys: Keys) -> Details:
    layers = num_layers(keys)
    hidden = keys.size("hidden_size")
    depth = keys.optional_number("scale_depth") or layers**0.5
    return {
        "embedding_scale": keys.number("scale_emb"),
        "residual_scale": depth / layers**0.5,
        "logit_scale": (keys.optional_size("dim_model_base") or hidden) / hidden,
    }


ROWS = {
    "cohere": Architecture(mixer=cohere_attention, **COHERE),
    "cohere2": Architecture(
        mixer=biased(pairs="adjacent", rotated="window"),
        kinds=parts.pattern_kinds,
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
        **COHERE,
    ),
    "olmo2": Architecture(mixer=biased(qk_norm="layer"), **AFTER),
    "olmo3": Architecture(
        mixer=biased(qk_norm="layer", has_ropes=True),
        kinds=parts.every(4),
        **AFTER,
    ),
    "olmoe": Architecture(
        mixer=biased(qk_norm="layer"),
        mlp=parts.wide_experts(normalized=None),
        fixed={"clip_qkv": (None,)},
    ),
    "exaone4": Architecture(mixer=exaone4_attention, kinds=exaone4_kinds, **AFTER),
    "phi3": Architecture(
        mixer=GroupedQuery(partial=True),
        kinds=parts.always_window,
        fixed=parts.NO_BIAS,
        ignored="original_max_position_embeddings",
        names=TensorNames(fused_qkv=True, fused_gate_up=True),
    ),
    "phimoe": Architecture(
        mixer=biased(rope=phimoe_rope),
        mlp=parts.in_every_layer(phimoe_experts),
        kinds=parts.always_window,
        norm=Norm(kind="layernorm", has_bias=True),
        details=lambda keys: {"head_bias": keys.flag("lm_head_bias")},
        fixed={"num_experts_per_tok": (2,)},
        ignored="original_max_position_embeddings",
        names=TensorNames(mlp="block_sparse_moe", expert="w1"),
    ),
    "ernie4_5": Architecture(
        mixer=GroupedQuery(bias="use_bias", output_bias="use_bias", pairs="adjacent"),
        mlp=parts.mlp(bias="use_bias"),
    ),
    "ernie4_5_moe": Architecture(
        mixer=ERNIE_ATTENTION,
        mlp=ernie_experts,
        fixed={
            "use_bias": (False,),
            "moe_use_aux_free": (True,),
            "moe_gate": ("topk",),
            "use_rmsnorm": (True,),
            "moe_norm_min": (
                1e-12,
            ),  # less than the chosen experts' probabilities add up to
        },
        ignored="moe_capacity",
        details=ernie_details,
        names=TensorNames(
            correction_bias="moe_statics.e_score_correction_bias",
            correction_is_row=True,
        ),
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
        ignored="""add_classification_head cla_share_factor class_num dense_list
            eod_token_id im_end_id im_newline_id im_start_id mask_init_id org_vocab_size pad_id
            pool_type text_end_id text_start_id""",
        names=TensorNames(qk_norms=("query_layernorm", "key_layernorm")),
    ),
    "gpt_oss": Architecture(
        mixer=biased(sinks=True),
        mlp=parts.in_every_layer(gpt_oss_experts),
        kinds=parts.every(2),
        ignored="initial_context_length",
        names=TensorNames(router="router", experts="stacked_in_turn"),
    ),
    "minicpm3": Architecture(
        mixer=minicpm3_attention,
        mlp=parts.mlp(bias="mlp_bias"),
        details=minicpm3_details,
    ),
}
