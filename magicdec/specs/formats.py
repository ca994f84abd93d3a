"""Number formats of weights: bits of a weight by type and by matrix, from data/formats.toml.

A type is one tensor's: blocks of so many weights, with their scales. A format is a file's or a
checkpoint's: one type for most matrices, others for some. GGUF files also hold their tables in few
bits, where other checkpoints keep them in 16.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from magicdec.errors import ConfigError, unknown_choice
from magicdec.files import converted, read_toml
from magicdec.specs.device import DTYPE_BYTES
from magicdec.specs.mixers import Projection

FORMATS_FILE = Path(__file__).resolve().parent / "data" / "formats.toml"
MOST_BITS_OF_INT4 = 6.0
"""Bits up to which a GGUF type is timed by the kernels of int4; above, by those of int8."""
SIZE = re.compile(r"(\d+(?:\.\d+)?)(g|gib|gb|m|mib|mb)")
UNITS = {"g": 1e9, "gb": 1e9, "gib": 2.0**30, "m": 1e6, "mb": 1e6, "mib": 2.0**20}
USUAL_ENDS = ("", "_m", "_k_m", "_k", "_xs", "_0", "_moe")
"""Ends that files leave out of a type's name, the likeliest first."""

Matrix = Literal["qk", "v", "o", "gate_up", "down"]


class TensorType(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of a block of weights."""

    bytes: float
    weights: int
    instead: str = ""
    """The type of a matrix whose rows are no whole number of blocks; "": this one."""

    @property
    def bits(self) -> float:
        return 8.0 * self.bytes / self.weights


class WeightFormat(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The types of a file's matrices; the fields are explained in data/formats.toml."""

    type: str = ""
    qk: Mapping[str, float] = {}
    v: Mapping[str, float] = {}
    o: Mapping[str, float] = {}
    gate_up: Mapping[str, float] = {}
    down: Mapping[str, float] = {}
    experts: str = ""
    output: str = ""
    embeddings: str = ""
    bits: float | None = None
    num_bytes: float | None = None
    """The file's own size; None: not known."""

    @property
    def has_narrow_tables(self) -> bool:
        """Whether embeddings and output are converted too, as in a GGUF file."""
        return self.bits is not None or bool(self.output)

    @property
    def is_average(self) -> bool:
        """Whether it is known by other models' files alone."""
        return self.bits is not None and self.num_bytes is None

    @property
    def usual_bits(self) -> float:
        """Bits of a weight in most matrices."""
        return self.bits or type_bits(self.type)

    @property
    def kernels(self) -> str:
        """The format whose kernels' times stand for this one's."""
        if self.type in DTYPE_BYTES:
            return self.type
        bits = self.usual_bits
        if bits >= 16.0:
            return "bf16"
        return "int4" if bits <= MOST_BITS_OF_INT4 else "int8"

    def table_bits(self, table: Literal["output", "embeddings"]) -> float:
        if self.bits is not None:
            return self.bits
        if table == "output":
            return type_bits(self.output)
        return type_bits(self.embeddings or self.type)

    def matrix_bits(self, projection: Projection, *, is_expert: bool = False) -> float:
        """Bits of a matrix, on average over the layers."""
        if self.bits is not None:
            return self.bits
        width = projection.inputs.total
        if is_expert and self.experts:
            return type_bits(self.experts, width)
        name = projection.name
        if name == "qkv":
            # queries come first, then keys and values, alike in size
            of_values = projection.outputs[-1].total / 2
            share = of_values / sum(part.total for part in projection.outputs)
            values = self._mixed("v", width)
            return (1.0 - share) * self._mixed("qk", width) + share * values
        if name == "o":
            return self._mixed("o", width)
        if name.endswith("gate_up"):
            return self._mixed("gate_up", width)
        if name.endswith("down") and name != "latent_down":
            return self._mixed("down", width)
        return type_bits(self.type, width)

    def _mixed(self, matrix: Matrix, width: int) -> float:
        others: Mapping[str, float] = getattr(self, matrix)
        bits = (1.0 - sum(others.values())) * type_bits(self.type, width)
        for name, share in others.items():
            bits += share * type_bits(name, width)
        return bits


class FormatsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    types: dict[str, TensorType]
    formats: dict[str, WeightFormat]
    names: dict[str, str]


@cache
def _file() -> FormatsFile:
    return converted(read_toml(FORMATS_FILE), FormatsFile, where=str(FORMATS_FILE))


def weight_format_names() -> list[str]:
    """Formats that weights may have, without sizes of files."""
    return list(dict.fromkeys([*DTYPE_BYTES, *_file().types, *_file().formats]))


def format_name(text: str) -> str:
    """Our name of a number format that an engine, a checkpoint or torch calls by another."""
    label, at, size = text.strip().partition("@")
    name = label.lower().replace("-", "_")
    if name in weight_format_names():
        return f"{name}{at}{size}"
    return _file().names.get(name, text.strip())


def is_weight_format(name: str) -> bool:
    """Whether weights may have this format, with a file's size or without."""
    return name.partition("@")[0] in weight_format_names()


@cache
def weight_format(name: str) -> WeightFormat:
    """The format of a name, which may end in the file's own size ("q4_k_m@19.8GB").

    Raises ConfigError for an unknown format or a size that cannot be read."""
    label, at, size = name.partition("@")
    if label not in weight_format_names():
        raise unknown_choice("format of weights", label, weight_format_names())
    known = _file().formats.get(label) or WeightFormat(type=label)
    if not at:
        return known
    read = SIZE.fullmatch(size.lower())
    if read is None or float(read[1]) <= 0:
        raise ConfigError(
            f"the size of a file of weights is written {label}@19.8GB, not {name}"
        )
    return msgspec.structs.replace(known, num_bytes=float(read[1]) * UNITS[read[2]])


def gguf_format(label: str) -> str | None:
    """The format of a GGUF type as files are named: itself, the usual one of its kind ("Q4_K" and
    "Q4_K_M"), or the publisher's nearest ("UD-Q2_K_XL" and "Q2_K"). None: no known type."""
    known = _file().formats
    name = label.lower().replace("-", "_")
    if name in ("bf16", "f32", "nvfp4"):
        return "fp32" if name == "f32" else name
    if name not in known:
        name = name.removeprefix("ud_")
    while name:
        for end in USUAL_ENDS:
            if name + end in known:
                return name + end
        name = name.rpartition("_")[0]
    return None


@cache
def type_bits(name: str, width: int | None = None) -> float:
    """Bits of a weight of a type, scales included; of the one that takes its place in rows of
    `width` weights that are no whole number of blocks."""
    tensor = _file().types.get(name)
    if tensor is None:
        return 8.0 * DTYPE_BYTES[name]
    if tensor.instead and width is not None and width % tensor.weights:
        return type_bits(tensor.instead, width)
    return tensor.bits
