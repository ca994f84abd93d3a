"""Where weights come from: a Hugging Face directory (safetensors only, never pickle), or a seeded
generator.

A matrix [outputs, inputs] that is published in fewer bits is stored as several tensors: codes, of
which a word may hold several, and what groups of them share. FORMATS says for each storage
(specs/quantization.py) which tensors these are, which side of the matrix each dimension runs along,
and in which steps; so any part of the matrix is read from the parts of the tensors that it touches,
and widened to numbers that stand where the matrix's do.

    scaled         e4m3 or int8, (code - zero) · scale; a scale for the matrix, a row, a group of
                   inputs, or a block (DeepSeek-V3, FBGEMM, compressed-tensors, ModelOpt)
    gptq, gptq_v2  (code - zero) · scale of a group of inputs; inputs first, words along them; gptq
                   stores zero - 1; g_idx gives each input's group if they are ordered by activation
    awq            as gptq_v2, words along the outputs, in an order of their own
    packed         int4 or int8, words along the inputs (compressed-tensors)
    nvfp4          pairs of e2m1 per byte, the lower half first, an e4m3 scale per 16 inputs and one
                   for the matrix; nvfp4_inverse stores that one's reciprocal (compressed-tensors)
    mxfp4, mxfp8   e2m1 or e4m3 times 2^(scale - 127) per 32 inputs (OCP MX 1.0); gpt-oss stacks its
                   experts
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from magicdec.errors import CheckpointError
from magicdec.files import read_json
from magicdec.specs.quantization import Quantization, Scheme

ALL = slice(None)
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
WEIGHT = ".weight"
MX_GROUP = 32
"""Inputs that share a scale in mxfp4."""
COMPUTED_TENSORS = ("rotary_emb.inv_freq",)
"""Suffixes of tensors that old checkpoints store although the config determines them; ignored."""
UNUSED_SCALES = (
    ".weight_shape",
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".activation_scale",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".prob_scale",
    ".k_zero_point",
    ".v_zero_point",
)
"""Suffixes of tensors that quantise activations or a cache, which stay wide here, or that repeat
what other tensors state; ignored.
"""
E2M1 = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
"""The values of the sixteen codes."""
MX_EXPONENT_BIAS = 127
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of eight outputs stands."""
WORD_BITS = {"I32": 32, "U8": 8}
WHOLE_NUMBERS = ("I64", "I32", "BOOL", "U8")
FLOATS = ("F64", "F32", "F16", "BF16")
Unit = Literal["one", "word", "group", "block", "all"]


class Side(NamedTuple):
    """The side of the matrix, outputs (0) or inputs (1), that a stored tensor's dimension runs
    along; an entry stands for one of them, for those in a word, or for those that share a scale."""

    axis: Literal[0, 1]
    unit: Unit = "one"

    def step(self, shape: tuple[int, int], scheme: Scheme, dtype: str) -> int:
        """How many outputs or inputs an entry stands for."""
        size = shape[self.axis]
        if self.unit == "word":
            return WORD_BITS[dtype] // scheme.bits
        if self.unit == "block":
            assert scheme.block is not None
            return scheme.block[self.axis]
        return {"one": 1, "group": scheme.group_size or size, "all": size}[self.unit]


