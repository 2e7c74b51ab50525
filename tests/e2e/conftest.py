"""Fixtures of the end-to-end tests: real Triton servers. They live in tests/support/triton.py with the raw clients."""

import pytest

from tests.support.triton import (
    adapted_model,
    adapted_server,
    adapters,
    demo_model,
    demo_server,
    server,
    short_model,
    tiny_server,
    traces,
    two_servers,
)

__all__ = [
    "adapted_model",
    "adapted_server",
    "adapters",
    "demo_model",
    "demo_server",
    "server",
    "short_model",
    "tiny_server",
    "traces",
    "two_servers",
]


@pytest.fixture(scope="session")
def long_model(tmp_path_factory):
    """(directory, model): outputs may be long, for streams that do not end during a test."""
    from transformers import LlamaConfig

    from tests.support.in_process import save_tiny

    directory = tmp_path_factory.mktemp("long")
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1 << 14,
    )
    return directory, save_tiny(config, directory)
