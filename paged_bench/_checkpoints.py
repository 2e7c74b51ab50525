"""Write a model in the quantized formats of Hugging Face checkpoints.

Every format is packed here after its published layout, independently of the readers in `paged_backend.loading`. Weights
are rounded to the nearest code, without the calibration of the methods.

    AWQ                  https://github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py
    GPTQ                 https://github.com/ModelCloud/GPTQModel, gptqmodel/nn_modules/qlinear
    compressed-tensors   https://github.com/vllm-project/compressed-tensors, src/compressed_tensors/compressors
    FP8                  https://github.com/deepseek-ai/DeepSeek-V3, inference/kernel.py
    MXFP4                OCP Microscaling Formats (MX) Specification 1.0
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

QUANTIZED = re.compile(r"(proj|w[123])\.weight$")  # names of the weights that are quantized
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

# The tensors of a quantized weight, by the end of their names, and the same weight in float32.
Written: TypeAlias = tuple[dict[str, Tensor], Tensor]
Writer: TypeAlias = Callable[[Tensor], Written]  # writes a weight [out_features, in_features] in float32


class CheckpointFormat(NamedTuple):
    """A quantized format of a checkpoint."""

    settings: Mapping[str, Any]  # quantization_config
    write: Writer


def pack(values: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Pack unsigned integers [rows, columns] along the columns into int32, the first in the lowest bits."""
    count = 32 // bits
    values = F.pad(values.long(), (0, -values.shape[1] % count)).unflatten(1, (-1, count))
    values = values[..., list(order)] if order else values
    packed = (values << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


class Rounded(NamedTuple):
    """A weight that is rounded to unsigned integers."""

    codes: Tensor  # [out_features, in_features]
    scales: Tensor  # [out_features, groups]
    zeros: Tensor  # the same
    plain: Tensor  # [out_features, in_features] float32


def round_integers(
    weight: Tensor, bits: int, size: int, symmetric: bool, scale_dtype: torch.dtype = torch.float16
) -> Rounded:
    """Round to unsigned integers. Inputs share a scale in groups of `size`."""
    groups = weight.unflatten(1, (-1, size))
    levels, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scales = (groups.abs().amax(-1) / (middle - 1)).to(scale_dtype)
        zeros = torch.full(scales.shape, middle)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / levels).to(scale_dtype)
        zeros = (-low / scales.float()).round().clamp(1, levels).long()
    codes = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, levels)
    plain = (codes - zeros[..., None]) * scales.float()[..., None]
    return Rounded(codes.flatten(1).long(), scales, zeros, plain.flatten(1))


def awq(weight: Tensor, size: int) -> Written:
    """Write a weight for AWQ, version "gemm"."""
    codes, scales, zeros, plain = round_integers(weight, 4, size, False)
    tensors = {"qweight": pack(codes.T, 4, AWQ_ORDER), "qzeros": pack(zeros.T, 4, AWQ_ORDER), "scales": scales.T}
    return tensors, plain


def shuffled(weight: Tensor, size: int, different: bool = False) -> tuple[Tensor, Tensor]:
    """Return an order of the inputs, and the group of each input in it, as with desc_act.

    different: whether projections with other numbers of outputs get another order.
    """
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    order = order.roll(len(weight) if different else 0)
    g_idx = torch.empty_like(order)
    g_idx[order] = torch.arange(len(order)) // size
    return order, g_idx.to(torch.int32)


