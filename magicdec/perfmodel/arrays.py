"""Inputs of the formulas as clean numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
LARGEST = 1e15


def as_array(value: Any, *, least: float = 0.0) -> Array:
    """Floats with NaN and everything below `least` replaced by it, and huge values cut to a finite one."""
    # fmax and fmin take the number where the other is NaN
    clipped: Array = np.fmin(np.fmax(np.asarray(value, dtype=np.float64), least), LARGEST)
    return clipped
