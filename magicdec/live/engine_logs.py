"""Logs of vLLM and SGLang: lines that count drafts, and lines that time decoding.

Wordings are those of the engines' sources:

    vLLM    "Speculative metrics: ..." (vllm/engine/metrics.py, 0.4 to 0.9, counted since the start),
            "SpecDecoding metrics: ..." (vllm/v1/spec_decode/metrics.py: with the rate alone in 0.8, by
            position from 0.9, with throughputs from 0.10), "Avg prompt throughput: ..."
            (vllm/v1/metrics/loggers.py, one line for each data-parallel engine)
    SGLang  "Decode batch" every --decode-log-interval steps
            (srt/managers/scheduler.py, later scheduler_metrics_mixin.py)

Each line is looked through once, by plain searches: a log of a megabyte takes a fraction of a second.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from magicdec.live.metrics import SGLANG, VLLM
from magicdec.live.observation import UNNAMED, CounterIncreases, ServedDraft
from magicdec.live.reading import Reading, Readings
from magicdec.naming import draft_by_name, head_named_in
from magicdec.perfmodel.acceptance.law import MAX_POSITIONS
from magicdec.redaction import quoted

VLLM_INTERVAL_S = 10.0
"""Time between vLLM's lines of statistics (VLLM_LOG_STATS_INTERVAL)."""
SGLANG_INTERVAL = 40
"""Steps between SGLang's lines (--decode-log-interval)."""
UNDRAFTED = 1.15
"""Steps beyond this multiple of the drafts are steps without one; below, the clocks of two lines differ."""
MOST_LINES = 16_000
"""Lines of statistics of one log that are counted: four hours of SGLang's, two days of vLLM's."""
COUNTED_PARTS = 16
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
VLLM_SPEEDS = {
    "prompt_speed": ("avg prompt throughput",),
    "speed": ("avg generation throughput",),
    "running": ("running",),
    "waiting": ("waiting", "pending"),
    "kv_percent": ("gpu kv cache usage",),
}
"""Names of what vLLM's lines of throughput say."""
VLLM_DRAFTS = {
    "accepted": ("accepted", "number of accepted tokens"),
    "drafted": ("drafted", "number of draft tokens"),
    "drafted_speed": ("drafted throughput",),
    "mean_length": ("mean acceptance length",),
    "rates": ("per-position acceptance rate",),
    "gamma": ("number of speculative tokens",),
    "emitted": ("number of emitted tokens",),
}
"""Names of what vLLM's lines of drafts say."""
SGLANG_BATCH = {
    "running": ("#running-req",),
    "waiting": ("#queue-req",),
    "tokens": ("#token", "#full token", "#full-token"),
    "kv_usage": ("token usage", "full token usage"),
    "mean_length": ("accept len",),
    "rate": ("accept rate",),
    "speed": ("gen throughput (token/s)",),
}
"""Names of what SGLang's decode batches say."""


def number_in(text: str) -> float | None:
    """The number that a text begins with; None: it does not, or it is not finite."""
    digits = NUMBER.match(text.strip().lstrip("["))
    if digits is None:
        return None
    value = float(digits[0].replace("_", ""))
    if math.isfinite(value):
        return value
    return None


class LineNumbers:
    """The numbers of a line "name: value, name: value, value", by a table of names."""

    def __init__(self, text: str, names: Mapping[str, tuple[str, ...]]) -> None:
        self._names = names
        self._values: dict[str, list[str]] = {}
        name = ""
        for part in text.split(","):
            key, colon, value = part.partition(":")
            if colon:
                name = key.strip(" .[]0123456789").lower()
                self._values[name] = [value.strip()]
            elif name:
                # a part without a name is one more value of the name before it
                self._values[name].append(part.strip())

    def number(self, quantity: str) -> float | None:
        """The number under the first of a quantity's names that has one."""
        for name in self._names[quantity]:
            for text in self._values.get(name, ())[:1]:
                value = number_in(text)
                if value is not None:
                    return value
        return None

    def numbers(self, quantity: str) -> tuple[float, ...]:
        """All numbers of a quantity that has one name, up to the first text that is none."""
        (name,) = self._names[quantity]
        values = []
        for text in self._values.get(name, ()):
            value = number_in(text)
            if value is None:
                break
            values.append(value)
        return tuple(values[:MAX_POSITIONS])


