"""Lanes: the widths that measured servers need, what borrows from what, and what no source judges of
itself."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from evidence import DATA
from evidence.lane_table import TABLES, validate_lanes
from evidence.lanes import LEAST_WIDTH, JudgedFigure, Lanes, needed
from evidence.pairs import validate_pairs
from evidence.serving import validate_serving
from magicdec.counts import Z_90
from magicdec.errors import ConfigError
from magicdec.perfmodel.lanes import (
    ANY,
    LANES,
    Lane,
    LaneRow,
    evidence_in,
    evidence_of,
    lane_of,
    shipped,
)
from magicdec.perfmodel.setup import Setup
from magicdec.reports.sentences import evidence_line
from magicdec.specs.engine import load_engine
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec
from magicdec.validate.rows import published

HEAD = Lane("vllm", "from 0.14", "trained head", "dense", "measured")
RNG = np.random.default_rng(3)
SHIPPED = published("speculation_pairs.csv")
SERVERS = Path(__file__).parent / "server_tpot_sample.csv"


def drawn(
    lane: Lane, source: str, deviation: float, num: int, of_kernels: float = 0.0
) -> list[JudgedFigure]:
    errors = RNG.normal(0.0, math.hypot(deviation, of_kernels), num)
    return [
        JudgedFigure(lane, source, "speedup", float(error), of_kernels)
        for error in errors
    ]


def test_the_width_is_that_of_the_errors_beyond_those_of_the_kernels() -> None:
    rows = drawn(HEAD, "one", 0.1, 4000, of_kernels=0.07)
    width = needed(rows)
    assert width == pytest.approx(0.1, rel=0.05)
    inside = [abs(row.log_error) <= Z_90 * math.hypot(width, 0.07) for row in rows]
    assert np.mean(inside) == pytest.approx(0.9, abs=0.005)


def test_a_source_of_many_rows_weighs_as_much_as_one_of_few() -> None:
    large = drawn(HEAD, "large", 0.01, 5000)
    small = [JudgedFigure(HEAD, f"small {n}", "speedup", 0.3) for n in range(3)]
    assert needed(large + small) == pytest.approx(0.3 / Z_90, rel=1e-6)
    assert needed(large) == LEAST_WIDTH


def test_a_lane_of_few_sources_borrows_from_the_next_wider_one() -> None:
    others = HEAD._replace(device="borrowed")
    rows = drawn(HEAD, "a", 0.05, 50)
    rows += drawn(others, "b", 0.2, 50) + drawn(others, "c", 0.2, 50)
    width, owner = Lanes(rows).width(HEAD, "speedup")
    assert owner == HEAD._replace(device=ANY)
    assert width == pytest.approx(needed(rows))
    width, owner = Lanes(rows).width(HEAD, "speedup", without="b")
    assert owner.draft == ANY  # two sources are left, however wide the lane


def test_no_lane_that_borrows_is_narrower_than_its_own_rows_need() -> None:
    rows = drawn(HEAD._replace(device="borrowed"), "a", 0.3, 100)
    for source in "bcd":
        rows += drawn(HEAD, source, 0.03, 100)
    own, owner = Lanes(rows).width(rows[0].lane, "speedup")
    assert owner.device == ANY
    assert own == pytest.approx(needed(rows[:100]))


def test_a_lane_is_no_narrower_than_a_measured_sibling() -> None:
    """Servers of one sort of draft that were measured on other devices, by one source."""
    sibling = HEAD._replace(draft="draft model", device="borrowed")
    rows = drawn(sibling, "a", 0.3, 100)
    for source in "bcd":
        rows += drawn(HEAD, source, 0.03, 100)
    unmeasured = sibling._replace(device="measured")
    width, _ = Lanes(rows).width(unmeasured, "speedup")
    assert width == pytest.approx(needed(rows[:100]))
    few, _ = Lanes([*rows[:5], *rows[100:]]).width(unmeasured, "speedup")
    assert few < 0.5 * width  # five rows tell no width


def test_the_shipped_lanes_are_no_narrower_than_measured_siblings() -> None:
    """A 72B model with a 7B draft on A100s: the only draft model was measured on another device."""
    lane = HEAD._replace(draft="draft model")
    (measured,) = {
        row.width
        for (of, figure), row in shipped().items()
        if of.draft == "draft model" and figure == "speedup"
    }
    assert lane not in {of for of, _ in shipped()}
    assert evidence_in(lane).width >= measured


def test_what_a_source_measured_does_not_set_the_width_that_judges_it() -> None:
    """Three sources within 3 %, one 40 % off: its rows lie outside, and the others inside."""
    rows = [JudgedFigure(HEAD, "odd", "speedup", 0.4) for _ in range(10)]
    for source in "abc":
        rows += drawn(HEAD, source, 0.02, 40)
    lanes = Lanes(rows)
    assert lanes.coverage(rows[:10]) == 0.0
    assert lanes.coverage(rows[10:]) == 1.0
    assert lanes.width(HEAD, "speedup")[0] > 0.4 / Z_90 - 1e-9


def test_the_command_writes_the_table_that_plans_read(tmp_path: Path) -> None:
    output = tmp_path / "lanes.csv"
    document = validate_lanes([*SHIPPED, SERVERS], output=output)
    assert output.read_text().splitlines()[0] == LANES.read_text().splitlines()[0]
    assert output.read_text().splitlines()[0].split(",") == [*LaneRow.__struct_fields__]
    everything = [group for group in document["groups"] if group["rows"]]
    pairs = [g for g in everything if g["name"] == "speedup: any engine"]
    assert pairs[0]["rows"] == 42


@pytest.mark.slow
def test_the_published_lanes_follow_from_the_rows(tmp_path: Path) -> None:
    lanes = tmp_path / "lanes.csv"
    calibration = tmp_path / "calibration.csv"
    document = validate_lanes(TABLES, output=lanes, calibration_output=calibration)
    assert lanes.read_text() == LANES.read_text()
    assert calibration.read_text() == (DATA / "calibration.csv").read_text()
    counts = {group["name"]: group["rows"] for group in document["groups"]}
    assert counts["speedup, acceptance believed: any engine"] == 393
    assert counts["speedup: any engine"] == 289
    assert counts["step without a draft: any engine"] == 1462


def test_a_source_left_out_is_judged_alone_and_by_the_others_widths() -> None:
    source = "GloriaXimingLu/inferencex-profiling"
    document = validate_pairs(SHIPPED, leave_out=source)
    assert {g.get("source", source) for g in document["groups"]} == {source}
    with pytest.raises(ConfigError, match="did you mean"):
        validate_pairs(SHIPPED, leave_out="GloriaXimingLu/inferencex")
    groups = validate_serving([SERVERS], leave_out="NVIDIA gap-analysis")["groups"]
    assert {g["name"].split("/")[0] for g in groups} == {"all", "NVIDIA gap-analysis"}


def test_a_lane_counts_the_servers_of_each_device() -> None:
    """Those with a plan's own device are no more than all, and none where it was not measured."""
    rows = [
        JudgedFigure(HEAD, "a", "speedup", 0.1, device="one"),
        JudgedFigure(HEAD, "a", "speedup", 0.1, device="two"),
        JudgedFigure(HEAD, "b", "speedup", 0.1, device="two"),
    ]
    (own,) = [row for row in Lanes(rows).rows() if row.lane == HEAD]
    assert own.rows_by_device == {"one": 1, "two": 2}
    spec = SpeculationSpec(draft="eagle3", draft_method="eagle3", gamma=3)
    here = {}
    for device in ("gh200-96gb", "mi300x-192gb"):
        setup = Setup.of("llama-3.1-8b", device, load_engine("vllm"), spec)
        evidence = evidence_of(setup)
        assert evidence.rows > 0
        here[device] = evidence.rows_here
    assert here["mi300x-192gb"] == 0 < here["gh200-96gb"]
    assert "none with this device" in evidence_line(evidence)


