"""Layers that see a window or a chunk of the tokens before: what their passes compute, against attention under the
masks that transformers makes; and the rings that keep such tokens, against caches that keep all and what is planned.

Shape suffixes: N tokens of a sequence, P parts (keys and values), A query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.masking_utils import (
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from magicdec.errors import ConfigError
from magicdec.perfmodel.footprint import kv_bytes
from magicdec.runtime.attention import Scoring, Workspace
from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.engine import DecodePass, Engine
from magicdec.runtime.generate import INACTIVE, DecodeOptions, decode
from magicdec.runtime.kv_cache import KVCache, TokenStorage
from magicdec.runtime.prefill import PrefillPass
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import load_model
from magicdec.specs.engine import load_engine
from magicdec.specs.hf_config import model_from_hf_config
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import SamplingSpec
from tests.runtime.conftest import started, tiny_spec
from tests.runtime.drafts import DRAFTS, TakesTurns, draft_model_for
from tests.specs.architectures import draw

HEADS, KV_HEADS, LENGTH, SPAN, GAMMA = 4, 2, 60, 11, 3
PROMPTS = (5, 23, 40)
"""Shorter than the span, and longer."""
Mask = Literal["window", "chunk"]


def their_mask(mask: Mask) -> Tensor:
    """Whether a query sees a token, [N, N]."""
    config = LlamaConfig(num_attention_heads=HEADS)
    config._attn_implementation = "eager"  # whose masks are added to the scores
    config.sliding_window = config.attention_chunk_size = SPAN
    make = (
        create_sliding_window_causal_mask
        if mask == "window"
        else create_chunked_causal_mask
    )
    added = make(
        config=config, inputs_embeds=torch.zeros(1, LENGTH, 8), attention_mask=None, past_key_values=None,
        position_ids=torch.arange(LENGTH)[None],
    )  # fmt: skip
    assert isinstance(added, Tensor)
    return added[0, 0] == 0


@dataclass(frozen=True)
class Text:
    """Queries, keys and values of each token of a batch, and what attention gives for them by its definition."""

    query_BNAD: Tensor
    kv_BNPKD: Tensor
    output_BNE: Tensor

    def part(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.query_BNAD[row : row + 1, start:stop], self.kv_BNPKD[
            row : row + 1, start:stop
        ]


def random_text(mask: Mask, head_dim: int) -> Text:
    generator = torch.Generator().manual_seed(head_dim)
    query = torch.randn(len(PROMPTS), LENGTH, HEADS, head_dim, generator=generator)
    kv = torch.randn(len(PROMPTS), LENGTH, 2, KV_HEADS, head_dim, generator=generator)
    keys, values = kv.repeat_interleave(HEADS // KV_HEADS, dim=3).unbind(2)
    scores = torch.einsum("bnad,bsad->bans", query, keys) * 0.3
    weights = scores.masked_fill(~their_mask(mask), -torch.inf).softmax(-1)
    return Text(query, kv, torch.einsum("bans,bsad->bnad", weights, values).flatten(2))


@pytest.mark.parametrize("static_shapes", [False, True])
@pytest.mark.parametrize("spare", [None, GAMMA])
@pytest.mark.parametrize(
    "head_dim", [pytest.param(8, marks=pytest.mark.slow), 16]
)  # kernels take 16 alone
@pytest.mark.parametrize("part", [1, 7, 64])
@pytest.mark.parametrize("mask", ["window", "chunk"])
def test_passes_see_what_transformers_masks_show(
    mask: Mask, part: int, head_dim: int, spare: int | None, static_shapes: bool
) -> None:
    """Prompts in parts, and then blocks of which some tokens, or all, are rejected: a rejected token is another one
    than what comes in its place. With all slots, and in the shortest ring that holds what a block sees."""
    text = random_text(mask, head_dim)
    scoring = Scoring(
        scale=0.3,
        window=SPAN if mask == "window" else None,
        chunk=SPAN if mask == "chunk" else None,
    )
    kept = TokenStorage(num_heads=KV_HEADS, head_dim=head_dim, span=SPAN)
    cache = KVCache(
        {0: kept}, batch_size=len(PROMPTS), num_slots=LENGTH, dtype=torch.float32, device=torch.device("cpu"),
        spare=spare,
    )  # fmt: skip
    assert cache.ring(0) == (None if spare is None else SPAN + spare)
    for row, length in enumerate(PROMPTS):
        for start in range(0, length, part):
            stop = min(start + part, length)
            prefill = PrefillPass(
                cache, row=row, num_past=start, num_tokens=stop - start
            )
            found = prefill.attend(0, *text.part(row, start, stop), scoring)[0]
            torch.testing.assert_close(
                found, text.output_BNE[row, start:stop], atol=1e-5, rtol=1e-5
            )
    lengths, generator = np.array(PROMPTS), np.random.default_rng(1)
    while lengths.max() + GAMMA + 1 <= LENGTH:
        block = torch.arange(GAMMA + 1) + torch.from_numpy(lengths)[:, None]
        rows = torch.arange(len(PROMPTS))[:, None]
        num_right = generator.integers(0, GAMMA + 2, len(PROMPTS))
        query, kv = text.query_BNAD[rows, block], text.kv_BNPKD[rows, block].clone()
        for row, count in enumerate(num_right):
            kv[row, count:] = 100.0
        attention = DecodePass(
            cache, lengths_B=torch.from_numpy(lengths), host_lengths=lengths, num_tokens=GAMMA + 1,
            workspace=Workspace(), static_shapes=static_shapes,
        )  # fmt: skip
        found = attention.attend(0, query, kv, scoring)
        for row, count in enumerate(num_right):
            expected = text.output_BNE[row, lengths[row] : lengths[row] + count]
            torch.testing.assert_close(
                found[row, :count], expected, atol=1e-5, rtol=1e-5
            )
        lengths = lengths + num_right


TINY: dict[str, object] = {"num_hidden_layers": 3, "sliding_window": 6}
WINDOWED = tiny_spec(
    model_type="qwen2", use_sliding_window=True, max_window_layers=1, **TINY
)
"""A layer of full attention, and two of windows."""
LONGER = {"max_gamma": GAMMA, "max_back": 1000}
"""Of an engine: no ring is shorter than the context."""
SHORTER = {"max_gamma": GAMMA, "max_back": 5}


@pytest.fixture(scope="module")
def windowed() -> Transformer:
    return load_model(WINDOWED, weights="random", seed=3)


@pytest.fixture(scope="module")
def windowed_draft() -> Transformer:
    return load_model(
        tiny_spec(model_type="mistral", hidden_size=16, **TINY),
        weights="random",
        seed=9,
    )


def in_turn() -> Iterator[Any]:
    """Every draft greedy or sampled, in turn: the first and every third by default, the others in the slow tests."""
    for number, draft in enumerate([None, *DRAFTS]):
        marks = () if number % 3 == 0 else pytest.mark.slow
        yield pytest.param(draft, float(number % 2), marks=marks)


@pytest.mark.parametrize(("draft", "temperature"), [*in_turn()])
def test_rings_decode_what_whole_caches_do(
    draft: str | None,
    temperature: float,
    windowed: Transformer,
    windowed_draft: Transformer,
) -> None:
    """The same tokens, and as many accepted: ragged prompts that end at different times, gammas that change (0
    included), a queue, and a second run from the same prompts with the same drafter."""
    generator, results = np.random.default_rng(4), []
    prompts = [generator.integers(0, 64, n).tolist() for n in (5, 41, 19, 30)]
    for bounds in (LONGER, SHORTER):
        engine = Engine(windowed, batch_size=3, max_len=120, **bounds)
        assert (len(engine.cache.rings) > 0) == (bounds is SHORTER)
        engine.prefill(prompts[:3], chunk=16)
        snapshot = engine.snapshot()
        drafter = None
        if draft is not None:
            network = draft_model_for(DRAFTS[draft], windowed)
            if DRAFTS[draft].draft == "small":
                network = windowed_draft
            drafter = build_drafter(DRAFTS[draft], engine, network)
        for queue in ([], prompts[3:]):
            engine.restore(snapshot)
            options = DecodeOptions(
                gamma=0 if drafter is None else GAMMA, max_new_tokens=[24, 40, 20, 30][: 3 + len(queue)], queue=queue,
                policy=None if drafter is None else TakesTurns(),
            )  # fmt: skip
            results.append(
                decode(
                    engine,
                    drafter,
                    SamplingSpec(temperature=temperature, seed=5),
                    options,
                )
            )
    for whole, ring in zip(results[:2], results[2:], strict=True):
        assert ring.tokens == whole.tokens
        assert np.array_equal(ring.num_accepted, whole.num_accepted)
    assert results[0].tokens == results[1].tokens[:3] or temperature > 0


def test_a_draft_model_that_has_long_been_left_behind_catches_up_in_its_ring(
    windowed_draft: Transformer,
) -> None:
    """The target as its own draft is accepted always, also after more steps alone than its ring has slots to spare."""

    class AloneForLong:
        step = -1

        def choose(self, *, batch_size: int, context_len: float) -> int:
            self.step += 1
            return 0 if self.step % 30 < 23 else GAMMA

    engine = started(
        windowed_draft, [[1, 5, 9] * 12, [4, 8]], 200, max_gamma=GAMMA, max_back=0
    )
    drafter = build_drafter(DRAFTS["model"], engine, windowed_draft)
    options = DecodeOptions(gamma=GAMMA, max_new_tokens=120, policy=AloneForLong())
    result = decode(engine, drafter, SamplingSpec(temperature=1.0, seed=2), options)
    assert {0, GAMMA} == set(result.gammas.tolist())
    accepted = np.where(
        result.num_accepted == INACTIVE, result.gammas[:, None], result.num_accepted
    )
    assert (accepted == result.gammas[:, None]).all()


def test_what_has_left_a_ring_is_not_observed(windowed: Transformer) -> None:
    engine = started(windowed, [[1, 2, 3] * 9], 60, **SHORTER)
    spec = msgspec.structs.replace(DRAFTS["snapkv"], observation_window=6)
    drafter = build_drafter(spec, engine, None)
    with pytest.raises(
        ConfigError, match="the last 5 tokens here; observe at most so many, not 6"
    ):
        decode(
            engine, drafter, SamplingSpec(), DecodeOptions(gamma=1, max_new_tokens=3)
        )


@pytest.mark.parametrize(
    "model_type", ["gemma3_text", "gpt_oss", "llama4_text", "mistral", "llama"]
)
def test_an_engine_allocates_what_the_planner_counts(model_type: str) -> None:
    """Bytes per sequence, layer by layer and at once, of a context that is much longer than the windows: exactly."""
    config = {**draw(model_type, 1), "max_position_embeddings": 4096}
    spec = model_from_hf_config(config, name=model_type, where=model_type)
    model = load_model(spec, weights="random")
    for length in (20, 3000):
        cache = Engine(model, batch_size=2, max_len=length).cache
        planned = kv_bytes(
            spec, load_engine("ours"), Precision(kv_dtype="fp32"), length, 1
        )
        assert sum(block.data.nbytes for block in cache.blocks) == 2 * float(planned)
        slots = {layer: cache.read(layer, slice(1))[0].shape[2] for layer in cache.kept}
        for layer, kind in enumerate(spec.layers):
            span = getattr(kind.mixer, "span", None)
            assert slots[layer] == min(
                length + 32, length + 32 if span is None else span + 64
            )
    assert (len(set(slots.values())) > 1) == (
        model_type in ("gemma3_text", "gpt_oss", "llama4_text")
    )
