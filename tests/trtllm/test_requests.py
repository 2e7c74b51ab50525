"""Conversion of tensorrtllm_backend's tensors, without a server."""

import json

import numpy as np
import pytest

from paged_backend.api.errors import RequestError
from paged_backend.trtllm.interfaces import create_interface
from paged_backend.trtllm.limits import RelayLimits
from paged_backend.trtllm.rows import use_client_names
from paged_backend.trtllm.tensors import BLS, CORE, ENSEMBLE
from tests.support.trtllm_requests import NEEDED, ask, rejection, rows, sampling


def test_defaults_match_tensorrt_llm():
    one = ask()
    assert json.loads(one.tensors["sampling_parameters"][0]) == {"max_tokens": 5, "temperature": 0}
    assert one.tensors["text_input"].tolist() == [b"Hello"]
    assert (one.samples, one.beams, one.stream, one.batch_index) == (1, 1, False, None)
    assert "exclude_input_in_output" not in one.tensors, "the prompt comes first in the output"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": [0.9]}, {"temperature": 0}),
        ({"top_k": [1], "temperature": [0.9]}, {"temperature": 0}),
        ({"top_k": [0], "top_p": [0.0]}, {"temperature": 0}),
        ({"top_k": [40], "top_p": [0.0]}, {"top_k": 40}),
        ({"top_k": [40], "top_p": [0.9], "temperature": [0.7]}, {"top_k": 40, "top_p": 0.9, "temperature": 0.7}),
        ({"top_p": [1.0], "temperature": [1.0]}, {"top_k": 0, "top_p": 1.0, "temperature": 1.0}),
    ],
)
def test_top_k_or_top_p_enable_sampling(given, expected):
    assert sampling(**given) == {"max_tokens": 5} | expected


def test_penalties():
    given = {"repetition_penalty": [1.1], "presence_penalty": [0.5], "frequency_penalty": [-0.25]}
    assert sampling(**given) == {
        "max_tokens": 5, "temperature": 0, "repetition_penalty": 1.1, "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
    }  # fmt: skip


def test_beam_search_defaults():
    one = ask(beam_width=[3], temperature=[1.0], top_k=[1], seed=[4])
    assert json.loads(one.tensors["sampling_parameters"][0]) == {
        "max_tokens": 5, "temperature": 1.0, "beam_width": 3, "n": 3, "length_penalty": 0.0, "early_stopping": True,
    }  # fmt: skip
    assert (one.samples, one.beams) == (1, 3)
    assert sampling(beam_width=[3], num_return_sequences=[2], length_penalty=[0.5])["n"] == 2
    assert sampling(CORE, beam_width=[2], len_penalty=[0.5], early_stopping=[False]) == {
        "max_tokens": 5, "beam_width": 2, "n": 2, "length_penalty": 0.5, "early_stopping": False,
    }  # fmt: skip
    assert sampling(length_penalty=[0.5]) == {"max_tokens": 5, "temperature": 0}, "of one output there is no score"


def test_samples():
    one = ask(num_return_sequences=[4], top_p=[0.5])
    assert (one.samples, one.beams) == (4, 1)
    assert one.tensors["return_num_output_tokens"], "which of them have something new is seen by that"
    assert sampling(num_return_sequences=[4], top_p=[0.5])["n"] == 4


def test_stop_and_bad_words():
    given = sampling(stop_words=["\n\n", "", "End"], bad_words=["darn"])
    assert given["stop"] == ["\n\n", "End"]
    assert given["include_stop_str_in_output"]
    assert given["bad_words"] == ["darn"]
    assert sampling(stop_words=[""], bad_words=[""]) == {"max_tokens": 5, "temperature": 0}


