"""Verify at every load that a model gives the same logits with paged attention.

A forward pass of the unmodified model records the attention parameters of each layer (heads, head size, window) and the
masks that the model builds; the windows of both must be equal. Then the engine computes two short prompts over shuffled
blocks, in chunks and with a decode step. It compares their logits with the model's own, from eager attention. A
model that fails is refused, and the error names its class.

Two questions are separate:

- Is the computation right? A copy with one layer of each kind, with their own weights but short windows, is verified in
  float32, where rounding errors are small, and in the model's data type, where few layers amplify little (`Proof`).
- Does the whole model work in its data type? How far correct logits differ depends on the model: large activations
  amplify rounding errors. With Qwen2.5-Coder-0.5B in bfloat16, eager attention and SDPA of transformers differ by 0.3.
  So the model also runs with the output of each of its modules changed by one unit in the last place, and logits may
  differ by a few times as much as that changes them. One of the prompts is text, for which trained models amplify
  rounding errors less than for random tokens. Activations must stay away from the end of float16.

The verification runs the variant of the model that will serve requests (`model_variants.py`), after the reference
logits. If the logits differ, the model falls back to the next simpler variant with a warning, and it is only refused if
the unmodified layers fail, too. Verifying the unmodified layers first would double the load time without detecting
more.

This covers keys and values in the model's own dtype. If the KV cache has another dtype, the same prompts also run over
such a cache, with a tolerance for 8-bit quantization.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.execution.batch import consecutive_page_tables, consecutive_pages, pack
from paged_backend.execution.runner import paged_logits
from paged_backend.execution.upload import DeviceUpload
from paged_backend.kv import sequence
from paged_backend.kv.cache import CacheLayout, KVCache, LayerShape
from paged_backend.loading.attention_probe import Probed, find_key_channels, probe_layers
from paged_backend.loading.earlier_starts import EarlierStarts, Outcome, OutdatedOutcome
from paged_backend.loading.shallow_copy import WINDOW, layer_modules, representative_layers, shallow_copy
from paged_backend.models import recurrent, rope
from paged_backend.models.attention import ATTENTION, UnsupportedModel, scale_channels
from paged_backend.models.batch_invariance import check_invariance
from paged_backend.models.latent_attention import find_latent_layers
from paged_backend.models.model_variants import ModelVariant, model_variants
from paged_backend.models.overrides import Overrides, use
from paged_backend.models.quantization import Quantizer
from paged_backend.scheduling.group import Group
from paged_backend.scheduling.plan import Chunk, Plan
from paged_backend.utils.startup import Progress, startup_log
from paged_kernels import packed_blocks
from paged_kernels.compilation import compile_ahead
from paged_kernels.layer_cache import INT4, QUANTIZED

log = logging.getLogger("paged_llm")

LONG, SHORT = 21, 10  # tokens of the prompts
MEASURED = 6  # positions at the end of each prompt whose logits are computed
LONG_INT4 = 2 * packed_blocks.BLOCK_SIZE + MEASURED  # of the long prompt, so that its last tokens read a packed block
# Largest error of the logits of a position: the norm of the difference, divided by the norm of the logits after their
# mean is subtracted. A wrong window, scale or mask gives an error of the order of 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
# Logits may differ by this many times the change that one unit in the last place makes, if that exceeds TOLERANCE. The
# worst position differs by up to 3 times the root mean square over all positions.
SENSITIVITY_FACTOR = 3
SENSITIVE_TOLERANCE = 0.5  # tolerance for a sensitive model; 1.4 means unrelated
# Tolerance for an 8-bit KV cache, for quantized weights, and for activations in 8 bits; 1 means unrelated. With an
# 8-bit cache, the error of the demo model is 0.03 in int8 and 0.06 in fp8 (0.07 and 0.1 in bfloat16). Random models of
# many families have errors up to 0.3. Many formats of quantized weights round activations to 8 bits as well, which
# amplifies the smallest differences (0.11 to 0.23 on the demo model with the int8 of bitsandbytes and torchao).
QUANTIZATION_TOLERANCE = 0.5
# Factor of TOLERANCE for quantized weights of files: the model's own weights are rounded to its data type, so they
# differ a little. On the demo model in bfloat16 with weights in AWQ the error is 0.08.
STORED_FACTOR = 3
# Tolerance for weights rounded to 4 bits, whose error is 0.6 on the demo model. It detects weights that are unrelated
# to the model's; the attention has been verified with the model's own weights by then.
INT4_TOLERANCE = 1.0
# Part of the range of float16 that activations may use. The rest is for prompts with larger ones. SmolLM2-135M works in
# float16 and reaches 23,000.
USED_RANGE = 0.5


class Options(NamedTuple):
    """How the paged forward passes run."""

    block_size: int
    kv_dtype: torch.dtype
    batch_invariant: bool


def verify_model(
    model: PreTrainedModel,
    *,
    block_size: int,
    kv_dtype: torch.dtype,
    text: Sequence[int] = (),
    quantizer: Quantizer | None = None,
    batch_invariant: bool = False,
    trained_dtype: torch.dtype | None = None,
    skip: bool = False,
    earlier: EarlierStarts | None = None,
) -> tuple[LayerShape, ...]:
    """Verify the model and return the KV cache shapes of its layers.

    text: token ids for one of the prompts. trained_dtype: data type of the checkpoint; a model that runs in the type it
    was trained in is not refused for its range. earlier: outcomes of earlier verifications. If it has one for this
    start, nothing is compared; if that outcome does not fit the model, OutdatedOutcome is raised and the model cannot
    be used.

    Makes the model run its fastest variant that passes: on paged attention, fused if possible, with
    quantized weights if there is a quantizer. Raises UnsupportedModel, with the name of the model's class, if no
    variant passes. With `skip` a variant passes if it computes finite logits.
    """
    outcome = earlier.find() if earlier else None
    progress = Progress("verifying", 1 if outcome else 7)
    options = Options(block_size, kv_dtype, batch_invariant)
    name = type(model).__name__
    try:
        probed = probe_layers(model)
        if kv_dtype in QUANTIZED:
            find_key_channels(model)
        if outcome:
            layers = _restore(model, probed, outcome, options, quantizer)
            progress.advance()
            return layers
        progress.advance()
        proof = None if skip else Proof(model, probed.layers, options)
        progress.advance()
        prompts = _prompts(model, text, kv_dtype)
        if skip:
            expected = Expected(prompts)
            progress.advance(4)
        else:
            with _range_checked(model, trained_dtype):
                expected = _expect(model, prompts, progress.advance)
        layers, base = _paged(model, probed, options, partial(_latent_failure, model, expected, options))
        rejected: list[tuple[UnsupportedModel, float | None]] = []  # with the seconds of a forward pass
        for variant in model_variants(model, base, probed.specs, quantizer, batch_invariant=batch_invariant):
            use(model, variant.overrides)
            run = partial(_paged_logits_of, model, layers, block_size, expected.prompts)
            compare = partial(_compare, model, expected, layers, options, _weight_tolerance(model, variant))
            try:
                if proof:
                    proof.check(variant)
                difference = compare()
                if batch_invariant and not (variant.is_intermediate or skip):
                    check_invariance(model, run, {model.dtype, kv_dtype})
            except UnsupportedModel as error:
                prefix = "" if variant.name == "unmodified" else f"{variant.name}: "
                rejected.append((UnsupportedModel(f"{prefix}{error}"), _seconds(run, model.dtype)))
                if variant.is_intermediate:
                    break
                continue
            if variant.is_intermediate:
                continue
            progress.advance()
            details = f" (its logits {difference})" if difference else ""
            log.info("%s runs %s%s", name, _describe(variant), details)
            _report_slower(variant)
            if skip:
                log.warning("skip_verification=true: the logits of %s were not compared with anything", name)
            if rejected:
                _warn_of_slower(name, variant, rejected, _seconds(run, model.dtype))
            failure = _release_unused(model, variant, compare)
            if failure:
                log.warning("%s keeps the weights beside their copies, because without them: %s", name, failure)
            if earlier and not rejected and not variant.lacks_memory:  # another start may find a faster variant
                earlier.keep(Outcome(variant.name, any(layer.latent for layer in layers), failure is not None))
            return layers
        raise rejected[-1][0]
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name} cannot be served with paged attention: {error}") from error


def _seconds(run: Callable[[torch.dtype], Any], dtype: torch.dtype) -> float | None:
    """Return the seconds of the second of two calls; None if a call fails."""
    try:
        for _ in range(2):
            started = time.perf_counter()
            run(dtype)
    except Exception:  # a variant that is rejected
        return None
    return time.perf_counter() - started


def _restore(
    model: PreTrainedModel,
    probed: Probed,
    outcome: Outcome,
    options: Options,
    quantizer: Quantizer | None,
) -> tuple[LayerShape, ...]:
    """Make a model run the variant that an earlier verification found. Raises OutdatedOutcome."""
    name = type(model).__name__
    wrong = None if outcome.latents else UnsupportedModel(f"see the log of the start of {outcome.date}")
    layers, base = _paged(model, probed, options, lambda shapes: wrong)
    variants = model_variants(model, base, probed.specs, quantizer, batch_invariant=options.batch_invariant)
    variant = next(
        (candidate for candidate in variants if candidate.name == outcome.variant and not candidate.is_intermediate),
        None,
    )
    if variant is None or any(layer.latent for layer in layers) != outcome.latents:
        raise OutdatedOutcome(f"{name} has no variant {outcome.variant!r}")
    use(model, variant.overrides)
    if not outcome.keeps_unused:
        variant.release_unused(model)
    log.info("%s runs %s, as verified at the start of %s", name, _describe(variant), outcome.date)
    _report_slower(variant)
    startup_log.info("Verification: not repeated, because the start of %s was like this one", outcome.date)
    return layers


def _describe(variant: ModelVariant) -> str:
    return variant.name if variant.obstacle is None else f"{variant.name}, because {variant.obstacle}"


def _report_slower(variant: ModelVariant) -> None:
    """Tell the user that a slower variant runs, because the layers cannot be fused."""
    if variant.obstacle is not None:
        startup_log.info("Layers: not fused, which is slower, because %s", variant.obstacle)


def _warn_of_slower(
    name: str, variant: ModelVariant, rejected: list[tuple[UnsupportedModel, float | None]], seconds: float | None
) -> None:
    fastest = rejected[0][1]
    cost = f", {seconds / fastest:.1f} times as long for a short prompt" if seconds and fastest else ""
    errors = "; ".join(str(error) for error, _ in rejected)
    log.warning("%s runs %s instead of a faster variant%s. Rejected: %s", name, variant.name, cost, errors)


class Difference(NamedTuple):
    """How much logits differ, and how much they may."""

    found: float
    allowed: float

    def __str__(self) -> str:
        return f"differ from its eager attention by {self.found:.2g} (allowed: {self.allowed:.2g})"


class Proof:
    """Verifies variants of a copy with one layer of each kind.

    In float32 a mistake cannot hide behind rounding errors, and in the model's own data type few layers amplify little.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[LayerShape], options: Options) -> None:
        """model: the model, still unmodified. layers: what each of its layers keeps in the KV cache."""
        self._options = options
        self._known: dict[str, UnsupportedModel | None] = {}  # why a variant is wrong, by its name
        self._dtypes: list[torch.dtype] = []
        modules = layer_modules(model)
        if modules is None:
            return
        self._indices = indices = representative_layers(model, layers)
        self._classes = [type(modules[index]).__name__ for index in indices]
        self._dtypes = list(dict.fromkeys((torch.float32, model.dtype)))
        if any("forward" in vars(module) for module in model.modules()):  # of transformers, on the model's own weights
            self._dtypes = [model.dtype]
        if len(indices) == len(layers) and all((layer.window or 0) <= WINDOW for layer in layers):
            self._dtypes.remove(model.dtype)  # the whole model is verified in it anyway
        if self._dtypes:
            try:
                self._model = shallow_copy(model, indices, model.dtype)
            except torch.OutOfMemoryError:
                self._give_up()

    def check(self, variant: ModelVariant) -> None:
        """Raise UnsupportedModel if the first layers are wrong in a variant.

        Quantized layers are verified with the model's own weights, and packed ones too where packing is not faster.
        """
        name = variant.layers if variant.is_quantized else variant.name
        if name not in self._known:
            try:
                failures = (self._failure({name, variant.layers}, dtype) for dtype in self._dtypes)
                self._known[name] = next(filter(None, failures), None)
            except torch.OutOfMemoryError:
                self._give_up()
                self._known[name] = None
        if failure := self._known[name]:
            raise failure

    def _give_up(self) -> None:
        count = len(self._classes)
        log.warning("only the whole model is verified: not enough memory for a copy of %d layers in float32", count)
        self._dtypes = []

    def _failure(self, names: Set[str], dtype: torch.dtype) -> UnsupportedModel | None:
        """Return why the first variant with one of these names is wrong in a data type, and in which layer; None if
        it is right, or if there is no such variant."""
        failure = self._failure_of(names, dtype, len(self._classes))
        if failure is None:
            return None
        depth = len(self._classes)
        shallower = ((fewer, self._failure_of(names, dtype, fewer)) for fewer in range(1, depth))
        depth, failure = next((found for found in shallower if found[1]), (depth, failure))
        layer = f"layer {self._indices[depth - 1]} ({self._classes[depth - 1]})"
        return UnsupportedModel(f"{layer} in {str(dtype).removeprefix('torch.')}: {failure}")

    def _failure_of(self, names: Set[str], dtype: torch.dtype, depth: int) -> UnsupportedModel | None:
        model = shallow_copy(self._model, range(depth), dtype)
        probed = probe_layers(model)
        if dtype in QUANTIZED:
            find_key_channels(model)
        expected = _expect(model, _prompts(model, ()), lambda: None)
        options = self._options._replace(kv_dtype=dtype)
        layers, base = _paged(model, probed, options, partial(_latent_failure, model, expected, options))
        for variant in model_variants(model, base, probed.specs, None, batch_invariant=options.batch_invariant):
            if variant.name in names:
                use(model, variant.overrides)
                tolerance = _weight_tolerance(model, variant)
                return _failure(partial(_compare, model, expected, layers, options, tolerance))
        return None


