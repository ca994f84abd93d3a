"""What a fit of acceptance says where few drafts were counted: the priors, and the most probable rate between them and
the counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.perfmodel.acceptance import fit_profile


def test_where_next_to_nothing_is_counted_the_priors_stand() -> None:
    """A draft of its own rejects a fifth at first, of which a tenth whatever it has seen; errors are the priors'."""
    rows = [
        {"draft_method": "eagle3", "budget": 256, "context": 4096, "position": position, "trials": 1e-9,
         "accepted": 5e-10}
        for position in (1, 2, 3, 4)
    ]  # fmt: skip
    profile = fit_profile(rows, draft="eagle3")
    law = profile.law
    left_out = 1.0 - 256 / 4096
    assert law.rejection * left_out == pytest.approx(0.2, rel=1e-3)
    assert law.budget_exponent == pytest.approx(0.5, abs=1e-3)
    assert law.context_exponent == pytest.approx(0.1, abs=1e-3)
    assert law.fill_exponent == pytest.approx(1.0, abs=1e-3)
    assert law.concentration == pytest.approx(50.0, rel=1e-3)
    assert law.drift == pytest.approx(0.2, rel=1e-3)
    assert law.drift_depth == pytest.approx(2.0, rel=1e-3)
    assert law.floor == pytest.approx(0.1, rel=1e-3)
    assert profile.error.budget_exponent == pytest.approx(0.5, rel=1e-2)
    assert profile.error.context_exponent == pytest.approx(0.2, rel=1e-2)
    assert (law.reference_budget, law.reference_context) == pytest.approx((256, 4096))
    assert profile.spread == 0.0


@given(trials=st.integers(1, 400), share=st.floats(0.0, 1.0))
def test_the_rate_is_the_most_probable_one(trials: int, share: float) -> None:
    """Of a self-draft at one budget: binomial counts, and a logarithm of the rejected share that is normal about
    that of 0.2 with a deviation of 3; by trying a fine grid of them."""
    accepted = round(trials * share)
    row = {
        "draft_method": "snapkv", "budget": 256, "context": 4096, "position": 1, "trials": trials, "accepted": accepted,
    }  # fmt: skip
    log_rejected = np.linspace(np.log(0.2) - 14.0, np.log(1.0 - 1e-9), 200_001)
    rejected = np.exp(log_rejected)
    surprise = 0.5 * ((log_rejected - np.log(0.2)) / 3.0) ** 2
    surprise -= (trials - accepted) * log_rejected + accepted * np.log1p(-rejected)
    expected = 1.0 - rejected[np.argmin(surprise)]
    found = fit_profile([row]).conditional_rates(budget=256, context=4096, gamma_max=1)
    assert float(found[0]) == pytest.approx(expected, abs=2e-3)
