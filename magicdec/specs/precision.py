"""The number formats of weights and KV caches, chosen separately for the target and the draft."""

from __future__ import annotations

import msgspec

from magicdec.specs.device import bytes_per_element
from magicdec.specs.formats import WeightFormat, weight_format


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
