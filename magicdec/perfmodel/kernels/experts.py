"""Mixtures of experts: one layer's routed experts, from the router's choice to their sum.

    time = overhead + hidden · t_h + touched · t_e + ‖ weights / bandwidth , FLOPs / rate ‖_p + activations / bandwidth

The touched experts' weights are read once: E·(1 − (1 − k/E)^(tokens^c)). Their tokens, rows =
tokens · k / touched, take the time of no fewer than `tile_rows`, as √(rows² + tile²), and of the
fullest expert's as they grow.

Ignored: imbalance between experts beyond its mean.
"""

from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from magicdec.counts import Array
from magicdec.fitting import Free
from magicdec.perfmodel.kernels.base import (
    Columns,
    KernelCurve,
    KernelTable,
    WorkingSet,
    arrays,
    as_array,
    soft_max,
)
from magicdec.perfmodel.kernels.gemm import linear, matrix_dtype, streaming
from magicdec.perfmodel.kernels.op import Op, OpTime, Where, operation, total
from magicdec.specs.device import WEIGHT_ONLY, Device, bytes_per_element

FULL_ROWS = 16.0
"""Tokens per expert from which the fullest expert is what the others wait for."""
NEMOTRON_EXPERTS, NEMOTRON_WIDTH = 22, 1856


class RankExperts(NamedTuple):
    """One layer's experts; `width` is one rank's share of an expert's, `num_matrices` what each
    has.

    `is_balanced`: every expert is chosen as often as every other, as some tables were timed.
    `own_tokens`: those whose hidden states are read and whose sums are written here (None: all);
    the others' copies come from other ranks.
    """

    tokens: Any
    hidden_size: Any
    width: Any
    num_experts: Any
    num_experts_per_tok: Any
    num_matrices: Any = 3.0
    weight_dtype: str = "bf16"
    compute_dtype: str = "bf16"
    is_balanced: Any = False
    own_tokens: Any = None
    weight_bytes: float | None = None


def _of_rows(rows: Columns, dtype: str) -> RankExperts:
    dtype = dtype or "bf16"
    return RankExperts(
        rows["num_tokens"],
        rows["hidden_size"],
        rows["moe_intermediate_size"] / rows["tp_size"],
        rows["num_experts"],
        rows["num_experts_per_tok"],
        weight_dtype=dtype,
        compute_dtype="bf16" if dtype in WEIGHT_ONLY else dtype,
        is_balanced=rows["is_balanced"] > 0,
    )


def _of_three_matrices(rows: dict[str, Array]) -> dict[str, Array]:
    """Without Nemotron's experts, which are not gated: two matrices, where the table's other models
    have three; it does not say so."""
    two: npt.NDArray[np.bool_] = (rows["num_experts_per_tok"] == NEMOTRON_EXPERTS) | (
        rows["moe_intermediate_size"] == NEMOTRON_WIDTH
    )
    return {name: values[~two] for name, values in rows.items()}


def experts_touched(
    num_experts: Any,
    num_experts_per_tok: Any,
    tokens: Any,
    independence: float = 1.0,
) -> Array:
    """How many experts `tokens` tokens choose: E·(1 − (1 − k/E)^(tokens^c)). c = 1: each chooses
    evenly, alone.
    """
    experts = as_array(num_experts)
    share = np.minimum(as_array(num_experts_per_tok) / np.maximum(experts, 1.0), 1.0)
    untouched = (1.0 - share) ** (as_array(tokens) ** independence)
    return experts * (1.0 - untouched)


