"""A model with a chat template that has a variable, as Qwen3's does."""

import shutil

import pytest
from transformers import AutoTokenizer

from paged_client import Client, PagedError
from paged_client.serving.tritonserver import TritonServer
from tests.support.gateway import gateway
from tests.support.triton import idle, post

TEMPLATE = (
    "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}-{% else %}+{% endif %}"
)
MESSAGES = [{"role": "user", "content": "x"}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
OPTIONS = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 64, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    directory = tmp_path_factory.mktemp("settings") / "model"
    shutil.copytree(tiny[0], directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def served(model):
    with TritonServer(model, OPTIONS) as running:
        yield running
        idle(running)


@pytest.fixture
def client(served):
    with Client(served.grpc_url) as made:
        yield made


@pytest.fixture(scope="module")
def decode(model):
    return AutoTokenizer.from_pretrained(model).decode


class TestTemplateVariables:
    def test_client(self, client, decode):
        def prompt(**more):
            return decode(
                client.generate(messages=MESSAGES, max_tokens=1, return_token_ids=True, **more).prompt_token_ids
            )

        assert prompt() == "[x]+"
        assert prompt(**NO_THINKING) == "[x]-"
        assert prompt(chat_template_kwargs={"enable_thinking": True, "unused": [1]}) == "[x]+"
        with pytest.raises(PagedError, match="chat_template_kwargs: tokenize: is set by the server; leave it out"):
            prompt(chat_template_kwargs={"tokenize": True})

    def test_session_does_not_keep_them(self, client, decode):
        with client.conversation(max_tokens=1, return_token_ids=True, ignore_eos=True) as talk:
            first = talk.generate(messages=MESSAGES, **NO_THINKING)
            second = talk.generate(messages=MESSAGES)
        assert decode(first.prompt_token_ids) == "[x]-"
        assert decode(second.prompt_token_ids) == f"[x][{first.text}][x]+"

    def test_http(self, served):
        body = {"messages": '[{"role": "user", "content": "x"}]', "max_tokens": 1}
        assert post(served, body | {"chat_template_kwargs": '{"enable_thinking": false}'})[0] == 200
        status, text = post(served, body | {"chat_template_kwargs": "[]"})
        assert status == 400
        assert "INVALID_ARGUMENT: chat_template_kwargs: must be a JSON object" in text

    @pytest.mark.parametrize("own_template", [False, True], ids=["server's", "gateway's"])
    def test_gateway(self, served, model, decode, own_template):
        flags = ["--tokenizer", str(model)] if own_template else []
        body = {"model": "paged_llm", "messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
        with gateway(served.grpc_url, *flags) as front:

            def ask(**more):
                return front.ask("/v1/chat/completions", body | more)

            assert decode(ask()[1]["prompt_token_ids"]) == "[x]+"
            assert decode(ask(**NO_THINKING)[1]["prompt_token_ids"]) == "[x]-"
            status, answer = ask(chat_template_kwargs={"messages": []})
        assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")
        assert answer["error"]["message"] == "chat_template_kwargs: messages: is set by the server; leave it out"
