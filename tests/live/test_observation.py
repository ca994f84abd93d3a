"""What is read from engines' metrics equals what the simulated requests did, counted apart from them."""

from __future__ import annotations

import numpy as np
import pytest

from magicdec.errors import ConfigError, ServerError
from magicdec.live.metrics import choose_target, parse
from magicdec.live.observation import (
    ServedDraft,
    agreed,
    announced,
    observe,
    parse_draft,
)
from magicdec.live.profile import acceptance_profile, rates, record, tokens_stderr
from magicdec.live.show import observation_lines
from tests.live.servers import (
    STEP_S,
    TTFT_S,
    LlamaCpp,
    Request,
    SGLang,
    TensorRT,
    Vllm,
    random_requests,
)

NGRAM, EAGLE = parse_draft("ngram"), parse_draft("eagle")


def observed(
    server, *batches: list[Request], wanted: str | None = None, seconds: float = 10.0
):
    """An observation with a scrape before each batch and after the last."""
    taken = [parse(server.scrape(), where="test", time_s=0.0)]
    for number, batch in enumerate(batches, 1):
        server.serve(batch)
        taken.append(parse(server.scrape(), where="test", time_s=number * seconds))
    return observe(taken, choose_target(taken[-1], wanted))


def counted_rates(requests: list[Request], *, all_steps: bool) -> list[float]:
    """Conditional rates by brute force over every step."""
    steps = [
        (drafted, accepted)
        for request in requests
        for drafted, accepted in zip(request.drafted, request.accepted, strict=True)
        if drafted or all_steps
    ]
    accepted = np.array([each for _, each in steps])
    return [
        float((accepted >= i).sum() / (accepted >= i - 1).sum()) for i in range(1, 4)
    ]


@pytest.mark.parametrize("server", [Vllm, TensorRT, LlamaCpp])
def test_rates_by_position_are_those_of_the_steps(server):
    """Engines that count by position: differences of unconditional counts give the conditional rates."""
    before, during = random_requests(1), random_requests(2)
    engine = server()
    engine.serve(before)
    seen = observed(engine, during)
    found = rates(seen, EAGLE)
    assert found.rates == pytest.approx(
        counted_rates(during, all_steps=False), abs=1e-12
    )
    assert found.trials[0] == sum(len(each.accepted) for each in during)


def test_steps_without_a_draft_count_as_not_accepted_for_ngram_only():
    """n-gram may find nothing: the profile then gives the tokens per step that were really made."""
    requests = random_requests(3, undrafted=0.4)
    seen = observed(Vllm(), requests)
    of_steps, of_drafts = rates(seen, NGRAM), rates(seen, EAGLE)
    assert of_steps.rates == pytest.approx(
        counted_rates(requests, all_steps=True), abs=1e-12
    )
    assert of_drafts.rates == pytest.approx(
        counted_rates(requests, all_steps=False), abs=1e-12
    )
    accepted = [each for request in requests for each in request.accepted]
    assert seen.counts.tokens_per_step == pytest.approx(
        1 + np.mean(accepted), abs=1e-12
    )
    drafted = [each for request in requests for each in request.drafted]
    assert seen.drafted_share == pytest.approx(
        np.mean(np.array(drafted) > 0), abs=1e-12
    )


def test_load_and_times_of_vllm_follow_from_its_counters():
    requests = random_requests(4, number=16)
    seen = observed(Vllm(), requests)
    accepted = np.array([each.accepted for each in requests])
    tokens = accepted.size + accepted.sum()
    assert seen.counts.tpot_s == pytest.approx(
        STEP_S * accepted.size / tokens, rel=1e-9
    )
    assert seen.counts.ttft_s == pytest.approx(TTFT_S)
    assert seen.batch_size == pytest.approx(16)
    assert seen.context_len == pytest.approx(
        np.mean([each.prompt_len + each.output_len / 2 for each in requests])
    )
    assert seen.tokens_per_s == pytest.approx(
        sum(each.output_len for each in requests) / 10.0
    )


