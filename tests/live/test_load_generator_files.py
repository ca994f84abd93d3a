"""Files that real load generators wrote (tests/data/load_generators), and a plan of loads that is only said."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from magicdec.errors import ConfigError
from magicdec.live.benchmark_results import points_of, read_runs
from magicdec.live.http import Address
from magicdec.perfmodel.acceptance import load_profile
from magicdec.specs.engine import load_engine

DATA = Path(__file__).parent.parent / "data" / "load_generators"
PROMPTS = (128, 512, 1536)
USERS = (1, 2, 4)


def unpacked(name: str, folder: Path) -> Path:
    path = folder / name.removesuffix(".gz")
    path.write_bytes(gzip.decompress((DATA / name).read_bytes()))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    folder = tmp_path_factory.mktemp("results")
    return {
        "guidellm": [unpacked(f"guidellm-{p}.json.gz", folder) for p in PROMPTS],
        "aiperf": [unpacked(f"aiperf-{c}-{p}.jsonl.gz", folder) for p in PROMPTS for c in USERS],
    }


@pytest.mark.parametrize(("tool", "sizes"), [("guidellm", (6, 6, 6)), ("aiperf", (3, 4, 6))])
def test_real_files_hold_the_requests_that_were_sent(
    tool: str, sizes: tuple[int, ...], files: dict[str, list[Path]]
) -> None:
    runs = [run for path in files[tool] for run in read_runs(path)]
    assert [len(run) for run in runs] == [*sizes] * 3
    for number, run in enumerate(runs):
        assert all(request.output_len == 32 for request in run)
        assert all(request.prompt_len == PROMPTS[number // 3] for request in run)
    several = [request.tokens_per_event for run in runs for request in run]
    assert min(several) == 1.0
    assert max(several) > 1.05  # without a draft: an event of two tokens, or without text


def test_a_lone_requests_step_is_what_each_tool_calls_its_latency_between_tokens(files: dict[str, list[Path]]) -> None:
    told = []
    for path in files["guidellm"]:
        (first, *_) = json.loads(path.read_text())["benchmarks"]
        told.append([each["inter_token_latency_ms"] for each in first["requests"]["successful"]])
    for path in files["aiperf"][:: len(USERS)]:
        records = [json.loads(line)["metrics"] for line in path.read_text().splitlines()]
        told.append([each["inter_token_latency"]["value"] for each in records])
    alone = [read_runs(path)[0] for path in (*files["guidellm"], *files["aiperf"][:: len(USERS)])]
    for latencies_ms, run in zip(told, alone, strict=True):
        for latency_ms, request in zip(latencies_ms, run, strict=True):
            step_s = (request.last_s - request.first_s) / (request.output_len - 1)
            assert 1e3 * step_s == pytest.approx(latency_ms, rel=1e-3)


@pytest.mark.parametrize("tool", ["guidellm", "aiperf"])
def test_an_engine_is_fitted_to_real_files(tool: str, files: dict[str, list[Path]], tmp_path: Path) -> None:
    output = tmp_path / "server.engine.toml"
    register_commands()
    options = [word for path in files[tool] for word in ("--results", str(path))]
    done = CliRunner().invoke(
        app, ["calibrate", *options, "--model", "embedded", "--hardware", "l40s-48gb", "-o", str(output)]
    )
    assert done.exit_code == 0, done.output
    loads = json.loads((tmp_path / "server.engine.loads.json").read_text())["loads"]
    points = points_of([run for path in files[tool] for run in read_runs(path)])
    assert len(loads) == len(points) >= 8
    # on a device on which so small a model's products take microseconds, all of a step is fixed cost
    fitted = [row for row in loads if not row["judges"]]
    engine = load_engine(output)
    for row in fitted:
        cost = engine.forward_overhead_s + engine.sequence_overhead_s * row["concurrency"]
        assert cost < (1 + row["error"]) * row["tpot_s"] < 1.2 * cost


DRAFTED = {"aiperf-drafted.jsonl.gz": (388, 371, 366, 364), "guidellm-drafted.json.gz": (398, 393, 390, 372)}
"""vllm:spec_decode_num_drafts and ..._num_accepted_tokens_per_pos, after each run less before it."""


@pytest.mark.parametrize("name", DRAFTED)
def test_acceptance_in_real_files_is_what_the_servers_metrics_counted(name: str, tmp_path: Path) -> None:
    output = tmp_path / "acceptance.json"
    register_commands()
    done = CliRunner().invoke(
        app, ["observe", str(unpacked(name, tmp_path)), "--draft", "ngram", "--context", "456", "-o", str(output)]
    )
    assert done.exit_code == 0, done.output
    counts = DRAFTED[name]
    assert f"{counts[0]} steps of 4 sequences" in done.output
    (measured,) = load_profile(output).measured
    assert measured.rates == pytest.approx([after / before for before, after in pairwise(counts)])


@pytest.mark.parametrize("name", DRAFTED)
def test_a_speculating_servers_files_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="had a draft"):
        points_of(read_runs(unpacked(name, tmp_path)))


def test_a_dry_run_says_each_load_and_sends_nothing(engine: tuple[object, Address], tmp_path: Path) -> None:
    server, address = engine
    register_commands()
    done = CliRunner().invoke(
        app,
        ["calibrate", "--server", str(address), "--model", "embedded", "--hardware", "l40s-48gb",
         "--concurrency", "1,2,4", "--prompt-len", "32,64,128", "--dry-run", "-o", str(tmp_path / "x.toml")],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert (
        "9 loads x 3 rounds, 4 loads only to judge, the smallest once more first and last: 65 requests" in done.output
    )
    assert "4 x 128 + 48" in done.output
    assert "nothing was sent" in done.output
    assert {path for path, _ in server.seen} == {"/v1/models", "/metrics", "/prometheus/metrics"}  # type: ignore[attr-defined]
