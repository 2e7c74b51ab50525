"""Shell commands that convert a model with pickle files to safetensors, for the errors of such models.

They do not execute code in the files, because PyTorch reads them with `weights_only`.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

PREFIX = "pytorch_model"  # prefix of the file names that transformers reads, with or without an index
_READ = 'M.from_pretrained({}, dtype="auto", use_safetensors=False)'


def in_place(directory: Path) -> str:
    """Return the command that adds safetensors files to a directory with `pytorch_model.bin` or an index."""
    name = json.dumps(str(directory))
    return _python(
        "from transformers import AutoModelForCausalLM as M", f"{_READ.format(name)}.save_pretrained({name})"
    )


def from_hub(name: str, directory: str) -> str:
    """Return the command that saves a model of the hub and its tokenizer in a directory."""
    source, target = json.dumps(name), json.dumps(directory)
    return _python(
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T",
        f"{_READ.format(source)}.save_pretrained({target})",
        f"T.from_pretrained({source}).save_pretrained({target})",
    )


def of_tensors(path: Path) -> str:
    """Return the command that converts a file that maps names to tensors."""
    source, target = json.dumps(str(path)), json.dumps(str(path.parent / "model.safetensors"))
    return _python(
        "import torch, safetensors.torch as s",
        f'd = torch.load({source}, map_location="cpu", weights_only=True)',
        f's.save_file({{n: t.contiguous().clone() for n, t in d.items()}}, {target}, {{"format": "pt"}})',
    )


def _python(*statements: str) -> str:
    return shlex.join(["python", "-c", "; ".join(statements)])