def draft_named(method: str, checkpoint: str = "") -> ServedDraft | None:
    """The draft that an engine calls so; its repository's name tells an EAGLE-3 that is served as
    EAGLE. None: neither is known."""
    head = head_named_in(checkpoint)
    name = draft_by_name(method)
    if name is None and method.endswith("_mtp"):
        name = "mtp"
    if name in (None, "eagle") and head is not None:
        name = head
    if name is not None:
        return ServedDraft(name=name, method=name)
    if checkpoint:
        return ServedDraft(name=quoted(checkpoint), method="full")
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


class Totals:
    """Counts since the start, as their increases; after a restart they begin anew."""

    def __init__(self) -> None:
        self._last: tuple[float, ...] = ()

    def increase(self, *values: float) -> tuple[float, ...]:
        before = self._last
        self._last = values
        if not before or any(
            now < was for now, was in zip(values, before, strict=True)
        ):
            return values
        return tuple(now - was for now, was in zip(values, before, strict=True))


CONTINUED = re.compile(
    r"\s*(?:Mean acceptance|Accepted|Drafted|Draft acceptance|Per-position|Avg |Running:|Waiting:|GPU KV|"
    r"System efficiency|Number of|accept |#|token usage|gen throughput|cuda graph)"
)
"""The beginning of a line that a narrow page broke off the line before it."""


def lines_of(text: str) -> Iterator[str]:
    """Lines one by one: the list of all takes more memory than the text."""
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin) + 1 or len(text)
        yield from text[begin:end].splitlines()
        begin = end


class CountedParts:
    """Parts of a long log, spread evenly over it, whose lines are counted: more say no more."""

    def __init__(self, text: str, marker: str) -> None:
        self.num_lines = text.count(marker)
        self.period = 1
        self.kept = 1
        if self.num_lines > MOST_LINES:
            self.period = math.ceil(self.num_lines / COUNTED_PARTS)
            self.kept = MOST_LINES // COUNTED_PARTS
        self.place = -1

    def has_next(self) -> bool:
        """Whether the next line with the marker is counted."""
        self.place += 1
        return self.place % self.period < self.kept

    @property
    def notes(self) -> tuple[str, ...]:
        if self.period == 1:
            return ()
        return (
            f"counted are {MOST_LINES} of {self.num_lines} lines, in {COUNTED_PARTS} parts spread over "
            "the log",
        )


def whole_lines(text: str) -> Iterator[str]:
    """Lines that are not empty, with those that were broken put together."""
    parts: list[str] = []
    for line in lines_of(text):
        if parts and parts[-1].endswith(",") and CONTINUED.match(line):
            parts.append(line.strip())
            continue
        if parts:
            yield " ".join(parts)
        parts = [line.rstrip()] if line else []
    if parts:
        yield " ".join(parts)


# ---------------------------------------------------------------- vLLM

THROUGHPUT = "Avg prompt throughput:"
SPECULATION = ("SpecDecoding metrics:", "Speculative metrics:")
ENGINE = re.compile(r"Engine (\d+):")
SEVERAL = re.compile(r"(\d{1,4}) Engines Aggregated")
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
class VllmInterval:
    """A line of an engine's statistics, with the line that counts its drafts."""

    engine: str
    clock_s: float | None
    speeds: LineNumbers | None = None
    drafts: LineNumbers | None = None
    num_engines: int = 1
    """Engines whose sum it is."""

    @property
    def counts_since_start(self) -> bool:
        return self.drafts is not None and self.drafts.number("emitted") is not None


