"""Speculative decoding gives what autoregressive decoding gives: the same tokens when greedy, and the target's exact
joint distribution when sampling."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from scipy import stats

from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.generate import DecodeOptions, DecodeResult, decode
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import load_model
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec
from tests.runtime.conftest import alone, started, tiny_spec
from tests.runtime.drafts import DRAFTS, HEADS, draft_model_for, small_draft

FALSE_ALARM = 1e-3
"""Probability that a correct sampler fails one chi-square test (the seeds are fixed: it fails always or never)."""
ALL_DRAFTS = DRAFTS | HEADS


def ragged_prompts(
    count: int, vocab_size: int, *, longest: int = 60
) -> list[list[int]]:
    generator = np.random.default_rng(count)
    lengths = np.linspace(1, longest, count).round().astype(int)
    return [
        generator.integers(0, vocab_size, n).tolist()
        for n in generator.permutation(lengths)
    ]


def run(
    engine: Engine,
    draft: SpeculationSpec,
    sampling: SamplingSpec,
    options: DecodeOptions,
) -> DecodeResult:
    drafter = build_drafter(draft, engine, draft_model_for(draft, engine.model))
    return decode(engine, drafter, sampling, options)


Greedily = tuple[Engine, Any, dict[str, Any], list[list[int]]]
"""An engine, its state after the prompts, options of decoding, and the tokens without a draft."""


@pytest.fixture(scope="module")
def greedily(tiny_model: Transformer) -> Callable[[int], Greedily]:
    @cache
    def for_batch(batch_size: int) -> Greedily:
        engine = started(tiny_model, ragged_prompts(batch_size, 64), 200)
        snapshot = engine.snapshot()
        limits = [12 + 6 * i for i in range(batch_size)]
        options = {"max_new_tokens": limits, "eos_token_ids": (7, 30)}
        alone = decode(engine, None, SamplingSpec(), DecodeOptions(**options))
        return engine, snapshot, options, alone.tokens

    return for_batch


@pytest.mark.parametrize(
    ("gamma", "batch_size"),
    [
        (3, 1),
        (6, 5),
        pytest.param(1, 5, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_speculation_equals_autoregressive(
    draft: str, gamma: int, batch_size: int, greedily: Callable[[int], Greedily]
) -> None:
    """Ragged prompts, own limits and own end-of-sequence stops: every token is the same."""
    engine, snapshot, options, expected = greedily(batch_size)
    engine.restore(snapshot)
    result = run(
        engine, DRAFTS[draft], SamplingSpec(), DecodeOptions(gamma=gamma, **options)
    )
    assert result.tokens == expected
    assert engine.num_active == 0


NUM_LONG = 80
"""Five times the largest budget of a draft."""


@pytest.fixture(scope="module")
def long(tiny_model: Transformer) -> tuple[Engine, Any, list[list[int]]]:
    """An engine, its state after prompts shorter and longer than the budget, and the tokens without a draft."""
    engine = started(tiny_model, [[3], [5, 9] * 4, [1, 2, 3] * 20], 230)
    snapshot = engine.snapshot()
    return engine, snapshot, alone(engine, NUM_LONG)


@pytest.mark.parametrize("draft", DRAFTS)
def test_long_greedy_generation_slides_the_draft_cache(
    draft: str, long: tuple[Engine, Any, list[list[int]]]
) -> None:
    engine, snapshot, expected = long
    engine.restore(snapshot)
    options = DecodeOptions(gamma=4, max_new_tokens=NUM_LONG)
    result = run(engine, DRAFTS[draft], SamplingSpec(), options)
    assert result.tokens == expected


SAMPLINGS = {
    "temperature": SamplingSpec(temperature=0.8, seed=11),
    "top-k": SamplingSpec(temperature=1.2, top_k=4, seed=12),
    "top-p": SamplingSpec(temperature=1.0, top_p=0.8, seed=13),
}
VOCAB, NUM_TOKENS, BATCH, ROUNDS = 5, 4, 1000, 2
PROMPT = [1, 4, 2, 2, 0, 4, 3, 1, 1, 4, 0, 2, 3, 4, 3, 0, 1, 2, 4, 3]


@pytest.fixture(scope="module")
def toy_model() -> Transformer:
    spec = tiny_spec(vocab_size=VOCAB, num_hidden_layers=2, hidden_size=16)
    return load_model(spec, weights="random", seed=5)


Batch = tuple[Engine, Any]
"""An engine that holds the prompt so many times, and its state then."""


def batch_of(model: Transformer) -> Batch:
    engine = started(model, [PROMPT] * BATCH, 64)
    return engine, engine.snapshot()


@pytest.fixture(scope="module")
def batch(toy_model: Transformer) -> Batch:
    """Prompts are prefilled one by one, which takes longer than what follows."""
    return batch_of(toy_model)


@pytest.fixture(scope="module")
def joint(toy_model: Transformer) -> Callable[[SamplingSpec], np.ndarray]:
    return cache(partial(exact_joint, exact_logits(toy_model)))


Logits = dict[tuple[int, ...], np.ndarray]


def exact_logits(model: Transformer) -> Logits:
    """After the prompt and each continuation that is a token short, or more, in fp64."""
    engine = started(model, [PROMPT], 64)
    found = {}
    for length in range(NUM_TOKENS):
        for prefix in itertools.product(range(VOCAB), repeat=length):
            block = torch.tensor([[PROMPT[-1], *prefix]])
            found[prefix] = engine.forward(block)[0, -1].double().numpy().copy()
    return found


def exact_joint(logits: Logits, sampling: SamplingSpec) -> np.ndarray:
    """P(next tokens = x1..xn) for every x, in fp64, from the definition of each warper."""
    sequences = list(itertools.product(range(VOCAB), repeat=NUM_TOKENS))
    conditionals = {prefix: warped(each, sampling) for prefix, each in logits.items()}
    joint = np.ones(len(sequences))
    for prefix_length in range(NUM_TOKENS):
        joint *= [conditionals[s[:prefix_length]][s[prefix_length]] for s in sequences]
    return joint


def warped(logits: np.ndarray, sampling: SamplingSpec) -> np.ndarray:
    p = np.exp(logits / sampling.temperature)
    p /= p.sum()
    order = np.argsort(-p)
    if sampling.top_k is not None:
        p[order[sampling.top_k :]] = 0
        p /= p.sum()
    if sampling.top_p is not None:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= sampling.top_p]] = 0
    return p / p.sum()


def chi_square_p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Cells expecting under 5 are pooled into one."""
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    keep = wanted > 0
    assert observed[~keep].sum() == 0
    return float(
        stats.chisquare(
            observed[keep], wanted[keep] * observed.sum() / wanted[keep].sum()
        ).pvalue
    )


