"""Published measurements of an atlas's models and devices, next to what is predicted for them."""

from __future__ import annotations

import math
from functools import cache

import msgspec

from magicdec.naming import method_name
from magicdec.validate import PairRow, predict_pairs, published, read_rows


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """The speedup that somebody measured, and the one that a plan of the same load believes."""

    model: str
    device: str
    num_gpus: int
    engine: str
    draft: str
    gamma: int
    users: int
    prompt_len: int
    output_len: int
    unit: str
    measured: float
    predicted: float
    predicted_low: float
    predicted_high: float
    source: str

    @property
    def is_hit(self) -> bool:
        """Whether the measured speedup is in the predicted 90 % interval."""
        return self.predicted_low <= self.measured <= self.predicted_high


@cache
def published_rows() -> tuple[Published, ...]:
    """The shipped pairs of servers with and without speculation. Acceptance is believed, as in a
    plan: what a source measured of it is not used.
    """
    pairs, _ = read_rows(published("speculation_pairs.csv"), PairRow)
    predicted = predict_pairs(pairs, [None] * len(pairs), leaves_out_own=True)
    rows = []
    for pair, speedup, low, high in zip(
        pairs, predicted.speedup, predicted.low, predicted.high, strict=True
    ):
        if not math.isfinite(speedup):
            continue
        rows.append(
            Published(
                model=pair.model,
                device=pair.hardware,
                num_gpus=pair.tp,
                engine=f"{pair.engine} {pair.engine_version}".strip(),
                draft=method_name(pair.setup.speculation.draft_method),
                gamma=pair.gamma,
                users=int(pair.users),
                prompt_len=int(pair.prompt_len),
                output_len=int(pair.output_len),
                unit=pair.unit,
                measured=pair.speedup,
                predicted=float(speedup),
                predicted_low=float(low),
                predicted_high=float(high),
                source=pair.source,
            )
        )
    return tuple(rows)


def published_of(model: str, device: str) -> list[Published]:
    """The published measurements of one model on one device."""
    return [
        row for row in published_rows() if (row.model, row.device) == (model, device)
    ]
