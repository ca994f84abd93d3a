"""A session with the head that ships with the embedded model."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import msgspec
import pytest

pytest.importorskip("torch")

from magicdec.measure.configuration import BenchmarkRequest, check_request
from magicdec.measure.session import BenchmarkSession
from magicdec.runtime.engine import Engine
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.known_heads import named_head
from magicdec.specs.speculation import AUTOREGRESSIVE, SamplingSpec, SpeculationSpec
from magicdec.validate.demo import other_drafts


def head_drafts(*gammas: int, budget: int | None = None) -> tuple[SpeculationSpec, ...]:
    head = named_head("embedded", "eagle3", None)
    assert head is not None
    drafting = SpeculationSpec(
        draft="eagle3",
        draft_method="eagle3",
        draft_budget=budget,
        head=head.spec,
        checkpoint=head.checkpoint,
    )
    return tuple(msgspec.structs.replace(drafting, gamma=gamma) for gamma in gammas)


REQUEST = BenchmarkRequest(
    model="embedded",
    batch_size=3,
    context_len=300,
    context_spread=0.4,
    gen_len=24,
    sampling=SamplingSpec(),
    speculations=(*head_drafts(1, 4), *head_drafts(3, budget=64)),
)


def test_runs_with_a_head_are_lossless_and_follow_the_one_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy tokens are equal, more than one and a half come with a step, and nothing is prefilled
    again, run after run.
    """

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("a second pass over the prompts")

    monkeypatch.setattr(Engine, "show_again", refuse)
    session = BenchmarkSession(REQUEST)
    expected = session.run(AUTOREGRESSIVE, run_to_end=True).tokens
    for speculation in (*REQUEST.speculations, REQUEST.speculations[0]):
        result = session.run(speculation, run_to_end=True)
        assert result.tokens == expected
        assert 0.0 < sum(result.counts.rates) / len(result.counts.rates) < 1.0
        assert result.num_tokens / result.num_steps / REQUEST.batch_size > 1.3


def test_the_demos_other_drafts_are_a_lookup_and_the_shipped_head() -> None:
    request = replace(REQUEST, speculations=other_drafts("embedded"))
    check_request(request, load_model_spec("embedded"))
    assert [draft.draft for draft in request.speculations] == ["ngram", "eagle3"]
