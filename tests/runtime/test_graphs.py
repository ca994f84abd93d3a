"""Steps that CUDA graphs can capture: recorded and replayed on a CPU, they decode the same tokens.

A recording holds the tensor operations of a part, and a replay executes those again on the same tensors and no Python
of ours, as a graph does. So whatever a part takes from the host is frozen, and must not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from magicdec.runtime import attention, graphs
from magicdec.runtime.drafter import build_drafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.generate import DecodeOptions, DecodeResult, decode
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import load_model
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec
from tests.runtime.conftest import tiny_spec
from tests.runtime.drafts import DRAFTS, TakesTurns, draft_model_for
from tests.runtime.pretend_gpu import Recording

aten = torch.ops.aten
WAITS_FOR_THE_DEVICE = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.unique_dim.default,
    aten.lift_fresh.default,  # a tensor made of Python numbers is copied to the device
}


class Recorder(TorchDispatchMode):
    """Records the operations of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert operation not in WAITS_FOR_THE_DEVICE, f"{operation} cannot be captured"
        result = operation(*args, **(kwargs or {}))
        self.recording.append(operation, args, kwargs or {}, result)
        return result


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """Captures by recording, on a CPU; attention in operations that can be recorded."""
    made: list[Recording] = []

    def capture(part: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any, Any]:
        recorder = Recorder()
        with recorder:
            results = part()
        made.append(recorder.recording)
        return recorder.recording.replay, results, pool

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "can_capture", lambda device: True)
    monkeypatch.setattr(attention, "fastest_kernel", lambda *tensors: None)
    return made


def run(
    model: Transformer, draft: SpeculationSpec | None, sampling: SamplingSpec, *, static: bool, **options: Any
) -> DecodeResult:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, 64, n).tolist() for n in (33, 5, 60, 17)]
    engine = Engine(model, batch_size=4, max_len=160, max_gamma=3, max_back=5, static_shapes=static)
    engine.prefill(prompts)
    drafter = None if draft is None else build_drafter(draft, engine, draft_model_for(draft, 64))
    gamma = 0 if drafter is None else 3
    return decode(engine, drafter, sampling, DecodeOptions(gamma=gamma, **options))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", [None, *DRAFTS])
def test_replayed_steps_decode_what_plain_steps_decode(
    draft: str | None, temperature: float, tiny_model: Transformer, recordings: list[Recording]
) -> None:
    """Ragged prompts that end at different times, shorter and longer than the draft's budget."""
    sampling, limits = SamplingSpec(temperature=temperature, seed=3), [60, 75, 50, 90]
    spec = None if draft is None else DRAFTS[draft]
    expected = run(tiny_model, spec, sampling, static=False, max_new_tokens=limits)
    assert not recordings
    result = run(tiny_model, spec, sampling, static=True, max_new_tokens=limits)
    assert result.tokens == expected.tokens
    assert np.array_equal(result.num_accepted, expected.num_accepted)
    num_parts = {None: 3, "ngram": 0}.get(draft, 4)  # of each kind of step: drafting, verifying, accepting, upkeep
    assert bool(recordings) == bool(num_parts)
    assert not num_parts or len(recordings) % num_parts == 0


def test_a_queue_and_simulated_acceptance_are_replayed_too(
    tiny_model: Transformer, recordings: list[Recording]
) -> None:
    """Sequences take each other's slots while graphs stay; random numbers reach the captured verdict."""
    options = {"max_new_tokens": 30, "queue": [[1, 2, 3], [4] * 40], "simulate_acceptance": [0.8, 0.5]}
    expected = run(tiny_model, DRAFTS["streamingllm"], SamplingSpec(), static=False, **options)
    result = run(tiny_model, DRAFTS["streamingllm"], SamplingSpec(), static=True, **options)
    assert recordings
    assert np.array_equal(result.num_accepted, expected.num_accepted)


@pytest.mark.parametrize("draft", [None, "streamingllm", "model"])
def test_steps_over_rings_are_replayed_too(draft: str | None, recordings: list[Recording]) -> None:
    """A layer of full attention and one of a window of 6, in a ring of 14."""
    spec = tiny_spec(model_type="qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1)
    model, options = load_model(spec, weights="random", seed=3), {"max_new_tokens": 60, "queue": [[1, 2, 3], [4] * 40]}
    expected = run(model, None if draft is None else DRAFTS[draft], SamplingSpec(), static=False, **options)
    result = run(model, None if draft is None else DRAFTS[draft], SamplingSpec(), static=True, **options)
    assert recordings
    assert result.tokens == expected.tokens
    assert np.array_equal(result.num_accepted, expected.num_accepted)


@pytest.mark.parametrize("draft", ["topk", "streamingllm", "sparse-model"])
def test_steps_of_several_gammas_are_replayed_in_any_order(
    draft: str, tiny_model: Transformer, recordings: list[Recording]
) -> None:
    """Each gamma's graphs read what the step before left, whichever gamma it had; prompts are admitted in between."""
    options: dict[str, Any] = {"max_new_tokens": 60, "queue": [[1, 2, 3], [4] * 40]}
    expected = run(tiny_model, DRAFTS[draft], SamplingSpec(), static=False, policy=TakesTurns(), **options)
    result = run(tiny_model, DRAFTS[draft], SamplingSpec(), static=True, policy=TakesTurns(), **options)
    assert len(recordings) >= 4 * 4
    assert result.tokens == expected.tokens
    assert np.array_equal(result.num_accepted, expected.num_accepted)


def test_graphs_can_be_switched_off(tiny_model: Transformer, recordings: list[Recording]) -> None:
    run(tiny_model, DRAFTS["snapkv"], SamplingSpec(), static=True, max_new_tokens=10, cuda_graphs=False)
    assert not recordings


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", [None, *DRAFTS])
def test_on_a_gpu_captured_steps_decode_what_plain_steps_decode(draft: str | None, temperature: float) -> None:
    """The same kernels in the same shapes; several gammas, and a queue."""
    model = load_model(tiny_spec(head_dim=16), weights="random", seed=3, device="cuda")
    small = tiny_spec(name="small", hidden_size=16, num_hidden_layers=1, intermediate_size=32)
    spec = None if draft is None else DRAFTS[draft]
    needs_model = spec is not None and draft_model_for(spec, 64) is not None
    draft_model = load_model(small, weights="random", seed=9, device="cuda") if needs_model else None
    results = []
    for cuda_graphs in (False, True):
        engine = Engine(model, batch_size=2, max_len=160)
        engine.prefill([[7] * 33, [1, 2, 3, 4, 5]])
        drafter = None if spec is None else build_drafter(spec, engine, draft_model)
        options = DecodeOptions(
            gamma=0 if drafter is None else 3,
            max_new_tokens=[40, 60, 50],
            queue=[[4] * 40],
            policy=None if drafter is None else TakesTurns(),
            cuda_graphs=cuda_graphs,
        )
        results.append(decode(engine, drafter, SamplingSpec(temperature=temperature, seed=3), options))
    assert results[0].tokens == results[1].tokens
    assert np.array_equal(results[0].num_accepted, results[1].num_accepted)
