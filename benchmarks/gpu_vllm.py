"""The plugin in vLLM: autoregressive decoding against sparse self-speculation, and what a step launches. In vLLM's
environment (benchmarks/gpu.py --all finds it: this Python, or .venv-vllm):

    .venv-vllm/bin/python benchmarks/gpu_vllm.py --device cpu --tiny

Weights are random (vLLM's load format "dummy") and acceptance is simulated by the engine's synthetic rejection, so no
checkpoint is needed. A trace of a few steps counts the kernels (on a CPU the operators) and the gaps between them. The
last line is JSON. That greedy tokens are the engine's own is a stage by itself,
plugins/vllm/tests/test_engine_lossless.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# the packages, where they are not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "plugins" / "vllm"))

import numpy as np
import torch

from magicdec.measure.configuration import BenchmarkRequest
from magicdec.measure.repetitions import measure
from magicdec.schema.record import append_record
from magicdec.specs.catalog import MODELS_DIRECTORY
from magicdec.specs.speculation import AUTOREGRESSIVE, SpeculationSpec
from magicdec_vllm.session import VllmSession

MODEL = "llama-3.1-8b"
TINY = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
RATE, BUDGET, GAMMAS = 0.81, 512, (1, 2, 3, 4)
TRACED_STEPS = 8


class SimulatedSession(VllmSession):
    """Random weights, and drafts accepted at a stated rate, which the engine's CPU build cannot do."""

    def _engine_arguments(self) -> dict[str, Any]:
        arguments = super()._engine_arguments() | {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
        }
        rates = [RATE**position for position in range(1, self.request.max_gamma + 1)]
        if self.request.device != "cpu":
            synthetic = {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": rates,
            }
            arguments["speculative_config"] |= synthetic
        return arguments

    def traced(self, speculation: SpeculationSpec) -> dict[str, float]:
        """Kernels per step, their seconds, and the seconds of a step in which none runs."""
        self._configure(speculation)
        self._send(
            self.prompts, self.request.sampling, seed=0, gen_len=self.request.gen_len
        )
        begun: set[str] = set()
        while len(begun) < len(self.prompts):
            begun |= {
                output.request_id
                for output in self._core.step()
                if output.outputs[0].token_ids
            }
        is_gpu = self.request.device != "cpu"
        kinds = [
            torch.profiler.ProfilerActivity.CPU,
            *([torch.profiler.ProfilerActivity.CUDA] if is_gpu else []),
        ]
        with torch.profiler.profile(activities=kinds) as trace:
            for _ in range(TRACED_STEPS):
                self._core.step()
        self._core.abort_request([str(index) for index in range(len(self.prompts))])
        while self._core.has_unfinished_requests():
            self._core.step()
        wanted = (
            torch.autograd.DeviceType.CUDA if is_gpu else torch.autograd.DeviceType.CPU
        )
        spans = np.array(
            [
                (event.time_range.start, event.time_range.end)
                for event in trace.events()
                if event.device_type == wanted
            ]
        )
        spans = spans[np.argsort(spans[:, 0])] * 1e-6
        ends = np.maximum.accumulate(spans[:, 1])
        gaps = np.clip(spans[1:, 0] - ends[:-1], 0.0, None)
        return {
            "launches_per_step": len(spans) / TRACED_STEPS,
            "gap_s_per_step": float(gaps.sum()) / TRACED_STEPS,
            "span_s_per_step": float(ends[-1] - spans[0, 0]) / TRACED_STEPS,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("gpu-results"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-cuda-graphs", action="store_true")
    options = parser.parse_args()
    config = json.loads((MODELS_DIRECTORY / f"{MODEL}.json").read_text()) | (
        TINY if options.tiny else {}
    )
    directory = options.output / ("tiny-vllm" if options.tiny else f"vllm-{MODEL}")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    batch, context, budget = (2, 400, 128) if options.tiny else (16, 32_000, BUDGET)
    request = BenchmarkRequest(
        model=str(directory), engine="vllm", prompts="random", device=options.device,
        dtype=options.dtype or ("float32" if options.device == "cpu" else "bfloat16"), batch_size=batch,
        context_len=context, gen_len=64 if options.tiny else 96, repetitions=1 if options.tiny else 3,
        speculations=tuple(
            SpeculationSpec(draft="self", draft_method="streamingllm", draft_budget=budget, gamma=gamma)
            for gamma in (GAMMAS[:2] if options.tiny else GAMMAS)
        ),
        cuda_graphs=not options.no_cuda_graphs,
    )  # fmt: skip
    session = SimulatedSession(
        request, progress=lambda text: print(text, file=sys.stderr, flush=True)
    )
    rows = []
    for record in measure(session):
        append_record(options.output / "vllm.jsonl", record)
        rows.append({
            "gamma": record.gamma, "tokens_per_s": record.tokens_per_s, "speedup": record.speedup,
            "tokens_per_step": record.expected_tokens_per_step, "step_s": record.step_s,
        })  # fmt: skip
    best = max(rows, key=lambda row: row["tokens_per_s"])
    chosen = next(
        (s for s in request.speculations if s.gamma == best["gamma"]),
        request.speculations[-1],
    )
    traces = {
        "autoregressive": session.traced(AUTOREGRESSIVE),
        f"gamma {chosen.gamma}": session.traced(chosen),
    }
    print(json.dumps({"benchmark": "gpu vllm", "batch_size": batch, "context_len": context, "rows": rows,
                      "traces": traces}))  # fmt: skip


if __name__ == "__main__":
    main()
