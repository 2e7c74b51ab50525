"""Token ids as prompts and outputs, and text offsets."""

import json

import pytest

from tests.support.callers import Caller, serving
from tests.support.in_process import byte_tokenizer

TOKENIZER = byte_tokenizer()
TEXT = "The sea, é"
IDS = TOKENIZER.encode(TEXT)
RETURNED = {"return_token_ids": True, "return_text_offsets": True, "return_num_output_tokens": True}


@pytest.fixture(scope="module")
def service(tiny):
    with serving(tiny[0]) as running:
        yield running


def sampling(**values):
    """Use a few byte tokens only, so that most are whole characters and some are cut."""
    return json.dumps({"max_tokens": 30, "ignore_eos": True, "temperature": 1.0, "seed": 1} | values)


def per_sample(outputs, name):
    left = iter(outputs[name])
    return [[next(left) for _ in range(count)] for count in outputs["num_output_tokens"]]


def test_a_token_id_prompt_equals_the_text_prompt(service):
    given = service.ask(text_input=TEXT, exclude_input_in_output=True, sampling_parameters=sampling(), **RETURNED)
    assert service.ask(input_ids=IDS, sampling_parameters=sampling(), **RETURNED) == given
    assert given["prompt_token_ids"] == IDS
    assert len(given["token_ids"]) == 30


def test_text_matches_the_token_ids(service):
    outputs = service.ask(input_ids=IDS, sampling_parameters=sampling(seed=3, n=2), **RETURNED)
    for text, ids, offsets in zip(
        outputs["text_output"], per_sample(outputs, "token_ids"), per_sample(outputs, "text_offsets"), strict=True
    ):
        assert TOKENIZER.decode([*IDS, *ids])[len(TEXT) :].rstrip("\ufffd") == text.decode()
        assert offsets == sorted(offsets)
        assert all(
            text.decode()[offset:].startswith(TOKENIZER.decode([token]))
            for token, offset in zip(ids, offsets, strict=True)
            if TOKENIZER.decode([token]).isascii() and token != TOKENIZER.eos_token_id
        )


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_pieces_add_up_to_the_whole(service, n):
    asked = {"input_ids": IDS, "sampling_parameters": sampling(n=n), **RETURNED}
    whole = service.ask(**asked)
    pieces = service.call(**asked, stream=True).all()
    assert len(pieces) > 1
    for name in ("token_ids", "text_offsets"):
        parts = [per_sample(piece, name) for piece in pieces]
        assert [[one for part in parts for one in part[index]] for index in range(n)] == per_sample(whole, name)
    assert ["prompt_token_ids" in piece for piece in pieces] == [True] + [False] * (len(pieces) - 1)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_tokens_are_returned_and_their_text_is_not(service, include, stream):
    free = service.ask(input_ids=IDS, sampling_parameters=sampling(), **RETURNED)
    text = free["text_output"][0].decode()
    start = next(index for index in range(5, len(text) - 2) if text[index : index + 2].isascii())
    stop = text[start : start + 2]
    start = text.index(stop)
    limited = sampling(stop=stop, include_stop_str_in_output=include)
    pieces = service.call(input_ids=IDS, sampling_parameters=limited, stream=stream, **RETURNED).all()
    said = b"".join(piece["text_output"][0] for piece in pieces).decode()
    ids = [token for piece in pieces for token in piece["token_ids"]]
    offsets = [offset for piece in pieces for offset in piece["text_offsets"]]
    assert said == text[: start + 2 * include]
    assert TOKENIZER.decode(ids).endswith(stop)
    assert ids == free["token_ids"][: len(ids)]
    assert offsets == free["text_offsets"][: len(ids)]
    assert start in offsets
    assert offsets[-1] == start + 1


def test_the_stop_token_offset_is_the_end_of_the_text(service):
    free = service.ask(input_ids=IDS, sampling_parameters=sampling(), **RETURNED)
    end = free["token_ids"][9]
    count = free["token_ids"].index(end) + 1
    stopped = service.ask(input_ids=IDS, sampling_parameters=sampling(stop_token_ids=[end]), **RETURNED)
    assert stopped["token_ids"] == free["token_ids"][:count]
    assert stopped["text_offsets"][:-1] == free["text_offsets"][: count - 1]
    assert stopped["text_offsets"][-1] == len(stopped["text_output"][0].decode())


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_in_the_ids_with_or_without_their_text(service, skip):
    """At a high temperature, one of the samples generates the end of sequence."""
    hot = {"temperature": 100, "skip_special_tokens": skip, "n": 4}
    answers = (
        service.ask(input_ids=IDS, sampling_parameters=sampling(**hot | {"seed": seed}), **RETURNED)
        for seed in range(0, 100, 4)
    )
    outputs = next(one for one in answers if TOKENIZER.eos_token_id in one["token_ids"])
    assert (b"<|end|>" in b"".join(outputs["text_output"])) != skip


