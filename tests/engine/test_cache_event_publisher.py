"""KV cache events over ZeroMQ, in vLLM's format."""

from contextlib import suppress

import msgspec
import pytest
import zmq

from paged_backend.api.config import KvEventsConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.request import Origin
from paged_backend.engine.cache_event_publisher import END_OF_REPLAY, CacheEventPublisher
from paged_backend.kv.content import DEVICE, CacheEvent, Entry
from paged_client.serving.ports import choose_ports
from tests.support.in_process import WAIT, running, tiny_assembly

OPTIONS = {"enable_kv_cache_events": True, "topic": "kv"}


def endpoints():
    pub, replay = choose_ports(pub=0, replay=0)
    return {"endpoint": f"tcp://127.0.0.1:{pub}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}


class Subscriber:
    """A router's side of the sockets."""

    def __init__(self, endpoint, replay_endpoint, topic=b"kv"):
        self.context, self.endpoint, self.replay_endpoint = zmq.Context(), endpoint, replay_endpoint
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic)
        self.sub.setsockopt(zmq.RCVTIMEO, 1000 * WAIT)
        self.sub.connect(endpoint)
        self.req = self.context.socket(zmq.DEALER)
        self.req.setsockopt(zmq.RCVTIMEO, 1000 * WAIT)
        self.req.connect(replay_endpoint)

    def __enter__(self):
        return self

    def __exit__(self, *reason):
        self.context.destroy(linger=0)

    def replay(self, first):
        """Return the past batches from number `first` on, by number."""
        self.req.send_multipart((b"", first.to_bytes(8, "big")))
        batches = {}
        while True:
            empty, number, payload = self.req.recv_multipart()
            assert empty == b""
            if number == END_OF_REPLAY:
                return batches
            batches[int.from_bytes(number, "big")] = msgspec.msgpack.decode(payload)


class Listener:
    """Gives a publisher the changes of one pool."""

    def __init__(self, publisher, medium=DEVICE):
        self._events, self._medium = publisher.events, medium

    def stored(self, entry):
        self._events.append(CacheEvent(True, entry, self._medium))

    def removed(self, entry):
        self._events.append(CacheEvent(False, entry, self._medium))


@pytest.fixture
def published():
    """(listener, publisher, subscriber)"""
    places = endpoints()
    publisher = CacheEventPublisher(KvEventsConfig(**OPTIONS, **places), block_size=2)
    with Subscriber(**places) as subscriber:
        yield Listener(publisher), publisher, subscriber
        publisher.close()


def entries(count, adapter=b""):
    """Return the entries of a prefix of blocks."""
    made, parent = [], Origin("", adapter)
    for number in range(count):
        parent = Entry(parent, (number, number + 100))
        made.append(parent)
    return made


def test_batches_have_the_format_of_vllm(published):
    device, publisher, subscriber = published
    start = min(subscriber.replay(0))
    first, second, third = entries(3)
    for entry in (first, second, Entry(second, (7,))):  # the last block is not full, so no other server can use it
        device.stored(entry)
    publisher.publish()
    publisher.publish()  # nothing new: no batch
    device.removed(second)
    device.removed(first)
    device.stored(third)
    publisher.publish()
    while len(found := subscriber.replay(0)) < 3:
        pass
    batches = {number - start: batch for number, batch in found.items()}
    assert batches[0][1] == [["AllBlocksCleared"]]
    hashes = [int.from_bytes(entry.key[-8:], "big") for entry in (first, second, third)]
    assert batches[1][1] == [["BlockStored", hashes[:2], None, [0, 100, 1, 101], 2, None, "GPU", None]]
    assert batches[2][1] == [
        ["BlockRemoved", [hashes[1], hashes[0]], "GPU"],
        ["BlockStored", [hashes[2]], hashes[1], [2, 102], 2, None, "GPU", None],
    ]
    assert batches[1][0] <= batches[2][0] and batches[1][2] == 0
    assert list(subscriber.replay(start + 2)) == [start + 2]


def test_a_slow_client_gets_all_past_batches(published):
    """They are more than the queues between the two hold."""
    device, publisher, subscriber = published
    count, start = 3000, min(subscriber.replay(0))

    def publish(number):
        device.stored(Entry(Origin("", b""), tuple(range(number, number + 1000))))
        publisher.publish()

    for number in range(count):
        publish(number)
    while not subscriber.replay(start + count):
        pass
    subscriber.sub.setsockopt(zmq.RCVTIMEO, 50)
    slow = subscriber.context.socket(zmq.DEALER)
    slow.set_hwm(1)
    slow.setsockopt(zmq.RCVTIMEO, 1000 * WAIT)
    slow.connect(subscriber.replay_endpoint)
    slow.send_multipart((b"", (0).to_bytes(8, "big")))
    published_since = 0
    while published_since < 3:  # the request is read meanwhile
        publish(count + published_since)
        with suppress(zmq.Again):
            subscriber.sub.recv_multipart()
            published_since += 1
    numbers = []
    while (number := slow.recv_multipart()[1]) != END_OF_REPLAY:
        numbers.append(int.from_bytes(number, "big"))
    assert len(numbers) > count
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_a_client_cannot_fill_memory(published):
    """Neither with a request of megabytes, which is read whole, nor with topics."""
    _, _, subscriber = published
    first = subscriber.replay(0)
    for kind, endpoint in ((zmq.DEALER, subscriber.replay_endpoint), (zmq.XSUB, subscriber.endpoint)):
        stranger = subscriber.context.socket(kind)
        ended = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        ended.setsockopt(zmq.RCVTIMEO, 1000 * WAIT)
        stranger.connect(endpoint)
        stranger.send(b"\1" + bytes(10_000))
        assert ended.recv_multipart()
        stranger.close(linger=0)
    assert subscriber.replay(0) == first