def _paged(
    model: PreTrainedModel,
    probed: Probed,
    options: Options,
    fails: Callable[[tuple[LayerShape, ...]], UnsupportedModel | None],
) -> tuple[tuple[LayerShape, ...], Overrides]:
    """Make a model call paged attention. Returns the KV cache shapes of its layers, and the overrides for that.

    fails: returns why logits are wrong with a cache of latents; None if they are right.
    """
    model.set_attn_implementation(ATTENTION)
    rope.freeze_rope(model)
    mixers = recurrent.over_packed_batches(model, probed.mixers, probed.states, batch_invariant=options.batch_invariant)
    layers, latents = _latents(model, mixers, probed.layers, options, fails)
    on_gpu = options.batch_invariant and model.device.type == "cuda"
    return tuple(replace(layer, batch_invariant=on_gpu) for layer in layers), mixers | latents


def _latents(
    model: PreTrainedModel,
    mixers: Overrides,
    layers: tuple[LayerShape, ...],
    options: Options,
    fails: Callable[[tuple[LayerShape, ...]], UnsupportedModel | None],
) -> tuple[tuple[LayerShape, ...], Overrides]:
    """Make multi-head latent attention store latents, if its logits are right. Returns the same as `_paged`.

    Both forms of its attention are verified. The prompts are too short for the expanded one, so it is forced. On a CPU
    with `batch_invariant` there is only the absorbed form.
    """
    latents = find_latent_layers(model)
    if latents is None:
        return layers, {}
    is_absorbed = options.batch_invariant and model.device.type != "cuda"
    forms = [dict(batch_invariant=True)] if is_absorbed else [dict(min_expanded_rows=2), {}]
    for form in forms:
        overrides = latents.over_latents(**form)
        use(model, mixers | overrides)
        if failure := fails(latents.shapes):
            log.warning("%s stores expanded keys and values; with latents: %s", type(model).__name__, failure)
            return layers, {}
    return latents.shapes, overrides


