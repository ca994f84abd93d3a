"""What a server did between scrapes: counts as differences of counters, load as gauges over time.

Acceptance. Engines count drafts accepted at each position, unconditionally: A_i. The conditional rate is
A_i / A_(i-1), with A_0 the drafts. Where a draft can be shorter than gamma (n-gram finds no match, or a short one),
what was not drafted counts as not accepted, so that the rates give the tokens per step that the engine really made.

Steps. A sequence's step emits 1 + accepted tokens: tokens per step = 1 + A / steps, with A the accepted. Where steps
are not counted they are the drafts, or O - R - A with O the output tokens and R the first ones (which the prefill
emits). That is a little too few: accepted tokens beyond a request's limit on its length are counted in A, not in O.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from magicdec.errors import ConfigError
from magicdec.live.metrics import Scrape, Target, cache_tokens, restarted
from magicdec.live.served_draft import Draft, announced


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Increases of counters between two scrapes; None: not counted by this engine."""

    drafts: float | None = None
    draft_tokens: float | None = None
    accepted: float | None = None
    accepted_by_position: tuple[float, ...] = ()
    output_tokens: float | None = None
    requests: float | None = None
    iterations: float | None = None
    counted_steps: float | None = None
    step_seconds: float | None = None
    decode_seconds: float | None = None
    decode_requests: float | None = None
    mean_tpot_sum: float | None = None
    mean_tpot_count: float | None = None
    ttft_sum: float | None = None
    ttft_count: float | None = None
    prompt_tokens_sum: float | None = None
    prompt_tokens_count: float | None = None
    request_output_sum: float | None = None

    def __add__(self, other: Counts) -> Counts:
        width = max(len(self.accepted_by_position), len(other.accepted_by_position))
        padded = [
            each.accepted_by_position + (0.0,) * (width - len(each.accepted_by_position)) for each in (self, other)
        ]
        sums = {
            name: _sum(getattr(self, name), getattr(other, name))
            for name in (f.name for f in fields(self))
            if name != "accepted_by_position"
        }
        return Counts(accepted_by_position=tuple(a + b for a, b in zip(*padded, strict=True)), **sums)

    @property
    def steps(self) -> float | None:
        """Decode steps of sequences, the drafted and the undrafted."""
        if self.counted_steps is not None:
            return max(self.counted_steps, self.drafts or 0.0)
        if self.output_tokens is None or self.requests is None:
            return self.drafts
        return max(self.output_tokens - self.requests - (self.accepted or 0.0), self.drafts or 0.0)

    @property
    def tokens_per_step(self) -> float | None:
        steps = self.steps
        return 1.0 + (self.accepted or 0.0) / steps if steps else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time between a sequence's tokens after its first."""
        if self.output_tokens is not None:
            if self.step_seconds and self.requests is not None:
                return _ratio(self.step_seconds, self.output_tokens - self.requests)
            if self.decode_seconds:
                return _ratio(self.decode_seconds, self.output_tokens - (self.decode_requests or 0.0))
        return _ratio(self.mean_tpot_sum, self.mean_tpot_count)

    @property
    def step_s(self) -> float | None:
        """Mean time of a sequence's step."""
        if self.step_seconds and self.counted_steps:
            return self.step_seconds / self.counted_steps
        tokens, tpot = self.tokens_per_step, self.tpot_s
        return tpot * tokens if tpot is not None and tokens is not None else None

    @property
    def ttft_s(self) -> float | None:
        return _ratio(self.ttft_sum, self.ttft_count)

    @property
    def context_len(self) -> float | None:
        """Tokens that a sequence holds on average while it decodes: prompt + output / 2 of the requests that ended."""
        prompt = _ratio(self.prompt_tokens_sum, self.prompt_tokens_count)
        output = _ratio(self.request_output_sum, self.prompt_tokens_count)
        return None if prompt is None or output is None else prompt + output / 2.0


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


@dataclass(frozen=True, kw_only=True)
class Load:
    """Gauges, averaged over the scrapes with something running."""

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    context_len: float | None = None
    gamma: int | None = None
    tokens_per_step: float | None = None
    num_busy: int = 0


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One engine over a window."""

    target: Target
    segments: tuple[Counts, ...] = field(repr=False)
    """By interval between scrapes; those in which the server restarted are left out."""
    counts: Counts
    load: Load
    window_s: float | None
    """Seconds of the segments; None of saved dumps."""
    num_scrapes: int
    num_restarts: int = 0
    announced: Draft | None = None
    """What the server's own metrics name as its draft."""

    @property
    def gamma(self) -> int | None:
        """Drafted tokens per step at most: the positions counted, else the engine's own word, else the mean. Positions
        without an accepted draft that lie beyond the mean are not used: of a K table, other batches' ones."""
        mean = _ratio(self.counts.draft_tokens, self.counts.drafts)
        if by_position := self.counts.accepted_by_position:
            used = max((number for number, accepted in enumerate(by_position, 1) if accepted), default=0)
            return max(used, min(math.ceil(mean), len(by_position))) if mean else len(by_position)
        if self.load.gamma:
            return self.load.gamma
        return math.ceil(mean) if mean else None

    @property
    def is_speculative(self) -> bool:
        return bool(self.counts.drafts)

    @property
    def drafted_share(self) -> float | None:
        """Steps that had a draft to verify."""
        return _ratio(self.counts.drafts, self.counts.steps)

    @property
    def batch_size(self) -> float | None:
        """Sequences per step of the engine: counted where it counts its steps, else the gauge's mean."""
        steps, iterations = self.counts.steps, self.counts.iterations
        if steps is not None and iterations:
            return (steps + (self.counts.requests or 0.0)) / iterations
        return self.load.running

    @property
    def context_len(self) -> float | None:
        return self.counts.context_len or self.load.context_len

    @property
    def tokens_per_s(self) -> float | None:
        return _ratio(self.counts.output_tokens, self.window_s)