def test_batches_beyond_the_queue_are_dropped_with_a_warning(caplog):
    publisher = CacheEventPublisher(KvEventsConfig(**OPTIONS | {"max_queue_size": 1}, **endpoints()), block_size=2)
    publisher.close()  # nothing is sent any more
    for entry in entries(2):
        Listener(publisher).stored(entry)
        publisher.publish()
    assert publisher._batches.qsize() == 1
    assert "KV cache events were dropped: max_queue_size" in caplog.text


def test_a_client_cannot_fill_the_log(published, caplog):
    _, _, subscriber = published
    stranger = subscriber.context.socket(zmq.DEALER)
    stranger.connect(subscriber.replay_endpoint)
    for _ in range(50):
        stranger.send_multipart([b"", b"no number"])
    stranger.send_multipart([b"", bytes(8)])
    assert stranger.poll(1000 * WAIT)  # all requests have been read
    assert caplog.text.count("a request for past KV cache events has 3 parts") == 1
    stranger.close(linger=0)


def test_the_numbers_of_a_restarted_publisher_are_higher(published):
    _, publisher, subscriber = published
    before = max(subscriber.replay(0))
    publisher.close()
    places = endpoints()
    restarted = CacheEventPublisher(KvEventsConfig(**OPTIONS, **places), block_size=2)
    with Subscriber(**places) as other:
        assert min(other.replay(before)) > before + 1
    restarted.close()


def test_subscribers_get_numbered_messages(published):
    """A subscriber may connect after the first batches; it asks for those that it missed."""
    device, publisher, subscriber = published
    entry = entries(1)[0]
    received = []
    subscriber.sub.setsockopt(zmq.RCVTIMEO, 50)
    while not received:
        device.stored(entry)
        publisher.publish()
        try:
            received.append(subscriber.sub.recv_multipart())
        except zmq.Again:
            continue
    topic, number, payload = received[0]
    assert topic == b"kv"
    assert msgspec.msgpack.decode(payload) == subscriber.replay(0)[int.from_bytes(number, "big")]


def test_blocks_of_an_adapter_have_its_number_and_a_name(published):
    device, publisher, subscriber = published
    device.stored(entries(1, b"\0\0\1\2rest")[0])
    publisher.publish()
    while len(batches := subscriber.replay(0)) < 2:
        pass
    (event,) = batches[max(batches)][1]
    assert (event[5], event[7]) == (258, b"\0\0\1\2rest".hex())


def test_an_engine_publishes_what_it_caches(tiny):
    places = endpoints()
    assembly = tiny_assembly(tiny[0], kv_events_config=OPTIONS | places, block_size=4, enable_prefix_caching=True)
    with Subscriber(**places) as subscriber:
        with running(assembly) as engine:
            engine.generate([list(range(10, 19))], max_tokens=4)
            while len(batches := subscriber.replay(0)) < 2:
                pass
        del batches[min(batches)]  # AllBlocksCleared
        stored = [event for _, events, _ in batches.values() for event in events]
        assert {event[0] for event in stored} == {"BlockStored"}
        assert stored[0][3][:8] == list(range(10, 18))
        assert stored[0][4] == 4


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_an_endpoint_that_cannot_be_bound_is_named(name):
    config = KvEventsConfig(**OPTIONS, **endpoints() | {name: "tcp://256.0.0.1:1"})
    with pytest.raises(ConfigError, match=rf'kv_events_config.{name}="tcp://256.0.0.1:1": '):
        CacheEventPublisher(config, block_size=2)


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_an_endpoint_of_another_server_ends_the_load(tmp_path, name):
    taken = endpoints()
    other = CacheEventPublisher(KvEventsConfig(**OPTIONS, **taken), block_size=2)
    places = endpoints() | {name: taken[name]}
    with pytest.raises(ConfigError, match=rf"kv_events_config\.{name}=.*Address already in use"):
        tiny_assembly(tmp_path / "none", kv_events_config=OPTIONS | places, enable_prefix_caching=True)
    other.close()


def test_endpoints_are_bound_before_the_model_is_loaded(tmp_path):
    """And are free after a load that failed."""
    places = endpoints()
    invalid = places | {"endpoint": "tcp://256.0.0.1:1"}
    with pytest.raises(ConfigError, match=r"kv_events_config\.endpoint="):
        tiny_assembly(tmp_path / "none", kv_events_config=OPTIONS | invalid, enable_prefix_caching=True)
    with pytest.raises(ConfigError, match="none"):
        tiny_assembly(tmp_path / "none", kv_events_config=OPTIONS | places, enable_prefix_caching=True)
    publisher = CacheEventPublisher(KvEventsConfig(**OPTIONS, **places), block_size=2)
    publisher.close()
