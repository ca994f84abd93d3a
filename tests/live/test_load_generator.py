"""What real load generators wrote (tests/data/load_generators), and AIPerf sending the planned loads."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from magicdec.errors import ConfigError, ServerError
from magicdec.live.benchmark_results import points_of, read_runs
from magicdec.live.drive import bodies
from magicdec.live.http import TOKEN_VARIABLE, Address, parse_address
from magicdec.live.load_generator import LoadGenerator, configuration, find_generator, send_by
from magicdec.live.loads import Load
from magicdec.perfmodel.acceptance import load_profile
from magicdec.specs.engine import load_engine
from tests.live.test_server_calibration import Engine, engine

DATA = Path(__file__).parent.parent / "data" / "load_generators"
PROMPTS = (128, 512, 1536)
USERS = (1, 2, 4)
LOAD = Load(concurrency=4, prompt_len=256, output_len=48)
ADDRESS = parse_address("127.0.0.1:1")
__all__ = ["engine"]


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


STAND_IN = """#!{python}
import json, os, pathlib, subprocess, sys
if sys.argv[1:] == ["--version"]:
    print("{version}")
    raise SystemExit
told = {{"argv": sys.argv, "token": os.environ.get("{variable}"), "offline": os.environ.get("HF_HUB_OFFLINE"),
        "config": json.load(open(sys.argv[3])), "payloads": json.load(open("payloads.json"))}}
open({seen!r}, "w").write(json.dumps(told))
if {status}:
    worker = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    open({seen!r}, "w").write(str(worker.pid))
    print("ValidationError: api_key is " + os.environ["{variable}"])
    raise SystemExit({status})
os.mkdir("artifacts")
pathlib.Path("artifacts/profile_export.jsonl").write_bytes(pathlib.Path({records!r}).read_bytes())
"""


def stand_in(folder: Path, *, status: int = 0, version: str = "0.13.0") -> Path:
    """In place of the executable: notes how it was called, and leaves the records of a real run of that load."""
    path = folder / "aiperf"
    path.write_text(
        STAND_IN.format(
            python=sys.executable, version=version, variable=TOKEN_VARIABLE, status=status,
            seen=str(folder / "seen.json"), records=str(unpacked("aiperf-planned.jsonl.gz", folder)),
        )
    )  # fmt: skip
    path.chmod(0o755)
    return path


def test_the_planned_load_goes_to_the_generator_and_its_window_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the records themselves: the time per token from the last first token to the first last one."""
    monkeypatch.setenv(TOKEN_VARIABLE, "secret-token")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    generator = find_generator(str(stand_in(tmp_path)))
    found = send_by(generator, ADDRESS, LOAD, model="m", vocab_size=100, seed=3)
    told = json.loads((tmp_path / "seen.json").read_text())
    payloads = [session["payloads"] for session in told["payloads"]["data"]]
    assert payloads == [[body] for body in bodies(LOAD, model="m", vocab_size=100, seed=3)]
    (phase,) = told["config"]["benchmark"]["phases"]
    assert (phase["concurrency"], phase["requests"]) == (4, 4)
    assert (told["token"], told["offline"]) == ("secret-token", None)
    assert "secret-token" not in json.dumps([told["argv"], told["config"], told["payloads"]])
    lines = gzip.decompress((DATA / "aiperf-planned.jsonl.gz").read_bytes()).decode().splitlines()
    times, scales = [], []
    for record in map(json.loads, lines):
        metrics = record["metrics"]
        gaps = np.array([metrics["time_to_first_token"]["value"], *metrics["inter_chunk_latency"]["value"]])
        times.append(record["metadata"]["request_start_ns"] / 1e9 + np.cumsum(gaps) / 1e3)
        scales.append((metrics["output_sequence_length"]["value"] - 1) / (len(gaps) - 1))
    start, end = max(at[0] for at in times), min(at[-1] for at in times)
    inside = [np.sum((at > start) & (at <= end)) for at in times]
    per_token = [(end - start) / (number * scale) for number, scale in zip(inside, scales, strict=True)]
    assert found.tpot_s == pytest.approx(np.mean(per_token), rel=0.08)  # a median against a mean
    assert abs(found.num_steps - sum(inside)) <= len(times)
    assert 256 + 48 / 3 < found.context_len < 256 + 48


