"""Replays of look-ups against plain scans of the text, and against an engine's own counts of every step."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba")

from magicdec.errors import ConfigError
from magicdec.logs import suffix
from magicdec.logs.lookups import lookup
from magicdec.logs.ngram import NgramReplay
from magicdec.logs.suffix import SuffixReplay
from magicdec.suffix_tree import SuffixSettings
from tests.logs import plain_rules
from tests.logs.plain_rules import PlainSuffix, ngram_steps

DATA = Path(__file__).parents[1] / "data" / "logs"
ENGINE_RUNS = ("ng3_13_t1", "ng3_24_greedy", "ng3_default_greedy", "suf_default_local")
texts = st.lists(st.integers(0, 4), min_size=3, max_size=80)


def engine_run(name: str) -> dict[str, Any]:
    with gzip.open(DATA / f"{name}.json.gz") as file:
        return json.load(file)


def as_tuples(steps: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(row) for row in steps.tolist()]


@pytest.mark.parametrize("rule", ["ngram", "ngram-gpu", "llama.cpp"])
@given(
    text=texts,
    prompt_share=st.floats(0.05, 0.9),
    gamma=st.integers(1, 6),
    max_len=st.integers(0, 90),
)
def test_each_ngram_rule_takes_the_steps_that_a_plain_scan_takes(
    rule: str, text: list[int], prompt_share: float, gamma: int, max_len: int
) -> None:
    """Several settings share one index, and each takes the steps of a scan of the whole text."""
    prompt_len = max(1, min(len(text) - 1, int(len(text) * prompt_share)))
    lookups = [
        lookup(rule, gamma=gamma, min_ngram=low, max_ngram=high)
        for low, high in ((1, 1), (1, 3), (2, 4), (3, 3))
    ]
    replayed = NgramReplay(lookups).steps(
        np.array(text, dtype=np.int32), prompt_len, max_len=max_len
    )
    for row, steps in zip(lookups, replayed, strict=True):
        plain = ngram_steps(
            rule, text, prompt_len, gamma, row.min_ngram, row.max_ngram, max_len
        )
        assert as_tuples(steps) == plain


@given(period=st.integers(1, 5), length=st.integers(3, 8), gamma=st.integers(1, 7))
def test_llama_drafts_no_less_than_its_ngram(
    period: int, length: int, gamma: int
) -> None:
    """In a text that repeats, a draft is as long as what follows and gamma allow: none is shorter than n."""
    text = np.array([token % period for token in range(80)], dtype=np.int32)
    row = lookup("llama.cpp", gamma=gamma, min_ngram=length, max_ngram=length)
    (steps,) = NgramReplay([row]).steps(text, 40)
    assert set(steps[:, 1].tolist()) <= {0, *range(length, gamma + 1)}
    plain = ngram_steps("llama.cpp", text.tolist(), 40, gamma, length, length)
    assert as_tuples(steps) == plain


def test_a_rule_that_is_wrong_at_the_edge_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """llama.cpp's rule as it was once written: what follows is weighed without gamma."""

    right = plain_rules.llama_draft

    def once(tokens: list[int], sampled: int, n: int, m: int) -> list[int]:
        return right(tokens, sampled, n, m + n)[:m]

    row = lookup("llama.cpp", gamma=2, min_ngram=4, max_ngram=4)
    text = [token % 9 for token in range(80)]
    (steps,) = NgramReplay([row]).steps(np.array(text, dtype=np.int32), 40)
    assert as_tuples(steps) == ngram_steps("llama.cpp", text, 40, 2, 4, 4)
    monkeypatch.setattr(plain_rules, "llama_draft", once)
    assert as_tuples(steps) != ngram_steps("llama.cpp", text, 40, 2, 4, 4)


def test_an_index_is_empty_again_for_the_next_request() -> None:
    """Nothing that an earlier request said is found in a later one."""
    replay = NgramReplay([lookup("ngram", gamma=3, min_ngram=1, max_ngram=2)])
    replay.steps(np.array([1, 2, 3, 1, 2, 3], dtype=np.int32), 3)
    steps = replay.steps(np.array([1, 2, 4, 5], dtype=np.int32), 1)[0]
    assert steps[:, 1].sum() == 0


