"""Tries the gammas that matter on the server itself, under its own load, and says how good the
advice was.

Predictions come first; tried are the best of them, the gamma in use, and others whose interval
reaches the best's, at most `MAX_GAMMAS`. The user's command restarts the server with each, and
their measured times per token are compared. They are tried in turns, there and back, so that a
machine or a load that drifts favours none, and what a gamma differs by from its own repetition says
how much a difference between two means. It ends by a time that is stated before.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from magicdec.errors import ConfigError, ServerError
from magicdec.live.advice import Advice
from magicdec.live.http import Address
from magicdec.live.metrics import PROCESS_START, choose_target, read_address, scrapes
from magicdec.live.observation import Observation, observe
from magicdec.units import format_seconds

MAX_GAMMAS = 3
"""Gammas tried: each is a restart, which interrupts the server's users."""
PLACE = "{gamma}"
START_TIMEOUT_S = 900.0
"""A large model's weights are read, its kernels compiled and its graphs captured at each start."""
METRICS_POLL_S = 2.0


@dataclass(frozen=True, kw_only=True)
class GammaTrial:
    """One gamma tried on the server, and what was measured."""

    gamma: int
    tpot_s: float
    tokens_per_step: float
    batch_size: float


def candidates(advice: Advice) -> tuple[int, ...]:
    """The gammas to try, best by prediction first; at least two. Neighbours of those tried would
    tell little.
    """
    ranked = sorted(advice.choices, key=lambda choice: -choice.gain)
    wanted = list(dict.fromkeys([advice.best.gamma, advice.situation.gamma]))
    close = []
    for choice in ranked:
        if choice.gain_high >= advice.best.gain_low:
            close.append(choice.gamma)
    for gamma in [*close, *(choice.gamma for choice in ranked)]:
        if all(abs(gamma - other) > 1 for other in wanted):
            wanted.append(gamma)
    return tuple(wanted)[:MAX_GAMMAS]


def check_restart(command: str) -> None:
    """Raises ConfigError for a restart command that does not say where gamma goes."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--restart '{command}' is no command: {error}") from None
    if PLACE not in command or not words:
        raise ConfigError(
            f"--restart is the command that restarts the server, with {PLACE} where its gamma goes"
        )


def try_gamma(
    address: Address,
    command: str,
    gamma: int,
    *,
    seconds: float,
    interval_s: float,
    target: str | None = None,
    limit_s: float = START_TIMEOUT_S,
    sleep: Callable[[float], None] = time.sleep,
) -> GammaTrial:
    """Restarts the server with one gamma, waits for it to answer and to have load, and observes it.
    The restart and the wait for an answer together may take what `limit_s` leaves to a wait for
    load and a look of `seconds` each.

    Raises ConfigError where the command fails, or starts a server with another gamma; ServerError
    where the server does not come back, or has no load.
    """
    deadline = time.monotonic() + max(limit_s - 2.0 * seconds, METRICS_POLL_S)
    started = read_address(address).total(PROCESS_START, {})
    restart(command, gamma, limit_s=deadline - time.monotonic())
    _await_server(
        address, other_than=started, limit_s=deadline - time.monotonic(), sleep=sleep
    )
    _await_load(address, target, at_most=seconds, sleep=sleep)
    taken = list(scrapes(address, seconds=seconds, interval_s=interval_s, sleep=sleep))
    return trial_of(observe(taken, choose_target(taken[-1], target)), gamma)


def restart(command: str, gamma: int, *, limit_s: float = START_TIMEOUT_S) -> None:
    """Runs the command. Raises ConfigError where it fails."""
    words = [word.replace(PLACE, str(gamma)) for word in shlex.split(command)]
    try:
        done = subprocess.run(
            words, check=False, timeout=limit_s, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"the restart command failed: {error}") from None
    if done.returncode:
        raise ConfigError(
            f"the restart command ended with status {done.returncode}; the server is as it left it"
        )


def _await_server(
    address: Address,
    *,
    other_than: float | None,
    limit_s: float,
    sleep: Callable[[float], None],
) -> None:
    """Waits until a process answers that was not there before the restart, if the server reports
    when it started.
    """
    waited = 0.0
    while True:
        begun = time.monotonic()
        try:
            started = read_address(address).total(PROCESS_START, {})
            if other_than is None or started != other_than:
                return
            error = ServerError(
                f"{address} answers from the process that was there before the restart command"
            )
        except ServerError as unreachable:
            error = unreachable
        if waited >= limit_s:
            raise error
        waited += METRICS_POLL_S + time.monotonic() - begun
        sleep(METRICS_POLL_S)


def _await_load(
    address: Address,
    target: str | None,
    *,
    at_most: float,
    sleep: Callable[[float], None],
) -> None:
    """Waits until something runs: a window of an idle server says nothing."""
    waited = 0.0
    while waited < at_most:
        scrape = read_address(address)
        chosen = choose_target(scrape, target)
        if scrape.total(chosen.series.gauges["running"], chosen.labels):
            return
        sleep(min(METRICS_POLL_S, at_most))
        waited += METRICS_POLL_S


def trial_of(observation: Observation, gamma: int) -> GammaTrial:
    """Raises ConfigError if the server ignores the gamma it was restarted with, ServerError if it
    had no load.
    """
    counts, batch = observation.counts, observation.batch_size
    if not counts.tpot_s or not batch:
        raise ServerError(
            f"with gamma {gamma} the server had no load to observe: tuning needs its usual requests"
        )
    if gamma == 0 and observation.is_speculative:
        raise ConfigError(
            f"restarted with gamma 0 the server drafts {observation.gamma} tokens: what does "
            "--restart do with 0?"
        )
    if observation.is_speculative and 0 < len(counts.accepted_by_position) < gamma:
        drafted = len(counts.accepted_by_position)
        raise ConfigError(
            f"restarted with gamma {gamma} the server drafts {drafted} tokens: does --restart pass "
            f"{PLACE} on?"
        )
    return GammaTrial(
        gamma=gamma,
        tpot_s=counts.tpot_s,
        tokens_per_step=counts.tokens_per_step or 1.0,
        batch_size=batch,
    )


def in_turns(gammas: Sequence[int], repeats: int) -> list[int]:
    """There and back: 5 2 0, 0 2 5, 5 2 0."""
    turns: list[int] = []
    for number in range(repeats):
        if number % 2 == 0:
            turns.extend(gammas)
        else:
            turns.extend(gammas[::-1])
    return turns


def try_in_turns(
    order: Sequence[int],
    try_one: Callable[[int, float], GammaTrial],
    *,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[GammaTrial]:
    """Each trial as it is done, `try_one` given its gamma and the time that is left. The next one
    begins only where the longest so far would end within the limit."""
    begun = clock()
    longest = 0.0
    for gamma in order:
        left = limit_s - (clock() - begun)
        if left <= longest:
            return
        before = clock()
        yield try_one(gamma, left)
        longest = max(longest, clock() - before)


@dataclass(frozen=True, kw_only=True)
class GammaTimes:
    """One gamma's trials together: the median of their times, and the range."""

    gamma: int
    tpot_s: float
    low_s: float
    high_s: float
    spread: float
    """Half the range over the median; 0 where it was tried once."""


