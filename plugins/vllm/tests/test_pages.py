"""What a draft may read, against its definition token by token. No engine is needed."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from graphs import Counted

from magicdec_vllm.pages import most_pages, slots_of, streaming_window

PAGE = 16


def tokens_read(
    row: np.ndarray, length: int, owner: dict[int, tuple[int, int]]
) -> list[tuple[int, int]]:
    """(sequence, position) of each slot that attention over this table and length reads."""
    found = []
    for place in range(length):
        sequence, page = owner[int(row[place // PAGE])]
        found.append((sequence, page * PAGE + place % PAGE))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_reads_its_own_sinks_and_its_last_tokens_within_the_budget(
    seed: int,
) -> None:
    """Ragged sequences with pages all over a cache; rows are padded with pages of nobody, as the engine's are."""
    rng = np.random.default_rng(seed)
    sink_pages, gamma = int(rng.integers(0, 3)), int(rng.integers(1, 8))
    budget = int(rng.integers((sink_pages + 2) * PAGE, 400))
    cached = rng.integers(1, 900, size=int(rng.integers(1, 9)))
    pages_of = -(-(cached + gamma) // PAGE)
    ids = rng.permutation(np.arange(1, pages_of.sum() + 1))
    table = np.zeros((len(cached), 80), dtype=np.int32)
    owner: dict[int, tuple[int, int]] = {}
    for sequence, count in enumerate(pages_of):
        table[sequence, :count], ids = ids[:count], ids[count:]
        owner |= {
            int(id_): (sequence, page)
            for page, id_ in enumerate(table[sequence, :count])
        }
    window = streaming_window(
        torch.from_numpy(table), torch.from_numpy(cached), budget=budget, sink_pages=sink_pages, page_size=PAGE,
        gamma=gamma,
    )  # fmt: skip
    for sequence, count in enumerate(cached.tolist()):
        for step in range(gamma):
            length = count + step + 1 - PAGE * int(window.num_left_out[sequence])
            read = tokens_read(window.table[sequence].numpy(), length, owner)
            assert all(whose == sequence for whose, _ in read)
            positions = [position for _, position in read]
            assert positions[-(step + 1) :] == list(
                range(count, count + step + 1)
            )  # the block's own
            kept = positions[: -(step + 1)]
            if count <= budget:
                assert kept == list(range(count))
                continue
            sinks = list(range(sink_pages * PAGE))
            assert kept[: len(sinks)] == sinks
            recent = kept[len(sinks) :]
            assert recent == list(range(recent[0], count))
            assert recent[0] % PAGE == 0
            assert budget - PAGE < len(kept) <= budget


def test_slots_are_those_of_the_table() -> None:
    table = torch.tensor([[7, 3, 9], [1, 2, 4]], dtype=torch.int32)
    positions = torch.tensor([[15, 16, 17], [31, 32, 33]])
    wanted = [[7 * 16 + 15, 3 * 16, 3 * 16 + 1], [2 * 16 + 15, 4 * 16, 4 * 16 + 1]]
    assert slots_of(table, positions, page_size=PAGE).tolist() == wanted


@pytest.mark.parametrize("batch", [1, 64])
def test_a_window_is_found_without_waiting_for_the_device(batch: int) -> None:
    """On a device without values, where whatever the host asked for would fail. Launches do not grow with the batch."""
    table = torch.zeros(batch, 4096, dtype=torch.int32, device="meta")
    cached = torch.zeros(batch, dtype=torch.int64, device="meta")
    with Counted() as counted:
        window = streaming_window(
            table, cached, budget=512, sink_pages=1, page_size=16, gamma=4
        )
        slots_of(table, cached[:, None] + torch.arange(4, device="meta"), page_size=16)
    assert window.table.shape == (batch, most_pages(budget=512, page_size=16, gamma=4))
    assert counted.launches <= 15