@dataclass(kw_only=True)
class VllmStart:
    """Settings that the lines of a server's start tell."""

    model: str = ""
    draft: ServedDraft | None = None
    gamma: int | None = None
    faults: dict[str, None] = field(default_factory=dict)

    def read(self, line: str) -> None:
        """Adds what a line says."""
        if "with config:" in line:
            config = CONFIG.search(line)
            if config is not None:
                self.model = config[2]
            if "enforce_eager=True" in line:
                self.faults[EAGER_LINE] = None
            speculation = OF_SPECULATION.search(line)
            if speculation is not None:
                self.draft = draft_named(speculation[1], speculation[2] or "")
                self.gamma = int(speculation[3][:4])
        elif "non-default args" in line and self.draft is None:
            method = GIVEN_METHOD.search(line)
            if method is not None:
                self.draft = draft_named(method[1])
        elif "udagraph_mode" in line or "UDAGraphMode" in line:
            downgrade = DOWNGRADE.search(line)
            if downgrade is not None and downgrade[1] == "NONE":
                self.faults[EAGER_LINE] = None
            elif downgrade is not None:
                self.faults[PIECEWISE_LINE.format(mode=downgrade[1])] = None
        elif "disabled" in line and SYNCHRONOUS.search(line):
            self.faults[SYNCHRONOUS_LINE] = None


def is_vllm_log(text: str) -> bool:
    return THROUGHPUT in text or any(marker in text for marker in SPECULATION)


def read_vllm_log(text: str) -> Readings:
    start = VllmStart()
    by_engine: dict[str, list[VllmInterval]] = {}
    last: VllmInterval | None = None
    markers = [marker for marker in (THROUGHPUT, *SPECULATION) if marker in text]
    parts = CountedParts(text, markers[0])
    is_counted = True
    for line in whole_lines(text):
        start.read(line)
        if markers[0] in line:
            is_counted = parts.has_next()
        if not is_counted:
            continue
        if THROUGHPUT in line:
            named = ENGINE.search(line)
            several = SEVERAL.search(line)
            last = VllmInterval(
                engine=named[1].lstrip("0") or "0" if named else "",
                clock_s=_clock_s(line),
                speeds=LineNumbers(
                    THROUGHPUT + line.split(THROUGHPUT, 1)[1], VLLM_SPEEDS
                ),
                num_engines=max(int(several[1]), 1) if several else 1,
            )
            by_engine.setdefault(last.engine, []).append(last)
            continue
        marker = next((marker for marker in SPECULATION if marker in line), None)
        if marker is None:
            continue
        if last is None or not _belongs(line, last):
            # a count whose own line of throughput was cut away
            last = VllmInterval(
                engine=last.engine if last else "", clock_s=_clock_s(line)
            )
            by_engine.setdefault(last.engine, []).append(last)
        last.drafts = LineNumbers(line.split(marker, 1)[1], VLLM_DRAFTS)
    readings: list[Reading] = []
    may_be_absent = start.draft is not None and start.draft.may_be_absent
    for intervals in by_engine.values():
        counted = [interval for interval in intervals if interval.drafts is not None]
        if may_be_absent or not counted:
            counted = intervals
        # heads and models draft in every step: a line that counts none of them was cut away
        readings += _vllm_readings(counted, start.gamma)
    return Readings(
        series=VLLM,
        readings=readings,
        model=start.model,
        draft=start.draft or UNNAMED,
        gamma=start.gamma,
        faults=tuple(start.faults),
        notes=parts.notes,
    )


def _belongs(line: str, before: VllmInterval) -> bool:
    """Whether a count of drafts was printed together with the line before it."""
    if before.drafts is not None or before.speeds is None:
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


def _interval_s(intervals: Sequence[VllmInterval]) -> float:
    """The usual time between an engine's lines."""
    gaps = []
    clocks = [each.clock_s for each in intervals if each.speeds is not None]
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


