"""The parts of a fused decoder layer: attention, output projection and MLP, each of which is a value of the layer.

    attention    FusedHeads: queries, keys and values of heads; FusedLatents: latents and a shared key
    mlp          FusedMlp: gate, up and down projection; FusedExperts: a mixture of experts

A part adds and normalizes its input itself, so that this is one launch with what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import Tensor, nn

from paged_backend.models.attention import AttentionMeta, AttentionSpec, attend_pages, reject_unsupported
from paged_backend.models.few_rows import norm_project
from paged_backend.models.latent_attention import LatentAttention
from paged_backend.models.linear import Weight, project
from paged_backend.models.rotary_table import Rotation
from paged_kernels.ops import add_rms_norm, kv_write, latent_kv_write, rope_kv_write

Convert: TypeAlias = "Callable[[Any, Sequence[str]], Weight]"  # of a weight and the names of its linear layers
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
class Projection:
    """Linear layers of the same input, joined into one, with the normalization before and the activation after it."""

    names: tuple[str, ...]  # of the linear layers, inside of the decoder layer
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
        return norm_project(x, residual, *self.norm, self.weight, self.bias, gated=self.gated)


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

    def __call__(
        self, states: HiddenStates, angles: tuple[Tensor, Tensor], paged: AttentionMeta
    ) -> tuple[Tensor, Tensor]:
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
    kv_norm: Norm  # of latents

    def __call__(
        self, states: HiddenStates, angles: tuple[Tensor, Tensor], paged: AttentionMeta
    ) -> tuple[Tensor, Tensor]:
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
    """The `forward` of a fused decoder layer."""

    attention: FusedHeads | FusedLatents
    output: Projection
    mlp: FusedMlp | FusedExperts

    def __call__(
        self,
        hidden_states: Tensor | HiddenStates,  # [1, num_tokens, hidden] before the first layer
        attention_mask: None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor],  # cos and sin, [1, num_tokens, head_dim]
        paged: AttentionMeta,
        **rest: Any,
    ) -> HiddenStates:
        reject_unsupported(self.attention.module, rest, mask=attention_mask, dropout=0.0, is_causal=None)
        states = hidden_states if isinstance(hidden_states, HiddenStates) else HiddenStates(hidden_states[0], None)
        attended, residual = self.attention(states, position_embeddings, paged)
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


def projections_by_name(layers: Sequence[FusedLayer]) -> dict[tuple[str, ...], list[Projection]]:
    """Return the projections of all layers, grouped by the names of their linear layers."""
    groups: dict[tuple[str, ...], list[Projection]] = {}
    for layer in layers:
        for projection in layer.projections:
            groups.setdefault(projection.names, []).append(projection)
    return groups
