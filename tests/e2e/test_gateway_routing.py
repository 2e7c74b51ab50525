"""The gateway in front of two real servers: requests go to the server that has cached their prompt."""

import time
from collections import Counter
from contextlib import ExitStack

import pytest

from paged_client import Client
from paged_client.openai.routing import HashRing, conversation_key, prompt_key
from paged_client.serving.ports import choose_ports
from paged_client.serving.tritonserver import TritonServer
from tests.support.gateway import gateway
from tests.support.in_process import byte_tokenizer
from tests.support.waiting import WAIT

TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant:"
PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. "


@pytest.fixture(scope="module")
def servers(tiny):
    """(server, endpoints of its events) of two servers"""
    with ExitStack() as stack:
        made = []
        for _ in range(2):
            endpoints = [f"tcp://127.0.0.1:{port}" for port in choose_ports(events=0, replay=0)]
            events = dict(zip(("endpoint", "replay_endpoint"), endpoints, strict=True))
            options = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 256}
            options |= {"kv_events_config": {"enable_kv_cache_events": True} | events}
            server = TritonServer(tiny[0], options, engine_only=True)
            made.append((stack.enter_context(server), ",".join(endpoints)))
        yield made


@pytest.fixture(scope="module")
def front(servers, tiny, tmp_path_factory):
    directory, tokenizer = tmp_path_factory.mktemp("tokenizer"), byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    flags = [part for server, endpoints in servers for part in ("--url", server.grpc_url, "--kv-events", endpoints)]
    with gateway(flags[1], *flags[2:], "--tokenizer", str(directory)) as made:
        yield made


def ring_choice(servers, key):
    return HashRing([server.grpc_url for server, _ in servers]).order(key)[0]


def cached_tokens(front, prompt):
    """Ask the gateway for a completion and return how many tokens of the prompt were cached."""
    status, answer = front.ask("/v1/completions", {"model": "paged_llm", "prompt": prompt, "max_tokens": 1})
    assert status == 200, answer
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_requests_go_to_the_server_that_has_cached_their_prompt(front, servers):
    """The prompt was computed by the server that hashing would not choose."""
    deadline, number = time.monotonic() + WAIT, 0
    while True:
        prompt = f"{number}. {PROMPT}"
        other, _ = servers[1 - ring_choice(servers, prompt_key(prompt))]
        with Client(other.grpc_url) as client:
            tokens = client.generate(prompt, max_tokens=1).num_input_tokens
        if cached_tokens(front, prompt) >= tokens // 2:
            break
        number += 1  # the gateway had not subscribed yet, or the event was on its way
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_first_turn_is_hashed(front, servers):
    """So conversations with one system prompt are spread over both servers, though only one has cached it at first."""
    system, hits, chosen = {"role": "system", "content": PROMPT * 2}, 0, Counter()
    while chosen[0] < 3 or chosen[1] < 3:
        messages = [system, {"role": "user", "content": f"Number {chosen.total()}"}]
        chosen[ring_choice(servers, conversation_key(messages))] += 1
        status, answer = front.ask(
            "/v1/chat/completions", {"model": "paged_llm", "messages": messages, "max_tokens": 1}
        )
        assert status == 200, answer
        hits += answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert hits == chosen.total() - 2, "each of the two servers computes the system prompt once"


def test_a_conversation_continues_after_the_loss_of_its_server(front, servers):
    """The other server computes it again from its text, once. The last test: it kills one of the servers."""
    messages = [{"role": "user", "content": PROMPT * 2}]
    lost = ring_choice(servers, conversation_key(messages))
    hits = []
    for turn in range(4):
        status, answer = front.ask(
            "/v1/chat/completions", {"model": "paged_llm", "messages": messages, "max_tokens": 1}
        )
        assert status == 200, answer
        hits.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        if turn == 1:
            servers[lost][0].kill()
    assert hits == [False, True, False, True]
