from __future__ import annotations

from typing import TYPE_CHECKING

from magicdec.door import door

if TYPE_CHECKING:
    from magicdec.validate.acceptance import (
        AcceptanceValidation,
        holds_rates,
        summary_line,
        validate_beliefs,
    )
    from magicdec.validate.demo import DemoResult, run_demo
    from magicdec.validate.evidence import validate_lanes
    from magicdec.validate.grid import Thresholds, choose_grid, run_grid
    from magicdec.validate.kernels import validate_kernels
    from magicdec.validate.pairs import PairRow, predict_pairs, validate_pairs
    from magicdec.validate.published_acceptance import validate_acceptance
    from magicdec.validate.published_speedups import validate_published
    from magicdec.validate.rows import by_cause, published, read_rows
    from magicdec.validate.serving import validate_serving
    from magicdec.validate.traffic import validate_traffic
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
