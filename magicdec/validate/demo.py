"""The whole path on one machine: calibrate, plan, run, validate; what `magicdec demo` then reports.

The demo asks the planner for the embedded model's best configuration at two workloads, one where
the KV cache dominates and one where it does not, measures the choice with other gammas and budgets,
for a curve, and checks that greedy speculative output equals the autoregressive one. A first
divergence is excused only at a near tie: recomputed in float64, the target's two best logits are
less than NEAR_TIE apart, so rounding alone decides between them. Both counts are reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, cast

import torch

from magicdec.calibrate.acceptance_bench import AcceptanceRequest
from magicdec.calibrate.local_profile import load_local_profile
from magicdec.calibrate.machine import obtain_profile
from magicdec.calibrate.unfinished import unfinished_path
from magicdec.measure.configuration import BenchmarkRequest
from magicdec.measure.environment import ReferenceKernels
from magicdec.measure.rank import benchmark
from magicdec.measure.session import BenchmarkSession
from magicdec.naming import describe
from magicdec.progress import Done, Progress, Stages
from magicdec.runtime.engine import Engine
from magicdec.runtime.weights import load_model
from magicdec.schema.comparison import Comparison, pair_records
from magicdec.schema.plan import Plan
from magicdec.schema.record import Record
from magicdec.specs.known_heads import head_beside, named_head
from magicdec.specs.speculation import AUTOREGRESSIVE, SamplingSpec, SpeculationSpec
from magicdec.units import format_seconds
from magicdec.validate.grid import freeze_predictions, plan_local

NEAR_TIE = 1e-5
DEMO_STAGE_SHARES = (290.0, 15.0, 50.0, 210.0, 14.0)
"""About how the time goes, for the display alone: the calibration, the three workloads, and the greedy
check."""
BUDGETS = (64, 256, 512)
OTHERS_GAMMA = 3
"""Drafted tokens of the drafts that are measured beside the plan's."""
MAIN = BenchmarkRequest(model="embedded", batch_size=32, context_len=4096, gen_len=32)
SMALL = BenchmarkRequest(model="embedded", batch_size=1, context_len=512, gen_len=64)
MIDDLE = BenchmarkRequest(model="embedded", batch_size=8, context_len=2048, gen_len=32)
GREEDY = BenchmarkRequest(
    model="embedded",
    batch_size=8,
    context_len=2048,
    context_spread=0.3,
    gen_len=96,
    sampling=SamplingSpec(),
    stop_at_eos=True,
    speculations=(
        SpeculationSpec(
            draft="self", draft_method="streamingllm", draft_budget=64, gamma=5
        ),
        SpeculationSpec(
            draft="self", draft_method="streamingllm", draft_budget=256, gamma=2
        ),
    ),
)


class DemoResult(NamedTuple):
    """The demo's findings. `chosen` is the measured row of the plan's best configuration at the
    main workload.
    """

    plan: Plan
    small_plan: Plan
    predicted: list[Record]
    measured: list[Record]
    comparison: Comparison
    greedy: list[GreedyCheck]

    @property
    def chosen(self) -> Record:
        names = ("batch_size", "draft_budget", "gamma")
        wanted = [getattr(self.plan.best, name) for name in names]
        return next(
            row
            for row in self.measured
            if [getattr(row, name) for name in names] == wanted
        )


def run_demo(directory: Path, *, progress: Progress, quick: bool = False) -> DemoResult:
    """Runs everything and leaves profile, plan and records in `directory`, each as soon as it is
    there. What an interrupted demo left there is not measured again.
    """
    records = directory / "records.jsonl"
    local = directory / "local.toml"
    stages = Stages(progress, DEMO_STAGE_SHARES)
    ended = _stage_clock(progress)
    others = other_drafts(MAIN.model)
    acceptance = AcceptanceRequest(
        model=MAIN.model,
        draft_budgets=BUDGETS,
        num_prompts=12,
        gen_len=96,
        beside=others,
    )
    if quick:
        acceptance = replace(acceptance, num_prompts=8, gen_len=48)
    if not local.exists():
        # every other shape, in three rounds: the loads are measured with more
        profile = obtain_profile(
            MAIN.model,
            request=acceptance,
            quick=True,
            head=head_beside(MAIN.model),
            keep=unfinished_path(local),
            progress=stages.stage(0),
        )
        profile.save(local)
        unfinished_path(local).unlink()
    profile = load_local_profile(local)
    ended(f"calibrated this machine: {local}")
    stages.stage(1)("planning")
    plan = plan_local(MAIN, profile, draft_budgets=BUDGETS)
    budgets = tuple(budget for budget in BUDGETS if budget < SMALL.context_len)
    small_plan = plan_local(SMALL, profile, draft_budgets=budgets)
    requests = [
        replace(SMALL, speculations=around(plan, gammas=(2,))),
        replace(MIDDLE, speculations=(*around(plan, gammas=(2, 4)), *others)),
        replace(
            MAIN,
            speculations=(*around(plan, gammas=(1, 5), other_budgets=True), *others),
        ),
    ]
    if quick:
        requests = []
        speculations = (*around(plan, gammas=(2,)), *others)
        for request in (SMALL, MAIN):
            requests.append(replace(request, speculations=speculations, gen_len=32))
    predicted = freeze_predictions(requests, profile, records)
    references = ReferenceKernels()
    measured: list[Record] = []
    for number, request in enumerate(requests, 1):
        rows = benchmark(
            request,
            records=records,
            resume=True,
            references=references,
            progress=stages.stage(number),
        )
        measured += rows
        best = max(
            (row for row in rows if row.is_speculative),
            key=lambda row: row.speedup or 0.0,
        )
        ended(
            f"measured {len(rows)} configurations at batch {request.batch_size}, context "
            f"{request.context_len}: "
            f"{describe(best)} {best.speedup:.2f}x"
        )
    workload = replace(GREEDY, speculations=(*GREEDY.speculations, *others))
    if quick:
        workload = replace(workload, gen_len=24)
    greedy = check_greedy(workload, progress=stages.stage(4))
    ended(
        f"compared greedy outputs: {sum(check.num_divergences for check in greedy)} divergences"
    )
    comparison = Comparison(pairs=pair_records([*predicted, *measured]))
    return DemoResult(plan, small_plan, predicted, measured, comparison, greedy)


