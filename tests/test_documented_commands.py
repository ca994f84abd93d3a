"""Every command of the README, of docs/ and of each command's --help runs, in the order in which it is written: the
README's by default, the others in the slow tests.

Those that measure take minutes: by default they are not run, and in the slow tests they run with smaller numbers
(`SMALLER`; an option given twice takes its last value).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
from msgspec.structs import replace
from typer.testing import CliRunner

from evidence.__main__ import app as evidence_app
from magicdec.cli import app, register_commands
from magicdec.perfmodel.acceptance import constant_profile, save_profile
from magicdec.perfmodel.planner import PlanRequest, make_plan
from magicdec.schema.record import read_records
from magicdec.specs.catalog import EMBEDDED_DIRECTORY, MODELS_DIRECTORY
from magicdec.specs.device import HARDWARE_DIRECTORY
from magicdec.specs.engine import ENGINES_DIRECTORY
from tests.live.servers import Vllm, random_requests
from tests.processes import Program

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "results" / "demo-2-cores.jsonl"
SMALLER = {
    "run": "--device cpu --dtype float32 --batch 1 --context 300 --gen-len 8 --repetitions 1 --draft-budget 32 "
    "--gamma 1 --quiet",
    "calibrate": "--device cpu --dtype float32 --quick --quiet",
    "profile-acceptance": "--num-prompts 2 --gen-len 8 --context 256 --draft-budget 32,64 --gamma 6 --quiet",
    "validate grid": "--profile local.toml --quiet",
}
TINY = "tiny-llama-3.2-1b"
"""Stands for that model where weights are random: a billion of them take a minute."""
WRITTEN = ("output", "records")
"""Parameters that name files to write."""
EVIDENCE = "python -m evidence"
ELSEWHERE = ("explore", "demo", "evidence atlas")
"""Served until stopped (tests/explore), the whole path (`make demo`), 640 plans (evidence/tests)."""
EXAMPLE_KEY = "3f2a"
"""Stands for the key of a record of the reader's."""
QUESTIONS = "docs/questions.md"
"""Each of its commands is answered, and the answer read, in test_questions.py."""
MAY_FAIL = ("validate", "check")
"""Exit with 1 where a threshold is missed, which on a busy machine a small grid may, or with --strict."""
NEEDS = (
    "localhost", "--engine vllm", "calibrate --results",
    "path/to/head", "path/to/deepseek-v3-like",
)  # fmt: skip
"""A command that names one of these needs a running server, vLLM, results of a load generator (tests/live,
plugins/vllm/tests), or a checkpoint that does not ship (tests/runtime)."""

LONG = (
    "validate published",
    "evidence acceptance",
    "evidence kernels",
    "evidence lanes",
    "evidence pairs",
    "evidence serving",
    "evidence traffic",
)
"""Kinds that fit and predict for many seconds; searches over layouts and batches (--gpus) and a PDF are as long. By
default the options of such commands are looked up, and in the slow tests each runs once."""


@cache
def tree() -> Any:
    """The commands as click sees them; those of the evidence are a group of that name."""
    register_commands()
    group: Any = typer.main.get_command(app)
    group.commands["evidence"] = typer.main.get_command(evidence_app)
    return group


def helps(group: Any, path: tuple[str, ...] = ()) -> dict[str, str]:
    """The examples of each command's --help, by the command."""
    found: dict[str, str] = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= helps(command, (*path, name))
        else:
            found[" ".join((*path, name))] = command.epilog or ""
    return found


HELPS = helps(tree())
TEXTS = {
    **{
        str(path.relative_to(ROOT)): path.read_text()
        for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    },
    **{f"{name} --help": text for name, text in HELPS.items()},
}


def commands(text: str) -> list[str]:
    """Each line that calls magicdec or the evidence, with its comment taken away."""
    whole = re.sub(r"\s*\\\n\s*", " ", text)
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in whole.splitlines()]
    programs = ("magicdec ", f"{EVIDENCE} ")
    return [line for line in lines if line.startswith(programs) and "|" not in line]


def words_of(command: str) -> list[str]:
    """The words behind the program's name, with the files of a pattern; "evidence" is the first of that
    program's."""
    if command.startswith(EVIDENCE):
        words = ["evidence"]
        for word in shlex.split(command)[3:]:
            words += sorted(map(str, Path().glob(word))) if "*" in word else [word]
        return words
    return shlex.split(command)[1:]


def kind(command: str) -> str:
    """ "run", "validate grid": what of `HELPS` a command line calls."""
    words = words_of(command)
    return " ".join(words[:2]) if " ".join(words[:2]) in HELPS else words[0]


def measures(command: str) -> bool:
    """Whether a command takes minutes; replays of logs are of a command that else measures."""
    return kind(command) in SMALLER and "--outputs" not in command


def called(which: str) -> Any:
    """The command behind a key of `HELPS`."""
    command = tree()
    for name in which.split():
        command = command.commands[name]
    return command


