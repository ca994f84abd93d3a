"""Counters between scrapes against the steps and requests behind them; which engines are there."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.errors import ConfigError, ServerError
from magicdec.live import metrics
from magicdec.live.metrics import Scrape, Target, choose_target, targets
from magicdec.live.observation import CounterIncreases, observe, parse_draft

TARGET = Target(series=metrics.VLLM, model="m")


class Server:
    """vLLM's counters, moved step by step; each step serves every running sequence."""

    def __init__(self, gamma: int) -> None:
        self.counted = dict.fromkeys(metrics.VLLM.counters.values(), 0.0)
        self.by_position = [0.0] * gamma
        self.running = 0.0
        self.usage = 0.0

    def add(self, key: str, value: float) -> None:
        self.counted[metrics.VLLM.counters[key]] += value

    def finish(self, prompt: int, output: int, ttft_s: float) -> None:
        """A request that came and went, without the steps between."""
        self.add("output_tokens", 1)
        self.add("ttft_sum", ttft_s)
        self.add("requests", 1)
        self.add("prompt_tokens_sum", prompt)
        self.add("prompt_tokens_count", 1)
        self.add("request_output_sum", output)

    def step(self, accepted: list[int | None], step_s: float) -> None:
        """By sequence: drafts accepted, or None where it had no draft."""
        self.add("iterations", 1)
        for taken in accepted:
            self.add("counted_steps", 1)
            self.add("step_seconds", step_s)
            self.add("output_tokens", 1 + (taken or 0))
            if taken is None:
                continue
            self.add("drafts", 1)
            self.add("draft_tokens", len(self.by_position))
            for position in range(taken):
                self.by_position[position] += 1

    def scrape(self, time_s: float) -> Scrape:
        labels = {"model_name": "m", "engine": "0"}
        samples: dict[str, Any] = {
            name: ((labels, value),) for name, value in self.counted.items()
        }
        # the histogram's count is that of first tokens
        samples[metrics.VLLM.counters["accepted_by_position"]] = tuple(
            (labels | {"position": str(place)}, value)
            for place, value in enumerate(self.by_position)
        )
        samples[metrics.VLLM.gauges["running"]] = ((labels, self.running),)
        samples[metrics.VLLM.gauges["kv_usage"]] = ((labels, self.usage),)
        samples[metrics.CACHE_INFO] = (
            ({"engine": "0", "num_gpu_blocks": "100", "block_size": "16"}, 1.0),
        )
        return Scrape(samples=samples, time_s=time_s, where="here")


steps = st.lists(
    st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=4),
    min_size=1,
    max_size=8,
)
requests = st.lists(
    st.tuples(st.integers(1, 900), st.integers(1, 90), st.floats(0.01, 2.0)), max_size=4
)


@given(windows=st.lists(st.tuples(steps, requests), min_size=1, max_size=3))
def test_an_observation_is_of_the_steps_between_its_scrapes(
    windows: list[tuple[list[list[int | None]], list[tuple[int, int, float]]]],
) -> None:
    server = Server(gamma=3)
    server.step([3, None], 9.0)  # before the window
    server.finish(5, 5, 5.0)
    taken = [server.scrape(10.0)]
    for number, (done, ended) in enumerate(windows):
        for accepted in done:
            server.step(accepted, 0.25)
        for each in ended:
            server.finish(*each)
        server.running = float(number % 3)
        server.usage = 0.5
        taken.append(server.scrape(10.0 + 5.0 * (number + 1)))
    found = observe(taken, TARGET)
    counts = found.counts
    every = [taken for done, _ in windows for accepted in done for taken in accepted]
    ended = [each for _, requests in windows for each in requests]
    drafted = [taken for taken in every if taken is not None]
    assert counts.steps == len(every)
    assert counts.drafts == len(drafted)
    assert counts.accepted == sum(drafted)
    by_position = [sum(taken > place for taken in drafted) for place in range(3)]
    assert list(counts.accepted_by_position) == by_position
    assert counts.tokens_per_step == pytest.approx(1 + sum(drafted) / len(every))
    after_first = len(every) + sum(drafted)
    assert counts.tpot_s == pytest.approx(0.25 * len(every) / after_first)
    assert counts.step_s == pytest.approx(0.25)
    assert found.is_speculative == bool(drafted)
    assert found.drafted_share == pytest.approx(len(drafted) / len(every))
    iterations = sum(len(done) for done, _ in windows)
    assert found.batch_size == pytest.approx((len(every) + len(ended)) / iterations)
    assert found.window_s == pytest.approx(5.0 * len(windows))
    output = after_first + len(ended)
    assert found.tokens_per_s == pytest.approx(output / (5.0 * len(windows)))
    assert found.num_scrapes == len(windows) + 1
    if drafted:
        assert found.gamma == 3
    if ended:
        prompt = sum(each[0] for each in ended) / len(ended)
        out = sum(each[1] for each in ended) / len(ended)
        assert found.context_len == pytest.approx(prompt + out / 2)
    else:
        busy = [number % 3 for number in range(len(windows)) if number % 3]
        held = None
        if busy:
            held = sum(100 * 16 * 0.5 / running for running in busy) / len(busy)
        assert found.context_len == (None if held is None else pytest.approx(held))
    running = [number % 3 for number in range(len(windows)) if number % 3]
    if running:
        assert found.load.running == pytest.approx(sum(running) / len(running))
    else:
        assert found.load.running is None


