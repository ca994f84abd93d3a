"""What a draft reads in the engine, how many tokens it drafts, and how many of them are accepted."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

POISON = 1e4
"""As a key or value: whoever reads it drafts something else."""


def poison_all_but(runner: Any, row: int, length: int) -> None:
    """Overwrites every slot of the cache but the first `length` tokens of a sequence."""
    import torch

    table = runner.input_batch.block_table[0]
    size = table.block_size
    own = table.block_table.np[row]
    positions = np.arange(length)
    keep = set(
        (own[positions // size].astype(np.int64) * size + positions % size).tolist()
    )
    for layer in runner.compilation_config.static_forward_context.values():
        cache, head_size = layer.kv_cache, layer.impl.head_size
        slots = torch.tensor([s for s in range(cache.shape[0] * size) if s not in keep])
        wrong = torch.full((len(slots), layer.impl.num_kv_heads, head_size), POISON)
        layer.impl.do_kv_cache_update(layer, wrong, wrong.clone(), cache, slots)


def caches(runner: Any) -> list[Any]:
    """Keys and values of each layer, and the means of its pages."""
    layers = runner.compilation_config.static_forward_context.values()
    return [
        *(layer.kv_cache for layer in layers),
        *(each.means_NKD for each in runner.drafter._means.values()),
    ]


@pytest.mark.parametrize(
    ("method", "budget"), [("streamingllm", 96), ("streamingllm", 160), ("topk", 160)]
)
def test_no_draft_reads_a_slot_that_is_not_its_sequences(
    served: Any, monkeypatch: pytest.MonkeyPatch, method: str, budget: int
) -> None:
    """At every step each sequence drafts again, alone, with all other slots of the cache poisoned: those of other
    sequences, of nobody, and its own beyond its last token. It drafts the same."""
    from cases import prompts
    from serving import serve

    served.configure(budget=budget, gamma=4, method=method)
    draft = served.draft
    original = draft.propose
    checked: list[bool] = []

    def propose(runner: Any, sampled: Any, sampling: Any) -> Any:
        saved = [cache.clone() for cache in caches(runner)]
        proposal = original(runner, sampled, sampling)
        drafted = [cache.clone() for cache in caches(runner)]
        for row, tokens in enumerate(sampled):
            if not tokens:
                continue
            for cache, before in zip(caches(runner), saved, strict=True):
                cache.copy_(before)
            poison_all_but(
                runner, row, int(runner.input_batch.num_tokens_no_spec[row]) - 1
            )
            alone = original(
                runner, [t if i == row else [] for i, t in enumerate(sampled)], sampling
            )
            checked.append(alone.token_ids[row] == proposal.token_ids[row])
        for cache, after in zip(caches(runner), drafted, strict=True):
            cache.copy_(after)
        return proposal

    monkeypatch.setattr(draft, "propose", propose)
    texts = prompts(5, 700, seed=1)
    lengths = (700, 33, 250, 96, 511)
    sampling = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    serve(
        served.llm,
        [
            {"prompt": t[:n], "sampling": sampling}
            for t, n in zip(texts, lengths, strict=True)
        ],
    )
    assert len(checked) > 25
    assert all(checked)


def test_a_poisoned_slot_shows(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: with one of the sequence's own last tokens poisoned as well, drafts change."""
    from cases import prompts
    from serving import serve

    served.configure(budget=96, gamma=4)
    original, same = served.draft.propose, []

    def propose(runner: Any, sampled: Any, sampling: Any) -> Any:
        proposal = original(runner, sampled, sampling)
        saved = [cache.clone() for cache in caches(runner)]
        poison_all_but(runner, 0, int(runner.input_batch.num_tokens_no_spec[0]) - 2)
        same.append(original(runner, sampled, sampling).token_ids == proposal.token_ids)
        for cache, after in zip(caches(runner), saved, strict=True):
            cache.copy_(after)
        return proposal

    monkeypatch.setattr(served.draft, "propose", propose)
    sampling = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    serve(served.llm, [{"prompt": prompts(1, 300)[0], "sampling": sampling}])
    assert not all(same)


