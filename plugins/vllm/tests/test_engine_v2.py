"""The draft in the engine's V2 model runner, each engine in a process of its own.

The runner's kernels run in Triton's interpreter here: for identity and distribution, not for time. So these engines
start with the first test that needs an engine, and work beside the others.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(1500)
NUM_CROWD, GAMMA = 12, 5
TABLE = {
    "batch_sizes": [1, 6],
    "context_lens": [64, 1024],
    "gammas": [[0, 3], [2, GAMMA]],
}
GRAPHS, TOP_K, SAMPLED = (
    "whole graphs by a table",
    "top-k pages, whole graphs",
    "pass by pass",
)
NUM_MIXED = {GRAPHS: 24, TOP_K: 10, SAMPLED: 0}
SAMPLING = {
    "temperature": 0.9
}  # the kernel of top-k and top-p does not run in the interpreter


def start_engines(
    greedy: list[dict[str, Any]], sampled: list[dict[str, Any]], folder: Path
) -> dict[str, Any]:
    """All engines of this file: greedy requests of all kinds, some of them preempted; and those that sample, whose
    continuations have room for two drafts."""
    from cases import ENGINE
    from serving import EngineProcess

    from magicdec.specs.vllm_plugin import DRAFT_CLASS

    def start(
        name: str, requests: list[dict[str, Any]], gamma: int, **settings: Any
    ) -> EngineProcess:
        speculation = {
            "method": "custom_class", "model": DRAFT_CLASS, "num_speculative_tokens": gamma,
            "draft_sample_method": "probabilistic" if name == SAMPLED else "greedy",
        }  # fmt: skip
        engine = {
            **ENGINE,
            "speculative_config": speculation,
            "additional_config": {"magicdec": settings},
        }
        engine["async_scheduling"] = True
        (own := folder / name).mkdir()
        return EngineProcess(
            engine, requests, own, runner="V2", has_graphs=name != SAMPLED
        )

    def arriving(name: str) -> list[dict[str, Any]]:
        choose = random.Random(3)
        arrivals = [choose.randint(0, 40) for _ in range(NUM_MIXED[name])] + [
            20
        ] * NUM_CROWD
        return [
            {**each, "arrives": at}
            for each, at in zip(chosen(greedy, name), arrivals, strict=True)
        ]

    return {
        GRAPHS: start(
            GRAPHS, arriving(GRAPHS), GAMMA, draft_budget=128, gamma_table=TABLE
        ),
        TOP_K: start(
            TOP_K,
            arriving(TOP_K),
            GAMMA,
            draft_budget=160,
            draft_method="topk",
            refresh=3,
        ),
        SAMPLED: start(
            SAMPLED, [*sampled, *chosen(greedy, SAMPLED)], 2, draft_budget=96
        ),
    }


@pytest.mark.parametrize("name", NUM_MIXED)
def test_greedy_output_is_the_engines_own(
    v2_engines: dict[str, Any],
    greedy_cases: list[dict[str, Any]],
    reference: Any,
    name: str,
) -> None:
    """Token for token what V1 gives without speculation: chunked prefill, stops, penalties, preemption. A draft that
    read a wrong page, or a wrong length, would hardly be accepted: the model's greedy text repeats itself."""
    from test_engine_lossless import differs

    answer, wanted = (
        v2_engines[name].answer(),
        chosen(reference.answer()["outputs"], name),
    )
    assert answer["runner"].startswith("vllm.v1.worker.cpu.model_runner")
    assert answer["is_async"]
    pairs = zip(answer["outputs"][-len(wanted) :], wanted, strict=True)
    assert not [
        (i, why)
        for i, (output, expected) in enumerate(pairs)
        if (why := differs(output, expected))
    ]
    found = answer["counters"]
    assert found["num_preemptions"] > 0
    if name == SAMPLED:
        return
    drafts, by_position = (
        found["spec_decode_num_drafts"],
        found["spec_decode_num_accepted_tokens_per_pos"],
    )
    assert by_position[0] > 0.6 * drafts
    assert by_position[GAMMA - 1] > 0
    length = (
        found["spec_decode_num_draft_tokens"] / drafts
    )  # the engine cuts drafts at its longest sequence
    assert (
        (2.0 if name == GRAPHS else 0.95 * GAMMA)
        < length
        < (0.95 * GAMMA if name == GRAPHS else GAMMA + 1e-9)
    )


@pytest.mark.parametrize("name", NUM_MIXED)
def test_a_block_of_drafts_is_one_launch(v2_engines: dict[str, Any], name: str) -> None:
    """Six launches copy what the runner knows of the batch, the seventh replays the block. Without graphs as many as it
    takes. None waits for a value, and a step without drafts takes nothing at all."""
    every = v2_engines[name].answer()["blocks"]
    blocks = [each for each in every if each["launches"]]
    assert len(blocks) > 50
    assert len(blocks) < len(every) or name != GRAPHS
    assert not sum(each["waits"] for each in every)
    assert {each["replays"] for each in blocks} == {int(name != SAMPLED)}
    if name != SAMPLED:
        assert max(each["launches"] for each in blocks) <= 7
        assert max(each["allocations"] for each in blocks) <= 1
    else:
        assert min(each["launches"] for each in blocks) > 100


def chosen(cases: list[Any], name: str) -> list[Any]:
    return [*cases[: NUM_MIXED[name]], *cases[-NUM_CROWD:]]


def sampled_requests(prompt: list[int]) -> list[dict[str, Any]]:
    from test_engine_sampling import mixed_requests

    return mixed_requests(prompt, SAMPLING, count=240)


def test_sampled_output_follows_the_models_distribution(
    v2_engines: dict[str, Any], model: Any, prompt: list[int]
) -> None:
    """The draft sees 96 of 400 tokens; other requests of the same batches are greedy, or hotter."""
    from test_engine_sampling import FALSE_ALARM, chi_square, continuations

    answer = v2_engines[SAMPLED].answer()
    found = answer["counters"]
    assert (
        0.1
        < found["spec_decode_num_accepted_tokens"]
        / found["spec_decode_num_draft_tokens"]
        < 0.97
    )
    requests = sampled_requests(prompt)
    counts = continuations(requests, answer["outputs"][: len(requests)])
    assert chi_square(counts, model, prompt, SAMPLING) > FALSE_ALARM
