"""Shows that a change moves no answer, or names the first that it moves.

    python scripts/proof.py                             the working tree against its merge base with main
    python scripts/proof.py --requests 300              a quick look
    python scripts/proof.py --base REV --head REV       two revisions
    python scripts/proof.py --kernels                   every kernel on 10,000 random works a device, and its refits
    python scripts/proof.py --ignore refusal notes      without these terms (a name, or its beginning)
    python scripts/proof.py surfaces --quick            what some 200 commands print and write; without --quick 600
    python scripts/proof.py surfaces --deleted FILE     but for what a change deletes (tests/golden/deleted.toml)
    python scripts/proof.py --update-golden             rewrites the golden values of tests/perfmodel/test_golden.py

Each side answers the same seeded requests (tests/golden/proof_requests.py) in a process of its own; every number of
every answer is compared at a relative 1e-12, every text exactly. The exit status is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
GOLDEN = ROOT / "tests" / "golden"
sys.path.insert(0, str(GOLDEN))

import proof_answers  # noqa: E402
from proof_commands import FILES, commands  # noqa: E402
from proof_golden import update_golden  # noqa: E402
from proof_requests import draw, draw_kernels  # noqa: E402

TOLERANCE = 1e-12
SHOWN = 200
"""Characters of a line that differs."""
HEADLINES = 3
"""Lines of a printed plan before its statements."""
WIDTH = 80
"""Columns of the texts that commands print."""
REFILLED = "default texts where another statement took the line"
KEPT = Path(tempfile.gettempdir()) / f"magicdec-proof-{os.getuid()}"
"""Answers of revisions, which do not change."""
Moved = dict[str, list[tuple[int, float, str]]]
"""By term: the request's number, the largest relative change, and the first values that differ."""


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", ROOT, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@contextmanager
def tree(revision: str) -> Iterator[Path]:
    """A folder with the package at this revision; "" is the working tree."""
    if not revision:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        parts = [
            part
            for part in ("magicdec", "tests", "evidence")
            if git("ls-tree", revision, part)
        ]
        command = ["git", "-C", ROOT, "archive", revision, *parts]
        archive = subprocess.run(command, check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def answers(revision: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers of the package at a revision; those of a commit are kept in the temporary folder."""
    text = json.dumps(requests)
    script = (GOLDEN / "proof_answers.py").read_text(encoding="utf-8")
    kept = (
        KEPT
        / f"{revision}-{hashlib.sha256((text + script).encode()).hexdigest()[:16]}.npz"
    )
    if revision and kept.exists():
        return proof_answers.read(kept)
    KEPT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT) as folder, tree(revision) as package:
        asked, answered = Path(folder, "requests.json"), Path(folder, "answers.npz")
        asked.write_text(text, encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            str(GOLDEN / "proof_answers.py"),
            str(asked),
            str(answered),
        ]
        if subprocess.run(
            command, env=environment, cwd=package, check=False
        ).returncode:
            raise SystemExit(
                f"proof: {revision or 'the working tree'} did not answer; its traceback is above"
            )
        found = proof_answers.read(answered)
        if revision:
            answered.replace(kept)
    return found


def surfaces(
    revision: str, folder: Path, commands: list[list[str]], *, tokens: bool
) -> dict[str, str]:
    """Surfaces of the package at a revision, made in a copy of a folder of inputs; a commit's are kept."""
    text = json.dumps(commands)
    script = (SCRIPTS / "proof_surfaces.py").read_text(encoding="utf-8")
    key = hashlib.sha256((text + script + str(tokens)).encode()).hexdigest()[:16]
    kept = KEPT / f"surfaces-{revision}-{key}.json"
    if revision and kept.exists():
        found: dict[str, str] = json.loads(kept.read_text(encoding="utf-8"))
        return found
    KEPT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT) as own, tree(revision) as package:
        environment = os.environ | {
            "PYTHONPATH": str(package),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "100",
        }
        asked, answered = Path(own, "commands.json"), Path(own, "surfaces.json")
        asked.write_text(text, encoding="utf-8")
        place = Path(own, "inputs")
        shutil.copytree(folder, place)
        parts = [(str(asked), place)]
        if tokens:
            parts.append(("--tokens", package))
        found = {}
        for part, cwd in parts:
            script_path = str(SCRIPTS / "proof_surfaces.py")
            command = [sys.executable, script_path, part, str(answered)]
            subprocess.run(command, env=environment, cwd=cwd, check=True)
            found |= json.loads(answered.read_text(encoding="utf-8"))
        if revision:
            answered.write_text(json.dumps(found), encoding="utf-8")
            answered.replace(kept)
    return found


def compare_surfaces(
    before: dict[str, str],
    after: dict[str, str],
    ignored: tuple[str, ...],
    deleted: list[dict[str, Any]],
) -> int:
    """Prints each pair of first lines that differ, with the surfaces that they begin to differ in, and how many
    surfaces differ by nothing but each deletion."""
    moved: dict[tuple[str, str], list[str]] = {}
    causes: Counter[str] = Counter()
    skipped = 0
    for name, old in before.items():
        if name.startswith(ignored):
            continue
        if name not in after:
            skipped += 1
            continue
        if old == after[name]:
            continue
        sides = [_statements(old), _statements(after[name])]
        found: list[str] = []
        for each in deleted:
            if any(part in name for part in each.get("surfaces", ())):
                left = ["", ""]
            else:
                left = [_without(text, each) for text in sides]
            if left != sides:
                found.append(each["why"])
            sides = left
        lines = [text.splitlines() for text in sides]
        if found and _is_refilled(name, *lines):
            found.append(REFILLED)
        elif sides[0] != sides[1]:
            pairs = zip_longest(*lines, fillvalue="(nothing)")
            first = next(pair for pair in pairs if pair[0] != pair[1])
            moved.setdefault(first, []).append(name)
        causes.update(found)
    for (old, new), names in moved.items():
        start = 0
        if len(old) > SHOWN and len(new) > SHOWN:
            both = zip(old, new, strict=False)
            alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
            start = max(0, alike - SHOWN // 2)
        print(f"{len(names)} x  {names[0]}")
        print(f"  - {old[start : start + SHOWN]}\n  + {new[start : start + SHOWN]}")
    for why, number in causes.most_common():
        print(f"{number:5}  deleted: {why}")
    differ = sum(map(len, moved.values()))
    print(
        f"{len(before)} surfaces, {skipped} of commands that are no more, {differ} differ"
    )
    return int(bool(moved))


def _statements(text: str) -> str:
    """A document in one layout; a printed text with each statement on one line."""
    plain = text.removeprefix("0\n").strip()
    if plain.startswith("{") and "\n{" not in plain:
        return json.dumps(json.loads(plain), indent=1, ensure_ascii=False)
    if "</html>" in text:
        return re.sub(r"\s*(<li[ >]|</ul>)", r"\n\1", text)
    found = ""
    for line in text.splitlines():
        is_wrapped = len(line) == WIDTH or line.endswith(" ")
        found += line.rstrip() + (" " if is_wrapped else "\n")
    return found


def _without(text: str, deletion: dict[str, Any]) -> str:
    """A document without keys, by the ends of their paths, or a text without the parts that expressions match."""
    if text.startswith("{\n"):
        document = _without_keys(json.loads(text), deletion.get("keys", []), "")
        return json.dumps(document, indent=1, ensure_ascii=False)
    for part in deletion.get("parts", ()):
        text = re.sub(part, "", text, flags=re.MULTILINE)
    return text


def _without_keys(value: Any, keys: list[str], path: str) -> Any:
    if isinstance(value, list):
        return [_without_keys(each, keys, path) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_keys(each, keys, f"{path}.{name}")
        for name, each in value.items()
        if not f"{path}.{name}".endswith(tuple(f".{key}" for key in keys))
    }


def _is_refilled(name: str, old: list[str], new: list[str]) -> bool:
    """Whether a plan's default text, which has room for so many lines, differs in other statements alone."""
    if (
        not name.startswith("plan ")
        or not name.endswith((".json", "--why"))
        or ": " in name
    ):
        return False
    gone = [line for line in old if line not in new]
    come = [line for line in new if line not in old]
    begin = old[:HEADLINES] == new[:HEADLINES]
    return begin and max(len(gone), len(come)) in range(1, 4)


def difference(before: Any, after: Any) -> tuple[float, str] | None:
    """The largest relative change of one term and its first values that differ; None where there is none."""
    if (
        isinstance(before, list)
        or isinstance(after, list)
        or before is None
        or after is None
    ):
        before, after = ([] if each is None else list(each) for each in (before, after))
        if before == after:
            return None
        first = next(
            (pair for pair in zip(before, after, strict=False) if pair[0] != pair[1]),
            None,
        )
        return (
            np.inf,
            f"{first[0]!r} -> {first[1]!r}"
            if first
            else f"{len(before)} -> {len(after)} values",
        )
    if before.shape != after.shape:
        return np.inf, f"{before.size} -> {after.size} values"
    with np.errstate(all="ignore"):
        change = np.abs(after - before) / np.maximum(np.abs(before), np.abs(after))
    change[(before == after) | (np.isnan(before) & np.isnan(after))] = 0.0
    change = np.where(np.isnan(change), np.inf, change)
    if not change.size or change.max() <= TOLERANCE:
        return None
    first = int(np.argmax(change > TOLERANCE))
    return float(change.max()), f"{before[first]:.12g} -> {after[first]:.12g}"


def compare(
    before: list[dict[str, Any]], after: list[dict[str, Any]], ignored: tuple[str, ...]
) -> Moved:
    moved: Moved = {}
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        terms = dict.fromkeys([*old, *new])
        if "refused" in terms:  # nothing else can be compared
            terms = dict.fromkeys(["refused", "refusal"])
        for term in terms:
            if term.startswith(ignored):
                continue
            if (found := difference(old.get(term), new.get(term))) is not None:
                moved.setdefault(term, []).append((number, *found))
    return moved


def show(moved: Moved, requests: list[dict[str, Any]], counts: str) -> None:
    if not moved:
        print(f"{counts}: nothing moved by more than {TOLERANCE:g}")
        return
    width = max(map(len, moved))
    print(f"{'term':{width}}  requests  largest change  first")
    for term, places in sorted(moved.items(), key=lambda item: item[1][0][0]):
        number, _, values = places[0]
        largest = max(change for _, change, _ in places)
        print(
            f"{term:{width}}  {len(places):8}  {largest:14.3g}  {number}: {values[:150]}"
        )
    first = min(place[0] for places in moved.values() for place in places)
    term, values = next(
        (term, places[0][2]) for term, places in moved.items() if places[0][0] == first
    )
    touched = len({place[0] for places in moved.values() for place in places})
    print(f"\n{counts}: {touched} requests moved")
    print(f"first: request {first}, {term}: {values}\n  {json.dumps(requests[first])}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "part", nargs="?", choices=("predictions", "surfaces"), default="predictions"
    )
    parser.add_argument(
        "--base", help="a revision; without it the merge base of main and the head"
    )
    parser.add_argument(
        "--head", default="", help="a revision; without it the working tree"
    )
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="kernels on random works, and their refits",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--ignore",
        nargs="+",
        default=[],
        metavar="TERM",
        help="terms that are not compared",
    )
    parser.add_argument(
        "--only", type=int, help="one request, by its number: its terms that moved"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="2: both sides at the same time"
    )
    parser.add_argument(
        "--quick", action="store_true", help="surfaces: fewer of them, in a minute"
    )
    parser.add_argument(
        "--tokens", action="store_true", help="surfaces: what drawn models speak, too"
    )
    parser.add_argument(
        "--deleted", metavar="FILE", help="surfaces: what is not compared, and why"
    )
    parser.add_argument("--update-golden", action="store_true")
    given = parser.parse_args()
    if given.update_golden:
        update_golden()
        return 0
    head = git("rev-parse", given.head) if given.head else ""
    base = (
        git("rev-parse", given.base)
        if given.base
        else git("merge-base", "main", head or "HEAD")
    )
    if given.part == "surfaces":
        with tempfile.TemporaryDirectory() as name:
            inputs = Path(name)
            command = ["git", "-C", ROOT, "archive", base, *FILES]
            archive = subprocess.run(command, check=True, capture_output=True)
            subprocess.run(["tar", "-x", "-C", name], input=archive.stdout, check=True)
            lines = commands(inputs, quick=given.quick)
            old, new = (
                surfaces(side, inputs, lines, tokens=given.tokens)
                for side in (base, head)
            )
        deleted: list[dict[str, Any]] = []
        if given.deleted:
            text = Path(given.deleted).read_text(encoding="utf-8")
            deleted = tomllib.loads(text)["deleted"]
        return compare_surfaces(old, new, tuple(given.ignore), deleted)
    if given.kernels:
        requests = draw_kernels(given.seed)
    else:
        requests = draw(
            given.requests if given.only is None else given.only + 1, seed=given.seed
        )
    requests = requests if given.only is None else [requests[given.only]]
    with ThreadPoolExecutor(given.jobs) as pool:
        before, after = pool.map(
            lambda revision: answers(revision, requests), (base, head)
        )
    moved = compare(before, after, tuple(given.ignore))
    numbers = sum(
        values.size
        for each in before
        for values in each.values()
        if isinstance(values, np.ndarray)
    )
    refused = sum("refused" in each for each in before)
    versions = f"{base[:9]} -> {head[:9] or 'working tree'}"
    counts = (
        f"{len(requests)} requests ({refused} refused), {numbers:,} numbers, {versions}"
    )
    show(moved, requests, counts)
    return int(bool(moved))


if __name__ == "__main__":
    sys.exit(main())