def _latent_failure(
    model: PreTrainedModel, expected: Expected, options: Options, shapes: tuple[LayerShape, ...]
) -> UnsupportedModel | None:
    tolerance = _weight_tolerance(model, ModelVariant("unmodified", {}))
    return _failure(partial(_compare, model, expected, shapes, options, tolerance))


def _weight_tolerance(model: PreTrainedModel, variant: ModelVariant) -> float:
    if variant.weight_bits is not None:
        return QUANTIZATION_TOLERANCE if variant.weight_bits == 8 else INT4_TOLERANCE
    if variant.int8_rows or getattr(model.config, "quantization_config", None) is not None:
        return QUANTIZATION_TOLERANCE
    return TOLERANCE[model.dtype] * (STORED_FACTOR if variant.is_stored else 1)


def _failure(compare: Callable[[], Any]) -> UnsupportedModel | None:
    try:
        compare()
    except UnsupportedModel as error:
        return error
    return None


def _release_unused(
    model: PreTrainedModel, variant: ModelVariant, compare: Callable[[], Any]
) -> UnsupportedModel | None:
    """Free the weights that the variant does not use, unless the model needs them nevertheless. Returns why it needs
    them.

    Some routers are linear layers that are never called; the model reads their weights.
    """
    restore = variant.release_unused(model)
    failure = _failure(compare) if variant.unused else None
    if failure:
        restore()
    return failure


