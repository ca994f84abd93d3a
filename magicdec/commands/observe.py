"""`magicdec observe`: what a running server accepts, and its load, from its metrics. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from magicdec.commands import completion
from magicdec.commands.options import end_progress, progress_printer, require

EPILOG = """Examples:\n
  magicdec observe http://localhost:8000 --draft ngram -o acceptance.json\n
  magicdec observe before.txt after.txt --draft ngram --model llama-3.1-8b -o acceptance.json\n
  magicdec observe trace.jsonl --draft ngram --context 4096 -o acceptance.json\n
  magicdec plan --draft ngram --acceptance acceptance.json
"""


def observe_command(
    source: Annotated[
        list[str], typer.Argument(help="A server's address, two saved scrapes of its /metrics, or a trace.")
    ],
    draft: Annotated[str, typer.Option(help="What the server drafts with: ngram, eagle, or a model.")] = "ngram",
    model: Annotated[
        str | None,
        typer.Option(
            help="The target, as plans call it; default: the server's name.", autocompletion=completion.models
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long to look.")] = 30.0,
    interval: Annotated[float, typer.Option(help="Seconds between scrapes.")] = 5.0,
    target: Annotated[str | None, typer.Option(help="MODEL or MODEL/ENGINE, where an address has several.")] = None,
    context: Annotated[float | None, typer.Option(min=1, help="Length of sequences, where it is not counted.")] = None,
    dataset: Annotated[str, typer.Option(help="What the requests were, for the profile.")] = "",
    hardware: Annotated[str, typer.Option(help="Named in the record.", autocompletion=completion.hardware)] = "",
    tp: Annotated[int, typer.Option(min=1, help="Named in the record.")] = 1,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Acceptance profile to write.")] = None,
    records: Annotated[Path | None, typer.Option(help="Append a measured record.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")] = False,
) -> None:
    """Read a server's acceptance by position, load and times from its metrics."""
    from magicdec.files import check_writable

    for path in (output, records):
        if path is not None:
            check_writable(path)
    if len(source) == 1 and Path(source[0]).is_file():
        require(records is None, "a trace holds acceptance only: --records needs a server or two scrapes")
        _print_imported(Path(source[0]), draft=draft, model=model, context=context, dataset=dataset, output=output)
        return
    from magicdec.live.metrics import choose_target
    from magicdec.live.observation import observe
    from magicdec.live.profile import acceptance_profile, parse_draft, record
    from magicdec.live.scraping import parse_source, scrapes
    from magicdec.live.show import observation_lines
    from magicdec.perfmodel.acceptance import save_profile
    from magicdec.records import append_record

    kind, where = parse_draft(draft), parse_source(source)
    show, taken = progress_printer(quiet), []
    try:
        for scrape in scrapes(where, seconds=seconds, interval_s=interval):
            taken.append(scrape)
            chosen = choose_target(taken[0], target)
            show(f"{chosen.name}: scrape {len(taken)}")
    finally:
        end_progress(quiet)
    seen = observe(taken, choose_target(taken[-1], target))
    print("\n".join(observation_lines(seen, kind)))
    name = model or seen.target.model
    if output is not None:
        save_profile(acceptance_profile(seen, kind, model=name, context=context, dataset=dataset), output)
        print(f"wrote {output}")
    if records is not None:
        append_record(records, record(seen, kind, model=name, hardware=hardware, tp_size=tp))
        print(f"appended to {records}")


def _print_imported(
    path: Path, *, draft: str, model: str | None, context: float | None, dataset: str, output: Path | None
) -> None:
    from magicdec.live.profile import imported_profile, parse_draft
    from magicdec.live.show import rates_text
    from magicdec.perfmodel.acceptance import save_profile
    from magicdec.perfmodel.acceptance_import import read_acceptance

    require(context is not None, "a trace does not say how long its sequences are; give their length with --context")
    assert context is not None
    found = read_acceptance(path)
    profile = imported_profile(found, parse_draft(draft), model=model or "", context=context, dataset=dataset)
    print(f"{found.kind}: {found.num_steps:.0f} steps of {len(found.sequences)} sequences")
    print(f"  accepted     {rates_text(profile.measured[0])}")
    if output is not None:
        save_profile(profile, output)
        print(f"wrote {output}")
