"""The comparison's figures, against ones worked out by hand."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from rich.console import Console

from magicdec.errors import ConfigError
from magicdec.measure.environment import ReferenceTimes, spread_of_times
from magicdec.reports.terminal import print_comparison
from magicdec.schema.comparison import (
    CASE_FIELDS,
    DRAFT_FIELDS,
    MAY_DIFFER,
    PAIRING_FIELDS,
    Comparison,
    Pair,
    bootstrap_interval,
    by_cpu_time,
    is_paired,
    latest_predicted,
    pair_records,
    pairing_key,
    summarise,
    summarise_case,
)
from magicdec.schema.record import CONFIGURATION_FIELDS, Record
from magicdec.validate.grid import Thresholds


def row(
    source: str,
    gamma: int,
    speedup: float,
    samples: list[float] | None = None,
    **changes: object,
) -> Record:
    base = Record(
        source="measured" if source == "measured" else "calibrated", model="embedded", draft="self",
        draft_method="streamingllm", draft_budget=64, gamma=gamma, batch_size=8, context_len=512, temperature=1.0,
        speedup=speedup, speedup_samples=samples, autoregressive_step_s=0.010,
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def test_pairs_join_on_the_configuration_and_leave_autoregressive_rows_out() -> None:
    predicted = [
        row("calibrated", 0, 1.0),
        row("calibrated", 2, 1.5, hardware="cpu"),
        row("calibrated", 3, 1.2),
    ]
    measured = [
        row("measured", 0, 1.0),
        row("measured", 2, 1.2, device="cpu", seed=3),
        row("measured", 5, 1.0),
    ]
    pairs = pair_records([*predicted, *measured])
    assert [(p.predicted.gamma, p.measured.gamma) for p in pairs] == [(2, 2)]
    assert pairs[0].error("speedup") == pytest.approx(0.25)
    assert pairs[0].error("draft_step_s") is None


def test_records_pair_whatever_their_hardware_device_and_seed() -> None:
    measured = row("measured", 3, 1.4)
    other = msgspec.structs.replace(
        measured, source="calibrated", hardware="h", device="cuda:3", seed=7, dtype="x"
    )
    assert pairing_key(measured) == pairing_key(other)
    for change in (
        {"gamma": 4}, {"draft_budget": 128}, {"batch_size": 9}, {"context_len": 1}, {"temperature": 0.5},
        {"adaptive": True}, {"draft_weight_dtype": "int8"}, {"draft_tp_size": 2}, {"simulated_acceptance": [0.8]},
    ):  # fmt: skip
        assert pairing_key(measured) != pairing_key(
            msgspec.structs.replace(measured, **change)
        ), change


def test_cpu_times_take_the_place_of_the_wall_clocks() -> None:
    """The whole comparison is then of process CPU time; predictions, which have one time, stay."""
    times = {
        "autoregressive_step_cpu_s": 0.02,
        "step_cpu_s": 0.05,
        "speedup_cpu": 1.25,
        "step_s": 0.4,
    }
    times |= {
        "breakdown_cpu_s": {"draft": 0.03, "verify": 0.012, "sample": 0.001},
        "speedup_cpu_samples": [1.2, 1.3],
    }
    measured = row("measured", 3, 2.0, [1.0, 3.0], **times)
    predicted = row(
        "calibrated", 3, 1.0, step_s=0.06, draft_step_s=0.011, verify_step_s=0.012
    )
    (pair,) = pair_records(map(by_cpu_time, [predicted, measured]))
    assert pair.error("speedup") == pytest.approx(1.0 / 1.25 - 1.0)
    assert pair.error("step_s") == pytest.approx(0.2)
    assert pair.error("draft_step_s") == pytest.approx(0.1)
    assert pair.error("autoregressive_step_s") == pytest.approx(-0.5)
    assert pair.repeat_noise("speedup") == pytest.approx(abs(1.2 / 1.3 - 1.0) / 2.0)
    with pytest.raises(ConfigError, match="no process CPU times"):
        by_cpu_time(row("measured", 3, 2.0))


def test_every_field_of_the_configuration_is_paired_on_or_named_as_free_to_differ() -> (
    None
):
    assert set(CONFIGURATION_FIELDS) >= MAY_DIFFER
    assert set(PAIRING_FIELDS) | MAY_DIFFER == set(CONFIGURATION_FIELDS)
    assert set(CASE_FIELDS) | DRAFT_FIELDS <= set(PAIRING_FIELDS)


def test_a_draft_on_all_ranks_and_an_autoregressive_record_have_one_key_however_written() -> (
    None
):
    on_all = row("measured", 3, 1.4, tp_size=4)
    assert pairing_key(on_all) == pairing_key(
        msgspec.structs.replace(on_all, draft_tp_size=4)
    )
    alone = row("measured", 0, 1.0)
    assert pairing_key(alone) == pairing_key(
        msgspec.structs.replace(alone, draft="none", draft_method="none")
    )


def test_simulated_acceptances_pair_with_their_own_prediction_or_else_with_an_unstated_one() -> (
    None
):
    """One configuration measured at two simulated acceptances and one predicted for one of them and for none."""
    predicted = [
        row("calibrated", 2, 1.5),
        row("calibrated", 2, 1.8, simulated_acceptance=[0.9]),
    ]
    measured = [
        row("measured", 2, 1.7, simulated_acceptance=[rate]) for rate in (0.9, 0.7)
    ]
    pairs = pair_records([*predicted, *measured])
    assert [pair.predicted.speedup for pair in pairs] == [1.8, 1.5]
    assert is_paired(predicted[0], measured[0])
    assert not is_paired(predicted[1], measured[1])


def test_a_calibrated_prediction_replaces_an_analytical_one_in_any_order() -> None:
    calibrated = row("calibrated", 2, 1.5)
    datasheet = msgspec.structs.replace(calibrated, source="analytical", speedup=9.0)
    for records in ([calibrated, datasheet], [datasheet, calibrated]):
        (found,) = latest_predicted(records).values()
        assert found.speedup == 1.5


def test_predictions_for_several_devices_stand_side_by_side_and_a_measurement_takes_its_own() -> (
    None
):
    """A plan over two devices has one candidate of a setting on each."""
    plans = [
        row("calibrated", 2, speedup, hardware=name)
        for name, speedup in (("a", 1.5), ("b", 1.8))
    ]
    for records in (plans, plans[::-1]):
        assert sorted(each.hardware for each in latest_predicted(records).values()) == [
            "a",
            "b",
        ]
        for name, speedup in (("a", 1.5), ("b", 1.8)):
            (pair,) = pair_records([*records, row("measured", 2, 1.6, hardware=name)])
            assert pair.predicted.speedup == speedup


def test_coverage_counts_measured_speedups_inside_the_interval() -> None:
    predicted = [
        row("calibrated", g, 1.5, speedup_low=1.2, speedup_high=1.6) for g in (1, 2)
    ]
    comparison = Comparison(
        pairs=pair_records(
            [*predicted, row("measured", 1, 1.59), row("measured", 2, 1.61)]
        )
    )
    assert comparison.coverage == 0.5


def regret(pairs: list[Pair]) -> float:
    found = summarise_case(pairs).regret
    assert found is not None
    return found


def test_regret_scores_on_the_repetitions_that_did_not_choose() -> None:
    """gamma 3 looks best on repetitions 0 and 2 (noise), gamma 2 was planned: the other half says what that cost."""
    predicted = [row("calibrated", 2, 1.5), row("calibrated", 3, 1.4)]
    measured = [
        row("measured", 2, 1.4, [1.4, 1.4, 1.4, 1.4]),
        row("measured", 3, 1.4, [1.6, 1.2, 1.6, 1.2]),
    ]
    pairs = pair_records([*predicted, *measured])
    first_picks, second_picks = 1 - 1.4 / 1.2, 0.0
    assert regret(pairs) == pytest.approx((first_picks + second_picks) / 2)


def test_noise_alone_gives_no_regret() -> None:
    """Ten equal configurations, the planned one among them: the mean loss over 300 draws is 0 within four standard
    errors (false alarm 6e-5), though the luckiest of the ten looks several per cent better."""
    rng = np.random.default_rng(5)
    losses, apparent = [], []
    for _ in range(300):
        samples = 1.5 * np.exp(rng.normal(0.0, 0.05, (10, 4)))
        measured = [row("measured", g, 1.5, list(samples[g - 1])) for g in range(1, 11)]
        pairs = pair_records(
            [
                *(row("calibrated", g, 1.5 + 0.1 * (g == 4)) for g in range(1, 11)),
                *measured,
            ]
        )
        losses.append(regret(pairs))
        medians = np.median(samples, axis=1)
        apparent.append(1 - medians[3] / medians.max())
    assert abs(np.mean(losses)) < 4 * np.std(losses) / np.sqrt(len(losses))
    assert np.mean(apparent) > 0.02


def test_regret_of_speculating_where_it_does_not_pay() -> None:
    """Autoregressive decoding is among the choices, with a speedup of 1."""
    pairs = pair_records(
        [row("calibrated", 2, 1.5), row("measured", 2, 0.8, [0.8, 0.8])]
    )
    assert regret(pairs) == pytest.approx(0.2)
    assert (
        regret(
            pair_records(
                [row("calibrated", 2, 0.9), row("measured", 2, 0.8, [0.8, 0.8])]
            )
        )
        == 0.0
    )


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ((0.10, 0.12, 0.11), "11.0% ± 0.6% is lost by following the prediction"),
        ((0.0, 0.0), "following the prediction loses nothing"),
        ((0.3, 0.0, 0.02), "following the prediction loses nothing"),
        ((0.2,), "20.0% is lost by following the prediction"),
    ],
)
def test_a_loss_within_the_noise_of_its_cases_is_said_to_be_none(
    losses: tuple[float, ...], told: str
) -> None:
    """Planned gamma 2, best gamma 3, in cases of their own; the standard error is over these."""
    records = []
    for number, loss in enumerate(losses):
        case = {"batch_size": number + 1}
        planned = 1.5 * (1.0 - loss)
        records += [
            row("calibrated", 2, 1.9, **case),
            row("calibrated", 3, 1.5, **case),
            row("measured", 2, planned, [planned] * 4, **case),
            row("measured", 3, 1.5, [1.5] * 4, **case),
        ]
    comparison = Comparison(pairs=pair_records(records))
    console = Console(record=True, width=200)
    print_comparison(comparison, console)
    assert told in console.export_text()


@pytest.mark.parametrize("slower", [1.0, 1.2])
def test_normalised_errors_leave_the_drift_of_the_machine_out(slower: float) -> None:
    """Memory is 1.5 times slower than at calibration, and arithmetic `slower` times; 0.8 of the autoregressive and 0.5
    of the speculative step follow the one, the rest the other. A model that is right at calibration then misses by
    that, and by nothing more."""
    shares = {"autoregressive_step_s": 0.8, "step_s": 0.5}
    times = {"autoregressive_step_s": 0.010, "step_s": 0.020}
    alone, step = 0.8 * 1.5 + 0.2 * slower, 0.5 * 1.5 + 0.5 * slower
    predicted = row(
        "calibrated",
        2,
        1.2,
        memory_shares=shares,
        reference_s=0.006,
        compute_reference_s=0.01,
        **times,
    )
    measured = row(
        "measured", 2, 1.2 * alone / step, reference_s=0.009, compute_reference_s=0.01 * slower,
        autoregressive_step_s=0.010 * alone, step_s=0.020 * step,
    )  # fmt: skip
    (pair,) = pair_records([predicted, measured])
    assert pair.error("autoregressive_step_s") == pytest.approx(1 / alone - 1)
    for term in ("autoregressive_step_s", "step_s", "speedup"):
        assert pair.normalised_error(term) == pytest.approx(0.0), term
    assert pair.normalised_error("draft_step_s") is None
    assert pair.normalised_error("expected_tokens_per_step") is None


def test_the_noise_floor_is_the_error_of_a_perfect_prediction() -> None:
    """400 points whose every repetition has 10 % noise, predicted exactly: the floor is the median error found, within
    a fifth (the medians of 400 have standard errors of about 5 %)."""
    rng = np.random.default_rng(11)
    predicted, measured = [], []
    for budget in range(1, 401):
        samples = list(1.5 * np.exp(rng.normal(0.0, 0.1, 8)))
        predicted.append(row("calibrated", 2, 1.5, draft_budget=budget))
        measured.append(
            row("measured", 2, float(np.median(samples)), samples, draft_budget=budget)
        )
    summary = summarise("speedup", pair_records([*predicted, *measured]))
    assert summary.noise_floor == pytest.approx(summary.median_error, rel=0.2)


def test_the_bootstrap_holds_the_median_about_as_often_as_it_says() -> None:
    """Of 300 samples of 15, a 90 % interval holding the true median in fewer than 240 would be an accident of 1e-7."""
    rng = np.random.default_rng(2)
    intervals = [
        bootstrap_interval(np.exp(rng.normal(0.0, 0.1, 15))) for _ in range(300)
    ]
    assert sum(low <= 1.0 <= high for low, high in intervals) >= 240
    assert bootstrap_interval([1.2, 1.2]) == (1.2, 1.2)


def test_thresholds_fail_with_what_was_found() -> None:
    pairs = pair_records(
        [row("calibrated", 2, 1.5), row("measured", 2, 1.2, [1.2, 1.2])]
    )
    assert not Thresholds(median_speedup_error=0.3).failures(Comparison(pairs=pairs))
    failing = Thresholds(median_speedup_error=0.2, regret=0.5)
    assert failing.failures(Comparison(pairs=pairs)) == [
        "median speedup error 0.250 exceeds 0.200"
    ]
    assert Thresholds().failures(Comparison(pairs=[]))


@pytest.mark.parametrize(
    ("measured", "failure"),
    [
        (1.1, []),
        (1.3, ["coverage 0.500 is below 0.800"]),
        (1.0, ["coverage 1.000 exceeds 0.900"]),
    ],
)
def test_intervals_that_hold_too_few_or_too_many_points_fail(
    measured: float, failure: list[str]
) -> None:
    predicted = [
        row("calibrated", g, 1.0, speedup_low=0.9, speedup_high=1.2)
        for g in range(1, 7)
    ]
    rows = [row("measured", g, 1.0 if g % 2 else measured) for g in range(1, 7)]
    limits = (0.8, 0.9) if failure and "exceeds" in failure[0] else (0.8, 1.0)
    assert (
        Thresholds(coverage=limits).failures(
            Comparison(pairs=pair_records([*predicted, *rows]))
        )
        == failure
    )


def test_a_threshold_that_cannot_be_checked_does_not_pass() -> None:
    pairs = pair_records([row("calibrated", 2, 1.5), row("measured", 2, 1.5)])
    failing = Thresholds(median_draft_step_error=0.1, regret=0.1).failures(
        Comparison(pairs=pairs)
    )
    assert failing == [
        "median draft step error could not be computed",
        "regret could not be computed",
    ]


def test_the_spread_of_reference_times_is_that_of_their_logarithms() -> None:
    """400 times with standard deviations of 0.2 and 0.05: found within a fifth (their standard error is 3.5 %)."""
    rng = np.random.default_rng(3)
    memory, compute = (
        0.008 * np.exp(rng.normal(0.0, sigma, 400)) for sigma in (0.2, 0.05)
    )
    spread = spread_of_times(
        ReferenceTimes(m, c) for m, c in zip(memory, compute, strict=True)
    )
    assert spread.memory_s == pytest.approx(0.2, rel=0.2)
    assert spread.compute_s == pytest.approx(0.05, rel=0.2)
    assert spread_of_times([ReferenceTimes(0.008, 0.01)]) == (0.0, 0.0)
