"""Runs packed steps on the device, each enqueued without waiting for the one before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paged_backend.attention import paged_logits
from paged_backend.batch import PackedBatch, Stage, follow
from paged_backend.kv_cache import KVCache
from paged_backend.plan import Drawn, Plan
from paged_backend.sampler import Likeliest, likeliest, sample


@dataclass(frozen=True, eq=False)
class Launched:
    """A step that was enqueued, and what it draws, on its way to the host."""

    tokens: Tensor  # [num_draws] int64
    beams: Likeliest | None
    arrived: torch.cuda.Event | None

    def result(self) -> list[Drawn]:
        """What each draw gave, in order. Waits for it: the one place where host and device meet."""
        if self.arrived is not None:
            self.arrived.synchronize()
        drawn: list[Drawn] = self.tokens.tolist()
        for row, candidates in self.beams.by_row() if self.beams else ():
            drawn[row] = candidates
        return drawn


class Runner:
    """The model over its pools. `move` and `launch` return before the device is done; what they enqueue runs in
    order."""

    def __init__(self, model: PreTrainedModel, kv: KVCache, host: KVCache | None = None):
        self.model = model
        self.kv = kv
        self.host = host
        self._stage = Stage(kv.device)
        self._drawn = torch.zeros(1, dtype=torch.int64, device=kv.device)  # by the last step, for the next to follow

    @torch.inference_mode()
    def move(self, plan: Plan) -> None:
        """The blocks that a step wants somewhere else. Before `launch`."""
        if self.host is not None:
            self.kv.copy(plan.outs, self.host)
            self.host.copy(plan.ins, self.kv)
        self.kv.copy(plan.copies)

    @torch.inference_mode()
    def launch(self, packed: PackedBatch) -> Launched:
        batch = self._stage(packed)
        if batch.follows:
            batch = follow(batch, self._drawn)
        logits = paged_logits(self.model, batch, self.kv)
        if batch.draw_rows is not None:
            logits = logits[batch.draw_rows]
        self._drawn = sample(logits, batch.sampling)
        beams = likeliest(logits, batch.sampling)
        arrived = None
        tokens = self._drawn
        if tokens.is_cuda:
            tokens = tokens.to("cpu", non_blocking=True)
            beams = beams and beams.to_host()
            arrived = torch.cuda.Event()
            arrived.record()
        return Launched(tokens, beams, arrived)
