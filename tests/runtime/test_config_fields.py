"""Every field of transformers' own configurations, changed one at a time: the same logits, or a refusal in one line.

pytest -s tests/runtime/test_config_fields.py -k each_field     # prints each field, the value, and what came of it
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging

from magicdec.errors import MagicdecError
from magicdec.runtime.engine import Engine
from magicdec.runtime.weights import load_model
from tests.runtime.conftest import FAMILIES, write_checkpoint
from tests.runtime.test_architectures import RUN, drawn, write
from tests.runtime.test_architectures import their_logits as logits_after_every_token
from tests.specs.architectures import draw
from tests.specs.test_oracle import their_model

logging.disable_progress_bar()
logging.set_verbosity_error()
ARCHITECTURES = ("llama-gqa-tied", "mistral-window", "qwen2", "qwen3")
PROMPT = torch.randint(1, 90, (24,), generator=torch.Generator().manual_seed(1)).tolist()
OTHER_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu", "relu"),
    "layer_types": (
        ["sliding_attention", "full_attention", "full_attention"],
        ["full_attention", "chunked_attention", "full_attention", "chunked_attention"],
    ),
    "no_rope_layers": ([], [1, 0, 0, 1, 1]),
    "moe_layers": ([], [1]),
    "rope_parameters": (
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    ),
    "sliding_window": (6, None),
    "max_window_layers": (1,),
    "rms_norm_eps": (0.1,),
    "head_dim": (16,),
    "num_key_value_heads": (1, 6),
    "per_layer_config": (),
    "dtype": ("bfloat16",),
}
"""What is tried of fields whose type does not say it."""
SKIPPED = {"architectures", "return_dict", "transformers_version", "id2label", "label2id", "problem_type", "model_type"}
"""Fields of files and software, and those of classifiers."""


def changes(config: PreTrainedConfig) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in config.to_dict().items():
        if name in SKIPPED:
            continue
        if name in OTHER_VALUES:
            found += [(name, deepcopy(each)) for each in OTHER_VALUES[name] if each != value]  # they are written to
        elif isinstance(value, bool):
            found.append((name, not value))
        elif isinstance(value, int):
            found.append((name, value * 2))
        elif isinstance(value, float):
            found.append((name, value + 0.25))
        elif value is None:
            found.append((name, 1))
    return found


def their_logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0, -1]


def our_logits(directory: Path) -> torch.Tensor:
    engine = Engine(load_model(directory), batch_size=1, max_len=40)
    engine.prefill([PROMPT])
    return engine.forward(engine.pending_B[:, None])[0, -1]


def outcome(directory: Path, expected: torch.Tensor, *, tolerance: float = 1e-4) -> str:
    """Raises AssertionError where a checkpoint runs and gives other logits."""
    try:
        ours = our_logits(directory)
    except MagicdecError as refusal:
        text = str(refusal).replace(str(directory), "")
        return f"refused in {len(text.splitlines())} line: {text}"
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)
    return "equal"


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_each_field_changed_gives_the_same_logits_or_a_refusal(family: str, tmp_path: Path) -> None:
    base, outcomes = FAMILIES[family], []
    for index, (name, value) in enumerate(changes(base)):
        try:
            config = type(base)(**{**base.to_dict(), name: value})
            directory = write_checkpoint(tmp_path / str(index), config)
            expected = their_logits(directory)
        except Exception as refusal:
            print(f"\n{family:16} {name} = {value!r:.60}: no model of transformers ({type(refusal).__name__})", end="")
            continue
        outcomes.append(outcome(directory, expected))
        print(f"\n{family:16} {name} = {value!r:.60}: {outcomes[-1]:.150}", end="")
    assert {each.partition(":")[0] for each in outcomes} == {"equal", "refused in 1 line"}
    assert outcomes.count("equal") >= 15


@pytest.mark.slow
@pytest.mark.parametrize("model_type", RUN)
def test_each_field_of_every_architecture_that_runs(model_type: str, tmp_path: Path) -> None:
    """The same of drawn configurations, against the module that wrote the checkpoint."""
    base, outcomes = their_model(drawn(model_type, 0)).config, []
    for index, (name, value) in enumerate(changes(base)):
        directory = tmp_path / str(index)
        try:
            model = write(directory, deepcopy({**base.to_dict(), name: value}), seed=0)
            expected = logits_after_every_token(model, PROMPT)[-1]
        except Exception:
            continue
        if name == "dtype":  # the module was made in it, and its constants rounded
            continue
        outcomes.append(outcome(directory, expected, tolerance=1e-3))
        print(f"\n{model_type:16} {name} = {value!r:.60}: {outcomes[-1]:.150}", end="")
    assert {each.partition(":")[0] for each in outcomes} <= {"equal", "refused in 1 line"}
    assert outcomes.count("equal") >= 15


BLOCKS = {
    ("attention", "no_op"): True,
    ("attention", "n_heads_in_group"): 2,
    ("attention", "replace_with_linear"): True,
    ("attention", "sparsify"): [1],
    ("attention", "window_length"): 4,
    ("attention", "num_sink_tokens"): 2,
    ("attention", "sliding"): 2,
    ("ffn", "no_op"): True,
    ("ffn", "ffn_mult"): 13.0,
    ("ffn", "replace_with_linear"): True,
    ("ffn", "hidden_act"): "gelu",
}
"""Fields of a block of DeciLM, and another value; those that the test's module does not know have to be refused."""
UNDERSTOOD = ("no_op", "n_heads_in_group", "ffn_mult")


