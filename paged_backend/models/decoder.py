"""The forward pass of the fused families, from token ids to hidden states.

    decoder      FusedDecoder: embeddings, angles, layers, final norm
    layer        FusedLayer: attention, output projection, MLP
    attention    FusedHeads: queries, keys and values of heads; FusedLatents: latents and a shared key
    mlp          FusedMlp: gate, up and down projection; FusedExperts: a mixture of experts

Each part begins with the residual add and the norm, so they can share a launch with its first projection. On a CPU, one
call of a C++ kernel runs all layers, or the whole model, if it supports them (`native`). Layers and decoders are
immutable: `with_weights` returns a copy. fusion.py builds a FusedDecoder from a transformers model, and
model_variants.py makes it the `forward` of the model's own decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_backend.kv.cache import KVCache
from paged_backend.models.attention import AttentionMeta, AttentionSpec, attend_pages, reject_unsupported
from paged_backend.models.latent_attention import LatentAttention
from paged_backend.models.linear import GroupedCopy, Weight, project
from paged_backend.models.overrides import has_custom_forward
from paged_backend.models.rope import Angles, RotaryTable, Rotation
from paged_kernels.cpu.native import CausalModel, DecoderLayer, DecoderLayers
from paged_kernels.cpu.packed_linear import GROUP
from paged_kernels.ops import add_rms_norm, embed, few_rows_linear, kv_write, latent_kv_write, rope_kv_write, swiglu

Convert: TypeAlias = "Callable[[Any, Sequence[str]], Weight]"  # takes a weight and the names of its linear layers
AnyPart = TypeVar("AnyPart", bound="Part")


class HiddenStates(NamedTuple):
    """The hidden states between two layers: output + residual, which the next normalization adds."""

    output: Tensor  # [num_tokens, hidden]: output of the last MLP
    residual: Tensor | None  # [num_tokens, hidden]; None before the first layer


class Norm(NamedTuple):
    """An RMSNorm."""

    weight: Tensor  # [size], in the data type of the hidden states
    eps: float


@dataclass(frozen=True, eq=False)
class FewRowsWeight:
    """A weight [out_features, in_features] that is multiplied by `few_rows_linear` for up to `max_rows` rows."""

    weight: Tensor
    max_rows: int

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if x.dim() == 2 and len(x) <= self.max_rows:
            return few_rows_linear(x, self.weight, bias)[0]
        return F.linear(x, self.weight, bias)


@dataclass(frozen=True, eq=False)
class Projection:
    """Linear layers of the same input, joined into one, with the normalization before and the activation after it."""

    names: tuple[str, ...]  # names of the linear layers, inside of the decoder layer
    weight: Weight
    bias: Tensor | None
    norm: Norm | None = None
    gated: bool = False  # whether SwiGLU is applied to the product

    def __call__(self, x: Tensor) -> Tensor:
        """Return the projection of rows [num_tokens, in_features]."""
        return project(x, self.weight, self.bias) if self.norm is None else self.add(x, None)[0]

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the projection of the normalized sum of x and residual, and the sum."""
        assert self.norm is not None
        if isinstance(self.weight, FewRowsWeight) and len(x) <= self.weight.max_rows:
            around = dict(residual=residual, norm=self.norm.weight, eps=self.norm.eps, swiglu=self.gated)
            return few_rows_linear(x, self.weight.weight, self.bias, **around)
        normed, total = add_rms_norm(x, residual, *self.norm)
        product = project(normed, self.weight, self.bias)
        return swiglu(product) if self.gated else product, total


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a fused layer. Its projections are fields."""

    @property
    def projections(self) -> tuple[Projection, ...]:
        return tuple(value for value in vars(self).values() if isinstance(value, Projection))

    @property
    def called_modules(self) -> tuple[nn.Module, ...]:
        """The modules of the model that the part calls."""
        return ()

    def with_weights(self: AnyPart, convert: Convert) -> AnyPart:
        """Return a copy with converted weights."""
        return replace(self, **{
            name: replace(value, weight=convert(value.weight, value.names))
            for name, value in vars(self).items() if isinstance(value, Projection)
        })  # fmt: skip


@dataclass(frozen=True, eq=False)
class FusedHeads(Part):
    """Attention with keys and values of several heads."""

    module: nn.Module
    spec: AttentionSpec
    head_counts: tuple[int, int, int]  # heads of queries, keys and values
    rotates: bool
    head_norms: dict[str, Any]  # named arguments of `rope_kv_write`
    qkv: Projection

    def __call__(self, states: HiddenStates, angles: Angles, paged: AttentionMeta) -> tuple[Tensor, Tensor]:
        """Return the output of the heads, [num_tokens, num_heads * head_dim], and the residual."""
        qkv, residual = self.qkv.add(*states)
        cache, paging = paged.kv.layers[self.module.layer_idx], paged.paging_of(self.module.layer_idx)
        heads = qkv.view(len(qkv), sum(self.head_counts), -1)
        query, key, value = heads.split(self.head_counts, dim=1)
        if self.rotates:
            query = rope_kv_write(query, key, value, angles[0][0], angles[1][0], cache, paging.slots, **self.head_norms)
        else:
            kv_write(key, value, cache, paging.slots)
        return attend_pages(query, cache, paging, self.spec).flatten(1), residual


@dataclass(frozen=True, eq=False)
class FusedLatents(Part):
    """Multi-head latent attention over a cache of latents."""

    module: nn.Module
    spec: AttentionSpec
    attend: LatentAttention
    rotation: Rotation
    query_kv: Projection  # to queries, or to their latents; and to latents and shared keys
    query: Projection | None  # from the latents of queries to queries
    kv_norm: Norm  # norm of latents

    def __call__(self, states: HiddenStates, angles: Angles, paged: AttentionMeta) -> tuple[Tensor, Tensor]:
        """Return the output of the heads, [num_tokens, num_heads * value_dim], and the residual."""
        query_kv, residual = self.query_kv.add(*states)
        cache, paging = paged.kv.layers[self.module.layer_idx], paged.paging_of(self.module.layer_idx)
        rank, nope, rope = self.attend.rank, self.attend.nope, self.attend.rope
        query, latents = query_kv.split((query_kv.shape[1] - rank - rope, rank + rope), dim=1)
        if self.query is not None:
            query = self.query(query)
        query = query.view(len(query), -1, nope + rope)
        query[..., nope:] = latent_kv_write(
            query, latents, *self.kv_norm, angles[0][0], angles[1][0], cache, paging.slots, **self.rotation._asdict()
        )
        return self.attend(query, cache, paging, self.spec).flatten(1), residual


@dataclass(frozen=True, eq=False)
class FusedMlp(Part):
    """An MLP with a gate."""

    gate_up: Projection
    down: Projection

    def __call__(self, x: Tensor, residual: Tensor) -> HiddenStates:
        activated, total = self.gate_up.add(x, residual)
        return HiddenStates(self.down(activated), total)


@dataclass(frozen=True, eq=False)
class FusedExperts(Part):
    """A mixture of experts, whose module is called with the normalized rows."""

    module: nn.Module
    norm: Norm

    @property
    def called_modules(self) -> tuple[nn.Module, ...]:
        return (self.module,)

    def __call__(self, x: Tensor, residual: Tensor) -> HiddenStates:
        normed, total = add_rms_norm(x, residual, *self.norm)
        output = self.module(normed[None])
        output = output[0] if isinstance(output, tuple) else output  # some return the scores of the router, too
        return HiddenStates(output.view(normed.shape), total)


@dataclass(frozen=True, eq=False)
class FusedLayer:
    """A decoder layer."""

    attention: FusedHeads | FusedLatents
    output: Projection
    mlp: FusedMlp | FusedExperts

    def __call__(self, states: HiddenStates, angles: Angles, paged: AttentionMeta) -> HiddenStates:
        attended, residual = self.attention(states, angles, paged)
        return self.mlp(self.output(attended), residual)

    @property
    def projections(self) -> tuple[Projection, ...]:
        return (*self.attention.projections, self.output, *self.mlp.projections)

    @property
    def called_modules(self) -> tuple[nn.Module, ...]:
        """The modules that run their own forward."""
        return self.mlp.called_modules

    def with_weights(self, convert: Convert) -> FusedLayer:
        """Return a copy with converted weights. `convert` gets a weight and its linear layers' names."""
        return FusedLayer(
            self.attention.with_weights(convert),
            replace(self.output, weight=convert(self.output.weight, self.output.names)),
            self.mlp.with_weights(convert),
        )


