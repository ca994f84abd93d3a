from __future__ import annotations

from typing import TYPE_CHECKING

from magicdec.door import door

if TYPE_CHECKING:
    from magicdec.validate.demo import DemoResult, run_demo
    from magicdec.validate.grid import Thresholds, choose_grid, run_grid
    from magicdec.validate.pair_errors import validate_pairs
    from magicdec.validate.published_speedups import validate_published
    from magicdec.validate.rows import by_cause, published
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
