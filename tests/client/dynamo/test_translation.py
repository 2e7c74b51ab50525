"""Requests of Dynamo's frontend as requests of the engine, and the engine's deltas as Dynamo's chunks."""

import base64
import re
import struct

import pytest

from paged_client.dynamo import translation
from paged_client.dynamo.translation import Chunks, parser_for, sampling_of
from paged_client.types import Completion, Delta, TokenLogprob


def sampling(**groups):
    """Return the engine's parameters of a request with these groups of fields, beside those of every request."""
    found = sampling_of({"model": "m", "token_ids": [1, 2], **groups})
    return {name: value for name, value in found.items() if (name, value) != ("max_tokens", None)}


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3}, {"best_of": 4}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}, {"repetition_penalty": 1.2},
        {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": -1}, {"min_p": 0.1}, {"seed": 7},
        {"use_beam_search": True}, {"length_penalty": 0.5}, {"include_stop_str_in_output": True},
        {"logit_bias": {"5": 1.0}}, {"allowed_token_ids": [1]}, {"bad_words_token_ids": [[1, 2]]},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_sampling_options_keep_their_names(fields):
    assert sampling(sampling_options=fields) == fields


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({"stop_conditions": {"max_tokens": 5, "min_tokens": 2}}, {"max_tokens": 5, "min_tokens": 2}),
        ({"stop_conditions": {"stop": ["a", "b"]}}, {"stop": ["a", "b"]}),
        ({"stop_conditions": {"max_thinking_tokens": 9}}, {"thinking_token_budget": 9}),
        ({"output_options": {"logprobs": 2, "prompt_logprobs": 1}}, {"logprobs": 2, "prompt_logprobs": 1}),
        ({"output_options": {"skip_special_tokens": False, "formatted_prompt": True}}, {}),
        ({"routing": {"cache_salt": "x", "lora_name": "a"}}, {"cache_salt": "x", "lora_name": "a"}),
        ({"routing": {"priority": 5, "priority_jump": 5.0, "dp_rank": 0}}, {"priority": -5}),
        ({"routing": {"priority": 0}}, {}),
        ({"routing": None, "sampling_options": None, "output_options": {"logprobs": None}}, {}),
    ],
)
def test_other_groups(groups, expected):
    assert sampling(**groups) == expected


def test_a_request_without_a_limit_generates_as_much_as_there_is_room_for():
    assert sampling_of({"token_ids": [1]}) == {"max_tokens": None}


def test_every_kind_of_stop_token_stops_the_engine():
    """The frontend removes the hidden ones from the text. A parser of tool calls needs the visible ones."""
    kinds = {"stop_token_ids": [3], "stop_token_ids_visible": [4, 3], "stop_token_ids_hidden": [2]}
    assert sampling(stop_conditions=kinds) == {"stop_token_ids": [3, 4, 2]}
    assert sampling(stop_conditions=kinds | {"ignore_eos": True}) == {"ignore_eos": True}


