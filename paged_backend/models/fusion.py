"""Decoder layers of a known plain shape, with what lies between their attentions in few launches.

    stock layer                                    here
    norm, q_proj, k_proj, v_proj                   pre: add + norm, one projection
    rotate, write, attend                          rope_kv_write, attend_pages
    o_proj, add, norm, gate, up, silu, mul, down   post: o_proj, add + norm, one projection, swiglu, down
    add                                            in the next layer's pre, or in the norm after the last

Projections of one input are joined into one weight, of which the model's own parameters become views: no memory
doubles, and the stock layers stay whole, so that a model goes back to them by dropping our `forward`.

Which classes of transformers have this shape is a list, read from their source; that a layer is as its class made it
(no other module, parameter or hook, plain Linear and Parameter) is checked; what it asks of attention is taken from
what it was seen to pass. And whatever was overlooked, the proof at load (`proof.py`) compares the fused model with the
model's own attention as it was before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from paged_kernels.cpu import native
from paged_kernels.ops import add_rms_norm, kv_write, rope_kv_write, swiglu
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from paged_backend.models.attention import AttentionMeta, AttentionSpec, attend_pages, reject_unsupported
from paged_backend.models.linear import Groups, Weight, changed, project

log = logging.getLogger("paged_llm")

# transformers.models.<key>.modeling_<key>.<value>Model, ...DecoderLayer, ...Attention, ...MLP, ...RMSNorm
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"}

JOINED = (  # the projections of each of a layer's weights here
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
PROJECTIONS = {name for names in JOINED for name in names}
NORMS = {"input_layernorm", "post_attention_layernorm"}
HEAD_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}  # both or none


class Stream(NamedTuple):
    """What goes from layer to layer: the stream of the model is their sum, taken by whoever needs it normalised."""

    output: Tensor  # [num_tokens, hidden] of the last block
    residual: Tensor | None  # [num_tokens, hidden]; none before the first layer


def pre(
    output: Tensor, residual: Tensor | None, norm: Tensor, eps: float, qkv: Weight, qkv_bias: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Before an attention: queries, keys and values in one row, [num_tokens, heads of all three * head_dim], and the
    residual stream."""
    normed, total = add_rms_norm(output, residual, norm, eps)
    return project(normed, qkv, qkv_bias), total


