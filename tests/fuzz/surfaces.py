"""Every surface that reads what others wrote, each with a generator of seeded damage; and a judge of what comes of it.

    python -m tests.fuzz     logs, commands, loads and the page, with a table of what came of them (make fuzz)

Whatever a file, an option or a server holds: an answer of finite numbers or one line that says what is wrong, never a
traceback, nothing that acts on a terminal, and an end.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import threading
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import msgspec
import tomli_w

from magicdec.schema.record import read_many
from magicdec.specs.catalog import EMBEDDED_DIRECTORY, MODELS_DIRECTORY
from magicdec.specs.engine import ENGINES_DIRECTORY
from tests.fuzz.damage import damaged, damaged_bytes, finite_everywhere, parsed

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "results" / "demo-2-cores.jsonl"
QUANTIZED = ROOT / "tests" / "data" / "quantized"
HARDWARE_DIRECTORY = MODELS_DIRECTORY.parent / "hardware"
QUICK = ("--batch", "8", "--context", "2048", "--gamma", "3", "--draft-budget", "256")
QUICK_PLAN = ("plan", *QUICK, "--format", "json")
SERVED = ("--model", "llama-3.1-8b", "--hardware", "h100-sxm-80gb")
LONGEST_LINE = 1000
STATUS = Path("/proc/self/status")
FORGET_PEAK = Path("/proc/self/clear_refs")
HANGS_S = 60
"""Processor time after which a case is ended, which takes a second: a busy machine makes no hang. One that waits is
ended after ten times that."""
SHARD_CUTS = 12


class Case(NamedTuple):
    """A command, and how what it reads was damaged."""

    what: str
    arguments: tuple[str, ...]
    is_json: bool = False


class Verdict(NamedTuple):
    """`fault` is empty where the program did right: an answer (0) or a refusal (2)."""

    code: int
    fault: str


class Hang(BaseException):
    """A case did not end."""


@dataclass
class Tally:
    """Counts of what came of a surface's cases."""

    answered: int = 0
    refused: int = 0
    tracebacks: int = 0
    hangs: int = 0
    others: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    peak_mib: float = 0.0

    @property
    def faults(self) -> int:
        return self.tracebacks + self.hangs + self.others

    def count(self, verdict: Verdict, seconds: float, added_mib: float) -> None:
        if "a traceback" in verdict.fault:
            self.tracebacks += 1
        elif "a hang" in verdict.fault:
            self.hangs += 1
        elif verdict.fault:
            self.others += 1
        elif verdict.code == 0:
            self.answered += 1
        else:
            self.refused += 1
        self.seconds += seconds
        self.slowest_s = max(self.slowest_s, seconds)
        self.peak_mib = max(self.peak_mib, added_mib)


class Memory:
    """What one case adds to this process at its peak, and the largest process that it started.

    A test runs after thousands of others in one process, whose own peak says nothing of the case. Linux forgets the
    peak (proc(5), clear_refs); elsewhere the peak counts where the case raises it.
    """

    def __init__(self) -> None:
        self.can_forget = sys.platform == "linux" and os.access(FORGET_PEAK, os.W_OK)
        if self.can_forget:
            FORGET_PEAK.write_text("5")
        self.before_mib = self._resident_peak_mib()
        self.largest_child_before_mib = _largest_mib(resource.RUSAGE_CHILDREN)

    def added_mib(self) -> float:
        """Of a started process the whole, where it is the largest yet."""
        added_mib = self._resident_peak_mib() - self.before_mib
        largest_child_mib = _largest_mib(resource.RUSAGE_CHILDREN)
        if largest_child_mib > self.largest_child_before_mib:
            added_mib = max(added_mib, largest_child_mib)
        return added_mib

    def _resident_peak_mib(self) -> float:
        if not self.can_forget:
            return _largest_mib(resource.RUSAGE_SELF)
        status = dict(
            line.split(":", 1)
            for line in STATUS.read_text().splitlines()
            if ":" in line
        )
        return float(status["VmHWM"].split()[0]) / 1024


def _largest_mib(whose: int) -> float:
    return resource.getrusage(whose).ru_maxrss / 1024


