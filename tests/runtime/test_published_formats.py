"""Checkpoints that libraries quantised run as the weights that their own code widens them to.

tests/data/quantized holds a tiny model for each format, written by scripts/quantized_fixtures.py: packed by gptqmodel,
compressed-tensors and vLLM, with transformers' logits of the matrices that these libraries read back.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from magicdec.cli import main
from magicdec.errors import CheckpointError, ConfigError
from magicdec.perfmodel.footprint import weights_bytes
from magicdec.runtime.checkpoint import ALL, UNUSED_SCALES, CheckpointDirectory
from magicdec.runtime.checkpoint import FORMATS as STORAGES
from magicdec.runtime.distributed import SINGLE, TensorParallel
from magicdec.runtime.engine import Engine
from magicdec.runtime.launch import launch_ranks
from magicdec.runtime.weights import load_model
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.model import why_not_run
from magicdec.specs.precision import Precision
from magicdec.specs.quantization import Quantization

DIRECTORY = Path(__file__).resolve().parents[1] / "data" / "quantized"
FORMATS = sorted(path.name for path in DIRECTORY.iterdir())
MODEL, EXPECTED = "model.safetensors", "expected.safetensors"
DIVIDED = (
    "gptq-ordered",
    "awq",
    "ct-packed-int4-ordered",
    "ct-fp8-block",
    "ct-mxfp4",
    "kimi-k2.5",
)
NOT_WEIGHTS = (*UNUSED_SCALES, "g_idx")
CPU = torch.device("cpu")


def test_every_way_of_storing_has_a_checkpoint_that_a_library_wrote() -> None:
    assert {
        scheme.storage for name in FORMATS for scheme in quantization_of(name).schemes
    } == set(STORAGES)


def quantization_of(name: str) -> Quantization:
    found = load_model_spec(str(DIRECTORY / name)).quantization
    assert found is not None
    return found


def logits_of(name: str, tp: TensorParallel = SINGLE) -> torch.Tensor:
    tokens = load_file(DIRECTORY / name / EXPECTED)["tokens"]
    engine = Engine(load_model(DIRECTORY / name, tp=tp), batch_size=1, max_len=32)
    engine.prefill([tokens[0, :2].tolist()])
    return torch.cat(tuple(tp.all_gather(engine.forward(tokens[:, 1:]))), dim=-1)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_weights_that_its_library_reads(name: str) -> None:
    expected = load_file(DIRECTORY / name / EXPECTED)["logits"][:, 1:]
    torch.testing.assert_close(logits_of(name), expected, atol=2e-5, rtol=2e-5)


def all_logits(tp: TensorParallel) -> dict[str, Any]:
    return {name: logits_of(name, tp).tolist() for name in DIVIDED}


@pytest.mark.slow
def test_two_ranks_compute_what_one_does() -> None:
    """Half of q's heads and of o's inputs, of each way of packing; in groups of 32 a shard begins within a group."""
    found = launch_ranks(all_logits, 2)
    for name in DIVIDED:
        torch.testing.assert_close(
            torch.tensor(found[name]), logits_of(name), atol=2e-5, rtol=2e-5
        )


@pytest.mark.parametrize("name", FORMATS)
def test_any_part_of_a_matrix_is_a_part_of_the_whole(name: str) -> None:
    source = CheckpointDirectory(
        DIRECTORY / name,
        device=CPU,
        dtype=torch.float32,
        quantization=quantization_of(name),
    )
    module, shape = "model.layers.0.self_attn.q_proj", (32, 32)
    if name.startswith("kimi"):
        module = "language_model.model.layers.1.mlp.experts.2.down_proj"
    assert source._scheme(f"{module}.weight") is not None  # it is quantised
    whole = source.read(f"{module}.weight", shape)
    assert whole.unique().numel() > 10
    parts = (slice(0, 8), slice(3, 21), slice(17, 18), slice(24, 32))
    for rows in parts:
        for columns in (ALL, *parts):
            assert torch.equal(
                source.read(f"{module}.weight", shape, rows, columns),
                whole[rows, columns],
            )


@pytest.mark.parametrize("name", FORMATS)
def test_a_rank_reads_its_share(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of packed tensors half; whole are the scales of inputs in another order, those of a block, and what both need."""
    read: dict[str, int] = {}
    view = CheckpointDirectory.view

    class Counted:
        def __init__(self, inside: Any, tensor: str) -> None:
            self.inside, self.tensor = inside, tensor

        def __getitem__(self, part: Any) -> torch.Tensor:
            found = self.inside[part]
            read[self.tensor] = read.get(self.tensor, 0) + found.nbytes
            return found

        def get_shape(self) -> list[int]:
            return self.inside.get_shape()

    def counted(self: CheckpointDirectory, tensor: str, *arguments: Any) -> Any:
        found = view(self, tensor, *arguments)
        return found if isinstance(found, torch.Tensor) else Counted(found, tensor)

    monkeypatch.setattr(CheckpointDirectory, "view", counted)
    source = CheckpointDirectory(
        DIRECTORY / name,
        device=CPU,
        dtype=torch.float32,
        quantization=quantization_of(name),
    )
    module = (
        "language_model.model.layers.1.mlp.experts.2."
        if name.startswith("kimi")
        else "model.layers.0.mlp."
    )
    for last, part in (
        ("gate_proj", (slice(16, 32),)),
        ("down_proj", (ALL, slice(0, 16))),
    ):
        read.clear()
        source.read(f"{module}{last}.weight", (32, 32), *part)
        codes = {
            key: each
            for key, each in read.items()
            if key.endswith(("qweight", "weight_packed", ".weight"))
        }
        assert len(codes) == 1
        key, num_bytes = next(iter(codes.items()))
        stored = source._files[key].get_tensor(key)
        assert num_bytes == stored.nbytes / 2


