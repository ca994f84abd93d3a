"""The atlas: its questions, its cells against single plans, and its page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

import magicdec
from evidence.atlas import (
    Atlas,
    AtlasCell,
    AtlasQuestion,
    cell_of,
    cells_of,
    published_of,
    read_atlas,
)
from evidence.atlas_page import markdown_cell, render_html, render_markdown, sections_of
from magicdec.cli import app, register_commands
from magicdec.errors import ConfigError

SMALL = """
title = "A small atlas"
engine = "vllm"
[prices]
source = "https://example.org/prices"
read_on = 2026-01-02
[[loads]]
name = "short"
title = "Short"
options = { context = 1024, gen_len = 200, batch = 4, gpus = 1, draft = "eagle3" }
[[loads]]
name = "long"
title = "Long"
options = { context = 16384, gen_len = 200, batch = 8, gpus = 1, draft = "eagle3" }
[[devices]]
name = "h100-sxm-80gb"
price = 2.0
[[devices]]
name = "rtx-4090-24gb"
price = 0.5
[[models]]
name = "llama-3.1-8b"
[[models]]
name = "llama-3.1-70b"
"""


DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> Atlas:
    path = tmp_path_factory.mktemp("atlas") / "small.toml"
    path.write_text(SMALL)
    return read_atlas(path)


@pytest.fixture(scope="module")
def cells(atlas: Atlas) -> list[AtlasCell]:
    """The small atlas answered, once for the tests that only read it."""
    return list(cells_of(atlas))


def test_the_shipped_questions_are_a_full_grid() -> None:
    atlas = read_atlas()
    questions = list(atlas.questions())
    assert len(questions) == len(atlas.models) * len(atlas.devices) * len(atlas.loads)
    assert len({question.anchor for question in questions}) == len(questions)


def test_a_cell_is_the_plan_that_its_command_asks_for(atlas: Atlas) -> None:
    """The command of a cell, run by itself, gives the cell's draft, gamma and dollars."""
    question = next(atlas.questions())
    cell = cell_of(question)
    assert cell.answer is not None
    register_commands()
    words = shlex.split(cell.command)
    result = CliRunner().invoke(app, [*words[1:], "--format", "json"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["model"] == question.model
    again = magicdec.plan(**question.options)
    assert cell.answer.gamma == again.best.gamma
    assert cell.answer.ms_per_token == pytest.approx(
        1000.0 * again.best.between_tokens_s
    )


def test_a_model_that_does_not_fit_is_a_cell_with_its_reason(
    cells: list[AtlasCell],
) -> None:
    refused = [cell for cell in cells if cell.answer is None]
    assert {(cell.model, cell.device) for cell in refused} >= {
        ("llama-3.1-70b", "rtx-4090-24gb")
    }
    assert all(cell.refusal for cell in refused)


def test_the_page_links_to_each_cell_and_loads_nothing(
    atlas: Atlas, cells: list[AtlasCell]
) -> None:
    page = render_html(atlas, cells)
    for cell in cells:
        assert f'href="#{cell.anchor}"' in page
        assert f'id="{cell.anchor}"' in page
    for section in sections_of(cells):
        assert 1 <= len(section.sentences) <= 3
        assert f'id="{section.anchor}"' in page
    assert not re.search(r"<(script|img|link)[^>]+(src|href)=.https?:", page)


def test_the_tables_have_a_row_for_each_model_and_load(
    atlas: Atlas, cells: list[AtlasCell]
) -> None:
    text = render_markdown(atlas, cells)
    rows = [line for line in text.splitlines() if line.startswith("| llama")]
    assert len(rows) == len(atlas.models) * len(atlas.loads)


def test_each_section_has_its_format_and_what_was_measured_there(
    cells: list[AtlasCell],
) -> None:
    sections = list(sections_of(cells))
    assert all(
        section.anchor.endswith(f"--{section.weight_dtype}") for section in sections
    )
    rows = published_of("llama-3.1-8b", "a100-sxm-80gb")
    assert rows
    for row in rows:
        assert row.predicted_low < row.predicted < row.predicted_high
        assert row.is_hit == (row.predicted_low <= row.measured <= row.predicted_high)
    assert published_of("no such model", "a100-sxm-80gb") == []


# The shipped pages: a change of an answer is a change of docs/atlas.md. Built anew by `make atlas`.


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(0, marks=pytest.mark.slow),
        pytest.param(1, marks=pytest.mark.exhaustive),
    ],
)
def test_cells_of_the_shipped_page_are_what_plans_say_now(first: int) -> None:
    """One cell of every second model, on the devices and loads in turn."""
    atlas = read_atlas()
    shown = shipped_cells(atlas)
    assert len(atlas.models) == 20
    for number in range(first, len(atlas.models), 2):
        question = AtlasQuestion(
            model=atlas.models[number].name,
            device=atlas.devices[number // 2 % len(atlas.devices)],
            load=atlas.loads[(number + number // len(atlas.loads)) % len(atlas.loads)],
            engine=atlas.engine,
        )
        place = (question.load.name, question.model, question.device.name)
        assert markdown_cell(cell_of(question)) == shown[place], question.anchor


@pytest.mark.parametrize(
    ("first", "every"),
    [
        pytest.param(0, 4, marks=pytest.mark.slow),
        *(pytest.param(each, 1, marks=pytest.mark.exhaustive) for each in range(20)),
    ],
)
def test_the_shipped_pages_hold_what_the_command_builds(first: int, every: int) -> None:
    """A model of the twenty, on one device of so many: its cells in the tables, and its sections of the page."""
    atlas = read_atlas()
    some = msgspec.structs.replace(
        atlas, models=atlas.models[first::20], devices=atlas.devices[::every]
    )
    cells = list(cells_of(some))
    shown = shipped_cells(atlas)
    for cell in cells:
        assert markdown_cell(cell) == shown[cell.load, cell.model, cell.device]
    page = (DOCS / "atlas.html").read_text(encoding="utf-8")
    built = render_html(some, cells)
    for section in sections_of(cells):
        assert part_of(built, section.anchor) == part_of(page, section.anchor)


def part_of(page: str, anchor: str) -> str:
    """A section of the page."""
    _, found, after = page.partition(f'<section class="model" id="{anchor}">')
    assert found, anchor
    return after.partition("</section>")[0]


def shipped_cells(atlas: Atlas) -> dict[tuple[str, str, str], str]:
    """The cells of docs/atlas.md by load, model and device."""
    text = (DOCS / "atlas.md").read_text(encoding="utf-8")
    shown = {}
    for load in atlas.loads:
        _, _, part = text.partition(f"## {load.title}\n")
        table, _, _ = part.partition("\n## ")
        for line in table.splitlines():
            texts = [cell.strip() for cell in line.strip("|").split("|")]
            for model in atlas.models:
                if texts[0] == model.name:
                    for device, cell in zip(atlas.devices, texts[1:], strict=True):
                        shown[load.name, model.name, device.name] = cell
    return shown


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("price = 2.0", "price = 0", "price"),
        ('name = "long"', 'name = "short"', "lists the load short twice"),
        ("gpus = 1, draft", 'model = "x", draft', "sets model"),
        ("[[models]]", "[[model]]", "model"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(
        SMALL.replace(old, new, 1) if old != "[[models]]" else SMALL.replace(old, new)
    )
    with pytest.raises(ConfigError, match=message) as refused:
        read_atlas(path)
    assert "\n" not in str(refused.value)
