"""What must be set before any test imports torch or Triton, and holds for the commands that tests start."""

from __future__ import annotations

import os
from pathlib import Path

# Threads that spin while they wait take the time of those that they wait for, where others use the machine too.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # without a GPU kernels run in Triton's interpreter
