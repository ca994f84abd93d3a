"""Predictions of published installations with data-parallel attention and whole experts (docs/validation.md).

    python -m evidence.published_systems

Nothing is fitted to these rows (evidence/data/systems/README.md says where they are from). Sends to experts are
priced in turn with the rest; the published engines overlap two half batches, whose limit is the rate with all sends
hidden.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass

import numpy as np

from evidence import DATA
from magicdec.perfmodel.intervals import interval
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import predict
from magicdec.perfmodel.step import prefill_terms
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.parallel import Parallelism
from magicdec.specs.precision import Precision

ROWS = DATA / "systems" / "wide_expert_parallel.csv"


@dataclass(frozen=True, kw_only=True)
class System:
    """One row: tokens per second and node, published and predicted."""

    source: str
    phase: str
    num_gpus: int
    published: float
    predicted: float
    low: float
    high: float
    """The 90 % interval; of prefill none is predicted, and this is the prediction."""
    hidden: float
    """With all sends hidden behind other work."""


def systems() -> list[System]:
    with ROWS.open(encoding="utf-8") as file:
        return [_system(row) for row in csv.DictReader(file)]


def _system(row: dict[str, str]) -> System:
    batch, tokens, gpus = (
        float(row["batch_per_gpu"]),
        float(row["tokens"]),
        int(row["num_gpus"]),
    )
    engine, per_node = load_engine(row["engine"]), int(row["gpus_per_node"])
    if row["phase"] == "prefill":
        engine = engine.with_constants(
            {"scheduler.prefill_tokens": int(batch * tokens)}
        )  # one pass
    setup = Setup(
        model=load_model_spec(row["model"]), hardware=load_hardware(row["hardware"]), engine=engine,
        precision=Precision(weight_dtype="fp8_block", kv_dtype="bf16"),
        spread=Parallelism(dp=gpus, whole_experts=True),
    )  # fmt: skip
    if row["phase"] == "prefill":
        time, done = (
            prefill_terms(setup, batch=batch, prompt_len=tokens),
            batch * tokens,
        )
        lowest = highest = 1.0
    else:
        points = Points(
            batch=np.array([batch * gpus]),
            context=np.array([tokens]),
            tp=np.array([1.0]),
        )
        prediction = predict(setup, None, points)
        time, done = prediction.terms.autoregressive, batch
        bounds = interval(prediction)
        lowest, highest = (
            float(prediction.tpot_s[0] / np.ravel(end)[0])
            for end in (bounds.tpot_high_s, bounds.tpot_low_s)
        )
    whole, sends = (
        float(np.ravel(time.total_s)[0]),
        float(np.ravel(time.group_seconds()["link"])[0]),
    )
    rate = per_node * done / whole
    return System(
        source=row["source"], phase=row["phase"], num_gpus=gpus, published=float(row["tokens_per_s_per_node"]),
        predicted=rate, low=rate * lowest, high=rate * highest, hidden=per_node * done / (whole - sends),
    )  # fmt: skip


def main() -> None:
    print(
        "| installation | GPUs | published | predicted (90 %) | error | with sends hidden |\n|---|---|---|---|---|---|"
    )
    for each in systems():
        bounds = (
            f" ({each.low / 1e3:.1f} to {each.high / 1e3:.1f})"
            if each.low < each.high
            else ""
        )
        error = each.predicted / each.published - 1
        print(
            f"| {each.source}, {each.phase} | {each.num_gpus} | {each.published / 1e3:.1f}k | "
            f"{each.predicted / 1e3:.1f}k{bounds} | {error:+.0%} | {each.hidden / 1e3:.1f}k |"
        )


if __name__ == "__main__":
    main()
