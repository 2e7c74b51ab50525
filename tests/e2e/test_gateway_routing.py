"""The gateway in front of two real servers: requests go to the server that has cached their prompt."""

import time
from collections import Counter
from contextlib import ExitStack
from itertools import count

import pytest

from paged_client import Client
from paged_client.openai.routing import HashRing, conversation_key, prompt_key
from tests.support.forwarding import Forwarder
from tests.support.gateway import gateway
from tests.support.in_process import byte_tokenizer
from tests.support.waiting import WAIT

pytestmark = pytest.mark.nightly
TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant:"
PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. "


@pytest.fixture(scope="module")
def doors(two_servers):
    """The ports that the gateway knows of the two servers. A closed one is like a server that is lost."""
    with ExitStack() as stack:
        yield [stack.enter_context(Forwarder(server.grpc_port)) for server, _ in two_servers]


@pytest.fixture(scope="module")
def front(two_servers, doors, tmp_path_factory):
    directory, tokenizer = tmp_path_factory.mktemp("tokenizer"), byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    pairs = [(url, endpoints) for url, (_, endpoints) in zip(urls(doors), two_servers, strict=True)]
    flags = [part for url, endpoints in pairs for part in ("--url", url, "--kv-events", endpoints)]
    with gateway(flags[1], *flags[2:], "--tokenizer", str(directory)) as made:
        yield made


def urls(doors):
    return [f"localhost:{door.server_address[1]}" for door in doors]


def ring_choice(doors, key):
    return HashRing(urls(doors)).order(key)[0]


def cached_tokens(front, prompt):
    """Ask the gateway for a completion and return how many tokens of the prompt were cached."""
    status, answer = front.ask("/v1/completions", {"model": "paged_llm", "prompt": prompt, "max_tokens": 1})
    assert status == 200, answer
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_requests_go_to_the_server_that_has_cached_their_prompt(front, doors, two_servers):
    """Each prompt was computed by the server that hashing would not choose. A random choice would miss some."""
    numbers = count()

    def fresh(text):
        """Return a prompt that hashing sends to the first server."""
        prompts = (f"{number}. {text}" for number in numbers)
        return next(prompt for prompt in prompts if ring_choice(doors, prompt_key(prompt)) == 0)

    def compute(prompt):
        """Compute the prompt on the second server, and return half of its number of tokens."""
        return client.generate(prompt, max_tokens=1).num_input_tokens // 2

    def wait_for_events():
        """Wait until the gateway knows what was computed so far: events arrive in order."""
        deadline = time.monotonic() + WAIT
        while compute(prompt := fresh(PROMPT[:20])) > cached_tokens(front, prompt):
            assert time.monotonic() < deadline
            time.sleep(0.1)

    with Client(two_servers[1][0].grpc_url) as client:
        wait_for_events()
        asked = [(prompt, compute(prompt)) for prompt in (fresh(PROMPT) for _ in range(8))]
        wait_for_events()
    assert [prompt for prompt, least in asked if cached_tokens(front, prompt) < least] == []


def test_a_first_turn_is_hashed(front, doors):
    """So conversations with one system prompt are spread over both servers, though only one has cached it at first."""
    system, hits, chosen = {"role": "system", "content": PROMPT * 2}, 0, Counter()
    while chosen[0] < 3 or chosen[1] < 3:
        messages = [system, {"role": "user", "content": f"Number {chosen.total()}"}]
        chosen[ring_choice(doors, conversation_key(messages))] += 1
        status, answer = front.ask(
            "/v1/chat/completions", {"model": "paged_llm", "messages": messages, "max_tokens": 1}
        )
        assert status == 200, answer
        hits += answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert hits == chosen.total() - 2, "each of the two servers computes the system prompt once"


def test_a_conversation_continues_after_the_loss_of_its_server(front, doors):
    """The other server computes it again from its text, once. The last test: the gateway loses one of the servers."""
    messages = [{"role": "user", "content": PROMPT * 2}]
    lost = ring_choice(doors, conversation_key(messages))
    hits = []
    for turn in range(4):
        status, answer = front.ask(
            "/v1/chat/completions", {"model": "paged_llm", "messages": messages, "max_tokens": 1}
        )
        assert status == 200, answer
        hits.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        if turn == 1:
            doors[lost].close()
    assert hits == [False, True, False, True]
