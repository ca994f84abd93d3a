"""The atlas as pages: one self-contained HTML file, and Markdown for the documentation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from magicdec.atlas.cells import Answer, Cell
from magicdec.atlas.questions import Atlas
from magicdec.naming import device_name
from magicdec.reports.report import TEMPLATES as REPORT_TEMPLATES

TEMPLATES = Path(__file__).parent / "templates"
NO_VALUE = "–"


@dataclass(frozen=True, kw_only=True)
class Section:
    """The answers for one model on one device, in three sentences and a table."""

    anchor: str
    model: str
    device: str
    sentences: tuple[str, ...]
    cells: tuple[Cell, ...]


def sections_of(cells: Sequence[Cell]) -> Iterator[Section]:
    """One section for each model and device, in the order of the questions."""
    groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.model, cell.device].append(cell)
    for (model, device), group in groups.items():
        yield Section(
            anchor=f"{model}--{device}",
            model=model,
            device=device_name(device),
            sentences=tuple(_sentences(model, device, group)),
            cells=tuple(group),
        )


def render_html(atlas: Atlas, cells: Sequence[Cell]) -> str:
    """The whole atlas as one HTML file that needs no network."""
    import jinja2

    loader = jinja2.FileSystemLoader([TEMPLATES, REPORT_TEMPLATES])
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["gain"] = gain_text
    environment.filters["pays"] = pays_text
    environment.filters["dollars"] = dollars_text
    environment.filters["device"] = device_name
    loads = {load.name: load.title for load in atlas.loads}
    return environment.get_template("atlas.html").render(
        atlas=atlas,
        cells=cells,
        loads=loads,
        sections=list(sections_of(cells)),
        style=(REPORT_TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script=(REPORT_TEMPLATES / "report.js").read_text(encoding="utf-8"),
        summary=summary_of(cells),
    )


def render_markdown(atlas: Atlas, cells: Sequence[Cell]) -> str:
    """The atlas as Markdown: a table of models and devices for each load."""
    prices = atlas.prices
    lines = [
        f"# {atlas.title}",
        "",
        summary_of(cells),
        "",
        f"Each cell: draft, gamma, gain (90 % interval). Prices: {prices.source}, "
        f"read on {prices.read_on}. Built by `magicdec atlas`.",
        "",
    ]
    for load in atlas.loads:
        of_load = [cell for cell in cells if cell.load == load.name]
        lines.append(f"## {load.title}")
        lines.append("")
        lines += _markdown_table(atlas, of_load)
        lines.append("")
    return "\n".join(lines)


def summary_of(cells: Sequence[Cell]) -> str:
    """How many cells have which answer, in one sentence."""
    answered = 0
    drafted = 0
    sure = 0
    for cell in cells:
        if cell.answer is None:
            continue
        answered += 1
        gain = cell.answer.gain
        if gain is None:
            continue
        drafted += 1
        if gain.low > 1.0:
            sure += 1
    return (
        f"Of {len(cells)} cells {answered} fit; a draft is expected to pay in {drafted} "
        f"of them, with its whole 90 % interval above 1 in {sure}."
    )


def gain_text(answer: Answer) -> str:
    """The gain with its interval, as "1.35x (0.92–1.71)"."""
    if answer.gain is None:
        return NO_VALUE
    gain = answer.gain
    interval = f"{gain.low:.2f}–{gain.high:.2f}"
    return f"{gain.speedup:.2f}x ({interval})"


def pays_text(answer: Answer) -> str:
    """The probability that the draft is faster than decoding without one, never as certain."""
    if answer.gain is None:
        return NO_VALUE
    percent = 100.0 * answer.gain.probability
    percent = max(percent, 1.0)
    percent = min(percent, 99.0)
    return f"{percent:.0f} %"


def dollars_text(value: float | None) -> str:
    if value is None:
        return NO_VALUE
    return f"${value:.2f}"


def _sentences(model: str, device: str, cells: Sequence[Cell]) -> Iterator[str]:
    """Say what pays, by how much, and what a million tokens cost."""
    answered = [cell for cell in cells if cell.answer is not None]
    if not answered:
        yield f"{model} does not fit on {device_name(device)} under any of these loads."
        return
    yield _best_gain(model, device, answered, num_loads=len(cells))
    yield from _lowest_price(answered)


def _best_gain(model: str, device: str, cells: Sequence[Cell], *, num_loads: int) -> str:
    """Name the load that gains most from a draft."""
    best: tuple[float, Cell, Answer] | None = None
    num_drafted = 0
    for cell in cells:
        answer = cell.answer
        if answer is None or answer.gain is None:
            continue
        num_drafted += 1
        if best is None or answer.gain.speedup > best[0]:
            best = (answer.gain.speedup, cell, answer)
    if best is None:
        return f"On {device_name(device)}, {model} is served best without a draft."
    _, cell, answer = best
    devices = f"{answer.num_gpus} × {device_name(device)}"
    drafting = f"{answer.draft}, gamma {answer.gamma}"
    return (
        f"A draft pays under {num_drafted} of {num_loads} loads, most for {cell.load} on "
        f"{devices}: {drafting}, {gain_text(answer)}."
    )


def _lowest_price(cells: Sequence[Cell]) -> Iterator[str]:
    """Name the load whose tokens are cheapest, with and without the draft."""
    priced: list[tuple[float, Cell, Answer]] = []
    for cell in cells:
        answer = cell.answer
        if answer is not None and answer.usd_per_million_tokens is not None:
            priced.append((answer.usd_per_million_tokens, cell, answer))
    if not priced:
        return
    dollars, cell, answer = min(priced, key=lambda row: row[0])
    price = dollars_text(dollars)
    without = dollars_text(answer.usd_per_million_tokens_without)
    yield (
        f"A million generated tokens cost least for {cell.load}: {price}, "
        f"{without} without a draft."
    )


def _markdown_table(atlas: Atlas, cells: Sequence[Cell]) -> Iterator[str]:
    by_place = {(cell.model, cell.device): cell for cell in cells}
    head = ["model"]
    for device in atlas.devices:
        head.append(device_name(device.name))
    yield _markdown_row(head)
    yield "|---" * len(head) + "|"
    for model in atlas.models:
        texts = [model.name]
        for device in atlas.devices:
            cell = by_place[model.name, device.name]
            texts.append(_markdown_cell(cell))
        yield _markdown_row(texts)


def _markdown_row(texts: Sequence[str]) -> str:
    joined = " | ".join(texts)
    return f"| {joined} |"


def _markdown_cell(cell: Cell) -> str:
    if cell.answer is None:
        return NO_VALUE
    answer = cell.answer
    if answer.gain is None:
        return f"{answer.num_gpus} ×: no draft"
    drafting = f"{answer.draft} γ {answer.gamma}"
    return f"{answer.num_gpus} ×: {drafting}, {gain_text(answer)}"
