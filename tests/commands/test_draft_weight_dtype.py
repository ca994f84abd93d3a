"""`magicdec run --draft-weight-dtype`, as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.processes import Program

SMALL = ("--batch", "2", "--context", "120", "--gen-len", "6", "--repetitions", "1", "--quiet", "--draft-budget", "32")


def test_each_format_is_measured_and_recorded(tmp_path: Path, program: Program) -> None:
    """Side by side, with the same greedy output, and told apart where the records are resumed."""
    records, output = tmp_path / "records.jsonl", tmp_path / "output.jsonl"
    options = ("--temperature", "0", "--gamma", "2", "--draft-weight-dtype", "fp8,int8,int4", "--records", str(records))
    done = program("run", *SMALL, *options, "--save-output", str(output))
    assert done.returncode == 0, done.stderr
    assert "int8 draft" in done.stdout
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert {row.get("draft_weight_dtype") for row in rows} == {None, "fp8", "int8", "int4"}
    assert len(rows) == 4
    assert all(row["memory_bytes_per_gpu"] > 0 for row in rows)
    again = program("run", *SMALL, *options, "--resume")
    assert again.returncode == 0, again.stderr
    assert len(records.read_text().splitlines()) == len(rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--draft-weight-dtype", "int3"), "unknown draft weight dtype 'int3'"),
        (("--draft", "ngram", "--draft-weight-dtype", "int8"), "draft 'ngram' has none"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options: tuple[str, ...], message: str, program: Program) -> None:
    assert message in program("run", *SMALL, *options).refusal
