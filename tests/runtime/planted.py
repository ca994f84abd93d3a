"""Heads with planted knowledge, and a campaign of greedy runs that have to equal autoregressive decoding.

    python -m tests.runtime.planted results/heads_lossless.jsonl

A random head drafts, with all its passes and its cache; of the tokens that it proposes, a share by
sequence and position is replaced by the target's own, so that blocks are accepted whole, in part and
not at all. One line per run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import msgspec
import torch
from torch import Tensor

from magicdec.errors import ConfigError
from magicdec.runtime.distributed import TensorParallel
from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.drafters.base import ProposalBuilder
from magicdec.runtime.drafters.heads import HeadDrafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.generate import DecodeOptions, decode
from magicdec.runtime.launch import launch_ranks
from magicdec.runtime.sampling import Proposal
from magicdec.runtime.weights import check_divisible, load_model
from magicdec.specs.hf_config import model_from_hf_config
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import HEAD_METHODS, SamplingSpec, SpeculationSpec
from tests.runtime.drafts import TakesTurns
from tests.runtime.heads import random_head
from tests.specs.architectures import draw

MODEL_TYPES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "olmo2", "glm4", "smollm3", "ernie4_5",
    "seed_oss", "exaone4", "granite", "mixtral", "deepseek_v3",
)  # fmt: skip
PROMPT_LENGTHS = (1, 9, 40)
QUEUED_LENGTHS = (5, 17)
NUM_TOKENS = 24
PREFILL_TOKENS = 8
"""Tokens of queued prompts between two steps of a run with a head."""
GAMMAS = (1, 3, 5)
SHARE = 0.75
"""Share of drafted tokens that are the target's own."""
MULTIPLIER = 2_654_435_761
"""Knuth's, of multiplicative hashing."""


class Run(NamedTuple):
    """One greedy run of a head over a batch, with queued sequences behind it."""

    model_type: str
    method: str
    gamma: int
    """0: changing from step to step."""
    tp_size: int
    seed: int
    is_equal: bool
    tokens_per_step: float
    is_partial: bool
    """Whether some block was accepted in part."""


def is_planted(sequence: int, position: int) -> bool:
    mixed = (sequence * 97 + position + 1) * MULTIPLIER % 2**32
    return mixed < SHARE * 2**32


class PlantedBuilder(ProposalBuilder):
    """Replaces a share of what is chosen greedily by the text that the target would write."""

    def __init__(self, drafter: HeadDrafter, texts: list[list[int]]) -> None:
        super().__init__(
            drafter.engine.model.tp, drafter.sampling, None, drafter.head.vocabulary
        )
        self._engine = drafter.engine
        self._texts = texts
        self._planted: list[Tensor] = []

    def choose(self, logits_BV: Tensor) -> Tensor:
        tokens = super().choose(logits_BV).tolist()
        ahead = len(self._planted) + 1
        engine = self._engine
        sequences = engine.sequence_of_slot[: engine.num_active].tolist()
        for slot, sequence in enumerate(sequences):
            position = int(engine.host_lengths[slot]) + ahead
            text = self._texts[sequence]
            if position < len(text) and is_planted(sequence, position):
                tokens[slot] = text[position]
        self._planted.append(torch.tensor(tokens))
        return self._planted[-1]

    def build(self) -> Proposal:
        return Proposal(tokens_BT=torch.stack(self._planted, dim=1))


def plant(drafter: HeadDrafter, texts: list[list[int]]) -> None:
    """Lets a drafter propose what `texts`, by sequence, go on with. It holds no cycle of references:
    engines show prompts to drafters that live, and ranks collect cycles at different times.
    """
    present = ref(drafter)

    def builder(uniforms: Tensor | None) -> ProposalBuilder:
        living = present()
        assert living is not None
        return PlantedBuilder(living, texts)

    drafter._builder = builder  # type: ignore[method-assign]


def spec_of(model_type: str, seed: int) -> ModelSpec:
    return model_from_hf_config(
        draw(model_type, seed), name=model_type, where=model_type
    )


def prompts(vocab_size: int, lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(1, vocab_size, (n,), generator=generator).tolist()
        for n in lengths
    ]


