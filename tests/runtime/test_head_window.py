"""A head with a budget sees its sinks and its window, whatever was written and overwritten."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from magicdec.errors import ConfigError
from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.drafters.heads import ChainDrafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.generate import DecodeOptions, decode
from magicdec.runtime.heads.builder import load_head
from magicdec.runtime.heads.chain import Eagle3Head
from magicdec.runtime.mixers import AttentionPass
from magicdec.runtime.transformer import NORMED, Taps, Transformer
from magicdec.runtime.weights import load_model
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec
from tests.runtime.conftest import started
from tests.runtime.heads import random_head

FIXTURES = Path(__file__).parents[1] / "data" / "heads"
SINKS, BUDGET, GAMMA = 2, 9, 3
SPEC = SpeculationSpec(
    draft="eagle3",
    draft_method="eagle3",
    draft_budget=BUDGET,
    gamma=GAMMA,
    num_sink_tokens=SINKS,
)
PROMPTS = [[1, 2, 3], [5, 9, 30, 7] * 4, list(range(2, 37))]


class MaskedPass:
    """All entries of one sequence at once, without a cache: the definition of sinks and a window."""

    def __init__(self, length: int) -> None:
        self.positions_BT = torch.arange(length)[None]
        distance = torch.arange(length)[:, None] - torch.arange(length)
        is_sink = torch.arange(length) < SINKS
        self.is_seen = (distance >= 0) & ((distance < BUDGET - SINKS) | is_sink)

    def attend(
        self, layer: int, query: torch.Tensor, kv: torch.Tensor, scoring: object
    ) -> torch.Tensor:
        keys, values = kv.permute(2, 0, 3, 1, 4)
        group = query.shape[2] // keys.shape[1]
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys.repeat_interleave(group, dim=1),
            values.repeat_interleave(group, dim=1),
            attn_mask=self.is_seen,
        )
        return mixed.transpose(1, 2).flatten(2)


@pytest.fixture(scope="module")
def target() -> Transformer:
    return load_model(FIXTURES / "target")


def drafts_without_cache(
    head: Eagle3Head, target: Transformer, text: list[int]
) -> list[int]:
    """The greedy drafts after a text, from all its entries computed at once."""
    engine = Engine(target, batch_size=1, max_len=128)
    engine.prefill([[0]])
    taps = Taps([*head.layout.reads, NORMED])
    engine.forward(torch.tensor([text[:-1]]), taps=taps)
    states = taps.joined(head.layout.reads)
    fused = head.fuse(states)
    entries = list(text[1:])
    drafted: list[int] = []
    with torch.inference_mode():
        for _ in range(GAMMA):
            attention: AttentionPass = MaskedPass(len(entries))
            output = head.step(torch.tensor([entries]), fused, attention)
            logits = head.logits(output[:, -1])
            chosen = logits.argmax(-1)
            token = (
                int(head.vocabulary.to_target(chosen))
                if head.vocabulary
                else int(chosen)
            )
            drafted.append(token)
            entries.append(token)
            fused = torch.cat((fused, output[:, -1:]), dim=1)
    return drafted


def test_a_windowed_head_drafts_as_a_masked_one_without_a_cache(
    target: Transformer,
) -> None:
    """At every step of a ragged batch, prefilled in parts, with rejections, and in a second run."""
    head = load_head(FIXTURES / "eagle3", target)
    assert isinstance(head, Eagle3Head)
    engine = Engine(target, batch_size=len(PROMPTS), max_len=100, max_gamma=GAMMA)
    drafter = build_drafter(SPEC, engine, head)
    assert isinstance(drafter, ChainDrafter)
    assert drafter.cache.num_slots < 30
    engine.prefill(PROMPTS, chunk=6)
    snapshot = engine.snapshot()
    compared = 0
    propose = drafter.propose

    def check(gamma: int, uniforms: torch.Tensor | None) -> object:
        nonlocal compared
        proposal = propose(gamma, uniforms)
        for slot, length in enumerate(engine.host_lengths.tolist()):
            text = engine.tokens_BS[slot, : length + 1].tolist()
            drafted = proposal.tokens_BT[slot].tolist()
            assert drafted == drafts_without_cache(head, target, text)
            compared += 1
        return proposal

    drafter.propose = check  # type: ignore[assignment]
    for _ in range(2):
        engine.restore(snapshot)
        decode(
            engine,
            drafter,
            SamplingSpec(),
            DecodeOptions(gamma=GAMMA, max_new_tokens=20),
        )
    assert compared > 60


def test_a_window_that_holds_every_entry_changes_nothing(
    tiny_model: Transformer,
) -> None:
    head = random_head("eagle3", tiny_model)
    accepted: list[np.ndarray] = []
    for budget in (None, 500):
        engine = started(tiny_model, PROMPTS, 90)
        spec = msgspec.structs.replace(SPEC, draft_budget=budget)
        drafter = build_drafter(spec, engine, head) if budget is None else None
        if drafter is None:
            with pytest.raises(ConfigError, match="exceeds the longest sequence"):
                build_drafter(spec, engine, head)
            drafter = build_drafter(
                msgspec.structs.replace(SPEC, draft_budget=88), engine, head
            )
        result = decode(
            engine,
            drafter,
            SamplingSpec(),
            DecodeOptions(gamma=GAMMA, max_new_tokens=30),
        )
        accepted.append(result.num_accepted)
    assert np.array_equal(*accepted)


def test_a_budget_is_refused_where_the_window_is_trained_in(
    tiny_model: Transformer,
) -> None:
    engine = started(tiny_model, PROMPTS, 90)
    spec = msgspec.structs.replace(SPEC, draft="dflash", draft_method="dflash")
    with pytest.raises(ConfigError, match="whose window is trained in"):
        build_drafter(spec, engine, random_head("dflash", tiny_model))
