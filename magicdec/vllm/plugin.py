"""The entry point in vLLM's group of plugins, called in each process of the engine."""

from __future__ import annotations


def register() -> None:
    """Makes the draft known to a tested version of the engine. It does nothing until a
    configuration names the draft; an untested version stays as it is, and refuses the draft when it
    is named (draft.py)."""
    import vllm

    from magicdec.vllm.patches import apply_patches
    from magicdec.vllm.support import is_tested

    if is_tested(vllm.__version__):
        apply_patches()
