"""Records the attention calls and the masks of one forward pass of an unmodified model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paged_backend.memory.kv_cache import LayerShape
from paged_backend.models.attention import AttentionSpec, UnsupportedModel


@dataclass
class AttentionProbe:
    """Records the attention calls and masks of one forward pass."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    specs: dict[int, AttentionSpec] = field(default_factory=dict)
    layer_windows: set[int | None] = field(default_factory=set)
    mask_windows: set[int | None] = field(default_factory=set)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        sliding_window: int | None = None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        """Record a layer's parameters, as its attention function."""
        layer = getattr(module, "layer_idx", None)
        if layer is None or layer in self.shapes:
            raise UnsupportedModel(f"{type(module).__name__}: layer_idx={layer} does not name one attention layer")
        value_dim = None if value.shape[3] == key.shape[3] else value.shape[3]
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value_dim, window=sliding_window)
        arguments = dict(sliding_window=sliding_window, **rest)
        self.specs[layer] = AttentionSpec.of(module, query.shape[3], attention_mask, **arguments)
        self.layer_windows.add(sliding_window)
        # Any values, since only the shape matters.
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    def mask(self, *, mask_function: Callable[..., Tensor], **rest: Any) -> None:
        """Record the window of a mask, as the mask function of the model. A mask that hides all tokens is ignored,
        because no layer can use it: Qwen2-MoE without sliding windows builds one."""
        window = _window_of(mask_function)
        if window != 0:
            self.mask_windows.add(window)


def _window_of(mask_function: Callable[..., Tensor]) -> int | None:
    """Return the sliding window of a mask, or None for a causal mask. Raises UnsupportedModel for any other mask."""
    windows = set()
    for query in (99_991, 131_071):  # coprime, so that a chunked mask gives two different windows
        zero = torch.tensor(0)
        seen = mask_function(zero, zero, torch.tensor(query), torch.arange(query + 1)).nonzero()
        first = int(seen[0]) if len(seen) else query + 1
        if len(seen) != query + 1 - first:
            raise UnsupportedModel("a mask with holes")
        windows.add(query + 1 - first if first else None)
    if len(windows) > 1:
        raise UnsupportedModel("a mask that is neither causal nor a sliding window (chunked attention?)")
    return windows.pop()
