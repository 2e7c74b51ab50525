"""Runs a Gluon kernel for Hopper without a GPU: `run(kernel, grid, arguments)`.

Triton has no interpreter for Gluon. Here the functions of a kernel run in Python with `Array`s in place of tensors, and
the partitions of `warp_specialize` in threads, one at a time. Which one runs after a synchronization is random, and
some wait for long (Burckhardt et al. 2010, "A randomized scheduler with probabilistic guarantees of finding bugs").
Copies of the tensor memory accelerator (TMA) arrive at random too. What is undefined on a GPU shows:

    memory that a copy will write     is NaN until the copy has arrived
    a product                         reads its operands in shared memory when it is waited for, not when it starts
    partitions that wait forever      raise Deadlock

Not covered: layouts, registers, and races within a partition, between generic and asynchronous accesses of memory
(`fence_async_shared`). Scalars of a kernel are integers and arrays without dimensions.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

NUMPY = {
    torch.float16: np.float16, torch.float32: np.float32, torch.int32: np.int32, torch.int64: np.int64,
}  # fmt: skip
UNDEFINED = {np.dtype(np.float16): np.nan, np.dtype(np.float32): np.nan}


class Deadlock(RuntimeError):
    """All partitions wait, and no copy is under way."""


class Array(np.ndarray):
    """A tensor of a kernel."""

    def to(self, dtype: Any) -> Array:
        return array(self.astype(dtype))


def array(values: Any, dtype: Any = None) -> Array:
    return np.asarray(values, dtype).view(Array)


@dataclass(frozen=True)
class Pointer:
    """Addresses in a tensor."""

    memory: np.ndarray  # flat
    place: Any = 0

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, np.asarray(self.place, np.int64) + np.asarray(offset))


def _pointer(tensor: torch.Tensor) -> Pointer:
    flat = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return Pointer(flat.numpy(), tensor.storage_offset())


def load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Array:
    place, mask = np.broadcast_arrays(pointer.place, mask)
    read = place[mask]
    assert ((read >= 0) & (read < len(pointer.memory))).all(), "a load outside of its tensor"
    found = np.full(place.shape, other, pointer.memory.dtype)
    found[mask] = pointer.memory[read]
    return array(found)


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    place, value, mask = np.broadcast_arrays(pointer.place, value, mask)
    written = place[mask]
    assert ((written >= 0) & (written < len(pointer.memory))).all(), "a store outside of its tensor"
    pointer.memory[written] = value[mask]


class Shared:
    """A part of the shared memory of a program."""

    def __init__(self, memory: np.ndarray):
        self.memory = memory
        self.shape, self.dtype = memory.shape, memory.dtype

    def index(self, i: Any) -> Shared:
        assert 0 <= i < len(self.memory), i
        return Shared(self.memory[int(i)])

    def slice(self, start: Any, length: int) -> Shared:
        assert start >= 0 and start + length <= len(self.memory), (start, length)
        return Shared(self.memory[int(start) : int(start) + length])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.memory.transpose(order))

    def load(self, layout: Any) -> Array:
        return array(self.memory.copy())

    def store(self, value: Array) -> None:
        self.memory[...] = value


class Barrier:
    """A barrier in shared memory: a phase ends when `count` arrivals and all expected bytes have arrived."""

    def __init__(self) -> None:
        self.count = self.left = self.phase = self.bytes = 0

    def init(self, count: int) -> None:
        assert self.count == 0, "a barrier is initialized twice"
        self.count = self.left = count

    def arrive(self, count: int = 1) -> None:
        self.left -= count
        assert self.left >= 0, "more arrivals than a barrier expects"
        self._end()

    def add_bytes(self, count: int) -> None:
        self.bytes += count
        self._end()

    def _end(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.left, self.phase = self.count, self.phase + 1

    def has_completed(self, parity: int) -> bool:
        return self.phase & 1 != parity


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, shape: Sequence[int]):
        self.barriers = [Barrier() for _ in range(shape[0])]

    def index(self, i: Any) -> Barrier:
        return self.barriers[int(i)]


@dataclass
class Product:
    """A product that has started."""

    a: Array | Shared
    b: Shared
    acc: Array | None
    result: Array | None = None

    def finish(self) -> None:
        a, b = (np.asarray(x.memory if isinstance(x, Shared) else x, np.float32) for x in (self.a, self.b))
        found = a @ b
        self.result = array(found if self.acc is None else found + self.acc, np.float32)


class Program:
    """One program of a grid: its partitions, of which one runs at a time, and copies under way."""

    def __init__(self, index: int, grid: int, random: random.Random):
        self.index, self.grid, self.random = index, grid, random
        self.copies: list[Callable[[], None]] = []
        self.products: dict[threading.Thread, list[Product]] = {}
        self.turn = threading.Condition()
        self.running: threading.Thread | None = None
        self.order: list[threading.Thread] = []  # the first that can run does; it changes now and then
        self.waiting: dict[threading.Thread, Callable[[], bool]] = {}  # partitions, and what they wait for
        self.error: BaseException | None = None

    def warp_specialize(self, partitions: Sequence[tuple[Callable[..., None], Sequence[Any]]], *_: Any) -> None:
        def work(function: Callable[..., None], arguments: Sequence[Any]) -> None:
            try:
                self._wait_for_turn()
                function(*arguments)
            except BaseException as error:
                self.error = self.error or error
            finally:
                self._leave()

        threads = [threading.Thread(target=work, args=partition) for partition in partitions]
        self.waiting = {thread: lambda: True for thread in threads}
        self.order, self.running = threads, threads[0]
        for thread in list(threads):
            thread.start()
        for thread in list(threads):
            thread.join()
        if self.error:
            raise self.error
        assert not self.copies, "a program ends before its copies have arrived"

    def synchronize(self, condition: Callable[[], bool] = lambda: True) -> None:
        """Let other partitions and copies go on, until the condition holds."""
        if self.running is None:  # before the partitions start
            assert condition()
            return
        self.waiting[threading.current_thread()] = condition
        self._choose()
        self._wait_for_turn()

    def _choose(self) -> None:
        """Choose the partition that runs next, after any number of copies."""
        while True:
            ready = [thread for thread, condition in self.waiting.items() if self.error or condition()]
            if self.copies and (not ready or self.random.random() < 0.3):
                self.copies.pop(self.random.randrange(len(self.copies)))()
                continue
            if not ready and self.waiting:
                self.error = Deadlock(f"{len(self.waiting)} partitions wait")
                continue
            if self.random.random() < 0.1:
                self.random.shuffle(self.order)
            with self.turn:
                self.running = min(ready, key=self.order.index) if ready else None
                self.turn.notify_all()
            return

    def _wait_for_turn(self) -> None:
        with self.turn:
            self.turn.wait_for(lambda: self.running is threading.current_thread())
        if self.error:
            raise self.error

    def _leave(self) -> None:
        del self.waiting[threading.current_thread()]
        self._choose()


def run(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], *, seed: int = 0) -> None:
    """Run all programs of a kernel, one after the other."""
    for index in range(grid[0]):
        program = Program(index, grid[0], random.Random(f"{seed} {index}"))
        function = _interpreted(kernel, _language(program), {})
        with np.errstate(all="ignore"):
            function(**{name: _argument(arguments[name]) for name in kernel.arg_names})


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _pointer(value)
    return array(value) if type(value) in (int, float) else value


def _interpreted(function: Any, language: dict[str, Any], done: dict[Any, Any]) -> Callable[..., Any]:
    """Return the Python function of a kernel, with other functions of kernels and the language replaced."""
    plain = function.fn
    if plain not in done:
        scope = dict(plain.__globals__)
        done[plain] = FunctionType(plain.__code__, scope, plain.__name__, plain.__defaults__)
        for name in plain.__code__.co_names:
            if name in language:
                scope[name] = language[name]
            elif hasattr(scope.get(name), "fn"):
                scope[name] = _interpreted(scope[name], language, done)
    return done[plain]


def _language(program: Program) -> dict[str, Any]:
    """Return what the names of modules and functions of Gluon stand for."""
    from triton.experimental.gluon import language as real

    def allocate_shared_memory(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
        if dtype is np.int64:
            return Barriers(shape) if len(shape) > 1 else Barriers(shape).index(0)
        return Shared(np.full(shape, UNDEFINED[np.dtype(dtype)], dtype))

    def copy(rows: Any, at: Sequence[Any], barrier: Barrier, target: Shared) -> None:
        (row, column), block = (int(i) for i in at), rows.block_shape
        assert column == 0 and list(target.shape) == list(block), (at, target.shape)
        assert row >= 0 and row + block[0] <= rows.shape[0], "a copy outside of its tensor"
        target.memory[...] = UNDEFINED[target.dtype]

        def arrive() -> None:
            target.memory[...] = rows.base[row : row + block[0]].numpy()
            barrier.add_bytes(-target.memory.nbytes)

        program.copies.append(arrive)
        program.synchronize()

    def expect(barrier: Barrier, count: int) -> None:
        barrier.bytes += count
        barrier.arrive()
        program.synchronize()

    def arrive(barrier: Barrier, count: int = 1) -> None:
        barrier.arrive(count)
        program.synchronize()

    def multiply(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        assert (a.shape[1], b.shape[1]) == (b.shape[0], acc.shape[1])
        product = Product(a, b, acc if use_acc else None)
        program.products.setdefault(threading.current_thread(), []).append(product)
        return product

    def wait_for_products(left: int, deps: Sequence[Any]) -> Any:
        program.synchronize()
        started = program.products.get(threading.current_thread(), [])
        while len(started) > left:
            started.pop(0).finish()
        found = tuple(value.result if isinstance(value, Product) else value for value in deps)
        assert all(value is not None for value in found), "the result of a product that has not been waited for"
        return found[0] if len(found) == 1 else found

    gl = SimpleNamespace(
        program_id=lambda axis: array(program.index), num_programs=lambda axis: program.grid,
        load=load, store=store, allocate_shared_memory=allocate_shared_memory,
        arange=lambda start, end, layout=None: array(np.arange(start, end, dtype=np.int32)),
        full=lambda shape, value, dtype, layout=None: array(np.full(shape, value, dtype)),
        zeros=lambda shape, dtype, layout=None: array(np.zeros(shape, dtype)),
        where=lambda condition, x, y: array(np.where(condition, x, y)),
        maximum=np.maximum, minimum=np.minimum, cdiv=lambda x, y: -(-x // y),
        max=lambda x, axis: np.max(x, axis), sum=lambda x, axis: np.sum(x, axis), exp2=np.exp2,
        convert_layout=lambda x, layout: x, static_range=range, warp_specialize=program.warp_specialize,
        float32=np.float32, int64=np.int64, constexpr=real.constexpr,
        **{name: getattr(real, name) for name in dir(real) if name.endswith("Layout")},
    )  # fmt: skip
    barriers = ModuleType("mbarrier")
    barriers.__dict__.update(
        init=lambda barrier, count: barrier.init(count), expect=expect, arrive=arrive, MBarrierLayout=lambda: None,
        wait=lambda barrier, parity: program.synchronize(lambda: barrier.has_completed(int(parity))),
    )  # fmt: skip
    return dict(
        gl=gl, tl=gl, mbarrier=barriers, tma=SimpleNamespace(async_copy_global_to_shared=copy), warpgroup_mma=multiply,
        warpgroup_mma_wait=wait_for_products, fence_async_shared=program.synchronize,
    )  # fmt: skip
