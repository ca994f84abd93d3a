"""The scheduler against one written out step by step: no passes together, no tables of blocks.

Every draft is accepted, so what a step emits is known and times must be equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.perfmodel.acceptance import constant_profile
from magicdec.perfmodel.rate.requests import Requests, drawn
from magicdec.perfmodel.rate.simulate import Server, simulate
from magicdec.perfmodel.setup import Setup
from magicdec.schema.gamma_table import TableGamma
from magicdec.specs.engine import load_engine
from magicdec.specs.speculation import SpeculationSpec
from magicdec.specs.workload import RequestShape, WorkloadSpec

ENGINE = load_engine("vllm")
EAGLE = SpeculationSpec(draft="eagle3", draft_method="eagle3", gamma=3)
TABLE = TableGamma(
    batch_sizes=(1, 4, 16), context_lens=(8, 10), gammas=((5, 3), (3, 0), (1, 2))
)
"""Its contexts are below all that are drawn: the simulation chooses gamma on a grid of contexts 1 %
apart, so between two columns it may change a token earlier or later."""


@dataclass
class Sequence:
    """A request on its way."""

    number: int
    seen_s: float
    prompt: int
    cached: int
    output: int
    emitted: int = 0
    done: int | None = None
    """Tokens of the prompt that are computed; None: not begun, or preempted."""
    group: int = 0
    lag_s: float = 0.0
    kept: int = 0
    """Tokens that it had emitted when it last began."""

    @property
    def known(self) -> int:
        return self.prompt + self.kept

    @property
    def context(self) -> int:
        return self.prompt + self.emitted


@dataclass
class Scheduler:
    """One replica, a pass at a time."""

    server: Server
    coming: list[Sequence]
    queue: list[Sequence] = field(default_factory=list)
    prompts: list[Sequence] = field(default_factory=list)
    decoding: list[Sequence] = field(default_factory=list)
    now: float = 0.0
    began: float = 0.0
    preemptions: int = 0
    first: dict[int, float] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)

    def run(self) -> None:
        while self.coming or self.queue or self.prompts or self.decoding:
            is_busy = bool(self.queue or self.prompts or self.decoding)
            seen = (
                self.began
                if is_busy and self.server.limits.schedules_ahead
                else self.now
            )
            arrived = [each for each in self.coming if each.seen_s <= seen]
            self.coming = [each for each in self.coming if each.seen_s > seen]
            self.queue += arrived
            if not is_busy and not self.queue:
                self.now = self.coming[0].seen_s
                continue
            self.step()

    def blocks(self, tokens: int) -> int:
        size = self.server.limits.block_size
        return tokens // size + (tokens % size > 0)

    def to_enter(self, one: Sequence) -> int:
        whole = one.prompt + one.output
        return self.blocks(whole if self.server.limits.reserves_output else one.known)

    def step(self) -> None:
        gamma = 0
        if self.decoding and self.server.policy is not None:
            mean = sum(each.context for each in self.decoding) / len(self.decoding)
            gamma = self.server.policy.choose(
                batch_size=len(self.decoding), context_len=mean
            )
        free = self.free(gamma)
        while free < 0:
            self.preemptions += 1
            loser = (self.prompts or self.decoding).pop()
            if loser.done is None:
                loser.kept = loser.emitted
            loser.done = None
            self.queue.insert(0, loser)
            free = self.free(gamma)
        chunks = self.chunks(gamma, free)
        began = self.now
        if chunks:
            self.with_prompts(chunks, gamma)
        else:
            count = len(self.decoding)
            mean = sum(each.context for each in self.decoding) / count
            self.now += self.server.costs.step_s(gamma, count, mean)
            self.emit(gamma)
        self.began = began

    def free(self, gamma: int) -> int:
        held = sum(self.blocks(each.context + gamma + 1) for each in self.decoding)
        held += sum(self.to_enter(each) for each in self.prompts)
        return self.server.limits.num_blocks - held

    def chunks(self, gamma: int, free: int) -> list[tuple[Sequence, int, int, bool]]:
        """Who computes which tokens of its prompt, and whether it enters."""
        limits = self.server.limits
        costs = self.server.costs
        busy = 0
        if costs.mixes:
            busy = int(np.ceil(len(self.decoding) / costs.groups)) * (gamma + 1)
        room = [limits.max_tokens - busy for _ in range(costs.groups)]
        found = []
        for one in self.prompts:
            assert one.done is not None
            end = min(one.known, one.done + room[one.group])
            if end > one.done:
                room[one.group] -= end - one.done
                found.append((one, one.done, end, False))
        entered = len(self.decoding) + len(self.prompts)
        for one in self.queue:
            need = self.to_enter(one)
            if entered == limits.max_sequences or max(room) <= 0 or need > free:
                break
            entered += 1
            free -= need
            one.group = int(np.argmax(room))
            start = min(one.cached, one.known - 1)
            end = min(one.known, start + room[one.group]) if costs.mixes else one.known
            room[one.group] -= end - start
            found.append((one, start, end, True))
        return found

    def with_prompts(
        self, chunks: list[tuple[Sequence, int, int, bool]], gamma: int
    ) -> None:
        costs = self.server.costs
        count = len(self.decoding)
        goes_on = costs.mixes and count > 0
        if goes_on:
            mean = sum(each.context for each in self.decoding) / count
            self.now += costs.step_s(gamma, count, mean)
        elif costs.mixes:
            self.now += costs.step_s(0, 1, float(chunks[0][2]))
        tokens = int(np.ceil(count / costs.groups)) * (gamma + 1) if goes_on else 1
        own = []
        for group in range(costs.groups):
            here = [chunk for chunk in chunks if chunk[0].group == group]
            starts = [start for _, start, _, _ in here]
            ends = [end for _, _, end, _ in here]
            entering = sum(enters for *_, enters in here)
            own.append(costs.chunks_s(tokens, starts, ends, entering) if here else 0.0)
        stages = np.reshape(own, (costs.stages, -1))
        self.now += float(stages.max(axis=1).sum()) / costs.stages
        if goes_on:
            self.emit(gamma)
        going = {one.number for one, *_ in chunks}
        self.queue = [each for each in self.queue if each.number not in going]
        self.prompts = [each for each in self.prompts if each.number not in going]
        for one, _, end, _ in chunks:
            if end < one.known:
                one.done = end
                self.prompts.append(one)
                continue
            one.done = None
            one.lag_s = own[one.group] * (1.0 - 1.0 / costs.stages)
            self.first.setdefault(one.number, self.now + one.lag_s)
            one.emitted += 1
            self.decoding.append(one)
            if one.emitted >= one.output:
                self.end(one)

    def emit(self, gamma: int) -> None:
        for one in list(self.decoding):
            one.emitted += gamma + 1
            if one.emitted >= one.output:
                self.end(one)

    def end(self, one: Sequence) -> None:
        self.decoding = [each for each in self.decoding if each is not one]
        self.last[one.number] = self.now + one.lag_s


def in_turns(server: Server, requests: Requests, replicas: int) -> list[Scheduler]:
    requests = server.finding(requests)  # of whole blocks
    schedulers = []
    for place in range(replicas):
        mine = []
        for number in range(place, len(requests), replicas):
            prompt = int(requests.prompt_len[number])
            way_s = server.limits.latency_s + server.limits.token_latency_s * prompt
            one = Sequence(
                number=number,
                seen_s=float(requests.arrival_s[number]) + way_s,
                prompt=prompt,
                cached=int(requests.cached_len[number]),
                output=int(requests.output_len[number]),
            )
            mine.append(one)
        mine.sort(key=lambda each: (each.seen_s, each.number))
        scheduler = Scheduler(server=server, coming=mine)
        scheduler.run()
        schedulers.append(scheduler)
    return schedulers


@st.composite
def loads(draw: st.DrawFn, stages: int, groups: int) -> tuple[Server, Requests]:
    shapes = draw(
        st.lists(
            st.tuples(st.integers(20, 700), st.integers(1, 80)), min_size=1, max_size=3
        )
    )
    requests = drawn(
        draw(st.integers(2, 50)),
        rate=draw(st.sampled_from([5.0, 40.0, 400.0])),
        workload=WorkloadSpec(
            requests=tuple(RequestShape(prompt_len=a, gen_len=b) for a, b in shapes)
        ),
        burstiness=draw(st.sampled_from([0.0, 1.0, 9.0])),
        cached_len=draw(st.sampled_from([0, 40])),
        seed=draw(st.integers(0, 99)),
    )
    is_drafted = draw(st.booleans())
    engine = ENGINE.with_constants({"scheduler.mixes_prefill": draw(st.booleans())})
    setup = Setup.of(
        "llama-3.1-8b", "h100-sxm-80gb", engine, *([EAGLE] if is_drafted else [])
    )
    server = Server.of(
        setup,
        requests,
        acceptance=constant_profile(1.0) if is_drafted else None,
        policy=TABLE if is_drafted else None,
        max_sequences=draw(st.sampled_from([1, 3, 20])),
        max_tokens=draw(st.sampled_from([64, 130, 512])),
    )
    overheads = draw(st.sampled_from([(0.0, 0.0), (0.001, 0.002)]))
    costs = replace(
        server.costs,
        stages=stages,
        groups=groups,
        pass_overhead_s=overheads[0],
        request_overhead_s=overheads[1],
    )
    longest = int((requests.prompt_len + requests.output_len).max()) + 7
    limits = replace(
        server.limits,
        num_blocks=-(-longest // 16) + draw(st.sampled_from([0, 3, 20, 4000])),
        reserves_output=draw(st.booleans()),
        schedules_ahead=draw(st.booleans()),
        latency_s=draw(st.sampled_from([0.0, 0.01])),
        token_latency_s=draw(st.sampled_from([0.0, 1e-4])),
    )
    return replace(server, costs=costs, limits=limits), requests


@pytest.mark.parametrize(("stages", "groups"), [(1, 1), (1, 2), (2, 2), (2, 4)])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data(), replicas=st.integers(1, 3))
def test_the_scheduler_is_the_one_written_out_step_by_step(
    stages: int, groups: int, data: st.DataObject, replicas: int
) -> None:
    server, requests = data.draw(loads(stages, groups))
    outcome = simulate(server, requests, replicas=replicas)
    schedulers = in_turns(server, requests, replicas)
    for scheduler, replica in zip(schedulers, outcome.replicas, strict=True):
        for number, first in scheduler.first.items():
            assert replica.first_s[number] == pytest.approx(first, rel=1e-9)
            assert replica.last_s[number] == pytest.approx(
                scheduler.last[number], rel=1e-9
            )
        assert replica.preemptions == scheduler.preemptions
    assert sum(len(each.last) for each in schedulers) == len(requests)
