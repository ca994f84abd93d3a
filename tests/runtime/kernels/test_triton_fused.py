"""The fused kernels of a layer against the same written out in fp64: on a GPU where there is one, interpreted
otherwise; and whole models on them, and on those of sampling, against plain torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from magicdec.runtime import kernels, layers, mixers
from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.generate import DecodeOptions, DecodeResult, decode
from magicdec.runtime.prefill import PrefillPass
from magicdec.runtime.transformer import Taps, Transformer
from magicdec.runtime.weights import load_model
from magicdec.specs.speculation import SamplingSpec
from tests.runtime.conftest import tiny_spec
from tests.runtime.drafts import DRAFTS, draft_model_for

triton = pytest.importorskip("triton")

from magicdec.runtime.kernels import triton_fused, triton_sampling  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cpu" and not triton.knobs.runtime.interpret,
        reason="neither a GPU nor Triton's interpreter",
    ),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error relative to 1 + |exact|: the last place of each dtype, and half of it more."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(
        DEVICE, dtype
    )


def assert_near(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == exact.shape
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() / (1 + exact.abs())).max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 2, 48), (2, 5, 1030)])
def test_the_sum_is_stored_and_its_norm_returned(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """The hidden state is a view of wider rows, whose other elements stay; the norm is of the sum as stored."""
    size = shape[-1]
    whole = random(*shape[:-1], size + 8, dtype=dtype)
    kept = whole.clone()
    hidden, delta, weight = (
        whole[..., :size],
        random(*shape, dtype=dtype, seed=1),
        random(size, dtype=dtype, seed=2),
    )
    normed = triton_fused.add_rms_norm_(hidden, delta, weight, 1e-2)
    assert_near(hidden, kept[..., :size].double() + delta.double(), dtype)
    assert torch.equal(whole[..., size:], kept[..., size:])
    stored = hidden.double()
    exact = (
        stored
        / (stored.square().mean(-1, keepdim=True) + 1e-2).sqrt()
        * weight.double()
    )
    assert_near(normed, exact, dtype)


def exact_rotation(
    heads: Tensor, angles_BTP: Tensor, weight: Tensor | None, eps: float
) -> Tensor:
    """Dimensions 2i and 2i+1 of a head as a point of the plane turned by angle i, after the norm."""
    heads = heads.double()
    if weight is not None:
        heads = (
            heads
            / (heads.square().mean(-1, keepdim=True) + eps).sqrt()
            * weight.double()
        )
    cosine, sine = angles_BTP.cos()[:, :, None], angles_BTP.sin()[:, :, None]
    even, odd = heads[..., 0::2], heads[..., 1::2]
    return torch.stack(
        (even * cosine - odd * sine, even * sine + odd * cosine), dim=-1
    ).flatten(-2)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(("heads", "head_dim", "dtype"), [
    (3, 16, torch.float16), (5, 6, torch.float32), (11, 128, torch.bfloat16), (2, 80, torch.float32),
    (1, 2, torch.float32),
])  # fmt: skip
def test_heads_are_normalised_and_turned_in_place(
    heads: int, head_dim: int, is_shared: bool, has_norm: bool, dtype: torch.dtype
) -> None:
    """Queries and keys as a fused projection gives them: the values behind stay as they are. With one rotation for each
    token, or for each sequence."""
    projected = random(2, 3, heads + 2, head_dim, dtype=dtype)
    kept = projected.clone()
    angles = 3 * random(2, 1 if is_shared else 3, head_dim // 2, seed=1).double()
    weight = random(heads, head_dim, dtype=dtype, seed=2) if has_norm else None
    norm = None if weight is None else layers.HeadNorm(weight_ND=weight, eps=1e-2)
    rotation = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[
        :, :, None
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "can_fuse", lambda x: True)
        mixers.rotate_(projected[:, :, :heads], rotation, norm)
    assert_near(
        projected[:, :, :heads],
        exact_rotation(kept[:, :, :heads], angles, weight, 1e-2),
        dtype,
    )
    assert torch.equal(projected[:, :, heads:], kept[:, :, heads:])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 37, 1100])
def test_the_gate_opens_the_other_half(size: int, dtype: torch.dtype) -> None:
    """Sizes that no block divides, strided rows, and gates so far from 0 that an exponential overflows."""
    gate_up = random(2, 3, 2 * size + 4, dtype=dtype)[..., : 2 * size]
    gate_up[0, 0, :2] = torch.tensor([-200.0, 200.0])
    gate, up = gate_up[..., :size].double(), gate_up[..., size:].double()
    assert_near(triton_fused.silu_mul(gate_up), gate / (1 + (-gate).exp()) * up, dtype)


def counted(
    calls: Counter[str], name: str, function: Callable[..., object]
) -> Callable[..., object]:
    def call(*args: object) -> object:
        calls[name] += 1
        return function(*args)

    return call


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Sends all tensors to the fused kernels, until `only_torch`; counts their calls."""
    calls: Counter[str] = Counter()
    by_module = {
        triton_fused: ("add_rms_norm_", "rotate_", "silu_mul"),
        triton_sampling: ("softmax", "sample"),
    }
    for module, names in by_module.items():
        for name in names:
            monkeypatch.setattr(
                module, name, counted(calls, name, getattr(module, name))
            )
    monkeypatch.setattr(kernels, "can_fuse", lambda x: True)
    return calls


