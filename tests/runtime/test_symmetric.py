"""All-reduce through symmetric memory: which messages take it, what happens without it, and its sums on two GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from magicdec.runtime import symmetric
from magicdec.runtime.distributed import TensorParallel
from magicdec.runtime.drafter import build_drafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.generate import DecodeOptions, decode
from magicdec.runtime.graphs import capture
from magicdec.runtime.launch import launch
from magicdec.runtime.symmetric import SymmetricMemory, choose_algorithm, largest_bytes
from magicdec.runtime.weights import load_model
from magicdec.specs.speculation import SamplingSpec
from magicdec.units import KIB, MIB
from tests.runtime.conftest import tiny_spec
from tests.runtime.drafts import DRAFTS

A100, H200, B200 = (8, 0), (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("num_bytes", "num_ranks", "capability", "has_switch", "expected"),
    [
        (4, 8, H200, True, "one_shot"),
        (128 * KIB, 8, H200, True, "one_shot"),
        (128 * KIB + 4, 8, H200, True, "in_switch"),
        (128 * KIB + 4, 8, H200, False, "two_shot"),
        (128 * KIB + 4, 2, H200, True, "two_shot"),
        (32 * MIB, 4, H200, True, "in_switch"),
        (32 * MIB + 4, 4, H200, True, None),
        (MIB, 4, B200, True, "two_shot"),
        (MIB, 8, B200, True, "in_switch"),
        (9 * MIB, 8, B200, True, None),
        (128 * KIB, 4, A100, False, "one_shot"),
        (128 * KIB + 4, 4, A100, False, None),
    ],
)
def test_the_message_size_chooses_how_it_is_added_up(
    num_bytes: int, num_ranks: int, capability: tuple[int, int], has_switch: bool, expected: str | None
) -> None:
    assert choose_algorithm(num_bytes, num_ranks=num_ranks, capability=capability, has_switch=has_switch) == expected
    assert expected is None or num_bytes <= largest_bytes(capability)


def memory_of(num_ranks: int, num_bytes: int = MIB) -> SymmetricMemory:
    """On a CPU, where torch has no kernels for it."""
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    return SymmetricMemory(buffer=buffer, group_name="", num_ranks=num_ranks, capability=H200, has_switch=True)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(8, dtype=torch.long),
        torch.zeros(8, dtype=torch.float16),
        torch.zeros(8, 8).T,
        torch.zeros(9)[1:],
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(0),
    ],
    ids=["int64", "float16", "not contiguous", "not aligned", "not whole words", "empty"],
)
def test_what_the_kernels_cannot_add_is_left_to_nccl(tensor: Tensor) -> None:
    before = tensor.clone()
    assert not memory_of(2).all_reduce(tensor)
    assert torch.equal(tensor, before)


MESSAGES = [(2, 3, 8), (1, 1, 64 * 1024), (5, 40_000)]
"""One shot in both dtypes; one shot or more; more than that."""


def reduce_by_stand_ins(tp: TensorParallel) -> list[tuple[Tensor, Tensor]]:
    """What goes in and comes out of torch's operations, in whose place gloo adds the buffer."""

    def one_shot(message: Tensor, how: str, group_name: str, out: Tensor) -> None:
        out.copy_(message)
        dist.all_reduce(out)

    def in_place(message: Tensor, how: str, group_name: str) -> None:
        dist.all_reduce(message)

    for name, stand_in in zip(symmetric.OPERATIONS, (one_shot, in_place, in_place), strict=True):
        setattr(torch.ops.symm_mem, name, stand_in)
    through_memory = TensorParallel(rank=tp.rank, size=tp.size, symmetric=memory_of(tp.size))
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.long):
        for shape in MESSAGES:
            tensor = torch.arange(torch.Size(shape).numel()).view(shape).remainder(31).to(dtype) + tp.rank
            results.append((through_memory.all_reduce(tensor.clone()), tp.all_reduce(tensor.clone())))
    return results


def test_sums_come_back_in_place_whichever_way_they_took() -> None:
    for found, expected in launch(reduce_by_stand_ins, 2):
        assert torch.equal(found, expected)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the second of a machine's four GPUs sees it."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: own != peer)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")


