"""Classification and reranking through a real Triton server, the client and the gateway."""

import json
import re
import urllib.request

import pytest
import torch

from paged_client import Client, PagedError
from paged_client.cli import main
from paged_client.serving.launch import ready_message
from paged_client.serving.tritonserver import TritonServer
from tests.support.classifiers import TEMPLATE, save_classifier, scores_of
from tests.support.gateway import gateway
from tests.support.in_process import TINY, byte_tokenizer
from tests.support.processes import needs_server

pytestmark = [needs_server, pytest.mark.nightly]
DOCUMENTS = ["The sea is blue.", "A hat.", "Waves are water."]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("classifier")
    return directory, save_classifier(directory, labels={0: "relevant"})


@pytest.fixture(scope="module")
def classifier(model):
    with TritonServer(model[0], {**TINY, "chat_template": TEMPLATE}, engine_only=True) as running:
        yield running


def expected(model, document):
    prompt = byte_tokenizer().encode(f"query: Sea?\ndocument: {document}\n")
    return torch.sigmoid(scores_of(model[1], prompt)).item()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_client(classifier, model, protocol):
    with Client(getattr(classifier, f"{protocol}_url"), classifier.model_name, protocol) as client:
        found = client.classify(query="Sea?", document=DOCUMENTS[0], priority=1)
        assert found.label == "relevant"
        assert found.probs == pytest.approx([expected(model, DOCUMENTS[0])], rel=1e-3)
        assert found.num_input_tokens == len(f"query: Sea?\ndocument: {DOCUMENTS[0]}\n")
        score = client.classify(byte_tokenizer().encode("abc"), use_activation=False).probs
        assert score == pytest.approx(scores_of(model[1], byte_tokenizer().encode("abc")).tolist(), rel=1e-3)
        with pytest.raises(PagedError, match="this model classifies prompts and generates no text"):
            client.generate("abc")
        with pytest.raises(ValueError, match="query: give either input, messages, or query and document"):
            client.classify(query="a")


def test_the_command_to_try_works(classifier):
    curl, gateway_line = ready_message(classifier, None).splitlines()[2:4]
    url, body = re.fullmatch(r"  curl (\S+) -d '(.*)'", curl).groups()
    with urllib.request.urlopen(f"http://{url}", body.encode()) as reply:
        assert json.loads(json.load(reply)["text_output"])["label"] == "relevant"
    assert f"openai --url {classifier.grpc_url} " in gateway_line


def test_probe(classifier):
    assert main(["probe", "--url", classifier.grpc_url, "--model", classifier.model_name]) == 0


def test_gateway(classifier, model):
    with gateway(classifier.grpc_url, "--model", classifier.model_name) as front:
        status, body = front.ask(
            "/v1/rerank", {"model": classifier.model_name, "query": "Sea?", "documents": DOCUMENTS}
        )
        assert status == 200, json.dumps(body)
        scores = {one["document"]["text"]: one["relevance_score"] for one in body["results"]}
        assert scores == pytest.approx({one: expected(model, one) for one in DOCUMENTS}, rel=1e-3)
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
        for path, prompt in (
            ("/v1/completions", {"prompt": "abc"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
        ):
            status, body = front.ask(path, {"model": classifier.model_name, **prompt})
            assert (status, body["error"]["param"]) == (400, "model")
            reason = "this model classifies prompts and generates no text; use /classify, /score or /rerank"
            assert body["error"]["message"] == f"model: {reason}"
