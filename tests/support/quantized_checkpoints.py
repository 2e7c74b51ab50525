"""Write a tiny model in the quantized formats of Hugging Face checkpoints, beside the same weights in float32."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from paged_bench._checkpoints import (
    QUANTIZED,
    CheckpointFormat,
    awq_format,
    block_fp8_format,
    float8_format,
    fp8,
    gptq_format,
    int8_format,
    mxfp4,
    packed_format,
)
from tests.support.in_process import save_tiny

CHECKPOINTS = {
    "awq-32": awq_format(32),
    "awq-64": awq_format(64),
    "gptq-4": gptq_format(4, 32, True),
    "gptq-4-asym": gptq_format(4, 64, False),
    "gptq-4-channel": gptq_format(4, -1, False),
    "gptq-4-v2": gptq_format(4, 32, False, stored_minus=0),
    "gptq-8": gptq_format(8, 32, True),
    "gptq-8-asym": gptq_format(8, 64, False),
    "gptq-desc_act": gptq_format(4, 32, True, desc_act=True),
    "gptq-desc_act-different": gptq_format(4, 32, False, desc_act=True, different=True),
    "w4a16": packed_format(32),
    "w4a16-asym": packed_format(32, symmetric=False),
    "w4a16-channel": packed_format(None),
    "w4a16-actorder": packed_format(32, actorder=True),
    "w8a16": packed_format(32, bits=8),
    "w8a8": int8_format(),
    "w8a8-asym": int8_format(symmetric=False),
    "fp8-channel": float8_format("channel", 1, 0, torch.bfloat16),
    "fp8-tensor": float8_format("tensor", 0, 0, extra=("input_scale",)),
    "fp8-blocks": float8_format("block", 16, 32),
    "fp8-deepseek": block_fp8_format(32),
    "fp8-deepseek-128": block_fp8_format(128),
    "fp8-fbgemm": CheckpointFormat(
        {"quant_method": "fbgemm_fp8"}, partial(fp8, rows=1, columns=0, scale="weight_scale")
    ),
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
