"""The chat template of a tokenizer in the gateway."""

from concurrent.futures import ThreadPoolExecutor

from paged_client import cli
from tests.support.gateway import CHAT, WAIT, error_of, gateway
from tests.support.tokenizers import TEMPLATE, write_tokenizer

ENDLESS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


def test_prompt_is_rendered_in_the_gateway(tmp_path, fake, capsys):
    directory = write_tokenizer(tmp_path / "tokenizer")
    with gateway(fake.url, "--tokenizer", str(directory)) as front:
        assert front.ask("/v1/chat/completions", CHAT | {"max_tokens": 3})[0] == 200
    assert capsys.readouterr().err.startswith(f"loading the tokenizer {directory} ...\n")
    assert fake.requests[-1]["text_input"] == "<s><user> x <assistant>"
    assert fake.sampling[-1] == {"max_tokens": 3, "add_special_tokens": False}
    assert "messages" not in fake.requests[-1]


def test_tools_are_passed_to_the_template(tmp_path, fake):
    template = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    tools = [{"type": "function", "function": {"name": "now"}}]
    with gateway(fake.url, "--tokenizer", str(write_tokenizer(tmp_path, template))) as front:
        assert front.ask("/v1/chat/completions", CHAT | {"tools": tools})[0] == 200
    assert fake.requests[-1]["text_input"] == "[now]"
    assert "tools" not in fake.requests[-1]


def test_template_variables_are_passed_to_the_template(tmp_path, fake):
    template = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    path = "/v1/chat/completions"
    with gateway(fake.url, "--tokenizer", str(write_tokenizer(tmp_path, TEMPLATE + template))) as front:
        assert front.ask(path, CHAT | {"chat_template_kwargs": {"enable_thinking": False}})[0] == 200
        assert fake.requests[-1]["text_input"] == "<s><user> x <assistant><think></think>"
        assert "chat_template_kwargs" not in fake.requests[-1]
        assert front.ask(path, CHAT | {"chat_template_kwargs": None})[0] == 200
        assert fake.requests[-1]["text_input"] == "<s><user> x <assistant>"
        status, body = front.ask(path, CHAT | {"chat_template_kwargs": {"tokenize": True}})
    error = error_of(status, body)
    assert (status, error["param"], error["code"]) == (400, "chat_template_kwargs", "invalid_argument")
    assert error["message"] == "chat_template_kwargs: tokenize: is set by the server; leave it out"


def test_template_errors_are_invalid_requests(tmp_path, fake):
    picky = TEMPLATE + "{% if messages[0].content == 'x' %}{{ raise_exception('no x') }}{% endif %}"
    with gateway(fake.url, "--tokenizer", str(write_tokenizer(tmp_path, picky))) as front:
        status, body = front.ask("/v1/chat/completions", CHAT)
    error = error_of(status, body)
    assert (status, error["param"]) == (400, "messages")
    assert "no x" in error["message"]


def test_template_timeout(tmp_path, fake):
    """Other requests are answered in the meantime."""
    slow = "{% if messages[0].content == 'y' %}" + ENDLESS + "{% endif %}" + TEMPLATE
    flags = ("--tokenizer", str(write_tokenizer(tmp_path, slow)), "--chat-template-timeout", "2")
    endless = CHAT | {"messages": [{"role": "user", "content": "y"}]}
    with gateway(fake.url, *flags) as front, ThreadPoolExecutor() as pool:
        asked = [pool.submit(front.ask, "/v1/chat/completions", endless) for _ in range(3)]
        assert front.ask("/v1/chat/completions", CHAT)[0] == 200
        for status, body in (one.result(WAIT) for one in asked):
            error = error_of(status, body)
            assert (status, error["param"]) == (400, "messages")
            reason = "messages: the chat template does not end within 2 s on them (--chat-template-timeout)"
            assert error["message"] == reason


def test_tokenizer_without_template_is_rejected(tmp_path, capsys):
    directory = write_tokenizer(tmp_path, None)
    assert cli.main(["openai", "--tokenizer", str(directory)]) == 2
    assert "no chat template" in capsys.readouterr().err
