"""vLLM's attention on a CPU by itself: process CPU time of one thread, by page size, context and query tokens.

Three caches in turn, as the layers of the embedded model, each with six heads of 64. Run in vLLM's environment:

    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/vllm_attention.py --batch 8
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from vllm import _custom_ops as ops

HEADS, HEAD_DIM, LAYERS = 6, 64, 3
CONTEXTS = (512, 4000)
QUERY_TOKENS = (1, 2, 4)
PAGE_SIZES = (32, 64, 128)
ROUNDS = 7


def milliseconds(batch: int, context: int, query_tokens: int, page_size: int, *, splits: bool) -> float:
    pages = -(-context // page_size)
    caches = [torch.randn(batch * pages, HEADS, 2 * page_size, HEAD_DIM) for _ in range(LAYERS)]
    table = torch.randperm(batch * pages).view(batch, pages).int()
    starts, lengths = (torch.arange(batch + 1) * query_tokens).int(), torch.full((batch,), context).int()
    query = torch.randn(batch * query_tokens, HEADS, HEAD_DIM)
    output = torch.empty_like(query)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=batch, num_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM, seq_lens=lengths, dtype=torch.float32,
        query_start_loc=starts, causal=True, sliding_window_size=-1, isa="vec", enable_kv_split=splits,
    )  # fmt: skip

    def attend() -> None:
        for cache in caches:
            keys, values = cache.chunk(2, dim=2)
            ops.cpu_attention_with_kv_cache(
                query=query, key_cache=keys, value_cache=values, output=output, query_start_loc=starts,
                seq_lens=lengths, scale=HEAD_DIM**-0.5, causal=True, alibi_slopes=None, sliding_window=-1,
                block_table=table, softcap=0.0, scheduler_metadata=schedule, s_aux=None,
            )  # fmt: skip

    attend()
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        attend()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for splits in (True, False):
        for page_size in PAGE_SIZES:
            times = ", ".join(
                f"{tokens} of {context}: {milliseconds(options.batch, context, tokens, page_size, splits=splits):.1f}"
                for context in CONTEXTS
                for tokens in QUERY_TOKENS
            )
            print(f"pages of {page_size}, {'split' if splits else 'whole'}, ms by query tokens and context: {times}")


if __name__ == "__main__":
    main()
