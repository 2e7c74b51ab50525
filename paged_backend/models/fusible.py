"""Which models have fused layers: the families, and the checks that a layer is an unmodified one of its family.

A fused layer uses the parameters of the modules in its place, so they must be those that transformers creates. Modules
that it calls, such as mixtures of experts, run their own forward, and may hold anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from paged_backend.models.latent_attention import LatentAttention
from paged_backend.models.linear import has_custom_forward
from paged_backend.models.pipeline import StageOutput
from paged_backend.models.rotary_table import Angles, Rotation, for_both_halves, of_complex


class Family(NamedTuple):
    """A family of transformers. Its classes are transformers.models.NAME.modeling_NAME.<prefix><kind>."""

    prefix: str
    experts: str | None = None  # kind of the module of a mixture of experts
    has_sinks: bool = False  # whether attention has sinks
    rotation_of: Callable[[Any], Rotation] | None = None  # of an attention module over latents
    convert_angles: Callable[[Any], Angles] | None = None  # of what the rotary embedding returns, if not angles


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
    kinds: dict[str, str]  # classes of the others
    called: Set[str]  # modules that it calls
    unused: Set[str]  # modules whose weights attention has absorbed

    @property
    def linears(self) -> Set[str]:
        return {name for names in self.joined for name in names}

    def owns(self, name: str) -> bool:
        """Return whether a module or parameter is the layer's, and not inside of another one."""
        return name not in self.unused and not any(name.startswith(f"{one}.") for one in self.called | self.unused)


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


def find_obstacle(model: PreTrainedModel) -> str | None:
    """Return why the model cannot be fused, or None if it can."""
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
        if reason := next(_differences(layer, family, index, model), None):
            return f"layer {index}: {reason}"
    return None


def _differences(layer: nn.Module, family: str, index: int, model: PreTrainedModel) -> Iterator[str]:
    """Yield how a layer differs from an unmodified one of its family."""
    structure = _structure(layer, family)
    if structure.unused and not isinstance(vars(layer.self_attn).get("attend_pages"), LatentAttention):
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
    """Return the structure that a layer of this family has, with the optional parts of this one."""
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

    The first one is joined with that of latents and shared keys. With low-rank queries, the second one expands them.
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
    """others: names of parameters besides those of linear layers and norms."""
    parameters = {name: one for name, one in layer.named_parameters() if structure.owns(name)}
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
