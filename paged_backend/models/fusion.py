"""Builds fused decoders, which run the operations between two attention calls in few kernel launches.

    transformers                                   fused
    norm, q_proj, k_proj, v_proj                   add + norm + one projection (`Projection.add`)
    rotate, write, attend                          rope_kv_write, attend_pages
    o_proj                                         o_proj
    add, norm, gate, up, silu, mul, down           add + norm + one projection with SwiGLU, down
    add, norm, mixture of experts                  add_rms_norm, then the module of the model
    add                                            in the next layer's norm, or in the norm after the last

Projections of the same input are joined into one weight, and the model's own parameters become views of it. Memory use
does not grow, and the original decoder stays intact.

FAMILIES are the families with this layer structure. A fused layer uses the parameters of the modules that it
replaces, so `find_obstacle` checks that these are as transformers creates them (no other modules, parameters or hooks;
plain Linear and Parameter). Modules that a fused layer calls, such as mixtures of experts, run their own forward, and
may hold anything. The attention parameters are what the layer passed to attention in a probe. The verification at load
(`verification.py`) compares the fused model with the model's own eager attention and so detects whatever these checks
miss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from paged_backend.models.attention import AttentionSpec
from paged_backend.models.decoder import (
    FusedDecoder,
    FusedExperts,
    FusedHeads,
    FusedLatents,
    FusedLayer,
    FusedMlp,
    Norm,
    Projection,
)
from paged_backend.models.latent_attention import LatentAttention
from paged_backend.models.linear import project
from paged_backend.models.overrides import Overrides, has_custom_forward
from paged_backend.models.pipeline import StageOutput
from paged_backend.models.rope import Angles, Rotation, for_both_halves, look_up_angles, max_static_len, of_complex


class Family(NamedTuple):
    """A family of transformers. Its classes are transformers.models.NAME.modeling_NAME.<prefix><kind>."""

    prefix: str
    experts: str | None = None  # kind of the module of a mixture of experts
    has_sinks: bool = False  # whether attention has sinks
    rotation_of: Callable[[Any], Rotation] | None = None  # takes an attention module over latents
    convert_angles: Callable[[Any], Angles] | None = None  # takes what the rotary embedding returns, if not angles


def _rotation_of_deepseek_v3(attention: Any) -> Rotation:
    return Rotation(from_pairs=bool(attention.config.rope_interleave), to_pairs=False)


FAMILIES = {
    "deepseek_v2": Family(
        "DeepseekV2",
        experts="Moe",
        rotation_of=lambda attention: Rotation(from_pairs=True, to_pairs=True),
        convert_angles=of_complex,
    ),
    "deepseek_v3": Family("DeepseekV3", experts="MoE", rotation_of=_rotation_of_deepseek_v3),
    "gpt_oss": Family("GptOss", experts="MLP", has_sinks=True, convert_angles=for_both_halves),
    "llama": Family("Llama"),
    "mistral": Family("Mistral"),
    "mixtral": Family("Mixtral", experts="SparseMoeBlock"),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3"),
    "qwen3_moe": Family("Qwen3Moe", experts="SparseMoeBlock"),
    "smollm3": Family("SmolLM3"),
}

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
QUERY_B = ("self_attn.q_b_proj",)
OUTPUT = ("self_attn.o_proj",)
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = ("mlp.down_proj",)
NORMS = {"input_layernorm", "post_attention_layernorm"}
HEAD_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}  # a model has both or neither
KV_NORM, QUERY_NORM = "self_attn.kv_a_layernorm", "self_attn.q_a_layernorm"
ABSORBED = "self_attn.kv_b_proj"


@dataclass(frozen=True)
class Structure:
    """The modules that a fused layer replaces, and those that it calls."""

    joined: tuple[tuple[str, ...], ...]  # linear layers, by the weight that they are joined into
    kinds: dict[str, str]  # class of each other module, by name
    called: Set[str]  # modules that it calls
    unused: Set[str]  # modules whose weights attention has absorbed

    @property
    def linears(self) -> Set[str]:
        return {name for names in self.joined for name in names}

    def owns(self, name: str) -> bool:
        """Return whether a module or parameter is the layer's own, and not part of a module that it calls."""
        return name not in self.unused and not any(name.startswith(f"{other}.") for other in self.called | self.unused)


def find_family(decoder: nn.Module | None) -> str | None:
    """Return the name of the family of a decoder, or None if it has no fused layers."""
    return next((name for name in FAMILIES if is_own(decoder, name, "Model")), None)


def is_own(module: nn.Module | None, family: str | None, kind: str) -> bool:
    """Return whether the module is of the family's class for this kind. False if either is None."""
    if family is None:
        return False
    name = f"transformers.models.{family}.modeling_{family}.{FAMILIES[family].prefix}{kind}"
    return f"{type(module).__module__}.{type(module).__qualname__}" == name


def has_own_rotary(decoder: Any, family: str) -> bool:
    """Return whether the rotary embedding of a decoder is the unmodified one of its family."""
    return is_own(decoder.rotary_emb, family, "RotaryEmbedding") and not has_custom_forward(decoder.rotary_emb)


