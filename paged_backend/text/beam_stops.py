"""Where beams end that stop strings, or words of several tokens, end: what the search itself has to know, since a beam
that has ended makes room for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paged_backend.api.sampling_params import SamplingParams
from paged_backend.text.detokenizer import CONTEXT, Detokenizer
from paged_backend.text.stop_tokens import StopTokens
from paged_backend.text.tokenizing import DecodeError

SLACK = 16  # tokens beside those of a stop string's bytes: some have no text


def ending(
    sampling: SamplingParams, prompt: Sequence[int], decode: Callable[[list[int]], str]
) -> Callable[[Sequence[int]], bool] | None:
    """Whether an output has ended with its last token, if no token before has ended it; None: none ever does so. For
    the engine's thread: a few microseconds, as only the end of the output is looked at."""
    words = StopTokens.of(sampling, frozenset())
    if not (sampling.stop or words.words):
        return None
    most = max((len(stop.encode()) for stop in sampling.stop), default=0) + SLACK

    def ends(tokens: Sequence[int]) -> bool:
        if words.find(tokens[:-1], tokens[-1:]):
            return True
        skipped = max(0, len(tokens) - most)
        before = [*prompt[-CONTEXT:], *tokens[max(0, skipped - CONTEXT) : skipped]]
        tail = list(tokens[skipped:])
        try:
            text = decode([*before, *tail])
            if not any(stop in text for stop in sampling.stop):
                return False
            least = max(0, sampling.min_tokens - skipped)
            output = Detokenizer(decode, before, stop=sampling.stop, min_tokens=least)
            output.push(tail)
        except DecodeError:  # the search goes on; whoever is to send this output tells its client
            return False
        return output.stopped

    return ends
