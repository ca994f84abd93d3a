"""What `magicdec run` cannot use: one line on stderr that says what was wrong, exit code 2, and no record."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from safetensors.torch import load_file, save_file

import magicdec
from magicdec.schema.record import Record, append_record
from magicdec.specs.catalog import EMBEDDED_DIRECTORY
from tests.processes import Program
from tests.processes import magicdec as start

EAGLE3 = str(Path(__file__).parents[1] / "data" / "heads" / "eagle3")
"""A head of another target."""
SMALL = (
    "--batch=2",
    "--context=100",
    "--gen-len=4",
    "--draft-budget=32",
    "--repetitions=1",
    "--quiet",
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED_DIRECTORY, tmp_path / "model"))


def refusal(program: Program, *arguments: str) -> str:
    """The line that a run which must fail prints."""
    return program("run", *SMALL, *arguments).refusal


def spoil_a_number(file: Path) -> None:
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, file)


@pytest.mark.parametrize(("damage", "message"), [
    (lambda file: os.truncate(file, 100_000), "not a readable safetensors file"),
    (spoil_a_number, "not finite at step 0 in sequence(s) 0, 1; first in layer 1"),
])  # fmt: skip
def test_a_checkpoint_that_cannot_be_used(
    checkpoint: Path,
    damage: Callable[[Path], object],
    message: str,
    program: Program,
    tmp_path: Path,
) -> None:
    damage(checkpoint / "model.safetensors")
    records = tmp_path / "records.jsonl"
    line = refusal(program, "--model", str(checkpoint), "--records", str(records))
    assert message in line
    assert not records.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--context", "6000"),
            "exceeds the 5632 positions of embedded; the longest context is 5624",
        ),
        (("--batch", "10000000"), "are free; the largest batch that fits is"),
        (
            ("--draft", "llama-68m", "--draft-method", "full"),
            "a vocabulary of 32000, target embedded of 2048",
        ),
        (
            ("--draft-budget", "101"),
            "draft budget 101 exceeds the context 100; the largest is 100",
        ),
        (("--gamma", "33"), "gamma must be between 0 and 32"),
        (
            ("--draft", "eagle"),
            "needs a head that was trained for embedded: give its directory",
        ),
        (("--draft", "mtp"), "embedded has no prediction module to draft with"),
        (
            ("--draft", "eagle3", "--draft-model", "{tmp_path}"),
            "no configuration of a head at",
        ),
        (
            ("--draft", "mtp", "--draft-model", EAGLE3),
            "is of a head of eagle3, not of mtp",
        ),
        (
            ("--draft", EAGLE3),
            "made for a target of hidden size 16, but embedded has 192",
        ),
        (("--prompts", "{tmp_path}"), "hold no text"),
        (("--dtype", "float8"), "known: bfloat16, float16, float32"),
        (("--queue", "1"), "use at least 2"),
        (("--device", "tpu"), "unknown device"),
        (("--prompts", "stdlb"), "did you mean stdlib"),
        (("--temperature", "-1"), "temperature must be"),
        (("--draft-tp", "2"), "the draft cannot be on 2 ranks"),
        (("--tp", "2", "--draft-tp", "1"), "needs a draft model"),
        (("--draft-method", "full"), "unknown draft method of a self-draft"),
        (("--plan", "/nonexistent.json"), "cannot read plan"),
        (("--draft-weight-dtype", "int8"), "unknown option '--draft-weight-dtype'"),
        (("--simulate-acceptance", "2"), "rates between 0 and 1"),
        (("--records", "{tmp_path}"), "it is a directory"),
        (("--save-output", "{tmp_path}"), "it is a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_option_that_cannot_be_used(
    arguments: tuple[str, ...], message: str, program: Program, tmp_path: Path
) -> None:
    given = [argument.format(tmp_path=tmp_path) for argument in arguments]
    assert message in refusal(program, *given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--resume",), "--resume goes on with a records file; give --records too"),
        (("--adaptive",), "--adaptive reads a plan's table of gammas; give --plan too"),
        (("--tp", "1000"), "tp 1000 does not divide embedded"),
        (("--gamma", "1-3000000000"), "names more than 10000 numbers"),
        (
            ("--draft-budget", "8", "--gamma", "4"),
            "draft budget 8 leaves 4 slots for recent tokens, too few for gamma 4",
        ),
        (
            ("--draft-budget", "8", "--gamma", "4", "--draft-method", "snapkv"),
            "use a larger budget, or gamma at most 3",
        ),
        (
            ("--context", "2", "--context-spread", "0.9", "--draft", "none"),
            "the shortest prompt of 2 has 0 tokens",
        ),
        (("--seed", "-1"), "--seed must be a whole number from 0"),
        (
            ("--repetitions", "10000000000000000000000"),
            "--repetitions must be a whole number from 1 to 1000000",
        ),
        (
            ("--queue", "10000000000000000000000"),
            "--queue must be a whole number from 1 to 1000000",
        ),
        (
            ("--records", "{tmp_path}/same", "--save-output", "{tmp_path}/same"),
            "--save-output and --records are one file",
        ),
        (
            ("--records", "{tmp_path}/text"),
            "holds something else than records, and is left as it is",
        ),
        (
            ("--save-output", "{tmp_path}/text"),
            "holds something else than a run's output, and is left as it is",
        ),
        (
            ("--prompts", "{tmp_path}/text", "--save-output", "{tmp_path}/text"),
            "are one file",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_is_refused_before_anything_starts(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    program: Program,
    tmp_path: Path,
) -> None:
    """No weights are read, no rank is started, no file is written to."""
    (tmp_path / "text").write_text("somebody's notes\n")

    def must_not(*_: object, **__: object) -> None:
        raise AssertionError("started")

    monkeypatch.setattr("magicdec.runtime.launch.launch_ranks", must_not)
    given = [argument.format(tmp_path=tmp_path) for argument in arguments]
    assert message in refusal(program, *given)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
    assert (tmp_path / "text").read_text() == "somebody's notes\n"


def test_a_damaged_record_is_one_line_of_warning(tmp_path: Path) -> None:
    records = tmp_path / "r.jsonl"
    base = Record(source="measured", model="embedded", batch_size=1, context_len=128)
    append_record(records, base)
    records.write_bytes(records.read_bytes() + b'{"source": "meas')
    done = start("records", "ls", str(records))
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("magicdec: warning: ")


def test_a_plan_of_a_pipeline_is_not_run_as_something_else(
    program: Program, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    answer = magicdec.plan(
        model="llama-3.1-70b",
        hardware="h100-sxm-80gb",
        tp=4,
        pp=2,
        batch=8,
        context=4096,
    )
    path.write_text(answer.to_json())
    assert "spreads a replica as tp 4 x pp 2" in refusal(program, "--plan", str(path))


def test_vllms_other_model_runner_is_not_timed(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert "unset VLLM_USE_V2_MODEL_RUNNER" in refusal(
        program, "--engine", "vllm", "--draft-budget", "64"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--draft-budget", "2048"), "measures a head over its whole cache"),
        (("--gamma", "3"), "it is another target's"),
    ],
)
def test_heads_that_an_acceptance_is_not_measured_of(
    options: tuple[str, ...], message: str, program: Program, tmp_path: Path
) -> None:
    profile = tmp_path / "own.toml"
    small = (
        "--num-prompts",
        "2",
        "--context",
        "64",
        "--gen-len",
        "4",
        "-q",
        "-o",
        str(profile),
    )
    done = program("profile-acceptance", "--draft", EAGLE3, *small, *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
