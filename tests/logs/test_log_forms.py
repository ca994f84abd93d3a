"""One request in many wrappings: under every name of a proxy, as text, in pages, in tables, among others."""

from __future__ import annotations

import json
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba")

from magicdec.errors import ConfigError
from magicdec.logs import profiles, sources
from magicdec.logs.formats import (
    LoggedRow,
    UnreadableError,
    as_document,
    format_of,
    rows_of,
)
from magicdec.logs.lookups import lookup
from magicdec.logs.replay import replay_logs
from tests.logs.test_formats import CASES

ASKED = [{"role": "user", "content": "name a colour"}]
ANSWER = {"choices": [{"message": {"role": "assistant", "content": "blue"}}]}
ROW = LoggedRow(prompt=ASKED, output="blue")
cases = pytest.mark.parametrize("name", CASES)


def test_request_and_response_may_stand_in_bodies() -> None:
    request = {"model": "m", "messages": ASKED}
    for document in (
        {"id": "a", "request": request, "response": ANSWER},
        {"id": "a", "request": {"body": request}, "response": {"body": ANSWER}},
        {"id": "a", "body": request, "response": ANSWER},
    ):
        assert format_of(document) == "OpenAI"
        assert rows_of(document, {}) == [ROW]


@cases
def test_a_tables_row_is_its_document(name: str) -> None:
    """Cells are values, JSON in a text, or arrays; empty ones are left out."""
    _, document, rows = CASES[name]
    cells: dict[str, Any] = {"nothing": None}
    for field, value in document.items():
        is_nested = isinstance(value, dict | list)
        cells[field] = json.dumps(value) if is_nested and value else value
    assert rows_of(as_document(cells), {}) == rows
    assert as_document({"a": np.array([1, 2]), "b": "{no", "c": "[1]", "d": "[1"}) == {
        "a": [1, 2],
        "b": "{no",
        "c": [1],
        "d": "[1",
    }


@given(texts=st.lists(st.sampled_from(["blue", "red", "x y"]), min_size=1, max_size=4))
def test_each_choice_is_a_request_and_tokens_are_of_one_alone(texts: list[str]) -> None:
    choices = [{"message": {"content": text}, "finish_reason": "stop"} for text in texts]  # fmt: skip
    usage = {"prompt_tokens": 9, "completion_tokens": 7}
    document = {"messages": ASKED, "choices": choices, "usage": usage}
    counted = 7 if len(texts) == 1 else None
    assert rows_of(document, {}) == [
        LoggedRow(
            prompt=ASKED,
            output=text,
            is_stopped=True,
            prompt_len=9,
            output_len=counted,
        )
        for text in texts
    ]
    bare = {"prompt": "p", "choices": [{"text": text} for text in texts]}
    assert format_of(bare) == "OpenAI"
    assert [row.output for row in rows_of(bare, {})] == texts


@pytest.mark.parametrize("calls", [None, [{"name": "f"}]])
@pytest.mark.parametrize("content", [None, "", "blue"])
@pytest.mark.parametrize("thought", [None, "hm"])
def test_an_answer_is_its_reasoning_and_its_text(
    content: str | None, thought: str | None, calls: Any
) -> None:
    """A call of a tool beside them is left out; alone it is none, since its tokens are not in the log."""
    message = {"content": content, "tool_calls": calls, "reasoning": thought}
    document = {"messages": ASKED, "choices": [{"message": message}]}
    if calls and not content:
        with pytest.raises(UnreadableError, match="tool call"):
            rows_of(document, {})
        return
    text = content or ""
    if thought:
        text = f"<think>\nhm\n</think>\n\n{text}"
    assert rows_of(document, {}) == [LoggedRow(prompt=ASKED, output=text)]


@pytest.mark.parametrize("other", [5, None, "a", []])
def test_a_lists_form_is_told_by_its_first_entry(other: Any) -> None:
    """Whatever comes last; one that begins otherwise is no such list."""
    first = {"text": "blue"}
    assert format_of({"prompt": "p", "choices": [first, other]}) == "OpenAI"
    assert format_of({"prompt": "p", "choices": [other, first]}) is None


@given(roles=st.lists(st.sampled_from(["user", "assistant", "system"]), min_size=1, max_size=5))  # fmt: skip
def test_a_conversation_ends_in_its_answer(roles: list[str]) -> None:
    """Each answer is one, after all that stands before it."""
    messages = [{"role": role, "content": str(n)} for n, role in enumerate(roles)]
    document = {"messages": messages}
    is_one = roles[-1] == "assistant"
    assert (format_of(document) == "conversation") == is_one
    if not is_one:
        return
    places = [n for n, role in enumerate(roles) if role == "assistant" and n > 0]
    if not places:
        with pytest.raises(UnreadableError, match="begins with its answer"):
            rows_of(document, {})
        return
    assert rows_of(document, {}) == [
        LoggedRow(prompt=messages[:n], output=str(n), is_stopped=True) for n in places
    ]


