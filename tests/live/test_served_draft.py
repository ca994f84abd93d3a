"""What a server drafts with: as the user says, as its own metrics say, and what is said where these differ."""

from __future__ import annotations

import pytest

from magicdec.errors import ConfigError
from magicdec.live.metrics import choose_target, parse
from magicdec.live.observation import Draft, agreed, announced, observe, parse_draft
from magicdec.live.profile import acceptance_profile, rates
from tests.live.servers import Vllm, random_requests

SPARSE = Draft(name="self", method="streamingllm", budget=512)
INFO = 'magicdec:draft_info{{model_name="{}",engine="0",draft="self",draft_method="{}",draft_budget="{}"}} 1.0\n'


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ("ngram", Draft(name="ngram", method="ngram")),
        ("suffix", Draft(name="suffix", method="suffix")),
        ("eagle3", Draft(name="eagle3", method="eagle3")),
        ("mtp", Draft(name="mtp", method="mtp")),
        ("llama-3.2-1b", Draft(name="llama-3.2-1b", method="full")),
    ],
)
def test_a_draft_is_named_by_its_method_or_its_model(text, draft):
    assert parse_draft(text) == draft


def test_a_sparse_draft_has_a_budget():
    assert parse_draft("self", budget=512) == SPARSE
    assert parse_draft("tinyllama-1.1b", method="snapkv", budget=64).method == "snapkv"
    for words in ({}, {"method": "full", "budget": 64}, {"method": "eagle"}, {"method": "streamingLM", "budget": 64}):
        with pytest.raises(ConfigError):
            parse_draft("self", **words)
    with pytest.raises(ConfigError, match="own method"):
        parse_draft("ngram", method="streamingllm", budget=64)


def test_the_servers_own_word_is_taken_for_its_own_model_only():
    engine = Vllm()
    engine.serve(random_requests(1))
    text = engine.scrape()
    target = choose_target(parse(text, where="x"), None)
    assert announced(parse(text, where="x"), target) is None
    for model, method, budget, draft in (
        ("embedded", "streamingllm", "512", SPARSE),
        ("another", "streamingllm", "512", None),
        ("embedded", "nonsense", "512", None),
        ("embedded", "topk", "many", None),
    ):
        assert announced(parse(text + INFO.format(model, method, budget), where="x"), target) == draft


def test_what_the_user_says_must_be_what_the_server_says():
    assert agreed(None, SPARSE) == agreed(SPARSE, SPARSE) == agreed(SPARSE, None) == SPARSE
    assert agreed(None, None).name == "ngram"
    with pytest.raises(ConfigError, match=r"drafts with StreamingLLM, budget 512, not with n-gram"):
        agreed(parse_draft("ngram"), SPARSE)


def test_a_profile_of_a_sparse_draft_holds_its_budget_and_predicts_its_rates():
    engine = Vllm()
    engine.serve(random_requests(1))
    before = engine.scrape() + INFO.format("embedded", "streamingllm", 64)
    for seed in range(20):
        engine.serve(random_requests(seed))
    after = engine.scrape() + INFO.format("embedded", "streamingllm", 64)
    scrapes = [parse(text, where="x") for text in (before, after)]
    seen = observe(scrapes, choose_target(scrapes[1], None))
    draft = agreed(None, seen.announced)
    profile = acceptance_profile(seen, draft, model="embedded")
    assert (profile.draft, profile.draft_method, profile.measured_budgets) == ("self", "streamingllm", [64])
    found = rates(seen, draft)
    assert found is not None
    law = profile.conditional_rates(budget=64, context=profile.measured_contexts[0], gamma_max=3)
    assert law == pytest.approx(found.rates, abs=0.03)


def test_positions_that_only_other_batches_use_are_not_taken_as_rejected():
    """vLLM's own K table, here 3 of at most 8 at this batch: it counts 8 positions."""
    engine, wide = Vllm(gamma=8), Vllm(gamma=3)
    scrapes = []
    for seed in (1, 2):
        for each in (engine, wide):
            each.serve(random_requests(seed, gamma=3))
        text = engine.scrape()
        name, labels = "vllm:spec_decode_num_accepted_tokens_per_pos_total", 'model_name="embedded",engine="0"'
        counts = "".join(f'{name}{{{labels},position="{at}"}} 0.0\n' for at in range(3, 8))
        scrapes.append([parse(text + counts, where="x"), parse(wide.scrape(), where="x")])
    (table, alone) = (observe(list(pair), choose_target(pair[1], None)) for pair in zip(*scrapes, strict=True))
    assert len(table.counts.accepted_by_position) == 8
    assert table.gamma == alone.gamma == 3
    ours, theirs = (acceptance_profile(each, parse_draft("eagle"), model="embedded") for each in (table, alone))
    assert ours.law == theirs.law
