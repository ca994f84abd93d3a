"""Keys of configurations, changed one at a time (tests/runtime/flips.py): the same logits, or a refusal in one line;
and tensors that a configuration has no place for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from magicdec.errors import MagicdecError
from magicdec.runtime.engine import Engine
from magicdec.runtime.weights import load_model
from magicdec.specs.families import keys
from tests.runtime.families import FAMILIES, write_checkpoint
from tests.runtime.flips import NAMES, PROMPT, flips, outcome, outcomes
from tests.runtime.test_architectures import their_logits as logits_after_every_token
from tests.runtime.test_architectures import write
from tests.specs.architectures import draw

logging.disable_progress_bar()
logging.set_verbosity_error()


def their_logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0, -1]


def our_logits(directory: Path) -> torch.Tensor:
    engine = Engine(load_model(directory), batch_size=1, max_len=40)
    engine.prefill([PROMPT])
    return engine.forward(engine.pending_B[:, None])[0, -1]


def compared(directory: Path, expected: torch.Tensor) -> str:
    """Raises AssertionError where a checkpoint runs and gives other logits."""
    try:
        ours = our_logits(directory)
    except MagicdecError as refusal:
        return f"refused in {len(str(refusal).splitlines())} line: {refusal}"
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    return "equal"


def differing(name: str, sample: int | None) -> list[tuple[str, str]]:
    found = list(outcomes(name, sample=sample))
    assert any(each.kind == "equal" for _, each in found)
    return [(change, each.why) for change, each in found if each.kind == "different"]


def test_sampled_flips_of_every_sixth_architecture_are_equal_or_refused() -> None:
    names = NAMES[::6]
    assert {name: found for name in names if (found := differing(name, 2))} == {}


@pytest.mark.parametrize(
    "sample",
    [
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(60, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_flips_of_every_architecture_are_equal_or_refused(
    name: str, sample: int
) -> None:
    """A sample; `python -m tests.runtime.flips` tries all."""
    assert differing(name, sample) == []


FAULTS: dict[str, tuple[str, str, Any]] = {
    "another default": ("glm4_moe", "norm_topk_prob", ["bool", False]),
    "a null that means nothing": ("deepseek_v3", "rope_interleave", ["any", True]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_flips_find_a_planted_fault(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A default that is not transformers', and a null that is read as the default."""
    name, key, field = FAULTS[fault]
    every = {flip.change: flip.config for flip in flips(name, 0)}
    change = f"whole: {key} {'removed' if fault == 'another default' else 'null'}"
    assert outcome(every[change], tmp_path / "a").kind == "equal"
    monkeypatch.setitem(keys._known()[name]["fields"], key, field)
    if fault != "another default":
        monkeypatch.setattr(
            keys.Keys, "flag", lambda self, each: self.raw(each) is not False
        )
    assert outcome(every[change], tmp_path / "b").kind == "different"


BLOCKS = {
    ("attention", "no_op"): True, ("attention", "n_heads_in_group"): 1, ("attention", "replace_with_linear"): True,
    ("attention", "sparsify"): [1], ("attention", "window_length"): 4, ("attention", "num_sink_tokens"): 2,
    ("attention", "sliding"): 2, ("ffn", "no_op"): True, ("ffn", "ffn_mult"): 13.0,
    ("ffn", "replace_with_linear"): True, ("ffn", "hidden_act"): "gelu",
}  # fmt: skip
"""Fields of a block of DeciLM, and another value; those that the test's module does not know have to be refused."""
UNDERSTOOD = ("no_op", "n_heads_in_group", "ffn_mult")


@pytest.mark.parametrize(("part", "name"), BLOCKS)
def test_each_field_of_a_block_of_its_own(part: str, name: str, tmp_path: Path) -> None:
    config = draw("nemotron-nas", 2)
    block = next(
        each
        for each in config["block_configs"]
        if not each["attention"]["no_op"] and not each["ffn"]["no_op"]
    )
    assert block[part].get(name) != BLOCKS[part, name]
    block[part][name] = BLOCKS[part, name]
    expected = logits_after_every_token(write(tmp_path, config, seed=1), PROMPT)[-1]
    found = compared(tmp_path, expected)
    assert (
        found == "equal"
        if name in UNDERSTOOD
        else found.startswith("refused in 1 line")
    )


@pytest.fixture
def directory(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints["llama-mha"], tmp_path / "copy"))


def test_one_rope_beside_those_of_kinds_of_layers_is_refused(directory: Path) -> None:
    """transformers reads the first in some architectures, and the others in others."""
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"] |= {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6}
    }
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        MagicdecError,
        match="an entry for full_attention layers, but this architecture has one rope for all",
    ):
        load_model(directory)


def altered(directory: Path, **tensors: torch.Tensor) -> Path:
    """The checkpoint with these tensors added or replaced; dots in names are written as two underscores."""
    file = directory / "model.safetensors"
    save_file(
        {**load_file(file), **{k.replace("__", "."): v for k, v in tensors.items()}},
        file,
        {"format": "pt"},
    )
    return directory


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model__layers__0__self_attn__q_proj__bias", torch.ones(48)),
        ("model__layers__0__mlp__down_proj__weight_scale", torch.ones(1)),
        ("model__layers__1__self_attn__sinks", torch.ones(6)),
    ],
)
def test_a_tensor_without_a_place_is_refused_by_name(
    name: str, tensor: torch.Tensor, directory: Path
) -> None:
    altered(directory, **{name: tensor})
    with pytest.raises(MagicdecError, match=name.replace("__", r"\.")):
        load_model(directory)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_not_floating_point_are_refused(
    dtype: torch.dtype, directory: Path
) -> None:
    altered(
        directory, model__layers__0__mlp__up_proj__weight=torch.ones(80, 48).to(dtype)
    )
    with pytest.raises(MagicdecError, match="calls for F64 or F32 or F16 or BF16"):
        load_model(directory)


def test_a_stray_file_beside_the_model_is_not_read(directory: Path) -> None:
    expected = our_logits(directory)
    other = {
        name: torch.zeros_like(value)
        for name, value in load_file(directory / "model.safetensors").items()
    }
    save_file(other, directory / "zz-adapter.safetensors", {"format": "pt"})
    torch.testing.assert_close(our_logits(directory), expected)


def test_a_tied_head_that_differs_from_the_stored_one_is_refused(
    tmp_path: Path,
) -> None:
    directory = write_checkpoint(tmp_path / "a", FAMILIES["llama-gqa-tied"])
    altered(
        directory,
        lm_head__weight=load_file(directory / "model.safetensors")[
            "model.embed_tokens.weight"
        ].clone(),
    )
    load_model(directory)
    altered(directory, lm_head__weight=torch.zeros(96, 48))
    with pytest.raises(MagicdecError, match="lm_head"):
        load_model(directory)
