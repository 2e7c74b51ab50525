"""An engine on a GPU that does not exist: `python -m tests.support.fake_gpu FAMILY [options as JSON]`.

The model runs on the CPU with the Triton kernels, for which Triton chooses a variant as on an H100. They are neither
compiled nor launched, so results are arbitrary, except that every sampled token is 0. Prints the variants as JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from paged_backend.api.config import EngineConfig
from paged_backend.engine import warm_up
from paged_backend.engine.assembly import Assembly, assemble
from paged_backend.execution import runner
from paged_backend.execution.batch import PackedBatch
from paged_backend.execution.runner import PendingStep
from paged_backend.kv.cache import LayerShape
from paged_backend.loading import model_loader
from paged_backend.loading.verification import verify_model
from paged_backend.models import few_rows, linear
from paged_backend.models.batch_invariance import convert_on_gpu
from paged_backend.models.decoder import FewRowsWeight, FusedDecoder
from paged_backend.models.overrides import use
from paged_kernels import ops
from paged_kernels.compilation import compile_launches
from paged_kernels.cpu import native
from tests.support.in_process import TINY, running, save_tiny

SHAPES: dict[str, Any] = dict(
    vocab_size=331, hidden_size=64, intermediate_size=128, num_hidden_layers=4, max_position_embeddings=16384
)
FAMILIES = {
    "llama": partial(LlamaConfig, **SHAPES, num_attention_heads=4, num_key_value_heads=2),
    "qwen3": partial(Qwen3Config, **SHAPES, num_attention_heads=16, num_key_value_heads=8, head_dim=128),
}
OPTIONS: dict[str, Any] = dict(
    block_size=16, num_gpu_blocks_override=4000, max_num_seqs=64, max_num_batched_tokens=2048, swap_space=1
)
REQUESTS = 100
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.1},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"presence_penalty": 0.5},
    {"temperature": 1.0, "repetition_penalty": 1.2, "top_p": 0.5},
    {"logit_bias": {"5": 1.0}},
    {"allowed_token_ids": [3, 4, 5]},
    {"temperature": 1.0, "top_p": 0.9, "allowed_token_ids": [3, 4, 5]},
)


class FakeDriver:
    """The answers of Triton's driver on a machine with an H100."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Recorder:
    """Records the kernels that Triton would compile, and prevents it from compiling and launching them."""

    def __init__(self) -> None:
        self.variants: dict[str, int] = {}  # number of launches

    def __call__(self, **details: Any) -> bool:
        name = f"{details['fn'].name} {details['compile']['specialization_data']}"
        self.variants[name] = self.variants.get(name, 0) + 1
        return True

    def take(self) -> dict[str, int]:
        """Return what was recorded since the last call."""
        taken, self.variants = self.variants, {}
        return taken


def load(family: str, options: dict[str, Any], **changes: Any) -> tuple[EngineConfig, Assembly]:
    """Load a tiny model for the CPU, without C++ kernels and packed weights, which a GPU does not use.

    Projections take one launch for few rows, as if that were faster for all. changes: of the model's configuration.
    """
    options = dict(options)
    is_invariant = options.pop("batch_invariant", False)  # as on a GPU, not as on a CPU

    def verify(model: PreTrainedModel, **arguments: Any) -> tuple[LayerShape, ...]:
        layers = verify_model(model, **arguments)
        stack.enter_context(zero_products())  # of the warm-up of the CPU's operations
        return tuple(replace(layer, batch_invariant=is_invariant) for layer in layers)

    with (
        ExitStack() as stack,
        mock.patch.object(model_loader, "verify_model", verify),
        tempfile.TemporaryDirectory() as directory,
        mock.patch.object(native, "levels", return_value=()),
        mock.patch.object(linear, "MIN_ELEMENTS", 2**60),
    ):
        save_tiny(FAMILIES[family](**changes), Path(directory))
        config = EngineConfig.from_options({"model": directory} | TINY | OPTIONS | options)
        assembly = assemble(config)
    model = assembly.loaded.model
    decoder = FusedDecoder.of(model)
    assert decoder
    if is_invariant:
        use(model, convert_on_gpu(model, decoder))
    elif model.dtype in few_rows.DTYPES:
        faster = few_rows.with_few_rows(decoder, lambda calls: float(not isinstance(calls[0].args[1], FewRowsWeight)))
        use(model, {(decoder.module, "forward"): faster})
    return config, assembly


