"""Command lines for `scripts/proof.py surfaces`, drawn without the package that answers them.

`commands` needs the files of the base revision alone; both sides read these, so a sample that a change moves or
deletes is still asked about.
"""

from __future__ import annotations

import gzip
import json
import tomllib
from pathlib import Path
from typing import Any

from proof_requests import draw

FILES = (
    "docs/samples",
    "tests/data/serve_commands.toml",
    "tests/data/load_generators",
    "results",
)
"""Folders and files of the base revision that commands read."""
NUM_PLANS, NUM_WHOLE = 300, 20
NUM_QUICK_PLANS, NUM_QUICK_WHOLE = 40, 10
EXPORTS = ("vllm", "sglang", "trtllm")
HELPED = (
    "plan", "check", "run", "calibrate", "profile-acceptance", "report", "plot", "export", "observe", "explore",
    "sensitivity", "models", "hardware", "engines", "demo", "validate", "validate grid", "validate pairs",
    "validate published", "validate records", "records", "records ls", "records show",
)  # fmt: skip
LISTED = (
    "models", "models --format json", "models --architectures", "hardware", "hardware --format json", "hardware h100",
    "engines", "engines --format json", "engines vllm", "engines sglang",
)  # fmt: skip
REFUSED = (
    "plan --model llama-3.1-9b", "run --draft gpt-2", "export vllm missing.json", "plan --batch 0", "plann",
    "plan --hardware h1000", "plan --tp x", "check", "observe missing.log", "plan --gama 3", "hardware h1000",
)  # fmt: skip
REQUESTS = "arrival,prompt,output\n" + "".join(
    f"{place * 0.08:.2f},{200 + 37 * (place % 11)},{30 + 7 * (place % 5)}\n"
    for place in range(80)
)
LONG = (
    "plan --requests arrivals.csv --hardware h100 --p95-tpot-ms 12",
    "plan --requests arrivals.csv --hardware l4,h100 --draft none --p95-ttft-ms 400",
    "plan --requests arrivals.csv --hardware h100 --draft eagle3 --gamma 3 --format json",
    "plan --hardware 2xh100 --gpus 2 --batch 8 --context 4k --gen-len 128 --workload docs/samples/workload.json --all",
    "plan --model embedded --hardware l4 --logs docs/samples/requests.jsonl",
    "plan --task code --hardware h100 --batch 4 --price 2.5",
    "plan --draft ngram --acceptance accepted.json --hardware h100 --batch 8 --context 4k",
    "sensitivity --batch 8",
    "sensitivity --hardware h100 --draft eagle3 --gamma 3 --context 8k --batch 8 --format json",
    "profile-acceptance --outputs docs/samples/requests.jsonl --draft ngram,suffix --quiet -o replayed.toml",
    "validate published",
    "validate pairs --format json",
    "run --context 64 --gen-len 8 --batch 2 --draft self --records run.jsonl --quiet",
)
"""Searches over arrivals and layouts, replays of logs, and judged tables."""
PASTED = (
    "vllm serve Qwen/Qwen3-32B -tp 2 --max-num-seqs 64",
    "vllm serve Qwen/Qwen3-8B --max-num-seqs 4 --what-is-this",
    "vllm serve meta-llama/Llama-3.1-70B-Instruct -tp 4 --max-num-seqs 64 --enforce-eager",
    "TP=2\nMODEL=Qwen/Qwen3-32B\nvllm serve $MODEL -tp ${TP} --max-num-seqs ${SEQS:-16}",
    "# Serve\n\n```bash\nvllm serve Qwen/Qwen3-8B -tp 2\n```\n",
    "vllm serve Qwen/Qwen3-8B -tp $TP",
    "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --tp 2 --disable-cuda-graph --port 30000",
    "trtllm-serve Qwen/Qwen3-8B --tp_size 2 --max_batch_size 16",
    "docker run --gpus all vllm/vllm-openai:v0.32.0 --model Qwen/Qwen3-8B --monokernel",
    "echo hello",
)


def words(options: dict[str, Any], place: int, folder: Path) -> list[str]:
    """Options of `magicdec.plan` as a command line has them; a workload goes to a file."""
    found = ["plan"]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if name == "workload":
            path = f"workload-{place}.json"
            (folder / path).write_text(
                json.dumps({"requests": value}), encoding="utf-8"
            )
            found += [option, path]
        elif value is True:
            found.append(option)
        elif isinstance(value, list):
            found += [option, ",".join(map(str, value))]
        else:
            found += [option, str(value)]
    return found


