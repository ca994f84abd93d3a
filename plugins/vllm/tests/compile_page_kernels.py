"""Compiles the page kernels for GPUs that need not be here, as tests/runtime/kernels/compile_kernels.py does."""

from __future__ import annotations

from magicdec_vllm import page_kernels
from tests.runtime.kernels.compile_kernels import show


def main() -> None:
    for dtype, capability, page, group, head_dim, columns in (
        ("bf16", 90, 16, 4, 128, 8192),
        ("bf16", 80, 128, 7, 80, 1024),
        ("fp32", 90, 64, 1, 64, 2048),
    ):
        show_pages(dtype, capability, page, group, head_dim, columns)


def show_pages(
    dtype: str, capability: int, page: int, group: int, head_dim: int, columns: int
) -> None:
    tiling = page_kernels.tiling(group=group, head_dim=head_dim)
    constants = {
        **tiling,
        "PAGE": page,
        "ROWS": page_kernels.ROWS,
        "COLUMNS_PAD": columns,
        "PAGES_PAD": 64,
    }
    constants |= {"WIDEN": False, "num_warps": 4, "num_stages": 3}
    types = dict.fromkeys(("query", "means", "cache"), f"*{dtype}") | {
        "logits": "*fp32",
        "scale": "fp32",
    }
    types |= dict.fromkeys(("slots", "stop", "left_out", "rows"), "*i64")
    types |= dict.fromkeys(("table", "chosen", "drafts_table"), "*i32")
    show(page_kernels._average_kernel, dtype, types, constants, capability)
    show(page_kernels._logits_kernel, dtype, types, constants, capability)
    constants |= {"num_warps": page_kernels.num_warps(columns)}
    show(page_kernels._choose_pages_kernel, dtype, types, constants, capability)


if __name__ == "__main__":
    main()