def prepare(directory: Path) -> None:
    """The files of the user's that the documents name."""
    shutil.copy(HARDWARE_DIRECTORY / "l40s-48gb.toml", directory / "my-gpu.toml")
    shutil.copy(HARDWARE_DIRECTORY / "l40s-48gb.toml", directory / "local.toml")
    for name in ("local.engine.toml", "my-server.toml"):
        shutil.copy(ENGINES_DIRECTORY / "ours.toml", directory / name)
    law = constant_profile(0.8, model="embedded", draft_method="streamingllm")
    save_profile(law, directory / "local.acceptance.streamingllm.json")
    save_profile(
        constant_profile(0.85, draft_method="snapkv"), directory / "snapkv.json"
    )
    (directory / "path" / "to").mkdir(parents=True)
    (directory / "path" / "to" / "checkpoint").symlink_to(EMBEDDED_DIRECTORY)
    shutil.copy(
        MODELS_DIRECTORY / "qwen3-8b.json", directory / "path" / "to" / "config.json"
    )
    head = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "hidden_size": 4096,
    }
    head["max_position_embeddings"] = 4096
    (directory / "path" / "to" / "head").mkdir()
    (directory / "path" / "to" / "head" / "config.json").write_text(json.dumps(head))
    for name in ("texts", "path/to/texts"):
        (directory / name).mkdir()
        text = "".join(
            path.read_text() for path in Path(os.__file__).parent.glob("a*.py")
        )
        (directory / name / "library.txt").write_text(text)
    shipped = ROOT / "magicdec" / "validate" / "data" / "published"
    shutil.copy(shipped / "speculation_pairs.csv", directory / "MY.csv")
    (directory / "results").symlink_to(ROOT / "results")
    (directory / "docs").symlink_to(ROOT / "docs")
    (directory / "magicdec").symlink_to(ROOT / "magicdec")
    (directory / "evidence").symlink_to(ROOT / "evidence")
    for name in (
        "results.jsonl",
        "predicted.jsonl",
        "measured.jsonl",
        "grid.jsonl",
        "example.jsonl",
    ):
        shutil.copy(RECORDS, directory / name)
    server = Vllm(model="llama-3.1-8b")
    for name, batch in (("before.txt", 1), ("after.txt", 2)):
        server.serve(random_requests(batch))
        (directory / name).write_text(server.scrape())
    described = re.search(
        r"```toml\n(schema.*?)```", TEXTS["docs/extending.md"], re.DOTALL
    )
    (directory / "mine.toml").write_text(described[1])
    samples = ROOT / "docs" / "samples"
    shutil.copy(samples / "trace.jsonl", directory / "trace.jsonl")
    shutil.copy(samples / "workload.json", directory / "requests.json")
    shutil.copy(samples / "serve.sh", directory / "serve.sh")
    shutil.copy(samples / "docker-compose.yml", directory / "docker-compose.yml")
    (directory / "plan.json").write_text(
        make_plan(PlanRequest(batch_sizes=(64,))).to_json()
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("documents")
    prepare(directory)
    return directory


@pytest.fixture
def place(
    prepared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    few_requests: None,
) -> Path:
    shutil.copytree(prepared, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def test_every_command_has_examples_of_itself() -> None:
    for name, text in HELPS.items():
        if not name.startswith("evidence"):
            assert any(kind(command) == name for command in commands(text)), name


def is_long(command: str) -> bool:
    return kind(command) in LONG or "--gpus" in command or ".pdf" in command


def is_left_out(command: str) -> bool:
    return (
        measures(command)
        or kind(command) in ELSEWHERE
        or any(need in command for need in NEEDS)
    )


READERS = (
    "plan", "sensitivity", "models", "records", "validate", "check", "export", "hardware", "engines",
)  # fmt: skip
"""Commands that write nothing by default: one of the documents behind the README is run where it has an option that no
command before it has. Of those that write, an example of --help is run that no document has."""


def options_of(command: str) -> set[str]:
    return {
        word.partition("=")[0] for word in shlex.split(command) if word.startswith("--")
    }


def nothing_new() -> set[tuple[str, str]]:
    """The documents and their commands that only repeat options of commands before them, or the whole command."""
    found: set[tuple[str, str]] = set()
    seen: set[tuple[str, str]] = set()
    before: set[str] = set()
    for where, text in TEXTS.items():
        for command in commands(text):
            which = kind(command)
            brought = {(which, option) for option in ("", *options_of(command))}
            writes = re.search(r" (>|-o|--output|--record|--save\S*) ", command)
            is_reader = which.split()[0] in READERS and not writes
            is_copied = where.endswith("--help") and command in before
            if is_copied or (where != "README.md" and is_reader and brought <= seen):
                found.add((where, command))
            elif not (is_left_out(command) or is_long(command)):
                seen |= brought
                before.add(command)
    return found


NOTHING_NEW = nothing_new()


def runs(command: str, place: Path) -> None:
    """Raises AssertionError for a command that fails or says nothing."""
    words, _, target = command.partition(" > ")
    program, arguments = app, words_of(words)
    if arguments[0] == "evidence":
        program, arguments = evidence_app, arguments[1:]
    done = CliRunner().invoke(program, arguments)
    allowed = (0, 1) if kind(command).split()[0] in MAY_FAIL else (0,)
    assert done.exit_code in allowed, f"{command}: {done.output} {done.exception!r}"
    assert done.stdout, command
    if target:
        (place / target.strip()).write_text(done.stdout)


PLACES = [name for name, text in TEXTS.items() if commands(text) and name != QUESTIONS]


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(name, marks=() if name == "README.md" else pytest.mark.slow)
        for name in PLACES
    ],
)
def test_commands_that_do_not_measure_run_as_they_are_written(
    where: str, place: Path
) -> None:
    key = read_records(RECORDS)[0].key
    for command in commands(TEXTS[where]):
        is_repeated = (where, command) in NOTHING_NEW
        if not (is_left_out(command) or is_long(command) or is_repeated):
            runs(command.replace(EXAMPLE_KEY, key), place)