def sampled_cases() -> Iterator[Any]:
    """Every draft, each sort of head included, with every way of sampling: one of them each, in turn, in the fast tests
    for the drafts that all tests go through and in the slow ones for the other heads; the rest in the exhaustive
    ones."""
    for number, draft in enumerate([None, *ALL_DRAFTS]):
        is_fast = draft is None or draft in DRAFTS
        first = () if is_fast else pytest.mark.slow
        for turn, name in enumerate(SAMPLINGS):
            is_first = (turn - number) % len(SAMPLINGS) == 0
            marks = first if is_first else pytest.mark.exhaustive
            yield pytest.param(draft, name, marks=marks)


@pytest.mark.parametrize(("draft", "sampling_name"), [*sampled_cases()])
def test_sampled_tokens_follow_the_exact_joint_distribution(
    draft: str | None,
    sampling_name: str,
    batch: Batch,
    joint: Callable[[SamplingSpec], np.ndarray],
) -> None:
    """2000 continuations of one prompt against exact enumeration, chi-square at a false-alarm probability of 1e-3."""
    sampling = SAMPLINGS[sampling_name]
    expected = joint(sampling)
    assert abs(expected.sum() - 1) < 1e-9
    counts, accepted = sampled_counts(batch, draft, sampling, ROUNDS)
    assert counts.sum() == BATCH * ROUNDS
    assert chi_square_p_value(counts, counts.sum() * expected) > FALSE_ALARM
    if draft is not None:
        assert 0.02 < np.mean(accepted) < 0.98, (
            "a draft that is perfect or useless proves nothing"
        )


@pytest.mark.slow
def test_a_draft_accepted_a_tenth_too_often_would_show(
    batch: Batch, joint: Callable[[SamplingSpec], np.ndarray]
) -> None:
    """12000 continuations with a draft model, whose tokens are judged as those of every draft: acceptance a tenth too
    high has a p-value of 1e-10 there."""
    sampling = SAMPLINGS["temperature"]
    counts, _ = sampled_counts(batch, "model", sampling, 6 * ROUNDS)
    assert chi_square_p_value(counts, counts.sum() * joint(sampling)) > FALSE_ALARM


