"""The log probabilities of a block are returned as they were stored, with as many top tokens as are wanted."""

import pytest

from paged_backend.api.request import TokenLogprob
from paged_backend.kv.scores import BlockScores

LOGITS = [3.0, 5.0, 5.0, 1.0, 4.0, 5.0, -2.0]  # of seven tokens, three of which are equally likely
PRINTS = [bytes([row]) * 16 for row in range(7)]


def row(chosen, num_top):
    """Return the entries of a token, as `LogprobsTensors` does."""
    entries = [
        TokenLogprob(token, one / 8, 1 + sum(other > one for other in LOGITS)) for token, one in enumerate(LOGITS)
    ]
    top = sorted(entries, key=lambda entry: (-entry.logprob, entry.token))[:num_top]
    return entries[chosen], *(entry for entry in top if entry.token != chosen)


def scores(num_top, *, digest=False):
    return BlockScores(num_top, [row(chosen, num_top) for chosen in range(7)], PRINTS * digest)


@pytest.mark.parametrize("wanted", range(8))
@pytest.mark.parametrize("stored", range(8))
def test_fewer_top_tokens_are_those_of_a_request_for_fewer(stored, wanted):
    """Whether the chosen token is among them or not, and with equal log probabilities."""
    if wanted <= stored:
        assert scores(stored).logprobs(wanted) == [row(chosen, wanted) for chosen in range(7)]
    assert scores(stored).covers(wanted, fingerprints=False) == (wanted <= stored)


def test_values_are_those_of_float32_and_large_ids():
    entry = TokenLogprob(2**31 - 1, -3.4028234663852886e38, 256_000)
    assert BlockScores(0, [(entry,)]).logprobs(0) == [(entry,)]


def test_fingerprints_are_returned():
    assert scores(1, digest=True).fingerprints == PRINTS
    assert scores(1).fingerprints == []
    assert scores(1, digest=True).covers(1, fingerprints=True)
    assert not scores(1).covers(1, fingerprints=True)


def test_merged_scores_cover_both():
    many, prints = scores(5), scores(2, digest=True)
    for merged in (many.merged(prints), prints.merged(many)):
        assert merged.covers(5, fingerprints=True)
        assert merged.logprobs(5) == many.logprobs(5) and merged.fingerprints == PRINTS
    assert many.merged(None) is many and many.merged(scores(3)) is many
    assert scores(3).merged(many).logprobs(5) == many.logprobs(5)


def test_memory_of_a_block_is_bounded():
    """12 bytes an entry and 16 a fingerprint."""
    full = scores(3, digest=True)
    arrays = sum(
        len(getattr(full, name)) * getattr(full, name).itemsize for name in ("_tokens", "_log_probs", "_ranks")
    )
    assert arrays <= 12 * 7 * (3 + 1) and len(full._fingerprints) == 16 * 7
