"""Brackets and colons in what a user names are text: no command takes them for markup, drops them or ends on them."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import magicdec
from magicdec.cli import app, register_commands
from magicdec.specs.catalog import MODELS_DIRECTORY
from magicdec.specs.device import HARDWARE_DIRECTORY
from magicdec.specs.engine import ENGINES_DIRECTORY
from tests.fuzz.surfaces import scrape

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "results" / "demo-2-cores.jsonl"
TAGS = ("[/INST]", "[red]", "[link=x]y[/link]", ":smile:", "[bold]b")
PLAN = "plan --hardware h100 --draft ngram --batch 4 --context 2k"
COMMANDS = {
    "plan, of a model": f"{PLAN} --model FILE.json",
    "plan, all": f"{PLAN} --model FILE.json --draft FILE.json --all --why",
    "plan, of a device": "plan --model llama-3.1-8b --draft ngram --batch 4,8 --context 2k --hardware FILE.toml",
    "check": "check COMMAND --hardware h100",
    "hardware": "hardware FILE.toml",
    "engines": "engines ENGINE.toml",
    "records": "records ls RECORDS",
    "observe": "observe BEFORE AFTER --draft ngram",
    "sensitivity": "sensitivity --model FILE.json --hardware h100 --draft ngram --batch 4 --context 2k",
}
"""Commands that print what a user named, with what stands for it."""


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register_commands()


def written(tag: str, folder: Path) -> dict[str, str]:
    """Files and words that are called by a tag, by what stands for them."""
    stem = f"m{tag.replace('/', '_')}"
    shutil.copy(MODELS_DIRECTORY / "llama-3.2-1b.json", folder / f"{stem}.json")
    for kind, source in (
        (stem, HARDWARE_DIRECTORY / "h100-sxm-80gb.toml"),
        ("engine", ENGINES_DIRECTORY / "vllm.toml"),
    ):
        text = source.read_text(encoding="utf-8")
        text = re.sub(r"^(name|description) = .*", rf'\1 = "{tag}"', text, flags=re.M)
        (folder / f"{kind}.toml").write_text(text, encoding="utf-8")
    lines = []
    for line in RECORDS.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        lines.append(json.dumps(record | {"model": tag, "hardware": tag}))
    (folder / "records.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for name, accepted in (("before", [80, 60, 40]), ("after", [160, 120, 80])):
        drafts = accepted[0] + 40
        text = scrape(accepted=accepted, drafts=drafts, tokens=drafts * 3, model=tag)
        (folder / name).write_text(text, encoding="utf-8")
    return {
        "FILE": str(folder / stem),
        "ENGINE": str(folder / "engine"),
        "RECORDS": str(folder / "records.jsonl"),
        "BEFORE": str(folder / "before"),
        "AFTER": str(folder / "after"),
        "COMMAND": f"vllm serve Qwen/Qwen3-8B '{tag}' --max-num-seqs 4",
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_a_tag_is_printed_as_it_is(name: str, tmp_path: Path) -> None:
    """A tag for each command by default, chosen by the command's place; what reads fast takes all."""
    is_fast = name in ("check", "hardware", "engines", "records", "observe")
    place = list(COMMANDS).index(name)
    for tag in TAGS if is_fast else (TAGS[place % 2],):
        folder = tmp_path / str(TAGS.index(tag))
        folder.mkdir()
        stands = written(tag, folder)
        words = []
        for word in COMMANDS[name].split():
            kind = re.match(r"[A-Z]*", word)
            assert kind is not None
            words.append(stands.get(kind[0], kind[0]) + word[kind.end() :])
        done = CliRunner().invoke(app, words)
        assert done.exception is None or isinstance(done.exception, SystemExit), (
            name,
            tag,
            done.exception,
        )
        assert done.exit_code in (0, 1), done.output
        shown = "".join(done.output.split())
        assert tag in shown or tag.replace("/", "_") in shown, done.output


def test_one_place_makes_what_prints() -> None:
    """Every console is made without markup, by one function and the line of progress; no text holds a tag of
    ours."""
    package = Path(magicdec.__file__).parent
    makers = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\[/(?:bold|dim|red|green|yellow|italic)\]", text), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Console":
                makers.append(path.name)
                values = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert values["markup"] == "False", path
    assert makers == ["progress.py", "text.py"]
