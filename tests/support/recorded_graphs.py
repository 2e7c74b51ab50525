"""CUDA graphs without a GPU: `CpuCapture` captures and replays steps on a CPU as `CudaGraphCapture` does on a GPU.

A capture records the operations with their tensors and numbers: those of PyTorch, the C++ kernels, and each call of
`paged_kernels.ops` as the launch of one kernel. A replay runs them again on the same memory with the same numbers, and
no other Python code, so it sees of its step only what was written to memory that the graph reads. An operation that
needs a value on the host raises RuntimeError, as during the capture of a CUDA graph.

Not shown: work on several streams, collectives, the reuse of a graph's own memory, and memory that is freed too early
(test_graph_inputs_outlive_the_capture).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from paged_backend.engine import runner_builder
from paged_backend.execution import graphs
from paged_kernels import ops
from paged_kernels.paging import Paging

FORBIDDEN = "operation not permitted when stream is capturing"
READS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__")
READ_METHODS = {getattr(Tensor, name) for name in READS}
READ_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
READ_OPERATIONS = ("_local_scalar_dense", "lift_fresh")  # of a tensor by the host, of a host's value by a tensor
MASKS = (torch.bool, torch.uint8)  # types of indices that select a number of elements which the host does not know
ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


class CpuCapture:
    """Lets the engines of a test capture graphs on a CPU. `replays` has the number of logits of each replayed step: its
    rows, or its sequences if it has chunks of prompts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.replays: list[int] = []
        dispatch = ops._dispatch

        def launching(*operation: Any) -> Callable[..., Any]:
            found = dispatch(*operation)
            return partial(_Graph.current.launch, found) if _Graph.current else found

        monkeypatch.setattr(ops, "_dispatch", launching)
        for name, value in (
            ("CUDAGraph", _Graph),
            ("graph", lambda graph, **options: graph.capture()),
            ("current_device", lambda: 0),
            ("current_stream", mock.Mock()),
            ("stream", nullcontext),
            ("get_sync_debug_mode", lambda: 0),
            ("set_sync_debug_mode", lambda mode: None),
        ):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(graphs, "_capture_stream", mock.Mock())
        monkeypatch.setattr(runner_builder, "graph_capture", lambda device: self._counting(graphs.CudaGraphCapture()))

    def _counting(self, capture: graphs.GraphCapture) -> graphs.GraphCapture:
        def counting(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
            replay = capture(step)

            def counted() -> Tensor:
                logits = replay()
                self.replays.append(len(logits))
                return logits

            return counted

        return counting

    @staticmethod
    def check(function: Callable[..., None], *arguments: Any) -> None:
        """Call a function that reads tensors, now and, if a graph is being captured, at the same point of its
        replays."""
        if _Graph.current:
            _Graph.current.launch(function, *arguments)
        else:
            function(*arguments)


class _Graph:
    """Stands for `torch.cuda.CUDAGraph`."""

    current: _Graph | None = None  # the one that is being captured

    def __init__(self) -> None:
        self.is_recording = False
        self._operations: list[Callable[[], None]] = []
        self._memory: dict[int, tuple[torch.UntypedStorage, int]] = {}  # all that it uses, with its address

    def pool(self) -> None:
        """Return the memory that other graphs may share: none."""

    @torch.inference_mode()
    def replay(self) -> None:
        for storage, address in self._memory.values():
            if storage.data_ptr() != address:
                raise RuntimeError("a captured graph uses memory that has been freed")
        for operation in self._operations:
            operation()

    @contextmanager
    def capture(self) -> Iterator[None]:
        _Graph.current, self.is_recording = self, True
        try:
            with _HostReads(self), _Operations(self):
                yield
        finally:
            _Graph.current, self.is_recording = None, False

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a kernel and record it. It may read values anywhere, as it would on the device."""
        if not self.is_recording:
            return function(*args, **kwargs)
        self.is_recording = False
        try:
            result = function(*args, **kwargs)
            self.record(function, args, kwargs, result)
            return result
        finally:
            self.is_recording = True

    def record(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Record an operation that has run. What is reassigned later in its arguments does not change the graph."""
        arguments = _map((args, kwargs), Tensor.detach)
        given = _memory_of(arguments)
        results = [one if one.untyped_storage()._cdata not in given else None for one in _tensors(result)]
        self.keep((arguments, result))

        def run() -> None:
            again, options = _map(arguments, lambda tensor: tensor)  # without what was derived from other values
            for paging in _parts((again, options), Paging):
                _check_bounds(paging)
            for old, new in zip(results, _tensors(function(*again, **options)), strict=True):
                if old is not None:
                    old.copy_(new)

        self._operations.append(run)

    def keep(self, tree: Any) -> None:
        for storage in map(Tensor.untyped_storage, _tensors(tree)):
            self._memory.setdefault(storage._cdata, (storage, storage.data_ptr()))


class _Operations(TorchDispatchMode):
    """Records operations of PyTorch and C++ kernels."""

    def __init__(self, graph: _Graph):
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._graph.is_recording:
            return function(*args, **kwargs)
        name = function._schema.name.removeprefix("aten::")
        is_gather = name == "index" and not any(one.dtype in MASKS for one in _tensors(args[1]))
        if name in READ_OPERATIONS or (READ_TAGS & set(function.tags) and not is_gather):
            raise RuntimeError(f"{FORBIDDEN}: {name}")
        result = function(*args, **kwargs)
        given, returned = _memory_of((args, kwargs)), _memory_of(result)
        is_view = bool(returned) and returned <= given and not function._schema.is_mutable
        if is_view or name in ALLOCATIONS:
            self._graph.keep((args, kwargs, result))
        else:
            self._graph.record(function, args, kwargs, result)
        return result


class _HostReads(TorchFunctionMode):
    """Rejects the methods with which the host reads a tensor."""

    def __init__(self, graph: _Graph):
        super().__init__()
        self._graph = graph

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._graph.is_recording and function in READ_METHODS:
            raise RuntimeError(f"{FORBIDDEN}: {function.__name__}")
        return function(*args, **(kwargs or {}))


def _check_bounds(paging: Paging) -> None:
    """Check values that a launch is shaped for, which a GPU takes on trust."""
    assert int(paging.context_lens.max()) <= paging.max_context_len
    assert int(paging.query_starts.diff().max()) <= paging.max_query_len
    assert paging.shared is None or int(paging.shared.lens.max()) <= paging.shared.max_len


def _map(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of containers and dataclasses with changed tensors, and without cached properties."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _map(value, change) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(part, change) for part in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_map(part, change) for part in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        made = object.__new__(type(tree))
        for field in fields(tree):
            object.__setattr__(made, field.name, _map(getattr(tree, field.name), change))
        return made
    return tree


def _parts(tree: Any, kind: type) -> Iterator[Any]:
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, dict):
        yield from _parts(list(tree.values()), kind)
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _parts(part, kind)
    elif is_dataclass(tree) and not isinstance(tree, type):
        yield from _parts([getattr(tree, field.name) for field in fields(tree)], kind)


def _tensors(tree: Any) -> list[Tensor]:
    return list(_parts(tree, Tensor))


def _memory_of(tree: Any) -> set[int]:
    return {storage._cdata for storage in map(Tensor.untyped_storage, _tensors(tree))}
