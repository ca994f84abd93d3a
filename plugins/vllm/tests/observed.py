"""An engine with n-gram drafts in a process of its own: its metrics before and after, and what each step emitted.

python plugins/vllm/tests/observed.py observed.json

Requests are aborted between two steps, so that none is cut within a step: what the engine counts is what was emitted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

GAMMA = 3
NUM_REQUESTS = 6
NUM_STEPS = 40


def main(output: Path) -> None:
    from cases import ENGINE, prompts
    from prometheus_client import REGISTRY, generate_latest
    from serving import start_engine
    from vllm import SamplingParams

    speculation = {
        "method": "ngram", "num_speculative_tokens": GAMMA, "prompt_lookup_max": 4, "prompt_lookup_min": 2
    }  # fmt: skip
    engine = start_engine(
        {**ENGINE, "num_gpu_blocks_override": 400, "speculative_config": speculation}
    ).llm_engine
    before = generate_latest(REGISTRY).decode()
    texts = prompts(NUM_REQUESTS, 300, seed=3)
    for number, prompt in enumerate(texts):
        sampling = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    emitted: dict[str, list[int]] = {str(number): [] for number in range(NUM_REQUESTS)}
    known: dict[str, int] = dict.fromkeys(emitted, 0)
    for _ in range(NUM_STEPS):
        for answer in engine.step():
            count = len(answer.outputs[0].token_ids)
            emitted[answer.request_id].append(count - known[answer.request_id])
            known[answer.request_id] = count
    engine.abort_request(list(emitted))
    document: dict[str, Any] = {
        "before": before,
        "after": generate_latest(REGISTRY).decode(),
        "emitted": emitted,
    }
    output.write_text(json.dumps(document))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
