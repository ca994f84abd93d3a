"""Results of GuideLLM and AIPerf, in the formats of their sources (guidellm 0.8.1, aiperf 0.13.0), of a simulated
server whose true step times are known: what is read from them, and whether an engine fitted to them predicts others.
Then files that real load generators wrote (tests/data/load_generators), and a plan of loads that is only said."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from magicdec.errors import ConfigError
from magicdec.live.benchmark_results import _decoding, points_of, read_runs
from magicdec.live.http import Address
from magicdec.perfmodel.acceptance import constant_profile, load_profile
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import predict
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import EngineProfile, load_engine

TRUTH = EngineProfile(name="truth").with_constants(
    {
        "kernels.gemm_factor": 1.2,
        "kernels.attention_factor": 0.9,
        "overheads.forward_overhead_s": 3e-3,
    }
)
SETUP = Setup(
    model=load_model_spec("llama-3.1-8b"),
    hardware=load_hardware("a100-sxm-80gb"),
    engine=TRUTH,
)
EPOCH_S = 1.79e9
Clock = Callable[[int, int], float]


@cache
def true_step(batch: int, context: int) -> float:
    at = Points(batch=float(batch), context=float(context), tp=1.0, gamma=0)
    return float(predict(SETUP, constant_profile(0.5), at).autoregressive_step_s)


@dataclass
class Served:
    prompt: int
    output: int
    start: float
    events: list[float] = field(default_factory=list)


def serve(
    concurrency: int,
    prompt: int,
    output: int,
    *,
    num_requests: int,
    prefill_s: float,
    spread: int = 0,
) -> list[Served]:
    """A closed loop of `concurrency` users: a prompt that waits is taken in, and meanwhile nobody decodes. Outputs
    differ by up to `spread`, so that the users fall out of step."""
    now, running, done = 0.0, [], []
    lengths = iter(
        output
        + np.random.default_rng(concurrency).integers(-spread, spread + 1, num_requests)
    )
    waiting = [Served(prompt, int(next(lengths)), now) for _ in range(concurrency)]
    left = num_requests - concurrency
    while waiting or running:
        if waiting:
            now += prefill_s
            waiting[0].events.append(now)
            running.append(waiting.pop(0))
            continue
        now += true_step(len(running), prompt + output // 2)
        for each in running:
            each.events.append(now)
        for each in [each for each in running if len(each.events) == each.output]:
            running.remove(each)
            done.append(each)
            if left > 0:
                waiting.append(Served(prompt, int(next(lengths)), now))
                left -= 1
    return done


def aiperf(served: list[Served]) -> str:
    """profile_export.jsonl: one line for each request, and a warm-up and a failed one that do not count."""

    def line(each: Served, phase: str = "profiling", error: object = None) -> str:
        def metric(value: object, unit: str) -> dict[str, object]:
            return {"value": value, "unit": unit}

        metrics = {
            "time_to_first_token": metric(1e3 * (each.events[0] - each.start), "ms"),
            "request_latency": metric(1e3 * (each.events[-1] - each.start), "ms"),
            "inter_chunk_latency": metric((1e3 * np.diff(each.events)).tolist(), "ms"),
            "input_sequence_length": metric(each.prompt, "tokens"),
            "output_sequence_length": metric(each.output, "tokens"),
        }
        metadata = {
            "session_num": 0, "request_start_ns": round(1e9 * (EPOCH_S + each.start)), "benchmark_phase": phase,
            "request_end_ns": round(1e9 * (EPOCH_S + each.events[-1])), "worker_id": "w", "record_processor_id": "r",
        }  # fmt: skip
        return json.dumps({"metadata": metadata, "metrics": metrics, "error": error})

    slow = dataclasses.replace(served[0], events=[10 * at for at in served[0].events])
    return "\n".join(
        [line(slow, "warmup"), line(slow, error={"type": "x"}), *map(line, served)]
    )


def guidellm(*runs: list[Served]) -> str:
    """benchmarks.json, schema 2."""

    def request(each: Served) -> dict[str, object]:
        timings = {
            "request_start": EPOCH_S + each.start, "first_token_iteration": EPOCH_S + each.events[0],
            "last_token_iteration": EPOCH_S + each.events[-1], "token_iterations": len(each.events),
            "request_end": EPOCH_S + each.events[-1],
        }  # fmt: skip
        return {
            "type_": "generative_request_stats", "request_id": "x", "info": {"status": "completed", "timings": timings},
            "prompt_tokens": each.prompt, "output_tokens": each.output, "response_metrics": None,
        }  # fmt: skip

    benchmarks = [
        {
            "type_": "generative_benchmark",
            "requests": {
                "successful": list(map(request, run)),
                "incomplete": [],
                "errored": [],
            },
        }
        for run in runs
    ]
    return json.dumps(
        {
            "metadata": {"version": 2, "guidellm_version": "0.8.1"},
            "config": {},
            "benchmarks": benchmarks,
        }
    )


LOADS = [(c, p) for c in (1, 4, 16) for p in (512, 2048, 8192)]


@pytest.fixture(scope="module")
def runs() -> list[list[Served]]:
    return [serve(c, p, 200, num_requests=2 * c + 1, prefill_s=5e-3) for c, p in LOADS]


@pytest.mark.parametrize("tool", ["aiperf", "guidellm"])
def test_step_batch_and_lengths_are_those_of_the_server(
    tool: str, runs: list[list[Served]], tmp_path: Path
) -> None:
    found = []
    if tool == "guidellm":
        (tmp_path / "benchmarks.json").write_text(guidellm(*runs))
        found = read_runs(tmp_path / "benchmarks.json")
    else:
        for number, run in enumerate(runs):
            path = tmp_path / f"{number}.jsonl"
            path.write_text(aiperf(run))
            found += read_runs(path)
    points = points_of(found)
    seen = {(p.load.concurrency, p.load.prompt_len): p for p in points}
    for concurrency, prompt in LOADS:
        measured = seen[concurrency, prompt]
        slack = (
            1e-6 if tool == "aiperf" else 0.08
        )  # GuideLLM has no times of events: some prefill is in them
        assert measured.step_s == pytest.approx(
            true_step(concurrency, prompt + 100), rel=slack
        )
        assert measured.context_len == prompt + 100
        assert measured.load.output_len == 200
    judges = {key for key, point in seen.items() if point.load.is_judge}
    assert 3 <= len(judges) <= 5


def test_an_engine_fitted_to_them_predicts_the_loads_that_judge(
    runs: list[list[Served]], tmp_path: Path
) -> None:
    paths = []
    for number, run in enumerate(runs):
        paths.append(tmp_path / f"{number}.jsonl")
        paths[-1].write_text(aiperf(run))
    output = tmp_path / "server.engine.toml"
    register_commands()
    options = [word for path in paths for word in ("--results", str(path))]
    done = CliRunner().invoke(
        app,
        ["calibrate", *options, "--model", "llama-3.1-8b", "--hardware", "a100-sxm-80gb", "--dtype", "bfloat16",
         "-o", str(output)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    engine = load_engine(output)
    for concurrency, prompt in ((2, 1024), (8, 4096), (16, 1024)):
        at = Points(batch=float(concurrency), context=float(prompt), tp=1.0, gamma=0)
        fitted = predict(
            dataclasses.replace(SETUP, engine=engine), constant_profile(0.5), at
        )
        assert float(fitted.autoregressive_step_s) == pytest.approx(
            true_step(concurrency, prompt), rel=0.03
        )
    document = json.loads((tmp_path / "server.engine.loads.json").read_text())
    assert document["read"]["requests"] == sum(map(len, runs))
    assert document["median_error"]["held_out"] < 0.03


def test_steps_that_others_prefill_slows_are_left_out(tmp_path: Path) -> None:
    """A crowded server, on which most of a token's time is others' prefill: the naive mean is far off, and of the
    requests nearly all are left out; those of the last users, whom nobody follows, remain."""
    crowded = serve(16, 2048, 40, num_requests=160, prefill_s=50e-3, spread=15)
    naive = np.median(
        [(each.events[-1] - each.events[0]) / (each.output - 1) for each in crowded]
    )
    assert naive > 1.5 * true_step(16, 2068)
    path = tmp_path / "benchmarks.json"
    path.write_text(guidellm(crowded))
    (run,) = read_runs(path)
    kept = [found for request in run if (found := _decoding(request, run)) is not None]
    assert 0 < len(kept) < len(run) / 5
    for found in kept:
        assert found.step_s == pytest.approx(
            true_step(round(found.batch), 2068), rel=0.15
        )


def test_where_no_step_is_free_of_prefill_it_says_so(tmp_path: Path) -> None:
    one = Served(512, 20, 0.0, [1.0 + 0.1 * i for i in range(20)])
    two = Served(512, 1, 0.5, [9.0])
    path = tmp_path / "benchmarks.json"
    path.write_text(guidellm([one, two]))
    with pytest.raises(ConfigError, match="others waited for their first token"):
        points_of(read_runs(path))


def test_a_run_with_a_draft_is_refused(
    runs: list[list[Served]], tmp_path: Path
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(
        aiperf([dataclasses.replace(each, output=3 * each.output) for each in runs[0]])
    )
    with pytest.raises(ConfigError, match=r"3\.\d\d tokens per event"):
        points_of(read_runs(path))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        '{"benchmarks": [{}]}',
        '{"benchmarks": 3}',
        "no json",
        '{"metadata": 1}',
    ],
)
def test_a_file_of_another_kind_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json (is neither|holds no)"):
        read_runs(path)


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
        "aiperf": [
            unpacked(f"aiperf-{c}-{p}.jsonl.gz", folder) for p in PROMPTS for c in USERS
        ],
    }


@pytest.mark.parametrize(
    ("tool", "sizes"), [("guidellm", (6, 6, 6)), ("aiperf", (3, 4, 6))]
)
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
    assert (
        max(several) > 1.05
    )  # without a draft: an event of two tokens, or without text


def test_a_lone_requests_step_is_what_each_tool_calls_its_latency_between_tokens(
    files: dict[str, list[Path]],
) -> None:
    told = []
    for path in files["guidellm"]:
        (first, *_) = json.loads(path.read_text())["benchmarks"]
        told.append(
            [each["inter_token_latency_ms"] for each in first["requests"]["successful"]]
        )
    for path in files["aiperf"][:: len(USERS)]:
        records = [
            json.loads(line)["metrics"] for line in path.read_text().splitlines()
        ]
        told.append([each["inter_token_latency"]["value"] for each in records])
    alone = [
        read_runs(path)[0]
        for path in (*files["guidellm"], *files["aiperf"][:: len(USERS)])
    ]
    for latencies_ms, run in zip(told, alone, strict=True):
        for latency_ms, request in zip(latencies_ms, run, strict=True):
            step_s = (request.last_s - request.first_s) / (request.output_len - 1)
            assert 1e3 * step_s == pytest.approx(latency_ms, rel=1e-3)


def test_an_engine_is_fitted_to_real_files(
    files: dict[str, list[Path]], tmp_path: Path
) -> None:
    output = tmp_path / "server.engine.toml"
    register_commands()
    given = files["guidellm"]
    options = [word for path in given for word in ("--results", str(path))]
    done = CliRunner().invoke(
        app,
        [
            "calibrate",
            *options,
            "--model",
            "embedded",
            "--hardware",
            "l40s-48gb",
            "-o",
            str(output),
        ],
    )
    assert done.exit_code == 0, done.output
    loads = json.loads((tmp_path / "server.engine.loads.json").read_text())["loads"]
    points = points_of([run for path in given for run in read_runs(path)])
    assert len(loads) == len(points) >= 8
    # on a device on which so small a model's products take microseconds, all of a step is fixed cost
    fitted = [row for row in loads if not row["judges"]]
    engine = load_engine(output)
    for row in fitted:
        cost = (
            engine.overheads.forward_overhead_s
            + engine.overheads.sequence_overhead_s * row["concurrency"]
        )
        assert cost < (1 + row["error"]) * row["tpot_s"] < 1.2 * cost


DRAFTED = {
    "aiperf-drafted.jsonl.gz": (388, 371, 366, 364),
    "guidellm-drafted.json.gz": (398, 393, 390, 372),
}
"""vllm:spec_decode_num_drafts and ..._num_accepted_tokens_per_pos, after each run less before it."""


@pytest.mark.parametrize("name", DRAFTED)
def test_acceptance_in_real_files_is_what_the_servers_metrics_counted(
    name: str, tmp_path: Path
) -> None:
    output = tmp_path / "acceptance.json"
    register_commands()
    done = CliRunner().invoke(
        app,
        [
            "observe",
            str(unpacked(name, tmp_path)),
            "--draft",
            "ngram",
            "--context",
            "456",
            "-o",
            str(output),
        ],
    )
    assert done.exit_code == 0, done.output
    counts = DRAFTED[name]
    assert "4 requests\n" in done.output
    assert f"{counts[0]} by n-gram" in done.output
    (measured,) = load_profile(output).measured
    assert measured.rates == pytest.approx(
        [after / before for before, after in pairwise(counts)]
    )


@pytest.mark.parametrize("name", DRAFTED)
def test_a_speculating_servers_files_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="these requests drafted"):
        points_of(read_runs(unpacked(name, tmp_path)))


def test_a_dry_run_says_each_load_and_sends_nothing(
    engine: tuple[object, Address], tmp_path: Path
) -> None:
    server, address = engine
    register_commands()
    done = CliRunner().invoke(
        app,
        ["calibrate", "--server", str(address), "--model", "embedded", "--hardware", "l40s-48gb",
         "--concurrency", "1,2,4", "--prompt-len", "32,64,128", "--dry-run", "-o", str(tmp_path / "x.toml")],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert (
        "9 loads x 3 rounds, 4 loads only to judge, the smallest once more first and last: 65 requests"
        in done.output
    )
    assert "4 x 128 + 48" in done.output
    assert "nothing was sent" in done.output
    assert {path for path, _ in server.seen} == {
        "/v1/models",
        "/metrics",
        "/prometheus/metrics",
    }  # type: ignore[attr-defined]
