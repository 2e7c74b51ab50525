"""The launches of a decode step and of a prompt on a GPU that does not exist: `python -m
tests.support.fake_decode_step FAMILY [options as JSON]`.

Prints, for models with 2 and 4 layers, the operations in the CUDA graph of a step and those outside of it as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton import knobs

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine import runner_builder
from paged_backend.execution import graphs
from paged_backend.execution.batch import PackedBatch, pack
from paged_backend.scheduling.group import Group
from paged_backend.scheduling.plan import Chunk, Plan
from paged_kernels.ops import step_inputs
from tests.support.fake_gpu import load, on_fake_gpu, zero_products

SMALL = {"dtype": "bfloat16", "num_gpu_blocks_override": 1024, "max_num_batched_tokens": 128}
STEPS = ((1, 1), (16, 1), (1, 100))  # sequences, and rows of each: two decode steps and a prompt
SAMPLINGS = ({"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20})


def _storages(tree: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


class DeviceOperations(TorchDispatchMode):
    """Records operations that read or write the memory of the device, except for views and allocations, and copies of
    any tensor to another device or type."""

    def __init__(self, memory: Iterable[Tensor] | None) -> None:
        """memory: tensors on the device; what is computed from them is there, too. None: everything is."""
        super().__init__()
        self.names: list[str] = []
        self._kept: list[Any] = []
        self._memory = None if memory is None else _storages(list(memory))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _storages((args, kwargs))
        result = function(*args, **(kwargs or {}))
        after = _storages(result)
        is_view = bool(after) and after <= before and not function._schema.is_mutable
        name = function._schema.name.removeprefix("aten::")
        if is_view or name.startswith("empty"):
            return result
        if self._memory is None or before & self._memory or name == "_to_copy":  # a copy may be one to the device
            self.names.append(name)
            self._kept.append(result)  # so that its address is not used again
            if self._memory is not None:
                self._memory |= after
        return result


class PinnedBuffer:
    """Stands for pinned memory, without a GPU."""

    consumed = mock.Mock()

    def reserve(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)


def last_chunk(context_len: int, length: int, block_size: int, params: SamplingParams) -> Chunk:
    sequence = Group(GenerateRequest(0, (0,) * context_len, params, 0, frozenset())).leader
    sequence.tables = [[0] * -(-context_len // block_size)]
    return Chunk(sequence, context_len - length, length, sampled_sequences=(sequence,))


def count(family: str, options: dict[str, Any], layers: int) -> dict[str, Any]:
    config, assembly = load(family, SMALL | options, num_hidden_layers=layers)
    runner, inside = assembly.runner, list[list[str]]()

    def capture(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        launched: list[str] = []

        def record(**details: Any) -> bool:
            launched.append(details["fn"].name)
            return True

        step()  # allocates the workspaces of kernels
        with DeviceOperations(None) as operations, mock.patch.object(knobs.runtime, "jit_cache_hook", record):
            logits = step()
        inside.append(operations.names + launched)
        return lambda: logits

    def valid_tokens(*arguments: Any, **options: Any) -> Tensor:
        tokens = step_inputs(*arguments, **options)
        with _disable_current_modes():
            return tokens.zero_()  # the kernel, which is not launched, would have written them

    found: dict[str, Any] = {"graphs": {}, "outside": []}
    valid_inputs = mock.patch.object(graphs, "step_inputs", valid_tokens)
    max_len = assembly.loaded.spec.max_model_len

    def step(seqs: int, context_len: int, sampling: dict[str, Any], length: int = 1) -> PackedBatch:
        chunk = last_chunk(context_len, length, config.block_size, SamplingParams(**sampling))
        return pack(Plan((chunk,) * seqs), block_size=config.block_size, gqa_group=runner.gqa_group)

    with on_fake_gpu(assembly) as recorder, valid_inputs, zero_products():
        shapes = [shape for shape in runner_builder.graph_shapes_of(config, runner) if not shape.shared]
        size = config.block_size
        runner.capture_graphs(
            capture, shapes, block_size=size, max_blocks=max_len // size, max_context_len=max_len
        )  # fmt: skip
        assert runner.num_graphs
        found["graphs"] = {
            f"{shape.rows} rows, {shape.logits} logits": names for shape, names in zip(shapes, inside, strict=True)
        }
        runner._upload._buffers, runner._upload._device = [PinnedBuffer(), PinnedBuffer()], torch.device("cpu")
        recorder.take()
        for (seqs, length), sampling in itertools.product(STEPS, SAMPLINGS):
            packed = step(seqs, 100, sampling, length)
            with DeviceOperations([runner._graphs._buffer, runner._previous]) as operations:
                runner.launch(packed)
            found["outside"].append(operations.names + list(recorder.take()))
    return found


def main() -> None:
    options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    print(json.dumps({layers: count(sys.argv[1], options, layers) for layers in (2, 4)}), flush=True)
    os._exit(0)  # without waiting for the engines' threads


if __name__ == "__main__":
    main()
