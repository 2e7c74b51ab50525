"""What is sent to the server, and the outputs that come back."""

import json

import pytest

from paged_client import Completion, Delta, TokenLogprob
from paged_client.pooling import classification_values
from paged_client.wire import Transcript, request_values

NINE = {"logprob": -0.25, "rank": 1, "decoded_token": "b"}


def test_inputs():
    values = request_values("hé", None, {"max_tokens": 3, "stop": ["\n"]}, stream=True)
    assert json.loads(values.pop("sampling_parameters")) == {"max_tokens": 3, "stop": ["\n"]}
    assert values == {
        "text_input": "hé",
        "stream": True,
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_receipt": True,
    }


@pytest.mark.parametrize(("count", "asks"), [(0, True), (5, True), (None, False)])
def test_logprobs_parameter_sets_the_return_flags(count, asks):
    values = request_values("hé", None, {"logprobs": count}, stream=True)
    names = ("return_logprobs", "return_cumulative_logprob")
    assert [values.get(name, False) for name in names] == [asks, asks]


def test_messages_replace_the_prompt():
    messages = [{"role": "user", "content": "hé"}]
    values = request_values(None, messages, {}, stream=False)
    assert json.loads(values["messages"]) == messages
    assert "text_input" not in values


@pytest.mark.parametrize(
    ("prompt", "messages", "sampling", "named"),
    [
        (None, None, {}, "exactly one of prompt and messages"),
        ("a", [], {}, "exactly one of prompt and messages"),
        (5, None, {}, "prompt=5: must be a string, or a list of token ids"),
        ([1, "2"], None, {}, "prompt=.*must be a string, or a list of token ids"),
        ([5, -1], None, {}, r"prompt\[1\]=-1: must be a token id, 0\.\.2147483647"),
        ("a", None, {"return_token_ids": 1}, "return_token_ids=1: must be True or False"),
        ("a\ud800", None, {}, "prompt: character 1"),
        (None, [{"role": "user", "content": "\ud800"}], {}, "messages: character"),
        (None, [{1, 2}], {}, "messages=.*not JSON"),
        ("a", None, {"seed": object()}, "seed=.*not JSON"),
        ("a", None, {"stop": "\ud800"}, "stop: character"),
        ("a", None, {"sequence_id": True}, "sequence_id=True: must be a string, or a whole number in 1"),
        ("a", None, {"traceparent": 5}, "traceparent=5: must be a string"),
    ],
)
def test_invalid_arguments_are_rejected(prompt, messages, sampling, named):
    with pytest.raises(ValueError, match=named):
        request_values(prompt, messages, sampling, stream=True)


def test_a_classification_has_one_kind_of_prompt():
    with pytest.raises(ValueError, match="input, query: give either input, messages, or query and document"):
        classification_values("a", None, "b", None, True, {})
    with pytest.raises(ValueError, match="query=5: must be a string"):
        classification_values(None, None, 5, "b", True, {})


def test_deltas_are_concatenated_to_a_completion():
    transcript = Transcript()
    first = {"text_output": ["a"], "finish_reason": ["None"], "num_input_tokens": [3], "num_output_tokens": [2]}
    assert transcript.add(first) == [Delta("a", 2, None)]
    assert transcript.completion() == Completion("a", "cancelled", 3, 2)
    last = {"text_output": ["b"], "finish_reason": ["length"], "num_output_tokens": [1]}
    assert transcript.add(last) == [Delta("b", 1, "length")]
    assert transcript.completion() == Completion("ab", "length", 3, 3)


def test_samples_are_separate_and_finish_independently():
    transcript = Transcript()
    first = {"text_output": ["a", ""], "finish_reason": ["None", "None"], "num_output_tokens": [1, 0]}
    assert transcript.add(first | {"num_input_tokens": [3]}) == [Delta("a", 1, None, 0)]
    second = {"text_output": ["", "c"], "finish_reason": ["None", "stop"], "num_output_tokens": [0, 2]}
    assert transcript.add(second) == [Delta("c", 2, "stop", 1)]
    assert not transcript.complete
    last = {"text_output": ["b", ""], "finish_reason": ["length", "stop"], "num_output_tokens": [1, 0]}
    assert transcript.add(last) == [Delta("b", 1, "length", 0)]
    assert transcript.complete
    assert transcript.completion() == Completion("ab", "length", 3, 2, (Completion("c", "stop", 3, 2),))


