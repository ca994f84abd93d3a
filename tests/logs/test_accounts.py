"""What a replay says that it read, against the rows that were written."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba")

from magicdec.errors import ConfigError
from magicdec.logs.lookups import lookup
from magicdec.logs.replay import replay_logs

LOOKUPS = [
    lookup("ngram", gamma=3, min_ngram=2, max_ngram=4),
    lookup("suffix", gamma=2),
    lookup("ngram", gamma=5),
]
TEXT = "text, which needs --tokenizer"
BAD = {
    TEXT: '{"prompt": "a", "completion": "b"}',
    "an empty output": '{"prompt": [1, 2], "output": []}',
    "not JSON": "not json",
}
IDS = st.lists(st.integers(0, 3), min_size=1, max_size=9)
ROWS = st.one_of(
    st.fixed_dictionaries({"prompt": IDS, "output": IDS}), st.sampled_from(sorted(BAD)), st.just("")
)  # fmt: skip
FILES = st.lists(st.lists(ROWS, max_size=6), min_size=1, max_size=3)


def written(folder: Path, files: list[list[Any]]) -> list[Path]:
    paths = []
    for number, rows in enumerate(files):
        lines = [BAD.get(row, "") if isinstance(row, str) else json.dumps(row) for row in rows]  # fmt: skip
        paths.append(folder / f"{number}.jsonl")
        paths[-1].write_text("".join(f"{line}\n" for line in lines))
    return paths


def bad_places(files: list[list[Any]]) -> Iterator[tuple[str, str]]:
    """The reason and the place of each row that is no request."""
    for number, rows in enumerate(files):
        for line, row in enumerate(rows, 1):
            if isinstance(row, str) and row in BAD:
                yield row, f"{number}.jsonl line {line}"


@given(files=FILES)
def test_every_row_is_a_request_or_counted_with_its_reason(
    files: list[list[Any]],
) -> None:
    """Blank lines are no rows, but lines; three places of each reason are named, over all files."""
    requests = [row for rows in files for row in rows if isinstance(row, dict)]
    bad = list(bad_places(files))
    reasons = Counter(reason for reason, _ in bad)
    with tempfile.TemporaryDirectory() as folder:
        paths = written(Path(folder), files)
        if not requests:
            with pytest.raises(ConfigError) as failure:
                replay_logs(paths, LOOKUPS)
            for path in paths:
                assert path.name in str(failure.value)
            if bad:
                reason, number = reasons.most_common(1)[0]
                assert f"none of {len(bad)} rows is a request: {number} times " in str(failure.value)  # fmt: skip
                if list(reasons.values()).count(number) == 1:
                    places = [place for why, place in bad if why == reason][:3]
                    assert f"{reason} ({'; '.join(places)})" in str(failure.value)
            else:
                assert str(failure.value).endswith(": no row")
            return
        said: list[Any] = []
        replay = replay_logs(paths, LOOKUPS, progress=said.append)
    account = replay.account
    prompt_tokens = sum(len(row["prompt"]) for row in requests)
    output_tokens = sum(len(row["output"]) for row in requests)
    assert account.num_rows == len(requests) + len(bad)
    assert account.num_requests == len(requests)
    assert account.without_prompt == account.lengths_only == account.companions == 0
    assert (account.prompt_tokens, account.output_tokens) == (prompt_tokens, output_tokens)  # fmt: skip
    assert replay.replayed_tokens == len(LOOKUPS) * (prompt_tokens + output_tokens)
    assert account.unreadable == reasons
    assert sum(account.unreadable.values()) == len(bad)
    for reason in reasons:
        places = [place for why, place in bad if why == reason]
        assert account.examples[reason] == places[:3]
    known = len(requests) + len(bad) - reasons["not JSON"]
    assert sum(account.formats.values()) == known
    replayed = sum(len(row["output"]) > 1 for row in requests)
    assert [setting.num_requests for setting in replay.settings] == [replayed] * 3
    assert [setting.lookup for setting in replay.settings] == LOOKUPS
    shares = [step.done / step.total for step in said if step.startswith("reading")]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert len(shares) == len(files) + 2  # each file's n-grams, and the trees of all
