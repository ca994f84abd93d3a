"""Files, servers and signals out to break the program: each found a traceback, a hang or a forged line once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from magicdec.specs.catalog import MODELS_DIRECTORY
from tests.fuzz.surfaces import QUICK, SERVED, scrape
from tests.processes import Program

DEEP = 100_000
ESCAPE = "\x1b[2J\x1b]0;owned\x07"


@pytest.fixture
def observed(program: Program, tmp_path: Path) -> Callable[..., Any]:
    """`observe` of two saved answers, with everything that it can write."""

    def observe(before: str, after: str, *more: str) -> Any:
        for name, text in (("before", before), ("after", after)):
            (tmp_path / name).write_text(text)
        files = (str(tmp_path / "before"), str(tmp_path / "after"))
        return program(
            "observe",
            *files,
            "--draft",
            "ngram",
            *SERVED,
            "-o",
            str(tmp_path / "out.json"),
            *more,
        )

    return observe


BEFORE = scrape(accepted=[80, 60, 40])


@pytest.mark.parametrize(
    ("after", "more", "said"),
    [
        (scrape(accepted=[160, 50, 90], drafts=200, tokens=900), (), "a counter fell"),
        (
            scrape(accepted=[1e300, 1e299, 1e298], drafts=1e300),
            (),
            "counts 1e+300 of vllm:",
        ),
        (
            scrape(accepted=[160, 120, 80], drafts=200, tokens=1e13),
            (),
            "tokens, longer than any",
        ),
        (
            scrape(accepted=[99.0] * 10_000, drafts=200, tokens=900),
            (),
            "counts 10000 draft positions; at most 64",
        ),
        (
            scrape(accepted=[160, 120, 80], drafts=200, tokens=900),
            ("--context=inf",),
            "--context must be a number",
        ),
    ],
    ids=[
        "a position's counter falls",
        "counters near 1e300",
        "endless sequences",
        "positions",
        "--context=inf",
    ],
)
def test_counts_that_none_can_have_are_refused(
    after: str, more: tuple[str, ...], said: str, observed: Callable[..., Any]
) -> None:
    assert said in observed(BEFORE, after, *more).refusal


def test_what_a_server_calls_itself_cannot_act_on_the_terminal(
    observed: Callable[..., Any], program: Program, tmp_path: Path
) -> None:
    """In a table of results, in an error, and in a line of records."""
    records = str(tmp_path / "records.jsonl")
    after = scrape(accepted=[160, 120, 80], drafts=200, tokens=900, model=ESCAPE)
    done = observed(
        scrape(accepted=[80, 60, 40], model=ESCAPE), after, "--records", records
    )
    assert done.returncode == 0
    assert "?[2J?]0;owned?" in done.stdout
    refused = observed(
        BEFORE,
        after + 'vllm:num_requests_running{model_name="\x1b[1mb"} 1\n',
        "--target",
        "x",
    )
    for text in (
        done.stdout,
        done.stderr,
        refused.stderr,
        program("records", "ls", records).stdout,
    ):
        assert all(each.isprintable() or each == "\n" for each in text), text


def nested(key: str) -> str:
    return f'{{"kind": "plan", "schema_version": 5, "{key}": {"[" * DEEP}{"]" * DEEP}}}'


@pytest.mark.parametrize(
    ("name", "text", "command"),
    [
        ("plan.json", nested("candidates"), ("export", "vllm")),
        ("plan.json", nested("candidates"), ("run", "--plan")),
        ("plan.json", nested("candidates").replace(str("[" * DEEP), "[" * 600).replace("]" * DEEP, "]" * 600),
         ("export", "vllm")),
        ("records.jsonl", '{"source": "measured", "model": "m", "x": ' + "[" * DEEP + "]" * DEEP + "}",
         ("records", "ls")),
        ("records.jsonl", nested("x"), ("report",)),
        ("records.jsonl", nested("x"), ("plot", "pareto")),
        ("trace.jsonl", nested("x"), ("observe", "--draft", "ngram", "--context", "100")),
        ("results.json", nested("benchmarks"), ("calibrate", *SERVED, "-o", "e.toml", "--results")),
        ("workload.json", nested("requests"), ("plan", "--workload")),
        ("workload.csv", 'prompt_len\n"' + "1" * 200_000 + '"\n', ("plan", "--workload")),
        ("profile.toml", "a = " + "[" * DEEP + "]" * DEEP, ("plan", "--hardware")),
        ("profile.toml", ".".join("a" * DEEP) + " = 1", ("plan", "--engine")),
        ("profile.json", nested("law"), ("plan", "--acceptance")),
        ("config.json", nested("layer_types"), ("plan", "--model")),
        ("model.toml", "a = " + "[" * DEEP, ("plan", "--model")),
    ],
)  # fmt: skip
def test_documents_without_end_are_one_line(
    name: str, text: str, command: tuple[str, ...], tmp_path: Path, program: Program
) -> None:
    (tmp_path / name).write_text(text)
    done = program(*command, str(tmp_path / name))
    assert done.returncode == 2, done
    assert done.stderr.startswith("magicdec: ")


def test_a_checkpoints_other_files_are_bounded_too(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import torch

    from magicdec.errors import CheckpointError
    from magicdec.runtime.checkpoint import INDEX_FILE, CheckpointDirectory
    from magicdec.runtime.prompts import generation_eos_token_ids

    for name in ("generation_config.json", INDEX_FILE):
        (tmp_path / name).write_text(nested("eos_token_id"))
    with pytest.raises(CheckpointError, match="nests more than"):
        generation_eos_token_ids(tmp_path, vocab_size=10)
    with pytest.raises(CheckpointError, match="nests more than"):
        CheckpointDirectory(tmp_path, device=torch.device("cpu"), dtype=torch.float32)


def test_a_pipe_is_read_while_something_writes_to_it_and_else_refused(
    tmp_path: Path, program: Program
) -> None:
    config = (MODELS_DIRECTORY / "llama-3.1-8b.json").read_bytes()
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    assert (
        "is a pipe that nothing writes to"
        in program("plan", "--model", str(pipe)).refusal
    )
    reads, writes = os.pipe()
    os.write(writes, config)
    os.close(writes)
    assert program("plan", "--model", f"/dev/fd/{reads}", *QUICK).returncode == 0
    os.close(reads)


def test_an_argument_that_is_no_text_is_refused(
    tmp_path: Path, program: Program
) -> None:
    """A file's name may hold such bytes; a plan, a table and a figure would have to."""
    config = tmp_path / "x\udcff.json"
    config.write_bytes((MODELS_DIRECTORY / "llama-3.1-8b.json").read_bytes())
    for command in (("plan", "--model"), ("plot", "pareto"), ("report",)):
        assert "is not UTF-8 text" in program(*command, str(config)).refusal


