"""Where weights come from: a Hugging Face directory (safetensors only, never pickle), or a seeded generator."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from magicdec.errors import CheckpointError
from magicdec.runtime.widening import widened_blocks, widened_mxfp4

ALL = slice(None)
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
BLOCK_SCALES = "_scale_inv"
MX_BLOCKS, MX_SCALES = "_blocks", "_scales"
"""How the names of a quantised tensor's parts end."""
MX_GROUP = 32
"""Inputs that share a scale in mxfp4."""
COMPUTED_TENSORS = ("rotary_emb.inv_freq",)
"""How tensors end that older checkpoints store and their configuration determines."""


class TensorSource(Protocol):
    """Gives named tensors of known shape, or a part of them."""

    def read(self, name: str, shape: tuple[int, ...], *part: slice) -> Tensor:
        """A part of a tensor which as a whole must have `shape`: a slice of each of the first dimensions."""

    def check_all_read(self, beside: tuple[str, ...] = ()) -> None:
        """Raises CheckpointError when there is a tensor that nobody asked for: the model computes something else.

        Names that begin with one of `beside` are none of its business."""

    def __contains__(self, name: str) -> bool: ...


class CheckpointDirectory:
    """The safetensors files of a directory. Only the wanted part of each tensor is read.

    Raises CheckpointError when there are none, one is damaged or missing, or a tensor is absent, misshapen, or not of
    floating-point numbers.
    """

    def __init__(
        self, directory: Path, *, device: torch.device, dtype: torch.dtype, block: tuple[int, int] | None = None
    ) -> None:
        """`block`: rows and columns that share a scale, of a checkpoint in fp8."""
        self._device, self._dtype, self._block = device, dtype, block
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
        if self._block is not None and name + BLOCK_SCALES in self._files:
            wanted = self._read_blocks(name, shape, *part)
        elif name + MX_BLOCKS in self._files and len(shape) == 3:
            wanted = self._read_mxfp4(name, shape, *part)
        else:
            wanted = self._view(name, shape, FLOAT_DTYPES)[part or ...]
        # Into memory of torch's own alignment, whatever the file's.
        return torch.empty(wanted.shape, device=self._device, dtype=self._dtype).copy_(wanted)

    def _read_blocks(self, name: str, shape: tuple[int, ...], rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """A part of a matrix in fp8, by the scales of its blocks."""
        assert self._block is not None
        starts, scaled = [], []
        for size, block, wanted in zip(shape, self._block, (rows, columns), strict=True):
            start, stop, _ = wanted.indices(size)
            starts.append(start)
            scaled.append(slice(start // block, -(-stop // block)))
        data = self._view(name, shape, ("F8_E4M3",))[rows, columns]
        grid = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=True))
        scales = self._view(name + BLOCK_SCALES, grid, FLOAT_DTYPES)[tuple(scaled)]
        return widened_blocks(data, scales, block=self._block, first=(starts[0], starts[1]))

    def _read_mxfp4(
        self, name: str, shape: tuple[int, ...], experts: slice = ALL, inputs: slice = ALL, outputs: slice = ALL
    ) -> Tensor:
        """A part of stacked experts' matrices [E, inputs, outputs], stored as [E, outputs, inputs] in mxfp4."""
        count, num_inputs, num_outputs = shape
        groups = num_inputs // MX_GROUP
        stored = (count, num_outputs, groups)
        first, stop, _ = inputs.indices(num_inputs)
        touched = slice(first // MX_GROUP, -(-stop // MX_GROUP))
        blocks = self._view(name + MX_BLOCKS, (*stored, MX_GROUP // 2), ("U8",))[experts, outputs, touched]
        scales = self._view(name + MX_SCALES, stored, ("U8",))[experts, outputs, touched]
        offset = touched.start * MX_GROUP
        return widened_mxfp4(blocks, scales)[..., first - offset : stop - offset].transpose(1, 2)

    def _view(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Any:
        """A tensor that is not read yet. Raises CheckpointError where it is absent, misshapen or of another format."""
        if name not in self._files:
            raise CheckpointError(f"{self._directory} has no tensor {name}, which its config.json calls for")
        self._read.add(name)
        view = self._files[name].get_slice(name)
        if view.get_dtype() not in dtypes:
            raise CheckpointError(
                f"{self._directory}: tensor {name} is of {view.get_dtype()}, which can be planned but not run; choose "
                "a checkpoint in bf16, fp16, fp32, fp8 by blocks or mxfp4"
            )
        found = tuple(view.get_shape())
        if found != shape:
            raise CheckpointError(
                f"{self._directory}: tensor {name} has shape {list(found)}, but its config.json calls for {list(shape)}"
            )
        return view

    def check_all_read(self, beside: tuple[str, ...] = ()) -> None:
        unread = (name for name in self._files if name not in self._read)
        left = sorted(name for name in unread if not name.endswith(COMPUTED_TENSORS) and not name.startswith(beside))
        if left:
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            raise CheckpointError(
                f"{self._directory}: tensor {left[0]}{more} has no place in the model that its config.json describes"
            )


def _shard_files(directory: Path) -> list[Path]:
    """The files that transformers would load: `model.safetensors`, else those of the index; else the only one."""
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
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
