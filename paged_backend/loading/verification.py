"""Verify at every load that a model gives the same logits with paged attention.

A forward pass of the unmodified model records the attention parameters of each layer (heads, head size, window) and the
masks that the model builds. Then two short prompts are prefilled in chunks and decoded over shuffled blocks, and their
logits are compared with those of the model's own eager attention. A model that fails is refused, and the error names
its class. A window longer than the prompts does not affect their logits, so windows are read from the masks and must
equal those that the layers pass to attention.

The verification runs the variant of the model that will serve requests. Layers that can be fused
(`fusion.py`) are so after the reference logits have been computed and before the paged forward passes. If the logits
differ, the model falls back to the next simpler variant with a warning, and it is only refused if the unmodified layers
fail, too. Verifying the unmodified layers first would double the load time without detecting more.

This covers keys and values in the model's own dtype. If the KV cache has another dtype, the same prompts also run over
such a cache, with a tolerance for 8-bit quantization.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.execution.batch import pack
from paged_backend.execution.forward import paged_logits
from paged_backend.execution.upload import DeviceUpload
from paged_backend.loading.attention_probe import AttentionProbe
from paged_backend.memory.kv_cache import NO_ATTENTION, KVCache, LayerShape
from paged_backend.memory.state_cache import StateCache
from paged_backend.models import recurrent, rope
from paged_backend.models.attention import ATTENTION, AttentionSpec, UnsupportedModel
from paged_backend.models.batch_invariance import check_invariance
from paged_backend.models.latent_attention import find_latent_layers
from paged_backend.models.model_variants import ModelVariant, model_variants
from paged_backend.models.pipeline import Stage
from paged_backend.models.quantization import Quantizer
from paged_backend.scheduling.plan import Chunk, Plan
from paged_backend.scheduling.sequence import Group, Sequence
from paged_backend.utils.startup import Progress
from paged_kernels.compile_ahead import compile_ahead

log = logging.getLogger("paged_llm")

PROBE = "paged_llm_probe"
# Root mean square of the difference, relative to that of the centered logits. Rounding errors of 16-bit dtypes grow
# with depth; a wrong window, scale or mask gives an error of the order of 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
# Tolerance for an 8-bit KV cache, for quantized weights, and for activations in 8 bits, likewise. With an 8-bit cache,
# the error of the demo model is 0.03 in int8 and 0.06 in fp8 (0.07 and 0.1 in bfloat16), that of random models of many
# families up to 0.3; 1 means unrelated. Many formats of quantized weights round activations to 8 bits as well, which
# amplifies the smallest differences (0.11 to 0.23 on the demo model with the int8 of bitsandbytes and torchao).
QUANTIZATION_TOLERANCE = 0.5
# Factor of TOLERANCE for quantized weights of files: the model's own weights are rounded to its data type, so they
# differ a little. On the demo model in bfloat16 with weights in AWQ the error is 0.08.
STORED_FACTOR = 3
# Tolerance for weights rounded to 4 bits, whose error is 0.6 on the demo model. It detects weights that are unrelated
# to the model's; the attention has been verified with the model's own weights by then.
INT4_TOLERANCE = 1.0


def verify_model(
    model: PreTrainedModel,
    *,
    block_size: int,
    kv_dtype: torch.dtype,
    quantizer: Quantizer | None = None,
    batch_invariant: bool = False,
) -> tuple[LayerShape, ...]:
    """Verify the model and return the KV cache shapes of its layers.

    Leaves the model in its fastest variant that passes: on paged attention, fused if possible, with
    quantized weights if there is a quantizer. Raises UnsupportedModel, with the name of the model's class, if no
    variant passes.
    """
    progress = Progress("verifying", 3)
    try:
        mixers = recurrent.recurrent_mixers(model)
        with recurrent.record_states(mixers) as states:
            layers, specs = _probe(model, mixers)
        progress.advance()
        expected = _expected(model)
        progress.advance()
        shapes = [states[index] for index in range(len(mixers))]
        recurrent.install(model, mixers, shapes, batch_invariant=batch_invariant)
        rope.freeze_rope(model)
        compare_layers = partial(_compare, model, expected)
        on_gpu = batch_invariant and model.device.type == "cuda"
        layers = _use_latents(
            model, layers, compare_layers, block_size, kv_dtype, batch_invariant=batch_invariant and not on_gpu
        )
        layers = tuple(replace(layer, batch_invariant=on_gpu) for layer in layers)
        failure: UnsupportedModel | None = None
        for variant in model_variants(model, specs, quantizer=quantizer, batch_invariant=batch_invariant):
            tolerance = _weight_tolerance(model, variant)
            compare = partial(_compare, model, expected, layers, block_size, kv_dtype, tolerance)
            failure = _failure(compare)
            if failure is None and batch_invariant and not variant.is_intermediate:
                run = partial(_paged_logits_of, model, layers, block_size, _prompts(model))
                failure = _failure(partial(check_invariance, model, run, {model.dtype, kv_dtype}))
            if variant.is_intermediate:
                if failure is not None:
                    raise failure
            elif failure is None:
                log.info("%s runs %s", type(model).__name__, variant.name)
                _release_unused(model, variant, compare)
                progress.advance()
                return layers
            else:
                log.warning("%s, %s: %s", type(model).__name__, variant.name, failure)
        assert failure is not None
        raise failure
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{type(model).__name__} cannot be served with paged attention: {error}") from error


def _use_latents(
    model: PreTrainedModel,
    layers: tuple[LayerShape, ...],
    compare: Callable[[tuple[LayerShape, ...], int, torch.dtype, float], None],
    block_size: int,
    kv_dtype: torch.dtype,
    *,
    batch_invariant: bool,
) -> tuple[LayerShape, ...]:
    """Make multi-head latent attention store latents, if its logits are right. Returns the KV cache shapes.

    Both forms of its attention are verified. The prompts are too short for the expanded one, so it is forced. With
    `batch_invariant` there is only the absorbed form.
    """
    latents = find_latent_layers(model)
    if latents is None:
        return layers
    tolerance = _weight_tolerance(model, ModelVariant("unmodified"))
    forms = [dict(batch_invariant=True)] if batch_invariant else [dict(min_expanded_rows=2), {}]
    for form in forms:
        shapes = latents.install(**form)
        if failure := _failure(partial(compare, shapes, block_size, kv_dtype, tolerance)):
            break
    else:
        return shapes
    latents.uninstall()
    log.warning("%s stores expanded keys and values; with latents: %s", type(model).__name__, failure)
    return layers


def _weight_tolerance(model: PreTrainedModel, variant: ModelVariant) -> float:
    if variant.weight_bits is not None:
        return QUANTIZATION_TOLERANCE if variant.weight_bits == 8 else INT4_TOLERANCE
    if variant.int8_rows or getattr(model.config, "quantization_config", None) is not None:
        return QUANTIZATION_TOLERANCE
    return TOLERANCE[model.dtype] * (STORED_FACTOR if variant.is_stored else 1)


def _failure(compare: Callable[[], None]) -> UnsupportedModel | None:
    try:
        compare()
    except UnsupportedModel as error:
        return error
    return None


def _release_unused(model: PreTrainedModel, variant: ModelVariant, compare: Callable[[], None]) -> None:
    """Free the weights that the variant does not use, unless the model needs them nevertheless.

    Some routers are linear layers that are never called; the model reads their weights.
    """
    restore = variant.release_unused(model)
    if variant.unused and (failure := _failure(compare)):
        restore()
        name = type(model).__name__
        log.warning("%s keeps the weights beside their copies, because without them: %s", name, failure)


@torch.inference_mode()
def _probe(model: PreTrainedModel, mixers: list[nn.Module]) -> tuple[tuple[LayerShape, ...], tuple[AttentionSpec, ...]]:
    """Return the KV cache shape of each layer, and the attention parameters of those with attention.

    mixers: the model's recurrent mixers.
    """
    probe = AttentionProbe()
    AttentionInterface.register(PROBE, probe.attend)
    AttentionMaskInterface.register(PROBE, probe.mask)
    model.set_attn_implementation(PROBE)
    ids = torch.zeros(1, 4, dtype=torch.int64, device=model.device)
    try:
        model(input_ids=ids, position_ids=torch.arange(4, device=model.device)[None], use_cache=False)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(f"its forward pass fails: {type(error).__name__}: {error}") from error
    layers = range(model.config.get_text_config().num_hidden_layers)
    _check_layers(model, layers, probe.shapes.keys(), mixers)
    if invalid := [window for window in probe.layer_windows if window is not None and window < 1]:
        raise UnsupportedModel(f"sliding_window={min(invalid)} in its configuration: must be at least 1")
    unused = frozenset() if Stage.of(model) is None else probe.mask_windows - probe.layer_windows  # by other stages
    if probe.layer_windows - {None} != probe.mask_windows - unused - {None}:
        raise UnsupportedModel(
            f"its masks have windows {_shown(probe.mask_windows)}, but its layers pass {_shown(probe.layer_windows)}"
        )
    shapes = tuple(probe.shapes.get(layer, NO_ATTENTION) for layer in layers)
    return shapes, tuple(probe.specs[layer] for layer in layers if layer in probe.specs)


def _check_layers(model: PreTrainedModel, layers: range, attention: Set[int], mixers: list[nn.Module]) -> None:
    """Raise UnsupportedModel unless every layer calls the attention interface, has a recurrent mixer or keeps nothing.

    attention: the indices of the layers that call the attention interface.
    """
    known = attention | {mixer.layer_idx for mixer in mixers}
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == len(layers))
    modules = next(lists, None)
    others = [layer for layer in layers if layer not in known]
    if modules is not None:
        others = [layer for layer in others if not recurrent.is_stateless(modules[layer])]
    if others or not attention <= set(layers):
        names = sorted({name for layer in others for name in _stateful_names(modules[layer])}) if modules else []
        raise UnsupportedModel(
            f"{len(attention)} of {len(layers)} layers call the attention interface; the others keep another state"
            + (f" ({', '.join(names)})" if names else "")
        )


def _stateful_names(layer: nn.Module) -> set[str]:
    """Return the classes of the modules in a layer that know its index, or else that of the layer."""
    inner = {
        type(module).__name__ for module in layer.modules() if module is not layer and hasattr(module, "layer_idx")
    }
    return inner or {type(layer).__name__}


def _shown(windows: set[int | None]) -> str:
    return ", ".join(str(window) for window in sorted(windows - {None}, key=int)) or "none"  # type: ignore[arg-type]


def _prompts(model: PreTrainedModel) -> tuple[list[int], list[int]]:
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(vocab, (2, 21), generator=torch.Generator().manual_seed(0)).tolist()
    return ids[0], ids[1][:10]


@torch.inference_mode()
def _expected(model: PreTrainedModel) -> list[Tensor]:
    """Return the logits of both prompts with eager attention. Leaves the model on paged attention."""
    model.set_attn_implementation("eager")
    expected = [_eager_logits(model, ids) for ids in _prompts(model)]
    if any(logits.isnan().any() for logits in expected):
        raise UnsupportedModel(f"its own logits contain NaN{_describe_non_finite(model)}")
    model.set_attn_implementation(ATTENTION)
    return expected


def _describe_non_finite(model: PreTrainedModel) -> str:
    """Return the end of an error message, with the first weight that is not finite."""
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not weight.float().isfinite().all():
            return f": {name} contains NaN or infinity"
    return ", although its weights are finite"


@torch.inference_mode()
def _compare(
    model: PreTrainedModel,
    expected: list[Tensor],
    layers: tuple[LayerShape, ...],
    block_size: int,
    kv_dtype: torch.dtype,
    weight_tolerance: float,
) -> None:
    """Raise UnsupportedModel if the paged logits differ from the expected ones."""
    bounds = {model.dtype: weight_tolerance}
    bounds |= {kv_dtype: max(weight_tolerance, QUANTIZATION_TOLERANCE)} if kv_dtype != model.dtype else {}
    for dtype, tolerance in bounds.items():
        run = partial(_paged_logits_of, model, layers, block_size, _prompts(model), dtype)
        try:
            compile_ahead(model.device, run)
            found = run()
        except UnsupportedModel:
            raise
        except Exception as error:
            raise UnsupportedModel(f"its paged forward pass fails: {type(error).__name__}: {error}") from error
        for (prompt, position), logits in found.items():
            difference = _relative_error(logits, expected[prompt][position])
            if not difference <= tolerance:
                stored = "" if dtype == model.dtype else f"with {dtype} keys and values (kv_cache_dtype), "
                raise UnsupportedModel(
                    f"{stored}logits at position {position} differ from its eager attention by {difference:.2g}"
                    f" (allowed: {tolerance:g})"
                )


def _eager_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:  # [len(ids), vocab]
    return model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]


def _relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double(), expected.double()
    found, expected = found - found.mean(), expected - expected.mean()
    return float((found - expected).norm() / expected.norm())


def _paged_logits_of(
    model: PreTrainedModel,
    layers: tuple[LayerShape, ...],
    block_size: int,
    prompts: tuple[list[int], list[int]],
    dtype: torch.dtype,
    most: int = 11,
) -> dict[tuple[int, int], Tensor]:
    """Return logits by (prompt, position): prompts in chunks of up to `most` tokens, then one decode. By default the
    long prompt takes two chunks, with the short one beside the first."""
    width = -(-len(prompts[0]) // block_size)
    kv = KVCache.allocate(layers, num_blocks=2 * width + 1, block_size=block_size, dtype=dtype, device=model.device)
    long, short = (_greedy_sequence(key, ids[:-1]) for key, ids in enumerate(prompts))
    long.blocks, short.blocks = list(range(2 * width, 0, -2)), list(range(1, 2 * width, 2))
    states = None
    if shapes := recurrent.state_shapes(model):
        states = StateCache.allocate(shapes, num_slots=3, device=model.device)
        long.state_slot, short.state_slot = 2, 1
    found: dict[tuple[int, int], Tensor] = {}
    stage = DeviceUpload(model.device)

    def step() -> None:
        lengths = [(seq, min(most, seq.pending)) for seq in (long, short) if seq.pending]
        chunks = tuple(
            Chunk(seq, seq.computed, n, sampled_sequences=(seq,) if n == seq.pending else ()) for seq, n in lengths
        )
        logits = iter(paged_logits(model, stage(pack(Plan(chunks), block_size=block_size)), kv, states))
        for chunk in chunks:
            chunk.sequence.computed += chunk.length
            if chunk.sampled_sequences:
                found[chunk.sequence.key, chunk.sequence.computed - 1] = next(logits)

    while long.pending:
        step()
    for sequence in (long, short):
        sequence.tokens.append(prompts[sequence.key][-1])
    step()
    return found


def _greedy_sequence(key: int, ids: list[int]) -> Sequence:
    return Group(GenerateRequest(key, tuple(ids), SamplingParams(temperature=0.0), 0, frozenset())).leader
