"""Tables of servers under arrivals: what is judged, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from evidence import traffic
from evidence.__main__ import app
from evidence.traffic import LoadRow, validate_traffic
from magicdec.errors import CapacityError, ConfigError
from magicdec.perfmodel.rate.replica import PassLimit
from magicdec.perfmodel.rate.simulate import simulate_closed
from magicdec.perfmodel.setup import Setup
from magicdec.validate.rows import read_rows

OPEN = (
    "engine,engine_version,model,gpu,tp,rate_rps,prompt_len_mean,output_len,"
    "duration_s,ttft_p50_ms,tpot_mean_ms,note\n"
)
CLOSED = "engine,engine_version,model,gpu,quant,tp,input_len,output_len,concurrency,ttft_p99_ms,tpot_p95_ms,slo_pass\n"


def test_figures_are_compared_in_their_own_units_and_the_largest_load_is_searched(
    tmp_path: Path,
) -> None:
    """Rows made of the simulation's own answers have no error, and one twice as long an error of a half."""
    opened, closed = tmp_path / "open.csv", tmp_path / "closed.csv"
    row = "vllm,0.30,Qwen/Qwen3-8B,h100,1,4,600,100,30,{},{},\n"
    opened.write_text(OPEN + row.format(1.0, 1.0))
    (first, between) = (
        each["predicted"] for each in validate_traffic([opened])["rows"]
    )
    assert 10 < first < 100
    assert 5 < between < 10
    users = "vllm,0.30,Qwen/Qwen3-8B,h100,fp8,1,8192,64,{},,,{}\n"
    opened.write_text(OPEN + row.format(first, 2.0 * between))
    closed.write_text(
        CLOSED + "".join(users.format(*each) for each in ((1, 1), (4, 1), (64, 0)))
    )
    document = validate_traffic([opened, closed])
    errors = {each["metric"]: each["error"] for each in document["rows"]}
    assert errors == {
        "ttft_p50_ms": pytest.approx(0.0, abs=1e-9),
        "tpot_mean_ms": pytest.approx(-0.5),
    }
    (largest,) = document["largest_loads"]
    assert largest["shape"] == "qwen3-8b fp8/tp 1/8192+64"
    assert largest["measured"] == 4
    assert 4 <= largest["predicted"] < 64
    assert not document["refused"]


