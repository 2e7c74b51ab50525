"""The disk tier: cached blocks survive a restart, and disk errors cost cache hits but never change a token."""

import errno
import json
import os
import random
import shutil
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from paged_backend.api.errors import ConfigError
from paged_backend.api.request import Origin
from paged_backend.memory import block_file
from paged_backend.memory.block_file import TOKENS
from paged_backend.memory.disk import DiskTier
from paged_backend.scheduling.content import Entry
from tests.support.in_process import WAIT, EngineHarness, generate_with_transformers, running, tiny_assembly
from tests.support.pool_machine import truncated_keys

PROMPT = list(range(40, 89))
MAX_TOKENS = 4
ORIGIN = Origin("")
LAYOUT = [torch.zeros(2, 3), torch.zeros(1, dtype=torch.bfloat16)]


@pytest.fixture(scope="module")
def alone(tiny):
    return generate_with_transformers(tiny[1], PROMPT, MAX_TOKENS)


@pytest.fixture
def assembly(tiny, tmp_path):
    def make(**options):
        defaults = {"swap_space": 0.01, "disk_cache_dir": str(tmp_path / "kv"), "disk_cache_gib": 0.01}
        return tiny_assembly(tiny[0], **defaults | options)

    return make


def files(tmp_path):
    return sorted((tmp_path / "kv").glob("*/*/*.safetensors"))


def ask(assembly, prompt=PROMPT):
    """Return the tokens of a prompt and the stats after it. The engine has stopped then, and the disk is idle."""
    with running(assembly) as engine:
        tokens = engine.generate([prompt], max_tokens=MAX_TOKENS)[0]
        stats = engine.history[-1].stats
    return tokens, stats


@pytest.mark.usefixtures("planning")
def test_restarted_server_finds_prefixes_on_disk(assembly, tmp_path, alone):
    assert ask(assembly())[0] == alone
    assert len(files(tmp_path)) == (len(PROMPT) + MAX_TOKENS - 1) // 4
    tokens, stats = ask(assembly())
    assert tokens == alone
    assert stats.cached_tokens == stats.host_tokens == 48
    assert stats.disk_read == 12


def test_key_collisions_on_disk_change_no_token(assembly, tiny, figures):
    """2,000 prompts with few different prefixes and two tenants, then again after a restart, with keys of 8 bits."""
    rnd = random.Random(0)
    pieces = [[rnd.randrange(256) for _ in range(4)] for _ in range(2)]
    asks = [
        ([token for _ in range(rnd.randint(1, 6)) for token in rnd.choice(pieces)] + [rnd.randrange(4)],
         rnd.choice(["", "tenant"]))
        for _ in range(2000)
    ]  # fmt: skip

    def answers(made, asks):
        with running(made) as engine:
            keys = [engine.submit(prompt, max_tokens=1, cache_salt=salt) for prompt, salt in asks]
            return [one.tokens for one in engine.wait(*keys)], engine.history[-1].stats

    prompts = sorted({tuple(prompt) for prompt, _ in asks})
    cold, _ = answers(tiny_assembly(tiny[0], enable_prefix_caching=False), [(prompt, "") for prompt in prompts])
    alone = dict(zip(prompts, cold, strict=True))
    found = []
    with truncated_keys(8):
        for _ in range(2):
            tokens, stats = answers(assembly(num_gpu_blocks_override=32, swap_space=0.0001), asks)
            assert tokens == [alone[tuple(prompt)] for prompt, _ in asks]
            assert stats.disk_up
            assert min(stats.cached_tokens, stats.host_tokens) > 1000
            found.append(stats.disk_read)
    assert found[1] > 0
    figures(f"{len(asks) * 2:,} answers, none wrong; files read {found}")


def test_idle_engine_spills_its_cache_to_disk(assembly, tmp_path):
    """A server that is killed later loses no cached block."""
    with running(assembly()) as engine:
        engine.generate([PROMPT], max_tokens=MAX_TOKENS)
        while engine.step().stats.disk_blocks < 13:
            pass
        assert len(files(tmp_path)) == 13


