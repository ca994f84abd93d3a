"""Steps of vLLM counted by its log: the drafted tokens of ten seconds over those of a step."""

import csv
from pathlib import Path

import numpy as np

from magicdec.counts import Z_90
from magicdec.perfmodel.intervals import step_errors
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.step import step_terms
from magicdec.specs.engine import load_engine
from magicdec.specs.speculation import SpeculationSpec

STEPS = Path(__file__).resolve().parents[1] / "data/pairs/steps.csv"
CONTEXT = 600.0
"""Tokens of the cache in the middle of the benchmark's answers."""


def test_counted_steps_lie_in_their_intervals() -> None:
    """No constant was fitted to any of them. Hosts are not named, and a step outside whole graphs goes with
    the host: from a Ryzen 9 of 2025 to a Thunderbolt box."""
    errors = []
    for row in csv.DictReader(STEPS.read_text().splitlines()):
        gamma = int(row["gamma"])
        tp = int(row["tp"])
        setup = Setup.of(
            row["model"],
            row["device"],
            load_engine("vllm").of_version(row["version"]),
            SpeculationSpec(draft=row["draft"], draft_method=row["draft"], gamma=gamma),
            weight_dtype=row["weights"],
            kv_dtype=row["cache"],
        )
        terms = step_terms(
            setup,
            batch=1,
            kv_len=CONTEXT,
            draft_kv_len=CONTEXT,
            gamma=gamma,
            tp_size=tp,
        )
        measured_s = gamma / float(row["drafted_tok_s"])
        error = float(np.log(terms.step_s / measured_s))
        width, _ = step_errors(setup, terms, tp)
        assert abs(error) < Z_90 * float(width), row["source"]
        errors.append(error)
    assert np.median(np.abs(errors)) < 0.18
    assert abs(np.median(errors)) < 0.1
