"""Loads to fit an engine to, stated in advance, sent to an OpenAI-compatible server as planned, and
timed.

A load is `concurrency` requests sent at once, of one prompt length and one output length. While all
of them decode, the batch and the lengths are known: that window alone is timed, so neither prefill
nor queueing is in it.

Prompts are random token ids: lengths are exact without the model's tokenizer, and no prefix is
cached. Answers are streamed, an event per sequence and step, or several steps' tokens in one where
the stream lags: tokens are counted by the usage that is asked for along with them. No redirects, no
proxies; answers are bounded in size and time.

Why a driver of our own: GuideLLM (0.8) depends on torch and on another click than ours, AIPerf
(0.13) on another pandas and rich, and each takes 5 to 15 s to start, for every load. Where a server
drafts they cannot tell a step, which needs events without text too (results/LOG.md compares their
fits).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from magicdec.errors import ConfigError, ServerError
from magicdec.files import decode_json
from magicdec.live.http import Address, client
from magicdec.units import KIB, format_bytes

if TYPE_CHECKING:
    import httpx

Clock = Callable[[], float]
SILENCE_S = 300.0
"""Longest wait for the next event of an answer."""
ANSWER_S = 3600.0
"""Longest time of a load's answers, however often something of them comes, headers included."""
BYTES_PER_TOKEN = 4096
"""An answer's size at most, for each token asked for; an event has some hundreds."""
LONGEST_EVENT_BYTES = 64 * KIB
"""A line of a stream that is longer is none of an engine's; it must not fill this machine's memory."""
FIRST_TOKEN_ID = 16
"""Prompts use ids from here to the vocabulary's end: the first ones are often special."""
MIN_STEPS = 4
"""Steps of every sequence that a window must hold to be timed."""
MAX_CONCURRENCY = 1024
USUAL_PROMPTS = (256, 1024, 2048)
MOST_SENT_TOKENS = 50_000_000
"""Tokens of all loads together: at 10,000 tokens/s they take 1.4 hours, so more is a slip."""
LEAST_PREFILL_TOKENS = 2048
"""Least tokens of a chunk of prefill in engines' defaults: meanwhile sequences whose prompt is in
already decode.
"""


@dataclass(frozen=True, kw_only=True)
class SentLoad:
    """`is_judge`: kept out of the fit."""

    concurrency: int
    prompt_len: int
    output_len: int
    is_judge: bool = False

    @property
    def num_tokens(self) -> int:
        return self.concurrency * (self.prompt_len + self.output_len)

    def __str__(self) -> str:
        return f"{self.concurrency} x {self.prompt_len} + {self.output_len}"


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """Every load once per round, each round in an order of its own: a drifting machine favours none
    of them.
    """

    loads: tuple[SentLoad, ...]
    rounds: int
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(load.num_tokens for load in self.order)

    @property
    def num_requests(self) -> int:
        return sum(load.concurrency for load in self.order)

    @property
    def about(self) -> dict[str, Any]:
        """How a calibration's file describes the loads that were sent."""
        told = {
            "requests": self.num_requests,
            "tokens": self.num_tokens,
            "rounds": self.rounds,
            "seed": self.seed,
        }
        return {"sent": told}

    @property
    def order(self) -> list[SentLoad]:
        """The smallest load comes first and last too: its difference is the machine's drift."""
        generator = random.Random(self.seed)
        rounds: list[SentLoad] = []
        for _ in range(self.rounds):
            rounds += generator.sample(self.loads, len(self.loads))
        probe = min(self.loads, key=lambda load: load.num_tokens)
        return [probe, *rounds, probe]