class Expected(NamedTuple):
    """What the paged logits are compared with."""

    prompts: tuple[list[int], list[int]]
    logits: Sequence[Tensor] = ()  # last positions of each prompt, [MEASURED, vocab]; empty: any finite logits pass
    sensitivity: Sequence[float] = ()  # by prompt: relative change of its logits by one unit in the last place


def _prompts(
    model: PreTrainedModel, text: Sequence[int], kv_dtype: torch.dtype | None = None
) -> tuple[list[int], list[int]]:
    """Return a long prompt, of text if there is enough, and a short one of random tokens."""
    config = model.config.get_text_config()
    length = min(LONG_INT4, getattr(config, "max_position_embeddings", LONG_INT4)) if kv_dtype == INT4 else LONG
    ids = torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0)).tolist()
    known = [token for token in text if token < config.vocab_size]
    return [*islice(cycle(known), length)] if len(known) >= LONG else ids[0], ids[1][:SHORT]


@torch.inference_mode()
def _expect(model: PreTrainedModel, prompts: tuple[list[int], list[int]], advance: Callable[[], None]) -> Expected:
    """Compute the logits of both prompts with eager attention. advance: called after each of four forward passes."""

    def compute(ids: list[int]) -> Tensor:
        logits = _eager_logits(model, ids)
        advance()
        return logits

    model.set_attn_implementation("eager")
    logits = [compute(ids) for ids in prompts]
    if any(prompt_logits.isnan().any() for prompt_logits in logits):
        raise UnsupportedModel(f"its own logits contain NaN{_describe_non_finite(model)}")
    with _rounded_differently(model):
        others = [compute(ids) for ids in prompts]
    changes = [
        [_relative_error(*rows) for rows in zip(changed, original, strict=True)]
        for changed, original in zip(others, logits, strict=True)
    ]
    return Expected(prompts, logits, [math.sqrt(sum(x * x for x in change) / len(change)) for change in changes])


