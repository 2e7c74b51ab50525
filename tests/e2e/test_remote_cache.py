"""Two servers that share a Redis server, which then fails."""

import json

import pytest

from paged_client.serving.tritonserver import TritonServer
from tests.support.processes import needs_server
from tests.support.redis_server import needs_redis, running_redis
from tests.support.triton import idle, metrics, post
from tests.support.waiting import until

pytestmark = [needs_redis, needs_server]
PROMPT = "Call/me/Ishmael.Some/years/ago--never/min"  # 41 tokens: ten blocks, and a last token that is always computed
PASSWORD, SECRET = "password of the store", "secret that the servers share"


@pytest.fixture
def environment(tmp_path):
    """The environment variables of a server with the secrets."""
    (tmp_path / "password").write_text(PASSWORD + "\n")
    return {"PAGED_REMOTE_CACHE_PASSWORD_FILE": str(tmp_path / "password"), "PAGED_REMOTE_CACHE_SECRET": SECRET}


def ask(server, prompt=PROMPT):
    """Return the text and the cached tokens of a greedy request."""
    body = {"text_input": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 8, "return_receipt": True}
    status, reply = post(server, body)
    assert status == 200, reply
    answer = json.loads(reply)
    return answer["text_output"], json.loads(answer["receipt"])["cached_tokens"]


def test_second_server_reuses_blocks_and_survives_the_loss_of_the_store(tiny, tmp_path, environment):
    with running_redis(tmp_path, password=PASSWORD) as store:
        options = {
            **{"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 256, "max_num_seqs": 4},
            **{"swap_space": 0.01, "tier_read_mode": "always"},
            **{"remote_cache_url": store.url, "remote_cache_timeout_ms": 10_000},
        }
        with TritonServer(tiny[0], options, environment=environment) as first:
            text, cached = ask(first)
            assert cached == 0
            until(lambda: metrics(first)["paged_remote_blocks_written_total"] == 12, "the blocks in the store")
        with TritonServer(tiny[0], options, environment=environment) as second:
            assert ask(second) == (text, 40)
            idle(second)
            now = metrics(second)
            assert (now["paged_remote_tier_up"], now["paged_remote_blocks_read_total"]) == (1, 10)
            assert now["paged_cache_tier_block_seconds{remote}"] > 0
            store.kill()
            assert ask(second, PROMPT[::-1])[1] == 0
            until(lambda: metrics(second)["paged_remote_tier_up"] == 0, "the end of the tier")
            assert metrics(second)["paged_remote_tier_disabled_total"] == 1
            assert ask(second) == (text, 40)
            assert "the remote cache is disabled" in second.log()
            assert not any(secret in second.log() for secret in (PASSWORD, SECRET))