def test_sglang_gives_one_rate_with_its_tokens_per_step():
    """SGLang counts verifications and tokens: the rate is the one that gives these tokens at every position."""
    requests = random_requests(5, rates=(0.7, 0.7, 0.7))
    seen = observed(SGLang(), requests)
    accepted = np.array([each.accepted for each in requests])
    assert seen.counts.tokens_per_step == pytest.approx(1 + accepted.mean(), abs=1e-12)
    found = rates(seen, EAGLE)
    assert found.rates == pytest.approx([found.rates[0]] * 3)
    assert 1 + sum(np.cumprod(found.rates)) == pytest.approx(
        1 + accepted.mean(), abs=1e-9
    )
    assert seen.context_len == pytest.approx(
        np.mean([each.prompt_len + each.output_len / 2 for each in requests])
    )
    assert "does not count by position" in "\n".join(observation_lines(seen, EAGLE))


@pytest.fixture(scope="module", name="windows")
def windows_of_random_requests():
    return [
        observed(Vllm(), random_requests(seed, number=10, steps=20))
        for seed in range(300)
    ]


@pytest.mark.slow
def test_intervals_hold_the_true_rates_nine_times_in_ten(windows):
    """Coverage of rate 1's 90 % interval over 300 windows: between 0.84 and 0.96 (false alarm below 1e-3)."""
    held = 0
    for window in windows:
        found = rates(window, EAGLE)
        held += abs(found.rates[0] - 0.8) <= 1.645 * found.stderr[0]
    assert 0.84 <= held / 300 <= 0.96


@pytest.mark.slow
def test_the_error_of_tokens_per_step_is_that_of_repeated_windows(windows):
    """The standard error against the spread of 200 windows' own means (ratio's own error about 5 %)."""
    seen = windows[:200]
    spread = np.std([each.counts.tokens_per_step for each in seen])
    assert np.mean([tokens_stderr(each) for each in seen]) == pytest.approx(
        spread, rel=0.2
    )


def test_intervals_between_scrapes_that_differ_widen_the_error():
    """Two intervals of easy text and two of hard: the counts' own error would be too small."""
    easy, hard = (0.95, 0.95, 0.95), (0.3, 0.3, 0.3)
    alike = observed(Vllm(), *(random_requests(seed, number=20) for seed in range(4)))
    apart = observed(
        Vllm(),
        *(
            random_requests(seed, number=20, rates=rates)
            for seed, rates in enumerate((easy, hard) * 2)
        ),
    )
    assert tokens_stderr(apart) > 3 * tokens_stderr(alike)


def test_a_profile_reproduces_the_tokens_per_step_that_were_observed(tmp_path):
    requests = random_requests(6, undrafted=0.3)
    seen = observed(Vllm(), requests)
    profile = acceptance_profile(seen, NGRAM, model="embedded")
    assert (profile.draft, profile.draft_method, profile.model) == (
        "ngram",
        "ngram",
        "embedded",
    )
    law = profile.conditional_rates(
        budget=seen.context_len, context=seen.context_len, gamma_max=3
    )
    assert 1 + np.cumprod(law).sum() == pytest.approx(
        seen.counts.tokens_per_step, rel=0.02
    )
    assert profile.measured[0].rates == pytest.approx(
        counted_rates(requests, all_steps=True)
    )


def test_an_interval_with_a_restart_is_left_out_and_said():
    """The counters of a new process start at nothing; what was counted across is unknown."""
    first, second = Vllm(), Vllm()
    before, after = random_requests(7), random_requests(8)
    first.serve(random_requests(0))
    taken = [parse(first.scrape(), where="test", time_s=0.0)]
    first.serve(before)
    taken.append(parse(first.scrape(), where="test", time_s=1.0))
    taken.append(parse(second.scrape(), where="test", time_s=2.0))
    second.serve(after)
    taken.append(parse(second.scrape(), where="test", time_s=3.0))
    seen = observe(taken, choose_target(taken[0], None))
    found = rates(seen, EAGLE)
    assert found.rates == pytest.approx(counted_rates(before + after, all_steps=False))
    assert (seen.num_restarts, seen.window_s) == (1, 2.0)
    assert "restarted 1 times" in "\n".join(observation_lines(seen, EAGLE))


