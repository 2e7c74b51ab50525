"""The disk tier: what it writes, reads, evicts and indexes, and when it is disabled."""

import errno
import os
import shutil
import stat
from pathlib import Path

import torch

from paged_backend.kv.stores import block_file
from paged_backend.kv.stores.disk import DiskStore
from tests.support.disk_blocks import FORMAT, content, key_of


def bytes_of(directory):
    return sum(path.stat().st_size for path in directory.glob("*/*/*"))


def test_written_blocks_are_read_and_evicted_in_lru_order(tmp_path):
    one, two, three = key_of(1, 2), key_of(3, 4), key_of(5, 6)
    tier = DiskStore(tmp_path, "ab12", 10**6, FORMAT)
    for value, each in enumerate((one, two)):
        tier.put(each, content(value))
    tier.settle(60)
    size = bytes_of(tmp_path) // 2
    assert torch.equal(tier.get(one), content(0))
    tier.close()

    tier = DiskStore(tmp_path, "ab12", 2 * size, FORMAT)
    tier.put(three, content(2))
    tier.close()
    assert [tier.should_write(each) for each in (one, two, three)] == [False, True, False]


def test_smaller_budget_evicts_at_startup(tmp_path):
    one, two = key_of(1, 2), key_of(3, 4)
    tier = DiskStore(tmp_path, "ab12", 10**6, FORMAT)
    for each in (one, two):
        tier.put(each, content(0))
    tier.close()
    size = bytes_of(tmp_path) // 2
    tier = DiskStore(tmp_path, "cd34", 2 * size - 1, FORMAT)
    assert bytes_of(tmp_path) == size
    assert [path.stem for path in tmp_path.glob("*/*/*")] == [two.name]
    tier.close()


def test_stale_partial_files_are_removed_at_startup(tmp_path):
    folder = tmp_path / "ab12" / "ab"
    folder.mkdir(parents=True)
    for name in ("old.part", "new.part", "notes.safetensors"):
        (folder / name).write_text("partial, or not a block file")
    os.utime(folder / "old.part", (0, 0))
    tier = DiskStore(tmp_path, "ab12", 100, FORMAT)
    assert tier.stats["disk_blocks"] == 0
    assert sorted(path.name for path in folder.iterdir()) == ["new.part", "notes.safetensors"]
    tier.close()


def test_budget_includes_files_of_other_models(tmp_path):
    tier = DiskStore(tmp_path, "ab12", 10**6, FORMAT)
    tier.put(key_of(1, 2), content(1))
    tier.close()
    size = bytes_of(tmp_path)
    tier = DiskStore(tmp_path, "cd34", size, FORMAT)
    assert (tier.stats["disk_blocks"], bytes_of(tmp_path)) == (0, size)
    tier.put(key_of(1, 2), content(1))
    tier.close()
    assert [path.parts[-3] for path in tmp_path.glob("*/*/*")] == ["cd34"]


def test_file_deleted_by_another_server_is_a_miss(tmp_path):
    tier = DiskStore(tmp_path, "ab12", 10**6, FORMAT)
    tier.put(key_of(1, 2), content(1))
    tier.settle(60)
    for path in tmp_path.glob("*/*/*"):
        path.unlink()
    assert tier.get(key_of(1, 2)) is None
    assert tier.up
    assert tier.should_write(key_of(1, 2))
    tier.close()


def test_missing_directory_disables_the_tier(tmp_path, caplog):
    tier = DiskStore(tmp_path / "kv", "ab12", 10**6, FORMAT)
    tier.put(key_of(1, 2), content(1))
    tier.settle(60)
    shutil.rmtree(tmp_path / "kv")
    assert tier.get(key_of(1, 2)) is None
    assert not tier.up
    tier.close()


def test_read_error_disables_the_tier(tmp_path, monkeypatch, caplog):
    """Files are read rather than mapped, since an I/O error in mapped memory would end the process."""
    tier = DiskStore(tmp_path, "ab12", 10**6, FORMAT)
    tier.put(key_of(1, 2), content(1))
    tier.settle(60)

    def fail(*args, **options):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "open", fail)
    assert tier.get(key_of(1, 2)) is None
    tier.close()
    assert not tier.up
    assert "Input/output error" in caplog.text


def test_directory_is_private_to_the_user(tmp_path):
    DiskStore(tmp_path / "kv", "ab12", 10**6, FORMAT).close()
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


def test_block_larger_than_the_budget_disables_the_tier(tmp_path, caplog):
    tier = DiskStore(tmp_path, "ab12", 100, FORMAT)
    tier.put(key_of(1, 2), content(1))
    tier.close()
    assert not tier.up
    assert "the budget is 100" in caplog.text


def test_block_evicted_while_being_read_is_a_miss(tmp_path, monkeypatch):
    tier = DiskStore(tmp_path, "ab12", 1000, FORMAT)
    one, read = key_of(1, 2), tier._format.read
    tier.put(one, content(0))
    tier.settle(60)

    def late(wanted, path):
        for number in range(3, 9):
            tier.put(key_of(number), content(number))
        tier.settle(60)
        return read(wanted, path)

    monkeypatch.setattr(tier._format, "read", late)
    assert tier.get(one) is None
    assert tier.should_write(one)
    assert tier.up
    tier.close()


def test_any_write_error_disables_the_tier(tmp_path, monkeypatch, caplog):
    """If the writer died, its queue would fill up."""

    def fail(*args):
        raise ValueError("no reason")

    monkeypatch.setattr(block_file, "save", fail)
    tier = DiskStore(tmp_path, "ab12", 1000, FORMAT)
    tier.put(key_of(1, 2), content(0))
    tier.close()
    assert not tier.up
    assert "ValueError: no reason" in caplog.text


def test_only_the_user_can_read_folders(tmp_path, caplog):
    """An existing directory stays as it is, and a warning names its mode."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o750)
    for name, warned in (("own", False), ("open", True)):
        caplog.clear()
        tier = DiskStore(tmp_path / name, "ab12", 10**6, FORMAT)
        tier.put(key_of(1, 2), content(1))
        tier.close()
        folders = [path for path in (tmp_path / name).rglob("*") if path.is_dir()]
        assert len(folders) == 2
        assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}
        assert ("has mode 0750" in caplog.text) == warned