class MoeCurve(KernelCurve, frozen=True, kw_only=True):
    """Time of one layer's routed experts by fused kernels."""

    key: ClassVar[str] = "moe"
    has_formats: ClassVar[bool] = True
    tables: ClassVar[tuple[KernelTable, ...]] = (
        KernelTable(
            kind="moe",
            columns=(
                "num_tokens",
                "hidden_size",
                "moe_intermediate_size",
                "num_experts_per_tok",
                "num_experts",
                "tp_size",
            ),
            shape=(
                "hidden_size",
                "moe_intermediate_size",
                "num_experts_per_tok",
                "num_experts",
            ),
            variant="dtype",
            flags={"is_balanced": ("distribution", "balanced")},
            work=_of_rows,
            counted=lambda rows: (rows["tp_size"] <= 8) & (rows["num_tokens"] <= 1024),
            is_near=lambda rows: rows["num_tokens"] <= 256,
            select_group=_of_three_matrices,
        ),
    )
    overhead_s: Annotated[float, Free(spread=1.0)] = 2e-5
    hidden_overhead_s: Annotated[float, Free(spread=1.0)] = 1e-9
    """Fixed time per number of the hidden state: products whose depth no split shortens."""
    expert_overhead_s: Annotated[float, Free(spread=1.5)] = 2e-7
    """Fixed time per expert that some token chose."""
    bandwidth_efficiency: Annotated[float, Free(spread=0.2)] = 0.8
    flops_efficiency: Annotated[float, Free(spread=0.4)] = 0.6
    activation_efficiency: Annotated[float, Free(spread=0.7)] = 0.5
    """Share of the memory's bandwidth for the tokens' copies by expert and their sum."""
    ridge_power: Annotated[float, Free(scale="above_one")] = 1.7
    tile_rows: Annotated[float, Free(spread=0.8)] = 10.0
    """Tokens that an expert's product takes the time of, at least."""
    independence: Annotated[float, Free(spread=0.7, scale="unit")] = 0.93
    """Exponent below 1: t tokens touch as many experts as t to this power that choose evenly."""
    imbalance: Annotated[float, Free(spread=0.7)] = 0.15
    """How much longer the fullest expert makes products of many tokens."""

    @classmethod
    def may_borrow(cls, hw: Device, donor: Device, variant: str) -> bool:
        return hw.computes_in(variant) or variant in WEIGHT_ONLY

    def seconds(
        self, hw: Device, work: RankExperts, working_set: WorkingSet = None
    ) -> OpTime:
        tokens, hidden, width, experts, chosen = arrays(*work[:5])
        even = np.minimum(experts, chosen * tokens)
        touched = np.where(
            work.is_balanced,
            even,
            experts_touched(experts, chosen, tokens, self.independence),
        )
        rows = tokens * chosen / np.maximum(touched, 1e-9)
        per_expert = work.num_matrices * hidden * width
        weight_bytes = work.weight_bytes or bytes_per_element(work.weight_dtype)
        memory_s = touched * per_expert * weight_bytes
        memory_s = memory_s / (self.bandwidth_efficiency * hw.memory_bytes_per_s)
        uneven = 1.0 + self.imbalance * np.minimum(np.sqrt(rows / FULL_ROWS), 1.0)
        fullest = np.where(work.is_balanced, 1.0, uneven)
        padded = np.sqrt(rows**2 + self.tile_rows**2) * fullest
        rate = self.flops_efficiency * hw.compute_rate(work.compute_dtype)
        compute_s = 2.0 * touched * per_expert * padded / rate
        own = tokens
        if work.own_tokens is not None:
            own = as_array(work.own_tokens)
        copies = tokens * chosen * (2.0 * hidden + work.num_matrices * width)
        moved = 2.0 * (own * 2.0 * hidden + copies)
        moved_s = moved / (self.activation_efficiency * hw.memory_bytes_per_s)
        busy_s = soft_max(memory_s, compute_s, self.ridge_power) + moved_s
        fixed_s = self.overhead_s + hidden * self.hidden_overhead_s
        overhead_s = fixed_s + touched * self.expert_overhead_s
        return OpTime(overhead_s + busy_s, memory_s, compute_s, overhead_s)


def experts_curve(at: Where) -> MoeCurve | None:
    """The curve of fused kernels for experts of this format; None where the engine or the device
    has none.

    On Hopper the table's for fp8 per tensor reach 15-21 % of the bandwidth, which no measured
    server shows: of the two kinds of fp8 kernels, those that read weights faster. The tables' for
    mxfp4 widen its weights to 16 bits; where products run in it, nvfp4's are its like.
    """
    own = at.precision.kernels
    known = MoeCurve.variants(at.hw)
    alike: tuple[str, ...] = (own,)
    if own == "fp8":
        alike = ("fp8", "fp8_block")
    if own == "mxfp4" and matrix_dtype(*at) == own and "nvfp4" in known:
        alike = ("nvfp4",)
    if not at.engine.kernels.fused_experts:
        return None
    curves = [known[name] for name in alike if name in known]
    return max(curves, key=lambda curve: curve.bandwidth_efficiency, default=None)


def experts(at: Where, work: RankExperts, *, count: Any = 1.0) -> list[Op]:
    """`count` layers of routed experts, of which one rank holds `work.width` of each.

    When whole experts are divided over ranks, `num_experts` and `num_experts_per_tok` are one
    rank's share, and `own_tokens` those of `tokens` whose hidden states it has itself. By the curve
    of fused kernels where the engine has them and the device's were measured; else the touched
    experts' weights side by side, each for its share of tokens, or on a CPU one after the other.
    """
    hw, precision = at.hw, at.precision
    kernels = at.engine.kernels
    tokens = np.asarray(work.tokens, dtype=np.float64)
    width = work.width
    curve = experts_curve(at)
    independence = 1.0
    if curve is not None:
        independence = curve.independence
    touched = experts_touched(
        work.num_experts, work.num_experts_per_tok, tokens, independence
    )
    rows = tokens * work.num_experts_per_tok / np.maximum(touched, 1e-9)
    num_inner = work.num_matrices - 1.0
    side_by_side: Any = touched
    products: Any = count
    if hw.kind == "cpu" and not kernels.fused_experts:
        side_by_side = 1.0
        products = count * touched
    columns = side_by_side * width
    shared = {"m": rows, "count": products}
    parts = [
        linear("gate_up", at, n=num_inner * columns, k=work.hidden_size, **shared),
        linear("down", at, n=work.hidden_size, k=columns, **shared),
    ]
    if curve is None:
        if kernels.routing_kernels:
            chosen = tokens * work.num_experts_per_tok * work.hidden_size
            routing = streaming(
                "routing",
                at,
                num_bytes=chosen * precision.activation_bytes,
                num_kernels=kernels.routing_kernels,
                count=count,
            )
            parts.append(routing)
        return parts
    dtype = matrix_dtype(hw, at.engine, precision)
    work = work._replace(
        weight_dtype=precision.kernels,
        compute_dtype=dtype,
        weight_bytes=precision.weight_bytes,
    )
    time = curve.seconds(hw, work)
    (variant,) = (name for name, each in MoeCurve.variants(hw).items() if each is curve)
    basis = MoeCurve.basis(hw, f"{precision.kernels} experts", work, variant)
    cost = total([part.cost for part in parts])
    cost = cost.times(1.0 / np.asarray(count))
    return [
        operation(
            "experts",
            "experts",
            at,
            cost,
            time,
            dtype,
            basis=basis,
            count=count,
            factor=at.engine.kernels.experts_factor,
        )
    ]