def post(
    attended: Tensor,  # [num_tokens, num_heads * head_dim]
    residual: Tensor,
    o: Weight,
    o_bias: Tensor | None,
    norm: Tensor,
    eps: float,
    gate_up: Weight,
    gate_up_bias: Tensor | None,
    down: Weight,
    down_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """After an attention, to the end of the layer."""
    normed, total = add_rms_norm(project(attended, o, o_bias), residual, norm, eps)
    return project(swiglu(project(normed, gate_up, gate_up_bias)), down, down_bias), total


@dataclass(frozen=True)
class Parts:
    """`pre` and `post`, as they are or compiled; all layers share them."""

    pre: Callable[..., tuple[Tensor, Tensor]] = pre
    post: Callable[..., tuple[Tensor, Tensor]] = post


@dataclass(frozen=True, eq=False)
class FusedLayer:
    """What a decoder layer's `forward` becomes."""

    attention: nn.Module
    spec: AttentionSpec
    sizes: tuple[int, int, int]  # heads of queries, keys and values
    before: tuple[Any, ...]  # what `pre` takes after the stream
    after: tuple[Any, ...]  # what `post` takes after the stream
    head_norms: dict[str, Any]
    parts: Parts = Parts()

    @property
    def widths(self) -> tuple[int, int, int]:
        """Of the output, the residual stream and the attended rows."""
        hidden, o = len(self.before[0]), self.after[0]
        return hidden, hidden, o.shape[1]

    def __call__(
        self,
        hidden_states: Tensor | Stream,  # [1, num_tokens, hidden] before the first layer
        attention_mask: None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor],  # cos and sin, [1, num_tokens, head_dim]
        paged: AttentionMeta,
        **rest: Any,
    ) -> Stream:
        reject_unsupported(self.attention, rest, mask=attention_mask, dropout=0.0, is_causal=None)
        if self._in_one_call:
            stream = hidden_states if isinstance(hidden_states, Stream) else Stream(hidden_states[0], None)
            cache = paged.kv.layers[self.attention.layer_idx]
            return Stream(*self._in_one_call(*stream, *position_embeddings, cache, paged.paging))
        if isinstance(hidden_states, Stream):
            qkv, residual = self.parts.pre(*hidden_states, *self.before)
        else:  # nothing to add yet: another function to a compiler, and not worth its time for one layer
            qkv, residual = pre(hidden_states[0], None, *self.before)
        attended = self._attend(qkv, position_embeddings, paged)
        return Stream(*self.parts.post(attended.flatten(1), residual, *self.after))

    def over(self, make: Callable[[Weight, Sequence[str]], Weight]) -> FusedLayer:
        """The same layer, uncompiled, over what `make` makes of each weight and the names of the projections in it."""
        norm, eps, qkv, qkv_bias = self.before
        o, o_bias, post_norm, post_eps, gate_up, gate_up_bias, down, down_bias = self.after
        qkv, o, gate_up, down = (make(*one) for one in zip((qkv, o, gate_up, down), JOINED, strict=True))
        after = (o, o_bias, post_norm, post_eps, gate_up, gate_up_bias, down, down_bias)
        return replace(self, parts=Parts(), before=(norm, eps, qkv, qkv_bias), after=after)

    @cached_property
    def _in_one_call(self) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """The whole layer as one operation, on a CPU whose kernels multiply all of its weights."""
        norm, eps, qkv, qkv_bias = self.before
        o, o_bias, post_norm, post_eps, gate_up, gate_up_bias, down, down_bias = self.after
        if not all(isinstance(one, Groups) for one in (qkv, o, gate_up, down)) or self.spec.sinks is not None:
            return None
        return native.DecoderLayer(
            norm, eps, qkv.packed, qkv_bias, self.sizes[0], getattr(self.attention, "use_rope", True),
            self.head_norms.get("query_weight"), self.head_norms.get("key_weight"), self.head_norms.get("eps", 0.0),
            self.spec.scale, self.spec.sliding_window, self.spec.softcap,
            o.packed, o_bias, post_norm, post_eps, gate_up.packed, gate_up_bias, down.packed, down_bias,
        ).bind()  # fmt: skip

    def _attend(self, qkv: Tensor, angles: tuple[Tensor, Tensor], paged: AttentionMeta) -> Tensor:
        cache, slots = paged.kv.layers[self.attention.layer_idx], paged.paging.slots
        heads = qkv.view(len(qkv), sum(self.sizes), -1)
        query, key, value = heads.split(self.sizes, dim=1)
        if getattr(self.attention, "use_rope", True):
            query = rope_kv_write(query, key, value, angles[0][0], angles[1][0], cache, slots, **self.head_norms)
        else:
            kv_write(key, value, cache, slots)
        return attend_pages(query, cache, paged.paging, self.spec)


