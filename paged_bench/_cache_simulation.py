"""Measures the memory of models with sliding windows, latents or recurrent states: runs the scheduler over the shapes
of their layers, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paged_backend.api.config import EngineConfig
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.sizes import GIB
from paged_backend.engine.recurrent_models import num_state_slots
from paged_backend.memory.cache_layout import CacheLayout
from paged_backend.memory.kv_cache import LayerShape, bytes_per_block
from paged_backend.memory.state_cache import StateShape, TensorShape, bytes_per_slot
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.step_result import StepResult
from paged_bench._report import Record

LENGTHS = (8192, 32_768)
BLOCK_SIZE = 16
CHUNK = 2048  # prompt tokens of a step
# Tokens generated after the prompt. The memory is measured after each, as blocks fill and leave the window.
DECODED = 48
POOL = 64 * GIB
TARGET = 1.05
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class ModelShape:
    """What the layers of a model keep for a sequence."""

    name: str
    layers: tuple[LayerShape, ...]  # with attention
    states: tuple[StateShape, ...] = ()  # of the recurrent layers
    # What a pool without this feature would keep: all tokens, keys and values of all heads, in every layer.
    plain: tuple[LayerShape, ...] = ()

    def layout(self, length: int) -> CacheLayout:
        """Return the layout for contexts of at most `length` tokens."""
        return CacheLayout.of(self.layers, BLOCK_SIZE, max_model_len=length, max_pending=2 * CHUNK)

    def required(self, length: int) -> int:
        """Return the bytes that the model needs to continue a sequence of `length` tokens."""
        cached = sum(min(length, layer.window or length) * _token_bytes([layer]) for layer in self.layers)
        return cached + bytes_per_slot(self.states)

    def held(self, length: int) -> int:
        """Return the most bytes that a sequence holds while it decodes up to `length` tokens."""
        layout = self.layout(length)
        pages = held_pages(layout, length)
        return pages * bytes_per_block(layout.shapes, BLOCK_SIZE, DTYPE) + bytes_per_slot(self.states)

    def requests(self, length: int) -> int:
        """Return how many sequences of `length` tokens fit into POOL. With the default options, each has a second state
        slot, for a checkpoint."""
        layout = self.layout(length)
        pages = layout.blocks.pages_for([length], [1], 0)
        slots = (
            num_state_slots(EngineConfig.from_options({"model": self.name, "max_num_seqs": 1})) if self.states else 0
        )
        sequence = pages * bytes_per_block(layout.shapes, BLOCK_SIZE, DTYPE) + slots * bytes_per_slot(self.states)
        return POOL // sequence


def _token_bytes(layers: Sequence[LayerShape]) -> int:
    return bytes_per_block(layers, 1, DTYPE)


def _windowed(name: str, full: int, windowed: int, window: int, heads: int, head_dim: int) -> ModelShape:
    """Return a model with `full` layers of full attention and `windowed` layers with a sliding window."""
    layers = [LayerShape(heads, head_dim)] * full + [LayerShape(heads, head_dim, window=window)] * windowed
    return ModelShape(name, tuple(layers), plain=(LayerShape(heads, head_dim),) * (full + windowed))


def _latent(name: str, layers: int, heads: int) -> ModelShape:
    """Return a model with the latent attention of DeepSeek V2 and V3: 512 elements for keys and values, 64 for
    positions. Each of its heads has keys of 192 and values of 128 elements."""
    expanded = (LayerShape(heads, 192, 128),) * layers
    return ModelShape(name, (LayerShape(1, 576, 512, latent=True),) * layers, plain=expanded)


def _hybrid(name: str, full: LayerShape, num_full: int, state: StateShape, num_states: int) -> ModelShape:
    """Return a model with layers of full attention and recurrent layers. transformers keeps the states of scans in
    float32."""
    return ModelShape(name, (full,) * num_full, (state,) * num_states, plain=(full,) * (num_full + num_states))


MODELS = (
    _windowed("Gemma 3 270M", 3, 15, 512, 1, 256),
    _windowed("Gemma 3 27B", 10, 52, 1024, 16, 128),
    _windowed("gpt-oss 20B", 12, 12, 128, 8, 64),
    _windowed("Mistral 7B v0.1", 0, 32, 4096, 8, 128),
    _latent("DeepSeek V2 Lite", 27, 16),
    _latent("DeepSeek V3", 61, 128),
    _hybrid(
        "Qwen3-Next 80B",
        LayerShape(2, 256),
        12,
        StateShape(TensorShape((8192, 4), DTYPE), TensorShape((32, 128, 128), torch.float32)),
        36,
    ),
    _hybrid(
        "Granite 4.0 H-Small",
        LayerShape(8, 128),
        4,
        StateShape(TensorShape((8448, 4), DTYPE), TensorShape((128, 64, 128), torch.float32)),
        36,
    ),
    _hybrid("LFM2 1.2B", LayerShape(8, 64), 6, StateShape(TensorShape((2048, 3), DTYPE), None), 10),
)


def cache_memory(models: Sequence[ModelShape] = MODELS) -> list[Record]:
    """Measure memory held against memory required, and how many requests fit into a pool.

    The peers are the figures of a pool that keeps keys and values of all tokens, heads and layers, and those of a
    sequence with a second state slot, a checkpoint of its prompt for the prefix cache.
    """
    records = []
    for model in models:
        for length in LENGTHS:
            of = f"{model.name}, {length:,} tokens"
            required, plain = model.required(length), length * _token_bytes(model.plain)
            ratio, kept = model.held(length) / required, plain / required
            peers = {"all kept": kept}
            if model.states:
                peers["with a checkpoint"] = ratio + bytes_per_slot(model.states) / required
            records.append(Record(f"memory, {of}", ratio, "x required", TARGET, 1.0, peers))
            fits, few = model.requests(length), POOL // plain
            records.append(Record(f"requests in 64 GiB, {of}", fits, "requests", peers={"all kept": few}))
    return records


def held_pages(layout: CacheLayout, length: int) -> int:
    """Return the largest number of pages that a sequence holds while it decodes up to `length` tokens."""
    pages = layout.blocks.pages_for([length], [length], 0)
    blocks = BlockManager(pages, BLOCK_SIZE, layout=layout.blocks)
    scheduler = Scheduler(blocks, max_num_seqs=1, max_num_batched_tokens=CHUNK)
    prompt = (0,) * (length - DECODED)
    scheduler.add(GenerateRequest(0, prompt, SamplingParams(max_tokens=DECODED), 0, frozenset()))
    most = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, StepResult.of_tokens([0] * sum(len(chunk.sampled_sequences) for chunk in plan.chunks)))
        if any(group.leader.generated > 1 for group in scheduler.running):
            most = max(most, blocks.num_used)
    return most
