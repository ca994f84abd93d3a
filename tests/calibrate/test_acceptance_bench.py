"""Acceptance counted from real speculative blocks of the embedded model."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from magicdec.calibrate.acceptance_bench import (
    AcceptanceRequest,
    fit_profiles,
    measure_acceptance,
)
from magicdec.errors import ConfigError
from magicdec.measure.configuration import BenchmarkRequest
from magicdec.measure.session import BenchmarkSession
from magicdec.perfmodel.acceptance.fit import Measurement
from magicdec.runtime.engine import Engine
from magicdec.specs.speculation import AUTOREGRESSIVE, SamplingSpec

REQUEST = AcceptanceRequest(
    draft_methods=("streamingllm", "snapkv"),
    draft_budgets=(24, 48, 96),
    context_lens=(128, 192),
    num_prompts=3,
    gen_len=12,
    gamma=2,
)


@pytest.fixture(scope="module")
def prefills() -> list[int]:
    return []


@pytest.fixture(scope="module")
def counts(prefills: list[int]) -> list[Measurement]:
    prefill = Engine.prefill

    def counted(engine: Engine, prompts: list[list[int]], **options: object) -> None:
        prefills.append(len(prompts))
        prefill(engine, prompts, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "prefill", counted)
        return measure_acceptance(REQUEST)


def test_all_budgets_and_methods_of_a_context_share_one_prefill(
    counts: list[Measurement], prefills: list[int]
) -> None:
    assert prefills == [REQUEST.num_prompts] * len(REQUEST.context_lens)


def test_counts_are_those_of_whole_blocks_of_every_prompt(
    counts: list[Measurement],
) -> None:
    """A block reaches position 2 when position 1 was accepted; every prompt emits at least gen_len tokens."""
    by_sequence: dict[tuple[object, ...], dict[int, tuple[int, int]]] = {}
    for row in counts:
        key = row.draft_method, row.budget, row.context, row.sequence
        by_sequence.setdefault(key, {})[row.position] = row.trials, row.accepted
    assert len(by_sequence) == 2 * 3 * 2 * 3
    for positions in by_sequence.values():
        blocks, accepted = positions[1]
        deeper, accepted_deeper = positions.get(2, (0, 0))
        assert deeper == accepted
        assert blocks + accepted + accepted_deeper >= REQUEST.gen_len
    assert (
        len({row.sequence for row in counts}) == 2 * 3
    )  # a context's prompts are its own


def test_a_profile_for_each_method_holds_the_counted_rates(
    counts: list[Measurement],
) -> None:
    for profile in fit_profiles(REQUEST, counts):
        rows = [
            r
            for r in counts
            if r.draft_method == profile.draft_method and r.position == 1
        ]
        for measured in profile.measured:
            cell = [
                r
                for r in rows
                if (r.budget, r.context) == (measured.budget, measured.context)
            ]
            assert measured.trials[0] == sum(r.trials for r in cell)
            assert measured.rates[0] == pytest.approx(
                sum(r.accepted for r in cell) / measured.trials[0]
            )
        assert profile.held_out_error is not None


def test_a_draft_model_that_is_the_target_accepts_everything() -> None:
    """The embedded model as a draft model of itself, with a full cache: p = q at every position."""
    request = AcceptanceRequest(
        draft="embedded",
        draft_methods=("full",),
        context_lens=(128,),
        num_prompts=2,
        gen_len=12,
        gamma=3,
    )
    (profile,) = fit_profiles(request, measure_acceptance(request))
    (measured,) = profile.measured
    assert (profile.draft, profile.draft_method) == ("embedded", "full")
    assert (measured.budget, measured.context) == (128.0, 128.0)
    assert measured.rates == [1.0, 1.0, 1.0]


def looked_up(tokens: list[int], gamma: int) -> list[int]:
    """What followed the longest (at most 3 tokens), then latest, earlier match of the end; then that stretch again."""
    for length in (3, 2, 1):
        for end in range(len(tokens) - 2, length - 2, -1):
            if tokens[end - length + 1 : end + 1] == tokens[-length:]:
                since = tokens[end + 1 :]
                return [since[i % len(since)] for i in range(gamma)]
    return [tokens[-1]] * gamma


def replayed(
    prompt: list[int], emitted: list[int], *, gamma: int, gen_len: int
) -> list[int]:
    """Accepted drafts of each step, for a text that is known beforehand."""
    lengths, done = [], 0
    while done < gen_len:
        proposed = looked_up(prompt + emitted[:done], gamma)
        accepted = next(
            (i for i in range(gamma) if proposed[i] != emitted[done + i]), gamma
        )
        lengths.append(accepted)
        done += accepted + 1
    return lengths


def test_ngram_counts_are_those_of_lookups_in_the_emitted_text() -> None:
    """Greedy text does not depend on drafts: replaying lookups over the autoregressive text gives the same counts."""
    gamma, gen_len = 2, 24
    request = AcceptanceRequest(
        draft="ngram", draft_methods=("ngram",), context_lens=(128,), num_prompts=3, gen_len=gen_len, gamma=gamma,
        temperature=0.0,
    )  # fmt: skip
    session = BenchmarkSession(
        BenchmarkRequest(
            model="embedded", batch_size=3, context_len=128, gen_len=gen_len + gamma + 1,
            sampling=SamplingSpec(seed=request.seed), calibration_prompts=True,
        )
    )  # fmt: skip
    alone = session.run(AUTOREGRESSIVE, run_to_end=True)
    lengths = [
        each
        for prompt, tokens in zip(session.prompts, alone.tokens, strict=True)
        for each in replayed(prompt, tokens, gamma=gamma, gen_len=gen_len)
    ]
    assert any(lengths)
    rows = measure_acceptance(request)
    for position in (1, 2):
        cell = [row for row in rows if row.position == position]
        assert sum(row.trials for row in cell) == sum(
            each >= position - 1 for each in lengths
        )
        assert sum(row.accepted for row in cell) == sum(
            each >= position for each in lengths
        )


def test_methods_that_do_not_go_with_a_draft_are_refused() -> None:
    for draft, method in (("ngram", "full"), ("self", "full"), ("embedded", "snapkv")):
        with pytest.raises(ConfigError, match=f"method of draft {draft}"):
            AcceptanceRequest(draft=draft, draft_methods=(method,))  # type: ignore[arg-type]
