"""The bytes that users see, of the package that is importable: run by scripts/proof.py surfaces for both sides.

    python scripts/proof_surfaces.py COMMANDS.json SURFACES.json            what commands print, and files they write
    python scripts/proof_surfaces.py --tokens SURFACES.json                 what drawn models speak

All command lines run in this one process, in the current folder. Dates and what a run measured are masked. A command
that the package no longer has answers nothing.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import re
import sys
import tempfile
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

MASKED = re.compile(r"/tmp/[\w/.-]+|\d{4}-\d\d-\d\d[T ]?\d\d:\d\d[\d:.+Z]*")
DATED = re.compile(r'datetime="[^<]*')
MEASURED = re.compile(
    r'"[a-z_]*(_s|_bytes|_per_s|mbu|mfu|speedup|commit|host|time)[a-z_0-9]*": ?[^,}]+'
)
WRITTEN = (".json", ".jsonl", ".html", ".svg", ".csv", ".toml")
TODAY = re.compile(r"20\d\d-\d\d-\d\d")


def called(words: list[str]) -> tuple[str, bool]:
    """Runs a command line: the text that it prints, and whether the package has that command."""
    from magicdec.cli import main

    out, err = (
        io.TextIOWrapper(io.BytesIO(), "utf-8"),
        io.TextIOWrapper(io.BytesIO(), "utf-8"),
    )
    sys.argv = ["magicdec", *words]
    code: object = None
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        except Exception as error:  # a bug of either side is an answer that is compared
            code = f"{type(error).__name__}: {error}"
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    is_known = "unknown command" not in texts[1] and "No such command" not in texts[1]
    return f"{code}\n{texts[0]}\n{texts[1]}", is_known


def named(words: list[str]) -> str:
    """The command line on one line, long texts by their beginning and a hash."""
    found = []
    for word in words:
        plain = " ".join(word.split())
        if len(plain) > 60 or plain != word:
            plain = f"'{plain[:60]}...{hashlib.sha256(word.encode()).hexdigest()[:6]}'"
        found.append(plain)
    return " ".join(found)


def surfaces(commands: list[list[str]]) -> dict[str, str]:
    """Texts that commands print, and the files that they write."""
    folder = Path.cwd()
    found: dict[str, str] = {}
    held = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    for number, words in enumerate(commands):
        name = named(words)
        printed, is_known = called(words)
        if not is_known and len(words) > 1:
            continue
        is_run = words[0] == "run" and "--help" not in words
        found[name] = "" if is_run else MASKED.sub("*", printed)
        for path in sorted(folder.iterdir()):
            written = path.stat().st_mtime_ns
            if held.get(path.name) == written or path.suffix not in WRITTEN:
                continue
            held[path.name] = written
            text = MASKED.sub("*", DATED.sub("*", path.read_text(encoding="utf-8")))
            if path.suffix == ".jsonl":
                text = MEASURED.sub("*", text)
            found[f"{name}: {path.name}"] = (
                TODAY.sub("*", text) if path.suffix != ".json" else text
            )
        if number % 50 == 49:
            print(
                f"{number + 1} of {len(commands)} commands", file=sys.stderr, flush=True
            )
    return found


def tokens() -> dict[str, str]:
    """By drawn architecture: greedy tokens without a draft and with two, and a hash of the prompts' next logits."""
    import torch

    from magicdec.runtime.engine import Engine
    from magicdec.runtime.weights import load_model
    from tests.runtime import test_architectures as drawn
    from tests.runtime.drafts import DRAFTS

    torch.set_num_threads(1)
    found: dict[str, str] = {}
    for turn, name in enumerate(drawn.RUN):
        config = drawn.drawn(name, 0)
        with tempfile.TemporaryDirectory() as folder:
            drawn.write(Path(folder), config, seed=0)
            prompts = drawn.prompts_for(config, 0)
            engine = Engine(
                load_model(folder), batch_size=len(prompts), max_len=80, **drawn.NARROW
            )
            engine.prefill(prompts, chunk=7)
            snapshot = engine.snapshot()
            logits = engine.forward(torch.tensor([prompt[-1:] for prompt in prompts]))
            found[f"{name}: logits"] = hashlib.sha256(
                logits.float().numpy().tobytes()
            ).hexdigest()
            for draft in (
                None,
                *(
                    list(DRAFTS.values())[(turn + each) % len(DRAFTS)]
                    for each in (0, 3)
                ),
            ):
                engine.restore(snapshot)
                found[f"{name}: {draft.draft_method if draft else 'alone'}"] = str(
                    drawn.greedy(engine, draft)
                )
    return found


def main(asked: str, answered: str) -> None:
    gc.set_threshold(50_000)
    if asked == "--tokens":
        found = tokens()
    else:
        found = surfaces(json.loads(Path(asked).read_text(encoding="utf-8")))
    Path(answered).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
