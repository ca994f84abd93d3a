"""Passes of a model on a device and an engine, from plain numbers."""

from __future__ import annotations

from typing import Any

from magicdec.perfmodel import forward
from magicdec.perfmodel.forward import Pass
from magicdec.perfmodel.kernels.op import ForwardTime, Where
from magicdec.perfmodel.kernels.profile import HardwareProfile
from magicdec.specs.engine import EngineProfile
from magicdec.specs.model import ModelSpec
from magicdec.specs.precision import Precision


def forward_pass(
    model: ModelSpec, hw: HardwareProfile, engine: EngineProfile, **numbers: Any
) -> ForwardTime:
    formats = {
        name: numbers.pop(name)
        for name in ("weight_dtype", "kv_dtype")
        if name in numbers
    }
    at = Where(hw, engine, Precision(**formats))
    return forward.forward_pass(
        model, Pass(at=at, tp=numbers.pop("tp_size", 1), **numbers)
    )


def prefill(
    model: ModelSpec, hw: HardwareProfile, engine: EngineProfile, **numbers: Any
) -> ForwardTime:
    return forward.prefill(
        model, Where(hw, engine, Precision()), tp=numbers.pop("tp_size", 1), **numbers
    )