def test_a_checkpoints_name_says_its_format_as_in_a_plan(tmp_path: Path) -> None:
    table = tmp_path / "open.csv"
    row = "vllm,0.30,RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic,h100,1,4,600,100,30,20,5,\n"
    table.write_text(OPEN + row)
    (load,), _ = read_rows([table], LoadRow)
    plan = Setup.of("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "h100", "vllm")
    assert load.setup.precision.weight_dtype == "fp8" == plan.precision.weight_dtype


def test_a_load_that_failed_is_judged_by_whether_it_is_called_too_much(
    tmp_path: Path,
) -> None:
    path = tmp_path / "open.csv"
    rows = "".join(
        f"vllm,,llama-2-7b,h100,1,{rate},1000,1400,150,{failed},50\n"
        for rate, failed in ((8, 225), (0.2, 0))
    )
    path.write_text(
        "engine,engine_version,model,gpu,tp,rate_rps,prompt_len_mean,output_len,duration_s,requests_failed,tpot_mean_ms\n"
        + rows
    )
    document = validate_traffic([path])
    overload = next(
        each for each in document["groups"] if each["name"] == "open loop/overload"
    )
    assert (overload["rows"], overload["agree"]) == (2, 1.0)
    assert len(document["rows"]) == 1


def test_the_command_skips_bad_rows_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "open.csv"
    good = "vllm,0.30,Qwen/Qwen3-8B,h100,1,2,200,20,20,20,7,\n"
    path.write_text(
        OPEN + good + good.replace("h100", "h1000") + good.replace(",2,200", ",-2,200")
    )
    result = CliRunner().invoke(app, ["traffic", str(path), "--format", "json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["rows"][0]["metric"] == "ttft_p50_ms"
    assert "open.csv:3: unknown hardware 'h1000': did you mean h100" in result.stderr
    assert "open.csv:4: column 'rate_rps' must be a number >= 1e-06" in result.stderr


def test_a_server_has_nothing_cached_before_its_first_row(tmp_path: Path) -> None:
    """p99 of 300 requests, of which 45 prompts come again and again, is that of a whole prompt; in the server's next
    row of a cached one."""
    path = tmp_path / "open.csv"
    row = "vllm,0.30,Qwen/Qwen3-8B,h100,1,10,600,20,30,1,shared-prefix,{}\n"
    path.write_text(
        OPEN.replace("ttft_p50_ms,tpot_mean_ms,note", "ttft_p99_ms,note,source")
        + row.format("a")
        + row.format("a")
    )
    first, second = (each["predicted"] for each in validate_traffic([path])["rows"])
    assert first > 1.2 * second


def test_equal_rows_are_simulated_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulations: list[int] = []

    def counted(*args: Any, **options: Any) -> Any:
        simulations.append(1)
        return simulate_closed(*args, **options)

    monkeypatch.setattr(traffic, "simulate_closed", counted)
    row = "vllm,llama-3.1-8b,h100-sxm-80gb,1,20,100,{users},{tpot}\n"
    header = "engine,model,gpu,tp,output_len,input_len,concurrency,tpot_p50_ms\n"
    rows = [row.format(users=1 + number % 2, tpot=5 + number) for number in range(40)]
    (tmp_path / "rows.csv").write_text(header + "".join(rows))
    found = traffic.validate_traffic([tmp_path / "rows.csv"])
    assert len(found["rows"]) == 40
    assert len({row["measured"] for row in found["rows"]}) == 40
    assert len(simulations) == 2


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("tpot_p50_ms", "1e-308", "must be 0 or at least 1e-06"),
        ("rate_rps", "1e-308", "column 'rate_rps' must be"),
        ("duration_s", "1e11", "is too large; 100000 are simulated at most"),
        ("output_len", "1e11", "too long"),
        ("max_num_batched_tokens", "900000000", "too long"),
    ],
)
def test_loads_beyond_every_simulation_are_refused_by_their_line(
    column: str, value: str, message: str, tmp_path: Path
) -> None:
    row = {
        "engine": "vllm",
        "model": "llama-3.1-8b",
        "gpu": "h100-sxm-80gb",
        "tp": "1",
        "output_len": "20",
        "prompt_len_mean": "100",
        "rate_rps": "2",
        "duration_s": "10",
        "tpot_p50_ms": "7",
        "max_num_batched_tokens": "",
    }
    good = ",".join(row.values())
    bad = ",".join((row | {column: value}).values())
    (tmp_path / "rows.csv").write_text(f"{','.join(row)}\n{good}\n{bad}\n")
    (refused,) = traffic.validate_traffic([tmp_path / "rows.csv"])["refused"]
    assert "rows.csv:3: " in refused
    assert message in refused


def row(**values: Any) -> traffic.LoadRow:
    usual = {
        "engine": "vllm",
        "model": "llama-3.1-8b",
        "gpu": "h100-sxm-80gb",
        "tp": 1,
        "output_len": 20,
        "prompt_len_mean": 100,
    }
    return traffic.LoadRow(**usual | values)


@given(
    rate=st.floats(0.01, 20.0),
    duration=st.floats(1.0, 20.0),
    arrival=st.sampled_from(["constant rate", "poisson"]),
    cached=st.integers(0, 150),
)
def test_an_open_load_sends_what_was_measured(
    rate: float, duration: float, arrival: str, cached: int
) -> None:
    load = row(rate_rps=rate, duration_s=duration, arrival=arrival, cached_len=cached)
    requests = load.simulated().requests
    assert load.table == "open loop"
    assert len(requests) == max(int(duration * rate), 2)
    assert set(requests.prompt_len) == {100}
    assert set(requests.output_len) == {20}
    found = min(cached, 99) // 16 * 16
    assert set(requests.cached_len) == {found}
    gaps = np.diff(requests.arrival_s, prepend=0.0)
    if arrival == "poisson":
        drawn = np.random.default_rng(0).exponential(1.0 / rate, len(requests))
        np.testing.assert_allclose(gaps, drawn)
    else:
        np.testing.assert_allclose(gaps, 1.0 / rate)


@pytest.mark.parametrize("users", [1, 3, 40])
def test_a_closed_load_has_four_rounds_of_its_users_at_once(users: int) -> None:
    load = row(concurrency=users)
    outcome = load.simulated()
    assert load.table == "closed loop"
    assert load.num_requests == len(outcome.requests) == 4 * users
    batches = [batch for _, batch, _, _ in outcome.replicas[0].timeline]
    assert max(batches) == users


def test_every_figure_is_of_its_times_in_its_unit() -> None:
    outcome = row(rate_rps=5.0, duration_s=20.0, arrival="poisson").simulated()
    figures = traffic.measures(outcome)
    for name in ("ttft", "tpot", "e2e"):
        seconds = np.sort(getattr(outcome, f"{name}_s"))
        assert figures[f"{name}_mean_ms"] == pytest.approx(1000.0 * seconds.mean())
        for key, percent in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
            told = 1000.0 * np.percentile(seconds, percent)
            assert figures[f"{name}_{key}_ms"] == pytest.approx(told)
    assert figures["output_tok_s"] == pytest.approx(outcome.tokens_per_s)


def test_shared_prefixes_are_cached_after_a_servers_first_prompts() -> None:
    """As far as the cache holds them and the answers of two rounds: 131072 tokens each do not fit."""
    load = row(rate_rps=5.0, duration_s=20.0, note="shared-prefix")
    first = load.simulated(is_first=True).requests.cached_len
    assert first.tolist() == [0] * 45 + [96] * 55
    assert load.simulated(is_first=False).requests.cached_len.tolist() == [96] * 100
    alone = row(rate_rps=5.0, duration_s=20.0).simulated(is_first=False)
    assert not alone.requests.cached_len.any()
    large = row(
        rate_rps=1.0, duration_s=3.0, prompt_len_mean=6000, note="shared-prefix"
    )
    assert not large.simulated(is_first=False).requests.cached_len.any()


@pytest.mark.parametrize(
    "values",
    [
        {"rate_rps": 1.0, "concurrency": 2},
        {},
        {"rate_rps": 1.0, "prompt_len_mean": None},
        {"rate_rps": 1.0, "ttft_p50_ms": 1e-7},
        {"rate_rps": 1000.0, "duration_s": 101.0},
        {"rate_rps": 1.0, "prompt_len_mean": 2**26},
        {"rate_rps": 1.0, "max_num_batched_tokens": 2**26 + 1},
    ],
)
def test_a_load_that_is_none_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        row(**values)


def test_loads_at_the_bounds_are_taken() -> None:
    assert row(rate_rps=1000.0, duration_s=100.0).num_requests == 100_000
    assert row(rate_rps=1.0, ttft_p50_ms=1e-6).ttft_p50_ms == 1e-6
    assert row(rate_rps=1.0, ttft_p50_ms=0.0).ttft_p50_ms == 0.0
    assert row(rate_rps=1.0, prompt_len_mean=2**26 - 20).prompt_len == 2**26 - 20
    assert row(rate_rps=1.0, max_num_batched_tokens=2**26).num_requests == 600


def test_the_most_users_keep_the_limits_and_one_more_does_not() -> None:
    load = row(concurrency=1, prompt_len_mean=None, input_len=8000, output_len=30)
    work = PassLimit(10_000_000)
    most = traffic._most_users(load, work)

    def keeps(users: int) -> bool:
        outcome = load.closed(users)
        slowest = float(np.percentile(outcome.ttft_s, 99))
        return slowest <= 2.0 and float(np.percentile(outcome.tpot_s, 50)) <= 0.05

    assert most > 2
    assert keeps(most)
    assert not keeps(most + 1)


def test_rows_that_take_more_than_the_allowed_work_end_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(OPEN + "vllm,0.30,Qwen/Qwen3-8B,h100,1,2,200,20,20,20,7,\n" * 2)
    assert not validate_traffic([path])["refused"]
    monkeypatch.setattr(traffic, "MOST_LOAD_WORK", 10)
    with pytest.raises(CapacityError, match="more than 10 passes"):
        validate_traffic([path])


@pytest.mark.parametrize("edge", [0, 1, 2, 3, 37, 64, 100, 101, 333, 900, 1024])
@pytest.mark.parametrize("limit", ["ttft", "tpot", "one token"])
def test_the_most_users_are_found_to_a_hundredth(edge: int, limit: str) -> None:
    """By trying every number; an output of one token has no time between tokens."""

    def closed(users: int, *, work: PassLimit) -> Any:
        over = 2.0 if users > edge else 1.0
        ttft_s = np.full(5, 2.0 * over if limit != "tpot" else 0.0)
        tpot_s = np.full(5, 0.05 * over if limit == "tpot" else 0.0)
        if limit == "one token":
            tpot_s = np.empty(0)
        return SimpleNamespace(ttft_s=ttft_s, tpot_s=tpot_s)

    load: Any = SimpleNamespace(closed=closed)
    found = traffic._most_users(load, PassLimit(9))
    assert found <= edge
    assert edge - found <= edge / 100.0


def test_each_stated_figure_is_compared_and_no_other() -> None:
    predicted = {"ttft_p50_ms": 30.0, "tpot_mean_ms": 9.0, "output_tok_s": 50.0}
    stated = {"ttft_p50_ms": 40.0, "output_tok_s": 40.0, "e2e_p50_ms": 1.0}
    for load, at in ((row(rate_rps=2.5, **stated), "2.5/s"), (row(concurrency=3, **stated), "3 users")):  # fmt: skip
        found = traffic._compared(load, predicted)
        assert [each["metric"] for each in found] == ["ttft_p50_ms", "output_tok_s"]
        assert [each["error"] for each in found] == pytest.approx([-0.25, 0.25])
        for each in found:
            assert each["load"].endswith(f"/tp 1/100+20, {at}")
            assert each["table"] == load.table
    unstated = row(rate_rps=2.5, ttft_p50_ms=0.0)
    assert traffic._compared(unstated, predicted) == []
    assert row(concurrency=1024).users == 1024


def test_errors_are_grouped_by_table_and_figure() -> None:
    """In the order in which they come; largest loads have a group of their own."""
    rows = [
        {"table": "open loop", "metric": "ttft_p50_ms", "error": error}
        for error in (0.1, -0.3, 0.2)
    ]
    rows.append({"table": "closed loop", "metric": "ttft_p50_ms", "error": 0.5})
    groups = traffic._groups(rows, [{"predicted": 90, "measured": 100}])
    assert [group["name"] for group in groups] == [
        "open loop/ttft_p50_ms",
        "closed loop/ttft_p50_ms",
        "largest load within limits",
    ]
    assert [group["median_error"] for group in groups] == pytest.approx([0.2, 0.5, 0.1])
