"""A model with a variable and marks of reasoning in its chat template and sampling parameters in its
generation_config.json, like Qwen3."""

import json

import pytest

from paged_client import Client, PagedError, cli
from tests.support.client_calls import standard_input
from tests.support.gateway import gateway
from tests.support.triton import post

MESSAGES = [{"role": "user", "content": "x"}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
LIKE_DEFAULTS = {"temperature": 0, "repetition_penalty": 1.4, "max_tokens": 7}
PLAIN = {"temperature": 0, "repetition_penalty": 1.0, "max_tokens": 7}
PROMPT = {"prompt": "abcabc", "ignore_eos": True}


@pytest.fixture
def client(adapted_server):
    with Client(adapted_server.grpc_url) as made:
        yield made


@pytest.fixture(scope="module")
def decode(adapted_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(adapted_model).decode


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

    def test_http(self, adapted_server):
        body = {"messages": '[{"role": "user", "content": "x"}]', "max_tokens": 1}
        assert post(adapted_server, body | {"chat_template_kwargs": '{"enable_thinking": false}'})[0] == 200
        status, text = post(adapted_server, body | {"chat_template_kwargs": "[]"})
        assert status == 400
        assert "INVALID_ARGUMENT: chat_template_kwargs: must be a JSON object" in text

    @pytest.mark.parametrize("own_template", [False, True], ids=["server's", "gateway's"])
    def test_gateway(self, adapted_server, adapted_model, decode, own_template):
        flags = ["--tokenizer", str(adapted_model)] if own_template else []
        body = {"model": "paged_llm", "messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
        with gateway(adapted_server.grpc_url, *flags) as front:

            def ask(**more):
                return front.ask("/v1/chat/completions", body | more)

            assert decode(ask()[1]["prompt_token_ids"]) == "[x]+"
            assert decode(ask(**NO_THINKING)[1]["prompt_token_ids"]) == "[x]-"
            status, answer = ask(chat_template_kwargs={"messages": []})
        assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")
        assert answer["error"]["message"] == "chat_template_kwargs: messages: is set by the server; leave it out"


class TestThinkingBudget:
    """Reasoning that the prompt opens ends after 4 tokens. A mark has several tokens."""

    def test_client(self, client, decode):
        asked = {"prompt": "abc<think>", "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
        free = client.generate(**asked).token_ids
        limited = client.generate(**asked, thinking_token_budget=4).token_ids
        assert limited[:4] == free[:4]
        assert decode(limited[4:12]) == "</think>" and len(limited) == 16
        assert client.generate(**asked, thinking_token_budget=-1).token_ids == free
        with pytest.raises(PagedError, match=r"thinking_token_budget=4: must be null: .* may exclude token"):
            client.generate(**asked, thinking_token_budget=4, bad_words=["</think>"])

    def test_gateway(self, adapted_server):
        own = {"model": "paged_llm", "max_tokens": 16, "thinking_token_budget": 4, "ignore_eos": True}
        with gateway(adapted_server.grpc_url) as front:
            (choice,) = front.ask("/v1/completions", own | {"prompt": "abc<think>"})[1]["choices"]
            assert choice["text"].count("</think>") == 1
            said = {"messages": [{"role": "user", "content": "<think>"}]}  # "]+" follows in the prompt
            (choice,) = front.ask("/v1/chat/completions", own | said)[1]["choices"]
            assert "</think>" in choice["message"]["content"]
            status, answer = front.ask("/v1/chat/completions", own | said | {"thinking_token_budget": -2})
        assert (status, answer["error"]["param"]) == (400, "thinking_token_budget")


class TestSamplingDefaults:
    def test_client(self, client):
        expected = client.generate(**PROMPT, **LIKE_DEFAULTS)
        assert expected.num_output_tokens == 7
        assert client.generate(**PROMPT) == expected
        assert client.generate(**PROMPT, max_tokens=None, temperature=None, repetition_penalty=None) == expected

    def test_given_parameters_win(self, client):
        plain = client.generate(**PROMPT, **PLAIN)
        assert plain.text != client.generate(**PROMPT).text
        assert client.generate(**PROMPT, repetition_penalty=1.0) == plain
        assert client.generate(**PROMPT, max_tokens=20).num_output_tokens == 20

    def test_max_new_tokens_is_cut_to_what_fits(self, client):
        assert client.generate("x" * 250, ignore_eos=True).num_output_tokens == 6

    def test_an_answer_of_paged_chat_fits_a_short_context(self, adapted_server, monkeypatch, capsys):
        """The server rejects the default limit of an answer, which is longer than the context."""
        standard_input(monkeypatch, "x")
        assert cli.main(["chat", "--url", adapted_server.grpc_url, "-p", "ignore_eos=true"]) == 0
        note = "the answer was cut after 7 tokens; the model's max_new_tokens, context or KV cache allows no more"
        assert capsys.readouterr().err == f"note: {note}\n"

    def test_beam_search_and_embeddings(self, client):
        search = client.generate(**PROMPT, beam_width=2)
        assert search == client.generate(**PROMPT, beam_width=2, max_tokens=7)
        assert len(client.embed("x").values) == 64

    def test_tensorrt_llm_interface_keeps_its_defaults(self, adapted_server, client):
        body = {"text_input": PROMPT["prompt"], "max_tokens": 7, "end_id": -1, "exclude_input_in_output": True}
        status, text = post(adapted_server, body, model="ensemble")
        assert status == 200
        assert json.loads(text)["text_output"] == client.generate(**PROMPT, **PLAIN).text

    def test_gateway(self, adapted_server, client):
        expected = client.generate(**PROMPT).text
        with gateway(adapted_server.grpc_url) as front:
            own = {"model": "paged_llm", "ignore_eos": True}
            (choice,) = front.ask("/v1/completions", own | {"prompt": PROMPT["prompt"]})[1]["choices"]
            assert (choice["text"], choice["finish_reason"]) == (expected, "length")
            answer = front.ask("/v1/chat/completions", own | {"messages": MESSAGES})[1]
            assert answer["usage"]["completion_tokens"] == 7

    def test_start_up_log_lists_them(self, adapted_server):
        shown = "temperature=0.6, top_k=1, repetition_penalty=1.4, max_tokens=7"
        assert f"default sampling parameters from generation_config.json: {shown}" in adapted_server.log()
