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
NUM_MIXED, NUM_CROWD, GAMMA = 40, 14, 5
TABLE = {"batch_sizes": [1, 6], "context_lens": [64, 1024], "gammas": [[0, 3], [2, GAMMA]]}
GRAPHS, TOPK = "asynchronous, whole graphs", "top-k pages, whole graphs"
ENGINES: dict[str, dict[str, Any]] = {
    GRAPHS: {"async_scheduling": True, "settings": {"draft_budget": 128}},
    "by a table": {"async_scheduling": True, "settings": {"draft_budget": 96, "gamma_table": TABLE}},
    TOPK: {"async_scheduling": True, "settings": {"draft_budget": 160, "draft_method": "topk", "refresh": 3}},
}
SAMPLED = "sampled"
SAMPLING = {"temperature": 0.9}  # the kernel of top-k and top-p does not run in the interpreter


def start_engines(greedy: list[dict[str, Any]], sampled: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """All engines of this file: greedy requests of all kinds, some of them preempted; and those that sample, whose
    continuations have room for two drafts."""
    from cases import ENGINE
    from serving import EngineProcess

    from magicdec.vllm.settings import DRAFT_CLASS

    def start(name: str, requests: list[dict[str, Any]], gamma: int, settings: Any, **more: Any) -> EngineProcess:
        speculation = {
            "method": "custom_class", "model": DRAFT_CLASS, "num_speculative_tokens": gamma,
            "draft_sample_method": "greedy" if name in (GRAPHS, TOPK) else "probabilistic",
        }  # fmt: skip
        engine = {**ENGINE, **more, "speculative_config": speculation, "additional_config": {"magicdec": settings}}
        (own := folder / name).mkdir()
        return EngineProcess(engine, requests, own, runner="V2", has_graphs=name in (GRAPHS, TOPK))

    choose = random.Random(3)
    greedy = [{**request, "arrives": choose.randint(0, 60)} for request in greedy]
    engines = {name: start(name, greedy, GAMMA, **each) for name, each in ENGINES.items()}
    return engines | {SAMPLED: start(SAMPLED, sampled, 2, {"draft_budget": 96}, async_scheduling=True)}


@pytest.mark.parametrize("name", ENGINES)
def test_greedy_output_is_the_engines_own(
    v2_engines: dict[str, Any], greedy_cases: list[dict[str, Any]], reference: Any, name: str
) -> None:
    """Token for token what V1 gives without speculation: chunked prefill, stops, penalties, preemption. A draft that
    read a wrong page, or a wrong length, would hardly be accepted: the model's greedy text repeats itself."""
    from test_engine_lossless import differs

    answer, wanted = v2_engines[name].answer(), reference.answer()["outputs"]
    assert answer["runner"].startswith("vllm.v1.worker.cpu.model_runner")
    assert answer["is_async"] == ENGINES[name]["async_scheduling"]
    pairs = zip(answer["outputs"], chosen(wanted), strict=True)
    assert not [(i, why) for i, (output, expected) in enumerate(pairs) if (why := differs(output, expected))]
    found = answer["counters"]
    drafts, by_position = found["spec_decode_num_drafts"], found["spec_decode_num_accepted_tokens_per_pos"]
    assert by_position[0] > 0.6 * drafts
    assert by_position[GAMMA - 1] > 0
    length = found["spec_decode_num_draft_tokens"] / drafts  # the engine cuts drafts at its longest sequence
    if name == "by a table":
        assert 2.0 < length < 0.95 * GAMMA
    else:
        assert 0.95 * GAMMA < length <= GAMMA
        assert found["num_preemptions"] > 0


def test_a_block_of_drafts_is_one_launch(v2_engines: dict[str, Any]) -> None:
    """Six launches copy what the runner knows of the batch, the seventh replays the block. Without graphs, or for what
    the scheduler lets draft nothing, as many as it takes; none waits for a value."""
    for name in ENGINES:
        blocks = [each for each in v2_engines[name].answer()["blocks"] if each["launches"] > 1]
        assert len(blocks) > 50
        assert not sum(each["waits"] for each in blocks)
        assert {each["replays"] for each in blocks} == {int(name in (GRAPHS, TOPK))}
        if name in (GRAPHS, TOPK):
            assert max(each["launches"] for each in blocks) <= 7
            assert max(each["allocations"] for each in blocks) <= 1
        else:
            assert min(each["launches"] for each in blocks) > 100


def chosen(cases: list[Any]) -> list[Any]:
    return [*cases[:NUM_MIXED], *cases[-NUM_CROWD:]]


def sampled_requests(prompt: list[int]) -> list[dict[str, Any]]:
    from test_engine_sampling import mixed_requests

    return mixed_requests(prompt, SAMPLING, count=400)


def test_sampled_output_follows_the_models_distribution(
    v2_engines: dict[str, Any], model: Any, prompt: list[int]
) -> None:
    """The draft sees 96 of 400 tokens; other requests of the same batches are greedy, or hotter."""
    from test_engine_sampling import FALSE_ALARM, chi_square, continuations

    answer = v2_engines[SAMPLED].answer()
    found = answer["counters"]
    assert 0.1 < found["spec_decode_num_accepted_tokens"] / found["spec_decode_num_draft_tokens"] < 0.97
    counts = continuations(sampled_requests(prompt), answer["outputs"])
    assert chi_square(counts, model, prompt, SAMPLING) > FALSE_ALARM