def outcomes(trials: Sequence[GammaTrial]) -> list[GammaTimes]:
    """One for each gamma that was tried, in the order in which they came."""
    results = []
    for gamma in dict.fromkeys(trial.gamma for trial in trials):
        times = []
        for trial in trials:
            if trial.gamma == gamma:
                times.append(trial.tpot_s)
        low = min(times)
        middle = median(times)
        high = max(times)
        spread = (high - low) / 2.0 / middle
        results.append(
            GammaTimes(
                gamma=gamma, tpot_s=middle, low_s=low, high_s=high, spread=spread
            )
        )
    return results


def regret(results: Sequence[GammaTimes]) -> float:
    """How much slower the first gamma, the advised one, was than the best."""
    return results[0].tpot_s / min(result.tpot_s for result in results) - 1.0


def outcome_lines(trials: Sequence[GammaTrial], order: Sequence[int]) -> list[str]:
    """Each gamma's times, the best of them, what the advised one loses, and how sure that is."""
    results = outcomes(trials)
    lines = []
    if len(trials) != len(order):
        lines.append(f"it ended after {len(trials)} of {len(order)} trials")
    for result in results:
        low = format_seconds(result.low_s)
        high = format_seconds(result.high_s)
        time = format_seconds(result.tpot_s)
        lines.append(f"gamma {result.gamma}: {time} per token ({low} to {high})")
    best = min(results, key=lambda result: result.tpot_s)
    spread = max(result.spread for result in results)
    lost = regret(results)
    doubt = ""
    if 0 < lost < spread:
        doubt = ": that decides nothing"
    lines.append(
        f"best of these: gamma {best.gamma}; the advised gamma {results[0].gamma} loses {lost:.1%} "
        "against it; "
        f"repetitions differ by ± {spread:.1%}" + doubt
    )
    last = trials[-1].gamma
    restart = ""
    if best.gamma != last:
        restart = f"; restart it with {best.gamma}"
    return [
        *lines,
        f"the server runs with gamma {last} now" + restart,
    ]
