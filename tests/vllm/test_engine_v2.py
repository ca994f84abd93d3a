"""The draft in the engine's V2 model runner, each engine in a process of its own.

The runner's kernels run in Triton's interpreter here: for identity and distribution, not for time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(3000)
NUM_MIXED, NUM_CROWD, GAMMA = 40, 14, 5
TABLE = {"batch_sizes": [1, 6], "context_lens": [64, 1024], "gammas": [[0, 3], [2, GAMMA]]}
ENGINES: dict[str, dict[str, Any]] = {
    "asynchronous": {"async_scheduling": True, "settings": {"draft_budget": 128}},
    "by a table": {"async_scheduling": True, "settings": {"draft_budget": 96, "gamma_table": TABLE}},
    "top-k pages": {"async_scheduling": False, "settings": {"draft_budget": 160, "draft_method": "topk"}},
}


def arguments(settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    from cases import ENGINE

    from magicdec.vllm.settings import DRAFT_CLASS

    speculation = {
        "method": "custom_class", "model": DRAFT_CLASS, "num_speculative_tokens": GAMMA,
        "draft_sample_method": "probabilistic",
    }  # fmt: skip
    return {**ENGINE, **more, "speculative_config": speculation, "additional_config": {"magicdec": settings}}


@pytest.fixture(scope="module")
def chosen(greedy_cases: list[dict[str, Any]]) -> list[int]:
    """Requests of all kinds, and those that are preempted."""
    return [*range(NUM_MIXED), *range(len(greedy_cases) - NUM_CROWD, len(greedy_cases))]


@pytest.fixture(scope="module", params=ENGINES)
def answer(
    request: pytest.FixtureRequest,
    greedy_cases: list[dict[str, Any]],
    chosen: list[int],
    reference: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Any]]:
    from serving import EngineProcess

    choose = random.Random(3)
    requests = [{**greedy_cases[i], "arrives": choose.randint(0, 60)} for i in chosen]
    engine = EngineProcess(arguments(**ENGINES[request.param]), requests, tmp_path_factory.mktemp("v2"), runner="V2")
    yield {**engine.answer(), "name": request.param}
    engine.close()


def test_greedy_output_is_the_engines_own(answer: dict[str, Any], chosen: list[int], reference: Any) -> None:
    """Token for token what V1 gives without speculation: chunked prefill, stops, penalties, preemption."""
    from test_engine_lossless import differs

    assert answer["runner"].startswith("vllm.v1.worker.cpu.model_runner")
    assert answer["is_async"] == ENGINES[answer["name"]]["async_scheduling"]
    outputs = reference.outputs()
    pairs = zip(chosen, answer["outputs"], (outputs[i] for i in chosen), strict=True)
    assert not {i: why for i, output, expected in pairs if (why := differs(output, expected))}


def test_drafts_are_accepted(answer: dict[str, Any]) -> None:
    """A draft that read a wrong page, or a wrong length, would hardly be: the model's greedy text repeats itself."""
    found = answer["counters"]
    drafts, by_position = found["spec_decode_num_drafts"], found["spec_decode_num_accepted_tokens_per_pos"]
    assert by_position[0] > 0.6 * drafts
    assert by_position[GAMMA - 1] > 0
    length = found["spec_decode_num_draft_tokens"] / drafts  # the engine cuts drafts at its longest sequence
    if answer["name"] == "by a table":
        assert 2.0 < length < 0.95 * GAMMA
    else:
        assert 0.95 * GAMMA < length <= GAMMA
        assert found["num_preemptions"] > 0


def test_sampled_output_follows_the_models_distribution(
    model: Any, prompt: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The draft sees 96 of 400 tokens; other requests of the same batches are greedy, or hotter."""
    from serving import EngineProcess
    from test_engine_sampling import FALSE_ALARM, chi_square, continuations, mixed_requests

    sampling = {"temperature": 0.9}  # the kernel of top-k and top-p does not run in the interpreter
    requests = mixed_requests(prompt, sampling, count=400)
    folder = tmp_path_factory.mktemp("sampled")
    engine = EngineProcess(arguments({"draft_budget": 96}, async_scheduling=True), requests, folder, runner="V2")
    answer = engine.answer()
    found = answer["counters"]
    assert 0.1 < found["spec_decode_num_accepted_tokens"] / found["spec_decode_num_draft_tokens"] < 0.97
    assert chi_square(continuations(requests, answer["outputs"]), model, prompt, sampling) > FALSE_ALARM
