from __future__ import annotations

from typing import TYPE_CHECKING

from magicdec.door import door

if TYPE_CHECKING:
    from magicdec.calibrate.acceptance_bench import (
        AcceptanceRequest,
        fit_profiles,
        measure_acceptance,
    )
    from magicdec.calibrate.local_profile import (
        LocalProfile,
        acceptance_path,
        engine_path,
        load_local_profile,
        save_points,
    )
    from magicdec.calibrate.machine import Calibration, calibrate, obtain_profile
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