@pytest.mark.usefixtures("four_gpus")
def test_gpus_that_read_each_other_share_memory_unless_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert symmetric._is_reachable(4)
    assert symmetric._is_reachable(2)
    monkeypatch.setenv("MAGICDEC_SYMMETRIC_MEMORY", "0")
    assert not symmetric._is_reachable(4)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    "lack", ["ranks on another machine", "no GPU for each rank", "no access", "no operation", "ROCm"]
)
def test_where_they_cannot_everything_is_left_to_nccl(lack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lack == "ranks on another machine":
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    elif lack == "no GPU for each rank":
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    elif lack == "no access":
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: peer != 3)
    elif lack == "no operation":
        monkeypatch.setattr(symmetric, "OPERATIONS", (*symmetric.OPERATIONS, "three_shot_all_reduce"))
    else:
        monkeypatch.setattr(torch.version, "cuda", None)
    assert not symmetric._is_reachable(4)


@pytest.mark.usefixtures("four_gpus")
def test_memory_that_cannot_be_shared_after_all_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that may not hand memory from process to process."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("pidfd_getfd: Operation not permitted")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: H200)
    monkeypatch.setattr("torch.distributed._symmetric_memory.empty", refuse)
    assert symmetric._open(SimpleNamespace(group_name="ranks")) is None


def describe(tp: TensorParallel) -> tuple[bool, bool, list[list[float]]]:
    return tp.symmetric is None, tp.can_capture, tp.all_gather(torch.tensor([1.0, 2.0]) + tp.rank).tolist()


def test_ranks_on_cpus_have_neither_symmetric_memory_nor_graphs() -> None:
    assert launch(describe, 2) == (True, False, [[1.0, 2.0], [2.0, 3.0]])
    assert TensorParallel().can_capture


def reduce_on_gpus(tp: TensorParallel) -> list[str]:
    """Messages of every size against NCCL's sums in fp32, plainly and from a graph; what is wrong."""
    assert tp.symmetric is not None
    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        for num_elements in (8, 4096, 50_000, 1_000_000, 20_000_000):
            generator = torch.Generator(device="cuda").manual_seed(num_elements + tp.rank)
            source = torch.randn(num_elements, device="cuda", generator=generator).to(dtype)
            exact = source.float()
            dist.all_reduce(exact)
            tensor = torch.empty_like(source)

            def add(tensor: Tensor = tensor, source: Tensor = source) -> Tensor:
                return tp.all_reduce(tensor.copy_(source))

            what = f"{num_elements} of {dtype}, {tp.symmetric.algorithm_for(tensor)}"
            add()
            plain = tensor.clone()
            replay, _, _ = capture(add, None)
            for _ in range(3):
                tensor.zero_()
                replay()
                if not torch.equal(tensor, plain):
                    wrong.append(f"{what}: replayed")
            first, *others = tp.all_gather(plain).unbind(0)
            if any(not torch.equal(first, other) for other in others):
                wrong.append(f"{what}: ranks differ")
            if not torch.allclose(plain.float(), exact, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=5e-2):
                wrong.append(f"{what}: not the sum")
    return wrong


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_agree_on_every_bit_of_a_sum() -> None:
    """Plainly and from a graph, of messages that go each way."""
    assert launch(reduce_on_gpus, 2, device_type="cuda") == []


def decode_on_gpus(tp: TensorParallel) -> list[bool]:
    """For each draft, whether captured steps decode what plain ones do."""
    spec = tiny_spec(num_attention_heads=8, head_dim=16)
    model = load_model(spec, weights="random", seed=3, tp=tp, device="cuda")
    is_equal = []
    for name in ("streamingllm", "snapkv", "topk"):
        for temperature in (0.0, 1.0):
            found = []
            for cuda_graphs in (False, True):
                engine = Engine(model, batch_size=2, max_len=120)
                engine.prefill([[1, 2, 3, 4] * 4, [9, 60, 33] * 7])
                drafter = build_drafter(DRAFTS[name], engine)
                options = DecodeOptions(gamma=3, max_new_tokens=[60, 40], cuda_graphs=cuda_graphs)
                found.append(decode(engine, drafter, SamplingSpec(temperature=temperature, seed=1), options).tokens)
            is_equal.append(found[0] == found[1])
    return is_equal


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_captured_steps_of_two_gpus_decode_what_plain_steps_decode() -> None:
    assert all(launch(decode_on_gpus, 2, device_type="cuda"))
