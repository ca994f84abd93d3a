"""Kernels for one kind of device each, where no library has one good enough."""

from functools import cache
from importlib.util import find_spec

import torch

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@cache
def has_triton() -> bool:
    """Whether Triton is installed; its kernels' modules cannot be imported without."""
    return find_spec("triton") is not None


def can_fuse(x: torch.Tensor) -> bool:
    """Whether Triton's kernels take this tensor: on a GPU, of a dtype that fp32 arithmetic serves."""
    return x.is_cuda and x.dtype in TRITON_DTYPES and has_triton()
