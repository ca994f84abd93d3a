"""Top-k over pages against its definition, page by page: in plain torch, and in Triton's kernels (on a GPU where there
is one, interpreted otherwise). No engine is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
import triton
from torch import Tensor

from magicdec.errors import ConfigError
from magicdec.specs.vllm_plugin import DraftSettings, num_sink_pages
from magicdec_vllm.page_kernels import average_full_pages
from magicdec_vllm.page_scores import PageMeans, PageSelector, watch_layers
from magicdec_vllm.pages import memory_of_cache, streaming_window

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cpu" and not triton.knobs.runtime.interpret,
        reason="neither a GPU nor Triton's interpreter",
    ),
]
SCALE = 0.5


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are interpreted or compiled as they were when imported, also where an engine ran in between."""
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@dataclass
class Block:
    """The part of a block of drafts that a choice of pages concerns."""

    table: Tensor
    num_left_out: Tensor
    choices: dict[str, Any] = field(default_factory=dict)


def write(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Stores keys and values [T, K, D] in pages [N, K, S, 2·D]; negative slots are nobody's."""
    del layer
    is_own, size = slots >= 0, cache.shape[2]
    pages, at = slots[is_own] // size, slots[is_own] % size
    cache[pages, :, at] = torch.cat((key, value), dim=-1)[is_own]


def make_means(head_dim: int) -> PageMeans:
    impl = SimpleNamespace(
        do_kv_cache_update=write, forward=None, head_size=head_dim, scale=SCALE
    )
    return PageMeans(SimpleNamespace(impl=impl))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (16, torch.float32),
        pytest.param(48, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(128, torch.float16, marks=pytest.mark.slow),
    ],
)
def test_every_full_page_has_the_mean_of_what_it_holds(
    size: int, dtype: torch.dtype
) -> None:
    """Prefill in chunks, drafts that are verified or rejected, sequences that end, their pages taken over by others,
    rows of nobody: after each step, in plain torch and in the kernel."""
    rng, kv_heads, head_dim, num_pages = np.random.default_rng(0), 2, 24, 24
    means = make_means(head_dim)
    cache = torch.full(
        (num_pages, kv_heads, size, 2 * head_dim), torch.nan, dtype=dtype, device=DEVICE
    )
    by_kernel = torch.empty(num_pages, kv_heads, head_dim, dtype=dtype, device=DEVICE)
    free = list(rng.permutation(num_pages))
    sequences: list[tuple[list[int], int]] = []
    checked = 0
    for _ in range(40):
        if len(sequences) < 3:
            sequences.append(([], 0))
        slots = [-1]
        for index, (pages, cached) in enumerate(sequences):
            count = (
                int(rng.integers(1, 3 * size))
                if cached < size
                else int(rng.integers(1, 9))
            )
            while len(pages) * size < cached + count and free:
                pages.append(free.pop())
            count = min(count, len(pages) * size - cached)
            slots += [
                int(pages[at // size]) * size + at % size
                for at in range(cached, cached + count)
            ]
            kept = count if cached < size else int(rng.integers(0, count + 1))
            sequences[index] = (pages, cached + kept)
        slots_T = torch.tensor(slots, device=DEVICE)
        key, value = torch.randn(2, len(slots), kv_heads, head_dim, device=DEVICE).to(
            dtype
        )
        means._write_and_average(None, key, value, cache, slots_T)
        average_full_pages(cache[..., :head_dim], slots_T, by_kernel)
        for pages, cached in sequences:
            for page in pages[: cached // size]:
                exact = cache[page, :, :, :head_dim].double().mean(dim=1)
                for found in (means.means_NKD[page], by_kernel[page]):
                    assert torch.allclose(found.double(), exact, rtol=2**-7, atol=1e-3)
                checked += 1
        if rng.random() < 0.3 or not free:
            pages, _ = sequences.pop(int(rng.integers(len(sequences))))
            free += pages
    assert checked > 30


def exact_scores(query_AD: Tensor, means_PKD: Tensor) -> Tensor:
    """Of each candidate, by the definition."""
    group = len(query_AD) // means_PKD.shape[1]
    logits_AP = torch.stack([
        means_PKD[:, head // group].double() @ query.double() * SCALE for head, query in enumerate(query_AD)
    ])  # fmt: skip
    return logits_AP.softmax(dim=-1).sum(dim=0)


class Batch:
    """Ragged sequences with pages all over a cache whose means are random."""

    def __init__(
        self,
        cached: list[int],
        *,
        size: int,
        group: int,
        dtype: torch.dtype,
        settings: DraftSettings,
        kv_heads: int = 2,
    ) -> None:
        self.size, self.settings, self.heads = size, settings, group * kv_heads
        self.head_dim, self.dtype = 32, dtype
        self.columns = 2400 // size
        self.generator = torch.Generator().manual_seed(size + group)
        count = len(cached) * self.columns
        own = torch.randperm(count, generator=self.generator).view(
            len(cached), self.columns
        )
        self.own_BP = own.int().to(DEVICE)
        self.cached_B = torch.tensor(cached, device=DEVICE)
        self.means = make_means(self.head_dim)
        self.means.means_NKD = self.random(count, kv_heads, self.head_dim)
        passes: Any = SimpleNamespace(
            page_size=size, longest=2400, starts=self.cached_B
        )
        self.selector = PageSelector(
            {"layer": self.means}, settings, passes, num_rows=9, max_gamma=4
        )
        self.sinks = num_sink_pages(settings.num_sink_tokens, page_size=size)

    def random(self, *shape: int) -> Tensor:
        return (2 * torch.randn(shape, generator=self.generator)).to(DEVICE, self.dtype)

    def choose(self, row_B: Tensor) -> tuple[Tensor, Any, Tensor]:
        """The streaming table, the choice with its own table, and the query [B, heads, D]."""
        window = streaming_window(
            self.own_BP, self.cached_B, budget=self.settings.draft_budget, sink_pages=self.sinks, page_size=self.size,
            gamma=4,
        )  # fmt: skip
        block: Any = Block(window.table, window.num_left_out)
        choice = self.selector.choosing(
            block, self.own_BP, self.cached_B, row_B
        ).choices["layer"]
        query = self.random(
            len(self.own_BP) + 1, self.heads, self.head_dim
        )  # a graph's may be longer than the batch
        choice.choose(query)
        return window.table, choice, query


@pytest.mark.parametrize("is_kernel", [False, True])
@pytest.mark.parametrize(
    ("size", "group", "dtype", "budget"),
    [
        (16, 4, torch.float32, 160),
        (64, 3, torch.bfloat16, 512),
        (128, 2, torch.float32, 640),
    ],
)
def test_the_best_pages_are_read_beside_the_sinks_and_the_last(
    size: int,
    group: int,
    dtype: torch.dtype,
    budget: int,
    is_kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sequences shorter than the budget, at its edge, at a page's edge, much longer; and a row of nobody."""
    if not is_kernel and DEVICE == "cuda":
        pytest.skip("plain torch serves CPUs")
    monkeypatch.setenv("TRITON_INTERPRET", str(int(is_kernel)))
    cached = [7, budget, budget + 1, budget + size, 1999, 0, 2390]
    batch = Batch(
        cached,
        size=size,
        group=group,
        dtype=dtype,
        settings=DraftSettings(draft_method="topk", draft_budget=budget),
    )
    row_B = torch.tensor([3, 0, 1, 8, 2, -1, 4], device=DEVICE)
    streaming, choice, query = batch.choose(row_B)
    first, count = batch.sinks, choice.chosen_RC.shape[1]
    assert count >= 2
    for index, length in enumerate(cached):
        found, own = choice.table[index].tolist(), batch.own_BP[index].tolist()
        if length <= budget:
            assert found == streaming[index].tolist()
            continue
        assert (
            found[:first] + found[first + count :]
            == own[:first] + streaming[index].tolist()[first + count :]
        )
        last = own.index(found[first + count])
        assert (last + 1) * size <= length  # the last full page is read
        columns = [own.index(page) for page in found[first : first + count]]
        assert (
            columns == sorted(set(columns)) == choice.chosen_RC[row_B[index]].tolist()
        )
        assert first <= columns[0] <= columns[-1] < last
        scores = exact_scores(
            query[index], batch.means.means_NKD[batch.own_BP[index, first:last].long()]
        )
        chosen = torch.zeros(last - first, dtype=torch.bool, device=DEVICE)
        chosen[torch.tensor(columns, device=DEVICE) - first] = True
        assert scores[chosen].min() >= scores[~chosen].max() - 1e-5


@pytest.mark.parametrize(
    ("refresh", "is_kernel"),
    [(1, False), (3, True)],
)
def test_a_choice_serves_as_many_blocks_as_asked(
    refresh: int, is_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sequence by its own count, from the block at which it has pages to leave out; another one in its row, which
    is not as long as a block could have made it, chooses anew."""
    if not is_kernel and DEVICE == "cuda":
        pytest.skip("plain torch serves CPUs")
    monkeypatch.setenv("TRITON_INTERPRET", str(int(is_kernel)))
    settings = DraftSettings(draft_method="topk", draft_budget=160, refresh=refresh)
    batch = Batch(
        [900, 150, 400], size=16, group=2, dtype=torch.float32, settings=settings
    )
    row_B = torch.tensor([5, 0, 2], device=DEVICE)
    passes, kept = np.zeros(3, dtype=int), {}
    for step in range(12):
        _, choice, _ = batch.choose(row_B)
        is_new = choice.stop_B > 0
        passes += is_new.cpu().numpy()
        for index in range(3):
            chosen = choice.chosen_RC[row_B[index]].tolist()
            if (
                index in kept and index != 1
            ):  # the second has one page to leave out: another choice may be the same
                assert bool(is_new[index]) == (chosen != kept[index])
            assert is_new[index] or chosen == kept.get(index, chosen)
            kept[index] = chosen
        batch.cached_B += torch.tensor([5, 4, 1], device=DEVICE)
        if step == 6:
            batch.cached_B[2] = 300
    assert batch.cached_B[1] > 160 + 4
    assert passes.tolist() == ([12, 9, 12] if refresh == 1 else [4, 3, 5])


@pytest.mark.slow
def test_page_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """For sm_80 and sm_90: within their shared memory, without spilled registers."""
    plugin = Path(__file__).parents[1]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(plugin.parents[1]), str(plugin)]),
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_page_kernels.py"))],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {"_average_kernel", "_logits_kernel", "_choose_pages_kernel"}
    assert {row["kernel"] for row in compiled} == kernels
    limit = {80: 163 * 1024, 90: 227 * 1024}
    for row in compiled:
        assert row["shared_bytes"] <= limit[row["capability"]], row
        assert row["spilled_bytes"] == 0, row


def test_means_and_scores_take_their_share_of_the_memory() -> None:
    """As many pages as fit with a mean of half a key and value's size, in units of one vector."""
    left = memory_of_cache(1000 * 33 * 2 + 4 * 50, page_size=16, num_scores=50)
    assert left == 1000 * 32 * 2


def test_backends_that_keep_pages_elsewhere_are_refused() -> None:
    layer = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "FLASHINFER"))
    context = {"experts": SimpleNamespace(), "attention": layer}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context)
    )
    with pytest.raises(
        ConfigError,
        match="attention backend FLASHINFER; use --attention-backend FLASH_ATTN",
    ):
        watch_layers(config)
