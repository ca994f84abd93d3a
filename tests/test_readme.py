"""README and docs/ say what the records say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from scripts.readme_table import agree

ROOT = Path(__file__).resolve().parent.parent


def test_tables_and_picture_are_what_the_records_give() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "readme_table.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("2.30 1.97-2.68 pays", "2.31 1.97-2.68 pays", True),
        ("2.30 1.97-2.68 pays", "2.36 1.97-2.68 pays", False),
        ("2.30 1.97-2.68 pays", "2.30 1.97-2.68 unclear", False),
        ("streamingllm 512 5\neagle3 - 1", "eagle3 - 1\nstreamingllm 512 5", False),
        ("gamma 5", "gamma 4", False),
    ],
)
def test_a_plan_that_is_out_of_date_is_found(old: str, new: str, is_same: bool) -> None:
    """Its words, rows and verdicts in their order, and its numbers to 2 %."""
    texts = [
        f"# x\n<!-- plan -->\n{shown}\n<!-- /plan -->\nrest" for shown in (old, new)
    ]
    assert agree(*texts) == is_same
    assert not agree(texts[0], texts[0].replace("rest", "2 rests"))


def errors(path: Path) -> dict[str, np.ndarray]:
    """Predicted over measured minus one of each term, "raw" and with the prediction rescaled to the times of the
    reference kernels, and whether each speedup is inside its interval: from the file's JSON alone."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    fields = ("batch_size", "context_len", "draft_method", "draft_budget", "gamma")
    predicted = {
        tuple(r.get(f) for f in fields): r for r in rows if r["source"] == "calibrated"
    }
    measured = [r for r in rows if r["source"] == "measured" and r.get("gamma", 0) > 0]
    pairs = [(predicted[tuple(m.get(f) for f in fields)], m) for m in measured]

    def times(side: int, name: str) -> np.ndarray:
        return np.array([pair[side][name] for pair in pairs])

    memory = times(1, "reference_s") / times(0, "reference_s")
    compute = times(1, "compute_reference_s") / times(0, "compute_reference_s")
    steps = ("autoregressive_step_s", "draft_step_s", "verify_step_s", "step_s")
    shares = {
        name: np.array([p["memory_shares"][name] for p, _ in pairs]) for name in steps
    }
    scale = {
        name: shares[name] * memory + (1 - shares[name]) * compute for name in steps
    }
    scale["speedup"] = scale["autoregressive_step_s"] / scale["step_s"]
    found = {name: times(0, name) / times(1, name) - 1 for name in scale}
    found |= {
        f"normalised {name}": factor * (found[name] + 1) - 1
        for name, factor in scale.items()
    }
    measured_speedup = times(1, "speedup")
    inside = (times(0, "speedup_low") <= measured_speedup) & (
        measured_speedup <= times(0, "speedup_high")
    )
    loads = [(int(row["batch_size"]), int(row["context_len"])) for row in measured]
    corners = {}
    for load in set(loads):
        chosen = [place for place, other in enumerate(loads) if other == load]
        corners[load] = float(np.median(np.abs(found["speedup"][chosen])))
    return found | {"inside": inside, "corners": corners}


def stated(pattern: str, where: str = "docs/validation.md") -> list[str]:
    text = " ".join((ROOT / where).read_text(encoding="utf-8").split())
    match = re.search(pattern, text)
    assert match is not None, pattern
    return list(match.groups())


def percent(values: np.ndarray) -> str:
    return f"{100 * np.median(np.abs(values)):.1f}"


def test_the_errors_stated_of_the_demo_are_those_of_its_records() -> None:
    found = errors(ROOT / "results" / "demo-2-cores.jsonl")
    assert stated(r"over all (\d+) configurations: step time ([\d.]+)%, speedup ([\d.]+)%") == [
        str(found["step_s"].size), percent(found["step_s"]), percent(found["speedup"]),
    ]  # fmt: skip
    assert stated(r"(\d+) of the (\d+) measured speedups lie in") == [
        str(found["inside"].sum()), str(found["inside"].size),
    ]  # fmt: skip
    assert stated(r"Rescaled to the speed of memory and processor during the runs: ([\d.]+)% and ([\d.]+)%") == [
        percent(found["normalised step_s"]), percent(found["normalised speedup"]),
    ]  # fmt: skip


def test_the_errors_stated_of_the_grid_are_those_of_its_records() -> None:
    found = errors(ROOT / "results" / "grid-2-cores.jsonl")
    steps = ("autoregressive_step_s", "draft_step_s", "verify_step_s", "step_s")
    assert stated(r"(\d+) points\]\S* the median error of the speedup is ([\d.]+) %, and (\d+) lie", "README.md") == [
        str(found["inside"].size), percent(found["speedup"]), str(found["inside"].sum()),
    ]  # fmt: skip
    bias = 100 * np.median(found["speedup"])
    side = "high" if bias > 0 else "low"
    assert stated(r"median prediction is (\d+) % too (\w+)", "README.md") == [
        f"{abs(bias):.0f}", side,
    ]  # fmt: skip
    assert stated(r"the median prediction was ([\d.]+) % too (\w+)") == [
        f"{abs(bias):.1f}", side,
    ]  # fmt: skip
    worst = max(found["corners"].items(), key=lambda item: item[1])
    assert stated(r"worst corner, batch (\d+) at context (\d+), errs by ([\d.]+) %", "README.md") == [
        *map(str, worst[0]), f"{100 * worst[1]:.1f}",
    ]  # fmt: skip
    assert stated(r"median error of the predicted speedup was ([\d.]+) %, and ([\d.]+) % after rescaling") == [
        percent(found["speedup"]), percent(found["normalised speedup"]),
    ]  # fmt: skip
    assert stated(
        r"off by ([\d.]+) % \(autoregressive\), ([\d.]+) % \(draft\), ([\d.]+) % \(verification\) and ([\d.]+) %"
    ) == [percent(found[f"normalised {name}"]) for name in steps]
    assert stated(r"(\d+) of the (\d+) measured speedups lay inside") == [
        str(found["inside"].sum()), str(found["inside"].size),
    ]  # fmt: skip


