"""Which server a request goes to."""

import asyncio
from collections import Counter

import pytest

from paged_client.openai.engine_calls import MergedStream
from paged_client.openai.errors import ApiError
from paged_client.openai.routing import AVOID_SECONDS, LOAD_FACTOR, PROMPT_CHARS, HashRing, Router, prompt_key
from paged_client.openai.servers import Servers
from paged_client.openai.translation import EngineRequest

NAMES = [f"server-{index}:8001" for index in range(4)]
KEYS = [str(number) for number in range(4000)]
SYSTEM = {"role": "system", "content": "Be brief."}


def user(text):
    return {"role": "user", "content": text}


def test_every_server_gets_its_share_of_keys():
    ring = HashRing(NAMES)
    shares = Counter(ring.order(key)[0] for key in KEYS)
    assert all(0.75 < count / (len(KEYS) / 4) < 1.3 for count in shares.values())
    assert all(sorted(ring.order(key)) == [0, 1, 2, 3] for key in KEYS[:100])


def test_only_keys_of_a_lost_server_move():
    """They are spread over the others; the rest stay, also if the servers have other numbers."""
    ring, smaller = HashRing(NAMES), HashRing(NAMES[1:])
    moved = Counter()
    for key in KEYS:
        before, after = ring.order(key), smaller.order(key)
        if before[0] == 0:
            moved[after[0]] += 1
            assert after[0] + 1 == before[1]
        else:
            assert after[0] + 1 == before[0]
    assert len(moved) == 3


def test_a_server_with_too_many_open_requests_is_passed_over():
    router = Router(NAMES, "prefix")
    opened = Counter()
    for _ in range(100):
        server = router.order("the same key")[0]
        router.open(server)
        opened[server] += 1
        assert opened[server] <= LOAD_FACTOR * (sum(opened.values())) / 4 + 1
    assert sum(opened.values()) == 100 and len(opened) == 4
    for server, count in opened.items():
        for _ in range(count):
            router.close(server)
    first = HashRing(NAMES).order("the same key")
    assert router.order("the same key") == first


def test_a_server_that_failed_is_tried_last_for_a_while():
    now = [100.0]
    router = Router(NAMES, "prefix", clock=lambda: now[0])
    first = router.order("key")
    router.open(first[0])
    router.close(first[0], failed=True)
    assert router.order("key") == [*first[1:], first[0]]
    now[0] += AVOID_SECONDS
    assert router.order("key") == first


@pytest.mark.parametrize(("policy", "key"), [("round-robin", "key"), ("prefix", None)])
def test_servers_in_turn(policy, key):
    router = Router(NAMES, policy)
    assert [router.order(key)[0] for _ in range(6)] == [0, 1, 2, 3, 0, 1]


def test_key_of_a_conversation_is_its_first_turn():
    first = prompt_key(None, [SYSTEM, user("One")])
    assert prompt_key(None, [SYSTEM, user("One"), {"role": "assistant", "content": "x"}, user("Two")]) == first
    assert prompt_key(None, [SYSTEM, user("Two")]) != first
    assert prompt_key(None, [{"role": "system", "content": "Other."}, user("One")]) != first
    assert prompt_key(None, [SYSTEM]) != prompt_key(None, [user("One")])


def test_key_of_a_text_is_its_beginning():
    text = "a" * PROMPT_CHARS
    assert prompt_key(text + "b", None) == prompt_key(text + "c", None)
    assert prompt_key("b" + text, None) != prompt_key("c" + text, None)
    assert prompt_key([1, 2, 3], None) != prompt_key([1, 2, 4], None)


def test_a_request_that_cannot_be_sent_is_not_counted_as_open():
    """Neither are the other prompts of the same request."""

    async def send() -> None:
        async with Servers(["localhost:1", "localhost:2"], "m", is_fixed=True) as servers:
            valid, invalid = (EngineRequest(prompt, None, {}) for prompt in ("a", "\ud800"))
            with pytest.raises(ApiError):
                MergedStream(servers, [valid, invalid], "id", samples=1)
            assert servers._router._num_open == [0, 0]

    asyncio.run(send())
