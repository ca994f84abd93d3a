"""The files that `observe` reads: how each form is told from the others, and its reader."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from magicdec.errors import ConfigError, StorageError
from magicdec.files import json_documents, read_bytes
from magicdec.live import engine_logs, llama_cpp, load_results
from magicdec.live.cost_check import is_cost_run
from magicdec.live.metrics import (
    NOT_TOLD,
    PREFIXES,
    Scrape,
    Target,
    choose_target,
    parse,
    targets,
)
from magicdec.live.observation import UNNAMED, CounterIncreases, Observation, observe
from magicdec.live.reading import Reading, Readings, observation_of, summed
from magicdec.perfmodel.acceptance.files import (
    ImportedAcceptance,
    is_acceptance,
    read_acceptance,
)
from magicdec.redaction import quoted
from magicdec.units import MIB, format_count

LOG_LIMIT_BYTES = 256 * MIB
"""Size above which no log is read."""
ALWAYS = 0.98
"""Share of steps with a draft from which it is none that is looked up: a look-up may find nothing."""
GZIP = b"\x1f\x8b"
COLOURS = re.compile(r"\x1b\[[0-9;]{0,16}m")
SHOWN_FIELDS = 6
SHOWN = 40
SCRAPE = re.compile(
    rf"^(?:{'|'.join(map(re.escape, PREFIXES))})\w+(?:\{{|\s)", re.MULTILINE
)


class Form(NamedTuple):
    """One kind of text. `is_it` is a quick look at the first JSON object or at the whole text, `read`
    takes all JSON documents or the text."""

    name: str
    is_it: Callable[[Any], bool]
    read: Callable[[Any], Readings]


JSON_FORMS = (
    Form(
        "vLLM or SGLang benchmark result",
        load_results.is_result,
        load_results.read_result,
    ),
    Form(
        "GenAI-Perf or AIPerf summary",
        load_results.is_summary,
        load_results.read_summary,
    ),
    Form("AIPerf records", load_results.is_aiperf, load_results.read_aiperf),
    Form("GuideLLM report", load_results.is_guidellm, load_results.read_guidellm),
    Form("llama.cpp answers", llama_cpp.is_llama_answer, llama_cpp.read_llama_answers),
)
TEXT_FORMS = (
    Form("benchmark report", load_results.is_report, load_results.read_report),
    Form("vLLM log", engine_logs.is_vllm_log, engine_logs.read_vllm_log),
    Form("SGLang log", engine_logs.is_sglang_log, engine_logs.read_sglang_log),
    Form("llama.cpp log", llama_cpp.is_llama_log, llama_cpp.read_llama_log),
    Form("llama-speculative", llama_cpp.is_llama_report, llama_cpp.read_llama_report),
)
OTHERS = (
    "Prometheus metrics of vLLM, SGLang, TensorRT-LLM or llama.cpp",
    "a trace (JSON lines of accepted_lengths)",
    "SGLang's and vLLM's answers",
)


def read_files(paths: Sequence[Path], wanted: str | None = None) -> Observation:
    """Reads one file, or several of a kind in the order of time.

    `wanted` is the engine among several of a scrape; None: all of one model, summed.

    Raises ConfigError, StorageError or ServerError for what cannot be read, and for the runs of a
    cost check: their acceptance is imposed.
    """
    of_costs = " ".join(f"--results {path.name}" for path in paths if is_cost_run(path))
    if of_costs:
        raise ConfigError(
            "a cost check imposes its acceptance, so there is none to observe; its costs are read by "
            f"magicdec calibrate {of_costs} --plan PLAN.json -o measured.toml"
        )
    texts = [(str(path), _text(path)) for path in paths]
    seen = seen_in(texts, wanted)
    if seen is not None:
        return seen
    documents = documents_of(texts[0][1])
    if len(paths) == 1 and documents and is_acceptance(documents[0]):
        return observation_of(of_sequences(read_acceptance(paths[0])))
    where, text = next(each for each in texts if form_of(each[1]) is None)
    raise ConfigError(f"{where} is {looks_like(text)}; {forms_text()}")


def seen_in(
    texts: Sequence[tuple[str, str]], wanted: str | None = None
) -> Observation | None:
    """Reads texts, each with where it is from. None: one is of no form that is read.

    Raises ConfigError or ServerError for what cannot be read.
    """
    if all(SCRAPE.search(text) for _, text in texts):
        return observed([parse(text, where=where) for where, text in texts], wanted)
    forms = []
    for _, text in texts:
        form = form_of(text)
        if form is None:
            return None
        forms.append(form)
    if len({form.name for form in forms}) > 1:
        names = ", ".join(form.name for form in forms)
        raise ConfigError(
            f"these files are of several forms ({names}): give those of one"
        )
    form = forms[0]
    try:
        if form in JSON_FORMS:
            documents = [each for _, text in texts for each in documents_of(text)]
            readings = form.read(documents)
        else:
            readings = form.read("\n".join(text for _, text in texts))
        return observation_of(replace(readings, form=form.name))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else "another structure"
        raise ConfigError(
            f"{texts[0][0]} is told to be of the form {form.name}, and has {what}"
        ) from None


def of_sequences(imported: ImportedAcceptance) -> Readings:
    """A file's counts, by sequence."""
    counts = imported.counts
    readings = []
    for steps, accepted in zip(counts.steps, counts.accepted, strict=True):
        by_position = tuple(float(count) for count in accepted)
        readings.append(
            Reading(
                counts=CounterIncreases(
                    drafts=float(steps),
                    accepted=math.fsum(by_position),
                    accepted_by_position=by_position,
                    counted_steps=float(steps),
                )
            )
        )
    return Readings(
        form=imported.kind,
        series=NOT_TOLD,
        unit="sequences",
        readings=readings,
        draft=UNNAMED,
    )