@given(
    requests=st.lists(st.tuples(texts, st.floats(0.05, 0.9)), min_size=1, max_size=6),
    cached=st.sampled_from([0, 1, 2, 10]),
    depth=st.sampled_from([4, 8, 24]),
)
def test_suffix_decoding_takes_the_steps_of_plain_counts_of_every_sequence(
    requests: list[tuple[list[int], float]], cached: int, depth: int
) -> None:
    """The compressed trees draft what counts of all sequences up to the depth draft, also after responses have been
    evicted and the rest has been moved together."""
    chosen = SuffixSettings(max_depth=depth, max_cached_requests=cached, max_factor=1.5)
    gammas = (2, 5)
    replays = SuffixReplay([lookup("suffix", gamma=gamma) for gamma in gammas], chosen)
    plain = [
        PlainSuffix(depth=depth, factor=1.5, least=0.1, cached=cached) for _ in gammas
    ]
    kept = suffix.COMPACT_ABOVE
    suffix.COMPACT_ABOVE = 20
    try:
        for text, share in requests:
            prompt_len = max(1, min(len(text) - 1, int(len(text) * share)))
            replayed = replays.steps(np.array(text, dtype=np.int32), prompt_len)
            for gamma, steps, reference in zip(gammas, replayed, plain, strict=True):
                assert as_tuples(steps) == reference.steps(text, prompt_len, gamma)
    finally:
        suffix.COMPACT_ABOVE = kept


@pytest.mark.parametrize("name", ENGINE_RUNS)
def test_every_step_that_a_log_determines_is_the_engines(name: str) -> None:
    """Drafted and emitted tokens of each step are those that vLLM recorded; of the last step, as far as the log goes.
    Drafts and drafted tokens equal the server's counters, and accepted tokens lie in the bound."""
    run = engine_run(name)
    resolved = run["resolved"]
    is_suffix = resolved["min"] is None
    if is_suffix:
        replay: Any = SuffixReplay([lookup("suffix-local", gamma=resolved["k"])])
    else:
        low, high = resolved["min"], resolved["max"]
        replay = NgramReplay(
            [lookup("ngram", gamma=resolved["k"], min_ngram=low, max_ngram=high)]
        )
    drafts = 0
    drafted_tokens = 0
    least_accepted = 0
    most_accepted = 0
    for row in run["rows"]:
        text = np.array(row["prompt"] + row["output"], dtype=np.int32)
        steps = replay.steps(text, len(row["prompt"]), max_len=run["max_model_len"])[0]
        recorded = row["steps"][1:]
        assert len(steps) == len(recorded)
        for (place, drafted, accepted), (draft, emitted) in zip(
            steps.tolist(), recorded, strict=True
        ):
            left = len(text) - 1 - place
            assert drafted == len(draft)
            assert min(accepted + 1, left) == min(len(emitted), left)
            drafts += drafted > 0
            drafted_tokens += drafted
            least_accepted += accepted
            most_accepted += drafted if accepted == left else accepted
    counters = run["counters"]
    assert drafts == counters["spec_decode_num_drafts"]
    assert drafted_tokens == counters["spec_decode_num_draft_tokens"]
    assert (
        least_accepted <= counters["spec_decode_num_accepted_tokens"] <= most_accepted
    )


def test_settings_that_do_not_go_together_are_refused() -> None:
    """The error says what the rule takes."""
    with pytest.raises(ConfigError, match="did you mean ngram"):
        lookup("ngarm", gamma=3)
    with pytest.raises(ConfigError, match="the shortest first"):
        lookup("ngram", gamma=3, min_ngram=4, max_ngram=2)
    with pytest.raises(ConfigError, match="suffix decoding has no"):
        lookup("suffix", gamma=3, min_ngram=2)
    assert (
        lookup("ngram", gamma=3).min_ngram,
        lookup("ngram", gamma=3, max_ngram=3).min_ngram,
    ) == (5, 3)
