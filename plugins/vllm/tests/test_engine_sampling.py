"""At temperatures above 0 the engine's output follows the target's distribution, whatever is drafted.

The truth is the model in transformers, in fp32. A chi-square test of counts of whole continuations has a false-alarm
probability of FALSE_ALARM each.
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from scipy import stats

FALSE_ALARM = 1e-5
NUM_SAMPLES = 800
LENGTH = 3
"""Tokens of each continuation: the first comes from the prefill, the others from verifying drafts."""
FEWEST = 5.0
"""Continuations expected less often than this are counted together."""


def exact_distribution(
    model: Any,
    prompt: list[int],
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    num_samples: int = NUM_SAMPLES,
) -> dict[tuple[int, ...], float]:
    """Probability of each continuation of LENGTH tokens that is likely enough for a bin of its own."""
    import torch

    likely: dict[tuple[int, ...], float] = {(): 1.0}
    with torch.inference_mode():
        seen = model(
            torch.tensor([prompt[:-1]]), use_cache=True, logits_to_keep=1
        ).past_key_values
    for _ in range(LENGTH):
        before, cache = list(likely), deepcopy(seen)
        cache.batch_repeat_interleave(len(before))
        with torch.inference_mode():
            batch = torch.tensor([[prompt[-1], *start] for start in before])
            logits = model(batch, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        grown: dict[tuple[int, ...], float] = {}
        for start, full in zip(
            before, (logits.double() / temperature).softmax(dim=-1).numpy(), strict=True
        ):
            row = truncate(full, top_k=top_k, top_p=top_p)
            for token in np.flatnonzero(row * likely[start] * num_samples >= FEWEST):
                grown[(*start, int(token))] = float(row[token] * likely[start])
        likely = grown
    return likely


def truncate(row: np.ndarray, *, top_k: int | None, top_p: float | None) -> np.ndarray:
    """The distribution kept to its k likeliest tokens, then to the smallest set of probability p."""
    order = np.argsort(-row, kind="stable")
    keep = np.ones(len(row), dtype=bool)
    if top_k is not None:
        keep[order[top_k:]] = False
    if top_p is not None:
        kept = row * keep / (row * keep).sum()
        keep[order[np.cumsum(kept[order]) - kept[order] >= top_p]] = False
    return row * keep / (row * keep).sum()


def mixed_requests(
    prompt: list[int], sampling: dict[str, Any], *, count: int = NUM_SAMPLES, **hot: Any
) -> list[dict[str, Any]]:
    """The same request many times, with greedy and `hot` ones in the same batches."""
    wanted = {**sampling, "max_tokens": LENGTH, "ignore_eos": True}
    others = [
        {"temperature": 0.0, "max_tokens": 9},
        {"temperature": 1.7, **hot, "max_tokens": 5},
    ]
    requests = [{"prompt": prompt, "sampling": wanted}] * count
    beside = [
        {"prompt": prompt[: 50 + i], "sampling": others[i % 2]}
        for i in range(count // 20)
    ]
    return [
        request
        for i in range(len(beside))
        for request in (*requests[i * 20 : (i + 1) * 20], beside[i])
    ]


def continuations(
    requests: list[dict[str, Any]], outputs: list[dict[str, Any]]
) -> Counter[tuple[int, ...]]:
    """Those of the requests that are counted, not of the ones beside them."""
    counted = [
        o["token_ids"]
        for r, o in zip(requests, outputs, strict=True)
        if r["sampling"]["max_tokens"] == LENGTH
    ]
    return Counter(map(tuple, counted))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 5},
    ],
    ids=["temperature 1", "top-p", "top-k"],
)
def test_sampled_output_follows_the_models_distribution(
    served: Any, model: Any, prompt: list[int], sampling: dict[str, Any]
) -> None:
    """The draft sees 96 of 400 tokens, so that it often disagrees with the target."""
    from serving import counters, serve

    served.configure(budget=96, gamma=2)
    before = counters(served.llm)
    requests = mixed_requests(prompt, sampling, top_k=50)
    counts = continuations(requests, serve(served.llm, requests))
    after = counters(served.llm)
    drafted, accepted = (
        after[f"spec_decode_num_{kind}_tokens"]
        - before[f"spec_decode_num_{kind}_tokens"]
        for kind in ("draft", "accepted")
    )
    assert (
        0.1 < accepted / drafted < 0.97
    )  # both branches of the rejection rule are at work
    assert chi_square(counts, model, prompt, sampling) > FALSE_ALARM


def chi_square(
    counts: Counter[tuple[int, ...]],
    model: Any,
    prompt: list[int],
    sampling: dict[str, Any],
) -> float:
    """The probability of counts as far from the model's own distribution, were they drawn from it."""
    total = counts.total()
    exact = exact_distribution(model, prompt, **sampling, num_samples=total)
    expected = {tokens: p * total for tokens, p in exact.items()}
    observed = [counts[tokens] for tokens in expected]
    rest = total - sum(expected.values())
    if rest > 1e-6:
        observed, wanted = (
            [*observed, total - sum(observed)],
            [*expected.values(), rest],
        )
    else:
        wanted = list(expected.values())
    assert len(wanted) >= 4
    return float(stats.chisquare(observed, wanted).pvalue)


@pytest.mark.parametrize("copies", [1, 3], ids=["whole prompt", "prompt in chunks"])
def test_a_seeded_request_comes_out_the_same_again(
    served: Any, prompt: list[int], copies: int
) -> None:
    """Its drafts draw from its own generator: alone or in company, with the same gamma, however its prompt is cut."""
    from serving import serve

    served.configure(budget=96, gamma=3)
    sampling = {
        "temperature": 1.0,
        "seed": 11,
        "max_tokens": 24,
        "ignore_eos": True,
        "skip_reading_prefix_cache": True,
    }
    seeded = {"prompt": prompt * copies, "sampling": sampling}
    company = [
        {"prompt": prompt[:99], "sampling": {"temperature": 1.0, "max_tokens": 30}}
    ] * 5
    alone, again = (
        serve(served.llm, [seeded])[0],
        serve(served.llm, [*company, seeded])[-1],
    )
    assert alone["token_ids"] == again["token_ids"]
