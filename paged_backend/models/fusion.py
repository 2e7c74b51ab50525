"""Fused decoder layers, which run the operations between two attention calls in few kernel launches.

    transformers                                   fused
    norm, q_proj, k_proj, v_proj                   norm_project: add + norm, one projection
    rotate, write, attend                          rope_kv_write, attend_pages
    o_proj, add, norm, gate, up, silu, mul, down   post_attention: o_proj, norm_project with SwiGLU, down
    add                                            in the next layer's norm_project, or in the norm after the last

Projections of the same input are joined into one weight, and the model's own parameters become views of it. Memory use
does not grow, and the original layers stay intact: removing the fused `forward` restores them.

`FAMILIES` lists the transformers classes with this layer structure. `fuse` checks that every layer is unmodified (no
other modules, parameters or hooks; plain Linear and Parameter), and takes the attention parameters from what the layer
passed to attention in a probe. The verification at load (`verification.py`) compares the fused model with the model's
own eager attention and so detects whatever these checks miss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from paged_backend.models import rope
from paged_backend.models.attention import AttentionMeta, AttentionSpec, attend_pages, reject_unsupported
from paged_backend.models.few_rows import FewRowsWeight, Measure, choose_max_rows, launch_once, norm_project
from paged_backend.models.linear import GroupedCopy, Weight, has_custom_forward, project
from paged_backend.models.native_decoder import NativeDecoder
from paged_backend.models.rotary_table import look_up_angles
from paged_kernels.compile_ahead import compile_ahead
from paged_kernels.cpu import native
from paged_kernels.cpu.packed_linear import GROUP
from paged_kernels.ops import add_rms_norm, kv_write, rope_kv_write

log = logging.getLogger("paged_llm")

# transformers.models.<key>.modeling_<key>.<value>Model, ...DecoderLayer, ...Attention, ...MLP, ...RMSNorm
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"}

JOINED = (  # the projections in each weight of a fused layer
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
PROJECTIONS = {name for names in JOINED for name in names}
NORMS = {"input_layernorm", "post_attention_layernorm"}
HEAD_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}  # a model has both or neither


class HiddenStates(NamedTuple):
    """The hidden states between two layers: output + residual, which the next normalization adds."""

    output: Tensor  # [num_tokens, hidden]: output of the last MLP
    residual: Tensor | None  # [num_tokens, hidden]; None before the first layer


def post_attention(
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
    """Run the operations after attention: output projection, add, normalize and MLP.

    Returns the output of the MLP and the residual, both [num_tokens, hidden].
    """
    output = project(attended, o, o_bias)
    activated, total = norm_project(output, residual, norm, eps, gate_up, gate_up_bias, gated=True)
    return project(activated, down, down_bias), total


@dataclass(frozen=True, eq=False)
class FusedLayer:
    """The `forward` of a fused decoder layer."""

    attention: nn.Module
    spec: AttentionSpec
    head_counts: tuple[int, int, int]  # heads of queries, keys and values
    pre_arguments: tuple[Any, ...]  # arguments of `norm_project` after the hidden states
    post_arguments: tuple[Any, ...]  # arguments of `post_attention` after attention output and residual
    head_norms: dict[str, Any]

    def __call__(
        self,
        hidden_states: Tensor | HiddenStates,  # [1, num_tokens, hidden] before the first layer
        attention_mask: None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor],  # cos and sin, [1, num_tokens, head_dim]
        paged: AttentionMeta,
        **rest: Any,
    ) -> HiddenStates:
        reject_unsupported(self.attention, rest, mask=attention_mask, dropout=0.0, is_causal=None)
        states = hidden_states if isinstance(hidden_states, HiddenStates) else HiddenStates(hidden_states[0], None)
        qkv, residual = norm_project(*states, *self.pre_arguments)
        attended = self._attend(qkv, position_embeddings, paged)
        return HiddenStates(*post_attention(attended.flatten(1), residual, *self.post_arguments))

    @property
    def weights(self) -> tuple[Weight, Weight, Weight, Weight]:
        """The weights of the projections, in the order of `JOINED`."""
        o, gate_up, down = (self.post_arguments[index] for index in (0, 4, 6))
        return self.pre_arguments[2], o, gate_up, down

    def with_weights(self, convert: Callable[[Any, Sequence[str]], Weight]) -> FusedLayer:
        """Return a copy with converted weights. `convert` gets a weight and its projections' names."""
        norm, eps, qkv, qkv_bias = self.pre_arguments
        o, o_bias, post_norm, post_eps, gate_up, gate_up_bias, down, down_bias = self.post_arguments
        qkv, o, gate_up, down = (convert(*pair) for pair in zip((qkv, o, gate_up, down), JOINED, strict=True))
        pre_arguments = (norm, eps, qkv, qkv_bias)
        post_arguments = (o, o_bias, post_norm, post_eps, gate_up, gate_up_bias, down, down_bias)
        return replace(self, pre_arguments=pre_arguments, post_arguments=post_arguments)

    def _attend(self, qkv: Tensor, angles: tuple[Tensor, Tensor], paged: AttentionMeta) -> Tensor:
        cache, paging = paged.kv.layers[self.attention.layer_idx], paged.paging_of(self.attention.layer_idx)
        heads = qkv.view(len(qkv), sum(self.head_counts), -1)
        query, key, value = heads.split(self.head_counts, dim=1)
        if getattr(self.attention, "use_rope", True):
            query = rope_kv_write(query, key, value, angles[0][0], angles[1][0], cache, paging.slots, **self.head_norms)
        else:
            kv_write(key, value, cache, paging.slots)
        return attend_pages(query, cache, paging, self.spec)