def test_dumps_in_the_wrong_order_are_refused():
    engine = Vllm()
    early = parse(engine.scrape(), where="early")
    engine.serve(random_requests(9))
    late = parse(engine.scrape(), where="late")
    with pytest.raises(ConfigError, match="wrong order"):
        observe([late, early], choose_target(late, None))


def test_a_server_without_speculation_is_said_to_be_one():
    plain = [
        Request(each.prompt_len, (0,) * 30, (0,) * 30) for each in random_requests(10)
    ]
    seen = observed(Vllm(gamma=None), plain)
    assert seen.counts.tokens_per_step == 1.0
    assert seen.counts.tpot_s == pytest.approx(STEP_S)
    assert "without speculation" in "\n".join(observation_lines(seen, NGRAM))
    with pytest.raises(ConfigError, match="without speculation"):
        acceptance_profile(seen, NGRAM, model="embedded")
    assert record(seen, NGRAM, model="embedded", hardware="", tp_size=1).gamma == 0


def test_an_idle_server_is_said_to_be_idle():
    idle = parse(Vllm().scrape(), where="test")
    seen = observe([idle, idle], choose_target(idle, None))
    assert "was idle" in "\n".join(observation_lines(seen, NGRAM))


def test_several_engines_at_one_address_must_be_chosen_from():
    """A batch is one engine's: two data-parallel engines are not added up."""
    engine = Vllm(engines=("0", "1"))
    requests = {"0": random_requests(11), "1": random_requests(12)}
    start = parse(engine.scrape(), where="http://server/metrics")
    for name, batch in requests.items():
        engine.serve(batch, engine=name)
    end = parse(engine.scrape(), where="http://server/metrics")
    with pytest.raises(
        ConfigError, match="embedded/0, embedded/1; choose one with --target"
    ):
        choose_target(end, None)
    found = rates(observe([start, end], choose_target(end, "embedded/1")), EAGLE)
    assert found.rates == pytest.approx(counted_rates(requests["1"], all_steps=False))
    with pytest.raises(ConfigError, match="embedded/0"):
        choose_target(end, "embedded/2")


def test_sglangs_data_parallel_ranks_have_batches_of_their_own():
    """The gauges of two ranks are averaged, and their one counter of tokens is left whole."""

    def scrape(tokens: int, running: tuple[int, ...]):
        lines = [f'sglang:generation_tokens_total{{model_name="m"}} {tokens}']
        for rank, batch in enumerate(running):
            labels = f'model_name="m",tp_rank="{rank}",dp_rank="{rank}"'
            lines += [
                f"sglang:num_running_reqs{{{labels}}} {batch}",
                f"sglang:num_queue_reqs{{{labels}}} {rank}",
                f"sglang:token_usage{{{labels}}} 0.5",
                f"sglang:decode_sum_seq_lens{{{labels}}} {batch * 1000}",
                f"sglang:spec_num_steps{{{labels}}} 3",
            ]
        return parse("\n".join(lines) + "\n", where="test")

    end = scrape(900, (12, 20))
    seen = observe([scrape(0, (12, 20)), end], choose_target(end, None))
    assert seen.batch_size == 16.0
    assert seen.load.waiting == 0.5
    assert seen.load.kv_usage == 0.5
    assert seen.load.context_len == 1000.0
    assert seen.gamma == 3
    assert seen.counts.output_tokens == 900.0
    assert "2 data-parallel ranks" in seen.notes[0]


def test_missing_series_are_named():
    seen = observed(LlamaCpp(), random_requests(13))
    text = "\n".join(observation_lines(seen, EAGLE))
    assert "not shown by this server: sequences' length, time to first token" in text
    with pytest.raises(ConfigError, match="--context"):
        acceptance_profile(seen, EAGLE, model="embedded")
    assert acceptance_profile(
        seen, EAGLE, model="embedded", context=512
    ).measured_contexts == [512.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{'numActiveRequests': 3}", "not in Prometheus's text format|no metrics"),
        ("", "no metrics"),
        ("other_total 3\n", "no metrics of a known engine"),
        ("vllm:num_requests_running NaN\n", "no metrics"),
    ],
)
def test_what_is_not_an_engines_metrics_is_refused(text, said):
    with pytest.raises(ServerError, match=said):
        choose_target(parse(text, where="test"), None)


