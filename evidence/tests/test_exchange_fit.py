"""The constants of sending tokens to experts, against the measured exchanges that they come from."""

from __future__ import annotations

from typing import Any

import pytest

from evidence.fits.exchange import fitted, mean_error, tables, without
from magicdec.perfmodel.kernels.links import ExchangeCurve
from magicdec.perfmodel.kernels.profile import load_hardware

TABLES: dict[str, Any] = tables()


@pytest.mark.parametrize(
    ("device", "rows", "error"),
    [
        ("h100-sxm-80gb", 190, 0.055),
        ("b200-sxm-192gb", 352, 0.15),
        ("gb200-nvl72", 480, 0.1),
    ],
)
def test_the_catalog_meets_the_measured_exchanges(
    device: str, rows: int, error: float
) -> None:
    hw, table = load_hardware(device), TABLES[device]
    assert len(table["latency_us"]) == rows == ExchangeCurve.of(hw).fit.num_rows
    assert mean_error(hw, ExchangeCurve.of(hw), table) < error


@pytest.mark.parametrize("ranks", [16, 32, 64])
def test_a_number_of_ranks_over_infiniband_is_met_by_a_fit_to_the_others(
    ranks: int,
) -> None:
    hw = load_hardware("h100-sxm-80gb")
    kept, left_out = without(TABLES["h100-sxm-80gb"], ranks)
    assert (
        mean_error(hw, fitted(hw, kept), left_out)
        <= ExchangeCurve.of(hw).fit.error + 0.001
    )
