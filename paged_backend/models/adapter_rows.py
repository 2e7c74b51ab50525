"""The assignment of a batch's rows to LoRA adapter slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AdapterRows:
    """The adapter slots that a step uses, and the rows that belong to each."""

    used: tuple[int, ...]  # slots in ascending order
    slots: Tensor  # [num_used] int64: the same on the device
    masked: Tensor  # [num_tokens, num_used, 1] bool: True if the row does not use the slot


def adapter_rows(slots: np.ndarray) -> AdapterRows:
    """Build the assignment from the slot of each row, [num_tokens] int64, with -1 for no adapter."""
    used = np.unique(slots[slots >= 0])
    masked = torch.from_numpy(slots[:, None, None] != used[None, :, None])
    return AdapterRows(tuple(used.tolist()), torch.from_numpy(used), masked)