def gptq(
    weight: Tensor,
    bits: int,
    size: int,
    symmetric: bool,
    desc_act: bool = False,
    different: bool = False,
    stored_minus: int = 1,
) -> Written:
    """Write a weight for GPTQ. stored_minus: what is subtracted from zero points, 1 in the format "gptq"."""
    size = size if size > 0 else weight.shape[1]
    in_order = torch.arange(weight.shape[1])
    order, g_idx = shuffled(weight, size, different) if desc_act else (in_order, (in_order // size).int())
    codes, scales, zeros, plain = round_integers(weight[:, order], bits, size, symmetric)
    back = order.argsort()
    tensors = {
        "qweight": pack(codes[:, back], bits).T,
        "qzeros": pack(zeros.T - stored_minus, bits),
        "scales": scales.T,
        "g_idx": g_idx,
    }
    return tensors, plain[:, back]


def packed_integers(
    weight: Tensor, size: int | None, symmetric: bool, actorder: bool = False, bits: int = 4
) -> Written:
    """Write a weight for compressed-tensors, "pack-quantized". size: inputs that share a scale; None: one scale per
    output."""
    size = size or weight.shape[1]
    in_order = torch.arange(weight.shape[1])
    order, g_idx = shuffled(weight, size) if actorder else (in_order, in_order)
    codes, scales, zeros, plain = round_integers(weight[:, order], bits, size, symmetric, torch.bfloat16)
    back = order.argsort()
    tensors = {
        "weight_packed": pack(codes[:, back], bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    tensors |= {} if symmetric else {"weight_zero_point": pack(zeros.T, bits).T}
    tensors |= {"weight_g_idx": g_idx} if actorder else {}
    return tensors, plain[:, back]


def plain_integers(weight: Tensor, symmetric: bool = True) -> Written:
    """Write a weight for compressed-tensors, "int-quantized", with a scale per output."""
    codes, scales, zeros, plain = round_integers(weight, 8, weight.shape[1], symmetric, torch.bfloat16)
    tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
    tensors |= {} if symmetric else {"weight_zero_point": (zeros - 128).to(torch.int8)}
    return tensors, plain


def fp8(
    weight: Tensor,
    rows: int,
    columns: int,
    scale: str = "weight_scale_inv",
    dtype: torch.dtype = torch.float32,
    extra: Sequence[str] = (),
) -> Written:
    """Write a weight in FP8.

    Args:
        rows, columns: size of the blocks that share a scale; 0: all.
        scale: name of the scales.
        dtype: type of the scales.
        extra: names of scales of activations.
    """
    rows, columns = rows or len(weight), columns or weight.shape[1]
    padded = F.pad(weight, (0, -weight.shape[1] % columns, 0, -len(weight) % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scales = (blocks.abs().amax((1, 3)) / 448).to(dtype)
    codes = (blocks / scales.float()[:, None, :, None]).to(torch.float8_e4m3fn)
    plain = codes.float() * scales.float()[:, None, :, None]
    codes, plain = (tensor.flatten(0, 1).flatten(1)[: len(weight), : weight.shape[1]] for tensor in (codes, plain))
    is_single = scales.numel() == 1 and scale == "weight_scale"
    tensors = {"weight": codes, scale: scales.reshape(1) if is_single else scales}
    return tensors | {name: torch.tensor(0.5) for name in extra}, plain


def mxfp4(weights: Tensor) -> Written:
    """Write the weights of experts [experts, in_features, out_features] for gpt-oss."""
    blocks = weights.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil()
    scaled = blocks / exponents.exp2()[..., None]
    nearest = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
    values = FP4[nearest] * scaled.sign()
    codes = (nearest | (scaled < 0) << 3).to(torch.uint8)
    plain = (values * exponents.exp2()[..., None]).flatten(-2).transpose(1, 2)
    tensors = {"blocks": codes[..., ::2] | codes[..., 1::2] << 4, "scales": (exponents + 127).to(torch.uint8)}
    return tensors, plain


def compressed(form: str, weights: Mapping[str, Any], **group: Any) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None} | group
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


def awq_format(size: int) -> CheckpointFormat:
    settings = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm", "group_size": size}
    return CheckpointFormat(settings, partial(awq, size=size))


def gptq_format(bits: int, size: int, symmetric: bool, **options: Any) -> CheckpointFormat:
    """Return a format of GPTQ. options: further arguments of `gptq`."""
    settings = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric}
    settings |= {"desc_act": options.get("desc_act", False)}
    settings |= {"checkpoint_format": "gptq" if options.get("stored_minus", 1) else "gptq_v2"}
    return CheckpointFormat(settings, partial(gptq, bits=bits, size=size, symmetric=symmetric, **options))


def packed_format(size: int | None, symmetric: bool = True, bits: int = 4, actorder: bool = False) -> CheckpointFormat:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": size}
    weights |= {"strategy": "group" if size else "channel", "actorder": "group" if actorder else None}
    write = partial(packed_integers, size=size, symmetric=symmetric, bits=bits, actorder=actorder)
    return CheckpointFormat(compressed("pack-quantized", weights), write)


def int8_format(symmetric: bool = True) -> CheckpointFormat:
    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    settings = compressed("int-quantized", weights, input_activations=activations)
    return CheckpointFormat(settings, partial(plain_integers, symmetric=symmetric))


def float8_format(
    strategy: str, rows: int, columns: int, dtype: torch.dtype = torch.float32, **options: Any
) -> CheckpointFormat:
    """Return "float-quantized" of compressed-tensors. options: further arguments of `fp8`."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    weights |= {"block_structure": [rows, columns]} if strategy == "block" else {}
    write = partial(fp8, rows=rows, columns=columns, scale="weight_scale", dtype=dtype, **options)
    return CheckpointFormat(compressed("float-quantized", weights), write)


def block_fp8_format(size: int) -> CheckpointFormat:
    """Return FP8 as DeepSeek stores it, with square blocks."""
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [size, size]}
    return CheckpointFormat(settings, partial(fp8, rows=size, columns=size))


def quantize_directory(source: Path, target: Path, form: CheckpointFormat) -> None:
    """Write the model in a directory, with one weight file, to another directory in a quantized format."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if QUANTIZED.search(name)]:
        made, _ = form.write(tensors.pop(name).float())
        tensors |= {name.removesuffix("weight") + end: tensor.contiguous() for end, tensor in made.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": form.settings}))
