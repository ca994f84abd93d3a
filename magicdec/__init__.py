"""magicdec: will speculative decoding pay, with which draft, draft-cache budget and gamma, and by
how much?
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from magicdec.api import (
        engines,
        hardware,
        load_plan,
        load_records,
        models,
        plan,
        predict,
        report,
        sensitivity,
        simulate,
    )

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "engines",
    "hardware",
    "load_plan",
    "load_records",
    "models",
    "plan",
    "predict",
    "report",
    "sensitivity",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """The interface of magicdec/api.py, imported when first used, so that `import magicdec` stays
    light.
    """
    if name in __all__:
        from magicdec import api

        return getattr(api, name)
    raise AttributeError(f"module 'magicdec' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
