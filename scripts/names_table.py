"""Writes docs/names.md: every model and device that can be planned by name, and how each name resolves.

python scripts/names_table.py          # writes the page, a second
python scripts/names_table.py --check  # exits with 1 where the page is not what the catalog says
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from magicdec.naming import METHODS
from magicdec.perfmodel.acceptance.believed import kinds_of, known_checkpoints
from magicdec.perfmodel.kernels.profile import (
    HardwareProfile,
    hardware_aliases,
    hardware_names,
    load_hardware,
)
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.heads import KnownHead, published_heads
from magicdec.specs.names import NamedModel, named_models, names_file
from magicdec.units import GIGA, TERA

PAGE = Path(__file__).resolve().parent.parent / "docs" / "names.md"
INTRODUCTION = """\
# Models and devices by name

{num_models} models ({num_checkpoints} checkpoints on the Hugging Face hub) of {num_shapes} shapes, and
{num_devices} devices. Written by `scripts/names_table.py` from the catalog; a test compares the two.

## Models

A model goes by the name in the first column or by a Hugging Face id: in any case, with or without its owner, with
or without `-Instruct`, `-Chat`, `-it`, `-hf` or `-Base`, and with the suffix of a format (`-FP8`, `-AWQ`,
`-GPTQ-Int4`, `-NVFP4`, `-quantized.w8a8`, ...), which sets the format of the weights. Any other `owner/name` is
looked up in the local cache of the hub, then on the hub; a `config.json` or its directory does too.

*Shape*: whose `config.json` it has; `own` is the model's. *Source*: where that was read, see the end of the table.
*Acceptance of its own*: the drafts whose acceptance was published for this very model, with the number of heads.
All other drafts are believed from the drafts of other models ([acceptance](acceptance.md)): {num_without} of the
models have none of their own.

| model | first checkpoint | shape | weights | longest context | source | acceptance of its own |
|---|---|---|---|---|---|---|
"""
SOURCES = """
| source | what it is | models |
|---|---|---|
"""
HEADS = """
## Trained heads

What is known of published heads ([what can start](planning.md#what-can-start)): the hidden size and the vocabulary that
a target must have, the tokens that the head can propose, how many a step drafts at most, where the head has a block,
and the tokens of the texts it was trained on. *-*: any number, or not known. Heads that are not here are known by
their config.json, at hand or on the hub, or by their names.

| checkpoint | made for | method | hidden size | vocabulary | its own | at most | trained on | source |
|---|---|---|---|---|---|---|---|---|
"""
DEVICES = """
## Devices

A device goes by its name, by one of the others in the last column, or by what `nvidia-smi` prints, in any case. A
number of them stands in front (`4xh100`; `2x8xh200` are two nodes of eight) or behind (`h100:4`), a price per
device and hour after `=`.

Memory, bandwidth and dense bf16 rate are datasheets' unless the device's file says that they were measured; each
number's source stands there. *Kernels*: timed on this device, fitted to servers on it, or
carried over from the named device with a wider error.

| device | memory | bandwidth | bf16 | kernels | also |
|---|---|---|---|---|---|
"""


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(
            "docs/names.md is not what the catalog says: python scripts/names_table.py"
        )
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


def page() -> str:
    """The page of names."""
    models = named_models()
    rows = [model_cells(name, row) for name, row in sorted(models.items())]
    devices = [
        device_cells(name)
        for name in hardware_names()
        if not name.endswith("-measured")
    ]
    head = INTRODUCTION.format(
        num_models=len(models),
        num_checkpoints=sum(len(row.checkpoints) for row in models.values()),
        num_shapes=len({row.shape or name for name, row in models.items()}),
        num_devices=len(devices),
        num_without=sum(not kinds_of(name) for name in models),
    )
    return "".join(
        [
            head,
            *table(rows),
            SOURCES,
            *table(source_rows(models.values())),
            HEADS,
            *table(map(head_cells, published_heads())),
            DEVICES,
            *table(devices),
        ]
    )


def table(rows: Iterable[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |\n" for cells in rows]


def model_cells(name: str, row: NamedModel) -> list[str]:
    """How one name resolves."""
    spec = load_model_spec(name)
    weights = "bf16"
    if spec.quantization is not None:
        weights = spec.quantization.weight_dtype
    return [
        f"`{name}`",
        row.checkpoints[0],
        row.shape or "own",
        weights,
        f"{spec.longest_context:,}",
        row.source,
        ", ".join(published_drafts(name)) or "-",
    ]


def published_drafts(model: str) -> list[str]:
    """Kinds of draft with published acceptance on a model, heads with their number."""
    kinds = []
    for kind in sorted(kinds_of(model)):
        text = METHODS[kind].text if kind in METHODS else kind
        num_heads = len(known_checkpoints(model, kind))
        if kind in METHODS and METHODS[kind].is_head and num_heads > 1:
            text += f" ({num_heads})"
        kinds.append(text)
    return kinds


def source_rows(models: Iterable[NamedModel]) -> list[list[str]]:
    """Each source of shapes, and how many models are from there."""
    counts = Counter(row.source for row in models)
    rows = []
    for key, text in names_file().sources.items():
        rows.append([key, text, str(counts[key])])
    return rows


def head_cells(head: KnownHead) -> list[str]:
    """What is known of one head."""
    numbers = (
        head.hidden_size,
        head.vocab_size,
        head.draft_vocab_size,
        head.most_drafts,
        head.trained_len,
    )
    known = ["-" if number is None else f"{number:,}" for number in numbers]
    method = METHODS[head.method].text
    where = head.source.removeprefix("https://")
    return [head.checkpoint, head.target, method, *known, f"[{where}]({head.source})"]


def device_cells(name: str) -> list[str]:
    """How one device resolves."""
    device = load_hardware(name)
    others = [alias for alias, of in hardware_aliases().items() if of == name]
    others.remove(name)
    return [
        f"`{name}`",
        f"{device.memory_bytes / GIGA:.0f} GB",
        f"{device.memory_bytes_per_s / TERA:.3g} TB/s",
        f"{device.compute_rate('bf16') / TERA:.4g} TFLOP/s",
        kernels_of(device),
        ", ".join(f"`{alias}`" for alias in others) or "-",
    ]


def kernels_of(device: HardwareProfile) -> str:
    """Where the times of a device's linear layers and attention come from."""
    if device.is_measured:
        return "timed"
    lenders = []
    own = []
    for curve in (device.gemm, device.attention):
        if curve is None:
            continue
        if curve.fit.borrowed_from not in ("", *lenders):
            lenders.append(curve.fit.borrowed_from)
        elif curve.fit.fitted_on and not curve.fit.borrowed_from:
            own.append(curve.fit.fitted_on)
    if lenders:
        return f"of {', '.join(lenders)}"
    if own:
        return f"fitted to {', '.join(own)}"
    return "datasheet alone"


if __name__ == "__main__":
    sys.exit(main())
