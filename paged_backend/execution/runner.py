"""Runs packed steps on the device. A step is enqueued without waiting for the previous one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paged_backend.execution.batch import Drafting, PackedBatch, UniformBatch
from paged_backend.execution.cpu_threads import CpuThreads
from paged_backend.execution.graphs import ForwardOutput, GraphCapture, Graphs, GraphShape, draft_shapes
from paged_backend.execution.launched_step import LaunchedStep
from paged_backend.execution.upload import DeviceUpload
from paged_backend.kv.cache import KVCache
from paged_backend.kv.page_copier import PageCopier
from paged_backend.models.attention import AttentionMeta
from paged_backend.models.decoder import FusedDecoder
from paged_backend.models.hidden_states import record_hidden_states
from paged_backend.models.lora import Lora
from paged_backend.models.pipeline import Stage
from paged_backend.sampling.outputs import compute_outputs
from paged_backend.sampling.sampler import SamplingBatch, sample, top_tokens
from paged_backend.scheduling.plan import Plan, StepResult
from paged_kernels.layer_cache import LayerCache
from paged_kernels.paging import Paging

log = logging.getLogger("paged_llm")

NO_UPLOAD = DeviceUpload(None)  # leaves batches that are on the device already


class RunnerDied(RuntimeError):
    """No further step can be run."""


class PendingStep(Protocol):
    """A step that was launched."""

    @property
    def replayed(self) -> bool:
        """Whether a captured graph ran the forward pass."""

    def result(self) -> StepResult:
        """Wait for the step and return its results."""


class StepRunner(Protocol):
    """The interface of a runner in one process, or in several that share the model."""

    kv: KVCache
    host: KVCache | None  # the host pool
    drafter: Drafter | None
    copier: PageCopier
    gqa_group: int | None  # query heads per KV head; None if attention cannot share prefixes

    @property
    def uniform(self) -> UniformBatch | None:
        """The padding that graphs require of steps with draft tokens."""

    def move(self, plan: Plan) -> None:
        """Enqueue the block transfers and the adapter loads of a plan. Before `launch`."""

    def launch(self, packed: PackedBatch) -> PendingStep:
        """Enqueue a step. Returns before the device has run it."""

    def release_graphs(self) -> None:
        """Free the captured graphs."""


class Runner:
    """Runs the model over its KV cache. `move` and `launch` return before the device is done; their work runs in
    order."""

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KVCache,
        host: KVCache | None = None,
        *,
        max_sampled: int,
        drafter: Drafter | None = None,
        lora: Lora | None = None,
        threads: CpuThreads | None = None,
        broadcast_tokens: Callable[[Tensor], None] = lambda tokens: None,
    ):
        """kv: caches of the model's layers, then of the drafter's. host: the host pool. max_sampled: maximum sampled
        tokens of a step. broadcast_tokens: under tensor parallelism, overwrites a tensor of sampled tokens with rank
        0's tokens."""
        self.model = model
        self.kv = kv
        self.host = host
        self.drafter = drafter
        self.lora = lora
        self._threads = threads
        self.gqa_group = _gqa_group(model, kv.device, kv.layers[0])
        self.copier = PageCopier(kv, host)
        self._broadcast_tokens = broadcast_tokens
        self._upload = DeviceUpload(kv.device)
        self._graphs: Graphs | None = None
        self._draft_graphs: Graphs | None = None  # graphs of the draft model's own steps
        stage = Stage.of(model)
        self._is_last = stage is None or stage.is_last
        self._previous = torch.zeros(max_sampled, dtype=torch.int64, device=kv.device)

    @torch.inference_mode()
    def capture_graphs(
        self,
        capture: GraphCapture,
        shapes: Sequence[GraphShape],
        *,
        block_size: int,
        max_blocks: int,
        max_context_len: int,
        num_pages: int = 1,
    ) -> None:
        """Capture graphs of steps, the largest first, which later steps replay. Steps that cannot be captured run
        eagerly, with a warning in the log. max_blocks: maximum blocks in a block table. num_pages: pages of a
        block."""

        graphs = partial(
            Graphs,
            previous=self._previous,
            capture=capture,
            block_size=block_size,
            max_blocks=max_blocks,
            max_context_len=max_context_len,
            num_pages=num_pages,
            broadcast_tokens=self._broadcast_tokens,
        )
        try:
            steps = graphs(self._forward, shapes=shapes, samples=True)
            if self.drafter:
                self._draft_graphs = graphs(self.drafter.forward, shapes=draft_shapes(shapes), samples=False)
            self._graphs = steps
        except Exception as error:  # raised if the model reads values on the host, or a kernel allocates
            slower = "prompts" if any(shape.prompts for shape in shapes) else "decode steps"
            log.warning("no CUDA graphs, so %s take longer: %s: %s", slower, type(error).__name__, error)

    @property
    def num_graphs(self) -> int:
        """The number of captured steps."""
        return self._graphs.count if self._graphs else 0

    @property
    def uniform(self) -> UniformBatch | None:
        """The padding that graphs require of steps with draft tokens."""
        return self._graphs.uniform if self._graphs else None

    @property
    def shares_prefixes(self) -> bool:
        """Whether attention reads a prefix that several sequences share only once."""
        return self.gqa_group is not None

    def release_graphs(self) -> None:
        """Free the captured graphs. Called before the end of processes whose collectives they contain."""
        self._graphs = self._draft_graphs = None

    @torch.inference_mode()
    def move(self, plan: Plan) -> None:
        """Enqueue the block transfers and the adapter loads of a plan. Before `launch`."""
        self.copier.move(plan.transfers)
        for slot, adapter in plan.loads:
            assert self.lora
            self.lora.load_slot(slot, adapter)

    @torch.inference_mode()
    def launch(self, packed: PackedBatch) -> LaunchedStep:
        """Enqueue the forward pass and sampling of a batch, and the copy of the results to the host."""
        if self._threads:
            self._threads.start_step()
        step = self._run(packed)
        return self._finish(packed, step) if self._is_last else LaunchedStep.of_hidden_states(step.logits)

    def _finish(self, packed: PackedBatch, step: ForwardOutput) -> LaunchedStep:
        """Enqueue sampling from the logits of a step, and the copy of the results to the host."""
        logits = step.logits if step.logit_rows is None else step.logits[step.logit_rows]
        sampling, constraints = step.sampling, packed.sampling.constraints
        tokens = step.tokens if step.tokens is not None else self._sample(logits, sampling)
        beams = top_tokens(logits, sampling)
        launched = LaunchedStep(
            tokens=tokens if tokens.is_cuda else tokens.clone(),  # on a CPU, the next step writes to the same memory
            beams=beams,
            outputs=compute_outputs(sampling.outputs, logits, tokens, beams, step.logits),
            checks=packed.checks,
            draft_ids=step.draft_ids,
            hidden=step.hidden,
            hidden_chunks=packed.hidden_chunks,
            failed_rows=constraints.mask.failed_rows if constraints and constraints.mask else (),
            replayed=step.replayed,
        )
        return launched.to_host() if tokens.is_cuda else launched

    def _sample(self, logits: Tensor, sampling: SamplingBatch) -> Tensor:
        """Return the sampled tokens [num_sampled] int64, which are also kept for the next step."""
        tokens = self._previous[: len(logits)]
        sample(logits, sampling, out=tokens)
        self._broadcast_tokens(tokens)
        return tokens

    def _run(self, packed: PackedBatch) -> ForwardOutput:
        """Run the forward passes of a batch: a captured graph if one fits, else the model itself."""
        graphs = self._graphs
        shape = graphs.find(packed) if graphs and packed.is_replayable else None
        if graphs and shape and not packed.drafting:
            return graphs.replay(shape, packed, self._upload)
        batch = self._upload(packed)
        if batch.uses_previous_step:
            batch = batch.resolved(self._previous)
        draft_ids = None
        if self.drafter and batch.drafting:
            batch = propose(batch, batch.drafting, self._draft_forward)
            self._broadcast_tokens(batch.input_ids)
            draft_ids = batch.input_ids[0]
        if graphs and shape:
            return replace(graphs.replay(shape, batch, NO_UPLOAD), draft_ids=draft_ids)
        if batch.hidden_rows is None or not self._is_last:
            return ForwardOutput(self._forward(batch), batch.logit_rows, batch.sampling, draft_ids)
        with record_hidden_states(self.model) as recorded:
            logits = self._forward(batch)
        hidden = recorded[-1][0, batch.hidden_rows].float()
        return ForwardOutput(logits, batch.logit_rows, batch.sampling, draft_ids, hidden)

    def _forward(self, batch: PackedBatch) -> Tensor:
        """Return the model's logits of a batch on the device, after the draft model has computed its keys and values.
        A stage before the last returns the hidden states of all rows instead."""
        if self.drafter:
            self.drafter.update_kv(batch)
        if not self._is_last:
            return paged_hidden_states(self.model, batch, self.kv)
        if batch.adapters is None:
            return paged_logits(self.model, batch, self.kv)
        assert self.lora
        with self.lora.applied(batch.adapters):
            return paged_logits(self.model, batch, self.kv)

    def _draft_forward(self, batch: PackedBatch) -> Tensor:
        """Return the draft model's logits of a batch on the device."""
        assert self.drafter
        shape = self._draft_graphs.find(batch) if self._draft_graphs else None
        if self._draft_graphs and shape:
            return self._draft_graphs.replay(shape, batch, NO_UPLOAD).logits
        return self.drafter.forward(batch)


