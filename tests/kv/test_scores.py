"""The values of a block are returned as they were stored, with as many top tokens as are wanted."""

import pytest

from paged_backend.api.token_outputs import FINGERPRINTS, LOGPROBS, TokenLogprob
from paged_backend.kv.content import BlockScores

LOGITS = [3.0, 5.0, 5.0, 1.0, 4.0, 5.0, -2.0]  # of seven tokens, three of which are equally likely
PRINTS = [bytes([row]) * 16 for row in range(7)]


def row(chosen, num_top):
    """Return the entries of a token, as the sampler does."""
    entries = [
        TokenLogprob(token, one / 8, 1 + sum(other > one for other in LOGITS)) for token, one in enumerate(LOGITS)
    ]
    top = sorted(entries, key=lambda entry: (-entry.logprob, entry.token))[:num_top]
    return entries[chosen], *(entry for entry in top if entry.token != chosen)


def scores(num_top, *, digest=False):
    values = {"logprobs": [row(chosen, num_top) for chosen in range(7)], "fingerprints": PRINTS}
    return BlockScores.of(wanted(num_top, digest=digest), values)


def wanted(num_top, *, digest=False):
    return {"logprobs": num_top} | ({"fingerprints": 0} if digest else {})


@pytest.mark.parametrize("num_top", range(8))
@pytest.mark.parametrize("stored", range(8))
def test_fewer_top_tokens_are_those_of_a_request_for_fewer(stored, num_top):
    """Whether the chosen token is among them or not, and with equal log probabilities."""
    if num_top <= stored:
        found = scores(stored).values(wanted(num_top))
        assert found == {"logprobs": [row(chosen, num_top) for chosen in range(7)]}
    assert scores(stored).cover(wanted(num_top)) == (num_top <= stored)


def test_values_are_those_of_float32_and_large_ids():
    entry = TokenLogprob(2**31 - 1, -3.4028234663852886e38, 256_000)
    assert BlockScores.of({"logprobs": 0}, {"logprobs": [(entry,)]}).values({"logprobs": 0}) == {"logprobs": [(entry,)]}


def test_fingerprints_are_returned():
    assert scores(1, digest=True).values({"fingerprints": 0}) == {"fingerprints": PRINTS}
    assert scores(1, digest=True).cover(wanted(1, digest=True))
    assert not scores(1).cover(wanted(1, digest=True))


def test_merged_scores_cover_both():
    many, prints = scores(5), scores(2, digest=True)
    for merged in (many.merged(prints), prints.merged(many)):
        assert merged.cover(wanted(5, digest=True))
        assert merged.values(wanted(5, digest=True)) == many.values(wanted(5)) | {"fingerprints": PRINTS}
    assert many.merged(None).values(wanted(5)) == many.merged(scores(3)).values(wanted(5)) == many.values(wanted(5))
    assert scores(3).merged(many).values(wanted(5)) == many.values(wanted(5))


def test_values_are_packed():
    """12 bytes an entry and 16 a fingerprint."""
    _, *arrays = LOGPROBS.pack([row(chosen, 3) for chosen in range(7)])
    assert sum(len(one) * one.itemsize for one in arrays) <= 12 * 7 * (3 + 1)
    assert FINGERPRINTS.pack(PRINTS) == b"".join(PRINTS)
