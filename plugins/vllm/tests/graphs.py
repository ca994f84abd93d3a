"""A device on which operations are counted, and captured graphs, without one: what ran is kept, and runs again on the
same memory, whatever the host knows by then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


def storages(value: Any) -> set[int]:
    return {
        leaf.untyped_storage()._cdata
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    }


class Counted(TorchDispatchMode):
    """Counts operations, each of them a launch on a device (views are none), new tensors, and waits for values."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.allocations = self.waits = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        is_new = bool(storages(out) - storages((args, kwargs)))
        self.waits += func is torch.ops.aten._local_scalar_dense.default
        self.launches += is_new or func._schema.is_mutable
        self.allocations += is_new
        return out


class RecordedGraph(TorchDispatchMode):
    """Stands for a captured graph. Its operations are those of the capture, on the tensors of the capture; the host's
    code, its numbers and its decisions do not run again."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Any] = []
        self.replays = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        from vllm import forward_context

        assert func is not torch.ops.aten._local_scalar_dense.default, (
            "a capture cannot wait for a value"
        )
        given = kwargs or {}
        out = func(*args, **given)
        if func._schema.is_mutable or storages(out) - storages(
            (args, given)
        ):  # views need not run again
            self._calls.append(
                (func, args, given, out, forward_context._forward_context)
            )
        return out

    @property
    def launches(self) -> int:
        return len(self._calls)

    def replay(self) -> None:
        with _disable_current_modes():  # one launch for whoever counts
            self._replay()

    def _replay(self) -> None:
        from vllm.forward_context import override_forward_context

        self.replays += 1
        for func, args, kwargs, out, context in self._calls:
            with override_forward_context(context):
                found = func(*args, **kwargs)
            if func._schema.is_mutable:
                continue
            for kept, new in zip(tree_leaves(out), tree_leaves(found), strict=True):
                if not isinstance(kept, torch.Tensor):
                    assert kept == new
                elif (
                    "scheduler_metadata" in func._schema.name
                ):  # a CPU's, which points into itself
                    kept.set_(new)
                else:
                    kept.copy_(new)


def capture_blocks(runner: Any) -> Any:
    """Captures the V2 runner's drafts as its own manager of graphs does on a GPU, for batches of up to 16."""
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import cudagraph_utils

    @contextmanager
    def recording(graph: RecordedGraph, *_: Any, **__: Any) -> Iterator[None]:
        with graph:
            yield

    type(current_platform)._global_graph_pool = object()
    cudagraph_utils.graph_capture = cudagraph_utils.capture_pool = lambda *_, **__: (
        nullcontext()
    )
    cudagraph_utils.current_stream = lambda: None
    torch.cuda.CUDAGraph, torch.cuda.graph = RecordedGraph, recording  # type: ignore[misc, assignment]
    compilation = runner.vllm_config.compilation_config
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = (
        [1, 4, 16],
        16,
    )
    speculator = runner.speculator
    for group in speculator.attn_groups[0]:
        group.get_metadata_builder().supports_draft_decode_metadata_update = True
    speculator.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
    speculator.capture()
    return list(speculator._blocks.graphs.values())


def counting(owner: Any, name: str, graphs: Any = ()) -> list[dict[str, int]]:
    """What each call of a method takes from now on; a replayed graph is one of its launches."""
    found: list[dict[str, int]] = []
    method = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        before = sum(graph.replays for graph in graphs)
        with Counted() as count:
            answer = method(*args, **kwargs)
        replays = sum(graph.replays for graph in graphs) - before
        numbers = {
            "launches": count.launches + replays,
            "allocations": count.allocations,
            "waits": count.waits,
        }
        found.append({"replays": replays, **numbers})
        return answer

    setattr(owner, name, counted)
    return found


def takes_of_a_step(llm: Any, runner: Any, prompts: list[list[int]]) -> dict[str, int]:
    """What one step of the runner takes in which each of these sequences decodes."""
    from serving import serve

    methods = {
        name: getattr(runner, name) for name in ("execute_model", "sample_tokens")
    }
    parts = [counting(runner, name) for name in methods]
    sampling = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    serve(llm, [{"prompt": prompt, "sampling": sampling} for prompt in prompts])
    for name, method in methods.items():
        setattr(runner, name, method)
    first, second = (
        calls[-2] for calls in parts
    )  # the last one may follow the last token
    return {name: first[name] + second[name] for name in first}
