"""The law of acceptance against Monte Carlo, known laws recovered from counts, rates that a user gives, and static
batches against simulated ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.counts import Z_90, expected_tokens_per_step, survival
from magicdec.errors import ConfigError
from magicdec.perfmodel import acceptance
from magicdec.perfmodel.acceptance import (
    AcceptanceProfile,
    BelievedProfile,
    MeasuredProfile,
    ReplayedProfile,
    constant_profile,
    fit_profile,
    load_profile,
    save_profile,
)
from magicdec.perfmodel.acceptance.fit import (
    MeasuredRates,
    measured_rates,
    measurements_from_rows,
)
from magicdec.perfmodel.acceptance.law import (
    Beyond,
    Law,
    LawError,
    static_batch_efficiency,
)
from magicdec.perfmodel.acceptance.replayed import LookupSetting, RangeOfSteps, Replay
from magicdec.perfmodel.plan.drafts import load_profiles
from magicdec.perfmodel.planner import PlanRequest, make_plan

laws = st.builds(
    Law, rejection=st.floats(0.0, 5.0), budget_exponent=st.floats(0.0, 3.0), context_exponent=st.floats(-1.0, 1.0),
    fill_exponent=st.floats(0.0, 3.0), floor=st.floats(0.0, 1.0), concentration=st.none() | st.floats(0.1, 1e6),
    drift=st.floats(0.0, 10.0), drift_depth=st.floats(0.1, 50.0),
)  # fmt: skip


def sampled_counts(
    law: Law,
    *,
    blocks: int,
    gamma: int,
    seed: int,
    sequences: int = 0,
    spread: float = 0.0,
) -> list[dict]:
    """Counts by position drawn from a law, block by block; `sequences` of their own rate where asked."""
    rng = np.random.default_rng(seed)
    rows = []
    for budget in (64, 128, 256, 512, 1024):
        for context in (2048, 4096):
            rates = law.conditional_rates(
                budget=budget, context=context, gamma_max=gamma
            )
            for sequence in range(max(sequences, 1)):
                shift = rng.normal(0.0, spread) if sequences else 0.0
                trials = blocks
                for position in range(gamma):
                    accepted = rng.binomial(
                        trials, np.clip(rates[position] + shift, 0.0, 1.0)
                    )
                    rows.append(
                        {
                            "draft_method": "streamingllm", "budget": budget, "context": context, "temperature": 1.0,
                            "position": position + 1, "trials": trials, "accepted": int(accepted),
                            **({"sequence": sequence} if sequences else {}),
                        }
                    )  # fmt: skip
                    trials = int(accepted)
    return rows


def test_without_drift_the_law_is_a_mixture_over_sequences() -> None:
    """Blocks whose rate is drawn from a Beta distribution survive as the law says (false alarm 6.4e-5 per depth)."""
    alpha, concentration, gamma, blocks = 0.7, 3.0, 6, 400_000
    rng = np.random.default_rng(3)
    rate = rng.beta(alpha * concentration, (1 - alpha) * concentration, blocks)
    alive = np.cumprod(rng.random((blocks, gamma)) < rate[:, None], axis=1).mean(axis=0)
    predicted = survival(
        Law(rejection=1 - alpha, concentration=concentration).rates_after(alpha, gamma)
    )
    assert np.all(
        np.abs(alive - predicted) < 4 * np.sqrt(predicted * (1 - predicted) / blocks)
    )


def test_heterogeneity_raises_and_drift_lowers_the_rate_with_depth() -> None:
    rising = Law(rejection=0.2, concentration=5.0).rates_after(0.8, 8)
    falling = Law(rejection=0.2, drift=1.0).rates_after(0.8, 8)
    assert np.all(np.diff(rising) > 0)
    assert np.all(np.diff(falling) < 0)
    assert rising[0] == falling[0] == pytest.approx(0.8)


@given(law=laws, budget=st.floats(1, 1e7), context=st.floats(1, 1e7))
def test_rates_are_probabilities_and_grow_with_the_budget(
    law: Law, budget: float, context: float
) -> None:
    rates = law.conditional_rates(
        budget=np.array([budget, 2 * budget]), context=context, gamma_max=12
    )
    assert np.all((rates >= 0) & (rates <= 1))
    assert np.all(rates[1] >= rates[0] - 1e-12)


@given(value=st.sampled_from([np.nan, np.inf, -np.inf, -5.0, 0.0, 1e300, None]))
def test_no_input_gives_a_number_that_is_not_a_probability(value: float | None) -> None:
    rates = Law(
        rejection=0.2, budget_exponent=0.5, fill_exponent=1.0
    ).conditional_rates(
        budget=value, context=4096 if value is None else value, gamma_max=4
    )
    assert np.all((rates >= 0) & (rates <= 1))


def test_a_self_draft_with_the_whole_cache_accepts_everything() -> None:
    law = Law(rejection=0.3, budget_exponent=0.5, fill_exponent=1.0)
    assert np.all(
        law.conditional_rates(budget=[None, 4096, 9999][1:], context=4096, gamma_max=5)
        == 1
    )
    assert np.all(law.conditional_rates(budget=None, context=4096, gamma_max=5) == 1)


def test_a_known_law_is_recovered_from_counts_at_budgets_not_measured() -> None:
    true = Law(
        rejection=0.2, budget_exponent=0.6, context_exponent=0.1, fill_exponent=1.0, reference_budget=256,
        reference_context=2048, concentration=8.0, drift=0.5,
    )  # fmt: skip
    counts = sampled_counts(true, blocks=3000, gamma=6, seed=1)
    fitted = acceptance.fit_profile(counts, model="m")
    at = {"budget": np.array([96, 384, 1536]), "context": 3000, "gamma_max": 8}
    assert (
        np.abs(fitted.conditional_rates(**at) - true.conditional_rates(**at)).max()
        < 0.02
    )


def test_the_interval_of_a_small_sample_holds_the_truth_about_as_often_as_it_says() -> (
    None
):
    """12 samples of 40 blocks a cell: a 90 % interval that covers fewer than 7 would be an accident of 5e-4."""
    true = Law(
        rejection=0.25, budget_exponent=0.5, context_exponent=0.1, fill_exponent=1.0, reference_budget=256,
        reference_context=3000, concentration=15.0, drift=0.3,
    )  # fmt: skip
    at = {"budget": 256, "context": 3000}
    truth = expected_tokens_per_step(true.conditional_rates(**at, gamma_max=4), 4)
    covered = 0
    for seed in range(12):
        fitted = acceptance.fit_profile(
            sampled_counts(true, blocks=40, gamma=4, seed=seed)
        )
        low, high = (
            expected_tokens_per_step(
                fitted.conditional_rates(**at, gamma_max=4, num_sigma=sigma), 4
            )
            for sigma in (-Z_90, Z_90)
        )
        covered += bool(low <= truth <= high)
    assert covered >= 7


def test_few_data_give_a_plain_law_with_wide_errors() -> None:
    row = {
        "draft_method": "snapkv",
        "budget": 256,
        "context": 4096,
        "position": 1,
        "trials": 20,
        "accepted": 17,
    }
    profile = acceptance.fit_profile([row])
    assert profile.error.log_rejection > 0.3
    assert (
        0.7 < profile.conditional_rates(budget=256, context=4096, gamma_max=1)[0] < 0.95
    )


@pytest.mark.parametrize("accepted", [0, 500])
def test_all_or_nothing_accepted_does_not_break_the_fit(accepted: int) -> None:
    rows = [
        {
            "draft_method": "snapkv",
            "budget": b,
            "context": 4096,
            "position": 1,
            "trials": 500,
            "accepted": accepted,
        }
        for b in (64, 256)
    ]
    rate = float(
        acceptance.fit_profile(rows).conditional_rates(
            budget=128, context=4096, gamma_max=1
        )[0]
    )
    assert abs(rate - accepted / 500) < 0.05


@pytest.mark.parametrize("contexts", [(4096,), (4096, 60_000)])
@pytest.mark.parametrize("accepted", [0, 1, 20])
def test_errors_of_a_law_are_bounded_whatever_was_counted(
    accepted: int, contexts: tuple[int, ...]
) -> None:
    """Up to a factor of e^10 either way, which counts of nothing but rejections reach."""
    rows = [
        {"draft_method": "snapkv", "budget": 256, "context": context, "position": position, "trials": 20,
         "accepted": accepted}
        for context in contexts
        for position in (1, 5)
    ]  # fmt: skip
    error = acceptance.fit_profile(rows).error
    values = msgspec.structs.astuple(error)
    assert min(values) >= 0.0
    assert max(values) <= 10.0
    if accepted == 0 and len(contexts) == 2:
        assert error.log_rejection == 10.0


def test_the_spread_of_few_sequences_is_that_of_a_sample() -> None:
    """Rates known almost exactly, of 0.6 and 0.8: numpy's sample standard deviation."""
    rows = [
        {"draft_method": "streamingllm", "budget": 64, "context": 4096, "position": 1, "trials": 10**6,
         "accepted": rate * 10**6, "sequence": name}
        for name, rate in (("a", 0.6), ("b", 0.8))
    ]  # fmt: skip
    assert acceptance.fit_profile(rows).spread == pytest.approx(
        np.std([0.6, 0.8], ddof=1), rel=0.02
    )