def _vllm_readings(
    intervals: Sequence[VllmInterval], gamma: int | None
) -> list[Reading]:
    """One engine's readings. Steps are timed where no prompts were read, if there are such lines."""
    interval_s = _interval_s(intervals)
    totals = Totals()
    readings: list[tuple[Reading, bool]] = []
    before: float | None = None
    for interval in intervals:
        counts, seconds = _vllm_counts(interval, totals, interval_s, gamma)
        reading = Reading(counts=counts, engine=interval.engine, seconds=seconds)
        running = None
        is_quiet = False
        if interval.speeds is not None:
            running = interval.speeds.number("running")
            speed = interval.speeds.number("speed") or 0.0
            is_quiet = (interval.speeds.number("prompt_speed") or 0.0) <= speed
            step_s = None
            if running and speed and (before or not readings):
                batch = statistics.fmean([before or running, running])
                step_s = batch * (counts.tokens_per_step or 1.0) / speed
            percent = interval.speeds.number("kv_percent")
            reading = replace(
                reading,
                running=running and running / interval.num_engines,
                waiting=interval.speeds.number("waiting"),
                kv_usage=None if percent is None else percent / 100.0,
                step_s=step_s,
            )
        before = running
        if counts.output_tokens or counts.drafts:
            readings.append((reading, is_quiet))
    if any(reading.step_s and is_quiet for reading, is_quiet in readings):
        return [
            reading if is_quiet else replace(reading, step_s=None)
            for reading, is_quiet in readings
        ]
    return [reading for reading, _ in readings]


def _vllm_counts(
    interval: VllmInterval, totals: Totals, interval_s: float, gamma: int | None
) -> tuple[CounterIncreases, float]:
    """An interval's counts, and the seconds that they took."""
    output: float | None = None
    if interval.speeds is not None:
        output = (interval.speeds.number("speed") or 0.0) * interval_s
    told = interval.drafts
    if told is None:
        plain = CounterIncreases(
            drafts=0.0,
            accepted=0.0,
            output_tokens=output,
            requests=0.0,
            counted_steps=output or 0.0,
        )
        return plain, interval_s
    accepted = told.number("accepted") or 0.0
    drafted = told.number("drafted") or 0.0
    mean = told.number("mean_length")
    rates = told.numbers("rates")
    by_position: tuple[float, ...] = ()
    if interval.counts_since_start:
        emitted = told.number("emitted") or 0.0
        drafted, emitted = totals.increase(drafted, emitted)
        drafts = drafted / max(told.number("gamma") or gamma or 1.0, 1.0)
        accepted = min(max(emitted - drafts, 0.0), drafted)
    elif rates:
        drafts, by_position = positions_of(
            mean=mean, accepted=accepted, drafted=drafted, rates=rates
        )
    elif mean is not None and mean > 1.0:
        drafts = accepted / (mean - 1.0)
    elif gamma:
        drafts = drafted / gamma
    else:
        drafts = max((output or 0.0) - accepted, 0.0) or drafted
    seconds = interval_s
    drafted_per_s = told.number("drafted_speed")
    if output is None and drafted_per_s:
        seconds = drafted / drafted_per_s
    steps = drafts
    if output is not None:
        alone = output - accepted
        if alone > UNDRAFTED * drafts:
            steps = alone
        output = max(output, accepted)
    counts = CounterIncreases(
        drafts=drafts,
        draft_tokens=drafted,
        accepted=accepted,
        accepted_by_position=by_position,
        output_tokens=output,
        requests=None if output is None else 0.0,
        counted_steps=steps,
    )
    return counts, seconds


# ---------------------------------------------------------------- SGLang

DECODE = "Decode batch"
RANK = re.compile(r"\bDP(\d+)\b")
ARGUMENT = r"\b{name}['\"]?\s*[=:]\s*(?:'([^']*)'|\"([^\"]*)\"|([\w.+-]+))"
GRAPH = re.compile(r"\b((?:cuda|npu|cpu) graph): *(\w+)", re.IGNORECASE)


def is_sglang_log(text: str) -> bool:
    return "#running-req" in text and DECODE in text


