"""A server between scrapes: counts as differences of counters, load as gauges over time, and what
it drafts with.

Acceptance. Engines count drafts accepted at each position, unconditionally: A_i. The conditional
rate is A_i / A_(i-1), with A_0 the drafts. Where a draft can be shorter than gamma (n-gram finds no
match, or a short one), positions that were not drafted count as not accepted, so the rates give the
tokens per step that the engine made.

Steps. A sequence's step emits 1 + accepted tokens: tokens per step = 1 + A / steps, with A the
accepted. Where steps are not counted they are the drafts, or O - R - A with O the output tokens and
R the first ones (which the prefill emits). That is a little too few: accepted tokens beyond a
request's limit on its length are counted in A, not in O.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from magicdec.errors import ConfigError, ServerError, unknown_choice
from magicdec.live.metrics import DRAFT_INFO, Scrape, Target, cache_tokens, restarted
from magicdec.naming import draft_name
from magicdec.perfmodel.acceptance.law import MAX_POSITIONS
from magicdec.specs.speculation import (
    DRAFT_METHODS,
    LOOKUP_METHODS,
    OWN_METHOD,
    SELF,
    SPARSE_METHODS,
    DraftMethod,
)
from magicdec.units import LARGEST_NUMBER

MAX_COUNTED_CONTEXT = 10**9
"""Tokens of a sequence at most, in what a server counts and a user says."""
COUNTED = 1.02
"""Accepted tokens over drafted ones, up to which it is rounding."""
SHORTEST_S = 1e-7
LONGEST_S = 1e7
"""Times of a step, a token or a prompt, with room."""
DATA_PARALLEL_LABEL = "dp_rank"
"""SGLang's label of schedulers that share its address and its counters, each with its own batch."""


@dataclass(frozen=True, kw_only=True)
class ServedDraft:
    name: str
    method: DraftMethod
    budget: int | None = None
    """KV slots that a step of a sparse draft reads; None: the full cache."""
    is_assumed: bool = False
    """Whether a log that names no draft was taken to be of this one."""

    @property
    def may_be_absent(self) -> bool:
        """Whether a step may have no draft for want of one, which then counts as a draft that was
        not accepted.
        """
        return self.method in LOOKUP_METHODS

    def __str__(self) -> str:
        if self.is_assumed:
            return "a draft that is not named"
        budget_text = ""
        if self.budget is not None:
            budget_text = f", budget {self.budget}"
        return draft_name(self.name, self.method) + budget_text


UNNAMED = ServedDraft(name="eagle3", method="eagle3", is_assumed=True)
"""The draft of a log that names none: a head costs what most drafts do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CounterIncreases:
    """Increases of counters between two scrapes; None: not counted by this engine."""

    drafts: float | None = None
    """Verifications of a draft, one per sequence and step."""
    draft_tokens: float | None = None
    accepted: float | None = None
    accepted_by_position: tuple[float, ...] = ()
    """Drafts accepted at each position: unconditional, so their differences are those that failed
    there.
    """
    output_tokens: float | None = None
    requests: float | None = None
    """Requests whose first token is out (vLLM) or that are done, as `output_tokens` counts them."""
    iterations: float | None = None
    """Steps of the engine, whatever their batch."""
    counted_steps: float | None = None
    """Steps of sequences after their first token, by engines that count them."""
    step_seconds: float | None = None
    """Sum over sequences of the time between their outputs; with speculation an output is a step's.
    """
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

    def __add__(self, other: CounterIncreases) -> CounterIncreases:
        by_position = itertools.zip_longest(
            self.accepted_by_position,
            other.accepted_by_position,
            fillvalue=0.0,
        )
        sums: dict[str, float | None] = {}
        for counter in fields(self):
            if counter.name != "accepted_by_position":
                one = getattr(self, counter.name)
                two = getattr(other, counter.name)
                sums[counter.name] = _sum(one, two)
        return CounterIncreases(
            accepted_by_position=tuple(map(sum, by_position)), **sums
        )

    @property
    def steps(self) -> float | None:
        """Decode steps of sequences, the drafted and the undrafted."""
        drafts = self.drafts or 0.0
        if self.counted_steps is not None:
            return max(self.counted_steps, drafts)
        if self.output_tokens is None or self.requests is None:
            return self.drafts
        accepted = self.accepted or 0.0
        return max(self.output_tokens - self.requests - accepted, drafts)

    @property
    def tokens_per_step(self) -> float | None:
        steps = self.steps
        if steps:
            return 1.0 + (self.accepted or 0.0) / steps
        return None

    @property
    def tpot_s(self) -> float | None:
        """Mean time between a sequence's tokens after its first."""
        if self.output_tokens is not None:
            if self.step_seconds and self.requests is not None:
                return _ratio(self.step_seconds, self.output_tokens - self.requests)
            if self.decode_seconds:
                after_first = self.output_tokens - (self.decode_requests or 0.0)
                return _ratio(self.decode_seconds, after_first)
        return _ratio(self.mean_tpot_sum, self.mean_tpot_count)

    @property
    def step_s(self) -> float | None:
        """Mean time of a sequence's step."""
        if self.step_seconds and self.counted_steps:
            return self.step_seconds / self.counted_steps
        tokens = self.tokens_per_step
        tpot = self.tpot_s
        if tpot is None or tokens is None:
            return None
        return tpot * tokens

    @property
    def ttft_s(self) -> float | None:
        return _ratio(self.ttft_sum, self.ttft_count)

    @property
    def context_len(self) -> float | None:
        """Tokens that a sequence holds on average while it decodes: prompt + output / 2 of the
        requests that ended.
        """
        prompt = _ratio(self.prompt_tokens_sum, self.prompt_tokens_count)
        output = _ratio(self.request_output_sum, self.prompt_tokens_count)
        if prompt is None or output is None:
            return None
        return prompt + output / 2.0


