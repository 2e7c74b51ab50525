"""Reasoning, answers and tool calls of the output formats of several models."""

import json

import pytest
from transformers import AutoTokenizer

from paged_backend.api.errors import RequestError
from paged_backend.text.answers import ANSWER_PARTS, AnswerFormat, AnswerParser
from tests.support.scripted_model import CHATML, save_tokenizer

BAD = "<tool_call>{a</tool_call> !"
LIST = "A <tool_call>[1]</tool_call>"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
THINKS = CHATML + "{# <think> </think> #}"
CALLS = CHATML + "{# <tool_call> #}"
BOTH = THINKS + CALLS.removeprefix(CHATML)
MISTRAL = "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}{# [THINK] [/THINK] #}"
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"
)
CHANNEL_TOKENS = tuple(f"<|{name}|>" for name in ("channel", "message", "start", "end", "call", "constrain"))
ANALYSIS = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
OWN = {  # a response template, whose marks no chat template has
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<idea>", "close": "</idea>"},
        "tool_calls": {
            "open_pattern": r"<call (?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"(?P<key>\w+)=(?P<value>\w+)"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<|im_end|>"},
    },
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]


def tokenizer(directory, chat_template, text="", **options):
    save_tokenizer(directory, {"script": text}, chat_template=chat_template, **options)
    return AutoTokenizer.from_pretrained(directory)


def split(
    tokens, text, outputs=ANSWER_PARTS, *, prompt="Say script.", skip_special_tokens=True, num_at_once=1, **variables
):
    """Return (text, reasoning, calls) of the script, which arrives in parts of this many tokens."""
    splitter = AnswerFormat(tokens).splitter(outputs)
    messages = [{"role": "user", "content": prompt}]
    rendered = tokens.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
    decode, path = splitter.decoder(skip_special_tokens), tokens.encode(text)
    parser = AnswerParser(splitter, splitter.start(tokens.encode(rendered)), TOOLS)
    pieces = [path[at : at + num_at_once] for at in range(0, len(path), num_at_once)]
    parts = [*(parser.push(decode(piece)) for piece in pieces), parser.finish()]
    texts, reasonings, calls = zip(*parts, strict=True)
    return "".join(texts), "".join(reasonings), [call for some in calls for call in some]


@pytest.mark.parametrize(
    ("template", "special", "text", "expected"),
    [
        pytest.param(THINKS, (), "<think>\nIt is\n\n2. </think>\n\n2.\n", ("2.\n", "It is\n\n2.", []), id="reasoning"),
        pytest.param(THINKS, (), " 2 < 3, <b>", (" 2 < 3, <b>", "", []), id="no-reasoning"),
        pytest.param(THINKS, (), "<think>Never end", ("", "Never end", []), id="cut-reasoning"),
        pytest.param(BOTH, (), f"<think>x</think>\nSo:\n{CALL}\n{CALL}", ("So:", "x", [F, F]), id="calls"),
        pytest.param(BOTH, (), f"A.\n{CALL}\nB.", ("A.\nB.", "", [F]), id="text-around-calls"),
        pytest.param(CALLS, (), f"{CALL}\n{BAD}", (BAD, "", [F]), id="invalid-call"),
        pytest.param(CALLS, (), LIST, (LIST, "", []), id="no-object"),
        pytest.param(CALLS, (), "A" + CALL[:30], ("A" + CALL[:30], "", []), id="cut-call"),
        pytest.param(CALLS, (), "A" + CALL.removesuffix("</tool_call>"), ("A", "", [F]), id="call-ended-by-the-model"),
        pytest.param(MISTRAL, ("[THINK]", "[/THINK]"), "[THINK]Hm[/THINK]Yes", ("Yes", "Hm", []), id="special-marks"),
        pytest.param(
            CHANNELS,
            CHANNEL_TOKENS,
            f"{ANALYSIS}<|channel|>final<|message|>Yes <b>",
            ("Yes <b>", "Let me see.", []),
            id="channels",
        ),
        pytest.param(
            CHANNELS,
            CHANNEL_TOKENS,
            f"{ANALYSIS}{ANALYSIS}<|channel|>commentary<|message|>I call.<|end|><|start|>assistant"
            '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
            ("I call.", "Let me see.\nLet me see.", [F]),
            id="call-in-a-channel",
        ),
    ],
)  # fmt: skip
def test_the_parts_of_an_output(tmp_path, template, special, text, expected):
    made = tokenizer(tmp_path, template, special=special)
    for num_at_once in (1, 3, 1000):
        assert split(made, text, num_at_once=num_at_once) == expected


