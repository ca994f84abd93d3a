"""The entry point in vLLM's group of plugins, called in each process of the engine."""

from __future__ import annotations

import logging


def register() -> None:
    """Makes the draft known to a tested version of the engine, and does nothing more until a
    configuration names the draft. An untested version stays as it is, with one line that says so,
    and refuses the draft when it is named (draft.py)."""
    import vllm

    from magicdec.errors import ConfigError
    from magicdec_vllm.patches import apply_patches
    from magicdec_vllm.support import check_version

    try:
        check_version(vllm.__version__)
    except ConfigError as untested:
        logging.getLogger(__name__).warning("%s; the engine is left as it is", untested)
        return
    apply_patches()
