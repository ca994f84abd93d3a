"""Serve commands and logged requests as nobody would write them: an answer or one line, within a
minute and two GB.

MAGICDEC_FUZZ multiplies the cases.
"""

from __future__ import annotations

import gzip
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magicdec.errors import ConfigError
from magicdec.logs import formats
from magicdec.specs import serve_command
from magicdec.specs.serve_command import script
from tests.fuzz import surfaces
from tests.fuzz.surfaces import (
    LONGEST_LINE,
    TALLIES,
    Case,
    Memory,
    Tally,
    Verdict,
    judge,
)
from tests.fuzz.test_loads import MANY, NUMBER, right, text_of

if MANY == 1:
    pytestmark = pytest.mark.usefixtures("few_requests")
DRAWN = settings(
    max_examples=6 * MANY,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
STARTS = {
    "vllm": "vllm serve llama-3.1-8b",
    "sglang": "python -m sglang.launch_server --model-path llama-3.1-8b",
    "trtllm": "trtllm-serve llama-3.1-8b",
}
VALUES = st.one_of(
    NUMBER.map(text_of),
    st.sampled_from(
        [
            "{}",
            "[]",
            "null",
            "fp8",
            "auto",
            "eagle3",
            '{"method": "eagle3"}',
            '{"method": "ngram", "num_speculative_tokens": 1e400}',
            '{"method": 7, "model": [1], "num_speculative_tokens": "x"}',
            '{"method": "mtp", "num_speculative_tokens": -3}',
            '{"model": "/no/such/model"}',
            '{"a":' * 5000 + "1" + "}" * 5000,
            "[" * 100_000,
            "1," * 20_000,
            "'",
            "$(x)",
            "\u202e",
        ]
    ),
)
NESTED = "\n".join(f"{' ' * depth}a:" for depth in range(3000))
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
)
MANIFESTS = (
    "services:\n  s:\n    image: vllm/vllm-openai\n    command: {command}\n",
    "spec:\n  containers:\n  - image: vllm/vllm-openai\n    args: [{command}]\n"
    "    resources: {{limits: {{nvidia.com/gpu: {number}}}}}\n",
    "command: vllm serve llama-3.1-8b '\nimage: x\n",
    BOMB + "\ncommand: vllm serve llama-3.1-8b\n",
    BOMB + "\nspec: [{{command: vllm serve llama-3.1-8b, x: *a11}}]\n",
    NESTED + "\n",
    "a: " + "[" * 20_000 + "\n",
    "a: &a\n  command: vllm serve llama-3.1-8b\n  b: *a\n",
    "command: 7\nargs: {{a: 1}}\n",
)


def checked(folder: Path, text: str) -> Case:
    path = folder / "serve.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    options = ("--hardware", "h100-sxm-80gb", "--batch", "4", "--context", "512")
    return Case(f"check {text[:200]!r}", ("check", str(path), *options))


@DRAWN
@given(
    engine=st.sampled_from(sorted(STARTS)),
    chosen=st.lists(st.tuples(st.integers(0, 40), VALUES), min_size=1, max_size=3),
    join=st.sampled_from([" ", "=", " \\\n"]),
)
def test_serve_commands(
    engine: str, chosen: list[tuple[int, str]], join: str, tmp_path: Path
) -> None:
    names = sorted(serve_command.OPTIONS[engine])
    words = [STARTS[engine]]
    for place, value in chosen:
        words.append(f"--{names[place % len(names)]}{join}'{value}'")
    right(checked(tmp_path, " ".join(words)), "serve commands")


