"""Drives an engine in this process, or one in a process of its own.

python plugins/vllm/tests/serving.py question.json answer.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
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


def start_engine(arguments: dict[str, Any], *, runner: str = "V1") -> Any:
    """An LLM in this process."""
    os.environ.update(ENVIRONMENT)
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "V2"))
    if runner == "V2":
        interpret_triton()
    from vllm import LLM

    return LLM(**arguments)


def interpret_triton() -> None:
    """The V2 runner asks for a Triton that compiles for CPUs; its interpreter serves, before anything imports Triton.
    It takes no mask that was made of two others, until that is one of truth values again."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends
    from triton.runtime import interpreter

    driver = SimpleNamespace(is_active=lambda: False)
    backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)  # type: ignore[assignment]
    from triton import language
    from triton.language.extra import libdevice

    libdevice.log1p = lambda x: language.log(1.0 + x)  # the interpreter has none
    patch_lang, patched = interpreter._patch_lang, {}

    def patch_once(kernel: Any) -> Any:
        """The language stays patched: going through all of it at each call within a kernel takes half the time."""
        seen = tuple(
            id(each)
            for each in kernel.__globals__.values()
            if each in (language, language.core)
        )
        return patched.get(seen) or patched.setdefault(
            seen, (patch_lang(kernel), SimpleNamespace(restore=int))[1]
        )

    interpreter._patch_lang = patch_once
    for name, mask_at in (("create_masked_load", 1), ("create_masked_store", 2)):
        original = getattr(interpreter.InterpreterBuilder, name)

        def masked(
            self: Any, *given: Any, _original: Any = original, _at: int = mask_at
        ) -> Any:
            given[_at].data = given[_at].data.astype(bool)
            return _original(self, *given)

        setattr(interpreter.InterpreterBuilder, name, masked)


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
        while waiting and (
            arrivals is None
            or arrivals[waiting[0]] <= step
            or not engine.has_unfinished_requests()
        ):
            index = waiting.pop(0)
            sampling = SamplingParams(
                **requests[index]["sampling"], output_kind=RequestOutputKind.FINAL_ONLY
            )
            engine.add_request(
                str(index), {"prompt_token_ids": requests[index]["prompt"]}, sampling
            )
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
    ranked = [
        sorted(((-entry.logprob, token) for token, entry in at.items()))[:2]
        for at in completion.logprobs or []
    ]
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


QUEUE = ThreadPoolExecutor(1)
"""Engines in processes of their own are at work one after another, beside the tests of this process."""


class EngineProcess:
    """An engine in a process of its own: the reference without plugin and speculation, or another one."""

    def __init__(
        self,
        arguments: dict[str, Any],
        requests: Sequence[dict[str, Any]],
        folder: Path,
        *,
        runner: str = "V1",
        has_graphs: bool = False,
    ) -> None:
        question, answer = folder / "question.json", folder / "answer.json"
        asked = {
            "engine": arguments,
            "requests": list(requests),
            "runner": runner,
            "has_graphs": has_graphs,
        }
        question.write_text(json.dumps(asked))
        environment = {**os.environ, **ENVIRONMENT}
        if "speculative_config" not in arguments:
            environment["VLLM_PLUGINS"] = "none"
        command = [sys.executable, str(Path(__file__)), str(question), str(answer)]

        def run() -> dict[str, Any]:
            with subprocess.Popen(command, env=environment) as self._process:
                assert self._process.wait() == 0
            return dict(json.loads(answer.read_text()))

        self._answer = QUEUE.submit(run)

    def answer(self) -> dict[str, Any]:
        return self._answer.result()

    def close(self) -> None:
        if not self._answer.cancel() and not self._answer.done():
            self._process.kill()


def main(question: Path, answer: Path) -> None:
    asked = json.loads(question.read_text())
    llm = start_engine(asked["engine"], runner=asked["runner"])
    from cases import few_prompts
    from graphs import capture_blocks, counting, takes_of_a_step

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    blocks: list[Any] = []
    if asked["runner"] == "V2":
        graphs = capture_blocks(worker.model_runner) if asked["has_graphs"] else []
        blocks = counting(worker.model_runner.speculator, "propose", graphs)
    outputs = serve(
        llm,
        asked["requests"],
        arrivals=[request.get("arrives", 0) for request in asked["requests"]],
    )
    is_reference = "speculative_config" not in asked["engine"]
    plain = (
        takes_of_a_step(llm, worker.model_runner, few_prompts()) if is_reference else {}
    )
    answer.write_text(json.dumps({
        "outputs": outputs, "counters": counters(llm), "runner": type(worker.model_runner).__module__,
        "blocks": blocks, "plain": plain,
        "is_async": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
    }))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