def test_offsets_include_an_echoed_prompt(service):
    asked = {"sampling_parameters": sampling(), **RETURNED}
    without = service.ask(input_ids=IDS, **asked)
    for prompt in ({"text_input": TEXT}, {"input_ids": IDS, "exclude_input_in_output": False}):
        outputs = service.ask(**prompt, **asked)
        assert outputs["text_output"] == [TEXT.encode() + without["text_output"][0]]
        assert outputs["text_offsets"] == [len(TEXT) + offset for offset in without["text_offsets"]]


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([], "input_ids: the prompt is empty; give at least one token"),
        ([1, 320], "input_ids[1]=320: must be 0..319"),
        ([-1], "input_ids[0]=-1: must be 0..319"),
        ([1] * 256, "prompt_tokens=256: must be 1..255"),
    ],
)
def test_invalid_input_ids_are_rejected(service, ids, reason):
    assert reason in service.call(input_ids=ids).rejection()


def test_a_session_with_token_id_prompts(service):
    asked = {"sampling_parameters": sampling(max_tokens=4), **RETURNED}

    def turn(ids, flags):
        caller = Caller(input_ids=ids, **asked)
        caller.correlation_id, caller.flags = lambda: 7, lambda: flags
        service.service.submit(caller)
        (outputs,) = caller.all()
        return outputs

    first, second = turn(IDS, 1), turn([5, 6], 2)
    assert second["prompt_token_ids"] == [*IDS, *first["token_ids"], 5, 6]


def test_truncation_keeps_the_last_prompt_tokens(service):
    kept = service.ask(input_ids=IDS[-4:], sampling_parameters=sampling(), **RETURNED)
    cut = sampling(truncate_prompt_tokens=4)
    for prompt in ({"input_ids": IDS}, {"text_input": TEXT, "exclude_input_in_output": True}, {"input_ids": IDS[-4:]}):
        assert service.ask(**prompt, sampling_parameters=cut, **RETURNED) == kept
    long = service.ask(input_ids=[1] * 1000 + IDS[-4:], sampling_parameters=cut, **RETURNED)
    assert long["prompt_token_ids"] == IDS[-4:]


def test_a_truncated_prompt_is_echoed_truncated(service):
    cut = sampling(truncate_prompt_tokens=3)
    answer = service.ask(text_input=TEXT, sampling_parameters=cut, **RETURNED)
    assert answer["text_output"][0].decode().startswith(" é")
    assert answer["text_offsets"][0] == 2


def test_a_session_rejects_truncation(service):
    caller = Caller(input_ids=IDS, sampling_parameters=sampling(truncate_prompt_tokens=3))
    caller.correlation_id, caller.flags = lambda: 8, lambda: 3
    service.service.submit(caller)
    assert "truncate_prompt_tokens=3: a session keeps all of its prompt" in caller.rejection()


@pytest.fixture(scope="module")
def beginning(tiny, tmp_path_factory):
    """A model whose tokenizer puts a special token before text."""
    from tokenizers.processors import TemplateProcessing

    directory, tokenizer = tmp_path_factory.mktemp("tokenizer"), byte_tokenizer()
    own = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = own
    tokenizer.save_pretrained(directory)
    with serving(tiny[0], tokenizer=str(directory)) as running:
        yield running


def test_add_special_tokens(beginning):
    end = TOKENIZER.eos_token_id
    for prompt, given, expected in (
        ({"text_input": TEXT}, {}, [end, *IDS]),
        ({"text_input": TEXT}, {"add_special_tokens": False}, IDS),
        ({"input_ids": IDS}, {}, IDS),
        ({"text_input": TEXT}, {"truncate_prompt_tokens": 2}, IDS[-2:]),
    ):
        answer = beginning.ask(**prompt, sampling_parameters=sampling(**given), **RETURNED)
        assert answer["prompt_token_ids"] == expected


def test_max_tokens_defaults_to_the_remaining_context(service):
    free = sampling(max_tokens=None, temperature=0)
    answer = service.ask(input_ids=IDS, sampling_parameters=free, return_finish_reason=True, **RETURNED)
    assert answer["num_output_tokens"] == [256 - len(IDS)]
    assert answer["finish_reason"] == [b"length"]
