"""Two engines that share a Redis server: one reuses the blocks of the other, and no failure changes a token."""

import random

import pytest

from paged_backend.api.errors import ConfigError
from tests.support.in_process import generate_with_transformers, running, tiny_assembly
from tests.support.redis_server import needs_redis, running_redis
from tests.support.waiting import until

pytestmark = needs_redis
PROMPT = list(range(40, 89))
MAX_TOKENS = 4
BLOCKS = (len(PROMPT) + MAX_TOKENS - 1) // 4  # full blocks of prompt and output


@pytest.fixture(scope="module")
def alone(tiny):
    return generate_with_transformers(tiny[1], PROMPT, MAX_TOKENS)


@pytest.fixture
def server(tmp_path):
    with running_redis(tmp_path) as made:
        yield made


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("PAGED_REMOTE_CACHE_SECRET", "sixteen bytes or more")


@pytest.fixture
def assembly(tiny, server):
    def make(**options):
        defaults = {"swap_space": 0.01, "remote_cache_url": server.url, "remote_cache_timeout_ms": 60_000}
        return tiny_assembly(tiny[0], **defaults | options)

    return make


def ask(assembly, prompt=PROMPT, **sampling):
    """Return the tokens of a prompt and the stats after it. The engine has stopped then, and the tier is idle."""
    with running(assembly) as engine:
        tokens = engine.generate([prompt], max_tokens=MAX_TOKENS, **sampling)[0]
        stats = engine.history[-1].stats
    return tokens, stats.having(**assembly.stores.stats)


@pytest.mark.usefixtures("async_scheduling")
def test_second_engine_reuses_the_blocks_of_the_first(assembly, server, alone):
    tokens, stats = ask(assembly())
    assert tokens == alone
    assert (stats.remote_up, stats.remote_written) == (True, BLOCKS)
    assert len(server.keys) == BLOCKS
    tokens, stats = ask(assembly())
    assert tokens == alone
    assert stats.cached_tokens == stats.host_tokens == 48
    assert (stats.remote_read, stats.remote_written) == (12, 1)  # the last block is not one of the prompt
    assert stats.remote_seconds > 0


def test_first_engine_shares_blocks_while_it_runs(assembly, server):
    with running(assembly()) as engine:
        engine.generate([PROMPT], max_tokens=MAX_TOKENS)
        while engine.step().stats.remote_written < BLOCKS:
            pass
        assert ask(assembly())[1].remote_read == 12


def test_tenants_do_not_share_blocks(assembly, server, alone):
    ask(assembly(), cache_salt="one")
    for salt, read in (("two", 0), ("", 0), ("one", 12)):
        tokens, stats = ask(assembly(), cache_salt=salt)
        assert tokens == alone
        assert stats.remote_read == read


