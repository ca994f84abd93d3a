"""What must be set before any test imports Triton: without a GPU its kernels run in Triton's interpreter."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
