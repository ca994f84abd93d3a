"""Which comparisons pass."""

from __future__ import annotations

import msgspec
import pytest

from magicdec.comparison import Comparison, pair_records
from magicdec.records import Record
from magicdec.validate.thresholds import Thresholds


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


def test_thresholds_fail_with_what_was_found() -> None:
    pairs = pair_records([row("calibrated", 2, 1.5), row("measured", 2, 1.2, [1.2, 1.2])])
    assert not Thresholds(median_speedup_error=0.3).failures(Comparison(pairs=pairs))
    failing = Thresholds(median_speedup_error=0.2, regret=0.5)
    assert failing.failures(Comparison(pairs=pairs)) == ["median speedup error 0.250 exceeds 0.200"]
    assert Thresholds().failures(Comparison(pairs=[]))


@pytest.mark.parametrize(
    ("measured", "failure"),
    [(1.1, []), (1.3, ["coverage 0.500 is below 0.800"]), (1.0, ["coverage 1.000 exceeds 0.900"])],
)
def test_intervals_that_hold_too_few_or_too_many_points_fail(measured: float, failure: list[str]) -> None:
    predicted = [row("calibrated", g, 1.0, speedup_low=0.9, speedup_high=1.2) for g in range(1, 7)]
    rows = [row("measured", g, 1.0 if g % 2 else measured) for g in range(1, 7)]
    limits = (0.8, 0.9) if failure and "exceeds" in failure[0] else (0.8, 1.0)
    assert Thresholds(coverage=limits).failures(Comparison(pairs=pair_records([*predicted, *rows]))) == failure


def test_a_threshold_that_cannot_be_checked_does_not_pass() -> None:
    pairs = pair_records([row("calibrated", 2, 1.5), row("measured", 2, 1.5)])
    failing = Thresholds(median_draft_step_error=0.1, regret=0.1).failures(Comparison(pairs=pairs))
    assert failing == ["median draft step error could not be computed", "regret could not be computed"]
