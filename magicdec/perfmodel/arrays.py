"""Inputs of the formulas as clean numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
LARGEST = 1e15


def as_array(value: Any, *, least: float = 0.0) -> Array:
    """Floats with NaN and everything below `least` replaced by it, and huge values cut to a finite one."""
    array = np.nan_to_num(np.asarray(value, dtype=np.float64), nan=least, posinf=LARGEST, neginf=least)
    clipped: Array = np.clip(array, least, LARGEST)
    return clipped
