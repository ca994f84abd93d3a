"""Work on logits: the choice of tokens, and their acceptance."""

from __future__ import annotations

import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.kernels.gemm import streaming
from magicdec.perfmodel.kernels.links import Message, all_gather, all_reduce
from magicdec.perfmodel.kernels.op import FP32_BYTES, Op, fixed
from magicdec.perfmodel.setup import Setup


def sampling_ops(
    setup: Setup, *, rows: Array, ranks: Array, vocab_size: int
) -> list[Op]:
    """One token drawn from each of `rows` rows of logits (or the greatest taken)."""
    engine = setup.engine
    if setup.sampling.is_greedy:
        passes = engine.sampling.greedy_passes
        given = engine.sampling.greedy_s_per_element
    else:
        passes = engine.sampling.sampling_passes
        given = engine.sampling.sampling_s_per_element
    return vocabulary_ops(
        setup,
        "sampling",
        rows=rows,
        ranks=ranks,
        size=vocab_size,
        base_s=engine.sampling.sampling_base_s,
        passes=passes,
        given=given,
    )


def vocabulary_ops(
    setup: Setup,
    name: str,
    *,
    rows: Array,
    ranks: Array,
    size: int,
    base_s: float,
    passes: float,
    given: float | None,
) -> list[Op]:
    """Work on rows × vocabulary in fp32, after a gather of the logits on every rank, or on each
    rank's shard: by passes over memory, or by a measured time per element, which a sort lengthens
    by its share of passes."""
    engine, at = setup.engine, setup.at
    is_filtered = setup.sampling.top_p is not None or setup.sampling.top_k is not None
    if is_filtered and not setup.sampling.is_greedy:
        sort = engine.sampling.top_p_passes
    else:
        sort = 0.0
    gathers = engine.sampling.vocabulary == "gather"
    elements = rows * size / (1.0 if gathers else ranks)
    if base_s:
        operations = [fixed(name, "overhead", base_s)]
    else:
        operations = []
    if given is not None:
        each_s = given * (passes + sort) / max(passes, 1e-9)
        operations.append(fixed(name, "elementwise", elements * each_s))
    elif passes + sort:
        num_bytes = elements * FP32_BYTES * (passes + sort)
        operations.append(
            streaming(
                name,
                at,
                num_bytes=num_bytes,
                num_kernels=np.ceil((passes + sort) / 2.0),
            )
        )
    if np.any(ranks > 1):
        if gathers:
            operations.append(
                all_gather(
                    at, Message(elements * setup.precision.activation_bytes, ranks)
                )
            )
        else:  # maximum and sum of each row
            operations.append(
                all_reduce(at, Message(rows * 2.0 * FP32_BYTES, ranks), count=2.0)
            )
    return operations
