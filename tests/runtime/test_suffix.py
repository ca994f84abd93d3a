"""Suffix decoding in the runtime counts what a replay of its own texts counts, and is lossless."""

from __future__ import annotations

import numpy as np
import pytest

from magicdec.logs.lookups import lookup
from magicdec.logs.suffix import SuffixReplay
from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.generate import DecodeOptions, DecodeResult, decode
from magicdec.runtime.transformer import Transformer
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec
from tests.runtime.drafts import TakesTurns

SUFFIX = SpeculationSpec(draft="suffix", draft_method="suffix", gamma=1)
GREEDY = SamplingSpec()
NUM_TOKENS = 60
GAMMA = 6


def prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Texts that repeat themselves in part, and two that begin alike."""
    random = np.random.default_rng(7)
    found = []
    for number in range(count):
        piece = random.integers(0, vocab_size, 5 + number).tolist()
        found.append(piece * 2 + random.integers(0, vocab_size, 3).tolist() + piece[:3])
    found[-1] = [*found[0], *found[-1][:2]]
    return found


def decoded(
    model: Transformer,
    texts: list[list[int]],
    *,
    batch_size: int,
    sampling: SamplingSpec,
) -> DecodeResult:
    engine = Engine(model, batch_size=batch_size, max_len=160)
    engine.prefill(texts[:batch_size])
    drafter = build_drafter(SUFFIX, engine)
    options = DecodeOptions(
        gamma=GAMMA, max_new_tokens=NUM_TOKENS, queue=texts[batch_size:]
    )
    return decode(engine, drafter, sampling, options)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingSpec(temperature=0.3, seed=5)])
def test_steps_are_those_of_a_replay_of_the_same_texts(
    tiny_model: Transformer, sampling: SamplingSpec
) -> None:
    """One sequence after the other, each with the responses before it. The first step of each has
    no token to look up yet; the last may be accepted beyond the end, which no log shows.
    """
    texts = prompts(5, 64)
    result = decoded(tiny_model, texts, batch_size=1, sampling=sampling)
    replay = SuffixReplay([lookup("suffix", gamma=GAMMA)])
    num_accepted = 0
    for number, (prompt, tokens) in enumerate(zip(texts, result.tokens, strict=True)):
        ours = result.num_accepted[:, number]
        ours = ours[ours >= 0]
        (steps,) = replay.steps(
            np.array([*prompt, *tokens], dtype=np.int32), len(prompt)
        )
        assert ours[0] == 0
        assert len(ours) == len(steps) + 1
        assert ours[1:-1].tolist() == steps[:-1, 2].tolist()
        assert ours[-1] >= steps[-1, 2]
        num_accepted += int(ours.sum())
    assert num_accepted > NUM_TOKENS


def test_a_batch_with_a_queue_writes_what_autoregressive_decoding_writes(
    tiny_model: Transformer,
) -> None:
    texts = prompts(5, 64)
    engine = Engine(tiny_model, batch_size=3, max_len=160)
    engine.prefill(texts[:3])
    options = {"max_new_tokens": NUM_TOKENS, "queue": texts[3:]}
    expected = decode(engine, None, GREEDY, DecodeOptions(**options)).tokens
    assert decoded(tiny_model, texts, batch_size=3, sampling=GREEDY).tokens == expected
    engine.prefill(texts[:3])
    turns = DecodeOptions(gamma=3, policy=TakesTurns(), **options)
    assert (
        decode(engine, build_drafter(SUFFIX, engine), GREEDY, turns).tokens == expected
    )


def test_what_fills_a_draft_up_is_never_accepted(tiny_model: Transformer) -> None:
    """The filling is token 0: texts of nothing else would take it, where nothing was drafted."""
    engine = Engine(tiny_model, batch_size=1, max_len=40)
    engine.prefill([[9]])
    drafter = build_drafter(SUFFIX, engine)
    assert drafter is not None
    drafter.start(GREEDY)
    proposal = drafter.propose(4, None)
    assert proposal.num_drafted_B is not None
    assert proposal.num_drafted_B.tolist() == [0]
    assert not proposal.only_drafts(proposal.tokens_BT == 0).any()
