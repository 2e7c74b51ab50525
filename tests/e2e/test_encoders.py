"""A sentence encoder through a real Triton server, the client and the gateway."""

import json
import re
import urllib.request

import pytest
import torch
from transformers import BertConfig

from paged_client import Client, PagedError
from paged_client.cli import main
from paged_client.serving.launch import ready_message
from paged_client.serving.tritonserver import TritonServer
from tests.support.classifiers import SIZES
from tests.support.encoders import CLS, SEP, hidden_states, save_encoder
from tests.support.gateway import gateway
from tests.support.in_process import byte_tokenizer
from tests.support.processes import needs_server

pytestmark = [needs_server, pytest.mark.nightly]
TEXTS = ["The sea is blue.", "A hat.", "Waves are water."]
CONFIG = BertConfig(**{name: size for name, size in SIZES.items() if name != "num_key_value_heads"})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("encoder") / "model"
    return directory, save_encoder(directory, CONFIG, {"pooling_mode": "mean"})


@pytest.fixture(scope="module")
def encoder(model):
    with TritonServer(model[0], {"dtype": "float32", "device": "cpu"}, engine_only=True) as running:
        yield running


def expected(model, text):
    mean = hidden_states(model[1], [CLS, *byte_tokenizer().encode(text), SEP]).mean(0)
    return pytest.approx(torch.nn.functional.normalize(mean, dim=0).tolist(), abs=1e-5)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_client(encoder, model, protocol):
    with Client(getattr(encoder, f"{protocol}_url"), encoder.model_name, protocol) as client:
        found = client.embed(TEXTS[0])
        assert (found.values, found.num_input_tokens) == (expected(model, TEXTS[0]), len(TEXTS[0]) + 2)
        with pytest.raises(PagedError, match="this model embeds prompts and generates no text; use embedding_request"):
            client.generate("abc")


def test_the_command_to_try_works(encoder, model):
    curl, gateway_line = ready_message(encoder, None).splitlines()[2:4]
    url, body = re.fullmatch(r"  curl (\S+) -d '(.*)'", curl).groups()
    with urllib.request.urlopen(f"http://{url}", body.encode()) as reply:
        assert json.loads(json.load(reply)["text_output"]) == expected(model, "A great film.")
    assert f"openai --url {encoder.grpc_url} " in gateway_line


def test_probe(encoder):
    assert main(["probe", "--url", encoder.grpc_url, "--model", encoder.model_name]) == 0


def test_gateway(encoder, model):
    with gateway(encoder.grpc_url, "--model", encoder.model_name) as front:
        status, body = front.ask("/v1/embeddings", {"model": encoder.model_name, "input": TEXTS})
        assert status == 200, json.dumps(body)
        assert [one["embedding"] for one in body["data"]] == [expected(model, text) for text in TEXTS]
        messages = [{"role": "user", "content": "abc"}]
        status, body = front.ask("/v1/chat/completions", {"model": encoder.model_name, "messages": messages})
        assert (status, body["error"]["param"]) == (400, "model")
        reason = "this model embeds prompts and generates no text; use /v1/embeddings"
        assert body["error"]["message"] == f"model: {reason}"