def test_engines_with_other_blocks_share_nothing(assembly, monkeypatch):
    ask(assembly())
    for options in ({"block_size": 8}, {"load_format": "dummy"}, {"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}):
        assert ask(assembly(**options))[1].remote_read == 0
    monkeypatch.setenv("PAGED_REMOTE_CACHE_SECRET", "another secret of this size")
    assert ask(assembly())[1].remote_read == 0


def test_disk_and_remote_tier_complement_each_other(assembly, tmp_path, alone):
    disk = {"disk_cache_dir": str(tmp_path / "kv"), "disk_cache_gib": 0.01}
    ask(assembly(**disk))
    files = sorted((tmp_path / "kv").glob("*/*/*"))
    assert len(files) == BLOCKS
    for path in files[::2]:
        path.unlink()
    tokens, stats = ask(assembly(**disk))
    assert tokens == alone
    assert stats.disk_read + stats.remote_read == 12
    assert stats.disk_read > 0
    assert stats.remote_read > 0


def test_forged_keys_and_values_change_no_token(assembly, server, alone, caplog):
    ask(assembly())
    keys, client = server.keys, server.client
    values = [client.get(key) for key in keys]
    for key, value in zip(keys, values[1:] + values[:1], strict=True):
        client.set(key, value)
    tokens, stats = ask(assembly())
    assert tokens == alone
    assert (stats.remote_up, stats.cached_tokens) == (False, 0)
    assert "authentication code is wrong" in caplog.text


@pytest.mark.parametrize("failure", ["killed", "full", "paused"])
def test_failing_store_changes_no_token(assembly, server, alone, failure):
    """The engine runs while the store fails. Later it uses the store again."""
    options = {"remote_cache_timeout_ms": 300} if failure == "paused" else {}
    ask(assembly())
    made = assembly(**options)
    if failure == "killed":
        server.kill()
    elif failure == "full":
        server.client.config_set("maxmemory", 1)
    else:
        server.client.client_pause(2000)
    with running(made) as engine:
        other = random.Random(0).choices(range(256), k=50)
        assert engine.generate([PROMPT], max_tokens=MAX_TOKENS) == [alone]
        engine.generate([other], max_tokens=MAX_TOKENS)
        until(lambda: made.stores.stats["remote_disabled"])
        assert engine.generate([PROMPT], max_tokens=MAX_TOKENS) == [alone]
        if failure == "killed":
            server.start()
        elif failure == "full":
            server.client.config_set("maxmemory", 0)
        until(lambda: made.stores.up)
        assert engine.generate([PROMPT, other[::-1]], max_tokens=MAX_TOKENS)[0] == alone


def test_store_that_is_down_does_not_prevent_the_start(assembly, server, alone):
    server.kill()
    tokens, stats = ask(assembly())
    assert tokens == alone
    assert not stats.remote_up


def test_windowed_blocks_are_shared(tmp_path, server):
    from transformers import Gemma3TextConfig

    from tests.support.in_process import save_tiny

    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, sliding_window=8, layer_types=layers,
        eos_token_id=256,
    )  # fmt: skip
    model = save_tiny(config, tmp_path / "model")
    expected = generate_with_transformers(model, PROMPT, MAX_TOKENS)
    options = {"swap_space": 0.01, "remote_cache_url": server.url, "remote_cache_timeout_ms": 60_000}
    for read in (False, True):
        made = tiny_assembly(tmp_path / "model", **options)
        assert not all(kind.keeps_all for kind in made.scheduler.blocks.layout.kinds)
        tokens, stats = ask(made)
        assert tokens == expected
        assert bool(stats.remote_read) == read
        assert bool(stats.cached_tokens) == read


def test_unusable_options_are_rejected(assembly, tiny, tmp_path, monkeypatch):
    missing = tmp_path / "missing"
    for options, problem in (
        ({"swap_space": 0}, r'remote_cache_url="redis://.*": needs a host pool; set swap_space as well'),
        ({"remote_cache_gib": 1e-9}, r"remote_cache_gib=1e-09: one block takes \d+ bytes; raise it"),
        ({"remote_cache_url": f"rediss://h?ssl_ca_certs={missing}"}, f"ssl_ca_certs={missing}: is not a file"),
    ):
        with pytest.raises(ConfigError, match=problem):
            assembly(**options)
    monkeypatch.setenv("PAGED_REMOTE_CACHE_SECRET", "short")
    with pytest.raises(ConfigError, match="PAGED_REMOTE_CACHE_SECRET: has 5 bytes; must be at least 16"):
        assembly(model=str(missing))  # secrets are checked before the model is read
    monkeypatch.delenv("PAGED_REMOTE_CACHE_SECRET")
    monkeypatch.setenv("PAGED_REMOTE_CACHE_PASSWORD", "secret")
    with pytest.raises(ConfigError, match="remote_cache_url: has a password, as PAGED_REMOTE_CACHE_PASSWORD has"):
        assembly(remote_cache_url="redis://:other@127.0.0.1:1")


def test_password_of_the_environment_is_used(assembly, server, monkeypatch, caplog, alone):
    server.client.config_set("requirepass", "some password")
    assert not ask(assembly())[1].remote_up
    monkeypatch.setenv("PAGED_REMOTE_CACHE_PASSWORD", "some password")
    tokens, stats = ask(assembly())
    assert tokens == alone
    assert stats.remote_written == BLOCKS
    assert "the remote cache is disabled" in caplog.text
    assert "some password" not in caplog.text


def test_idle_engine_reports_that_the_store_works_again(assembly, server):
    server.kill()
    with running(assembly()) as engine:
        engine.generate([PROMPT], max_tokens=1)
        assert not engine.history[-1].stats.remote_up
        server.start()
        while not engine.step().stats.remote_up:
            pass
