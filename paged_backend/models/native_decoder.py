"""Models whose decoder layers are computed in one call of a CPU kernel per step."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from paged_backend.models.attention import AttentionMeta, reject_unsupported
from paged_backend.models.fused_layer import FusedHeads, FusedLayer, FusedMlp
from paged_backend.models.linear import GroupedCopy
from paged_kernels.cpu import native
from paged_kernels.cpu.packed_linear import GROUP


class NativeDecoder:
    """The `forward` of a decoder whose layers are computed in one call of a CPU kernel."""

    def __init__(self, decoder: Any, layers: Sequence[native.DecoderLayer]) -> None:
        self._decoder = decoder
        self._layers, self._num_layers = native.DecoderLayers(layers), len(layers)

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
        caches = paged.kv.layers[: self._num_layers]  # those of a draft model follow
        stream = self._layers(hidden_states[0], cos, sin, caches, paged.paging)
        return BaseModelOutputWithPast(last_hidden_state=self._decoder.norm((stream, None)))


def runs_natively(model: PreTrainedModel) -> bool:
    """Return whether a CPU kernel computes all layers of the model in one call."""
    return isinstance(vars(model.base_model).get("forward"), NativeDecoder)


def layerwise_forward(decoder: nn.Module) -> Any:
    """Return the `forward` that calls the layers of a native decoder one after the other."""
    return MethodType(type(decoder).forward, decoder)


def native_layers(layers: Sequence[FusedLayer]) -> list[native.DecoderLayer]:
    """Return the layers for the CPU kernel, or none if it does not support any of them."""
    converted = [found for layer in layers if (found := _to_native(layer))]
    return converted if len(converted) == len(layers) else []


def _to_native(layer: FusedLayer) -> native.DecoderLayer | None:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, FusedHeads) or not isinstance(mlp, FusedMlp):
        return None
    qkv, o, gate_up, down = projections = attention.qkv, layer.output, mlp.gate_up, mlp.down
    packed = [one.weight.packed for one in projections if isinstance(one.weight, GroupedCopy)]
    if len(packed) < len(projections) or packed[-1].in_features % GROUP:
        return None
    assert qkv.norm and gate_up.norm
    return native.DecoderLayer(
        *qkv.norm, packed[0], qkv.bias, attention.head_counts[0], attention.rotates,
        attention.head_norms.get("query_weight"), attention.head_norms.get("key_weight"),
        attention.head_norms.get("eps", 0.0),
        attention.spec.scale, attention.spec.sliding_window, attention.spec.softcap, attention.spec.sinks,
        packed[1], o.bias, *gate_up.norm, packed[2], gate_up.bias, packed[3], down.bias,
    )  # fmt: skip