def runs_of(
    tp: TensorParallel,
    *,
    model_type: str,
    seed: int,
    gammas: tuple[int, ...],
    methods: tuple[str, ...],
    num_tokens: int = NUM_TOKENS,
) -> list[Run]:
    """Each method at each gamma, as a batch; and with a queue, at gammas that change."""
    spec = spec_of(model_type, seed)
    model = load_model(spec, weights="random", seed=seed, tp=tp)
    first = prompts(spec.vocab_size, PROMPT_LENGTHS, seed)
    queued = prompts(spec.vocab_size, QUEUED_LENGTHS, seed + 100)
    engine = Engine(model, batch_size=len(first), max_len=80, max_gamma=5, max_back=5)

    def decoded(
        draft: SpeculationSpec | None, texts: list[list[int]], **options: Any
    ) -> Any:
        engine.prefill(first)
        drafter = None
        if draft is not None:
            drafter = build_drafter(
                draft, engine, random_head(draft.draft_method, model)
            )
            assert isinstance(drafter, HeadDrafter)
            plant(drafter, texts)
        return decode(
            engine,
            drafter,
            SamplingSpec(),
            DecodeOptions(max_new_tokens=num_tokens, queue=queued, **options),
        )

    expected = decoded(None, []).tokens
    texts = [
        prompt + tokens
        for prompt, tokens in zip([*first, *queued], expected, strict=True)
    ]
    found = []
    for method in methods:
        draft = SpeculationSpec(draft=method, draft_method=method, gamma=1)
        for gamma in (*gammas, 0):
            policy = None if gamma else TakesTurns()
            result = decoded(
                draft,
                texts,
                gamma=gamma or 3,
                policy=policy,
                prefill_tokens=PREFILL_TOKENS,
            )
            counted = result.num_accepted[result.num_accepted >= 0]
            partial = (result.num_accepted > 0) & (
                result.num_accepted < result.gammas[:, None]
            )
            found.append(
                Run(
                    model_type=model_type,
                    method=method,
                    gamma=gamma,
                    tp_size=tp.size,
                    seed=seed,
                    is_equal=result.tokens == expected,
                    tokens_per_step=float(counted.mean()) + 1.0,
                    is_partial=bool(partial.any()),
                )
            )
    return found


def campaign(
    model_types: tuple[str, ...] = MODEL_TYPES,
    *,
    seeds: tuple[int, ...] = (0, 1),
    gammas: tuple[int, ...] = GAMMAS,
    tp_sizes: tuple[int, ...] = (1, 2),
    methods: tuple[str, ...] = HEAD_METHODS,
    num_tokens: int = NUM_TOKENS,
) -> Iterator[Run]:
    """Every combination; on several ranks with the first seed, where the model divides: they are
    started once for all models.
    """
    common: dict[str, Any] = {
        "gammas": gammas,
        "methods": methods,
        "num_tokens": num_tokens,
    }
    for model_type in model_types if 1 in tp_sizes else ():
        for seed in seeds:
            yield from runs_of(
                TensorParallel(), model_type=model_type, seed=seed, **common
            )
    for tp_size in tp_sizes:
        dividing = [
            one for one in model_types if divides(spec_of(one, seeds[0]), tp_size)
        ]
        if tp_size > 1 and dividing:
            models = [
                {"model_type": one, "seed": seeds[0], **common} for one in dividing
            ]
            yield from launch_ranks(Ranks(models), tp_size)


class Ranks(NamedTuple):
    """The runs of several models, on each rank."""

    models: list[dict[str, Any]]

    def __call__(self, tp: TensorParallel) -> list[Run]:
        found = []
        for given in self.models:
            found += runs_of(tp, **given)
        return found


def divides(spec: ModelSpec, tp_size: int) -> bool:
    try:
        check_divisible(spec, tp_size)
    except ConfigError:
        return False
    return True


def main(path: Path) -> None:
    started = time.monotonic()
    runs: list[Run] = []
    with path.open("w", encoding="utf-8") as file:
        for run in campaign():
            runs.append(run)
            file.write(msgspec.json.encode(run._asdict()).decode() + "\n")
    lively = [run for run in runs if run.tokens_per_step > 1.5 and run.is_partial]
    print(
        f"{len(runs)} runs, {sum(run.is_equal for run in runs)} equal, {len(lively)} above 1.5 tokens per step with "
        f"blocks accepted in part, {len({run.model_type for run in runs})} model types, "
        f"{sum(run.tp_size == 2 for run in runs)} on two ranks, {time.monotonic() - started:.0f} s"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
