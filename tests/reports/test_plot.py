"""`magicdec plot` and `magicdec export`: one figure, one table, one engine's flags."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import typer
from samples_reports import grid, plan
from typer.testing import CliRunner

import magicdec
from magicdec.commands.report import export_command, plot_command
from magicdec.errors import ConfigError
from magicdec.records import append_record


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    records, document = tmp_path / "records.jsonl", tmp_path / "plan.json"
    for record in grid()[:16]:
        append_record(records, record)
    document.write_text(plan().to_json())
    return records, document


def run(*arguments: object) -> str:
    app = typer.Typer()
    app.command("plot")(plot_command)
    app.command("export")(export_command)
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_figure_in_every_format(files: tuple[Path, Path], tmp_path: Path) -> None:
    for suffix, check in {
        ".svg": lambda b: ET.fromstring(b).tag.endswith("svg"),
        ".png": lambda b: b.startswith(b"\x89PNG"),
        ".csv": lambda b: b.startswith(b"batch_size,context_len,speedup,gamma,verdict\n"),
        ".json": lambda b: json.loads(b)["name"] == "heatmap",
        ".md": lambda b: b.startswith(b"| Batch | Context |"),
    }.items():
        path = tmp_path / f"figure{suffix}"
        assert run("plot", "heatmap", files[0], "--plan", files[1], "-o", path).strip() == str(path)
        assert check(path.read_bytes())


def test_a_table_goes_to_stdout(files: tuple[Path, Path]) -> None:
    assert run("plot", "errors", files[0]).startswith("| Term |")
    assert run("plot", "errors", files[0], "--format", "csv").startswith("term,points,")


def test_list_names_what_there_is() -> None:
    assert "heatmap" in run("plot", "list")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["heatmapp"], "did you mean heatmap"),
        (["scatter", "--format", "png"], "give -o"),
        (["errors", "--format", "svg"], "a table is not written as svg"),
        (["errors", "-o", "x.docx"], "cannot tell the format"),
    ],
)
def test_mistakes_name_what_would_do(arguments: list[str], message: str, files: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=message):
        run("plot", *arguments, files[0])


def test_a_figure_without_its_data_says_so(files: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="nothing to draw 'roofline' from"):
        run("plot", "roofline", files[0])


def test_export_prints_or_writes(files: tuple[Path, Path], tmp_path: Path) -> None:
    planned = tmp_path / "planned.json"
    planned.write_text(magicdec.plan(batch=64, context=32768).to_json())
    text = run("export", "vllm", planned)
    assert "vllm serve meta-llama/Llama-3.1-8B-Instruct" in text
    run("export", "vllm", planned, "-o", tmp_path / "flags.sh")
    assert (tmp_path / "flags.sh").read_text() == text
    with pytest.raises(ConfigError, match="'local-cpu' is not in the catalog; give its profile with --hardware"):
        run("export", "vllm", files[1])


def test_a_plan_among_the_records_is_taken_for_what_it_is(files: tuple[Path, Path]) -> None:
    given = run("plot", "heatmap", files[0], "--plan", files[1], "--format", "csv")
    assert run("plot", "heatmap", files[1], files[0], "--format", "csv") == given
    with pytest.raises(ConfigError, match="one plan"):
        run("plot", "heatmap", files[1], "--plan", files[1])
