"""What each draft method keeps in its cache, against a brute-force account of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magicdec.errors import CapacityError, ConfigError
from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.drafters.self_draft import CompactDrafter, SnapKVDrafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.generate import DecodeOptions, decode
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import load_model
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec
from tests.runtime.conftest import started, tiny_spec
from tests.runtime.drafts import DRAFTS, small_draft

LENGTHS = [3, 12, 13, 40, 57]


@pytest.fixture
def engine(tiny_model: Transformer) -> Engine:
    generator = np.random.default_rng(1)
    return started(
        tiny_model, [generator.integers(0, 64, n + 1).tolist() for n in LENGTHS], 300
    )


@pytest.mark.parametrize("method", ["streamingllm", "snapkv", "topk"])
def test_a_budget_that_holds_everything_drafts_like_the_target(
    method: str, engine: Engine
) -> None:
    """With room for every token, a self-draft is the target: every greedy draft is accepted."""
    draft = SpeculationSpec(
        draft="self", draft_method=method, draft_budget=200, gamma=4
    )
    result = decode(
        engine,
        build_drafter(draft, engine),
        SamplingSpec(),
        DecodeOptions(gamma=4, max_new_tokens=60),
    )
    assert result.counts.rates == [1.0] * 4
    assert result.num_tokens == 60 * len(LENGTHS)


def test_streaming_llm_holds_the_sinks_and_the_last_tokens(engine: Engine) -> None:
    """After every run of steps, the cache holds exactly the first 2 and the last 10 of the target's cached tokens."""
    drafter = build_drafter(DRAFTS["streamingllm"], engine)
    assert isinstance(drafter, CompactDrafter)
    for num_steps in (1, 2, 9):
        decode(
            engine,
            drafter,
            SamplingSpec(),
            DecodeOptions(gamma=3, max_new_tokens=200, max_steps=num_steps),
        )
        for row, length in enumerate(engine.host_lengths.tolist()):
            wanted = sorted(
                {*range(min(2, length)), *range(max(0, length - 10), length)}
            )
            held = drafter.cache.blocks[0].data[:, :, row, :, : min(12, length)]
            expected = engine.cache.blocks[0].data[:, :, row][:, :, :, wanted]
            order = [sort_key(held[0, 0, 0, i]) for i in range(held.shape[3])]
            expected_order = [
                sort_key(expected[0, 0, 0, i]) for i in range(expected.shape[3])
            ]
            assert sorted(order) == sorted(expected_order)
            torch.testing.assert_close(
                held[:, :, :, np.argsort(order)],
                expected[:, :, :, np.argsort(expected_order)],
                rtol=0,
                atol=0,
            )


def sort_key(vector: torch.Tensor) -> float:
    """Tells tokens' keys apart: no two random vectors have the same first element."""
    return float(vector[0])


def reference_probabilities(
    engine: Engine, row: int, first_query: int
) -> list[torch.Tensor]:
    """Each layer's attention [K, T, S] of a sequence's cached tokens from `first_query` on, from its own prefill."""
    length = int(engine.host_lengths[row])
    alone = started(engine.model, [engine.tokens_BS[row, : length + 1].tolist()], 300)
    seen: list[torch.Tensor] = []
    num_tokens = length - first_query
    alone.probe(
        num_tokens,
        lambda layer, paid: seen.append(paid[0].clone()),
        num_back=num_tokens,
    )
    return seen


