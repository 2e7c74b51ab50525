"""Incremental detokenization: whole characters, exact stop strings, and no lost text."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend.text.detokenizer import INCOMPLETE, Detokenizer
from tests.support.in_process import byte_tokenizer

TOKENIZER = byte_tokenizer()


def decode(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def encode(text):
    """Return the bytes of `text` as tokens, also where it spells a special token."""
    return TOKENIZER.encode(text, add_special_tokens=False, split_special_tokens=True)


def stream(text, **options):
    """Return the pieces that are released while `text` arrives byte by byte, and the flushed rest."""
    detokenizer = Detokenizer(decode, encode("prompt "), **options)
    pieces = []
    for token in encode(text):
        pieces.append(detokenizer.push([token]))
        if detokenizer.stopped:
            return pieces, detokenizer
    pieces.append(detokenizer.flush())
    return pieces, detokenizer


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40))
def test_text_is_complete_and_never_cut_inside_a_character(text):
    pieces, _ = stream(text)
    assert "".join(pieces) == text.rstrip(INCOMPLETE)
    if INCOMPLETE not in text:
        assert not any(INCOMPLETE in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 255), max_size=40), st.lists(st.integers(1, 12), min_size=1, max_size=8), st.sampled_from(
        [(), ("ab",), ("\x00",)]
    )
)  # fmt: skip
def test_batched_and_single_tokens_give_the_same_text(ids, sizes, stop):
    """Tries any bytes, valid or not, in groups of any size."""
    one, many = (Detokenizer(decode, encode("é"), stop=stop) for _ in range(2))
    singly = [one.push([token]) for token in ids if not one.stopped]
    at_once, rest = [], list(ids)
    for size in itertools.cycle(sizes):
        if not rest or many.stopped:
            break
        taken, rest = rest[:size], rest[size:]
        at_once.append(many.push(taken))
    assert "".join(at_once) == "".join(singly)
    assert (many.stopped, many.num_tokens) == (one.stopped, one.num_tokens)
    if not one.stopped:
        assert many.flush() == one.flush()


@settings(max_examples=500, deadline=None)
@given(
    st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3), st.booleans()
)
def test_a_stop_string_truncates_at_its_first_match(text, stops, include):
    """The reference checks the text after every character."""
    expected, stopped = text, False
    for end in range(1, len(text) + 1):
        found = [(text[:end].index(stop), len(stop)) for stop in stops if text[:end].endswith(stop)]
        if found:
            start, length = min(found)
            expected, stopped = text[: start + length] if include else text[:start], True
            break
    pieces, detokenizer = stream(text, stop=stops, include_stop=include)
    assert "".join(pieces) == expected
    assert detokenizer.stopped == stopped


@settings(max_examples=300, deadline=None)
@given(st.text("abé€🚀", max_size=20), st.integers(0, 9))
def test_every_byte_token_has_its_characters_offset(text, before):
    one, many = (Detokenizer(decode, encode("é"), record_offsets=True, prefix_chars=before) for _ in range(2))
    for token in encode(text):
        one.push([token])
    many.push(encode(text))
    own = [before + index for index, char in enumerate(text) for _ in char.encode()]
    assert one.offsets == many.offsets == own
    assert one.num_chars == before + len(text)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=30))
def test_a_character_after_invalid_bytes_has_its_own_offset(ids):
    detokenizer = Detokenizer(decode, [], record_offsets=True)
    text = detokenizer.push(ids) + detokenizer.flush()
    assert detokenizer.offsets == sorted(detokenizer.offsets)
    for token, offset in zip(ids, detokenizer.offsets, strict=True):
        if decode([token]).isascii():
            assert text[offset] == decode([token])


@pytest.mark.parametrize("at_once", [True, False])
def test_a_token_inside_a_character_has_that_characters_offset(at_once):
    """Its token is a space, or the end of another character, and the first bytes of the next character."""
    pieces = [b" \xe2", b"\x98", b"\x98\xf0\x9f", b"\x9a", b"\x80", b"ab \xf0", b"\x9f\x9a", b"\x80"]
    detokenizer = Detokenizer(
        lambda ids: b"".join(pieces[one] for one in ids).decode(errors="replace"), [], record_offsets=True
    )
    given = [range(len(pieces))] if at_once else [[one] for one in range(len(pieces))]
    assert "".join(detokenizer.push(tokens) for tokens in given) == " \u2618\U0001f680ab \U0001f680"
    assert detokenizer.offsets == [0, 1, 1, 2, 2, 3, 6, 6]


def test_offsets_refer_to_the_text_before_stop_truncation():
    detokenizer = Detokenizer(decode, [], stop=["cd"], record_offsets=True)
    assert detokenizer.push(encode("abcdef")) == "ab"
    assert detokenizer.offsets == [0, 1, 2, 3]


def test_a_possible_stop_string_is_held_back_and_released():
    detokenizer = Detokenizer(decode, [], stop=["END"])
    assert [detokenizer.push([token]) for token in encode("aENb")] == ["a", "", "", "ENb"]


def test_held_back_text_is_flushed():
    pieces, detokenizer = stream("aEN", stop=["END"])
    assert pieces == ["a", "", "", "EN"]
    assert not detokenizer.stopped


def test_no_stop_string_before_min_tokens():
    pieces, detokenizer = stream("xENDyEND", stop=["END"], min_tokens=5)
    assert "".join(pieces) == "xENDy"
    assert detokenizer.num_tokens == 8


@pytest.mark.parametrize("prompt", ["", "a", "prompt"])
def test_prompt_tokens_are_context_only(prompt):
    detokenizer = Detokenizer(decode, encode(prompt))
    assert "".join(detokenizer.push([token]) for token in encode("out")) + detokenizer.flush() == "out"


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_an_incomplete_final_character_is_dropped(missing):
    detokenizer = Detokenizer(decode, [])
    pieces = [detokenizer.push([token]) for token in encode("a🚀")[:-missing]]
    assert "".join([*pieces, detokenizer.flush()]) == "a"


@pytest.mark.parametrize("size", [1, 50, 2000])
@pytest.mark.parametrize(
    "ids", [encode("é")[:1], encode("\ufffd"), [TOKENIZER.eos_token_id]], ids=["cut", "whole", "end"]
)
def test_a_long_run_of_invalid_bytes_is_decoded_a_bounded_number_of_times(ids, size):
    decoded = []
    detokenizer = Detokenizer(lambda some: decoded.append(len(some)) or decode(some), encode("prompt"))
    run = [*encode("é")[:1], *ids * (2000 // len(ids))]
    pieces = [detokenizer.push(run[start : start + size]) for start in range(0, len(run), size)]
    pieces.append(detokenizer.push(encode("a")))
    assert "".join(pieces) == decode([*run, *encode("a")])
    assert sum(decoded) < 30 * len(run)
