"""Stop strings and stop words end beams as they do in transformers."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from tests.support.callers import serving

PROMPTS = ["one, two", "The quick brown fox"]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny[0])


@pytest.fixture(scope="module")
def calls(tiny):
    with serving(tiny[0], num_gpu_blocks_override=256) as calls:
        yield calls


def search(calls, prompt, width, **sampling):
    """Return the tokens and texts of all beams."""
    sampling = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "beam_width": width, "n": width} | sampling
    outputs = calls.ask(
        text_input=prompt, sampling_parameters=json.dumps(sampling), return_token_ids=True,
        exclude_input_in_output=True, return_num_output_tokens=True, return_finish_reason=True,
        return_cumulative_logprob=True,
    )  # fmt: skip
    tokens = iter(outputs["token_ids"])
    split = [[next(tokens) for _ in range(count)] for count in outputs["num_output_tokens"]]
    return split, [text.decode() for text in outputs["text_output"]], outputs


def expected(tiny, tokenizer, prompt, width, **options):
    model = tiny[1]
    model.generation_config.eos_token_id = None
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0,
        num_beams=width, num_return_sequences=width, tokenizer=tokenizer, **options,
    )  # fmt: skip
    outputs = [one[ids.shape[1] :].tolist() for one in found]
    return [[token for token in one if token >= 0] for one in outputs]  # padded with -1


@pytest.mark.parametrize("options", [{}, {"length_penalty": 0.0}, {"early_stopping": True}], ids=str)
@pytest.mark.parametrize("width", [2, 4])
def test_beams_with_stop_strings_match_transformers(tiny, tokenizer, calls, width, options):
    """Use frequent stop strings: one character, and two that the output contains without them."""
    ended = 0
    for prompt in PROMPTS:
        free, _, _ = search(calls, prompt, width, **options)
        pairs = [tokenizer.decode(tokens[at : at + 2]) for tokens in free for at in range(2, MAX_TOKENS - 2)]
        pairs = [pair for pair in dict.fromkeys(pairs) if len(pair) == 2 and pair.isascii()]
        for stops in (list("aeimquyAEIMQUY.,"), pairs[:4]):
            if not stops:
                continue
            right = expected(tiny, tokenizer, prompt, width, stop_strings=stops, **options)
            tokens, texts, outputs = search(calls, prompt, width, stop=stops, **options)
            assert tokens == right, stops
            for one, text, reason in zip(tokens, texts, outputs["finish_reason"], strict=True):
                stopped = any(stop in tokenizer.decode(one) for stop in stops)
                assert reason == (b"stop" if stopped else b"length")
                assert not any(stop in text for stop in stops)
                ended += stopped
    assert ended > 2


def test_a_stop_word_ends_a_beam_at_its_last_token(calls):
    """If the first token of the word is forced, the word is equivalent to a stop token."""
    (free, *_), _, _ = search(calls, PROMPTS[0], 3)
    word = free[4:6]
    tokens, _, outputs = search(calls, PROMPTS[0], 3, stop_words_token_ids=[word], length_penalty=0.0)
    assert all(one[-2:] == word or len(one) == MAX_TOKENS for one in tokens)
    assert any(one[-2:] == word for one in tokens)
    sums = outputs["cumulative_logprob"]
    assert sums == sorted(sums, reverse=True)


def test_no_stop_string_ends_a_beam_before_min_tokens(calls):
    tokens, _, _ = search(calls, PROMPTS[1], 3, stop=list("aeimquyAEIMQUY.,"), min_tokens=9)
    assert min(map(len, tokens)) > 9
