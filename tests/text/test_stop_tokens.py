"""Stop words and bad words of token ids, and stop reasons."""

import json

import pytest

from tests.support.callers import serving
from tests.support.in_process import byte_tokenizer

TOKENIZER = byte_tokenizer()
IDS = TOKENIZER.encode("The sea")
RETURNED = {"return_token_ids": True, "return_num_output_tokens": True, "return_stop_reason": True}
RETURNED |= {"return_finish_reason": True, "return_logprobs": True}


@pytest.fixture(scope="module")
def service(tiny):
    with serving(tiny[0]) as running:
        yield running


def asked(**values):
    values = {"max_tokens": 24, "ignore_eos": True, "temperature": 1.0, "seed": 1, "logprobs": 0} | values
    return {"input_ids": IDS, "sampling_parameters": json.dumps(values), **RETURNED}


def ids_of(responses):
    return [token for one in responses for token in one["token_ids"]]


def first_at(word, ids):
    """Return where the first of the words in `ids` ends."""
    return next(end for end in range(len(word), len(ids) + 1) if ids[end - len(word) : end] == word)


@pytest.fixture(scope="module")
def free(service):
    return service.ask(**asked())["token_ids"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_word_ends_the_output_and_is_part_of_it(service, free, stream, length):
    word = free[8 : 8 + length]
    words = [[*word, (free[8 + length] + 1) % 320], [0] * 9, word]
    responses = service.call(**asked(stop_words_token_ids=words), stream=stream).all()
    assert ids_of(responses) == free[: first_at(word, free)]
    assert responses[-1]["finish_reason"] == [b"stop"]
    assert responses[-1]["stop_reason"] == [json.dumps(word).encode()]
    logprobs = [one for response in responses for one in json.loads(response["logprobs"][0])]
    assert len(logprobs) == len(ids_of(responses))
    text = b"".join(one["text_output"][0] for one in responses).decode()
    assert text == TOKENIZER.decode([*IDS, *ids_of(responses)], skip_special_tokens=True)[7:].rstrip("\ufffd")


def test_each_sample_ends_at_its_own_stop_word(service):
    free = service.ask(**asked(n=3))["token_ids"]
    word = free[24 + 5 : 24 + 7]  # of the second sample
    outputs = service.ask(**asked(n=3, stop_words_token_ids=[word]))
    counts = outputs["num_output_tokens"]
    expected = [free[24 * i : 24 * (i + 1)] for i in range(3)]
    ends = [first_at(word, one) if word in [one[i : i + 2] for i in range(23)] else 24 for one in expected]
    assert counts == ends
    assert outputs["finish_reason"][1] == b"stop"


def test_beams_end_at_their_own_stop_words(service):
    beams = {"beam_width": 2, "n": 2, "temperature": 0, "seed": None, "max_tokens": 10}
    free = service.ask(**asked(**beams))["token_ids"]
    outputs = service.ask(**asked(**beams, stop_words_token_ids=[free[4:6]]))
    assert outputs["num_output_tokens"][0] == first_at(free[4:6], free)
    assert outputs["stop_reason"][0] == json.dumps(free[4:6]).encode()


def test_no_stop_word_before_min_tokens(service, free):
    word = free[2:4]
    outputs = service.ask(**asked(stop_words_token_ids=[word], min_tokens=10))
    assert len(outputs["token_ids"]) > 10
    assert outputs["token_ids"][:10] == free[:10]


def test_the_first_match_ends_the_output(service, free):
    """The stop string is before the stop word, although one token completes both."""
    text = TOKENIZER.decode(free)
    char = next(one for one in text[2:] if one.isascii())
    outputs = service.ask(**asked(stop=char, stop_words_token_ids=[free[20:22]]))
    assert outputs["stop_reason"] == [char.encode()]
    outputs = service.ask(**asked(stop=["\x00never"], stop_words_token_ids=[free[10:12]]))
    assert outputs["token_ids"] == free[: first_at(free[10:12], free)]


def test_stop_reasons(service, free):
    def reasons(**values):
        outputs = service.ask(**asked(**values))
        return outputs["finish_reason"][0].decode(), outputs["stop_reason"][0].decode()

    eos = TOKENIZER.eos_token_id
    assert reasons() == ("length", "None")
    assert reasons(stop_token_ids=[free[4]]) == ("stop", str(free[4]))
    assert reasons(ignore_eos=False, logit_bias={str(eos): 100}) == ("stop", "None")
    assert reasons(ignore_eos=False, stop_token_ids=[eos], logit_bias={str(eos): 100}) == ("stop", "None")
    assert reasons(stop_token_ids=[eos], logit_bias={str(eos): 100}) == ("stop", str(eos))
    ends = service.call(**asked(stop_token_ids=[free[4]]), stream=True).all()
    assert {one["stop_reason"][0] for one in ends[:-1]} <= {b"None"}


def test_bad_words_are_not_generated(service, free):
    one, two = free[5], free[9:11]
    outputs = service.ask(**asked(bad_words_token_ids=[[one], two], logit_bias={str(one): 100}))
    ids = outputs["token_ids"]
    assert one not in ids
    assert two not in [ids[start : start + 2] for start in range(len(ids) - 1)]
    both = service.ask(**asked(bad_words_token_ids=[[one]], bad_words=[TOKENIZER.decode([65])], temperature=0))
    assert not {one, 65} & set(both["token_ids"])


@pytest.mark.parametrize("name", ["stop_words_token_ids", "bad_words_token_ids"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], "=[1, 2]: must be a list of lists of token ids"),
        ("1", '="1": must be a list of lists'),
        ([[]], '="0 ids": must be 1..64 ids a word'),
        ([[1] * 65], '="65 ids": must be 1..64 ids a word'),
        ([[1]] * 1025, '="1025 words": must be at most 1024 words'),
        ([[320]], "=320: must be 0..319"),
    ],
)
def test_invalid_stop_words_are_rejected_by_name(service, name, value, message):
    assert name + message in service.call(**asked(**{name: value})).rejection()
