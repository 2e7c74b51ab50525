"""Rows of tensors: names, values without effect, and what is not supported."""

import re

import numpy as np
import pytest

from paged_backend.trtllm.rows import use_client_names
from paged_backend.trtllm.tensors import CORE, INPUTS
from tests.support.trtllm_requests import ask, rejection, sampling


@pytest.mark.parametrize("names", [("seed", "min_tokens"), ("random_seed", "min_length")])
def test_old_and_new_tensor_names(names):
    seed, least = names
    assert sampling(**{seed: [2**64 - 1], least: [2], "top_k": [5]}) == {
        "max_tokens": 5, "seed": 2**64 - 1, "min_tokens": 2, "top_k": 5,
    }  # fmt: skip


def test_two_names_for_one_parameter_are_rejected():
    assert rejection(seed=[1], random_seed=[1]) == "random_seed, seed: two names of one parameter; give one of them"


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


def test_errors_use_the_clients_tensor_names():
    core, text = ask(CORE).renamed, ask().renamed
    assert use_client_names(" max_tokens=5: must be 1..4", core) == " request_output_len=5: must be 1..4"
    assert use_client_names(" max_tokens=5: must be 1..4", text) == " max_tokens=5: must be 1..4"
    assert use_client_names(" other: max_tokens", core) == " other: max_tokens"
