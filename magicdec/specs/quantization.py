"""How a checkpoint is published in fewer bits: the schemes of its matrices, and the matrices
without one. No torch.

hf_config.py reads the schemes from a configuration, a plan counts their bytes, and
runtime/checkpoint.py reads the weights.
"""

import re
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

WIDE_BYTES = 2.0
"""Bytes per weight published in 16 bits."""
REGEX = "re:"
"""Prefix of patterns that are regular expressions (compressed-tensors)."""

Storage = Literal[
    "scaled",
    "gptq",
    "gptq_v2",
    "awq",
    "packed",
    "nvfp4",
    "nvfp4_inverse",
    "mxfp4",
    "mxfp8",
    "stacked_mxfp4",
]
"""How a matrix is laid out: the keys of FORMATS in runtime/checkpoint.py; stacked_mxfp4 holds all
experts.
"""


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """Storage format of matrices [outputs, inputs]."""

    dtype: str
    """Its name in plans (hardware.DTYPE_BYTES)."""
    storage: Storage | None
    """None: a layout that the runtime cannot widen."""
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
    """Modules, by name or pattern. Without any, or with a class of layers (`Linear`): all modules
    that no other scheme lists.
    """

    def num_bytes(self, outputs: int, inputs: int) -> float:
        """Bytes of a matrix, with scales and zero points."""
        if self.block is not None:
            num_scales = -(-outputs // self.block[0]) * -(-inputs // self.block[1])
        elif self.is_per_tensor:
            num_scales = 1
        else:
            num_scales = outputs * -(-inputs // (self.group_size or inputs))
        return outputs * inputs * self.bits / 8 + num_scales * (
            self.scale_bytes + self.zero_bits / 8
        )


class PartFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the model: the format of most of its weights, and bytes per weight, scales
    included.
    """

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
        """Storage of a module's weight, by the module's name. None: 16 bits."""
        return scheme_of(module, self.schemes, self.kept)


def scheme_of(
    module: str, schemes: tuple[Scheme, ...], wide: tuple[str, ...]
) -> Scheme | None:
    """The scheme that lists the module, else the first one that lists a class of layers or nothing.
    None for a module that matches a pattern of `wide`."""
    if any(matches(pattern, module) for pattern in wide):
        return None
    for scheme in schemes:
        if any(matches(target, module) for target in scheme.targets):
            return scheme
    for scheme in schemes:
        is_general = not scheme.targets or any(map(_is_class, scheme.targets))
        if is_general:
            return scheme
    return None


def matches(pattern: str, module: str) -> bool:
    """Whether a pattern names a module or one that contains it: a regular expression at the name's
    beginning, a name with wildcards, or a piece of a name between dots."""
    if pattern.startswith(REGEX):
        return re.match(pattern.removeprefix(REGEX), module) is not None
    pattern, module = _of_the_text(pattern), _of_the_text(module)
    if "*" in pattern:
        return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")
    return f".{pattern.strip('.')}." in f".{module}."


def _of_the_text(name: str) -> str:
    """The name that a text model alone gives to a module of a model of several modalities."""
    for root in ("model.language_model.", "language_model.model."):
        if name.startswith(root):
            return f"model.{name.removeprefix(root)}"
    return name


def _is_class(target: str) -> bool:
    return target.isidentifier() and target[0].isupper()
