"""The atlas as pages: one self-contained HTML file, and Markdown for the documentation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evidence.atlas import Atlas, AtlasCell, CellAnswer, Published, published_of
from magicdec.naming import device_name
from magicdec.reports.report import TEMPLATES as REPORT_TEMPLATES

TEMPLATES = Path(__file__).parent / "templates"
NO_VALUE = "–"
BUILD = "python -m evidence atlas -o docs/atlas.html -o docs/atlas.md"
"""The command that builds the pages of the documentation."""
GAINS = (1.1, 1.25, 1.5, 2.0)
"""Gains at which a cell's shade grows stronger."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """The answers for one model on one device in one format, in three sentences and a table."""

    anchor: str
    model: str
    device: str
    weight_dtype: str
    sentences: tuple[str, ...]
    cells: tuple[AtlasCell, ...]
    published: tuple[Published, ...]
    """Measurements that others published of this model on this device."""


def sections_of(cells: Sequence[AtlasCell]) -> Iterator[Section]:
    """One section for each model, device and format, in the order of the questions."""
    groups: dict[tuple[str, str], list[AtlasCell]] = defaultdict(list)
    # the checkpoint's format, also on devices that serve none of the loads
    formats: dict[str, str] = {}
    for cell in cells:
        groups[cell.model, cell.device].append(cell)
        if cell.answer is not None:
            formats.setdefault(cell.model, cell.answer.weight_dtype)
    for (model, device), group in groups.items():
        weight_dtype = formats.get(model, "bf16")
        yield Section(
            anchor=f"{model}--{device}--{weight_dtype}",
            model=model,
            device=device_name(device),
            weight_dtype=weight_dtype,
            sentences=tuple(_sentences(model, device, group)),
            cells=tuple(group),
            published=tuple(published_of(model, device)),
        )


def render_html(atlas: Atlas, cells: Sequence[AtlasCell]) -> str:
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
    environment.filters["strength"] = strength_of
    environment.filters["predicted"] = predicted_text
    environment.filters["unit"] = unit_text
    loads = {load.name: load.title for load in atlas.loads}
    return environment.get_template("atlas.html").render(
        atlas=atlas,
        cells=cells,
        loads=loads,
        grids=list(_grids(atlas, cells)),
        sections=list(sections_of(cells)),
        style=(REPORT_TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script=(REPORT_TEMPLATES / "report.js").read_text(encoding="utf-8"),
        summary=summary_of(cells),
    )


def render_markdown(atlas: Atlas, cells: Sequence[AtlasCell]) -> str:
    """The atlas as Markdown: a table of models and devices for each load."""
    prices = atlas.prices
    lines = [
        f"# {atlas.title}",
        "",
        summary_of(cells),
        "",
        "Each cell: the fewest devices that hold the model, the draft that a plan chooses, gamma, "
        "and the gain over decoding without a draft at the same batch, with its 90 % interval. The "
        "[page](atlas.html) adds dollars, times and each cell's command, and can be sorted and "
        f"filtered. Prices: {prices.source}, read on {prices.read_on}. Both are built by",
        "",
        f"    {BUILD}",
        "",
    ]
    for load in atlas.loads:
        of_load = [cell for cell in cells if cell.load == load.name]
        lines.append(f"## {load.title}")
        lines.append("")
        lines += _markdown_table(atlas, of_load)
        lines.append("")
    lines += _markdown_published(cells)
    return "\n".join(lines)


def summary_of(cells: Sequence[AtlasCell]) -> str:
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
        f"{answered} of {len(cells)} cells have an answer; a draft is expected to pay in {drafted} "
        f"of them, with its whole 90 % interval above 1 in {sure}."
    )


def gain_text(answer: CellAnswer) -> str:
    """The gain with its interval, as "1.35x (0.92–1.71)"."""
    if answer.gain is None:
        return NO_VALUE
    gain = answer.gain
    interval = f"{gain.low:.2f}–{gain.high:.2f}"
    return f"{gain.speedup:.2f}x ({interval})"


def pays_text(answer: CellAnswer) -> str:
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


def _sentences(model: str, device: str, cells: Sequence[AtlasCell]) -> Iterator[str]:
    """Say what pays, by how much, and what a million tokens cost."""
    answered = [cell for cell in cells if cell.answer is not None]
    if not answered:
        yield f"{model} is served under none of these loads on {device_name(device)}."
        yield f"{cells[0].refusal}."
        return
    yield _best_gain(model, device, answered, num_loads=len(cells))
    yield _sure_gains(answered)
    yield from _lowest_price(answered)


