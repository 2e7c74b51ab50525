"""Runs packed steps on the device, each enqueued without waiting for the one before."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import HiddenState, Logprobs
from paged_backend.execution.batch import DeviceUpload, DraftCheck, PackedBatch, UniformBatch, resolve_placeholders
from paged_backend.execution.drafter import Drafter, fill
from paged_backend.execution.forward import paged_logits
from paged_backend.execution.graphs import ForwardOutput, GraphCapture, Graphs, GraphShape, draft_shapes
from paged_backend.memory.kv_cache import KVCache
from paged_backend.memory.transfers import Transfers
from paged_backend.models.hidden_states import record_hidden_states
from paged_backend.models.lora import Lora
from paged_backend.sampling.logprobs import LogprobsTensors, compute_prompt_logprobs
from paged_backend.sampling.sampler import TopLogprobs, compute_logprobs, resolve_tokens, sample, top_logprobs
from paged_backend.scheduling.plan import Plan
from paged_backend.scheduling.step_result import StepResult, accept_draft_tokens

log = logging.getLogger("paged_llm")

STAYS = DeviceUpload(None)  # for batches that are on the device
BROKEN = "the model's numbers for this request are not finite; no other request is touched"


class RunnerDied(RuntimeError):
    """No further step can be run."""


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step that was enqueued, and what it draws, on its way to the host."""

    tokens: Tensor  # [num_draws] int64
    beams: TopLogprobs | None
    scores: LogprobsTensors | None
    prompts: tuple[LogprobsTensors, ...]  # rows of prompts, in order
    prompt_chunks: tuple[tuple[int, int], ...]  # the chunks of those rows, and how many rows of each
    checks: tuple[DraftCheck, ...]
    draft_ids: Tensor | None  # [num_tokens] int64: the batch's tokens, if guesses among them were made on the device
    hidden: Tensor | None  # [num_hidden, hidden_size] float32, of chunks that embed
    hidden_chunks: tuple[int, ...]  # those chunks
    failed_rows: tuple[tuple[int, str], ...]  # draws that count for nothing, and why
    arrived: torch.cuda.Event | None

    def result(self) -> StepResult:
        """Wait for the step and return its results. The only place where the host waits for the device."""
        if self.arrived is not None:
            self.arrived.synchronize()
        sampled: list[int] = self.tokens.tolist()
        tokens, draws = self._accepted_tokens(sampled)
        not_finite = (
            [draw for draw, accepted in enumerate(tokens) if accepted[-1] < 0] if min(sampled, default=0) < 0 else []
        )
        prompt_logprobs = self._prompt_logprobs()
        hidden_states = self._hidden_states()
        prompt_errors = {
            chunk: _not_finite()
            for chunk, rows in prompt_logprobs.items()
            if not all(math.isfinite(row[0].logprob) for row in rows)
        } | {chunk: _not_finite() for chunk, state in hidden_states.items() if not np.isfinite(state).all()}
        return StepResult(
            tokens=tokens,
            logprobs=self._logprobs(tokens, draws),
            candidates={draws[row]: candidates for row, candidates in self.beams.by_row()} if self.beams else {},
            errors={draw: _not_finite() for draw in not_finite}
            | {draws[row]: RequestError(ErrorCode.INVALID_ARGUMENT, reason) for row, reason in self.failed_rows},
            prompt_logprobs=prompt_logprobs,
            hidden_states=hidden_states,
            prompt_errors=prompt_errors,
        )

    def _accepted_tokens(self, sampled: list[int]) -> tuple[list[list[int]], Sequence[int]]:
        """Return the tokens of each draw, and the draw of each row. Without draft tokens every row is a draw."""
        if not self.checks:
            return [[token] for token in sampled], range(len(sampled))
        draft_ids = self.draft_ids.tolist() if self.draft_ids is not None else []
        tokens: list[list[int]] = []
        draws: list[int] = []
        for check in (*self.checks, DraftCheck(len(sampled), 0, ())):
            for token in sampled[len(draws) : check.draw]:
                draws.append(len(tokens))
                tokens.append([token])
            if count := len(check.draft_tokens):
                end = check.draw + count + 1
                drafts = draft_ids[check.row : check.row + count] or check.draft_tokens
                draws += [len(tokens)] * (count + 1)
                tokens.append(accept_draft_tokens(sampled[check.draw : end], drafts))
        return tokens, draws

    def _logprobs(self, tokens: list[list[int]], draws: Sequence[int]) -> dict[int, list[Logprobs]]:
        found: dict[int, list[Logprobs]] = {}
        for row, (logprobs,) in self.scores.by_row() if self.scores else ():
            entries = found.setdefault(draws[row], [])
            if len(entries) < len(tokens[draws[row]]):  # rows after a rejected draft token have no token
                entries.append(logprobs)
        return found

    def _prompt_logprobs(self) -> dict[int, list[Logprobs]]:
        rows = (logprobs for part in self.prompts for _, (logprobs,) in part.by_row())
        return {chunk: list(islice(rows, count)) for chunk, count in self.prompt_chunks}

    def _hidden_states(self) -> dict[int, HiddenState]:
        if self.hidden is None:
            return {}
        states = (array("f", row.tobytes()) for row in self.hidden.numpy())
        return dict(zip(self.hidden_chunks, states, strict=True))


