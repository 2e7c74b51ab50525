"""The option `kv_events_config`."""

import pytest

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.kv_events import KvEventsConfig


def read(value):
    return EngineConfig.from_options({"model": "m", "kv_events_config": value}).kv_events_config


def test_events_are_off_unless_they_are_enabled():
    assert not read(None).is_enabled
    assert not read({}).is_enabled
    assert not read({"enable_kv_cache_events": True, "publisher": "null"}).is_enabled
    assert read({"enable_kv_cache_events": True}).is_enabled


def test_events_are_published_on_this_machine_only_by_default():
    assert KvEventsConfig().endpoint == "tcp://127.0.0.1:5557"


def test_fields_are_those_of_vllm():
    given = {
        **{"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv@a@m"},
        **{"replay_endpoint": "tcp://*:5558", "buffer_steps": 7, "hwm": 8, "max_queue_size": 9},
    }
    assert read(given) == KvEventsConfig(**given)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (3, "kv_events_config=3: must be an object"),
        ({"endpiont": "x"}, "kv_events_config.endpiont: unknown field; did you mean kv_events_config.endpoint"),
        ({"buffer_steps": 0}, "kv_events_config.buffer_steps=0: must be a whole number of at least 1"),
        ({"publisher": "kafka"}, "kv_events_config.publisher=.*must be"),
        ({"topic": 1}, "kv_events_config.topic=1: must be a string"),
    ],
)
def test_invalid_values_are_rejected_by_name(value, problem):
    with pytest.raises(ConfigError, match=problem):
        read(value)