@dataclass(frozen=True, eq=False)
class FusedModel:
    """A model that runs fused layers until `uninstall`."""

    model: PreTrainedModel
    layers: tuple[FusedLayer, ...]  # layers with the model's unconverted weights

    def install(self, convert: Callable[[Tensor], Weight] = lambda weight: weight) -> None:
        """Make the model run the fused layers on converted weights."""
        self._use([layer.with_weights(lambda weight, _: convert(weight)) for layer in self.layers])

    def install_few_rows(self, measure: Measure) -> bool:
        """Make the model run the fused layers with `few_rows_linear`, for each projection up to the number of rows for
        which it is faster. Returns whether it is for any."""
        norm, eps, _, qkv_bias = self.layers[0].pre_arguments
        _, o_bias, post_norm, post_eps, _, gate_up_bias, _, down_bias = self.layers[0].post_arguments
        runs: list[Callable[[Tensor, Weight], Any]] = [
            lambda x, weight: norm_project(x, x, norm, eps, weight, qkv_bias),
            lambda x, weight: project(x, weight, o_bias),
            lambda x, weight: norm_project(x, x, post_norm, post_eps, weight, gate_up_bias, gated=True),
            lambda x, weight: project(x, weight, down_bias),
        ]
        weights = zip(*(layer.weights for layer in self.layers), strict=True)
        projections = list(zip(JOINED, weights, runs, strict=True))

        def launch_all() -> None:
            for _, some, run in projections:
                launch_once(some[0], run)

        compile_ahead(norm.device, launch_all)
        max_rows = {names: choose_max_rows(some, run, measure) for names, some, run in projections}
        log.info("rows up to which projections take one launch: %s", {names[0]: n for names, n in max_rows.items()})

        def convert(weight: Tensor, names: Sequence[str]) -> Weight:
            rows = max_rows[tuple(names)]
            return FewRowsWeight(weight, rows) if rows else weight

        self._use([layer.with_weights(convert) for layer in self.layers])
        return any(max_rows.values())

    def _use(self, layers: Sequence[FusedLayer]) -> None:
        decoder = self.model.model
        for module, layer in zip(decoder.layers, layers, strict=True):
            module.forward = layer
        if native_layers := _to_native_layers(layers):
            decoder.forward = NativeDecoder(decoder, native_layers)
        else:
            vars(decoder).pop("forward", None)

    def uninstall(self) -> None:
        """Restore the model's own layers."""
        decoder = self.model.model
        for module in (*decoder.layers, decoder.norm):
            del module.forward
        for module in (decoder, decoder.rotary_emb):
            vars(module).pop("forward", None)


def _to_native_layers(layers: Sequence[FusedLayer]) -> list[native.DecoderLayer]:
    """Return the layers for the CPU kernel, or none if it does not support the weights of any of them."""
    converted = [found for layer in layers if (found := _to_native(layer))]
    return converted if len(converted) == len(layers) else []


def _to_native(layer: FusedLayer) -> native.DecoderLayer | None:
    norm, eps, qkv, qkv_bias = layer.pre_arguments
    o, o_bias, post_norm, post_eps, gate_up, gate_up_bias, down, down_bias = layer.post_arguments
    grouped = all(isinstance(weight, GroupedCopy) for weight in (qkv, o, gate_up, down))
    if not grouped or down.packed.in_features % GROUP:
        return None
    return native.DecoderLayer(
        norm, eps, qkv.packed, qkv_bias, layer.head_counts[0], getattr(layer.attention, "use_rope", True),
        layer.head_norms.get("query_weight"), layer.head_norms.get("key_weight"), layer.head_norms.get("eps", 0.0),
        layer.spec.scale, layer.spec.sliding_window, layer.spec.softcap, layer.spec.sinks,
        o.packed, o_bias, post_norm, post_eps, gate_up.packed, gate_up_bias, down.packed, down_bias,
    )  # fmt: skip


