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
    profile = EngineProfile(name="mine", sources={"a": "b"}).with_constants(
        {"overheads.layer_overhead_s": 1.5e-5, "sampling.sampling_s_per_element": 3e-10}
    )
    save_engine(profile, tmp_path / "mine.toml")
    assert load_engine(tmp_path / "mine.toml") == profile


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("name = 'x'\n[overheads]\nlayer_overhead = 1.0", "layer_overhead"),
        ("name = 'x'\n[overheads]\nlayer_overhead_s = 'long'", "layer_overhead_s"),
        ("version = '1'", "name"),
        ("name = 'x'\n[overheads]\nlayer_overhead_s = nan", "layer_overhead_s"),
        ("name = 'x'\n[kernels]\ngemm_factor = 0.0", "gemm_factor"),
        ("name = 'x'\n[overheads]\nstep_overhead_s = -1.0", "step_overhead_s"),
        ("name = 'x'\n[memory]\nmemory_fraction = 1.5", "memory_fraction"),
        ("name = 'x'\n[kernels]\nkv_reads = 'sometimes'", "kv_reads"),
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


IN_TABLES = """
name = "mine"
[kernels]
gemm_factor = 0.8
[overheads]
step_overhead_s = 1e-3
[graphs]
captured_tokens = 512
[paths]
runner = "V1"
[paths.self_draft.V1.overheads]
sequence_overhead_s = 3e-5
[prefix_cache]
drops_last_unit = ["eagle3"]
[drafts."model/full".call]
method = "draft_model"
[drafts.ngram]
is_synchronous = true
search_s = 1e-5
[drafts.eagle3]
window_setting = "--window"
step_overhead_s = 2e-4
[drafts.suffix]
runs = false
search_s = 1e-5
[before."0.14".overheads]
step_overhead_s = 3e-3
[before."0.14".drafts.eagle3]
draft_overhead_s = 5e-4
[sources]
"kernels.gemm_factor" = "a fit"
"drafts.is_synchronous" = "its source"
"""


def profile_of(text: str, tmp_path: Path) -> EngineProfile:
    path = tmp_path / "profile.toml"
    path.write_text(text)
    return load_engine(path)


def test_a_version_and_a_self_draft_change_single_keys(tmp_path: Path) -> None:
    profile = profile_of(IN_TABLES, tmp_path)
    older = profile.of_version("0.12")
    assert older.overheads.step_overhead_s == 3e-3
    assert older.drafts["eagle3"].draft_overhead_s == 5e-4
    assert older.drafts["eagle3"].window_setting == "--window"
    assert profile.self_drafting.overheads.sequence_overhead_s == 3e-5
    assert [kind for kind in profile.drafts if profile.drafts[kind].runs] == [
        "model/full",
        "ngram",
        "eagle3",
    ]


def test_a_file_that_names_no_drafts_runs_all_of_them(tmp_path: Path) -> None:
    assert profile_of("name = 'x'", tmp_path) == EngineProfile(name="x")
    assert all(draft.runs for draft in EngineProfile(name="x").drafts.values())
    assert not profile_of("name = 'x'\n[drafts]", tmp_path).drafts


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("gemm_factor = 1.1", "gemm_factor"),
        ("drafts = ['ngram']", "drafts"),
        ("[drafts.ngramm]", "ngramm"),
        ("[before.'0.9'.kernels]\ngemm_factr = 1.0", "gemm_factr"),
        ("[before.'0.9'.kernels]\ngemm_factor = 'x'", "before.0.9"),
        ("[drafts.ngram.scan_s]\n100 = 2.0\n50 = 1.0", "scan_s"),
        ("kernels = 3", "kernels"),
        ("before = 3", "before"),
    ],
)
def test_a_key_outside_its_table_is_refused_in_one_line(
    tmp_path: Path, text: str, named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        profile_of(f"name = 'x'\n{text}", tmp_path)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_constant_is_found_and_changed_by_its_address() -> None:
    profile = load_engine("vllm")
    again = profile.with_constants(
        {
            "kernels.gemm_factor": 2.0,
            "drafts.eagle3.step_overhead_s": 0.5,
            "graphs.captured_tokens": 7,
        }
    )
    assert again.kernels.gemm_factor == again.constant("kernels.gemm_factor") == 2.0
    assert again.drafts["eagle3"].step_overhead_s == 0.5
    assert again.constant("drafts.eagle3.step_overhead_s") == 0.5
    assert again.graphs.captured_tokens == 7
    assert again.drafts["ngram"] == profile.drafts["ngram"]


@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm"])
def test_each_bound_of_a_draft_names_its_source(name: str) -> None:
    """Which drafts an engine runs, and from which version on, is read somewhere."""
    engine = load_engine(name)
    assert engine.sources["drafts.runs"]
    for tables in engine.before.values():
        for kind, changes in tables.get("drafts", {}).items():
            if "runs" in changes:
                assert engine.sources[f"drafts.{kind}.runs"]
    for kind, draft in engine.drafts.items():
        if draft.newest_version:
            assert engine.sources[f"drafts.{kind}.runs"]