TALLIES: dict[str, Tally] = {}
"""By surface, of this process."""
NOT_COUNTED = ("planted", "others")
"""Surfaces with faults that tests plant."""


def judge(case: Case, surface: str = "others") -> Verdict:
    """Runs a command in this process, looks at its exit code and all that it printed, and counts."""
    memory = Memory()
    began = time.perf_counter()
    verdict = _judged(case)
    seconds = time.perf_counter() - began
    TALLIES.setdefault(surface, Tally()).count(verdict, seconds, memory.added_mib())
    return verdict


def _judged(case: Case) -> Verdict:
    from magicdec.cli import main

    def hang(*_: object) -> None:
        raise Hang

    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)
    }
    out, err, code = io.StringIO(), io.StringIO(), 0
    for number in (signal.SIGPROF, signal.SIGALRM):
        handlers[number] = signal.signal(number, hang)
    signal.setitimer(signal.ITIMER_PROF, HANGS_S)
    signal.alarm(10 * HANGS_S)
    try:
        with (
            mock.patch.object(sys, "argv", ["magicdec", *case.arguments]),
            mock.patch.object(warnings, "formatwarning", warnings.formatwarning),
            contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
        ):  # fmt: skip
            main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    except Hang:
        return Verdict(-1, f"a hang: {case.what}")
    except Exception:
        return Verdict(
            1, f"a traceback: {case.what}: {traceback.format_exc().splitlines()[-1]}"
        )
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Verdict(code, _fault(case, code, out.getvalue(), err.getvalue()))


def _fault(case: Case, code: int, out: str, err: str) -> str:
    if code not in (0, 2):
        return f"exit code {code}: {case.what}"
    if not all(each.isprintable() or each == "\n" for each in out + err):
        return f"an escape sequence: {case.what}"
    if code == 2:
        line = err.splitlines()[-1] if err else ""
        if (
            not line.startswith("magicdec: ")
            or len(line) >= LONGEST_LINE
            or "Traceback" in err
        ):
            return f"no line of an error: {case.what}: {err[:300]!r}"
    elif case.is_json:
        try:
            document = parsed(out)
        except ValueError as failure:
            return f"no JSON document alone: {case.what}: {failure}"
        if not finite_everywhere(document):
            return f"a number that is none: {case.what}"
    return ""


def faults(cases: Iterator[Case], surface: str = "planted") -> list[str]:
    """Each fault. Raises AssertionError where not some cases are answered and some refused: they test nothing then."""
    found = [judge(case, surface) for case in cases]
    assert {0, 2} <= {each.code for each in found}, "one kind of outcome only"
    return [each.fault for each in found if each.fault]


def model_configurations(folder: Path, count: int) -> Iterator[Case]:
    file = folder / "config.json"
    for name in ("llama-3.1-8b", "qwen3-30b-a3b", "mistral-7b-v0.1"):
        document = json.loads((MODELS_DIRECTORY / f"{name}.json").read_text())
        for what, changed in [
            ("as it is", document),
            *damaged(document, count=3 * count, seed=1),
        ]:
            file.write_text(json.dumps(changed))
            yield Case(f"{name}: {what}", (*QUICK_PLAN, "--model", str(file)), True)


def profiles(folder: Path, count: int) -> Iterator[Case]:
    """Of devices, engines and acceptance."""
    from magicdec.perfmodel.acceptance import PROFILES_DIRECTORY

    file = folder / "profile.toml"
    for directory, name, option in (
        (HARDWARE_DIRECTORY, "h100-sxm-80gb", "--hardware"),
        (HARDWARE_DIRECTORY, "l4-24gb", "--hardware"),
        (ENGINES_DIRECTORY, "magicdec-2024", "--engine"),
    ):
        document = tomllib.loads((directory / f"{name}.toml").read_text())
        for what, changed in damaged(document, count=2 * count, seed=2):
            try:
                file.write_text(tomli_w.dumps(changed))
            except (TypeError, ValueError, RecursionError):  # TOML has no such value
                continue
            yield Case(f"{name}: {what}", (*QUICK_PLAN, option, str(file)), True)
    document = json.loads(
        (PROFILES_DIRECTORY / "llama-3.1-8b-streamingllm-pg19.json").read_text()
    )
    acceptance = folder / "acceptance.json"
    for what, changed in damaged(document, count=3 * count, seed=3):
        acceptance.write_text(json.dumps(changed))
        yield Case(
            f"acceptance: {what}", (*QUICK_PLAN, "--acceptance", str(acceptance)), True
        )


