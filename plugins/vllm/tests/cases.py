"""Requests for the engine as plain JSON, so that the engine under test and the reference, each in a process of its own,
decode the same ones."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from magicdec.runtime.prompts import PromptRequest, load_prompts, load_tokenizer

MODEL = Path(__file__).resolve().parents[3] / "magicdec" / "data" / "embedded"
VOCABULARY = 2048
MAX_MODEL_LEN = 1536
PAGE_SIZE = 32
NUM_PAGES = 64
"""Few enough that a full batch of long sequences runs out of them, so that the scheduler preempts."""
ENGINE = {
    "model": str(MODEL),
    "dtype": "float32",
    "max_model_len": MAX_MODEL_LEN,
    "block_size": PAGE_SIZE,
    "num_gpu_blocks_override": NUM_PAGES,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 384,  # long prompts are prefilled in chunks, beside sequences that decode
    "enforce_eager": True,
    "distributed_executor_backend": "uni",
    "disable_log_stats": False,
    "max_logprobs": 5,
}


def prompts(
    count: int, length: int, *, seed: int = 0, source: str = "stdlib"
) -> list[list[int]]:
    tokenizer = load_tokenizer(MODEL, vocab_size=VOCABULARY)
    request = PromptRequest(source=source, count=count, context_len=length, seed=seed)
    return load_prompts(request, tokenizer=tokenizer, vocab_size=VOCABULARY)


def greedy_requests(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Deterministic requests of all kinds: lengths, ends, stops, penalties, logprobs, shared prefixes."""
    choose = random.Random(seed)
    texts = prompts(max(count, 8), MAX_MODEL_LEN - 4, seed=seed)
    requests = []
    for index in range(count):
        length = choose.choice(
            (choose.randint(3, 64), choose.randint(64, 600), choose.randint(600, 1300))
        )
        text = (
            texts[choose.randrange(8)] if choose.random() < 0.3 else texts[index]
        )  # some begin alike
        sampling: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": choose.randint(1, 40),
            "logprobs": 2,
        }
        kind = choose.randrange(9)
        if kind == 0:  # reaches the engine's longest sequence, maybe inside a block
            length, sampling["max_tokens"] = MAX_MODEL_LEN - choose.randint(2, 12), 64
        elif kind == 1:
            sampling["stop"] = choose.sample(["self", "):", "\n", "(", "re"], 2)
        elif kind == 2:
            sampling["stop_token_ids"] = choose.sample(range(1, VOCABULARY), 300)
        elif kind == 3:
            sampling |= {"repetition_penalty": 1.3, "presence_penalty": 0.4}
        elif kind == 4:
            sampling |= {"min_tokens": 6, "max_tokens": 30, "stop": ["\n"]}
        elif kind == 5:
            sampling["skip_reading_prefix_cache"] = True
        elif kind == 6:
            sampling |= {"frequency_penalty": 0.7, "bad_words": ["self", "import"]}
        else:
            sampling["ignore_eos"] = True
        requests.append({"prompt": text[:length], "sampling": sampling})
    return requests


def crowd_requests(count: int) -> list[dict[str, Any]]:
    """Prompts that fit into the cache together, and outputs that do not: some must be preempted."""
    sampling = {
        "temperature": 0.0,
        "max_tokens": 60,
        "ignore_eos": True,
        "logprobs": 2,
    }
    return [
        {"prompt": text, "sampling": sampling}
        for text in prompts(count, 5 * PAGE_SIZE - 8, seed=9)
    ]


def few_prompts() -> list[list[int]]:
    """Of sequences whose steps are counted, with and without a draft."""
    return prompts(4, 100, seed=2)