@pytest.mark.parametrize(
    "guided",
    [{"json": {"type": "object"}}, {"regex": "[ab]"}, {"choice": ["a"]}, {"grammar": "root ::= 'a'"}],
    ids=lambda guided: next(iter(guided)),
)
@pytest.mark.parametrize("backend", [None, "auto", "guidance", "llguidance"])
def test_structured_outputs(guided, backend):
    found = sampling(sampling_options={"guided_decoding": guided | {"backend": backend, "structural_tag": None}})
    assert found == {"structured_outputs": guided}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"multi_modal_data": {"image_url": ["u"]}}, "multi_modal_data: not supported"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds: not supported"),
        ({"bootstrap_info": {"bootstrap_room": 1}}, "bootstrap_info: not supported"),
        ({"sampling_options": {"typical_p": 0.5}}, "sampling_options.typical_p=0.5: not supported"),
        ({"stop_conditions": {"stop_regex": "a"}}, "stop_conditions.stop_regex='a': not supported"),
        ({"output_options": {"hidden_states": True}}, "output_options.hidden_states=True: not supported"),
        ({"routing": {"zone": "a"}}, "routing.zone='a': not supported"),
        (
            {"sampling_options": {"guided_decoding": {"structural_tag": {"a": 1}}}},
            "guided_decoding.structural_tag: not supported; use one of json, regex, choice, grammar",
        ),
        (
            {"sampling_options": {"guided_decoding": {"json": {}, "backend": "xgrammar"}}},
            "guided_decoding.backend='xgrammar': must be auto or guidance",
        ),
    ],
)
def test_what_the_engine_lacks_is_refused_by_name(request_, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sampling(**request_)


def test_a_probe_is_a_request_of_one_token():
    probe = translation.probe_request(1)
    assert translation.is_probe(probe)
    assert not translation.is_probe({"token_ids": [1]})
    assert sampling(**probe) == {"max_tokens": 1, "ignore_eos": True, "temperature": 0.0}


def entry(token_id, logprob, rank):
    return TokenLogprob(token_id, logprob, rank, chr(96 + token_id))


def delta(*token_ids, finish_reason=None, index=0, **fields):
    return Delta("", len(token_ids), finish_reason, index, token_ids=token_ids, **fields)


def completion(num_tokens, **fields):
    return Completion("", "stop", 4, num_tokens, **fields)


USAGE = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}


def test_chunks_of_one_sample():
    """The last chunk waits for the usage."""
    chunks = Chunks(1, None)
    assert chunks.add(delta(5, 6)) == {"index": 0, "token_ids": [5, 6]}
    assert chunks.add(delta(7, finish_reason="stop")) is None
    last = chunks.last(completion(3, receipt={"cached_tokens": 2}))
    assert last == {"index": 0, "token_ids": [7], "finish_reason": "stop", "completion_usage": USAGE}


def test_chunks_of_several_samples():
    """Only the last chunk of all has the usage, which counts every sample."""
    chunks = Chunks(2, None)
    assert chunks.add(delta(5, index=1))["index"] == 1
    ended = chunks.add(delta(6, index=0, finish_reason="length"))
    assert ended == {"index": 0, "token_ids": [6], "finish_reason": "length"}
    assert chunks.add(delta(7, index=1, finish_reason="stop")) is None
    last = chunks.last(completion(1, others=(completion(2),), receipt={"cached_tokens": 2}))
    assert (last["index"], last["finish_reason"], last["completion_usage"]) == (1, "stop", USAGE)


