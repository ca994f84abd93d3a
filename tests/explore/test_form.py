"""A link holds a plan's options, and bad links are one-line errors that read no file."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.errors import ConfigError, MagicdecError
from magicdec.explore.form import FIELDS, FIRST, texts_of, values_of
from magicdec.perfmodel.planner import request_of
from magicdec.schema.request import request_options
from magicdec.specs.catalog import EMBEDDED_DIRECTORY
from magicdec.units import MILLI


@given(st.text(max_size=60) | st.sampled_from([*FIELDS]).map(lambda name: f"{name}=1"))
def test_any_query_is_a_question_or_an_error_of_the_users(query: str) -> None:
    with contextlib.suppress(MagicdecError):
        values_of(texts_of(query, {}), {})


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("model=llama-3.1-8x", "did you mean llama-3.1-8b?"),
        ("hardware=h10", "did you mean "),
        ("engine=vlm", "did you mean vllm?"),
        ("bacth=3", "did you mean batch?"),
        ("acceptance_rate=high", "must be a number"),
        ("plugin=maybe", "plugin is yes or left out"),
        ("model=/etc/passwd", "unknown model"),
        ("draft=./draft/config.json", "unknown draft"),
        ("hardware=h100,/etc/passwd", "unknown hardware"),
        ("model=nobody/knows-it", "magicdec explore --model nobody/knows-it does"),
        (f"task={'chat,' * 100}", "has more than 200 characters"),
        ("workload=lengths.json", "unknown option"),
    ],
)
def test_a_bad_link_says_what_is_wrong(query: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        values_of(texts_of(query, {}), {})
    assert message in str(raised.value)


def test_values_are_read_as_the_command_line_reads_them() -> None:
    query = (
        "hardware=a100,2xh100=3&context=32k,8k&gpus=8&temperature=0.5&tpot_ms=30"
        "&draft_budget=512,7%25&acceptance_rate=0.8,0.7&batch="
    )
    request = request_of(**values_of(texts_of(query, {}), {}))
    assert request.hardware == ("a100", "2xh100=3")
    assert request.context_lens == (32_768, 8192)
    assert request.num_gpus == 8
    assert request.temperature == 0.5
    assert request.tpot_limit_s == pytest.approx(30 * MILLI)
    assert request.draft_budgets == (512, "7%")
    assert request.acceptance_rate == (0.8, 0.7)
    assert request.batch_sizes == ()


def test_a_file_is_read_only_where_the_page_was_started_with_it() -> None:
    directory = str(EMBEDDED_DIRECTORY)
    start = {"model": directory}
    assert values_of(texts_of("batch=4", start), start)["model"] == directory
    with pytest.raises(ConfigError, match="unknown model"):
        values_of(texts_of(f"model={directory}", {}), {})


def test_a_field_that_is_emptied_takes_away_what_the_page_was_started_with() -> None:
    assert texts_of("engine=&batch=4", {"engine": "vllm"}) == {"batch": "4"}


def test_what_stands_unfolded_are_options() -> None:
    assert set(FIRST) <= set(FIELDS) <= set(request_options())