@pytest.mark.parametrize(("part", "name"), BLOCKS)
def test_each_field_of_a_block_of_its_own(part: str, name: str, tmp_path: Path) -> None:
    config = draw("nemotron-nas", 2)
    block = next(
        each for each in config["block_configs"] if not each["attention"]["no_op"] and not each["ffn"]["no_op"]
    )
    assert block[part].get(name) != BLOCKS[part, name]
    block[part][name] = BLOCKS[part, name]
    expected = logits_after_every_token(write(tmp_path, config, seed=1), PROMPT)[-1]
    found = outcome(tmp_path, expected)
    assert found == "equal" if name in UNDERSTOOD else found.startswith("refused in 1 line")


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_windows_from_some_layer_on_are_where_transformers_has_them(family: str, first: int, tmp_path: Path) -> None:
    given = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": first, "layer_types": None}
    config = type(FAMILIES[family])(**{**FAMILIES[family].to_dict(), **given})
    directory = write_checkpoint(tmp_path / "a", config)
    assert outcome(directory, their_logits(directory)) == "equal"


def test_one_rope_beside_those_of_kinds_of_layers_is_refused(tmp_path: Path) -> None:
    """transformers reads the first in some architectures, and the others in others."""
    directory = write_checkpoint(tmp_path / "a", FAMILIES["llama-mha"])
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"] |= {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(MagicdecError, match="for all layers beside those of full_attention layers"):
        load_model(directory)


def altered(directory: Path, **tensors: torch.Tensor) -> Path:
    """The checkpoint with these tensors added or replaced; dots in names are written as two underscores."""
    file = directory / "model.safetensors"
    save_file({**load_file(file), **{k.replace("__", "."): v for k, v in tensors.items()}}, file, {"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model__layers__0__self_attn__q_proj__bias", torch.ones(48)),
        ("model__layers__0__mlp__down_proj__weight_scale", torch.ones(1)),
        ("model__layers__1__self_attn__sinks", torch.ones(6)),
    ],
)
def test_a_tensor_without_a_place_is_refused_by_name(name: str, tensor: torch.Tensor, tmp_path: Path) -> None:
    directory = altered(write_checkpoint(tmp_path / "a", FAMILIES["llama-mha"]), **{name: tensor})
    with pytest.raises(MagicdecError, match=name.replace("__", r"\.")):
        load_model(directory)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_not_floating_point_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    weight = torch.ones(80, 48).to(dtype)
    directory = write_checkpoint(tmp_path / "a", FAMILIES["llama-mha"])
    altered(directory, model__layers__0__mlp__up_proj__weight=weight)
    with pytest.raises(MagicdecError, match="calls for F64 or F32 or F16 or BF16"):
        load_model(directory)


def test_a_stray_file_beside_the_model_is_not_read(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "a", FAMILIES["llama-mha"])
    expected = our_logits(directory)
    other = {name: torch.zeros_like(value) for name, value in load_file(directory / "model.safetensors").items()}
    save_file(other, directory / "zz-adapter.safetensors", {"format": "pt"})
    torch.testing.assert_close(our_logits(directory), expected)


def test_a_tied_head_that_differs_from_the_stored_one_is_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "a", FAMILIES["llama-gqa-tied"])
    altered(directory, lm_head__weight=load_file(directory / "model.safetensors")["model.embed_tokens.weight"].clone())
    load_model(directory)
    altered(directory, lm_head__weight=torch.zeros(96, 48))
    with pytest.raises(MagicdecError, match="lm_head"):
        load_model(directory)
