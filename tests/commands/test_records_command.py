"""Records as a user meets them: listed, shown, documented, and of unknown versions set aside."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import msgspec
import pandas as pd
import pytest
from typer.testing import CliRunner

from magicdec.commands.records import app
from magicdec.errors import ConfigError
from magicdec.schema.record import Environment, Record, append_record, read_records

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "records.md"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "r.jsonl"
    for gamma in (0, 3):
        append_record(
            path,
            Record(
                source="measured", model="llama-3.1-8b-instruct", batch_size=64, context_len=131072, gamma=gamma,
                draft_method="streamingllm" if gamma else "none", draft_budget=1024 if gamma else None,
                speedup=1.25, tokens_per_s=12345.6, acceptance_by_position=[0.9, 0.8] if gamma else None,
            ),
        )  # fmt: skip
    return path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_ls_fits_80_columns_and_shows_every_record(file: Path) -> None:
    lines = run("ls", str(file)).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    for record in read_records(file):
        assert sum(line.startswith(record.key[:8]) for line in lines) == 1


def test_show_accepts_the_beginning_of_a_key_and_names_the_nearest_unknown(
    file: Path,
) -> None:
    record = read_records(file)[1]
    assert json.loads(run("show", record.key[:10], str(file))) == {
        "key": record.key, "schema_version": 1, **msgspec.to_builtins(record),
    }  # fmt: skip
    changed = record.key[:-1] + ("0" if record.key[-1] != "0" else "1")
    with pytest.raises(ConfigError, match=f"did you mean {record.key}"):
        run("show", changed, str(file))


@pytest.mark.parametrize("form", ["csv", "json"])
def test_ls_keeps_every_value(file: Path, form: str) -> None:
    listed = io.StringIO(run("ls", str(file), "--format", form))
    frame = pd.read_csv(listed) if form == "csv" else pd.read_json(listed)
    assert list(frame["key"]) == [record.key for record in read_records(file)]
    assert list(frame["tokens_per_s"]) == [12345.6, 12345.6]
    accepted = frame["acceptance_by_position"][1]
    assert (json.loads(accepted) if form == "csv" else accepted) == [0.9, 0.8]
    assert frame["draft_budget"][1] == 1024


def test_every_field_is_documented() -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    assert {*Record.__struct_fields__, *Environment.__struct_fields__} <= documented


def test_another_schema_is_set_aside(file: Path) -> None:
    old = json.loads(file.read_text().splitlines()[1])
    assert old["schema_version"] == 1
    with file.open("a") as handle:
        handle.write(json.dumps(old | {"schema_version": 99}) + "\n")
    with pytest.warns(UserWarning, match="99 is unknown"):
        assert len(read_records(file)) == 2
