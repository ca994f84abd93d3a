"""A command line that cannot be read: one line that names the nearest valid option, command or value; exit code 2."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.processes import Program


@pytest.fixture
def line_of(program: Program, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What is printed, in a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: program(*arguments).refusal


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("run", "--gama", "3"), "unknown option '--gama': did you mean --gamma?"),
        (("run", "-gamma", "3"), "unknown option '-g': did you mean --gamma?"),
        (("plan", "--draft_budget=64"), "unknown option '--draft_budget': did you mean --draft-budget?"),
        (("records", "export", "r.jsonl", "--ouput", "r.csv"), "unknown option '--ouput': did you mean --output?"),
        (("explore", "--no-browsr"), "unknown option '--no-browsr': did you mean --no-browser?"),
        (("calibrate", "--zzzz"), "unknown option '--zzzz': see magicdec calibrate --help"),
        (("--verson",), "unknown option '--verson': did you mean --version?"),
        (("plan", "--gamma"), "--gamma needs a value"),
        (("demo", "--quiet=yes"), "--quiet takes no value"),
    ],
)
def test_an_unknown_or_incomplete_option(
    arguments: tuple[str, ...], expected: str, line_of: Callable[..., str]
) -> None:
    assert line_of(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("pln",), "unknown command 'pln': did you mean plan?"),
        (("sensitvity", "--batch", "3"), "unknown command 'sensitvity': did you mean sensitivity?"),
        (("validate", "krnels"), "unknown command 'krnels': did you mean kernels?"),
        (("records", "list"), "unknown command 'list': did you mean ls?"),
        (("validate", "xyz"), "unknown command 'xyz': known: acceptance, grid, kernels, pairs"),
    ],
)
def test_an_unknown_command(arguments: tuple[str, ...], expected: str, line_of: Callable[..., str]) -> None:
    assert line_of(*arguments).startswith(expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("run", "--batch", "0"), "--batch must be a whole number of at least 1, not '0'"),
        (("run", "--batch", "abc"), "--batch must be a whole number of at least 1, not 'abc'"),
        (("run", "--context-spread", "2"), "--context-spread must be a number from 0 to 0.9, not '2'"),
        (("plan", "--gamma", "many"), "--gamma must be a whole number, not 'many'"),
        (("plan", "--price", "cheap"), "--price must be a number, not 'cheap'"),
        (("sensitivity", "--batch", "1.5"), "--batch must be a whole number, not '1.5'"),
        (("explore", "--port", "99999"), "--port must be a whole number from 0 to 65535, not '99999'"),
        (("run", "--format", "jsn"), "unknown --format 'jsn': did you mean json?; known: csv, json, table"),
        (("plot", "gamma", "--format", "pgn"), "unknown --format 'pgn': did you mean png?"),
        (("run", "--weights", "rand"), "unknown --weights 'rand': did you mean random?; known: checkpoint, random"),
        (("calibrate", "--weights", "none"), "unknown --weights 'none': known: checkpoint, random"),
        (("calibrate", "--engine", "sglang"), "unknown engine to calibrate 'sglang': known: ours, vllm"),
        (("calibrate", "--clock", "cpu"), "--clock cpu goes with --engine vllm"),
        (("validate", "grid", "--quick", "--clock", "cpu"), "--clock cpu goes with --engine vllm"),
    ],
)
def test_a_value_that_cannot_be(arguments: tuple[str, ...], expected: str, line_of: Callable[..., str]) -> None:
    assert line_of(*arguments).startswith(expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("export",), "magicdec export needs 'engine': vllm, sglang or trtllm"),
        (("export", "vllm"), "magicdec export needs 'plan': A plan document (magicdec plan --format json)"),
        (("records", "show", "3f2a"), "magicdec records show needs 'files': Records files (JSON lines)"),
        (("records", "export", "r.jsonl"), "magicdec records export needs --output: A .csv, .json or .parquet file"),
        (("plan", "llama-3.1-8b"), "magicdec plan takes no argument 'llama-3.1-8b': see magicdec plan --help"),
        (("plan", "model", "x"), "magicdec plan takes no argument 'model': did you mean --model?"),
    ],
)
def test_an_argument_too_few_or_too_many(
    arguments: tuple[str, ...], expected: str, line_of: Callable[..., str]
) -> None:
    assert line_of(*arguments).startswith(expected)
