"""Reads the configuration of an unknown architecture by its fields, where they follow the usual
ones, as the known architecture with the same parts.

Parts decide time: attention's heads (or its latent), the windows of layers, dense layers and experts. What
no field of the known one says (norms, scales, gates of a few numbers a token) is left out, and every key
that is not read is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from magicdec.specs.families.keys import IRRELEVANT, is_whole

NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "num_key_value_heads": (
        "num_key_value_heads",
        "num_kv_heads",
        "n_kv_heads",
        "num_query_groups",
        "multi_query_group_num",
    ),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "n_inner"),
    "max_position_embeddings": (
        "max_position_embeddings",
        "model_max_length",
        "max_sequence_length",
        "seq_length",
        "n_positions",
    ),
    "rms_norm_eps": ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layernorm_epsilon"),
    "tie_word_embeddings": ("tie_word_embeddings",),
    "rope_theta": ("rope_theta",),
}
EXPERTS: Mapping[str, tuple[str, ...]] = {
    "n_routed_experts": (
        "n_routed_experts",
        "num_experts",
        "num_local_experts",
        "moe_num_experts",
    ),
    "num_experts_per_tok": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "moe_top_k",
        "moe_topk",
        "top_k_experts",
        "moe_k",
    ),
    "moe_intermediate_size": (
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "expert_intermediate_size",
        "moe_ffn_hidden_size",
    ),
    "n_shared_experts": (
        "n_shared_experts",
        "num_shared_experts",
        "moe_num_shared_experts",
    ),
    "first_k_dense_replace": (
        "first_k_dense_replace",
        "num_dense_layers",
        "moe_layer_start_index",
        "n_dense_layers",
    ),
    "num_nextn_predict_layers": ("num_nextn_predict_layers", "num_mtp_layers"),
}
LATENT: Mapping[str, tuple[str, ...]] = {
    name: (name,)
    for name in (
        "kv_lora_rank",
        "q_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
    )
}
WINDOWS: Mapping[str, tuple[str, ...]] = {
    "layer_types": ("layer_types",),
    "sliding_window": ("sliding_window", "window_size"),
}
KINDS = frozenset(("full_attention", "sliding_attention"))
KEPT = ("quantization_config", "eos_token_id")
OTHER_MIXERS = (
    "mamba",
    "ssm",
    "linear_attn",
    "linear_num",
    "linear_key",
    "conv_kernel",
    "conv_bias",
    "rwkv",
    "recurrent",
    "lightning",
    "zero_expert",
    "compress",
    "sparse_attention",
    "index_",
    "hc_",
    "ngram_vocab",
    "retention",
)
"""Parts of keys that belong to layers of another kind, whose time no usual field tells."""
SHOWN = 12


class Usual(NamedTuple):
    """A configuration as one of a known architecture."""

    model_type: str
    values: dict[str, Any]
    assumed: str
    """A sentence that says what it was taken for."""


def usual(values: Mapping[str, Any]) -> Usual | None:
    """The configuration in the fields of a known architecture; None: its fields are not the usual
    ones."""
    told = _found(values, SPELLINGS)
    experts = _found(values, EXPERTS)
    latent = _found(values, LATENT)
    windows = _found(values, WINDOWS)
    if any(not is_whole(told.get(name)) for name in NEEDED):
        return None
    if not KINDS.issuperset(windows.get("layer_types") or ()):
        return None
    for name, value in values.items():
        if value is not None and any(part in name for part in OTHER_MIXERS):
            return None
    if values.get("use_sliding_window") is False:
        windows.pop("sliding_window", None)
    is_sparse = (experts.get("n_routed_experts") or 0) > 1
    told.setdefault("max_position_embeddings", 131072)
    said = "grouped-query attention"
    if "kv_lora_rank" in latent:
        model_type = "deepseek_v3"
        said = "latent attention (MLA)"
        told |= {"q_lora_rank": None, **latent}
        told["num_key_value_heads"] = told["num_attention_heads"]
        told.pop("head_dim", None)
        if not is_sparse:
            told["first_k_dense_replace"] = told["num_hidden_layers"]
            heads = experts.get("num_nextn_predict_layers", 0)
            told["num_nextn_predict_layers"] = heads
    else:
        heads = told["num_attention_heads"]
        told.setdefault("num_key_value_heads", heads)
        told["head_dim"] = told.get("head_dim") or max(told["hidden_size"] // heads, 1)
        model_type = "llama"
        if is_sparse:
            model_type = "glm4_moe"
        elif windows.get("layer_types") or windows.get("sliding_window"):
            model_type = "qwen3"
            told |= windows | {"use_sliding_window": True}
    if is_sparse:
        # without groups, chosen by their scores
        told |= {
            "num_experts_per_tok": 2,
            "moe_intermediate_size": told.get("intermediate_size"),
            "n_shared_experts": 0,
            "first_k_dense_replace": 0,
            "num_nextn_predict_layers": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            **experts,
        }
        said += f", {told['num_experts_per_tok']} of {told['n_routed_experts']} experts"
    if model_type == "qwen3":
        said += f", windows of {windows.get('sliding_window')} tokens"
    if not is_whole(told.get("intermediate_size")):
        if not is_sparse:
            return None
        told["intermediate_size"] = told["moe_intermediate_size"]
    read = {*IRRELEVANT, *KEPT}.union(*SPELLINGS.values())
    for found, spellings in ((windows, WINDOWS), (latent, LATENT), (experts, EXPERTS)):
        read.update(*(spellings[name] for name in found))
    for name in KEPT:
        if values.get(name) is not None:
            told[name] = values[name]
    unread = [
        name for name, value in values.items() if name not in read and value is not None
    ]
    return Usual(model_type, told, _sentence(values, said, unread))


def _found(
    values: Mapping[str, Any], spellings: Mapping[str, tuple[str, ...]]
) -> dict[str, Any]:
    """The values that are there, by our names."""
    found = {}
    for name, others in spellings.items():
        for other in others:
            if values.get(other) is not None:
                found[name] = values[other]
                break
    return found


def _sentence(values: Mapping[str, Any], said: str, unread: list[str]) -> str:
    kind = str(values.get("model_type"))[:60]
    text = (
        f"model_type '{kind}' is not known: planned by its fields, {said}; its norms, gates and scales "
        "are taken for the usual ones"
    )
    if unread:
        shown = ", ".join(name[:40] for name in unread[:SHOWN])
        more = len(unread) - SHOWN
        text += f"; not read: {shown}"
        if more > 0:
            text += f" and {more} more"
    return text
