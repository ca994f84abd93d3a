"""Writes what the documents take from the records in results/: README's predicted-against-measured table and its
picture, and the table of docs/worked-example.md.

python scripts/readme_table.py            # rewrites the picture, and both files between their markers
python scripts/readme_table.py --check    # exits with 1 when they are not what the records give
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from magicdec.comparison import Comparison, Pair, pair_records
from magicdec.records import read_records
from magicdec.reports.data import WEAK_BASELINE, WEAK_BASELINE_NOTE, ReportData, has_weak_baseline
from magicdec.reports.figures import draw
from magicdec.reports.style import PAPER, raw_svg

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "results" / "demo-2-cores.jsonl"
HEADINGS = (
    "batch", "context", "budget", "gamma", "step, ms: predicted / measured", "tokens per step",
    "speedup: predicted (90 %)", "rescaled to the machine's speed", "measured (lowest to highest)", "baseline MBU",
)  # fmt: skip
BEGIN, END = "<!-- measured -->\n", "<!-- /measured -->\n"
EXAMPLE_CASES = ((1, 512), (8, 2048), (32, 4096))
EXAMPLE_BUDGET, EXAMPLE_GAMMA = 256, 2
PICTURE = ROOT / "docs" / "speedup.svg"


def table() -> str:
    comparison = Comparison(pairs=pair_records(read_records(RECORDS)))
    environment = comparison.pairs[0].measured.environment
    step, speedup = comparison.summaries["step_s"], comparison.summaries["speedup"]
    inside, total = comparison.covered
    where = f"{RECORDS.parent.name}/{RECORDS.name}"
    lines = [
        f"Measured by `make demo` on {environment.host_cpu}, torch {environment.versions['torch']}, on "
        f"{environment.created_utc[:10]} (records: [{where}]({where})): the embedded model in fp32 at temperature 1, "
        "StreamingLLM self-speculation, median of 3 interleaved repetitions. Predicted from micro-benchmarks alone.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|---" * len(HEADINGS) + "|",
        *map(_row, comparison.pairs),
        "",
        f"Median error over these {speedup.points} configurations: step time {step.median_error:.1%}, speedup "
        f"{speedup.median_error:.1%}; {inside} of the {total} measured speedups lie in their interval. Rescaled to the "
        f"speed of memory and processor during the runs: {step.normalised_median_error:.1%} and "
        f"{speedup.normalised_median_error:.1%}. On this shared machine both change within minutes, in opposite "
        "directions, and autoregressive decoding is affected most ([results/LOG.md](results/LOG.md)).",
        *(["", WEAK_BASELINE_NOTE] if any(has_weak_baseline(pair.measured) for pair in comparison.pairs) else []),
        "",
    ]
    return "\n".join(lines)


def _row(pair: Pair) -> str:
    p, m = pair.predicted, pair.measured
    step = f"{(p.step_s or 0) * 1e3:.1f} / {(m.step_s or 0) * 1e3:.1f}"
    tokens = f"{p.expected_tokens_per_step:.2f} / {m.expected_tokens_per_step:.2f}"
    predicted = f"{p.speedup:.2f} ({p.speedup_low:.2f} to {p.speedup_high:.2f})"
    measured = f"{m.speedup:.2f} ({m.speedup_low:.2f} to {m.speedup_high:.2f})"
    then = f"{pair.normalised('speedup') or 0:.2f}"
    baseline = f"{m.autoregressive_mbu or 0:.0%}" + f" {WEAK_BASELINE}" * has_weak_baseline(m)
    cells = (m.batch_size, m.context_len, m.draft_budget, m.gamma, step, tokens, predicted, then, measured, baseline)
    return "| " + " | ".join(map(str, cells)) + " |"


def example() -> str:
    """What was measured at each case of the worked example, with one budget and gamma."""
    lines = ["| batch | context | γ | tokens per step | speedup measured |", "|---|---|---|---|---|"]
    for case in EXAMPLE_CASES:
        (record,) = (
            r
            for r in read_records(RECORDS)
            if r.source == "measured" and (r.batch_size, r.context_len) == case
            if (r.draft_budget, r.gamma) == (EXAMPLE_BUDGET, EXAMPLE_GAMMA)
        )
        cells = (*case, record.gamma, f"{record.expected_tokens_per_step:.2f}", f"{record.speedup:.2f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, ""])


def picture() -> str:
    """What `magicdec plot gamma` draws of the records."""
    chart = draw("gamma", ReportData.from_records(read_records(RECORDS)))
    assert chart is not None
    return raw_svg(chart.standalone(), background=PAPER)


def between_markers(path: Path, content: str) -> str:
    """The file's text with `content` between its markers."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + content + END + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    readme, worked = ROOT / "README.md", ROOT / "docs" / "worked-example.md"
    files = {
        readme: between_markers(readme, table()),
        worked: between_markers(worked, example()),
        PICTURE: picture(),
    }
    for path, text in files.items():
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path.relative_to(ROOT)} is not what results/ gives: run scripts/readme_table.py")


if __name__ == "__main__":
    main()
