"""Where weights come from: a Hugging Face directory (safetensors only, never pickle), or a seeded generator."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from magicdec.errors import CheckpointError
from magicdec.files import read_json
from magicdec.runtime.widening import FLOATS, FORMATS, Format, Layout, Stored, aligned, step, widened_mxfp4
from magicdec.specs.quantization import Quantization, Scheme

ALL = slice(None)
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
WEIGHT, BIAS = ".weight", ".bias"
MX_BLOCKS, MX_SCALES = "_blocks", "_scales"
"""How the names of stacked experts' parts end."""
MX_GROUP = 32
"""Inputs that share a scale in mxfp4."""
COMPUTED_TENSORS = ("rotary_emb.inv_freq",)
"""How tensors end that older checkpoints store and their configuration determines."""
UNUSED_SCALES = (
    ".weight_shape", ".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale", ".output_scale",
    ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".prob_scale", ".k_zero_point", ".v_zero_point",
)  # fmt: skip
"""How tensors end that quantise activations or a cache, which stay wide here, or that say again what others do."""


class TensorSource(Protocol):
    """Gives named tensors of known shape, or a part of them."""

    def read(self, name: str, shape: tuple[int, ...], *part: slice) -> Tensor:
        """A part of a tensor which as a whole must have `shape`: a slice of each of the first dimensions."""

    def check_all_read(self, beside: tuple[str, ...] = ()) -> None:
        """Raises CheckpointError when there is a tensor that nobody asked for: the model computes something else.

        Names that begin with one of `beside` are none of its business."""

    def __contains__(self, name: str) -> bool: ...


