"""Requests and outputs as JSON values."""

import json
import math
from dataclasses import fields, replace

import pytest

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.limits import EngineLimits, SamplingDefaults
from paged_backend.api.request import (
    Adapter,
    FinishReason,
    GenerateRequest,
    Progress,
    TokenDelta,
    Usage,
)
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.structures import STRUCTURE_PARAMETERS
from paged_backend.api.thinking import ThinkingBudget
from paged_backend.api.token_outputs import TokenLogprob, requested_outputs
from paged_backend.engine.request_frames import read_delta, read_request, write_delta, write_request
from paged_backend.utils.local_socket import FrameError
from tests.support.in_process import byte_tokenizer

LIMITS = EngineLimits(
    max_model_len=200, vocab_size=320, num_pages=64, layout=BlockLayout(4), max_num_seqs=8,
    sampling_defaults=SamplingDefaults({"temperature": 0.3, "top_k": 7}),
)  # fmt: skip
TOKENIZER = byte_tokenizer()
PROMPT = [3, 4, 5]
APPLIED_ELSEWHERE = {"seed", "timeout_ms", "truncate_prompt_tokens", "word_bias", "bad_words", *STRUCTURE_PARAMETERS}
NOT_SENT = {"prefill_only"}  # such requests end with their prompt, and do not move
VALUES = {  # a value other than the default for each parameter that is sent
    "max_tokens": 50, "min_tokens": 3, "temperature": 0.5, "top_k": 9, "top_p": 0.8, "min_p": 0.1,
    "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "stop": ["ab", "c"],
    "stop_token_ids": [5, 6], "stop_words_token_ids": [[1, 2], [3]], "ignore_eos": True,
    "include_stop_str_in_output": True, "logit_bias": {"7": 1.5, "9": -100}, "bad_words_token_ids": [[8], [9, 10]],
    "allowed_token_ids": [1, 2, 3, 4, 77], "logprobs": 3, "prompt_logprobs": 2, "echo": True, "logits_digest": True,
    "skip_special_tokens": False, "n": 2, "best_of": 3, "add_special_tokens": False, "priority": -3,
    "cache_salt": "tenant", "lora_name": "adapter", "thinking_token_budget": 12,
}  # fmt: skip
BEAMS = {"beam_width": 4, "length_penalty": 0.5, "early_stopping": "never", "stop": ["zz"], "max_tokens": 9}


def request(key=1, **sampling):
    params = SamplingParams.parse(sampling, LIMITS)
    budget = params.thinking_token_budget
    thinking = None if budget is None else ThinkingBudget(budget, (60, 61), (1, 77))
    one = GenerateRequest.from_prompt(key, PROMPT, params, 11, frozenset([256]), LIMITS, ((8,), (9, 10)), thinking)
    return replace(one, token_outputs=requested_outputs(["logprobs"], params))


def sent(one, key=2, limits=LIMITS):
    return read_request(json.loads(json.dumps(write_request(one))), key, limits, TOKENIZER)


def test_every_sampling_parameter_is_sent():
    named = {spec.name for spec in fields(SamplingParams)} - APPLIED_ELSEWHERE - NOT_SENT
    assert named == set(VALUES) | set(BEAMS)
    for values in (VALUES, BEAMS):
        one = request(**values)
        for name in values:
            assert getattr(one.sampling, name) != SamplingParams.__dataclass_fields__[name].default, name
        assert replace(sent(one), ends=None) == replace(one, key=2, ends=None)


def test_defaults_of_the_model_are_not_applied_twice():
    one = request(temperature=1.0, top_k=0, max_tokens=5)
    assert sent(one).sampling == one.sampling


def test_stop_strings_of_a_beam_search_are_checked():
    ends = sent(request(**BEAMS)).ends
    assert ends(TOKENIZER.encode("azz")) and not ends(TOKENIZER.encode("az"))


def test_structure_is_sent_with_its_field():
    one = request(structured_outputs={"regex": "a+"}, max_tokens=5)
    assert sent(one).sampling.structure == one.sampling.structure
    assert sent(one).sampling.structure.field == "structured_outputs.regex"


def test_progress_is_sent():
    progress = Progress(((1, 2), None), True, Usage(*range(7), 8, 9), b"\1\2")
    one = replace(request(n=2, max_tokens=5), progress=progress, adapter=Adapter("x", b"\1\2", 1, {}))
    assert sent(one).progress == progress
    assert sent(replace(one, adapter=None)).progress == replace(progress, adapter=b"")