@pytest.mark.parametrize("name", FORMATS)
def test_a_plan_counts_the_bytes_that_are_in_the_file(name: str) -> None:
    """Of codes, scales and zero points, and of what is left in 16 bits; not of activations' scales and orders."""
    spec, published = load_model_spec(str(DIRECTORY / name)), quantization_of(name)
    stored = 0
    with safe_open(DIRECTORY / name / MODEL, "pt") as file:
        for key in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(key)
            if not key.endswith(NOT_WEIGHTS):
                stored += tensor.nbytes
    planned = float(
        weights_bytes(spec, Precision(weight_dtype=published.weight_dtype), 1)
    )
    # k_proj alone is left in 16 bits; a plan takes qkv, which engines fuse, as q is.
    wide = 16 * 32 * 2 if not name.startswith("kimi") else 0
    narrow = published.schemes[0].num_bytes(16, 32) if wide else 0
    assert planned - narrow + wide == pytest.approx(stored, rel=0.004)


def copied(directory: Path, name: str, **changes: torch.Tensor | None) -> Path:
    """A checkpoint with tensors of q_proj replaced, or left out."""
    shutil.copytree(DIRECTORY / name, directory, dirs_exist_ok=True)
    stored = load_file(directory / MODEL)
    for part, tensor in changes.items():
        key = f"model.layers.0.self_attn.q_proj.{part}"
        assert key in stored
        stored.pop(key)
        if tensor is not None:
            stored[key] = tensor
    save_file(stored, directory / MODEL, {"format": "pt"})
    return directory


