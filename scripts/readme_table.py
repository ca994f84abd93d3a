"""Writes README's predicted-against-measured table from the records in results/.

python scripts/readme_table.py            # rewrites README.md between its two markers
python scripts/readme_table.py --check    # exits with 1 when README.md is not what the records give
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from magicdec.records import read_records
from magicdec.validate.compare import Comparison, Pair, Thresholds, pair_up

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "results" / "demo-2-cores.jsonl"
HEADINGS = (
    "batch", "context", "budget", "gamma", "step, ms: predicted / measured", "tokens per step",
    "speedup: predicted (90 %)", "measured (lowest to highest)", "baseline MBU",
)  # fmt: skip
BEGIN, END = "<!-- measured -->\n", "<!-- /measured -->\n"


def table() -> str:
    records = read_records(RECORDS)
    pairs = pair_up((r for r in records if r.source == "calibrated"), (r for r in records if r.source == "measured"))
    environment = pairs[0].measured.environment
    comparison = Comparison(pairs=pairs, thresholds=Thresholds())
    steps, speedups = (sorted(comparison.absolute_errors(term)) for term in ("step_s", "speedup"))
    where = f"{RECORDS.parent.name}/{RECORDS.name}"
    lines = [
        f"Measured by `make demo` on {environment.host_cpu}, torch {environment.versions['torch']}, on "
        f"{environment.created_utc[:10]} (records: [{where}]({where})): the embedded model in fp32 at temperature 1, "
        "StreamingLLM self-speculation, median of 3 interleaved repetitions. Predicted from micro-benchmarks alone.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|---" * len(HEADINGS) + "|",
        *map(_row, pairs),
        "",
        f"Median error over these {len(pairs)} configurations: step time {steps[len(steps) // 2]:.1%}, speedup "
        f"{speedups[len(speedups) // 2]:.1%}; {comparison.coverage or 0:.0%} of the measured speedups lie in their "
        "interval. Memory on a shared machine changes its speed within minutes, and autoregressive decoding with it: "
        "that is most of the error ([results/LOG.md](results/LOG.md)).",
        "",
    ]
    return "\n".join(lines)


def _row(pair: Pair) -> str:
    p, m = pair.predicted, pair.measured
    step = f"{(p.step_s or 0) * 1e3:.1f} / {(m.step_s or 0) * 1e3:.1f}"
    tokens = f"{p.expected_tokens_per_step:.2f} / {m.expected_tokens_per_step:.2f}"
    predicted = f"{p.speedup:.2f} ({p.speedup_low:.2f} to {p.speedup_high:.2f})"
    measured = f"{m.speedup:.2f} ({m.speedup_low:.2f} to {m.speedup_high:.2f})"
    baseline = f"{m.autoregressive_mbu or 0:.0%}"
    cells = (m.batch_size, m.context_len, m.draft_budget, m.gamma, step, tokens, predicted, measured, baseline)
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    updated = before + BEGIN + table() + END + after
    if arguments.check:
        sys.exit(0 if updated == text else "README.md's table is not what results/ gives: run scripts/readme_table.py")
    readme.write_text(updated, encoding="utf-8")


if __name__ == "__main__":
    main()
