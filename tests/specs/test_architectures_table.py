"""The table of architectures, as it is printed and as it stands in docs/, is what specs and tests say."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from magicdec.specs.catalog import ARCHITECTURES_FILE, architecture_facts, model_shapes
from magicdec.specs.families import ARCHITECTURES
from scripts import architectures_table

KNOWN = json.loads(ARCHITECTURES_FILE.read_text(encoding="utf-8"))


def test_the_file_and_the_page_are_up_to_date() -> None:
    """Otherwise: python scripts/architectures_table.py"""
    pytest.importorskip("transformers")
    assert architectures_table.facts(KNOWN) == KNOWN
    page = architectures_table.PAGE.read_text(encoding="utf-8")
    assert page == architectures_table.page(KNOWN)


def test_every_model_of_the_catalog_has_the_parameters_that_transformers_counts() -> (
    None
):
    ours = {
        name: count
        for row in architecture_facts()
        for name, count in row.models.items()
    }
    assert set(ours) == set(model_shapes())
    assert KNOWN["counted"] == ours


@pytest.mark.slow
def test_transformers_counts_what_the_file_says() -> None:
    pytest.importorskip("transformers")
    assert {
        name: architectures_table.counted(name) for name in KNOWN["counted"]
    } == KNOWN["counted"]


def test_the_command_lists_every_architecture() -> None:
    register_commands()
    printed = CliRunner().invoke(app, ["models", "--architectures"]).stdout
    assert max(map(len, printed.splitlines())) <= 80
    rows = json.loads(
        CliRunner()
        .invoke(app, ["models", "--architectures", "--format", "json"])
        .stdout
    )
    assert {row["architecture"] for row in rows} == set(ARCHITECTURES)
    assert all(name in printed for name in ARCHITECTURES)
    assert all(
        bool(row["parity_configurations"]) == (row["why_not_run"] is None)
        for row in rows
    )