def plan_loads(
    *,
    concurrencies: Sequence[int],
    prompt_lens: Sequence[int],
    output_len: int,
    rounds: int,
    max_len: int,
    gamma: int = 0,
    seed: int = 0,
) -> LoadPlan:
    """All pairs of concurrency and prompt length; of a chequerboard over them one colour judges,
    the other is fitted.

    `output_len` is what a sequence decodes while all do; it generates more while the others'
    prompts are taken in, with drafts up to `gamma` + 1 tokens in a step. Without prompt lengths
    they are `USUAL_PROMPTS`, or as far apart below what fits. Raises ConfigError for loads that
    cannot be sent, and for too few to fit and to judge.
    """

    if max_len < 1:
        raise ConfigError(f"the server states a longest context of {max_len} tokens")

    def outputs(concurrency: int, prompt_len: int) -> int:
        return output_len + (gamma + 1) * (
            concurrency * prompt_len // LEAST_PREFILL_TOKENS
        )

    if not prompt_lens:
        longest = USUAL_PROMPTS[-1]
        most = max(concurrencies, default=1)
        while longest > 8 and longest + outputs(most, longest) > max_len:
            longest = longest * 3 // 4
        prompt_lens = tuple(
            length * longest // USUAL_PROMPTS[-1] for length in USUAL_PROMPTS
        )
    loads = []
    for row, concurrency in enumerate(sorted(set(concurrencies))):
        for column, prompt_len in enumerate(sorted(set(prompt_lens))):
            load = SentLoad(
                concurrency=concurrency,
                prompt_len=prompt_len,
                output_len=outputs(concurrency, prompt_len),
                is_judge=(row + column) % 2 == 1,
            )
            if not 1 <= concurrency <= MAX_CONCURRENCY:
                raise ConfigError(
                    f"concurrency must be between 1 and {MAX_CONCURRENCY}, not {concurrency}"
                )
            if prompt_len < 1 or prompt_len + load.output_len > max_len:
                raise ConfigError(
                    f"a prompt of {prompt_len} and {load.output_len} output tokens do not fit "
                    f"{max_len} tokens; the longest prompt is {max(max_len - load.output_len, 1)}"
                )
            loads.append(load)
    if output_len < 8 or not 1 <= rounds <= 100:
        raise ConfigError("loads need at least 8 output tokens, and 1 to 100 rounds")
    check_enough(loads)
    plan = LoadPlan(loads=tuple(loads), rounds=rounds, seed=seed)
    if plan.num_tokens > MOST_SENT_TOKENS:
        raise ConfigError(
            f"the loads would send {plan.num_tokens} tokens, more than the {MOST_SENT_TOKENS} of a "
            "calibration"
        )
    return plan


def check_enough(loads: Sequence[SentLoad]) -> None:
    """Raises ConfigError for too few loads to fit four constants and to judge them."""
    if sum(not load.is_judge for load in loads) < 4 or not any(
        load.is_judge for load in loads
    ):
        raise ConfigError(
            f"{len(loads)} loads are too few: with 3 concurrencies and 3 prompt lengths 5 are "
            "fitted and 4 judge"
        )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A load's window, in seconds by the clock that was given; or the median of its rounds."""

    load: SentLoad
    step_s: float
    """Time between events, or as many tokens' as the server counts in a step where it drafts."""
    tpot_s: float
    tokens_per_step: float
    context_len: float
    """Mean tokens that a sequence held in the window."""
    ttft_s: float
    num_steps: int
    drafted_share: float = 0.0
    """Share of steps that verified a draft, by the server's counters."""
    spread: float | None = None
    """Half the range of the rounds' times per step, over their median; None: it was sent once."""


@dataclass(frozen=True, kw_only=True)
class SentAnswer:
    """One request's answer, by the clock of its load. An event holds the tokens of one step, or of
    several where the stream lags."""

    sent_s: float
    events_s: list[float]
    num_tokens: int
    tokens: list[int] = field(default_factory=list)
    """Tokens up to each event, as the server counts them; empty: it does not, and they are taken as
    evenly spread.
    """

    def tokens_up_to(self, event: int) -> float:
        if self.tokens:
            return self.tokens[event]
        return 1.0 + event * (self.num_tokens - 1) / max(len(self.events_s) - 1, 1)


class WindowTooShort(ServerError):
    """All sequences of a load decoded together for fewer than `MIN_STEPS` steps."""


def drive_load(
    address: Address,
    load: SentLoad,
    *,
    model: str,
    vocab_size: int,
    seed: int,
    clock: Clock = time.perf_counter,
) -> Measured:
    """Sends one load and times it.

    Raises ServerError for the first answer that is an error, ends early or stays silent.
    """
    return measure(
        load,
        asyncio.run(
            _send_all(address, load, model, vocab_size, random.Random(seed), clock)
        ),
    )


