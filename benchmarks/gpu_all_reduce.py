"""NCCL's all-reduce between this machine's GPUs by message size.

    python benchmarks/gpu_all_reduce.py --tp 2 [--output all-reduce.csv] [--device cpu]

Each time is that of one of a captured graph's all-reduces of bf16, the median over rounds (without a GPU, of calls;
gloo's then). The last line of stdout is one JSON object with a row per message size. The CSV file has the columns that
`python -m evidence kernels` and evidence/fits/hardware_profiles.py read.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from magicdec.calibrate.machine import device_in_catalog
from magicdec.errors import MagicdecError
from magicdec.files import write_atomic
from magicdec.measure.utilisation import elapsed_s, is_cuda
from magicdec.runtime.distributed import TensorParallel
from magicdec.runtime.graphs import capture
from magicdec.runtime.launch import launch_ranks
from magicdec.units import MICRO

SIZES = tuple(2**power for power in range(10, 27))
REPEATS = 20
"""All-reduces of one graph, and replays that are timed together. Every rank makes as many: none waits in vain."""


def time_messages(
    tp: TensorParallel, device: str, sizes: tuple[int, ...], rounds: int
) -> list[dict[str, Any]]:
    """A row per message size: microseconds of one all-reduce."""
    rows = []
    for num_bytes in sizes:
        message = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
        work = _work(partial(tp.all_reduce, message), device)
        seconds = []
        for _ in range(rounds):
            tp.all_reduce(torch.zeros(1, device=device))
            seconds.append(elapsed_s(work, REPEATS, device) / REPEATS**2)
        rows.append(
            {
                "message_bytes": num_bytes,
                "latency_us": statistics.median(seconds) / MICRO,
            }
        )
    return rows


def _work(all_reduce: Callable[[], object], device: str) -> Callable[[], object]:
    """REPEATS all-reduces, as a graph where there are graphs."""

    def several() -> None:
        for _ in range(REPEATS):
            all_reduce()

    several()
    return capture(several, None)[0] if is_cuda(device) else several


def _device_name(device: str) -> str:
    """The catalog's name where it has the device, else what the driver calls it."""
    if not is_cuda(device):
        return device
    name = re.sub(
        r"[^a-z0-9]+", "-", torch.cuda.get_device_properties(0).name.lower()
    ).strip("-")
    known = device_in_catalog(name)
    return known.name if known else name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=2, help="ranks, one GPU each")
    parser.add_argument("--output", type=Path, help="CSV file to write")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--sizes",
        help="bytes of the messages, comma-separated; default: 1 KiB to 64 MiB",
    )
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if options.device == "cuda" and torch.cuda.device_count() < options.tp:
        sys.exit(
            f"error: {options.tp} ranks need as many GPUs, and here are {torch.cuda.device_count()}"
        )
    sizes = (
        tuple(int(size) for size in options.sizes.split(","))
        if options.sizes
        else SIZES
    )
    try:
        rows = launch_ranks(
            time_messages,
            options.tp,
            options.device,
            sizes,
            options.rounds,
            device_type=options.device,
        )
        name = _device_name(options.device)
        if options.output is not None:
            lines = ["device,tp_size,message_bytes,latency_us"]
            lines += [
                f"{name},{options.tp},{row['message_bytes']},{row['latency_us']:.4g}"
                for row in rows
            ]
            write_atomic(options.output, "\n".join(lines) + "\n")
    except MagicdecError as error:
        sys.exit(f"error: {error}")
    print(
        json.dumps(
            {
                "benchmark": "gpu_all_reduce",
                "device": name,
                "tp_size": options.tp,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
