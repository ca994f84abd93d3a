"""magicdec: will speculative decoding pay, with which draft, draft-cache budget and gamma, and by
how much?
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magicdec.door import door

__version__ = "0.1.0"

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
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
    __all__.append("__version__")
