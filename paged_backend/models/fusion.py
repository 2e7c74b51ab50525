"""Builds fused decoders, which run the operations between two attention calls in few kernel launches.

    transformers                                   fused
    norm, q_proj, k_proj, v_proj                   norm_project: add + norm, one projection
    rotate, write, attend                          rope_kv_write, attend_pages
    o_proj                                         o_proj
    add, norm, gate, up, silu, mul, down           norm_project with SwiGLU, down
    add, norm, mixture of experts                  add_rms_norm, then the module of the model
    add                                            in the next layer's norm_project, or in the norm after the last

Projections of the same input are joined into one weight, and the model's own parameters become views of it. Memory use
does not grow, and the original decoder stays intact: removing the fused `forward` restores it.

`fusible.py` lists the families with this layer structure, and checks that every layer is unmodified (no other modules,
parameters or hooks; plain Linear and Parameter). The attention parameters are what the layer passed to attention in a
probe. The verification at load (`verification.py`) compares the fused model with the model's own eager attention and so
detects whatever these checks miss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_backend.models import rope
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
    projections_by_name,
)
from paged_backend.models.few_rows import FewRowsWeight, Measure, choose_max_rows, launch_once
from paged_backend.models.fusible import (
    DOWN,
    FAMILIES,
    GATE_UP,
    OUTPUT,
    QKV,
    find_family,
    find_obstacle,
    has_experts,
    has_own_rotary,
    latent_projections,
)
from paged_backend.models.linear import Weight
from paged_backend.models.pipeline import StageOutput
from paged_backend.models.rotary_table import Angles, Rotation, look_up_angles
from paged_kernels.compilation import compile_ahead

log = logging.getLogger("paged_llm")


@dataclass(frozen=True, eq=False)
class FusedModel:
    """A model that runs a fused decoder until `uninstall`."""

    model: PreTrainedModel
    decoder: FusedDecoder  # with the model's unconverted weights

    def install(self, convert: Callable[[Tensor], Weight] = lambda weight: weight) -> None:
        """Make the model run the fused decoder on converted weights."""
        self.model.model.forward = self.decoder.with_weights(lambda weight, _: convert(weight))

    def install_few_rows(self, measure: Measure) -> bool:
        """Make the model run the fused decoder with `few_rows_linear`, for each projection up to the number of rows for
        which it is faster. Returns whether it is for any."""
        groups = [(group, _measured(group[0])) for group in projections_by_name(self.decoder.layers).values()]

        def launch_all() -> None:
            for group, run in groups:
                launch_once(group[0].weight, run)

        compile_ahead(self.model.device, launch_all)
        max_rows = {
            group[0].names: choose_max_rows([one.weight for one in group], run, measure) for group, run in groups
        }
        log.info("rows up to which projections take one launch: %s", {names[0]: n for names, n in max_rows.items()})

        def convert(weight: Tensor, names: Sequence[str]) -> Weight:
            rows = max_rows[tuple(names)]
            return FewRowsWeight(weight, rows) if rows else weight

        self.model.model.forward = self.decoder.with_weights(convert)
        return any(max_rows.values())

    def uninstall(self) -> None:
        """Restore the model's own decoder."""
        vars(self.model.model).pop("forward", None)


def _measured(projection: Projection) -> Callable[[Tensor, Weight], Any]:
    """Return what is measured of a projection: a function of its input and a weight."""

    def run(x: Tensor, weight: Weight) -> Any:
        one = replace(projection, weight=weight)
        return one(x) if one.norm is None else one.add(x, x)

    return run


@torch.no_grad()
def fuse(model: PreTrainedModel, specs: Sequence[AttentionSpec]) -> FusedModel | str:
    """Replace the model's decoder by a fused one. Returns the reason, and changes nothing, if that is not possible.

    `specs` are the attention parameters by layer.
    """
    if reason := find_obstacle(model):
        return reason
    decoder = model.model
    family = find_family(decoder)
    assert family is not None
    fused = FusedDecoder(
        decoder,
        _angles(model, family),
        tuple(_fuse_layer(layer, spec, family) for layer, spec in zip(decoder.layers, specs, strict=True)),
        None if isinstance(decoder.norm, StageOutput) else _norm(decoder.norm),
    )
    decoder.forward = fused
    return FusedModel(model, fused)


def _angles(model: PreTrainedModel, family: str) -> Callable[[Tensor, Tensor], Angles]:
    rotary = model.model.rotary_emb
    if not has_own_rotary(model.model, family):
        return rotary
    positions, _ = rope.max_static_len(model.config.get_text_config())
    hidden = next(model.model.layers.parameters()).data.new_empty(0, dtype=model.dtype)
    return look_up_angles(rotary, positions, hidden, FAMILIES[family].convert_angles)


def _fuse_layer(layer: nn.Module, spec: AttentionSpec, family: str) -> FusedLayer:
    mlp_norm = _norm(layer.post_attention_layernorm)
    rotation_of = FAMILIES[family].rotation_of
    return FusedLayer(
        _fuse_latents(layer, spec, rotation_of(layer.self_attn)) if rotation_of else _fuse_heads(layer, spec),
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


def _fuse_latents(layer: Any, spec: AttentionSpec, rotation: Rotation) -> FusedLatents:
    attention = layer.self_attn
    query_kv, *query = latent_projections(dict(layer.named_modules()).keys())
    return FusedLatents(
        module=attention,
        spec=spec,
        attend=attention.attend_pages,
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
