"""Every head drafts what the speculators library's modules do.

tests/data/heads has tiny checkpoints that the library wrote, and the proposals and logits of a
plain loop over its modules without a cache (scripts/head_fixtures.py, speculators 0.9.0).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.drafters.base import ProposalBuilder
from magicdec.runtime.engine import Engine
from magicdec.runtime.heads.builder import load_head
from magicdec.runtime.heads.chain import Head
from magicdec.runtime.weights import load_model
from magicdec.specs.speculation import SpeculationSpec

FIXTURES = Path(__file__).parents[1] / "data" / "heads"
NAMES = sorted(
    path.name for path in FIXTURES.iterdir() if (path / "expected.json").is_file()
)
GAMMA = 4
TOLERANCE = 1e-5


def spec_of(head: Head) -> SpeculationSpec:
    method = head.layout.method
    return SpeculationSpec(draft=method, draft_method=method, gamma=GAMMA)


def rows_of(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(
        (FIXTURES / name / "expected.json").read_text()
    )
    return rows


@pytest.mark.parametrize(
    ("dtype", "is_early"),
    [
        ("float32", True),
        ("float64", False),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_proposals_and_logits_are_the_librarys(
    name: str, is_early: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a ragged batch, prefilled in parts, whether the head sees the prefill or comes later. In float32, in which
    the library wrote its logits, the first step's are equal to 1e-5: later steps carry the rounding of those before on,
    by which two ways of adding differ more. So these are computed in float64: what is left is the library's rounding.
    """
    target = load_model(FIXTURES / "target", dtype=dtype)
    head = load_head(FIXTURES / name, target)
    seen: list[torch.Tensor] = []
    choose = ProposalBuilder.choose

    def record(builder: ProposalBuilder, logits_BV: torch.Tensor) -> torch.Tensor:
        seen.append(logits_BV)
        return choose(builder, logits_BV)

    monkeypatch.setattr(ProposalBuilder, "choose", record)
    rows = rows_of(name)
    prompts = [row["prompt"] for row in rows]
    engine = Engine(target, batch_size=len(prompts), max_len=64)
    if is_early:
        drafter = build_drafter(spec_of(head), engine, head)
        engine.prefill(prompts, chunk=5)
    else:
        engine.prefill(prompts, chunk=5)
        drafter = build_drafter(spec_of(head), engine, head)
    assert drafter is not None
    with torch.inference_mode():
        drafter.begin()
        proposal = drafter.propose(GAMMA, None)
    assert proposal.tokens_BT.tolist() == [row["drafted"] for row in rows]
    expected = load_file(FIXTURES / name / "expected.safetensors")
    for number in range(len(prompts)):
        ours = torch.stack([logits[number] for logits in seen]).double()
        theirs = expected[f"logits.{number}"].double()
        difference = (ours - theirs).abs().amax(dim=-1)
        if dtype == "float32":
            assert difference[0] <= TOLERANCE
        else:
            assert (difference <= TOLERANCE * theirs.abs().amax(dim=-1)).all()
