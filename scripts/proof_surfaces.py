"""The bytes that users see, and the tokens that drawn models speak, of the package that is importable.

    python scripts/proof_surfaces.py SURFACES.json

Written by scripts/proof.py surfaces for both sides: {name: text or hash}. Commands write into a folder of their own;
dates, seconds that a command took, and that folder are masked. Each drawn architecture that runs decodes greedily
without a draft and with two drafts; its logits count with their bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

COMMANDS = (
    "plan", "run", "calibrate", "profile-acceptance", "report", "plot", "export", "observe", "explore",
    "sensitivity", "models", "hardware", "engines", "demo", "validate", "records",
)  # fmt: skip
PLAN = (
    "plan", "--model", "llama-3.1-8b", "--hardware", "h100", "--batch", "1,16", "--context", "8k", "--gen-len", "256"
)  # fmt: skip
SHOWN = (
    ("--help",), *((name, "--help") for name in COMMANDS), PLAN,
    (*PLAN, "--format", "csv"), (*PLAN, "--format", "json"),
    ("plan", "--model", "deepseek-r1", "--hardware", "b200", "--gpus", "16", "--engine", "sglang"),
    ("models",), ("hardware",), ("engines",), ("models", "--format", "json"), ("sensitivity", "--batch", "8"),
    ("plan", "--model", "llama-3.1-9b"), ("run", "--draft", "gpt-2"), ("export", "vllm", "missing.json"),
)  # fmt: skip
WRITTEN = (
    ("export", "vllm", "plan.json"), ("export", "sglang", "plan.json"),
    ("report", "--plan", "plan.json", "-o", "out.html"),
    ("plot", "heatmap", "--plan", "plan.json", "-o", "heatmap.svg"),
    ("plot", "heatmap", "--plan", "plan.json", "--format", "csv"),
    ("run", "--context", "64", "--gen-len", "8", "--batch", "2", "--draft", "self", "--records", "run.jsonl"),
)  # fmt: skip
"""Commands that read the plan of PLAN."""
MASKED = re.compile(
    r"/tmp/[\w/.-]+|\d{4}-\d\d-\d\d[T ]?[\d:.+Z]*|\d+(\.\d+)?([eE][+-]?\d+)? ?(s|ms|µs|GB/s|GFLOP/s)\b"
)
MEASURED = re.compile(
    r'"[a-z_]*(_s|_bytes|_per_s|mbu|mfu|speedup|commit|host|time)[a-z_0-9]*": ?[^,}]+'
)


def called(arguments: tuple[str, ...], folder: Path) -> str:
    command = [sys.executable, "-m", "magicdec", *arguments]
    found = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False
    )
    return f"{found.returncode}\n{found.stdout}\n{found.stderr}"


def surfaces() -> dict[str, str]:
    """What commands print, and the files that they write."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for arguments in SHOWN:
            found[" ".join(arguments)] = called(arguments, folder)
        text = (
            found[" ".join((*PLAN, "--format", "json"))]
            .partition("\n")[2]
            .rpartition("\n\n")[0]
        )
        (folder / "plan.json").write_text(text, encoding="utf-8")
        for arguments in WRITTEN:
            is_run = arguments[0] == "run"
            printed = called(arguments, folder)
            found[" ".join(arguments)] = "" if is_run else MASKED.sub("*", printed)
            for path in sorted(folder.iterdir()):
                if path.suffix in (".html", ".svg", ".jsonl") and path.is_file():
                    own = path.read_text(encoding="utf-8")
                    found[f"{' '.join(arguments)}: {path.name}"] = MASKED.sub(
                        "*", MEASURED.sub("*", own)
                    )
                    path.unlink()
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


def main(path: str) -> None:
    Path(path).write_text(json.dumps(surfaces() | tokens()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
