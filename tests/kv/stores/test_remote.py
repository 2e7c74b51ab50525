"""The remote tier against a real Redis server: what it stores and reads, and when it is disabled."""

import itertools
import re
import threading
import time

import pytest
import torch

from paged_backend.api.redis_address import RedisAddress
from paged_backend.api.request import Origin
from paged_backend.files.start_checks import ROOT
from paged_backend.kv.stores import remote
from paged_backend.kv.stores.remote import RedisClient, RemoteStore
from tests.support.disk_blocks import FORMAT, content, key_of, prefix
from tests.support.redis_server import SlowProxy, make_certificates, needs_redis, running_redis
from tests.support.waiting import until

pytestmark = needs_redis
SECRET = b"sixteen bytes or more"
PATIENT = 60.0  # seconds that a call may take where a slow machine must not disable the tier


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server):
    shared_server.client.flushall()
    return shared_server


@pytest.fixture
def retries(monkeypatch):
    """Try disabled tiers again soon."""
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(remote, "MAX_RETRY_SECONDS", 0.2)


@pytest.fixture
def connect():
    """A function that makes a tier, which is closed after the test."""
    made = []

    def one(url, fingerprint="ab12", *, password=None, timeout=PATIENT, **options):
        options = {"budget": 10**6, "ttl": 1000, "secret": SECRET} | options
        store = RedisClient(RedisAddress.parse(url), password, timeout)
        made.append(RemoteStore(store, fingerprint, FORMAT, **options))
        return made[-1]

    yield one
    for tier in made:
        tier.close(0)


def write(tier, *entries, value=1):
    for each in entries:
        tier.put(each, content(value))
    tier.settle(60)


def chain(count, salt=""):
    """Return the keys of a prefix of `count` blocks."""
    return prefix(count, Origin(salt))


def test_another_server_reads_what_one_has_written(server, connect):
    entries, first = chain(5), connect(server.url)
    write(first, *entries[:3], value=7)
    second = connect(server.url)
    found = second.read(entries)
    assert len(found) == 3
    assert all(torch.equal(block, content(7)) for block in found)
    assert (first.stats["remote_written"], second.stats["remote_read"]) == (3, 3)
    assert second.cost.seconds_per_block > 0


def test_known_blocks_are_not_written_again(server, connect):
    one, two = chain(2)
    tier = connect(server.url)
    write(tier, one)
    assert not tier.should_write(one)
    other = connect(server.url)
    assert other.should_write(one)
    assert len(other.read([one, two])) == 1
    assert not other.should_write(one)
    assert other.should_write(two)
    server.client.flushall()
    assert other.read([one]) == []
    assert other.should_write(one)


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": "cd34"},
        {"secret": b"another secret of the same length"},
        {"secret": None},
    ],
    ids=["model", "secret", "no secret"],
)
def test_servers_that_differ_share_nothing_and_stay_in_use(server, connect, other):
    entries = chain(2)
    write(connect(server.url), *entries)
    tier = connect(server.url, **other)
    assert tier.read(entries) == []
    assert tier.up


def test_tenants_share_nothing(server, connect):
    tier = connect(server.url)
    write(tier, *chain(2, "one"))
    assert len(tier.read(chain(2, "one"))) == 2
    assert tier.read(chain(2, "two")) == []
    assert tier.read(chain(2)) == []


def test_key_collisions_are_misses(server, connect, monkeypatch):
    for name in ("chain_key", "root_key"):
        monkeypatch.setattr(f"paged_backend.kv.content.{name}", lambda *args: b"\0" * 32)
    tier = connect(server.url)
    write(tier, key_of(1, 2))
    for other in (key_of(1, 3), key_of(1, 2, before=Origin("tenant")), key_of(1, 2, before=Origin("", b"\x1f"))):
        assert tier.read([other]) == []
    assert tier.up
    assert len(tier.read([key_of(1, 2)])) == 1


def corrupt_flipped(value):
    return value[:-1] + bytes([value[-1] ^ 1])


def corrupt_truncated(value):
    return value[: len(value) // 2]


def corrupt_replaced(value):
    return b"something else"


def corrupt_huge(value):
    return value + bytes(1 << 22)


@pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "no secret"])
@pytest.mark.parametrize("corrupt", [value for name, value in sorted(globals().items()) if name.startswith("corrupt")])
def test_damaged_values_disable_the_tier_and_are_deleted(server, connect, retries, caplog, corrupt, secret):
    entries, tier = chain(3), connect(server.url, secret=secret)
    write(tier, *entries)
    (key,) = (key for key in server.keys if key.endswith(entries[1].name.encode()))
    server.client.set(key, corrupt(server.client.get(key)))
    assert len(tier.read(entries)) == 1
    assert tier.stats["remote_disabled"] == 1
    assert f"{key.decode()} is not valid" in caplog.text
    until(lambda: tier.up)
    assert key not in server.keys
    assert len(tier.read(entries)) == 1
    assert tier.up
    assert "in use again" in caplog.text


