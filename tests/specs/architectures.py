"""Small configurations of every architecture that is read, drawn at random: what transformers' own classes take."""

from __future__ import annotations

import random
from typing import Any

Config = dict[str, Any]


def _base(rng: random.Random) -> Config:
    kv_heads = rng.choice((1, 2))
    group = rng.choice((1, 2, 3))
    head_dim = rng.choice((8, 16))
    return {
        "vocab_size": rng.choice((96, 130)), "hidden_size": kv_heads * group * rng.choice((8, 16)),
        "intermediate_size": rng.choice((40, 56)), "num_hidden_layers": rng.choice((4, 5)),
        "num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        "tie_word_embeddings": rng.random() < 0.5,
    }  # fmt: skip


def _window(rng: random.Random) -> Config:
    return {"sliding_window": rng.choice((5, 8))}


def _own_head_dim(config: Config) -> Config:
    """For classes that take head_dim from hidden_size."""
    return {
        **{key: value for key, value in config.items() if key != "head_dim"},
        "hidden_size": config["num_attention_heads"] * config["head_dim"],
    }


def _experts(rng: random.Random, count: str = "num_experts") -> Config:
    return {
        count: rng.choice((4, 6)),
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    }


def _latent(rng: random.Random) -> Config:
    heads = rng.choice((2, 4))
    return {
        "num_attention_heads": heads, "num_key_value_heads": heads, "kv_lora_rank": 15 if heads == 4 else 16,
        "q_lora_rank": rng.choice((None, 12)), "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": rng.choice((8, 12)), "head_dim": 4,
    }  # fmt: skip


def _shared(rng: random.Random, count: str = "n_routed_experts") -> Config:
    return {
        **_experts(rng, count), count: 8, "n_shared_experts": rng.choice((1, 2)),
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
    }  # fmt: skip


def _delta_net(rng: random.Random) -> Config:
    return {
        "linear_num_key_heads": 2, "linear_num_value_heads": rng.choice((2, 4)), "linear_key_head_dim": 8,
        "linear_value_head_dim": rng.choice((8, 12)), "linear_conv_kernel_dim": 4,
    }  # fmt: skip


def _indexed(rng: random.Random) -> Config:
    return {
        "q_lora_rank": 12,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 6,
        "n_group": 1,
    }


OWN_HEAD_DIM = (
    "smollm3",
    "ernie4_5_moe",
    "exaone4",
    "olmoe",
    "apertus",
    "phimoe",
    "granitemoehybrid",
)
"""Others whose classes take head_dim from hidden_size."""


def variant(model_type: str, rng: random.Random) -> Config:
    """Draws for the architectures of `VARIANTS`."""
    biased = rng.random() < 0.5
    own: dict[str, Config] = {
        "glm": {"attention_bias": biased, "partial_rotary_factor": 0.5},
        "smollm3": {
            "no_rope_layer_interval": 2,
            "attention_bias": biased,
            "mlp_bias": not biased,
        }
        | ({**_window(rng), "use_sliding_window": True} if rng.random() < 0.5 else {}),
        "seed_oss": {
            "attention_bias": biased,
            "attention_out_bias": not biased,
            "mlp_bias": rng.random() < 0.5,
        },
        "ernie4_5": {"use_bias": biased},
        "ernie4_5_moe": {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": rng.choice((1, 2)),
            "moe_layer_interval": rng.choice((1, 2)),
            "moe_layer_end_index": rng.choice((-1, 3)),
        },
        "exaone4": {**_window(rng), "sliding_window_pattern": 2}
        if biased
        else {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 5,
            "num_hidden_layers": 5,
        },
        "dots1": {
            **_shared(rng),
            "attention_bias": biased,
            **(
                {**_window(rng), "max_window_layers": 2}
                if rng.random() < 0.5
                else {"sliding_window": None}
            ),
        },
        "olmoe": {
            "num_experts": rng.choice((4, 6)),
            "num_experts_per_tok": 2,
            "norm_topk_prob": biased,
        },
        "ministral3": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        },
        "hunyuan_v1_dense": {
            "attention_bias": biased,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10_000.0,
                "factor": 1.0,
                "alpha": 50.0,
            },
        },
        "apertus": {"attention_bias": biased},
        "phimoe": {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_bias": biased,
            "lm_head_bias": not biased,
            "router_jitter_noise": rng.choice((0.01, 0.4)),
        },
        "granitemoehybrid": {
            "num_local_experts": 4 if biased else 0,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention"] * 2,
            "mamba_n_heads": 4,
            "mamba_d_state": 16,
            "mamba_n_groups": rng.choice((1, 2)),
            "position_embedding_type": rng.choice(("nope", "rope")),
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
        },
    }
    return own[model_type]