def test_a_deadline_ends_a_sample_like_its_length():
    chunks = Chunks(1, None)
    chunks.add(delta(finish_reason="timeout"))
    last = chunks.last(completion(3))
    assert (last["finish_reason"], last["token_ids"]) == ("length", [])
    assert last["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_a_request_that_ended_early_has_no_last_chunk():
    chunks = Chunks(1, None)
    chunks.add(delta(5))
    assert chunks.last(completion(1)) is None


def test_log_probabilities():
    """The engine lists the chosen token first, Dynamo the most likely ones, as many as were asked for."""
    chosen, best, second = entry(3, -2.0, 3), entry(1, -0.5, 1), entry(2, -1.5, 2)
    tokens = ((chosen, best, second), (best, best, second))
    chunk = Chunks(1, 2).add(delta(3, 1, logprobs=tokens))
    assert chunk["log_probs"] == [-2.0, -0.5]
    assert [[one["token_id"] for one in top] for top in chunk["top_logprobs"]] == [[1, 2], [1, 2]]
    assert chunk["top_logprobs"][0][0] == {"rank": 1, "token_id": 1, "token": "a", "logprob": -0.5}
    only_chosen = Chunks(1, 0).add(delta(3, logprobs=((chosen,),)))
    assert only_chosen["log_probs"] == [-2.0]
    assert "top_logprobs" not in only_chosen


def test_log_probabilities_of_the_prompt():
    chunk = Chunks(1, None).add(delta(5, prompt_logprobs=(None, (entry(2, -1.0, 1),))))
    expected = [None, {"2": {"logprob": -1.0, "rank": 1, "decoded_token": "b"}}]
    assert chunk["engine_data"] == {"prompt_logprobs": expected}


@pytest.mark.parametrize(
    ("given", "expected"),
    [("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_inputs_of_an_embedding_request(given, expected):
    assert translation.embedding_inputs({"input": given}) == expected


@pytest.mark.parametrize("given", [None, [], 5, {}])
def test_an_embedding_request_without_input_is_refused(given):
    with pytest.raises(ValueError, match="input="):
        translation.embedding_inputs({"input": given})


def test_embeddings_are_base64():
    answer = translation.embedding_answer("m", [[1.0, -0.5], [0.25, 2.0]], 7)
    vectors = [struct.unpack("<2f", base64.b64decode(one["embedding"])) for one in answer["data"]]
    assert vectors == [(1.0, -0.5), (0.25, 2.0)]
    assert [one["index"] for one in answer["data"]] == [0, 1]
    assert (answer["model"], answer["usage"]) == ("m", {"prompt_tokens": 7, "total_tokens": 7})


# What the chat templates of model families write around tool calls and reasoning.
TEMPLATES = {
    "qwen3": "{%- if enable_thinking is false %}<think>\n\n</think>{%- endif %}<tool_call>\n{{ call }}\n</tool_call>",
    "qwen3-coder": "<tool_call>\n<function={{ name }}>\n<parameter={{ key }}></parameter></function></tool_call>",
    "hermes": '<tool_call>\n{"arguments": <args-dict>, "name": <function-name>}\n</tool_call>',
    "deepseek-r1": "{{ content.split('</think>')[-1] }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ type }}",
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}",
    "deepseek-v3.1": "</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>{{ arguments }}",
    "llama-3.1": '{{ "<|python_tag|>" }} {"name": function name, "parameters": dictionary of arguments}',
    "llama-3.2": 'Respond in the format {"name": function name, "parameters": dictionary of arguments}.',
    "mistral": "[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS]{{ calls }}",
    "magistral": "[THINK]{{ thoughts }}[/THINK][TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
    "gpt-oss": "<|start|>assistant<|channel|>analysis<|message|>{{ thoughts }}<|end|>",
    "glm-4.6": "<tool_call>{{ name }}<arg_key>{{ key }}</arg_key></tool_call><think></think>",
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    "plain": "{% for message in messages %}{{ message.content }}{% endfor %}",
    "none": None,
}


@pytest.mark.parametrize(
    ("family", "tools", "reasoning"),
    [
        ("qwen3", "hermes", "qwen3"),
        ("qwen3-coder", "qwen3_coder", None),
        ("hermes", "hermes", None),
        ("deepseek-r1", "deepseek_v3", "deepseek_r1"),
        ("deepseek-v3", "deepseek_v3", None),
        ("deepseek-v3.1", "deepseek_v3_1", "deepseek_r1"),
        ("llama-3.1", "llama3_json", None),
        ("llama-3.2", "llama3_json", None),
        ("mistral", "mistral", None),
        ("magistral", "mistral", "mistral"),
        ("gpt-oss", "harmony", "gpt_oss"),
        ("glm-4.6", "glm47", "glm45"),
        ("kimi-k2", "kimi_k2", None),
        ("plain", None, None),
        ("none", None, None),
    ],
)
def test_parsers_follow_from_the_chat_template(family, tools, reasoning):
    template = TEMPLATES[family]
    assert parser_for(template, translation.TOOL_CALL_PARSERS) == tools
    assert parser_for(template, translation.REASONING_PARSERS) == reasoning


def test_the_chosen_parsers_are_those_of_the_runtime():
    parsers = pytest.importorskip("dynamo._core")
    known = {*parsers.get_tool_parser_names(), *parsers.get_reasoning_parser_names()}
    chosen = {name for name, _ in (*translation.TOOL_CALL_PARSERS, *translation.REASONING_PARSERS)}
    assert chosen <= known
