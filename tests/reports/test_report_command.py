"""`magicdec report`, `plot` and `export`: files in, files out, and one line where that cannot be."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from samples_reports import grid, plan
from typer.testing import CliRunner

import magicdec
from magicdec.commands.export import export_command
from magicdec.commands.plot import plot_command
from magicdec.commands.report import report_command
from magicdec.errors import ConfigError, MagicdecError, StorageError
from magicdec.reports.data import ReportData
from magicdec.reports.exports import export
from magicdec.reports.headline import headline_of
from magicdec.reports.tables import all_tables
from magicdec.schema.plan import plan_of
from magicdec.schema.record import append_record


@pytest.fixture
def inputs(tmp_path: Path) -> tuple[Path, Path]:
    records, document = tmp_path / "records.jsonl", tmp_path / "plan.json"
    for record in grid()[:16]:
        append_record(records, record)
    document.write_text(plan().to_json())
    return records, document


def run(*arguments: object) -> str:
    app = typer.Typer()
    for name, command in {
        "report": report_command,
        "plot": plot_command,
        "export": export_command,
    }.items():
        app.command(name)(command)
    result = CliRunner().invoke(
        app, [str(a) for a in arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.output


def test_writes_both_files_and_prints_their_paths(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    pytest.importorskip("typst")
    pypdf = pytest.importorskip("pypdf")
    html, pdf = tmp_path / "out" / "report.html", tmp_path / "out" / "report.pdf"
    printed = run("report", inputs[0], "--plan", inputs[1], "-o", html, "-o", pdf)
    assert printed.split() == [str(html), str(pdf)]
    assert html.read_text().startswith("<!doctype html>")
    assert len(pypdf.PdfReader(pdf).pages) >= 2
    assert sorted(p.name for p in html.parent.iterdir()) == [
        "report.html",
        "report.pdf",
    ], "no temporary file is left"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl"], r"cannot read records from missing\.jsonl"),
        (["-o", "report.docx"], r"must end in \.html or \.pdf"),
        ([], "nothing to report"),
    ],
)
def test_a_users_mistake_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MagicdecError, match=message) as error:
        run("report", *arguments)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_path_is_refused_before_the_work(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("a file where a directory is needed")
    with pytest.raises(StorageError, match=r"cannot write .*report\.html"):
        run("report", inputs[0], "-o", tmp_path / "file" / "report.html")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "is no plan"),
        (
            '{"kind": "plan", "schema_version": 99}',
            "schema version 99, this program reads 5",
        ),
        (
            '{"kind": "plan", "schema_version": 1, "model": "m"}',
            "schema version 1, this program reads 5",
        ),
        (
            '{"kind": "plan", "schema_version": 5, "hardware": "h", "context_len": 0}',
            "not a whole plan: its rows are damaged",
        ),
    ],
)
def test_a_damaged_plan_is_refused_with_its_name(
    text: str, message: str, tmp_path: Path
) -> None:
    document = tmp_path / "plan.json"
    document.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        run("report", "--plan", document, "-o", tmp_path / "report.html")
    assert "plan.json" in str(error.value)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 10**12)
    | st.floats()
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
PARTS = (
    "model", "choice", "candidates", "gamma_table", "breakdown", "memory", "notes", "needs_acceptance",
    "request", "hardware", "rows", "other_cases",
)  # fmt: skip


WHOLE = plan().to_json()


@given(part=st.sampled_from(PARTS), value=ANYTHING, data=st.data())
def test_a_plan_is_refused_or_reported(
    part: str, value: object, data: st.DataObject
) -> None:
    """Whatever stands in one part of a plan, or in one of that part's keys: an error of the user's, or a report."""
    document = json.loads(WHOLE)
    if isinstance(document[part], dict) and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(document[part])))
        document[part] = document[part] | {key: value}
    else:
        document[part] = value
    try:
        read = plan_of(json.loads(json.dumps(document)))
    except ConfigError:
        return
    report = ReportData.from_records([], read)
    headline_of(report)
    all_tables(report)
    for engine in ("vllm", "sglang", "trtllm"):
        with contextlib.suppress(ConfigError):
            export(engine, read)


def test_a_figure_in_every_format(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    for suffix, check in {
        ".svg": lambda b: ET.fromstring(b).tag.endswith("svg"),
        ".png": lambda b: b.startswith(b"\x89PNG"),
        ".csv": lambda b: b.startswith(
            b"batch_size,context_len,speedup,gamma,verdict\n"
        ),
        ".json": lambda b: json.loads(b)["name"] == "heatmap",
        ".md": lambda b: b.startswith(b"| Batch | Context |"),
    }.items():
        path = tmp_path / f"figure{suffix}"
        assert run(
            "plot", "heatmap", inputs[0], "--plan", inputs[1], "-o", path
        ).strip() == str(path)
        assert check(path.read_bytes())


def test_a_table_goes_to_stdout(inputs: tuple[Path, Path]) -> None:
    assert run("plot", "errors", inputs[0]).startswith("| Term |")
    assert run("plot", "errors", inputs[0], "--format", "csv").startswith(
        "term,points,"
    )


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
def test_mistakes_name_what_would_do(
    arguments: list[str], message: str, inputs: tuple[Path, Path]
) -> None:
    with pytest.raises(ConfigError, match=message):
        run("plot", *arguments, inputs[0])


def test_a_figure_without_its_data_says_so(inputs: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="nothing to draw 'traffic' from"):
        run("plot", "traffic", inputs[0])


def test_export_prints_or_writes(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    planned = tmp_path / "planned.json"
    planned.write_text(magicdec.plan(batch=64, context=32768).to_json())
    text = run("export", "vllm", planned)
    assert "vllm serve meta-llama/Llama-3.1-8B-Instruct" in text
    run("export", "vllm", planned, "-o", tmp_path / "flags.sh")
    assert (tmp_path / "flags.sh").read_text() == text
    with pytest.raises(
        ConfigError,
        match="'local-cpu' is not in the catalog; give its profile with --hardware",
    ):
        run("export", "vllm", inputs[1])


def test_a_plan_among_the_records_is_taken_for_what_it_is(
    inputs: tuple[Path, Path],
) -> None:
    given = run("plot", "heatmap", inputs[0], "--plan", inputs[1], "--format", "csv")
    assert run("plot", "heatmap", inputs[1], inputs[0], "--format", "csv") == given
    with pytest.raises(ConfigError, match="one plan"):
        run("plot", "heatmap", inputs[1], "--plan", inputs[1])
