"""The configurations that benchmarks/gpu.py measures."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from magicdec.measure.configuration import NOISE, BenchmarkRequest
from magicdec.naming import describe
from magicdec.perfmodel.acceptance import (
    AcceptanceProfile,
    constant_profile,
    default_profile,
)
from magicdec.perfmodel.acceptance.law import LawError
from magicdec.specs.device import bytes_per_element
from magicdec.specs.model import ModelSpec
from magicdec.specs.precision import PROFILE_DTYPES
from magicdec.specs.speculation import (
    MAX_GAMMA,
    DraftMethod,
    SamplingSpec,
    SpeculationSpec,
)
from magicdec.validate.grid import GridSpec

PUBLISHED_PROFILE_OF = "llama-3.1-8b"
"""No acceptance of a self-draft is published by position for Llama-2-7B-32K: this model's stands in."""
STREAMING_RATE, SNAPKV_RATE = 0.81, 0.91
"""Stated acceptance of the two rows of the table that ask for a speedup: the same at every position."""
HEADLINE_GAMMAS = (2, 3, 4)
MEMORY_SHARE = 0.85
"""Of the free memory: the rest is for logits, sampling and captured graphs."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Batches and contexts, and how long to measure. A batch that does not fit is made smaller."""

    cases: tuple[tuple[int, int], ...]
    points: tuple[tuple[int, tuple[int, ...]], ...]
    """Draft budgets, and the gammas measured with each, of every case."""
    attention_case: tuple[int, int]
    headline: tuple[tuple[DraftMethod, float, int], ...]
    """Method, stated acceptance and context of the headline rows, each at the largest batch that fits."""
    headline_budget: int
    headline_repetitions: int
    max_batch: int
    peer_case: tuple[int, int]
    """The batch and context at which transformers is run."""
    gen_len: int
    repetitions: int
    rounds: int
    quick: bool
    seconds_per_work: float
    """What one run of one configuration is expected to take at first, setting up included."""
    embedded_grid: GridSpec
    embedded_acceptance: dict[str, Any] = field(default_factory=dict)


