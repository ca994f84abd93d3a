"""Holds the catalog's configurations that come from litgpt against it, or writes them anew.

    python scripts/litgpt_models.py litgpt/config.py          # exits with 1 where sizes differ
    python scripts/litgpt_models.py litgpt/config.py --write  # writes those that are missing

`litgpt/config.py` is a file of the package litgpt (0.5.13). What it does not have (tied heads, the
vocabulary's padding in Gemma 3) stands in `OTHERWISE`, each with where it was read instead.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from magicdec.specs.catalog import MODELS_DIRECTORY, load_model_spec
from magicdec.specs.hf_config import model_from_hf_config
from magicdec.specs.names import NamedModel, named_models

OTHERWISE: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "tie_word_embeddings": True
    },  # megatron-bridge 0.3.1, as the next two
    "qwen2.5-1.5b": {"tie_word_embeddings": True},
    "qwen2.5-3b": {"tie_word_embeddings": True},
    "smollm2-135m": {"tie_word_embeddings": True},  # mlc-llm's presets, as the next two
    "smollm2-360m": {"tie_word_embeddings": True},
    "smollm2-1.7b": {"tie_word_embeddings": True},
    "gemma-3-4b": {"vocab_size": 262_208},  # megatron-bridge 0.3.1, as the next
    "gemma-3-12b": {"vocab_size": 262_208},
    "gemma-7b": {"max_position_embeddings": 8192},  # as gemma-2b's in mlc-llm's presets
    "codellama-13b": {"max_position_embeddings": 16_384},  # mlc-llm's presets
    "mistral-large-2407": {"max_position_embeddings": 131_072},  # genz-llm 0.0.16
}
TYPES = {
    "gemma-3": "gemma3_text",
    "gemma-2-": "gemma2",
    "gemma": "gemma",
    "codegemma": "gemma",
    "olmo-2": "olmo2",
    "phi": "phi3",
    "mathstral": "mistral",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
"""model_type by the beginning of a name; all others are `llama`."""


def model_type(name: str) -> str:
    return next(
        (kind for start, kind in TYPES.items() if name.startswith(start)), "llama"
    )


def hf_config(theirs: Any, name: str) -> dict[str, Any]:
    """litgpt's configuration as a config.json."""
    kind = model_type(name)
    config = {
        "model_type": kind,
        "hidden_size": theirs.n_embd,
        "intermediate_size": theirs.intermediate_size,
        "num_hidden_layers": theirs.n_layer,
        "num_attention_heads": theirs.n_head,
        "num_key_value_heads": theirs.n_query_groups,
        "vocab_size": theirs.padded_vocab_size,
        "max_position_embeddings": theirs.block_size,
        "rms_norm_eps": theirs.norm_eps,
        "rope_theta": float(theirs.rope_base),
    }
    if theirs.head_size * theirs.n_head != theirs.n_embd or kind.startswith("gemma"):
        config["head_dim"] = theirs.head_size
    if kind == "gemma3_text":
        config["query_pre_attn_scalar"] = theirs.attention_scores_scalar
        config["rope_local_base_freq"] = theirs.rope_local_base_freq
        config["sliding_window"] = theirs.sliding_window_size
    if kind == "mistral":
        config["sliding_window"] = None
    if theirs.rope_adjustments is not None:
        scaling = dict(theirs.rope_adjustments)
        if "original_max_seq_len" in scaling:
            scaling["original_max_position_embeddings"] = scaling.pop(
                "original_max_seq_len"
            )
            config["rope_scaling"] = {"rope_type": "llama3", **scaling}
        else:
            config["rope_scaling"] = {"rope_type": "linear", **scaling}
    return config | OTHERWISE.get(name, {})


def litgpt_configs(path: Path) -> dict[str, Any]:
    """litgpt's configurations by the checkpoint that they name."""
    spec = importlib.util.spec_from_file_location("litgpt_config", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["litgpt_config"] = module
    spec.loader.exec_module(module)
    found = {}
    for values in module.configs:
        if values.get("mlp_class_name") != "LLaMAMoE":
            repository = f"{values['hf_config']['org']}/{values['hf_config']['name']}"
            found[repository.lower()] = module.Config(**values)
    return found


def differences(name: str, row: NamedModel, theirs: Any) -> list[str]:
    """What of a model's decoder is not what litgpt says."""
    ours = load_model_spec(name)
    config = hf_config(theirs, row.shape or name)
    config["tie_word_embeddings"] = ours.tie_word_embeddings  # litgpt does not say
    expected = model_from_hf_config(config, name=name, where=name)
    keys = ("hidden_size", "vocab_size", "num_parameters", "max_position_embeddings")
    return [
        f"{name}: {key} {getattr(ours, key)}, litgpt {getattr(expected, key)}"
        for key in keys
        if getattr(ours, key) != getattr(expected, key)
    ]


def main() -> int:
    theirs = litgpt_configs(Path(sys.argv[1]))
    found = []
    count = 0
    for name, row in named_models().items():
        if row.source != "litgpt" or row.checkpoints[0].lower() not in theirs:
            continue
        own = theirs[row.checkpoints[0].lower()]
        path = MODELS_DIRECTORY / f"{name}.json"
        if "--write" in sys.argv and row.shape is None and not path.exists():
            path.write_text(json.dumps(hf_config(own, name), indent=1) + "\n")
        count += 1
        found += differences(name, row, own)
    print("\n".join([*found, f"{count} models, {len(found)} differences"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
