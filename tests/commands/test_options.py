"""Lists of numbers as options take them."""

from __future__ import annotations

import json

import pytest

from magicdec.commands.options import as_dtype, as_formats, parse_ints
from magicdec.errors import ConfigError
from tests.processes import Program


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("4", [4]),
        ("1,2,4-6", [1, 2, 4, 5, 6]),
        ("512,32k,1m", [512, 32_768, 1_048_576]),
        ("1k-1026", [1024, 1025, 1026]),
    ],
)
def test_numbers_ranges_and_binary_suffixes(text: str, values: list[int]) -> None:
    assert parse_ints(text, "--context") == values


@pytest.mark.parametrize("text", ["", "x", "k", "1.5k", "1-3000000000", "6-4", "1-2-3"])
def test_what_is_no_list_of_numbers_or_a_far_too_long_one_is_refused_by_the_options_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--gamma"):
        parse_ints(text, "--gamma")


def test_a_number_format_goes_by_torchs_name_and_by_the_profiles(program: Program) -> None:
    formats = {"--weight-dtype": "bfloat16", "--kv-dtype": "float16", "--draft-weight-dtype": "bf16"}
    words = [word for pair in formats.items() for word in pair]
    planned = json.loads(program("plan", *words, "--format", "json").stdout)["precision"]
    assert [planned[name] for name in ("weight_dtype", "kv_dtype", "draft_weight_dtype")] == ["bf16", "fp16", "bf16"]
    assert (as_dtype("fp32"), as_dtype("bfloat16"), as_formats("fp8, bfloat16")) == ("float32", "bfloat16", "fp8,bf16")