@contextmanager
def on_fake_gpu(assembly: Assembly) -> Iterator[Recorder]:
    """Make the engine launch the Triton kernels, and record them."""
    sample, recorder = ops.sample, Recorder()

    def dispatch(tensor: torch.Tensor, function: str, module: str | None = None) -> Any:
        return ops._implementation(module or function, function, False)

    with ExitStack() as stack:
        for target, name, value in (
            (driver, "_active", FakeDriver()),
            (knobs.runtime, "jit_cache_hook", recorder),
            (ops, "_dispatch", dispatch),
            (ops, "sample", lambda logits, metadata, out=None: sample(logits, metadata, out=out).zero_()),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        kv = assembly.runner.kv
        assembly.runner.gqa_group = runner._gqa_group(assembly.loaded.model, torch.device("cuda"), kv.layers[0])
        yield recorder


@contextmanager
def zero_products() -> Iterator[None]:
    """Leave out the CPU's products and its attention, which take long, above all in bfloat16."""
    with (
        mock.patch.object(F, "linear", lambda x, weight, bias=None: x.new_zeros(*x.shape[:-1], len(weight))),
        mock.patch.object(F, "scaled_dot_product_attention", lambda q, *arguments, **options: torch.zeros_like(q)),
    ):
        yield


def run_warm_up(config: EngineConfig, assembly: Assembly) -> None:
    """Run the steps of the warm-up, as to compile their kernels ahead, and the transfers that the load measures."""
    spec, runner = assembly.loaded.spec, assembly.runner
    compile_launches(lambda: warm_up.run_warm_up_steps(config, spec, runner, lambda: None))
    warm_up.measure_costs(assembly.runner, 1e-3, 64)


def serve_requests(assembly: Assembly, seed: int) -> None:
    """Run random requests in groups of random sizes, many of which share a prefix, and before them one such group.

    No step begins before a group is complete: steps take so little time here that requests would run one by one.
    """
    rnd = random.Random(seed)
    prefix = [rnd.randrange(3, 256) for _ in range(1000)]
    complete, launch = threading.Event(), assembly.runner.launch

    def launch_complete(packed: PackedBatch) -> PendingStep:
        complete.wait()
        return launch(packed)

    assembly.runner.launch = launch_complete  # type: ignore[method-assign]
    with running(assembly) as engine:
        complete.clear()
        sharing = [engine.submit([*prefix, token], max_tokens=20) for token in range(3, 23)]
        complete.set()
        engine.wait(*sharing)
        left = REQUESTS
        while left > 0:
            count = min(left, rnd.choice((1, 1, 1, 2, 5, 20, 64, 100)))
            keys = []
            complete.clear()
            for _ in range(count):
                length = int(2 ** rnd.uniform(0, rnd.choice((6, 9, 11, 13))))
                prompt = prefix[: rnd.choice((0, 0, 100, 1000))] + [rnd.randrange(3, 256) for _ in range(length)]
                keys.append(engine.submit(prompt, max_tokens=rnd.choice((1, 3, 20)), **rnd.choice(SAMPLINGS)))
            complete.set()
            engine.wait(*keys)
            left -= count


def main() -> None:
    family, options = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    config, assembly = load(family, options)
    with on_fake_gpu(assembly) as recorder, zero_products():
        run_warm_up(config, assembly)
        warmed = recorder.take()
        serve_requests(assembly, seed=1)
        served = recorder.take()
    print(json.dumps({"warmed": warmed, "served": served}), flush=True)
    os._exit(0)  # without waiting for the engine's threads


if __name__ == "__main__":
    main()