@pytest.mark.parametrize("prompt", ["Say script.", "What does <think> mean?", "<|im_start|>assistant\n<think>"])
def test_reasoning_that_the_prompt_opens(tmp_path, prompt):
    opened = THINKS.replace("assistant\n", "assistant\n<think>\n")
    assert split(tokenizer(tmp_path / "a", opened), "x</think>y", prompt=prompt) == ("y", "x", [])
    closed = THINKS.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n")
    assert split(tokenizer(tmp_path / "b", closed), "x", prompt=prompt) == ("x", "", [])
    assert split(tokenizer(tmp_path / "c", THINKS), "x", prompt=prompt) == ("x", "", [])
    without = THINKS.replace("assistant\n", "assistant\n</think>")
    assert split(tokenizer(tmp_path / "d", without), "x", prompt=prompt) == ("x", "", [])


def test_a_template_that_reasons_on_request(tmp_path):
    begin = "{% if thinking %}<think>{% else %}</think>{% endif %}"
    made = tokenizer(tmp_path, THINKS.replace("assistant\n", f"assistant\n{begin}"))
    assert split(made, "x</think>y", thinking=True) == ("y", "x", [])
    assert split(made, "y", thinking=False) == ("y", "", [])


def test_reasoning_that_a_prompt_without_a_beginning_of_answers_opens(tmp_path):
    made = tokenizer(tmp_path, "{{ messages[0].content }}{# </think> #}")
    assert split(made, "x</think>y", prompt="Go on: <think>\n") == ("y", "x", [])
    assert split(made, "x", prompt="Is <think> a mark?") == ("x", "", [])


def test_parts_that_are_not_asked_for_stay_in_the_text(tmp_path):
    text = f"<think>x</think>\n{CALL}"
    made = tokenizer(tmp_path, BOTH)
    assert split(made, text, {"reasoning_content"}) == (CALL, "x", [])
    assert split(made, text, {"tool_calls"}) == ("<think>x</think>", "", [F])
    assert AnswerFormat(made).splitter({"logprobs"}) is None


def test_other_special_tokens_are_skipped_unless_asked_for(tmp_path):
    made = tokenizer(tmp_path, MISTRAL, special=("[THINK]", "[/THINK]", "[PAD]"))
    assert split(made, "[THINK]Hm[PAD][/THINK]Yes[PAD]") == ("Yes", "Hm", [])
    assert split(made, "[THINK]Hm[/THINK]Yes[PAD]", skip_special_tokens=False) == ("Yes[PAD]", "Hm", [])


def test_the_tokenizer_has_a_response_template(tmp_path):
    made = tokenizer(tmp_path, THINKS, response_template=OWN)
    text = "<idea>x</idea>So <call f>a=1</call><|im_end|>"
    assert split(made, text) == ("So ", "x", [F])  # the argument has the type in the tool
    assert split(made, text, {"reasoning_content"}) == ("So <call f>a=1</call>", "x", [])


def test_a_response_template_without_a_field_for_other_text(tmp_path):
    fields = {name: field for name, field in OWN["fields"].items() if name != "content"}
    fields["content"] = {"open": "<say>", "close": "</say>"}
    made = tokenizer(tmp_path, THINKS, response_template=OWN | {"fields": fields})
    text = "<idea>x</idea> <say>So</say> <call f>a=1</call>"
    assert split(made, text) == ("So", "x", [F])
    assert split(made, text, {"reasoning_content"}) == ("So<call f>a=1</call>", "x", [])
    assert split(made, text, {"tool_calls"}) == ("<idea>x</idea>So", "", [F])


@pytest.mark.parametrize("field", [{"close": ""}, {"open_pattern": "(?P<a>b)(?P=a)", "transform": "{a}"}], ids=repr)
def test_an_invalid_response_template_is_not_used(tmp_path, caplog, field):
    """Or one with a pattern that refers to a group."""
    made = tokenizer(tmp_path, THINKS, response_template=OWN | {"fields": {"content": field}})
    assert split(made, "<think>x</think>y") == ("y", "x", [])
    assert "response_template is not used" in caplog.text


@pytest.mark.parametrize(
    "arguments", ["[1]", '"[1]"', '"no JSON"', '{"a": NaN}', '{"a": "\\ud800"}', '{"a": 1e999}'], ids=json.dumps
)
def test_arguments_that_are_no_json_object_are_text(tmp_path, arguments):
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert split(tokenizer(tmp_path, CALLS), text) == (text, "", [])


@pytest.mark.parametrize("arguments", ['{"a": 1}', '"{\\"a\\": 1}"'])
def test_arguments_may_be_json_in_a_string(tmp_path, arguments):
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert split(tokenizer(tmp_path, CALLS), text) == ("", "", [F])


@pytest.mark.parametrize(
    "template", [None, CHATML, THINKS, CALLS + "<function=", "{{ raise_exception('no') }}</think>"]
)
def test_calls_of_an_unknown_format_are_refused(tmp_path, template):
    found = AnswerFormat(tokenizer(tmp_path, template))
    found.check({"reasoning_content"})
    with pytest.raises(RequestError, match="return_tool_calls=true: the tokenizer has no response_template"):
        found.check(ANSWER_PARTS)
