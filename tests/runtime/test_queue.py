"""A queue of prompts that refills free slots: every sequence decodes as it would alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import Tensor

from magicdec.errors import CapacityError, ConfigError
from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.generate import INACTIVE, DecodeOptions, DecodeResult, decode
from magicdec.runtime.prefill import PREFILL_TOKENS
from magicdec.runtime.transformer import Transformer
from magicdec.specs.speculation import SamplingSpec
from tests.runtime.conftest import alone as decode_alone
from tests.runtime.conftest import started
from tests.runtime.drafts import DRAFTS, HEADS, TakesTurns, draft_model_for

ALL_DRAFTS = DRAFTS | HEADS
BATCH = 3
PROMPTS = [[1 + i, 7, 3 + 2 * i, 9] * (1 + (3 * i) % 7) for i in range(8)]
LIMITS = [5, 21, 9, 14, 30, 3, 25, 11]


@pytest.fixture(scope="module")
def alone(tiny_model: Transformer) -> list[list[int]]:
    """Each sequence decoded by itself, autoregressively."""
    found = []
    for prompt, limit in zip(PROMPTS, LIMITS, strict=True):
        found += decode_alone(started(tiny_model, [prompt], 90), limit)
    return found


@pytest.mark.parametrize(
    ("draft", "adaptive"),
    [(None, False), ("streamingllm", False), *((draft, True) for draft in ALL_DRAFTS)],
)
def test_queued_sequences_decode_as_they_would_alone(
    tiny_model: Transformer, alone: list[list[int]], draft: str | None, adaptive: bool
) -> None:
    """Greedy equality with each sequence alone, for every draft, at a changing gamma (0 included), and a fixed one."""
    result = queued(tiny_model, draft, adaptive=adaptive)
    assert result.tokens == alone
    active = (result.num_accepted != INACTIVE).sum(axis=1)
    assert (active[: result.steady_steps] == BATCH).all()
    assert (active[result.steady_steps :] < BATCH).all()
    assert result.full_steps == result.steady_steps
    assert 0 < result.refill_s < result.elapsed_s
    if adaptive:
        assert set(result.gammas.tolist()) >= {0, 2, 3}


@pytest.mark.parametrize("draft", [None, *ALL_DRAFTS])
def test_prompts_in_chunks_let_the_others_go_on(
    tiny_model: Transformer, alone: list[list[int]], draft: str | None
) -> None:
    """Greedy equality with each sequence alone, where a pass takes 5 tokens of prompts of up to 28, of two at a time
    included; meanwhile the batch decodes with slots that are not ready."""
    result = queued(tiny_model, draft, adaptive=True, prefill_tokens=5)
    assert result.tokens == alone
    active = (result.num_accepted != INACTIVE).sum(axis=1)
    assert active.min() < BATCH - 1
    assert active.min() > 0
    assert result.full_steps == (active[: result.steady_steps] == BATCH).sum()
    assert 0 < result.full_steps < result.steady_steps
    assert 0 < result.full_s < result.steady_elapsed_s < result.elapsed_s


def test_a_pass_is_filled_with_parts_of_several_prompts(
    tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pass but the last has as many tokens as it may, whatever the prompts' lengths."""
    sizes: list[int] = []
    hidden = Transformer.hidden

    def counted(model: Transformer, tokens_BT: Tensor, *others: Any) -> Tensor:
        sizes.append(tokens_BT.numel())
        return hidden(model, tokens_BT, *others)

    monkeypatch.setattr(Transformer, "hidden", counted)
    engine = Engine(tiny_model, batch_size=len(PROMPTS), max_len=90)
    done: list[int] = []
    engine.prefill(PROMPTS, chunk=10, progress=done.append)
    total = sum(len(prompt) - 1 for prompt in PROMPTS)
    assert sizes == [10] * (total // 10) + [total % 10]
    assert done == list(range(len(PROMPTS)))
    assert engine.num_prompts == 0


def queued(
    model: Transformer,
    draft: str | None,
    *,
    adaptive: bool,
    prefill_tokens: int = PREFILL_TOKENS,
) -> DecodeResult:
    engine = started(model, PROMPTS[:BATCH], 90)
    drafter = None
    if draft is not None:
        spec = ALL_DRAFTS[draft]
        drafter = build_drafter(spec, engine, draft_model_for(spec, engine.model))
    options = DecodeOptions(
        gamma=0 if drafter is None else 3,
        max_new_tokens=LIMITS,
        queue=PROMPTS[BATCH:],
        policy=TakesTurns() if adaptive else None,
        prefill_tokens=prefill_tokens,
    )
    return decode(engine, drafter, SamplingSpec(), options)


def test_the_draft_of_a_queued_sequence_sees_its_prompt(
    tiny_model: Transformer,
) -> None:
    """The target as its own draft over a full cache is accepted always, admitted sequences and gamma 0 included."""
    engine = started(tiny_model, PROMPTS[:BATCH], 90)
    drafter = build_drafter(DRAFTS["model"], engine, tiny_model)
    options = DecodeOptions(
        gamma=3, max_new_tokens=LIMITS, queue=PROMPTS[BATCH:], policy=TakesTurns()
    )
    result = decode(engine, drafter, SamplingSpec(), options)
    accepted = np.where(
        result.num_accepted == INACTIVE, result.gammas[:, None], result.num_accepted
    )
    assert (accepted == result.gammas[:, None]).all()


def test_refusals_say_what_is_valid(tiny_model: Transformer) -> None:
    engine = started(tiny_model, [[1, 2, 3]], 20)
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        decode(
            engine, None, SamplingSpec(), DecodeOptions(max_new_tokens=4, queue=[[1]])
        )
    with pytest.raises(CapacityError, match="reach 22 tokens"):
        decode(
            engine,
            None,
            SamplingSpec(),
            DecodeOptions(max_new_tokens=4, queue=[[1] * 18]),
        )
    with pytest.raises(ConfigError, match="batch of 1 and a queue of 2"):
        decode(
            engine,
            None,
            SamplingSpec(),
            DecodeOptions(max_new_tokens=[4], queue=[[1, 2], [3, 4]]),
        )
    options = DecodeOptions(max_new_tokens=2, queue=[[1, 2]], max_steps=3)
    decode(engine, None, SamplingSpec(), options)
    with pytest.raises(ConfigError, match="cannot be continued"):
        decode(engine, None, SamplingSpec(), options)
