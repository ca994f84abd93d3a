"""Checkpoints in fp8 by blocks and in mxfp4 run as their weights, widened by transformers' own code, do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from magicdec.errors import CheckpointError, ConfigError
from magicdec.runtime.checkpoint import ALL, CheckpointDirectory
from magicdec.runtime.weights import load_model
from magicdec.specs.families.keys import Keys
from magicdec.specs.hf_config import read_quantization
from magicdec.specs.model import TensorNames
from tests.runtime.test_architectures import WEIGHTS, check, prompts_for, write
from tests.specs.architectures import draw

BLOCK = (4, 8)
FP8_MAX = 448.0


def quantized(
    weight: torch.Tensor, block: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and a scale per block, the last of which may be smaller."""
    rows, columns = weight.shape
    grid = torch.zeros(-(-rows // block[0]), -(-columns // block[1]))
    data = torch.zeros_like(weight)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            at = (
                slice(i * block[0], (i + 1) * block[0]),
                slice(j * block[1], (j + 1) * block[1]),
            )
            grid[i, j] = weight[at].abs().max() / FP8_MAX
            data[at] = weight[at] / grid[i, j]
    return data.to(torch.float8_e4m3fn), grid


def describe(directory: Path, quantization: dict[str, Any]) -> None:
    file = directory / "config.json"
    file.write_text(
        json.dumps(
            {**json.loads(file.read_text()), "quantization_config": quantization}
        )
    )


@pytest.mark.parametrize("model_type", ["deepseek_v3", "minimax_m2"])
def test_fp8_by_blocks_is_what_transformers_widens(
    model_type: str, tmp_path: Path
) -> None:
    """Every matrix of the layers in fp8; the reference computes with transformers' widening of the same file."""
    config = draw(model_type, 0)
    reference = write(tmp_path, config, seed=2)
    widen, stored = Fp8Dequantize(None), {}
    for name, tensor in load_file(tmp_path / WEIGHTS).items():
        is_fit = (
            tensor.dim() == 2
            and tensor.shape[0] % BLOCK[0] == tensor.shape[1] % BLOCK[1] == 0
        )
        if (
            "layers" not in name
            or "norm" in name
            or name.endswith("gate.weight")
            or not is_fit
        ):
            stored[name] = tensor
            continue
        stored[name], stored[f"{name}_scale_inv"] = quantized(tensor, BLOCK)
    assert sum(name.endswith("_scale_inv") for name in stored) >= 4
    wide = {
        name: widen._dequantize_one(each, stored[f"{name}_scale_inv"], torch.float32)
        if each.dtype == torch.float8_e4m3fn else each
        for name, each in stored.items() if not name.endswith("_scale_inv")
    }  # fmt: skip
    save_file(wide, tmp_path / WEIGHTS, {"format": "pt"})
    reference = (
        type(reference)
        .from_pretrained(
            tmp_path,
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float32,
        )
        .eval()
    )
    save_file(stored, tmp_path / WEIGHTS, {"format": "pt"})
    describe(
        tmp_path,
        {
            "quant_method": "fp8",
            "weight_block_size": list(BLOCK),
            "activation_scheme": "dynamic",
        },
    )
    check(tmp_path, reference, prompts_for(config, 1))


def test_any_part_of_a_tensor_in_blocks_is_a_part_of_the_whole(tmp_path: Path) -> None:
    """Shards need not begin or end with a block, nor need the last block be full."""
    torch.manual_seed(0)
    weight = torch.randn(21, 27)
    data, scales = quantized(weight, BLOCK)
    save_file({"a.weight": data, "a.weight_scale_inv": scales}, tmp_path / WEIGHTS)
    source = opened(tmp_path, BLOCK)
    whole = source.read("a.weight", (21, 27))
    assert (
        (whole - weight).abs() <= weight.abs() / 16 + 1e-3
    ).all()  # three bits of mantissa
    for rows in (slice(0, 4), slice(3, 9), slice(10, 21)):
        for columns in (ALL, slice(5, 7), slice(9, 27)):
            assert torch.equal(
                source.read("a.weight", (21, 27), rows, columns), whole[rows, columns]
            )
    with pytest.raises(CheckpointError, match="weight_scale_inv has shape"):
        opened(tmp_path, (8, 8)).read("a.weight", (21, 27))
    with pytest.raises(
        CheckpointError, match=r"F8_E4M3, but its config.json calls for F64 or"
    ):
        CheckpointDirectory(
            tmp_path, device=torch.device("cpu"), dtype=torch.float32
        ).read("a.weight", (21, 27))


def test_modelopts_blocks_are_those_of_others_with_dimensions_of_one(
    tmp_path: Path,
) -> None:
    """FP8_PB_WO: [outputs / 128, 1, inputs / 128, 1]."""
    torch.manual_seed(0)
    data, scales = quantized(torch.randn(200, 300), (128, 128))
    save_file({"a.weight": data, "a.weight_scale_inv": scales}, tmp_path / WEIGHTS)
    whole = opened(tmp_path, (128, 128)).read("a.weight", (200, 300))
    save_file(
        {"a.weight": data, "a.weight_scale": scales[:, None, :, None].contiguous()},
        tmp_path / WEIGHTS,
    )
    source = opened(
        tmp_path, quantization={"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    )
    assert torch.equal(source.read("a.weight", (200, 300)), whole)
    part = (slice(100, 150), slice(250, 300))
    assert torch.equal(source.read("a.weight", (200, 300), *part), whole[part])


def opened(
    directory: Path,
    block: tuple[int, int] = (0, 0),
    quantization: dict[str, Any] | None = None,
) -> CheckpointDirectory:
    value = quantization or {"quant_method": "fp8", "weight_block_size": list(block)}
    keys = Keys({"quantization_config": value}, "config.json")
    published = read_quantization(
        keys, layers=(), hidden_size=1, vocab_size=1, names=TensorNames()
    )
    return CheckpointDirectory(
        directory,
        device=torch.device("cpu"),
        dtype=torch.float32,
        quantization=published,
    )


def test_mxfp4_experts_are_what_transformers_widens(tmp_path: Path) -> None:
    """gpt-oss as it is published: the experts' matrices as blocks and scales, drawn at random; and parts of them."""
    config = {**draw("gpt_oss", 0), "hidden_size": 64, "intermediate_size": 32}
    reference = write(tmp_path, config, seed=3)
    stored = load_file(tmp_path / WEIGHTS)
    for layer in range(config["num_hidden_layers"]):
        experts = reference.model.layers[layer].mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(experts, name)
            count, inputs, outputs = parameter.shape
            blocks = torch.randint(
                0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8
            )
            scales = torch.randint(
                120, 126, (count, outputs, inputs // 32), dtype=torch.uint8
            )
            with torch.no_grad():
                parameter.copy_(
                    convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
                )
            key = f"model.layers.{layer}.mlp.experts.{name}"
            del stored[key]
            stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    save_file(stored, tmp_path / WEIGHTS, {"format": "pt"})
    describe(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    check(tmp_path, reference, prompts_for(config, 1))
    source = CheckpointDirectory(
        tmp_path, device=torch.device("cpu"), dtype=torch.float32
    )
    name, whole = (
        "model.layers.0.mlp.experts.down_proj",
        reference.model.layers[0].mlp.experts.down_proj,
    )
    for part in (
        (slice(1, 2), slice(5, 27), slice(3, 9)),
        (ALL, slice(20, 32)),
        (slice(2, 4),),
    ):
        assert torch.equal(source.read(name, tuple(whole.shape), *part), whole[part])


def test_blocks_that_are_no_pair_are_refused(tmp_path: Path) -> None:
    write(tmp_path, draw("llama", 0), seed=0)
    describe(tmp_path, {"quant_method": "fp8", "weight_block_size": [128]})
    with pytest.raises(ConfigError, match="weight_block_size"):
        load_model(tmp_path)