@contextmanager
def _rounded_differently(model: PreTrainedModel) -> Iterator[None]:
    """Inside the context, change the output of each operation that is a module by one unit in the last place, up or
    down."""
    generator = torch.Generator().manual_seed(0)

    def change(states: Tensor) -> Tensor:
        signs = torch.randint(0, 2, states.shape, generator=generator, dtype=torch.int8).to(states.device) * 2 - 1
        wide = torch.float32 if states.dtype.itemsize == 2 else torch.float64
        return (states * (1 + signs.to(wide) * torch.finfo(states.dtype).eps)).to(states.dtype)

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        return change(output) if isinstance(output, Tensor) and output.is_floating_point() else output

    with _hooked([module for module in model.modules() if not next(module.children(), None)], hook):
        yield


@contextmanager
def _hooked(modules: Iterable[nn.Module], hook: Callable[[nn.Module, Any, Any], Any]) -> Iterator[None]:
    """Call a forward hook of modules inside the context."""
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _range_checked(model: PreTrainedModel, trained_dtype: torch.dtype | None) -> Iterator[None]:
    """Raise UnsupportedModel if the model runs in float16, has been trained in another data type, and an output of a
    module inside the context uses more than USED_RANGE of float16. This error replaces the one about NaN logits."""
    if model.dtype != torch.float16 or trained_dtype == torch.float16:
        yield
        return
    names = {module: name for name, module in model.named_modules() if name}
    largest: dict[str, float] = {}  # absolute value by module, in the order in which they first run

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if isinstance(states, Tensor) and states.dtype == torch.float16:
            value = float(states.abs().nan_to_num(math.inf, math.inf).max())
            largest[names[module]] = max(largest.get(names[module], 0.0), value)

    try:
        with _hooked(names, record):
            yield
    except UnsupportedModel:
        _check_range(largest)
        raise
    _check_range(largest)


