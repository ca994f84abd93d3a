"""The decoding loop: stops, limits, what is counted, simulated acceptance, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from magicdec.errors import CapacityError, ConfigError
from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.generate import (
    DecodeOptions,
    DecodeResult,
    NumericalError,
    decode,
)
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import load_model
from magicdec.schema.gamma_table import TableGamma
from magicdec.specs.speculation import SamplingSpec
from tests.runtime.conftest import alone, started, tiny_spec
from tests.runtime.drafts import DRAFTS, draft_model_for

BATCH = 6
PROMPTS = [[1 + i] * (4 + 5 * i) for i in range(BATCH)]


@pytest.fixture
def engine(tiny_model: Transformer) -> Engine:
    return started(tiny_model, PROMPTS, 200)


def speculate(engine: Engine, options: DecodeOptions, *, seed: int = 0) -> DecodeResult:
    drafter = build_drafter(DRAFTS["streamingllm"], engine)
    return decode(engine, drafter, SamplingSpec(temperature=1.0, seed=seed), options)


def test_each_sequence_stops_at_its_own_limit_or_end_token(engine: Engine) -> None:
    """No sequence is longer than its limit; the end token ends one and is its last."""
    limits = [1, 2, 30, 70, 5, 100]
    result = speculate(
        engine, DecodeOptions(gamma=4, max_new_tokens=limits, eos_token_ids=(9, 33))
    )
    for tokens, limit in zip(result.tokens, limits, strict=True):
        assert len(tokens) <= limit
        ends = [i for i, token in enumerate(tokens) if token in (9, 33)]
        assert ends in ([], [len(tokens) - 1])
        assert ends or len(tokens) == limit
    assert any(len(t) < limit for t, limit in zip(result.tokens, limits, strict=True))


def test_counts_agree_with_each_other(engine: Engine) -> None:
    """Histogram, rates by position, tokens and steady state all follow from the accepted counts."""
    result = speculate(
        engine, DecodeOptions(gamma=3, max_new_tokens=[40, 50, 60, 70, 80, 90])
    )
    active = result.num_accepted >= 0
    assert sum(result.counts.histogram) == active.sum()
    assert result.counts.trials[0] == active.sum()
    for position in range(3):
        reached = result.num_accepted >= position
        assert result.counts.trials[position] == reached.sum()
        assert (
            result.counts.accepted[:, position].sum()
            == (result.num_accepted > position).sum()
        )
    emitted = np.where(active, result.num_accepted + 1, 0).sum(axis=0)
    lengths = np.array([len(t) for t in result.tokens])
    assert (lengths <= emitted).all()
    assert (emitted - lengths <= 3).all()
    first_end = int(active.sum(axis=0).min())
    assert result.steady_steps == first_end
    # The last step of steady state counts up to its tokens: exchanging the ended sequence's cache comes after.
    assert (
        result.step_s[: first_end - 1].sum()
        < result.steady_elapsed_s
        <= result.step_s[:first_end].sum() + 1e-9
    )
    assert result.elapsed_s == pytest.approx(result.step_s.sum())
    assert len(result.step_s) == result.num_steps == len(result.num_accepted)
    assert not result.phases


def test_stopping_with_the_first_end_makes_all_of_it_steady_state(
    engine: Engine,
) -> None:
    result = speculate(
        engine, DecodeOptions(gamma=2, max_new_tokens=25, stop_when_first_ends=True)
    )
    assert result.steady_steps == result.num_steps
    assert result.steady_tokens == result.num_tokens
    assert max(map(len, result.tokens)) == 25
    assert (result.num_accepted >= 0).all()


def test_fences_give_every_phase_of_every_step(engine: Engine) -> None:
    """Phases do not overlap, and leave little between them: in one of the runs at least, nothing else came there."""
    missed = []
    for _ in range(8):
        engine.prefill(PROMPTS)
        result = speculate(
            engine, DecodeOptions(gamma=2, max_new_tokens=12, fences=True)
        )
        assert set(result.phases) == {"draft", "verify", "accept", "upkeep"}
        assert all(len(times) == result.num_steps for times in result.phases.values())
        missed.append(abs(sum(map(sum, result.phases.values())) / result.elapsed_s - 1))
    assert min(missed) < 0.1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_simulated_acceptance_follows_the_given_rates(
    engine: Engine, temperature: float
) -> None:
    """Conditional rates by position; 5 standard errors (false alarm under 1e-5)."""
    rates = [0.9, 0.5, 0.7]
    sampling = SamplingSpec(temperature=temperature, seed=2)
    options = DecodeOptions(gamma=3, max_new_tokens=150, simulate_acceptance=rates)
    result = decode(
        engine, build_drafter(DRAFTS["streamingllm"], engine), sampling, options
    )
    pairs = zip(result.counts.rates, result.counts.trials, rates, strict=True)
    for measured, trials, rate in pairs:
        assert trials > 50
        assert abs(measured - rate) < 5 * (rate * (1 - rate) / trials) ** 0.5


@pytest.mark.parametrize(
    ("batch_size", "context_len", "gamma"),
    [
        (1, 512, 0),
        (1, 10, 0),
        (5, 512, 0),
        (6, 512, 3),
        (400, 512, 3),
        (32, 4096, 4),
        (32, 1500, 4),
        (32, 1400, 3),
    ],
)
def test_a_table_is_read_at_the_nearest_batch_and_context(
    batch_size: int, context_len: int, gamma: int
) -> None:
    """Nearest in logarithm (between 1 and 32 that is 5.66, between 512 and 4096 it is 1448), and at the ends beyond."""
    table = TableGamma(
        batch_sizes=(1, 32), context_lens=(512, 4096), gammas=((0, 1), (3, 4))
    )
    assert table.choose(batch_size=batch_size, context_len=context_len) == gamma


def test_a_run_can_be_continued(engine: Engine) -> None:
    """Greedy decoding in two calls gives what one gives."""
    snapshot = engine.snapshot()
    whole = alone(engine, 40)
    for name in ("streamingllm", "snapkv", "topk", "ngram", "model"):
        engine.restore(snapshot)
        drafter = build_drafter(
            DRAFTS[name], engine, draft_model_for(DRAFTS[name], engine.model)
        )
        first = decode(
            engine,
            drafter,
            SamplingSpec(),
            DecodeOptions(gamma=2, max_new_tokens=60, max_steps=8),
        )
        second = decode(
            engine,
            drafter,
            SamplingSpec(),
            DecodeOptions(gamma=2, max_new_tokens=60, max_steps=8),
        )
        for one, a, b in zip(whole, first.tokens, second.tokens, strict=True):
            length = min(len(one), len(a) + len(b))
            assert (a + b)[:length] == one[:length]


def test_logits_that_are_not_finite_stop_the_run_and_name_step_and_layer() -> None:
    """A NaN weight in layer 1 is found at step 0 in layer 1; in the head, in the head."""
    good = load_model(tiny_spec(tie_word_embeddings=False), weights="random")
    broken = load_model(tiny_spec(tie_word_embeddings=False), weights="random")
    with torch.inference_mode():
        broken.layers[1].mlp.down.weight[3, 4] = float("nan")
    head = load_model(tiny_spec(tie_word_embeddings=False), weights="random")
    with torch.inference_mode():
        head.head.weight[5] = float("inf")
    for model, message in (
        (broken, "step 0 .*layer 1"),
        (replace(good, head=head.head), "first in the head"),
    ):
        engine = started(model, [[1, 2, 3], [4]], 40)
        with pytest.raises(NumericalError, match=message):
            decode(engine, None, SamplingSpec(), DecodeOptions(max_new_tokens=5))


def test_refusals_say_what_is_valid(tiny_model: Transformer, engine: Engine) -> None:
    small = Engine(tiny_model, batch_size=1, max_len=10)
    given = SamplingSpec()
    refused = {
        "ask for at most 171 new tokens": lambda: alone(engine, 180),
        "needs a drafter": lambda: decode(
            engine, None, given, DecodeOptions(gamma=2, max_new_tokens=5)
        ),
        "2 values of max_new_tokens for a batch of 6": lambda: alone(engine, [5, 5]),
        "between 0 and 1": lambda: speculate(
            engine, DecodeOptions(gamma=2, max_new_tokens=5, simulate_acceptance=[1.5])
        ),
        "1024 tokens of prompt and output": lambda: Engine(
            tiny_model, batch_size=1, max_len=1025
        ),
        "prompt 0 has 11 tokens": lambda: small.prefill([[1] * 11]),
        "outside the model's vocabulary of 64": lambda: small.prefill([[1, 64]]),
        "2 prompts given for a batch of 1": lambda: small.prefill([[1], [2]]),
    }
    for message, ask in refused.items():
        with pytest.raises((CapacityError, ConfigError), match=message):
            ask()