@contextmanager
def only_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "can_fuse", lambda x: False)
        yield


@torch.inference_mode()
def prefill_and_verify(model: Transformer) -> list[Tensor]:
    """Logits of a whole prompt; of one token after ragged prompts, and of four; and what is cached of them by then."""
    engine = Engine(model, batch_size=2, max_len=40)
    generator = np.random.default_rng(1)
    prompts = [generator.integers(1, 90, n).tolist() for n in (13, 4)]
    first = PrefillPass(engine.cache, row=0, num_past=0, num_tokens=13)
    logits = [
        model.logits_of(model.hidden(torch.tensor([prompts[0]], device=DEVICE), first))
    ]
    engine.prefill(prompts, chunk=6)
    logits += [
        engine.forward(torch.tensor(block, device=DEVICE))
        for block in ([[3], [4]], [[3, 5, 7, 9], [4, 6, 8, 2]])
    ]
    return [
        *logits,
        engine.cache.blocks[0].data[:, :, 0, :, :16],
        engine.cache.blocks[0].data[:, :, 1, :, :7],
    ]


@pytest.mark.parametrize(
    "family", ["qwen3", pytest.param("llama-biases", marks=pytest.mark.slow)]
)
def test_a_model_gives_the_same_logits(
    family: str, checkpoints: dict[str, Path], fused: Counter[str]
) -> None:
    """Prefill, decoding and verification, fp32: to 1e-5 of the largest logit. Every addition but the first norm's is
    fused, the last layer's with the final norm."""
    model = load_model(checkpoints[family], device=DEVICE)
    found = prefill_and_verify(model)
    num_layers, num_passes = model.spec.num_hidden_layers, 1 + 2 + 1 + 2
    assert fused == {
        "add_rms_norm_": 2 * num_layers * num_passes,
        "rotate_": num_layers * num_passes,
        "silu_mul": num_layers * num_passes,
    }
    with only_torch():
        expected = prefill_and_verify(model)
    assert fused["rotate_"] == num_layers * num_passes
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


@torch.inference_mode()
def test_each_layers_whole_output_is_inspected(
    checkpoints: dict[str, Path], fused: Counter[str]
) -> None:
    """What is inspected holds the layer's own addition, though the next norm has yet to make it; and inspecting changes
    nothing."""
    model = load_model(checkpoints["qwen3"], device=DEVICE)
    engine = Engine(model, batch_size=1, max_len=20)
    tokens = torch.tensor([[5, 6, 7, 8]], device=DEVICE)

    def run(layers: int, taps: Taps | None) -> Tensor:
        attention = PrefillPass(engine.cache, row=0, num_past=0, num_tokens=4)
        return replace(model, layers=model.layers[:layers]).hidden(
            tokens, attention, taps
        )

    taps = Taps(range(1, 4))
    assert torch.equal(run(3, taps), run(3, None))
    for num_layers in range(1, 4):
        hidden = taps.joined([num_layers])
        weight, eps = model.norm.weight.double(), model.norm.eps
        exact = hidden.double()
        exact = exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt() * weight
        assert (run(num_layers, None) - exact).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("draft", "temperature"),
    [
        ("sparse-model", 0.8),
        pytest.param("streamingllm", 0.0, marks=pytest.mark.slow),
    ],
)
def test_decoding_on_fused_kernels_gives_the_same_tokens(
    draft: str, temperature: float, fused: Counter[str]
) -> None:
    """Greedy and sampled with the same random numbers; sinks of a cache are turned by the same kernel, one rotation for
    all heads of a sequence."""
    model = load_model(
        tiny_spec(model_type="qwen3", num_hidden_layers=1),
        weights="random",
        seed=3,
        device=DEVICE,
    )
    sampling = SamplingSpec(temperature=temperature, seed=2)

    def run() -> DecodeResult:
        engine = Engine(model, batch_size=2, max_len=60)
        generator = np.random.default_rng(5)
        engine.prefill([generator.integers(0, 64, n).tolist() for n in (4, 20)])
        drafter = build_drafter(
            DRAFTS[draft], engine, draft_model_for(DRAFTS[draft], engine.model)
        )
        return decode(
            engine, drafter, sampling, DecodeOptions(gamma=2, max_new_tokens=5)
        )

    result = run()
    calls = dict(fused)
    with only_torch():
        expected = run()
    assert fused == calls
    assert ("sample" in calls) == ("softmax" in calls) == (temperature > 0)
    assert result.tokens == expected.tokens
    assert np.array_equal(result.num_accepted, expected.num_accepted)


def test_other_tensors_are_not_taken() -> None:
    """Those on a CPU, and fp64 anywhere."""
    assert not kernels.can_fuse(torch.ones(2))
    on_gpu = {
        torch.float64: False,
        torch.int64: False,
        torch.bfloat16: True,
        torch.float32: True,
    }
    for dtype, is_taken in on_gpu.items():
        assert kernels.can_fuse(SimpleNamespace(is_cuda=True, dtype=dtype)) == is_taken  # type: ignore[arg-type]
