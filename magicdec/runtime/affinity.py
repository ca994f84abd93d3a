"""Which cores a rank runs on: its share of those that this process may use. Needs no torch.

Threads are bound (OMP_PROC_BIND), so ranks that were given the same cores would all run on the first of them.
"""

from __future__ import annotations

import os


def cores_of_rank(rank: int, num_ranks: int) -> set[int] | None:
    """The cores of one of the ranks on this machine; None where there are too few, or none can be set."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    size = len(cores) // num_ranks
    return set(cores[rank * size : (rank + 1) * size]) or None


def take_own_cores() -> bool:
    """Under torchrun: keeps this process to its share. Before torch is imported. False where there is no such share."""
    rank, num_ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = cores_of_rank(rank, num_ranks)
    if num_ranks == 1 or cores is None:
        return num_ranks == 1
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    return True
