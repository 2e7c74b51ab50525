"""Responses in tensorrtllm_backend's tensors."""

import numpy as np

from paged_backend.trtllm import responses
from paged_backend.trtllm.tensors import CORE
from tests.support.trtllm_requests import ask


def response(**values):
    kinds = {"cumulative_logprob": np.float32, "token_ids": np.int32, "num_output_tokens": np.uint32}
    words = {name: [one.encode() for one in value] for name, value in values.items() if isinstance(value[0], str)}
    return {name: np.array(value, kinds.get(name, np.object_)) for name, value in (values | words).items()}


def outputs(one, **values):
    return [{name: value.tolist() for name, value in part.items()} for part in responses.write(one, response(**values))]


def test_only_text_output_has_no_batch_dimension():
    (written,) = outputs(
        ask(return_log_probs=[True], return_num_output_tokens=[True]),
        text_output=["Hi"],
        finish_reason=["None"],
        num_output_tokens=[2],
        cumulative_logprob=[-3.0],
        logprobs=['[{"5": {"logprob": -1.0, "rank": 1}, "6": {"logprob": -2.0}}, {"7": {"logprob": -2.0}}]'],
    )
    assert written == {
        "text_output": [b"Hi"],
        "cum_log_probs": [[-3.0]],
        "output_log_probs": [[[-1.0, -2.0]]],
        "num_output_tokens": [[2]],
    }


def test_beams_are_sent_in_one_response():
    (written,) = outputs(
        ask(beam_width=[2], return_log_probs=[True]),
        text_output=["a", "b"],
        finish_reason=["length", "stop"],
        num_output_tokens=[1, 2],
        cumulative_logprob=[-1.0, -2.0],
        logprobs=['[{"5": {"logprob": -1.0}}]', '[{"6": {"logprob": -0.5}}, {"7": {"logprob": -1.5}}]'],
    )
    assert written["text_output"] == [b"a", b"b"]
    assert written["cum_log_probs"] == [[-1.0, -2.0]]
    assert written["output_log_probs"] == [[[-1.0, 0.0], [-0.5, -1.5]]]


def test_samples_are_sent_in_separate_responses():
    one = ask(num_return_sequences=[3], top_p=[0.9])
    some = outputs(one, text_output=["a", "", "c"], finish_reason=["None"] * 3, num_output_tokens=[1, 0, 1])
    assert [(part["text_output"], part["sequence_index"]) for part in some] == [([b"a"], [[0]]), ([b"c"], [[2]])]
    last = outputs(one, text_output=["", "", "c"], finish_reason=["stop"] * 3, num_output_tokens=[0, 0, 1])
    assert [part["sequence_index"] for part in last] == [[[0]], [[1]], [[2]]], "each has an end"


def test_output_ids_exclude_the_end_token():
    one = ask(CORE, stop_words_list=[[5], [1]], pad_id=[0], beam_width=[2], exclude_input_in_output=[True])
    (written,) = outputs(
        one,
        text_output=["", ""],
        token_ids=[3, 4, 2, 3, 5],
        finish_reason=["stop", "stop"],
        stop_reason=["None", "5"],
        num_output_tokens=[3, 2],
    )
    assert written == {"output_ids": [[[3, 4], [3, 5]]], "sequence_length": [[2, 2]]}
    (written,) = outputs(
        ask(CORE, pad_id=[0], beam_width=[2]),
        text_output=["", ""],
        token_ids=[3, 4, 3],
        finish_reason=["length", "length"],
        num_output_tokens=[2, 1],
    )
    assert written == {"output_ids": [[[7, 8, 9, 3, 4], [7, 8, 9, 3, 0]]], "sequence_length": [[5, 4]]}