def test_errors_of_counted_rates_are_clustered_by_sequence() -> None:
    """Sequences whose rates differ by 0.08: over 200 samples of 30, the stated standard error of position 1 is the
    rates' true scatter within a fifth (four standard errors of a standard deviation), twice the binomial's."""
    law = Law(rejection=0.2, reference_budget=256)
    tables = [
        measured_rates(
            measurements_from_rows(
                sampled_counts(
                    law, blocks=60, gamma=1, seed=s, sequences=30, spread=0.08
                )
            )
        )
        for s in range(200)
    ]
    for cell in range(3):
        rates, stated = (
            np.array([getattr(t[cell], name)[0] for t in tables])
            for name in ("rates", "stderr")
        )
        assert np.mean(stated) == pytest.approx(np.std(rates), rel=0.2)
        assert np.mean(stated) > 1.5 * np.sqrt(
            np.mean(rates) * (1 - np.mean(rates)) / 1800
        )


def test_the_error_on_budgets_left_out_shows_a_law_that_does_not_hold() -> None:
    """Counts of the law itself are missed by their noise alone; a dent at one budget is missed by its size."""
    true = Law(
        rejection=0.2,
        budget_exponent=0.4,
        fill_exponent=0.5,
        reference_budget=256,
        concentration=10.0,
    )
    rows = sampled_counts(true, blocks=2000, gamma=3, seed=4)
    good = fit_profile(rows)
    assert good.held_out_error < 2 * good.held_out_noise < 0.02
    dented = [
        row | {"accepted": int(row["accepted"] * 0.8)} if row["budget"] == 256 else row
        for row in rows
    ]
    assert (fit_profile(dented).held_out_error or 0.0) > 0.04
    assert (
        fit_profile([row for row in rows if row["budget"] < 200]).held_out_error is None
    )