def test_snapkv_selects_what_the_observation_window_attended_to(engine: Engine) -> None:
    """Per layer and KV head: the window, and the highest pooled sums of its attention before the window."""
    drafter = build_drafter(DRAFTS["snapkv"], engine)
    assert isinstance(drafter, SnapKVDrafter)
    drafter.start(SamplingSpec())
    budget, window, kernel = 16, 5, 3
    for row in (3, 4):
        length = LENGTHS[row]
        for layer, paid_KTS in enumerate(
            reference_probabilities(engine, row, length - window)
        ):
            for head in range(paid_KTS.shape[0]):
                total = paid_KTS[head].sum(dim=0).double().numpy()
                padded = np.pad(total, kernel // 2)
                pooled = np.array(
                    [padded[i : i + kernel].mean() for i in range(length)]
                )[: length - window]
                best = np.argsort(-pooled)[: budget - window]
                wanted = {*best.tolist(), *range(length - window, length)}
                held = {
                    sort_key(x)
                    for x in drafter.cache.blocks[0].data[layer, 1, row, head, :budget]
                }
                assert held == {
                    sort_key(engine.cache.blocks[0].data[layer, 1, row, head, i])
                    for i in wanted
                }


def test_top_k_holds_what_the_last_accepted_token_attended_to(engine: Engine) -> None:
    """After steps with rejections: the budget's highest attention of the last cached token, per layer and KV head."""
    drafter = build_drafter(DRAFTS["topk"], engine)
    assert isinstance(drafter, CompactDrafter)
    result = decode(
        engine,
        drafter,
        SamplingSpec(),
        DecodeOptions(gamma=3, max_new_tokens=200, max_steps=5),
    )
    assert result.num_accepted.min() < 3
    for row in range(1, len(LENGTHS)):
        length = int(engine.host_lengths[row])
        for layer, paid_KTS in enumerate(
            reference_probabilities(engine, row, length - 1)
        ):
            for head in range(paid_KTS.shape[0]):
                best = paid_KTS[head, 0].topk(8).indices.tolist()
                held = {
                    sort_key(x)
                    for x in drafter.cache.blocks[0].data[layer, 1, row, head, :8]
                }
                assert held == {
                    sort_key(engine.cache.blocks[0].data[layer, 1, row, head, i])
                    for i in best
                }


def test_ngram_lookup_continues_the_latest_longest_match(
    tiny_model: Transformer,
) -> None:
    """Longest match first, then the latest; the stretch repeats past the end; without a match the last token does."""
    prompts = [
        [1, 2, 3, 9, 8, 1, 2, 3, 7, 6, 5, 3, 40, 1, 2, 3],
        [4, 4, 4, 4],
        [10, 11, 12],
        [20, 21, 20, 22, 20],
    ]
    engine = started(tiny_model, prompts, 64)
    drafter = build_drafter(DRAFTS["ngram"], engine)
    drafted = drafter.propose(4, None).tokens_BT.tolist()
    assert drafted == [[7, 6, 5, 3], [4, 4, 4, 4], [12, 12, 12, 12], [22, 20, 22, 20]]


def test_a_draft_model_equal_to_the_target_is_always_accepted(
    tiny_model: Transformer,
) -> None:
    """Every draft accepted, so every block's last token is missing from the draft's cache and must be caught up."""
    engine = started(tiny_model, [[5], [1, 2, 3, 4], [9] * 30], 150)
    snapshot = engine.snapshot()
    drafter = build_drafter(
        SpeculationSpec(draft="twin", draft_method="full", gamma=3), engine, tiny_model
    )
    for limits in (
        [100, 20, 50],
        [10, 90, 40],
    ):  # the second run finds the slots in another order
        engine.restore(snapshot)
        result = decode(
            engine,
            drafter,
            SamplingSpec(),
            DecodeOptions(gamma=3, max_new_tokens=limits),
        )
        assert result.counts.rates == [1.0] * 3


def test_a_sparse_draft_model_sees_sinks_and_window_at_positions_in_its_cache(
    engine: Engine,
) -> None:
    """At every step its first draft is what the draft model says next after the sinks and the window as a text alone.
    (With one layer, keys and values do not depend on what else was in the cache when they were computed.)"""
    model = small_draft(64)
    drafter = build_drafter(DRAFTS["sparse-model"], engine, model)
    checked = 0
    options = DecodeOptions(gamma=3, max_new_tokens=200, max_steps=1)
    drafter.start(SamplingSpec())
    drafter.start = lambda sampling: None  # type: ignore[method-assign]  # keep its state from call to call
    for _ in range(30):
        drafted = drafter.propose(3, None).tokens_BT[:, 0].tolist()
        for row, length in enumerate(engine.host_lengths.tolist()):
            kept = [*range(min(2, length)), *range(max(2, length - 10), length), length]
            alone = started(model, [engine.tokens_BS[row, kept].tolist()], 32)
            assert drafted[row] == int(
                alone.forward(alone.pending_B[:, None])[0, 0].argmax()
            )
            checked += length > 12
        decode(engine, drafter, SamplingSpec(), options)
    assert checked > 100


def test_a_sparse_draft_model_needs_positions_for_its_budget_only(
    engine: Engine,
) -> None:
    """A model trained for 32 positions drafts at hundreds; one trained for too few is refused."""
    short = load_model(
        tiny_spec(name="short", max_position_embeddings=32), weights="random"
    )
    draft = SpeculationSpec(
        draft="short", draft_method="streamingllm", draft_budget=24, gamma=3
    )
    decode(
        engine,
        build_drafter(draft, engine, short),
        SamplingSpec(),
        DecodeOptions(gamma=3, max_new_tokens=90),
    )
    with pytest.raises(CapacityError, match="holds 32 positions"):
        build_drafter(
            SpeculationSpec(
                draft="x", draft_method="streamingllm", draft_budget=30, gamma=3
            ),
            engine,
            short,
        )
    with pytest.raises(CapacityError, match="holds 32 tokens"):
        build_drafter(
            SpeculationSpec(draft="x", draft_method="full", gamma=3), engine, short
        )


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (
            SpeculationSpec(
                draft="self", draft_method="streamingllm", draft_budget=400, gamma=2
            ),
            "exceeds the longest",
        ),
        (
            SpeculationSpec(draft="self", draft_method="eagle", gamma=2),
            "unknown draft method",
        ),
        (
            SpeculationSpec(draft="small", draft_method="full", gamma=2),
            "needs its model's weights",
        ),
    ],
)
def test_drafts_that_cannot_be_built_say_why(
    draft: SpeculationSpec, message: str, engine: Engine
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_drafter(draft, engine)


def test_a_budget_too_small_for_gamma_says_what_fits(engine: Engine) -> None:
    draft = SpeculationSpec(
        draft="self", draft_method="streamingllm", draft_budget=8, gamma=6
    )
    with pytest.raises(ConfigError, match="gamma at most 3"):
        decode(
            engine,
            build_drafter(draft, engine),
            SamplingSpec(),
            DecodeOptions(gamma=6, max_new_tokens=4),
        )
