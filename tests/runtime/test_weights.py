"""Checkpoints that cannot be used are refused in one line; those in several files are read like those in one."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import magicdec
from magicdec.errors import CheckpointError, ConfigError
from magicdec.runtime.distributed import TensorParallel
from magicdec.runtime.engine import Engine
from magicdec.runtime.weights import load_model, local_model
from magicdec.specs.catalog import EMBEDDED_DIRECTORY
from tests.runtime.conftest import tiny_spec
from tests.runtime.families import FAMILIES, write_checkpoint

WEIGHTS = "model.safetensors"


@pytest.fixture
def checkpoint(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints["llama-mha"], tmp_path / "copy"))


def next_logits(directory: Path) -> torch.Tensor:
    engine = Engine(load_model(directory), batch_size=1, max_len=16)
    engine.prefill([[1, 2, 3, 4]])
    return engine.forward(engine.pending_B[:, None])


def test_several_files_are_read_like_one_and_a_missing_one_is_named(
    tmp_path: Path,
) -> None:
    """The same model saved in one file and in many gives the same logits."""
    whole = write_checkpoint(tmp_path / "whole", FAMILIES["qwen3"])
    parts = write_checkpoint(
        tmp_path / "parts", FAMILIES["qwen3"], max_shard_size="20KB"
    )
    files = sorted(parts.glob("*.safetensors"))
    assert len(files) > 2
    assert torch.equal(next_logits(parts), next_logits(whole))
    files[1].unlink()
    with pytest.raises(CheckpointError, match=files[1].name):
        load_model(parts)


def test_a_half_precision_checkpoint_computes_in_single(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / WEIGHTS)
    save_file(
        {name: tensor.half() for name, tensor in tensors.items()}, checkpoint / WEIGHTS
    )
    logits = next_logits(checkpoint)
    assert logits.dtype == torch.float32
    rounded = {name: tensor.half().float() for name, tensor in tensors.items()}
    save_file(rounded, checkpoint / WEIGHTS)
    assert torch.equal(next_logits(checkpoint), logits)


def without(checkpoint: Path, tensor: str) -> None:
    tensors = load_file(checkpoint / WEIGHTS)
    del tensors[tensor]
    save_file(tensors, checkpoint / WEIGHTS)


def widened(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(
        json.dumps(config | {"intermediate_size": 84})
    )


UP = "model.layers.1.mlp.up_proj.weight"
UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor missing": (
        lambda directory: without(directory, UP),
        f"no tensor {re.escape(UP)}",
    ),
    "another shape": (widened, r"gate_proj\.weight has shape \[80, 48\].*\[84, 48\]"),
    "nothing there": (
        lambda directory: (directory / WEIGHTS).unlink(),
        r"holds no \*.safetensors file",
    ),
    "pickled": (
        lambda directory: (directory / WEIGHTS).rename(directory / "pytorch_model.bin"),
        "never loaded",
    ),
} | {
    f"cut at {size}": (
        lambda directory, size=size: (directory / WEIGHTS).write_bytes(
            (directory / WEIGHTS).read_bytes()[:size]
        ),
        "not a readable safetensors file",
    )
    for size in (0, 7, 500)
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_checkpoint_that_cannot_be_used_says_what_is_wrong(
    case: str, checkpoint: Path
) -> None:
    spoil, message = UNUSABLE[case]
    spoil(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        load_model(checkpoint)


class Trap:
    """Unpickled, it writes a file."""

    def __init__(self, written: Path) -> None:
        self._written = written

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, (f"open({str(self._written)!r}, 'w')",)


@pytest.mark.parametrize("beside", ["alone", "with weights", "in the index"])
def test_nothing_of_a_checkpoint_is_executed(
    beside: str, checkpoint: Path, tmp_path: Path
) -> None:
    """Pickles of every usual name, and a model and a tokenizer of the checkpoint's own code, which its config names."""
    from magicdec.runtime.prompts import load_tokenizer

    written = tmp_path / "written"
    for name in (
        "pytorch_model.bin",
        "consolidated.00.pth",
        "model.pt",
        "training_args.bin",
    ):
        (checkpoint / name).write_bytes(
            pickle.dumps({"model.norm.weight": Trap(written)})
        )
    for name in (
        "modeling_own.py",
        "tokenization_own.py",
        "configuration_own.py",
        "__init__.py",
    ):
        (checkpoint / name).write_text(f"open({str(written)!r}, 'w')")
    own = {
        "AutoConfig": "configuration_own.Own",
        "AutoModelForCausalLM": "modeling_own.Own",
    }
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"auto_map": own}))
    tokenizer = {
        "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]},
        "tokenizer_class": "Own",
    }
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    shutil.copy(EMBEDDED_DIRECTORY / "tokenizer.json", checkpoint)
    load_tokenizer(checkpoint, vocab_size=2048)
    if beside == "with weights":
        load_model(checkpoint)
    else:
        (checkpoint / WEIGHTS).unlink()
        if beside == "in the index":
            index = {"weight_map": {"model.norm.weight": "pytorch_model.bin"}}
            (checkpoint / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
        with pytest.raises(
            CheckpointError, match=r"never loaded|not a readable safetensors file"
        ):
            load_model(checkpoint)
    assert not written.exists()
    pickle.loads(pickle.dumps(Trap(written)))  # a trap it is
    assert written.exists()


def test_no_code_of_others_is_asked_for() -> None:
    """`trust_remote_code` stands nowhere, and nothing of torch unpickles weights."""
    for file in Path(magicdec.__file__).parent.rglob("*.py"):
        assert not re.search(
            r"trust_remote_code|torch\.load\(|weights_only", file.read_text()
        ), file


def test_a_catalog_model_without_weights_says_what_to_give() -> None:
    with pytest.raises(
        CheckpointError, match="checkpoint directory, or random weights"
    ):
        load_model("llama-68m")


def test_random_weights_repeat_and_are_divided_consistently() -> None:
    """The shards' rows, put together, are the whole model's."""
    whole = load_model(tiny_spec(), weights="random", seed=1)
    again = load_model(tiny_spec(), weights="random", seed=1)
    assert torch.equal(whole.head.weight, again.head.weight)
    shards = [
        load_model(
            tiny_spec(), weights="random", seed=1, tp=TensorParallel(rank=r, size=2)
        )
        for r in range(2)
    ]
    assert torch.equal(torch.cat([s.head.weight for s in shards]), whole.head.weight)
    down = torch.cat([s.layers[0].mlp.down.weight for s in shards], dim=1)
    assert torch.equal(down, whole.layers[0].mlp.down.weight)


@pytest.mark.skipif(
    not (EMBEDDED_DIRECTORY / WEIGHTS).is_file(),
    reason="the embedded model is not there",
)
def test_the_embedded_model_predicts_source_text() -> None:
    """On a piece of Python its next-token loss is far below that of a uniform guess."""
    from magicdec.runtime.prompts import load_tokenizer

    tokenizer = load_tokenizer(EMBEDDED_DIRECTORY, vocab_size=2048)
    ids = tokenizer.encode(Path(json.__file__).read_text()).ids[:400]
    engine = Engine(load_model("embedded"), batch_size=1, max_len=512)
    engine.prefill([ids[:1]])
    logits = engine.forward(torch.tensor([ids[:-1]]))[0]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))
    assert loss < 4.0  # uniform: 7.6


def test_a_hub_name_that_cannot_be_fetched_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a network (the hub's client in its offline mode) the error names the model; paths are left alone."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError, match="nobody/nothing is neither in the catalog nor in the"
    ):
        load_model("nobody/nothing")
    assert local_model("embedded", with_weights=True) == "embedded"
