"""The fewest devices under arrivals: what the answer says is what a simulation of it gives."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import joblib
import msgspec
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import magicdec
from magicdec.api import request_of
from magicdec.commands.plan import plan_command
from magicdec.errors import CapacityError, ConfigError
from magicdec.perfmodel.plan.drafts import draft_options
from magicdec.perfmodel.rate import capacity, layouts, load, trials
from magicdec.schema.plan import Percentiles, Plan, load_plan
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine
from tests.few import few_requests

CHAT = {
    "model": "llama-3.1-8b", "hardware": "h100", "context": 1000, "gen_len": 20, "rate": 12.0, "p95_ttft_ms": 120,
    "p95_tpot_ms": 10,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("few_requests")


@pytest.fixture(scope="module")
def answer() -> Plan:
    with few_requests():
        return magicdec.plan(**CHAT, draft="eagle3")


def write_trace(path: Path) -> Path:
    """60 requests at 4/s, of which all but the first have a prefix cached."""
    rows = (
        {
            "arrival": 0.25 * i,
            "prompt": 900,
            "output": 30,
            "cached": 512 if i else 0,
        }
        for i in range(60)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_answer_keeps_the_limits_and_one_replica_fewer_does_not(
    answer: Plan,
) -> None:
    traffic = answer.traffic
    for point in (traffic.autoregressive, traffic.speculative):
        assert point.within_limits
        assert point.ttft.p95 <= 0.12
        assert point.tpot.p95 <= 0.01
        assert (point.highest_rate_per_s or 0.0) >= 12.0
        assert (point.ttft_p95_low_s or 0.0) < point.ttft.p95
        assert point.ttft_p95_high_s is None or point.ttft_p95_high_s > point.ttft.p95
    alone = traffic.autoregressive
    options = {
        name: CHAT[name] for name in ("model", "hardware", "context", "gen_len", "rate")
    }
    for replicas in (alone.num_replicas, alone.num_replicas - 1):
        if replicas:
            outcome = magicdec.simulate(**options, tp=alone.tp_size, replicas=replicas)  # type: ignore[arg-type]
            slow = outcome.is_overloaded or (
                np.quantile(outcome.ttft_s, 0.95) > 0.12
                or np.quantile(outcome.tpot_s, 0.95) > 0.01
            )
            assert slow == (replicas < alone.num_replicas)
    assert traffic.best.num_gpus == min(
        each.num_gpus
        for each in (traffic.autoregressive, traffic.speculative)
        if each is not None
    )


def test_the_rest_of_the_plan_is_of_the_devices_that_the_rate_takes(
    answer: Plan, tmp_path: Path
) -> None:
    best = answer.traffic.best
    assert answer.best.tp_size == best.tp_size
    assert answer.best.num_replicas == best.num_replicas
    assert answer.request.rate == 12.0
    (tmp_path / "plan.json").write_text(answer.to_json())
    assert load_plan(tmp_path / "plan.json").traffic == answer.traffic


def test_curves_rise_with_the_rate_and_an_overload_has_no_percentile(
    answer: Plan,
) -> None:
    for policy in {each.policy for each in answer.traffic.curves}:
        curve = [each for each in answer.traffic.curves if each.policy == policy]
        assert [each.rate_per_s for each in curve] == sorted(
            each.rate_per_s for each in curve
        )
        batches = [each.mean_batch for each in curve]
        assert batches == sorted(batches)
        for each in curve:
            assert (each.ttft is None) == (each.tpot is None) == each.overloaded
            assert each.goodput_per_s <= 1.15 * each.rate_per_s


def test_a_sweep_in_processes_gives_the_same_numbers(tmp_path: Path) -> None:
    request = {"hardware": "h100", "requests": str(write_trace(tmp_path / "trace.jsonl")), "p95_ttft_ms": 80,
               "p95_tpot_ms": 9, "draft": "none", "tp": 1}  # fmt: skip
    with joblib.parallel_config("loky", n_jobs=2):
        shared = magicdec.plan(**request)
    assert shared.to_json() == magicdec.plan(**request).to_json()


def drawn_question(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    models = ("llama-3.1-8b", "qwen3-32b", "llama-3.3-70b", "qwen3-30b-a3b")
    return {
        "model": models[seed % len(models)],
        "weight_dtype": "fp8",
        "hardware": str(random.choice(["h100", "h200", "a100-sxm-80gb"])),
        "tp": int(random.choice([1, 2])) if seed % 4 != 2 else 4,
        "context": int(random.integers(300, 6000)),
        "gen_len": int(random.integers(20, 500)),
        "rate": float(random.uniform(0.5, 12.0)),
        "p95_ttft_ms": float(random.uniform(800, 4000)),
        "p95_tpot_ms": float(random.uniform(12, 60)),
        "task": str(random.choice(["chat", "code", "math"])),
    }


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))]
)
def test_a_named_draft_is_not_better_than_the_searched_one(seed: int) -> None:
    """Each draft that a release runs, asked for by itself with the same arrivals: no fewer devices,
    and on as many no higher rate, within two steps of searched rates."""
    question = drawn_question(seed)
    asked = request_of(**question)
    options, _ = draft_options(
        load_model_spec(question["model"]),
        asked,
        engine=load_engine("vllm"),
        context=question["context"],
    )
    try:
        searched = magicdec.plan(**question).traffic
    except CapacityError:
        searched = None
    for option in options:
        note = load_engine("vllm").draft(option.draft, option.method).note
        if option.is_hypothetical or note:
            continue
        try:
            named = magicdec.plan(
                **question, draft=option.draft, draft_method=option.method
            ).traffic
        except CapacityError:
            continue
        assert named is not None
        assert searched is not None
        assert named.best.num_gpus >= searched.best.num_gpus
        if named.best.num_gpus == searched.best.num_gpus:
            most = searched.best.highest_rate_per_s
            assert most is None or named.best.highest_rate_per_s <= 1.02**2 * most


@pytest.mark.parametrize(("alone", "drafted", "said"), [
    ((8, 8, 8), (4, 5, 6), ["2.00 times as fast at 1 requests/s, 1.33 times at 4"]),
    ((8, 8, 8), (4, 6, 9), ["2.00 times as fast at 1 requests/s, 1.33 times at 2, and it stops paying below 4"]),
    ((8, 8, 8), (4, 6, None), ["2.00 times as fast at 1 requests/s, 1.33 times at 2, and it stops paying below 4"]),
    ((8, 8, None), (4, 6, 9), ["2.00 times as fast at 1 requests/s, 1.33 times at 2"]),
    ((8, 8, 8), (8, 8, 9), ["does not pay at 1 requests/s, nor above"]),
    ((8, 8, 8), (8, 4, 5), ["2.00 times as fast at 2 requests/s, 1.60 times at 4"]),
    ((8, 8, 8), (8, 4, 9), ["is 2.00 times as fast at 2 requests/s, and it stops paying below 4"]),
    ((None, None, None), (4, 4, 4), []),
])  # fmt: skip
def test_a_note_says_up_to_which_rate_a_draft_pays(
    answer: Plan, alone: tuple[Any, ...], drafted: tuple[Any, ...], said: list[str]
) -> None:
    """Medians of whole requests at 1, 2 and 4 requests per second; None: overloaded."""
    assert answer.traffic is not None
    curves = [
        msgspec.structs.replace(
            answer.traffic.curves[0], policy=policy, rate_per_s=rate, overloaded=p50 is None,
            request=None if p50 is None else Percentiles(mean=p50, p50=p50, p95=p50, p99=p50),
        )
        for policy, medians in (("off", alone), ("by batch", drafted))
        for rate, p50 in zip((1.0, 2.0, 4.0), medians, strict=True)
    ]  # fmt: skip
    notes = capacity._where_it_pays(curves)
    assert [note.startswith("with gamma by batch: ") for note in notes] == [True] * len(
        said
    )
    assert all(note.endswith(end) for note, end in zip(notes, said, strict=True))


def test_devices_that_keep_the_rate_asked_for_keep_no_lower_one_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chance decides near the limits: here 3.7 to 3.99 requests per second are not kept, and 4 to 4.3 are."""
    model = load_model_spec("llama-3.1-8b")
    asked = load.Load.of(request_of(**CHAT | {"rate": 4.0, "tp": 1}), model)
    trial = trials.Trial(load=asked, layout=layouts.served_layouts(asked, model)[0])
    monkeypatch.setattr(
        trials.Trial,
        "excess",
        lambda _, rate, __, *, costs: (
            0.5 if rate < 3.7 or 4.0 <= rate <= 4.3 else math.inf
        ),
    )
    assert 4.2 < trial.highest_rate(1) <= 4.3


