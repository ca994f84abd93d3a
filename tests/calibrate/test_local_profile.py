"""The files of a calibrated machine."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from magicdec.calibrate.local_profile import (
    LocalProfile,
    TimedPoint,
    load_local_profile,
    save_points,
)
from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import MeasuredProfile, constant_profile
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.specs.engine import load_engine


def test_a_profile_comes_back_from_its_files_whatever_lies_beside_them(
    tmp_path: Path,
) -> None:
    hardware = msgspec.structs.replace(
        load_hardware("a100-sxm-80gb"), reference_s=0.0065, compute_reference_s=0.01
    )
    laws = tuple(
        MeasuredProfile(
            model="embedded", draft_method=name, law=constant_profile(0.8).law
        )
        for name in ("snapkv", "streamingllm")
    )
    profile = LocalProfile(
        hardware=hardware, engine=load_engine("ours"), acceptance=laws
    )
    profile.save(tmp_path / "local.toml")
    file = save_points(
        [TimedPoint("linear", {"m": 4}, [1.0, 2.0, 3.0, 4.0])], tmp_path / "local.toml"
    )
    assert load_local_profile(tmp_path / "local.toml") == profile
    (point,) = json.loads(file.read_text())
    assert point == {
        "table": "linear",
        "m": 4,
        "time_s": 2.5,
        "spread": 1.0,
        "seconds": [1.0, 2.0, 3.0, 4.0],
        "speeds": [],
    }


def test_a_profile_without_its_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"local\.engine\.toml is missing"):
        load_local_profile(tmp_path / "local.toml")
