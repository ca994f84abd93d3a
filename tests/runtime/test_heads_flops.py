"""Products of a trained head's step, as torch counts them in the runtime, against the model's."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from magicdec.perfmodel.kernels.profile import load_hardware  # noqa: E402
from magicdec.perfmodel.setup import Setup  # noqa: E402
from magicdec.perfmodel.step import step_terms  # noqa: E402
from magicdec.runtime.drafters import build_drafter  # noqa: E402
from magicdec.runtime.generate import DecodeOptions, decode  # noqa: E402
from magicdec.runtime.transformer import Transformer  # noqa: E402
from magicdec.specs.engine import load_engine  # noqa: E402
from magicdec.specs.precision import Precision  # noqa: E402
from magicdec.specs.speculation import (  # noqa: E402
    HeadSpec,
    SamplingSpec,
    SpeculationSpec,
)
from tests.runtime.conftest import started  # noqa: E402
from tests.runtime.heads import random_head, random_layout  # noqa: E402

BATCH = 3
CONTEXT = 40
NUM_STEPS = 3
PRODUCTS = ("aten.mm", "aten.addmm")
"""Of matrices with weights; attention's are not counted."""


def counted(model: Transformer, method: str, gamma: int, num_steps: int) -> int:
    """FLOPs of a run of greedy steps with a random head, whose drafts are accepted or not as it
    comes."""
    generator = np.random.default_rng(1)
    prompts = [
        generator.integers(0, model.spec.vocab_size, CONTEXT).tolist()
        for _ in range(BATCH)
    ]
    engine = started(model, prompts, 300)
    draft = SpeculationSpec(draft=method, draft_method=method, gamma=gamma)
    drafter = build_drafter(draft, engine, random_head(method, model))
    options = DecodeOptions(gamma=gamma, max_new_tokens=200, max_steps=num_steps)
    with FlopCounterMode(display=False) as counter:
        decode(engine, drafter, SamplingSpec(), options)
    flops = 0
    for operation, number in counter.get_flop_counts()["Global"].items():
        if str(operation) in PRODUCTS:
            flops += number
    return flops


def predicted(model: Transformer, method: str, gamma: int) -> float:
    """FLOPs of one step's products: the head's, and the target's verification."""
    layout = random_layout(method, model.spec)
    mixer = layout.spec.layers[0].mixer
    head = HeadSpec(
        method=method,
        num_layers=layout.spec.num_hidden_layers,
        vocab_size=layout.draft_vocab_size,
        width=layout.spec.layers[0].mlp.width,
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
    )
    target = msgspec.structs.replace(model.spec, mtp_layers=layout.spec.layers)
    setup = Setup(
        model=target,
        hardware=load_hardware("h100"),
        engine=load_engine("ours"),
        speculation=SpeculationSpec(
            draft=method, draft_method=method, gamma=gamma, head=head
        ),
        sampling=SamplingSpec(),
        precision=Precision(),
    )
    terms = step_terms(
        setup, batch=BATCH, kv_len=CONTEXT, draft_kv_len=CONTEXT, gamma=gamma
    )
    flops = 0.0
    if method == "dflash":  # our runtime computes queries of its context too
        queries = mixer.num_heads * mixer.head_dim * model.spec.hidden_size
        flops = 2.0 * BATCH * (gamma + 1) * queries * layout.spec.num_hidden_layers
    for time, count in ((terms.draft, gamma), (terms.verify, 1), (terms.upkeep, 1)):
        for op in time.ops:
            if op.group == "gemm":
                flops += count * float(op.cost.flops)
    return flops


@pytest.mark.parametrize("gamma", [2, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "p-eagle", "dflash"])
def test_products_of_a_heads_step_are_those_that_torch_counts(
    tiny_model: Transformer, method: str, gamma: int
) -> None:
    """The first pass of a block takes in the tokens that were verified, so the second step on is
    counted: the step before it verified as many."""
    one = counted(tiny_model, method, gamma, 1)
    more = counted(tiny_model, method, gamma, 1 + NUM_STEPS)
    found = (more - one) / NUM_STEPS
    assert predicted(tiny_model, method, gamma) == pytest.approx(found, rel=1e-9)