def test_more_load_than_the_given_devices_keep_is_answered_with_what_they_do() -> None:
    asked = CHAT | {"rate": 40.0, "draft": "none", "tp": 1}
    traffic = magicdec.plan(**asked | {"gpus": 1}).traffic
    assert traffic is not None
    assert not traffic.is_enough
    assert traffic.best.num_gpus == 1
    assert 0.0 < traffic.best.highest_rate_per_s < 40.0
    free = magicdec.plan(**asked).traffic
    assert free is not None
    assert traffic.autoregressive.num_gpus == free.best.num_gpus > 1
    with pytest.raises(CapacityError, match="nothing keeps the limits"):
        magicdec.plan(**CHAT | {"p95_tpot_ms": 0.1, "draft": "none", "tp": 1})


@pytest.mark.parametrize(("options", "message"), [
    ({"rate": 4.0, "gen_len": 0}, "a rate needs lengths"),
    ({"p95_ttft_ms": 100}, "--p95-ttft-ms goes with --rate"),
    ({"rate": 0.0}, "rate must be above 0"),
    ({"rate": 4.0, "gen_len": 10, "hardware": ["h100", "a100-sxm-80gb"]}, "one kind of device"),
    ({"rate": 4.0, "gen_len": 10, "context": ["1k", "2k"]}, "takes one --context"),
    ({"rate": 4.0, "gen_len": 10, "balance": "random"}, "unknown balance 'random'"),
    ({"requests": "trace.csv"}, "request 2 of trace.csv has 200010 tokens"),
    ({"requests": "trace.csv", "cached": 5}, "leave --workload and --cached out"),
    ({"requests": "none.csv"}, "none.csv"),
])  # fmt: skip
def test_what_cannot_be_simulated_is_one_line(
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.csv").write_text("arrival,prompt,output\n0,100,10\n1,200000,10\n")
    with pytest.raises(ConfigError) as error:
        magicdec.plan(**options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_command_says_devices_with_and_without_a_draft(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    command = typer.Typer()
    command.command()(plan_command)
    result = CliRunner().invoke(command, [
        "--hardware", "h100", "--requests", str(trace), "--p95-ttft-ms", "500", "--p95-tpot-ms", "20",
        "--draft", "eagle3", "--tp", "1",
    ])  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "4 requests/s" in result.stdout
    assert "with no draft" in result.stdout or "without a draft" in result.stdout
    assert "headroom" in result.stdout
