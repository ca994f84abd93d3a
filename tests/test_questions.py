"""Questions of docs/questions.md, each answered at the first attempt as it is written there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from magicdec.perfmodel.rate import load
from magicdec.reports.sentences import first_line
from magicdec.schema.plan import load_plan

register_commands()
PAGE = Path(__file__).resolve().parent.parent / "docs" / "questions.md"
COMMANDS = re.findall(
    r"^    magicdec (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
)
SAID: dict[str, tuple[str, ...]] = {
    "Qwen2.5-72B": ("on 4 x H100", "64 do not fit", "Acceptance on chat"),
    "Llama-3.3-70B": (
        "on 8 x H200",
        "Try serving 20 users",
        "Acceptance on summarisation",
        "Whole requests",
    ),
    "gpt-oss-120b": ("on 1 x H100", "Acceptance on agentic", "likely to pay"),
    "DeepSeek-V3": ("Serve 6 requests/s on", "multi-token prediction", "headroom"),
    "h100=2.5": ("Buy ", "per million tokens", "the least of 4 devices"),
    "Mistral-Small-24B-Instruct-2501 --hardware 4090,5090": (
        "2 x RTX 5090 32 GB",
        "Acceptance on chat",
    ),
    "1x5090 --quantization fp8": ("Serve 1 user on 1 x RTX 5090", "usual for chat"),
    "--draft ngram": ("n-gram", "Acceptance on rag"),
    "Qwen3-0.6B": ("1 user on 1 x H200", "qwen3-0.6b"),
    "4k,16k,64k": ("A draft gains on average at ", " of 3 contexts", "EAGLE-3"),
    "docker-compose.yml": (
        "Draft with suffix decoding",
        "EAGLE-3, gamma 8 on 4 x h100",
    ),
    "deployment.yaml": (
        "Draft 10 tokens per step, not 5",
        "n-gram, gamma 5 on 2 x l40s",
    ),
    "sglang.sh": ("wrong: devices: the command uses 8, but 4 are given",),
    "serve.sh": ("Draft with DSpark", "1 x l40s-48gb"),
    "vllm serve": (
        "Draft 1 token per step, not 5",
        "as it is: EAGLE-3, gamma 5 on 2 x h100",
    ),
}
"""Parts of the first lines that answer the commands with these words."""
EXPORTED = ("Qwen3-0.6B", "--draft ngram", "1x5090 --quantization fp8")
"""Questions whose plans are read back from their file and exported."""
FIRST_LINES = 12
"""Lines of 80 columns."""


WIDTH = 80


def _slow_if_simulated(words: str) -> list[pytest.MarkDecorator]:
    """A rate of requests on eight devices takes half a minute of simulation."""
    return [pytest.mark.slow] if words == "DeepSeek-V3" else []


def test_every_question_of_the_page_has_its_answer_checked() -> None:
    for command in COMMANDS:
        assert sum(words in command for words in SAID) == 1, command
    assert len(COMMANDS) == len(SAID)


@pytest.mark.parametrize(
    "words", [pytest.param(words, marks=_slow_if_simulated(words)) for words in SAID]
)
def test_a_question_is_answered_in_the_first_lines(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PAGE.parent.parent)
    monkeypatch.setattr(
        load, "MAX_REQUESTS", 500
    )  # of a rate, which simulates thousands
    (command,) = (command for command in COMMANDS if words in command)
    file = tmp_path / "plan.json"
    output = ["-o", str(file)] if words in EXPORTED else []
    done = CliRunner().invoke(
        app, [*shlex.split(command), *output], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert all(len(line) <= WIDTH for line in lines if not line.startswith("    "))
    text = " ".join(" ".join(lines[:FIRST_LINES]).split())
    for said in SAID[words]:
        assert said in text
    if output:
        check_file(file, text)


def check_file(file: Path, text: str) -> None:
    """The first line is what the document and its export hold."""
    plan = load_plan(file)
    assert text.startswith(first_line(plan))
    exported = CliRunner().invoke(app, ["export", "vllm", str(file)])
    assert exported.exit_code == 0, exported.output
    assert ("--speculative-config" in exported.stdout) == plan.choice.is_speculative
