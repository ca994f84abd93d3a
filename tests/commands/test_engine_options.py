"""Engines' own names of options, counts like 32k, and what the help says."""

from __future__ import annotations

import json
from importlib import import_module

import pytest
from typer.testing import CliRunner

from magicdec import plan_request
from magicdec.cli import COMMANDS, app, register_commands
from magicdec.commands.engine_options import ANSWERS, OURS, as_ours
from magicdec.errors import ConfigError
from magicdec.specs.device import DTYPE_BYTES, WEIGHT_ONLY
from magicdec.specs.precision import ENGINE_FORMATS

register_commands()
NAMES = [f"--{name.replace('_', '-')}" for name in plan_request.options()]
QUICK = ("plan", "--draft", "none", "--format", "json")


def answer(*args: str) -> dict:
    done = CliRunner().invoke(app, [*QUICK, *args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_plan_asked_with_vllms_options_is_the_one_asked_with_ours() -> None:
    theirs = answer(
        *(
            "--model",
            "Qwen/Qwen2.5-7B-Instruct",
            "--gpu",
            "h100",
            "--tensor_parallel_size=2",
        ),
        *("--max-num-seqs", "16", "--input-len", "4k", "--output-len", "256"),
        *("--quantization", "awq", "--kv-cache-dtype", "fp8_e4m3"),
    )
    ours = answer(
        *(
            "--model",
            "qwen2.5-7b",
            "--hardware",
            "h100-sxm-80gb",
            "--tp",
            "2",
            "--batch",
            "16",
        ),
        *(
            "--context",
            "4096",
            "--gen-len",
            "256",
            "--weight-dtype",
            "int4",
            "--kv-dtype",
            "fp8",
        ),
    )
    assert theirs["choice"] == ours["choice"]
    assert theirs["precision"] == ours["precision"]


def test_every_engines_option_leads_to_one_of_ours() -> None:
    known = {f"--{name}" for names in OURS.values() for name in names}
    assert known <= {*NAMES, "--prompt-len", "--output-len"}
    for theirs in OURS:
        if f"--{theirs}" not in NAMES:
            assert as_ours([f"--{theirs}", "x"], names=NAMES, counts=[])[0] in NAMES
    assert set(ENGINE_FORMATS.values()) <= set(DTYPE_BYTES)


@pytest.mark.parametrize("theirs", ANSWERS)
def test_an_option_without_a_counterpart_is_answered_with_ours(theirs: str) -> None:
    with pytest.raises(ConfigError, match=f"--{theirs} is an engine's option"):
        as_ours([f"--{theirs}", "1"], names=NAMES, counts=[])


def test_all_commands_read_32k() -> None:
    done = CliRunner().invoke(
        app,
        [
            "sensitivity",
            "--context",
            "2k",
            "--acceptance-rate",
            "0.8",
            "--hardware",
            "h100",
        ],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    assert as_ours(
        ["--n", "2k", "--m", "2k"], names=["--n", "--m"], counts=["--n"]
    ) == [
        "--n",
        "2048",
        "--m",
        "2k",
    ]


def test_the_help_of_weight_dtype_lists_every_format() -> None:
    options = plan_request.options()
    assert all(dtype in options["weight_dtype"].help for dtype in DTYPE_BYTES)
    cache = options["kv_dtype"].help
    assert all(dtype in cache for dtype in ("bf16", "fp16", "fp8", "int4", "fp32"))
    assert set(WEIGHT_ONLY) <= set(DTYPE_BYTES)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_the_help_fit_80_columns(name: str) -> None:
    module, _, epilog = COMMANDS[name]
    text = getattr(import_module(f"magicdec.commands.{module}"), epilog)
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize("words", [("--tok-s-user", "40"), ("--tok-s-user=40",)])
def test_tokens_per_second_and_user_are_a_limit_on_the_time_per_token(
    words: tuple[str, ...],
) -> None:
    context = ("--context", "2k", "--batch", "4")
    theirs = answer(*context, *words)
    ours = answer(*context, "--tpot-ms", "25")
    assert theirs["request"]["tpot_limit_s"] == pytest.approx(0.025)
    assert theirs["choice"] == ours["choice"]


@pytest.mark.parametrize("rate", ["0", "-3", "fast", "inf"])
def test_a_rate_of_a_user_that_is_none_is_refused(rate: str) -> None:
    with pytest.raises(ConfigError, match="tokens per second above 0"):
        as_ours(["--tok-s-user", rate], names=NAMES, counts=[])
