"""Writes what the documents take from the records in results/ and from the planner: README's plan, the tables and the
picture of docs/validation.md, the table of docs/worked-example.md, and the options in docs/api.md.

python scripts/readme_table.py            # rewrites the picture, and both files between their markers
python scripts/readme_table.py --check    # exits with 1 when they are not what the records give
"""

from __future__ import annotations

import argparse
import io
import math
import re
import sys
from pathlib import Path

from rich.console import Console

import magicdec
from magicdec.reports.data import (
    WEAK_BASELINE,
    WEAK_BASELINE_NOTE,
    ReportData,
    has_weak_baseline,
)
from magicdec.reports.figures import draw
from magicdec.reports.figures.chart import PAPER, raw_svg
from magicdec.reports.terminal_plan import print_plan
from magicdec.schema.comparison import Comparison, Pair, pair_records
from magicdec.schema.record import read_records
from magicdec.schema.request import request_options

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "results" / "demo-2-cores.jsonl"
HEADINGS = (
    "batch", "context", "budget", "gamma", "step, ms: predicted / measured", "tokens per step",
    "speedup: predicted (90 %)", "rescaled to the machine's speed", "measured (lowest to highest)", "baseline MBU",
)  # fmt: skip
SHORT_HEADINGS = (
    "batch",
    "context",
    "gamma",
    "speedup predicted (90 %)",
    "measured (lowest to highest)",
    "inside",
)
SHOWN_GAMMA = 3
PLAN = {
    "model": "llama-3.1-8b",
    "hardware": "h100-sxm-80gb",
    "context": 2048,
    "batch": 16,
}
TOLERANCE = 0.02
"""Relative, of the numbers in README's plan."""
EXAMPLE_CASES = ((1, 512), (8, 2048), (32, 4096))
EXAMPLE_BUDGET, EXAMPLE_GAMMA = 256, 2
PICTURE = ROOT / "docs" / "speedup.svg"


def _comparison() -> Comparison:
    return Comparison(pairs=pair_records(read_records(RECORDS)))


def plan_output() -> str:
    """The first lines of `magicdec plan`: the answer and the best row."""
    out = io.StringIO()
    print_plan(magicdec.plan(**PLAN), Console(file=out, width=80, highlight=False))
    shown = out.getvalue().splitlines()
    head = next(i for i, line in enumerate(shown) if line.startswith("draft "))
    lines = [f"    {line}".rstrip() for line in (*shown[: head + 2], "...")]
    return "\n".join(["", *lines, ""]) + "\n"


def summary() -> str:
    """One configuration at each of three places: what was predicted, what came of it, and why one is wrong."""
    comparison = _comparison()
    environment = comparison.pairs[0].measured.environment
    step, speedup = comparison.summaries["step_s"], comparison.summaries["speedup"]
    inside, total = comparison.covered
    shown = [
        pair
        for case in EXAMPLE_CASES
        for pair in comparison.pairs
        if (pair.measured.batch_size, pair.measured.context_len) == case
        if (pair.measured.draft_budget, pair.measured.gamma)
        == (EXAMPLE_BUDGET, SHOWN_GAMMA)
    ]
    where = f"{RECORDS.parent.name}/{RECORDS.name}"
    lines = [
        f"Measured by `make demo` on {environment.host_cpu}, torch {environment.versions['torch']}, on "
        f"{environment.created_utc[:10]} (records: [{where}](../{where})): the embedded model in fp32 at temperature "
        "1, StreamingLLM self-speculation, median of 3 interleaved repetitions. Predicted from micro-benchmarks alone.",
        "",
        "| " + " | ".join(SHORT_HEADINGS) + " |",
        "|---" * len(SHORT_HEADINGS) + "|",
        *map(_short_row, shown),
        "",
        *(_explained(pair) for pair in shown if not pair.is_covered),
        f"Median error over all {speedup.points} configurations: step time {step.median_error:.1%}, speedup "
        f"{speedup.median_error:.1%}; {inside} of the {total} measured speedups lie in their interval. Rescaled to the "
        f"speed of memory and processor during the runs: {step.normalised_median_error:.1%} and "
        f"{speedup.normalised_median_error:.1%}. On this shared machine both change within minutes, in opposite "
        "directions, and autoregressive decoding is affected most ([results/LOG.md](../results/LOG.md)).",
        "",
    ]
    return "\n".join(lines)