def _ratio(above: float | None, below: float | None) -> float | None:
    if above is None or not below:
        return None
    return above / below


def _sum(one: float | None, two: float | None) -> float | None:
    if one is None or two is None:
        return None
    return one + two


@dataclass(frozen=True, kw_only=True)
class MeanGauges:
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
    segments: tuple[CounterIncreases, ...] = field(repr=False)
    """Increases per interval between scrapes, without those in which the server restarted."""
    counts: CounterIncreases
    load: MeanGauges
    window_s: float | None
    """Seconds of the segments; None of saved dumps."""
    num_scrapes: int
    num_restarts: int = 0
    announced: ServedDraft | None = None
    """The draft that the server's own metrics, or its log, name."""
    is_gamma_assumed: bool = False
    """Whether gamma is not told, and the draft's usual one."""
    form: str = ""
    """The form of what was read, where that is no live metrics."""
    unit: str = "scrapes"
    """The thing that `num_scrapes` counts."""
    faults: tuple[str, ...] = ()
    """Faults that the server itself tells of, in sentences."""
    notes: tuple[str, ...] = ()
    """Warnings of the reader about its numbers."""
    own_tokens_per_s: float | None = None
    """A log's own speed, of its time of decoding."""
    parts: tuple[Observation, ...] = field(default=(), repr=False)
    """Each of several data-parallel engines, whose sum this is."""

    @property
    def gamma(self) -> int | None:
        """Most drafted tokens per step: the number of counted positions, else the engine's setting,
        else the mean. Positions beyond the mean at which nothing was accepted do not count: where
        gamma follows a table, they belong to other batches."""
        mean = _ratio(self.counts.draft_tokens, self.counts.drafts)
        by_position = self.counts.accepted_by_position
        if by_position:
            if not mean:
                return len(by_position)
            gamma = min(math.ceil(mean), len(by_position))
            for position, accepted in enumerate(by_position, 1):
                if accepted:
                    gamma = max(gamma, position)
            return gamma
        if self.load.gamma:
            return self.load.gamma
        if mean:
            return math.ceil(mean)
        return None

    @property
    def is_speculative(self) -> bool:
        return bool(self.counts.drafts)

    @property
    def drafted_share(self) -> float | None:
        """Steps that had a draft to verify."""
        return _ratio(self.counts.drafts, self.counts.steps)

    @property
    def batch_size(self) -> float | None:
        """Sequences per step of the engine: counted where it counts its steps, else the gauge's
        mean.
        """
        steps = self.counts.steps
        iterations = self.counts.iterations
        if steps is None or not iterations:
            return self.load.running
        return (steps + (self.counts.requests or 0.0)) / iterations

    @property
    def context_len(self) -> float | None:
        return self.counts.context_len or self.load.context_len

    @property
    def tokens_per_s(self) -> float | None:
        if self.own_tokens_per_s is not None:
            return self.own_tokens_per_s
        return _ratio(self.counts.output_tokens, self.window_s)


def check_counts(counts: CounterIncreases, gamma: int | None) -> None:
    """Raises ConfigError for what no engine counts, naming it; `gamma` None: not told."""
    for counter in fields(counts):
        if counter.name != "accepted_by_position":
            value = getattr(counts, counter.name)
            name = counter.name.replace("_", " ")
            if value is not None and not 0.0 <= value <= LARGEST_NUMBER:
                raise ConfigError(f"{name}: {value:g} is no count that an engine has")
    times = {
        "time per output token": counts.tpot_s,
        "time of a step": counts.step_s,
        "time to the first token": counts.ttft_s,
    }
    for name, seconds in times.items():
        check_time(name, seconds)
    accepted = counts.accepted
    drafted = counts.draft_tokens
    if not accepted:
        return
    # rounded counts of a log, and steps that a scrape cuts
    most = COUNTED * (drafted or math.inf) + (gamma or 1)
    if accepted > most:
        raise ConfigError(f"{accepted:g} tokens accepted of {drafted:g} drafted")
    if gamma and counts.drafts and accepted > COUNTED * gamma * counts.drafts + gamma:
        length = 1.0 + accepted / counts.drafts
        raise ConfigError(
            f"an accept length of {length:.2f} with {gamma} drafted tokens: a step makes {gamma + 1} at most"
        )