@pytest.mark.parametrize(
    "document",
    [
        {"input_lens": [1, 2]},
        {"output_lens": [1, 2]},
        {"arguments": [["a"]]},
        {"resps": [["a"]]},
        {"question_id": 1, "choices": [{"text": 1}]},
        {"input": "a"},
        {"prompt": "a"},
        {"prompt": [1, 2]},
        {"output": [1, 2]},
        {"outputs": [{"token_ids": [1]}]},
        {"prompt": [1, 2], "outputs": []},
        {"prompt": [1, 2], "outputs": [{"text": "a"}]},
    ],
)
def test_half_of_a_format_is_none(document: dict[str, Any]) -> None:
    assert format_of(document) in (None, "OpenAI")
    with pytest.raises(UnreadableError):
        rows_of(document, {})


@given(
    prompt=st.lists(
        st.sampled_from([3, 0, 2**31 - 1, 2**31, -1, 2.0, 2.7, True, "7", None])
        | st.just({"role": "user", "content": "a"}),
        min_size=1,
        max_size=12,
    )
)
def test_token_ids_are_whole_and_in_their_range(prompt: list[Any]) -> None:
    """Wherever they stand; never beside messages."""
    document = {"prompt_token_ids": prompt, "output_token_ids": [1]}
    is_good = all(
        isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**31
        for each in prompt
    )
    if is_good:
        assert rows_of(document, {}) == [LoggedRow(prompt=prompt, output=[1])]
    else:
        with pytest.raises(UnreadableError):
            rows_of(document, {})


@pytest.mark.parametrize("before", range(7, 12))
def test_messages_among_token_ids_are_refused_wherever_they_stand(before: int) -> None:
    """Also beyond the first ids, by which a prompt of ids is told."""
    prompt = [5] * before + [ASKED[0]]
    with pytest.raises(UnreadableError):
        rows_of({"prompt_token_ids": prompt, "output_token_ids": [1]}, {})
    with pytest.raises(UnreadableError):
        rows_of({"prompt_token_ids": [1], "output_token_ids": prompt}, {})


@pytest.mark.parametrize("zone", ["", "Z", "+00:00", "+01:00", "-05:30"])
def test_a_date_is_of_its_zone_and_else_of_utc(zone: str) -> None:
    at = datetime.fromisoformat(f"2024-01-01T12:00:01{zone or 'Z'}").timestamp()
    document = {"timestamp": f"2024-01-01T12:00:01{zone}", "messages": ASKED} | ANSWER
    (row,) = rows_of(document, {})
    assert row.arrival_s == at


# Replays


def test_times_of_a_replay_lie_within_it(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    row = json.dumps({"prompt": [1, 2] * 40, "output": [1, 2] * 40})
    path.write_text(f"{row}\n" * 50)
    replay = replay_logs([path], [lookup("ngram", gamma=3), lookup("suffix", gamma=2)])
    assert 0.0 < replay.replay_s < replay.elapsed_s
    assert replay.account.tokenizing_s == 0.0


def test_a_sweep_pairs_every_shortest_with_every_longer_longest() -> None:
    """Of vLLM's rule: but 1 with 4 or 8, which draft as 1 with its neighbours do; and vLLM's own 5 to
    5. A draft model is replayed at each gamma of 1 to 8."""
    shortest, longest = profiles.SHORTEST_NGRAMS, profiles.LONGEST_NGRAMS
    pairs = {(low, high) for low in shortest for high in longest if low < high}
    assert set(profiles.NGRAM_RANGES) == pairs - {(1, 4), (1, 8)} | {(5, 5)}
    assert list(profiles.MODEL_GAMMAS) == list(range(1, 9))
    assert profiles.SHOWN_GAMMA in profiles.MODEL_GAMMAS
    assert profiles.SHOWN_GAMMA in profiles.NGRAM_GAMMAS
    assert profiles.SHOWN_GAMMA in profiles.SUFFIX_GAMMAS


SWEEPS = {
    "ngram": profiles.NGRAM_GAMMAS,
    "suffix": profiles.SUFFIX_GAMMAS,
    "a draft model": profiles.MODEL_GAMMAS,
    "llama.cpp's lengths": profiles.LLAMA_LENGTHS,
    "shortest n-grams": profiles.SHORTEST_NGRAMS,
    "longest n-grams": profiles.LONGEST_NGRAMS,
}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_rises_by_two_thirds_at_most(name: str) -> None:
    """By one where that is more, so that the best is never far from one that was tried; none is tried twice. llama.cpp
    drafts no fewer than it matches, so its lengths go by four."""
    swept = SWEEPS[name]
    by_four = name == "llama.cpp's lengths"
    for low, high in pairwise(swept):
        assert high - low == 4 if by_four else low < high <= max(low + 1, low * 5 / 3)
    if by_four:
        assert swept[0] == 4
    elif "longest" not in name:
        assert swept[0] == 1


@pytest.mark.parametrize("more", [0, 1])
def test_as_many_prompts_stand_apart_as_are_kept(
    more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "COMPANION_LIMIT", 3)
    rows = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1", "body": {"messages": ASKED}}
        for n in range(3 + more)
    ]  # fmt: skip
    path = tmp_path / "batch.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shards = sources.shards_of([path])
    if more:
        with pytest.raises(ConfigError, match="more than 3 prompts stand apart"):
            sources.companions_of(shards)
    else:
        assert len(sources.companions_of(shards)) == 3
