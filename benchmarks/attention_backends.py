"""Every attention kernel that runs here against fp64 on ragged inputs; on a GPU also its time, over what memory allows.

    python -m benchmarks.attention_backends [--batch 32] [--context 16384] [--seconds 120]
    python -m benchmarks.attention_backends --rows       only what the headline rows run: bf16, their heads, Triton

The last line of stdout is one JSON object: `max_error` by kernel and dtype, of outputs and of probabilities; on a GPU
`times`, one row per kernel, query tokens and number of splits. On a CPU, Triton's kernels are interpreted: their errors
are real, their times would mean nothing. Shapes timed are those of a layer of Llama-3.1-8B. A kernel that fails is
named under `failed`, its traceback printed, the others go on, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from magicdec.runtime.attention import Scoring, Workspace, reference_attention
from magicdec.runtime.kernels import cpu_attention, has_triton
from tests.runtime.kernels.oracle import Case, Inputs, exact_attention, random_inputs

T = TypeVar("T")
Backend = Callable[[Inputs, bool], tuple[torch.Tensor, torch.Tensor | None]]
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CASES = (
    Case(heads=8, kv_heads=2, head_dim=64, tokens=1, slots=300),
    Case(heads=4, kv_heads=1, head_dim=128, tokens=4, slots=300),
    Case(heads=4, kv_heads=4, head_dim=64, tokens=8, slots=300, window=100),
    Case(heads=4, kv_heads=2, head_dim=64, tokens=16, slots=300, hole_stop=150),
)
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
WARM_UP, ROUNDS = 3, 10


def row_cases(slots: int) -> tuple[Case, ...]:
    """The heads of the headline rows: decoding, verification at gamma 2 to 4, and a draft's thinned cache."""
    plain = Case(
        heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, tokens=1, slots=slots
    )
    longer = [replace(plain, tokens=tokens) for tokens in (3, 4, 5)]
    return (plain, *longer, replace(plain, slots=slots // 5, hole_stop=slots // 10))


def shorter(case: Case) -> Case:
    """The case over a third of its slots."""
    return replace(
        case,
        slots=case.slots // 3,
        window=case.window and case.window // 3,
        hole_stop=case.hole_stop and case.hole_stop // 3,
    )


def backends(device: str) -> dict[str, Backend]:
    """The kernels that this machine can run."""
    found: dict[str, Backend] = {"reference": reference}
    if device == "cpu":
        found["cpu"] = on_cpu
    if has_triton():
        found["triton"] = in_triton
    return found


def reference(
    inputs: Inputs, probabilities: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return reference_attention(
        **inputs.arguments,
        scoring=Scoring(scale=inputs.query_BTAD.shape[-1] ** -0.5),
        workspace=Workspace(),
        probabilities=probabilities,
    )


def on_cpu(
    inputs: Inputs, probabilities: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not cpu_attention.supports(
        inputs.query_BTAD, inputs.keys_BKSD, inputs.values_BKSD
    ):
        raise NotImplementedError
    return cpu_attention.decode_attention(
        **inputs.arguments, probabilities=probabilities
    )


def in_triton(
    inputs: Inputs, probabilities: bool, num_splits: int | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    from magicdec.runtime.kernels import triton_attention

    return triton_attention.decode_attention(
        **inputs.arguments, probabilities=probabilities, num_splits=num_splits
    )


def max_errors(
    backend: Backend, device: str, cases: Sequence[Case], dtypes: Sequence[str]
) -> dict[str, dict[str, float | None]]:
    """Largest absolute error over the cases, by dtype; None where the kernel does not offer it."""
    errors: dict[str, dict[str, float | None]] = {}
    for name in dtypes:
        dtype = DTYPES[name]
        errors[name] = {}
        for kind, probabilities in (("output", False), ("probabilities", True)):
            try:
                errors[name][kind] = max(
                    error(backend, case, dtype, device, probabilities) for case in cases
                )
            except NotImplementedError:
                errors[name][kind] = None
    return errors


def error(
    backend: Backend, case: Case, dtype: torch.dtype, device: str, probabilities: bool
) -> float:
    inputs = random_inputs(case, dtype, device=device)
    result = backend(inputs, probabilities)[int(probabilities)]
    expected = exact_attention(inputs)[int(probabilities)]
    assert result is not None
    return float((result[..., : expected.shape[-1]] - expected).abs().max())


def layer_inputs(batch: int, context: int, tokens: int) -> Inputs:
    """A layer's keys and values of a full batch, all of them as long as the context."""
    shape = (batch, KV_HEADS, context, HEAD_DIM)
    keys, values = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    query = torch.randn(
        batch, tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16
    )
    last_BT = (context - tokens + torch.arange(tokens, device="cuda")).expand(batch, -1)
    return Inputs(
        query_BTAD=query,
        keys_BKSD=keys,
        values_BKSD=values,
        last_BT=last_BT,
        window=None,
        empty=None,
    )


def time_s(call: Callable[[], Any]) -> float:
    """Median over rounds, on the device's clock."""
    for _ in range(WARM_UP):
        call()
    seconds = []
    for _ in range(ROUNDS):
        start, end = (
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(enable_timing=True),
        )
        start.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


class Attempts:
    """Runs one kernel after another; what fails is kept by name, and does not hide what the others do."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}

    def make(self, name: str, work: Callable[[], T]) -> T | None:
        if name in self.failed:
            return None
        try:
            return work()
        except Exception as error:  # of a compiler, a driver or the kernel
            traceback.print_exc()
            self.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            return None


def timings(
    batch: int,
    context: int,
    limit_s: float,
    attempts: Attempts,
    *,
    rows_only: bool = False,
) -> list[dict[str, Any]]:
    """Each kernel with 1 to 8 query tokens; Triton's with other numbers of splits and with probabilities too."""
    end_s = time.perf_counter() + limit_s
    rows: list[dict[str, Any]] = []
    calls: dict[str, Callable[[Inputs], Callable[[], Any]]] = {
        "triton": lambda inputs: partial(in_triton, inputs, False),
    }
    if not rows_only:
        calls["triton, probabilities"] = lambda inputs: partial(in_triton, inputs, True)
        for splits in (1, 2, 4, 8, 16):
            calls[f"triton, {splits} splits"] = lambda inputs, splits=splits: partial(
                in_triton, inputs, False, splits
            )
        calls["reference"] = lambda inputs: partial(reference, inputs, False)
    for name, prepare in calls.items():
        for tokens in range(1, 9):
            if time.perf_counter() > end_s:
                return rows
            inputs = layer_inputs(batch, context, tokens)
            seconds = attempts.make(
                name, lambda prepare=prepare, inputs=inputs: time_s(prepare(inputs))
            )
            if seconds is None:
                break
            num_bytes = 2 * inputs.keys_BKSD.numel() * inputs.keys_BKSD.element_size()
            row = {
                "backend": name,
                "query_tokens": tokens,
                "time_s": seconds,
                "bytes_per_s": num_bytes / seconds,
            }
            rows.append(row)
            print(
                f"{name:24} {tokens} tokens {seconds * 1e6:9.1f} us {num_bytes / seconds / 1e9:7.0f} GB/s",
                file=sys.stderr,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument(
        "--seconds", type=float, default=120, help="for the timings on a GPU"
    )
    parser.add_argument(
        "--rows", action="store_true", help="only what the headline rows run"
    )
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    attempts = Attempts()
    cases: Sequence[Case] = CASES
    dtypes = tuple(DTYPES)
    kernels = backends(device)
    if device == "cpu":  # interpreted: every path, over few slots
        cases = [shorter(case) for case in CASES]
    if options.rows:
        cases = row_cases(3000 if device == "cuda" else 50)
        if device == "cpu":
            cases = [replace(each, heads=8, kv_heads=2) for each in cases]
        dtypes = ("bfloat16",)
        kernels = {
            name: kernel for name, kernel in kernels.items() if name != "reference"
        }
    errors = {
        name: attempts.make(
            name, partial(max_errors, kernel, device, cases=cases, dtypes=dtypes)
        )
        for name, kernel in kernels.items()
    }
    result: dict[str, Any] = {
        "benchmark": "attention_backends",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "max_error": {
            name: error for name, error in errors.items() if error is not None
        },
    }
    if device == "cuda":
        result |= {"batch_size": options.batch, "context_len": options.context}
        result["times"] = timings(
            options.batch,
            options.context,
            options.seconds,
            attempts,
            rows_only=options.rows,
        )
    print(json.dumps(result | {"failed": attempts.failed}))
    sys.exit(1 if attempts.failed else 0)


if __name__ == "__main__":
    main()
