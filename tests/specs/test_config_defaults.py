"""Defaults of missing keys: transformers' own, from the table, and from nowhere else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from magicdec.specs import families
from magicdec.specs.families.keys import DEFAULTS_FILE, IRRELEVANT, Keys, fields_of
from magicdec.specs.hf_config import model_from_hf_config
from tests.specs.architectures import READ_BY_TRANSFORMERS, draw

ROOT = Path(__file__).parents[2]


def test_the_table_is_what_the_installed_transformers_says() -> None:
    """Otherwise: python scripts/config_defaults.py"""
    pytest.importorskip("transformers")
    from scripts import config_defaults

    table = config_defaults.table()
    assert DEFAULTS_FILE.read_text(encoding="utf-8") == config_defaults.written(table)


def test_no_reader_has_a_default_of_its_own() -> None:
    """But None for keys that no class has, and constants of the code of ropes."""
    folder = Path(families.__file__).parent
    found = [
        f"{file.name}:{call.lineno}"
        for file in sorted(folder.glob("*.py"))
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "raw"
        for given in call.keywords
        if file.name not in ("keys.py", "rope.py")
        and not (isinstance(given.value, ast.Constant) and not given.value.value)
    ]
    assert found == []


@pytest.mark.parametrize("model_type", READ_BY_TRANSFORMERS)
def test_every_field_of_a_class_is_read_or_named(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A field that no reader asks for, in any drawn configuration, is one that changes nothing."""
    read: set[str] = set()
    monkeypatch.setattr(Keys, "unread", lambda self: read.update(self._read) or [])
    for seed in range(6):
        model_from_hf_config(draw(model_type, seed), name="a", where="a")
    known = fields_of(model_type)
    left = {
        key
        for key in known.fields
        if key not in read | IRRELEVANT and known.aliases.get(key) not in read
    }
    assert left - {"rope_local_base_freq"} == set()
