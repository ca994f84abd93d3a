"""Writes what is known of every architecture: magicdec/specs/data/architectures.json, which `magicdec models
--architectures` prints, and docs/architectures.md.

    python scripts/architectures_table.py          # counts with transformers, a minute
    python scripts/architectures_table.py --check  # exits with 1 where they are not what specs and tests say; seconds

Kinds of layers, and whether they run, are those of the drawn configurations (tests/specs/architectures.py) and of the
catalog's models; configurations tested for parity are those of tests/runtime/test_architectures.py; transformers counts
on the meta device. `--check` keeps the counts of transformers that stand in the file.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from magicdec.specs.catalog import (
    ARCHITECTURES_FILE,
    MODELS_DIRECTORY,
    load_model_spec,
    model_shapes,
)
from magicdec.specs.families import ARCHITECTURES, WRAPPERS
from magicdec.specs.hf_config import model_from_hf_config
from magicdec.specs.model import ModelSpec, why_not_run

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "architectures.md"
SEEDS = range(6)
ORACLES = {"nemotron-nas": "transformers' Llama modules"}
"""Of architectures that transformers does not have (tests/specs/decilm.py)."""
INTRODUCTION = """\
# Architectures

What `magicdec plan` reads from a `config.json`, by its `model_type`, and what `magicdec run` runs; the same table in a
terminal:

    magicdec models --architectures

All of them are planned. Those with a number under *parity* are also run: that many randomly drawn configurations give
the greedy tokens and logits of their oracle, alone and with every draft. The others say which part is not run.
*Oracle*: weights, caches, states and the FLOPs of a prompt, a decoded token and a verification are compared with the
modules of transformers {version}, for drawn configurations of each.

*Layers*: attention that is full, in a window or a chunk, latent (MLA), or to chosen tokens (an indexer's); recurrences;
dense feed-forwards (mlp) and mixtures of experts.

| model_type | layers | parity | oracle | models of the catalog |
|---|---|---|---|---|
"""
COUNTS = """
Models of several modalities are read by their decoder: {wrappers}.

## Weights

Of decoders, a tied head counted once, without prediction heads: ours, and what transformers' module counts that is
built from the publisher's own `config.json`.

| model | architecture | ours | transformers |
|---|---|---|---|
"""
FOOT = """
Written by `scripts/architectures_table.py`.
"""


def specs_of(model_type: str, models: dict[str, ModelSpec]) -> list[ModelSpec]:
    """Drawn configurations of an architecture, and the catalog's models of it."""
    from tests.specs.architectures import READ_BY_TRANSFORMERS, draw
    from tests.specs.counted import OTHERS_ROW

    drawn = OTHERS_ROW.get(model_type, model_type)
    configs = (
        [draw(drawn, seed) for seed in SEEDS] if drawn in READ_BY_TRANSFORMERS else []
    )
    found = [
        model_from_hf_config(
            {**each, "model_type": model_type}, name="drawn", where="drawn"
        )
        for each in configs
    ]
    return [
        *found,
        *(spec for spec in models.values() if spec.architecture == model_type),
    ]


def kinds(specs: list[ModelSpec]) -> list[str]:
    """What their layers are made of, without numbers: "window", "experts"."""
    labels = [
        part.label for spec in specs for part, _ in (*spec.mixers, *spec.feed_forwards)
    ]
    short = [re.sub(r"\d+ of \d+ experts", "experts", each) for each in labels]
    return list(dict.fromkeys(re.sub(r" \d+$|(?<=, )\d+ ", "", each) for each in short))


def architecture_row(model_type: str, models: dict[str, ModelSpec]) -> dict[str, Any]:
    from tests.runtime.test_architectures import CASES
    from tests.specs.architectures import READ_BY_TRANSFORMERS
    from tests.specs.counted import OTHERS_ROW

    specs = specs_of(model_type, models)
    drawn = OTHERS_ROW.get(model_type, model_type)
    unquantized = [msgspec.structs.replace(spec, quantization=None) for spec in specs]
    reasons = [
        reason for spec in unquantized if (reason := why_not_run(spec)) is not None
    ]
    return {
        "architecture": model_type,
        "layers": kinds(specs),
        "planned": True,
        "why_not_run": reasons[0] if reasons else None,
        "parity_configurations": sum(case.values[0] == drawn for case in CASES),
        "oracle": ORACLES.get(drawn, "transformers")
        if drawn in READ_BY_TRANSFORMERS
        else None,
        "models": {
            name: spec.num_parameters
            for name, spec in models.items()
            if spec.architecture == model_type
        },
    }


def counted(name: str) -> int:
    from tests.specs.counted import counted_parameters

    return counted_parameters(
        json.loads((MODELS_DIRECTORY / f"{name}.json").read_text(encoding="utf-8"))
    )


def facts(known: dict[str, Any] | None) -> dict[str, Any]:
    """The file's content; transformers' counts are those of `known`, where that is given."""
    models = {name: load_model_spec(name) for name in model_shapes()}
    if known is None:
        import transformers

        known = {
            "transformers": transformers.__version__,
            "counted": {name: counted(name) for name in models},
        }
    rows = [architecture_row(model_type, models) for model_type in ARCHITECTURES]
    return {
        "transformers": known["transformers"],
        "architectures": sorted(rows, key=lambda row: row["architecture"]),
        "counted": {name: known["counted"].get(name) for name in models},
    }


def page(content: dict[str, Any]) -> str:
    lines = []
    for row in content["architectures"]:
        parity = (
            f"{row['parity_configurations']} configurations"
            if row["parity_configurations"]
            else "not run"
        )
        why = f": {row['why_not_run']}" if row["why_not_run"] else ""
        cells = [
            f"`{row['architecture']}`",
            ", ".join(row["layers"]),
            parity + why,
            row["oracle"] or "-",
        ]
        lines.append(f"| {' | '.join([*cells, ', '.join(row['models']) or '-'])} |\n")
    counts = []
    for row in content["architectures"]:
        for name, parameters in row["models"].items():
            theirs = content["counted"].get(name, 0)
            counts.append(
                f"| {name} | `{row['architecture']}` | {parameters:,} | {theirs:,} |\n"
            )
    wrappers = ", ".join(f"`{name}` as `{inside}`" for name, inside in WRAPPERS.items())
    head = INTRODUCTION.format(version=content["transformers"])
    return "".join((head, *lines, COUNTS.format(wrappers=wrappers), *counts, FOOT))


def main() -> int:
    is_check = "--check" in sys.argv[1:]
    known = (
        json.loads(ARCHITECTURES_FILE.read_text(encoding="utf-8")) if is_check else None
    )
    content = facts(known)
    written = {
        ARCHITECTURES_FILE: json.dumps(content, indent=1) + "\n",
        PAGE: page(content),
    }
    stale = [
        path
        for path, text in written.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if is_check:
        for path in stale:
            print(
                f"{path.relative_to(ROOT)} is not what specs and tests say: python scripts/architectures_table.py"
            )
        return 1 if stale else 0
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