def test_gamma_follows_the_table_of_batch_and_context(served: Any) -> None:
    """Each step drafts what the table says for the sequences that decode then; 0 drafts nothing."""
    from cases import prompts
    from serving import counters, serve

    from magicdec.schema.gamma_table import TableGamma

    table = TableGamma(
        batch_sizes=(1, 4), context_lens=(64, 1024), gammas=((0, 3), (2, 5))
    )
    sampling = {"temperature": 0.0, "max_tokens": 13, "ignore_eos": True}
    for batch, context, gamma in ((1, 64, 0), (1, 1000, 3), (4, 64, 2), (4, 1000, 5)):
        served.configure(budget=128, gamma=0)
        served.draft.settings = msgspec.structs.replace(
            served.draft.settings, gamma_table=table
        )
        before = counters(served.llm)
        serve(
            served.llm,
            [
                {"prompt": text, "sampling": sampling}
                for text in prompts(batch, context)
            ],
        )
        after = counters(served.llm)
        drafts, tokens = (
            after[f"spec_decode_{n}"] - before[f"spec_decode_{n}"]
            for n in ("num_drafts", "num_draft_tokens")
        )
        assert (drafts > 0) == (gamma > 0)
        assert gamma == 0 or drafts <= tokens <= drafts * gamma
        by_position = np.array(after["spec_decode_num_accepted_tokens_per_pos"])
        by_position -= np.array(before["spec_decode_num_accepted_tokens_per_pos"])
        assert not by_position[gamma:].any()