@pytest.mark.parametrize(("change", "message"), [
    ({"accepted": 30}, "accepted must be between"), ({"position": 0}, "at least 1"),
    ({"budget": float("nan")}, "finite"), ({"trials": "many"}, "trials"),
    ({"trials": 0, "accepted": 0}, "no acceptance measurement"),
])  # fmt: skip
def test_unusable_measurements_are_refused_in_one_line(
    change: dict, message: str
) -> None:
    row = {
        "draft_method": "snapkv",
        "budget": 256,
        "context": 4096,
        "position": 1,
        "trials": 20,
        "accepted": 17,
    }
    with pytest.raises(ConfigError, match=message):
        acceptance.fit_profile([row | change])


SETTING = LookupSetting(
    min_ngram=2, max_ngram=4, gammas=[1, 4], tokens_per_step=[1.3, 1.7], tokens_stderr=[0.01, 0.03],
    drafted_share=[0.4, 0.35], drafted_per_step=[0.4, 1.3], rates=[0.3, 0.6], stderr=[0.01, 0.02],
    trials=[1000, 300], rates_gamma=4,
)  # fmt: skip
REPLAY = Replay(
    rule="ngram", requests=9, prompt_tokens=900, output_tokens=500, steps=400, gamma=4, chosen=0,
    settings=[SETTING],
)  # fmt: skip
COMMON: dict[str, Any] = {
    "model": "m", "draft": "ngram", "draft_method": "ngram", "law": Law(rejection=0.1, by_position=[0.9, 0.6]),
    "error": LawError(depth=0.1), "spread": 0.03, "measured_gamma": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    "profile",
    [
        MeasuredProfile(**COMMON, temperature=0.6, applies_to=["n"], carried_error=0.1),
        ReplayedProfile(**COMMON, replay=REPLAY, drafted_share=0.35),
        BelievedProfile(**COMMON),
    ],
    ids=lambda profile: type(profile).__name__,
)
def test_a_profile_of_each_sort_survives_its_file(
    profile: AcceptanceProfile, tmp_path: Path
) -> None:
    acceptance.save_profile(profile, tmp_path / "p.json")
    assert acceptance.load_profile(tmp_path / "p.json") == profile


