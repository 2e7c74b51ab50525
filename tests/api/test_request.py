"""Requests: limits of prompt and output, allowed tokens, and stop tokens."""

import pytest

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.errors import RequestError
from paged_backend.api.limits import EngineLimits
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams

LIMITS = EngineLimits(max_model_len=8192, vocab_size=1000, num_pages=256, layout=BlockLayout(16), max_num_seqs=64)


def admitted(bad_words=(), eos=(), **sampling):
    params = SamplingParams.parse(sampling, LIMITS)
    return GenerateRequest.from_prompt(0, [1], params, 0, frozenset(eos), LIMITS, bad_words)


def test_allowed_tokens_become_a_mask_of_32_bit_words():
    allowed = admitted(allowed_token_ids=[0, 33, 999]).allowed
    assert len(allowed) == 128
    assert [token for token in range(1024) if allowed[token // 8] >> token % 8 & 1] == [0, 33, 999]
    assert admitted().allowed is None


@pytest.mark.parametrize(
    "more",
    [{"bad_words": ((3,), (7, 4))}, {"stop_token_ids": [3, 4], "min_tokens": 1}, {"eos": [3, 4], "min_tokens": 2}],
)
def test_allowed_tokens_that_may_all_be_forbidden_are_rejected(more):
    with pytest.raises(RequestError, match=r"allowed_token_ids=\[3, 4\]: bad_words and min_tokens may forbid all"):
        admitted(allowed_token_ids=[3, 4], **more)
    admitted(allowed_token_ids=[3, 4, 5], **more)


def admit(prompt, max_tokens):
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest.from_prompt(0, [1] * prompt, sampling, 0, frozenset({2}), LIMITS)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "text"),
    [
        (0, 1, "text_input: the prompt is empty"),
        (8192, 1, "prompt_tokens=8192: must be 1..8191"),
        (8000, 193, "max_tokens=193: must be 1..192 after a prompt of 8000 tokens"),
        (4000, 98, "max_tokens=98: prompt and output need 257 blocks of the KV cache, which has 256"),
    ],
)
def test_a_request_that_can_never_fit_is_rejected(prompt, max_tokens, text):
    with pytest.raises(RequestError) as caught:
        admit(prompt, max_tokens)
    assert str(caught.value).startswith(f"INVALID_ARGUMENT: {text}")


def test_a_token_outside_the_vocabulary_is_rejected():
    with pytest.raises(RequestError, match=rf"holds token {LIMITS.vocab_size}, but the model's vocabulary ends at"):
        GenerateRequest.from_prompt(0, [1, LIMITS.vocab_size], SamplingParams(), 0, frozenset(), LIMITS)


def test_the_largest_request_that_fits_is_accepted():
    assert len(admit(4000, 97).prompt_token_ids) == 4000


@pytest.mark.parametrize(("ignore_eos", "stop_ids"), [(False, {2, 5}), (True, {5})])
def test_stop_ids_include_eos_unless_ignored(ignore_eos, stop_ids):
    sampling = SamplingParams.parse({"ignore_eos": ignore_eos, "stop_token_ids": [5]}, LIMITS)
    request = GenerateRequest.from_prompt(0, [1], sampling, 0, frozenset({2}), LIMITS)
    assert request.stop_ids == stop_ids


@pytest.mark.parametrize("sampling", [{}, {"n": 3}, {"beam_width": 4, "n": 2}], ids=str)
@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 1000, 4000])
def test_null_max_tokens_uses_all_the_room(prompt, sampling):
    params = SamplingParams.parse({"max_tokens": None} | sampling, LIMITS)
    room = GenerateRequest.from_prompt(0, [1] * prompt, params, 0, frozenset(), LIMITS).sampling.max_tokens
    given = [SamplingParams.parse({"max_tokens": count} | sampling, LIMITS) for count in (room, room + 1)]
    GenerateRequest.from_prompt(0, [1] * prompt, given[0], 0, frozenset(), LIMITS)
    with pytest.raises(RequestError, match=f"max_tokens={room + 1}: "):
        GenerateRequest.from_prompt(0, [1] * prompt, given[1], 0, frozenset(), LIMITS)


def test_min_tokens_above_the_available_room_is_rejected():
    params = SamplingParams.parse({"max_tokens": None, "min_tokens": 200}, LIMITS)
    with pytest.raises(RequestError, match=r"min_tokens=200: must be 0\.\.max_tokens=97"):
        GenerateRequest.from_prompt(0, [1] * 4000, params, 0, frozenset(), LIMITS)
