"""The disk tier behind an engine: cached blocks survive a restart, and disk errors never change a token."""

import errno
import os
import random
import threading
from queue import SimpleQueue

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from paged_backend.api.errors import ConfigError
from paged_backend.kv.stores import block_file
from paged_backend.kv.stores.block_file import TOKENS
from paged_backend.kv.stores.chain import READ_BLOCKS
from paged_backend.kv.stores.disk import DiskStore
from paged_backend.kv.stores.store import ReadCost
from tests.support.in_process import WAIT, EngineHarness, generate_with_transformers, running, tiny_assembly
from tests.support.shadow import truncated_keys

PROMPT = list(range(40, 89))
MAX_TOKENS = 4


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


@pytest.mark.usefixtures("async_scheduling")
def test_restarted_server_finds_prefixes_on_disk(assembly, tmp_path, alone):
    assert ask(assembly())[0] == alone
    assert len(files(tmp_path)) == (len(PROMPT) + MAX_TOKENS - 1) // 4
    tokens, stats = ask(assembly())
    assert tokens == alone
    assert stats.cached_tokens == stats.host_tokens == 48
    assert stats.disk_read == 12


def test_key_collisions_on_disk_change_no_token(assembly, tiny, figures):
    """300 prompts with few different prefixes and two tenants, then again after a restart, with keys of 8 bits."""
    rnd = random.Random(0)
    pieces = [[rnd.randrange(256) for _ in range(4)] for _ in range(2)]
    asks = [
        ([token for _ in range(rnd.randint(1, 6)) for token in rnd.choice(pieces)] + [rnd.randrange(4)],
         rnd.choice(["", "tenant"]))
        for _ in range(300)
    ]  # fmt: skip

    def answers(made, asks):
        with running(made) as engine:
            keys = [engine.submit(prompt, max_tokens=1, cache_salt=salt) for prompt, salt in asks]
            return [output.tokens for output in engine.wait(*keys)], engine.history[-1].stats

    prompts = sorted({tuple(prompt) for prompt, _ in asks})
    cold, _ = answers(tiny_assembly(tiny[0], enable_prefix_caching=False), [(prompt, "") for prompt in prompts])
    alone = dict(zip(prompts, cold, strict=True))
    found = []
    with truncated_keys(8):
        for _ in range(2):
            tokens, stats = answers(assembly(num_gpu_blocks_override=32, swap_space=0.0001), asks)
            assert tokens == [alone[tuple(prompt)] for prompt, _ in asks]
            assert stats.disk_up
            assert min(stats.cached_tokens, stats.host_tokens) > 100
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


def test_blocks_that_are_not_full_stay_in_memory(assembly, tmp_path):
    """They are moved to the host pool, like others, but no further."""
    with running(assembly(num_gpu_blocks_override=20, preemption_mode="recompute")) as engine:
        for first in range(4):
            prompt = [3 + first, *PROMPT[:-2]]
            engine.generate([prompt], max_tokens=MAX_TOKENS)
        stats = engine.history[-1].stats
    assert stats.moves_out > stats.disk_written > 0
    assert {len(load_file(path)[TOKENS]) % 4 for path in files(tmp_path)} == {0}


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


@pytest.mark.parametrize(("mode", "read"), [("auto", READ_BLOCKS), ("always", 12)])
def test_slow_tier_is_read_as_the_option_says(assembly, monkeypatch, alone, mode, read):
    """With `auto`, the first blocks are read to measure the tier, and the others are computed."""
    record = ReadCost.record
    monkeypatch.setattr(ReadCost, "record", lambda cost, seconds, blocks: record(cost, 1e6, blocks))
    ask(assembly())
    tokens, stats = ask(assembly(tier_read_mode=mode))
    assert tokens == alone
    assert stats.disk_read == read
    assert stats.disk_seconds == 1e6


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

    monkeypatch.setattr("paged_backend.kv.stores.disk.os.replace", full)
    made = assembly()
    assert ask(made)[0] == alone
    assert not made.stores.up
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
    assert made.stores.up
    held = files(tmp_path)
    assert 0 < len(held) < 13
    assert sum(path.stat().st_size for path in held) <= 30_000


def test_hanging_disk_does_not_delay_engine_stop(assembly, monkeypatch):
    started, release, steps, made = threading.Event(), threading.Event(), SimpleQueue(), assembly()
    engine = made.engine(steps.put)
    monkeypatch.setattr(DiskStore, "get", lambda tier, entry: (started.set(), release.wait(), None)[-1])
    engine.start()
    engine.abort(EngineHarness(made, engine, steps).submit(PROMPT))
    assert started.wait(WAIT)
    stopping = threading.Thread(target=engine.stop, args=[0.1], daemon=True)
    stopping.start()
    stopping.join(WAIT)
    assert not stopping.is_alive()
    release.set()