def objects_in(value: Any, at: str = "$") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of a document, with its place."""
    if isinstance(value, dict):
        yield at, value
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for name, each in inner:
        if isinstance(each, dict | list):
            yield from objects_in(each, f"{at}.{name}")


COUNTED = MeasuredRates(
    budget=64.0, context=999.0, rates=[0.5], stderr=[0.1], trials=[9.0]
)
RANGE = RangeOfSteps(upto=64, steps=9, tokens_per_step=1.2, drafted_share=0.5)


@pytest.mark.parametrize(
    "profile",
    [
        MeasuredProfile(
            **COMMON, measured=[COUNTED], beyond=Beyond(position=3, slope=0.1)
        ),
        ReplayedProfile(
            **COMMON,
            replay=msgspec.structs.replace(REPLAY, by_context=[RANGE]),
            measured=[COUNTED],
        ),
        BelievedProfile(**COMMON),
    ],
    ids=lambda profile: type(profile).__name__,
)
def test_a_key_that_is_none_is_refused_wherever_it_stands(
    profile: AcceptanceProfile, tmp_path: Path
) -> None:
    """A misspelt field would else be left out in silence."""
    path = tmp_path / "p.json"
    save_profile(profile, path)
    document = json.loads(path.read_text())
    for place, found in list(objects_in(document)):
        found["mispelt"] = 1
        path.write_text(json.dumps(document))
        with pytest.raises(ConfigError, match="mispelt"):
            load_profile(path)
        del found["mispelt"]
        path.write_text(json.dumps(document))
        assert load_profile(path) == profile, place


def test_shipped_files_are_written_as_they_were_read(tmp_path: Path) -> None:
    for name in acceptance.default_profile_names():
        path = acceptance.PROFILES_DIRECTORY / f"{name}.json"
        save_profile(load_profile(path), tmp_path / "p.json")
        assert json.loads((tmp_path / "p.json").read_text()) == json.loads(
            path.read_text()
        )


@pytest.mark.parametrize(("change", "named"), [
    ({"spread": 2.0}, "spread"), ({"model": 3}, "model"), ({"unknown": 1}, "unknown"), ({"law": {}}, "rejection"),
])  # fmt: skip
def test_a_broken_file_is_refused_naming_file_and_key(
    tmp_path: Path, change: dict, named: str
) -> None:
    path = tmp_path / "p.json"
    path.write_text(
        json.dumps(
            {"model": "m", "draft_method": "snapkv", "law": {"rejection": 0.1}} | change
        )
    )
    with pytest.raises(ConfigError, match=named) as caught:
        acceptance.load_profile(path)
    assert "p.json" in str(caught.value)


def test_shipped_profiles_say_where_they_come_from() -> None:
    for name in acceptance.default_profile_names():
        profile = acceptance.load_profile(
            acceptance.PROFILES_DIRECTORY / f"{name}.json"
        )
        assert all((profile.dataset, profile.definition, profile.source))
        assert profile.name == name
        assert profile.error.log_rejection > 0


def test_what_was_never_measured_has_no_default() -> None:
    assert acceptance.default_profile("llama-3.1-8b", "eagle") is None
    assert acceptance.default_profile("no-such-model", "streamingllm") is None


def test_the_default_rejection_grows_with_the_context_as_published() -> None:
    """MagicDec project page, PG-19, budget 512; rounded to 0.01, so that 1 - alpha is known to 3 %."""
    profile = acceptance.default_profile("llama-3.1-8b", "streamingllm")
    contexts, published = (
        [4000, 8000, 16000, 32000, 64000, 100000],
        [0.84, 0.83, 0.82, 0.81, 0.79, 0.79],
    )
    rejection = (
        1.0 - profile.conditional_rates(budget=512, context=contexts, gamma_max=1)[:, 0]
    )
    ratio = rejection / (1.0 - np.array(published))
    assert np.abs(ratio / ratio.mean() - 1).max() < 0.15


def test_scaling_to_a_rate_meets_it_and_keeps_the_shape() -> None:
    profile = MeasuredProfile(
        model="m",
        draft_method="streamingllm",
        law=Law(rejection=0.2, budget_exponent=0.5, drift=1.0, floor=0.05),
    )
    scaled = profile.at_rate(0.7, budget=512, context=8192)
    assert float(
        scaled.conditional_rates(budget=512, context=8192, gamma_max=1)[0]
    ) == pytest.approx(0.7)
    assert scaled.law.drift == profile.law.drift
    assert scaled.fitted


RATES = (0.9, 0.7, 0.5)


def tokens(rates: tuple[float, ...], gamma: int) -> float:
    """Expected tokens per step by simulation-free enumeration: the last rate holds beyond the list."""
    padded = [*rates, *[rates[-1]] * gamma][:gamma]
    return 1.0 + sum(np.prod(padded[: i + 1]) for i in range(gamma))


def test_rates_by_position_give_the_tokens_per_step_they_mean():
    document = make_plan(
        PlanRequest(batch_sizes=(8,), draft="ngram", acceptance_rate=RATES)
    )
    for row in document.candidates:
        assert row.drafting.tokens_per_step == pytest.approx(
            tokens(RATES, row.gamma), rel=1e-12
        )


def test_given_rates_survive_a_file_and_move_together(tmp_path):
    profile = constant_profile(RATES, draft="ngram", draft_method="ngram")
    save_profile(profile, tmp_path / "given.json")
    law = load_profile(tmp_path / "given.json")
    assert law.conditional_rates(budget=64, context=512, gamma_max=4) == pytest.approx(
        [0.9, 0.7, 0.5, 0.5]
    )
    other = law.at_rate(0.8, budget=64, context=512).conditional_rates(
        budget=64, context=512, gamma_max=3
    )
    power = np.log(0.8) / np.log(0.9)
    assert other == pytest.approx(np.array(RATES) ** power)


@pytest.mark.parametrize(
    "rates", [(), (0.5, 1.2), (-0.1,), (0.5,) * 65, (float("nan"), 0.5)]
)
def test_rates_that_are_none_are_refused(rates):
    with pytest.raises(ConfigError, match="acceptance rate"):
        PlanRequest(acceptance_rate=rates)


@pytest.mark.parametrize(
    ("draft", "method"),
    [
        ("eagle", None),
        ("self", None),
        (None, "snapkv"),
        ("none", None),
        ("tinyllama-1.1b", None),
    ],
)
def test_a_profile_of_another_draft_is_refused_with_both_names(draft, method, tmp_path):
    save_profile(
        constant_profile(0.8, draft="ngram", draft_method="ngram"),
        tmp_path / "ngram.json",
    )
    with pytest.raises(ConfigError) as caught:
        load_profiles([tmp_path / "ngram.json"], draft=draft, method=method)
    assert "draft ngram (ngram)" in str(caught.value)
    assert f"the plan is for {draft or 'self'}" in str(caught.value)


def test_a_profile_of_one_draft_model_is_not_taken_for_another(tmp_path):
    save_profile(
        constant_profile(0.8, draft="llama-3.2-1b", draft_method="full"),
        tmp_path / "small.json",
    )
    (profile,) = load_profiles(
        [tmp_path / "small.json"], draft="llama-3.2-1b", method=None
    )
    document = make_plan(
        PlanRequest(batch_sizes=(8,), draft="llama-3.2-3b", acceptance=(profile,))
    )
    assert all(
        row.drafting.acceptance_source.startswith("assumed")
        for row in document.candidates
    )
    own = make_plan(
        PlanRequest(batch_sizes=(8,), draft="llama-3.2-1b", acceptance=(profile,))
    )
    sources = {
        row.drafting.acceptance_source
        for row in own.candidates
        if row.draft_method == "full"
    }
    assert all(source.startswith("measured (yours)") for source in sources)


def profile_with(spread: float, rate: float = 0.8) -> MeasuredProfile:
    return MeasuredProfile(
        model="m",
        draft_method="streamingllm",
        law=Law(rejection=1 - rate),
        spread=spread,
    )


def simulated_efficiency(
    rate: float,
    spread: float,
    *,
    gamma: int,
    batch_size: int,
    gen_len: int,
    repeats: int,
) -> float:
    rng = np.random.default_rng(11)
    slowest = []
    for _ in range(repeats):
        own = np.full(batch_size, rate)
        if spread:
            total = rate * (1 - rate) / spread**2 - 1
            own = rng.beta(rate * total, (1 - rate) * total, batch_size)
        tokens = 1 + np.cumprod(
            rng.random((batch_size, gen_len, gamma)) < own[:, None, None], axis=2
        ).sum(axis=2)
        slowest.append((np.cumsum(tokens, axis=1) < gen_len).sum(axis=1).max() + 1)
    return gen_len / (sum(rate**i for i in range(gamma + 1)) * float(np.mean(slowest)))


@pytest.mark.parametrize(
    ("spread", "batch_size"), [(0.0, 32), (0.03, 32), (0.05, 64), (0.1, 16)]
)
def test_the_drain_matches_simulated_batches(spread: float, batch_size: int) -> None:
    """Within 3 %: a sequence's steps are only nearly normal; the simulation's own error is below 0.5 %."""
    simulated = simulated_efficiency(
        0.8, spread, gamma=4, batch_size=batch_size, gen_len=128, repeats=200
    )
    predicted = static_batch_efficiency(
        profile_with(spread),
        budget=512,
        context=8192,
        gamma=4,
        batch_size=batch_size,
        gen_len=128,
    )
    assert predicted == pytest.approx(simulated, rel=0.03)


def test_the_drain_grows_with_the_batch_and_the_spread_and_shrinks_with_length() -> (
    None
):
    def at(spread: float, batch_size: int, gen_len: int) -> float:
        return static_batch_efficiency(
            profile_with(spread),
            budget=512,
            context=8192,
            gamma=3,
            batch_size=batch_size,
            gen_len=gen_len,
        )

    assert at(0.0, 8, 128) > at(0.0, 64, 128) > at(0.05, 64, 128) > at(0.1, 64, 128)
    assert at(0.0, 32, 64) < at(0.0, 32, 1024) < at(0.0, 32, 50_000) <= 1.0


def test_nothing_is_lost_where_all_sequences_take_the_same_steps_and_an_empty_batch_is_refused() -> (
    None
):
    at = {"budget": 512, "context": 8192, "gamma": 3}
    for rate in (0.0, 1.0):
        assert static_batch_efficiency(
            profile_with(0.0, rate), **at, batch_size=64, gen_len=400
        ) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="batch size"):
        static_batch_efficiency(profile_with(0.0), **at, batch_size=0, gen_len=4)
