"""A command line that cannot be read: one line that names the nearest valid option, command or value, exit code 2; and
lists of numbers as options take them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from magicdec.commands.options import as_dtype, as_formats, parse_ints
from magicdec.commands.profile_acceptance import next_plan
from magicdec.errors import ConfigError
from tests.processes import Program


@pytest.fixture
def line_of(program: Program, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What is printed, in a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: program(*arguments).refusal


REFUSALS = [
    (("run", "--gama", "3"), "unknown option '--gama': did you mean --gamma?$"),
    (("run", "-gamma", "3"), "unknown option '-g': did you mean --gamma?$"),
    (
        ("plan", "--draft_budget=64"),
        "unknown option '--draft_budget': did you mean --draft-budget?$",
    ),
    (
        ("records", "ls", "r.jsonl", "--fromat", "csv"),
        "unknown option '--fromat': did you mean --format?$",
    ),
    (
        ("explore", "--no-browsr"),
        "unknown option '--no-browsr': did you mean --no-browser?$",
    ),
    (
        ("calibrate", "--zzzz"),
        "unknown option '--zzzz': see magicdec calibrate --help$",
    ),
    (("--verson",), "unknown option '--verson': did you mean --version?$"),
    (("plan", "--gamma"), "--gamma needs a value$"),
    (("demo", "--quiet=yes"), "--quiet takes no value$"),
    (("pln",), "unknown command 'pln': did you mean plan?"),
    (
        ("sensitvity", "--batch", "3"),
        "unknown command 'sensitvity': did you mean sensitivity?",
    ),
    (("validate", "publishd"), "unknown command 'publishd': did you mean published?"),
    (("records", "list"), "unknown command 'list': did you mean ls?"),
    (
        ("validate", "xyz"),
        "unknown command 'xyz': known: grid, pairs, published, records",
    ),
    (("run", "--batch", "0"), "--batch must be a whole number of at least 1, not '0'"),
    (
        ("run", "--batch", "abc"),
        "--batch must be a whole number of at least 1, not 'abc'",
    ),
    (
        ("run", "--context-spread", "2"),
        "--context-spread must be a number from 0 to 0.9, not '2'",
    ),
    (("plan", "--gamma", "many"), "--gamma must be a whole number, not 'many'"),
    (("plan", "--price", "cheap"), "--price must be a number, not 'cheap'"),
    (
        ("sensitivity", "--batch", "1.5"),
        "--batch must be numbers like 4, 32k or 1,2,4-6, not '1.5'",
    ),
    (
        ("explore", "--port", "99999"),
        "--port must be a whole number from 0 to 65535, not '99999'",
    ),
    (
        ("run", "--format", "jsn"),
        "unknown --format 'jsn': did you mean json?; known: csv, json, table",
    ),
    (("plot", "gamma", "--format", "pgn"), "unknown --format 'pgn': did you mean png?"),
    (
        ("run", "--weights", "rand"),
        "unknown --weights 'rand': did you mean random?; known: checkpoint, random",
    ),
    (
        ("calibrate", "--weights", "none"),
        "unknown --weights 'none': known: checkpoint, random",
    ),
    (
        ("calibrate", "--engine", "sglang"),
        "unknown engine to calibrate 'sglang': known: ours, vllm",
    ),
    (("calibrate", "--clock", "cpu"), "--clock cpu goes with --engine vllm"),
    (
        ("validate", "grid", "--quick", "--clock", "cpu"),
        "--clock cpu goes with --engine vllm",
    ),
    (("export",), "magicdec export needs 'engine': vllm, sglang or trtllm"),
    (
        ("export", "vllm"),
        "magicdec export needs 'plan': A plan document (magicdec plan --format json)",
    ),
    (
        ("records", "show", "3f2a"),
        "magicdec records show needs 'files': Records files (JSON lines)",
    ),
    (
        ("plan", "llama-3.1-8b"),
        "magicdec plan takes no argument 'llama-3.1-8b': did you mean --model llama-3.1-8b?",
    ),
    (
        ("plan", "model", "x"),
        "magicdec plan takes no argument 'model': did you mean --model?",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    REFUSALS,
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_one_line_that_names_the_nearest(
    arguments: tuple[str, ...], expected: str, line_of: Callable[..., str]
) -> None:
    assert f"{line_of(*arguments)}$".startswith(expected)  # with a $ the whole line


@pytest.mark.parametrize("arguments", [(), ("records",), ("validate",)])
def test_a_group_alone_shows_its_whole_help(
    arguments: tuple[str, ...], program: Program
) -> None:
    done = program(*arguments)
    assert done.returncode == 0
    assert "\nCommands:\n" in done.stdout
    assert len(done.stdout.splitlines()) > 8


def test_what_was_measured_is_named_for_the_next_command(tmp_path: Path) -> None:
    """The line that `profile-acceptance` ends with names files that are there."""
    profile, measured = (
        tmp_path / "local.toml",
        tmp_path / "local.acceptance.streamingllm.json",
    )
    line = next_plan(profile, [measured], model="embedded", draft="self", context=4096)
    assert (
        line == f"magicdec plan --model embedded --acceptance {measured} --context 4096"
    )
    profile.touch()
    (tmp_path / "local.engine.toml").touch()
    line = next_plan(profile, [measured], model="embedded", draft="self", context=4096)
    assert (
        f"--hardware {profile} --engine {tmp_path / 'local.engine.toml'} --acceptance"
        in line
    )
    line = next_plan(
        profile,
        [measured],
        model="m",
        draft="eagle3",
        draft_model="path/to/head",
        context=64,
    )
    assert "--draft eagle3 --draft-model path/to/head --acceptance" in line


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("4", [4]),
        ("1,2,4-6", [1, 2, 4, 5, 6]),
        ("512,32k,1m", [512, 32_768, 1_048_576]),
        ("1k-1026", [1024, 1025, 1026]),
    ],
)
def test_numbers_ranges_and_binary_suffixes(text: str, values: list[int]) -> None:
    assert parse_ints(text, "--context") == values


@pytest.mark.parametrize("text", ["", "x", "k", "1.5k", "1-3000000000", "6-4", "1-2-3"])
def test_what_is_no_list_of_numbers_or_a_far_too_long_one_is_refused_by_the_options_name(
    text: str,
) -> None:
    with pytest.raises(ConfigError, match=r"--gamma"):
        parse_ints(text, "--gamma")


def test_a_number_format_goes_by_torchs_name_and_by_the_profiles(
    program: Program,
) -> None:
    formats = {
        "--weight-dtype": "bfloat16",
        "--kv-dtype": "float16",
        "--draft-weight-dtype": "bf16",
    }
    words = [word for pair in formats.items() for word in pair]
    planned = json.loads(program("plan", *words, "--format", "json").stdout)[
        "precision"
    ]
    assert [
        planned[name] for name in ("weight_dtype", "kv_dtype", "draft_weight_dtype")
    ] == [
        "bf16",
        "fp16",
        "bf16",
    ]
    assert (as_dtype("fp32"), as_dtype("bfloat16"), as_formats("fp8, bfloat16")) == (
        "float32",
        "bfloat16",
        "fp8,bf16",
    )


def test_no_option_takes_more_than_is_counted(program: Program) -> None:
    """A number that no float holds is one line, wherever it stands."""
    digits = "9" * 400
    assert "--gpus must be at most 1e+15" in program("plan", "--gpus", digits).refusal
    assert "unknown hardware" in program("plan", "--hardware", f"{digits}xh100").refusal
    assert "--batch must be numbers" in program("plan", "--batch", digits).refusal
