"""`magicdec observe`: a running server's acceptance and load, and the gamma that suits it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from magicdec.commands import options
from magicdec.commands.options import OutputFormat, console, option, print_as, require
from magicdec.errors import ConfigError, ServerError
from magicdec.progress import shown_progress
from magicdec.specs.speculation import MAX_GAMMA
from magicdec.units import format_seconds

if TYPE_CHECKING:
    from magicdec.live.http import Address
    from magicdec.live.judgement import Judgement, ServerFacts
    from magicdec.live.observation import Observation, ServedDraft

EPILOG = options.examples(
    "observe http://localhost:8000 --draft ngram -o acceptance.json",
    "observe http://localhost:8000 --draft eagle --model llama-3.1-8b --hardware h100 --watch",
    "observe before.txt after.txt --draft ngram --model llama-3.1-8b -o acceptance.json",
    "observe trace.jsonl --draft ngram --context 4096 -o acceptance.json",
    "plan --draft ngram --acceptance acceptance.json",
)
USUAL_INTERVAL_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObserveOptions:
    """Options of `magicdec observe`: the server or files to look at."""

    source: Annotated[
        list[str],
        typer.Argument(
            help="A server's address, or files: its log, scrapes of its /metrics, a load generator's result, a trace."
        ),
    ]
    draft: Annotated[
        str | None,
        option(
            "The server's draft: ngram, eagle, self, or a model; default: as announced, or ngram."
        ),
    ] = None
    draft_method: Annotated[
        str | None, option("Method of a sparse draft: streamingllm, snapkv, topk.")
    ] = None
    draft_budget: Annotated[
        int | None, option("KV slots that a sparse draft reads.", min=1)
    ] = None
    gamma: Annotated[
        int | None,
        option(
            "Drafted tokens per step, where it tells only an accept length; default: the draft's usual "
            "number.",
            min=1,
            max=MAX_GAMMA,
        ),
    ] = None
    model: Annotated[
        str | None, option("The target, as plans call it; default: the server's name.")
    ] = None
    seconds: Annotated[float, option("How long to look.")] = 30.0
    interval: Annotated[
        float | None,
        option("Seconds between scrapes; default 5, or half of a shorter window."),
    ] = None
    target: options.Target = None
    context: Annotated[
        float | None,
        option(
            "Length of sequences, for servers that do not count it.", min=1, max=10**9
        ),
    ] = None
    dataset: Annotated[str, option("What the requests were, for the profile.")] = ""
    hardware: Annotated[str | None, option("The server's device: adds advice.")] = None
    engine: Annotated[str | None, option("Engine profile of the advice.")] = None
    acceptance: Annotated[
        Path | None, option("For advice where the server drafts nothing: a profile.")
    ] = None
    tp: options.ServerTp = None
    temperature: options.ServerTemperature = 1.0
    weight_dtype: options.ServerFormat = None
    kv_dtype: options.ServerFormat = None
    watch: Annotated[
        bool, option("Keep looking, with the trend, until stopped.", "--watch")
    ] = False
    output: Annotated[
        Path | None, option("Acceptance profile to write.", "--output", "-o")
    ] = None
    records: Annotated[Path | None, option("Append a measured record.")] = None
    output_format: options.Format = OutputFormat.TABLE
    quiet: options.Quiet = False

    @property
    def interval_s(self) -> float:
        """Seconds between scrapes, at least two of which are in the window."""
        if self.interval is not None:
            return self.interval
        return min(USUAL_INTERVAL_S, self.seconds / 2.0)


@options.asks(ObserveOptions)
def observe_command(asked: ObserveOptions) -> None:
    """Read a server's acceptance and load; advise on gamma.

    Acceptance by position, batch, context and times come from its metrics, from saved ones, or from
    a trace.
    """
    from magicdec.files import check_writable
    from magicdec.live.observation import agreed

    for path in filter(None, (asked.output, asked.records)):
        check_writable(path)
    requested = _requested_draft(asked)
    from magicdec.live.forms import read_files
    from magicdec.live.http import parse_address
    from magicdec.live.judgement import Judgement
    from magicdec.live.profile import weighed

    paths = [Path(each) for each in asked.source]
    observation: Observation | None = None
    if all(path.is_file() for path in paths):
        require(not asked.watch, "--watch shows an address, and writes nothing")
        observation = read_files(paths, asked.target)
    elif len(paths) > 1:
        raise ConfigError("observe takes one address, or files that are there")
    facts = _facts(asked, requested)
    if observation is None:
        where = parse_address(asked.source[0])
        if asked.watch:
            require(
                asked.output is None and asked.records is None,
                "--watch shows an address, and writes nothing",
            )
            _watch(where, facts, asked)
            return
        observation = _look(where, asked)
    drafted_by = agreed(requested, observation.announced)
    observation = weighed(observation, drafted_by, asked.gamma)
    _print_observation(Judgement(observation, facts), asked.output_format)
    require(
        not drafted_by.is_assumed or (asked.output is None and asked.records is None),
        "the log does not say what drafts: say it with --draft",
    )
    _write_observation(observation, drafted_by, asked)


def _requested_draft(asked: ObserveOptions) -> ServedDraft | None:
    from magicdec.live.observation import parse_draft

    if asked.draft is not None:
        return parse_draft(
            asked.draft, method=asked.draft_method, budget=asked.draft_budget
        )
    require(
        asked.draft_method is None and asked.draft_budget is None,
        "--draft-method and --draft-budget go with --draft",
    )
    return None


def _facts(asked: ObserveOptions, draft: ServedDraft | None) -> ServerFacts:
    """The server as the options describe it, with its device where advice is wanted."""
    from magicdec.live.advice import Serving
    from magicdec.live.judgement import ServerFacts
    from magicdec.perfmodel.acceptance import load_profile

    serving = None
    if asked.hardware is not None:
        serving = Serving(
            model=asked.model or "",
            hardware=asked.hardware,
            engine=asked.engine,
            tp_size=options.server_tp(asked.tp, asked.hardware),
            temperature=asked.temperature,
            weight_dtype=asked.weight_dtype,
            kv_dtype=asked.kv_dtype,
        )
    acceptance = None
    if asked.acceptance is not None:
        acceptance = load_profile(asked.acceptance)
    return ServerFacts(
        draft=draft, serving=serving, acceptance=acceptance, context=asked.context
    )


def _print_observation(judged: Judgement, output_format: OutputFormat) -> None:
    """Prints a judged observation's lines, or its document."""
    from magicdec.live.show import document_of, lines_of

    if output_format is OutputFormat.TABLE:
        print("\n".join(lines_of(judged)))
        return
    document = document_of(judged)
    rows = (document["advice"] or {}).get("choices", [])
    require(
        output_format is OutputFormat.JSON or rows,
        "csv is a row per gamma: give --hardware, for advice",
    )
    print_as(output_format, document, rows, lambda: None)