def _short_row(pair: Pair) -> str:
    p, m = pair.predicted, pair.measured
    cells = (
        m.batch_size, m.context_len, m.gamma, f"{p.speedup:.2f} ({p.speedup_low:.2f} to {p.speedup_high:.2f})",
        f"{m.speedup:.2f} ({m.speedup_low:.2f} to {m.speedup_high:.2f})", "yes" if pair.is_covered else "no",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def _explained(pair: Pair) -> str:
    """Which term a prediction outside its interval has wrong."""
    p, m = pair.predicted, pair.measured
    times = {
        name: (getattr(p, name) * 1e3, getattr(m, name) * 1e3)
        for name in ("step_s", "autoregressive_step_s")
    }
    step, alone = times["step_s"], times["autoregressive_step_s"]
    return (
        f"At batch {m.batch_size} the prediction is wrong: the speculative step took {step[1]:.1f} ms (predicted "
        f"{step[0]:.1f}), but the autoregressive one {alone[1]:.1f} ms (predicted {alone[0]:.1f}), which leaves less "
        f"to gain. With both predictions rescaled to the machine's speed during the runs the speedup is "
        f"{pair.normalised('speedup'):.2f}.\n"
    )


def table() -> str:
    comparison = _comparison()
    lines = [
        "| " + " | ".join(HEADINGS) + " |",
        "|---" * len(HEADINGS) + "|",
        *map(_row, comparison.pairs),
        *(
            ["", WEAK_BASELINE_NOTE]
            if any(has_weak_baseline(pair.measured) for pair in comparison.pairs)
            else []
        ),
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
    baseline = (
        f"{m.autoregressive_mbu or 0:.0%}" + f" {WEAK_BASELINE}" * has_weak_baseline(m)
    )
    cells = (
        m.batch_size,
        m.context_len,
        m.draft_budget,
        m.gamma,
        step,
        tokens,
        predicted,
        then,
        measured,
        baseline,
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def example() -> str:
    """What was measured at each case of the worked example, with one budget and gamma."""
    lines = [
        "| batch | context | γ | tokens per step | speedup measured |",
        "|---|---|---|---|---|",
    ]
    for case in EXAMPLE_CASES:
        (record,) = (
            r
            for r in read_records(RECORDS)
            if r.source == "measured" and (r.batch_size, r.context_len) == case
            if (r.draft_budget, r.gamma) == (EXAMPLE_BUDGET, EXAMPLE_GAMMA)
        )
        cells = (
            *case,
            record.gamma,
            f"{record.expected_tokens_per_step:.2f}",
            f"{record.speedup:.2f}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, ""])


def plan_options() -> str:
    """A row per option of `magicdec.plan`."""
    rows = [
        f"| `{name}` | {asked.help} | {asked.default!r} |"
        for name, asked in request_options().items()
    ]
    return "\n".join(["| option | what it is | default |", "|---|---|---|", *rows, ""])


def picture() -> str:
    """What `magicdec plot gamma` draws of the records."""
    chart = draw("gamma", ReportData.from_records(read_records(RECORDS)))
    assert chart is not None
    return raw_svg(chart.standalone(), background=PAPER)


def between_markers(text: str, content: str, name: str = "measured") -> str:
    """The text with `content` between the markers of that name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, _, rest = text.partition(begin)
    return before + begin + content + end + rest.partition(end)[2]


def agree(one: str, other: str) -> bool:
    """Equal, but for the numbers in the plan's output: these may differ by `TOLERANCE`, as after a slight refit."""
    (before, shown, after), (other_before, other_shown, other_after) = (
        _parts(text) for text in (one, other)
    )
    if (before, after) != (other_before, other_after) or shown[::2] != other_shown[::2]:
        return False
    pairs = zip(shown[1::2], other_shown[1::2], strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=TOLERANCE) for a, b in pairs)


def _parts(text: str) -> tuple[str, list[str], str]:
    """What stands before the plan's output, its words and (at the odd places) numbers, and what stands after it."""
    before, _, rest = text.partition("<!-- plan -->")
    shown, _, after = rest.partition("<!-- /plan -->")
    return before, re.split(r"(\d+(?:\.\d+)?)", " ".join(shown.split())), after


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    names = (
        "README.md",
        "docs/worked-example.md",
        "docs/validation.md",
        "docs/api.md",
        "docs/index.md",
    )
    readme, worked, validation, api, home = (ROOT / name for name in names)
    old = {
        path: path.read_text(encoding="utf-8")
        for path in (readme, worked, validation, api, home)
    }
    files = {
        readme: between_markers(old[readme], plan_output(), "plan"),
        home: between_markers(old[home], plan_output(), "plan"),
        api: between_markers(old[api], plan_options(), "options"),
        worked: between_markers(old[worked], example()),
        validation: between_markers(
            between_markers(old[validation], summary(), "demo"), table()
        ),
        PICTURE: picture(),
    }
    for path, text in files.items():
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or not agree(path.read_text(encoding="utf-8"), text):
            sys.exit(
                f"{path.relative_to(ROOT)} is not what results/ gives: run scripts/readme_table.py"
            )


if __name__ == "__main__":
    main()
