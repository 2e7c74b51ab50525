"""The models of `paged bench quantization`: the same weights in each format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from paged_bench._checkpoints import (
    CheckpointFormat,
    awq_format,
    block_fp8_format,
    float8_format,
    gptq_format,
    int8_format,
    packed_format,
    quantize_directory,
)
from paged_bench._gguf import AS_PACKAGED, demo_gguf, quantized_gguf

Options = dict[str, object]  # of the engine
REFERENCE = "float32"
ROUNDED: Mapping[str, Options] = {  # formats that the engine makes while loading
    REFERENCE: {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4, groups of 128": {"dtype": "bfloat16", "quantization": "int4", "quantization_group_size": 128},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},  # groups of 32
}
CHECKPOINTS: Mapping[str, CheckpointFormat] = {
    "AWQ": awq_format(32),
    "GPTQ": gptq_format(4, 32, False),
    "GPTQ desc_act": gptq_format(4, 32, False, desc_act=True),
    "GPTQ 8 bits": gptq_format(8, 32, True),
    "W4A16": packed_format(32),
    "W8A8": int8_format(),  # activations stay in bfloat16
    "FP8 tensor": float8_format("tensor", 0, 0),
    "FP8 channel": float8_format("channel", 1, 0),
    "FP8 blocks": block_fp8_format(64),
}
GGUF = {f"GGUF {kind}": kind for kind in ("Q8_0", "Q6_K", "Q4_K_M", "Q4_0", AS_PACKAGED)}
FORMATS = (*ROUNDED, *CHECKPOINTS, *GGUF)
QUICK = (REFERENCE, "bfloat16", "int4", "AWQ")


def gguf_file(name: str, quantize: Callable[[Path, Path, str], None] | None) -> Path:
    """Return the file of a format of GGUF.

    quantize: creates a file of a kind from one in bfloat16; None: raises ValueError if that is necessary.
    """
    kind = GGUF[name]
    if kind == AS_PACKAGED:
        return demo_gguf(kind)

    def make(source: Path, made: Path) -> None:
        if quantize is None:
            raise ValueError(f"{name} is made by llama.cpp, which is not among --peers")
        quantize(source, made, kind)

    return quantized_gguf(kind, make)


def engine_options(
    name: str, model: Path, scratch: Path, quantize: Callable[[Path, Path, str], None] | None
) -> Options:
    """Return the options of the engine for a format, and write its files to `scratch` if necessary."""
    if name in ROUNDED:
        return {"model": str(model)} | ROUNDED[name]
    if name in GGUF:
        return {"model": str(gguf_file(name, quantize)), "tokenizer": str(model), "dtype": "bfloat16"}
    target = scratch / name
    quantize_directory(model, target, CHECKPOINTS[name])
    return {"model": str(target), "dtype": "bfloat16"}
