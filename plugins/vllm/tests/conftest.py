"""One engine with the draft for all tests, and the reference's answers from a process beside it.

Engine tests run where vLLM is installed (`make test-vllm`); elsewhere they are left out, with a line that says so.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

# before anything imports Triton: without a GPU its kernels are interpreted
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ENGINE_TESTS = ["test_engine_*.py"]
FOUND = importlib.util.find_spec("vllm")
HAS_VLLM = FOUND is not None and FOUND.origin is not None
collect_ignore_glob = [] if HAS_VLLM else ENGINE_TESTS


def pytest_report_header() -> str | None:
    return (
        None
        if HAS_VLLM
        else "vLLM is not installed here: its engine tests are left out (make test-vllm runs them)"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits for the engines of other processes comes last, so that these work beside all others."""
    items.sort(key=lambda item: "v2_engines" in getattr(item, "fixturenames", ()))


MAX_GAMMA = 7


class Served:
    """The engine under test. Its draft's settings can change between requests."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        worker = (
            llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        )
        self.runner = worker.model_runner
        self.draft = self.runner.drafter

    def configure(
        self, *, budget: int, gamma: int, method: str = "streamingllm", refresh: int = 1
    ) -> None:
        from magicdec.schema.gamma_table import TableGamma

        table = TableGamma(batch_sizes=(1,), context_lens=(1,), gammas=((gamma,),))
        self.draft.settings = msgspec.structs.replace(
            self.draft.settings,
            draft_budget=budget,
            gamma_table=table,
            draft_method=method,
            refresh=refresh,
        )


@pytest.fixture(scope="session")
def greedy_cases() -> list[dict[str, Any]]:
    from cases import crowd_requests, greedy_requests

    return [*greedy_requests(140, seed=5), *crowd_requests(12)]


@pytest.fixture(scope="session")
def reference(
    greedy_cases: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    from cases import ENGINE
    from serving import EngineProcess

    reference = EngineProcess(
        ENGINE, greedy_cases, tmp_path_factory.mktemp("reference")
    )
    yield reference
    reference.close()


@pytest.fixture(scope="session")
def v2_engines(
    greedy_cases: list[dict[str, Any]],
    reference: Any,
    prompt: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Any]]:
    from test_engine_v2 import sampled_requests, start_engines

    engines = start_engines(
        greedy_cases, sampled_requests(prompt), tmp_path_factory.mktemp("v2")
    )
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest) -> Served:
    """Started while the engines of other processes are at work, where a test needs these."""
    wanted = {
        name
        for item in request.session.items
        for name in getattr(item, "fixturenames", ())
    }
    for name in ("reference", "v2_engines"):
        if name in wanted:
            request.getfixturevalue(name)
    from cases import ENGINE
    from serving import start_engine

    from magicdec.specs.vllm_plugin import DRAFT_CLASS

    speculation = {
        "method": "custom_class",
        "model": DRAFT_CLASS,
        "num_speculative_tokens": MAX_GAMMA,
        "draft_sample_method": "probabilistic",
    }
    settings = {
        "magicdec": {"draft_budget": 128, "draft_method": "topk"}
    }  # so that means are kept from the start
    return Served(
        start_engine(
            {**ENGINE, "speculative_config": speculation, "additional_config": settings}
        )
    )


@pytest.fixture(scope="session")
def model() -> Any:
    import torch
    from cases import MODEL
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def prompt(model: Any) -> list[int]:
    """Of a few, the one with the most continuations that are likely enough to be counted."""
    from cases import prompts
    from test_engine_sampling import exact_distribution

    return max(
        prompts(16, 400, seed=3),
        key=lambda text: len(exact_distribution(model, text, temperature=1.0)),
    )
