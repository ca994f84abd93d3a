"""`magicdec observe`: what a running server accepts, its load, and the gamma that would serve it best. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from magicdec.commands import completion
from magicdec.commands.options import require
from magicdec.progress import shown_progress

if TYPE_CHECKING:
    from magicdec.live.http import Address
    from magicdec.live.observation import Observation
    from magicdec.live.served_draft import Draft
    from magicdec.live.view import View

EPILOG = """\b
Examples:
  magicdec observe http://localhost:8000 --draft ngram -o acceptance.json
  magicdec observe http://localhost:8000 --draft eagle --model llama-3.1-8b --hardware h100-sxm-80gb --watch
  magicdec observe before.txt after.txt --draft ngram --model llama-3.1-8b -o acceptance.json
  magicdec observe trace.jsonl --draft ngram --context 4096 -o acceptance.json
  magicdec plan --draft ngram --acceptance acceptance.json
"""
USUAL_INTERVAL_S = 5.0
Formats = Annotated[
    str | None,
    typer.Option(help="The server's; default as published, on a CPU fp32.", autocompletion=completion.formats),
]


def observe_command(
    source: Annotated[
        list[str], typer.Argument(help="A server's address, two saved scrapes of its /metrics, or a trace.")
    ],
    draft: Annotated[
        str | None, typer.Option(help="What it drafts with: ngram, eagle, self, or a model; else as it says, or ngram.")
    ] = None,
    draft_method: Annotated[str | None, typer.Option(help="Of a sparse draft: streamingllm, snapkv, topk.")] = None,
    draft_budget: Annotated[int | None, typer.Option(min=1, help="KV slots that a sparse draft reads.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The target, as plans call it; default: the server's name.", autocompletion=completion.models
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long to look.")] = 30.0,
    interval: Annotated[
        float | None, typer.Option(help="Seconds between scrapes; default 5, or half of a shorter window.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="MODEL or MODEL/ENGINE, where an address has several.")] = None,
    context: Annotated[float | None, typer.Option(min=1, help="Length of sequences, where it is not counted.")] = None,
    dataset: Annotated[str, typer.Option(help="What the requests were, for the profile.")] = "",
    hardware: Annotated[
        str | None, typer.Option(help="The server's device: adds advice.", autocompletion=completion.hardware)
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Engine profile of the advice.", autocompletion=completion.engines)
    ] = None,
    acceptance: Annotated[
        Path | None, typer.Option(help="For advice where the server drafts nothing: a profile.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="The server's tensor-parallel size.")] = 1,
    temperature: Annotated[float, typer.Option(help="Of its requests; 0 is greedy.")] = 1.0,
    weight_dtype: Formats = None,
    kv_dtype: Formats = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep looking, with the trend, until stopped.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Acceptance profile to write.")] = None,
    records: Annotated[Path | None, typer.Option(help="Append a measured record.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")] = False,
) -> None:
    """Read a server's acceptance and load; advise on gamma.

    Acceptance by position, batch, context and times come from its metrics, from saved ones, or from a trace.
    """
    from magicdec.files import check_writable
    from magicdec.live.served_draft import agreed, parse_draft

    for path in (output, records):
        if path is not None:
            check_writable(path)
    require(
        draft is not None or (draft_method is None and draft_budget is None),
        "--draft-method and --draft-budget go with --draft",
    )
    given = None if draft is None else parse_draft(draft, method=draft_method, budget=draft_budget)
    if len(source) == 1 and Path(source[0]).is_file():
        require(records is None and not watch, "a trace holds acceptance only: --records and --watch need a server")
        _print_imported(
            Path(source[0]), draft=agreed(given, None), model=model, context=context, dataset=dataset, output=output
        )
        return
    from magicdec.live.http import Address
    from magicdec.live.profile import acceptance_profile, record
    from magicdec.live.scraping import parse_source
    from magicdec.live.situation import Serving
    from magicdec.live.view import View
    from magicdec.perfmodel.acceptance import load_profile, save_profile
    from magicdec.records import append_record

    where = parse_source(source)
    every = min(USUAL_INTERVAL_S, seconds / 2.0) if interval is None else interval
    serving = None
    if hardware is not None:
        serving = Serving(
            model=model or "", hardware=hardware, engine=engine, tp_size=tp, temperature=temperature,
            weight_dtype=weight_dtype, kv_dtype=kv_dtype,
        )  # fmt: skip
    known = load_profile(acceptance) if acceptance is not None else None
    view = View(draft=given, serving=serving, acceptance=known, context=context)
    if watch:
        require(
            isinstance(where, Address) and not output and not records, "--watch shows an address, and writes nothing"
        )
        assert isinstance(where, Address)
        _watch(where, view, target=target, seconds=seconds, interval=every)
        return
    seen = _look(where, target=target, seconds=seconds, interval=every, quiet=quiet)
    print("\n".join(view.lines(seen)))
    kind, name = agreed(given, seen.announced), model or seen.target.model
    if output is not None:
        save_profile(acceptance_profile(seen, kind, model=name, context=context, dataset=dataset), output)
        print(f"wrote {output}")
    if records is not None:
        append_record(records, record(seen, kind, model=name, hardware=hardware or "", tp_size=tp))
        print(f"appended to {records}")


def _look(
    where: Address | tuple[Path, Path], *, target: str | None, seconds: float, interval: float, quiet: bool
) -> Observation:
    from magicdec.errors import ServerError
    from magicdec.live.metrics import choose_target
    from magicdec.live.observation import observe
    from magicdec.live.scraping import scrapes

    taken = []
    try:
        with shown_progress(quiet) as show:
            for scrape in scrapes(where, seconds=seconds, interval_s=interval):
                taken.append(scrape)
                show(f"{choose_target(taken[0], target).name}: scrape {len(taken)}")
    except ServerError as error:
        if len(taken) < 2:
            raise
        print(f"the window ends early, after {len(taken)} scrapes: {error}")
    return observe(taken, choose_target(taken[-1], target))


def _watch(where: Address, view: View, *, target: str | None, seconds: float, interval: float) -> None:
    from rich.live import Live
    from rich.text import Text

    from magicdec.commands.options import console
    from magicdec.errors import ConfigError
    from magicdec.live.metrics import choose_target
    from magicdec.live.observation import observe
    from magicdec.live.watch import trend_lines, windows

    history: list[Observation] = []
    with Live(Text("waiting for the second scrape"), console=console(), auto_refresh=False) as screen:
        try:
            for taken in windows(where, seconds=seconds, interval_s=interval):
                history.append(observe(taken, choose_target(taken[-1], target)))
                try:
                    lines = view.lines(history[-1], with_setting=False)
                except ConfigError as error:  # no load yet, or no draft yet: said, and looked at again
                    lines = [str(error)]
                screen.update(Text("\n".join([*lines, "", *trend_lines(history)])), refresh=True)
        except KeyboardInterrupt:
            return


def _print_imported(
    path: Path, *, draft: Draft, model: str | None, context: float | None, dataset: str, output: Path | None
) -> None:
    from magicdec.live.profile import imported_profile
    from magicdec.live.show import rates_text
    from magicdec.perfmodel.acceptance import save_profile
    from magicdec.perfmodel.acceptance_import import read_acceptance

    require(context is not None, "a trace does not say how long its sequences are; give their length with --context")
    assert context is not None
    found = read_acceptance(path)
    profile = imported_profile(found, draft, model=model or "", context=context, dataset=dataset)
    print(f"{found.kind}: {found.num_steps:.0f} steps of {len(found.sequences)} sequences, drafted by {draft}")
    print(f"  accepted     {rates_text(profile.measured[0])}")
    if output is not None:
        save_profile(profile, output)
        print(f"wrote {output}")
