"""Lists of numbers as options take them."""

from __future__ import annotations

import pytest

from magicdec.commands.options import parse_ints
from magicdec.errors import ConfigError


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
