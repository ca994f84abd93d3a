"""The comparison's figures, against ones worked out by hand."""

from __future__ import annotations

import msgspec
import pytest

from magicdec.records import Record
from magicdec.validate.compare import Comparison, Thresholds, group_regret, pair_up


def row(source: str, gamma: int, speedup: float, samples: list[float] | None = None, **changes: object) -> Record:
    base = Record(
        source="measured" if source == "measured" else "calibrated",
        model="embedded",
        draft="self",
        draft_method="streamingllm",
        draft_budget=64,
        gamma=gamma,
        batch_size=8,
        context_len=512,
        temperature=1.0,
        speedup=speedup,
        speedup_samples=samples,
        autoregressive_step_s=0.010,
    )
    return msgspec.structs.replace(base, **changes)


def test_pairs_join_on_the_configuration_and_leave_autoregressive_rows_out() -> None:
    predicted = [row("calibrated", 0, 1.0), row("calibrated", 2, 1.5, hardware="cpu"), row("calibrated", 3, 1.2)]
    measured = [row("measured", 0, 1.0), row("measured", 2, 1.2, device="cpu", seed=3), row("measured", 5, 1.0)]
    pairs = pair_up(predicted, measured)
    assert [(p.predicted.gamma, p.measured.gamma) for p in pairs] == [(2, 2)]
    assert pairs[0].error("speedup") == pytest.approx(0.25)
    assert pairs[0].error("draft_step_s") is None


def test_coverage_counts_measured_speedups_inside_the_interval() -> None:
    predicted = [row("calibrated", g, 1.5, speedup_low=1.2, speedup_high=1.6) for g in (1, 2)]
    comparison = Comparison(
        pairs=pair_up(predicted, [row("measured", 1, 1.59), row("measured", 2, 1.61)]), thresholds=Thresholds()
    )
    assert comparison.coverage == 0.5


def test_regret_scores_on_the_repetitions_that_did_not_choose() -> None:
    """gamma 3 looks best on repetitions 0 and 2 (noise), gamma 2 was planned: the other half says what that cost."""
    pairs = pair_up(
        [row("calibrated", 2, 1.5), row("calibrated", 3, 1.4)],
        [row("measured", 2, 1.4, [1.4, 1.4, 1.4, 1.4]), row("measured", 3, 1.4, [1.6, 1.2, 1.6, 1.2])],
    )
    assert group_regret(pairs) == pytest.approx(1 - 1.4 / 1.2)


def test_regret_of_speculating_where_it_does_not_pay() -> None:
    """Autoregressive decoding is among the choices, with a speedup of 1."""
    pairs = pair_up([row("calibrated", 2, 1.5)], [row("measured", 2, 0.8, [0.8, 0.8])])
    assert group_regret(pairs) == pytest.approx(0.2)
    assert group_regret(pair_up([row("calibrated", 2, 0.9)], [row("measured", 2, 0.8, [0.8, 0.8])])) == 0.0


def test_thresholds_fail_with_what_was_found() -> None:
    pairs = pair_up([row("calibrated", 2, 1.5)], [row("measured", 2, 1.2, [1.2, 1.2])])
    assert Comparison(pairs=pairs, thresholds=Thresholds(median_speedup_error=0.3)).passed
    failing = Comparison(pairs=pairs, thresholds=Thresholds(median_speedup_error=0.2, regret=0.5))
    assert failing.failures == ["median speedup error 0.250 exceeds 0.200"]
    assert not Comparison(pairs=[], thresholds=Thresholds()).passed