async def _send_all(
    address: Address,
    load: SentLoad,
    model: str,
    vocab_size: int,
    generator: random.Random,
    clock: Clock,
) -> list[SentAnswer]:
    import httpx

    bodies: list[dict[str, Any]] = [
        {
            "model": model,
            "prompt": [
                generator.randrange(FIRST_TOKEN_ID, vocab_size)
                for _ in range(load.prompt_len)
            ],
            "max_tokens": load.output_len,
            "min_tokens": load.output_len,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        for _ in range(load.concurrency)
    ]
    limits = httpx.Limits(max_connections=load.concurrency, max_keepalive_connections=0)
    async with client(address, timeout_s=SILENCE_S, limits=limits) as session:
        tasks = [
            asyncio.create_task(_send(session, address, body, clock=clock))
            for body in bodies
        ]
        try:
            async with asyncio.timeout(ANSWER_S):
                return list(await asyncio.gather(*tasks))
        except TimeoutError:
            raise ServerError(
                f"{address} did not answer within {ANSWER_S:g} s; nothing more was sent"
            ) from None
        except (
            httpx.HTTPError,
            httpx.InvalidURL,
            ValueError,
        ) as error:  # the last two of a damaged Location
            raise ServerError(
                f"{address}: {str(error) or type(error).__name__}; nothing more was sent"
            ) from None
        finally:
            for task in tasks:
                task.cancel()


async def _send(
    session: httpx.AsyncClient,
    address: Address,
    body: dict[str, Any],
    *,
    clock: Clock,
) -> SentAnswer:
    output_len: int = body["max_tokens"]
    events: list[float] = []
    counted: list[int] = []
    num_tokens = 0
    sent = clock()
    async with session.stream(
        "POST",
        str(address.at(f"{address.path}/v1/completions")),
        json=body,
    ) as response:
        if response.status_code != 200:
            raise ServerError(
                f"{address} answers a request with status {response.status_code}; nothing more was "
                "sent"
            )
        async for line in _lines(
            response,
            address,
            limit_bytes=BYTES_PER_TOKEN * (output_len + 16),
        ):
            event = _event(line, address)
            usage = event.get("usage")
            if not isinstance(usage, dict):
                usage = {}
            if event.get("choices"):
                events.append(clock())
                if "completion_tokens" in usage:
                    counted.append(usage["completion_tokens"])
            num_tokens = usage.get("completion_tokens", num_tokens)
    num_tokens = num_tokens or len(events)
    if num_tokens != output_len or not events:
        raise ServerError(
            f"{address} generated {num_tokens} tokens where {output_len} were asked for, in "
            f"{len(events)} events: "
            "it does not know ignore_eos, or does not stream"
        )
    tokens = []
    if len(counted) == len(events):
        tokens = counted
    in_range = all(type(count) is int and 0 <= count <= output_len for count in tokens)
    if not in_range or tokens != sorted(tokens):
        raise ServerError(
            f"{address} counts the tokens of an answer in a way that no engine does"
        )
    return SentAnswer(
        sent_s=sent, events_s=events, num_tokens=num_tokens, tokens=tokens
    )


async def _lines(
    response: httpx.Response,
    address: Address,
    *,
    limit_bytes: int,
) -> AsyncIterator[str]:
    """The lines of an answer. Raises ServerError for one that is too large."""
    size, rest = 0, b""
    async for chunk in response.aiter_raw():
        size += len(chunk)
        if size > limit_bytes:
            raise ServerError(
                f"{address} answers with more than {format_bytes(limit_bytes)}; nothing more was "
                "sent"
            )
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > LONGEST_EVENT_BYTES:
            raise ServerError(
                f"{address} sends an event of more than {format_bytes(LONGEST_EVENT_BYTES)}"
            )
        for line in lines:
            yield line.decode(errors="replace").rstrip("\r")
    yield rest.decode(errors="replace")


def _event(line: str, address: Address) -> dict[str, Any]:
    text = line.removeprefix("data:").strip()
    if not line.startswith("data:") or text in ("", "[DONE]"):
        return {}
    try:
        event = decode_json(text)
    except msgspec.DecodeError:
        raise ServerError(
            f"{address} streams what is not JSON; nothing more was sent"
        ) from None
    if not isinstance(event, dict) or "error" in event:
        raise ServerError(f"{address} answers with an error; nothing more was sent")
    return event


def measure(load: SentLoad, answers: list[SentAnswer]) -> Measured:
    """The window from the last first token to the first end: all decode, none prefills.

    Raises WindowTooShort.
    """
    start = max(answer.events_s[0] for answer in answers)
    end = min(answer.events_s[-1] for answer in answers)
    steps, tokens, held, step_s = 0, 0.0, 0.0, 0.0
    for answer in answers:
        inside = []
        for event, at in enumerate(answer.events_s):
            if start <= at <= end:
                inside.append(event)
        if len(inside) - 1 < MIN_STEPS:
            raise WindowTooShort(
                f"of a load of {load} too few steps were seen with all sequences decoding; use "
                "longer outputs, "
                "fewer requests at once, or shorter prompts"
            )
        first, last = (answer.tokens_up_to(event) for event in (inside[0], inside[-1]))
        steps = steps + len(inside) - 1
        tokens = tokens + last - first
        step_s += _slope([answer.events_s[event] for event in inside]) / len(answers)
        held += load.prompt_len + (first + last) / 2.0
    if not (step_s and tokens):
        raise WindowTooShort(
            f"of a load of {load} all answers came at once, so no step can be timed"
        )
    return Measured(
        load=load,
        step_s=step_s,
        tpot_s=step_s * steps / tokens,
        tokens_per_step=tokens / steps,
        context_len=held / len(answers),
        ttft_s=sum(answer.events_s[0] - answer.sent_s for answer in answers)
        / len(answers),
        num_steps=steps,
    )


def _slope(times_s: list[float]) -> float:
    """Seconds per event: the median over pairs half a window apart, which a reader that lags now
    and then (and finds several events at once) does not move."""
    half = len(times_s) // 2
    return median(
        (times_s[i + half] - times_s[i]) / half for i in range(len(times_s) - half)
    )
