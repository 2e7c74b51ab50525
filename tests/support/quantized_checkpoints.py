"""Write a tiny model in the quantized formats of Hugging Face checkpoints, beside the same weights in float32.

Every writer packs integers itself, after the published layouts:

    AWQ                  https://github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py
    GPTQ                 https://github.com/ModelCloud/GPTQModel, gptqmodel/nn_modules/qlinear
    compressed-tensors   https://github.com/vllm-project/compressed-tensors, src/compressed_tensors/compressors
    FP8                  https://github.com/deepseek-ai/DeepSeek-V3, inference/kernel.py
    MXFP4                OCP Microscaling Formats (MX) Specification 1.0
"""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.support.in_process import save_tiny

QUANTIZED = re.compile(r"(proj|w[123])\.weight$")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def pack(values, bits, order=None):
    """Pack unsigned integers [rows, columns] along the columns into int32, the first in the lowest bits."""
    count = 32 // bits
    values = F.pad(values.long(), (0, -values.shape[1] % count)).unflatten(1, (-1, count))
    values = values[..., list(order)] if order else values
    packed = (values << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def round_integers(weight, bits, size, symmetric, scale_dtype=torch.float16):
    """Round to unsigned integers. Returns codes [out, in], scales and zero points [out, groups], and the weight."""
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
    return codes.flatten(1).long(), scales, zeros, plain.flatten(1)


def awq(weight, size):
    codes, scales, zeros, plain = round_integers(weight, 4, size, False)
    tensors = {"qweight": pack(codes.T, 4, AWQ_ORDER), "qzeros": pack(zeros.T, 4, AWQ_ORDER), "scales": scales.T}
    return tensors, plain


def shuffled(weight, size):
    """Return an order of the inputs, and the group of each input in it, as with desc_act."""
    generator = torch.Generator().manual_seed(weight.shape[1])  # the same for projections of the same inputs
    order = torch.randperm(weight.shape[1], generator=generator)
    g_idx = torch.empty_like(order)
    g_idx[order] = torch.arange(len(order)) // size
    return order, g_idx.to(torch.int32)


def gptq(weight, bits, size, symmetric, desc_act=False, stored_minus=1, different=False):
    size = size if size > 0 else weight.shape[1]
    order, g_idx = shuffled(weight, size) if desc_act else (torch.arange(weight.shape[1]), None)
    if different:  # another order for each projection
        order = order.roll(len(weight))
        g_idx = g_idx.clone()
        g_idx[order] = (torch.arange(len(order)) // size).int()
    codes, scales, zeros, plain = round_integers(weight[:, order], bits, size, symmetric)
    back = order.argsort()
    tensors = {
        "qweight": pack(codes[:, back], bits).T,
        "qzeros": pack(zeros.T - stored_minus, bits),
        "scales": scales.T,
        "g_idx": (torch.arange(weight.shape[1]) // size).int() if g_idx is None else g_idx,
    }
    return tensors, plain[:, back]


def packed_integers(weight, size, symmetric, actorder=False, bits=4):
    size = size or weight.shape[1]
    order, g_idx = shuffled(weight, size) if actorder else (torch.arange(weight.shape[1]), None)
    codes, scales, zeros, plain = round_integers(weight[:, order], bits, size, symmetric, torch.bfloat16)
    back = order.argsort()
    tensors = {
        "weight_packed": pack(codes[:, back], bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    tensors |= {} if symmetric else {"weight_zero_point": pack(zeros.T, bits).T}
    tensors |= {} if g_idx is None else {"weight_g_idx": g_idx}
    return tensors, plain[:, back]


def plain_integers(weight, symmetric=True):
    codes, scales, zeros, plain = round_integers(weight, 8, weight.shape[1], symmetric, torch.bfloat16)
    tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
    tensors |= {} if symmetric else {"weight_zero_point": (zeros - 128).to(torch.int8)}
    return tensors, plain


def fp8(weight, rows, columns, scale="weight_scale_inv", dtype=torch.float32, extra=()):
    """rows, columns: of the blocks that share a scale; 0: all."""
    rows, columns = rows or len(weight), columns or weight.shape[1]
    padded = F.pad(weight, (0, -weight.shape[1] % columns, 0, -len(weight) % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scales = (blocks.abs().amax((1, 3)) / 448).to(dtype)
    codes = (blocks / scales.float()[:, None, :, None]).to(torch.float8_e4m3fn)
    plain = codes.float() * scales.float()[:, None, :, None]
    codes, plain = (one.flatten(0, 1).flatten(1)[: len(weight), : weight.shape[1]] for one in (codes, plain))
    whole = scales.numel() == 1 and scale == "weight_scale"
    tensors = {"weight": codes, scale: scales.reshape(1) if whole else scales}
    return tensors | {name: torch.tensor(0.5) for name in extra}, plain


def mxfp4(weights):
    """weights: of experts, [experts, in_features, out_features]."""
    blocks = weights.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil()
    scaled = blocks / exponents.exp2()[..., None]
    nearest = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
    values = FP4[nearest] * scaled.sign()
    codes = (nearest | (scaled < 0) << 3).to(torch.uint8)
    plain = (values * exponents.exp2()[..., None]).flatten(-2).transpose(1, 2)
    tensors = {"blocks": codes[..., ::2] | codes[..., 1::2] << 4, "scales": (exponents + 127).to(torch.uint8)}
    return tensors, plain


def compressed(form, weights, **group):
    """Return a quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None} | group
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


def gptq_entry(bits, size, symmetric, **options):
    """Return the entry of CHECKPOINTS for a variant of GPTQ."""
    settings = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric}
    settings |= {"desc_act": options.get("desc_act", False)}
    settings |= {"checkpoint_format": "gptq" if options.get("stored_minus", 1) else "gptq_v2"}
    return settings, partial(gptq, bits=bits, size=size, symmetric=symmetric, **options)


def int4_entry(size, symmetric=True, bits=4, actorder=False):
    """Return the entry of CHECKPOINTS for a variant of pack-quantized."""
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": size}
    weights |= {"strategy": "group" if size else "channel", "actorder": "group" if actorder else None}
    settings = compressed("pack-quantized", weights)
    return settings, partial(packed_integers, size=size, symmetric=symmetric, bits=bits, actorder=actorder)


def int8_entry(symmetric):
    """Return the entry of CHECKPOINTS for a variant of int-quantized."""
    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    settings = compressed("int-quantized", weights, input_activations=activations)
    return settings, partial(plain_integers, symmetric=symmetric)


def float8_entry(strategy, rows, columns, dtype=torch.float32, **options):
    """Return the entry of CHECKPOINTS for a variant of float-quantized."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    weights |= {"block_structure": [rows, columns]} if strategy == "block" else {}
    settings = compressed("float-quantized", weights)
    return settings, partial(fp8, rows=rows, columns=columns, scale="weight_scale", dtype=dtype, **options)


def deepseek_entry(size):
    """Return the entry of CHECKPOINTS for FP8 with square blocks."""
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [size, size]}
    return settings, partial(fp8, rows=size, columns=size)


AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
CHECKPOINTS = {  # quantization_config, and the writer of a weight
    "awq-32": (AWQ | {"group_size": 32}, partial(awq, size=32)),
    "awq-64": (AWQ | {"group_size": 64}, partial(awq, size=64)),
    "gptq-4": gptq_entry(4, 32, True),
    "gptq-4-asym": gptq_entry(4, 64, False),
    "gptq-4-channel": gptq_entry(4, -1, False),
    "gptq-4-v2": gptq_entry(4, 32, False, stored_minus=0),
    "gptq-8": gptq_entry(8, 32, True),
    "gptq-8-asym": gptq_entry(8, 64, False),
    "gptq-desc_act": gptq_entry(4, 32, True, desc_act=True),
    "gptq-desc_act-different": gptq_entry(4, 32, False, desc_act=True, different=True),
    "w4a16": int4_entry(32),
    "w4a16-asym": int4_entry(32, symmetric=False),
    "w4a16-channel": int4_entry(None),
    "w4a16-actorder": int4_entry(32, actorder=True),
    "w8a16": int4_entry(32, bits=8),
    "w8a8": int8_entry(True),
    "w8a8-asym": int8_entry(False),
    "fp8-channel": float8_entry("channel", 1, 0, torch.bfloat16),
    "fp8-tensor": float8_entry("tensor", 0, 0, extra=("input_scale",)),
    "fp8-blocks": float8_entry("block", 16, 32),
    "fp8-deepseek": deepseek_entry(32),
    "fp8-deepseek-128": deepseek_entry(128),
    "fp8-fbgemm": ({"quant_method": "fbgemm_fp8"}, partial(fp8, rows=1, columns=0, scale="weight_scale")),
}


def write_checkpoint(directory: Path, config, name: str, ignored: str | None = None) -> Path:
    """Write a tiny random model in a quantized format, and return the directory of the same weights in float32.

    Args:
        config: of the model.
        name: of the format, in CHECKPOINTS, or "mxfp4".
        ignored: regular expression for names of weights that stay as they are.
    """
    reference = directory.with_name(f"{directory.name}-plain")
    save_tiny(config, reference)
    shutil.copytree(reference, directory)
    plain = load_file(reference / "model.safetensors")
    quantized = dict(plain)
    settings, writer = CHECKPOINTS.get(name, ({"quant_method": "mxfp4"}, None))
    for full, weight in list(plain.items()):
        if ignored and re.search(ignored, full):
            continue
        if writer is None and re.search(r"experts\.(gate_up|down)_proj$", full):
            tensors, plain[full] = mxfp4(weight)
            base = f"{full}_"
        elif writer is not None and QUANTIZED.search(full):
            tensors, plain[full] = writer(weight)
            base = full.removesuffix("weight")
        else:
            continue
        del quantized[full]
        quantized |= {base + end: tensor.contiguous() for end, tensor in tensors.items()}
    for place, tensors in ((reference, plain), (directory, quantized)):
        made = {full: tensor.contiguous() for full, tensor in tensors.items()}
        save_file(made, place / "model.safetensors", metadata={"format": "pt"})
    edit_config(directory, quantization_config=settings)
    return reference


def edit_config(directory: Path, **fields):
    """Replace fields of config.json."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
