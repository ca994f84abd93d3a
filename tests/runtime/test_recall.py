"""The embedded model shows what selecting by attention is for."""

from __future__ import annotations

import pytest

from benchmarks.recall import forced_text, measure


@pytest.mark.slow
def test_snapkv_beats_streamingllm_on_a_recalled_passage() -> None:
    """At equal budget, on held-out text that repeats a passage from at least 2000 tokens back."""
    _, snapkv, widely_pooled = measure(forced_text(12, 2600, 40, is_repeated=True), 40, [512])
    assert snapkv["gain"] > 0
    assert widely_pooled["gain"] > 2 * widely_pooled["gain_standard_error"]