def plans(number: int, whole: int, folder: Path) -> list[list[str]]:
    """Each request as text and as a document; the first ones in every form."""
    found: list[list[str]] = []
    asked = [each["options"] for each in draw(2 * number) if each["kind"] == "plan"][
        :number
    ]
    for place, options in enumerate(asked):
        command = words(options, place, folder)
        plan = f"plan-{place}.json"
        found.append([*command, "-o", plan])
        if place < whole:
            found += [
                [*command, "--all"],
                [*command, "--why"],
                [*command, "--format", "csv"],
            ]
            found += [["export", engine, plan] for engine in EXPORTS]
            if place % 2 == 0:
                found.append(["report", "--plan", plan, "-o", f"report-{place}.html"])
    return found


def checks(folder: Path) -> list[list[str]]:
    """Public serve commands, the samples of each form, and a few short ones."""
    public = tomllib.loads((folder / FILES[1]).read_text(encoding="utf-8"))["command"]
    texts = [each["text"] for each in public] + list(PASTED)
    found = [
        ["check", text, "--hardware", "h200", "--batch", "16", "--context", "4k"]
        for text in texts
    ]
    samples = folder / "docs" / "samples"
    files = [
        *sorted(samples.glob("serve/*")),
        *sorted(samples.glob("faults/*")),
        *sorted(samples.glob("*.sh")),
    ]
    for path in (*files, samples / "deployment.yaml", samples / "docker-compose.yml"):
        found.append(
            [
                "check",
                str(path.relative_to(folder)),
                "--hardware",
                "h100",
                "--batch",
                "16",
            ]
        )
    return found


def observations(folder: Path) -> list[list[str]]:
    """Each sample of a server's log or result, with and without advice, and runs of load generators."""
    for path in sorted((folder / FILES[2]).glob("*.gz")):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
    logs = [
        str(path.relative_to(folder))
        for path in sorted((folder / "docs/samples/logs").iterdir())
    ]
    runs = [
        str(path.relative_to(folder))
        for path in sorted((folder / FILES[2]).glob("*.json*"))
        if path.suffix != ".gz"
    ]
    found = [["observe", path] for path in (*logs, *runs)]
    found += [
        ["observe", path, "--model", "qwen3-8b", "--hardware", "h100-sxm-80gb"]
        for path in logs
    ]
    found.append(
        [
            "observe",
            "docs/samples/trace.jsonl",
            "--draft",
            "ngram",
            "--context",
            "4096",
            "-o",
            "accepted.json",
        ]
    )
    found.append(["observe", "docs/samples/completions.jsonl", "--format", "json"])
    found.append(
        [
            "observe",
            "docs/samples/logs/vllm.log",
            "--model",
            "qwen3-8b",
            "--records",
            "observed.jsonl",
        ]
    )
    return found


def records(folder: Path) -> list[list[str]]:
    """Shipped records, listed, compared and reported."""
    files = [
        str(path.relative_to(folder))
        for path in sorted((folder / "results").glob("*.jsonl"))
    ]
    found = [["records", "ls", path] for path in files]
    found += [["validate", "records", path] for path in files]
    demo = "results/demo-2-cores.jsonl"
    found.append(["records", "ls", demo, "--format", "csv"])
    found.append(["validate", "records", demo, "--format", "json"])
    found.append(["report", demo, "-o", "records.html"])
    found.append(["plot", "scatter", "results/grid-2-cores.jsonl", "--format", "csv"])
    found.append(["plot", "errors", demo, "--format", "markdown"])
    found.append(["plot", "heatmap", "--plan", "plan-0.json", "-o", "heatmap.svg"])
    return found


def commands(folder: Path, *, quick: bool) -> list[list[str]]:
    """Command lines in their order; one may read what an earlier one wrote."""
    (folder / "arrivals.csv").write_text(REQUESTS, encoding="utf-8")
    if quick:
        return [
            *plans(NUM_QUICK_PLANS, NUM_QUICK_WHOLE, folder),
            *(line for line in checks(folder) if "--context" in line),
            *observations(folder)[::6],
            *(line.split() for line in REFUSED),
        ]  # fmt: skip
    return [
        *plans(NUM_PLANS, NUM_WHOLE, folder), *checks(folder), *observations(folder), *records(folder),
        *([*name.split(), "--help"] for name in HELPED), *(line.split() for line in (*LISTED, *REFUSED, *LONG)),
    ]  # fmt: skip
