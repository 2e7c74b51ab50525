"""Conversion of tensorrtllm_backend's tensors, without a server."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paged_backend.api.errors import RequestError
from paged_backend.trtllm import configs, responses
from paged_backend.trtllm.interfaces import create_interface
from paged_backend.trtllm.limits import RelayLimits
from paged_backend.trtllm.rows import use_client_names
from paged_backend.trtllm.tensors import BLS, CORE, ENSEMBLE, INPUTS, OUTPUTS
from tests.support.trtllm_requests import NEEDED, ask, rejection, rows, sampling

ROOT = Path(__file__).parents[2]


def test_models_load_without_torch():
    """Triton starts each model's process twice, and pays for its imports each time."""
    code = "import sys, paged_backend.trtllm.relay; print([one for one in sys.argv[1:] if one in sys.modules])"
    heavy = ("torch", "transformers", "jinja2", "huggingface_hub", "grpc", "asyncio")
    done = subprocess.run([sys.executable, "-c", code, *heavy], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("model", INPUTS)
def test_config_pbtxt_matches_the_tensor_tables(model):
    written = (ROOT / "model_repository" / model / "config.pbtxt").read_text()
    assert written == configs.config(model), "run python -m paged_backend.trtllm.configs"
    assert len(re.findall(r"optional: true", written)) == sum(not one.required for one in INPUTS[model].values())


def test_text_models_match_tensorrtllm_backend_tensors():
    both = set(
        "text_input decoder_text_input max_tokens bad_words stop_words num_return_sequences end_id pad_id top_k top_p"
        " temperature length_penalty repetition_penalty min_tokens min_length presence_penalty frequency_penalty seed"
        " random_seed return_log_probs return_context_logits return_generation_logits return_perf_metrics"
        " return_num_input_tokens return_num_output_tokens beam_width stream exclude_input_in_output"
        " prompt_embedding_table prompt_vocab_size prompt_table_extra_id embedding_bias_words embedding_bias_weights"
        " lora_task_id lora_weights lora_config guided_decoding_guide_type guided_decoding_guide".split()
    )
    assert set(INPUTS[ENSEMBLE]) == both
    assert set(INPUTS[BLS]) - both == {
        "image_input", "image_bytes_input", "image_url_input", "video_bytes_input", "num_draft_tokens",
        "use_draft_logits",
    }  # fmt: skip
    assert [name for name, one in INPUTS[BLS].items() if one.required] == ["text_input", "max_tokens"]
    assert (
        set(OUTPUTS[BLS])
        == set(OUTPUTS[ENSEMBLE])
        == set(
            "text_output cum_log_probs output_log_probs context_logits generation_logits batch_index sequence_index"
            " kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks arrival_time_ns"
            " first_scheduled_time_ns first_token_time_ns last_token_time_ns acceptance_rate"
            " total_accepted_draft_tokens total_draft_tokens num_input_tokens num_output_tokens".split()
        )
    )
    assert {"output_ids", "sequence_length"} < set(OUTPUTS[CORE])


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


@pytest.mark.parametrize("names", [("seed", "min_tokens"), ("random_seed", "min_length")])
def test_old_and_new_tensor_names(names):
    seed, least = names
    assert sampling(**{seed: [2**64 - 1], least: [2], "top_k": [5]}) == {
        "max_tokens": 5, "seed": 2**64 - 1, "min_tokens": 2, "top_k": 5,
    }  # fmt: skip


def test_two_names_for_one_parameter_are_rejected():
    assert rejection(seed=[1], random_seed=[1]) == "random_seed, seed: two names of one parameter; give one of them"


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


REFUSED = [
    (model, name, one.dims)
    for model in INPUTS
    for name, one in INPUTS[model].items()
    if one.unsupported and name not in ("decoder_input_lengths", "runtime_top_p_min", "runtime_top_p_reset_ids")
]


@pytest.mark.parametrize(("model", "name", "dims"), REFUSED, ids=[f"{model} {name}" for model, name, _ in REFUSED])
def test_unsupported_inputs_are_rejected_by_name(model, name, dims):
    spec = INPUTS[model][name]
    shape = [2 if size == -1 else size for size in dims]
    word = "something" if spec.data_type == "TYPE_STRING" else 3
    given = {name: np.full(shape, word, object).tolist()}
    assert re.fullmatch(rf"{name}=.*: not supported; leave it out", rejection(model, **given))


ASKING_FOR_NOTHING = {
    "lora_weights": [[]], "decoder_text_input": [""], "prompt_vocab_size": [0], "return_context_logits": [False],
    "return_generation_logits": [False], "prompt_table_extra_id": [0], "image_url_input": [""],
    "num_draft_tokens": [0], "use_draft_logits": [False], "runtime_top_p_decay": [1.0], "runtime_top_p_min": [1e-6],
    "runtime_top_p_reset_ids": [-1], "beam_search_diversity_rate": [0.0], "decoder_input_ids": [2],
    "decoder_input_lengths": [1], "draft_input_ids": [], "embedding_bias": [], "image_url": [], "lora_id": [0],
    "sampling_param_logits_post_processor_name": [""], "lora_ckpt_source": ["hf"],
}  # fmt: skip


@pytest.mark.parametrize("model", INPUTS)
def test_neutral_values_of_unsupported_inputs_are_accepted(model):
    given = {name: value for name, value in ASKING_FOR_NOTHING.items() if name in INPUTS[model]}
    assert sampling(model, **given) == sampling(model)


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


def test_caps_are_config_parameters():
    given = {"interface": BLS, "engine_model_name": "paged_llm", "max_open_rows": "3"}
    assert RelayLimits.from_parameters(given) == RelayLimits(max_open_rows=3)
    for bad in ("0", "x", "", "1.5"):
        with pytest.raises(ValueError, match=f"max_biases='{bad}': must be a whole number 1.."):
            RelayLimits.from_parameters({"max_biases": bad})


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


def test_errors_use_the_clients_tensor_names():
    core, text = ask(CORE).renamed, ask().renamed
    assert use_client_names(" max_tokens=5: must be 1..4", core) == " request_output_len=5: must be 1..4"
    assert use_client_names(" max_tokens=5: must be 1..4", text) == " max_tokens=5: must be 1..4"
    assert use_client_names(" other: max_tokens", core) == " other: max_tokens"


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
