"""Logs that somebody else wrote: a row is read as what its fields say, or counted and named, and no file runs code or
takes the memory of the machine."""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba")

from magicdec.errors import ConfigError
from magicdec.logs import formats, replay, sources
from magicdec.logs.formats import LoggedRow, UnreadableError, rows_of
from magicdec.logs.lookups import lookup
from magicdec.logs.replay import replay_logs
from magicdec.logs.requests import Account, requests_of
from magicdec.logs.sources import shards_of
from tests.fuzz.damage import NASTY, damaged

LONG = list(range(1, 12))
CHAT = [{"role": "user", "content": "a"}]
USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 4},
}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "token ids": {"prompt": LONG, "output": LONG, "timestamp": 1.5},
    "vLLM's outputs": {"prompt_token_ids": LONG, "outputs": [{"token_ids": LONG}]},
    "OpenAI": {
        "messages": CHAT,
        "choices": [{"message": {"content": "b"}, "finish_reason": "stop"}],
        "usage": USAGE,
        "created": 1_700_000_000,
    },
    "vllm bench serve": {
        "input_lens": [3, 4],
        "output_lens": [5, 6],
        "generated_texts": ["a", "b"],
        "errors": ["", ""],
        "start_times": [0.5, 1.5],
    },
    "ShareGPT": {
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b"},
        ]
    },
    "pair": {"prompt": "a", "completion": "b"},
}
VALUES = (*NASTY, 2.7, "77", -50, 60.9, 10**30, int("9" * 400), "9" * 310)


def is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def is_text(value: Any) -> bool:
    if value is None or isinstance(value, str):
        return True
    if not isinstance(value, list):
        return False
    return all(map(is_whole, value)) or all(isinstance(part, dict) for part in value)


def is_typed(row: LoggedRow) -> bool:
    """Whether every field holds what it says, looked at one by one."""
    counts = (row.prompt_len, row.output_len, row.cached_len)
    if not all(count is None or is_whole(count) for count in counts):
        return False
    arrival_s = row.arrival_s
    if arrival_s is not None and not (
        isinstance(arrival_s, float) and math.isfinite(arrival_s)
    ):
        return False
    return is_text(row.prompt) and is_text(row.output)


def faults() -> Iterator[str]:
    """Each damage to a document of each format that is read as something else, or not refused."""
    for name, document in DOCUMENTS.items():
        for damage, changed in damaged(document, count=10**6, seed=0, values=VALUES):
            try:
                rows = rows_of(changed, {})
            except UnreadableError:
                continue
            except Exception as failure:
                yield f"{name}: {damage}: {failure!r}"
                continue
            if not all(is_typed(row) for row in rows):
                yield f"{name}: {damage}: {rows}"


def test_the_documents_are_read_as_they_are() -> None:
    for name, document in DOCUMENTS.items():
        assert rows_of(document, {}), name


def test_a_damaged_field_is_read_as_what_it_is_or_its_row_is_refused() -> None:
    assert not list(faults())


def test_a_row_that_is_not_checked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the check above."""
    monkeypatch.setattr(formats, "_checked", lambda row: row)
    assert list(faults())


@given(
    st.one_of(
        st.floats(),
        st.integers(),
        st.text("0123456789.", max_size=400),
        st.integers(308, 400).map(lambda digits: "9" * digits),
        st.sampled_from([math.inf, -math.inf, math.nan, "inf", int("9" * 400)]),
    )
)
def test_a_time_is_seconds_of_a_clock_or_none(value: Any) -> None:
    document = {"prompt": [1], "output": [2], "timestamp": value}
    try:
        (row,) = rows_of(document, {})
    except UnreadableError:
        return
    assert row.arrival_s is None or row.arrival_s <= formats.MILLISECONDS_FROM


@pytest.mark.parametrize(
    ("unit_s", "seconds"), [(1, 1.7e9), (1e3, 1.7e9), (1e6, 1.7e9), (1e9, 1.7e9)]
)
def test_times_in_smaller_units_are_seconds(unit_s: float, seconds: float) -> None:
    (row,) = rows_of({"prompt": [1], "output": [2], "timestamp": seconds * unit_s}, {})
    assert row.arrival_s == pytest.approx(seconds)


def test_whole_numbers_of_a_table_with_gaps_are_read() -> None:
    document = DOCUMENTS["OpenAI"] | {"usage": {"prompt_tokens": 60.0}}
    assert rows_of(document, {})[0].prompt_len == 60


def ids_log(path: Path, num_rows: int = 6) -> Path:
    rows = [json.dumps({"prompt": LONG, "output": LONG}) for _ in range(num_rows)]
    path.write_text("\n".join(rows))
    return path


def test_bad_rows_are_counted_and_named(tmp_path: Path) -> None:
    log = ids_log(tmp_path / "log.jsonl", 3)
    with log.open("a") as file:
        file.write('\n{"prompt":[1,2],"outputs":[5]}\n{"outputs":[5],"prompt":[1]}\n')
    account = Account()
    (shard,) = shards_of([log])
    requests = list(requests_of(shard, account, tokenizer=None, companions={}))
    assert len(requests) == 3
    assert sum(account.unreadable.values()) == 2
    assert [f"log.jsonl line {line}" for line in (4, 5)] in account.examples.values()


def documents(path: Path) -> list[Any]:
    return [
        document
        for shard in shards_of([path])
        for _, document in sources.documents_of(shard)
    ]


@pytest.mark.parametrize("share", [0.3, 0.6, 0.99])
def test_a_cut_compressed_file_is_not_taken_as_whole(
    tmp_path: Path, share: float
) -> None:
    lines = ids_log(tmp_path / "log.jsonl", 20_000).read_bytes()
    noise = (
        b'{"prompt": "%s", "completion": "b"}\n' % os.urandom(200_000).hex().encode()
    )
    data = gzip.compress(lines + noise)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ConfigError, match="cannot read"):
        documents(cut)


@pytest.mark.parametrize("name", ["log.json.gz", "log.jsonl.gz"])
def test_what_unfolds_to_more_than_a_log_would_is_not_read_whole(
    tmp_path: Path, name: str
) -> None:
    """One line of 24 MiB in a few kilobytes."""
    log = tmp_path / name
    line = b'{"a": "' + bytes(24 << 20).replace(b"\0", b"x") + b'"}'
    log.write_bytes(gzip.compress(line, 1))
    if ".jsonl" in name:
        (document,) = documents(log)
        assert isinstance(document, UnreadableError)
        return
    with pytest.raises(ConfigError, match="more than"):
        documents(log)


def test_lines_that_unfold_without_end_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file within the bound is read to its last line; one line more is refused."""
    line = b'{"a": 1}\n'
    monkeypatch.setattr(sources, "EXPANDED_LIMIT_BYTES", len(line) * 1000)
    monkeypatch.setattr(sources, "MOST_EXPANDED", 0)
    log = tmp_path / "log.jsonl.gz"
    for number in (1000, 1001):
        log.write_bytes(gzip.compress(line * number))
        if number == 1000:
            assert len(documents(log)) == number
            continue
        with pytest.raises(ConfigError, match="unfolds to more than"):
            documents(log)


def test_a_replay_of_one_file_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "BETWEEN_MESSAGES_S", 0.0)
    said: list[str] = []
    log = ids_log(tmp_path / "log.jsonl", 30)
    replay_logs([log], LOOKUPS, progress=said.append)
    assert said[0] == said[-1] == "reading logs"
    assert said[1:-1] == [f"replaying requests: {number}" for number in range(1, 31)]


LOOKUPS = [lookup("ngram", gamma=3, min_ngram=2, max_ngram=2)]
