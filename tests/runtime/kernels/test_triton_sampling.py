"""The kernels of sampling against the same written out in fp64: on a GPU where there is one, interpreted otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from magicdec.runtime import kernels
from magicdec.runtime.distributed import SINGLE
from magicdec.runtime.sampling import probabilities
from magicdec.specs.speculation import SamplingSpec

triton = pytest.importorskip("triton")

from magicdec.runtime.kernels import triton_sampling  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cpu" and not triton.knobs.runtime.interpret,
        reason="neither a GPU nor Triton's interpreter",
    ),
]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(
        DEVICE, dtype
    )


@pytest.mark.parametrize("dtype", kernels.TRITON_DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(2, 3, 100), (3, 2 * triton_sampling.SHARE + 77), (1, triton_sampling.SHARE)],
)
def test_probabilities_are_the_softmax(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """In one share and in several, one of which has -inf alone; fp32 whatever the logits' dtype."""
    logits = 8 * random(*shape[:-1], shape[-1] + 3, dtype=dtype)[..., : shape[-1]]
    logits[..., triton_sampling.SHARE : 2 * triton_sampling.SHARE] = -torch.inf
    scaled = logits.double() / 0.7
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp()
    exact = weights / weights.sum(-1, keepdim=True)
    found = triton_sampling.softmax(logits, 0.7)
    assert found.dtype == torch.float32
    assert ((found - exact).abs() <= 1e-5 * exact + 1e-12).all()


def test_nan_in_a_logit_reaches_all_of_its_row() -> None:
    """So that a broken model is noticed, not sampled from."""
    logits = random(2, triton_sampling.SHARE + 9)
    logits[1, 5] = torch.nan
    found = triton_sampling.softmax(logits, 1.0)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


@pytest.mark.parametrize(
    "size", [7, triton_sampling.SHARE + 5, 3 * triton_sampling.SHARE]
)
def test_a_token_is_where_the_cumulative_sum_passes(size: int) -> None:
    """Strided rows of weights that are not normalised, a third of them 0; numbers from 0 to the last below 1."""
    numbers = torch.cat(
        (
            torch.tensor([0.0, 1 - 2.0**-24]),
            torch.rand(18, generator=torch.Generator().manual_seed(1)),
        )
    )
    uniform = torch.stack((numbers, numbers), dim=1).to(DEVICE)[:, 1]
    weights = random(20, size + 3).abs()[:, :size]
    weights[random(20, size, seed=1) < -0.43] = 0
    tokens = triton_sampling.sample(weights, uniform)
    rows = torch.arange(20, device=DEVICE)
    assert tokens.dtype == torch.int64
    assert (weights[rows, tokens] > 0).all()
    cumulative = weights.double().cumsum(-1)
    threshold, slack = uniform.double() * cumulative[:, -1], 1e-6 * cumulative[:, -1]
    after = cumulative[rows, tokens]
    assert (threshold < after + slack).all()
    assert (threshold >= after - weights[rows, tokens] - slack).all()


def test_only_tokens_with_a_weight_are_chosen() -> None:
    """A single one anywhere in the row, whatever the number; where there is none at all, some token all the same."""
    size = 2 * triton_sampling.SHARE + 50
    for only in (0, triton_sampling.SHARE - 1, triton_sampling.SHARE, size - 1):
        weights = torch.zeros(3, size, device=DEVICE)
        weights[:, only] = 1e-30
        tokens = triton_sampling.sample(
            weights, torch.tensor([0.0, 0.5, 1 - 2.0**-24], device=DEVICE)
        )
        assert tokens.tolist() == [only] * 3
    for value in (0.0, torch.nan):
        weights = torch.full((1, size), value, device=DEVICE)
        assert (
            0
            <= int(triton_sampling.sample(weights, torch.tensor([0.5], device=DEVICE)))
            < size
        )


def test_a_number_at_the_border_of_two_shares_gives_a_token_with_a_weight() -> None:
    """Sums in another order differ in the last place there, and the shares begin with weights of 0."""
    num_rows, num_shares = 10, 14
    weights = random(num_rows, num_shares, triton_sampling.SHARE).abs()
    weights[..., :9] = 0
    ends = weights.double().sum(-1).cumsum(-1)
    rows = torch.arange(num_rows, device=DEVICE)
    uniform = (ends[rows, 3 + rows % 10] / ends[:, -1]).float()
    tokens = triton_sampling.sample(weights.flatten(1), uniform)
    assert (weights.flatten(1)[rows, tokens] > 0).all()
    from_border = tokens - (4 + rows % 10) * triton_sampling.SHARE
    assert ((from_border >= -4) & (from_border <= 12)).all()


def test_truncated_distributions_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[float] = []

    def softmax(logits: Tensor, temperature: float) -> Tensor:
        calls.append(temperature)
        return torch.softmax(logits / temperature, dim=-1)

    monkeypatch.setattr(kernels, "can_fuse", lambda x: True)
    monkeypatch.setattr(triton_sampling, "softmax", softmax)
    logits = random(2, 50)
    for sampling in (
        SamplingSpec(temperature=0.5, top_k=5),
        SamplingSpec(temperature=0.5, top_p=0.9),
    ):
        kept = probabilities(logits, sampling, SINGLE)
        assert (kept == 0).any()
        assert (kept.sum(-1) - 1).abs().max() < 1e-6
    assert not calls
    probabilities(logits, SamplingSpec(temperature=0.5, top_p=1.0), SINGLE)
    assert calls == [0.5]
