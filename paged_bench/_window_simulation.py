"""Measures the KV memory of models with sliding windows: runs the scheduler over their layouts, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.memory.cache_layout import CacheLayout
from paged_backend.memory.kv_cache import LayerShape
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.step_result import StepResult
from paged_bench._report import Record

LENGTHS = (8192, 32_768)
BLOCK_SIZE = 16
CHUNK = 2048  # prompt tokens of a step
# Tokens generated after the prompt. The memory is measured after each, as blocks fill and leave the window.
DECODED = 48
POOL_TOKENS = 1 << 19  # tokens for which the pool of the last part has room in all layers
TARGET = 1.05


@dataclass(frozen=True)
class WindowedModel:
    """The layers of a model."""

    name: str
    full: int  # layers with full attention
    windowed: int  # layers with a sliding window
    window: int

    def layout(self, length: int) -> CacheLayout:
        """Return the layout for contexts of at most `length` tokens."""
        layers = [LayerShape(1, 64)] * self.full + [LayerShape(1, 64, window=self.window)] * self.windowed
        return CacheLayout.of(layers, BLOCK_SIZE, max_model_len=length, max_pending=2 * CHUNK)

    def required(self, length: int) -> int:
        """Return the keys that the attention pattern requires, in tokens times layers."""
        return self.full * length + self.windowed * min(length, self.window)


MODELS = (
    WindowedModel("Gemma 3 270M", 3, 15, 512),
    WindowedModel("Gemma 3 27B", 10, 52, 1024),
    WindowedModel("gpt-oss 20B", 12, 12, 128),
    WindowedModel("Mistral 7B v0.1", 0, 32, 4096),
)


def windows(models: Sequence[WindowedModel] = MODELS) -> list[Record]:
    """Measure memory held against memory required, and how many requests fit into a pool.

    The peers are the figures of a pool that keeps all blocks.
    """
    records = []
    for model in models:
        for length in LENGTHS:
            layout = model.layout(length)
            of = f"{model.name}, {length:,} tokens"
            layers, required = model.full + model.windowed, model.required(length)
            kept = layers * length / required
            ratio = held_pages(layout, length) * BLOCK_SIZE * len(layout.shapes) / required
            records.append(Record(f"KV memory, {of}", ratio, "x required", TARGET, 1.0, {"all blocks kept": kept}))
            pages = POOL_TOKENS * layers // (BLOCK_SIZE * len(layout.shapes))
            fits = pages // layout.blocks.pages_for([length], [1], 0)
            records.append(
                Record(
                    f"requests in the pool, {of}", fits, "requests", peers={"all blocks kept": POOL_TOKENS // length}
                )
            )
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
