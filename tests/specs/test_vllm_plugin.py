"""Settings of the plugin for vLLM: those that are read and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from magicdec.errors import ConfigError
from magicdec.reports import exports
from magicdec.schema.gamma_table import TableGamma
from magicdec.specs.engine import load_engine
from magicdec.specs.vllm_plugin import (
    TESTED_VERSIONS,
    VLLM_METHODS,
    DraftSettings,
    check_pages,
    is_tested,
    read_settings,
)


def test_settings_are_read_from_the_engines_configuration() -> None:
    """Nothing given is the default; other plugins' keys do not matter."""
    assert read_settings({"other": {"x": 1}}) == DraftSettings()
    table = {"batch_sizes": [1, 8], "context_lens": [512], "gammas": [[0], [3]]}
    settings = read_settings({"magicdec": {"draft_budget": 1024, "gamma_table": table}})
    assert settings.draft_budget == 1024
    assert settings.gamma_table == TableGamma(
        batch_sizes=(1, 8), context_lens=(512,), gammas=((0,), (3,))
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": 3}, "known keys: draft_method, draft_budget"),
        ({"draft_budget": "many"}, "draft_budget"),
        ({"draft_method": "snapkv"}, "known: streamingllm, topk"),
        ({"refresh": 3}, "streamingllm chooses no pages"),
        ({"refresh": 0, "draft_method": "topk"}, "at least 1 block"),
        (
            {
                "gamma_table": {
                    "batch_sizes": [1],
                    "context_lens": [1],
                    "gammas": [[1, 2]],
                }
            },
            "rows do not fit",
        ),
        (
            {
                "gamma_table": {
                    "batch_sizes": [8, 1],
                    "context_lens": [1],
                    "gammas": [[1], [2]],
                }
            },
            "ascending",
        ),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings({"magicdec": given})


def test_a_budget_must_hold_the_sinks_and_two_pages() -> None:
    check_pages(DraftSettings(draft_budget=96), page_size=32, max_gamma=3)
    with pytest.raises(ConfigError, match="use at least 384"):
        check_pages(DraftSettings(draft_budget=256), page_size=128, max_gamma=3)


def test_a_gamma_beyond_the_engines_is_refused() -> None:
    table = TableGamma(batch_sizes=(1,), context_lens=(1,), gammas=((5,),))
    with pytest.raises(ConfigError, match="set num_speculative_tokens to that, not 3"):
        check_pages(DraftSettings(gamma_table=table), page_size=32, max_gamma=3)


def test_versions_are_tested_by_their_series() -> None:
    assert is_tested("0.32.0")
    assert is_tested("0.32.1+cpu")
    for version in ("0.33.0", "0.3", "0.320.0"):
        assert not is_tested(version)


def test_an_exported_command_is_one_that_the_plugin_takes() -> None:
    assert set(exports.PLUGIN_METHODS) <= set(VLLM_METHODS)
    for method in exports.PLUGIN_METHODS:
        newest = load_engine("vllm").draft("self", method).newest_version
        assert newest in TESTED_VERSIONS
    smallest = DraftSettings(draft_budget=exports.PLUGIN_SMALLEST_BUDGET)
    check_pages(smallest, page_size=exports.PLUGIN_PAGE_SIZE, max_gamma=1)
