"""Through which LoRA adapter each row of a batch goes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AdapterRows:
    """Through which adapter each row of a batch goes."""

    used: tuple[int, ...]  # slots of adapters, in order
    slots: Tensor  # [num_used] int64: the same
    others: Tensor  # [num_tokens, num_used, 1] bool: whether the row is another's, or nobody's


def adapter_rows(slots: np.ndarray) -> AdapterRows:
    """slots: [num_tokens] int64, of each row; -1: none."""
    used = np.unique(slots[slots >= 0])
    others = torch.from_numpy(slots[:, None, None] != used[None, :, None])
    return AdapterRows(tuple(used.tolist()), torch.from_numpy(used), others)