def _write_observation(
    observation: Observation, draft: ServedDraft, asked: ObserveOptions
) -> None:
    """Writes the acceptance profile and the record that were requested, and says so next to the
    table, or on stderr where a document is printed."""
    from magicdec.live.profile import acceptance_profile, record
    from magicdec.perfmodel.acceptance import save_profile
    from magicdec.schema.record import append_record
    from magicdec.specs.names import model_name

    file = sys.stderr
    if asked.output_format is OutputFormat.TABLE:
        file = sys.stdout
    model = model_name(asked.model or observation.target.model)
    if asked.output is not None:
        measured = acceptance_profile(
            observation,
            draft,
            model=model,
            context=asked.context,
            dataset=asked.dataset,
        )
        save_profile(measured, asked.output)
        command = options.command(
            "plan", model=model, hardware=asked.hardware, acceptance=asked.output
        )
        print(f"wrote {asked.output}\nnext: {command}", file=file)
    if asked.records is not None:
        row = record(
            observation,
            draft,
            model=model,
            hardware=asked.hardware or "",
            tp_size=options.server_tp(asked.tp, asked.hardware),
        )
        append_record(asked.records, row)
        print(f"appended to {asked.records}", file=file)


def _look(where: Address, asked: ObserveOptions) -> Observation:
    from magicdec.live.metrics import choose_target, scrapes
    from magicdec.live.observation import observe

    taken = []
    try:
        with shown_progress(asked.quiet) as show:
            for scrape in scrapes(
                where, seconds=asked.seconds, interval_s=asked.interval_s
            ):
                taken.append(scrape)
                target = choose_target(taken[0], asked.target)
                show(f"{target.name}: scrape {len(taken)}")
    except ServerError as error:
        if len(taken) < 2:
            raise
        print(
            f"the window ends early, after {len(taken)} scrapes: {error}",
            file=sys.stderr,
        )
    return observe(taken, choose_target(taken[-1], asked.target))


def _watch(where: Address, facts: ServerFacts, asked: ObserveOptions) -> None:
    from rich.live import Live
    from rich.text import Text

    from magicdec.live.judgement import Judgement
    from magicdec.live.metrics import choose_target, windows
    from magicdec.live.observation import agreed, observe
    from magicdec.live.profile import weighed
    from magicdec.live.show import lines_of, trend_lines

    history: list[Observation] = []
    with Live(
        Text("waiting for the second scrape"),
        console=console(),
        auto_refresh=False,
    ) as screen:

        def show(lines: list[str]) -> None:
            screen.update(
                Text("\n".join([*lines, "", *trend_lines(history)])), refresh=True
            )

        def missed(error: ServerError) -> None:
            show([f"{error}; asked again every {format_seconds(asked.interval_s)}"])

        try:
            for taken in windows(
                where,
                seconds=asked.seconds,
                interval_s=asked.interval_s,
                missed=missed,
            ):
                try:
                    seen = observe(taken, choose_target(taken[-1], asked.target))
                    draft = agreed(facts.draft, seen.announced)
                    history.append(weighed(seen, draft, asked.gamma))
                    judged = Judgement(history[-1], facts)
                    show(lines_of(judged, with_setting=False))
                except (ConfigError, ServerError) as error:
                    show([str(error)])  # no load yet, no draft yet, or no model yet
        except KeyboardInterrupt:
            return