def described(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"].update(changes)
    file.write_text(json.dumps(config))


MALFORMED = {
    "no scales": ("gptq", {"scales": None}, "no tensor .*q_proj.scales"),
    "no zero points": ("awq", {"qzeros": None}, "no tensor .*q_proj.qzeros"),
    "no codes": ("gptq", {"qweight": None}, "no tensor .*q_proj.qweight"),
    "no scale of fp8": ("fp8-static", {"weight_scale": None}, "no tensor .*q_proj.weight_scale"),
    "no factor": ("modelopt-nvfp4", {"weight_scale_2": None}, "no tensor .*weight_scale_2"),
    "scales of another group": ("gptq", {"scales": torch.ones(3, 32).half()}, r"\[3, 32\].* calls for \[2, 32\]"),
    "codes of another width": ("awq", {"qweight": torch.zeros(32, 5).int()}, r"\[32, 5\].* calls for \[32, 4\]"),
    "another block": ("ct-fp8-block", {"weight_scale": torch.ones(4, 4)}, r"\[4, 4\].* calls for \[4, 2\]"),
    "codes of floats": ("ct-packed-int4", {"weight_packed": torch.zeros(32, 4)}, "is of F32, .* calls for I32"),
    "a group that is not there": ("gptq-ordered", {"g_idx": torch.full((32,), 7).int()}, "group 7, .* 2 groups of 16"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_checkpoint_is_refused_in_one_line(
    case: str, tmp_path: Path
) -> None:
    name, changes, message = MALFORMED[case]
    with pytest.raises(CheckpointError, match=message) as refusal:
        load_model(copied(tmp_path, name, **changes))
    assert len(str(refusal.value).splitlines()) == 1


def test_a_group_size_that_does_not_divide_the_inputs_is_refused_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    described(copied(tmp_path, "awq"), group_size=24)
    command = f"magicdec run --model {tmp_path} --prompts random --draft-budget 16 --context 16 --gen-len 2"
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("magicdec: ")
    assert "no multiple of its group size 24" in line


def test_biases_of_zeros_that_autogptq_wrote_are_passed_over_and_others_are_not(
    tmp_path: Path,
) -> None:
    """AutoGPTQ gave every layer a bias, of zeros where the model has none."""
    copied(tmp_path, "gptq")
    stored = load_file(tmp_path / MODEL)
    key = "model.layers.0.self_attn.q_proj.bias"
    save_file(
        {**stored, key: torch.zeros(32).half()}, tmp_path / MODEL, {"format": "pt"}
    )
    load_model(tmp_path)
    save_file(
        {**stored, key: torch.ones(32).half()}, tmp_path / MODEL, {"format": "pt"}
    )
    with pytest.raises(CheckpointError, match=r"q_proj.bias has no place"):
        load_model(tmp_path)


def test_modelopts_own_file_is_read_where_the_configuration_says_nothing(
    tmp_path: Path,
) -> None:
    copied(tmp_path, "modelopt-nvfp4")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is of U8"):
        load_model(tmp_path)
    inside = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head", "*k_proj"],
    }
    file = tmp_path / "hf_quant_config.json"
    file.write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": inside})
    )
    models = [
        load_model(directory) for directory in (tmp_path, DIRECTORY / "modelopt-nvfp4")
    ]
    assert torch.equal(*(model.layers[0].mixer.qkv.weight for model in models))
    assert models[0].spec.quantization.kv_dtype == "fp8"


REFUSED = {
    "gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ weights of 4 bits packed as gemv"),
    "marlin": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "for the kernels of marlin"),
    "dynamic": ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*down.*": {}}}, "settings by module"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "weights in int4 .bitsandbytes."),
    "smoothed": ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "weights in int4 .modelopt."),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_planned_and_not_widened_is_refused_in_one_line(
    case: str, tmp_path: Path
) -> None:
    quantization, message = REFUSED[case]
    copied(tmp_path, "gptq")
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            {**json.loads(file.read_text()), "quantization_config": quantization}
        )
    )
    assert load_model_spec(str(tmp_path)).quantization is not None
    with pytest.raises(
        ConfigError, match=message + ".*, which can be planned but not run"
    ) as refusal:
        load_model(tmp_path)
    assert len(str(refusal.value).splitlines()) == 1


def test_kimi_k2_5_runs_and_only_its_experts_are_planned_in_4_bits() -> None:
    """Its experts' scales are one of 16 bits per 32 weights; everything else is published in bf16."""
    spec = load_model_spec("kimi-k2.5")
    assert why_not_run(spec) is None
    published = spec.quantization
    assert (published.experts.dtype, published.experts.num_bytes) == ("int4", 0.5625)
    assert [
        part.num_bytes for part in (published.mixer, published.mlp, published.head)
    ] == [
        2.0,
        2.0,
        2.0,
    ]
    expected = (
        spec.expert_parameters * 0.5625
        + (spec.num_parameters - spec.expert_parameters) * 2
    )
    assert float(
        weights_bytes(spec, Precision(weight_dtype="int4"), 1)
    ) == pytest.approx(expected, rel=1e-12)
