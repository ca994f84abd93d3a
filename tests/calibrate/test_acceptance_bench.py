"""Acceptance counted from real speculative blocks of the embedded model."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from magicdec.calibrate.acceptance_bench import AcceptanceCounts, AcceptanceRequest, fit_profiles, measure_acceptance
from magicdec.runtime.engine import Engine

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
def counts(prefills: list[int]) -> AcceptanceCounts:
    prefill = Engine.prefill

    def counted(engine: Engine, prompts: list[list[int]], **options: object) -> None:
        prefills.append(len(prompts))
        prefill(engine, prompts, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "prefill", counted)
        return measure_acceptance(REQUEST)


def test_all_budgets_and_methods_of_a_context_share_one_prefill(counts: AcceptanceCounts, prefills: list[int]) -> None:
    assert prefills == [REQUEST.num_prompts] * len(REQUEST.context_lens)
    assert set(counts.prefill_s) == set(REQUEST.context_lens)
    assert len(counts.decode_s) == 2 * 3 * 2


def test_counts_are_those_of_whole_blocks_of_every_prompt(counts: AcceptanceCounts) -> None:
    """A block reaches position 2 when position 1 was accepted; every prompt emits at least gen_len tokens."""
    by_sequence: dict[tuple[object, ...], dict[int, tuple[int, int]]] = {}
    for row in counts.rows:
        key = row["draft_method"], row["budget"], row["context"], row["sequence"]
        by_sequence.setdefault(key, {})[row["position"]] = row["trials"], row["accepted"]
    assert len(by_sequence) == 2 * 3 * 2 * 3
    for positions in by_sequence.values():
        blocks, accepted = positions[1]
        deeper, accepted_deeper = positions.get(2, (0, 0))
        assert deeper == accepted
        assert blocks + accepted + accepted_deeper >= REQUEST.gen_len
    assert len({row["sequence"] for row in counts.rows}) == 2 * 3  # a context's prompts are its own


def test_a_profile_for_each_method_holds_the_counted_rates(counts: AcceptanceCounts) -> None:
    for profile in fit_profiles(REQUEST, counts):
        rows = [r for r in counts.rows if r["draft_method"] == profile.draft_method and r["position"] == 1]
        for measured in profile.measured:
            cell = [r for r in rows if (r["budget"], r["context"]) == (measured.budget, measured.context)]
            assert measured.trials[0] == sum(r["trials"] for r in cell)
            assert measured.rates[0] == pytest.approx(sum(r["accepted"] for r in cell) / measured.trials[0])
        assert profile.held_out_error is not None


def test_the_cost_of_all_budgets_is_told_against_the_longest_alone() -> None:
    """Prefill 10 s; 2 s + 3 s of one method's budgets, 4 s of another's: (10 + 5) / (10 + 3)."""
    decode_s = {("streamingllm", 64, 512): 2.0, ("streamingllm", 128, 512): 3.0, ("snapkv", 64, 512): 4.0}
    counts = AcceptanceCounts(prefill_s={512: 10.0}, decode_s=decode_s)
    assert counts.cost_ratio("streamingllm") == pytest.approx(15 / 13)
    assert counts.cost_ratio("snapkv") == 1.0