def read_sglang_log(text: str) -> Readings:
    arguments = ""
    batches: list[tuple[str, LineNumbers]] = []
    without_graph = []
    graph = "cuda graph"
    parts = CountedParts(text, DECODE)
    for line in whole_lines(text):
        if DECODE in line:
            if not parts.has_next():
                continue
            before, _, after = line.partition(DECODE)
            rank = RANK.search(before)
            batches.append((rank[1] if rank else "", LineNumbers(after, SGLANG_BATCH)))
            for name, value in GRAPH.findall(after):
                graph = name
                without_graph.append(value == "False")
        elif "server_args=" in line:
            arguments = line
    interval = int(_argument(arguments, "decode_log_interval") or SGLANG_INTERVAL)
    gamma = _sglang_gamma(arguments, [numbers for _, numbers in batches])
    readings = []
    for engine, numbers in batches:
        if numbers.number("running"):
            readings.append(_sglang_reading(engine, numbers, interval, gamma))
    faults = []
    share = sum(without_graph) / max(len(without_graph), 1)
    if share > MOSTLY:
        faults.append(NO_GRAPH_LINE.format(share=share, name=graph))
    if _argument(arguments, "disable_overlap_schedule") == "True":
        faults.append(SYNCHRONOUS_LINE)
    method = _argument(arguments, "speculative_algorithm")
    draft: ServedDraft | None = UNNAMED
    if method and method != "None":
        head = _argument(arguments, "speculative_draft_model_path")
        draft = draft_named(method, head if head != "None" else "") or UNNAMED
    return Readings(
        series=SGLANG,
        unit="decode batches",
        readings=readings,
        model=_argument(arguments, "model_path"),
        draft=draft,
        gamma=gamma,
        faults=tuple(faults),
        notes=parts.notes,
    )


def _argument(arguments: str, name: str) -> str:
    """A server's argument; "": the log does not say."""
    argument = re.search(ARGUMENT.format(name=name), arguments)
    if argument is None:
        return ""
    return next(filter(None, argument.groups()), "")


def _sglang_gamma(arguments: str, batches: Sequence[LineNumbers]) -> int | None:
    """Drafted tokens of a step: as the server was started, or from the accept length over the accept
    rate; None: neither is there. Releases divide by the verified tokens, gamma + 1, or leave the
    added token out of both."""
    for name, more in (
        ("speculative_num_draft_tokens", 1),
        ("speculative_num_steps", 0),
    ):
        given = _argument(arguments, name)
        if given.isdecimal() and int(given) > more:
            return min(int(given) - more, MAX_POSITIONS)
    pairs = []
    longest = 0.0
    for numbers in batches:
        length = numbers.number("mean_length")
        rate = numbers.number("rate")
        if length is not None:
            longest = max(longest, length)
        if length is not None and rate:
            pairs.append((length, rate))
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
    return None


def _sglang_reading(
    engine: str, numbers: LineNumbers, interval: int, gamma: int | None
) -> Reading:
    running = numbers.number("running") or 0.0
    length = numbers.number("mean_length")
    speed = numbers.number("speed")
    tokens = numbers.number("tokens")
    steps = interval * running
    accepted = 0.0
    drafts = 0.0
    if length is not None:
        accepted = steps * max(length - 1.0, 0.0)
        drafts = steps
    step_s = None
    seconds = None
    if speed and running:
        step_s = running * (length or 1.0) / speed
        seconds = interval * step_s
    return Reading(
        engine=engine,
        counts=CounterIncreases(
            drafts=drafts,
            draft_tokens=drafts * gamma if gamma else None,
            accepted=accepted,
            output_tokens=steps + accepted,
            requests=0.0,
            iterations=float(interval),
            counted_steps=steps,
        ),
        running=running,
        waiting=numbers.number("waiting"),
        kv_usage=numbers.number("kv_usage"),
        context_len=tokens / running if tokens and running else None,
        step_s=step_s,
        seconds=seconds,
    )
