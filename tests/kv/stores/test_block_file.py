"""The file format of a cached block, and the fingerprints of what blocks depend on."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from paged_backend.api.block_layout import FULL, BlockLayout, WindowKind
from paged_backend.api.config import EngineConfig
from paged_backend.api.request import Origin
from paged_backend.kv.content import BlockKey, Entry
from paged_backend.kv.stores import block_file
from paged_backend.kv.stores.block_file import TOKENS, BlockFormat, BlockSource, CorruptFile
from paged_backend.kv.stores.disk import DiskStore
from paged_backend.utils import machine
from tests.support.disk_blocks import LAYOUTS, content, key_of


def test_block_is_read_as_it_was_written(tmp_path):
    path, block = tmp_path / "block", key_of(1, 2, before=key_of(3, 4))
    path.write_bytes(BlockFormat(LAYOUTS).encode(block, content(3)))
    found = BlockFormat(LAYOUTS).read(block, path)
    assert all(map(torch.equal, found, content(3)))


@pytest.mark.parametrize(
    ("layout", "change", "reason"),
    [
        ([LAYOUTS[0][::-1]], lambda data: data, "holds tensors of other shapes or types"),
        (LAYOUTS, lambda data: data[:-1] + bytes([data[-1] ^ 1]), "its bytes have changed|holds other tokens"),
        (LAYOUTS, lambda data: data + bytes(1 << 27), "is larger than a block"),
    ],
    ids=["layout", "bit flip", "size"],
)
def test_corrupt_file_is_named(tmp_path, layout, change, reason):
    path, block = tmp_path / "block", key_of(1, 2)
    path.write_bytes(change(BlockFormat(LAYOUTS).encode(block, content(3))))
    with pytest.raises(CorruptFile, match=reason):
        BlockFormat(layout).read(block, path)


def test_file_records_origin_and_all_prefix_tokens(tmp_path):
    tier = DiskStore(tmp_path, "ab12", 10**6, LAYOUTS)
    tier.put(key_of(7, 8, before=key_of(5, 6, before=Origin("tenant", b"\x1f"))), content(1))
    tier.close()
    (path,) = tmp_path.glob("*/*/*.safetensors")
    assert load_file(path)[TOKENS].tolist() == [5, 6, 7, 8]
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    assert (header["__metadata__"]["salt"], header["__metadata__"]["adapter"]) == ("tenant", "1f")


@pytest.mark.parametrize(
    "other",
    [
        key_of(1, 2, before=key_of(5, 6)),  # the same tokens after others
        key_of(1, 9, before=key_of(3, 4)),
        key_of(1, 2, before=key_of(3, 4, before=Origin("tenant"))),
        key_of(1, 2, before=key_of(3, 4, before=Origin("", b"\x1f"))),
        key_of(1, 2),
        key_of(1, 2, before=key_of(3, 4, before=key_of(3, 4))),
    ],
    ids=lambda other: str(other.entry.prefix),
)
def test_file_with_colliding_key_is_not_used_or_overwritten(tmp_path, monkeypatch, other):
    for name in ("chain_key", "root_key"):
        monkeypatch.setattr(f"paged_backend.kv.content.{name}", lambda *args: b"\0" * 32)
    other = BlockKey(Entry(other.entry.parent, other.entry.tokens))
    one = key_of(1, 2, before=key_of(3, 4))
    assert one.name == other.name
    tier = DiskStore(tmp_path, "ab12", 10**6, LAYOUTS)
    tier.put(one, content(1))
    tier.settle(60)
    assert tier.get(other) is None
    tier.put(other, content(2))
    tier.settle(60)
    assert torch.equal(tier.get(one)[0], content(1)[0])
    assert (tier.up, tier.stats["disk_written"], tier.stats["disk_read"]) == (True, 1, 1)
    tier.close()


@pytest.fixture
def source(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(9 << 20))
    monkeypatch.setattr(machine, "user_cache_directory", lambda: tmp_path / "user")
    config = EngineConfig(model="m")
    return BlockSource(config, BlockLayout(16), [tmp_path], torch.float32, torch.float32, torch.device("cpu"))


def test_fingerprint_is_that_of_a_copy_elsewhere(source, tmp_path):
    """A copy of the model has other inodes and times."""
    shutil.copytree(tmp_path, tmp_path / "copy", copy_function=shutil.copyfile)
    assert replace(source, models=[tmp_path / "copy"]).fingerprint == source.fingerprint


@pytest.mark.parametrize("in_place", [True, False])
def test_models_of_equal_sizes_and_times_are_told_apart(source, tmp_path, in_place):
    """As a fine-tune in a reproducible image: one byte of one tensor differs. in_place: the same inode."""
    weights = tmp_path / "model.safetensors"
    first, before, content = source.fingerprint, weights.stat(), bytearray(weights.read_bytes())
    content[5 << 20] ^= 1
    if not in_place:
        weights.unlink()
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert replace(source).fingerprint != first


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.bfloat16},
        {"kv_dtype": torch.int8},
        {"device": torch.device("cuda")},
        {"layout": BlockLayout(16, (FULL, WindowKind(1, 8)))},
        {"config": EngineConfig(model="m", block_size=8)},
        {"config": EngineConfig(model="m", quantization="int8")},
        {"config": EngineConfig(model="m", quantization="int8", quantization_group_size=32)},
        {"config": EngineConfig(model="m", quantization="int8", quantized_activations="none")},
        {"config": EngineConfig(model="m", load_format="dummy", seed=1)},
        {"config": EngineConfig(model="m", batch_invariant=True)},
    ],
    ids=str,
)
def test_fingerprints_depend_on_everything_that_changes_blocks(source, change):
    other = replace(source, **change)
    assert other.fingerprint != source.fingerprint


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batch_invariant_blocks_depend_on_the_arithmetic(source, monkeypatch, device):
    found = set()
    for arithmetic in ("one", "other"):
        monkeypatch.setattr(block_file.native, "level", lambda arithmetic=arithmetic: arithmetic)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, arithmetic=arithmetic: arithmetic)
        config = EngineConfig(model="m", batch_invariant=True)
        found.add(replace(source, config=config, device=torch.device(device)).fingerprint)
    assert len(found) == 2


def test_blocks_of_another_format_are_not_found(source, monkeypatch):
    """Such as those of an earlier version."""
    fingerprint = source.fingerprint
    monkeypatch.setattr(block_file, "FORMAT_VERSION", "0")
    assert replace(source).fingerprint != fingerprint
