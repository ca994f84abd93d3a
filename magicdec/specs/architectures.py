"""The architectures that are understood: one row each, put together from the parts in hf_layers.py and hf_families.py.

A row reads every structural key of its configurations; what no row reads is refused. Where the publisher may leave a
key out, the row's default is that of transformers' configuration class (models/NAME/configuration_NAME.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any

from magicdec.errors import ConfigError
from magicdec.specs.hf_families import (
    Details,
    alternating,
    always_window,
    cohere_details,
    deepseek_v2_experts,
    gemma_attention,
    gemma_details,
    gemma_mlp,
    glm4_moe_attention,
    glm_moe,
    gpt_oss_experts,
    granite_attention,
    granite_details,
    grouped,
    linear_kinds,
    llama4_layers,
    minimax_m2_attention,
    minimax_mixer,
    nemotron_h_details,
    nemotron_h_layers,
    nemotron_nas_layers,
    pattern_kinds,
    plain,
    plain_mlp,
    qwen3_moe_kinds,
    qwen3_next_mixer,
    qwen_kinds,
    qwen_shared_experts,
    sparse_latent_layers,
    stacked,
)
from magicdec.specs.hf_keys import Keys
from magicdec.specs.hf_layers import GroupedQuery, experts, latent, leading_dense, listed_kinds, sparse_step
from magicdec.specs.hf_variants import (
    dots1_kinds,
    dots1_mlp,
    ernie_details,
    ernie_experts,
    exaone4_attention,
    exaone4_kinds,
    granite_hybrid_layers,
    hunyuan_rope,
    ministral3_attention,
    phimoe_details,
    phimoe_experts,
    phimoe_rope,
    smollm3_layers,
)
from magicdec.specs.layers import Layer
from magicdec.specs.model import Norm, TensorNames

PLAIN_NORM = Norm()
LLAMA_NAMES = TensorNames()


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How the configurations of one architecture are read."""

    layers: Callable[[Keys], list[Layer]]
    norm: Norm = PLAIN_NORM
    eps_key: str = "rms_norm_eps"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers' configuration class takes for keys that published files leave out."""
    tied: bool = False
    details: Callable[[Keys], Details] = lambda keys: {}
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Structural keys of which these values only are understood."""
    ignored: tuple[str, ...] = ()
    """Keys that this architecture carries and that change nothing in it."""
    names: TensorNames = LLAMA_NAMES
    mtp_key: str | None = None
    """The key that counts prediction heads, each a copy of the last layer."""


LLAMA = Architecture(
    layers=stacked(grouped(bias="attention_bias", output_bias="attention_bias"), plain_mlp(bias="mlp_bias")),
    ignored=("sliding_window", "use_sliding_window", "layer_types", "max_window_layers"),
)
MISTRAL = Architecture(
    layers=stacked(grouped(), plain_mlp(), always_window),
    defaults={"sliding_window": 4096},
    fixed={"attention_bias": (False,), "mlp_bias": (False,)},
    ignored=("layer_types", "use_sliding_window", "max_window_layers"),
)
QWEN2 = Architecture(
    layers=stacked(grouped(bias=True), plain_mlp(), qwen_kinds),
    defaults={"sliding_window": 4096},
    ignored=("attention_bias",),
    fixed={"mlp_bias": (False,)},
)
QWEN3 = Architecture(
    layers=stacked(
        grouped(bias="attention_bias", output_bias="attention_bias", qk_norm="head", head_dim=128),
        plain_mlp(),
        qwen_kinds,
    ),
    defaults={"sliding_window": 4096},
    fixed={"mlp_bias": (False,)},
)
QWEN3_MOE = Architecture(
    layers=stacked(
        grouped(bias="attention_bias", output_bias="attention_bias", qk_norm="head"),
        partial(sparse_step, mixture=experts),
        qwen3_moe_kinds,
    ),
    defaults={"sliding_window": 4096},
    fixed={"mlp_bias": (False,), "shared_expert_intermediate_size": (0,), "use_qk_norm": (True,)},
    ignored=("qkv_bias",),
)
DEEPSEEK_V3 = Architecture(
    layers=stacked(lambda keys, kind: latent(keys), glm_moe),
    fixed={"topk_method": ("noaux_tc",), "mlp_bias": (False,)},
    mtp_key="num_nextn_predict_layers",
)
DEEPSEEK_DSA = Architecture(
    layers=sparse_latent_layers,
    fixed={"topk_method": ("noaux_tc",), "mlp_bias": (False,)},
    ignored=("index_share_for_mtp_iteration", "moe_router_dtype"),
    mtp_key="num_nextn_predict_layers",
)
GEMMA2_NORM = Norm(kind="rms_plus_one", placement="around")
GEMMA2_NAMES = TensorNames(
    norms=("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
)
OLMO_NORM = Norm(placement="after")
OLMO_NAMES = TensorNames(norms=("post_attention_layernorm", "post_feedforward_layernorm"))
HUNYUAN_TOKENS = tuple(
    """
    add_classification_head cla_share_factor class_num dense_list eod_token_id im_end_id im_newline_id im_start_id
    mask_init_id org_vocab_size pad_id pool_type text_end_id text_start_id
    """.split()  # noqa: SIM905
)
QWEN3_NEXT_NAMES = TensorNames(shared="shared_expert")

ARCHITECTURES: dict[str, Architecture] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen2_5_vl": QWEN2,
    "qwen3_moe": QWEN3_MOE,
    "mixtral": Architecture(
        layers=stacked(
            grouped(theta=1_000_000.0),
            plain(partial(experts, width="intermediate_size", normalized=True)),
            always_window,
        ),
        fixed={"attention_bias": (False,), "mlp_bias": (False,)},
        names=TensorNames(mlp="block_sparse_moe", expert="w1"),
    ),
    "phi3": Architecture(
        layers=stacked(grouped(partial=1.0), plain_mlp(), always_window),
        fixed={"attention_bias": (False,), "mlp_bias": (False,)},
        ignored=("original_max_position_embeddings",),
        names=TensorNames(fused_qkv=True, fused_gate_up=True),
    ),
    "gemma": Architecture(
        layers=stacked(grouped(bias="attention_bias", output_bias="attention_bias", head_dim=256), plain(gemma_mlp)),
        norm=Norm(kind="rms_plus_one"),
        tied=True,
        fixed={"use_bidirectional_attention": (False,)},
        details=gemma_details,
    ),
    "gemma2": Architecture(
        layers=stacked(gemma_attention(False, 256, False), plain(gemma_mlp), alternating),
        norm=GEMMA2_NORM,
        tied=True,
        defaults={"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        details=gemma_details,
        ignored=("cache_implementation",),
        names=GEMMA2_NAMES,
    ),
    "gemma3_text": Architecture(
        layers=stacked(gemma_attention(True, 256, True), plain(gemma_mlp), pattern_kinds(6)),
        norm=GEMMA2_NORM,
        tied=True,
        defaults={
            "sliding_window": 4096,
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
        },
        details=gemma_details,
        ignored=("cache_implementation",),
        names=GEMMA2_NAMES,
    ),
    "cohere": Architecture(
        layers=stacked(
            lambda keys, kind: GroupedQuery(
                bias="attention_bias",
                output_bias="attention_bias",
                theta=500_000.0,
                pairs="adjacent",
                qk_norm="layernorm" if keys.flag("use_qk_norm") else "none",
            ).read(keys, kind),
            plain_mlp(),
        ),
        norm=Norm(kind="layernorm", placement="parallel"),
        eps_key="layer_norm_eps",
        tied=True,
        details=cohere_details,
        names=TensorNames(norms=("input_layernorm",)),
    ),
    "cohere2": Architecture(
        layers=stacked(
            grouped(bias="attention_bias", output_bias="attention_bias", pairs="adjacent", rotated="window"),
            plain_mlp(),
            pattern_kinds(4),
        ),
        norm=Norm(kind="layernorm", placement="parallel"),
        eps_key="layer_norm_eps",
        tied=True,
        defaults={"sliding_window": 4096},
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
        ignored=("cache_implementation",),
        names=TensorNames(norms=("input_layernorm",)),
    ),
    "olmo2": Architecture(
        layers=stacked(grouped(bias="attention_bias", output_bias="attention_bias", qk_norm="layer"), plain_mlp()),
        norm=OLMO_NORM,
        names=OLMO_NAMES,
    ),
    "olmo3": Architecture(
        layers=stacked(
            grouped(bias="attention_bias", output_bias="attention_bias", qk_norm="layer", theta=500_000.0),
            plain_mlp(),
            pattern_kinds(4),
        ),
        norm=OLMO_NORM,
        defaults={"sliding_window": 4096},
        names=OLMO_NAMES,
    ),
    "granite": Architecture(
        layers=stacked(granite_attention, plain_mlp(bias="mlp_bias")),
        details=granite_details,
    ),
    "glm4": Architecture(
        layers=stacked(grouped(bias="attention_bias", head_dim=128, partial=0.5, pairs="adjacent"), plain_mlp()),
        norm=Norm(placement="around"),
        defaults={"attention_bias": True},
        names=TensorNames(
            fused_gate_up=True,
            norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        ),
    ),
    "glm4_moe": Architecture(
        layers=stacked(glm4_moe_attention, glm_moe),
        mtp_key="num_nextn_predict_layers",
    ),
    "minimax_m2": Architecture(
        layers=stacked(
            minimax_m2_attention,
            plain(
                partial(experts, width="intermediate_size", normalized=True, scoring="sigmoid", correction_bias=True)
            ),
        ),
        fixed={
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "use_routing_bias": (True,),
            "shared_intermediate_size": (0,),
            "scoring_func": ("sigmoid",),
            "mtp_transformer_layers": (1,),
            "use_mtp": (True, False),
        },
        ignored=("layernorm_full_attention_alpha", "layernorm_full_attention_beta"),
        mtp_key="num_mtp_modules",
        names=TensorNames(mlp="block_sparse_moe", expert="w1", correction_bias="e_score_correction_bias"),
    ),
    "gpt_oss": Architecture(
        layers=stacked(
            grouped(bias="attention_bias", output_bias="attention_bias", sinks=True, head_dim=64, theta=150_000.0),
            plain(gpt_oss_experts),
            alternating,
        ),
        defaults={"sliding_window": 128, "attention_bias": True},
        ignored=("initial_context_length",),
        names=TensorNames(router="router", experts="stacked_in_turn"),
    ),
    "llama4_text": Architecture(
        layers=llama4_layers,
        defaults={"attention_chunk_size": 8192, "intermediate_size_mlp": 16384},
        ignored=("for_llm_compressor",),
        names=TensorNames(mlp="feed_forward", router="router", shared="shared_expert", experts="stacked"),
    ),
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "deepseek_v2": Architecture(
        layers=stacked(lambda keys, kind: latent(keys), lambda keys, i: leading_dense(keys, i, deepseek_v2_experts)),
        fixed={"mlp_bias": (False,)},
    ),
    "glm4_moe_lite": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_DSA,
    "glm_moe_dsa": DEEPSEEK_DSA,
    "qwen2_moe": Architecture(
        layers=stacked(grouped(bias=True), partial(sparse_step, mixture=qwen_shared_experts(None)), qwen3_moe_kinds),
        defaults={"sliding_window": 4096},
        fixed={"qkv_bias": (True,)},
        names=QWEN3_NEXT_NAMES,
    ),
    "qwen3_next": Architecture(
        layers=stacked(qwen3_next_mixer, partial(sparse_step, mixture=qwen_shared_experts(None)), linear_kinds),
        norm=Norm(kind="rms_plus_one"),
        defaults={"norm_topk_prob": True},
        mtp_key="mtp_num_hidden_layers",
        names=QWEN3_NEXT_NAMES,
    ),
    "qwen3_5_text": Architecture(
        layers=stacked(qwen3_next_mixer, plain_mlp(), linear_kinds),
        norm=Norm(kind="rms_plus_one"),
        fixed={
            "mtp_use_dedicated_embeddings": (False,),
            "mamba_ssm_dtype": ("float32",),
            "output_gate_type": ("swish",),
        },
        ignored=("mlp_only_layers",),
        mtp_key="mtp_num_hidden_layers",
        names=QWEN3_NEXT_NAMES,
    ),
    "qwen3_5_moe_text": Architecture(
        layers=stacked(qwen3_next_mixer, plain(qwen_shared_experts(True)), linear_kinds),
        norm=Norm(kind="rms_plus_one"),
        fixed={"mtp_use_dedicated_embeddings": (False,), "mamba_ssm_dtype": ("float32",), "mlp_only_layers": ([],)},
        ignored=("intermediate_size",),
        mtp_key="mtp_num_hidden_layers",
        names=QWEN3_NEXT_NAMES,
    ),
    "minimax": Architecture(
        layers=stacked(
            minimax_mixer,
            plain(partial(experts, width="intermediate_size", normalized=True)),
            lambda keys: listed_kinds(keys, lambda i: "linear_attention" if i % 2 else "full_attention"),
        ),
        ignored=(
            "full_attn_alpha_factor",
            "full_attn_beta_factor",
            "linear_attn_alpha_factor",
            "linear_attn_beta_factor",
            "mlp_alpha_factor",
            "mlp_beta_factor",
        ),
        names=TensorNames(mlp="block_sparse_moe", expert="w1"),
    ),
    "nemotron_h": Architecture(
        layers=nemotron_h_layers,
        eps_key="layer_norm_epsilon",
        defaults={
            "conv_kernel": 4,
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "norm_topk_prob": True,
        },
        details=nemotron_h_details,
        fixed={"tie_word_embeddings": (False,)},
        ignored=(
            "chunk_size",
            "mamba_chunk_size",
            "mamba_hidden_act",
            "mamba_ssm_cache_dtype",
            "norm_eps",
            "rms_norm_eps",
            "num_logits_to_keep",
            "rescale_prenorm_residual",
            "residual_in_fp32",
            "time_step_floor",
            "time_step_limit",
            "time_step_max",
            "time_step_min",
            "time_step_rank",
            "use_mamba_kernels",
            "moe_shared_expert_overlap",
            "num_query_groups",
            "intermediate_size",
            "moe_latent_size",
            "moe_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "n_shared_experts",
            "n_routed_experts",
            "num_experts_per_tok",
            "norm_topk_prob",
            "n_group",
            "topk_group",
            "routed_scaling_factor",
        ),
    ),
    "glm": Architecture(
        layers=stacked(grouped(bias="attention_bias", head_dim=128, partial=0.5, pairs="adjacent"), plain_mlp()),
        defaults={"attention_bias": True},
        names=TensorNames(fused_gate_up=True),
    ),
    "smollm3": Architecture(layers=smollm3_layers, tied=True),
    "seed_oss": Architecture(
        layers=stacked(
            grouped(bias="attention_bias", output_bias="attention_out_bias", head_dim=128), plain_mlp(bias="mlp_bias")
        ),
        defaults={"attention_bias": True},
    ),
    "ernie4_5": Architecture(
        layers=stacked(
            grouped(bias="use_bias", output_bias="use_bias", head_dim=128, theta=500_000.0, pairs="adjacent"),
            plain_mlp(bias="use_bias"),
        ),
        tied=True,
    ),
    "ernie4_5_moe": Architecture(
        layers=stacked(grouped(theta=500_000.0, pairs="adjacent"), ernie_experts),
        tied=True,
        fixed={
            "use_bias": (False,),
            "moe_use_aux_free": (True,),
            "moe_gate": ("topk",),
            "use_rmsnorm": (True,),
            "moe_norm_min": (1e-12,),  # less than the chosen experts' probabilities add up to
        },
        ignored=("moe_capacity",),
        details=ernie_details,
        names=TensorNames(correction_bias="moe_statics.e_score_correction_bias", correction_is_row=True),
    ),
    "exaone4": Architecture(
        layers=stacked(exaone4_attention, plain_mlp(), exaone4_kinds),
        norm=OLMO_NORM,
        defaults={"sliding_window": 4096},
        names=OLMO_NAMES,
    ),
    "dots1": Architecture(
        layers=stacked(
            grouped(bias="attention_bias", output_bias="attention_bias", qk_norm="head"), dots1_mlp, dots1_kinds
        ),
        defaults={"sliding_window": 4096},
        ignored=("use_sliding_window",),
    ),
    "olmoe": Architecture(
        layers=stacked(
            grouped(bias="attention_bias", output_bias="attention_bias", qk_norm="layer"),
            plain(partial(experts, width="intermediate_size")),
        ),
        fixed={"clip_qkv": (None,)},
    ),
    "ministral3": Architecture(layers=stacked(ministral3_attention, plain_mlp(), always_window)),
    "hunyuan_v1_dense": Architecture(
        layers=stacked(
            grouped(bias="attention_bias", output_bias="attention_bias", qk_norm="head_after", rope=hunyuan_rope),
            plain_mlp(),
        ),
        fixed={
            "use_qk_norm": (True,),
            "use_cla": (False,),
            "mlp_bias": (False,),
            "use_rotary_pos_emb": (True,),
            "norm_type": ("rms", "hf_rms", "fused"),
        },
        ignored=HUNYUAN_TOKENS,
        names=TensorNames(qk_norms=("query_layernorm", "key_layernorm")),
    ),
    "apertus": Architecture(
        layers=stacked(
            grouped(bias="attention_bias", output_bias="attention_bias", qk_norm="head", theta=12_000_000.0),
            plain_mlp(default_activation="xielu", gated=False),
        ),
        fixed={"mlp_bias": (False,), "post_norm": (False,), "qk_norm": (True,)},
        names=TensorNames(norms=("attention_layernorm", "feedforward_layernorm")),
    ),
    "phimoe": Architecture(
        layers=stacked(
            grouped(bias="attention_bias", output_bias="attention_bias", theta=1_000_000.0, rope=phimoe_rope),
            plain(phimoe_experts),
            always_window,
        ),
        norm=Norm(kind="layernorm", has_bias=True),
        details=phimoe_details,
        fixed={"num_experts_per_tok": (2,)},
        ignored=("input_jitter_noise", "original_max_position_embeddings"),
        names=TensorNames(mlp="block_sparse_moe", expert="w1"),
    ),
    "granitemoehybrid": Architecture(
        layers=granite_hybrid_layers,
        details=granite_details,
        names=TensorNames(
            fused_gate_up=True,
            mlp="shared_mlp",
            matrices=("input_linear", "input_linear", "output_linear"),
            gate_up="input_linear",
        ),
    ),
    "nemotron": Architecture(
        layers=stacked(
            grouped(bias="attention_bias", output_bias="attention_bias", partial=0.5),
            plain_mlp(default_activation="relu2", gated=False, bias="mlp_bias"),
        ),
        norm=Norm(kind="layernorm_plus_one", eps=1e-5, has_bias=True),
        eps_key="norm_eps",
    ),
    "nemotron-nas": Architecture(layers=nemotron_nas_layers),
}
"""By `model_type`."""

WRAPPERS: dict[str, str] = {
    "mistral3": "mistral",
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "kimi_k25": "kimi_k2",
    "cohere2_vision": "cohere2",
}
"""Models of several modalities: `text_config` describes their decoder, of this architecture where it names none."""

SAME = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe", "qwen2_5_vl_text": "qwen2"}
"""Decoders of such models that are another architecture's."""


def architecture(model_type: str, where: str) -> Architecture:
    """The row of an architecture. Raises ConfigError naming the nearest one, and how to describe another."""
    name = SAME.get(model_type, model_type)
    if name not in ARCHITECTURES:
        known = (*ARCHITECTURES, *WRAPPERS)
        near = get_close_matches(model_type, known, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"{where}: model_type '{model_type}' is not known; the nearest by name is '{near}', and `magicdec models "
            "--architectures` lists all. A model of layers that are known may be described in a file of magicdec's own "
            "schema (docs/extending.md, Describe a model)"
        )
    return ARCHITECTURES[name]
