"""Batch invariance: the result of a row of a model does not depend on the other rows of a step.

PyTorch chooses how to add products by the number of rows.

On a CPU, the C++ kernels therefore compute every matrix product of a model, always adding in one order. Linear layers
and experts are converted as usual (`linear.py`, `experts.py`). This module converts the weights of modules that
multiply by themselves, such as routers. PyTorch computes the rest on one thread, each row by itself. `check_invariance`
verifies the result when a model is loaded.

On a GPU, `invariant_linear` computes every linear layer in place of cuBLAS. Between linear layers and attention, a
fused model runs kernels of this project, which compute each row by itself. Modules of transformers and of other
libraries run PyTorch's kernels, which choose the order of a sum or a product by the number of rows. A model with such
modules is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from paged_backend.models.attention import UnsupportedModel
from paged_backend.models.decoder import FusedDecoder, FusedExperts, FusedLatents
from paged_backend.models.linear import Weight, convert_linears, project
from paged_backend.models.overrides import Overrides, has_custom_forward
from paged_backend.models.recurrent import recurrent_mixers
from paged_kernels.cpu import native
from paged_kernels.ops import invariant_linear

REASON = "batch_invariant=true: not supported on a GPU: {}; leave it out, or run the model on a CPU"

# Operators of PyTorch whose order of additions depends on the number of rows.
PRODUCTS = frozenset(
    "addbmm addmm addmm_ addmv addr baddbmm bmm convolution dot linear matmul mkldnn_convolution mm mv _grouped_mm"
    " _linear_pointwise _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math".split()
)
CASTS = frozenset((Tensor.float, Tensor.to, Tensor.type, Tensor.type_as))


class ConvertedParameter(nn.Parameter):
    """A weight [out_features, in_features] that `F.linear` multiplies in converted form, for modules that multiply by
    themselves. Their `forward` also does other work, which differs between families (it scores experts, for example).
    So it runs unchanged, and only its product is replaced."""

    convert: Callable[[Tensor], Weight]
    converted: dict[torch.dtype, Weight]

    @classmethod
    def of(cls, weight: Tensor, convert: Callable[[Tensor], Weight]) -> ConvertedParameter:
        """Return a parameter with this value. convert: converts it in each data type in which it is multiplied."""
        parameter = cls(weight, requires_grad=False)
        parameter.convert, parameter.converted = convert, {}
        return parameter

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiply by the converted weight in `F.linear`. Other functions return plain tensors, or this weight."""
        kwargs = kwargs or {}
        if function is F.linear and isinstance(args[1], ConvertedParameter):
            return args[1].multiply(args[0], kwargs.get("bias", args[2] if len(args) > 2 else None))
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        if function in CASTS and isinstance(args[0], ConvertedParameter):
            cast = cls.of(result.data, args[0].convert)
            cast.converted = args[0].converted
            return cast
        return result

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product with the rows of x, in the data type of this weight."""
        if self.dtype not in self.converted:
            self.converted[self.dtype] = self.convert(self.data.as_subclass(Tensor))
        return project(x, self.converted[self.dtype], bias)


def convert_parameters(model: nn.Module, overrides: Overrides, convert: Callable[[Tensor], Weight]) -> Overrides:
    """Convert the weights of modules that multiply by themselves: routers, and the linear layers of GPT-2. overrides:
    what other modules run."""
    converted: Overrides = {}
    for module in model.modules():
        is_other = isinstance(module, nn.Linear | nn.Embedding) or (module, "forward") in overrides
        if is_other or has_custom_forward(module):
            continue
        if type(module) is Conv1D:
            weight = convert(module.weight.data.T.contiguous())
            converted[module, "forward"] = partial(project, weight=weight, bias=module.bias)
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 2 and type(parameter.data) is Tensor:
                converted[module, name] = ConvertedParameter.of(parameter.data, convert)
    return converted


class _Products(TorchDispatchMode):
    """Collects the names of operators in `PRODUCTS`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.is_paused = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = function._schema.name.partition("::")
        if namespace != native.NAMESPACE and name in PRODUCTS and not self.is_paused:
            self.found.add(name)
        return function(*args, **(kwargs or {}))


@contextmanager
def reject_products(model: nn.Module) -> Iterator[None]:
    """Raise UnsupportedModel on exit if PyTorch has computed a product inside the context. Recurrent mixers may: they
    get one row at a time (`recurrent.py`)."""
    products, hooks = _Products(), []

    def pause(module: nn.Module, inputs: Sequence[Any]) -> None:
        products.is_paused = True

    def resume(module: nn.Module, inputs: Sequence[Any], output: Any) -> None:
        products.is_paused = False

    for mixer in recurrent_mixers(model):
        hooks += [mixer.register_forward_pre_hook(pause), mixer.register_forward_hook(resume)]
    try:
        with products:
            yield
    finally:
        for hook in hooks:
            hook.remove()
    if products.found:
        raise UnsupportedModel(f"batch_invariant=true: PyTorch computes {', '.join(sorted(products.found))} in it")


def check_invariance(
    model: nn.Module, run: Callable[[torch.dtype, int], Mapping[Any, Tensor]], kv_dtypes: Set[torch.dtype]
) -> None:
    """Raise UnsupportedModel if chunks and single tokens give different logits.

    run: returns logits, given the data type of the KV cache and the maximum tokens of a chunk.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the thread that serves requests
    try:
        for dtype in kv_dtypes:
            with reject_products(model):
                in_chunks, alone = run(dtype, 11), run(dtype, 1)
            if any(not torch.equal(logits, alone[position]) for position, logits in in_chunks.items()):
                raise UnsupportedModel("batch_invariant=true: its logits depend on the number of tokens in a step")
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, eq=False)
class InvariantWeight:
    """A weight [out_features, in_features] that is multiplied in one order for any number of rows."""

    weight: Tensor

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return invariant_linear(x.flatten(0, -2), self.weight, bias).view(*x.shape[:-1], -1)


def convert_on_gpu(model: PreTrainedModel, fused: FusedDecoder | str) -> Overrides:
    """Make a model on a GPU compute each row by itself. `fused`: what `fuse` returned. Raises UnsupportedModel."""
    if isinstance(fused, str):
        raise UnsupportedModel(REASON.format(f"its layers are not fused, because {fused}"))
    if reason := next(_gpu_obstacles(model, fused), None):
        raise UnsupportedModel(REASON.format(reason))
    decoder = fused.with_weights(lambda weight, _: InvariantWeight(weight))
    linears = [module for module in _outer_modules(model) if isinstance(module, nn.Linear)]
    return {(fused.module, "forward"): decoder} | convert_linears(linears, InvariantWeight)


def _gpu_obstacles(model: PreTrainedModel, decoder: FusedDecoder) -> Iterator[str]:
    for layer in decoder.layers:
        if isinstance(layer.mlp, FusedExperts):
            yield f"the products of a mixture of experts ({type(layer.mlp.module).__name__}) depend on the batch"
        if isinstance(layer.attention, FusedLatents):
            yield f"the products of latent attention ({type(layer.attention.module).__name__}) depend on the batch"
    for module in _outer_modules(model):
        is_known = type(module) in (nn.Linear, nn.Embedding) or module is model.model.norm
        if not is_known and any(True for _ in module.parameters(recurse=False)):
            yield f"the sums of {type(module).__name__} may depend on the batch"


def _outer_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the modules outside of the decoder layers."""
    inner = {id(module) for layer in model.model.layers for module in layer.modules()}
    return (module for module in model.modules() if id(module) not in inner)
