"""The memory that a run is refused for: what its choosing of tokens takes, and what control groups leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from torch.profiler import ProfilerActivity, profile

from magicdec.errors import CapacityError
from magicdec.measure import configuration
from magicdec.measure.configuration import (
    BenchmarkRequest,
    check_request,
    choosing_bytes,
)
from magicdec.measure.environment import cgroup_free_bytes
from magicdec.measure.session import BenchmarkSession
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec

VOCABULARY = 40_000
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
    "max_position_embeddings": 256, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture
def request_(tmp_path: Path) -> BenchmarkRequest:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    draft = SpeculationSpec(
        draft="self", draft_method="streamingllm", draft_budget=16, gamma=3
    )
    return BenchmarkRequest(
        model=str(tmp_path / "config.json"), weights="random", prompts="random", batch_size=96, context_len=24,
        gen_len=8, speculations=(draft,), sampling=SamplingSpec(temperature=1.0, top_p=0.9),
    )  # fmt: skip


def peak_tensor_bytes(work: Callable[[], object]) -> int:
    """The most that torch's allocator held at once during `work`, from its own record of every allocation and release.

    The kernel's peak (VmHWM) also holds pages that malloc keeps, 15 to 20 % of it by its thresholds and threads.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [
        e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    return int(
        np.cumsum(
            [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
        ).max()
    )


@pytest.mark.parametrize("top_p", [None, pytest.param(0.9, marks=pytest.mark.slow)])
def test_what_is_counted_for_choosing_is_what_a_run_takes(
    request_: BenchmarkRequest, top_p: float | None
) -> None:
    """Tensors of 0.2 to 0.4 GB: not more than is counted, and more than six tenths of it."""
    request = replace(request_, sampling=SamplingSpec(temperature=1.0, top_p=top_p))
    session = BenchmarkSession(request)
    session.run(request.speculations[0], gen_len=1)  # what is allocated once for all
    peak = peak_tensor_bytes(lambda: session.run(request.speculations[0], gen_len=8))
    counted = choosing_bytes(request) * request.batch_size
    assert 0.6 * counted < peak < counted


def test_a_vocabulary_that_does_not_fit_is_refused_before_anything_is_allocated(
    request_: BenchmarkRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configuration, "available_memory_bytes", lambda device: 300e6)
    spec = load_model_spec(request_.model)
    with pytest.raises(CapacityError, match="largest batch that fits is"):
        check_request(request_, spec)
    check_request(replace(request_, sampling=SamplingSpec()), spec)


@pytest.mark.parametrize("version", [1, 2])
def test_control_groups_limit_what_is_free(version: int, tmp_path: Path) -> None:
    """The group's own limit and those above it; no limit is none, and pages that can be dropped are free."""
    own = tmp_path / "cgroup"
    if version == 2:
        own.write_text("0::/outer/inner\n")
        base, names, none, dropped = (
            tmp_path,
            ("memory.max", "memory.current"),
            "max",
            "inactive_file",
        )
    else:
        own.write_text("3:cpu,cpuacct:/x\n7:memory:/outer/inner\n1:name=systemd:/\n")
        base, names, none = (
            tmp_path / "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "none",
        )
        dropped = "total_inactive_file"
    for place, limit in (("outer/inner", none), ("outer", "1000")):
        (base / place).mkdir(parents=True, exist_ok=True)
        (base / place / names[0]).write_text(f"{limit}\n")
        (base / place / names[1]).write_text("900\n")
        (base / place / "memory.stat").write_text(f"anon 1\n{dropped} 250\n")
    assert cgroup_free_bytes(tmp_path, own) == [350.0]
    assert cgroup_free_bytes(tmp_path, tmp_path / "none") == []