def _gqa_group(model: PreTrainedModel, device: torch.device, cache: LayerCache) -> int | None:
    """Return the query heads per KV head; None if the batch needs no groups of shared prefixes: CPU kernels find shared
    blocks themselves, and batch-invariant attention on a GPU reads a prefix once per sequence."""
    if device.type == "cpu" or cache.batch_invariant:
        return None
    config = model.config.get_text_config()
    heads = int(getattr(config, "num_attention_heads", None) or 1)  # a model without attention has no such field
    if cache.shares_memory:  # all heads attend to the latents
        return heads
    return heads // (getattr(config, "num_key_value_heads", None) or heads)


# --- forward passes over a packed batch -------------------------------------------------------------------------------


@torch.inference_mode()
def paged_logits(model: PreTrainedModel, batch: PackedBatch, kv: KVCache) -> Tensor:
    """Run one forward pass over a packed batch and return the logits [num_samples, vocab] of the rows that sample."""
    decoder = FusedDecoder.of(model)
    if decoder and (whole := decoder.whole_model(kv)):
        return whole(batch.input_ids, batch.position_ids, batch.sample_rows, batch.pagings)
    logits = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        logits_to_keep=batch.sample_rows,
        paged=AttentionMeta(batch.pagings, kv, batch.state_rows),
    ).logits[0]
    # A model without the parameter logits_to_keep projects every row.
    return logits if len(logits) == len(batch.sample_rows) else logits[batch.sample_rows]


