"""Requests as gateways log them."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from magicdec.errors import ConfigError
from magicdec.perfmodel.rate.gateway import (
    ROLES,
    Columns,
    LogReader,
    flat,
    recognised,
    seconds,
)
from magicdec.perfmodel.rate.gateway import given as given_columns
from magicdec.perfmodel.rate.requests import log_columns, read_requests

register_commands()
REQUESTS = [(100.0, 512, 64, 0), (100.5, 2048, 128, 1024), (103.25, 300, 7, 0)]
"""Arrival in seconds, tokens of prompt and output, cached tokens."""


def nested(arrival: float, prompt: int, output: int, cached: int) -> dict[str, object]:
    """A line of a proxy's log around OpenAI's response."""
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return {
        "id": "x",
        "created_at": arrival,
        "response": {"model": "m", "usage": usage},
    }


def iso(arrival: float, prompt: int, output: int, cached: int) -> dict[str, object]:
    stamp = f"2026-01-31T12:{int(arrival) // 60:02d}:{arrival % 60:06.3f}Z"
    return {
        "Timestamp": stamp,
        "Input Tokens": prompt,
        "Output-Tokens": output,
        "n": cached,
    }


def milliseconds(
    arrival: float, prompt: int, output: int, cached: int
) -> dict[str, object]:
    """Flat, with milliseconds since 1970."""
    start = int((1.77e9 + arrival) * 1000)
    return {"startTime": start, "promptTokens": prompt, "completionTokens": output}


def opentelemetry(
    arrival: float, prompt: int, output: int, cached: int
) -> dict[str, object]:
    return {
        "start_time": 1.77e9 + arrival,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": output,
    }


def mooncake(
    arrival: float, prompt: int, output: int, cached: int
) -> dict[str, object]:
    return {
        "timestamp": arrival * 1000,
        "input_length": prompt,
        "output_length": output,
    }


@pytest.mark.parametrize("line", [nested, iso, milliseconds, opentelemetry, mooncake])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_the_same_requests_are_read_from_every_log(
    line, kind: str, tmp_path: Path
) -> None:
    rows = [line(*request) for request in REQUESTS]
    path = tmp_path / f"log.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows))
    else:
        text = io.StringIO()
        table = csv.DictWriter(text, rows[0])
        table.writeheader()
        for row in rows:
            cells = {
                k: json.dumps(v) if isinstance(v, dict) else v for k, v in row.items()
            }
            table.writerow(cells)
        path.write_text(text.getvalue())
    if line is mooncake and kind == "csv":
        return  # a format of JSONL
    found = read_requests(path)
    assert np.allclose(found.arrival_s, [0.0, 0.5, 3.25], atol=1e-3)
    assert found.prompt_len.tolist() == [512, 2048, 300]
    assert found.output_len.tolist() == [64, 128, 7]
    assert found.cached_len.tolist() == ([0, 1024, 0] if line is nested else [0, 0, 0])


def test_a_log_in_order_of_ends_is_read_by_arrival_and_errors_are_left_out(
    tmp_path: Path,
) -> None:
    rows = [nested(*request) for request in reversed(REQUESTS)]
    rows.insert(1, {"id": "x", "created_at": 101.0, "response": {"error": "timeout"}})
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_requests(path).prompt_len.tolist() == [512, 2048, 300]


def test_columns_may_be_named(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("t_in,t_out,a,b\n5,9,100,10\n6,9,200,20\n")
    with pytest.raises(ConfigError, match="--columns arrival="):
        read_requests(path)
    found = read_requests(path, "arrival=t_in,prompt=a,output=b")
    assert found.arrival_s.tolist() == [0.0, 1.0]
    assert found.prompt_len.tolist() == [100, 200]
    with pytest.raises(ConfigError, match="the file has no column 'c'"):
        read_requests(path, "arrival=t_in,prompt=a,output=c")
    with pytest.raises(ConfigError, match="--columns must be arrival=COLUMN"):
        read_requests(path, "arrivals=t_in")


def test_what_was_recognised_is_said(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(json.dumps(nested(*request)) for request in REQUESTS))
    columns = log_columns(path)
    assert columns == Columns(
        "created_at",
        "response.usage.prompt_tokens",
        "response.usage.completion_tokens",
        "response.usage.prompt_tokens_details.cached_tokens",
    )
    assert str(columns).startswith(
        "arrival from created_at, prompt from response.usage.prompt"
    )
    asked = ["plan", "--requests", str(path), "--columns", "prompt=nothing"]
    assert CliRunner().invoke(app, asked).exit_code != 0
    assert recognised({"created_at": 1, "prompt_tokens": 2}) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (12.5, 12.5),
        ("1770000000", 1.77e9),
        (1770000000123, 1770000000.123),
        (1770000000123456, 1770000000.123456),
        (1770000000123456789, 1770000000.1234568),
        ("2026-01-31T12:00:00Z", 1769860800.0),
        ("2026-01-31 13:00:00+01:00", 1769860800.0),
        ("2026-01-31 12:00:00 UTC", 1769860800.0),
    ],
)
def test_times_are_read_in_the_units_that_logs_have(
    value: object, expected: float
) -> None:
    assert seconds(value) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("most", "unit"), [(1e11, 1.0), (1e14, 1e-3), (1e17, 1e-6), (1e20, 1e-9)]
)
def test_a_number_is_of_the_coarsest_unit_in_which_it_lies_before_the_year_5138(
    most: float, unit: float
) -> None:
    """100,000 million seconds after 1970."""
    for value in (most, math.nextafter(most, 0.0), most / 900.0):
        assert seconds(value) == pytest.approx(value * unit)


@pytest.mark.parametrize("value", ["yesterday", None, -1, True, float("nan")])
def test_what_is_no_time_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="time must be a"):
        seconds(value)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("created_at,prompt_tokens,completion_tokens\n1,5,5\n2,5.5,5\n")
    with pytest.raises(
        ConfigError, match=r"log\.csv:3: prompt_tokens must be a whole number"
    ):
        read_requests(path)


# Any object


few = settings(max_examples=50, deadline=None)
NAMES = st.sampled_from(["usage", "a", "Prompt Tokens", "created-at", "ts", "output", "completion_tokens"])  # fmt: skip
OBJECTS = st.recursive(
    st.none() | st.integers(0, 9) | st.sampled_from(["", "x", "{not"]),
    lambda inner: st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


def leaves(value: object, path: tuple[str, ...] = ()) -> dict[str, object]:
    if not isinstance(value, dict):
        return {".".join(path): value}
    found: dict[str, object] = {}
    for name, inner in value.items():
        found |= leaves(inner, (*path, name))
    return found


@few
@given(values=st.dictionaries(NAMES, OBJECTS, max_size=4), as_text=st.booleans())
def test_values_of_objects_are_known_by_their_paths(
    values: dict[str, object], as_text: bool
) -> None:
    """Objects in a cell may be written as JSON."""
    written = dict(values)
    if as_text:
        written = {
            name: f" {json.dumps(value)}" if isinstance(value, dict) else value
            for name, value in values.items()
        }
    assert flat(written) == leaves(values)


@few
@given(paths=st.lists(st.lists(NAMES, min_size=1, max_size=3).map(".".join), max_size=9, unique=True))  # fmt: skip
def test_a_part_is_the_shortest_path_that_ends_in_its_likeliest_name(
    paths: list[str],
) -> None:
    """The first of several as short."""
    found = recognised(dict.fromkeys(paths, 1))

    def path_of(role: str) -> str | None:
        ends = {
            path: path.split(".")[-1].lower().replace("-", "_").replace(" ", "_")
            for path in paths
        }
        for name in ROLES[role]:
            of_name = [path for path in paths if ends[path] == name]
            if of_name:
                return next(p for p in of_name if len(p) == min(map(len, of_name)))
        return None

    needed = [path_of(role) for role in ("arrival", "prompt", "output")]
    if None in needed:
        assert found is None
        with pytest.raises(ConfigError):
            given_columns("cached=nothing", dict.fromkeys(paths, 1))
        return
    assert found == Columns(*needed, path_of("cached"))
    for place, role in enumerate(ROLES):
        for path in paths:
            chosen = given_columns(f" {role} = {path} ", dict.fromkeys(paths, 1))
            assert chosen == found._replace(**{role: path})
            assert chosen[place] == path


@few
@given(
    prompt=st.sampled_from([None, "", 0, 1, 7, "7", 7.0, -1, 0.5, True, "x", [1]]),
    output=st.sampled_from([None, "", 0, 1, 3, "3"]),
    cached=st.sampled_from([None, "", 0, 5, 9, -1, "y"]),
    has_cached=st.booleans(),
)
def test_a_line_is_a_request_where_it_has_tokens(
    prompt: object, output: object, cached: object, has_cached: bool
) -> None:
    """Whole numbers, also as text; no more is cached than there is."""
    columns = Columns("t", "in", "out", "hit" if has_cached else None)
    line = {"t": 3.0, "in": prompt, "out": output, "hit": cached}
    reader = LogReader(columns)
    if prompt in (-1, 0.5, "x", [1]) or prompt is True:
        with pytest.raises(ConfigError, match="in must be a"):
            reader(line)
        return
    if prompt in (None, "", 0) or output in (None, "", 0):
        assert reader(line) is None
        return
    if has_cached and cached in (-1, "y"):
        with pytest.raises(ConfigError, match="hit must be a"):
            reader(line)
        return
    tokens = int(float(str(prompt)))
    hit = min(int(str(cached or 0)), tokens) if has_cached else 0
    assert reader(line) == (3.0, tokens, int(str(output)), hit)
    with pytest.raises(ConfigError, match="t must be a date"):
        reader(line | {"t": "soon"})


def test_parts_that_no_column_is_known_to_be_are_named() -> None:
    with pytest.raises(ConfigError, match=r"its prompt or output; .* prompt=COLUMN,output=COLUMN$"):  # fmt: skip
        given_columns("arrival=when", {"when": 1, "b": 2})
    with pytest.raises(ConfigError, match="did you mean tokens_in"):
        given_columns("prompt=token_in", {"when": 1, "tokens_in": 2})
