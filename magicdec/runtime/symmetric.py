"""All-reduce of small messages between the GPUs of one node, through memory that they map into each other (torch's
symmetric memory): a kernel or two, where NCCL's latency would be most of the time.

    one shot    each rank reads all ranks' messages, and adds them
    two shots   each rank adds its share of the message, and writes the sum to all ranks
    in switch   the same, but NVSwitch adds and copies: only some devices and numbers of ranks
    (NCCL)      what is larger, of another dtype, or between GPUs that cannot read each other: distributed.py

All ranks get the same bits, as they have to: each chooses the tokens by itself. One shot adds in the order of the ranks
on every rank; in the other two a single rank forms each sum. NCCL does likewise.

All of it can be captured in graphs: the buffer keeps its place, and what the ranks signal to each other is reset by
whoever reads it. Every rank has to run and replay the same collectives, as with NCCL.

    MAGICDEC_SYMMETRIC_MEMORY=0    leaves everything to NCCL
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from magicdec.units import KIB, MIB

Algorithm = Literal["one_shot", "two_shot", "in_switch"]

SWITCH = "MAGICDEC_SYMMETRIC_MEMORY"
OPERATIONS = ("one_shot_all_reduce_out", "two_shot_all_reduce_", "multimem_all_reduce_")
"""Not one_shot_all_reduce_copy_out, which would save a kernel: a block signals before all its threads have copied."""
DTYPES = (torch.float32, torch.bfloat16)
"""Those that torch's kernels add."""
ALIGNMENT = 16
ONE_SHOT_BYTES = 128 * KIB
"""What torch's compiler takes it for (torch/_inductor/config.py, one_shot_all_reduce_threshold_bytes)."""
LARGEST_BYTES = {(9, 0): 32 * MIB, (10, 0): 8 * MIB, (10, 3): 4 * MIB}
"""By compute capability: the least, over the numbers of ranks, of the sizes up to which vLLM takes symmetric memory
(SYMM_MEM_ALL_REDUCE_MAX_SIZES, vllm/distributed/device_communicators/all_reduce_utils.py). On others one shot only."""
IN_SWITCH_RANKS = {(9, 0): (4, 6, 8), (10, 0): (6, 8), (10, 3): (6, 8)}
"""Numbers of ranks for which vLLM takes the switch, not two shots (symm_mem.py beside it)."""


def largest_bytes(capability: tuple[int, int]) -> int:
    """The largest message that goes through symmetric memory on such a device."""
    return int(LARGEST_BYTES.get(capability, ONE_SHOT_BYTES))


def choose_algorithm(
    num_bytes: int, *, num_ranks: int, capability: tuple[int, int], has_switch: bool
) -> Algorithm | None:
    """How a message is added up; None for NCCL. The same on all ranks."""
    if num_bytes > largest_bytes(capability):
        return None
    if num_bytes <= ONE_SHOT_BYTES:
        return "one_shot"
    if has_switch and num_ranks in IN_SWITCH_RANKS.get(capability, ()):
        return "in_switch"
    return "two_shot"


@dataclass(frozen=True, kw_only=True)
class SymmetricMemory:
    """A group's buffer, which all of its ranks have mapped."""

    buffer: Tensor
    """uint8, as large as the largest message."""
    group_name: str
    num_ranks: int
    capability: tuple[int, int]
    has_switch: bool

    def all_reduce(self, tensor: Tensor) -> bool:
        """The sum over the ranks, in place; False where the message is not for this memory, and nothing was done."""
        algorithm = self.algorithm_for(tensor)
        if algorithm is None:
            return False
        message, flat = self.buffer[: tensor.nbytes].view(tensor.dtype), tensor.view(-1)
        message.copy_(flat)
        if algorithm == "one_shot":
            torch.ops.symm_mem.one_shot_all_reduce_out(message, "sum", self.group_name, flat)
            return True
        if algorithm == "in_switch":
            torch.ops.symm_mem.multimem_all_reduce_(message, "sum", self.group_name)
        else:
            torch.ops.symm_mem.two_shot_all_reduce_(message, "sum", self.group_name)
        flat.copy_(message)
        return True

    def algorithm_for(self, tensor: Tensor) -> Algorithm | None:
        is_aligned = tensor.nbytes % 4 == 0 and tensor.data_ptr() % ALIGNMENT == 0
        if tensor.dtype not in DTYPES or not tensor.is_contiguous() or not tensor.numel() or not is_aligned:
            return None
        return choose_algorithm(
            tensor.nbytes, num_ranks=self.num_ranks, capability=self.capability, has_switch=self.has_switch
        )


def open_symmetric_memory(group: Any = None) -> SymmetricMemory | None:
    """Sets up the group's buffer; every rank of it has to call this. None, on all ranks alike, where a rank cannot read
    another's memory, torch's symmetric memory is missing or fails, or it is switched off."""
    if dist.get_backend(group) != "nccl":
        return None
    if not _all_agree(_is_reachable(dist.get_world_size(group)), group):
        return None
    opened = _open(group)
    return opened if _all_agree(opened is not None, group) else None


def _is_reachable(num_ranks: int) -> bool:
    """Whether this process's GPU can read those of all ranks: they are this machine's first, in order."""
    if os.environ.get(SWITCH, "1") == "0" or int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)) < num_ranks:
        return False
    if torch.version.cuda is None or not all(hasattr(torch.ops.symm_mem, name) for name in OPERATIONS):
        return False
    own, count = torch.cuda.current_device(), torch.cuda.device_count()
    others = [peer for peer in range(num_ranks) if peer != own]
    return count >= num_ranks and all(torch.cuda.can_device_access_peer(own, peer) for peer in others)


def _open(group: Any) -> SymmetricMemory | None:
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    members: Any = group if group is not None else dist.group.WORLD
    try:
        from torch.distributed import _symmetric_memory as symm_mem

        buffer = symm_mem.empty(largest_bytes(capability), dtype=torch.uint8, device=device)
        handle = symm_mem.rendezvous(buffer, members.group_name)
    except (ImportError, AttributeError, RuntimeError):
        return None
    return SymmetricMemory(
        buffer=buffer,
        group_name=members.group_name,
        num_ranks=dist.get_world_size(group),
        capability=capability,
        has_switch=bool(handle.multicast_ptr),
    )


def _all_agree(is_so: bool, group: Any) -> bool:
    flag = torch.tensor(int(is_so), device="cuda")
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag.item())
