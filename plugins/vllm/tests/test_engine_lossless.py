"""Whatever the draft does, greedy output is the engine's own, token for token."""

from __future__ import annotations

import random
from typing import Any

import pytest

NEAR_TIE = 1e-4
"""Nats between the two likeliest tokens, below which the order of additions in a kernel may decide."""
NUM_MIXED = 140
GROUPS = [
    (96, 1),
    (96, 7),
    (128, 2),
    (128, 5),
    (160, 3),
    (256, 4),
    (256, 6),
    (512, 3),
    (512, 7),
    (1600, 2),
]
REFRESHES = {4: 1, 7: 3}
"""Groups that choose pages, and for how many blocks; the others stream."""


def differs(output: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """Why an output is not the reference's; None where it is, or where they part at a near tie."""
    for position, (token, expected) in enumerate(
        zip(output["token_ids"], wanted["token_ids"], strict=False)
    ):
        if token != expected:
            (_, first), (_, second) = wanted["logprobs"][position]
            return (
                None
                if first - second < NEAR_TIE
                else f"token {position} is {token}, not {expected}"
            )
    for key in ("token_ids", "text", "finish_reason", "stop_reason"):
        if output[key] != wanted[key]:
            return f"{key} is {output[key]!r}, not {wanted[key]!r}"
    for ranked, expected_ranked in zip(
        output["logprobs"], wanted["logprobs"], strict=True
    ):
        if abs(ranked[0][1] - expected_ranked[0][1]) > 1e-3:
            return f"logprob {ranked} instead of {expected_ranked}"
    return None


@pytest.fixture(scope="module")
def wanted(reference: Any, served: Any) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = reference.answer()["outputs"]
    return outputs


@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_greedy_output_is_the_engines_own(
    served: Any,
    greedy_cases: list[dict[str, Any]],
    wanted: list[dict[str, Any]],
    group: int,
) -> None:
    """14 requests of all kinds, which arrive while others decode or prefill, beside others that sample."""
    from serving import counters, serve

    budget, gamma = GROUPS[group]
    method = "topk" if group in REFRESHES else "streamingllm"
    served.configure(
        budget=budget, gamma=gamma, method=method, refresh=REFRESHES.get(group, 1)
    )
    chosen = range(group, NUM_MIXED, len(GROUPS))
    requests = [greedy_cases[i] for i in chosen]
    beside = [
        {"prompt": r["prompt"][:200], "sampling": {"temperature": 0.8, "max_tokens": 9}}
        for r in requests[:4]
    ]
    choose = random.Random(group)
    arrivals = [choose.randint(0, 40) for _ in requests + beside]
    before = counters(served.llm)
    outputs = serve(served.llm, requests + beside, arrivals=arrivals)
    after = counters(served.llm)
    assert (
        after["spec_decode_num_draft_tokens"] > before["spec_decode_num_draft_tokens"]
    )
    pairs = zip(chosen, outputs, (wanted[i] for i in chosen), strict=False)
    assert not {
        i: why for i, output, expected in pairs if (why := differs(output, expected))
    }


@pytest.mark.parametrize("gamma", [1, 5])
def test_preempted_requests_resume_as_if_nothing_had_been(
    served: Any,
    greedy_cases: list[dict[str, Any]],
    wanted: list[dict[str, Any]],
    gamma: int,
) -> None:
    """More tokens than the cache holds: sequences are thrown out and come back."""
    from serving import counters, serve

    served.configure(budget=128, gamma=gamma)
    before = counters(served.llm)
    outputs = serve(served.llm, greedy_cases[NUM_MIXED:])
    assert counters(served.llm)["num_preemptions"] > before["num_preemptions"]
    pairs = zip(outputs, wanted[NUM_MIXED:], strict=True)
    assert not [why for output, expected in pairs if (why := differs(output, expected))]


def test_the_cases_above_cover_what_they_are_for(
    served: Any, greedy_cases: list[dict[str, Any]], wanted: list[dict[str, Any]]
) -> None:
    """What the cases are to cover, they cover."""
    from serving import counters

    found = counters(served.llm)
    assert found["spec_decode_num_accepted_tokens_per_pos"][6] > 0
    reasons = [output["finish_reason"] for output in wanted]
    assert reasons.count("stop") > 12
    lengths = [
        len(c["prompt"]) + len(w["token_ids"])
        for c, w in zip(greedy_cases, wanted, strict=True)
    ]
    assert max(lengths) >= 1536
    gaps = [
        first[1] - second[1]
        for output in wanted
        for first, second in output["logprobs"]
    ]
    assert sum(gap < NEAR_TIE for gap in gaps) < 0.005 * len(gaps)