def test_a_generator_that_fails_is_one_line_without_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret-token")
    generator = find_generator(str(stand_in(tmp_path, status=3)))
    with pytest.raises(
        ServerError, match=r"ended with status 3; nothing more was sent: ValidationError: .*\*\*\*"
    ) as e:
        send_by(generator, ADDRESS, LOAD, model="m", vocab_size=100, seed=3)
    assert "secret-token" not in str(e.value)
    worker = int((tmp_path / "seen.json").read_text())
    wait_until_gone(worker)  # its workers send nothing more


def wait_until_gone(pid: int) -> None:
    state = Path(f"/proc/{pid}/stat")
    for _ in range(600):
        with suppress(FileNotFoundError, ProcessLookupError):
            if state.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.1)
                continue
        return
    raise AssertionError(f"process {pid} still runs")


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (Load(concurrency=5, prompt_len=256, output_len=48), "answered 4 of 5 requests"),
        (Load(concurrency=4, prompt_len=256, output_len=64), "generated 48 tokens where 64"),
    ],
)
def test_answers_that_are_not_the_planned_ones_stop_it(load: Load, said: str, tmp_path: Path) -> None:
    generator = find_generator(str(stand_in(tmp_path)))
    with pytest.raises(ServerError, match=said):
        send_by(generator, ADDRESS, load, model="m", vocab_size=100, seed=3)


def test_what_is_no_aiperf_is_one_line_with_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no load generator 'aiperf-that-is-not-there': .*pip install aiperf"):
        find_generator("aiperf-that-is-not-there")
    with pytest.raises(ConfigError, match="is not AIPerf"):
        find_generator(str(stand_in(tmp_path, version="another tool 1.0")))
    with pytest.raises(ConfigError, match="give its file to --results"):
        find_generator("guidellm")


class Listing(Engine):
    """An engine that also says which model it has."""

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "m", "max_model_len": 4096}]}' if self.path == "/v1/models" else b""
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_dry_run_says_each_command_and_sends_nothing(
    engine: tuple[object, Address], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, address = engine
    server.RequestHandlerClass = Listing  # type: ignore[attr-defined]
    monkeypatch.setenv(TOKEN_VARIABLE, "secret-token")
    generator = stand_in(tmp_path)
    register_commands()
    done = CliRunner().invoke(
        app,
        ["calibrate", "--server", str(address), "--model", "embedded", "--hardware", "l40s-48gb",
         "--concurrency", "1,2,4", "--prompt-len", "32,64,128", "--load-generator", str(generator), "--dry-run",
         "-o", str(tmp_path / "x.toml")],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert f"{generator} profile --config load.json" in done.output
    first = Load(concurrency=1, prompt_len=32, output_len=48)
    assert json.dumps(configuration(address, first, model="m")) in done.output
    assert done.output.count('"requests": ') == 9
    assert "secret-token" not in done.output
    assert server.seen == []  # type: ignore[attr-defined]


@pytest.mark.skipif(shutil.which("aiperf") is None, reason="AIPerf is not installed")
def test_aiperf_sends_exactly_the_planned_requests(engine: tuple[object, Address]) -> None:
    server, address = engine
    load = Load(concurrency=3, prompt_len=20, output_len=16)
    found = send_by(find_generator("aiperf"), address, load, model="m", vocab_size=100, seed=1)
    asked = sorted(server.seen, key=str)  # type: ignore[attr-defined]
    assert asked == sorted(bodies(load, model="m", vocab_size=100, seed=1), key=str)
    assert found.step_s > 0.9 * Engine.STEP_S
    assert isinstance(find_generator("aiperf"), LoadGenerator)
