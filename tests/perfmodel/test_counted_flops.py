"""FLOPs of a pass against torch's counter on transformers' own modules, for every architecture that both know.

Passes: a prompt, a decoded token and a verification of several with the cache before them, windows and chunks
overstepped. Compared exactly, and to the last FLOP, is all that is a matrix product in both; what transformers computes
by another algorithm than a served model is taken out by module and counted apart:

- latent attention expands the latents of the whole context where serving absorbs the expansion: the absorbed products
  are counted by torch on tensors of their shapes;
- attention to chosen tokens is masked full attention there: counted over the chosen ones;
- Llama-4's experts are all computed for every token: the share of the chosen ones is taken;
- a recurrence is elementwise in decoding and quadratic in its chunked form: its projections are compared, its short
  convolution and state are not (kernels/recurrence.py says what is charged);
- the mean position in a chunk, where contexts around the pass's overstep it, has no counterpart in one pass: attention
  is left out, and compared with the mean over such contexts instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.specs.engine import load_engine
from magicdec.specs.hf_config import model_from_hf_config
from magicdec.specs.layers import Layer, MixtureOfExperts
from magicdec.specs.mixers import Attention, LatentAttention
from magicdec.specs.model import ModelSpec
from tests.perfmodel.passes import forward_pass
from tests.specs.architectures import READ_BY_TRANSFORMERS, draw
from tests.specs.test_oracle import their_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

A100, ENGINE = load_hardware("a100-sxm-80gb"), load_engine("magicdec-2024")
BATCH = 3
QUERIES = (5, 11, 1)
"""New tokens in successive passes over one cache."""
MASKED_BY_THE_FIRST_LAYER = {"minimax", "nemotron-nas"}
"""Their modules take a mask's length from the first layer: where it caches no tokens, they cannot verify several."""


def counted_passes(spec: ModelSpec, module: Any) -> Iterator[tuple[Any, int, int]]:
    """FLOPs by module and operation, new tokens, and tokens in the cache with them."""
    cache, length, first = None, 0, spec.layers[0].mixer
    verifies = spec.architecture not in MASKED_BY_THE_FIRST_LAYER or (
        first is not None and first.caches()
    )
    for query_len in QUERIES if verifies else (5, 1, 1):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            tokens = torch.zeros(BATCH, query_len, dtype=torch.long)
            cache = module(
                tokens, past_key_values=cache, use_cache=True
            ).past_key_values
        length += query_len
        yield counter.get_flop_counts(), query_len, length


def of(counts: Any, path: str, *products: str) -> int:
    """FLOPs in the module whose path ends so; of these kinds of product, where they are given."""
    return sum(
        flops
        for name, operations in counts.items()
        for operation, flops in operations.items()
        if name.endswith(path)
        and (not products or str(operation).removeprefix("aten.") in products)
    )


def absorbed(mixer: LatentAttention, query_len: int, kv_len: int) -> int:
    """Attention of every head to the latents themselves, with the expansion absorbed in queries and outputs."""
    rank, heads = mixer.kv_lora_rank, mixer.num_heads
    seen = kv_len if mixer.indexer is None else min(kv_len, mixer.indexer.top_k)

    def product(*shapes: tuple[int, int]) -> Any:
        return torch.matmul(
            *(torch.empty(BATCH, heads, *shape, device="meta") for shape in shapes)
        )

    with FlopCounterMode(display=False) as counter:
        product((query_len, mixer.qk_nope_head_dim), (mixer.qk_nope_head_dim, rank))
        product(
            (query_len, rank + mixer.qk_rope_head_dim),
            (rank + mixer.qk_rope_head_dim, seen),
        )
        product((query_len, seen), (seen, rank))
        product((query_len, rank), (rank, mixer.v_head_dim))
    return counter.get_total_flops()


def as_served(
    counts: Any, layer: Layer, index: int, query_len: int, kv_len: int
) -> float:
    """What to add to a layer's counted FLOPs for those of the algorithm that is served."""
    here, added = f"layers.{index}", 0.0
    if isinstance(layer.mixer, LatentAttention):
        scores = of(counts, f"{here}.self_attn", "bmm") - of(
            counts, f"{here}.self_attn.indexer", "bmm"
        )
        added += (
            absorbed(layer.mixer, query_len, kv_len)
            - scores
            - of(counts, f"{here}.self_attn.kv_b_proj")
        )
    elif layer.mixer is not None and layer.mixer.states():
        added -= of(counts, here, "bmm", "baddbmm", "convolution")
    elif isinstance(layer.mixer, Attention) and overstepped(layer, kv_len):
        added -= of(counts, f"{here}.self_attn", "bmm", "baddbmm")
    if (
        isinstance(layer.mlp, MixtureOfExperts)
        and layer.mlp.scoring == "sigmoid_of_input"
    ):
        idle = 1.0 - layer.mlp.num_experts_per_tok / layer.mlp.num_experts
        added -= idle * of(counts, f"{here}.feed_forward", "bmm")
    return added


def overstepped(layer: Layer, kv_len: int) -> bool:
    """Whether it attends by chunks, and the context is longer than half of one: then ours is the mean of a batch's."""
    mixer = layer.mixer
    return (
        isinstance(mixer, Attention)
        and mixer.mask == "chunk"
        and mixer.span is not None
        and 2 * kv_len > mixer.span
    )


def ours(spec: ModelSpec, query_len: int, kv_len: int) -> float:
    """Without the recurrences' own work, and without attention to part of a chunk."""
    whole = forward_pass(
        spec, A100, ENGINE, batch=BATCH, query_len=query_len, kv_len=kv_len
    )
    flops = sum(
        float(op.cost.flops) for op in whole.ops if op.name != "linear attention"
    )
    chunked = [layer for layer in spec.layers if overstepped(layer, kv_len)]
    for layer in chunked:
        alone = msgspec.structs.replace(spec, layers=(layer,))
        operations = forward_pass(
            alone, A100, ENGINE, batch=BATCH, query_len=query_len, kv_len=kv_len
        ).ops
        flops -= next(
            float(op.cost.flops) for op in operations if op.name == "attention"
        )
    return flops


@pytest.mark.parametrize(
    "seed",
    [
        0,
        pytest.param(1, marks=pytest.mark.exhaustive),
        pytest.param(2, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("model_type", READ_BY_TRANSFORMERS)
def test_flops_are_those_that_torch_counts_in_the_module(
    model_type: str, seed: int
) -> None:
    config = draw(model_type, seed)
    spec = model_from_hf_config(config, name=model_type, where=model_type)
    for counts, query_len, kv_len in counted_passes(
        spec, their_model(config, device="cpu")
    ):
        found = float(of(counts, "Global"))
        found += sum(
            as_served(counts, layer, i, query_len, kv_len)
            for i, layer in enumerate(spec.layers)
        )
        assert ours(spec, query_len, kv_len) == pytest.approx(found, rel=1e-12), (
            query_len,
            kv_len,
        )
