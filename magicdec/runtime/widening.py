"""Published weights in fewer bits, as wider numbers: what a device that cannot compute in them computes with.

A matrix [outputs, inputs] is stored as several tensors: codes, of which a word may hold several, and what groups of
them share. FORMATS says for each storage (specs/quantization.py) which tensors these are, which side of the matrix each
dimension runs along, and in which steps; so any part of the matrix is read from the parts of the tensors that it
touches. `widen` then sees numbers that stand where the matrix's do.

    scaled         e4m3 or int8, (code - zero) · scale: of the matrix, a row, a group of inputs, or a block
                   (DeepSeek-V3, FBGEMM, compressed-tensors, ModelOpt)
    gptq, gptq_v2  (code - zero) · scale of a group of inputs; inputs first, words along them; the former stores
                   zero - 1; g_idx gives each input's group where they are ordered by activation
    awq            likewise, words along the outputs, in an order of their own
    packed         int4 or int8, words along the inputs (compressed-tensors)
    nvfp4          pairs of e2m1 per byte, the lower half first, an e4m3 scale per 16 inputs and one of the matrix;
                   nvfp4_inverse stores that one's reciprocal (compressed-tensors)
    mxfp4, mxfp8   e2m1 or e4m3 times 2^(scale - 127) per 32 inputs (OCP MX 1.0); gpt-oss stacks its experts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from magicdec.specs.quantization import Scheme

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the sixteen codes."""
MX_EXPONENT_BIAS = 127
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of eight outputs stands."""
WORD_BITS = {"I32": 32, "U8": 8}
FLOATS = ("F64", "F32", "F16", "BF16")
Unit = Literal["one", "word", "group", "block", "all"]


class Side(NamedTuple):
    """The side of the matrix, outputs (0) or inputs (1), that a stored tensor's dimension runs along; an entry stands
    for one of them, for those in a word, or for those that share a scale."""

    axis: Literal[0, 1]
    unit: Unit = "one"


OUT, IN = Side(0), Side(1)
GROUPS, BLOCK_OUT, BLOCK_IN = Side(1, "group"), Side(0, "block"), Side(1, "block")
ALL_OUT, ALL_IN = Side(0, "all"), Side(1, "all")
Layout = tuple[Side, ...]
PER_MATRIX: tuple[Layout, ...] = ((), (ALL_OUT,), (ALL_OUT, ALL_IN))
PER_BLOCK: tuple[Layout, ...] = ((BLOCK_OUT, BLOCK_IN), (BLOCK_OUT, ALL_OUT, BLOCK_IN, ALL_IN))


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One of the tensors that hold a matrix."""

    names: tuple[str, ...]
    """In the place of `weight`; the first that is there."""
    layouts: tuple[Layout, ...]
    dtypes: tuple[str, ...] = FLOATS
    is_optional: bool = False
    order: tuple[int, ...] | None = None
    """Where in a word each code stands, if not in order."""
    increment: int = 0
    """Added to every code of a word before they are taken apart: a carry goes to the next one."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A way of storing a matrix."""

    codes: Stored
    others: Mapping[str, Stored]
    """By role: scales, zeros, factor (of the whole matrix), and groups (the group of each input)."""
    widen: Callable[[Mapping[str, Tensor], Scheme], Tensor]


def step(side: Side, shape: tuple[int, int], scheme: Scheme, dtype: str) -> int:
    """How many outputs or inputs an entry stands for."""
    size = shape[side.axis]
    if side.unit == "word":
        return WORD_BITS[dtype] // scheme.bits
    if side.unit == "block":
        return size if scheme.block is None else scheme.block[side.axis]
    return {"one": 1, "group": scheme.group_size or size, "all": size}[side.unit]


