"""What decoding reaches on one GPU, and whether it was predicted: everything by one command, or part by part.

    python benchmarks/gpu.py --all                         all of it, in 40 minutes at most
    python benchmarks/gpu.py --all --budget-minutes 9      as much as 9 minutes allow; the same call again goes on
    python benchmarks/gpu.py --part calibrate              copy bandwidth, kernels, engine steps -> llama-3.1-8b.toml
    python benchmarks/gpu.py --part llama-3.1-8b           rows of the table, and a grid of budgets, gammas and batches
    python benchmarks/gpu.py --part llama-2-7b-32k         the same with that model's shapes, calibrated first
    python benchmarks/gpu.py --part embedded               the embedded model, with real acceptance
    python benchmarks/gpu.py --part transformers           autoregressive decoding against transformers' generate()
    python benchmarks/gpu.py --part report                 the comparison and the table from what is there

A part ends after `--minutes`, and goes on where it stopped when it is called again. The Llama models have random
weights, caches of seeded noise instead of a prefill, and acceptance simulated by a published profile or a stated rate:
each record says so. Every point is predicted from the calibration alone, and written down, before it is measured.
Left in `--output`: records.jsonl, the profiles with the timings behind them, facts.json (what is no decoding run),
comparison.json and table.md; of `--all` also state.json, a log of each stage, catalog/ (what
scripts/ship_gpu_profile.py makes), summary.md and report.html. Another call with the same `--output` needs what is
there.

Without a GPU the same commands run with `--device cpu --tiny`, on models of a few thousand weights.

Needs the package's `run` extra, and Triton for attention on a GPU. transformers is needed for its own part only, which
says so and leaves its row open where it is missing; flash-attn is one more of its ways where installed. Nothing is
downloaded, and no git checkout is needed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # the package, where it is not installed

PARTS = (
    "calibrate",
    "headline",
    "llama-3.1-8b",
    "llama-2-7b-32k",
    "embedded",
    "transformers",
    "report",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--all", action="store_true", help="every stage, each in a process of its own"
    )
    chosen.add_argument(
        "--part",
        choices=PARTS,
        action="append",
        help="may be given several times; default: all parts",
    )
    chosen.add_argument(
        "--expect",
        metavar="DEVICE",
        help="write down what is expected on it, without a GPU",
    )
    parser.add_argument("--output", type=Path, default=Path("gpu-results"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="default: bfloat16; on a CPU float32",
    )
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="for all parts of this call together"
    )
    parser.add_argument(
        "--budget-minutes", type=float, default=40.0, help="for this call of --all"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="tiny models and shapes: the same commands, on any machine",
    )
    parser.add_argument(
        "--cuda-graphs", action=argparse.BooleanOptionalAction, default=True
    )
    options = parser.parse_args()
    options.dtype = options.dtype or (
        "float32" if options.device == "cpu" else "bfloat16"
    )
    if options.expect:
        from gpu_expected import write_expected

        write_expected(options.expect, ("llama-3.1-8b", "llama-2-7b-32k"))
        return
    options.output.mkdir(parents=True, exist_ok=True)
    if options.all:
        from gpu_all import run_all

        arguments = ["--device", options.device, "--dtype", options.dtype]
        arguments += ["--tiny"] * options.tiny + ["--no-cuda-graphs"] * (
            not options.cuda_graphs
        )
        sys.exit(
            run_all(
                options.output.resolve(),
                arguments,
                budget_s=60 * options.budget_minutes,
            )
        )
    from gpu_parts import run_parts

    run_parts(options.part or PARTS, options)


if __name__ == "__main__":
    main()
