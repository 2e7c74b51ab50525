"""A fake server and a gateway in front of it, which all tests of this folder share."""

from functools import partial

import openai
import pytest

from tests.support.gateway import WAIT, gateway, recording_server, respond_with


@pytest.fixture(scope="package")
def fake():
    with recording_server() as seen:
        yield seen


@pytest.fixture(scope="package")
def front(fake):
    with gateway(fake.url, "--max-request-bytes", "4096", "--max-prompts", "3") as made:
        yield made


@pytest.fixture
def says(fake):
    return partial(respond_with, fake)


@pytest.fixture
def client(front):
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=WAIT) as made:
        yield made