def aligned(
    tensor: Tensor, stored: Stored, layout: Layout, steps: Sequence[int], part: tuple[range, range], bits: int
) -> Tensor:
    """The entries that a part touches, as [outputs, inputs] of that part; a dimension stays 1 where all share an entry.

    A step of 0: the entries stand where the part's numbers do already (those of ordered groups).
    """
    if stored.increment:
        each = sum(stored.increment << bits * i for i in range(32 // bits))
        tensor = tensor + torch.tensor(each, dtype=torch.int64).to(torch.int32)
    for dim, (side, size) in enumerate(zip(layout, steps, strict=True)):
        if side.unit == "word":
            tensor = _codes(tensor, dim, size, bits, stored.order)
        elif size > 1 and tensor.shape[dim] > 1:
            tensor = tensor.repeat_interleave(size, dim)
        if size and tensor.shape[dim] > 1:
            wanted = part[side.axis]
            tensor = tensor.narrow(dim, wanted.start - wanted.start // size * size, len(wanted))
    sides = [side.axis for side in layout]
    if sides == [1, 0]:
        return tensor.T
    if len(sides) == 4:
        return tensor[:, 0, :, 0]
    if len(sides) == 1:
        return tensor.unsqueeze(1 - sides[0])
    return tensor.reshape(1, 1) if not sides else tensor


def _codes(words: Tensor, dim: int, count: int, bits: int, order: tuple[int, ...] | None) -> Tensor:
    """The codes of words, side by side in the dimension of the words."""
    places = torch.arange(count) if order is None else torch.tensor(order)
    shifts = (places * bits).to(words.dtype).view(-1, *[1] * (words.dim() - 1 - dim))
    return (words.unsqueeze(dim + 1) >> shifts & (1 << bits) - 1).flatten(dim, dim + 1)


def _affine(parts: Mapping[str, Tensor], _: Scheme) -> Tensor:
    codes, zeros = parts["codes"].float(), parts.get("zeros")
    return (codes if zeros is None else codes - zeros.float()) * parts["scales"].float()


def _packed(parts: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    middle = torch.tensor(1 << scheme.bits - 1)
    return _affine({"zeros": middle, **parts}, scheme)


def _e2m1(codes: Tensor) -> Tensor:
    return torch.tensor(E2M1)[codes.long()]


def _nvfp4(parts: Mapping[str, Tensor], _: Scheme) -> Tensor:
    return _e2m1(parts["codes"]) * (parts["scales"].float() * parts["factor"].float())


def _nvfp4_inverse(parts: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    return _nvfp4({**parts, "factor": parts["factor"].float().reciprocal()}, scheme)


def _mxfp4(parts: Mapping[str, Tensor], _: Scheme) -> Tensor:
    return torch.ldexp(_e2m1(parts["codes"]), parts["scales"].int() - MX_EXPONENT_BIAS)


def _mxfp8(parts: Mapping[str, Tensor], _: Scheme) -> Tensor:
    return torch.ldexp(parts["codes"].float(), parts["scales"].int() - MX_EXPONENT_BIAS)


def _gptq(zero_offset: int) -> Format:
    zeros = Stored(names=("qzeros",), layouts=((GROUPS, Side(0, "word")),), dtypes=("I32",), increment=zero_offset)
    return Format(
        codes=Stored(names=("qweight",), layouts=((Side(1, "word"), OUT),), dtypes=("I32",)),
        others={
            "groups": Stored(names=("g_idx",), layouts=((IN,),), dtypes=("I32", "I64"), is_optional=True),
            "scales": Stored(names=("scales",), layouts=((GROUPS, OUT),)),
            "zeros": zeros,
        },
        widen=_affine,
    )


def _floats_of_4_bits(scales: Mapping[str, Stored], codes: str, widen: Callable[..., Tensor]) -> Format:
    pairs = Stored(names=(codes,), layouts=((OUT, Side(1, "word")),), dtypes=("U8",))
    return Format(codes=pairs, others=scales, widen=widen)


_EXPONENTS = Stored(names=("weight_scale",), layouts=((OUT, GROUPS),), dtypes=("U8", "F8_E8M0"))
_SMALL_SCALES = Stored(names=("weight_scale",), layouts=((OUT, GROUPS),), dtypes=("F8_E4M3",))
FORMATS: Mapping[str, Format] = {
    "scaled": Format(
        codes=Stored(names=("weight",), layouts=((OUT, IN),), dtypes=("F8_E4M3", "I8")),
        others={
            "scales": Stored(
                names=("weight_scale", "weight_scale_inv"), layouts=(*PER_BLOCK, *PER_MATRIX, (OUT, GROUPS), (OUT,))
            ),
            "zeros": Stored(
                names=("weight_zero_point",), layouts=(*PER_MATRIX, (OUT, GROUPS)), dtypes=("I8",), is_optional=True
            ),
        },
        widen=_affine,
    ),
    "gptq": _gptq(zero_offset=1),
    "gptq_v2": _gptq(zero_offset=0),
    "awq": Format(
        codes=Stored(names=("qweight",), layouts=((IN, Side(0, "word")),), dtypes=("I32",), order=AWQ_ORDER),
        others={
            "scales": Stored(names=("scales",), layouts=((GROUPS, OUT),)),
            "zeros": Stored(names=("qzeros",), layouts=((GROUPS, Side(0, "word")),), dtypes=("I32",), order=AWQ_ORDER),
        },
        widen=_affine,
    ),
    "packed": Format(
        codes=Stored(names=("weight_packed",), layouts=((OUT, Side(1, "word")),), dtypes=("I32",)),
        others={
            "groups": Stored(names=("weight_g_idx",), layouts=((IN,),), dtypes=("I32", "I64"), is_optional=True),
            "scales": Stored(names=("weight_scale",), layouts=((OUT, GROUPS), *PER_MATRIX)),
            "zeros": Stored(
                names=("weight_zero_point",), layouts=((Side(0, "word"), GROUPS),), dtypes=("I32",), is_optional=True
            ),
        },
        widen=_packed,
    ),
    "nvfp4": _floats_of_4_bits(
        {"scales": _SMALL_SCALES, "factor": Stored(names=("weight_scale_2",), layouts=PER_MATRIX)}, "weight", _nvfp4
    ),
    "nvfp4_inverse": _floats_of_4_bits(
        {"scales": _SMALL_SCALES, "factor": Stored(names=("weight_global_scale",), layouts=PER_MATRIX)},
        "weight_packed",
        _nvfp4_inverse,
    ),
    "mxfp4": _floats_of_4_bits({"scales": _EXPONENTS}, "weight_packed", _mxfp4),
    "mxfp8": Format(
        codes=Stored(names=("weight",), layouts=((OUT, IN),), dtypes=("F8_E4M3",)),
        others={"scales": _EXPONENTS},
        widen=_mxfp8,
    ),
}
"""By Scheme.storage."""


def widened_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[.., groups of 32 inputs, 16 bytes] and [.., groups] as [.., inputs], in fp32."""
    pairs = torch.stack((_e2m1(blocks & 15), _e2m1(blocks >> 4)), dim=-1)
    return torch.ldexp(pairs.flatten(-2), scales.int()[..., None] - MX_EXPONENT_BIAS).flatten(-2)
