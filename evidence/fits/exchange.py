"""Fits the constants of sending tokens to experts to measured exchanges, and prints them for the hardware profiles.

    python -m evidence.fits.exchange

evidence/data/systems/exchange.csv.gz: all rows of DeepEP's low-latency kernels (SGLang 0.5.6 on one to eight nodes of
H100, SGLang 0.5.12 on one of B200), and of TensorRT-LLM's two-sided kernels on 8 to 64 GB200, in aiconfigurator-core
0.12.0 (Apache-2.0). Where one node was measured only, the network's two constants are Hopper's.
"""

from __future__ import annotations

import csv
import gzip
import math

import msgspec
import numpy as np

from evidence import DATA
from magicdec.counts import Array
from magicdec.fitting import Free, solve
from magicdec.perfmodel.kernels.links import Exchange, ExchangeCurve, exchange_time
from magicdec.perfmodel.kernels.profile import HardwareProfile, load_hardware

ROWS = DATA / "systems" / "exchange.csv.gz"
NEAR = ("overhead_s", "link_efficiency")
FAR = (*NEAR, "network_overhead_s", "network_efficiency")
START = {
    name: Free(
        scale="linear",
        prior=value,
        spread=math.inf,
        limits=(0.01 * value, 6.0 * value),
        unit=value,
    )
    for name, value in zip(FAR, (1.5e-5, 0.6, 1e-5, 0.9), strict=True)
}
Table = dict[str, Array]


def tables() -> dict[str, Table]:
    """Columns by device."""
    with gzip.open(ROWS, "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    numbers = [name for name in rows[0] if name not in ("device", "framework")]
    return {
        device: {
            name: np.array(
                [float(row[name]) for row in rows if row["device"] == device]
            )
            for name in numbers
        }
        for device in sorted({row["device"] for row in rows})
    }


def log_errors(hw: HardwareProfile, curve: ExchangeCurve, table: Table) -> Array:
    """ln(predicted / measured) of each row."""
    hw = msgspec.structs.replace(hw, exchange=curve)
    predicted = [
        exchange_time(hw, Exchange(tokens, int(chosen), ranks), hidden * element)
        for tokens, hidden, element, chosen, ranks in zip(
            table["num_tokens"], table["hidden_size"], table["element_bytes"], table["experts_per_token"],
            table["num_ranks"], strict=True,
        )
    ]  # fmt: skip
    errors: Array = np.log(
        np.array(predicted, dtype=np.float64) * 1e6 / table["latency_us"]
    )
    return errors


def mean_error(hw: HardwareProfile, curve: ExchangeCurve, table: Table) -> float:
    return float(np.mean(np.abs(np.expm1(log_errors(hw, curve, table)))))


def fitted(hw: HardwareProfile, table: Table) -> ExchangeCurve:
    """Least soft-L1 loss of the logarithms, as for the kernels' curves."""
    free = {
        name: START[name]
        for name in (FAR if table["num_ranks"].max() > hw.link.reach else NEAR)
    }
    own = ExchangeCurve.of(hw)
    found = solve(
        free,
        lambda values: log_errors(hw, msgspec.structs.replace(own, **values), table),
        loss="soft_l1",
        f_scale=0.1,
    )
    return msgspec.structs.replace(own, **found.values)


def without(table: Table, ranks: float) -> tuple[Table, Table]:
    """The rows of other numbers of ranks, and those of this one."""
    left_out = table["num_ranks"] == ranks
    return {k: v[~left_out] for k, v in table.items()}, {
        k: v[left_out] for k, v in table.items()
    }


def main() -> None:
    for device, table in tables().items():
        hw = load_hardware(device)
        curve = fitted(hw, table)
        constants = ", ".join(f"{name} = {getattr(curve, name):.4e}" for name in FAR)
        print(
            f"{device}: {len(table['latency_us'])} rows, error {mean_error(hw, curve, table):.1%}; {constants}"
        )
        several = sorted(set(table["num_ranks"].tolist()))
        for ranks in several if len(several) > 1 else []:
            kept, left_out = without(table, ranks)
            print(
                f"  {ranks:.0f} ranks left out: {mean_error(hw, fitted(hw, kept), left_out):.1%}"
            )


if __name__ == "__main__":
    main()