class CheckpointDirectory:
    """The safetensors files of a directory. Only the wanted part of each tensor is read, and widened where it is
    published in fewer bits.

    Raises CheckpointError when there are none, one is damaged or missing, or a tensor is absent, misshapen, or not of
    the numbers that the configuration says.
    """

    def __init__(
        self, directory: Path, *, device: torch.device, dtype: torch.dtype, quantization: Quantization | None = None
    ) -> None:
        self._device, self._dtype, self._quantization = device, dtype, quantization
        self._directory = directory
        self._files: dict[str, Any] = {}
        self._read: set[str] = set()
        for path in _shard_files(directory):
            try:
                file = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
            for name in file.keys():  # noqa: SIM118  (not a dict)
                self._files[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, shape: tuple[int, ...], *part: slice) -> Tensor:
        scheme = self._scheme(name) if len(shape) == 2 else None
        if scheme is not None:
            wanted = _Matrix(self, name.removesuffix(WEIGHT), shape, scheme).read(*part)
        elif name + MX_BLOCKS in self._files and len(shape) == 3:
            wanted = self._read_mxfp4(name, shape, *part)
        else:
            wanted = self.view(name, (shape,), FLOATS)[part or ...]
        # Into memory of torch's own alignment, whatever the file's.
        return torch.empty(wanted.shape, device=self._device, dtype=self._dtype).copy_(wanted)

    def _scheme(self, name: str) -> Scheme | None:
        """How a matrix is stored: None where nothing, or the file, says that it is in 16 or 32 bits."""
        if self._quantization is None or not name.endswith(WEIGHT):
            return None
        module = name.removesuffix(WEIGHT)
        scheme = self._quantization.scheme_of(module)
        if scheme is None or scheme.storage is None or scheme.storage not in FORMATS:
            return None
        codes = FORMATS[scheme.storage].codes
        found = f"{module}.{codes.names[0]}"
        is_wide = name in self._files and (found not in self._files or self._dtype_of(name) in FLOATS)
        return None if is_wide else scheme

    def _dtype_of(self, name: str) -> str:
        return str(self._files[name].get_slice(name).get_dtype())

    def _read_mxfp4(
        self, name: str, shape: tuple[int, ...], experts: slice = ALL, inputs: slice = ALL, outputs: slice = ALL
    ) -> Tensor:
        """A part of stacked experts' matrices [E, inputs, outputs], stored as [E, outputs, inputs] in mxfp4."""
        count, num_inputs, num_outputs = shape
        groups = num_inputs // MX_GROUP
        stored = (count, num_outputs, groups)
        first, stop, _ = inputs.indices(num_inputs)
        touched = slice(first // MX_GROUP, -(-stop // MX_GROUP))
        blocks = self.view(name + MX_BLOCKS, ((*stored, MX_GROUP // 2),), ("U8",))[experts, outputs, touched]
        scales = self.view(name + MX_SCALES, (stored,), ("U8",))[experts, outputs, touched]
        offset = touched.start * MX_GROUP
        return widened_mxfp4(blocks, scales)[..., first - offset : stop - offset].transpose(1, 2)

    def view(self, name: str, shapes: Sequence[tuple[int, ...]], dtypes: tuple[str, ...]) -> Any:
        """A tensor that is not read yet, of one of these shapes.

        Raises CheckpointError where it is absent, misshapen or of another format.
        """
        if name not in self._files:
            raise CheckpointError(f"{self._directory} has no tensor {name}, which its config.json calls for")
        self._read.add(name)
        view = self._files[name].get_slice(name)
        if view.get_dtype() not in dtypes:
            raise CheckpointError(
                f"{self._directory}: tensor {name} is of {view.get_dtype()}, but its config.json calls for "
                f"{' or '.join(dtypes)}"
            )
        found = tuple(view.get_shape())
        if found not in shapes:
            expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise CheckpointError(
                f"{self._directory}: tensor {name} has shape {list(found)}, but its config.json calls for {expected}"
            )
        return view if found else self._files[name].get_tensor(name)

    def check_all_read(self, beside: tuple[str, ...] = ()) -> None:
        unused = COMPUTED_TENSORS if self._quantization is None else COMPUTED_TENSORS + UNUSED_SCALES
        unread = (name for name in self._files if name not in self._read and not name.startswith(beside))
        left = sorted(name for name in unread if not name.endswith(unused) and not self._is_empty_bias(name))
        if left:
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            raise CheckpointError(
                f"{self._directory}: tensor {left[0]}{more} has no place in the model that its config.json describes"
            )

    def _is_empty_bias(self, name: str) -> bool:
        """Whether it is one of the zeros that AutoGPTQ wrote for layers without a bias."""
        if self._quantization is None or not name.endswith(BIAS) or name.removesuffix(BIAS) + ".qweight" not in self:
            return False
        return not self._files[name].get_tensor(name).any()


class _Matrix:
    """A matrix [outputs, inputs] that is published in fewer bits."""

    def __init__(self, files: CheckpointDirectory, module: str, shape: tuple[int, ...], scheme: Scheme) -> None:
        assert scheme.storage is not None
        self._files, self._module, self._scheme = files, module, scheme
        self._shape = (shape[0], shape[1])
        self._format: Format = FORMATS[scheme.storage]
        if shape[1] % (scheme.group_size or 1):
            raise CheckpointError(
                f"{module} has {shape[1]} inputs, which is no multiple of its group size {scheme.group_size}"
            )

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        part = range(*rows.indices(self._shape[0])), range(*columns.indices(self._shape[1]))
        codes = self._aligned(self._format.codes, part, None)
        assert codes is not None
        found, groups = {"codes": codes}, None
        for role, stored in self._format.others.items():
            tensor = self._aligned(stored, part, groups)
            if role == "groups":
                groups = None if tensor is None else self._ordered_groups(tensor.flatten().long(), part[1])
            elif tensor is not None:
                found[role] = tensor
        return self._format.widen(found, self._scheme).expand(len(part[0]), len(part[1]))

    def _ordered_groups(self, groups: Tensor, inputs: range) -> Tensor | None:
        """The group of each input of a part; None where they stand in order, or are left unsaid (-1)."""
        size = self._scheme.group_size or self._shape[1]
        if (groups == -1).any() or torch.equal(groups, torch.arange(inputs.start, inputs.stop) // size):
            return None
        count = -(-self._shape[1] // size)
        if groups.min() < 0 or groups.max() >= count:
            raise CheckpointError(
                f"{self._module}: an input is of group {int(groups.max())}, but there are {count} groups of {size}"
            )
        return groups

    def _aligned(self, stored: Stored, part: tuple[range, range], groups: Tensor | None) -> Tensor | None:
        """One of its tensors, as numbers that stand where those of a part do; None for an optional one not there."""
        names = [f"{self._module}.{name}" for name in stored.names]
        name = next((name for name in names if name in self._files), names[0])
        if stored.is_optional and name not in self._files:
            return None
        dtype = stored.dtypes[0]
        layouts = [each for each in stored.layouts if self._is_usable(each, stored)]
        shapes = [self._stored_shape(layout, dtype) for layout in layouts]
        view = self._files.view(name, shapes, stored.dtypes)
        layout = layouts[shapes.index(tuple(view.shape if isinstance(view, Tensor) else view.get_shape()))]
        steps = [step(side, self._shape, self._scheme, dtype) for side in layout]
        wanted = [
            slice(part[side.axis].start // size, -(-part[side.axis].stop // size))
            for side, size in zip(layout, steps, strict=True)
        ]
        for dim, side in enumerate(layout):
            if groups is not None and side.unit == "group":
                wanted[dim], steps[dim] = ALL, 0
        tensor: Tensor = view[tuple(wanted)] if wanted else view
        for dim, size in enumerate(steps):
            if groups is not None and size == 0:
                tensor = tensor.index_select(dim, groups)
        return aligned(tensor, stored, layout, steps, part, self._scheme.bits)

    def _is_usable(self, layout: Layout, stored: Stored) -> bool:
        """A scheme of blocks has a scale for each of them, another has none."""
        is_blocked = any(side.unit == "block" for side in layout)
        return len(stored.layouts) == 1 or is_blocked == (self._scheme.block is not None)

    def _stored_shape(self, layout: Layout, dtype: str) -> tuple[int, ...]:
        sizes = (step(side, self._shape, self._scheme, dtype) for side in layout)
        return tuple(-(-self._shape[side.axis] // size) for side, size in zip(layout, sizes, strict=True))


def _shard_files(directory: Path) -> list[Path]:
    """The files that transformers would load: `model.safetensors`, else those of the index; else the only one."""
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            names = sorted(set(read_json(index, error=CheckpointError)["weight_map"].values()))
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a readable index of safetensors files: {error!r}") from error
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise CheckpointError(f"{directory} lacks {', '.join(missing)}, which {INDEX_FILE} names")
        return [directory / name for name in names]
    files = sorted(directory.glob("*.safetensors"))
    if len(files) > 1:
        raise CheckpointError(
            f"{directory} holds {len(files)} safetensors files and neither {SINGLE_FILE} nor {INDEX_FILE}, which "
            "would say which of them are the model"
        )
    if not files:
        pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pth"))
        hint = "; pickled weights are never loaded: convert them to safetensors" if pickled else ""
        raise CheckpointError(f"{directory} holds no *.safetensors file{hint}")
    return files


class RandomTensors:
    """Seeded weights of a sane scale: matrices N(0, 1/columns), norms `norm_weight`, biases 0.

    A tensor depends on the seed and its name only, so every shard of a model, on any number of ranks, agrees.
    """

    def __init__(self, *, seed: int, device: torch.device, dtype: torch.dtype, norm_weight: float = 1.0) -> None:
        self._seed, self._device, self._dtype, self._norm_weight = seed, device, dtype, norm_weight

    def __contains__(self, name: str) -> bool:
        return True

    def check_all_read(self, beside: tuple[str, ...] = ()) -> None:
        """Nothing is left over: a tensor comes into being when it is read."""

    def read(self, name: str, shape: tuple[int, ...], *part: slice) -> Tensor:
        part = part or (ALL,)
        if name.endswith("norm.weight"):
            return torch.full(shape, self._norm_weight, device=self._device, dtype=self._dtype)[part]
        if len(shape) == 1:
            return torch.zeros(shape, device=self._device, dtype=self._dtype)[part]
        generator = torch.Generator(self._device).manual_seed((self._seed << 32) ^ zlib.crc32(name.encode()))
        whole = torch.empty(shape, device=self._device, dtype=self._dtype)
        whole.normal_(std=1 / math.sqrt(shape[1]), generator=generator)
        return whole[part].contiguous()