class DecoderOutput(NamedTuple):
    """The output of a decoder, with the fields that models of transformers read. A class of transformers would take
    longer to make than all other Python code of a step."""

    last_hidden_state: Tensor  # [1, num_tokens, hidden]
    past_key_values: None = None
    cache: None = None  # name of past_key_values in newer versions
    hidden_states: None = None
    attentions: None = None
    router_logits: None = None


@dataclass(frozen=True, eq=False)
class FusedDecoder:
    """The `forward` of a decoder of transformers."""

    module: Any  # the decoder that this one replaces
    angles: Callable[[Tensor, Tensor], Angles]  # from hidden states and position ids to cosines and sines
    layers: tuple[FusedLayer, ...]
    norm: Norm | None  # after the last layer; None in a stage before the last
    head: Projection | None = None  # the output layer, if the model computes nothing else after the decoder

    def __call__(
        self,
        input_ids: Tensor,  # [1, num_tokens]
        position_ids: Tensor,  # [1, num_tokens]
        *,
        paged: AttentionMeta,
        attention_mask: None = None,
        **rest: Any,
    ) -> DecoderOutput:
        reject_unsupported(self.module, rest, mask=attention_mask, dropout=0.0, is_causal=None)
        embedded, angles = self._embed(input_ids, position_ids)
        states = HiddenStates(embedded[0], None)
        if self.native:
            states = HiddenStates(self._native_in(paged.kv).layers(states.output, *angles, paged.pagings), None)
        else:
            for layer in self.layers[: len(self.module.layers)]:  # warm-up leaves layers out (`distinct_layers`)
                states = layer(states, angles, paged)
        return DecoderOutput(self._output(*states)[None])

    def _embed(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Angles]:
        """Return the embeddings of tokens [1, num_tokens, hidden], and the angles of their positions."""
        if tables := self._tables:
            rows, angles = embed(input_ids[0], position_ids[0], *tables)
            cos, sin = angles[None].chunk(2, dim=-1)
            return rows[None], (cos, sin)
        embedded = self.module.embed_tokens(input_ids)
        return embedded, self.angles(embedded, position_ids)

    @property
    def _tables(self) -> tuple[Tensor, Tensor] | None:
        """The embeddings of all tokens and the angles of all positions, if the decoder only looks them up."""
        tokens, angles = self.module.embed_tokens, self.angles
        is_plain = type(tokens) is nn.Embedding and type(tokens.weight.data) is Tensor and tokens.max_norm is None
        if not is_plain or has_custom_forward(tokens) or not isinstance(angles, RotaryTable):
            return None
        return tokens.weight.data, angles.table

    def _output(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if self.norm:
            return add_rms_norm(x, residual, *self.norm)[0]
        return x if residual is None else x + residual

    @cached_property
    def native(self) -> list[DecoderLayer] | None:
        """The layers, if one call of a CPU kernel can compute all of them."""
        layers = [_to_native(layer) for layer in self.layers]
        return [layer for layer in layers if layer] if all(layers) else None

    def whole_model(self, kv: KVCache) -> CausalModel | None:
        """Return the model as one call of a CPU kernel; None if the kernel does not support it, or if a hook needs the
        decoder's output."""
        if not self.native or self.module._forward_hooks:
            return None
        return self._native_in(kv).model

    def _native_in(self, kv: KVCache) -> _Native:
        """Return the layers with their caches. The caches of a draft model's layers may follow them in `kv`."""
        found = self._native_by_cache.get(kv)
        if found is None:
            assert self.native
            count = len(self.layers)
            layers = DecoderLayers(self.native, kv.layers[:count], kv.pages[:count])
            found = self._native_by_cache[kv] = _Native(layers, self._to_model(layers))
        return found

    @cached_property
    def _native_by_cache(self) -> WeakKeyDictionary[KVCache, _Native]:
        return WeakKeyDictionary()

    def _to_model(self, layers: DecoderLayers) -> CausalModel | None:
        head, tables = self.head, self._tables
        if not (head and isinstance(head.weight, GroupedCopy) and self.norm and tables):
            return None
        return CausalModel(layers, *tables, *self.norm, head.weight.packed, head.bias)

    @property
    def called_modules(self) -> tuple[nn.Module, ...]:
        """The modules that run their own forward."""
        called = (module for layer in self.layers for module in layer.called_modules)
        return self.module.embed_tokens, *called

    def with_weights(self, convert: Convert) -> FusedDecoder:
        """Return a copy with converted weights."""
        return replace(self, layers=tuple(layer.with_weights(convert) for layer in self.layers))

    @classmethod
    def of(cls, model: PreTrainedModel) -> FusedDecoder | None:
        """Return the fused decoder that a model runs; None if it runs its own."""
        forward = vars(model.base_model).get("forward")
        return forward if isinstance(forward, cls) else None


class _Native(NamedTuple):
    layers: DecoderLayers
    model: CausalModel | None


def projections_by_name(layers: Sequence[FusedLayer]) -> dict[tuple[str, ...], list[Projection]]:
    """Return the projections of all layers, grouped by the names of their linear layers."""
    groups: dict[tuple[str, ...], list[Projection]] = {}
    for layer in layers:
        for projection in layer.projections:
            groups.setdefault(projection.names, []).append(projection)
    return groups


def _to_native(layer: FusedLayer) -> DecoderLayer | None:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, FusedHeads) or not isinstance(mlp, FusedMlp):
        return None
    qkv, o, gate_up, down = projections = attention.qkv, layer.output, mlp.gate_up, mlp.down
    packed = [projection.weight.packed for projection in projections if isinstance(projection.weight, GroupedCopy)]
    if len(packed) < len(projections) or packed[-1].in_features % GROUP:
        return None
    assert qkv.norm and gate_up.norm
    return DecoderLayer(
        *qkv.norm, packed[0], qkv.bias, attention.head_counts[0], attention.rotates,
        attention.head_norms.get("query_weight"), attention.head_norms.get("key_weight"),
        attention.head_norms.get("eps", 0.0),
        attention.spec.scale, attention.spec.sliding_window, attention.spec.softcap, attention.spec.sinks,
        packed[1], o.bias, *gate_up.norm, packed[2], gate_up.bias, packed[3], down.bias,
    )  # fmt: skip