def test_a_block_takes_as_many_launches_for_any_batch(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts of a step on V1: each pass launches as much as another, and the host waits once, for the drafts."""
    from cases import prompts
    from graphs import counting
    from serving import serve

    sampling = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    launches = {}
    for batch, gamma in ((2, 2), (8, 2), (8, 3), (8, 4)):
        served.configure(budget=128, gamma=gamma)
        with monkeypatch.context() as patched:
            patched.setattr(served.draft, "_draft", served.draft._draft)
            blocks = counting(served.draft, "_draft")
            serve(
                served.llm,
                [
                    {"prompt": text, "sampling": sampling}
                    for text in prompts(batch, 200, seed=batch)
                ],
            )
        assert not any(block["waits"] for block in blocks)
        launches[batch, gamma] = max(block["launches"] for block in blocks)
    assert launches[2, 2] == launches[8, 2]
    assert launches[8, 4] - launches[8, 3] == launches[8, 3] - launches[8, 2]
    assert launches[8, 2] < 300


def test_a_step_without_drafts_takes_what_it_takes_without_speculation(
    served: Any, reference: Any
) -> None:
    """On V1 the engine itself adds two launches, one for ids below 0 and one for the numbers of drafts; nothing waits.
    On V2 it is the engine's alone: the draft takes nothing there (test_engine_v2.py)."""
    from cases import few_prompts
    from graphs import takes_of_a_step

    served.configure(budget=128, gamma=0)
    idle, plain = (
        takes_of_a_step(served.llm, served.runner, few_prompts()),
        reference.answer()["plain"],
    )
    assert idle["launches"] <= plain["launches"] + 2
    assert idle["allocations"] <= plain["allocations"]
    assert idle["waits"] == plain["waits"]


def test_acceptance_is_that_of_our_own_runtime(served: Any) -> None:
    """Same prompts, temperature, and slots read; the difference of each position's rate is within four standard errors
    (clustered by sequence, of both runs). The engine's window begins at a page's edge, so that it reads between budget
    − 31 and budget slots, and 32 sinks: our runtime is given the mean."""
    from cases import MODEL, PAGE_SIZE
    from serving import counters, serve

    from magicdec.counts import Counts
    from magicdec.measure.configuration import BenchmarkRequest
    from magicdec.measure.repetitions import measure
    from magicdec.measure.session import BenchmarkSession
    from magicdec.specs.speculation import SamplingSpec, SpeculationSpec

    budget, gamma, batch, context, length = 256, 3, 16, 1024, 64
    ours = SpeculationSpec(
        draft="self",
        draft_method="streamingllm",
        draft_budget=budget,
        gamma=gamma,
        num_sink_tokens=PAGE_SIZE,
    )
    request = BenchmarkRequest(
        model=str(MODEL), batch_size=batch, context_len=context, gen_len=length, speculations=(ours,), repetitions=1,
        sampling=SamplingSpec(temperature=1.0), run_to_end=True,
    )  # fmt: skip
    session = BenchmarkSession(request)
    rows: list[Any] = []
    assert len(list(measure(session, write=rows.append))) == 2
    (counted,) = [row.sequence_counts for row in rows if row.is_speculative]
    counts = Counts.of_lists(*counted)
    rates, trials = counts.rates, counts.trials
    served.configure(budget=budget + PAGE_SIZE // 2, gamma=gamma)
    before = counters(served.llm)
    sampling = {"temperature": 1.0, "max_tokens": length, "ignore_eos": True}
    serve(
        served.llm,
        [{"prompt": prompt, "sampling": sampling} for prompt in session.prompts],
    )
    after = counters(served.llm)
    accepted = np.array(
        after["spec_decode_num_accepted_tokens_per_pos"][:gamma], dtype=float
    )
    accepted -= before["spec_decode_num_accepted_tokens_per_pos"][:gamma]
    reached = np.array(
        [
            after["spec_decode_num_drafts"] - before["spec_decode_num_drafts"],
            *accepted[:-1],
        ]
    )
    clustering = (counts.tokens_stderr or 0.0) / binomial_stderr(rates, trials)
    for position, rate in enumerate(accepted / reached):
        variance = (
            rates[position]
            * (1 - rates[position])
            * (1 / trials[position] + 1 / reached[position])
        )
        assert abs(rate - rates[position]) < 4 * max(clustering, 1.0) * np.sqrt(
            variance
        )


def binomial_stderr(rates: list[float], trials: list[int]) -> float:
    """Of the mean number accepted per step, were all steps independent and alike."""
    survival = np.cumprod(rates)
    mean = survival.sum()
    second = sum((2 * i + 1) * p for i, p in enumerate(survival))
    return float(np.sqrt((second - mean**2) / trials[0]))


def test_means_are_those_of_the_keys_that_were_stored(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each full page at every step, however the backend packs it: chunks, rejected drafts, pages that a preempted
    sequence leaves to others."""
    import torch
    from cases import PAGE_SIZE, prompts
    from serving import counters, serve

    served.configure(budget=160, gamma=4, method="topk")
    means = list(served.draft._means.values())[1]
    store, propose, checked = means._write, served.draft.propose, []
    num_pages, kv_heads, *_ = means._layer.kv_cache.shape
    keys = torch.full(
        (num_pages * PAGE_SIZE, kv_heads, means._layer.impl.head_size), torch.nan
    )

    def write(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        keys[slots[slots >= 0]] = key[: len(slots)][slots >= 0]
        store(layer, key, value, cache, slots)

    def check(runner: Any, sampled: Any, sampling: Any) -> Any:
        for row, length in enumerate(
            runner.input_batch.num_tokens_no_spec[: len(sampled)]
        ):
            if sampled[row]:
                pages = runner.input_batch.block_table[0].block_table.np[
                    row, : (length - 1) // PAGE_SIZE
                ]
                exact = keys.unflatten(0, (num_pages, PAGE_SIZE))[pages].mean(dim=1)
                checked.append(
                    torch.allclose(means.means_NKD[pages], exact, rtol=1e-4, atol=1e-5)
                )
        return propose(runner, sampled, sampling)

    monkeypatch.setattr(means, "_write", write)
    monkeypatch.setattr(served.draft, "propose", check)
    before = counters(served.llm)["num_preemptions"]
    sampling = {"temperature": 0.0, "max_tokens": 110, "ignore_eos": True}
    texts = [*prompts(2, 700, seed=31), *prompts(12, 5 * PAGE_SIZE - 8, seed=32)]
    serve(served.llm, [{"prompt": text, "sampling": sampling} for text in texts])
    assert counters(served.llm)["num_preemptions"] > before
    assert len(checked) > 200
    assert all(checked)