def records(folder: Path, count: int) -> Iterator[Case]:
    """Listed and, with extreme numbers, drawn."""
    rows = [
        msgspec.to_builtins(row) | {"schema_version": row.schema_version}
        for row in read_many([RECORDS])
    ]
    good, file = json.dumps(rows[0]), folder / "records.jsonl"
    for what, changed in damaged(rows[-1], count=4 * count, seed=4):
        file.write_text(f"{json.dumps(changed)}\n{good}\n")
        yield Case(
            f"ls as JSON: {what}", ("records", "ls", str(file), "--format", "json")
        )
        yield Case(f"ls: {what}", ("records", "ls", str(file)))
    yield Case(
        "ls: no record", ("records", "ls", str(MODELS_DIRECTORY / "llama-3.1-8b.json"))
    )
    numbers = [name for name, value in rows[-1].items() if isinstance(value, float)]
    rng = random.Random(5)
    for _ in range(max(1, count // 6)):
        extreme = [dict(row) for row in rows]
        name, value = rng.choice(numbers), rng.choice([1e308, 1e-320, 0.0, -1.0, 1e22])
        extreme[rng.randrange(len(rows))][name] = value
        file.write_text("".join(json.dumps(row) + "\n" for row in extreme))
        yield Case(
            f"report: {name} = {value}",
            ("report", str(file), "-o", str(folder / "report.html")),
        )


def damaged_files(folder: Path, count: int) -> Iterator[Case]:
    for source, name, command in (
        (
            MODELS_DIRECTORY / "llama-3.1-8b.json",
            "config.json",
            (*QUICK_PLAN, "--model"),
        ),
        (
            HARDWARE_DIRECTORY / "a100-sxm-80gb.toml",
            "device.toml",
            (*QUICK_PLAN, "--hardware"),
        ),
        (ENGINES_DIRECTORY / "ours.toml", "engine.toml", (*QUICK_PLAN, "--engine")),
        (RECORDS, "records.jsonl", ("records", "ls")),
    ):
        for what, changed in damaged_bytes(
            source.read_bytes()[:20_000], count=2 * count, seed=6
        ):
            (folder / name).write_bytes(changed)
            yield Case(f"{name}: {what}", (*command, str(folder / name)))


def options(folder: Path, count: int) -> Iterator[Case]:
    """Any value of any option of the commands that compute."""
    import typer

    from magicdec.cli import app, register_commands

    register_commands()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    values = ["", "x", "-1", "0", "1", "3", "1.5", "nan", "inf", "1e400", str(10**22), "1-3000000000", "1,,2", "a,b",
              "\u00e9", "-", "..", "/", "8,16", "0.5", "bf16", "self", "32k", "%s", "a" * 5000, "\x1b[2J"]  # fmt: skip
    rng = random.Random(7)
    each_in_turn = cycle(rng.sample(values, len(values)))  # none is left to chance
    with contextlib.chdir(folder):  # options name files to write
        for name, usual in {
            "plan": QUICK_PLAN,
            "sensitivity": ("sensitivity",),
        }.items():
            names = [
                each
                for param in commands[name].params
                for each in param.opts
                if each.startswith("--")
            ]
            flags = {
                each
                for param in commands[name].params
                if param.is_flag
                for each in param.opts
            }
            for _ in range(6 * count):
                chosen = rng.sample(
                    sorted({*names} - flags - {"--output", "--format"}),
                    rng.choice((1, 1, 2)),
                )
                given = [
                    part for option in chosen for part in (option, next(each_in_turn))
                ]
                yield Case(
                    f"{name} {' '.join(given)[:200]}", (*usual, *given), name == "plan"
                )


def plans(folder: Path, count: int) -> Iterator[Case]:
    """A plan's document, exported, and run up to where ranks would start."""
    import magicdec

    answer = magicdec.plan(
        model="embedded", batch=2, context=120, gen_len=5, acceptance_rate=0.9, weight_dtype="fp32", kv_dtype="fp32",
        draft_budget=32, gamma=2, draft="self", tp=1,
    )  # fmt: skip
    document, file = json.loads(answer.to_json()), folder / "plan.json"
    with mock.patch("magicdec.runtime.launch.launch_ranks", side_effect=SystemExit(0)):
        for what, changed in [
            ("as it is", document),
            *damaged(document, count=3 * count, seed=8),
        ]:
            file.write_text(json.dumps(changed))
            yield Case(f"run: {what}", ("run", "--quiet", "--plan", str(file)))
            yield Case(f"export: {what}", ("export", "vllm", str(file)))


def shards(folder: Path, count: int) -> Iterator[Case]:
    """Weights in published formats, cut at 12 places each: in the length of the header, the header and the numbers; and
    with bytes of the header changed."""
    run = (
        "--batch=1",
        "--context=24",
        "--gen-len=2",
        "--draft=none",
        "--repetitions=1",
        "--quiet",
        "--prompts=random",
    )
    rng = random.Random(9)
    whole = sorted(
        path for path in QUANTIZED.iterdir() if (path / "model.safetensors").exists()
    )
    for source in (
        EMBEDDED_DIRECTORY,
        *rng.sample(whole, min(len(whole), max(1, count // 10))),
    ):
        model = Path(shutil.copytree(source, folder / source.name, dirs_exist_ok=True))
        shard = model / "model.safetensors"
        data, command = shard.read_bytes(), ("run", "--model", str(model), *run)
        header = 8 + int.from_bytes(data[:8], "little")
        cuts = [0, 1, 7, 8, 9, header - 1, header, header + 1, len(data) - 1]
        cuts += [rng.randrange(len(data)) for _ in range(SHARD_CUTS - len(cuts))]
        for cut in cuts:
            shard.write_bytes(data[:cut])
            yield Case(f"{source.name} cut at {cut} of {len(data)}", command)
        for what, changed in damaged_bytes(
            data[:header], count=max(1, count // 3), seed=10
        ):
            shard.write_bytes(changed + data[header:])
            yield Case(f"{source.name}: {what}", command)
        shard.write_bytes(data)
    yield Case("whole", ("run", "--model", str(folder / EMBEDDED_DIRECTORY.name), *run))


def scrape(
    *,
    accepted: list[float],
    drafts: float = 100.0,
    tokens: float = 600.0,
    model: str = "m",
) -> str:
    """vLLM's metrics."""
    label = f'model_name="{model}",engine="0"'
    rows = {
        "spec_decode_num_drafts_total": drafts, "spec_decode_num_draft_tokens_total": drafts * len(accepted),
        "spec_decode_num_accepted_tokens_total": sum(accepted), "generation_tokens_total": tokens,
        "time_to_first_token_seconds_count": 10, "inter_token_latency_seconds_count": tokens / 2,
        "inter_token_latency_seconds_sum": tokens / 50, "num_requests_running": 8,
        "request_prompt_tokens_sum": 100 * tokens, "request_prompt_tokens_count": 10 + drafts / 100,
        "request_generation_tokens_sum": tokens,
    }  # fmt: skip
    lines = [f"vllm:{name}{{{label}}} {value}" for name, value in rows.items()]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines += [
        f'{name}{{{label},position="{at}"}} {count}'
        for at, count in enumerate(accepted)
    ]
    return "\n".join(lines) + "\n"


MODELS = {
    "object": "list",
    "data": [{"id": "m", "object": "model", "max_model_len": 4096}],
}
EVENT = {
    "object": "text_completion",
    "choices": [{"text": "a", "index": 0}],
    "usage": {"completion_tokens": 1},
}
LOCATIONS = ("http://[", "//", "", "http://a:99999/", "\x1b[2J", "\udcff", "?a=1", "http://u:p@127.0.0.1/", "ftp://x",
             "http://127.0.0.1:0/\x00", "/" + "a" * 70_000, "http://xn--\u00e9/", "/metrics", "http://127.0.0.1:1:1/",
             "http://\ufffe/")  # fmt: skip
HEADS = ("HTTP/1.1 999 \x1b[2J", "HTTP/9.9 200 OK", "HTTP/1.1 -1 OK", "HTTP/1.1", "", "\x1b]0;owned\x07",
         "HTTP/1.1 200 OK\r\nContent-Length: -1", "HTTP/1.1 200 OK\r\nContent-Length: 9" + "9" * 30,
         "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2", "HTTP/1.1 200 OK\r\nContent-Length: x",
         "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", "HTTP/1.1 200 OK\r\nContent-Encoding: gzip",
         "HTTP/1.1 200 OK\r\n" + "X: y\r\n" * 20_000, "HTTP/1.1 200 OK\r\nX: " + "y" * 200_000, "HTTP/1.1 204 No",
         "HTTP/1.1 100 Continue", "HTTP/1.1 101 Switching", "HTTP/1.1 200 OK\r\nX\x00: \x1b[2J")  # fmt: skip


class Server:
    """A server that writes raw bytes for each path's answer and closes. `answers` give them from a request's body."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[bytes], bytes]] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(
                    target=self._answer, args=(connection,), daemon=True
                ).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), connection:
            file = connection.makefile("rb")
            path, length = file.readline().decode().split(" ")[1], 0
            while (line := file.readline()).strip():
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            give = self.answers.get(
                path, lambda _: answer(b"", "HTTP/1.1 404 Not Found")
            )
            connection.sendall(give(file.read(length)))

    def close(self) -> None:
        self._listener.close()


def answer(
    body: bytes, head: str = "HTTP/1.1 200 OK", length: int | None = None
) -> bytes:
    lines = f"{head}\r\nContent-Length: {len(body) if length is None else length}\r\nConnection: close\r\n\r\n"
    return lines.encode("utf-8", "surrogateescape") + body


def damaged_answers(
    body: bytes, others: Iterator[tuple[str, bytes]], *, count: int
) -> Iterator[tuple[str, bytes]]:
    """`count` raw answers: heads, lengths and redirects out of order, bodies cut, and `others` in whole answers."""
    kinds = [
        (f"head {head[:40]!r}", head.encode() + b"\r\n\r\n" + body) for head in HEADS
    ]
    kinds += [
        (f"to {place[:40]!r}", answer(b"", f"HTTP/1.1 307 Go\r\nLocation: {place}"))
        for place in LOCATIONS
    ]
    kinds += [
        (f"length {by:+}", answer(body, length=max(0, len(body) + by)))
        for by in (-10, -1, 1, 1000)
    ]
    kinds += [
        ("no end", answer(b"# \n" * 6_000_000)),
        ("nothing", b""),
        ("half a head", b"HTTP/1.1 200 OK\r\nCont"),
    ]
    kinds += [
        (what, answer(changed))
        for what, changed in damaged_bytes(body, count=count // 4 + 1, seed=11)
    ]
    kinds += [
        (what, answer(changed))
        for (what, changed), _ in zip(others, range(count), strict=False)
    ]
    random.Random(12).shuffle(kinds)
    yield from kinds[:count]


def _damaged_metrics(text: str) -> Iterator[tuple[str, bytes]]:
    rng, lines = random.Random(13), text.splitlines()
    values = (
        "NaN",
        "1e308",
        "-1",
        "0",
        "1e-320",
        "+Inf",
        "x",
        "9" * 400,
        "0x1p3",
        "1e5 1e400",
        "",
    )
    while True:
        at, value = rng.randrange(len(lines)), rng.choice(values)
        name, _, _ = lines[at].rpartition(" ")
        changed = [*lines[:at], f"{name} {value}", *lines[at + 1 :]]
        yield f"{name} = {value[:20]}", "\n".join(changed).encode() + b"\n"
        name = rng.choice(("\x1b[2J", 'a\\"b', "\\n", "é" * 5000, "\x00", "m\\"))
        yield (
            f"model {name[:20]!r}",
            text.replace('model_name="m"', f'model_name="{name}"').encode() + b"\n",
        )


def _rising() -> Iterator[str]:
    """A server's metrics, one after the other."""
    number = 1
    while True:
        yield scrape(
            accepted=[80 * number, 60 * number, 40 * number],
            drafts=100 * number,
            tokens=600 * number,
        )
        number += 1


def watched_servers(folder: Path, count: int) -> Iterator[Case]:
    """`observe` of servers whose second answer is damaged; a tenth of them answer well."""
    server = Server()
    try:
        looking = ("--seconds", "0.4", "--interval", "0.2")
        command = ("observe", server.address, "--draft", "ngram", *SERVED, *looking)
        rising = _rising()
        good = next(rising)
        bad = list(damaged_answers(good.encode(), _damaged_metrics(good), count=count))
        for what, raw in [("as it is", b""), *bad]:
            scrapes = iter([answer(next(rising).encode()), raw] if raw else [])
            server.answers["/metrics"] = lambda _, scrapes=scrapes: (
                next(scrapes, None) or answer(next(rising).encode())
            )
            yield Case(f"{command[0]}: {what}", command)
    finally:
        server.close()


def stream(body: bytes, damage: dict[int, bytes] | None = None) -> bytes:
    """The events that a request asks for, some of them replaced."""
    damage = damage or {}
    events = [
        damage.get(at)
        or json.dumps(EVENT | {"usage": {"completion_tokens": at + 1}}).encode()
        for at in range(json.loads(body)["max_tokens"])
    ]
    return answer(
        b"".join(b"data: " + event + b"\n\n" for event in [*events, b"[DONE]"])
    )


def calibration(
    address: str, folder: Path
) -> tuple[tuple[str, ...], dict[str, Callable[[bytes], bytes]]]:
    """`calibrate --server` with nine small loads, and a server's good answers to it."""
    command = ("calibrate", "--server", address, *SERVED, "--concurrency", "1,2,3", "--prompt-len", "8,16,32",
               "--output-len", "16", "--rounds", "1", "--quiet", "-o", str(folder / "server.toml"))  # fmt: skip
    return command, {
        "/v1/models": lambda _: answer(json.dumps(MODELS).encode()),
        "/v1/completions": stream,
    }


def calibrated_servers(folder: Path, count: int) -> Iterator[Case]:
    """`calibrate --server` of servers that list models, count or stream badly."""
    server = Server()
    command, fine = calibration(server.address, folder)
    listed = (
        (what, json.dumps(each).encode())
        for what, each in damaged(MODELS, count=10 * count, seed=14)
    )
    streamed = ((what, b"data: " + json.dumps(each).encode() + b"\n\n")
                for what, each in damaged(EVENT, count=10 * count, seed=15))  # fmt: skip
    event = b"data: " + json.dumps(EVENT).encode() + b"\n\n"
    try:
        server.answers = dict(fine)
        yield Case("dry", (*command, "--dry-run"))
        for what, raw in damaged_answers(
            json.dumps(MODELS).encode(), listed, count=count // 2
        ):
            server.answers = fine | {"/v1/models": lambda _, raw=raw: raw}
            yield Case(f"models: {what}", (*command, "--dry-run"))
        for what, raw in damaged_answers(event, streamed, count=count // 4):
            server.answers = fine | {"/v1/completions": lambda _, raw=raw: raw}
            yield Case(f"stream: {what}", command)
        for what, changed in damaged(EVENT, count=count // 2, seed=16):
            twice = dict.fromkeys((0, 3), json.dumps(changed).encode())
            server.answers = fine | {
                "/v1/completions": lambda body, twice=twice: stream(body, twice)
            }
            yield Case(f"event: {what}", command)
    finally:
        server.close()


SURFACES: dict[str, Callable[[Path, int], Iterator[Case]]] = {
    "model configurations": model_configurations, "profiles": profiles, "records": records,
    "bytes of files": damaged_files, "options": options, "plans": plans, "shards of weights": shards,
    "servers watched": watched_servers, "servers calibrated": calibrated_servers,
}  # fmt: skip
"""By name: a generator of about 5 to 10 times `count` cases that leaves their files in a folder."""