def test_forged_value_with_the_right_tokens_is_not_used(server, connect):
    """Somebody who can write to the store, and knows the format, replaces keys and values. Without a secret that is not
    noticed."""
    (one,) = chain(1)
    for secret, used in ((SECRET, False), (None, True)):
        server.client.flushall()
        tier = connect(server.url, secret=secret)
        write(tier, one, value=1)
        (key,) = server.keys
        code = 32 if secret else 0
        forged = tier._format.encode(one, content(2))
        server.client.set(key, server.client.get(key)[:code] + forged)
        found = tier.read([one])
        assert [block[0, 0].item() for block in found] == [2] * used
        assert tier.stats["remote_disabled"] == (not used)


def test_valid_value_under_another_key_is_not_used(server, connect, caplog):
    one, two = chain(1, "one")[0], chain(1, "two")[0]
    tier = connect(server.url)
    write(tier, one, two)
    first, second = server.keys
    server.client.copy(first, second, replace=True)
    assert len(tier.read([one])) + len(tier.read([two])) <= 1
    assert not tier.up
    assert "authentication code is wrong" in caplog.text


def test_killed_and_restarted_server(tmp_path, connect, retries, caplog):
    entries = chain(3)
    with running_redis(tmp_path) as server:
        tier = connect(server.url)
        write(tier, *entries)
        assert len(tier.read(entries)) == 3
        changes = []
        tier.on_change(lambda: changes.append(tier.up))
        server.kill()
        assert tier.read(entries) == []
        assert not tier.up
        assert not tier.should_write(chain(4)[-1])
        assert caplog.text.count("the remote cache is disabled") == 1
        server.start()
        until(lambda: changes == [False, True])
        assert tier.read(entries) == []  # the server has lost them
        assert all(map(tier.should_write, entries))
        write(tier, *entries)
        assert len(tier.read(entries)) == 3


def test_server_that_is_down_at_the_start_is_used_later(tmp_path, connect, retries):
    with running_redis(tmp_path) as server:
        server.kill()
        tier = connect(server.url)
        assert not tier.up
        server.start()
        until(lambda: tier.up)


def test_full_server_disables_the_tier(tmp_path, connect, retries, caplog):
    with running_redis(tmp_path, "--maxmemory-policy", "noeviction") as server:
        tier = connect(server.url)
        write(tier, *chain(2))
        server.client.config_set("maxmemory", 1)
        write(tier, *chain(3))
        assert not tier.up
        assert "OutOfMemoryError" in caplog.text or "maxmemory" in caplog.text
        assert tier.stats["remote_written"] == 2
        server.client.config_set("maxmemory", 0)
        until(lambda: tier.up)
        write(tier, *chain(3))
        assert tier.stats["remote_written"] == 5  # known keys are written again after a failure


def test_paused_server_disables_the_tier_after_the_limit(server, connect, retries, caplog):
    tier = connect(server.url, timeout=0.3)
    write(tier, *chain(2))
    server.client.client_pause(2000)
    assert tier.read(chain(2)) == []
    assert not tier.up
    assert "a call takes more than 0.3 s" in caplog.text
    until(lambda: tier.up)
    assert len(tier.read(chain(2))) == 2


def test_answer_that_arrives_byte_by_byte_disables_the_tier(server, connect, caplog):
    """The time limit is for the call, not for each packet."""
    proxy = SlowProxy(server.port)
    tier = connect(proxy.url, timeout=0.5)
    write(tier, *chain(2))
    proxy.trickles = True
    assert tier.read(chain(2)) == []
    assert not tier.up
    assert "a call takes more than 0.5 s" in caplog.text
    proxy.shutdown()


def test_stalled_store_ends_with_the_tier(server, connect):
    tier = connect(server.url)
    server.client.client_pause(2000)
    tier.put(key_of(1, 2), content(1))
    tier.close(0.1)


@pytest.mark.parametrize("given", [None, "wrong"])
def test_wrong_password_disables_the_tier_and_is_not_logged(tmp_path, connect, caplog, given):
    with running_redis(tmp_path, password="right password") as server:
        assert connect(server.url, password="right password").up
        tier = connect(server.url, password=given)
        assert not tier.up
        assert tier.read(chain(1)) == []
    assert "the remote cache is disabled" in caplog.text
    assert "wrong" not in caplog.text.replace("WRONGPASS", "")


