"""How a checkpoint is published in fewer bits: the schemes of its matrices, and which matrices have none. No torch.

hf_config.py reads it from a configuration; a plan counts its bytes; runtime/checkpoint.py reads the weights.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

WIDE_BYTES = 2.0
"""Per weight of what is published in 16 bits."""
REGEX = "re:"
"""How a pattern begins that is a regular expression (compressed-tensors)."""

Storage = Literal[
    "scaled", "gptq", "gptq_v2", "awq", "packed", "nvfp4", "nvfp4_inverse", "mxfp4", "mxfp8", "stacked_mxfp4"
]
"""How a matrix is laid out: the keys of FORMATS in runtime/checkpoint.py; stacked_mxfp4 holds all experts."""


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which matrices [outputs, inputs] are stored."""

    dtype: str
    """Its name in plans (hardware.DTYPE_BYTES)."""
    storage: Storage | None
    """None: a layout that is not widened."""
    bits: int
    group_size: int | None = None
    """Inputs that share a scale; None: all of them, or one scale for the whole matrix."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale."""
    scale_bytes: float = 2.0
    zero_bits: int = 0
    """Bits of the zero point stored with each scale."""
    is_per_tensor: bool = False
    targets: tuple[str, ...] = ()
    """Modules, by name or pattern; none, or a class of layers (`Linear`): all that no other scheme names."""

    def num_bytes(self, outputs: int, inputs: int) -> float:
        """Bytes of a matrix, with scales and zero points."""
        if self.block is not None:
            num_scales = -(-outputs // self.block[0]) * -(-inputs // self.block[1])
        else:
            num_scales = 1 if self.is_per_tensor else outputs * -(-inputs // (self.group_size or inputs))
        return outputs * inputs * self.bits / 8 + num_scales * (self.scale_bytes + self.zero_bits / 8)


class PartFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the model: the format of most of its weights, and bytes per weight, scales included."""

    dtype: str
    num_bytes: float


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """The number formats that a checkpoint's weights are published in."""

    method: str
    weight_dtype: str
    """Format of most weights."""
    schemes: tuple[Scheme, ...]
    kept: tuple[str, ...] = ()
    """Patterns of modules that no scheme applies to."""
    kv_dtype: str | None = None
    mixer: PartFormat
    mlp: PartFormat
    """Format of dense feed-forwards and of shared experts."""
    experts: PartFormat
    head: PartFormat
    reason: str | None = None
    """Why its weights cannot be widened, for people."""

    def scheme_of(self, module: str) -> Scheme | None:
        """How a module's weight is stored, by its name: None where it is left in 16 bits."""
        return scheme_of(module, self.schemes, self.kept)


def scheme_of(module: str, schemes: tuple[Scheme, ...], kept: tuple[str, ...]) -> Scheme | None:
    """The scheme that names the module, else one that names a class of layers or nothing."""
    if any(matches(pattern, module) for pattern in kept):
        return None
    named = [each for each in schemes if any(matches(pattern, module) for pattern in each.targets)]
    general = [each for each in schemes if not each.targets or any(_is_class(each) for each in each.targets)]
    return next(iter(named or general), None)


def matches(pattern: str, module: str) -> bool:
    """Whether a pattern names a module or one that contains it: a regular expression at the name's beginning, a name
    with wildcards, or a piece of a name between dots."""
    if pattern.startswith(REGEX):
        return re.match(pattern.removeprefix(REGEX), module) is not None
    if "*" in pattern:
        return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")
    return f".{pattern.strip('.')}." in f".{module}."


def _is_class(target: str) -> bool:
    return target.isidentifier() and target[0].isupper()