@given(
    values=st.lists(st.integers(0, 5).map(float), min_size=2, max_size=6),
    starts=st.lists(st.sampled_from([1.0, 2.0]), min_size=6, max_size=6),
)
def test_an_interval_is_broken_where_a_counter_fell_or_the_process_is_another(
    values: list[float], starts: list[float]
) -> None:
    name = metrics.VLLM.counters["output_tokens"]
    taken = [
        Scrape(
            samples={
                name: (({"model_name": "m"}, value),),
                metrics.PROCESS_START: (({}, start),),
            },
            time_s=float(place),
        )
        for place, (value, start) in enumerate(zip(values, starts, strict=False))
    ]
    kept = [
        (two - one, own == other)
        for (one, two), (own, other) in zip(
            pairwise(values), pairwise(starts), strict=False
        )
    ]
    whole = [gained for gained, is_same in kept if gained >= 0 and is_same]
    if not whole:
        with pytest.raises(ConfigError, match="restarted"):
            observe(taken, TARGET)
        return
    found = observe(taken, TARGET)
    assert found.counts.output_tokens == sum(whole)
    assert found.num_restarts == len(kept) - len(whole)
    assert found.window_s == len(whole)


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "ab"]])
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_engine_is_chosen_by_its_model_and_number(
    names: list[str], replicas: int
) -> None:
    rows = tuple(
        ({"model_name": name, "engine": str(number)}, 1.0)
        for name in names
        for number in range(replicas)
    )
    scrape = Scrape(samples={metrics.VLLM.gauges["running"]: rows}, where="here")
    there = [f"{name}/{number}" for name in sorted(names) for number in range(replicas)]
    assert [target.name for target in targets(scrape)] == there
    for name in names:
        for number in range(replicas):
            chosen = choose_target(scrape, f"{name}/{number}")
            assert (chosen.model, chosen.replica) == (name, str(number))
            assert scrape.total(metrics.VLLM.gauges["running"], chosen.labels) == 1.0
        if replicas == 1:
            assert choose_target(scrape, name).model == name
        else:
            with pytest.raises(ConfigError):
                choose_target(scrape, name)
    if len(there) == 1:
        assert choose_target(scrape, None).model == "a"
    else:
        with pytest.raises(ConfigError, match=f"has {len(there)} engines"):
            choose_target(scrape, None)
    with pytest.raises(ServerError, match="no metrics of a known engine"):
        targets(Scrape(samples={"other": rows}, where="here"))


@given(
    one=st.none() | st.integers(0, 9).map(float),
    other=st.none() | st.integers(0, 9).map(float),
    positions=st.tuples(
        st.lists(st.integers(0, 9), max_size=3), st.lists(st.integers(0, 9), max_size=3)
    ),
)
def test_counts_of_two_intervals_add_up_where_both_have_them(
    one: float | None, other: float | None, positions: tuple[list[int], list[int]]
) -> None:
    first = CounterIncreases(
        drafts=one, accepted_by_position=tuple(map(float, positions[0]))
    )
    second = CounterIncreases(
        drafts=other, accepted_by_position=tuple(map(float, positions[1]))
    )
    both = first + second
    assert both.drafts == (None if None in (one, other) else one + other)  # type: ignore[operator]
    most = max(map(len, positions))
    padded = [[*each, *[0] * (most - len(each))] for each in positions]
    assert both.accepted_by_position == tuple(map(sum, zip(*padded, strict=True)))


@pytest.mark.parametrize(
    ("budget", "is_taken"), [(0, False), (1, True), (10**9, True), (10**9 + 1, False)]
)
def test_the_bounds_of_a_budget(budget: int, is_taken: bool) -> None:
    if is_taken:
        assert parse_draft("self", method="snapkv", budget=budget).budget == budget
        return
    with pytest.raises(ConfigError, match="between 1 and"):
        parse_draft("self", method="snapkv", budget=budget)