def _stage_clock(progress: Progress) -> Callable[[str], None]:
    """Shows a line for a stage that has ended, with the seconds since the one before."""
    started = time.monotonic()

    def ended(what: str) -> None:
        nonlocal started
        now = time.monotonic()
        progress(Done(f"{what} ({format_seconds(now - started)})"))
        started = now

    return ended


def other_drafts(model: str) -> tuple[SpeculationSpec, ...]:
    """N-gram look-up, and the trained head that ships with the model."""
    head = named_head(model, "eagle3", None)
    assert head is not None
    lookup = SpeculationSpec(draft="ngram", draft_method="ngram", gamma=OTHERS_GAMMA)
    return lookup, head.speculation(gamma=OTHERS_GAMMA)


def around(
    plan: Plan, *, gammas: tuple[int, ...], other_budgets: bool = False
) -> tuple[SpeculationSpec, ...]:
    """The plan's best configuration, other gammas at its budget, and, if asked, its gamma at other
    budgets. If speculation does not pay, the best drafted configuration takes its place."""
    if plan.best.gamma:
        best = plan.best
    else:
        best = plan.candidates[0]
    budget = cast(int, best.draft_budget)
    gamma = best.gamma
    method = best.draft_method
    pairs = {(budget, gamma)}
    for other in gammas:
        pairs.add((budget, other))
    if other_budgets:
        for other in BUDGETS:
            pairs.add((other, gamma))
    speculations = []
    for draft_budget, num_drafted in sorted(pairs):
        speculations.append(
            SpeculationSpec(
                draft="self",
                draft_method=method,
                draft_budget=draft_budget,
                gamma=num_drafted,
            )
        )
    return tuple(speculations)


@dataclass(frozen=True, kw_only=True)
class GreedyCheck:
    """Greedy output of one configuration, compared with that of autoregressive decoding."""

    speculation: SpeculationSpec
    num_sequences: int
    num_tokens: int
    num_divergences: int
    """Sequences that differ, other than by near ties."""
    num_near_ties: int

    def __str__(self) -> str:
        return (
            f"{describe(self.speculation)}: {self.num_sequences} sequences, {self.num_tokens} "
            "tokens, "
            f"{self.num_divergences} divergences, {self.num_near_ties} near ties"
        )


def check_greedy(
    request: BenchmarkRequest, *, progress: Progress = lambda _: None
) -> list[GreedyCheck]:
    """Decodes every configuration of a greedy request to its end, and compares with autoregressive
    decoding.
    """
    assert request.sampling.is_greedy
    session = BenchmarkSession(request, progress=progress)
    progress("greedy: autoregressive")
    expected = session.run(AUTOREGRESSIVE, run_to_end=True).tokens
    checks = []
    for speculation in request.speculations:
        progress(f"greedy: {describe(speculation)}")
        tokens = session.run(speculation, run_to_end=True).tokens
        gaps = []
        for prompt, wanted, decoded in zip(
            session.prompts, expected, tokens, strict=False
        ):
            position = first_divergence(wanted, decoded)
            if position is not None:
                gaps.append(top_two_gap(request, prompt, wanted[:position]))
        checks.append(
            GreedyCheck(
                speculation=speculation,
                num_sequences=len(tokens),
                num_tokens=sum(map(len, tokens)),
                num_divergences=sum(gap >= NEAR_TIE for gap in gaps),
                num_near_ties=sum(gap < NEAR_TIE for gap in gaps),
            )
        )
    return checks


def first_divergence(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    """The first position at which two outputs differ, in length too. None: they are equal."""
    for position, (wanted, decoded) in enumerate(zip_longest(expected, actual)):
        if wanted != decoded:
            return position
    return None


def top_two_gap(
    request: BenchmarkRequest, prompt: Sequence[int], generated: Sequence[int]
) -> float:
    """Difference between the target's two best next-token logits after the tokens, in float64."""
    model = load_model(
        request.model,
        weights=request.weights,
        device=request.device,
        dtype="float64",
    )
    tokens = [*prompt, *generated]
    engine = Engine(model, batch_size=1, max_len=len(tokens) + 1)
    engine.prefill([tokens])
    with torch.inference_mode():
        logits = engine.forward(engine.pending_B[:, None])[0, -1]
    best = logits.topk(2).values
    return float(best[0] - best[1])
