"""Kernels for one kind of device each, where no library has one good enough."""

from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """Whether Triton is installed; its kernels' modules cannot be imported without."""
    return find_spec("triton") is not None