def observe(scrapes: Sequence[Scrape], target: Target) -> Observation:
    """What happened between the scrapes, in order.

    Raises ConfigError where fewer than two are given, or the server restarted within every interval.
    """
    if len(scrapes) < 2:
        raise ConfigError("an observation needs two scrapes; counters say what happened between them")
    names = _counter_names(target)
    pairs = list(itertools.pairwise(scrapes))
    kept = [(before, after) for before, after in pairs if not restarted(before, after, names, target.labels)]
    if not kept:
        raise ConfigError(
            "a counter fell between the scrapes: the server restarted, or the dumps are in the wrong order"
        )
    segments = tuple(_counts(before, after, target) for before, after in kept)
    counts = segments[0]
    for segment in segments[1:]:
        counts = counts + segment
    times = [(before.time_s, after.time_s) for before, after in kept]
    window = math.fsum(b - a for a, b in times if a is not None and b is not None)
    return Observation(
        target=target,
        segments=segments,
        counts=counts,
        load=_load(scrapes, target),
        window_s=window if all(None not in pair for pair in times) else None,
        num_scrapes=len(scrapes),
        num_restarts=len(pairs) - len(kept),
        announced=announced(scrapes[-1], target),
    )


def _counter_names(target: Target) -> list[str]:
    gauges = {
        "running",
        "waiting",
        "kv_usage",
        "sequence_tokens",
        "kv_blocks",
        "kv_block_tokens",
        "gamma",
        "tokens_per_step",
    }
    other = {"engine", "prefix", "replica_label", "position_label"} | gauges
    names = [getattr(target.series, f.name) for f in fields(target.series) if f.name not in other]
    return [name for name in names if name is not None]


def _counts(before: Scrape, after: Scrape, target: Target) -> Counts:
    series, labels = target.series, target.labels

    def increase(name: str | None) -> float | None:
        now = after.total(name, labels)
        return None if now is None else now - (before.total(name, labels) or 0.0)

    def positions(name: str | None) -> tuple[float, ...]:
        was, now = (scrape.by_label(name, series.position_label, labels) for scrape in (before, after))
        numbered = sorted((int(at), value - was.get(at, 0.0)) for at, value in now.items() if at.isdigit())
        return tuple(value for _, value in numbered)

    by_position, drafted = positions(series.accepted_by_position), positions(series.drafted_by_position)
    by_position += (0.0,) * (len(drafted) - len(by_position))
    drafts = increase(series.drafts)
    if drafts is None and drafted:
        drafts = drafted[0]
    output, requests = increase(series.output_tokens), increase(series.requests)
    accepted = math.fsum(by_position) if by_position else increase(series.accepted_tokens)
    if accepted is None and drafts and output is not None and requests is not None:
        accepted = max(output - requests - drafts, 0.0)  # each verification emits one token more than it accepts
    rest = ("iterations", "step_seconds", "decode_seconds", "decode_requests", "mean_tpot_sum", "mean_tpot_count",
            "ttft_sum", "ttft_count", "prompt_tokens_sum", "prompt_tokens_count", "request_output_sum")  # fmt: skip
    return Counts(
        drafts=drafts,
        draft_tokens=increase(series.draft_tokens),
        accepted=accepted,
        accepted_by_position=by_position,
        output_tokens=output,
        requests=requests,
        counted_steps=increase(series.steps),
        **{name: increase(getattr(series, name)) for name in rest},
    )


def _load(scrapes: Sequence[Scrape], target: Target) -> Load:
    series, labels = target.series, target.labels
    busy = [scrape for scrape in scrapes if (scrape.total(series.running, labels) or 0.0) > 0]

    def mean(value: Callable[[Scrape], float | None]) -> float | None:
        found = [each for scrape in busy if (each := value(scrape)) is not None]
        return math.fsum(found) / len(found) if found else None

    def held(scrape: Scrape) -> float | None:
        """Tokens in the KV cache, per running sequence."""
        tokens = scrape.total(series.sequence_tokens, labels)
        if tokens is None and series.kv_blocks is not None:
            blocks, size = scrape.total(series.kv_blocks, labels), scrape.total(series.kv_block_tokens, labels)
            tokens = None if blocks is None or size is None else blocks * size
        elif tokens is None:
            room, usage = cache_tokens(scrape, target), scrape.total(series.kv_usage, labels)
            tokens = None if room is None or usage is None else room * usage
        return _ratio(tokens, scrape.total(series.running, labels))

    gamma = mean(lambda scrape: scrape.total(series.gamma, labels))
    return Load(
        running=mean(lambda scrape: scrape.total(series.running, labels)),
        waiting=mean(lambda scrape: scrape.total(series.waiting, labels)),
        kv_usage=mean(lambda scrape: scrape.total(series.kv_usage, labels)),
        context_len=mean(held),
        gamma=round(gamma) if gamma else None,
        tokens_per_step=mean(lambda scrape: scrape.total(series.tokens_per_step, labels)),
        num_busy=len(busy),
    )