@pytest.mark.parametrize("where", PLACES)
def test_commands_have_the_options_that_are_written(where: str) -> None:
    for command in commands(TEXTS[where]):
        known = {
            option
            for each in called(kind(command)).params
            for option in (*each.opts, *each.secondary_opts)
        }
        assert options_of(command) <= known, command


LONG_COMMANDS = sorted(
    {
        command
        for where, text in TEXTS.items()
        if where != QUESTIONS
        for command in commands(text)
        if is_long(command) and not is_left_out(command)
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("command", LONG_COMMANDS)
def test_commands_that_take_long_run_as_they_are_written(
    command: str, place: Path
) -> None:
    runs(command, place)


def smaller(command: str) -> list[str]:
    """The words of a command that measures, with smaller numbers."""
    which = kind(command)
    words = [*words_of(command), *SMALLER[which].split()]
    words = [TINY if word == "llama-3.2-1b" else word for word in words]
    if which == "validate grid" and "--quick" not in words:
        words = ["grid-small.toml" if word == "docs/grid.toml" else word for word in words]  # fmt: skip
        words += [] if "grid-small.toml" in words else ["--quick"]
    return words


def what_runs(words: list[str]) -> str:
    """The command's parameters, without the files that it writes."""
    which = kind(shlex.join(["magicdec", *words]))
    given = words[len(which.split()) :]
    context = called(which).make_context(which, given, resilient_parsing=True)
    measured = {k: v for k, v in sorted(context.params.items()) if k not in WRITTEN}
    return f"{which} {measured}"


def measured() -> dict[str, list[list[str]]]:
    """By document: what of its commands runs with smaller numbers, and that no document before it runs."""
    found: dict[str, list[list[str]]] = {}
    before: set[str] = set()
    for where, text in TEXTS.items():
        for command in filter(measures, commands(text)):
            if any(need in command for need in NEEDS):
                continue
            words = smaller(command)
            if (what := what_runs(words)) not in before:
                before.add(what)
                found.setdefault(where, []).append(words)
    return found


MEASURED = measured()


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what --quick measures: all kinds, few of each, the smallest."""
    pytest.importorskip("torch")
    from magicdec.calibrate import engine, kernel_bench
    from magicdec.validate import grid

    for module, name, largest in (
        (engine, "SAMPLED_SHAPES", 8000),
        (engine, "GREEDY_SHAPES", 8000),
    ):
        shapes = [s for s in getattr(module, name) if s.batch_size * s.context_len < largest]  # fmt: skip
        monkeypatch.setattr(module, name, tuple(shapes))
    for name in ("LINEAR_TOKENS", "ATTENTION_SHAPES", "QUERY_LENGTHS"):
        monkeypatch.setattr(kernel_bench, name, getattr(kernel_bench, name)[::4])
    least = replace(
        grid.QUICK_GRID, cases=((1, 300),), draft_budgets=(32,), gen_len=8, repetitions=1
    )  # fmt: skip
    monkeypatch.setattr(grid, "QUICK_GRID", least)


@pytest.mark.slow
@pytest.mark.usefixtures("small_shapes")
@pytest.mark.parametrize("where", MEASURED)
def test_commands_that_measure_run_with_smaller_numbers(
    where: str, place: Path, program: Program
) -> None:
    """What two commands would run alike is run once."""
    (place / "grid-small.toml").write_text(
        'model = "embedded"\ndraft_methods = ["streamingllm"]\ndraft_budgets = [32]\ngammas = [1, 2]\n'
        "cases = [[1, 300]]\ngen_len = 8\nrepetitions = 1\n"
    )
    config = json.loads((MODELS_DIRECTORY / "llama-3.2-1b.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    (place / TINY).mkdir()
    (place / TINY / "config.json").write_text(json.dumps(config))
    request = PlanRequest(
        model="embedded",
        tp_size=1,
        batch_sizes=(1,),
        context_lens=(300,),
        acceptance_rate=0.8,
        draft_budgets=(32,),
    )
    (place / "plan.json").write_text(make_plan(request).to_json())
    for words in MEASURED[where]:
        done = program(*words)
        allowed = (0, 1) if words[:2] == ["validate", "grid"] else (0,)
        assert done.returncode in allowed, f"{where}: {words}: {done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
