"""Acceptance by position in vLLM: StreamingLLM, and top-k pages chosen anew every 1, 2, 4 and 8 blocks of drafts.

One engine and the same prompts for all, one line of JSON each; processor time per step is one thread's. Run in the
environment of vLLM:

    .venv-vllm/bin/python benchmarks/vllm_refresh.py --batch 8 --context 2000 --draft-budget 256 --page-size 32
"""

from __future__ import annotations

import argparse
import json

import msgspec

from magicdec.measure import vllm_session
from magicdec.measure.configuration import BenchmarkRequest
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 8), ("context", 2000), ("gen-len", 128), ("draft-budget", 256), ("gamma", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=1.0)
    asked = parser.parse_args()
    vllm_session.PAGE_SIZES = (asked.page_size,)
    drafts = tuple(
        SpeculationSpec(draft="self", draft_method=method, draft_budget=asked.draft_budget, gamma=asked.gamma)
        for method in ("streamingllm", "topk")
    )
    request = BenchmarkRequest(
        model="embedded", engine="vllm", batch_size=asked.batch, context_len=asked.context, gen_len=asked.gen_len,
        speculations=drafts, sampling=SamplingSpec(temperature=asked.temperature),
    )  # fmt: skip
    session = vllm_session.VllmSession(request)
    configure = session._configure
    for draft, refresh in ((drafts[0], 1), *((drafts[1], refresh) for refresh in (1, 2, 4, 8))):

        def with_refresh(speculation: SpeculationSpec, refresh: int = refresh) -> None:
            configure(speculation)
            session._draft.settings = msgspec.structs.replace(session._draft.settings, refresh=refresh)

        session._configure = with_refresh
        run = session.run(draft, seed=1)
        rates = [round(float(rate), 3) for rate in run.counts.rates]
        tokens = run.num_tokens / run.num_steps / asked.batch
        found = {"method": draft.draft_method, "refresh": refresh, "acceptance_rates": rates}
        found |= {"tokens_per_step": round(tokens, 3), "step_cpu_ms": round(1e3 * run.elapsed_cpu_s / run.num_steps, 1)}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