def test_the_errors_stated_of_heads_are_those_of_their_records() -> None:
    found = errors(ROOT / "results" / "grid-heads-2-cores.jsonl")

    def bias(name: str) -> str:
        return f"{100 * np.median(found[name]):+.1f}"

    assert stated(r"a head's predicted speedup was ([\d.]+) %, its bias (\S+) %, and (\d+) of the (\d+)") == [
        percent(found["speedup"]), bias("speedup"), str(found["inside"].sum()), str(found["inside"].size),
    ]  # fmt: skip
    assert stated(r"own step was off by ([\d.]+) %, with a bias of (\S+) %") == [
        percent(found["draft_step_s"]), bias("draft_step_s"),
    ]  # fmt: skip


def test_the_conditions_stated_of_the_grid_are_those_of_its_records() -> None:
    """Lowest and highest memory bandwidth, and the median spread of a speedup's repetitions."""
    rows = [
        json.loads(line)
        for line in (ROOT / "results" / "grid-2-cores.jsonl").read_text().splitlines()
    ]
    measured = [r for r in rows if r["source"] == "measured" and r.get("gamma", 0) > 0]
    bandwidths = [r["memory_bytes_per_s"] / 1e9 for r in measured]
    spreads = [
        np.ptp(r["speedup_samples"]) / np.median(r["speedup_samples"]) for r in measured
    ]
    assert stated(r"varied between (\d+) and (\d+) GB/s, and repetitions of one point spread by (\d+) %") == [
        f"{min(bandwidths):.0f}", f"{max(bandwidths):.0f}", f"{100 * np.median(spreads):.0f}",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["demo-2-cores", "grid-2-cores"])
def test_validate_records_prints_what_numpy_computes(
    name: str, runner: CliRunner
) -> None:
    """Medians, 90th percentiles, coverage and regret, from the records' JSON."""
    path = ROOT / "results" / f"{name}.jsonl"
    found = errors(path)
    printed = runner.invoke(app, ["validate", "records", str(path), "--format", "json"])
    assert printed.exit_code == 0, printed.output
    document = json.loads(printed.output)
    for term, summary in document["summary"].items():
        for prefix in ("", "normalised ") if term != "expected_tokens_per_step" else ():
            size = np.abs(found[prefix + term])
            key = prefix.replace(" ", "_")
            assert summary[f"{key}median_error"] == pytest.approx(np.median(size))
            assert summary[f"{key}p90_error"] == pytest.approx(np.quantile(size, 0.9))
    assert document["coverage"] == pytest.approx(found["inside"].mean())
    assert len(document["rows"]) == found["inside"].size
    table = runner.invoke(app, ["validate", "records", str(path)]).output
    for term in ("step_s", "speedup"):
        assert f"{percent(found[term])}%" in table
        assert f"{percent(found[f'normalised {term}'])}%" in table


def test_the_regret_of_the_grid_is_that_of_its_records(runner: CliRunner) -> None:
    """Per batch and context: the best on one half of the repetitions, compared with the planned one on the other."""
    rows = [
        json.loads(line)
        for line in (ROOT / "results" / "grid-2-cores.jsonl").read_text().splitlines()
    ]
    fields = ("batch_size", "context_len", "draft_method", "draft_budget", "gamma")
    predicted = {
        tuple(r.get(f) for f in fields): r["speedup"]
        for r in rows
        if r["source"] == "calibrated"
    }
    cases: dict[tuple[int, int], list[tuple[float, list[float]]]] = {}
    for r in rows:
        if r["source"] == "measured" and r.get("gamma", 0) > 0:
            point = (predicted[tuple(r.get(f) for f in fields)], r["speedup_samples"])
            cases.setdefault((r["batch_size"], r["context_len"]), []).append(point)
    losses = []
    for points in cases.values():
        even, odd = (
            np.array([1.0, *(np.median(samples[k::2]) for _, samples in points)])
            for k in (0, 1)
        )
        planned = np.argmax([1.0, *(guess for guess, _ in points)])
        losses += [
            1 - odd[planned] / odd[even.argmax()],
            1 - even[planned] / even[odd.argmax()],
        ]
    printed = runner.invoke(
        app,
        ["validate", "records", str(ROOT / "results" / "grid-2-cores.jsonl"), "--format", "json"],
    )  # fmt: skip
    assert json.loads(printed.output)["regret"] == pytest.approx(np.mean(losses))


@pytest.fixture(scope="module")
def runner() -> CliRunner:
    register_commands()
    return CliRunner()


def test_the_trust_section_is_the_first_five_lines_of_the_accuracy_page() -> None:
    """And these follow from the aggregates that ship."""
    from evidence.accuracy_page import summary

    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for line in summary():
        assert line in page
        assert line in readme