def test_end_id_replaces_the_model_eos():
    assert sampling(end_id=[50]) == {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "stop_token_ids": [50]}
    assert sampling(end_id=[-1]) == {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    assert sampling(end_id=[50], guided_decoding_guide_type=["json"]) == {
        "max_tokens": 5, "temperature": 0, "stop_token_ids": [50], "json_object": True,
    }, "what is complete ends with the model's own"  # fmt: skip
    assert sampling(pad_id=[3]) == {"max_tokens": 5, "temperature": 0}


def test_embedding_bias_words():
    given = sampling(embedding_bias_words=["sea", ""], embedding_bias_weights=[2.5, 1.0])
    assert given["word_bias"] == {"sea": 2.5}
    assert rejection(embedding_bias_words=["sea"]) == (
        "embedding_bias_weights=[]: must have as many elements as embedding_bias_words, 1"
    )


@pytest.mark.parametrize(
    ("kind", "guide", "expected"),
    [
        ("json", None, {"json_object": True}),
        ("json_schema", '{"type": "object"}', {"json_schema": '{"type": "object"}'}),
        ("regex", "a+", {"regex": "a+"}),
        ("ebnf_grammar", 'root ::= "a"', {"grammar": 'root ::= "a"'}),
    ],
)
def test_guided_decoding(kind, guide, expected):
    given = {"guided_decoding_guide_type": [kind]} | ({"guided_decoding_guide": [guide]} if guide else {})
    assert sampling(**given) == {"max_tokens": 5, "temperature": 0} | expected


def test_invalid_guides_are_rejected():
    assert rejection(guided_decoding_guide_type=["yaml"]) == (
        'guided_decoding_guide_type="yaml": must be one of json, json_schema, regex, ebnf_grammar'
    )
    assert rejection(guided_decoding_guide_type=["regex"]) == (
        "guided_decoding_guide=null: is needed with guided_decoding_guide_type=regex"
    )
    assert rejection(guided_decoding_guide=["a+"]).startswith("guided_decoding_guide_type=null")
    assert sampling(guided_decoding_guide_type=[""], guided_decoding_guide=[""]) == {"max_tokens": 5, "temperature": 0}


def test_lora_task_id_selects_the_adapter_by_name():
    assert sampling(lora_task_id=[7])["lora_name"] == "7"


@pytest.mark.parametrize(
    ("model", "biases", "refused"),
    [
        (ENSEMBLE, {"embedding_bias_words": ["a", "b", "c"], "embedding_bias_weights": [1, 1, 1]}, "words"),
        (CORE, {"embedding_bias": [0, 1, 1, 1]}, "tokens"),
    ],
)
def test_biases_beyond_max_biases_are_rejected(model, biases, refused):
    def read(most):
        return create_interface(model, limits=RelayLimits(max_biases=most)).read(rows(model, NEEDED[model] | biases))

    assert read(3)
    field = next(iter(biases))
    with pytest.raises(RequestError, match=rf"{field}=.3 {refused}.: must be at most 2 .*\(max_biases\)"):
        read(2)


def test_every_row_is_a_separate_request():
    both = rows(BLS, {"text_input": ["One"], "max_tokens": [3]}, {"text_input": ["Two"], "max_tokens": [4]})
    first, second = create_interface(BLS).read(both)
    assert (first.batch_index, second.batch_index) == (0, 1)
    assert second.tensors["text_input"].tolist() == [b"Two"]
    assert json.loads(second.tensors["sampling_parameters"][0])["max_tokens"] == 4
    tensors = rows(BLS, NEEDED[BLS]) | {"top_k": np.ones((2, 1), np.int32)}
    with pytest.raises(RequestError, match="top_k: has 2 rows, but text_input has 1; send the same number"):
        create_interface(BLS).read(tensors)


def test_token_ids():
    one = ask(CORE, input_lengths=[2], streaming=[True])
    assert one.tensors["input_ids"].tolist() == [7, 8]
    assert one.prompt == ()
    assert ask(CORE).prompt == (7, 8, 9), "comes back before the output"
    assert ask(CORE, exclude_input_in_output=[True]).prompt == ()
    assert rejection(CORE, input_lengths=[4]) == "input_lengths=4: must be 1..3, the length of input_ids"


def test_stop_and_bad_words_of_token_ids():
    words = {"stop_words_list": [[5, 6, 3, 4, 0], [1, 2, 4, -1, -1]], "bad_words_list": [[8, 9, 10], [1, 3, -1]]}
    one = ask(CORE, end_id=[2], **words)
    assert one.dropped == {b"None", b"2"}, "5 and 6 are part of the output"
    given = json.loads(one.tensors["sampling_parameters"][0])
    assert given["stop_token_ids"] == [2, 5, 6]
    assert given["stop_words_token_ids"] == [[3, 4]]
    assert given["bad_words_token_ids"] == [[8], [9, 10]]
    assert use_client_names(" bad_words_token_ids=999: must", one.renamed) == " bad_words_list=999: must"
    assert rejection(CORE, stop_words_list=[[5, 6], [3, -1]]) == (
        "stop_words_list=[3]: must be the increasing ends of words, at most 2"
    )
    assert sampling(CORE, embedding_bias=[0.0, 0.5, 0.0])["logit_bias"] == {"1": 0.5}