@torch.no_grad()
def fuse(model: PreTrainedModel, specs: Sequence[AttentionSpec]) -> FusedModel | str:
    """Replace the model's layers by fused ones. Returns the reason, and changes nothing, if that is not possible.

    `specs` are the attention parameters by layer.
    """
    if reason := _obstacle(model):
        return reason
    decoder = model.model
    layers = tuple(_fuse_layer(layer, spec) for layer, spec in zip(decoder.layers, specs, strict=True))
    for layer, fused in zip(decoder.layers, layers, strict=True):
        layer.forward = fused
    weight, eps = decoder.norm.weight.data, decoder.norm.variance_epsilon

    def final_norm(states: tuple[Tensor, Tensor]) -> Tensor:
        x, residual = states
        return add_rms_norm(x, residual, weight, eps)[0][None]

    decoder.norm.forward = final_norm
    if _is(decoder.rotary_emb, _family(decoder), "RotaryEmbedding") and not has_custom_forward(decoder.rotary_emb):
        look_up_angles(decoder, rope.max_static_len(model.config.get_text_config())[0], model.dtype)
    return FusedModel(model, layers)


def _fuse_layer(layer: nn.Module, spec: AttentionSpec) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    norms = {}
    if hasattr(attention, "q_norm"):
        weights = dict(query_weight=attention.q_norm.weight.data, key_weight=attention.k_norm.weight.data)
        norms = weights | dict(eps=attention.q_norm.variance_epsilon)
    return FusedLayer(
        attention=attention,
        spec=spec,
        head_counts=tuple(linear.out_features // attention.head_dim for linear in projections),
        pre_arguments=(*_norm(layer.input_layernorm), *_join(projections)),
        post_arguments=(
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
    """Return the joined weight and bias of linear layers, whose own parameters become views of them."""

    def joined(parameters: list[nn.Parameter]) -> Tensor:
        if len(parameters) == 1:
            return parameters[0].data
        whole = torch.cat([parameter.data for parameter in parameters])
        views = whole.split([len(parameter) for parameter in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            parameter.data = view
        return whole

    weight = joined([linear.weight for linear in linears])
    return weight, joined([linear.bias for linear in linears]) if linears[0].bias is not None else None


def _obstacle(model: PreTrainedModel) -> str | None:
    """Return why the model cannot be fused, or None if it can."""
    decoder: Any = getattr(model, "model", None)
    family = _family(decoder)
    if family is None:
        return f"{type(decoder).__name__} is not a supported family"
    if not _is(decoder.norm, family, "RMSNorm") or has_custom_forward(decoder.norm):
        return "its final norm differs"
    for index, layer in enumerate(decoder.layers):
        if reason := next(_differences(layer, family, index, model), None):
            return f"layer {index}: {reason}"
    return None


def _family(decoder: nn.Module | None) -> str | None:
    return next((name for name in FAMILIES if _is(decoder, name, "Model")), None)


def _is(module: nn.Module | None, family: str | None, kind: str) -> bool:
    """Return whether the module is the class of this kind of a family. No module is one of no family."""
    if family is None:
        return False
    name = f"transformers.models.{family}.modeling_{family}.{FAMILIES[family]}{kind}"
    return f"{type(module).__module__}.{type(module).__qualname__}" == name


def _differences(layer: nn.Module, family: str, index: int, model: PreTrainedModel) -> Iterator[str]:
    """Yield how a layer differs from an unmodified one of its family."""
    yield from _module_differences(layer, family)
    yield from _parameter_differences(layer, model)
    attention, mlp = layer.self_attn, layer.mlp
    for joined in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
        if len({linear.bias is None for linear in joined}) > 1:
            yield "only some of the projections to be joined have a bias"
    if attention.layer_idx != index:
        yield f"its layer_idx is {attention.layer_idx}"


def _module_differences(layer: nn.Module, family: str) -> Iterator[str]:
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
        if not as_expected or has_custom_forward(module):
            yield f"{name or 'it'} is a modified {type(module).__name__}, or has hooks"


def _parameter_differences(layer: nn.Module, model: PreTrainedModel) -> Iterator[str]:
    modules, parameters = dict(layer.named_modules()), dict(layer.named_parameters())
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
            yield f"{name} is not a plain parameter in {model.dtype} on {model.device}"