def has_experts(mlp: nn.Module, family: str) -> bool:
    """Return whether the MLP of a layer is a mixture of experts."""
    experts = FAMILIES[family].experts
    return experts is not None and is_own(mlp, family, experts)


def find_obstacle(model: PreTrainedModel, latents: Mapping[nn.Module, LatentAttention]) -> str | None:
    """Return why the model cannot be fused, or None if it can. latents: latent attention by attention module."""
    decoder: Any = getattr(model, "model", None)
    family = find_family(decoder)
    if family is None:
        return f"{type(model if decoder is None else decoder).__name__} is not a supported family"
    if isinstance(decoder.norm, StageOutput):
        pass  # adds the residual to the output of the last fused layer
    elif not is_own(decoder.norm, family, "RMSNorm") or has_custom_forward(decoder.norm):
        return "its final norm differs"
    if FAMILIES[family].convert_angles and not has_own_rotary(decoder, family):
        return "its rotary embedding differs"
    for index, layer in enumerate(decoder.layers):
        if reason := next(_differences(layer, family, index, model, latents), None):
            return f"layer {index}: {reason}"
    return None


def _differences(
    layer: nn.Module,
    family: str,
    index: int,
    model: PreTrainedModel,
    latents: Mapping[nn.Module, LatentAttention],
) -> Iterator[str]:
    """Yield how a layer differs from an unmodified one of its family."""
    structure = _structure(layer, family)
    if structure.unused and layer.self_attn not in latents:
        yield "its attention does not store latents"
    yield from _module_differences(layer, family, structure)
    yield from _parameter_differences(
        layer, model, structure, {"self_attn.sinks"} if FAMILIES[family].has_sinks else set()
    )
    modules = dict(layer.named_modules())
    for joined in structure.joined:
        if len({modules[name].bias is None for name in joined}) > 1:
            yield "only some of the projections to be joined have a bias"
    if modules["self_attn"].layer_idx != index:
        yield f"its layer_idx is {modules['self_attn'].layer_idx}"


def _structure(layer: nn.Module, family: str) -> Structure:
    """Return the structure of a layer of this family, with the optional parts that this layer has."""
    modules, unused = dict(layer.named_modules()), set()
    kinds = {"": "DecoderLayer", "self_attn": "Attention"} | dict.fromkeys(NORMS, "RMSNorm")
    if FAMILIES[family].rotation_of:
        joined, unused = latent_projections(modules.keys()), {ABSORBED}
        kinds |= dict.fromkeys((KV_NORM, QUERY_NORM)[: len(joined)], "RMSNorm")
    else:
        joined = (QKV,)
        kinds |= dict.fromkeys(HEAD_NORMS, "RMSNorm") if HEAD_NORMS & modules.keys() else {}
    experts = FAMILIES[family].experts
    if experts is not None and is_own(modules.get("mlp"), family, experts):
        return Structure((*joined, OUTPUT), kinds | {"mlp": experts}, {"mlp"}, unused)
    kinds |= {"mlp": "MLP", "mlp.act_fn": "SiLU"}
    return Structure((*joined, OUTPUT, GATE_UP, DOWN), kinds, frozenset(), unused)


def latent_projections(names: Set[str]) -> tuple[tuple[str, ...], ...]:
    """Return the projections of an attention over latents, in a layer with modules of these names.

    The first projection also computes latents and shared keys. With low-rank queries, the second one expands them.
    """
    has_query_latents = QUERY_B[0] in names
    first = ("self_attn.q_a_proj" if has_query_latents else "self_attn.q_proj", "self_attn.kv_a_proj_with_mqa")
    return (first, QUERY_B) if has_query_latents else (first,)


def _module_differences(layer: nn.Module, family: str, structure: Structure) -> Iterator[str]:
    modules = {name: module for name, module in layer.named_modules() if structure.owns(name)}
    if modules.keys() != structure.linears | structure.kinds.keys():
        yield f"its modules are {sorted(modules)}"
        return
    for name, module in modules.items():
        kind = structure.kinds.get(name)
        as_expected = (
            type(module) is nn.Linear
            if kind is None
            else type(module) is type(ACT2FN["silu"])
            if kind == "SiLU"
            else is_own(module, family, kind)
        )
        if not as_expected or has_custom_forward(module):
            yield f"{name or 'it'} is a modified {type(module).__name__}, or has hooks"


def _parameter_differences(
    layer: nn.Module, model: PreTrainedModel, structure: Structure, others: Set[str]
) -> Iterator[str]:
    """Yield how the parameters of a layer differ from the expected ones. others: names of expected parameters outside
    of linear layers and norms."""
    parameters = {name: parameter for name, parameter in layer.named_parameters() if structure.owns(name)}
    norms = {name for name, kind in structure.kinds.items() if kind == "RMSNorm"}
    weights = {f"{name}.weight" for name in structure.linears | norms} | others
    buffers = [name for name, _ in layer.named_buffers() if structure.owns(name)]
    if parameters.keys() - {f"{name}.bias" for name in structure.linears} != weights or buffers:
        yield f"its parameters are {sorted(parameters)}"
        return
    for name, parameter in parameters.items():
        plain = type(parameter) is nn.Parameter and type(parameter.data) is Tensor
        if not plain or (parameter.dtype, parameter.device) != (model.dtype, model.device):
            yield f"{name} is not a plain parameter in {model.dtype} on {model.device}"


