"""Runs one packed step on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from paged_backend.attention import paged_logits
from paged_backend.batch import PackedBatch
from paged_backend.kv_cache import KVCache
from paged_backend.plan import Drawn, Plan
from paged_backend.sampler import candidates, sample


@dataclass(frozen=True, eq=False)
class Runner:
    model: PreTrainedModel
    kv: KVCache
    host: KVCache | None = None

    @torch.inference_mode()
    def move(self, plan: Plan) -> None:
        """The blocks that a step wants somewhere else. Before `run`."""
        if self.host is not None:
            self.kv.copy(plan.outs, self.host)
            self.host.copy(plan.ins, self.kv)
        self.kv.copy(plan.copies)

    @torch.inference_mode()
    def run(self, batch: PackedBatch) -> list[Drawn]:
        """What each draw gives, in order."""
        logits = paged_logits(self.model, batch, self.kv)
        if batch.repeats is not None:
            logits = logits.repeat_interleave(batch.repeats, 0)
        drawn: list[Drawn] = sample(logits, batch.sampling).tolist()
        for row, likeliest in candidates(logits, batch.sampling).items():
            drawn[row] = likeliest
        return drawn