def check_time(name: str, seconds: float | None) -> None:
    """Raises ConfigError for a time that nothing takes; 0 stands for none."""
    if seconds and not SHORTEST_S <= seconds <= LONGEST_S:
        raise ConfigError(f"{name}: {seconds:g} s is no time that an engine takes")


def observe(scrapes: Sequence[Scrape], target: Target) -> Observation:
    """Observes one engine over the scrapes, which are in order.

    Raises ConfigError where fewer than two are given, or the server restarted within every
    interval, ServerError for counts that none can have.
    """
    if len(scrapes) < 2:
        raise ConfigError(
            "an observation needs two scrapes: it reads what counters gained between them"
        )
    intervals = list(itertools.pairwise(scrapes))
    unbroken = []
    for before, after in intervals:
        if not restarted(before, after, target):
            unbroken.append((before, after))
    if not unbroken:
        raise ConfigError(
            "a counter fell between the scrapes: the server restarted, or the dumps are in the "
            "wrong order"
        )
    segments = tuple(_counts(before, after, target) for before, after in unbroken)
    times_s = []
    for before, after in unbroken:
        if before.time_s is not None and after.time_s is not None:
            times_s.append(after.time_s - before.time_s)
    window_s = None
    if len(times_s) == len(unbroken):
        window_s = math.fsum(times_s)
    observation = Observation(
        target=target,
        segments=segments,
        counts=functools.reduce(operator.add, segments),
        load=_load(scrapes, target),
        window_s=window_s,
        num_scrapes=len(scrapes),
        num_restarts=len(intervals) - len(unbroken),
        announced=announced(scrapes[-1], target),
        notes=_on_ranks(scrapes[-1], target),
    )
    # an engine that counts drafts alone emits tokens in other windows than it counts them
    if target.series.counters.get("accepted") is not None:
        check_counts(observation.counts, observation.gamma)
    length = observation.context_len or 0.0
    if length > MAX_COUNTED_CONTEXT:
        raise ServerError(
            f"{scrapes[-1].where} counts sequences of {length:g} tokens, longer than any"
        )
    return observation


def _counts(before: Scrape, after: Scrape, target: Target) -> CounterIncreases:
    by_position = _by_position(before, after, target, "accepted_by_position")
    drafted = _by_position(before, after, target, "drafted_by_position")
    by_position += (0.0,) * (len(drafted) - len(by_position))
    counts: dict[str, float | None] = {}
    for counter in fields(CounterIncreases):
        if counter.name != "accepted_by_position":
            name = target.series.counters.get(counter.name)
            end = after.total(name, target.labels)
            # an engine that lacks the counter differs from one that counted nothing
            increase = None
            if end is not None:
                increase = end - (before.total(name, target.labels) or 0.0)
            counts[counter.name] = increase
    if counts["drafts"] is None and drafted:
        counts["drafts"] = drafted[0]
    if by_position:
        counts["accepted"] = math.fsum(by_position)
    elif counts["accepted"] is None:
        drafts = counts["drafts"]
        output_tokens = counts["output_tokens"]
        requests = counts["requests"]
        if drafts and output_tokens is not None and requests is not None:
            # a verification emits one token more than it accepts
            counts["accepted"] = max(output_tokens - requests - drafts, 0.0)
    return CounterIncreases(accepted_by_position=by_position, **counts)


def _by_position(
    before: Scrape, after: Scrape, target: Target, name: str
) -> tuple[float, ...]:
    """Increases of a counter that has one value per draft position, in their order."""
    counter = target.series.counters.get(name)
    label = target.series.position_label
    start = before.by_label(counter, label, target.labels)
    end = after.by_label(counter, label, target.labels)
    if len(end) > MAX_POSITIONS:
        raise ServerError(
            f"{after.where} counts {len(end)} draft positions; at most {MAX_POSITIONS} are read"
        )
    increases = []
    for position, value in end.items():
        if position.isdecimal() and len(position) <= len(str(MAX_POSITIONS)):
            increases.append((int(position), value - start.get(position, 0.0)))
    return tuple(increase for _, increase in sorted(increases))