FULL = Shapes(
    cases=((32, 16_384), (64, 8192), (8, 65_536), (4, 16_384)),
    points=((256, (1, 4)), (512, (2, 3, 6)), (1024, (3,)), (2048, (2, 5))),
    attention_case=(32, 16_384),
    headline=(
        ("streamingllm", STREAMING_RATE, 16_384),
        ("streamingllm", STREAMING_RATE, 32_000),
        ("snapkv", SNAPKV_RATE, 32_000),
    ),
    headline_budget=512,
    headline_repetitions=2,
    max_batch=64,
    peer_case=(8, 8192),
    gen_len=48,
    repetitions=3,
    rounds=2,
    quick=True,
    seconds_per_work=2.5,
    embedded_grid=GridSpec(
        draft_methods=("streamingllm", "snapkv"),
        draft_budgets=(64, 256),
        gammas=(1, 3, 5),
        cases=((8, 2048), (128, 2048), (256, 3584)),
        gen_len=96,
        repetitions=4,
    ),
)
TINY = Shapes(
    cases=((3, 200),),
    points=((24, (1, 3)), (48, (2, 4))),
    attention_case=(4, 256),
    headline=(
        ("streamingllm", STREAMING_RATE, 200),
        ("streamingllm", STREAMING_RATE, 400),
        ("snapkv", SNAPKV_RATE, 300),
    ),
    headline_budget=32,
    headline_repetitions=1,
    max_batch=6,
    peer_case=(2, 200),
    gen_len=16,
    repetitions=2,
    rounds=2,
    quick=True,
    seconds_per_work=0.1,
    embedded_grid=GridSpec(draft_budgets=(64,), gammas=(1, 3), cases=((2, 256),), gen_len=12, repetitions=2),
    embedded_acceptance={
        "context_lens": (300,), "draft_budgets": (48, 96), "num_prompts": 4, "gen_len": 16, "gamma": 4,
    },
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Item:
    """What is measured in one engine, and the acceptance that it is predicted with."""

    what: str
    request: BenchmarkRequest
    acceptance: AcceptanceProfile

    @property
    def work(self) -> float:
        """Runs of configurations."""
        return float(
            (1 + len(self.request.speculations)) * (self.request.repetitions + 1)
        )


@dataclass(frozen=True, kw_only=True)
class Maker:
    """What the items of one model have in common."""

    shapes: Shapes
    model_argument: str
    spec: ModelSpec
    device: str
    dtype: str
    free_bytes: float
    cuda_graphs: bool

    def batch_that_fits(self, wanted: int, context: int, budget: int) -> int:
        slots = context + self.shapes.gen_len + budget + 2 * (MAX_GAMMA + 2)
        per_sequence = (
            self.spec.kv_elements_per_token()
            * bytes_per_element(PROFILE_DTYPES[self.dtype])
            * slots
        )
        return min(wanted, int(MEMORY_SHARE * self.free_bytes / per_sequence))

    def fits(self, context: int) -> bool:
        return (
            context + self.shapes.gen_len + MAX_GAMMA
            <= self.spec.max_position_embeddings
        )

    def item(
        self,
        batch: int,
        context: int,
        speculations: tuple[SpeculationSpec, ...],
        acceptance: AcceptanceProfile,
    ) -> Item:
        deepest = max(s.gamma for s in speculations)
        rates = acceptance.conditional_rates(
            budget=speculations[0].draft_budget, context=context, gamma_max=deepest
        )
        request = BenchmarkRequest(
            model=self.model_argument,
            weights="random",
            prompts=NOISE,
            dtype=self.dtype,
            device=self.device,
            batch_size=batch,
            context_len=context,
            gen_len=self.shapes.gen_len,
            speculations=speculations,
            sampling=SamplingSpec(temperature=1.0),
            repetitions=self.shapes.repetitions,
            simulate_acceptance=tuple(float(rate) for rate in rates),
            cuda_graphs=self.cuda_graphs,
        )
        return Item(
            what="; ".join(map(describe, speculations)),
            request=request,
            acceptance=acceptance,
        )


def headline_items(maker: Maker) -> list[Item]:
    """Autoregressive decoding and the gammas of the headline, at the largest batches that fit."""
    shapes = maker.shapes
    items = []
    for method, rate, context in shapes.headline:
        batch = maker.batch_that_fits(shapes.max_batch, context, shapes.headline_budget)
        if not maker.fits(context) or batch < 1:
            continue
        acceptance = constant_profile(
            rate, model=maker.spec.name, draft_method=method, source="stated"
        )
        speculations = tuple(
            _self_draft(method, shapes.headline_budget, gamma)
            for gamma in HEADLINE_GAMMAS
        )
        item = maker.item(batch, context, speculations, acceptance)
        request = replace(item.request, repetitions=shapes.headline_repetitions)
        items.append(replace(item, request=request))
    return items


def grid_items(maker: Maker) -> list[Item]:
    """Budgets and gammas at several batches and contexts, with published acceptance."""
    published = default_profile(PUBLISHED_PROFILE_OF, "streamingllm")
    assert published is not None
    # The runs follow the law's middle exactly, however deep.
    prescribed = msgspec.structs.replace(
        published, error=LawError(), measured_gamma=MAX_GAMMA
    )
    points = maker.shapes.points
    items = []
    for wanted, context in maker.shapes.cases:
        batch = maker.batch_that_fits(
            wanted, context, max(budget for budget, _ in points)
        )
        if not maker.fits(context) or batch < 1:
            continue
        for budget, gammas in points:
            speculations = tuple(
                _self_draft("streamingllm", budget, gamma) for gamma in gammas
            )
            items.append(maker.item(batch, context, speculations, prescribed))
    return items


def _self_draft(method: DraftMethod, budget: int, gamma: int) -> SpeculationSpec:
    return SpeculationSpec(
        draft="self", draft_method=method, draft_budget=budget, gamma=gamma
    )
