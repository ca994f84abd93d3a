"""A GPU of which a CPU computes everything: its tensors are of another device, and may meet tensors of the host only
where CUDA lets them.

Two faults are found that a run on a CPU hides. A tensor of the host in an operation with one of the device
(MixedDevices). And within a step that is captured, work that needs the host (NotCapturable): reading a value or a shape
that depends on one (`item`, `bool`, `nonzero`, a mask as an index), or copying between host and device.

Tensors are of torch's `privateuseone` device, so that torch itself keeps them apart, and call themselves `cuda`, so
that the code under test takes the ways that it takes on a GPU. What torch composes of several operations is taken apart
first: it is those that wait. Triton's kernels are run by its interpreter.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, TypeVar

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

T = TypeVar("T")
aten = torch.ops.aten
HOST, BACKEND, CLAIMED = (
    torch.device("cpu"),
    torch.device("privateuseone", 0),
    torch.device("cuda", 0),
)
COPIES = {aten.copy_.default, aten._to_copy.default}
READS_VALUES = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten.allclose.default, aten.bincount.default, aten.repeat_interleave.Tensor, aten._unique.default,
    aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default,
    aten.unique_dim_consecutive.default,
}  # fmt: skip
"""Their result, or its shape, is not known before the device has got there."""
INDEXING = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}  # fmt: skip
"""They take indices of the host, and copy them; and a mask becomes as many indices as it is true."""


class MixedDevices(AssertionError):
    """An operation was given a tensor of the host and one of the device."""


class NotCapturable(AssertionError):
    """The host takes part in a step that is being captured."""


class DeviceTensor(torch.Tensor):
    """A tensor of the device; `held` has its values."""

    held: torch.Tensor
    gpu: PretendGPU
    device = property(lambda self: CLAIMED)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor, gpu: PretendGPU) -> DeviceTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=BACKEND,
        )  # fmt: skip
        self.held, self.gpu = held, gpu
        return self

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tensors = [
            t for t in tree_leaves((args, kwargs)) if isinstance(t, DeviceTensor)
        ]
        return tensors[0].gpu.execute(operation, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def tolist(self) -> Any:
        self.gpu.wait("tolist")
        return self.held.tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()


class _Dispatch(TorchDispatchMode):
    """Sees the operations that create tensors, which have none to tell their device by."""

    def __init__(self, gpu: PretendGPU) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self._gpu.execute(operation, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Gives torch the device's own name before it looks for CUDA, which is not there."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def renamed(value: Any) -> Any:
            return (
                BACKEND
                if isinstance(value, torch.device) and value.type == "cuda"
                else value
            )

        kwargs = dict(kwargs or {})
        if isinstance(kwargs.get("device"), str):
            kwargs["device"] = torch.device(kwargs["device"])
        return function(*tree_map(renamed, tuple(args)), **tree_map(renamed, kwargs))


class PretendGPU:
    """Within `with`, device "cuda" is this one. Counts what the host had to wait for outside of captured steps."""

    def __init__(self) -> None:
        if not hasattr(torch, "privateuseone"):
            _setup_privateuseone_for_python_backend()
        self.num_waits = 0
        """Times that the host waited for values of the device."""
        self.captured: list[Recording] = []
        self.launched: set[str] = set()
        """Names of Triton's kernels that ran."""
        self._recording: Recording | None = None
        self._modes = (_Functions(), _Dispatch(self))
        self._inference = (
            torch.inference_mode()
        )  # of all tensors: a view of one made outside is not to be had
        self._lifts_on_host = False

    def __enter__(self) -> PretendGPU:
        self._lifts_on_host = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(
            True
        )  # torch.tensor(.., device=..) copies where the modes see it
        self._inference.__enter__()
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        self._inference.__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._lifts_on_host)

    def put(self, value: T) -> T:
        """A copy of a tensor, or of an object of the runtime with all tensors in it, on the device."""
        if isinstance(value, torch.Tensor):
            return DeviceTensor(value.clone(), self)  # type: ignore[return-value]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {
                f.name: self.put(getattr(value, f.name))
                for f in dataclasses.fields(value)
                if f.init
            }
            return dataclasses.replace(value, **fields)
        if isinstance(value, tuple):
            return tuple(map(self.put, value))  # type: ignore[return-value]
        if isinstance(value, FunctionType) and value.__closure__:
            cells = [
                CellType(self.put(cell.cell_contents)) for cell in value.__closure__
            ]
            return FunctionType(value.__code__, value.__globals__, closure=tuple(cells))  # type: ignore[return-value]
        if type(value).__module__.startswith("magicdec.runtime"):
            value = copy.copy(value)
            vars(value).update(
                {name: self.put(each) for name, each in vars(value).items()}
            )
        return value

    def capture(
        self, part: Callable[[], T], pool: Any
    ) -> tuple[Callable[[], None], T, Any]:
        """Stands for graphs.capture: the part runs once, and what it did on the device can be replayed."""
        recording = self._recording = Recording()
        try:
            results = part()
        finally:
            self._recording = None
        self.captured.append(recording)
        return recording.replay, results, pool

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        if self._recording is not None:
            raise NotCapturable(f"{what} in a step that is captured")
        self.num_waits += 1

    def execute(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """An operation on the held tensors; its results are of the device where its tensors are, or are asked to be."""
        tensors = [
            t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        ]
        on_device = [isinstance(t, DeviceTensor) for t in tensors]
        wanted = kwargs.get("device")
        if not any(on_device) and (wanted is None or wanted.type == "cpu"):
            return operation(*args, **kwargs)
        is_composed = torch._C._dispatch_has_kernel_for_dispatch_key(
            operation.name(), "CompositeImplicitAutograd"
        )
        if (
            is_composed and operation is not aten.one_hot.default
        ):  # whose parts torch makes on CUDA, by that name
            with self._modes[1]:
                return operation.decompose(*args, **kwargs)
        goes_to_device = any(on_device) if wanted is None else wanted.type != "cpu"
        self._check(operation, args, tensors, goes_to_device)
        return self._run(operation, args, kwargs, goes_to_device)

    def _check(
        self,
        operation: Any,
        args: Any,
        tensors: list[torch.Tensor],
        goes_to_device: bool,
    ) -> None:
        """Refuses, or counts, what CUDA would."""
        name, of_host = (
            str(operation),
            [t for t in tensors if not isinstance(t, DeviceTensor)],
        )
        if operation in READS_VALUES or (
            operation is aten.one_hot.default and args[1:] in ((), (-1,))
        ):
            self.wait(name)
        elif operation in INDEXING:
            indices = [t for t in tree_leaves(args[1]) if isinstance(t, torch.Tensor)]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.wait(f"{name} with a mask")
            if any(not isinstance(index, DeviceTensor) for index in indices):
                self.wait(f"{name} with indices of the host")
        elif operation in COPIES:
            if of_host or not goes_to_device:
                self.wait(f"{name} between host and device")
        elif any(t.dim() or torch.Tag.pointwise not in operation.tags for t in of_host):
            raise MixedDevices(
                f"{name} of {len(of_host)} tensors of the host and {len(tensors) - len(of_host)} others"
            )

    def _run(self, operation: Any, args: Any, kwargs: Any, goes_to_device: bool) -> Any:
        known: dict[int, DeviceTensor] = {}

        def held(tensor: DeviceTensor) -> torch.Tensor:
            known[id(tensor.held)] = tensor
            return tensor.held

        args, kwargs = tree_map_only(DeviceTensor, held, (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": HOST}
        result = operation(*args, **kwargs)
        if self._recording is not None:
            self._recording.append(operation, args, kwargs, result)
        if not goes_to_device:
            return result
        return tree_map_only(
            torch.Tensor,
            lambda t: known[id(t)] if id(t) in known else DeviceTensor(t, self),
            result,
        )

    def launch(
        self,
        kernel: Callable[..., None],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Stands for the launch of one of Triton's kernels, which reads and writes tensors of the device."""
        if any(
            isinstance(arg, torch.Tensor) and not isinstance(arg, DeviceTensor)
            for arg in tree_leaves(args)
        ):
            raise MixedDevices(f"{name} was launched on a tensor of the host")
        self.launched.add(name)
        args = tree_map_only(DeviceTensor, lambda tensor: tensor.held, args)
        kernel(*args, **kwargs)
        if self._recording is not None:
            self._recording.append(kernel, args, kwargs, None)


class Recording:
    """What a captured part did, and how to do it again in place of its results: no Python of ours runs then, as in a
    graph, so whatever the part took from the host is frozen."""

    def __init__(self) -> None:
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        self._is_first = True

    def append(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._operations.append((operation, args, kwargs, result))

    def replay(self) -> None:
        """Recording has executed everything once, which counts as the first replay."""
        if self._is_first:
            self._is_first = False
            return
        for operation, args, kwargs, result in self._operations:
            again = operation(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def install(monkeypatch: pytest.MonkeyPatch) -> PretendGPU:
    """A GPU whose steps are captured, and on which Triton's kernels run."""
    from triton.runtime import interpreter

    from magicdec.runtime import graphs
    from magicdec.runtime.kernels import triton_attention

    gpu = PretendGPU()
    monkeypatch.setattr(graphs, "capture", gpu.capture)
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda *_: gpu.wait("torch.cuda.synchronize")
    )
    monkeypatch.setattr(triton_attention, "_num_multiprocessors", lambda device: 1)
    plain = interpreter.GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        gpu.launch(
            lambda *a, **k: plain(executor, *a, **k), executor.fn.__name__, args, kwargs
        )

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    return gpu
