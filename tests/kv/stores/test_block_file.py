"""The file format of a cached block."""

import json

import pytest
import torch
from safetensors.torch import load_file

from paged_backend.api.request import Origin
from paged_backend.kv.content import BlockKey, Entry
from paged_backend.kv.stores.block_file import TOKENS, BlockFormat, CorruptFile
from paged_backend.kv.stores.disk import DiskStore
from tests.support.disk_blocks import FORMAT, PAGE_BYTES, content, key_of


def test_block_is_read_as_it_was_written(tmp_path):
    path, block = tmp_path / "block", key_of(1, 2, before=key_of(3, 4))
    path.write_bytes(FORMAT.encode(block, content(3)))
    found = FORMAT.read(block, path)
    assert torch.equal(found, content(3))


@pytest.mark.parametrize(
    ("expected", "change", "reason"),
    [
        (BlockFormat([1], PAGE_BYTES), lambda data: data, "holds pages of another size"),
        (FORMAT, lambda data: data[:-1] + bytes([data[-1] ^ 1]), "its bytes have changed|holds other tokens"),
        (FORMAT, lambda data: data + bytes(1 << 27), "is larger than a block"),
    ],
    ids=["size of pages", "bit flip", "size"],
)
def test_corrupt_file_is_named(tmp_path, expected, change, reason):
    path, block = tmp_path / "block", key_of(1, 2)
    path.write_bytes(change(FORMAT.encode(block, content(3))))
    with pytest.raises(CorruptFile, match=reason):
        expected.read(block, path)


def test_file_records_origin_and_all_prefix_tokens(tmp_path):
    tier = DiskStore(tmp_path, "ab12", 10**6, FORMAT)
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
    tier = DiskStore(tmp_path, "ab12", 10**6, FORMAT)
    tier.put(one, content(1))
    tier.settle(60)
    assert tier.get(other) is None
    tier.put(other, content(2))
    tier.settle(60)
    assert torch.equal(tier.get(one), content(1))
    assert (tier.up, tier.stats["disk_written"], tier.stats["disk_read"]) == (True, 1, 1)
    tier.close()
