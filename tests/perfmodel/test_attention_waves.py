"""The engine profile's word on attention's last wave, and on a standalone draft's ranks, reaches the time of a step."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.setup import Setup, draft_tp
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import EngineProfile
from magicdec.specs.speculation import SpeculationSpec
from tests.perfmodel.passes import forward_pass

SMOOTH = EngineProfile(name="smooth")
WAVES = msgspec.structs.replace(SMOOTH, attention_blocks_per_multiprocessor=2.0, attention_wave_weight=1.0)


def attention_s(engine: EngineProfile, batch: list[int]) -> np.ndarray:
    """Llama-2-7B at tp 8: 4 KV heads per rank, so 4 blocks per sequence; the A100 runs 216 at a time."""
    time = forward_pass(
        load_model_spec("llama-2-7b-32k"), load_hardware("a100-sxm-80gb"), engine, batch=batch, query_len=1,
        kv_len=8000, tp_size=8,
    )  # fmt: skip
    return next(op.time_s for op in time.ops if op.name == "attention")


def test_a_last_wave_that_is_not_full_costs_a_whole_one() -> None:
    batch = [32, 48, 64, 108, 128]
    longer = attention_s(WAVES, batch) / attention_s(SMOOTH, batch)
    blocks = 4 * np.array(batch)
    expected = np.where(blocks <= 216, 1.0, np.ceil(blocks / 216) * 216 / blocks)
    np.testing.assert_allclose(longer, expected)


@pytest.mark.parametrize(("said", "runtime", "ranks"), [(None, None, 4), (None, 1, 1), (2, 1, 2)])
def test_a_standalone_draft_runs_where_it_is_said_or_where_the_runtime_puts_it(
    said: int | None, runtime: int | None, ranks: int
) -> None:
    setup = Setup(
        model=load_model_spec("llama-2-7b-32k"),
        draft_model=load_model_spec("tinyllama-1.1b"),
        hardware=load_hardware("a100-sxm-80gb"),
        engine=msgspec.structs.replace(SMOOTH, standalone_draft_tp_size=runtime),
        speculation=SpeculationSpec(
            draft="tinyllama-1.1b", draft_method="streamingllm", draft_budget=512, gamma=2, draft_tp_size=said
        ),
    )
    assert float(draft_tp(setup, 4)) == ranks