@torch.inference_mode()
def paged_hidden_states(model: PreTrainedModel, batch: PackedBatch, kv: KVCache) -> Tensor:
    """Run one forward pass of a stage before the last over a packed batch. Returns the hidden states [num_tokens,
    hidden_size] for the next stage."""
    output = model.base_model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        paged=AttentionMeta(batch.pagings, kv),
    )
    hidden_states: Tensor = output.last_hidden_state[0]
    return hidden_states


# --- draft models -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Drafter:
    """A draft model that proposes tokens on the device; the model verifies them in the same step.

    Its layers follow the model's in the KV cache, so that a block that is copied, swapped or hit in the prefix cache
    carries the draft model's keys and values as well. In each step it first runs over its own proposals, one token per
    sequence at a time, then over the whole batch. It samples with the random numbers that the model will use, so both
    choose the same token if their probabilities agree.
    """

    model: PreTrainedModel
    kv: KVCache

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return the draft model's logits [num_samples, vocab] of a batch."""
        return paged_logits(self.model, batch, self.kv)

    def update_kv(self, batch: PackedBatch) -> None:
        """Compute the draft model's keys and values of a batch, with or without draft tokens in it."""
        self.forward(replace(batch, sample_rows=batch.sample_rows[:0]))


def propose(batch: PackedBatch, drafting: Drafting, forward: Callable[[PackedBatch], Tensor]) -> PackedBatch:
    """Return the batch with its draft tokens filled in. forward: a function like `Drafter.forward`."""
    ids = batch.input_ids.clone()
    for number in range(len(drafting.counts)):
        _propose_round(ids, batch, drafting, number, forward)
    return replace(batch, input_ids=ids)


def _propose_round(
    ids: Tensor, batch: PackedBatch, drafting: Drafting, number: int, forward: Callable[[PackedBatch], Tensor]
) -> None:
    count = drafting.counts[number]
    rows, seqs = drafting.rows[:count] + number, drafting.seqs[:count]
    positions = batch.position_ids[:, rows]
    context_lens = positions[0].int() + 1
    query_starts = torch.arange(count + 1, dtype=torch.int32, device=ids.device)
    pagings = tuple(
        Paging(
            slots=paging.slots[rows],
            block_tables=paging.block_tables[seqs],
            context_lens=context_lens,
            query_starts=query_starts,
            max_query_len=1,
            max_context_len=paging.max_context_len,
        )
        for paging in batch.pagings
    )
    all_rows, sampling = query_starts[:-1].long(), drafting.sampling[number]
    logits = forward(PackedBatch(ids[:, rows], positions, pagings, sample_rows=all_rows, sampling=sampling))
    # Sampling gives -1 for logits that are not finite. Any token is fine there, because the model verifies it.
    ids[0, rows + 1] = sample(logits, sampling).clamp(min=0)