@dataclass(frozen=True, eq=False)
class Fused:
    """A model whose layers are ours, until `undo`."""

    model: PreTrainedModel
    layers: tuple[FusedLayer, ...]  # with the model's own weights

    def use(self, parts: Parts, make: Callable[[Tensor], Weight] = lambda weight: weight) -> None:
        """Run `parts`, over what `make` makes of each weight."""

        def made(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(make(one) if isinstance(one, Tensor) and one.dim() == 2 else one for one in values)

        for module, layer in zip(self.model.model.layers, self.layers, strict=True):
            module.forward = replace(layer, parts=parts, before=made(layer.before), after=made(layer.after))

    def undo(self) -> None:
        decoder = self.model.model
        for module in (*decoder.layers, decoder.norm):
            del module.forward


@torch.no_grad()
def fuse(model: PreTrainedModel, specs: Sequence[AttentionSpec]) -> Fused | str:
    """Put our layers in the place of the model's; or why they stay, and nothing is touched. `specs`: by layer."""
    if reason := _other_shape(model):
        return reason
    decoder = model.model
    layers = tuple(_fused(layer, spec) for layer, spec in zip(decoder.layers, specs, strict=True))
    for layer, fused in zip(decoder.layers, layers, strict=True):
        layer.forward = fused
    weight, eps = decoder.norm.weight.data, decoder.norm.variance_epsilon
    decoder.norm.forward = lambda stream: add_rms_norm(*stream, weight, eps)[0][None]
    return Fused(model, layers)


def _fused(layer: nn.Module, spec: AttentionSpec) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    norms = {}
    if hasattr(attention, "q_norm"):
        weights = dict(query_weight=attention.q_norm.weight.data, key_weight=attention.k_norm.weight.data)
        norms = weights | dict(eps=attention.q_norm.variance_epsilon)
    return FusedLayer(
        attention=attention,
        spec=spec,
        sizes=tuple(one.out_features // attention.head_dim for one in projections),
        before=(*_norm(layer.input_layernorm), *_join(projections)),
        after=(
            *_join([attention.o_proj]),
            *_norm(layer.post_attention_layernorm),
            *_join([mlp.gate_proj, mlp.up_proj]),
            *_join([mlp.down_proj]),
        ),
        head_norms=norms,
    )


def _norm(module: nn.Module) -> tuple[Tensor, float]:
    return module.weight.data, module.variance_epsilon


def _join(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of all; where there are several, joined, and their own parameters become views."""

    def joined(parameters: list[nn.Parameter]) -> Tensor:
        if len(parameters) == 1:
            return parameters[0].data
        whole = torch.cat([one.data for one in parameters])
        for one, view in zip(parameters, whole.split([len(one) for one in parameters]), strict=True):
            one.data = view
        return whole

    weight = joined([linear.weight for linear in linears])
    return weight, joined([linear.bias for linear in linears]) if linears[0].bias is not None else None


def _other_shape(model: PreTrainedModel) -> str | None:
    """What keeps the model from being fused; None where nothing does."""
    decoder = getattr(model, "model", None)
    family = next((name for name in FAMILIES if _is(decoder, name, "Model")), None)
    if family is None:
        return f"{type(decoder).__name__} is not on the list"
    if not _is(decoder.norm, family, "RMSNorm") or changed(decoder.norm):
        return "its last norm is another"
    for index, layer in enumerate(decoder.layers):
        if reason := next(_differences(layer, family, index, model), None):
            return f"layer {index}: {reason}"
    return None


def _is(module: nn.Module | None, family: str, kind: str) -> bool:
    name = f"transformers.models.{family}.modeling_{family}.{FAMILIES[family]}{kind}"
    return f"{type(module).__module__}.{type(module).__qualname__}" == name


def _differences(layer: nn.Module, family: str, index: int, model: PreTrainedModel) -> Iterator[str]:
    modules = dict(layer.named_modules())
    kinds = {"": "DecoderLayer", "self_attn": "Attention", "mlp": "MLP"} | dict.fromkeys(NORMS | HEAD_NORMS, "RMSNorm")
    names = kinds.keys() | PROJECTIONS | {"mlp.act_fn"}
    if modules.keys() not in (names, names - HEAD_NORMS):
        yield f"its modules are {sorted(modules)}"
        return
    for name, module in modules.items():
        as_expected = (
            type(module) is nn.Linear
            if name in PROJECTIONS
            else type(module) is type(ACT2FN["silu"])
            if name == "mlp.act_fn"
            else _is(module, family, kinds[name])
        )
        if not as_expected or changed(module):
            yield f"{name or 'it'} is another {type(module).__name__}, or has hooks"
    parameters = dict(layer.named_parameters())
    weights = {f"{name}.weight" for name in PROJECTIONS | NORMS | HEAD_NORMS & modules.keys()}
    if (
        parameters.keys() - {f"{name}.bias" for name in PROJECTIONS} != weights
        or next(layer.buffers(), None) is not None
    ):
        yield f"its parameters are {sorted(parameters)}"
        return
    for name, parameter in parameters.items():
        plain = type(parameter) is nn.Parameter and type(parameter.data) is Tensor
        if not plain or (parameter.dtype, parameter.device) != (model.dtype, model.device):
            yield f"{name} is no plain parameter in {model.dtype} on {model.device}"
    attention, mlp = layer.self_attn, layer.mlp
    for joined in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
        if len({linear.bias is None for linear in joined}) > 1:
            yield "of projections to be joined some have a bias"
    if attention.layer_idx != index:
        yield f"its layer_idx is {attention.layer_idx}"