def _text(path: Path) -> str:
    """A file's text without the colours of a terminal."""
    data = read_bytes(path, limit_bytes=LOG_LIMIT_BYTES, error=StorageError)
    if data.startswith(GZIP):
        raise StorageError(
            f"{path} is compressed: gunzip -k {path}, and give that file"
        )
    text = data.decode("utf-8-sig", errors="replace")
    return COLOURS.sub("", text) if "\x1b" in text else text


@functools.lru_cache(maxsize=1)
def documents_of(text: str) -> tuple[Any, ...]:
    """The documents of a JSON text, or of JSON lines; empty: it is none."""
    if text.lstrip()[:1] not in ("{", "["):
        return ()
    try:
        return tuple(document for _, document in json_documents(text))
    except ValueError:
        return ()


def form_of(text: str) -> Form | None:
    documents = documents_of(text)
    if documents and isinstance(documents[0], dict):
        for form in JSON_FORMS:
            if form.is_it(documents[0]):
                return form
    for form in TEXT_FORMS:
        if form.is_it(text):
            return form
    return None


def observed(scrapes: Sequence[Scrape], wanted: str | None) -> Observation:
    """Scrapes in order; one alone tells of all since the server started. Data-parallel engines of one
    model are summed, unless one is wanted.

    Raises ConfigError where several models are served and none is wanted.
    """
    since_start = len(scrapes) == 1
    taken = list(scrapes)
    if since_start:
        taken = [Scrape(samples={}, where=scrapes[0].where), scrapes[0]]

    def of_one(target: Target) -> Observation:
        seen = observe(taken, target)
        if since_start:
            note = (
                "one scrape: all since the server started, and gauges of that instant"
            )
            seen = replace(seen, num_scrapes=1, notes=(note, *seen.notes))
        draft = seen.announced
        if draft is None and (seen.drafted_share or 0.0) >= ALWAYS:
            draft = UNNAMED
        return replace(seen, form="Prometheus metrics", announced=draft)

    there = targets(taken[-1])
    if wanted is None and len(there) > 1 and len({each.model for each in there}) == 1:
        return summed([of_one(target) for target in there])
    return of_one(choose_target(taken[-1], wanted))


def forms_text() -> str:
    """The forms that are read, in one sentence."""
    names = [form.name for form in (*JSON_FORMS, *TEXT_FORMS)]
    return f"read are: {', '.join([*names, *OTHERS])}"


def _json_error(text: str) -> str:
    try:
        json_documents(text)
    except ValueError as error:
        return str(error)
    return "it holds nothing"


def looks_like(text: str) -> str:
    """Tells a text of no known form by its looks."""
    start = text.lstrip()
    if not start:
        return "empty"
    if "\x00" in text[:4096]:
        return "no text"
    if start[:1] in ("{", "["):
        documents = documents_of(text)
        if not documents:
            return f"no JSON, though it begins so: {_json_error(text)}"
        if isinstance(documents[0], dict):
            names = [quoted(name)[:SHOWN] for name in documents[0]]
            shown = ", ".join(names[:SHOWN_FIELDS])
            return f"JSON with the fields {shown}, which no form that is read has"
        return "a JSON list, which no form that is read is"
    if start.lower().startswith(("<!doctype", "<html")):
        return "a web page"
    if re.search(r"^# (?:HELP|TYPE) ", text, re.MULTILINE):
        return "Prometheus metrics of no engine that is known"
    for name in ("vllm serve", "sglang.launch_server", "trtllm-serve", "llama-server"):
        if name in text[:4096]:
            return f"a command that starts a server ({name}): `magicdec check` reads it"
    if "Traceback (most recent call last)" in text:
        return (
            "a log with a traceback, and no line that counts drafts or times decoding"
        )
    lines = format_count(len(text.splitlines()), "line")
    return f"text of {lines}, none of which counts drafts or times decoding"
