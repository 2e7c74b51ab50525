"""Which server a request goes to."""

import asyncio
from collections import Counter

import pytest

from paged_client.openai.engine_calls import MergedStream
from paged_client.openai.errors import ApiError
from paged_client.openai.routing import (
    AVOID_SECONDS,
    LEAST_LOADED,
    LOAD_SLACK,
    MESSAGE_CHARS,
    PROMPT_CHARS,
    HashRing,
    Route,
    Router,
    conversation_key,
    prompt_key,
)
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
    """It has more than 1.25 times the mean of all, and more than 8 above it. Until then it gets every request."""
    router = Router(NAMES, "prefix")
    opened = Counter()
    for _ in range(400):
        server = router.order(Route("the same key"))[0]
        router.open(server)
        opened[server] += 1
        mean = opened.total() / 4
        assert opened[server] <= max(1.25 * mean, mean + 8) + 1
        assert opened.total() > 11 or len(opened) == 1, "passed over although it has not 8 above the mean"
    assert opened.total() == 400 and len(opened) == 4
    assert max(opened.values()) == 125, "passed over although it has not 1.25 times the mean"
    for server, count in opened.items():
        for _ in range(count):
            router.close(server)
    first = HashRing(NAMES).order("the same key")
    assert router.order(Route("the same key")) == first


def test_a_server_that_has_cached_most_of_the_prompt_is_preferred():
    router = Router(NAMES, "prefix")
    first = router.order(Route("key"))
    cached = [0.0] * 4
    cached[first[3]], cached[first[2]], cached[first[1]] = 0.6, 0.9, 0.49
    assert router.order(Route("key", cached)) == [first[2], first[3], first[0], first[1]]
    for _ in range(2 * LOAD_SLACK):
        router.open(first[2])
    assert router.order(Route("key", cached)) == [first[3], first[0], first[1], first[2]], "the holder has too many"


def test_a_server_that_failed_is_tried_last_for_a_while():
    now = [100.0]
    router = Router(NAMES, "prefix", clock=lambda: now[0])
    first = router.order(Route("key"))
    router.open(first[0])
    router.close(first[0], failed=True)
    assert router.order(Route("key")) == [*first[1:], first[0]]
    now[0] += AVOID_SECONDS
    assert router.order(Route("key")) == first


@pytest.mark.parametrize(("policy", "route"), [("round-robin", Route("key")), ("prefix", None)])
def test_servers_in_turn(policy, route):
    router = Router(NAMES, policy)
    assert [router.order(route)[0] for _ in range(6)] == [0, 1, 2, 3, 0, 1]


def test_key_of_a_conversation_is_its_first_turn():
    first = conversation_key([SYSTEM, user("One")])
    assert conversation_key([SYSTEM, user("One"), {"role": "assistant", "content": "x"}, user("Two")]) == first
    assert conversation_key([SYSTEM, user("Two")]) != first
    assert conversation_key([{"role": "system", "content": "Other."}, user("One")]) != first
    assert conversation_key([SYSTEM]) != conversation_key([user("One")])
    long = {"role": "system", "content": "x" * (MESSAGE_CHARS + 1000)}  # the last characters differ
    assert conversation_key([long, user("One")]) != conversation_key([long, user("Two")])


def test_key_of_a_text_is_its_beginning():
    text = "a" * PROMPT_CHARS
    assert prompt_key(text + "b") == prompt_key(text + "c")
    assert prompt_key("b" + text) != prompt_key("c" + text)
    assert prompt_key([1, 2, 3]) != prompt_key([1, 2, 4])


def test_a_request_that_cannot_be_sent_is_not_counted_as_open():
    """Neither are the other prompts of the same request."""

    async def send() -> None:
        async with Servers(["localhost:1", "localhost:2"], "m", is_fixed=True) as servers:
            valid, invalid = (EngineRequest(prompt, None, {}) for prompt in ("a", "\ud800"))
            with pytest.raises(ApiError):
                MergedStream(servers, [valid, invalid], "id", samples=1)
            assert servers._router._num_open == [0, 0]

    asyncio.run(send())


def test_the_least_loaded_server_is_chosen():
    now = [0.0]
    router = Router(NAMES[:3], LEAST_LOADED, lambda: now[0])
    for server in (0, 1, 1, 2):
        router.open(server)
    assert router.order(None)[2] == 1
    router.close(0)
    assert [router.order(None)[0] for _ in range(4)] == [0] * 4
    router.open(0)
    router.close(0, failed=True)
    assert router.order(None) == [2, 1, 0]
    now[0] += AVOID_SECONDS
    assert router.order(None)[0] == 0