@pytest.mark.parametrize(
    "changed", [{"layer_types": [["full_attention"]] * 48}, {"layer_types": [{}] * 48}]
)
def test_a_list_in_a_list_of_kinds(
    changed: dict[str, Any], tmp_path: Path, program: Program
) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            json.loads((MODELS_DIRECTORY / "gpt-oss-20b.json").read_text()) | changed
        )
    )
    assert (
        "key 'layer_types' must be a list of"
        in program("plan", "--model", str(file)).refusal
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["magicdec.cli", "numpy"])
def test_a_signal_while_the_program_loads_ends_it_without_a_traceback(
    number: signal.Signals, module: str
) -> None:
    """Sent as the module's import begins. Once the program's own modules are there, Ctrl-C has one line."""
    script = (
        "import os, runpy, sys\n"
        "class Sender:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}:\n"
        "            sys.meta_path.remove(self)\n"
        f"            os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Sender())\n"
        "sys.argv = ['magicdec', 'plan']\n"
        "runpy.run_module('magicdec', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (128 + number, "")
    said = ""
    if (number, module) == (signal.SIGINT, "numpy"):
        said = "magicdec: interrupted; nothing is kept"
    assert done.stderr.strip() == said


def test_an_ended_program_leaves_at_once_with_all_that_it_printed() -> None:
    """Without what an orderly exit would wait for: on a loaded machine torch alone takes seconds to go."""
    script = (
        "import atexit, sys, time, magicdec.__main__, magicdec.cli\n"
        "def ended():\n    print('measured')\n    sys.exit(143)\n"
        "atexit.register(time.sleep, 600)\n"
        "magicdec.cli.main = ended\n"
        "magicdec.__main__.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, "measured\n", "")