OUT = Side(0)
IN = Side(1)
WORDS_OUT = Side(0, "word")
WORDS_IN = Side(1, "word")
GROUP_SIDE = Side(1, "group")
BLOCK_OUT = Side(0, "block")
BLOCK_IN = Side(1, "block")
ALL_OUT = Side(0, "all")
ALL_IN = Side(1, "all")
Sides = tuple[Side, ...]
PER_MATRIX: tuple[Sides, ...] = ((), (ALL_OUT,), (ALL_OUT, ALL_IN))
PER_BLOCK: tuple[Sides, ...] = (
    (BLOCK_OUT, BLOCK_IN),
    (BLOCK_OUT, ALL_OUT, BLOCK_IN, ALL_IN),
)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One of the tensors that hold a matrix."""

    names: tuple[str, ...]
    """In the place of `weight`; the first that is there."""
    layouts: tuple[Sides, ...]
    dtypes: tuple[str, ...] = FLOATS
    is_optional: bool = False
    order: tuple[int, ...] | None = None
    """Where in a word each code stands, if not in order."""
    increment: int = 0
    """Added to every code of a word before they are taken apart: a carry goes to the next one."""


def _one(
    name: str, *layouts: Sides, dtypes: tuple[str, ...] = FLOATS, **options: Any
) -> Stored:
    return Stored(names=(name,), layouts=layouts, dtypes=dtypes, **options)


Format = Mapping[str, Stored]
"""A way of storing a matrix: its tensors by role (codes; groups, the group of each input; scales or
exponents, zeros, and the factor or divisor of the whole matrix)."""
_SCALES = _one("scales", (GROUP_SIDE, OUT))
_EXPONENTS = _one("weight_scale", (OUT, GROUP_SIDE), dtypes=("U8", "F8_E8M0"))
_SMALL_SCALES = _one("weight_scale", (OUT, GROUP_SIDE), dtypes=("F8_E4M3",))


def _gptq(zero_offset: int) -> Format:
    return {
        "codes": _one("qweight", (WORDS_IN, OUT), dtypes=("I32",)),
        "groups": _one("g_idx", (IN,), dtypes=("I32", "I64"), is_optional=True),
        "scales": _SCALES,
        "zeros": _one(
            "qzeros", (GROUP_SIDE, WORDS_OUT), dtypes=("I32",), increment=zero_offset
        ),
    }


FORMATS: Mapping[str, Format] = {
    "scaled": {
        "codes": _one("weight", (OUT, IN), dtypes=("F8_E4M3", "I8")),
        "scales": Stored(
            names=("weight_scale", "weight_scale_inv"),
            layouts=(*PER_BLOCK, *PER_MATRIX, (OUT, GROUP_SIDE), (OUT,)),
        ),
        "zeros": _one(
            "weight_zero_point",
            *PER_MATRIX,
            (OUT, GROUP_SIDE),
            dtypes=("I8",),
            is_optional=True,
        ),
    },
    "gptq": _gptq(zero_offset=1),
    "gptq_v2": _gptq(zero_offset=0),
    "awq": {
        "codes": _one("qweight", (IN, WORDS_OUT), dtypes=("I32",), order=AWQ_ORDER),
        "scales": _SCALES,
        "zeros": _one(
            "qzeros", (GROUP_SIDE, WORDS_OUT), dtypes=("I32",), order=AWQ_ORDER
        ),
    },
    "packed": {
        "codes": _one("weight_packed", (OUT, WORDS_IN), dtypes=("I32",)),
        "groups": _one("weight_g_idx", (IN,), dtypes=("I32", "I64"), is_optional=True),
        "scales": _one("weight_scale", (OUT, GROUP_SIDE), *PER_MATRIX),
        "zeros": _one(
            "weight_zero_point",
            (WORDS_OUT, GROUP_SIDE),
            dtypes=("I32",),
            is_optional=True,
        ),
    },
    "nvfp4": {
        "codes": _one("weight", (OUT, WORDS_IN), dtypes=("U8",)),
        "scales": _SMALL_SCALES,
        "factor": _one("weight_scale_2", *PER_MATRIX),
    },
    "nvfp4_inverse": {
        "codes": _one("weight_packed", (OUT, WORDS_IN), dtypes=("U8",)),
        "scales": _SMALL_SCALES,
        "divisor": _one("weight_global_scale", *PER_MATRIX),
    },
    "mxfp4": {
        "codes": _one("weight_packed", (OUT, WORDS_IN), dtypes=("U8",)),
        "exponents": _EXPONENTS,
    },
    "mxfp8": {
        "codes": _one("weight", (OUT, IN), dtypes=("F8_E4M3",)),
        "exponents": _EXPONENTS,
    },
}
"""By Scheme.storage."""


class TensorSource(Protocol):
    """Gives named tensors of known shape, or a part of them."""

    def read(self, name: str, shape: tuple[int, ...], *part: slice) -> Tensor:
        """A part of a tensor which as a whole must have `shape`: a slice of each of the first
        dimensions.
        """

    def read_numbers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A whole tensor of integers or booleans, in its stored type."""

    def check_all_read(
        self, beside: tuple[str, ...], *, within: tuple[str, ...] = ("",)
    ) -> None:
        """Raises CheckpointError for a tensor that nobody asked for: the model computes something
        else.

        Ignores names that begin with one of `beside`, or with none of `within`."""

    def __contains__(self, name: str) -> bool: ...


