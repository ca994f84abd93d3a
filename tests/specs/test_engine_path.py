"""The paths of engines: by version, draft and options."""

from __future__ import annotations

import pytest

from magicdec.specs.engine import load_engine
from magicdec.specs.engine_path import PathOptions, StepPath

VLLM = load_engine("vllm")


def path(method: str, version: str = "", **options: object) -> StepPath:
    engine = VLLM.of_version(version) if version else VLLM
    return engine.as_set(PathOptions(**options)).path(method, method)


@pytest.mark.parametrize(
    ("method", "version", "runner", "graph_mode", "rows", "is_asynchronous"),
    [
        ("ngram", "0.33", "V2", "whole", "padded", False),
        ("ngram", "0.29", "V1", "uniform", "ragged", False),
        ("suffix", "0.33", "V1", "uniform", "ragged", False),
        ("suffix", "0.12", "V1", "uniform", "ragged", False),
        ("ngram", "0.10", "V1", "whole", "ragged", False),
        ("eagle3", "0.33", "V2", "whole", "ragged", True),
        ("eagle3", "0.24", "V1", "whole", "ragged", True),
        ("eagle3", "0.12", "V1", "whole", "ragged", False),
        ("dspark", "0.24", "V2", "whole", "ragged", True),
    ],
)
def test_a_draft_takes_the_path_of_its_version(
    method: str,
    version: str,
    runner: str,
    graph_mode: str,
    rows: str,
    is_asynchronous: bool,
) -> None:
    taken = path(method, version)
    assert taken.runner == runner
    assert taken.graph_mode == graph_mode
    assert taken.rows == rows
    assert taken.is_asynchronous == is_asynchronous


def test_options_of_a_server_change_the_path() -> None:
    assert path("eagle3", enforce_eager=True).graph_mode == "none"
    assert path("eagle3", optimization_level=0).graph_mode == "none"
    assert path("eagle3", cudagraph_mode="none").graph_mode == "none"
    assert path("eagle3", cudagraph_mode="PIECEWISE").graph_mode == "piecewise"
    assert path("eagle3", cudagraph_mode="FULL_AND_PIECEWISE").graph_mode == "whole"
    assert path("suffix", cudagraph_mode="FULL").graph_mode == "uniform"
    assert path("suffix", enforce_eager=True).graph_mode == "none"
    assert not path("eagle3", is_synchronous=True).is_asynchronous
    assert path("ngram", runner="V1").rows == "ragged"
    assert path("ngram", has_microbatches=True).runner == "V1"
    assert path("eagle3", pp_size=2).is_asynchronous
    assert not path("eagle3", pp_size=2, runner="V1").is_asynchronous


def test_scheduling_between_steps_costs_a_plain_step_too_and_a_look_up_once() -> None:
    between = VLLM.as_set(PathOptions(is_synchronous=True))
    for method in ("ngram", "eagle3"):
        constants = between.scheduling(method, method)
        assert constants == between
        apart = between.overheads.step_overhead_s - VLLM.overheads.step_overhead_s
        assert apart == pytest.approx(VLLM.overheads.synchronous_step_overhead_s)
    assert VLLM.scheduling("ngram", "ngram").overheads == (
        between.with_constants(
            {
                "overheads.autoregressive_overhead_s": VLLM.overheads.autoregressive_overhead_s
            }
        ).overheads
    )


def test_mixtures_and_hybrids_took_the_newer_runner_last() -> None:
    """vLLM 0.25 took V2 for dense models (pull request 44443), 0.29 for all (53183); who chooses a runner
    chooses it for all."""
    assert path("mtp", "0.24").runners == "V1"
    assert path("mtp", "0.28").runners == "V2 (V1 for mixtures and hybrids)"
    assert path("mtp", "0.29").runners == "V2"
    assert path("suffix", "0.28").runners == "V1"
    assert path("mtp", "0.28", runner="V1").runners == "V1"


def test_every_path_is_said_in_words() -> None:
    assert not list(path("eagle3").sentences())
    assert len(list(path("suffix").sentences())) == 3
    (eager,) = path("eagle3", enforce_eager=True).sentences()
    assert eager == "no captured graphs"
