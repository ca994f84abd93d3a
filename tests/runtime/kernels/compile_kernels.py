"""Compiles the Triton kernels for GPUs that need not be here; prints what each takes, one JSON object per line."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from magicdec.runtime.kernels import (
    triton_attention,
    triton_experts,
    triton_fused,
    triton_sampling,
)

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
POINTERS = {"last": "*i64", "empty_first": "*i64"}
ALIGNED = (
    "key_",
    "value_",
    "activation_",
    "heads_",
    "hidden_",
    "delta_",
    "stride",
    "size",
    "num_inputs",
    "num_outputs",
)
FLOATS = ("output", "partial", "log_sum", "partial_log_sum", "probabilities")


def main() -> None:
    for capability, dtype, tokens, group, head_dim, extra in (
        (
            90,
            "bf16",
            1,
            4,
            128,
            {"num_tokens": 1, "num_kv_heads": 1, "num_sequences": 1},
        ),
        (90, "bf16", 8, 4, 128, {"WINDOW": 4096, "HAS_EMPTY": True}),
        (90, "bf16", 8, 4, 128, {"WINDOW": 1024, "RING": 1088}),
        (90, "bf16", 16, 8, 128, {}),
        (90, "fp32", 4, 4, 64, {}),
        (80, "bf16", 4, 2, 80, {}),
    ):
        tiling = triton_attention.tiling(
            group=group,
            head_dim=head_dim,
            num_tokens=tokens,
            element_bytes=2 if dtype == "bf16" else 4,
        )
        constants = {
            "WINDOW": 0,
            "RING": 0,
            "HAS_EMPTY": False,
            "WIDEN": False,
            "NUM_BLOCKS": 8,
            "SPLITS_PAD": 64,
        }
        constants |= tiling | extra
        for kernel in (
            triton_attention._split_kernel,
            triton_attention._combine_kernel,
            triton_attention._weigh_kernel,
        ):
            types = dict.fromkeys(("query", "keys", "values"), f"*{dtype}") | POINTERS
            types |= dict.fromkeys(FLOATS, "*fp32") | {"scale": "fp32"}
            show(kernel, dtype, types, constants, capability)
    for dtype, capability, hidden, head_dim in (
        ("bf16", 90, 4096, 128),
        ("bf16", 80, 16384, 80),
        ("fp32", 90, 3584, 64),
    ):
        show_fused(dtype, capability, hidden, head_dim)
    for dtype, capability, rows, has_bias in (
        ("bf16", 90, 8, False),
        ("bf16", 80, 1024, True),
        ("bf16", 80, 32768, False),
        ("fp16", 90, 32768, True),
        ("fp32", 80, 32768, False),
    ):
        element_bytes = 4 if dtype == "fp32" else 2
        tiling = triton_experts.product_tiling(rows, 64, element_bytes)
        types = dict.fromkeys(("inputs", "weight", "bias", "output"), f"*{dtype}")
        types |= dict.fromkeys(("order", "starts"), "*i64")
        constants = {"HAS_BIAS": has_bias, "WIDEN": False, "num_stages": 3, **tiling}
        kernel = triton_experts._grouped_product_kernel
        show(kernel, dtype, types, constants, capability)


def show_fused(dtype: str, capability: int, hidden: int, head_dim: int) -> None:
    types = dict.fromkeys(
        ("hidden", "delta", "weight", "output", "heads", "gate_up", "logits"),
        f"*{dtype}",
    )
    types |= dict.fromkeys(
        ("rotation", "highest", "total", "probabilities", "weights", "uniform"), "*fp32"
    )
    types |= {"tokens": "*i64", "eps": "fp32", "temperature": "fp32"}
    block = triton.next_power_of_2(hidden)
    norm = {"BLOCK": block, "num_warps": triton_fused.num_warps(block), "num_stages": 3}
    show(triton_fused._add_rms_norm_kernel, dtype, types, norm, capability)
    for has_norm in (False, True):
        rotation = triton_fused.rotation_tiling(40, head_dim)
        rotation |= {
            "HEAD_DIM": head_dim,
            "HAS_NORM": has_norm,
            "num_warps": 4,
            "num_stages": 3,
        }
        show(triton_fused._rotate_kernel, dtype, types, rotation, capability)
    gate = {"BLOCK": triton_fused.GATED_ELEMENTS, "num_warps": 4, "num_stages": 3}
    show(triton_fused._silu_mul_kernel, dtype, types, gate, capability)
    share = {
        "SHARE": triton_sampling.SHARE,
        "SHARES_PAD": 64,
        "num_warps": triton_sampling.NUM_WARPS,
        "num_stages": 3,
    }
    for name in (
        "_weigh_shares_kernel",
        "_normalise_kernel",
        "_sum_shares_kernel",
        "_choose_kernel",
    ):
        show(getattr(triton_sampling, name), dtype, types, share, capability)


def show(
    kernel: Any,
    dtype: str,
    types: dict[str, str],
    constants: dict[str, Any],
    capability: int,
) -> None:
    report = compile_kernel(kernel, types, constants, capability)
    print(
        json.dumps(
            {
                "kernel": kernel.__name__,
                "dtype": dtype,
                "capability": capability,
                **report,
            }
        )
    )


def compile_kernel(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int
) -> dict[str, int]:
    names = kernel.arg_names
    given = {name: value for name, value in constants.items() if name in names}
    signature = {
        name: "constexpr" if name in given else types.get(name, "i32") for name in names
    }
    aligned = [
        n
        for n in names
        if n not in given and (signature[n].startswith("*") or n.startswith(ALIGNED))
    ]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(
        kernel, signature, {(names.index(n),): v for n, v in given.items()}, attributes
    )
    options = {name: constants[name] for name in ("num_warps", "num_stages")}
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=options
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = {
        name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)
    }
    return {
        "shared_bytes": compiled.metadata.shared,
        "registers": found["REG"],
        "spilled_bytes": found["STACK"],
        "async_copies": compiled.asm["ptx"].count("cp.async.cg"),
    }


if __name__ == "__main__":
    main()
