"""Files of requests: what is written is what is read, and one planted fault is refused by its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magicdec.errors import ConfigError
from magicdec.perfmodel.rate.requests import read_requests
from magicdec.specs.workload import MAX_TOKENS

SHARED_FOLDER = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
ROW = st.fixed_dictionaries(
    {
        "arrival": st.floats(0.0, 1e6),
        "prompt": st.integers(2, 10**6),
        "output": st.integers(1, 10**6),
        "cached": st.integers(0, 9),
    }
).map(lambda row: row | {"cached": min(row["cached"], row["prompt"])})
TOKENS = st.sampled_from(["prompt", "output", "cached"])
BAD_TOKENS = st.one_of(
    st.integers(max_value=-1),
    st.integers(min_value=MAX_TOKENS + 1),
    st.floats(1.0, 1e6).filter(lambda value: not value.is_integer()),
    st.sampled_from([float("nan"), float("inf"), "many", "1e400", "9" * 400, "1,5"]),
    st.booleans(),
)
BAD_ARRIVAL = st.sampled_from([-1.0, float("nan"), float("inf"), "soon", 1e300, True])


def written(
    path: Path, rows: list[dict[str, Any]], extra: dict[int, str] | None = None
) -> Path:
    if path.suffix == ".jsonl":
        lines = [json.dumps(row) for row in rows]
    else:
        header = ["arrival", "prompt", "output", "cached"]
        lines = [",".join(header)]
        lines += [",".join(_cell(row[name]) for name in header) for row in rows]
    for number, text in (extra or {}).items():
        lines[number] += text
    path.write_text("\n".join(lines) + "\n")
    return path


def _cell(value: Any) -> str:
    if isinstance(value, str) and "," in value:
        return f'"{value}"'
    return str(value)


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["arrival"])


@pytest.mark.parametrize("name", ["requests.csv", "requests.jsonl"])
@SHARED_FOLDER
@given(rows=st.lists(ROW, min_size=1, max_size=8).map(in_order))
def test_what_is_written_is_read(
    name: str, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    requests = read_requests(written(tmp_path / name, rows))
    assert requests.prompt_len.tolist() == [row["prompt"] for row in rows]
    assert requests.output_len.tolist() == [row["output"] for row in rows]
    read = [min(row["cached"], row["prompt"] - 1) for row in rows]
    assert requests.cached_len.tolist() == read
    first = rows[0]["arrival"]
    assert requests.arrival_s.tolist() == [row["arrival"] - first for row in rows]


@pytest.mark.parametrize("name", ["requests.csv", "requests.jsonl"])
@SHARED_FOLDER
@given(
    rows=st.lists(ROW, min_size=1, max_size=5).map(in_order),
    place=st.integers(0, 4),
    fault=st.tuples(TOKENS, BAD_TOKENS) | st.tuples(st.just("arrival"), BAD_ARRIVAL),
)
def test_a_planted_number_that_is_none_is_refused_by_its_line(
    name: str,
    rows: list[dict[str, Any]],
    place: int,
    fault: tuple[str, Any],
    tmp_path: Path,
) -> None:
    number = place % len(rows)
    column, value = fault
    rows[number] = rows[number] | {column: value}
    path = written(tmp_path / name, rows)
    line = number + (2 if path.suffix == ".csv" else 1)
    with pytest.raises(ConfigError) as error:
        read_requests(path)
    assert f"{path}:{line}:" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@SHARED_FOLDER
@given(
    rows=st.lists(ROW, min_size=1, max_size=5).map(in_order), place=st.integers(0, 4)
)
def test_surplus_cells_are_refused_by_their_line(
    rows: list[dict[str, Any]], place: int, tmp_path: Path
) -> None:
    number = place % len(rows) + 1
    path = written(tmp_path / "requests.csv", rows, {number: ",7"})
    with pytest.raises(ConfigError, match=rf":{number + 1} has more cells"):
        read_requests(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nests more than"),
        ("[" * 100_000 + "]" * 100_000, "Expected `object`"),
        ('{"arrival":1,"prompt":5,"output":true}', "output must be a whole number"),
        ('{"arrival":1,"prompt":100.7,"output":3}', "prompt must be a whole number"),
        ('{"arrival":1,"prompt":' + "9" * 4000 + ',"output":3}', ":1: "),
    ],
)
def test_hostile_lines_get_one_line(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_requests(path)


@pytest.mark.parametrize(
    ("row", "is_taken"),
    [
        (f"0,{2**26},1,0", True),
        (f"0,{2**26 + 1},1,0", False),
        (f"0,5,{2**26},0", True),
        (f"0,5,{2**26 + 1},0", False),
        ("999999999999.0,5,5,0", True),
        ("1e12,5,5,0", False),
        ("0,1,1,1", True),
        ("0,1,1,2", False),
    ],
)
def test_the_limits_of_a_request(row: str, is_taken: bool, tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(f"arrival,prompt,output,cached\n{row}\n")
    if is_taken:
        assert len(read_requests(path)) == 1
    else:
        with pytest.raises(ConfigError, match=":2: "):
            read_requests(path)


def test_tokens_that_requests_hold_are_weighted_by_the_time_they_generate(
    tmp_path: Path,
) -> None:
    """A mean over every token generated of what its request holds halfway."""
    path = tmp_path / "requests.csv"
    path.write_text("arrival,prompt,output\n3,100,10\n5,200,40\n")
    requests = read_requests(path)
    assert requests.mean_len == pytest.approx((10 * (100 + 5) + 40 * (200 + 20)) / 50)
    assert requests.arrival_s.tolist() == [0.0, 2.0]
    assert requests.lengths == (100, 240)
