"""A server between scrapes: counts as differences of counters, load as gauges over time, and what it drafts with.

Acceptance. Engines count drafts accepted at each position, unconditionally: A_i. The conditional rate is
A_i / A_(i-1), with A_0 the drafts. Where a draft can be shorter than gamma (n-gram finds no match, or a short one),
positions that were not drafted count as not accepted, so the rates give the tokens per step that the engine made.

Steps. A sequence's step emits 1 + accepted tokens: tokens per step = 1 + A / steps, with A the accepted. Where steps
are not counted they are the drafts, or O - R - A with O the output tokens and R the first ones (which the prefill
emits). That is a little too few: accepted tokens beyond a request's limit on its length are counted in A, not in O.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import get_args

from magicdec.errors import ConfigError, ServerError, unknown_choice
from magicdec.live.metrics import DRAFT_INFO, Scrape, Target, cache_tokens, restarted
from magicdec.naming import draft_name
from magicdec.perfmodel.acceptance.law import MAX_POSITIONS
from magicdec.specs.speculation import LOOKUP_METHODS, OWN_METHOD, SELF, SPARSE_METHODS, DraftMethod

MAX_CONTEXT = 10**9
"""Tokens of a sequence at most, in what a server counts and a user says."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    name: str
    method: DraftMethod
    budget: int | None = None
    """KV slots that a step of a sparse draft reads; None: the full cache."""

    @property
    def may_be_absent(self) -> bool:
        """Whether a step may have no draft for want of one, which then counts as a draft that was not accepted."""
        return self.method in LOOKUP_METHODS

    def __str__(self) -> str:
        return draft_name(self.name, self.method) + (f", budget {self.budget}" if self.budget else "")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Increases of counters between two scrapes; None: not counted by this engine."""

    drafts: float | None = None
    """Verifications of a draft, one per sequence and step."""
    draft_tokens: float | None = None
    accepted: float | None = None
    accepted_by_position: tuple[float, ...] = ()
    """Drafts accepted at each position: unconditional, so their differences are those that failed there."""
    output_tokens: float | None = None
    requests: float | None = None
    """Requests whose first token is out (vLLM) or that are done, as `output_tokens` counts them."""
    iterations: float | None = None
    """Steps of the engine, whatever their batch."""
    counted_steps: float | None = None
    """Steps of sequences after their first token, by engines that count them."""
    step_seconds: float | None = None
    """Sum over sequences of the time between their outputs; with speculation an output is a step's."""
    decode_seconds: float | None = None
    """Sum over requests of the time from the first token to the last."""
    decode_requests: float | None = None
    mean_tpot_sum: float | None = None
    """Sum over requests of their own time per output token; `mean_tpot_count` is their number."""
    mean_tpot_count: float | None = None
    ttft_sum: float | None = None
    ttft_count: float | None = None
    prompt_tokens_sum: float | None = None
    prompt_tokens_count: float | None = None
    request_output_sum: float | None = None

    def __add__(self, other: Counts) -> Counts:
        pairs = {each.name: (getattr(self, each.name), getattr(other, each.name)) for each in fields(self)}
        by_position = itertools.zip_longest(*pairs.pop("accepted_by_position"), fillvalue=0.0)
        sums = {name: None if None in pair else math.fsum(pair) for name, pair in pairs.items()}
        return Counts(accepted_by_position=tuple(map(sum, by_position)), **sums)

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
    """The draft that the server's own metrics name."""

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
    """Observes one engine over the scrapes, which are in order.

    Raises ConfigError where fewer than two are given, or the server restarted within every interval, ServerError for
    counts that none can have.
    """
    if len(scrapes) < 2:
        raise ConfigError("an observation needs two scrapes; counters say what happened between them")
    pairs = list(itertools.pairwise(scrapes))
    kept = [(before, after) for before, after in pairs if not restarted(before, after, target)]
    if not kept:
        raise ConfigError(
            "a counter fell between the scrapes: the server restarted, or the dumps are in the wrong order"
        )
    segments = tuple(_counts(before, after, target) for before, after in kept)
    times = [(before.time_s, after.time_s) for before, after in kept]
    window = math.fsum(b - a for a, b in times if a is not None and b is not None)
    seen = Observation(
        target=target,
        segments=segments,
        counts=functools.reduce(operator.add, segments),
        load=_load(scrapes, target),
        window_s=window if all(None not in pair for pair in times) else None,
        num_scrapes=len(scrapes),
        num_restarts=len(pairs) - len(kept),
        announced=announced(scrapes[-1], target),
    )
    if (length := seen.context_len or 0.0) > MAX_CONTEXT:
        raise ServerError(f"{scrapes[-1].where} counts sequences of {length:g} tokens, longer than any")
    return seen


