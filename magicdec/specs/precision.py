"""The number formats of weights and KV caches, chosen separately for the target and the draft."""

from __future__ import annotations

import msgspec

from magicdec.specs.device import bytes_per_element
from magicdec.specs.formats import WeightFormat, weight_format, weight_format_names


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """`weight_dtype` is what is read from memory, a format of specs/formats.py; matrix products run
    in `compute_dtype` (weights are widened), or in the weights' own format where engine and device
    do (perfmodel/kernels/gemm.py). Checkpoints in narrow formats keep embeddings and head in 16
    bits (`tables`)."""

    weight_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    part_bytes: float | None = None
    """Bytes of a weight on average over a part of a model; None: those of its format."""

    def __post_init__(self) -> None:
        weight_format(self.weight_dtype)
        bytes_per_element(self.kv_dtype)

    @property
    def compute_dtype(self) -> str:
        """The activations' format: fp32 with fp32 weights, otherwise 16-bit (int4, int8 and fp8 are
        weight-only).
        """
        if self.weight_dtype == "fp32":
            return "fp32"
        return "bf16"

    @property
    def activation_bytes(self) -> float:
        """Bytes of one activation, and of one number of a recurrence's convolution state. Whatever
        the KV cache's format, engines keep the last inputs of a short convolution in the model's
        own: vLLM by default (`mamba_cache_dtype` "auto", MambaStateDtypeCalculator), SGLang in
        bfloat16 (Mamba2StateDType.conv)."""
        return bytes_per_element(self.compute_dtype)

    @property
    def tables(self) -> Precision:
        """The precision of embeddings and head."""
        if self.format.usual_bits >= 16.0:
            return msgspec.structs.replace(self, part_bytes=None)
        return msgspec.structs.replace(self, weight_dtype="bf16", part_bytes=None)

    @property
    def of_its_type(self) -> Precision:
        """Without the size of a file, for a network that is not in it."""
        label = self.weight_dtype.partition("@")[0]
        return msgspec.structs.replace(self, weight_dtype=label)

    @property
    def format(self) -> WeightFormat:
        """How the weights are stored."""
        return weight_format(self.weight_dtype)

    @property
    def kernels(self) -> str:
        """The format whose kernels multiply with such weights."""
        return self.format.kernels

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight, its share of scales and zero points included."""
        if self.part_bytes is not None:
            return self.part_bytes
        return self.format.usual_bits / 8.0

    @property
    def kv_bytes(self) -> float:
        return bytes_per_element(self.kv_dtype)

    @property
    def narrow_cache(self) -> str:
        """The KV cache's format where it is below 16 bits, else ""."""
        if self.kv_bytes < 2.0:
            return self.kv_dtype
        return ""


BF16 = Precision()

PROFILE_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""torch's names of the number formats that run, and what profiles and plans call them."""
DTYPE_OF_FORMAT = {name: dtype for dtype, name in PROFILE_DTYPES.items()}
ENGINE_FORMATS: dict[str, str] = {
    "awq": "int4",
    "awq_marlin": "int4",
    "gptq": "int4",
    "gptq_marlin": "int4",
    **dict.fromkeys(
        ("auto_round", "inc", "auto_awq", "auto_gptq", "moe_wna16"), "int4"
    ),
    "bitsandbytes": "bnb4",
    "w4a16": "int4",
    **dict.fromkeys(
        ("w8a8_int8", "experts_int8", "int8_per_channel_weight_only"), "int8"
    ),
    "w8a8_fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "modelopt": "fp8",
    "modelopt_fp8": "fp8",
    "modelopt_fp4": "nvfp4",
    "nvfp4": "nvfp4",
    "fp4": "nvfp4",
    **dict.fromkeys(("fp8_per_tensor", "fp8_per_channel", "fp8_per_block"), "fp8"),
    **dict.fromkeys(("mxfp8", "modelopt_mxfp8", "deepseek_v4_fp8"), "fp8"),
    "gpt_oss_mxfp4": "mxfp4",
    "nvfp4_per_token": "nvfp4",
    # caches (vllm/config/cache.py of 0.33): with a scale per token and head, or nearest in bits from above
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla"), "fp8"),
    "fp8_per_token_head": "fp8",
    "int8_per_token_head": "int8",
    "int4_per_token_head": "int4",
    **dict.fromkeys(("nvfp4_ds_mla", "nvfp4_4over6"), "nvfp4"),
    "turboquant_k8v4": "int8",
    **dict.fromkeys(("turboquant_4bit_nc", "turboquant_k3v4_nc"), "int4"),
    **dict.fromkeys(("turboquant_3bit_nc", "ultraquant_4bit"), "int4"),
    **dict.fromkeys(("octave_k3v4", "octave_k3v3", "octave_k3v3_compact"), "int4"),
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
}
"""Engines' names of number formats that profiles call otherwise."""


def format_name(text: str) -> str:
    """Our name of a number format."""
    label, at, size = text.strip().partition("@")
    name = label.lower().replace("-", "_")
    if name in weight_format_names():
        return f"{name}{at}{size}"
    return ENGINE_FORMATS.get(name, text.strip())