def test_password_of_the_url_is_used_and_not_logged(tmp_path, connect, retries, caplog):
    with running_redis(tmp_path, password="p@ss/word") as server:
        tier = connect(server.url.replace("//", "//default:p%40ss%2Fword@"))
        assert tier.up
        server.kill()
        assert tier.read(chain(1)) == []
    assert "the remote cache is disabled" in caplog.text
    assert "p@ss" not in caplog.text and "p%40" not in caplog.text


def test_user_with_the_documented_commands_suffices(server, connect):
    guide = (ROOT / "docs/guides/secure.md").read_text()
    commands = re.search(r"commands that a user of the store needs: `(.*?)`, on the keys `(.*?)`", guide)
    server.client.execute_command(
        "ACL", "SETUSER", "engine", "on", ">password", f"~{commands[2]}", *commands[1].split()
    )
    tier = connect(server.url.replace("//", "//engine:password@"), budget=1000)
    write(tier, *(key_of(number, number) for number in range(3)))
    assert tier.read([key_of(2, 2)])
    assert (tier.stats["remote_written"], tier.stats["remote_disabled"]) == (3, 0)
    assert len(server.keys) < 3


def test_tls_server_is_verified(tmp_path, connect, caplog):
    with running_redis(tmp_path, *make_certificates(tmp_path), tls=True) as server:
        url = f"rediss://localhost:{server.port}/0"
        tier = connect(f"{url}?ssl_ca_certs={tmp_path / 'ca.crt'}")
        write(tier, *chain(2))
        assert len(tier.read(chain(2))) == 2
        assert not connect(url).up
        assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
        caplog.clear()
        assert not connect(f"{url.replace('localhost', '127.0.0.1')}?ssl_ca_certs={tmp_path / 'ca.crt'}").up
        assert "CERTIFICATE_VERIFY_FAILED" in caplog.text  # the certificate is for another name


def test_least_recently_used_blocks_of_this_server_are_deleted_above_the_budget(server, connect):
    entries = [key_of(number, number) for number in range(4)]
    other = connect(server.url)
    write(other, key_of(8, 8))
    tier = connect(server.url)
    write(tier, entries[0])
    size = tier.stats["remote_bytes"]
    tier = connect(server.url, budget=2 * size)
    write(tier, *entries[:2])
    tier.read(entries[:1])
    tier.read([key_of(8, 8)])
    write(tier, entries[2])
    assert [len(tier.read([one])) for one in (*entries[:3], key_of(8, 8))] == [1, 0, 1, 1]
    assert tier.stats["remote_bytes"] == 2 * size


def test_values_expire_after_their_last_use(server, connect):
    tier = connect(server.url, ttl=1000)
    write(tier, key_of(1, 2))
    (key,) = server.keys
    assert 0 < server.client.ttl(key) <= 1000
    server.client.expire(key, 10)
    assert tier.read([key_of(1, 2)])
    assert server.client.ttl(key) > 10


def test_pauses_grow_while_the_store_fails_and_start_again_later(tmp_path, connect, monkeypatch):
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(remote, "MAX_RETRY_SECONDS", 0.08)
    pauses, waited = [], threading.Event.wait

    def wait(event, timeout=None):
        if timeout in (0.01, 0.02, 0.04, 0.08):
            pauses.append(timeout)
        return waited(event, timeout)

    with running_redis(tmp_path) as server:
        tier = connect(server.url)
        monkeypatch.setattr(threading.Event, "wait", wait)
        server.kill()
        assert tier.read(chain(1)) == []
        until(lambda: len(pauses) >= 5)
        assert pauses[:5] == [0.01, 0.02, 0.04, 0.08, 0.08]
        server.start()
        until(lambda: tier.up)
        time.sleep(0.1)  # longer than MAX_RETRY_SECONDS
        pauses.clear()
        server.kill()
        assert tier.read(chain(1)) == []
        until(lambda: len(pauses) >= 2)
        assert pauses[:2] == [0.01, 0.02]


def test_reads_and_writes_from_several_threads(server, connect):
    tier = connect(server.url, budget=20_000)
    entries = [key_of(number, number) for number in range(40)]
    deadline, wrong = time.monotonic() + 1, []

    def work(start):
        for number in itertools.islice(itertools.cycle(range(40)), start, None):
            if time.monotonic() > deadline:
                return
            tier.put(entries[number], content(number))
            wrong.extend(block for block in tier.read([entries[number]]) if block[0, 0] != number)

    threads = [threading.Thread(target=work, args=[start]) for start in (0, 13, 27)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tier.settle(60)
    assert not wrong
    assert tier.up
    assert 0 < tier.stats["remote_bytes"] <= 20_000
    assert sum(server.client.strlen(key) for key in server.keys) <= 20_000