def _load(scrapes: Sequence[Scrape], target: Target) -> MeanGauges:
    busy = []
    for scrape in scrapes:
        if (_gauge(scrape, target, "running") or 0.0) > 0:
            busy.append(scrape)

    def mean(name: str) -> float | None:
        return mean_of_known(_gauge(scrape, target, name) for scrape in busy)

    gamma = None
    mean_gamma = mean("gamma")
    if mean_gamma:
        gamma = round(mean_gamma)
    return MeanGauges(
        running=mean("running"),
        waiting=mean("waiting"),
        kv_usage=mean("kv_usage"),
        context_len=mean_of_known(
            _tokens_per_sequence(scrape, target) for scrape in busy
        ),
        gamma=gamma,
    )


def _gauge(scrape: Scrape, target: Target, name: str) -> float | None:
    """A gauge of one batch: SGLang's data-parallel ranks each report their own, its tensor-parallel
    ranks the same."""
    rows = scrape.rows(target.series.gauges.get(name), target.labels)
    return mean_of_known(value for _, value in rows)


def _on_ranks(scrape: Scrape, target: Target) -> tuple[str, ...]:
    """The remark that gauges are a mean over data-parallel ranks, where several report."""
    running = target.series.gauges.get("running")
    ranks = scrape.by_label(running, DATA_PARALLEL_LABEL, target.labels)
    if len(ranks) < 2:
        return ()
    batches = ", ".join(f"{value:.0f}" for _, value in sorted(ranks.items()))
    return (
        f"{len(ranks)} data-parallel ranks with batches of their own ({batches} at the end): "
        "batch, queue and cache are their mean, tokens per second their sum",
    )


def _tokens_per_sequence(scrape: Scrape, target: Target) -> float | None:
    """Tokens in the KV cache, per running sequence."""
    tokens = _gauge(scrape, target, "sequence_tokens")
    if tokens is None:
        if "kv_blocks" in target.series.gauges:
            room = _gauge(scrape, target, "kv_block_tokens")
            used = _gauge(scrape, target, "kv_blocks")
        else:
            room = cache_tokens(scrape, target)
            used = _gauge(scrape, target, "kv_usage")
        if room is None or used is None:
            return None
        tokens = room * used
    return _ratio(tokens, _gauge(scrape, target, "running"))


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """The mean of what is told; None: nothing is."""
    known = [value for value in values if value is not None]
    if known:
        return math.fsum(known) / len(known)
    return None


def parse_draft(
    text: str, *, method: str | None = None, budget: int | None = None
) -> ServedDraft:
    """ "ngram", "eagle" and the like, a draft model's name (with its full cache unless a sparse
    method is given), or "self" with a sparse method and its budget.

    Raises ConfigError where these do not go together.
    """
    if text in OWN_METHOD:
        if method not in (None, text) or budget is not None:
            raise ConfigError(
                f"draft {text} has its own method and no budget; give neither"
            )
        return ServedDraft(name=text, method=text)
    if method is not None and method not in DRAFT_METHODS:
        raise unknown_choice("draft method", method, SPARSE_METHODS)
    if not method:
        method = "full"
        if text == SELF:
            method = "streamingllm"
    is_sparse = method in SPARSE_METHODS
    if is_sparse and budget is None:
        raise ConfigError(f"draft {text} with method {method} needs a --draft-budget")
    if budget is not None and not 0 < budget <= MAX_COUNTED_CONTEXT:
        raise ConfigError(
            f"a draft's budget is between 1 and {MAX_COUNTED_CONTEXT} tokens, not {budget}"
        )
    if budget is not None and not is_sparse:
        raise ConfigError(
            f"--draft-budget goes with a sparse method ({', '.join(SPARSE_METHODS)}), "
            f"not with {method}"
        )
    if method not in (*SPARSE_METHODS, "full"):
        raise unknown_choice("draft method", method, SPARSE_METHODS)
    return ServedDraft(name=text, method=method, budget=budget)


def announced(scrape: Scrape, target: Target) -> ServedDraft | None:
    """The draft that the server's own metrics name. Only magicdec's plugin of vLLM names one."""
    for info, _ in scrape.rows(DRAFT_INFO, target.labels):
        try:
            budget = int(info["draft_budget"])
            return parse_draft(SELF, method=info["draft_method"], budget=budget)
        except (KeyError, ValueError, ConfigError):
            return None
    return None


def agreed(requested: ServedDraft | None, server: ServedDraft | None) -> ServedDraft:
    """The requested draft, else the server's, else n-gram. Raises ConfigError where both are known
    and differ.
    """
    is_known = server is not None and not server.is_assumed
    if requested is not None and is_known and requested != server:
        raise ConfigError(
            f"the server drafts with {server}, not with {requested}; leave --draft out"
        )
    return requested or server or ServedDraft(name="ngram", method="ngram")
