"""A head that is damaged, or another target's, is refused in one sentence that says what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from magicdec.errors import CheckpointError, ConfigError, MagicdecError
from magicdec.runtime.heads.builder import load_head
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import load_model
from magicdec.specs.speculation import DraftMethod
from tests.runtime.conftest import tiny_spec

FIXTURES = Path(__file__).parents[1] / "data" / "heads"


@pytest.fixture(scope="module")
def target() -> Transformer:
    return load_model(FIXTURES / "target")


def head_in(directory: Path, name: str = "eagle3") -> Path:
    return Path(shutil.copytree(FIXTURES / name, directory / name))


def change_weights(
    head: Path, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    weights = load_file(head / "model.safetensors")
    change(weights)
    save_file(weights, head / "model.safetensors")


def change_config(head: Path, **changes: Any) -> None:
    config = json.loads((head / "config.json").read_text())
    layers = config["transformer_layer_config"]
    for key, value in changes.items():
        (layers if key in layers else config)[key] = value
    (head / "config.json").write_text(json.dumps(config))


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        del weights[name]

    return change


def point_outside(weights: dict[str, torch.Tensor]) -> None:
    weights["d2t"][-1] = 1000


def point_twice(weights: dict[str, torch.Tensor]) -> None:
    weights["d2t"][1] = weights["d2t"][0] - 1


def forget_a_token(weights: dict[str, torch.Tensor]) -> None:
    weights["t2d"][:] = True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("fc.weight"), "no tensor fc.weight"),
        (drop("d2t"), "no tensor d2t"),
        (drop("layers.0.hidden_norm.weight"), "no tensor layers.0.hidden_norm.weight"),
        (
            lambda weights: weights.update(surplus=torch.zeros(2)),
            "tensor surplus has no place",
        ),
        (
            lambda weights: weights.update(d2t=torch.zeros(23, dtype=torch.long)),
            "d2t has shape",
        ),
        (point_outside, "d2t maps the head's token 23 to 1023, outside"),
        (point_twice, "maps two of the head's tokens to one"),
        (forget_a_token, "t2d and d2t disagree"),
    ],
)
def test_tensors_that_do_not_fit(
    change: Callable[[dict[str, torch.Tensor]], None],
    message: str,
    target: Transformer,
    tmp_path: Path,
) -> None:
    head = head_in(tmp_path)
    change_weights(head, change)
    with pytest.raises(CheckpointError, match=message):
        load_head(head, target)


@pytest.mark.parametrize("size", [0, 5, 4000])
def test_a_checkpoint_that_is_cut_short(
    size: int, target: Transformer, tmp_path: Path
) -> None:
    head = head_in(tmp_path)
    file = head / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        load_head(head, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 24}, "states of 24 numbers; those of target have 16"),
        ({"vocab_size": 50}, "vocabulary of 50; that of target has 40"),
        ({"draft_vocab_size": 41}, "exceeds the vocabulary of 40"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]},
            "target has 4: it is another target's",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "it is another target's"),
        ({"norm_before_fc": "yes"}, "norm_before_fc"),
        ({"something_new": 1}, "key 'something_new' is not known for a head"),
        (
            {"speculators_model_type": "medusa", "architectures": ["Medusa"]},
            "what head it is",
        ),
        ({"transformer_layer_config": 3}, "must be an object"),
    ],
)
def test_configurations_of_another_target_or_head(
    changes: dict[str, Any], message: str, target: Transformer, tmp_path: Path
) -> None:
    head = head_in(tmp_path)
    change_config(head, **changes)
    with pytest.raises(ConfigError, match=message):
        load_head(head, target)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dflash", {"block_size": 1}, "block_size of at least 2"),
        ("dflash", {"mask_token_id": 40}, "mask_token_id in the vocabulary of 40"),
        ("dflash", {"aux_hidden_state_layer_ids": None}, "names no layers"),
        ("p-eagle", {"mask_token_id": None}, "needs a mask_token_id"),
        ("mtp", {"num_nextn_predict_layers": 2}, "2 modules of multi-token prediction"),
    ],
)
def test_parallel_heads_and_modules_that_are_not_run(
    name: str,
    changes: dict[str, Any],
    message: str,
    target: Transformer,
    tmp_path: Path,
) -> None:
    head = head_in(tmp_path, name)
    change_config(head, **changes)
    with pytest.raises(ConfigError, match=message):
        load_head(head, target)


@pytest.mark.parametrize(
    ("place", "method", "message"),
    [
        ("missing", None, "no configuration of a head"),
        ("eagle3", "mtp", "is of a head of eagle3, not of mtp"),
        (None, None, "target has no module of multi-token prediction"),
    ],
)
def test_heads_that_are_not_there(
    place: str | None, method: DraftMethod | None, message: str, target: Transformer
) -> None:
    directory = None if place is None else FIXTURES / place
    with pytest.raises(MagicdecError, match=message):
        load_head(directory, target, method=method)


def test_a_head_for_a_target_of_fewer_layers() -> None:
    """Read from the states after three layers, where the target has two."""
    other = load_model(tiny_spec(hidden_size=16, vocab_size=40), weights="random")
    with pytest.raises(ConfigError, match="has 2: it is another target's"):
        load_head(FIXTURES / "eagle3", other)
