"""DeepSeek, and those that follow its latent attention or its experts: Kimi, GLM, dots.1."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from magicdec.specs.families import parts
from magicdec.specs.families.keys import Keys
from magicdec.specs.families.parts import Architecture, GroupedQuery, biased, num_layers
from magicdec.specs.layers import Layer, MixtureOfExperts
from magicdec.specs.mixers import Attention, Indexer, LatentAttention
from magicdec.specs.model import Norm, TensorNames


def v2_latent(keys: Keys, kind: str) -> LatentAttention:
    """DeepSeek-V2's code rotates complex numbers, which stand behind an even number of
    dimensions."""
    for key in ("qk_nope_head_dim", "kv_lora_rank"):
        if keys.size(key) % 2:
            raise keys.error(key, "even", keys.size(key))
    return parts.latent(keys)


def v2_experts(keys: Keys) -> MixtureOfExperts:
    greedy = keys.choice(
        "topk_method", choices={"greedy": True, "group_limited_greedy": False}
    )
    changes: dict[str, Any]
    if greedy:
        changes = {"num_groups": 1, "num_chosen_groups": 1}
    else:
        changes = {"group_score": "max"}
    keys.ignore("norm_topk_prob", "n_group", "topk_group")
    return parts.deepseek_experts(keys, scoring="softmax", normalized=False, **changes)


INDEXING = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}


def indexed(keys: Keys, index: int) -> LatentAttention:
    """Latent attention over the tokens that an indexer chooses; some layers may take an earlier
    layer's choice.
    """
    count = num_layers(keys)
    parts.listed_kinds(keys, lambda i: "indexed_attention")
    types = keys.per_layer(
        "indexer_types",
        count,
        lambda entry: entry in ("full", "shared"),
        "full, shared",
    )
    keys.ignore("indexer_rope_interleave")
    if types is None:
        types = indexer_types(keys, count)
    else:  # older spellings of the same
        keys.ignore("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")
    indexer = Indexer(
        num_heads=keys.size("index_n_heads"),
        head_dim=keys.size("index_head_dim"),
        top_k=keys.size("index_topk"),
        is_shared=types[index] == "shared",
    )
    return msgspec.structs.replace(parts.latent(keys), indexer=indexer)


def indexer_types(keys: Keys, count: int) -> list[str]:
    """ "full" for layers that choose tokens, "shared" for layers that reuse an earlier choice, as
    older files state them. In DeepSeek's models all layers choose."""
    if not keys.knows("indexer_types"):
        return ["full"] * count
    pattern = keys.raw("index_topk_pattern", default=None)
    frequency = keys.size("index_topk_freq")
    offset = keys.size("index_skip_topk_offset", least=0)
    if pattern is None:
        return [
            "shared" if max(i - offset + 1, 0) % frequency else "full"
            for i in range(count)
        ]
    if (
        not isinstance(pattern, str | list)
        or len(pattern) != count
        or not all(entry in INDEXING for entry in pattern)
    ):
        raise keys.error(
            "index_topk_pattern", f"{count} of {', '.join(INDEXING)}", pattern
        )
    return [INDEXING[entry] for entry in pattern]


def glm4_moe_attention(keys: Keys, kind: str) -> Attention:
    norm: Any = "none"
    if keys.flag("use_qk_norm"):
        norm = "head"
    return GroupedQuery(bias="attention_bias", qk_norm=norm, partial=True)(keys, kind)


DOTS1_EXPERTS = partial(parts.deepseek_experts, scoring_names=("sigmoid", "noaux_tc"))
"""DeepSeek-V3's, by scores that the files of dots.1 call noaux_tc and that are sigmoids."""
V3 = Architecture(
    mixer=parts.latent,
    mlp=parts.leading_dense,
    fixed={"topk_method": ("noaux_tc",), "mlp_bias": (False,)},
    mtp_key="num_nextn_predict_layers",
)
SPARSE = Architecture(
    whole=lambda keys: [
        Layer(mixer=indexed(keys, i), mlp=parts.leading_dense(keys, i))
        for i in range(num_layers(keys))
    ],
    fixed={"topk_method": ("noaux_tc",), "mlp_bias": (False,)},
    ignored="index_share_for_mtp_iteration",
    mtp_key="num_nextn_predict_layers",
)
GLM_ATTENTION = GroupedQuery(bias="attention_bias", partial=True, pairs="adjacent")

ROWS = {
    "deepseek_v2": Architecture(
        mixer=v2_latent,
        mlp=partial(parts.leading_dense, mixture=v2_experts),
        fixed={"mlp_bias": (False,)},
    ),
    "deepseek_v3": V3,
    "kimi_k2": V3,
    "glm4_moe_lite": V3,
    "deepseek_v32": SPARSE,
    "glm_moe_dsa": SPARSE,
    "glm": Architecture(mixer=GLM_ATTENTION, names=TensorNames(fused_gate_up=True)),
    "glm4": Architecture(
        mixer=GLM_ATTENTION,
        norm=Norm(placement="around"),
        names=TensorNames(
            fused_gate_up=True,
            norms=(
                "input_layernorm",
                "post_self_attn_layernorm",
                "post_attention_layernorm",
                "post_mlp_layernorm",
            ),
        ),
    ),
    "glm4_moe": Architecture(
        mixer=glm4_moe_attention,
        mlp=parts.leading_dense,
        mtp_key="num_nextn_predict_layers",
    ),
    "dots1": Architecture(
        mixer=biased(qk_norm="head"),
        mlp=partial(parts.leading_dense, mixture=DOTS1_EXPERTS),
        kinds=lambda keys: parts.windows_from(
            keys, keys.optional_size("sliding_window")
        ),
        ignored="use_sliding_window",
    ),
}