def test_a_record_carries_what_was_observed():
    requests = random_requests(14)
    seen = observed(Vllm(), requests)
    made = record(seen, EAGLE, model="embedded", hardware="a100-sxm-80gb", tp_size=1)
    assert (made.source, made.kind, made.draft, made.gamma, made.batch_size) == (
        "measured",
        "observed",
        "eagle",
        3,
        40,
    )
    assert made.step_s == pytest.approx(STEP_S)
    assert made.acceptance_by_position == pytest.approx(
        counted_rates(requests, all_steps=False)
    )


SPARSE = ServedDraft(name="self", method="streamingllm", budget=512)
INFO = 'magicdec:draft_info{{model_name="{}",engine="0",draft="self",draft_method="{}",draft_budget="{}"}} 1.0\n'


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ("ngram", ServedDraft(name="ngram", method="ngram")),
        ("suffix", ServedDraft(name="suffix", method="suffix")),
        ("eagle3", ServedDraft(name="eagle3", method="eagle3")),
        ("mtp", ServedDraft(name="mtp", method="mtp")),
        ("llama-3.2-1b", ServedDraft(name="llama-3.2-1b", method="full")),
    ],
)
def test_a_draft_is_named_by_its_method_or_its_model(text, draft):
    assert parse_draft(text) == draft


def test_a_sparse_draft_has_a_budget():
    assert parse_draft("self", budget=512) == SPARSE
    assert parse_draft("tinyllama-1.1b", method="snapkv", budget=64).method == "snapkv"
    for words in (
        {},
        {"method": "full", "budget": 64},
        {"method": "eagle"},
        {"method": "streamingLM", "budget": 64},
    ):
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
        assert (
            announced(
                parse(text + INFO.format(model, method, budget), where="x"), target
            )
            == draft
        )


def test_what_the_user_says_must_be_what_the_server_says():
    assert (
        agreed(None, SPARSE) == agreed(SPARSE, SPARSE) == agreed(SPARSE, None) == SPARSE
    )
    assert agreed(None, None).name == "ngram"
    with pytest.raises(
        ConfigError, match=r"drafts with StreamingLLM, budget 512, not with n-gram"
    ):
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
    assert (profile.draft, profile.draft_method, profile.measured_budgets) == (
        "self",
        "streamingllm",
        [64],
    )
    found = rates(seen, draft)
    law = profile.conditional_rates(
        budget=64, context=profile.measured_contexts[0], gamma_max=3
    )
    assert law == pytest.approx(found.rates, abs=0.03)


def test_positions_that_only_other_batches_use_are_not_taken_as_rejected():
    """vLLM's own K table, here 3 of at most 8 at this batch: it counts 8 positions."""
    engine, wide = Vllm(gamma=8), Vllm(gamma=3)
    scrapes = []
    for seed in (1, 2):
        for each in (engine, wide):
            each.serve(random_requests(seed, gamma=3))
        text = engine.scrape()
        name, labels = (
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            'model_name="embedded",engine="0"',
        )
        counts = "".join(
            f'{name}{{{labels},position="{at}"}} 0.0\n' for at in range(3, 8)
        )
        scrapes.append(
            [parse(text + counts, where="x"), parse(wide.scrape(), where="x")]
        )
    (table, alone) = (
        observe(list(pair), choose_target(pair[1], None))
        for pair in zip(*scrapes, strict=True)
    )
    assert len(table.counts.accepted_by_position) == 8
    assert table.gamma == alone.gamma == 3
    ours, theirs = (
        acceptance_profile(each, parse_draft("eagle"), model="embedded")
        for each in (table, alone)
    )
    assert ours.law == theirs.law