def test_different_fingerprint_finds_nothing(assembly, tmp_path, alone):
    ask(assembly())
    others = [{"block_size": 8}, {"load_format": "dummy"}, {"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}]
    if torch.cpu._is_vnni_supported():
        others += [{"quantization": "int8", "device": "cpu"}]
    for options in others:
        assert ask(assembly(**options))[1].disk_read == 0
    assert ask(assembly())[1].disk_read > 0


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_quantized_blocks_are_restored_with_their_scales(assembly, kv_cache_dtype):
    made = [ask(assembly(kv_cache_dtype=kv_cache_dtype)) for _ in range(2)]
    assert made[0][0] == made[1][0]
    assert made[1][1].host_tokens == 48


def test_disk_cache_requires_a_host_pool(tiny, tmp_path):
    for options in ({}, {"swap_space": 0}):
        with pytest.raises(ConfigError, match=r"disk_cache_dir=.*: needs a host pool"):
            tiny_assembly(tiny[0], disk_cache_dir=str(tmp_path), **options)


def corrupt_truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def corrupt_no_safetensors(path):
    path.write_bytes(b"something else")


def corrupt_changed(path):
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.write_bytes(data)


def corrupt_tokens(path):
    held = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(held | {TOKENS: held[TOKENS] + 1}, path, metadata)


def corrupt_huge(path):
    os.truncate(path, 1 << 40)  # a sparse file


def corrupt_foreign(path):
    save_file({"0": torch.zeros(1), TOKENS: torch.zeros(4)}, path, {"salt": "", "adapter": "", "digest": ""})


def corrupt_no_metadata(path):
    save_file(load_file(path), path)


def corrupt_stalls(path):
    """Reading it never returns."""
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("corrupt", [value for name, value in sorted(globals().items()) if name.startswith("corrupt")])
def test_corrupt_file_disables_the_tier_and_changes_no_token(assembly, tmp_path, alone, corrupt, caplog, monkeypatch):
    monkeypatch.setattr(block_file, "READ_SECONDS", 0.5)
    ask(assembly())
    made = assembly()
    for path in files(tmp_path):
        corrupt(path)
    tokens, stats = ask(made)
    assert tokens == alone
    assert stats.cached_tokens == 0
    assert not stats.disk_up
    assert "disk_cache_dir: " in caplog.text
    assert "the disk cache is disabled" in caplog.text


def test_block_under_a_wrong_file_name_is_not_used(assembly, tmp_path, alone):
    ask(assembly())
    first, second = files(tmp_path)[:2]
    first.write_bytes(second.read_bytes())
    made = assembly()
    tokens, stats = ask(made)
    assert tokens == alone
    assert not stats.disk_up


def test_full_disk_disables_the_tier(assembly, tmp_path, monkeypatch, alone, caplog):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("paged_backend.memory.disk.os.replace", full)
    made = assembly()
    assert ask(made)[0] == alone
    assert not made.disk.up
    assert "No space left on device" in caplog.text
    assert not list((tmp_path / "kv").glob("*/*/*"))


def test_unusable_directory_disables_the_tier(assembly, tmp_path, alone, caplog):
    (tmp_path / "kv").write_text("in the way")
    tokens, stats = ask(assembly())
    assert tokens == alone
    assert not stats.disk_up
    assert "cannot be used" in caplog.text


def test_disk_budget_is_respected(assembly, tmp_path, alone):
    made = assembly(disk_cache_gib=30_000 / 2**30)
    ask(made)
    assert made.disk.up
    held = files(tmp_path)
    assert 0 < len(held) < 13
    assert sum(path.stat().st_size for path in held) <= 30_000


def test_hanging_disk_does_not_delay_engine_stop(assembly, monkeypatch):
    started, release, steps, made = threading.Event(), threading.Event(), SimpleQueue(), assembly()
    engine = made.engine(steps.put)
    monkeypatch.setattr(made.disk, "get", lambda entry: (started.set(), release.wait(), None)[-1])
    engine.start()
    engine.abort(EngineHarness(made, engine, steps).submit(PROMPT))
    assert started.wait(WAIT)
    stopping = threading.Thread(target=engine.stop, args=[0.1], daemon=True)
    stopping.start()
    stopping.join(WAIT)
    assert not stopping.is_alive()
    release.set()


# --- the tier without an engine ----------------------------------------------------------------------------------


def entry(*tokens, before=ORIGIN):
    return Entry(before, tokens)


def content(value):
    return [torch.full((2, 3), float(value)), torch.full((1,), float(value), dtype=torch.bfloat16)]


def test_written_blocks_are_read_and_evicted_in_lru_order(tmp_path):
    one, two, three = entry(1, 2), entry(3, 4), entry(5, 6)
    tier = DiskTier(tmp_path, "ab12", 10**6, LAYOUT)
    for value, each in enumerate((one, two)):
        tier.put(each, content(value))
    tier.settle(60)
    size = tier.stats.nbytes // 2
    assert all(torch.equal(a, b) for a, b in zip(tier.get(one), content(0), strict=True))
    tier.close()

    tier = DiskTier(tmp_path, "ab12", 2 * size, LAYOUT)
    tier.put(three, content(2))
    tier.close()
    assert [tier.should_write(each) for each in (one, two, three)] == [False, True, False]


def test_smaller_budget_evicts_at_startup(tmp_path):
    one, two = entry(1, 2), entry(3, 4)
    tier = DiskTier(tmp_path, "ab12", 10**6, LAYOUT)
    for each in (one, two):
        tier.put(each, content(0))
    tier.close()
    size = tier.stats.nbytes // 2
    tier = DiskTier(tmp_path, "cd34", 2 * size - 1, LAYOUT)
    assert tier.stats.nbytes == size
    assert [path.stem for path in tmp_path.glob("*/*/*")] == [two.key.hex()]
    tier.close()


def test_stale_partial_files_are_removed_at_startup(tmp_path):
    folder = tmp_path / "ab12" / "ab"
    folder.mkdir(parents=True)
    for name in ("old.part", "new.part", "notes.safetensors"):
        (folder / name).write_text("partial, or not a block file")
    os.utime(folder / "old.part", (0, 0))
    tier = DiskTier(tmp_path, "ab12", 100, LAYOUT)
    assert tier.stats.blocks == 0
    assert sorted(path.name for path in folder.iterdir()) == ["new.part", "notes.safetensors"]
    tier.close()


def test_budget_includes_files_of_other_models(tmp_path):
    tier = DiskTier(tmp_path, "ab12", 10**6, LAYOUT)
    tier.put(entry(1, 2), content(1))
    tier.close()
    size = tier.stats.nbytes
    tier = DiskTier(tmp_path, "cd34", size, LAYOUT)
    assert (tier.stats.blocks, tier.stats.nbytes) == (0, size)
    tier.put(entry(1, 2), content(1))
    tier.close()
    assert [path.parts[-3] for path in tmp_path.glob("*/*/*")] == ["cd34"]


def test_file_deleted_by_another_server_is_a_miss(tmp_path):
    tier = DiskTier(tmp_path, "ab12", 10**6, LAYOUT)
    tier.put(entry(1, 2), content(1))
    tier.settle(60)
    for path in tmp_path.glob("*/*/*"):
        path.unlink()
    assert tier.get(entry(1, 2)) is None
    assert tier.up
    assert tier.should_write(entry(1, 2))
    tier.close()


def test_missing_directory_disables_the_tier(tmp_path, caplog):
    tier = DiskTier(tmp_path / "kv", "ab12", 10**6, LAYOUT)
    tier.put(entry(1, 2), content(1))
    tier.settle(60)
    shutil.rmtree(tmp_path / "kv")
    assert tier.get(entry(1, 2)) is None
    assert not tier.up
    tier.close()


def test_read_error_disables_the_tier(tmp_path, monkeypatch, caplog):
    """Files are read rather than mapped, since an I/O error in mapped memory would end the process."""
    tier = DiskTier(tmp_path, "ab12", 10**6, LAYOUT)
    tier.put(entry(1, 2), content(1))
    tier.settle(60)

    def fail(*args, **options):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "open", fail)
    assert tier.get(entry(1, 2)) is None
    tier.close()
    assert not tier.up
    assert "Input/output error" in caplog.text


def test_directory_is_private_to_the_user(tmp_path):
    DiskTier(tmp_path / "kv", "ab12", 10**6, LAYOUT).close()
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


def test_block_larger_than_the_budget_disables_the_tier(tmp_path, caplog):
    tier = DiskTier(tmp_path, "ab12", 100, LAYOUT)
    tier.put(entry(1, 2), content(1))
    tier.close()
    assert not tier.up
    assert "the budget is 100" in caplog.text


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


def test_block_evicted_while_being_read_is_a_miss(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, "ab12", 1000, LAYOUT)
    one, read = entry(1, 2), tier._format.read
    tier.put(one, content(0))
    tier.settle(60)

    def late(wanted, path):
        for number in range(3, 9):
            tier.put(entry(number), content(number))
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
    tier = DiskTier(tmp_path, "ab12", 1000, LAYOUT)
    tier.put(entry(1, 2), content(0))
    tier.close()
    assert not tier.up
    assert "ValueError: no reason" in caplog.text
