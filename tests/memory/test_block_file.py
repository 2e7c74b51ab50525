"""The file format of a cached block."""

import json

import pytest
import torch
from safetensors.torch import load_file

from paged_backend.api.request import Origin
from paged_backend.memory.block_file import TOKENS, BlockFormat, CorruptFile
from paged_backend.memory.disk import DiskTier
from paged_backend.scheduling.content import Entry
from tests.support.disk_blocks import LAYOUT, content, entry


def test_block_is_read_as_it_was_written(tmp_path):
    path, block = tmp_path / "block", entry(1, 2, before=entry(3, 4))
    path.write_bytes(BlockFormat(LAYOUT).encode(block, content(3)))
    found = BlockFormat(LAYOUT).read(block, path)
    assert all(map(torch.equal, found, content(3)))


@pytest.mark.parametrize(
    ("layout", "change", "reason"),
    [
        (LAYOUT[::-1], lambda data: data, "holds tensors of other shapes or types"),
        (LAYOUT, lambda data: data[:-1] + bytes([data[-1] ^ 1]), "its bytes have changed|holds other tokens"),
        (LAYOUT, lambda data: data + bytes(1 << 27), "is larger than a block"),
    ],
    ids=["layout", "bit flip", "size"],
)
def test_corrupt_file_is_named(tmp_path, layout, change, reason):
    path, block = tmp_path / "block", entry(1, 2)
    path.write_bytes(change(BlockFormat(LAYOUT).encode(block, content(3))))
    with pytest.raises(CorruptFile, match=reason):
        BlockFormat(layout).read(block, path)


def test_file_records_origin_and_all_prefix_tokens(tmp_path):
    tier = DiskTier(tmp_path, "ab12", 10**6, LAYOUT)
    tier.put(entry(7, 8, before=entry(5, 6, before=Origin("tenant", b"\x1f"))), content(1))
    tier.close()
    (path,) = tmp_path.glob("*/*/*.safetensors")
    assert load_file(path)[TOKENS].tolist() == [5, 6, 7, 8]
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    assert (header["__metadata__"]["salt"], header["__metadata__"]["adapter"]) == ("tenant", "1f")


@pytest.mark.parametrize(
    "other",
    [
        entry(1, 2, before=entry(5, 6)),  # the same tokens after others
        entry(1, 9, before=entry(3, 4)),
        entry(1, 2, before=entry(3, 4, before=Origin("tenant"))),
        entry(1, 2, before=entry(3, 4, before=Origin("", b"\x1f"))),
        entry(1, 2),
        entry(1, 2, before=entry(3, 4, before=entry(3, 4))),
    ],
    ids=lambda other: str(other.prefix),
)
def test_file_with_colliding_key_is_not_used_or_overwritten(tmp_path, monkeypatch, other):
    for name in ("chain_key", "root_key"):
        monkeypatch.setattr(f"paged_backend.scheduling.content.{name}", lambda *args: b"\0" * 32)
    other = Entry(other.parent, other.tokens)
    one = entry(1, 2, before=entry(3, 4))
    assert one.key == other.key
    tier = DiskTier(tmp_path, "ab12", 10**6, LAYOUT)
    tier.put(one, content(1))
    tier.settle(60)
    assert tier.get(other) is None
    tier.put(other, content(2))
    tier.settle(60)
    assert torch.equal(tier.get(one)[0], content(1)[0])
    assert (tier.up, tier.stats.written, tier.stats.read) == (True, 1, 1)
    tier.close()
