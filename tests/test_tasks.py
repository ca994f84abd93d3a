"""Tasks go by the names that people have for them, and bring the lengths of a usual request."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from typer.testing import CliRunner

import magicdec
from magicdec.api import request_of
from magicdec.cli import app, register_commands
from magicdec.errors import ConfigError
from magicdec.schema.plan import Plan
from magicdec.schema.request import given
from magicdec.tasks import ALIASES, TASKS, USUAL_LENGTHS, task_named

register_commands()


@pytest.mark.parametrize(
    "text", ["Summarization", "summary", "coding", "code agent", "RAG"]
)
def test_a_task_is_read_in_any_spelling(text: str) -> None:
    assert task_named(text) in TASKS


def test_every_alias_names_a_task_and_hides_none() -> None:
    assert set(ALIASES.values()) <= set(TASKS)
    assert not set(ALIASES) & set(TASKS)


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="unknown task 'poetry': known: agentic, chat"
    ):
        magicdec.plan(task="poetry")


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({"task": "rag"}, ((8192,), 300)),
        ({"task": "rag", "context": 1000}, ((1000,), 300)),
        ({"task": "rag", "gen_len": 0}, ((8192,), 0)),
        ({"task": "chat", "context": 1000, "gen_len": 20}, ((1000,), 20)),
        ({"rate": 2.0}, ((1024,), 300)),
        ({"rate": 2.0, "task": "agentic"}, ((32_768,), 500)),
        ({}, ((32_768,), 0)),
    ],
)
def test_lengths_are_the_task_s_where_none_are_given(
    options: dict[str, Any], lengths: tuple[tuple[int, ...], int]
) -> None:
    request = request_of(**options)
    assert (request.context_lens, request.gen_len) == lengths
    again = request_of(**given(request.record()))
    assert (again.context_lens, again.gen_len) == lengths


def test_the_command_assumes_what_python_assumes(tmp_path: Any) -> None:
    """An option that is left out is not one that is given its default."""
    path = tmp_path / "plan.json"
    command = (
        "plan --model llama-3.1-8b --hardware h100 --task summarization --draft eagle3 "
        f"-o {path}"
    )
    done = CliRunner().invoke(app, shlex.split(command), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    written: Plan = magicdec.load_plan(path)
    asked = magicdec.plan(
        model="llama-3.1-8b", hardware="h100", task="summarisation", draft="eagle3"
    )
    assert written.best == asked.best
    usual = USUAL_LENGTHS["summarisation"]
    assert written.request.gen_len == usual.output_len
    assert f"{usual.output_len} out (usual for summarisation)" in " ".join(
        done.stdout.split()
    )
