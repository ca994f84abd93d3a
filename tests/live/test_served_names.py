"""A server's own name for its model, as a Hugging Face id, through observing to a plan."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from magicdec.schema.plan import plan_of
from tests.live.servers import Vllm, random_requests

register_commands()


def run(*words: str) -> str:
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_servers_model_is_known_by_its_hub_name_to_advice_and_plans(
    tmp_path: Path,
) -> None:
    server = Vllm(model="meta-llama/Llama-3.1-8B-Instruct")
    scrapes = [tmp_path / "before.txt", tmp_path / "after.txt"]
    scrapes[0].write_text(server.scrape())
    server.serve(random_requests(1, number=40, steps=30))
    scrapes[1].write_text(server.scrape())
    profile = tmp_path / "acceptance.json"
    files = [str(path) for path in scrapes]
    looking = [
        "observe",
        *files,
        "--draft",
        "eagle",
        "--context",
        "4096",
        "--hardware",
        "h100",
    ]
    run(*looking, "-o", str(profile))
    assert json.loads(profile.read_text())["model"] == "llama-3.1-8b"
    asked = [
        "--model",
        "meta-llama/Llama-3.1-8B-Instruct",
        "--acceptance",
        str(profile),
    ]
    plan = run("plan", *asked, "--context", "4096", "--batch", "8", "--format", "json")
    rows = plan_of(json.loads(plan)).candidates
    assert any(row.draft == "eagle" for row in rows)