def sampled_counts(
    batch: Batch, draft: str | None, sampling: SamplingSpec, rounds: int
) -> tuple[np.ndarray, list[float]]:
    """How often each continuation came, in the order of `exact_joint`; and the rates of acceptance."""
    engine, snapshot = batch
    accepted: list[float] = []
    counts, place = np.zeros(VOCAB**NUM_TOKENS), VOCAB ** np.arange(NUM_TOKENS)[::-1]
    drafter = None
    if draft is not None:
        network = draft_model_for(ALL_DRAFTS[draft], engine.model)
        drafter = build_drafter(ALL_DRAFTS[draft], engine, network)
    options = DecodeOptions(gamma=0 if draft is None else 2, max_new_tokens=NUM_TOKENS)
    for turn in range(rounds):
        engine.restore(snapshot)
        seeded = msgspec.structs.replace(sampling, seed=sampling.seed + 100 * turn)
        result = decode(engine, drafter, seeded, options)
        np.add.at(counts, np.array(result.tokens) @ place, 1)
        accepted += [] if draft is None else result.counts.rates
    return counts, accepted


def test_a_seed_repeats_a_run_and_another_does_not(tiny_model: Transformer) -> None:
    """The same seed gives the same tokens, whatever else the engine did before."""
    engine = started(tiny_model, ragged_prompts(4, 64), 120)
    snapshot = engine.snapshot()
    outputs = []
    for seed in (1, 2, 1):
        engine.restore(snapshot)
        options = DecodeOptions(gamma=3, max_new_tokens=[30, 10, 40, 20])
        outputs.append(
            run(
                engine,
                DRAFTS["streamingllm"],
                SamplingSpec(temperature=1.0, seed=seed),
                options,
            ).tokens
        )
    assert outputs[0] == outputs[2]
    assert outputs[0] != outputs[1]


@pytest.fixture(scope="module")
def many(tiny_model: Transformer) -> Batch:
    engine = started(tiny_model, [[4, 5, 6]] * 1500, 12)
    return engine, engine.snapshot()


@pytest.mark.parametrize("bad", ["nan", "-inf"])
def test_a_draft_that_is_not_a_number_costs_no_token(bad: str, many: Batch) -> None:
    """One row of the draft's head spoilt: nothing that it drafts is accepted, and the output's distribution is the
    target's own, against the softmax of its logits (chi-square)."""
    draft = load_model(small_draft(64).spec, weights="random", seed=9)
    with torch.inference_mode():
        draft.head.weight[5] = float(bad)
    engine, snapshot = many
    engine.restore(snapshot)
    count = engine.batch_size
    expected = (
        torch.softmax(engine.forward(engine.pending_B[:, None])[0, -1], dim=-1)
        .double()
        .numpy()
    )
    sampling = SamplingSpec(temperature=1.0, seed=11)
    drafter = build_drafter(DRAFTS["model"], engine, draft)
    result = decode(
        engine, drafter, sampling, DecodeOptions(gamma=2, max_new_tokens=4, max_steps=1)
    )
    if bad != "-inf":  # one token that is never drafted is no error
        assert result.counts.rates[0] == 0.0
    counts = np.bincount([tokens[0] for tokens in result.tokens], minlength=64)
    assert (
        stats.chisquare(counts, expected / expected.sum() * count).pvalue > FALSE_ALARM
    )


@pytest.mark.parametrize("temperature", [1e-38, 1e-300])
def test_the_lowest_temperatures_are_greedy(
    temperature: float, tiny_model: Transformer
) -> None:
    """Alone, speculative, and with top-p: no logits of a random model tie."""
    engine = started(tiny_model, [[3], [5, 9] * 4, [1, 2, 3] * 6], 80)
    snapshot = engine.snapshot()
    expected = alone(engine, 20)
    for top_p, draft in itertools.product((None, 0.9), (None, "streamingllm", "model")):
        engine.restore(snapshot)
        spec, options = (DRAFTS[draft], 2) if draft else (SpeculationSpec(), 0)
        sampling = SamplingSpec(temperature=temperature, top_p=top_p)
        assert (
            run(
                engine, spec, sampling, DecodeOptions(gamma=options, max_new_tokens=20)
            ).tokens
            == expected
        )
