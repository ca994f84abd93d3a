"""What vLLM keeps of a linear layer while it speculates, against what is charged. No engine is started."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.kv_cache_interface import MambaSpec

from magicdec.perfmodel.footprint import state_bytes
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.memory import memory_need
from magicdec.perfmodel.setup import Setup
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.mixers import GatedDeltaNet
from magicdec.specs.precision import BF16
from magicdec.specs.speculation import SpeculationSpec

MODEL = load_model_spec("qwen3.5-35b-a3b")
ENGINE = load_engine("vllm")


def allocated(mixer: GatedDeltaNet, gamma: int, tp: int) -> int:
    """vLLM's own count for one layer and sequence."""
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
        tp, mixer.num_key_heads, mixer.num_value_heads, mixer.key_head_dim, mixer.value_head_dim, mixer.conv_kernel,
        gamma,
    )  # fmt: skip
    spec = MambaSpec(
        block_size=16,
        shapes=shapes,
        dtypes=(torch.bfloat16, torch.float32),
        num_speculative_blocks=gamma,
    )
    config = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="none"))
    return int(spec.max_memory_usage_bytes(config))


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize(("gamma", "tolerance"), [(1, 1e-9), (3, 0.02), (7, 0.05)])
def test_a_state_for_each_verified_token_is_charged_as_it_is_allocated(
    tp: int, gamma: int, tolerance: float
) -> None:
    """Exact for gamma 1; its convolution keeps gamma further columns in every slot, of which one is charged."""
    ((mixer, count),) = [
        (each, count) for each, count in MODEL.mixers if isinstance(each, GatedDeltaNet)
    ]
    own = count * allocated(mixer, gamma, tp)
    assert float((gamma + 1) * state_bytes(MODEL, ENGINE, BF16, tp)) == pytest.approx(
        own, rel=tolerance
    )
    needs = []
    for draft in ("none", "self"):
        method = "none" if draft == "none" else "ngram"
        setup = Setup(
            model=MODEL, hardware=load_hardware("h200"), engine=ENGINE,
            speculation=SpeculationSpec(draft=draft, draft_method=method),  # type: ignore[arg-type]
        )  # fmt: skip
        needs.append(
            memory_need(
                setup, batch=1, max_len=1000, budget=None, gamma=gamma, tp_size=tp
            ).kv_bytes
        )
    assert float(needs[1] - needs[0]) == pytest.approx(
        own * gamma / (gamma + 1), rel=2 * tolerance + 1e-9
    )