def test_a_plan_of_an_older_version_is_in_that_versions_lane() -> None:
    spec = SpeculationSpec(draft="suffix", draft_method="suffix", gamma=5)
    for version in ("0.12", "0.32"):
        engine = load_engine(f"vllm@{version}")
        setup = Setup.of("qwen3-30b-a3b", "a100-pcie-80gb", engine, spec)
        evidence = evidence_of(setup)
        assert ("before 0.14" in evidence.lane) == (version == "0.12")


def test_every_setup_has_a_lane_and_a_width() -> None:
    for draft, method in (("eagle3", "eagle3"), ("ngram", "ngram"), ("self", "topk")):
        for engine in ("vllm", "sglang", "trtllm"):
            spec = SpeculationSpec(
                draft=draft, draft_method=method, draft_budget=512, gamma=3
            )
            setup = Setup.of(
                "llama-3.1-8b",
                "h100-sxm-80gb",
                load_engine(engine),
                spec,
                sampling=SamplingSpec(),
            )
            evidence = evidence_in(lane_of(setup))
            assert LEAST_WIDTH <= evidence.width < 0.5
            known = shipped().get((lane_of(setup), "speedup"))
            assert evidence.rows == (known.rows if known else 0)


def test_an_unmeasured_sort_of_draft_is_as_wide_as_all_sorts_together() -> None:
    lane = HEAD._replace(draft="something new")
    whole = shipped()[Lane(ANY, ANY, ANY, ANY, ANY), "speedup"]
    assert evidence_in(lane).width == whole.width
    assert evidence_in(lane).rows == 0


def test_a_lane_of_few_sources_is_no_surer_than_its_engine() -> None:
    """Two sources measured SGLang's heads, two vLLM's with their devices, nobody TensorRT-LLM's."""
    speculation = SpeculationSpec(draft="eagle3", draft_method="eagle3")
    widths = {}
    for name in ("sglang", "trtllm", "vllm"):
        setup = Setup.of("llama-3.1-8b", "h100", name, speculation)
        stated = setup.engine.errors.speedup_relative_error
        widths[name] = evidence_in(lane_of(setup)).width
        assert evidence_of(setup).width == max(widths[name], stated)
    assert widths["vllm"] < load_engine("vllm").errors.speedup_relative_error
    assert widths["sglang"] > load_engine("sglang").errors.speedup_relative_error
