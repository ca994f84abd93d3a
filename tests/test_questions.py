"""Questions of docs/questions.md, each answered at the first attempt as it is written there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from magicdec.cli import app, register_commands

register_commands()
PAGE = Path(__file__).resolve().parent.parent / "docs" / "questions.md"
COMMANDS = re.findall(r"^    magicdec (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
SAID = {
    "Qwen2.5-72B": ("4 x h100-sxm-80gb", "64 users do not fit at once"),
    "Llama-3.3-70B": ("llama-3.3-70b on 8 x h200-sxm-141gb",),
    "h100=2.5": ("Buy ", "per million tokens"),
    "Mistral-Small-24B-Instruct-2501 --hardware 5090": ("2 x rtx-5090-32gb", "--weight-dtype fp8"),
    "1x5090 --quantization fp8": ("1 x rtx-5090-32gb",),
    "gpt-oss-120b": ("gpt-oss-120b on 1 x h100-sxm-80gb", "whole requests"),
    "--draft ngram": ("n-gram", "whole requests"),
    "Qwen3-0.6B": ("qwen3-0.6b", "1 x h200-sxm-141gb"),
    "vllm serve": ("as it is: no draft on 2 x h100-sxm-80gb",),
    "4k,16k,64k": ("16k", "64k"),
}
"""Parts of the answers to the commands that hold these words."""


def test_every_question_of_the_page_has_its_answer_checked() -> None:
    for command in COMMANDS:
        assert sum(words in command for words in SAID) == 1, command
    assert len(COMMANDS) == len(SAID)


@pytest.mark.parametrize("words", SAID)
def test_a_question_is_answered_as_it_is_written(words: str) -> None:
    (command,) = (command for command in COMMANDS if words in command)
    done = CliRunner().invoke(app, shlex.split(command), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    for said in SAID[words]:
        assert said in text
