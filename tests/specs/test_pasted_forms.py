"""Serve commands as people paste them: each form with its neighbours, what is open named with its
place, and bounds on any text."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
import tomllib
import types
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.errors import ConfigError
from magicdec.specs.serve_command import ServeCommand, read_serve_command
from magicdec.specs.serve_command.options import names_of

DATA = Path(__file__).resolve().parent.parent / "data" / "serve_commands.toml"
COMMANDS = tomllib.loads(DATA.read_text(encoding="utf-8"))["command"]


def read(text: str, **values: str) -> ServeCommand:
    return read_serve_command(text, reads_files=False, values=values)


def refusal(text: str) -> str:
    """Why a text is not read; empty: it is."""
    try:
        read(text)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("found", COMMANDS, ids=[found["name"] for found in COMMANDS])
def test_public_commands_are_read_whole(found: dict[str, Any]) -> None:
    """Every option is a field, is known to change no time, or is listed; or the text leaves one open."""
    if "asks" in found:
        assert refusal(found["text"]) == found["asks"]
        if "set" not in found:
            return
    command = read(found["text"], **found.get("set", {}))
    fields = msgspec.to_builtins(command)
    for name, value in found["is"].items():
        assert fields[name] == value, name
    draft = found.get("draft")
    assert (fields["speculation"] is None) == (draft is None)
    for name, value in (draft or {}).items():
        assert fields["speculation"][name] == value, name
    assert command.not_understood == found.get("listed", [])


WRAPPINGS = {
    "w01_subshell.sh": r"\$TP is set in a subshell \(line 2\): --set TP=4",
    "w02_pipe.sh": r"\$TP is set in a pipe \(line 2\): --set TP=4",
    "w03_prefix.sh": 2,
    "w04_function_local.sh": 2,
    "w05_unset.sh": r"\$TP is set by 'unset' \(line 2\): --set TP=4",
    "w06_arithmetic.sh": r"\$N is set by arithmetic \(line 2\): --set N=4",
    "w07_let.sh": r"\$N is set by arithmetic \(line 2\): --set N=4",
    "w08_loop.sh": r"\$TP is set in a loop \(line 1\): --set TP=4",
    "w09_last_of_array.sh": 4,
    "w10_returns.sh": "no server is started here",
    "w11_twice.txt": 2,
}
"""The ranks of the server that each starts, or what is asked, by what bash and Python do with them."""


@pytest.mark.parametrize("name", WRAPPINGS)
def test_a_wrapping_gives_its_server_or_asks(name: str) -> None:
    text = (DATA.parent / "wrappings" / name).read_text(encoding="utf-8")
    right = WRAPPINGS[name]
    if isinstance(right, str):
        assert re.match(right, refusal(text))
    else:
        assert read(text).tp_size == right


ASSIGNMENTS = st.sampled_from(
    (
        *("TP={n}", "export TP={n}", "A={n}", "TP=$A", 'TP="${{A:-{n}}}"', "TP=${{A}}"),
        *("(TP={n})", "echo x | TP={n}", "TP={n} true", "{{ TP={n}; }}", "unset TP"),
        *("let TP={n}", "((TP={n}))", "((TP++))", ": $((TP={n}))", "TP=$((TP+1))"),
        *("for i in 1; do TP={n}; done", "for TP in 1 {n}; do :; done", "TP={n} &"),
        *("if true; then TP={n}; fi", "if false; then TP={n}; fi", "false && TP={n}"),
        *("true && TP={n}", "false || TP={n}", "f() {{ TP={n}; }}", "f", "g"),
        *("g() {{ local TP={n}; }}", "case x in x) TP={n} ;; esac", "TP=({n} 1)"),
        *("read TP <<< {n}", "printf -v TP {n}", "declare TP={n}", "eval TP={n}"),
        *("while TP={n}; do break; done", "TP+={n}", ": ${{TP:={n}}}", "set -- {n}"),
        *("TP=$1", "A=(1 {n})", "TP=${{A[-1]}}", "TP=${{A##*/}}", "A=x/{n}", "unset A"),
        *("TP[0]={n}", "TP=`echo {n}`", "bash -c 'TP={n}'", "declare -n TP=A", "exit"),
    )
)
SERVERS = st.sampled_from(
    (
        *(
            "vllm serve m -tp $TP",
            'vllm serve m -tp "${TP:-5}"',
            "vllm serve m -tp ${TP-5}",
        ),
        *(
            "TP=7 vllm serve m -tp $TP",
            "(vllm serve m -tp $TP)",
            "vllm serve m -tp $TP | cat",
        ),
        *("bash -c 'vllm serve m -tp ${TP:-5}'", "TP=3 bash -c 'vllm serve m -tp $TP'"),
        *("true && vllm serve m -tp $TP", "if true; then vllm serve m -tp $TP; fi"),
        *("f() { vllm serve m -tp $TP; }; f", "f() { return; vllm serve m -tp 9; }; f"),
        *("for x in 1 2; do vllm serve m -tp $TP; done", "eval 'vllm serve m -tp $TP'"),
    )
)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(ASSIGNMENTS, st.integers(1, 9)), max_size=5),
    SERVERS,
    st.lists(st.tuples(ASSIGNMENTS, st.integers(1, 9)), max_size=2),
)
def test_no_wrapping_gives_another_server_in_silence(
    before: list[tuple[str, int]], server: str, after: list[tuple[str, int]]
) -> None:
    """bash itself, with a vllm that prints its ranks, says which server is the first."""
    lines = [line.format(n=n) for line, n in before]
    lines += [server, *(line.format(n=n) for line, n in after)]
    script = "\n".join(lines)
    try:
        command = read(script)
    except ConfigError:
        return  # asked for, or nothing is started
    if command.notes or command.problems:
        return
    stub = 'vllm() { echo "ranks=$4" >&2; }; export -f vllm\n'
    run = subprocess.run(
        ["bash", "-c", stub + script],
        check=False,
        capture_output=True,
        text=True,
        env={},
        timeout=20,
    )
    started = re.findall(r"ranks=(\d*)", run.stderr)
    assert started[:1] == [str(command.tp_size)], script


STATEMENTS = st.sampled_from(
    (
        *(
            "TP = {n}",
            "TP: int = {n}",
            "TP, PP = {n}, 1",
            "A = {n}",
            "TP = A",
            "TP = TP",
        ),
        *(
            "if True:\n    TP = {n}",
            "if False:\n    TP = {n}",
            "for TP in (1, {n}):\n    pass",
        ),
        *("for i in (1, 2):\n    TP = {n}", "while True:\n    TP = {n}\n    break"),
        *(
            "try:\n    TP = {n}\nexcept ValueError:\n    TP = 1",
            "TP += {n}",
            "TP = TP + {n}",
        ),
        *(
            "def f():\n    TP = {n}",
            "def g():\n    global TP\n    TP = {n}",
            "f()",
            "g()",
        ),
        *(
            "del TP",
            "TP = (lambda: {n})()",
            "class C:\n    TP = {n}",
            "TP = C.TP",
            "C.TP = {n}",
        ),
        *("TP = os.environ.get('NONE', {n})", "[TP for TP in (1, {n})]", "(TP := {n})"),
        *(
            "TP = [1, {n}][-1]",
            "TP = {{'a': {n}}}['a']",
            "TP = int('{n}')",
            "raise SystemExit",
        ),
        *("kw['tensor_parallel_size'] = {n}", "kw.update(tensor_parallel_size={n})"),
        *(
            "kw = dict(tensor_parallel_size={n})",
            "other = kw",
            "other['tensor_parallel_size'] = {n}",
        ),
        *(
            "if True:\n    kw = {{'tensor_parallel_size': {n}}}",
            "kw = {{**kw}}",
            "kw.clear()",
        ),
        "match 1:\n    case TP:\n        pass",
    )
)
ENGINES = st.sampled_from(
    (
        "LLM('m', tensor_parallel_size=TP)",
        "LLM('m', **kw)",
        "LLM('m', **{{'tensor_parallel_size': TP}})",
        "if True:\n    LLM('m', tensor_parallel_size=TP)",
        "for i in (1, 2):\n    LLM('m', tensor_parallel_size=TP)\n    TP = 9",
        "def main():\n    LLM('m', tensor_parallel_size=TP)\nmain()",
        "def main(TP=5):\n    LLM('m', tensor_parallel_size=TP)\nmain()",
        "def main():\n    return\n    LLM('m', tensor_parallel_size=9)\nmain()",
        "[LLM('m', tensor_parallel_size=TP) for TP in (3,)]",
        "if __name__ == '__main__':\n    LLM('m', tensor_parallel_size=TP)",
    )
)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(STATEMENTS, st.integers(2, 9)), max_size=5),
    ENGINES,
    st.lists(st.tuples(STATEMENTS, st.integers(2, 9)), max_size=2),
)
def test_no_python_gives_another_server_in_silence(
    before: list[tuple[str, int]], engine: str, after: list[tuple[str, int]]
) -> None:
    """Python itself, with an LLM that keeps its ranks, says which is the first."""
    lines = ["from vllm import LLM", "import os", "kw = {'tensor_parallel_size': 1}"]
    lines += [line.format(n=n) for line, n in before]
    lines += [engine.format(), *(line.format(n=n) for line, n in after)]
    script = "\n".join(lines)
    try:
        command = read(script)
    except ConfigError:
        return  # asked for, or nothing is started
    if command.notes or command.problems:
        return
    ranks: list[int] = []
    vllm = types.ModuleType("vllm")
    vllm.__dict__["LLM"] = lambda _, tensor_parallel_size=1: ranks.append(tensor_parallel_size)  # fmt: skip
    with mock.patch.dict(sys.modules, vllm=vllm), contextlib.suppress(SystemExit):
        try:
            exec(script, {"__name__": "__main__"})
        except (NameError, AttributeError, KeyError):
            if not ranks:
                return  # it ends before
    assert ranks[:1] == [command.tp_size], script


def test_there_are_thirty_with_their_sources() -> None:
    assert len(COMMANDS) >= 30
    assert all(found["source"] for found in COMMANDS)


@pytest.mark.parametrize(
    "text",
    [
        "sh -euxc 'exec vllm serve m --tensor-parallel-size 2'",
        "podman run --rm -e TP=2 img bash -lc 'vllm serve m -tp $TP'",
        'docker exec box bash -c "vllm serve m --tensor_parallel_size=2"',
        "ssh host 'nohup vllm serve m -tp 2 > log 2>&1 &'",
        "CMD='vllm serve m -tp 2'\neval \"$CMD\"",
        ': "${TP:=2}"\nvllm serve m -tp ${TP}',
        "bash <<'EOF'\nvllm serve m -tp 2\nEOF",
        "[Service]\nEnvironment=TP=2\nExecStart=/usr/bin/vllm serve m -tp $TP\n",
        "# Serve\n\n```bash\nvllm serve m -tp 2\n```\n",
        'FROM vllm/vllm-openai\nENTRYPOINT ["vllm", "serve"]\nCMD ["m", "-tp", "2"]\n',
        "import os\nfrom vllm import AsyncEngineArgs\nn = int(os.environ.get('TP', 2))\n"
        "AsyncEngineArgs(model='m', tensor_parallel_size=n)\n",
        "import subprocess\nsubprocess.run(['vllm', 'serve', 'm', f'-tp={2}'])\n",
        "from vllm import LLM\nkw = dict(model='m', tensor_parallel_size=2)\nLLM(**kw)\n",
        "services:\n  s:\n    image: vllm/vllm-openai\n    environment: [TP=2]\n"
        "    entrypoint: [bash, -c]\n    command: ['vllm serve m -tp $$TP']\n",
        "services:\n  s:\n    image: vllm/vllm-openai\n    command: --model m -tp ${A:-${B:-2}}\n",
        "x: &o {command: [vllm, serve, m, -tp, '2']}\nservices:\n  s: {<<: *o, image: v}\n",
        "kind: RayService\nspec:\n  serveConfigV2: |\n    applications:\n    - args:\n"
        "        llm_configs:\n        - model_loading_config: {model_id: m}\n"
        "          engine_kwargs: {tensor_parallel_size: 2}\n",
    ],
)
def test_each_wrapping_gives_the_same_server(text: str) -> None:
    command = read(text)
    assert (command.engine, command.model, command.tp_size) == ("vllm", "m", 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "echo start\nvllm serve m -tp $TP",
            r"\$TP is set nowhere in this file \(line 2\): --set TP=4",
        ),
        ('vllm serve "$MODEL"', r"\$MODEL is set nowhere .*--set MODEL=Qwen/Qwen3-8B"),
        (
            "TP=$(nvidia-smi -L | wc -l)\nvllm serve m -tp $TP",
            r"\$TP is computed when the script runs \(line 1\): --set TP=4",
        ),
        (
            "services:\n  s:\n    image: vllm/vllm-openai\n    command: --model m --tp ${TP}\n",
            r"\$TP is set nowhere in this file \(line 4\): --set TP=4",
        ),
        (
            "spec:\n  containers:\n  - command: [vllm, serve, m, -tp=$(TP)]\n",
            r"\$\(TP\) is set nowhere in this file \(line 3\): --set TP=4",
        ),
        (
            "spec:\n  containers:\n  - command: [vllm, serve, m, '-tp={{ .Values.tp }}']\n",
            r"\.Values\.tp is a chart's value \(line 3\): --set \.Values\.tp=4",
        ),
        (
            "from vllm import LLM\nimport os\nLLM(model=os.environ['MODEL'])\n",
            r"\$MODEL is set nowhere in this file \(line 3\)",
        ),
        (
            "vllm serve m --speculative-config "
            '"{\\"method\\": \\"ngram\\", \\"num_speculative_tokens\\": $K}"',
            r"\$K is set nowhere",
        ),
        (
            'serve() { vllm serve "$1" -tp "${2:-2}"; }\nserve m',
            r"\$1 is an argument of the function serve \(line 1\): --set 1=.*; \$2 is",
        ),
        (
            'TP=1\nif [ "$TP" -lt 2 ]; then TP=2; fi\nvllm serve m -tp $TP -pp $PP',
            r"\$TP is set under a condition \(line 2\): --set TP=4; \$PP .*\(line 3\)",
        ),
        ("N=1; vllm serve m -tp $((N * 2))", "computed .*: write its value there"),
        ('set -- -tp 2\nvllm serve m "$@"', r"\$@ is set by 'set' \(line 1\)"),
        ("E=\n$x && E='-tp 8'\nvllm serve m $E", r'--set E="--max-num-seqs 64"'),
        ("for N in 1 2; do vllm serve m -tp $N; done", r"\$N is set in a loop"),
        (
            "from vllm import LLM\nfor n in 1, 2:\n    LLM('m', tensor_parallel_size=n)\n",
            r"\$n is set in a loop \(line 2\): --set n=4",
        ),
        (
            "from vllm import LLM\ndef f(n=2):\n    LLM('m', tensor_parallel_size=n)\n",
            r"\$n is an argument of f \(line 2\)",
        ),
        (
            "from vllm import LLM\nn = 2\nn *= 2\nLLM('m', tensor_parallel_size=n)\n",
            r"\$n is not plainly set \(line 3\): --set n=4",
        ),
        (
            "from vllm import LLM\nkw = {}\nkw['model'] = 'm'\nLLM('m', **kw)\n",
            r"\$kw is not plainly set \(line 3\)",
        ),
        (
            'CMD="vllm serve m"\nif x; then CMD="$CMD -tp 2"; fi\n$CMD',
            r"\$CMD is set under a condition \(line 2\): --set CMD=",
        ),
        (
            "spec:\n  containers:\n  - command: [vllm, serve, m, -tp=$(TP)]\n"
            "    env: [{name: TP, valueFrom: {configMapKeyRef: {name: c}}}]\n",
            r"\$\(TP\) is taken from elsewhere .*--set TP=4",
        ),
    ],
)
def test_what_is_open_is_named_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_a_value_that_is_set_resolves_it() -> None:
    assert read("vllm serve $M -tp $TP", M="m", TP="2").tp_size == 2
    pod = "spec:\n  containers:\n  - command: [vllm, serve, m, -tp=$(TP)]\n"
    assert read(pod, TP="2").tp_size == 2
    template = (
        "spec:\n  containers:\n  - command: [vllm, serve, m, '-tp={{ .Values.tp }}']\n"
    )
    assert read(template, **{".Values.tp": "2"}).tp_size == 2
    script = "from vllm import LLM\nLLM(model='m', tensor_parallel_size=args.tp)\n"
    assert read(script, tp="2").tp_size == 2


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("vllm serve m -tp $TP", "TP"),
        ("M=m; T=2\nvllm serve $M -tp ${T:-1}", "M, T"),
        ("vllm serve m", "none"),
        ("spec:\n  containers:\n  - command: [vllm, serve, m, -tp=$(TP)]\n", "TP"),
        ("```\nvllm serve m -tp $TP\n```", "TP"),
        ("import os\nfrom vllm import LLM\nLLM(model=os.environ['M'])\n", "M"),
    ],
)
def test_a_name_that_the_text_does_not_ask_for_is_refused(
    text: str, asked: str
) -> None:
    with pytest.raises(ConfigError, match=rf"--set TPX: .* asks for {asked}$"):
        read(text, TPX="2")


def test_an_open_limit_is_said_and_the_rest_is_read() -> None:
    command = read("vllm serve m -tp 2 --max-num-seqs $MOST")
    assert (command.tp_size, command.max_num_seqs) == (2, None)
    assert command.problems == []
    (asked,) = command.asked
    assert asked.startswith("--max-num-seqs is not known: $MOST is set nowhere")
    assert asked.endswith("--set MOST=64")


def test_nothing_that_may_change_the_server_passes_in_silence() -> None:
    assert any("own arguments" in note for note in read('vllm serve m "$@"').notes)
    doubt = read("if nvidia-smi; then vllm serve m -tp 4; fi")
    assert "started under a condition (line 1)" in doubt.notes[0]
    function = read("serve() { vllm serve m -tp 4; }\nserve")
    assert "in the function serve (line 1)" in function.notes[0]
    lost = read(
        "vllm serve m \\\n  --max-num-seqs 8 \\\n  # --port 1 \\\n  --dtype half\n"
    )
    assert "no part of the command" in lost.notes[0]
    two = read("vllm serve a -tp 2 &\nvllm serve b &")
    assert "1 more server" in two.notes[0]


def test_options_are_known_by_version() -> None:
    kinds = names_of("vllm").kinds
    assert kinds["enforce-eager"] == "flag"
    assert kinds["max-num-seqs"] == "value"
    assert {"0.32.0", "0.33.0"} <= set(names_of("vllm").versions)
    old = read("docker run vllm/vllm-openai:v0.32.0 --model m --monokernel")
    assert old.problems == [
        "vLLM 0.32.0 has no --monokernel; it is in 0.33.0: the server does not start"
    ]
    unknown = read(
        'vllm serve m --speculative-config \'{"method": "mtp", "depth": 2}\''
    )
    assert unknown.not_understood == ["speculative-config.depth"]
    assert read("vllm serve m --num_lookahead_slots 3").not_understood
    file = "cat > a.yml <<E\nmax_batch: 3\nkv_cache_config: {odd: 1}\nE\n"
    settings_file = read(f"{file}trtllm-serve m --extra_llm_api_options a.yml")
    assert settings_file.not_understood == ["max_batch", "kv_cache_config.odd"]


def test_a_settings_file_is_read_beside_the_command(tmp_path: Path) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 4}
    text = json.dumps(
        {"model": "m", "speculative-config": config, "tensor-parallel-size": 4}
    )
    (tmp_path / "serve.yaml").write_text(text)
    command = read_serve_command(
        "vllm serve --config serve.yaml -tp 2", folder=tmp_path
    )
    assert command.tp_size == 2
    assert command.speculation is not None
    assert command.speculation.gamma == 4


MOST = 300_000
DOUBLING = "\n".join(
    ["a0: &a0 {x: 1}"]
    + [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40)]
)
ATTACKS = {
    "long names": "".join(f"{'B' * 20_000}{n}=$C{n}\n" for n in range(15))
    + "vllm serve m",
    "many open names": "vllm serve m " + "".join(f"$Q{n} " for n in range(15_000)),
    "arrays within arrays": "a=(" * (MOST // 3) + "vllm serve m",
    "open branches": "if a; then\n" * 20_000 + "vllm serve m",
    "brackets of a shell": "(" * MOST + "vllm serve m",
    "quotes within substitutions": "vllm serve m " + '"$(' * 90_000 + ')"' * 90_000,
    "lists that hold themselves": "from vllm import LLM\na=[1]\na.append(a)\nLLM(model=a)",
    "merge keys that double": f"{DOUBLING}\ncommand: vllm serve m\n",
    "blanks after a variable": "vllm serve m\nCUDA_VISIBLE_DEVICES" + " " * MOST,
    "images": "vllm/vllm-openai " * 5000,
    "quotes": "vllm serve m " + "'" * MOST,
    "expansions": "vllm serve m " + "$(" * (MOST // 2),
    "defaults": "vllm serve m " + "${a:-" * (MOST // 5),
    "a variable that doubles": "A=vllm\n" + 'A="$A$A"\n' * 60 + "$A serve m",
    "a value that is put in often": "A="
    + "x" * 190_000
    + '\nvllm serve "'
    + "$A" * MOST
    + '"',
    "an array that doubles": "A=(vllm)\n"
    + 'A+=("${A[@]}" "${A[@]}")\n' * 60
    + "vllm serve m",
    "a function that calls itself": "f() { f; f; }\nf\nvllm serve m",
    "lists that double": "from vllm import LLM\na0=[1]\n"
    + "\n".join(f"a{n}=[a{n - 1},a{n - 1}]" for n in range(1, 60))
    + "\nLLM(model=a59)\n",
    "texts that double": "from vllm import LLM\na0='"
    + "x" * 20_000
    + "'\n"
    + "\n".join(f"a{n}=f'{{a{n - 1}}}{{a{n - 1}}}'" for n in range(1, 20))
    + "\nLLM(model=a19)\n",
    "numbers that square": "N=9\n" + "N=$((N*N))\n" * 40 + "vllm serve m -tp $N",
    "numbers of many digits": f"from vllm import LLM\nLLM(model='m', a=0x{'f' * 6000})\n",
    "brackets": "a: " + "[" * MOST,
    "template": "a: {{ .Values.x }}\n" * (MOST // 20) + "command: vllm serve m\n",
    "compose": "services:\n  a:\n    image: vllm/vllm-openai\n    command: --model m "
    + "${A:-" * (MOST // 5),
    "objects": "vllm serve m --speculative-config '{" + "a:b," * (MOST // 4) + "}'",
}


END_CPU_S = 30.0
"""Processor time in which a third of the longest text is refused: some tenths of a second on any machine, and minutes
where the time grows with the square of its length or doubles with each line."""


@pytest.mark.parametrize("name", ATTACKS)
def test_any_text_ends_soon(name: str) -> None:
    before = time.process_time()
    assert len(refusal(ATTACKS[name])) < 1000
    assert time.process_time() - before < END_CPU_S


WORD = st.sampled_from(
    (
        *("vllm", "serve", "m", "-tp", "2", "--model", "$X", '"$X"', "${X:-2}", "$(a)"),
        *("'", '"', "(", ")", "{", "}", "[", "]", "|", "&&", ";", "<<E", "E", ">", "#"),
        *("if", "then", "fi", "for", "in", "do", "done", "case", "esac", "`b`", "%"),
        *("a:", "- b", "&a", "*a", "{{ .Values.a }}", "<<: *a", "LLM(", "=", ","),
        *("import x\n", "\n", "\\", "\0", "é", "--config"),
    )
)


@settings(max_examples=60)
@given(st.lists(WORD, max_size=40))
def test_any_words_are_a_command_or_one_line(words: list[str]) -> None:
    for text in (" ".join(words), f"vllm serve m {' '.join(words)}"):
        assert len(refusal(text)) < 1000


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("vllm serve --enable-prefix-caching Qwen/Qwen3-8B", {"has_prefix_cache": True}),
        ("vllm serve --no-enable-chunked-prefill Qwen/Qwen3-8B -tp 2", {"tp_size": 2}),
        ("vllm serve --hf-token word Qwen/Qwen3-8B", {}),
        ("vllm serve --cudagraph-capture-sizes 1 2 4 -- Qwen/Qwen3-8B", {"captured_tokens": 4}),
        (
            "docker run --entrypoint vllm vllm/vllm-openai:v0.20.0 serve Qwen/Qwen3-8B",
            {"engine": "vllm", "version": "0.20.0"},
        ),
        ("docker run --rm --entrypoint=/usr/bin/vllm own/image serve Qwen/Qwen3-8B -tp 2", {"tp_size": 2}),
        (
            "docker run --entrypoint trtllm-serve nvcr.io/nvidia/tensorrt-llm/release:1.2.0 Qwen/Qwen3-8B",
            {"engine": "trtllm", "version": "1.2.0"},
        ),
        ("$ export TP=2\n$ vllm serve Qwen/Qwen3-8B -tp $TP", {"tp_size": 2}),
        ("(env) me@host:~/x$ vllm serve Qwen/Qwen3-8B \\\n>   --max-num-seqs 4", {"max_num_seqs": 4}),
        ("> vllm serve Qwen/Qwen3-8B -tp 2", {"tp_size": 2}),
        ("> $ vllm serve Qwen/Qwen3-8B \\\n>   -tp 2 \\\n> --max-num-seqs 8", {"tp_size": 2, "max_num_seqs": 8}),
        ("It is slow:\n> ```bash\n> vllm serve Qwen/Qwen3-8B -tp 2\n> ```\n> Why?", {"tp_size": 2}),
        ("root@host:/# N=4\nroot@host:/# vllm serve Qwen/Qwen3-8B -tp $N > log.txt", {"tp_size": 4}),
    ],
)  # fmt: skip
def test_a_command_that_its_engine_takes_is_read(
    text: str, fields: dict[str, Any]
) -> None:
    """Options before the model, an entry point, a terminal's prompts, a quotation."""
    command = read(text)
    assert command.model == "Qwen/Qwen3-8B"
    for name, value in fields.items():
        assert getattr(command, name) == value, name
    assert not command.not_understood
    assert not command.problems


DIGITS = "9" * 400


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"vllm serve m -tp {DIGITS}", "-tp must be a whole number"),
        (f"""vllm serve m --speculative-config '{{"method": "ngram", "num_speculative_tokens": {DIGITS}}}'""", "must"),
        (f"vllm serve m --num-gpu-blocks-override {10**16}", "must be a whole number"),
        (f"docker run --gpus {DIGITS} vllm/vllm-openai --model m", ""),
        (f"SGLANG_SIMULATE_ACC_LEN={DIGITS} python -m sglang.launch_server --model-path m "
         "--speculative-algorithm NGRAM", ""),
        (f"pip install vllm=={DIGITS * 20}\nvllm serve m", ""),
    ],
)  # fmt: skip
def test_a_number_of_hundreds_of_digits_is_refused_or_unread(
    text: str, said: str
) -> None:
    assert said in refusal(text)
    if not said:
        assert read(text).num_gpus is None
