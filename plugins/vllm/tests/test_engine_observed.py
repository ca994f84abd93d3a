"""What `observe` reads from a real engine's metrics is what its output implies, exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import ENVIRONMENT

from magicdec.live.metrics import choose_target, parse
from magicdec.live.observation import Observation, observe, parse_draft
from magicdec.live.profile import acceptance_profile, rates

NGRAM = parse_draft("ngram")


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("observed") / "observed.json"
    script = Path(__file__).with_name("observed.py")
    environment = {**os.environ, **ENVIRONMENT}
    subprocess.run(
        [sys.executable, str(script), str(output)],
        check=True,
        env=environment,
        timeout=600,
    )
    return dict(json.loads(output.read_text()))


@pytest.fixture(scope="module")
def seen(document: dict[str, Any]) -> Observation:
    before, after = (parse(document[name], where=name) for name in ("before", "after"))
    return observe([before, after], choose_target(after, None))


@pytest.fixture(scope="module")
def accepted(document: dict[str, Any]) -> np.ndarray:
    """Drafts accepted in every step after a request's first token."""
    return np.array(
        [tokens - 1 for steps in document["emitted"].values() for tokens in steps[1:]]
    )


def test_acceptance_is_that_of_the_emitted_tokens(
    seen: Observation, accepted: np.ndarray
) -> None:
    found = rates(seen, NGRAM)
    assert found is not None
    assert accepted.size > 150
    assert accepted.max() == 3
    for position in (1, 2, 3):
        tried = int((accepted >= position - 1).sum())
        assert found.trials[position - 1] == tried
        assert found.rates[position - 1] == (accepted >= position).sum() / tried


def test_tokens_per_step_are_those_emitted(
    seen: Observation, accepted: np.ndarray
) -> None:
    assert seen.counts.steps == accepted.size
    assert seen.counts.tokens_per_step == pytest.approx(1 + accepted.mean(), abs=1e-12)
    assert 0.0 < (seen.drafted_share or 0.0) < 1.0


def test_the_batch_is_that_of_the_steps(
    seen: Observation, document: dict[str, Any]
) -> None:
    outputs = sum(len(steps) for steps in document["emitted"].values())
    assert seen.counts.iterations is not None
    assert seen.batch_size == pytest.approx(outputs / seen.counts.iterations)
    assert 4 < (seen.batch_size or 0.0) <= 6


def test_the_profile_gives_the_tokens_per_step_that_were_emitted(
    seen: Observation, accepted: np.ndarray
) -> None:
    profile = acceptance_profile(seen, NGRAM, model="embedded", context=320)
    law = profile.conditional_rates(budget=320, context=320, gamma_max=3)
    assert 1 + np.cumprod(law).sum() == pytest.approx(1 + accepted.mean(), rel=0.02)
