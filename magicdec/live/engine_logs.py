"""Engines' own logs: lines that count drafts, and lines that time decoding.

Wordings are those of the engines' sources:

    vLLM          "Speculative metrics: ..." (vllm/engine/metrics.py, 0.4 to 0.9, counted since the start),
                  "SpecDecoding metrics: ..." (vllm/v1/spec_decode/metrics.py: with the rate alone in 0.8,
                  by position from 0.9, with throughputs from 0.10), "Avg prompt throughput: ..."
                  (vllm/v1/metrics/loggers.py, one line for each data-parallel engine)
    SGLang        "Decode batch" every --decode-log-interval steps
                  (srt/managers/scheduler.py, later scheduler_metrics_mixin.py)
    TensorRT-LLM  "iter = 7, ..." with print_iter_log (_torch/pyexecutor/py_executor.py)
    llama.cpp     "eval time = ..." of each request, "draft acceptance rate = ..." and "statistics ..."
                  (tools/server, common/speculative.cpp; llama_print_timings of older ones)

Each line is looked through once, by plain searches: a log of a megabyte takes a fraction of a second.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from magicdec.live.logged import LoggedSeries, Stretch
from magicdec.live.metrics import LLAMA_CPP, SGLANG, TRTLLM, VLLM
from magicdec.live.observation import UNNAMED, CounterIncreases, ServedDraft
from magicdec.naming import draft_by_name, head_named_in
from magicdec.perfmodel import MAX_POSITIONS
from magicdec.units import MILLI, printable

VLLM_INTERVAL_S = 10.0
"""Time between vLLM's lines of statistics (VLLM_LOG_STATS_INTERVAL)."""
SGLANG_INTERVAL = 40
"""Steps between SGLang's lines (--decode-log-interval)."""
UNDRAFTED = 1.15
"""Steps beyond this multiple of the drafts are steps without one; below, the clocks of two lines differ."""
MOSTLY = 0.5
"""Share of a log's lines from which what they say holds for the server."""
NUMBER = re.compile(r"[-+]?\d[\d_]*(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
CLOCK = re.compile(r"\b(\d\d):(\d\d):(\d\d)\b")
DAY_S = 86400.0
PIECEWISE_LINE = (
    "its log says that decoding runs outside whole graphs (a downgrade to {mode}): every layer's attention "
    "is launched by itself"
)
EAGER_LINE = "its log says that no graph is captured (enforce_eager): every kernel of a step is launched by the host"
SYNCHRONOUS_LINE = "its log says that asynchronous scheduling is off: the device waits for the host between steps"
NO_GRAPH_LINE = (
    "{share:.0%} of its decode batches ran without a graph ({name}: False): every kernel of a step is "
    "launched by the host"
)


def fields_of(text: str) -> dict[str, list[str]]:
    """ "name: value, name: value" as values by name in small letters; a part without a name is one more
    value of the name before it."""
    values: dict[str, list[str]] = {}
    name = ""
    for part in text.split(","):
        key, colon, value = part.partition(":")
        if colon:
            name = key.strip(" .[]0123456789").lower()
            values[name] = [value.strip()]
        elif name:
            values[name].append(part.strip())
    return values


def number_in(text: str) -> float | None:
    """The number that a text begins with; None: it does not, or it is not finite."""
    found = NUMBER.match(text.strip().lstrip("["))
    if found is None:
        return None
    value = float(found[0].replace("_", ""))
    if math.isfinite(value):
        return value
    return None


class LineFields:
    """The values of one line by their names."""

    def __init__(self, text: str) -> None:
        self._values = fields_of(text)

    def number(self, *names: str) -> float | None:
        """The first of these that the line has."""
        for name in names:
            for text in self._values.get(name, ())[:1]:
                value = number_in(text)
                if value is not None:
                    return value
        return None

    def numbers(self, name: str) -> tuple[float, ...]:
        found = []
        for text in self._values.get(name, ()):
            value = number_in(text)
            if value is None:
                break
            found.append(value)
        return tuple(found[:MAX_POSITIONS])

    def text(self, name: str) -> str:
        return next(iter(self._values.get(name, ())), "")


def draft_named(method: str, checkpoint: str = "") -> ServedDraft | None:
    """The draft that an engine calls so; its repository's name tells an EAGLE-3 that is served as
    EAGLE. None: neither is known."""
    told = head_named_in(checkpoint)
    name = draft_by_name(method)
    if name is None and method.endswith("_mtp"):
        name = "mtp"
    if name in (None, "eagle") and told is not None:
        name = told
    if name is not None:
        return ServedDraft(name=name, method=name)
    if checkpoint:
        return ServedDraft(name=checkpoint, method="full")
    return None


def positions_of(
    *, mean: float | None, accepted: float, drafted: float, rates: Sequence[float]
) -> tuple[float, tuple[float, ...]]:
    """Drafts, and how many were accepted at each position, from a line's rounded numbers: tokens are
    exact, so rates are scaled to them, and drafts of full length are counted from the drafted
    tokens."""
    drafts = drafted / len(rates)
    if mean is not None and mean > 1.0:
        by_mean = accepted / (mean - 1.0)
        # where drafts were shorter than gamma, the rounded mean says more than the length does
        if abs(accepted / max(drafts, 1.0) - (mean - 1.0)) > 0.0051:
            drafts = by_mean
    drafts = max(drafts, 1.0)
    wanted = accepted / drafts
    total = math.fsum(rates)
    if total > 0.0:
        scaled = [rate * wanted / total for rate in rates]
    else:
        scaled = [wanted, *(0.0 for _ in rates[1:])]
    counts = []
    least = drafts
    for rate in scaled:
        least = min(drafts * min(rate, 1.0), least)
        counts.append(least)
    return drafts, tuple(counts)


# ---------------------------------------------------------------- vLLM

THROUGHPUT = "Avg prompt throughput:"
SPECULATION = ("SpecDecoding metrics:", "Speculative metrics:")
ENGINE = re.compile(r"Engine (\d+):")
SEVERAL = re.compile(r"(\d{1,4}) Engines Aggregated")
CONTINUED = re.compile(
    r"\s*(?:Mean acceptance|Accepted|Drafted|Draft acceptance|Per-position|Avg |Running:|Waiting:|GPU KV|"
    r"System efficiency|Number of|accept |#|token usage|gen throughput|cuda graph)"
)
"""The beginning of a line that a narrow page broke off the line before it."""
CONFIG = re.compile(r"LLM engine \(v([^)\s]+)\)\s+with config: model='([^']*)'")
OF_SPECULATION = re.compile(
    r"SpeculativeConfig\(method='([^']*)', model=(?:'([^']*)'|None), num_spec_tokens=(\d+)"
)
GIVEN_METHOD = re.compile(r"'method': '([^']*)'")
DOWNGRADE = re.compile(
    r"(?:setting cudagraph_mode=|cudagraph_mode (?:from \S+ )?to )(?:CUDAGraphMode\.)?(PIECEWISE|NONE)"
)
SYNCHRONOUS = re.compile(
    r"async(?:hronous)? scheduling (?:will be|is|not supported|disabled)[^\n]{0,200}",
    re.IGNORECASE,
)


@dataclass(kw_only=True)
class _StatisticsLine:
    """One line of statistics of an engine, and its count of drafts."""

    engine: str
    clock_s: float | None
    throughput: LineFields | None = None
    speculation: LineFields | None = None
    is_total: bool = False
    """Whether drafts are counted since the start."""
    num_engines: int = 1
    """Engines whose sum it is."""


@dataclass(kw_only=True)
class _StartSettings:
    """Settings that the lines of a server's start tell."""

    model: str = ""
    draft: ServedDraft | None = None
    gamma: int | None = None
    faults: dict[str, None] = field(default_factory=dict)


def _whole_lines(text: str) -> Iterator[str]:
    """Lines, with those that were broken put together."""
    whole = ""
    for line in text.splitlines():
        if whole.rstrip().endswith(",") and CONTINUED.match(line):
            whole = f"{whole.rstrip()} {line.strip()}"
            continue
        if whole:
            yield whole
        whole = line
    if whole:
        yield whole


def is_vllm_log(text: str) -> bool:
    return THROUGHPUT in text or any(marker in text for marker in SPECULATION)


def read_vllm_log(text: str) -> LoggedSeries:
    lines: list[_StatisticsLine] = []
    said = _StartSettings()
    for line in _whole_lines(text):
        _vllm_start(line, said)
        _vllm_line(line, lines)
    stretches: list[Stretch] = []
    engines = dict.fromkeys(line.engine for line in lines)
    for engine in engines:
        own = [line for line in lines if line.engine == engine]
        may_be_absent = said.draft is not None and said.draft.may_be_absent
        if not may_be_absent and any(line.speculation is not None for line in own):
            # heads and models draft in every step: the line that counts them was cut away
            own = [line for line in own if line.speculation is not None]
        stretches += _vllm_stretches(own, said.gamma)
    return LoggedSeries(
        series=VLLM,
        stretches=stretches,
        model=said.model,
        draft=said.draft or UNNAMED,
        gamma=said.gamma,
        faults=tuple(said.faults),
    )


def _vllm_start(line: str, said: _StartSettings) -> None:
    """Adds what a line of the server's start says."""
    if "with config:" in line:
        config = CONFIG.search(line)
        if config is not None:
            said.model = printable(config[2])
        if "enforce_eager=True" in line:
            said.faults[EAGER_LINE] = None
        speculation = OF_SPECULATION.search(line)
        if speculation is not None:
            said.draft = draft_named(speculation[1], speculation[2] or "")
            said.gamma = int(speculation[3][:4])
    elif "non-default args" in line and said.draft is None:
        method = GIVEN_METHOD.search(line)
        if method is not None:
            said.draft = draft_named(method[1])
    elif "udagraph_mode" in line or "UDAGraphMode" in line:
        downgrade = DOWNGRADE.search(line)
        if downgrade is not None and downgrade[1] == "NONE":
            said.faults[EAGER_LINE] = None
        elif downgrade is not None:
            said.faults[PIECEWISE_LINE.format(mode=downgrade[1])] = None
    elif "disabled" in line and SYNCHRONOUS.search(line):
        said.faults[SYNCHRONOUS_LINE] = None


def _vllm_line(line: str, lines: list[_StatisticsLine]) -> None:
    """Adds a line of statistics; one that counts drafts belongs to the line before it."""
    if THROUGHPUT in line:
        named = ENGINE.search(line)
        several = SEVERAL.search(line)
        lines.append(
            _StatisticsLine(
                engine=named[1].lstrip("0") or "0" if named else "",
                clock_s=_clock_s(line),
                throughput=LineFields(THROUGHPUT + line.split(THROUGHPUT, 1)[1]),
                num_engines=max(int(several[1]), 1) if several else 1,
            )
        )
        return
    for marker in SPECULATION:
        if marker not in line:
            continue
        counted = LineFields(line.split(marker, 1)[1])
        is_total = counted.number("number of emitted tokens") is not None
        if lines and _belongs(line, lines[-1]):
            lines[-1].speculation = counted
            lines[-1].is_total = is_total
            return
        lines.append(
            _StatisticsLine(
                engine=lines[-1].engine if lines else "",
                clock_s=_clock_s(line),
                speculation=counted,
                is_total=is_total,
            )
        )


def _belongs(line: str, before: _StatisticsLine) -> bool:
    """Whether a count of drafts was printed together with the line before it."""
    if before.speculation is not None or before.throughput is None:
        return False
    clock_s = _clock_s(line)
    if clock_s is None or before.clock_s is None:
        return True
    return (clock_s - before.clock_s) % DAY_S <= 1.0


def _clock_s(line: str) -> float | None:
    """Seconds of the day at the end of a line's stamps: the engine's own stands last."""
    stamps = CLOCK.findall(line[:200])
    if not stamps:
        return None
    hours, minutes, seconds = map(int, stamps[-1])
    return 3600.0 * hours + 60.0 * minutes + seconds


def _interval_s(lines: Sequence[_StatisticsLine]) -> float:
    """The usual time between an engine's lines."""
    gaps = []
    clocks = [line.clock_s for line in lines if line.throughput is not None]
    for before, after in itertools.pairwise(clocks):
        if before is None or after is None:
            continue
        gap_s = (after - before) % DAY_S
        # neither lines of one moment nor a night without load
        if 1.0 <= gap_s <= 3600.0:
            gaps.append(gap_s)
    if gaps:
        return statistics.median_low(gaps)
    return VLLM_INTERVAL_S


def _vllm_stretches(
    lines: Sequence[_StatisticsLine], gamma: int | None
) -> list[Stretch]:
    interval_s = _interval_s(lines)
    totals = _Totals(any(line.is_total for line in lines))
    drawn: list[tuple[_StatisticsLine, Stretch, bool]] = []
    before: float | None = None
    for line in lines:
        counts, seconds = _vllm_counts(line, totals, interval_s, gamma)
        running = None
        waiting = None
        is_quiet = False
        step_s = None
        if line.throughput is not None:
            running = line.throughput.number("running")
            waiting = line.throughput.number("waiting", "pending")
            speed = line.throughput.number("avg generation throughput") or 0.0
            prompts = line.throughput.number("avg prompt throughput") or 0.0
            is_quiet = prompts <= speed
            if running and speed and (before or not drawn):
                batch = statistics.fmean([before or running, running])
                step_s = batch * (counts.tokens_per_step or 1.0) / speed
        stretch = Stretch(
            counts=counts,
            engine=line.engine,
            running=running and running / line.num_engines,
            waiting=waiting,
            kv_usage=_share(line.throughput),
            step_s=step_s,
            seconds=seconds,
        )
        before = running
        if counts.output_tokens or counts.drafts:
            drawn.append((line, stretch, is_quiet))
    has_quiet = any(stretch.step_s and is_quiet for _, stretch, is_quiet in drawn)
    return [
        _only_quiet(stretch, is_quiet or not has_quiet)
        for _, stretch, is_quiet in drawn
    ]


def _only_quiet(stretch: Stretch, is_quiet: bool) -> Stretch:
    """The stretch, without its time where prompts were read in it."""
    if is_quiet:
        return stretch
    return Stretch(
        counts=stretch.counts,
        engine=stretch.engine,
        running=stretch.running,
        waiting=stretch.waiting,
        kv_usage=stretch.kv_usage,
        seconds=stretch.seconds,
    )


def _share(throughput: LineFields | None) -> float | None:
    if throughput is None:
        return None
    percent = throughput.number("gpu kv cache usage")
    if percent is None:
        return None
    return percent / 100.0


class _Totals:
    """Counts since the start, as their increases; after a restart they begin anew."""

    def __init__(self, are_totals: bool) -> None:
        self.are_totals = are_totals
        self.last: tuple[float, ...] = ()

    def increase(self, values: tuple[float, ...]) -> tuple[float, ...]:
        if not self.are_totals:
            return values
        before = self.last
        self.last = values
        if not before or any(
            now < was for now, was in zip(values, before, strict=True)
        ):
            return values
        return tuple(now - was for now, was in zip(values, before, strict=True))


def _vllm_drafts(
    line: _StatisticsLine,
    told: LineFields,
    totals: _Totals,
    gamma: int | None,
    output: float | None,
) -> tuple[float, float, float, tuple[float, ...]]:
    """Drafts of a line, their tokens, the accepted ones of these, and those by position."""
    accepted = told.number("accepted", "number of accepted tokens") or 0.0
    drafted = told.number("drafted", "number of draft tokens") or 0.0
    if line.is_total:
        depth = told.number("number of speculative tokens") or gamma or 1.0
        emitted = told.number("number of emitted tokens") or 0.0
        drafted, emitted = totals.increase((drafted, emitted))
        drafts = drafted / max(depth, 1.0)
        return drafts, drafted, min(max(emitted - drafts, 0.0), drafted), ()
    rates = told.numbers("per-position acceptance rate")
    mean = told.number("mean acceptance length")
    if rates:
        drafts, by_position = positions_of(
            mean=mean, accepted=accepted, drafted=drafted, rates=rates
        )
        return drafts, drafted, accepted, by_position
    if mean is not None and mean > 1.0:
        drafts = accepted / (mean - 1.0)
    elif gamma:
        drafts = drafted / gamma
    else:
        drafts = max((output or 0.0) - accepted, 0.0) or drafted
    return drafts, drafted, accepted, ()


def _vllm_counts(
    line: _StatisticsLine, totals: _Totals, interval_s: float, gamma: int | None
) -> tuple[CounterIncreases, float]:
    """A line's counts, and the seconds that they took."""
    output: float | None = None
    if line.throughput is not None:
        speed = line.throughput.number("avg generation throughput") or 0.0
        output = speed * interval_s
    if line.speculation is None:
        steps = output or 0.0
        return (
            CounterIncreases(
                drafts=0.0,
                accepted=0.0,
                output_tokens=output,
                requests=0.0,
                counted_steps=steps,
            ),
            interval_s,
        )
    told = line.speculation
    drafts, drafted, accepted, by_position = _vllm_drafts(
        line, told, totals, gamma, output
    )
    seconds = interval_s
    drafted_per_s = told.number("drafted throughput")
    if output is None and drafted_per_s:
        seconds = drafted / drafted_per_s
    steps = drafts
    if output is not None:
        alone = output - accepted
        if alone > UNDRAFTED * drafts:
            steps = alone
        output = max(output, accepted)
    return (
        CounterIncreases(
            drafts=drafts,
            draft_tokens=drafted,
            accepted=accepted,
            accepted_by_position=by_position,
            output_tokens=output,
            requests=None if output is None else 0.0,
            counted_steps=steps,
        ),
        seconds,
    )


# ---------------------------------------------------------------- SGLang

DECODE = "Decode batch"
RANK = re.compile(r"\bDP(\d+)\b")
ARGUMENT = r"['\"]?{name}['\"]?\s*[=:]\s*(?:'([^']*)'|\"([^\"]*)\"|([\w.+-]+))"
GRAPHS = ("cuda graph", "npu graph", "cpu graph")


def is_sglang_log(text: str) -> bool:
    return "#running-req" in text and DECODE in text


def read_sglang_log(text: str) -> LoggedSeries:
    arguments = ""
    found: list[tuple[str, LineFields]] = []
    for line in _whole_lines(text):
        if DECODE in line:
            before, _, after = line.partition(DECODE)
            rank = RANK.search(before)
            found.append((rank[1] if rank else "", LineFields(after)))
        elif "server_args=" in line:
            arguments = line
    interval = int(_argument(arguments, "decode_log_interval") or SGLANG_INTERVAL)
    gamma = _sglang_gamma(arguments, [line for _, line in found])
    faults: dict[str, None] = {}
    stretches = []
    without = []
    graph = GRAPHS[0]
    for engine, told in found:
        if told.number("#running-req"):
            stretches.append(_sglang_stretch(engine, told, interval, gamma))
        for name in GRAPHS:
            if told.text(name):
                graph = name
                without.append(told.text(name) == "False")
    share = sum(without) / max(len(without), 1)
    if share > MOSTLY:
        faults[NO_GRAPH_LINE.format(share=share, name=graph)] = None
    method = _argument(arguments, "speculative_algorithm")
    draft: ServedDraft | None = UNNAMED
    if method and method != "None":
        head = _argument(arguments, "speculative_draft_model_path")
        draft = draft_named(method, head if head != "None" else "") or UNNAMED
    if _argument(arguments, "disable_overlap_schedule") == "True":
        faults[SYNCHRONOUS_LINE] = None
    return LoggedSeries(
        series=SGLANG,
        unit="decode batches",
        stretches=stretches,
        model=printable(_argument(arguments, "model_path")),
        draft=draft,
        gamma=gamma,
        faults=tuple(faults),
    )


def _argument(arguments: str, name: str) -> str:
    """A server's argument; "": the log does not say."""
    found = re.search(rf"\b{name}\b" + ARGUMENT.format(name=""), arguments)
    if found is None:
        return ""
    return next(filter(None, found.groups()), "")


def _sglang_gamma(arguments: str, lines: Sequence[LineFields]) -> int | None:
    """Drafted tokens of a step: as the server was started, or from the accept length over the accept
    rate. Releases divide by the verified tokens, gamma + 1, or leave the added token out of both."""
    for name, more in (
        ("speculative_num_draft_tokens", 1),
        ("speculative_num_steps", 0),
    ):
        given = _argument(arguments, name)
        if given.isdecimal() and int(given) > more:
            return min(int(given) - more, MAX_POSITIONS)
    pairs = []
    longest = 0.0
    for line in lines:
        length = line.number("accept len")
        rate = line.number("accept rate")
        if length is not None:
            longest = max(longest, length)
        if length is not None and rate:
            pairs.append((length, rate))
    if longest == 0.0:
        return None
    candidates = []
    for added, more in ((0.0, 1), (1.0, 0)):
        ratios = [(length - added) / rate for length, rate in pairs]
        if ratios:
            depth = max(round(statistics.median(ratios)), 1)
            missed = [abs((length - added) / depth - rate) for length, rate in pairs]
            candidates.append((statistics.fmean(missed), depth - more))
    for _, gamma in sorted(candidates):
        if gamma + 1 >= longest:
            return min(gamma, MAX_POSITIONS)
    return min(max(math.ceil(longest) - 1, 1), MAX_POSITIONS)


def _sglang_stretch(
    engine: str, line: LineFields, interval: int, gamma: int | None
) -> Stretch:
    running = line.number("#running-req") or 0.0
    length = line.number("accept len")
    speed = line.number("gen throughput (token/s)")
    tokens = line.number("#token", "#full token", "#full-token")
    steps = interval * running
    accepted = 0.0
    drafts = 0.0
    if length is not None:
        accepted = steps * max(length - 1.0, 0.0)
        drafts = steps
    output = steps + accepted
    step_s = None
    seconds = None
    if speed and running:
        step_s = running * (length or 1.0) / speed
        seconds = interval * step_s
    return Stretch(
        engine=engine,
        counts=CounterIncreases(
            drafts=drafts,
            draft_tokens=drafts * gamma if gamma else None,
            accepted=accepted,
            output_tokens=output,
            requests=0.0,
            iterations=float(interval),
            counted_steps=steps,
        ),
        running=running,
        waiting=line.number("#queue-req"),
        kv_usage=line.number("token usage", "full token usage"),
        context_len=tokens / running if tokens and running else None,
        step_s=step_s,
        seconds=seconds,
    )


# ---------------------------------------------------------------- TensorRT-LLM

ITERATION = "host_step_time"
PAIR = re.compile(r"\b(\w{1,40})'?\s*[=:]\s*([-+\d.]{1,40})")


def is_trtllm_log(text: str) -> bool:
    return ITERATION in text and "num_scheduled_requests" in text


def read_trtllm_log(text: str) -> LoggedSeries:
    stretches = []
    depths = []
    for line in text.splitlines():
        if ITERATION not in line:
            continue
        told = {name: number_in(value) for name, value in PAIR.findall(line)}
        running = told.get("num_scheduled_requests")
        tokens = told.get("num_generation_tokens")
        if not running or not tokens or told.get("num_ctx_tokens"):
            continue
        if (told.get("rank") or 0.0) > 0.0:
            continue
        depth = tokens / running - 1.0
        depths.append(depth)
        step_ms = told.get("prev_device_step_time") or told.get("host_step_time")
        cached = told.get("cached_kv_tokens")
        stretches.append(
            Stretch(
                counts=CounterIncreases(
                    drafts=None,
                    draft_tokens=max(tokens - running, 0.0),
                    iterations=1.0,
                    counted_steps=running,
                ),
                running=running,
                kv_usage=told.get("kv_cache_util"),
                context_len=cached / running if cached else None,
                step_s=step_ms * MILLI if step_ms else None,
                seconds=step_ms * MILLI if step_ms else None,
            )
        )
    gamma = round(statistics.median(depths)) if depths else None
    notes = []
    if gamma:
        notes.append(
            f"this log times steps of {gamma} drafted tokens, and does not count what is accepted: its "
            "/metrics or a load generator does"
        )
    return LoggedSeries(
        series=TRTLLM,
        unit="iterations",
        stretches=stretches,
        draft=UNNAMED,
        gamma=gamma,
        notes=tuple(notes),
    )


# ---------------------------------------------------------------- llama.cpp

EVAL = re.compile(
    r"(?<!prompt )\beval time\s*=\s*([\d.]+) ms /\s*(\d+) (?:tokens|runs)"
)
PROMPT_EVAL = re.compile(r"prompt eval time\s*=\s*([\d.]+) ms /\s*(\d+) tokens")
ACCEPTED = re.compile(
    r"draft acceptance(?: rate)?\s*=\s*[\d.]+%?\s*\(\s*(\d+) accepted /\s*(\d+) generated"
)
STATISTICS = re.compile(r"statistics\s+([\w-]{1,40}):")
DRAFTED = re.compile(r"#gen drafts\s*=\s*(\d+)")


def is_llama_log(text: str) -> bool:
    return "eval time" in text and (
        "ms per token" in text or "tokens per second" in text
    )


@dataclass(kw_only=True)
class Timed:
    """One request's timings."""

    prompt_len: float = 0.0
    prompt_s: float = 0.0
    eval_s: float | None = None
    tokens: float = 0.0
    accepted: float | None = None
    drafted: float = 0.0
    drafts: float | None = None


def read_llama_log(text: str) -> LoggedSeries:
    requests: list[Timed] = []
    totals = _Totals(True)
    draft: ServedDraft | None = None
    for line in text.splitlines():
        if "eval time" in line:
            _llama_times(line, requests)
        elif "draft acceptance" in line and requests:
            found = ACCEPTED.search(line)
            if found is not None:
                requests[-1].accepted = float(found[1])
                requests[-1].drafted = float(found[2])
        elif "#gen drafts" in line and requests:
            named = STATISTICS.search(line)
            count = DRAFTED.search(line)
            if named is not None and count is not None:
                # llama.cpp's names: "draft-mtp", "ngram_mod"
                if named[1].startswith("ngram"):
                    draft = ServedDraft(name="ngram", method="ngram")
                else:
                    draft = draft_named(named[1].removeprefix("draft-")) or draft
                (requests[-1].drafts,) = totals.increase((float(count[1]),))
    return of_llama_requests(requests, draft)


def of_llama_requests(
    requests: Sequence[Timed], draft: ServedDraft | None
) -> LoggedSeries:
    """llama.cpp's requests, from its log or from its answers."""
    stretches = [_llama_stretch(request) for request in requests if request.tokens]
    depths = []
    for request in requests:
        if request.drafts:
            depths.append(request.drafted / request.drafts)
    is_drafted = any(request.accepted is not None for request in requests)
    gamma = None
    if depths:
        gamma = max(math.ceil(max(depths)), 1)
    elif is_drafted:
        # tokens drafted per step: a step emits one more than it accepts
        deepest = max(
            request.drafted / max(request.tokens - (request.accepted or 0.0), 1.0)
            for request in requests
        )
        gamma = max(math.ceil(deepest), 1)
    return LoggedSeries(
        series=LLAMA_CPP,
        unit="requests",
        stretches=stretches,
        draft=draft or UNNAMED,
        gamma=gamma,
        notes=("the times are of requests that ran alone: batch 1",),
    )


def _llama_times(line: str, requests: list[Timed]) -> None:
    """A request's block begins with its prompt's time."""
    prompt = PROMPT_EVAL.search(line)
    if prompt is not None:
        requests.append(
            Timed(prompt_len=float(prompt[2]), prompt_s=float(prompt[1]) * MILLI)
        )
        return
    found = EVAL.search(line)
    if found is None:
        return
    if not requests or requests[-1].eval_s is not None:
        requests.append(Timed())
    requests[-1].eval_s = float(found[1]) * MILLI
    requests[-1].tokens = float(found[2])


def _llama_stretch(request: Timed) -> Stretch:
    accepted = min(request.accepted or 0.0, max(request.tokens - 1.0, 0.0))
    steps = max(request.tokens - accepted, 1.0)
    drafts = 0.0
    if request.accepted is not None:
        drafts = steps
        if request.drafts:
            drafts = min(request.drafts, steps)
    seconds = request.eval_s or 0.0
    return Stretch(
        counts=CounterIncreases(
            drafts=drafts,
            draft_tokens=request.drafted,
            accepted=accepted,
            output_tokens=request.tokens,
            requests=0.0,
            counted_steps=steps,
            ttft_sum=request.prompt_s,
            ttft_count=1.0,
            prompt_tokens_sum=request.prompt_len,
            prompt_tokens_count=1.0,
            request_output_sum=request.tokens,
        ),
        running=1.0,
        step_s=seconds / steps if seconds else None,
        seconds=seconds or None,
    )
