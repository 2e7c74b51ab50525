"""Models whose decoder layers are computed in one call of a CPU kernel per step."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from paged_backend.models.attention import AttentionMeta, reject_unsupported
from paged_kernels.cpu import native


class NativeDecoder:
    """The `forward` of a decoder whose layers are computed in one call of a CPU kernel."""

    def __init__(self, decoder: Any, layers: Sequence[native.DecoderLayer]) -> None:
        self._decoder = decoder
        self._layers = native.DecoderLayers(layers)

    def __call__(
        self,
        input_ids: Tensor,  # [1, num_tokens]
        position_ids: Tensor,  # [1, num_tokens]
        *,
        paged: AttentionMeta,
        attention_mask: None = None,
        use_cache: bool = False,
        **rest: Any,
    ) -> BaseModelOutputWithPast:
        reject_unsupported(self._decoder, rest, mask=attention_mask, dropout=0.0, is_causal=None)
        if paged.more_pages:  # the kernel reads one block table for all layers
            return layerwise_forward(self._decoder)(input_ids, position_ids=position_ids, paged=paged, use_cache=False)
        hidden_states = self._decoder.embed_tokens(input_ids)
        cos, sin = self._decoder.rotary_emb(hidden_states, position_ids=position_ids)
        stream = self._layers(hidden_states[0], cos, sin, paged.kv.layers, paged.paging)
        return BaseModelOutputWithPast(last_hidden_state=self._decoder.norm((stream, None)))


def runs_natively(model: PreTrainedModel) -> bool:
    """Return whether a CPU kernel computes all layers of the model in one call."""
    return isinstance(vars(model.base_model).get("forward"), NativeDecoder)


def layerwise_forward(decoder: nn.Module) -> Any:
    """Return the `forward` that calls the layers of a native decoder one after the other."""
    return MethodType(type(decoder).forward, decoder)