def _best_gain(
    model: str, device: str, cells: Sequence[AtlasCell], *, num_loads: int
) -> str:
    """Name the load that gains most from a draft."""
    best: tuple[float, AtlasCell, CellAnswer] | None = None
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
        f"A draft is expected to pay under {num_drafted} of {num_loads} loads, most for "
        f"{cell.load} on {devices}: {drafting}, {gain_text(answer)}."
    )


def _sure_gains(cells: Sequence[AtlasCell]) -> str:
    """Name the loads whose gain is above 1 with its whole interval."""
    sure = []
    for cell in cells:
        if cell.answer is None or cell.answer.gain is None:
            continue
        if cell.answer.gain.low > 1.0:
            sure.append(cell.load)
    if not sure:
        return "Under none is the whole 90 % interval above 1: measure first."
    return f"The whole 90 % interval is above 1 for {', '.join(sure)}."


def _lowest_price(cells: Sequence[AtlasCell]) -> Iterator[str]:
    """Name the load whose tokens are cheapest, with and without the draft."""
    priced: list[tuple[float, AtlasCell, CellAnswer]] = []
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


@dataclass(frozen=True, kw_only=True)
class AtlasGrid:
    """The cells of one load: a row for each model, a column for each device."""

    name: str
    title: str
    rows: tuple[tuple[str, tuple[AtlasCell, ...]], ...]


def _grids(atlas: Atlas, cells: Sequence[AtlasCell]) -> Iterator[AtlasGrid]:
    by_place = {(cell.load, cell.model, cell.device): cell for cell in cells}
    for load in atlas.loads:
        rows = []
        for model in atlas.models:
            row = [
                by_place[load.name, model.name, device.name] for device in atlas.devices
            ]
            rows.append((model.name, tuple(row)))
        yield AtlasGrid(name=load.name, title=load.title, rows=tuple(rows))


def strength_of(cell: AtlasCell) -> int:
    """Shade of a cell by its gain, from 0 without a draft to 5."""
    if cell.answer is None or cell.answer.gain is None:
        return 0
    speedup = cell.answer.gain.speedup
    return 1 + sum(speedup >= least for least in GAINS)


def _markdown_published(cells: Sequence[AtlasCell]) -> Iterator[str]:
    """A table of published measurements of the cells' models and devices, hits and misses."""
    places = dict.fromkeys((cell.model, cell.device) for cell in cells)
    rows: list[Published] = []
    for model, device in places:
        rows += published_of(model, device)
    if not rows:
        return
    hits = sum(row.is_hit for row in rows)
    yield "## Published measurements"
    yield ""
    yield (
        f"Speedups that others measured on these devices, next to what a plan believes of the same "
        f"load, whose acceptance it does not know: {hits} of {len(rows)} lie in the 90 % interval. "
        "Most of their sources are among those that the engine's profile was fitted to."
    )
    yield ""
    head = ["model", "device", "engine", "draft", "users", "tokens in, out", "unit"]
    yield _markdown_row([*head, "measured", "predicted (90 %)", "source"])
    yield "|---" * (len(head) + 3) + "|"
    for row in rows:
        yield _markdown_row(
            [
                row.model,
                f"{row.num_gpus} × {device_name(row.device)}",
                row.engine,
                f"{row.draft} γ {row.gamma}",
                str(row.users),
                f"{row.prompt_len}, {row.output_len}",
                unit_text(row.unit),
                f"{row.measured:.2f}x",
                predicted_text(row),
                row.source,
            ]
        )
    yield ""


def unit_text(unit: str) -> str:
    """Name the quantity of a published row."""
    if unit == "tok_s":
        return "tokens/s"
    return "time per token"


def predicted_text(row: Published) -> str:
    """The predicted speedup with its interval, and whether the measured one is outside."""
    text = f"{row.predicted:.2f}x ({row.predicted_low:.2f}–{row.predicted_high:.2f})"
    if row.is_hit:
        return text
    return f"{text}, missed"


def _markdown_table(atlas: Atlas, cells: Sequence[AtlasCell]) -> Iterator[str]:
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
            texts.append(markdown_cell(cell))
        yield _markdown_row(texts)


def _markdown_row(texts: Sequence[str]) -> str:
    joined = " | ".join(texts)
    return f"| {joined} |"


def markdown_cell(cell: AtlasCell) -> str:
    """A cell of the Markdown table: devices, draft, gamma and gain."""
    if cell.answer is None:
        return NO_VALUE
    answer = cell.answer
    if answer.gain is None:
        return f"{answer.num_gpus} ×: no draft"
    drafting = f"{answer.draft} γ {answer.gamma}"
    return f"{answer.num_gpus} ×: {drafting}, {gain_text(answer)}"