@torch.no_grad()
def fuse(model: PreTrainedModel, specs: Sequence[AttentionSpec], overrides: Overrides) -> FusedDecoder | str:
    """Return a fused decoder for a model, or the reason why that is not possible. The parameters of joined projections
    become views of one weight.

    specs: the attention parameters by layer. overrides: what else the model runs, such as latent attention.
    """
    latents = {module: value for (module, _), value in overrides.items() if isinstance(value, LatentAttention)}
    if reason := find_obstacle(model, latents):
        return reason
    decoder = model.model
    family = find_family(decoder)
    assert family is not None
    return FusedDecoder(
        decoder,
        _angles(model, family),
        tuple(_fuse_layer(layer, spec, family, latents) for layer, spec in zip(decoder.layers, specs, strict=True)),
        None if isinstance(decoder.norm, StageOutput) else _norm(decoder.norm),
    )


def output_layer(model: PreTrainedModel, overrides: Overrides) -> Projection | None:
    """Return the output layer of a fused model, with the weight that it has in `overrides`. None if the model might
    compute more after the decoder than this layer."""
    head: Any = model.get_output_embeddings()
    converted = overrides.get((head, "forward"))
    if (
        not is_own(model, find_family(model.base_model), "ForCausalLM") or has_custom_forward(model)
        or type(head) is not nn.Linear or not isinstance(converted, partial) or converted.func is not project
    ):  # fmt: skip
        return None
    return Projection(("lm_head",), **converted.keywords)


def _angles(model: PreTrainedModel, family: str) -> Callable[[Tensor, Tensor], Angles]:
    rotary = model.model.rotary_emb
    if not has_own_rotary(model.model, family):
        return rotary
    positions, _ = max_static_len(model.config.get_text_config())
    hidden = next(model.model.layers.parameters()).data.new_empty(0, dtype=model.dtype)
    return look_up_angles(rotary, positions, hidden, FAMILIES[family].convert_angles)


def _fuse_layer(
    layer: nn.Module, spec: AttentionSpec, family: str, latents: Mapping[nn.Module, LatentAttention]
) -> FusedLayer:
    mlp_norm = _norm(layer.post_attention_layernorm)
    rotation_of = FAMILIES[family].rotation_of
    return FusedLayer(
        _fuse_latents(layer, spec, rotation_of(layer.self_attn), latents) if rotation_of else _fuse_heads(layer, spec),
        _join(layer, OUTPUT),
        FusedExperts(layer.mlp, mlp_norm)
        if has_experts(layer.mlp, family)
        else FusedMlp(_join(layer, GATE_UP, mlp_norm, gated=True), _join(layer, DOWN)),
    )


def _fuse_heads(layer: Any, spec: AttentionSpec) -> FusedHeads:
    attention, norms = layer.self_attn, {}
    if hasattr(attention, "q_norm"):
        weights = dict(query_weight=attention.q_norm.weight.data, key_weight=attention.k_norm.weight.data)
        norms = weights | dict(eps=attention.q_norm.variance_epsilon)
    linears = (attention.q_proj, attention.k_proj, attention.v_proj)
    return FusedHeads(
        module=attention,
        spec=spec,
        head_counts=tuple(linear.out_features // attention.head_dim for linear in linears),
        rotates=bool(getattr(attention, "use_rope", True)),
        head_norms=norms,
        qkv=_join(layer, QKV, _norm(layer.input_layernorm)),
    )


def _fuse_latents(
    layer: Any, spec: AttentionSpec, rotation: Rotation, latents: Mapping[nn.Module, LatentAttention]
) -> FusedLatents:
    attention = layer.self_attn
    query_kv, *query = latent_projections(dict(layer.named_modules()).keys())
    return FusedLatents(
        module=attention,
        spec=spec,
        attend=latents[attention],
        rotation=rotation,
        query_kv=_join(layer, query_kv, _norm(layer.input_layernorm)),
        query=_join(layer, query[0], _norm(attention.q_a_layernorm)) if query else None,
        kv_norm=_norm(attention.kv_a_layernorm),
    )


def _norm(module: Any) -> Norm:
    return Norm(module.weight.data, module.variance_epsilon)


def _join(layer: nn.Module, names: tuple[str, ...], norm: Norm | None = None, *, gated: bool = False) -> Projection:
    """Return linear layers joined into one, whose own parameters become views of its weight and bias."""
    linears = [layer.get_submodule(name) for name in names]

    def joined(parameters: list[nn.Parameter]) -> Tensor:
        if len(parameters) == 1:
            return parameters[0].data
        whole = torch.cat([parameter.data for parameter in parameters])
        views = whole.split([len(parameter) for parameter in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            parameter.data = view
        return whole

    weight = joined([linear.weight for linear in linears])
    bias = joined([linear.bias for linear in linears]) if linears[0].bias is not None else None
    return Projection(names, weight, bias, norm, gated)
