"""The rows that benchmarks/gpu.py is to fill, from the records, profiles and facts that it left."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_shapes import SNAPKV_RATE, STREAMING_RATE

from magicdec.calibrate.local_profile import LocalProfile, load_local_profile
from magicdec.counts import expected_tokens_per_step
from magicdec.files import write_atomic
from magicdec.perfmodel.forward import Pass, forward_pass
from magicdec.perfmodel.kernels.op import Where
from magicdec.schema.comparison import Comparison, pair_records
from magicdec.schema.record import Record, read_records
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.precision import PROFILE_DTYPES, Precision

OPEN = "not measured"
BYTE_BOUND_SHARE = 0.9
"""Share of the speedup if every step took its bytes' time that is wanted at the batches that fit."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; `measured` says so where nothing was. `value` is to be `bound` at most, or at least."""

    what: str
    target: str
    measured: str = OPEN
    beside: str = ""
    value: float | None = None
    bound: float | None = None
    is_floor: bool = False

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "open"
        if self.bound is None:
            return "-"
        return (
            "reached"
            if (self.value >= self.bound if self.is_floor else self.value <= self.bound)
            else "missed"
        )


def print_report(
    output: Path,
    models: Sequence[str],
    *,
    is_tiny: bool,
    unfinished: Sequence[str] = (),
    expected: Mapping[tuple[str, str], str] | None = None,
    published: LocalProfile | None = None,
) -> None:
    """Writes table.md and comparison.json, prints the table, and one JSON line last. `expected`: the figures that were
    written down for each model and row before. `published`: the catalog's profile of the device, by which the bytes
    of a model without a calibration are counted."""
    written = expected or {}
    facts_path = output / "facts.json"
    records, from_tables = (
        read_records(output / name) if (output / name).exists() else []
        for name in ("records.jsonl", "published.jsonl")
    )
    facts = json.loads(facts_path.read_text()) if facts_path.exists() else {}
    reports = [
        _ModelReport(output, name, records, from_tables, facts, published)
        for name in models
    ]
    lines, comparisons = [], {}
    rows: list[tuple[str, Row]] = []
    for report in reports:
        if report.profile is None or not report.has_results:
            continue
        lines += [
            f"\n## {report.title}\n",
            "| what | wanted | expected | measured | | beside it |",
        ]
        lines += ["|---|---|---|---|---|---|"]
        own = report.rows()
        lines += [
            f"| {r.what} | {r.target} | {before} | {r.measured} | {r.verdict} | {r.beside} |"
            for r in own
            for before in (written.get((report.name, r.what), "-"),)
        ]
        rows += [(report.name, row) for row in own]
        comparisons[report.name] = report.comparison().to_document()
    comparison = Comparison(
        pairs=pair_records(r for r in records if r.model == "embedded")
    )
    if comparison.pairs:
        comparisons["embedded"] = comparison.to_document()
        row = _prediction_row(comparison)
        lines += ["\n## embedded, real acceptance\n"]
        lines += [
            f"{row.what}: {row.measured} ({row.beside}); {row.target}: {row.verdict}"
        ]
        rows.append(("embedded", row))
    if is_tiny:
        lines.insert(
            0,
            "Tiny models and shapes: that the commands work, and nothing about any machine.",
        )
    text = "\n".join(lines).strip() + "\n"
    write_atomic(output / "table.md", text)
    write_atomic(output / "comparison.json", json.dumps(comparisons, indent=1) + "\n")
    print(text, file=sys.stderr)
    result = {
        "benchmark": "gpu",
        "tiny": is_tiny,
        "num_points": {name: len(each["rows"]) for name, each in comparisons.items()},
        "rows": [
            {
                "model": model,
                "what": r.what,
                "wanted": r.target,
                "measured": r.measured,
                "verdict": r.verdict,
            }
            for model, r in rows
        ],
        "unfinished": list(unfinished),
    }
    print(json.dumps(result))


def model_rows(
    output: Path, name: str, records: Sequence[Record], facts: dict[str, Any]
) -> list[Row]:
    """The rows of one model, whose profile lies in `output`."""
    return _ModelReport(output, name, records, [], facts).rows()