def _not_finite() -> RequestError:
    return RequestError(ErrorCode.INTERNAL, BROKEN)


class Runner:
    """The model over its pools. `move` and `launch` return before the device is done; what they enqueue runs in
    order."""

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KVCache,
        host: KVCache | None = None,
        *,
        max_draws: int,
        drafter: Drafter | None = None,
        lora: Lora | None = None,
        broadcast_tokens: Callable[[Tensor], None] = lambda tokens: None,
    ):
        """kv: the model's layers first, then the drafter's. max_draws: of a step. agree: overwrites what was drawn with
        what another process drew, if that counts."""
        self.model = model
        self.kv = kv
        self.host = host
        self.drafter = drafter
        self.lora = lora
        self.group = _group(model, kv.device)
        self.transfers = Transfers(kv, host)
        self._broadcast_tokens = broadcast_tokens
        self._stage = DeviceUpload(kv.device)
        self._graphs: Graphs | None = None
        self._guesses: Graphs | None = None  # the drafter's own steps
        self._drawn = torch.zeros(max_draws, dtype=torch.int64, device=kv.device)  # by the step before

    @torch.inference_mode()
    def record(
        self, record: GraphCapture, kinds: Sequence[GraphShape], *, max_blocks: int, max_context_len: int
    ) -> None:
        """Record steps, the largest first, to be replayed from now on. A model that cannot be recorded runs as it is,
        with a line in the log. max_blocks: of a block table."""

        def graphs(forward: Callable[[PackedBatch], Tensor], kinds: Sequence[GraphShape]) -> Graphs:
            bounds = dict(max_blocks=max_blocks, max_context_len=max_context_len)
            return Graphs(forward, self._drawn, record, kinds, **bounds)

        try:
            steps = graphs(self._forward, kinds)
            self._guesses = graphs(self.drafter.forward, draft_shapes(kinds)) if self.drafter else None
            self._graphs = steps
        except Exception as error:  # a model that looks at its values on the host, a kernel that allocates
            log.warning("decode steps are not recorded, and take longer: %s: %s", type(error).__name__, error)

    @property
    def has_graphs(self) -> bool:
        """Whether steps are replayed."""
        return self._graphs is not None

    @property
    def uniform(self) -> UniformBatch | None:
        """What steps with guesses are to be packed to, so that they can be replayed."""
        return self._graphs.uniform if self._graphs else None

    @property
    def shares_prefixes(self) -> bool:
        """Whether rows that share a prefix can be told to attention."""
        return self.group is not None

    def release_graphs(self) -> None:
        """Let go of what was recorded, before the processes part that it was recorded with."""
        self._graphs = self._guesses = None

    def _forward(self, batch: PackedBatch) -> Tensor:
        if self.drafter:
            self.drafter.update_kv(batch)
        if batch.adapters is None:
            return paged_logits(self.model, batch, self.kv)
        assert self.lora
        with self.lora.applied(batch.adapters):
            return paged_logits(self.model, batch, self.kv)

    @torch.inference_mode()
    def move(self, plan: Plan) -> None:
        """The blocks that a step wants somewhere else, and its adapters. Before `launch`."""
        self.transfers.move(plan.moves_out, plan.moves_in, plan.copies)
        for slot, adapter in plan.loads:
            assert self.lora
            self.lora.load_slot(slot, adapter)

    @torch.inference_mode()
    def launch(self, packed: PackedBatch) -> LaunchedStep:
        step = self._run(packed)
        logits = step.logits if step.draw_rows is None else step.logits[step.draw_rows]
        sampling = resolve_tokens(step.sampling, self._known) if packed.uses_previous_step else step.sampling
        tokens, beams = sample(logits, sampling), top_logprobs(logits, sampling)
        self._broadcast_tokens(tokens)
        whole = tokens.clamp(min=0)  # a row that is not finite drew none, and what follows must have one
        self._drawn[: len(tokens)] = whole
        scores = compute_logprobs(logits, whole, sampling)
        prompts = compute_prompt_logprobs(step.logits, sampling.prompts) if sampling.prompts else ()
        arrived, draft_ids, hidden = None, step.draft_ids, step.hidden
        if tokens.is_cuda:
            tokens = tokens.to("cpu", non_blocking=True)
            draft_ids = draft_ids.to("cpu", non_blocking=True) if draft_ids is not None else None
            hidden = hidden.to("cpu", non_blocking=True) if hidden is not None else None
            beams, scores = beams and beams.to_host(), scores and scores.to_host()
            prompts = tuple(part.to_host() for part in prompts)
            arrived = torch.cuda.Event()
            arrived.record()
        constraints = packed.sampling.constraints
        failed_rows = constraints.mask.failed_rows if constraints and constraints.mask else ()
        return LaunchedStep(
            tokens,
            beams,
            scores,
            prompts,
            packed.prompt_chunks,
            packed.checks,
            draft_ids,
            hidden,
            packed.hidden_chunks,
            failed_rows,
            arrived,
        )

    def _run(self, packed: PackedBatch) -> ForwardOutput:
        graphs = self._graphs
        kind = graphs.find(packed.paging) if graphs and packed.is_replayable else None
        if graphs and kind and not packed.drafting:
            return graphs.replay(kind, packed, self._stage)
        batch = self._stage(packed)
        if batch.uses_previous_step:
            batch = replace(batch, input_ids=self._known(batch.input_ids))
        draft_ids = None
        if self.drafter and batch.drafting:
            batch = fill(batch, batch.drafting, self._guess)
            self._broadcast_tokens(batch.input_ids)
            draft_ids = batch.input_ids[0]
        if graphs and kind:
            return replace(graphs.replay(kind, batch, STAYS), draft_ids=draft_ids)
        if batch.hidden_rows is None:
            return ForwardOutput(self._forward(batch), batch.draw_rows, batch.sampling, draft_ids)
        with record_hidden_states(self.model) as states:
            logits = self._forward(batch)
        hidden = states[-1][0, batch.hidden_rows].float()
        return ForwardOutput(logits, batch.draw_rows, batch.sampling, draft_ids, hidden)

    def _guess(self, batch: PackedBatch) -> Tensor:
        """The drafter's logits of a batch on the device."""
        assert self.drafter
        kind = self._guesses.find(batch.paging) if self._guesses else None
        if self._guesses and kind:
            return self._guesses.replay(kind, batch, STAYS).logits
        return self.drafter.forward(batch)

    def _known(self, tokens: Tensor) -> Tensor:
        return resolve_placeholders(tokens, self._drawn)


def _group(model: PreTrainedModel, device: torch.device) -> int | None:
    """Query heads of a KV head, where attention can read a shared prefix once for many rows."""
    if device.type == "cpu":
        return None
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    return heads // (getattr(config, "num_key_value_heads", None) or heads)