def _block(rng: random.Random, num_heads: int) -> Config:
    """Of DeciLM: attention in groups of its own size or none, a feed-forward of its own width or none."""
    has_attention, has_mlp = rng.choice(
        ((True, True), (True, True), (True, False), (False, True), (False, False))
    )
    group = rng.choice([size for size in (1, 2, 3) if num_heads % size == 0])
    return {
        "attention": {
            "no_op": not has_attention,
            "n_heads_in_group": group if has_attention else None,
            "replace_with_linear": False,
            "sparsify": None,
        },
        "ffn": {
            "no_op": not has_mlp,
            "ffn_mult": rng.choice((1.3125, 9.0)) if has_mlp else None,
            "replace_with_linear": False,
            "sparsify": None,
        },
    }


def draw(model_type: str, seed: int) -> Config:
    """A configuration of an architecture, as the keys of its `config.json`."""
    rng = random.Random(f"{model_type}{seed}")
    base = _base(rng)
    biased = rng.random() < 0.5
    own: dict[str, Config] = {
        "llama": {"attention_bias": biased, "mlp_bias": rng.random() < 0.5},
        "arcee": {"attention_bias": biased, "mlp_bias": not biased},
        "mistral": _window(rng) if biased else {"sliding_window": None},
        "ministral": {
            **_window(rng),
            "layer_types": (["sliding_attention", "full_attention"] * 3)[
                : base["num_hidden_layers"]
            ],
        },
        "qwen2": {**_window(rng), "use_sliding_window": biased, "max_window_layers": 2},
        "qwen3": {
            **_window(rng),
            "use_sliding_window": biased,
            "max_window_layers": 2,
            "attention_bias": not biased,
        },
        "qwen3_moe": {
            **_experts(rng),
            "decoder_sparse_step": rng.choice((1, 2)),
            "mlp_only_layers": rng.choice(([], [1])),
            "norm_topk_prob": biased,
        },
        "mixtral": {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
        "phi3": {**_window(rng), "partial_rotary_factor": rng.choice((0.5, 1.0))},
        "gemma": {},
        "gemma2": {
            **_window(rng),
            "query_pre_attn_scalar": 24,
            "attention_bias": biased,
        },
        "gemma3_text": {
            **_window(rng),
            "query_pre_attn_scalar": 24,
            "sliding_window_pattern": 3,
        },
        "gemma4_text": {
            **_window(rng),
            "layer_types": (["sliding_attention", "full_attention"] * 3)[
                : base["num_hidden_layers"]
            ],
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": biased,
            "attention_bias": not biased,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": rng.random() < 0.5,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "final_logit_softcapping": 30.0,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1e6,
                    "partial_rotary_factor": 0.5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        "cohere": {"use_qk_norm": biased, "logit_scale": 0.25},
        "cohere2": {
            **_window(rng),
            "sliding_window_pattern": 2,
            "attention_bias": biased,
        },
        "olmo2": {"attention_bias": biased},
        "olmo3": _window(rng),
        "granite": {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
        },
        "glm4": {"attention_bias": biased, "partial_rotary_factor": 0.5},
        "glm4_moe": {
            **_shared(rng),
            "use_qk_norm": biased,
            "attention_bias": not biased,
            "partial_rotary_factor": 0.5,
        },
        "minimax_m2": {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 4,
        },
        "gpt_oss": {**_window(rng), "num_local_experts": 4, "num_experts_per_tok": 2},
        "llama4_text": {
            "num_local_experts": 4,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": rng.choice((1, 2)),
            "attention_chunk_size": rng.choice((6, 512)),
            "no_rope_layer_interval": rng.choice((2, 3)),
            "use_qk_norm": biased,
            "attn_temperature_tuning": rng.random() < 0.7,
            "attn_scale": 0.5,
            "floor_scale": 3,
            "num_experts_per_tok": rng.choice((1, 2)),
        },
        "nemotron": {
            "hidden_act": rng.choice(("relu2", "gelu")),
            "attention_bias": biased,
            "mlp_bias": rng.random() < 0.5,
            "partial_rotary_factor": rng.choice((0.5, 1.0)),
        },
        "nemotron-nas": {
            "intermediate_size": None,
            "num_key_value_heads": None,
            "block_configs": [
                _block(rng, base["num_attention_heads"])
                for _ in range(base["num_hidden_layers"])
            ],
        },
        "deepseek_v2": {
            **_latent(rng),
            "kv_lora_rank": 16,
            **_shared(rng),
            "norm_topk_prob": False,
        },
        "deepseek_v3": {**_latent(rng), **_shared(rng), "attention_bias": biased},
        "glm4_moe_lite": {**_latent(rng), **_shared(rng), "n_group": 1},
        "deepseek_v32": {**_latent(rng), **_shared(rng), **_indexed(rng)},
        "glm_moe_dsa": {**_latent(rng), **_shared(rng), **_indexed(rng)},
        "bailing_hybrid": {
            **_latent(rng),
            **_shared(rng, "num_experts"),
            "head_dim": 8,
            "q_lora_rank": None,
            "tie_word_embeddings": False,
            "layer_group_size": rng.choice((2, 3)),
            "short_conv_kernel_size": 3,
        },
        "minicpm3": {
            **_latent(rng),
            "scale_emb": 3,
            "scale_depth": rng.choice((None, 0.9)),
            "dim_model_base": rng.choice((None, 8)),
            "attention_bias": biased,
            "mlp_bias": not biased,
        },
        "qwen2_moe": {**_experts(rng), "shared_expert_intermediate_size": 16},
        "qwen3_next": {
            **_experts(rng),
            **_delta_net(rng),
            "shared_expert_intermediate_size": 16,
        },
        "qwen3_5_text": _delta_net(rng),
        "qwen3_5_moe_text": {
            **_experts(rng),
            **_delta_net(rng),
            "shared_expert_intermediate_size": 16,
        },
        "minimax": {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": (["linear_attention", "full_attention"] * 3)[
                : base["num_hidden_layers"]
            ],
        },
        "nemotron_h": {
            "hybrid_override_pattern": rng.choice(("M-M*E", "ME*-M")),
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 16,
            "n_groups": rng.choice((1, 2)),
            **_experts(rng, "n_routed_experts"),
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 16,
            "moe_latent_size": rng.choice((None, 12)),
            "mamba_proj_bias": False,
            "tie_word_embeddings": False,
        },
    }
    config = {
        **base,
        **(own[model_type] if model_type in own else variant(model_type, rng)),
    }
    if model_type in (
        "qwen2",
        "phi3",
        "cohere",
        "cohere2",
        "olmo2",
        "olmo3",
        "granite",
        "qwen2_moe",
        *OWN_HEAD_DIM,
    ):
        config = _own_head_dim(config)
    return {"model_type": model_type, **config}


VARIANTS = (
    "glm", "smollm3", "seed_oss", "ernie4_5", "ernie4_5_moe", "exaone4", "dots1", "olmoe", "ministral3",
    "hunyuan_v1_dense", "apertus", "phimoe", "granitemoehybrid",
)  # fmt: skip
"""What `variant` draws."""
READ_BY_TRANSFORMERS = (
    "llama", "arcee", "mistral", "ministral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "phi3", "gemma", "gemma2",
    "gemma3_text", "gemma4_text", "minicpm3", "bailing_hybrid",
    "cohere", "cohere2", "olmo2", "olmo3", "granite", "glm4", "glm4_moe", "minimax_m2", "gpt_oss", "llama4_text",
    "nemotron", "nemotron-nas", "deepseek_v2",
    "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa", "qwen2_moe", "qwen3_next", "qwen3_5_text",
    "qwen3_5_moe_text", "minimax", "nemotron_h", *VARIANTS,
)  # fmt: skip