@DRAWN
@given(
    manifest=st.sampled_from(MANIFESTS),
    value=VALUES,
    number=NUMBER.map(text_of),
    repeated=st.sampled_from([1, 1, 40]),
)
def test_manifests(
    manifest: str, value: str, number: str, repeated: int, tmp_path: Path
) -> None:
    command = json.dumps(f"vllm serve llama-3.1-8b --max-num-seqs {value[:2000]}")
    text = manifest.format(command=command, number=json.dumps(number))
    right(checked(tmp_path, "---\n".join([text] * repeated)), "manifests")


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_every_manifest_ends(manifest: str, tmp_path: Path) -> None:
    text = manifest.format(command="vllm serve llama-3.1-8b", number="9" * 400)
    right(checked(tmp_path, text), "manifests")


MEGABYTE = 1_000_000
START = "vllm serve llama-3.1-8b"


def repeated(piece: str, before: str = "", after: str = "") -> str:
    return (
        before + piece * ((MEGABYTE - len(before) - len(after)) // len(piece)) + after
    )


def numbered(piece: str, count: int) -> str:
    return "".join(piece.format(n, n - 1) for n in range(1, count))


PYTHON = "from vllm import LLM\n"
SHAPES = {
    "options": repeated(" --max-num-seqs 8", START),
    "other options": START + numbered(" --x{} {}", 60_000),
    "dots": START + " --compilation-config." + "a." * 480_000 + " 1",
    "values": START + " --cuda-graph-sizes" + " 1" * 490_000,
    "digits": START + " --max-num-seqs " + "9" * 900_000,
    "configuration": START + " --speculative-config '{" + numbered('"k{}": {},', 50_000) + "}'",
    "here-documents": repeated("cat <<EOF\nvllm\nEOF\n", after=START),
    "a script in a here-document": "bash <<EOF\n" + "A=1\n" * 240_000 + START + "\nEOF\n",
    "variables": repeated("A=$A$A\n", after=START),
    "values that grow": numbered("A{}=${{A{}}}x\n", 50_000) + START,
    "functions": repeated("f() { g; }\n", after=START),
    "loops": repeated("for i in 1 2 3; do echo $i; done\n", after=START),
    "servers": repeated(START + "\n"),
    "substitutions": repeated("$(", after=START),
    "quotes": repeated('"', START + " "),
    "backslashes": repeated("\\", START + " "),
    "zero bytes": repeated("\0", START),
    "empty lines": repeated("\n", after=START),
    "blanks": repeated(" ", "CUDA_VISIBLE_DEVICES=0", START),
    "images": repeated("vllm/vllm-openai "),
    "YAML lists": "a: " + "[" * 400_000 + "]" * 400_000 + f"\ncommand: {START}\n",
    "YAML maps": "".join(" " * n + "a:\n" for n in range(1390)) + f"command: {START}\n",
    "YAML aliases": "a: &a [x]\nb:\n" + "- *a\n" * 180_000 + f"command: {START}\n",
    "YAML merges": "a0: &a0 {x: 1}\n" + numbered("a{0}: &a{0}\n  <<: *a{1}\n", 30_000) + f"command: {START}\n",
    "YAML documents": repeated(f"---\ncommand: {START}\n"),
    "YAML variables": "env:\n" + numbered('- {{name: A{}, value: "$(A{})"}}\n', 25_000) + f"command: {START}\n",
    "YAML arguments": "image: vllm/vllm-openai\nargs:\n" + "- --max-num-seqs\n- '8'\n" * 40_000,
    "JSON": json.dumps({"command": START, "x": [[1]] * 150_000}),
    "Python sums": PYTHON + "x = " + "+".join(["1"] * 120_000) + "\nLLM(model='llama-3.1-8b')\n",
    "Python brackets": PYTHON + "x = " + "(" * 120_000 + ")" * 120_000 + "\nLLM(model='llama-3.1-8b')\n",
    "Python statements": PYTHON + "x = 1\n" * 40_000 + "LLM(model='llama-3.1-8b')\n",
    "Python calls": PYTHON + "LLM(model='llama-3.1-8b')\n" * 9_000,
    "Python arguments": PYTHON + "LLM('llama-3.1-8b', " + numbered("k{}={}, ", 15_000) + ")\n",
}  # fmt: skip
"""Texts of up to a megabyte in which one thing has no end."""
MOST_CPU_S = 30.0
"""Processor time of reading one: two seconds on a usual machine, minutes where the time grows with the square."""


def read_within(text: str, most_s: float, what: str) -> Verdict:
    """Whether a command's text is read or refused in so much processor time."""
    memory = Memory()
    began = time.process_time()
    code, fault = 0, ""
    try:
        serve_command.read_serve_command(text, reads_files=False)
    except ConfigError as error:
        code = 2
        if len(str(error)) >= LONGEST_LINE:
            fault = f"no line of an error: {what}"
    except Exception as error:
        fault = f"a traceback: {what}: {error!r}"[:LONGEST_LINE]
    seconds = time.process_time() - began
    if seconds > most_s:
        fault = f"a hang: {what}"
    verdict = Verdict(code, fault)
    surface = "megabytes of a command" if what in SHAPES else "planted"
    TALLIES.setdefault(surface, Tally()).count(verdict, seconds, memory.added_mib())
    return verdict


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_megabyte_of_any_shape_is_read_in_seconds(shape: str) -> None:
    assert len(SHAPES[shape]) <= MEGABYTE
    assert read_within(SHAPES[shape], MOST_CPU_S, shape).fault == ""


ROWS: tuple[dict[str, Any], ...] = (
    {"prompt_token_ids": [1, 2, 3] * 9, "output_token_ids": [4, 5, 6] * 9},
    {"prompt": "a b c d e f", "completion": "a b c d e f g"},
    {
        "messages": [{"role": "user", "content": "hi"}],
        "choices": [{"message": {"role": "assistant", "content": "hello"}}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 4},
        "created": 1_700_000_000,
    },
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {
        "input_lens": [9, 9],
        "output_lens": [3, 3],
        "generated_texts": ["a", "b"],
        "errors": ["", ""],
    },
    {"custom_id": "a", "response": {"body": {"choices": [{"text": "b"}]}}},
)
ODD = st.one_of(
    NUMBER,
    st.sampled_from(
        [
            [],
            {},
            [[]],
            [None],
            {"a": {}},
            [1e308, 2],
            [-1, 2**70],
            ["a", 1],
            "a" * 99999,
        ]
    ),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        if isinstance(each, dict | list):
            found += places(each, (*at, key))
        else:
            found.append((*at, key))
    return found


def with_odd(row: dict[str, Any], place: int, odd: Any) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(row))
    every = places(changed)
    *path, last = every[place % len(every)]
    inner: Any = changed
    for step in path:
        inner = inner[step]
    inner[last] = odd
    return changed


@st.composite
def logs(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file's ending and its bytes: rows of one format or two, one of them odd, or no rows. Half of them hold token
    ids, which need no tokenizer."""
    row = draw(st.sampled_from([*ROWS, *ROWS[:1] * len(ROWS)]))
    odd = with_odd(row, draw(st.integers(0, 30)), draw(ODD))
    rows = [row, odd, draw(st.sampled_from([row, *ROWS]))] * draw(
        st.sampled_from([1, 1, 30])
    )
    text = "".join(json.dumps(each) + "\n" for each in rows)
    if draw(st.sampled_from([False, False, False, True])):
        text = draw(
            st.sampled_from(
                [
                    "",
                    "\x00",
                    "[" * 50_000,
                    '{"prompt":' * 2000,
                    text[: len(text) // 2],
                    "NaN\n",
                    "\ufeff",
                ]
            )
        )
    data = text.encode("utf-8", "surrogatepass")
    endings = [".jsonl", ".jsonl", ".json", ".jsonl.gz", ".parquet"]
    ending = draw(st.sampled_from(endings))
    is_compressed = draw(st.sampled_from([True, True, False]))
    if ending.endswith(".gz") and is_compressed:
        data = gzip.compress(data)
    return ending, data


@DRAWN
@given(log=logs(), draft=st.sampled_from(["ngram", "suffix", "ngram,suffix"]))
def test_logs_replayed(log: tuple[str, bytes], draft: str, tmp_path: Path) -> None:
    ending, data = log
    path = tmp_path / f"log{ending}"
    path.write_bytes(data)
    options = ("--draft", draft, "--jobs", "1", "-q", "-o", str(tmp_path / "out.toml"))
    case = Case(
        f"{ending} {data[:200]!r}",
        ("profile-acceptance", "--outputs", str(path), *options),
    )
    right(case, "logs replayed")


@DRAWN
@given(log=logs(), rate=st.sampled_from([(), ("--rate", "2"), ("--rate", "1e6")]))
def test_logs_planned(
    log: tuple[str, bytes], rate: tuple[str, ...], tmp_path: Path
) -> None:
    ending, data = log
    path = tmp_path / f"log{ending}"
    path.write_bytes(data)
    served = (
        "--model",
        "llama-3.1-8b",
        "--hardware",
        "h100-sxm-80gb",
        "--draft",
        "none",
    )
    case = Case(
        f"{ending} {data[:200]!r}", ("plan", *served, "--logs", str(path), *rate)
    )
    right(case, "logs planned")


def test_planted_faults_of_commands_and_logs_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of commands that looks beyond the end, and one of logs that divides by zero."""
    case = checked(tmp_path, STARTS["vllm"])
    assert judge(case, "planted").fault == ""

    def broken(text: str, **_: object) -> serve_command.ServeCommand:
        return serve_command.ServeCommand(engine="vllm", model=text[10**6])

    monkeypatch.setattr(serve_command, "read_serve_command", broken)
    assert "a traceback" in judge(case, "planted").fault
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n")
    options = (
        "--draft",
        "ngram",
        "--jobs",
        "1",
        "-q",
        "-o",
        str(tmp_path / "out.toml"),
    )
    replayed = Case("log", ("profile-acceptance", "--outputs", str(path), *options))
    assert judge(replayed, "planted").fault == ""

    def divides(document: Any, companions: Any) -> list[Any]:
        return [len(document) / 0]

    # an error of a kind that a damaged line causes would be counted, not raised
    monkeypatch.setattr(
        formats, "FORMATS", (("broken", lambda document: True, divides),)
    )
    assert "a traceback" in judge(replayed, "planted").fault


def test_a_planted_square_of_a_text_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that reads every empty line to the last: 12,000 of them take half a second, and else hundredths. The
    bound is eight times what this machine takes without it."""
    text = "\n" * 12_000 + START
    began = time.process_time()
    for _ in range(4):
        assert read_within(text, MOST_CPU_S, "before").fault == ""
    bound_s = 2 * (time.process_time() - began)
    monkeypatch.setattr(script, "LOOKS", re.compile(r"^\s*(?:import|from)\s", re.M))
    assert "a hang" in read_within(text, bound_s, "planted").fault


def test_a_planted_endless_loop_and_a_planted_line_before_json_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alarm ends the one; the other is one line on standard output."""
    case = checked(tmp_path, START)
    as_json = Case("as JSON", (*case.arguments, "--format", "json"), is_json=True)
    assert judge(as_json, "planted").fault == ""

    read = serve_command.read_serve_command

    def talks(text: str, **options: Any) -> serve_command.ServeCommand:
        print("assumed: nothing")
        return read(text, **options)

    with monkeypatch.context() as planted:
        planted.setattr(serve_command, "read_serve_command", talks)
        assert "no JSON document alone" in judge(as_json, "planted").fault

    def loops(text: str, **_: object) -> serve_command.ServeCommand:
        while text:
            pass
        raise AssertionError

    monkeypatch.setattr(surfaces, "HANGS_S", 1)
    monkeypatch.setattr(serve_command, "read_serve_command", loops)
    assert "a hang" in judge(case, "planted").fault