@pytest.mark.parametrize("n", [1, 2])
def test_prompt_fields_may_arrive_in_several_responses(n):
    """The log probabilities of a slow prompt arrive after an empty response with the other fields."""
    transcript = Transcript()
    empty = {"text_output": [""] * n, "finish_reason": ["None"] * n, "num_output_tokens": [0] * n}
    last = {"text_output": ["a"] * n, "finish_reason": ["stop"] * n, "num_output_tokens": [1] * n}
    deltas = transcript.add(empty | {"prompt_token_ids": [5], "first_prompt_token": ["x"]})
    deltas += transcript.add(last | {"prompt_logprobs": ["[null]"]})
    whole = transcript.completion()
    assert (whole.prompt_token_ids, whole.first_prompt_token, whole.prompt_logprobs) == ((5,), "x", (None,))
    assert [one.prompt_token_ids for one in deltas if one.prompt_token_ids] == [(5,)]
    assert [one.prompt_logprobs for one in deltas if one.prompt_logprobs] == [(None,)]


def test_logprobs_of_deltas_are_concatenated():
    transcript = Transcript()
    entries = [{"7": {"logprob": -1.5, "rank": 2, "decoded_token": "a"}, "9": NINE}, {"9": NINE}]
    counts = {"num_output_tokens": [1], "finish_reason": ["None"]}
    parts = [
        counts | {"text_output": ["a"], "logprobs": [json.dumps(entries[:1])], "cumulative_logprob": [-1.5]},
        counts | {"text_output": ["b"], "logprobs": [json.dumps(entries[1:])], "cumulative_logprob": [-1.75]},
    ]
    (first,), (second,) = map(transcript.add, parts)
    seven, nine = TokenLogprob(7, -1.5, 2, "a"), TokenLogprob(9, -0.25, 1, "b")
    assert (first.logprobs, first.cumulative_logprob) == (((seven, nine),), -1.5)
    assert (second.logprobs, second.cumulative_logprob) == (((nine,),), -1.75)
    whole = transcript.completion()
    assert (whole.logprobs, whole.cumulative_logprob) == (((seven, nine), (nine,)), -1.75)


def test_token_ids_and_offsets_are_split_by_token_counts():
    transcript = Transcript()
    said = {"text_output": ["ab", "c"], "num_output_tokens": [2, 1], "num_input_tokens": [2]}
    first = transcript.add({**said, "token_ids": [4, 5, 6], "text_offsets": [0, 1, 0], "prompt_token_ids": [1, 2]})
    assert [(delta.token_ids, delta.text_offsets) for delta in first] == [((4, 5), (0, 1)), ((6,), (0,))]
    assert [delta.prompt_token_ids for delta in first] == [(1, 2), None]
    last = {"text_output": ["", ""], "num_output_tokens": [0, 1], "finish_reason": ["stop", "stop"]}
    transcript.add({**last, "token_ids": [7], "text_offsets": [1]})
    whole = transcript.completion()
    assert (whole.token_ids, whole.text_offsets, whole.prompt_token_ids) == ((4, 5), (0, 1), (1, 2))
    assert (whole.others[0].token_ids, whole.others[0].text_offsets) == ((6, 7), (0, 1))


def test_reasoning_and_tool_calls_are_joined():
    transcript, call = Transcript(), {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    said = {"text_output": ["", ""], "num_output_tokens": [1, 1], "finish_reason": ["None", "None"]}
    thought = transcript.add({**said, "reasoning_content": ["Let", "Hm"], "tool_calls": ["[]", "[]"]})
    assert [(delta.reasoning_content, delta.tool_calls) for delta in thought] == [("Let", ()), ("Hm", ())]
    ended = said | {"finish_reason": ["stop", "stop"]}
    transcript.add({**ended, "reasoning_content": [" me", ""], "tool_calls": [json.dumps([call]), "[]"]})
    whole = transcript.completion()
    assert (whole.reasoning_content, whole.tool_calls) == ("Let me", (call,))
    assert (whole.others[0].reasoning_content, whole.others[0].tool_calls) == ("Hm", ())


def test_fields_that_were_not_requested_are_none():
    transcript = Transcript()
    (delta,) = transcript.add({"text_output": ["a"], "logprobs": ["null"], "num_output_tokens": [1]})
    assert (delta.logprobs, delta.cumulative_logprob) == (None, None)
    assert (delta.reasoning_content, transcript.completion().tool_calls) == (None, None)
    assert (transcript.completion().logprobs, transcript.completion().cumulative_logprob) == (None, None)
