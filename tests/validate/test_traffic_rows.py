"""Tables of servers under arrivals: what is judged, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from magicdec.commands.validate import app
from magicdec.perfmodel.traffic.simulate import simulate_closed
from magicdec.validate import traffic
from magicdec.validate.traffic import validate_traffic

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
    (first, between) = (each["predicted"] for each in validate_traffic([opened])["rows"])
    assert 10 < first < 100
    assert 5 < between < 10
    users = "vllm,0.30,Qwen/Qwen3-8B,h100,fp8,1,8192,64,{},,,{}\n"
    opened.write_text(OPEN + row.format(first, 2.0 * between))
    closed.write_text(CLOSED + "".join(users.format(*each) for each in ((1, 1), (4, 1), (64, 0))))
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


def test_a_load_that_failed_is_judged_by_whether_it_is_called_too_much(tmp_path: Path) -> None:
    path = tmp_path / "open.csv"
    rows = "".join(
        f"vllm,,llama-2-7b,h100,1,{rate},1000,1400,600,{failed},50\n"
        for rate, failed in ((8, 900), (0.2, 0))
    )
    path.write_text(
        "engine,engine_version,model,gpu,tp,rate_rps,prompt_len_mean,output_len,duration_s,requests_failed,tpot_mean_ms\n"
        + rows
    )
    document = validate_traffic([path])
    overload = next(each for each in document["groups"] if each["name"] == "open loop/overload")
    assert (overload["rows"], overload["agree"]) == (2, 1.0)
    assert len(document["rows"]) == 1


def test_the_command_skips_bad_rows_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "open.csv"
    good = "vllm,0.30,Qwen/Qwen3-8B,h100,1,2,200,20,20,20,7,\n"
    path.write_text(OPEN + good + good.replace("h100", "h1000") + good.replace(",2,200", ",-2,200"))
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


def test_equal_rows_are_simulated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