def _check_range(largest: Mapping[str, float]) -> None:
    """Raise UnsupportedModel if the outputs of modules use too much of float16. Names the first module beyond its end,
    or else the module with the largest output. largest: largest absolute value by module."""
    limit = torch.finfo(torch.float16).max
    beyond = (name for name, value in largest.items() if value > limit)
    name = next(beyond, max(largest, key=lambda name: largest[name]))
    if largest[name] > limit * USED_RANGE:
        raise UnsupportedModel(
            f"dtype=float16: {name} computes numbers of up to {largest[name]:,.0f}, and float16 ends at {limit:,.0f}"
            " (others of them may be larger); use dtype=bfloat16 or dtype=float32"
        )


def _describe_non_finite(model: PreTrainedModel) -> str:
    """Return the end of an error message, with the first weight that is not finite."""
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not weight.float().isfinite().all():
            return f": {name} contains NaN or infinity"
    return ", although its weights are finite"


@torch.inference_mode()
def _compare(
    model: PreTrainedModel,
    expected: Expected,
    layers: tuple[LayerShape, ...],
    options: Options,
    weight_tolerance: float,
) -> Difference | None:
    """Return the largest difference of paged logits from the expected ones, relative to the allowed difference; None if
    no logits are expected. Raises UnsupportedModel if a difference is larger than allowed."""
    differences = []
    bounds = {model.dtype: weight_tolerance}
    if options.kv_dtype != model.dtype:
        bounds[options.kv_dtype] = max(weight_tolerance, QUANTIZATION_TOLERANCE)
    for dtype, tolerance in bounds.items():
        run = partial(_paged_logits_of, model, layers, options.block_size, expected.prompts, dtype)
        try:
            compile_ahead(model.device, run)
            computed = run()
        except UnsupportedModel:
            raise
        except Exception as error:
            raise UnsupportedModel(f"its paged forward pass fails: {type(error).__name__}: {error}") from error
        stored = "" if dtype == model.dtype else f"with {dtype} keys and values (kv_cache_dtype), "
        for (prompt, position), logits in computed.items():
            if not expected.logits:
                if not logits.isfinite().all():
                    raise UnsupportedModel(f"{stored}logits at position {position} are not finite")
                continue
            difference = Difference(
                _relative_error(logits, expected.logits[prompt][position - len(expected.prompts[prompt])]),
                max(tolerance, min(SENSITIVE_TOLERANCE, SENSITIVITY_FACTOR * expected.sensitivity[prompt])),
            )
            if not difference.found <= difference.allowed:
                raise UnsupportedModel(f"{stored}logits at position {position} {difference}")
            if dtype == model.dtype:
                differences.append(difference)
    return max(differences, key=lambda difference: difference.found / difference.allowed, default=None)