def _counts(before: Scrape, after: Scrape, target: Target) -> Counts:
    series, labels = target.series, target.labels

    def increase(name: str) -> float | None:
        now = after.total(series.counters.get(name), labels)
        return None if now is None else now - (before.total(series.counters.get(name), labels) or 0.0)

    def positions(name: str) -> tuple[float, ...]:
        counter = series.counters.get(name)
        was, now = (scrape.by_label(counter, series.position_label, labels) for scrape in (before, after))
        if len(now) > MAX_POSITIONS:
            raise ServerError(f"{after.where} counts {len(now)} draft positions; at most {MAX_POSITIONS} are read")
        known = {at: value for at, value in now.items() if at.isdecimal() and len(at) <= len(str(MAX_POSITIONS))}
        numbered = sorted((int(at), value - was.get(at, 0.0)) for at, value in known.items())
        return tuple(value for _, value in numbered)

    by_position, drafted = positions("accepted_by_position"), positions("drafted_by_position")
    by_position += (0.0,) * (len(drafted) - len(by_position))
    counts = {each.name: increase(each.name) for each in fields(Counts) if each.name != "accepted_by_position"}
    if counts["drafts"] is None and drafted:
        counts["drafts"] = drafted[0]
    drafts, output, requests = (counts[name] for name in ("drafts", "output_tokens", "requests"))
    if by_position:
        counts["accepted"] = math.fsum(by_position)
    elif counts["accepted"] is None and drafts and output is not None and requests is not None:
        counts["accepted"] = max(output - requests - drafts, 0.0)  # a verification emits one more than it accepts
    return Counts(accepted_by_position=by_position, **counts)


def _load(scrapes: Sequence[Scrape], target: Target) -> Load:
    def gauge(scrape: Scrape, name: str) -> float | None:
        return scrape.total(target.series.gauges.get(name), target.labels)

    def held(scrape: Scrape) -> float | None:
        """Tokens in the KV cache, per running sequence."""
        tokens = gauge(scrape, "sequence_tokens")
        if tokens is None:
            room, used = gauge(scrape, "kv_block_tokens"), gauge(scrape, "kv_blocks")
            if "kv_blocks" not in target.series.gauges:
                room, used = cache_tokens(scrape, target), gauge(scrape, "kv_usage")
            tokens = None if room is None or used is None else room * used
        return _ratio(tokens, gauge(scrape, "running"))

    busy = [scrape for scrape in scrapes if (gauge(scrape, "running") or 0.0) > 0]

    def mean(values: Iterable[float | None]) -> float | None:
        found = [each for each in values if each is not None]
        return math.fsum(found) / len(found) if found else None

    means = {name: mean(gauge(scrape, name) for scrape in busy) for name in ("running", "waiting", "kv_usage", "gamma")}
    gamma = means.pop("gamma")
    return Load(context_len=mean(map(held, busy)), gamma=round(gamma) if gamma else None, **means)


def parse_draft(text: str, *, method: str | None = None, budget: int | None = None) -> Draft:
    """ "ngram", "eagle" and the like, a draft model's name (with its full cache unless a sparse method is given), or
    "self" with a sparse method and its budget.

    Raises ConfigError where these do not go together.
    """
    if text in OWN_METHOD:
        if method not in (None, text) or budget is not None:
            raise ConfigError(f"draft {text} has its own method and no budget; give neither")
        return Draft(name=text, method=text)
    if method is not None and method not in get_args(DraftMethod):
        raise unknown_choice("draft method", method, SPARSE_METHODS)
    chosen = method or ("streamingllm" if text == SELF else "full")
    if budget is not None and not 0 < budget <= MAX_CONTEXT:
        raise ConfigError(f"a draft's budget is between 1 and {MAX_CONTEXT} tokens, not {budget}")
    if chosen in SPARSE_METHODS and budget is None:
        raise ConfigError(f"draft {text} with method {chosen} needs a --draft-budget")
    if chosen not in SPARSE_METHODS and budget is not None:
        raise ConfigError(f"--draft-budget goes with a sparse method ({', '.join(SPARSE_METHODS)}), not with {chosen}")
    if chosen not in (*SPARSE_METHODS, "full"):
        raise unknown_choice("draft method", chosen, SPARSE_METHODS)
    return Draft(name=text, method=chosen, budget=budget)


def announced(scrape: Scrape, target: Target) -> Draft | None:
    """The draft that the server's own metrics name: magicdec's in vLLM. None: they name none, as of all others."""
    infos = [own for own, _ in scrape.rows(DRAFT_INFO, target.labels)]
    try:
        return parse_draft(SELF, method=infos[0]["draft_method"], budget=int(infos[0]["draft_budget"]))
    except (IndexError, KeyError, ValueError, ConfigError):
        return None


def agreed(given: Draft | None, server: Draft | None) -> Draft:
    """The draft that both name, or the only one that is named, or n-gram. Raises ConfigError where they differ."""
    if given is not None and server is not None and given != server:
        raise ConfigError(f"the server drafts with {server}, not with {given}; leave --draft out")
    return given or server or Draft(name="ngram", method="ngram")
