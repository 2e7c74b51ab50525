"""A prefill server and a decode server that share a store, and what happens when the store fails."""

import json

import pytest

from paged_client import Client, PagedError
from paged_client.serving.tritonserver import TritonServer
from tests.support.in_process import byte_tokenizer, generate_with_transformers
from tests.support.processes import needs_server
from tests.support.redis_server import needs_redis, running_redis
from tests.support.triton import metrics, post
from tests.support.waiting import until

pytestmark = [needs_redis, needs_server, pytest.mark.nightly]
TEXT = "Call me Ishmael. Some years ago--never mind how long precisely--having little or no money, "
OPTIONS = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 256, "max_num_seqs": 4}
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}
PASSWORD, SECRET = "password of the store", "secret that the servers share"
TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with running_redis(tmp_path_factory.mktemp("redis"), password=PASSWORD) as made:
        yield made


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    """The environment variables of a server with the secrets."""
    file = tmp_path_factory.mktemp("secrets") / "password"
    file.write_text(PASSWORD + "\n")
    return {"PAGED_REMOTE_CACHE_PASSWORD_FILE": str(file), "PAGED_REMOTE_CACHE_SECRET": SECRET}


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    """The directory of the tiny model, with a chat template."""
    directory = tmp_path_factory.mktemp("chat")
    for file in tiny[0].iterdir():
        (directory / file.name).symlink_to(file)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def options(store):
    tier = {"remote_cache_url": store.url, "swap_space": 0.01, "tier_read_mode": "always"}
    return OPTIONS | tier | {"remote_cache_timeout_ms": 10_000}


@pytest.fixture(scope="module")
def decode(model, options, secrets):
    with TritonServer(model, options, engine_only=True, environment=secrets) as server:
        yield server


@pytest.fixture(scope="module")
def prefill(model, options, secrets):
    with TritonServer(model, options, engine_only=True, environment=secrets) as server:
        yield server


@pytest.fixture(scope="module")
def pair(prefill, decode):
    """Clients of the prefill server and the decode server."""
    with Client(prefill.grpc_url) as first, Client(decode.grpc_url) as second:
        yield first, second


def expected(tiny, text):
    tokens = generate_with_transformers(tiny[1], list(byte_tokenizer()(text).input_ids), 8)
    return whole(byte_tokenizer().decode(tokens))


def whole(text):
    """Return the text without the bytes of a character that is not complete at its end."""
    return text.rstrip("\ufffd")


def ask(pair, prompt=None, **arguments):
    """Compute a prompt with the prefill server, and return the text and the cached tokens of the decode server."""
    prefill, decode = pair
    prefill.generate(prompt, prefill_only=True, **arguments)
    answer = decode.generate(prompt, **GREEDY, **arguments)
    return whole(answer.text), answer.receipt["cached_tokens"]


def full_blocks(prompt):
    """Return the tokens of a prompt that a server can find in a cache."""
    return (len(prompt) - 1) // 4 * 4


def test_decode_server_continues_from_the_blocks_of_the_prefill_server(pair, tiny, prefill):
    prompt = "One: " + TEXT
    written = metrics(prefill).get("paged_remote_blocks_written_total", 0)
    assert ask(pair, prompt) == (expected(tiny, prompt), full_blocks(prompt))
    assert metrics(prefill)["paged_remote_blocks_written_total"] == written + len(prompt) // 4


def test_conversation(pair, tiny):
    prompt = f"system: Be brief.\nuser: {TEXT}\nassistant:"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    assert ask(pair, messages=messages) == (expected(tiny, prompt), full_blocks(prompt))


def test_tenants_are_isolated(pair):
    prompt = "Two: " + TEXT
    text, cached = ask(pair, prompt, cache_salt="one")
    assert cached == full_blocks(prompt)
    answer = pair[1].generate(prompt, cache_salt="two", **GREEDY)
    assert (whole(answer.text), answer.receipt["cached_tokens"]) == (text, 0)


def test_two_requests_over_http(prefill, decode, tiny):
    prompt = "Three: " + TEXT
    receipts = []
    for server, fields in ((prefill, {"sampling_parameters": '{"prefill_only": true}'}), (decode, GREEDY)):
        status, reply = post(server, {"text_input": prompt, "return_receipt": True} | fields)
        assert status == 200, reply
        receipts.append(json.loads(json.loads(reply)["receipt"]))
    assert receipts[0]["stored_tokens"] == len(prompt) // 4 * 4
    assert receipts[1]["cached_tokens"] == full_blocks(prompt)
    assert whole(json.loads(reply)["text_output"]).endswith(expected(tiny, prompt))


def test_prefill_only_needs_a_remote_cache(tiny_server):
    needs = r"prefill_only=true: needs a remote cache, which is off \(remote_cache_url\)"
    with Client(tiny_server.grpc_url) as client, pytest.raises(PagedError, match=needs):
        client.generate("x", prefill_only=True)


def test_prefill_only_is_rejected_in_a_session(prefill):
    with Client(prefill.grpc_url) as client, pytest.raises(PagedError, match="prefill_only=true: must be false in a"):
        client.generate("x", prefill_only=True, sequence_id=1, sequence_start=True)


def test_second_server_reuses_blocks_and_survives_the_loss_of_the_store(pair, store, prefill, decode, tiny):
    """The store fails, and then works again. No prompt begins with the letter of another: that would be a partial hit
    of one token."""

    def check(name, cached):
        prompt = f"{name}: {TEXT}"
        assert ask(pair, prompt) == (expected(tiny, prompt), full_blocks(prompt) if cached else 0)

    read = metrics(decode)["paged_remote_blocks_read_total"]
    check("all work", True)
    now = metrics(decode)
    assert now["paged_remote_tier_up"] == 1
    assert now["paged_remote_blocks_read_total"] == read + full_blocks("all work: " + TEXT) // 4
    assert now["paged_cache_tier_block_seconds{remote}"] > 0
    assert pair[0].generate("lost: " + TEXT, prefill_only=True).receipt["stored_tokens"]
    store.kill()
    answer = pair[1].generate("lost: " + TEXT, **GREEDY)
    assert (whole(answer.text), answer.receipt["cached_tokens"]) == (expected(tiny, "lost: " + TEXT), 0)
    until(lambda: metrics(decode)["paged_remote_tier_up"] == 0, "the end of the tier")
    assert metrics(decode)["paged_remote_tier_disabled_total"] >= 1
    assert "the remote cache is disabled" in decode.log()
    check("no store", False)
    store.start()
    for server in (prefill, decode):
        until(lambda server=server: metrics(server)["paged_remote_tier_up"] == 1, "the store")
    check("up again", True)
    assert not any(secret in server.log() for secret in (PASSWORD, SECRET) for server in (prefill, decode))
