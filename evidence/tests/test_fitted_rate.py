"""The rate at position 1 that published speedups imply."""

from __future__ import annotations

import msgspec
import pytest

from evidence.fits.engine_profile import fit_rate
from magicdec.perfmodel.acceptance import default_profile
from magicdec.specs.engine import load_engine
from magicdec.validate.published_speedups import ENGINE, evaluate, read_published
from magicdec.validate.rows import published


def test_speedups_computed_at_a_known_rate_give_that_rate_back() -> None:
    profile = default_profile("llama-3.1-8b", "streamingllm")
    assert profile is not None
    (table,) = published("speedup_8xa100.csv")
    rows = [
        row
        for row in read_published(table)[0]
        if row.draft == "self" and row.context_len == 32000
    ]
    engine = load_engine(ENGINE)
    truth = evaluate(rows, profile.at_rate(0.8, budget=512, context=32000), engine)
    made = [
        msgspec.structs.replace(row, gamma=3, speedup=float(speedup))
        for row, speedup in zip(rows, truth.speedup[:, 2], strict=True)
    ]
    fitted = fit_rate(made, profile, engine)
    (rate,) = fitted.conditional_rates(budget=512, context=32000, gamma_max=1)
    assert rate == pytest.approx(0.8, abs=0.002)
