"""Counts the variants of the attention kernels that Triton would compile for a calibration and for the campaign's
headline rows; prints one JSON object. Launches are recorded instead of made, so no GPU is needed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from magicdec.calibrate.kernel_bench import CUDA_ATTENTION_SHAPES, CUDA_QUERY_LENGTHS
from magicdec.runtime.kernels import Visible, triton_attention

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
MULTIPROCESSORS = 132
ROWS = ((48, 16_984), (25, 32_600), (24, 16_984), (12, 32_600))
"""Batches and slots of the headline on an H200 and on an H100."""
DRAFT_SLOTS = 530
variants: dict[str, set[tuple[Any, ...]]] = defaultdict(set)


class Recorder:
    """Stands for a kernel: keeps what each launch is compiled for, by Triton's rules."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            names = [parameter.name for parameter in self._kernel.params]
            values = dict(zip(names, arguments, strict=False)) | named
            compiled = [
                kind(parameter, values[parameter.name])
                for parameter in self._kernel.params
            ]
            options = sorted(set(named.items()) - set(values.items()))
            variants[self._kernel.__name__].add((*compiled, *options))

        return launch


def kind(parameter: Any, value: Any) -> tuple[Any, ...]:
    """What of an argument a variant depends on."""
    if parameter.is_constexpr:
        return ("value", value)
    if isinstance(value, torch.Tensor):
        return ("pointer", str(value.dtype))
    if not isinstance(value, int):
        return ("float",)
    bits = 64 if abs(value) >= 2**31 else 32
    if parameter.do_not_specialize:
        return (bits,)
    return (bits, value == 1, value % 16 == 0)


def launch(batch: int, slots: int, tokens: int) -> None:
    query = torch.empty(
        batch, tokens, HEADS, HEAD_DIM, device="meta", dtype=torch.bfloat16
    )
    keys, values = torch.empty(
        2, batch, KV_HEADS, slots, HEAD_DIM, device="meta", dtype=torch.bfloat16
    )
    last_BT = torch.empty(tokens, dtype=torch.long, device="meta").expand(batch, -1)
    visible = Visible(last_BT=last_BT, stop=slots)
    triton_attention.decode_attention(query, keys, values, visible)


def main() -> None:
    triton_attention._num_multiprocessors = lambda device: MULTIPROCESSORS
    for name in ("_split_kernel", "_combine_kernel"):
        setattr(triton_attention, name, Recorder(getattr(triton_attention, name)))
    for batch, slots in CUDA_ATTENTION_SHAPES:
        for tokens in CUDA_QUERY_LENGTHS:
            launch(batch, slots, tokens)
    for batch, slots in ROWS:
        launch(batch, DRAFT_SLOTS, 1)
        for tokens in (1, 3, 4, 5):
            launch(batch, slots, tokens)
    print(json.dumps({name: len(found) for name, found in variants.items()}))


if __name__ == "__main__":
    main()
