"""Fuzzes every surface that reads what others wrote, and prints what came of it.

    python scripts/fuzz.py                    all surfaces: cases, outcomes, processor time and peak memory
    python scripts/fuzz.py --count 200 plans  more cases, of one surface
    python scripts/fuzz.py --ends 20          kills a run of three repetitions after 1, 2, … 20 s, and resumes it

The generators are those of tests/fuzz/surfaces.py, seeded: the same cases every time. Each surface has a process of its
own. The exit status is 1 where there is a fault, and each is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from magicdec.records import UNFINISHED, read_records, read_rows  # noqa: E402
from tests.fuzz.surfaces import SURFACES, judge  # noqa: E402

KINDS = ("answered", "refused", "tracebacks", "hangs", "others")
REPETITIONS = 3


def tried(surface: str, count: int, into: Path) -> None:
    """Writes the counts of a surface's outcomes, in the process that calls."""
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for case in SURFACES[surface](Path(folder), count):
            code, fault = judge(case)
            kind = {0: "answered", 2: "refused"}.get(code, "others")
            if fault:
                kind = "tracebacks" if "traceback" in fault else "hangs" if "a hang" in fault else "others"
                print(fault, flush=True)
            counts[kind] += 1
    into.write_text(json.dumps(counts))


def fuzz(surfaces: list[str], count: int) -> int:
    total, peak = Counter[str](), 0.0
    print(f"| surface | cases | {' | '.join(KINDS)} | CPU s | peak MiB |\n|---|{'---|' * (len(KINDS) + 3)}", flush=True)
    for surface in surfaces:
        with tempfile.TemporaryDirectory() as folder:
            into = Path(folder, "counts")
            child = os.fork()
            if not child:
                try:
                    tried(surface, count, into)
                finally:
                    os._exit(0)
            _, _, used = os.wait4(child, 0)
            counts = Counter[str](json.loads(into.read_text()) if into.exists() else {"others": 1})
        mebibytes = used.ru_maxrss / 1024
        total, peak = total + counts, max(peak, mebibytes)
        _print_row(surface, counts, used.ru_utime + used.ru_stime, mebibytes)
    _print_row("all", total, sum(os.times()[2:4]), peak)
    return int(sum(total[kind] for kind in KINDS[2:]) > 0)


def _print_row(name: str, counts: Counter[str], seconds: float, mebibytes: float) -> None:
    cells = " | ".join(str(counts[kind]) for kind in KINDS)
    print(f"| {name} | {counts.total():,} | {cells} | {seconds:.0f} | {mebibytes:.0f} |", flush=True)


def ends(seconds: int) -> int:
    """What a killed run of several repetitions leaves, and whether the next one completes it."""
    options = ("--batch=1", "--context=120", "--draft-budget=32", "--gamma=2", "--gen-len=300", "--quiet")
    print("| killed after | whole records | repetitions of others | after --resume |\n|---|---|---|---|", flush=True)
    is_whole = True
    for second in range(1, seconds + 1):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "records.jsonl")
            command = [sys.executable, "-m", "magicdec", "run", *options, f"--repetitions={REPETITIONS}"]
            command += ["--records", str(file), "--resume"]
            running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            time.sleep(second)
            has_ended = running.poll() is not None
            running.kill()
            running.wait()
            rows = read_rows(file) if file.exists() and file.stat().st_size else []
            before, parts = _whole(file), sum(row.repetition is not None for row in rows)
            done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
            after = _whole(file)
            is_whole &= done.returncode == 0 and after == 2 and after >= before
            print(f"| {second} s{' (ended)' if has_ended else ''} | {before} | {parts} | {after} of 2 |", flush=True)
    return int(not is_whole)


def _whole(file: Path) -> int:
    if not file.exists() or not file.stat().st_size:
        return 0
    return sum(UNFINISHED not in record.notes for record in read_records(file))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("surfaces", nargs="*", default=list(SURFACES), metavar="surface", help=", ".join(SURFACES))
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--ends", type=int, default=0, metavar="SECONDS")
    given = parser.parse_args()
    return ends(given.ends) if given.ends else fuzz(given.surfaces, given.count)


if __name__ == "__main__":
    sys.exit(main())
