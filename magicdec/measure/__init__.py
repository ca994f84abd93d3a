from __future__ import annotations

from typing import TYPE_CHECKING

from magicdec.door import door

if TYPE_CHECKING:
    from magicdec.measure.configuration import (
        BenchmarkRequest,
        Outputs,
        Weights,
        check_device,
        check_devices,
        check_request,
        configuration_fields,
    )
    from magicdec.measure.engines import (
        Runtime,
        in_own_process,
        installed_engine,
        session_class,
    )
    from magicdec.measure.environment import (
        Clock,
        ReferenceKernels,
        ReferenceTimes,
        available_memory_bytes,
        bind_threads,
        median_times,
        prepare,
        spread_of_times,
    )
    from magicdec.measure.rank import (
        benchmark,
        configuration_key,
        known_records,
        measure_request,
    )
    from magicdec.measure.session import BenchmarkSession
    from magicdec.measure.utilisation import (
        bandwidth_bytes_per_s,
        copy_bytes_per_s,
        is_cuda,
        peak_flops_per_s,
        seconds_per_call,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