def _late(records: Iterable[Record]) -> int:
    """How many predictions stand in a file after their measurement: the calibration came later."""
    measured = set()
    late = 0
    for record in records:
        if record.source == "measured":
            measured.add(record.key)
        elif record.key in measured and record.gamma:
            late += 1
    return late


def _prediction_row(comparison: Comparison, late: int = 0) -> Row:
    speedup, coverage, regret = (
        comparison.summaries.get("speedup"),
        comparison.coverage,
        comparison.regret,
    )
    row = Row(
        what="predicted speedup: median error",
        target="<= 5 %, inside the 90 % intervals",
        bound=0.05,
    )
    if speedup is None:
        return row
    beside = [f"{speedup.points} points"]
    beside += [] if coverage is None else [f"{coverage:.0%} inside their intervals"]
    beside += [] if regret is None else [f"the planned gamma loses {regret:.1%}"]
    beside += [f"{late} of them calibrated after the run"] if late else []
    median = speedup.median_error
    return replace(
        row, value=median, measured=f"{median:.1%}", beside=", ".join(beside)
    )


class _ModelReport:
    """The rows of one Llama model."""

    def __init__(
        self,
        output: Path,
        name: str,
        records: Sequence[Record],
        published: Sequence[Record],
        facts: dict[str, Any],
        catalog: LocalProfile | None = None,
    ) -> None:
        self.name, self._facts = name, facts
        profile_path, tiny_directory = output / f"{name}.toml", output / f"tiny-{name}"
        self._is_calibrated = profile_path.exists()
        self.profile = (
            load_local_profile(profile_path) if self._is_calibrated else catalog
        )
        self._spec = load_model_spec(
            str(tiny_directory) if tiny_directory.exists() else name
        )
        self._records = [r for r in records if r.model == self._spec.name]
        self._measured = [r for r in self._records if r.source == "measured"]
        self._published = [r for r in published if r.model == self._spec.name]

    @property
    def title(self) -> str:
        assert self.profile is not None
        hardware = self.profile.hardware
        source = (
            "copy bandwidth" if self._is_calibrated else "not calibrated, datasheet"
        )
        return f"{self._spec.name} on {hardware.name}, {source} {hardware.memory_bytes_per_s / 1e12:.3g} TB/s"

    @property
    def has_results(self) -> bool:
        return self._is_calibrated or bool(self._measured)

    def comparison(self) -> Comparison:
        return Comparison(pairs=pair_records(self._records))

    def rows(self) -> list[Row]:
        return [
            self._autoregressive(),
            self._attention(),
            self._draft_step(),
            self._speedup("streamingllm", STREAMING_RATE),
            self._speedup("snapkv", SNAPKV_RATE),
            _prediction_row(self.comparison(), _late(self._records)),
            self._published_row(),
            self._transformers(),
        ]

    def _published_row(self) -> Row:
        """What the catalog's profile of the device, from published tables, would have missed by."""
        row = _prediction_row(
            Comparison(pairs=pair_records([*self._published, *self._measured]))
        )
        return replace(
            row,
            what="the same, predicted from published tables",
            target="stated",
            bound=None,
        )

    def _autoregressive(self) -> Row:
        """The records of the largest KV cache say how near to the copy bandwidth a step comes."""
        found = [r for r in self._measured if r.gamma == 0 and r.autoregressive_mbu]
        row = Row(
            what="autoregressive decoding, share of copy bandwidth",
            target=">= 85 %",
            bound=0.85,
            is_floor=True,
        )
        at_row = [r for r in found if r.context_len == 16_384] or found
        if not at_row:
            return row
        best = max(at_row, key=lambda r: r.batch_size)
        return replace(
            row,
            value=best.autoregressive_mbu,
            measured=f"{best.autoregressive_mbu:.1%}",
            beside=f"batch {best.batch_size}, context {best.context_len}: {1e3 * (best.step_s or 0):.3g} ms per step",
        )

    def _attention(self) -> Row:
        row = Row(
            what="attention of 4 to 8 tokens over that of one",
            target="<= 1.15",
            bound=1.15,
        )
        fact = self._facts.get(f"attention {self.name}")
        if fact is None:
            return row
        ratios = fact["verify_over_decode"]
        highest = max(ratio for gamma, ratio in ratios.items() if int(gamma) >= 3)
        return replace(
            row,
            value=highest,
            measured=f"{highest:.3f}",
            beside=f"batch {fact['batch_size']}, context {fact['context_len']}, by gamma: "
            + ", ".join(f"{gamma}: {ratio:.3f}" for gamma, ratio in ratios.items()),
        )

    def _draft_step(self) -> Row:
        row = Row(
            what="draft step over its weights' and KV's bytes / copy bandwidth",
            target="<= 1.25",
            bound=1.25,
        )
        found = [
            r
            for r in self._measured
            if r.draft_step_s and r.draft_method == "streamingllm"
        ]
        at_row = [
            r for r in found if r.draft_budget == 512 and r.context_len == 16_384
        ] or found
        if not at_row or self.profile is None:
            return row
        best = max(at_row, key=lambda r: (r.batch_size, r.gamma))
        bandwidth = best.memory_bytes_per_s or self.profile.hardware.memory_bytes_per_s
        bound_s = self._bytes(best, 1, self._draft_len(best)) / bandwidth
        ratio = (best.draft_step_s or 0) / bound_s
        return replace(
            row,
            value=ratio,
            measured=f"{ratio:.2f}",
            beside=f"batch {best.batch_size}, budget {best.draft_budget}, gamma {best.gamma}: "
            f"{1e3 * (best.draft_step_s or 0):.3g} ms",
        )

    def _speedup(self, method: str, rate: float) -> Row:
        row = Row(
            what=f"best speedup, {method}, stated acceptance {rate}",
            target=f">= {BYTE_BOUND_SHARE:.0%} of the byte bound",
            is_floor=True,
        )
        found = [
            r
            for r in self._measured
            if r.speedup
            and r.draft_method == method
            and {round(x, 6) for x in r.simulated_acceptance or ()} == {rate}
        ]
        if not found:
            return row
        best = max(found, key=lambda r: r.speedup or 0.0)
        bound = self._byte_bound(best)
        return replace(
            row,
            value=best.speedup,
            bound=BYTE_BOUND_SHARE * bound,
            measured=f"{best.speedup:.2f} x",
            beside=f"byte bound {bound:.2f} x; batch {best.batch_size}, context {best.context_len}, "
            f"budget {best.draft_budget}, gamma {best.gamma}",
        )

    def _transformers(self) -> Row:
        row = Row(
            what="autoregressive tokens/s over transformers' generate()",
            target=">= 2 x",
            bound=2.0,
            is_floor=True,
        )
        fact = self._facts.get("transformers")
        if fact is None or fact.get("model") != self._spec.name:
            return row
        if "missing" in fact:
            return replace(row, beside=fact["missing"])
        return replace(
            row,
            value=fact["ratio"],
            measured=f"{fact['ratio']:.2f} x",
            beside=f"batch {fact['batch_size']}, context {fact['context_len']}; best of generate: {fact['best']}",
        )

    @staticmethod
    def _draft_len(record: Record) -> float:
        """KV slots that a draft step reads, on average over a block."""
        cached = record.context_len
        if record.draft_budget is not None:
            cached = record.draft_budget
        return cached + (record.gamma - 1) / 2

    def _byte_bound(self, record: Record) -> float:
        """Speedup if every step took its weights' and KV's bytes at one bandwidth, and nothing else."""
        kv_len = record.context_len + (record.gen_len or 0) / 2
        rates = (record.simulated_acceptance or [])[: record.gamma]
        tokens = float(expected_tokens_per_step(rates, record.gamma))
        step = record.gamma * self._bytes(record, 1, self._draft_len(record))
        step += self._bytes(record, record.gamma + 1, kv_len + record.gamma)
        return tokens * self._bytes(record, 1, kv_len) / step

    def _bytes(
        self,
        record: Record,
        query_len: int,
        kv_len: float,
    ) -> float:
        """Of weights and KV that a pass of the record's batch reads."""
        assert self.profile is not None
        dtype = PROFILE_DTYPES[record.dtype]
        at = Where(
            self.profile.hardware,
            self.profile.engine,
            Precision(weight_dtype=dtype, kv_dtype=dtype),
        )
        cost = forward_pass(
            self._spec,
            Pass(at=at, batch=record.batch_size, query_len=query_len, kv_len=kv_len),
        ).cost
        return float(cost.weight_bytes + cost.kv_bytes)