@pytest.mark.parametrize(
    ("limits", "field"),
    [({"max_model_len": 20}, "max_tokens"), ({"num_pages": 2}, "max_tokens"), ({"vocab_size": 100}, "allowed")],
)
def test_request_that_this_engine_cannot_run_is_rejected(limits, field):
    sampling = {"max_tokens": 30} | ({"allowed_token_ids": [150]} if field == "allowed" else {})
    with pytest.raises(RequestError, match=field) as caught:
        sent(request(**sampling), limits=replace(LIMITS, **limits))
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": []},
        {"prompt": [1, True]},
        {"prompt": "abc"},
        {"sampling": None},
        {"stop_ids": [1.5]},
        {"seed": "1"},
        {"returns_usage": 1},
        {"bad_words": [1]},
        {"marks": [[1], [2]]},
        {"sampling": {"max_tokens": 5, "thinking_token_budget": 1}},
        {"sampling": {"max_tokens": 5, "thinking_token_budget": 1}, "marks": [[1], []]},
        {"sampling": {"max_tokens": 5, "thinking_token_budget": 1}, "marks": [[1], ["2"]]},
        {"sampling": {"max_tokens": 5, "thinking_token_budget": 1}, "marks": [[1]]},
        {"token_outputs": None},
        {"token_outputs": {"logprobs": "1"}},
        {"token_outputs": {"unknown": 1}},
        {"structure": ["regex", "a"]},
        {"structure": ["shell", "a", "regex"]},
        {"progress": [[[1]], True]},
        {"progress": [[[1], [2]], True, None]},
        {"progress": [[None], True, None]},
        {"progress": [[[1, 2, 3, 4, 5]], True, None]},
        {"progress": [[[1]], True, [1]]},
        {"progress": [[[1]], True, None], "adapter": "xy"},
    ],
)
def test_malformed_request_is_an_error_of_the_frame(change):
    values = json.loads(json.dumps(write_request(request(max_tokens=5)))) | change
    with pytest.raises(FrameError):
        read_request(values, 1, LIMITS, TOKENIZER)


def test_tokens_outside_the_vocabulary_are_rejected():
    values = json.loads(json.dumps(write_request(request(max_tokens=5))))
    for change in ({"prompt": [320]}, {"prompt": [-1]}, {"progress": [[[320]], False, None]}):
        with pytest.raises(RequestError, match=r"must be 0\.\.319"):
            read_request(values | change, 1, LIMITS, TOKENIZER)


def test_outputs_are_sent():
    rows = ((TokenLogprob(5, -0.25, 1), TokenLogprob(7, -math.inf, 2)),)
    prints, logprobs = (bytes(16), bytes(range(16))), {"logprobs": rows}
    deltas = [
        TokenDelta(4, (5, 6), sample=2),
        TokenDelta(4, (5,), FinishReason.STOP, usage=Usage(*range(7)), values=logprobs, prompt_values=logprobs),
        TokenDelta(4, prompt_values={"logprobs": ()}),
        TokenDelta(4, (5, 6), values={"fingerprints": prints}),
        TokenDelta(4, prompt_values=logprobs | {"fingerprints": prints[:1]}),
    ]
    for delta in deltas:
        assert read_delta(json.loads(json.dumps(write_delta(9, delta))), {9: 4}.__getitem__) == delta
    failed = TokenDelta(4, error=RequestError(ErrorCode.UNAVAILABLE, "later"))
    error = read_delta(json.loads(json.dumps(write_delta(9, failed))), {9: 4}.__getitem__).error
    assert error.code is ErrorCode.UNAVAILABLE and str(error) == "UNAVAILABLE: later"


@pytest.mark.parametrize(
    "values",
    [
        {"id": 9},
        {"id": 8, "tokens": []},
        {"id": 9, "tokens": ["1"]},
        {"id": 9, "tokens": [], "finish": "bored"},
        {"id": 9, "tokens": [], "error": ["UNKNOWN", "x"]},
        {"id": 9, "tokens": [], "sample": "0"},
        {"id": 9, "tokens": [], "usage": {}},
        {"id": 9, "tokens": [], "values": {"logprobs": [[1]]}},
        {"id": 9, "tokens": [], "values": {"unknown": []}},
        {"id": 9, "tokens": [], "prompt_values": 1},
        {"id": 9, "tokens": [1], "values": {"fingerprints": "0011"}},
        {"id": 9, "tokens": [1], "values": {"fingerprints": 5}},
        {"id": 9, "tokens": [], "prompt_values": {"fingerprints": "xy"}},
    ],
)
def test_malformed_output_is_an_error_of_the_frame(values):
    with pytest.raises(FrameError):
        read_delta(values, {9: 4}.__getitem__)