def _eager_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:  # [MEASURED, vocab], at the last positions
    ids_tensor = torch.tensor([ids], device=model.device)
    logits: Tensor = model(input_ids=ids_tensor, use_cache=False, logits_to_keep=MEASURED).logits[0]
    return logits[-MEASURED:]  # a model without the parameter returns all


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    actual, expected = actual - actual.mean(), expected - expected.mean()
    return float((actual - expected).norm() / expected.norm())


def _paged_logits_of(
    model: PreTrainedModel,
    layers: tuple[LayerShape, ...],
    block_size: int,
    prompts: tuple[list[int], list[int]],
    dtype: torch.dtype,
    most: int = 11,
) -> dict[tuple[int, int], Tensor]:
    """Return logits by (prompt, position). They are computed with prompts in chunks of up to `most` tokens, then one
    decode step. By default the long prompt takes two chunks; the short one runs beside the first of them."""
    width = -(-len(prompts[0]) // block_size)
    layout = CacheLayout.of(layers, block_size, dtype, states=recurrent.state_shapes(model))
    state = layout.blocks.kinds[-1].pages if layout.states else 0  # pages of a sequence's states
    pages = layout.blocks.token_pages  # of a block
    kv = KVCache.allocate(layout, (2 * width + 1) * pages + 2 * state, model.device)
    scale_channels(model, kv)
    long, short = (_greedy_sequence(key, ids[:-1]) for key, ids in enumerate(prompts))
    long.tables, short.tables = [list(range(2 * width, 0, -2))], [list(range(1, 2 * width, 2))]
    for number, seq in enumerate((long, short) if state else ()):
        seq.tables.append([(2 * width + 1) * pages + number * state])
    page_tables, state_pages = consecutive_page_tables(pages), consecutive_pages(state) if state else None
    logits_at: dict[tuple[int, int], Tensor] = {}
    stage = DeviceUpload(model.device)

    def step() -> None:
        lengths = [(seq, min(most, seq.pending)) for seq in (long, short) if seq.pending]
        chunks = tuple(
            Chunk(seq, seq.computed, n, sampled_sequences=(seq,) if n == seq.pending else ()) for seq, n in lengths
        )
        batch = stage(pack(Plan(chunks), block_size=block_size, page_tables=page_tables, state_pages=state_pages))
        logits = iter(paged_logits(model, batch, kv))
        for chunk in chunks:
            chunk.sequence.computed += chunk.length
            if chunk.sampled_sequences:
                logits_at[chunk.sequence.key, chunk.sequence.computed - 1] = next(logits)

    while long.pending:
        step()
    for seq in (long, short):
        seq.tokens.append(prompts[seq.key][-1])
    step()
    return logits_at


def _greedy_sequence(key: int, ids: list[int]) -> sequence.Sequence:
    return Group(GenerateRequest(key, tuple(ids), SamplingParams(temperature=0.0), 0, frozenset())).leader
