"""Drives an engine in this process, or the reference without speculation in one of its own.

python tests/vllm/serving.py requests.json outputs.json        # the reference: no plugin, no speculation
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def start_engine(arguments: dict[str, Any]) -> Any:
    """An LLM in this process."""
    os.environ.update(ENVIRONMENT)
    os.environ.pop("TRITON_INTERPRET", None)
    from vllm import LLM

    return LLM(**arguments)


def serve(
    llm: Any,
    requests: Sequence[dict[str, Any]],
    *,
    arrivals: Sequence[int] | None = None,
    before_step: Callable[[int, Any], None] = lambda step, engine: None,
) -> list[dict[str, Any]]:
    """Decodes all requests in the engine's own loop; request i arrives before step `arrivals[i]` (default: at once)."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    outputs: dict[str, Any] = {}
    waiting = sorted(range(len(requests)), key=lambda i: arrivals[i] if arrivals else 0)
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and (arrivals is None or arrivals[waiting[0]] <= step or not engine.has_unfinished_requests()):
            index = waiting.pop(0)
            sampling = SamplingParams(**requests[index]["sampling"], output_kind=RequestOutputKind.FINAL_ONLY)
            engine.add_request(str(index), {"prompt_token_ids": requests[index]["prompt"]}, sampling)
        before_step(step, engine)
        for output in engine.step():
            outputs[output.request_id] = output
        step += 1
    return [_plain(outputs.get(str(i))) for i in range(len(requests))]


def _plain(output: Any) -> dict[str, Any]:
    """Of an aborted request: nothing."""
    if output is None:
        return {}
    completion = output.outputs[0]
    ranked = [sorted(((-entry.logprob, token) for token, entry in at.items()))[:2] for at in completion.logprobs or []]
    return {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": [[[token, -value] for value, token in pair] for pair in ranked],
    }


def counters(llm: Any) -> dict[str, Any]:
    """The engine's counters that concern speculation and preemption, by name without its prefix."""
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:")
        if name.startswith("spec_decode") or name == "num_preemptions":
            found[name] = metric.values if hasattr(metric, "values") else metric.value
    return found


class Reference:
    """The engine without speculation, at work in a process of its own."""

    def __init__(self, arguments: dict[str, Any], requests: Sequence[dict[str, Any]], folder: Path) -> None:
        self._answer, question = folder / "answer.json", folder / "question.json"
        question.write_text(json.dumps({"engine": arguments, "requests": list(requests)}))
        environment = {**os.environ, **ENVIRONMENT, "VLLM_PLUGINS": "none"}
        command = [sys.executable, str(Path(__file__)), str(question), str(self._answer)]
        self._process = subprocess.Popen(command, env=environment)

    def outputs(self) -> list[dict[str, Any]]:
        assert self._process.wait() == 0
        answer: list[dict[str, Any]] = json.loads(self._answer.read_text())
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(serve(start_engine(asked["engine"]), asked["requests"])))