class CheckpointDirectory:
    """The safetensors files of a directory. Only the wanted part of each tensor is read, and
    widened where it is published in fewer bits. Raises CheckpointError when there are none, one is
    damaged or missing, or a tensor is absent, misshapen, or not of the numbers that the
    configuration says."""

    def __init__(
        self,
        directory: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization | None = None,
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._quantization = quantization
        self._directory = directory
        self._files: dict[str, Any] = {}
        self._read: set[str] = set()
        for path in _shard_files(directory):
            try:
                file = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} is not a readable safetensors file: {error}"
                ) from error
            for name in file.keys():  # noqa: SIM118  (not a dict)
                self._files[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, shape: tuple[int, ...], *part: slice) -> Tensor:
        scheme = None
        if len(shape) == 2:
            scheme = self._scheme(name)
        if scheme is not None:
            num_outputs, num_inputs = shape
            module = name.removesuffix(WEIGHT)
            matrix = _Matrix(self, module, (num_outputs, num_inputs), scheme)
            wanted = matrix.read(*part)
        elif len(shape) == 3 and f"{name}_blocks" in self._files:
            wanted = self._read_mxfp4(name, shape, *part)
        else:
            wanted = self.view(name, (shape,), FLOATS)[part or ...]
        # Into memory of torch's own alignment, whatever the file's.
        aligned = torch.empty(wanted.shape, device=self._device, dtype=self._dtype)
        return aligned.copy_(wanted)

    def _scheme(self, name: str) -> Scheme | None:
        """How a matrix is stored. None: in 16 or 32 bits, by the configuration or the file."""
        if self._quantization is None or not name.endswith(WEIGHT):
            return None
        module = name.removesuffix(WEIGHT)
        scheme = self._quantization.scheme_of(module)
        if scheme is None or scheme.storage is None or scheme.storage not in FORMATS:
            return None
        codes = FORMATS[scheme.storage]["codes"]
        if name in self._files:
            has_codes = f"{module}.{codes.names[0]}" in self._files
            if not has_codes or self._files[name].get_slice(name).get_dtype() in FLOATS:
                return None
        return scheme

    def _read_mxfp4(
        self,
        name: str,
        shape: tuple[int, ...],
        experts: slice = ALL,
        inputs: slice = ALL,
        outputs: slice = ALL,
    ) -> Tensor:
        """A part of stacked experts' matrices [E, inputs, outputs], stored as [E, outputs, inputs]
        in mxfp4.
        """
        count, num_inputs, num_outputs = shape
        groups = num_inputs // MX_GROUP
        first, stop, _ = inputs.indices(num_inputs)
        touched = slice(first // MX_GROUP, -(-stop // MX_GROUP))
        scales_shape = (count, num_outputs, groups)
        scales_view = self.view(f"{name}_scales", (scales_shape,), ("U8",))
        scales = scales_view[experts, outputs, touched]
        blocks_shape = (*scales_shape, MX_GROUP // 2)
        blocks_view = self.view(f"{name}_blocks", (blocks_shape,), ("U8",))
        blocks = blocks_view[experts, outputs, touched]
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
        values = torch.tensor(E2M1)[codes.long()]
        exponents = scales.int()[..., None] - MX_EXPONENT_BIAS
        wide = torch.ldexp(values, exponents).flatten(-2)
        offset = touched.start * MX_GROUP
        return wide[..., first - offset : stop - offset].transpose(1, 2)

    def view(
        self, name: str, shapes: Sequence[tuple[int, ...]], dtypes: tuple[str, ...]
    ) -> Any:
        """A tensor that is not read yet, of one of these shapes. Raises CheckpointError where it is
        absent, misshapen or of another format."""
        if name not in self._files:
            raise CheckpointError(
                f"{self._directory} has no tensor {name}, which its config.json calls for"
            )
        self._read.add(name)
        view = self._files[name].get_slice(name)
        dtype = view.get_dtype()
        if dtype not in dtypes:
            expected = " or ".join(dtypes)
            raise CheckpointError(
                f"{self._directory}: tensor {name} is of {dtype}, but its config.json calls for "
                f"{expected}"
            )
        stored_shape = tuple(view.get_shape())
        if stored_shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise CheckpointError(
                f"{self._directory}: tensor {name} has shape {list(stored_shape)}, but its "
                f"config.json calls for {expected}"
            )
        if stored_shape:
            return view
        return self._files[name].get_tensor(name)

    def read_numbers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        stored = self.view(name, (shape,), WHOLE_NUMBERS)[...]
        return torch.empty(shape, device=self._device, dtype=stored.dtype).copy_(stored)

    def check_all_read(
        self, beside: tuple[str, ...], *, within: tuple[str, ...] = ("",)
    ) -> None:
        unused: tuple[str, ...] = COMPUTED_TENSORS
        if self._quantization is not None:
            unused += UNUSED_SCALES
        left = []
        for name in sorted(self._files):
            if name in self._read or name.startswith(beside) or name.endswith(unused):
                continue
            if name.startswith(within) and not self._is_empty_bias(name):
                left.append(name)
        if left:
            more = ""
            if len(left) > 1:
                more = f" (and {len(left) - 1} more)"
            raise CheckpointError(
                f"{self._directory}: tensor {left[0]}{more} has no place in the model that its "
                "config.json describes"
            )

    def _is_empty_bias(self, name: str) -> bool:
        """Whether it is one of the zeros that AutoGPTQ wrote for layers without a bias."""
        module = name.removesuffix(".bias")
        if (
            self._quantization is None
            or module == name
            or f"{module}.qweight" not in self
        ):
            return False
        return not self._files[name].get_tensor(name).any()


class _StoredLayout(NamedTuple):
    """A layout of a stored tensor, for one matrix."""

    layout: Sides
    steps: list[int]
    """Outputs or inputs that one entry stands for, by dimension."""


def _cut(
    view: Any, fit: _StoredLayout, part: tuple[range, range], *, is_ordered: bool
) -> Tensor:
    """The entries that a part needs: of groups in an order of their own all."""
    wanted = []
    for side, step in zip(fit.layout, fit.steps, strict=True):
        if is_ordered and side.unit == "group":
            wanted.append(ALL)
            continue
        inside = part[side.axis]
        first = inside.start // step
        stop = -(-inside.stop // step)
        wanted.append(slice(first, stop))
    tensor: Tensor = view
    if wanted:
        tensor = view[tuple(wanted)]
    return tensor


def _outputs_by_inputs(tensor: Tensor, layout: Sides) -> Tensor:
    sides = [side.axis for side in layout]
    if len(sides) == 4:
        return tensor[:, 0, :, 0]
    if sides == [1, 0]:
        return tensor.T
    if len(sides) == 2:
        return tensor
    if len(sides) == 1:
        return tensor.unsqueeze(1 - sides[0])
    return tensor.reshape(1, 1)


class _Matrix:
    """A matrix [outputs, inputs] that is published in fewer bits."""

    def __init__(
        self,
        files: CheckpointDirectory,
        module: str,
        shape: tuple[int, int],
        scheme: Scheme,
    ) -> None:
        self._files = files
        self._module = module
        self._shape = shape
        self._scheme = scheme
        _, num_inputs = shape
        if num_inputs % (scheme.group_size or 1):
            raise CheckpointError(
                f"{module} has {num_inputs} inputs, which is no multiple of its group size "
                f"{scheme.group_size}"
            )

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        num_outputs, num_inputs = self._shape
        outputs = range(*rows.indices(num_outputs))
        inputs = range(*columns.indices(num_inputs))
        tensors: dict[str, Tensor] = {}
        groups = None
        for role, stored in FORMATS[str(self._scheme.storage)].items():
            tensor = self._aligned(stored, (outputs, inputs), groups)
            if tensor is None:
                continue
            if role == "groups":
                groups = self._ordered_groups(tensor.flatten().long(), inputs)
            else:
                tensors[role] = tensor
        widened = _widened(tensors, self._scheme)
        return widened.expand(len(outputs), len(inputs))

    def _ordered_groups(self, groups: Tensor, inputs: range) -> Tensor | None:
        """The group of each input of a part. None: they are in order, or not stated (-1)."""
        _, num_inputs = self._shape
        size = self._scheme.group_size or num_inputs
        in_order = torch.arange(inputs.start, inputs.stop) // size
        if (groups == -1).any() or torch.equal(groups, in_order):
            return None
        count = -(-num_inputs // size)
        highest = int(groups.max())
        if groups.min() < 0 or highest >= count:
            raise CheckpointError(
                f"{self._module}: an input is of group {highest}, but there are {count} groups of "
                f"{size}"
            )
        return groups

    def _aligned(
        self,
        stored: Stored,
        part: tuple[range, range],
        groups: Tensor | None,
    ) -> Tensor | None:
        """One stored tensor cut to a part and expanded to [outputs, inputs]; a dimension stays 1 if
        all its outputs or inputs share an entry. None: an optional tensor is absent."""
        names = [f"{self._module}.{name}" for name in stored.names]
        # where it has none of them, the first is the one that is missed
        name = next((name for name in names if name in self._files), names[0])
        if stored.is_optional and name not in self._files:
            return None
        fit, view = self._fitting_view(name, stored)
        tensor = _cut(view, fit, part, is_ordered=groups is not None)
        if stored.increment:
            tensor = tensor + self._carried(stored.increment)
        for dim, side in enumerate(fit.layout):
            if groups is not None and side.unit == "group":
                tensor = tensor.index_select(dim, groups)
                continue
            step = fit.steps[dim]
            if side.unit == "word":
                tensor = _codes(tensor, dim, step, self._scheme.bits, stored.order)
            elif step > 1 and tensor.shape[dim] > 1:
                tensor = tensor.repeat_interleave(step, dim)
            if tensor.shape[dim] > 1:
                inside = part[side.axis]
                tensor = tensor.narrow(dim, inside.start % step, len(inside))
        return _outputs_by_inputs(tensor, fit.layout)

    def _fitting_view(self, name: str, stored: Stored) -> tuple[_StoredLayout, Any]:
        """A stored tensor that is not read yet, with the layout that it has, of those that the
        scheme allows: one of blocks has one scale per block, others have no scales of blocks."""
        dtype = stored.dtypes[0]
        has_blocks = self._scheme.block is not None
        by_shape: dict[tuple[int, ...], _StoredLayout] = {}
        for layout in stored.layouts:
            is_of_blocks = any(side.unit == "block" for side in layout)
            if len(stored.layouts) > 1 and is_of_blocks != has_blocks:
                continue
            steps = [side.step(self._shape, self._scheme, dtype) for side in layout]
            shape = tuple(
                -(-self._shape[side.axis] // step)
                for side, step in zip(layout, steps, strict=True)
            )
            by_shape.setdefault(shape, _StoredLayout(layout, steps))
        view = self._files.view(name, list(by_shape), stored.dtypes)
        if isinstance(view, Tensor):
            return by_shape[tuple(view.shape)], view
        return by_shape[tuple(view.get_shape())], view

    def _carried(self, increment: int) -> Tensor:
        """The increment in every code of a 32-bit word."""
        bits = self._scheme.bits
        word = 0
        for shift in range(0, 32 // bits * bits, bits):
            word += increment << shift
        return torch.tensor(word, dtype=torch.int64).to(torch.int32)


def _codes(
    words: Tensor, dim: int, count: int, bits: int, order: tuple[int, ...] | None
) -> Tensor:
    """The codes that words hold, side by side in the words' dimension."""
    places = torch.arange(count)
    if order is not None:
        places = torch.tensor(order)
    dims_behind = words.dim() - 1 - dim
    shifts = (places * bits).to(words.dtype).view(-1, *[1] * dims_behind)
    mask = (1 << bits) - 1
    codes = words.unsqueeze(dim + 1) >> shifts & mask
    return codes.flatten(dim, dim + 1)


def _widened(parts: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """(code - zero) · scale, or code · 2^(exponent - 127). The zero of packed integers without a
    stated one is the middle of their range."""
    codes = parts["codes"]
    values = codes.float()
    if scheme.dtype in ("nvfp4", "mxfp4"):
        values = torch.tensor(E2M1)[codes.long()]
    if "exponents" in parts:
        exponents = parts["exponents"].int() - MX_EXPONENT_BIAS
        return torch.ldexp(values, exponents)
    scales = parts["scales"].float()
    if "factor" in parts:
        scales = scales * parts["factor"].float()
    if "divisor" in parts:
        scales = scales * parts["divisor"].float().reciprocal()
    if "zeros" in parts:
        values = values - parts["zeros"].float()
    elif scheme.storage == "packed":
        values = values - float(1 << scheme.bits - 1)
    return values * scales


def _shard_files(directory: Path) -> list[Path]:
    """The files that transformers would load: `model.safetensors`, else the index's files, else the
    only file."""
    index = directory / INDEX_FILE
    single = directory / SINGLE_FILE
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            weight_map = read_json(index, error=CheckpointError)["weight_map"]
            names = sorted(set(weight_map.values()))
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{index} is not a readable index of safetensors files: {error!r}"
            ) from error
        paths = [directory / name for name in names]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise CheckpointError(
                f"{directory} lacks {', '.join(missing)}, which {INDEX_FILE} lists"
            )
        return paths
    files = sorted(directory.glob("*.safetensors"))
    if len(files) > 1:
        raise CheckpointError(
            f"{directory} holds {len(files)} safetensors files and neither {SINGLE_FILE} nor "
            f"{INDEX_FILE}, which would say which of them are the model"
        )
    if not files:
        hint = ""
        if any(directory.glob("*.bin")) or any(directory.glob("*.pth")):
            hint = "; pickled weights are never loaded: convert them to safetensors"
        raise CheckpointError(f"{directory} holds no *.safetensors file{hint}")
    return files


class RandomTensors:
    """Seeded weights of a sane scale: matrices N(0, 1/columns), norms `norm_weight`, biases 0. A
    tensor depends on the seed and its name only, so every shard of a model, on any number of ranks,
    agrees."""

    def __init__(
        self,
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        norm_weight: float = 1.0,
    ) -> None:
        self._seed = seed
        self._device = device
        self._dtype = dtype
        self._norm_weight = norm_weight

    def __contains__(self, name: str) -> bool:
        return False  # of names that differ between checkpoints, the first are read

    def read_numbers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, device=self._device, dtype=torch.long)

    def check_all_read(
        self, beside: tuple[str, ...], *, within: tuple[str, ...] = ("",)
    ) -> None:
        """Nothing is left over: a tensor comes into being when it is read."""

    def read(self, name: str, shape: tuple[int, ...], *part: slice) -> Tensor:
        part = part or (ALL,)
        whole = torch.empty(shape, device=self._device, dtype=self._dtype)
        if name.endswith("norm.weight"):
            return whole.fill_(self._norm_weight)[part]
        if len(shape) == 1:
            return whole.zero_()[part]
        seed = (self._seed << 32) ^ zlib.crc32(name.encode())
        generator = torch.Generator(self._device).manual_seed(seed)
        whole.normal_(std=1 / math.sqrt(shape[1]), generator=generator)
        return whole[part].contiguous()
