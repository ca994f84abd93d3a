"""Engine profiles: files, and what is refused in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from magicdec.errors import ConfigError
from magicdec.specs.engine import EngineProfile, engine_names, load_engine, save_engine


@pytest.mark.parametrize("name", engine_names())
def test_every_shipped_profile_loads_under_its_own_name(name: str) -> None:
    assert load_engine(name).name == name


def test_a_saved_profile_reads_back_equal(tmp_path: Path) -> None:
    profile = EngineProfile(
        name="mine",
        layer_overhead_s=1.5e-5,
        sampling_s_per_element=3e-10,
        sources={"a": "b"},
    )
    save_engine(profile, tmp_path / "mine.toml")
    assert load_engine(tmp_path / "mine.toml") == profile


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("name = 'x'\nlayer_overhead = 1.0", "layer_overhead"),
        ("name = 'x'\nlayer_overhead_s = 'long'", "layer_overhead_s"),
        ("layer_overhead_s = 1.0", "name"),
        ("name = 'x'\nlayer_overhead_s = nan", "layer_overhead_s"),
        ("name = 'x'\ngemm_factor = 0.0", "gemm_factor"),
        ("name = 'x'\nstep_overhead_s = -1.0", "step_overhead_s"),
        ("name = 'x'\nmemory_fraction = 1.5", "memory_fraction"),
        ("name = 'x'\nkv_reads = 'sometimes'", "kv_reads"),
        ("name = ", "not valid TOML"),
    ],
)
def test_a_bad_file_is_refused_naming_file_and_key(
    tmp_path: Path, text: str, named: str
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_engine(path)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("magicdec-2025", "magicdec-2024"),
        ("./nowhere.toml", r"cannot read engine profile nowhere.toml"),
    ],
)
def test_an_unknown_name_gets_the_nearest_and_a_missing_file_one_line(
    name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_engine(name)


def test_a_file_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    deep = ("deep.toml", "a = " + "[" * 5000 + "]" * 5000, "valid TOML")
    for name, text, what in (deep, ("wide.toml", 'name = "\udc80"', "UTF-8 text")):
        (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ConfigError, match=rf"{name} is not {what}"):
            load_engine(tmp_path / name)
