"""Runs packed steps on the device. A step is enqueued without waiting for the previous one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paged_backend.execution.batch import PackedBatch, UniformBatch
from paged_backend.execution.cpu_threads import CpuThreads
from paged_backend.execution.drafter import Drafter, propose
from paged_backend.execution.forward import paged_hidden_states, paged_logits, record_hidden_states
from paged_backend.execution.graph_shapes import GraphShape, draft_shapes
from paged_backend.execution.graphs import ForwardOutput, GraphCapture, Graphs
from paged_backend.execution.launched_step import LaunchedStep
from paged_backend.execution.upload import DeviceUpload
from paged_backend.kv.cache import KVCache
from paged_backend.kv.ledger import Transfers
from paged_backend.kv.page_copier import PageCopier
from paged_backend.kv.state_cache import StateCache
from paged_backend.models.lora import Lora
from paged_backend.models.pipeline import Stage
from paged_backend.sampling.outputs import compute_outputs
from paged_backend.sampling.sampler import SamplingBatch, sample, top_tokens
from paged_backend.scheduling.plan import Plan, StepResult
from paged_kernels.layer_cache import LayerCache

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
    """The interface of a runner, of one process or of several that share the model."""

    kv: KVCache
    host: KVCache | None  # the host pool
    host_states: StateCache | None  # the states of preempted sequences, on the host
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
    """The model over its KV cache. `move` and `launch` return before the device is done; their work runs in order."""

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KVCache,
        host: KVCache | None = None,
        *,
        max_sampled: int,
        drafter: Drafter | None = None,
        lora: Lora | None = None,
        states: StateCache | None = None,
        host_states: StateCache | None = None,
        threads: CpuThreads | None = None,
        broadcast_tokens: Callable[[Tensor], None] = lambda tokens: None,
    ):
        """kv: the model's layers, then the drafter's. host: the host pool. max_sampled: maximum sampled tokens.
        states: those of the model's recurrent layers, if it has any. host_states: those of preempted sequences, on the
        host. broadcast_tokens: under tensor parallelism, overwrites a tensor of sampled tokens with those of rank 0."""
        self.model = model
        self.kv = kv
        self.host = host
        self.drafter = drafter
        self.lora = lora
        self.states = states
        self.host_states = host_states
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
        """Capture graphs of steps, the largest first, which later steps replay. A model that cannot be captured runs
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
            log.warning("no CUDA graphs, so decode steps take longer: %s: %s", type(error).__name__, error)

    @property
    def has_graphs(self) -> bool:
        """Whether graphs are captured."""
        return self._graphs is not None

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
        self._move_states(plan.state_transfers)
        for slot, adapter in plan.loads:
            assert self.lora
            self.lora.load_slot(slot, adapter)

    def _move_states(self, moved: Transfers) -> None:
        """Enqueue the moves and copies of states, in their order."""
        states, host = self.states, self.host_states
        if moved.moves_out:
            assert states and host
            states.copy_to(host, [move[:2] for move in moved.moves_out])
        if moved.moves_in:
            assert states and host
            host.copy_to(states, [move[:2] for move in moved.moves_in])
        if moved.copies:
            assert states
            states.copy_slots(copy[:2] for copy in moved.copies)

    @torch.inference_mode()
    def launch(self, packed: PackedBatch) -> LaunchedStep:
        """Enqueue the forward pass and sampling of a batch, and the copy of the results to the host."""
        if self._threads:
            self._threads.start_step()
        step = self._run(packed)
        if not self._is_last:
            if self._threads:
                self._threads.end_step()
            return LaunchedStep.of_states(step.logits)
        logits = step.logits if step.logit_rows is None else step.logits[step.logit_rows]
        sampling = step.sampling
        tokens = step.tokens if step.tokens is not None else self._sample(logits, sampling)
        beams = top_tokens(logits, sampling)
        outputs = compute_outputs(sampling.outputs, logits, tokens, beams, step.logits)
        arrived, draft_ids, hidden = None, step.draft_ids, step.hidden
        if not tokens.is_cuda:
            tokens = tokens.clone()  # the next step overwrites them
        else:
            tokens = tokens.to("cpu", non_blocking=True)
            draft_ids = draft_ids.to("cpu", non_blocking=True) if draft_ids is not None else None
            hidden = hidden.to("cpu", non_blocking=True) if hidden is not None else None
            beams = beams and beams.to_host()
            outputs = tuple(one.to_host() for one in outputs)
            arrived = torch.cuda.Event()
            arrived.record()
        if self._threads:
            self._threads.end_step()
        constraints = packed.sampling.constraints
        failed_rows = constraints.mask.failed_rows if constraints and constraints.mask else ()
        return LaunchedStep(
            tokens,
            beams,
            outputs,
            packed.checks,
            draft_ids,
            hidden,
            packed.hidden_chunks,
            failed_rows,
            arrived,
            step.replayed,
        )

    def _sample(self, logits: Tensor, sampling: SamplingBatch) -> Tensor:
        """Return the sampled tokens [num_sampled] int64, which are also kept for the next step."""
        tokens = self._previous[: len(logits)]
        tokens.copy_(sample(logits, sampling))
        self._broadcast_tokens(tokens)
        return tokens

    def _run(self, packed: PackedBatch) -> ForwardOutput:
        """Run the forward passes of a batch: a captured graph if one fits, else the model itself."""
        graphs = self._graphs
        shape = graphs.find(packed.paging) if graphs and packed.is_replayable else None
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
        with record_hidden_states(self.model) as states:
            logits = self._forward(batch)
        hidden = states[-1][0, batch.hidden_rows].float()
        return ForwardOutput(logits, batch.logit_rows, batch.sampling, draft_ids, hidden)

    def _forward(self, batch: PackedBatch) -> Tensor:
        """Return the model's logits of a batch on the device, after the draft model has computed its keys and values.
        A stage before the last returns the hidden states of all rows instead."""
        if self.drafter:
            self.drafter.update_kv(batch)
        if not self._is_last:
            return paged_hidden_states(self.model, batch, self.kv)
        if batch.adapters is None:
            return paged_logits(self.model, batch, self.kv, self.states)
        assert self.lora
        with self.lora.applied(batch.adapters):
            return paged_logits(self.model, batch, self.kv)

    def _draft_forward(self, batch: PackedBatch) -> Tensor:
        """Return the draft model's logits of a batch on the device."""
        assert self.drafter
        shape = self._draft_graphs.find(batch.paging) if self._draft_graphs else None
        if self._draft_graphs and shape:
            return self._draft_graphs.replay(shape, batch, NO_UPLOAD).logits
        return self.drafter.forward(batch)


def _gqa_group(model: PreTrainedModel, device: torch.device, cache: LayerCache) -> int | None:
    """Return the query heads per KV head; None on a CPU and with batch-invariant attention, which read a shared prefix
    once per sequence."""
    if device.type == "cpu" or cache.batch_invariant:
        return None
    config = model.config.get_text_config()
    heads = int(getattr(config, "num_attention_heads", None) or 1)  # none in a model without attention
    if cache.shares_memory:  # all heads attend to the latents
        return heads
    return heads // (getattr(config, "num_key_value_heads", None) or heads)
