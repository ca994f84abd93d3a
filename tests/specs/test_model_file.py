"""A model of our own schema: the documented example, and one line for what it breaks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from magicdec.errors import ConfigError
from magicdec.specs.catalog import load_model_spec

GUIDE = Path(__file__).parents[2] / "docs" / "extending.md"


def example() -> str:
    found = re.search(
        r"```toml\n(schema = .*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL
    )
    return found[1]


def test_the_documented_example_is_what_it_says(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(example())
    spec = load_model_spec(str(file))
    attention = 2048 * (2 * 16 * 128 + 2 * 4 * 128)
    mlp, experts = 3 * 2048 * 8192, 64 * (3 * 2048 * 1024 + 2048)
    layers = 32 * (attention + 2 * 2048) + 24 * mlp + 8 * experts
    assert spec.num_parameters == layers + 2 * 50304 * 2048 + 2048
    assert spec.kv_elements(4096) == 2 * 4 * 128 * (24 * 1024 + 8 * 4096)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("magicdec.model/1", "magicdec.model/9", "schema"),
        ('"global"]', '"globe"]', "globe"),
        ("span = 1024", "spam = 1024", "spam"),
        ("repeat = 8", "repeat = 0", "repeats"),
        ('kind = "mlp"', 'kind = "mlq"', "mlq"),
    ],
)
def test_what_breaks_the_schema_is_named(
    old: str, new: str, named: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(example().replace(old, new))
    with pytest.raises(ConfigError, match=named):
        load_model_spec(str(file))
