"""The small operations between a layer's matrix products on a GPU, in Triton: one launch each.

At the few tokens of a decoding step a launch costs more than its bytes, so what counts is how many
there are. All arithmetic is in fp32, and each result is rounded once, to its tensor's dtype. Sizes
need not be powers of two. Nothing is read on the host, so that a launch can be captured in a graph.

Shape suffixes: B sequences, T tokens, N heads, D head_dim, H hidden, F intermediate size of this
shard; in the kernels P pairs of dimensions, J the two of a pair.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ELEMENTS_PER_THREAD = 16
ROTATED_ELEMENTS = 1024
"""Elements of heads per program."""
GATED_ELEMENTS = 1024


@triton.jit
def _add_rms_norm_kernel(
    hidden,
    delta,
    weight,
    output,
    hidden_stride,
    delta_stride,
    size,
    eps,
    BLOCK: tl.constexpr,
):
    """One token: hidden += delta, and the norm of the sum as it was stored."""
    token = tl.program_id(0).to(tl.int64)
    dims_H = tl.arange(0, BLOCK)
    mask_H = dims_H < size
    hidden_H = hidden + token * hidden_stride + dims_H
    delta_H = tl.load(delta + token * delta_stride + dims_H, mask=mask_H, other=0.0).to(
        tl.float32
    )
    sum_H = tl.load(hidden_H, mask=mask_H, other=0.0).to(tl.float32) + delta_H
    sum_H = sum_H.to(hidden.dtype.element_ty)
    tl.store(hidden_H, sum_H, mask=mask_H)
    sum_H = sum_H.to(tl.float32)
    scale = tl.rsqrt(tl.sum(sum_H * sum_H, axis=0) / size + eps)
    weight_H = tl.load(weight + dims_H, mask=mask_H, other=0.0).to(tl.float32)
    tl.store(
        output + token * size + dims_H,
        (sum_H * scale * weight_H).to(output.dtype.element_ty),
        mask=mask_H,
    )


def add_rms_norm_(
    hidden: Tensor, delta: Tensor, weight_H: Tensor, eps: float
) -> Tensor:
    """hidden += delta, both [.., H]. Returns hidden / sqrt(mean(hidden²) + eps) · weight."""
    hidden_MH, delta_MH = (
        hidden.view(-1, hidden.shape[-1]),
        delta.reshape(-1, hidden.shape[-1]),
    )
    num_tokens, size = hidden_MH.shape
    assert hidden_MH.stride(1) == delta_MH.stride(1) == 1
    output = hidden.new_empty(hidden.shape)
    block = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(num_tokens,)](
        hidden_MH,
        delta_MH,
        weight_H,
        output,
        hidden_MH.stride(0),
        delta_MH.stride(0),
        size,
        eps,
        BLOCK=block,
        num_warps=num_warps(block),
    )
    return output


@triton.jit
def _rotate_kernel(
    heads,
    rotation,
    weight,
    num_tokens,
    num_heads,
    eps,
    heads_stride_b,
    heads_stride_t,
    heads_stride_n,
    rotation_stride_b,
    rotation_stride_t,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Some heads of one token. A rotation is the product of two complex numbers, (real, imaginary)
    side by side.
    """
    sequence, token = (
        (tl.program_id(0) // num_tokens).to(tl.int64),
        (tl.program_id(0) % num_tokens).to(tl.int64),
    )
    heads_N = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pairs_P = tl.arange(0, PAIRS_PAD)
    inside_P1 = (pairs_P < HEAD_DIM // 2)[:, None]
    mask_NP1 = (heads_N < num_heads)[:, None, None] & inside_P1[None, :, :]
    dims_PJ = 2 * pairs_P[:, None] + tl.arange(0, 2)[None, :]
    heads += sequence * heads_stride_b + token * heads_stride_t
    at_NPJ = heads + heads_N[:, None, None] * heads_stride_n + dims_PJ[None, :, :]
    real_NP, imaginary_NP = tl.split(
        tl.load(at_NPJ, mask=mask_NP1, other=0.0).to(tl.float32)
    )
    rotation += sequence * rotation_stride_b + token * rotation_stride_t
    cosine_P, sine_P = tl.split(tl.load(rotation + dims_PJ, mask=inside_P1, other=0.0))
    if HAS_NORM:
        weight_at_NPJ = weight + heads_N[:, None, None] * HEAD_DIM + dims_PJ[None, :, :]
        weight_NPJ = tl.load(weight_at_NPJ, mask=mask_NP1, other=0.0).to(tl.float32)
        real_weight_NP, imaginary_weight_NP = tl.split(weight_NPJ)
        mean_N = (
            tl.sum(real_NP * real_NP + imaginary_NP * imaginary_NP, axis=1) / HEAD_DIM
        )
        scale_N1 = tl.rsqrt(mean_N + eps)[:, None]
        real_NP = real_NP * scale_N1 * real_weight_NP
        imaginary_NP = imaginary_NP * scale_N1 * imaginary_weight_NP
    turned_real_NP = real_NP * cosine_P[None, :] - imaginary_NP * sine_P[None, :]
    turned_imaginary_NP = real_NP * sine_P[None, :] + imaginary_NP * cosine_P[None, :]
    turned_NPJ = tl.join(turned_real_NP, turned_imaginary_NP).to(heads.dtype.element_ty)
    tl.store(at_NPJ, turned_NPJ, mask=mask_NP1)


def rotate_(
    heads_BTND: Tensor,
    rotation_BTPJ: Tensor,
    weight_ND: Tensor | None,
    eps: float,
) -> None:
    """Each head, normalised over head_dim where there is a weight, and then its pairs (2i, 2i+1) of
    dimensions as complex numbers times the rotation's (fp32), in place. Either may be a strided
    view, but not of a head."""
    num_sequences, num_tokens, num_heads, head_dim = heads_BTND.shape
    assert heads_BTND.stride(-1) == rotation_BTPJ.stride(-1) == 1
    assert rotation_BTPJ.stride(-2) == 2
    assert weight_ND is None or weight_ND.is_contiguous()
    tiling = rotation_tiling(num_heads, head_dim)
    _rotate_kernel[
        (num_sequences * num_tokens, triton.cdiv(num_heads, tiling["HEADS"]))
    ](
        heads_BTND,
        rotation_BTPJ,
        heads_BTND if weight_ND is None else weight_ND,
        num_tokens,
        num_heads,
        eps,
        *heads_BTND.stride()[:3],
        *rotation_BTPJ.stride()[:2],
        HEAD_DIM=head_dim,
        HAS_NORM=weight_ND is not None,
        **tiling,
    )


@triton.jit
def _silu_mul_kernel(gate_up, output, size, stride, BLOCK: tl.constexpr):
    """Some of one token's products."""
    token = tl.program_id(0).to(tl.int64)
    at_F = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_F = at_F < size
    gate_F = tl.load(gate_up + token * stride + at_F, mask=mask_F, other=0.0).to(
        tl.float32
    )
    up_F = tl.load(gate_up + token * stride + size + at_F, mask=mask_F, other=0.0).to(
        tl.float32
    )
    product_F = gate_F / (1.0 + tl.exp(-gate_F)) * up_F
    tl.store(
        output + token * size + at_F, product_F.to(output.dtype.element_ty), mask=mask_F
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up of [.., 2F], the gate first: [.., F]."""
    rows_MF = gate_up.flatten(0, -2)
    num_tokens, size = rows_MF.shape[0], rows_MF.shape[1] // 2
    assert rows_MF.stride(1) == 1
    output = gate_up.new_empty(*gate_up.shape[:-1], size)
    grid = (num_tokens, triton.cdiv(size, GATED_ELEMENTS))
    _silu_mul_kernel[grid](
        rows_MF, output, size, rows_MF.stride(0), BLOCK=GATED_ELEMENTS
    )
    return output


def num_warps(num_elements: int) -> int:
    """For a program that holds so many elements (a power of two) in registers."""
    return min(16, max(1, num_elements // (32 * ELEMENTS_PER_THREAD)))


def rotation_tiling(num_heads: int, head_dim: int) -> dict[str, int]:
    """Compile-time sizes of the rotation."""
    pairs_pad = triton.next_power_of_2(head_dim // 2)
    heads = min(
        triton.next_power_of_2(num_heads), max(1, ROTATED_ELEMENTS // (2 * pairs_pad))
    )
    return {"HEADS": heads, "PAIRS_PAD": pairs_pad}
