"""The load that a log holds, and plans made from a log alone."""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba")

from magicdec.errors import ConfigError
from magicdec.logs.load import LogLoad, PrefixCache, read_load
from magicdec.logs.requests import Account
from magicdec.perfmodel.acceptance import load_profile
from magicdec.perfmodel.rate.requests import read_requests
from tests.processes import Program

SAMPLES = Path(__file__).parents[2] / "docs" / "samples" / "requests.jsonl"
texts = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=12
)


@given(texts=texts, block=st.sampled_from([1, 4, 16]))
def test_a_cache_with_room_finds_the_longest_prefix_in_whole_blocks(
    texts: list[list[int]], block: int
) -> None:
    """What an earlier text begins with too, by comparing all of them."""
    cache = PrefixCache(block_tokens=block, room_tokens=None)
    for number, text in enumerate(texts):
        longest = 0
        for earlier in texts[:number]:
            common = 0
            while (
                common < min(len(text), len(earlier))
                and text[common] == earlier[common]
            ):
                common += 1
            longest = max(longest, common // block * block)
        tokens = np.array(text, dtype=np.int32)
        assert cache.shared_tokens(tokens) == longest
        cache.add(tokens)


@given(
    texts=texts,
    block=st.sampled_from([1, 3, 16]),
    room=st.integers(0, 40),
    adds=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_a_cache_of_any_room_holds_the_last_blocks_that_were_used(
    texts: list[list[int]], block: int, room: int, adds: list[bool]
) -> None:
    """A block is all that stands before it too. A plain list of them: what is found or added goes to its end."""
    cache = PrefixCache(block_tokens=block, room_tokens=room)
    kept: list[tuple[int, ...]] = []
    for text, is_added in zip(texts, adds, strict=False):
        blocks = [tuple(text[: (n + 1) * block]) for n in range(len(text) // block)]
        found = []
        for each in blocks:
            if each not in kept:
                break
            found.append(each)
        kept = [each for each in kept if each not in found] + found
        tokens = np.array(text, dtype=np.int32)
        assert cache.shared_tokens(tokens) == block * len(found)
        if is_added:
            cache.add(tokens)
            kept = [each for each in kept if each not in blocks] + blocks
            kept = kept[-max(room // block, 1) :]


@given(
    rows=st.lists(
        st.tuples(
            st.none() | st.integers(0, 10).map(float),
            st.lists(st.integers(0, 1), min_size=1, max_size=9),
            st.integers(1, 3),
            st.none() | st.integers(0, 12),
        ),
        min_size=1,
        max_size=9,
    ),
    block=st.sampled_from([1, 2, 4]),
)
def test_a_load_is_that_of_its_requests_one_by_one(
    rows: list[tuple[float | None, list[int], int, int | None]],
    block: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """In the order of arrival where all have one. Cached is what the engine counted, else whole blocks that an earlier
    line begins with too, but for the prompt's last token."""
    written = []
    expected = []
    before: list[list[int]] = []
    for arrival, prompt, num_output, counted in rows:
        output = [7] * num_output
        details = {} if counted is None else {"cached_tokens": counted}
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": details}
        row: dict[str, Any] = {"prompt": prompt, "choices": [{"token_ids": output}], "usage": usage}  # fmt: skip
        if arrival is not None:
            row["timestamp"] = arrival
        written.append(json.dumps(row))
        shared = 0
        for earlier in before:
            alike = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, earlier, strict=False))  # fmt: skip
            shared = max(shared, len(list(alike)) // block * block)
        before.append(prompt + output)
        replayed = min(shared, (len(prompt) - 1) // block * block)
        cached = replayed if counted is None else min(counted, len(prompt))
        expected.append((arrival, len(prompt), num_output, cached))
    path = tmp_path_factory.mktemp("load") / "log.jsonl"
    path.write_text("\n".join(written) + "\n")
    load = read_load([path], block_tokens=block)
    times = [arrival for arrival, *_ in rows if arrival is not None]
    assert load.num_timed == len(times)
    assert load.num_counted == sum(counted is not None for *_, counted in rows)
    if len(times) == len(rows):
        expected.sort(key=lambda row: row[0] or 0.0)
        assert load.arrival_s is not None
        assert load.arrival_s.tolist() == [time - min(times) for time in sorted(times)]
        requests = load.requests_csv().splitlines()[1:]
        assert requests == [
            f"{(time or 0.0) - min(times):.6f},{prompt},{output},{cached}"
            for time, prompt, output, cached in expected
        ]
    else:
        assert load.arrival_s is None
        with pytest.raises(ConfigError, match="no arrival times"):
            load.requests_csv()
    found = zip(load.prompt_len, load.output_len, load.cached_len, strict=True)
    assert list(found) == [tuple(row[1:]) for row in expected]
    tokens = sum(row[1] for row in expected)
    assert load.hit_share == pytest.approx(sum(row[3] for row in expected) / tokens)
    shapes = [(each.prompt_len, each.gen_len) for each in load.workload.requests]
    assert shapes == sorted(row[1:3] for row in expected)


def test_a_request_without_a_prompt_or_an_output_is_no_load(tmp_path: Path) -> None:
    """It is counted as read."""
    result = {"input_lens": [0, 5, 7, 1], "output_lens": [3, 0, 2, 1]}
    (tmp_path / "result.json").write_text(json.dumps(result))
    load = read_load([tmp_path / "result.json"])
    assert load.prompt_len.tolist() == [7, 1]
    assert load.output_len.tolist() == [2, 1]
    assert load.account.num_requests == 4


def test_five_hundred_requests_stand_for_more_evenly() -> None:
    """The shortest and the longest among them."""
    count = 5 * 512 + 1
    lengths = np.random.default_rng(3).permutation(count) + 1
    load = LogLoad(
        account=Account(),
        arrival_s=None,
        num_timed=0,
        prompt_len=lengths,
        output_len=lengths,
        cached_len=0 * lengths,
        num_counted=0,
        block_tokens=16,
        room_tokens=None,
    )
    shapes = load.workload.requests
    assert [each.gen_len for each in shapes] == [each.prompt_len for each in shapes]
    chosen = [each.prompt_len for each in shapes]
    assert (len(chosen), chosen[0], chosen[-1]) == (512, 1, count)
    assert set(np.diff(chosen)) == {5, 6}


def test_a_full_cache_drops_the_least_recently_used() -> None:
    """Of three texts of two blocks each, room for four blocks keeps the last two that were used."""
    cache = PrefixCache(block_tokens=2, room_tokens=8)
    first, second, third = (
        np.array([start, 1, 2, 3], dtype=np.int32) for start in (10, 20, 30)
    )
    for text in (first, second):
        cache.add(text)
    assert cache.shared_tokens(first) == 4
    cache.add(third)
    assert [cache.shared_tokens(text) for text in (first, second, third)] == [4, 0, 4]


def test_arrivals_and_cached_prefixes_become_requests_that_a_plan_reads(
    tmp_path: Path,
) -> None:
    """Sorted by arrival, with the hits of requests in that order, and in the form of --requests."""
    prompt = list(range(40))
    rows = [
        {"timestamp": 100.0, "prompt": prompt, "output": [1, 2]},
        {"timestamp": 101.5, "prompt": [*prompt[:35], 99, 98], "output": [1, 2, 3]},
        {"timestamp": 103.0, "prompt": prompt, "output": [5]},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    load = read_load([tmp_path / "log.jsonl"])
    assert load.arrival_s is not None
    assert load.arrival_s.tolist() == [0.0, 1.5, 3.0]
    assert load.cached_len.tolist() == [0, 32, 32]
    (tmp_path / "requests.csv").write_text(load.requests_csv())
    requests = read_requests(tmp_path / "requests.csv")
    assert requests.arrival_s.tolist() == [0.0, 1.5, 3.0]
    assert requests.prompt_len.tolist() == [40, 37, 40]
    assert requests.output_len.tolist() == [2, 3, 1]
    assert requests.cached_len.tolist() == [0, 32, 32]


def test_what_the_engine_counted_as_cached_is_taken(tmp_path: Path) -> None:
    """Logs that count cached tokens are not replayed for them."""
    choices = [{"message": {"role": "assistant", "content": "x"}, "token_ids": [7, 8]}]
    usage = {
        "prompt_tokens": 50,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 48},
    }
    row = {"prompt": [1, 2], "choices": choices, "usage": usage}
    (tmp_path / "log.jsonl").write_text(json.dumps(row) + "\n")
    load = read_load([tmp_path / "log.jsonl"])
    assert (load.cached_len.tolist(), load.num_counted, load.hit_share) == (
        [48],
        1,
        0.96,
    )


@pytest.mark.slow
def test_a_plan_takes_what_a_log_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    """Arrivals, lengths, cached prefixes and acceptance, said first; nothing is typed twice."""
    monkeypatch.chdir(tmp_path)
    done = program(
        "plan", "--model", "embedded", "--hardware", "l4", "--logs", str(SAMPLES)
    )
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()
    assert first[0].startswith("read 40 requests of 1 file (40 token ids)")
    assert any(
        line.startswith("arrivals: ") and "requests per second" in line
        for line in first[:6]
    )
    assert any(line.startswith("prefix cache: ") for line in first[:6])
    folder = tmp_path / "requests.magicdec"
    assert load_profile(folder / "acceptance.ngram.json").replay is not None
    assert len(read_requests(folder / "requests.csv")) == 40


def test_a_log_without_times_gives_lengths_and_acceptance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    """The plan is of a batch, and says that arrivals were not in the log."""
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in SAMPLES.read_text().splitlines()]
    lines = [
        json.dumps({name: row[name] for name in row if name != "arrival_s"})
        for row in rows
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    done = program(
        "plan", "--model", "embedded", "--hardware", "l4", "--logs", "log.jsonl", "--batch", "4", "--draft", "ngram",
        "-o", "plan.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "arrivals: not in the log (0 of 40 requests have a time)" in done.stdout
    document = json.loads((tmp_path / "plan.json").read_text())
    assert len(document["request"]["workload"]["requests"]) == 40
    refused = program("plan", "--logs", "log.jsonl", "--requests", "requests.csv")
    assert refused.returncode == 2
    assert "--logs says it: leave --requests out" in refused.stderr


def test_a_benchmark_s_result_gives_lengths_and_arrivals_without_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    """What the file lacks is said, and what is assumed instead."""
    monkeypatch.chdir(tmp_path)
    result = {
        "input_lens": [300] * 6, "output_lens": [40] * 6, "start_times": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        "errors": [""] * 6,
    }  # fmt: skip
    (tmp_path / "result.json").write_text(json.dumps(result))
    done = program(
        "plan",
        "--model",
        "embedded",
        "--hardware",
        "l4",
        "--logs",
        "result.json",
        "--draft",
        "none",
    )
    assert done.returncode == 0, done.stderr
    assert "6 requests have lengths alone, and cannot be replayed" in done.stdout
    assert "prefix cache: not known, the log has no prompts" in done.stdout
    assert "arrivals: 1 requests per second over 5 s" in done.stdout
