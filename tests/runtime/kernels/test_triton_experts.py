"""Mixtures of experts against their definition in fp64, both ways: the kernel, on a GPU where there is one and
interpreted otherwise, and an expert after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from magicdec.runtime import kernels
from magicdec.runtime.distributed import SINGLE
from magicdec.runtime.layers import (
    ColumnParallelLinear,
    GroupedLinear,
    Router,
    RowParallelLinear,
    ShardedExperts,
    ShardedMLP,
)
from magicdec.specs.layers import MixtureOfExperts

triton = pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cpu" and not triton.knobs.runtime.interpret,
        reason="neither a GPU nor Triton's interpreter",
    ),
]
HIDDEN = 48
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of the largest output: each product's result is rounded once more than the definition's."""


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(
        DEVICE, dtype
    )


def mixture(dtype: torch.dtype, **fields: Any) -> ShardedExperts:
    kind = MixtureOfExperts(
        **{"num_experts": 9, "num_experts_per_tok": 3, "width": 40, **fields}
    )
    count, inner, width = (
        kind.num_experts,
        kind.expert.num_inner * kind.width,
        kind.width,
    )
    bias, down_bias = None, None
    if kind.bias:
        bias = random(count, inner, seed=5, dtype=dtype)
        down_bias = random(count, HIDDEN, seed=6, dtype=dtype)
    shared = None
    if kind.shared is not None:
        shared = ShardedMLP(
            gate_up=ColumnParallelLinear(
                weight=random(2 * kind.shared_width, HIDDEN, seed=7, dtype=dtype)
            ),
            down=RowParallelLinear(
                weight=random(HIDDEN, kind.shared_width, seed=8, dtype=dtype), tp=SINGLE
            ),
        )
    return ShardedExperts(
        router=Router(kind=kind, weight_EH=random(count, HIDDEN, seed=1, dtype=torch.float32) * 20),
        gate_up=GroupedLinear(weight_EFK=random(count, inner, HIDDEN, seed=2, dtype=dtype), bias_EF=bias),
        down=GroupedLinear(weight_EFK=random(count, HIDDEN, width, seed=3, dtype=dtype), bias_EF=down_bias),
        bounds=torch.arange(count + 1, device=DEVICE),
        tp=SINGLE,
        shared=shared,
        shared_gate_1H=random(1, HIDDEN, seed=9, dtype=dtype) if kind.shared_gate else None,
    )  # fmt: skip


def exact(experts: ShardedExperts, x_BTH: Tensor) -> Tensor:
    """Token by token, choice by choice, as published: with SiLU, or as gpt-oss gates; Llama 4 weighs inputs."""
    kind = experts.router.kind
    rows = x_BTH.flatten(0, 1)
    weights_MC, experts_MC = experts.router(rows)
    outputs = []
    for x, weights, chosen in zip(
        rows.double(), weights_MC.double(), experts_MC.tolist(), strict=True
    ):
        total = torch.zeros_like(x)
        for weight, expert in zip(weights, chosen, strict=True):
            weighs_input = kind.scoring == "sigmoid_of_input"
            inner = experts.gate_up.weight_EFK[expert].double() @ (
                x * weight if weighs_input else x
            )
            if experts.gate_up.bias_EF is not None:
                inner = inner + experts.gate_up.bias_EF[expert].double()
            gate, up = inner.chunk(2)
            if kind.activation == "swigluoai":
                gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                inner = (up + 1) * gate / (1 + (-1.702 * gate).exp())
            else:
                inner = gate / (1 + (-gate).exp()) * up
            output = experts.down.weight_EFK[expert].double() @ inner
            if experts.down.bias_EF is not None:
                output = output + experts.down.bias_EF[expert].double()
            total += output if weighs_input else weight * output
        if experts.shared is not None:
            gate, up = (experts.shared.gate_up.weight.double() @ x).chunk(2)
            output = experts.shared.down.weight.double() @ (
                gate / (1 + (-gate).exp()) * up
            )
            if experts.shared_gate_1H is not None:
                output = output / (1 + (-(experts.shared_gate_1H.double() @ x)).exp())
            total += output
        outputs.append(total)
    return torch.stack(outputs).view(x_BTH.shape)  # fmt: skip


KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"scoring": "softmax_of_chosen"},
    "gpt-oss": {"scoring": "softmax_of_chosen", "bias": True, "activation": "swigluoai"},
    "llama-4": {"scoring": "sigmoid_of_input", "num_experts_per_tok": 1, "shared_width": 24},
    "qwen2-moe": {"shared_width": 24, "shared_gate": True, "normalized": False},
    "one expert": {"num_experts": 1, "num_experts_per_tok": 1},
    "many rows": {"num_experts": 2, "num_experts_per_tok": 2, "width": 150},
}  # fmt: skip
SHAPES = {"one token": (1, 1), "a step": (3, 5), "a prompt": (1, 150)}
"""The last of more rows than a tile."""


@pytest.fixture(params=["kernel", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(kernels, "can_fuse", lambda x: request.param == "kernel")
    return str(request.param)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_token_passes_its_own_experts(
    kind: str, shape: tuple[int, int], way: str
) -> None:
    experts = mixture(torch.float32, **KINDS[kind])
    x_BTH = random(*shape, HIDDEN, seed=4, dtype=torch.float32)
    kept = x_BTH.clone()
    expected = exact(experts, x_BTH)
    error = (experts(x_BTH) - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[torch.float32]
    assert torch.equal(x_BTH, kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_formats_are_as_near_as_their_rounding(
    dtype: torch.dtype, way: str
) -> None:
    experts = mixture(dtype, **KINDS["gpt-oss"])
    x_BTH = random(2, 9, HIDDEN, seed=4, dtype=dtype)
    found, expected = experts(x_BTH), exact(experts, x_BTH)
    assert found.dtype == dtype
    assert (found - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()


def test_only_chosen_experts_are_read(way: str) -> None:
    """All tokens choose the same three, and the others hold no numbers."""
    experts = mixture(torch.float32)
    x_BTH = random(1, 1, HIDDEN, seed=4, dtype=torch.float32).expand(4, 5, -1)
    expected = exact(experts, x_BTH)
    _, experts_MC = experts.router(x_BTH.flatten(0, 1))
    unchosen = [e for e in range(9) if e not in experts_MC[0].tolist()]
    assert len(unchosen) == 6
    for product in (experts.gate_up, experts.down):
        product.weight_EFK[unchosen] = float("nan")
    assert (experts(x_BTH) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_shards_add_up(way: str) -> None:
    """Each of two has half of every expert's gates, ups and inputs of down."""
    whole = mixture(torch.float32)
    x_BTH = random(3, 5, HIDDEN, seed=4, dtype=torch.float32)
    total = torch.zeros_like(x_BTH)
    for first in (0, 20):
        gates = range(first, first + 20)
        rows = [*gates, *(40 + gate for gate in gates)]
        shard = replace(
            whole,
            gate_up=GroupedLinear(weight_EFK=whole.gate_up.weight_EFK[:, rows]),
            down=GroupedLinear(
                weight_EFK=whole.down.weight_EFK[..., list(gates)].contiguous()
            ),
        )
        total += shard(x_BTH)
    expected = exact(whole, x_BTH)
    assert (total - expected).abs().max() < 1e-5 * expected.abs().max()
